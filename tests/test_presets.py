"""Presets of comparisons name what there is, and nothing that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlearn.allocation import read_shares
from kvlearn.errors import KvlearnError
from kvlearn.policies import POLICIES, resolve
from kvlearn.presets import preset
from kvlearn.shapes import Budget
from kvlearn.tasks import TASKS


def test_small_has_every_policy_that_a_name_makes_and_every_task() -> None:
    small = preset("small", "smollm2-135m")
    assert small.policies is not None
    (part,) = small.parts
    assert set(part.tasks) == set(TASKS)
    assert {"full", "oracle", "random", "expected-attention", "q-filters", "caote", "r-kv"} <= set(small.policies)
    left_out = set(POLICIES) - set(small.policies)
    assert left_out <= {"learned", "composed", "kvpress", "kvpress-decoding"}, "a policy is missing"
    assert "checkpoints/smollm2-135m" in small.policies, "the scorer that comes along for this model"
    assert len(part.budgets) == 2
    for budget in part.budgets:
        assert Budget.resolve(budget, 32).slots == budget
    for name in set(small.policies) - {"oracle"}:
        if "checkpoints" not in name:
            assert resolve(name).label == name


@pytest.mark.parametrize("model", ["somebody/else", "unknown", "FOLDER"])
def test_a_model_without_a_scorer_has_none(model: str, tmp_path: Path) -> None:
    small = preset("small", str(tmp_path) if model == "FOLDER" else model)
    assert small.policies is not None
    assert set(small.policies) <= set(POLICIES)


def test_evidence_has_every_policy_and_what_scorers_are_judged_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    evidence = preset("evidence", "smollm2-135m")
    assert evidence.policies is not None
    assert evidence.allocation == "pooled:checkpoints/smollm2-135m", "what the scorer that comes along recommends"
    assert len(read_shares("checkpoints/smollm2-135m")) == 30, "found wherever one is"
    assert preset("evidence", "unknown").allocation == "pooled"
    assert {"oracle", "protected-random", "g-kv", "checkpoints/smollm2-135m"} <= set(evidence.policies)
    assert "ema" in evidence.policies
    sizes = {(task, part.window): part.budgets for part in evidence.parts for task in part.tasks}
    assert sizes[("lm", 2048)] == (128, 256, 512)
    assert sizes[("lm", 8192)] == (512,)
    assert sizes[("passkey", 2048)] == (256,)
    assert {part.docs for part in evidence.parts if part.tasks == ("lm",)} == {24}


def test_options_narrow_a_preset_and_change_it() -> None:
    evidence = preset("evidence", "smollm2-135m")
    assert evidence.narrowed(None) == evidence.parts
    (retrieval,) = evidence.narrowed(["passkey"])
    assert (retrieval.tasks, retrieval.docs) == (("passkey",), evidence.parts[-1].docs)
    short, long = evidence.narrowed(["lm"], docs=2)
    assert (short.docs, short.window, long.docs, long.window) == (2, 2048, 2, 8192)
    assert [part.tasks for part in evidence.narrowed(["copy", "passkey"])] == [("copy",), ("passkey",)], "as the first"
    alike = evidence.narrowed(["lm"], window=1024, docs=2, budgets=(128,), batch=2)
    assert len(alike) == 1, "what has become the same is measured once"
    assert preset(None, "x").narrowed([])[0].tasks == (), "which the comparison refuses"


def test_without_a_preset_policies_must_be_named() -> None:
    assert preset(None, "smollm2-135m").policies is None
    with pytest.raises(KvlearnError, match="did you mean 'small'"):
        preset("smal", "smollm2-135m")
    with pytest.raises(KvlearnError, match="there are small and evidence"):
        preset("enormous", "smollm2-135m")

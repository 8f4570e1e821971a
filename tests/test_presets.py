"""Presets of comparisons name what there is, and nothing that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlearn.errors import KvlearnError
from kvlearn.policies import POLICIES, resolve
from kvlearn.presets import preset
from kvlearn.shapes import Budget
from kvlearn.tasks import TASKS


def test_small_has_every_policy_that_a_name_makes_and_every_task() -> None:
    small = preset("small", "smollm2-135m")
    assert small.policies is not None
    assert set(small.tasks) == set(TASKS)
    assert {"full", "oracle", "random", "expected-attention", "q-filters", "caote", "r-kv"} <= set(small.policies)
    left_out = set(POLICIES) - set(small.policies)
    assert left_out <= {"learned", "composed", "kvpress", "kvpress-decoding"}, "a policy is missing"
    assert "checkpoints/smollm2-135m" in small.policies, "the scorer that comes along for this model"
    assert len(small.budgets) == 2
    for budget in small.budgets:
        assert Budget.resolve(budget, 32).slots == budget
    for name in set(small.policies) - {"oracle"}:
        if "checkpoints" not in name:
            assert resolve(name).label == name


@pytest.mark.parametrize("model", ["somebody/else", "unknown", "FOLDER"])
def test_a_model_without_a_scorer_has_none(model: str, tmp_path: Path) -> None:
    small = preset("small", str(tmp_path) if model == "FOLDER" else model)
    assert small.policies is not None
    assert set(small.policies) <= set(POLICIES)


def test_without_a_preset_policies_must_be_named() -> None:
    assert preset(None, "smollm2-135m").policies is None
    with pytest.raises(KvlearnError, match="did you mean 'small'"):
        preset("smal", "smollm2-135m")
    with pytest.raises(KvlearnError, match="there is small"):
        preset("enormous", "smollm2-135m")

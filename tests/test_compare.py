"""Comparisons: rows that mean what they say, resumed without doing anything twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import repetitive_cases
from transformers import LlamaForCausalLM

from kvlearn import EvictingCache, enable
from kvlearn.compare import Comparison, Settings
from kvlearn.errors import KvlearnError
from kvlearn.rows import RowStore, loss, read_rows
from kvlearn.shapes import Protection
from kvlearn.tasks.base import Case, Measurement, Run, block_ends
from kvlearn.tasks.lm import LanguageModelling

SETTINGS = Settings(
    policies=("full", "random", "streaming", "ema", "oracle"),
    budgets=(32,),
    window=160,
    batch=2,
    block=8,
    protect=Protection(sinks=2),
)


@pytest.fixture
def loaded(tiny_llama: Callable[..., LlamaForCausalLM]) -> Any:
    return SimpleNamespace(model=enable(tiny_llama()), tokenizer=None, name="tiny")


@pytest.fixture
def cases() -> list[Case]:
    return repetitive_cases(40, 4)


def _compare(loaded: Any, cases: Sequence[Case], path: Path, settings: Settings = SETTINGS) -> list[dict[str, Any]]:
    with RowStore(path) as store:
        Comparison(loaded, settings, {"lm": cases}, store).run()
        return [row for row in store.rows if row["metric"] == "nll"]


def test_full_loses_nothing_and_slots_are_within_the_budget(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    rows = _compare(loaded, cases, tmp_path / "rows.jsonl")
    assert len(rows) == len(SETTINGS.policies) * len(cases)
    for row in rows:
        if row["policy"] == "full":
            assert abs(loss(row)) < 1e-4, "the full cache must not lose anything"
            assert row["slots"] == 160
        else:
            assert row["slots"] == 32, "every other policy holds exactly its budget"
        assert row["tokens"] == 160 - 32
        assert row["bytes"] > row["state_bytes"] >= 0


def test_the_oracle_takes_options_and_scoring_is_measured(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("oracle", "oracle:reduce=sum", "oracle:max", "ema", "full"))
    rows = _compare(loaded, cases, tmp_path / "rows.jsonl", settings)
    values = {name: [r["value"] for r in rows if r["policy"] == name] for name in settings.policies}
    assert values["oracle"] != values["oracle:reduce=sum"] != values["oracle:max"], "options change nothing"
    for row in rows:
        assert 0 <= row["scorer_share"] < 1
        assert (row["scorer_share"] > 0) == (row["policy"] != "full"), "what scores takes time"
    with pytest.raises(KvlearnError, match="'reduce' is 'least'"):
        _compare(loaded, cases, tmp_path / "other.jsonl", replace(SETTINGS, policies=("oracle:least",)))


def test_rows_do_not_depend_on_the_batch(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    together = _compare(loaded, cases, tmp_path / "a.jsonl")
    alone = _compare(loaded, cases, tmp_path / "b.jsonl", replace(SETTINGS, batch=1))
    values = {(r["policy"], r["doc"]): r["value"] for r in alone}
    for row in together:
        expected = pytest.approx(values[row["policy"], row["doc"]], abs=1e-4)
        assert row["value"] == expected, f"{row['policy']} on {row['doc']} depends on its neighbours in the batch"


def test_finished_rows_are_not_measured_again(
    loaded: Any, cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    first = _compare(loaded, cases, path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-10]) + "\n" + lines[-9][:20])  # killed while it wrote
    measured: list[int] = []
    original = LanguageModelling.measure

    def counting(self: LanguageModelling, run: Run, some: Sequence[Case], full: Any, budget: int) -> Any:
        measured.append(len(some))
        return original(self, run, some, full, budget)

    monkeypatch.setattr(LanguageModelling, "measure", counting)
    again = _compare(loaded, cases, path)
    assert measured, "rows were missing, so something had to be measured"
    assert len(measured) < len(SETTINGS.policies) * 2, "a resumed run measured everything again"
    key = ("policy", "doc", "value", "full_value")
    assert sorted([str([r[k] for k in key]) for r in again]) == sorted([str([r[k] for k in key]) for r in first])


def test_a_failing_cell_is_recorded_and_the_others_go_on(
    loaded: Any, cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlearn.policies.streaming import Streaming

    def broken(self: Streaming, slots: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Streaming, "score", broken)
    rows = _compare(loaded, cases, tmp_path / "rows.jsonl")
    failed = {r["policy"] for r in rows if r.get("error")}
    assert failed == {"streaming"}
    assert all("out of luck" in r["error"] for r in rows if r["policy"] == "streaming")


def test_feeding_by_blocks_is_feeding_token_by_token(loaded: Any, cases: list[Case]) -> None:
    ids = torch.stack([case.input_ids for case in cases])
    cache = EvictingCache(loaded.model, "ema", 32, block=8)
    run = Run(loaded.model, loaded.tokenizer, cache)
    logits = torch.cat([run.feed(ids[:, i : i + 1]) for i in range(ids.shape[1] - 1)], dim=1)
    nll = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    expected = nll[:, 31:].mean(1)
    cache = EvictingCache(loaded.model, "ema", 32, block=8)
    full = LanguageModelling().full(Run(loaded.model, None, EvictingCache(loaded.model)), cases)
    measured = LanguageModelling().measure(Run(loaded.model, loaded.tokenizer, cache), cases, full, 32)
    values = torch.tensor([m[0].value for m in measured])
    assert isinstance(measured[0][0], Measurement)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("length", "budgets", "block", "ends"),
    [
        (100, [32], 8, [32, 40, 48, 56, 64, 72, 80, 88, 96, 100]),
        (30, [40], 8, [30]),
        (64, [40, 20], 8, [16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_where_a_text_is_cut(length: int, budgets: list[int], block: int, ends: list[int]) -> None:
    assert block_ends(length, budgets, block) == ends


def test_layer_budgets_keep_the_total(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    (tmp_path / "shares.json").write_text("[1, 2]")
    for allocation, most in ((str(tmp_path / "shares.json"), 43), ("pyramid", 45)):
        settings = replace(SETTINGS, policies=("ema",), allocation=allocation)
        rows = _compare(loaded, cases, tmp_path / "rows.jsonl", settings)
        assert all(r["mean_slots"] == 32 and r["slots"] == most for r in rows if r["allocation"] == allocation)
    settings = replace(SETTINGS, policies=("ema",), allocation="pooled")
    rows = _compare(loaded, cases, tmp_path / "rows.jsonl", settings)
    pooled = [r for r in rows if r["allocation"] == "pooled"]
    assert all(r["mean_slots"] == pytest.approx(32) and r["slots"] > 32 for r in pooled), "some head holds more"
    of_one = [r for r in rows if r["metric"] == "nll"]
    assert len(of_one) == 3 * len(cases), "allocations are variants, side by side in one file"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ("ema", "ema")}, "twice"),
        ({"budgets": ()}, "empty"),
        ({"policies": ("emma",)}, "did you mean 'ema'"),
        ({"tasks": ("ml",)}, "did you mean 'lm'"),
        ({"budgets": (16,)}, "below the"),
        ({"budgets": (160,)}, "never fills"),
        ({"allocation": "nowhere.json"}, "cannot read an allocation from nowhere.json"),
    ],
)
def test_impossible_requests_are_refused(
    loaded: Any, cases: list[Case], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(KvlearnError, match=message):
        _compare(loaded, cases, tmp_path / "rows.jsonl", replace(SETTINGS, **change))


def test_the_first_document_tells_what_was_held(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    rows = _compare(loaded, cases, tmp_path / "rows.jsonl")
    told = [row for row in rows if "kept" in row]
    assert [row["policy"] for row in told] == list(SETTINGS.policies)
    assert {row["doc"] for row in told} == {"doc0"}
    kept = {row["policy"]: row["kept"] for row in told}
    assert all(one["tokens"] == 160 and one["seen"][-1] == 160 for one in kept.values())
    assert set(kept["full"]["lines"][-1]) == {"9"}, "the full cache holds everything"
    last = kept["streaming"]["lines"][-1]
    assert last.startswith("9")
    assert set(last.rstrip("9")[2:]) == {"0"}, "streaming holds the ends and nothing between"
    held = sum(int(digit) / 9 for digit in kept["ema"]["lines"][-1]) * 160 / 96
    assert held == pytest.approx(32, rel=0.2)


def test_blame_tries_policies_in_parts_beside_the_oracle(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("full", "random", "ema"), blame="layers:1")
    _compare(loaded, cases, tmp_path / "rows.jsonl", settings)
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if row["metric"] == "kl"]
    layers = len(loaded.model.model.layers)
    where = {f"layer {layer}" for layer in range(layers)}
    assert {r.get("blame") for r in rows if r["policy"] == "random"} == {None, *where}
    assert {r.get("blame") for r in rows if r["policy"] in ("full", "oracle")} == {None}, "a bound is blamed"

    def mean(policy: str, part: str | None) -> float:
        losses = [loss(r) for r in rows if r["policy"] == policy and r.get("blame") == part]
        assert len(losses) == len(cases), f"{policy} in {part} was not measured on every document"
        return sum(losses) / len(losses)

    parts = [mean("random", part) for part in where]
    assert mean("oracle", None) < sum(parts) / layers < mean("random", None), "one layer costs as much as all"


def test_a_blamed_part_that_is_everything_is_the_policy(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    layers = len(loaded.model.model.layers)
    rows = _compare(loaded, cases, tmp_path / "a.jsonl", replace(SETTINGS, policies=("ema",), blame=f"layers:{layers}"))
    values = {(r.get("blame"), r["doc"]): r["value"] for r in rows if r["policy"] == "ema"}
    for case in cases:
        assert values[f"layers 0-{layers - 1}", case.doc] == pytest.approx(values[None, case.doc], abs=1e-5)
    heads = _compare(loaded, cases, tmp_path / "b.jsonl", replace(SETTINGS, policies=("ema",), blame="heads"))
    found = {r["blame"]: r["value"] for r in heads if r.get("blame") and r["doc"] == "doc0"}
    assert list(found) == [f"head {h}" for h in range(loaded.model.config.num_key_value_heads)]
    assert len(set(found.values())) == len(found), "every head gives the same, so they were not told apart"


@pytest.mark.parametrize("blame", ["layer", "layers:", "layers:0", "layers:x", "heads:2"])
def test_parts_that_nobody_knows_are_refused(loaded: Any, cases: list[Case], tmp_path: Path, blame: str) -> None:
    with pytest.raises(KvlearnError, match=r"blame is|layers wide"):
        _compare(loaded, cases, tmp_path / "rows.jsonl", replace(SETTINGS, policies=("ema",), blame=blame))
    with pytest.raises(KvlearnError, match="share a pool"):
        replace(SETTINGS, blame="heads", allocation="pooled")

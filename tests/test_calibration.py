"""Calibrated allocations: measured once, resumed, with the total kept, and taken along by a scorer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import repetitive_cases
from transformers import LlamaForCausalLM

from kvlearn import EvictingCache, Scorer, enable
from kvlearn.allocation import layer_budgets, read_shares
from kvlearn.calibration import Calibration, calibrate, default_slots, scorer_for, write_allocation, write_into
from kvlearn.errors import KvlearnError
from kvlearn.shapes import Protection
from kvlearn.shortcut import Shortcut
from kvlearn.tasks.base import Case
from kvlearn.tasks.lm import LanguageModelling

SETTINGS = Calibration(
    "ema", 32, slots=(18, 40), width=1, window=96, batch=2, block=8, protect=Protection(sinks=2, recent=8)
)


@pytest.fixture
def loaded(tiny_llama: Callable[..., LlamaForCausalLM]) -> Any:
    return SimpleNamespace(model=enable(tiny_llama()), tokenizer=None, name="tiny")


@pytest.fixture
def cases() -> list[Case]:
    return repetitive_cases(32, 3)


def test_the_total_is_kept_and_costs_are_those_of_the_full_model(
    loaded: Any, cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = calibrate(loaded, SETTINGS, cases, tmp_path / "a.jsonl")
    layers = len(loaded.model.model.layers)
    assert sum(found["slots"]) == SETTINGS.budget * layers
    assert min(found["slots"]) >= SETTINGS.least
    assert sum(found["budgets"]) / layers == pytest.approx(1)
    assert found["cost"]["allocated"] <= found["cost"]["equal"] + 1e-12, "the shares cost more than equal ones"
    assert found["model"]["layers"] == layers
    assert [band["layers"] for band in found["bands"]] == [[layer] for layer in range(layers)]
    assert all(cost > 0 for band in found["bands"] for cost in band["cost"]), "bounding a layer costs something"

    # From the first layer on, without what an earlier run knows, the same costs come out.
    monkeypatch.setattr(Shortcut, "__init__", _without_layers)
    slowly = calibrate(loaded, SETTINGS, cases, tmp_path / "b.jsonl")
    for band, other in zip(found["bands"], slowly["bands"], strict=True):
        assert band["cost"] == pytest.approx(other["cost"], abs=2e-6), f"layers {band['layers']}"


def _without_layers(self: Shortcut, *_: Any) -> None:
    self.layers, self.starts, self._known = [], [], {}


def test_a_shortcut_leaves_the_model_as_it_was(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    ids = cases[0].input_ids[None]
    before = loaded.model(ids).logits
    calibrate(loaded, SETTINGS, cases[:1], tmp_path / "rows.jsonl")
    assert torch.equal(loaded.model(ids).logits, before), "layers are still skipped, or hooks still there"


def test_nothing_is_measured_twice_and_another_budget_needs_nothing(
    loaded: Any, cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    first = calibrate(loaded, SETTINGS, cases, path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while it wrote
    runs: list[int] = []
    original = LanguageModelling.measure

    def counting(self: LanguageModelling, run: Any, some: Any, full: Any, budget: int) -> Any:
        runs.append(len(some))
        return original(self, run, some, full, budget)

    monkeypatch.setattr(LanguageModelling, "measure", counting)
    assert calibrate(loaded, SETTINGS, cases, path)["slots"] == first["slots"]
    assert runs == [1], "one row was missing"
    other = calibrate(loaded, replace(SETTINGS, budget=48), cases, path)
    assert sum(other["slots"]) == 48 * len(first["slots"])
    calibrate(loaded, replace(SETTINGS, metric="nll"), cases, path)
    assert runs == [1], "what was measured already was measured again"


@pytest.mark.parametrize("heads", ["uniform", "pooled"])
def test_an_allocation_is_read_by_compare_and_travels_with_a_scorer(
    heads: Any, loaded: Any, cases: list[Case], tmp_path: Path
) -> None:
    folder = tmp_path / "scorer"
    Scorer.for_model(loaded.model, block=8).save_pretrained(folder)
    scorer = scorer_for(folder, loaded)
    settings = replace(SETTINGS, policy=str(folder), allocation=heads)
    found = calibrate(loaded, settings, cases, tmp_path / "rows.jsonl")
    write_allocation(tmp_path / "allocation.json", found)
    shares = read_shares(tmp_path / "allocation.json")
    assert layer_budgets(shares, SETTINGS.budget, least=SETTINGS.least) == found["slots"]
    write_into(scorer, folder, json.loads((tmp_path / "allocation.json").read_text()))
    again = Scorer.from_pretrained(folder)
    assert again.config.training["allocation"]["bands"], "the scorer does not say what its shares come from"
    cache = EvictingCache(loaded.model, again, SETTINGS.budget, protect=SETTINGS.protect, allocation="scorer")
    assert cache.options["budget"] == found["slots"]
    assert cache.options["allocation"] == heads, "heads share as they did when costs were measured"
    assert read_shares(folder) == pytest.approx(shares)


def test_a_scorer_of_another_model_is_refused(loaded: Any, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    Scorer.for_model(tiny_llama(num_hidden_layers=3), block=8).save_pretrained(tmp_path / "scorer")
    with pytest.raises(KvlearnError):
        scorer_for(tmp_path / "scorer", loaded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 8}, "below the"),
        ({"slots": (8, 40)}, "every layer needs 18 at least"),
        ({"window": 18}, "never fills"),
        ({"width": 0}, "width is 0"),
        ({"metric": "accuracy"}, "use 'kl' or 'nll'"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        replace(SETTINGS, **change)


def test_a_policy_that_evicts_nothing_is_refused(loaded: Any, cases: list[Case], tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match="nothing to calibrate"):
        calibrate(loaded, replace(SETTINGS, policy="full"), cases, tmp_path / "rows.jsonl")


def test_default_slots_are_a_few_from_the_least_to_half_the_window() -> None:
    assert default_slots(68, 2048) == (68, 168, 415, 1024)
    few = default_slots(68, 70)
    assert list(few) == sorted(set(few))
    assert few[0] == 68

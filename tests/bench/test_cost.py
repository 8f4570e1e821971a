"""The cost model against caches that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cache_helpers import scorer
from typer.testing import CliRunner

import kvlearn
from kvlearn.bench import layer
from kvlearn.bench.contenders import Case, Stock, fill
from kvlearn.bench.cost import MODELS, Model, Scoring, full, learned
from kvlearn.cli import app

TINY = Model("tiny", 1e4, layers=2, heads=4, kv_heads=2, dim=16, element=4)


def test_a_full_cache_is_as_large_as_the_stock_one(tiny_llama: Callable[..., Any]) -> None:
    stock = Stock(kvlearn.enable(tiny_llama()), "full", Case(50, 3), None)
    assert full(TINY, 50, 3).cache == stock.bytes


def test_a_learned_cache_is_as_large_as_its_slots(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama())
    own = scorer(model)
    cache = kvlearn.EvictingCache(model, own, 256)
    fill(cache, model, Case(1000, 3))
    layers = cache.evicting_layers()
    held = sum(t.nbytes for x in layers for t in (x.keys, x.values, x.state, x.static, x.pos))
    assert learned(TINY, 256, 3, Scoring(own.config.key_rank, own.config.hidden)).cache == held


def test_a_step_moves_the_same_at_any_context() -> None:
    for model in MODELS:
        at_budget = learned(model, 2048, 8)
        assert at_budget.moved < 1.06 * full(model, 2048, 8).moved, "upkeep is a few percent"
        assert full(model, 2**20, 8).moved > 3 * at_budget.moved
        assert full(model, 2**20, 8).operations > at_budget.operations


@pytest.mark.parametrize(("bandwidth", "shown"), [("3350", "Llama-3-70B | 1,048,576 | 8"), ("10", "SmolLM2-135M")])
def test_the_command_prints_a_table(bandwidth: str, shown: str) -> None:
    result = CliRunner().invoke(app, ["bench", "cost", "--bandwidth", bandwidth])
    assert result.exit_code == 0
    assert shown in result.output


def test_a_layer_is_timed_by_itself(tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_CONTEXT", 200)
    monkeypatch.setattr(layer, "_TURNS", 1)
    lines = layer.table(kvlearn.enable(tiny_llama()), ["streaming", "h2o"], [2], [64])
    assert [line[:3] for line in lines] == [[name, "2", "64"] for name in ("stock", "streaming", "h2o")]
    assert all(len(line) == len(layer.COLUMNS) and float(line[3].replace(",", "")) > 0 for line in lines)

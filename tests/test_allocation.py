"""Slots shared among layers: the total is kept, no layer falls below the least, order follows the shares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_helpers import feed, held, prompt
from hypothesis import given
from hypothesis import strategies as st

from kvlearn import EvictingCache, Scorer, enable
from kvlearn.allocation import layer_budgets, read_shares, split_pooled
from kvlearn.errors import KvlearnError


@given(
    shares=st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=40),
    budget=st.integers(64, 1024),
    least=st.integers(1, 64),
)
def test_the_total_is_kept_and_no_layer_falls_short(shares: list[float], budget: int, least: int) -> None:
    slots = layer_budgets(shares, budget, least=least)
    assert sum(slots) == budget * len(shares), "the total of slots changed"
    assert min(slots) >= least, "a layer cannot hold what is protected"
    order = sorted(range(len(shares)), key=shares.__getitem__)
    ranked = [slots[i] for i in order]
    assert all(a <= b + 1 for a, b in itertools.pairwise(ranked)), "a larger share got fewer slots"


def test_equal_shares_give_equal_slots() -> None:
    assert layer_budgets([3.0] * 5, 100, least=10) == [100] * 5


def test_shares_decide() -> None:
    assert layer_budgets([1.0, 3.0], 100, least=10) == [50, 150]
    assert layer_budgets([0.0001, 1.0], 100, least=30) == [30, 170], "the least comes first"


@pytest.mark.parametrize("shares", [[], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(KvlearnError, match="positive number per layer"):
        layer_budgets(shares, 100, least=10)


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(KvlearnError, match="below the 68"):
        layer_budgets([1.0], 64, least=68)


def test_shares_are_read_from_a_list_or_a_scorer(tmp_path: Path) -> None:
    (tmp_path / "shares.json").write_text("[1, 2.5]")
    assert read_shares(tmp_path / "shares.json") == [1.0, 2.5]
    (tmp_path / "config.json").write_text(json.dumps({"budgets": [0.5, 1.5]}))
    assert read_shares(tmp_path) == [0.5, 1.5]


@pytest.mark.parametrize("text", ["{}", '{"budgets": null}', '["a"]', "nonsense"])
def test_a_file_without_shares_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(KvlearnError, match=r"config\.json"):
        read_shares(tmp_path)


def test_a_scorers_shares_are_used_when_asked_for(tiny_llama: Callable[..., Any]) -> None:
    model = enable(tiny_llama())
    scorer = Scorer.for_model(model, block=4)
    layers = len(scorer.config.layers)
    shares = [1.5, 0.5, *[1.0] * (layers - 2)]
    with pytest.raises(KvlearnError, match="recommends no allocation"):
        EvictingCache(model, scorer, 32, allocation="scorer")
    scorer.config = replace(scorer.config, budgets=tuple(shares))
    cache = EvictingCache(model, scorer, 32, allocation="scorer")
    assert cache.options["budget"] == [48, 16, *[32] * (layers - 2)], "shares of the budget"
    assert cache.options["allocation"] == "uniform", "a saved cache is made again from its slots"
    assert EvictingCache(model, scorer, 32).options["budget"] == [32] * layers, "nobody asked for it"
    with pytest.raises(KvlearnError, match=r"floor is 0\.5"):
        EvictingCache(model, scorer, 32, allocation="scorer", floor=0.5)
    scorer.config = replace(scorer.config, allocation="pooled")
    pooled = EvictingCache(model, scorer, 32, allocation="scorer", floor=0.5)
    assert (pooled.options["allocation"], pooled.options["budget"]) == ("pooled", cache.options["budget"])
    with pytest.raises(KvlearnError, match="allocation is 'heads'"):
        replace(scorer.config, allocation="heads")
    with pytest.raises(KvlearnError, match="one number of slots"):
        EvictingCache(model, scorer, [32] * layers, allocation="scorer")
    with pytest.raises(KvlearnError, match="'ema' recommends no allocation"):
        EvictingCache(model, "ema", 32, allocation="scorer")


@pytest.mark.parametrize("allocation", ["uniform", "pooled"])
@pytest.mark.parametrize("calls", [[1019, *[1] * 12], [1000, 300, 300]], ids=["steps", "turns"])
def test_a_layer_without_bound_loses_nothing_however_long(
    tiny_llama: Callable[..., Any], allocation: Any, calls: list[int]
) -> None:
    # Slots are added a thousand at a time; a block that ends beyond the last of them must not evict.
    model = enable(tiny_llama())
    cache = EvictingCache(model, "streaming", [None, 32], block=8, allocation=allocation)
    feed(model, cache, prompt(sum(calls)), calls)
    unbounded, bounded = held(cache)
    assert unbounded == [[set(range(sum(calls)))] * 2]
    assert bounded == [[{*range(4), *range(sum(calls) - 28, sum(calls))}] * 2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pooled", (True, "")),
        ("pooled:a/b.json", (True, "a/b.json")),
        ("pooled:pyramid", (True, "pyramid")),
        ("uniform", (False, "uniform")),
        ("pooled:", (False, "pooled:")),
        ("pooled.json", (False, "pooled.json")),
    ],
)
def test_pooling_is_named_before_the_shares_of_layers(text: str, found: tuple[bool, str]) -> None:
    assert split_pooled(text) == found


def test_layers_with_shares_pool_the_slots_of_their_heads(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    from kvlearn.sharing import share_out

    (tmp_path / "shares.json").write_text("[0.7, 1.3]")
    model = enable(tiny_llama())
    shared = share_out(model, 48, f"pooled:{tmp_path / 'shares.json'}", block=8)
    assert shared["allocation"] == "pooled"
    assert sum(shared["budget"]) == 96
    cache = EvictingCache(model, "ema", **shared, block=8)
    feed(model, cache, prompt(160), [8] * 20)
    assert cache.stats()["mean_slots"] <= 48
    assert [layer.used for layer in cache.layers] == [2 * slots for slots in shared["budget"]]
    assert len(set(shared["budget"])) == 2

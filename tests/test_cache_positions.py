"""Positions: the original ones, with a warning when the model has no more, and those within the cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_helpers import (
    BLOCK,
    NO_RECORDING,
    assert_bounded,
    assert_same,
    feed,
    generate,
    held,
    left_pad,
    permute_slots,
    policy,
    prompt,
    snapshot,
)
from zoo import ZOO, build

import kvlearn
from kvlearn.errors import KvlearnError

BUDGET = 16
# Cohere 2 rotates only its sliding-window layers, which keep their own cache.
ROTATED = [name for name, kind in ZOO.items() if kind.managed and name != "cohere2"]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def compact(model: Any, name: str = "learned", budget: int = BUDGET, block: int = BLOCK, **options: Any) -> Any:
    return kvlearn.EvictingCache(model, policy(name, model), budget, block=block, positions="compact", **options)


@pytest.mark.parametrize("name", ROTATED)
def test_with_room_compact_positions_equal_the_stock_cache(name: str) -> None:
    ids = prompt(24)
    model = kvlearn.enable(build(name))
    assert_same(generate(model, ids, 10, compact(model, budget=96)), generate(build(name), ids, 10), atol=2e-5)


@pytest.mark.parametrize("rope", [None, "yarn", "llama3", "linear", "dynamic"])
def test_one_layer_reads_what_is_left_as_a_text_of_its_own(tiny_llama: Callable[..., Any], rope: str | None) -> None:
    # One layer's keys depend on their own token and position alone: what is held, renumbered, is a shorter text.
    scaled: dict[str, Any] = {}
    if rope is not None:
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
        original = {} if rope in ("linear", "dynamic") else {"original_max_position_embeddings": 64}
        scaled = {"rope_parameters": {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, **original, **more}}
    stock, model = tiny_llama(layers=1, **scaled), kvlearn.enable(tiny_llama(layers=1, **scaled))
    ids = prompt(120)
    cache = compact(model, "streaming", block=1)
    feed(model, cache, ids[:, :40], [40])
    for at in range(40, 120):
        logits = feed(model, cache, ids[:, at : at + 1], [1])[0, -1]
        ((kept, _),) = held(cache)[0]
        with torch.no_grad():
            expected = stock(ids[:, sorted(kept)]).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_longer_block_renumbers_when_it_begins(tiny_llama: Callable[..., Any]) -> None:
    stock, model = tiny_llama(layers=1), kvlearn.enable(tiny_llama(layers=1))
    ids = prompt(80)
    cache = compact(model, "streaming", block=4)
    feed(model, cache, ids[:, :40], [40])
    for at in range(40, 80):
        logits = feed(model, cache, ids[:, at : at + 1], [1])[0, -1]
        kept = sorted(held(cache)[0][0][0])
        if (at - 40) % 4 == 0:  # numbered now: what is held goes from 0 on, and what comes in the block follows
            numbers = {p: n for n, p in enumerate(kept)}
        numbers[at] = BUDGET - 1 + (at - 40) % 4
        with torch.no_grad():
            position_ids = torch.tensor([[numbers[p] for p in kept]])
            expected = stock(ids[:, kept], position_ids=position_ids).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_chunk_of_a_block_equals_single_steps(model: Any) -> None:
    ids = prompt(60)
    caches = [compact(model), compact(model)]
    chunk = feed(model, caches[0], ids, [40, *[BLOCK] * 5])
    steps = feed(model, caches[1], ids, [40, *[1] * 20])
    torch.testing.assert_close(chunk, steps, atol=1e-4, rtol=0)
    assert held(caches[0]) == held(caches[1])


def test_padding_layout_and_rows_do_not_show(model: Any, tmp_path: Any) -> None:
    rows = [prompt(9, seed=1), prompt(30, seed=2)]
    ids, mask = left_pad(*rows)
    tokens = generate(model, ids, 30, compact(model), mask).sequences[:, 30:]
    for i, row in enumerate(rows):
        assert tokens[i].tolist() == generate(model, row, 30, compact(model)).sequences[0, -30:].tolist()
    text = torch.cat([ids, tokens], 1)
    mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    plain, moved = compact(model), compact(model)
    for cache in (plain, moved):
        feed(model, cache, text[:, :43], [30, *[1] * 13], mask)
    permute_slots(moved, seed=0)
    moved.reorder_cache(torch.tensor([1, 0]))
    moved.reorder_cache(torch.tensor([1, 0]))
    moved.save(tmp_path / "cache")
    moved = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    assert snapshot(moved).keys() == snapshot(plain).keys()
    assert moved.options == plain.options
    ours, theirs = (feed(model, cache, text[:, 43:], [1] * 17, mask) for cache in (moved, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NO_RECORDING)
def test_every_policy_runs_far_beyond_the_models_positions(tiny_llama: Callable[..., Any], name: str) -> None:
    model = kvlearn.enable(tiny_llama(max_position_embeddings=32))
    cache = compact(model, name)
    turned: list[int] = []
    for layer in cache.evicting_layers():
        rotate = layer.config.compact.rotate
        layer.config.compact.rotate = lambda keys, at, rotate=rotate: (turned.append(int(at.max())), rotate(keys, at))[
            1
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = feed(model, cache, prompt(100), [20, *[1] * 60, *[BLOCK] * 5])
    assert torch.isfinite(logits).all()
    assert_bounded(cache, BUDGET)
    assert max(turned) < BUDGET + BLOCK <= 32


def test_passing_the_models_last_position_is_said_once(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(max_position_embeddings=32))
    cache = kvlearn.EvictingCache(model, "streaming", BUDGET, block=BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, cache, prompt(32), [30, 1, 1])
    with pytest.warns(UserWarning, match="33 tokens long and the model has 32 positions") as caught:
        feed(model, cache, prompt(4), [1] * 4)
    assert len(caught) == 1


def test_other_kinds_of_positions_are_refused(model: Any) -> None:
    with pytest.raises(KvlearnError, match="positions is 'relative'; use 'original' or 'compact'"):
        kvlearn.EvictingCache(model, "streaming", BUDGET, positions="relative")  # type: ignore[arg-type]  # not valid

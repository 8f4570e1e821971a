"""What a decoded token leaves for later must not show: not in what is held, nor in what is chosen, nor in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, feed, held, left_pad, policy, prompt
from torch import Tensor

import kvlearn
from kvlearn import waiting

BUDGET = 24


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def make(model: Any, name: str) -> Any:
    return kvlearn.EvictingCache(model, policy(name, model), BUDGET, block=BLOCK)


def state(cache: Any) -> list[Tensor]:
    """All that policies read, of every layer."""
    slots = [layer.held() for layer in cache.evicting_layers()]
    read = [(one.keys, one.values, one.pos, one.state, one.static, one.last_query) for one in slots]
    return [tensor for layer in read for tensor in layer if tensor is not None]


def assert_equal(ours: Any, theirs: Any) -> None:
    for mine, other in zip(state(ours), state(theirs), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["streaming", "ema", "tova", "learned"])
@pytest.mark.parametrize("padded", [False, True])
def test_looking_at_every_step_changes_nothing(model: Any, name: str, padded: bool) -> None:
    ids, mask = left_pad(prompt(60), prompt(55, seed=1)) if padded else (prompt(60, batch=2), None)
    watched, left = make(model, name), make(model, name)
    for cache in (watched, left):
        feed(model, cache, ids[:, :7], [7], mask)
    for end in range(8, 61):  # from free slots to several evicting blocks
        logits = [feed(model, cache, ids[:, end - 1 : end], [1], mask) for cache in (watched, left)]
        state(watched)
        assert torch.equal(*logits), f"at {end}"
    assert held(watched) == held(left)
    assert_equal(watched, left)


def test_static_inputs_are_made_when_something_must_go(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_AT_ONCE", 3)  # in several pieces
    cache, tokens = make(model, "learned"), []
    made = cache.policy.static

    def counted(layer: int, keys: Tensor, values: Tensor) -> Tensor:
        tokens.extend([keys.shape[2]] * (layer in (0, (0, 1))))  # both layers may be asked for at once
        return made(layer, keys, values)

    monkeypatch.setattr(cache.policy, "static", counted)
    ids = prompt(BUDGET)
    feed(model, cache, ids[:, :8], [7, 1])
    assert tokens == [7, 1]
    feed(model, cache, ids[:, 8:-1], [1] * (BUDGET - 9))
    assert tokens == [7, 1], "nobody asked for them yet"
    feed(model, cache, ids[:, -1:], [1])  # whose block has one free slot
    assert sum(tokens) == BUDGET - 1
    assert max(tokens[2:]) == 3


@pytest.mark.parametrize("steps", [5, 15, 30])  # slots are free, some block is unfinished, slots are reused
@pytest.mark.parametrize("rows", ["saved", "reordered", "selected", "repeated"])
def test_what_waits_goes_where_its_row_goes(model: Any, tmp_path: Path, steps: int, rows: str) -> None:
    ids = prompt(80, batch=2)
    waits, done = make(model, "learned"), make(model, "learned")
    for cache in (waits, done):
        feed(model, cache, ids[:, : 7 + steps], [7, *[1] * steps])
    state(done)
    take = [0, 1]
    for cache in (waits, done):
        if rows == "reordered":
            cache.reorder_cache(torch.tensor(take := [1, 0]))
        elif rows == "selected":
            cache.batch_select_indices(torch.tensor(take := [1]))
        elif rows == "repeated":
            cache.batch_repeat_interleave(2)
            take = [0, 0, 1, 1]
    if rows == "saved":
        waits.save(tmp_path / "cache")
        waits = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    assert held(waits) == held(done)
    rest = ids[take][:, 7 + steps : 47 + steps]
    assert torch.equal(feed(model, waits, rest, [1] * 40), feed(model, done, rest, [1] * 40))
    assert_equal(waits, done)


def test_a_layer_without_bound_goes_on_waiting(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlearn.slots._GROWTH", 16)
    ids = prompt(60)
    budgets = [None, BUDGET]
    watched, left = (kvlearn.EvictingCache(model, policy("learned", model), budgets, block=BLOCK) for _ in range(2))
    for end in range(1, 61):
        logits = [feed(model, cache, ids[:, end - 1 : end], [1]) for cache in (watched, left)]
        state(watched)
        assert torch.equal(*logits)
    assert_equal(watched, left)


@pytest.mark.parametrize("steps", [3, BLOCK])
@pytest.mark.parametrize("tokens", [12, 40], ids=["free slots", "full"])
def test_what_was_decoded_in_inference_mode_can_be_looked_at_outside(model: Any, tokens: int, steps: int) -> None:
    cache = make(model, "learned")
    with torch.inference_mode():
        feed(model, cache, prompt(tokens + steps), [tokens, *[1] * steps])
    assert tokens + steps - 1 in held(cache)[0][0][0], "the latest token is not told"
    assert state(cache)

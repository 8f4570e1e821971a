"""Heads that share a pool: who gets what, attention over it against a dense reference, and that nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from cache_helpers import (
    BLOCK,
    EVICTING,
    NO_RECORDING,
    assert_same,
    feed,
    generate,
    held,
    left_pad,
    permute_slots,
    policy,
    prompt,
)
from torch import Tensor

import kvlearn
from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.pool import PooledLayer, Ragged
from kvlearn.slots import SLOT_DIM

BUDGET, HEADS, SINKS, FLOOR = 16, 2, 4, 0.5


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def pooled(model: Any, made: str | Policy = "learned", budget: int = BUDGET, block: int = BLOCK, **options: Any) -> Any:
    made = policy(made, model) if isinstance(made, str) else made
    return kvlearn.EvictingCache(model, made, budget, block=block, allocation="pooled", **options)


def counts(cache: Any) -> list[list[list[int]]]:
    """Slots held, by layer, row and head."""
    return [[[len(head) for head in row] for row in layer] for layer in held(cache)]


def assert_pool_bounded(cache: Any, budget: int = BUDGET, floor: float = 0.2) -> None:
    """A layer's heads together hold at most their budgets, each its floor once it has had that much, in that room."""
    for layer, rows in zip(cache.evicting_layers(), counts(cache), strict=True):
        for row, length in zip(rows, layer.length.tolist(), strict=True):
            assert sum(row) <= HEADS * budget
            assert min(row) >= min(length, round(floor * budget), budget - cache.block)
        for name, dim in SLOT_DIM.items():
            tensor = getattr(layer, name)
            if tensor is not None:
                assert tensor.shape[1] == 1, name
                assert tensor.shape[dim] == HEADS * budget, name
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a view of something larger"


@dataclass
class Uneven(Policy):
    """Two of three times the first head's tokens go first; within a head, in no order."""

    name = "uneven"
    summary = paper = "for tests"

    @staticmethod
    def of(head: int, pos: int) -> float:
        return (pos * 7919) % 23 + 15 * head

    def score(self, slots: Slots) -> Tensor:
        heads = torch.arange(slots.pos.shape[1])[None, :, None]
        return ((slots.pos.long() * 7919).remainder(23) + 15 * heads).float()


class Lists:
    """What each head of a row holds, as plain lists of positions."""

    def __init__(self, budget: int, block: int, floor: float) -> None:
        self.budget, self.block, self.floor = budget, block, round(floor * budget)
        self.heads: list[list[int]] = [[] for _ in range(HEADS)]
        self.plan: list[tuple[int, int] | None] = []
        self.length = 0

    def victims(self, count: int, least: int) -> list[tuple[int, int]]:
        """``(head, position)`` of the lowest scores of all heads, none of which falls below ``least``."""
        free = []
        for head, kept in enumerate(self.heads):
            rank = sorted(kept, key=lambda p: (not self.safe(p), -Uneven.of(head, p), -p))
            free += [(Uneven.of(head, p), p, head) for p in rank[least:] if not self.safe(p)]
        return [(head, p) for _, p, head in sorted(free)[:count]]

    def safe(self, pos: int) -> bool:
        return pos < SINKS or self.length - pos <= self.block

    def prompt(self, count: int) -> None:
        for kept in self.heads:
            kept += range(self.length, self.length + count)
        self.length += count
        for head, pos in self.victims(sum(map(len, self.heads)) - HEADS * self.budget, self.floor):
            self.heads[head].remove(pos)

    def step(self) -> None:
        if not self.plan:
            free = HEADS * self.budget - sum(map(len, self.heads))
            want = HEADS * self.block
            self.plan = [None] * min(want, free)
            self.plan += self.victims(want - len(self.plan), min(self.floor, self.budget - self.block))
        for kept in self.heads:
            gone = self.plan.pop(0)
            if gone is not None:
                self.heads[gone[0]].remove(gone[1])
            kept.append(self.length)
        self.length += 1


@pytest.mark.parametrize("first", [1, 9, 40])
@pytest.mark.parametrize("floor", [0.0, FLOOR, 0.9])
def test_holds_what_plain_lists_hold_and_attends_to_just_that(
    tiny_llama: Callable[..., Any], first: int, floor: float
) -> None:
    stock = tiny_llama(layers=1)
    model = kvlearn.enable(tiny_llama(layers=1))
    ids = prompt(100)
    cache, lists = pooled(model, Uneven(), floor=floor), Lists(BUDGET, BLOCK, floor)
    keys, values = keys_and_values(stock, ids)
    spread = set()
    with spying() as calls:
        feed(model, cache, ids[:, :first], [first])
        lists.prompt(first) if first > 1 else lists.step()
        for at in range(first, 100):
            feed(model, cache, ids[:, at : at + 1], [1])
            lists.step()
            assert held(cache) == [[[set(kept) for kept in lists.heads]]]
            assert_pool_bounded(cache, floor=floor)
            query, out = calls[-1]
            torch.testing.assert_close(
                out[0, :, 0], dense(query[0, :, 0], keys, values, lists.heads), atol=1e-5, rtol=0
            )
            spread.add(tuple(len(kept) for kept in lists.heads))
    if floor < 0.9:
        assert len(spread) > 3, "the heads never differed"
        assert max(b for _, b in spread) > BUDGET > min(a for a, _ in spread)


def keys_and_values(stock: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``[H, T, D]`` of a one-layer model: they depend on token and position alone."""
    with torch.no_grad():
        layer = stock(ids).past_key_values.layers[0]
    return layer.keys[0], layer.values[0]


def dense(query: Tensor, keys: Tensor, values: Tensor, heads: list[list[int]]) -> Tensor:
    """``[H * G, D]``: every query head over what its KV head holds, one at a time."""
    group, found = query.shape[0] // len(heads), []
    for n, one in enumerate(query):
        kept = heads[n // group]
        logits = keys[n // group, kept] @ one * one.shape[0] ** -0.5
        found.append(logits.softmax(0) @ values[n // group, kept])
    return torch.stack(found)


class spying:
    """Collects query and output of every call."""

    def __enter__(self) -> list[tuple[Tensor, Tensor]]:
        calls: list[tuple[Tensor, Tensor]] = []
        attend = PooledLayer.attend

        def spy(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = attend(layer, query, *args, **kwargs)
            calls.append((query, out))
            return out

        self.patch = mock.patch.object(PooledLayer, "attend", spy)
        self.patch.start()
        return calls

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


@pytest.mark.parametrize("name", EVICTING)
def test_with_room_a_pool_equals_the_stock_cache(model: Any, tiny_llama: Callable[..., Any], name: str) -> None:
    ids = prompt(24)
    stock = generate(tiny_llama(), ids, 20)
    made = policy(name, model, stock.sequences)
    assert_same(generate(model, ids, 20, pooled(model, made, 96)), stock)


@pytest.mark.filterwarnings("ignore:policy 'learned' was trained on blocks of 4")
@pytest.mark.parametrize("name", NO_RECORDING)
def test_a_floor_of_everything_is_an_equal_share(model: Any, name: str) -> None:
    # a block of one token: within a longer block the heads take turns
    ids, calls = prompt(80), [40, *[1] * 40]
    equal = kvlearn.EvictingCache(model, policy(name, model), BUDGET, block=1)
    expected = feed(model, equal, ids, calls)
    cache = pooled(model, name, block=1, floor=1.0)
    torch.testing.assert_close(feed(model, cache, ids, calls), expected, atol=1e-5, rtol=0)
    assert held(cache) == held(equal)


@pytest.mark.parametrize("name", EVICTING)
def test_the_bound_holds_at_every_step_in_no_more_memory(model: Any, name: str) -> None:
    ids = prompt(90)
    made = policy(name, model, ids)
    cache, equal = pooled(model, made), kvlearn.EvictingCache(model, made, BUDGET, block=BLOCK)
    calls = [30, *[1] * 30, BLOCK, 3, 13, *[1] * 10]
    feed(model, equal, ids, calls)
    start = 0
    for count in calls:
        feed(model, cache, ids[:, start : start + count], [count])
        start += count
        assert_pool_bounded(cache)
    ours, theirs = cache.stats(), equal.stats()
    assert ours["kv_bytes"] == theirs["kv_bytes"]
    assert ours["bytes"] <= theirs["bytes"]
    assert ours["full_bytes"] == theirs["full_bytes"]
    assert ours["mean_slots"] == theirs["mean_slots"] == BUDGET


def test_padding_beams_layout_and_files_do_not_show(model: Any, tmp_path: Any) -> None:
    rows = [prompt(9, seed=1), prompt(30, seed=2)]
    ids, mask = left_pad(*rows)
    tokens = generate(model, ids, 30, pooled(model), mask).sequences[:, 30:]
    for i, row in enumerate(rows):
        assert tokens[i].tolist() == generate(model, row, 30, pooled(model)).sequences[0, -30:].tolist()
    text = torch.cat([ids, tokens], 1)
    mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    plain, moved = pooled(model, floor=FLOOR), pooled(model, floor=FLOOR)
    for cache in (plain, moved):
        feed(model, cache, text[:, :43], [30, *[1] * 13], mask)
    permute_slots(moved, seed=0)
    moved.reorder_cache(torch.tensor([1, 0]))
    moved.batch_repeat_interleave(2)
    moved.batch_select_indices(torch.tensor([3, 1]))
    moved.save(tmp_path / "cache")
    moved = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    assert moved.options == plain.options
    twin = copy.deepcopy(moved)
    for layer in moved.evicting_layers():
        layer.keys.fill_(torch.nan)
    assert held(twin) == held(plain)
    ours, theirs = (feed(model, cache, text[:, 43:], [1] * 17, mask) for cache in (twin, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert held(twin) == held(plain)
    twin.reset()
    fresh = pooled(model, floor=FLOOR)
    assert torch.equal(feed(model, twin, rows[0], [9]), feed(model, fresh, rows[0], [9]))


def test_beams_reorder_the_pool(model: Any, tiny_llama: Callable[..., Any]) -> None:
    ids = prompt(20)
    room = generate(model, ids, 20, pooled(model, budget=96), num_beams=3)
    assert torch.equal(room.sequences, generate(tiny_llama(), ids, 20, num_beams=3).sequences)
    small = pooled(model)
    best = generate(model, ids, 30, small, num_beams=3, num_return_sequences=3).sequences
    assert_pool_bounded(small)
    # Layer 0 holds, in every row, keys of the row's own text.
    for layer in small.evicting_layers()[:1]:
        ragged = Ragged(layer.pos[:, 0], HEADS)
        keys = ragged.split(layer.keys, 2)
        with torch.no_grad():
            stock = [tiny_llama()(row[None]).past_key_values.layers[0].keys[0] for row in best]
        for row in range(3):
            pos = layer.positions()[row]
            at_home = [
                all(torch.allclose(keys[row, h, pos[h] >= 0], other[h, pos[h][pos[h] >= 0]], atol=1e-4) for h in (0, 1))
                for other in stock
                if int(pos.max()) < other.shape[1]
            ]
            assert any(at_home), "a beam's slots are of no beam's text"


def test_a_chunk_of_a_block_equals_single_steps(model: Any) -> None:
    ids = prompt(60)
    caches = [pooled(model), pooled(model)]
    chunk = feed(model, caches[0], ids, [40, *[BLOCK] * 5])
    steps = feed(model, caches[1], ids, [40, *[1] * 20])
    torch.testing.assert_close(chunk, steps, atol=1e-4, rtol=0)
    assert held(caches[0]) == held(caches[1])


def test_protection_holds_in_every_head(model: Any) -> None:
    cache = pooled(model, Uneven(), 20, protect=kvlearn.Protection(sinks=2, tokens=[5, 9]), floor=0.0)
    feed(model, cache, prompt(80), [30, *[1] * 50])
    for layer in held(cache):
        for head in layer[0]:
            assert {0, 1, 5, 9} | set(range(80 - BLOCK, 80)) <= head


def test_what_cannot_be_is_refused(model: Any) -> None:
    for options, message in (
        ({"budget": None, "policy": "full"}, "shares a budget among heads"),
        ({"floor": 1.5}, "floor is 1.5"),
        ({"allocation": "uniform", "floor": 0.1}, "belongs to allocation='pooled'"),
        ({"allocation": "layers"}, "allocation is 'layers'; use 'uniform', 'pooled' or"),
        ({"positions": "compact"}, "use allocation='uniform' with it"),
        ({"recorder": object()}, "a recorder takes slots of equal heads"),
    ):
        arguments: dict[str, Any] = {"policy": "tova", "budget": BUDGET, "allocation": "pooled", **options}
        with pytest.raises(KvlearnError, match=message):
            kvlearn.EvictingCache(model, **arguments)


def test_a_nan_among_the_scores_is_reported(model: Any) -> None:
    made = policy("random", model)
    made.score = lambda slots: torch.where(slots.pos == 9, torch.nan, 0.0)  # type: ignore[method-assign]  # bad policy
    with pytest.raises(KvlearnError, match="NaN"):
        feed(model, pooled(model, made), prompt(40), [40])


def test_rows_of_mostly_padding_are_cut_like_any_other(model: Any) -> None:
    ids, mask = prompt(11), torch.tensor([[0] * 7 + [1, 1, 0, 0]])
    cache = pooled(model, "streaming", 10, block=1, floor=FLOOR)
    feed(model, cache, ids, [9, 2], mask)
    assert held(cache) == [[[{0, 1}] * HEADS]] * 2

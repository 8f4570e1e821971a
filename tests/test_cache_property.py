"""Random lives of a cache against plain Python lists: after every step both hold, return and remember the same."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cache_helpers import permute_slots
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from list_cache import ListCache
from torch import Tensor

import kvlearn
from kvlearn import history
from kvlearn.attention import cache_argument
from kvlearn.layer import EvictingLayer
from kvlearn.policies.base import Policy, Slots

STEPS = 2000
HEADS, SINKS, MOST_ROWS = 2, 2, 4


def score(head: int, pos: int) -> float:
    """In no order, with ties: the older token goes first."""
    return (pos * 7919 + head * 104_729) % 23


@dataclass
class Shuffled(Policy):
    """Scores that depend on position and head alone, and reads that make the cache keep all state it can."""

    name = "shuffled"
    summary = paper = "for tests"
    reads = frozenset({"history", "last_query", "static"})

    def static(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        return values[..., :2].clone()

    def score(self, slots: Slots) -> Tensor:
        heads = torch.arange(slots.pos.shape[1])[None, :, None]
        return (slots.pos.long() * 7919 + heads * 104_729).remainder(23).float()


class CacheLife(RuleBasedStateMachine):
    """What can happen to a cache, at random."""

    model: Any = None
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[np.ndarray, ...]] = []
        attend = EvictingLayer.attend

        def spying_attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = attend(layer, query, key, value, *args, **kwargs)
            self.calls.append(tuple(t.detach().double().numpy() for t in (query, key, value, out)))
            return out

        self.patch = mock.patch.object(EvictingLayer, "attend", spying_attend)
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()

    @initialize(
        rows=st.integers(1, 3),
        budget=st.sampled_from([10, 12, 17]),
        block=st.sampled_from([1, 3, 4]),
        floor=st.sampled_from([None, None, 0.0, 0.5, 1.0]),
        data=st.data(),
    )
    def begin(self, rows: int, budget: int, block: int, floor: float | None, data: Any) -> None:
        pool: dict[str, Any] = {} if floor is None else {"allocation": "pooled", "floor": floor}
        self.cache = kvlearn.EvictingCache(
            self.model, Shuffled(), budget, block=block, protect=kvlearn.Protection(sinks=SINKS), **pool
        )
        self.budget, self.block = budget, block
        self.floor = None if floor is None else round(floor * budget)
        self.restart(rows)
        self.feed_padded(data, data.draw(st.integers(1, 30)))

    def restart(self, rows: int) -> None:
        scale = self.model.config.head_dim**-0.5
        self.plain = ListCache(rows, HEADS, self.budget, self.block, SINKS, scale, score, self.floor)
        self.mask = torch.zeros(rows, 0, dtype=torch.int64)
        self.token = 0

    def feed_padded(self, data: Any, count: int) -> None:
        pads = [data.draw(st.integers(0, count - (self.mask.shape[1] == 0))) for _ in self.plain.rows]
        self.feed(torch.tensor([[int(i >= pad) for i in range(count)] for pad in pads]))

    def feed(self, valid: Tensor) -> None:
        """One call; ``valid`` ``[B, C]`` says which columns are tokens. Both caches must return the same."""
        rows, count = valid.shape
        ids = (torch.arange(rows * count).view(rows, count) * 31 + self.token * 17) % 197 + 2
        self.token += 1
        self.mask = torch.cat([self.mask, valid], dim=1)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]
        arguments = {cache_argument(self.model): self.cache, "position_ids": positions, "attention_mask": self.mask}
        with torch.no_grad():
            self.model(ids, **arguments)
        query, key, value, out = self.calls.pop()
        real = valid.numpy().astype(bool)
        expected = self.plain.feed(query, key, value, real)
        at = real[:, None, :, None].repeat(out.shape[1], 1).repeat(out.shape[-1], 3)
        np.testing.assert_allclose(out[at], expected[at], atol=1e-4)

    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.feed(torch.ones(len(self.plain.rows), 1, dtype=torch.int64))

    @rule(data=st.data())
    def decode_without_some_rows(self, data: Any) -> None:
        taking_part = data.draw(st.lists(st.booleans(), min_size=len(self.plain.rows), max_size=len(self.plain.rows)))
        self.feed(torch.tensor(taking_part, dtype=torch.int64)[:, None])

    @rule(count=st.integers(2, 30))
    def new_turn(self, count: int) -> None:
        self.feed(torch.ones(len(self.plain.rows), count, dtype=torch.int64))

    @rule(data=st.data(), count=st.integers(2, 30))
    def new_padded_turn(self, data: Any, count: int) -> None:
        self.feed_padded(data, count)

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        count = len(self.plain.rows)
        rows = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        self.cache.reorder_cache(torch.tensor(rows))
        self.moved(rows)

    @rule(data=st.data())
    def select(self, data: Any) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.plain.rows) - 1), min_size=1, max_size=MOST_ROWS))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.moved(rows)

    @precondition(lambda self: 2 * len(self.plain.rows) <= MOST_ROWS)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.moved([i for i in range(len(self.plain.rows)) for _ in range(2)])

    def moved(self, rows: list[int]) -> None:
        self.plain.take(rows)
        self.mask = self.mask[rows]

    @rule(seed=st.integers(0, 999))
    def permute(self, seed: int) -> None:
        permute_slots(self.cache, seed)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            self.cache = kvlearn.EvictingCache.load(Path(folder) / "cache", self.model, policy=Shuffled())

    @rule()
    def copied(self) -> None:
        old, self.cache = self.cache, copy.deepcopy(self.cache)
        for layer in old.evicting_layers():  # whoever still reads the original sees NaN
            layer.keys.fill_(torch.nan)

    @rule(rows=st.integers(1, 3), data=st.data())
    def reset(self, rows: int, data: Any) -> None:
        self.cache.reset()
        self.restart(rows)
        self.feed_padded(data, data.draw(st.integers(1, 30)))

    @invariant()
    def both_hold_and_remember_the_same(self) -> None:
        type(self).steps += 1
        (layer,) = self.cache.evicting_layers()
        assert self.cache.get_seq_length() == self.plain.seen
        assert layer.length.tolist() == [row.length for row in self.plain.rows]
        stored = (layer.keys, layer.values, layer.pos)
        assert [t.shape[1] * t.shape[2] for t in stored] == [HEADS * self.budget] * 3
        found = layer.held()
        means = history.field(found.state, "mean")
        for b, row in enumerate(self.plain.rows):
            assert sum(map(len, row.heads)) <= HEADS * self.budget
            for h, held in enumerate(row.heads):
                slot_of = {p: s for s, p in enumerate(found.pos[b, h].tolist()) if p >= 0}
                assert self.floor is not None or len(held) <= self.budget
                assert sorted(slot_of) == sorted(t.pos for t in held), f"row {b}, head {h}"
                assert int((found.pos[b, h] >= 0).sum()) == len(slot_of), "a token is held twice"
                ordered = sorted(held, key=lambda t: slot_of[t.pos])
                slots = sorted(slot_of.values())
                for name, tensor in (("key", found.keys), ("value", found.values)):
                    ours = tensor[b, h, slots].double().numpy()
                    np.testing.assert_allclose(ours, [getattr(t, name) for t in ordered], atol=1e-6)
                static = found.static[b, h, slots].numpy()
                np.testing.assert_allclose(static, [t.value[:2] for t in ordered], atol=1e-6)
                # a mass on the border between two codes falls either way: 5 percent apart
                np.testing.assert_allclose(means[b, h, slots], [t.mean for t in ordered], rtol=0.08, atol=2e-3)


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    return kvlearn.enable(tiny_llama(layers=1, head_dim=8))


def test_two_thousand_steps_agree_with_plain_lists(model: Any) -> None:
    CacheLife.model, CacheLife.steps = model, 0
    run_state_machine_as_test(
        CacheLife,
        settings=settings(max_examples=60, stateful_step_count=50, suppress_health_check=list(HealthCheck)),
    )
    assert CacheLife.steps >= STEPS

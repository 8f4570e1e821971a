"""The contract of traces: features rebuilt offline are those that the cache computed, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tracing_helpers import layout_of, run, tiny_trace

import kvlearn
from kvlearn import Scorer, features
from kvlearn.policies.base import Policy, Slots
from kvlearn.traces import Trace, Window, replay


@dataclass
class ReadsAll(Policy):
    """Scores by what a learned scorer reads, so that the cache keeps all of it."""

    scorer: Scorer

    name = "reads-all"
    summary = paper = "for tests"
    reads = frozenset({"history", "static"})

    def static(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        return self.scorer.static(layer, keys, values)

    def score(self, slots: Slots) -> Tensor:
        assert slots.state is not None
        assert slots.static is not None
        read = features.dynamic_features(slots.state, slots.pos, slots.length)
        return read[..., :8].sum(-1) + slots.static[..., 2].float()


def dynamic(state: Tensor) -> Tensor:
    layers, heads, _, tokens = state.shape
    pos = torch.arange(tokens, dtype=torch.int32).expand(layers, heads, tokens)
    return features.dynamic_features(state, pos, torch.full((layers,), tokens))


def random_scorer(model: Any, encoder: str) -> Scorer:
    scorer = Scorer.for_model(model, encoder=encoder, key_rank=3)
    vectors = torch.randn(len(scorer.config.layers), 2 * scorer.config.heads, 50, scorer.config.head_dim)
    scorer.fit_inputs(torch.randn(*vectors.shape[:1], scorer.config.heads, 50, len(features.DYNAMIC)), vectors)
    return scorer


def online(model: Any, window: Window, budget: int, block: int, chunk: int, scorer: Scorer) -> Any:
    cache = kvlearn.EvictingCache(model, ReadsAll(scorer), budget, block=block)
    for ids in window.input_ids[None].split(chunk, dim=1):
        run(model, cache, ids)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "block", "spare", "encoder"),
    [(96, 8, 0, "key"), (105, 15, 7, "layer"), (63, 9, 200, "layer"), (64, 1, 3, "key")],
)
def test_offline_features_equal_online_features(
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    dtype: torch.dtype,
    window: int,
    block: int,
    spare: int,
    encoder: str,
) -> None:
    model = tiny_llama(layers=3, dtype=dtype)
    tiny_trace(tmp_path / "t", model, windows=2, window=window, block=block)
    scorer = random_scorer(model, encoder)
    for traced in Trace(tmp_path / "t"):
        cache = online(model, traced, window + spare, block, window, scorer)
        ((n, state, held),) = replay(traced, [window // block])
        assert (n, held) == (window // block, None)
        for i, layer in enumerate(cache.evicting_layers()):
            slots = layer.held()
            assert torch.equal(slots.pos[0, 0], torch.arange(window, dtype=torch.int32))
            assert torch.equal(slots.state[0], state[i])
            expected = features.dynamic_features(slots.state, slots.pos, slots.length)
            assert torch.equal(expected[0], dynamic(state)[i])
            keys, values = traced.keys.decode(), traced.values.decode()
            assert torch.equal(slots.static, scorer.static(i, keys[i : i + 1], values[i : i + 1]))
            assert torch.equal(features.layer_vectors(keys, values), traced.layer_vectors()), "rounding twice is once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("until", [12, 9, 7, 3])
def test_offline_features_equal_what_the_evicting_cache_saw(
    tiny_llama: Callable[..., Any], tmp_path: Path, dtype: torch.dtype, until: int
) -> None:
    block, budget = 8, 45
    model = tiny_llama(layers=3, dtype=dtype)
    tiny_trace(tmp_path / "t", model, windows=2, block=block, policy="ema", budgets=str(budget))
    for traced in Trace(tmp_path / "t"):
        cache = kvlearn.EvictingCache(model, "ema", budget, block=block)
        for ids in traced.input_ids[None, : until * block].split(block, dim=1):
            run(model, cache, ids)
        ((_, state, held),) = replay(traced, [until])
        assert held is not None
        assert held.shape == (3, 2, until * block)
        for i, layer in enumerate(cache.evicting_layers()):
            slots = layer.held()
            pos = slots.pos.long()
            assert torch.equal(torch.zeros_like(held[i]).scatter(-1, pos[0], True), held[i])
            seen = state[i : i + 1].gather(-1, pos[:, :, None].expand_as(slots.state))
            assert torch.equal(seen, slots.state)
            expected = features.dynamic_features(slots.state, slots.pos, slots.length)
            own = features.dynamic_features(seen, slots.pos, slots.length)
            assert torch.equal(expected, own)
            assert torch.equal(expected[0], dynamic(state)[i].gather(1, pos[0, ..., None].expand_as(expected[0])))


def test_an_evicting_cache_sees_other_masses_than_the_full_one(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    tiny_trace(tmp_path / "t", model, windows=1, policy="streaming", budgets="28")
    window = Trace(tmp_path / "t").window(0)
    assert window.held is not None
    assert window.seen_mean is not None
    last = window.held[-1]
    assert last.sum(-1).tolist() == [[28, 28]] * 2
    seen, full = window.seen_mean[-1][last], window.mean_code[-1][last]
    assert (seen >= full).float().mean() > 0.9, "less competes for the same attention"
    assert not torch.equal(seen, full)


def test_layout_is_that_of_the_cache(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    assert layout_of(model, 96, 8).ends[-1] == 96

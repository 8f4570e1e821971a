"""Model families: the stock cache's output with room, the bound without, and keys as they were before rotation."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, assert_bounded, assert_same, feed, generate, held, left_pad, policy, prompt, scorer
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM, cache_utils
from zoo import BASE, ZOO, build

import kvlearn
from kvlearn.errors import KvlearnError
from kvlearn.rotary import Unrotator

BUDGET = 16
every_model = pytest.mark.parametrize("name", ZOO)
MANAGED = [name for name, kind in ZOO.items() if kind.managed]


def cache_for(model: Any, budget: int, **options: Any) -> Any:
    """A cache that reads all a policy can read: history and keys before rotation."""
    return kvlearn.EvictingCache(model, policy("learned", model), budget, block=BLOCK, **options)


@every_model
def test_case_13_a_budget_beyond_the_length_equals_the_stock_cache(name: str) -> None:
    ids = prompt(24)
    stock = generate(build(name), ids, 10)
    model = kvlearn.enable(build(name))
    assert_same(generate(model, ids, 10), stock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no full-attention layer: tested below
        cache = cache_for(model, 96) if ZOO[name].managed else kvlearn.EvictingCache(model, "h2o", 96)
    assert_same(generate(model, ids, 10, cache), stock)


@every_model
def test_case_13_only_full_attention_layers_are_managed_and_bounded(name: str) -> None:
    model = kvlearn.enable(build(name))
    if not ZOO[name].managed:
        with pytest.warns(UserWarning, match="the budget has no effect"):
            cache = kvlearn.EvictingCache(model, "h2o", BUDGET)
    else:
        cache = cache_for(model, BUDGET)
    rows = [prompt(9, seed=1), prompt(30, seed=2)]
    ids, mask = left_pad(*rows)
    tokens = generate(model, ids, 12, cache, mask).sequences[:, -12:]
    assert tuple(cache.managed) == ZOO[name].managed
    assert_bounded(cache, BUDGET)
    for i, row in enumerate(rows):
        if ZOO[name].managed:
            alone = generate(model, row, 12, cache_for(model, BUDGET)).sequences[0, -12:]
            assert tokens[i].tolist() == alone.tolist(), f"row {i} depends on its padding"


@pytest.mark.parametrize("name", MANAGED)
def test_keys_come_back_as_they_were_before_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kvlearn.enable(build(name))
    seen: dict[int, Tensor] = {}

    class Keys:
        def tokens(self, layer: int, pos: Tensor, keys: Tensor, values: Tensor) -> None:
            seen[layer] = keys

        def blocks(self, *_: Any) -> None: ...

    cache = cache_for(model, 64, recorder=Keys())
    modeling = sys.modules[type(model).__module__]
    turn = modeling.apply_rotary_pos_emb
    before: list[Tensor] = []
    handed: dict[int, Tensor] = {}

    def spying_turn(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        before.append(key)
        return turn(query, key, *args, **kwargs)

    def spying_update(key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        handed[layer] = before.pop() if before else key  # a layer that rotates nothing hands over its plain keys
        before.clear()
        return type(cache).update(cache, key, value, layer, *args, **kwargs)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", spying_turn)
    cache.update = spying_update
    ids, mask = left_pad(prompt(12, seed=1), prompt(20, seed=2))
    feed(model, cache, ids, [20], mask)
    assert tuple(seen) == ZOO[name].managed
    for layer, keys in seen.items():
        plain, part = handed[layer], handed[layer].shape[-1]  # some models cut off the part that they do not rotate
        torch.testing.assert_close(keys[..., :part], plain, atol=1e-4, rtol=1e-4)


def test_a_layer_without_rotation_is_found() -> None:
    rotated = {name: Unrotator(build(name), ZOO[name].managed)._rotated for name in ("llama", "smollm3", "cohere2")}
    assert rotated == {"llama": {0: True, 1: True}, "smollm3": {0: True, 1: False}, "cohere2": {1: False}}


def test_a_rotation_that_cannot_be_undone_is_refused_only_to_policies_that_read_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = kvlearn.enable(build("llama"))
    made = scorer(model)
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k * cos.sum() + sin.sum()))
    with pytest.raises(KvlearnError, match="cannot undo the rotary embedding of model type 'llama'"):
        kvlearn.EvictingCache(model, made, BUDGET, block=BLOCK)
    monkeypatch.delattr(modeling, "apply_rotary_pos_emb")
    with pytest.raises(KvlearnError, match="choose a policy that reads no keys before rotation"):
        kvlearn.EvictingCache(model, made, BUDGET, block=BLOCK)
    assert held(kvlearn.EvictingCache(model, "h2o", BUDGET, block=BLOCK)) == [[], []]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_come_back(dtype: torch.dtype) -> None:
    model = kvlearn.enable(build("qwen3").to(dtype))
    keys = torch.randn(1, 2, 5, 12, dtype=dtype)
    unrotator = Unrotator(model, (0, 1))
    positions = torch.tensor([[0, 3, 9, 27, 81]])
    cos, sin = unrotator.angles(positions, keys)
    rotated, _ = sys.modules[type(model).__module__].apply_rotary_pos_emb(keys, keys, cos, sin)
    torch.testing.assert_close(unrotator(rotated, positions), keys, atol=3e-2, rtol=3e-2)


def test_recurrent_layers_keep_their_state_where_transformers_has_a_cache_layer_for_them(tmp_path: Path) -> None:
    options = {**BASE, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = kvlearn.enable(Lfm2ForCausalLM(Lfm2Config(**options)).eval())
    if not hasattr(cache_utils, "LinearAttentionLayer"):
        with pytest.raises(KvlearnError, match="layer 0 of Lfm2ForCausalLM is of kind 'conv'"):
            kvlearn.EvictingCache(model, "h2o", BUDGET)
        return
    ids = prompt(30)
    stock = generate(model, ids, 10)
    assert_same(generate(model, ids, 10, cache_for(model, 96)), stock)
    cache = cache_for(model, BUDGET)
    first = generate(model, ids, 10, cache).sequences
    assert cache.managed == [1]
    assert_bounded(cache, BUDGET)
    cache.reset()
    assert torch.equal(generate(model, ids, 10, cache).sequences, first)
    with pytest.raises(KvlearnError, match="keeps state that cannot be saved yet"):
        cache.save(tmp_path / "cache.safetensors")

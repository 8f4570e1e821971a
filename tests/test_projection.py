"""What the output projection makes of values: the right map of each model family, sliced by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from zoo import ZOO, build

from kvlearn.attention import cache_argument
from kvlearn.models import fingerprint
from kvlearn.models.projection import output_linear, output_projection


@pytest.mark.parametrize("name", ZOO)
def test_it_is_the_map_that_takes_what_attention_gives(name: str) -> None:
    model, shape = build(name), fingerprint(build(name))
    width = shape["query_heads"] * shape["head_dim"]
    taken: dict[int, torch.Tensor] = {}
    for layer in ZOO[name].managed:
        linear = output_linear(model, layer, width)
        assert linear is not None
        linear.register_forward_pre_hook(lambda _, args, layer=layer: taken.update({layer: args[0]}))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([[7]]), **{cache_argument(model): cache})
    for layer in ZOO[name].managed:  # of one token, attention gives its value, to each query head of the group
        values: Any = cache.layers[layer].values
        expected = values[0, :, 0].repeat_interleave(shape["query_heads"] // shape["kv_heads"], dim=0)
        torch.testing.assert_close(taken[layer].flatten(), expected.flatten())


def test_lengths_are_those_of_the_stacked_slices(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(hidden_size=24)
    projection = output_projection(model, [1, 0], 2, 4, 16)
    assert projection is not None
    assert projection.shape == (2, 2, 16, 16)
    values = torch.randn(5, 16)
    for row, layer in enumerate((1, 0)):
        weight = model.model.layers[layer].self_attn.o_proj.weight.detach()  # [hidden, query heads * D]
        for head in range(2):
            slices = [weight[:, 16 * h : 16 * (h + 1)] for h in (2 * head, 2 * head + 1)]
            stacked = torch.cat([values @ part.T for part in slices], dim=-1)
            torch.testing.assert_close((values @ projection[row, head].T).norm(dim=-1), stacked.norm(dim=-1))


def test_fewer_outputs_than_numbers_of_a_value(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(heads=2, hidden_size=8)
    projection = output_projection(model, [0], 2, 2, 16)
    assert projection is not None
    weight, value = model.model.layers[0].self_attn.o_proj.weight.detach(), torch.randn(16)
    torch.testing.assert_close((projection[0, 1] @ value).norm(), (weight[:, 16:] @ value).norm())


def test_what_is_not_found_is_left_out(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.o_proj = nn.Sequential(model.model.layers[1].self_attn.o_proj)
    model.model.layers[1].self_attn.q_proj = nn.Sequential(model.model.layers[1].self_attn.q_proj)
    assert output_projection(model, [0], 2, 4, 16) is not None
    assert output_projection(model, [0, 1], 2, 4, 16) is None

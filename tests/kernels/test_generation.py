"""A whole generation in Triton's interpreter gives the reference's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlearn
from kvlearn.attention import cache_argument
from kvlearn.errors import KvlearnError
from kvlearn.policies import Learned


def generate(model: Any, ids: Tensor, mask: Tensor, policy: Any, impl: Any) -> tuple[Tensor, Tensor]:
    """Tokens of two turns, the second fed as one chunk, and the positions held at the end."""
    cache = kvlearn.EvictingCache(model, policy, budget=20, block=4, impl=impl)
    argument = cache_argument(model)
    tokens = [ids]
    with torch.no_grad():
        for chunk in (ids, *4 * [None], ids[:, -3:], *6 * [None]):
            if chunk is None:
                chunk = tokens[-1][:, -1:]
            elif tokens[-1] is not ids:
                tokens.append(chunk)
            mask = torch.cat([mask, torch.ones_like(chunk)], 1) if len(tokens) > 1 else mask
            logits = model(chunk, attention_mask=mask, **{argument: cache}).logits[:, -1]
            tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, 1), cache.positions(1).sort(-1).values


def learned(model: Any) -> Any:
    scorer = kvlearn.Scorer.for_model(model, hidden=4, key_rank=2)
    with torch.no_grad():
        assert scorer.w2 is not None
        scorer.w2.normal_(std=0.5)  # untrained, its hidden units would not count
    return scorer


@pytest.mark.parametrize("policy", ["ema", "tova", "learned", "int8"])
def test_tokens_are_the_references(policy: str, tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(heads=3, kv_heads=1))
    ids = torch.randint(1, 200, (2, 26))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    chosen = {"learned": learned, "int8": lambda m: Learned(learned(m), inputs="int8")}.get(policy, lambda _: policy)(
        model
    )
    expected, kept = generate(model, ids, mask, chosen, "reference")
    found, found_kept = generate(model, ids, mask, chosen, "triton")
    assert torch.equal(found, expected)
    assert torch.equal(found_kept, kept)


def test_an_impossible_request_is_refused_at_once(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(dtype=torch.float64))
    with pytest.raises(KvlearnError, match="takes float16, bfloat16 and float32"):
        kvlearn.EvictingCache(model, "ema", budget=20, block=4, impl="triton")
    with pytest.raises(KvlearnError, match="impl is 'fast'"):
        kvlearn.EvictingCache(model, "ema", budget=20, block=4, impl="fast")  # type: ignore[arg-type]  # wrong on purpose

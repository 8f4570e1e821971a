"""decode_attention: the Triton kernel against the reference and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import Guarded, assert_within_budget
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.decode_attention.reference import naive
from kvlearn.kernels.decode_attention.splits import split_count

SCALE = 0.3

# B, H, G, C, S, D: groups that are no power of two, odd lengths, every head dimension, one and several splits and tiles
SHAPES = [
    (1, 1, 1, 1, 1, 64),
    (2, 2, 3, 1, 33, 80),
    (1, 1, 7, 3, 63, 96),
    (1, 2, 4, 1, 70, 128),
    (1, 1, 8, 5, 17, 256),
]


def operands(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    b, h, g, c, s, d = shape
    return tuple(torch.randn(size).to(dtype) for size in ((b, h * g, c, d), (b, h, s, d), (b, h, s, d)))  # type: ignore[return-value]  # three of them


def mask_arguments(kind: str, shape: tuple[int, ...], seen: float = 0.6) -> tuple[dict[str, Any], Tensor | None]:
    """Arguments that hide slots, and the same as ``visible`` for :func:`naive`."""
    b, h, _, c, s, _ = shape
    if kind == "visible":
        visible = torch.rand(b, h, c, s) < seen
        return {"visible": visible}, visible
    if kind == "held":
        held = torch.where(torch.rand(b, 1, s) < seen, torch.arange(s), -1).int()
        return {"held": held}, (held >= 0)[:, :, None].expand(b, 1, c, s)
    return {}, None


@pytest.mark.parametrize("kind", ["none", "visible", "held"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_agrees_with_float64(shape: tuple[int, ...], kind: str) -> None:
    query, key, value = operands(shape)
    arguments, visible = mask_arguments(kind, shape)
    softcap = 2.0 if shape[2] == 3 else None
    out, lse = Guarded(*query.shape), Guarded(*query.shape[:3])
    decode_attention(
        query, key, value, scale=SCALE, softcap=softcap, out=out.tensor, lse=lse.tensor, impl="triton", **arguments
    )
    out.check()
    lse.check()
    exact, exact_lse = naive(query.double(), key.double(), value.double(), visible, False, SCALE, softcap)
    eager, eager_lse = naive(query, key, value, visible, False, SCALE, softcap)
    assert_within_budget(out.tensor, eager, exact, slack=4)
    assert_within_budget(lse.tensor, eager_lse, exact_lse, slack=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 2, 3, 1, 33, 64), (1, 1, 4, 5, 17, 80)], ids=str)
def test_16_bits_are_no_worse_than_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = operands(shape, dtype)
    out, lse = decode_attention(query, key, value, scale=SCALE, impl="triton")
    exact, exact_lse = naive(query.double(), key.double(), value.double(), None, False, SCALE, None)
    grouped = (x.repeat_interleave(shape[2], dim=1) for x in (key, value))
    k, v = grouped
    eager = torch.softmax(query @ k.transpose(-1, -2) * SCALE, dim=-1) @ v
    assert out.dtype == dtype
    assert_within_budget(out, eager, exact)
    assert float((lse - exact_lse).abs().max()) < 1e-5  # statistics are float32 whatever the operands


@pytest.mark.parametrize("length", [1, 17, 33])
def test_causal(length: int) -> None:
    shape = (1, 2, 3, length, length, 16)
    query, key, value = operands(shape)
    out, lse = decode_attention(query, key, value, causal=True, scale=SCALE, impl="triton")
    exact, exact_lse = naive(query.double(), key.double(), value.double(), None, True, SCALE, None)
    eager, _ = naive(query, key, value, None, True, SCALE, None)
    assert_within_budget(out, eager, exact, slack=4)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["visible", "held"])
@pytest.mark.parametrize("seen", [0.0, 0.3, 1.0])
def test_slots_that_no_query_sees_are_not_read(kind: str, seen: float) -> None:
    shape = (2, 2, 3, 2, 70, 16)
    query, key, value = operands(shape)
    arguments, visible = mask_arguments(kind, shape, seen)
    assert visible is not None
    expected, expected_lse = naive(query, key, value, visible, False, SCALE, None)
    unseen = ~visible.expand(2, 2, 2, 70).any(2)
    key[unseen], value[unseen] = float("nan"), float("nan")
    out, lse = decode_attention(query, key, value, scale=SCALE, impl="triton", **arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)
    if seen == 0.0:
        assert not out.any()
        assert not lse.any(), "a query that sees nothing has log-sum-exp 0"


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy's; the kernel means infinity there
def test_large_logits_do_not_overflow() -> None:
    query, key, value = operands((1, 1, 2, 1, 20, 16))
    for softcap in (None, 30.0):
        out, lse = decode_attention(query * 1e4, key, value, scale=1.0, softcap=softcap, impl="triton")
        exact, _ = naive(query.double() * 1e4, key.double(), value.double(), None, False, 1.0, softcap)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)
        assert torch.isfinite(lse).all()


def test_strided_operands_and_outputs() -> None:
    """A cache passes views: slots of a larger store, transposed projections, one column of the block's log-sum-exps."""
    b, h, g, s, d = 2, 2, 2, 20, 16
    store = torch.randn(b, h, 2 * s, d)
    query = torch.randn(b, 3, h * g, d).transpose(1, 2)[:, :, 1:2]
    sums = torch.full((b, h * g, 5), 9.0)
    out, lse = decode_attention(
        query, store[:, :, :s], store[:, :, s:], scale=SCALE, lse=sums[:, :, 2:3], impl="triton"
    )
    expected, expected_lse = naive(query, store[:, :, :s], store[:, :, s:], None, False, SCALE, None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(sums[:, :, 2:3], expected_lse, rtol=0, atol=1e-5)
    assert lse.data_ptr() == sums[:, :, 2:3].data_ptr()
    assert (sums[:, :, [0, 1, 3, 4]] == 9.0).all()


def test_the_reference_fills_outputs_too() -> None:
    query, key, value = operands((1, 1, 2, 1, 5, 16))
    held = torch.tensor([[[3, -1, 0, 1, -1]]], dtype=torch.int32)
    out, lse = Guarded(*query.shape), Guarded(*query.shape[:3])
    decode_attention(query, key, value, held=held, scale=SCALE, out=out.tensor, lse=lse.tensor, impl="reference")
    expected, expected_lse = naive(query, key, value, (held >= 0)[:, :, None], False, SCALE, None)
    torch.testing.assert_close(out.tensor, expected)
    torch.testing.assert_close(lse.tensor, expected_lse)


def test_splits_fill_the_chip_but_are_never_tiny() -> None:
    assert split_count(batch_heads=8, tiles=1, slots=2048, programs=264, least=128) == 16  # 33 would be of 62 slots
    assert split_count(batch_heads=8, tiles=1, slots=8192, programs=264, least=128) == 33
    assert split_count(batch_heads=512, tiles=1, slots=8192, programs=264, least=128) == 1
    assert split_count(batch_heads=1, tiles=1, slots=1, programs=264, least=128) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 1, 8)}, "3 query heads cannot share 2 KV heads"),
        ({"value": torch.zeros(1, 2, 4, 8)}, r"value has shape \[1, 2, 4, 8\]; it must be \[1, 2, 5, 8\]"),
        ({"visible": torch.ones(1, 2, 2, 5, dtype=torch.bool)}, "visible has shape"),
        ({"visible": torch.ones(1, 2, 1, 5)}, "visible is torch.float32; it must be torch.bool"),
        ({"causal": True}, "as many keys as queries"),
        ({"held": torch.ones(1, 1, 5, dtype=torch.int32), "causal": True}, "at most one"),
        ({"out": torch.zeros(1, 8, 1, 4).transpose(1, 3)}, "out must be contiguous"),
        ({"impl": "cuda"}, "impl is 'cuda'; use 'auto', 'reference' or 'triton'"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"query": torch.zeros(1, 4, 1, 8), "key": torch.zeros(1, 2, 5, 8), "value": torch.zeros(1, 2, 5, 8)}
    arguments |= change
    with pytest.raises(KvlearnError, match=message):
        decode_attention(**arguments, scale=1.0)  # type: ignore[arg-type]  # wrong on purpose

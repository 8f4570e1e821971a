"""The interpreter that the other tests rely on computes bfloat16 right, or raises."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def multiply(a, b, out, wide, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(wide + at, product)
    tl.store(out + at, product.to(tl.bfloat16))


@triton.jit
def misuse(a, out, SIZE: tl.constexpr, REDUCE: tl.constexpr):
    x = tl.load(a + tl.arange(0, SIZE))
    x = tl.sum(x, 0) if REDUCE else x + x
    tl.store(out + tl.arange(0, SIZE), x)


def test_dot_and_rounding() -> None:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out, wide = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    multiply[(1,)](a, b, out, wide, SIZE=16)
    torch.testing.assert_close(wide, a.float() @ b.float(), rtol=0, atol=1e-5)
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize("reduce", [False, True])
def test_other_arithmetic_raises(reduce: bool) -> None:
    a = torch.randn(16).bfloat16()
    with pytest.raises(InterpreterError, match="computes in bfloat16"):
        misuse[(1,)](a, torch.empty_like(a), SIZE=16, REDUCE=reduce)

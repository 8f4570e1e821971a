"""Triton's interpreter with right bfloat16 where kernels use it (dot, casts); any other bfloat16 arithmetic raises.

The interpreter keeps bfloat16 as bits in uint16 and computes with the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


def _is_bfloat16(operand: Any) -> bool:
    operand = getattr(operand, "handle", operand)
    return isinstance(operand, _Handle) and operand.dtype.scalar == tl.bfloat16


def _widened(operand: Any) -> Any:
    return _Handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(operand: Any) -> Any:
    """To bfloat16, to the nearest and ties to even."""
    data = np.ascontiguousarray(operand.data, dtype=np.float32)
    bits = data.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return _Handle(np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, *(_widened(x) if _is_bfloat16(x) else x for x in (a, b)), *rest)

    return create_dot


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        wide = _widened(source) if _is_bfloat16(source) else source
        if target.scalar == tl.bfloat16:
            return _narrowed(wide)
        if wide is not source and target.scalar == tl.float32:
            return wide
        return original(self, wide, target, *rest)

    return cast_impl


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *operands: Any) -> Any:
        flat = [one for operand in operands for one in (operand if isinstance(operand, tuple) else (operand,))]
        if any(_is_bfloat16(operand) for operand in flat):
            raise TypeError("a kernel computes in bfloat16, which the interpreter gets wrong; widen the operands")
        return original(self, *operands)

    return checked


def repair() -> None:
    """Repair the interpreter of this process, once."""
    if getattr(_Builder, "repaired", False):
        return
    _Builder.create_dot = _dot(_Builder.create_dot)
    _Builder.cast_impl = _cast(_Builder.cast_impl)
    _Builder.create_fp_to_fp = _cast(_Builder.create_fp_to_fp)
    _Builder.binary_op, _Builder.unary_op = _refusing(_Builder.binary_op), _refusing(_Builder.unary_op)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _refusing(operation.apply_impl)
    _Builder.repaired = True

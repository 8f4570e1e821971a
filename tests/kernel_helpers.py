"""What the kernel tests share: guarded outputs, an error budget, fresh processes and byte counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]

_PAD = 64  # elements on either side of a guarded tensor; keeps its start aligned


class Guarded:
    """A tensor for a kernel to write to, with canaries around it and poison in it.

    ``tensor`` is a contiguous view; :meth:`check` raises if anything outside it changed.
    """

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, like: Tensor | None = None) -> None:
        shape = shape if like is None else tuple(like.shape)
        dtype = dtype if like is None else like.dtype
        size = 1
        for length in shape:
            size *= length
        poison = float("nan") if dtype.is_floating_point else 77
        self._memory = torch.full((size + 2 * _PAD,), poison, dtype=dtype)
        self._memory[:_PAD] = self._memory[-_PAD:] = 123
        self.tensor = self._memory[_PAD : _PAD + size].view(shape)
        if like is not None:
            self.tensor.copy_(like)

    def check(self) -> None:
        assert (self._memory[:_PAD] == 123).all(), "written before the tensor"
        assert (self._memory[-_PAD:] == 123).all(), "written after the tensor"


def assert_within_budget(found: Tensor, eager: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """``found`` may be as wrong as ``eager``, PyTorch's own result in that precision, plus one rounding.

    Args:
        found: what the kernel computed.
        eager: the same in PyTorch with operands of that precision.
        exact: the same in float64 from the same operands.
        slack: roundings of the largest result allowed on top.
    """
    assert torch.isfinite(found.float()).all()
    rounding = torch.finfo(eager.dtype).eps * float(exact.abs().max())
    allowed = float((eager.double() - exact).abs().max()) + slack * rounding
    error = float((found.double() - exact).abs().max())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def in_fresh_process(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a new Python without TRITON_INTERPRET; fails with its error output."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@contextmanager
def counting_bytes() -> Iterator[dict[str, int]]:
    """Bytes that kernels load and store in the interpreter meanwhile, masked elements left out."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    count = {"loaded": 0, "stored": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count["loaded"] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count["stored"] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    try:
        yield count
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store

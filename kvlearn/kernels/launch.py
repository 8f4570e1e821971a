"""Which implementation runs, on which target, with which launch parameters.

Triton is imported by a launch and by nothing before it, so everything else works where it is not installed. Launch
parameters come from ``launch.json``, one table per target, rewritten on a GPU by ``python -m kvlearn.kernels.tune``;
nothing is tuned while a request runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError

Impl = Literal["auto", "reference", "triton"]

TABLE = Path(__file__).with_name("launch.json")
SMALL = (86, 89, 120, 121)  # CUDA architectures with 99 KB of shared memory for a program
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Triton's interpreter keeps bfloat16 as bits and computes with the bits; tests that repair it empty this set.
WRONG_WHEN_INTERPRETED = {torch.bfloat16}

Parameters = dict[str, int]
Launcher = Callable[..., None]

# Called in place of every launch while a recording runs; see :mod:`kvlearn.kernels.dry`.
instead: Launcher | None = None


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


def use_triton(impl: Impl, tensor: Tensor) -> bool:
    """Decide for one call; ``tensor`` is the operand whose device and dtype decide.

    ``"auto"`` is Triton for float16, bfloat16 and float32 on a GPU where triton is installed, and the reference
    otherwise. An explicit request never falls back.

    Raises:
        KvlearnError: ``impl`` is unknown, or ``"triton"`` was asked for and cannot run on this tensor.
    """
    if impl == "reference":
        return False
    if impl == "auto":
        return tensor.is_cuda and tensor.dtype in DTYPES and installed()
    if impl != "triton":
        raise KvlearnError(f"impl is {impl!r}; use 'auto', 'reference' or 'triton'.")
    if not installed():
        raise KvlearnError(
            "impl='triton' needs the package triton, which is not installed; install it (Linux only) or use "
            "impl='reference'."
        )
    if tensor.dtype not in DTYPES:
        raise KvlearnError(f"impl='triton' takes float16, bfloat16 and float32, not {tensor.dtype}; use 'reference'.")
    if instead is not None or tensor.is_cuda:
        return True
    if not interpreted():
        raise KvlearnError(
            f"impl='triton' needs tensors on a GPU and these are on {tensor.device}; use impl='reference', or set "
            "TRITON_INTERPRET=1 before starting Python to run kernels in Triton's (slow) interpreter."
        )
    if tensor.dtype in WRONG_WHEN_INTERPRETED:
        raise KvlearnError(f"Triton's interpreter computes {tensor.dtype} wrongly; use float32 or float16 there.")
    return True


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel[grid](*args, **options)`` on the device of the first argument; an empty grid does nothing."""
    if 0 in grid:
        return
    if instead is not None:
        instead(kernel, grid, args, options)
    elif args[0].is_cuda and args[0].device.index != torch.cuda.current_device():
        with torch.cuda.device(args[0].device):  # Triton launches on the current device
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def target() -> str:
    """The target of the next launch: ``"interpreter"``, ``"cuda:90"``, ``"hip:gfx942"``."""
    if interpreted():
        return "interpreter"
    from triton.runtime import driver

    current = driver.active.get_current_target()
    return f"{current.backend}:{current.arch}"


@cache
def table() -> dict[str, dict[str, dict[str, Parameters]]]:
    """``{target: {kernel: {family: parameters}}}`` of :data:`TABLE`."""
    tables: dict[str, dict[str, dict[str, Parameters]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return tables


def nearest(wanted: str, known: list[str]) -> str:
    """The table that serves a target without one of its own.

    For ``cuda`` that is the newest older architecture. The oldest table stays below the shared memory of the small
    cards (86, 89, 120, 121) and serves them too. For anything else it is the first of the same backend.
    """
    if wanted in known:
        return wanted
    backend, _, arch = wanted.partition(":")
    same = [name for name in known if name.startswith(f"{backend}:")]
    if not same:
        raise KvlearnError(f"there are no kernels for {wanted}; use impl='reference'. Known are {', '.join(known)}.")
    if backend != "cuda":
        return same[0]
    by_age = sorted(same, key=lambda name: int(name[5:]))
    older = [name for name in by_age if int(name[5:]) <= int(arch)]
    return by_age[0] if int(arch) in SMALL or not older else older[-1]


@cache
def parameters(name: str, kernel: str, family: str) -> Parameters:
    """Launch parameters of one family of shapes of a kernel on target ``name``."""
    return table()[nearest(name, list(table()))][kernel][family]


def dim_family(dim: int, dtype: torch.dtype) -> str:
    """The part of a family's name that speaks of the head dimension and the element size: ``"d128 16bit"``."""
    if dim > 256:
        raise KvlearnError(f"impl='triton' takes head dimensions up to 256, not {dim}; use impl='reference'.")
    return f"d{max(64, padded(dim))} {32 if dtype == torch.float32 else 16}bit"


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds ``size``, and at least ``least``."""
    return max(least, 1 << (size - 1).bit_length())


def dot_precision(dtype: torch.dtype, dim: int) -> str:
    """How ``tl.dot`` multiplies operands of ``dtype``, ``dim`` wide, on the current target.

    float32 must not become TF32. On NVIDIA it is three TF32 products, exact to about 21 bits, as long as operands of
    that width fit in registers in three parts; beyond, and on AMD, it is multiplied as it is.
    """
    if dtype == torch.float32:
        return "tf32x3" if target().startswith("cuda") and dim <= 128 else "ieee"
    return "tf32"  # ignored by 16-bit operands

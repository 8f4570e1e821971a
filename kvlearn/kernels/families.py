"""The families of shapes that are compiled ahead of time: every kernel, every head dimension, every kind of mask.

Each is a call of a public function on meta tensors, so what is compiled is what a request would launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.features import DYNAMIC
from kvlearn.kernels.column_mass import column_mass
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.observe import observe
from kvlearn.kernels.replace import replace
from kvlearn.kernels.score import Weights, score
from kvlearn.kernels.select import select
from kvlearn.shapes import GroupReduce

DIMS = (64, 80, 96, 128, 256)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Family:
    """One call to compile.

    Attributes:
        name: what tables call it.
        call: makes the call, inside :func:`kvlearn.kernels.dry.recording`.
        dot: whether its main kernel must use matrix instructions (see :func:`kvlearn.kernels.launch.dot_precision`).
    """

    name: str
    call: Callable[[], object]
    dot: bool = False


def _meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    dtype: torch.dtype,
    dim: int,
    *,
    mask: str = "none",
    group: int = 4,
    queries: int = 1,
    batch: int = 1,
    slots: int = 2048,
    heads: int = 8,
    softcap: float | None = None,
) -> None:
    """One call of decode_attention."""
    key = _meta(batch, heads, slots, dim, dtype=dtype)
    decode_attention(
        _meta(batch, heads * group, queries, dim, dtype=dtype),
        key,
        key,
        visible=_meta(batch, heads, queries, slots, dtype=torch.bool) if mask == "visible" else None,
        held=_meta(batch, heads, slots, dtype=torch.int32) if mask == "held" else None,
        causal=mask == "causal",
        scale=dim**-0.5,
        softcap=softcap,
        impl="triton",
    )


def observation(
    dtype: torch.dtype,
    dim: int,
    *,
    fold: bool = True,
    queries: int = 32,
    group: int = 4,
    softcap: float | None = None,
    group_reduce: GroupReduce = "mean",
    last: bool = False,
) -> None:
    """One call of observe or column_mass; more queries than one block are a prompt."""
    batch, heads, slots = 1, 8, 2048
    query, key = _meta(batch, heads * group, queries, dim, dtype=dtype), _meta(batch, heads, slots, dim, dtype=dtype)
    lse = _meta(batch, heads * group, queries)
    state = _meta(batch, heads, len(history.FIELDS), slots, dtype=history.DTYPE)
    query_pos, key_pos = _meta(batch, queries, dtype=torch.int32), _meta(batch, heads, slots, dtype=torch.int32)
    last_query = _meta(batch, heads, slots) if last else None
    own = queries > 32
    if fold:
        observe(
            state, query, lse, key, query_pos=query_pos, key_pos=key_pos, scale=dim**-0.5, block=32, softcap=softcap,
            group_reduce=group_reduce, own_keys_last=own, last=last_query, impl="triton",
        )  # fmt: skip
    else:
        column_mass(
            query, lse, key, query_pos=query_pos, key_pos=key_pos, scale=dim**-0.5, block=32, softcap=softcap,
            group_reduce=group_reduce, own_keys_last=own, impl="triton",
        )  # fmt: skip


def forecast(hidden: int, inputs: int, static: torch.dtype = FP16) -> None:
    """One call of score."""
    batch, heads, slots = 1, 8, 2048
    weights = Weights(
        _meta(heads, 1 + hidden, len(DYNAMIC)),
        _meta(heads, 1 + hidden, inputs),
        _meta(heads, 1 + hidden, 1),
        _meta(heads, 1, hidden) if hidden else None,
    )
    state = _meta(batch, heads, len(history.FIELDS), slots, dtype=history.DTYPE)
    pos, length = _meta(batch, heads, slots, dtype=torch.int32), _meta(batch, dtype=torch.int64)
    score(state, pos, length, _meta(batch, heads, slots, inputs, dtype=static), weights, impl="triton")


def selection(slots: int, count: int, dtype: torch.dtype = FP32) -> None:
    """One call of select."""
    shape = (1, 8, slots)
    select(
        _meta(*shape, dtype=dtype),
        _meta(*shape, dtype=torch.int32),
        _meta(*shape, dtype=torch.bool),
        count,
        fault=_meta(1, dtype=torch.int32),
        impl="triton",
    )


def replacement(dtype: torch.dtype, dim: int, *, whole: bool, count: int = 1, padded: bool = False) -> None:
    """One call of replace; ``whole``: with history, static inputs and last-query mass."""
    batch, heads, slots = 1, 8, 2048
    keys, new = _meta(batch, heads, slots, dim, dtype=dtype), _meta(batch, heads, count, dim, dtype=dtype)
    replace(
        keys,
        keys,
        _meta(batch, heads, slots, dtype=torch.int32),
        state=_meta(batch, heads, len(history.FIELDS), slots, dtype=history.DTYPE) if whole else None,
        static=_meta(batch, heads, slots, 18, dtype=FP16) if whole else None,
        last_query=_meta(batch, heads, slots) if whole else None,
        target=_meta(batch, heads, count, dtype=torch.int64),
        key=new,
        value=new,
        new_pos=_meta(batch, count, dtype=torch.int32),
        new_static=_meta(batch, heads, count, 18, dtype=FP16) if whole else None,
        padded=padded,
        impl="triton",
    )


def families() -> list[Family]:
    """All of them."""
    found: list[Family] = []

    def add(name: str, function: Callable[..., None], *args: object, dot: bool = False, **options: object) -> None:
        words = [_SHORT.get(a, str(a)) if isinstance(a, torch.dtype) else str(a) for a in args]
        told = [
            f"{name}={_SHORT.get(v, v) if isinstance(v, torch.dtype) else v}" if v is not True else name
            for name, v in options.items()
        ]
        found.append(Family(" ".join([name, *words, *told]), partial(function, *args, **options), dot))

    def attend(dtype: torch.dtype, dim: int, **options: object) -> None:
        add("attend", attention, dtype, dim, dot=dtype != FP32 or dim <= 128, **options)

    def mass(dtype: torch.dtype, dim: int, **options: object) -> None:
        add("mass", observation, dtype, dim, dot=dtype != FP32 or dim <= 128, **options)

    for dim in DIMS:
        attend(BF16, dim)
        attend(BF16, dim, queries=2048, mask="causal")
        mass(BF16, dim)
    # Every family of launch parameters, with all that takes registers; the few queries of 3 heads have odd rows.
    heavy: dict[str, object] = {"group": 3, "softcap": 50.0}
    for dtype in (FP16, FP32):
        for dim in (64, 128, 256):
            attend(dtype, dim, mask="held", **heavy)
            attend(dtype, dim, mask="visible", **heavy)
            attend(dtype, dim, queries=32, mask="visible", **heavy)
            mass(dtype, dim, queries=2048, last=True, group_reduce="max", **heavy)
            mass(dtype, dim, queries=2048, fold=False, **heavy)
            mass(dtype, dim, queries=2048, fold=False, group_reduce="max", **heavy)
    for dim in (64, 128, 256):
        attend(FP32, dim)
        attend(FP32, dim, queries=2048, mask="causal", softcap=50.0)
        mass(FP32, dim)
    attend(BF16, 64, group=1)
    attend(BF16, 128, group=7, batch=64)
    attend(BF16, 256, group=8)
    mass(BF16, 128, group=7)
    add("forecast", forecast, 0, 2)
    add("forecast", forecast, 32, 18)
    add("forecast", forecast, 128, 66)
    add("forecast", forecast, 32, 18, static=torch.int8)
    add("select", selection, 2048, 32)
    add("select", selection, 8192, 64, dtype=FP16)
    add("select", selection, 8192, 6144)
    add("write", replacement, BF16, 128, whole=False)
    add("write", replacement, FP32, 80, whole=True)
    add("write", replacement, FP16, 256, whole=True, count=2048, padded=True)
    return found

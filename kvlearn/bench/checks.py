"""Every kernel against the reference and float64, on the device where it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.decode_attention.reference import naive
from kvlearn.kernels.traffic import Shape
from kvlearn.kernels.workloads import Workload


@dataclass(frozen=True)
class Check:
    """One operation at one type and head dimension.

    Attributes:
        name: of the operation.
        dtype: of queries, keys and values.
        dim: head dimension.
        error: largest difference from float64 (or from the reference, where equality is asked for: 0 or 1).
        allowed: what PyTorch itself is off by in that type, plus one rounding.
    """

    name: str
    dtype: str
    dim: int
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is within what is allowed (NaN is not)."""
        return self.error <= self.allowed

    def line(self) -> str:
        """One line of text."""
        what = f"{self.name:10} {self.dtype:8} D {self.dim:3}"
        return f"{what} error {self.error:.2e} allowed {self.allowed:.2e} {'ok' if self.passed else 'WRONG'}"


def check_all(device: str, toy: bool) -> list[Check]:
    """All operations; at toy sizes, only what an interpreter computes right and soon."""
    if toy:
        cases = [(torch.float32, 16), (torch.float16, 64)]
        shape = Shape(batch=1, heads=1, group=3, slots=33, block=4, inputs=5, hidden=4)
    else:
        cases = [(torch.bfloat16, dim) for dim in (64, 80, 96, 128, 256)]
        cases += [(torch.float16, 128), (torch.float32, 64), (torch.float32, 128), (torch.float32, 256)]
        shape = Shape(batch=3, heads=2, group=7, slots=1111, block=32)
    found = []
    for dtype, dim in cases:
        for check in (attention, observation, rest):
            sized = Shape(**{**shape.__dict__, "dim": dim, "element": dtype.itemsize})
            for name, error, allowed in check(sized, dtype, device):
                found.append(Check(name, str(dtype).removeprefix("torch."), dim, error, allowed))
    return found


Errors = Iterator[tuple[str, float, float]]


def _largest(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max())


def attention(shape: Shape, dtype: torch.dtype, device: str) -> Errors:
    """A step, a step over slots of which some are empty, a masked chunk and a prompt."""
    for name, queries in (("step", 1), ("held", 1), ("chunk", 5), ("prompt", shape.slots)):
        load = Workload(shape, dtype, device, "triton", queries)
        visible = held = None
        generator = torch.Generator(device).manual_seed(1)
        if name == "held":
            held = torch.where(load.pos[:, :1] % 3 == 0, -1, load.pos[:, :1])
            visible = (held >= 0)[:, :, None]
        elif name == "chunk":
            mask = (shape.batch, shape.heads, queries, shape.slots)
            visible = torch.rand(mask, generator=generator, device=device) < 0.6
        causal = name == "prompt"
        out, lse = decode_attention(
            load.query, load.keys, load.values, scale=load.scale, held=held, causal=causal, impl="triton",
            visible=visible if held is None else None,
        )  # fmt: skip
        operands = load.query, load.keys, load.values
        q, k, v = (t.double() for t in operands)
        exact, exact_lse = naive(q, k, v, visible, causal, load.scale, None)
        eager = _eager(*operands, visible, causal, load.scale)
        rounding = torch.finfo(dtype).eps * float(exact.abs().max())
        # Three TF32 products leave 21 bits of the 24 that float32 has.
        yield name, _largest(out, exact), _largest(eager, exact) + (16 if dtype == torch.float32 else 4) * rounding
        yield f"{name} lse", _largest(lse, exact_lse), 1e-4


def _eager(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention in the operands' own precision, as PyTorch's unfused operations give it."""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if causal:
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()[None, None]
    if visible is not None:
        visible = visible.expand(-1, k.shape[1] if visible.shape[1] > 1 else 1, -1, -1)
        hidden = ~(visible.repeat_interleave(group, 1) if visible.shape[1] > 1 else visible)
        logits = logits.masked_fill(hidden, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)


def _both(run: Callable[[Workload], Tensor], shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return run(Workload(shape, dtype, device, "triton")), run(Workload(shape, dtype, device, "reference"))


def observation(shape: Shape, dtype: torch.dtype, device: str) -> Errors:
    """History after one block: the share of numbers that differ, and by how much."""

    def run(load: Workload) -> Tensor:
        load.observe()
        return load.state

    found, expected = _both(run, shape, dtype, device)
    # Masses that differ in the last bit may fall on either side of a code's edge, and one code is 5 percent.
    yield "observe", float((found != expected).float().mean()), 0.02
    masses = slice(history.FIELDS.index("hits"))  # what counts hits jumps where a mass meets the threshold
    found, expected = found[:, :, masses].float(), expected[:, :, masses].float()
    yield "codes", float(((found - expected).abs() / (expected.abs() + 1e-4)).max()), 0.06


def rest(shape: Shape, dtype: torch.dtype, device: str) -> Errors:
    """Scores, the order of victims by both kernels, and slots after a write."""

    def forecast(load: Workload) -> Tensor:
        load.forecast()
        return load.score

    found, expected = _both(forecast, shape, dtype, device)
    yield "forecast", _largest(found, expected), 1e-4 * float(expected.abs().max())
    for name, count in (("select", shape.block), ("rank", shape.slots - shape.block)):

        def order(load: Workload, count: int = count) -> Tensor:
            load.score.copy_(load.pos % 5)  # ties
            return load.select(count)

        yield name, float(not torch.equal(*_both(order, shape, dtype, device))), 0.0

    def written(load: Workload) -> Tensor:
        load.order.copy_(load.pos.argsort(-1)[..., : shape.block])
        load.write()
        load.settle()
        return torch.cat(
            [
                load.keys.flatten(),
                load.values.flatten(),
                load.state.flatten().to(dtype),
                load.static.flatten().to(dtype),
            ]
        )

    yield "write", float(not torch.equal(*_both(written, shape, dtype, device))), 0.0

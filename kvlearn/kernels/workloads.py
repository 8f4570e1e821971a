"""One layer's operands at a given size, and every operation on them: what is checked, timed and tuned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlearn import features, history
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.launch import Impl
from kvlearn.kernels.observe import observe
from kvlearn.kernels.replace import replace
from kvlearn.kernels.score import Weights, score
from kvlearn.kernels.select import select
from kvlearn.kernels.traffic import Shape

SEEN = 30000  # tokens that each row has seen


class Workload:
    """A full layer in the middle of a long generation; every operation writes to memory allocated here.

    Args:
        shape: sizes; ``element`` is taken from ``dtype``.
        dtype: of queries, keys and values.
        device: where.
        impl: implementation of every operation.
        queries: queries per call of :meth:`attend`.
        seed: of the random operands.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: Impl = "auto",
        queries: int = 1,
        seed: int = 0,
    ) -> None:
        self.shape, self.impl = shape, impl
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        b, h, s, d = shape.batch, shape.heads, shape.slots, shape.dim
        query_heads, units = h * shape.group, 1 + shape.hidden
        self.scale = d**-0.5
        self.keys, self.values = normal(b, h, s, d, dtype=dtype), normal(b, h, s, d, dtype=dtype)
        self.query = normal(b, query_heads, queries, d, dtype=dtype)
        self.out, self.lse = torch.empty_like(self.query), torch.empty(b, query_heads, queries, device=device)
        places = torch.rand(b, h, SEEN, generator=generator, device=device)
        self.pos = places.argsort(-1)[..., :s].int().contiguous()
        self.length = torch.full((b,), SEEN, dtype=torch.int64, device=device)

        self.queries = normal(b, query_heads, shape.block, d, dtype=dtype)
        self.query_pos = torch.arange(SEEN, SEEN + shape.block, dtype=torch.int32, device=device).repeat(b, 1)
        self.norms = torch.full((b, query_heads, shape.block), 4.0 + math.log(s), device=device)
        self.state = torch.rand(b, h, len(history.FIELDS), s, generator=generator, device=device).to(history.DTYPE)

        self.static = normal(b, h, s, shape.inputs, dtype=features.STATIC_DTYPE)
        self.weights = Weights(
            normal(h, units, len(features.DYNAMIC)),
            normal(h, units, shape.inputs),
            normal(h, units, 1),
            normal(h, 1, shape.hidden) if shape.hidden else None,
        )
        self.score = torch.empty(b, h, s, device=device)
        self.protected = self.pos > SEEN - 2 * shape.block
        self.order = torch.zeros(b, h, shape.block, dtype=torch.int64, device=device)

        self.key, self.value = normal(b, h, 1, d, dtype=dtype), normal(b, h, 1, d, dtype=dtype)
        self.new_pos = torch.full((b, 1), SEEN, dtype=torch.int32, device=device)
        self.new_keys, self.new_values = (normal(b, h, shape.block, d, dtype=dtype) for _ in range(2))
        self.new_static = normal(b, h, shape.block, shape.inputs, dtype=features.STATIC_DTYPE)

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.keys.nbytes

    def attend(self) -> None:
        """The queries' attention over all slots."""
        decode_attention(
            self.query, self.keys, self.values, scale=self.scale, out=self.out, lse=self.lse, impl=self.impl
        )

    def observe(self) -> None:
        """One block observed and folded into the history."""
        observe(
            self.state,
            self.queries,
            self.norms,
            self.keys,
            query_pos=self.query_pos,
            key_pos=self.pos,
            scale=self.scale,
            block=self.shape.block,
            impl=self.impl,
        )

    def forecast(self) -> None:
        """The scorer's forecast for all slots."""
        score(self.state, self.pos, self.length, self.static, self.weights, out=self.score, impl=self.impl)

    def select(self, count: int | None = None) -> Tensor:
        """The next block's victims (or ``count``)."""
        if count is not None:
            return select(self.score, self.pos, self.protected, count, impl=self.impl)
        return select(self.score, self.pos, self.protected, self.shape.block, out=self.order, impl=self.impl)

    def write(self) -> None:
        """One token per row over the first victim, as far as the next query reads it."""
        replace(
            self.keys,
            self.values,
            self.pos,
            target=self.order[..., :1],
            key=self.key,
            value=self.value,
            new_pos=self.new_pos,
            impl=self.impl,
        )

    def settle(self) -> None:
        """All tokens of a block over its victims, with every piece of state."""
        replace(
            self.keys,
            self.values,
            self.pos,
            state=self.state,
            static=self.static,
            target=self.order,
            key=self.new_keys,
            value=self.new_values,
            new_pos=self.query_pos,
            new_static=self.new_static,
            impl=self.impl,
        )

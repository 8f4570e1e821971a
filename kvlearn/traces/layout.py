"""Sizes of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvlearn.errors import KvlearnError


@dataclass(frozen=True)
class Layout:
    """Sizes that fix the shapes of a trace's tensors.

    Args:
        layers: indices in the model of the layers that are traced (those with full attention), ``L`` of them.
        heads: KV heads, ``H``.
        head_dim: ``D``.
        window: tokens of a window, ``T``; a multiple of ``block``.
        block: queries per observed block, ``W``.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    window: int
    block: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1 or self.window % self.block:
            raise KvlearnError(
                f"the window of {self.window} tokens is no multiple of the block of {self.block}; choose one that is."
            )

    @property
    def blocks(self) -> int:
        """``N``, blocks of a window."""
        return self.window // self.block

    @property
    def ends(self) -> list[int]:
        """Tokens that exist when each block ends: the columns stored for it."""
        return list(range(self.block, self.window + 1, self.block))

    @property
    def packed(self) -> int:
        """Codes stored per layer and head: the sum of :attr:`ends`."""
        return sum(self.ends)

    @property
    def window_bytes(self) -> int:
        """Bytes of a window's tensors before compression, without what an on-policy trace adds."""
        return len(self.layers) * self.heads * (self.window * 2 * (self.head_dim + 2) + 2 * self.packed)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the bfloat16 KV cache of a window."""
        return len(self.layers) * self.heads * self.window * self.head_dim * 2 * 2

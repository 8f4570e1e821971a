"""Encoders: what a scorer reads of the content of keys and values, a few numbers per token and KV head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from typing import Self

    from kvlearn.scorers.config import ScorerConfig

_LEAST_STD = 1e-4  # a number that varies less than this in the data is not divided by its deviation


class KeyEncoder(nn.Module):
    """A linear map of each KV head's own key.

    Args:
        config: of the scorer.
    """

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        lead = (len(config.layers), config.heads)
        self.projection = nn.Parameter(torch.empty(*lead, config.head_dim, config.key_rank))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random directions."""
        nn.init.normal_(self.projection, std=self.projection.shape[-2] ** -0.5)

    @torch.no_grad()
    def fit(self, vectors: Tensor) -> None:
        """Start at the principal directions of each head's keys.

        Args:
            vectors: ``[L, 2 H, N, D]`` of a sample of tokens, from :func:`kvlearn.features.layer_vectors`.
        """
        self.projection.copy_(_principal(self._keys(vectors), self.projection.shape[-1]))

    def forward(self, vectors: Tensor) -> Tensor:
        """Tokens of all layers: ``[L, 2 H, C, D]`` to ``[L, H, C, R]``, in float32."""
        return self._keys(vectors) @ self.projection.float()

    def encode(self, index: int, vectors: Tensor) -> Tensor:
        """Tokens of the ``index``-th scored layer: ``[B, 2 H, C, D]`` to ``[B, H, C, R]``."""
        return self._keys(vectors) @ self.projection[index].float()

    def _keys(self, vectors: Tensor) -> Tensor:
        return vectors[:, : self.projection.shape[1]]


class _Folded(NamedTuple):
    """A :class:`LayerEncoder` that acts on raw numbers; axis ``E + O`` holds hidden units, then the linear part."""

    weight: Tensor  # [..., I, E + O]
    bias: Tensor  # [..., 1, E + O]
    out: Tensor  # [..., E, O]


class LayerEncoder(nn.Module):
    """A linear map plus one hidden layer (GELU) of a token's keys and values of all KV heads, for all KV heads at once.

    Inputs are standardised by the mean and deviation that :meth:`fit` found.

    Args:
        config: of the scorer.
    """

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        layers, hidden = len(config.layers), config.encoder_hidden
        inputs, outputs = 2 * config.heads * config.head_dim, config.heads * config.key_rank
        self.heads = config.heads
        self.linear = nn.Parameter(torch.empty(layers, inputs, outputs))
        self.w1 = nn.Parameter(torch.empty(layers, inputs, hidden))
        self.b1 = nn.Parameter(torch.empty(layers, hidden))
        self.w2 = nn.Parameter(torch.empty(layers, hidden, outputs))
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(layers, inputs))
        self.register_buffer("std", torch.ones(layers, inputs))
        self._cache: dict[int, _Folded] = {}
        self._cache_key: tuple[int, ...] = ()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Outputs of order one for standardised inputs."""
        inputs, hidden = self.w1.shape[1:]
        nn.init.normal_(self.linear, std=inputs**-0.5)
        nn.init.normal_(self.w1, std=inputs**-0.5)
        nn.init.zeros_(self.b1)
        nn.init.normal_(self.w2, std=0.5 * hidden**-0.5)

    @torch.no_grad()
    def fit(self, vectors: Tensor) -> None:
        """Set the standardisation from a sample of tokens ``[L, 2 H, N, D]``, and reset the weights."""
        std, mean = torch.std_mean(self._inputs(vectors), dim=1)
        self.std.copy_(torch.where(std > _LEAST_STD, std, torch.ones_like(std)))
        self.mean.copy_(mean)
        self.reset_parameters()

    def forward(self, vectors: Tensor) -> Tensor:
        """Tokens of all layers: ``[L, 2 H, C, D]`` to ``[L, H, C, R]``, in float32."""
        folded = self._fold(slice(None))
        z = torch.baddbmm(folded.bias, self._inputs(vectors), folded.weight)
        hidden, linear = z.split(folded.out.shape[-2:], dim=-1)
        return self._by_head(torch.baddbmm(linear, functional.gelu(hidden), folded.out))

    @torch.no_grad()
    def encode(self, index: int, vectors: Tensor) -> Tensor:
        """Tokens of the ``index``-th scored layer: ``[B, 2 H, C, D]`` to ``[B, H, C, R]``."""
        weight, bias, out = self._kept(index)
        x = self._inputs(vectors)  # [B, C, I]
        hidden, linear = torch.addmm(bias, x.flatten(0, 1), weight).split(out.shape, dim=-1)
        encoded = torch.addmm(linear, functional.gelu(hidden), out)
        return self._by_head(encoded.unflatten(0, x.shape[:2]))

    def _inputs(self, vectors: Tensor) -> Tensor:
        """``[B, C, I]``."""
        return vectors.transpose(1, 2).flatten(2)

    def _by_head(self, encoded: Tensor) -> Tensor:
        """``[B, C, H R]`` to ``[B, H, C, R]``."""
        return encoded.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _fold(self, layers: slice | int) -> _Folded:
        """Standardisation folded into the weights of some layers."""
        weight = torch.cat([self.w1[layers], self.linear[layers]], dim=-1) / self.std[layers][..., None]
        bias = functional.pad(self.b1[layers], (0, self.linear.shape[-1]))[..., None, :]
        return _Folded(weight, bias - self.mean[layers][..., None, :] @ weight, self.w2[layers])

    def _kept(self, index: int) -> _Folded:
        """What encodes one layer; kept until a weight changes."""
        key = versions(self)
        if key != self._cache_key:
            self._cache.clear()
            self._cache_key = key
        if index not in self._cache:
            self._cache[index] = _Folded(*(t.float().contiguous() for t in self._fold(index)))
        return self._cache[index]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._cache.clear()  # weights move to another device or dtype
        return super()._apply(fn, recurse)


ENCODERS: dict[str, type[KeyEncoder] | type[LayerEncoder]] = {"key": KeyEncoder, "layer": LayerEncoder}
"""By the name used in configs."""


def versions(module: nn.Module) -> tuple[int, ...]:
    """Changes whenever a weight of the module's own is changed in place."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return tuple([0 if t is None or t.is_inference() else t._version for t in tensors])


def _principal(keys: Tensor, rank: int) -> Tensor:
    """``[L, H, D, R]`` principal directions of ``[L, H, N, D]`` keys, the widest first, each scaled to unit spread."""
    centred = keys - keys.mean(-2, keepdim=True)
    size, direction = torch.linalg.eigh(centred.transpose(-1, -2) @ centred / keys.shape[-2])  # narrowest first
    largest = direction.abs().argmax(-2, keepdim=True)  # eigenvectors have no sign of their own: fix one
    direction = direction * direction.gather(-2, largest).sign()
    return (direction * size[..., None, :].clamp(min=1e-6).rsqrt())[..., -rank:].flip(-1)

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

    def encode(self, layers: slice, vectors: Tensor) -> Tensor:
        """Tokens of some scored layers, as one with the heads of all: ``[B, 2 H, C, D]`` to ``[B, H, C, R]``."""
        return self._keys(vectors) @ self.projection[layers].flatten(0, 1).float()

    @staticmethod
    def _keys(vectors: Tensor) -> Tensor:
        return vectors[:, : vectors.shape[1] // 2]


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
        self._cache: _Folded | None = None
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
        encoded = self._encode(self._inputs(vectors), self._fold())
        return encoded.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def encode(self, layers: slice, vectors: Tensor) -> Tensor:
        """Tokens of some scored layers, as one with the heads of all: ``[B, 2 H, C, D]`` to ``[B, H, C, R]``."""
        folded = _Folded(*(tensor[layers] for tensor in self._kept()))
        batch, _, count, _ = vectors.shape
        by_layer = vectors.unflatten(1, (2, -1, self.heads))  # [B, 2, L, H, C, D]
        x = by_layer.permute(2, 0, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [L, B C, I]
        encoded = self._encode(x, folded).view(-1, batch, count, self.heads, folded.out.shape[-1] // self.heads)
        return encoded.permute(1, 0, 3, 2, 4).flatten(1, 2)

    @staticmethod
    def _encode(x: Tensor, folded: _Folded) -> Tensor:
        """``[L, N, I]`` to ``[L, N, O]``."""
        z = torch.baddbmm(folded.bias, x, folded.weight)
        hidden, linear = z.split(folded.out.shape[-2:], dim=-1)
        return torch.baddbmm(linear, functional.gelu(hidden), folded.out)

    def _inputs(self, vectors: Tensor) -> Tensor:
        """``[B, C, I]``."""
        return vectors.transpose(1, 2).flatten(2)

    def _fold(self) -> _Folded:
        """Standardisation folded into the weights."""
        weight = torch.cat([self.w1, self.linear], dim=-1) / self.std[..., None]
        bias = functional.pad(self.b1, (0, self.linear.shape[-1]))[..., None, :]
        return _Folded(weight, bias - self.mean[..., None, :] @ weight, self.w2)

    def _kept(self) -> _Folded:
        """What encodes, of all layers; kept until a weight changes."""
        key = versions(self)
        if self._cache is None or key != self._cache_key:
            self._cache = _Folded(*(t.float().contiguous() for t in self._fold()))
            self._cache_key = key
        return self._cache

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._cache = None  # weights move to another device or dtype
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

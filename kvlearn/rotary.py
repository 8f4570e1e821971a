"""Keys without their rotary embedding, by the model's own rotary code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvlearn.errors import KvlearnError

_KEPT = 64  # positions whose angles are kept: a prompt's would take more than they save
_PROBED = (0, 5, 977)  # positions of the keys that a model is tried on
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest key; others are half precision
_HALF_TOLERANCE = 3e-2
_CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")


class Unrotator:
    """Undoes a model's rotary embedding.

    The model's own rotary module gives the angles (scaled RoPE included) and its own ``apply_rotary_pos_emb`` turns
    by the negated sine, so half, interleaved and partial layouts need no code here. Each layer's attention is tried on
    three random tokens, to see whether that gives its keys back and which layers rotate nothing.

    Args:
        model: a causal language model of transformers.
        layers: indices of the layers whose keys will be asked for.

    Raises:
        KvlearnError: the model has no rotary embedding that this way inverts.
    """

    def __init__(self, model: nn.Module, layers: Iterable[int]) -> None:
        base = cast(nn.Module, getattr(model, "base_model", model))
        config: Any = getattr(model, "config", None)
        self._latest: tuple[Tensor, Tensor, Tensor] | None = None
        self._name = getattr(config, "model_type", type(model).__name__)
        self._rotary = getattr(base, "rotary_emb", None)
        self._turn = getattr(sys.modules[type(base).__module__], "apply_rotary_pos_emb", None)
        types = getattr(config, "layer_types", None) or []
        # Models with one rotary base per kind of layer take the kind as an argument.
        by_type = "full_attention" in (getattr(config, "rope_parameters", None) or {})
        self._extra = {"layer_type": "full_attention"} if by_type and "full_attention" in types else {}
        attention = {
            module.layer_idx: module
            for name, module in base.named_modules()
            if type(module).__name__.endswith("Attention") and isinstance(getattr(module, "layer_idx", None), int)
        }
        self._rotated = {layer: self._probe(attention.get(layer), config) for layer in layers}

    def of_layer(self, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        """:meth:`__call__` for one layer: the identity where the layer rotates nothing."""
        return self if self.turns(layer) else _as_it_is

    def turns(self, layer: int) -> bool:
        """Whether a layer rotates its keys."""
        return self._rotated[layer]

    def angles(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[B, C, rotary dim]`` for positions ``[B, C]``."""
        assert self._rotary is not None
        cos, sin = self._rotary(like, position_ids, **self._extra)
        return cos, sin

    def __call__(self, keys: Tensor, position_ids: Tensor) -> Tensor:
        """Keys before the rotary embedding.

        Args:
            keys: ``[B, H, C, D]`` rotated keys.
            position_ids: ``[1 or B, C]`` the positions that rotated them.

        Returns:
            ``[B, H, C, D]`` in the dtype of ``keys``; computed in float32.
        """
        wide = keys.float()
        return self._rotate(wide, *self._inverse(position_ids, wide)).to(keys.dtype)

    def _inverse(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine that undo those of positions ``[B, C]``; on a CPU those of a block serve the next layer too.

        A GPU would have to be waited for to know that the positions are the same.
        """
        if position_ids.device.type != "cpu":
            return self._undoing(position_ids, like)
        known, inference = self._latest, torch.is_inference_mode_enabled()
        # What is made in inference mode cannot serve outside of it.
        if known is None or known[0].is_inference() != inference or not known[0].equal(position_ids):
            known = (position_ids.clone(), *self._undoing(position_ids, like))
            self._latest = known if position_ids.shape[1] <= _KEPT else None
        return known[1:]

    def _undoing(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles(position_ids, like)
        # Some scalings multiply cosine and sine by a factor; dividing by its square makes the inverse exact.
        factor = cos.square() + sin.square()
        return cos / factor, -sin / factor

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept between calls."""
        return sum(kept.nbytes for kept in self._latest or ())

    def rotate(self, plain: Tensor, positions: Tensor) -> Tensor:
        """Rotate as the model does, by positions of one's own.

        Args:
            plain: ``[B, H, C, D]`` keys or queries before the rotary embedding.
            positions: ``[B, C]``, or ``[B, H, C]`` where they differ between heads.

        Returns:
            ``[B, H, C, D]`` in the dtype of ``plain``; computed in float32.
        """
        wide = plain.float()
        if positions.ndim == 3:  # the model's code knows positions by row alone: every head becomes a row
            wide, positions = wide.flatten(0, 1)[:, None], positions.flatten(0, 1)
        return self._rotate(wide, *self.angles(positions, wide)).view(plain.shape).to(plain.dtype)

    def rotate_mean(self, plain: Tensor, positions: Tensor) -> Tensor:
        """The mean, over several positions, of what rotating by each would give.

        Args:
            plain: ``[B, H, C, D]`` keys or queries before the rotary embedding.
            positions: ``[B, N]``; all of them turn every token of their row.

        Returns:
            ``[B, H, C, D]`` in the dtype of ``plain``.
        """
        cos, sin = (angle.mean(1, keepdim=True) for angle in self.angles(positions, plain.float()))
        shape = (-1, plain.shape[2], -1)  # a rotation is linear in the cosine and the sine
        return self._rotate(plain, cos.expand(shape).to(plain.dtype), sin.expand(shape).to(plain.dtype)).to(plain.dtype)

    def _rotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert self._turn is not None
        try:
            rotated, _ = self._turn(keys, keys[:, :1], cos, sin)  # it wants queries and keys; one of them is ours
        except RuntimeError:  # a model that rotates only the first dimensions may cut them off itself
            part = cos.shape[-1]
            rotated, _ = self._turn(keys[..., :part], keys[:, :1, :, :part], cos, sin)
            rotated = torch.cat([rotated, keys[..., part:]], dim=-1)
        return cast(Tensor, rotated)

    def _probe(self, attention: nn.Module | None, config: Any) -> bool:
        """Whether a layer rotates its keys; raises if it does and they do not come back."""
        if self._rotary is None or self._turn is None or attention is None:
            raise self._refusal("has none that kvlearn finds")
        weight = next(attention.parameters())
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(1, len(_PROBED), config.get_text_config(decoder=True).hidden_size, generator=generator)
        tokens = tokens.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)
        positions = torch.tensor([_PROBED], device=weight.device)
        try:
            cos, sin = self.angles(positions, tokens)
            plain = _keys_of(attention, tokens, torch.ones_like(cos), torch.zeros_like(sin))
            rotated = _keys_of(attention, tokens, cos, sin)
            back = self(rotated, positions).float()
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise self._refusal(f"does not work as expected: {error}") from error
        if torch.equal(rotated, plain):
            return False
        tolerance = _TOLERANCE.get(rotated.dtype, _HALF_TOLERANCE) * float(plain.abs().max())
        if float((back - plain.float()).abs().max()) > tolerance:
            raise self._refusal("does not give a layer's keys back")
        return True

    def _refusal(self, why: str) -> KvlearnError:
        return KvlearnError(
            f"kvlearn cannot undo the rotary embedding of model type {self._name!r}, which {why}; choose a policy that "
            "reads no keys before rotation (`kvlearn policies` says which) and leave positions as they are."
        )


def _as_it_is(keys: Tensor, position_ids: Tensor) -> Tensor:
    return keys


class _Reached(Exception):
    """An attention module has handed its keys to the cache."""


class _Catcher:
    """Stands in for a cache, and stops the module that would fill it."""

    def update(self, key: Tensor, *_: Any, **__: Any) -> Any:
        raise _Reached(key)


@torch.no_grad()
def _keys_of(attention: nn.Module, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[1, H, C, D]`` keys that an attention module makes of ``tokens`` ``[1, C, hidden]``."""
    accepted = inspect.signature(attention.forward).parameters
    name = next((name for name in _CACHE_ARGUMENTS if name in accepted), "cache")
    try:
        attention(tokens, position_embeddings=(cos, sin), attention_mask=None, **{name: _Catcher()})
    except _Reached as reached:
        return cast(Tensor, reached.args[0])
    raise RuntimeError("its attention handed no keys to its cache")

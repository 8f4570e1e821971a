"""Keys without their rotary embedding, by the model's own rotary code."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvlearn.errors import KvlearnError


class Unrotator:
    """Undoes a model's rotary embedding.

    The model's own rotary module gives the angles (scaled RoPE included) and its own ``apply_rotary_pos_emb`` turns
    by the negated sine, so half, interleaved and partial layouts need no code here.

    Args:
        model: a causal language model of transformers.

    Raises:
        KvlearnError: the model has no rotary embedding that this way inverts (checked on random keys).
    """

    def __init__(self, model: nn.Module) -> None:
        base = cast(nn.Module, getattr(model, "base_model", model))
        rotary = getattr(base, "rotary_emb", None)
        modeling = sys.modules[type(base).__module__]
        apply = getattr(modeling, "apply_rotary_pos_emb", None)
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if rotary is None or apply is None:
            raise KvlearnError(
                f"model type {name!r} has no rotary embedding that kvlearn can undo, and this policy reads keys before "
                "rotation; choose a policy that does not (see `kvlearn policies`)."
            )
        self._rotary, self._apply = rotary, apply
        config: Any = getattr(model, "config", None)
        types = getattr(config, "layer_types", None) or []
        # Models with one rotary base per kind of layer take the kind as an argument.
        by_type = "full_attention" in (getattr(config, "rope_parameters", None) or {})
        self._extra = {"layer_type": "full_attention"} if by_type and "full_attention" in types else {}
        self._check(name, config)

    def angles(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[B, C, rotary dim]`` for positions ``[B, C]``."""
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
        cos, sin = self.angles(position_ids, wide)
        # Some rotary scalings multiply cosine and sine by a factor; dividing by its square keeps the inverse exact.
        factor = cos[:1, :1].square() + sin[:1, :1].square()
        unrotated, _ = self._apply(wide, wide, cos, -sin)
        return (unrotated / factor[..., :1].unsqueeze(1)).to(keys.dtype)

    def _check(self, name: str, config: Any) -> None:
        heads, dim = 1, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        device = next((b.device for b in self._rotary.buffers()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, heads, 3, dim, generator=generator).to(device)
        positions = torch.tensor([[0, 5, 977]], device=device)
        cos, sin = self.angles(positions, keys)
        rotated, _ = self._apply(keys, keys, cos, sin)
        if not torch.allclose(self(rotated, positions), keys, atol=1e-4):
            raise KvlearnError(f"kvlearn cannot undo the rotary embedding of model type {name!r}.")

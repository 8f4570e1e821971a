"""Which models an :class:`kvlearn.cache.EvictingCache` serves; docs/models.md lists them with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN_STATE = ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
"""Cache layers of transformers that go on as they are beside managed ones: windows, recurrent states, no attention."""

NO_ROLLBACK = (
    "an EvictingCache cannot be cropped, so assisted and prompt-lookup decoding cannot use it; generate without "
    "assistant_model and prompt_lookup_num_tokens."
)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose attention kvlearn cannot take over.

    Raises:
        KvlearnError: the model is an encoder-decoder, or its attention does not go through transformers' attention
            interface, has sinks, compresses keys, or shares them between layers.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise KvlearnError(
            f"{name} is an encoder-decoder, and an EvictingCache serves decoders only; use its own cache."
        )
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if not getattr(model, "_supports_attention_backend", False) or not (
        getattr(model, "_supports_sdpa", False) or capped
    ):
        raise KvlearnError(
            f"{name} does not use transformers' attention interface, so kvlearn cannot observe its attention; use a "
            "model class that supports attention backends."
        )
    if getattr(config, "kv_lora_rank", None):
        raise KvlearnError(
            f"{name} has multi-head latent attention, whose keys and values differ in size; use its own cache."
        )
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise KvlearnError(
            f"{name} has layers that read other layers' caches, which eviction would take from under them; use its own "
            "cache."
        )
    if any(parameter.endswith(".sinks") for parameter, _ in model.named_parameters()):
        raise KvlearnError(f"{name} has learned attention sinks, which kvlearn's attention lacks; use its own cache.")


def managed_layers(model: PreTrainedModel) -> tuple[list[Any], list[int]]:
    """Fresh cache layers of a model, as transformers would make them, and which of them have full attention.

    Raises:
        KvlearnError: a layer has state that kvlearn cannot keep, or there is no attention at all.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    layers: list[Any] = list(DynamicCache(config=config).layers)
    managed = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    for i, (kind, layer) in enumerate(zip(kinds or ["attention"] * len(layers), layers, strict=False)):
        # Releases of transformers that know no cache layer of a kind make it a full-attention one.
        known = kind in ("attention", "full_attention") if i in managed else type(layer).__name__ in _OWN_STATE
        if not known:
            raise KvlearnError(
                f"layer {i} of {name} is of kind {kind!r}, which an EvictingCache cannot hold with this release of "
                "transformers; use the model's own cache."
            )
    if getattr(model, "_is_stateful", False) and all(type(layer).__name__ != _OWN_STATE[1] for layer in layers):
        raise KvlearnError(
            f"{name} has recurrent layers, for which this release of transformers has no cache layer; use the model's "
            "own cache."
        )
    if not managed and not any(getattr(layer, "is_sliding", False) for layer in layers):
        raise KvlearnError(f"{name} has no attention layers, so there is nothing to evict; use its own cache.")
    return layers, managed


def own_validity(mask: Tensor | None, count: int) -> Tensor | None:
    """``[B, C]`` bool, which of a call's ``count`` columns are tokens; ``None`` when all are.

    Args:
        mask: ``[B, 1, C, C]`` bool over the call's own columns, or ``None``.

    Raises:
        KvlearnError: the mask is no such thing, or says more than causality and padding.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (count, count):
        raise KvlearnError(
            f"an EvictingCache takes a 2D attention mask [batch, tokens]; this model passed one of shape "
            f"{tuple(mask.shape)} and dtype {mask.dtype}."
        )
    visible = mask[:, 0]
    valid = visible.diagonal(dim1=-2, dim2=-1)
    if count > 1:
        causal = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril() & valid[:, None]
        if bool(((visible != causal) & valid[:, :, None]).any()):  # rows of padding see whatever keeps sdpa finite
            raise KvlearnError(
                "this model's attention mask is not causal within one call, and an EvictingCache serves plain causal "
                "attention over padded batches only."
            )
    return None if bool(valid.all()) else valid

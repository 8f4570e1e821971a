"""The attention implementation ``"kvlearn"`` that transformers calls.

With an :class:`kvlearn.cache.EvictingCache` the keys that arrive are tagged with their cache layer, which attends,
observes and evicts. With any other cache this is PyTorch's scaled dot product attention, unchanged; where a model caps
its logits (Gemma 2), which that lacks, it is our own.

In a graph of torch.compile the cache is one opaque operation per layer: what it does depends on counts that change with
every token, and none of them may be a reason to compile again.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlearn.errors import KvlearnError
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.support import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlearn.cache import EvictingCache
    from kvlearn.layer import EvictingLayer

NAME = "kvlearn"
_TAG = "_kvlearn_layer"
_HANDLE = "_kvlearn_cache"
_CACHES: weakref.WeakValueDictionary[int, EvictingCache] = weakref.WeakValueDictionary()
_count = itertools.count()
_UNSUPPORTED = ("s_aux", "position_bias", "indices", "sliding_window", "output_attentions")


def tag(key: Tensor, layer: EvictingLayer) -> Tensor:
    """Mark a fresh key tensor with the cache layer that must attend to it."""
    key = key.view(key.shape)
    setattr(key, _TAG, layer)
    return key


def handle_of(cache: EvictingCache) -> Tensor:
    """A number, as a tensor, by which a compiled graph finds the cache again; so one graph serves every cache."""
    number = next(_count)
    _CACHES[number] = cache
    return torch.tensor(number)


def tag_compiled(key: Tensor, handle: Tensor) -> Tensor:
    """Mark a tagged key with its cache too."""
    setattr(key, _HANDLE, handle)
    return key


@torch.library.custom_op("kvlearn::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Tensor,
    layer: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """:meth:`EvictingLayer.attend`, as compiled graphs see it."""
    found = _CACHES[int(cache)]
    if layer == found.managed[0]:
        found.begin(key.shape[2])
    attending: Any = found.layers[layer]
    out = attending.attend(query, key, value, mask, scale=scale, softcap=softcap, position_ids=position_ids)
    return torch.empty_like(query).copy_(out)  # laid out as the graph expects


@_attend.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def kvlearn_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form of transformers' ``AttentionInterface``.

    Args:
        module: the calling attention module.
        query: ``[B, H * G, C, D]`` rotated queries.
        key: ``[B, H, C, D]`` rotated keys of this call, tagged by :class:`EvictingCache`, or all keys of another cache.
        value: like ``key``.
        attention_mask: ``[B, 1, C, C]`` bool over this call's tokens, or ``None`` when none is padding.
        dropout: must be 0 with an EvictingCache.
        scaling: factor on the dot products; ``None`` means ``D ** -0.5``.
        **kwargs: ``position_ids``, ``softcap`` and whatever the model passes on.

    Returns:
        Output ``[B, C, H * G, D]`` and ``None``.
    """
    layer: EvictingLayer | None = getattr(key, _TAG, None)
    softcap = kwargs.get("softcap")
    if layer is None:
        if softcap is None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = attention_mask is None and query.shape[2] > 1
        out, _ = decode_attention(
            query, key, value, visible=attention_mask, causal=causal, scale=scale, softcap=softcap
        )
        return out.transpose(1, 2).contiguous(), None
    if (refusal := _refusal(module, dropout, kwargs)) is not None:
        layer.pending = False  # it was not bypassed, and may be called again
        raise KvlearnError(refusal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    positions = kwargs.get("position_ids")
    if torch.compiler.is_compiling():
        handle = getattr(key, _HANDLE)
        out = _attend(query, key, value, attention_mask, positions, handle, layer.config.index, scale, softcap)
    else:
        out = layer.attend(query, key, value, attention_mask, scale=scale, softcap=softcap, position_ids=positions)
    return out.transpose(1, 2).contiguous(), None


def _refusal(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> str | None:
    """Why an EvictingCache cannot serve this call, or ``None``."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            return f"this model's attention asks for {name!r}, which an EvictingCache cannot honour."
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "this model's attention looks ahead, and an EvictingCache serves causal attention only."
    return "an EvictingCache serves generation only; call model.eval() first." if dropout else None


def register() -> None:
    """Make ``attn_implementation="kvlearn"`` known to transformers. Called when transformers is imported."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, kvlearn_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded model to ``attn_implementation="kvlearn"`` and return it.

    With any cache but an :class:`kvlearn.EvictingCache` the model goes on exactly as with ``"sdpa"``.

    Raises:
        KvlearnError: kvlearn cannot take over this model's attention (:mod:`kvlearn.support`).
    """
    register()
    check_model(model)
    model.set_attn_implementation(NAME)
    return model


def require_enabled(model: Any) -> None:
    """Refuse what is no model, and a model that :func:`enable` has not been called on.

    Raises:
        KvlearnError: saying so.
    """
    if not hasattr(model, "config"):
        raise KvlearnError(f"model is {model!r}; give the transformers model first, then the policy and the budget.")
    current = getattr(model.config, "_attn_implementation", None)
    if current != NAME:
        raise wrong_attention(current)


def wrong_attention(current: str | None) -> KvlearnError:
    """A model attends in another way, of this name."""
    return KvlearnError(
        f"the model uses attn_implementation={current!r}, which an EvictingCache cannot see; "
        "call kvlearn.enable(model)."
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the argument that takes the cache: ``"cache"``, or ``"past_key_values"`` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

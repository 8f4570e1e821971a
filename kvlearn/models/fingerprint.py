"""Which model is this? A short, JSON-able answer that traces and scorers carry with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

from kvlearn.errors import KvlearnError

# The order in which differences are named: what a reader recognises first.
SHAPE_FIELDS = (
    "architecture",
    "layers",
    "kv_heads",
    "query_heads",
    "head_dim",
    "rope",
    "hidden_size",
    "vocab_size",
)
_SAMPLED = 64  # values hashed from each weight tensor
_SMALLEST = 2.0**-14  # the smallest normal float16: below it, float16 drops bits that bfloat16 keeps


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Describe a model so that a trace or a scorer made for it is recognised later.

    Args:
        model: A transformers decoder, on any device.

    Returns:
        A JSON-able dict: ``architecture`` (transformers' ``model_type``), ``layers``, ``kv_heads``, ``query_heads``,
        ``head_dim``, ``rope`` (the rope parameters, or None), ``hidden_size``, ``vocab_size``, and ``weights``, a hash
        of 64 values from the middle of every floating-point weight. The hash is taken after rounding to bfloat16 with
        values below 2**-14 as zero, so the same checkpoint loaded as bfloat16 or float32 (or, unless its values were
        stored in float32, as float16) gives the same hash; other weights of the same shape give another one.

    Raises:
        KvlearnError: If the configuration does not say how many layers or heads there are.
    """
    config = model.config.get_text_config(decoder=True)
    heads = _read(config, "num_attention_heads")
    hidden = _read(config, "hidden_size")
    return {
        "architecture": str(config.model_type),
        "layers": _read(config, "num_hidden_layers"),
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "query_heads": heads,
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "hidden_size": hidden,
        "vocab_size": _read(config, "vocab_size"),
        "weights": _weights_hash(model),
    }


def fingerprint_mismatch(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Name the first shape field in which two fingerprints differ.

    Weights are left out on purpose: a scorer for a base model is a fair choice for its fine-tuned sibling. Ask
    `same_weights` for them.

    Returns:
        For example ``"kv_heads: 3 against 5"``, or None if the two models have the same shape.
    """
    for field in SHAPE_FIELDS:
        ours, theirs = _plain(first.get(field)), _plain(second.get(field))
        if ours != theirs:
            return f"{field}: {ours} against {theirs}"
    return None


def same_weights(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two fingerprints come from the same weights; false if either does not say."""
    return first.get("weights") is not None and first.get("weights") == second.get("weights")


def _read(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        kind = getattr(config, "model_type", type(config).__name__)
        raise KvlearnError(
            f"the configuration of this {kind!r} model has no integer {name!r}: it is not a decoder kvlearn knows"
        )
    return value


def _plain(value: Any) -> Any:
    """Make a value equal to itself after a trip through JSON; parameters set to None count as absent."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0])) if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _weights_hash(model: PreTrainedModel) -> str | None:
    """Hash a few values of every weight; None for a model without data (on the meta device)."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if parameter.is_meta:
            return None
        if parameter.is_floating_point() and parameter.numel():
            digest.update(repr(tuple(parameter.shape)).encode())
            digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def _sample(weight: Tensor) -> bytes:
    """Bytes of up to 64 neighbouring values, so that one page of a memory-mapped file is touched."""
    import torch

    flat = weight.reshape(-1)
    start = flat.numel() // 2
    values = flat[start : start + _SAMPLED].to(device="cpu", dtype=torch.float32).to(torch.bfloat16)
    values = torch.where(values.abs() < _SMALLEST, torch.zeros_like(values), values)
    return values.view(torch.uint8).numpy().tobytes()

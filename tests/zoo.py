"""Tiny models with random weights, one of each family that kvlearn is tested with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 12}


@dataclass(frozen=True)
class Kind:
    """One model family.

    Attributes:
        name: its classes are ``{name}Config`` (or ``{name}TextConfig``) and ``{name}ForCausalLM``.
        options: what differs from :data:`BASE`; ``None`` leaves an option out.
        managed: layers with full attention.
        stock: the attention implementation to compare with.
    """

    name: str
    options: dict[str, Any]
    managed: tuple[int, ...] = (0, 1)
    stock: str = "sdpa"


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 3,
    "long_factor": [2.0] * 3,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
HYBRID = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}

ZOO: dict[str, Kind] = {
    "llama": Kind("Llama", HEADS),
    "llama-3-rope": Kind("Llama", {**HEADS, "rope_parameters": LLAMA3}),
    "llama-yarn": Kind("Llama", {**HEADS, "rope_parameters": YARN}),
    "qwen2": Kind("Qwen2", {}),
    "qwen3": Kind("Qwen3", HEADS),
    "mistral-sliding": Kind("Mistral", {**HEADS, "sliding_window": 8}, managed=()),
    "mistral": Kind("Mistral", {**HEADS, "sliding_window": None}),
    "gemma3-text": Kind("Gemma3", {**HEADS, **HYBRID, "sliding_window": 8, "query_pre_attn_scalar": 12}, managed=(1,)),
    "gemma2": Kind(
        "Gemma2",
        {**HEADS, **HYBRID, "sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0},
        managed=(1,),
        stock="eager",
    ),
    "phi3": Kind("Phi3", {}),
    "phi3-long-partial": Kind(
        "Phi3", {"rope_parameters": LONG, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64}
    ),
    "olmo2": Kind("Olmo2", {}),
    "smollm3": Kind("SmolLM3", {"no_rope_layers": [1, 0]}),
    "gpt-neox": Kind("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "phi": Kind("Phi", {"partial_rotary_factor": 0.5}),
    "granite": Kind("Granite", {"attention_multiplier": 0.2}),
    "cohere": Kind("Cohere", {"use_qk_norm": True}),
    "cohere2": Kind("Cohere2", {**HEADS, **HYBRID, "sliding_window": 8}, managed=(1,)),
    "starcoder2": Kind("Starcoder2", {"sliding_window": None}),
    "glm4": Kind("Glm4", {**HEADS, "partial_rotary_factor": 0.5}),
}


def build(name: str) -> Any:
    """A model of the zoo with its stock attention; equal names give equal weights."""
    kind = ZOO[name]
    config_class = getattr(transformers, f"{kind.name}TextConfig", None) or getattr(transformers, f"{kind.name}Config")
    model_class = getattr(transformers, f"{kind.name}ForCausalLM")
    options = {key: value for key, value in {**BASE, **kind.options}.items() if value is not None or key not in BASE}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config_class(**options), attn_implementation=kind.stock)
        for parameter in model.parameters():  # biases and norms start flat, and hide mistakes
            parameter.data += torch.randn_like(parameter) * 0.05
    model.generation_config.eos_token_id = None  # a random model may say anything, and tests count its tokens
    return model.float().eval()

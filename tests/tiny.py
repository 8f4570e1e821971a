"""Tiny models and texts, as plain functions: for tests, and for processes that tests start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from kvlearn.tasks.base import Case


def tiny_llama(
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocabulary: int = 200,
    seed: int = 0,
    dtype: Any = None,
    attention: str = "sdpa",
    **config: Any,
) -> LlamaForCausalLM:
    """A Llama with random weights: 2 layers, 4 query and 2 KV heads, 200 tokens, float32, in eval mode by default.

    Equal arguments give equal weights. Any other keyword goes to ``LlamaConfig``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,  # the usual 0.02 leaves so small a model's attention flat: nothing to evict by
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(LlamaConfig(**options), attn_implementation=attention)
    return model.to(dtype or torch.float32).eval()


def repetitive_cases(tokens: int, times: int) -> list[Case]:
    """Three made-up texts, each of as many random tokens, repeated: there is something to attend to."""
    import torch

    from kvlearn.tasks.base import Case

    generator = torch.Generator().manual_seed(3)
    parts = [torch.randint(1, 200, (tokens,), generator=generator).repeat(times) for _ in range(3)]
    return [Case(f"doc{i}", "made-up", ids) for i, ids in enumerate(parts)]

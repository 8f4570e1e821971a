"""What cannot be right after eviction is refused before a token is produced, in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cache_helpers import BLOCK, feed, prompt
from torch import nn
from transformers.generation.streamers import BaseStreamer

import kvlearn
from kvlearn.attention import NAME, cache_argument, kvlearn_attention
from kvlearn.errors import KvlearnError


@pytest.fixture
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def new_cache(model: Any, **options: Any) -> Any:
    return kvlearn.EvictingCache(model, **{"policy": "streaming", "budget": 16, "block": BLOCK, **options})


class Listener(BaseStreamer):
    """Counts the tokens that ``generate`` hands out after the prompt."""

    def __init__(self) -> None:
        self.tokens = -1

    def put(self, value: Any) -> None:
        self.tokens += 1

    def end(self) -> None: ...


ASSISTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "assistant": lambda model: {"assistant_model": model},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("how", ASSISTED)
def test_case_14_decoding_that_takes_tokens_back_is_refused(
    model: Any, tiny_llama: Callable[..., Any], how: str
) -> None:
    listener, cache = Listener(), new_cache(model)
    with pytest.raises(KvlearnError, match=r"cannot be cropped.*generate without assistant_model and prompt_lookup"):
        model.generate(
            prompt(20),
            max_new_tokens=8,
            do_sample=False,
            streamer=listener,
            **{cache_argument(model): cache},
            **ASSISTED[how](tiny_llama(layers=1)),
        )
    assert listener.tokens <= 0
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded"])
def test_case_14_another_kind_of_cache_beside_ours_is_refused(model: Any, implementation: str) -> None:
    listener, cache = Listener(), new_cache(model)
    with pytest.raises(ValueError, match=r"cache_implementation.*Please use only one of the two"):
        model.generate(
            prompt(20),
            max_new_tokens=8,
            cache_implementation=implementation,
            streamer=listener,
            **{cache_argument(model): cache},
        )
    assert listener.tokens <= 0
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2"])
def test_case_14_attention_that_bypasses_ours_is_refused(
    model: Any, tiny_llama: Callable[..., Any], implementation: str
) -> None:
    message = f"attn_implementation='{implementation}'.*call kvlearn.enable"
    other = tiny_llama()
    other.config._attn_implementation_internal = implementation  # flash attention need not be installed for this
    with pytest.raises(KvlearnError, match=message):
        new_cache(other)
    cache = new_cache(model)
    model.config._attn_implementation_internal = implementation
    with pytest.raises(KvlearnError, match=message):
        feed(model, cache, prompt(20), [20])


def test_attention_that_loses_the_tag_is_noticed_within_the_first_call(model: Any) -> None:
    cache = new_cache(model)
    layer = model.model.layers[0].self_attn
    own = type(cache).update

    def copying_update(key: Any, value: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        key, value = own(cache, key, value, index, *args, **kwargs)
        return (key.clone() if index == layer.layer_idx else key), value

    cache.update = copying_update
    with pytest.raises(KvlearnError, match="bypassed kvlearn"):
        feed(model, cache, prompt(20), [20])


def test_cropping_is_refused(model: Any) -> None:
    cache = new_cache(model)
    feed(model, cache, prompt(20), [20])
    with pytest.raises(KvlearnError, match="cannot be cropped"):
        cache.crop(-1)


def test_training_with_dropout_is_refused(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(attention_dropout=0.1)).train()
    with pytest.raises(KvlearnError, match=r"call model\.eval"):
        feed(model, new_cache(model), prompt(20), [20])


def test_after_a_refusal_the_cache_serves_the_corrected_call(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(attention_dropout=0.1)).train()
    cache, ids = new_cache(model), prompt(20, batch=2)
    with pytest.raises(KvlearnError, match=r"call model\.eval"):
        feed(model, cache, ids[:1], [20])
    model.eval()
    with pytest.raises(KvlearnError, match="not causal"):
        model(ids[:1], attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), **{cache_argument(model): cache})
    assert torch.equal(feed(model, cache, ids, [20]), feed(model, new_cache(model), ids, [20]))


def test_attention_weights_cannot_be_returned(model: Any) -> None:
    # transformers refuses it itself where it knows that the implementation returns none
    with pytest.raises(ValueError, match="output_attentions"):
        feed(model, new_cache(model), prompt(20), [20], output_attentions=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 1, 6, 6, dtype=torch.bool), "not causal"),
        (torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None], "not causal"),
        (torch.zeros(1, 1, 6, 6), "takes a 2D attention mask"),
        (torch.ones(1, 1, 6, 9, dtype=torch.bool), "takes a 2D attention mask"),
    ],
    ids=["looks ahead", "a window", "additive", "of another size"],
)
def test_masks_that_are_not_causal_padding_are_refused(model: Any, mask: Any, message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        model(prompt(6), attention_mask=mask, **{cache_argument(model): new_cache(model)})


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "'s_aux'"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"sliding_window": 8}, "'sliding_window'"),
        ({"is_causal": False}, "looks ahead"),
    ],
)
def test_what_our_attention_lacks_is_refused(model: Any, asks: dict[str, Any], message: str) -> None:
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    key, value = new_cache(model).update(key, key, 0)
    with pytest.raises(KvlearnError, match=message):
        kvlearn_attention(nn.Module(), query, key, value, None, **asks)


def test_a_batch_of_another_size_is_refused(model: Any) -> None:
    cache = new_cache(model)
    feed(model, cache, prompt(20, batch=2), [20])
    with pytest.raises(KvlearnError, match="holds 2 rows and was called with 3; use one cache per batch"):
        feed(model, cache, prompt(1, batch=3), [1])


# ---- models --------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
        "encoder-decoder",
    ),
    "Mamba": (
        "MambaForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 50},
        "attention interface",
    ),
    "GptOss": ("GptOssForCausalLM", {**SMALL, "head_dim": 16, "num_local_experts": 2}, "attention interface|sinks"),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {
            **SMALL,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
        },
        "multi-head latent attention",
    ),
    "Gemma3n": (
        "Gemma3nForCausalLM",
        {
            **SMALL,
            "head_dim": 16,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 50,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        "read other layers' caches",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_cannot_be_right_are_refused(name: str) -> None:
    model_class, options, message = UNSUPPORTED[name]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model = getattr(transformers, model_class)(config(**options)).eval()
    with pytest.raises(KvlearnError, match=message) as error:
        kvlearn.enable(model)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation != NAME

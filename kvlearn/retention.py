"""What policies still hold of a text: feeds it through one cache for each, and reads the slots at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.attention import cache_argument, enable
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.models import encode
from kvlearn.report.inspect import Inspection, Kept
from kvlearn.sharing import share_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvlearn.models import LoadedModel


def inspect_text(
    loaded: LoadedModel,
    text: str,
    policies: Sequence[str],
    budget: int | None,
    *,
    chunk: int | None = None,
    allocation: str = "uniform",
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Inspection:
    """Feed a text under each policy.

    Args:
        loaded: the model and its tokenizer.
        text: any text.
        policies: names, or folders of scorers.
        budget: the most slots each KV head may hold.
        chunk: tokens per call, 1 being as if the model had written the text; ``None`` feeds it at once, as a prompt.
        allocation: how slots are shared among layers and heads (:func:`kvlearn.sharing.share_out`).
        progress: called with the policy, how many are done, and how many there are.
        **options: further arguments of :class:`EvictingCache`.

    Raises:
        KvlearnError: the text holds no tokens, ``chunk`` is below 1, or a cache cannot be made.
    """
    ids = encode(loaded.tokenizer, text)
    if not ids:
        raise KvlearnError("the text holds no tokens; give one with words in it.")
    if chunk is not None and chunk < 1:
        raise KvlearnError(f"chunk is {chunk} tokens; give a number that is 1 or more.")
    model: Any = enable(loaded.model)
    shared = share_out(model, budget, allocation, block=options.get("block"), protect=options.get("protect"))
    caches = [EvictingCache(model, policy, **shared, **options) for policy in policies]  # mistakes show before any work
    kept, heads, layers = [], 1, []
    for done, cache in enumerate(caches):
        if progress is not None:
            progress(cache.policy.label, done, len(caches))
        for calls in torch.tensor([ids], device=model.device).split(chunk or len(ids), dim=1):
            with torch.inference_mode():
                model(calls, logits_to_keep=1, **{cache_argument(model): cache})
        layers = cache.managed
        counts = [_heads_that_hold(cache.positions(layer)[0], len(ids)) for layer in layers]
        heads = max([heads, *(cache.positions(layer).shape[1] for layer in layers)])
        kept.append(Kept(cache.policy.label, counts, cache.stats()))
        cache.reset()
    how = "fed at once" if chunk is None else f"fed {chunk} at a time"
    return Inspection(loaded.name, pieces(loaded.tokenizer, text, ids), layers, heads, budget, how, kept)


def _heads_that_hold(positions: Tensor, length: int) -> list[int]:
    """How many rows of ``[H, S]`` name each of the positions below ``length``."""
    return torch.bincount(positions[positions >= 0].long(), minlength=length).tolist()


def pieces(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[str]:
    """The text token by token; they add up to it where the tokenizer knows where its tokens are from."""
    if not getattr(tokenizer, "is_fast", False):
        return [str(tokenizer.decode([token])) for token in ids]
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    found, end = [], 0
    for _, stop in spans:  # the tokens of one character all span it; what a token leaves out belongs to the next
        found.append(text[end:stop])
        end = max(end, stop)
    return found

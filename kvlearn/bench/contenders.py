"""What is raced: caches as they are after a long text, each with one decode step.

Reading thousands of tokens for every cache would take longer than all steps that are timed, and a step's time does not
depend on what keys and values say. So caches are filled with random ones, in the state that a text of that length
leaves: the stock cache with that many tokens, an evicting one with its budget full.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.integrations import sdpa_attention

from kvlearn import attention, layer, observation, slots, waiting
from kvlearn import cache as caches
from kvlearn.bench.parts import Place
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.policies import resolve
from kvlearn.policies.base import Policy
from kvlearn.support import managed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL = "full"
"""The stock DynamicCache with sdpa attention, and every token."""

SAME_SLOTS = "stock-at-budget"
"""The stock DynamicCache with as many tokens as the budget has slots: nothing is chosen, so nothing can be faster."""

KVPRESS = "kvpress-snapkv"
"""kvpress's DecodingPress over SnapKVPress, which never holds more than the budget either."""

STOCK_PLACES: tuple[Place, ...] = (
    (sdpa_attention, "sdpa_attention_forward", "attention"),
    (DynamicCache, "update", "replace"),
)
STOCK = (FULL, SAME_SLOTS, KVPRESS)


@dataclass(frozen=True)
class Case:
    """What all contenders of one race have in common: tokens fed before the step that is timed, and rows."""

    context: int
    batch: int


class Contender:
    """A cache in its steady state.

    Args:
        model: the model; left as it was found.
        name: what rows call it.
        kind: its role in comparisons.
        case: what it is raced on.
        budget: slots per KV head and layer, or ``None``.

    Attributes:
        period: steps after which its work repeats.
        least: the fewest steps of a turn.
    """

    period = 1
    least = 2
    places: tuple[Place, ...] = ()

    def __init__(self, model: PreTrainedModel, name: str, kind: str, case: Case, budget: int | None) -> None:
        self.model, self.name, self.kind, self.case, self.budget = model, name, kind, case, budget
        self.cache: Any = None
        self._argument = attention.cache_argument(model)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._ids = torch.randint(vocabulary, (case.batch, 1), generator=generator).to(model.device)

    def turn(self) -> AbstractContextManager[None]:
        """Make ready for some steps."""
        return nullcontext()

    def step(self) -> None:
        """Decode one token of every row."""
        self.model(self._ids, **{self._argument: self.cache}, use_cache=True)

    @property
    def bytes(self) -> int:
        """What the cache holds now, as allocated."""
        raise NotImplementedError

    @property
    def growing(self) -> bool:
        """Whether a step makes the cache larger, though it is bounded: its budget is not reached."""
        return False


class Stock(Contender):
    """transformers' DynamicCache with sdpa attention, always at the same length when a turn begins."""

    def __init__(self, model: PreTrainedModel, name: str, case: Case, budget: int | None) -> None:
        super().__init__(model, name, "full", case, budget)
        self.cache = DynamicCache(config=model.config)
        self.tokens = case.context if budget is None else min(case.context, budget)
        for i, (heads, dim) in enumerate(shapes(model)):
            self.cache.update(*(random_tensor(model, case.batch, heads, self.tokens, dim) for _ in range(2)), i)
        self.places = STOCK_PLACES

    @contextmanager
    def turn(self) -> Iterator[None]:
        """With the cache cut back to its length."""
        if (extra := self.cache.get_seq_length() - self.tokens) > 0:
            self.cache.crop(-extra)
        yield

    @property
    def bytes(self) -> int:
        """Keys and values."""
        return _stock_bytes(self.cache)


class Pressed(Stock):
    """A stock cache that kvpress cuts down once per block."""

    def __init__(self, model: PreTrainedModel, case: Case, budget: int, block: int) -> None:
        from kvpress import DecodingPress, SnapKVPress  # type: ignore[import-not-found]  # not a dependency

        if budget <= 2 * block:
            raise KvlearnError(f"{KVPRESS} needs more than two blocks of {block} slots, not {budget}.")
        super().__init__(model, KVPRESS, case, budget - block)
        self.kind, self.budget, self.period = "heuristic", budget, block
        # Its window must be shorter than what it buffers between two cuts.
        inner = SnapKVPress(window_size=block - 1)
        self.press = DecodingPress(base_press=inner, compression_interval=block, target_size=budget - block)
        self.places = (*self.places, (self.press, "compress", "score"))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """With kvpress's hooks on the model."""
        with super().turn(), self.press(self.model):
            yield


class Evicting(Contender):
    """An :class:`EvictingCache` after ``case.context`` tokens."""

    def __init__(self, model: PreTrainedModel, spec: str, case: Case, budget: int) -> None:
        policy = resolve(spec)
        super().__init__(model, policy.label, policy.kind, case, budget)
        self.policy = policy
        self._start()
        self.period = self.cache.block
        self.places = evicting_places(policy)

    def _start(self) -> None:
        self.cache = EvictingCache(self.model, self.policy, self.budget)
        fill(self.cache, self.model, self.case)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A cache that has not reached its budget begins anew."""
        if self.growing:
            self._start()
        yield

    @property
    def growing(self) -> bool:
        """Whether the budget is still to be reached."""
        return self.budget is not None and self.case.context < self.budget

    @property
    def bytes(self) -> int:
        """Keys, values and all else that belongs to slots."""
        return int(self.cache.stats()["bytes"])


class Prompt(Contender):
    """A whole prompt, from an empty cache on; a step is all of it."""

    least = 1

    def __init__(self, model: PreTrainedModel, spec: str, case: Case, budget: int | None) -> None:
        self.policy = None if budget is None else resolve(spec)
        name, kind = (FULL, "full") if self.policy is None else (self.policy.label, self.policy.kind)
        super().__init__(model, name, kind, case, budget)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._ids = torch.randint(vocabulary, (case.batch, case.context), generator=generator).to(model.device)
        self.places = STOCK_PLACES if self.policy is None else evicting_places(self.policy)

    def step(self) -> None:
        """Read the prompt, as ``generate`` does: with the logits of the last token alone."""
        self.cache = None  # the one before is let go first
        if self.policy is None:
            self.cache = DynamicCache(config=self.model.config)
        else:
            self.cache = EvictingCache(self.model, self.policy, self.budget)
        self.model(self._ids, **{self._argument: self.cache}, use_cache=True, logits_to_keep=1)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Without the cache of the prompt before."""
        self.cache = None
        yield

    @property
    def bytes(self) -> int:
        """What the cache holds after the prompt."""
        if self.cache is None:
            return 0
        return _stock_bytes(self.cache) if self.policy is None else int(self.cache.stats()["bytes"])


def make(model: PreTrainedModel, spec: str, case: Case, budget: int | None, block: int) -> Contender:
    """One contender; ``budget`` is ``None`` for :data:`FULL` only.

    Raises:
        KvlearnError: an unknown policy, or a budget that cannot hold what is protected.
    """
    if spec == FULL or budget is None:
        return Stock(model, FULL, case, None)
    if spec == SAME_SLOTS:
        return Stock(model, SAME_SLOTS, case, budget)
    if spec == KVPRESS:
        return Pressed(model, case, budget, block)
    return Evicting(model, spec, case, budget)


def evicting_places(policy: Policy) -> tuple[Place, ...]:
    """Where the time of an :class:`EvictingCache` goes."""
    return (
        (slots, "replace_slots", "replace"),
        *((waiting, name, "replace") for name in ("replace_slots", "copy_rows", "put_rows", "append")),
        (layer, "decode_attention", "attention"),
        (observation, "observe", "observe"),
        (layer, "select_victims", "select"),
        (layer.EvictingLayer, "attend", "bookkeeping"),
        (caches, "end_blocks", "bookkeeping"),
        (policy, "score", "score"),
        (policy, "static", "score"),
    )


def has_kvpress() -> bool:
    """Whether kvpress is installed."""
    return importlib.util.find_spec("kvpress") is not None


def shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """KV heads and head dimension of every layer.

    Raises:
        KvlearnError: a layer is not one of full attention.
    """
    config = model.config.get_text_config(decoder=True)
    layers, managed = managed_layers(model)
    if len(managed) < len(layers):
        raise KvlearnError(
            "bench decode fills the caches of full-attention layers, and this model has others; use bench prefill."
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(heads, dim)] * len(layers)


def fill(cache: EvictingCache, model: PreTrainedModel, case: Case) -> None:
    """Bring a new cache into the state that a text of ``case.context`` tokens leaves, with random keys and values.

    Every layer is given its sinks, then, as if all tokens between were long evicted, the latest ones.
    """
    config = model.config.get_text_config(decoder=True)
    group = config.num_attention_heads // shapes(model)[0][0]
    for held, (heads, dim) in zip(cache.evicting_layers(), shapes(model), strict=True):
        budget = held.config.budget
        most = case.context if budget.slots is None else min(case.context, budget.slots)
        first = min(budget.protect.sinks, most)
        for start, count in ((0, first), (case.context - most + first, most - first)):
            if count:
                if held.is_initialized:
                    held.seen = start
                    held.length = torch.full_like(held.length, start)
                held.attend(
                    random_tensor(model, case.batch, heads * group, count, dim),
                    random_tensor(model, case.batch, heads, count, dim),
                    random_tensor(model, case.batch, heads, count, dim),
                    None,
                    scale=dim**-0.5,
                    softcap=None,
                    position_ids=torch.arange(start, start + count, device=model.device)[None],
                )


def _stock_bytes(cache: Any) -> int:
    return sum(t.untyped_storage().nbytes() for held in cache.layers for t in (held.keys, held.values))


def random_tensor(model: PreTrainedModel, *shape: int) -> torch.Tensor:
    """Normal numbers in the model's dtype, where it is."""
    return torch.randn(shape, device=model.device).to(model.dtype)

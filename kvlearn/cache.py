"""The cache users make: :class:`EvictingCache`."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvlearn import attention, state
from kvlearn.allocation import recommended_budgets
from kvlearn.errors import KvlearnError
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.layer import EvictingLayer
from kvlearn.policies import resolve
from kvlearn.policies.base import Policy
from kvlearn.pool import PooledLayer
from kvlearn.rotary import Unrotator
from kvlearn.shapes import Budget, GroupReduce, Protection, whole_number
from kvlearn.slots import LayerConfig, Recorder
from kvlearn.support import NO_ROLLBACK, check_model, managed_layers
from kvlearn.together import end_blocks

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel

    from kvlearn.scorers import Scorer

Positions = Literal["original", "compact"]
Allocation = Literal["uniform", "pooled", "scorer"]
DEFAULT_FLOOR = 0.2


class EvictingCache(Cache):
    """A transformers cache that never holds more than ``budget`` slots per KV head and layer.

    Pass it to ``model.generate(..., cache=cache)`` (``past_key_values`` before transformers 5.24), or to the model
    itself. The model must use ``attn_implementation="kvlearn"`` (see :func:`kvlearn.enable`). One cache serves one
    batch, over any number of turns.

    Args:
        model: the model that will use the cache.
        policy: a registered name (``kvlearn policies`` lists them), a :class:`Policy` or a :class:`Scorer`.
        budget: the most slots one KV head of a layer holds at any moment, everything included; or one such number per
            full-attention layer (``None``: without bound); or ``None`` for no bound (policy ``"full"`` only).
        protect: what no policy may evict; by default 4 sinks and the latest block.
        block: queries per observed block; by default what a scorer was trained with, otherwise 32, less for a budget
            below 128.
        group_reduce: how the query heads of a KV head are reduced when attention is observed; by default what a scorer
            was trained with, otherwise ``"mean"``.
        recorder: receives what the cache observes; used to collect traces.
        positions: what the rotary embedding of a managed layer counts: ``"original"`` positions in the text, or
            ``"compact"`` ones within the cache, numbered anew with every block, so that no text is too long for the
            model. Compact positions keep every key a second time, before rotation.
        allocation: ``"uniform"``, ``budget`` slots for every head, or ``"pooled"``: the heads of a layer share
            ``heads * budget`` slots, and a policy's scores say which head gets them (:mod:`kvlearn.pool`); or
            ``"scorer"``, what a scorer recommends: shares of the layers, whose mean is ``budget``, and whether the
            heads of a layer share its slots.
        floor: with ``"pooled"``, the share of ``budget`` that every head holds at least; by default 0.2. No head falls
            below what is protected, and none is held to more than ``budget`` less one block.
        impl: implementation of every kernel: ``"auto"`` (Triton on a GPU, PyTorch elsewhere), ``"reference"`` or
            ``"triton"``; the last two never fall back.

    Raises:
        KvlearnError: the model is not enabled, the budget is below protection plus one block, the policy is unknown or
            belongs to another model, options exclude each other, or ``impl="triton"`` cannot run where the model is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy | Scorer = "full",
        budget: int | Sequence[int | None] | None = None,
        *,
        protect: Protection | None = None,
        block: int | None = None,
        group_reduce: GroupReduce | None = None,
        recorder: Recorder | None = None,
        positions: Positions = "original",
        allocation: Allocation = "uniform",
        floor: float | None = None,
        impl: Impl = "auto",
    ) -> None:
        attention.require_enabled(model)
        check_model(model)
        use_triton(impl, next(model.parameters()))  # an explicit request that cannot be met is refused here
        self.policy = resolve(policy)
        self.policy.bind(model)
        if budget is None and self.policy.kind != "full":
            raise KvlearnError(
                f"policy {self.policy.name!r} needs a budget: the most slots each KV head may hold, such as budget=256."
            )
        layers, managed = managed_layers(model)
        if not managed:
            warnings.warn(
                f"{type(model).__name__} has sliding windows in all layers: they bound its cache, and the budget has "
                "no effect.",
                stacklevel=2,
            )
        budgets = _by_layer(budget, len(managed))
        recommended = allocation == "scorer"
        if recommended:
            allocation = "pooled" if self.policy.pools_heads else "uniform"
        self.floor = _check_options(budget, positions, allocation, floor, recorder)
        smallest = min((b for b in budgets if b is not None), default=None)
        block, group_reduce = _observation(self.policy, block, group_reduce, smallest, protect)
        if recommended:
            least, shares = Budget.resolve(smallest, block, protect).least, self.policy.layer_shares
            budgets = recommended_budgets(shares, budget, least=least, policy=self.policy.label)
        compact, kind = positions == "compact", PooledLayer if allocation == "pooled" else EvictingLayer
        reads_keys = "static" in self.policy.reads or recorder is not None or compact
        reads_queries = "queries" in self.policy.reads
        self._rotary = rotary = Unrotator(model, managed) if reads_keys or reads_queries else None
        self.budgets = [Budget.resolve(slots, block, protect) for slots in budgets]
        for i, layer_budget in zip(managed, self.budgets, strict=True):
            layers[i] = kind(
                LayerConfig(
                    index=i,
                    budget=layer_budget,
                    policy=self.policy.of_layer(i),
                    group_reduce=group_reduce,
                    unrotate=rotary.of_layer(i) if rotary is not None and reads_keys else None,
                    recorder=recorder,
                    impl=impl,
                    compact=rotary if rotary is not None and compact and rotary.turns(i) else None,
                    rotary=rotary if rotary is not None and reads_queries and rotary.turns(i) else None,
                    floor=self.floor or 0.0,
                )
            )
        self.managed = managed
        self.block = self.budgets[0].block if self.budgets else 1
        self.group_reduce, self.position_kind, self.allocation = group_reduce, positions, allocation
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._most_positions = most if isinstance(most, int) and not compact else None  # None: no need to warn
        self._model = weakref.ref(model)  # the model may go before its cache
        self._model_config = model.config
        self._latest: Any = None  # the managed layer that was handed keys last
        self._handle = attention.handle_of(self)
        super().__init__(layers=layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model's attention; see :class:`EvictingLayer`."""
        managed = layer_idx in self.managed
        first = managed and layer_idx == self.managed[0]
        # Asked once per call of the model, because transformers takes long to answer.
        if (first or not managed) and self._model_config._attn_implementation != attention.NAME:
            raise attention.wrong_attention(self._model_config._attn_implementation)
        if torch.compiler.is_compiling():
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return attention.tag_compiled(keys, self._handle), values
        if self._latest is not None and self._latest.pending:
            raise KvlearnError(
                "the model's attention bypassed kvlearn, so its output would be wrong; call kvlearn.enable(model) and "
                "leave attn_implementation as it is."
            )
        self._latest = self.layers[layer_idx] if managed else None
        if self._latest is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._latest.pending = True
        if first:
            self.begin(key_states.shape[2])
        return self._latest.update(key_states, value_states)

    def begin(self, count: int) -> None:
        """Before the first managed layer takes ``count`` tokens: end blocks, and say once that a text is too long."""
        layers = self.evicting_layers()
        end_blocks(layers)
        if self._most_positions is not None and (length := layers[0].seen + count) > self._most_positions:
            warnings.warn(
                f"the text is {length} tokens long and the model has {self._most_positions} positions, so its output "
                "may degrade; EvictingCache(positions='compact') counts positions within the cache instead.",
                stacklevel=2,
            )
            self._most_positions = None

    @property
    def is_compileable(self) -> bool:
        """False: ``generate`` would prepare masks as for a static cache."""
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted tokens and folded observations cannot be brought back."""
        raise KvlearnError(NO_ROLLBACK)

    def activate_past_recording(self) -> None:
        """Refused: ``generate`` calls this before it decodes with an assistant, whose rejected tokens it crops."""
        raise KvlearnError(NO_ROLLBACK)

    def reset(self) -> None:
        """Forget everything; the next call starts a new text."""
        fresh, _ = managed_layers(self._made_for())
        for i, layer in enumerate(fresh):
            if i in self.managed:
                self.layers[i].reset()
            else:  # how transformers' own layers reset differs between releases
                self.layers[i] = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent copy of all state; policy, model and rotary code are shared."""
        shared: list[Any] = [self.policy, self._model_config, self._rotary]
        for layer in self.evicting_layers():
            config = layer.config
            shared += [config.policy, config.unrotate, config.compact, config.rotary]
        memo.update({id(one): one for one in shared})
        twin = copy.copy(self)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        twin._handle = attention.handle_of(twin)
        return twin

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that make a cache like this one, policy and recorder apart; defaults filled in."""
        slots = [budget.slots for budget in self.budgets]
        return {
            "budget": None if self.policy.kind == "full" and not any(slots) else slots,
            "protect": self.budgets[0].protect if self.budgets else Protection(),
            "block": self.block,
            "group_reduce": self.group_reduce,
            "positions": self.position_kind,
            "allocation": self.allocation,
            "floor": self.floor,
        }

    def save(self, path: str | Path) -> None:
        """Write all state to one safetensors file, from which :meth:`load` goes on identically.

        The file holds the keys and values of the text; treat it as you would the text. Nothing in it is pickled. A
        recorder is not saved.

        Raises:
            KvlearnError: the file cannot be written, or the model is gone.
        """
        state.write(Path(path), *state.capture(self, self._made_for()))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, policy: str | Policy | Scorer | None = None) -> Self:
        """A cache as :meth:`save` wrote it.

        Args:
            path: the file.
            model: the model that filled the cache: the same weights in the same dtype.
            policy: for a policy that its label does not give back (the oracle, or one of your own): that policy.

        Raises:
            KvlearnError: the file is missing or damaged, or comes from another model or format.
        """
        saved = state.read(Path(path))
        saved.check_model(model)
        cache = cls(model, saved.policy() if policy is None else policy, **saved.options())
        saved.restore(cache, model.device)
        return cache

    def _made_for(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise KvlearnError("the model that this cache was made for is gone; keep it as long as the cache.")
        return model

    def evicting_layers(self) -> list[EvictingLayer]:
        """The managed layers, in order."""
        layers: list[Any] = self.layers
        return [layers[i] for i in self.managed]

    def positions(self, layer: int) -> Tensor:
        """``[B, H, S]`` int32 logical position of the token in each slot, -1 where empty.

        Args:
            layer: index of a full-attention layer in the model.
        """
        if layer not in self.managed:
            raise KvlearnError(f"layer {layer} is not managed by this cache; managed are {self.managed}.")
        found = self.evicting_layers()[self.managed.index(layer)]
        return found.positions() if found.is_initialized else torch.empty(0, 0, 0, dtype=torch.int32)

    def stats(self) -> dict[str, Any]:
        """What is held now.

        Returns:
            ``length`` (tokens seen by each row), ``slots`` (the most slots any row and head of any layer holds),
            ``mean_slots`` (mean over rows, heads and layers), ``evictions`` (tokens no longer held, mean over heads and
            layers, summed over rows), and bytes as allocated: ``kv_bytes``, ``state_bytes`` (all else that belongs to
            slots, kept queries included), ``other_bytes`` (layers that are not managed), ``bytes`` (their sum);
            ``full_bytes`` (what a cache that keeps every token takes, padding included, as transformers' own does) and
            ``compression`` (``full_bytes / bytes``, 1.0 when empty).
        """
        kv = state = other = full = most = 0
        held: list[float] = []
        length: list[int] = []
        layers: list[Any] = self.layers
        for i, layer in enumerate(layers):
            size = _allocated(*vars(layer).values())
            if i not in self.managed:
                other += size
            elif layer.is_initialized:
                own = _allocated(layer.keys, layer.values)
                kv, state = kv + own, state + size - own
                full += layer.seen * layer.lanes * (layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes)
                count = (layer.positions() >= 0).sum(-1)
                most = max(most, int(count.max()))
                held.append(float(count.float().mean()))
                length = layer.length.tolist()
        mean = sum(held) / len(held) if held else 0.0
        state += self._handle.nbytes + (0 if self._rotary is None else self._rotary.nbytes) if held else 0
        total = kv + state + other
        return {
            "length": length,
            "slots": most,
            "mean_slots": mean,
            "evictions": sum(length) - mean * len(length),
            "kv_bytes": kv,
            "state_bytes": state,
            "other_bytes": other,
            "bytes": total,
            "full_bytes": full + other,
            "compression": (full + other) / total if total else 1.0,
        }


def _allocated(*values: Any) -> int:
    """Bytes of what tensors, alone or in tuples, lie in, each storage counted once; nothing else counts."""
    alone = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    storages = [one.untyped_storage() for one in alone if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _by_layer(budget: object, layers: int) -> list[int | None]:
    """What a caller may give as ``budget``, for each full-attention layer."""
    listed = isinstance(budget, Sequence) and not isinstance(budget, str)
    given: Any = budget if listed else [budget] * layers
    if len(given) != layers:
        raise KvlearnError(
            f"budget lists {len(given)} numbers and the model has {layers} full-attention layers; "
            "give one number per such layer."
        )
    return [None if slots is None else whole_number(slots, "budget", "slots", 1) for slots in given]


def _check_options(
    budget: object, positions: str, allocation: str, floor: Any, recorder: Recorder | None
) -> float | None:
    """Refuse what cannot be, or not together; returns the floor of a pool."""
    if positions not in get_args(Positions):
        raise KvlearnError(f"positions is {positions!r}; use 'original' or 'compact'.")
    if allocation not in get_args(Allocation):
        raise KvlearnError(f"allocation is {allocation!r}; use 'uniform', 'pooled' or 'scorer'.")
    if allocation != "pooled":
        if floor is not None:
            raise KvlearnError(f"floor is {floor} and belongs to allocation='pooled'; give both or neither.")
        return None
    floor = DEFAULT_FLOOR if floor is None else floor
    if not isinstance(floor, int | float) or not 0 <= floor <= 1:
        raise KvlearnError(f"floor is {floor!r}; give a share of the budget between 0 and 1.")
    if budget is None:
        raise KvlearnError("allocation='pooled' shares a budget among heads; give budget as well.")
    if positions == "compact":
        raise KvlearnError("positions='compact' numbers the slots of equal heads; use allocation='uniform' with it.")
    if recorder is not None:
        raise KvlearnError("a recorder takes slots of equal heads; use allocation='uniform' with it.")
    return floor


def _observation(
    policy: Policy,
    block: int | None,
    group_reduce: GroupReduce | None,
    smallest: int | None,
    protect: Protection | None,
) -> tuple[int, GroupReduce]:
    """Block and group reduction of all layers; says when a policy was trained with others."""
    trained = policy.trained_with
    if block is None and trained is not None:
        with contextlib.suppress(KvlearnError):  # the smallest budget may not hold such a block
            block = Budget.resolve(smallest, trained[0], protect).block
    block = Budget.resolve(smallest, block, protect).block
    group_reduce = group_reduce or (trained[1] if trained is not None else "mean")
    if trained is not None and (block, group_reduce) != trained:
        warnings.warn(
            f"policy {policy.label!r} was trained on blocks of {trained[0]} queries with group_reduce={trained[1]!r}, "
            f"and this cache observes blocks of {block} with {group_reduce!r}, so its scores mean less; leave block "
            "and group_reduce out, with a budget that holds such a block.",
            stacklevel=3,
        )
    return block, group_reduce

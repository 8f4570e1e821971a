"""kvlearn's policies and scorers as presses of kvpress.

The other way round, a press of kvpress is a policy here: ``EvictingCache(model, "kvpress:SnapKVPress", 256)``; see
:mod:`kvlearn.policies.kvpress`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.layer import EvictingLayer
from kvlearn.policies import resolve
from kvlearn.policies.base import Policy
from kvlearn.policies.kvpress import load_kvpress, rotated_queries
from kvlearn.rotary import Unrotator
from kvlearn.shapes import DEFAULT_BLOCK, Budget, Protection
from kvlearn.slots import LayerConfig
from kvlearn.support import managed_layers

if TYPE_CHECKING:
    from kvlearn.scorers import Scorer


def press(
    policy: str | Policy | Scorer,
    compression_ratio: float = 0.0,
    *,
    block: int = DEFAULT_BLOCK,
    protect: Protection | None = None,
) -> Any:
    """A kvpress ``ScorerPress`` that cuts a prompt as an :class:`kvlearn.EvictingCache` does.

    >>> from kvlearn.kvpress import press  # doctest: +SKIP
    >>> with press("path/to/scorer", 0.5)(model):  # doctest: +SKIP
    ...     model(prompt, past_key_values=DynamicCache())

    Args:
        policy: a name, a policy or a scorer; see :func:`kvlearn.policies.resolve`.
        compression_ratio: share of the prompt that goes, as for any press.
        block: queries per observed block.
        protect: what is never cut; by default 4 sinks and the latest block.

    Raises:
        KvlearnError: kvpress is missing or the policy is unknown; when it runs, also where a press sees less than a
            prompt (``DecodingPress``), because what was seen before is not told.
    """
    return _press_class()(
        compression_ratio=compression_ratio, policy=resolve(policy), budget=Budget.resolve(None, block, protect)
    )


@functools.cache
def _press_class() -> type[Any]:
    base: Any = load_kvpress().ScorerPress

    @dataclass
    class KvlearnPress(base):
        policy: Policy = None  # type: ignore[assignment]  # always given; it comes after a field with a default
        budget: Budget = None  # type: ignore[assignment]  # always given, like the policy

        def post_init_from_model(self, model: Any) -> None:
            self.policy.bind(model)
            self.rotary = Unrotator(model, managed_layers(model)[1])

        def score(
            self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
        ) -> Tensor:
            if hidden_states.shape[1] != keys.shape[2]:
                raise KvlearnError(
                    f"this press sees {hidden_states.shape[1]} of {keys.shape[2]} tokens, and kvlearn's policies score "
                    "by all that has been; use it for prompts, and an EvictingCache for decoding."
                )
            return self._score(module, hidden_states, keys, values, kwargs)

        def _score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, kwargs: Any) -> Tensor:
            """Run the prompt through a layer without a bound, which observes it, and score what it holds."""
            index = module.layer_idx
            layer = EvictingLayer(
                LayerConfig(
                    index=index,
                    budget=self.budget,
                    policy=self.policy,
                    group_reduce="mean",
                    unrotate=self.rotary.of_layer(index) if "static" in self.policy.reads else None,
                    recorder=None,
                    rotary=self.rotary if "queries" in self.policy.reads and self.rotary.turns(index) else None,
                )
            )
            layer.attend(
                rotated_queries(module, hidden, kwargs),
                keys,
                values,
                None,
                scale=module.scaling,
                softcap=None,
                position_ids=kwargs.get("position_ids"),
            )
            kept = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))
            slots = replace(layer.held(), budget=kept)
            protected = self.budget.protect.mask(slots.pos, slots.length, slots.prompt_length)
            return self.policy.score(slots).masked_fill(protected, torch.inf)

    return KvlearnPress

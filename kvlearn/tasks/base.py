"""What a task is: cases made from documents or by a seed, and a way to measure a cache on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvlearn.attention import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvlearn.cache import EvictingCache


@dataclass(frozen=True)
class Case:
    """One thing to measure on.

    Args:
        doc: name of the document, unique within its domain.
        domain: where it comes from.
        input_ids: ``[T]`` int64 tokens that every policy is fed.
        details: whatever else the task needs, such as the answer.
    """

    doc: str
    domain: str
    input_ids: Tensor
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One model with one kind of cache.

    Args:
        model: enabled for kvlearn.
        tokenizer: the model's.
        cache: a new cache.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: EvictingCache

    @torch.inference_mode()
    def feed(self, input_ids: Tensor, *, logits: bool = True) -> Tensor:
        """Feed ``[B, C]`` tokens and return logits ``[B, C, vocabulary]`` (of the last token without ``logits``)."""
        keep = {} if logits else {"logits_to_keep": 1}
        arguments: dict[str, Any] = {cache_argument(self.model): self.cache, "use_cache": True, **keep}
        output = self.model(input_ids=input_ids.to(self.model.device), **arguments)
        result: Tensor = output.logits
        return result


@dataclass(frozen=True)
class Measurement:
    """One number about one case, with the full cache's number for the same tokens.

    Args:
        metric: a name of :data:`kvlearn.rows.METRICS`.
        value: under the budget.
        full_value: with the full cache.
        tokens: tokens that the number is a mean over.
    """

    metric: str
    value: float
    full_value: float
    tokens: int


class Task(ABC):
    """Base of all tasks.

    Class attributes:
        name: what the user types.
        summary: one line.
        metrics: names of :data:`kvlearn.rows.METRICS` that every case gets.
        batched: cases of equal length may be measured together, as rows of one batch.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    batched: ClassVar[bool] = False

    @abstractmethod
    def full(self, run: Run, cases: Sequence[Case]) -> Any:
        """Whatever of the full cache's run :meth:`measure` compares with; made once for all policies and budgets."""

    @abstractmethod
    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """Measurements of each case under a cache with ``budget`` slots per KV head."""

"""What a task is: cases made from documents or by a seed, and a way to measure a cache on them."""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.attention import cache_argument
from kvlearn.corpora.base import seeded_hash
from kvlearn.errors import KvlearnError
from kvlearn.models import encode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvlearn.cache import EvictingCache
    from kvlearn.models import LoadedModel

FILLER = "torch-docs"  # prose that is on every machine, as torch is


@dataclass(frozen=True)
class Question:
    """What follows a context, the right answer included.

    Args:
        ids: ``[Q]`` int64 tokens, the answer's among them.
        answer: ``[Q]`` bool, which of them the model must give; if the first is one, the context's end predicts it.
        contains: texts that a generated answer must contain; for questions that are answered by generating instead of
            teacher-forced, whose ``ids`` are then the question alone.
        new_tokens: how many tokens may be generated.
    """

    ids: Tensor
    answer: Tensor
    contains: tuple[str, ...] = ()
    new_tokens: int = 0

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *parts: str) -> Question:
        """From texts in turn given and to be answered: given, answer, given, answer, ...; each encoded on its own."""
        pieces = [encode(tokenizer, part) for part in parts]
        ids = [token for piece in pieces for token in piece]
        answer = [number % 2 == 1 for number, piece in enumerate(pieces) for _ in piece]
        return cls(torch.tensor(ids, dtype=torch.int64), torch.tensor(answer))


@dataclass(frozen=True)
class Case:
    """One thing to measure on.

    Args:
        doc: name of the document, unique within its domain.
        domain: where it comes from; of tasks that are made by a seed, their variant.
        input_ids: ``[T]`` int64 tokens that every policy is fed.
        details: whatever else the task needs.
        prompt: how many of the first tokens are fed in one call, attended to in full and then cut to the budget; the
            others are fed block by block, as if generated one by one.
        questions: what is asked after that, each on a copy of the cache.
    """

    doc: str
    domain: str
    input_ids: Tensor
    details: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    questions: tuple[Question, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Cases of equal shape may be rows of one batch."""
        generated = [len(question.ids) for question in self.questions if question.new_tokens]  # takes no padding
        return len(self.input_ids), self.prompt, len(self.questions), *generated

    def texts(self) -> list[Tensor]:
        """``[T + Q]`` int64 the whole text of every question: context, question, answer."""
        return [torch.cat([self.input_ids, question.ids]) for question in self.questions] or [self.input_ids]


@dataclass(frozen=True)
class Material:
    """What cases are made from.

    Args:
        tokenizer: the model's.
        docs: how many cases.
        window: tokens of each at most, questions and answers included.
        split: which documents: train, validation, test or all; random choices differ between splits too.
        seed: order of the documents, and of all random choices.
        data: texts to model (see :mod:`kvlearn.corpora`).
        filler: texts to hide things in.
    """

    tokenizer: PreTrainedTokenizerBase
    docs: int
    window: int
    split: str = "test"
    seed: int = 0
    data: str = FILLER
    filler: str = FILLER

    @classmethod
    def of(cls, loaded: LoadedModel, *, docs: int, window: int, **options: Any) -> Material:
        """For a model, whose context must hold the window.

        Raises:
            KvlearnError: it does not, or ``docs`` is below 1.
        """
        if docs < 1:
            raise KvlearnError(f"docs is {docs}; give a number of documents that is 1 or more.")
        if loaded.context_length is not None and window > loaded.context_length:
            raise KvlearnError(
                f"window is {window} tokens and {loaded.name} was made for {loaded.context_length}; use a shorter "
                "--window."
            )
        return cls(loaded.tokenizer, docs, window, **options)

    def random(self, task: str, number: int) -> random.Random:
        """Random choices for one case; they depend on task, split, seed and number, and on nothing else."""
        return random.Random(seeded_hash(f"{task}\0{self.split}\0{number}", self.seed))


@dataclass
class Run:
    """One model with one kind of cache.

    Args:
        model: enabled for kvlearn.
        tokenizer: the model's.
        cache: a new cache.

    Attributes:
        tokens: tokens fed so far, summed over rows; copies count with their origin.
        copies: copies made by :meth:`branch` so far, if their caches record.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: EvictingCache
    tokens: int = 0
    copies: list[Run] = field(default_factory=list)

    @torch.inference_mode()
    def feed(self, input_ids: Tensor, *, logits: bool = True, valid: Tensor | None = None) -> Tensor:
        """Feed ``[B, C]`` tokens and return logits ``[B, C, vocabulary]`` (of the last token without ``logits``).

        ``valid`` ``[B, C]`` bool says which are tokens; padding comes last in a row, and nothing may follow it.
        """
        keep = {} if logits else {"logits_to_keep": 1}
        arguments: dict[str, Any] = {cache_argument(self.model): self.cache, "use_cache": True, **keep}
        if valid is not None and not bool(valid.all()):
            before = torch.ones(len(valid), self.cache.get_seq_length(), dtype=torch.bool)
            arguments["attention_mask"] = torch.cat([before, valid], dim=1).to(self.model.device)
        self.tokens += input_ids.numel() if valid is None else int(valid.sum())
        output = self.model(input_ids=input_ids.to(self.model.device), **arguments)
        result: Tensor = output.logits
        return result

    @property
    def slots(self) -> list[int]:
        """Budget of every layer that has one; empty for a cache without bound."""
        return [budget.slots for budget in self.cache.budgets if budget.slots is not None]

    def read(self, input_ids: Tensor, prompt: int = 0) -> Tensor:
        """Feed a context ``[B, T]``: its prompt in one call, the rest as if token by token.

        Returns:
            ``[B, 1, vocabulary]`` logits after the last token.
        """
        logits, start = torch.empty(0), 0
        for end in block_ends(input_ids.shape[1], self.slots, self.cache.block, prompt):
            logits = self.feed(input_ids[:, start:end], logits=False)
            start = end
        return logits

    def ask(self, input_ids: Tensor, valid: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Feed ``[B, C]`` tokens that follow a context as if token by token: columns, and their logits."""
        length, block = input_ids.shape[1], self.cache.block
        for start in range(0, length, block if self.slots else length or 1):
            part = slice(start, start + block if self.slots else length)
            yield part, self.feed(input_ids[:, part], valid=None if valid is None else valid[:, part])

    def branch(self) -> Run:
        """A copy that goes its own way from here."""
        copied = Run(self.model, self.tokenizer, copy.deepcopy(self.cache))
        if self.recorder is not None:
            self.copies.append(copied)
        return copied

    @property
    def recorder(self) -> Any:
        """What records the cache, or ``None``."""
        layers = self.cache.evicting_layers()
        return layers[0].config.recorder if layers else None


def block_ends(length: int, budgets: Sequence[int], block: int, prompt: int = 0) -> list[int]:
    """Where to cut a text so that it is fed as if token by token, after a prompt fed at once.

    Without a prompt, what fits every layer comes first; without budgets, everything after the prompt comes at once.
    """
    first = prompt or (min(budgets) // block * block if budgets else length)
    if first >= length:
        return [length]
    return [first, *(range(first + block, length, block) if budgets else ()), length]


def stack(cases: Sequence[Case]) -> Tensor:
    """``[B, T]`` tokens of cases of equal length."""
    return torch.stack([case.input_ids for case in cases])


@dataclass(frozen=True)
class Measurement:
    """One number about one case, with the full cache's number for the same tokens.

    Args:
        metric: a name of :data:`kvlearn.rows.METRICS`.
        value: under the budget.
        full_value: with the full cache.
        tokens: tokens that the number is a mean over.
        solved: share of the case's questions that the full cache answers; ``None`` where nothing is asked.
    """

    metric: str
    value: float
    full_value: float
    tokens: int
    solved: float | None = None


class Task(ABC):
    """Base of all tasks.

    Attributes:
        name: what the user types, and what rows call it.
        summary: one line.
        metrics: names of :data:`kvlearn.rows.METRICS` that every case gets.
        variants: what the domains of its cases are called; empty where documents have domains of their own.
        window: tokens per case unless told otherwise; ``None`` where cases bring their own length.
        no_oracle: why the future cannot be recorded; empty where it can.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    variants: tuple[str, ...] = ()
    window: int | None = 2048
    no_oracle: str = ""

    @abstractmethod
    def cases(self, material: Material) -> list[Case]:
        """Cases; the same ones whenever the material is the same.

        Raises:
            KvlearnError: the window is too short, or the texts are too few.
        """

    @abstractmethod
    def full(self, run: Run, cases: Sequence[Case]) -> Any:
        """Whatever of the full cache's run :meth:`measure` compares with; made once for all policies and budgets."""

    @abstractmethod
    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """Measurements of each case under a cache with ``budget`` slots per KV head; all metrics, and parts of them."""

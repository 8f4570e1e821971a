"""Policies against each other: the same tokens, the same slots, the same protection; rows appended while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvlearn import attention, policies, tasks
from kvlearn.allocation import layer_budgets
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy
from kvlearn.policies.oracle import FutureRecorder, Oracle
from kvlearn.rows import Row, RowStore
from kvlearn.shapes import Budget, Protection
from kvlearn.tasks.base import Case, Measurement, Run, Task

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel

Notify = Callable[[str, int, int], None]
"""Called before each cell with its name, its number from 0, and how many cells there are."""

UNIFORM = "uniform"


@dataclass(frozen=True)
class Settings:
    """What is compared, and under which conditions.

    Args:
        policies: names, or folders of scorers; ``oracle`` and ``full`` included.
        budgets: slots per KV head and layer (the mean over layers when ``shares`` is given).
        tasks: names.
        seeds: seeds of the policies that choose at random.
        window: tokens per case.
        batch: cases measured together, for tasks that allow it.
        block: queries per observed block.
        protect: what no policy may evict.
        shares: how the slots are shared among layers, the same for every policy; ``None`` is evenly.
        allocation: what rows call ``shares``.
    """

    policies: Sequence[str]
    budgets: Sequence[int]
    tasks: Sequence[str] = ("lm",)
    seeds: Sequence[int] = (0,)
    window: int = 2048
    batch: int = 4
    block: int = 32
    protect: Protection = field(default_factory=Protection)
    shares: Sequence[float] | None = None
    allocation: str = UNIFORM

    def __post_init__(self) -> None:
        for name in ("policies", "budgets", "tasks", "seeds"):
            values = list(getattr(self, name))
            if not values:
                raise KvlearnError(f"nothing to compare: {name} is empty.")
            if len(set(values)) < len(values):
                raise KvlearnError(f"{name} names something twice: {', '.join(map(str, values))}.")
        if self.batch < 1:
            raise KvlearnError(f"batch is {self.batch}; give a number of cases that is 1 or more.")


@dataclass(frozen=True)
class Cell:
    """One policy at one budget with one seed, on one task."""

    task: Task
    spec: str
    policy: Policy | None  # None for the oracle, which is made anew for every batch of cases
    budget: int
    seed: int

    @property
    def label(self) -> str:
        """What rows call the policy."""
        return self.spec if self.policy is None else self.policy.label

    @property
    def kind(self) -> str:
        """The policy's role."""
        return "oracle" if self.policy is None else self.policy.kind


class Comparison:
    """A comparison in progress.

    Args:
        loaded: the model, its tokenizer and its name.
        settings: what is compared.
        cases: cases of each task, by the task's name.
        store: where rows go; rows that it holds are not measured again.

    Raises:
        KvlearnError: an unknown policy or task, or a budget that cannot hold what is protected.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, cases: Mapping[str, Sequence[Case]], store: RowStore
    ) -> None:
        self.loaded, self.settings, self.store = loaded, settings, store
        self.model = attention.enable(loaded.model)
        self.cases = cases
        self.cells = [cell for name in settings.tasks for cell in self._cells(tasks.resolve(name))]

    def _cells(self, task: Task) -> Iterator[Cell]:
        settings = self.settings
        for budget in settings.budgets:
            Budget.resolve(budget, settings.block, settings.protect)
            for spec in settings.policies:
                policy = None if spec == Oracle.name else policies.resolve(spec)
                seeded = policy is not None and hasattr(policy, "seed")
                for seed in settings.seeds if seeded else settings.seeds[:1]:
                    own = policies.resolve(spec, seed=seed) if seeded else policy
                    if own is not None:
                        own.bind(self.model)
                    yield Cell(task, spec, own, budget, seed)

    def run(self, notify: Notify | None = None) -> None:
        """Measure every cell that has no row yet.

        A cell that fails is recorded with its error and does not end the run.
        """
        groups = [(task, batch) for task in self._tasks() for batch in self._batches(task)]
        todo = [(task, batch, [c for c in self.cells if c.task is task]) for task, batch in groups]
        total, number = sum(len(cells) for _, _, cells in todo), 0
        for task, batch, cells in todo:
            reference: _Reference | None = None
            for cell in cells:
                if notify is not None:
                    notify(f"{cell.label} at {cell.budget}, {batch[0].domain}", number, total)
                number += 1
                if self._done(cell, batch):
                    continue
                if reference is None:
                    reference = self._reference(task, batch)
                self.store.append(*self._measure(cell, batch, reference))

    def _tasks(self) -> list[Task]:
        return list({id(cell.task): cell.task for cell in self.cells}.values())

    def _batches(self, task: Task) -> Iterator[list[Case]]:
        size = self.settings.batch if task.batched else 1
        cases = list(self.cases[task.name])
        for start in range(0, len(cases), size):
            yield cases[start : start + size]

    def _key(self, cell: Cell, case: Case) -> Row:
        settings = self.settings
        protect = settings.protect
        return {
            "model": self.loaded.name,
            "task": cell.task.name,
            "policy": cell.label,
            "budget": cell.budget,
            "doc": case.doc,
            "domain": case.domain,
            "seed": cell.seed,
            "window": settings.window,
            "block": settings.block,
            "protect": f"sinks={protect.sinks},recent={protect.recent or settings.block},prompt={protect.prompt}",
            "allocation": settings.allocation,
        }

    def _done(self, cell: Cell, batch: Sequence[Case]) -> bool:
        keys = [{**self._key(cell, case), "metric": metric} for case in batch for metric in cell.task.metrics]
        return self.store.done(*keys)

    def _cache(self, policy: str | Policy, budget: int | None, recorder: FutureRecorder | None = None) -> EvictingCache:
        settings = self.settings
        budgets: int | list[int] | None = budget
        if budget is not None and settings.shares is not None:
            plain = Budget.resolve(budget, settings.block, settings.protect)
            budgets = layer_budgets(settings.shares, budget, least=plain.least)
        return EvictingCache(
            self.model, policy, budgets, protect=settings.protect, block=settings.block, recorder=recorder
        )

    def _reference(self, task: Task, batch: Sequence[Case]) -> _Reference:
        recorder = FutureRecorder() if any(cell.policy is None for cell in self.cells) else None
        cache = self._cache("full", None, recorder)
        full = task.full(Run(self.model, self.loaded.tokenizer, cache), batch)
        oracle = None if recorder is None else Oracle.from_recorder(recorder)
        return _Reference(full, oracle, cache.stats()["bytes"])

    def _measure(self, cell: Cell, batch: Sequence[Case], reference: _Reference) -> list[Row]:
        policy = reference.oracle if cell.policy is None else cell.policy
        assert policy is not None
        keys = [self._key(cell, case) for case in batch]
        cache = self._cache(policy, None if policy.kind == "full" else cell.budget)
        run = Run(self.model, self.loaded.tokenizer, cache)
        started = time.perf_counter()
        try:
            measured = cell.task.measure(run, batch, reference.full, cell.budget)
        except KvlearnError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it was, it is recorded and the other cells go on
            message = f"{type(error).__name__}: {error}"
            return [
                {**key, "kind": cell.kind, "metric": metric, "error": message}
                for key in keys
                for metric in cell.task.metrics
            ]
        seconds = time.perf_counter() - started
        held = cache.stats()
        fed = sum(held["length"])
        common = {
            "kind": cell.kind,
            "slots": held["slots"],
            "mean_slots": held["mean_slots"],
            "bytes": held["bytes"] // len(batch),
            "state_bytes": held["state_bytes"] // len(batch),
            "full_bytes": reference.bytes // len(batch),
            "tokens_per_s": fed / seconds,
            "batch": len(batch),
            "versions": versions(),
        }
        return [
            {**key, **common, **_values(measurement)}
            for key, measurements in zip(keys, measured, strict=True)
            for measurement in measurements
        ]


@dataclass(frozen=True)
class _Reference:
    full: Any
    oracle: Oracle | None
    bytes: int


def _values(measurement: Measurement) -> Row:
    return {
        "metric": measurement.metric,
        "value": measurement.value,
        "full_value": measurement.full_value,
        "tokens": measurement.tokens,
    }


def versions() -> dict[str, str]:
    """Versions of what a figure depends on."""
    import transformers

    from kvlearn import __version__

    return {"kvlearn": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def text_cases(loaded: LoadedModel, data: str, *, docs: int, window: int, split: str, seed: int) -> list[Case]:
    """Windows of documents as cases, the same number from every domain of a mixture as far as that goes.

    Args:
        loaded: model and tokenizer.
        data: a corpus or a comma-separated mixture (see :mod:`kvlearn.corpora`).
        docs: how many windows, each from a document of its own.
        window: tokens per window.
        split: which split of the documents.
        seed: order of the documents.
    """
    from kvlearn.corpora import corpus_windows

    found = corpus_windows(
        data,
        loaded.tokenizer,
        tokens=docs * window,
        window=window,
        max_windows_per_document=1,
        split=split,  # type: ignore[arg-type]  # checked by corpora, which names the splits
        seed=seed,
    )
    return [Case(w.doc, w.domain, torch.tensor(w.input_ids, dtype=torch.int64)) for w in found]

"""Policies against each other: the same tokens, the same slots, the same protection; rows appended while it runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from kvlearn import attention, policies, tasks
from kvlearn.allocation import split_pooled
from kvlearn.blame import parts
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.keeping import WatchedRun
from kvlearn.models import fingerprint
from kvlearn.plan import Cell, Group, Reference, foresight, oracles_of
from kvlearn.policies.base import Policy
from kvlearn.policies.oracle import Foresight, FutureRecorder, Oracle
from kvlearn.rows import Row
from kvlearn.scoring import scoring_time
from kvlearn.shapes import Budget, Protection
from kvlearn.sharing import share_out
from kvlearn.support import managed_layers
from kvlearn.tasks.base import Case, Material, Measurement, Run, Task

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel

Notify = Callable[[str, int, int], None]
"""Called before each cell with its name, its number from 0, and how many cells there are."""

UNIFORM = "uniform"


class Rows(Protocol):
    """Where rows go: a :class:`kvlearn.rows.RowStore`, or what hands them on to one."""

    def done(self, *keys: Mapping[str, Any]) -> bool:
        """Whether good rows exist for all of these."""

    def append(self, *rows: Row) -> None:
        """Add rows."""


@dataclass(frozen=True)
class Settings:
    """What is compared, and under which conditions.

    Args:
        policies: names, or folders of scorers; ``oracle`` and ``full`` included.
        budgets: slots per KV head and layer (the mean over layers, where ``allocation`` makes them differ).
        tasks: names, or files of prompts (see :func:`kvlearn.tasks.resolve`).
        seeds: seeds of the policies that choose at random.
        window: tokens per case; ``None`` is what each task takes by default.
        batch: cases measured together, as far as they are of one shape.
        block: queries per observed block.
        protect: what no policy may evict.
        allocation: how the slots are shared among layers and heads, the same for every policy: ``uniform``;
            ``pooled``, where the heads of a layer share its slots, as AdaKV has it;
            ``pyramid``, or a file or a scorer's folder with one share for each layer; ``pooled:FILE`` does both
            (:func:`kvlearn.sharing.share_out`).
        blame: which parts of the model each policy is tried in, with the oracle everywhere else
            (:func:`kvlearn.blame.parts`); empty for none.
    """

    policies: Sequence[str]
    budgets: Sequence[int]
    tasks: Sequence[str] = ("lm",)
    seeds: Sequence[int] = (0,)
    window: int | None = None
    batch: int = 4
    block: int = 32
    protect: Protection = field(default_factory=Protection)
    allocation: str = UNIFORM
    blame: str = ""

    def __post_init__(self) -> None:
        for name in ("policies", "budgets", "tasks", "seeds"):
            values = list(getattr(self, name))
            if not values:
                raise KvlearnError(f"nothing to compare: {name} is empty.")
            if len(set(values)) < len(values):
                raise KvlearnError(f"{name} names something twice: {', '.join(map(str, values))}.")
        if self.batch < 1:
            raise KvlearnError(f"batch is {self.batch}; give a number of cases that is 1 or more.")
        if self.allocation == "scorer":
            raise KvlearnError(
                "allocation 'scorer' would give every policy slots of its own; name the scorer's folder instead, and "
                "all get the same."
            )
        if self.blame == "heads" and split_pooled(self.allocation)[0]:
            raise KvlearnError("heads that share a pool are ranked by one policy: blame layers, or allocate otherwise.")


class Comparison:
    """A comparison in progress.

    Args:
        loaded: the model, its tokenizer and its name.
        settings: what is compared.
        cases: cases of each task, by its name in ``settings`` (:func:`make_cases`).
        store: where rows go; rows that it holds are not measured again.

    Attributes:
        skipped: what cannot be measured, and why.

    Raises:
        KvlearnError: an unknown policy or task, or a budget that cannot hold what is protected.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, cases: Mapping[str, Sequence[Case]], store: Rows
    ) -> None:
        self.loaded, self.settings, self.store = loaded, settings, store
        self.model = attention.enable(loaded.model)
        self.skipped: list[str] = []
        self.cases_by_name = dict(cases)
        self.cases = {tasks.resolve(name): cases[name] for name in settings.tasks}
        self.cells = [cell for task in self.cases for cell in self._cells(task)]

    def _cells(self, task: Task) -> Iterator[Cell]:
        settings = self.settings
        for budget in settings.budgets:
            self._shared_out(budget)  # what is too small, or no allocation, is refused before anything is measured
            for spec in self._specs:
                oracle = bool(oracles_of([spec]))
                if oracle and task.no_oracle:
                    self._skip(f"{task.name}: no {spec}, because {task.no_oracle}.")
                    continue
                policy = None if oracle else policies.resolve(spec)
                seeded = policy is not None and hasattr(policy, "seed")
                for seed in settings.seeds if seeded else settings.seeds[:1]:
                    own = policies.resolve(spec, seed=seed) if seeded else policy
                    if own is not None and not hasattr(own, "open_cache"):
                        own.bind(self.model)
                    yield Cell(task, spec, own, budget, seed, foresight(spec) if oracle else None)
                    if own is not None and settings.blame:
                        yield from self._blamed(Cell(task, spec, own, budget, seed))

    @functools.cached_property
    def _specs(self) -> list[str]:
        """The policies, with the oracle among them if it is needed."""
        specs = list(self.settings.policies)
        return [*specs, Oracle.name] if self.settings.blame and not oracles_of(specs) else specs

    def _blamed(self, cell: Cell) -> Iterator[Cell]:
        """The same policy in one part of the model after the other."""
        assert cell.policy is not None
        if cell.policy.kind == "full":
            return
        if hasattr(cell.policy, "open_cache") or cell.task.no_oracle:
            self._skip(f"{cell.task.name}: {cell.spec} is not tried in parts of the model, beside the oracle.")
            return
        reduce = foresight(oracles_of(self._specs)[0])
        heads = fingerprint(self.model)["kv_heads"]
        for part in parts(self.settings.blame, managed_layers(self.model)[1], heads):
            yield replace(cell, reduce=reduce, part=part)

    def _skip(self, what: str) -> None:
        if what not in self.skipped:
            self.skipped.append(what)

    def run(self, notify: Notify | None = None) -> None:
        """Measure every cell that has no row yet.

        A cell that fails is recorded with its error and does not end the run.
        """
        for group in self.groups:
            self.run_group(group, notify)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """What can be measured apart: every batch of cases under every cell of its task."""
        batches = [(task, batch) for task in self.cases for batch in self._batches(task)]
        found: list[Group] = []
        for task, batch in batches:
            before = sum(len(group.cells) for group in found)
            found.append(Group(task, batch, [cell for cell in self.cells if cell.task is task], before))
        return found

    def run_group(self, group: Group, notify: Notify | None = None) -> None:
        """Measure the cells of one group that have no row yet."""
        total = sum(len(each.cells) for each in self.groups)
        reference: Reference | None = None
        for number, cell in enumerate(group.cells):
            if notify is not None:
                where = f" in {cell.part}" if cell.part else ""
                notify(f"{cell.label} at {cell.budget}{where}, {group.batch[0].domain}", group.before + number, total)
            if self._done(cell, group.batch):
                continue
            if reference is None:
                reference = self._reference(group.task, group.batch)
            self.store.append(*self._measure(cell, group.batch, reference, watch=group.before == 0 and not cell.part))

    def _batches(self, task: Task) -> Iterator[list[Case]]:
        """Cases of one shape together, in order of the first of each shape."""
        by_shape: dict[tuple[int, ...], list[Case]] = {}
        for case in self.cases[task]:
            by_shape.setdefault(case.shape, []).append(case)
        for alike in by_shape.values():
            for start in range(0, len(alike), self.settings.batch):
                yield alike[start : start + self.settings.batch]

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
            "window": window_of(cell.task, settings.window),
            "block": settings.block,
            "protect": f"sinks={protect.sinks},recent={protect.recent or settings.block},prompt={protect.prompt}",
            "allocation": settings.allocation,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **({} if cell.part is None else {"blame": str(cell.part)}),
        }

    def _done(self, cell: Cell, batch: Sequence[Case]) -> bool:
        keys = [{**self._key(cell, case), "metric": metric} for case in batch for metric in cell.task.metrics]
        return self.store.done(*keys)

    def _cache(self, policy: str | Policy, budget: int | None, recorder: FutureRecorder | None = None) -> EvictingCache:
        settings = self.settings
        if budget is not None and hasattr(policy, "open_cache"):
            opened: Any = policy.open_cache(self.model, Budget.resolve(budget, settings.block, settings.protect))
            return cast(EvictingCache, opened)
        shared = {} if budget is None else self._shared_out(budget)
        return EvictingCache(
            self.model, policy, **shared, protect=settings.protect, block=settings.block, recorder=recorder
        )

    def _shared_out(self, budget: int) -> dict[str, Any]:
        """Slots of each layer, as the allocation has it."""
        settings = self.settings
        Budget.resolve(budget, settings.block, settings.protect)  # what is too small is refused here
        return share_out(self.model, budget, settings.allocation, block=settings.block, protect=settings.protect)

    def _run_of(self, cache: EvictingCache) -> Run:
        return Run(self.model, self.loaded.tokenizer, cache)

    def _reference(self, task: Task, batch: Sequence[Case]) -> Reference:
        foreseen = any(cell.reduce is not None for cell in self.cells if cell.task is task)
        recorder = FutureRecorder() if foreseen else None
        cache = self._cache("full", None, recorder)
        run = self._run_of(cache)
        full = task.full(run, batch)
        oracles: dict[Foresight, Oracle] = {}
        if recorder is not None:
            recorders = [copied.recorder for copied in run.copies] or recorder
            kinds = {cell.reduce for cell in self.cells if cell.reduce is not None}
            oracles = {kind: Oracle.from_recorder(recorders, kind) for kind in kinds}
        return Reference(full, oracles, cache.stats()["bytes"])

    def _measure(self, cell: Cell, batch: Sequence[Case], reference: Reference, *, watch: bool) -> list[Row]:
        """Rows of some cases; the first one tells what was held, if it is watched."""
        policy = reference.policy_of(cell)
        keys = [self._key(cell, case) for case in batch]
        cache = self._cache(policy, None if policy.kind == "full" else cell.budget)
        run = WatchedRun(self.model, self.loaded.tokenizer, cache) if watch else self._run_of(cache)
        started = time.perf_counter()
        try:
            with scoring_time(cell.policy or policy, self.model.device) as scoring:
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
        common = {
            "kind": cell.kind,
            "slots": held["slots"],
            "mean_slots": held["mean_slots"],
            "bytes": held["bytes"] // len(batch),
            "state_bytes": held["state_bytes"] // len(batch),
            "full_bytes": reference.bytes // len(batch),
            "tokens_per_s": run.tokens / seconds,
            "scorer_share": None if hasattr(policy, "open_cache") else scoring() / seconds,
            "batch": len(batch),
            "versions": versions(),
        }
        rows = [
            {**key, **common, **_values(measurement)}
            for key, measurements in zip(keys, measured, strict=True)
            for measurement in measurements
        ]
        if isinstance(run, WatchedRun) and (kept := run.kept()) is not None:
            rows[0]["kept"] = kept
        return rows


def _values(measurement: Measurement) -> Row:
    return {
        "metric": measurement.metric,
        "value": measurement.value,
        "full_value": measurement.full_value,
        "tokens": measurement.tokens,
        **({} if measurement.solved is None else {"solved": measurement.solved}),
    }


def window_of(task: Task, window: int | None) -> int | None:
    """Tokens per case: as told, else the task's own; ``None`` for a task whose cases bring their own length."""
    return task.window if window is None or task.window is None else window


def make_cases(loaded: LoadedModel, settings: Settings, *, docs: int, **options: Any) -> dict[str, list[Case]]:
    """Cases of every task of a comparison.

    Args:
        loaded: model and tokenizer.
        settings: tasks and window; the first seed orders documents and makes random choices.
        docs: cases of each task.
        **options: of :class:`Material`: ``split``, ``data``, ``filler``.
    """
    made = {}
    for name in settings.tasks:
        task = tasks.resolve(name)
        window = window_of(task, settings.window) or 0
        material = Material.of(loaded, docs=docs, window=window, seed=settings.seeds[0], **options)
        made[name] = task.cases(material)
    return made


def versions() -> dict[str, str]:
    """Versions of what a figure depends on."""
    import transformers

    from kvlearn import __version__

    return {"kvlearn": __version__, "torch": torch.__version__, "transformers": transformers.__version__}

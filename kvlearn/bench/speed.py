"""Decoding, prompts and tracing beside the stock cache, as rows of :mod:`kvlearn.report.speed`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvlearn import attention
from kvlearn.bench import cost
from kvlearn.bench.contenders import FULL, KVPRESS, SAME_SLOTS, STOCK, Case, Contender, Prompt, has_kvpress, make
from kvlearn.bench.cost import sizes_of
from kvlearn.bench.race import Result, race
from kvlearn.compare import versions
from kvlearn.errors import KvlearnError
from kvlearn.policies import resolve
from kvlearn.report.speed import PLAIN, TRACING
from kvlearn.rows import Row, RowStore
from kvlearn.shapes import DEFAULT_BLOCK, Budget

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel

Notify = Callable[[str, int, int], None]

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (1, 2, 4, 8, 16, 32)
ROWS_AT = 2048
"""The context at which growth with rows is measured."""


@dataclass(frozen=True)
class Group:
    """Contenders of one race.

    Attributes:
        case: context and batch.
        budgets: slots per KV head and layer.
        policies: names, folders of scorers, and those of :data:`kvlearn.bench.contenders.STOCK`.
    """

    case: Case
    budgets: tuple[int, ...]
    policies: tuple[str, ...]

    @property
    def entries(self) -> list[tuple[str, int | None]]:
        """Policy and budget of every contender; the full cache has none, and is always there."""
        bounded = [name for name in self.policies if name != FULL]
        return [(FULL, None), *((name, budget) for budget in self.budgets for name in bounded)]


def groups(
    contexts: Sequence[int], batches: Sequence[int], budgets: Sequence[int], policies: Sequence[str]
) -> list[Group]:
    """Every context with every batch.

    Raises:
        KvlearnError: a list is empty, names something twice, or holds a number below 1.
    """
    for name, values in (("contexts", contexts), ("batches", batches), ("budgets", budgets), ("policies", policies)):
        if not values or len(set(values)) < len(values):
            raise KvlearnError(f"--{name} is {','.join(map(str, values))!r}; give one or more, each once.")
        if any(isinstance(value, int) and value < 1 for value in values):
            raise KvlearnError(f"--{name} is {','.join(map(str, values))}; give numbers that are 1 or more.")
    return [Group(Case(context, batch), tuple(budgets), tuple(policies)) for context in contexts for batch in batches]


def small(learned: str) -> list[Group]:
    """The races behind the table of targets: minutes on two cores with a model of 135 million parameters."""
    pressed = (KVPRESS,) if has_kvpress() else ()
    return [
        Group(Case(8192, 8), (512,), (FULL, "streaming", learned)),
        Group(Case(2048, 8), (256,), (FULL, SAME_SLOTS, "streaming", "h2o", learned, *pressed)),
        Group(Case(2048, 1), (256,), (FULL, SAME_SLOTS, "streaming", "h2o", learned)),
        Group(Case(256, 1), (512,), (FULL, learned)),
        Group(Case(256, 8), (512,), (FULL, learned)),
    ]


def small_prompt(learned: str) -> list[Group]:
    """The prompt of the same table."""
    return [Group(Case(2048, 1), (256,), (FULL, learned))]


def growth(learned: str, longest: int, most_rows: int, budget: int) -> list[Group]:
    """One row at contexts up to ``longest``, then up to ``most_rows`` rows at a context of 2,048."""
    contexts = [context for context in CONTEXTS if context <= longest]
    rows = [rows for rows in ROWS if 1 < rows <= most_rows]
    cases = [Case(context, 1) for context in contexts] + [Case(ROWS_AT, batch) for batch in rows]
    return [Group(case, (budget,), (FULL, learned)) for case in cases]


@dataclass
class Bench:
    """A bench in progress.

    Attributes:
        loaded: the model.
        store: where rows go; races that it holds are not run again.
        rounds: turns of every contender.
        turn_seconds: least duration of a turn.
        block: queries per observed block.
    """

    loaded: LoadedModel
    store: RowStore
    rounds: int = 5
    turn_seconds: float = 1.0
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise KvlearnError(f"--rounds is {self.rounds}; give a number that is 1 or more.")
        attention.enable(self.loaded.model)

    def decode(self, wanted: Sequence[Group], notify: Notify | None = None) -> None:
        """Race decode steps."""
        self._race("decode", wanted, self._decoder, notify)

    def prefill(self, wanted: Sequence[Group], notify: Notify | None = None) -> None:
        """Race whole prompts."""
        self._race("prefill", wanted, self._prompt, notify)

    def trace(self, data: str, windows: int, window: int, notify: Notify | None = None) -> None:
        """Trace windows of text, each beside the plain forward pass of the same window."""
        from kvlearn.tracing import TIMED_WINDOWS, trace

        keys = [self._key("trace", name, None, Case(window, 1)) for name in (PLAIN, TRACING)]
        if self.store.done(*keys):
            return
        windows = min(windows, TIMED_WINDOWS)
        with tempfile.TemporaryDirectory() as folder:
            report = trace(
                self.loaded,
                data,
                Path(folder) / "trace",
                tokens=windows * window,
                window=window,
                block=self.block,
                progress=None if notify is None else lambda done, total: notify("tracing", done, total),
            )
        if not report.pairs:
            raise KvlearnError(f"{data} gave no window of {window} tokens; name more text or a shorter --window.")
        common = {"tokens": window, "steps": 1, "versions": versions(), "data": data}
        traced, plain = zip(*report.pairs, strict=True)
        for key, kind, seconds in zip(keys, (FULL, "heuristic"), (plain, traced), strict=True):
            self.store.append({**key, **common, "kind": kind, "seconds": list(seconds)})

    def _decoder(self, spec: str, case: Case, budget: int | None) -> Contender:
        return make(self.loaded.model, spec, case, budget, self.block)

    def _prompt(self, spec: str, case: Case, budget: int | None) -> Contender:
        if spec in STOCK and spec != FULL:
            raise KvlearnError(f"{spec} has no part in bench prefill; leave it out.")
        return Prompt(self.loaded.model, spec, case, budget)

    def _race(
        self,
        bench: str,
        wanted: Sequence[Group],
        enter: Callable[[str, Case, int | None], Contender],
        notify: Notify | None,
    ) -> None:
        for group in wanted:
            self._check(group)
        for number, group in enumerate(wanted):
            keys = [self._key(bench, self._label(name), budget, group.case) for name, budget in group.entries]
            if self.store.done(*keys):
                continue
            contenders = [enter(name, group.case, budget) for name, budget in group.entries]
            told = self._teller(f"context {group.case.context}, batch {group.case.batch}", number, len(wanted), notify)
            results = race(contenders, self.rounds, self.turn_seconds, self.block, told)
            tokens = group.case.batch * (group.case.context if bench == "prefill" else 1)
            made = self._rows(keys, contenders, results, tokens)
            self.store.append(*(self._with_cost(row) if bench == "decode" else row for row in made))

    def _with_cost(self, row: Row) -> Row:
        """With the bytes that a step must move, where the cost model says so."""
        sizes, budget, batch = sizes_of(self.loaded.model, self.loaded.name), row["budget"], row["batch"]
        if row["policy"] == FULL:
            found = cost.full(sizes, row["context"], batch)
        elif row["kind"] == "learned":
            scorer: Any = resolve(row["policy"])
            config = scorer.scorer.config
            scoring = cost.Scoring(config.key_rank, config.hidden, config.block)
            found = cost.learned(sizes, min(budget, row["context"]), batch, scoring)
        elif row["policy"] in ("streaming", SAME_SLOTS):
            found = cost.bounded(sizes, min(budget, row["context"]), batch)
        else:
            return row
        return {**row, "moved": int(found.moved), "operations": int(found.operations)}

    def _check(self, group: Group) -> None:
        """Refuse now what would end the run later."""
        for name, budget in group.entries:
            if name == KVPRESS and not has_kvpress():
                raise KvlearnError(f"{KVPRESS} needs the package kvpress; install it or leave it out.")
            if name not in STOCK:
                resolve(name).bind(self.loaded.model)
            if budget is not None:
                Budget.resolve(budget)

    def _label(self, name: str) -> str:
        return name if name in STOCK else resolve(name).label

    @staticmethod
    def _teller(what: str, number: int, count: int, notify: Notify | None) -> Notify | None:
        if notify is None:
            return None
        return lambda who, done, total: notify(f"{what}: {who}", number * total + done, count * total)

    def _key(self, bench: str, policy: str, budget: int | None, case: Case) -> Row:
        model = self.loaded.model
        return {
            "bench": bench,
            "model": self.loaded.name,
            "policy": policy,
            "budget": budget,
            "context": case.context,
            "batch": case.batch,
            "threads": torch.get_num_threads(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
        }

    @staticmethod
    def _rows(
        keys: Sequence[Row], contenders: Sequence[Contender], results: Sequence[Result], tokens: int
    ) -> Iterator[Row]:
        made = versions()
        for key, contender, result in zip(keys, contenders, results, strict=True):
            measured: dict[str, Any] = vars(result)
            yield {**key, **measured, "kind": contender.kind, "tokens": tokens, "versions": made}

"""Cells: which rows of a comparison may be set side by side.

A cell is one model, task, metric, window and budget. Within a cell, policies are compared on the documents that every
one of them finished, so that all figures of a cell speak of the same documents. ``kvlearn.rows`` says what a row holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlearn.rows import Row, loss, number

MIN_COVERAGE = 0.5  # a policy with a smaller share of the cell's documents is listed without figures

Array = npt.NDArray[np.float64]
Document = tuple[str, str]  # domain, name

_VARIANT_FIELDS = ("block", "protect", "allocation", "dtype")
_UNTOLD = "?"


@dataclass(frozen=True, order=True)
class Cell:
    """What may be set side by side: everything but the policy. Budget and window are 0 where there is none."""

    model: str
    task: str
    metric: str
    window: int
    budget: int


@dataclass
class CellData:
    """The rows of one cell.

    Attributes:
        cell: Which cell.
        kinds: Kind of each policy.
        good: Rows with finite numbers, by policy and document; several where there are several seeds.
        failed: Rows with an error or without a finite number, by policy.
    """

    cell: Cell
    kinds: dict[str, str] = field(default_factory=dict)
    good: dict[str, dict[Document, list[Row]]] = field(default_factory=dict)
    failed: dict[str, list[Row]] = field(default_factory=dict)

    @functools.cached_property
    def all_docs(self) -> set[Document]:
        """Documents that at least one policy finished."""
        return set().union(*self.good.values())

    @functools.cached_property
    def compared(self) -> list[str]:
        """Policies that finished at least half of the cell's documents."""
        least = max(1.0, MIN_COVERAGE * len(self.all_docs))
        return [policy for policy, docs in self.good.items() if len(docs) >= least]

    @functools.cached_property
    def docs(self) -> list[Document]:
        """Documents that every compared policy finished, sorted."""
        finished = [set(self.good[policy]) for policy in self.compared]
        return sorted(set.intersection(*finished)) if finished else []

    def column(self, policy: str, read: str | Callable[[Mapping[str, Any]], float] = loss) -> Array:
        """A field, or a function of a row (its loss), on each of ``docs``: ``[documents]``, mean over seeds."""
        of = (lambda row: number(row.get(read))) if isinstance(read, str) else read
        seeds = (self.good[policy][doc] for doc in self.docs)
        return np.array([sum(map(of, rows)) / len(rows) for rows in seeds], dtype=np.float64)


def cells(rows: Iterable[Row]) -> list[CellData]:
    """Sort rows into cells, ordered by model, task, metric, window and budget.

    Rows that blame a part of the model are passed over (:mod:`kvlearn.report.blame` reads them).
    Rows of the full cache without a budget join the cell of every budget. Variants of a policy (block, protection,
    allocation) count as policies of their own.
    """
    rows = [row for row in rows if not row.get("blame")]
    labels = policy_labels(rows)
    found: dict[Cell, CellData] = {}
    for row in sorted(rows, key=_joins_every_budget):
        cell = _cell_of(row)
        joined = [other for other in found if replace(other, budget=0) == cell] if _joins_every_budget(row) else []
        for each in joined or [cell]:
            _add(found.setdefault(each, CellData(each)), row, labels[_variant(row)])
    return [found[cell] for cell in sorted(found)]


def policy_labels(rows: Iterable[Row]) -> dict[tuple[str, ...], str]:
    """A name for every variant of every policy: the policy, and those settings in which its variants differ.

    A row that does not tell a setting (one that failed early, say) is taken for the variant that there is, if just one.
    """
    variants: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        variants.setdefault(row["policy"], set()).add(_variant(row))
    labels = {}
    for policy, found in variants.items():
        told = [set(values) - {_UNTOLD} for values in zip(*found, strict=True)][1:]
        for variant in found:
            settings = zip(_VARIANT_FIELDS, variant[1:], told, strict=True)
            words = [f"{name}={value}" for name, value, values in settings if len(values) > 1]
            labels[variant] = f"{policy} ({', '.join(words)})" if words else policy
    return labels


def setting_text(value: Any) -> str:
    """A setting in words: ``none``, a plain value, or ``sink 4 + recent 64`` for a mapping."""
    if isinstance(value, Mapping):
        return " + ".join(f"{name} {value[name]}" for name in sorted(value)) or "none"
    return "none" if value is None else str(value)


def _add(data: CellData, row: Row, label: str) -> None:
    data.kinds[label] = row["kind"]
    documents = data.good.setdefault(label, {})
    failed = data.failed.setdefault(label, [])
    if row.get("error") or np.isnan(loss(row)):
        failed.append(row)
    else:
        documents.setdefault((row["domain"], row["doc"]), []).append(row)


def _cell_of(row: Row) -> Cell:
    return Cell(row["model"], row["task"], row["metric"], row.get("window") or 0, row.get("budget") or 0)


def _joins_every_budget(row: Row) -> bool:
    return row["kind"] == "full" and row.get("budget") is None


def _variant(row: Row) -> tuple[str, ...]:
    told = (setting_text(row[name]) if name in row else _UNTOLD for name in _VARIANT_FIELDS)
    return (row["policy"], *told)

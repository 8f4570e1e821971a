"""One scorer against each other policy over all cells of a task: the mean over budgets and windows, paired."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlearn.cells import Array, CellData, Document, cells
from kvlearn.report.grids import html_grid, markdown_grid, terminal_grid
from kvlearn.report.page import Section
from kvlearn.report.tables import decimal, percent, short_names, with_interval
from kvlearn.rows import Row, metric_info
from kvlearn.stats import HEURISTICS, ZERO, Interval, limits, resample_means

if TYPE_CHECKING:
    from rich.console import Group

TITLE = "Over all cells"
COLUMNS = ("scorer against", "cells", "better in", "loss", "scorer's loss", "difference [95% interval]")
CAPTION = (
    "cells: budgets and windows in which both were measured; loss: mean over cells of the means over documents; "
    "difference: scorer less the other, documents drawn jointly for all cells; below 0 the scorer loses less"
)
MAIN = ("nll", "exact_match")
"""Metrics that are told of: the others say the same in other words."""


@dataclass(frozen=True)
class Rival:
    """A scorer beside one other policy, in the cells of one task in which both were measured.

    Attributes:
        policy: the other.
        kind: of the other.
        cells: how many there are.
        better: in how many of them the scorer loses less.
        loss, own: mean loss over the cells, of the other and of the scorer.
        difference: of the scorer from the other, with its interval.
    """

    policy: str
    kind: str
    cells: int
    better: int
    loss: float
    own: float
    difference: Interval


@dataclass(frozen=True)
class Overall:
    """One scorer in one task.

    Attributes:
        model, task, metric, scorer: names.
        rivals: heuristics, floors and other scorers, the one that loses least first.
        gap_closed: mean over cells of the share of the way from the cell's best heuristic to its oracle.
    """

    model: str
    task: str
    metric: str
    scorer: str
    rivals: tuple[Rival, ...]
    gap_closed: Interval | None


def overall(rows: Iterable[Row]) -> list[Overall]:
    """Every scorer in every task with two cells or more."""
    tasks: dict[tuple[str, str, str], list[CellData]] = {}
    for data in cells(rows):
        if data.cell.metric in MAIN and data.docs:
            tasks.setdefault((data.cell.model, data.cell.task, data.cell.metric), []).append(data)
    found = []
    for (model, task, metric), members in tasks.items():
        kinds = {policy: data.kinds[policy] for data in members for policy in data.compared}
        for scorer in (policy for policy, kind in kinds.items() if kind == "learned"):
            own = [data for data in members if scorer in data.compared]
            others = [policy for policy, kind in kinds.items() if kind in (*HEURISTICS, "learned") and policy != scorer]
            rivals = [_rival(own, scorer, policy, kinds[policy]) for policy in others]
            ranked = sorted((rival for rival in rivals if rival), key=lambda rival: (rival.loss, rival.policy))
            if len(own) > 1 and ranked:
                found.append(Overall(model, task, metric, scorer, tuple(ranked), _gap(own, scorer)))
    return found


def _rival(members: Sequence[CellData], scorer: str, policy: str, kind: str) -> Rival | None:
    both = [data for data in members if policy in data.compared]
    if not both:
        return None
    differences = [data.column(scorer) - data.column(policy) for data in both]
    means = _means_over_cells(both, [each[:, None] for each in differences])
    return Rival(
        policy,
        kind,
        len(both),
        sum(bool(each.mean() < -ZERO) for each in differences),
        float(np.mean([data.column(policy).mean() for data in both])),
        float(np.mean([data.column(scorer).mean() for data in both])),
        _interval(both, means[..., 0].mean(0)),
    )


def _gap(members: Sequence[CellData], scorer: str) -> Interval | None:
    """None where a cell has no oracle, no heuristic, or no gap."""
    columns = []
    for data in members:
        by_kind = {
            kinds: [policy for policy in data.compared if data.kinds[policy] in kinds]
            for kinds in (HEURISTICS, ("oracle",))
        }
        if not all(by_kind.values()):
            return None
        best, oracle = (min((data.column(policy) for policy in names), key=np.mean) for names in by_kind.values())
        columns.append(np.stack([best - data.column(scorer), best - oracle], axis=1))
    means = _means_over_cells(members, columns)
    if (means[..., 1] <= ZERO).mean() > 0.01:  # of resamples: the gap is not sure to be one
        return None
    return _interval(members, (means[..., 0] / np.maximum(means[..., 1], ZERO)).mean(0))


def _interval(members: Sequence[CellData], samples: Array) -> Interval:
    """Of ``[1 + resamples]`` figures over these cells, the first that of the sample itself."""
    lo, hi = limits(samples[1:]) if max(len(data.docs) for data in members) > 1 else (None, None)
    return Interval(float(samples[0]), lo, hi, len({doc for data in members for doc in data.docs}))


def _means_over_cells(members: Sequence[CellData], columns: Sequence[Array]) -> Array:
    """Means over documents of ``[documents, K]`` numbers of each cell, in the sample itself and in resamples of it.

    A document that several cells share is drawn for all of them or for none. ``[cells, 1 + resamples, K]``.
    """
    docs: list[Document] = sorted({doc for data in members for doc in data.docs})
    place = {doc: number for number, doc in enumerate(docs)}
    found = []
    for data, values in zip(members, columns, strict=True):
        spread = np.zeros((len(docs), values.shape[1] + 1))
        spread[[place[doc] for doc in data.docs]] = np.concatenate([values, np.ones((len(values), 1))], axis=1)
        drawn = np.concatenate([spread.mean(0, keepdims=True), resample_means(spread)])
        found.append(drawn[:, :-1] / np.maximum(drawn[:, -1:], ZERO))
    return np.stack(found)


def _title(each: Overall, names: dict[str, str]) -> str:
    gap = ""
    if each.gap_closed is not None:
        share = with_interval(percent, each.gap_closed.mean, each.gap_closed.lo, each.gap_closed.hi)
        gap = f", {share} of the gap between best heuristic and oracle closed in the mean over cells"
    return f"{TITLE}: {names[each.scorer]} in {each.task} ({metric_info(each.metric).unit}){gap}"


def _lines(each: Overall, names: dict[str, str]) -> list[list[str]]:
    return [
        [
            names[rival.policy],
            str(rival.cells),
            str(rival.better),
            decimal(rival.loss),
            decimal(rival.own),
            with_interval(decimal, rival.difference.mean, rival.difference.lo, rival.difference.hi),
        ]
        for rival in each.rivals
    ]


def overall_tables(rows: Iterable[Row]) -> list[tuple[str, list[list[str]]]]:
    """Title and lines of the table of each scorer in each task, under :data:`COLUMNS`."""
    found = overall(rows)
    names = short_names(name for each in found for name in (each.scorer, *(rival.policy for rival in each.rivals)))
    return [(_title(each, names), _lines(each, names)) for each in found]


def render_overall(rows: Iterable[Row]) -> Group:
    """The tables for a terminal; empty without a scorer, or with one cell."""
    from rich.console import Group
    from rich.text import Text

    found = [terminal_grid(title, COLUMNS, lines) for title, lines in overall_tables(rows)]
    return Group(*found, Text(CAPTION, style="dim")) if found else Group()


def overall_markdown(rows: Iterable[Row]) -> str:
    """The tables as Markdown; empty where there are none."""
    found = [f"\n### {title}\n\n{markdown_grid(COLUMNS, lines)}\n" for title, lines in overall_tables(rows)]
    return "".join([*found, f"\n{CAPTION.capitalize()}.\n"]) if found else ""


def overall_sections(rows: Iterable[Row]) -> list[Section]:
    """One section of the page; none where there are no tables."""
    found = overall_tables(rows)
    grids = "".join(html_grid(f"{title} ({CAPTION})", COLUMNS, lines) for title, lines in found)
    return [Section(TITLE, grids)] if found else []

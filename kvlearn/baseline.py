"""Has a policy become worse? Rows measured now against rows kept from before, paired by document.

For people who develop a policy: keep the rows of a good state, and let ``kvlearn compare --check`` fail when a later
state falls behind them. The metric itself is compared, not the loss against the full cache, so that a fault that harms
the full cache too is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlearn.cells import setting_text
from kvlearn.errors import KvlearnError
from kvlearn.rows import SETTINGS, Row, metric_info, number
from kvlearn.stats import bootstrap_interval

TOLERANCE = 0.001
"""In the metric's unit; what arithmetic on another machine may change, and nobody misses."""

Documents = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Change:
    """One policy at one budget on one task, then and now, on the documents that both have.

    Attributes:
        model, task, metric, policy: names.
        budget: slots per KV head; ``None`` for a full cache without one.
        settings: window, block, protection and allocation, in words.
        n: documents that both have.
        before, after: mean of the metric over them; ``None`` without documents.
        worse, lo, hi: mean by which it is worse now, in the metric's unit, and its 95% interval; positive is worse.
            The limits are ``None`` for a single document, all three without.
        failed: documents that were measured before, and now gave an error or no number.
        fell: whether the whole interval lies beyond the tolerance, or something failed.
        rose: whether the whole interval lies beyond it on the other side.
    """

    model: str
    task: str
    metric: str
    policy: str
    budget: int | None
    settings: str
    n: int
    before: float | None
    after: float | None
    worse: float | None
    lo: float | None
    hi: float | None
    failed: int
    fell: bool
    rose: bool


def changes(rows: Iterable[Row], baseline: Iterable[Row], *, tolerance: float = TOLERANCE) -> list[Change]:
    """What has changed since a baseline, the worst first.

    Args:
        rows: measured now; see :mod:`kvlearn.rows`.
        baseline: kept from before.
        tolerance: a mean that is worse by less has not fallen, in the metric's unit.

    Raises:
        KvlearnError: the two have no document of one policy, budget, task and settings in common, or the tolerance is
            negative.
    """
    if not tolerance >= 0:
        raise KvlearnError(f"tolerance is {tolerance}; give a number that is 0 or more.")
    now, then = _grouped(rows), _grouped(baseline)
    found = []
    for key in sorted(set(now) & set(then), key=str):
        shared = sorted(document for document in then[key] if _good(then[key][document]) and document in now[key])
        if shared:
            found.append(_change(key, shared, now[key], then[key], tolerance))
    if not found:
        raise KvlearnError(
            "the baseline has nothing in common with what was measured: model, policy, budget, task, documents and "
            "settings must be the same."
        )
    return sorted(found, key=lambda change: (-change.fell, -change.failed, -(change.worse or 0.0)))


def _grouped(rows: Iterable[Row]) -> dict[tuple[Any, ...], Documents]:
    """Numbers of each document, one for each seed (NaN for an error), by everything but the document."""
    grouped: dict[tuple[Any, ...], Documents] = {}
    for row in rows:
        settings = ", ".join(f"{name} {setting_text(row[name])}" for name in SETTINGS if name in row)
        key = (row["model"], row["task"], row["metric"], row["policy"], row.get("budget"), settings)
        value = float("nan") if row.get("error") else number(row.get("value"))
        grouped.setdefault(key, {}).setdefault((row["domain"], row["doc"]), []).append(value)
    return grouped


def _good(values: list[float]) -> bool:
    return bool(np.isfinite(values).all())


def _change(
    key: tuple[Any, ...], shared: list[tuple[str, str]], now: Documents, then: Documents, tolerance: float
) -> Change:
    model, task, metric, policy, budget, settings = key
    measured = [document for document in shared if _good(now[document])]
    before = np.array([np.mean(then[document]) for document in measured])
    after = np.array([np.mean(now[document]) for document in measured])
    sign = -1.0 if metric_info(metric).higher_is_better else 1.0
    worse = bootstrap_interval(sign * (after - before))
    failed = len(shared) - len(measured)
    lo = worse.mean if worse.lo is None else worse.lo
    hi = worse.mean if worse.hi is None else worse.hi
    return Change(
        model=model,
        task=task,
        metric=metric,
        policy=policy,
        budget=budget,
        settings=settings,
        n=len(measured),
        before=float(before.mean()) if measured else None,
        after=float(after.mean()) if measured else None,
        worse=worse.mean if measured else None,
        lo=worse.lo,
        hi=worse.hi,
        failed=failed,
        fell=failed > 0 or lo > tolerance,
        rose=failed == 0 and hi < -tolerance,
    )

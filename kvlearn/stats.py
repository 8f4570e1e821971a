"""Statistics of a comparison: paired by document, with intervals, and with every denominator stated.

Rows (see ``kvlearn.rows``) are first averaged over seeds within a document; a document then counts once, whatever its
length. Intervals are 95% percentile bootstrap intervals over documents (Efron, 1979), p-values come from sign-flip
permutation of the paired differences (exact where there are few documents), and are corrected by Holm (1979) where many
policies are compared with one. All of it is deterministic.

What is set side by side, and on which documents, is decided in ``kvlearn.cells``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvlearn.cells import Array, Cell, CellData, cells
from kvlearn.errors import KvlearnError
from kvlearn.rows import Row, metric_info, number

RESAMPLES = 10_000
LEVEL = 0.95
FEW_DOCUMENTS = 6  # below this an interval is shown, with a warning
ZERO = 1e-9  # a whole below this has no shares
SOLVED = 0.5  # a task is solved where the full cache reaches this share of right answers

HEURISTICS = ("heuristic", "floor")  # the best of these is what a scorer has to beat


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval; ``lo`` and ``hi`` are None where one document or fewer leaves none."""

    mean: float
    lo: float | None
    hi: float | None
    n: int


@dataclass(frozen=True)
class Difference(Interval):
    """A paired mean difference, its interval, and the two-sided p-value of no difference."""

    p: float | None


@dataclass(frozen=True)
class Comparison(Difference):
    """A policy's loss minus the reference's, in one cell; ``p_holm`` holds for all comparisons of the cell together."""

    cell: Cell
    policy: str
    reference: str
    p_holm: float | None


@dataclass(frozen=True)
class SummaryRow:
    """One line of the table: one policy in one cell. None means that the figure cannot be had.

    Attributes:
        cell: Model, task, metric, window and budget.
        policy: Name, with the settings that tell it from its variants, if there are any.
        kind: ``full``, ``heuristic``, ``floor``, ``learned`` or ``oracle``.
        n: Documents the figures speak of: the same for every policy of the cell.
        loss, lo, hi: Mean loss against the full cache on the same documents, in the metric's unit, and its interval.
        value, full_value: Mean of the metric, and of the full cache's.
        slots: Physical slots held per KV head, the most at any moment of any document.
        mean_slots: The same, the mean over heads, layers and documents: what an allocation shares out.
        bytes, state_bytes: Mean bytes allocated by the cache, scorer state included; the scorer state alone.
        compression: Bytes of the full cache divided by bytes of this policy's cache, same documents.
        tokens_per_s: Scored tokens divided by time, over all documents.
        scorer_share: Mean share of the time that went into scoring.
        gap_closed, gap_lo, gap_hi: Share of the way from the best heuristic's loss to the oracle's.
        less_loss, less_lo, less_hi: 1 - loss / the best heuristic's loss.
        p: Against the best heuristic, Holm-corrected over the cell's policies; None for full, oracle and itself.
        best_heuristic: Whether this is the heuristic (or floor) with the least mean loss.
        solved: Share of the questions that the full cache answers, of tasks that ask any.
        errors: Rows of this policy in this cell that failed or hold no finite number.
        notes: What a reader must know about these figures.
    """

    cell: Cell
    policy: str
    kind: str
    n: int
    loss: float | None = None
    lo: float | None = None
    hi: float | None = None
    value: float | None = None
    full_value: float | None = None
    slots: float | None = None
    mean_slots: float | None = None
    bytes: float | None = None
    state_bytes: float | None = None
    compression: float | None = None
    tokens_per_s: float | None = None
    scorer_share: float | None = None
    gap_closed: float | None = None
    gap_lo: float | None = None
    gap_hi: float | None = None
    less_loss: float | None = None
    less_lo: float | None = None
    less_hi: float | None = None
    p: float | None = None
    best_heuristic: bool = False
    solved: float | None = None
    errors: int = 0
    notes: tuple[str, ...] = ()

    @property
    def unsolved(self) -> bool:
        """Whether the full cache itself fails the task, which then says little about policies."""
        return self.solved is not None and self.solved < SOLVED


def bootstrap_interval(values: npt.ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean of one number per document, with its 95% percentile bootstrap interval.

    Args:
        values: ``[documents]``; NaNs are left out.
        resamples: How many bootstrap samples to draw.
        seed: Of the resampling.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    data = data[np.isfinite(data)]
    if data.size == 0:
        return Interval(math.nan, None, None, 0)
    if data.size == 1:
        return Interval(float(data[0]), None, None, 1)
    lo, hi = limits(resample_means(data[:, None], resamples=resamples, seed=seed)[:, 0])
    return Interval(float(data.mean()), lo, hi, data.size)


def resample_means(values: Array, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Means of bootstrap samples of documents, drawn jointly for all columns.

    Args:
        values: ``[documents, columns]``: a column is a policy.
        resamples: How many bootstrap samples to draw.
        seed: Of the resampling; the same documents are drawn whatever the columns.

    Returns:
        ``[resamples, columns]``
    """
    return np.asarray(_resample_weights(len(values), resamples, seed) @ values)


@functools.lru_cache(maxsize=2)  # a report asks for the same number of documents again and again
def _resample_weights(documents: int, resamples: int, seed: int) -> Array:
    """How often each bootstrap sample draws each document, divided by their number: ``[resamples, documents]``."""
    drawn = np.random.default_rng(seed).integers(0, documents, size=(resamples, documents))
    drawn += np.arange(resamples)[:, None] * documents
    return np.bincount(drawn.ravel(), minlength=resamples * documents).reshape(resamples, documents) / documents


def sign_flip_p(differences: npt.ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> float | None:
    """Two-sided p-value that paired differences are symmetric about 0, by flipping their signs.

    Exact where all sign patterns are no more than ``resamples`` (13 documents by default); otherwise sampled, and then
    never below 1 / (resamples + 1). None with fewer than two documents.

    Args:
        differences: ``[documents]``; NaNs are left out.
        resamples: The most sign patterns to look at.
        seed: Of the sampling.
    """
    data = np.asarray(differences, dtype=np.float64).ravel()
    data = data[np.isfinite(data)]
    if data.size < 2:
        return None
    signs, exact = _sign_patterns(data.size, resamples, seed)
    flipped = np.abs(signs @ data)
    hits = int(np.count_nonzero(flipped >= abs(data.sum()) - 1e-12 * np.abs(data).sum()))  # equal up to rounding counts
    return hits / len(signs) if exact else (hits + 1) / (len(signs) + 1)


@functools.lru_cache(maxsize=2)
def _sign_patterns(documents: int, resamples: int, seed: int) -> tuple[Array, bool]:
    """Signs, ``[patterns, documents]``, and whether these are all there are."""
    exact = bool(2**documents <= resamples)
    if exact:
        bits = (np.arange(2**documents)[:, None] >> np.arange(documents)) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(resamples, documents))
    return np.where(bits == 1, -1.0, 1.0), exact


def paired_difference(
    first: npt.ArrayLike, second: npt.ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Mean of ``first - second`` over documents, with its interval and p-value; negative losses less.

    Args:
        first: ``[documents]`` losses of one policy.
        second: ``[documents]`` losses of another on the same documents, in the same order.
        resamples: Bootstrap samples, and the most sign patterns.
        seed: Of the resampling.

    Raises:
        KvlearnError: the two do not have the same number of documents.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise KvlearnError(f"a paired difference needs the same documents twice, not {a.size} and {b.size} of them.")
    interval = bootstrap_interval(a - b, resamples=resamples, seed=seed)
    p = sign_flip_p(a - b, resamples=resamples, seed=seed)
    return Difference(interval.mean, interval.lo, interval.hi, interval.n, p)


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values that hold for all the comparisons together, in the order given."""
    count = len(pvalues)
    corrected = [0.0] * count
    least = 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda index: pvalues[index])):
        least = max(least, min(1.0, (count - rank) * pvalues[index]))
        corrected[index] = least
    return corrected


def compare_with(rows: Iterable[Row], reference: str | None = None) -> list[Comparison]:
    """Every policy against a reference, paired by document, Holm-corrected over the policies of a cell.

    The full cache and the oracle are bounds, not contenders: they are left out, so that they cost the others nothing.

    Args:
        rows: See ``kvlearn.rows``.
        reference: A policy; by default each cell's best heuristic. Cells without it are skipped.

    Raises:
        KvlearnError: no cell has the reference.
    """
    found = cells(rows)
    names = {policy for data in found for policy in data.compared}
    if reference is not None and reference not in names:
        raise KvlearnError(f"no rows of the reference {reference!r}; there are {', '.join(sorted(names)) or 'none'}.")
    named = [(data, reference or _least(data, HEURISTICS)) for data in found]
    return [each for data, name in named if name in data.compared for each in _compare_cell(data, name)]


def summary(rows: Iterable[Row]) -> list[SummaryRow]:
    """The table of a comparison: every policy of every cell, best first within its cell, bounds included."""
    return [line for data in cells(rows) for line in _summarise(data)]


def _compare_cell(data: CellData, reference: str) -> list[Comparison]:
    contenders = [p for p in data.compared if p != reference and data.kinds[p] not in ("full", "oracle")]
    base = data.column(reference)
    found = [paired_difference(data.column(policy), base) for policy in contenders]
    known = [difference.p for difference in found if difference.p is not None]
    corrected = iter(holm(known))
    return [
        Comparison(d.mean, d.lo, d.hi, d.n, d.p, data.cell, policy, reference, None if d.p is None else next(corrected))
        for policy, d in zip(contenders, found, strict=True)
    ]


def _summarise(data: CellData) -> list[SummaryRow]:
    lines = [
        SummaryRow(data.cell, policy, data.kinds[policy], 0, errors=len(data.failed[policy]))
        for policy in data.good
        if policy not in data.compared or not data.docs
    ]
    if data.docs:
        best, oracle = _least(data, HEURISTICS), _least(data, ("oracle",))
        losses = np.stack([data.column(policy) for policy in data.compared], axis=1)
        # Row 0 is the sample itself, the others are resamples of it: every share below is computed for all alike.
        means = dict(zip(data.compared, np.vstack([losses.mean(axis=0), resample_means(losses)]).T, strict=True))
        p = {comparison.policy: comparison.p_holm for comparison in _compare_cell(data, best)} if best else {}
        for policy in data.compared:
            line = replace(_plain_figures(data, policy), p=p.get(policy), best_heuristic=policy == best)
            lines.append(_with_intervals(line, means, best, oracle))
    lines.sort(key=lambda line: (line.loss is None, line.loss, line.policy))
    shared = _cell_notes(data, lines)
    return [replace(line, notes=shared + _policy_notes(data, line)) for line in lines]


def _with_intervals(line: SummaryRow, means: dict[str, Array], best: str | None, oracle: str | None) -> SummaryRow:
    """Add the loss, the gap closed and the loss saved, with intervals; documents are drawn jointly for all policies.

    The best heuristic is the one of the whole sample in every resample: choosing it anew would set each resample
    against its luckiest heuristic.
    """
    own = means[line.policy]
    lo, hi = limits(own[1:]) if line.n > 1 else (None, None)
    line = replace(line, loss=float(own[0]), lo=lo, hi=hi)
    if best is not None and line.kind != "full":
        saved = means[best] - own
        share, lo, hi = _share(saved, means[best], line.n)
        line = replace(line, less_loss=share, less_lo=lo, less_hi=hi)
        if oracle is not None:
            share, lo, hi = _share(saved, means[best] - means[oracle], line.n)
            line = replace(line, gap_closed=share, gap_lo=lo, gap_hi=hi)
    return line


def _share(part: Array, whole: Array, documents: int) -> tuple[float | None, float | None, float | None]:
    """Part / whole and its interval, from ``[1 + resamples]``; None where the whole is, or may well be, nothing."""
    if whole[0] <= ZERO:
        return None, None, None
    positive = whole[1:] > ZERO
    if documents < 2 or positive.mean() <= (1 + LEVEL) / 2:
        return float(part[0] / whole[0]), None, None
    return float(part[0] / whole[0]), *limits(part[1:][positive] / whole[1:][positive])


def _plain_figures(data: CellData, policy: str) -> SummaryRow:
    """Everything that is a plain mean, maximum or quotient."""
    own, tokens, full = data.column(policy, "bytes"), data.column(policy, "tokens"), _full_bytes(data, policy)
    both = np.isfinite(own) & np.isfinite(full) & (own > 0)
    time = tokens / data.column(policy, lambda row: number(row.get("tokens_per_s")) or math.nan)
    timed, slots = np.isfinite(time), data.column(policy, "slots")
    return SummaryRow(
        data.cell,
        policy,
        data.kinds[policy],
        len(data.docs),
        value=_mean(data.column(policy, "value")),
        full_value=_mean(data.column(policy, "full_value")),
        slots=float(np.nanmax(slots)) if np.isfinite(slots).any() else None,
        mean_slots=_mean(data.column(policy, "mean_slots")),
        bytes=_mean(own),
        state_bytes=_mean(data.column(policy, "state_bytes")),
        compression=float(full[both].sum() / own[both].sum()) if both.any() else None,
        tokens_per_s=float(tokens[timed].sum() / time[timed].sum()) if time[timed].sum() > 0 else None,
        scorer_share=_mean(data.column(policy, "scorer_share")),
        solved=_solved(data, policy),
        errors=len(data.failed[policy]),
    )


def _solved(data: CellData, policy: str) -> float | None:
    """From the rows; else, of a metric that counts right answers, the full cache's own."""
    told, counts = _mean(data.column(policy, "solved")), metric_info(data.cell.metric).higher_is_better
    return _mean(data.column(policy, "full_value")) if told is None and counts else told


def _full_bytes(data: CellData, policy: str) -> Array:
    """Bytes of the full cache on each document: from its own rows, else as the policy's rows tell them."""
    own = [name for name in data.compared if data.kinds[name] == "full"]
    return data.column(own[0], "bytes") if own else data.column(policy, "full_bytes")


def _least(data: CellData, kinds: Sequence[str]) -> str | None:
    """The policy of these kinds with the least mean loss; the first by name of equals."""
    names = [policy for policy in data.compared if data.kinds[policy] in kinds]
    return min(names, key=lambda name: (data.column(name).mean(), name)) if names and data.docs else None


def _cell_notes(data: CellData, lines: Sequence[SummaryRow]) -> tuple[str, ...]:
    notes = []
    count, everything = len(data.docs), len(data.all_docs)
    if count < everything:
        notes.append(f"{count} of {everything} documents are compared: the others are not finished by every policy.")
    if count == 1:
        notes.append("One document leaves no intervals.")
    elif 0 < count < FEW_DOCUMENTS:
        notes.append(f"Intervals from {count} documents are rough.")
    kinds = {data.kinds[policy] for policy in data.compared}
    if count and "oracle" not in kinds:
        notes.append("No oracle: how much of the gap is closed cannot be said.")
    if count and all(line.compression is None for line in lines):
        notes.append("No bytes of the full cache: compression cannot be said.")
    best = next((line for line in lines if line.best_heuristic), None)
    if best is not None and best.less_loss is None:
        notes.append(f"The best heuristic, {best.policy}, loses nothing: there is no loss to save.")
    elif best is not None and "oracle" in kinds and best.gap_closed is None:
        notes.append(f"The best heuristic, {best.policy}, loses no more than the oracle: there is no gap to close.")
    if lines[0].unsolved:
        notes.append(f"The full cache itself solves only {lines[0].solved:.2f}: this task says little about policies.")
    return tuple(notes)


def _policy_notes(data: CellData, line: SummaryRow) -> tuple[str, ...]:
    notes = []
    if line.loss is None:
        finished = f"{len(data.good[line.policy])} of {len(data.all_docs)}"
        notes.append(f"{line.policy} finished {finished} documents: too few to compare.")
    if line.errors:
        notes.append(f"{line.policy}: {line.errors} failed {'row' if line.errors == 1 else 'rows'}.")
    return tuple(notes)


def limits(samples: Array) -> tuple[float, float]:
    """The 95% percentile interval of ``[resamples]`` bootstrap figures."""
    lo, hi = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)


def _mean(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None

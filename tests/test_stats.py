import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_rows import fake_row, fake_rows
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvlearn import stats
from kvlearn.errors import KvlearnError
from kvlearn.rows import Row
from kvlearn.stats import SummaryRow, bootstrap_interval, compare_with, holm, paired_difference, sign_flip_p, summary

finite = st.floats(-100, 100, allow_nan=False)


def losses(**by_policy: tuple[str, list[float]]) -> list[Row]:
    """Rows in which each policy, of a given kind, has these losses on documents 0, 1, ..."""
    return [
        fake_row(policy=policy, kind=kind, doc=f"doc-{number:02d}", value=2.0 + loss, full_value=2.0)
        for policy, (kind, values) in by_policy.items()
        for number, loss in enumerate(values)
    ]


def line_of(lines: list[SummaryRow], policy: str) -> SummaryRow:
    return next(line for line in lines if line.policy == policy)


def limits(interval: stats.Interval) -> tuple[float, float]:
    assert interval.lo is not None
    assert interval.hi is not None
    return interval.lo, interval.hi


# ---- intervals


def test_the_bootstrap_interval_agrees_with_scipy() -> None:
    values = np.random.default_rng(1).lognormal(-1, 0.5, size=20)
    ours = bootstrap_interval(values)
    theirs = scipy_stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=7)
    low, high = theirs.confidence_interval
    assert ours.mean == pytest.approx(values.mean())
    error = 4 * theirs.standard_error / math.sqrt(10_000 * 0.025)  # Monte Carlo error of a 2.5% quantile, generously
    assert ours.lo == pytest.approx(low, abs=error)
    assert ours.hi == pytest.approx(high, abs=error)


def test_resampled_means_are_means_of_drawn_documents() -> None:
    values = np.random.default_rng(2).normal(size=(5, 3))
    sampled = stats.resample_means(values, resamples=50, seed=3)
    drawn = np.random.default_rng(3).integers(0, 5, size=(50, 5))
    slow = [[sum(values[doc, column] for doc in docs) / 5 for column in range(3)] for docs in drawn]
    np.testing.assert_allclose(sampled, slow, atol=1e-12)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(400):
        interval = bootstrap_interval(rng.normal(1.0, 1.0, size=30), resamples=1000)
        lo, hi = limits(interval)
        covered += lo <= 1.0 <= hi
    assert 0.90 <= covered / 400 <= 0.98, "percentile intervals of 30 documents cover about 94%"


@given(values=st.lists(finite, min_size=2, max_size=15))
def test_an_interval_lies_within_the_data_and_moves_and_scales_with_it(values: list[float]) -> None:
    interval = bootstrap_interval(values, resamples=200)
    lo, hi = limits(interval)
    assert min(values) - 1e-9 <= lo <= hi <= max(values) + 1e-9
    moved = bootstrap_interval(np.array(values) * 2 + 1, resamples=200)
    assert limits(moved) == pytest.approx((2 * lo + 1, 2 * hi + 1), abs=1e-6)


def test_intervals_are_the_same_every_time() -> None:
    values = [0.1, 0.5, 0.2, 0.9, 0.35, 0.77, 0.03]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values)


def test_one_document_or_none_leaves_no_interval() -> None:
    assert bootstrap_interval([0.5]) == stats.Interval(0.5, None, None, 1)
    assert bootstrap_interval([0.5, math.nan]) == stats.Interval(0.5, None, None, 1)
    nothing = bootstrap_interval([])
    assert math.isnan(nothing.mean)
    assert (nothing.lo, nothing.hi, nothing.n) == (None, None, 0)


# ---- paired differences


@pytest.mark.parametrize("documents", [2, 5, 12])
def test_the_exact_p_value_agrees_with_scipy_and_with_a_slow_version(documents: int) -> None:
    rng = np.random.default_rng(documents)
    differences = rng.normal(0.3, 1.0, size=documents)
    p = sign_flip_p(differences)
    reference = scipy_stats.permutation_test(
        (differences, np.zeros(documents)), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=np.inf
    )
    patterns = list(itertools.product((1, -1), repeat=documents))
    hits = sum(abs(float(np.dot(pattern, differences))) >= abs(differences.sum()) - 1e-12 for pattern in patterns)
    assert p == pytest.approx(reference.pvalue)
    assert p == pytest.approx(hits / len(patterns))


def test_the_sampled_p_value_agrees_with_scipy() -> None:
    differences = np.random.default_rng(5).normal(0.25, 1.0, size=60)
    reference = scipy_stats.permutation_test(
        (differences, np.zeros(60)), lambda a, b: np.mean(a - b), permutation_type="samples", n_resamples=20_000, rng=6
    )
    assert sign_flip_p(differences) == pytest.approx(reference.pvalue, abs=0.015)
    assert sign_flip_p(np.full(60, 1.0)) == pytest.approx(1 / 10_001), "never 0"


def test_p_values_are_uniform_where_nothing_differs() -> None:
    rng = np.random.default_rng(7)
    p = [sign_flip_p(rng.normal(size=8)) for _ in range(400)]
    assert np.mean([value is not None and value <= 0.05 for value in p]) <= 0.08


def test_equal_policies_do_not_differ() -> None:
    same = paired_difference([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert (same.mean, same.lo, same.hi, same.p) == (0.0, 0.0, 0.0, 1.0)
    assert paired_difference([0.4], [0.1]).p is None


def test_pairing_removes_what_is_common_to_a_document() -> None:
    rng = np.random.default_rng(8)
    hard = rng.normal(0, 5, size=12)
    difference = paired_difference(hard + 0.1 + rng.normal(0, 0.02, 12), hard)
    assert limits(difference)[0] > 0.05
    assert (difference.p or 1.0) < 0.01


def test_a_paired_difference_needs_the_same_documents() -> None:
    with pytest.raises(KvlearnError, match="not 2 and 3"):
        paired_difference([1, 2], [1, 2, 3])


def slow_holm(pvalues: list[float]) -> list[float]:
    """The adjusted p-value is the largest, over the smaller p-values, of p times the number not smaller than it."""
    order = sorted(range(len(pvalues)), key=lambda index: pvalues[index])
    return [
        max(min(1.0, (len(pvalues) - rank) * pvalues[order[rank]]) for rank in range(order.index(index) + 1))
        for index in range(len(pvalues))
    ]


@given(pvalues=st.lists(st.floats(0, 1), max_size=8))
def test_holm_agrees_with_a_slow_version(pvalues: list[float]) -> None:
    corrected = holm(pvalues)
    assert corrected == pytest.approx(slow_holm(pvalues))
    assert all(first <= second <= 1 for first, second in zip(pvalues, corrected, strict=True))


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


# ---- the table


def test_gap_closed_and_loss_saved_agree_with_a_slow_version() -> None:
    rows = [row for row in fake_rows(budgets=(256,)) if row["task"] == "lm"]
    lines = summary(rows)
    by_policy: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: (row["domain"], row["doc"])):
        by_policy.setdefault(row["policy"], []).append(row["value"] - row["full_value"])
    heuristics = [policy for policy in by_policy if policy not in ("full", "oracle", "checkpoints/smollm2-135m")]
    best = min(heuristics, key=lambda policy: float(np.mean(by_policy[policy])))
    scorer, best_losses, oracle = (np.array(by_policy[name]) for name in ("checkpoints/smollm2-135m", best, "oracle"))
    gap, less = [], []
    for drawn in np.random.default_rng(0).integers(0, 12, size=(10_000, 12)):
        s, b, o = scorer[drawn].mean(), best_losses[drawn].mean(), oracle[drawn].mean()
        gap.append((b - s) / (b - o))
        less.append(1 - s / b)
    line = line_of(lines, "checkpoints/smollm2-135m")
    assert line.gap_closed == pytest.approx((best_losses.mean() - scorer.mean()) / (best_losses.mean() - oracle.mean()))
    assert line.less_loss == pytest.approx(1 - scorer.mean() / best_losses.mean())
    assert (line.gap_lo, line.gap_hi) == pytest.approx(tuple(np.quantile(gap, [0.025, 0.975])))
    assert (line.less_lo, line.less_hi) == pytest.approx(tuple(np.quantile(less, [0.025, 0.975])))
    assert line_of(lines, best).best_heuristic
    assert sum(line.best_heuristic for line in lines) == 1
    assert line_of(lines, best).gap_closed == 0
    assert line_of(lines, "oracle").gap_closed == 1
    assert line_of(lines, "full").gap_closed is None


def test_a_table_line_holds_the_figures_of_its_rows() -> None:
    rows = losses(full=("full", [0, 0, 0, 0]), h2o=("heuristic", [0.1, 0.3, 0.2, 0.2]))
    for row in rows:
        row.update(bytes=8000, state_bytes=0, slots=2048, budget=None) if row["kind"] == "full" else row.update(
            bytes=1000, state_bytes=50, slots=200, mean_slots=180, scorer_share=0.25
        )
    rows[-1].update(slots=256, tokens=1000, tokens_per_s=100.0)
    line = line_of(summary(rows), "h2o")
    assert (line.n, line.errors, line.slots, line.bytes, line.state_bytes) == (4, 0, 256, 1000, 50)
    assert line.loss == pytest.approx(0.2)
    assert line.mean_slots == 180
    assert line.value == pytest.approx(2.2)
    assert line.full_value == pytest.approx(2.0)
    assert line.compression == 8.0
    assert line.scorer_share == 0.25
    assert line.tokens_per_s == pytest.approx((3 * 1536 + 1000) / (3 * 1536 / 180 + 1000 / 100)), "tokens over time"
    interval = bootstrap_interval([0.1, 0.3, 0.2, 0.2])
    assert (line.lo, line.hi) == pytest.approx((interval.lo, interval.hi))


def test_accuracy_loses_when_it_falls() -> None:
    rows = [row | {"metric": "accuracy", "value": 0.25, "full_value": 1.0} for row in losses(h2o=("heuristic", [0, 0]))]
    assert summary(rows)[0].loss == 0.75


def test_floors_count_as_heuristics_where_they_are_the_best() -> None:
    lines = summary(losses(h2o=("heuristic", [0.3, 0.4]), random=("floor", [0.1, 0.2]), mine=("learned", [0.1, 0.1])))
    assert [line.policy for line in lines if line.best_heuristic] == ["random"]
    assert line_of(lines, "mine").less_loss == pytest.approx(1 - 0.1 / 0.15)


def test_of_several_oracles_the_best_is_the_ceiling() -> None:
    lines = summary(losses(h2o=("heuristic", [0.4, 0.4]), a=("oracle", [0.2, 0.2]), b=("oracle", [0.1, 0.1])))
    assert line_of(lines, "a").gap_closed == pytest.approx(0.2 / 0.3)


def test_policies_are_compared_with_the_best_heuristic_and_corrected_together() -> None:
    rows = [row for row in fake_rows(budgets=(256,)) if row["task"] == "lm"]
    lines, pairs = summary(rows), compare_with(rows)
    reference = pairs[0].reference
    assert line_of(lines, reference).best_heuristic
    assert {pair.policy for pair in pairs} == {line.policy for line in lines} - {reference, "full", "oracle"}
    assert [pair.p_holm for pair in pairs] == pytest.approx(holm([pair.p for pair in pairs if pair.p is not None]))
    assert all(line_of(lines, pair.policy).p == pair.p_holm for pair in pairs)
    assert line_of(lines, "full").p is line_of(lines, "oracle").p is line_of(lines, reference).p is None
    against_random = compare_with(rows, "random")
    assert {pair.reference for pair in against_random} == {"random"}
    assert all(pair.mean < 0 for pair in against_random)
    with pytest.raises(KvlearnError, match="no rows of the reference 'randum'; there are"):
        compare_with(rows, "randum")


# ---- what can be missing


def test_one_document() -> None:
    lines = summary(losses(h2o=("heuristic", [0.4]), mine=("learned", [0.3]), oracle=("oracle", [0.0])))
    line = line_of(lines, "mine")
    assert (line.lo, line.gap_lo, line.less_lo, line.p) == (None, None, None, None)
    assert line.gap_closed == pytest.approx(0.25)
    assert any("One document" in note for note in line.notes)


def test_no_oracle_no_full_cache() -> None:
    line = line_of(summary(losses(h2o=("heuristic", [0.4] * 6), mine=("learned", [0.3] * 6))), "mine")
    assert line.gap_closed is line.compression is None
    assert line.less_loss == pytest.approx(0.25)
    assert [note.split(":")[0] for note in line.notes] == ["No oracle", "No bytes of the full cache"]
    told = summary([row | {"full_bytes": row["bytes"] * 4} for row in losses(h2o=("heuristic", [0.4] * 6))])
    assert told[0].compression == 4


def test_no_heuristic() -> None:
    line = line_of(summary(losses(mine=("learned", [0.3, 0.2]), oracle=("oracle", [0.0, 0.0]))), "mine")
    assert line.gap_closed is line.less_loss is line.p is None
    assert line.loss == pytest.approx(0.25)


def test_no_gap_and_no_loss() -> None:
    lines = summary(losses(h2o=("heuristic", [0.1, 0.1]), mine=("learned", [0.2, 0.2]), oracle=("oracle", [0.1, 0.1])))
    assert line_of(lines, "mine").gap_closed is None
    assert line_of(lines, "mine").less_loss == pytest.approx(-1)
    assert any("no gap to close" in note for note in lines[0].notes)
    lines = summary(losses(h2o=("heuristic", [0.0, 0.0]), mine=("learned", [0.2, 0.2])))
    assert line_of(lines, "mine").less_loss is None
    assert any("no loss to save" in note for note in lines[0].notes)


def test_a_gap_that_may_be_nothing_has_no_interval() -> None:
    rows = losses(
        h2o=("heuristic", [0.3, -0.2, 0.3, -0.2, 0.1, -0.2, 0.2, -0.1]),
        mine=("learned", [0.0] * 8),
        oracle=("oracle", [0.0, 0.0, 0.1, 0.0, -0.1, 0.0, 0.1, -0.1]),
    )
    line = line_of(summary(rows), "mine")
    assert None not in (line.gap_closed, line.less_loss)
    assert line.gap_lo is line.less_lo is None


def test_unequal_documents_are_cut_to_those_in_common_and_it_is_said() -> None:
    rows = losses(h2o=("heuristic", [0.1, 0.2, 0.3, 9.0]), ema=("heuristic", [0.1, 0.1, 0.1]))
    lines = summary(rows)
    assert {line.n for line in lines} == {3}
    assert line_of(lines, "h2o").loss == pytest.approx(0.2)
    assert lines[0].notes[0].startswith("3 of 4 documents are compared")


def test_failed_rows_are_counted_and_do_not_enter_the_means() -> None:
    rows = losses(h2o=("heuristic", [0.1, 0.2, 0.3]), ema=("heuristic", [0.1, 0.2, 0.3]))
    rows[0]["error"] = "out of memory"
    rows[1]["value"] = math.nan
    line = line_of(summary(rows), "h2o")
    assert (line.loss, line.errors) == (None, 2), "one of three documents is too few to compare"
    assert line.notes[-2:] == ("h2o finished 1 of 3 documents: too few to compare.", "h2o: 2 failed rows.")
    assert line_of(summary(rows), "ema").n == 3


def test_only_failures_and_no_rows_at_all() -> None:
    (line,) = summary([fake_row(error="out of memory")])
    assert (line.n, line.loss, line.errors) == (0, None, 1)
    assert summary([]) == []
    assert compare_with([]) == []


def test_a_task_that_the_full_cache_does_not_solve_is_reported_as_such() -> None:
    rows = [row | {"metric": "accuracy", "value": 0.1, "full_value": 0.3} for row in losses(h2o=("heuristic", [0] * 8))]
    (line,) = summary(rows)
    assert any("full cache itself solves only 0.30" in note for note in line.notes)
    assert line.unsolved
    answered = [row | {"metric": "answer_nll", "value": 3.0, "full_value": 2.0, "solved": 0.25} for row in rows]
    assert summary(answered)[0].unsolved, "another metric of the same task is told by its rows"
    assert not summary([row | {"solved": 0.5} for row in answered])[0].unsolved


@pytest.mark.parametrize("field", ["slots", "bytes", "state_bytes", "tokens", "tokens_per_s"])
def test_an_unknown_figure_is_none_and_harms_nothing_else(field: str) -> None:
    rows = [row | {field: None} for row in losses(h2o=("heuristic", [0.1] * 6), full=("full", [0.0] * 6))]
    line = line_of(summary(rows), "h2o")
    assert getattr(line, "tokens_per_s" if field == "tokens" else field) is None
    assert line.loss == pytest.approx(0.1)


@pytest.mark.parametrize("shuffle", [lambda rows: rows[::-1], lambda rows: rows[1::2] + rows[::2]])
def test_the_order_of_the_rows_does_not_matter(shuffle: Callable[[list[Row]], list[Row]]) -> None:
    rows = fake_rows(docs=5, budgets=(128, 256))
    assert summary(shuffle(rows)) == summary(rows)


def test_statistics_need_no_model_code() -> None:
    heavy = {"torch", "transformers", "pandas", "matplotlib"}
    program = f"import sys, kvlearn.stats, kvlearn.rows; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]"

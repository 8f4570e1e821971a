"""Every measure against an independent one in numpy or scipy, on rows with ties, masks and odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlearn import metrics
from kvlearn.errors import KvlearnError
from kvlearn.features import FLOOR
from kvlearn.metrics.running import CalibrationError, KeptMass, RankCorrelation, RecallAtBudget


@st.composite
def rows(draw: st.DrawFn, ties: bool = True) -> dict[str, Any]:
    """Scores, masses and masks ``[2, 3, S]``; few distinct values, so that ties abound."""
    slots = draw(st.integers(1, 23))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (2, 3, slots)
    score = rng.integers(0, 5, shape) if ties else rng.permuted(np.tile(np.arange(slots), (2, 3, 1)), axis=-1)
    score = score.astype(np.float32)
    if ties:
        score[rng.random(shape) < 0.1] = draw(st.sampled_from([np.inf, -np.inf]))
    return {
        "score": torch.from_numpy(score),
        "mass": torch.from_numpy((rng.integers(0, 4, shape) / 8).astype(np.float32)),
        "held": torch.from_numpy(rng.random(shape) < 0.8),
        "protected": torch.from_numpy(rng.random(shape) < 0.2),
        "budget": draw(st.integers(1, 25)),
    }


def each_row(case: dict[str, Any]) -> list[tuple[np.ndarray, ...]]:
    parts = [case[name].reshape(6, -1).numpy() for name in ("score", "mass", "held", "protected")]
    return list(zip(*parts, strict=True))


def kept_by_hand(score: np.ndarray, held: np.ndarray, protected: np.ndarray, budget: int) -> list[int]:
    order = sorted(np.flatnonzero(held), key=lambda i: (protected[i], score[i], i), reverse=True)
    return order[:budget]


@given(rows())
def test_what_is_kept(case: dict[str, Any]) -> None:
    found = metrics.keep_mask(case["score"], case["budget"], held=case["held"], protected=case["protected"])
    for kept, (score, _, held, protected) in zip(found.reshape(6, -1), each_row(case), strict=True):
        assert set(kept.nonzero().flatten().tolist()) == set(kept_by_hand(score, held, protected, case["budget"]))


@given(rows())
def test_kept_mass(case: dict[str, Any]) -> None:
    masks = {"held": case["held"], "protected": case["protected"]}
    found = metrics.kept_mass(case["score"], case["mass"], case["budget"], **masks).flatten()
    for value, (score, mass, held, protected) in zip(found.tolist(), each_row(case), strict=True):
        kept = kept_by_hand(score, held, protected, case["budget"])
        total = mass[held].sum()
        assert value == pytest.approx(mass[kept].sum() / total if total else np.nan, nan_ok=True)


@given(rows())
def test_recall(case: dict[str, Any]) -> None:
    masks = {"held": case["held"], "protected": case["protected"]}
    found = metrics.recall_at_budget(case["score"], case["mass"], case["budget"], **masks).flatten()
    for value, (score, mass, held, protected) in zip(found.tolist(), each_row(case), strict=True):
        kept = set(kept_by_hand(score, held, protected, case["budget"]))
        free = [i for i in np.flatnonzero(held) if not protected[i]]
        places = max(0, case["budget"] - int((held & protected).sum()))
        # Among equal masses the best are those that the score kept.
        best = sorted((i for i in free if mass[i] > 0), key=lambda i: (mass[i], i in kept), reverse=True)[:places]
        expected = np.mean([i in kept for i in best]) if best else np.nan
        assert value == pytest.approx(expected, nan_ok=True)


@given(rows(ties=False))
def test_recall_without_ties_or_masks_is_the_overlap_of_two_tops(case: dict[str, Any]) -> None:
    score, budget = case["score"], min(case["budget"], case["score"].shape[-1])
    mass = torch.rand(score.shape) + 0.1
    found = metrics.recall_at_budget(score, mass, budget).flatten().tolist()
    for value, a, b in zip(found, score.reshape(6, -1), mass.reshape(6, -1), strict=True):
        both = set(a.topk(budget).indices.tolist()) & set(b.topk(budget).indices.tolist())
        assert value == pytest.approx(len(both) / budget)


@given(rows())
@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_rank_correlation(case: dict[str, Any]) -> None:
    found = metrics.rank_correlation(case["score"], case["mass"], held=case["held"]).flatten()
    for value, (score, mass, held, _) in zip(found.tolist(), each_row(case), strict=True):
        few = held.sum() < 2 or len(set(score[held])) < 2 or len(set(mass[held])) < 2
        expected = np.nan if few else scipy.stats.spearmanr(score[held], mass[held]).statistic
        assert value == pytest.approx(expected, abs=1e-6, nan_ok=True)


@given(rows(ties=False), st.integers(1, 7))
def test_calibration_error(case: dict[str, Any], bins: int) -> None:
    found = metrics.calibration_error(case["score"], case["mass"], bins=bins, held=case["held"]).flatten()
    for value, (score, mass, held, _) in zip(found.tolist(), each_row(case), strict=True):
        order = np.flatnonzero(held)[np.argsort(score[held])]
        label = np.arange(len(order)) * bins // max(1, len(order))
        off = score[order] - np.log(mass[order] + FLOOR)
        parts = [off[label == b] for b in range(bins) if (label == b).any()]
        expected = sum(len(part) * abs(part.mean()) for part in parts) / len(order) if parts else np.nan
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def test_a_perfect_forecast() -> None:
    mass = torch.rand(4, 5, 50)
    score = torch.log(mass + FLOOR)
    assert metrics.recall_at_budget(score, mass, 7).eq(1).all()
    assert metrics.rank_correlation(score, mass) == pytest.approx(torch.ones(4, 5).numpy())
    assert metrics.calibration_error(score, mass).abs().max() < 1e-5
    assert metrics.calibration_error(score + 0.5, mass).sub(0.5).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("make", "measure"),
    [
        (lambda: KeptMass(5), lambda s, m, h: metrics.kept_mass(s, m, 5, held=h)),
        (lambda: RecallAtBudget(5), lambda s, m, h: metrics.recall_at_budget(s, m, 5, held=h)),
        (RankCorrelation, lambda s, m, h: metrics.rank_correlation(s, m, held=h)),
        (lambda: CalibrationError(3), lambda s, m, h: metrics.calibration_error(s, m, bins=3, held=h)),
    ],
)
def test_classes_are_means_over_rows_of_different_lengths(make: Callable[[], Any], measure: Callable[..., Any]) -> None:
    metric, values = make(), []
    for slots in (9, 20, 13):
        score, mass, held = torch.randn(2, 3, slots), torch.rand(2, 3, slots), torch.rand(2, 3, slots) < 0.8
        held[0, 0] = False  # a row that says nothing
        metric.update(score, mass, held)
        values.append(measure(score, mass, held).flatten())
    assert metric.compute().item() == pytest.approx(torch.cat(values).nanmean().item(), rel=1e-5)
    metric.reset()
    assert metric.rows == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0}, "budget is 0"),
        ({"mass": torch.ones(3)}, "masses"),
        ({"held": torch.ones(4)}, "held is torch.float32"),
        ({"protected": torch.ones(3, dtype=torch.bool)}, "protected is torch.bool of shape \\(3,\\)"),
        ({"score": torch.tensor([0.0, torch.nan, 1.0, 2.0])}, "NaN"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        metrics.recall_at_budget(**{"score": torch.ones(4), "mass": torch.ones(4), "budget": 2, **arguments})


def test_a_nan_in_an_empty_slot_is_nobodys_business() -> None:
    score = torch.tensor([1.0, torch.nan, 2.0])
    held = torch.tensor([True, False, True])
    assert metrics.keep_mask(score, 1, held=held).tolist() == [False, False, True]
    assert metrics.rank_correlation(score, torch.tensor([0.1, 0.5, 0.2]), held=held) == 1

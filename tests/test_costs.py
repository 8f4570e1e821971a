"""Cost curves and the shares that cost least: convex, exact, and never below the floor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from kvlearn.costs import Curve, cheapest, fit_curve
from kvlearn.errors import KvlearnError

SLOTS = (64, 160, 400, 1000)
costs = st.lists(st.floats(-0.2, 2.0), min_size=len(SLOTS), max_size=len(SLOTS))


def test_costs_that_fall_convexly_are_met_exactly() -> None:
    measured = [1.0, 0.5, 0.2, 0.04]
    np.testing.assert_allclose(fit_curve(SLOTS, measured, 2048)(SLOTS), measured, atol=1e-12)


@given(measured=costs)
@settings(max_examples=50, deadline=None)
def test_a_curve_is_the_nearest_convex_one(measured: list[float]) -> None:
    curve = fit_curve(SLOTS, measured, 2048)
    values = curve(np.arange(64, 2049))
    assert (np.diff(values) <= 1e-12).all(), "more slots cost more"
    assert (np.diff(values, 2) >= -1e-12).all(), "the curve is not convex, so greedy shares would not be best"
    assert values[-1] == 0, "a layer that holds everything costs something"
    basis = np.maximum(0, np.log([*SLOTS[1:], 2048]) - np.log(SLOTS)[:, None])
    _, rest = nnls(basis, np.array(measured))  # an independent solver of the same least squares
    assert float(((curve(SLOTS) - measured) ** 2).sum()) == pytest.approx(rest**2, abs=1e-9)


@pytest.mark.parametrize("slots", [(), (64, 64), (400, 64), (64, 2048), tuple(range(1, 15))])
def test_slots_that_make_no_curve_are_refused(slots: tuple[int, ...]) -> None:
    with pytest.raises(KvlearnError, match="ascending numbers below 2048"):
        fit_curve(slots, [1.0] * len(slots), 2048)


@given(
    weights=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=3),
    spare=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_no_other_shares_cost_less(weights: list[tuple[float, float]], spare: int) -> None:
    curves = [Curve((8.0, 16.0), pair) for pair in weights]
    least, total = 4, 4 * len(curves) + spare
    found = [slots for (slots,) in cheapest(curves, [1] * len(curves), total, least=least)]
    assert sum(found) == total

    def cost(slots: tuple[int, ...] | list[int]) -> float:
        return sum(float(curve(s)) for curve, s in zip(curves, slots, strict=True))

    others = itertools.product(range(least, least + spare + 1), repeat=len(curves))
    best = min(cost(slots) for slots in others if sum(slots) == total)
    assert cost(found) == pytest.approx(best, abs=1e-9)


def test_wide_bands_gain_per_slot_and_share_evenly() -> None:
    curve = Curve((64.0,), (1.0,))
    wide, narrow = cheapest([curve, curve], [3, 1], 4 * 16, least=8)
    assert sum(wide) + sum(narrow) == 64
    assert max(wide) - min(wide) <= 1, "layers of a band differ by more than the rest of a division"
    assert narrow[0] > 2 * wide[0], "a slot of a band of three layers gains a third, and should go elsewhere"


def test_slots_that_nobody_gains_from_are_spread() -> None:
    nothing = Curve((64.0,), (0.0,))
    assert cheapest([nothing, nothing], [2, 2], 4 * 20, least=8) == [[20, 20], [20, 20]]


def test_a_total_below_the_floor_is_refused() -> None:
    with pytest.raises(KvlearnError, match="fewer than the 8"):
        cheapest([Curve((64.0,), (1.0,))], [2], 15, least=8)


def test_a_curve_at_its_ends() -> None:
    curve = Curve((8.0, 16.0), (1.0, 0.5))
    assert float(curve(16)) == 0
    assert float(curve(8)) == pytest.approx(0.5 * math.log(2))

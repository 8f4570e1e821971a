"""What it costs to bound layers, and the shares of slots that cost least.

A cost is measured at a few numbers of slots. Between them it is taken to fall in a straight line over the logarithm of
the slots, which is a convex curve over the slots themselves; so the best shares are those with equal slopes, and giving
slot after slot to whoever gains most finds them exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlearn.errors import KvlearnError

Array = npt.NDArray[np.float64]

MOST_KNOTS = 12
"""Numbers of slots that a curve may be fitted to: every subset of them is tried."""


@dataclass(frozen=True)
class Curve:
    """A cost that falls with the slots, ever more slowly, to nothing.

    ``cost(s) = sum over i of weights[i] * max(0, log(ends[i] / s))``.

    Args:
        ends: slots at which the slope changes; the cost is 0 from the last one on.
        weights: by how much the slope over the logarithm falls there; none is negative.
    """

    ends: tuple[float, ...]
    weights: tuple[float, ...]

    def __call__(self, slots: npt.ArrayLike) -> Array:
        """The cost at some numbers of slots, of any shape."""
        return _basis(np.asarray(slots, dtype=np.float64), self.ends) @ np.asarray(self.weights)


def check_slots(slots: Sequence[int], free: int) -> None:
    """Refuse numbers of slots that no curve can be fitted to.

    Raises:
        KvlearnError: they do not ascend, reach ``free``, or are too many.
    """
    if not slots or len(slots) > MOST_KNOTS or any(a >= b for a, b in itertools.pairwise([*slots, free])):
        raise KvlearnError(f"slots are {list(slots)}; give 1 to {MOST_KNOTS} ascending numbers below {free}.")


def fit_curve(slots: Sequence[int], costs: Sequence[float], free: int) -> Curve:
    """The convex, decreasing curve that lies nearest to measured costs, by least squares.

    Where the costs fall so themselves, it goes through all of them.

    Args:
        slots: ascending numbers of slots.
        costs: the cost at each of them.
        free: slots that cost nothing, as they hold the whole text.

    Raises:
        KvlearnError: ``slots`` do not ascend, reach ``free``, or are too many.
    """
    check_slots(slots, free)
    ends = (*map(float, slots[1:]), float(free))
    basis, target = _basis(np.asarray(slots, dtype=np.float64), ends), np.asarray(costs, dtype=np.float64)
    best, least = np.zeros(len(ends)), float((target**2).sum())
    for size in range(1, len(ends) + 1):  # the best of all subsets whose weights are not negative is the optimum
        for chosen in itertools.combinations(range(len(ends)), size):
            found = np.linalg.lstsq(basis[:, chosen], target, rcond=None)[0]
            error = float(((basis[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(len(ends)), error
                best[list(chosen)] = found
    return Curve(ends, tuple(map(float, best)))


def _basis(slots: Array, ends: Sequence[float]) -> Array:
    """``[..., ends]`` how far each number of slots lies below each end, on a logarithmic scale."""
    return np.maximum(0.0, np.log(np.asarray(ends)) - np.log(slots)[..., None])


def cheapest(curves: Sequence[Curve], sizes: Sequence[int], total: int, *, least: int) -> list[list[int]]:
    """Slots of each layer of each band, at the least sum of costs for the total.

    Args:
        curves: the cost of each band when all of its layers hold as many slots.
        sizes: layers of each band.
        total: slots of all layers together.
        least: no layer gets less.

    Returns:
        For each band a number for each of its layers, which differ by at most one.

    Raises:
        KvlearnError: the total is below what all layers need at least.
    """
    spare = total - least * sum(sizes)
    if spare < 0:
        raise KvlearnError(f"{total} slots are fewer than the {least} that each of {sum(sizes)} layers needs at least.")
    most = least + spare  # one layer could take them all
    gains, bands, places = [], [], []
    for band, (curve, size) in enumerate(zip(curves, sizes, strict=True)):
        slots = np.arange(least, most + 1)
        gain = -np.diff(curve(slots)) / size  # of one more slot in each layer, per slot
        gains.append(np.repeat(gain, size))
        bands.append(np.full(len(gain) * size, band))
        places.append(np.repeat(slots[:-1], size))
    # The best first; of equal gains, which are those that cost nothing more, the layer that has least.
    order = np.lexsort((np.concatenate(places), -np.concatenate(gains)))[:spare]
    taken = np.bincount(np.concatenate(bands)[order], minlength=len(sizes))
    return [
        [least + int(count) // size + (i < int(count) % size) for i in range(size)]
        for count, size in zip(taken, sizes, strict=True)
    ]

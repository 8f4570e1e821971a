"""What validation measures."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from kvlearn.metrics.running import KeptMass, RankCorrelation, RecallAtBudget


def measures(kept: Mapping[int, int], prefix: str) -> MetricCollection:
    """Kept mass and recall at each budget, and rank correlation; update with ``score``, ``mass`` and ``held``.

    Args:
        kept: for each budget, how many slots it keeps of those that may be evicted.
        prefix: of the names: ``PREFIXkept_mass_256``.
    """
    return MetricCollection(
        {
            **{f"kept_mass_{budget}": KeptMass(count) for budget, count in kept.items()},
            **{f"recall_{budget}": RecallAtBudget(count) for budget, count in kept.items()},
            "rank_correlation": RankCorrelation(),
        },
        prefix=prefix,
        compute_groups=False,  # each keeps its own sums: there is nothing to share
    )


class Level(Metric):
    """How far the scores of each head must rise so that their exponentials sum to the mass that the head receives.

    A listwise loss leaves a constant per head free; without it, scores of different heads do not compare.

    Args:
        shape: ``(L, H)``.
    """

    full_state_update = False
    mass: Tensor
    forecast: Tensor

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        for name in ("mass", "forecast"):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, score: Tensor, mass: Tensor, log_weight: Tensor) -> None:
        """Add slots: ``[L, H, N, n]`` scores, future mass, and log of how many slots each one stands for."""
        weight = log_weight.double().exp()
        self.mass += (mass.double() * weight).sum((-1, -2))
        self.forecast += (score.double().exp() * weight).sum((-1, -2))

    def compute(self) -> Tensor:
        """``[L, H]`` float64, to be added to the scores; 0 where nothing was received."""
        known = (self.mass > 0) & (self.forecast > 0)
        return torch.where(known, (self.mass / self.forecast).log(), 0.0)

"""The measures of :mod:`kvlearn.metrics.functional` as torchmetrics: means over rows and over updates.

Rows that say nothing (NaN) are left out; without any row the result is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from kvlearn.metrics import functional


class _RowMean(Metric):
    """Mean over all rows seen."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    rows: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, values: Tensor) -> None:
        told = ~values.isnan()
        self.total += values[told].double().sum()
        self.rows += told.sum()

    def compute(self) -> Tensor:
        """Scalar float32."""
        return (self.total / self.rows).float()


class KeptMass(_RowMean):
    """Mean of :func:`kvlearn.metrics.kept_mass`.

    Args:
        budget: the most slots to keep, protected ones included.
        **options: of :class:`torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, budget: int, **options: Any) -> None:
        super().__init__(**options)
        self.budget = budget

    def update(self, score: Tensor, mass: Tensor, held: Tensor | None = None, protected: Tensor | None = None) -> None:
        """Add rows ``[..., S]``."""
        self._add(functional.kept_mass(score, mass, self.budget, held=held, protected=protected))


class RecallAtBudget(_RowMean):
    """Mean of :func:`kvlearn.metrics.recall_at_budget`.

    Args:
        budget: the most slots to keep, protected ones included.
        **options: of :class:`torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, budget: int, **options: Any) -> None:
        super().__init__(**options)
        self.budget = budget

    def update(self, score: Tensor, mass: Tensor, held: Tensor | None = None, protected: Tensor | None = None) -> None:
        """Add rows ``[..., S]``."""
        self._add(functional.recall_at_budget(score, mass, self.budget, held=held, protected=protected))


class RankCorrelation(_RowMean):
    """Mean of :func:`kvlearn.metrics.rank_correlation`."""

    higher_is_better = True

    def update(self, score: Tensor, mass: Tensor, held: Tensor | None = None) -> None:
        """Add rows ``[..., S]``."""
        self._add(functional.rank_correlation(score, mass, held=held))


class CalibrationError(_RowMean):
    """Mean of :func:`kvlearn.metrics.calibration_error`.

    Args:
        bins: per row.
        **options: of :class:`torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, bins: int = 10, **options: Any) -> None:
        super().__init__(**options)
        self.bins = bins

    def update(self, score: Tensor, mass: Tensor, held: Tensor | None = None) -> None:
        """Add rows ``[..., S]``."""
        self._add(functional.calibration_error(score, mass, bins=self.bins, held=held))

"""How good a ranking or a forecast is: pure functions in :mod:`kvlearn.metrics.functional`.

The same as torchmetrics classes, which need that package: :mod:`kvlearn.metrics.running`.
"""

from kvlearn.metrics.functional import calibration_error, keep_mask, kept_mass, rank_correlation, recall_at_budget

__all__ = ["calibration_error", "keep_mask", "kept_mass", "rank_correlation", "recall_at_budget"]

"""What validation measures."""

from __future__ import annotations

from collections.abc import Mapping

from torchmetrics import MetricCollection

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

"""PyramidKV: more slots for lower layers."""

from __future__ import annotations

from kvlearn.allocation import layer_budgets
from kvlearn.errors import KvlearnError


def pyramid_budgets(budget: int, layers: int, *, least: int, beta: float = 20.0) -> list[int]:
    """Slots per layer that fall in a straight line from the first layer to the last (PyramidKV, arXiv 2406.02069).

    Beyond the ``least`` that every layer gets, the last layer has ``1 / beta`` of the mean, and the first what makes
    the mean come out. PyramidKV is this together with policy ``snapkv``:
    ``EvictingCache(model, "snapkv", pyramid_budgets(256, layers, least=...))``.

    Args:
        budget: mean slots per layer.
        layers: full-attention layers of the model.
        least: what every layer gets: its protected slots and one block (:attr:`kvlearn.shapes.Budget.least`).
        beta: steepness, 1 or more; 1 gives every layer the same.

    Returns:
        ``layers`` numbers whose sum is ``budget * layers``.

    Raises:
        KvlearnError: ``beta`` is below 1, there is no layer, or the budget is below ``least``.
    """
    if layers < 1 or not beta >= 1:
        raise KvlearnError(f"pyramid: layers is {layers} and beta {beta}; both must be 1 or more.")
    free = budget - least
    low, high = free / beta, 2 * free - free / beta
    fall = (high - low) / max(layers - 1, 1)
    return layer_budgets(
        [least + high - fall * i if layers > 1 else budget for i in range(layers)], budget, least=least
    )

"""How a budget is shared out among layers and heads, as commands and comparisons name it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from kvlearn.allocation import layer_budgets, read_shares, split_pooled
from kvlearn.cache import Allocation
from kvlearn.errors import KvlearnError
from kvlearn.policies.pyramidkv import pyramid_budgets
from kvlearn.shapes import Budget, Protection
from kvlearn.support import managed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PYRAMID = "pyramid"


def share_out(
    model: PreTrainedModel,
    budget: int | None,
    allocation: str,
    *,
    block: int | None = None,
    protect: Protection | None = None,
) -> dict[str, Any]:
    """The arguments ``budget`` and ``allocation`` of a cache.

    Args:
        model: whose full-attention layers share the slots.
        budget: slots per KV head and layer, the mean where layers differ; ``None`` for no bound.
        allocation: ``uniform``, ``pooled`` or ``scorer``, which the cache knows; ``pyramid``
            (:func:`kvlearn.policies.pyramidkv.pyramid_budgets`); or a JSON file, or a scorer's folder, with one share
            for each layer (:func:`kvlearn.allocation.read_shares`). ``pooled:pyramid`` and ``pooled:FILE`` share slots
            among layers and pool those of each layer.
        block: queries per observed block.
        protect: what no policy may evict.

    Raises:
        KvlearnError: there is no such allocation, it has another number of layers, or the budget is too small or none.
    """
    if allocation in get_args(Allocation):
        return {"budget": budget, "allocation": allocation}
    pooled, allocation = split_pooled(allocation)
    within = "pooled" if pooled else "uniform"
    if budget is None:
        raise KvlearnError(f"allocation {allocation!r} shares a budget among layers; give a budget as well.")
    least, layers = Budget.resolve(budget, block, protect).least, len(managed_layers(model)[1])
    if allocation == PYRAMID:
        return {"budget": pyramid_budgets(budget, layers, least=least), "allocation": within}
    shares = read_shares(allocation)
    if len(shares) != layers:
        raise KvlearnError(
            f"{allocation} has shares for {len(shares)} layers and the model has {layers} full-attention layers; "
            "calibrate one for this model (`kvlearn calibrate`)."
        )
    return {"budget": layer_budgets(shares, budget, least=least), "allocation": within}

"""What a scorer is trained to do. Each loss is a pure function of scores, targets and weights of slots.

All take ``[..., n]`` tensors: ``score``; ``target`` (future mass); ``log_weight``, the log of how many slots each drawn
slot stands for, -inf for those that are not ranked. All return the mean over the leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvlearn.features import FLOOR

PAIRS = 256  # pairs drawn per head and boundary


def kl(score: Tensor, target: Tensor, log_weight: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """KL divergence of softmax(score) from the target as a distribution over slots, in nats."""
    ranked = log_weight > -torch.inf
    mass = target * log_weight.exp()
    total = mass.sum(-1, keepdim=True)
    truth = mass / total.clamp(min=1e-30)
    logits = score + log_weight.masked_fill(~ranked.any(-1, keepdim=True), 0.0)  # a head without ranked slots gives 0
    forecast = logits.log_softmax(-1).masked_fill(~ranked, 0.0)
    # Both distributions carry the slots' weights, so the weights cancel in the ratio of per-slot probabilities.
    entropy = torch.special.xlogy(truth, truth)
    return (entropy - truth * forecast).sum(-1).mean()


def huber(score: Tensor, target: Tensor, log_weight: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Huber loss (delta 1) of the score against the log of the target: the only one that fixes the score's level."""
    error = functional.huber_loss(score, (target + FLOOR).log(), reduction="none")
    return _weighted(error, log_weight.exp())


def bce(score: Tensor, target: Tensor, log_weight: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Cross-entropy of "among the best ``share`` of slots", with the logit 0 at the score that keeps so many."""
    order, kept = _ranking(target, log_weight, share)
    label = torch.zeros_like(score).scatter_(-1, order, kept.to(score.dtype))
    by_score, held = _ranking(score.detach(), log_weight, share)
    least = score.detach().gather(-1, by_score).masked_fill(~held, torch.inf).amin(-1, keepdim=True)
    least = torch.where(torch.isfinite(least), least, torch.zeros_like(least))
    error = functional.binary_cross_entropy_with_logits(score - least, label, reduction="none")
    return _weighted(error, log_weight.exp())


def pairwise(score: Tensor, target: Tensor, log_weight: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Logistic loss on pairs across the boundary of a budget that keeps ``share`` of slots.

    A pair weighs as much as the mass that is lost when the two are swapped.
    """
    order, kept = _ranking(target, log_weight, share)
    ranked = (log_weight > -torch.inf).sum(-1, keepdim=True)
    inside = kept.sum(-1, keepdim=True)
    u = torch.rand(2, *score.shape[:-1], PAIRS, generator=generator, device=generator.device).to(score.device)
    better = order.gather(-1, (u[0] * inside).long().clamp(max=score.shape[-1] - 1))
    worse = order.gather(-1, (inside + u[1] * (ranked - inside)).long().clamp(max=score.shape[-1] - 1))
    weight = log_weight.exp()
    loss = functional.softplus(score.gather(-1, worse) - score.gather(-1, better))
    gain = (target.gather(-1, better) - target.gather(-1, worse)).clamp(min=0)
    gain = gain * weight.gather(-1, better) * weight.gather(-1, worse)
    return _weighted(loss, torch.where((inside > 0) & (inside < ranked), gain, torch.zeros_like(gain)))


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, float, torch.Generator], Tensor]] = {
    "kl": kl,
    "huber": huber,
    "pairwise": pairwise,
    "bce": bce,
}
"""By the name used in configs."""


def sample_share(low: float, high: float, generator: torch.Generator) -> float:
    """A share of slots to keep, log-uniform between two bounds."""
    u = float(torch.rand((), generator=generator))
    return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))


def _ranking(value: Tensor, log_weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Slots from the highest value down, those not ranked last, and which of them a share of all slots would keep."""
    ranked = log_weight > -torch.inf
    order = value.masked_fill(~ranked, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    weight = log_weight.exp().gather(-1, order)
    reached = weight.cumsum(-1)
    return order, (reached <= share * reached[..., -1:]) & (weight > 0)


def _weighted(error: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over slots, then the mean over the rest."""
    return ((error * weight).sum(-1) / weight.sum(-1).clamp(min=1e-30)).mean()

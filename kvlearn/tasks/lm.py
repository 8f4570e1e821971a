"""Language modelling: what forgetting costs in likelihood, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.tasks.base import Case, Measurement, Run, Task


@dataclass
class LanguageModelling(Task):
    """Mean negative log-likelihood of the tokens after the budget is first full, in nats/token.

    The text is fed block by block. The cache treats a block like as many single steps, so the figure is what decoding
    the text token by token would give.
    """

    name = "lm"
    summary = "negative log-likelihood of text after the budget is full (nats/token)"
    metrics = ("nll",)
    batched = True

    def full(self, run: Run, cases: Sequence[Case]) -> Tensor:
        """``[B, T - 1]`` negative log-likelihood of each token but the first, with nothing evicted."""
        ids = _stack(cases)
        return token_nll(run.feed(ids)[:, :-1], ids[:, 1:])

    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """One ``nll`` for each case, over tokens ``budget`` to the end."""
        ids = _stack(cases)
        length = ids.shape[1]
        if length <= budget:
            raise KvlearnError(
                f"a window of {length} tokens never fills a budget of {budget} slots; use a longer --window."
            )
        parts = []
        start = 0
        for end in block_ends(length, [b.slots or length for b in run.cache.budgets], run.cache.block):
            logits = run.feed(ids[:, start:end])
            targets = ids[:, start + 1 : end + 1]
            parts.append(token_nll(logits[:, : targets.shape[1]], targets))
            start = end
        nll = torch.cat(parts, dim=1)[:, budget - 1 :].mean(1)
        reference = full[:, budget - 1 :].mean(1)
        tokens = length - budget
        return [
            [Measurement("nll", float(a), float(b), tokens)]
            for a, b in zip(nll.tolist(), reference.tolist(), strict=True)
        ]


def block_ends(length: int, budgets: Sequence[int], block: int) -> list[int]:
    """Where to cut a text so that it is fed as if token by token: what fits every layer, then block by block."""
    first = min(length, min(budgets) // block * block)
    return [first, *range(first + block, length, block), length] if first < length else [length]


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats.

    Args:
        logits: ``[B, C, vocabulary]``.
        targets: ``[B, C]``.

    Returns:
        ``[B, C]`` float32.
    """
    parts = []
    for i in range(0, logits.shape[1], 256):  # a whole text's float32 logits would be the largest tensor of the run
        part = logits[:, i : i + 256].float()
        chosen = part.gather(-1, targets[:, i : i + 256].to(part.device)[..., None])[..., 0]
        parts.append(part.logsumexp(-1) - chosen)
    return torch.cat(parts, dim=1).cpu()


def _stack(cases: Sequence[Case]) -> Tensor:
    return torch.stack([case.input_ids for case in cases])

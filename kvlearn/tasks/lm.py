"""Language modelling: what forgetting costs in likelihood, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.corpora import corpus_windows
from kvlearn.errors import KvlearnError
from kvlearn.tasks.base import Case, Material, Measurement, Run, Task, block_ends, stack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIKELIEST = 128  # tokens whose probability the divergence reads one by one
_AT_ONCE = 512  # tokens of a full run per call: the logits of a whole text would be the largest tensor of the run
_LEAST = 1e-6  # of a probability: below this, one minus a sum in float32 is rounding


@dataclass(frozen=True)
class Prediction:
    """What a run predicted for each token but the first.

    Args:
        nll: ``[B, T - 1]`` negative log-likelihood, nats.
        entropy: ``[B, T - 1]`` of the predicted distribution, nats.
        ids: ``[B, T - 1, K]`` the likeliest tokens.
        log_p: ``[B, T - 1, K]`` their log-probabilities.
    """

    nll: Tensor
    entropy: Tensor
    ids: Tensor
    log_p: Tensor


class LanguageModelling(Task):
    """Likelihood of the tokens after the budget is first full, in nats/token, and divergence from the full cache.

    The text is fed block by block. The cache treats a block like as many single steps, so the figure is what decoding
    the text token by token would give.

    ``kl`` is the Kullback-Leibler divergence of the next-token distribution from the full cache's, over the full
    cache's 128 likeliest tokens and all others taken as one; that never exceeds the divergence over all tokens. Parts
    of ``nll``, over some of the same tokens: ``low-entropy`` and ``high-entropy`` (below and above the document's
    median of the full cache's entropy), and by the last time that the token occurred before: ``first-use`` (never),
    ``used-within-budget`` and ``used-beyond-budget`` (more tokens ago than the budget has slots).
    """

    name = "lm"
    summary = "likelihood of text after the budget is full, and divergence from the full cache"
    metrics = ("nll", "kl")

    def cases(self, material: Material) -> list[Case]:
        """Windows of texts."""
        return text_cases(
            material.tokenizer,
            material.data,
            docs=material.docs,
            window=material.window,
            split=material.split,
            seed=material.seed,
        )

    def full(self, run: Run, cases: Sequence[Case]) -> Prediction:
        """What is predicted with nothing evicted."""
        ids = stack(cases)
        step = max(1, _AT_ONCE // run.cache.block) * run.cache.block
        parts = []
        for start in range(0, ids.shape[1], step):
            log_p = run.feed(ids[:, start : start + step]).float().log_softmax(-1)
            targets = ids[:, start + 1 : start + step + 1].to(log_p.device)
            log_p = log_p[:, : targets.shape[1]]
            top = log_p.topk(min(LIKELIEST, log_p.shape[-1]))
            entropy = -(log_p.exp() * log_p).sum(-1)
            nll = -log_p.gather(-1, targets[..., None])[..., 0]
            parts.append((nll.cpu(), entropy.cpu(), top.indices, top.values))
        return Prediction(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))

    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """``nll``, its parts and ``kl`` for each case, over tokens ``budget`` to the end."""
        ids = stack(cases)
        if ids.shape[1] <= budget:
            raise KvlearnError(
                f"a window of {ids.shape[1]} tokens never fills a budget of {budget} slots; use a longer --window."
            )
        nll, kl = [], []
        start = 0
        for end in block_ends(ids.shape[1], run.slots or [ids.shape[1]], run.cache.block):
            logits = run.feed(ids[:, start:end])
            targets = ids[:, start + 1 : end + 1]
            logits = logits[:, : targets.shape[1]]
            known = slice(start, start + targets.shape[1])
            for i in range(0, logits.shape[1], _AT_ONCE):
                part = slice(i, i + _AT_ONCE)
                log_q = logits[:, part].float().log_softmax(-1)
                nll.append(-log_q.gather(-1, targets[:, part].to(log_q.device)[..., None])[..., 0].cpu())
                kl.append(
                    divergence(full.log_p[:, known][:, part], log_q.gather(-1, full.ids[:, known][:, part])).cpu()
                )
            start = end
        first = budget - 1
        scored = [torch.cat(nll, 1), torch.cat(kl, 1), full.nll, full.entropy, last_use(ids)[:, 1:]]
        return [_measurements([row[first:] for row in rows], budget) for rows in zip(*scored, strict=True)]


def _measurements(scored: Sequence[Tensor], budget: int) -> list[Measurement]:
    """Of one case: ``[tokens]`` each of negative log-likelihood, divergence, the full cache's two, and last use."""
    nll, kl, full, entropy, distance = scored
    low = entropy <= entropy.median()
    parts = {
        "nll": torch.ones_like(low),
        "nll/low-entropy": low,
        "nll/high-entropy": ~low,
        "nll/first-use": distance == 0,
        "nll/used-within-budget": (distance > 0) & (distance <= budget),
        "nll/used-beyond-budget": distance > budget,
    }
    found = [
        Measurement(name, float(nll[part].mean()), float(full[part].mean()), int(part.sum()))
        for name, part in parts.items()
        if bool(part.any())
    ]
    return [*found, Measurement("kl", float(kl.mean()), 0.0, len(kl))]


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence over some tokens, all others taken as one.

    Args:
        log_p: ``[..., K]`` log-probabilities of the tokens under the reference.
        log_q: ``[..., K]`` the same tokens under the other distribution.

    Returns:
        ``[...]`` nats, 0 or more.
    """
    p, q = log_p.exp(), log_q.exp()
    rest_p, rest_q = ((1 - x.sum(-1)).clamp(min=_LEAST) for x in (p, q))
    return ((p * (log_p - log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()).clamp(min=0)


def last_use(ids: Tensor) -> Tensor:
    """How many tokens ago each of ``[B, T]`` tokens occurred last; 0 where it did not."""
    distance = torch.zeros_like(ids)
    for row, tokens in enumerate(ids.tolist()):
        seen: dict[int, int] = {}
        for i, token in enumerate(tokens):
            distance[row, i] = i - seen.get(token, i)
            seen[token] = i
    return distance


def text_cases(
    tokenizer: PreTrainedTokenizerBase, data: str, *, docs: int, window: int, split: str, seed: int
) -> list[Case]:
    """Windows of documents as cases, the same number from every domain of a mixture as far as that goes.

    Args:
        tokenizer: the model's.
        data: a corpus or a comma-separated mixture (see :mod:`kvlearn.corpora`).
        docs: how many windows, each from a document of its own.
        window: tokens per window.
        split: which split of the documents.
        seed: order of the documents.
    """
    found = corpus_windows(
        data,
        tokenizer,
        tokens=docs * window,
        window=window,
        max_windows_per_document=1,
        split=split,  # type: ignore[arg-type]  # checked by corpora, which names the splits
        seed=seed,
    )
    return [Case(w.doc, w.domain, torch.tensor(w.input_ids, dtype=torch.int64)) for w in found]

"""Tasks that ask: a context is read under the budget, then every question is put to a copy of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlearn.tasks.base import Case, Measurement, Question, Run, Task, block_ends, stack


@dataclass(frozen=True)
class Score:
    """How one question was answered.

    Args:
        right: 1.0 if every token of the answer is the likeliest one, given those before it: what greedy decoding gives.
        nll: mean negative log-likelihood of the answer's tokens, nats/token.
        tokens: tokens of the answer.
    """

    right: float
    nll: float
    tokens: int


class QuestionTask(Task):
    """Base of tasks whose cases carry questions; answers are teacher-forced, so nothing is generated."""

    metrics = ("exact_match", "answer_nll")

    def full(self, run: Run, cases: Sequence[Case]) -> list[list[Score]]:
        """The full cache's scores: of each case, of each question."""
        return ask(run, cases)

    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """Mean over the questions of each case."""
        own = ask(run, cases)
        return [self._compare(scores, reference) for scores, reference in zip(own, full, strict=True)]

    def _compare(self, own: list[Score], full: list[Score]) -> list[Measurement]:
        solved = _mean([score.right for score in full])
        tokens = sum(score.tokens for score in own)
        nll, full_nll = _mean([score.nll for score in own]), _mean([score.nll for score in full])
        return [
            Measurement("exact_match", _mean([score.right for score in own]), solved, len(own), solved),
            Measurement("answer_nll", nll, full_nll, tokens, solved),
        ]


def ask(run: Run, cases: Sequence[Case]) -> list[list[Score]]:
    """Read the contexts of cases of equal shape, then put every question to a copy of the cache."""
    run.read(stack(cases), cases[0].prompt)
    by_question = [_answer(run, list(questions)) for questions in zip(*(case.questions for case in cases), strict=True)]
    return [list(scores) for scores in zip(*by_question, strict=True)]


def _answer(run: Run, questions: Sequence[Question]) -> list[Score]:
    """One question to every row."""
    branch = run.branch()
    ids = _pad([question.ids for question in questions], 0)
    answer = _pad([question.answer for question in questions], False)
    fed, targets, wanted = ids[:, :-1], ids[:, 1:], answer[:, 1:]
    # The last token is an answer that nothing follows, so it is not fed.
    valid = torch.arange(fed.shape[1]) < torch.tensor([[len(question.ids) - 1] for question in questions])
    right = torch.zeros(wanted.shape, dtype=torch.bool)
    nll = torch.zeros(wanted.shape)
    start = 0
    for end in block_ends(fed.shape[1], branch.slots, branch.cache.block, min(branch.cache.block, fed.shape[1])):
        logits = branch.feed(fed[:, start:end], valid=valid[:, start:end])
        right[:, start:end], nll[:, start:end] = judge(logits, targets[:, start:end])
        start = end
    run.tokens += branch.tokens
    return [
        Score(float(r[w].all()), float(n[w].mean()), int(w.sum())) for r, n, w in zip(right, nll, wanted, strict=True)
    ]


def judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target is the likeliest token, and its negative log-likelihood.

    Args:
        logits: ``[B, C, vocabulary]``.
        targets: ``[B, C]``.

    Returns:
        ``[B, C]`` bool and ``[B, C]`` float32 in nats, on the CPU.
    """
    right, nll = [], []
    for i in range(0, logits.shape[1], 256):  # a whole text's float32 logits would be the largest tensor of the run
        part = logits[:, i : i + 256].float()
        chosen = targets[:, i : i + 256].to(part.device)
        right.append(part.argmax(-1) == chosen)
        nll.append(part.logsumexp(-1) - part.gather(-1, chosen[..., None])[..., 0])
    return torch.cat(right, dim=1).cpu(), torch.cat(nll, dim=1).cpu()


def _pad(rows: Sequence[Tensor], value: int | bool) -> Tensor:
    """``[B, longest]``, shorter rows padded at their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

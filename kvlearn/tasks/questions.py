"""Tasks that ask: a context is read under the budget, then every question is put to a copy of the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlearn.tasks.base import Case, Measurement, Question, Run, Task, stack


@dataclass(frozen=True)
class Score:
    """How one question was answered.

    Args:
        right: 1.0 if every token of the answer is the likeliest one, given those before it: what greedy decoding gives;
            of a generated answer, the share of texts wanted that it contains.
        nll: mean negative log-likelihood of the answer's tokens, nats/token.
        tokens: tokens of the answer.
    """

    right: float
    nll: float
    tokens: int


class QuestionTask(Task):
    """Base of tasks whose cases carry questions.

    Answers are teacher-forced, so nothing is generated; unless ``generated`` is set, when they are decoded greedily and
    what counts is the share of the texts wanted that they contain, in capitals or not.
    """

    metrics: tuple[str, ...] = ("exact_match", "answer_nll")
    generated = False

    def full(self, run: Run, cases: Sequence[Case]) -> list[list[Score]]:
        """The full cache's scores: of each case, of each question."""
        return ask(run, cases)

    def measure(self, run: Run, cases: Sequence[Case], full: Any, budget: int) -> list[list[Measurement]]:
        """Mean over the questions of each case."""
        own = ask(run, cases)
        return [self._compare(scores, reference) for scores, reference in zip(own, full, strict=True)]

    def _compare(self, own: list[Score], full: list[Score]) -> list[Measurement]:
        right, solved = (_mean([score.right for score in scores]) for scores in (own, full))
        found = [Measurement(self.metrics[0], right, solved, len(own), solved)]
        if not self.generated:
            nll, full_nll = (_mean([score.nll for score in scores]) for scores in (own, full))
            found.append(Measurement("answer_nll", nll, full_nll, sum(score.tokens for score in own), solved))
        return found


def ask(run: Run, cases: Sequence[Case]) -> list[list[Score]]:
    """Read the contexts of cases of equal shape, then put every question to a copy of the cache."""
    last = run.read(stack(cases), cases[0].prompt)
    by_question = []
    for questions in zip(*(case.questions for case in cases), strict=True):
        branch = run.branch()
        by_question.append(_generate(branch, questions) if questions[0].new_tokens else _force(branch, questions, last))
        run.tokens += branch.tokens
    return [list(scores) for scores in zip(*by_question, strict=True)]


def _force(run: Run, questions: Sequence[Question], last: Tensor) -> list[Score]:
    """One question to every row, its answer teacher-forced after the context, whose end gave the logits ``last``."""
    ids = _pad([question.ids for question in questions], 0)
    answer = _pad([question.answer for question in questions], False)
    right, nll = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape)
    right[:, :1], nll[:, :1] = judge(last, ids[:, :1])
    # The last token is an answer that nothing follows, so it is not fed.
    valid = torch.arange(ids.shape[1] - 1) < torch.tensor([[len(question.ids) - 1] for question in questions])
    for part, logits in run.ask(ids[:, :-1], valid):
        next_part = slice(part.start + 1, part.start + 1 + logits.shape[1])
        right[:, next_part], nll[:, next_part] = judge(logits, ids[:, next_part])
    return [
        Score(float(r[w].all()), float(n[w].mean()), int(w.sum())) for r, n, w in zip(right, nll, answer, strict=True)
    ]


def _generate(run: Run, questions: Sequence[Question]) -> list[Score]:
    """One question of equal length to every row, its answer decoded greedily."""
    logits = torch.empty(0)
    for _, logits in run.ask(torch.stack([question.ids for question in questions])):  # noqa: B007 - the last is wanted
        pass
    ends = torch.tensor(_end_tokens(run))
    tokens: list[Tensor] = []
    ended = torch.zeros(len(questions), dtype=torch.bool)
    for _ in range(max(question.new_tokens for question in questions)):
        token = logits[:, -1].argmax(-1).cpu()
        tokens.append(token)
        ended |= torch.isin(token, ends)
        if bool(ended.all()):
            break
        logits = run.feed(token[:, None])
    texts = run.tokenizer.batch_decode(torch.stack(tokens, dim=1).tolist(), skip_special_tokens=True)
    return [
        Score(_mean([float(wanted.lower() in text.lower()) for wanted in question.contains]), math.nan, len(tokens))
        for question, text in zip(questions, texts, strict=True)
    ]


def _end_tokens(run: Run) -> list[int]:
    """Tokens that end a text of the model."""
    config = getattr(run.model, "generation_config", None)
    ends = [getattr(config, "eos_token_id", None), run.tokenizer.eos_token_id]
    return [end for each in ends if each is not None for end in (each if isinstance(each, list) else [each])]


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

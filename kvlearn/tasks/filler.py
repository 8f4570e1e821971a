"""Natural text to hide things in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlearn.corpora import corpus_windows
from kvlearn.errors import KvlearnError
from kvlearn.models import encode
from kvlearn.tasks.base import Case, Material, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOK_BACK = 64  # tokens; lines of prose end more often than that


def hidden(
    material: Material,
    domains: Sequence[str],
    facts: Sequence[Sequence[str | list[int]]],
    questions: Sequence[Sequence[Question]],
    *,
    within: float = 1.0,
    prompt: float = 1.0,
) -> list[Case]:
    """Cases that hide facts in natural text: all contexts of one length, so that they can be rows of a batch.

    Args:
        material: tokenizer, texts and sizes.
        domains: of each case.
        facts: texts or tokens of each case, put in line breaks in this order, evenly spread but for chance.
        questions: of each case.
        within: first share of the text that the facts are in.
        prompt: first share of the context that is fed at once (see :class:`Case`).

    Raises:
        KvlearnError: the window cannot hold the facts and the longest question.
    """
    length = material.window - max(len(question.ids) for asked in questions for question in asked)
    pieces = [[encode(material.tokenizer, fact) if isinstance(fact, str) else fact for fact in own] for own in facts]
    most = max(sum(map(len, own)) for own in pieces)
    if length * within < most:
        raise KvlearnError(
            f"a window of {material.window} tokens cannot hide {most} tokens of facts; use a longer --window."
        )
    cases = []
    for number, filler in enumerate(texts(material, len(facts))):
        rng = material.random("filler", number)
        ids = _scatter(material.tokenizer, filler, pieces[number], length, within, rng)
        doc = f"{number}-{material.split}-{material.seed}"
        asked = tuple(questions[number])
        cases.append(Case(doc, domains[number], ids, prompt=round(length * prompt), questions=asked))
    return cases


def texts(material: Material, count: int) -> list[tuple[int, ...]]:
    """Windows of text; where there are too few, they come again, with other things hidden in them."""
    found = corpus_windows(
        material.filler,
        material.tokenizer,
        tokens=count * material.window,
        window=material.window,
        max_windows_per_document=4,
        split=material.split,  # type: ignore[arg-type]  # checked by corpora, which names the splits
        seed=material.seed,
    )
    return list(itertools.islice(itertools.cycle([window.input_ids for window in found]), count))


def _scatter(
    tokenizer: PreTrainedTokenizerBase,
    filler: Sequence[int],
    pieces: Sequence[Sequence[int]],
    length: int,
    within: float,
    rng: random.Random,
) -> Tensor:
    """``[length]`` filler with pieces in it: each at a line break in its own stretch of the first ``within`` of it."""
    room = length - sum(map(len, pieces))
    end = round(length * within) - sum(map(len, pieces))
    ids: list[int] = []
    start = 0
    for number, piece in enumerate(pieces):
        chosen = round(end * (number + rng.random()) / len(pieces))
        at = max(start, _line_break(tokenizer, filler, chosen))
        ids += [*filler[start:at], *piece]
        start = at
    return torch.tensor([*ids, *filler[start:room]], dtype=torch.int64)


def _line_break(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], at: int) -> int:
    """The nearest place at or before ``at`` that follows the end of a line, or of a sentence; else ``at`` itself."""
    before = [str(tokenizer.decode([token])) for token in ids[max(0, at - _LOOK_BACK) : at]]
    for ends in ("\n", ". "), (".",):
        for back, text in enumerate(reversed(before)):
            if text.endswith(ends):
                return at - back
    return at

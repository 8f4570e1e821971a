"""RULER's tasks: the harness's generators with seeds of their own, and nothing of it left behind."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import typing
from functools import cache
from typing import Any

import numpy as np
import pytest
from task_helpers import byte_tokenizer
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvlearn.errors import KvlearnError
from kvlearn.tasks import resolve
from kvlearn.tasks.base import Case, Material
from kvlearn.tasks.ruler import KINDS

needs_harness = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "nltk", "wonderwords")),
    reason="lm-evaluation-harness is not installed (kvlearn[eval])",
)
WINDOW = 1500
FORCED = ("vt", "niah_single_1", "niah_multikey_2", "niah_multikey_3")
# The harness makes a list of all pairs of words for the needles, which takes half a minute and a gigabyte.
kinds = [pytest.param(kind, marks=pytest.mark.slow if kind.startswith("niah") else ()) for kind in KINDS]


@cache
def tokenizer() -> Any:
    """Pieces of words: the generators have no end for a tokenizer of bytes."""
    made = byte_tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train([argparse.__file__, typing.__file__], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _cases(kind: str, **options: int) -> list[Case]:
    return resolve(f"ruler:{kind}").cases(Material(tokenizer(), docs=2, window=WINDOW, **options))


@needs_harness
@pytest.mark.parametrize("kind", kinds)
def test_cases_are_the_same_every_time_and_fit_the_window(kind: str) -> None:
    def content(cases: list[Case]) -> list[list[list[int]]]:
        return [[text.tolist() for text in case.texts()] for case in cases]

    made = content(_cases(kind))
    assert made == content(_cases(kind))
    assert made != content(_cases(kind, seed=1))
    assert len(made) == 2
    assert all(len(text) <= WINDOW for case in made for text in case)


@needs_harness
@pytest.mark.parametrize("kind", kinds)
def test_the_question_comes_last_and_its_answer_is_in_the_context(kind: str) -> None:
    decode = tokenizer().decode
    for case in _cases(kind):
        context = decode(case.input_ids)
        assert case.prompt == len(case.input_ids)
        for question in case.questions:
            asked = decode(question.ids[~question.answer])
            assert asked.startswith("\n")
            assert "?" in asked or "Find all variables" in asked
            wanted = question.contains or (decode(question.ids[question.answer]).strip(),)
            assert all(text in context for text in wanted)
            assert bool(question.new_tokens) == (kind not in FORCED)


@needs_harness
def test_the_variables_are_asked_for_one_by_one() -> None:
    decode = tokenizer().decode
    questions = _cases("vt")[0].questions
    texts = [decode(question.ids) for question in questions]
    assert len(texts) == 5
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)


@needs_harness
def test_the_global_generators_go_on_as_if_nothing_was_made() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the harness draws from the global generator
    expected = random.random(), np.random.random()  # noqa: NPY002 - the same
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the same
    _cases("vt")
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002 - the same


@needs_harness
def test_a_window_in_which_the_generators_never_end_is_refused() -> None:
    with pytest.raises(KvlearnError, match="needs a window of 1024 tokens or more, not 512"):
        resolve("ruler:vt").cases(Material(tokenizer(), docs=1, window=512))


@needs_harness
def test_a_tokenizer_for_which_the_generators_never_end_is_refused() -> None:
    with pytest.raises(KvlearnError, match="sized for tokenizers of words and pieces, and this one takes 36 tokens"):
        resolve("ruler:vt").cases(Material(byte_tokenizer(), docs=1, window=WINDOW))


def test_without_the_harness_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(KvlearnError, match=r"lm_eval is missing: pip install 'kvlearn\[eval\]'"):
        _cases("vt")

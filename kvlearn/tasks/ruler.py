"""Tasks of RULER (Hsieh et al., 2024, arXiv:2404.06654), as lm-evaluation-harness generates them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlearn.corpora.base import seeded_hash
from kvlearn.errors import KvlearnError
from kvlearn.models import encode
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.questions import QuestionTask

PREFIX = "ruler:"
_GENERATORS = "lm_eval.tasks.ruler"
_LEAST_WINDOW = 1024  # the generators look for a size that fits, and some look for ever in less
_SENTENCE, _MOST_TOKENS = "The grass is green. The sky is blue.", 20  # about 10 with any tokenizer of words
_NEEDED = ("lm_eval", "nltk", "wonderwords", "scipy")

Sample = dict[str, Any]


def _needle(haystack: str, key: str, value: str) -> Callable[[Material], list[Sample]]:
    def make(material: Material) -> list[Sample]:
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

        samples: list[Sample] = generate_samples(
            get_haystack(type_haystack=haystack),
            max_seq_length=material.window,
            template=TEMPLATE,
            type_haystack=haystack,
            type_needle_k=key,
            type_needle_v=value,
            num_samples=material.docs,
            TOKENIZER=material.tokenizer,
        )
        return samples

    return make


def _variables(material: Material) -> list[Sample]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as make

    (example,) = make(material.tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    samples: list[Sample] = make(
        material.tokenizer, num_samples=material.docs, max_seq_length=material.window, icl_example=example
    )
    return samples


def _common_words(material: Material) -> list[Sample]:
    from lm_eval.tasks.ruler import cwe_utils

    cwe_utils.RNG.seed(random.getrandbits(64))  # the module's own; it would go on from whatever was made before
    samples: list[Sample] = cwe_utils.sys_word_pair_random(material.docs, material.window, material.tokenizer)
    return samples


def _frequent_words(material: Material) -> list[Sample]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    samples: list[Sample] = sys_kwext(material.tokenizer, material.window, num_samples=material.docs)
    return samples


@dataclass(frozen=True)
class _Kind:
    """One of RULER's tasks: its module, how it is made, and how many tokens its answer may take if it is generated."""

    summary: str
    module: str
    make: Callable[[Material], list[Sample]]
    new_tokens: int = 0


KINDS = {
    "vt": _Kind("RULER: variables of a chain of assignments", "vt_utils", _variables),
    "cwe": _Kind("RULER: the ten most common words of a list", "cwe_utils", _common_words, 120),
    "fwe": _Kind("RULER: the three most frequent words of a coded text", "fwe_utils", _frequent_words, 50),
    "niah_single_1": _Kind(
        "RULER: a number among repeated sentences", "prepare_niah", _needle("repeat", "words", "numbers")
    ),
    "niah_multikey_2": _Kind(
        "RULER: a number among many others like it", "prepare_niah", _needle("needle", "words", "numbers")
    ),
    "niah_multikey_3": _Kind(
        "RULER: a UUID among many others like it", "prepare_niah", _needle("needle", "uuids", "uuids")
    ),
}


class Ruler(QuestionTask):
    """One of RULER's tasks; the question comes after the context was cut to the budget.

    Needles and variables are teacher-forced, every variable a question of its own; lists of words have no order that
    could be forced and are generated.

    Args:
        kind: one of :data:`KINDS`.

    Raises:
        KvlearnError: there is no such task.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise KvlearnError(f"unknown task {PREFIX}{kind}; known are {', '.join(PREFIX + name for name in KINDS)}.")
        self._kind = KINDS[kind]
        self.name, self.summary = PREFIX + kind, self._kind.summary
        self.variants = (kind,)
        if self._kind.new_tokens:
            self.generated, self.metrics = True, ("contains",)
            self.no_oracle = "answers are generated, and nobody knows beforehand what they will attend to"

    def cases(self, material: Material) -> list[Case]:
        """As lm-evaluation-harness makes them, with other seeds."""
        _require()
        if material.window < _LEAST_WINDOW:
            raise KvlearnError(f"{self.name} needs a window of {_LEAST_WINDOW} tokens or more, not {material.window}.")
        _check_tokenizer(material)
        with _quiet():
            importlib.import_module(f"{_GENERATORS}.{self._kind.module}")  # before seeding: some draw when imported
            with _seeded(f"{self.name}\0{material.split}", material.seed):
                samples = self._kind.make(material)
        return [self._case(material, number, sample) for number, sample in enumerate(samples)]

    def _case(self, material: Material, number: int, sample: Sample) -> Case:
        context, _, question = str(sample["input"]).rpartition("\n")
        text = f"\n{question.strip()} {sample['gen_prefix']}"
        ids = torch.tensor(encode(material.tokenizer, context), dtype=torch.int64)
        doc = f"{number}-{material.split}-{material.seed}"
        outputs = [str(output) for output in sample["outputs"]]
        if self._kind.new_tokens:
            asked = torch.tensor(encode(material.tokenizer, text), dtype=torch.int64)
            none = torch.zeros(len(asked), dtype=torch.bool)
            questions = [Question(asked, none, tuple(outputs), self._kind.new_tokens)]
        else:
            questions = [
                Question.of(material.tokenizer, " ".join([text, *outputs[:i]]), f" {output}")
                for i, output in enumerate(outputs)
            ]
        return Case(doc, self.variants[0], ids, prompt=len(ids), questions=tuple(questions))


def _require() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KvlearnError(
            f"the tasks of RULER are made by lm-evaluation-harness, and {', '.join(missing)} is missing: "
            "pip install 'kvlearn[eval]'."
        )


def _check_tokenizer(material: Material) -> None:
    """Refuse a tokenizer so fine that the generators would look for ever for a text that fits."""
    count = len(encode(material.tokenizer, _SENTENCE))
    if count > _MOST_TOKENS:
        raise KvlearnError(
            f"RULER's texts are sized for tokenizers of words and pieces, and this one takes {count} tokens for "
            f"{_SENTENCE!r}."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No output, and no download of what is not needed."""
    rank = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = rank or "1"  # rank 0 fetches a sentence splitter, which only essays need
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if rank is None:
            del os.environ["LOCAL_RANK"]


@contextlib.contextmanager
def _seeded(label: str, seed: int) -> Iterator[None]:
    """The global generators seeded, and afterwards as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - what the generators draw from
    number = seeded_hash(label, seed)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - what the generators draw from
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - what the generators draw from

"""Passkeys at the beginning, long text after them, then the question."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask

# Keys of several kinds, because small models mix up those of one kind even with the full cache.
_KEYS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("The pass key is", lambda rng: words.digits(rng, 5)),
    ("The name of the agent is", words.person),
    ("The password of the safe is", lambda rng: words.two_words(rng, "-")),
]


class Passkey(QuestionTask):
    """Keys hidden in the first quarter, which is the prompt; the rest is forced, as if the model had written it.

    After Mohtashami and Jaggi (2023, arXiv:2305.16300), with natural text around the keys, and with the question after
    hundreds of decoding steps: a policy has to keep keys through them that nothing has asked for yet.
    """

    name = "passkey"
    summary = "keys in the first quarter, asked for after the rest was decoded"
    variants = ("1 key", "3 keys")

    def cases(self, material: Material) -> list[Case]:
        """One and three keys in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            variant = self.variants[number % 2]
            keys = [(begin, f" {make(rng)}") for begin, make in rng.sample(_KEYS, 3)] if number % 2 else [_first(rng)]
            domains.append(variant)
            facts.append([f"\n{begin}{key}. Remember it: {begin[0].lower()}{begin[1:]}{key}.\n" for begin, key in keys])
            questions.append([Question.of(material.tokenizer, f"\n{begin}", key) for begin, key in keys])
        return hidden(material, domains, facts, questions, within=0.25, prompt=0.25)


def _first(rng: random.Random) -> tuple[str, str]:
    begin, make = _KEYS[0]
    return begin, f" {make(rng)}"

"""Chains of assignments scattered over a prompt, followed link by link."""

from __future__ import annotations

import random

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask


class VariableTracking(QuestionTask):
    """A chain of assignments, each of which names the value of the one before; all must still be there to follow it.

    After the task of that name in RULER (Hsieh et al., 2024, arXiv:2404.06654), made for small models: every variable
    of a chain is of another kind, every assignment is written twice, and each link is asked for on its own.
    """

    name = "variable-tracking"
    summary = "a chain of assignments over a prompt, followed after it was cut to the budget"
    variants = ("1 hop", "3 hops")

    def cases(self, material: Material) -> list[Case]:
        """Chains of one and of three hops in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            links = _chain(rng)[: 4 if number % 2 else 2]
            domains.append(self.variants[number % 2])
            facts.append([f"\nRemember this: {name} = {value}\nAgain: {name} = {value}\n" for name, value in links])
            questions.append([Question.of(material.tokenizer, f"\n{name} =", f" {value}") for name, value in links])
        return hidden(material, domains, facts, questions)


def _chain(rng: random.Random) -> list[tuple[str, str]]:
    """Names and values; every name holds the value before."""
    owner, city, code, word = words.person(rng), words.city(rng), words.digits(rng, 4), words.two_words(rng, "-")
    return [
        ("owner", owner),
        (f"city of {owner}", city),
        (f"code of {city}", code),
        (f"password of {code}", word),
    ]

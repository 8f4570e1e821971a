"""Many unrelated facts in a long prompt, all asked for after it was compressed."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask

# Key and value. No two of one kind, because small models mix those up even with the full cache.
_FACTS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("The door code of the office is", lambda rng: f" {words.digits(rng, 5)}"),
    ("The ship in the harbor is called the", lambda rng: f" {words.two_words(rng).title()}"),
    ("The meeting with the auditors begins at", lambda rng: f" {rng.randint(1, 12)}:{rng.randint(10, 59)}"),
    ("The price of the old painting was $", lambda rng: f"{words.digits(rng, 1)},{words.digits(rng, 3)}"),
    ("The name of the gardener is", lambda rng: f" {words.person(rng)}"),
    ("The train to the coast leaves from platform", lambda rng: f" {words.digits(rng, 2)}"),
    ("The password of the wireless network is", lambda rng: f" {words.two_words(rng, '-')}"),
    ("The patient was born in the city of", lambda rng: f" {words.city(rng)}"),
    ("The phone number of the bakery is", lambda rng: f" 555-{words.digits(rng, 4)}"),
]


class KeyValueRecall(QuestionTask):
    """Facts (a key, a value) throughout a prompt that is fed at once; then every value is asked for by its key.

    The questions share one cache: what it kept must serve them all, and nothing told it which would come.
    """

    name = "kv-recall"
    summary = "facts throughout a prompt, all asked for after it was cut to the budget"
    variants = ("4 facts", "8 facts")

    def cases(self, material: Material) -> list[Case]:
        """Four and eight facts in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            chosen = [(key, make(rng)) for key, make in rng.sample(_FACTS, 8 if number % 2 else 4)]
            domains.append(self.variants[number % 2])
            facts.append([f"\nRemember this: {key}{value}. {key}{value}.\n" for key, value in chosen])
            questions.append([Question.of(material.tokenizer, f"\n{key}", value) for key, value in chosen])
        return hidden(material, domains, facts, questions)

"""A few lines, a long time of other text, then the lines again."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask

# How a line begins, and how it goes on. Each begins in its own way, because small models mix up those that do not.
_LINES: list[tuple[str, Callable[[random.Random], str]]] = [
    ("The captain sailed to", lambda rng: f" {words.city(rng)} with {words.digits(rng, 2)} sailors on board."),
    ("A letter from my uncle", lambda rng: f" {words.person(rng)} came in the year {words.year(rng)}."),
    ("Under the old tree lay a", lambda rng: f" {words.two_words(rng)} and {words.digits(rng, 3)} coins."),
    ("Grandmother kept a picture of", lambda rng: f" {words.city(rng)} behind the {words.two_words(rng)}."),
    ("On Sunday the teacher met", lambda rng: f" {words.person(rng)} near a {words.two_words(rng)}."),
    ("Nobody knew the song about", lambda rng: f" the {words.two_words(rng)} from {words.city(rng)}."),
]


class DelayedCopy(QuestionTask):
    """Made-up lines are in the prompt; other text is decoded; then each line begins again and must go on word by word.

    The lines are written twice at the beginning, so that what is to be done can be seen.
    """

    name = "copy"
    summary = "lines to be repeated word by word after other text was decoded"
    variants = ("2 lines", "3 lines")

    def cases(self, material: Material) -> list[Case]:
        """Two and three lines in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            chosen = rng.sample(_LINES, 3 if number % 2 else 2)
            lines = [(f"\n{begin}", make(rng)) for begin, make in chosen]
            passage = "".join(begin + rest for begin, rest in lines)
            domains.append(self.variants[number % 2])
            facts.append([f"\n{passage}\n{passage}\n"])
            questions.append([Question.of(material.tokenizer, begin, rest) for begin, rest in lines])
        return hidden(material, domains, facts, questions, within=0.25, prompt=0.25)

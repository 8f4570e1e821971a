"""A few lines, a long time of other text, then the lines again."""

from __future__ import annotations

import random

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask


class DelayedCopy(QuestionTask):
    """Made-up lines are in the prompt; other text is decoded; then each line begins again and must go on word by word.

    The lines are written twice at the beginning, so that what is to be done can be seen.
    """

    name = "copy"
    summary = "lines to be repeated word by word after other text was decoded"
    variants = ("2 lines", "4 lines")

    def cases(self, material: Material) -> list[Case]:
        """Two and four lines in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            names = rng.sample(words.FIRST_NAMES, 4 if number % 2 else 2)
            lines = [(f"\n{name} carried the", _rest(rng)) for name in names]
            passage = "".join(begin + rest for begin, rest in lines)
            domains.append(self.variants[number % 2])
            facts.append([f"\n{passage}\n{passage}\n"])
            questions.append([Question.of(material.tokenizer, begin, rest) for begin, rest in lines])
        return hidden(material, domains, facts, questions, within=0.25, prompt=0.25)


def _rest(rng: random.Random) -> str:
    start, end = rng.sample(words.CITIES, 2)
    return f" {words.two_words(rng)} from {start} to {end}."

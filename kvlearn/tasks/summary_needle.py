"""Events out of place in a long text, which its summary must not miss."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask

_Maker = Callable[[random.Random], str]

# What a text says, then how a summary says it: given and to be answered in turn.
_EVENTS: tuple[tuple[str, _Maker, str, _Maker], ...] = (
    ("the museum of clocks was opened by Professor", words.person, " in the city of", words.city),
    ("the glass bridge was built by the engineer", words.person, " in the year", words.year),
    ("the lost painting was found in the city of", words.city, " by the collector", words.person),
    ("the storm sank a ship called", lambda rng: words.two_words(rng).title(), " in the year", words.year),
)


class SummaryNeedle(QuestionTask):
    """Events hidden in a prompt; a summary is begun for each, and must fill in its persons, places and figures.

    The summary is forced: only what it has to take from the text is scored, and an event counts if all that is right.
    """

    name = "summary-needle"
    summary = "events in a prompt that its summary must tell, after it was cut to the budget"
    variants = ("2 events", "4 events")

    def cases(self, material: Material) -> list[Case]:
        """Two and four events in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            events = [_event(rng, *event) for event in rng.sample(_EVENTS, 4 if number % 2 else 2)]
            domains.append(self.variants[number % 2])
            facts.append([f"\nOne thing is certain: {''.join(event)}. Yes, {''.join(event)}.\n" for event in events])
            questions.append(
                [Question.of(material.tokenizer, f"\nIn summary, {event[0]}", *event[1:]) for event in events]
            )
        return hidden(material, domains, facts, questions)


def _event(rng: random.Random, begin: str, first: _Maker, then: str, second: _Maker) -> list[str]:
    return [begin, f" {first(rng)}", then, f" {second(rng)}"]

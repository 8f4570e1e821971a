"""Rules from the first turn of a conversation, which must hold in the last."""

from __future__ import annotations

from kvlearn.tasks import words
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.filler import hidden
from kvlearn.tasks.questions import QuestionTask

_TURNS = 7  # after the first; what they speak of is the filler
_NEXT = "\nUser: Please tell me more.\nAssistant: "
_SMALL_TALK = (
    "\nUser: What is the capital of France?\nAssistant: The capital of France is Paris.",
    "\nUser: How many days are in a week?\nAssistant: There are seven days in a week.",
    "\nUser: What colour is the sky?\nAssistant: The sky is blue.",
)


class MultiTurn(QuestionTask):
    """Rules are agreed on in the first turn; turns of other text follow, decoded; the last turn must obey them."""

    name = "multi-turn"
    summary = "rules from the first turn that must hold in the last"
    variants = ("1 rule", "3 rules")

    def cases(self, material: Material) -> list[Case]:
        """One and three rules in turn."""
        domains, facts, questions = [], [], []
        for number in range(material.docs):
            rng = material.random(self.name, number)
            rules = [
                ("My name is", f" {words.two_words(rng).title()}"),
                ("The person I work for is", f" {words.person(rng)}"),
                ("The code word for stop is", f" {words.two_words(rng, '-')}"),
            ]
            rules = rng.sample(rules, 3 if number % 2 else 1)
            said = " ".join(f"{begin}{rest}." for begin, rest in rules)
            domains.append(self.variants[number % 2])
            first = f"\nUser: Say this at the end of every answer: {said}\nAssistant: Understood. {said}"
            again = f"\nUser: How are you?\nAssistant: I am fine, thank you. {said}\n"
            facts.append([first + again, *[_NEXT] * _TURNS])
            questions.append(
                [Question.of(material.tokenizer, f"{rng.choice(_SMALL_TALK)} {begin}", rest) for begin, rest in rules]
            )
        return hidden(material, domains, facts, questions, prompt=1 / (_TURNS + 1))

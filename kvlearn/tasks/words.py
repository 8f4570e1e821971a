"""Words for tasks that make things up: common ones, so that every tokenizer has them in few pieces."""

from __future__ import annotations

import random


def listed(text: str) -> tuple[str, ...]:
    """Words with spaces between."""
    return tuple(text.split())


ADJECTIVES = listed("velvet copper silent golden crystal scarlet hollow winter amber silver frozen hidden")
NOUNS = listed("falcon river lantern harbor meadow anchor compass orchard beacon willow tiger bridge")
FIRST_NAMES = listed(
    "Oliver Emma James Sophia Henry Alice Daniel Laura Peter Maria Thomas Anna George Helen Victor Clara Samuel Julia "
    "Martin Grace Arthur Ruth Simon Rose"
)
LAST_NAMES = listed(
    "Grant Mercer Whitfield Okafor Marchetti Tanaka Novak Beaumont Fitzgerald Ramirez Sorensen Petrov Hawthorne "
    "Nakamura Eriksson Valdez Kowalski Moreau Ferguson Santoro"
)
CITIES = listed(
    "Paris London Berlin Rome Madrid Vienna Moscow Tokyo Delhi Cairo Sydney Toronto Boston Chicago Dallas Denver Miami "
    "Seattle Dublin Lisbon Prague Warsaw Athens"
)
_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"  # no I, J, O and Q, which are easily taken for others


def digits(rng: random.Random, count: int) -> str:
    """A number of that many digits, the first not zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def letters(rng: random.Random, count: int) -> str:
    """Capital letters."""
    return "".join(rng.choices(_LETTERS, k=count))


def person(rng: random.Random) -> str:
    """A first and a last name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def two_words(rng: random.Random, between: str = " ") -> str:
    """An adjective and a noun."""
    return rng.choice(ADJECTIVES) + between + rng.choice(NOUNS)


def city(rng: random.Random) -> str:
    """The name of one."""
    return rng.choice(CITIES)


def year(rng: random.Random) -> str:
    """A year of the 18th or 19th century."""
    return str(rng.randint(1700, 1899))

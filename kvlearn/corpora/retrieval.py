"""Training text in which what was said once is needed much later: ``retrieval``, made from a seed and other text.

A document is lines of a built-in corpus with facts among them (:mod:`kvlearn.corpora.facts`), most of them in its
first half, and each asked for once or twice at distances that are log-uniform up to the length of the document; some
are never asked for. The answers stand in the text, so that a model that reads it looks back at what was said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from kvlearn.corpora.base import Document, Length, Row, Source
from kvlearn.corpora.facts import MAKERS, Fact, copy
from kvlearn.errors import KvlearnError

NAME = "retrieval"
SUMMARY = "synthetic: facts, lists, rules and passages, and where they are needed again, in text of other corpora"
FILLER = "stdlib+sympy-docs"
"""Corpora whose text lies between, unless ``?filler=A+B`` names others; both are there wherever kvlearn is."""

Split = Callable[[str], str]

_MOST_FACTS = 0.4  # of a document's tokens
_PASSED_BY = 0.15  # facts that nobody asks for
_AGAIN = 0.3  # facts asked for twice
_NEAREST = 0.04  # distance to the question, as a share of the document
_BODY = 0.96  # of the document: the last question ends here, as lengths are not known to the token
_LINE = 300  # characters; longer lines are cut


TYPICAL = Length(2048, lambda text: -(-len(text) // 4))
"""Where no tokenizer tells."""


class _Event(NamedTuple):
    """A text to be put in at a place, a share of the filler; ``tokens`` as measured."""

    place: float
    text: str
    tokens: int


def retrieval_source(fillers: Sequence[Source], split_of: Split, *, domain: str | None) -> Source:
    """The corpus. A document is in the split of its filler, so no training document holds a test document's text.

    Args:
        fillers: Corpora that give the text between, in turn.
        split_of: The split of a text.
        domain: In place of the corpus's own name.
    """

    def rows(seed: int, length: Length | None = None) -> Iterator[Row]:
        length = length or TYPICAL
        for number, (split, filler) in enumerate(_fillers(fillers, split_of, seed, length)):
            rng = random.Random(f"{NAME}\0{seed}\0{number}")
            text = _document(rng, filler, length)
            # The split of a text is a hash of it; a page number, behind the window, brings it to that of its filler.
            yield next(Row(f"{number}", page) for i in count() if split_of(page := f"{text}\n{i}\n") == split)

    return Source(NAME, domain or NAME, rows, sized=rows)


def _fillers(sources: Sequence[Source], split_of: Split, seed: int, length: Length) -> Iterator[tuple[str, list[str]]]:
    """Lines enough for one document, all from texts of one split, with that split."""
    streams = [source.documents(seed) for source in sources]
    gathered: dict[tuple[int, str], list[str]] = {}
    have: dict[tuple[int, str], int] = {}
    while streams:
        for number, stream in enumerate(list(streams)):
            doc = next(stream, None)
            if doc is None:
                streams.remove(stream)
                continue
            key = number, split_of(doc.text)
            lines = _lines(doc, seed, length)
            gathered[key] = gathered.get(key, []) + lines
            have[key] = have.get(key, 0) + sum(map(len, lines))
            if have[key] >= 8 * length.tokens:  # characters; code has fewer to a token
                yield key[1], gathered.pop(key)
                del have[key]


def _lines(doc: Document, seed: int, length: Length) -> list[str]:
    """A stretch of a document, from a line chosen at random: not always its head."""
    lines = [line[:_LINE].rstrip() + "\n" for line in doc.text.splitlines()]
    rng = random.Random(f"{seed}\0{doc.id}")
    start, taken, size = rng.randrange(max(1, len(lines) // 2)), [], 0
    for line in lines[start:]:
        taken.append(line)
        size += len(line)
        if size >= 8 * length.tokens:
            break
    return taken


def _document(rng: random.Random, filler: Sequence[str], length: Length) -> str:
    """Filler of as many tokens as asked for and some more, with facts and questions in the first part."""
    events = _events(rng, filler, length)
    room = length.tokens * _BODY - sum(event.tokens for event in events)
    parts: list[str] = []
    used, pending = 0, sorted(events, key=lambda event: event.place)
    ahead = iter(filler)
    while used < room:
        while pending and pending[0].place * room <= used:
            parts.append(pending.pop(0).text)
        line = next(ahead, None)
        if line is None:
            break
        parts.append(line)
        used += length.measure(line)
    parts += [event.text for event in pending]
    rest = length.tokens // 5  # so that the window is full although lines together are shorter than one by one
    while rest > 0 and (line := next(ahead, None)) is not None:
        parts.append(line)
        rest -= length.measure(line)
    return "".join(parts)


def _events(rng: random.Random, filler: Sequence[str], length: Length) -> list[_Event]:
    """What is put in where, as much of it as there is room for."""
    events: list[_Event] = []
    kinds = rng.sample([*MAKERS, "copy"], rng.randint(2, 4))
    left = length.tokens * _MOST_FACTS
    for kind in kinds:
        # Passages come from lines that are not among the filler of this document.
        facts = copy(rng, filler[2 * len(filler) // 3 :]) if kind == "copy" else MAKERS[kind](rng)
        placed = _placed(rng, facts, length.measure)
        needed = sum(event.tokens for event in placed)
        if needed <= left:
            events += placed
            left -= needed
    return events


def _placed(rng: random.Random, facts: Sequence[Fact], measure: Callable[[str], int]) -> list[_Event]:
    """Facts and their questions, each fact before its questions; a fact that says nothing belongs to the one before."""
    events: list[_Event] = []
    place = 0.0
    for fact in facts:
        if fact.said:
            place = 0.0 if fact.first else 0.02 + 0.55 * rng.random() ** 1.5
            events.append(_Event(place, fact.said, measure(fact.said)))
        if not fact.first and fact.said and rng.random() < _PASSED_BY:
            continue
        cost = measure(fact.asked)
        for _ in range(2 if rng.random() < _AGAIN else 1):
            most = 1.0 - place
            distance = rng.uniform(0.7, 1.0) if fact.first else _NEAREST * (most / _NEAREST) ** rng.random()
            events.append(_Event(place + distance, fact.asked, cost))
    return events


def check_fillers(names: str, item: str) -> list[str]:
    """The names in ``A+B``.

    Raises:
        KvlearnError: One is empty, or this corpus itself.
    """
    found = names.split("+")
    if not all(found) or NAME in found:
        raise KvlearnError(f"corpus {item!r}: filler {names!r} does not name built-in corpora, joined by +")
    return found

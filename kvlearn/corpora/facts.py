"""Things made up for training that are said once and asked for much later.

No sentence, no format and no list of words here is one of :mod:`kvlearn.tasks` or of RULER: what is trained on these
and measured there has not learnt the tests' wording. A test holds that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Fact(NamedTuple):
    """One thing to be remembered.

    Attributes:
        said: What is written first.
        asked: What is written later, and can only be written by who remembers: the answer is at its end.
        first: Whether it is said at the very beginning.
    """

    said: str
    asked: str
    first: bool = False


_Maker = Callable[[random.Random], str]

COLOURS = _listed("maroon teal ochre violet indigo beige turquoise lilac khaki magenta cyan olive")
ANIMALS = _listed("otter heron badger lynx walrus gecko puffin moose ferret ibis weasel tapir hornet mole")
TREES = _listed("maple cedar birch walnut hazel spruce alder poplar chestnut larch juniper rowan")
FAMILIES = _listed(
    "Abara Lindqvist Duarte Iyer Halloran Voss Castellano Mbeki Oduya Fontaine Bergstrom Kaplan Rinaldi Sato Trent "
    "Ulrich Wexford Yilmaz Zamora Qureshi"
)
TOWNS = _listed(
    "Bergen Porto Ghent Turin Basel Izmir Lagos Quito Perth Osaka Leeds Tampa Omaha Cusco Malmo Kazan Salem Nantes "
    "Galway Trieste"
)
MONTHS = _listed("January February March April May June July August September October November December")
GREEK = _listed("alpha beta gamma delta epsilon zeta theta kappa lambda sigma omega")
THINGS = _listed(
    "timeout retries depth margin threshold quota width offset limit batch delay ratio radius cutoff backlog stride "
    "padding pressure"
)


def _hexadecimal(rng: random.Random) -> str:
    return f"0x{rng.getrandbits(24):06x}"


def _date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(2, 28)}, {rng.randint(1902, 2039)}"


def _version(rng: random.Random) -> str:
    return f"{rng.randint(1, 19)}.{rng.randint(0, 39)}.{rng.randint(0, 99)}"


def _coordinates(rng: random.Random) -> str:
    return f"{rng.uniform(1, 80):.2f} N, {rng.uniform(1, 170):.2f} E"


def _address(rng: random.Random) -> str:
    return f"{rng.choice(FAMILIES).lower()}.{rng.choice(TREES)}{rng.randint(10, 99)}@example.org"


def _path(rng: random.Random) -> str:
    return f"/srv/{rng.choice(TREES)}/{rng.choice(ANIMALS)}-{rng.randint(100, 999)}.dat"


def _plate(rng: random.Random) -> str:
    return f"{''.join(rng.choices('BDFGHKLMNPRTVXZ', k=3))}-{rng.randint(1000, 9999)}"


def _three(rng: random.Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(TREES)} {rng.choice(ANIMALS)}"


def _quantity(rng: random.Random) -> str:
    return f"{rng.randint(1000, 99999) / 100:.2f} {rng.choice(('kg', 'litres', 'volts', 'euros', 'metres'))}"


def _family(rng: random.Random) -> str:
    return f"Dr. {rng.choice(FAMILIES)} of {rng.choice(TOWNS)}"


# How a note begins, and what ends it.
NOTES: tuple[tuple[str, _Maker], ...] = (
    ("Locker combination for the east wing:", lambda rng: "-".join(str(rng.randint(10, 59)) for _ in range(3))),
    ("The firmware on the backup router was last flashed to release", _version),
    ("Our contact for the shipment goes by", _family),
    ("Specimen jar nine contains a", _three),
    ("The survey marker stands at", _coordinates),
    ("Replies about the grant should be sent to", _address),
    ("The checksum of the archive came out as", _hexadecimal),
    ("The grey van had the licence plate", _plate),
    ("The treaty between both valleys was signed on", _date),
    ("Nightly dumps are written below", _path),
    ("The tank was filled with exactly", _quantity),
    (
        "The lighthouse keeper's dog answers to",
        lambda rng: f"{rng.choice(ANIMALS).title()} {rng.choice(TREES).title()}",
    ),
    ("Ticket", lambda rng: f"#{rng.randint(10000, 99999)} was handed to {rng.choice(FAMILIES)}"),
    ("Room assignments put the choir in", lambda rng: f"hall {rng.choice('ABCDEFGH')}{rng.randint(10, 99)}"),
)
_BEFORE = ("Note to self. ", "FYI: ", "For the record, see below. ", "", "[memo] ", "Keep in mind. ", "")
_AFTER = ("Back to that memo. ", "Looking it up again: ", "To repeat what was noted: ", "", "[memo, again] ", "")


def notes(rng: random.Random) -> list[Fact]:
    """Single sentences, each of another kind."""
    found = []
    for begin, make in rng.sample(NOTES, rng.randint(3, 7)):
        rest = f"{begin} {make(rng)}."
        found.append(Fact(f"\n{rng.choice(_BEFORE)}{rest}\n", f"\n{rng.choice(_AFTER)}{rest}\n"))
    return found


def _entry(rng: random.Random) -> tuple[str, str]:
    key = f"{rng.choice(GREEK)}_{rng.choice(THINGS)}"
    value = rng.choice((_hexadecimal, _version, _plate, lambda r: str(r.randint(100, 99999)), _path))(rng)
    return key, value


# A list of entries: what opens it, one entry, what closes it, and how one entry is spoken of later.
_FORMS: tuple[tuple[str, str, str, str], ...] = (
    ("{{\n", '  "{key}": "{value}",\n', "}}\n", 'config["{key}"]  # -> "{value}"\n'),
    ("[settings]\n", "{key} = {value}\n", "\n", "; effective setting: {key} = {value}\n"),
    ("| name | value |\n|---|---|\n", "| {key} | {value} |\n", "\n", "The table lists {key} | {value} |\n"),
    ("name,value\n", "{key},{value}\n", "\n", "row {key},{value}\n"),
    ("defaults:\n", "  {key}: {value}\n", "\n", "override of   {key}: {value}\n"),
    ("DEFAULTS = dict(\n", "    {key}='{value}',\n", ")\n", "print(DEFAULTS)  # {key}='{value}'\n"),
    ("<options>\n", '  <set key="{key}">{value}</set>\n', "</options>\n", '<get key="{key}">{value}</get>\n'),
)


def listing(rng: random.Random) -> list[Fact]:
    """A list of keys and values, of which some are looked up, each at another time."""
    opening, line, closing, later = rng.choice(_FORMS)
    entries = dict(_entry(rng) for _ in range(rng.randint(5, 16)))
    block = "".join(line.format(key=key, value=value) for key, value in entries.items())
    said = f"\n{opening.format()}{block}{closing.format()}"
    asked = rng.sample(sorted(entries), min(len(entries), rng.randint(2, 6)))
    return [
        Fact(said if not number else "", "\n" + later.format(key=key, value=entries[key]))
        for number, key in enumerate(asked)
    ]


def chain(rng: random.Random) -> list[Fact]:
    """Names bound one to the other, scattered; each is later said to have the value at the bottom of the chain."""
    names = [f"{thing}_{rng.choice(ANIMALS)}" for thing in rng.sample(THINGS, rng.randint(2, 4))]
    value = str(rng.randint(1000, 99999))
    binding, claim = rng.choice(
        (
            ("let {name} := {value};\n", "assert_eq!({name}, {bottom});\n"),
            ("{name} <- {value}\n", "stopifnot(identical({name}, {bottom}))\n"),
            ("export {name}={value}\n", "echo ${name}  # prints {bottom}\n"),
            ("#define {name} {value}\n", "static_assert({name} == {bottom});\n"),
        )
    )
    found, before = [], value
    for name in names:
        said = "\n" + binding.format(name=name, value=before)
        found.append(Fact(said, f"\n{said.strip()}\n{claim.format(name=name, bottom=value)}"))
        before = name
    return found


def definition(rng: random.Random) -> list[Fact]:
    """Terms explained once and spelled out again when they come back."""
    found = []
    for thing in rng.sample(THINGS, rng.randint(2, 4)):
        term = f"{rng.choice(COLOURS)} {thing}"
        meaning = f"the {rng.choice(THINGS)} of a {_three(rng)} after {rng.randint(3, 90)} days"
        said = f"\n**{term.title()}**: by this we mean {meaning}.\n"
        found.append(Fact(said, f"\nHere the {term} matters, that is, {meaning}.\n"))
    return found


def rule(rng: random.Random) -> list[Fact]:
    """An instruction at the very beginning that each reply obeys, the last ones far away from it."""
    form, closing = rng.choice(
        (
            ("SYSTEM> Every reply ends with the line {text}\n", "\nBOT> Done as you wished.\n{text}\n"),
            ("# Convention for this file: every section is closed by {text}\n", "\n# end of section\n{text}\n"),
            ("<policy>Sign each message as {text}</policy>\n", "\n<message>Noted, will do.</message>\n{text}\n"),
            ("Editor's request: after each chapter print {text}\n", "\n(Here the chapter ends.)\n{text}\n"),
        )
    )
    text = rng.choice(
        (f"-- {_three(rng)} --", f"// {_family(rng)}, {_date(rng)}", f"ref {_plate(rng)} {_version(rng)}")
    )
    asked = closing.format(text=text)
    return [Fact(form.format(text=text), asked, first=True), *[Fact("", asked)] * rng.randint(1, 2)]


def copy(rng: random.Random, lines: Sequence[str]) -> list[Fact]:
    """A passage of real text that is quoted word by word later."""
    count = rng.randint(2, 5)
    start = rng.randrange(max(1, len(lines) - count))
    passage = "".join(lines[start : start + count]).strip("\n")
    if not passage.strip():
        return []
    return [Fact(f"\n{passage}\n", f"\n> {passage}\n" if rng.random() < 0.5 else f"\n{passage}\n")]


MAKERS: dict[str, Callable[[random.Random], list[Fact]]] = {
    "notes": notes,
    "listing": listing,
    "chain": chain,
    "definition": definition,
    "rule": rule,
}
"""All but copies, which need a text to copy from."""

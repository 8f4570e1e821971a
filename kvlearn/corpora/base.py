"""What every source of text has in common: documents, and an order that depends on a seed and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        text: The text itself, never empty.
        domain: What kind of text it is; results are reported by domain.
        source: The corpus it comes from, as the user named it.
        id: Names the document within its source, the same in every run: a path, a path and a row, or a hash.
    """

    text: str
    domain: str
    source: str
    id: str


class Row(NamedTuple):
    """One text as a reader finds it; ``domain`` is None unless the row names its own."""

    id: str
    text: str
    domain: str | None = None


class Length(NamedTuple):
    """How long documents are: ``tokens``, as ``measure`` counts them."""

    tokens: int
    measure: Callable[[str], int]


@dataclass(frozen=True)
class Source:
    """A corpus that was found and checked, not yet read.

    Attributes:
        name: As the user named it.
        domain: Domain of the rows that do not name their own.
        rows: Takes a seed, gives the rows in that seed's order, one at a time.
        sized: Likewise, but makes rows of a given length; None where the length is what it is.
    """

    name: str
    domain: str
    rows: Callable[[int], Iterator[Row]]
    sized: Callable[[int, Length | None], Iterator[Row]] | None = None

    def documents(self, seed: int, length: Length | None = None) -> Iterator[Document]:
        """All documents that hold anything but white space, in the order of ``seed``.

        Args:
            seed: Of the order.
            length: Of documents that are made, not found.
        """
        for row in self.sized(seed, length) if self.sized else self.rows(seed):
            if row.text and not row.text.isspace():
                yield Document(row.text, row.domain or self.domain, self.name, row.id)


def seeded_hash(key: str, seed: int) -> int:
    """64 bits that depend on the key and the seed only, on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest(), "big")


def in_seeded_order(keys: Iterable[str], seed: int) -> list[str]:
    """Distinct keys in an order that depends on the seed; adding a key moves no other two past each other."""
    return sorted(keys, key=lambda key: (seeded_hash(key, seed), key))


def seeded_permutation(count: int, label: str, seed: int) -> npt.NDArray[np.int64]:
    """The numbers below ``count`` in an order that depends on label and seed, at 16 bytes each; shape [count]."""
    hashes = np.fromiter((seeded_hash(f"{label}\0{i}", seed) for i in range(count)), dtype=np.uint64, count=count)
    return np.argsort(hashes, kind="stable")

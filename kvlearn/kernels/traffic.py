"""Bytes of each kernel, counted: those it must move, and those its programs ask for.

``must`` reads every input once and writes every output once. ``moves`` is the sum of what all programs load and store:
queries that several tiles read, parts that are joined, a second pass over scores. Repeated reads of small operands
mostly hit the second-level cache, so the ratio of the two bounds the gap to the memory's speed from above.
A test compares ``moves`` with a count of the loads and stores that Triton's interpreter carries out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlearn import history
from kvlearn.features import DYNAMIC
from kvlearn.kernels.launch import Parameters

_FIELDS = len(history.FIELDS)
_STATE = 2 * _FIELDS  # bytes of one slot's history
_POS = 4
_FLOAT = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch (two, where parts are joined)."""

    must: int
    moves: int

    @property
    def ratio(self) -> float:
        """``moves / must``."""
        return self.moves / self.must


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; letters as in :mod:`kvlearn.shapes`.

    Attributes:
        element: bytes of one number of queries, keys and values.
        block: queries per block, ``W``.
        inputs: static score inputs, ``R``.
        hidden: hidden units of the scorer.
    """

    batch: int = 1
    heads: int = 8
    group: int = 4
    slots: int = 2048
    dim: int = 128
    element: int = 2
    block: int = 32
    inputs: int = 18
    hidden: int = 32

    @property
    def all_slots(self) -> int:
        """Slots of all rows and heads."""
        return self.batch * self.heads * self.slots

    @property
    def query_heads(self) -> int:
        """Query heads of all rows."""
        return self.batch * self.heads * self.group


def attend(shape: Shape, chosen: Parameters, splits: int, queries: int = 1) -> Traffic:
    """Decode attention without a mask: ``attend``, and ``join`` when there are several splits."""
    rows = shape.query_heads * queries
    tiles = -(-shape.group * queries // chosen["rows"])
    query = rows * shape.dim * shape.element
    keys_values = 2 * shape.all_slots * shape.dim * shape.element
    result = query + rows * _FLOAT
    moves = splits * query + tiles * keys_values + result
    if splits > 1:
        moves += 2 * splits * rows * (shape.dim + 1) * _FLOAT
    return Traffic(query + keys_values + result, moves)


def observe(shape: Shape, chosen: Parameters) -> Traffic:
    """Observation of one block: mass of every slot, folded into its history."""
    tiles = -(-shape.slots // chosen["slots"])
    keys = shape.all_slots * shape.dim * shape.element
    queries = shape.query_heads * shape.block * (shape.dim * shape.element + _FLOAT)
    positions = shape.batch * shape.block * _POS
    own = keys + shape.all_slots * (_POS + 2 * _STATE)
    return Traffic(own + queries + positions, own + tiles * (queries + shape.heads * positions))


def observe_cached(shape: Shape) -> int:
    """Bytes that observation must move when attention has left the keys in the second-level cache."""
    return observe(shape, {"slots": shape.slots}).must - shape.all_slots * shape.dim * shape.element


def forecast(shape: Shape, chosen: Parameters) -> Traffic:
    """Features and scorer of every slot."""
    tiles = -(-shape.slots // chosen["slots"])
    units = 1 + shape.hidden
    weights = (units * (len(DYNAMIC) + shape.inputs + 1) + shape.hidden) * _FLOAT
    length = 8
    own = shape.all_slots * (_STATE + _POS + _FLOAT)
    static = shape.all_slots * 2 * shape.inputs
    programs = tiles * shape.batch * shape.heads
    passes = -(-max(1, shape.hidden) // chosen["units"])  # each tile of hidden units reads the static inputs
    must = own + static + shape.heads * weights + shape.batch * length
    return Traffic(must, own + passes * static + programs * (weights + length))


def select(shape: Shape, count: int) -> Traffic:
    """The ``count`` first victims of every row and head, by the top-k kernel, which passes over the scores twice."""
    own = shape.all_slots * (_FLOAT + _POS + 1)
    out = shape.batch * shape.heads * count * 8
    return Traffic(own + out, 2 * own + out)


def write(shape: Shape) -> Traffic:
    """One new token per row: key, value, position."""
    tokens = shape.batch * shape.heads
    own = tokens * (2 * 2 * shape.dim * shape.element + 8 + _POS)  # 8: the slot's index
    return Traffic(own + shape.batch * _POS, own + tokens * _POS)


def settle(shape: Shape) -> Traffic:
    """A block's tokens once more: static inputs, and history cleared; the kernel writes keys and values again."""
    tokens = shape.batch * shape.heads * shape.block
    must = tokens * (2 * 2 * shape.inputs + 8 + _STATE)
    return Traffic(must, must + tokens * (2 * 2 * shape.dim * shape.element + 2 * _POS))


def accumulating(shape: Shape) -> int:
    """Bytes that a decode step would add if it gathered block mass itself, at the least.

    The share of a slot is known only when all splits are joined, so logits (16 bits for each query head) must be
    written and read again, and the two sums of each slot read and written.
    """
    return shape.all_slots * (2 * 2 * shape.group + 2 * 2 * _FLOAT)

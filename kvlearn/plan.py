"""What a comparison measures, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlearn import policies
from kvlearn.policies.base import Policy
from kvlearn.policies.composed import Composed, Part
from kvlearn.policies.oracle import Foresight, Oracle
from kvlearn.tasks.base import Case, Task


@dataclass(frozen=True)
class Cell:
    """One policy at one budget with one seed, on one task."""

    task: Task
    spec: str
    policy: Policy | None  # None for the oracle, which is made anew for every batch of cases
    budget: int
    seed: int
    reduce: Foresight | None = None  # of the oracle
    part: Part | None = None  # where the policy decides; the oracle does elsewhere

    @property
    def label(self) -> str:
        """What rows call the policy."""
        return self.spec if self.policy is None else self.policy.label

    @property
    def kind(self) -> str:
        """The policy's role."""
        return "oracle" if self.policy is None else self.policy.kind


@dataclass(frozen=True)
class Group:
    """Cases of one shape, and the cells that they are measured in."""

    task: Task
    batch: Sequence[Case]
    cells: Sequence[Cell]
    before: int  # cells of earlier groups


@dataclass(frozen=True)
class Reference:
    """What the full cache gave for some cases: its results, oracles by how they read the future, and its bytes."""

    full: Any
    oracles: dict[Foresight, Oracle]
    bytes: int

    def policy_of(self, cell: Cell) -> Policy:
        """What evicts in a cell."""
        if cell.reduce is None:
            assert cell.policy is not None
            return cell.policy
        oracle = self.oracles[cell.reduce]
        if cell.policy is None or cell.part is None:
            return oracle
        return Composed(cell.policy, oracle, cell.part)


def oracles_of(specs: Sequence[str]) -> list[str]:
    """Those of some policies that are oracles."""
    return [spec for spec in specs if (parsed := policies.parse(spec)) is not None and parsed[0] == Oracle.name]


def foresight(spec: str) -> Foresight:
    """How the oracle that ``spec`` names reads the future.

    Raises:
        KvlearnError: an option is unknown.
    """
    parsed = policies.parse(spec)
    reduce: Foresight = "discounted" if parsed is None else parsed[1].get("reduce", "discounted")
    return reduce

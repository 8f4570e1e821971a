"""Comparisons by name: ``kvlearn compare MODEL --preset small``."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass
from pathlib import Path

from kvlearn.errors import KvlearnError
from kvlearn.policies import POLICIES
from kvlearn.policies.oracle import Oracle
from kvlearn.shipped import shipped
from kvlearn.tasks import TASKS


@dataclass(frozen=True)
class Preset:
    """What ``kvlearn compare`` measures when it is not told.

    Attributes:
        policies: names and folders of scorers; ``None``: they must be given.
        budgets: slots per KV head and layer.
        tasks: names.
        docs: documents of each task.
        window: tokens of each; ``None`` is what a task takes by default.
        batch: documents measured together.
    """

    policies: tuple[str, ...] | None
    budgets: tuple[int, ...] = (256, 512)
    tasks: tuple[str, ...] = ("lm",)
    docs: int = 12
    window: int | None = None
    batch: int = 4


def preset(name: str | None, model: str) -> Preset:
    """A preset by its name; without one, the defaults of ``kvlearn compare``.

    ``small`` has every policy and every task at two budgets, small enough for twenty minutes on two cores with a model
    of 135 million parameters; its windows are the shortest that every task fits into. A scorer that comes with kvlearn
    for ``model`` is among the policies.

    Raises:
        KvlearnError: there is no such preset.
    """
    if name is None:
        return Preset(None)
    if name != "small":
        near = difflib.get_close_matches(name, ["small"], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KvlearnError(f"unknown preset {name!r}; {hint}there is small.")
    policies = [policy for policy in POLICIES if policy == Oracle.name or _needs_nothing(policy)]
    if Path(model).name == model:  # folders and Hub ids are no names of what comes along
        with contextlib.suppress(KvlearnError):
            shipped("checkpoints", model)
            policies.append(f"checkpoints/{model}")
    return Preset(tuple(policies), budgets=(96, 192), tasks=tuple(TASKS), docs=4, window=448, batch=4)


def _needs_nothing(policy: str) -> bool:
    """Whether a name alone makes the policy: not where it needs a scorer, other policies, or a press of kvpress."""
    try:
        POLICIES[policy]()
    except KvlearnError:
        return False
    return True

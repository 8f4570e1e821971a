"""Tasks by name: what a policy is measured on. One file each; :data:`TASKS` is the one registry."""

from __future__ import annotations

import difflib

from kvlearn.errors import KvlearnError
from kvlearn.tasks.base import Task
from kvlearn.tasks.delayed_copy import DelayedCopy
from kvlearn.tasks.kv_recall import KeyValueRecall
from kvlearn.tasks.lm import LanguageModelling
from kvlearn.tasks.multi_turn import MultiTurn
from kvlearn.tasks.passkey import Passkey
from kvlearn.tasks.prompts import CONTAINS, SUFFIX, Prompts
from kvlearn.tasks.ruler import KINDS, PREFIX, Ruler
from kvlearn.tasks.summary_needle import SummaryNeedle
from kvlearn.tasks.variable_tracking import VariableTracking

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        LanguageModelling,
        Passkey,
        KeyValueRecall,
        VariableTracking,
        DelayedCopy,
        MultiTurn,
        SummaryNeedle,
    )
}


def names() -> list[str]:
    """Every task that has a name."""
    return [*TASKS, *(PREFIX + kind for kind in KINDS)]


def catalogue() -> list[Task]:
    """One of every task, as ``kvlearn tasks`` lists them."""
    prompts = Prompts(f"FILE{SUFFIX}")
    prompts.name, prompts.variants = f"FILE{SUFFIX}", ()
    return [*(resolve(name) for name in names()), prompts]


def resolve(name: str) -> Task:
    """A task from its name, or from a file of prompts (see :class:`Prompts`).

    Raises:
        KvlearnError: the name is unknown (the nearest one is suggested).
    """
    if name.removesuffix(CONTAINS).endswith(SUFFIX):
        return Prompts(name)
    if name.startswith(PREFIX):
        return Ruler(name.removeprefix(PREFIX))
    if name not in TASKS:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KvlearnError(f"unknown task {name!r}; {hint}known are {', '.join(sorted(names()))}, and FILE{SUFFIX}.")
    return TASKS[name]()

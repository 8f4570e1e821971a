"""Comparisons by name: ``kvlearn compare MODEL --preset small``."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvlearn.allocation import read_shares
from kvlearn.errors import KvlearnError
from kvlearn.policies import POLICIES
from kvlearn.policies.oracle import Oracle
from kvlearn.shipped import shipped
from kvlearn.tasks import TASKS

HELD_OUT = "git-docs,transformers-code,chitchat"
"""Built-in corpora of three kinds of text that the shipped scorers were not trained on."""

RETRIEVAL = ("kv-recall", "passkey")
"""Tasks whose questions come long after what they ask for, and that SmolLM2-135M solves with the full cache."""


@dataclass(frozen=True)
class Part:
    """Tasks that are measured alike.

    Attributes:
        tasks: names.
        budgets: slots per KV head and layer.
        window: tokens of each document; ``None`` is what a task takes by default.
        docs: documents of each task.
        batch: documents measured together.
    """

    tasks: tuple[str, ...] = ("lm",)
    budgets: tuple[int, ...] = (256, 512)
    window: int | None = None
    docs: int = 12
    batch: int = 4


@dataclass(frozen=True)
class Preset:
    """What ``kvlearn compare`` measures when it is not told.

    Attributes:
        policies: names and folders of scorers; ``None``: they must be given.
        parts: what is measured, one after the other.
        data: texts for language modelling.
        allocation: how slots are shared among layers and heads.
    """

    policies: tuple[str, ...] | None
    parts: tuple[Part, ...] = (Part(),)
    data: str = "transformers-code,chitchat"
    allocation: str = "uniform"

    def narrowed(self, tasks: Sequence[str] | None, **changes: object) -> tuple[Part, ...]:
        """The parts as a command changes them.

        Args:
            tasks: only these: parts that have none of them are left out. Tasks that no part has are measured as the
                first part is. ``None`` leaves all.
            **changes: fields of :class:`Part`; ``None`` leaves what it is.
        """
        parts = self.parts
        if tasks is not None:
            known = {name for part in parts for name in part.tasks}
            wanted = [tuple(name for name in tasks if name in part.tasks) for part in parts]
            wanted[0] += tuple(name for name in tasks if name not in known)
            parts = tuple(replace(part, tasks=names) for part, names in zip(parts, wanted, strict=True) if names)
        given = {name: value for name, value in changes.items() if value is not None}
        parts = parts or (replace(self.parts[0], tasks=()),)
        return tuple(dict.fromkeys(replace(part, **given) for part in parts))  # type: ignore[arg-type]  # as they are


def preset(name: str | None, model: str) -> Preset:
    """A preset by its name; without one, the defaults of ``kvlearn compare``.

    ``small`` has every policy and every task at two budgets, small enough for twenty minutes on two cores with a model
    of 135 million parameters; its windows are the shortest that every task fits into. ``evidence`` is what the model
    card of a shipped scorer rests on: text of domains that it was not trained on, at four sizes of cache, and questions
    about what was said long ago, hours. Every policy has the layers' shares that the model's shipped scorer recommends,
    if there are any, and the heads of a layer share its slots. A scorer that comes with kvlearn for ``model`` is among
    the policies of both.

    Raises:
        KvlearnError: there is no such preset.
    """
    if name is None:
        return Preset(None)
    if name == "small":
        return Preset(_policies(model), (Part(tuple(TASKS), budgets=(96, 192), window=448, docs=4),))
    if name == "evidence":
        parts = (
            Part(("lm",), budgets=(128, 256, 512), window=2048, docs=24, batch=12),
            Part(("lm",), budgets=(512,), window=8192, docs=24, batch=6),
            Part(RETRIEVAL, budgets=(256,), window=2048, docs=16, batch=8),
        )
        # What the full cache does is in every row. Of the moving averages "ema", with a half-life of 64, loses least on
        # the validation split of the same texts (docs/forecast.md).
        policies = tuple(policy for policy in _policies(model) if policy != "full")
        return Preset(policies, parts, data=HELD_OUT, allocation=_recommended(model))
    near = difflib.get_close_matches(name, ["small", "evidence"], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise KvlearnError(f"unknown preset {name!r}; {hint}there are small and evidence.")


def _recommended(model: str) -> str:
    """An allocation for ``--allocation``."""
    with contextlib.suppress(KvlearnError):
        read_shares(shipped("checkpoints", model))
        return f"pooled:checkpoints/{model}"
    return "pooled"


def _policies(model: str) -> tuple[str, ...]:
    """Every policy that a name alone makes, and the scorer that comes along for the model."""
    policies = [policy for policy in POLICIES if policy == Oracle.name or _needs_nothing(policy)]
    if Path(model).name == model:  # folders and Hub ids are no names of what comes along
        with contextlib.suppress(KvlearnError):
            shipped("checkpoints", model)
            policies.append(f"checkpoints/{model}")
    return tuple(policies)


def _needs_nothing(policy: str) -> bool:
    """Whether a name alone makes the policy: not where it needs a scorer, other policies, or a press of kvpress."""
    try:
        POLICIES[policy]()
    except KvlearnError:
        return False
    return True

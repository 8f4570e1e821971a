"""Eviction policies by name.

One file per policy; :data:`POLICIES` is the one registry. :func:`resolve` turns what a user gives (a name, a policy, a
scorer or a scorer's folder) into a policy.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy
from kvlearn.policies.ema import Ema
from kvlearn.policies.full import Full
from kvlearn.policies.h2o import H2O
from kvlearn.policies.streaming import Streaming

if TYPE_CHECKING:
    from kvlearn.scorers import Scorer

POLICIES: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Add a policy class to the registry; usable as a decorator by other packages.

    Raises:
        KvlearnError: the name is taken.
    """
    if policy.name in POLICIES:
        raise KvlearnError(
            f"a policy named {policy.name!r} is registered already: {POLICIES[policy.name].__qualname__}."
        )
    POLICIES[policy.name] = policy
    return policy


for _policy in (Full, Streaming, H2O, Ema):
    register(_policy)


def resolve(policy: str | Policy | Scorer, **options: Any) -> Policy:
    """A policy from its name, a scorer's folder or Hub id, a scorer, or itself.

    Raises:
        KvlearnError: the name is unknown (the nearest one is suggested).
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in POLICIES:
            return POLICIES[policy](**options)
        if "/" in policy or Path(policy).is_dir():
            from kvlearn.policies.learned import Learned
            from kvlearn.scorers import Scorer

            return Learned(Scorer.from_pretrained(policy))
        near = difflib.get_close_matches(policy, POLICIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KvlearnError(
            f"unknown policy {policy!r}; {hint}known are {', '.join(sorted(POLICIES))}, or a scorer's folder."
        )
    from kvlearn.policies.learned import Learned

    return Learned(policy)

"""Eviction policies by name.

One file per policy; :data:`POLICIES` is the one registry. :func:`resolve` turns what a user gives (a name with or
without options, a policy, a scorer or a scorer's folder) into a policy.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy
from kvlearn.policies.caote import Caote
from kvlearn.policies.ema import Ema
from kvlearn.policies.expected_attention import ExpectedAttention
from kvlearn.policies.full import Full
from kvlearn.policies.g_kv import GKV
from kvlearn.policies.h2o import H2O
from kvlearn.policies.h2o_exposure import H2OExposure
from kvlearn.policies.keydiff import KeyDiff
from kvlearn.policies.keynorm import KeyNorm
from kvlearn.policies.kvpress import KVPress
from kvlearn.policies.kvpress_decoding import KVPressDecoding
from kvlearn.policies.lazy_eviction import LazyEviction
from kvlearn.policies.learned import Learned
from kvlearn.policies.options import check_options, parse_options
from kvlearn.policies.oracle import Oracle
from kvlearn.policies.protected_random import ProtectedRandom
from kvlearn.policies.q_filters import QFilters
from kvlearn.policies.r_kv import RKV
from kvlearn.policies.random import Random
from kvlearn.policies.scissorhands import Scissorhands
from kvlearn.policies.snapkv import SnapKV
from kvlearn.policies.streaming import Streaming
from kvlearn.policies.tova import Tova
from kvlearn.shipped import scorer_folder, shipped_scorers

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


for _policy in (
    Full,
    Random,
    ProtectedRandom,
    Streaming,
    H2O,
    H2OExposure,
    Tova,
    SnapKV,
    Ema,
    KeyNorm,
    KeyDiff,
    Scissorhands,
    LazyEviction,
    GKV,
    RKV,
    ExpectedAttention,
    QFilters,
    Caote,
    KVPress,
    KVPressDecoding,
    Learned,
    Oracle,
):
    register(_policy)


def parse(name: str) -> tuple[str, dict[str, Any]] | None:
    """Registered name and options of what a user typed, such as ``"ema:half_life=16"``.

    Returns:
        ``("ema", {"half_life": 16})``, or ``None`` when no policy has that name (it may be a scorer's folder).

    Raises:
        KvlearnError: an option is unknown or its value has the wrong type.
    """
    known, colon, options = name.partition(":")
    if known not in POLICIES:
        return None
    return known, parse_options(POLICIES[known], options) if colon else {}


def resolve(policy: str | Policy | Scorer, **options: Any) -> Policy:
    """A policy from its name, a scorer's folder or Hub id, a scorer, or itself.

    Args:
        policy: a name or folder may carry options: ``"ema:half_life=16"``, ``"snapkv:kernel=7:pooling=max"``,
            ``"my/scorer:inputs=int8"``.
        **options: further options for a name or folder.

    Raises:
        KvlearnError: the name is unknown or an option is (the nearest is suggested).
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        parsed = parse(policy)
        if parsed is not None:
            check_options(POLICIES[parsed[0]], options)
            return POLICIES[parsed[0]](**{**parsed[1], **options})
        folder, _, text = (policy, "", "") if Path(policy).is_dir() else policy.partition(":")
        if "/" in folder or Path(folder).is_dir():
            check_options(Learned, options)
            options = {**(parse_options(Learned, text) if text else {}), **options}
            return Learned(_scorer(folder), policy, **options)
        name = policy.partition(":")[0]
        near = difflib.get_close_matches(name, [*POLICIES, *shipped_scorers()], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KvlearnError(
            f"unknown policy {name!r}; {hint}known are {', '.join(sorted(POLICIES))}, or a scorer's folder "
            f"({scorers_there_are()})."
        )
    from kvlearn.scorers import Scorer

    if not isinstance(policy, Scorer):
        raise KvlearnError(f"policy is {policy!r}; give a name, a scorer's folder, a Scorer or a Policy.")
    return Learned(policy)


def scorers_there_are() -> str:
    """Which scorers a user may name, and how to make one, in words."""
    known = shipped_scorers()
    come = f"{', '.join(known)} {'comes' if len(known) == 1 else 'come'} with kvlearn; " if known else ""
    return f"{come}`kvlearn trace` and `python -m train` make others"


def _scorer(folder: str) -> Scorer:
    from kvlearn.scorers import Scorer

    try:
        return Scorer.from_pretrained(scorer_folder(folder))
    except KvlearnError as error:
        if Path(folder).exists():
            raise
        raise KvlearnError(f"{str(error).rstrip('.')}; {scorers_there_are()}.") from error

"""How a total of slots is shared among layers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from kvlearn.errors import KvlearnError
from kvlearn.shipped import scorer_folder

POOLED = "pooled"
"""The heads of a layer share its slots; ``pooled:FILE`` also shares slots among layers."""


def layer_budgets(shares: Sequence[float], budget: int, *, least: int) -> list[int]:
    """Slots per layer in proportion to ``shares``, with the same total as ``budget`` for every layer.

    Args:
        shares: one positive number per full-attention layer; only their ratios matter.
        budget: mean slots per layer.
        least: no layer gets less (protection plus one block).

    Returns:
        Whole numbers of slots whose sum is ``budget * len(shares)``.

    Raises:
        KvlearnError: ``budget`` is below ``least``, or a share is not a positive number.
    """
    if not shares or any(not (math.isfinite(share) and share > 0) for share in shares):
        raise KvlearnError(f"an allocation is one positive number per layer, not {list(shares)!r}.")
    if budget < least:
        raise KvlearnError(f"budget is {budget} slots, below the {least} that every layer needs at least.")
    total = budget * len(shares)
    free = set(range(len(shares)))
    exact = [0.0] * len(shares)
    while free:  # layers that would fall below the least get the least; the rest is shared among the others
        rest = total - least * (len(shares) - len(free))
        weight = sum(shares[i] for i in free)
        low = {i for i in free if rest * shares[i] / weight < least}
        for i in free:
            exact[i] = least if i in low else rest * shares[i] / weight
        if not low:
            break
        free -= low
    slots = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (slots[i] - exact[i], i))
    for i in by_remainder[: total - sum(slots)]:
        slots[i] += 1
    return slots


def recommended_budgets(shares: Sequence[float] | None, budget: object, *, least: int, policy: str) -> list[int | None]:
    """Slots per layer as a policy recommends them, with a mean of ``budget``.

    Args:
        shares: what the policy recommends, if anything.
        budget: what the caller asked for.
        least: no layer gets less.
        policy: its label.

    Raises:
        KvlearnError: the policy recommends nothing, or ``budget`` is not one number.
    """
    if shares is None:
        raise KvlearnError(
            f"policy {policy!r} recommends no allocation: calibrate one (`kvlearn calibrate`), or use another "
            "allocation than 'scorer'."
        )
    if not isinstance(budget, int):
        raise KvlearnError(f"allocation='scorer' shares out one number of slots, and budget is {budget!r}.")
    return [*layer_budgets(shares, budget, least=least)]


def split_pooled(allocation: str) -> tuple[bool, str]:
    """Whether the heads of a layer share its slots, and what shares slots among layers, empty for equal layers.

    ``"pooled"`` and ``"pooled:FILE"`` pool heads; anything else is shared among layers as it says.
    """
    kind, colon, rest = allocation.partition(":")
    if kind == POOLED and (rest or not colon):
        return True, rest
    return False, allocation


def read_shares(path: str | Path) -> list[float]:
    """Shares of the layers from a JSON list, or from the ``budgets`` of a scorer's folder.

    Raises:
        KvlearnError: the file is missing or is not a list of numbers.
    """
    file = Path(scorer_folder(str(path)))
    if file.is_dir():
        file = file / "config.json"
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KvlearnError(f"cannot read an allocation from {file}: {error}.") from error
    shares = content.get("budgets") if isinstance(content, dict) else content
    if not isinstance(shares, list) or not all(isinstance(x, int | float) for x in shares):
        raise KvlearnError(f"{file} holds no allocation: a JSON list with one number per layer.")
    return [float(x) for x in shares]

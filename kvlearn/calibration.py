"""Shares of slots for layers, from what it costs to bound some of them while the others hold everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from kvlearn import attention, policies
from kvlearn.blame import WIDTH, bands
from kvlearn.cache import EvictingCache
from kvlearn.costs import Array, cheapest, check_slots, fit_curve
from kvlearn.errors import KvlearnError
from kvlearn.models import fingerprint
from kvlearn.policies.base import Policy
from kvlearn.policies.composed import Composed, Part
from kvlearn.policies.full import Full
from kvlearn.rows import Row, RowStore, field_key, number, write_atomically
from kvlearn.scorers import Scorer
from kvlearn.scorers.config import HeadAllocation
from kvlearn.shapes import Budget, Protection
from kvlearn.shortcut import Shortcut
from kvlearn.support import managed_layers
from kvlearn.tasks.base import Case, Run
from kvlearn.tasks.lm import LanguageModelling

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel

Metric = Literal["kl", "nll"]
Progress = Callable[[str, int, int], None]

POINTS = 4
"""Numbers of slots at which every band is measured, unless told."""

KEY = ("model", "policy", "part", "slots", "doc", "domain", "seed", "window", "block", "protect", "first", "allocation")
"""What tells rows apart; ``first`` is the first token that counts."""

"""How the slots of a layer are shared among its heads."""


@dataclass(frozen=True)
class Calibration:
    """What is measured, and for which budget slots are shared out.

    Args:
        policy: name, or folder of a scorer: what evicts in the layers that are bounded.
        budget: mean slots per KV head and layer.
        slots: numbers of slots at which every band is measured, ascending; by default :func:`default_slots`.
        width: layers per band.
        metric: the cost: ``"kl"``, the divergence from the full cache, or ``"nll"``, the rise of the negative
            log-likelihood of the text, which says the same in the mean and is noisier.
        window: tokens per document.
        batch: documents fed together.
        block: queries per observed block.
        protect: what may not be evicted.
        seed: of a policy that chooses at random.
        allocation: among the heads of a bounded layer: as many slots for each (``"uniform"``), or ``"pooled"``.

    Raises:
        KvlearnError: a number is out of range, or the metric or the allocation unknown.
    """

    policy: str
    budget: int
    slots: Sequence[int] | None = None
    width: int = WIDTH
    metric: Metric = "kl"
    window: int = 2048
    batch: int = 4
    block: int = 32
    protect: Protection = field(default_factory=Protection)
    seed: int = 0
    allocation: HeadAllocation = "uniform"

    def __post_init__(self) -> None:
        if self.allocation not in get_args(HeadAllocation):
            raise KvlearnError(f"allocation is {self.allocation!r}; bands are measured 'uniform' or 'pooled'.")
        for name in ("width", "batch"):
            if getattr(self, name) < 1:
                raise KvlearnError(f"{name} is {getattr(self, name)}; give a number that is 1 or more.")
        if self.metric not in get_args(Metric):
            raise KvlearnError(f"metric is {self.metric!r}; use 'kl' or 'nll'.")
        if not self.least < self.window:
            raise KvlearnError(f"a window of {self.window} tokens never fills {self.least} slots; use a longer one.")
        if min(self.points) < self.least:
            raise KvlearnError(f"slots are {list(self.points)}, and every layer needs {self.least} at least.")
        check_slots(self.points, self.window)

    @property
    def least(self) -> int:
        """Slots that no layer may fall below."""
        return Budget.resolve(self.budget, self.block, self.protect).least

    @property
    def points(self) -> tuple[int, ...]:
        """Slots at which every band is measured."""
        return tuple(self.slots) if self.slots else default_slots(self.least, self.window)


def default_slots(least: int, window: int) -> tuple[int, ...]:
    """:data:`POINTS` numbers, each the same multiple of the one before, from ``least`` to half the window."""
    most = min(window - 1, max(least + POINTS - 1, window // 2))
    return tuple(sorted({round(x) for x in np.geomspace(least, most, POINTS)}))


def check_row(row: Any) -> Row:
    """Return a row of a calibration if it is one.

    Raises:
        KvlearnError: names the field that is missing or wrong.
    """
    if not isinstance(row, dict):
        raise KvlearnError(f"a row is a JSON object, not {type(row).__name__}.")
    row = {"allocation": "uniform", **row}  # rows written before heads could be pooled do not say
    for name in (*KEY, *get_args(Metric)):
        if name not in row:
            raise KvlearnError(f"field {name!r} is missing: this is no row of a calibration.")
    return row


def calibrate(
    loaded: LoadedModel,
    settings: Calibration,
    cases: Sequence[Case],
    rows: Path,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure what each band of layers costs, and share the slots out where they save most.

    Only one band is bounded at a time, and costs are taken to add up.

    Args:
        loaded: model, tokenizer and name.
        settings: what is measured.
        cases: documents (:func:`kvlearn.tasks.lm.text_cases`), all of one length.
        rows: file of measurements; those that it holds are not made again.
        progress: called with what is measured, how many runs are done, and how many there are.

    Returns:
        The allocation, see docs/allocation.md.

    Raises:
        KvlearnError: the policy evicts nothing, or a document is too short.
    """
    model = attention.enable(loaded.model)
    policy = policies.resolve(settings.policy)
    if hasattr(policy, "seed"):
        policy = policies.resolve(settings.policy, seed=settings.seed)
    if policy.kind == "full" or hasattr(policy, "open_cache"):
        raise KvlearnError(f"policy {policy.label!r} does not evict by layers, so there is nothing to calibrate.")
    parts = bands(managed_layers(model)[1], settings.width)
    with RowStore(rows, check=check_row, key=lambda row: field_key(row, KEY)) as store:
        _measure(loaded, settings, policy, parts, cases, store, progress)
        costs = _costs(store.rows, _key(loaded, settings, policy), parts, cases, settings)
    return {**_allocation(settings, parts, costs), **_origin(loaded, settings, policy, cases)}


def _key(loaded: LoadedModel, settings: Calibration, policy: Policy) -> Row:
    protect = settings.protect
    return {
        "model": loaded.name,
        "policy": policy.label,
        "seed": settings.seed,
        "window": settings.window,
        "block": settings.block,
        "protect": f"sinks={protect.sinks},recent={protect.recent or settings.block},prompt={protect.prompt}",
        "first": settings.points[0],
        "allocation": settings.allocation,
    }


def _row(key: Row, part: Part, slots: int, case: Case) -> Row:
    return {**key, "part": str(part), "slots": slots, "doc": case.doc, "domain": case.domain}


def _measure(
    loaded: LoadedModel,
    settings: Calibration,
    policy: Policy,
    parts: Sequence[Part],
    cases: Sequence[Case],
    store: RowStore,
    progress: Progress | None,
) -> None:
    """Rows that the store lacks: batch by batch, all bands at one number of slots before the next."""
    model, task, key = loaded.model, LanguageModelling(), _key(loaded, settings, policy)
    options: Any = {"protect": settings.protect, "block": settings.block}
    managed = managed_layers(model)[1]
    batches = [cases[i : i + settings.batch] for i in range(0, len(cases), settings.batch)]
    runs = [(batch, slots, part) for batch in batches for slots in settings.points for part in parts]
    shortcut = Shortcut(model, [part.members[0] for part in parts])
    full: Any = None
    known: Any = None  # the batch that `full` was made for
    for done, (batch, slots, part) in enumerate(runs):
        if progress is not None:
            progress(f"{part} at {slots}", done, len(runs))
        wanted = [_row(key, part, slots, case) for case in batch]
        if store.done(*wanted):
            continue
        if known is not batch:
            with shortcut.recorded():
                full = task.full(Run(model, loaded.tokenizer, EvictingCache(model, **options)), batch)
            known = batch
        limits = [slots if layer in part.members else None for layer in managed]
        cache = EvictingCache(model, Composed(policy, Full(), part), limits, **options, allocation=settings.allocation)
        with shortcut.from_layer(part.members[0], cache):  # what comes before the band is as in the full run
            measured = task.measure(Run(model, loaded.tokenizer, cache), batch, full, settings.points[0])
        for row, found in zip(wanted, measured, strict=True):
            losses = {one.metric: one.value - one.full_value for one in found}
            row |= {metric: losses[metric] for metric in get_args(Metric)}
        store.append(*wanted)


def _costs(rows: Sequence[Row], key: Row, parts: Sequence[Part], cases: Sequence[Case], settings: Calibration) -> Array:
    """``[bands, points]`` mean over the documents."""
    by_key = {field_key(row, KEY): number(row[settings.metric]) for row in rows}
    costs = [
        [np.mean([by_key[field_key(_row(key, part, slots, case), KEY)] for case in cases]) for slots in settings.points]
        for part in parts
    ]
    found = np.array(costs)
    if not np.isfinite(found).all():
        raise KvlearnError("a cost is not a finite number: the model's output overflows; use another --dtype.")
    return found


def _allocation(settings: Calibration, parts: Sequence[Part], costs: Array) -> dict[str, Any]:
    """Slots of each layer at the least sum of fitted costs, and what that sum is."""
    curves = [fit_curve(settings.points, row, settings.window) for row in costs.tolist()]
    sizes = [len(part.members) for part in parts]
    layers = sum(sizes)
    slots = cheapest(curves, sizes, settings.budget * layers, least=settings.least)
    means = [sum(own) / len(own) for own in slots]
    return {
        "format": 1,
        "budget": settings.budget,
        "slots": [count for own in slots for count in own],
        "budgets": [count / settings.budget for own in slots for count in own],
        "cost": {
            "metric": settings.metric,
            "unit": "nats/token, sum over bands",
            "equal": float(sum(curve(settings.budget) for curve in curves)),
            "allocated": float(sum(curve(mean) for curve, mean in zip(curves, means, strict=True))),
        },
        "measured_at": list(settings.points),
        "bands": [
            {"layers": list(part.members), "cost": cost, "fitted": curve(settings.points).tolist(), "slots": mean}
            for part, cost, curve, mean in zip(parts, costs.tolist(), curves, means, strict=True)
        ],
    }


def _origin(loaded: LoadedModel, settings: Calibration, policy: Policy, cases: Sequence[Case]) -> dict[str, Any]:
    from kvlearn.compare import versions

    return {
        **_key(loaded, settings, policy),
        "model": {"name": loaded.name, **fingerprint(loaded.model)},
        "documents": [{"domain": case.domain, "doc": case.doc} for case in cases],
        "versions": versions(),
    }


def write_allocation(path: Path, allocation: dict[str, Any]) -> None:
    """Write an allocation as JSON, atomically."""
    write_atomically(path, (json.dumps(allocation, indent=1) + "\n").encode())


def scorer_for(folder: Path, loaded: LoadedModel) -> Scorer:
    """The scorer of a folder, if an allocation of the model can go into it.

    Raises:
        KvlearnError: it belongs to another model, or does not score every full-attention layer.
    """
    scorer = Scorer.from_pretrained(folder)
    scorer.check_model(loaded.model)
    managed = managed_layers(loaded.model)[1]
    if list(scorer.config.layers) != managed:
        raise KvlearnError(
            f"{folder} scores layers {list(scorer.config.layers)} of {managed}, and an allocation speaks of all."
        )
    return scorer


def write_into(scorer: Scorer, folder: Path, allocation: dict[str, Any]) -> None:
    """Make an allocation what a scorer recommends, and say in its config where it comes from."""
    told = {name: value for name, value in allocation.items() if name not in ("format", "model", "budgets", "versions")}
    training = {**scorer.config.training, "allocation": told}
    shares = np.array(allocation["budgets"])
    scorer.config = replace(
        scorer.config,
        budgets=tuple(map(float, shares / shares.mean())),
        allocation=allocation["allocation"],
        training=training,
    )
    scorer.save_pretrained(folder)

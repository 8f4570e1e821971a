"""A trace as an object of study: how concentrated, how local and how recurrent attention is, and what foretells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.features import DYNAMIC, dynamic_features
from kvlearn.history import HALF_LIVES, HIT_MASS, decode_mass, encode_mass
from kvlearn.metrics.functional import rank_correlation, recall_at_budget
from kvlearn.report.study import Array, Study
from kvlearn.targets import future_table
from kvlearn.traces import Trace, Window, replay

PERCENTAGES = (80, 90, 95)
SINKS = 4
MOMENTS = 8  # of each window at which the future is looked at

# What is known of a token, and the feature that says it; a minus where less is better.
_PREDICTORS = {
    "last block's mass": "log_last",
    **{f"moving average, half-life {h}": f"log_ema{h}" for h in HALF_LIVES},
    "mean mass since it came": "log_mean",
    "highest mass, decaying": "log_peak",
    "hits, decaying": "hits",
    "time since the last hit": "-log_idle",
    "longest time between hits": "log_gap",
    "age": "-log_age",
}
_OTHERS = ("key's norm, small first", "value's norm")


def study(
    trace: Trace, *, windows: int = 8, moments: int = MOMENTS, progress: Callable[[str, int, int], None] | None = None
) -> Study:
    """Look at some windows of a trace.

    Args:
        trace: of the full cache or on-policy; in an on-policy trace histories are those of the evicting cache, and all
            other figures those of the full-cache run.
        windows: how many windows to look at, evenly spread over the trace.
        moments: of each window at which the future is looked at.
        progress: called with what is done now, how many windows are done, and how many there are.

    Raises:
        KvlearnError: a number is below 1, or the trace's windows are shorter than three blocks.
    """
    if windows < 1 or moments < 1:
        raise KvlearnError(f"windows is {windows} and moments is {moments}; both must be 1 or more.")
    layout = trace.layout
    if layout.blocks < 3:
        raise KvlearnError(f"windows of {layout.blocks} blocks have no future to study; trace longer ones.")
    chosen = np.unique(np.linspace(0, len(trace) - 1, min(windows, len(trace))).round().astype(int))
    means = _Means()
    for done, number in enumerate(chosen):
        if progress is not None:
            progress(f"window {number}", done, len(chosen))
        window = trace.window(int(number))
        mass = decode_mass(window.mean_code)  # [N, L, H, T]
        _concentration(mass, layout.block, means)
        _locality(mass, layout.block, means)
        _recurrence(window, means)
        _prediction(window, moments, means)
    found = {name: means.of(name) for name in means.sums}
    gaps = found["gaps"]
    return Study(
        model=trace.manifest.model,
        data=trace.manifest.data,
        windows=len(chosen),
        boundaries=len(_moments(layout.blocks, moments)),
        tokens=layout.window,
        block=layout.block,
        layers=list(layout.layers),
        heads=layout.heads,
        needed={percent: found[f"needed {percent}"] for percent in PERCENTAGES},
        needed_without_sinks=found["needed without sinks"],
        first=found["first"],
        first_four=found["first four"],
        ages=_ages(layout.window, layout.block),
        beyond=found["beyond"],
        gaps=_gaps(layout.window, layout.block),
        gap_share=gaps / np.maximum(gaps.sum(-1, keepdims=True), 1e-12),
        again=found["again"],
        predictors=[*_PREDICTORS, *_OTHERS],
        correlation=found["correlation"],
        recall=found["recall"],
    )


class _Means:
    """Running means by name, of tensors in which NaN says nothing."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add ``[n, ...]``: ``n`` observations."""
        known = values.isfinite()
        array = values.double().nan_to_num(0.0, 0.0, 0.0).sum(0).numpy()
        self.sums[name] = self.sums.get(name, 0.0) + array
        self._counts[name] = self._counts.get(name, 0) + known.sum(0).numpy()

    def of(self, name: str) -> Array:
        """The mean, NaN where nothing was said."""
        counts = self._counts[name]
        return np.where(counts > 0, self.sums[name] / np.maximum(counts, 1), np.nan)


def _concentration(mass: Tensor, block: int, means: _Means) -> None:
    blocks = mass.shape[0]
    for n in range(2, blocks):
        now = mass[n, ..., : (n + 1) * block]
        total = now.sum(-1, keepdim=True)
        means.add("first", (now[..., 0] / total[..., 0])[None])
        means.add("first four", (now[..., :SINKS].sum(-1) / total[..., 0])[None])
        ordered = now.sort(dim=-1, descending=True).values.cumsum(-1)
        for percent in PERCENTAGES:
            count = (ordered < percent / 100 * total).sum(-1) + 1
            means.add(f"needed {percent}", (count / now.shape[-1])[None])
        rest = now[..., SINKS:].sort(dim=-1, descending=True).values.cumsum(-1)
        count = (rest < 0.9 * rest[..., -1:]).sum(-1) + 1
        means.add("needed without sinks", (count / rest.shape[-1])[None])


def _ages(window: int, block: int) -> list[int]:
    return [block * 2**i for i in range(int(np.log2(window // block)) + 1) if block * 2**i < window]


def _locality(mass: Tensor, block: int, means: _Means) -> None:
    """Mass beyond each age, in blocks that have tokens of that age."""
    blocks = mass.shape[0]
    for place in range(2, blocks):
        now = mass[place, ..., SINKS : (place + 1) * block]
        total = now.sum(-1)
        end = now.shape[-1]
        columns = []
        for age in _ages(blocks * block, block):
            reached = end - age > block
            older = now[..., : max(0, end - age)].sum(-1) / total
            columns.append((older if reached else torch.full_like(older, torch.nan)).nanmean(-1))
        means.add("beyond", torch.stack(columns, dim=-1)[None])


def _gaps(window: int, block: int) -> list[int]:
    limits = [block * 2**i for i in range(int(np.log2(max(2, window // block))))]
    return [*limits, window]


def _recurrence(window: Window, means: _Means) -> None:
    """Intervals between hits: a hit is a block in which some query gave the token a lot."""
    least = int(encode_mass(torch.tensor([HIT_MASS]))[0])
    hit = window.peak_code >= least  # [N, L, H, T]
    blocks = hit.shape[0]
    ordinal = torch.arange(blocks).view(-1, 1, 1, 1)
    latest = torch.where(hit, ordinal, -1).cummax(0).values
    before = torch.cat([torch.full_like(latest[:1], -1), latest[:-1]])
    again = hit & (before >= 0)
    interval = (ordinal - before) * window.block  # [N, L, H, T] queries, where `again`
    layers = hit.shape[1]
    limits = torch.tensor(_gaps(window.layout.window, window.block))
    bins = torch.bucketize(interval, limits).clamp(max=len(limits) - 1)
    counts = torch.stack(
        [torch.bincount(bins[:, layer][again[:, layer]], minlength=len(limits)) for layer in range(layers)]
    )
    means.add("gaps", counts[None].double())
    times = hit.sum(0)  # [L, H, T]
    means.add("again", ((times > 1).sum(-1) / (times > 0).sum(-1))[None])


def _moments(blocks: int, moments: int) -> list[int]:
    return sorted({round(x) for x in np.linspace(2, blocks - 1, moments)})


def _prediction(window: Window, moments: int, means: _Means) -> None:
    """How each statistic ranks the mean mass to come, at several boundaries."""
    boundaries = _moments(window.layout.blocks, moments)
    future = future_table(window.mean_code, window.peak_code, boundaries, block=window.block)
    norms = (-window.keys.decode().norm(dim=-1), window.values.decode().norm(dim=-1))
    for place, (_, state, held) in enumerate(replay(window, boundaries)):
        layers, heads, _, count = state.shape
        pos = torch.arange(count, dtype=torch.int32).expand(layers, heads, count)
        known = dynamic_features(state, pos, torch.full((layers,), count))
        columns = [
            known[..., DYNAMIC.index(feature.lstrip("-"))] * (-1 if feature.startswith("-") else 1)
            for feature in _PREDICTORS.values()
        ]
        columns += [norm[..., :count] for norm in norms]
        mass = future[place, ..., :count]
        budget = max(1, count // 4)
        correlation = [rank_correlation(column, mass, held=held).nanmean(-1) for column in columns]
        recall = [recall_at_budget(column, mass, budget, held=held).nanmean(-1) for column in columns]
        means.add("correlation", torch.stack(correlation)[None])
        means.add("recall", torch.stack(recall)[None])

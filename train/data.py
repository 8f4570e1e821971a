"""Traces as Lightning data."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kvlearn import targets
from kvlearn.errors import KvlearnError
from kvlearn.shapes import Protection
from kvlearn.traces.dataset import Trace
from train.prepared import PreparedSamples
from train.samples import Sample, SampleOptions, Target, make_sample

Weighing = Literal["none"] | targets.Value
"""What a config says of :data:`kvlearn.targets.Value`."""

_SAME = ("layers", "heads", "head_dim", "block")  # of the layout: what all traces of a run must share


class WindowDataset(Dataset[Sample]):
    """Windows of several traces as samples.

    Args:
        windows: the trace and the number in it of each window.
        options: how they become samples.
        reuse: make each window's sample once and keep it on disk; else it is made anew every time, other slots of it
            in every epoch.
    """

    def __init__(self, windows: Sequence[tuple[Trace, int]], options: SampleOptions, reuse: bool = False) -> None:
        self.windows = list(windows)
        self.options = options
        traces = {trace.path: trace for trace, _ in self.windows} if reuse else {}
        self.prepared = {path: PreparedSamples(trace, options) for path, trace in traces.items()}

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """The sample of ``(epoch, window)``: the same whenever and in whichever process it is asked for."""
        epoch, number = key
        trace, index = self.windows[number]
        if not self.prepared:
            return self._make(trace, index, epoch)
        return self.prepared[trace.path].get(index, lambda: self._make(trace, index, 0))

    def _make(self, trace: Trace, index: int, epoch: int) -> Sample:
        options = self.options
        own = zlib.crc32("".join(shard.sha256 for shard in trace.manifest.shards).encode())  # no two traces draw alike
        generator = torch.Generator().manual_seed(hash((options.seed, epoch, own, index)) % 2**63)
        return make_sample(
            trace.window(index),
            self._boundaries(trace, generator),
            target=options.target,
            protect=options.protect,
            slots=options.slots,
            generator=generator,
        )

    def _boundaries(self, trace: Trace, generator: torch.Generator) -> list[int]:
        layout, options = trace.layout, self.options
        low, high = _boundary_range(trace, options)
        count = min(options.boundaries, high - low + 1)
        if options.random:
            return sorted((low + torch.randperm(high - low + 1, generator=generator)[:count]).tolist())
        if count == 1:
            return [(low + high) // 2]
        return sorted({low + (high - low) * i // (count - 1) for i in range(count)} & set(range(1, layout.blocks + 1)))


def _boundary_range(trace: Trace, options: SampleOptions) -> tuple[int, int]:
    """The first and last boundary with enough tokens before and enough future after it."""
    layout = trace.layout
    low = max(1, -(-options.min_tokens // layout.block))
    high = layout.blocks - max(1, -(-options.min_future // layout.block))
    if low > high:
        raise KvlearnError(
            f"trace {trace.path}: windows of {layout.window} tokens are too short for data.min_tokens "
            f"{options.min_tokens} and data.min_future {options.min_future}; lower them, or trace longer windows."
        )
    return low, high


class EpochSampler(Sampler[tuple[int, int]]):
    """A random subset of windows for each epoch, the same for equal seed and epoch.

    Args:
        size: windows there are.
        count: windows per epoch.
        seed: of the choice.
        epoch: asked for the number of the epoch when it begins; Lightning's ``set_epoch`` comes too late for the first
            epoch of a resumed run. Without it the first ``count`` windows come in order, as in epoch 0.
    """

    def __init__(self, size: int, count: int, seed: int, epoch: Callable[[], int] | None = None) -> None:
        self.size, self.count, self.seed, self.epoch = size, count, seed, epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self.epoch is None:
            return iter([(0, i) for i in range(self.count)])
        epoch = self.epoch()
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        order: list[int] = []
        while len(order) < self.count:
            order += torch.randperm(self.size, generator=generator).tolist()
        return iter([(epoch, i) for i in order[: self.count]])


class TraceDataModule(pl.LightningDataModule):
    """Training and validation samples from trace folders.

    On-policy and off-policy traces may be mixed: name them all in ``train``.

    Args:
        train: trace folders to train on, as written by ``kvlearn trace``.
        val: trace folders to validate on. Empty: the last ``holdout`` of each training trace is kept for it.
        holdout: share of each training trace that validation takes when ``val`` is empty.
        horizon: future queries that the forecast covers, each a multiple of the traces' block; 0 is to the end of the
            window. The targets of several horizons are averaged. By default 256, or 0 for discounted mass.
        reduce: what is forecast over the horizon: "mean" mass per query, "max" of block means, "soft-max" of block
            means, or "peak", the max of block maxima; or to the end, the nearer the more, "discounted": max of block
            means plus a little of their sum, or "discounted-peak": max of block maxima.
        sharpness: of "soft-max": 1 is the mean, 32 nearly the max.
        value: what a token's mass is weighed by: "none", or "norm" of its value, or "output", the norm of what the
            value adds to the layer's output, or "deviation", the distance there between it and the mean output of the
            queries to come. The last two need the output projection that `kvlearn trace` keeps. By default "norm" if
            value_power is given, else "none".
        value_power: targets are multiplied by that weight to this power; by default 1. 0 is plain mass.
        sinks: first tokens of each window, never evicted and so neither trained nor measured on.
        recent: last tokens at each boundary, likewise; -1 is one block.
        boundaries_per_window: moments, drawn at random, at which each window is looked at. Reading a window costs more
            than looking at it once more.
        slots_per_boundary: slots drawn at each moment: half of them those with the largest targets, the others at
            random and weighted for all the rest. 0 takes all.
        train_windows: windows to train on, the same in every run: each trace, and each kind of text in it, has its
            share of them. 0 takes all.
        windows_per_epoch: of these, windows drawn for each epoch. 0 takes all.
        val_windows: windows to validate on, likewise. 0 takes all.
        val_boundaries: moments, evenly spaced, at which each of them is measured, over all slots.
        min_tokens: fewest tokens before a moment.
        min_future: fewest tokens after a moment.
        prepare: "reuse": samples are made in the first epoch and kept beside their trace, in TRACE.prepared, for later
            epochs and runs with the same data options and seed; "fresh": every epoch makes them anew, at other moments.
        num_workers: processes that prepare samples; 0 prepares them in the training process.
        seed: of everything drawn here.
    """

    def __init__(
        self,
        train: list[str],
        val: list[str] | None = None,
        holdout: float = 0.1,
        horizon: list[int] | None = None,
        reduce: targets.Reduce = "mean",
        sharpness: float = targets.SHARPNESS,
        value: Weighing | None = None,
        value_power: float | None = None,
        sinks: int = 4,
        recent: int = -1,
        boundaries_per_window: int = 8,
        slots_per_boundary: int = 512,
        train_windows: int = 0,
        windows_per_epoch: int = 0,
        val_windows: int = 0,
        val_boundaries: int = 4,
        min_tokens: int = 256,
        min_future: int = 128,
        prepare: Literal["reuse", "fresh"] = "reuse",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        _at_least("boundaries_per_window", boundaries_per_window, 1)
        _at_least("val_boundaries", val_boundaries, 1)
        for name in (
            "slots_per_boundary",
            "train_windows",
            "windows_per_epoch",
            "val_windows",
            "min_tokens",
            "min_future",
            "num_workers",
        ):
            _at_least(name, self.hparams[name], 0)
        if not 0 < holdout < 1:
            raise KvlearnError(f"data.holdout is {holdout}; give a share between 0 and 1.")
        if not train:
            raise KvlearnError("data.train is empty; name at least one trace folder (kvlearn trace writes them).")
        horizon = horizon or ([0] if reduce in targets.DISCOUNTED else [256])
        weight, power = _weight(value, value_power)
        self.target = Target(tuple(horizon), reduce, power, weight, sharpness)
        self._first_epoch = 0
        self.traces: list[Trace] = []
        self.train_set: WindowDataset | None = None
        self.val_set: WindowDataset | None = None

    def setup(self, stage: str) -> None:
        """Open the traces and check that they belong together."""
        if self.train_set is not None:
            return
        train = [Trace(path) for path in self.hparams["train"]]
        val = [Trace(path) for path in self.hparams["val"] or []]
        self.traces = [*train, *val]
        _check_alike(self.traces)
        for trace in val:
            if any(os.path.samefile(trace.path, other.path) for other in train):
                raise KvlearnError(f"trace {trace.path} is in both data.train and data.val; leave it out of one.")
        parts = [_windows(trace) for trace in train]
        if val:
            held = [_windows(trace) for trace in val]
        else:
            cuts = [len(part) - max(1, round(len(part) * self.hparams["holdout"])) for part in parts]
            held = [part[cut:] for part, cut in zip(parts, cuts, strict=True)]
            parts = [part[:cut] for part, cut in zip(parts, cuts, strict=True)]
        for name, found in (("train", parts), ("val", held)):
            if not any(found):
                raise KvlearnError(f"data.{name}: the traces have no window for it; trace more tokens.")
        options, reuse = self._options(), self.hparams["prepare"] == "reuse"
        self.train_set = WindowDataset(_spread(parts, self.hparams["train_windows"]), options, reuse)
        chosen = _spread(held, self.hparams["val_windows"])
        full = replace(options, boundaries=self.hparams["val_boundaries"], slots=None, random=False)
        self.val_set = WindowDataset(chosen, full, reuse)
        for trace in self.traces:
            self.target.check(trace)
            _boundary_range(trace, options)

    def _options(self) -> SampleOptions:
        block, recent = self.traces[0].layout.block, self.hparams["recent"]
        return SampleOptions(
            boundaries=self.hparams["boundaries_per_window"],
            slots=self.hparams["slots_per_boundary"] or None,
            target=self.target,
            protect=Protection(self.hparams["sinks"], block if recent < 0 else recent),
            min_tokens=self.hparams["min_tokens"],
            min_future=self.hparams["min_future"],
            seed=self.hparams["seed"],
            random=True,
        )

    def prepared(self) -> list[dict[str, Any]]:
        """Where samples are kept: each folder, its windows, how many of them are ready, and bytes of them all."""
        found = []
        for data in (self.train_set, self.val_set):
            for path, kept in data.prepared.items() if data else ():
                windows = [index for trace, index in data.windows if trace.path == path] if data else []
                ready = sum(kept.path(index).is_file() for index in windows)
                size = kept.bytes(len(windows))
                found.append({"folder": str(kept.folder), "windows": len(windows), "ready": ready, "bytes": size})
        return found

    def describe(self) -> dict[str, Any]:
        """Where the data comes from, for the scorer's config."""
        count = {id(trace): 0 for trace in self.traces}
        for trace, _ in self.train_set.windows if self.train_set else ():
            count[id(trace)] += 1
        held = {id(trace): 0 for trace in self.traces}
        for trace, _ in self.val_set.windows if self.val_set else ():
            held[id(trace)] += 1

        def entry(trace: Trace, windows: int) -> dict[str, Any]:
            m = trace.manifest
            on_policy = {"policy": Path(m.policy).name, "budgets": m.budgets} if m.policy else {}
            size = {"windows": windows, "window": m.layout.window, "tokens": windows * m.layout.window}
            return {"text": m.data, "split": m.split, **size, **on_policy, "model": m.model, "dtype": m.dtype}

        return {
            "train": [entry(trace, count[id(trace)]) for trace in self.traces if count[id(trace)]],
            "validation": [entry(trace, held[id(trace)]) for trace in self.traces if held[id(trace)]],
        }

    def train_dataloader(self) -> DataLoader[Sample]:
        """Samples of the epoch's windows."""
        assert self.train_set is not None
        size = len(self.train_set)
        return self._loader(self.train_set, self.hparams["windows_per_epoch"] or size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """The same samples every time."""
        assert self.val_set is not None
        return self._loader(self.val_set, len(self.val_set), shuffle=False)

    def _epoch(self) -> int:
        return max(self.trainer.current_epoch, self._first_epoch) if self.trainer else 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch with which a run resumed from here goes on: Lightning makes its first batches before it counts."""
        assert self.trainer is not None
        done = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return {"epoch": self.trainer.current_epoch + done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with that epoch."""
        self._first_epoch = state_dict["epoch"]

    def _loader(self, data: WindowDataset, count: int, shuffle: bool) -> DataLoader[Sample]:
        workers = self.hparams["num_workers"]
        sampler = EpochSampler(len(data), count, self.hparams["seed"], self._epoch if shuffle else None)
        return DataLoader(
            data,
            batch_size=None,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=2 if workers else None,
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise KvlearnError(f"data.{name} is {value}; give {least} or more.")


def _windows(trace: Trace) -> list[tuple[Trace, int]]:
    return [(trace, i) for i in range(len(trace))]


def _spread(parts: Sequence[list[tuple[Trace, int]]], count: int) -> list[tuple[Trace, int]]:
    """``count`` windows of several traces, of which each trace and each domain in it has its share; all for 0."""
    windows = list(itertools.chain(*parts))
    if not count or count >= len(windows):
        return windows
    # Evenly spaced where those of a domain lie together: in a trace they take turns, and every n-th is of the same one.
    domains = [(number, trace.domains[i]) for number, part in enumerate(parts) for trace, i in part]
    together = sorted(range(len(windows)), key=domains.__getitem__)
    chosen = [together[(2 * i + 1) * len(windows) // (2 * count)] for i in range(count)]
    return [windows[i] for i in sorted(chosen)]


def _weight(value: Weighing | None, power: float | None) -> tuple[targets.Value, float]:
    """What masses are weighed by, and the power of it, from what a config says of them."""
    if value == "none" or (value is None and power is None):
        return "norm", 0.0
    return value or "norm", 1.0 if power is None else power


def _check_alike(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for trace in traces[1:]:
        pairs = {
            "fingerprint": (first.manifest.fingerprint, trace.manifest.fingerprint),
            "group_reduce": (first.manifest.group_reduce, trace.manifest.group_reduce),
            **{name: (getattr(first.layout, name), getattr(trace.layout, name)) for name in _SAME},
        }
        for name, (ours, theirs) in pairs.items():
            if ours != theirs:
                raise KvlearnError(
                    f"traces {first.path} and {trace.path} do not belong together: {name} is {ours} and {theirs}."
                )

"""Trace a model over a text: :func:`trace` wires models, corpora and the cache to :mod:`kvlearn.traces`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvlearn import __version__, corpora
from kvlearn.attention import cache_argument, enable
from kvlearn.cache import EvictingCache
from kvlearn.errors import KvlearnError
from kvlearn.models import LoadedModel, same_weights, tokenizer_hash
from kvlearn.models.projection import output_projection
from kvlearn.policies import POLICIES
from kvlearn.shapes import DEFAULT_BLOCK, GroupReduce
from kvlearn.traces import Feed, Layout, Manifest, TraceWriter, WindowRecorder, collect
from kvlearn.traces.collect import parse_budgets
from kvlearn.traces.projection import PROJECTION, write_projection

_DECIDING = ("torch", "transformers", "pyarrow")  # libraries whose version may change the bytes of a trace

TIMED_WINDOWS = 5
"""Windows that are also run through the plain model, to compare the speed."""


@dataclass(frozen=True)
class TraceReport:
    """What a run of :func:`trace` did.

    Args:
        manifest: of the finished trace.
        traced: tokens traced by this run; fewer than the trace has if it went on from an earlier one.
        seconds: spent on them, writing included and the plain passes excluded.
        pairs: for windows that were also run through the plain model just before (sdpa attention, no cache, all
            logits): seconds of tracing and of the plain forward pass.
    """

    manifest: Manifest
    traced: int = 0
    seconds: float = 0.0
    pairs: tuple[tuple[float, float], ...] = ()

    @property
    def trace_rate(self) -> float:
        """Tokens/s of tracing: the median over :attr:`pairs`, which another program's burst does not move."""
        return self.manifest.layout.window / median(traced for traced, _ in self.pairs)

    @property
    def plain_rate(self) -> float:
        """Tokens/s of the plain forward pass, likewise."""
        return self.manifest.layout.window / median(plain for _, plain in self.pairs)

    @property
    def relative_speed(self) -> float:
        """Median over :attr:`pairs` of the speed of tracing divided by that of the plain forward pass."""
        return median(plain / traced for traced, plain in self.pairs)

    @property
    def bytes(self) -> int:
        """Bytes of the trace's shards."""
        return sum(shard.bytes for shard in self.manifest.shards)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the model's bfloat16 KV cache of the same tokens, full-attention layers only."""
        return self.manifest.windows * self.manifest.layout.cache_bytes


def trace(
    loaded: LoadedModel,
    data: str,
    out: str | os.PathLike[str],
    *,
    tokens: int,
    window: int = 2048,
    policy: str | None = None,
    budget: int | str | None = None,
    split: corpora.Split = "train",
    seed: int = 0,
    block: int = DEFAULT_BLOCK,
    group_reduce: GroupReduce = "mean",
    progress: Callable[[int, int], None] | None = None,
) -> TraceReport:
    """Log what a model's attention does over a text, and keep what its output projection makes of values.

    Args:
        loaded: the model; it is left switched to ``attn_implementation="kvlearn"``.
        data: spec of a corpus, see :mod:`kvlearn.corpora`.
        out: folder of the trace. An unfinished trace of the same arguments is continued there, and a finished one
            gets its output projection if it lacks it.
        tokens: how many to trace, rounded up to whole windows; fewer if the text ends.
        window: tokens per window, a multiple of ``block``.
        policy: trace what a cache under this policy sees, besides the full-cache run; needs ``budget``.
        budget: slots of that cache: a number, a comma-separated list or a range ``"128-512"``, of which each window
            draws one.
        split: of the text.
        seed: of the order of the text and of the drawn budgets.
        block: queries per observed block.
        group_reduce: how the query heads of a KV head are reduced.
        progress: called with the tokens traced so far and the tokens wanted.

    Raises:
        KvlearnError: bad arguments, no text, a full disk, or a folder that holds something else.
    """
    if tokens < 1:
        raise KvlearnError(f"tokens is {tokens}; give a number that is 1 or more.")
    if (policy is None) != (budget is None):
        raise KvlearnError("an on-policy trace needs both a policy and a budget; give both or neither.")
    if loaded.context_length is not None and window > loaded.context_length:
        raise KvlearnError(
            f"the window of {window} tokens is longer than the {loaded.context_length} that {loaded.name} reads; "
            "choose a smaller one."
        )
    source = _Source(loaded, block, group_reduce)
    manifest = Manifest(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        tokenizer=tokenizer_hash(loaded.tokenizer),
        layout=source.layout(window),
        group_reduce=group_reduce,
        data=data,
        split=split,
        seed=seed,
        tokens=tokens,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=loaded.model.device.type,
        threads=torch.get_num_threads(),
        policy=policy,
        budgets=None if budget is None else str(budget),
        policy_sha256=_content_hash(policy),
        versions={"kvlearn": __version__, **{name: importlib.metadata.version(name) for name in _DECIDING}},
    )
    source.check(manifest)
    windows = corpora.corpus_windows(data, loaded.tokenizer, tokens=tokens, window=window, split=split, seed=seed)
    writer = TraceWriter(out, manifest)
    watch = _Watch(source, manifest, writer.done, progress)
    watch.tell()
    finished = collect(
        watch.windows(windows), writer, source.make_feed, device=str(loaded.model.device), progress=watch
    )
    if not (Path(out) / PROJECTION).exists():
        add_projection(loaded, out)
    return watch.report(finished)


def add_projection(loaded: LoadedModel, folder: str | os.PathLike[str]) -> bool:
    """Keep beside a finished trace what the model's output projection makes of values, without tracing again.

    Targets weighed by ``"output"`` or ``"deviation"`` (:data:`kvlearn.targets.Value`) need it.

    Args:
        loaded: the model that was traced.
        folder: the trace.

    Returns:
        Whether the model's projection was found.

    Raises:
        KvlearnError: the folder is no trace, or one of other weights.
    """
    manifest = Manifest.read(Path(folder))
    if not same_weights(manifest.fingerprint, loaded.fingerprint):
        raise KvlearnError(f"{folder} is a trace of {manifest.model} with other weights than {loaded.name} has.")
    layout = manifest.layout
    heads = loaded.fingerprint["query_heads"]
    projection = output_projection(loaded.model, layout.layers, layout.heads, heads, layout.head_dim)
    if projection is None:
        return False
    write_projection(Path(folder), projection)
    return True


def _content_hash(policy: str | None) -> str | None:
    """Of the files of a scorer's folder; ``None`` for a policy that has none here."""
    if policy is None or policy in POLICIES or not Path(policy).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(policy).rglob("*") if path.is_file()):
        digest.update(path.relative_to(policy).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Source:
    """A model, ready to be traced or run as it is."""

    loaded: LoadedModel
    block: int
    group_reduce: GroupReduce

    def __post_init__(self) -> None:
        enable(self.loaded.model)

    def layout(self, window: int) -> Layout:
        """Sizes of the trace.

        Raises:
            KvlearnError: the model has no full-attention layer, or no rotary embedding that can be undone.
        """
        layers = tuple(EvictingCache(self.loaded.model).managed)
        if not layers:
            raise KvlearnError(f"{self.loaded.name} has no full-attention layer, so there is nothing to trace.")
        shape = self.loaded.fingerprint
        return Layout(layers, shape["kv_heads"], shape["head_dim"], window, self.block)

    def check(self, manifest: Manifest) -> None:
        """Refuse what no cache could be made for, before anything is written."""
        recorder = WindowRecorder(manifest.layout)
        self.make_feed("full", None, recorder)
        if manifest.policy is not None:
            if manifest.policy == "full":
                raise KvlearnError("policy 'full' evicts nothing; leave policy and budget out to trace the full cache.")
            self.make_feed(manifest.policy, parse_budgets(manifest.budgets or "")[0], recorder)

    def make_feed(self, policy: str, budget: int | None, recorder: WindowRecorder) -> Feed:
        """See :class:`kvlearn.traces.MakeFeed`."""
        model = self.loaded.model
        cache = EvictingCache(
            model, policy, budget, block=self.block, group_reduce=self.group_reduce, recorder=recorder
        )
        arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}

        def feed(ids: Tensor) -> None:
            with torch.inference_mode():
                model(ids, **arguments)

        return feed

    def plain(self, ids: Tensor) -> None:
        """The model's own forward pass."""
        model = self.loaded.model
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            model(ids, use_cache=False)
        enable(model)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.loaded.model.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass
class _Watch:
    """Times tracing and, on the first windows, the plain forward pass in turn with it."""

    source: _Source
    manifest: Manifest
    done: int  # windows
    progress: Callable[[int, int], None] | None
    traced: list[float] = field(default_factory=list)  # seconds of each window
    plain: list[float] = field(default_factory=list)
    started: float = 0.0

    def windows(self, source: Iterator[corpora.Window]) -> Iterator[corpora.Window]:
        for number, window in enumerate(source):
            if self.done <= number < self.done + TIMED_WINDOWS:
                self._run_plain(torch.tensor([window.input_ids], device=self.source.loaded.model.device))
            self.started = time.perf_counter()
            yield window

    def _run_plain(self, ids: Tensor) -> None:
        if not self.plain:
            self.source.plain(ids)  # the first pass of a process sets things up
        self.source.synchronize()
        start = time.perf_counter()
        self.source.plain(ids)
        self.source.synchronize()
        self.plain.append(time.perf_counter() - start)

    def __call__(self, tokens: int) -> None:
        self.traced.append(time.perf_counter() - self.started)
        self.tell()

    def tell(self) -> None:
        if self.progress is not None:
            window = self.manifest.layout.window
            self.progress((self.done + len(self.traced)) * window, self.manifest.wanted * window)

    def report(self, manifest: Manifest) -> TraceReport:
        pairs = tuple(zip(self.traced, self.plain, strict=False))  # the plain pass was run on the first windows only
        return TraceReport(manifest, len(self.traced) * manifest.layout.window, sum(self.traced), pairs)

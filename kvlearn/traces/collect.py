"""From a running model to the rows of a trace.

This module sees neither model nor cache: a :data:`MakeFeed` builds a cache that reports to a recorder and returns the
function that feeds tokens through the model into it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlearn import features
from kvlearn.errors import KvlearnError
from kvlearn.traces.format import VECTORS, Manifest, TraceWriter
from kvlearn.traces.layout import Layout

Feed = Callable[[Tensor], None]
"""Runs the model on tokens ``[1, C]`` int64 that follow those it was fed before."""


class MakeFeed(Protocol):
    """Makes a fresh cache."""

    def __call__(self, policy: str, budget: int | None, recorder: WindowRecorder) -> Feed:
        """A cache of ``budget`` slots under ``policy`` that reports to ``recorder``, and the way to feed it."""


class TextWindow(Protocol):
    """A run of tokens, as :class:`kvlearn.corpora.Window` holds it."""

    @property
    def input_ids(self) -> Sequence[int]:
        """Exactly ``T`` token ids."""

    @property
    def domain(self) -> str:
        """Kind of text."""

    @property
    def doc(self) -> str:
        """Name of the first document."""

    @property
    def start(self) -> int:
        """Position of the first token in the document."""

    @property
    def documents(self) -> Sequence[str]:
        """Names of all documents in the window: one, unless short ones were joined."""


@dataclass
class WindowRecorder:
    """Gathers what one cache observes over one window of one row (see :class:`kvlearn.slots.Recorder`).

    Args:
        layout: sizes.
        keep_tokens: keep keys and values.

    Attributes:
        keys: per layer, codes ``[H, C, D]`` and scales ``[H, C]`` for each call.
        values: likewise.
        seen: per layer, positions, mean codes and peak codes ``[H, S]`` for each block.
    """

    layout: Layout
    keep_tokens: bool = True
    keys: dict[int, list[features.Vectors]] = field(default_factory=dict)
    values: dict[int, list[features.Vectors]] = field(default_factory=dict)
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)

    def tokens(self, layer: int, pos: Tensor, keys: Tensor, values: Tensor) -> None:
        """New tokens: positions ``[1, C]``, keys before rotation and values ``[1, H, C, D]``."""
        if self.keep_tokens:
            self.keys.setdefault(layer, []).append(features.encode_vectors(keys[0]))
            self.values.setdefault(layer, []).append(features.encode_vectors(values[0]))

    def blocks(self, layer: int, pos: Tensor, mean_code: Tensor, peak_code: Tensor, queries: Tensor) -> None:
        """Observed blocks: slot positions ``[1, H, S]``, codes ``[N, 1, H, S]``, queries per block ``[N, 1]``."""
        if not bool((queries == self.layout.block).all()):
            raise RuntimeError(f"blocks of {queries.flatten().tolist()} queries, expected {self.layout.block}")
        blocks = self.seen.setdefault(layer, [])
        pos = pos.clone()  # the cache goes on to overwrite it
        blocks += [(pos[0], mean_code[n, 0], peak_code[n, 0]) for n in range(mean_code.shape[0])]

    def token_columns(self) -> dict[str, bytes]:
        """Keys and values as a trace stores them."""
        layers = self.layout.layers
        expected = (self.layout.heads, self.layout.window, self.layout.head_dim)
        columns = []
        for calls in (self.keys, self.values):
            joined = [_join(calls[layer]) for layer in layers]
            for layer, vectors in zip(layers, joined, strict=True):
                if vectors.codes.shape != expected:
                    raise KvlearnError(
                        f"keys or values of layer {layer} have the shape {tuple(vectors.codes.shape)}, expected "
                        f"{expected}: models whose layers differ in KV heads or head dimension cannot be traced."
                    )
            columns += [torch.stack(parts) for parts in zip(*joined, strict=True)]  # [L, H, T, D], [L, H, T]
        return dict(zip(VECTORS, map(to_bytes, columns), strict=True))

    def code_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """What was observed, on token columns.

        Returns:
            ``held`` ``[L, H, P]`` bool, then mean and peak codes ``[L, H, P]`` uint8, 0 where nothing was held. Along
            ``P`` lie the columns of each block in turn, as many as tokens existed when it ended.
        """
        layout = self.layout
        shape = (len(layout.layers), layout.heads, layout.packed)
        held = torch.zeros(shape, dtype=torch.bool)
        mean, peak = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
        for row, layer in enumerate(layout.layers):
            start = 0
            for end, (pos, mean_code, peak_code) in zip(layout.ends, self.seen[layer], strict=True):
                block = slice(start, start + end)
                start += end
                if pos.shape[-1] >= end and bool((pos[:, :end] == torch.arange(end, device=pos.device)).all()):
                    held[row, :, block] = True
                    mean[row, :, block], peak[row, :, block] = mean_code[:, :end], peak_code[:, :end]
                    continue
                # Slots of later tokens go to an extra column, and so do empty ones: position -1.
                column = torch.where(pos < end, pos, -1).long() % (end + 1)
                column = column.expand_as(mean_code)
                for target, source in ((held, torch.ones_like(column)), (mean, mean_code), (peak, peak_code)):
                    wide = target.new_zeros(layout.heads, end + 1)
                    wide.scatter_(-1, column.to(wide.device), source.to(wide))
                    target[row, :, block] = wide[:, :end]
        return held, mean, peak


def _join(calls: list[features.Vectors]) -> features.Vectors:
    return features.Vectors(*(torch.cat(parts, dim=1) for parts in zip(*calls, strict=True)))


def to_bytes(tensor: Tensor) -> bytes:
    """The tensor's elements in memory order; the inverse is ``torch.frombuffer``."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as bits, flat, eight to a byte, the first in the lowest bit; padded with zeros."""
    flat = mask.flatten().to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` bits of :func:`pack_bits`, as a flat bool tensor."""
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:count].bool()


def window_budget(budgets: str, seed: int, number: int) -> int:
    """The budget of the ``number``-th window of a trace.

    Args:
        budgets: one number, a comma-separated list, or an inclusive range ``128-512``.
        seed: of the choice.
        number: of the window in the trace.

    Raises:
        KvlearnError: ``budgets`` is none of these.
    """
    low, high, choices = parse_budgets(budgets)
    draw = random.Random(f"{seed}:{number}")
    return draw.choice(choices) if choices else draw.randint(low, high)


def parse_budgets(budgets: str) -> tuple[int, int, list[int]]:
    """Least and most slots of ``budgets`` (see :func:`window_budget`), and the list if it is one."""
    try:
        if "-" in budgets:
            low, high = (int(part) for part in budgets.split("-"))
            if 0 < low <= high:
                return low, high, []
        else:
            choices = [int(part) for part in budgets.split(",")]
            if min(choices) > 0:
                return min(choices), max(choices), choices
    except ValueError:
        pass
    raise KvlearnError(
        f"budget is {budgets!r}; give a number of slots such as 256, a list such as 128,256 or a range such as 128-512."
    )


def observe_window(
    ids: Tensor, layout: Layout, make_feed: MakeFeed, policy: str | None, budget: int | None
) -> dict[str, Any]:
    """The tensor columns of one window.

    Args:
        ids: ``[1, T]`` int64.
        layout: sizes.
        make_feed: see :class:`MakeFeed`.
        policy: policy of an on-policy trace, else ``None``.
        budget: its budget.

    Returns:
        Bytes by column name.
    """
    recorder = WindowRecorder(layout)
    make_feed("full", None, recorder)(ids)
    _, mean, peak = recorder.code_columns()
    columns: dict[str, Any] = {**recorder.token_columns(), "mean_code": to_bytes(mean), "peak_code": to_bytes(peak)}
    if policy is not None:
        recorder = WindowRecorder(layout, keep_tokens=False)
        feed = make_feed(policy, budget, recorder)
        for chunk in ids.split(layout.block, dim=1):
            feed(chunk)
        held, mean, peak = recorder.code_columns()
        columns |= {
            "policy": policy,
            "budget": budget,
            "held": to_bytes(pack_bits(held)),
            "seen_mean": to_bytes(mean[held]),
            "seen_peak": to_bytes(peak[held]),
        }
    return columns


def collect(
    windows: Iterable[TextWindow],
    writer: TraceWriter,
    make_feed: MakeFeed,
    *,
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Trace windows of text into a folder, going on where an earlier run stopped.

    Args:
        windows: the same windows in the same order in every run, of exactly ``T`` tokens; may be more than are wanted.
        writer: of the folder.
        make_feed: see :class:`MakeFeed`.
        device: where the model is.
        progress: called with the number of tokens done after each window.

    Returns:
        The manifest of the finished trace.

    Raises:
        KvlearnError: there is no text, the disk is full, or the model cannot be traced.
    """
    manifest = writer.manifest
    layout, on_policy = manifest.layout, manifest.policy is not None
    if manifest.complete:
        return manifest

    def rows() -> Iterator[dict[str, Any]]:
        numbered = enumerate(itertools.islice(windows, manifest.wanted))
        for number, window in itertools.islice(numbered, writer.done, None):
            ids = torch.tensor([list(window.input_ids)], dtype=torch.int64, device=device)
            budget = window_budget(manifest.budgets or "", manifest.seed, number) if on_policy else None
            yield {
                "input_ids": ids[0].tolist(),
                "domain": window.domain,
                "doc": window.doc,
                "split": manifest.split,
                "start": window.start,
                "documents": list(window.documents),
                **observe_window(ids, layout, make_feed, manifest.policy, budget),
            }
            if progress is not None:
                progress(layout.window)

    writer.write_shards(rows())
    if not writer.done:
        raise KvlearnError(
            f"no text to trace: {manifest.data!r} has no document of {layout.window} tokens in its {manifest.split} "
            "split; take a smaller window or more text."
        )
    return writer.finish()

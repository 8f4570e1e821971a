"""Small traces for tests: a tiny model, random text, and the cache wired to the collector."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from task_helpers import byte_tokenizer, text_folder
from tiny import tiny_llama
from torch import Tensor

import kvlearn
from kvlearn.attention import cache_argument
from kvlearn.models import load_model
from kvlearn.traces import Feed, Layout, Manifest, TraceWriter, WindowRecorder, collect
from kvlearn.traces import format as trace_format
from kvlearn.tracing import trace


@dataclass(frozen=True)
class TextWindow:
    input_ids: list[int]
    domain: str
    doc: str
    start: int
    documents: tuple[str, ...]


def random_windows(count: int, tokens: int, vocabulary: int = 200, seed: int = 0) -> Iterator[TextWindow]:
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        ids = torch.randint(1, vocabulary, (tokens,), generator=generator).tolist()
        yield TextWindow(ids, f"domain{i % 2}", f"doc{i}", 0, (f"doc{i}",))


def run(model: Any, cache: Any, ids: Tensor) -> None:
    with torch.inference_mode():
        model(ids, **{cache_argument(model): cache})


def feeds(model: Any, block: int, group_reduce: Any = "mean", protect: Any = None) -> Any:
    """What collect() asks for: a maker of caches that report to a recorder."""
    kvlearn.enable(model)

    def make_feed(policy: Any, budget: int | None, recorder: WindowRecorder) -> Feed:
        cache = kvlearn.EvictingCache(
            model, policy, budget, recorder=recorder, block=block, group_reduce=group_reduce, protect=protect
        )
        return lambda ids: run(model, cache, ids)

    return make_feed


def layout_of(model: Any, window: int, block: int) -> Layout:
    config = model.config
    layers = tuple(range(config.num_hidden_layers))
    return Layout(layers, config.num_key_value_heads, config.head_dim, window, block)


def manifest_of(layout: Layout, windows: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "model": "tiny",
        "fingerprint": {"layers": len(layout.layers)},
        "tokenizer": "0" * 32,
        "layout": layout,
        "group_reduce": "mean",
        "data": "random",
        "split": "train",
        "seed": 0,
        "tokens": windows * layout.window,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        **changes,
    }
    return Manifest(**fields)


def tiny_trace(
    folder: Path, model: Any, windows: int = 3, window: int = 96, block: int = 8, **changes: Any
) -> Manifest:
    layout = layout_of(model, window, block)
    writer = TraceWriter(folder, manifest_of(layout, windows, **changes))
    return collect(random_windows(windows, window), writer, feeds(model, block))


def model_and_trace(root: Path, windows: int, window: int) -> None:
    """A tiny model with its tokenizer, texts, and a trace of the model over them, in folders that are named so."""
    tiny_llama(vocabulary=257).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    (root / "texts").mkdir()
    text_folder(root / "texts", documents=40, characters=800)
    loaded = load_model(str(root / "model"), dtype="float32")
    trace(loaded, str(root / "texts"), root / "trace", tokens=windows * window, window=window)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def trace_in_shards(folder: Path, die_at: int | None = None) -> int:
    """Trace a tiny model into several shards; kill this process at the ``die_at``-th moment, if it comes to that.

    A moment is a call of the model, a write, a sync, a rename, or the removal of a file.

    Returns:
        How many moments there were.
    """
    moments = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal moments
            moments += 1
            if moments == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    torch.set_num_threads(1)
    model = tiny_llama()
    layout = layout_of(model, 64, 8)
    with (
        mock.patch.object(trace_format, "SHARD_BYTES", 2 * layout.window_bytes),
        mock.patch.object(trace_format._HashingFile, "write", counted(trace_format._HashingFile.write)),
        mock.patch.object(os, "fsync", counted(os.fsync)),
        mock.patch.object(Path, "replace", counted(Path.replace)),
        mock.patch.object(Path, "unlink", counted(Path.unlink)),
    ):
        manifest = manifest_of(layout, 5, policy="streaming", budgets="20-40")
        make_feed = feeds(model, 8)
        writer = TraceWriter(folder, manifest)
        collect(random_windows(5, 64), writer, lambda *arguments: counted(make_feed(*arguments)))
    return moments

"""A trace survives kills, full disks and second thoughts, and ends with the same bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tracing_helpers import feeds, files_of, layout_of, manifest_of, random_windows, tiny_trace, trace_in_shards

from kvlearn.errors import KvlearnError
from kvlearn.traces import Layout, Manifest, Trace, TraceWriter, collect
from kvlearn.traces import format as trace_format

KILLS = 10


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server of child processes import what it preloads."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))


def kill_while_tracing(folder: Path, moment: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tracing_helpers"])
    process = context.Process(target=trace_in_shards, args=(folder, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_killed_at_ten_random_moments_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    moments = trace_in_shards(tmp_path / "whole")
    whole = files_of(tmp_path / "whole")
    assert sorted(whole) == [
        *(f"data-{i:05d}.arrow" for i in range(3)), "dataset_info.json", "state.json", "trace.json",
    ]  # fmt: skip
    draw = random.Random(20)
    for kill in range(KILLS):
        folder = tmp_path / f"killed{kill}"
        kill_while_tracing(folder, draw.randint(1, moments))
        trace_in_shards(folder)
        assert files_of(folder) == whole


def test_killed_again_and_again_in_one_folder(tmp_path: Path) -> None:
    moments = trace_in_shards(tmp_path / "whole")
    for part in (9, 2, 4, 12):
        kill_while_tracing(tmp_path / "killed", moments // part)
    assert Manifest.read(tmp_path / "killed").windows == 2, "what was complete is kept"
    trace_in_shards(tmp_path / "killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_a_finished_trace_is_left_alone(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    first = tiny_trace(tmp_path / "t", model)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    assert tiny_trace(tmp_path / "t", model) == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"split": "test"}, 'split "train", not "test"'),
        ({"policy": "ema", "budgets": "40"}, 'policy null, not "ema"'),
        ({"versions": {"torch": "0"}}, 'versions.torch null, not "0"'),
        ({"fingerprint": {"layers": 9}}, "fingerprint.layers 2, not 9"),
        ({"threads": 2}, "threads 1, not 2"),
        ({"window": 48, "windows": 4}, "layout.window 96, not 48"),
    ],
)
def test_other_arguments_are_refused(
    tiny_llama: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    model = tiny_llama()
    tiny_trace(tmp_path / "t", model, windows=2)
    before = files_of(tmp_path / "t")
    with pytest.raises(KvlearnError, match=field):
        tiny_trace(tmp_path / "t", model, **{"windows": 2, **changes})
    assert files_of(tmp_path / "t") == before


def test_a_folder_with_other_things_is_refused(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(KvlearnError, match="is no trace"):
        tiny_trace(tmp_path, tiny_llama())
    assert list(files_of(tmp_path)) == ["letter.txt"]


def test_a_full_disk_loses_nothing(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_format, "SHARD_BYTES", 1)  # one window to a shard
    model, written = tiny_llama(), 0
    write = trace_format._HashingFile.write

    def limited(self: Any, data: Any) -> int:
        nonlocal written
        written += memoryview(data).nbytes
        if written > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as full:
        full.setattr(trace_format._HashingFile, "write", limited)
        with pytest.raises(KvlearnError, match=r"the disk is full .* the 1 windows written so far are safe"):
            tiny_trace(tmp_path / "t", model)
    assert sorted(files_of(tmp_path / "t")) == ["data-00000.arrow", "trace.json"]
    with pytest.raises(KvlearnError, match="unfinished \\(1 of 3 windows\\)"):
        Trace(tmp_path / "t")
    tiny_trace(tmp_path / "t", model)
    tiny_trace(tmp_path / "whole", model)
    assert files_of(tmp_path / "t") == files_of(tmp_path / "whole")


def test_interrupted_by_the_user_it_leaves_no_half_file(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    layout = layout_of(model, 96, 8)
    make_feed, calls = feeds(model, 8), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return make_feed(*arguments)

    with pytest.raises(KeyboardInterrupt):
        collect(random_windows(3, 96), TraceWriter(tmp_path / "t", manifest_of(layout, 3)), interrupted)
    assert list(files_of(tmp_path / "t")) == ["trace.json"]


def test_two_processes_cannot_write_to_one_folder(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    writer = TraceWriter(tmp_path, manifest_of(layout_of(model, 96, 8), 1))
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(KvlearnError, match="another process writes"):
        collect(random_windows(1, 96), writer, feeds(model, 8))
    os.close(other)
    collect(random_windows(1, 96), writer, feeds(model, 8))
    with pytest.raises(KvlearnError, match="another process writes"):  # what it read is out of date
        TraceWriter.write_shards(_stale(writer), iter(()))


def _stale(writer: TraceWriter) -> TraceWriter:
    stale = object.__new__(TraceWriter)
    stale.folder, stale.manifest = writer.folder, manifest_of(writer.manifest.layout, 1)
    return stale


def test_text_that_ends_early_gives_a_shorter_trace(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    writer = TraceWriter(tmp_path, manifest_of(layout_of(model, 96, 8), 9))
    assert collect(random_windows(2, 96), writer, feeds(model, 8)).windows == 2
    assert len(Trace(tmp_path)) == 2


def test_no_text_is_an_error(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_llama()
    writer = TraceWriter(tmp_path, manifest_of(layout_of(model, 96, 8), 9))
    with pytest.raises(KvlearnError, match="no text to trace"):
        collect(iter(()), writer, feeds(model, 8))


def test_it_is_smaller_than_the_cache_at_a_window_of_2048() -> None:
    layout = Layout(layers=tuple(range(30)), heads=3, head_dim=64, window=2048, block=32)
    on_policy = 30 * 3 * (layout.packed // 8 + 2 * 512 * layout.blocks)
    assert layout.window_bytes + on_policy < layout.cache_bytes, "before compression, with what budget 512 adds"
    assert layout.cache_bytes == 30 * 3 * 2048 * 64 * 2 * 2


def test_a_window_must_be_whole_blocks() -> None:
    with pytest.raises(KvlearnError, match="100 tokens is no multiple of the block of 32"):
        Layout(layers=(0,), heads=1, head_dim=8, window=100, block=32)


def test_the_manifest_says_where_a_trace_comes_from(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    manifest = tiny_trace(tmp_path, tiny_llama(), windows=3)
    text = json.loads((tmp_path / "trace.json").read_text())
    assert text["windows"] == 3
    assert text["version"] == trace_format.VERSION
    assert text["shards"][0]["bytes"] == (tmp_path / "data-00000.arrow").stat().st_size
    assert Manifest.read(tmp_path) == manifest
    assert str(tmp_path) not in json.dumps(text)


def test_datasets_opens_it(tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(trace_format, "SHARD_BYTES", 1)
    tiny_trace(tmp_path, tiny_llama(), windows=3, policy="streaming", budgets="40")
    table = datasets.load_from_disk(str(tmp_path))
    assert table.split == "train"
    assert len(table) == 3
    for row, window in zip(table, Trace(tmp_path), strict=True):
        assert row["input_ids"] == window.input_ids.tolist()
        assert (row["doc"], row["domain"], row["split"]) == (window.doc, window.domain, "train")
        codes = torch.frombuffer(bytearray(row["values"]), dtype=torch.int8).view(window.values.codes.shape)
        assert torch.equal(codes, window.values.codes)
        assert (row["policy"], row["budget"]) == ("streaming", 40)

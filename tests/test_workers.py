"""Comparisons in several processes, and comparisons that are killed: the rows are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_llama

from kvlearn.errors import KvlearnError
from kvlearn.rows import TIMED, RowStore, read_rows

TESTS = Path(__file__).parent


def load() -> Any:
    """A tiny model, the same in every process."""
    return SimpleNamespace(model=tiny_llama(), tokenizer=None, name="tiny", context_length=None)


def load_nothing() -> Any:
    raise KvlearnError("there is no model today.")


def load_badly() -> Any:
    os._exit(3)


def compare(path: Path, workers: int, loading: Callable[[], Any] = load) -> list[dict[str, Any]]:
    """Three policies on six documents, in four groups; with one worker in this process."""
    import torch

    from kvlearn.compare import Comparison, Settings
    from kvlearn.shapes import Protection
    from kvlearn.tasks.base import Case
    from kvlearn.workers import run_in_processes

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    cases = [
        Case(f"doc{i}", "made-up", torch.randint(1, 200, (40 + 40 * (i % 2),), generator=generator).repeat(3))
        for i in range(6)
    ]
    settings = Settings(
        policies=("full", "random", "ema", "oracle"),
        budgets=(32, 48),
        window=160,
        batch=2,
        block=8,
        protect=Protection(sinks=2),
    )
    seen: list[tuple[int, int]] = []
    with RowStore(path) as store:
        comparison = Comparison(load(), settings, {"lm": cases}, store)
        if workers == 1:
            comparison.run(lambda _, done, total: seen.append((done, total)))
        else:
            run_in_processes(
                loading, comparison, store, workers=workers, notify=lambda _, done, total: seen.append((done, total))
            )
        assert seen == [(i, 32) for i in range(32)], "progress counts every cell once"
        return store.rows


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    """Everything of rows that does not depend on the clock."""
    return sorted(json.dumps({k: v for k, v in row.items() if k not in TIMED}, sort_keys=True) for row in rows)


def test_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    alone = compare(tmp_path / "one.jsonl", 1)
    assert len({(row["policy"], row["budget"], row["doc"]) for row in alone}) == 48
    assert comparable(compare(tmp_path / "two.jsonl", 2)) == comparable(alone)


def test_what_a_process_meets_is_told(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match="there is no model today"):
        compare(tmp_path / "a.jsonl", 2, load_nothing)
    with pytest.raises(KvlearnError, match=r"a worker process stopped \(exit code 3\)"):
        compare(tmp_path / "b.jsonl", 2, load_badly)


def test_as_many_processes_as_cores_and_memory_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlearn.workers import OVERHEAD, spare_workers

    def model(gigabytes: int, device: str = "cpu") -> Any:
        weights = [SimpleNamespace(nbytes=1 << 30)] * gigabytes
        return SimpleNamespace(device=SimpleNamespace(type=device), parameters=lambda: weights)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 16 * OVERHEAD}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert spare_workers(model(0)) == 8
    assert spare_workers(model(1)) == 4
    assert spare_workers(model(30)) == 1
    assert spare_workers(model(0, "cuda")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_comparison_killed_three_times_ends_with_the_same_rows(tmp_path: Path, workers: int) -> None:
    rng = random.Random(workers)
    expected = comparable(compare(tmp_path / "whole.jsonl", 1))
    path = tmp_path / "rows.jsonl"
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom pathlib import Path\nimport test_workers"
    script = tmp_path / "script.py"
    script.write_text(f"{code}\nif __name__ == '__main__':\n    test_workers.compare(Path({str(path)!r}), {workers})\n")
    for _ in range(3):
        goal = (path.stat().st_size if path.exists() else 0) + rng.randrange(1, 40_000)
        process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
        while process.poll() is None and not (path.exists() and path.stat().st_size >= goal):
            time.sleep(0.002)
        assert process.poll() is None, "it was over before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        gone = time.monotonic() + 60
        while group_lives(process.pid):
            assert time.monotonic() < gone, "workers outlive the process that began them"
            time.sleep(0.05)
    assert 0 < len(read_rows(path)) < len(expected)
    subprocess.run([sys.executable, str(script)], check=True)
    assert comparable(read_rows(path)) == expected


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True

"""The tuner, with a clock that knows the answer, on the interpreter's table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlearn.kernels import launch, tune


@pytest.fixture(autouse=True)
def _own_table() -> Iterator[None]:
    """Whatever a test changes in the table in memory is undone."""
    yield
    launch.table.cache_clear()
    launch.parameters.cache_clear()


def clock(calls: Sequence[Any]) -> float:
    """Fastest at 32 slots and 2 warps; more than 2 warps do not compile."""
    chosen = launch.parameters("interpreter", "forecast", "all")
    if chosen["num_warps"] > 4:
        raise RuntimeError("out of resources")
    return 1.0 + abs(chosen["slots"] - 32) + abs(chosen["num_warps"] - 2)


def test_the_fastest_is_found_and_written(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    before = json.loads(launch.TABLE.read_text(encoding="utf-8"))
    assert tune.tune("forecast", clock, "cpu", path) == 1
    after = json.loads(path.read_text(encoding="utf-8"))
    assert after["interpreter"]["forecast"]["all"] == {
        **before["interpreter"]["forecast"]["all"],
        "slots": 32,
        "num_warps": 2,
    }
    after["interpreter"]["forecast"] = before["interpreter"]["forecast"]
    assert after == before, "nothing else changed"
    assert [file.name for file in tmp_path.iterdir()] == ["launch.json"]


def test_the_calls_really_launch_the_kernel_they_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: set[str] = set()

    def record(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        launched.add(kernel.fn.__name__)

    own = {"mass": "fold"}
    monkeypatch.setattr(launch, "instead", record)
    for kernel, families in launch.table()["interpreter"].items():
        for family in families:
            if "d256" in family:
                continue  # as the others, and four times the memory
            _, call = tune.workload(kernel, family, "cpu", 0)
            launched.clear()
            call()
            assert own.get(kernel, kernel) in launched, (kernel, family)


def test_every_parameter_has_options() -> None:
    for kernels in launch.table().values():
        for kernel, families in kernels.items():
            for parameters in families.values():
                for name in parameters:
                    assert tune.options(kernel, name)


def test_the_committed_table_is_as_the_tuner_writes_it() -> None:
    assert launch.TABLE.read_text(encoding="utf-8") == tune.as_text(launch.table())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 2
    assert "this machine has no GPU" in capsys.readouterr().err

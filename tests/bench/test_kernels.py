"""python -m kvlearn.bench kernels, dry: the GPU script runs end to end and its checks pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_helpers import ROOT, in_fresh_process

from kvlearn.bench.__main__ import main
from kvlearn.bench.kernels import KERNELS, Report, kernel_line, step_line, summary

pytest.importorskip("triton", reason="triton is installed on Linux only")


def test_a_dry_run_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "kvlearn.bench", "kernels", "--dry", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "WRONG" not in done.stdout
    assert "A dry run: the checks count, the times do not." in done.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert {check["name"] for check in figures["checks"]} >= {
        "step",
        "prompt",
        "observe",
        "forecast",
        "select",
        "write",
    }
    assert set(figures["steps"][0]["steps"]) == {"attention", "streaming", "ema", "learned"}
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]


def test_steps_are_timed_where_the_gpu_is() -> None:
    """On a device of another name than "cpu" nothing is left behind on the CPU, and no step waits for a value."""
    out = in_fresh_process(
        """
from kvlearn.bench.kernels import TOY, once, scorer, step_seconds
from kvlearn.kernels.dry import recording
from kvlearn.policies import base, resolve
base.Faults.check = lambda *_: None  # on a GPU these flags are copied to the host and read a block later
for policy in ("streaming", "ema", scorer(TOY, "meta")):
    with recording("cuda:90") as launches:
        step_seconds(TOY, resolve(policy), 2, "meta", once)
    print(*sorted({launch.kernel for launch in launches}))
"""
    )
    assert out.splitlines() == [
        "attend smallest write",
        "attend fold smallest write",
        "attend fold forecast smallest write",
    ]


def test_figures_become_a_table() -> None:
    timing = {"seconds": 2e-6, "rate": 1e12, "of_copy": 0.25}
    report = Report("a card", {"torch": "2", "triton": "3", "date": "2000-01-01"}, copy=4e12)
    report.kernels = [{"batch": 1, "slots": 2048, "overhead": 0.04, **dict.fromkeys(KERNELS, timing)}]
    steps = {"attention": 0.5e-6, "streaming": 1e-6, "ema": 2e-6, "learned": 3e-6}
    report.steps = [{"batch": 8, "budget": 2048, "steps": steps, "full": {32768: 30e-6}, "times_faster": {32768: 10.0}}]
    text = summary(report)["measured"]
    assert "a card, 2000-01-01, torch 2, triton 3. A copy moves 4000 GB/s. Checks: 0 of 0 pass." in text
    assert "| 1 | 2048 | 2.0 (25%) | 2.0 (25%) | 2.0 (25%) | 2.0 (25%) | 2.0 (25%) | 2.0 (25%) | 4.0% |" in text
    assert "budget 2,048:" in text
    assert "| 8 | 0.5 | 1.0 | 2.0 | 3.0 | 30.0 (10.0) |" in text
    assert "| attention at 80% of a copy's bandwidth or more | 25% to 25% | 0 of 1 |" in text
    assert "| upkeep at most 5% of attention's time | 4.0% to 4.0% | 1 of 1 |" in text
    assert "| a learned step 8 times as fast as full attention over 32,768 | 10.0 to 10.0 | 1 of 1 |" in text
    assert "upkeep 4.0% of attention" in kernel_line(report.kernels[0])
    assert "32768 tokens 30.0 us (10.0 times learned)" in step_line(report.steps[0])


def test_mistakes_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernel"]) == 2
    assert "did you mean 'kernels'?" in capsys.readouterr().err
    assert main([]) == 0
    assert "usage" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main(["kernels"]) == 2
        assert "this machine has no GPU" in capsys.readouterr().err
    assert main(["kernels", "--dry", "--docs", "x.md"]) == 2
    assert "the times of a dry run mean nothing" in capsys.readouterr().err

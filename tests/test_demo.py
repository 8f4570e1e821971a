"""The demo: every step of it, as small as it goes, on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the demo trains")

from kvlearn.demo import Demo, Sizes


@pytest.mark.model
def test_every_step_of_the_demo_works(smollm2: Any, tmp_path: Path) -> None:
    sizes = Sizes(trace_tokens=2048, train_seconds=5, docs=1, window=512, budget=128, new_tokens=4)
    demo, told = Demo(smollm2, tmp_path, sizes), []
    demo.load_shipped()
    report = demo.trace(lambda *step: told.append(step))
    assert report.manifest.complete
    figures = demo.train(lambda *step: told.append(step))
    assert figures["val_loss"] > 0
    assert {step[0] for step in told} == {"tokens", "steps"}
    rows = demo.compare(lambda *step: None)
    assert {str(demo.fresh_scorer), str(demo.shipped_scorer)} < {row["policy"] for row in rows}
    assert not any(row.get("error") for row in rows)

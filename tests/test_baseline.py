"""A policy that became worse is found, and noise is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_rows import fake_row, fake_rows
from rich.console import Console

from kvlearn.baseline import changes
from kvlearn.errors import KvlearnError
from kvlearn.report.changes import render_changes


def shifted(rows: list[dict[str, Any]], by: float, noise: float = 0.0, **where: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        row | {"value": row["value"] + by + noise * float(rng.normal())}
        if all(row[field] == value for field, value in where.items())
        else row
        for row in rows
    ]


def test_the_same_rows_have_not_changed() -> None:
    rows = fake_rows()
    found = changes(rows, rows)
    assert len(found) == 2 * (10 * 3 + 1)
    assert not any(change.fell or change.rose for change in found)
    assert all(change.worse == 0 and change.n == 12 for change in found)


def test_what_fell_is_found_and_nothing_else() -> None:
    base = fake_rows(tasks=(("lm", "nll"),))
    found = changes(shifted(base, 0.05, 0.02, policy="ema", budget=256), base)
    (fell,) = [change for change in found if change.fell]
    assert (fell.policy, fell.budget, fell.n) == ("ema", 256, 12)
    assert fell.lo is not None
    assert 0 < fell.lo < fell.worse == pytest.approx(0.05, abs=0.03)
    assert found[0] is fell, "what fell comes first"
    assert fell.after - fell.before == pytest.approx(fell.worse)


def test_noise_without_a_shift_does_not_fall() -> None:
    base = fake_rows(tasks=(("lm", "nll"),))
    assert not any(change.fell for change in changes(shifted(base, 0.0, 0.02, policy="ema"), base))


def test_a_shift_within_the_tolerance_does_not_fall() -> None:
    base = fake_rows(tasks=(("lm", "nll"),))
    worse = shifted(base, 0.004, policy="h2o")
    assert sum(change.fell for change in changes(worse, base)) == 3
    assert not any(change.fell for change in changes(worse, base, tolerance=0.01))
    assert sum(change.rose for change in changes(base, worse)) == 3


def test_fewer_right_answers_are_worse() -> None:
    base = [fake_row(metric="accuracy", doc=str(i), value=1.0, full_value=1.0) for i in range(8)]
    (change,) = changes([row | {"value": 0.5} for row in base], base)
    assert change.fell
    assert change.worse == 0.5


def test_errors_fall_and_single_documents_have_no_interval() -> None:
    base = [fake_row(doc="a"), fake_row(doc="b")]
    (change,) = changes([base[0], base[1] | {"error": "out of memory"}], base)
    assert change.fell
    assert (change.n, change.failed) == (1, 1)
    (change,) = changes([base[0] | {"value": 2.6}], base)
    assert change.fell
    assert change.lo is None
    (change,) = changes([row | {"error": "no"} for row in base], base)
    assert change.fell
    assert change.n == 0


def test_seeds_are_averaged_and_settings_kept_apart() -> None:
    base = [fake_row(seed=seed, value=2.5 + 0.1 * seed, block=32) for seed in range(3)]
    (change,) = changes([*base, fake_row(value=9.0, block=16)], base)
    assert change.before == change.after == pytest.approx(2.6)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(KvlearnError, match="nothing in common"):
        changes([fake_row(budget=128)], [fake_row(budget=256)])
    with pytest.raises(KvlearnError, match=r"tolerance is -1"):
        changes([fake_row()], [fake_row()], tolerance=-1)


def test_the_table_names_what_fell() -> None:
    base = fake_rows(tasks=(("lm", "nll"),))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the test
    console.print(render_changes(changes(shifted(base, 0.05, policy="tova"), base)))
    text = console.export_text()
    assert "3 of 31 fell" in text
    assert text.count("tova") == 3
    assert "ema" not in text
    console.print(render_changes(changes(base, base)))
    assert "0 of 31 fell" in console.export_text()

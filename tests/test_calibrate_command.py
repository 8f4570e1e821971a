"""``kvlearn calibrate`` at the command line, and what ``kvlearn compare`` makes of its result and of ``--blame``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_helpers import byte_tokenizer

from kvlearn import Scorer, cli
from kvlearn.rows import read_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any]) -> dict[str, str]:
    """Folders of a model, a scorer for it, and texts."""
    root = tmp_path_factory.mktemp("made")
    model = tiny_llama(vocabulary=257)
    model.save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    Scorer.for_model(model, block=8).save_pretrained(root / "scorer")
    (root / "texts").mkdir()
    for i in range(3):
        text = f"Chapter {i}. " + " ".join(f"word{j * (i + 3) % 17}" for j in range(300))
        (root / "texts" / f"{i}.txt").write_text(text)
    return {name: str(root / name) for name in ("model", "scorer", "texts")}


def run(command: str, made: dict[str, str], out: Path, *more: str) -> int:
    options = {"block": "8", "docs": "2", "window": "96", "data": made["texts"], "split": "all", "dtype": "float32"}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    return cli.main([command, made["model"], *given, "--threads", "1", "--out", str(out), *more])


def test_from_a_calibration_to_a_comparison(
    made: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "allocation.json"
    asked = ("--policy", made["scorer"], "--budget", "32", "--slots", "20,48", "--width", "1", "--into", made["scorer"])
    assert run("calibrate", made, out, *asked) == 0
    told = capsys.readouterr().out
    assert "sum of costs at 32 slots" in " ".join(told.split())
    found = json.loads(out.read_text())
    assert sum(found["slots"]) == 32 * len(found["slots"])
    assert found["data"] == made["texts"]
    assert read_rows(tmp_path / "allocation.rows.jsonl", check=dict, key=lambda row: (*row.values(),))
    assert Scorer.from_pretrained(made["scorer"]).config.budgets == pytest.approx(found["budgets"])

    compared = ("--policies", "ema", "--budgets", "32", "--allocation", str(out), "--blame", "layers:1")
    assert run("compare", made, tmp_path / "compare", *compared) == 0
    rows = [row for row in read_rows(tmp_path / "compare" / "rows.jsonl") if row["policy"] == "ema"]
    assert {row["mean_slots"] for row in rows} == {32.0}, "the mean is the budget, whatever the shares"
    assert {row["slots"] for row in rows} == {max(found["slots"])}
    assert "Where policies lose" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "compare").iterdir()}
    assert {"blame-lm-nll-32.png", "blame-lm-kl-32.png", "report.html"} <= files
    assert "Where policies lose" in (tmp_path / "compare" / "report.html").read_text()
    assert "Where policies lose" in (tmp_path / "compare" / "table.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--policy", "emma"), "did you mean 'ema'"),
        (("--policy", "ema", "--slots", "4,40"), "every layer needs"),
        (("--policy", "ema", "--slots", "60,40"), "ascending"),
        (("--policy", "ema", "--into", "nowhere/at/all"), "no scorer folder nowhere/at/all"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    made: dict[str, str], tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "allocation.json"
    assert run("calibrate", made, out, "--budget", "32", *more) == cli.MISTAKE
    assert message in capsys.readouterr().err
    assert not out.exists()
    assert not out.with_suffix(".rows.jsonl").exists() or not out.with_suffix(".rows.jsonl").read_text()


def test_pooled_bands_are_measured_apart_and_used_together(made: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "pooled.json"
    asked = ("--policy", "ema", "--budget", "32", "--slots", "20,48", "--width", "1")
    assert run("calibrate", made, out, *asked) == 0
    equal = json.loads(out.read_text())
    assert run("calibrate", made, out, *asked, "--allocation", "pooled") == 0
    found = json.loads(out.read_text())
    assert found["allocation"] == "pooled"
    assert [band["cost"] for band in found["bands"]] != [band["cost"] for band in equal["bands"]]
    told = ("--policies", "ema,random", "--budgets", "32", "--allocation", f"pooled:{out}")
    assert run("compare", made, tmp_path / "cmp", *told) == 0
    rows = read_rows(tmp_path / "cmp" / "rows.jsonl")
    assert {row["allocation"] for row in rows} == {f"pooled:{out}"}
    assert not [row for row in rows if row.get("error")]

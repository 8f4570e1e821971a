"""Ablations: a recipe and its variations, trained and judged in closed loop, cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("lightning", reason="training needs the extra kvlearn[train]")

from tracing_helpers import model_and_trace

import train.ablate
from kvlearn.errors import KvlearnError
from kvlearn.rows import read_rows
from train.__main__ import main
from train.ablate import Ablation
from train.ablation_report import lines
from train.recipe import changed

WINDOW = 256


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, a trace of it, a recipe and an ablation."""
    root = tmp_path_factory.mktemp("ablation")
    model_and_trace(root, windows=6, window=WINDOW)
    recipe = {
        "data": {"train": [str(root / "trace")], "holdout": 0.3, "min_tokens": 96, "min_future": 64},
        "model": {"kind": "linear", "encoder": "none", "budgets": [96], "calibration_windows": 1},
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def ablation_file(made: Path, **changes: Any) -> Path:
    content = {
        "base": "recipe.yaml",
        "set": {"data.boundaries_per_window": 2, "data.val_boundaries": 1},
        "seeds": [0, 1],
        "judge": {
            "model": str(made / "model"),
            "data": str(made / "texts"),
            "split": "all",
            "docs": 2,
            "budgets": [80, 96],
            "window": WINDOW,
            "dtype": "float32",
            "beside": ["ema"],
        },
        "variations": {"mean-of-all": {"data.horizon": [0]}, "pairs": {"model.losses": {"pairwise": 1.0}}},
        **changes,
    }
    path = made / "ablation.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_every_cell_is_trained_and_judged_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["ablate", str(ablation_file(made)), "--out", str(out), "--only", "pairs"]) == 0
    table = (out / "table.md").read_text()
    assert "| base | 2 |" in table
    assert "mean-of-all |" not in table
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")

    trained = []
    real = train.ablate.train_into
    monkeypatch.setattr(train.ablate, "train_into", lambda *a, **k: (trained.append(a[1]), real(*a, **k))[1])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("scorer/config.json")}
    assert len(before) == 4
    assert main(["ablate", str(made / "ablation.yaml"), "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished cell was trained again"
    assert len(list(out.rglob("scorer/config.json"))) == 6

    rows = read_rows(out / "rows.jsonl")
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    own = {seed: [r for r in rows if f"/pairs/seed-{seed}/" in r["policy"] and r["metric"] == "nll"] for seed in (0, 1)}
    mean = np.mean([row["value"] - row["full_value"] for seed in own for row in own[seed]])
    (line,) = (line for line in found if line["variation"] == "pairs" and line["budget"] == 0)
    assert line["loss"] == pytest.approx(mean)
    assert (line["seeds"], line["documents"]) == (2, 2)
    base = [r for r in rows if "/base/" in r["policy"] and r["metric"] == "nll"]
    base_mean = np.mean([row["value"] - row["full_value"] for row in base])
    assert line["difference"] == pytest.approx(mean - base_mean)
    assert line["low"] <= line["difference"] <= line["high"]
    assert {line["variation"] for line in found} == {"base", "mean-of-all", "pairs", "ema"}


def test_a_folder_of_another_recipe_is_not_mixed_with_this_one(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["ablate", str(ablation_file(made, seeds=[0])), "--out", out, "--only", "pairs"]) == 0
    other = {"pairs": {"model.losses": {"pairwise": 1.0, "kl": 0.5}}}
    assert main(["ablate", str(ablation_file(made, seeds=[0], variations=other)), "--out", out]) == 2
    assert "holds what another config made" in capsys.readouterr().err


def test_dotted_names_change_a_copy() -> None:
    config = {"data": {"train": ["a"]}, "model": {"losses": {"kl": 1.0}}}
    made = changed(config, {"data.reduce": "max", "model.losses": {"bce": 1.0}, "trainer.max_epochs": 2})
    assert made == {
        "data": {"train": ["a"], "reduce": "max"},
        "model": {"losses": {"bce": 1.0}},
        "trainer": {"max_epochs": 2},
    }
    assert config == {"data": {"train": ["a"]}, "model": {"losses": {"kl": 1.0}}}
    with pytest.raises(KvlearnError, match=r"'date\.reduce' is no dotted name"):
        changed(config, {"date.reduce": "max"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variations": {}}, "variations is missing or empty"),
        ({"seeds": "0"}, "give a list of whole numbers"),
        ({"judges": {}}, "there is no 'judges'"),
        ({"judge": {"model": "x", "budget": 3}}, "judge has no 'budget'"),
        ({"judge": {"data": "x"}}, "judge needs a model"),
        ({"variations": {"a/b": {}}}, "is no name"),
        ({"base": "missing.yaml"}, "there is no config"),
    ],
)
def test_mistakes_in_the_file(made: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        Ablation.read(ablation_file(made, **changes))


def test_lines_of_nothing(made: Path, tmp_path: Path) -> None:
    assert lines([], train.ablate.Cells(Ablation.read(ablation_file(made)), tmp_path)) == []

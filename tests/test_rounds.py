"""On-policy rounds: trace under what was trained, train on all, judge in closed loop, keep the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("lightning", reason="training needs the extra kvlearn[train]")

from tracing_helpers import model_and_trace

import train.rounds
from kvlearn.models import load_model
from kvlearn.rows import read_rows
from kvlearn.traces.dataset import Trace
from kvlearn.tracing import trace
from train.__main__ import main
from train.rounds import lines, parse

WINDOW = 256


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rounds")
    model_and_trace(root, windows=3, window=WINDOW)
    recipe = {
        "data": {"train": [str(root / "trace")], "holdout": 0.4, "min_tokens": 96, "boundaries_per_window": 2},
        "model": {"kind": "linear", "encoder": "none", "budgets": [96], "calibration_windows": 1},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def arguments(made: Path, out: Path, *more: str) -> list[str]:
    given: dict[str, Any] = {
        "config": made / "recipe.yaml",
        "out": out,
        "model": made / "model",
        "data": made / "texts",
        "tokens": 2 * WINDOW,
        "window": WINDOW,
        "rounds": 2,
        "judge-data": made / "texts",
        "judge-split": "all",
        "docs": 2,
        "budgets": "80,112",
        "dtype": "float32",
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))] + list(more)


def test_rounds_go_on_where_they_stopped_and_keep_the_best(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["rounds", *arguments(made, out, "--round", "1")]) == 2
    assert "round 1 needs round 0" in capsys.readouterr().err
    assert main(["rounds", *arguments(made, out, "--round", "0")]) == 0
    assert not (out / "round-1").exists()
    assert main(["rounds", *arguments(made, out, "--round", "1")]) == 0

    trained: list[Path] = []
    real = train.rounds.train_into
    monkeypatch.setattr(train.rounds, "train_into", lambda *a, **k: (trained.append(a[1]), real(*a, **k))[1])
    stamp = (out / "round-0/scorer/config.json").stat().st_mtime_ns
    assert main(["rounds", *arguments(made, out)]) == 0
    assert (out / "round-0/scorer/config.json").stat().st_mtime_ns == stamp

    rounds = parse(arguments(made, out))[0]
    found = lines(read_rows(out / "rows.jsonl"), rounds)
    assert [line.number for line in found] == [0, 1, 2]
    best = min(found, key=lambda line: line.loss)
    kept = (out / "scorer/model.safetensors") if (out / "scorer/model.safetensors").exists() else None
    name = "config.json" if kept is None else kept.name
    assert (out / "scorer" / name).read_bytes() == (rounds.scorer(best.number) / name).read_bytes()
    for line in found[1:]:
        before = min(found[: line.number], key=lambda each: each.loss)
        assert line.under == before.number
        assert line.difference == pytest.approx(line.loss - before.loss, abs=1e-9)
    assert [json.loads(text)["number"] for text in (out / "results.jsonl").read_text().splitlines()] == [0, 1, 2]
    table = (out / "table.md").read_text()
    assert "| 2 | round" in table
    assert f"--policy {rounds.scorer(found[2].under or 0)} --budget 68-154 --seed 2" in table


def test_a_round_sees_what_the_evicting_cache_saw_and_trains_on_all_before(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["rounds", *arguments(made, out, "--rounds", "1")]) == 0
    found = Trace(out / "round-1/trace")
    assert found.manifest.policy == str(out / "round-0/scorer")
    assert found.manifest.budgets == "68-154"
    window = found.window(0)
    assert window.held is not None
    held = np.asarray(window.held[-1].sum(-1))
    assert 0 < held.max() <= 154
    config = yaml.safe_load((out / "round-1/config.yaml").read_text())
    assert config["data"]["train"] == [str(made / "trace"), str(out / "round-1/trace")]


def test_query_heads_are_reduced_as_in_the_traces_of_round_0(made: Path, tmp_path: Path) -> None:
    loaded = load_model(str(made / "model"), dtype="float32")
    trace(loaded, str(made / "texts"), tmp_path / "max", tokens=3 * WINDOW, window=WINDOW, group_reduce="max")
    recipe = yaml.safe_load((made / "recipe.yaml").read_text())
    recipe["data"]["train"] = [str(tmp_path / "max")]
    (tmp_path / "max.yaml").write_text(yaml.safe_dump(recipe))
    more = ["--config", str(tmp_path / "max.yaml"), "--rounds", "1", "--docs", "1", "--group-reduce", "max"]
    assert main(["rounds", *arguments(made, tmp_path / "out", *more)]) == 0
    config = json.loads((tmp_path / "out/round-1/scorer/config.json").read_text())
    assert config["observation"]["group_reduce"] == "max"
    assert "--block 32 --group-reduce max --out" in (tmp_path / "out/table.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budgets", "many"], "--budgets is 'many'"),
        (["--round", "3"], "there are rounds 0 to 2"),
        (["--config", "nowhere.yaml"], "there is no config nowhere.yaml"),
        (["--docs", "0"], "one document"),
    ],
)
def test_mistakes(made: Path, tmp_path: Path, more: list[str], message: str, capsys: Any) -> None:
    assert main(["rounds", *arguments(made, tmp_path / "out", *more)]) == 2
    assert message in capsys.readouterr().err

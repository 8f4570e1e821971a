"""``kvlearn compare`` at the command line: checks against a baseline, processes, presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_helpers import byte_tokenizer

from kvlearn import cli
from kvlearn.rows import read_rows, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any]) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(vocabulary=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"Chapter {i}. " + " ".join(f"word{j * (i + 3) % 17}" for j in range(300)))
    return str(folder)


def run(model: str, texts: str, out: Path, *more: str, policies: str = "ema,random") -> int:
    options = {"policies": policies, "budgets": "48", "block": "8", "docs": "3", "window": "96", "batch": "1"}
    options |= {"data": texts, "split": "all", "dtype": "float32", "threads": "1", "out": str(out)}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    return cli.main(["compare", model, *given, *more])


def test_a_policy_that_became_worse_is_an_exit_code(
    model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, now = tmp_path / "good", tmp_path / "now"
    assert run(model, texts, good) == 0
    assert run(model, texts, now, "--check", str(good / "rows.jsonl")) == 0
    assert "0 of" in capsys.readouterr().out.replace("\n", " ")
    rows = read_rows(good / "rows.jsonl")
    better = [row | {"value": row["value"] - 0.1} if row["policy"] == "ema" else row for row in rows]
    write_rows(tmp_path / "better.jsonl", better)
    assert run(model, texts, now, "--check", str(tmp_path / "better.jsonl")) == 1
    told = capsys.readouterr()
    assert "fell behind the baseline" in " ".join(told.out.split())
    assert "rows of an earlier run are checked as they are" in told.err
    assert run(model, texts, now, "--check", str(tmp_path / "better.jsonl"), "--tolerance", "0.2") == 0


def test_processes_write_the_same_rows(model: str, texts: str, tmp_path: Path) -> None:
    def rows(folder: Path) -> list[str]:
        timed = ("tokens_per_s", "scorer_share")
        found = read_rows(folder / "rows.jsonl")
        return sorted(json.dumps({k: v for k, v in row.items() if k not in timed}, sort_keys=True) for row in found)

    assert run(model, texts, tmp_path / "one") == 0
    assert run(model, texts, tmp_path / "two", "--workers", "2") == 0
    assert rows(tmp_path / "one") == rows(tmp_path / "two")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--check", "nowhere.jsonl"], "no rows at nowhere.jsonl"),
        (["--preset", "smal"], "did you mean 'small'"),
        (["--allocation", "nowhere.json"], "cannot read an allocation from nowhere.json"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    model: str, texts: str, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, texts, tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err
    rows = tmp_path / "out" / "rows.jsonl"
    assert not rows.exists() or not rows.read_bytes()


def test_policies_or_a_preset_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "smollm2-135m"]) == 2
    assert "--policies ema,snapkv" in capsys.readouterr().err

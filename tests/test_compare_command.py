"""``kvlearn compare`` at the command line: checks against a baseline, processes, presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_helpers import byte_tokenizer

from kvlearn import cli
from kvlearn.rows import differences, read_rows, write_rows


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
    assert run(model, texts, tmp_path / "one") == 0
    assert run(model, texts, tmp_path / "two", "--workers", "2") == 0
    one, two = (read_rows(tmp_path / name / "rows.jsonl") for name in ("one", "two"))
    assert one
    assert differences(one, two) == []


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


def test_two_comparisons_are_held_beside_each_other(
    model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert run(model, texts, tmp_path / name) == 0
    one, two = str(tmp_path / "one"), str(tmp_path / "two" / "rows.jsonl")
    capsys.readouterr()
    assert cli.main(["report", one, "--same-as", two]) == 0
    assert "rows, but for what a clock decides" in capsys.readouterr().out
    rows = read_rows(two)
    write_rows(two, [rows[0] | {"value": 0.5}, *rows[2:]])
    assert cli.main(["report", one, "--same-as", two]) == 1
    told = capsys.readouterr().out
    assert told.count("\n") == 2
    assert "and 0.5" in told
    assert "only in the first: " in told
    assert cli.main(["report", one, "--same-as", texts]) == 2
    assert "nor the rows of a comparison (rows.jsonl)" in capsys.readouterr().err


def test_a_preset_takes_every_core_unless_it_is_told(
    model: str, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlearn import workers

    taken: list[int] = []
    monkeypatch.setattr(workers, "spare_workers", lambda model: 3)
    monkeypatch.setattr(workers, "run_in_processes", lambda *_, workers, **__: taken.append(workers))
    monkeypatch.setattr("kvlearn.commands.compare.show", lambda *_: None)
    small = ["compare", model, "--preset", "small", "--policies", "ema", "--task", "lm", "--data", texts]
    small += ["--split", "all", "--window", "200", "--docs", "1", "--out"]
    assert cli.main([*small, str(tmp_path / "a")]) == 0
    assert cli.main([*small, str(tmp_path / "b"), "--workers", "2"]) == 0
    assert taken == [3, 2]
    assert cli.main([*small, str(tmp_path / "c"), "--threads", "1"]) == 0, "in this process"
    assert taken == [3, 2]
    assert read_rows(tmp_path / "c" / "rows.jsonl")

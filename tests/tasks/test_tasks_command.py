"""kvlearn tasks lists what can be measured."""

from __future__ import annotations

import pytest

from kvlearn import cli
from kvlearn.tasks import catalogue, names, resolve


@pytest.mark.parametrize("width", [80, 200])
def test_every_task_is_listed_with_its_variants(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["tasks"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for task in catalogue():
        for told in (task.name, task.summary, *task.variants):
            assert told in text, f"{task.name}: {told!r} is missing"


def test_every_name_is_a_task() -> None:
    assert [resolve(name).name for name in names()] == names()

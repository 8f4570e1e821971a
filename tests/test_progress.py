"""Progress without a terminal: a line now and then, with an estimate."""

from __future__ import annotations

import time

import pytest

from kvlearn.progress import bar


def test_a_log_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with bar("comparing") as notify:
        for done, what in enumerate(["a", "b", "c", "d"]):
            notify(what, done, 9)
    assert capsys.readouterr().err.splitlines() == [
        "comparing: 1 of 9 (b), 40 s, about 320 s left",
        "comparing: 3 of 9 (d), 80 s, about 160 s left",
    ]

"""``kvlearn generate`` refuses what is no prompt in one sentence, before the model is loaded."""

from __future__ import annotations

import io
import sys

import pytest

from kvlearn import cli


@pytest.mark.parametrize(
    ("arguments", "typed", "message"),
    [
        ([], b"\xff\xfe", "cannot read the prompt from stdin: 'utf-8' codec"),
        ([], b" \n", "the prompt is empty"),
        (["--prompt", "\udcff"], b"", "the prompt is not valid UTF-8"),
        (["--prompt", "a", "--seed", "9" * 20], b"", "Invalid value for '--seed'"),
    ],
)
def test_what_is_no_prompt_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    typed: bytes,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    assert cli.main(["generate", "no-such-model", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1

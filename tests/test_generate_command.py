"""``kvlearn generate`` refuses what is no prompt in one sentence, and streams whole lines."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from task_helpers import byte_tokenizer

from kvlearn import cli
from kvlearn.commands import options
from kvlearn.errors import KvlearnError


@pytest.mark.parametrize(
    ("arguments", "typed", "message"),
    [
        ([], b"\xff\xfe", "cannot read the prompt from stdin: 'utf-8' codec"),
        ([], b" \n", "the prompt is empty"),
        (["--prompt", "\udcff"], b"", "the prompt is not valid UTF-8"),
        (["--prompt", "a", "--seed", "9" * 20], b"", "Invalid value for '--seed'"),
        (["--prompt", "a", "--scorer", "nosuch"], b"", "there is no scorer folder 'nosuch'; checkpoints/smollm2-135m"),
        (["--prompt", "a", "--scorer", "ema"], b"", "names a policy; give --policy ema"),
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


@pytest.fixture
def tiny(tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = SimpleNamespace(
        model=tiny_llama(vocabulary=257), tokenizer=byte_tokenizer(), name="tiny", context_length=None
    )
    monkeypatch.setattr(options, "load", lambda *_: loaded)
    return loaded


def generate(*arguments: str) -> int:
    return cli.main(["generate", "tiny", "--prompt", "Once upon a time. " * 8, "--max-new-tokens", "6", *arguments])


@pytest.mark.parametrize("allocation", ["uniform", "pooled", "pyramid"])
def test_slots_are_shared_as_told(tiny: Any, capsys: pytest.CaptureFixture[str], allocation: str) -> None:
    assert generate("--policy", "ema", "--budget", "48", "--allocation", allocation) == 0
    assert "ema: 6 new tokens" in (told := capsys.readouterr().err)
    assert "48 slots per KV head held of 149" in told
    assert generate("--policy", "ema", "--budget", "48", "--allocation", "pyramids") == 2
    assert "cannot read an allocation from pyramids" in capsys.readouterr().err


def test_a_model_that_chats_says_how(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate() == 0
    assert "--chat" not in capsys.readouterr().err
    tiny.tokenizer.chat_template = "{{ messages[0].content }}"
    assert generate() == 0
    assert "tiny has a chat template: with --chat it answers" in capsys.readouterr().err
    assert generate("--chat") == 0
    assert "--chat" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [KvlearnError("the end of all things."), KeyboardInterrupt()])
def test_what_ends_a_text_begins_a_line(
    tiny: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(ids: Any, streamer: Any, **_: Any) -> Any:
        streamer.put(ids)
        streamer.put(ids[0, :4])
        raise error

    monkeypatch.setattr(tiny.model, "generate", broken)
    assert generate() in (2, 130)
    assert capsys.readouterr().out == "Once\n", "what was written is whole, and its line ends"

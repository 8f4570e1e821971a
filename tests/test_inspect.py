"""What ``kvlearn inspect`` counts, and the page it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvlearn import cli
from kvlearn.commands import options
from kvlearn.errors import KvlearnError
from kvlearn.report.inspect import SHADES, Inspection, Kept, lines, write_inspection
from kvlearn.retention import inspect_text, pieces

TEXT = "Once upon a time a cache held <b>every</b> token;\nthen 東京 came 🙂, and it forgot & forgot & forgot."
STATS = {"slots": 2, "mean_slots": 1.5, "bytes": 4096}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture
def loaded(tiny_llama: Callable[..., Any], tokenizer: Any) -> Any:
    return SimpleNamespace(model=tiny_llama(vocabulary=256), tokenizer=tokenizer, name="tiny")


def test_pieces_add_up_to_the_text(tokenizer: Any) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, TEXT, ids)
    assert len(found) == len(ids) == len(TEXT.encode())
    assert "".join(found) == TEXT


def test_counts_are_those_of_the_cache(loaded: Any) -> None:
    found = inspect_text(loaded, TEXT, ["streaming", "snapkv"], 24)
    length = len(TEXT.encode())
    streaming, snapkv = found.kept
    assert streaming.counts == [[2 * (p < 4 or p >= length - 20) for p in range(length)]] * 2
    assert [sum(layer) for layer in snapkv.counts] == [48, 48]
    assert all(0 <= count <= 2 for layer in snapkv.counts for count in layer)
    assert snapkv.counts != streaming.counts
    assert (found.layers, found.heads, found.how) == ([0, 1], 2, "fed at once")
    summary = {line.policy: (line.slots, line.somewhere, line.everywhere, line.forgotten) for line in lines(found)}
    assert summary["streaming"] == (24, 24, 24, length - 24)
    (full,) = inspect_text(loaded, TEXT, ["full"], None).kept
    assert full.counts == [[2] * length] * 2


def test_a_text_can_be_fed_as_if_the_model_had_written_it(loaded: Any) -> None:
    at_once, in_steps = (inspect_text(loaded, TEXT, ["snapkv"], 24, chunk=chunk) for chunk in (None, 1))
    assert in_steps.how == "fed 1 at a time"
    assert in_steps.kept[0].counts != at_once.kept[0].counts
    assert [sum(layer) for layer in in_steps.kept[0].counts] == [48, 48]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ""}, "the text holds no tokens"),
        ({"chunk": 0}, "chunk is 0 tokens"),
        ({"policies": ["streaming", "sunflower"]}, "unknown policy 'sunflower'"),
        ({"budget": 3}, "budget is 3 slots"),
    ],
)
def test_mistakes_are_told_before_any_work(loaded: Any, arguments: dict[str, Any], message: str) -> None:
    loaded.model.forward = lambda *_, **__: pytest.fail("the model was run")
    with pytest.raises(KvlearnError, match=message):
        inspect_text(loaded, **{"text": TEXT, "policies": ["streaming"], "budget": 24, **arguments})


def test_the_page_holds_everything_it_shows(tmp_path: Path) -> None:
    evil = "</script><b>&"
    inspection = Inspection(
        "tiny", [evil, "", "x"], [0, 2], 20, 8, "fed at once", [Kept(evil, [[20, 0, 1], [12, 0, 0]], STATS)]
    )
    text = write_inspection(inspection, tmp_path / "page.html", commands=["kvlearn inspect"]).read_text()
    assert evil not in text
    assert not re.search(r"(src|href)=(?!\"#|\"data:,)", text), "it asks for another file"
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))  # type: ignore[union-attr]  # always there
    assert data["layers"] == [0, 2]
    assert [[ord(letter) - ord("0") for letter in layer] for layer in data["policies"][0]["counts"]] == [
        [20, 0, 1],
        [12, 0, 0],
    ]
    assert text.count('<span class="token">') == 3
    assert set(SHADES) <= set(re.findall(r"--(\w+): #", text))


def test_slots_are_shared_as_told(loaded: Any) -> None:
    (pooled,) = inspect_text(loaded, TEXT, ["snapkv"], 24, allocation="pooled").kept
    assert pooled.stats["slots"] > 24, "some head holds more"
    (pyramid,) = inspect_text(loaded, TEXT, ["streaming"], 24, allocation="pyramid").kept
    first, last = (sum(layer) for layer in pyramid.counts)
    assert first > last
    assert first + last == 4 * 24


def test_a_scorer_is_called_by_its_folder_and_its_path_is_told_once(tmp_path: Path) -> None:
    path = "/a/long/way/to/scorer"
    inspection = Inspection(
        "tiny", ["x"], [0], 1, 8, "fed at once", [Kept(path, [[1]], STATS), Kept("ema", [[1]], STATS)]
    )
    text = write_inspection(inspection, tmp_path / "page.html").read_text()
    shown = re.sub(r"<wbr>", "", re.sub(r'title="[^"]*"', "", text))
    assert shown.count(path) == 1, "among the words"
    assert shown.count("scorer") > 3
    assert f'title="{path}"' in text


def test_the_command_writes_the_page(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "load", lambda *_: loaded)
    (tmp_path / "text").write_text(TEXT)
    command = ["inspect", "tiny", "--prompt-file", str(tmp_path / "text"), "--policy", "snapkv", "--policy", "tova"]
    out = tmp_path / "new" / "page.html"
    assert cli.main([*command, "--budget", "24", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "snapkv: " in printed
    assert f"page {out}" in printed
    assert "tova" in out.read_text()
    assert cli.main([*command, "--budget", "24", "--out", str(tmp_path)]) == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err
    assert cli.main([*command, "--budget", "24", "--out", command[3]]) == 2
    assert "is the prompt file, which the page would replace" in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == TEXT
    command[3] += "-missing"
    assert cli.main(command) == 2
    assert "cannot read the prompt from" in capsys.readouterr().err

"""kvlearn trace: from text to a folder, and what it says at the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tracing_helpers import files_of
from transformers import PreTrainedTokenizerFast

from kvlearn import cli
from kvlearn.commands.trace import describe
from kvlearn.errors import KvlearnError
from kvlearn.models import LoadedModel, fingerprint
from kvlearn.models.projection import output_projection
from kvlearn.traces import Trace
from kvlearn.traces.projection import PROJECTION
from kvlearn.tracing import add_projection, trace

WORDS = [f"w{i}" for i in range(199)]


@pytest.fixture(scope="session")
def loaded(tiny_llama: Callable[..., Any]) -> LoadedModel:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tiny_llama()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    return LoadedModel(model, fast, "tiny", 4096, fingerprint(model))


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(WORDS[(i * k) % 199] for k in range(1, 150)))
    return str(folder)


def run(loaded: LoadedModel, text: str, out: Path, **options: Any) -> Any:
    return trace(loaded, text, out, **{"tokens": 256, "window": 64, "block": 8, "split": "all", **options})


def test_a_text_becomes_a_trace(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    report = run(loaded, text, tmp_path / "t", tokens=200, progress=lambda *state: told.append(state))
    found = Trace(tmp_path / "t")
    assert found.manifest == report.manifest
    assert len(found) == 4
    assert told == [(done, 256) for done in (0, 64, 128, 192, 256)]
    assert found.manifest.fingerprint == loaded.fingerprint
    assert set(found.manifest.versions) >= {"kvlearn", "torch", "transformers"}
    for window in found:
        assert window.domain == "text"
        words = loaded.tokenizer.decode(window.input_ids).split()
        assert words[0].startswith("w")


def test_what_it_prints(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    report = run(loaded, text, tmp_path / "t")
    lines = "\n".join(describe(report, tmp_path / "t", 256))
    rates = [float(n.replace(",", "")) for n in re.findall(r"(?:tracing|pass) ([\d,]+) tokens/s", lines)]
    ratio = float(re.search(r"all logits\), ratio ([\d.]+)", lines)[1])
    assert rates == [round(report.trace_rate), round(report.plain_rate)]
    assert ratio == round(report.relative_speed, 2)
    assert len(report.pairs) == 4
    assert report.bytes == sum(len(data) for name, data in files_of(tmp_path / "t").items() if name.endswith("arrow"))
    assert report.cache_bytes == 256 * 2 * 2 * 16 * 2 * 2  # tokens, layers, heads, dimension, K and V, two bytes
    assert f"ratio {report.bytes / report.cache_bytes:.2f}" in lines
    again = describe(run(loaded, text, tmp_path / "t"), tmp_path / "t", 256)
    assert "256 of them were there already" in again


def test_a_burst_of_other_work_does_not_move_the_ratio(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    report = run(loaded, text, tmp_path / "t", tokens=64)
    report = replace(report, pairs=((1.0, 0.5), (9.0, 0.5), (1.0, 0.5), (1.0, 7.0), (1.0, 0.5)))
    assert (report.trace_rate, report.plain_rate, report.relative_speed) == (64, 128, 0.5)


def test_a_finished_trace_gets_the_output_projection_that_it_lacks(
    loaded: LoadedModel, text: str, tmp_path: Path, tiny_llama: Callable[..., Any]
) -> None:
    run(loaded, text, tmp_path / "t", tokens=64)
    expected = output_projection(loaded.model, (0, 1), 2, 4, 16)
    assert expected is not None
    assert torch.equal(Trace(tmp_path / "t").projection, expected)
    (tmp_path / "t" / PROJECTION).unlink()
    before = files_of(tmp_path / "t")
    assert run(loaded, text, tmp_path / "t", tokens=64).traced == 0, "nothing was traced again"
    assert torch.equal(Trace(tmp_path / "t").projection, expected)
    (tmp_path / "t" / PROJECTION).unlink()
    assert add_projection(loaded, tmp_path / "t")
    assert {name: data for name, data in files_of(tmp_path / "t").items() if name != PROJECTION} == before
    other = tiny_llama(seed=1)
    with pytest.raises(KvlearnError, match="is a trace of tiny with other weights"):
        add_projection(replace(loaded, model=other, fingerprint=fingerprint(other)), tmp_path / "t")
    with pytest.raises(KvlearnError, match="is not a trace"):
        add_projection(loaded, tmp_path)


def test_a_model_whose_output_projection_is_not_found_is_traced_without(
    loaded: LoadedModel, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlearn.tracing.output_projection", lambda *_: None)
    report = run(loaded, text, tmp_path / "t", tokens=64)
    assert Trace(tmp_path / "t").projection is None
    assert "output projection was not found" in describe(report, tmp_path / "t", 64)[-1]


def test_query_heads_of_a_group_are_reduced_as_asked(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    for reduce in ("mean", "max"):
        run(loaded, text, tmp_path / reduce, tokens=64, group_reduce=reduce)
    mean, largest = Trace(tmp_path / "mean"), Trace(tmp_path / "max")
    assert (mean.manifest.group_reduce, largest.manifest.group_reduce) == ("mean", "max")
    for name in ("mean_code", "peak_code"):
        ours, theirs = getattr(mean.window(0), name), getattr(largest.window(0), name)
        assert bool((theirs >= ours).all())
        assert bool((theirs > ours).any())


def test_text_that_ends_is_said(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    report = run(loaded, text, tmp_path / "t", tokens=100_000)
    assert any("the text ended before the 100,000" in line for line in describe(report, tmp_path / "t", 100_000))


def test_an_on_policy_trace(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    run(loaded, text, tmp_path / "t", policy="h2o", budget="24-40")
    assert {window.policy for window in Trace(tmp_path / "t")} == {"h2o"}
    assert all(24 <= (window.budget or 0) <= 40 for window in Trace(tmp_path / "t"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"policy": "h2o"}, "both a policy and a budget"),
        ({"budget": 64}, "both a policy and a budget"),
        ({"policy": "full", "budget": 64}, "'full' evicts nothing"),
        ({"policy": "h20", "budget": 64}, "did you mean 'h2o'"),
        ({"policy": "h2o", "budget": 8}, "budget is 8 slots, below"),
        ({"policy": "h2o", "budget": "lots"}, "budget is 'lots'"),
        ({"window": 8192}, "longer than the 4096 that tiny reads"),
        ({"window": 60}, "60 tokens is no multiple of the block of 8"),
        ({"block": 0}, "block"),
    ],
)
def test_bad_arguments_leave_no_folder(
    loaded: LoadedModel, text: str, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(KvlearnError, match=message):
        run(loaded, text, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_model_without_a_rotary_embedding_is_refused(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=200)).eval()
    with pytest.raises(KvlearnError, match="rotary"):
        run(replace(loaded, model=gpt2), text, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_changed_scorer_is_another_recipe(loaded: LoadedModel, text: str, tmp_path: Path) -> None:
    from kvlearn.tracing import _content_hash

    folder = tmp_path / "scorer"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = _content_hash(str(folder))
    (folder / "config.json").write_text("{ }")
    assert before != _content_hash(str(folder))
    assert _content_hash("h2o") is None


def test_the_command(
    loaded: LoadedModel, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvlearn.commands.options.load", lambda *_: loaded)
    arguments = ["trace", "tiny", "--data", text, "--out", str(tmp_path / "t"), "--tokens", "128", "--window", "64"]
    assert cli.main([*arguments, "--block", "8", "--split", "all"]) == 0
    shown = capsys.readouterr()
    assert "2 windows of 64 tokens, 128 tokens in all" in shown.out
    assert shown.err == "", "no progress bar when nobody watches"
    assert cli.main([*arguments, "--block", "16", "--split", "all"]) == cli.MISTAKE
    shown = capsys.readouterr()
    assert shown.err.startswith("kvlearn: error: ")
    assert "layout.block 8, not 16" in shown.err
    assert shown.err.count("\n") == 1

"""kvlearn as a model of lm-evaluation-harness: what the stock model gives, and bounded where a budget is set."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from task_helpers import byte_tokenizer

from kvlearn import cli
from kvlearn.errors import KvlearnError

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (kvlearn[eval])")

CONTEXT = ("The red door opens with four turns of the key, the blue one with two. " * 3).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any]) -> Path:
    """A tiny model with its tokenizer, on the disk."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(vocabulary=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def make(folder: Path) -> Callable[..., Any]:
    from kvlearn.lm_eval import KvlearnLM

    return lambda **options: KvlearnLM(str(folder), dtype="float32", **options)


def _requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]  # type: ignore[arg-type]  # a plain string serves


def _stock(lm: Any, context: str, continuation: str) -> tuple[float, bool]:
    before, after = lm.tok_encode(context) or [lm.prefix_token_id], lm.tok_encode(continuation)
    ids = torch.tensor([before + after])
    with torch.inference_mode():
        log_p = lm.model(ids, use_cache=False).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return float(log_p.gather(-1, ids[0, len(before) :, None]).sum()), log_p.argmax(-1).tolist() == after


def test_loglikelihood_is_the_stock_models(make: Callable[..., Any]) -> None:
    lm = make()
    pairs = [(CONTEXT, " Two."), ("Red", " or blue"), (CONTEXT, " Four turns."), ("", "The door")]
    found = lm.loglikelihood(_requests("loglikelihood", *pairs), disable_tqdm=True)
    for (total, greedy), pair in zip(found, pairs, strict=True):
        expected = _stock(lm, *pair)
        assert (total, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])


def test_rolling_loglikelihood_is_the_stock_models(make: Callable[..., Any]) -> None:
    lm = make()
    (total,) = lm.loglikelihood_rolling(_requests("loglikelihood_rolling", (CONTEXT,)), disable_tqdm=True)
    assert total == pytest.approx(_stock(lm, "", CONTEXT)[0], abs=1e-3)
    short = make(max_length=64)
    (windows,) = short.loglikelihood_rolling(_requests("loglikelihood_rolling", (CONTEXT,)), disable_tqdm=True)
    assert windows != pytest.approx(total, abs=1e-3), "a text longer than the model takes is read in windows"


def test_generation_stops_where_it_is_told(make: Callable[..., Any]) -> None:
    lm = make()
    (text,) = lm.generate_until(_requests("generate_until", (CONTEXT, {"max_gen_toks": 12})), disable_tqdm=True)
    ids = torch.tensor([lm.tok_encode(CONTEXT)])
    output = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert text == lm.tokenizer.decode(output[0, ids.shape[1] :])
    stop = text[4:6]
    wanted = {"until": [stop], "max_gen_toks": 12}
    (cut,) = lm.generate_until(_requests("generate_until", (CONTEXT, wanted)), disable_tqdm=True)
    assert cut == text.split(stop)[0]


def test_a_budget_bounds_every_request(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, runs = make(policy="ema", budget=48, block=8), []
    original = lm._run
    monkeypatch.setattr(lm, "_run", lambda: runs.append(original()) or runs[-1])
    (bounded,) = lm.loglikelihood(_requests("loglikelihood", (CONTEXT, " Two.")), disable_tqdm=True)
    lm.generate_until(_requests("generate_until", (CONTEXT, {"max_gen_toks": 4})), disable_tqdm=True)
    assert [run.cache.stats()["slots"] for run in runs] == [48, 48]
    assert bounded[0] != pytest.approx(_stock(lm, CONTEXT, " Two.")[0], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ema"}, "needs a budget"),
        ({"policy": "emma", "budget": 64}, "did you mean 'ema'"),
        ({"policy": "ema", "budget": 5}, "budget is 5"),
        ({"batch_size": 4}, "one request at a time"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        make(**options)


@pytest.mark.slow  # the harness looks through all of its tasks first
def test_the_command_runs_a_task_of_the_harness(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"question": CONTEXT + f"Door {n}?", "choices": ["two", "four"], "label": n % 2} for n in range(3)]
    (tmp_path / "doors.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    (tmp_path / "doors.yaml").write_text(
        f"task: doors\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'doors.jsonl'}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\n"
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n",
        "utf-8",
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["kvlearn"])
    arguments = (
        f"--model kvlearn --model_args pretrained={folder},policy=ema,budget=64,block=8,dtype=float32 --tasks doors"
    )
    assert cli.main(["lm-eval", *arguments.split(), "--include_path", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "|doors|" in table.replace(" ", "")
    assert "policy=ema" in table.replace("'", "").replace(": ", "=") or "ema" in table


def test_help_says_what_kvlearn_adds(capsys: pytest.CaptureFixture[str]) -> None:
    from kvlearn.lm_eval import KvlearnLM

    with pytest.raises(SystemExit):
        cli.main(["lm-eval", "--help"])
    told = capsys.readouterr().out
    named = set(inspect.signature(KvlearnLM).parameters) - {"batch_size", "max_batch_size"}
    assert {line.split()[0] for line in told.splitlines() if line.startswith("  ")} >= named
    assert "usage: lm-eval" in told, "the harness's own help follows"


def test_slots_are_shared_as_told(make: Callable[..., Any]) -> None:
    lm = make(policy="ema", budget=48, block=8, allocation="pyramid")
    first, last = (budget.slots for budget in lm._run().cache.budgets)
    assert first > 48 > last
    assert make(policy="ema", budget=48, block=8, allocation="pooled")._run().cache.allocation == "pooled"

"""Questions put to copies of a cache: scored as the stock model and plain generation would, alone or in a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from task_helpers import loaded_model, run_of, text_folder
from torch import Tensor

from kvlearn.attention import cache_argument
from kvlearn.compare import Comparison, Settings, make_cases
from kvlearn.policies.oracle import FutureRecorder, Oracle
from kvlearn.rows import RowStore
from kvlearn.stats import summary
from kvlearn.tasks import passkey
from kvlearn.tasks.base import Case, Question
from kvlearn.tasks.questions import ask

BUDGET, BLOCK = 48, 8


@pytest.fixture
def loaded(tiny_llama: Callable[..., Any]) -> Any:
    return loaded_model(tiny_llama(vocabulary=257))


def _case(*lengths: tuple[int, int], seed: int = 0, prompt: int = 100, context: int = 140) -> Case:
    """A context of random tokens, and questions of so many tokens given and to be answered."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(256, (context,), generator=generator)
    questions = [
        Question(torch.randint(256, (given + answer,), generator=generator), torch.arange(given + answer) >= given)
        for given, answer in lengths
    ]
    return Case(f"case{seed}", "made-up", ids, prompt=prompt, questions=tuple(questions))


def _stock(loaded: Any, case: Case, question: Question) -> tuple[float, float]:
    """Whether the answer is greedy, and its mean negative log-likelihood, by one forward pass without a cache."""
    ids = torch.cat([case.input_ids, question.ids])
    with torch.inference_mode():
        log_p = loaded.model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    at = len(case.input_ids) + question.answer.nonzero()[:, 0]
    nll = -log_p[at - 1, ids[at]]
    return float((log_p[at - 1].argmax(-1) == ids[at]).all()), float(nll.mean())


@pytest.mark.parametrize("given", [0, 1, 5, 30])
def test_the_full_cache_scores_as_the_stock_model(loaded: Any, given: int) -> None:
    case = _case((given, 6))
    ((score,),) = ask(run_of(loaded), [case])
    right, nll = _stock(loaded, case, case.questions[0])
    assert (score.right, score.tokens) == (right, 6)
    assert score.nll == pytest.approx(nll, abs=1e-4)


def test_a_greedy_answer_is_right_and_a_changed_one_is_not(loaded: Any) -> None:
    case = _case((4, 1))
    start = torch.cat([case.input_ids, case.questions[0].ids[:4]])[None]
    output = loaded.model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=5, do_sample=False, use_cache=False
    )
    ids = output[0, len(case.input_ids) :]
    answer = torch.arange(9) >= 4
    changed = ids.clone()
    changed[6] = (changed[6] + 1) % 256
    asked = Case("", "", case.input_ids, prompt=100, questions=(Question(ids, answer), Question(changed, answer)))
    ((right, wrong),) = ask(run_of(loaded), [asked])
    assert (right.right, wrong.right) == (1.0, 0.0)
    assert wrong.nll > right.nll


@pytest.mark.parametrize("policy", ["full", "ema"])
def test_a_row_is_scored_as_if_alone(loaded: Any, policy: str) -> None:
    options: dict[str, Any] = {} if policy == "full" else {"budget": BUDGET, "block": BLOCK}
    cases = [_case((3, 5), (20, 2), seed=1), _case((9, 1), (2, 4), seed=2)]
    together = ask(run_of(loaded, policy, **options), cases)
    for case, scores in zip(cases, together, strict=True):
        (alone,) = ask(run_of(loaded, policy, **options), [case])
        for score, expected in zip(scores, alone, strict=True):
            assert (score.right, score.tokens) == (expected.right, expected.tokens)
            assert score.nll == pytest.approx(expected.nll, abs=1e-4)


def test_questions_do_not_see_each_other(loaded: Any) -> None:
    first, second = _case((12, 6), (12, 6)).questions
    case = _case((12, 6), (12, 6))
    alone = Case("", "", case.input_ids, prompt=100, questions=(second,))
    ((_, asked_second),) = ask(run_of(loaded, "ema", BUDGET, block=BLOCK), [case])
    ((asked_alone,),) = ask(run_of(loaded, "ema", BUDGET, block=BLOCK), [alone])
    assert asked_second.nll == asked_alone.nll
    assert not torch.equal(first.ids, second.ids)


def test_under_a_budget_the_answer_is_what_single_steps_give(loaded: Any) -> None:
    case = _case((20, 7))
    ((score,),) = ask(run_of(loaded, "ema", BUDGET, block=BLOCK), [case])
    run = run_of(loaded, "ema", BUDGET, block=BLOCK)
    run.feed(case.input_ids[None, :100])
    ids = torch.cat([case.input_ids[100:], case.questions[0].ids])
    steps = torch.cat([run.feed(ids[None, i : i + 1]) for i in range(len(ids))], dim=1)[0].log_softmax(-1)
    at = 40 + case.questions[0].answer.nonzero()[:, 0]
    assert score.nll == pytest.approx(float(-steps[at - 1, ids[at]].mean()), abs=1e-4)
    assert run.cache.stats()["slots"] == BUDGET


def _generated(case: Case, wanted: tuple[str, ...]) -> Case:
    (question,) = case.questions
    asked = Question(question.ids, torch.zeros_like(question.answer), wanted, new_tokens=12)
    return Case(case.doc, case.domain, case.input_ids, prompt=case.prompt, questions=(asked,))


@pytest.mark.parametrize("policy", ["full", "ema"])
def test_a_generated_answer_is_that_of_generate(loaded: Any, policy: str) -> None:
    options: dict[str, Any] = {} if policy == "full" else {"budget": BUDGET, "block": BLOCK}
    case = _case((5, 0), prompt=140)
    run = run_of(loaded, policy, **options)
    ids = torch.cat([case.input_ids, case.questions[0].ids])[None]
    with torch.inference_mode():
        run.read(case.input_ids[None], 140)
        output: Tensor = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            **{cache_argument(loaded.model): run.cache},
        )
    text = loaded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    wanted = (text.upper(), "not in it at all")
    ((score,),) = ask(run_of(loaded, policy, **options), [_generated(case, wanted)])
    assert score.right == 0.5, f"one of two texts is in {text!r}"
    assert math.isnan(score.nll)


def test_the_oracle_keeps_what_any_question_needs(loaded: Any) -> None:
    case = _case((10, 6), (30, 6))
    run = run_of(loaded, block=BLOCK, recorder=FutureRecorder())
    ask(run, [case])
    assert len(run.copies) == 2, "each question is recorded on its own copy"
    recorders = [copied.recorder for copied in run.copies]
    both = Oracle.from_recorder(recorders)
    for layer, future in (both.future or {}).items():
        single = [(Oracle.from_recorder(recorder).future or {})[layer] for recorder in recorders]
        for one in single:
            part = future.mass[: len(one.mass), ..., : one.mass.shape[-1]]
            assert bool((part >= one.mass).all())
        at_context = len(single[0].ends) - 2  # blocks of the context; both have them
        assert torch.equal(
            future.mass[at_context - 4, ..., :140],
            torch.maximum(single[0].mass[at_context - 4, ..., :140], single[1].mass[at_context - 4, ..., :140]),
        )


def test_a_comparison_with_everything(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passkey, "_KEYS", [(begin[:8], lambda rng: "k3y") for begin, _ in passkey._KEYS])
    (tmp_path / "texts").mkdir()
    folder = text_folder(tmp_path / "texts", documents=20, characters=500)
    settings = Settings(
        policies=("full", "random", "oracle"), budgets=(BUDGET,), tasks=("passkey",), window=600, block=BLOCK
    )
    cases = make_cases(loaded, settings, docs=2, split="all", filler=folder)
    with RowStore(tmp_path / "rows.jsonl") as store:
        Comparison(loaded, settings, cases, store).run()
        rows = store.rows
    assert not [row["error"] for row in rows if row.get("error")]
    assert len(rows) == 3 * 2 * 2, "every policy has every metric of every document"
    for row in rows:
        assert row["solved"] == (row["full_value"] if row["metric"] == "exact_match" else row["solved"])
        assert row["slots"] == (BUDGET if row["policy"] != "full" else row["slots"])
        assert row["bytes"] > 0
        if row["policy"] == "full":
            assert row["value"] == pytest.approx(row["full_value"], abs=1e-4)
    lines = summary(rows)
    assert all(line.unsolved for line in lines), "random weights solve nothing, and every metric has to say so"

"""Cases: deterministic, within the window, one length a batch, and the answers are in what is read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from task_helpers import WINDOW, byte_tokenizer, material, text_folder

from kvlearn.errors import KvlearnError
from kvlearn.tasks import TASKS, resolve
from kvlearn.tasks.base import Case, Material

ASKING = [name for name in TASKS if name != "lm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_folder(tmp_path_factory.mktemp("texts"))


def _content(cases: list[Case]) -> list[Any]:
    return [(case.doc, case.domain, case.prompt, [text.tolist() for text in case.texts()]) for case in cases]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_material_gives_the_same_cases(name: str, folder: str) -> None:
    made = _content(resolve(name).cases(material(folder)))
    assert made == _content(resolve(name).cases(material(folder)))
    assert made != _content(resolve(name).cases(material(folder, seed=1))), "another seed changes nothing"
    assert made != _content(resolve(name).cases(material(folder, split="train"))), "another split changes nothing"


@pytest.mark.parametrize("name", TASKS)
def test_texts_fill_the_window_and_never_exceed_it(name: str, folder: str) -> None:
    cases = resolve(name).cases(material(folder))
    lengths = [len(text) for case in cases for text in case.texts()]
    assert len(cases) == 4
    assert max(lengths) == WINDOW
    assert len({len(case.input_ids) for case in cases}) == 1, "contexts of unequal length cannot share a batch"


@pytest.mark.parametrize("name", ASKING)
def test_every_answer_is_in_the_context(name: str, folder: str) -> None:
    tokenizer = byte_tokenizer()
    for case in resolve(name).cases(material(folder)):
        context = tokenizer.decode(case.input_ids)
        for question in case.questions:
            wanted = tokenizer.decode(question.ids[question.answer])
            given = tokenizer.decode(question.ids)
            assert question.answer.any()
            assert not question.answer[0]
            assert question.answer[-1], "what follows the last answer is fed for nothing"
            if name != "summary-needle":  # whose answers lie apart
                assert wanted in context, f"{given!r} cannot be answered"
            else:
                assert given.removeprefix("\nIn summary, ") in context


@pytest.mark.parametrize("name", ASKING)
def test_variants_take_turns(name: str, folder: str) -> None:
    task = resolve(name)
    assert [case.domain for case in task.cases(material(folder))] == list(task.variants) * 2


@pytest.mark.parametrize(("name", "share"), [("passkey", 0.25), ("copy", 0.25), ("kv-recall", 1.0)])
def test_what_is_asked_for_lies_where_it_should(name: str, share: float, folder: str) -> None:
    tokenizer = byte_tokenizer()
    for case in resolve(name).cases(material(folder)):
        assert case.prompt == round(len(case.input_ids) * share)
        prompt = tokenizer.decode(case.input_ids[: case.prompt])
        for question in case.questions:
            assert tokenizer.decode(question.ids[question.answer]) in prompt


def test_facts_are_put_at_line_breaks(folder: str) -> None:
    text = byte_tokenizer().decode(resolve("kv-recall").cases(material(folder))[0].input_ids)
    before = [part[-1:] for part in text.split("\nRemember this:")[:-1]]
    assert before == ["\n"] * len(before)


@pytest.mark.parametrize("name", ASKING)
def test_a_window_that_cannot_hold_the_facts_is_refused(name: str, folder: str) -> None:
    with pytest.raises(KvlearnError, match=r"a window of 150 tokens cannot hide \d+ tokens of facts"):
        resolve(name).cases(material(folder, window=150))


def test_too_few_texts_come_again_with_other_facts(tmp_path: Any) -> None:
    folder = text_folder(tmp_path, documents=1)
    cases = resolve("passkey").cases(replace(material(folder, split="all"), docs=6))
    assert len({tuple(case.input_ids.tolist()) for case in cases}) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [({"docs": 0, "window": 64}, "docs is 0"), ({"docs": 1, "window": 200}, "window is 200 tokens and tiny was made")],
)
def test_impossible_material_is_refused(options: dict[str, int], message: str) -> None:
    loaded: Any = SimpleNamespace(tokenizer=None, name="tiny", context_length=128)
    with pytest.raises(KvlearnError, match=message):
        Material.of(loaded, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("paskey", "did you mean 'passkey'"),
        ("ruler:vtt", "unknown task ruler:vtt; known are ruler:vt,"),
        ("nothing-like-it", "known are copy, kv-recall, lm"),
    ],
)
def test_an_unknown_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        resolve(name)

"""The user's own prompts: read, scored, and refused by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from task_helpers import byte_tokenizer, loaded_model

from kvlearn.compare import Comparison, Settings, make_cases
from kvlearn.errors import KvlearnError
from kvlearn.rows import RowStore
from kvlearn.tasks import resolve
from kvlearn.tasks.base import Case, Material

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% endif %}"
)
TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


def _write(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", "utf-8")
    return str(path)


def _cases(spec: str, *, template: str | None = None) -> list[Case]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return resolve(spec).cases(Material(tokenizer, docs=1, window=0))


def test_prompts_and_messages_become_contexts_and_answers(tmp_path: Path) -> None:
    spec = _write(
        tmp_path / "mine.jsonl",
        {"prompt": "Two and two make", "answer": " four."},
        "",
        {"messages": TALK, "id": "who", "domain": "talk"},
    )
    first, second = _cases(spec, template=TEMPLATE)
    decode = byte_tokenizer().decode
    assert (first.doc, first.domain, second.doc, second.domain) == ("line 1", "mine", "who", "talk")
    assert [decode(case.input_ids) for case in (first, second)] == ["Two and two make", "[user] Who?\n[assistant] "]
    assert [decode(case.questions[0].ids) for case in (first, second)] == [" four.", "Me."]
    assert all(case.prompt == len(case.input_ids) and case.questions[0].answer.all() for case in (first, second))


def test_generated_answers_have_to_contain_the_answer(tmp_path: Path) -> None:
    spec = _write(tmp_path / "mine.jsonl", {"prompt": "Two and two make", "answer": " four."})
    task = resolve(spec + ":contains")
    assert (task.name, task.metrics) == ("mine:contains", ("contains",))
    (case,) = _cases(spec + ":contains")
    (question,) = case.questions
    assert byte_tokenizer().decode(torch.cat([case.input_ids, question.ids])) == "Two and two make"
    assert question.contains == ("four.",)
    assert question.new_tokens >= len(" four.")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", 'give {"prompt": ..., "answer": ...}'),
        ({"prompt": "a b", "messages": TALK}, 'give {"prompt"'),
        ({"prompt": "a b"}, "'answer' must be a text, not None"),
        ({"prompt": "a b", "answer": 4}, "'answer' must be a text, not 4"),
        ({"prompt": "a", "answer": "b"}, "a prompt needs two tokens or more"),
        ({"prompt": "a b", "answer": ""}, "and an answer one"),
        ({"messages": TALK[:1]}, "two messages or more"),
        ({"messages": [TALK[0], {"role": "assistant"}]}, "must have a 'role' and a 'content'"),
        ({"messages": TALK[::-1]}, "must be 'assistant', not 'user'"),
        ({"prompt": "c d", "answer": "e", "id": "line 1"}, "id 'line 1' is there twice"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, line: Any, fault: str) -> None:
    spec = _write(tmp_path / "mine.jsonl", {"prompt": "a b", "answer": "c"}, "", line)
    with pytest.raises(KvlearnError) as caught:
        _cases(spec, template=TEMPLATE)
    assert f"{spec}, line 3: " in str(caught.value)
    assert fault in str(caught.value)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match=r"mine.jsonl, line 1: the model has no chat template"):
        _cases(_write(tmp_path / "mine.jsonl", {"messages": TALK}))


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match=r"cannot read prompts from .*none\.jsonl"):
        _cases(str(tmp_path / "none.jsonl"))
    with pytest.raises(KvlearnError, match="holds no prompts"):
        _cases(_write(tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(KvlearnError, match="cannot read prompts"):
        _cases(str(tmp_path / "latin.jsonl"))


def test_a_comparison_takes_prompts_of_any_length_and_skips_the_oracle_where_it_cannot_be(
    tmp_path: Path, tiny_llama: Callable[..., Any]
) -> None:
    loaded = loaded_model(tiny_llama(vocabulary=257))
    spec = _write(
        tmp_path / "mine.jsonl",
        {"prompt": "a long text. " * 9, "answer": " yes"},
        {"prompt": "a longer text. " * 9, "answer": " no"},
    )
    settings = Settings(policies=("ema", "oracle"), budgets=(32,), tasks=(spec, spec + ":contains"), block=8)
    with RowStore(tmp_path / "rows.jsonl") as store:
        comparison = Comparison(loaded, settings, make_cases(loaded, settings, docs=1), store)
        comparison.run()
        rows = store.rows
    assert not [row["error"] for row in rows if row.get("error")]
    found = {(row["task"], row["policy"], row["metric"]) for row in rows}
    assert found == {
        ("mine", "ema", "exact_match"),
        ("mine", "ema", "answer_nll"),
        ("mine", "oracle", "exact_match"),
        ("mine", "oracle", "answer_nll"),
        ("mine:contains", "ema", "contains"),
    }
    assert len(rows) == 2 * len(found), "every line of the file is used, whatever docs says"
    assert comparison.skipped == [
        "mine:contains: no oracle, because answers are generated, and nobody knows beforehand what they will attend to."
    ]
    assert all(row["window"] is None and row["slots"] == 32 for row in rows)

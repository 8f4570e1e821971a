"""The user's own prompts, from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvlearn.errors import KvlearnError
from kvlearn.models import encode
from kvlearn.tasks.base import Case, Material, Question
from kvlearn.tasks.questions import QuestionTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIX = ".jsonl"
CONTAINS = ":contains"
_MORE_TOKENS = 32  # that a generated answer may have beyond those of the answer wanted


class Prompts(QuestionTask):
    """Prompts with answers; a prompt is fed at once and cut to the budget, as in generation, and all lines are used.

    A line is ``{"prompt": ..., "answer": ...}``, the answer being what follows the prompt directly, its leading space
    included; or ``{"messages": [...]}`` for the model's chat template, whose last message is the assistant's, the
    answer. ``id`` and ``domain`` may name a line and group lines.

    Args:
        spec: the file; with ``:contains`` after it, answers are generated greedily and must contain the answer wanted,
            instead of being teacher-forced.
    """

    window = None
    summary = "prompts with answers from a file of JSON lines; FILE.jsonl:contains generates them"

    def __init__(self, spec: str) -> None:
        self.path = Path(spec.removesuffix(CONTAINS))
        self.name = self.path.stem
        self.variants = (self.name,)
        if spec.endswith(CONTAINS):
            self.name += CONTAINS
            self.generated, self.metrics = True, ("contains",)
            self.no_oracle = "answers are generated, and nobody knows beforehand what they will attend to"

    def cases(self, material: Material) -> list[Case]:
        """One case a line.

        Raises:
            KvlearnError: the file cannot be read, or a line is not as described; names the file and the line.
        """
        try:
            lines = self.path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KvlearnError(f"cannot read prompts from {self.path}: {error}.") from error
        found: dict[tuple[str, str], Case] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                case = self._case(material.tokenizer, json.loads(line), number)
                if (case.domain, case.doc) in found:
                    raise KvlearnError(f"id {case.doc!r} is there twice.")
            except KvlearnError as error:
                raise KvlearnError(f"{self.path}, line {number}: {error}") from error
            except json.JSONDecodeError as error:
                raise KvlearnError(f"{self.path}, line {number}: not valid JSON ({error}).") from error
            found[case.domain, case.doc] = case
        if not found:
            raise KvlearnError(f"{self.path} holds no prompts.")
        return list(found.values())

    def _case(self, tokenizer: PreTrainedTokenizerBase, line: Any, number: int) -> Case:
        prompt, answer = _texts(tokenizer, line)
        ids, wanted = encode(tokenizer, prompt), encode(tokenizer, answer)
        if len(ids) < 2 or not wanted:
            raise KvlearnError("a prompt needs two tokens or more, and an answer one.")
        doc, domain = str(line.get("id", f"line {number}")), str(line.get("domain", self.path.stem))
        if self.generated:  # the last token is fed on its own, for what it predicts
            question = Question(
                torch.tensor(ids[-1:]), torch.tensor([False]), (answer.strip(),), len(wanted) + _MORE_TOKENS
            )
            ids = ids[:-1]
        else:
            question = Question(torch.tensor(wanted), torch.ones(len(wanted), dtype=torch.bool))
        return Case(doc, domain, torch.tensor(ids), prompt=len(ids), questions=(question,))


def _texts(tokenizer: PreTrainedTokenizerBase, line: Any) -> tuple[str, str]:
    """Prompt and answer of a line."""
    if not isinstance(line, dict) or ("messages" in line) == ("prompt" in line):
        raise KvlearnError('give {"prompt": ..., "answer": ...} or {"messages": [...]}.')
    if "prompt" in line:
        for name in ("prompt", "answer"):
            if not isinstance(line.get(name), str):
                raise KvlearnError(f"{name!r} must be a text, not {line.get(name)!r}.")
        return line["prompt"], line["answer"]
    messages = line["messages"]
    if not isinstance(messages, list) or len(messages) < 2:
        raise KvlearnError("'messages' must be a list of two messages or more.")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise KvlearnError(f"a message must have a 'role' and a 'content' that are texts, not {message!r}.")
    if messages[-1]["role"] != "assistant":
        raise KvlearnError(
            f"the last message is the answer: its role must be 'assistant', not {messages[-1]['role']!r}."
        )
    if tokenizer.chat_template is None:
        raise KvlearnError("the model has no chat template; give a 'prompt' instead of 'messages'.")
    rendered = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return str(rendered), messages[-1]["content"]

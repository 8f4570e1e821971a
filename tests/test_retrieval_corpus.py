"""The synthetic retrieval corpus: facts that come back, in windows of the asked length, unlike the evaluation tasks."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvlearn.corpora import corpus_windows, documents, facts, list_corpora, split_of
from kvlearn.corpora.base import Length, Row, Source
from kvlearn.corpora.retrieval import retrieval_source
from kvlearn.errors import KvlearnError
from kvlearn.tasks import words

ROOT = Path(__file__).parents[1]


class WordTokenizer:
    """One token per word or sign, so that texts can be read back."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        pieces = re.findall(r"\s+|\w+|[^\w\s]", text)
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    def decode(self, ids: tuple[int, ...]) -> str:
        names = list(self.ids)
        return "".join(names[i] for i in ids)


def retrieval_windows(count: int, window: int = 1024, **options: Any) -> list[str]:
    tokenizer: Any = WordTokenizer()
    found = corpus_windows("retrieval", tokenizer, tokens=count * window, window=window, **options)
    return [tokenizer.decode(each.input_ids) for each in found]


def test_it_is_listed_and_the_same_every_time() -> None:
    assert [corpus.available for corpus in list_corpora() if corpus.name == "retrieval"] == [True]
    first, again, other = (retrieval_windows(6, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)


def test_every_window_is_a_document_of_its_own_with_its_questions() -> None:
    tokenizer: Any = WordTokenizer()
    found = list(corpus_windows("retrieval", tokenizer, tokens=20 * 1024, window=1024))
    assert all((window.start, len(window.documents), len(window)) == (0, 1, 1024) for window in found)
    assert len({window.doc for window in found}) == 20


def test_facts_come_back_and_some_of_them_late() -> None:
    gaps = []
    for text in retrieval_windows(30):
        for begin, _ in facts.NOTES:
            places = [match.start() for match in re.finditer(re.escape(begin), text)]
            gaps += [(b - a) / len(text) for a, b in pairwise(places)]
    assert len(gaps) > 30
    assert max(gaps) > 0.5
    assert sum(gap > 0.25 for gap in gaps) > len(gaps) / 5, "nothing sleeps"


def test_a_question_repeats_what_was_said() -> None:
    rng = random.Random(0)
    for make in facts.MAKERS.values():
        for _ in range(50):
            said = ""
            for fact in make(rng):
                said += fact.said
                answers = set(re.findall(r"[\w./-]+", fact.asked)) & set(re.findall(r"[\w./-]+", said))
                assert any(re.search(r"\d|[A-Z]", word) or len(word) > 3 for word in answers), fact


def test_a_document_is_in_the_split_of_its_filler() -> None:
    texts = [f"{i} " + " ".join(f"filler-{i}-{j}\n" for j in range(400)) for i in range(60)]
    filler = Source("made-up", "made-up", lambda seed: (Row(str(i), text) for i, text in enumerate(texts)))
    found = list(
        retrieval_source([filler], split_of, domain=None).documents(0, Length(512, lambda text: len(text) // 4))
    )
    assert {split_of(doc.text) for doc in found} >= {"train", "test"}
    for doc in found:
        sources = {int(number) for number in re.findall(r"filler-(\d+)-", doc.text)}
        assert {split_of(texts[number]) for number in sources} == {split_of(doc.text)}


def test_short_and_long_windows() -> None:
    for window in (64, 300, 4096):
        assert len(retrieval_windows(2, window=window)) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("retrieval?filler=nothing", "filler 'nothing' is no built-in corpus"),
        ("retrieval?filler=retrieval", "does not name built-in corpora"),
        ("retrieval?filler=stdlib+", "does not name built-in corpora"),
        ("stdlib?filler=stdlib", "'stdlib' has none"),
        ("retrieval?column=x", "a built-in corpus has no columns"),
        ("retrieva", "did you mean 'retrieval'"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        documents(spec)


# ---- Held out from evaluation -----------------------------------------------------------------------------------


def sentences(path: Path) -> Iterator[str]:
    """Texts in a module that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    told = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def runs(texts: Iterator[str], length: int = 3) -> set[tuple[str, ...]]:
    """Every run of three words."""
    found = set()
    for text in texts:
        spoken = re.findall(r"[a-z]+", text.lower())
        found |= {tuple(spoken[i : i + length]) for i in range(len(spoken) - length + 1)}
    return found


def test_no_wording_is_shared_with_the_evaluation_tasks() -> None:
    trained = runs(sentences(ROOT / "kvlearn/corpora/facts.py"))
    asked = runs(text for path in sorted((ROOT / "kvlearn/tasks").glob("*.py")) for text in sentences(path))
    ruler = pytest.importorskip("lm_eval.tasks.ruler", reason="RULER's texts come with lm-eval")
    asked |= runs(text for path in sorted(Path(ruler.__path__[0]).glob("*utils.py")) for text in sentences(path))
    assert len(trained) > 100
    assert not trained & asked


def test_no_list_of_words_is_shared_with_the_evaluation_tasks() -> None:
    lists = (facts.COLOURS, facts.ANIMALS, facts.TREES, facts.FAMILIES, facts.TOWNS, facts.THINGS)
    theirs = (words.ADJECTIVES, words.NOUNS, words.FIRST_NAMES, words.LAST_NAMES, words.CITIES)
    trained = {word.lower() for each in lists for word in each}
    assert not trained & {word.lower() for each in theirs for word in each}

"""Corpora: where text comes from, in what order, in which split, and how it is cut into windows."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlearn.corpora import Document, corpus_windows, documents, list_corpora, split_of, windows
from kvlearn.corpora import builtin as builtin_module
from kvlearn.corpora import files as files_module
from kvlearn.errors import KvlearnError

LONG = "Enough words to count as a document of a built-in corpus. " * 5


class ByteTokenizer:
    """One token per byte: lengths in tests can be counted by eye."""

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        assert not add_special_tokens, "corpora must not add special tokens"
        return list(text.encode())


TOKENIZER: Any = ByteTokenizer()


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def texts(spec: str | Path, **options: Any) -> list[str]:
    return [doc.text for doc in documents(str(spec), **options)]


# ---- Files ------------------------------------------------------------------------------------------------------


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes("\ufeffDear naïve 東京,\r\nbye\n".encode())
    (doc,) = documents(str(path))
    assert doc == Document("Dear naïve 東京,\nbye\n", domain="letter", source=str(path), id="letter.txt")


@pytest.mark.parametrize("text", ["line of text\n" * 60, "東京" * 150, "a" * 500 + "\n" + "b" * 500])
def test_long_text_file_is_cut_into_parts_that_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(files_module, "PART_BYTES", 100)
    path = tmp_path / "book.txt"
    path.write_text(text, "utf-8")
    docs = {int(doc.id.partition("#")[2]): doc.text for doc in documents(str(path))}
    assert len(docs) > 2
    assert "".join(docs[number] for number in range(len(docs))) == text
    assert all(len(part.encode()) <= 300 for part in docs.values())
    if text.startswith("line"):
        assert all(part.endswith("\n") for part in docs.values()), "cut inside a line"


def test_jsonl_rows_with_any_known_column(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]
    rows = [{"text": "one"}, {"content": "two", "domain": "own"}, {"messages": chat}, {"text": None}, {"text": " "}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with path.open("a") as file:
        file.write("\n")
    found = {doc.id: (doc.text, doc.domain) for doc in documents(str(path))}
    assert found == {
        "rows.jsonl:1": ("one", "rows"),
        "rows.jsonl:2": ("two", "own"),
        "rows.jsonl:3": ("user: hi\nassistant: yo", "rows"),
    }


def test_jsonl_text_that_is_no_unicode_is_made_so(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "half a pair: \\ud83d"}\n')
    (text,) = texts(path)
    assert text == "half a pair: ?"


def test_parquet_rows_and_chosen_column(tmp_path: Path) -> None:
    rows = [{"body": f"text {i}", "domain": "even" if i % 2 == 0 else None, "n": i} for i in range(10)]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    docs = list(documents(f"{path}?column=body"))
    assert {doc.text for doc in docs} == {f"text {i}" for i in range(10)}
    assert Counter(doc.domain for doc in docs) == {"even": 5, "rows": 5}
    assert len({doc.id for doc in docs}) == 10


def test_folder_mixes_all_known_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "no.txt").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "deep" / "a.md").write_text("markdown")
    write_jsonl(folder / "b.jsonl", [{"text": "json"}])
    write_parquet(folder / "c.parquet", [{"text": "parquet"}])
    docs = list(documents(str(folder)))
    assert {doc.text for doc in docs} == {"markdown", "json", "parquet"}
    assert {doc.domain for doc in docs} == {"mine"}
    assert {doc.id for doc in docs} == {"deep/a.md", "b.jsonl:1", "c.parquet:0.0"}
    assert {doc.domain for doc in documents(f"{folder}?domain=other")} == {"other"}


def test_path_with_a_comma_works_as_the_whole_spec(tmp_path: Path) -> None:
    path = tmp_path / "a,b*2?c.txt"
    path.write_text("odd name")
    assert texts(path) == ["odd name"]


def test_large_jsonl_is_not_held_in_memory(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "big.jsonl", [{"text": f"{i} " + "x" * 20_000} for i in range(500)])
    tracemalloc.start()
    total = sum(len(doc.text) for doc in documents(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 10_000_000
    assert peak < 1_000_000, f"{peak} bytes held for {total} bytes of text"


# ---- Order and split --------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "many.jsonl", [{"text": f"document number {i}"} for i in range(300)])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_order_depends_on_the_seed_only(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"document {i}"} for i in range(40)]
    if kind == "folder":
        place = tmp_path / "folder"
        place.mkdir()
        for i, row in enumerate(rows):
            (place / f"{i}.txt").write_text(row["text"])
    else:
        place = tmp_path / f"rows.{kind}"
        (write_jsonl if kind == "jsonl" else write_parquet)(place, rows)
    first, again, other = texts(place, seed=1), texts(place, seed=1), texts(place, seed=2)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other) == sorted(row["text"] for row in rows)
    assert first != [row["text"] for row in rows], "the order of the file was kept"


def test_order_is_the_same_on_every_machine(many: Path) -> None:
    """Committed figures: a trace made elsewhere from the same files must hold the same documents."""
    assert [text.rpartition(" ")[2] for text in texts(many, seed=0)[:5]] == ["210", "276", "243", "108", "7"]


def test_splits_partition_the_corpus_whatever_the_seed(many: Path) -> None:
    splits = {
        name: set(texts(many, split=name, seed=seed)) for seed, name in enumerate(["train", "validation", "test"])
    }
    assert set().union(*splits.values()) == set(texts(many))
    assert sum(map(len, splits.values())) == 300, "a document is in two splits"
    assert 210 < len(splits["train"]) < 270
    assert all(split_of(text) == name for name, found in splits.items() for text in found)


def test_split_never_changes() -> None:
    """Committed figures: another hash would leak old test documents into new training sets."""
    found = {text: split_of(text) for text in ("", "a", "document number 3", "naïve 東京")}
    assert found == {"": "train", "a": "train", "document number 3": "validation", "naïve 東京": "test"}


# ---- Mixtures ---------------------------------------------------------------------------------------------------


def test_mixture_takes_turns_by_weight_until_all_are_used_up(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(6)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(2)])
    docs = list(documents(f"{a}*2, {b}?domain=B"))
    assert "".join(doc.text[0] for doc in docs) == "aabaabaa"
    assert {doc.source for doc in docs} == {str(a), str(b)}
    assert {doc.domain for doc in docs} == {"a", "B"}


def test_mixture_is_balanced_in_windows(tmp_path: Path) -> None:
    long = write_jsonl(tmp_path / "long.jsonl", [{"text": "L" * 1000} for _ in range(20)])
    short = write_jsonl(tmp_path / "short.jsonl", [{"text": "s" * 10} for _ in range(200)])
    spec = f"{long},{short}"
    by_document = Counter(w.domain for w in windows(documents(spec), TOKENIZER, tokens=2000, window=100))
    by_window = Counter(w.domain for w in corpus_windows(spec, TOKENIZER, tokens=2000, window=100))
    assert by_window == {"long": 10, "short": 10}
    assert by_document["short"] < 3, "documents are balanced by document, as their docstring says"


def test_mixture_names_the_source_that_gives_no_window(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "L" * 1000}])
    poor = write_jsonl(tmp_path / "poor.jsonl", [{"text": "s"}])
    with pytest.raises(KvlearnError, match=r"corpus '.*poor\.jsonl': no window of 100 tokens can be made"):
        list(corpus_windows(f"{good},{poor}", TOKENIZER, tokens=None, window=100))


# ---- Built-in corpora -------------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: packages are looked up in this folder, and so are Debian's files."""
    monkeypatch.setattr(builtin_module, "SHARE", tmp_path / "share")
    monkeypatch.setattr(builtin_module, "R_LIBRARY", tmp_path / "R")

    def package_folder(name: str) -> Path | None:
        return tmp_path / name if (tmp_path / name).is_dir() else None

    monkeypatch.setattr(builtin_module, "_package_folder", package_folder)
    return tmp_path


def put(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def test_stdlib_is_code_without_tests() -> None:
    docs = list(itertools.islice(documents("stdlib"), 40))
    assert {doc.domain for doc in docs} == {"stdlib"}
    assert all(doc.id.endswith(".py") for doc in docs)
    assert not any({"test", "tests", "site-packages"} & set(doc.id.split("/")) for doc in docs)
    assert any("import" in doc.text for doc in docs)
    assert {doc.id for doc in docs} != {doc.id for doc in itertools.islice(documents("stdlib", seed=1), 40)}


def test_sympy_docs_are_docstrings_in_the_order_of_the_source(packages: Path) -> None:
    code = (
        f'"""Module. {LONG}"""\nimport nowhere\n'
        'class A:\n    """Class."""\n    def f(self): "Method."\n'
        'def g(): pass\nasync def h():\n    """Last \\d."""\n'
    )
    put(packages / "sympy/core/add.py", code)
    put(packages / "sympy/core/tests/test_add.py", code)
    put(packages / "sympy/core/broken.py", "def (")
    put(packages / "sympy/core/latin.py", b"# \xe9\n")
    (doc,) = documents("sympy-docs")
    assert doc.id == "core/add.py"
    assert doc.text == f"add\n\nModule. {LONG}\n\nadd.A\n\nClass.\n\nadd.A.f\n\nMethod.\n\nadd.h\n\nLast \\d."


def test_transformers_code_is_the_modeling_files(packages: Path) -> None:
    put(packages / "transformers/models/llama/modeling_llama.py", LONG)
    put(packages / "transformers/models/llama/configuration_llama.py", LONG)
    put(packages / "transformers/utils.py", LONG)
    assert [doc.id for doc in documents("transformers-code")] == ["models/llama/modeling_llama.py"]


def test_chitchat_is_dialogue_with_anonymous_speakers(packages: Path) -> None:
    def turn(sender: str, *said: str) -> list[dict[str, str]]:
        return [{"text": text, "sender": sender, "timestamp": ""} for text in said]

    data = {
        "id-1": {"messages": [turn("x", "Hi", LONG), [], turn("y", "Hello"), turn("x", "Bye")], "start": ""},
        "id-2": {"messages": [turn("x", "too short")]},
    }
    put(packages / "chitchat_dataset/dataset.json", json.dumps(data))
    (doc,) = documents("chitchat")
    assert doc.text == f"A: Hi\n{LONG}\nB: Hello\nA: Bye"
    assert doc.id == "dataset.json#id-1"


def test_python_docs_are_those_of_the_newest_python(packages: Path) -> None:
    for version in ("3.9", "3.11"):
        put(packages / f"share/doc/python{version}/html/_sources/library/os.rst.txt", f"{version} {LONG}")
    put(packages / "share/doc/python3-apt/html/_sources/index.rst.txt", LONG)
    (doc,) = documents("python-docs")
    assert doc.id == "library/os.rst.txt"
    assert doc.text.startswith("3.11")


def test_other_debian_texts(packages: Path) -> None:
    put(packages / "share/doc/anarchism/markdown/secA.md.gz", gzip.compress(LONG.encode()))
    put(packages / "share/doc/anarchism/markdown/secB.md", LONG + "B")
    assert sorted(texts("anarchism")) == [LONG, LONG + "B"]
    put(packages / "share/perl/5.36.0/pod/perldiag.pod", LONG)
    with pytest.raises(KvlearnError, match=r"'perl-docs' .* is not installed: apt-get install .*perl-doc"):
        documents("perl-docs")  # this page comes with Perl itself
    put(packages / "share/perl/5.36.0/pod/perl.pod", LONG)
    assert len(texts("perl-docs")) == 2


def r_vector(strings: list[str | None], version: int) -> bytes:
    """R's serialisation of a character vector, in a block of its lazy-load format."""
    data = b"X\n" + struct.pack(">3i", version, 0x40201, 0x30500)
    if version == 3:
        data += struct.pack(">i", 5) + b"UTF-8"
    data += struct.pack(">2i", 16, len(strings))
    for string in strings:
        raw = b"" if string is None else string.encode()
        data += struct.pack(">2i", 9, -1 if string is None else len(raw)) + raw
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_austen_is_split_into_chapters(packages: Path) -> None:
    emma = r_vector(["EMMA", "By Jane", None, "CHAPTER I", LONG, "chapter upon chapter", "CHAPTER II", LONG], 3)
    other = r_vector(["Persuasion", "Chapter 1", LONG + "é"], 2)
    put(packages / "R/janeaustenr/data/Rdata.rdb", emma + other)
    found = {doc.id: doc.text for doc in documents("austen")}
    assert found == {
        "Rdata.rdb#Emma, 1": f"CHAPTER I\n{LONG}\nchapter upon chapter\n",
        "Rdata.rdb#Emma, 2": f"CHAPTER II\n{LONG.strip()}\n",
        "Rdata.rdb#Persuasion, 1": f"Chapter 1\n{LONG}é\n",
    }
    put(packages / "R/janeaustenr/data/Rdata.rdb", emma[:60])
    with pytest.raises(KvlearnError, match=r"'austen': cannot read .*Rdata\.rdb"):
        list(documents("austen"))


def test_every_builtin_corpus_says_how_to_get_it(packages: Path) -> None:
    listed = {corpus.name: corpus for corpus in list_corpora()}
    assert {"stdlib", "sympy-docs", "transformers-code", "chitchat", "python-docs", "anarchism"} <= listed.keys()
    assert listed.pop("stdlib").available
    assert not listed.pop("retrieval").available, "it is made of the text of others"
    for name, corpus in listed.items():
        assert not corpus.available
        assert corpus.summary
        with pytest.raises(KvlearnError, match=f"'{name}' .* is not installed: {corpus.install}"):
            documents(name)


# ---- Hugging Face data sets -------------------------------------------------------------------------------------


def test_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="reading data sets needs the package datasets")

    def rows() -> Iterator[dict[str, str]]:
        yield from ({"body": f"row {i}"} for i in range(50))

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (path, config, split, streaming) == ("someone/things", "small", "dev", True)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = "someone/things:small?split=dev&column=body"
    docs = list(documents(spec, seed=1))
    assert {doc.text for doc in docs} == {f"row {i}" for i in range(50)}
    assert {doc.domain for doc in docs} == {"things"}
    assert [doc.text for doc in documents(spec, seed=1)] == [doc.text for doc in docs]
    other = list(documents(spec, seed=2))
    assert [doc.text for doc in other] != [doc.text for doc in docs]
    assert {(doc.id, doc.text) for doc in other} == {(doc.id, doc.text) for doc in docs}
    with pytest.raises(KvlearnError, match="no column 'text' or 'content' or 'messages'; columns found: 'body'"):
        list(documents("someone/things:small?split=dev"))


def test_dataset_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="reading data sets needs the package datasets")

    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        KvlearnError, match=r"'someone/things' is no file.*stdlib.*ConnectionError: no route to the Hub$"
    ):
        documents("someone/things")


# ---- Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no corpus named"),
        ("stdlib,,stdlib", "names nothing between two commas"),
        ("stdlb", "unknown corpus 'stdlb': did you mean 'stdlib'"),
        ("nowhere.txt", r"'nowhere\.txt': no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("stdlib*0", "weight '0' is not a whole number"),
        ("stdlib*x", "weight 'x' is not a whole number"),
        ("stdlib?colum=x", "'colum=x' is not KEY=VALUE with a key out of column, domain, split, filler"),
        ("stdlib?column=x", "a built-in corpus has no columns"),
        ("stdlib?split=test", "names the split of a Hugging Face data set"),
    ],
)
def test_bad_specs_are_refused_at_the_door(spec: str, message: str) -> None:
    with pytest.raises(KvlearnError, match=message) as caught:
        documents(spec)
    assert "\n" not in str(caught.value)


def test_unknown_split_is_refused() -> None:
    wrong: Any = "dev"
    with pytest.raises(KvlearnError, match="split 'dev' is not one of train, validation, test, all"):
        documents("stdlib", split=wrong)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        (
            "x.jsonl",
            lambda p: write_jsonl(p, [{"a": 1, "b": 2}]),
            r"line 1: no column 'text'.* found: 'a', 'b'; choose",
        ),
        ("x.jsonl", lambda p: p.write_text('{"text": "a"}\n{"te'), r"x\.jsonl, line 2: not a JSON object on a line"),
        ("x.jsonl", lambda p: write_jsonl(p, [[1]]), "expected a JSON object, found list"),
        ("x.jsonl", lambda p: write_jsonl(p, [{"text": 3}]), "column 'text' holds int, expected text"),
        (
            "x.jsonl",
            lambda p: write_jsonl(p, [{"messages": [{"role": "user"}]}]),
            r"needs text in 'role' and 'content'",
        ),
        ("x.parquet", lambda p: write_parquet(p, [{"a": "b"}]), "no column 'text'.* found: 'a'"),
        ("x.parquet", lambda p: p.write_bytes(b"PAR1 but not really"), r"x\.parquet is not a readable Parquet file"),
        ("x.txt", lambda p: p.write_bytes(b"caf\xe9"), "is not text in UTF-8: .*0xe9"),
        ("x.txt", lambda p: p.write_text(" \n"), "is empty: it holds no text"),
        ("x.jsonl", lambda p: p.touch(), "is empty: it holds no text"),
        ("folder", lambda p: p.mkdir(), "holds no file of a known kind"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, write: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(KvlearnError, match=message) as caught:
        list(documents(str(path)))
    assert "\n" not in str(caught.value)


def test_missing_parquet_column_is_told_before_reading(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": "b"}])
    with pytest.raises(KvlearnError, match="no column 'body'; columns found: 'text'"):
        documents(f"{path}?column=body")


def test_split_without_a_document_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("the only document")
    other = next(name for name in ("validation", "test") if name != split_of("the only document"))
    with pytest.raises(KvlearnError, match=f"no document in the {other} split .it holds 1"):
        texts(path, split=other)


# ---- Windows ----------------------------------------------------------------------------------------------------


def doc(text: str, name: str = "d", domain: str = "x") -> Document:
    return Document(text, domain, "test", name)


def test_long_document_gives_whole_windows_of_its_own() -> None:
    text = "".join(chr(33 + i % 90) for i in range(1050))
    made = list(windows([doc(text)], TOKENIZER, tokens=None, window=100, max_windows_per_document=None))
    assert [w.start for w in made] == list(range(0, 1000, 100))
    assert all(bytes(w.input_ids).decode() == text[w.start : w.start + 100] for w in made)
    assert all((w.doc, w.documents, w.domain, len(w)) == ("d", ("d",), "x", 100) for w in made)


def test_a_limit_chooses_windows_all_over_the_document() -> None:
    docs = [doc("x" * 1000, name=str(i)) for i in range(100)]
    made = list(windows(docs, TOKENIZER, tokens=None, window=100, max_windows_per_document=2))
    per_document = Counter(w.doc for w in made)
    assert set(per_document.values()) == {2}
    starts = Counter(w.start for w in made)
    assert len(starts) == 10
    assert max(starts.values()) < 40, f"windows crowd together: {starts}"
    assert made == list(windows(docs, TOKENIZER, tokens=None, window=100, max_windows_per_document=2))


def test_short_documents_are_packed_by_domain() -> None:
    docs = [doc("aaaa", "a"), doc("bbbb", "b"), doc("yyyyyyyyy", "y", "other"), doc("cccc", "c"), doc("dd", "d")]
    made = list(windows(docs, TOKENIZER, tokens=None, window=8))
    assert [bytes(w.input_ids) for w in made] == [b"aaaa\n\nbb", b"yyyyyyyy", b"bb\n\ncccc"]
    assert [w.documents for w in made] == [("a", "b"), ("y",), ("b", "c")]
    assert [(w.doc, w.start) for w in made] == [("a", 0), ("y", 0), ("b", 2)]


def test_without_packing_short_documents_are_left_out() -> None:
    docs = [doc("a" * 5), doc("b" * 12), doc("c" * 5)]
    made = list(windows(docs, TOKENIZER, tokens=None, window=10, pack=False))
    assert [bytes(w.input_ids) for w in made] == [b"b" * 10]


def test_min_window_allows_shorter_ones() -> None:
    docs = [doc("a" * 7, "a"), doc("b" * 3, "b"), doc("c" * 2, "c"), doc("d" * 15, "d")]
    made = list(windows(docs, TOKENIZER, tokens=None, window=10, min_window=6))
    assert [bytes(w.input_ids) for w in made] == [b"a" * 7, b"d" * 10, b"bbb\n\ncc"]
    assert made[-1].documents == ("b", "c")


def test_windows_stop_at_the_number_of_tokens() -> None:
    def endless() -> Iterator[Document]:
        for i in itertools.count():
            yield doc("x" * 100, str(i))

    assert sum(map(len, windows(endless(), TOKENIZER, tokens=250, window=100))) == 300
    assert sum(map(len, windows(endless(), TOKENIZER, tokens=300, window=100))) == 300


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    window=st.integers(2, 25),
)
def test_packing_against_a_slow_reference(lengths: list[int], window: int) -> None:
    """Token by token: every window is full, and every packed token is where its ids say."""
    docs = [doc("".join(chr(33 + (i + j) % 90) for j in range(n)), str(i)) for i, n in enumerate(lengths)]
    expected: list[tuple[bytes, str, int, tuple[str, ...]]] = []
    held: list[tuple[int, str | None, int]] = []  # token, document (None in a separator), position in it
    for d in docs:
        raw = d.text.encode()
        if len(raw) >= window:
            starts = range(0, len(raw) - window + 1, window)
            expected += [(raw[start : start + window], d.id, start, (d.id,)) for start in starts]
            continue
        if held:
            held += [(10, None, 0), (10, None, 0)]
        held += [(token, d.id, i) for i, token in enumerate(raw)]
        if len(held) >= window:
            cut, held = held[:window], held[window:]
            ids = tuple(dict.fromkeys(name for _, name, _ in cut if name is not None))
            expected.append((bytes(token for token, _, _ in cut), ids[0], cut[0][2], ids))
            while held and held[0][1] is None:  # a window never starts with a separator
                held.pop(0)
    stream = windows(docs, TOKENIZER, tokens=None, window=window, max_windows_per_document=None)
    if not expected:
        with pytest.raises(KvlearnError, match="can be made"):
            next(stream)
        return
    made = [(bytes(w.input_ids), w.doc, w.start, w.documents) for w in stream]
    assert made == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"window": 1}, "window is 1"),
        ({"min_window": 101}, "min_window is 101, must be between 2 and the window of 100"),
        ({"max_windows_per_document": 0}, "max_windows_per_document is 0"),
    ],
)
def test_impossible_sizes_are_refused_at_the_door(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"tokens": 10, "window": 100, **options}
    with pytest.raises(KvlearnError, match=message):
        windows([], TOKENIZER, **sizes)


def test_no_window_is_an_error_with_figures() -> None:
    with pytest.raises(KvlearnError, match="the corpus is empty"):
        list(windows([], TOKENIZER, tokens=None, window=10))
    docs = [doc("abc", "1"), doc("de", "2")]
    with pytest.raises(KvlearnError, match="longest of 2 documents has 3 tokens, 7 tokens in all"):
        list(windows(docs, TOKENIZER, tokens=None, window=10))
    with pytest.raises(KvlearnError, match=r"longest of 2 documents has 3 tokens; ask"):
        list(windows(docs, TOKENIZER, tokens=None, window=10, pack=False))

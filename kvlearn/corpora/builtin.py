"""Corpora that are on the disk already, or come with one ordinary package."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import re
import struct
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlearn.corpora.base import Row, Source, in_seeded_order
from kvlearn.corpora.retrieval import FILLER, SUMMARY
from kvlearn.corpora.retrieval import NAME as RETRIEVAL
from kvlearn.errors import KvlearnError

SHARE = Path("/usr/share")  # where Debian packages put their documentation
R_LIBRARY = Path("/usr/lib/R/site-library")
MIN_CHARS = 200  # shorter texts (empty modules, one-line greetings) teach nothing about memory
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Texts = dict[str, str]  # the texts of one file by name; the name is "" for a file that is one text


@dataclass(frozen=True)
class CorpusInfo:
    """One line about a built-in corpus.

    Attributes:
        name: Its name in a spec, and its domain.
        summary: What it holds.
        install: The command that installs it.
        available: Whether it is on this machine.
    """

    name: str
    summary: str
    install: str
    available: bool


@dataclass(frozen=True)
class _Builtin:
    """A corpus made of files: where they are (nowhere if not installed), and how one file is read."""

    summary: str
    install: str
    find: Callable[[], Mapping[str, Path]]  # by a name that does not depend on the machine
    read: Callable[[Path], Texts]


def list_corpora() -> list[CorpusInfo]:
    """The built-in corpora, with what to install for each and whether it is here."""
    found = [CorpusInfo(name, it.summary, it.install, bool(it.find())) for name, it in BUILTINS.items()]
    here = all(info.available for info in found if info.name in FILLER.split("+"))
    return [*found, CorpusInfo(RETRIEVAL, SUMMARY, "pip install sympy", here)]


def builtin_source(name: str, *, domain: str | None) -> Source:
    """A source for a built-in corpus.

    Raises:
        KvlearnError: If its files are not on this machine; the message says what to install.
    """
    builtin = BUILTINS[name]
    files = builtin.find()
    if not files:
        raise KvlearnError(f"corpus {name!r} ({builtin.summary}) is not installed: {builtin.install}")

    def rows(seed: int) -> Iterator[Row]:
        for key in in_seeded_order(files, seed):
            try:
                texts = builtin.read(files[key])
            except (OSError, EOFError, LookupError, struct.error, zlib.error) as error:
                raise KvlearnError(f"corpus {name!r}: cannot read {files[key]} ({error}); install it again") from error
            except (ValueError, SyntaxError):  # a file in another encoding or another dialect of Python
                continue
            for part in in_seeded_order(texts, seed):
                if len(texts[part].strip()) >= MIN_CHARS:
                    yield Row(f"{key}#{part}" if part else key, texts[part])

    return Source(name, domain or name, rows)


# ---- Where the files are ----------------------------------------------------------------------------------------


def _below(root: Path | None, pattern: str) -> dict[str, Path]:
    """Files matching a pattern below a folder, by relative path; none if the folder is missing."""
    if root is None or not root.is_dir():
        return {}
    found = {path.relative_to(root).as_posix(): path for path in root.glob(pattern) if path.is_file()}
    return {key: path for key, path in found.items() if _SKIPPED_FOLDERS.isdisjoint(key.split("/"))}


def _package_folder(name: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _python_docs() -> dict[str, Path]:
    """The sources of the newest Python's documentation; other packages' pages lie in folders of the same shape."""
    roots = SHARE.glob("doc/python3.*/html/_sources")
    newest = max(roots, key=lambda root: [int(n) for n in re.findall(r"\d+", root.parts[-3])], default=None)
    return _below(newest, "**/*.rst.txt")


def _perl_docs() -> dict[str, Path]:
    """All pages, if the package is there: Perl itself brings a single one."""
    roots = (root for root in SHARE.glob("perl/5*/pod") if (root / "perl.pod").is_file())
    return _below(max(roots, default=None), "*.pod")


# ---- How one file is read ---------------------------------------------------------------------------------------


def _whole(path: Path) -> Texts:
    """A text file, compressed or not, as one text."""
    data = path.read_bytes()
    return {"": (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")}


def _docstrings(path: Path) -> Texts:
    """The docstrings of a module in the order of its source, each under the name it documents, as one text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in code we only read
        tree = ast.parse(path.read_text("utf-8"))
    return {"": "\n\n".join(_documented(tree, path.stem))}


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield f"{name}\n\n{text}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")


def _conversations(path: Path) -> Texts:
    """Chitchat's JSON: id -> {"messages": turns of one speaker, each a list of utterances}."""
    texts = {}
    for key, conversation in json.loads(path.read_text("utf-8")).items():
        speakers: dict[str, str] = {}
        lines = []
        for turn in filter(None, conversation["messages"]):
            speaker = speakers.setdefault(turn[0]["sender"], chr(ord("A") + len(speakers)))
            lines.append(f"{speaker}: " + "\n".join(utterance["text"] for utterance in turn))
        texts[key] = "\n".join(lines)
    return texts


def _chapters(path: Path) -> Texts:
    """Novels as an R package stores them: zlib blocks, each one R vector of lines; one text per chapter."""
    data, texts = path.read_bytes(), {}
    while data:
        block = zlib.decompressobj()
        lines = _r_strings(block.decompress(data[4:]))  # 4: the length of the block when decompressed
        data = block.unused_data
        chapters = re.split(r"^(?=(?:CHAPTER|Chapter) [IVXLC\d])", "\n".join(lines), flags=re.MULTILINE)
        for number, chapter in enumerate(chapters):
            texts[f"{lines[0].title()}, {number}"] = chapter.strip() + "\n"
    return texts


def _r_strings(data: bytes) -> list[str]:
    """A character vector in R's serialisation: a header, then type, count, and a length before each string."""
    (version,) = struct.unpack_from(">i", data, 2)
    position = 2 + 3 * 4
    if version == 3:  # names the encoding
        position += 4 + struct.unpack_from(">i", data, position)[0]
    kind, count = struct.unpack_from(">2i", data, position)
    if kind & 0xFF != 16:
        raise ValueError(f"expected a character vector, R type 16, found {kind & 0xFF}")
    position += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", data, position + 4)  # -1 marks a missing string
        start, position = position + 8, position + 8 + max(length, 0)
        strings.append(data[start:position].decode("utf-8"))
    return strings


_DEBIAN = "apt-get install --no-install-recommends"

BUILTINS: dict[str, _Builtin] = {
    "stdlib": _Builtin(
        "code: Python's standard library",
        "comes with Python",
        lambda: _below(Path(sysconfig.get_paths()["stdlib"]), "**/*.py"),
        _whole,
    ),
    "sympy-docs": _Builtin(
        "mathematics: the docstrings of sympy, one document per module",
        "pip install sympy",
        lambda: _below(_package_folder("sympy"), "**/*.py"),
        _docstrings,
    ),
    "torch-docs": _Builtin(
        "manuals: the docstrings of torch, one document per module",
        "pip install torch",
        lambda: _below(_package_folder("torch"), "**/*.py"),
        _docstrings,
    ),
    "torch-headers": _Builtin(
        "code: the C++ headers of torch",
        "pip install torch",
        lambda: _below(_package_folder("torch"), "include/**/*.h"),
        _whole,
    ),
    "transformers-code": _Builtin(
        "code: the models of transformers",
        "pip install transformers",
        lambda: _below(_package_folder("transformers"), "models/*/modeling_*.py"),
        _whole,
    ),
    "chitchat": _Builtin(
        "dialogue: conversations between people",
        "pip install chitchat-dataset",
        lambda: _below(_package_folder("chitchat_dataset"), "dataset.json"),
        _conversations,
    ),
    "python-docs": _Builtin("manuals: the documentation of Python", f"{_DEBIAN} python3.11-doc", _python_docs, _whole),
    "perl-docs": _Builtin("manuals: the documentation of Perl", f"{_DEBIAN} perl-doc", _perl_docs, _whole),
    "git-docs": _Builtin(
        "manuals: of the commands of git",
        f"{_DEBIAN} git-doc",
        lambda: _below(SHARE / "doc/git-doc", "git-*.txt"),
        _whole,
    ),
    "anarchism": _Builtin(
        "essays: An Anarchist FAQ",
        f"{_DEBIAN} anarchism",
        lambda: _below(SHARE / "doc/anarchism/markdown", "*.md*"),
        _whole,
    ),
    "austen": _Builtin(
        "novels: six by Jane Austen, one document per chapter",
        f"{_DEBIAN} r-cran-janeaustenr",
        lambda: _below(R_LIBRARY / "janeaustenr/data", "Rdata.rdb"),
        _chapters,
    ),
}

"""From a spec such as ``stdlib*2,notes/`` to a stream of documents or windows."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from kvlearn.corpora.base import Document, Length, Source
from kvlearn.corpora.builtin import BUILTINS, builtin_source
from kvlearn.corpora.files import JSON_SUFFIXES, PARQUET_SUFFIXES, TEXT_SUFFIXES, dataset_source, file_source
from kvlearn.corpora.retrieval import FILLER, NAME, check_fillers, retrieval_source
from kvlearn.corpora.windows import Window, until, windows
from kvlearn.errors import KvlearnError

Split = Literal["train", "validation", "test", "all"]
_OPTIONS = ("column", "domain", "split", "filler")
_Item = TypeVar("_Item")


def documents(spec: str, *, split: Split = "all", seed: int = 0) -> Iterator[Document]:
    """Stream the documents of a corpus or a mixture of corpora.

    Sources take turns, each giving as many documents as its weight; one that is used up drops out. Within a source the
    order depends on the seed and nothing else. Only names and row offsets are held in memory, plus the documents of
    one file for the built-in dialogues and novels, one row group of Parquet, or 1,000 documents of a streamed data set.

    Args:
        spec: See `kvlearn.corpora`.
        split: Keep the documents of this split only (`split_of`).
        seed: Another seed gives another order of the same documents.

    Returns:
        Documents, read as they are asked for.

    Raises:
        KvlearnError: At once if a source is unknown, missing or not installed; while iterating if a file is corrupt, a
            column is missing, or a source has no document in the split.
    """
    parts = _parse(spec, split)
    streams = [_documents(part.source, split, seed) for part in parts]
    return _take_turns(streams, [part.weight for part in parts])


def corpus_windows(
    spec: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int | None,
    window: int,
    min_window: int | None = None,
    pack: bool = True,
    max_windows_per_document: int | None = 2,
    split: Split = "all",
    seed: int = 0,
) -> Iterator[Window]:
    """Stream windows of a mixture, its sources taking turns window by window.

    A mixture of long and short documents is balanced in tokens here; `documents` balances it in documents, and so gives
    short dialogues a small share of the tokens.

    Args:
        spec: See `kvlearn.corpora`; weights count windows.
        tokenizer: Of the model that will read the windows.
        tokens: Stop once this many tokens were given; None for all there are.
        window: Tokens per window.
        min_window: See `windows`.
        pack: See `windows`.
        max_windows_per_document: See `windows`.
        split: See `documents`.
        seed: See `documents`.

    Raises:
        KvlearnError: As `documents` and `windows` do; also if one source of a mixture gives no window at all.
    """
    parts = _parse(spec, split)
    if tokens is not None and tokens < 1:
        raise KvlearnError(f"tokens is {tokens}, must be at least 1")
    from kvlearn.models.text import encode

    length = Length(window, lambda text: len(encode(tokenizer, text)))
    streams = [
        _named(
            part.source.name,
            windows(
                _documents(part.source, split, seed, length),
                tokenizer,
                tokens=None,
                window=window,
                min_window=min_window,
                pack=pack,
                max_windows_per_document=max_windows_per_document,
            ),
        )
        for part in parts
    ]
    return until(_take_turns(streams, [part.weight for part in parts]), tokens)


def split_of(text: str) -> Literal["train", "validation", "test"]:
    """The split a document belongs to: 80, 10 and 10 percent by a fixed hash of its text.

    Equal texts are always in the same split, whatever corpus, order or seed they come with.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    percent = int.from_bytes(digest, "big") % 100
    return "train" if percent < 80 else "validation" if percent < 90 else "test"


# ---- Specs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One source of a mixture and its weight."""

    source: Source
    weight: int


def _parse(spec: str, split: str) -> list[_Part]:
    """Find every source of a spec, before any text is read."""
    if split not in get_args(Split):
        raise KvlearnError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    if spec and _exists(spec):
        return [_Part(_find(spec, spec, {}), 1)]
    items = [item.strip() for item in spec.split(",")]
    if not all(items):
        raise KvlearnError(f"corpus {spec!r} names nothing between two commas" if spec.strip() else "no corpus named")
    return [_parse_item(item) for item in items]


def _parse_item(item: str) -> _Part:
    before, _, query = item.partition("?")
    name, star, weight = before.partition("*")
    if star and not re.fullmatch(r"[1-9]\d*", weight):
        raise KvlearnError(f"corpus {item!r}: weight {weight!r} is not a whole number of at least 1")
    options: dict[str, str] = {}
    for pair in query.split("&") if query else []:
        key, _, value = pair.partition("=")
        if key not in _OPTIONS or not value:
            raise KvlearnError(f"corpus {item!r}: {pair!r} is not KEY=VALUE with a key out of {', '.join(_OPTIONS)}")
        options[key] = value
    return _Part(_find(name, item, options), int(weight or 1))


def _find(name: str, item: str, options: dict[str, str]) -> Source:
    """Built-in name first, then a path, then a Hugging Face data set."""
    column, domain, split, filler = (options.get(key) for key in _OPTIONS)
    builtin, path = name in (*BUILTINS, NAME), Path(name).expanduser()
    if builtin and column:
        raise KvlearnError(f"corpus {item!r}: a built-in corpus has no columns")
    if split and (builtin or _exists(name)):
        raise KvlearnError(f"corpus {item!r}: ?split names the split of a Hugging Face data set, and {name!r} is none")
    if filler and name != NAME:
        raise KvlearnError(f"corpus {item!r}: ?filler names the text between facts of {NAME!r}, and {name!r} has none")
    if name == NAME:
        names = check_fillers(filler or FILLER, item)
        for unknown in set(names) - set(BUILTINS):
            raise KvlearnError(f"corpus {item!r}: filler {unknown!r} is no built-in corpus ({', '.join(BUILTINS)})")
        return retrieval_source([builtin_source(each, domain=None) for each in names], split_of, domain=domain)
    if builtin:
        return builtin_source(name, domain=domain)
    if _exists(name):
        return file_source(path, name, column=column, domain=domain)
    looks_like_path = name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1 or name.endswith("/")
    if looks_like_path or path.suffix.lower() in TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES:
        raise KvlearnError(f"corpus {name!r}: no such file or folder")
    near = difflib.get_close_matches(name.lower(), (*BUILTINS, NAME), n=1, cutoff=0.7)
    if near:
        raise KvlearnError(f"unknown corpus {name!r}: did you mean {near[0]!r}?")
    hint = f"no file, no folder and no built-in corpus ({', '.join((*BUILTINS, NAME))})"
    return dataset_source(name, split=split or "train", column=column, domain=domain, hint=hint)


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a zero byte, an unknown ~user
        return False


# ---- Streams ----------------------------------------------------------------------------------------------------


def _documents(source: Source, split: Split, seed: int, length: Length | None = None) -> Iterator[Document]:
    seen = kept = 0
    for doc in source.documents(seed, length):
        seen += 1
        if split in ("all", split_of(doc.text)):
            kept += 1
            yield doc
    if not seen:
        raise KvlearnError(f"corpus {source.name!r} is empty: it holds no text")
    if not kept:
        raise KvlearnError(
            f"corpus {source.name!r} has no document in the {split} split (it holds {seen}, split by a hash of the "
            "text): give more documents, or use split all"
        )


def _named(name: str, stream: Iterator[Window]) -> Iterator[Window]:
    """Say which source of a mixture a complaint is about."""
    try:
        yield from stream
    except KvlearnError as error:
        raise error if repr(name) in str(error) else KvlearnError(f"corpus {name!r}: {error}") from error


def _take_turns(streams: Sequence[Iterator[_Item]], weights: Sequence[int]) -> Iterator[_Item]:
    """Round robin: each stream gives up to its weight per round; a stream that ends drops out."""
    active = list(zip(streams, weights, strict=True))
    while active:
        going_on = []
        for stream, weight in active:
            batch = list(islice(stream, weight))
            yield from batch
            if len(batch) == weight:
                going_on.append((stream, weight))
        active = going_on

"""Text, JSONL and Parquet files, folders of them, and Hugging Face data sets."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlearn.corpora.base import Row, Source, in_seeded_order, seeded_permutation
from kvlearn.errors import KvlearnError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
COLUMNS = ("text", "content", "messages")  # tried in this order when no column is named
PART_BYTES = 256 * 1024  # a longer text file is cut at line ends into documents of about this size
SHUFFLE_BUFFER = 1000  # documents of a streamed data set held in memory to mix its order


def file_source(path: Path, name: str, *, column: str | None, domain: str | None) -> Source:
    """A source for one file, or for all files of known kinds below a folder (hidden ones left out).

    Raises:
        KvlearnError: If there is nothing readable there.
    """
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in _files_below(path)}
        if not files:
            known = " ".join(TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES)
            raise KvlearnError(f"folder {path} holds no file of a known kind ({known})")
        own_domain = path.resolve().name
    else:
        files, own_domain = {path.name: path}, path.stem

    def rows(seed: int) -> Iterator[Row]:
        for key in in_seeded_order(files, seed):
            yield from _file_rows(files[key], key, seed, column)

    for file in files.values():
        _check_readable(file, column)
    return Source(name, domain or own_domain, rows)


def dataset_source(name: str, *, split: str, column: str | None, domain: str | None, hint: str) -> Source:
    """A source that streams a Hugging Face data set, named ``name`` or ``name:config``.

    Documents come in the data set's order mixed within a window of 1,000, which depends on the seed.

    Args:
        name: As the user gave it.
        split: Split of the data set to read.
        column: Column with the text; None for the first of text, content, messages.
        domain: In place of the data set's name.
        hint: What else the name might have meant, for the message.

    Raises:
        KvlearnError: If the data set cannot be found or reached.
    """
    try:
        import datasets
    except ImportError as error:
        raise KvlearnError(f"{name!r} is {hint}; Hugging Face data sets need: pip install datasets") from error
    path, _, config = name.partition(":")
    try:
        data = datasets.load_dataset(path, config or None, split=split, streaming=True)
    except Exception as error:  # every kind of data set, and the network under it, raises its own types
        raise KvlearnError(f"{name!r} is {hint}, and as a Hugging Face data set it failed: {_reason(error)}") from error

    def rows(seed: int) -> Iterator[Row]:
        try:
            for record in data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
                text = _text_of(record, column, name)
                # The data set gives no stable row number once it is shuffled; the text itself names the row.
                yield Row(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), text, _domain_of(record))
        except (KvlearnError, GeneratorExit):
            raise
        except Exception as error:  # as above: the network may fail at any record
            raise KvlearnError(f"reading the data set {name!r} failed: {_reason(error)}") from error

    return Source(name, domain or path.rsplit("/", 1)[-1], rows)


def _files_below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES):
                yield Path(place, name)


def _check_readable(path: Path, column: str | None) -> None:
    """Open the file now, so that a wrong path, a wrong column or a corrupt Parquet file is told before any work."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise KvlearnError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix.lower() in PARQUET_SUFFIXES:
        _parquet_column(_open_parquet(path).schema_arrow.names, column, str(path))


def _file_rows(path: Path, key: str, seed: int, column: str | None) -> Iterator[Row]:
    """The rows of one file in seeded order; ``key`` starts their ids."""
    suffix = path.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return _jsonl_rows(path, key, seed, column)
    if suffix in PARQUET_SUFFIXES:
        return _parquet_rows(path, key, seed, column)
    return _text_rows(path, key, seed)


# ---- Text -------------------------------------------------------------------------------------------------------


def _text_rows(path: Path, key: str, seed: int) -> Iterator[Row]:
    """The whole file as one document, or a long one in parts, so that a single big file still makes a corpus."""
    try:
        bounds = _part_bounds(path)
        with path.open("rb") as file:
            for part in seeded_permutation(len(bounds) - 1, key, seed):
                file.seek(bounds[part])
                data = file.read(bounds[part + 1] - bounds[part])
                encoding = "utf-8-sig" if part == 0 else "utf-8"
                yield Row(key if len(bounds) == 2 else f"{key}#{part}", data.decode(encoding).replace("\r\n", "\n"))
    except OSError as error:
        raise KvlearnError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KvlearnError(
            f"{path} is not text in UTF-8: byte {error.object[error.start]:#04x}; convert it first"
        ) from error


def _part_bounds(path: Path) -> list[int]:
    """Byte offsets at which to cut: after a line end where there is one, never inside a UTF-8 character."""
    size, bounds = path.stat().st_size, [0]
    with path.open("rb") as file:
        while size - bounds[-1] > 2 * PART_BYTES:
            file.seek(bounds[-1] + PART_BYTES)
            ahead = file.read(PART_BYTES)
            cut = ahead.find(b"\n") + 1
            if not cut:
                cut = next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), 0)
            bounds.append(bounds[-1] + PART_BYTES + cut)
    return [*bounds, size]


# ---- JSONL ------------------------------------------------------------------------------------------------------


def _jsonl_rows(path: Path, key: str, seed: int, column: str | None) -> Iterator[Row]:
    """One document per line; 8 bytes per line are held to read the lines in seeded order."""
    try:
        with path.open("rb") as file:
            offsets, position = array("Q"), 0
            for line in file:
                offsets.append(position)
                position += len(line)
            for number in seeded_permutation(len(offsets), key, seed):
                file.seek(offsets[number])
                if line := file.readline().strip():
                    yield _json_row(line, f"{path}, line {number + 1}", f"{key}:{number + 1}", column)
    except OSError as error:
        raise KvlearnError(f"cannot read {path}: {error.strerror or error}") from error


def _json_row(line: bytes, where: str, row_id: str, column: str | None) -> Row:
    try:
        record = json.loads(line)
    except ValueError as error:  # covers invalid UTF-8 as well as invalid JSON
        raise KvlearnError(f"{where}: not a JSON object on a line of its own ({error})") from error
    if not isinstance(record, dict):
        raise KvlearnError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return Row(row_id, _text_of(record, column, where), _domain_of(record))


# ---- Parquet ----------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path, key: str, seed: int, column: str | None) -> Iterator[Row]:
    """One document per row; one row group at a time is held in memory."""
    import pyarrow

    file = _open_parquet(path)
    names = file.schema_arrow.names
    chosen = _parquet_column(names, column, str(path))
    wanted = [chosen, "domain"] if "domain" in names else [chosen]
    for group in seeded_permutation(file.num_row_groups, key, seed):
        try:
            records = file.read_row_group(int(group), columns=wanted).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise KvlearnError(f"{path} is corrupt: {_reason(error)}") from error
        for number in seeded_permutation(len(records), f"{key}\0{group}", seed):
            row_id, record = f"{key}:{group}.{number}", records[number]
            yield Row(row_id, _text_of(record, chosen, f"{path}, row {group}.{number}"), _domain_of(record))


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise KvlearnError(f"reading {path} needs the package pyarrow: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise KvlearnError(f"{path} is not a readable Parquet file: {_reason(error)}") from error


def _parquet_column(names: Sequence[str], column: str | None, where: str) -> str:
    return _column_in(dict.fromkeys(names), column, where)


# ---- Rows -------------------------------------------------------------------------------------------------------


def _column_in(record: Mapping[str, Any], column: str | None, where: str) -> str:
    """The column to read: the one asked for, or the first known name; an error names what is there."""
    for name in (column,) if column else COLUMNS:
        if name in record:
            return name
    wanted = repr(column) if column else " or ".join(map(repr, COLUMNS))
    found = ", ".join(map(repr, record)) or "none"
    raise KvlearnError(f"{where}: no column {wanted}; columns found: {found}; choose one with ?column=NAME")


def _text_of(record: Mapping[str, Any], column: str | None, where: str) -> str:
    name = _column_in(record, column, where)
    value = record[name]
    if value is None or isinstance(value, str):
        # JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes.
        return (value or "").encode("utf-8", "replace").decode()
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n".join(_message_line(message, f"{where}, column {name!r}") for message in value)
    raise KvlearnError(f"{where}: column {name!r} holds {type(value).__name__}, expected text or a list of messages")


def _message_line(message: Mapping[str, Any], where: str) -> str:
    """``role: content``; content may also be a list of parts, of which the text ones count."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(role, str) or not isinstance(content, str):
        raise KvlearnError(f"{where}: a message needs text in 'role' and 'content', found {sorted(message)}")
    return f"{role}: {content}"


def _domain_of(record: Mapping[str, Any]) -> str | None:
    value = record.get("domain")
    return value if isinstance(value, str) and value else None


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('. ')}" if lines else type(error).__name__

"""Rows: what a comparison measures, one JSON object a line, written so that a killed run can go on.

A row is one number about one document: (model, task, policy, budget, doc, domain, seed, metric) under stated settings
(window, block, protect, allocation), with the same number from the full cache on the same tokens beside it.

| field | meaning |
|---|---|
| model, task, policy, doc, domain | names; ``policy`` may be a scorer's folder |
| kind | what the policy is: ``full``, ``heuristic``, ``floor`` (random choices), ``learned`` or ``oracle`` |
| budget | slots one KV head of one layer may hold; null for the full cache |
| seed | of the random choices |
| metric, value, full_value | a name in ``METRICS``, the number, and the full cache's number for the same document |
| slots | physical slots held per KV head, the most at any moment |
| bytes, state_bytes | allocated by the cache, scorer state included; the scorer state alone |
| tokens, tokens_per_s | scored tokens, and the speed of the run |
| window, block, protect, allocation | optional settings; they belong to the row's identity |
| blame | optional: where alone the policy decided, the oracle deciding elsewhere; belongs to the row's identity |
| error | optional: why this cell failed; such a row needs no numbers |
| mean_slots | optional: slots held per KV head, the mean over heads and layers, where allocation makes them differ |
| scorer_share, full_bytes, versions | optional: share of the time spent scoring, bytes of the full cache, packages |
| solved | optional: share of the questions that the full cache answers |
| kept | optional, in one row of a policy: what was held while the text went by (:mod:`kvlearn.keeping`) |
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlearn.errors import KvlearnError

if sys.platform != "win32":
    import fcntl

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Metric:
    """How to read a metric: its name for people, its unit, and which way is better."""

    title: str
    unit: str
    higher_is_better: bool = False


METRICS: dict[str, Metric] = {
    "nll": Metric("negative log-likelihood", "nats/token"),
    "kl": Metric("KL divergence from the full cache", "nats/token"),
    "answer_nll": Metric("negative log-likelihood of the answer", "nats/token"),
    "agreement": Metric("same next token as the full cache", "share of tokens", higher_is_better=True),
    "accuracy": Metric("accuracy", "share of questions", higher_is_better=True),
    "exact_match": Metric("exact match", "share of questions", higher_is_better=True),
    "contains": Metric("answer contained", "share of questions", higher_is_better=True),
}

KINDS = ("full", "heuristic", "floor", "learned", "oracle")
SETTINGS = ("window", "block", "protect", "allocation", "dtype", "blame")
KEY_FIELDS = ("model", "task", "policy", "budget", "doc", "domain", "seed", "metric", *SETTINGS)

TIMED = ("tokens_per_s", "scorer_share")
"""What a clock decides: all that differs between rows of one comparison that is run twice on one machine."""

_NAMES = ("model", "task", "policy", "doc", "domain", "metric", "kind")
_NUMBERS = ("value", "full_value", "slots", "bytes", "state_bytes", "tokens_per_s", "tokens")
_OPTIONAL_NUMBERS = ("scorer_share", "full_bytes", "mean_slots", "solved")


def metric_info(name: str) -> Metric:
    """Look a metric up; a part of one, as in ``nll/rare-tokens``, is read like the whole.

    Raises:
        KvlearnError: no such metric; the message suggests the nearest name.
    """
    base = name.split("/", 1)[0]
    if base in METRICS:
        return METRICS[base]
    near = difflib.get_close_matches(base, METRICS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known metrics are {', '.join(METRICS)}."
    raise KvlearnError(f"unknown metric {name!r}: {hint}")


def loss(row: Mapping[str, Any]) -> float:
    """How much worse than the full cache this row is, in the metric's unit: 0 is equal, positive is worse.

    NaN where either number is missing or not finite.
    """
    value, full = number(row.get("value")), number(row.get("full_value"))
    return full - value if metric_info(row["metric"]).higher_is_better else value - full


def number(value: Any) -> float:
    """A finite float, or NaN for anything that is not one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan


def row_key(row: Mapping[str, Any]) -> Key:
    """The identity of a row, from ``KEY_FIELDS``."""
    return field_key(row, KEY_FIELDS)


def differences(first: Iterable[Row], second: Iterable[Row]) -> list[str]:
    """In which rows two comparisons differ, one line each: rows that one lacks, and fields other than :data:`TIMED`."""
    one, other = ({row_key(row): row for row in rows} for rows in (first, second))
    found = []
    for key in [*one, *(key for key in other if key not in one)]:
        a, b = one.get(key), other.get(key)
        name = ", ".join(f"{field} {value}" for field, value in zip(KEY_FIELDS, key, strict=True) if value is not None)
        if a is None or b is None:
            found.append(f"only in the {'second' if a is None else 'first'}: {name}")
            continue
        fields = sorted(field for field in {*a, *b} - set(TIMED) if a.get(field) != b.get(field))
        if fields:
            told = (f"{field} {a.get(field)!r:.60} and {b.get(field)!r:.60}" for field in fields)
            found.append(f"{name}: {'; '.join(told)}")
    return found


def field_key(row: Mapping[str, Any], fields: Iterable[str]) -> Key:
    """What rows are told apart by; fields that are absent count as null."""
    return tuple(_hashable(row.get(field)) for field in fields)


def check_row(row: Any) -> Row:
    """Return the row if it is well formed.

    Raises:
        KvlearnError: names the field that is missing or wrong, and its value.
    """
    if not isinstance(row, dict):
        raise KvlearnError(f"a row is a JSON object, not {type(row).__name__}.")
    for field in _NAMES:
        if not isinstance(row.get(field), str) or not row[field]:
            raise KvlearnError(f"field {field!r} must be a non-empty string, not {row.get(field)!r}.")
    if row["kind"] not in KINDS:
        raise KvlearnError(f"field 'kind' must be one of {', '.join(KINDS)}, not {row['kind']!r}.")
    metric_info(row["metric"])
    budget, seed, error = row.get("budget"), row.get("seed"), row.get("error")
    if budget is not None and (not _is_int(budget) or budget < 1):
        raise KvlearnError(f"field 'budget' must be a positive whole number or null, not {budget!r}.")
    if not _is_int(seed):
        raise KvlearnError(f"field 'seed' must be a whole number, not {seed!r}.")
    if error is None:
        _check_numbers(row)
    elif not isinstance(error, str) or not error:
        raise KvlearnError(f"field 'error' must be a non-empty string, not {error!r}.")
    return row


def _check_numbers(row: Row) -> None:
    for field in _NUMBERS:
        if field not in row:
            raise KvlearnError(f"field {field!r} is missing; a row without numbers needs an 'error'.")
    for field in _NUMBERS + _OPTIONAL_NUMBERS:
        value = row.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise KvlearnError(f"field {field!r} must be a number or null, not {value!r}.")


def read_rows(
    *paths: str | Path, check: Callable[[Any], Row] = check_row, key: Callable[[Row], Key] = row_key
) -> list[Row]:
    """Read and merge files of rows, in order; of several rows with one identity the last good one stays.

    ``check`` and ``key`` are those of :class:`RowStore`.

    A last line without its line end that is not a whole row was cut off by a crash, and is passed over.

    Raises:
        KvlearnError: a file cannot be read, or a line is no row; names the file, the line and the fault.
    """
    merged: dict[Key, Row] = {}
    for path in paths:
        rows, _ = _parse(Path(path), _read_bytes(Path(path)), check)
        for row in rows:
            _merge(merged, row, key)
    return list(merged.values())


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write a whole file of rows, all or nothing."""
    write_atomically(Path(path), dump_rows(rows))


def dump_rows(rows: Iterable[Row]) -> bytes:
    """Rows as JSON lines in UTF-8; numbers that are not finite become null, because JSON has no word for them."""
    return "".join(_line(row) for row in rows).encode()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one and never half.

    Raises:
        KvlearnError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise KvlearnError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class RowStore:
    """A file of rows that is appended to while a comparison runs, and that survives ``kill -9`` at any moment.

    Opening it reads what is there: a last line that a crash cut off is dropped and cut away, so that its cell is
    simply measured again. One process at a time may hold a store open.

    Args:
        path: The JSON-lines file; its folder is made if need be.
        check: Returns a row if it is well formed and raises if not; by default :func:`check_row`.
        key: The identity of a row; by default :func:`row_key`.

    Attributes:
        path: The file.
        dropped: Bytes of a cut-off last line that opening removed; 0 for a clean file.

    Raises:
        KvlearnError: the file is held by another process, cannot be written, or holds a line that is no row.
    """

    def __init__(
        self, path: str | Path, *, check: Callable[[Any], Row] = check_row, key: Callable[[Row], Key] = row_key
    ) -> None:
        self.path, self._check, self._key = Path(path), check, key
        self.dropped = 0
        self._rows: dict[Key, Row] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise KvlearnError(f"cannot write rows to {self.path}: {error.strerror or error}.") from error
        try:
            self._lock()
            self._load()
        except BaseException:
            self._file.close()
            raise

    def append(self, *rows: Row) -> None:
        """Add rows: one write, flushed and synced to the disk before this returns.

        Numbers that are not finite are stored as null, because JSON has no word for them.

        Raises:
            KvlearnError: a row is malformed (then none is written), or the disk is full (then the file is as before).
        """
        rows = tuple(_finite(self._check(row)) for row in rows)
        data = dump_rows(rows)
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError("the disk took only part of it")
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # what remains is a cut-off line, which the next opening removes
                self._file.truncate(end)
            raise KvlearnError(f"cannot add rows to {self.path}: {error.strerror or error}.") from error
        for row in rows:
            _merge(self._rows, row, self._key)

    def done(self, *keys: Mapping[str, Any]) -> bool:
        """Whether a good row exists for every one of these; each mapping holds the fields of ``KEY_FIELDS``.

        A row with an error is not done: a resumed run tries it again.
        """
        return all((row := self._rows.get(self._key(dict(key)))) is not None and not row.get("error") for key in keys)

    @property
    def rows(self) -> list[Row]:
        """All rows, one for each identity, in the order in which they first came."""
        return list(self._rows.values())

    def close(self) -> None:
        """Let the file go; closing twice does no harm."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        if sys.platform != "win32":  # Windows has no flock: a second writer goes unnoticed there
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise KvlearnError(
                    f"{self.path} is being written by another run: wait for it, or choose another output folder."
                ) from None

    def _load(self) -> None:
        data = _read_bytes(self.path)
        rows, end = _parse(self.path, data, self._check)
        for row in rows:
            _merge(self._rows, row, self._key)
        self.dropped = len(data) - end
        if self.dropped:
            self._file.truncate(end)
        elif data and not data.endswith(b"\n"):
            self._file.write(b"\n")
        os.fsync(self._file.fileno())


def _merge(rows: dict[Key, Row], row: Row, key_of: Callable[[Row], Key]) -> None:
    """The later row wins, but an error never takes the place of a good row."""
    key = key_of(row)
    if row.get("error") and key in rows and not rows[key].get("error"):
        return
    rows[key] = row


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise KvlearnError(f"no rows at {path}: the file does not exist.") from None
    except OSError as error:
        raise KvlearnError(f"cannot read rows from {path}: {error.strerror or error}.") from error


def _parse(path: Path, data: bytes, check: Callable[[Any], Row]) -> tuple[list[Row], int]:
    """Rows of a file, and the length of its good part: less than the file where a last line was cut off."""
    rows: list[Row] = []
    start = 0
    for count, line in enumerate(io.BytesIO(data), start=1):
        if line.strip():
            try:
                rows.append(check(json.loads(line)))
            except (KvlearnError, ValueError) as error:  # JSON and Unicode errors are ValueErrors too
                if not line.endswith(b"\n") and not isinstance(error, KvlearnError):
                    return rows, start
                fault = str(error) if isinstance(error, KvlearnError) else f"not valid JSON ({error})."
                raise KvlearnError(f"{path}, line {count}: {fault}") from error
        start += len(line)
    return rows, start


def _line(row: Row) -> str:
    try:
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise KvlearnError(f"a row holds something JSON cannot: {error}.") from error


def _finite(row: Row) -> Row:
    return {
        field: None if isinstance(value, float) and not math.isfinite(value) else value for field, value in row.items()
    }


def _hashable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list, tuple)) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

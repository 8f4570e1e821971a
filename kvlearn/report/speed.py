"""Rows of ``kvlearn bench``: how fast a step is and what it holds, one JSON object a line in ``speed.jsonl``.

| field | meaning |
|---|---|
| bench | ``decode`` (a step is one token of every row), ``prefill`` (a whole prompt) or ``trace`` (a window of text) |
| model, dtype, device, threads | what ran, and on how many CPU threads |
| policy, kind, budget | as in :mod:`kvlearn.rows`; ``full`` is transformers' DynamicCache with sdpa attention |
| context, batch | tokens fed before the step (of the prompt, of the window), and rows |
| seconds | of a step, one number a round; the n-th numbers of one race were measured one after the other |
| tokens | that a step gives or reads, all rows together |
| steps | in a turn |
| parts | seconds of a step by part, measured in a turn of its own |
| bytes, peak_bytes | of the cache, state included; the most held at any moment beside the weights |
| moved, operations | bytes and operations of a step by the cost model (:mod:`kvlearn.bench.cost`), where it has them |
| versions, data | of packages; text that was traced |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlearn.errors import KvlearnError
from kvlearn.rows import Row, RowStore, field_key

FILE = "speed.jsonl"
BENCHES = ("decode", "prefill", "trace")
PLAIN = "plain forward"
TRACING = "tracing"
RACE_FIELDS = ("bench", "model", "dtype", "device", "threads", "context", "batch")
KEY_FIELDS = (*RACE_FIELDS, "policy", "budget")


def speed_store(folder: str | Path) -> RowStore:
    """The rows of a folder, to read and to add to."""
    return RowStore(Path(folder) / FILE, check=check_speed_row, key=speed_key)


def speed_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a row, from ``KEY_FIELDS``."""
    return field_key(row, KEY_FIELDS)


def check_speed_row(row: Any) -> Row:
    """Return the row if it is well formed.

    Raises:
        KvlearnError: names the field that is missing or wrong, and its value.
    """
    if not isinstance(row, dict):
        raise KvlearnError(f"a row is a JSON object, not {type(row).__name__}.")
    if row.get("bench") not in BENCHES:
        raise KvlearnError(f"field 'bench' must be one of {', '.join(BENCHES)}, not {row.get('bench')!r}.")
    for field in ("model", "dtype", "device", "policy", "kind"):
        if not isinstance(row.get(field), str) or not row[field]:
            raise KvlearnError(f"field {field!r} must be a non-empty string, not {row.get(field)!r}.")
    for field in ("threads", "context", "batch", "tokens"):
        if not isinstance(row.get(field), int) or row[field] < 1:
            raise KvlearnError(f"field {field!r} must be a positive whole number, not {row.get(field)!r}.")
    seconds = row.get("seconds")
    if not isinstance(seconds, list) or not seconds or not all(isinstance(s, float) and s > 0 for s in seconds):
        raise KvlearnError(f"field 'seconds' must list positive numbers, not {seconds!r}.")
    return row


@dataclass(frozen=True)
class Line:
    """One contender of a race in numbers.

    Attributes:
        row: as measured.
        base: the row of the full cache in the same race, or ``None``.
    """

    row: Row
    base: Row | None

    @property
    def seconds(self) -> float:
        """Of a step, the median over rounds."""
        return statistics.median(self.row["seconds"])

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest round, seconds of a step."""
        return min(self.row["seconds"]), max(self.row["seconds"])

    @property
    def tokens_per_s(self) -> float:
        """At the median."""
        return float(self.row["tokens"] / self.seconds)

    @property
    def speedup(self) -> float | None:
        """Times as many tokens/s as the full cache."""
        return None if self.base is None else faster(self.row, self.base)

    @property
    def smaller(self) -> float | None:
        """Bytes of the full cache divided by the bytes of this one."""
        if self.base is None or not self.row.get("bytes") or not self.base.get("bytes"):
            return None
        return float(self.base["bytes"] / self.row["bytes"])

    def share(self, part: str) -> float | None:
        """Seconds that a part takes of a step."""
        parts = self.row.get("parts")
        return parts.get(part) if parts else None


def faster(row: Row, other: Row) -> float:
    """Times as many tokens/s as ``other``: the median over the rounds of one race."""
    pairs = zip(row["seconds"], other["seconds"], strict=False)
    return statistics.median(b / a for a, b in pairs)


def races(rows: Iterable[Row]) -> list[list[Line]]:
    """The contenders of every race, the full cache (or the plain forward pass) first."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(field_key(row, RACE_FIELDS), []).append(row)
    found = []
    for members in grouped.values():
        base = next((row for row in members if row["kind"] == "full" and row.get("budget") is None), None)
        found.append([Line(row, base) for row in sorted(members, key=lambda row: row is not base)])
    return sorted(found, key=lambda race: [race[0].row[name] for name in ("bench", "context", "batch")])


@dataclass(frozen=True)
class Target:
    """What a race was to show.

    Attributes:
        what: the comparison.
        measured: the ratio.
        wanted: its lower bound.
        words: how to say a ratio.
    """

    what: str
    measured: float
    wanted: float
    words: Callable[[float], str]

    @property
    def met(self) -> bool:
        """Whether the ratio, as precise as it is said, reaches the bound."""
        return round(self.measured, 2) >= self.wanted


# Tokens/s against the full cache that a learned policy was to reach: context, batch and budget of the race.
_SPEEDUPS = {(8192, 8, 512): 8.0, (2048, 8, 256): 3.3, (2048, 1, 256): 1.5}
_SMALLER = {(8192, 8, 512): 14.0}
_NO_SLOWER = 0.97
_THAN_KVPRESS = 1.3
_TRACING = 0.7
_PROMPT = 0.67  # 1.5 times the time


def targets(rows: Iterable[Row]) -> list[Target]:
    """What was aimed for, as far as the races at hand tell."""
    found = []
    for race in races(rows):
        for line in race:
            found += _targets(line, {(other.row["policy"], other.row.get("budget")): other.row for other in race})
    return found


def _targets(line: Line, others: Mapping[tuple[str, int | None], Row]) -> list[Target]:
    row = line.row
    if row["policy"] == TRACING and line.base is not None:
        return [
            Target(f"tracing, windows of {row['context']:,}: tokens/s, / plain", _some(line.speedup), _TRACING, times)
        ]
    if row["bench"] == "prefill" and row["kind"] == "learned":
        what = f"prompt of {row['context']:,}, budget {row['budget']}: tokens/s, learned / full"
        return [Target(what, _some(line.speedup), _PROMPT, times)]
    if row["bench"] != "decode" or row["kind"] != "learned":
        return []
    budget, size = row["budget"], (row["context"], row["batch"], row["budget"])
    where = f"context {size[0]:,}, batch {size[1]}, budget {budget}: "
    found = []
    if size in _SPEEDUPS:
        found.append(Target(where + "tokens/s, learned / full", _some(line.speedup), _SPEEDUPS[size], times))
    if size in _SMALLER:
        found.append(Target(where + "bytes, full / learned", _some(line.smaller), _SMALLER[size], times))
    if row["context"] < budget:
        found.append(Target(where + "tokens/s, not yet full / full", _some(line.speedup), _NO_SLOWER, times))
    for policy, wanted in (("streaming", _NO_SLOWER), ("kvpress-snapkv", _THAN_KVPRESS)):
        if (policy, budget) in others:
            ratio = faster(row, others[policy, budget])
            found.append(Target(f"{where}tokens/s, learned / {policy}", ratio, wanted, times))
    return found


def _some(value: float | None) -> float:
    return 0.0 if value is None else value


def times(value: float | None) -> str:
    """A factor, to two decimals below ten."""
    return "-" if value is None else f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x"

"""From a trace to what training and the oracle need: histories, as the cache would have built them, and codes.

``N`` is the number of blocks of a window. *Boundary* ``n`` is the moment after ``n`` blocks were observed: ``n * W``
tokens exist, and blocks ``n, n + 1, ...`` are the future.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.errors import KvlearnError
from kvlearn.features import Vectors, stored_vectors
from kvlearn.traces.collect import unpack_bits
from kvlearn.traces.format import VECTORS, Manifest, Shard, check_size
from kvlearn.traces.layout import Layout
from kvlearn.traces.projection import read_projection

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """One window of a trace.

    Args:
        layout: sizes.
        input_ids: ``[T]`` int64.
        domain: kind of text.
        doc: name of the document, or of the first of several short ones.
        start: position of the first token in that document.
        documents: names of all documents in the window.
        keys: of ``[L, H, T, D]``, before rotation, as they are stored.
        values: likewise.
        mean_code: ``[N, L, H, T]`` uint8, mean mass of the full-cache run, by :func:`kvlearn.history.encode_mass`;
            0 for tokens that came after the block.
        peak_code: ``[N, L, H, T]`` uint8, likewise for the maximum.
        policy: policy of an on-policy trace, else ``None``.
        budget: slots of its cache.
        held: ``[N, L, H, T]`` bool, tokens that cache held when each block ended.
        seen_mean: ``[N, L, H, T]`` uint8, what it observed for them; 0 elsewhere.
        seen_peak: ``[N, L, H, T]`` uint8, likewise.
        projection: ``[L, H, D, D]`` float32, what the output projection makes of values
            (:func:`kvlearn.models.projection.output_projection`), or ``None`` if the trace does not keep it.
    """

    layout: Layout
    input_ids: Tensor
    domain: str
    doc: str
    start: int
    documents: tuple[str, ...]
    keys: Vectors
    values: Vectors
    mean_code: Tensor
    peak_code: Tensor
    policy: str | None = None
    budget: int | None = None
    held: Tensor | None = None
    seen_mean: Tensor | None = None
    seen_peak: Tensor | None = None
    projection: Tensor | None = None

    @property
    def block(self) -> int:
        """``W``."""
        return self.layout.block

    def layer_vectors(self) -> Tensor:
        """``[L, 2 H, T, D]`` float32: what :func:`kvlearn.features.layer_vectors` gives for the same tokens."""
        return stored_vectors(self.keys, self.values)


class Trace:
    """A finished trace folder; a sequence of :class:`Window`.

    Nothing but the manifest is read until a window is asked for, and then only that window is held. Each shard's
    checksum is verified when it is first used.

    Args:
        path: the folder.

    Raises:
        KvlearnError: the folder is no trace, unfinished, of another version, or a shard is missing or corrupt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        if not self.manifest.complete:
            raise KvlearnError(
                f"the trace {self.path} is unfinished ({self.manifest.windows} of {self.manifest.wanted} windows); "
                "run the command that writes it again."
            )
        for shard in self.manifest.shards:
            check_size(self.path, shard)
        self.projection = read_projection(self.path, self.layout)
        self._verified: set[str] = set()

    @property
    def layout(self) -> Layout:
        """Sizes."""
        return self.manifest.layout

    def __len__(self) -> int:
        return self.manifest.windows

    def __getitem__(self, i: int) -> Window:
        return self.window(i)

    def __iter__(self) -> Iterator[Window]:
        return (self.window(i) for i in range(len(self)))

    def window(self, i: int) -> Window:
        """The ``i``-th window; negative numbers count from the end.

        Raises:
            IndexError: there is no such window.
            KvlearnError: its shard is corrupt.
        """
        return self._read(i, self._window)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Kind of text of each window; nothing else of the shards is read, and they are not verified."""
        return tuple(domain for shard in self.manifest.shards for domain in _column(self.path / shard.file, "domain"))

    def vectors(self, i: int) -> tuple[Vectors, Vectors]:
        """Keys and values of the ``i``-th window alone, in a fraction of the time.

        Raises:
            IndexError: there is no such window.
            KvlearnError: its shard is corrupt.
        """
        return self._read(i, self._vectors)

    def _read(self, i: int, make: Callable[[dict[str, Any]], T]) -> T:
        """What ``make`` makes of a window's columns."""
        number = range(len(self))[i]
        for shard in self.manifest.shards:
            if number < shard.windows:
                break
            number -= shard.windows
        else:
            raise IndexError(i)
        self._verify(shard)
        try:
            return make(_row(self.path / shard.file, number))
        except (OSError, ValueError, KeyError, RuntimeError, StopIteration) as error:
            reason = str(error) or "it ends too soon"
            raise KvlearnError(f"shard {self.path / shard.file} cannot be read: {reason}.") from error

    def verify(self) -> None:
        """Check every shard against its checksum.

        Raises:
            KvlearnError: naming the first corrupt shard.
        """
        for shard in self.manifest.shards:
            self._verify(shard)

    def _verify(self, shard: Shard) -> None:
        if shard.file in self._verified:
            return
        check_size(self.path, shard)
        with (self.path / shard.file).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard.sha256:
            raise KvlearnError(
                f"shard {self.path / shard.file} is corrupt: its sha256 is not the one in the manifest; "
                "trace again into a new folder."
            )
        self._verified.add(shard.file)

    def _vectors(self, row: dict[str, Any]) -> tuple[Vectors, Vectors]:
        layout = self.layout
        shape = (len(layout.layers), layout.heads, layout.window)
        keys, key_scale, values, value_scale = (row[name] for name in VECTORS)
        return (
            Vectors(_tensor(keys, torch.int8).view(*shape, -1), _tensor(key_scale, torch.float16).view(shape)),
            Vectors(_tensor(values, torch.int8).view(*shape, -1), _tensor(value_scale, torch.float16).view(shape)),
        )

    def _window(self, row: dict[str, Any]) -> Window:
        layout = self.layout
        shape = (len(layout.layers), layout.heads)
        on_policy: dict[str, Any] = {}
        if self.manifest.policy is not None:
            packed = shape[0] * shape[1] * layout.packed
            mask = unpack_bits(_tensor(row["held"], torch.uint8), packed)
            on_policy["held"] = _dense(mask.view(*shape, -1), layout)
            for name in ("seen_mean", "seen_peak"):
                codes = torch.zeros(packed, dtype=torch.uint8)
                codes[mask] = _tensor(row[name], torch.uint8)
                on_policy[name] = _dense(codes.view(*shape, -1), layout)
            on_policy |= {"policy": row["policy"], "budget": row["budget"]}
        mean, peak = (
            _dense(_tensor(row[name], torch.uint8).view(*shape, layout.packed), layout)
            for name in ("mean_code", "peak_code")
        )
        keys, values = self._vectors(row)
        return Window(
            layout=layout,
            input_ids=torch.tensor(row["input_ids"], dtype=torch.int64),
            domain=row["domain"],
            doc=row["doc"],
            start=row["start"],
            documents=tuple(row["documents"]),
            keys=keys,
            values=values,
            mean_code=mean,
            peak_code=peak,
            projection=self.projection,
            **on_policy,
        )


def _row(path: Path, number: int) -> dict[str, Any]:
    """One record batch of a shard: the others are skipped without being decompressed."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        messages = pa.ipc.MessageReader.open_stream(source)
        schema = pa.ipc.read_schema(messages.read_next_message())
        for _ in range(number):
            messages.read_next_message()
        batch = pa.ipc.read_record_batch(messages.read_next_message(), schema)
        row = {name: batch.column(name)[0] for name in batch.schema.names}
        return {
            name: value.as_buffer() if pa.types.is_large_binary(value.type) else value.as_py()
            for name, value in row.items()
        }


def _column(path: Path, name: str) -> list[Any]:
    """One column of a shard; the others are skipped without being decompressed."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            schema = pa.ipc.open_stream(source).schema
            source.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name)], use_threads=False)
            with pa.ipc.open_stream(source, options=options) as stream:
                return [value for batch in stream for value in batch.column(name).to_pylist()]
    except (OSError, ValueError, KeyError) as error:
        raise KvlearnError(f"shard {path} cannot be read: {error}.") from error


def _tensor(data: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _dense(packed: Tensor, layout: Layout) -> Tensor:
    """``[L, H, P]`` to ``[N, L, H, T]``, 0 where nothing is stored."""
    dense = packed.new_zeros(layout.blocks, *packed.shape[:2], layout.window)
    for n, part in enumerate(packed.split(layout.ends, dim=-1)):
        dense[n, ..., : part.shape[-1]] = part
    return dense


def replay(window: Window, boundaries: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Rebuild the histories of a window, block by block, by the function that the cache uses.

    Args:
        window: of a trace. If it is on-policy, histories are those of the evicting cache.
        boundaries: at which to stop, each in ``1..N``; by default all.

    Yields:
        For each boundary in rising order: its number ``n``; the histories ``[L, H, K, t]`` of the ``t = n * W`` tokens
        that exist; and ``held`` ``[L, H, t]`` bool, the tokens that the evicting cache held (the others' histories are
        meaningless), or ``None`` for a trace of the full cache. The features follow with
        ``dynamic_features(state, arange(t).expand(L, H, t), tensor([t]))``.

    Raises:
        KvlearnError: a boundary is out of range.
    """
    layout = window.layout
    wanted = set(range(1, layout.blocks + 1) if boundaries is None else boundaries)
    if wanted and not 1 <= min(wanted) <= max(wanted) <= layout.blocks:
        raise KvlearnError(f"boundaries are {sorted(wanted)}; this trace has 1 to {layout.blocks}.")
    mean = window.mean_code if window.seen_mean is None else window.seen_mean
    peak = window.peak_code if window.seen_peak is None else window.seen_peak
    layers = len(layout.layers)
    state = history.empty((layers, layout.heads, 0))
    fresh = history.empty((layers, layout.heads, layout.block))
    queries = torch.full((layers,), layout.block)
    for n, end in enumerate(layout.ends[: max(wanted, default=0)], start=1):
        state = torch.cat([state, fresh], dim=-1)
        age = end - torch.arange(end, dtype=torch.int32).expand(layers, layout.heads, end)
        state = history.observe(state, mean[n - 1, ..., :end], peak[n - 1, ..., :end], queries, age)
        if n in wanted:
            yield n, state, None if window.held is None else window.held[n - 1, ..., :end]

"""What a trace folder holds, and how it is written so that a kill at any moment loses no more than a shard.

``trace.json`` is the manifest: the recipe (see :class:`Manifest`) and the shards that are complete. A shard is written
under a temporary name, synced, renamed and then listed; a rerun with the same recipe goes on after the last one listed.
No time, host or path of the machine enters a file, so an interrupted and an uninterrupted run leave the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvlearn.errors import KvlearnError
from kvlearn.traces.layout import Layout

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
"""Of the manifest and the columns; another version is refused."""

MANIFEST = "trace.json"
SHARD_BYTES = 256 * 2**20
"""Size that a shard may reach before compression."""

VECTORS = ("keys", "key_scale", "values", "value_scale")
"""Columns of every trace that hold keys before rotation and values, as :class:`kvlearn.features.Vectors`."""

TENSORS = (*VECTORS, "mean_code", "peak_code")
"""Columns of every trace that hold the bytes of a tensor; see :mod:`kvlearn.traces.dataset` for their shapes."""

SEEN = ("held", "seen_mean", "seen_peak")
"""Further such columns of an on-policy trace: what the evicting cache observed."""

_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Shard:
    """One complete shard: file name, windows, bytes and the file's sha256."""

    file: str
    windows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The recipe of a trace, and how far it has been written.

    Args:
        model: name by which the model was loaded.
        fingerprint: of the model, see :func:`kvlearn.models.fingerprint`.
        tokenizer: hash of the tokenizer.
        layout: sizes.
        group_reduce: how the query heads of a KV head were reduced.
        data: the text, as the user named it.
        split: ``"train"``, ``"validation"`` or ``"test"``.
        seed: of the order of windows and of sampled budgets.
        tokens: tokens asked for.
        dtype: of the model.
        device: kind of device the model ran on.
        threads: threads the model ran with; sums of floats depend on it.
        policy: policy of an on-policy trace, else ``None``.
        budgets: budgets of an on-policy trace, as the user gave them, else ``None``.
        policy_sha256: of the scorer's files, if the policy is a folder.
        versions: of the libraries that decide the numbers.
        version: of the format.
        shards: complete shards, in order.
        complete: whether the trace is finished.
    """

    model: str
    fingerprint: dict[str, Any]
    tokenizer: str
    layout: Layout
    group_reduce: str
    data: str
    split: str
    seed: int
    tokens: int
    dtype: str
    device: str
    threads: int
    policy: str | None = None
    budgets: str | None = None
    policy_sha256: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    version: int = VERSION
    shards: tuple[Shard, ...] = ()
    complete: bool = False

    @property
    def windows(self) -> int:
        """Windows written so far, in complete shards."""
        return sum(shard.windows for shard in self.shards)

    @property
    def wanted(self) -> int:
        """Windows asked for: the tokens, rounded up."""
        return -(-self.tokens // self.layout.window)

    @property
    def windows_per_shard(self) -> int:
        """Windows of every shard but the last."""
        return max(1, SHARD_BYTES // self.layout.window_bytes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that hold tensors."""
        return TENSORS + (SEEN if self.policy else ())

    def recipe(self) -> dict[str, Any]:
        """All that decides the content, as JSON holds it; flat, with dotted names for nested fields."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del data["shards"], data["complete"]
        for name in ("layout", "fingerprint", "versions"):
            data |= {f"{name}.{key}": value for key, value in data.pop(name).items()}
        return data

    def to_json(self) -> str:
        """The text of ``trace.json``."""
        return json.dumps(asdict(self) | {"windows": self.windows}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read ``trace.json``.

        Raises:
            KvlearnError: it is missing, unreadable, incomplete or of another version.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise KvlearnError(f"{folder} is not a trace: it has no {MANIFEST}.") from None
        except (ValueError, OSError) as error:
            raise KvlearnError(f"{path} cannot be read: {error}.") from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else None
            raise KvlearnError(
                f"{path} has version {found}, and this kvlearn reads version {VERSION}; trace the text again."
            )
        try:
            layout = Layout(**{**data["layout"], "layers": tuple(data["layout"]["layers"])})
            shards = tuple(Shard(**shard) for shard in data["shards"])
            known = {f.name: data[f.name] for f in fields(cls)}
            return cls(**{**known, "layout": layout, "shards": shards})
        except (KeyError, TypeError) as error:
            raise KvlearnError(f"{path} lacks or misnames a field: {error}.") from error


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Name the first field in which two recipes differ, with both values; ``None`` if they are equal."""
    for name in new:
        if old.get(name) != new[name]:
            return f"{name} {_short(old.get(name))}, not {_short(new[name])}"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    with _new_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashingFile:
    """What pyarrow writes to: passes bytes on and hashes them."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.hash = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        data = memoryview(data)
        self.hash.update(data)
        self.file.write(data)
        self.size += data.nbytes
        return data.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Leave the file open: whoever opened it syncs and closes it."""


def schema(on_policy: bool) -> pa.Schema:
    """Columns of a shard."""
    import pyarrow as pa

    columns = {
        "input_ids": pa.list_(pa.int32()),
        "domain": pa.string(),
        "doc": pa.string(),
        "split": pa.string(),
        "start": pa.int32(),
        "documents": pa.list_(pa.string()),
        **dict.fromkeys(TENSORS, pa.large_binary()),
    }
    if on_policy:
        columns |= {"policy": pa.string(), "budget": pa.int32(), **dict.fromkeys(SEEN, pa.large_binary())}
    return pa.schema(list(columns.items()))


class TraceWriter:
    """Appends windows to a trace folder.

    Args:
        folder: made if need be; an unfinished trace of the same recipe is continued.
        manifest: the recipe.

    Raises:
        KvlearnError: the folder holds something else, or a trace of another recipe.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Manifest) -> None:
        self.folder = Path(folder)
        self.manifest = manifest
        if (self.folder / MANIFEST).exists():
            self.manifest = self._resume(manifest)
        elif self.folder.is_file() or (self.folder.is_dir() and any(self._foreign())):
            raise KvlearnError(f"{self.folder} is there already and is no trace; name a new or empty folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.manifest.shards:
            self._write_manifest()

    def _foreign(self) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if not path.name.endswith(_TEMPORARY))

    def _resume(self, manifest: Manifest) -> Manifest:
        found = Manifest.read(self.folder)
        if differs := difference(found.recipe(), manifest.recipe()):
            raise KvlearnError(f"{self.folder} holds a trace with {differs}; name another folder, or delete it.")
        for shard in found.shards:
            check_size(self.folder, shard)
        return found

    @property
    def done(self) -> int:
        """Windows that are safely written."""
        return self.manifest.windows

    def write_shards(self, rows: Iterator[Mapping[str, Any]]) -> None:
        """Write all ``rows`` (those after the first :attr:`done` of the trace), shard by shard.

        One row is held in memory at a time.

        Raises:
            KvlearnError: the disk is full (what is complete stays), or another process writes to the folder.
        """
        try:
            with self._alone():
                for first in rows:
                    self._write_shard(first, rows)
        except OSError as error:
            if "No space left on device" in str(error):
                raise KvlearnError(
                    f"the disk is full while writing the trace {self.folder}; the {self.done} windows written so far "
                    "are safe: free some space and run the same command again."
                ) from error
            raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the folder; the lock goes with the process, whatever ends it."""
        import fcntl

        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if Manifest.read(self.folder) != self.manifest:
                raise BlockingIOError
            yield
        except BlockingIOError:
            raise KvlearnError(f"another process writes to the trace {self.folder}; wait until it ends.") from None
        finally:
            os.close(descriptor)

    def _write_shard(self, first: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> None:
        import pyarrow as pa

        columns = schema(self.manifest.policy is not None)
        path = self.folder / f"data-{len(self.manifest.shards):05d}.arrow"
        count = 0
        with _new_file(path) as file:
            sink = _HashingFile(file)
            options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
            with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), columns, options=options) as stream:
                row: Mapping[str, Any] | None = first
                while row is not None:
                    stream.write_batch(pa.RecordBatch.from_pylist([dict(row)], schema=columns))
                    count += 1
                    row = next(rows, None) if count < self.manifest.windows_per_shard else None
        shard = Shard(path.name, count, sink.size, sink.hash.hexdigest())
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, shard))
        self._write_manifest()

    def _write_manifest(self) -> None:
        write_file(self.folder / MANIFEST, self.manifest.to_json().encode())

    def finish(self) -> Manifest:
        """Mark the trace complete and let ``datasets.load_from_disk`` find its shards."""
        if not self.manifest.complete:
            for name, content in self._dataset_files().items():
                write_file(self.folder / name, (json.dumps(content, indent=1) + "\n").encode())
            self.manifest = replace(self.manifest, complete=True)
            self._write_manifest()
        return self.manifest

    def _dataset_files(self) -> dict[str, dict[str, Any]]:
        from datasets import Features

        features = Features.from_arrow_schema(schema(self.manifest.policy is not None)).to_dict()
        files = [{"filename": shard.file} for shard in self.manifest.shards]
        state: dict[str, Any] = {
            "_data_files": files,
            "_fingerprint": hashlib.sha256(self.manifest.to_json().encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self.manifest.split,
        }
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        return {"state.json": state, "dataset_info.json": info}


def check_size(folder: Path, shard: Shard) -> None:
    """Raise :class:`KvlearnError` if a shard is missing or not as long as the manifest says."""
    path = folder / shard.file
    if not path.is_file():
        raise KvlearnError(f"shard {path} is missing; trace again into a new folder.")
    if path.stat().st_size != shard.bytes:
        raise KvlearnError(
            f"shard {path} is corrupt: it has {path.stat().st_size} bytes, and {MANIFEST} says {shard.bytes}; "
            "trace again into a new folder."
        )

"""Samples of a trace's windows on disk, so that every epoch but the first reads what the first has made."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from kvlearn import features, history, targets
from kvlearn.errors import KvlearnError
from kvlearn.traces import dataset
from kvlearn.traces.dataset import Trace
from kvlearn.traces.format import write_file
from train import samples
from train.samples import Sample, SampleOptions

FORMAT = 1
"""Raised when files are laid out in another way."""

_DECIDING = (features, history, targets, dataset, samples)  # modules that make a sample: a change makes new ones
_FLOAT = torch.float16  # of features and log weights; targets stay float32


class PreparedSamples:
    """Samples of one trace, one file a window, in ``TRACE.prepared/KEY``.

    The key is made of all that decides a sample: the trace's shards, its output projection if the target reads it, the
    options, and the code that makes samples. A file is written whole or not at all. Keys and values stay in the trace.

    Args:
        trace: where the windows are.
        options: how they become samples.
    """

    def __init__(self, trace: Trace, options: SampleOptions) -> None:
        self.trace, self.options = trace, options
        self.folder = Path(f"{trace.path}.prepared") / self._key()

    def _key(self) -> str:
        code = [hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in _DECIDING]
        shards = [shard.sha256 for shard in self.trace.manifest.shards]
        recipe = {"format": FORMAT, "code": code, "shards": shards, "options": asdict(self.options)}
        if self.options.target.reads_projection and self.trace.projection is not None:
            recipe["projection"] = hashlib.sha256(self.trace.projection.numpy().tobytes()).hexdigest()
        return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]

    def path(self, index: int) -> Path:
        """The file of a window."""
        return self.folder / f"{index:06d}.safetensors"

    def bytes(self, windows: int) -> int:
        """Bytes that the samples of so many windows take, at most."""
        layout, options = self.trace.layout, self.options
        slots = min(options.slots or layout.window, layout.window)
        slots *= len(layout.layers) * layout.heads * options.boundaries
        return windows * slots * ((len(features.DYNAMIC) + 1) * _FLOAT.itemsize + 4 + self._index_type.itemsize)

    def get(self, index: int, make: Callable[[], Sample]) -> Sample:
        """The sample of a window, made first if it is not there or cannot be read.

        Raises:
            KvlearnError: the folder cannot be written to.
        """
        sample = self._read(index)
        if sample is None:
            self._write(index, make())
            sample = self._read(index)
            assert sample is not None
        return sample

    @property
    def _index_type(self) -> torch.dtype:
        return torch.int16 if self.trace.layout.window <= torch.iinfo(torch.int16).max else torch.int32

    def _read(self, index: int) -> Sample | None:
        try:
            stored = load_file(self.path(index))
        except (FileNotFoundError, SafetensorError):
            return None
        keys, values = self.trace.vectors(index)
        return Sample(
            keys,
            values,
            stored["tokens"].long(),
            stored["dynamic"].float(),
            stored["target"],
            stored["log_weight"].float(),
        )

    def _write(self, index: int, sample: Sample) -> None:
        tensors = {
            "tokens": sample.tokens.to(self._index_type),
            "dynamic": sample.dynamic.to(_FLOAT),
            "target": sample.target,
            "log_weight": sample.log_weight.to(_FLOAT),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.path(index), save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        except OSError as error:
            what = "the disk is full" if error.errno == errno.ENOSPC else f"it cannot be written ({error.strerror})"
            raise KvlearnError(
                f"samples go to {self.folder} and {what}; make room there, or set data.prepare to 'fresh'."
            ) from error

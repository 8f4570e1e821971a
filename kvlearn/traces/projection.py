"""The output projection that a trace may keep beside its shards, for targets that weigh what a value writes."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.traces.format import write_file
from kvlearn.traces.layout import Layout

PROJECTION = "projection.safetensors"
"""File in the folder of a trace; traces of models whose projection was not found, and of kvlearn before it, lack it."""

_NAME = "factor"


def write_projection(folder: Path, projection: Tensor) -> None:
    """Keep what :func:`kvlearn.models.projection.output_projection` gave, ``[L, H, D, D]`` float32."""
    write_file(folder / PROJECTION, save({_NAME: projection.contiguous()}))


def read_projection(folder: Path, layout: Layout) -> Tensor | None:
    """What :func:`write_projection` kept, or ``None`` if there is nothing.

    Raises:
        KvlearnError: the file is damaged, or another trace's.
    """
    path = folder / PROJECTION
    expected = (len(layout.layers), layout.heads, layout.head_dim, layout.head_dim)
    try:
        found = load_file(path)[_NAME]
    except FileNotFoundError:
        return None
    except (SafetensorError, KeyError) as error:
        raise KvlearnError(f"{path} cannot be read: {error}; delete it and run `kvlearn trace` again.") from error
    if tuple(found.shape) != expected:
        raise KvlearnError(
            f"{path} has the shape {tuple(found.shape)}, and this trace has {expected}; delete it and run "
            "`kvlearn trace` again."
        )
    return found

"""A scorer's folder: ``config.json``, ``scorer.safetensors`` and ``README.md``, read with suspicion, written whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.scorers.card import render
from kvlearn.scorers.config import ScorerConfig

CONFIG, WEIGHTS, CARD = "config.json", "scorer.safetensors", "README.md"
_HASH = "weights_sha256"


def locate(name: str | Path, **hub_options: Any) -> Path:
    """The local folder of a scorer, fetched from the Hub if ``name`` is not a folder.

    Raises:
        KvlearnError: there is no such folder, and it is no Hub id or cannot be fetched.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise KvlearnError(f"{name} is a file; a scorer is a folder that holds {CONFIG} and {WEIGHTS}.")
    text = str(name)
    if not _is_hub_id(text):
        raise KvlearnError(f"there is no scorer folder {text}; give the path of a folder that holds {CONFIG}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=[CONFIG, WEIGHTS, CARD], **hub_options))
    except Exception as error:  # the Hub raises dozens of types: offline, absent, private, disk full
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KvlearnError(
            f"there is no scorer folder {text}, and it could not be fetched from the Hub: {reason}"
        ) from error


def _is_hub_id(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None and ".." not in text


def read(
    folder: Path, shapes: Callable[[ScorerConfig], dict[str, list[int]]]
) -> tuple[ScorerConfig, dict[str, Tensor]]:
    """Read and check a scorer's folder.

    Args:
        folder: where it lies.
        shapes: names and shapes of the weights that a config calls for.

    Raises:
        KvlearnError: anything is missing, damaged or inconsistent; the message names the file and the field.
    """
    path = _inside(folder, CONFIG)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KvlearnError(
            f"{path}: is not valid JSON ({error}); the file is damaged, fetch or export it again."
        ) from None
    except RecursionError:
        raise KvlearnError(f"{path}: is nested too deeply for a scorer's config; the file is damaged.") from None
    expected = data.pop(_HASH, None) if isinstance(data, dict) else None
    config = ScorerConfig.from_dict(data, str(path))
    if not isinstance(expected, str):
        raise KvlearnError(f"{path}: {_HASH} is missing; the file is damaged or not a scorer's.")
    weights_path = _inside(folder, WEIGHTS)
    weights = _read_weights(weights_path, shapes(config))
    if hashlib.sha256(weights_path.read_bytes()).hexdigest() != expected:
        raise KvlearnError(
            f"{weights_path}: does not match {_HASH} in {CONFIG}; the two come from different scorers, or saving was "
            "interrupted: export it again."
        )
    return config, weights


def _inside(folder: Path, name: str) -> Path:
    """The file, if it is one and does not lead out of the folder."""
    path = folder / name
    if not path.is_file():
        raise KvlearnError(f"{path} is missing; a scorer's folder holds {CONFIG} and {WEIGHTS}.")
    target, home = path.resolve(), folder.resolve()
    snapshot = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    if not (target.is_relative_to(home) or snapshot):  # the Hub's own cache links snapshots to blobs
        raise KvlearnError(
            f"{path} is a link that leads out of the scorer's folder, to {target}; copy the file instead."
        )
    return path


def _read_weights(path: Path, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in sorted(names ^ shapes.keys()):
                fault = "is missing" if name in shapes else "is not a weight of this scorer"
                raise KvlearnError(f"{path}: {name} {fault}; the file does not belong to {CONFIG}.")
            for name, shape in shapes.items():
                found = file.get_slice(name)
                if found.get_shape() != shape or found.get_dtype() != "F32":
                    raise KvlearnError(
                        f"{path}: {name} is {found.get_dtype()} of shape {found.get_shape()}; {CONFIG} calls for F32 "
                        f"of shape {shape}."
                    )
            weights = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise KvlearnError(f"{path}: is damaged ({error}); fetch or export it again.") from None
    _check_values(str(path), weights)
    return weights


def _check_values(source: str, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise KvlearnError(
                f"{source}: {name} holds NaN or infinite weights; the training diverged or the file is damaged."
            )
    for name, tensor in weights.items():
        if name.endswith("std") and not (tensor > 0).all():
            raise KvlearnError(f"{source}: {name} holds a value that is not above 0; the file is damaged.")


def write(folder: Path, config: ScorerConfig, weights: dict[str, Tensor]) -> None:
    """Write the three files, each under a temporary name first; the config, which makes it a scorer, last.

    Raises:
        KvlearnError: a weight is not finite, the config does not fit into JSON, or ``folder`` is a file.
    """
    _check_values(str(folder), weights)
    if folder.exists() and not folder.is_dir():
        raise KvlearnError(f"{folder} is a file; give a folder to write the scorer into.")
    try:
        json.dumps(config.as_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise KvlearnError(f"{folder}: the scorer's config does not fit into JSON ({error}).") from None
    payload = save(weights, metadata={"format": "pt"})
    data = {**config.as_dict(), _HASH: hashlib.sha256(payload).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, payload)
    _replace(folder / CARD, render(config).encode())
    _replace(folder / CONFIG, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())


def _replace(path: Path, payload: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private; a scorer is to be shared
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

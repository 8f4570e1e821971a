"""Training as one step of something larger: a config, changed in places, becomes a scorer in a folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # no stubs are installed for one call

from kvlearn.errors import KvlearnError
from kvlearn.rows import write_atomically
from train.export import export

SCORER, CONFIG = "scorer", "config.yaml"
"""What a finished folder holds: the scorer, and the config that made it, for `python -m train fit --config`."""

_SECTIONS = ("data", "model", "trainer")


def read_config(path: str | Path) -> dict[str, Any]:
    """A config as data.

    Raises:
        KvlearnError: the file is missing, or is no mapping in YAML.
    """
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise KvlearnError(f"there is no config {path}.") from None
    except yaml.YAMLError as error:
        raise KvlearnError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise KvlearnError(f"{path} is not a mapping in YAML.")
    return content


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with other values at dotted names, such as ``data.reduce``.

    Raises:
        KvlearnError: a name is not one of data, model or trainer.
    """
    made = copy.deepcopy(dict(config))
    for name, value in changes.items():
        section, _, rest = name.partition(".")
        if section not in _SECTIONS or not rest:
            raise KvlearnError(f"{name!r} is no dotted name of a config; it begins with {', '.join(_SECTIONS)}.")
        place = made.setdefault(section, {})
        *path, last = rest.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = copy.deepcopy(value)
    return made


def in_folder(config: Mapping[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """The config of a run that keeps its checkpoints and log in a folder of its own."""
    made = copy.deepcopy(dict(config))
    made["seed_everything"] = seed
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "log"},
    }
    keep = {"dirpath": str(folder / "checkpoints"), "save_last": True, "enable_version_counter": False}
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep}
    made["trainer"] = {**made.get("trainer", {}), "logger": [logger], "callbacks": [checkpoint]}
    return made


def train_into(config: Mapping[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """Train and export; what is finished is not done again, what was interrupted goes on.

    Args:
        config: as ``python -m train fit`` takes it; its logger and callbacks are replaced.
        folder: where everything goes: the config, checkpoints, the log, and the scorer.
        seed: of everything drawn.

    Returns:
        The scorer's folder.

    Raises:
        KvlearnError: the folder holds what another config made, or training cannot be done.
    """
    made = in_folder(config, folder, seed)
    text = yaml.safe_dump(made, sort_keys=False)
    kept = folder / CONFIG
    if kept.is_file() and kept.read_text("utf-8") != text:
        raise KvlearnError(f"{folder} holds what another config made; use another folder, or delete it.")
    scorer = folder / SCORER
    if (scorer / "config.json").is_file():
        return scorer
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, text.encode())
    last = folder / "checkpoints" / "last.ckpt"
    from train.cli import run  # Lightning takes seconds to import

    run(["fit", "--config", str(kept), *(["--ckpt_path", str(last)] if last.is_file() else [])])
    export(last, scorer)
    return scorer

"""Files that come with kvlearn: scorers and training configs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from kvlearn.errors import KvlearnError

_PACKAGE = Path(__file__).resolve().parent


def shipped_scorers() -> list[str]:
    """Names of the scorers that come with this installation, as a policy takes them: ``checkpoints/NAME``."""
    found = {
        path.parent.name for root in (_PACKAGE, _PACKAGE.parent) for path in root.glob("checkpoints/*/config.json")
    }
    return [f"checkpoints/{name}" for name in sorted(found)]


def shipped(kind: Literal["checkpoints", "configs"], name: str) -> Path:
    """Path of a file or folder that comes with kvlearn.

    They lie beside the package in a checkout, and inside it in an installed wheel.

    Args:
        kind: top-level folder.
        name: what to find in it.

    Raises:
        KvlearnError: this installation lacks it.
    """
    for root in (_PACKAGE, _PACKAGE.parent):
        path = root / kind / name
        if path.exists():
            return path
    raise KvlearnError(f"this installation of kvlearn has no {kind}/{name}; install it from its repository or a wheel.")


def scorer_folder(name: str) -> str:
    """Where a scorer is: those that come with kvlearn are found by their name in its repository, wherever one is.

    Args:
        name: a folder, ``checkpoints/NAME``, or a Hub id; all but the second are given back as they are.
    """
    top, _, rest = name.partition("/")
    if top == "checkpoints" and Path(rest).name == rest != "" and not Path(name).is_dir():
        with contextlib.suppress(KvlearnError):
            return str(shipped("checkpoints", rest))
    return name

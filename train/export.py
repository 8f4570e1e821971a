"""``python -m train export CKPT DIR``: from a Lightning checkpoint to a portable scorer folder."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlearn.errors import KvlearnError
from kvlearn.scorers import Scorer, ScorerConfig
from kvlearn.scorers.card import check_results

CONFIG_KEY = "kvlearn_scorer"
"""Where a checkpoint holds the scorer's config, as JSON text."""

_PREFIX = "scorer."


def export(
    checkpoint: str | Path, folder: str | Path, metrics: str | Path | None = None, budgets: str | Path | None = None
) -> Scorer:
    """Write a checkpoint's scorer as safetensors, JSON and a model card.

    Args:
        checkpoint: a Lightning checkpoint of ``python -m train fit``. It is read as data: no code in it runs.
        folder: where to write.
        metrics: a JSON file of measured results to add to the card: one object or a list, each with ``table`` (a list
            of flat rows) and optionally ``title``, ``command`` and ``notes``.
        budgets: a JSON file with the recommended budget of each layer: a list of numbers, one per scored layer, which
            is scaled to mean 1.

    Returns:
        The scorer.

    Raises:
        KvlearnError: a file is missing, damaged or of another form.
    """
    scorer = read_checkpoint(checkpoint)
    config = scorer.config
    if metrics is not None:
        config = replace(config, metrics=(*check_results(_read_json(metrics), str(metrics)), *config.metrics))
    if budgets is not None:
        config = replace(config, budgets=_read_budgets(budgets))
    scorer.config = config
    scorer.save_pretrained(folder)
    return scorer


def read_checkpoint(path: str | Path) -> Scorer:
    """The scorer in a Lightning checkpoint, in eval mode.

    Raises:
        KvlearnError: the file is missing, damaged or not a checkpoint of a scorer.
    """
    try:
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise KvlearnError(f"there is no checkpoint {path}; training writes them into its log folder.") from None
    except pickle.UnpicklingError:
        raise KvlearnError(
            f"{path} is not a checkpoint, or holds code that would run when it is read, which kvlearn refuses."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KvlearnError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(data, dict) or not isinstance(data.get(CONFIG_KEY), str):
        raise KvlearnError(f"{path} is not a checkpoint of a scorer: it has no {CONFIG_KEY!r}.")
    source = f"{path}: {CONFIG_KEY}"
    scorer = Scorer(ScorerConfig.from_dict(json.loads(data[CONFIG_KEY]), source))
    weights = {k.removeprefix(_PREFIX): v for k, v in data.get("state_dict", {}).items() if k.startswith(_PREFIX)}
    try:
        scorer.load_state_dict(weights)
    except RuntimeError as error:
        raise KvlearnError(f"{path}: its weights do not fit its {CONFIG_KEY}: {error}") from None
    return scorer.eval()


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvlearnError(f"there is no file {path}.") from None
    except ValueError as error:
        raise KvlearnError(f"{path} is not valid JSON: {error}.") from None


def _read_budgets(path: str | Path) -> tuple[float, ...]:
    values = _read_json(path)
    if not isinstance(values, list) or not values or not all(isinstance(v, int | float) and v > 0 for v in values):
        raise KvlearnError(f"{path}: expected a list of numbers above 0, one per scored layer.")
    mean = sum(values) / len(values)
    return tuple(v / mean for v in values)


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train export", description="Write a checkpoint's scorer as safetensors, JSON and a model card."
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint that `python -m train fit` wrote")
    parser.add_argument("folder", metavar="DIR", help="folder to write; the path that kvlearn takes as a policy")
    parser.add_argument("--metrics", metavar="FILE", help="JSON with measured results for the model card")
    parser.add_argument("--budgets", metavar="FILE", help="JSON list: recommended budget of each layer, relative")
    options = parser.parse_args(arguments)
    scorer = export(options.checkpoint, options.folder, options.metrics, options.budgets)
    size = sum(p.numel() for p in scorer.parameters())
    print(f"wrote {options.folder}: {size:,} weights for {len(scorer.config.layers)} layers")

"""``python -m train ablate FILE --out DIR``: a recipe and variations of it, each judged in closed loop."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlearn.errors import KvlearnError
from kvlearn.progress import bar
from kvlearn.rows import RowStore
from train.judge import Judge, Judging
from train.recipe import changed, in_folder, read_config, train_into

BASE = "base"
"""The variation that changes nothing, with which the others are compared."""

ROWS = "rows.jsonl"

_KEYS = ("base", "set", "seeds", "judge", "variations")


@dataclass(frozen=True)
class Ablation:
    """What an ablation is made of.

    Args:
        recipe: the config that all start from.
        variations: what each changes, by its name: dotted names and values.
        seeds: each variation is trained with all of them.
        judging: how scorers are judged.
    """

    recipe: Mapping[str, Any]
    variations: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    judging: Judging

    @classmethod
    def read(cls, path: str | Path) -> Ablation:
        """From a file; see ``configs/ablation``.

        Raises:
            KvlearnError: it is not as described there.
        """
        content = read_config(path)
        for name in content:
            if name not in _KEYS:
                raise KvlearnError(f"{path}: there is no {name!r} in an ablation; it has {', '.join(_KEYS)}.")
        for name in ("base", "judge", "variations"):
            if not content.get(name):
                raise KvlearnError(f"{path}: {name} is missing or empty.")
        variations = {BASE: {}, **content["variations"]}
        for name, changes in variations.items():
            if not re.fullmatch(r"[\w.+-]+", str(name)) or not isinstance(changes, dict):
                raise KvlearnError(f"{path}: variation {name!r} is no name with a mapping of dotted names to values.")
        seeds = content.get("seeds", [0])
        if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
            raise KvlearnError(f"{path}: seeds are {seeds!r}; give a list of whole numbers.")
        recipe = changed(read_config(Path(path).parent / content["base"]), content.get("set") or {})
        return cls(recipe, variations, seeds, Judging.from_dict(content["judge"], str(path)))

    def config(self, variation: str) -> dict[str, Any]:
        """The config of one variation."""
        return changed(self.recipe, self.variations[variation])


@dataclass
class Cells:
    """The scorers of an ablation in its folder.

    Args:
        ablation: what is made.
        out: where.
        only: names of variations; all by default.

    Raises:
        KvlearnError: a name is unknown.
    """

    ablation: Ablation
    out: Path
    only: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in self.ablation.variations:
                raise KvlearnError(f"there is no variation {name!r}; there are {', '.join(self.ablation.variations)}.")

    @property
    def all(self) -> list[tuple[str, int]]:
        """Variation and seed of each cell, all variations of a seed before the next seed."""
        names = [name for name in self.ablation.variations if not self.only or name in self.only or name == BASE]
        return [(name, seed) for seed in self.ablation.seeds for name in names]

    def folder(self, variation: str, seed: int) -> Path:
        """Of one cell."""
        return self.out / "cells" / variation / f"seed-{seed}"

    def scorer(self, variation: str, seed: int) -> str:
        """What rows call the scorer of a cell."""
        return str(self.folder(variation, seed) / "scorer")


def ablate(ablation: Ablation, out: Path, only: Sequence[str] = ()) -> None:
    """Train and judge every cell that is not done yet, and write the results after each.

    Raises:
        KvlearnError: a cell cannot be trained or measured, or the folder holds another ablation.
    """
    from train.ablation_report import write_ablation

    cells = Cells(ablation, out, only)
    for name, seed in cells.all:  # a mistake in any of them shows now
        in_folder(ablation.config(name), cells.folder(name, seed), seed)
    with RowStore(out / ROWS) as store, bar("ablation") as progress:
        judge = Judge(ablation.judging, store)
        if ablation.judging.beside:
            judge.run(ablation.judging.beside)
        for done, (name, seed) in enumerate(cells.all):
            progress(f"{name}, seed {seed}", done, len(cells.all))
            scorer = train_into(ablation.config(name), cells.folder(name, seed), seed=seed)
            judge.run([str(scorer)])
            write_ablation(store.rows, cells, out)


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train ablate", description="Train variations of a recipe and judge each in closed loop."
    )
    parser.add_argument("file", metavar="FILE", help="what is varied: a file such as those in configs/ablation")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="scorers, rows, table and plot")
    parser.add_argument("--only", metavar="NAMES", default="", help="variations, comma-separated, besides the base")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads; all cores by default")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    ablation = Ablation.read(options.file)
    ablate(ablation, options.out, [name for name in options.only.split(",") if name])
    from rich.console import Console

    from train.ablation_report import TABLE, terminal_table

    console = Console()
    with RowStore(options.out / ROWS) as store:
        console.print(terminal_table(store.rows, Cells(ablation, options.out)))
    print(f"written to {options.out / TABLE}", file=sys.stderr)

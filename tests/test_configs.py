"""Every YAML under configs/ is read by the command that it is for, and none is forgotten."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.y*ml"))


def read_train(path: Path) -> None:
    pytest.importorskip("lightning", reason="training needs the extra kvlearn[train]")
    from lightning.pytorch.cli import LightningCLI

    from train.cli import Cli
    from train.data import TraceDataModule
    from train.module import ScorerModule

    cli = Cli(ScorerModule, TraceDataModule, run=False, args=["--config", str(path)], seed_everything_default=0)
    assert isinstance(cli, LightningCLI)
    assert cli.model.losses
    assert cli.datamodule.hparams["train"]
    assert cli.model.hparams["seed"] == cli.datamodule.hparams["seed"] == cli.config["seed_everything"]


def read_ablation(path: Path) -> None:
    pytest.importorskip("lightning", reason="training needs the extra kvlearn[train]")
    from train.ablate import BASE, Ablation

    ablation = Ablation.read(path)
    assert next(iter(ablation.variations)) == BASE
    for number, name in enumerate(ablation.variations):
        changed = Path(f"{number}.yaml")
        changed.write_text(yaml.safe_dump(ablation.config(name)))
        read_train(changed)


READERS: dict[str, Callable[[Path], None]] = {"train": read_train, "ablation": read_ablation}
"""By folder."""


def test_every_folder_of_configs_has_a_reader() -> None:
    assert CONFIGS
    assert {path.parent.name for path in CONFIGS} == set(READERS), "a folder of configs that nothing here reads"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_read_by_its_command(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train"])  # LightningCLI warns when it is given arguments beside others
    READERS[path.parent.name](path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    first = text.splitlines()[0]
    assert re.match(r"# \S", first), f"{path.name} does not begin with a comment"
    assert f"configs/{path.parent.name}/{path.name}" in text, f"{path.name} does not show the command that reads it"

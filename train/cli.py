"""``python -m train fit|validate``: Lightning's command line for scorers."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from train.data import TraceDataModule
from train.module import ScorerModule
from train.progress import Progress

_NOISE = (  # warnings that a user can do nothing about
    r".*does not have many workers",  # windows are few and costly: one worker is enough, by design
    r".*LeafSpec",  # Lightning's own use of a deprecated name of torch
    r"LightningCLI's args parameter",  # arguments come from python -m train, which has looked at them first
    r".*exists and is not empty",  # a new run replaces the old one's checkpoints, as the config says
)
_ABOUT = "Train a scorer on traces (fit), measure one (validate); `python -m train export CKPT DIR` writes it."
_TRAINER = {"max_epochs": 10, "num_sanity_val_steps": 0, "enable_model_summary": False}
_RAISE = {"exit_on_error": False}  # train.__main__ turns the error into one line


class Cli(LightningCLI):
    """One seed for all that is drawn, and lines of progress."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--progress.format``; the seeds of model and data follow ``--seed_everything``."""
        parser.add_lightning_class_args(Progress, "progress")
        for part in ("model", "data"):
            parser.link_arguments("seed_everything", f"{part}.seed", compute_fn=int)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Training, and measuring a checkpoint."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
        return {"fit": skip, "validate": skip}


def run(arguments: Sequence[str]) -> None:
    """Parse and do what ``arguments`` say."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    parser: dict[str, Any] = {"prog": "python -m train", "description": _ABOUT, **_RAISE}
    Cli(
        ScorerModule,
        TraceDataModule,
        args=list(arguments),
        seed_everything_default=0,
        trainer_defaults={**_TRAINER, "enable_progress_bar": sys.stderr.isatty()},
        save_config_kwargs={"overwrite": True},
        parser_kwargs={**parser, "fit": _RAISE, "validate": _RAISE},
    )

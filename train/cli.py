"""``python -m train fit|validate``: Lightning's command line for scorers."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from train.data import TraceDataModule
from train.module import ScorerModule
from train.progress import Progress

# Warnings that a user can do nothing about.
_NOISE = (
    r".*does not have many workers",  # windows are few and costly: one worker is enough, by design
    r".*LeafSpec",  # Lightning's own use of a deprecated name of torch
    r"LightningCLI's args parameter",  # arguments come from python -m train, which has looked at them first
    r".*exists and is not empty",  # a new run replaces the old one's files, as the config says
)


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
    Cli(
        ScorerModule,
        TraceDataModule,
        args=list(arguments),
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"enable_progress_bar": sys.stderr.isatty(), "enable_model_summary": False},
        parser_kwargs={"prog": "python -m train"},
    )

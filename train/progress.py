"""Progress on standard output, for terminals, logs and programs."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal

import lightning.pytorch as pl

_LEAST_SECONDS = 5.0  # between two lines within an epoch


class Progress(pl.Callback):
    """One line per validation, and every few seconds between.

    Args:
        format: "text", "json" (one object per line: event, epoch, step, steps, seconds, and the metrics), "none", or
            "auto": "text" unless a progress bar is shown.
    """

    def __init__(self, format: Literal["auto", "text", "json", "none"] = "auto") -> None:  # noqa: A002 - the option's name
        self.format = format
        self.start = self.last = time.monotonic()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        if self.format == "auto":
            self.format = "none" if trainer.progress_bar_callback else "text"
        for kept in getattr(trainer, "datamodule").prepared():  # noqa: B009 - set by Trainer.fit, not declared
            where = f"{kept['ready']} of {kept['windows']} in {kept['folder']}"
            self._write({"event": "samples", **kept}, f"samples: {where}, {kept['bytes'] / 1e9:.2g} GB for all")
        self.start = self.last = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A line now and then."""
        if time.monotonic() - self.last >= _LEAST_SECONDS:
            self._say(trainer, "step", ("train_loss",))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A line with what was measured."""
        if not trainer.sanity_checking:
            self._say(trainer, "validation", tuple(trainer.callback_metrics))

    def _say(self, trainer: pl.Trainer, event: str, names: tuple[str, ...]) -> None:
        self.last = time.monotonic()
        values = {n: round(float(v), 6) for n, v in trainer.callback_metrics.items() if n in names}
        steps = trainer.estimated_stepping_batches if trainer.training else trainer.global_step
        where = {"epoch": trainer.current_epoch, "step": trainer.global_step, "steps": steps}
        seconds = round(self.last - self.start, 1)
        wanted = ("train_loss", "val_loss", "val_kept_mass")
        shown = [f"{n} {v:.4f}" for n, v in values.items() if n.startswith(wanted)]
        text = f"epoch {where['epoch']}, step {where['step']}, {seconds:.0f} s: {', '.join(shown)}"
        self._write({"event": event, **where, "seconds": seconds, **values}, text)

    def _write(self, event: dict[str, Any], text: str) -> None:
        if self.format not in ("none", "auto"):
            print(json.dumps(event) if self.format == "json" else text, flush=True, file=sys.stdout)

"""The whole job in a few minutes: trace, train, load, compare, generate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvlearn.attention import cache_argument
from kvlearn.cache import EvictingCache
from kvlearn.compare import Comparison, Settings
from kvlearn.errors import KvlearnError
from kvlearn.rows import Row, RowStore
from kvlearn.shipped import shipped
from kvlearn.tasks.lm import text_cases
from kvlearn.tracing import TraceReport, trace

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel
    from kvlearn.scorers import Scorer

Notify = Callable[[str, int, int], None]

MODEL = "smollm2-135m"
SCORER = "smollm2-135m"
CONFIG = "train/smollm2-135m-quick.yaml"
TRAIN_DATA = "stdlib,sympy-docs"
TRACE_WINDOW = 1024
HELD_OUT = "torch-docs"
HEURISTICS = ("full", "streaming", "h2o", "tova", "snapkv")


@dataclass(frozen=True)
class Sizes:
    """How much the demo does.

    Args:
        trace_tokens: tokens traced for the fresh scorer.
        train_seconds: the longest that it trains.
        docs: held-out documents compared on.
        window: tokens of each.
        budget: slots per KV head in the comparison and in generation.
        new_tokens: tokens generated.
    """

    trace_tokens: int = 8192
    train_seconds: int = 60
    docs: int = 4
    window: int = 1536
    budget: int = 256
    new_tokens: int = 48


class Demo:
    """Each step is a method, to be called in order.

    Args:
        loaded: the model.
        out: folder for everything that the demo writes.
        sizes: how much to do.
    """

    def __init__(self, loaded: LoadedModel, out: Path, sizes: Sizes) -> None:
        self.loaded, self.out, self.sizes = loaded, out, sizes
        self.shipped_scorer = _short(shipped("checkpoints", SCORER))
        self.fresh_scorer = out / "scorer"

    def load_shipped(self) -> Scorer:
        """The scorer that comes with kvlearn, checked against the model."""
        from kvlearn.scorers import Scorer

        scorer = Scorer.from_pretrained(self.shipped_scorer)
        scorer.check_model(self.loaded.model)
        return scorer

    def trace(self, notify: Notify) -> TraceReport:
        """Log attention over a few thousand tokens."""
        return trace(
            self.loaded,
            TRAIN_DATA,
            self.out / "traces" / "quick",
            tokens=self.sizes.trace_tokens,
            window=TRACE_WINDOW,
            progress=lambda done, total: notify("tokens", done, total),
        )

    def train(self, notify: Notify) -> dict[str, Any]:
        """Train a small scorer on the trace and export it; returns the last validation's figures.

        Training runs as its own program, because kvlearn itself does not depend on it.
        """
        command = [sys.executable, "-m", "train", "fit", "--config", str(shipped("configs", CONFIG).resolve())]
        seconds = self.sizes.train_seconds
        command += [f"--trainer.max_time=00:00:{seconds // 60:02d}:{seconds % 60:02d}", "--progress.format=json"]
        figures: dict[str, Any] = {}
        for line in _lines(command, self.out):
            if line.startswith("{"):
                event = json.loads(line)
                if "step" in event:  # not what is said before the first step
                    notify("steps", event["step"], event["steps"])
                if event["event"] == "validation":
                    figures = event
        checkpoint = "runs/quick/checkpoints/last.ckpt"
        for _ in _lines([sys.executable, "-m", "train", "export", checkpoint, self.fresh_scorer.name], self.out):
            pass
        return figures

    def compare(self, notify: Notify) -> list[Row]:
        """Heuristics, the shipped scorer and the fresh one at one budget, on text that neither was trained on."""
        sizes = self.sizes
        settings = Settings(
            policies=(*HEURISTICS, str(self.shipped_scorer), str(self.fresh_scorer)),
            budgets=(sizes.budget,),
            window=sizes.window,
            batch=sizes.docs,
        )
        cases = text_cases(self.loaded.tokenizer, HELD_OUT, docs=sizes.docs, window=sizes.window, split="test", seed=0)
        with RowStore(self.out / "rows.jsonl") as store:
            Comparison(self.loaded, settings, {"lm": cases}, store).run(notify)
            return store.rows

    def prompt(self) -> tuple[list[int], str]:
        """The beginning of a held-out document, and the text of its last line or so."""
        window = self.sizes.window
        (case,) = text_cases(self.loaded.tokenizer, HELD_OUT, docs=1, window=window, split="validation", seed=0)
        ids: list[int] = case.input_ids.tolist()
        return ids, str(self.loaded.tokenizer.decode(ids[-32:]))

    def generate(self, ids: list[int], policy: str) -> tuple[str, dict[str, Any]]:
        """Continue a prompt greedily under a policy; returns the text and what the cache held."""
        model: Any = self.loaded.model
        tokenizer = self.loaded.tokenizer
        cache = EvictingCache(model, policy, None if policy == "full" else self.sizes.budget)
        inputs = torch.tensor([ids], device=model.device)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=self.sizes.new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            **{cache_argument(model): cache},
        )
        return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)), cache.stats()


def _short(path: Path) -> Path:
    """Relative to the current folder, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _lines(command: list[str], folder: Path) -> Iterator[str]:
    """Run a program in ``folder`` and yield its lines; its last words are the error if it fails."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = ""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last = line.strip() or last
            yield line.strip()
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
    if code:
        raise KvlearnError(f"training failed: {last}")

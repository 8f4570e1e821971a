"""The results of an ablation as JSON lines, as a table and as a plot."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvlearn.report.grids import markdown_grid, terminal_grid
from kvlearn.rows import Row, write_atomically
from kvlearn.stats import bootstrap_interval
from train.ablate import BASE, Cells
from train.judge import table_of

if TYPE_CHECKING:
    from rich.table import Table

TABLE, RESULTS, PLOT = "table.md", "results.jsonl", "ablation.png"

ALL = 0
"""In place of a budget: the mean over all of them."""


@dataclass(frozen=True)
class Line:
    """What one variation loses at one budget.

    Attributes:
        variation: its name.
        budget: slots, or :data:`ALL`.
        loss: mean rise over the full cache, nats/token, over documents and seeds.
        spread: standard deviation of the mean over seeds; None for one seed.
        difference: mean paired difference to the base, on the same documents and seeds; negative is better.
        low: lower end of its 95% interval over documents; None for one document.
        high: upper end.
        seeds: how many.
        documents: how many.
    """

    variation: str
    budget: int
    loss: float
    spread: float | None
    difference: float
    low: float | None
    high: float | None
    seeds: int
    documents: int


def lines(rows: Sequence[Row], cells: Cells) -> list[Line]:
    """All that is measured so far; a variation is compared with the base over the seeds that both have."""
    measured = {row["policy"] for row in rows}
    budgets = list(cells.ablation.judging.budgets)
    seeds = {
        name: [seed for seed in cells.ablation.seeds if cells.scorer(name, seed) in measured]
        for name in cells.ablation.variations
    }
    found = []
    for name in [*cells.ablation.variations]:
        both = [seed for seed in seeds[name] if seed in seeds[BASE]]
        if both:
            own = table_of(rows, [cells.scorer(name, seed) for seed in both], budgets)  # [seeds, budgets, documents]
            base = table_of(rows, [cells.scorer(BASE, seed) for seed in both], budgets)
            found += [_line(name, budget, own[:, [i]], base[:, [i]]) for i, budget in enumerate(budgets)]
            found.append(_line(name, ALL, own, base))
    for name in cells.ablation.judging.beside:
        if name in measured and seeds[BASE]:
            own = table_of(rows, [name], budgets)
            base = table_of(rows, [cells.scorer(BASE, seed) for seed in seeds[BASE]], budgets).mean(0, keepdims=True)
            found += [_line(name, budget, own[:, [i]], base[:, [i]]) for i, budget in enumerate(budgets)]
            found.append(_line(name, ALL, own, base))
    return found


def _line(name: str, budget: int, own: np.ndarray, base: np.ndarray) -> Line:
    """From losses ``[seeds, budgets, documents]``."""
    interval = bootstrap_interval((own - base).mean((0, 1)))
    per_seed = own.mean((1, 2))
    return Line(
        variation=name,
        budget=budget,
        loss=float(own.mean()),
        spread=float(per_seed.std(ddof=1)) if len(per_seed) > 1 else None,
        difference=interval.mean,
        low=interval.lo,
        high=interval.hi,
        seeds=len(own),
        documents=own.shape[-1],
    )


def _grid(found: Sequence[Line], budgets: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    columns = [
        "variation",
        "seeds",
        *[f"loss at {budget}" for budget in budgets],
        "mean",
        "spread",
        "difference to base",
    ]
    by_name: dict[str, dict[int, Line]] = {}
    for line in found:
        by_name.setdefault(line.variation, {})[line.budget] = line
    grid = []
    for name, own in by_name.items():
        mean = own[ALL]
        less = "" if name == BASE else f"{mean.difference:+.4f}{_interval(mean)}"
        spread = "" if mean.spread is None else f"{mean.spread:.4f}"
        figures = [f"{own[budget].loss:.4f}" for budget in budgets]
        grid.append([name, str(mean.seeds), *figures, f"{mean.loss:.4f}", spread, less])
    return columns, grid


def _interval(line: Line) -> str:
    return "" if line.low is None or line.high is None else f" [{line.low:+.4f}, {line.high:+.4f}]"


def markdown(rows: Sequence[Row], cells: Cells) -> str:
    """The table, what is varied, and how to read it."""
    found = lines(rows, cells)
    judging = cells.ablation.judging
    documents = max((line.documents for line in found), default=0)
    changes = [
        f"- `{name}`: {', '.join(f'`{key}: {json.dumps(value)}`' for key, value in own.items())}"
        for name, own in cells.ablation.variations.items()
        if own
    ]
    note = (
        f"Rise over the full cache in nats/token, {judging.model}, windows of {judging.window:,} tokens of "
        f"{judging.data} ({judging.split}), {documents} documents, slots shared {judging.allocation}. Spread: standard "
        "deviation over seeds. Difference to base: paired, of the mean over budgets, with its 95% bootstrap interval "
        "over documents; negative is better."
    )
    return "\n".join([markdown_grid(*_grid(found, judging.budgets)), "", note, "", *changes, ""])


def terminal_table(rows: Sequence[Row], cells: Cells) -> Table:
    """The same for a terminal."""
    columns, grid = _grid(lines(rows, cells), cells.ablation.judging.budgets)
    return terminal_grid("rise over the full cache, nats/token", columns, grid)


def write_ablation(rows: Sequence[Row], cells: Cells, out: Path) -> None:
    """Write table, results and plot, each whole or not at all."""
    found = lines(rows, cells)
    command = shlex.join(["python", "-m", "train", *sys.argv[1:]])
    write_atomically(out / TABLE, f"```bash\n{command}\n```\n\n{markdown(rows, cells)}".encode())
    write_atomically(out / RESULTS, "".join(json.dumps(asdict(line)) + "\n" for line in found).encode())
    drawn = [line for line in found if line.budget == ALL and line.variation in cells.ablation.variations]
    if len(drawn) > 1:
        write_atomically(out / PLOT, plot([line for line in drawn if line.variation != BASE], drawn[0].loss))


def plot(drawn: Sequence[Line], base: float) -> bytes:
    """Differences to the base with their intervals, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.2 + 0.32 * len(drawn)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    ordered = sorted(drawn, key=lambda line: -line.difference)
    for place, line in enumerate(ordered):
        low = line.difference if line.low is None else line.low
        high = line.difference if line.high is None else line.high
        axes.plot([low, high], [place, place], color="#4477aa", linewidth=2)
        axes.plot([line.difference], [place], "o", color="#4477aa")
        if line.spread is not None and math.isfinite(line.spread):
            axes.plot([line.difference - line.spread, line.difference + line.spread], [place] * 2, "|", color="#cc6677")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(ordered)), [line.variation for line in ordered])
    axes.set_xlabel(f"loss less that of the base ({base:.4f}), nats/token; red: spread over seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="x")
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()

"""How a step grows with the context and with rows: a plot, with the cost model's lines beside what was measured."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlearn.errors import KvlearnError
from kvlearn.report.plots import MARKERS
from kvlearn.report.speed import FILE, Line, check_speed_row, races, speed_key
from kvlearn.report.tables import short_names
from kvlearn.rows import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1b1f24", "#cc3311", "#0068a8", "#00795c")


def growth_png(folder: str | Path, rows_at: int, bandwidth: float) -> bytes:
    """Milliseconds a step and MiB of cache, against the context for one row and against rows at one context.

    Args:
        folder: where a bench left its rows.
        rows_at: the context at which rows grow.
        bandwidth: bytes a second, for the dashed lines: what moving the cost model's bytes takes.

    Raises:
        KvlearnError: there are no decode rows in the folder.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, and always the Agg canvas

    path = Path(folder) / FILE
    rows = read_rows(path, check=check_speed_row, key=speed_key) if path.is_file() else []
    lines = [line for race in races(rows) if race[0].row["bench"] == "decode" for line in race]
    if not lines:
        raise KvlearnError(f"{folder} has no decode rows to draw; run `kvlearn bench growth` first.")
    names = short_names(line.row["policy"] for line in lines)
    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    grid: Any = figure.subplots(2, 2)
    by_context = [line for line in lines if line.row["batch"] == 1]
    by_rows = [line for line in lines if line.row["context"] == rows_at]
    for column, (own, axis, label) in enumerate(
        ((by_context, "context", "context, tokens (one row)"), (by_rows, "batch", f"rows (context {rows_at:,})"))
    ):
        time, size = grid[0][column], grid[1][column]
        _draw(time, own, axis, names, lambda line: line.seconds * 1e3, lambda line: _least(line, bandwidth))
        _draw(size, own, axis, names, lambda line: line.row["bytes"] / 2**20, None)
        time.set_ylabel("ms a step")
        size.set_ylabel("MiB of cache")
        size.set_xlabel(label)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _least(line: Line, bandwidth: float) -> float | None:
    moved = line.row.get("moved")
    return None if moved is None else moved / bandwidth * 1e3


def _draw(
    axes: Axes,
    lines: Sequence[Line],
    axis: str,
    names: dict[str, str],
    value: Callable[[Line], float],
    model: Callable[[Line], float | None] | None,
) -> None:
    series: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        series.setdefault((line.row["policy"], line.row.get("budget")), []).append(line)
    for place, ((policy, budget), points) in enumerate(series.items()):
        points.sort(key=lambda line: line.row[axis])
        at = [line.row[axis] for line in points]
        colour = _COLOURS[place % len(_COLOURS)]
        label = names[policy] if budget is None else f"{names[policy]}, {budget} slots"
        axes.plot(at, [value(line) for line in points], label=label, color=colour, marker=MARKERS[place % len(MARKERS)])
        costs = [cost for line in points if model is not None and (cost := model(line)) is not None]
        if len(costs) == len(points):
            axes.plot(at, costs, color=colour, linestyle="--", linewidth=1, label=f"{label}: bytes / bandwidth")
    ticks = sorted({line.row[axis] for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)

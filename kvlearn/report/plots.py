"""Quality against budget as PNG plots, and the colours that the plots and the page share."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlearn.report.tables import Panel, panels, short_names
from kvlearn.rows import Row, metric_info, write_atomically
from kvlearn.stats import SummaryRow, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Style:
    """How a policy is drawn, the same in every plot of a report.

    Colours come as a pair, each with a contrast of 3 or more to its background; markers and dashes say the same thing
    again for those who do not see the colour.
    """

    light: str
    dark: str
    marker: str
    dash: tuple[int, ...]
    width: float


# Told apart in the common kinds of colour blindness by hue and lightness together.
_HEURISTIC_COLOURS = (
    ("#0068a8", "#5db8f0"),
    ("#00795c", "#2fc79a"),
    ("#a05a00", "#f0b04a"),
    ("#8a4fa3", "#d3a4ee"),
    ("#4d6b00", "#a9cc3f"),
    ("#3d4fc4", "#9aa8ff"),
    ("#007a8a", "#3fd0e0"),
    ("#7a5230", "#cfa37c"),
)
_LEARNED_COLOURS = (("#cc3311", "#ff8a65"), ("#b8006b", "#ff7ac0"), ("#8f1d2c", "#ff9aa5"))
_FLOOR_COLOURS = (("#6b7280", "#9aa3af"), ("#8a7f70", "#b8ab98"))
_BOUND_COLOURS = (("#1b1f24", "#e6e9ee"),)
OUTLIER = 1.75  # times the median policy's worst loss
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # matplotlib's names; the page draws the same shapes


def policy_styles(lines: Iterable[SummaryRow]) -> dict[str, Style]:
    """A style for every policy: colours by kind, then by name, so that one report is consistent throughout."""
    kinds = {line.policy: line.kind for line in lines}
    looks: dict[str, tuple[tuple[tuple[str, str], ...], tuple[int, ...], float]] = {
        "learned": (_LEARNED_COLOURS, (), 2.6),
        "heuristic": (_HEURISTIC_COLOURS, (), 1.5),
        "floor": (_FLOOR_COLOURS, (2, 3), 1.5),
        "oracle": (_BOUND_COLOURS, (7, 4), 1.5),
        "full": (_BOUND_COLOURS, (1, 3), 1.5),
    }
    styles = {}
    for kind, (colours, dash, width) in looks.items():
        for place, policy in enumerate(sorted(name for name, own in kinds.items() if own == kind)):
            light, dark = colours[place % len(colours)]
            turn = place // len(colours)  # colours are used up: go round again with other dashes
            styles[policy] = Style(
                light, dark, MARKERS[place % len(MARKERS)], dash if not turn else (5, 2 + turn), width
            )
    return styles


def outliers(lines: Sequence[SummaryRow]) -> set[str]:
    """Policies so much worse than the others that a scale with room for them would leave none to tell those apart."""
    worst: dict[str, float] = {}
    for line in lines:
        if line.kind in ("heuristic", "floor", "learned") and line.loss is not None:
            worst[line.policy] = max(line.loss, worst.get(line.policy, 0.0))
    usual = statistics.median(worst.values()) if worst else 0.0
    learned = {line.policy for line in lines if line.kind == "learned"}
    return {policy for policy, loss in worst.items() if loss > OUTLIER * usual > 0 and policy not in learned}


def plot_png(rows: Iterable[Row], out_dir: str | Path) -> list[Path]:
    """Draw the loss against the budget, one PNG for every task and metric: mean and 95% interval over documents.

    With a single budget, policies are drawn side by side instead.

    Returns:
        The files written, in the order of the table.

    Raises:
        KvlearnError: the folder cannot be written.
    """
    lines = summary(rows)
    styles = policy_styles(lines)
    paths = []
    for panel in panels(lines):
        if any(line.loss is not None for line in panel.lines):
            path = Path(out_dir) / f"{panel.slug}.png"
            write_atomically(path, _png(panel, styles))
            paths.append(path)
    return paths


def _png(panel: Panel, styles: dict[str, Style]) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no global state, and always the Agg canvas

    figure = Figure(figsize=(8.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    drawn = [line for line in panel.lines if line.loss is not None]
    (_over_budgets if len(panel.budgets) > 1 else _side_by_side)(axes, drawn, styles)
    axes.set_title(panel.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _over_budgets(axes: Axes, lines: list[SummaryRow], styles: dict[str, Style]) -> None:
    names = short_names(line.policy for line in lines)
    cut = outliers(lines)
    seen = [line for line in lines if line.policy not in cut]
    for policy in styles:  # learned ones first: the legend's order
        points = sorted((line for line in lines if line.policy == policy), key=lambda line: line.cell.budget)
        if points:
            style, label = styles[policy], names[policy] + (", partly above" if policy in cut else "")
            budgets = [line.cell.budget for line in points]
            axes.plot(budgets, [line.loss or 0.0 for line in points], label=label, zorder=style.width, **_look(style))
            held = [line for line in points if line.lo is not None and line.hi is not None]
            axes.fill_between(
                [line.cell.budget for line in held],
                [line.lo or 0.0 for line in held],
                [line.hi or 0.0 for line in held],
                color=style.light,
                alpha=0.2 if points[0].kind == "learned" else 0.1,
                linewidth=0,
            )
    budgets = sorted({line.cell.budget for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    if cut:
        low, high = min(line.lo or 0.0 for line in seen), max(line.hi or line.loss or 0.0 for line in seen)
        axes.set_ylim(min(0.0, low) - 0.04 * high, 1.08 * high)
    axes.set_xlabel("budget, slots per KV head (log2)")
    axes.set_ylabel(_loss_label(lines))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, handlelength=3.5)


def _side_by_side(axes: Axes, lines: list[SummaryRow], styles: dict[str, Style]) -> None:
    names = short_names(line.policy for line in lines)
    for place, line in enumerate(lines):
        if line.loss is not None:
            lo, hi = (line.loss if end is None else end for end in (line.lo, line.hi))
            look = _look(styles[line.policy]) | {"linestyle": "none"}
            axes.errorbar(line.loss, place, xerr=[[line.loss - lo], [hi - line.loss]], elinewidth=2, **look)
    axes.set_yticks(range(len(lines)), [names[line.policy] for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(
        _loss_label(lines) + (f", at a budget of {lines[0].cell.budget} slots" if lines[0].cell.budget else "")
    )


def _look(style: Style) -> dict[str, Any]:
    dash = (0, style.dash) if style.dash else "solid"
    return {"color": style.light, "marker": style.marker, "markersize": 6, "linestyle": dash, "linewidth": style.width}


def _loss_label(lines: list[SummaryRow]) -> str:
    return f"loss, {metric_info(lines[0].cell.metric).unit}, lower is better"

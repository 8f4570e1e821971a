"""Speed in words and pictures: for the terminal, for Markdown, for the page, and as a plot."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlearn.report.grids import html_grid, markdown_grid, terminal_grid
from kvlearn.report.html import write_page
from kvlearn.report.page import Section, write_report
from kvlearn.report.plots import MARKERS
from kvlearn.report.speed import FILE, Line, check_speed_row, races, speed_key, targets, times
from kvlearn.report.tables import memory, short_names, speed, whole
from kvlearn.rows import Row, read_rows, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

_TITLES = {
    "decode": "Decoding: a step gives one token of every row",
    "prefill": "Prompts: a step reads the whole prompt",
    "trace": "Tracing: a step reads a window of text",
}
_CAPTION = (
    "step: median over rounds and the range, milliseconds; full / step and full / bytes: times as fast, and as small, "
    "as transformers' DynamicCache with sdpa attention in the same rounds; bytes: allocated by the cache, state "
    "included; peak: the most held at any moment of a step, beside the weights; parts: milliseconds of a step, "
    "measured apart, where clocks add to them"
)
_PARTS = ("model", "attention", "observe", "score", "select", "replace", "bookkeeping")
COLUMNS = ("policy", "budget", "tokens/s", "step", "full / step", "bytes", "full / bytes", "peak", *_PARTS)


def words(line: Line, names: dict[str, str]) -> list[str]:
    """A line of the table, in the order of :data:`COLUMNS`."""
    low, high = line.spread
    return [
        names[line.row["policy"]],
        whole(line.row.get("budget")),
        speed(line.tokens_per_s),
        f"{milliseconds(line.seconds)} [{milliseconds(low)}, {milliseconds(high)}]",
        times(line.speedup),
        memory(line.row.get("bytes")),
        times(line.smaller),
        memory(line.row.get("peak_bytes")),
        *(milliseconds(line.share(part)) for part in _PARTS),
    ]


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, to three digits."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def heading(line: Line) -> str:
    """What the contenders of a race have in common."""
    row = line.row
    threads = f"{row['threads']} {'thread' if row['threads'] == 1 else 'threads'}"
    where = threads if row["device"] == "cpu" else row["device"]
    return f"{row['model']}, {row['dtype']}, {where}, context {row['context']:,}, batch {row['batch']}"


def speed_table(rows: Iterable[Row]) -> Group:
    """The races for a terminal, and below them what was aimed for."""
    from rich.console import Group
    from rich.text import Text

    rows = list(rows)
    names = _names(rows)
    parts: list[Any] = []
    for race in races(rows):
        bench = race[0].row["bench"]
        parts += [terminal_grid(f"{bench}, {heading(race[0])}", COLUMNS, [words(line, names) for line in race]), Text()]
    parts.append(Text(_CAPTION, style="dim"))
    if found := _target_rows(rows):
        parts += [Text(), terminal_grid("Targets", ("what", "measured", "target", ""), found)]
    return Group(*parts)


def _target_rows(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [target.what, times(target.measured), f"at least {times(target.wanted)}", "met" if target.met else "missed"]
        for target in targets(rows)
    ]


def speed_markdown(rows: Iterable[Row]) -> str:
    """The races and the targets as Markdown tables."""
    rows = list(rows)
    names = _names(rows)
    parts = []
    for race in races(rows):
        lines = [words(line, names) for line in race]
        parts.append(f"{race[0].row['bench'].capitalize()}, {heading(race[0])}:\n\n{markdown_grid(COLUMNS, lines)}\n")
    if found := _target_rows(rows):
        parts.append("Targets:\n\n" + markdown_grid(("what", "measured", "target", ""), found) + "\n")
    return "\n".join([*parts, _CAPTION.capitalize() + ".\n"])


def speed_sections(folder: str | Path) -> list[Section]:
    """The page's section on speed, if a bench has written rows to ``folder``."""
    path = Path(folder) / FILE
    if not path.is_file():
        return []
    rows = read_rows(path, check=check_speed_row, key=speed_key)
    return [speed_section(rows)] if rows else []


def speed_section(rows: Iterable[Row]) -> Section:
    """All races as tables, the targets, and the plot."""
    rows = list(rows)
    names = _names(rows)
    parts = [f'<p class="quiet">{escape(_CAPTION.capitalize())}.</p>']
    if found := _target_rows(rows):
        parts.append(html_grid("Targets", ("what", "measured", "target", ""), found))
    if any(race[0].row["bench"] == "decode" for race in races(rows)):
        picture = base64.b64encode(speed_png(rows)).decode()
        parts.append(
            f'<figure class="card" style="margin:0"><img style="max-width:100%" src="data:image/png;base64,{picture}" '
            'alt="Tokens per second and bytes of the cache against the context; the tables below hold the numbers">'
            "</figure>"
        )
    for bench, title in _TITLES.items():
        own = [race for race in races(rows) if race[0].row["bench"] == bench]
        parts += [f"<h3>{escape(title)}</h3>"] if own else []
        parts += [html_grid(heading(race[0]), COLUMNS, [words(line, names) for line in race]) for race in own]
    return Section("Speed and memory", "\n".join(parts))


def write_speed(rows: Sequence[Row], folder: str | Path, commands: Sequence[str] = ()) -> list[Path]:
    """Write the page, the tables as Markdown, and the plot.

    A folder that holds a comparison's rows too gets one page with both.

    Returns:
        The files written.

    Raises:
        KvlearnError: the folder cannot be written, or its rows cannot be read.
    """
    folder = Path(folder)
    files = [_write_page(rows, folder, commands), folder / "speed.md"]
    write_atomically(files[1], speed_markdown(rows).encode())
    if any(row["bench"] == "decode" for row in rows):
        files.append(folder / "speed.png")
        write_atomically(files[2], speed_png(rows))
    return files


def _write_page(rows: Sequence[Row], folder: Path, commands: Sequence[str]) -> Path:
    section, quality = speed_section(rows), folder / "rows.jsonl"
    compared = read_rows(quality) if quality.is_file() else []
    if compared:
        return write_report(compared, folder, commands=commands, extra_sections=[section])
    path = folder / "report.html"
    write_page(
        path,
        "speed.html.j2",
        css=["page.css"],
        js=[],
        colours={},
        title="Speed and memory of cache policies",
        about=", ".join(sorted({row["model"] for row in rows})),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        section=section,
        commands=commands,
        data=rows,
    )
    return path


def speed_png(rows: Iterable[Row]) -> bytes:
    """Tokens/s and bytes of the decode races: against the context for every batch, or against the batch.

    The latter is drawn where there are several batches at a single context.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, and always the Agg canvas

    lines = [line for race in races(rows) if race[0].row["bench"] == "decode" for line in race]
    contexts, batches = ({line.row[axis] for line in lines} for axis in ("context", "batch"))
    across, apart = ("batch", "context") if len(contexts) == 1 < len(batches) else ("context", "batch")
    panels = sorted({line.row[apart] for line in lines})
    figure = Figure(figsize=(11, 3.6 * len(panels)), dpi=120, layout="constrained")
    grid: Any = figure.subplots(len(panels), 2, squeeze=False)
    for panel, (rate, size) in zip(panels, grid, strict=True):
        own = [line for line in lines if line.row[apart] == panel]
        _plot(rate, own, across, lambda line: line.tokens_per_s, "tokens/s")
        _plot(size, own, across, lambda line: line.row["bytes"] / 2**20, "MiB of cache")
        rate.set_title(f"{apart} {panel:,}", loc="left")
        size.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def _plot(axes: Axes, lines: Sequence[Line], across: str, value: Callable[[Line], float], label: str) -> None:
    names = short_names(line.row["policy"] for line in lines)
    series: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        series.setdefault((line.row["policy"], line.row.get("budget")), []).append(line)
    for place, ((policy, budget), points) in enumerate(series.items()):
        points.sort(key=lambda line: line.row[across])
        axes.plot(
            [line.row[across] for line in points],
            [value(line) for line in points],
            label=names[policy] if budget is None else f"{names[policy]}, {budget}",
            marker=MARKERS[place % len(MARKERS)],
            linewidth=2.4 if points[0].row["kind"] == "learned" else 1.4,
        )
    ticks = sorted({line.row[across] for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel({"context": "context, tokens", "batch": "batch, rows"}[across])
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _names(rows: Sequence[Row]) -> dict[str, str]:
    return short_names(row["policy"] for row in rows)

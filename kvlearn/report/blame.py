"""Where policies lose: the loss with the oracle everywhere but in one part of the model, part by part."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlearn.cells import setting_text
from kvlearn.report.grids import html_grid, markdown_grid, terminal_grid
from kvlearn.report.page import Section
from kvlearn.report.plots import MARKERS
from kvlearn.report.tables import decimal, short_names, with_interval
from kvlearn.rows import Row, loss, metric_info, write_atomically
from kvlearn.stats import bootstrap_interval

if TYPE_CHECKING:
    from rich.console import Group

EVERYWHERE = "everywhere"
_TITLE = "Where policies lose"
_SAME = ("model", "task", "metric", "window", "block", "protect", "allocation")

Document = tuple[str, str]


@dataclass(frozen=True)
class Blame:
    """One task, metric and budget: what each policy loses in each part of the model.

    Attributes:
        about: which, in words.
        slug: the same for names of files.
        metric: its name.
        policies: short names.
        parts: in the order of the model; then :data:`EVERYWHERE`, where a policy decides in all parts.
        losses: for each policy and part, the loss on each document that all have; absent if it was not measured.
        oracle: the loss of the oracle alone on each of these documents.
    """

    about: str
    slug: str
    metric: str
    policies: Sequence[str]
    parts: Sequence[str]
    losses: Mapping[tuple[str, str], Sequence[float]]
    oracle: Sequence[float]


def blames(rows: Iterable[Row]) -> list[Blame]:
    """What rows with a ``blame`` say, and those of the same policies and of the oracle without one.

    Parts of a metric are left out.
    """
    rows = [row for row in rows if not row.get("error") and "/" not in row["metric"]]
    blamed = [row for row in rows if row.get("blame")]
    groups = dict.fromkeys((*(setting_text(row.get(name)) for name in _SAME), row["budget"]) for row in blamed)
    varies = [name for place, name in enumerate(_SAME) if len({group[place] for group in groups}) > 1]
    found = []
    for group in groups:
        own = [r for r in rows if (*(setting_text(r.get(name)) for name in _SAME), r.get("budget")) == group]
        made = _blame(own, [name for name in varies if name not in ("task", "metric")])
        found += [made] if made is not None else []
    return found


def _blame(rows: Sequence[Row], varies: Sequence[str]) -> Blame | None:
    """Of rows that agree in all else; ``None`` if no document has everything, or there is no oracle."""
    values: dict[tuple[str, str], dict[Document, list[float]]] = {}
    names = [row["policy"] for row in rows if row.get("blame")]
    short = short_names(names)
    oracles = [row["policy"] for row in rows if row["kind"] == "oracle"]
    for row in rows:
        oracle = row["policy"] in oracles[:1]  # of several, the first decides elsewhere
        if oracle or row["policy"] in short:
            key = ("", "") if oracle else (short[row["policy"]], row.get("blame") or EVERYWHERE)
            values.setdefault(key, {}).setdefault((row["domain"], row["doc"]), []).append(loss(row))
    shared = set.intersection(*(set(docs) for docs in values.values()))
    if not shared or ("", "") not in values:
        return None
    columns = {key: [float(np.mean(docs[doc])) for doc in sorted(shared)] for key, docs in values.items()}
    oracle_losses = columns.pop(("", ""))
    parts = sorted({part for _, part in columns}, key=lambda part: (part == EVERYWHERE, *_numbers(part)))
    row = rows[0]
    words = [row["task"], row["metric"], *(f"{name} {setting_text(row.get(name))}" for name in varies)]
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join([*words, str(row["budget"])])).strip("-.")
    about = f"{', '.join(words)}, budget {row['budget']}, {len(shared)} documents"
    return Blame(about, slug, row["metric"], [*dict.fromkeys(short.values())], parts, columns, oracle_losses)


def _numbers(part: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", part)]


def _lines(blame: Blame) -> list[list[str]]:
    """Lines of the table: a part, the oracle alone, everywhere; a policy in each column."""
    lines = [
        [part, *(_rise(blame, blame.losses.get((policy, part))) for policy in blame.policies)] for part in blame.parts
    ]
    lines.append(["nowhere (oracle)", *(decimal(float(np.mean(blame.oracle))) for _ in blame.policies)])
    return lines


def _rise(blame: Blame, losses: Sequence[float] | None) -> str:
    """The loss, and by how much it lies above the oracle's."""
    if losses is None:
        return decimal(None)
    rise = bootstrap_interval(np.subtract(losses, blame.oracle))
    return f"{decimal(float(np.mean(losses)))}, +{with_interval(decimal, rise.mean, rise.lo, rise.hi)}".replace(
        "+-", "-"
    )


def _caption(blame: Blame) -> str:
    unit = metric_info(blame.metric).unit
    return (
        f"loss in {unit} with the policy in that part alone and the oracle elsewhere, and its rise over the oracle "
        "alone with the 95% interval over documents"
    )


def render_blame(rows: Iterable[Row]) -> Group:
    """The tables for a terminal; empty without such rows."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for blame in blames(rows):
        parts.append(terminal_grid(f"{_TITLE}: {blame.about}", ["policy in", *blame.policies], _lines(blame)))
        parts.append(Text(_caption(blame) + "\n", style="dim"))
    return Group(*parts)


def blame_markdown(rows: Iterable[Row]) -> str:
    """The tables as Markdown; empty without such rows."""
    return "".join(
        f"\n{_TITLE}: {blame.about}:\n\n{markdown_grid(['policy in', *blame.policies], _lines(blame))}\n\n"
        f"{_caption(blame).capitalize()}.\n"
        for blame in blames(rows)
    )


def blame_sections(rows: Iterable[Row]) -> list[Section]:
    """The section of the page: plots and tables; none without such rows."""
    found = blames(rows)
    if not found:
        return []
    html = []
    for blame in found:
        picture = base64.b64encode(blame_png(blame)).decode()
        html += [
            f"<h3>{escape(blame.about)}</h3>",
            f'<figure class="card" style="margin:0"><img style="max-width:100%" src="data:image/png;base64,{picture}" '
            'alt="Rise of the loss by part of the model; the table below holds the numbers"></figure>',
            f'<p class="quiet">{escape(_caption(blame).capitalize())}.</p>',
            html_grid(blame.about, ["policy in", *blame.policies], _lines(blame)),
        ]
    return [Section(_TITLE, "\n".join(html))]


def write_blame(rows: Iterable[Row], folder: str | Path) -> list[Path]:
    """Write a plot for each table.

    Raises:
        KvlearnError: the folder cannot be written.
    """
    paths = []
    for blame in blames(rows):
        paths.append(Path(folder) / f"blame-{blame.slug}.png")
        write_atomically(paths[-1], blame_png(blame))
    return paths


def blame_png(blame: Blame) -> bytes:
    """The rise over the oracle by part, with 95% intervals; a line for each policy."""
    from matplotlib.figure import Figure  # without pyplot: no global state, and always the Agg canvas

    figure = Figure(figsize=(8.5, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    places = [part for part in blame.parts if part != EVERYWHERE]
    for number, policy in enumerate(blame.policies):
        known = [(place, part) for place, part in enumerate(places) if (policy, part) in blame.losses]
        rises = [bootstrap_interval(np.subtract(blame.losses[policy, part], blame.oracle)) for _, part in known]
        everywhere = blame.losses.get((policy, EVERYWHERE))
        total = "" if everywhere is None else f", everywhere {decimal(float(np.mean(everywhere)))}"
        shift = 0.08 * (number - (len(blame.policies) - 1) / 2)  # so that intervals do not hide each other
        axes.errorbar(
            [place + shift for place, _ in known],
            [rise.mean for rise in rises],
            yerr=[
                [rise.mean - (rise.mean if rise.lo is None else rise.lo) for rise in rises],
                [(rise.mean if rise.hi is None else rise.hi) - rise.mean for rise in rises],
            ],
            label=policy + total,
            marker=MARKERS[number % len(MARKERS)],
            elinewidth=1,
            capsize=2,
        )
    axes.axhline(0, color="#6b7280", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(places)), places, rotation=30 if len(places) > 8 else 0)
    axes.set_ylabel(f"rise over the oracle, {metric_info(blame.metric).unit}")
    axes.set_title(f"{blame.about}; oracle alone {decimal(float(np.mean(blame.oracle)))}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()

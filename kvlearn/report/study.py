"""The page of ``kvlearn report TRACE``: how a model attends, and what of its past tells its future."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvlearn.report import tables
from kvlearn.report.html import write_page
from kvlearn.report.svg import COLOURS, Chart, heat_svg, line_svg
from kvlearn.rows import write_atomically

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Study:
    """What a trace says about attention; every figure is a mean over the windows and boundaries that were looked at.

    Attributes:
        model, data: names.
        windows, boundaries, tokens: how much was looked at: windows, moments of each, tokens of each window.
        block: queries of a block.
        layers: indices in the model.
        heads: KV heads of a layer.
        needed: by percentage of the mass, ``[L, H]`` share of the tokens that hold it together.
        needed_without_sinks: ``[L, H]`` the same for 90% of what the first four tokens do not get.
        first, first_four: ``[L, H]`` share of the mass on the first token, and on the first four.
        ages: tokens back from a block's end, ascending.
        beyond: ``[L, A]`` share of the mass on tokens older than that, the first four left out.
        gaps: queries between two hits of one token, upper limits of bins, ascending; the last is open.
        gap_share: ``[L, G]`` share of all such intervals in each bin.
        again: ``[L, H]`` share of the tokens that were ever hit that were hit in more than one block.
        predictors: names of what is known of a token at a boundary.
        correlation: ``[P, L]`` Spearman correlation of each with the mean mass to come.
        recall: ``[P, L]`` share of the tokens with the most mass to come that the predictor would keep, at a quarter of
            the tokens.
    """

    model: str
    data: str
    windows: int
    boundaries: int
    tokens: int
    block: int
    layers: Sequence[int]
    heads: int
    needed: Mapping[int, Array]
    needed_without_sinks: Array
    first: Array
    first_four: Array
    ages: Sequence[int]
    beyond: Array
    gaps: Sequence[int]
    gap_share: Array
    again: Array
    predictors: Sequence[str]
    correlation: Array
    recall: Array


@dataclass(frozen=True)
class Part:
    """A section of the page: what it says, and its charts."""

    title: str
    about: str
    charts: Sequence[Chart] = ()
    heat: str = ""
    table: Sequence[Sequence[str]] = ()
    slug: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slug", re.sub(r"[^a-z]+", "-", self.title.lower()))


def parts(study: Study) -> list[Part]:
    """The sections, in order."""
    return [_concentration(study), _sinks(study), _locality(study), _recurrence(study), _prediction(study)]


def _by_layer(title: str, says: str, series: Mapping[str, Array], study: Study) -> Chart:
    return Chart(title, "layer", says, list(study.layers), {name: list(values) for name, values in series.items()})


def _concentration(study: Study) -> Part:
    needed = {f"{percent}% of the mass": share.mean(1) for percent, share in study.needed.items()}
    needed["90% without the first four"] = study.needed_without_sinks.mean(1)
    half = np.median(study.needed[90])
    return Part(
        "Concentration",
        f"How many of the tokens there are hold most of a block's attention. Half of all heads need "
        f"{tables.percent(float(half))} of the tokens or less for 90% of it: the fewer, the less is lost by forgetting "
        "the others, if one knew which.",
        [_by_layer("Tokens that hold the mass", "share of the tokens, mean over heads", needed, study)],
        heat_svg("Share of the tokens that hold 90% of the mass", study.needed[90], study.layers),
    )


def _sinks(study: Study) -> Part:
    series = {"the first token": study.first.mean(1), "the first four": study.first_four.mean(1)}
    mean, most = (tables.percent(float(share)) for share in (study.first.mean(), study.first.max()))
    return Part(
        "Sinks",
        f"Mass that goes to the beginning of the text, whatever it says: {mean} to the first token on average, {most} "
        "in the head that gives it the most.",
        [_by_layer("Mass on the beginning", "share of the mass, mean over heads", series, study)],
        heat_svg("Share of the mass on the first four tokens", study.first_four, study.layers),
    )


def _locality(study: Study) -> Part:
    everywhere = study.beyond
    series = {
        "mean over layers": list(everywhere.mean(0)),
        "the most local layer": list(everywhere[everywhere.mean(1).argmin()]),
        "the least local layer": list(everywhere[everywhere.mean(1).argmax()]),
    }
    chart = Chart(
        "Mass beyond an age", "age of the token, queries", "share of the mass", list(study.ages), series, log=True
    )
    far = [age for age in study.ages if age <= study.tokens // 4][-1]
    share = float(everywhere[:, list(study.ages).index(far)].mean())
    return Part(
        "Locality",
        f"Mass on tokens older than so many queries, the first four left out. {tables.percent(share)} of it goes to "
        f"tokens older than {far} queries: a window of that size would lose as much.",
        [chart],
    )


def _recurrence(study: Study) -> Part:
    place = min(2, len(study.gaps) - 2)
    labels = [*(f"≤ {gap}" for gap in study.gaps[:-1]), f"> {study.gaps[-2]}"]
    chart = Chart(
        "Queries between two hits of a token",
        "queries",
        "share of the intervals",
        list(range(len(labels))),
        {
            "mean over layers": list(study.gap_share.mean(0)),
            "the layer with the longest": list(study.gap_share[_long(study)]),
        },
        labels=labels,
    )
    return Part(
        "Recurrence",
        f"A hit is a block in which some query gives a token at least 1/128 of its attention. "
        f"{tables.percent(float(study.again.mean()))} of the tokens that are ever hit are hit again in another block; "
        f"{tables.percent(float(study.gap_share[:, place + 1 :].sum(1).mean()))} of the intervals between two hits are "
        f"longer than {study.gaps[place]} queries.",
        [chart],
        heat_svg("Share of the hit tokens that are hit again", study.again, study.layers),
    )


def _long(study: Study) -> int:
    return int(study.gap_share[:, -1].argmax())


def _prediction(study: Study) -> Part:
    order = np.argsort(-study.recall.mean(1))
    recall = {study.predictors[i]: study.recall[i] for i in order[:7]}
    lines = [
        [
            study.predictors[i],
            tables.decimal(float(study.correlation[i].mean())),
            tables.percent(float(study.recall[i].mean())),
            tables.percent(float(study.recall[i].min())),
        ]
        for i in order
    ]
    best = study.predictors[order[0]]
    return Part(
        "What tells the future",
        f"At several moments of each window: how well one number about a token ranks the mean mass that it will still "
        f"receive, and how many of the quarter of the tokens that will receive the most it would keep. Best is {best}, "
        f"with {tables.percent(float(study.recall[order[0]].mean()))} of them; a scorer reads all of them together.",
        [_by_layer("Recall at a quarter of the tokens", "share, mean over heads", recall, study)],
        table=[["known of a token", "rank correlation", "recall", "recall in the worst layer"], *lines],
    )


def write_study(study: Study, out_dir: str | Path, *, commands: Sequence[str] = ()) -> Path:
    """Write ``study.html``, one file with everything in it, and one PNG for each of its charts.

    Raises:
        KvlearnError: the folder cannot be written.
    """
    folder, shown = Path(out_dir), parts(study)
    for part in shown:
        for chart in part.charts:
            name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower())
            write_atomically(folder / f"{name}.png", _png(chart, study))
    path = folder / "study.html"
    write_page(
        path,
        "study.html.j2",
        css=["page.css", "study.css"],
        js=[],
        colours={f"s{i}": pair for i, pair in enumerate(COLOURS)},
        title=f"How {study.model} attends",
        study=study,
        parts=shown,
        svg=line_svg,
        words=tables,
        commands=commands,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        data={},
    )
    return path


def _png(chart: Chart, study: Study) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no global state, and always the Agg canvas

    figure = Figure(figsize=(8.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, values), (light, _) in zip(chart.series.items(), COLOURS, strict=False):
        axes.plot(chart.x, values, label=name, color=light, marker="o", markersize=4)
    if chart.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(chart.x, [str(x) for x in chart.x])
        axes.minorticks_off()
    elif chart.labels:
        axes.set_xticks(chart.x, list(chart.labels))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    axes.set_title(f"{chart.title} · {study.model}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()

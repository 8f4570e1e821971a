"""Charts that need no script: lines and heat maps as SVG, in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

# By day and by night, each with a contrast of 3 or more to its background.
COLOURS = (
    ("#0068a8", "#5db8f0"),
    ("#cc3311", "#ff8a65"),
    ("#00795c", "#2fc79a"),
    ("#8a4fa3", "#d3a4ee"),
    ("#a05a00", "#f0b04a"),
    ("#4d6b00", "#a9cc3f"),
    ("#6b7280", "#9aa3af"),
)
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "", "6 3", "2 3")  # says the same as the colour
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 40
_CELL = 15


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis.

    Attributes:
        title, x_title, y_title: in words.
        x: places, ascending.
        series: values by name, as many as places; at most as many series as there are :data:`COLOURS`.
        log: whether the axis is logarithmic, to base 2.
        labels: what stands at the places; the numbers themselves without.
    """

    title: str
    x_title: str
    y_title: str
    x: Sequence[int]
    series: Mapping[str, Sequence[float]]
    log: bool = False
    labels: Sequence[str] = ()


def line_svg(chart: Chart) -> str:
    """The chart as an SVG element that scales with the page; values are told by pointing at a mark."""
    places = [math.log2(x) if chart.log else float(x) for x in chart.x]
    known = [value for values in chart.series.values() for value in values if math.isfinite(value)]
    low, high, step = _scale(min([0.0, *known]), max([1e-9, *known]))
    span = (places[-1] - places[0]) or 1.0

    ticks = [f"{low + number * step + 0.0:g}" for number in range(round((high - low) / step) + 1)]
    left = max(_LEFT, 7.5 * max(map(len, ticks)) + 8)  # wide enough for the longest number

    def across(place: float) -> float:
        return left + (place - places[0]) / span * (_WIDTH - left - _RIGHT)

    def down(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_aloud(chart))}">']
    for number, tick in enumerate(ticks):
        y = down(low + number * step)
        out.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    every = -(-len(places) // 12)
    for i in range(0, len(places), every):
        label = chart.labels[i] if chart.labels else str(chart.x[i])
        x = across(places[i])
        anchor = "end" if x > _WIDTH - _LEFT and len(label) > 2 else "middle"
        out.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{escape(label)}</text>')
    out.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(chart.x_title)}</text>')
    for number, (name, values) in enumerate(chart.series.items()):
        points = [
            (across(p), down(v), i) for i, (p, v) in enumerate(zip(places, values, strict=True)) if math.isfinite(v)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        out.append(f'<g style="--c: var(--s{number})">')
        out.append(f'<polyline class="series" stroke-width="2" stroke-dasharray="{_DASHES[number]}" points="{line}"/>')
        for x, y, i in points:
            at = chart.labels[i] if chart.labels else f"{chart.x_title} {chart.x[i]}"
            told = escape(f"{name}, {at}: {values[i]:.3g}")
            out.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{told}</title></circle>')
        out.append("</g>")
    return "".join([*out, "</svg>", _legend(chart)])


def _legend(chart: Chart) -> str:
    items = [
        f'<li style="--c: var(--s{i})"><svg viewBox="0 0 28 10" width="28" height="10" aria-hidden="true">'
        f'<line class="series" stroke-width="2.5" stroke-dasharray="{_DASHES[i]}" x1="0" x2="28" y1="5" y2="5"/></svg> '
        f"{escape(name)}</li>"
        for i, name in enumerate(chart.series)
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


def _aloud(chart: Chart) -> str:
    ends = [f"{name} from {values[0]:.2g} to {values[-1]:.2g}" for name, values in chart.series.items() if values]
    return f"{chart.title}, {chart.y_title} by {chart.x_title}: {'; '.join(ends)}"


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Round limits and a round step, of four to eight steps."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def heat_svg(title: str, values: npt.NDArray[np.float64], layers: Sequence[int]) -> str:
    """``[L, H]`` shares as a map, layers across and heads down; the darker, the larger."""
    count, heads = values.shape
    width, height = 40 + count * _CELL, heads * _CELL + 22
    top = float(np.nanmax(values)) or 1.0
    out = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" style="max-width: {width * 1.6:.0f}px" role="img" '
        f'aria-label="{escape(title)}: from {np.nanmin(values):.2g} to {top:.2g}">'
    ]
    for h in range(heads):
        out.append(f'<text x="34" y="{h * _CELL + 12}" text-anchor="end">{h}</text>')
        for i in range(count):
            value = float(values[i, h])
            shade = 0.06 + 0.94 * value / top if math.isfinite(value) else 0.0
            told = f"layer {layers[i]}, head {h}: {value:.3g}"
            out.append(
                f'<rect x="{40 + i * _CELL}" y="{h * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}" '
                f'fill-opacity="{shade:.2f}"><title>{told}</title></rect>'
            )
    out += [
        f'<text x="{40 + i * _CELL + 7}" y="{heads * _CELL + 14}" text-anchor="middle">{layers[i]}</text>'
        for i in range(0, count, max(1, count // 10))
    ]
    caption = f"{escape(title)}: layers across, KV heads down; full colour is {top:.2g}."
    return "".join([*out, "</svg>", f'<p class="quiet">{caption}</p>'])

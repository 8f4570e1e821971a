"""Tables of ready-made texts: for the terminal, for the page, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def terminal_grid(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table of rich; the first column is set to the left, the others to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def markdown_grid(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = [":---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, rule, *lines])


def html_grid(caption: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways if it must; all texts are escaped."""

    def row(cells: Sequence[str]) -> str:
        first, *others = (escape(cell) for cell in cells)
        return f'<tr><th scope="row">{first}</th>' + "".join(f'<td class="number">{cell}</td>' for cell in others)

    head = "".join(f'<th scope="col"{" class=number" if n else ""}>{escape(c)}</th>' for n, c in enumerate(columns))
    body = "</tr>\n".join(row(line) for line in lines)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}, scrolls sideways"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tr></tbody></table></div>"
    )

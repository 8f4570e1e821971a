"""Pages of one file: a template of this folder with its styles and scripts in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlearn.rows import write_atomically

HERE = Path(__file__).parent


def write_page(
    path: Path,
    template: str,
    *,
    css: Sequence[str],
    js: Sequence[str],
    colours: Mapping[str, tuple[str, str]],
    **content: Any,
) -> None:
    """Write a page; an older one is replaced in one step.

    Args:
        path: the file.
        template: a template of this folder that extends ``base.html.j2``.
        css, js: files of this folder, in order; the theme's script comes first.
        colours: further custom properties of the page: name, and value by day and by night.
        **content: what the template shows, all of it escaped; ``title`` and ``data`` (JSON for the scripts) among it.

    Raises:
        KvlearnError: the file cannot be written.
    """
    import jinja2

    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    html = environment.get_template(template).render(
        css=_together(css), js=_together(["theme.js", *js]), colours=colours, **content
    )
    write_atomically(path, html.encode())


def _together(names: Sequence[str]) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)

"""Tables in Markdown files that a command writes: text between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvlearn.errors import KvlearnError


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers are set to the right."""
    numeric = [
        all(isinstance(row[i], int | float) or str(row[i])[:1].isdigit() for row in rows) for i in range(len(header))
    ]
    lines = [header, ["---:" if right else "---" for right in numeric], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def rewrite(path: Path, sections: dict[str, str]) -> None:
    """Replace the named sections of a file, whole or not at all.

    Raises:
        KvlearnError: the file is missing or lacks a section.
    """
    if not path.is_file():
        raise KvlearnError(f"{path} is not a file; give the Markdown file whose tables are to be rewritten.")
    text = path.read_text(encoding="utf-8")
    for name, body in sections.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise KvlearnError(f"{path} has no section {name!r} between {begin!r} and {end!r}.")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{body.strip()}\n\n{end}{after}"
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)

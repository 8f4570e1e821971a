"""Pictures of what policies hold while a text goes by."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlearn.report.tables import percent, short_names, whole
from kvlearn.rows import Row

_KINDS = ("full", "oracle", "learned", "heuristic", "floor")


@dataclass(frozen=True)
class Picture:
    """What one policy holds: time goes down, the text goes across, and the fuller the colour the more heads hold it.

    Attributes:
        policy: short name.
        image: a PNG as a data address; its opacity is the picture.
        about: the picture in words.
    """

    policy: str
    image: str
    about: str


@dataclass(frozen=True)
class Pictures:
    """Pictures of one text at one budget."""

    budget: int | None
    doc: str
    tokens: int
    first: int
    pictures: Sequence[Picture]


def pictures(rows: Iterable[Row]) -> list[Pictures]:
    """The pictures that rows carry (``kept``), by budget; the full cache is shown at each."""
    told = [row for row in rows if isinstance(row.get("kept"), dict) and not row.get("error")]
    names = short_names(row["policy"] for row in told)
    seen: dict[tuple[int | None, str, int], dict[str, Row]] = {}
    for row in told:
        group = (row.get("budget"), row["doc"], row["kept"]["tokens"])
        seen.setdefault(group, {}).setdefault(row["policy"], row)
    for (budget, doc, tokens), full in list(seen.items()):  # a full cache without a budget is shown at every one
        for (other, *same), by_policy in seen.items():
            if budget is None and other is not None and same == [doc, tokens]:
                by_policy.update({policy: row for policy, row in full.items() if policy not in by_policy})
                seen[budget, doc, tokens] = {}
    found = []
    for (budget, doc, tokens), by_policy in sorted(seen.items(), key=lambda item: (item[0][0] or 0, *item[0][1:])):
        if not by_policy:
            continue
        ordered = sorted(by_policy.values(), key=lambda row: (_KINDS.index(row["kind"]), names[row["policy"]]))
        first = min(row["kept"]["seen"][0] for row in ordered)
        made = [Picture(names[row["policy"]], _png(row["kept"]["lines"]), _in_words(row)) for row in ordered]
        found.append(Pictures(budget, doc, tokens, first, made))
    return found


def _in_words(row: Row) -> str:
    """What is left at the end, by quarters of the text."""
    last = [int(digit) / 9 for digit in row["kept"]["lines"][-1]]
    quarters = [last[i * len(last) // 4 : (i + 1) * len(last) // 4] for i in range(4)]
    shares = [percent(sum(quarter) / max(1, len(quarter))) for quarter in quarters]
    return (
        f"{row['policy']} after {whole(row['kept']['tokens'])} tokens holds, of the four quarters of the text, "
        f"{', '.join(shares[:3])} and {shares[3]}"
    )


def _png(lines: Sequence[str]) -> str:
    """Digits 0 to 9 as the opacity of pixels: a grey PNG with an alpha channel, as a data address."""
    width = max(len(line) for line in lines)
    pixels = b"".join(b"\0" + bytes(v for d in line for v in (0, round(int(d) * 255 / 9))) for line in lines)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, len(lines), 8, 4, 0, 0, 0)  # 8 bits, grey and alpha
    data = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"

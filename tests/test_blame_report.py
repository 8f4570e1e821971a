"""Where policies lose, in words and pictures: parts in order, beside the oracle, apart from the comparison itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_rows import fake_row
from rich.console import Console

from kvlearn.report import markdown_table
from kvlearn.report.blame import EVERYWHERE, blame_markdown, blame_sections, blames, render_blame, write_blame

PARTS = {"layers 0-4": 0.0, "layers 5-9": 0.01, "layers 10-14": 0.2}


def _rows(**changes: Any) -> list[dict[str, Any]]:
    rows = []
    for number in range(6):
        own = {"doc": f"d{number}", "full_value": 2.0, **changes}
        rows.append(fake_row(policy="oracle", kind="oracle", value=2.04, **own))
        for policy, factor in (("ema", 1.0), ("some/where/scorer", 0.5)):
            rows.append(fake_row(policy=policy, value=2.04 + 0.3 * factor, **own))
            for part, rise in reversed(PARTS.items()):
                value = 2.04 + rise * factor + 0.001 * number
                rows.append(fake_row(policy=policy, value=value, blame=part, **own))
    return rows


def test_parts_come_in_order_with_what_each_policy_loses_there() -> None:
    (found,) = blames(_rows())
    assert found.parts == [*PARTS, EVERYWHERE], "parts are sorted by their numbers, and all of them together come last"
    assert found.policies == ["ema", "scorer"]
    assert np.mean(found.losses["ema", "layers 10-14"]) == pytest.approx(0.2425)
    assert np.mean(found.losses["scorer", EVERYWHERE]) == pytest.approx(0.19)
    assert np.mean(found.oracle) == pytest.approx(0.04)


def test_the_table_says_the_rise_over_the_oracle() -> None:
    text = blame_markdown(_rows())
    (line,) = [line for line in text.splitlines() if line.startswith("| layers 10-14")]
    assert "0.243, +0.203 [0.201, 0.204]" in line or "0.242, +0.203" in line, line
    assert "nowhere (oracle) | 0.040 | 0.040" in text
    with (console := Console(width=160)).capture() as captured:
        console.print(render_blame(_rows()))
    assert "layers 10-14" in captured.get()


def test_the_comparison_itself_does_not_mix_with_parts() -> None:
    plain = [row for row in _rows() if "blame" not in row]
    assert markdown_table(_rows()) == markdown_table(plain)
    assert blame_markdown(plain) == ""
    assert blame_sections(plain) == []


def test_other_settings_are_told_apart() -> None:
    both = [*_rows(allocation="uniform"), *_rows(allocation="pyramid"), *_rows(allocation="uniform", metric="kl")]
    found = blames(both)
    assert len({one.about for one in found}) == len(found) == 3
    assert len({one.slug for one in found}) == 3, "one plot would take the place of another"


def test_documents_that_lack_a_part_are_left_out() -> None:
    rows = [row for row in _rows() if not (row["doc"] == "d0" and row.get("blame") == "layers 5-9")]
    (found,) = blames(rows)
    assert len(found.oracle) == 5


def test_without_the_oracle_there_is_nothing_to_say() -> None:
    assert blames([row for row in _rows() if row["kind"] != "oracle"]) == []


def test_the_plot_and_the_section_hold_no_markup_of_others(tmp_path: Any) -> None:
    (path,) = write_blame(_rows(), tmp_path)
    assert path.name == "blame-lm-nll-256.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (section,) = blame_sections(_rows(task="<b>lm</b>"))
    assert "<b>lm" not in section.html
    assert "data:image/png" in section.html

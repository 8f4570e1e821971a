"""One scorer against every other policy over all cells: the figures, and what they must not be."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from kvlearn.report.overall import overall, overall_markdown, overall_sections, render_overall


def rows_of(losses: dict[tuple[str, str, int], list[float]], window: int = 2048) -> list[dict[str, Any]]:
    """Rows of (policy, kind, budget) with one loss for each document."""
    return [
        {
            "model": "m",
            "task": "lm",
            "policy": policy,
            "kind": kind,
            "budget": budget,
            "doc": f"d{number}",
            "domain": "prose",
            "seed": 0,
            "metric": "nll",
            "window": window,
            "value": 2.0 + loss,
            "full_value": 2.0,
            "slots": budget,
            "bytes": 1000,
            "state_bytes": 10,
            "tokens": 100,
            "tokens_per_s": 10.0,
        }
        for (policy, kind, budget), values in losses.items()
        for number, loss in enumerate(values)
    ]


LOSSES = {
    ("mine", "learned", 128): [0.2, 0.3, 0.1],
    ("ema", "heuristic", 128): [0.4, 0.4, 0.4],
    ("tova", "heuristic", 128): [0.5, 0.6, 0.7],
    ("oracle", "oracle", 128): [0.0, 0.0, 0.0],
    ("mine", "learned", 256): [0.3, 0.3, 0.3],
    ("ema", "heuristic", 256): [0.2, 0.4, 0.3],
    ("tova", "heuristic", 256): [0.1, 0.2, 0.3],
    ("oracle", "oracle", 256): [0.1, 0.1, 0.1],
}


def test_means_over_cells_are_those_of_the_cells() -> None:
    (found,) = overall(rows_of(LOSSES))
    assert [rival.policy for rival in found.rivals] == ["ema", "tova"], "the one that loses least comes first"
    ema, tova = found.rivals
    assert (ema.cells, ema.better) == (2, 1), "equal at 256: not better"
    assert ema.loss == pytest.approx((0.4 + 0.3) / 2)
    assert ema.own == pytest.approx((0.2 + 0.3) / 2)
    assert ema.difference.mean == pytest.approx(-0.1)
    assert tova.difference.mean == pytest.approx((-0.4 + 0.1) / 2)
    assert ema.difference.lo is not None
    assert ema.difference.lo < ema.difference.mean < (ema.difference.hi or 0.0)
    assert found.gap_closed is None, "tova at 256 may lose no more than the oracle: one document says so"


def test_the_gap_is_that_of_each_cells_best_heuristic() -> None:
    losses = {**LOSSES, ("tova", "heuristic", 256): [0.5, 0.6, 0.7]}
    (found,) = overall(rows_of(losses))
    assert found.gap_closed is not None
    # at 128: (0.4 - 0.2) / 0.4; at 256: (0.3 - 0.3) / 0.2
    assert found.gap_closed.mean == pytest.approx((0.5 + 0.0) / 2)


def test_documents_that_cells_share_are_drawn_together() -> None:
    """The same documents twice are no more evidence than once."""
    once = {key: values for key, values in LOSSES.items() if key[2] == 128}
    twice = {**once, **{(policy, kind, 256): values for (policy, kind, _), values in once.items()}}
    (found,) = overall(rows_of(twice))
    (wide,) = overall([*rows_of(once), *rows_of(once, window=4096)])
    assert found.rivals[0].difference == wide.rivals[0].difference
    low, high = found.rivals[0].difference.lo, found.rivals[0].difference.hi
    assert low is not None
    assert high is not None
    assert (low, high) == pytest.approx((-0.3, -0.1)), "the interval of one cell: three documents, -0.3 to -0.1"


def test_what_cancels_within_a_document_leaves_no_interval() -> None:
    """Drawn apart for each cell, the documents would not cancel."""
    losses = {
        ("mine", "learned", 128): [0.1, 0.3, 0.1, 0.3],
        ("ema", "heuristic", 128): [0.2, 0.2, 0.2, 0.2],
        ("mine", "learned", 256): [0.3, 0.1, 0.3, 0.1],
        ("ema", "heuristic", 256): [0.2, 0.2, 0.2, 0.2],
    }
    (found,) = overall(rows_of(losses))
    difference = found.rivals[0].difference
    assert (difference.mean, difference.lo, difference.hi) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)


def test_a_cell_of_fewer_documents_counts_as_much_as_one_of_more() -> None:
    losses = {
        ("mine", "learned", 128): [0.1, 0.1, 0.1, 0.1],
        ("ema", "heuristic", 128): [0.2, 0.2, 0.2, 0.2],
        ("mine", "learned", 256): [0.1, 0.1],
        ("ema", "heuristic", 256): [0.4, 0.4],
    }
    (found,) = overall(rows_of(losses))
    assert found.rivals[0].difference.mean == pytest.approx((-0.1 - 0.3) / 2)


def test_without_a_scorer_or_with_one_cell_there_is_nothing_to_say() -> None:
    heuristics = {key: values for key, values in LOSSES.items() if key[1] != "learned"}
    one = {key: values for key, values in LOSSES.items() if key[2] == 128}
    for losses in (heuristics, one):
        assert overall(rows_of(losses)) == []
        assert overall_markdown(rows_of(losses)) == ""
        assert overall_sections(rows_of(losses)) == []


def test_it_is_told_in_words() -> None:
    losses = {**LOSSES, ("tova", "heuristic", 256): [0.5, 0.6, 0.7]}
    markdown = overall_markdown(rows_of(losses))
    assert "25% [" in markdown, "share of the gap"
    assert "| ema | 2 | 1 | 0.350 | 0.250 | -0.100 [" in markdown
    console = Console(width=120, record=True)
    console.print(render_overall(rows_of(losses)))
    assert "mine in lm" in console.export_text()
    (section,) = overall_sections(rows_of(losses))
    assert "<td" in section.html

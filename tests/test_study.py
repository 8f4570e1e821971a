"""What a trace says about attention is what one finds by hand, and the page says it without a script."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_traces import write_trace

from kvlearn import cli
from kvlearn.errors import KvlearnError
from kvlearn.features import encode_vectors
from kvlearn.history import decode_mass, encode_mass
from kvlearn.report.study import Study, parts
from kvlearn.study import study
from kvlearn.traces import Layout, Trace, Window

BLOCK, BLOCKS = 4, 8


def window_of(mass: torch.Tensor, peak: torch.Tensor | None = None) -> Any:
    """One window with the given ``[N, L, H, T]`` block mass."""
    blocks, layers, heads, tokens = mass.shape
    layout = Layout(layers=tuple(range(layers)), heads=heads, head_dim=2, window=tokens, block=tokens // blocks)
    generator = torch.Generator().manual_seed(0)
    return Window(
        layout=layout,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        domain="made-up",
        doc="doc",
        start=0,
        documents=("doc",),
        keys=encode_vectors(torch.randn(layers, heads, tokens, 2, generator=generator)),
        values=encode_vectors(torch.randn(layers, heads, tokens, 2, generator=generator)),
        mean_code=encode_mass(mass),
        peak_code=encode_mass(mass if peak is None else peak),
    )


def study_of(mass: torch.Tensor, peak: torch.Tensor | None = None) -> Study:
    one = window_of(mass, peak)
    manifest = SimpleNamespace(model="made-up", data="noise")

    class One(list[Any]):
        layout = one.layout

        def window(self, number: int) -> Any:
            return self[number]

    trace: Any = One([one])
    trace.manifest = manifest
    return study(trace, windows=1)


def causal(blocks: int, layers: int = 2, heads: int = 2) -> torch.Tensor:
    """``[N, L, H, T]`` zeros and ones: which tokens exist when a block ends."""
    ends = (torch.arange(blocks) + 1) * BLOCK
    return (torch.arange(blocks * BLOCK) < ends[:, None]).float()[:, None, None].expand(-1, layers, heads, -1).clone()


def test_even_attention_needs_all_and_a_sink_needs_one() -> None:
    mass = causal(BLOCKS)
    mass[:, 1] = 0
    mass[:, 1, :, 0] = 1.0  # layer 1 looks at the first token alone
    mass /= mass.sum(-1, keepdim=True)
    found = study_of(mass)
    for percent, share in found.needed.items():
        assert share[0] == pytest.approx(percent / 100, abs=0.06), "even attention needs as many tokens as mass"
        assert share[1] == pytest.approx(np.mean([1 / (BLOCK * n) for n in range(3, BLOCKS + 1)]))
    assert found.first[1] == pytest.approx(1.0)
    assert found.first_four[0] == pytest.approx(np.mean([4 / (BLOCK * n) for n in range(3, BLOCKS + 1)]), rel=0.01)


def test_a_window_of_attention_has_nothing_beyond_it() -> None:
    mass = causal(BLOCKS)
    for n in range(BLOCKS):
        mass[n, 1, :, : max(0, (n - 1) * BLOCK)] = 0  # layer 1 sees the last two blocks
    mass /= mass.sum(-1, keepdim=True)
    found = study_of(mass)
    assert list(found.ages) == [4, 8, 16]
    assert found.beyond[1] == pytest.approx([0.5, 0, 0], abs=0.01)
    assert (np.diff(found.beyond[0]) < 0).all()


def test_intervals_between_hits_are_counted_by_token() -> None:
    mass = causal(BLOCKS) * 1e-4
    peak = mass.clone()
    peak[[0, 1, 7], 0, 0, 2] = 0.5  # hit in blocks 0, 1 and 7: intervals of 4 and 24 queries
    peak[3, 0, 0, 5] = 0.5  # hit once
    found = study_of(mass, peak)
    assert found.gap_share[0] == pytest.approx([0.5, 0, 0, 0.5])
    assert list(found.gaps) == [4, 8, 16, 32]
    assert found.again[0, 0] == 0.5
    assert np.isnan(found.again[1, 0]), "no token of layer 1 is ever hit"


def test_what_foretells_the_future_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(1, 2, 2, BLOCKS * BLOCK, generator=generator)
    steady = causal(BLOCKS) * weight.exp() ** 3
    found = study_of(steady / steady.sum(-1, keepdim=True))
    at = list(found.predictors).index("mean mass since it came")
    assert (found.correlation[at] > 0.7).all(), "steady attention is foretold by its past"
    other = list(found.predictors).index("value's norm")
    assert (found.correlation[at] > found.correlation[other] + 0.3).all(), "the value's norm is noise here"
    assert found.recall.min() >= 0
    assert found.recall.max() <= 1


def test_figures_of_a_whole_trace_are_means_over_its_windows(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", windows=3))
    found = study(trace, windows=10)
    assert found.windows == 3
    shares = []
    for window in trace:
        mass = decode_mass(window.mean_code)
        shares += [(mass[n, ..., 0] / mass[n].sum(-1)).numpy() for n in range(2, mass.shape[0])]
    np.testing.assert_allclose(found.first, np.mean(shares, axis=0), rtol=1e-5)
    assert study(trace, windows=1).windows == 1


def test_an_on_policy_trace_is_studied_too(tmp_path: Path) -> None:
    found = study(Trace(write_trace(tmp_path / "trace", windows=1, budget=128)))
    assert np.isfinite(found.recall).all()


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", windows=1, window=64))
    with pytest.raises(KvlearnError, match="windows of 2 blocks have no future"):
        study(trace)
    with pytest.raises(KvlearnError, match="windows is 0"):
        study(trace, windows=0)


def test_the_command_writes_a_page_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "trace", windows=2)
    assert cli.main(["report", str(tmp_path / "trace"), "--windows", "1"]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "trace-report"
    page = (folder / "study.html").read_text("utf-8")
    for part in parts(study(Trace(tmp_path / "trace"), windows=1)):
        assert part.title in page
        assert part.title in printed
    assert not re.search(r"(?:src|href)=\"https?:", page), "the page asks the network for nothing"
    assert len(list(folder.glob("*.png"))) == 5
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.glob("*.png"))
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "neither a trace's folder (trace.json) nor the rows" in capsys.readouterr().err


def test_the_command_makes_the_page_of_rows_again(tmp_path: Path) -> None:
    from fake_rows import fake_rows

    from kvlearn.rows import write_rows

    write_rows(tmp_path / "rows.jsonl", fake_rows(docs=3))
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "report.html").is_file()

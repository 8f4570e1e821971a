"""Opening traces: windows one at a time, damage named, histories replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tracing_helpers import feeds, layout_of, manifest_of, random_windows, tiny_trace

from kvlearn import history
from kvlearn.errors import KvlearnError
from kvlearn.traces import Trace, TraceWriter, collect, replay
from kvlearn.traces import format as trace_format
from kvlearn.traces.collect import pack_bits, parse_budgets, unpack_bits, window_budget
from kvlearn.traces.projection import PROJECTION, write_projection


@pytest.fixture
def sharded(tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five windows, two to a shard."""
    model = tiny_llama()
    monkeypatch.setattr(trace_format, "SHARD_BYTES", 2 * layout_of(model, 96, 8).window_bytes)
    tiny_trace(tmp_path / "t", model, windows=5, policy="ema", budgets="30,50")
    return tmp_path / "t"


def test_windows_come_in_order_from_all_shards(sharded: Path) -> None:
    trace, text = Trace(sharded), list(random_windows(5, 96))
    assert [shard.windows for shard in trace.manifest.shards] == [2, 2, 1]
    assert len(trace) == 5
    for i in (3, 0, 4, 1, 2, -1):
        window = trace.window(i)
        assert window.input_ids.tolist() == text[i].input_ids
        assert (window.domain, window.doc, window.documents) == (text[i].domain, text[i].doc, text[i].documents)
    assert [window.doc for window in trace] == [window.doc for window in text]
    with pytest.raises(IndexError):
        trace.window(5)


def test_shapes_and_what_is_held(sharded: Path) -> None:
    for window in Trace(sharded):
        for vectors in (window.keys, window.values):
            assert vectors.codes.shape == (2, 2, 96, 16)
            assert vectors.codes.dtype == torch.int8
            assert vectors.scale.shape == (2, 2, 96)
            assert vectors.scale.dtype == torch.float16
            assert bool((vectors.codes.abs().amax(-1) == 127).all()), "the scale makes use of the whole byte"
        assert window.layer_vectors().shape == (2, 4, 96, 16)
        assert window.budget in (30, 50)
        assert window.held is not None
        assert window.seen_mean is not None
        for codes in (window.mean_code, window.peak_code, window.seen_mean, window.seen_peak, window.held):
            assert codes is not None
            assert codes.shape == (12, 2, 2, 96)
            for n in range(12):
                assert not codes[n, ..., (n + 1) * 8 :].any()
        held = window.held.sum(-1)
        assert torch.equal(held, torch.arange(8, 97, 8).clamp(max=window.budget).view(12, 1, 1).expand(12, 2, 2))
        gone = ~window.held[:-1] & window.held[1:]
        assert not gone[..., :8].any(), "an evicted token came back"
        assert not window.seen_mean[~window.held].any()


def test_vectors_can_be_read_without_the_rest(sharded: Path) -> None:
    trace = Trace(sharded)
    for i in (4, 0, -2):
        for mine, theirs in zip(trace.vectors(i), (trace.window(i).keys, trace.window(i).values), strict=True):
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scale, theirs.scale)
    with pytest.raises(IndexError):
        trace.vectors(5)


def test_a_manifest_without_a_field_is_refused(sharded: Path) -> None:
    path = sharded / "trace.json"
    text = json.loads(path.read_text())
    del text["policy_sha256"]
    path.write_text(json.dumps(text))
    with pytest.raises(KvlearnError, match="lacks or misnames a field: 'policy_sha256'"):
        Trace(sharded)


def test_a_query_gives_away_all_its_attention(sharded: Path) -> None:
    for window in Trace(sharded):
        assert window.held is not None
        for codes in (window.mean_code, window.seen_mean):
            assert codes is not None
            total = history.decode_mass(codes).sum(-1)  # rounding to codes errs by 2.6% at most
            first = total if codes is window.mean_code else total[:3]  # later tokens take some with them when they go
            assert torch.allclose(first, torch.ones(()), atol=0.03)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), r"data-00001\.arrow is corrupt: it has \d+ bytes"),
        (lambda path: path.unlink(), r"data-00001\.arrow is missing"),
    ],
)
def test_a_damaged_shard_is_named_at_the_door(sharded: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(sharded / "data-00001.arrow")
    with pytest.raises(KvlearnError, match=message):
        Trace(sharded)


def test_the_kind_of_text_is_read_alone(sharded: Path) -> None:
    trace = Trace(sharded)
    assert trace.domains == tuple(window.domain for window in trace)
    (sharded / "data-00001.arrow").write_bytes(bytes((sharded / "data-00001.arrow").stat().st_size))
    with pytest.raises(KvlearnError, match=r"data-00001\.arrow cannot be read"):
        print(Trace(sharded).domains)


def test_the_output_projection_is_kept_beside_the_shards(sharded: Path) -> None:
    assert Trace(sharded).projection is None
    assert Trace(sharded).window(0).projection is None
    projection = torch.randn(2, 2, 16, 16)
    write_projection(sharded, projection)
    assert torch.equal(Trace(sharded).window(3).projection, projection)
    for other, message in ((projection[:1], r"has the shape \(1, 2, 16, 16\)"), (None, "cannot be read")):
        if other is None:
            (sharded / PROJECTION).write_bytes(b"short")
        else:
            write_projection(sharded, other)
        with pytest.raises(KvlearnError, match=message):
            Trace(sharded)


def test_a_flipped_bit_is_found_when_the_shard_is_used(sharded: Path) -> None:
    path = sharded / "data-00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    trace = Trace(sharded)
    assert trace.window(1).doc == "doc1"
    with pytest.raises(KvlearnError, match=r"data-00001\.arrow is corrupt: its sha256"):
        trace.window(2)
    with pytest.raises(KvlearnError, match=r"data-00001\.arrow is corrupt: its sha256"):
        trace.verify()


def test_a_shard_that_is_no_arrow_file_is_named(sharded: Path) -> None:
    trace = Trace(sharded)
    path = sharded / "data-00000.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    trace._verified.add(path.name)
    with pytest.raises(KvlearnError, match=r"data-00000\.arrow cannot be read"):
        trace.window(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has version 99, and this kvlearn reads version 2; trace the text again"),
        ({"version": 1}, "has version 1, and this kvlearn reads version 2; trace the text again"),
        ({"layout": {}}, "lacks or misnames a field"),
        ({"shards": [{"file": "x"}]}, "lacks or misnames a field"),
        ({"complete": False}, "unfinished"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(sharded: Path, change: dict[str, Any], message: str) -> None:
    path = sharded / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KvlearnError, match=message):
        Trace(sharded)


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match=r"is not a trace: it has no trace\.json"):
        Trace(tmp_path)
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(KvlearnError, match=r"trace\.json cannot be read"):
        Trace(tmp_path)


def test_replay_stops_where_it_is_asked_to(sharded: Path) -> None:
    window = Trace(sharded).window(0)
    every = {n: (state, held) for n, state, held in replay(window)}
    assert list(every) == list(range(1, 13))
    for n, state, held in replay(window, [7, 2, 7]):
        assert state.shape == (2, 2, len(history.FIELDS), n * 8)
        assert torch.equal(state, every[n][0])
        assert held is not None
        assert torch.equal(held, every[n][1])
    assert list(replay(window, [])) == []
    for boundary in (0, 13):
        with pytest.raises(KvlearnError, match="boundaries are"):
            next(replay(window, [boundary]))


@given(st.lists(st.booleans(), max_size=70))
def test_bits_survive_packing(bits: list[bool]) -> None:
    mask = torch.tensor(bits, dtype=torch.bool)
    packed = pack_bits(mask)
    assert packed.numel() == -(-len(bits) // 8)
    assert torch.equal(unpack_bits(packed, len(bits)), mask)


@pytest.mark.parametrize(
    ("text", "expected"), [("256", (256, 256, [256])), ("128,512", (128, 512, [128, 512])), ("64-96", (64, 96, []))]
)
def test_budgets(text: str, expected: tuple[int, int, list[int]]) -> None:
    assert parse_budgets(text) == expected
    drawn = [window_budget(text, 3, i) for i in range(200)]
    assert drawn == [window_budget(text, 3, i) for i in range(200)], "a rerun draws the same"
    assert set(drawn) <= set(expected[2] or range(expected[0], expected[1] + 1))
    assert {min(drawn), max(drawn)} == {expected[0], expected[1]}


@pytest.mark.parametrize("text", ["", "many", "0", "128-", "512-128", "1-2-3", "-5", "64,-1"])
def test_nonsense_budgets_are_refused(text: str) -> None:
    with pytest.raises(KvlearnError, match="budget is "):
        parse_budgets(text)


def test_a_hybrid_model_is_traced_in_its_full_attention_layers(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=200,
    )
    model = Gemma3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    layout = trace_format.Layout(layers=(1, 3), heads=1, head_dim=16, window=64, block=8)
    writer = TraceWriter(tmp_path, manifest_of(layout, 1, policy="streaming", budgets="30"))
    collect(random_windows(1, 64), writer, feeds(model, 8))
    window = Trace(tmp_path).window(0)
    assert window.keys.codes.shape == (2, 1, 64, 16)
    assert not torch.equal(window.mean_code[:, 0], window.mean_code[:, 1])

"""``kvlearn bench``: caches in their steady state, clocks and memory, rows, tables and pages. No timing is asserted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_helpers import assert_bounded

import kvlearn
from kvlearn.bench.contenders import FULL, KVPRESS, SAME_SLOTS, Case, Evicting, Prompt, Stock, make
from kvlearn.bench.parts import Clock, peak_bytes
from kvlearn.bench.race import race
from kvlearn.bench.speed import Bench, Group, groups, growth
from kvlearn.errors import KvlearnError
from kvlearn.report.speed import check_speed_row, faster, races, speed_store, targets
from kvlearn.report.speed_growth import growth_png
from kvlearn.report.speed_views import speed_markdown, speed_png, speed_sections, write_speed

CASE = Case(context=300, batch=2)


@pytest.fixture
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def loaded(model: Any) -> Any:
    return SimpleNamespace(model=model, name="tiny", tokenizer=None, context_length=None, fingerprint={})


def row(policy: str, seconds: list[float], **changes: Any) -> dict[str, Any]:
    kind = {"full": "full", "scorer": "learned"}.get(policy, "heuristic")
    race = {"bench": "decode", "model": "tiny", "dtype": "float32", "device": "cpu", "threads": 2, "context": 8192}
    who = {"batch": 8, "policy": policy, "kind": kind, "budget": None if kind == "full" else 512}
    sizes = {"tokens": 8, "steps": 32, "bytes": 100, "peak_bytes": 120, "parts": {"model": 0.1}}
    return {**race, **who, "seconds": seconds, **sizes, **changes}


def test_an_evicting_cache_is_as_a_long_text_leaves_it(model: Any) -> None:
    filled = Evicting(model, "h2o", CASE, 64)
    assert_bounded(filled.cache, 64)
    for layer in filled.cache.evicting_layers():
        assert (layer.seen, layer.length.tolist()) == (300, [300, 300])
        assert layer.pos.sort(-1).values[0, 0].tolist() == [*range(4), *range(240, 300)], "sinks, then the latest"
        assert float(layer.state.abs().sum()) > 0, "nothing was observed"
    with torch.inference_mode():
        for _ in range(70):  # across two blocks
            filled.step()
    assert_bounded(filled.cache, 64)
    assert filled.cache.stats()["length"] == [370, 370]


def test_a_real_long_text_leaves_the_same_sizes(model: Any) -> None:
    filled = Evicting(model, "h2o", CASE, 64)
    cache = kvlearn.EvictingCache(model, "h2o", 64)
    with torch.inference_mode():
        model(torch.randint(200, (2, 300)), **{filled._argument: cache})
        for contender in (filled.cache, cache):
            model(torch.randint(200, (2, 1)), **{filled._argument: contender})
    assert {k: v for k, v in filled.cache.stats().items() if "bytes" in k} == {
        k: v for k, v in cache.stats().items() if "bytes" in k
    }


def test_a_cache_below_its_budget_begins_anew_with_every_turn(model: Any) -> None:
    filling = Evicting(model, "streaming", Case(50, 1), 128)
    assert filling.growing
    for _ in range(2):
        with filling.turn(), torch.inference_mode():
            assert filling.cache.get_seq_length() == 50
            filling.step()


def test_the_stock_cache_has_the_same_length_in_every_turn(model: Any) -> None:
    for name, budget, length in ((FULL, None, 300), (SAME_SLOTS, 64, 64)):
        stock = make(model, name, CASE, budget, 32)
        for _ in range(2):
            with stock.turn(), torch.inference_mode():
                assert stock.cache.get_seq_length() == length
                stock.step()
                assert stock.bytes == (length + 1) * 2 * 2 * 2 * 2 * 16 * 4, "layers, K and V, rows, heads, dim, bytes"


def test_a_prompt_is_read_anew_with_every_step(model: Any) -> None:
    for spec, budget in ((FULL, None), ("h2o", 64)):
        prompt = Prompt(model, spec, CASE, budget)
        with torch.inference_mode():
            prompt.step()
            prompt.step()
        assert prompt.cache.get_seq_length() == 300
        assert prompt.bytes > 0


def test_time_belongs_to_the_innermost_part() -> None:
    class Work:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            time.sleep(0)

    work, clock = Work(), Clock()
    with clock.watch([(Work, "outer", "score"), (work, "inner", "select")]), clock.part("model"):
        work.outer()
    assert all(clock.seconds[part] > 0 for part in ("model", "score", "select"))
    assert "inner" not in vars(work)
    assert "timed" not in Work.outer.__qualname__
    before = dict(clock.seconds)
    work.outer()
    assert clock.seconds == before, "it is not watched any more"


def test_every_part_of_a_learned_step_is_seen(model: Any) -> None:
    contender = Evicting(model, "h2o", CASE, 64)
    (result,) = race([contender], rounds=1, turn_seconds=0.0, block=32)
    for part in ("model", "attention", "observe", "score", "select", "replace", "bookkeeping"):
        assert result.parts[part] > 0, part


def test_peak_memory_is_that_of_the_allocator() -> None:
    def run() -> None:
        first = torch.empty(1000)
        del first
        torch.empty(500)

    assert peak_bytes(run, torch.device("cpu")) == 4000


def test_rounds_are_interleaved_and_rotate(model: Any) -> None:
    turns: list[str] = []
    contenders = [Stock(model, name, Case(20, 1), None) for name in ("a", "b", "c")]
    race(contenders, rounds=3, turn_seconds=0.0, block=4, notify=lambda who, _done, _total: turns.append(who))
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_a_bench_writes_rows_once(model: Any, tmp_path: Path) -> None:
    wanted = groups([40, 100], [1], [64], ["full", "streaming", "stock-at-budget"])
    with speed_store(tmp_path) as store:
        Bench(loaded(model), store, rounds=2, turn_seconds=0.0, block=8).decode(wanted)
        Bench(loaded(model), store, rounds=2, turn_seconds=0.0, block=8).prefill(groups([40], [2], [32], ["h2o"]))
        assert len(store) == 8
        first = list(store.rows)
    lines = (tmp_path / "speed.jsonl").read_text().splitlines()
    assert [check_speed_row(json.loads(line))["policy"] for line in lines] == [r["policy"] for r in first]
    with speed_store(tmp_path) as store:
        Bench(loaded(model), store, rounds=2, turn_seconds=0.0, block=8).decode(wanted)
        assert store.rows == first, "a race that was run is run no more"


def test_mistakes_are_told_before_anything_is_run(model: Any, tmp_path: Path) -> None:
    for lists in (([], [1], [64]), ([8, 8], [1], [64]), ([8], [0], [64])):
        with pytest.raises(KvlearnError):
            groups(*lists, ["full"])
    with speed_store(tmp_path) as store:
        bench = Bench(loaded(model), store)
        for policies, budget, message in ((["zzz"], 64, "unknown policy"), (["h2o"], 5, "raise the budget")):
            with pytest.raises(KvlearnError, match=message):
                bench.decode(groups([100], [1], [budget], policies))
        with pytest.raises(KvlearnError, match="no part in bench prefill"):
            bench.prefill(groups([100], [1], [64], ["stock-at-budget"]))
        with pytest.raises(KvlearnError, match="rounds is 0"):
            Bench(loaded(model), store, rounds=0)
        assert len(store) == 0


def test_kvpress_is_refused_where_it_is_not(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlearn.bench.speed.has_kvpress", lambda: False)
    with speed_store(tmp_path) as store, pytest.raises(KvlearnError, match="needs the package kvpress"):
        Bench(loaded(model), store).decode(groups([300], [1], [128], [KVPRESS]))


def test_kvpress_holds_no_more_than_the_budget(model: Any) -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed")
    pressed = make(model, KVPRESS, CASE, 96, 32)
    with torch.inference_mode():
        for _ in range(2):
            with pressed.turn():
                for _ in range(pressed.period):
                    pressed.step()
                    assert pressed.cache.get_seq_length() <= 96
            assert pressed.cache.get_seq_length() == 64, "it was cut"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bench": "dance"}, "'bench'"),
        ({"policy": ""}, "'policy'"),
        ({"threads": 0}, "'threads'"),
        ({"seconds": []}, "'seconds'"),
        ({"seconds": [0.1, -1.0]}, "'seconds'"),
    ],
)
def test_a_bad_row_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        check_speed_row(row("full", [0.1]) | change)


def test_ratios_are_taken_within_rounds() -> None:
    slow, quick = row("full", [1.0, 9.0, 2.0]), row("scorer", [0.1, 0.3, 0.1])
    assert faster(quick, slow) == pytest.approx(20.0)  # of 10, 30 and 20; the ratio of medians would be 20 too
    assert faster(row("h2o", [0.5, 0.3, 1.0]), slow) == pytest.approx(2.0)
    ((base, line),) = races([quick, slow])
    assert (base.row["policy"], line.speedup, line.smaller) == ("full", pytest.approx(20.0), 1.0)
    assert line.tokens_per_s == pytest.approx(80.0)


def test_targets_are_judged_by_the_race_they_belong_to() -> None:
    rows = [row("full", [1.0], bytes=1500), row("scorer", [0.125]), row("streaming", [0.12])]
    found = {target.what.split(": ")[1]: target for target in targets(rows)}
    assert found["tokens/s, learned / full"].met
    assert found["bytes, full / learned"].met
    assert not found["tokens/s, learned / streaming"].met, "4 percent slower"
    young = [row("full", [1.0], context=256), row("scorer", [1.02], context=256)]
    assert [target.met for target in targets(young)] == [True]
    trace = {"bench": "trace", "budget": None}
    traced = [row("plain forward", [1.0], kind="full", **trace), row("tracing", [1.5], **trace)]
    assert [target.met for target in targets(traced)] == [False]


def test_all_views_hold_the_numbers(tmp_path: Path) -> None:
    rows = [row("full", [1.0, 1.1], bytes=2**21), row("a/<b>", [0.25, 0.26], bytes=2**20)]
    rows += [row("full", [0.5], context=512), row("a/<b>", [0.2], context=512)]
    text = speed_markdown(rows)
    assert "| <b> | 512 | 31 | 255 [250, 260] | 4.12x | 1.0 MiB | 2.00x |" in text
    files = write_speed(rows, tmp_path, ["kvlearn bench decode"])
    assert [file.name for file in files] == ["report.html", "speed.md", "speed.png"]
    page = files[0].read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split('id="data"')[0].replace("<body>", "")
    assert "kvlearn bench decode" in page
    assert speed_png(rows).startswith(b"\x89PNG")
    assert speed_sections(tmp_path) == []
    with pytest.raises(KvlearnError, match="no decode rows"):
        growth_png(tmp_path, 512, 1e10)
    with speed_store(tmp_path) as store:
        store.append(*rows)
    assert [section.title for section in speed_sections(tmp_path)] == ["Speed and memory"]
    assert growth_png(tmp_path, 512, 1e10).startswith(b"\x89PNG")


def test_rows_say_what_a_step_must_move(model: Any, tmp_path: Path) -> None:
    with speed_store(tmp_path) as store:
        bench = Bench(loaded(model), store, rounds=1, turn_seconds=0.0, block=8)
        bench.decode([Group(Case(300, 2), (64,), ("full", "streaming"))])
        moved = {row["policy"]: row["moved"] for row in store.rows}
    slot = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, dim, bytes
    assert moved["full"] - moved["streaming"] == 2 * (300 - 64) * slot


def test_growth_covers_contexts_and_rows() -> None:
    cases = [(group.case.context, group.case.batch) for group in growth("scorer", 2048, 4, 256)]
    assert cases == [(512, 1), (1024, 1), (2048, 1), (2048, 2), (2048, 4)]


def test_a_prompt_may_take_half_as_long_again() -> None:
    prompt = {"bench": "prefill", "context": 2048}
    rows = [row("full", [1.0], **prompt), row("scorer", [1.4], **prompt)]
    assert [target.met for target in targets(rows)] == [True]

"""Presses of kvpress and kvlearn's policies keep the same tokens, whichever of the two runs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_helpers import feed, prompt, scorer
from torch import Tensor
from transformers import DynamicCache

import kvlearn
from kvlearn.compare import Comparison, Settings
from kvlearn.errors import KvlearnError
from kvlearn.kvpress import press as press_of
from kvlearn.policies import resolve
from kvlearn.policies.kvpress_decoding import KVPressDecoding
from kvlearn.rows import RowStore
from kvlearn.shapes import Budget, Protection
from kvlearn.tasks.base import Case

kvpress = pytest.importorskip("kvpress", reason="kvpress asks for transformers below 5.3")

TOKENS, BUDGET, BLOCK = 120, 48, 8
NONE = Protection(sinks=0, recent=0)  # presses protect what they like


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def kept_by_kvpress(model: Any, press: Any, ids: Tensor) -> list[list[list[int]]]:
    """Positions that a press keeps of a prompt, by layer and head; told by the values, which are all different."""
    whole, cut = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=whole)
        with press(model):
            model(ids, past_key_values=cut)
    found = []
    for layer in range(len(whole.layers)):
        same = (cut.layers[layer].keys[0][:, :, None] == whole.layers[layer].keys[0][:, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        found.append([sorted(head) for head in same.int().argmax(-1).tolist()])
    return found


def kept_by_kvlearn(model: Any, policy: Any, ids: Tensor, budget: int, protect: Protection) -> list[list[list[int]]]:
    cache = kvlearn.EvictingCache(model, policy, budget, block=BLOCK, protect=protect)
    feed(model, cache, ids, [ids.shape[1]])
    return [[sorted(head) for head in cache.positions(layer)[0].tolist()] for layer in cache.managed]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SnapKVPress", "window_size=16"),
        ("SnapKVPress", "window_size=20+kernel_size=3"),
        ("KnormPress", ""),
        ("KeyDiffPress", ""),
        ("TOVAPress", ""),
        ("StreamingLLMPress", ""),
        ("LagKVPress", "lag_size=16"),
        ("CURPress", ""),
    ],
)
def test_the_adapter_keeps_what_kvpress_keeps(model: Any, name: str, options: str) -> None:
    from kvlearn.policies.kvpress import make_press

    ids = prompt(TOKENS)
    press = make_press(name, options)
    press.compression_ratio = 1 - BUDGET / TOKENS
    typed = f"kvpress:{name}" + (f":options={options}" if options else "")
    assert resolve(typed).label == typed
    assert kept_by_kvlearn(model, typed, ids, BUDGET, NONE) == kept_by_kvpress(model, press, ids)


def test_rows_of_different_length_are_scored_as_if_alone(model: Any) -> None:
    ids, short = prompt(80), prompt(60, seed=1)
    padded = torch.cat([ids, torch.cat([torch.zeros(1, 20, dtype=torch.int64), short], 1)])
    mask = (torch.arange(80) >= torch.tensor([[0], [20]])).long()
    cache = kvlearn.EvictingCache(model, "kvpress:SnapKVPress:options=window_size=16", BUDGET, block=BLOCK)
    feed(model, cache, padded, [70, *[1] * 10], mask)
    for row, alone in enumerate((ids, short)):
        own = kvlearn.EvictingCache(model, "kvpress:SnapKVPress:options=window_size=16", BUDGET, block=BLOCK)
        feed(model, own, alone, [alone.shape[1] - 10, *[1] * 10])
        for layer in own.managed:
            expected = [sorted(head) for head in own.positions(layer)[0].tolist()]
            assert [sorted(head) for head in cache.positions(layer)[row].tolist()] == expected


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keynorm", "learned"])
def test_a_policy_is_a_press(model: Any, name: str) -> None:
    ids = prompt(TOKENS)
    policy = resolve(scorer(model)) if name == "learned" else name
    press = press_of(policy, 1 - (BUDGET + 0.5) / TOKENS, block=BLOCK)
    ours = kept_by_kvlearn(model, policy, ids, BUDGET, Protection(sinks=4, recent=BLOCK))
    assert kept_by_kvpress(model, press, ids) == ours


def test_a_policy_as_a_press_serves_prompts_alone(model: Any) -> None:
    press = kvpress.DecodingPress(press_of("h2o"), compression_interval=2, target_size=16)
    with pytest.raises(KvlearnError, match="sees 2 of 22 tokens"), press(model):
        feed(model, DynamicCache(), prompt(22), [20, 1, 1])


# ---- DecodingPress -------------------------------------------------------------------------------------------------

FIRST = 40


def step_by_step(model: Any, name: str, ids: Tensor, budget: int, block: int) -> tuple[Tensor, Any]:
    """kvpress itself: one token at a time through DecodingPress over transformers' own cache."""
    base = getattr(kvpress, name)()
    if hasattr(base, "window_size"):
        base.window_size = block - 1
    cache = DynamicCache()
    logits = []
    eager = name == "ObservedAttentionPress"
    model.set_attn_implementation("eager" if eager else "sdpa")
    try:
        with torch.no_grad(), kvpress.DecodingPress(base, compression_interval=block, target_size=budget)(model):
            logits.append(model(ids[:, :FIRST], past_key_values=cache).logits)
            for i in range(FIRST, ids.shape[1]):
                at = torch.tensor([i])
                out = model(ids[:, i : i + 1], past_key_values=cache, cache_position=at, position_ids=at[None])
                logits.append(out.logits)
    finally:
        kvlearn.enable(model)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize(
    "calls", [[FIRST, *[8] * 9, 6], [FIRST, 5, 3, 8, 1, 7, *[8] * 6, *[1] * 6]], ids=["blocks", "pieces"]
)
@pytest.mark.parametrize(
    "name", ["SnapKVPress", "TOVAPress", "KnormPress", "ObservedAttentionPress", "ExpectedAttentionPress"]
)
def test_blocks_mean_what_single_steps_would(model: Any, name: str, calls: list[int]) -> None:
    ids = prompt(118)
    expected, theirs = step_by_step(model, name, ids, 40, 8)
    cache = KVPressDecoding(name).open_cache(model, Budget.resolve(40, 8, NONE))
    ours = feed(model, cache, ids[:, : sum(calls)], calls)
    torch.testing.assert_close(ours, expected[:, : ours.shape[1]], atol=2e-5, rtol=0)
    for layer in range(len(cache.layers)):
        if ours.shape[1] == expected.shape[1]:
            torch.testing.assert_close(cache.layers[layer].keys, theirs.layers[layer].keys, atol=2e-5, rtol=0)
    assert cache.stats()["slots"] == 48
    assert cache.get_seq_length() == sum(calls)


def test_a_long_prompt_is_cut_as_prefill_decoding_press_cuts_it(model: Any) -> None:
    ids = prompt(118)
    base = kvpress.KnormPress(1 - 40.5 / 100)
    both = kvpress.PrefillDecodingPress(base, kvpress.DecodingPress(kvpress.KnormPress(), 8, 40))
    theirs = DynamicCache()
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad(), both(model):
            expected = [model(ids[:, :100], past_key_values=theirs).logits]
            for i in range(100, 118):
                at = torch.tensor([i])
                out = model(ids[:, i : i + 1], past_key_values=theirs, cache_position=at, position_ids=at[None])
                expected.append(out.logits)
    finally:
        kvlearn.enable(model)
    cache = KVPressDecoding("KnormPress").open_cache(model, Budget.resolve(40, 8, NONE))
    ours = feed(model, cache, ids, [100, 8, 8, 2])
    torch.testing.assert_close(ours, torch.cat(expected, dim=1), atol=2e-5, rtol=0)


def test_hard_keeps_within_the_budget_and_other_caches_go_on(model: Any) -> None:
    ids = prompt(118)
    cache = KVPressDecoding("KnormPress", hard=True).open_cache(model, Budget.resolve(40, 8, NONE))
    feed(model, cache, ids[:, :32], [32])
    feed(model, cache, ids[:, 32:], [8] * 10 + [6])
    assert cache.stats()["slots"] == 40
    plain = DynamicCache()
    feed(model, plain, ids, [118])
    assert plain.get_seq_length() == 118


def test_a_comparison_runs_presses_both_ways(model: Any, tmp_path: Any) -> None:
    names = ["full", "kvpress:KnormPress", "kvpress-decoding:KnormPress", "kvpress-decoding:KnormPress:hard=true"]
    settings = Settings(policies=names, budgets=(40,), window=118, batch=2, block=8, protect=Protection(sinks=2))
    cases = [Case(f"doc{i}", "made-up", prompt(118, seed=i)[0]) for i in range(2)]
    loaded: Any = SimpleNamespace(model=model, tokenizer=None, name="tiny")
    with RowStore(tmp_path / "rows.jsonl") as store:
        Comparison(loaded, settings, {"lm": cases}, store).run()
        rows = {row["policy"]: row for row in store.rows if row["metric"] == "nll" and row["doc"] == "doc0"}
    assert not [row["error"] for row in rows.values() if row.get("error")]
    assert [rows[name]["slots"] for name in names] == [118, 40, 48, 40]
    assert rows[names[0]]["value"] != rows[names[1]]["value"] != rows[names[2]]["value"]
    assert "kept" in rows["kvpress:KnormPress"]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("kvpress", "no scorer press ''; it has CURPress"),
        ("kvpress:SnapPress", "no scorer press 'SnapPress'"),
        ("kvpress:AdaKVPress", "no scorer press 'AdaKVPress'"),
        ("kvpress:SnapKVPress:options=window=3", "no option 'window'; it has window_size, kernel_size"),
        ("kvpress:ObservedAttentionPress", "reads the attention of every query"),
        ("kvpress-decoding:None", "no scorer press"),
    ],
)
def test_bad_names_are_one_clear_sentence(typed: str, message: str) -> None:
    with pytest.raises(KvlearnError, match=message.replace("'", ".")):
        resolve(typed)


def test_an_evicting_cache_does_not_run_decoding_press(model: Any) -> None:
    with nullcontext(), pytest.raises(KvlearnError, match="brings a cache of its own"):
        kvlearn.EvictingCache(model, "kvpress-decoding:KnormPress", BUDGET, block=BLOCK)

"""Faults that users of other cache-eviction software met, each as an input with the right answer.

``test_case_NN_...`` is case NN of the list in README.md beside this file, which says what each case is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cache_helpers import (
    ALL,
    BLOCK,
    EVICTING,
    NO_RECORDING,
    assert_bounded,
    assert_same,
    feed,
    generate,
    held,
    left_pad,
    permute_slots,
    policy,
    prompt,
    snapshot,
)
from torch import Tensor
from transformers import DynamicCache

import kvlearn
from kvlearn import history
from kvlearn.attention import cache_argument
from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.policies.oracle import FutureRecorder

BUDGET = 16

every_policy = pytest.mark.parametrize("name", ALL)
every_evicting = pytest.mark.parametrize("name", EVICTING)
every_unaided = pytest.mark.parametrize("name", NO_RECORDING)


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


@pytest.fixture(scope="module")
def stock(tiny_llama: Callable[..., Any]) -> Any:
    """The same model, never touched by kvlearn."""
    return tiny_llama()


def make(model: Any, name: str, budget: int = BUDGET, future: tuple[Any, ...] = (), **options: Any) -> Any:
    """A cache; ``future`` is what the oracle is told: tokens and their mask."""
    return kvlearn.EvictingCache(model, policy(name, model, *future), budget, **{"block": BLOCK, **options})


# ---- 1 to 3: the same answers as the stock cache, alone and in a batch ---------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@every_policy
def test_case_01_a_budget_beyond_the_length_equals_the_stock_cache(
    model: Any, stock: Any, name: str, sampled: bool
) -> None:
    ids, results = prompt(40), []
    for one, cache in ((model, make(model, name, 96, (prompt(50),))), (stock, None)):
        torch.manual_seed(3)
        results.append(generate(one, ids, 24, cache, do_sample=sampled))
    assert_same(*results)


def test_case_01_no_budget_equals_the_stock_cache(model: Any, stock: Any) -> None:
    ids = prompt(40)
    assert_same(generate(model, ids, 24, kvlearn.EvictingCache(model, "full")), generate(stock, ids, 24))


@pytest.mark.parametrize("lengths", [(20, 40), (9, 23)], ids=["above the budget", "one below the budget"])
@every_policy
def test_case_02_rows_of_a_padded_batch_equal_each_row_alone(model: Any, name: str, lengths: tuple[int, int]) -> None:
    rows = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    budget, new = BUDGET if name != "full" else 100, 60 if lengths == (20, 40) else 20

    def run(ids: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        to_come = prompt(new, seed=9).expand(len(ids), -1)
        future = (torch.cat([ids, to_come], 1), torch.cat([mask, torch.ones_like(to_come)], 1))
        cache = make(model, name, budget, future)
        return generate(model, ids, new, cache, mask).sequences[:, -new:], cache

    tokens, cache = run(*left_pad(*rows))
    seen = [length + new - 1 for length in lengths]  # the last new token is not fed
    for i, row in enumerate(rows):
        alone, _ = run(row, torch.ones_like(row))
        assert tokens[i].tolist() == alone[0].tolist(), f"row {i} depends on its padding or its batch"
        for layer in held(cache):
            for head in layer[i]:
                assert len(head) == min(budget, seen[i]), "a pad slot is held, or a token was lost to one"
                assert max(head) == seen[i] - 1
    assert cache.stats()["length"] == seen


@every_evicting
def test_case_02_no_pad_slot_is_held_at_any_step(model: Any, name: str) -> None:
    ids, mask = left_pad(prompt(5, seed=1), prompt(30, seed=2))
    ids = torch.cat([ids, prompt(20, seed=3).expand(2, -1)], 1)
    mask = torch.cat([mask, torch.ones(2, 20, dtype=torch.int64)], 1)
    cache = make(model, name, BUDGET, (ids, mask))
    for end, count in zip(range(30, 51), [30, *[1] * 20], strict=True):
        feed(model, cache, ids[:, end - count : end], [count], mask)
        lengths = mask[:, :end].sum(-1).tolist()
        for layer in held(cache):
            for row, length in zip(layer, lengths, strict=True):
                assert all(head <= set(range(length)) and len(head) == min(BUDGET, length) for head in row)


@every_unaided
def test_case_03_prompts_in_one_batch_do_not_touch(model: Any, name: str) -> None:
    ids = prompt(30, batch=2)
    batch = make(model, name)
    tokens = generate(model, ids, 30, batch).sequences
    for i in range(2):
        alone = make(model, name)
        assert tokens[i].tolist() == generate(model, ids[i : i + 1], 30, alone).sequences[0].tolist()
        assert [layer[i] for layer in held(batch)] == [layer[0] for layer in held(alone)]


# ---- 4 to 7: the bound, what is protected, and odd scores ----------------------------------------------------------


def test_case_04_sinks_and_recent_tokens_have_no_hole(model: Any) -> None:
    ids = prompt(1010)
    cache = make(model, "streaming")
    feed(model, cache, ids[:, :10], [10])
    for length in range(11, 1011):
        feed(model, cache, ids[:, length - 1 : length], [1])
        recent = set(range(max(0, length - (BUDGET - 4)), length))
        expected = {0, 1, 2, 3} | (recent if length >= BUDGET else set(range(length)))
        assert all(head == expected for layer in held(cache) for row in layer for head in row), length


@every_evicting
def test_case_05_the_bound_holds_after_every_step(model: Any, name: str) -> None:
    ids, mask = left_pad(prompt(12, seed=1), prompt(30, seed=2))
    ids = torch.cat([ids, prompt(200, seed=3).expand(2, -1)], 1)
    mask = torch.cat([mask, torch.ones(2, 200, dtype=torch.int64)], 1)
    cache = make(model, name, BUDGET, (ids, mask))
    feed(model, cache, ids[:, :30], [30], mask)
    assert_bounded(cache, BUDGET)
    for at in range(30, 230):
        feed(model, cache, ids[:, at : at + 1], [1], mask)
        assert_bounded(cache, BUDGET)
    assert cache.stats()["slots"] == BUDGET


def test_case_05_full_never_evicts_but_says_that_it_would_have_to(model: Any) -> None:
    with pytest.raises(KvlearnError, match="evicts nothing"):
        generate(model, prompt(12), 20, make(model, "full"))


@pytest.mark.parametrize("length", [1, 2, BUDGET - 1, BUDGET, BUDGET + 1])
@every_evicting
def test_case_06_nothing_is_lost_before_the_budget_is_full(model: Any, name: str, length: int) -> None:
    ids = prompt(length + 20)
    cache = make(model, name, BUDGET, (ids,))
    for end, count in zip(range(length, length + 21), [length, *[1] * 20], strict=True):
        feed(model, cache, ids[:, end - count : end], [count])
        for layer in held(cache):
            for head in layer[0]:
                assert len(head) == min(end, BUDGET), "the cache was emptied, or lost a token it had room for"
                assert head == set(range(end)) or end > BUDGET


@dataclass
class Constant(Policy):
    """The same score for every slot."""

    value: float

    name = "constant"
    summary = paper = "for tests"

    def score(self, slots: Slots) -> Tensor:
        return torch.full(slots.pos.shape, self.value)


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf])
def test_case_07_equal_scores_evict_the_older_token_and_nothing_protected(model: Any, value: float) -> None:
    ids = prompt(60)
    runs = []
    for permuted in (False, False, True):
        cache = kvlearn.EvictingCache(model, Constant(value), BUDGET, block=BLOCK)
        for end in range(1, 61):
            feed(model, cache, ids[:, end - 1 : end], [1])
            if permuted:
                permute_slots(cache, seed=end)
        runs.append(held(cache))
    assert runs[0] == runs[1] == runs[2], "ties are not broken the same way every time"
    assert all(head == {0, 1, 2, 3, *range(48, 60)} for layer in runs[0] for row in layer for head in row)


def test_case_07_nan_in_one_score_is_an_error(model: Any) -> None:
    @dataclass
    class OneNan(Constant):
        def score(self, slots: Slots) -> Tensor:
            return super().score(slots).masked_fill(slots.pos == 7, torch.nan)

    with pytest.raises(KvlearnError, match="NaN as a score"):
        feed(model, kvlearn.EvictingCache(model, OneNan(0.0), BUDGET, block=BLOCK), prompt(30), [30])
    cache = kvlearn.EvictingCache(model, OneNan(0.0), BUDGET, block=BLOCK)
    with pytest.raises(KvlearnError, match="NaN as a score"):
        feed(model, cache, prompt(30), [1] * 30)


# ---- 8: grouped heads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_case_08_three_query_heads_share_one_kv_head(tiny_llama: Callable[..., Any], reduce: Any) -> None:
    model = kvlearn.enable(tiny_llama(heads=6, kv_heads=2))
    recorder = FutureRecorder()
    ids = prompt(12)
    cache = kvlearn.EvictingCache(model, "ema", BUDGET, block=BLOCK, group_reduce=reduce, recorder=recorder)
    feed(model, cache, ids, [12])
    layer = cache.evicting_layers()[0]
    assert layer.keys.shape == (1, 2, BUDGET, 16)
    assert cache.stats()["kv_bytes"] == 2 * 2 * 2 * BUDGET * 16 * 4  # layers, keys and values, KV heads, ..., float32

    eager = tiny_llama(heads=6, kv_heads=2, attention="eager")
    with torch.no_grad():
        attention = eager(ids, output_attentions=True).attentions
    for index, weights in enumerate(attention):
        grouped = weights.view(1, 2, 3, 12, 12)
        grouped = grouped.mean(2) if reduce == "mean" else grouped.amax(2)
        blocks = grouped.view(1, 2, 3, BLOCK, 12)  # three blocks of four queries
        (seen,) = recorder.observed[index]
        for codes, mass in ((seen.mean_code, blocks.mean(3)), (seen.peak_code, blocks.amax(3))):
            expected = history.encode_mass(mass.permute(2, 0, 1, 3)).int()
            assert (codes.int() - expected).abs().max() <= 1  # a mass on the border between two codes


# ---- 9 and 10: turns and interleaved requests ----------------------------------------------------------------------


@every_unaided
def test_case_09_a_second_turn_equals_the_dialogue_fed_by_hand(model: Any, name: str) -> None:
    first, second = prompt(30, seed=1), prompt(25, seed=2)
    cache = make(model, name)
    so_far = generate(model, first, 12, cache).sequences
    dialogue = torch.cat([so_far, second], 1)
    tokens = generate(model, dialogue, 12, cache).sequences
    assert_bounded(cache, BUDGET)
    assert cache.stats()["length"] == [30 + 12 + 25 + 11]

    by_hand = make(model, name)
    calls = [30, *[1] * 11, 26, *[1] * 11]  # the last token of the first answer comes with the second turn
    logits = feed(model, by_hand, tokens[:, :-1], calls)
    assert logits[0, 66:].argmax(-1).tolist() == tokens[0, 67:].tolist()
    assert held(by_hand) == held(cache)


@every_unaided
def test_case_10_interleaved_requests_do_not_touch(model: Any, name: str) -> None:
    rows = [prompt(50, seed=1), prompt(50, seed=2)]
    together = [make(model, name), make(model, name)]
    logits: list[list[Tensor]] = [[], []]
    for start, count in zip([0, *range(24, 50)], [24, *[1] * 26], strict=True):
        for i in range(2):
            logits[i].append(feed(model, together[i], rows[i][:, start : start + count], [count]))
    for i in range(2):
        alone = make(model, name)
        assert torch.equal(torch.cat(logits[i], 1), feed(model, alone, rows[i], [24, *[1] * 26]))
        assert held(alone) == held(together[i])


# ---- 11 and 12: beams, several answers, chunks ---------------------------------------------------------------------

BEAMS = {
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", BEAMS)
@every_policy
def test_case_11_beams_and_samples_with_room_equal_the_stock_cache(
    model: Any, stock: Any, name: str, mode: str
) -> None:
    ids, results = prompt(20), []
    for one, cache in ((model, make(model, name, 96, (prompt(50),))), (stock, None)):
        torch.manual_seed(5)
        results.append(generate(one, ids, 16, cache, **BEAMS[mode]))
    assert_same(*results)


@every_unaided
def test_case_11_all_state_follows_its_row_slot_by_slot(model: Any, name: str) -> None:
    cache = make(model, name)
    feed(model, cache, prompt(43, batch=3), [30, *[1] * 13])  # one query into a block: kept queries are state too
    moves: list[tuple[Callable[[], None], list[int]]] = [
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda: cache.batch_select_indices(torch.tensor([5, 0])), [5, 0]),
    ]
    for move, rows in moves:
        before = snapshot(cache)
        move()
        after = snapshot(cache)
        assert before.keys() == after.keys()
        for key, tensor in after.items():
            assert torch.equal(tensor, before[key][rows]), f"{key} did not follow its row"


@every_unaided
def test_case_11_beams_under_a_small_budget_score_as_each_sequence_alone(model: Any, name: str) -> None:
    ids = prompt(20)
    result = generate(
        model, ids, 24, make(model, name), num_beams=3, num_return_sequences=3, length_penalty=0.0, output_scores=True
    )
    for sequence, score in zip(result.sequences, result.sequences_scores, strict=True):
        logits = feed(model, make(model, name), sequence[None, :-1], [20, *[1] * 23])
        chosen = logits[0, 19:].log_softmax(-1).gather(-1, sequence[20:, None])
        torch.testing.assert_close(chosen.sum(), score, atol=2e-3, rtol=0)


@every_evicting
def test_case_12_the_bound_holds_during_a_prefill_in_chunks(model: Any, name: str) -> None:
    ids = prompt(100)
    cache = make(model, name, 32, (torch.cat([ids, prompt(8, seed=1)], 1),))
    lengths = []

    def after_every_call(*_: Any) -> None:
        assert_bounded(cache, 32)
        lengths.append(cache.get_seq_length())

    hook = model.register_forward_hook(after_every_call)
    try:
        generate(model, ids, 4, cache, prefill_chunk_size=16)
    finally:
        hook.remove()
    assert lengths == [16, 32, 48, 64, 80, 96, 100, 101, 102, 103]


@every_policy
def test_case_12_chunks_with_room_equal_the_stock_cache(model: Any, stock: Any, name: str) -> None:
    ids, results = prompt(100), []
    for one, cache in ((model, make(model, name, 128, (prompt(50),))), (stock, DynamicCache(config=stock.config))):
        results.append(generate(one, ids, 8, cache, prefill_chunk_size=16))
    assert_same(*results)


# ---- 15, 17, 18: positions, layout, dense attention over what is left ----------------------------------------------


@every_unaided
def test_case_15_a_loop_without_position_ids_equals_generate(model: Any, name: str) -> None:
    ids = prompt(30)
    expected = generate(model, ids, 30, make(model, name))
    cache, call, logits = make(model, name), ids, []
    for _ in range(30):
        with torch.no_grad():
            logits.append(model(call, **{cache_argument(model): cache}).logits[:, -1])
        call = logits[-1].argmax(-1, keepdim=True)
    for ours, theirs in zip(logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@every_unaided
def test_case_17_the_layout_of_slots_does_not_matter(model: Any, name: str) -> None:
    ids = prompt(70, batch=2)
    caches = [make(model, name), make(model, name)]
    start = 0
    for count in [8, *[1] * 16, 4, 30, *[1] * 12]:
        outputs = [feed(model, cache, ids[:, start : start + count], [count]) for cache in caches]
        start += count
        torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=0)
        assert held(caches[0]) == held(caches[1])
        permute_slots(caches[1], seed=start)


@dataclass
class Chosen(Policy):
    """Evicts the positions that a test names, whatever they receive."""

    gone: frozenset[int]

    name = "chosen"
    summary = paper = "for tests"

    def score(self, slots: Slots) -> Tensor:
        gone = torch.isin(slots.pos, torch.tensor(sorted(self.gone), dtype=torch.int32))
        return torch.where(gone, 0.0, 1.0)


@pytest.mark.parametrize("gone", [range(24), range(10, 34)], ids=["a prefix", "a middle"])
def test_case_18_eviction_by_hand_equals_dense_attention_over_what_is_left(
    tiny_llama: Callable[..., Any], gone: range
) -> None:
    model, stock = kvlearn.enable(tiny_llama(layers=1)), tiny_llama(layers=1)
    ids = prompt(41)
    cache = kvlearn.EvictingCache(
        model, Chosen(frozenset(gone)), BUDGET, block=4, protect=kvlearn.Protection(sinks=0, recent=0)
    )
    feed(model, cache, ids[:, :40], [40])
    kept = [p for p in range(40) if p not in gone]
    assert all(head == set(kept) for row in held(cache)[0] for head in row)
    # One layer's keys depend on their own token alone, so what is left can be fed as a text of its own.
    cache.evicting_layers()[0].config.policy.gone = frozenset(kept[:4])  # type: ignore[attr-defined]  # Chosen has it
    logits = feed(model, cache, ids[:, 40:], [1])[0, -1]
    left = [*kept[1:], 40]
    with torch.no_grad():
        dense = stock(ids[:, left], position_ids=torch.tensor([left])).logits[0, -1]
    torch.testing.assert_close(logits, dense, atol=1e-5, rtol=0)


# ---- 21 and 22: memory, measured -----------------------------------------------------------------------------------


def allocated(run: Callable[[], Any]) -> tuple[Any, int]:
    """What ``run`` returns, and the bytes by which PyTorch's allocator holds more after it."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = run()
    return kept, sum(event.self_cpu_memory_usage for event in profile.function_events)


def forget(_: Any) -> None:
    """Nothing of it is kept."""


@every_policy
def test_case_22_reported_bytes_are_what_the_allocator_holds(tiny_llama: Callable[..., Any], name: str) -> None:
    model = kvlearn.enable(tiny_llama(layers=1))
    ids, budget = prompt(27), 32 if name == "full" else BUDGET
    made = policy(name, model, ids)

    def run() -> Any:
        cache = kvlearn.EvictingCache(model, made, budget, block=BLOCK)
        feed(model, cache, ids, [22, *[1] * 5])
        return cache

    run()  # the model and the scorer allocate what they keep when they are first used
    made.bind = lambda _: None  # type: ignore[method-assign]  # would have the scorer prepare its weights once more
    cache, measured = allocated(run)
    stats = cache.stats()
    assert stats["bytes"] == stats["kv_bytes"] + stats["state_bytes"] + stats["other_bytes"] == measured
    stock = DynamicCache(config=model.config)
    _, whole = allocated(lambda: forget(feed(model, stock, ids, [27])))
    assert stats["full_bytes"] == whole, "the denominator is not what the stock cache takes"
    assert stats["compression"] == whole / measured


@pytest.mark.model
def test_case_21_a_long_prompt_leaves_the_memory_of_the_budget(smollm2: Any) -> None:
    model = kvlearn.enable(smollm2.model)
    ids = prompt(3000, vocabulary=40_000)

    def prefill(tokens: int = 3000) -> Any:
        cache = kvlearn.EvictingCache(model, "snapkv", 128)
        feed(model, cache, ids[:, : tokens - 2], [tokens - 2], logits_to_keep=1)
        feed(model, cache, ids[:, tokens - 2 : tokens], [1, 1])  # from the second on, a token is known to be decoded
        return cache

    prefill(300)  # constants are made when they are first used
    cache, measured = allocated(prefill)
    config = model.config
    slots = config.num_hidden_layers * config.num_key_value_heads * 128
    assert cache.stats()["kv_bytes"] == slots * 2 * config.head_dim * cache.evicting_layers()[0].keys.element_size()
    assert cache.stats()["bytes"] == measured
    _, growth = allocated(lambda: forget(feed(model, cache, ids[:, :4], [1] * 4)))
    assert growth == 0, "memory grows while decoding"

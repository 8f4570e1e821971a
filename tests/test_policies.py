"""Every policy keeps what its slow, separately written version keeps; names, options and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import slow_policies
import torch
from slow_policies import SLOW, Score, SlowLayer, Token, View
from torch import Tensor

import kvlearn
from kvlearn import history
from kvlearn.attention import cache_argument
from kvlearn.errors import KvlearnError
from kvlearn.policies import POLICIES, parse, register, resolve
from kvlearn.policies.base import Policy, Queries, Slots, select_victims
from kvlearn.policies.learned import Learned
from kvlearn.policies.oracle import FutureRecorder, Oracle
from kvlearn.policies.pyramidkv import pyramid_budgets
from kvlearn.policies.q_filters import QFilters
from kvlearn.scorers import Scorer

BUDGET, BLOCK, SINKS = 28, 8, 4

# A prompt beyond the budget, steps, chunks within a block, steps that leave a block open, a second long prompt.
CALLS = (45, *[1] * 11, 8, 5, *[1] * 9, 30, *[1] * 10)
SHORT = (9, *[1] * 30, 8, *[1] * 12)  # fills up while decoding
FIRST_STEP = (*[1] * 40, 12, *[1] * 9)  # no prompt at all


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def tokens(count: int, batch: int = 2, seed: int = 0) -> Tensor:
    """Rows without repetitions: equal tokens have equal keys in the first layer, up to rounding, and so tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(199, generator=generator)[:count] + 1 for _ in range(batch)])


def feed(model: Any, cache: kvlearn.EvictingCache, ids: Tensor, calls: tuple[int, ...], **options: Any) -> Tensor:
    """Logits of ``ids`` fed call by call."""
    outputs, start = [], 0
    for count in calls:
        with torch.no_grad():
            outputs.append(model(ids[:, start : start + count], **{cache_argument(model): cache}, **options).logits)
        start += count
    return torch.cat(outputs, dim=1)


def spy(cache: kvlearn.EvictingCache) -> dict[int, list[tuple[np.ndarray, ...]]]:
    """Queries, keys, values and outputs of every call of every layer, collected while the cache runs."""
    seen: dict[int, list[tuple[np.ndarray, ...]]] = {}
    for layer in cache.evicting_layers():

        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, _layer: Any = layer, **kwargs: Any) -> Tensor:
            out = type(_layer).attend(_layer, query, key, value, *args, **kwargs)
            arrays = tuple(t.detach().double().numpy() for t in (query, key, value, out))
            seen.setdefault(_layer.config.index, []).append(arrays)
            return out

        layer.attend = attend
    return seen


def held(cache: kvlearn.EvictingCache, layer: int) -> list[list[list[int]]]:
    """Positions held, sorted, by row and head."""
    return [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions(layer).tolist()]


def assert_agrees(model: Any, policy: Policy, score: Score | list[Score], calls: tuple[int, ...]) -> None:
    """Run the policy; after every call every head of every layer must hold what the slow version holds.

    ``score`` may be a list with one slow policy per row of the batch.
    """
    scores = score if isinstance(score, list) else [score]
    ids = tokens(sum(calls), batch=len(scores))
    cache = kvlearn.EvictingCache(model, policy, budget=BUDGET, block=BLOCK)
    seen = spy(cache)
    slow = {
        layer: [SlowLayer(layer, one, BUDGET, BLOCK, SINKS, BLOCK, model.config.head_dim**-0.5) for one in scores]
        for layer in cache.managed
    }
    start = 0
    for number, count in enumerate(calls):
        feed(model, cache, ids[:, start : start + count], (count,))
        start += count
        for layer, rows in slow.items():
            query, key, value, out = seen[layer][number]
            for b, row in enumerate(rows):
                expected = row.feed(query[b], key[b], value[b])
                where = f"{policy.label}, layer {layer}, row {b}, after {start} tokens"
                np.testing.assert_allclose(out[b], expected, atol=2e-5, err_msg=where)
                kept = [sorted(t.pos for t in head) for head in row.heads]
                assert held(cache, layer)[b] == kept, where


VARIANTS = {
    "random:seed=12345678901": partial(slow_policies.random, seed=12345678901),
    "random:seed=-5": partial(slow_policies.random, seed=-5),
    "protected-random:ends=3": partial(slow_policies.protected_random, ends=3),
    "h2o:recent_share=0.25": partial(slow_policies.h2o, recent_share=0.25),
    "snapkv:kernel=7:pooling=max": partial(slow_policies.snapkv, kernel=7, pooling="max"),
    "ema:16": partial(slow_policies.ema, half_life=16),
    "ema:1024": partial(slow_policies.ema, half_life=1024),
    "r-kv:mix=0.9:kernel=3": partial(slow_policies.r_kv, mix=0.9, kernel=3),
    "expected-attention:future=7:covariance=no:value_norm=no": partial(
        slow_policies.expected_attention, future=7, covariance=False, value_norm=False
    ),
    "caote:tova": partial(slow_policies.caote, inner=slow_policies.tova),
    "caote:snapkv:fast=true": partial(slow_policies.caote, inner=slow_policies.snapkv, fast=True),
}


@pytest.mark.parametrize("name", [*SLOW, *VARIANTS])
def test_keeps_what_the_slow_version_keeps(model: Any, name: str) -> None:
    assert_agrees(model, resolve(name), {**SLOW, **VARIANTS}[name], CALLS)


@pytest.mark.parametrize("calls", [SHORT, FIRST_STEP], ids=["short prompt", "no prompt"])
@pytest.mark.parametrize("name", ["protected-random", "h2o", "tova", "snapkv", "ema"])
def test_keeps_what_the_slow_version_keeps_when_it_fills_up_while_decoding(
    model: Any, name: str, calls: tuple[int, ...]
) -> None:
    assert_agrees(model, resolve(name), SLOW[name], calls)


def test_every_registered_policy_has_a_slow_version() -> None:
    # full evicts nothing; the others need more than a name and have tests of their own.
    others = {"full", "learned", "oracle", "q-filters", "kvpress", "kvpress-decoding"}
    assert set(POLICIES) == {*SLOW, *others}


# ---- the oracle and the learned policy -----------------------------------------------------------------------------


def slow_future(model: Any, ids: Tensor, reduce: str) -> list[Score]:
    """For each row, the true future from attention computed here, over all tokens."""
    cache = kvlearn.EvictingCache(model, "full", block=BLOCK)
    seen = spy(cache)
    feed(model, cache, ids, (ids.shape[1],))
    count, scale = ids.shape[1], model.config.head_dim**-0.5
    blocks = [(max(0, end - BLOCK), end) for end in range(count % BLOCK or BLOCK, count + 1, BLOCK)]
    means: dict[tuple[int, int, int], np.ndarray] = {}
    for layer, [(query, key, _, _)] in seen.items():
        group = query.shape[1] // key.shape[1]
        for b in range(len(ids)):
            for h in range(key.shape[1]):
                logits = query[b, h * group : (h + 1) * group] @ key[b, h].T * scale
                logits[:, np.triu(np.ones((count, count), dtype=bool), 1)] = -np.inf
                mass = np.exp(logits - logits.max(-1, keepdims=True))
                mass = (mass / mass.sum(-1, keepdims=True)).mean(0)
                means[layer, b, h] = np.stack([mass[start:end].mean(0) for start, end in blocks])

    def score(view: View, head: int, token: Token, row: int) -> float:
        rest = [means[view.layer, row, head][n, token.pos] for n, (_, end) in enumerate(blocks) if end > view.length]
        rest = [slow_policies.code_of(mass) for mass in rest]
        if not rest:
            return 0.0
        if reduce == "discounted":
            soon = max(mass * 0.985**n for n, mass in enumerate(rest))
            return slow_policies.as_half(soon + 0.1 * sum(mass * 0.97**n for n, mass in enumerate(rest)))
        if reduce == "sum":
            return slow_policies.as_half(sum(rest))
        return slow_policies.as_half(max(rest) if reduce == "max" else sum(rest) / len(rest))

    return [partial(score, row=b) for b in range(len(ids))]


def record(model: Any, ids: Tensor, calls: tuple[int, ...], **options: Any) -> FutureRecorder:
    recorder = FutureRecorder()
    feed(model, kvlearn.EvictingCache(model, "full", recorder=recorder, block=BLOCK), ids, calls, **options)
    return recorder


@pytest.mark.parametrize("reduce", ["max", "mean", "sum", "discounted"])
def test_oracle_keeps_what_the_slow_version_keeps(model: Any, reduce: Any) -> None:
    ids = tokens(sum(CALLS))
    oracle = Oracle.from_recorder(record(model, ids, (sum(CALLS),)), reduce)
    assert_agrees(model, oracle, slow_future(model, ids, reduce), CALLS)


def test_oracle_is_the_same_however_the_full_run_was_fed(model: Any) -> None:
    ids = tokens(64)
    whole = Oracle.from_recorder(record(model, ids, (64,))).future
    pieces = Oracle.from_recorder(record(model, ids, (24, *[1] * 16, 8, 16))).future
    assert whole is not None
    assert pieces is not None
    for layer, future in whole.items():
        assert torch.equal(future.ends, pieces[layer].ends)
        # a mass on the border between two codes may fall either way
        torch.testing.assert_close(future.mass, pieces[layer].mass, rtol=0.06, atol=0)


def test_oracle_of_a_padded_batch_knows_each_row(model: Any) -> None:
    ids = tokens(64)
    alone = Oracle.from_recorder(record(model, ids[1:, 20:], (44,))).future
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    batch = Oracle.from_recorder(record(model, ids, (64,), attention_mask=mask)).future
    assert alone is not None
    assert batch is not None
    for layer, future in alone.items():
        assert batch[layer].ends[-1].tolist() == [64, 44]
        blocks = len(future.mass)
        torch.testing.assert_close(batch[layer].mass[-blocks:, 1, :, :44], future.mass[:, 0], rtol=0.06, atol=0)


def test_oracle_refuses_what_it_cannot_know(model: Any) -> None:
    ids = tokens(48)
    recorder = record(model, ids, (40,))
    with pytest.raises(KvlearnError, match="knows rows of \\[40, 40\\] tokens and the cache has seen \\[48, 48\\]"):
        feed(model, kvlearn.EvictingCache(model, Oracle.from_recorder(recorder), BUDGET, block=BLOCK), ids, (48,))
    with pytest.raises(KvlearnError, match="knows rows"):
        feed(model, kvlearn.EvictingCache(model, Oracle.from_recorder(recorder), BUDGET, block=BLOCK), ids[:1], (40,))
    with pytest.raises(KvlearnError, match="saw no attention"):
        Oracle.from_recorder(FutureRecorder())
    with pytest.raises(KvlearnError, match="reduce is 'least'"):
        Oracle.from_recorder(recorder, "least")  # type: ignore[arg-type]  # wrong on purpose
    gaps = FutureRecorder()
    feed(model, kvlearn.EvictingCache(model, "ema", BUDGET, block=BLOCK, recorder=gaps), ids, (40, 8))
    with pytest.raises(KvlearnError, match="gaps"):
        Oracle.from_recorder(gaps)


def random_scorer(model: Any) -> Scorer:
    """All of its weights matter, and so does its standardisation."""
    generator = torch.Generator().manual_seed(0)
    scorer = Scorer.for_model(model, hidden=4, key_rank=2, block=BLOCK)
    with torch.no_grad():
        for weight in scorer.parameters():
            weight.normal_(generator=generator)
        scorer.mean.normal_(generator=generator)
        scorer.std.uniform_(0.5, 2.0, generator=generator)
    return scorer.eval()


def as_bytes(vector: np.ndarray) -> np.ndarray:
    """What is left of a vector of which each number is kept in one byte."""
    scale = float(np.float16(np.abs(vector).max() / 127))
    return np.round(vector / scale) * scale


def slow_learned(view: View, head: int, token: Token, scorer: Scorer) -> float:
    """Features and network, one number at a time, from their documentation."""
    h, age, floor = token.history, view.age(token), 2.0**-20
    values = [np.log(h["last"] + floor)]
    values += [np.log(h[f"ema{n}"] / (1 - 0.5 ** (age / n)) + floor) for n in slow_policies.HALF_LIVES]
    values += [np.log(h["mean"] + floor), np.log(h["peak"] + floor), h["hits"], np.log(1 + h["idle"])]
    values += [np.log(1 + h["gap"]), np.log(age), np.log(1 + token.pos), float(token.pos < 4), np.log(view.length)]
    key, value = as_bytes(unrotated(token)), as_bytes(token.value)
    weights = {n: t[scorer.index_of[view.layer], head].double().numpy() for n, t in scorer.state_dict().items()}
    static = [np.log(np.linalg.norm(key) + 1e-6), np.log(np.linalg.norm(value) + 1e-6)]
    values += [float(np.float16(x)) for x in [*static, *(key @ weights["encoder.projection"])]]
    x = (np.array(values) - weights["mean"]) / weights["std"]
    hidden = [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in x @ weights["w1"] + weights["b1"]]  # GELU
    return float(x @ weights["skip"] + weights["bias"] + np.dot(hidden, weights["w2"]))


def unrotated(token: Token) -> np.ndarray:
    """The key before Llama's rotary embedding: pairs ``(i, i + D / 2)`` turned back by their angle."""
    half = len(token.key) // 2
    angle = token.pos * 10000.0 ** (-np.arange(half) / half)
    first, second = token.key[:half], token.key[half:]
    return np.concatenate(
        [first * np.cos(angle) + second * np.sin(angle), second * np.cos(angle) - first * np.sin(angle)]
    )


def test_learned_keeps_what_the_slow_version_keeps(model: Any) -> None:
    scorer = random_scorer(model)
    assert_agrees(model, Learned(scorer), partial(slow_learned, scorer=scorer), CALLS)


def test_a_scorer_for_another_model_is_refused(model: Any, tiny_llama: Callable[..., Any]) -> None:
    scorer = random_scorer(model)
    other = kvlearn.enable(tiny_llama(layers=3))
    with pytest.raises(KvlearnError, match="layers: 2 against 3"):
        kvlearn.EvictingCache(other, scorer, BUDGET, block=BLOCK)


# ---- Q-Filters ------------------------------------------------------------------------------------------------------


def slow_filters(model: Any, ids: Tensor) -> np.ndarray:
    """The first right singular vector of each head's queries, by the definition of the paper."""
    layers = []
    cache = kvlearn.EvictingCache(model, "full", block=BLOCK)
    seen = spy(cache)
    feed(model, cache, ids, (ids.shape[1],))
    for layer in cache.managed:
        [(query, key, _, _)] = seen[layer]
        filters = []
        for head in range(query.shape[1]):
            left, _, right = np.linalg.svd(query[:, head].reshape(-1, query.shape[-1]), full_matrices=False)
            filters.append(right[0] * np.sign(left[:, 0].sum()))
        layers.append(np.array(filters).reshape(key.shape[1], -1, key.shape[-1]).mean(1))
    return np.array(layers)


def test_q_filters_keep_what_the_slow_version_keeps(model: Any) -> None:
    ids = tokens(100, batch=3, seed=1)
    expected = slow_filters(model, ids)
    policy = QFilters.calibrated(model, ids)
    assert policy.filters is not None
    np.testing.assert_allclose(policy.filters.numpy(), expected, atol=1e-4)
    assert model.config._attn_implementation == "kvlearn", "calibration leaves the model as it was"
    assert_agrees(model, policy, partial(slow_policies.q_filters, filters=expected), CALLS)


def test_q_filters_are_calibrated_once_and_kept(model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEARN_CACHE", str(tmp_path))
    made = QFilters.calibrated(model, tokens(60))
    monkeypatch.setattr("kvlearn.policies.q_filters._texts", lambda _: tokens(60))
    for _ in range(2):
        policy = resolve("q-filters")
        policy.bind(model)
        assert torch.equal(policy.filters, made.filters)
        monkeypatch.setattr("kvlearn.policies.q_filters._texts", lambda _: pytest.fail("calibrated twice"))
    made.save(tmp_path / "mine.safetensors")
    policy = resolve(f"q-filters:{tmp_path / 'mine.safetensors'}")
    policy.bind(model)
    assert torch.equal(policy.filters, made.filters)


def test_q_filters_refuse_what_does_not_fit(model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEARN_CACHE", str(tmp_path))
    with pytest.raises(KvlearnError, match="no tokenizer"):
        resolve("q-filters").bind(model)
    with pytest.raises(KvlearnError, match="cannot read filters"):
        resolve(f"q-filters:{tmp_path / 'none'}").bind(model)
    with pytest.raises(KvlearnError, match=r"filters are \(2, 3, 4\)"):
        QFilters(filters=torch.zeros(2, 3, 4)).bind(model)


# ---- what holds for every policy ------------------------------------------------------------------------------------


OWN = [name for name in POLICIES if name != "full" and not name.startswith("kvpress")]  # see test_kvpress


def example_slots(policy: Policy, batch: int = 2, count: int = 40, seed: int = 0) -> Slots:
    """Random slots in random order, some of them empty, all heads with the same positions."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor([90, 70, 120, 64])[:batch]
    pos = torch.full((batch, 2, count), -1, dtype=torch.int32)
    for b in range(batch):
        free = 6 * (b % 2)  # every other row has empty slots
        chosen = torch.randperm(int(length[b]), generator=generator)[: count - free]
        for h in range(2):
            pos[b, h, torch.randperm(count, generator=generator)[: count - free]] = chosen.int()
    state = history.empty((batch, 2, count))
    for n in range(3):
        codes = torch.randint(0, 256, (2, batch, 2, count), generator=generator).to(torch.uint8)
        age = length.view(-1, 1, 1) - pos - 8 * (2 - n)
        state = history.observe(state, *codes, torch.full((batch,), 8), age)
    draw = partial(torch.randn, generator=generator)
    slots = Slots(
        layer=1,
        pos=pos,
        length=length,
        prompt_length=length - 9,
        keys=draw(batch, 2, count, 16),
        values=draw(batch, 2, count, 16),
        state=state if "history" in policy.reads else None,
        last_query=torch.rand(batch, 2, count, generator=generator) if "last_query" in policy.reads else None,
        static=draw(batch, 2, count, 4) if "static" in policy.reads else None,
        budget=32,
        block=8,
        queries=example_queries(length, draw(batch, 4, 20, 16)) if "queries" in policy.reads else None,
    )
    poison = ~slots.valid
    slots.keys[poison] = slots.values[poison] = torch.nan  # what lies in empty slots must not matter
    return slots


def example_queries(length: Tensor, rotated: Tensor) -> Queries:
    positions = length[:, None] - torch.arange(rotated.shape[2]).flip(0)
    positions[0, :3] = -1
    return Queries(rotated, positions, 0.25, None)


def every_policy(model: Any) -> dict[str, Policy]:
    ids = tokens(120, batch=4)
    made: dict[str, Policy] = {"learned": Learned(random_scorer(model)), "q-filters": QFilters.calibrated(model, ids)}
    made["oracle"] = Oracle.from_recorder(record(model, ids, (120,)))
    return {name: made.get(name) or POLICIES[name]() for name in OWN}


@pytest.mark.parametrize("name", OWN)
def test_scores_do_not_depend_on_the_layout_of_slots_or_on_the_batch(model: Any, name: str) -> None:
    policy = every_policy(model)[name]
    slots = example_slots(policy, batch=4)
    score = policy.score(slots)
    assert score.shape == slots.pos.shape
    assert not score[slots.valid].isnan().any()
    order = torch.rand(slots.pos.shape).argsort(-1)

    def permuted(tensor: Tensor | None, dim: int) -> Tensor | None:
        if tensor is None:
            return None
        index = order if tensor.ndim == 3 else (order[..., None] if dim == 2 else order[:, :, None])
        return tensor.gather(dim, index.expand(tensor.shape))

    moved = replace(
        slots,
        **{n: permuted(getattr(slots, n), 2) for n in ("pos", "keys", "values", "static", "last_query")},
        state=permuted(slots.state, 3),
    )
    valid = moved.valid
    assert torch.equal(policy.score(moved)[valid], score.gather(-1, order)[valid])
    if name == "oracle":
        return  # it knows the rows of its batch
    for b in range(4):
        row: dict[str, Any] = {
            n: None if t is None else t[b : b + 1]
            for n in ("pos", "length", "prompt_length", "keys", "values", "state", "static", "last_query")
            for t in (getattr(slots, n),)
        }
        if slots.queries is not None:
            own = slots.queries
            row["queries"] = replace(own, rotated=own.rotated[b : b + 1], positions=own.positions[b : b + 1])
        alone = policy.score(replace(slots, **row))[0]
        assert torch.equal(alone[slots.valid[b]], score[b][slots.valid[b]]), f"row {b} depends on its batch"


@pytest.mark.parametrize("name", [name for name in OWN if name != "oracle"])
def test_a_padded_row_keeps_what_it_keeps_alone(model: Any, name: str) -> None:
    ids = tokens(80)
    mask = torch.ones(2, 80, dtype=torch.int64)
    mask[0, :15] = 0
    calls = (56, *[1] * 16, 8)

    def run(ids: Tensor, mask: Tensor, calls: tuple[int, ...]) -> kvlearn.EvictingCache:
        cache = kvlearn.EvictingCache(model, every_policy(model)[name], BUDGET, block=BLOCK)
        start = 0
        for count in calls:
            end = start + count
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            feed(model, cache, ids[:, start:end], (count,), attention_mask=mask[:, :end], position_ids=positions)
            start = end
        return cache

    batch = run(ids, mask, calls)
    alone = run(ids[:1, 15:], mask[:1, 15:], (41, *calls[1:]))
    for layer in batch.managed:
        assert held(batch, layer)[0] == held(alone, layer)[0]


def test_full_evicts_nothing_and_says_so_when_it_must(model: Any) -> None:
    with pytest.raises(KvlearnError, match="full policy evicts nothing"):
        feed(model, kvlearn.EvictingCache(model, "full", BUDGET, block=BLOCK), tokens(40), (40,))


def test_nan_scores_are_refused() -> None:
    pos = torch.arange(6, dtype=torch.int32).view(1, 1, 6)
    score = torch.zeros(1, 1, 6)
    score[0, 0, 3] = torch.nan
    with pytest.raises(KvlearnError, match="NaN"):
        select_victims(score, pos, torch.zeros_like(pos, dtype=torch.bool), 2)
    pos[0, 0, 3] = -1  # an empty slot's score is nobody's business, and it goes first
    assert select_victims(score, pos, torch.zeros_like(pos, dtype=torch.bool), 2).tolist() == [[[3, 0]]]


# ---- names and options ------------------------------------------------------------------------------------------


def test_a_name_is_registered_once() -> None:
    class Twin(Policy):
        name = "h2o"

    with pytest.raises(KvlearnError, match="'h2o' is registered already"):
        register(Twin)


def test_every_policy_describes_itself() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert policy.summary
        assert policy.paper
        assert "score" in vars(policy), f"{name} has no score of its own"


@pytest.mark.parametrize(
    ("typed", "label"),
    [
        ("ema", "ema"),
        ("ema:64", "ema"),
        ("ema:16", "ema:half_life=16"),
        ("ema: half_life = 16", "ema:half_life=16"),
        ("h2o:recent_share=0.25", "h2o:recent_share=0.25"),
        ("snapkv:pooling=max:kernel=7", "snapkv:kernel=7:pooling=max"),
        ("random:-5", "random:seed=-5"),
    ],
)
def test_options_in_a_name_and_the_label_that_gives_them_back(typed: str, label: str) -> None:
    policy = resolve(typed)
    assert policy.label == label
    assert resolve(policy.label) == policy


def test_options_as_arguments() -> None:
    assert resolve("ema", half_life=256).label == "ema:half_life=256"
    assert parse("snapkv:7") == ("snapkv", {"kernel": 7})
    assert parse("somewhere/a-scorer") is None
    with pytest.raises(KvlearnError, match="no option 'halflife'; did you mean 'half_life'"):
        resolve("ema", halflife=16)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("emo", "unknown policy 'emo'; did you mean 'ema'?"),
        ("snap-kv:kernel=7", "unknown policy 'snap-kv'; did you mean 'snapkv'?"),
        ("zzz", "unknown policy 'zzz'; known are caote, ema, expected-attention, full"),
        ("ema:half_lfe=16", "no option 'half_lfe'; did you mean 'half_life'?"),
        ("keynorm:3", "no option '3'; it has none"),
        ("ema:", "'half_life' is ''; it takes a whole number"),
        ("ema:half_life=soon", "'half_life' is 'soon'; it takes a whole number"),
        ("ema:half_life=20", "half_life is 20; the history keeps 16, 64, 256, 1024"),
        ("h2o:recent_share=nan", "'recent_share' is 'nan'; it takes a number"),
        ("h2o:recent_share=1.5", "recent_share is 1.5"),
        ("ema:16:half_life=64", "'half_life' is given twice"),
        ("snapkv:pooling=min", "'pooling' is 'min'; it takes 'avg' or 'max'"),
        ("snapkv:kernel=4", "kernel is 4; give an odd number"),
        ("protected-random:ends=-1", "ends is -1"),
        ("r-kv:mix=2", "mix is 2.0"),
        ("r-kv:kernel=2", "kernel is 2; give an odd number"),
        ("caote:keynorm", "inner is 'keynorm', which is not attention"),
        ("caote:fast=perhaps", "'fast' is 'perhaps'; it takes true or false"),
        ("learned", "needs a scorer; give the scorer's folder"),
        ("oracle", "only kvlearn compare knows it"),
    ],
)
def test_bad_names_are_one_clear_sentence(typed: str, message: str) -> None:
    with pytest.raises(KvlearnError, match=message.replace("?", "\\?")) as error:
        resolve(typed)
    assert "\n" not in str(error.value)


def test_a_scorer_folder_is_a_policy_named_after_it(model: Any, tmp_path: Any) -> None:
    Scorer.for_model(model).save_pretrained(tmp_path / "mine")
    policy = resolve(str(tmp_path / "mine"))
    assert policy.kind == "learned"
    assert policy.label == str(tmp_path / "mine")


def test_scorers_that_come_along_are_found_from_anywhere(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scorer.for_model(model).save_pretrained(tmp_path / "package" / "tiny")
    monkeypatch.setattr("kvlearn.shipped.shipped", lambda kind, name: tmp_path / "package" / name)
    monkeypatch.chdir(tmp_path)
    policy = resolve("checkpoints/tiny")
    assert policy.label == "checkpoints/tiny", "rows name it alike on every machine"
    Scorer.for_model(model, hidden=2).save_pretrained(tmp_path / "checkpoints" / "tiny")
    nearer = resolve("checkpoints/tiny")
    assert nearer.scorer.config != policy.scorer.config, "a folder of one's own comes first"


# ---- layer budgets --------------------------------------------------------------------------------------------------


def test_pyramid_falls_from_the_first_layer_to_the_last() -> None:
    budgets = pyramid_budgets(256, 30, least=68)
    assert sum(budgets) == 256 * 30
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == pytest.approx(68 + (256 - 68) / 20, abs=1)
    assert budgets[0] == pytest.approx(68 + (256 - 68) * (2 - 1 / 20), abs=1)
    falls = [a - b for a, b in pairwise(budgets)]
    assert max(falls) - min(falls) <= 1


def test_pyramid_at_its_limits() -> None:
    assert pyramid_budgets(100, 4, least=68, beta=1) == [100] * 4
    assert pyramid_budgets(68, 3, least=68) == [68] * 3
    assert pyramid_budgets(90, 1, least=68) == [90]
    with pytest.raises(KvlearnError, match="below the 68"):
        pyramid_budgets(60, 3, least=68)
    with pytest.raises(KvlearnError, match=r"beta 0\.5"):
        pyramid_budgets(90, 3, least=68, beta=0.5)


def test_pyramid_with_snapkv_runs(model: Any) -> None:
    budgets = pyramid_budgets(40, 2, least=SINKS + 2 * BLOCK)
    cache = kvlearn.EvictingCache(model, "snapkv", budgets, block=BLOCK)
    feed(model, cache, tokens(90), (70, *[1] * 20))
    assert [len(held(cache, layer)[0][0]) for layer in cache.managed] == budgets

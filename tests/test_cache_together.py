"""Layers that end their blocks as one must do, bit for bit, what each would have done alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, feed, held, left_pad, policy, prompt, snapshot

import kvlearn
from kvlearn import together
from kvlearn.layer import EvictingLayer
from kvlearn.policies import POLICIES

BUDGET = 24
JOINING = [name for name, found in POLICIES.items() if found.joins]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama(num_hidden_layers=5))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers went as one, each time that some did."""
    counts: list[int] = []
    end = together._end

    def counted(layers: Any) -> None:
        counts.append(len(layers))
        end(layers)

    monkeypatch.setattr(together, "_end", counted)
    return counts


def make(model: Any, name: str = "learned", budget: Any = BUDGET, **options: Any) -> Any:
    return kvlearn.EvictingCache(model, policy(name, model), budget, block=BLOCK, **options)


def alone(monkeypatch: pytest.MonkeyPatch, model: Any, cache: Any, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(together, "MOST", 0)
        return feed(model, cache, *args)


def assert_equal(ours: Any, theirs: Any) -> None:
    for one in (ours, theirs):
        for layer in one.evicting_layers():
            layer.held()  # leaves nothing for later
    found, wanted = snapshot(ours), snapshot(theirs)
    wanted = {name: tensor for name, tensor in wanted.items() if not name.endswith("order")}
    assert {name for name in found if not name.endswith("order")} == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", JOINING)
@pytest.mark.parametrize("padded", [False, True])
def test_several_layers_do_what_each_would_do(
    model: Any, joined: list[int], monkeypatch: pytest.MonkeyPatch, name: str, padded: bool
) -> None:
    ids, mask = left_pad(prompt(70), prompt(63, seed=1)) if padded else (prompt(70, batch=2), None)
    calls = [7, *[1] * 41, 3, *[1] * 10, BLOCK, *[1] * 5]  # from free slots to full ones, with chunks between
    ours, theirs = make(model, name), make(model, name)
    logits = feed(model, ours, ids, calls, mask)
    assert set(joined) == {5}, "all layers are alike"
    joined.clear()
    assert torch.equal(logits, alone(monkeypatch, model, theirs, ids, calls, mask))
    assert joined == []
    assert held(ours) == held(theirs)
    assert_equal(ours, theirs)


def test_few_go_together_where_there_are_many_slots(
    model: Any, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = model.config.num_key_value_heads
    monkeypatch.setattr(together, "MOST", 2 * heads * BUDGET)
    feed(model, make(model), prompt(40), [39, 1])
    assert joined == []
    feed(model, make(model), prompt(40), [7, *[1] * 33])
    assert set(joined) == {2}, "two at a time, and the fifth alone"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tova", {}),  # heads matter to each other
        ("random", {}),  # the layer matters
        ("h2o", {"allocation": "pooled"}),
        ("h2o", {"positions": "compact"}),
    ],
)
def test_layers_that_cannot_go_as_one_go_alone(
    model: Any, joined: list[int], name: str, options: dict[str, Any]
) -> None:
    feed(model, make(model, name, **options), prompt(60), [7, *[1] * 53])
    assert joined == []


def test_layers_of_other_budgets_stand_between(model: Any, joined: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    budgets, ids, calls = [BUDGET, BUDGET, 20, BUDGET, None], prompt(60), [7, *[1] * 53]
    ours, theirs = make(model, budget=budgets), make(model, budget=budgets)
    logits = feed(model, ours, ids, calls)
    assert set(joined) == {2}
    assert torch.equal(logits, alone(monkeypatch, model, theirs, ids, calls))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("steps", [BLOCK, 8 * BLOCK, 8 * BLOCK + 1])  # a block has ended, and nobody has looked
@pytest.mark.parametrize("change", ["saved", "copied", "reordered", "reset"])
def test_a_block_that_has_ended_goes_where_its_rows_go(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, change: str
) -> None:
    ids = prompt(90, batch=2)
    ours, theirs = make(model), make(model)
    for cache in (ours, theirs):
        alone(monkeypatch, model, cache, ids[:, : 7 + steps], [7, *[1] * steps])
    for layer in theirs.evicting_layers():
        layer.held()
    take = [0, 1]
    for cache in (ours, theirs):
        if change == "reordered":
            cache.reorder_cache(torch.tensor(take := [1, 0]))
        elif change == "reset":
            cache.reset()
    if change == "saved":
        ours.save(tmp_path / "cache")
        ours = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    elif change == "copied":
        ours = copy.deepcopy(first := ours)
        feed(model, first, ids[:, :9], [1] * 9)  # what becomes of the first does not show
    rest = ids[take][:, 7 + steps : 47 + steps]
    wanted = alone(monkeypatch, model, theirs, rest, [1] * 40)
    assert torch.equal(feed(model, ours, rest, [1] * 40), wanted)
    assert_equal(ours, theirs)


def test_a_call_that_fails_in_the_middle_leaves_layers_to_themselves(
    model: Any, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(model)
    feed(model, cache, prompt(40), [7, *[1] * 33])
    joined.clear()
    attend, third = EvictingLayer.attend, cache.evicting_layers()[2]

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is third:
            self.pending = False
            raise RuntimeError("out of memory")
        return attend(self, *args, **kwargs)

    while not cache.evicting_layers()[0].ended:
        feed(model, cache, prompt(1), [1])
    joined.clear()
    with monkeypatch.context() as patch:
        patch.setattr(EvictingLayer, "attend", fails)
        for _ in range(BLOCK):
            with pytest.raises(RuntimeError, match="memory"):
                feed(model, cache, prompt(1), [1])
    assert joined == [5]
    feed(model, cache, prompt(1), [1])
    assert joined == [5, 2], "two of them have ended another block"


def test_gradients_may_be_asked_for(model: Any) -> None:
    cache, ids = make(model), prompt(40)
    for start, end in [(0, 7), *((i, i + 1) for i in range(7, 40))]:
        model(ids[:, start:end], **{kvlearn.attention.cache_argument(model): cache})
    assert int(cache.stats()["slots"]) == BUDGET

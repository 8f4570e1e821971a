"""Two policies in one cache: each decides in its own part, and reads nothing elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from cache_helpers import feed, held, prompt, scorer
from cache_helpers import policy as make_policy
from transformers import LlamaForCausalLM

from kvlearn import EvictingCache, enable
from kvlearn.errors import KvlearnError
from kvlearn.policies import resolve
from kvlearn.policies.composed import Composed, Part

BUDGET, BLOCK = 16, 4


@pytest.fixture
def model(tiny_llama: Callable[..., LlamaForCausalLM]) -> Any:
    return enable(tiny_llama())


def _held(model: Any, policy: Any, ids: Any, budgets: Any = BUDGET) -> list[Any]:
    cache = EvictingCache(model, policy, budgets, block=BLOCK)
    feed(model, cache, ids, [8, *[BLOCK] * 8])
    return held(cache)


def test_the_first_layer_is_the_inner_policys_and_the_others_are_not(model: Any) -> None:
    ids = prompt(40)
    inside, outside = resolve("streaming"), make_policy("oracle", model, ids)
    found = _held(model, Composed(inside, outside, Part("layers", (0,))), ids)
    assert found[0] == _held(model, inside, ids)[0], "the part does not hold what its policy keeps"
    found = _held(model, Composed(inside, outside, Part("layers", (1,))), ids)
    assert found[0] == _held(model, outside, ids)[0], "elsewhere the other policy decides"
    assert found[1] == _held(model, inside, ids)[1], "streaming holds the same whatever the other layers do"
    assert found[1] != _held(model, outside, ids)[1], "the test cannot tell the two policies apart"


def test_heads_are_divided(model: Any) -> None:
    ids = prompt(40)
    inside, outside = resolve("streaming"), make_policy("oracle", model, ids)
    found = _held(model, Composed(inside, outside, Part("heads", (1,))), ids)
    assert found[0][0][1] == _held(model, inside, ids)[0][0][1]
    assert found[0][0][0] == _held(model, outside, ids)[0][0][0]
    assert found[0][0][1] != _held(model, outside, ids)[0][0][1], "the test cannot tell the two policies apart"


def test_layers_outside_may_be_without_bound_and_keep_no_history(model: Any) -> None:
    ids = prompt(40)
    policy = Composed(make_policy("learned", model), resolve("full"), Part("layers", (0,)))
    cache = EvictingCache(model, policy, [BUDGET, *[None] * (len(model.model.layers) - 1)], block=BLOCK)
    feed(model, cache, ids, [8, *[BLOCK] * 8])
    first, second = cache.evicting_layers()[:2]
    assert (first.pos >= 0).sum(-1).max() == BUDGET
    assert (second.positions() >= 0).sum(-1).min() == ids.shape[1], "a layer without bound lost tokens"
    assert second.state is None, "a layer whose policy reads no history keeps one"
    assert first.static is not None
    assert second.static is None, "a layer whose policy reads no keys keeps what another would read"


def test_a_copy_shares_the_policies(model: Any) -> None:
    learned = make_policy("learned", model)
    cache = EvictingCache(model, Composed(learned, resolve("ema"), Part("layers", (0,))), BUDGET, block=BLOCK)
    twin = copy.deepcopy(cache)
    assert twin.evicting_layers()[0].config.policy is learned, "a scorer was copied with the cache"


@pytest.mark.parametrize(
    ("members", "axis", "words"),
    [((15, 16, 17), "layers", "layers 15-17"), ((2,), "heads", "head 2"), ((0, 2), "heads", "heads 0, 2")],
)
def test_parts_are_told_in_words(members: tuple[int, ...], axis: Any, words: str) -> None:
    assert str(Part(axis, members)) == words


def test_heads_that_cannot_be_divided_are_refused(model: Any) -> None:
    one = Part("heads", (0,))
    with pytest.raises(KvlearnError, match="use layers"):
        Composed(resolve("ema"), resolve("full"), one)
    with pytest.raises(KvlearnError, match="both keep static"):
        Composed(resolve(scorer(model)), resolve(scorer(model)), one)

"""Budgets and protection: what fits, what is refused, and what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, NO_RECORDING, feed, generate, held, policy, prompt, scorer

import kvlearn
from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy
from kvlearn.shapes import Budget, Protection

BUDGET = 20


@pytest.fixture(scope="module")
def model(tiny_llama: Any) -> Any:
    return kvlearn.enable(tiny_llama())


def cache(model: Any, name: str = "random", budget: int = BUDGET, **protect: Any) -> Any:
    return kvlearn.EvictingCache(
        model, policy(name, model), budget, block=BLOCK, protect=Protection(**{"sinks": 2, **protect})
    )


@pytest.mark.parametrize("name", NO_RECORDING)
def test_protected_tokens_stay_under_every_policy(model: Any, name: str) -> None:
    for protect, kept in (
        ({}, {0, 1}),
        ({"prompt": "whole"}, set(range(10))),
        ({"prompt": "ends", "prompt_ends": 3}, {0, 1, 2, 7, 8, 9}),
        ({"tokens": [4, 7, 300]}, {0, 1, 4, 7}),
        ({"tokens": torch.arange(9) == 5}, {0, 1, 5}),
    ):
        one = cache(model, name, **protect)
        feed(model, one, prompt(50), [10, *[1] * 30, 10])
        for layer in held(one):
            for head in layer[0]:
                assert kept | set(range(50 - BLOCK, 50)) <= head


def test_tokens_of_ones_own_belong_to_their_row(model: Any, tmp_path: Any) -> None:
    ids = prompt(40, batch=2)
    one = cache(model, tokens=[[5, 6], [11]])
    feed(model, one, ids, [20, *[1] * 20])
    assert all({5, 6} <= head for head in held(one)[0][0])
    assert all({11} <= head for head in held(one)[0][1])
    one.reorder_cache(torch.tensor([1, 0]))
    one.save(tmp_path / "cache")
    one = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    feed(model, one, ids, [1] * 40)
    assert all({11} <= head for head in held(one)[0][0])
    assert all({5, 6} <= head for head in held(one)[0][1])

    beams = cache(model, tokens=[[5, 6], [11]])
    generate(model, ids, 20, beams, num_beams=2)
    assert all({5, 6} <= head for row in held(beams)[1][:2] for head in row)
    assert all({11} <= head for row in held(beams)[1][2:] for head in row)


def test_tokens_for_another_number_of_rows_are_refused(model: Any) -> None:
    with pytest.raises(KvlearnError, match="positions for 2 rows and the batch has 3"):
        feed(model, cache(model, tokens=[[5], [6]]), prompt(10, batch=3), [10])


def test_a_prompt_that_is_protected_whole_and_does_not_fit_is_refused(model: Any) -> None:
    message = f"the prompt has {{}} tokens .* at most {BUDGET - 2 * BLOCK} beside .* raise the budget or protect less"
    for calls in ([30], [13], [8, 5], [1, 12]):  # at once, or when it grows too long; never in the middle of the answer
        one, tokens = cache(model, prompt="whole"), sum(calls)
        with pytest.raises(KvlearnError, match=message.format(tokens)):
            feed(model, one, prompt(tokens), calls)
    one = cache(model, prompt="whole", tokens=[3, 14])
    with pytest.raises(KvlearnError, match=f"at most {BUDGET - 2 * BLOCK - 1} beside"):
        feed(model, one, prompt(12), [12])
    one = cache(model, prompt="whole")
    feed(model, one, prompt(62), [12, *[1] * 50])
    assert all(set(range(12)) <= head for layer in held(one) for head in layer[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": -1}, "sinks is -1"),
        ({"recent": -2}, "recent is -2"),
        ({"prompt": "all"}, "prompt is 'all'; use 'none', 'whole' or 'ends'"),
        ({"tokens": [-3]}, "whole numbers, 0 or more"),
        ({"tokens": [[1.5]]}, "whole numbers, 0 or more"),
        ({"tokens": torch.zeros(3)}, "give a bool"),
        ({"tokens": 5}, "whole numbers, 0 or more"),
        ({"tokens": [[1], 2]}, "whole numbers, 0 or more"),
        ({"tokens": [True, False]}, "whole numbers, 0 or more"),  # a mask is a tensor
        ({"tokens": "ab"}, "whole numbers, 0 or more"),
        ({"sinks": 2.5}, "sinks is 2.5"),
        ({"recent": "4"}, "recent is '4'"),
    ],
)
def test_protection_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        Protection(**arguments)


@pytest.mark.parametrize(
    ("slots", "block", "protect", "message"),
    [
        (0, None, Protection(), "budget is 0"),
        (16, 0, Protection(), "block is 0"),
        (10**20, None, Protection(), "give a whole number of slots from 1 to 2147483647"),
        (11, 4, Protection(), r"below the 12 .*4 sinks, 4 recent, 0 prompt, 0 own\) plus one block of 4"),
        (80, 8, Protection(prompt="ends"), "64 prompt"),
        (17, 4, Protection(tokens=[[1, 2], list(range(10))]), "6 own"),
    ],
)
def test_budgets_that_cannot_hold_what_is_protected_are_refused(
    slots: int, block: Any, protect: Protection, message: str
) -> None:
    with pytest.raises(KvlearnError, match=message):
        Budget.resolve(slots, block, protect)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 20.0}, "budget is 20.0; give a whole number"),
        ({"budget": "20"}, "budget is '20'; give a whole number"),
        ({"budget": True}, "budget is True; give a whole number"),
        ({"budget": [20, "20"]}, "budget is '20'; give a whole number"),
        ({"budget": {0: 20, 1: 20}}, "give a whole number"),
        ({"block": 4.0}, "block is 4.0; give a whole number"),
        ({"protect": {"sinks": 2}}, r"give kvlearn\.Protection"),
        ({"policy": 3}, "policy is 3; give a name"),
        ({"policy": Policy}, "give a name, a scorer's folder, a Scorer or a Policy"),
        ({"model": "tova"}, "give the transformers model first"),
        ({"allocation": "pooled", "floor": "0.2"}, "floor is '0.2'"),
    ],
)
def test_arguments_of_other_types_are_refused(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message):
        kvlearn.EvictingCache(**{"model": model, "policy": "tova", "budget": BUDGET, **arguments})


def test_whole_numbers_may_be_of_any_type(model: Any) -> None:
    seven: Any = torch.tensor(7)
    assert Protection(sinks=seven, tokens=[7]) == Protection(sinks=7, tokens=[7])
    made = kvlearn.EvictingCache(model, "tova", torch.tensor(BUDGET), block=torch.tensor(BLOCK))  # type: ignore[arg-type]  # which has an __index__
    assert made.options == kvlearn.EvictingCache(model, "tova", BUDGET, block=BLOCK).options


def test_defaults_depend_on_the_budget() -> None:
    assert [Budget.resolve(slots).block for slots in (16, 64, 128, 4096, None)] == [4, 16, 32, 32, 32]
    assert Budget.resolve(64).protect.recent == 16


def test_a_scorer_brings_the_observation_it_was_trained_on(model: Any, recwarn: pytest.WarningsRecorder) -> None:
    made = scorer(model)
    made.config = replace(made.config, block=8, group_reduce="max")
    one = kvlearn.EvictingCache(model, made, 128)
    assert (one.block, one.group_reduce) == (8, "max")
    assert len(recwarn) == 0
    with pytest.warns(
        UserWarning, match=r"trained on blocks of 8 .*'max', and this cache observes blocks of 4 with 'max'"
    ):
        one = kvlearn.EvictingCache(model, made, 16)  # which does not hold blocks of 8 beside what is protected
    assert one.block == 4
    with pytest.warns(UserWarning, match="blocks of 16 with 'mean'"):
        one = kvlearn.EvictingCache(model, made, 128, block=16, group_reduce="mean")
    assert (one.block, one.group_reduce) == (16, "mean")
    other = kvlearn.EvictingCache(model, "tova", 128)
    assert (other.block, other.group_reduce) == (32, "mean")

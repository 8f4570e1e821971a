"""torch.compile: one graph for the decode step, whatever the cache does, and the same tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, NO_RECORDING, assert_bounded, feed, generate, left_pad, policy, prompt
from torch import Tensor
from transformers import DynamicCache

import kvlearn
from kvlearn.attention import cache_argument
from kvlearn.errors import KvlearnError

BUDGET = 16


class Compiled:
    """A model compiled as one graph, and how many graphs that took."""

    def __init__(self, model: Any, backend: str) -> None:
        self.graphs = 0
        self.config = model.config
        torch._dynamo.reset()

        def counting(graph: Any, inputs: list[Tensor]) -> Any:
            self.graphs += 1
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        self.forward = model.forward  # what cache_argument() reads
        self.compiled = torch.compile(model.forward, backend=counting, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def new_cache(model: Any, name: str = "learned", **options: Any) -> Any:
    return kvlearn.EvictingCache(model, policy(name, model), BUDGET, block=BLOCK, **options)


def test_decoding_compiles_nothing_after_warm_up(model: Any) -> None:
    ids, prefill, warm_up = prompt(80), 30, 2  # the first step is compiled for its numbers, the second for any
    compiled, graphs = Compiled(model, "eager"), 0
    for name in NO_RECORDING:  # one graph serves every policy
        expected = feed(model, new_cache(model, name), ids, [prefill, *[1] * 50])
        cache = new_cache(model, name)
        found = [feed(model, cache, ids[:, :prefill], [prefill])]
        found.append(feed(compiled, cache, ids[:, prefill : prefill + warm_up], [1] * warm_up))
        graphs = graphs or compiled.graphs
        assert graphs <= 2
        found.append(feed(compiled, cache, ids[:, prefill + warm_up :], [1] * (50 - warm_up)))
        assert compiled.graphs == graphs, f"a step was compiled again under {name}"
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=0)
        assert_bounded(cache, BUDGET)


def test_copies_of_a_cache_need_no_graph_and_touch_no_one_elses_state(model: Any) -> None:
    ids, more = prompt(40), prompt(9, seed=1)
    compiled, cache = Compiled(model, "eager"), new_cache(model)
    feed(model, cache, ids[:, :30], [30])
    feed(compiled, cache, ids[:, 30:], [1] * 10)
    graphs, twin = compiled.graphs, copy.deepcopy(cache)
    assert torch.equal(feed(compiled, twin, more, [1] * 9), feed(compiled, cache, more, [1] * 9))
    assert compiled.graphs == graphs


def test_generate_by_inductor_compiles_prompt_and_step_once_and_gives_the_same_tokens(
    tiny_llama: Callable[..., Any],
) -> None:
    model = kvlearn.enable(tiny_llama(layers=1))
    ids = prompt(30)
    expected = [generate(model, ids, new, new_cache(model)).sequences.tolist() for new in (20, 40)]
    forward, compiled = model.forward, Compiled(model, "inductor")
    model.forward = compiled.compiled
    try:
        assert [generate(model, ids, new, new_cache(model)).sequences.tolist() for new in (20, 40)] == expected
    finally:
        model.forward = forward
    assert compiled.graphs == 2


def test_chunks_padding_and_compact_positions_compile_too(model: Any) -> None:
    ids, mask = left_pad(prompt(12, seed=1), prompt(30, seed=2))
    ids = torch.cat([ids, prompt(40, batch=2, seed=3)], 1)
    mask = torch.cat([mask, torch.ones(2, 40, dtype=torch.int64)], 1)
    calls = [30, *[1] * 9, BLOCK, 17, *[1] * 10]
    expected = feed(model, new_cache(model, positions="compact"), ids, calls, mask)
    found = feed(Compiled(model, "eager"), new_cache(model, positions="compact"), ids, calls, mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


def test_other_caches_compile_as_before(model: Any) -> None:
    ids = prompt(20)
    compiled = Compiled(model, "eager")
    expected = feed(model, DynamicCache(config=model.config), ids, [12, *[1] * 8])
    found = feed(compiled, DynamicCache(config=model.config), ids, [12, *[1] * 8])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_errors_and_warnings_come_through(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(layers=1, max_position_embeddings=32))
    compiled, cache = Compiled(model, "eager"), new_cache(model)
    feed(compiled, cache, prompt(20), [20])
    with pytest.raises(KvlearnError, match="holds 1 rows and was called with 2"):
        feed(compiled, cache, prompt(1, batch=2), [1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        feed(compiled, new_cache(model), prompt(40), [30, *[1] * 10])
    assert ["33 tokens long" in str(w.message) for w in caught if w.category is UserWarning] == [True]
    assert cache_argument(compiled) == cache_argument(model)  # type: ignore[arg-type]  # a stand-in for a model

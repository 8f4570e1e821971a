"""Language modelling: the divergence is one, and the parts make the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from task_helpers import loaded_model, run_of

from kvlearn.tasks.base import Case
from kvlearn.tasks.lm import LIKELIEST, LanguageModelling, divergence, last_use

BUDGET = 32


@pytest.fixture(scope="module")
def log_probabilities() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(50, 300, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1)


def test_divergence_over_all_tokens_is_that_of_scipy(log_probabilities: tuple[torch.Tensor, torch.Tensor]) -> None:
    log_p, log_q = log_probabilities
    expected = rel_entr(log_p.exp().numpy(), log_q.exp().numpy()).sum(-1)
    np.testing.assert_allclose(divergence(log_p, log_q).numpy(), expected, atol=1e-4)


def test_divergence_over_some_tokens_takes_the_others_as_one(
    log_probabilities: tuple[torch.Tensor, torch.Tensor],
) -> None:
    log_p, log_q = log_probabilities
    top = log_p.topk(20)
    found = divergence(top.values, log_q.gather(-1, top.indices))
    rest = [torch.cat([x.gather(-1, top.indices).exp(), torch.zeros(50, 1)], -1) for x in (log_p, log_q)]
    for x in rest:
        x[:, -1] = 1 - x.sum(-1)
    np.testing.assert_allclose(found.numpy(), rel_entr(rest[0].numpy(), rest[1].numpy()).sum(-1), atol=1e-6)
    assert bool((found <= divergence(log_p, log_q) + 1e-6).all()), "it may not exceed that over all tokens"
    assert bool((divergence(top.values, top.values) == 0).all())


def test_last_use_counts_tokens_back() -> None:
    assert last_use(torch.tensor([[7, 8, 7, 7, 9, 8], [1, 2, 3, 1, 1, 1]])).tolist() == [
        [0, 0, 2, 1, 0, 4],
        [0, 0, 0, 3, 1, 1],
    ]


def _measured(loaded: Any, policy: str, budget: int | None) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    cases = [Case(f"doc{i}", "made-up", torch.randint(256, (160,), generator=generator)) for i in range(2)]
    task = LanguageModelling()
    full = task.full(run_of(loaded, block=8), cases)
    found = task.measure(run_of(loaded, policy, budget, block=8), cases, full, BUDGET)
    return [{one.metric: one for one in measurements} for measurements in found]


def test_parts_add_up_to_the_whole(tiny_llama: Callable[..., Any]) -> None:
    for found in _measured(loaded_model(tiny_llama(vocabulary=257)), "ema", BUDGET):
        assert found["nll"].tokens == found["kl"].tokens == 160 - BUDGET
        by_use = ["nll/first-use", "nll/used-within-budget", "nll/used-beyond-budget"]
        for names in (["nll/low-entropy", "nll/high-entropy"], by_use):
            parts = [found[name] for name in names]
            assert sum(part.tokens for part in parts) == found["nll"].tokens
            for value in ("value", "full_value"):
                total = sum(part.tokens * getattr(part, value) for part in parts)
                assert total / found["nll"].tokens == pytest.approx(getattr(found["nll"], value), rel=1e-5)
        assert found["kl"].value > 0.001, "32 of 160 slots change what is predicted"


def test_the_full_cache_diverges_from_nothing(tiny_llama: Callable[..., Any]) -> None:
    for found in _measured(loaded_model(tiny_llama(vocabulary=257)), "full", None):
        assert found["kl"].value == pytest.approx(0.0, abs=1e-5)
        assert found["nll"].value == pytest.approx(found["nll"].full_value, abs=1e-4)


def test_the_full_run_is_the_stock_model(tiny_llama: Callable[..., Any]) -> None:
    loaded = loaded_model(tiny_llama(vocabulary=257))
    ids = torch.randint(256, (1, 700), generator=torch.Generator().manual_seed(5))  # fed in two calls
    full = LanguageModelling().full(run_of(loaded), [Case("doc", "made-up", ids[0])])
    with torch.inference_mode():
        log_p = loaded.model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(full.nll, -log_p.gather(-1, ids[:, 1:, None])[..., 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(full.entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(full.log_p, log_p.topk(LIKELIEST).values, atol=1e-4, rtol=0)

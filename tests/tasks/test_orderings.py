"""Orderings that everybody finds, on a real model: by margins well above noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvlearn import EvictingCache, enable
from kvlearn.compare import Comparison, Settings, make_cases
from kvlearn.rows import RowStore
from kvlearn.shipped import shipped
from kvlearn.tasks.base import Material, Run
from kvlearn.tasks.lm import LanguageModelling

pytestmark = pytest.mark.model


def _values(loaded: Any, path: Path, settings: Settings, metric: str, docs: int, **options: Any) -> dict[str, float]:
    """Mean of a metric by policy, and of the full cache as ``reference``."""
    cases = make_cases(loaded, settings, docs=docs, **options)
    with RowStore(path / "rows.jsonl") as store:
        Comparison(loaded, settings, cases, store).run()
        rows = [row for row in store.rows if row["metric"] == metric]
    assert not [row["error"] for row in store.rows if row.get("error")]
    found: dict[str, list[float]] = {"reference": [row["full_value"] for row in rows]}
    for row in rows:
        found.setdefault(row["policy"], []).append(row["value"])
    return {policy: sum(values) / len(values) for policy, values in found.items()}


def test_oracle_learned_ema_random_on_text(smollm2: Any, tmp_path: Path) -> None:
    scorer = str(shipped("checkpoints", "smollm2-135m"))
    settings = Settings(policies=("oracle", scorer, "ema", "random"), budgets=(128,), window=576, batch=3)
    value = _values(smollm2, tmp_path, settings, "nll", 3, data="torch-docs")
    loss = {policy: value[policy] - value["reference"] for policy in value}
    assert loss["oracle"] < 0.5 * loss[scorer], loss
    assert loss[scorer] < 0.95 * loss["ema"], loss
    assert loss["ema"] < 0.7 * loss["random"], loss


def test_streaming_forgets_the_passkey_that_the_full_cache_and_the_oracle_recall(smollm2: Any, tmp_path: Path) -> None:
    settings = Settings(
        policies=("full", "streaming", "oracle"), budgets=(128,), tasks=("passkey",), window=576, batch=2
    )
    value = _values(smollm2, tmp_path, settings, "exact_match", 4)
    assert value["full"] == value["reference"] >= 0.9
    assert value["oracle"] >= 0.75
    assert value["streaming"] == 0.0, "every key is hundreds of tokens before the question, and 128 slots are kept"


def test_the_full_cache_is_the_stock_model(smollm2: Any) -> None:
    """Up to the rounding of bfloat16, in which another order of sums gives another result."""
    cases = LanguageModelling().cases(Material.of(smollm2, docs=1, window=256))
    model = enable(smollm2.model)
    full = LanguageModelling().full(Run(model, smollm2.tokenizer, EvictingCache(model)), cases)
    ids = cases[0].input_ids[None]
    with torch.inference_mode():
        log_p = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    stock = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    assert float((full.nll - stock).abs().mean()) < 0.02
    assert float(full.nll.mean()) == pytest.approx(float(stock.mean()), abs=0.005)

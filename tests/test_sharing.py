"""How a budget is shared out, by the names that commands take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlearn import EvictingCache, Protection, enable
from kvlearn.errors import KvlearnError
from kvlearn.sharing import share_out

NARROW = {"block": 8, "protect": Protection(sinks=2)}


@pytest.mark.parametrize("allocation", ["uniform", "pooled", "scorer"])
def test_what_the_cache_knows_is_left_to_it(tiny_llama: Callable[..., Any], allocation: str) -> None:
    assert share_out(tiny_llama(), 48, allocation) == {"budget": 48, "allocation": allocation}


def test_layers_share_a_budget(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = enable(tiny_llama())
    (tmp_path / "shares.json").write_text("[1, 2]")
    found = share_out(model, 48, str(tmp_path / "shares.json"), **NARROW)
    assert found == {"budget": [32, 64], "allocation": "uniform"}
    pyramid = share_out(model, 48, "pyramid", **NARROW)["budget"]
    assert sum(pyramid) == 96
    assert pyramid[0] > pyramid[1]
    cache = EvictingCache(model, "ema", **share_out(model, 48, "pyramid", **NARROW), **NARROW)
    assert [budget.slots for budget in cache.budgets] == pyramid


@pytest.mark.parametrize(
    ("budget", "allocation", "message"),
    [
        (48, "pyramids", "cannot read an allocation from pyramids"),
        (48, "three.json", "shares for 3 layers and the model has 2"),
        (None, "pyramid", "give a budget as well"),
        (9, "pyramid", "budget is 9 slots, below the 18"),
    ],
)
def test_what_cannot_be_shared_is_told(
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
    allocation: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.json").write_text("[1, 2, 3]")
    with pytest.raises(KvlearnError, match=message):
        share_out(tiny_llama(), budget, allocation, **NARROW)

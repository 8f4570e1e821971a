"""select: exact, whatever the ties, by both kernels."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_helpers import Guarded
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.select import INFEASIBLE, NAN, select, triton

VALUES = torch.tensor([-torch.inf, -3.4028234663852886e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.5, 3.4e38, torch.inf])


def scene(batch: int, heads: int, slots: int, kinds: int, empty: float, kept: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, slots)
    score = VALUES[torch.randint(len(VALUES) - kinds, len(VALUES), shape, generator=generator)]
    pos = torch.rand(batch, heads, 3 * slots + 5, generator=generator).argsort(-1)[..., :slots].int()
    pos[torch.rand(shape, generator=generator) < empty] = -1
    return [score, pos, torch.rand(shape, generator=generator) < kept]


def by_sorting(score: Tensor, pos: Tensor, protected: Tensor, count: int) -> list[int]:
    """The definition for one row and head, by Python's own sort."""
    rank = score.clamp(min=-3.4028234663852886e38, max=3.4028234663852886e38)

    def key(slot: int) -> tuple[float, ...]:
        if pos[slot] < 0:
            return (0.0, float(slot), 0.0)
        return (2.0 if protected[slot] else 1.0, 0.0 if protected[slot] else float(rank[slot]), float(pos[slot]))

    return sorted(range(len(pos)), key=key)[:count]


@settings(max_examples=12)
@given(
    slots=st.sampled_from([1, 17, 33, 70]),
    kinds=st.integers(1, len(VALUES)),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    kept=st.sampled_from([0.0, 0.4, 1.0]),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_both_implementations_sort(slots: int, kinds: int, empty: float, kept: float, share: float, seed: int) -> None:
    count = round(share * slots)
    score, pos, protected = scene(1, 2, slots, kinds, empty, kept, seed)
    expected = [by_sorting(score[0, h], pos[0, h], protected[0, h], count) for h in range(2)]
    out = Guarded(1, 2, count, dtype=torch.int64)
    select(score, pos, protected, count, out=out.tensor, impl="triton")
    out.check()
    assert out.tensor[0].tolist() == expected
    assert select(score, pos, protected, count, impl="reference")[0].tolist() == expected


def test_ranking_serves_many_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    score, pos, protected = scene(1, 2, 70, 4, 0.2, 0.3, seed=5)
    expected = select(score, pos, protected, 40, impl="reference")
    assert torch.equal(select(score, pos, protected, 40, impl="triton"), expected)  # top-k
    monkeypatch.setattr(triton, "FEW", 16)
    out = Guarded(1, 2, 40, dtype=torch.int64)
    select(score, pos, protected, 40, out=out.tensor, impl="triton")  # ranking
    out.check()
    assert torch.equal(out.tensor, expected)


def test_views_of_a_larger_store() -> None:
    score, pos, protected = scene(2, 2, 40, 6, 0.2, 0.3, seed=1)
    wide = torch.randn(2, 2, 80)
    wide[..., ::2] = score
    found = select(wide[..., ::2], pos, protected, 8, impl="triton")
    assert torch.equal(found, select(score, pos, protected, 8, impl="reference"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores(dtype: torch.dtype) -> None:
    score, pos, protected = scene(1, 1, 33, 5, 0.0, 0.0, seed=2)
    narrow = score.clamp(-3e4, 3e4).to(dtype)
    assert torch.equal(
        select(narrow, pos, protected, 9, impl="triton"), select(narrow, pos, protected, 9, impl="reference")
    )


@pytest.mark.parametrize("few", [16, 0], ids=["top-k", "ranking"])
@pytest.mark.parametrize(
    ("spoil", "count", "fault"),
    [("nothing", 3, 0), ("nan", 3, NAN), ("nan in an empty slot", 3, 0), ("kept", 3, INFEASIBLE)],
)
def test_faults_are_flagged_and_nothing_raises(
    spoil: str, count: int, fault: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "FEW", few)
    score, pos, protected = torch.rand(1, 2, 9), torch.arange(9).int().expand(1, 2, 9).clone(), torch.zeros(1, 2, 9)
    if spoil.startswith("nan"):
        score[0, 1, 4] = float("nan")
    if spoil.endswith("empty slot"):
        pos[0, 1, 4] = -1
    if spoil == "kept":
        protected[0, 1, :7] = 1
    found = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    order = [
        select(score, pos, protected.bool(), count, fault=f, impl=impl)  # type: ignore[arg-type]  # two literals
        for f, impl in zip(found, ("triton", "reference"), strict=True)
    ]
    assert torch.equal(*order)
    assert [int(f) for f in found] == [fault, fault]
    if spoil == "nan":
        assert order[0][0, 1, 0] == 4, "NaN goes first"


def test_a_fault_is_not_forgotten() -> None:
    score, pos, protected = torch.rand(1, 1, 4), torch.arange(4).int().expand(1, 1, 4), torch.zeros(1, 1, 4).bool()
    for impl in ("triton", "reference"):
        fault = torch.tensor([NAN], dtype=torch.int32)
        select(score, pos, protected, 2, fault=fault, impl=impl)  # type: ignore[arg-type]  # two literals
        assert int(fault) == NAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 6}, "count is 6; it must be from 0 to the 5 slots"),
        ({"pos": torch.zeros(1, 1, 5)}, "pos is torch.float32; it must be torch.int32"),
        ({"out": torch.zeros(1, 1, 3, dtype=torch.int64)}, r"out has shape \[1, 1, 3\]; it must be \[1, 1, 2\]"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "score": torch.zeros(1, 1, 5),
        "pos": torch.zeros(1, 1, 5, dtype=torch.int32),
        "protected": torch.zeros(1, 1, 5, dtype=torch.bool),
        "count": 2,
    }
    with pytest.raises(KvlearnError, match=message):
        select(**{**arguments, **change})

"""Future mass against a loop over blocks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlearn import history, targets
from kvlearn.errors import KvlearnError


def by_hand(mean_code: Tensor, peak_code: Tensor, n: int, block: int, horizon: int | None, reduce: str) -> Tensor:
    last = None if horizon is None else n + horizon // block
    blocks = history.decode_mass((peak_code if "peak" in reduce else mean_code)[n:last])
    if not len(blocks):
        return torch.zeros(mean_code.shape[1:])
    if "discounted" in reduce:
        most = torch.stack([mass * 0.985**i for i, mass in enumerate(blocks)]).amax(0)
        return most if "peak" in reduce else most + 0.1 * sum(mass * 0.97**i for i, mass in enumerate(blocks))
    return blocks.double().mean(0).float() if reduce == "mean" else blocks.amax(0)


@given(st.data())
def test_future_mass(data: st.DataObject) -> None:
    blocks, block = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 4]))
    reduce = data.draw(st.sampled_from(get_args(targets.Reduce)))
    endless = st.none()
    limited = st.integers(1, 12).map(lambda n: n * block)
    horizon = data.draw(endless if reduce in targets.DISCOUNTED else st.one_of(endless, limited))
    codes = torch.randint(0, 256, (2, blocks, 2, 3, blocks * block), dtype=torch.uint8)
    options: dict[str, Any] = {"block": block, "horizon": horizon, "reduce": reduce}
    table = targets.future_table(*codes, **options)
    assert table.shape == (blocks + 1, 2, 3, blocks * block)
    assert table.dtype == torch.float32
    for n in range(blocks + 1):
        expected = by_hand(*codes, n, block, horizon, reduce)
        torch.testing.assert_close(table[n], expected, rtol=1e-5, atol=0)
        one = targets.future_mass(*codes, n, **options)
        assert torch.equal(one, table[n, ..., : n * block])
    some = data.draw(st.lists(st.integers(0, blocks), max_size=4))
    assert torch.equal(targets.future_table(*codes, some, **options), table[some])


def test_a_small_mass_after_a_large_one_is_not_lost() -> None:
    codes = torch.zeros(64, 1, 1, 64, dtype=torch.uint8)
    codes[:32], codes[32:] = 255, 1
    found = targets.future_mass(codes, codes, 40, block=1)
    torch.testing.assert_close(found, history.decode_mass(torch.ones(1, 1, 40)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 6}, "horizon is 6 queries; give a multiple of the block of 4"),
        ({"horizon": 0}, "horizon is 0"),
        ({"boundaries": [3]}, r"boundaries are \[3\]; this window has 0 to 2"),
        ({"boundaries": [-1]}, "boundaries are"),
        ({"reduce": "median"}, "reduce is 'median'; use one of mean, max, peak"),
        ({"reduce": "discounted", "horizon": 4}, "horizon is 4 queries, and 'discounted' mass has none"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    codes = torch.zeros(2, 1, 1, 8, dtype=torch.uint8)
    with pytest.raises(KvlearnError, match=message):
        targets.future_table(codes, codes, **{"block": 4, **options})

"""Future mass against a loop over blocks."""

from __future__ import annotations

import math
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
    if reduce == "soft-max":  # in the form that no power makes small
        return ((4 * blocks.double().log()).logsumexp(0).sub(math.log(len(blocks))) / 4).exp().float()
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


@given(st.data())
def test_the_soft_maximum_lies_between_mean_and_maximum(data: st.DataObject) -> None:
    blocks, sharpness = data.draw(st.integers(1, 9)), data.draw(st.floats(1, 31))
    options: dict[str, Any] = {"block": 1, "horizon": data.draw(st.one_of(st.none(), st.integers(1, 12)))}
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=blocks, max_size=blocks)), dtype=torch.uint8)
    codes = codes.view(-1, 1, 1, 1).repeat(1, 1, 1, blocks)

    def of(reduce: targets.Reduce, sharpness: float = 4.0, codes: Tensor = codes) -> Tensor:
        return targets.future_table(codes, codes, reduce=reduce, sharpness=sharpness, **options)

    soft, near = of("soft-max", sharpness), 1 + 1e-6  # where all blocks are equal it is their mean, but for rounding
    assert bool((of("mean") <= soft * near).all())
    assert bool((soft <= of("max") * near).all())
    assert bool((soft <= of("soft-max", sharpness + 1) * near).all()), "what is sharper is closer to the maximum"
    torch.testing.assert_close(of("soft-max", 1), of("mean"), rtol=1e-6, atol=0)
    share = blocks ** (-1 / targets.SHARPEST)
    assert bool((of("soft-max", targets.SHARPEST) >= of("max") * share / near).all())
    more = codes.clone()
    more[data.draw(st.integers(0, blocks - 1))] = 255
    assert bool((soft <= of("soft-max", sharpness, more) * near).all()), "more mass in a block is never less in all"


def factor(stacked: Tensor) -> Tensor:
    """``[..., D, D]`` with the lengths of ``[..., R, D]``."""
    return torch.linalg.qr(stacked, mode="r").R


def test_what_a_value_writes_bounds_what_it_adds_to_the_output() -> None:
    slices, values = torch.randn(2, 3, 4, 24, 8), torch.randn(2, 3, 50, 8)  # [L, H, G, hidden, D], [L, H, T, D]
    found = targets.value_weights("output", values, factor(slices.flatten(2, 3)))
    written = torch.einsum("lhgod,lhtd->lhtgo", slices, values)
    torch.testing.assert_close(found, written.flatten(-2).norm(dim=-1))
    mass = torch.rand(2, 3, 50, 4) ** 4
    added = (mass[..., None] * written).sum(-2).norm(dim=-1)
    assert bool((added <= mass.norm(dim=-1) * found * (1 + 1e-5)).all())
    torch.testing.assert_close(targets.value_weights("norm", values), values.norm(dim=-1))


def test_deviation_is_what_the_output_changes_by_when_a_token_goes() -> None:
    weight, values = torch.randn(1, 1, 24, 8), torch.randn(1, 1, 30, 8) + 2
    mass = (4 * torch.randn(3, 1, 1, 30)).softmax(-1)
    found = targets.value_weights("deviation", values, factor(weight), mass)
    assert found.shape == (3, 1, 1, 30)
    for n, token in ((0, 4), (2, 29)):
        kept = [i for i in range(30) if i != token]
        share = mass[n, 0, 0] / mass[n, 0, 0, kept].sum()  # the others take over what it was given
        change = share[kept] @ values[0, 0, kept] - mass[n, 0, 0] @ values[0, 0]
        expected = float((weight[0, 0] @ change).norm())
        a = float(mass[n, 0, 0, token])
        assert a / (1 - a) * float(found[n, 0, 0, token]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    none = targets.value_weights("deviation", values, factor(weight), torch.zeros(1, 1, 1, 30))
    torch.testing.assert_close(none[0], targets.value_weights("output", values, factor(weight)))


def test_weights_without_what_they_are_made_of_are_refused() -> None:
    values = torch.randn(1, 1, 3, 4)
    for value in ("output", "deviation"):
        with pytest.raises(KvlearnError, match=f"'{value}', which needs the model's output projection"):
            targets.value_weights(value, values)  # type: ignore[arg-type]  # one of the words
    with pytest.raises(KvlearnError, match="needs the mean mass"):
        targets.value_weights("deviation", values, torch.eye(4).view(1, 1, 4, 4))
    with pytest.raises(KvlearnError, match="value is 'size'; use one of norm, output, deviation"):
        targets.value_weights("size", values)  # type: ignore[arg-type]  # that is the mistake


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 6}, "horizon is 6 queries; give a multiple of the block of 4"),
        ({"horizon": 0}, "horizon is 0"),
        ({"boundaries": [3]}, r"boundaries are \[3\]; this window has 0 to 2"),
        ({"boundaries": [-1]}, "boundaries are"),
        ({"reduce": "median"}, "reduce is 'median'; use one of mean, soft-max, max, peak"),
        ({"reduce": "soft-max", "sharpness": 0.5}, "sharpness is 0.5; give a number from 1 to 32"),
        ({"reduce": "soft-max", "sharpness": float("nan")}, "sharpness is nan"),
        ({"reduce": "discounted", "horizon": 4}, "horizon is 4 queries, and 'discounted' mass has none"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    codes = torch.zeros(2, 1, 1, 8, dtype=torch.uint8)
    with pytest.raises(KvlearnError, match=message):
        targets.future_table(codes, codes, **{"block": 4, **options})

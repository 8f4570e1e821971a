"""score: the Triton kernel's features and network against PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_helpers import Guarded, assert_within_budget
from torch import Tensor

from kvlearn import features, history
from kvlearn.errors import KvlearnError
from kvlearn.kernels.score import Weights, score
from kvlearn.kernels.score import reference as reference_module


def weights(heads: int, hidden: int, inputs: int, dtype: torch.dtype = torch.float32) -> Weights:
    units = 1 + hidden
    return Weights(
        torch.randn(heads, units, len(features.DYNAMIC), dtype=dtype) / 4,
        torch.randn(heads, units, inputs, dtype=dtype) / 4,
        torch.randn(heads, units, 1, dtype=dtype),
        torch.randn(heads, 1, hidden, dtype=dtype) if hidden else None,
    )


def scene(batch: int, heads: int, slots: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state = torch.rand(batch, heads, len(history.FIELDS), slots)
    state[:, :, :7] = torch.exp2(-25 * state[:, :, :7]) * (torch.rand(batch, heads, 7, slots) < 0.8)  # masses, some 0
    state[:, :, 8:] *= 3000
    pos = torch.rand(batch, heads, 4 * slots).argsort(-1)[..., :slots].int()
    pos[..., 0], pos[..., 1:3] = 4 * slots, -1
    length = torch.tensor([4 * slots + 1, 5 * slots + 700])[:batch]
    return state.to(history.DTYPE), pos, length, torch.randn(batch, heads, slots, inputs).half()


@pytest.mark.parametrize(
    ("batch", "heads", "slots", "hidden", "inputs"),
    [(2, 2, 33, 5, 18), (1, 3, 17, 32, 2), (1, 1, 70, 0, 2), (1, 1, 33, 0, 18), (1, 2, 17, 40, 70)],
)
def test_agrees_with_float64(batch: int, heads: int, slots: int, hidden: int, inputs: int) -> None:
    state, pos, length, static = scene(batch, heads, slots, inputs)
    network = weights(heads, hidden, inputs)
    out = Guarded(batch, heads, slots)
    poisoned = static.masked_fill((pos < 0)[..., None], float("nan"))
    score(state, pos, length, poisoned, network, out=out.tensor, impl="triton")
    out.check()
    eager = score(state, pos, length, static, network, impl="reference")
    dynamic = features.dynamic_features(state, pos, length).double()  # float32 features: their rounding is eager's
    doubles = network.map(lambda t: t.double().repeat(batch, 1, 1))
    z = torch.baddbmm(doubles.bias, doubles.dynamic, dynamic.flatten(0, 1).transpose(1, 2))
    z = torch.baddbmm(z, doubles.static, static.double().flatten(0, 1).transpose(1, 2))
    exact = z[:, 0]
    if doubles.out is not None:
        exact = exact + (doubles.out @ torch.nn.functional.gelu(z[:, 1:]))[:, 0]
    held = pos >= 0
    assert_within_budget(out.tensor[held], eager[held], exact.view_as(eager)[held], slack=32)


def test_young_tokens_keep_their_digits() -> None:
    """The correction for exposure, 1 - 2 ** (-age / 1024), is 0.0007 for a new token."""
    state, pos, length, static = scene(1, 1, 17, 2)
    pos[...] = torch.arange(17)
    length = torch.tensor([17])
    network = weights(1, 0, 2)
    network.dynamic.zero_()
    network.dynamic[0, 0, features.DYNAMIC.index("log_ema1024")] = 1.0
    found = score(state, pos, length, static * 0, network, impl="triton")
    exposure = -torch.expm1(-(17 - pos).double() * math.log(2) / 1024)
    exact = torch.log(history.field(state, "ema1024").double() / exposure + features.FLOOR)
    torch.testing.assert_close(found.double() - network.bias[0, 0].double(), exact, rtol=0, atol=5e-6)


def test_int8_static_inputs_with_the_scale_in_the_weights() -> None:
    state, pos, length, _ = scene(1, 2, 33, 6)
    whole = torch.randint(-127, 128, (1, 2, 33, 6), dtype=torch.int8)
    network = weights(2, 4, 6)
    scaled = network._replace(static=network.static * 0.02)
    found = score(state, pos, length, whole, scaled, impl="triton")
    expected = score(state, pos, length, (whole.float() * 0.02), network, impl="reference")
    held = pos >= 0
    torch.testing.assert_close(found[held], expected[held], rtol=1e-4, atol=1e-4)


def test_views_of_larger_stores() -> None:
    state, pos, length, static = scene(1, 2, 40, 5)
    network = weights(2, 4, 5)
    found = score(state[..., :33], pos[..., :33], length, static[:, :, :33], network, impl="triton")
    expected = score(state, pos, length, static, network, impl="triton")[..., :33]
    assert torch.equal(found, expected)


def test_the_kernel_refuses_features_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "DYNAMIC", features.DYNAMIC[::-1])
    with pytest.raises(RuntimeError, match="does not know the features"):
        score(*scene(1, 1, 4, 2), weights(1, 0, 2), impl="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"static": torch.zeros(1, 2, 4, 3)}, r"weights.static has shape \[2, 1, 2\]; it must be \[2, 1, 3\]"),
        ({"length": torch.zeros(2, dtype=torch.int64)}, r"length has shape \[2\]; it must be \[1\]"),
        ({"state": torch.zeros(1, 2, 9, 4).half()}, "state has shape"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    state, pos, length, static = scene(1, 2, 4, 2)
    arguments: dict[str, Any] = {"state": state, "pos": pos, "length": length, "static": static}
    with pytest.raises(KvlearnError, match=message):
        score(**{**arguments, **change}, weights=weights(2, 0, 2))


def test_the_reference_is_the_definition_that_scorers_use() -> None:
    from kvlearn.scorers import bank

    assert bank.evaluate is reference_module.evaluate

"""How keys and values are rounded, and what the history's mean is a mean of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlearn import features, history


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1.0, 300.0]), dim=st.integers(1, 70))
def test_rounding_is_close_and_done_once(seed: int, scale: float, dim: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(3, dim, generator=generator) * scale
    stored = features.encode_vectors(vectors)
    assert (stored.codes.dtype, stored.scale.dtype) == (torch.int8, torch.float16)
    rounded = features.round_vectors(vectors)
    assert torch.equal(rounded, stored.decode())
    largest = vectors.abs().amax(-1, keepdim=True)
    assert bool(((rounded - vectors).abs() <= largest / 250 + 127 * 2**-25).all()), (
        "half a step, and half a bit of the scale"
    )
    normal = stored.scale >= torch.finfo(torch.float16).smallest_normal
    assert torch.equal(features.round_vectors(rounded)[normal], rounded[normal]), "rounding twice is rounding once"


@pytest.mark.parametrize("number", [0.0, 1e-9, 3e-6, 1e30, torch.inf])
def test_extreme_vectors_stay_finite(number: float) -> None:
    vectors = torch.tensor([[number, -number, 0.0]])
    stored = features.encode_vectors(vectors)
    assert bool(torch.isfinite(stored.decode()).all())
    assert torch.equal(features.round_vectors(vectors), stored.decode())
    scalars = features.static_scalars(features.layer_vectors(vectors[None, None], vectors[None, None]))
    assert bool(torch.isfinite(scalars.half()).all())


def test_a_vector_that_is_no_number_stays_none() -> None:
    vectors = torch.tensor([[1.0, torch.nan]])
    assert bool(torch.isnan(features.round_vectors(vectors)).all()), "a fault of the model must show in the score"


def test_scalars_belong_to_their_head_and_token() -> None:
    keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    scalars = features.static_scalars(features.layer_vectors(keys, values))
    assert scalars.shape == (2, 3, 5, 2)
    torch.testing.assert_close(scalars[..., 0], keys.norm(dim=-1).log(), atol=0.02, rtol=0)
    torch.testing.assert_close(scalars[..., 1], values.norm(dim=-1).log(), atol=0.02, rtol=0)


def test_the_mean_is_over_all_queries_since_the_token_was_written() -> None:
    block, tokens = 8, 24
    mass = torch.rand(tokens, tokens).tril_()  # [query, token]: none before the token is written
    state = history.empty((1, 1, tokens))
    for end in range(block, tokens + 1, block):
        own = mass[end - block : end]
        codes = history.encode_mass(own.mean(0)), history.encode_mass(own.amax(0))
        age = (end - torch.arange(tokens)).view(1, 1, -1)
        state = history.observe(state, codes[0][None, None], codes[1][None, None], torch.tensor([block]), age)
    expected = mass.sum(0) / (tokens - torch.arange(tokens))
    torch.testing.assert_close(history.field(state, "mean")[0, 0], expected, rtol=0.03, atol=0)


def test_stored_vectors_are_those_of_the_layer() -> None:
    keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    stored = features.stored_vectors(features.encode_vectors(keys), features.encode_vectors(values))
    assert torch.equal(stored, features.layer_vectors(keys, values))

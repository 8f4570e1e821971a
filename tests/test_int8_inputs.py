"""Score inputs stored as int8: half the memory, nearly the same scores, and everything a cache does with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvlearn
from kvlearn import Scorer, features
from kvlearn.attention import cache_argument
from kvlearn.errors import KvlearnError
from kvlearn.kernels.score import evaluate
from kvlearn.policies import Learned, resolve

DYNAMIC = len(features.DYNAMIC)


def calibrated(model: Any, **options: Any) -> Scorer:
    """A scorer whose inputs are standardised by data and whose every weight counts."""
    scorer = Scorer.for_model(model, hidden=5, key_rank=3, **options)
    layers, heads, dim = len(scorer.config.layers), scorer.config.heads, scorer.config.head_dim
    shape = (layers, heads, 500)
    scorer.fit_inputs(torch.randn(*shape, DYNAMIC), features.layer_vectors(*some_vectors(shape, dim)))
    with torch.no_grad():
        for parameter in (scorer.skip, scorer.w1, scorer.w2):
            assert parameter is not None
            parameter.normal_(std=0.3)
    return scorer.eval()


def some_vectors(shape: tuple[int, int, int], dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * torch.randn(*shape, dim) + 1, torch.randn(*shape, dim) + 1


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


@torch.no_grad()
@pytest.mark.parametrize("encoder", ["key", "layer"])
def test_scores_are_nearly_those_of_float16(model: Any, encoder: str) -> None:
    scorer = calibrated(model, encoder=encoder)
    heads, dim = scorer.config.heads, scorer.config.head_dim
    for layer in scorer.config.layers:
        static = scorer.static(layer, *some_vectors((1, heads, 200), dim))
        codes = scorer.encode(layer, static)
        assert codes.dtype == torch.int8
        assert codes.unique().numel() > 100, "most codes are used"
        dynamic = torch.randn(heads, 200, DYNAMIC)
        whole = evaluate(scorer.weights(layer), dynamic, static[0])
        coded = evaluate(scorer.weights(layer, encoded=True), dynamic, codes[0])
        # An input is off by up to half a code, 1/48 of its deviation; the weights are 0.3.
        assert float((whole - coded).abs().max()) < 0.05 * float(whole.std())
        assert not torch.equal(whole, coded)


def test_outliers_are_cut_off_and_never_wrap_round(model: Any) -> None:
    scorer = calibrated(model)
    heads, inputs = scorer.config.heads, scorer.config.static_size
    far = torch.tensor([-6e4, 6e4]).half()[None, None, :, None].expand(1, heads, 2, inputs)
    assert scorer.encode(0, far)[:, :, 0].eq(-127).all()
    assert scorer.encode(0, far)[:, :, 1].eq(127).all()


def test_a_cache_stores_bytes_and_saves_them(model: Any, tmp_path: Path) -> None:
    scorer, argument = calibrated(model), cache_argument(model)
    caches = {
        inputs: kvlearn.EvictingCache(model, Learned(scorer, inputs=inputs), budget=20, block=4)  # type: ignore[arg-type]  # two literals
        for inputs in ("float16", "int8")
    }
    ids = torch.randint(1, 200, (2, 40))
    with torch.no_grad():
        for cache in caches.values():
            for part in ids[:, :30], *ids[:, 30:].split(1, dim=1):
                model(part, **{argument: cache})
    layers = [cache.evicting_layers()[0] for cache in caches.values()]
    assert layers[1].static.dtype == torch.int8
    assert layers[0].static.nbytes == 2 * layers[1].static.nbytes
    assert layers[1].static.any(), "written with each token"

    caches["int8"].save(tmp_path / "cache.safetensors")
    loaded = kvlearn.EvictingCache.load(tmp_path / "cache.safetensors", model)
    more = torch.randint(1, 200, (2, 9))
    with torch.no_grad():
        for token in more.split(1, dim=1):
            logits = [model(token, **{argument: cache}).logits for cache in (caches["int8"], loaded)]
            assert torch.equal(*logits)
    assert loaded.policy.inputs == "int8"


def test_the_choice_can_be_written_in_a_name(model: Any, tmp_path: Path) -> None:
    calibrated(model).save_pretrained(tmp_path / "scorer")
    folder = str(tmp_path / "scorer")
    policy = resolve(f"{folder}:inputs=int8")
    assert isinstance(policy, Learned)
    assert (policy.inputs, policy.label) == ("int8", f"{folder}:inputs=int8")
    assert resolve(folder, inputs="int8").inputs == "int8"  # type: ignore[attr-defined]  # a learned policy
    with pytest.raises(KvlearnError, match="option 'inputs' is 'int4'; it takes 'float16' or 'int8'"):
        resolve(f"{folder}:inputs=int4")
    with pytest.raises(KvlearnError, match="did you mean 'inputs'"):
        resolve(folder, input="int8")
    with pytest.raises(KvlearnError, match="use float16 or int8"):
        Learned(policy.scorer, inputs="int4")  # type: ignore[arg-type]  # wrong on purpose

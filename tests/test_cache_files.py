"""State travels with its cache: saved and loaded, copied, reset."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cache_helpers import BLOCK, EVICTING, NO_RECORDING, feed, generate, held, left_pad, policy, prompt, snapshot
from safetensors import safe_open
from safetensors.torch import save_file
from test_cases import Constant

import kvlearn
from kvlearn.errors import KvlearnError
from kvlearn.state import FORMAT

BUDGET = 16
CALLS = [30, *[1] * 13]  # ends within a block: planned slots and kept queries travel too


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    return kvlearn.enable(tiny_llama())


def filled(model: Any, name: str, ids: torch.Tensor, mask: Any = None) -> Any:
    cache = kvlearn.EvictingCache(model, policy(name, model, ids, mask), BUDGET, block=BLOCK)
    feed(model, cache, ids[:, :43], CALLS, mask)
    return cache


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = left_pad(prompt(7, seed=1), prompt(30, seed=2))
    return torch.cat([ids, prompt(33, batch=2, seed=3)], 1), torch.cat([mask, torch.ones(2, 33, dtype=torch.int64)], 1)


@pytest.mark.parametrize("name", NO_RECORDING)
def test_case_16_a_saved_cache_goes_on_identically(model: Any, name: str, tmp_path: Path) -> None:
    ids, mask = padded()
    cache = filled(model, name, ids, mask)
    cache.save(tmp_path / "half.safetensors")
    loaded = kvlearn.EvictingCache.load(tmp_path / "half.safetensors", model)
    assert loaded.policy.label == cache.policy.label
    assert loaded.options == cache.options
    before, after = snapshot(cache), snapshot(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    rest = [1] * 12, 8
    for one in rest:
        calls = one if isinstance(one, list) else [one]
        start, end = cache.get_seq_length(), cache.get_seq_length() + sum(calls)
        ours = feed(model, loaded, ids[:, start:end], calls, mask)
        assert torch.equal(ours, feed(model, cache, ids[:, start:end], calls, mask))
    assert held(loaded) == held(cache)
    assert loaded.stats() == cache.stats()


GO_ON = """
import sys, torch, kvlearn
from transformers import LlamaForCausalLM
model = kvlearn.enable(LlamaForCausalLM.from_pretrained(sys.argv[1]).eval())
cache = kvlearn.EvictingCache.load(sys.argv[2], model)
ids = torch.tensor(eval(sys.argv[3]))
from kvlearn.attention import cache_argument
new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                     **{cache_argument(model): cache})
print(new[0].tolist())
"""


def test_case_16_in_another_process(model: Any, tmp_path: Path) -> None:
    cache = kvlearn.EvictingCache(model, policy("learned", model), BUDGET, block=BLOCK)
    so_far = generate(model, prompt(30), 10, cache).sequences
    cache.save(tmp_path / "cache.safetensors")
    model.save_pretrained(tmp_path / "model")
    ids = torch.cat([so_far, prompt(9, seed=1)], 1)
    command = [sys.executable, "-c", GO_ON, str(tmp_path / "model"), str(tmp_path / "cache.safetensors")]
    other = subprocess.run([*command, str(ids.tolist())], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == generate(model, ids, 20, cache).sequences[0].tolist()


def test_a_fresh_cache_and_one_without_a_budget_travel(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "cache.safetensors"
    kvlearn.EvictingCache(model, "ema:half_life=16", BUDGET, block=BLOCK).save(path)
    loaded = kvlearn.EvictingCache.load(path, model)
    assert loaded.policy.label == "ema:half_life=16"
    assert generate(model, prompt(20), 4, loaded).sequences.shape == (1, 24)

    unbounded = kvlearn.EvictingCache(model, "full")
    feed(model, unbounded, prompt(20), [20])
    unbounded.save(path)
    loaded = kvlearn.EvictingCache.load(path, model)
    more = prompt(5, seed=1)
    assert torch.equal(feed(model, loaded, more, [5]), feed(model, unbounded, more, [5]))


def test_layers_that_are_not_managed_travel(tmp_path: Path) -> None:
    from zoo import build

    model = kvlearn.enable(build("gemma3-text"))
    cache = kvlearn.EvictingCache(model, "h2o", BUDGET, block=BLOCK)
    feed(model, cache, prompt(43), CALLS)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvlearn.EvictingCache.load(tmp_path / "cache.safetensors", model)
    more = prompt(20, seed=1)
    assert torch.equal(feed(model, loaded, more, [10, *[1] * 10]), feed(model, cache, more, [10, *[1] * 10]))


def test_a_policy_that_its_label_does_not_give_back_is_asked_for(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    for one in (Constant(1.0), policy("oracle", model, prompt(50))):
        cache = kvlearn.EvictingCache(model, one, BUDGET, block=BLOCK)
        feed(model, cache, prompt(30), [30])
        cache.save(path)
        with pytest.raises(KvlearnError, match=r"policy=\.\.\."):
            kvlearn.EvictingCache.load(path, model)
        assert held(kvlearn.EvictingCache.load(path, model, policy=one)) == held(cache)


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "cache.safetensors"
    filled(model, "ema", prompt(60)).save(path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["kvlearn_cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    change(meta, tensors)
    save_file(tensors, path, metadata={"kvlearn_cache": json.dumps(meta)})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "future": (lambda meta, _: meta.update(format=FORMAT + 1), f"format is {FORMAT + 1}"),
    "no options": (lambda meta, _: meta.pop("options"), "options is missing"),
    "no position": (lambda _, tensors: tensors.pop("layer.0.pos"), "layer 0 does not fit"),
    "few slots": (
        lambda _, tensors: tensors.update({"layer.1.pos": tensors["layer.1.pos"][..., :9].clone()}),
        "9 slots of a budget of 16",
    ),
    "one head": (
        lambda _, tensors: tensors.update({"layer.1.keys": tensors["layer.1.keys"][:, :1].clone()}),
        "keys has shape",
    ),
    "surplus": (lambda _, tensors: tensors.update({"layer.1.extra": torch.zeros(1)}), "extra is not part"),
    "layers": (lambda meta, _: meta["layers"].pop(), "holds 1 layers of 2"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_file_is_one_clear_sentence(model: Any, saved: Path, fault: str) -> None:
    change, message = DAMAGE[fault]
    rewritten(saved, change)
    with pytest.raises(KvlearnError, match=message) as error:
        kvlearn.EvictingCache.load(saved, model)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_cache_are_refused(model: Any, saved: Path) -> None:
    with pytest.raises(KvlearnError, match="there is no saved cache"):
        kvlearn.EvictingCache.load(saved.with_name("other"), model)
    save_file({"a": torch.zeros(1)}, saved.with_name("plain"))
    with pytest.raises(KvlearnError, match="is no saved cache"):
        kvlearn.EvictingCache.load(saved.with_name("plain"), model)
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(KvlearnError, match="is damaged"):
        kvlearn.EvictingCache.load(saved, model)


def test_another_model_is_refused(model: Any, tiny_llama: Callable[..., Any], saved: Path) -> None:
    for other, message in (
        (tiny_llama(layers=3), "layers: 2 against 3"),
        (tiny_llama(seed=1), "the weights are others"),
        (tiny_llama(dtype=torch.bfloat16), "dtype: torch.float32 against torch.bfloat16"),
        (tiny_llama(rope_theta=77.0), "rope"),
    ):
        with pytest.raises(KvlearnError, match=message):
            kvlearn.EvictingCache.load(saved, kvlearn.enable(other))


def test_saving_is_all_or_nothing(model: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    cache = filled(model, "h2o", prompt(60))

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("kvlearn.state.os.replace", fail)
    with pytest.raises(KvlearnError, match=r"cannot be saved.*the disk is full"):
        cache.save(saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    with pytest.raises(KvlearnError, match="is a folder"):
        cache.save(saved.parent)


# ---- copies and resets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
def test_a_deep_copy_is_independent(model: Any, name: str) -> None:
    ids = prompt(60)
    cache = filled(model, name, ids)
    twin = copy.deepcopy(cache)
    before = snapshot(twin)
    first = feed(model, cache, ids[:, 43:], [1] * 17)
    assert all(torch.equal(before[key], tensor) for key, tensor in snapshot(twin).items()), "the copy shares state"
    assert torch.equal(feed(model, twin, ids[:, 43:], [1] * 17), first)
    assert twin.policy is cache.policy


@pytest.mark.parametrize("name", NO_RECORDING)
def test_a_reset_cache_is_a_fresh_one(model: Any, name: str) -> None:
    ids, mask = padded()
    cache = filled(model, name, ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats()["bytes"] == 0
    again, fresh = prompt(60), kvlearn.EvictingCache(model, cache.policy, BUDGET, block=BLOCK)
    assert torch.equal(feed(model, cache, again, [43, *[1] * 17]), feed(model, fresh, again, [43, *[1] * 17]))


def test_a_reset_hybrid_is_a_fresh_one() -> None:
    from zoo import build

    model = kvlearn.enable(build("gemma3-text"))
    cache = kvlearn.EvictingCache(model, "h2o", BUDGET, block=BLOCK)
    first = feed(model, cache, prompt(40), [30, *[1] * 10])
    cache.reset()
    assert torch.equal(feed(model, cache, prompt(40), [30, *[1] * 10]), first)


def test_a_cache_outlives_its_model_with_a_clear_word(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    cache = kvlearn.EvictingCache(kvlearn.enable(tiny_llama(seed=9)), "h2o", BUDGET, block=BLOCK)
    with pytest.raises(KvlearnError, match="keep it as long as the cache"):
        cache.save(tmp_path / "cache.safetensors")


def test_rows_that_were_selected_keep_what_the_caller_protects(model: Any, tmp_path: Path) -> None:
    protect = kvlearn.Protection(tokens=[[5], [6], [7]])
    cache = kvlearn.EvictingCache(model, "streaming", BUDGET, block=BLOCK, protect=protect)
    feed(model, cache, prompt(30, batch=3), [30])
    cache.batch_select_indices(torch.tensor([0, 2]))  # there are tokens for three rows
    cache.save(tmp_path / "cache")
    loaded = kvlearn.EvictingCache.load(tmp_path / "cache", model)
    ids = prompt(20, batch=2, seed=1)
    assert torch.equal(feed(model, loaded, ids, [1] * 20), feed(model, cache, ids, [1] * 20))
    for layer in held(loaded):
        assert all(5 in head for head in layer[0])
        assert all(7 in head for head in layer[1])


def test_a_cache_that_bounds_no_layer_is_saved_with_its_policy(model: Any, tmp_path: Path) -> None:
    sliding = kvlearn.enable(zoo.build("mistral-sliding"))
    with pytest.warns(UserWarning, match="sliding windows in all layers"):
        windows = kvlearn.EvictingCache(sliding, "tova", BUDGET)
    for owner, cache in ((model, kvlearn.EvictingCache(model, "tova", [None, None])), (sliding, windows)):
        feed(owner, cache, prompt(20), [20])
        cache.save(tmp_path / "cache")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the windows once more
            loaded = kvlearn.EvictingCache.load(tmp_path / "cache", owner)
        assert loaded.options == cache.options
        ids = prompt(10, seed=1)
        assert torch.equal(feed(owner, loaded, ids, [1] * 10), feed(owner, cache, ids, [1] * 10))

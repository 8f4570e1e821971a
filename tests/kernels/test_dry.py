"""Dry launches: which kernels a decode step launches, that none is compiled in a request, and that no step waits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kernel_helpers import in_fresh_process

CODE = """
import json
from types import SimpleNamespace
import torch
import kvlearn
from kvlearn.attention import cache_argument
from kvlearn.kernels.dry import recording
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=50, bos_token_id=1, eos_token_id=None, pad_token_id=0)
model = kvlearn.enable(LlamaForCausalLM(config).to(torch.bfloat16).eval())
scorer = kvlearn.Scorer.for_model(model, hidden=8, key_rank=2)
with recording("cuda:90"):
    caches = {name: kvlearn.EvictingCache(model, policy, budget=640, block=8, impl="triton")
              for name, policy in (("learned", scorer), ("streaming", "streaming"))}
model.to("meta")
scorer.to("meta")
recorded = {}
for name, cache in caches.items():
    for layer in cache.evicting_layers():  # on a GPU these flags are copied to the host and read a block later
        layer.faults = SimpleNamespace(found=torch.zeros(1, dtype=torch.int32, device="meta"), check=lambda *_: None)
    steps = []
    with recording("cuda:90") as launches, torch.no_grad():
        for tokens in [623] + 49 * [1]:
            before = len(launches)
            ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
            model(ids, **{cache_argument(model): cache})
            steps.append(launches[before:])
    recorded[name] = [[(l.kernel, l.grid, repr(l.specialisation)) for l in step] for step in steps]
print(json.dumps(recorded))
"""

Recorded = tuple[str, list[list[tuple[str, list[int], str]]]]


@pytest.fixture(scope="module")
def all_recorded() -> dict[str, list[list[tuple[str, list[int], str]]]]:
    """A prompt and 49 steps of a whole model by policy.

    Model and cache are on PyTorch's device "meta", where no tensor has a value: whatever made the host wait for one
    (``.item()``, ``bool(tensor)``, a mask as an index) would raise.
    """
    recorded: dict[str, list[list[tuple[str, list[int], str]]]] = json.loads(in_fresh_process(CODE).splitlines()[-1])
    return recorded


@pytest.fixture(params=["learned", "streaming"])
def recorded(request: pytest.FixtureRequest, all_recorded: dict[str, Any]) -> Recorded:
    return request.param, all_recorded[request.param]


def test_launches_of_a_step(recorded: Recorded) -> None:
    """Budget 640, prompt 623: 17 slots are filled, then slots are replaced. Blocks of 8 begin at 1, 9, 17, ...

    When one begins, the one before is observed and victims are chosen, once for both layers.
    """
    policy, steps = recorded
    end, begin = (["write", "fold"], ["forecast", "smallest"]) if policy == "learned" else ([], ["smallest"])
    for number, step in enumerate(steps[1:], start=1):
        expected = 2 * ["write", "attend", "join"]
        if number > 1 and number % 8 == 1:
            expected = end + (begin if number > 16 else []) + expected
        names = [name for name, _, _ in step]
        assert names == expected, f"step {number}: {names}"


def test_nothing_is_compiled_after_warm_up(recorded: Recorded) -> None:
    """Kernels do not depend on how many slots are in use, or which slot or column of the block comes next."""
    _, steps = recorded
    seen: set[str] = set()
    new = []
    for step in steps:
        own = {specialisation for _, _, specialisation in step}
        new.append(len(own - seen))
        seen |= own
    assert new[0] > 0
    assert sum(new[27:]) == 0, f"new kernels at steps {[i for i, count in enumerate(new) if count]}"
    # The first token may still be of the prompt; from the second on, tokens are decoded.
    assert sum(new[3:8]) == 0, f"new kernels at steps {[i for i, count in enumerate(new) if count]}"


def test_the_grid_fills_the_chip(recorded: Recorded) -> None:
    _, steps = recorded
    grid = next(grid for name, grid, _ in steps[-1] if name == "attend")
    assert grid[2] == 2, "one program per row and KV head"
    assert grid[0] > 1, "and split over slots"


def test_a_dry_launch_never_reaches_the_driver() -> None:
    out = in_fresh_process(
        """
from kvlearn.errors import KvlearnError
from kvlearn.kernels import dry, launch
from triton.runtime import driver
with dry.recording("cuda:90"):
    try:
        driver.active.launch_pdl
    except RuntimeError as error:
        print(error)
assert launch.instead is None
for target in ("tpu:5", "cuda:x"):
    try:
        with dry.recording(target):
            raise SystemExit("accepted")
    except KvlearnError as error:
        print(error)
"""
    )
    assert "reached for the GPU driver" in out
    assert "target 'tpu:5' is not known" in out
    assert "target 'cuda:x' is not known" in out

"""A stream that does not end: after the first thousand tokens neither the cache nor the process grows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_helpers import BLOCK, policy, prompt

import kvlearn
from kvlearn.attention import cache_argument

TOKENS, WARM_UP, EVERY = 100_000, 1_000, 1_000
BUDGET = 32
STATM = Path("/proc/self/statm")
PAGE = 4096


def tensor_bytes() -> int:
    """Bytes of all live tensors of the process, each storage counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="the process's memory is read from /proc")
def test_memory_is_flat_over_a_hundred_thousand_tokens(tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama(layers=1, max_position_embeddings=128))
    cache = kvlearn.EvictingCache(model, policy("learned", model), BUDGET, block=BLOCK, positions="compact")
    token, curve = prompt(50), []
    with torch.inference_mode():
        for count in range(1, TOKENS + 1):
            token = model(token, **{cache_argument(model): cache}).logits[:, -1:].argmax(-1)
            if count >= WARM_UP and count % EVERY == 0:
                held = cache.stats()
                resident = int(STATM.read_text().split()[1]) * PAGE
                curve.append((resident, tensor_bytes(), held["bytes"], held["slots"]))
    process, tensors, cached, slots = (list(each) for each in zip(*curve, strict=True))
    print(
        f"{TOKENS} tokens: process {process[0] / 2**20:.1f} MiB after {WARM_UP}, {min(process) / 2**20:.1f} to "
        f"{max(process) / 2**20:.1f} later; tensors {min(tensors)} to {max(tensors)} bytes; cache {min(cached)} to "
        f"{max(cached)} bytes, {max(slots)} slots"
    )
    assert cache.get_seq_length() == 50 + TOKENS - 1
    assert set(slots) == {BUDGET}
    assert len(set(cached)) == 1, "the cache grows"
    assert len(set(tensors)) == 1, "tensors pile up"
    assert max(process) / min(process) < 1.01, "the process grows"

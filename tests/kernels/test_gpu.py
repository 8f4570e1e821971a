"""What only a GPU can show; ``python -m kvlearn.bench kernels`` does the same at full size, and takes the time."""

from __future__ import annotations

import pytest
from kernel_helpers import in_fresh_process

pytestmark = pytest.mark.gpu


def test_every_kernel_agrees_with_the_reference() -> None:
    out = in_fresh_process(
        """
from kvlearn.bench.checks import check_all
print(*(check.line() for check in check_all("cuda", toy=False) if not check.passed), sep="\\n")
"""
    )
    assert out.strip() == ""


def test_a_block_of_steps_is_captured_in_a_graph() -> None:
    """A capture raises at whatever waits for the GPU or allocates outside PyTorch's allocator."""
    in_fresh_process(
        """
import torch
from kvlearn.bench.kernels import Sizes, scorer, step_seconds
from kvlearn.kernels import timing
from kvlearn.policies import resolve
sizes = Sizes(budget=256)
for policy in ("streaming", "ema", scorer(sizes, "cuda")):
    assert step_seconds(sizes, resolve(policy), 2, "cuda", timing.seconds) > 0
"""
    )

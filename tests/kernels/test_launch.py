"""Dispatch: what runs is what was asked for; and the table of launch parameters."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import in_fresh_process

from kvlearn.errors import KvlearnError
from kvlearn.kernels import launch

ON_CPU = torch.zeros(1)


def test_auto_is_the_reference_off_a_gpu() -> None:
    assert not launch.use_triton("auto", ON_CPU)
    assert not launch.use_triton("reference", ON_CPU)
    assert launch.use_triton("triton", ON_CPU), "in the interpreter"


def test_an_explicit_request_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvlearnError, match=r"not torch\.float64"):
        launch.use_triton("triton", ON_CPU.double())
    monkeypatch.setattr(launch, "WRONG_WHEN_INTERPRETED", {torch.bfloat16})
    with pytest.raises(KvlearnError, match=r"computes torch\.bfloat16 wrongly"):
        launch.use_triton("triton", ON_CPU.bfloat16())
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KvlearnError, match="needs tensors on a GPU and these are on cpu"):
        launch.use_triton("triton", ON_CPU)
    monkeypatch.setattr(launch, "installed", lambda: False)
    with pytest.raises(KvlearnError, match="needs the package triton"):
        launch.use_triton("triton", ON_CPU)
    assert not launch.use_triton("auto", ON_CPU)


@pytest.mark.parametrize(
    ("wanted", "table"),
    [
        ("cuda:90", "cuda:90"),
        ("cuda:75", "cuda:80"),
        ("cuda:87", "cuda:80"),
        ("cuda:89", "cuda:80"),
        ("cuda:103", "cuda:100"),
        ("cuda:120", "cuda:80"),  # newer, and with less shared memory than cuda:100
        ("hip:gfx950", "hip:gfx942"),
        ("interpreter", "interpreter"),
    ],
)
def test_nearest_table(wanted: str, table: str) -> None:
    assert launch.nearest(wanted, list(launch.table())) == table


def test_a_target_without_kernels_is_named() -> None:
    with pytest.raises(KvlearnError, match="no kernels for xpu:pvc"):
        launch.nearest("xpu:pvc", list(launch.table()))


def test_all_targets_know_the_same_families_and_parameters() -> None:
    def names(target: str) -> dict[str, dict[str, set[str]]]:
        tables = launch.table()[target]
        return {kernel: {family: set(p) for family, p in families.items()} for kernel, families in tables.items()}

    for target in launch.table():
        assert names(target) == names("cuda:90"), target


def test_head_dimensions_fall_into_families() -> None:
    assert launch.dim_family(16, torch.float16) == "d64 16bit"
    assert launch.dim_family(80, torch.bfloat16) == "d128 16bit"
    assert launch.dim_family(192, torch.float32) == "d256 32bit"
    with pytest.raises(KvlearnError, match="up to 256, not 288"):
        launch.dim_family(288, torch.float16)


def test_everything_but_a_launch_works_without_triton() -> None:
    """Where importing triton fails, a model generates, and asking for triton says what is missing."""
    out = in_fresh_process(
        """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Blocked())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else real(name, package)
import torch
import kvlearn
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=50, bos_token_id=1, eos_token_id=None, pad_token_id=0)
model = kvlearn.enable(LlamaForCausalLM(config).eval())
from kvlearn.attention import cache_argument
for policy in ("ema", kvlearn.Scorer.for_model(model)):
    cache = kvlearn.EvictingCache(model, policy, budget=16, block=2)
    with torch.no_grad():
        for ids in ([[3] * 30], [[4]], [[5]], [[6]]):
            model(torch.tensor(ids), **{cache_argument(model): cache})
    assert cache.stats()["slots"] == 16
import kvlearn.kernels.check, kvlearn.kernels.dry, kvlearn.kernels.families, kvlearn.kernels.traffic
import kvlearn.kernels.tune, kvlearn.kernels.workloads
try:
    kvlearn.EvictingCache(model, "ema", budget=16, block=2, impl="triton")
except kvlearn.KvlearnError as error:
    print(error)
assert "triton" not in sys.modules
"""
    )
    assert "needs the package triton, which is not installed" in out

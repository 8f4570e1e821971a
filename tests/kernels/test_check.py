"""The compile check: what it reads from binaries, what it judges, and one family compiled for real."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_helpers import ROOT, in_fresh_process

from kvlearn.errors import KvlearnError
from kvlearn.kernels import check, docs, launch, tables
from kvlearn.kernels.families import DIMS, families

GOOD = check.Result("attend bf16 128", "cuda:90", "attend", registers=90, shared=71680, warps=4, matrix=32)


def test_a_cell_of_the_table_tells_faults_in_place_of_figures() -> None:
    assert check.cell(GOOD) == "90 / 70 KB / 32"
    assert check.cell(replace(GOOD, faults=("spills 3 registers", "has no matrix instructions"))) == (
        "spills 3 registers; has no matrix instructions"
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ()),
        ({"spills": 3}, ("spills 3 registers",)),
        ({"shared": 232449}, ("takes 232449 bytes of shared memory of 232448",)),
        ({"matrix": 0}, ("has no matrix instructions",)),
    ],
)
def test_what_is_judged(change: dict[str, int], fault: tuple[str, ...]) -> None:
    assert check.judge(replace(GOOD, **change), dot=True) == fault  # type: ignore[arg-type]  # integers only
    assert check.judge(replace(GOOD, matrix=0), dot=False) == ()


def test_amd_assembly_is_read() -> None:
    text = """
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0
    .sgpr_spill_count: 2
    .vgpr_count:     117
    .vgpr_spill_count: 5
    """
    assert check.hip_resources(text) == {"registers": 117, "spills": 7, "matrix": 2}
    with pytest.raises(ValueError, match="vgpr_count"):
        check.hip_resources("nothing")


def test_families_cover_every_kernel_dimension_type_and_mask() -> None:
    names = [family.name for family in families()]
    assert len(set(names)) == len(names)
    for kernel in ("attend", "mass"):
        for dim in DIMS:
            assert f"{kernel} bf16 {dim}" in names
        for dtype in ("fp16", "fp32"):
            assert any(name.startswith(f"{kernel} {dtype}") for name in names)
    for word in ("visible", "held", "causal", "softcap", "group=3", "group=7", "fold=False", "int8", "padded"):
        assert any(word in name for name in names), word


def test_every_launch_parameter_is_compiled() -> None:
    """Each family of the table of launch parameters is that of some family that the check compiles."""
    out = in_fresh_process(
        """
import json
from kvlearn.kernels import launch
from kvlearn.kernels.dry import recording
from kvlearn.kernels.families import families
asked = set()
find = launch.parameters.__wrapped__
def parameters(target, kernel, family):
    asked.add((kernel, family))
    return find(target, kernel, family)
for module in ("decode_attention", "column_mass", "observe", "score", "select", "replace"):
    __import__(f"kvlearn.kernels.{module}.triton", fromlist=["parameters"]).parameters = parameters
with recording("cuda:90"):
    for family in families():
        family.call()
print(json.dumps(sorted(asked)))
"""
    )
    known = {(kernel, family) for kernel, own in launch.table()["cuda:90"].items() for family in own}
    assert {tuple(pair) for pair in json.loads(out)} == known


def test_a_part_is_not_written_over_the_whole_table() -> None:
    for arguments in (["--only", "write"], ["--targets", "cuda:90"]):
        with pytest.raises(KvlearnError, match="leave out --only and --targets"):
            check.main([*arguments, "--docs", "page.md"])


def test_one_family_compiles_for_an_nvidia_and_an_amd_target() -> None:
    out = in_fresh_process(
        """
from kvlearn.kernels.check import main
print("status", main(["--only", "write bf16 128", "--targets", "cuda:90", "hip:gfx942", "--workers", "1"]))
print("status", main(["--only", "no such family"]))
"""
    )
    assert re.search(r"cuda:90 +write bf16 128 whole=False +write +registers +\d+ .* ok", out)
    assert re.search(r"hip:gfx942 +write bf16 128 whole=False +write +registers +\d+ .* ok", out)
    assert "2 kernels pass, 0 fail" in out
    assert out.count("status 0") == 1
    assert out.count("status 2") == 1


def test_what_the_compiler_refuses_is_reported_and_fails() -> None:
    """With a tile of 8 slots, a dot has fewer than 16 products to add up, which only the compiler minds."""
    out = in_fresh_process(
        """
from kvlearn.kernels import check, launch
from kvlearn.kernels.families import families
launch.table()["cuda:90"]["attend"]["few d64 16bit"]["slots"] = 8
index = [family.name for family in families()].index("attend bf16 64")
print(check.compile_family(index, "cuda:90")[0].faults)
"""
    )
    assert "Error" in out


def test_every_target_of_the_table_is_checked() -> None:
    assert set(launch.table()) == {*check.TARGETS, "interpreter"}
    assert set(check.SHARED) == set(check.TARGETS)


def test_tables_are_rewritten_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin: a -->\nold\n<!-- end: a -->\nafter\n", encoding="utf-8")
    docs.rewrite(page, {"a": docs.table(("name", "count"), [("x", 1), ("y", 20)])})
    table = "| name | count |\n| --- | ---: |\n| x | 1 |\n| y | 20 |"
    expected = f"before\n<!-- begin: a -->\n\n{table}\n\n<!-- end: a -->\nafter\n"
    assert page.read_text(encoding="utf-8") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    with pytest.raises(KvlearnError, match="has no section 'b'"):
        docs.rewrite(page, {"b": ""})
    with pytest.raises(KvlearnError, match="is not a file"):
        docs.rewrite(tmp_path / "absent.md", {})


def test_the_documentation_is_up_to_date() -> None:
    """The counted tables of docs/kernels.md are what the command writes today."""
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert tables.traffic_table() in text, "run python -m kvlearn.kernels.check --docs docs/kernels.md"
    for family in families():
        assert f"| `{family.name}` |" in text, "run python -m kvlearn.kernels.check --docs docs/kernels.md"


def test_narrow_types_are_the_only_ones_on_the_fast_path() -> None:
    """float32 is never multiplied as TF32."""
    out = in_fresh_process(
        """
import torch
from kvlearn.kernels.dry import recording
from kvlearn.kernels.families import attention
for target in ("cuda:90", "hip:gfx942"):
    for dim in (128, 256):
        with recording(target) as launches:
            attention(torch.float32, dim)
        print(target, dim, launches[0].constants["PRECISION"])
"""
    )
    assert out.split("\n")[:4] == [
        "cuda:90 128 tf32x3",
        "cuda:90 256 ieee",
        "hip:gfx942 128 ieee",
        "hip:gfx942 256 ieee",
    ]
    assert torch.get_float32_matmul_precision() == "highest", "nor by the reference"

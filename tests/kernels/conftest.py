"""Kernels run in Triton's interpreter here; what it computes wrongly is repaired or refused."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is installed on Linux only")

from repaired_interpreter import repair

from kvlearn.kernels import launch


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    from triton import knobs

    assert knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before triton is imported; see tests/conftest.py"
    repair()
    launch.WRONG_WHEN_INTERPRETED.clear()

"""replace: tokens and all state of their slots, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import Guarded
from torch import Tensor

from kvlearn import history
from kvlearn.errors import KvlearnError
from kvlearn.kernels.replace import replace

B, H, S, R = 2, 3, 33, 5


def scene(dim: int, count: int, dtype: torch.dtype, padding: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    stores = {
        "keys": torch.randn(B, H, S, dim).to(dtype),
        "values": torch.randn(B, H, S, dim).to(dtype),
        "pos": torch.randint(0, 99, (B, H, S), dtype=torch.int32),
        "state": torch.rand(B, H, len(history.FIELDS), S).to(history.DTYPE),
        "static": torch.randn(B, H, S, R).half(),
        "last_query": torch.rand(B, H, S),
    }
    new_pos = 100 + torch.arange(count, dtype=torch.int32).expand(B, count).clone()
    if padding == "left":
        new_pos[0, : count // 2] = -1
    elif padding == "scattered":
        new_pos[1, ::2] = -1
    elif padding == "a whole row":
        new_pos[0] = -1
    new: dict[str, Any] = {
        "target": torch.rand(B, H, S).argsort(-1)[..., :count],
        "key": torch.randn(B, H, count, dim).to(dtype),
        "value": torch.randn(B, H, count, dim).to(dtype),
        "new_pos": new_pos,
        "new_static": torch.randn(B, H, count, R).half(),
        "padded": padding != "none",
    }
    return stores, new


def by_hand(stores: dict[str, Tensor], new: dict[str, Any]) -> dict[str, Tensor]:
    expected = {name: tensor.clone() for name, tensor in stores.items()}
    for b in range(B):
        tokens = [c for c in range(new["key"].shape[2]) if new["new_pos"][b, c] >= 0]
        for h in range(H):
            for i, c in enumerate(tokens):
                slot = int(new["target"][b, h, i])
                expected["keys"][b, h, slot] = new["key"][b, h, c]
                expected["values"][b, h, slot] = new["value"][b, h, c]
                expected["pos"][b, h, slot] = new["new_pos"][b, c]
                expected["static"][b, h, slot] = new["new_static"][b, h, c]
                expected["state"][b, h, :, slot] = 0
                expected["last_query"][b, h, slot] = 0
    return expected


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(
    ("dim", "count", "dtype", "padding"),
    [
        (64, 1, torch.float32, "none"),
        (80, 7, torch.bfloat16, "left"),
        (16, 5, torch.float16, "scattered"),
        (96, 1, torch.float32, "a whole row"),
        (256, 3, torch.float32, "none"),
    ],
)
def test_every_piece_of_state_moves(dim: int, count: int, dtype: torch.dtype, padding: str, impl: Any) -> None:
    stores, new = scene(dim, count, dtype, padding)
    expected = by_hand(stores, new)
    guarded = {name: Guarded(like=tensor) for name, tensor in stores.items()}
    replace(**{name: guard.tensor for name, guard in guarded.items()}, **new, impl=impl)
    for name, guard in guarded.items():
        guard.check()
        assert torch.equal(guard.tensor, expected[name]), name


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_without_state(impl: Any) -> None:
    stores, new = scene(16, 2, torch.float32, "none")
    expected = by_hand(stores, new)
    new.pop("new_static")
    replace(stores["keys"], stores["values"], stores["pos"], **new, impl=impl)
    for name in ("keys", "values", "pos"):
        assert torch.equal(stores[name], expected[name])


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_plan_is_followed_from_any_column(impl: Any) -> None:
    """The cache passes one column of the block's plan; it is not contiguous."""
    stores, new = scene(16, 4, torch.float32, "none")
    column = {name: t[:, :, 2:3] if t.ndim > 2 else t[:, 2:3] for name, t in new.items() if isinstance(t, Tensor)}
    expected = by_hand(stores, column)
    replace(**stores, **column, impl=impl)
    for name, tensor in stores.items():
        assert torch.equal(tensor, expected[name]), name


def test_mistakes_are_named() -> None:
    stores, new = scene(16, 2, torch.float32, "none")
    with pytest.raises(KvlearnError, match=r"key is torch\.float16; it must be torch\.float32"):
        replace(**stores, **{**new, "key": new["key"].half()})
    with pytest.raises(KvlearnError, match=r"target is torch\.int32"):
        replace(**stores, **{**new, "target": new["target"].int()})
    stores.pop("static")
    with pytest.raises(KvlearnError, match="new_static needs"):
        replace(**stores, **new)

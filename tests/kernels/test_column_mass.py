"""column_mass and observe: the Triton kernels against the references and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import Guarded, assert_within_budget
from torch import Tensor

from kvlearn import history
from kvlearn.errors import KvlearnError
from kvlearn.kernels.column_mass import ColumnMass, column_mass
from kvlearn.kernels.decode_attention.reference import naive
from kvlearn.kernels.observe import observe

SCALE = 0.3

# B, H, G, C, S, D, block, own_keys_last: a short first block, a block longer than a tile of queries, padding (B = 2)
SHAPES = [
    (1, 1, 1, 1, 1, 64, 1, True),
    (2, 2, 3, 20, 27, 16, 8, True),
    (1, 2, 7, 17, 33, 80, 32, False),
    (2, 1, 4, 3, 33, 16, 2, False),
    (1, 1, 1, 40, 40, 96, 40, True),
]


class Scene:
    """Queries and keys with positions; row 1 begins with two columns of padding among its own tokens."""

    def __init__(
        self, shape: tuple[Any, ...], dtype: torch.dtype = torch.float32, softcap: float | None = None
    ) -> None:
        b, h, g, c, s, d, block, own = shape
        self.query, self.key = torch.randn(b, h * g, c, d).to(dtype), torch.randn(b, h, s, d).to(dtype)
        order = torch.arange(s) if own else torch.randperm(s)  # slots of a cache are in no order
        self.key_pos = order.int().expand(b, h, s).clone()
        self.query_pos = (torch.arange(c) + s - c).int().expand(b, c).clone()
        if not own:
            self.key_pos[:, :, ::5] = -1
        for row in range(1, b):
            padding = min(2, c - 1)
            self.query_pos[row] -= padding
            self.query_pos[row, :padding] = -1
            self.key_pos[row] -= padding * (order >= s - c)
            self.key_pos[row, :, order.argsort()[s - c : s - c + padding]] = -1
        visible = (self.key_pos[:, :, None] <= self.query_pos[:, None, :, None]) & (self.key_pos[:, :, None] >= 0)
        self.visible = visible
        self.softcap = softcap
        _, self.lse = naive(self.query.float(), self.key.float(), self.key.float(), visible, False, SCALE, softcap)
        self.arguments: dict[str, Any] = {
            "query_pos": self.query_pos,
            "key_pos": self.key_pos,
            "scale": SCALE,
            "block": block,
            "softcap": softcap,
            "own_keys_last": own,
        }

    def exact(self, group_reduce: str) -> ColumnMass:
        double = self.query.double(), self.lse.double(), self.key.double()
        return column_mass(double[0], self.lse, double[2], **self.arguments, group_reduce=group_reduce)  # type: ignore[arg-type]  # one of two words

    def poison(self) -> Tensor:
        """The keys, with NaN where no token is."""
        return self.key.masked_fill((self.key_pos < 0)[..., None], float("nan"))


@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mass_agrees_with_float64(shape: tuple[Any, ...], group_reduce: Any) -> None:
    scene = Scene(shape, softcap=2.0 if shape[2] == 7 else None)
    exact = scene.exact(group_reduce)
    eager = column_mass(scene.query, scene.lse, scene.key, **scene.arguments, group_reduce=group_reduce)
    guards = [Guarded(*tensor.shape, dtype=tensor.dtype) for tensor in eager]
    found = column_mass(
        scene.query,
        scene.lse,
        scene.poison(),
        **scene.arguments,
        group_reduce=group_reduce,
        out=ColumnMass(*(guard.tensor for guard in guards)),
        impl="triton",
    )
    for guard in guards:
        guard.check()
    assert torch.equal(found.queries, eager.queries)
    for name in ("mean", "peak", "last"):
        assert_within_budget(getattr(found, name), getattr(eager, name), getattr(exact, name).double(), slack=8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_16_bit_operands(dtype: torch.dtype) -> None:
    scene = Scene(SHAPES[1], dtype)
    found = column_mass(scene.query, scene.lse, scene.poison(), **scene.arguments, impl="triton")
    for mine, exact in zip(found, scene.exact("mean"), strict=True):  # products are exact, sums are float32
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-6)


def test_only_the_last_block() -> None:
    scene = Scene(SHAPES[1])
    found = column_mass(scene.query, scene.lse, scene.key, **scene.arguments, only_last=True, impl="triton")
    whole = column_mass(scene.query, scene.lse, scene.key, **scene.arguments, impl="reference")
    assert found.mean.shape[0] == 1
    torch.testing.assert_close(found.mean[0], whole.mean[-1])
    torch.testing.assert_close(found.peak[0], whole.peak[-1])
    torch.testing.assert_close(found.last, whole.last)


@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_observation_folds_what_the_reference_folds(shape: tuple[Any, ...], group_reduce: Any) -> None:
    b, h, _, c, s, _, _, own = shape
    scene = Scene(shape)
    state = torch.rand(b, h, len(history.FIELDS), s) * torch.tensor([1.0] * 7 + [4.0, 90.0, 300.0])[:, None]
    if own:
        state[..., s - c :] = 0.0
    expected, expected_last = state.to(history.DTYPE), torch.zeros(b, h, s)
    found, last = Guarded(like=expected), Guarded(b, h, s)
    observe(
        expected, scene.query, scene.lse, scene.key, last=expected_last, group_reduce=group_reduce, **scene.arguments,
        impl="reference",
    )  # fmt: skip
    observe(
        found.tensor, scene.query, scene.lse, scene.poison(), last=last.tensor, group_reduce=group_reduce,
        **scene.arguments, impl="triton",
    )  # fmt: skip
    found.check()
    last.check()
    held = (scene.key_pos >= 0)[:, :, None].expand_as(expected)
    # Masses that differ in the last bit may fall on either side of a code's edge: one code is 5 percent.
    close = torch.isclose(found.tensor.float(), expected.float(), rtol=0.06, atol=1e-5)
    assert close[held].all()
    assert (found.tensor == expected)[held].float().mean() > 0.98
    torch.testing.assert_close(last.tensor, expected_last, rtol=1e-4, atol=1e-6)


def test_a_row_of_padding_keeps_its_history() -> None:
    scene = Scene((2, 1, 2, 4, 9, 16, 4, False))
    scene.query_pos[1] = -1
    state = torch.rand(2, 1, len(history.FIELDS), 9).to(history.DTYPE)
    before = state.clone()
    observe(state, scene.query, scene.lse, scene.key, **scene.arguments, impl="triton")
    assert torch.equal(state[1], before[1])
    assert not torch.equal(state[0], before[0])


def test_history_through_blocks_is_rounded_as_if_stored_between() -> None:
    """One call over three blocks equals three calls of one block each, bit for bit."""
    b, h, g, c, s, d, block = 1, 2, 2, 12, 12, 16, 4
    scene = Scene((b, h, g, c, s, d, block, True))
    together = history.empty((b, h, s))
    observe(together, scene.query, scene.lse, scene.key, **scene.arguments, impl="triton")
    apart = history.empty((b, h, s))
    for end in range(block, c + 1, block):
        part = slice(end - block, end)
        observe(
            apart[..., :end], scene.query[:, :, part].contiguous(), scene.lse[:, :, part], scene.key[:, :, :end],
            **{**scene.arguments, "query_pos": scene.query_pos[:, part], "key_pos": scene.key_pos[:, :, :end]},
            impl="triton",
        )  # fmt: skip
    assert torch.equal(together, apart)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_pos": torch.zeros(1, 3, dtype=torch.int64)}, "query_pos is torch.int64; it must be torch.int32"),
        ({"block": 0}, "in blocks of 0"),
        ({"group_reduce": "sum"}, "group_reduce is 'sum'"),
        ({"own_keys_last": True, "key_pos": torch.zeros(1, 1, 2, dtype=torch.int32), "key": torch.zeros(1, 1, 2, 8)},
         "for each of the 3 queries; there are 2"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 2, 3, 8),
        "lse": torch.zeros(1, 2, 3),
        "key": torch.zeros(1, 1, 5, 8),
        "query_pos": torch.zeros(1, 3, dtype=torch.int32),
        "key_pos": torch.zeros(1, 1, 5, dtype=torch.int32),
        "scale": 1.0,
        "block": 2,
    }
    with pytest.raises(KvlearnError, match=message):
        column_mass(**{**arguments, **change})

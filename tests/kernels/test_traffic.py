"""The byte counts of the documentation, against the loads and stores that the interpreter carries out."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import counting_bytes

from kvlearn import features, history
from kvlearn.kernels import launch, traffic
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.decode_attention.splits import split_count
from kvlearn.kernels.observe import observe
from kvlearn.kernels.replace import replace
from kvlearn.kernels.score import Weights, score
from kvlearn.kernels.select import select

SHAPE = traffic.Shape(batch=2, heads=2, group=3, slots=70, dim=80, element=4, block=20, inputs=5, hidden=4)
B, H, S, D, R = SHAPE.batch, SHAPE.heads, SHAPE.slots, SHAPE.dim, SHAPE.inputs
DIM = launch.dim_family(D, torch.float32)


def chosen(kernel: str, family: str) -> launch.Parameters:
    return launch.parameters("interpreter", kernel, family)


def assert_counted(count: dict[str, int], expected: traffic.Traffic) -> None:
    moved = count["loaded"] + count["stored"]
    assert moved == pytest.approx(expected.moves, rel=0.01), expected
    assert expected.must <= expected.moves


@pytest.mark.parametrize("queries", [1, 7])
def test_attend(queries: int) -> None:
    query, key = torch.randn(B, H * SHAPE.group, queries, D), torch.randn(B, H, S, D)
    with counting_bytes() as count:
        decode_attention(query, key, key.clone(), scale=0.1, impl="triton")
    own = chosen("attend", f"{'few' if queries == 1 else 'many'} {DIM}")
    tiles = -(-SHAPE.group * queries // own["rows"])
    splits = split_count(B * H, tiles, S, own["programs"], 2 * own["slots"])
    assert_counted(count, traffic.attend(SHAPE, own, splits, queries))


def test_observe() -> None:
    query, key = torch.randn(B, H * SHAPE.group, SHAPE.block, D), torch.randn(B, H, S, D)
    key_pos = torch.arange(S, dtype=torch.int32).expand(B, H, S)
    query_pos = (torch.arange(SHAPE.block, dtype=torch.int32) + S).expand(B, SHAPE.block)
    state, lse = history.empty((B, H, S)), torch.full(query.shape[:3], 9.0)
    with counting_bytes() as count:
        observe(
            state, query, lse, key, query_pos=query_pos, key_pos=key_pos, scale=0.1, block=SHAPE.block, impl="triton"
        )
    assert_counted(count, traffic.observe(SHAPE, chosen("mass", DIM)))


def test_forecast() -> None:
    units = 1 + SHAPE.hidden
    weights = Weights(
        torch.randn(H, units, len(features.DYNAMIC)),
        torch.randn(H, units, R),
        torch.randn(H, units, 1),
        torch.randn(H, 1, SHAPE.hidden),
    )
    pos = torch.arange(S, dtype=torch.int32).expand(B, H, S)
    static = torch.randn(B, H, S, R).half()
    with counting_bytes() as count:
        score(history.empty((B, H, S)), pos, torch.full((B,), 100), static, weights, impl="triton")
    assert_counted(count, traffic.forecast(SHAPE, chosen("forecast", "all")))


def test_select() -> None:
    pos = torch.arange(S, dtype=torch.int32).expand(B, H, S)
    with counting_bytes() as count:
        select(torch.randn(B, H, S), pos, torch.zeros(B, H, S, dtype=torch.bool), SHAPE.block, impl="triton")
    assert_counted(count, traffic.select(SHAPE, SHAPE.block))


@pytest.mark.parametrize("settles", [False, True])
def test_write(settles: bool) -> None:
    count = SHAPE.block if settles else 1
    new = torch.randn(B, H, count, D)
    state = {"state": history.empty((B, H, S)), "static": torch.zeros(B, H, S, R).half()}
    whole = {**state, "new_static": torch.zeros(B, H, count, R).half()} if settles else {}
    with counting_bytes() as moved:
        replace(
            torch.zeros(B, H, S, D),
            torch.zeros(B, H, S, D),
            torch.zeros(B, H, S, dtype=torch.int32),
            **whole,
            target=torch.arange(count).expand(B, H, count),
            key=new,
            value=new,
            new_pos=torch.zeros(B, count, dtype=torch.int32),
            impl="triton",
        )
    assert_counted(moved, traffic.settle(SHAPE) if settles else traffic.write(SHAPE))


def test_a_block_of_work_is_a_small_part_of_attention() -> None:
    """What the design promises at Llama-3-8B's shape: under 5 percent of attention's bytes, amortised over a block."""
    shape = traffic.Shape()
    attention = traffic.attend(shape, launch.parameters("cuda:90", "attend", "few d128 16bit"), splits=16)
    block = (
        traffic.observe(shape, launch.parameters("cuda:90", "mass", "d128 16bit")).must
        + traffic.forecast(shape, launch.parameters("cuda:90", "forecast", "all")).must
        + traffic.select(shape, shape.block).must
        + traffic.settle(shape).must
    )
    per_step = block / shape.block + traffic.write(shape).must
    assert per_step < 0.05 * attention.must
    assert traffic.accumulating(shape) > 2 * block / shape.block, "why mass is not gathered in every step"

"""Caches for tests: every policy ready to run, generation and feeding in one call, and what is held."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvlearn
from kvlearn.attention import cache_argument
from kvlearn.policies import POLICIES, resolve
from kvlearn.policies.base import Policy
from kvlearn.policies.oracle import FutureRecorder, Oracle
from kvlearn.policies.q_filters import QFilters
from kvlearn.scorers import Scorer
from kvlearn.slots import SLOT_DIM, expand

ALL = [name for name in POLICIES if not name.startswith("kvpress")]  # which may be missing: see test_kvpress
EVICTING = [name for name in ALL if name != "full"]
NO_RECORDING = [name for name in EVICTING if name != "oracle"]
BLOCK = 4
FOLDER = tempfile.TemporaryDirectory()  # goes with the process


def prompt(tokens: int, batch: int = 1, seed: int = 0, vocabulary: int = 200) -> Tensor:
    """Rows without repetitions, as far as the vocabulary reaches: equal keys would tie, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-tokens // (vocabulary - 2))
    rows = [
        torch.cat([torch.randperm(vocabulary - 2, generator=generator) + 2 for _ in range(rounds)])[:tokens]
        for _ in range(batch)
    ]
    return torch.stack(rows)


def left_pad(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[1, T]`` of any lengths as one batch, and its attention mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat([row.new_zeros(1, width - row.shape[1]), row], dim=1) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - row.shape[1]).long() for row in rows])
    return ids, mask


def scorer(model: Any) -> Scorer:
    """A scorer with random weights in every layer, so that all its inputs count."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = Scorer.for_model(model, hidden=8, key_rank=4, block=BLOCK)
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return made.eval()


def policy(name: str, model: Any, ids: Tensor | None = None, mask: Tensor | None = None) -> Policy:
    """A policy by its registered name; the oracle is given the future of ``ids``."""
    if name == "learned":
        return resolve(scorer(model))
    if name == "q-filters":
        file = Path(FOLDER.name) / f"{len(os.listdir(FOLDER.name))}.safetensors"  # so that its label gives it back
        QFilters.calibrated(model, prompt(64, batch=2)).save(file)
        return resolve(f"q-filters:{file}")
    if name != "oracle":
        return resolve(name)
    assert ids is not None, "an oracle needs the tokens to come"
    recorder = FutureRecorder()
    feed(model, kvlearn.EvictingCache(model, "full", recorder=recorder, block=BLOCK), ids, [ids.shape[1]], mask)
    return Oracle.from_recorder(recorder)


def feed(model: Any, cache: Any, ids: Tensor, calls: list[int], mask: Tensor | None = None, **options: Any) -> Tensor:
    """Logits ``[B, T, vocabulary]`` of ``ids`` fed call by call, with the positions that ``generate`` would give."""
    outputs, start, past = [], 0, cache.get_seq_length()
    for count in calls:
        end = start + count
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past + start : past + end]
            options |= {"attention_mask": mask[:, : past + end], "position_ids": positions}
        now = ids[:, start:end].clone(memory_format=torch.contiguous_format)  # as generate does, for compiled models
        with torch.no_grad():
            outputs.append(model(now, **{cache_argument(model): cache}, **options).logits)
        start = end
    assert start == ids.shape[1], "calls must add up to the tokens"
    return torch.cat(outputs, dim=1)


def generate(model: Any, ids: Tensor, new: int, cache: Any = None, mask: Tensor | None = None, **options: Any) -> Any:
    """``model.generate`` with tokens and logits returned; greedy unless told otherwise."""
    if cache is not None:
        options[cache_argument(model)] = cache
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        **{"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options},
    )


def assert_same(ours: Any, stock: Any, atol: float = 1e-5) -> None:
    """Two results of :func:`generate`: tokens identical, logits within ``atol``."""
    assert torch.equal(ours.sequences, stock.sequences)
    for step, (a, b) in enumerate(zip(ours.logits, stock.logits, strict=True)):
        worst = (a - b).abs().max().item()
        assert worst <= atol, f"logits of step {step} differ by {worst}"


def held(cache: Any) -> list[list[list[set[int]]]]:
    """Positions held, by managed layer, row and head."""
    return [
        [[{p for p in head if p >= 0} for head in row] for row in cache.positions(layer).tolist()]
        for layer in cache.managed
    ]


def assert_bounded(cache: Any, budget: int) -> None:
    """No row and head of any layer holds more than ``budget`` slots, and no tensor has room for more."""
    for layer in cache.evicting_layers():
        where = f"layer {layer.config.index}"
        for name, dim in SLOT_DIM.items():
            tensor = getattr(layer, name)
            if tensor is not None:
                assert tensor.shape[dim] <= budget, f"{where}: {name} has room for more"
                whole = tensor.untyped_storage().nbytes() // tensor.element_size()
                assert whole == tensor.numel(), f"{where}: {name} is a view of something larger"
        assert int((layer.pos >= 0).sum(-1).max()) <= budget, f"{where} holds more"
        ordered = layer.pos.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        assert not bool(twice.any()), f"{where} holds a token twice"


def snapshot(cache: Any) -> dict[str, Tensor]:
    """A copy of every tensor of every managed layer, whatever it is called."""
    return {
        f"layer {layer.config.index}: {name}": tensor.clone()
        for layer in cache.evicting_layers()
        for name, tensor in vars(layer).items()
        if isinstance(tensor, Tensor)
    }


def permute_slots(cache: Any, seed: int) -> None:
    """Lay out the used slots of every row and head anew, at random, with all that belongs to them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.evicting_layers():
        layer.complete()  # tokens that wait are known by their slots
        used, shape = layer.used, layer.pos.shape
        order = torch.arange(shape[2]).expand(shape).clone()
        order[..., :used] = torch.rand(*shape[:2], used, generator=generator).argsort(-1)
        for name, dim in SLOT_DIM.items():
            tensor = getattr(layer, name)
            if tensor is not None:
                setattr(layer, name, tensor.gather(dim, expand(order, tensor, dim)))
        layer.order = order.argsort(-1).gather(-1, layer.order)  # where the slots to overwrite have gone

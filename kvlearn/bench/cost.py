"""What a decode step must move and compute: the cost model beside which measurements are read.

A step reads all weights once and, for every row, what its cache holds. What an evicting cache does beyond that, it does
once per block of ``W`` steps, so a step carries 1/W of it: keys are read again to observe, the history is read and
written, and history and static inputs are read to score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlearn import history
from kvlearn.features import DYNAMIC, STATIC_DTYPE, STATIC_SCALARS
from kvlearn.shapes import DEFAULT_BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        name: of the model.
        parameters: that a step reads; an embedding that is only looked up does not count.
        layers, heads, kv_heads, dim: of its attention.
        element: bytes of a weight, a key or a value number.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    dim: int
    element: int = 2

    @property
    def weight_bytes(self) -> float:
        """Read once per step."""
        return self.parameters * self.element

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.dim * self.element


def sizes_of(model: PreTrainedModel, name: str) -> Model:
    """Sizes of a loaded decoder."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    parameters = sum(weight.numel() for weight in model.parameters())
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    if outputs is not None and inputs.weight is not outputs.weight:
        parameters -= inputs.weight.numel()  # looked up, not read
    return Model(
        name,
        parameters,
        config.num_hidden_layers,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        next(model.parameters()).element_size(),
    )


# Sizes as in the models' config.json. Llama's input embedding is looked up and not read; SmolLM2's is its output too.
MODELS = (
    Model("SmolLM2-135M", 134.5e6, 30, 9, 3, 64),
    Model("Llama-3-8B", 7.5e9, 32, 32, 8, 128),
    Model("Llama-3-70B", 69.5e9, 80, 64, 8, 128),
)


@dataclass(frozen=True)
class Scoring:
    """What a learned policy keeps for every slot, and computes when it scores.

    Attributes:
        key_rank: numbers of a key's projection.
        hidden: units of the network.
        block: steps between two scorings.
    """

    key_rank: int = 16
    hidden: int = 48
    block: int = DEFAULT_BLOCK

    @property
    def history_bytes(self) -> int:
        """Of one slot of one KV head."""
        return len(history.FIELDS) * history.DTYPE.itemsize

    @property
    def static_bytes(self) -> int:
        """Likewise."""
        return (len(STATIC_SCALARS) + self.key_rank) * STATIC_DTYPE.itemsize

    @property
    def slot_bytes(self) -> int:
        """All that is kept beside key and value: history, static inputs and the position."""
        return self.history_bytes + self.static_bytes + 4


@dataclass(frozen=True)
class Cost:
    """Of one decode step of all rows.

    Attributes:
        cache: bytes that the cache holds.
        moved: bytes that must be read or written.
        operations: multiplications and additions.
    """

    cache: float
    moved: float
    operations: float


def full(model: Model, context: int, rows: int) -> Cost:
    """A cache of every token; what an implementation copies beside is its own affair (see docs/speed.md)."""
    held = float(rows * context * model.slot_bytes)
    return Cost(held, model.weight_bytes + held, rows * (2 * model.parameters + _attention(model, context)))


def learned(model: Model, budget: int, rows: int, scoring: Scoring | None = None) -> Cost:
    """A cache that holds ``budget`` slots per KV head under a learned policy, whatever the context."""
    scoring = scoring or Scoring()
    slots = rows * budget * model.layers * model.kv_heads
    keys_and_values = float(rows * budget * model.slot_bytes)
    upkeep = keys_and_values / 2  # keys, read to observe
    upkeep += slots * (2 * scoring.history_bytes)  # folded
    upkeep += slots * (scoring.slot_bytes + 4)  # read to score, and the scores to select by
    inputs = len(DYNAMIC) + len(STATIC_SCALARS) + scoring.key_rank
    operations = rows * (2 * model.parameters + _attention(model, budget))
    operations += rows * _attention(model, budget) / 2  # what each query gave to each slot
    operations += slots * 2 * inputs * (scoring.hidden + 1) / scoring.block
    return Cost(
        keys_and_values + slots * scoring.slot_bytes,
        model.weight_bytes + keys_and_values + upkeep / scoring.block,
        operations,
    )


def bounded(model: Model, budget: int, rows: int) -> Cost:
    """A cache of ``budget`` slots per KV head that observes nothing."""
    held = float(rows * budget * model.slot_bytes)
    return Cost(held, model.weight_bytes + held, rows * (2 * model.parameters + _attention(model, budget)))


def _attention(model: Model, slots: int) -> float:
    return 4.0 * model.layers * model.heads * model.dim * slots


COLUMNS = (
    "model",
    "context",
    "rows",
    "budget",
    "cache: full",
    "learned",
    "moved a step: full",
    "learned",
    "operations: full",
    "learned",
    "ms: full",
    "learned",
    "times",
)
"""Of :func:`table`; milliseconds are what moving the bytes takes, the least that a step can."""


def table(
    contexts: tuple[int, ...], rows: tuple[int, ...], budget: int, bandwidth: float, models: tuple[Model, ...] = MODELS
) -> list[list[str]]:
    """Rows in words: of a full cache and of a learned one side by side.

    Args:
        contexts, rows, budget: what is compared.
        bandwidth: bytes a second that memory gives, for the last columns.
        models: of which sizes.
    """
    lines = []
    for model in models:
        for context in contexts:
            for batch in rows:
                pair = full(model, context, batch), learned(model, min(budget, context), batch)
                cells = [[_bytes(c.cache), _bytes(c.moved), f"{c.operations / 1e9:,.1f} G"] for c in pair]
                times = [f"{c.moved / bandwidth * 1e3:,.2f}" for c in pair]
                times.append(f"{pair[0].moved / pair[1].moved:.1f}")
                both = [cell for column in zip(*cells, strict=True) for cell in column]
                lines.append([model.name, f"{context:,}", str(batch), f"{budget:,}", *both, *times])
    return lines


def _bytes(value: float) -> str:
    return f"{value / GIB:,.2f} GiB"

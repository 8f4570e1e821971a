"""The learned policy: a trained scorer decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.score import score as forecast
from kvlearn.policies.base import Policy, Slots
from kvlearn.shapes import GroupReduce, Layer

Inputs = Literal["float16", "int8"]

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlearn.scorers import Scorer


@dataclass
class Learned(Policy):
    """A scorer's forecast of the attention each token will still receive.

    Args:
        scorer: a trained :class:`kvlearn.Scorer`.
        source: where it came from (a folder or Hub id): what rows call this policy.
        inputs: how the cache stores what the scorer reads of keys and values: ``"int8"`` takes half the memory of
            ``"float16"`` and is not exact.

    Raises:
        KvlearnError: no scorer is given, or ``inputs`` is unknown.
    """

    scorer: Scorer | None = None
    source: str = field(default="learned", metadata={"option": False})
    inputs: Inputs = "float16"

    name = "learned"
    summary = "what a trained scorer forecasts; type its folder"
    paper = "this package"
    kind = "learned"
    reads = frozenset({"history", "static"})
    joins = True

    def __post_init__(self) -> None:
        if self.scorer is None:
            raise KvlearnError("the learned policy needs a scorer; give the scorer's folder or Hub id in its place.")
        if self.inputs not in get_args(Inputs):
            raise KvlearnError(f"the learned policy's inputs are {self.inputs!r}; use {' or '.join(get_args(Inputs))}.")

    @property
    def label(self) -> str:
        """Where the scorer came from."""
        return self.source

    @property
    def trained_with(self) -> tuple[int, GroupReduce]:
        """Block and group reduction of the traces that the scorer was trained on."""
        config = self._scorer().config
        return config.block, config.group_reduce

    @property
    def layer_shares(self) -> tuple[float, ...] | None:
        """What the scorer recommends."""
        return self._scorer().config.budgets

    @property
    def pools_heads(self) -> bool:
        """What the scorer recommends."""
        return self._scorer().config.allocation == "pooled"

    def _scorer(self) -> Scorer:
        assert self.scorer is not None
        return self.scorer

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the scorer was trained for a model of this shape, and move it to the model's device."""
        scorer = self._scorer()
        scorer.check_model(model)
        scorer.to(model.device)

    def static(self, layer: Layer, keys: Tensor, values: Tensor) -> Tensor:
        """The scorer's static inputs of new tokens, ``[B, H, C, R]``."""
        scorer = self._scorer()
        static = scorer.static(layer, keys, values)
        return scorer.encode(layer, static) if self.inputs == "int8" else static

    def score(self, slots: Slots) -> Tensor:
        """The scorer's forecast."""
        assert slots.state is not None
        assert slots.static is not None
        weights = self._scorer().weights(slots.layers or slots.layer, encoded=self.inputs == "int8")
        return forecast(slots.state, slots.pos, slots.length, slots.static, weights, impl=slots.impl)

"""Two policies in one cache: one in a part of the model, the other everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.shapes import GroupReduce, Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Axis = Literal["layers", "heads"]


@dataclass(frozen=True)
class Part:
    """Some layers with all of their KV heads, or some KV heads of all layers.

    Args:
        axis: what ``members`` counts.
        members: indices of layers in the model, or of KV heads within a layer; ascending.
    """

    axis: Axis
    members: tuple[int, ...]

    def __str__(self) -> str:
        """``layers 15-19`` or ``head 2``."""
        first, last = self.members[0], self.members[-1]
        if len(self.members) == 1:
            return f"{self.axis.removesuffix('s')} {first}"
        if self.members == tuple(range(first, last + 1)):
            return f"{self.axis} {first}-{last}"
        return f"{self.axis} {', '.join(map(str, self.members))}"


@dataclass
class Composed(Policy):
    """``inside`` decides in a part of the model, ``outside`` everywhere else.

    Made for measurements, from Python: where does a policy lose, and what does it cost to bound a few layers? Rows call
    it by the label of ``inside``. Layers read and keep no more than the policy that decides in them asks for.

    Args:
        inside: the policy of the part.
        outside: the policy of all else.
        part: the part.

    Raises:
        KvlearnError: the heads of one layer cannot be divided between these two.
    """

    inside: Policy
    outside: Policy
    part: Part

    name = "composed"
    summary = "one policy in a part of the model, another elsewhere"
    paper = "this package"

    def __post_init__(self) -> None:
        if self.part.axis == "heads" and "full" in (self.inside.kind, self.outside.kind):
            raise KvlearnError("policy 'full' evicts nothing, and all heads of a layer hold as many slots: use layers.")
        twice = self.inside.reads & self.outside.reads & {"static", "queries"}
        if self.part.axis == "heads" and twice:
            raise KvlearnError(
                f"{self.inside.label} and {self.outside.label} both keep {min(twice)} of their own, which the heads "
                "of one layer cannot: use layers."
            )
        both = self.inside.reads | self.outside.reads
        self.reads = both  # type: ignore[misc]  # of one class, each composition reads something else
        self.kind = self.inside.kind  # type: ignore[misc]  # of one class, each composition has another role
        self.query_window = max(self.inside.query_window, self.outside.query_window)

    @property
    def label(self) -> str:
        """That of the policy in the part."""
        return self.inside.label

    @property
    def trained_with(self) -> tuple[int, GroupReduce] | None:
        """That of the policy in the part, or of the other."""
        return self.inside.trained_with or self.outside.trained_with

    def bind(self, model: PreTrainedModel) -> None:
        """Check both."""
        self.inside.bind(model)
        self.outside.bind(model)

    def of_layer(self, layer: int) -> Policy:
        """The policy of a layer; where heads are divided, the composition itself."""
        if self.part.axis == "heads":
            return self
        return self.inside if layer in self.part.members else self.outside

    def static(self, layer: Layer, keys: Tensor, values: Tensor) -> Tensor | None:
        """That of the policy that reads any."""
        reader = self.inside if "static" in self.inside.reads else self.outside
        return reader.static(layer, keys, values)

    def score(self, slots: Slots) -> Tensor:
        """In each head, the score of the policy that decides there."""
        inside, outside = self.inside.score(slots), self.outside.score(slots)
        own = torch.zeros(inside.shape[1], dtype=torch.bool, device=inside.device)
        own[list(self.part.members)] = True
        return torch.where(own[:, None], inside.float(), outside.float())

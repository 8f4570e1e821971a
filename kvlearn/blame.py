"""Where a policy loses: the oracle everywhere but in one part of the model, where the policy decides."""

from __future__ import annotations

from collections.abc import Sequence

from kvlearn.errors import KvlearnError
from kvlearn.policies.composed import Part

WIDTH = 5
"""Layers of a band, unless told."""


def bands(layers: Sequence[int], width: int) -> list[Part]:
    """Neighbouring layers together, ``width`` at a time; the last band may be narrower.

    Raises:
        KvlearnError: ``width`` is below 1.
    """
    if width < 1:
        raise KvlearnError(f"a band is {width} layers wide; give a number that is 1 or more.")
    return [Part("layers", tuple(layers[i : i + width])) for i in range(0, len(layers), width)]


def parts(text: str, layers: Sequence[int], heads: int) -> list[Part]:
    """The parts that ``--blame`` names.

    Args:
        text: ``"layers"``, ``"layers:WIDTH"`` or ``"heads"``.
        layers: the managed layers of the model.
        heads: KV heads of each; one head is the head of that number in all layers.

    Raises:
        KvlearnError: ``text`` is something else.
    """
    axis, colon, width = text.partition(":")
    if axis == "layers" and (width.isdecimal() or not colon):
        return bands(layers, int(width) if colon else WIDTH)
    if text == "heads":
        return [Part("heads", (head,)) for head in range(heads)]
    raise KvlearnError(f"blame is {text!r}; use layers, layers:WIDTH (how many together) or heads.")

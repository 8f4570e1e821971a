"""Running a model from one of its layers on, when what comes before is known from a run of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlearn.layer import EvictingLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlearn.cache import EvictingCache


class Shortcut:
    """What went into some layers of a model in one run, so that another run of the same tokens can begin there.

    Where a model's layers are not found, or give more than their output, every run begins at its first layer.

    Args:
        model: a decoder.
        starts: layers at which later runs are to begin.
    """

    def __init__(self, model: PreTrainedModel, starts: Sequence[int]) -> None:
        self.layers = _layers(model)
        self.starts = [start for start in starts if 0 < start < len(self.layers)]
        self._known: dict[int, list[Tensor]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what goes into the layers; the whole text must be fed."""
        self._known = {start: [] for start in self.starts}
        whole = [True]

        def keep(start: int, hidden: Tensor) -> Tensor:
            self._known[start].append(hidden)
            return hidden

        def look(_: Any, __: Any, output: Any) -> None:
            whole[0] &= isinstance(output, Tensor)

        with ExitStack() as hooks:
            for start in self.starts:
                hooks.enter_context(
                    _replaced_input(self.layers[start], lambda hidden, start=start: keep(start, hidden))
                )
                hooks.enter_context(self.layers[start - 1].register_forward_hook(look))
            yield
        self._known = {start: [torch.cat(parts, dim=1)] for start, parts in self._known.items() if parts and whole[0]}

    @contextmanager
    def from_layer(self, start: int, cache: EvictingCache) -> Iterator[None]:
        """Begin calls of the model at a layer, if what goes into it is known; layers before it stay empty.

        Args:
            start: one of ``starts``.
            cache: a new cache, which all calls use.
        """
        first: Any = cache.layers[0]
        if start not in self._known or not isinstance(first, EvictingLayer):
            yield
            return
        (known,) = self._known[start]

        def skipped(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden_states

        def from_then_on(hidden: Tensor) -> Tensor:
            seen = first.seen
            first.seen += hidden.shape[1]  # positions are counted by the first layer, which is skipped
            return known[:, seen : first.seen]

        with ExitStack() as hooks:
            hooks.enter_context(_replaced_input(self.layers[start], from_then_on))
            for layer in self.layers[:start]:
                layer.forward = skipped
                hooks.callback(layer.__dict__.pop, "forward")
            yield


def _layers(model: Any) -> list[Any]:
    """The decoder layers of a model: the one list of modules that is as long as the model is deep."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)]
    fitting = [module for module in found if len(module) == count]
    return list(fitting[0]) if len(fitting) == 1 else []


def _replaced_input(layer: Any, change: Any) -> Any:
    """A hook that hands a layer's hidden states through ``change``; a context that removes it at its end."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return layer.register_forward_pre_hook(hook, with_kwargs=True)

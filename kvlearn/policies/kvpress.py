"""Presses of kvpress as policies."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Queries, Slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WINDOW = 128  # queries kept for a press that does not say how many it reads
_NEEDS = {  # what these read, and a cache's slots do not hold
    "hidden states": ("CompactorPress", "FastKVzipPress", "KVzapPress", "LeverageScorePress", "NonCausalAttnPress"),
    "the attention of every query": ("ObservedAttentionPress",),
}


def load_kvpress() -> Any:
    """The package kvpress.

    Raises:
        KvlearnError: it is not installed.
    """
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise KvlearnError(
            f"this policy needs kvpress ({error}): pip install kvpress, which asks for transformers below 5.3."
        ) from error


def rotated_queries(module: Any, hidden: Tensor, kwargs: Any) -> Tensor:
    """``[B, H * G, C, D]`` queries that an attention module makes of hidden states ``[B, C, hidden]``, as in Llama.

    ``kwargs`` are those of the module's call; their ``position_embeddings`` turn the queries.
    """
    from transformers.models.llama.modeling_llama import rotate_half

    query: Tensor = importlib.import_module("kvpress.utils").get_prerope_query_states(module, hidden)
    cos, sin = (t[:, None] for t in kwargs["position_embeddings"])
    return query * cos + rotate_half(query) * sin


def make_press(name: str, options: str = "") -> Any:
    """A scorer press of kvpress.

    Args:
        name: its class, such as ``SnapKVPress``.
        options: its arguments, such as ``window_size=32+kernel_size=7``.

    Raises:
        KvlearnError: kvpress is missing, has no such scorer press, or the press no such option.
    """
    kvpress = load_kvpress()
    kind = getattr(kvpress, name or "?", None)
    if not (isinstance(kind, type) and issubclass(kind, kvpress.ScorerPress)):
        known = [n for n in kvpress.__all__ if _is_scorer(kvpress, n)]
        raise KvlearnError(f"kvpress has no scorer press {name!r}; it has {', '.join(sorted(known))}.")
    named = {field.name: field for field in fields(kind) if field.init and field.name != "compression_ratio"}
    given: dict[str, Any] = {}
    for part in filter(None, options.split("+")):
        option, _, text = (word.strip() for word in part.partition("="))
        if option not in named:
            raise KvlearnError(f"{name} has no option {option!r}; it has {', '.join(named) or 'none'}.")
        given[option] = _value(text)
    try:
        return kind(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise KvlearnError(f"kvpress refuses {name} with {options or 'its defaults'}: {error}.") from error


def _is_scorer(kvpress: Any, name: str) -> bool:
    kind = getattr(kvpress, name)
    return isinstance(kind, type) and issubclass(kind, kvpress.ScorerPress) and kind is not kvpress.ScorerPress


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


class Stand(nn.Module):
    """Stands in for an attention module before a press: what arrives as hidden states are queries already.

    All that a press asks besides comes from the module itself.

    Args:
        attention: the model's own module.
        head_dim: ``D``.
    """

    def __init__(self, attention: nn.Module, head_dim: int) -> None:
        super().__init__()
        self.__dict__["attention"] = attention  # not registered: it is only asked
        self.q_proj = nn.Identity()
        self.head_dim = head_dim

    def __getattr__(self, name: str) -> Any:
        if name in ("k_proj", "qkv_proj", "v_proj"):
            raise KvlearnError("this press reads hidden states, which a cache's slots do not hold; choose another.")
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["attention"], name)


@dataclass
class KVPress(Policy):
    """Any scorer press of kvpress (NVIDIA), run over a layer's slots in the order of their positions.

    A press reads the hidden states that came in; here it gets the layer's latest queries in their place, as many as its
    ``window_size`` and one, and 128 for a press that names none. A row is scored for itself where rows hold different
    numbers of tokens.

    Args:
        press: class of the press, such as ``SnapKVPress``.
        options: its arguments, such as ``window_size=32+kernel_size=7``.

    Raises:
        KvlearnError: kvpress is missing, has no such press, or the press reads what slots do not hold.
    """

    press: str = ""
    options: str = ""

    name = "kvpress"
    summary = "a press of kvpress, such as kvpress:SnapKVPress"
    paper = "kvpress (github.com/NVIDIA/kvpress)"
    reads = frozenset({"queries"})

    def __post_init__(self) -> None:
        self._press = make_press(self.press, self.options)
        for what, names in _NEEDS.items():
            if self.press in names:
                raise KvlearnError(f"{self.press} reads {what}, which a cache's slots do not hold; choose another.")
        # One more than the window, because presses ask for more queries than they use.
        self.query_window = getattr(self._press, "window_size", _WINDOW - 1) + 1
        self._stands: dict[int, Stand] = {}

    @property
    def label(self) -> str:
        """As it is typed."""
        return ":".join(filter(None, [self.name, self.press, self.options and f"options={self.options}"]))

    def bind(self, model: PreTrainedModel) -> None:
        """Find the model's attention modules, and let the press prepare itself."""
        try:
            self._press.post_init_from_model(model)
        except Exception as error:  # whatever a press loads may be missing
            raise KvlearnError(f"{self.press} cannot serve {type(model).__name__}: {error}.") from error
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name, module in model.named_modules():
            if name.endswith("self_attn") and isinstance(getattr(module, "layer_idx", None), int):
                self._stands[module.layer_idx] = Stand(module, head_dim)

    def score(self, slots: Slots) -> Tensor:
        """The press's score of each slot."""
        if slots.layer not in self._stands:
            raise KvlearnError(f"{self.press} is not bound to a model with a layer {slots.layer}; use it in a cache.")
        held = slots.valid.sum(-1)
        if bool((held != held[:, :1]).any()):
            raise KvlearnError(
                f"{self.press} scores the heads of a layer together, and they hold different numbers of tokens; use "
                "uniform allocation."
            )
        counts = held[:, 0].tolist()
        together = len(set(counts)) == 1 and (slots.queries is None or bool((slots.queries.positions >= 0).all()))
        rows = [slice(None)] if together else [slice(b, b + 1) for b in range(len(counts))]
        return torch.cat([self._score_rows(slots, row, counts[row][0]) for row in rows])

    def _score_rows(self, slots: Slots, rows: slice, count: int) -> Tensor:
        """Score rows that hold ``count`` tokens each: sorted by position, then put back."""
        pos = slots.pos[rows]
        order = pos.argsort(dim=-1, stable=True)[..., pos.shape[-1] - count :]  # empty slots come first
        index = order[..., None].expand(*order.shape, slots.keys.shape[-1])
        keys, values = (t[rows].gather(2, index) for t in (slots.keys, slots.values))
        hidden, kwargs = self._inputs(slots, rows)
        kept = slots.budget if count > slots.budget else slots.budget - slots.block
        self._press.compression_ratio = max(0.0, 1 - kept / count)  # some scores depend on how many go
        try:
            found = self._press.score(self._stands[slots.layer], hidden, keys, values, None, kwargs)
        except AssertionError as error:
            raise KvlearnError(f"{self.press} cannot score {count} slots: {error}.") from error
        finally:
            self._press.compression_ratio = 0.0
        score = torch.zeros(pos.shape, dtype=torch.float32, device=pos.device)
        return score.scatter_(-1, order, found.float())

    def _inputs(self, slots: Slots, rows: slice) -> tuple[Tensor, dict[str, Any]]:
        """Queries where hidden states are expected, ``[B, C, H * G * D]``, and what else a press is handed."""
        if slots.queries is None:
            raise KvlearnError(f"{self.press} scores by queries, and none has come yet.")
        known = (slots.queries.positions[rows] >= 0).all(0)  # one row, or all alike
        recent = Queries(
            slots.queries.rotated[rows][:, :, known],
            slots.queries.positions[rows][:, known],
            slots.queries.scale,
            slots.queries.rotary,
        )
        hidden = recent.plain.transpose(1, 2).flatten(2)
        kwargs: dict[str, Any] = {"cache_position": recent.positions[0]}
        if recent.rotary is not None:
            kwargs["position_embeddings"] = recent.rotary.angles(recent.positions, hidden)
        return hidden, kwargs

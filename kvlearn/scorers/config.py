"""What a scorer is: the content of its ``config.json``, read field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvlearn import features, history
from kvlearn.errors import KvlearnError
from kvlearn.shapes import DEFAULT_BLOCK, GroupReduce
from kvlearn.targets import SHARPEST, SHARPNESS, Reduce, Value

FORMAT = 2
"""Version of the folder's layout. Raised when an older kvlearn could no longer read what is written."""

Kind = Literal["linear", "mlp"]
Encoder = Literal["none", "key", "layer"]
HeadAllocation = Literal["uniform", "pooled"]

_MEAN_TOLERANCE = 1e-3  # how far the mean of the layer budgets may be from 1


@dataclass(frozen=True)
class ScorerConfig:
    """Shape, meaning and origin of a scorer.

    Args:
        layers: indices, in the model, of the layers it scores; ``L`` of them.
        heads: KV heads per layer, ``H``.
        head_dim: ``D``.
        kind: ``"linear"``, or ``"mlp"``: linear plus one hidden layer.
        hidden: hidden width of an MLP, 0 for linear.
        encoder: what is read of the content of keys and values: ``"none"``; ``"key"``: each KV head's own key, by a
            linear map; or ``"layer"``: the keys and values of all KV heads, by a linear map plus one hidden layer.
        key_rank: numbers that the encoder gives for each KV head, ``R``; 0 for encoder ``"none"``.
        encoder_hidden: width of the hidden layer of encoder ``"layer"``.
        block: queries per observed block, ``W``, of the traces it was trained on.
        group_reduce: how query heads were reduced to their KV head when attention was observed.
        horizon: future queries that the forecast covers; several are averaged, 0 is to the end of the text.
        reduce: what is forecast over the horizon; see :data:`kvlearn.targets.Reduce`.
        value_power: what is forecast is multiplied by the weight of the value to this power; 0 forecasts plain mass.
        value: what that weight is; see :data:`kvlearn.targets.Value`.
        sharpness: of reduce ``"soft-max"``.
        model: :func:`kvlearn.models.fingerprint` of the model it was trained for; empty when it has not been trained.
        training: the recipe: every option of the training run.
        data: the traces it was trained on.
        metrics: measured results, each ``{"title", "command", "table", "notes"}``; see :mod:`kvlearn.scorers.card`.
        budgets: recommended budget of each layer relative to the mean (``L`` floats with mean 1), or ``None`` for
            equal budgets.
        allocation: how the heads of a layer share its slots where ``budgets`` are followed: "uniform" or "pooled".

    Raises:
        KvlearnError: a value is out of range; the message names the field.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    kind: Kind = "mlp"
    hidden: int = 32
    encoder: Encoder = "key"
    key_rank: int = 8
    encoder_hidden: int = 64
    block: int = DEFAULT_BLOCK
    group_reduce: GroupReduce = "mean"
    horizon: tuple[int, ...] = (256,)
    reduce: Reduce = "mean"
    value_power: float = 0.0
    value: Value = "norm"
    sharpness: float = SHARPNESS
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Mapping[str, Any], ...] = ()
    budgets: tuple[float, ...] | None = None
    allocation: HeadAllocation = "uniform"

    def __post_init__(self) -> None:
        if not self.layers or any(i < 0 for i in self.layers) or len(set(self.layers)) != len(self.layers):
            raise KvlearnError(f"scorer.layers is {list(self.layers)}; list each layer's index once.")
        for name in ("heads", "head_dim", "block"):
            if getattr(self, name) < 1:
                raise KvlearnError(f"scorer.{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.kind not in get_args(Kind):
            raise KvlearnError(f"scorer.kind is {self.kind!r}; use 'linear' or 'mlp'.")
        if (self.hidden != 0) if self.kind == "linear" else (self.hidden < 1):
            raise KvlearnError(f"scorer.hidden is {self.hidden} for kind {self.kind!r}; linear takes 0, mlp 1 or more.")
        self._check_encoder()
        if self.group_reduce not in get_args(GroupReduce):
            raise KvlearnError(f"scorer.group_reduce is {self.group_reduce!r}; use 'mean' or 'max'.")
        if self.reduce not in get_args(Reduce):
            raise KvlearnError(f"scorer.reduce is {self.reduce!r}; use one of {', '.join(get_args(Reduce))}.")
        if not self.horizon or any(h < 0 for h in self.horizon):
            raise KvlearnError(f"scorer.horizon is {list(self.horizon)}; give numbers of queries, 0 for 'to the end'.")
        if not math.isfinite(self.value_power):
            raise KvlearnError(f"scorer.value_power is {self.value_power}; give a finite number.")
        if self.value not in get_args(Value):
            raise KvlearnError(f"scorer.value is {self.value!r}; use one of {', '.join(get_args(Value))}.")
        if not 1 <= self.sharpness <= SHARPEST:
            raise KvlearnError(f"scorer.sharpness is {self.sharpness}; give a number from 1 to {SHARPEST:g}.")
        self._check_budgets()

    def _check_encoder(self) -> None:
        if self.encoder not in get_args(Encoder):
            raise KvlearnError(f"scorer.encoder is {self.encoder!r}; use one of {', '.join(get_args(Encoder))}.")
        if self.encoder_hidden < 1:
            raise KvlearnError(f"scorer.encoder_hidden is {self.encoder_hidden}; it must be 1 or more.")
        if self.encoder == "none" and self.key_rank != 0:
            raise KvlearnError(f"scorer.key_rank is {self.key_rank} for encoder 'none', which gives 0 numbers.")
        if self.encoder != "none" and not 1 <= self.key_rank <= self.head_dim:
            raise KvlearnError(
                f"scorer.key_rank is {self.key_rank}; it must lie in 1 to {self.head_dim} (head_dim), or be 0 with "
                "encoder 'none'."
            )

    def _check_budgets(self) -> None:
        if self.allocation not in get_args(HeadAllocation):
            raise KvlearnError(f"allocation is {self.allocation!r}; use one of {', '.join(get_args(HeadAllocation))}.")
        if self.budgets is None:
            return
        if len(self.budgets) != len(self.layers):
            raise KvlearnError(
                f"budgets lists {len(self.budgets)} numbers for {len(self.layers)} layers; give one number per layer."
            )
        if not all(math.isfinite(b) and b > 0 for b in self.budgets):
            raise KvlearnError(f"budgets is {list(self.budgets)}; every number must be finite and above 0.")
        mean = sum(self.budgets) / len(self.budgets)
        if abs(mean - 1) > _MEAN_TOLERANCE:
            raise KvlearnError(f"budgets has mean {mean:.4g}; divide by it, so that the total stays the user's budget.")

    @property
    def static_size(self) -> int:
        """Static features per slot."""
        return len(features.STATIC_SCALARS) + self.key_rank

    @property
    def inputs(self) -> int:
        """Features per slot, dynamic and static."""
        return len(features.DYNAMIC) + self.static_size

    def to_json(self) -> str:
        """The text of ``config.json``, without the hash of the weights."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Everything, with the definitions of history and features that the weights rely on."""
        return {
            "format": FORMAT,
            "features": _feature_definition(self.key_rank),
            "history": _history_definition(),
            "scorer": {
                "kind": self.kind,
                "hidden": self.hidden,
                "encoder": self.encoder,
                "key_rank": self.key_rank,
                "encoder_hidden": self.encoder_hidden,
                "layers": list(self.layers),
                "heads": self.heads,
                "head_dim": self.head_dim,
            },
            "observation": {"block": self.block, "group_reduce": self.group_reduce},
            "forecast": {
                "horizon": list(self.horizon),
                "reduce": self.reduce,
                **({"sharpness": self.sharpness} if self.reduce == "soft-max" else {}),
                **({"value": self.value} if self.value != "norm" else {}),
                "value_power": self.value_power,
            },
            "model": dict(self.model),
            "training": dict(self.training),
            "data": dict(self.data),
            "metrics": [dict(m) for m in self.metrics],
            "budgets": None if self.budgets is None else list(self.budgets),
            **({"allocation": self.allocation} if self.allocation != "uniform" else {}),
        }

    @classmethod
    def from_dict(cls, data: Any, source: str) -> ScorerConfig:
        """Read what :meth:`as_dict` gave, checking every field.

        Args:
            data: parsed JSON.
            source: the file it came from, for messages.

        Raises:
            KvlearnError: a field is missing, unknown, of the wrong type or out of range, or the scorer was made with
                another definition of features or history.
        """
        read = _Reader(data, source)
        version = read("format", int)
        if version != FORMAT:
            hint = "update kvlearn" if version > FORMAT else "train the scorer again, or use the kvlearn that made it"
            raise KvlearnError(f"{source}: format is {version} and this kvlearn reads {FORMAT}; {hint}.")
        if read("features.version", int) != features.VERSION:
            raise KvlearnError(
                f"{source}: features.version is {data['features']['version']} and this kvlearn computes version "
                f"{features.VERSION}; train the scorer again, or use the kvlearn that made it."
            )
        try:
            config = cls(
                layers=tuple(read.list("scorer.layers", int)),
                heads=read("scorer.heads", int),
                head_dim=read("scorer.head_dim", int),
                kind=read("scorer.kind", str),
                hidden=read("scorer.hidden", int),
                encoder=read("scorer.encoder", str),
                key_rank=read("scorer.key_rank", int),
                encoder_hidden=read("scorer.encoder_hidden", int),
                block=read("observation.block", int),
                group_reduce=read("observation.group_reduce", str),
                horizon=tuple(read.list("forecast.horizon", int)),
                reduce=read("forecast.reduce", str),
                value_power=float(read("forecast.value_power", float)),
                value=read.optional("forecast.value", str, "norm"),
                sharpness=float(read.optional("forecast.sharpness", float, SHARPNESS)),
                model=read("model", dict),
                training=read("training", dict),
                data=read("data", dict),
                metrics=tuple(read.list("metrics", dict)),
                budgets=None if read.get("budgets") is None else tuple(map(float, read.list("budgets", float))),
                allocation=read.optional("allocation", str, "uniform"),
            )
        except KvlearnError as error:
            raise KvlearnError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
        read.same("features", _feature_definition(config.key_rank))
        read.same("history", _history_definition())
        read.nothing_else(config.as_dict())
        return config


def _feature_definition(key_rank: int) -> dict[str, Any]:
    static = [*features.STATIC_SCALARS, *(f"encoded{i}" for i in range(key_rank))]
    return {"version": features.VERSION, "dynamic": list(features.DYNAMIC), "static": static}


def _history_definition() -> dict[str, Any]:
    return {
        "fields": list(history.FIELDS),
        "half_lives": list(history.HALF_LIVES),
        "peak_half_life": history.PEAK_HALF_LIFE,
        "hit_half_life": history.HIT_HALF_LIFE,
        "hit_mass": history.HIT_MASS,
    }


class _Reader:
    """Fields of a parsed JSON object by dotted path, with messages that name file and field."""

    def __init__(self, data: Any, source: str) -> None:
        if not isinstance(data, dict):
            raise KvlearnError(f"{source}: holds {_kind(data)} where a scorer's config is a JSON object.")
        self.data, self.source = data, source

    def get(self, path: str) -> Any:
        value: Any = self.data
        for part in path.split("."):
            if not isinstance(value, dict) or part not in value:
                raise KvlearnError(f"{self.source}: {path} is missing; the file is damaged or not a scorer's.")
            value = value[part]
        return value

    def __call__(self, path: str, kind: Callable[..., Any]) -> Any:
        return self._typed(path, self.get(path), kind)

    def optional(self, path: str, kind: Callable[..., Any], default: Any) -> Any:
        """A field that is written only where it says something."""
        section, _, name = path.rpartition(".")
        return self(path, kind) if name in (self.get(section) if section else self.data) else default

    def list(self, path: str, kind: Callable[..., Any]) -> list[Any]:
        values = self._typed(path, self.get(path), list)
        return [self._typed(f"{path}[{i}]", value, kind) for i, value in enumerate(values)]

    def _typed(self, path: str, value: Any, kind: Any) -> Any:
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise KvlearnError(f"{self.source}: {path} is {value!r}, {_kind(value)}; expected {_NAMES[kind]}.")
        return value

    def same(self, path: str, expected: dict[str, Any]) -> None:
        for name, value in expected.items():
            found = self.get(f"{path}.{name}")
            if found != value:
                raise KvlearnError(
                    f"{self.source}: {path}.{name} is {found!r} and this kvlearn has {value!r}; the scorer reads other "
                    "numbers than are computed here: train it again, or use the kvlearn that made it."
                )

    def nothing_else(self, known: dict[str, Any]) -> None:
        free = ("model", "training", "data", "metrics", "budgets")
        unknown = [name for name in self.data if name not in known]
        for section, fields in known.items():
            if section not in free and isinstance(fields, dict):
                unknown += [f"{section}.{name}" for name in self.data[section] if name not in fields]
        if unknown:
            raise KvlearnError(f"{self.source}: {unknown[0]} is not a field of format {FORMAT}; remove it.")


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list",
}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)

"""A cache on disk: one safetensors file with all of its state, so that another process goes on where it stopped.

Tensors are the file's tensors, named ``layer.N.NAME``; everything else is JSON in the file's metadata. A learned policy
travels with its scorer (``scorer.NAME``), any other policy by its label.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.models import fingerprint, fingerprint_mismatch, same_weights
from kvlearn.policies import parse, resolve
from kvlearn.policies.base import Policy
from kvlearn.policies.learned import Learned
from kvlearn.scorers import Scorer, ScorerConfig
from kvlearn.shapes import Protection
from kvlearn.slots import SLOT_DIM, SlotStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlearn.cache import EvictingCache

FORMAT = 1
"""Version of the file's layout. Raised when an older kvlearn could no longer read what is written."""

_KEY = "kvlearn_cache"


@dataclass(frozen=True)
class Saved:
    """The content of a file.

    Attributes:
        path: where it came from.
        meta: everything but the tensors.
        tensors: by name, on the CPU.
    """

    path: Path
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def policy(self) -> Policy:
        """The policy that the cache ran.

        Raises:
            KvlearnError: it cannot be made from the file alone.
        """
        told = self.meta["policy"]
        if told["scorer"] is not None:
            config = ScorerConfig.from_dict(told["scorer"], str(self.path))
            scorer = Scorer(config)
            with self.explained("the scorer's weights do not fit its configuration"):
                scorer.load_state_dict(self._under("scorer"))
            return Learned(scorer.eval(), told["label"], told.get("inputs", "float16"))
        with contextlib.suppress(KvlearnError):
            if parse(told["label"]) is not None:
                return resolve(told["label"])
        raise KvlearnError(
            f"{self.path}: its policy {told['label']!r} cannot be made from the file alone; give "
            "EvictingCache.load(path, model, policy=...) the policy that the cache ran."
        )

    def options(self) -> dict[str, Any]:
        """Arguments of :class:`EvictingCache`, as they were."""
        options = dict(self.meta["options"])
        return {**options, "protect": Protection(**options["protect"])}

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse another model than the one that filled the cache.

        Raises:
            KvlearnError: the first field that differs, with both values.
        """
        saved, found = self.meta["model"], fingerprint(model)
        difference = fingerprint_mismatch(saved, found)
        if difference is None and not same_weights(saved, found):
            difference = "the weights are others"
        if difference is None and self.meta["dtype"] != str(model.dtype):
            difference = f"dtype: {self.meta['dtype']} against {model.dtype}"
        if difference is not None:
            raise KvlearnError(f"{self.path}: was filled by another model ({difference}); load it with that model.")

    def restore(self, cache: EvictingCache, device: torch.device) -> None:
        """Put the saved state into a fresh cache of the same options.

        Raises:
            KvlearnError: state is missing, or of the wrong shape.
        """
        if len(cache.layers) != len(self.meta["layers"]):
            raise KvlearnError(f"{self.path}: holds {len(self.meta['layers'])} layers of {len(cache.layers)}.")
        layers: list[Any] = cache.layers
        for i, (layer, plain) in enumerate(zip(layers, self.meta["layers"], strict=True)):
            tensors = {name: tensor.to(device) for name, tensor in self._under(f"layer.{i}").items()}
            with self.explained(f"layer {i} does not fit its cache"):
                if isinstance(layer, SlotStore) and tensors:
                    _check_slots(layer, tensors, plain.get("lanes", 1))
                if "keys" in tensors:
                    layer.lazy_initialization(tensors["keys"][:, :, :0], tensors["values"][:, :, :0])
                for name, value in {**plain, **tensors}.items():
                    if name not in vars(layer):
                        raise ValueError(f"{name} is not part of it")
                    setattr(layer, name, value)

    def _under(self, prefix: str) -> dict[str, Tensor]:
        start = prefix + "."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}

    @contextlib.contextmanager
    def explained(self, fault: str) -> Iterator[None]:
        """Say which file is damaged, and how."""
        try:
            yield
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise KvlearnError(f"{self.path}: {fault} ({error}); the file is damaged, save the cache again.") from error


def _check_slots(layer: SlotStore, tensors: Mapping[str, Tensor], lanes: int) -> None:
    batch, heads, capacity = tensors["pos"].shape
    slots = layer.config.budget.slots
    if slots is not None and capacity != slots * lanes:
        raise ValueError(f"pos has {capacity} slots of a budget of {slots * lanes}")
    for name, tensor in tensors.items():
        expected: tuple[int, ...] = (batch,)
        found: tuple[int, ...] = tuple(tensor.shape[:1])
        if name in SLOT_DIM:
            expected, found = (batch, heads, capacity), (*tensor.shape[:2], tensor.shape[SLOT_DIM[name]])
        if expected != found:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and pos {(batch, heads, capacity)}")


def capture(cache: EvictingCache, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All of a cache's state: what goes into JSON, and tensors.

    Raises:
        KvlearnError: a layer that is not managed keeps state of a kind that is not known here.
    """
    tensors: dict[str, Tensor] = {}
    plain: list[dict[str, Any]] = []
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        own: dict[str, Any] = {}
        for name, value in vars(layer).items():
            if isinstance(value, Tensor):
                tensors[f"layer.{i}.{name}"] = value.detach().cpu().clone().contiguous()
            elif isinstance(value, bool | int | float):
                own[name] = value
            elif isinstance(value, dict | list) and value:
                raise KvlearnError(f"layer {i} ({type(layer).__name__}) keeps state that cannot be saved yet.")
        plain.append(own)
    scorer = cache.policy.scorer if isinstance(cache.policy, Learned) else None
    if scorer is not None:
        tensors |= {f"scorer.{name}": t.detach().cpu().contiguous() for name, t in scorer.state_dict().items()}
    policy: dict[str, Any] = {
        "label": cache.policy.label,
        "scorer": None if scorer is None else scorer.config.as_dict(),
    }
    if isinstance(cache.policy, Learned):
        policy["inputs"] = cache.policy.inputs
    meta = {
        "format": FORMAT,
        "model": fingerprint(model),
        "dtype": str(model.dtype),
        "policy": policy,
        "options": {**cache.options, "protect": asdict(cache.options["protect"])},
        "layers": plain,
    }
    return meta, tensors


def write(path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file under a temporary name, then put it in place.

    Raises:
        KvlearnError: ``path`` is a folder, or the file cannot be written.
    """
    if path.is_dir():
        raise KvlearnError(f"{path} is a folder; give the name of a file to save the cache to.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file(dict(tensors), temporary, metadata={_KEY: json.dumps(meta)})
            os.chmod(temporary, 0o644)  # mkstemp makes it private
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, SafetensorError) as error:
        raise KvlearnError(f"the cache cannot be saved to {path}: {error}.") from error


def read(path: Path) -> Saved:
    """Read a file.

    Raises:
        KvlearnError: the file is missing, damaged, no cache, or of another format.
    """
    if not path.is_file():
        raise KvlearnError(f"there is no saved cache {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        meta = None if text is None else json.loads(text)
    except (SafetensorError, OSError, ValueError) as error:
        raise KvlearnError(f"{path}: is damaged ({error}); save the cache again.") from error
    if not isinstance(meta, dict):
        raise KvlearnError(f"{path}: is no saved cache; {_KEY} is missing from its metadata.")
    if meta.get("format") != FORMAT:
        raise KvlearnError(
            f"{path}: format is {meta.get('format')!r} and this kvlearn reads {FORMAT}; use the kvlearn that saved it."
        )
    for name in ("model", "dtype", "policy", "options", "layers"):
        if name not in meta:
            raise KvlearnError(f"{path}: {name} is missing from its metadata; the file is damaged.")
    return Saved(path, meta, tensors)

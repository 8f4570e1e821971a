"""Q-Filters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlearn.errors import KvlearnError
from kvlearn.models import fingerprint
from kvlearn.models.gguf import cache_root
from kvlearn.policies.base import Policy, Slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS, WINDOWS, WINDOW = "torch-docs,transformers-code", 8, 1024
"""What a model is calibrated on when nothing else is said: texts, windows, tokens of each."""

_GATHERING = "kvlearn_gathering"


@dataclass
class QFilters(Policy):
    """Keys along the direction in which a head's queries lie (Q-Filters, arXiv 2503.02812).

    The filter of a query head is the first right singular vector of its (rotated) queries on some text, signed so that
    most queries lie on its side; that of a KV head is the mean over its group. A slot's score is its key's projection.

    A model is calibrated once, on 8,192 tokens of texts that come with Python packages, when a cache is first made for
    it, and the filters are kept in kvlearn's cache folder (``KVLEARN_CACHE``). :meth:`calibrated` takes tokens of your
    own.

    Args:
        file: safetensors file of filters, as :meth:`save` writes it; by default the model's own in the cache folder.
        filters: ``[L, H, D]`` filters, instead of a file.
    """

    file: str = ""
    filters: Tensor | None = field(default=None, repr=False, compare=False)

    name = "q-filters"
    summary = "keys along the main direction of the queries, calibrated once"
    paper = "Q-Filters, arXiv 2503.02812"

    def __post_init__(self) -> None:
        self._own = self.filters is not None

    @property
    def label(self) -> str:
        """As it is typed, or that the filters are one's own, which no name gives back."""
        return f"{self.name} (own filters)" if self._own else super().label

    @classmethod
    def calibrated(cls, model: PreTrainedModel, input_ids: Tensor) -> QFilters:
        """Filters of ``model`` from ``[N, T]`` tokens."""
        return cls(filters=calibrate(model, input_ids))

    def save(self, path: str | Path) -> None:
        """Write the filters to a safetensors file."""
        assert self.filters is not None
        _write(Path(path), self.filters)

    def bind(self, model: PreTrainedModel) -> None:
        """Read the filters, or make them if the model has none yet.

        Raises:
            KvlearnError: the file cannot be read or is for a model of another shape, or the model comes without a
                tokenizer to read texts with.
        """
        if self.filters is None:
            kept = Path(self.file or cache_root() / "q-filters" / f"{fingerprint(model)['weights']}.safetensors")
            if not self.file and not kept.exists():
                _write(kept, calibrate(model, _texts(model)))
            self.filters = _read(kept)
        shape = fingerprint(model)
        expected = tuple(shape[name] for name in ("layers", "kv_heads", "head_dim"))
        if tuple(self.filters.shape) != expected:
            raise KvlearnError(
                f"q-filters: filters are {tuple(self.filters.shape)} and the model has {expected} (layers, KV heads, "
                "head dimension); give filters of this model."
            )
        self.filters = self.filters.to(model.device)

    def score(self, slots: Slots) -> Tensor:
        """Projection of the key."""
        assert self.filters is not None, "bind a model first"
        return (slots.keys.float() * self.filters[slots.layer][None, :, None]).sum(-1)


@torch.no_grad()
def calibrate(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """``[L, H, D]`` float32 filters of a model; zeros for layers without attention of their own.

    Args:
        model: a causal language model.
        input_ids: ``[N, T]`` tokens, one window a row.
    """
    shape = fingerprint(model)
    heads, kv_heads, dim = shape["query_heads"], shape["kv_heads"], shape["head_dim"]
    products = torch.zeros(shape["layers"], heads, dim, dim, dtype=torch.float64)
    sums = torch.zeros(shape["layers"], heads, dim, dtype=torch.float64)

    def gather(layer: int, query: Tensor) -> None:
        wide = query[0].double()  # [H * G, T, D]
        products[layer] += (wide.mT @ wide).cpu()
        sums[layer] += wide.sum(1).cpu()

    with _gathering(model, gather):
        for row in input_ids:
            model(row[None].to(model.device), use_cache=False, logits_to_keep=1)
    first = torch.linalg.eigh(products).eigenvectors[..., -1]  # of Q'Q: the right singular vector of Q
    side = (first * sums).sum(-1, keepdim=True)
    filters = torch.where(side < 0, -first, first)
    filters = filters.masked_fill(products.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) == 0, 0.0)
    return filters.view(shape["layers"], kv_heads, heads // kv_heads, dim).mean(2).float()


@contextmanager
def _gathering(model: PreTrainedModel, gather: Any) -> Iterator[None]:
    """Hand every layer's rotated queries ``[1, H * G, T, D]`` to ``gather``."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        gather(module.layer_idx, query)
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register(_GATHERING, attend)
    AttentionMaskInterface.register(_GATHERING, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_GATHERING)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _texts(model: PreTrainedModel) -> Tensor:
    """``[N, T]`` tokens of the texts that every model is calibrated on."""
    from transformers import AutoTokenizer

    from kvlearn.corpora import corpus_windows

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise KvlearnError(
            f"q-filters: no tokenizer at {model.name_or_path!r} to calibrate this model with; in Python, use "
            "QFilters.calibrated(model, input_ids)."
        ) from error
    found = corpus_windows(TEXTS, tokenizer, tokens=WINDOWS * WINDOW, window=WINDOW, split="train")
    return torch.tensor([one.input_ids for one in found], dtype=torch.int64)


def _write(path: Path, filters: Tensor) -> None:
    from safetensors.torch import save

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save({"filters": filters.float().cpu().contiguous()}))
        temporary.replace(path)
    except OSError as error:
        raise KvlearnError(f"q-filters: cannot write {path}: {error.strerror or error}.") from error


def _read(path: Path) -> Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)["filters"]
    except (OSError, SafetensorError, KeyError) as error:
        raise KvlearnError(f"q-filters: cannot read filters from {path}: {error}; calibrate anew.") from error

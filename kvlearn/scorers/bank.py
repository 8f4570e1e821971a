"""The scorers of all layers of a model, as one module with batched weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelHubMixin
from torch import Tensor, nn

from kvlearn import features
from kvlearn.errors import KvlearnError
from kvlearn.kernels.score import Weights, evaluate
from kvlearn.scorers import files
from kvlearn.scorers.config import ScorerConfig
from kvlearn.scorers.encoder import ENCODERS, versions
from kvlearn.shapes import Layer

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel

START = "log_ema64"
"""The dynamic feature that an untrained scorer returns: the ranking of the ``ema`` policy."""

_CODES = 24  # int8 codes a standard deviation: 127 codes reach 5.3 deviations, where larger inputs are cut off
_LEAST_STD = 1e-4  # a feature that varies less than this in the data is not divided by its deviation


class Scorer(nn.Module, ModelHubMixin, library_name="kvlearn", tags=["kv-cache", "kvlearn"]):
    """One scorer per managed layer and KV head: features of a slot to one number, higher is kept.

    The number is a forecast of the log of the mass that the slot will receive over the horizon. A listwise loss (KL)
    leaves it free up to one constant per layer and head, which training sets on its validation windows: forecasts of
    a head sum to what it receives. So scores of different heads compare.

    Untrained, it returns feature :data:`START` exactly, so that training starts from a good heuristic: the linear part
    picks that feature and the hidden units' output weights are zero. ``from_pretrained``, ``save_pretrained`` and
    ``push_to_hub`` are those of ``huggingface_hub.ModelHubMixin``; weights are safetensors, all else is JSON.

    Args:
        config: shape, meaning and origin.
    """

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        self.config = config
        lead = (len(config.layers), config.heads)
        inputs, hidden = config.inputs, config.hidden
        self.index_of = {layer: i for i, layer in enumerate(config.layers)}
        self.encoder = ENCODERS[config.encoder](config) if config.encoder in ENCODERS else None
        self.skip = nn.Parameter(torch.empty(*lead, inputs))
        self.bias = nn.Parameter(torch.empty(*lead))
        self.w1 = nn.Parameter(torch.empty(*lead, inputs, hidden)) if hidden else None
        self.b1 = nn.Parameter(torch.empty(*lead, hidden)) if hidden else None
        self.w2 = nn.Parameter(torch.empty(*lead, hidden)) if hidden else None
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(*lead, inputs))
        self.register_buffer("std", torch.ones(*lead, inputs))
        self.code_mean: Tensor
        self.code_std: Tensor
        self.register_buffer("code_mean", torch.zeros(*lead, config.static_size))
        self.register_buffer("code_std", torch.ones(*lead, config.static_size))
        self._cache: dict[tuple[Layer | None, bool], Weights] = {}
        self._cache_key: tuple[int, ...] = ()
        self.reset_parameters()

    @classmethod
    def for_model(cls, model: PreTrainedModel, **options: Any) -> Self:
        """An untrained scorer for a loaded model; ``options`` are those of :class:`ScorerConfig`."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        from kvlearn.models import fingerprint

        print_ = fingerprint(model)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        layers = tuple(i for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer)
        shape = {"layers": layers, "heads": print_["kv_heads"], "head_dim": print_["head_dim"], "model": print_}
        return cls(ScorerConfig(**{**shape, **options}))

    # ---- weights -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Untrained weights, for whatever standardisation is set."""
        start = features.DYNAMIC.index(START)
        self.skip.zero_()
        self.skip[..., start] = self.std[..., start]
        self.bias.copy_(self.mean[..., start])
        if self.encoder is not None:
            self.encoder.reset_parameters()
        if self.w1 is not None and self.b1 is not None and self.w2 is not None:
            nn.init.normal_(self.w1, std=self.config.inputs**-0.5)
            nn.init.uniform_(self.b1, -1.0, 1.0)
            self.w2.zero_()

    @torch.no_grad()
    def fit_inputs(self, dynamic: Tensor, vectors: Tensor) -> None:
        """Set the standardisation and where the encoder starts from data, and reset all other weights.

        Args:
            dynamic: ``[L, H, M, F]`` dynamic features of a sample of slots.
            vectors: ``[L, 2 H, N, D]`` a sample of tokens, from :func:`kvlearn.features.layer_vectors`.
        """
        self.mean.zero_()
        self.std.fill_(1.0)
        self.reset_parameters()
        if self.encoder is not None:
            self.encoder.fit(vectors)
        own = self.static_inputs(vectors)
        self.track(own, 1.0)
        for part, at in ((dynamic.float(), slice(0, dynamic.shape[-1])), (own, slice(dynamic.shape[-1], None))):
            std, mean = torch.std_mean(part, dim=-2)
            self.std[..., at] = torch.where(std > _LEAST_STD, std, torch.ones_like(std))
            self.mean[..., at] = mean
        start = features.DYNAMIC.index(START)
        self.skip[..., start] = self.std[..., start]
        self.bias.copy_(self.mean[..., start])

    def _fold(self) -> Weights:
        """Standardisation folded into the weights, of the heads of all layers."""
        weight = self.skip.flatten(0, 1)[:, None]  # [X, 1, F']
        bias = self.bias.flatten()[:, None]  # [X, 1]
        out = None
        if self.w1 is not None and self.b1 is not None and self.w2 is not None:
            weight = torch.cat([weight, self.w1.flatten(0, 1).transpose(1, 2)], dim=1)
            bias = torch.cat([bias, self.b1.flatten(0, 1)], dim=1)
            out = self.w2.flatten(0, 1)[:, None]
        weight = weight / self.std.flatten(0, 1)[:, None]
        bias = torch.baddbmm(bias[..., None], weight, self.mean.flatten(0, 1)[..., None], alpha=-1)
        split = len(features.DYNAMIC)
        return Weights(weight[..., :split], weight[..., split:], bias, out)

    # ---- training: all layers at once --------------------------------------------------------------------------

    def static_inputs(self, vectors: Tensor) -> Tensor:
        """Static inputs of all layers in float32, so that gradients reach the encoder.

        :meth:`static` gives the same numbers rounded to :data:`kvlearn.features.STATIC_DTYPE`.

        Args:
            vectors: ``[L, 2 H, C, D]`` from :func:`kvlearn.features.layer_vectors`.

        Returns:
            ``[L, H, C, R + 2]``.
        """
        scalars = features.static_scalars(vectors)
        return scalars if self.encoder is None else torch.cat([scalars, self.encoder(vectors)], dim=-1)

    @torch.no_grad()
    def track(self, static: Tensor, rate: float) -> None:
        """Follow what static inputs have become in training, for the steps of :meth:`encode`.

        Args:
            static: ``[L, H, N, R + 2]`` of a sample of tokens.
            rate: how far to move from the mean and deviation known so far to those of the sample; 1 replaces them.
        """
        std, mean = torch.std_mean(static, dim=-2)
        self.code_mean.lerp_(mean, rate)
        self.code_std.lerp_(std.clamp(min=_LEAST_STD), rate)

    def forward(self, dynamic: Tensor, static: Tensor) -> Tensor:
        """Scores of all layers.

        Args:
            dynamic: ``[L, H, S, F]`` from :func:`kvlearn.features.dynamic_features`.
            static: ``[L, H, S, R + 2]`` from :meth:`static_inputs`.

        Returns:
            ``[L, H, S]`` float32.
        """
        return evaluate(self._fold(), dynamic.flatten(0, 1), static.flatten(0, 1)).view(dynamic.shape[:3])

    # ---- run time: one layer, or several as one with the heads of all ------------------------------------------

    @torch.no_grad()
    def static(self, layer: Layer, keys: Tensor, values: Tensor) -> Tensor:
        """Score inputs computed once, when tokens are written.

        Args:
            layer: index of the layer in the model, or of several, for the heads of one after the other.
            keys: ``[B, H, C, D]`` before the rotary embedding.
            values: ``[B, H, C, D]``.

        Returns:
            ``[B, H, C, R + 2]`` of :data:`kvlearn.features.STATIC_DTYPE`.

        Raises:
            KvlearnError: the scorer has no such layer.
        """
        vectors, layers = features.layer_vectors(keys, values), self._slice(layer)
        static = features.static_scalars(vectors)
        if self.encoder is not None:
            static = torch.cat([static, self.encoder.encode(layers, vectors)], dim=-1)
        return static.to(features.STATIC_DTYPE)

    @torch.no_grad()
    def encode(self, layer: Layer, static: Tensor) -> Tensor:
        """Static inputs as one byte each, which ``weights(layer, encoded=True)`` reads.

        A code is the standardised input in steps of 1/24; inputs further than 5.3 standard deviations from the mean of
        the training data are cut off.

        Args:
            layer: as for :meth:`static`.
            static: ``[B, H, C, R + 2]`` from :meth:`static`.

        Returns:
            int8 of the same shape.
        """
        layers = self._slice(layer)
        mean, std = (t[layers].flatten(0, 1)[:, None] for t in (self.code_mean, self.code_std))  # [H, 1, R + 2]
        return ((static.float() - mean) * (_CODES / std)).round_().clamp_(-127, 127).to(torch.int8)

    @torch.no_grad()
    def score(self, layer: int, dynamic: Tensor, static: Tensor) -> Tensor:
        """Scores of one layer; higher is kept.

        Args:
            layer: index of the layer in the model.
            dynamic: ``[B, H, S, F]`` from :func:`kvlearn.features.dynamic_features`.
            static: ``[B, H, S, R + 2]`` from :meth:`static`.

        Returns:
            ``[B, H, S]`` float32.

        Raises:
            KvlearnError: the scorer has no such layer.
        """
        folded = self.weights(layer)
        batch, heads, slots, _ = dynamic.shape
        if batch > 1:
            folded = folded.map(lambda t: t.repeat(batch, 1, 1))
        scores = evaluate(folded, dynamic.reshape(batch * heads, slots, -1), static.reshape(batch * heads, slots, -1))
        return scores.view(batch, heads, slots)

    @torch.no_grad()
    def weights(self, layer: Layer, encoded: bool = False) -> Weights:
        """What scores one layer, acting on raw features; kept until a weight changes.

        Args:
            layer: as for :meth:`static`.
            encoded: whether static inputs come from :meth:`encode`.

        Raises:
            KvlearnError: the scorer has no such layer.
        """
        key = versions(self)
        if key != self._cache_key:
            self._cache.clear()
            self._cache_key = key
        if (None, encoded) not in self._cache:
            folded = self._fold().map(lambda t: t.float().contiguous())
            if encoded:
                bias = folded.bias + folded.static @ self.code_mean.flatten(0, 1)[..., None]
                steps = self.code_std.flatten(0, 1)[:, None] / _CODES
                folded = folded._replace(static=folded.static * steps, bias=bias)
            self._cache[None, encoded] = folded
        if (layer, encoded) not in self._cache:  # a view
            layers, heads = self._slice(layer), self.config.heads
            rows = slice(layers.start * heads, layers.stop * heads)
            self._cache[layer, encoded] = self._cache[None, encoded].map(lambda t: t[rows])
        return self._cache[layer, encoded]

    def _slice(self, layer: Layer) -> slice:
        """Where the scorers of layers are that follow one another."""
        layers = layer if isinstance(layer, tuple) else (layer,)
        if layers[0] not in self.index_of:
            raise KvlearnError(f"this scorer has no layer {layers[0]}; it scores layers {list(self.config.layers)}.")
        first = self.index_of[layers[0]]
        found = slice(first, first + len(layers))
        if self.config.layers[found] != layers:
            raise KvlearnError(
                f"layers {layers} do not follow one another in those of this scorer: {self.config.layers}."
            )
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._cache.clear()  # weights move to another device or dtype
        return super()._apply(fn, recurse)

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse a model of another shape than the scorer was trained for.

        Other weights of the same shape are accepted: a scorer may serve a fine-tuned sibling.

        Raises:
            KvlearnError: the first field that differs, with both values.
        """
        from kvlearn.models import fingerprint, fingerprint_mismatch

        found = fingerprint(model)
        expected = self.config.model or {
            **found,
            "kv_heads": self.config.heads,
            "head_dim": self.config.head_dim,
            "layers": max(found["layers"], max(self.config.layers) + 1),
        }
        difference = fingerprint_mismatch(expected, found)
        if difference:
            raise KvlearnError(
                f"this scorer was trained for another model: {difference} here; train one for this model."
            )

    # ---- folders -----------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]  # fewer options than the mixin, which passes unknown ones on silently
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Self:
        """Load a scorer from a folder or the Hub, in eval mode, after checking every field and every weight.

        Args:
            pretrained_model_name_or_path: a folder, or a Hub id.
            revision: branch, tag or commit on the Hub.
            token: Hub token; by default that of ``hf auth login``.
            cache_dir: where Hub files are kept.
            local_files_only: do not ask the Hub.
            force_download: fetch Hub files again.

        Raises:
            KvlearnError: the folder is absent or damaged; the message names the file and the field.
        """
        folder = files.locate(
            pretrained_model_name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        config, weights = files.read(folder, lambda config: _shapes(cls, config))
        scorer = cls(config)
        scorer.load_state_dict(weights)
        return scorer.eval()

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: Any = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Write ``scorer.safetensors``, ``README.md`` and ``config.json``, each atomically and the config last.

        Args:
            save_directory: a folder, made if absent.
            config: only for the mixin; the scorer writes its own.
            repo_id: Hub id for ``push_to_hub``; by default the folder's name.
            push_to_hub: also upload.
            model_card_kwargs: only for the mixin; the card is made from the config.
            push_to_hub_kwargs: passed to ``push_to_hub``.

        Returns:
            The address of the commit if uploaded.

        Raises:
            KvlearnError: a weight is not finite, or the folder cannot be written.
        """
        if config is not None or model_card_kwargs:
            raise KvlearnError("a scorer writes its own config.json and README.md; change scorer.config instead.")
        weights = {name: tensor.detach().cpu().float().contiguous() for name, tensor in self.state_dict().items()}
        files.write(Path(save_directory), self.config, weights)
        if push_to_hub:
            return str(self.push_to_hub(repo_id or Path(save_directory).name, **push_to_hub_kwargs))
        return None


def _shapes(cls: type[Scorer], config: ScorerConfig) -> dict[str, list[int]]:
    """Names and shapes of the weights that ``config`` describes, without allocating them."""
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in cls(config).state_dict().items()}

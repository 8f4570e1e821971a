"""The scorers of a model as a Lightning module."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from kvlearn import features
from kvlearn.errors import KvlearnError
from kvlearn.scorers import Scorer, ScorerConfig
from kvlearn.scorers.bank import START
from kvlearn.scorers.config import Encoder, Kind
from train.data import TraceDataModule
from train.export import CONFIG_KEY
from train.losses import LOSSES, sample_share
from train.measure import Level, measures
from train.samples import Sample

_READABLE = (*features.DYNAMIC, *features.STATIC_SCALARS)  # the first inputs of every scorer, in order
_CALIBRATION_TOKENS = 512  # per window, of which the encoder's first weights and all standardisation are made
_NETWORK = ("kind", "hidden", "encoder", "key_rank", "encoder_hidden")  # what a scorer to start from brings along
_DECAYED = ("w1", "encoder.projection", "encoder.linear", "encoder.w1", "encoder.w2")
_BETAS = (0.9, 0.98)  # of AdamW: runs are a few hundred steps long
_TRACKED = 0.02  # how far each step moves the statistics of encoder outputs


class ScorerModule(pl.LightningModule):
    """All scorers of a model, trained at once.

    Args:
        kind: "linear", or "mlp": linear plus one hidden layer.
        hidden: hidden width of an MLP; ignored for linear.
        encoder: what is read of the content of keys and values: "none"; "key": each KV head's own key, through a linear
            map; or "layer": the keys and values of all KV heads, through a linear map plus one hidden layer.
        key_rank: numbers that the encoder gives for each KV head; ignored without one.
        encoder_hidden: hidden width of encoder "layer".
        without: inputs that the scorer is not to read, by their names in kvlearn.features: of the dynamic ones, such as
            "hits", and the two norms. What they would tell then shows in closed loop.
        losses: weight of each loss: "kl" (listwise: softmax of the score against future mass as a distribution),
            "huber" (score against log mass), "pairwise" (order across the boundary of a budget), "bce" (among the best
            or not). By default kl alone.
        least_share: smallest share of slots kept by the budgets that pairwise and bce draw.
        most_share: largest share of slots kept by those budgets.
        learning_rate: of AdamW, at its highest.
        weight_decay: of AdamW, on the weights of encoder and hidden units.
        warmup: share of all steps over which the learning rate rises; then it falls as a cosine.
        budgets: slots per KV head at which validation measures.
        init_from: folder of a scorer to start from; its network and encoder are kept. By default training starts
            from the ranking of the ``ema`` policy.
        calibration_windows: windows from which the inputs' mean and deviation are taken.
        seed: of everything drawn here.
    """

    def __init__(
        self,
        kind: Kind = "mlp",
        hidden: int = 32,
        encoder: Encoder = "key",
        key_rank: int = 8,
        encoder_hidden: int = 64,
        without: list[str] | None = None,
        losses: dict[str, float] | None = None,
        least_share: float = 0.05,
        most_share: float = 0.6,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup: float = 0.05,
        budgets: list[int] | None = None,
        init_from: str | None = None,
        calibration_windows: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses = losses or {"kl": 1.0}
        self.budgets = budgets or [128, 256, 512]
        for name, weight in self.losses.items():
            if name not in LOSSES:
                raise KvlearnError(f"model.losses names {name!r}; known are {', '.join(LOSSES)}.")
            if weight < 0:
                raise KvlearnError(f"model.losses.{name} is {weight}; give a weight of 0 or more.")
        if not any(self.losses.values()):
            raise KvlearnError("model.losses has no weight above 0; give at least one.")
        if not 0 < least_share <= most_share < 1:
            raise KvlearnError(
                f"model.least_share is {least_share} and most_share {most_share}; give 0 < least <= most < 1."
            )
        for name in without or ():
            if name == START or name not in _READABLE:
                known = ", ".join(each for each in _READABLE if each != START)
                raise KvlearnError(f"model.without names {name!r}; what can be left out is {known}.")
        self.scorer: Scorer | None = None
        self.measures: MetricCollection | None = None
        self.untrained: MetricCollection | None = None
        self.level: Level | None = None
        self.measured: dict[str, float] = {}

    # ---- set-up ------------------------------------------------------------------------------------------------

    @property
    def data(self) -> TraceDataModule:
        """The data that this run reads."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Trainer.fit, not declared
        if not isinstance(data, TraceDataModule):
            raise KvlearnError("a scorer trains on a TraceDataModule; give one to Trainer.fit(datamodule=...).")
        return data

    def setup(self, stage: str) -> None:
        """Make the scorer, which needs the sizes of the traces."""
        if self.scorer is not None:
            return
        data = self.data
        block = data.traces[0].layout.block
        recent = block if data.hparams["recent"] < 0 else data.hparams["recent"]
        # At a boundary a cache has chosen the victims of the next block: budget - block slots stay.
        spare = data.hparams["sinks"] + recent + block
        if min(self.budgets) <= spare:
            raise KvlearnError(
                f"model.budgets holds {min(self.budgets)}; protection and one block take {spare} slots: go above that."
            )
        kept = {budget: budget - spare for budget in self.budgets}
        self.measures, self.untrained = measures(kept, "val_"), measures(kept, "untrained_")
        layout = data.traces[0].layout
        self.level = Level((len(layout.layers), layout.heads))
        if self.hparams["init_from"]:
            self.scorer = self._load_initial(self.hparams["init_from"])
            return
        self.scorer = Scorer(self._config())
        if stage == "fit" and not self.trainer.ckpt_path:
            self._calibrate(self.scorer)

    def _config(self) -> ScorerConfig:
        manifest, target = self.data.traces[0].manifest, self.data.target
        linear = self.hparams["kind"] == "linear"
        return ScorerConfig(
            layers=tuple(manifest.layout.layers),
            heads=manifest.layout.heads,
            head_dim=manifest.layout.head_dim,
            kind=self.hparams["kind"],
            hidden=0 if linear else self.hparams["hidden"],
            encoder=self.hparams["encoder"],
            key_rank=0 if self.hparams["encoder"] == "none" else self.hparams["key_rank"],
            encoder_hidden=self.hparams["encoder_hidden"],
            block=manifest.layout.block,
            group_reduce=manifest.group_reduce,  # type: ignore[arg-type]  # checked by ScorerConfig
            horizon=target.horizon,
            reduce=target.reduce,
            value_power=target.value_power,
            value=target.value,
            sharpness=target.sharpness,
            model=manifest.fingerprint,
        )

    def _load_initial(self, folder: str) -> Scorer:
        scorer = Scorer.from_pretrained(folder)
        fresh = self._config()
        for name in ("layers", "heads", "head_dim", "block", "group_reduce"):
            ours, theirs = getattr(scorer.config, name), getattr(fresh, name)
            if ours != theirs:
                raise KvlearnError(f"model.init_from {folder}: {name} is {ours} and the traces have {theirs}.")
        shape = {name: getattr(scorer.config, name) for name in _NETWORK}
        scorer.config = replace(fresh, **shape)
        return scorer.train()

    def _calibrate(self, scorer: Scorer) -> None:
        data = self.data.train_set
        assert data is not None
        wanted = min(self.hparams["calibration_windows"], len(data)) or 1
        dynamic, vectors = [], []
        for i in range(wanted):
            sample = data[(0, i * len(data) // wanted)]
            slots = sample.dynamic.flatten(2, 3)
            dynamic.append(slots[:, :, :: max(1, slots.shape[2] // 1024)])
            own = sample.vectors
            vectors.append(own[:, :, :: max(1, own.shape[2] // _CALIBRATION_TOKENS)])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.hparams["seed"])
            scorer.fit_inputs(torch.cat(dynamic, 2), torch.cat(vectors, 2))

    @torch.no_grad()
    def _blind(self) -> None:
        """Weights of what is not to be read are 0 before training and after every step."""
        assert self.scorer is not None
        if not self.hparams["without"]:
            return
        columns = [_READABLE.index(name) for name in self.hparams["without"]]
        self.scorer.skip[..., columns] = 0.0
        if self.scorer.w1 is not None:
            self.scorer.w1[..., columns, :] = 0.0

    def on_train_start(self) -> None:
        """Blind the scorer to what it is not to read."""
        self._blind()

    def on_train_batch_end(self, *_: Any) -> None:
        """And again, after what the optimizer did."""
        self._blind()

    # ---- steps -------------------------------------------------------------------------------------------------

    def forward(self, sample: Sample) -> Tensor:
        """``[L, H, N, n]`` scores."""
        assert self.scorer is not None
        index = sample.tokens.flatten(2)
        static = self.scorer.static_inputs(sample.vectors)
        if self.training:
            self.scorer.track(static.detach(), _TRACKED)
        static = static.gather(2, index[..., None].expand(-1, -1, -1, static.shape[-1]))
        return self.scorer(sample.dynamic.flatten(2, 3), static).view(sample.tokens.shape)

    def _loss(self, sample: Sample, score: Tensor, draw: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.hparams["seed"], draw)) % 2**63)
        share = sample_share(self.hparams["least_share"], self.hparams["most_share"], generator)
        parts = [
            weight * LOSSES[name](score, sample.target, sample.log_weight, share, generator)
            for name, weight in self.losses.items()
            if weight
        ]
        return torch.stack(parts).sum()

    def training_step(self, sample: Sample, batch_idx: int) -> Tensor:
        """Loss on one window."""
        number = self.current_epoch * 2**32 + batch_idx
        loss = self._loss(sample, self(sample), number)
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, sample: Sample, batch_idx: int) -> None:
        """Loss and measures on one window; the first time also those of the untrained scorer."""
        assert self.measures is not None
        assert self.untrained is not None
        assert self.level is not None
        score = self(sample)
        self.log("val_loss", self._loss(sample, score, batch_idx), on_epoch=True, prog_bar=True, batch_size=1)
        self.measures.update(score=score, mass=sample.target, held=sample.ranked)
        self.level.update(score, sample.target, sample.log_weight)
        if not self._untrained_known:
            start = sample.dynamic[..., features.DYNAMIC.index(START)]
            self.untrained.update(score=start, mass=sample.target, held=sample.ranked)

    @property
    def _untrained_known(self) -> bool:
        return any(name.startswith("untrained_") for name in self.measured)

    def on_validation_epoch_end(self) -> None:
        """Log the measures as ``val_*``, those of the untrained scorer as ``untrained_*``."""
        assert self.measures is not None
        assert self.untrained is not None
        assert self.level is not None
        assert self.scorer is not None
        if not self.trainer.sanity_checking:  # no loss but huber, which sets the level itself, feels the change
            with torch.no_grad():
                self.scorer.bias.add_(self.level.compute().to(self.scorer.bias))
        self.level.reset()
        found = {name: float(value) for name, value in self.measures.compute().items()}
        self.measures.reset()
        if self._untrained_known:
            found |= {name: value for name, value in self.measured.items() if name.startswith("untrained_")}
        else:
            found |= {name: float(value) for name, value in self.untrained.compute().items()}
        self.untrained.reset()
        self.log_dict(found)
        if not self.trainer.sanity_checking:
            self.measured = found

    def configure_optimizers(self) -> Any:
        """AdamW with a warm-up and a cosine."""
        assert self.scorer is not None
        groups = [
            {"params": [p for n, p in self.scorer.named_parameters() if (n in _DECAYED) == decay], "weight_decay": rate}
            for decay, rate in ((True, self.hparams["weight_decay"]), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.hparams["learning_rate"], betas=_BETAS
        )
        total = max(1, int(self.trainer.estimated_stepping_batches))
        rise = max(1, round(self.hparams["warmup"] * total))

        def rate(step: int) -> float:
            if step < rise:
                return (step + 1) / rise
            return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / max(1, total - rise))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what export needs, so that it needs neither traces nor Lightning."""
        assert self.scorer is not None
        config = replace(
            self.scorer.config,
            training=self._recipe(),
            data=self.data.describe(),
            metrics=self._metrics(),
        )
        checkpoint[CONFIG_KEY] = config.to_json()

    def _recipe(self) -> dict[str, Any]:
        model, data = dict(self.hparams), dict(self.data.hparams)
        for paths in ("train", "val"):  # where traces lay says nothing elsewhere; what they hold is in `data`
            data.pop(paths)
        if model["init_from"]:
            model["init_from"] = Path(model["init_from"]).name
        trainer = {
            "max_epochs": self.trainer.max_epochs,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            "gradient_clip_val": self.trainer.gradient_clip_val,
            "epochs": self.current_epoch + 1,
            "steps": self.global_step,
        }
        plain: dict[str, Any] = json.loads(json.dumps({"model": model, "data": data, "trainer": trainer}, default=str))
        for section in ("model", "data"):
            plain[section] = {k: v for k, v in plain[section].items() if not k.startswith("_")}
        return plain

    def _metrics(self) -> tuple[dict[str, Any], ...]:
        if not self.measured:
            return ()
        rows = [
            {"measure": name, "scorer": self.measured[f"val_{name}"], "untrained": value}
            for name, value in ((n.removeprefix("untrained_"), v) for n, v in self.measured.items())
            if f"val_{name}" in self.measured
        ]
        note = (
            "On the validation windows, offline: what the ranking keeps of the attention that the full cache gives "
            "over the horizon. Untrained is a moving average. Closed-loop quality is another measure, and the one to "
            "choose by."
        )
        return ({"title": "Ranking, offline", "table": rows, "notes": [note], "command": "python -m train fit"},)

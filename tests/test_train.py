"""Training: samples, losses, the command line from traces to a portable scorer, resuming, and what is refused."""

from __future__ import annotations

import csv
import errno
import inspect
import itertools
import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lightning", reason="training needs the extra kvlearn[train]")

from fake_traces import write_trace

import train.data
import train.prepared
from kvlearn import Scorer, features, targets
from kvlearn.errors import KvlearnError
from kvlearn.shapes import Protection
from kvlearn.traces.dataset import Trace, replay
from kvlearn.traces.projection import write_projection
from train.__main__ import main
from train.data import WindowDataset
from train.export import export, read_checkpoint
from train.losses import LOSSES, sample_share
from train.prepared import PreparedSamples
from train.samples import Sample, SampleOptions, Target, draw, make_sample

PROTECT = Protection(4, 32)
SMALL = ["--data.min_tokens", "128", "--model.budgets", "[96,128]", "--trainer.accelerator", "cpu"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces")
    write_trace(root / "train", windows=6)
    write_trace(root / "val", windows=2, seed=1, split="validation")
    write_trace(root / "policy", windows=2, seed=2, budget=192)
    return root


# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train", "policy"])
def test_a_sample_of_all_slots_is_what_the_trace_says(traces: Path, name: str) -> None:
    window = Trace(traces / name).window(1)
    sample = make_sample(window, [8, 4], target=Target((64,)), protect=PROTECT, slots=None)
    assert sample.tokens.shape == (2, 2, 2, 8 * 32)
    for i, (n, state, held) in enumerate(replay(window, [4, 8])):
        t = 32 * n
        pos = torch.arange(t, dtype=torch.int32).expand(2, 2, t)
        expected = features.dynamic_features(state, pos, torch.full((2,), t))
        assert torch.equal(sample.dynamic[:, :, i, :t], expected)
        mass = targets.future_mass(window.mean_code, window.peak_code, n, block=32, horizon=64)
        torch.testing.assert_close(sample.target[:, :, i, :t], mass)
        ranked = (pos >= 4) & (pos < t - 32)
        if held is not None:
            assert bool(held.all()) == (n == 4), "tokens are evicted between the two boundaries"
            ranked &= held
        assert torch.equal(sample.ranked[:, :, i, :t], ranked)
        assert not bool(sample.ranked[:, :, i, t:].any())


def test_targets_of_several_horizons_are_averaged_and_weighted_by_values(traces: Path) -> None:
    window = Trace(traces / "train").window(0)

    def of(h):
        return targets.future_mass(window.mean_code, window.peak_code, 6, block=32, horizon=h, reduce="max")

    def at(target):
        return target.table(window, [6])[0, ..., : 6 * 32]

    torch.testing.assert_close(at(Target((32, 0), "max")), (of(32) + of(None)) / 2)
    norm = window.values.decode().norm(dim=-1)[..., : 6 * 32]
    torch.testing.assert_close(at(Target((64,), "max", 0.5)), of(64) * norm.sqrt())
    with pytest.raises(KvlearnError, match="horizon is 33"):
        at(Target((33,)))
    with pytest.raises(KvlearnError, match="'discounted-peak' mass has none"):
        Target((64,), "discounted-peak")


def test_targets_are_weighed_by_what_values_write(traces: Path, tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", windows=1)
    write_projection(folder, torch.randn(2, 2, 8, 8))
    window = Trace(folder).window(0)
    plain = Target((64,)).table(window, [6, 9])
    values = window.values.decode()
    output = targets.value_weights("output", values, window.projection)
    torch.testing.assert_close(Target((64,), "mean", 0.5, "output").table(window, [6, 9]), plain * output.sqrt())
    mass = targets.future_table(window.mean_code, window.peak_code, [6, 9], block=32)
    deviation = targets.value_weights("deviation", values, window.projection, mass)
    torch.testing.assert_close(Target((64,), "mean", 1.0, "deviation").table(window, [6, 9]), plain * deviation)
    assert torch.equal(Target((64,), "mean", 0.0, "output").table(window, [6, 9]), plain)
    with pytest.raises(KvlearnError, match="this trace has none"):
        Target((64,), "mean", 1.0, "output").table(Trace(traces / "train").window(0), [6])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("norm", 0.0)),
        ({"value_power": 1.0}, ("norm", 1.0)),
        ({"value_power": 0.5, "value": "output"}, ("output", 0.5)),
        ({"value": "deviation"}, ("deviation", 1.0)),
        ({"value": "norm"}, ("norm", 1.0)),
        ({"value": "none", "value_power": 1.0}, ("norm", 0.0)),
    ],
)
def test_configs_say_what_mass_is_weighed_by(options: dict[str, Any], expected: tuple[str, float]) -> None:
    target = train.data.TraceDataModule(["x"], **options).target
    assert (target.value, target.value_power) == expected


@pytest.mark.parametrize("count", [3, 8, 11])
def test_every_kind_of_text_has_its_share_of_windows(tmp_path: Path, count: int) -> None:
    paths = [
        write_trace(tmp_path / "a", windows=24, window=320, layers=(0,), heads=1, domains=("x", "y", "z", "z")),
        write_trace(tmp_path / "b", windows=8, window=320, layers=(0,), heads=1, domains=("x",), seed=1),
    ]
    held = [write_trace(tmp_path / f"v{seed}", windows=6, window=320, layers=(0,), heads=1, seed=seed, domains="xyz")
            for seed in (2, 3)]  # fmt: skip
    data = train.data.TraceDataModule(
        [*map(str, paths)], [*map(str, held)], train_windows=count, val_windows=6, min_tokens=96
    )
    data.setup("fit")
    assert data.train_set is not None
    assert data.val_set is not None
    chosen = [(trace.path.name, trace.domains[i]) for trace, i in data.train_set.windows]
    assert len(chosen) == len(set(data.train_set.windows)) == count
    for kind, windows in ((("a", "x"), 6), (("a", "y"), 6), (("a", "z"), 12), (("b", "x"), 8)):
        assert abs(chosen.count(kind) - count * windows / 32) < 1, kind
    assert sorted(trace.domains[i] for trace, i in data.val_set.windows) == list("xxyyzz")


@settings(max_examples=40)
@given(slots=st.integers(2, 60), ranked=st.integers(0, 64), seed=st.integers(0, 10**6))
def test_drawn_slots_stand_for_all(slots: int, ranked: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(1, 1, 64, generator=generator)
    log_weight = torch.full((1, 1, 64), -torch.inf)
    log_weight[..., torch.randperm(64, generator=generator)[:ranked]] = 0
    index, weight = draw(mass, log_weight, slots, generator)
    chosen = weight > -torch.inf
    assert index[0, 0].unique().numel() == slots, "a slot was drawn twice"
    assert bool((log_weight.gather(-1, index)[chosen] == 0).all()), "a slot that is not ranked was drawn"
    assert int(chosen.sum()) == min(slots, ranked)
    assert float(weight[chosen].exp().sum()) == pytest.approx(ranked, rel=1e-5)
    top = mass.masked_fill(log_weight < 0, -1).topk(min(slots // 2, ranked), dim=-1).indices[0, 0]
    assert set(top.tolist()) <= set(index[chosen].tolist())


# ---- samples on disk ---------------------------------------------------------------------------------------------

OPTIONS = SampleOptions(
    boundaries=3,
    slots=40,
    target=Target((0,), "discounted-peak", 1.0),
    protect=PROTECT,
    min_tokens=96,
    min_future=64,
    seed=0,
    random=True,
)


def same(first: Sample, second: Sample) -> bool:
    return all(
        all(map(torch.equal, mine, theirs)) if isinstance(mine, tuple) else torch.equal(mine, theirs)
        for mine, theirs in zip(first, second, strict=True)
    )


@pytest.fixture
def own_trace(tmp_path: Path) -> Trace:
    return Trace(write_trace(tmp_path / "t", windows=3))


def test_a_prepared_sample_is_the_sample_and_is_made_once(own_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [(own_trace, i) for i in range(3)]
    fresh, kept = WindowDataset(windows, OPTIONS), WindowDataset(windows, OPTIONS, reuse=True)
    for i in range(3):
        one, other = fresh[0, i], kept[0, i]
        for name in ("tokens", "target"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        for name in ("dynamic", "log_weight"):  # kept in half precision
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-3)
        assert same(one._replace(dynamic=other.dynamic, log_weight=other.log_weight), other)
        assert not torch.equal(fresh[1, i].tokens, one.tokens), "a fresh sample is another in every epoch"
    before = [kept[0, i] for i in range(3)]
    monkeypatch.setattr(train.data, "make_sample", lambda *_, **__: pytest.fail("made again"))
    again = WindowDataset(windows, OPTIONS, reuse=True)
    assert all(same(again[epoch, i], before[i]) for epoch in (0, 5) for i in range(3))
    (folder,) = (path.folder for path in again.prepared.values())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size == pytest.approx(again.prepared[own_trace.path].bytes(3), rel=0.05)


def test_other_options_or_traces_are_prepared_apart(own_trace: Trace, tmp_path: Path) -> None:
    other = Trace(write_trace(tmp_path / "t2", windows=3, seed=1))
    changes = [
        {"seed": 1},
        {"slots": None},
        {"target": replace(OPTIONS.target, value_power=0.5)},
        {"target": replace(OPTIONS.target, value="output")},
        {"target": Target((0,), "soft-max", 1.0)},
        {"target": Target((0,), "soft-max", 1.0, sharpness=8.0)},
        {"protect": Protection(2, 32)},
        {"random": False},
    ]
    keys = {PreparedSamples(own_trace, replace(OPTIONS, **change)).folder.name for change in [{}, *changes]}
    keys.add(PreparedSamples(other, OPTIONS).folder.name)
    write_projection(own_trace.path, torch.randn(2, 2, 8, 8))
    for target in (OPTIONS.target, replace(OPTIONS.target, value="output")):  # which the second alone reads
        keys.add(PreparedSamples(Trace(own_trace.path), replace(OPTIONS, target=target)).folder.name)
    assert len(keys) == len(changes) + 3


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()])
def test_a_sample_that_cannot_be_read_is_made_again(own_trace: Trace, damage: Callable[[Path], Any]) -> None:
    data = WindowDataset([(own_trace, 1)], OPTIONS, reuse=True)
    before = data[0, 0]
    damage(data.prepared[own_trace.path].path(1))
    assert same(data[0, 0], before)


def test_a_full_disk_is_explained(own_trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.prepared, "write_file", full)
    with pytest.raises(KvlearnError, match=r"the disk is full; make room there, or set data\.prepare to 'fresh'"):
        WindowDataset([(own_trace, 1)], OPTIONS, reuse=True)[0, 0]


def test_fresh_samples_leave_nothing_behind(traces: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "train", windows=4)
    fit(tmp_path, tmp_path / "f", "--data.prepare", "fresh", "--data.val", "null", epochs=1, train="train")
    assert not list(tmp_path.glob("*.prepared"))


# ---- losses ------------------------------------------------------------------------------------------------------


def loss(name: str, score: torch.Tensor, target: torch.Tensor, log_weight: torch.Tensor, share: float = 0.3) -> float:
    return float(LOSSES[name](score, target, log_weight, share, torch.Generator().manual_seed(0)))


def test_kl_is_the_divergence_of_the_two_distributions() -> None:
    score, target = torch.randn(2, 3, 9), torch.rand(2, 3, 9)
    log_weight = torch.zeros(2, 3, 9)
    log_weight[..., 5:7] = -torch.inf
    kept = [0, 1, 2, 3, 4, 7, 8]
    p = target[..., kept] / target[..., kept].sum(-1, keepdim=True)
    q = score[..., kept].softmax(-1)
    assert loss("kl", score, target, log_weight) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["kl", "huber", "bce"])
def test_a_slot_that_stands_for_three_counts_as_three(name: str) -> None:
    score, target = torch.randn(1, 6), torch.rand(1, 6) + 0.1
    score[0, 2] = target[0, 2] = 9.0  # far from the boundary, which would otherwise pass between the three
    log_weight = torch.zeros(1, 6)
    log_weight[0, 2] = math.log(3)
    three = [0, 1, 2, 2, 2, 3, 4, 5]
    expected = loss(name, score[:, three], target[:, three], torch.zeros(1, 8), share=0.999)
    assert loss(name, score, target, log_weight, share=0.999) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_true_log_mass_beats_its_opposite_and_noise(name: str) -> None:
    target = torch.rand(4, 50) ** 4 + 1e-4
    target /= target.sum(-1, keepdim=True)
    log_weight = torch.zeros(4, 50)
    log_weight[:, -5:] = -torch.inf
    truth = target.log()
    best = loss(name, truth, target, log_weight)
    assert best < loss(name, torch.randn(4, 50) + truth.mean(), target, log_weight)
    assert best < loss(name, -truth, target, log_weight)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["nothing ranked", "one ranked", "no mass", "equal mass", "equal scores"])
def test_losses_and_gradients_stay_finite(name: str, case: str) -> None:
    score, target, log_weight = torch.randn(2, 8), torch.rand(2, 8), torch.zeros(2, 8)
    if case == "nothing ranked":
        log_weight[0] = -torch.inf
    elif case == "one ranked":
        log_weight[0, 1:] = -torch.inf
    elif case == "equal scores":
        score = torch.zeros(2, 8)
    else:
        target[0] = 0 if case == "no mass" else 0.5
    score.requires_grad_()
    value = LOSSES[name](score, target, log_weight, 0.3, torch.Generator().manual_seed(0))
    value.backward()
    assert score.grad is not None
    assert math.isfinite(float(value.detach()))
    assert bool(torch.isfinite(score.grad).all())


def test_slots_that_are_not_ranked_get_no_gradient() -> None:
    for name in LOSSES:
        score = torch.randn(2, 12, requires_grad=True)
        log_weight = torch.zeros(2, 12)
        log_weight[:, :4] = -torch.inf
        LOSSES[name](score, torch.rand(2, 12), log_weight, 0.3, torch.Generator().manual_seed(0)).backward()
        assert score.grad is not None
        assert bool((score.grad[:, :4] == 0).all()), name
        assert bool((score.grad[:, 4:] != 0).any()), name


def test_shares_are_drawn_between_their_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_share(0.05, 0.6, generator) for _ in range(200)]
    assert 0.05 <= min(drawn) < 0.07
    assert 0.5 < max(drawn) <= 0.6


# ---- the command line --------------------------------------------------------------------------------------------


def fit(traces: Path, folder: Path, *options: str, epochs: int = 2, train: str = "train,policy") -> Path:
    """Run ``fit`` as a user would; gives the folder of checkpoints."""
    names = ",".join(str(traces / name) for name in train.split(","))
    config = {
        "trainer": {
            "max_epochs": epochs,
            "log_every_n_steps": 1,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}},
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(folder / "ckpt"), "save_last": True, "save_top_k": -1},
                }
            ],
        }
    }
    folder.mkdir(exist_ok=True)
    (folder / "c.yaml").write_text(json.dumps(config))
    data = ["--data.train", f"[{names}]", "--data.val", f"[{traces / 'val'}]"]
    assert main(["fit", "--config", str(folder / "c.yaml"), *data, *SMALL, *options]) == 0
    return folder / "ckpt"


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoint).state_dict()


def equal(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def trained(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(traces, tmp_path_factory.mktemp("run"), "--model.learning_rate", "0.02", epochs=3)


def test_training_learns_what_the_moving_average_cannot_see(trained: Path) -> None:
    (log,) = trained.parent.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(log.open()) if row["val_loss"]]
    assert len(rows) == 3
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    for measure in ("kept_mass_96", "recall_96", "rank_correlation"):
        assert float(rows[-1][f"val_{measure}"]) > float(rows[-1][f"untrained_{measure}"]), measure
    assert len({row["untrained_kept_mass_96"] for row in rows}) == 1


def test_forecasts_of_a_head_sum_to_what_it_receives(traces: Path, trained: Path) -> None:
    scorer = read_checkpoint(trained / "last.ckpt")
    data = train.data.TraceDataModule([str(traces / "train")], [str(traces / "val")], min_tokens=128)
    data.setup("fit")
    assert data.val_set is not None
    mass, forecast = torch.zeros(2, *scorer.bias.shape, dtype=torch.float64)
    for i in range(len(data.val_set)):
        sample = data.val_set[(0, i)]
        static = scorer.static_inputs(sample.vectors)
        static = static.gather(2, sample.tokens.flatten(2)[..., None].expand(-1, -1, -1, static.shape[-1]))
        score = scorer(sample.dynamic.flatten(2, 3), static).view(sample.tokens.shape).detach().double()
        mass += (sample.target.double() * sample.ranked).sum((-1, -2))
        forecast += (score.exp() * sample.ranked).sum((-1, -2))
    torch.testing.assert_close(forecast, mass, rtol=1e-3, atol=0.0)


def test_export_writes_a_scorer_with_its_origin_and_numbers(trained: Path, tmp_path: Path) -> None:
    table = [{"policy": "ema", "loss": 0.25}]
    (tmp_path / "m.json").write_text(json.dumps({"title": "Closed loop", "command": "kvlearn compare", "table": table}))
    (tmp_path / "b.json").write_text("[1, 3]")
    options = ["--metrics", str(tmp_path / "m.json"), "--budgets", str(tmp_path / "b.json")]
    assert main(["export", str(trained / "last.ckpt"), str(tmp_path / "s"), *options]) == 0
    scorer = Scorer.from_pretrained(tmp_path / "s")
    assert scorer.config.budgets == (0.5, 1.5)
    assert scorer.config.model["kv_heads"] == 2
    assert scorer.config.horizon == (256,)
    assert scorer.config.training["trainer"]["epochs"] == 3
    assert scorer.config.training["model"]["learning_rate"] == 0.02
    assert [entry["windows"] for entry in scorer.config.data["train"]] == [6, 2]
    assert scorer.config.data["train"][1]["policy"] == "random"
    assert [m["title"] for m in scorer.config.metrics] == ["Closed loop", "Ranking, offline"]
    card = (tmp_path / "s" / "README.md").read_text()
    assert "| ema | 0.25 |" in card
    assert str(tmp_path.parent.parent) not in card + (tmp_path / "s" / "config.json").read_text()
    assert all(torch.equal(t, scorer.state_dict()[n]) for n, t in weights(trained / "last.ckpt").items())


def test_equal_seeds_give_equal_weights_and_others_do_not(traces: Path, tmp_path: Path) -> None:
    mix = [
        "--model.losses",
        '{"kl": 1.0, "pairwise": 0.5, "bce": 0.1, "huber": 0.1}',
        "--data.slots_per_boundary",
        "64",
    ]
    runs = [
        fit(traces, tmp_path / name, *mix, "--seed_everything", seed) for name, seed in zip("abc", "778", strict=True)
    ]
    assert equal(runs[0] / "last.ckpt", runs[1] / "last.ckpt")
    assert not equal(runs[0] / "last.ckpt", runs[2] / "last.ckpt")


def test_a_resumed_run_equals_one_that_was_never_stopped(traces: Path, trained: Path, tmp_path: Path) -> None:
    first = next(path for path in trained.iterdir() if path.name.startswith("epoch=0"))
    options = ["--model.learning_rate", "0.02", "--ckpt_path", str(first)]
    resumed = fit(traces, tmp_path / "r", *options, epochs=3)
    assert equal(resumed / "last.ckpt", trained / "last.ckpt")


def test_workers_change_nothing(traces: Path, trained: Path, tmp_path: Path) -> None:
    options = ["--model.learning_rate", "0.02", "--data.num_workers", "1"]
    assert equal(fit(traces, tmp_path / "w", *options, epochs=3) / "last.ckpt", trained / "last.ckpt")


@pytest.mark.parametrize(
    "options",
    [
        ["--model.kind", "linear"],
        ["--model.encoder", "none"],
        ["--model.encoder", "layer"],
        ["--data.slots_per_boundary", "0"],
    ],
)
def test_other_kinds_train(traces: Path, tmp_path: Path, options: list[str]) -> None:
    scorer = read_checkpoint(fit(traces, tmp_path / "k", *options, epochs=1) / "last.ckpt")
    assert scorer.config.kind == ("linear" if "linear" in options else "mlp")


def test_a_scorer_says_what_it_forecasts(traces: Path, tmp_path: Path, capsys: Any) -> None:
    options = ["--data.reduce", "soft-max", "--data.sharpness", "8", "--data.value", "deviation"]
    with pytest.raises(AssertionError):
        fit(traces, tmp_path / "k", *options, train="train")
    error = capsys.readouterr().err
    assert re.search(r"train does not keep the model's output projection, which data\.value 'deviation' needs", error)
    for name in ("train", "val"):
        shutil.copytree(traces / name, tmp_path / name)
        write_projection(tmp_path / name, torch.randn(2, 2, 8, 8))
    config = read_checkpoint(fit(tmp_path, tmp_path / "k", *options, epochs=1, train="train") / "last.ckpt").config
    assert (config.reduce, config.sharpness, config.value, config.value_power) == ("soft-max", 8.0, "deviation", 1.0)


def test_a_scorer_can_be_kept_from_reading_an_input(traces: Path, tmp_path: Path) -> None:
    left_out = ["hits", "log_ema1024", "log_value_norm"]
    scorer = read_checkpoint(
        fit(traces, tmp_path / "w", "--model.without", json.dumps(left_out), epochs=1) / "last.ckpt"
    )
    assert scorer.w1 is not None
    names = [*features.DYNAMIC, *features.STATIC_SCALARS]
    for number, name in enumerate(names):
        read = bool(scorer.w1[..., number, :].any())
        assert read == (name not in left_out), name
        assert bool(scorer.skip[..., number].any()) == read, name


def test_training_goes_on_from_a_scorer(traces: Path, trained: Path, tmp_path: Path) -> None:
    export(trained / "last.ckpt", tmp_path / "s")
    options = ["--model.init_from", str(tmp_path / "s"), "--model.learning_rate", "0", "--model.hidden", "7"]
    again = fit(traces, tmp_path / "i", *options, epochs=1) / "last.ckpt"
    before, after = weights(trained / "last.ckpt"), weights(again)
    for name in before.keys() - {"code_mean", "code_std"}:  # statistics, which follow the data
        assert torch.equal(before[name], after[name]), f"with a learning rate of 0 {name} is what it began with"
    assert read_checkpoint(again).config.training["model"]["init_from"] == "s"


def test_without_validation_traces_the_last_windows_are_held_out(traces: Path, tmp_path: Path, capsys: Any) -> None:
    options = ["--data.val", "null", "--data.holdout", "0.3", "--progress.format", "json"]
    checkpoint = fit(traces, tmp_path / "h", *options, epochs=1, train="train") / "last.ckpt"
    data = read_checkpoint(checkpoint).config.data
    assert [(e["windows"], v["windows"]) for e, v in zip(data["train"], data["validation"], strict=True)] == [(4, 2)]
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last = events[-1]
    assert last["event"] == "validation"
    assert last["step"] == last["steps"] == 4
    assert 0 < last["val_kept_mass_96"] < 1


def test_the_untrained_scorer_is_what_training_starts_from(traces: Path, tmp_path: Path) -> None:
    fit(traces, tmp_path / "z", "--model.learning_rate", "0", epochs=1)
    (log,) = (tmp_path / "z").rglob("metrics.csv")
    row = next(row for row in csv.DictReader(log.open()) if row["val_loss"])
    for measure in ("kept_mass_96", "recall_128", "rank_correlation"):
        assert float(row[f"val_{measure}"]) == pytest.approx(float(row[f"untrained_{measure}"]), abs=1e-4)


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "no data": ([], "data.train"),
    "no folder": (["--data.train", "[nowhere]"], "nowhere"),
    "unknown option": (["--data.train", "[x]", "--model.depth", "3"], "depth"),
    "unknown kind": (["--data.train", "[x]", "--model.kind", "tree"], "tree"),
    "unknown loss": (["--data.train", "[x]", "--model.losses", '{"l2": 1.0}'], "'l2'; known are kl, huber"),
    "no loss": (["--data.train", "[x]", "--model.losses", '{"kl": 0.0}'], "no weight above 0"),
    "shares": (["--data.train", "[x]", "--model.least_share", "0.9"], "least_share is 0.9"),
    "nothing to leave out": (
        ["--data.train", "[x]", "--model.without", "[ema16]"],
        "names 'ema16'; what can be left out",
    ),
    "no boundaries": (["--data.train", "[x]", "--data.boundaries_per_window", "0"], "boundaries_per_window is 0"),
    "no config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "small budget": (
        ["--data.train", "[TRACES/train]", "--model.budgets", "[68]", "--data.min_tokens", "96"],
        "68 slots",
    ),
    "short windows": (
        ["--data.train", "[TRACES/train]", "--data.min_tokens", "300"],
        "windows of 384 tokens are too short",
    ),
    "same traces": (["--data.train", "[TRACES/train]", "--data.val", "[TRACES/train]", *SMALL], "both data.train and"),
    "horizon of a discount": (
        ["--data.train", "[x]", "--data.reduce", "discounted", "--data.horizon", "[64]"],
        "'discounted' mass has none",
    ),
    "no value": (["--data.train", "[x]", "--data.value", "size"], "size"),
    "not sharp": (["--data.train", "[x]", "--data.sharpness", "0.5"], "sharpness is 0.5"),
    "bad horizon": (["--data.train", "[TRACES/train]", "--data.horizon", "[50]", *SMALL], "horizon is 50"),
    "no scorer": (["--data.train", "[TRACES/train]", "--model.init_from", "nowhere", *SMALL], "no scorer folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_get_one_line_and_exit_code_2(
    case: str, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, part = REFUSED[case]
    assert main(["fit", *(a.replace("TRACES", str(traces)) for a in arguments), "--trainer.logger", "false"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("train: error: ")
    assert part in line


def test_traces_of_two_kinds_are_not_mixed(traces: Path, tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "other", windows=2, heads=1)
    write_trace(tmp_path / "max", windows=2, group_reduce="max")
    for name, field in (("other", "fingerprint"), ("max", "group_reduce")):
        assert main(["fit", "--data.train", f"[{traces / 'train'},{tmp_path / name}]", *SMALL]) == 2
        assert f"do not belong together: {field}" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(traces: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from train.module import ScorerModule

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScorerModule, "training_step", interrupt)
    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores the signal from here on
    try:
        assert main(["fit", "--data.train", f"[{traces / 'train'}]", *SMALL, "--trainer.logger", "false"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)


def damaged(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = torch.load(path, weights_only=True)
    change(data)
    torch.save(data, path.parent / "damaged.ckpt")
    return path.parent / "damaged.ckpt"


def test_checkpoints_that_are_none_are_refused(trained: Path, tmp_path: Path) -> None:
    good = trained / "last.ckpt"
    cases: list[tuple[Path, str]] = [(tmp_path / "absent", "no checkpoint")]
    for name, content in (("empty", b""), ("text", b"hello"), ("cut", good.read_bytes()[:5000])):
        (tmp_path / name).write_bytes(content)
        cases.append((tmp_path / name, name))
    torch.save({"a": 1}, tmp_path / "foreign")
    cases.append((tmp_path / "foreign", "not a checkpoint of a scorer"))
    for path, part in cases:
        with pytest.raises(KvlearnError, match=part):
            export(path, tmp_path / "s")
    with pytest.raises(KvlearnError, match="do not fit"):
        export(damaged(good, lambda d: d["state_dict"].pop("scorer.skip")), tmp_path / "s")
    with pytest.raises(KvlearnError, match="NaN"):
        export(damaged(good, lambda d: d["state_dict"]["scorer.skip"].fill_(torch.nan)), tmp_path / "s")
    assert not (tmp_path / "s").exists()


class Bomb:
    def __reduce__(self) -> Any:
        return (Path("exploded").touch, ())


def test_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"kvlearn_scorer": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(KvlearnError, match="code that would run"):
        export(tmp_path / "bomb.ckpt", tmp_path / "s")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(("option", "content", "part"), [
    ("metrics", "{", "not valid JSON"), ("metrics", '{"rows": []}', "list 'table'"),
    ("budgets", "[]", "list of numbers"), ("budgets", "[1, 1, 1]", "2 layers"), ("budgets", "[1, -1]", "above 0"),
])  # fmt: skip
def test_export_checks_what_it_adds(trained: Path, tmp_path: Path, option: str, content: str, part: str) -> None:
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(KvlearnError, match=part):
        export(trained / "last.ckpt", tmp_path / "s", **{option: tmp_path / "f.json"})
    assert not (tmp_path / "s").exists()


def test_the_entry_stays_short_and_help_explains_every_option(capsys: Any) -> None:
    import train.__main__
    import train.cli

    for module in (train.__main__, train.cli):
        assert len(Path(str(module.__file__)).read_text().splitlines()) < 60
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    from train.data import TraceDataModule
    from train.module import ScorerModule

    for part, kind in (("model", ScorerModule), ("data", TraceDataModule)):
        for name in itertools.islice(inspect.signature(kind.__init__).parameters, 1, None):
            if name == "seed":
                continue
            described = re.split(rf"--{part}\.{name}(?![a-z_])", text)[-1].split(" --")[0]
            assert "type:" in described, f"--{part}.{name} is not listed"
            assert len(described.split("(")[0].split()) >= 5, f"--{part}.{name} has no description: {described}"

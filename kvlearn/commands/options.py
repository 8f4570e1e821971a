"""Options that several commands share, and what they become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.models import LoadedModel
    from kvlearn.shapes import Protection

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a local folder, a .gguf file, or smollm2-135m.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32, or auto.")]
ReadingDtype = Annotated[
    str | None,
    typer.Option(
        help="bfloat16, float16, float32, or auto; by default bfloat16, but float32 on a CPU without AMX, which reads "
        "text faster so."
    ),
]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of PyTorch; all cores by default.")]
Block = Annotated[int, typer.Option(help="Queries per observed block; victims are chosen once per block.")]
Sinks = Annotated[int, typer.Option(help="First tokens of each row that no policy may evict.")]
SharedOut = Annotated[
    str,
    typer.Option(
        help="How slots are shared: uniform; pooled, among the heads of a layer; pyramid; scorer, as it recommends; a "
        "JSON file of shares per layer, or the folder of a scorer that has them; or pooled:FILE, which is both."
    ),
]
Recent = Annotated[int | None, typer.Option(help="Latest tokens that no policy may evict; one block by default.")]


def load(model: str, dtype: str | None, device: str, threads: int | None) -> LoadedModel:
    """The model on its device, with the threads set; without a dtype, in the one to read text in."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers.utils import logging

    from kvlearn.models import load_model, reading_dtype

    logging.disable_progress_bar()
    if threads is not None:
        if threads < 1:
            raise KvlearnError(f"--threads is {threads}; give a number that is 1 or more.")
        torch.set_num_threads(threads)
    dtype = reading_dtype(device) if dtype is None else dtype
    return load_model(model, dtype=dtype, device=device)  # type: ignore[arg-type]  # load_model names the dtypes


def check_scorer(scorer: str) -> None:
    """Refuse what cannot be a scorer's folder or Hub id, before anything is loaded."""
    name = scorer if Path(scorer).is_dir() else scorer.partition(":")[0]
    if "/" in name or Path(name).is_dir():
        return
    from kvlearn.policies import POLICIES, scorers_there_are

    if name in POLICIES:
        raise KvlearnError(f"--scorer is {scorer!r}, which names a policy; give --policy {scorer}.")
    raise KvlearnError(f"there is no scorer folder {name!r}; {scorers_there_are()}.")


def text_of(file: Path) -> str:
    """The text of a file that the user named."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvlearnError(f"cannot read the prompt from {file}: {error}.") from error


def protection(sinks: int, recent: int | None) -> Protection:
    """The protection that the options describe."""
    from kvlearn.shapes import Protection

    return Protection(sinks=sinks, recent=recent)


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers from a comma-separated list."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise KvlearnError(f"{option} is {text!r}; give whole numbers with commas between, such as 256,512.") from None


def names(text: str) -> list[str]:
    """Words from a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]

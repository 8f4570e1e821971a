"""Tasks on tiny models: a tokenizer of one token a byte, text to hide things in, and a model that reads it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvlearn
from kvlearn import EvictingCache
from kvlearn.tasks.base import Material, Run

WINDOW = 3000  # bytes


def byte_tokenizer() -> Any:
    """One token a byte, and one more that ends a text."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": len(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def text_folder(path: Path, documents: int = 60, characters: int = 4000) -> str:
    """A folder of texts of made-up words, enough that every split has some; returns its name."""
    rng = random.Random(5)
    for number in range(documents):
        words = ("".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(characters // 4))
        text = " ".join(words)[:characters]
        lines = [text[i : i + 70] for i in range(0, characters, 70)]
        (path / f"{number}.txt").write_text("\n".join(lines), "utf-8")
    return str(path)


def material(folder: str, **options: Any) -> Material:
    """Four cases of :data:`WINDOW` bytes."""
    settings: dict[str, Any] = {"docs": 4, "window": WINDOW, "data": folder, "filler": folder, **options}
    return Material(byte_tokenizer(), **settings)


def loaded_model(model: Any) -> Any:
    """A tiny model of 257 tokens as load_model would return it."""
    return SimpleNamespace(
        model=kvlearn.enable(model), tokenizer=byte_tokenizer(), name="tiny", context_length=4096, fingerprint={}
    )


def run_of(loaded: Any, policy: str = "full", budget: int | None = None, **options: Any) -> Run:
    """A run with a new cache."""
    return Run(loaded.model, loaded.tokenizer, EvictingCache(loaded.model, policy, budget, **options))

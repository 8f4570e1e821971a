"""Models by name, the fingerprint that says which model something belongs to, and text to tokens."""

from kvlearn.models.fingerprint import fingerprint, fingerprint_mismatch, same_weights
from kvlearn.models.load import LoadedModel, load_model, model_aliases, reading_dtype
from kvlearn.models.text import encode, tokenizer_hash

__all__ = [
    "LoadedModel",
    "encode",
    "fingerprint",
    "fingerprint_mismatch",
    "load_model",
    "model_aliases",
    "reading_dtype",
    "same_weights",
    "tokenizer_hash",
]

"""The one place where text becomes token ids."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Covers what tokenizers disagree on: runs of spaces, digits, line ends, accents, scripts, emoji, code.
_PROBE = "Hello  world, 12345 times\n\tdef f(x):\n        return x_1 != 3.14  # naïve 東京 🙂\r\n"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text``, and nothing else.

    No beginning- or end-of-text token is added, whatever the tokenizer would add by itself: traces, comparison and
    generation must all see the same tokens for the same text. Special tokens spelled out in the text, such as those a
    chat template writes, become their ids.

    Args:
        tokenizer: A transformers tokenizer.
        text: Any text; an empty one gives an empty list.

    Returns:
        Token ids, one per token.
    """
    # verbose=False: a text longer than the model's context is normal here, it is cut into windows later.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that is equal for two tokenizers exactly when they can stand in for each other.

    It covers the whole vocabulary and the ids of a probe text, not the serialised tokenizer, whose JSON differs
    between library versions.

    Returns:
        32 hexadecimal digits.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    state = json.dumps([vocabulary, encode(tokenizer, _PROBE)], ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

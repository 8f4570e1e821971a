"""Bounded-memory generation for Hugging Face language models, driven by a learned forecast of attention.

Importing kvlearn makes ``attn_implementation="kvlearn"`` known to transformers, as soon as transformers is loaded.
Names are imported on first use, so that ``import kvlearn`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

if TYPE_CHECKING:
    from kvlearn.attention import enable as enable
    from kvlearn.cache import EvictingCache as EvictingCache
    from kvlearn.errors import KvlearnError as KvlearnError
    from kvlearn.policies.base import Policy as Policy
    from kvlearn.scorers import Scorer as Scorer
    from kvlearn.shapes import Protection as Protection

__version__ = "0.1.0"

_PUBLIC = {
    "EvictingCache": "kvlearn.cache",
    "KvlearnError": "kvlearn.errors",
    "Policy": "kvlearn.policies.base",
    "Protection": "kvlearn.shapes",
    "Scorer": "kvlearn.scorers",
    "enable": "kvlearn.attention",
}
__all__ = ["EvictingCache", "KvlearnError", "Policy", "Protection", "Scorer", "__version__", "enable"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'kvlearn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


@when_imported("transformers.modeling_utils")
def _register(_: Any) -> None:
    from kvlearn.attention import register

    register()

"""Scorers: small networks that forecast, per slot, the log of the attention it will still receive."""

from kvlearn.scorers.bank import Scorer
from kvlearn.scorers.config import ScorerConfig

__all__ = ["Scorer", "ScorerConfig"]

"""What a scorer is chosen by: what it loses in closed loop, at equal slots, on the same documents as the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlearn.compare import Comparison, Settings, make_cases
from kvlearn.errors import KvlearnError
from kvlearn.models import LoadedModel, load_model, reading_dtype
from kvlearn.rows import Row, RowStore, loss

Notify = Callable[[str, int, int], None]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judging:
    """How scorers are judged: as ``kvlearn compare`` does, with its names.

    Args:
        model: name of the model.
        data: texts, comma-separated; documents that nothing was trained on.
        split: of the texts.
        docs: how many documents.
        budgets: slots per KV head and layer.
        allocation: how slots are shared among layers and heads.
        window: tokens of a document.
        batch: documents fed together.
        block: queries per observed block.
        beside: policies measured with the scorers, such as ``ema`` and ``oracle``.
        dtype: of the model; by default that of :func:`kvlearn.models.reading_dtype`.
        device: of the model.

    Raises:
        KvlearnError: nothing is to be measured.
    """

    model: str
    data: str = "stdlib"
    split: str = "validation"
    docs: int = 4
    budgets: Sequence[int] = (128, 256, 512)
    allocation: str = "uniform"
    window: int = 2048
    batch: int = 4
    block: int = 32
    beside: Sequence[str] = field(default=())
    dtype: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.docs < 1 or not self.budgets:
            raise KvlearnError("scorers are judged on one document and at one budget at least.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Judging:
        """From a section of a file.

        Raises:
            KvlearnError: a name is unknown or the model is missing.
        """
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise KvlearnError(f"{source}: judge has no {name!r}; it has {', '.join(known)}.")
        if "model" not in values:
            raise KvlearnError(f"{source}: judge needs a model.")
        return cls(**values)


class Judge:
    """A model that scorers are tried in; loaded when the first one comes.

    Args:
        judging: see :class:`Judging`.
        store: where rows go; what it holds is not measured again.
    """

    def __init__(self, judging: Judging, store: RowStore) -> None:
        self.judging, self.store = judging, store
        self._loaded: LoadedModel | None = None
        self._cases: Any = None

    def run(self, policies: Sequence[str], notify: Notify | None = None) -> None:
        """Measure policies, or folders of scorers, as far as there are no rows of them yet."""
        judging = self.judging
        settings = Settings(
            policies=list(policies),
            budgets=list(judging.budgets),
            window=judging.window,
            batch=judging.batch,
            block=judging.block,
            allocation=judging.allocation,
        )
        if self._cases is None:
            self._cases = make_cases(self.loaded, settings, docs=judging.docs, data=judging.data, split=judging.split)
        Comparison(self.loaded, settings, self._cases, self.store).run(notify)

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        if self._loaded is None:
            judging = self.judging
            dtype: Any = judging.dtype or reading_dtype(judging.device)
            self._loaded = load_model(judging.model, dtype=dtype, device=judging.device)
        return self._loaded


def losses(rows: Sequence[Row], policy: str, budget: int, metric: str = "nll") -> dict[tuple[str, str], float]:
    """Rise over the full cache by document, of one policy at one budget, in nats/token."""
    found = {}
    for row in rows:
        if (row["policy"], row["budget"], row["metric"]) != (policy, budget, metric):
            continue
        if row.get("error"):
            raise KvlearnError(f"{policy} at {budget} slots failed: {row['error']}")
        found[row["domain"], row["doc"]] = loss(row)
    return found


def table_of(rows: Sequence[Row], policies: Sequence[str], budgets: Sequence[int]) -> Array:
    """``[policies, budgets, documents]`` losses.

    Raises:
        KvlearnError: one failed, or lacks a document.
    """
    found = [[losses(rows, policy, budget) for budget in budgets] for policy in policies]
    docs = sorted({doc for row in found for each in row for doc in each})
    try:
        return np.array([[[each[doc] for doc in docs] for each in row] for row in found], dtype=np.float64)
    except KeyError as missing:
        raise KvlearnError(f"not all were measured on document {missing}.") from None

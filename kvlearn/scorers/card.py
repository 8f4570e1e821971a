"""The model card of a scorer, made from its config alone: no number that was not measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.scorers.config import ScorerConfig

_TEMPLATE = """---
library_name: kvlearn
license: apache-2.0
tags:
- kv-cache
- kvlearn
---

# {title}

{summary}

## Use

```python
import kvlearn

kvlearn.enable(model)  # a loaded transformers model
scorer = kvlearn.Scorer.from_pretrained("path/to/this/folder")
cache = kvlearn.EvictingCache(model, policy=scorer, budget=256{allocation})
model.generate(**inputs, past_key_values=cache)
```

## What it is

{facts}

The score of a slot is a forecast of the log of the attention mass that the slot will still receive. The level of each
head is set on the validation windows, so that its forecasts sum to what it receives there: scores of the heads of a
layer compare, and `EvictingCache(..., allocation="pooled")` gives each head the slots that it needs.

## Measured

{results}

## Training data

{data}

## Training recipe

{recipe}

## Limits

The scorer serves models of the shape it was trained for; loading it into another is refused. It forecasts attention
from text like its training data: measure it on yours with `kvlearn compare` before you rely on it.
"""

_NOT_MEASURED = (
    "Nothing has been measured yet. `kvlearn compare MODEL --policies full,ema,FOLDER,oracle --task lm` measures it."
)


def render(config: ScorerConfig) -> str:
    """The text of ``README.md``."""
    name = config.model.get("architecture")
    what = f"{len(config.layers)}-layer {name} model" if name else "model that is not recorded"
    trained = "A scorer" if config.training else "An untrained scorer"
    return _TEMPLATE.format(
        allocation="" if config.budgets is None else ', allocation="scorer"',
        title=f"KV cache scorer for a {what}",
        summary=f"{trained} that decides which cached tokens kvlearn forgets when a budget is full.",
        facts=_facts(config),
        results="\n\n".join(_section(m) for m in config.metrics) or _NOT_MEASURED,
        data=_json(config.data) if config.data else "None.",
        recipe=_json(config.training) if config.training else "None: untrained weights rank by a moving average.",
    )


def _facts(config: ScorerConfig) -> str:
    rows = {
        "network": "linear" if config.kind == "linear" else f"linear plus {config.hidden} hidden units",
        "scorers": f"{len(config.layers)} layers x {config.heads} KV heads",
        "reads of keys and values": _encoder(config),
        "forecast": _forecast(config),
        "observed": f"blocks of {config.block} queries, {config.group_reduce} over the query heads of a KV head",
        "layer budgets": "equal" if config.budgets is None else ", ".join(f"{b:.3g}" for b in config.budgets),
        "heads of a layer": "share its slots" if config.allocation == "pooled" else "equal slots",
    }
    if config.model.get("weights"):
        rows["trained for weights"] = f"`{config.model['weights']}`"
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _encoder(config: ScorerConfig) -> str:
    numbers = f"their norms, and {config.key_rank} numbers per token and KV head"
    if config.encoder == "key":
        return f"{numbers} by a linear map of the head's own key"
    if config.encoder == "layer":
        hidden = f"linear plus {config.encoder_hidden} hidden units"
        return f"{numbers} from the keys and values of all KV heads of the layer ({hidden})"
    return "their norms"


_REDUCED = {
    "mean": "mean mass per query",
    "soft-max": "soft maximum of the block means of mass",
    "max": "largest block mean of mass",
    "peak": "largest mass that one query gives",
    "discounted": "largest block mean of mass, the nearer the more, and a little of the sum of block means",
    "discounted-peak": "largest mass that one query gives, the nearer the more",
}


_WEIGHED = {
    "norm": "the norm of the value",
    "output": "the norm of what the value adds to the layer's output",
    "deviation": "how far from the mean output the value is, in the layer's output",
}


def _forecast(config: ScorerConfig) -> str:
    horizon = ", ".join("to the end of the text" if h == 0 else f"over {h} queries" for h in config.horizon)
    power = f" to the power {config.value_power:g}" if config.value_power != 1 else ""
    weight = f", times {_WEIGHED[config.value]}{power}" if config.value_power else ""
    sharpness = f" (sharpness {config.sharpness:g})" if config.reduce == "soft-max" else ""
    return f"{_REDUCED[config.reduce]}{sharpness}, {horizon}{weight}"


def check_results(results: Any, source: str) -> tuple[dict[str, Any], ...]:
    """Check results that are to go into a card.

    Args:
        results: one object or a list of them, each with ``table`` (a list of flat objects, one per row) and
            optionally ``title``, ``command`` (what measured it) and ``notes`` (a list of sentences).
        source: where it came from, for messages.

    Raises:
        KvlearnError: it has another form.
    """
    sections = results if isinstance(results, list) else [results]
    for i, section in enumerate(sections):
        where = f"{source}: result {i}"
        if not isinstance(section, dict) or not isinstance(section.get("table"), list):
            raise KvlearnError(f"{where} is not an object with a list 'table' of rows.")
        unknown = sorted(section.keys() - {"title", "command", "table", "notes"})
        if unknown:
            raise KvlearnError(f"{where} has a field {unknown[0]!r}; known are title, command, table and notes.")
        for name, kind in (("title", str), ("command", str), ("notes", list)):
            if name in section and not isinstance(section[name], kind):
                raise KvlearnError(f"{where}: {name} is {section[name]!r}; expected a {kind.__name__}.")
        for row in section["table"]:
            if not isinstance(row, dict) or any(isinstance(v, dict | list) for v in row.values()):
                raise KvlearnError(f"{where}: a row of its table is {row!r}; expected a flat object.")
            if any(isinstance(v, float) and not math.isfinite(v) for v in row.values()):
                raise KvlearnError(f"{where}: a row of its table holds a number that is not finite: {row!r}.")
    return tuple(sections)


def _section(result: Mapping[str, Any]) -> str:
    parts = [f"### {result['title']}"] if result.get("title") else []
    columns = list(dict.fromkeys(name for row in result["table"] for name in row))
    if columns:
        lines = [_line(columns), _line("---" for _ in columns)]
        lines += [_line(_cell(row.get(name)) for name in columns) for row in result["table"]]
        parts.append("\n".join(lines))
    parts += [str(note) for note in result.get("notes", ())]
    if result.get("command"):
        parts.append(f"Measured by:\n\n```sh\n{result['command']}\n```")
    return "\n\n".join(parts)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _json(value: Mapping[str, Any]) -> str:
    return "```json\n" + json.dumps(value, indent=2, ensure_ascii=False) + "\n```"

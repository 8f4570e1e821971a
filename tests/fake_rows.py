"""Rows that look like a real comparison on a small model, for the tests of the statistics and the report."""

from __future__ import annotations

from typing import Any

import numpy as np

# Mean loss at 256 slots in nats/token, about what the policies lose on SmolLM2-135M.
POLICIES: dict[str, tuple[str, float]] = {
    "full": ("full", 0.0),
    "oracle": ("oracle", 0.035),
    "random": ("floor", 1.098),
    "protected-random": ("floor", 0.610),
    "streaming": ("heuristic", 0.398),
    "snapkv": ("heuristic", 0.330),
    "h2o": ("heuristic", 0.318),
    "tova": ("heuristic", 0.309),
    "h2o-exposure": ("heuristic", 0.281),
    "ema": ("heuristic", 0.273),
    "checkpoints/smollm2-135m": ("learned", 0.200),
}
DOMAINS = ("news", "code", "law", "recipes")
BYTES_PER_POSITION = 30 * 3 * 64 * 2 * 2  # layers, KV heads, head dim, key and value, bf16
STATE_PER_POSITION = 30 * 3 * 16


def fake_row(**changes: Any) -> dict[str, Any]:
    """One good row; keyword arguments replace or add fields."""
    row: dict[str, Any] = {
        "model": "tiny-llama",
        "task": "lm",
        "policy": "h2o",
        "kind": "heuristic",
        "budget": 256,
        "doc": "news-00",
        "domain": "news",
        "seed": 0,
        "metric": "nll",
        "value": 2.5,
        "full_value": 2.2,
        "slots": 256,
        "bytes": 256 * (BYTES_PER_POSITION + STATE_PER_POSITION),
        "state_bytes": 256 * STATE_PER_POSITION,
        "tokens_per_s": 180.0,
        "tokens": 1536,
        "window": 2048,
    }
    return row | changes


def fake_rows(
    *,
    policies: dict[str, tuple[str, float]] = POLICIES,
    budgets: tuple[int, ...] = (128, 256, 512),
    docs: int = 12,
    seeds: tuple[int, ...] = (0,),
    tasks: tuple[tuple[str, str], ...] = (("lm", "nll"), ("passkey", "accuracy")),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Every policy at every budget on every document; losses vary with the document, and less with the seed."""
    rng = np.random.default_rng(seed)
    rows = []
    for task, metric in tasks:
        for number in range(docs):
            domain = DOMAINS[number % len(DOMAINS)]
            full = float(rng.normal(2.2, 0.4)) if metric == "nll" else 1.0
            hardness = float(rng.lognormal(0, 0.35))
            for policy, (kind, mean) in policies.items():
                for budget in (None,) if kind == "full" else budgets:
                    for run in seeds if kind == "floor" else (0,):
                        shrink = 0.0 if budget is None else (256 / budget) ** 1.2
                        harm = mean * shrink * hardness * float(rng.lognormal(0, 0.1))
                        held = budget or 2048
                        state = 0 if kind == "full" else held * STATE_PER_POSITION
                        rows.append(
                            fake_row(
                                task=task,
                                metric=metric,
                                policy=policy,
                                kind=kind,
                                budget=budget,
                                doc=f"{domain}-{number:02d}",
                                domain=domain,
                                seed=run,
                                value=full + harm if metric == "nll" else float(rng.random() > min(1.0, harm)),
                                full_value=full,
                                slots=held,
                                bytes=held * BYTES_PER_POSITION + state,
                                state_bytes=state,
                                tokens_per_s=float(rng.normal(180, 8)),
                                scorer_share=0.03 if kind == "learned" else 0.01,
                                block=None if kind == "full" else 32,
                            )
                        )
                        if kind == "full" and metric == "accuracy":
                            rows[-1]["value"] = full
    return rows

"""``kvlearn lm-eval``: lm-evaluation-harness, with kvlearn among its models."""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness: every argument is its own, and --model kvlearn is one of its models.

    For example: kvlearn lm-eval --model kvlearn --model_args pretrained=smollm2-135m,policy=ema,budget=256 --tasks
    lambada_openai
    """
    from kvlearn.lm_eval import main

    main(context.args or ["--help"])

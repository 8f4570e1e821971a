"""``kvlearn lm-eval``: lm-evaluation-harness, with kvlearn among its models."""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

HELP = """\
kvlearn lm-eval ARGUMENTS hands every argument to lm-evaluation-harness and adds one model to its own, kvlearn: any
language model under a budget of cache slots.

  kvlearn lm-eval --model kvlearn --model_args pretrained=MODEL,policy=POLICY,budget=SLOTS --tasks TASK,TASK

--model_args of kvlearn, as NAME=VALUE with commas:
  pretrained    a Hub id, a local folder, a .gguf file, or smollm2-135m
  policy        a name from `kvlearn policies`, with options if need be, or a scorer's folder; full by default
  budget        the most slots each KV head of a layer may hold, everything included; not needed for full
  allocation    how slots are shared: uniform (default), pooled, pyramid, scorer, or a JSON file of shares per layer
  sinks         first tokens that no policy may evict; 4 by default
  recent        latest tokens that no policy may evict; one block by default
  block         queries per observed block; 32 by default, less for small budgets
  dtype         bfloat16 (default), float16, float32, or auto
  device        such as cpu or cuda; or the harness's own --device
  max_length    longest text in tokens; the model's own by default
  max_gen_toks  tokens to generate where a task does not say; 256 by default

A request's context is fed at once and cut to the budget before its answers are scored or generated. Everything else is
the harness's, whose own help follows; `kvlearn lm-eval run --help` lists its options.
"""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness: every argument is its own, and --model kvlearn is one of its models.

    For example: kvlearn lm-eval --model kvlearn --model_args pretrained=smollm2-135m,policy=ema,budget=256 --tasks
    lambada_openai
    """
    if context.args in ([], ["-h"], ["--help"]):
        typer.echo(HELP)
    from kvlearn.lm_eval import main

    main(context.args or ["--help"])

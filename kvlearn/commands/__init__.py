"""The commands of the command line: one module each, which parses options and calls the library.

A command is a function with typer's annotations. Its module may import typer and the standard library at the top, and
everything heavier (torch, transformers, datasets, even kvlearn's own modules that need them) inside the function, so
that ``kvlearn --help`` stays under a second. To add one, write ``kvlearn/commands/<name>.py`` and name it below.
"""

import typer

from kvlearn.commands import (
    bench,
    calibrate,
    compare,
    corpora,
    demo,
    generate,
    inspect,
    lm_eval,
    policies,
    report,
    tasks,
    trace,
)


def register(app: typer.Typer) -> None:
    """Add every command to ``app``, in the order in which ``--help`` lists them."""
    app.command("demo")(demo.demo)
    app.command("trace")(trace.trace)
    app.command("generate")(generate.generate)
    app.command("compare")(compare.compare)
    app.command("calibrate")(calibrate.calibrate)
    app.add_typer(bench.app, name="bench")
    app.command("inspect")(inspect.inspect)
    app.command("report")(report.report)
    app.command("policies")(policies.policies)
    app.command("tasks")(tasks.tasks)
    app.command("corpora")(corpora.corpora)
    app.command("lm-eval", context_settings=lm_eval.SETTINGS)(lm_eval.lm_eval)

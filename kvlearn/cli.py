"""The command line: ``kvlearn COMMAND``. Commands live in kvlearn/commands/; this module turns errors into sentences.

Exit codes: 0 for success, 2 for a mistake the user can put right (one line on stderr, starting ``kvlearn: error:``),
130 for Ctrl-C, 1 for output that nobody reads any more. Anything else is a bug and shows its traceback; with
``KVLEARN_TRACEBACK=1`` in the environment mistakes show theirs too.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvlearn import __version__, commands
from kvlearn.errors import KvlearnError

INTERRUPTED = 130
MISTAKE = 2
UNREAD = 1

# The extra that brings each optional package, for the sentence that a missing one deserves.
EXTRA_OF = {
    "datasets": "trace",
    "jinja2": "report",
    "jsonargparse": "train",
    "lightning": "train",
    "lm_eval": "eval",
    "matplotlib": "report",
    "tensorboard": "train",
    "torchmetrics": "train",
}

# What PyTorch says on a CPU and on a GPU.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")

app = typer.Typer(
    name="kvlearn",
    help="Bounded-memory generation: a small trained scorer decides which cached tokens to forget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def versions() -> str:
    """One line: kvlearn's version and those of the libraries that decide what it computes, none of them imported."""
    found = []
    for name in ("torch", "transformers", "triton"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"kvlearn {__version__} ({', '.join(found)}, python {python})"


def _print_versions(wanted: bool) -> None:
    if wanted:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


commands.register(app)


def explain(error: Exception) -> str | None:
    """The sentence that tells the user what to put right, or None when ``error`` looks like a bug in kvlearn."""
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        return _one_line(error.format_message()) + hint
    if isinstance(error, KvlearnError):
        return _one_line(str(error))
    if "No space left on device" in str(error):  # safetensors and torch hide the errno of a full disk in a text
        where = f" while writing {error.filename}" if isinstance(error, OSError) and error.filename else ""
        return f"the disk is full{where}; free some space and run the command again"
    if isinstance(error, MemoryError | RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY):
        return f"there is not enough memory ({_one_line(str(error))[:160]}); lower --budget or the length of the text"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF.get(package)
        return f"this needs the package {package}: pip install 'kvlearn[{extra}]'" if extra else None
    if isinstance(error, PermissionError) and error.filename:
        return f"no permission to use {error.filename}; choose another place or change its permissions"
    if isinstance(error, OSError):
        return _one_line(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _drop_unwritable_output() -> None:
    """Point stdout to nowhere if it cannot be written, or Python complains about it once more while it shuts down."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows ``kvlearn`` on the command line; ``sys.argv`` by default.

    Returns:
        The exit code, as listed at the top of this module.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = app(args=arguments, prog_name="kvlearn", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = UNREAD
    except Exception as error:
        sentence = explain(error)
        if sentence is None or os.environ.get("KVLEARN_TRACEBACK"):
            raise
        print(f"kvlearn: error: {sentence}", file=sys.stderr)
        code = MISTAKE
    finally:
        _drop_unwritable_output()
    if code == INTERRUPTED:  # which is also how typer reports Ctrl-C inside a command
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0

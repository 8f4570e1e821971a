"""``python -m train fit --config FILE``, ``validate``, ``export CKPT DIR``, ``ablate FILE`` and ``rounds``.

Exit codes: 0 for success, 2 for a mistake the user can put right (one line on stderr), 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys

from kvlearn.cli import INTERRUPTED, MISTAKE, explain


def main(arguments: list[str]) -> int:
    """Run one command and turn errors into sentences."""
    try:
        if arguments[:1] and arguments[0] in ("export", "ablate", "rounds"):
            import importlib

            importlib.import_module(f"train.{arguments[0]}").run(arguments[1:])
        else:
            from train.cli import run

            run(arguments)
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns Ctrl-C into an exit with code 1, once it has shut down.
        if not isinstance(stop.__context__ or stop, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        sentence = _one_line(error) if isinstance(error, argparse.ArgumentError) else explain(error)
        if sentence is None or os.environ.get("KVLEARN_TRACEBACK"):
            raise
        print(f"train: error: {sentence}", file=sys.stderr)
        return MISTAKE
    return 0


def _one_line(error: argparse.ArgumentError) -> str:
    """What was wrong with an argument or a config, and where to read on."""
    return " ".join(str(error).split()) + " (see python -m train fit --help)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

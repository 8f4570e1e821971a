"""``python -m train fit --config FILE``, ``validate`` and ``export CKPT DIR``.

Exit codes: 0 for success, 2 for a mistake the user can put right (one line on stderr), 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import sys

from kvlearn.cli import INTERRUPTED, MISTAKE, explain


def main(arguments: list[str]) -> int:
    """Run one command and turn errors into sentences."""
    try:
        if arguments[:1] == ["export"]:
            from train.export import run as run_export

            run_export(arguments[1:])
        else:
            from train.cli import run

            run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        sentence = explain(error)
        if sentence is None or os.environ.get("KVLEARN_TRACEBACK"):
            raise
        print(f"train: error: {sentence}", file=sys.stderr)
        return MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

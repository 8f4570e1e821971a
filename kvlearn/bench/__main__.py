"""``python -m kvlearn.bench NAME [options]``: one module of this package per name."""

from __future__ import annotations

import difflib
import importlib
import sys

from kvlearn.errors import KvlearnError

BENCHES = {"kernels": "check and time every kernel on a GPU, next to PyTorch's attention over the full context"}


def main(arguments: list[str]) -> int:
    """Run one bench; returns the exit status."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m kvlearn.bench NAME [options]\n")
        print("\n".join(f"  {name:10} {summary}" for name, summary in BENCHES.items()))
        return 0
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"no bench is named {name!r}; {hint}known are {', '.join(BENCHES)}.", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(f"kvlearn.bench.{name}").main(arguments[1:]))
    except KvlearnError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The layout holds: imports only go down, light modules stay light, files stay short, nothing names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Which floor each module of kvlearn stands on; a package stands on one floor with all it holds.
FLOORS = (
    ("allocation", "costs", "errors", "features", "history", "progress", "shapes", "shipped"),
    ("corpora", "kernels", "metrics", "models", "rotary", "targets", "traces"),
    ("scorers",),
    ("policies",),
    ("attention", "cache", "layer", "observation", "pool", "slots", "state", "support", "together", "waiting"),
    (
        "baseline",
        "bench",
        "blame",
        "calibration",
        "cells",
        "compare",
        "demo",
        "lm_eval",
        "keeping",
        "kvpress",
        "plan",
        "presets",
        "report",
        "retention",
        "rows",
        "scoring",
        "sharing",
        "shortcut",
        "stats",
        "study",
        "tasks",
        "tracing",
        "workers",
    ),
    ("", "__main__", "cli", "commands"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# These read rows and draw; whoever looks at results needs no model library.
LIGHT = ("baseline", "cells", "report", "rows", "stats")
MODEL_LIBRARIES = {"datasets", "safetensors", "tokenizers", "torch", "torchmetrics", "transformers", "triton"}

LONGEST_FILE = 400
LONG_FILES: dict[str, str] = {}  # path: why it cannot be shorter


@dataclass(frozen=True)
class Import:
    """One import, anywhere in a module: the module it names, the line, and whether only type checkers see it."""

    module: str
    line: int
    for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for top in ("kvlearn", "train") for path in sorted((ROOT / top).rglob("*.py"))}


def imports(
    source: str, module: str, is_package: bool = False, modules: frozenset[str] = frozenset(SOURCES)
) -> Iterator[Import]:
    """Every :class:`Import` of ``source``: in functions, under TYPE_CHECKING, relative, by import_module as well."""
    package = module if is_package else module.rpartition(".")[0]
    for node, for_types in _walk(ast.parse(source), for_types=False):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # ``from package import name`` imports a module where one has that name,
            # and the version of the package is for anyone to note
            named = [alias.name for alias in node.names if (base, alias.name) != ("kvlearn", "__version__")]
            names = [full if (full := f"{base}.{name}") in modules else base for name in named]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            yield Import(name, node.lineno, for_types)


def _walk(node: ast.AST, for_types: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, for_types
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
        yield from _walk(child, for_types or typing_only)


def unit(module: str) -> str | None:
    """The part of ``module`` that FLOORS speaks of: ``"policies"`` of kvlearn.policies.h2o; None outside kvlearn."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "kvlearn" else None


def upward(module: str, found: list[Import]) -> list[str]:
    """What ``module`` imports from a floor above its own, or may not import at all."""
    own = unit(module)
    faults = []
    for item in found:
        where = f"{module}:{item.line} imports {item.module}"
        top, other = item.module.partition(".")[0], unit(item.module)
        if own is not None and top in ("train", "lightning", "pytorch_lightning"):
            faults.append(f"{where}: kvlearn knows nothing of training loops")
        elif own in FLOOR_OF and other in FLOOR_OF and FLOOR_OF[other] > FLOOR_OF[own]:
            faults.append(f"{where}: floor {FLOOR_OF[other]} from floor {FLOOR_OF[own]}")
    return faults


IMPORTS = {
    module: list(imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))
    for module, path in SOURCES.items()
}


def test_every_module_stands_on_a_floor() -> None:
    units = {part for module in SOURCES if (part := unit(module)) is not None}
    assert units <= set(FLOOR_OF), "name these in FLOORS, on the lowest floor that holds all they import"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_only_go_down(module: str) -> None:
    assert upward(module, IMPORTS[module]) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        (
            "kvlearn.shapes",
            "def f():\n    import kvlearn.cache",
            "shapes:2 imports kvlearn.cache: floor 4 from floor 0",
        ),
        ("kvlearn.shapes", "from kvlearn import cache", "floor 4 from floor 0"),
        ("kvlearn.shapes", "from kvlearn import EvictingCache", "imports kvlearn: floor 6 from floor 0"),
        ("kvlearn.policies.base", "from ..cache import EvictingCache", "imports kvlearn.cache: floor 4 from floor 3"),
        ("kvlearn.policies.base", "from .. import cli", "imports kvlearn.cli: floor 6 from floor 3"),
        ("kvlearn.scorers", "if TYPE_CHECKING:\n    from kvlearn.policies import Policy", "floor 3 from floor 2"),
        ("kvlearn.models", "x = importlib.import_module('kvlearn.tasks.lm')", "floor 5 from floor 1"),
        ("kvlearn.demo", "from train.module import Module", "kvlearn knows nothing of training loops"),
        ("kvlearn.demo", "import lightning.pytorch as pl", "kvlearn knows nothing of training loops"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str, fault: str) -> None:
    known = frozenset({*SOURCES, "kvlearn.cache", "kvlearn.cli"})
    (found,) = upward(module, list(imports(source, module, modules=known)))
    assert fault in found


def test_imports_that_go_down_are_let_through() -> None:
    source = "import torch\nfrom kvlearn.errors import KvlearnError\nfrom . import base\nfrom ..shapes import Budget"
    assert upward("kvlearn.policies.h2o", list(imports(source, "kvlearn.policies.h2o"))) == []
    assert upward("train.module", list(imports("import kvlearn, lightning", "train.module"))) == []


def test_no_two_modules_need_each_other() -> None:
    needs: dict[str, set[str]] = {}
    for module, found in IMPORTS.items():
        own = unit(module)
        for item in found:
            other = unit(item.module)
            if own and other and own != other and not item.for_types:
                needs.setdefault(own, set()).add(other)

    def circle(path: list[str]) -> list[str] | None:
        for other in sorted(needs.get(path[-1], ())):
            if other in path:
                return [*path[path.index(other) :], other]
            if found := circle([*path, other]):
                return found
        return None

    assert [circle([name]) for name in needs if circle([name])] == []


@pytest.mark.parametrize("name", [name for name in LIGHT if f"kvlearn.{name}" in SOURCES])
def test_results_are_read_without_model_libraries(name: str) -> None:
    todo, seen = [module for module in SOURCES if unit(module) == name], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        for item in IMPORTS[module]:
            if item.for_types:
                continue
            assert item.module.partition(".")[0] not in MODEL_LIBRARIES, f"{module}:{item.line} imports {item.module}"
            todo += [item.module] if item.module in SOURCES and item.module not in {*seen, "kvlearn"} else []


@pytest.mark.parametrize("module", SOURCES)
def test_files_stay_short(module: str) -> None:
    path = SOURCES[module]
    if str(path.relative_to(ROOT)) not in LONG_FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGEST_FILE, f"{path.relative_to(ROOT)} has {lines} lines: split it by what its parts do"


def tracked_files() -> list[Path]:
    """The files of the repository; in a copy without git, the sources alone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [*SOURCES.values(), *Path(__file__).parent.rglob("*.py")]


def test_no_file_names_one_machine() -> None:
    home_of_someone = r"/(?:home|Users)/[a-z][a-z0-9_-]+/|[A-Z]:\\Users\\|/roo[t]/"  # this line is not to find itself
    here = "|".join(re.escape(str(place)) for place in {ROOT, Path.home(), Path(sys.prefix)} if len(place.parts) > 2)
    pattern = re.compile(f"{home_of_someone}|(?:{here})(?![A-Za-z0-9])" if here else home_of_someone)
    assert pattern.search("cp /home/" + "someone/model .")
    faults = []
    for path in tracked_files():
        if path == Path(__file__) or b"\0" in (data := path.read_bytes())[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            if found := pattern.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number} says {found.group()}")
    assert faults == [], "a path of one machine is of no use on another"


def test_every_lint_exception_says_why() -> None:
    marker = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma:\s*no cover)(?P<rest>.*)$")
    faults = []
    for path in [*SOURCES.values(), *Path(__file__).parent.rglob("*.py")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = marker.search(line)
            if found and path != Path(__file__) and not re.search(r"[a-z]{3,} +[a-z]+", found["rest"]):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {found.group()}")
    assert faults == [], "put the reason on the same line: '# noqa: CODE - reason'"

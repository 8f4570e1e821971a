"""kvlearn policies lists what is registered."""

from __future__ import annotations

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

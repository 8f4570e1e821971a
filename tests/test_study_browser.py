"""The page of a trace in Chromium: it fits, and can be read, by day and by night."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from browser_helpers import FAINT, IN_BROWSER
from fake_traces import write_trace

from kvlearn.report.study import write_study
from kvlearn.study import study
from kvlearn.traces import Trace

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = IN_BROWSER


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("study")
    trace = Trace(write_trace(folder / "trace", windows=1))
    return write_study(study(trace), folder, commands=["kvlearn report <trace>"]).as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark"), (390, "light")])
def test_it_fits_and_can_be_read(page: str, look: Callable[..., Chrome], width: int, scheme: str) -> None:
    chrome = look(page, width=width, scheme=scheme)
    assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    count, faint = chrome.execute_script(FAINT)
    assert count > 100
    assert faint == []
    shown = "return [...document.querySelectorAll('.figure > svg')].filter((each) => each.clientHeight > 20).length"
    assert chrome.execute_script(shown) == 5 + 3, "five charts and three maps"
    assert "<trace>" in chrome.find_element("css selector", "pre").text


def test_every_value_is_told_by_its_mark(page: str, look: Callable[..., Chrome]) -> None:
    chrome = look(page)
    told = chrome.execute_script("return [...document.querySelectorAll('svg title')].map((each) => each.textContent)")
    assert "layer 0, head 1: " in " ".join(told)
    assert any(text.startswith("90% of the mass, layer 1: 0.") for text in told)
    labels = [svg.get_attribute("aria-label") for svg in chrome.find_elements("css selector", ".figure > svg")]
    assert all(labels), "every chart is told aloud"

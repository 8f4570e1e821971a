"""Chromium for the tests of pages: how to open one, and what to ask of it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

IN_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
    pytest.mark.skipif(importlib.util.find_spec("selenium") is None, reason="needs selenium"),
]

# What can be pressed and is smaller than 24 pixels.
SMALL = """
const all = [...document.querySelectorAll("button, select, input, summary")];
const seen = all.filter((each) => each.getClientRects().length);
return seen.filter((each) => each.getBoundingClientRect().height < 24).map((each) => each.textContent);
"""
# How many texts there are, and which are too faint for what is behind them: below 4.5, or 3 if large (WCAG 2.2).
FAINT = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const behind = (node) => {
  for (let each = node; each; each = each.parentElement) {
    const colour = channels(getComputedStyle(each).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const unseen = "script, noscript, style, [hidden]";
const faint = [];
let count = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.data.trim();
  const node = walker.currentNode.parentElement;
  if (!text || node.closest(unseen) || !node.getClientRects().length) continue;
  const style = getComputedStyle(node);
  const ink = channels(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const [high, low] = [light(ink), light(behind(node))].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  count++;
  if (ratio < (large ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)} (${node.tagName})`);
}
return [count, faint];
"""
FOCUS = """
const at = document.activeElement;
return at.id || at.dataset.policy || at.getAttribute("aria-label") || at.textContent.trim();
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    driver.downloads = folder  # type: ignore[attr-defined]  # the tests look for the file there
    yield driver
    driver.quit()


@pytest.fixture
def look(chrome: Chrome) -> Iterator[Callable[..., Chrome]]:
    """Open a page at a size and in a colour scheme; at the end, nothing was logged, harmed or asked of the network."""

    def open_page(address: str, width: int = 1200, height: int = 900, scheme: str = "light") -> Chrome:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.get(address)
        return chrome

    yield open_page
    assert chrome.get_log("browser") == []
    assert chrome.execute_script("return window.harmed") is None
    assert chrome.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)") == []


def press(chrome: Chrome, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(chrome).send_keys(*keys).perform()


def click(chrome: Chrome, element: Any) -> None:
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()

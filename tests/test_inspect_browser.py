"""The page of ``kvlearn inspect`` as a person meets it: by mouse and by keyboard, by day and by night, on a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from browser_helpers import FAINT, FOCUS, IN_BROWSER, SMALL, click, press

from kvlearn.report.inspect import Inspection, Kept, write_inspection

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = IN_BROWSER

WORDS = ["<b>", " alpha", " beta", "\n", "gamma", "", " delta", " a-long-policy-name" * 3] * 5
HEADS, LAYERS = 4, 3
STATS = {"slots": 9, "mean_slots": 8.5, "bytes": 40_960}
STREAM = [[HEADS * (n < 4 or n > 30) for n in range(40)]] * LAYERS
MIXED = [[(n * (layer + 1)) % (HEADS + 1) if n % 3 else 0 for n in range(40)] for layer in range(LAYERS)]
CLASSES = "return [...document.querySelectorAll('article')][arguments[0]].querySelectorAll('.token')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    kept = [Kept("streaming", STREAM, STATS), Kept("checkpoints/a-scorer-with-a-long-name", MIXED, STATS)]
    inspection = Inspection("tiny", WORDS, [0, 1, 5], HEADS, 9, "fed at once", kept)
    return write_inspection(inspection, tmp_path_factory.mktemp("page") / "x.html", commands=["kvlearn x"]).as_uri()


def classes(chrome: Chrome, policy: int) -> list[str]:
    """The class of every token of a policy's text."""
    return chrome.execute_script(f"{CLASSES} && [...({CLASSES[7:]})].map((each) => each.className)", policy)


def test_tokens_are_shaded_by_the_heads_that_hold_them(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.support.select import Select

    chrome = look(page)
    assert classes(chrome, 0) == ["token h4" if n < 4 or n > 30 else "token h0" for n in range(40)]
    layer = Select(chrome.find_element("id", "layer"))
    assert [each.text for each in layer.options] == ["all", "0", "1", "5"]
    layer.select_by_visible_text("5")
    level = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert classes(chrome, 1) == [f"token h{level[count]}" for count in MIXED[2]]
    forgotten = sum(count == 0 for count in MIXED[2])
    assert chrome.find_elements("css selector", ".count")[1].text == (
        f"{40 - forgotten} of 40 tokens held, {forgotten} forgotten"
    )


def test_what_a_policy_forgot_can_be_seen_alone_and_against_another(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.support.select import Select

    chrome = look(page)
    click(chrome, chrome.find_element("id", "only"))
    shown = chrome.execute_script(f"{CLASSES}", 0)
    assert [each.is_displayed() for each in shown] == [4 <= n <= 30 and WORDS[n] != "\n" for n in range(40)]
    click(chrome, chrome.find_element("id", "only"))
    Select(chrome.find_element("id", "show")).select_by_visible_text("difference from streaming")
    totals = [sum(layer[n] for layer in MIXED) for n in range(40)]
    stream = [sum(layer[n] for layer in STREAM) for n in range(40)]
    marks = ["less" if a < b else "more" if a > b else "" for a, b in zip(totals, stream, strict=True)]
    assert [name.removeprefix("token").strip() for name in classes(chrome, 1)] == marks
    assert {name.strip() for name in classes(chrome, 0)} == {"token"}
    visible = [each.text for each in chrome.find_elements("css selector", ".shades li") if each.is_displayed()]
    assert visible == ["fewer heads than there", "more heads than there"]


def test_a_token_is_told_under_every_policy(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = look(page)
    picked = chrome.find_element("id", "picked")
    assert not picked.is_displayed()
    texts = chrome.find_elements("css selector", ".text")
    chrome.execute_script("arguments[0].focus()", texts[1])
    press(chrome, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert 'Token 2 of 40: " alpha"' in picked.text
    assert "streaming: 12 of 12 heads" in picked.text
    assert f"long-name: {sum(layer[1] for layer in MIXED)} of 12 heads" in picked.text
    cells = picked.find_elements("css selector", ".cells")[1]
    assert [int(each.text) for each in cells.find_elements("tag name", "span")] == [layer[1] for layer in MIXED]
    for keys, token in (
        ([Keys.ARROW_DOWN], 12),
        ([Keys.ARROW_LEFT], 11),
        ([Keys.END], 40),
        ([Keys.ARROW_RIGHT], 40),
        ([Keys.HOME], 1),
    ):
        press(chrome, *keys)
        assert picked.text.startswith(f"Token {token} of 40")
        assert len(chrome.find_elements("css selector", ".token.at")) == 2, "the same token in both texts"
    press(chrome, Keys.ESCAPE)
    assert not picked.is_displayed()
    click(chrome, texts[0].find_elements("css selector", ".texts .token")[4])
    assert picked.text.startswith("Token 5 of 40")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("show", ["what is held", "difference from streaming"])
def test_every_text_stands_out(look: Callable[..., Chrome], page: str, scheme: str, show: str) -> None:
    from selenium.webdriver.support.select import Select

    chrome = look(page, scheme=scheme)
    Select(chrome.find_element("id", "show")).select_by_visible_text(show)
    click(chrome, chrome.find_elements("css selector", ".texts .token")[4])
    count, faint = chrome.execute_script(FAINT)
    assert count > 100
    assert faint == []


def test_a_phone_scrolls_only_downwards(look: Callable[..., Chrome], page: str) -> None:
    chrome = look(page, width=360, height=740)
    click(chrome, chrome.find_elements("css selector", ".texts .token")[1])
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 360
    assert chrome.execute_script(SMALL) == []


def test_everything_can_be_reached_by_keyboard(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = look(page)
    reached: set[str] = set()
    for _ in range(15):
        press(chrome, Keys.TAB)
        reached.add(chrome.execute_script(FOCUS))
    assert {"theme", "layer", "show", "only", "Policies, scrolls sideways"} <= reached
    assert sum(name.startswith("The text under") for name in reached) == 2


def test_the_map_is_drawn_in_the_colours_of_the_theme(look: Callable[..., Chrome], page: str) -> None:
    pixel = (
        "const canvas = document.querySelector('canvas');"
        "const copy = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(canvas, 0, 0);"
        "return [canvas.width, canvas.height, ...copy.getImageData(10, 0, 1, 1).data]"
    )
    assert look(page).execute_script(pixel) == [40, LAYERS, 255, 255, 255, 255]
    chrome = look(page, scheme="dark")
    assert chrome.execute_script(pixel)[2:] == [0x0F, 0x13, 0x18, 255]
    chrome.find_element("id", "theme").click()
    assert chrome.execute_script(pixel)[2:] == [255, 255, 255, 255]

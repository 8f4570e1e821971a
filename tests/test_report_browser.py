"""The report page as a person meets it: in Chromium, by mouse and by keyboard, by day and by night, on a phone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_helpers import FAINT, FOCUS, IN_BROWSER, SMALL, click, press
from fake_rows import POLICIES, fake_row, fake_rows

from kvlearn.report import Section, write_report

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

EVIL = "<img src=x onerror='window.harmed=1'></script><script>window.harmed=1</script>"

pytestmark = IN_BROWSER

RECALLED = [fake_row(task="recall", metric="accuracy", policy=EVIL, doc=str(d), value=d % 2) for d in range(9)]
FAILED = fake_row(policy="h2o", doc=EVIL, domain="news", task="lm", budget=128, error=EVIL)
ROWS = [*fake_rows(seeds=(0, 1)), FAILED, *(row | {"full_value": 1.0} for row in RECALLED)]
KEPT = {"tokens": 960, "seen": [480, 960], "lines": ["9" * 48 + "0" * 48, "9" * 8 + "0" * 64 + "9" * 24]}
for _row in ROWS:
    if _row["doc"] == "news-00" and _row["metric"] == "nll" and _row["policy"] in ("full", "ema", "streaming"):
        _row["kept"] = KEPT
LINES = 2 * 3 * len(POLICIES) + 1
# A column of the table, by its heading, as the visible lines hold it.
COLUMN = """
const headings = [...document.querySelectorAll("#results thead th")];
const at = headings.findIndex((heading) => heading.textContent.trim() === arguments[0]);
const lines = document.querySelectorAll("#results tbody tr:not([hidden])");
return [...lines].map((line) => line.cells[at].dataset.value);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    section = Section("Speed", "<p>As fast as <b>it</b> gets.</p>")
    commands = ["kvlearn compare tiny-llama --budgets 128,256,512 --docs 12 " + "--a-long-option value " * 10]
    folder = tmp_path_factory.mktemp("page")
    return write_report(ROWS, folder, commands=commands, versions={"kvlearn": "1"}, extra_sections=[section]).as_uri()


@pytest.fixture(scope="module")
def page_of_one_budget(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(fake_rows(budgets=(256,)), tmp_path_factory.mktemp("one"), commands=["kvlearn demo"]).as_uri()


def shown(chrome: Chrome, column: str) -> list[str]:
    """What the visible lines of the table hold in a column."""
    return chrome.execute_script(COLUMN, column)


def heading(chrome: Chrome, title: str) -> Any:
    return chrome.find_element("xpath", f"//table[@id='results']//th[normalize-space()='{title}']")


def test_the_table_sorts_by_mouse_and_by_keyboard(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = look(page)
    heading(chrome, "Loss [95%]").find_element("tag name", "button").click()
    losses = shown(chrome, "Loss [95%]")
    assert len(losses) == LINES
    assert heading(chrome, "Loss [95%]").get_attribute("aria-sort") == "ascending"
    assert losses == sorted(losses, key=float)
    press(chrome, Keys.ENTER)
    assert heading(chrome, "Loss [95%]").get_attribute("aria-sort") == "descending"
    assert shown(chrome, "Loss [95%]") == sorted(losses, key=float, reverse=True)
    press(chrome, Keys.TAB, Keys.SPACE)
    assert heading(chrome, "Loss [95%]").get_attribute("aria-sort") is None
    for order in ("ascending", "descending"):
        assert heading(chrome, "Gap closed [95%]").get_attribute("aria-sort") == order
        gaps = shown(chrome, "Gap closed [95%]")
        known = [gap for gap in gaps if gap]
        assert gaps == known + [""] * (len(gaps) - len(known)), "what is unknown comes last both ways"
        assert known == sorted(known, key=float, reverse=order == "descending")
        press(chrome, Keys.SPACE)
    heading(chrome, "Policy").find_element("tag name", "button").click()
    assert shown(chrome, "Policy")[0] == "ema"
    press(chrome, Keys.TAB)
    assert chrome.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_table_filters(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.support.select import Select

    chrome = look(page)
    assert len(shown(chrome, "Policy")) == LINES
    count = chrome.find_element("id", "count")
    search = chrome.find_element("id", "search")
    search.send_keys("H2O lm")
    assert sorted(set(shown(chrome, "Policy"))) == ["h2o", "h2o-exposure"]
    assert count.text == f"6 of {LINES} lines"
    Select(chrome.find_element("id", "by-budget")).select_by_visible_text("256")
    assert shown(chrome, "Budget") == ["256", "256"]
    search.clear()
    Select(chrome.find_element("id", "by-kind")).select_by_visible_text("learned")
    assert shown(chrome, "Policy") == ["smollm2-135m"] * 2
    Select(chrome.find_element("id", "by-task")).select_by_visible_text("passkey · accuracy")
    assert shown(chrome, "Task") == ["passkey, accuracy"]
    search.send_keys("no such policy")
    assert count.text == f"0 of {LINES} lines"


def number_of(chrome: Chrome, name: str) -> str:
    """The number by which the page knows a policy."""
    return chrome.find_element("xpath", f"//button[.='{name}']").get_attribute("data-policy") or ""


def tip(chrome: Chrome) -> str:
    """The text of the tooltip that is shown, if any."""
    return "\n".join(each.text for each in chrome.find_elements("css selector", ".tip") if each.is_displayed())


def test_charts_are_read_by_mouse_and_by_keyboard(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    chrome = look(page)
    chart = chrome.find_element("css selector", ".quality > svg")
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    marks = chart.find_elements("css selector", "g[data-policy='0'] .mark")
    assert len(marks) == 3
    ActionChains(chrome).move_to_element(marks[0]).perform()
    assert tip(chrome).splitlines()[:2] == ["smollm2-135m", "budget 128"]
    assert "gap closed" in tip(chrome)
    ActionChains(chrome).move_to_element(chrome.find_element("tag name", "h2")).perform()
    assert tip(chrome) == ""
    chrome.execute_script("arguments[0].focus()", chart)
    read = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT):
        press(chrome, key)
        read.append(tip(chrome).splitlines()[:2])
    assert read[:2] == [["smollm2-135m", "budget 128"], ["smollm2-135m", "budget 256"]]
    assert read[2] == ["ema", "budget 128"], "downwards is the next policy"
    assert read[3][0] == "smollm2-135m"
    press(chrome, Keys.ESCAPE)
    assert tip(chrome) == ""
    scatter = chrome.find_element("css selector", "#scatter > svg")
    chrome.execute_script("arguments[0].focus()", scatter)
    press(chrome, Keys.ARROW_RIGHT)
    assert "under this policy" in tip(chrome)
    press(chrome, Keys.TAB)
    assert tip(chrome) == ""


def drawn(chrome: Chrome) -> list[int]:
    """How many policies each chart draws."""
    return chrome.execute_script(
        "return [...document.querySelectorAll('.chart > svg')].map((svg) => svg.querySelectorAll('g.policy').length)"
    )


def test_the_legend_hides_and_shows_policies_everywhere(look: Callable[..., Chrome], page: str) -> None:
    chrome = look(page)
    policies = len(POLICIES)
    before = drawn(chrome)
    assert before == [policies, policies, 1, policies - 1], "lm, passkey, recall, and the documents of the first"
    first, second = chrome.find_elements("xpath", "//button[.='ema']")
    click(chrome, first)
    assert drawn(chrome) == [policies - 1, policies - 1, 1, policies - 2]
    assert first.get_attribute("aria-pressed") == second.get_attribute("aria-pressed") == "false"
    click(chrome, second)
    assert drawn(chrome) == before
    click(chrome, chrome.find_element("xpath", "//button[.='None']"))
    assert drawn(chrome) == [0, 0, 0, 0]
    assert "Nothing to draw" in chrome.find_element("css selector", ".quality > svg").text
    click(chrome, chrome.find_element("xpath", "//button[.='All']"))
    assert drawn(chrome) == before


def test_losses_can_be_drawn_on_a_logarithmic_scale(look: Callable[..., Chrome], page: str) -> None:
    chrome = look(page)
    chart = chrome.find_element("css selector", ".quality > svg")

    def spread() -> float:
        """Pixels between the oracle and the scorer at the largest budget, where they are close."""
        scorer, oracle = (
            chart.find_elements("css selector", f"g[data-policy='{number_of(chrome, name)}'] .mark")[2].rect["y"]
            for name in ("smollm2-135m", "oracle")
        )
        return float(oracle - scorer)

    linear = spread()
    button = chrome.find_element("id", "log")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert spread() > 2 * linear
    button.click()
    assert spread() == linear


def test_documents_follow_the_choices(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.support.select import Select

    chrome = look(page)
    Select(chrome.find_element("id", "scatter-panel")).select_by_visible_text("lm · negative log-likelihood")
    assert [each.text for each in Select(chrome.find_element("id", "scatter-budget")).options] == ["128", "256", "512"]
    marks = "return [...document.querySelectorAll('#scatter .mark')].map((each) => each.getAttribute('transform'))"
    at_128 = chrome.execute_script(marks)
    assert len(at_128) == 12 * (len(POLICIES) - 1), "every document under every policy but the full cache"
    Select(chrome.find_element("id", "scatter-budget")).select_by_visible_text("512")
    assert chrome.execute_script(marks) != at_128
    Select(chrome.find_element("id", "scatter-panel")).select_by_visible_text("passkey · accuracy")
    assert Select(chrome.find_element("id", "scatter-budget")).first_selected_option.text == "512", "the budget is kept"
    assert len(chrome.execute_script(marks)) < 12 * (len(POLICIES) - 1), "equal points are drawn as one"


def test_the_theme_follows_the_system_until_it_is_chosen(look: Callable[..., Chrome], page: str) -> None:
    def back(driver: Chrome) -> str:
        return driver.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = back(look(page))
    chrome = look(page, scheme="dark")
    dark = back(chrome)
    assert light == "rgb(255, 255, 255)"
    assert dark != light
    button = chrome.find_element("id", "theme")
    assert button.text == "Light"
    button.click()
    assert (back(chrome), button.text) == (light, "Dark")
    button.click()
    assert (back(chrome), button.text) == (dark, "Light")


# Which labels stick out of their charts.
OUTSIDE = """
return [...document.querySelectorAll(".chart > svg text")].filter((text) => {
  const [own, host] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
  return own.left < host.left - 1 || own.right > host.right + 1;
}).map((text) => text.textContent);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(look: Callable[..., Chrome], page: str, scheme: str) -> None:
    chrome = look(page, scheme=scheme)
    chrome.find_element("xpath", "//button[.='ema']").click()  # one that is switched off
    chrome.find_element("tag name", "summary").click()
    chrome.execute_script("document.querySelector('.quality > svg').focus()")
    press(chrome, "\ue014")  # the right arrow: a tooltip
    count, faint = chrome.execute_script(FAINT)
    assert count > 500
    assert faint == []


@pytest.mark.parametrize("which", ["page", "page_of_one_budget"])
def test_a_phone_scrolls_only_downwards(
    look: Callable[..., Chrome], which: str, request: pytest.FixtureRequest
) -> None:
    chrome = look(request.getfixturevalue(which), width=360, height=740)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 360
    table = chrome.find_element("css selector", ".wide")
    assert chrome.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", table), "the table does"
    chrome.execute_script("arguments[0].scrollLeft = 500", table)
    left = chrome.execute_script("return document.querySelector('#results tbody th').getBoundingClientRect().left")
    assert left < 30, "the policy's name stays in sight"
    assert chrome.execute_script(SMALL) == []
    assert chrome.execute_script(OUTSIDE) == []


def test_one_budget_is_drawn_side_by_side(look: Callable[..., Chrome], page_of_one_budget: str) -> None:
    chrome = look(page_of_one_budget)
    chart = chrome.find_element("css selector", ".quality > svg")
    assert len(chart.find_elements("css selector", ".name")) == len(POLICIES)
    assert "at 256 slots" in chart.text


def test_the_rows_can_be_downloaded(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    chrome = look(page)
    target = Path(chrome.downloads) / "rows.jsonl"  # type: ignore[attr-defined]  # set by the fixture
    button = chrome.find_element("id", "download")
    button.click()
    WebDriverWait(chrome, 20).until(lambda _: target.exists())
    assert [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()] == ROWS


def test_names_from_outside_do_no_harm(look: Callable[..., Chrome], page: str) -> None:
    chrome = look(page)
    chrome.find_element("css selector", "[aria-labelledby=table] summary").click()
    assert EVIL in chrome.find_element("css selector", "details table").text
    assert "script>" in shown(chrome, "Policy"), "what looks like a path is shown by its last part"
    assert EVIL in chrome.find_element("css selector", "[aria-labelledby=words]").text, "and told whole once"
    assert "script>" in [each.text for each in chrome.find_elements("css selector", ".legend button")]
    assert chrome.find_elements("tag name", "img") == []


def test_everything_can_be_reached_by_keyboard(look: Callable[..., Chrome], page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = look(page)
    press(chrome, Keys.TAB)
    assert chrome.switch_to.active_element.text == "Skip to the results"
    reached: set[str] = set()
    while "download" not in reached and len(reached) < 200:
        press(chrome, Keys.TAB)
        reached.add(chrome.execute_script(FOCUS))
    assert {"theme", "search", "by-task", "by-budget", "by-kind", "log", "scatter-panel", "scatter-budget"} <= reached
    assert {"Policy", "Loss [95%]", "Failed rows", "Results, scrolls sideways", "Commands"} <= reached
    assert {str(number) for number in range(len(POLICIES))} <= reached
    assert any("Loss against budget" in name for name in reached)


@pytest.fixture(scope="module")
def page_of_parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [row | {"doc": f"a/{'folder_of_' * 9}models/{row['doc']}.py"} for row in fake_rows(docs=4)]
    rows[1]["kept"] = KEPT
    rows += [row | {"metric": "nll/first-use"} for row in rows if row["metric"] == "nll"]
    rows = [row | ({"solved": 0.1} if row["task"] == "passkey" else {}) for row in rows]
    return write_report(rows, tmp_path_factory.mktemp("parts")).as_uri()


def test_parts_are_seen_when_they_are_opened(look: Callable[..., Chrome], page_of_parts: str) -> None:
    chrome = look(page_of_parts)
    part = chrome.find_element("css selector", "details .quality svg")
    assert not part.is_displayed()
    click(chrome, chrome.find_element("xpath", "//summary[starts-with(., 'Parts of it')]"))
    assert part.is_displayed()
    assert len(part.find_elements("css selector", ".mark")) > len(POLICIES)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_an_unsolved_task_says_so_at_every_place(
    look: Callable[..., Chrome], page_of_parts: str, scheme: str, width: int
) -> None:
    chrome = look(page_of_parts, width=width, scheme=scheme)
    assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    (tag,) = chrome.find_elements("css selector", "h3 .unsolved")
    assert tag.text == "not solved by the full cache"
    tags = "return [...document.querySelectorAll('#results tbody .tag')].map((each) => each.textContent)"
    assert sum("not solved" in text for text in chrome.execute_script(tags)) == 3 * len(POLICIES)
    assert chrome.execute_script(FAINT)[1] == []


@pytest.mark.parametrize("width", [360, 1200])
def test_what_was_kept_is_seen_and_told(look: Callable[..., Chrome], page: str, width: int) -> None:
    chrome = look(page, width=width)
    found = chrome.find_elements("css selector", "details[open] .picture")
    assert len(found) == 3, "full, ema and streaming"
    for picture in found:
        assert picture.size["width"] > 100
        assert "holds, of the four quarters of the text" in picture.get_attribute("aria-label")
        mask = "return getComputedStyle(arguments[0]).maskImage || getComputedStyle(arguments[0]).webkitMaskImage"
        assert chrome.execute_script(mask, picture).startswith('url("data:image/png')
    assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth")

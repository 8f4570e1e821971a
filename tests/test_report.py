import base64
import dataclasses
import gzip
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from fake_rows import POLICIES, fake_row, fake_rows
from rich.console import Console

from kvlearn.errors import KvlearnError
from kvlearn.report import Section, markdown_table, plot_png, render_table, write_report
from kvlearn.report.html import HERE
from kvlearn.report.kept import pictures
from kvlearn.report.plots import outliers, policy_styles
from kvlearn.report.solved import render_solved, solved_markdown, solved_sections
from kvlearn.report.tables import decimal, memory, p_value, panels, percent, short_names, speed, times, with_interval
from kvlearn.rows import Row
from kvlearn.stats import summary

EVIL = "</script><img src=x onerror=alert(1)>|`*[x](y)"
VOID = {"meta", "link", "input", "wbr", "br", "img"}


class Page(HTMLParser):
    """Checks that every element is closed where it was opened, and keeps what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())

    @property
    def data(self) -> dict[str, object]:
        (found,) = [json.loads(text) for text in self.texts["script"] if text.startswith("{")]
        assert isinstance(found, dict)
        return found


def read_page(path: Path) -> tuple[str, Page]:
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def terminal(rows: list[Row], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render_table(rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the console was given a StringIO
    assert isinstance(text, str)
    return text


# ---- tables


def test_the_terminal_table_fits_80_columns_and_cuts_no_number() -> None:
    text = terminal(fake_rows())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    lines = summary(fake_rows())
    for line in lines:
        assert with_interval(decimal, line.loss, line.lo, line.hi) in text
    assert len(re.findall(r" [\d.]+ MiB +\d+ *\n", text)) == len(lines), "every line ends in memory and tokens/s"
    assert "budget 128" in text
    assert text.count("*") == 2 * 3 + 1, "the best heuristic of every cell, and once what the mark means"


def test_the_terminal_table_shows_names_as_they_are() -> None:
    text = terminal([fake_row(policy="[red]loud", task="[bold]")], width=120)
    assert "[red]loud" in text
    assert "[bold] · negative" in text


def test_the_terminal_leaves_parts_to_the_page_and_paths_to_the_rows() -> None:
    policy = "deep/down/scorer (allocation=a/b.json)"
    rows = [fake_row(policy=policy, metric=metric) for metric in ("nll", "nll/first-use", "kl")]
    text = terminal(rows, width=160)
    assert text.count("1 documents") == 2, "nll and kl, without the part"
    assert "1 tables of parts are on the page" in text
    assert text.count("gap closed: from") == 1
    assert "\nscorer (allocation=a/b.json)" in text


def test_the_markdown_table_holds_every_policy_and_what_the_columns_mean() -> None:
    text = markdown_table(fake_rows())
    tables = [block for block in text.split("\n\n") if block.startswith("| budget")]
    assert len(tables) == 2
    for table in tables:
        lines = table.splitlines()
        assert len(lines) == 2 + 3 * len(POLICIES)
        assert {line.count("|") for line in lines} == {13}
    assert "**smollm2-135m**" in text
    assert text.endswith("\nsmollm2-135m: checkpoints/smollm2-135m\n"), "the folder is told once"
    assert "Full / memory: bytes of the full cache on the same documents" in text


def test_the_markdown_table_escapes_names() -> None:
    rows = [fake_row(policy="a|b", task="x\ny"), fake_row(policy="a|b", doc="z", error="<b>")]
    text = markdown_table(rows)
    assert r"| a\|b |" in text
    assert "### x y" in text
    assert r"a\|b: 1 failed row." in text


def test_slots_are_the_mean_over_layers_where_it_is_known() -> None:
    text = markdown_table([fake_row(slots=704), fake_row(policy="shared", slots=704, mean_slots=256)])
    assert re.findall(r"\| (h2o|shared) .*\| (704|256) \|", text) == [("h2o", "704"), ("shared", "256")]


def test_notes_name_the_budget_only_where_it_matters() -> None:
    rows = [fake_row(budget=budget, doc=str(doc)) for budget in (128, 256) for doc in range(8)]
    (panel,) = panels(summary([*rows, fake_row(budget=128, doc="8", error="out of memory")]))
    assert panel.notes == [
        "No oracle: how much of the gap is closed cannot be said.",
        "No bytes of the full cache: compression cannot be said.",
        "Budget 128: h2o: 1 failed row.",
    ]


def test_panels_are_told_apart_by_what_differs() -> None:
    rows = [fake_row(), fake_row(window=512), fake_row(task="passkey", metric="accuracy/hard")]
    assert [panel.title for panel in panels(summary(rows))] == [
        "lm · negative log-likelihood · window 512",
        "lm · negative log-likelihood · window 2048",
        "passkey · accuracy, hard · window 2048",
    ]
    found = panels(summary([*rows, fake_row(model="a/b")]))
    assert len({panel.slug for panel in found}) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", panel.slug) for panel in found)


def test_short_names_are_the_end_of_a_path_unless_two_would_be_one() -> None:
    assert short_names(["h2o", "runs/a", "runs/b/"]) == {"h2o": "h2o", "runs/a": "a", "runs/b/": "b"}
    assert short_names(["x/a", "y/a"]) == {"x/a": "x/a", "y/a": "y/a"}
    assert short_names(["/home/x/a", "/home/y/a (block=8)", "a"]) == {
        "/home/x/a": "x/a",
        "/home/y/a (block=8)": "a (block=8)",
        "a": "a",
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (decimal(-0.00004), "0.000"),
        (decimal(None), "-"),
        (percent(-0.004), "0%"),
        (percent(1.005), "100%"),
        (memory(512), "512 B"),
        (memory(3 * 1024**2), "3.0 MiB"),
        (memory(5e13), "46566.1 GiB"),
        (speed(1234.5), "1,234"),
        (speed(3.21), "3.2"),
        (times(15.06), "15.1x"),
        (p_value(0.0004), "<0.001"),
        (with_interval(percent, 0.33, 0.26, 0.39), "33% [26, 39]"),
        (with_interval(decimal, 0.0, 0.0, 0.0), "0.000"),
        (with_interval(decimal, 0.5, None, None), "0.500"),
    ],
)
def test_numbers_in_words(words: str, text: str) -> None:
    assert words == text


# ---- plots


def test_one_plot_for_every_task_and_metric(tmp_path: Path) -> None:
    paths = plot_png(fake_rows(), tmp_path / "plots")
    assert [path.name for path in paths] == ["lm-nll.png", "passkey-accuracy.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [path.name for path in paths]


@pytest.mark.parametrize(
    "rows",
    [
        fake_rows(budgets=(256,)),
        fake_rows(docs=1),
        [fake_row()],
        [fake_row(policy="full", kind="full", budget=None, value=2.2)],
    ],
    ids=["one budget", "one document", "one row", "full cache alone"],
)
def test_little_to_draw_is_drawn(tmp_path: Path, rows: list[Row]) -> None:
    assert plot_png(rows, tmp_path)


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plot_png([], tmp_path) == plot_png([fake_row(error="out of memory")], tmp_path) == []


def test_plots_cannot_be_written_where_there_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlearnError, match="cannot write"):
        plot_png([fake_row()], tmp_path / "file")


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def many_policies() -> list[Row]:
    kinds = {f"h{number}": "heuristic" for number in range(25)}
    kinds |= {f"l{number}": "learned" for number in range(4)} | {"oracle": "oracle", "random": "floor"}
    return [fake_row(policy=policy, kind=kind) for policy, kind in kinds.items()]


def test_every_colour_stands_out_from_its_background() -> None:
    css = (HERE / "page.css").read_text()
    template = (HERE / "base.html.j2").read_text()
    for policy, style in policy_styles(summary(many_policies())).items():
        for name in ("back", "raised"):
            day, night = (re.findall(rf"--{name}: (#\w+)", text)[0] for text in (css, template))
            assert contrast(style.light, day) >= 3, f"{policy} by day"
            assert contrast(style.dark, night) >= 3, f"{policy} by night"


def test_policies_look_different_and_the_same_every_time() -> None:
    lines = summary(many_policies())
    styles = policy_styles(lines)
    assert styles == policy_styles(lines[::-1])
    assert len({(style.light, style.marker, style.dash) for style in styles.values()}) == len(styles)


def test_only_what_is_far_worse_leaves_the_picture() -> None:
    lines = [line for line in summary(fake_rows()) if line.cell.task == "lm"]
    assert outliers(lines) == {"random", "protected-random"}
    assert outliers([line for line in lines if line.kind in ("full", "oracle")]) == set()
    as_learned = [dataclasses.replace(line, kind="learned") for line in lines]
    assert outliers(as_learned) == set(), "a scorer is always shown"


# ---- the page


def test_the_page_is_whole_and_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    path = write_report(fake_rows(), tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    html, page = read_page(path)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
    assert "default-src 'none'" in html
    assert list((tmp_path / "out").iterdir()) == [path]


def test_the_page_holds_every_line_of_the_table(tmp_path: Path) -> None:
    html, page = read_page(write_report(fake_rows(), tmp_path))
    lines = summary(fake_rows())
    assert html.count("<tr class=") == len(lines)
    for line in lines:
        assert with_interval(decimal, line.loss, line.lo, line.hi) in page.texts["td"]
    assert page.texts["h4"].count("lm · negative log-likelihood") == 1


def kept(last: str, first: str = "9900") -> dict[str, Any]:
    return {"tokens": 8, "seen": [4, 8], "lines": [first, last]}


def test_the_page_shows_what_was_kept(tmp_path: Path) -> None:
    rows = fake_rows(budgets=(128, 256), docs=3)
    pictured = {("ema", 128): "0099", ("streaming", 128): "9009", ("ema", 256): "4499", (EVIL, 256): "0900"}
    rows += [fake_row(policy=EVIL, budget=256, doc="news-00", domain="news")]
    for (policy, budget), last in pictured.items():
        row = next(row for row in rows if (row["policy"], row["budget"], row["doc"]) == (policy, budget, "news-00"))
        row["kept"] = kept(last)
    rows[0]["kept"] = kept("9999")
    assert (rows[0]["policy"], rows[0]["budget"]) == ("full", None)
    small, large = pictures(rows)
    assert (small.budget, large.budget) == (128, 256)
    assert (small.tokens, small.first, small.doc) == (8, 4, "news-00")
    assert [picture.policy for picture in small.pictures] == ["full", "ema", "streaming"]
    assert len(large.pictures) == 3
    told = "streaming after 8 tokens holds, of the four quarters of the text, 100%, 0%, 0% and 100%"
    assert small.pictures[2].about == told
    data = base64.b64decode(small.pictures[1].image.partition(",")[2])
    image = matplotlib.image.imread(io.BytesIO(data), format="png")
    np.testing.assert_allclose(image[..., -1], [[1, 1, 0, 0], [0, 0, 1, 1]])
    html, page = read_page(write_report(rows, tmp_path))
    assert html.count('class="picture"') == 6
    assert "What was kept" in page.texts["h2"]
    assert "<img" not in html
    assert "What was kept" not in read_page(write_report(fake_rows(docs=2), tmp_path / "without"))[1].texts["h2"]


def test_an_unsolved_task_is_marked_and_concludes_nothing(tmp_path: Path) -> None:
    rows = [row | ({"solved": 0.2} if row["task"] == "passkey" else {}) for row in fake_rows()]
    html, page = read_page(write_report(rows, tmp_path))
    assert html.count("not solved by the full cache</span>") == 1
    cards = [text for text in page.texts["h3"] if "slots" in text]
    assert cards
    assert all(text.startswith("lm") for text in cards), "no verdict from a task that the full cache fails"
    assert "### passkey · accuracy, which the full cache does not solve" in markdown_table(rows)
    assert "### lm · negative log-likelihood\n" in markdown_table(rows)


def test_parts_of_a_metric_are_put_away_below_it(tmp_path: Path) -> None:
    rows = fake_rows(tasks=(("lm", "nll"), ("lm", "kl")), docs=3)
    rows += [row | {"metric": "nll/first-use"} for row in rows if row["metric"] == "nll"]
    html, page = read_page(write_report(rows, tmp_path))
    assert "Parts of it: 1" in page.texts["summary"]
    assert html.index("Parts of it") > html.index("<h4>lm · KL divergence from the full cache</h4>")
    assert all("first-use" not in text for text in page.texts["h3"]), "parts give no verdicts"


def test_the_page_carries_its_rows(tmp_path: Path) -> None:
    rows = [*fake_rows(docs=3), fake_row(value=float("nan"), doc="x")]
    _, page = read_page(write_report(rows, tmp_path))
    packed = page.data["rows"]
    assert isinstance(packed, str)
    text = gzip.decompress(base64.b64decode(packed)).decode()
    assert [json.loads(line) for line in text.splitlines()] == [*rows[:-1], rows[-1] | {"value": None}]


def test_names_from_outside_are_only_text(tmp_path: Path) -> None:
    rows = [
        fake_row(policy=EVIL, doc=EVIL, domain=EVIL, task=EVIL, model=EVIL),
        fake_row(policy=EVIL, doc="2", domain=EVIL, task=EVIL, model=EVIL, error=EVIL, versions={EVIL: EVIL}),
    ]
    path = write_report(
        rows, tmp_path, commands=[EVIL], versions={"a": EVIL}, title=EVIL, extra_sections=[Section(EVIL, "x")]
    )
    html, page = read_page(path)
    assert "<img" not in html
    assert len(page.texts["script"]) == 2, "data and program, and no script ended early"
    assert EVIL in page.texts["code"]
    assert EVIL in page.texts["h1"]
    assert EVIL in page.texts["h2"]
    policies = page.data["policies"]
    assert isinstance(policies, list)
    assert policies[0]["name"] == EVIL


def test_commands_versions_and_further_sections_are_shown(tmp_path: Path) -> None:
    rows = [fake_row(versions={"torch": "2.12"}), fake_row(doc="b", versions={"torch": "2.13"})]
    sections = [Section("Speed", "<p id='mine'>fast</p>"), Section("Kept", "<svg></svg>")]
    commands = ["kvlearn compare x", "kvlearn report"]
    path = write_report(rows, tmp_path, commands=commands, versions={"kvlearn": "1"}, extra_sections=sections)
    html, page = read_page(path)
    assert page.texts["code"] == ["kvlearn compare x\nkvlearn report"]
    assert "2.12, 2.13" in page.texts["dd"]
    assert "<p id='mine'>fast</p>" in html
    assert [text for text in page.texts["h2"] if text in ("Speed", "Kept")] == ["Speed", "Kept"]
    assert {"Speed", "Kept"} <= set(page.texts["a"])


def test_failed_rows_are_listed_up_to_a_point(tmp_path: Path) -> None:
    rows = [fake_row(doc=str(number), error=f"fault {number}") for number in range(230)]
    html, page = read_page(write_report([fake_row(), *rows], tmp_path))
    assert "230 failed rows" in page.texts["summary"]
    assert "fault 199" in page.texts["td"]
    assert "fault 200" not in page.texts["td"]
    assert "The first 200 are shown" in html


def test_a_verdict_needs_an_interval_on_one_side_of_nothing(tmp_path: Path) -> None:
    _, page = read_page(write_report(fake_rows(tasks=(("lm", "nll"),), budgets=(256,)), tmp_path))
    assert any(re.fullmatch(r"\d+% less loss", text) for text in page.texts["p"])
    worse = {"h2o": ("heuristic", 0.2), "mine": ("learned", 0.4), "full": ("full", 0.0)}
    _, page = read_page(write_report(fake_rows(policies=worse, tasks=(("lm", "nll"),), budgets=(256,)), tmp_path))
    assert any(re.fullmatch(r"\d+% more loss", text) for text in page.texts["p"])
    equal = worse | {"mine": ("learned", 0.215)}
    _, page = read_page(write_report(fake_rows(policies=equal, tasks=(("lm", "nll"),), budgets=(256,)), tmp_path))
    assert "No clear difference" in page.texts["p"]
    for docs in (1, 5):
        _, page = read_page(write_report(fake_rows(docs=docs, budgets=(256,)), tmp_path))
        assert "Too few documents to say" in page.texts["p"]
        assert not any(re.fullmatch(r"\d+% (less|more) loss", text) for text in page.texts["p"])
        assert any("fewer than 6 documents an interval is rough" in text for text in page.texts["p"])
    assert not any("less loss" in text for text in page.texts["p"])


@pytest.mark.parametrize(
    "rows",
    [
        [fake_row()],
        [fake_row(error="out of memory")],
        [fake_row(policy="full", kind="full", budget=None, value=2.2)],
        [fake_row(budget=None), fake_row(budget=128)],
        [fake_row(window=None, slots=None, bytes=None, state_bytes=None, tokens=None, tokens_per_s=None)],
        [fake_row(value=None)],
    ],
    ids=["one row", "one failure", "full cache alone", "no budget", "no figures", "no value"],
)
def test_little_to_report_is_reported(tmp_path: Path, rows: list[Row]) -> None:
    html, _ = read_page(write_report(rows, tmp_path))
    assert not re.search(r"\b(None|nan|NaN)\b", html.split("<script")[0])


def test_no_rows_are_an_error_and_no_page(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match="no rows to report"):
        write_report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report([fake_row(task="first")], tmp_path)
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(KvlearnError, match=r"report\.html: No space left"):
        write_report([fake_row(task="second")], tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_reports_need_no_model_code_and_draw_only_when_asked() -> None:
    heavy = {"torch", "transformers", "pandas", "matplotlib", "jinja2", "rich"}
    program = f"import sys, kvlearn.report; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_what_the_full_cache_solves_is_told_by_variant(tmp_path: Path) -> None:
    right = {"easy": [1.0, 1.0], "half": [1.0, 0.5], "hard": [0.0, 0.25]}
    rows = [
        fake_row(task="passkey", metric=metric, policy=policy, domain=variant, doc=str(number), solved=share)
        for variant, shares in right.items()
        for number, share in enumerate(shares)
        for metric in ("exact_match", "answer_nll")
        for policy in ("full", "ema")
    ]
    lines = [line.split(" | ") for line in solved_markdown([fake_row(), *rows]).splitlines() if "| passkey" in line]
    assert [(line[1], line[3], line[4]) for line in lines] == [
        ("easy", "2", "100% |"),
        ("half", "2", "75% (partly) |"),
        ("hard", "2", "12% (not solved) |"),
    ]
    assert solved_markdown([fake_row()]) == ""
    assert solved_sections([fake_row()]) == []
    (section,) = solved_sections(rows)
    write_report(rows, tmp_path, extra_sections=[section])
    assert "What the full cache solves" in (tmp_path / "report.html").read_text()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_solved(rows))
    assert "75% (partly)" in console.export_text()

"""The page of a report: it has every number, escapes all text, and needs nothing from elsewhere."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import sample_reports
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from torch import nn

from ampatch import amp
from ampatch.diagnostics import json_files
from ampatch.diagnostics.report import numbers as report_numbers
from ampatch.diagnostics.report import page_drawings
from ampatch.diagnostics.report import tree as module_tree
from ampatch.diagnostics.report.exponents import Histogram, Range
from ampatch.diagnostics.report.page import page

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

VOID = {"meta", "input", "br", "img", "link"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|\binf\b|\bnan\b")
HOSTILE = "</script></style></title><img src=x onerror=alert(1)>\"'&<!--{{ 7 * 7 }}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Parsed(HTMLParser):
    """A page: its elements with their attributes, its text, and its tables as text and titles by heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    @property
    def numbers(self) -> set[float]:
        """The numbers that a person finds: in the text, and in what appears when something is pointed at."""
        return {float(found) for each in [*self.text, *self.values("title")] for found in NUMBER.findall(each)}


def rows_of(text: str, name: str) -> list[dict[str, tuple[str, str]]]:
    """The rows of a table of a page: the title and the text of each cell by its heading."""
    found = re.search(rf'<div class="table" id="{name}">.*?(<table>.*?</table>)', text, re.DOTALL)
    assert found is not None
    table = ElementTree.fromstring(found[1])
    heads = [head.text or "" for head in table.iter("th")]
    cells = [
        [(cell.get("title", ""), "\n".join(cell.itertext())) for cell in row.iter("td")] for row in table.iter("tr")
    ]
    return [dict(zip(heads, row, strict=True)) for row in cells if row]


def numbers_of(value: Any) -> Iterator[float]:
    """Yields all numbers of plain data."""
    if isinstance(value, dict):
        yield from itertools.chain(*map(numbers_of, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain(*map(numbers_of, value))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


#: Numbers that say where something is, and not how much there is of it.
_PLACES = {"version", "exponent", "step", "loss_id", "scale", "best_scale", "line", "number"}


def distinct(value: Any, key: str = "", numbers: Iterator[int] | None = None) -> Any:
    """Returns plain data in which no two amounts are equal, so that none can stand for another."""
    numbers = itertools.count(1) if numbers is None else numbers
    if isinstance(value, dict):
        return {name: distinct(each, name, numbers) for name, each in value.items()}
    if isinstance(value, list):
        return [distinct(each, key, numbers) for each in value]
    if key in _PLACES or isinstance(value, (bool, str)) or value is None:
        return value
    return value * (1 + next(numbers) * 1e-9) if isinstance(value, float) else 1_000_003 + 7 * next(numbers)


def hostile(value: Any, key: str = "") -> Any:
    """Returns plain data with markup in all of its text."""
    if isinstance(value, dict):
        return {
            each if key == "underflow" else f"{each}{HOSTILE}" if is_data(key) else each: hostile(inner, each)
            for each, inner in value.items()
        }
    if isinstance(value, list):
        return [hostile(each, "" if isinstance(each, dict) else key) for each in value]
    return value + HOSTILE if isinstance(value, str) and key not in ("half", "phase") else value


def is_data(key: str) -> bool:
    """Whether the keys of a dict of this name are the user's."""
    return key in ("operators", "activation_bytes", "weight_bytes", "in", "out", "functions", "settings")


class Offset(nn.Module):
    """Loses most of its input's digits in a half type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 300) - 300


@pytest.fixture(scope="module")
def comparison() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Offset(), nn.Linear(16, 1))
    return amp.compare(model, torch.randn(4, 8), lambda x: x.square().sum(), "O0", "O2")


class TestNumbers:
    def test_every_number_of_the_report_is_on_the_page(self) -> None:
        data = distinct(sample_reports.full())
        found = Parsed(page(data)).numbers
        for section, content in data.items():
            if section not in ("version", "about"):
                missing = [number for number in numbers_of(content) if number not in found]
                assert missing == [], section

    def test_every_number_of_a_comparison_above_the_noise_is_on_the_page(self, comparison: Any) -> None:
        data = comparison.to_dict()
        assert data["first"] is not None
        found = Parsed(page(sample_reports.empty(comparison=data))).numbers
        telling = [each for row, each in zip(comparison.rows, data["rows"], strict=True) if row.is_above_noise]
        assert telling
        for row in telling:
            del row["starts"], row["cancelled"], row["unmatched"]  # flags
        told = [telling, *(data[name] for name in ("loss", "gradient_error", "noise", "functions", "modules"))]
        assert [number for number in numbers_of(told) if number not in found] == []

    def test_numbers_that_are_not_finite_are_on_the_page(self) -> None:
        steps = [
            {"step": 1, "loss_id": 0, "scale": "inf", "overflow": True, "skipped": True, "gradient_norm": None},
            {"step": 2, "loss_id": None, "scale": 0.0, "overflow": False, "skipped": False, "gradient_norm": "nan"},
            {"step": 3, "loss_id": 1, "scale": 4.0, "overflow": True, "skipped": False, "gradient_norm": 0.0},
        ]
        parsed = Parsed(page(sample_reports.empty(steps=steps)))
        assert {math.inf, 4.0} <= parsed.numbers
        assert "overflow, not skipped" in parsed.words

    def test_the_numbers_of_a_row_stand_below_their_headings(self) -> None:
        data = distinct(sample_reports.full())
        row, cells = data["functions"][0], rows_of(page(data), "functions")[0]
        bytes_ = {"Written": row["cast_bytes"], "Cache saved": row["cache_hit_bytes"]}
        counts = {
            "Casts": row["casts"],
            "Cache hits": row["cache_hits"],
            "Calls": row["calls"],
            "Undone": row["undone"],
        }
        for head, number in counts.items():
            assert cells[head][0] == f"{number}"
        for head, number in bytes_.items():
            assert cells[head][0] == f"{number} bytes"
        assert cells["Time"][0] == f"{row['cast_seconds']} seconds"
        name, *types = cells["Function"][1].split("\n")
        assert name == "linear"
        assert "3 float32 \N{RIGHTWARDS ARROW} float16" in types

    def test_parameters_that_lose_most_come_first(self) -> None:
        rows = rows_of(page(sample_reports.full()), "parameters")
        lost = [float(row["Rounded to zero"][0]) + float(row["Subnormal"][0]) for row in rows]
        assert lost == sorted(lost, reverse=True)
        assert lost[0] > lost[-1]

    @pytest.mark.parametrize(
        ("spelled", "number", "text"),
        [
            (report_numbers.count, 1234567, "1 234 567"),
            (report_numbers.count, 10_000_000, "10.0 M"),
            (report_numbers.count, 0, "0"),
            (report_numbers.count, 0.5, "0.500"),
            (report_numbers.count, "inf", "inf"),
            (report_numbers.size, 1024, "1.00 KiB"),
            (report_numbers.size, 1023, "1023 bytes"),
            (report_numbers.size, 5 * 2**30, "5.00 GiB"),
            (report_numbers.size, -2048, "\N{MINUS SIGN}2.00 KiB"),
            (report_numbers.size, 0, "0"),
            (report_numbers.seconds, 0.00123, "1.23 ms"),
            (report_numbers.seconds, 59.25, "59.2 s"),
            (report_numbers.seconds, 90, "1.50 min"),
            (report_numbers.seconds, 3e-7, "300 ns"),
            (report_numbers.percent, 1e-9, "< 0.01 %"),
            (report_numbers.percent, 0.999999, "> 99.9 %"),
            (report_numbers.percent, 1, "100 %"),
            (report_numbers.percent, 0, "0 %"),
            (report_numbers.digits, 1.5e-7, "1.50 × 10⁻⁷".replace("×", report_numbers.TIMES)),  # noqa: RUF001
            (report_numbers.digits, None, report_numbers.DASH),
            (report_numbers.digits, "nan", "NaN"),
        ],
    )
    def test_numbers_have_their_units(self, spelled: Any, number: Any, text: str) -> None:
        assert spelled(number).replace("\u202f", " ") == text


class TestText:
    def test_all_text_is_escaped(self, comparison: Any) -> None:
        data = hostile(sample_reports.full())
        data["comparison"] = hostile(comparison.to_dict())
        parsed = Parsed(page(data))
        assert not parsed.of("img")
        assert len(parsed.of("script")) == len(parsed.of("style")) == 1
        assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
        assert parsed.words.count("{{ 7 * 7 }}") > 50

    def test_source_lines_and_notes_are_shown_as_they_are(self) -> None:
        data = sample_reports.full()
        words = Parsed(page(data)).words
        assert all(" ".join(source.split()) in words for source in sample_reports.SOURCES)
        assert all(note in words for note in data["notes"])

    def test_the_page_names_no_address_and_loads_nothing(self) -> None:
        data = sample_reports.full()
        text = page(data)
        parsed = Parsed(text)
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
        assert all(link.startswith("#") for link in parsed.values("href"))
        assert not {"src", "srcset", "action", "background"} & {key for _, has in parsed.elements for key in has}
        assert "url(" not in text
        assert "@import" not in text

    def test_a_browser_runs_the_script_of_the_page_only(self) -> None:
        text = page(sample_reports.full())
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = [has["content"] for has in Parsed(text).of("meta") if "http-equiv" in has]
        assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"

    def test_a_path_that_is_not_utf_8_can_be_written(self, tmp_path: Path) -> None:
        data = sample_reports.full()
        data["lines"][0]["file"] = os.fsdecode(b"/tmp/\xff.py")
        json_files.write_text(page(data), tmp_path / "r.html")
        assert "/tmp/\\udcff.py" in (tmp_path / "r.html").read_text(encoding="utf-8")

    def test_the_html_is_fit_for_screen_readers(self, comparison: Any) -> None:
        parsed = Parsed(page(sample_reports.full() | {"comparison": comparison.to_dict()}))
        names = [tag for tag, _ in parsed.elements]
        ids = parsed.values("id")
        assert len(ids) == len(set(ids))
        assert {target[1:] for target in parsed.values("href")} <= set(ids)
        assert {each for labels in parsed.values("aria-labelledby") for each in labels.split()} <= set(ids)
        assert names.count("table") == names.count("caption")
        drawings = [has for has in parsed.of("svg") if has.get("role") == "img"]
        assert len(drawings) == 4
        levels = [int(name[1]) for name in names if re.fullmatch(r"h[1-6]", name)]
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        assert parsed.of("html")[0]["lang"] == "en"


class TestSections:
    def test_an_empty_report_says_what_was_not_seen(self) -> None:
        words = Parsed(page(sample_reports.empty())).words
        for sentence in ("amp was not set up", "No step", "No module was seen", "No gradient was seen", "no device"):
            assert sentence in words

    @pytest.mark.parametrize(
        "name",
        ["settings", "underflow", "functions", "lines", "misaligned", "modules", "steps", "advice", "notes"],
    )
    def test_a_section_may_be_missing(self, name: str) -> None:
        nothing = None if name in ("settings", "underflow") else []
        Parsed(page(sample_reports.full() | {name: nothing}))

    def test_gradients_may_be_zero_only(self) -> None:
        zeros = {"elements": 5, "zeros": 5, "exponents": []}
        parameter = {"name": "w", "zero": 1.0, "rounded_to_zero": 0.0, "subnormal": 0.0, **zeros}
        underflow = {**sample_reports.full()["underflow"], "lost": 0.0, "parameters": [parameter], **zeros}
        Parsed(page(sample_reports.empty(underflow=underflow)))

    def test_advice_shows_the_source_line(self) -> None:
        data = sample_reports.full()
        words = Parsed(page(data | {"lines": []})).words
        assert "train.py:86" in words
        # The table of products has it, too.
        assert words.count(" ".join(sample_reports.SOURCES[1].split())) == 2

    @pytest.mark.parametrize(
        ("present", "told"),
        [
            (4096.0, "a scale of 8192 loses least."),
            (8192.0, "No other scale loses less and leaves room for sums of gradients."),
        ],
    )
    def test_the_best_scale_is_told(self, present: float, told: str) -> None:
        underflow = sample_reports.full()["underflow"] | {"best_scale": 8192.0, "scale": present}
        assert told in Parsed(page(sample_reports.empty(underflow=underflow))).words

    @pytest.mark.parametrize(("section", "name"), [("cost", "operators"), ("about", "began"), ("totals", "casts")])
    def test_a_missing_number_is_an_error(self, section: str, name: str) -> None:
        data = sample_reports.full()
        del data[section][name]
        with pytest.raises((KeyError, UndefinedError), match=name):
            page(data)

    def test_a_comparison_of_two_saved_reports_is_shown(self, tmp_path: Path) -> None:
        for name, steps in (("a.json", 3), ("b.json", 4)):
            (tmp_path / name).write_text(json.dumps(sample_reports.full(steps=steps)), encoding="utf-8")
        found = amp.compare(tmp_path / "a.json", tmp_path / "b.json").to_dict()
        words = Parsed(page(sample_reports.empty(comparison=found))).words
        assert "What differs most" in words
        assert found["worst"]["quantity"] in words


class TestLargeReports:
    def test_large_reports_have_small_pages_with_every_module_and_overflow(self) -> None:
        data = sample_reports.full(blocks=55, steps=10_000)
        assert len(data["modules"]) > 500
        text = page(data)
        assert len(text.encode()) < 2_000_000
        parsed = Parsed(text)
        overflows = [step["step"] for step in data["steps"] if step["overflow"]]
        assert len(overflows) > 10
        listed = [row["Step"][0] for row in rows_of(text, "steps") if row["Outcome"][1].startswith("overflow")]
        assert listed == [str(step) for step in overflows]
        assert len([has for has in parsed.of("circle") if has["class"] == "overflow"]) == len(overflows)
        assert len([each for each in parsed.values("id") if re.fullmatch(r"module-\d+", each)]) == len(data["modules"])
        assert {row["name"] or "the model" for row in data["modules"]} <= set(parsed.values("title"))
        assert "of 10 000 steps: those with an overflow or another scale, and the ends." in parsed.words

    def test_the_page_stays_small_if_each_step_overflows(self) -> None:
        data = sample_reports.full(steps=10_000)
        for step in data["steps"]:
            step["overflow"] = step["skipped"] = True
        text = page(data)
        assert len(text.encode()) < 2_000_000
        assert "The first 1 000 of the steps" in Parsed(text).words


class TestDrawings:
    @given(
        st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300),
        st.integers(1, 60),
    )
    def test_a_thinned_line_keeps_its_extremes(self, values: list[float | None], limit: int) -> None:
        line = list(enumerate(values))
        thin = page_drawings.thinned(line, limit)
        assert set(thin) <= set(line)
        assert thin == sorted(thin, key=lambda point: point[0])
        assert len(thin) <= max(limit, 2 * limit)
        there = [value for value in values if value is not None]
        left = [value for _, value in thin if value is not None]
        assert (min(left), max(left)) == (min(there), max(there)) if there else left == []

    @pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
    def test_zones_of_the_histogram_are_those_that_the_report_counts(self, half: torch.dtype) -> None:
        limits = Range.of(half)
        for exponent in range(-149, 128):
            lost = Histogram(0, {exponent: 1}).lost(1.0, limits)
            zone = limits.zone(exponent)
            assert lost == {name: float(name == zone) for name in ("zero", "subnormal", "overflow")}

    def test_a_constant_scale_is_told_and_not_drawn(self) -> None:
        data = sample_reports.full()
        for step in data["steps"]:
            step |= {"scale": 128.0, "overflow": False}
        parsed = Parsed(page(data))
        assert "The loss scale was 128 throughout; no step overflowed." in parsed.words
        assert "scale-title" not in parsed.values("id")

    def test_drawings_escape_their_text(self) -> None:
        text = page(sample_reports.full())
        assert "&lt;\u202f0.01" in text
        assert "<\u202f0.01" not in text

    def test_each_loss_has_a_line_in_the_drawing(self) -> None:
        data = sample_reports.full()
        for step in data["steps"]:
            step["loss_id"] = step["step"] % 2
        text = page(data)
        scale, _ = text.split('aria-labelledby="norm-title')
        assert scale.count('class="line ') == 2
        assert "loss_id 1 loss_id 0" in Parsed(text).words

    @pytest.mark.parametrize("scale", [2.0**-8, 3.0, 2.0**24])
    @pytest.mark.parametrize("half", ["float16", "bfloat16"])
    def test_zones_fill_the_histogram(self, scale: float, half: str) -> None:
        data = sample_reports.full()
        underflow = data["underflow"] = data["underflow"] | {"scale": scale, "half": half}
        drawn = Parsed(page(data))
        zones = [has for has in drawn.of("rect") if (has["class"] or "").startswith("zone")]
        ends = [(float(has["x"][:-1]), float(has["x"][:-1]) + float(has["width"][:-1])) for has in zones]
        assert ends[0][0] == 0
        assert ends[-1][1] == pytest.approx(100, abs=0.02)
        assert all(end == pytest.approx(start, abs=0.02) for (_, end), (start, _) in itertools.pairwise(ends))
        bars = [float(has["x"][:-1]) for has in drawn.of("rect") if (has["class"] or "").startswith("bar")]
        assert len(bars) == len(underflow["exponents"])
        assert all(0 <= bar < 100 for bar in bars)

    def test_modules_are_as_wide_as_their_activations_and_below_their_parents(self) -> None:
        data = sample_reports.full()
        roots = module_tree.tree(data["modules"])
        cells = {has["data-module"]: has for has in Parsed(page(data)).of("svg") if "data-module" in has}
        whole = sum(roots[0].activation_bytes.values())
        head = next(index for index, row in enumerate(data["modules"]) if row["name"] == "head")
        share = sum(data["modules"][head]["activation_bytes"].values()) / whole
        assert float(cells[str(head)]["width"][:-1]) == pytest.approx(100 * share, abs=0.01)
        before = sum(sum(each.activation_bytes.values()) for each in roots[0].children if each.row["name"] == "blocks")
        assert float(cells[str(head)]["x"][:-1]) == pytest.approx(100 * before / whole, abs=0.01)
        root = next(index for index, row in enumerate(data["modules"]) if row["name"] == "")
        assert [cells[str(index)]["y"] for index in (root, head)] == ["0", "30"]


class TestModules:
    def test_sums_of_a_module_are_over_its_submodules(self) -> None:
        rows = sample_reports.full()["modules"]
        (root,) = module_tree.tree(rows)
        assert root.saved_bytes == sum(row["saved_bytes"] for row in rows)
        assert root.operators == module_tree.total(row["operators"] for row in rows)
        assert sorted(module.number for module, _ in module_tree.walk([root])) == list(range(len(rows)))

    def test_numbered_modules_are_in_order_and_others_by_size(self) -> None:
        row = sample_reports.full()["modules"][-1]
        sizes = {"a.10": 9, "a.9": 1, "a": 0, "c": 3, "b": 30}
        rows = [
            row | {"name": name, "parent": "a" if "." in name else None, "activation_bytes": {"float16": size}}
            for name, size in sizes.items()
        ]
        ordered = [module.row["name"] for module, _ in module_tree.walk(module_tree.tree(rows))]
        assert ordered == ["b", "a", "a.9", "a.10", "c"]

    @pytest.mark.parametrize("parents", [(None, "a"), (None, None), ("gone", None)])
    def test_no_module_is_lost_whatever_the_parents(self, parents: tuple[str | None, str | None]) -> None:
        row = sample_reports.full()["modules"][-1]
        rows = [row | {"name": name, "parent": parent} for name, parent in zip("ab", parents, strict=True)]
        roots = module_tree.tree(rows)
        assert sorted(module.row["name"] for module, _ in module_tree.walk(roots)) == ["a", "b"]
        assert sum(root.saved_bytes for root in roots) == 2 * row["saved_bytes"]
        Parsed(page(sample_reports.empty(modules=rows)))

    def test_a_thousand_modules_may_be_nested(self) -> None:
        row = sample_reports.full()["modules"][-1]
        names = [".".join("m" * depth) for depth in range(1, 1001)]
        rows = [row | {"name": name, "parent": parent} for name, parent in zip(names, [None, *names], strict=False)]
        Parsed(page(sample_reports.empty(modules=rows)))


# In a browser


class Browser:
    """Headless Chromium with one page, driven by its debugging protocol over a pipe."""

    def __init__(self, profile: Path) -> None:
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", str(CHROMIUM), *options],
            pass_fds=[read, write],
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._left, self._number, self._session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            got = os.read(self._read, 2**16)
            assert got, "chromium has ended"
            self._left += got
        message, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(answer["params"])
        return answer

    def open(self, path: Path, width: int, scheme: str) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


_OVERHANG = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Texts whose colour has less contrast to what is behind them than WCAG's level AA asks for.
_FAINT = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found[3] !== 0) return found;
    }
  };
  const faint = new Set();
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !node.checkVisibility() || ["title", "desc"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(channels(node.closest("svg") ? style.fill : style.color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.add(`${node.tagName}.${node.className.baseVal ?? node.className} ${ratio.toFixed(2)}`);
  }
  return [...faint];
})()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, comparison: Any) -> Path:
    data = sample_reports.full(blocks=55, steps=3000) | {"comparison": comparison.to_dict()}
    data["lines"][0]["source"] = "x" * 400
    data["modules"][4]["class"] = "AVeryLongNameOfAClass" * 5
    data["advice"][0]["text"] = "w" * 300
    found = tmp_path_factory.mktemp("page") / "r.html"
    found.write_text(page(copy.deepcopy(data)), encoding="utf-8")
    return found


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; on Debian its package is chromium")
class TestBrowser:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 360])
    def test_the_page_fits_and_has_enough_contrast(self, browser: Browser, file: Path, width: int, scheme: str) -> None:
        browser.open(file, width, scheme)
        assert browser.value(_OVERHANG) == 0
        for each in ("details", "details.module"):
            browser.value(f"document.querySelectorAll('{each}').forEach((each) => each.open = true)")
        browser.value("document.querySelectorAll('.more input').forEach((each) => each.click())")
        assert browser.value(_OVERHANG) == 0
        assert browser.value(_FAINT) == []
        assert browser.complaints == []

    def test_a_table_unfolds_and_is_sorted(self, browser: Browser, file: Path) -> None:
        browser.open(file, 1280, "light")
        shown = "[...document.querySelectorAll('#parameters tbody tr')].filter((row) => row.checkVisibility()).length"
        assert browser.value(shown) == 10
        browser.value("document.querySelector('#parameters .more input').click()")
        assert browser.value(shown) == 55 * 8
        browser.value("document.querySelectorAll('#parameters th button')[4].click()")
        column = "[...document.querySelectorAll('#parameters tbody tr')].map((row) => Number(row.cells[4].title))"
        elements = browser.value(column)
        assert elements == sorted(elements, reverse=True)
        browser.value("document.querySelectorAll('#parameters th button')[4].click()")
        assert browser.value(column) == sorted(elements)

    def test_a_click_on_the_map_unfolds_the_module(self, browser: Browser, file: Path) -> None:
        browser.open(file, 1280, "light")
        hidden = "const [cell, module] = [...document.querySelectorAll('.cell')].map((cell) => [cell, document."
        hidden += "getElementById('module-' + cell.dataset.module)]).find(([_, module]) => !module.checkVisibility()); "
        clicks = "cell.dispatchEvent(new MouseEvent('click')); return module.checkVisibility();"
        assert browser.value(f"(() => {{ {hidden}{clicks} }})()") is True

    def test_all_can_be_unfolded_without_scripts(self, browser: Browser, file: Path) -> None:
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(file, 1280, "light")
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        assert not browser.value("document.documentElement.classList.contains('scripted')")
        assert browser.value("document.querySelectorAll('details:not([open]) > summary').length") > 50
        assert browser.value("document.querySelectorAll('.needs-script')[0].checkVisibility()") is False

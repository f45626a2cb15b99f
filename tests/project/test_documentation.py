"""Tests the documentation's site: text made from the code, and links out of docs/."""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import test_architecture
from pages import PAGES

from ampatch import amp
from ampatch.cast_lists.annotations import shipped_entries
from ampatch.cast_lists.coverage import reviewed_names
from ampatch.cli.main import main

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = sorted((DOCS / "guide").glob("*.md"))


@pytest.fixture
def docs(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports a module that makes text for the site."""
    monkeypatch.syspath_prepend(str(DOCS))
    return lambda name: importlib.import_module(f"ampatch_docs.{name}")


@pytest.fixture
def for_the_site(docs) -> Callable[[str], str]:
    return docs("markdown").for_the_site


@pytest.fixture
def page(for_the_site) -> Callable[[str], str]:
    """Returns a page as the site has it."""
    return lambda name: for_the_site((DOCS / name).read_text(encoding="utf-8"))


@pytest.fixture
def reference(docs) -> ModuleType:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    return docs("reference")


@pytest.fixture
def modules(docs) -> ModuleType:
    return docs("modules")


def test_links_to_examples_lead_to_their_sections(for_the_site):
    text = "See [one](../../examples/gan.py) of [them](../../examples), and [this](../images/report.png)."
    expected = "See [one](/examples.md#ganpy) of [them](/examples.md), and [this](../images/report.png)."
    assert for_the_site(text) == expected


def test_comments_for_the_test_of_the_code_are_left_out(for_the_site):
    comments = ['<!-- skip: next "why" -->\n', "<!-- invisible-code-block: python\nx = 1\n-->\n", "<!-- b -->\n"]
    text = "a\n\n{}```sh\nls\n```\n\n{}{}".format(*comments)
    assert for_the_site(text) == "a\n\n```sh\nls\n```\n\n<!-- b -->\n"


def test_comment_for_which_nothing_is_made_is_an_error(for_the_site):
    with pytest.raises(KeyError, match="nonsense"):
        for_the_site("<!-- generated: nonsense -->")


def test_every_example_has_a_section_with_its_code(page):
    text = page("examples.md")
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [script.name for script in scripts]
    assert [script.name for script in scripts if script.read_text(encoding="utf-8") not in text] == []


def test_every_page_of_the_guide_is_in_the_table_of_contents():
    # Sphinx warns of pages in none; but a pattern of the table would take in pages that belong elsewhere.
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^guide/(\w+)$", index, re.MULTILINE)) == {path.stem for path in GUIDE}


def all_of(path: Path) -> list[str]:
    """The names in ``__all__`` of a module, which is not imported: that could need a framework that is not here."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def public_names() -> set[str]:
    """Every public name, by the path that it is imported from."""
    modules = [ROOT / "ampatch" / "__init__.py", ROOT / "ampatch" / "amp.py"]
    modules += (ROOT / "ampatch" / "integrations").glob("*.py")
    dotted = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules
    }
    names = {f"{dotted[path]}.{name}" for path in modules for name in all_of(path)}
    return names - {"ampatch.amp"}  # has a page


def test_reference_has_every_public_name_once():
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    listed = re.findall(r"^\.\. auto\w+:: (\S+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(public_names())
    assert len(listed) > 60


@pytest.mark.parametrize(
    ("docstring", "shown"),
    [
        (
            "Returns:\n    The scale: a number.\n    Or None.\n\nMore.",
            ":returns: The scale: a number.\n    Or None.\n\nMore.",
        ),
        ("``|a|`` is |b|.", r"``|a|`` is \|b\|."),
        ("As `amp.report`, ``amp.no_name``.", "As :py:obj:`amp.report <ampatch.amp.report>`, ``amp.no_name``."),
        ("``amp.stats``", ":py:obj:`amp.stats <ampatch.amp.stats>`"),
    ],
)
def test_docstrings_become_restructured_text(reference, docstring, shown):
    assert "\n".join(reference.docstring_lines(docstring.split("\n"))) == shown


def test_signatures_show_no_private_names(reference):
    signature = "(models: ampatch.amp._Models, dtype: torch.dtype, x: ~collections.abc.Callable[[_F], int] = 2.5)"
    assert reference.readable_types(signature) == "(models: Models, dtype: torch.dtype, x: ~Callable[[F], int] = 2.5)"


def test_page_of_the_command_line_has_every_option(page, capsys):
    text = page("reference/command_line.md")
    found = re.findall(r"^#{2,3} (ampatch [\w ]+)\n\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    sections = dict(found)
    assert {"ampatch run", "ampatch lists check", "ampatch build"} < set(sections)
    for command, section in sections.items():
        with pytest.raises(SystemExit):
            main([*command.split()[1:], "--help"])
        options = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
        assert options <= set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)), command


def test_page_of_the_lists_has_every_entry_with_its_reason(page):
    text = page("reference/cast_lists.md").replace("\\", "")
    for entry in shipped_entries():
        group = text[text.index(f"\n\n{entry.reason}\n\n") :].partition("\n\n| ")[2].partition("\n\n")[0]
        assert re.search(rf"^\| `{re.escape(entry.path.name)}` \|.*`{entry.path.namespace}`", group, re.MULTILINE), (
            entry
        )
    for reason, path in reviewed_names():
        section = text.partition(f"\n### {reason.name}\n\n{reason.why}\n\n")[2].partition("\n### ")[0]
        assert f"`{path.name}`" in section, path


@pytest.mark.parametrize(
    "row",
    [
        "| `matmul` | `torch`, `torch.Tensor` |  | whitelist | whitelist | whitelist |",
        "| `tensordot` | `torch` |  | - | promote | - |",
        "| `cosine_similarity` | `torch`, `torch.nn.functional` |  | blacklist | blacklist | - |",  # one object
        "| `exp` | `torch`, `torch.Tensor` | float16 | blacklist | blacklist | - |",
        "| `softmax` | `torch.nn.functional` | `via_dtype` | blacklist | blacklist | - |",
        "| `qr` | `torch`, `torch.Tensor` | torch before 2.14; `needs_float32` | - | - | blacklist |",
        "| `binary_cross_entropy` | `torch.nn.functional` |  | banned | banned | blacklist |",
    ],
)
def test_page_of_the_lists_compares_other_libraries(page, row):
    assert f"\n{row}\n" in page("reference/cast_lists.md")


def test_pictures_are_drawn_from_their_text(docs):
    made = docs("drawings").pictures()
    assert len(made) == 6
    assert [
        path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text
    ] == []  # `make drawings`


def test_drawings_become_part_of_the_page(for_the_site):
    assert for_the_site("![A](../images/call.svg)").startswith("<div>\n<svg ")
    assert "\n\n" not in for_the_site("![A](../images/call.svg)")  # a blank line would end the HTML
    assert for_the_site("![A](images/growth.svg)") == "![A](images/growth.svg)"  # as matplotlib drew it


@pytest.mark.slow
def test_plan_has_every_module_with_a_sentence_in_the_order_of_imports(modules, page):
    text = page("design/README.md")
    rows = re.findall(r"^\| `(.+?)` \| (.+[.!?]) \|$", text.partition("## All modules")[2], re.MULTILINE)
    inside = [each for room in modules.rooms() for each in modules.inside(room)]
    assert len(rows) == len(inside)
    assert sorted([*inside, *modules.rooms()]) == sorted(modules.modules())
    assert "| `session.py` | The session: all that amp has installed between `amp.initialize`" in text
    assert list(modules.order()) == test_architecture.rooms()
    assert set(modules.modules()) == set(test_architecture.MODULES)
    for name in modules.modules():
        assert set(modules.imports(name)) == set(test_architecture.imports(name)), name


def test_drawing_has_no_import_that_runs_upwards(modules):
    svg = ElementTree.fromstring(modules.drawing())
    marks = [each for each in svg.iter("{http://www.w3.org/2000/svg}rect") if each.get("class") == "half"]
    # Column and row, counted from the first cell.
    cells = [((int(mark.get("x")) - 182) // 19, (int(mark.get("y")) - 132) // 19) for mark in marks]
    assert len(cells) > 100
    assert all(column > row for column, row in cells)


def test_every_design_note_is_listed_by_subject_once():
    listed = re.findall(
        r"\]\(([\w-]+)\.md\)", (DOCS / "design" / "README.md").read_text(encoding="utf-8").partition("## The notes")[2]
    )
    assert sorted(listed) == sorted(path.stem for path in (DOCS / "design").glob("*.md") if path.stem != "README")


def test_figures_beside_the_histogram_are_those_counted():
    page = (DOCS / "guide" / "choosing_a_level.md").read_text(encoding="utf-8")
    counted = json.loads((DOCS / "drawings" / "gradients.json").read_text(encoding="utf-8"))
    elements, scale = counted["elements"], round(math.log2(counted["scale"]))
    zero, few = (
        {power: sum(count for exponent, count in counted["exponents"] if low <= exponent + power < high) / elements
         for power in (0, scale)}
        for low, high in ((-1000, -25), (-25, -14))
    )  # fmt: skip
    assert f"sorts {elements / 1e6:.1f} million gradient elements" in page
    assert (
        f"{few[0]:.0%} of these elements would lose precision in float16, and {zero[0]:.1%} would be rounded to zero"
        in page
    )
    assert f"With a scale of {counted['scale']:,}" in page
    assert f"{few[scale]:.1%} lose precision, and none is rounded to zero" in page
    assert zero[scale] == 0


def test_figures_of_the_pages_are_those_of_the_benchmarks():
    page = (DOCS / "guide" / "choosing_a_level.md").read_text(encoding="utf-8")
    benchmarks = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("converted by hand, float16")[2]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+ \(.+?\)) \| ([\d.]+ \(.+?\)) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == ["transformer", "convnet", "MLP"]
    for name, o1, o2 in rows:
        (row,) = re.findall(
            rf"^\| {name}: whole step, fused AdamW \| (.*)$", benchmarks.partition("\n### ")[0], re.MULTILINE
        )
        cells = row.split(" | ")
        assert (cells[2], cells[6]) == (o1, o2)


def parts_of(text: str, *, nested: bool) -> list[tuple[str, str]]:
    """Returns each heading of a page as a link writes it, with the text below it, without code.

    Args:
        text: the page.
        nested: whether a heading's text includes the headings below it.
    """
    text = re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = list(re.finditer(r"^(#+) (.+)$", text, re.MULTILINE))
    parts = []
    for number, heading in enumerate(headings):
        after = (each for each in headings[number + 1 :] if not nested or len(each[1]) <= len(heading[1]))
        end = next((each.start() for each in after), len(text))
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        parts.append((anchor, text[heading.end() : end]))
    return parts


#: A time, or how many times as long something takes: figures that only a measurement gives.
MEASURED = re.compile(r"\d[\d.,]*(?= (?:to \d[\d.,]* )?(?:ns|µs|ms)\b)|\d+\.\d+(?= times\b)")
#: Figures that may be measured, or be an option's value. They count where a link names the benchmark.
QUOTED = re.compile(rf"{MEASURED.pattern}|\d[\d.,]*(?=%| bytes per parameter\b)")
LINK = re.compile(r"\]\([^)]*benchmarks\.md#([\w-]+)\)")


def figures_without_a_source(page: str, benchmarks: str) -> list[str]:
    """Measured figures of a page that are in no section of the benchmarks to which their own section links."""
    sources = parts_of(benchmarks, nested=True)
    found = []
    for heading, text in parts_of(page, nested=False):
        linked = [body for anchor in LINK.findall(text) for name, body in sources if name == anchor]
        plain = re.sub(r"`[^`\n]*`", "", text)
        known = set(re.findall(r"\d(?:[\d.,]*\d)?", " ".join(linked)))
        found += [
            f"{heading}: {figure}" for figure in (QUOTED if linked else MEASURED).findall(plain) if figure not in known
        ]
    return found


@pytest.mark.parametrize("page", ["../README.md", "index.md", *(f"guide/{each.name}" for each in GUIDE)])
def test_measured_figures_are_in_a_benchmark_that_the_section_links(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert figures_without_a_source(text, (DOCS / "benchmarks.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 12 to 25 µs and 1.71 times as long, see [it](../benchmarks.md#the-cost)", []),
        ("takes 12 µs ([it](../benchmarks.md#b))", []),
        ("takes 12 µs, at a tolerance of 5%", ["a: 12"]),
        ("takes 13 µs ([it](../benchmarks.md#the-cost))", ["a: 13"]),
        ("saves 31% ([it](../benchmarks.md#the-cost))", ["a: 31"]),
        ("takes 12 µs ([it](../benchmarks.md#another))", ["a: 12"]),
        ("\n```text\n12 µs\n```\n", []),
    ],
)
def test_figures_without_a_source_are_found(text, expected):
    benchmarks = "# B\n\n## The cost\n\n| 12 to 25 µs | 1.71 | 30% |\n\n## Another\n\n3 ms\n"
    assert figures_without_a_source(f"# A\n\n{text}\n", benchmarks) == expected


def code_blocks() -> list[tuple[str, str]]:
    """Every Python block of the pages for users, with the page and its number as a name."""
    return [
        (f"{page.relative_to(ROOT)}, block {number}", textwrap.dedent(code))
        for page in PAGES
        for number, code in enumerate(
            re.findall(r"^ *```python\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL), 1
        )
    ]


def test_code_of_all_pages_is_python_and_names_what_amp_has():
    # tests/integration/test_pages.py runs them; this is for those that it must leave out.
    blocks = code_blocks()
    assert len(blocks) > 40
    faults = []
    for name, code in blocks:
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            faults.append(f"{name}: {error}")
            continue
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        faults += [
            f"{name}: {each}"
            for each in sorted(used)
            if re.fullmatch(r"amp\.\w+", each) and each.removeprefix("amp.") not in amp.__all__
        ]
    assert faults == []

"""The documentation's site: text made from the code, and links that leave docs/. `make docs` checks other links."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def markdown(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("ampatch_docs.markdown")


def test_links_to_examples_lead_to_their_sections(markdown):
    text = "See [one](../../examples/gan.py) of [them](../../examples), and [this](../images/report.png)."
    expected = "See [one](/examples.md#ganpy) of [them](/examples.md), and [this](../images/report.png)."
    assert markdown.for_the_site(text) == expected


def test_every_example_has_a_section_with_its_code(markdown):
    text = markdown.for_the_site((DOCS / "examples.md").read_text(encoding="utf-8"))
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [script.name for script in scripts]
    assert [script.name for script in scripts if script.read_text(encoding="utf-8") not in text] == []


def test_a_comment_for_which_nothing_is_made_is_an_error(markdown):
    with pytest.raises(KeyError, match="nonsense"):
        markdown.for_the_site("<!-- generated: nonsense -->")


def test_every_page_is_in_the_table_of_contents():
    # Sphinx warns of pages in none; but a pattern of the table would take in pages that belong elsewhere.
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    guide = {path.stem for path in (DOCS / "guide").glob("*.md")}
    assert set(re.findall(r"^guide/(\w+)$", index, re.MULTILINE)) == guide

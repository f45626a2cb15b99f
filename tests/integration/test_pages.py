"""The code on the pages of the documentation runs, and prints what they say."""

from __future__ import annotations

from pathlib import Path

import apart
import pages
import pytest
import torch
from pages import PAGES, PageRun, skips_without_reason, unlabelled_blocks

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

#: What the code of a page imports, and a machine may lack.
NEEDS = {
    "accelerate": "accelerate",
    "ignite": "ignite",
    "lightning": "lightning",
    "peft": "peft",
    "skorch": "skorch",
    "transformers": "transformers",
}


def prepared(page: Path) -> Path:
    """The page; skips the test if a package that the page is about is missing."""
    if page.stem == "timm":
        apart.import_timm()
    elif page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem], reason=f"the page's code needs {NEEDS[page.stem]}")
        if page.stem == "lightning":  # replaces torch.compile when it is imported
            torch.compile = getattr(torch.compile, "__wrapped__", torch.compile)
    return page


IDS = [str(page.relative_to(pages.ROOT)) for page in PAGES]

#: Pages whose code imports a framework, compiles, or measures whole steps.
SLOW = {*NEEDS, "timm", "compile", "preflight"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.stem in SLOW else []) for page in PAGES],
    ids=IDS,
)
def test_the_code_of_the_page_does_what_the_page_says(page, tmp_path):
    PageRun(prepared(page), tmp_path, commands=False).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(pages.ROOT)))
        for page in PAGES
        if "```sh" in page.read_text(encoding="utf-8")
    ],
)
def test_the_commands_of_the_page_do_what_the_page_says(page, tmp_path):
    PageRun(prepared(page), tmp_path, commands=True).run()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_has_a_language_and_each_that_does_not_run_a_reason(page):
    assert unlabelled_blocks(page) == []
    assert skips_without_reason(page) == []


class TestPageRun:
    """The blocks of a page that tests write."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pages, "ROOT", tmp_path)

        def run(*blocks: str, commands: bool = False) -> list[str]:
            page = tmp_path / "page.md"
            page.write_text("\n\n".join(blocks), encoding="utf-8")
            return PageRun(page, tmp_path, commands=commands).run()

        return run

    def test_a_block_sees_the_names_of_the_preamble_and_of_the_blocks_above(self, run):
        run("```python\nsmall = model(input)\n```", "```python\nassert small.shape == (32, 4)\n```")

    def test_output_is_compared_but_for_numbers_and_lines_that_are_left_out(self, run):
        code = "```python\nprint('scale 65,536.0')\nprint('x')\nprint('y')\nprint('end')\n```"
        run(code, "```text\nscale 1\n...\nend\n```")
        for wrong in ("scale 1\nend", "scales 1\n...\nend", "scale 1\n...\nends", "scale 1"):
            with pytest.raises(AssertionError, match=r"page\.md:8: the output differs"):
                run(code, f"```text\n{wrong}\n```")

    def test_a_digit_of_a_name_is_no_number(self, run):
        with pytest.raises(AssertionError, match="differs"):
            run("```python\nprint(torch.float16)\n```", "```text\ntorch.float32\n```")

    def test_numbers_of_the_first_page_are_compared(self, run, monkeypatch, tmp_path):
        code = "```python\nprint('loss 0.51, scale 65,536')\n```"
        run(code, "```text\nloss 2.0, scale 3\n```")
        monkeypatch.setattr(pages, "FIRST_PAGE", tmp_path / "page.md")
        run(code, "```text\nloss 0.49, scale 65,536\n```")
        for wrong in ("loss 0.57, scale 65,536", "loss 0.51, scale 32,768"):
            with pytest.raises(AssertionError, match="a number differs by"):
                run(code, f"```text\n{wrong}\n```")

    def test_the_first_page_has_no_preamble(self, run, monkeypatch, tmp_path):
        monkeypatch.setattr(pages, "FIRST_PAGE", tmp_path / "page.md")
        with pytest.raises(AssertionError, match="NameError"):
            run("```python\nmodel\n```")

    def test_signs_and_units_and_lines_of_tables_go_with_the_numbers(self, run):
        run("```python\nprint('time')\nprint(5 * '─')\nprint('1.2 ms')\n```", "```text\ntime\n──────\n345.6 us\n```")
        run("```python\nprint('worse by -0.1')\n```", "```text\nworse by 0.2\n```")
        run("```python\nprint('2 KiB left')\n```", "```text\n900 bytes left\n```")
        with pytest.raises(AssertionError, match="differs"):
            run("```python\nprint('2 steps')\n```", "```text\n2 scales\n```")

    def test_an_error_that_the_page_does_not_show_fails(self, run):
        with pytest.raises(AssertionError, match=r"line 2(.|\n)*ZeroDivisionError"):
            run("```python\n1 / 0\n```", "```python\nnever\n```")

    def test_an_error_that_the_page_shows_is_compared(self, run):
        code = "```python\nerror = ValueError('a')\nerror.add_note('ampatch: b')\nraise error\n```"
        run(code, "```text\nValueError: a\nampatch: b\n```", "```python\nerror\n```")
        with pytest.raises(AssertionError, match="differs"):
            run(code, "```text\nValueError: a\n```")

    def test_blocks_that_begin_with_a_name_are_files(self, run, tmp_path):
        run("```yaml\n# casts.yaml\na: 1\n```", "```python\nassert open('casts.yaml').read().endswith('a: 1\\n')\n```")
        run(
            "```python\n# train.py\nimport sys\nprint('hello')\n```",
            "```sh\npython train.py\n```",
            "```text\nhello\n```",
            commands=True,
        )
        assert (tmp_path / "train.py").read_text() == "# train.py\nimport sys\nprint('hello')\n"

    def test_both_outputs_of_a_command_are_in_the_order_of_a_terminal(self, run, monkeypatch):
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        code = "import sys; print('a'); print('b', file=sys.stderr); print('c')"
        run(f'```sh\npython -c "{code}"\n```', "```text\na\nb\nc\n```", commands=True)

    def test_a_command_ends_with_the_status_that_the_page_says(self, run):
        run("```sh\nfalse  # fails: exit status 1\ntrue\n```", commands=True)
        for wrong in ("false", "true  # fails: exit status 1"):
            with pytest.raises(AssertionError, match="exits with"):
                run(f"```sh\n{wrong}\n```", commands=True)

    def test_skipped_blocks_return_their_reasons(self, run):
        skipped = '<!-- skip: next "needs two GPUs" -->\n\n```python\n1 / 0\n```'
        assert run(skipped, "```python\nmodel\n```") == ["needs two GPUs"]

    def test_a_page_may_begin_anew_and_hide_code(self, run):
        set_up = "```python\nmodel, optimizer = amp.initialize(model, optimizer)\nx = 1\n```"
        run(set_up, "<!-- clear-namespace -->", set_up)
        with pytest.raises(AssertionError, match="NameError"):
            run(set_up, "<!-- clear-namespace -->", "```python\nx\n```")
        run("<!-- invisible-code-block: python\nx = 1\n-->", "```python\nassert x == 1\n```")

    def test_skips_without_a_reason_are_reported(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text('<!-- skip: next -->\n<!-- skip: next "needs two GPUs" -->\n<!-- skip: end -->\n')
        assert skips_without_reason(page) == ["<!-- skip: next -->"]

    def test_blocks_without_a_language_are_found(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("```sh\nls\n```\n\n```\nx\n```\n")
        assert unlabelled_blocks(page) == [5]

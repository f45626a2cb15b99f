"""Runs the code of a page of the documentation, block after block, as a reader would type it.

docs/design/documentation.md has the rules for authors; sybil finds the blocks. Must only read pages: what their code
writes goes to the folder that the caller names.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from unittest import SkipTest, mock

from sybil import Document, Example
from sybil.parsers.markdown import ClearNamespaceParser, CodeBlockParser, SkipParser

from ampatch import amp

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

#: What the code of every page finds, so that a piece of a loop needs no set-up that the reader has already.
PREAMBLE = """
import torch
from torch import nn
from torch.nn import functional as F
from ampatch import amp

torch.manual_seed(0)
model = nn.Sequential()
model.add_module("encoder", nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU()))
model.add_module("head", nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = nn.functional.cross_entropy
loader = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(4)]
input, target = loader[0]
"""

#: The page that readers follow from its first line on: its code runs without the preamble, and prints these numbers.
FIRST_PAGE = ROOT / "docs" / "index.md"

_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")
_STATUS = re.compile(r"#.* exit status (\d+)")
_NUMBER = re.compile(  # dates; and numbers, with sign and unit, that are no part of a name
    r"\d{4}-\d\d-\d\dT[\d:+]+|(?:(?<=\s)-)?(?<![A-Za-z_\d])\d[\d.,]*(?:e[+-]?\d+)?(?: (?:[num]?s|bytes|[KMG]iB)\b)?"
)


def _shown(text: str) -> list[str]:
    """The lines of an output without what differs between machines: numbers, and spaces and lines that fit them."""
    return [re.sub(r"[ \t]+|─+", " ", _NUMBER.sub("#", line)).strip() for line in text.strip().splitlines()]


def _numbers(text: str) -> list[float]:
    return [float(each[0].replace(",", "").rstrip(".")) for each in map(str.split, _NUMBER.findall(text))]


def _matches(found: list[str], page: list[str]) -> bool:
    """True if the page's lines are those found; a line ``...`` of the page stands for any number of lines."""
    pattern = "\n".join(".*" if line == "..." else re.escape(line) for line in page)
    return re.fullmatch(pattern.replace("\n.*\n", "\n(?:.*\n)??"), "\n".join(found), re.DOTALL) is not None


class _BeginAnewParser(ClearNamespaceParser):
    """Replaces the namespace, where sybil clears it.

    torch.compile puts names into the globals of the code that it compiles, and deletes them with what it has made. It
    raises if they are gone by then, with amp or without (torch 2.13).
    """

    @staticmethod
    def evaluate(example: Example) -> None:
        example.document.namespace = {}


class PageRun:
    """One run of a page: the namespace of its Python code, and what the last block printed or raised.

    Args:
        page: the Markdown file.
        folder: where the code runs: the current folder.
        commands: whether blocks for the shell run, too.
    """

    def __init__(self, page: Path, folder: Path, *, commands: bool) -> None:
        self._folder = folder
        self._commands = commands
        self._page = page
        self._output: str | None = None
        self._raised: str | None = None
        self._document = Document.parse(
            str(page),
            CodeBlockParser("python", self._python),
            CodeBlockParser("yaml", self._file),
            CodeBlockParser("sh", self._shell),
            CodeBlockParser("text", self._compare),
            _BeginAnewParser(),
            SkipParser(),
        )
        self._scripts = " ".join(
            example.parsed for example in self._document if example.region.evaluator == self._shell
        )

    def run(self) -> list[str]:
        """Runs the blocks, and returns the reasons for which the page leaves some out.

        Raises:
            AssertionError: if a block does not do what the page says. It names the page and the line.
        """
        left_out = []
        self._begin_anew()
        terminal = mock.patch.dict(os.environ, COLUMNS="120")
        with contextlib.chdir(self._folder), warnings.catch_warnings(), terminal:
            warnings.simplefilter("always")
            try:
                for example in self._document:
                    if self._raised is not None and example.region.evaluator != self._compare:
                        break
                    try:
                        example.evaluate()
                    except SkipTest as skipped:
                        left_out.append(str(skipped))
                    except AssertionError as error:
                        raise AssertionError(f"{self._page.relative_to(ROOT)}:{example.line}: {error}") from error
                    if not self._document.namespace:
                        self._begin_anew()
            finally:
                amp.deinitialize()
        assert self._raised is None, f"{self._page.relative_to(ROOT)}: {self._raised}"
        return left_out

    def _begin_anew(self) -> None:
        amp.deinitialize()
        if self._page != FIRST_PAGE:
            exec(PREAMBLE, self._document.namespace)

    def _python(self, example: Example) -> None:
        self._file(example)
        name = _FILE.match(example.parsed)
        if name is not None and name[1] in self._scripts:
            return  # a command of the page runs it
        code = "\n" * (example.line + example.parsed.line_offset) + example.parsed
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                exec(compile(code, example.path, "exec", dont_inherit=True), example.namespace)
            except Exception as error:  # noqa: BLE001  # the page may show it; if not, `run` raises
                self._raised = "".join(traceback.format_exception(error))
                printed.write("".join(traceback.format_exception_only(error)))
        self._output = printed.getvalue()

    def _file(self, example: Example) -> None:
        name = _FILE.match(example.parsed)
        if name is not None:
            path = self._folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.parsed, encoding="utf-8")

    def _shell(self, example: Example) -> None:
        self._output = None
        if not self._commands:
            return
        output = []
        for command in re.sub(r"\\\n", " ", example.parsed).splitlines():
            expected = _STATUS.search(command)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self._folder,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "COLUMNS": "140",
                    "PYTHONUNBUFFERED": "1",  # the order of both outputs, as in a terminal
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            output.append(done.stdout)
            status = int(expected[1]) if expected else 0
            assert done.returncode == status, f"`{command}` exits with {done.returncode}:\n{done.stdout}"
        self._output = "".join(output)

    def _compare(self, example: Example) -> None:
        output, self._output, self._raised = self._output, None, None
        if output is None:
            return  # of a command that did not run
        found, page = _shown(output), _shown(example.parsed)
        difference = "\n".join(difflib.unified_diff(page, found, "the page", "found", lineterm=""))
        assert _matches(found, page), f"the output differs\n{difference}"
        if self._page == FIRST_PAGE:
            pairs = zip(_numbers(output), _numbers(example.parsed), strict=True)
            greatest = max((abs(one - other) for one, other in pairs), default=0.0)
            assert greatest < 0.05, f"a number differs by {greatest:.2g}"  # other processors round differently


def skips_without_reason(page: Path) -> list[str]:
    """Comments that leave a block out and do not say why."""
    comments = re.findall(r"^.*<!-+ *skip.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    explained = re.compile(r'skip: (?:next|start) ".{10,}" -->|skip: end -->')
    return [comment for comment in comments if not explained.search(comment)]


def unlabelled_blocks(page: Path) -> list[int]:
    """Lines of blocks that have no language, of which nothing could be checked."""
    text = page.read_text(encoding="utf-8")
    fences = [(match.start(), match[1]) for match in re.finditer(r"^ *```(\S*)", text, re.MULTILINE)]
    return [text.count("\n", 0, start) + 1 for start, language in fences[::2] if not language]

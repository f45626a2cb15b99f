"""Tests the page of errors: it has every message of the code, and no other."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ampatch import errors as package_errors

pytestmark = [pytest.mark.once, pytest.mark.slow]  # it reads all of the package, and the libraries have no part in it

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("ampatch_docs.errors")
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture
def sources_of(errors, tmp_path):
    """Returns a function that reads the messages of a package with one module, and with the classes of errors."""

    def read(code: str):
        package = tmp_path / "ampatch"
        package.mkdir()
        (package / "errors.py").write_text(Path(package_errors.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        (package / "module.py").write_text(code, encoding="utf-8")
        module = importlib.import_module("ampatch_docs.messages")
        before, module.PACKAGE = module.PACKAGE, package
        try:
            return module.Sources(package).messages()
        finally:
            module.PACKAGE = before

    return read


def entries(errors):
    return [entry for section in errors.sections_of_file() for entry in section.entries]


def test_every_message_is_in_one_entry_or_one_table(errors):
    lost = {}
    for message in errors.messages():
        places = [entry.title for entry in entries(errors) if entry.matches(message)]
        if not places:
            places = [section.title for section in errors.sections_of_file() if section.holds(message)]
        if len(places) != 1:
            lost[f"{message.file}: {message.plain}"] = places
    assert lost == {}, "give each of these one entry in docs/ampatch_docs/errors.yaml"


def test_every_piece_in_an_entry_is_in_a_message(errors):
    texts = [message.plain for message in errors.messages()]
    unused = [piece for entry in entries(errors) for piece in entry.has if not any(piece in text for text in texts)]
    assert unused == []


def test_messages_that_only_pass_on_others_are_listed(errors):
    places = {(each.file, each.place) for each in errors.found() if not each.has_words}
    assert places == errors.PASSED_ON


def test_texts_added_by_the_file_are_in_the_code(errors):
    for section in errors.sections_of_file():
        for message in section.also:
            tree = ast.parse((ROOT / "ampatch" / message.file).read_text(encoding="utf-8"))
            constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            code = " ".join(" ".join(each for each in constants if isinstance(each, str)).split())
            pieces = [piece.strip() for piece in re.split(r"\x02[^\x03]*\x03", message.text)]
            assert [piece for piece in pieces if len(piece) > 3 and piece not in code] == [], message


def test_files_that_the_page_names_exist(errors):
    named = {message.file for section in errors.sections_of_file() for message in section.also}
    named |= {file for file, _ in errors.PASSED_ON}
    assert [each for each in sorted(named) if not (ROOT / "ampatch" / each).is_file()] == []


def test_every_call_that_makes_an_error_gives_a_message(errors):
    # Counted by another way than the module has: text in the sources.
    made = Counter()
    for path in (ROOT / "ampatch").rglob("*.py"):
        if path.name != "errors.py":
            made.update(re.findall(r"raise (OptionError|UsageError|KernelError)\(", path.read_text(encoding="utf-8")))
    found = Counter(message.kind for message in errors.found())
    assert sum(made.values()) > 350
    assert {
        kind for kind in made if found[kind] < made[kind] - 3
    } == set()  # a few texts are raised twice in a function


def test_new_error_is_found_with_its_fields(sources_of):
    code = """
from ampatch.errors import OptionError, UsageError, did_you_mean, warn
CURE = "Type it again."
def check(optimizer, names):
    if names:
        raise OptionError(f"found {type(optimizer).__name__} as {names[0]!r}; {CURE}{did_you_mean(1, names)}")
    what = "a step of the optimizer was lost" if optimizer else "no step was made by anybody"
    warn(f"this is so: {what}.")
    _fail("this and that")
def _fail(text):
    raise UsageError(text)
"""
    found = {(each.kind, each.plain): dict(each.fields) for each in sources_of(code)}
    assert found == {
        ("OptionError", "found *optimizer class* as *names*; Type it again."): {},
        ("AmpWarning", "this is so: *what*."): {
            "what": ("a step of the optimizer was lost", "no step was made by anybody")
        },
        ("UsageError", "this and that"): {},
    }


def test_page_shows_messages_and_classes(errors):
    text = errors.text()
    assert "- `UsageError`: amp is set up already with other settings: *other*." in text
    assert "[Several losses, optimizers and models](../guide/several_losses.md)" in text
    assert r"*argument* contradicts opt\_level=*opt level*" in text
    assert "\x02" not in text
    titles = [entry.title for entry in entries(errors)]
    assert len(titles) == len(set(titles))
    rows = errors.classes().splitlines()
    assert any("<ampatch.amp.OptionError>` | `AmpError`, `ValueError` |" in row for row in rows)
    assert len(rows) == 2 + sum(name in package_errors.__dict__ for name in errors._public())


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float16)


def unscale_half() -> None:
    weight = torch.nn.Parameter(half(1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], 0.1)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)


one, ones = torch.ones(1), torch.ones(2)
first = torch.tensor([0])

#: Calls that raise what the page says of torch.
CALLS = (
    lambda: F.linear(torch.ones(2, 3), half(4, 3), half(4)),
    lambda: torch.mm(torch.ones(1, 1), half(1, 1)),
    lambda: F.conv2d(torch.ones(1, 1, 3, 3), half(1, 1, 1, 1), half(1)),
    lambda: torch.bmm(half(1, 1, 1), torch.ones(1, 1, 1)),
    lambda: F.layer_norm(torch.ones(1, 4), (4,), half(4), half(4)),
    lambda: F.scaled_dot_product_attention(half(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)),
    lambda: torch.dot(half(1), one),
    lambda: torch.nn.LSTM(2, 2)(half(1, 1, 2)),
    lambda: torch.cdist(half(2, 2), half(2, 2)),
    lambda: torch.linalg.svd(torch.ones(2, 2, dtype=torch.bfloat16)),
    lambda: torch.linalg.inv(half(2, 2)),
    lambda: half(2).masked_fill(ones > 0, -1e9),
    lambda: F.softshrink(half(2), 1e9),
    lambda: half(2).index_put_((first,), one),
    lambda: half(2).scatter_(0, first, one),
    lambda: half(2).index_add_(0, first, one),
    lambda: torch.ones(1).backward(),
    unscale_half,
)
#: These need a torch without CUDA, or a version of torch: they need not be raised here.
ELSEWHERE = {"AssertionError: Torch not compiled with CUDA enabled"}


def test_errors_of_torch_on_the_page_are_those_that_torch_raises(errors):
    raised = []
    for call in CALLS:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        raised.append(f"{caught.type.__name__}: {caught.value}")
    said = [text for entry in entries(errors) for text in entry.torch]
    patterns = {text: re.sub(r"\\\*[^*]*\\\*", ".+", re.escape(text)) for text in said}
    assert {text for text in said if not any(re.match(patterns[text], each) for each in raised)} == ELSEWHERE

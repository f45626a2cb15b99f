"""Every mistake that a user can make in a cast list, with its message in full: file, line, what to type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers import Write, casts_on
from torch import nn

from ampatch import amp
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import CastListError, OptionError
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


def faults(overlay: object) -> list[str]:
    """What is wrong with an overlay; of a file, without the folder that it is in."""
    with pytest.raises(CastListError) as found:
        shipped().overlaid(overlay)
    folder = f"{overlay.parent}/" if isinstance(overlay, Path) else ""
    return [str(fault).removeprefix(folder) for fault in found.value.faults]


# What messages have in common.
MISSING = "Mark the entry `optional: true` if it may be missing."
KEY_MISSING = "Mark its entries `optional: true` if it may be missing."
QUOTE = "quote it if text is meant"
PLAIN = "(cast lists hold plain data only)"
TOP = "expected names of lists on top, such as `whitelist: {torch: [mm, bmm]}`."
KNOWN = "expected one of whitelist, blacklist, promote, banned, unlisted, modules on top."
NAMESPACES = "expected namespaces with lists of names, such as `torch: [mm, bmm]`."
NAMES = "expected a list of names, such as [mm, bmm]."
ENTRY = "expected a function's name, or a mapping such as {name: exp, dtypes: [float16]}."
HALF_TYPES = "expected a list of half types, such as [float16]."
CONDITION = "expected arguments with lists of values, such as {mode: [bicubic, area]}."
VALUE = "expected text, a number, true, false or null."
VERSION = "expected a torch version in quotes, such as '2.10'."
TWICE = "stands here a second time; keep one."
NO_NAME = "an entry without `name`; expected one such as {name: exp, dtypes: [float16]}."
NUMBER = "Without the quotes it is a number."
ALIASES = "aliases put this list into itself, or under one namespace twice; take them out."


def both(here: str, there: str, path: str) -> str:
    """The fault of an entry that stands for a path for which another does."""
    return f"`{here}` here and `{there} both stand for {path}; keep one of them."


NOT_LOADED = "in the place of a namespace; no module or class of that name is loaded."
EVERY = 'where "*" stands for every namespace of torch'
NO_NAMESPACE = "in the place of a namespace; it is a function's name."


def under(list_name: str) -> str:
    return f"{NAMESPACES.removesuffix('.')}, under {list_name!r}."


def argument(name: str, function: str) -> str:
    return f"`when` names the argument {name!r}, which cannot be read from a call of {function};"


# Files with faults, as lines; a line with a fault is followed by its message.
LINES: dict[str, list[str | tuple[str, str]]] = {
    "lists": [
        "promote: {}",
        ("whitelsit: {torch: [mm]}", f"unknown list 'whitelsit'; {KNOWN} Did you mean 'whitelist'?"),
        ("torch: [mm]", f"unknown list 'torch'; {KNOWN}"),
    ],
    "functions": [
        "whitelist:",
        "  torch:",
        ("  - matmull", f"'torch' has no 'matmull'. Did you mean 'matmul' or 'chain_matmul' or 'mul'? {MISSING}"),
        ("  - zzz", f"'torch' has no 'zzz'. {MISSING}"),
        ("  - linear", "'torch' has no 'linear'; type `torch.nn.functional: [linear]`."),
        ("  - nn.functional.linear", "'torch' has no 'nn.functional.linear'; type `torch.nn.functional: [linear]`."),
        ("  - torch.mm", "'torch' has no 'torch.mm'; type `torch: [mm]`."),
        ("  torch.linalg: [mm]", "'torch.linalg' has no 'mm'; type `torch: [mm]`."),
    ],
    "namespaces": [
        "whitelist:",
        (
            "  torch.nn.functinal: [linear, conv2d]",
            f"'torch.nn' has no 'functinal'. Did you mean 'functional' or 'Sequential' or 'quantizable'? {KEY_MISSING}",
        ),
        ("  torch.nowhere:", f"'torch' has no 'nowhere'. Did you mean 'where' or 'argwhere'? {KEY_MISSING}"),
        "  - {name: a, optional: true}",
        "  - b",
        "  - {name: c, optional: false}",
        ("  not_there.ops: [nms]", f"there is no module 'not_there' (is it installed?). {KEY_MISSING}"),
    ],
    "functions in the place of namespaces": [
        "whitelist:",
        ("  softmax: [torch, torch.Tensor]", f"found 'softmax' {NO_NAMESPACE} Type `torch: [softmax]`."),
        ("  gelu: [F]", f"found 'gelu' {NO_NAMESPACE} Type `torch.nn.functional: [gelu]`."),
        ("  mul: [torch.linalg]", f"found 'mul' {NO_NAMESPACE} Type `\"*\": [mul]`."),
        ("  torch.softmax: [float16]", f"found 'torch.softmax' {NO_NAMESPACE} Type `torch: [softmax]`."),
        ("  F.gelu: [float16]", f"found 'F.gelu' {NO_NAMESPACE} Type `torch.nn.functional: [gelu]`."),
    ],
    "ends of namespaces": [
        "whitelist:",
        ("  F: [gelu]", f"found 'F' {NOT_LOADED} Type `torch.nn.functional: [gelu]`."),
        ("  nn.functional: [silu]", f"found 'nn.functional' {NOT_LOADED} Type `torch.nn.functional: [silu]`."),
        ("  linalg: [norm]", f"found 'linalg' {NOT_LOADED} Type `torch.linalg: [norm]`."),
    ],
    "names without namespaces": [
        (
            "whitelist: [softmax, F.gelu, torch.mm, nn.functional.silu]",
            (
                f"found a list; {under('whitelist')} "
                f'Type `whitelist: {{"*": [softmax], torch.nn.functional: [gelu, silu], torch: [mm]}}`, {EVERY}.'
            ),
        ),
        ('blacklist: ["*_loss", {name: mm}]', f"found a list; {under('blacklist')}"),
        ("promote: [torch.mm]", f"found a list; {under('promote')} Type `promote: {{torch: [mm]}}`."),
        ("unlisted: mm", f"found 'mm'; {under('unlisted')} Type `unlisted: {{\"*\": [mm]}}`, {EVERY}."),
    ],
    "no functions": [
        "whitelist:",
        (
            "  torch.nn: [Linear]",
            "torch.nn.Linear is a class, not a function; name a method of it, such as `torch.nn.Linear: [forward]`.",
        ),
        "  torch:",
        ("  - Size", "torch.Size is a class, not a function."),
        ("  - nn", "torch.nn is 'module', not a function."),
        ("  torch.Tensor: [shape]", "torch.Tensor.shape is 'getset_descriptor', not a function."),
        ("  os.path.join: [__call__]", "'os.path.join' is 'function'; expected a module or a class."),
        (
            "  torch._C.TensorBase: [exp]",
            "'torch._C.TensorBase' is a class in C, and cannot be patched; name a class in Python, as torch.Tensor is.",
        ),
    ],
    "two lists": [
        "whitelist:",
        "  torch: [exp, conv2d]",
        "blacklist:",
        ("  torch: [exp]", both("blacklist: {torch: [exp]}", "whitelist: {torch: [exp]}` in line 2", "torch.exp")),
        (
            "  torch.nn.functional: [conv2d]",
            both(
                "blacklist: {torch.nn.functional: [conv2d]}",
                "whitelist: {torch: [conv2d]}` in line 2",
                "torch.nn.functional.conv2d, which is the same function as torch.conv2d",
            ),
        ),
    ],
    "listed and unlisted": [
        "promote: {torch: [exp]}",
        (
            "unlisted: {torch: [exp]}",
            both("unlisted: {torch: [exp]}", "promote: {torch: [exp]}` in line 1", "torch.exp"),
        ),
    ],
    "overlapping half types": [
        "promote: {torch: [{name: exp, dtypes: [float16]}]}",
        (
            "blacklist: {torch: [exp]}",
            both("blacklist: {torch: [exp]}", "promote: {torch: [exp]}` in line 1", "torch.exp"),
        ),
    ],
    "one list": [
        "whitelist:",
        "  torch:",
        "  - exp",
        (
            "  - {name: exp, dtypes: [float16]}",
            both("whitelist: {torch: [exp]}", "whitelist: {torch: [exp]}` in line 3", "torch.exp"),
        ),
    ],
    "two names of one function with different options": [
        "whitelist:",
        "  torch: [{name: conv2d, when: {groups: [2]}}]",
        (
            "  torch.nn.functional: [conv2d]",
            both(
                "whitelist: {torch.nn.functional: [conv2d]}",
                "whitelist: {torch: [conv2d]}` in line 2, which has other options,",
                "torch.nn.functional.conv2d, which is the same function as torch.conv2d",
            ),
        ),
    ],
    "keys": [
        "whitelist:",
        "  torch: [mm]",
        ("  torch: [bmm]", f"the key 'torch' {TWICE}"),
        "blacklist:",
        "  torch:",
        "  - {name: exp,",
        ("     name: log}", f"the key 'name' {TWICE}"),
        "  torch.nn.functional:",
        (
            "  - {name: gelu, when: {approximate: [a], approximate: [b]}}",
            "when: the argument 'approximate' stands there a second time; keep one.",
        ),
        ("whitelist: {}", f"the key 'whitelist' {TWICE}"),
    ],
    "other values among names": [
        "whitelist:",
        "  torch:",
        ("  - 3", f"found 3 (which YAML reads as int; {QUOTE}); {ENTRY}"),
        ("  - on", f"found on (which YAML reads as bool; {QUOTE}); {ENTRY}"),
        ("  - ~", f"found nothing; {ENTRY}"),
        ("  - 2.5", f"found 2.5 (which YAML reads as float; {QUOTE}); {ENTRY}"),
        ("  - 2020-01-01", f"found 2020-01-01 (which YAML reads as timestamp; {QUOTE}); {ENTRY}"),
        ("  - ''", "name: found ''; expected text."),
    ],
    "values that are not of their tag": [
        "whitelist:",
        ("  torch: !!str [mm]", f"found the tag '!!str' {PLAIN}; {NAMES}"),
        ("  torch.Tensor: !!seq mm", f"found mm (which YAML reads as seq; {QUOTE}); {NAMES}"),
        ("promote: !!map mm", f"found mm (which YAML reads as map; {QUOTE}); {under('promote')}"),
        ("banned: !!int [1]", f"found the tag '!!int' {PLAIN}; {under('banned')}"),
    ],
    "other forms": [
        ("3: {}", f"found 3 (which YAML reads as int; {QUOTE}) as a key; {TOP}"),
        ("whitelist: &a {torch: mm}", f"found 'mm'; {NAMES}"),
        "promote:",
        ("  <<: *a", f"found << (which YAML reads as merge; {QUOTE}) as a key; {NAMESPACES}"),
        ("blacklist: &all", f"found a mapping; {NAMES}"),
        "  torch: *all",
        "unlisted:",
        "  torch:",
        ("  - &names", ALIASES),
        "    - mm",
        "    - *names",
    ],
    "options of another list": [
        "whitelist:",
        "  torch:",
        (
            "  - {name: mm, dtype: [float16]}",
            (
                "unknown key 'dtype'; expected name, dtypes, when, since, until, optional, format, grad. "
                "Did you mean 'dtypes'?"
            ),
        ),
        ("  - {name: mm, via_dtype: true}", "'via_dtype' has no effect here; only entries of 'blacklist' take it."),
        ("  - {name: bmm, instead: mm}", "'instead' has no effect here; only entries of 'banned' take it."),
        (
            "unlisted: {torch.nn.functional: [{name: gelu, when: {approximate: [tanh]}}]}",
            "'when' has no effect here; only entries of 'whitelist', 'blacklist', 'promote', 'banned' take it.",
        ),
    ],
    "name": [
        "blacklist:",
        "  torch:",
        ("  - dtypes: [float16]", NO_NAME),
        ("  - {}", NO_NAME),
        ("  - {name: [exp]}", "name: found a list; expected text."),
        ("  - {name: 1}", f"name: found 1 (which YAML reads as int; {QUOTE}); expected text."),
        ("  - {name: }", "name: found nothing; expected text."),
    ],
    "dtypes": [
        "blacklist:",
        "  torch:",
        ("  - {name: exp, dtypes: float16}", f"dtypes: found 'float16'; {HALF_TYPES}"),
        ("  - {name: log, dtypes: []}", f"dtypes: found an empty list; {HALF_TYPES}"),
        (
            "  - {name: sum, dtypes: [torch.float16]}",
            "dtypes: found 'torch.float16'; expected float16 or bfloat16. Did you mean 'float16' or 'bfloat16'?",
        ),
        ("  - {name: pow, dtypes: [[float16]]}", "dtypes: found a list; expected float16 or bfloat16."),
        ("  - {name: var, dtypes: {float16: 1}}", f"dtypes: found a mapping; {HALF_TYPES}"),
        (
            "  - {name: std, dtypes: [float16, 16]}",
            f"dtypes: found 16 (which YAML reads as int; {QUOTE}); expected float16 or bfloat16.",
        ),
    ],
    "when": [
        "blacklist:",
        "  torch.nn.functional:",
        ("  - {name: interpolate, when: bicubic}", f"when: found 'bicubic'; {CONDITION}"),
        ("  - {name: upsample, when: {mode: bicubic}}", f"when: found 'bicubic'; {CONDITION}"),
        ("  - {name: gelu, when: {approximate: []}}", f"when: found an empty list; {CONDITION}"),
        (
            "  - {name: rrelu, when: {1: [2]}}",
            f"when: found 1 (which YAML reads as int; {QUOTE}) as an argument; {CONDITION}",
        ),
        ("  - {name: softmax, when: {dim: [[1]]}}", f"when: found a list; {VALUE}"),
        ("  - {name: softmin, when: {}}", f"when: found an empty mapping; {CONDITION}"),
        (
            "  - {name: normalize, when: {p: [2020-01-01]}}",
            f"when: found 2020-01-01 (which YAML reads as timestamp; {QUOTE}); {VALUE}",
        ),
        (
            "  - {name: kl_div, when: {reduction: [!!int sum]}}",
            f"when: found sum (which YAML reads as int; {QUOTE}); {VALUE}",
        ),
        (
            "  - {name: gelu, when: {betta: [1]}}",
            f"{argument('betta', 'torch.nn.functional.gelu')} expected input, approximate.",
        ),
        "  torch:",
        (
            "  - {name: max, when: {dim: [0]}}",
            f"{argument('dim', 'torch.max')} expected input, keepdim. Did you mean 'keepdim'?",
        ),
        (
            "  - {name: einsum, when: {equation: [a]}}",
            f"{argument('equation', 'torch.einsum')} none can.",
        ),
    ],
    "since and until": [
        "blacklist:",
        "  torch:",
        ("  - {name: exp, since: 2.10}", f"since: found 2.10 (which YAML reads as float; {QUOTE}); {VERSION} {NUMBER}"),
        ("  - {name: log, until: 3}", f"until: found 3 (which YAML reads as int; {QUOTE}); {VERSION} {NUMBER}"),
        ("  - {name: sum, since: new}", f"since: found 'new'; {VERSION}"),
        ("  - {name: var, until: ['2.10']}", f"until: found a list; {VERSION}"),
        ("  - {name: std, since: '2.10+cpu'}", f"since: found '2.10+cpu'; {VERSION}"),
    ],
    "other options": [
        "blacklist:",
        "  torch:",
        ("  - {name: exp, optional: 'yes'}", "optional: found 'yes'; expected true or false."),
        (
            "  - {name: log, optional: 1}",
            f"optional: found 1 (which YAML reads as int; {QUOTE}); expected true or false.",
        ),
        (
            "  - {name: sum, optional: !!bool maybe}",
            f"optional: found maybe (which YAML reads as bool; {QUOTE}); {VALUE}",
        ),
        (
            "  - {name: exp, via_dtype: true}",
            "torch.exp has no argument `dtype`; leave `via_dtype` out, and its arguments are cast instead.",
        ),
        ("  - {name: log, via_dtype: float32}", "via_dtype: found 'float32'; expected true or false."),
        ("banned: {torch: [{name: mm, instead: [bmm]}]}", "instead: found a list; expected text."),
    ],
}

# Files that are no YAML, or have several faults in a line.
CONTENTS: dict[str, tuple[str | bytes, list[str]]] = {
    "a bracket left open": (
        "whitelist:\n  torch: [mm\nblacklist: {}\n",
        [":3: not valid YAML: while parsing a flow sequence that began in line 2: expected ',' or ']', but got ':'."],
    ),
    "a tab": (
        "whitelist:\n\ttorch: [mm]\n",
        [
            (
                r":2: not valid YAML: while scanning for the next token: found character '\t' that cannot start "
                "any token. Indent with spaces, not with tabs."
            )
        ],
    ),
    "an alias without anchor": (
        "whitelist:\n  torch: *products\n",
        [":2: not valid YAML: found undefined alias 'products'."],
    ),
    "a control character": (
        "# \N{GREEK SMALL LETTER ALPHA}\nwhitelist:\n  torch: ['\x07']\n",
        [r":3: not valid YAML: the character '\x07' is not allowed."],
    ),
    "Latin-1": (b"whitelist:\n  torch: [m\xe4]\n", [":2: this is not UTF-8; save the file in that encoding."]),
    "UTF-16": ("promote: {}".encode("utf-16"), [":1: this is not UTF-8; save the file in that encoding."]),
    "nested without end": ("[" * 5000 + "]" * 5000, [": it is nested too deeply, or contains itself."]),
    "a list on top": ("[whitelist]", [f":1: found a list; {TOP}"]),
    # Each list twice the one before: read one by one, their names would never come to an end.
    "a bomb of aliases": (
        "whitelist:\n  torch:\n  - &a0 [mm]\n" + "".join(f"  - &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64)),
        [f":{line}: {ALIASES}" for line in range(3, 66) for _ in range(2)],
    ),
}

# Each would run or build something under a loader that is not safe.
TAGS = {
    "!!python/object/apply:os.system": "!!python/object/apply:os.system ['touch {ran}']",
    "!!python/object/new:os.system": "!!python/object/new:os.system ['touch {ran}']",
    "!!python/object:os.system": "!!python/object:os.system {{a: b}}",
    "!!python/name:os.system": "!!python/name:os.system ''",
    "!!python/module:os": "!!python/module:os ''",
    "!!python/tuple": "!!python/tuple [mm]",
    "!!set": "!!set {{mm}}",
    "!!omap": "!!omap [mm: bmm]",
    "!own": "!own [mm]",
    "tag:example.com,2000:x": "!<tag:example.com,2000:x> mm",
}


class TestFiles:
    @pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
    def test_the_fault_of_a_line_says_what_is_wrong_and_what_to_type(
        self, write: Write, lines: list[str | tuple[str, str]]
    ) -> None:
        content = "\n".join(line if isinstance(line, str) else line[0] for line in lines)
        expected = [f"own.yaml:{at}: {line[1]}" for at, line in enumerate(lines, 1) if isinstance(line, tuple)]
        assert faults(write(content)) == expected

    @pytest.mark.parametrize(("content", "expected"), CONTENTS.values(), ids=CONTENTS)
    def test_a_file_that_is_no_cast_list_is_a_fault(
        self, write: Write, content: str | bytes, expected: list[str]
    ) -> None:
        assert faults(write(content)) == [f"own.yaml{fault}" for fault in expected]

    @pytest.mark.parametrize(
        "place",
        [
            "{0}",
            "whitelist: {0}",
            "whitelist: {{torch: {0}}}",
            *(
                f"blacklist: {{{{torch: [{{{{name: exp, {option}: {{0}}}}}}]}}}}"
                for option in ("dtypes", "when", "since")
            ),
            "blacklist: {{torch: [{{name: {0}}}]}}",
            "blacklist: {{torch: [{{name: exp, optional: {0}}}]}}",
            "blacklist: {{torch: [{{{0}: 1}}]}}",
        ],
    )
    @pytest.mark.parametrize("tag", TAGS)
    def test_a_tag_is_a_fault_and_builds_nothing(self, tmp_path: Path, write: Write, place: str, tag: str) -> None:
        ran = tmp_path / "ran"

        (fault,) = faults(write(place.format(TAGS[tag].format(ran=ran))))

        assert fault.startswith("own.yaml:1: ")
        assert f"found the tag {tag!r} {PLAIN}" in fault
        assert not ran.exists()

    def test_all_faults_are_told_in_the_order_of_the_lines(self, write: Write) -> None:
        file = write(
            """\
blacklist:
  torch: &shared
  - zzz_one
  - log
whitelsit: {}
whitelist:
  torch:
  - {name: mm, foo: 1}
  - zzz_two
  torch.Tensor: [zzz_three]
promote:
  torch.Tensor: *shared
  torch: [log]
""",
        )
        lines = [fault.split(":")[1] for fault in faults(file)]
        assert lines == ["3", "3", "5", "8", "9", "10", "13"]

    def test_faults_of_the_second_file_name_it_in_every_line(self, write: Write) -> None:
        first = write("promote: {torch: [mm]}", "a.yaml")
        second = write("\nprommote: {}\nwhitelsit: {}", "b.yaml")
        with pytest.raises(CastListError) as found:
            shipped().overlaid([first, second])
        assert [fault.source for fault in found.value.faults] == [f"{second}:2", f"{second}:3"]
        assert [line.partition(": ")[0] for line in str(found.value).splitlines()] == [f"{second}:2", f"{second}:3"]

    def test_a_file_that_cannot_be_read_is_a_fault(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        assert faults(tmp_path / "none.yaml") == ["none.yaml: the file cannot be read: No such file or directory."]
        assert faults(tmp_path / "folder") == ["folder: the file cannot be read: Is a directory."]
        assert faults("a\0b") == ["a\0b: the file cannot be read: embedded null byte."]

    def test_a_missing_path_with_variables_has_advice(self) -> None:
        (fault,) = faults("$HOME/none.yaml")
        assert fault == (
            "$HOME/none.yaml: the file cannot be read: No such file or directory. Variables are not expanded in paths: "
            "the shell does that, outside of single quotes. Type the folder itself, `~` for your home, or in Python "
            "`os.path.expandvars(path)`."
        )

    def test_a_file_may_have_a_dollar_sign_in_its_name(self, write: Write) -> None:
        assert shipped().overlaid(write("", "$HOME.yaml")) == shipped()

    @pytest.mark.parametrize("overlay", [5, 1.5, True, "", b"own.yaml", {1, 2}, object, [None]], ids=repr)
    def test_overlays_are_paths_or_mappings(self, overlay: object) -> None:
        several = overlay if isinstance(overlay, list) else [overlay]
        for given_as in (overlay, several):
            with pytest.raises(OptionError) as found:
                shipped().overlaid(given_as)
            expected = "expected the path of a YAML file, or a mapping."
            assert str(found.value) == f"cast_lists holds {several[0]!r}; {expected}"


class TestMappings:
    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({"whitelsit": {}}, f"unknown list 'whitelsit'; {KNOWN} Did you mean 'whitelist'?"),
            ({3: {}}, f"found 3 (which YAML reads as int; {QUOTE}) as a key; {TOP}"),
            (
                {"whitelist": {"torch": ["mm"]}, "blacklist": {"torch": ["mm"]}},
                both("blacklist: {torch: [mm]}", "whitelist: {torch: [mm]}`", "torch.mm"),
            ),
            (
                {"blacklist": {"torch": [{"name": "exp", "since": 2.10}]}},
                f"since: found 2.1 (which YAML reads as float; {QUOTE}); {VERSION} {NUMBER}",
            ),
        ],
        ids=str,
    )
    def test_a_fault_of_a_mapping_has_no_line(self, mapping: object, message: str) -> None:
        assert faults(mapping) == [f"cast_lists: {message}"]

    @pytest.mark.parametrize(
        ("mapping", "found"),
        [
            ({"whitelist": {torch: ["mm"]}}, torch),
            ({"whitelist": {"torch": [torch.mm]}}, torch.mm),
            ({"whitelist": {"torch": {"mm"}}}, {"mm"}),
            ({"whitelist": {"torch": [b"mm"]}}, b"mm"),
            ({"blacklist": {"torch": [{"name": "exp", "dtypes": [torch.float16]}]}}, torch.float16),
            ({Treatment.WHITELIST: {}}, Treatment.WHITELIST),
        ],
        ids=["module", "function", "set", "bytes", "dtype", "enum"],
    )
    def test_a_mapping_holds_nothing_that_yaml_lacks(self, mapping: Mapping[str, object], found: object) -> None:
        expected = "expected text, numbers, lists and mappings: functions by name, half types as 'float16'."
        assert faults(mapping) == [f"cast_lists: found {found!r}; {expected}"]

    def test_a_mapping_that_contains_itself_is_a_fault(self) -> None:
        names: list[object] = ["mm"]
        names.append(names)
        assert faults({"whitelist": {"torch": names}}) == ["cast_lists: it is nested too deeply, or contains itself."]


class TestNothingIsPatched:
    def test_a_second_initialize_that_finds_a_fault_ends_no_casts(self, write: Write) -> None:
        with casts_on(torch.bfloat16):
            live, mm = runtime.live, torch.mm
            with pytest.raises(CastListError):
                amp.initialize(nn.Linear(1, 1), cast_lists=write("whitelsit: {}"))
            assert runtime.live is live
            assert torch.mm is mm

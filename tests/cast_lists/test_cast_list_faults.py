"""Every mistake that a user can make in a cast list, and what they read of it: file, line, what to type.

The messages stand here in full, since a message that nobody would understand is a defect too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers import HALF_DTYPES, casts_on, dtype_name
from torch import nn

from ampatch import amp
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import AmpError, CastListError, OptionError
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


def write(folder: Path, content: str | bytes, name: str = "own.yaml") -> Path:
    """A file of the user's."""
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


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
KEEP_ONE = "keep one of them."


def both(here: str, there: str, path: str) -> str:
    """The fault of an entry that stands for a path for which another does."""
    return f"`{here}` here and `{there} both stand for {path}; {KEEP_ONE}"


NOT_LOADED = "in the place of a namespace; no module or class of that name is loaded."
EVERY = 'where "*" stands for every namespace of torch'
NO_NAMESPACE = "in the place of a namespace; it is a function's name."


def under(list_name: str) -> str:
    return f"{NAMESPACES.removesuffix('.')}, under {list_name!r}."


Case = tuple[str | bytes, list[str]]

UNREADABLE: dict[str, Case] = {
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
    "two documents": (
        "whitelist: {}\n---\nblacklist: {}\n",
        [
            (
                ":2: not valid YAML: expected a single document in the stream that began in line 1: but found another "
                "document."
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
}

NOT_FOUND: dict[str, Case] = {
    "a list": (
        "promote: {}\nwhitelsit:\n  torch: [mm]\n",
        [f":2: unknown list 'whitelsit'; {KNOWN} Did you mean 'whitelist'?"],
    ),
    "namespaces on top": ("torch: [mm]\n", [f":1: unknown list 'torch'; {KNOWN}"]),
    "a function": (
        "whitelist:\n  torch:\n  - mm\n  - matmull\n",
        [f":4: 'torch' has no 'matmull'. Did you mean 'matmul' or 'chain_matmul' or 'mul'? {MISSING}"],
    ),
    "a function near to none": ("unlisted: {torch: [zzz]}", [f":1: 'torch' has no 'zzz'. {MISSING}"]),
    "a function of elsewhere": (
        "whitelist: {torch: [linear], torch.linalg: [mm]}",
        [
            ":1: 'torch' has no 'linear'; type `torch.nn.functional: [linear]`.",
            ":1: 'torch.linalg' has no 'mm'; type `torch: [mm]`.",
        ],
    ),
    "a dotted name": (
        "whitelist:\n  torch:\n  - nn.functional.linear\n  - torch.mm\n",
        [
            ":3: 'torch' has no 'nn.functional.linear'; type `torch.nn.functional: [linear]`.",
            ":4: 'torch' has no 'torch.mm'; type `torch: [mm]`.",
        ],
    ),
    "a namespace, said once": (
        "whitelist:\n  torch.nn.functinal:\n  - linear\n  - conv2d\n",
        [
            (
                ":2: 'torch.nn' has no 'functinal'. Did you mean 'functional' or 'Sequential' or 'quantizable'? "
                f"{KEY_MISSING}"
            )
        ],
    ),
    "a namespace of which some names are optional": (
        "whitelist:\n  torch.nowhere:\n  - {name: a, optional: true}\n  - b\n  - {name: c, optional: false}\n",
        [f":2: 'torch' has no 'nowhere'. Did you mean 'where' or 'argwhere'? {KEY_MISSING}"],
    ),
    "no namespaces": (
        "whitelist: [softmax, F.gelu, torch.mm, nn.functional.silu]",
        [
            (
                f":1: found a list; {under('whitelist')} "
                'Type `whitelist: {"*": [softmax], torch.nn.functional: [gelu, silu], torch: [mm]}`, '
                f"{EVERY}."
            )
        ],
    ),
    "no namespace, for what is no plain name": (
        'whitelist: ["*_loss", {name: mm}]',
        [f":1: found a list; {under('whitelist')}"],
    ),
    "a namespace and a name, swapped": (
        "whitelist: {softmax: [torch, torch.Tensor], gelu: [F], mul: [torch.linalg]}",
        [
            f":1: found 'softmax' {NO_NAMESPACE} Type `torch: [softmax]`.",
            f":1: found 'gelu' {NO_NAMESPACE} Type `torch.nn.functional: [gelu]`.",
            f":1: found 'mul' {NO_NAMESPACE} Type `\"*\": [mul]`.",
        ],
    ),
    "a path in the place of a namespace": (
        "whitelist: {torch.softmax: [float16], F.gelu: [float16]}",
        [
            f":1: found 'torch.softmax' {NO_NAMESPACE} Type `torch: [softmax]`.",
            f":1: found 'F.gelu' {NO_NAMESPACE} Type `torch.nn.functional: [gelu]`.",
        ],
    ),
    "the end of a namespace": (
        "whitelist: {F: [gelu], nn.functional: [silu], linalg: [norm]}",
        [
            f":1: found 'F' {NOT_LOADED} Type `torch.nn.functional: [gelu]`.",
            f":1: found 'nn.functional' {NOT_LOADED} Type `torch.nn.functional: [silu]`.",
            f":1: found 'linalg' {NOT_LOADED} Type `torch.linalg: [norm]`.",
        ],
    ),
    "a package": (
        "whitelist: {no_such_package_is_installed.ops: [nms]}",
        [f":1: there is no module 'no_such_package_is_installed' (is it installed?). {KEY_MISSING}"],
    ),
}

NO_FUNCTION: dict[str, Case] = {
    "a class": (
        "whitelist: {torch.nn: [Linear]}",
        [":1: torch.nn.Linear is a class, not a function; name a method of it, such as `torch.nn.Linear: [forward]`."],
    ),
    "a class in C": ("whitelist: {torch: [Size]}", [":1: torch.Size is a class, not a function."]),
    "a module": ("whitelist: {torch: [nn]}", [":1: torch.nn is 'module', not a function."]),
    "an attribute": (
        "whitelist: {torch.Tensor: [shape]}",
        [":1: torch.Tensor.shape is 'getset_descriptor', not a function."],
    ),
    "of a function": (
        "whitelist: {os.path.join: [__call__]}",
        [":1: 'os.path.join' is 'function'; expected a module or a class."],
    ),
    "of a class in C": (
        "whitelist: {torch._C.TensorBase: [exp]}",
        [
            (
                ":1: 'torch._C.TensorBase' is a class in C, and cannot be patched; name a class in Python, as "
                "torch.Tensor is."
            )
        ],
    ),
}

TWO_PLACES: dict[str, Case] = {
    "a name in two lists": (
        "whitelist:\n  torch: [exp]\nblacklist:\n  torch: [exp]\n",
        [":4: " + both("blacklist: {torch: [exp]}", "whitelist: {torch: [exp]}` in line 2", "torch.exp")],
    ),
    "two names of one function": (
        "whitelist:\n  torch.nn.functional: [conv2d]\nblacklist:\n  torch: [conv2d]\n",
        [
            ":4: "
            + both(
                "blacklist: {torch: [conv2d]}",
                "whitelist: {torch.nn.functional: [conv2d]}` in line 2",
                "torch.conv2d, which is the same function as torch.nn.functional.conv2d",
            )
        ],
    ),
    "listed and unlisted": (
        "promote: {torch: [exp]}\nunlisted: {torch: [exp]}\n",
        [":2: " + both("unlisted: {torch: [exp]}", "promote: {torch: [exp]}` in line 1", "torch.exp")],
    ),
    "for overlapping half types": (
        "promote: {torch: [{name: exp, dtypes: [float16]}]}\nblacklist: {torch: [exp]}\n",
        [":2: " + both("blacklist: {torch: [exp]}", "promote: {torch: [exp]}` in line 1", "torch.exp")],
    ),
    "twice in one list": (
        "whitelist:\n  torch:\n  - exp\n  - {name: exp, dtypes: [float16]}\n",
        [":4: " + both("whitelist: {torch: [exp]}", "whitelist: {torch: [exp]}` in line 3", "torch.exp")],
    ),
    "a list twice": (
        "whitelist: {torch: [mm]}\npromote: {}\nwhitelist: {torch: [bmm]}\n",
        [f":3: the key 'whitelist' {TWICE}"],
    ),
    "a namespace twice": ("whitelist:\n  torch: [mm]\n  torch: [bmm]\n", [f":3: the key 'torch' {TWICE}"]),
    "an option twice": ("whitelist: {torch: [{name: mm,\nname: bmm}]}", [f":2: the key 'name' {TWICE}"]),
    "an argument twice": (
        "blacklist: {torch.nn.functional: [{name: gelu, when: {approximate: [a], approximate: [b]}}]}",
        [":1: when: the argument 'approximate' stands there a second time; keep one."],
    ),
}

WRONG_TYPE: dict[str, Case] = {
    "a list on top": ("[whitelist]", [f":1: found a list; {TOP}"]),
    "text on top": ("whitelist", [f":1: found 'whitelist'; {TOP}"]),
    "a number on top": ("3", [f":1: found 3 (which YAML reads as int; {QUOTE}); {TOP}"]),
    "a number as a list's name": ("3: {}", [f":1: found 3 (which YAML reads as int; {QUOTE}) as a key; {TOP}"]),
    "nothing as a list's name": ("~: {}", [f":1: found nothing as a key; {TOP}"]),
    "text as a list": (
        "unlisted: mm",
        [f":1: found 'mm'; {under('unlisted')} Type `unlisted: {{\"*\": [mm]}}`, {EVERY}."],
    ),
    "names as a list": (
        "whitelist: [torch.mm]",
        [f":1: found a list; {under('whitelist')} Type `whitelist: {{torch: [mm]}}`."],
    ),
    "false as a list": ("whitelist: no", [f":1: found no (which YAML reads as bool; {QUOTE}); {under('whitelist')}"]),
    "a list as a namespace": ("whitelist: {[torch]: [mm]}", [f":1: found a list as a key; {NAMESPACES}"]),
    "text as names": ("whitelist: {torch: mm}", [f":1: found 'mm'; {NAMES}"]),
    "a mapping as names": ("whitelist: {torch: {mm: bmm}}", [f":1: found a mapping; {NAMES}"]),
    "a number as names": ("whitelist: {torch: 3}", [f":1: found 3 (which YAML reads as int; {QUOTE}); {NAMES}"]),
    "other things among names": (
        "whitelist:\n  torch:\n  - 3\n  - on\n  - ~\n  - 2.5\n  - 2020-01-01\n  - ''\n",
        [
            f":3: found 3 (which YAML reads as int; {QUOTE}); {ENTRY}",
            f":4: found on (which YAML reads as bool; {QUOTE}); {ENTRY}",
            f":5: found nothing; {ENTRY}",
            f":6: found 2.5 (which YAML reads as float; {QUOTE}); {ENTRY}",
            f":7: found 2020-01-01 (which YAML reads as timestamp; {QUOTE}); {ENTRY}",
            ":8: name: found ''; expected text.",
        ],
    ),
    "what is not of its tag": (
        "whitelist:\n  torch: !!str [mm]\n  torch.Tensor: !!seq mm\npromote: !!map mm\nbanned: !!int [1]\n",
        [
            f":2: found the tag '!!str' {PLAIN}; {NAMES}",
            f":3: found mm (which YAML reads as seq; {QUOTE}); {NAMES}",
            f":4: found mm (which YAML reads as map; {QUOTE}); {under('promote')}",
            f":5: found the tag '!!int' {PLAIN}; {under('banned')}",
        ],
    ),
    "a merge key": (
        "whitelist: &a {torch: [mm]}\npromote:\n  <<: *a\n",
        [f":3: found << (which YAML reads as merge; {QUOTE}) as a key; {NAMESPACES}"],
    ),
    "two names of one function with different options": (
        "whitelist:\n  torch: [{name: conv2d, when: {groups: [2]}}]\n  torch.nn.functional: [conv2d]\n",
        [
            ":3: "
            + both(
                "whitelist: {torch.nn.functional: [conv2d]}",
                "whitelist: {torch: [conv2d]}` in line 2, which has other options,",
                "torch.nn.functional.conv2d, which is the same function as torch.conv2d",
            )
        ],
    ),
    "a list that contains itself": (
        "whitelist:\n  torch:\n  - &names\n    - mm\n    - *names\n",
        [":3: aliases put this list into itself, or under one namespace twice; take them out."],
    ),
    # Each list twice the one before: read one by one, their names would never come to an end.
    "a bomb of aliases": (
        "whitelist:\n  torch:\n  - &a0 [mm]\n" + "".join(f"  - &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64)),
        [":3: aliases put this list into itself, or under one namespace twice; take them out."] * 2
        + [
            f":{i}: aliases put this list into itself, or under one namespace twice; take them out."
            for i in range(4, 66)
            for _ in range(2)
        ],
    ),
    "a mapping that contains itself": ("whitelist: &all\n  torch: *all\n", [f":1: found a mapping; {NAMES}"]),
}

WRONG_OPTION: dict[str, Case] = {
    "unknown": (
        "whitelist:\n  torch:\n  - name: mm\n    dtype: [float16]\n",
        [":4: unknown key 'dtype'; expected name, dtypes, when, since, until, optional. Did you mean 'dtypes'?"],
    ),
    "of another list": (
        "whitelist:\n  torch:\n  - {name: mm, via_dtype: true}\n  - {name: bmm, instead: mm}\n",
        [
            ":3: 'via_dtype' has no effect here; only entries of 'blacklist' take it.",
            ":4: 'instead' has no effect here; only entries of 'banned' take it.",
        ],
    ),
    "a condition on what is unlisted": (
        "unlisted: {torch.nn.functional: [{name: gelu, when: {approximate: [tanh]}}]}",
        [":1: 'when' has no effect here; only entries of 'whitelist', 'blacklist', 'promote', 'banned' take it."],
    ),
    "no name": (
        "blacklist:\n  torch:\n  - dtypes: [float16]\n  - {}\n",
        [
            f":{line}: an entry without `name`; expected one such as {{name: exp, dtypes: [float16]}}."
            for line in (3, 4)
        ],
    ),
    "name": (
        "blacklist: {torch: [{name: [exp]}, {name: 1}, {name: }]}",
        [
            ":1: name: found a list; expected text.",
            f":1: name: found 1 (which YAML reads as int; {QUOTE}); expected text.",
            ":1: name: found nothing; expected text.",
        ],
    ),
    "dtypes": (
        """\
blacklist:
  torch:
  - {name: exp, dtypes: float16}
  - {name: log, dtypes: []}
  - {name: sum, dtypes: [torch.float16]}
  - {name: pow, dtypes: [[float16]]}
  - {name: var, dtypes: {float16: 1}}
  - {name: std, dtypes: [float16, 16]}
""",
        [
            f":3: dtypes: found 'float16'; {HALF_TYPES}",
            f":4: dtypes: found an empty list; {HALF_TYPES}",
            ":5: dtypes: found 'torch.float16'; expected float16 or bfloat16. Did you mean 'float16' or 'bfloat16'?",
            ":6: dtypes: found a list; expected float16 or bfloat16.",
            f":7: dtypes: found a mapping; {HALF_TYPES}",
            f":8: dtypes: found 16 (which YAML reads as int; {QUOTE}); expected float16 or bfloat16.",
        ],
    ),
    "when": (
        """\
blacklist:
  torch.nn.functional:
  - {name: interpolate, when: bicubic}
  - {name: upsample, when: {mode: bicubic}}
  - {name: gelu, when: {approximate: []}}
  - {name: rrelu, when: {1: [2]}}
  - {name: softmax, when: {dim: [[1]]}}
  - {name: softmin, when: {}}
  - {name: normalize, when: {p: [2020-01-01]}}
  - {name: kl_div, when: {reduction: [!!int sum]}}
""",
        [
            f":3: when: found 'bicubic'; {CONDITION}",
            f":4: when: found 'bicubic'; {CONDITION}",
            f":5: when: found an empty list; {CONDITION}",
            f":6: when: found 1 (which YAML reads as int; {QUOTE}) as an argument; {CONDITION}",
            f":7: when: found a list; {VALUE}",
            f":8: when: found an empty mapping; {CONDITION}",
            f":9: when: found 2020-01-01 (which YAML reads as timestamp; {QUOTE}); {VALUE}",
            f":10: when: found sum (which YAML reads as int; {QUOTE}); {VALUE}",
        ],
    ),
    "an argument that the function lacks": (
        """\
blacklist:
  torch.nn.functional:
  - {name: softplus, when: {betta: [1]}}
  - {name: rrelu, when: {trainig: [true]}}
  torch:
  - {name: max, when: {dim: [0]}}
  - {name: einsum, when: {equation: [a]}}
""",
        [
            (
                ":3: `when` names the argument 'betta', which cannot be read from a call of "
                "torch.nn.functional.softplus; expected input, beta, threshold. Did you mean 'beta'?"
            ),
            (
                ":4: `when` names the argument 'trainig', which cannot be read from a call of "
                "torch.nn.functional.rrelu; expected input, lower, upper, training, inplace. Did you mean 'training'?"
            ),
            (
                ":6: `when` names the argument 'dim', which cannot be read from a call of torch.max; expected "
                "input, keepdim. Did you mean 'keepdim'?"
            ),
            ":7: `when` names the argument 'equation', which cannot be read from a call of torch.einsum; none can.",
        ],
    ),
    "since and until": (
        """\
blacklist:
  torch:
  - {name: exp, since: 2.10}
  - {name: log, until: 3}
  - {name: sum, since: new}
  - {name: var, until: ['2.10']}
  - {name: std, since: '2.10+cpu'}
""",
        [
            f":3: since: found 2.10 (which YAML reads as float; {QUOTE}); {VERSION} Without the quotes it is a number.",
            f":4: until: found 3 (which YAML reads as int; {QUOTE}); {VERSION} Without the quotes it is a number.",
            f":5: since: found 'new'; {VERSION}",
            f":6: until: found a list; {VERSION}",
            f":7: since: found '2.10+cpu'; {VERSION}",
        ],
    ),
    "optional": (
        """\
blacklist:
  torch:
  - {name: exp, optional: 'yes'}
  - {name: log, optional: 1}
  - {name: sum, optional: !!bool maybe}
""",
        [
            ":3: optional: found 'yes'; expected true or false.",
            f":4: optional: found 1 (which YAML reads as int; {QUOTE}); expected true or false.",
            f":5: optional: found maybe (which YAML reads as bool; {QUOTE}); {VALUE}",
        ],
    ),
    "via_dtype": (
        "blacklist:\n  torch:\n  - {name: exp, via_dtype: true}\n  - {name: log, via_dtype: float32}\n",
        [
            ":3: torch.exp has no argument `dtype`; leave `via_dtype` out, and its arguments are cast instead.",
            ":4: via_dtype: found 'float32'; expected true or false.",
        ],
    ),
    "instead": ("banned: {torch: [{name: mm, instead: [bmm]}]}", [":1: instead: found a list; expected text."]),
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


class TestWhatAUserIsTold:
    def check(self, tmp_path: Path, case: Case) -> None:
        content, expected = case
        assert faults(write(tmp_path, content)) == [f"own.yaml{fault}" for fault in expected]

    @pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE)
    def test_of_a_file_that_is_no_yaml(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize("case", NOT_FOUND.values(), ids=NOT_FOUND)
    def test_of_a_name_that_does_not_exist(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize("case", NO_FUNCTION.values(), ids=NO_FUNCTION)
    def test_of_a_name_that_is_no_function(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize("case", TWO_PLACES.values(), ids=TWO_PLACES)
    def test_of_a_name_in_two_places(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize("case", WRONG_TYPE.values(), ids=WRONG_TYPE)
    def test_of_a_wrong_type(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize("case", WRONG_OPTION.values(), ids=WRONG_OPTION)
    def test_of_an_option(self, tmp_path: Path, case: Case) -> None:
        self.check(tmp_path, case)

    @pytest.mark.parametrize(
        "place", ["{0}", "whitelist: {0}", "whitelist: {{torch: {0}}}"], ids=["top", "list", "names"]
    )
    @pytest.mark.parametrize("tag", TAGS)
    def test_of_a_tag_which_builds_nothing(self, tmp_path: Path, place: str, tag: str) -> None:
        ran = tmp_path / "ran"

        (fault,) = faults(write(tmp_path, place.format(TAGS[tag].format(ran=ran))))

        assert fault.startswith(f"own.yaml:1: found the tag {tag!r} {PLAIN}; expected ")
        assert not ran.exists()

    @pytest.mark.parametrize("tag", TAGS)
    @pytest.mark.parametrize(
        "entry",
        ["name: {0}", *(f"name: exp, {option}: {{0}}" for option in ("dtypes", "when", "since", "optional")), "{0}: 1"],
    )
    def test_of_a_tag_in_an_entry(self, tmp_path: Path, entry: str, tag: str) -> None:
        ran = tmp_path / "ran"
        value = TAGS[tag].format(ran=ran)

        (fault,) = faults(write(tmp_path, f"blacklist: {{torch: [{{{entry.format(value)}}}]}}"))

        assert f"found the tag {tag!r}" in fault
        assert not ran.exists()

    def test_all_faults_come_at_once_in_the_order_of_the_lines(self, tmp_path: Path) -> None:
        file = write(
            tmp_path,
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

    def test_of_the_second_of_two_files(self, tmp_path: Path) -> None:
        sound, unsound = (
            write(tmp_path, "promote: {torch: [mm]}", "a.yaml"),
            write(tmp_path, "\nprommote: {}", "b.yaml"),
        )
        with pytest.raises(CastListError) as found:
            shipped().overlaid([sound, unsound])
        (fault,) = found.value.faults
        assert fault.source == f"{unsound}:2"

    def test_the_error_says_where_and_what_in_every_line(self, tmp_path: Path) -> None:
        with pytest.raises(CastListError) as found:
            shipped().overlaid(write(tmp_path, "whitelsit: {}\npromte: {}\n"))
        lines = str(found.value).splitlines()
        assert [line.partition(": ")[0].rpartition("/")[2] for line in lines] == ["own.yaml:1", "own.yaml:2"]

    def test_of_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        assert faults(tmp_path / "none.yaml") == ["none.yaml: the file cannot be read: No such file or directory."]

    def test_of_a_path_with_variables(self) -> None:
        (fault,) = faults("$HOME/none.yaml")
        assert fault == (
            "$HOME/none.yaml: the file cannot be read: No such file or directory. Variables are not expanded in paths: "
            "the shell does that, outside of single quotes. Type the folder itself, `~` for your home, or in Python "
            "`os.path.expandvars(path)`."
        )

    def test_of_a_file_whose_name_has_the_sign_of_variables(self, tmp_path: Path) -> None:
        assert shipped().overlaid(write(tmp_path, "", "$HOME.yaml")) == shipped()

    def test_of_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        assert faults(tmp_path / "folder") == ["folder: the file cannot be read: Is a directory."]

    def test_of_a_name_that_no_file_can_have(self) -> None:
        assert faults("a\0b") == ["a\0b: the file cannot be read: embedded null byte."]

    @pytest.mark.parametrize("overlay", [5, 1.5, True, "", b"own.yaml", {1, 2}, object], ids=repr)
    def test_of_what_is_neither_a_path_nor_a_mapping(self, overlay: object) -> None:
        for given_as in (overlay, [overlay]):
            with pytest.raises(OptionError) as found:
                shipped().overlaid(given_as)
            assert str(found.value) == f"cast_lists holds {overlay!r}; expected the path of a YAML file, or a mapping."

    def test_of_none_in_a_sequence(self) -> None:
        with pytest.raises(OptionError, match="cast_lists holds None"):
            shipped().overlaid([None])


class TestWhatAUserIsToldOfAMapping:
    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({"whitelsit": {}}, f"unknown list 'whitelsit'; {KNOWN} Did you mean 'whitelist'?"),
            ({3: {}}, f"found 3 (which YAML reads as int; {QUOTE}) as a key; {TOP}"),
            ({None: {}}, f"found nothing as a key; {TOP}"),
            ({"whitelist": {"torch": "mm"}}, f"found 'mm'; {NAMES}"),
            (
                {"whitelist": {"torch": ["mm"]}, "blacklist": {"torch": ["mm"]}},
                both("blacklist: {torch: [mm]}", "whitelist: {torch: [mm]}`", "torch.mm"),
            ),
            (
                {"whitelist": {"torch": ["mm", "mm"]}},
                both("whitelist: {torch: [mm]}", "whitelist: {torch: [mm]}`", "torch.mm"),
            ),
            ({"whitelist": {"torch": ["zzz"]}}, f"'torch' has no 'zzz'. {MISSING}"),
            (
                {"blacklist": {"torch": [{"name": "exp", "since": 2.10}]}},
                f"since: found 2.1 (which YAML reads as float; {QUOTE}); {VERSION} Without the quotes it is a number.",
            ),
        ],
        ids=str,
    )
    def test_is_what_a_file_would_get_without_the_line(self, mapping: object, message: str) -> None:
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
    def test_which_holds_what_yaml_could_not_say(self, mapping: Mapping[str, object], found: object) -> None:
        expected = "expected text, numbers, lists and mappings: functions by name, half types as 'float16'."
        assert faults(mapping) == [f"cast_lists: found {found!r}; {expected}"]

    def test_which_contains_itself(self) -> None:
        names: list[object] = ["mm"]
        names.append(names)
        assert faults({"whitelist": {"torch": names}}) == ["cast_lists: it is nested too deeply, or contains itself."]


# One of each kind; that torch is as it was is asserted after every test.
UNSOUND = {
    "syntax": "whitelist: [",
    "unknown list": "whitelsit: {}",
    "no function": "whitelist: {torch: [zzz]}",
    "two lists": "whitelist: {torch: [exp]}\nblacklist: {torch: [exp]}",
    "condition": "blacklist: {torch: [{name: exp, when: {x: [1]}}]}",
}


class TestNothingIsPatched:
    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("content", UNSOUND.values(), ids=UNSOUND)
    def test_by_an_initialize_that_finds_a_fault(self, tmp_path: Path, content: str, half: torch.dtype) -> None:
        model, mm = nn.Linear(1, 1), torch.mm

        with pytest.raises(AmpError, match=r"own\.yaml:"):
            amp.initialize(model, half_dtype=half, cast_lists=write(tmp_path, content))

        assert runtime.live is None
        assert torch.mm is mm
        assert not model._forward_hooks

    def test_and_what_was_on_stays_on(self, tmp_path: Path) -> None:
        with casts_on(torch.bfloat16):
            live, mm = runtime.live, torch.mm
            with pytest.raises(CastListError):
                amp.initialize(nn.Linear(1, 1), cast_lists=write(tmp_path, "whitelsit: {}"))
            assert runtime.live is live
            assert torch.mm is mm

"""Cast lists: the form of files and mappings, and the rules that follow (test_reader.py has mistakes)."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path as FilePath
from types import MappingProxyType, ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import HALF_DTYPES, Write, casts_on, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from samples import LIST_NAMES, LISTS, entries, lacks
from strategies import HALF_NAMES, Move, moves, overlay
from torch import Tensor
from torch.torch_version import TorchVersion

from ampatch import amp
from ampatch.cast_lists.lists import PEERS, CastLists, peer, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.errors import CastListError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
DTYPES = dict(zip(HALF_NAMES, HALF_DTYPES, strict=True))
NONE = CastLists({})


def treatments(lists: CastLists) -> dict[tuple[str, torch.dtype], str]:
    """The name of the list that each path stands in."""
    return {(str(path), dtype): rule.treatment.value for (path, dtype), rule in lists.rules.items()}


def treatment(lists: CastLists, path: str) -> list[str | None]:
    """The lists of one path, in float16 and in bfloat16."""
    return [treatments(lists).get((path, dtype)) for dtype in HALF_DTYPES]


def rule(lists: CastLists, path: str, dtype: torch.dtype = FLOAT16) -> Rule:
    namespace, _, name = path.rpartition(".")
    return lists.rules[Path(namespace, name), dtype]


class TestShipped:
    def test_shipped_rules_are_the_entries_with_their_options(self) -> None:
        rules = {(str(path), dtype): found for (path, dtype), found in shipped().rules.items()}
        for name in LIST_NAMES:
            for entry in [entry for entry in entries(name) if entry.is_in_force and not lacks(entry.path)]:
                when = tuple(sorted((argument, tuple(values)) for argument, values in entry.when.items()))
                for dtype in entry.dtypes:
                    found = rules.pop((entry.path, dtype))
                    assert (found.treatment.value, found.when) == (name, when)
                    options = (found.via_dtype, found.instead or "", found.optional)
                    assert options == (entry.via_dtype, entry.instead, entry.optional)
        assert rules == {}

    def test_a_shipped_rule_has_the_line_of_its_entry(self) -> None:
        lines = {f"{name}.yaml": (LISTS / f"{name}.yaml").read_text().splitlines() for name in LIST_NAMES}
        for found in shipped().rules.values():
            file, _, line = found.source.partition(":")
            assert found.path.name in lines[file][int(line) - 1]

    def test_rules_with_the_same_effect_are_equal(self) -> None:
        one, other = (
            shipped().overlaid({"promote": {"torch": [{"name": "conv2d", "when": when, **more}]}})
            for when, more in (
                ({"groups": [1], "stride": [1]}, {}),
                ({"stride": [1], "groups": [1]}, {"optional": True}),
            )
        )
        assert one == other

    @pytest.mark.skipif(not yaml.__with_libyaml__, reason="this PyYAML is without libyaml")
    def test_shipped_lists_are_the_same_without_libyaml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(yaml, "CSafeLoader")
        slowly = shipped.__wrapped__()
        assert slowly == shipped()
        assert [found.source for found in slowly.rules.values()] == [found.source for found in shipped().rules.values()]

    def test_lists_and_rules_are_immutable(self) -> None:
        lists = shipped()
        with pytest.raises(TypeError):
            lists.rules[Path("torch", "mm"), FLOAT16] = rule(lists, "torch.exp")
        with pytest.raises(FrozenInstanceError):
            lists.rules = {}
        with pytest.raises(FrozenInstanceError):
            rule(lists, "torch.mm").treatment = Treatment.BLACKLIST

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_for_half_returns_the_rules_of_one_half_type(self, dtype: torch.dtype) -> None:
        chosen = shipped().for_half(dtype)
        assert chosen == {path: found for (path, other), found in shipped().rules.items() if other is dtype}
        assert (Path("torch", "exp") in chosen) == (dtype is FLOAT16)


class TestPeers:
    @pytest.mark.parametrize("name", PEERS)
    def test_a_peer_has_every_name_of_its_file(self, name: str) -> None:
        document = yaml.safe_load((LISTS / "peers" / f"{name}.yaml").read_text())
        named = {
            (f"{namespace}.{function}", list_name)
            for list_name, namespaces in document.items()
            for namespace, functions in namespaces.items()
            for function in functions
        }
        assert {(path, found) for (path, _), found in treatments(peer(name)).items()} == named

    def test_a_peer_keeps_names_that_torch_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch, "conv_tbc")
        assert treatment(peer.__wrapped__("apex"), "torch.conv_tbc") == ["whitelist", "whitelist"]


class TestMoving:
    def test_a_function_named_again_has_the_new_options_only(self) -> None:
        assert rule(shipped(), "torch.sum").via_dtype
        lists = shipped().overlaid({"blacklist": {"torch": ["sum"]}})
        assert not rule(lists, "torch.sum").via_dtype

    @pytest.mark.parametrize(("moved", "other"), [("mm", "spmm"), ("spmm", "mm")])
    def test_equal_builtins_are_different_functions(self, moved: str, other: str) -> None:
        assert torch.mm == torch.spmm
        lists = shipped().overlaid({"promote": {"torch": [moved]}})
        assert treatment(lists, f"torch.{moved}") == ["promote", "promote"]
        assert treatment(lists, f"torch.{other}") == ["whitelist", "whitelist"]


class TestNamesOfOneFunction:
    def test_functions_without_a_hash_are_told_apart_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Unhashable:
            __hash__ = None

            def __call__(self) -> None: ...

        function = Unhashable()
        for name in ("of_mine", "of_mine_too"):
            monkeypatch.setattr(torch, name, function, raising=False)

        lists = shipped().overlaid({"promote": {"torch": ["of_mine"]}, "blacklist": {"torch": ["of_mine_too"]}})

        assert treatment(lists, "torch.of_mine") == ["promote", "promote"]
        assert treatment(lists, "torch.of_mine_too") == ["blacklist", "blacklist"]

    def test_class_methods_are_told_apart_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class One(torch.autograd.Function): ...

        class Other(torch.autograd.Function): ...

        package = ModuleType("of_functions")
        package.One, package.Other = One, Other  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "of_functions", package)
        both = {"of_functions.One": ["apply"], "of_functions.Other": ["apply"]}

        # Each look-up of `apply` binds a new method, at the address of an earlier one.
        for _ in range(20):
            lists = shipped().overlaid([{"whitelist": both}, {"blacklist": {"of_functions.One": ["apply"]}}])
            assert treatment(lists, "of_functions.One.apply") == ["blacklist", "blacklist"]
            assert treatment(lists, "of_functions.Other.apply") == ["whitelist", "whitelist"]

    @pytest.mark.parametrize("target", ["blacklist", "unlisted"])
    def test_names_of_one_function_are_recognised_under_casts(self, target: str) -> None:
        mapping = {target: {"torch": ["conv2d"]}}
        before, original = shipped().overlaid(mapping), torch.conv2d

        with casts_on(FLOAT16):
            assert torch.conv2d is not original
            assert shipped().overlaid(mapping) == before


MM = {"unlisted": {"torch": ["mm"]}}
PRODUCTS = ["mm", "bmm"]


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "mapping"),
        [
            *((content, {}) for content in ("", "# nothing\n", "{}", "---\n", "whitelist:\n", "whitelist: {}")),
            ("whitelist:\n  torch:\n", {}),
            ("unlisted: {torch: [[], []]}", {}),
            (b"\xef\xbb\xbfunlisted: {torch: [mm]}", MM),
            ('"unlisted": {"torch": ["mm"]}', MM),
            (
                "blacklist:\n  torch:\n  - [mm, [bmm]]\n  - - {name: mv, dtypes: [float16]}\n",
                {"blacklist": {"torch": [*PRODUCTS, {"name": "mv", "dtypes": ["float16"]}]}},
            ),
            (
                "blacklist:\n  torch:\n  - &products [mm, bmm]\n  torch.Tensor:\n  - *products\n",
                {"blacklist": {"torch": PRODUCTS, "torch.Tensor": PRODUCTS}},
            ),
        ],
        ids=repr,
    )
    def test_a_file_means_what_a_mapping_means(
        self, write: Write, content: str | bytes, mapping: dict[str, object]
    ) -> None:
        lists = shipped().overlaid(write(content))
        assert lists == shipped().overlaid(mapping)
        assert (lists == shipped()) == (not mapping)

    def test_a_rule_has_file_and_line_which_make_no_difference(self, write: Write) -> None:
        file = write("blacklist:\n  torch:\n  - mm\n  - {name: bmm}\n")
        lists = shipped().overlaid(file)
        assert rule(lists, "torch.mm").source == f"{file}:3"
        assert rule(lists, "torch.bmm").source == f"{file}:4"

        mapping = shipped().overlaid({"blacklist": {"torch": PRODUCTS}})
        assert rule(mapping, "torch.mm").source == "cast_lists"
        assert mapping == lists


EVERY_OPTION = {
    "whitelist": {"torch": ["relu", ["log", ("exp",)]]},
    "blacklist": {
        "torch.nn.functional": [
            {"name": "interpolate", "when": {"mode": ["area", "bicubic"], "antialias": [True, None, 1, 0.5]}},
            {"name": "softmax", "via_dtype": True, "dtypes": ["bfloat16"], "optional": False},
        ]
    },
    "banned": {"torch": [{"name": "dot", "instead": 'don\'t: use "vdot"\nor mv', "since": "2.0", "until": "99"}]},
    "unlisted": {"torch": None},
    "promote": None,
}


class TestMappings:
    def test_a_mapping_with_every_option_means_what_a_file_means(self, write: Write) -> None:
        as_lists = {**EVERY_OPTION, "whitelist": {"torch": ["relu", ["log", ["exp"]]]}}
        file = write(yaml.safe_dump(as_lists, sort_keys=False))
        assert shipped().overlaid(EVERY_OPTION) == shipped().overlaid(file) != shipped()

    @pytest.mark.parametrize(
        "mapping",
        [
            OrderedDict(unlisted=OrderedDict(torch=["mm"])),
            defaultdict(dict, unlisted=defaultdict(list, torch=["mm"])),
            MappingProxyType({"unlisted": MappingProxyType({"torch": ("mm",)})}),
            ChainMap({"unlisted": {"torch": ["mm"]}}),
        ],
        ids=lambda mapping: type(mapping).__name__,
    )
    def test_a_mapping_may_be_of_any_class(self, mapping: Mapping[str, object]) -> None:
        assert shipped().overlaid(mapping) == shipped().overlaid(MM)

    def test_a_mapping_is_not_changed(self) -> None:
        shared = ["mm"]
        mapping = {"blacklist": {"torch": shared, "torch.Tensor": shared}}
        shipped().overlaid(mapping)
        assert mapping == {"blacklist": {"torch": ["mm"], "torch.Tensor": ["mm"]}}


RELEASE = ".".join(torch.__version__.split(".")[:2])
OLDER, NEWER = "2.0", "99.1"


class TestVersions:
    @pytest.mark.parametrize(
        ("limits", "applies"),
        [
            ({"since": OLDER}, True),
            ({"since": RELEASE}, True),
            ({"since": NEWER}, False),
            ({"until": OLDER}, False),
            ({"until": RELEASE}, False),  # the first that no longer needs it
            ({"until": NEWER}, True),
            ({"since": OLDER, "until": NEWER}, True),
            ({"since": OLDER, "until": RELEASE}, False),
            ({"since": NEWER, "until": "99.2"}, False),
        ],
        ids=str,
    )
    def test_an_entry_applies_from_since_and_before_until(self, limits: dict[str, str], applies: bool) -> None:
        lists = shipped().overlaid({"blacklist": {"torch": [{"name": "mm", **limits}]}})
        assert treatment(lists, "torch.mm") == (["blacklist"] * 2 if applies else ["whitelist"] * 2)

    @pytest.mark.parametrize(
        ("running", "version", "reached"),
        [
            ("2.10.0", "2.10", True),
            ("2.10.0", "2.10.0", True),
            ("2.10.0+cpu", "2.10.0", True),
            ("2.10.0", "2.9", True),  # not a decimal number
            ("2.10.0", "2.10.1", False),
            ("2.9.1", "2.10", False),
            ("2.10.0a0+git1234", "2.10", False),
            ("3.0.0", "3", True),
        ],
    )
    def test_a_version_is_compared_with_the_running_torch(
        self, monkeypatch: pytest.MonkeyPatch, running: str, version: str, reached: bool
    ) -> None:
        monkeypatch.setattr(torch, "__version__", TorchVersion(running))
        since = {"blacklist": {"torch": [{"name": "mm", "since": version}]}}
        until = {"blacklist": {"torch": [{"name": "mm", "until": version}]}}
        assert bool(NONE.overlaid(since).rules) == reached
        assert bool(NONE.overlaid(until).rules) != reached

    def test_functions_of_entries_for_other_torches_need_not_exist(self) -> None:
        coming = {"name": "of_another_release", "since": NEWER}
        gone = {"name": "of_an_earlier_release", "until": OLDER}
        assert shipped().overlaid({"blacklist": {"torch": [coming, gone]}}) == shipped()

    def test_entries_for_different_releases_do_not_clash(self) -> None:
        before = {"name": "mm", "until": RELEASE}
        after = {"name": "mm", "since": RELEASE}
        lists = shipped().overlaid({"blacklist": {"torch": [before]}, "promote": {"torch": [after]}})
        assert treatment(lists, "torch.mm") == ["promote", "promote"]


@pytest.mark.parametrize(
    "namespace", ["torch", "torch.nowhere", "no_such_package_is_installed.ops"], ids=["name", "module", "package"]
)
def test_an_optional_function_may_be_missing(namespace: str) -> None:
    entries = {namespace: [{"name": "not_there", "optional": True}], "torch.Tensor": [{"name": "mm", "optional": True}]}
    lists = shipped().overlaid({"promote": entries})
    assert lists == shipped().overlaid({"promote": {"torch.Tensor": ["mm"]}}) != shipped()


class TestModulesThatAreNotImported:
    @pytest.fixture
    def later(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "imported_later.py").write_text("def double(x):\n    return x * 2\nalias = double\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield "imported_later"
        sys.modules.pop("imported_later", None)

    def test_aliases_clash_only_once_their_module_is_imported(self, later: str) -> None:
        lists = shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["alias"]}})
        assert treatment(lists, f"{later}.double") != treatment(lists, f"{later}.alias")

        __import__(later)

        with pytest.raises(CastListError, match="which is the same function as"):
            shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["alias"]}})

    def test_a_name_of_a_later_module_clashes_with_itself(self, later: str) -> None:
        with pytest.raises(CastListError, match=r"blacklist: .* here and `whitelist: .* both stand for \w+\.double;"):
            shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["double"]}})


class TestConditions:
    def cast_by(self, function: str, when: dict[str, list[object]]) -> dict[str, object]:
        namespace, _, name = function.rpartition(".")
        return {"blacklist": {namespace: [{"name": name, "when": when}]}}

    @pytest.mark.parametrize(
        ("function", "when", "calls", "others"),
        [
            pytest.param(
                "torch.nn.functional.gelu",
                {"approximate": ["tanh"]},
                [lambda x: F.gelu(x, approximate="tanh")],
                [lambda x: F.gelu(x, approximate="none"), lambda x: F.gelu(x)],  # noqa: PLW0108 - it is patched later
                id="builtin by keyword",
            ),
            pytest.param(
                "torch.nn.functional.gelu",
                {"approximate": ["none"]},
                [lambda x: F.gelu(x)],  # noqa: PLW0108
                [],
                id="builtin by default",
            ),
            pytest.param(
                "torch.narrow",
                {"dim": [1]},
                [lambda x: torch.narrow(x, 1, 0, 1), lambda x: torch.narrow(x, dim=1, start=0, length=1)],
                [lambda x: torch.narrow(x, 0, 0, 1)],
                id="builtin by position",
            ),
            pytest.param("torch.flip", {"dims": [0]}, [], [lambda x: torch.flip(x, [0])], id="a list"),
            pytest.param(
                "torch.Tensor.narrow",
                {"dim": [1]},
                [lambda x: x.narrow(1, 0, 1)],
                [lambda x: x.narrow(0, 0, 1)],
                id="method",
            ),
            pytest.param(
                "torch.nn.functional.interpolate",
                {"mode": ["nearest"]},
                [lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, None, 2, "nearest")],
                [lambda x: F.interpolate(x, scale_factor=2, mode="area")],
                id="function in Python",
            ),
            pytest.param(
                "torch.nn.functional.interpolate",
                {"mode": ["nearest", "area"], "scale_factor": [2]},
                [lambda x: F.interpolate(x, scale_factor=2, mode="area")],
                [lambda x: F.interpolate(x, scale_factor=1, mode="area")],
                id="two arguments",
            ),
        ],
    )
    def test_calls_that_meet_the_condition_are_cast(
        self,
        half: torch.dtype,
        function: str,
        when: dict[str, list[object]],
        calls: list[Callable[[Tensor], Tensor]],
        others: list[Callable[[Tensor], Tensor]],
    ) -> None:
        x = torch.ones(1, 1, 2, 2, dtype=half)
        with casts_on(half, cast_lists=self.cast_by(function, when)):
            assert all(call(x).dtype is torch.float32 for call in calls)
            assert all(call(x).dtype is half for call in others)

    def test_numbers_of_numpy_meet_a_condition_and_arrays_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = ModuleType("mine")
        mine.function = lambda x, places: x
        monkeypatch.setitem(sys.modules, "mine", mine)
        x = torch.ones(2, 2, dtype=BFLOAT16)
        with casts_on(cast_lists=self.cast_by("mine.function", {"places": [1]})):
            assert mine.function(x, np.int64(1)).dtype is torch.float32
            assert mine.function(x, np.array([0, 1])).dtype is BFLOAT16

    def test_values_of_a_condition_have_the_types_of_yaml(self, write: Write) -> None:
        file = write("blacklist:\n  torch.nn.functional:\n  - {name: rrelu, when: {lower: ['1', 1, 1.5, true, no, ~]}}")
        ((_, values),) = rule(shipped().overlaid(file), "torch.nn.functional.rrelu").when
        assert repr(values) == repr(("1", 1, 1.5, True, False, None))


class TestLayingOverlays:
    """Properties, over functions with one name and with several, listed and not."""

    @given(st.lists(moves(), max_size=4))
    def test_the_last_overlay_to_name_a_function_wins_under_all_names(self, drawn: list[tuple[Move, ...]]) -> None:
        overlays = [overlay(moved) for moved in drawn]
        after = treatments(shipped())
        for move in itertools.chain(*drawn):
            for key in itertools.product(move.names, (DTYPES[half] for half in move.half_names)):
                after[key] = move.list_name

        lists = shipped().overlaid(overlays)

        assert treatments(lists) == {key: name for key, name in after.items() if name != "unlisted"}
        assert lists == functools.reduce(CastLists.overlaid, overlays, shipped())

    @given(moves())
    def test_an_overlay_changes_what_it_names(
        self, tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Move, ...]
    ) -> None:
        mapping, named = overlay(drawn), {name for move in drawn for name in move.names}
        lists = shipped().overlaid(mapping)

        kept = [
            {key: found for key, found in each.rules.items() if str(key[0]) not in named} for each in (lists, shipped())
        ]
        assert kept[0] == kept[1]
        alone = {
            (move.spelling, DTYPES[half]): move.list_name
            for move in drawn
            for half in move.half_names
            if move.list_name != "unlisted"
        }
        assert alone.items() <= treatments(NONE.overlaid(mapping)).items()

        unlisted = overlay(replace(move, list_name="unlisted") for move in drawn)
        file = tmp_path_factory.getbasetemp() / "drawn.yaml"
        file.write_text(yaml.safe_dump(mapping))
        for same in ([mapping, mapping], [unlisted, mapping], file):
            assert shipped().overlaid(same) == lists


class Located:
    """A path of another library: it has nothing but `__fspath__`."""

    def __init__(self, file: str | FilePath) -> None:
        self._path = os.fspath(file)

    def __fspath__(self) -> str | bytes:
        return self._path


class LocatedInBytes(Located):
    def __fspath__(self) -> bytes:
        return os.fsencode(self._path)


class TestPaths:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own.yaml").write_text("blacklist: {torch: [mm]}\n")
        (tmp_path / "faulty.yaml").write_text("blacklist: {torch: [mmm]}\n")
        monkeypatch.setenv("HOME", str(tmp_path))

    @pytest.mark.parametrize("several", [False, True], ids=["alone", "in-a-list"])
    @pytest.mark.parametrize("form", [str, FilePath, Located, LocatedInBytes], ids=lambda form: form.__name__)
    def test_a_path_below_the_home_is_named_in_full(self, form, several: bool, tmp_path: FilePath) -> None:
        given = form("~/own.yaml")
        rule = shipped().overlaid([given] if several else given).rules[Path("torch", "mm"), torch.float16]
        assert rule.source == f"{tmp_path}/own.yaml:1"

    def test_a_fault_names_the_file_in_full(self, tmp_path: FilePath) -> None:
        with pytest.raises(CastListError, match=re.escape(f"{tmp_path}/faulty.yaml:1: 'torch' has no 'mmm'")):
            shipped().overlaid("~/faulty.yaml")

    def test_the_home_of_an_unknown_user_is_a_missing_file(self) -> None:
        with pytest.raises(CastListError, match=r"~nobody\.of\.that\.name/own\.yaml: the file cannot be read"):
            shipped().overlaid("~nobody.of.that.name/own.yaml")

    def test_initialize_and_init_take_paths(self) -> None:
        amp.initialize(torch.nn.Linear(1, 1), cast_lists="~/own.yaml", half_dtype=torch.bfloat16, verbosity=0)
        ones = torch.ones(1, 1, dtype=torch.bfloat16)
        assert torch.mm(ones, ones).dtype is torch.float32
        amp.deinitialize()
        with amp.init(cast_lists=Located(FilePath("~/own.yaml")), half_dtype=torch.bfloat16):
            assert torch.mm(ones, ones).dtype is torch.float32

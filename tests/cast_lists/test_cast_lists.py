"""The cast lists: what a file may say, and what comes of it (mistakes are in test_cast_list_faults.py)."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path as FilePath
from types import MappingProxyType, ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import HALF_DTYPES, casts_on, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from samples import LIST_NAMES, LISTS, entries, lacks
from strategies import HALF_NAMES, Move, moves, overlay
from torch import nn
from torch.torch_version import TorchVersion

from ampatch import amp
from ampatch.cast_lists.lists import PEERS, CastLists, peer, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.errors import AmpError, CastListError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
DTYPES = dict(zip(HALF_NAMES, HALF_DTYPES, strict=True))
NONE = CastLists({})


@pytest.fixture
def write(tmp_path: FilePath):
    """Writes a file of the user's."""

    def write(content: str | bytes, name: str = "own.yaml") -> FilePath:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


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
    @pytest.mark.parametrize("name", LIST_NAMES)
    def test_every_entry_is_a_rule_with_its_options(self, name: str) -> None:
        for entry in entries(name):
            if not entry.is_in_force or lacks(entry.path):
                continue
            for dtype in entry.dtypes:
                found = rule(shipped(), entry.path, dtype)
                assert found.treatment.value == name
                assert found.when == tuple(sorted((argument, tuple(values)) for argument, values in entry.when.items()))
                assert (found.via_dtype, found.instead or "", found.optional) == (
                    entry.via_dtype,
                    entry.instead,
                    entry.optional,
                )

    def test_there_is_no_other_rule(self) -> None:
        listed = {(entry.path, dtype) for name in LIST_NAMES for entry in entries(name) for dtype in entry.dtypes}
        assert set(treatments(shipped())) <= listed

    def test_a_rule_says_the_line_that_it_stands_in(self) -> None:
        lines = {f"{name}.yaml": (LISTS / f"{name}.yaml").read_text().splitlines() for name in LIST_NAMES}
        for found in shipped().rules.values():
            file, _, line = found.source.partition(":")
            assert found.path.name in lines[file][int(line) - 1]

    def test_rules_are_equal_that_do_the_same(self) -> None:
        one, other = (
            shipped().overlaid({"promote": {"torch": [{"name": "conv2d", "when": when, **more}]}})
            for when, more in (
                ({"groups": [1], "stride": [1]}, {}),
                ({"stride": [1], "groups": [1]}, {"optional": True}),
            )
        )
        assert one == other

    def test_they_are_read_once(self) -> None:
        assert shipped() is shipped()

    @pytest.mark.skipif(not yaml.__with_libyaml__, reason="this PyYAML is without libyaml")
    def test_they_are_the_same_without_libyaml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(yaml, "CSafeLoader")
        slowly = shipped.__wrapped__()
        assert slowly == shipped()
        assert [found.source for found in slowly.rules.values()] == [found.source for found in shipped().rules.values()]

    def test_they_cannot_be_changed(self) -> None:
        lists = shipped()
        with pytest.raises(TypeError):
            lists.rules[Path("torch", "mm"), FLOAT16] = rule(lists, "torch.exp")
        with pytest.raises(FrozenInstanceError):
            lists.rules = {}
        with pytest.raises(FrozenInstanceError):
            rule(lists, "torch.mm").treatment = Treatment.BLACKLIST

    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_for_one_half_type_there_are_the_rules_of_that_type(self, dtype: torch.dtype) -> None:
        chosen = shipped().for_half(dtype)
        assert chosen == {path: found for (path, other), found in shipped().rules.items() if other is dtype}
        assert (Path("torch", "exp") in chosen) == (dtype is FLOAT16)

    def test_laying_a_change_over_them_leaves_them_as_they_are(self) -> None:
        before = dict(shipped().rules)
        shipped().overlaid({"unlisted": {"torch": ["mm"]}})
        assert shipped().rules == before


class TestPeers:
    @pytest.mark.parametrize("name", PEERS)
    def test_each_loads_with_every_name_that_its_file_has(self, name: str) -> None:
        document = yaml.safe_load((LISTS / "peers" / f"{name}.yaml").read_text())
        named = {
            (f"{namespace}.{function}", list_name)
            for list_name, namespaces in document.items()
            for namespace, functions in namespaces.items()
            for function in functions
        }
        assert {(path, found) for (path, _), found in treatments(peer(name)).items()} == named

    def test_a_name_that_torch_lacks_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch, "conv_tbc")
        assert treatment(peer.__wrapped__("apex"), "torch.conv_tbc") == ["whitelist", "whitelist"]


class TestMoving:
    def test_a_function_goes_from_the_list_it_stood_in_to_the_one_named(self) -> None:
        lists = shipped().overlaid({"blacklist": {"torch": ["mm"]}, "promote": {"torch": ["relu"]}})

        assert treatment(shipped(), "torch.mm") == ["whitelist", "whitelist"]
        assert treatment(lists, "torch.mm") == ["blacklist", "blacklist"]
        assert treatment(shipped(), "torch.relu") == [None, None]
        assert treatment(lists, "torch.relu") == ["promote", "promote"]

    @pytest.mark.parametrize("half", HALF_NAMES)
    def test_for_one_half_type_the_other_stays(self, half: str) -> None:
        lists = shipped().overlaid({"promote": {"torch": [{"name": "mm", "dtypes": [half]}]}})

        expected = ["promote" if name == half else "whitelist" for name in HALF_NAMES]
        assert treatment(lists, "torch.mm") == expected

    def test_a_function_can_be_in_a_list_for_each_half_type(self) -> None:
        lists = shipped().overlaid(
            {
                "blacklist": {"torch": [{"name": "mm", "dtypes": ["float16"]}]},
                "promote": {"torch": [{"name": "mm", "dtypes": ["bfloat16"]}]},
            }
        )
        assert treatment(lists, "torch.mm") == ["blacklist", "promote"]

    def test_unlisted_takes_it_out(self) -> None:
        lists = shipped().overlaid({"unlisted": {"torch": ["mm", {"name": "log", "dtypes": ["float16"]}, "relu"]}})

        assert treatment(lists, "torch.mm") == [None, None]
        assert treatment(lists, "torch.log") == [None, "blacklist"]
        assert treatment(lists, "torch.relu") == [None, None]

    def test_named_again_in_its_own_list_it_has_the_new_options_only(self) -> None:
        assert rule(shipped(), "torch.sum").via_dtype
        lists = shipped().overlaid({"blacklist": {"torch": ["sum"]}})
        assert not rule(lists, "torch.sum").via_dtype

    def test_a_method_is_not_the_function_of_its_name(self) -> None:
        lists = shipped().overlaid({"unlisted": {"torch": ["mm"]}})
        assert treatment(lists, "torch.Tensor.mm") == ["whitelist", "whitelist"]

    def test_everything_else_stays(self) -> None:
        lists = shipped().overlaid({"unlisted": {"torch": ["mm"]}})
        assert {key: found for key, found in shipped().rules.items() if str(key[0]) != "torch.mm"} == lists.rules

    @pytest.mark.parametrize(("moved", "other"), [("mm", "spmm"), ("spmm", "mm")])
    def test_a_builtin_that_is_equal_is_another_function(self, moved: str, other: str) -> None:
        assert torch.mm == torch.spmm
        lists = shipped().overlaid({"promote": {"torch": [moved]}})
        assert treatment(lists, f"torch.{moved}") == ["promote", "promote"]
        assert treatment(lists, f"torch.{other}") == ["whitelist", "whitelist"]


FIRST = {"blacklist": {"torch": ["mm", "bmm"]}}
SECOND = {"promote": {"torch": ["mm"]}, "unlisted": {"torch": ["exp"]}}


class TestSeveralOverlays:
    def test_are_laid_in_their_order(self) -> None:
        lists = shipped().overlaid([FIRST, SECOND])

        assert treatment(lists, "torch.mm") == ["promote", "promote"]
        assert treatment(lists, "torch.bmm") == ["blacklist", "blacklist"]
        assert treatment(lists, "torch.exp") == [None, None]
        assert lists == shipped().overlaid(FIRST).overlaid(SECOND)
        assert lists != shipped().overlaid((SECOND, FIRST))

    def test_may_be_files_and_mappings(self, write) -> None:
        mixed = [write(yaml.safe_dump(FIRST)), SECOND]
        assert shipped().overlaid(mixed) == shipped().overlaid([FIRST, SECOND])

    def test_may_be_none(self) -> None:
        assert shipped().overlaid([]) == shipped()

    def test_one_function_may_stand_in_two_lists_of_two_files(self, write) -> None:
        files = [write("promote: {torch: [mm]}", "a.yaml"), write("blacklist: {torch: [mm]}", "b.yaml")]
        assert treatment(shipped().overlaid(files), "torch.mm") == ["blacklist", "blacklist"]


class TestNamesOfOneFunction:
    @pytest.mark.parametrize(
        "names",
        [("torch.conv2d", "torch.nn.functional.conv2d"), ("torch.lstm", "torch._VF.lstm")],
        ids=lambda names: names[0],
    )
    @pytest.mark.parametrize("spelling", [0, 1], ids=["one", "other"])
    @pytest.mark.parametrize("target", ["blacklist", "unlisted"])
    def test_move_together(self, names: tuple[str, str], spelling: int, target: str) -> None:
        namespace, _, name = names[spelling].rpartition(".")

        lists = shipped().overlaid({target: {namespace: [{"name": name, "dtypes": ["float16"]}]}})

        moved = None if target == "unlisted" else target
        assert [treatment(lists, path) for path in names] == [[moved, "whitelist"]] * 2

    def test_come_back_together_after_they_were_unlisted_under_one(self) -> None:
        away = {"unlisted": {"torch": ["conv2d"]}}
        back = {"whitelist": {"torch": ["conv2d"]}}
        assert shipped().overlaid([away, back]) == shipped()
        assert shipped().overlaid([away, {"whitelist": {"torch.nn.functional": ["conv2d"]}}]) == shipped()

    def test_that_cannot_be_compared_are_told_apart_by_their_spelling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Unhashable:
            __hash__ = None

            def __call__(self) -> None: ...

        function = Unhashable()
        for name in ("of_mine", "of_mine_too"):
            monkeypatch.setattr(torch, name, function, raising=False)

        lists = shipped().overlaid({"promote": {"torch": ["of_mine"]}, "blacklist": {"torch": ["of_mine_too"]}})

        assert treatment(lists, "torch.of_mine") == ["promote", "promote"]
        assert treatment(lists, "torch.of_mine_too") == ["blacklist", "blacklist"]

    def test_may_both_be_named_with_the_same_options(self) -> None:
        entry = {"name": "conv2d", "when": {"groups": [1]}}
        lists = shipped().overlaid({"promote": {"torch": [entry], "torch.nn.functional": [entry]}})

        assert rule(lists, "torch.conv2d").when == rule(lists, "torch.nn.functional.conv2d").when != ()

    def test_may_be_named_in_two_lists_for_different_half_types(self) -> None:
        lists = shipped().overlaid(
            {
                "blacklist": {"torch": [{"name": "conv2d", "dtypes": ["float16"]}]},
                "promote": {"torch.nn.functional": [{"name": "conv2d", "dtypes": ["bfloat16"]}]},
            }
        )
        assert treatment(lists, "torch.conv2d") == ["blacklist", "promote"]
        assert treatment(lists, "torch.nn.functional.conv2d") == ["blacklist", "promote"]

    @pytest.mark.parametrize("target", ["blacklist", "unlisted"])
    def test_are_recognised_while_functions_are_patched(self, target: str) -> None:
        mapping = {target: {"torch": ["conv2d"]}}
        before, original = shipped().overlaid(mapping), torch.conv2d

        with casts_on(FLOAT16):
            assert torch.conv2d is not original
            assert shipped().overlaid(mapping) == before


class TestTheFormOfAFile:
    @pytest.mark.parametrize(
        "content",
        [
            "",
            "# nothing\n",
            "{}",
            "---\n",
            "whitelist:\n",
            "whitelist: {}",
            "whitelist:\n  torch:\n",
            "whitelist: {torch: []}",
            "unlisted: {torch: [[], []]}",
        ],
        ids=repr,
    )
    def test_an_empty_file_list_or_namespace_changes_nothing(self, write, content: str) -> None:
        assert shipped().overlaid(write(content)) == shipped()

    def test_lists_in_a_list_are_one_list(self, write) -> None:
        flat = write("blacklist:\n  torch: [mm, bmm, {name: mv, dtypes: [float16]}]\n", "flat.yaml")
        nested = write("blacklist:\n  torch:\n  - [mm, [bmm]]\n  - - {name: mv, dtypes: [float16]}\n")
        assert shipped().overlaid(nested) == shipped().overlaid(flat)

    def test_an_anchor_shares_names_between_namespaces(self, write) -> None:
        file = write("blacklist:\n  torch:\n  - &products [mm, bmm]\n  torch.Tensor:\n  - *products\n")
        lists = shipped().overlaid(file)
        for path in ("torch.mm", "torch.bmm", "torch.Tensor.mm", "torch.Tensor.bmm"):
            assert treatment(lists, path) == ["blacklist", "blacklist"]

    def test_a_byte_order_mark_is_no_text(self, write) -> None:
        assert shipped().overlaid(write(b"\xef\xbb\xbfunlisted: {torch: [mm]}")) != shipped()

    def test_a_name_may_be_quoted(self, write) -> None:
        assert shipped().overlaid(write('"unlisted": {"torch": ["mm"]}')) == shipped().overlaid(
            {"unlisted": {"torch": ["mm"]}}
        )

    def test_the_path_may_be_text_or_a_path(self, write) -> None:
        file = write("unlisted: {torch: [mm]}")
        assert shipped().overlaid(str(file)) == shipped().overlaid(file)

    def test_a_rule_says_file_and_line(self, write) -> None:
        file = write("blacklist:\n  torch:\n  - mm\n  - {name: bmm}\n")
        lists = shipped().overlaid(file)
        assert rule(lists, "torch.mm").source == f"{file}:3"
        assert rule(lists, "torch.bmm").source == f"{file}:4"

    def test_where_a_rule_stands_makes_no_other_lists(self, write) -> None:
        one = shipped().overlaid(write("blacklist: {torch: [mm]}", "one.yaml"))
        other = shipped().overlaid(write("# why\n\nblacklist: {torch: [mm]}", "other.yaml"))
        assert rule(one, "torch.mm").source != rule(other, "torch.mm").source
        assert one == other


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


class TestAMapping:
    def test_means_what_a_file_of_the_same_form_means(self, write) -> None:
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
    def test_may_be_of_any_class(self, mapping: Mapping[str, object]) -> None:
        assert shipped().overlaid(mapping) == shipped().overlaid({"unlisted": {"torch": ["mm"]}})

    def test_has_no_lines(self) -> None:
        assert rule(shipped().overlaid({"blacklist": {"torch": ["mm"]}}), "torch.mm").source == "cast_lists"

    def test_is_not_changed(self) -> None:
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
    def test_an_entry_applies_from_the_one_and_before_the_other(self, limits: dict[str, str], applies: bool) -> None:
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
    def test_a_version_is_reached_by_the_running_one(
        self, monkeypatch: pytest.MonkeyPatch, running: str, version: str, reached: bool
    ) -> None:
        monkeypatch.setattr(torch, "__version__", TorchVersion(running))
        since = {"blacklist": {"torch": [{"name": "mm", "since": version}]}}
        until = {"blacklist": {"torch": [{"name": "mm", "until": version}]}}
        assert bool(NONE.overlaid(since).rules) == reached
        assert bool(NONE.overlaid(until).rules) != reached

    def test_what_is_not_for_this_torch_need_not_exist_in_it(self) -> None:
        coming = {"name": "of_another_release", "since": NEWER}
        gone = {"name": "of_an_earlier_release", "until": OLDER}
        assert shipped().overlaid({"blacklist": {"torch": [coming, gone]}}) == shipped()

    def test_two_entries_for_different_releases_do_not_meet(self) -> None:
        before = {"name": "mm", "until": RELEASE}
        after = {"name": "mm", "since": RELEASE}
        lists = shipped().overlaid({"blacklist": {"torch": [before]}, "promote": {"torch": [after]}})
        assert treatment(lists, "torch.mm") == ["promote", "promote"]


class TestOptional:
    @pytest.mark.parametrize(
        "namespace", ["torch", "torch.nowhere", "no_such_package_is_installed.ops"], ids=["name", "module", "package"]
    )
    def test_what_is_not_there_is_passed_over(self, namespace: str) -> None:
        entry = {"name": "not_there", "optional": True}
        assert shipped().overlaid({"whitelist": {namespace: [entry]}}) == shipped()

    def test_what_is_there_is_listed(self) -> None:
        lists = shipped().overlaid({"promote": {"torch": [{"name": "mm", "optional": True}]}})
        assert treatment(lists, "torch.mm") == ["promote", "promote"]


class TestAModuleNotImportedYet:
    @pytest.fixture
    def later(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "imported_later.py").write_text("def double(x):\n    return x * 2\nalias = double\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield "imported_later"
        sys.modules.pop("imported_later", None)

    def test_is_taken_on_trust_and_not_imported(self, later: str) -> None:
        lists = shipped().overlaid({"whitelist": {later: ["double", "whatever"]}})

        assert treatment(lists, f"{later}.double") == ["whitelist", "whitelist"]
        assert treatment(lists, f"{later}.whatever") == ["whitelist", "whitelist"]
        assert later not in sys.modules

    def test_its_names_are_told_apart_by_their_spelling(self, later: str) -> None:
        lists = shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["alias"]}})
        assert treatment(lists, f"{later}.double") != treatment(lists, f"{later}.alias")

        __import__(later)

        with pytest.raises(CastListError, match="which is the same function as"):
            shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["alias"]}})

    def test_cannot_stand_in_two_lists_under_one_spelling(self, later: str) -> None:
        with pytest.raises(CastListError, match=r"blacklist: .* here and `whitelist: .* both stand for \w+\.double;"):
            shipped().overlaid({"whitelist": {later: ["double"]}, "blacklist": {later: ["double"]}})

    def test_casts_once_it_is_imported(self, later: str) -> None:
        with casts_on(BFLOAT16, cast_lists={"whitelist": {later: ["double"]}}):
            module = __import__(later)
            assert module.double(torch.ones(2)).dtype is BFLOAT16


class TestConditions:
    def cast_by(self, function: str, when: dict[str, list[object]]) -> dict[str, object]:
        namespace, _, name = function.rpartition(".")
        return {"blacklist": {namespace: [{"name": name, "when": when}]}}

    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    def test_on_a_builtin_are_read_by_keyword_and_by_default(self, half: torch.dtype) -> None:
        x = torch.ones(2, dtype=half)
        with casts_on(half, cast_lists=self.cast_by("torch.nn.functional.gelu", {"approximate": ["tanh"]})):
            assert F.gelu(x, approximate="tanh").dtype is torch.float32
            assert F.gelu(x, approximate="none").dtype is half
            assert F.gelu(x).dtype is half
        with casts_on(half, cast_lists=self.cast_by("torch.nn.functional.gelu", {"approximate": ["none"]})):
            assert F.gelu(x).dtype is torch.float32

    def test_on_a_builtin_are_read_by_position(self) -> None:
        x = torch.ones(2, 2, dtype=BFLOAT16)
        with casts_on(cast_lists=self.cast_by("torch.flip", {"dims": [0]})):  # never equal to a list
            assert torch.flip(x, [0]).dtype is BFLOAT16
        with casts_on(cast_lists=self.cast_by("torch.narrow", {"dim": [1]})):
            assert torch.narrow(x, 1, 0, 1).dtype is torch.float32
            assert torch.narrow(x, dim=1, start=0, length=1).dtype is torch.float32
            assert torch.narrow(x, 0, 0, 1).dtype is BFLOAT16

    def test_on_a_method_count_the_tensor(self) -> None:
        x = torch.ones(2, 2, dtype=BFLOAT16)
        with casts_on(cast_lists=self.cast_by("torch.Tensor.narrow", {"dim": [1]})):
            assert x.narrow(1, 0, 1).dtype is torch.float32
            assert x.narrow(0, 0, 1).dtype is BFLOAT16

    def test_on_a_python_function_see_its_default(self) -> None:
        image = torch.ones(1, 1, 2, 2, dtype=BFLOAT16)
        with casts_on(cast_lists=self.cast_by("torch.nn.functional.interpolate", {"mode": ["nearest"]})):
            assert F.interpolate(image, scale_factor=2).dtype is torch.float32
            assert F.interpolate(image, None, 2, "nearest").dtype is torch.float32
            assert F.interpolate(image, scale_factor=2, mode="area").dtype is BFLOAT16

    def test_hold_for_numbers_of_numpy_and_for_no_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = ModuleType("mine")
        mine.function = lambda x, places: x
        monkeypatch.setitem(sys.modules, "mine", mine)
        x = torch.ones(2, 2, dtype=BFLOAT16)
        with casts_on(cast_lists=self.cast_by("mine.function", {"places": [1]})):
            assert mine.function(x, np.int64(1)).dtype is torch.float32
            assert mine.function(x, np.array([0, 1])).dtype is BFLOAT16

    def test_have_all_to_hold(self) -> None:
        image = torch.ones(1, 1, 2, 2, dtype=BFLOAT16)
        when = {"mode": ["nearest", "area"], "scale_factor": [2]}
        with casts_on(cast_lists=self.cast_by("torch.nn.functional.interpolate", when)):
            assert F.interpolate(image, scale_factor=2, mode="area").dtype is torch.float32
            assert F.interpolate(image, scale_factor=1, mode="area").dtype is BFLOAT16

    def test_hold_the_values_as_yaml_reads_them(self, write) -> None:
        file = write("blacklist:\n  torch.nn.functional:\n  - {name: rrelu, when: {lower: ['1', 1, 1.5, true, no, ~]}}")
        ((_, values),) = rule(shipped().overlaid(file), "torch.nn.functional.rrelu").when
        assert repr(values) == repr(("1", 1, 1.5, True, False, None))


class TestASecondModel:
    @pytest.mark.parametrize("form", ["file", "mapping"])
    def test_joins_under_the_same_lists(self, write, form: str) -> None:
        mapping = {"blacklist": {"torch": ["conv2d", {"name": "sum", "when": {"keepdim": [True]}}]}}
        given_as = write(yaml.safe_dump(mapping)) if form == "file" else mapping
        for _ in range(2):
            amp.initialize(nn.Linear(1, 1), half_dtype=BFLOAT16, cast_lists=given_as, verbosity=0)
        amp.deinitialize()

    def test_under_other_lists_is_refused(self) -> None:
        amp.initialize(nn.Linear(1, 1), half_dtype=BFLOAT16, cast_lists={"unlisted": {"torch": ["mm"]}}, verbosity=0)
        with pytest.raises(AmpError, match="with other settings: cast_lists"):
            amp.initialize(
                nn.Linear(1, 1), half_dtype=BFLOAT16, cast_lists={"unlisted": {"torch": ["bmm"]}}, verbosity=0
            )
        amp.deinitialize()


class TestLayingOverlays:
    """Properties, over functions with one name and with several, listed and not."""

    def moved(self, before: dict[tuple[str, torch.dtype], str], overlays: Iterable[Iterable[Move]]) -> object:
        """What `treatments` has to be once overlays are laid over lists."""
        after = dict(before)
        for move in itertools.chain(*overlays):
            for key in itertools.product(move.names, (DTYPES[half] for half in move.half_names)):
                after[key] = move.list_name
        return {key: list_name for key, list_name in after.items() if list_name != "unlisted"}

    @given(st.lists(moves(), max_size=4))
    def test_the_last_one_to_name_a_function_wins_under_all_its_names(self, drawn: list[tuple[Move, ...]]) -> None:
        lists = shipped().overlaid([overlay(moved) for moved in drawn])

        assert treatments(lists) == self.moved(treatments(shipped()), drawn)

    @given(moves())
    def test_functions_that_are_not_named_keep_their_rules(self, drawn: tuple[Move, ...]) -> None:
        named = {name for move in drawn for name in move.names}

        lists = shipped().overlaid(overlay(drawn))

        kept = [
            {key: found for key, found in each.rules.items() if str(key[0]) not in named} for each in (lists, shipped())
        ]
        assert kept[0] == kept[1]

    @given(moves())
    def test_twice_is_once(self, drawn: tuple[Move, ...]) -> None:
        mapping = overlay(drawn)
        assert shipped().overlaid([mapping, mapping]) == shipped().overlaid(mapping)

    @given(moves())
    def test_unlisted_first_makes_no_difference(self, drawn: tuple[Move, ...]) -> None:
        unlisted = overlay(replace(move, list_name="unlisted") for move in drawn)
        assert shipped().overlaid([unlisted, overlay(drawn)]) == shipped().overlaid(overlay(drawn))

    @given(st.lists(moves(), max_size=3))
    def test_one_by_one_and_all_at_once_are_the_same(self, drawn: list[tuple[Move, ...]]) -> None:
        one_by_one = shipped()
        for moved in drawn:
            one_by_one = one_by_one.overlaid(overlay(moved))
        assert one_by_one == shipped().overlaid([overlay(moved) for moved in drawn])

    @given(moves())
    def test_a_file_and_a_mapping_are_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Move, ...]
    ) -> None:
        file = tmp_path_factory.getbasetemp() / "drawn.yaml"
        file.write_text(yaml.safe_dump(overlay(drawn)))
        assert shipped().overlaid(file) == shipped().overlaid(overlay(drawn))

    @given(moves())
    def test_over_nothing_there_is_what_was_named(self, drawn: tuple[Move, ...]) -> None:
        expected = {
            (move.spelling, DTYPES[half]): move.list_name
            for move in drawn
            for half in move.half_names
            if move.list_name != "unlisted"
        }
        assert expected.items() <= treatments(NONE.overlaid(overlay(drawn))).items()


class Located:
    """A path of another library's: all that is known of it is `__fspath__`."""

    def __init__(self, file: FilePath, kind: type = str) -> None:
        self._path = os.fspath(file) if kind is str else os.fsencode(file)

    def __fspath__(self) -> str | bytes:
        return self._path


class TestPaths:
    """The forms in which a file may be given."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own.yaml").write_text("blacklist: {torch: [mm]}\n")
        (tmp_path / "faulty.yaml").write_text("blacklist: {torch: [mmm]}\n")
        monkeypatch.setenv("HOME", str(tmp_path))

    @pytest.mark.parametrize("several", [False, True], ids=["alone", "in-a-list"])
    @pytest.mark.parametrize("form", [str, FilePath, Located], ids=lambda form: form.__name__)
    def test_the_home_is_found_and_named_in_full(self, form, several: bool, tmp_path: FilePath) -> None:
        given = form("~/own.yaml")
        rule = shipped().overlaid([given] if several else given).rules[Path("torch", "mm"), torch.float16]
        assert rule.source == f"{tmp_path}/own.yaml:1"

    @pytest.mark.parametrize("kind", [str, bytes])
    def test_whatever_has_fspath_is_a_path(self, kind: type, tmp_path: FilePath) -> None:
        lists = shipped().overlaid(Located(tmp_path / "own.yaml", kind))
        assert lists.rules[Path("torch", "mm"), torch.float16].source == f"{tmp_path}/own.yaml:1"

    def test_a_fault_names_the_file_in_full(self, tmp_path: FilePath) -> None:
        with pytest.raises(CastListError, match=re.escape(f"{tmp_path}/faulty.yaml:1: 'torch' has no 'mmm'")):
            shipped().overlaid("~/faulty.yaml")

    def test_a_user_that_there_is_not_is_a_file_that_there_is_not(self) -> None:
        with pytest.raises(CastListError, match=r"~nobody\.of\.that\.name/own\.yaml: the file cannot be read"):
            shipped().overlaid("~nobody.of.that.name/own.yaml")

    def test_initialize_and_init_take_them(self) -> None:
        amp.initialize(torch.nn.Linear(1, 1), cast_lists="~/own.yaml", half_dtype=torch.bfloat16, verbosity=0)
        ones = torch.ones(1, 1, dtype=torch.bfloat16)
        assert torch.mm(ones, ones).dtype is torch.float32
        amp.deinitialize()
        with amp.init(cast_lists=Located(FilePath("~/own.yaml")), half_dtype=torch.bfloat16):
            assert torch.mm(ones, ones).dtype is torch.float32

"""Patterns of namespaces and names in cast lists: matches, precedence over other entries, and faults."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path as FilePath

import pytest
import torch
from helpers import Write, casts_on
from torch import nn

from ampatch import amp
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.patterns import functions
from ampatch.errors import CastListError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

HALF = torch.bfloat16
NUMBERS = itertools.count()  # of packages: patterns are looked up once for each name

LOSSES = """
from torch.nn.functional import mse_loss

def far_loss(value):
    return value

def near_loss(value):
    return value

def _own_loss(value):
    return value

loss_scale = 3.0
"""
HEADS = """
from {name}.losses import far_loss

def deep_loss(value):
    return value

class Head:
    def score_loss(self, value):
        return value

    class Inner:
        @staticmethod
        def inner_loss(value):
            return value

class Tail(Head):
    pass
"""


@pytest.fixture
def mine(package: Callable[..., None], tmp_path: FilePath) -> str:
    """A package with losses in two modules, a package below it, and a private module; not imported yet."""
    name = f"patterns_{next(NUMBERS)}"
    package(name, losses=LOSSES, _private="def hidden_loss(value):\n    return value\n")
    (tmp_path / name / "deep").mkdir()
    (tmp_path / name / "deep" / "__init__.py").write_text("")
    (tmp_path / name / "deep" / "heads.py").write_text(HEADS.format(name=name))
    return name


def imported(name: str) -> str:
    for module in ("losses", "_private", "deep.heads"):
        importlib.import_module(f"{name}.{module}")
    return name


@pytest.fixture
def loaded(mine: str) -> str:
    """The package of `mine`, with its modules imported."""
    return imported(mine)


def matched(namespace: str, name: str) -> list[str]:
    return list(map(str, functions(Path(namespace, name))))


def half() -> torch.Tensor:
    return torch.ones(2, dtype=HALF)


class TestMatches:
    def test_a_star_matches_every_module_and_class_below(self, loaded: str) -> None:
        assert matched(f"{loaded}.*", "*_loss") == [
            f"{loaded}.deep.heads.deep_loss",
            f"{loaded}.deep.heads.far_loss",
            f"{loaded}.deep.heads.Head.score_loss",
            f"{loaded}.deep.heads.Head.Inner.inner_loss",
            f"{loaded}.losses.far_loss",
            f"{loaded}.losses.near_loss",
        ]

    def test_a_star_matches_methods_in_c_and_the_namespace_itself(self) -> None:
        found = matched("torch.*", "softmax")
        assert {"torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax"} <= set(found)
        assert not any("Parameter" in path for path in found)
        assert "torch.nn.functional.softmax" in matched("torch.nn.functional.*", "softmax")

    def test_a_pattern_matches_public_names_of_the_package(self, loaded: str) -> None:
        assert matched(f"{loaded}.losses", "?ear_*") == [f"{loaded}.losses.near_loss"]
        assert matched(f"{loaded}.deep.heads.Head", "*") == [f"{loaded}.deep.heads.Head.score_loss"]
        assert matched(f"{loaded}.losses", "_*_loss") == [f"{loaded}.losses._own_loss"]
        assert matched(f"{loaded}._*", "*_loss") == [f"{loaded}._private.hidden_loss"]
        # Functions of other packages
        assert matched(f"{loaded}.*", "mse_loss") == []
        assert matched(f"{loaded}.deep.*", "far_loss") == []

    def test_matches_are_the_same_under_casts(self, loaded: str) -> None:
        before = matched("torch.nn.*", "soft*"), matched(f"{loaded}.*", "*_loss")
        with casts_on(HALF, cast_lists={"blacklist": {f"{loaded}.*": ["*_loss"]}}):
            assert (matched("torch.nn.*", "soft*"), matched(f"{loaded}.*", "*_loss")) == before


class TestCasts:
    def test_a_pattern_casts_each_function_under_all_its_names(self, loaded: str) -> None:
        losses, heads = sys.modules[f"{loaded}.losses"], sys.modules[f"{loaded}.deep.heads"]
        calls = [losses.far_loss, losses.near_loss, heads.far_loss, heads.Head().score_loss, heads.Tail().score_loss]
        assert {call(half()).dtype for call in calls} == {HALF}
        with casts_on(HALF, cast_lists={"blacklist": {f"{loaded}.*": ["*_loss"]}}):
            calls = [losses.far_loss, heads.far_loss, heads.Head().score_loss, heads.Tail().score_loss]
            assert {call(half()).dtype for call in calls} == {torch.float32}
            assert losses._own_loss(half()).dtype is HALF

    @pytest.mark.parametrize("is_loaded", [False, True])
    def test_a_pattern_casts_functions_of_modules_imported_later(self, mine: str, is_loaded: bool) -> None:
        if is_loaded:  # the package, but none of its modules
            importlib.import_module(mine)
        before = list(sys.meta_path)
        with casts_on(HALF, cast_lists={"blacklist": {f"{mine}.*": ["*_loss"]}}):
            heads = importlib.import_module(f"{mine}.deep.heads")
            kept = heads.far_loss
            assert heads.deep_loss(half()).dtype is heads.Head().score_loss(half()).dtype is torch.float32
            assert heads.far_loss is sys.modules[f"{mine}.losses"].far_loss
            assert heads.far_loss(half()).dtype is torch.float32
        assert heads.deep_loss(half()).dtype is kept(half()).dtype is HALF
        assert sys.meta_path == before

    def test_casts_of_a_pattern_end_with_the_session(self, mine: str) -> None:
        with casts_on(HALF, cast_lists={"blacklist": {f"{mine}.*": ["*_loss"]}}):
            pass
        assert importlib.import_module(f"{mine}.losses").far_loss(half()).dtype is HALF

    def test_another_model_joins_after_an_import(self, mine: str) -> None:
        lists = {"blacklist": {f"{mine}.*": ["*_loss"]}}
        amp.initialize(nn.Linear(2, 2), cast_lists=lists, half_dtype=HALF, verbosity=0)
        imported(mine)
        amp.initialize(nn.Linear(2, 2), cast_lists=lists, half_dtype=HALF, verbosity=0)
        amp.deinitialize()

    def test_explain_names_the_line_of_a_pattern(self, mine: str, write: Write) -> None:
        file = write(f'blacklist:\n  {mine}.*: ["*_loss"]  # losses in float32\n')
        with casts_on(HALF, cast_lists=file):
            told = str(amp.explain(importlib.import_module(f"{mine}.losses").near_loss))
        assert f"blacklist  {file}:2" in told
        assert "losses in float32" in told


@pytest.mark.parametrize("is_loaded", [False, True], ids=["imported later", "loaded"])
class TestPrecedence:
    def treatments(self, name: str, is_loaded: bool, *overlays: dict[str, object]) -> dict[str, torch.dtype]:
        """The dtypes of the losses of a bfloat16 tensor."""
        if is_loaded:
            imported(name)
        with casts_on(HALF, cast_lists=list(overlays)):
            losses, heads = (importlib.import_module(f"{name}.{module}") for module in ("losses", "deep.heads"))
            functions = (losses.far_loss, losses.near_loss, heads.deep_loss)
            return {function.__name__: function(half()).dtype for function in functions}

    def test_a_name_wins_over_a_pattern(self, mine: str, is_loaded: bool) -> None:
        lists = {"whitelist": {f"{mine}.losses": ["near_loss"]}, "blacklist": {f"{mine}.*": ["*_loss"]}}
        found = self.treatments(mine, is_loaded, lists)
        assert found == {"far_loss": torch.float32, "near_loss": HALF, "deep_loss": torch.float32}

    def test_the_last_pattern_wins(self, mine: str, is_loaded: bool) -> None:
        lists = {"blacklist": {f"{mine}.*": ["*_loss"]}, "unlisted": {f"{mine}.deep.*": ["*"]}}
        found = self.treatments(mine, is_loaded, lists)
        assert found == {"far_loss": torch.float32, "near_loss": torch.float32, "deep_loss": HALF}

    def test_a_later_overlay_wins_over_an_earlier_one(self, mine: str, is_loaded: bool) -> None:
        first = {"blacklist": {f"{mine}.losses": ["far_loss"], f"{mine}.deep.heads": ["deep_loss"]}}
        found = self.treatments(mine, is_loaded, first, {"unlisted": {f"{mine}.losses": ["*"]}})
        assert found == {"far_loss": HALF, "near_loss": HALF, "deep_loss": torch.float32}


class TestFaults:
    @pytest.mark.parametrize(
        ("namespace", "entry", "expected"),
        [
            ("torch.nn.*", "softmaxx", "'torch.nn.*' has no function 'softmaxx'. Did you mean 'softmax'"),
            ("torch.nn.*", "soft[max", "'torch.nn.*' has no function 'soft[max'. Did you mean 'softmax'"),
            ("torch.nnn.*", "softmax", "'torch' has no 'nnn'. Did you mean 'nn'"),
            ("torch.nn.func?", "softmax", "no module or class matches 'torch.nn.func?'."),
            ("no_such_package.*", "nms", "there is no module 'no_such_package' (is it installed?)."),
            ("?orch.*", "softmax", "expected a pattern that begins with a package's name, such as 'torch.nn.*'."),
            ("ampatch.*", {"name": "*", "optional": True}, "amp casts no calls of its own functions. Leave it out."),
            (
                "torch.linalg",
                {"name": "matrix_*", "when": {"ord": [2]}},
                "torch.linalg.matrix_* matches torch.linalg.matrix_exp: `when` names the argument 'ord'",
            ),
        ],
    )
    def test_a_mistaken_pattern_is_a_fault(
        self, namespace: str, entry: object, expected: str, tmp_path: FilePath
    ) -> None:
        with pytest.raises(CastListError) as found:
            shipped().overlaid({"blacklist": {namespace: [entry]}})
        (fault,) = found.value.faults
        assert expected in str(fault)

    @pytest.mark.parametrize("is_loaded", [False, True], ids=["not imported", "loaded"])
    def test_a_misspelled_name_is_told_before_its_module_is_imported(
        self, mine: str, is_loaded: bool, write: Write
    ) -> None:
        if is_loaded:
            imported(mine)
        file = write(f"blacklist:\n  {mine}.*:\n  - deep_loss\n  - depe_loss\n")
        with pytest.raises(CastListError, match=rf"own\.yaml:4: '{mine}\.\*' has no function 'depe_loss'.*'deep_loss'"):
            shipped().overlaid(file)
        assert is_loaded == (f"{mine}.losses" in sys.modules)

    def test_an_imported_function_of_another_package_is_a_fault(self, loaded: str) -> None:
        with pytest.raises(CastListError, match=r"losses\.mse_loss is imported from torch\.nn\.functional; list it"):
            shipped().overlaid({"whitelist": {f"{loaded}.*": ["mse_loss"]}})

    def test_a_pattern_matches_functions_without_a_hash(self) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(torch.distributed.rpc.api.method)  # of pybind11
        amp.init(half_dtype=HALF, cast_lists={"blacklist": {"torch.distributed.rpc.api": ["metho*"]}}).deactivate()

    def test_an_optional_pattern_may_match_nothing(self) -> None:
        entries = {
            "torch.nn.*": [{"name": "sofmax", "optional": True}],
            "no_such_package.*": [{"name": "nms", "optional": True}],
        }
        assert shipped().overlaid({"whitelist": entries}) == shipped()

    def test_policy_has_each_function_with_the_line_of_the_pattern(self, mine: str, write: Write) -> None:
        file = write(f"blacklist:\n  {mine}.*:\n  - '*_loss'\n")
        lists = shipped().overlaid(file)
        assert list_reports.policy(lists, names=[mine]) == [
            f"{mine}.*.*_loss  blacklist  {file}:3  matches nothing yet: import {mine} or its modules first"
        ]
        importlib.import_module(f"{mine}.losses")
        assert list_reports.policy(lists, names=[mine]) == [
            f"{mine}.losses.far_loss   blacklist  {file}:3",
            f"{mine}.losses.near_loss  blacklist  {file}:3",
        ]
        (line,) = list_reports.checked(str(file), shipped(), lists).lines
        assert line.endswith("is sound: it changes how 2 paths are treated.")

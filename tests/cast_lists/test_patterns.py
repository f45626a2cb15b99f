"""Patterns of namespaces and names in cast lists: matches, precedence over other entries, and faults."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path as FilePath

import pytest
import torch
from helpers import casts_on
from torch import nn

from ampatch import amp
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.patterns import functions
from ampatch.errors import CastListError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

HALF = torch.bfloat16

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
def mine(package: Callable[..., None], tmp_path: FilePath) -> Callable[[str], str]:
    """Writes a package with losses in two modules, a package below it, and a private module."""

    def write(name: str) -> str:
        package(name, losses=LOSSES, _private="def hidden_loss(value):\n    return value\n")
        (tmp_path / name / "deep").mkdir()
        (tmp_path / name / "deep" / "__init__.py").write_text("")
        (tmp_path / name / "deep" / "heads.py").write_text(HEADS.format(name=name))
        return name

    return write


def loaded(name: str) -> str:
    for module in ("losses", "_private", "deep.heads"):
        importlib.import_module(f"{name}.{module}")
    return name


def matched(namespace: str, name: str) -> list[str]:
    return list(map(str, functions(Path(namespace, name))))


def half() -> torch.Tensor:
    return torch.ones(2, dtype=HALF)


class TestMatches:
    def test_a_star_matches_every_module_and_class_below(self, mine: Callable[[str], str]) -> None:
        name = loaded(mine("patterns_a"))
        assert matched(f"{name}.*", "*_loss") == [
            f"{name}.deep.heads.deep_loss",
            f"{name}.deep.heads.far_loss",
            f"{name}.deep.heads.Head.score_loss",
            f"{name}.deep.heads.Head.Inner.inner_loss",
            f"{name}.losses.far_loss",
            f"{name}.losses.near_loss",
        ]

    def test_a_star_matches_methods_in_c_and_the_namespace_itself(self) -> None:
        found = matched("torch.*", "softmax")
        assert {"torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax"} <= set(found)
        assert not any("Parameter" in path for path in found)
        assert "torch.nn.functional.softmax" in matched("torch.nn.functional.*", "softmax")

    def test_a_pattern_matches_public_names_of_the_package(self, mine: Callable[[str], str]) -> None:
        name = loaded(mine("patterns_b"))
        assert matched(f"{name}.losses", "?ear_*") == [f"{name}.losses.near_loss"]
        assert matched(f"{name}.deep.heads.Head", "*") == [f"{name}.deep.heads.Head.score_loss"]
        assert matched(f"{name}.losses", "_*_loss") == [f"{name}.losses._own_loss"]
        assert matched(f"{name}._*", "*_loss") == [f"{name}._private.hidden_loss"]
        # Functions of other packages
        assert matched(f"{name}.*", "mse_loss") == []
        assert matched(f"{name}.deep.*", "far_loss") == []

    def test_matches_are_the_same_under_casts(self, mine: Callable[[str], str]) -> None:
        name = loaded(mine("patterns_e"))
        before = matched("torch.nn.*", "soft*"), matched(f"{name}.*", "*_loss")
        with casts_on(HALF, cast_lists={"blacklist": {f"{name}.*": ["*_loss"]}}):
            assert (matched("torch.nn.*", "soft*"), matched(f"{name}.*", "*_loss")) == before


class TestCasts:
    def test_a_pattern_casts_each_function_under_all_its_names(self, mine: Callable[[str], str]) -> None:
        name = loaded(mine("patterns_f"))
        losses, heads = sys.modules[f"{name}.losses"], sys.modules[f"{name}.deep.heads"]
        calls = [losses.far_loss, losses.near_loss, heads.far_loss, heads.Head().score_loss, heads.Tail().score_loss]
        assert {call(half()).dtype for call in calls} == {HALF}
        with casts_on(HALF, cast_lists={"blacklist": {f"{name}.*": ["*_loss"]}}):
            calls = [losses.far_loss, heads.far_loss, heads.Head().score_loss, heads.Tail().score_loss]
            assert {call(half()).dtype for call in calls} == {torch.float32}
            assert losses._own_loss(half()).dtype is HALF

    @pytest.mark.parametrize("is_loaded", [False, True])
    def test_a_pattern_casts_functions_of_modules_imported_later(
        self, mine: Callable[[str], str], is_loaded: bool
    ) -> None:
        name = mine(f"patterns_g{is_loaded}")
        if is_loaded:  # the package, but none of its modules
            importlib.import_module(name)
        before = list(sys.meta_path)
        with casts_on(HALF, cast_lists={"blacklist": {f"{name}.*": ["*_loss"]}}):
            heads = importlib.import_module(f"{name}.deep.heads")
            kept = heads.far_loss
            assert heads.deep_loss(half()).dtype is heads.Head().score_loss(half()).dtype is torch.float32
            assert heads.far_loss is sys.modules[f"{name}.losses"].far_loss
            assert heads.far_loss(half()).dtype is torch.float32
        assert heads.deep_loss(half()).dtype is kept(half()).dtype is HALF
        assert sys.meta_path == before

    def test_casts_of_a_pattern_end_with_the_session(self, mine: Callable[[str], str]) -> None:
        name = mine("patterns_h")
        with casts_on(HALF, cast_lists={"blacklist": {f"{name}.*": ["*_loss"]}}):
            pass
        assert importlib.import_module(f"{name}.losses").far_loss(half()).dtype is HALF

    def test_another_model_joins_after_an_import(self, mine: Callable[[str], str]) -> None:
        name = mine("patterns_i")
        lists = {"blacklist": {f"{name}.*": ["*_loss"]}}
        amp.initialize(nn.Linear(2, 2), cast_lists=lists, half_dtype=HALF, verbosity=0)
        loaded(name)
        amp.initialize(nn.Linear(2, 2), cast_lists=lists, half_dtype=HALF, verbosity=0)
        amp.deinitialize()

    def test_explain_names_the_line_of_a_pattern(self, mine: Callable[[str], str], tmp_path: FilePath) -> None:
        name = mine("patterns_j")
        file = tmp_path / "own.yaml"
        file.write_text(f'blacklist:\n  {name}.*: ["*_loss"]  # losses in float32\n')
        with casts_on(HALF, cast_lists=file):
            told = str(amp.explain(importlib.import_module(f"{name}.losses").near_loss))
        assert f"blacklist  {file}:2" in told
        assert "losses in float32" in told


@pytest.mark.parametrize("is_loaded", [False, True], ids=["imported later", "loaded"])
class TestPrecedence:
    def treatments(self, name: str, is_loaded: bool, *overlays: dict[str, object]) -> dict[str, torch.dtype]:
        """The dtypes of the losses of a bfloat16 tensor."""
        if is_loaded:
            loaded(name)
        with casts_on(HALF, cast_lists=list(overlays)):
            losses, heads = (importlib.import_module(f"{name}.{module}") for module in ("losses", "deep.heads"))
            functions = (losses.far_loss, losses.near_loss, heads.deep_loss)
            return {function.__name__: function(half()).dtype for function in functions}

    def test_a_name_wins_over_a_pattern(self, mine: Callable[[str], str], is_loaded: bool) -> None:
        name = mine(f"patterns_k{is_loaded}")
        lists = {"whitelist": {f"{name}.losses": ["near_loss"]}, "blacklist": {f"{name}.*": ["*_loss"]}}
        found = self.treatments(name, is_loaded, lists)
        assert found == {"far_loss": torch.float32, "near_loss": HALF, "deep_loss": torch.float32}

    def test_the_last_pattern_wins(self, mine: Callable[[str], str], is_loaded: bool) -> None:
        name = mine(f"patterns_l{is_loaded}")
        lists = {"blacklist": {f"{name}.*": ["*_loss"]}, "unlisted": {f"{name}.deep.*": ["*"]}}
        found = self.treatments(name, is_loaded, lists)
        assert found == {"far_loss": torch.float32, "near_loss": torch.float32, "deep_loss": HALF}

    def test_a_later_overlay_wins_over_an_earlier_one(self, mine: Callable[[str], str], is_loaded: bool) -> None:
        name = mine(f"patterns_m{is_loaded}")
        first = {"blacklist": {f"{name}.losses": ["far_loss"], f"{name}.deep.heads": ["deep_loss"]}}
        found = self.treatments(name, is_loaded, first, {"unlisted": {f"{name}.losses": ["*"]}})
        assert found == {"far_loss": HALF, "near_loss": HALF, "deep_loss": torch.float32}


class TestFaults:
    @pytest.mark.parametrize(
        ("namespace", "entry", "expected"),
        [
            ("torch.nn.*", "softmaxx", "'torch.nn.*' has no function 'softmaxx'. Did you mean 'softmax'"),
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
        self, mine: Callable[[str], str], is_loaded: bool, tmp_path: FilePath
    ) -> None:
        name = mine(f"patterns_n{is_loaded}")
        if is_loaded:
            loaded(name)
        file = tmp_path / "own.yaml"
        file.write_text(f"blacklist:\n  {name}.*:\n  - deep_loss\n  - depe_loss\n")
        with pytest.raises(CastListError, match=rf"own\.yaml:4: '{name}\.\*' has no function 'depe_loss'.*'deep_loss'"):
            shipped().overlaid(file)
        assert is_loaded == (f"{name}.losses" in sys.modules)

    def test_an_imported_function_of_another_package_is_a_fault(self, mine: Callable[[str], str]) -> None:
        name = loaded(mine("patterns_o"))
        with pytest.raises(CastListError, match=r"losses\.mse_loss is imported from torch\.nn\.functional; list it"):
            shipped().overlaid({"whitelist": {f"{name}.*": ["mse_loss"]}})

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

    def test_policy_has_each_function_with_the_line_of_the_pattern(
        self, mine: Callable[[str], str], tmp_path: FilePath
    ) -> None:
        name = mine("patterns_p")
        file = tmp_path / "own.yaml"
        file.write_text(f"blacklist:\n  {name}.*:\n  - '*_loss'\n")
        lists = shipped().overlaid(file)
        assert list_reports.policy(lists, names=[name]) == [
            f"{name}.*.*_loss  blacklist  {file}:3  matches nothing yet: import {name} or its modules first"
        ]
        importlib.import_module(f"{name}.losses")
        assert list_reports.policy(lists, names=[name]) == [
            f"{name}.losses.far_loss   blacklist  {file}:3",
            f"{name}.losses.near_loss  blacklist  {file}:3",
        ]
        (line,) = list_reports.checked(str(file), shipped(), lists).lines
        assert line.endswith("is sound: it changes how 2 paths are treated.")

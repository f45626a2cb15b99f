"""Lookup of the object at a dotted path, without imports."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import casts_on

from ampatch.cast_lists.paths import Path, PathError, find, find_owner

NOT_IMPORTED = "raise AssertionError('imported')"


class TestOwners:
    @pytest.mark.parametrize(
        ("namespace", "owner"),
        [
            ("torch", torch),
            ("torch.nn.functional", F),
            ("torch.Tensor", torch.Tensor),
            ("torch.nn.Linear", torch.nn.Linear),
            ("torch._VF", torch._VF),
        ],
    )
    def test_an_owner_is_a_module_or_a_class(self, namespace: str, owner: object) -> None:
        assert find_owner(namespace) is owner

    @pytest.mark.parametrize(
        ("namespace", "message"),
        [
            ("trch", r"there is no module 'trch' \(is it installed\?\)\. Did you mean 'torch'"),
            ("torch.nn.functinal", r"'torch\.nn' has no 'functinal'\. Did you mean 'functional'"),
            ("torch.Tensr", r"'torch' has no 'Tensr'\. Did you mean 'Tensor'"),
            ("torch.Tensor.nothing_like_it", r"'torch\.Tensor' has no 'nothing_like_it'\.$"),
            ("", r"there is no module ''"),
            (".torch", r"there is no module ''"),
            ("torch.", r"'torch' has no ''"),
            ("torch..nn", r"'torch' has no ''"),
            ("torch.mm.x", r"'torch\.mm' has no 'x'"),
        ],
    )
    def test_a_missing_owner_is_an_error_with_the_nearest(self, namespace: str, message: str) -> None:
        with pytest.raises(PathError, match=message):
            find_owner(namespace)

    def test_a_module_that_must_not_be_imported_does_not_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "forbidden", None)

        with pytest.raises(PathError, match="there is no module 'forbidden'"):
            find_owner("forbidden.ops")


class TestModulesThatAreNotImported:
    @pytest.mark.parametrize("namespace", ["later", "later.ops", "later.ops.Class", "later.nobody_knows"])
    def test_a_path_in_a_module_that_is_not_imported_is_none(
        self, package: Callable[..., None], namespace: str
    ) -> None:
        package("later", __init__=NOT_IMPORTED, ops=NOT_IMPORTED)

        assert find_owner(namespace) is None
        assert find(Path(namespace, "f")) is None
        assert "later" not in sys.modules

    def test_a_path_below_an_imported_package_is_none_or_an_error(self, package: Callable[..., None]) -> None:
        package("half_there", ops=NOT_IMPORTED)
        __import__("half_there")

        assert find_owner("half_there.ops") is find_owner("half_there.ops.Class") is None
        assert "half_there.ops" not in sys.modules
        with pytest.raises(PathError, match="'half_there' has no 'opps'"):
            find_owner("half_there.opps")

    def test_a_package_that_imports_on_demand_imports_nothing(self, package: Callable[..., None]) -> None:
        package(
            "on_demand",
            __init__="import importlib\ndef __getattr__(name): return importlib.import_module(f'on_demand.{name}')",
            ops=NOT_IMPORTED,
        )
        __import__("on_demand")

        assert find_owner("on_demand.ops") is None
        assert "on_demand.ops" not in sys.modules

    def test_an_attribute_whose_import_fails_does_not_exist(self, package: Callable[..., None]) -> None:
        package("broken", __init__="def __getattr__(name):\n    raise ImportError('a dependency is missing')")
        __import__("broken")

        with pytest.raises(PathError, match="'broken' has no 'f'"):
            find(Path("broken", "f"))

    def test_a_function_is_found_once_its_module_is_imported(self, package: Callable[..., None]) -> None:
        package("later", ops="def f(): ...")
        assert find(Path("later.ops", "f")) is None

        __import__("later.ops")

        assert isinstance(find(Path("later.ops", "f")), types.FunctionType)


class TestFunctions:
    def test_a_function_is_the_attribute_of_its_owner(self) -> None:
        assert find(Path("torch", "mm")) is torch.mm
        assert find(Path("torch.Tensor", "exp")) is torch.Tensor.exp  # inherited from a class in C
        assert str(Path("torch.Tensor", "mm")) == "torch.Tensor.mm"

    def test_private_names_are_suggested_for_private_names_only(self) -> None:
        with pytest.raises(PathError) as found:
            find(Path("torch", "convolutionn"))
        assert "'_convolution" not in str(found.value)

        with pytest.raises(PathError, match="Did you mean '_convolution'"):
            find(Path("torch", "_convolutionn"))

    def test_the_original_function_is_found_under_casts(self) -> None:
        paths = [Path("torch", "conv2d"), Path("torch.nn.functional", "conv2d"), Path("torch.Tensor", "exp")]
        before = [find(path) for path in paths]

        with casts_on(torch.float16):
            assert torch.conv2d is not before[0]
            assert [find(path) for path in paths] == before

    def test_a_wrapper_by_others_around_a_patch_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with casts_on(torch.float16):
            ours = torch.mm
            theirs = functools.wraps(ours)(lambda *args: [ours(*args)])
            monkeypatch.setattr(torch, "of_theirs", theirs, raising=False)

            assert find(Path("torch", "of_theirs")) is theirs

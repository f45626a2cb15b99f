"""The search for the places that hold a function."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch
from torch import nn

from ampatch.patching.function_places import Kind, places, swept_modules


class Model(nn.Module):
    def __init__(self, act: object) -> None:
        super().__init__()
        self.act = act
        self.table = {"act": act}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("a_module_of_users")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def found(function: object) -> set[tuple[Kind, str]]:
    return {(place.kind, place.name) for place in places({id(function): function})}


def fresh() -> types.FunctionType:
    """A function that nothing else holds."""
    return types.FunctionType((lambda x: x).__code__, {"__name__": "elsewhere"})


def test_a_function_that_nothing_holds_is_in_no_place() -> None:
    assert found(fresh()) == set()


def test_names_in_modules_are_found(module: types.ModuleType) -> None:
    module.other = fresh()
    assert found(module.other) == {(Kind.MODULE, "other")}


@pytest.mark.slow
def test_containers_and_partials_of_modules_are_found(module: types.ModuleType) -> None:
    function = fresh()
    module.table = {"deep": [function]}
    module.part = functools.partial(function, 1)
    assert found(function) == {(Kind.CONTAINER, "table"), (Kind.CONTAINER, "part")}


def test_closures_and_default_arguments_are_found() -> None:
    function = fresh()

    def closure() -> object:
        return function

    def default(x: object, act: object = function, *, other: object = function) -> object:
        return x

    held = {(place.owner, place.name) for place in places({id(function): function})}
    assert {(closure, "function"), (default, "act"), (default, "other")} <= held


def test_attributes_and_static_methods_of_classes_are_found() -> None:
    function = fresh()
    holder = type("Holder", (), {"plain": function, "static": staticmethod(function), "table": [function]})
    assert found(function) == {(Kind.CLASS, name) for name in ("plain", "static", "table")}
    assert holder.plain is function


def test_attributes_and_containers_of_models_are_found() -> None:
    function = fresh()
    model = Model(function)
    assert found(function) == {(Kind.MODEL, "act"), (Kind.MODEL_CONTAINER, "table")}
    assert model.act is function


@pytest.mark.slow
def test_models_that_are_not_initialised_are_searched() -> None:
    function, unfinished = fresh(), Model.__new__(Model)
    vars(unfinished)["act"] = function
    assert found(function) == {(Kind.MODEL, "act")}


@pytest.mark.slow
def test_the_search_leaves_out_torch_s_modules_but_two() -> None:
    swept = swept_modules()
    assert swept[:2] == [torch.functional, torch._C._nn]
    assert not [module for module in swept[2:] if module.__name__.partition(".")[0] in ("torch", "ampatch")]
    function = torch.nn.functional.linear
    assert not any(place.owner is torch.nn.functional for place in places({id(function): function}))


@pytest.mark.slow
def test_a_tuple_of_the_places_can_be_built_during_the_search() -> None:
    """The garbage collector also returns a tuple that is just being built, which then could not grow."""
    function = fresh()
    holders = [type("Holder", (), {"plain": function}) for _ in range(50)]
    assert len(tuple(place for place in places({id(function): function}))) == len(holders)

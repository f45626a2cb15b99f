"""Functions that models keep in containers and partials: they are cast, and given back."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampatch import amp
from ampatch.patching.container_functions import replace_in_containers

TABLE: dict[str, Any] = {"linear": F.linear, "others": [(F.linear, 1)]}


class Keeping(nn.Module):
    """Calls what it keeps on its weight."""

    def __init__(self, kept: Any = None, call: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.kept, self.call = kept, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.kept, x, self.weight)


KEPT: dict[str, tuple[Any, Any]] = {
    "partial": (lambda: functools.partial(F.linear, bias=None), lambda kept, *args: kept(*args)),
    "partial of a partial": (
        lambda: functools.partial(functools.partial(F.linear), bias=None),
        lambda kept, *args: kept(*args),
    ),
    "argument of a partial": (
        lambda: functools.partial(lambda f, *args: f(*args), F.linear),
        lambda kept, *args: kept(*args),
    ),
    "list": (lambda: [None, F.linear], lambda kept, *args: kept[1](*args)),
    "deque": (lambda: collections.deque([F.linear]), lambda kept, *args: kept[0](*args)),
    "tuple": (lambda: (1, (F.linear, "x")), lambda kept, *args: kept[1][0](*args)),
    "dict": (lambda: {"f": F.linear}, lambda kept, *args: kept["f"](*args)),
    "defaultdict": (lambda: collections.defaultdict(list, f=[F.linear]), lambda kept, *args: kept["f"][0](*args)),
    "partial in a dict": (lambda: {"f": functools.partial(F.linear)}, lambda kept, *args: kept["f"](*args)),
    "namespace": (lambda: types.SimpleNamespace(f=F.linear), lambda kept, *args: kept.f(*args)),
    "method of Tensor": (lambda: [torch.Tensor.matmul], lambda kept, x, weight: kept[0](x, weight)),
    "method of Tensor, by itself": (lambda: torch.Tensor.matmul, lambda kept, *args: kept(*args)),
    "function, by itself": (lambda: F.linear, lambda kept, *args: kept(*args)),
    "table of its Python module": (lambda: TABLE, lambda _, *args: TABLE["others"][0][0](*args)),
}


@pytest.mark.parametrize(("make", "call"), KEPT.values(), ids=KEPT)
@pytest.mark.covering(1)
def test_functions_in_containers_are_cast_and_restored(make, call, half):
    model = Keeping(make(), call)
    x = torch.ones(2, 4)
    for _ in range(2):
        assert model(x).dtype is torch.float32
        amp.initialize(model, half_dtype=half, verbosity=0)
        assert model(x).dtype is half
        amp.deinitialize()
    assert model(x).dtype is torch.float32
    for found in (F.linear, torch.Tensor.matmul):
        assert not hasattr(found, "__wrapped__")
    assert str(make()).partition(" at ")[0] == str(model.kept).partition(" at ")[0]


class Helper:
    """Has functions that users register. They return their argument, whose type shows whether it was cast."""

    def bound(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x


class Derived(Helper):
    def bound(self, x: Tensor) -> Tensor:
        raise AssertionError("not what was bound")

    def of_base(self) -> Any:
        return super().bound


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Config:
    function: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenConfig:
    function: Any


def in_closure(function: Any) -> Any:
    def call(x: Tensor) -> Any:
        return function(x)

    return call


def in_list_in_closure(function: Any) -> Any:
    held = [function]

    def call(x: Tensor) -> Any:
        return held[0](x)

    return call


def with_default(function: Any) -> Any:
    def call(x: Tensor, of: Any = function) -> Any:
        return of(x)

    return call


def with_keyword_default(function: Any) -> Any:
    def call(x: Tensor, *, of: Any = [function]) -> Any:  # noqa: B006 - as a user has it
        return of[0](x)

    return call


FUNCTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bound method": ("bound", lambda: Helper().bound),
    "bound method of the base": ("bound", lambda: Derived().of_base()),
    "class method": ("of_class", lambda: Helper.of_class),
    "static method": ("static", lambda: Helper.static),
}
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda function: function, lambda kept: kept),
    "dict": (lambda function: {"f": function}, lambda kept: kept["f"]),
    "partial": (functools.partial, lambda kept: kept),
    "named tuple": (lambda function: Pair(1, function), lambda kept: kept.second),
    "data class": (Config, lambda kept: kept.function),
    "frozen data class": (lambda function: [FrozenConfig(function)], lambda kept: kept[0].function),
    "closure": (in_closure, lambda kept: kept),
    "list in a closure": (in_list_in_closure, lambda kept: kept),
    "default": (with_default, lambda kept: kept),
    "keyword default": (with_keyword_default, lambda kept: kept),
    "torch.vmap": (torch.vmap, lambda kept: kept),
    "wrapped": (lambda function: functools.wraps(function)(in_closure(function)), lambda kept: kept),
}


@pytest.mark.parametrize(("hold", "get"), HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize(("name", "function"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_registered_functions_are_cast_wherever_a_model_holds_them(name, function, hold, get):
    amp.register_half_function(Helper, name)
    model = Keeping(hold(function()), lambda kept, x, _: get(kept)(x))
    x = torch.ones(2, 4)
    for _ in range(2):
        amp.initialize(model, half_dtype="bfloat16", verbosity=0)
        assert model(x).dtype is torch.bfloat16
        amp.deinitialize()
        assert model(x).dtype is torch.float32
    assert type(get(model.kept)) is type(get(hold(function())))


def test_a_closure_that_is_not_filled_yet_stays():
    def call(_: None, x: Tensor, weight: Tensor) -> Tensor:
        return later(x + weight[:2])

    model = Keeping(None, call)
    amp.initialize(model, verbosity=0)
    later = F.relu
    assert model(torch.ones(2, 4)).dtype is torch.float32


def test_functions_that_hold_each_other_are_walked_once():
    calls: list[Any] = []
    for _ in range(40):
        calls.append(in_closure(calls[:]))
    seen: list[object] = []
    replace_in_containers(Keeping(calls), lambda value: seen.append(value) or value)
    assert len(seen) < 40**3


def test_closures_of_torch_s_own_functions_stay():
    held = F.max_pool2d.__closure__
    before = [cell.cell_contents for cell in held]
    replace_in_containers(Keeping([F.max_pool2d]), lambda value: None if value in before else value)
    assert [cell.cell_contents for cell in held] == before


def test_mutable_containers_stay_the_same_objects():
    kept = [F.linear]
    model = Keeping({"f": kept}, lambda found, *args: found["f"][0](*args))
    amp.initialize(model, verbosity=0)
    assert model.kept["f"] is kept
    assert kept[0] is not F.linear.__wrapped__
    amp.deinitialize()
    assert kept == [F.linear]


def test_functions_in_a_copied_container_are_cast_in_the_next_session():
    model = Keeping([F.linear], lambda kept, *args: kept[0](*args))
    amp.initialize(model, verbosity=0)
    copied = copy.deepcopy(model)
    amp.deinitialize()
    assert copied(torch.ones(2, 4)).dtype is torch.float32
    amp.initialize(copied, verbosity=0)
    assert copied(torch.ones(2, 4)).dtype is torch.bfloat16


def test_functions_replaced_during_the_session_are_left_alone():
    model = Keeping([F.linear, F.linear], None)
    amp.initialize(model, verbosity=0)
    model.kept[0] = F.relu
    model.kept.pop()
    relu = model.kept[0]
    amp.deinitialize()
    assert model.kept == [F.relu]
    assert relu is F.relu


def test_containers_that_hold_themselves_are_walked_once():
    ring: list[Any] = [F.linear]
    ring.append({"ring": ring})
    model = Keeping(ring, lambda kept, *args: kept[1]["ring"][0](*args))
    amp.initialize(model, verbosity=0)
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16


def test_models_with_functions_in_containers_are_freed():
    model = Keeping(None, lambda kept, *args: kept[0](*args))
    model.kept = [F.linear, model.forward]
    amp.initialize(model, verbosity=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_attribute_that_cannot_be_set_stays():
    class Sealed:
        def __init__(self) -> None:
            object.__setattr__(self, "kept", (1, 2))

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    sealed = Sealed()
    assert replace_in_containers(sealed, lambda value: 3 if value == 2 else value)
    assert sealed.kept == (1, 2)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.matmul(x, self.weight), self.weight).softmax(-1) @ self.weight


def test_functions_of_a_graph_that_was_traced_before_are_cast(half):
    model, graph = Traced(), torch.fx.symbolic_trace(Traced())
    x, code = torch.ones(2, 4), graph.code
    for _ in range(2):
        amp.initialize([model, graph], half_dtype=half, verbosity=0)
        assert graph(x).dtype is half
        assert torch.equal(graph(x), model(x))
        amp.deinitialize()
        assert graph.code == code
        assert graph(x).dtype is torch.float32


def test_a_graph_that_was_exported_before_is_warned_of():
    graph = torch.export.export(Traced(), (torch.ones(2, 4),)).module()
    with pytest.warns(amp.AmpWarning, match=r"torch\.export has made 1; the graphs call operators below"):
        amp.initialize(nn.Sequential(nn.Linear(4, 4), graph), verbosity=0)


def test_functions_of_a_model_that_is_exported_in_the_session_are_cast():
    model = amp.initialize(Traced(), verbosity=0)
    graph = torch.export.export(model, (torch.ones(2, 4),)).module()
    assert graph(torch.ones(2, 4)).dtype is torch.bfloat16

"""Whoever compares a function of torch with its name, as bound now or before, finds them equal."""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import SAMPLES, TORCH_WARNINGS, Maker, call, lacks, resolve
from seen_calls import Functions
from torch import Tensor, fx
from torch.nn.attention.bias import causal_upper_left
from torch.overrides import TorchFunctionMode, get_testing_overrides

from ampatch import amp
from ampatch.cast_lists.lists import shipped
from ampatch.function_wrapper import is_wrapper, unwrapped

pytestmark = [
    pytest.mark.usefixtures("calls_in_both"),
    *[pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS],
]

# Bound before anything is patched, as in libraries that are imported before.
MATMUL, SOFTMAX, LINEAR, METHOD = torch.matmul, F.softmax, F.linear, Tensor.matmul
X = torch.arange(16.0).reshape(4, 4) / 16


def begin() -> None:
    amp.init(half_dtype="bfloat16")


class Handled(Tensor):
    """Looks functions up in a registry."""

    registry: Mapping[Any, str] = types.MappingProxyType({})

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.registry.get(func) or super().__torch_function__(func, kinds, args, kwargs or {})


# One handler over every listed function


NOT_REPORTED = {f"torch.nn.functional.{name}" for name in ("grouped_mm", "upsample", "upsample_bilinear")}


def reported() -> dict[str, list[Any]]:
    """What torch reports to a mode at a call of each listed function, by the function's path."""
    found, listed = {}, set(map(str, shipped().for_half(torch.float16)))
    for path, samples in SAMPLES.items():
        if path in listed and not lacks(path):  # not on the lists: what later versions of torch have removed
            seen = Functions()
            with contextlib.suppress(amp.BannedFunctionError), seen:
                call(path, samples[0], Maker((torch.float32,)))
            found[path] = seen.seen
    return found


def test_modes_get_every_listed_function_as_the_object_under_its_name() -> None:
    before = reported()
    begin()
    bound = {id(unwrapped(function)): function for function in map(resolve, before) if is_wrapper(function)}
    assert len(bound) > 300
    within = reported()
    amp.deinitialize()
    after = reported()
    for path, functions in before.items():
        if path in NOT_REPORTED:  # the mode sees the functions below it, and amp's casts beside them
            continue
        assert within[path] == functions, path
        assert functions == within[path], path
        assert dict.fromkeys(functions, True) == dict.fromkeys(within[path], True), path
        for seen, known in zip(within[path], functions, strict=True):
            # `torch.dsmm` and `torch.spmm` are other objects than `torch.mm`, under whose name torch reports them.
            assert seen is bound.get(id(known), seen) or path.endswith(("dsmm", "spmm")), path
        assert not any(map(is_wrapper, after[path])), path


# Code that compares


@pytest.mark.parametrize("casts", [True, False])
def test_causal_bias_of_torch_is_applied(casts: bool) -> None:
    q, bias = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)), causal_upper_left(4, 4)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    begin()
    with contextlib.nullcontext() if casts else amp.disable_casts():
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    torch.testing.assert_close(found.float(), expected, atol=0.02 if casts else 1e-6, rtol=0)


@pytest.mark.parametrize("filled", ["before", "within"])
def test_a_registry_of_overrides_finds_functions_whenever_it_was_filled(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if filled == "within":
        begin()
    registry = {torch.matmul: "matmul", F.softmax: "softmax", F.linear: "linear", Tensor.matmul: "method"}
    monkeypatch.setattr(Handled, "registry", registry)
    if filled == "before":
        begin()
    x = X.as_subclass(Handled)

    def answers() -> list[Any]:
        return [torch.matmul(x, x), F.softmax(x, 0), F.linear(x, x), x.matmul(x), x @ x, torch.matmul(X, x)]

    assert answers() == ["matmul", "softmax", "linear", "method", "method", "matmul"]
    with amp.disable_casts():
        assert answers() == ["matmul", "softmax", "linear", "method", "method", "matmul"]
    assert torch.cat([x, x]).dtype is torch.float32  # not in the registry
    assert type(torch.mm(x, x)) is Handled
    assert torch.mm(x, x).dtype is torch.bfloat16
    amp.deinitialize()
    assert answers() == ["matmul", "softmax", "linear", "method", "method", "matmul"]


def test_an_override_by_a_tensor_in_a_list_gets_the_function() -> None:
    begin()
    x, seen, half = X.as_subclass(Handled), Functions(), X.bfloat16()
    with seen:
        torch.cat([half, x])
        torch.einsum("ij,jk->ik", [x, X])
    assert seen.seen[0] is torch.cat
    assert seen.seen[1] is torch.einsum


@pytest.mark.parametrize("traced", ["before", "within"])
def test_targets_of_traced_graphs_equal_the_functions(traced: str) -> None:
    def model(x):
        return F.softmax(torch.matmul(F.linear(x, x), x), 0).matmul(x) + x

    begin()
    if traced == "before":
        amp.deinitialize()
    graph = fx.symbolic_trace(model)
    if traced == "before":
        begin()
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [F.linear, torch.matmul, F.softmax, operator.add]
    assert targets == [LINEAR, MATMUL, SOFTMAX, operator.add]
    if traced == "within":
        assert targets[1] is torch.matmul
        assert graph(X).dtype is model(X).dtype
    copied = pickle.loads(pickle.dumps(graph))
    assert copied(X).dtype is graph(X).dtype
    amp.deinitialize()
    assert targets == [F.linear, torch.matmul, F.softmax, operator.add]
    assert torch.equal(graph(X), model(X))
    graph.recompile()
    assert torch.equal(graph(X), model(X))


def test_torch_s_tables_of_overrides_know_the_names() -> None:
    tables = get_testing_overrides()
    begin()
    for function in (torch.matmul, F.softmax, F.linear, Tensor.matmul):
        assert is_wrapper(function)
        assert function in tables
        assert torch.overrides.resolve_name(function) is not None
    assert torch.overrides.is_tensor_method_or_property(Tensor.matmul)
    assert not torch.overrides.is_tensor_method_or_property(torch.matmul)


@pytest.mark.parametrize("function", [MATMUL, SOFTMAX, LINEAR, METHOD], ids=lambda each: each.__name__)
def test_a_wrapper_equals_its_original_and_nothing_else(function: Any) -> None:
    path = {MATMUL: "torch.matmul", SOFTMAX: "torch.nn.functional.softmax", LINEAR: "torch.nn.functional.linear"}
    begin()
    found = resolve(path.get(function, "torch.Tensor.matmul"))
    assert is_wrapper(found)
    assert found == function
    assert function == found
    assert hash(found) == hash(function)
    assert {function: 1}[found] == {found: 1}[function] == 1
    assert found != torch.bmm
    assert torch.bmm != found
    assert found != 1
    assert found is not None
    assert copy.deepcopy({"activation": found})["activation"] is found
    amp.deinitialize()
    assert found == function
    begin()
    again = resolve(path.get(function, "torch.Tensor.matmul"))
    assert again is not found
    assert again == found


def test_a_function_in_a_class_binds_as_without_amp() -> None:
    begin()

    class Layer:
        product, activation, method = torch.matmul, F.softmax, Tensor.matmul

    assert Layer().product(X, X).dtype is torch.bfloat16  # a builtin does not bind
    assert isinstance(Layer().activation, types.MethodType)  # a function in Python does
    assert isinstance(Layer().method, types.MethodType)
    assert X.matmul(X).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_compares_wrappers_with_originals(backend: str) -> None:
    begin()

    def model(x: Tensor) -> tuple[Tensor, bool, bool, bool]:
        result = torch.matmul(x, x)
        return result, torch.matmul is MATMUL, torch.matmul == MATMUL, torch.matmul in (F.softmax, MATMUL)

    result, *said = torch.compile(model, backend=backend, fullgraph=True)(X)
    assert said[1:] == [True, True]
    torch._dynamo.reset()
    assert result.dtype is torch.bfloat16

    def under_a_mode(x: Tensor) -> Tensor:
        with Doubling():
            return torch.matmul(x, x)

    expected = under_a_mode(X)
    assert torch.equal(expected, result * 2)
    assert torch.equal(torch.compile(under_a_mode, backend=backend)(X), expected)


class Doubling(TorchFunctionMode):
    """Doubles the results of one function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.matmul else result

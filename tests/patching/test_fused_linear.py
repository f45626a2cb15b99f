"""Linear layers as one node of the graph: that users see what they see without it, with calls in Python and in C++."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from fresh import Fresh
from helpers import HALF_DTYPES, assert_same_bits, check_rows, combinations, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime

NODE = "FusedLinearBackward"
PLAIN = {"fused_linear": False}


@contextlib.contextmanager
def initialized(half: torch.dtype = torch.bfloat16, **options: Any) -> Iterator[None]:
    """A session in which linear layers of weights that require gradients cast, whoever calls them."""
    amp.initialize(nn.Module(), opt_level="O1", half_dtype=half, verbosity=0, **options)
    try:
        yield
    finally:
        amp.deinitialize()


both_halves = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


@pytest.fixture(params=["python", "compiled"], autouse=True)
def implementation(
    request: pytest.FixtureRequest, select_calls: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each test runs with calls in Python and in C++, and with products that are the same everywhere."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    select_calls(request.param)
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "half")
    return request.param


@pytest.fixture
def in_float32(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients are products in float32."""
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "float32")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype).requires_grad_(needs_grad)


def flat(value: Any) -> Iterator[Any]:
    """The tensors and plain values that a nested result holds, in order."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            yield from flat(item)
    else:
        yield value


def is_fused(result: Any) -> bool:
    """Whether a linear layer's node is in the graph of one of the tensors."""
    edges = [each.grad_fn for each in flat(result) if isinstance(each, Tensor) and each.grad_fn is not None]
    return NODE in names_behind(edges)


def names_behind(nodes: Iterable[Any]) -> set[str]:
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {node.name() for node in seen}


def visible(value: Any) -> list[Any]:
    """All that a user can see of a result: every bit of tensors with their types, shapes and strides; plain values."""
    return [
        (each.dtype, each.shape, each.stride(), each.requires_grad, bits(each)) if isinstance(each, Tensor) else each
        for each in flat(value)
    ]


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def outcome(run: Callable[[], Any], half: torch.dtype = torch.bfloat16, **options: Any) -> tuple[bool, list[Any]]:
    """What a function returns, or raises, in a session; and whether it took the node."""
    return outcomes({"": run}, half, **options)[""]


def outcomes(
    table: Mapping[str, Callable[[], Any]], half: torch.dtype = torch.bfloat16, **options: Any
) -> dict[str, tuple[bool, list[Any]]]:
    """The outcome of each function of a table, all in one session."""
    found = {}
    with initialized(half, **(PLAIN | options)):
        for name, run in table.items():
            torch.manual_seed(0)
            try:
                result = run()
            except Exception as error:  # noqa: BLE001 - compared
                told = [type(error), str(error), getattr(error, "__notes__", [])]
                found[name] = False, ["raised", *flat(told)]
            else:
                found[name] = is_fused(result), visible(result)
    return found


def check(run: Callable[[], Any], half: torch.dtype = torch.bfloat16, fuses: bool = True, **options: Any) -> list[Any]:
    """The same with and without the node, which is taken if ``fuses``; returns it."""
    was_fused, wanted = outcome(run, half, **options)
    assert not was_fused
    is_taken, found = outcome(run, half, fused_linear=True, **options)
    assert found == wanted
    assert is_taken == fuses
    assert found[:1] != ["raised"] or not fuses
    return found


def check_each(
    table: Mapping[str, Callable[[], Any]],
    subtests: pytest.Subtests,
    half: torch.dtype = torch.bfloat16,
    fuses: bool = True,
) -> None:
    """`check` of each function in a table, in two sessions."""
    wanted, found = outcomes(table, half), outcomes(table, half, fused_linear=True)

    def compare(name: str) -> None:
        assert found[name][1] == wanted[name][1]
        assert (wanted[name][0], found[name][0]) == (False, fuses)

    check_rows(subtests, ((name, name) for name in table), compare)


# Bits


def column_major(*shape: int) -> Tensor:
    *others, rows, columns = shape
    return drawn(*others, columns, rows).transpose(-1, -2)


INPUTS = {
    "2-D": lambda: drawn(5, 8),
    "one row": lambda: drawn(1, 8),
    "3-D": lambda: drawn(3, 5, 8),
    "4-D": lambda: drawn(2, 3, 5, 8),
    "5-D": lambda: drawn(2, 1, 3, 2, 8),
    "column-major": lambda: column_major(5, 8),
    "column-major, 3-D": lambda: column_major(3, 5, 8),
    "batch last": lambda: drawn(5, 3, 8).transpose(0, 1),
    "batch last, 4-D": lambda: drawn(5, 3, 2, 8).permute(2, 0, 1, 3),
    "every second row": lambda: drawn(10, 8)[::2],
    "every second column": lambda: drawn(5, 16)[:, ::2],
    "every second column, 3-D": lambda: drawn(3, 5, 16)[..., ::2],
    "expanded rows": lambda: drawn(1, 8).expand(5, 8),
    "expanded batch": lambda: drawn(5, 8).expand(3, 5, 8),
    "expanded columns": lambda: drawn(5, 1).expand(5, 8),
    "a slice": lambda: drawn(5, 11)[:, 3:],
}
WEIGHTS = {
    "usual": lambda: drawn(6, 8),
    "column-major": lambda: column_major(6, 8),
    "a slice": lambda: drawn(6, 12)[:, 2:10],
    "one output": lambda: drawn(1, 8),
    "square": lambda: drawn(8, 8),
}
GRADIENTS = {
    "random": lambda result: (result * torch.randn(result.shape).to(result.dtype)).sum(),
    "of a sum": lambda result: result.float().sum(),
    "transposed": lambda result: (result.transpose(0, -1).float() * torch.randn(result.transpose(0, -1).shape)).sum(),
}


@both_halves
@pytest.mark.parametrize("shape", INPUTS)
def test_results_and_gradients_have_the_same_bits(shape: str, half: torch.dtype, subtests: pytest.Subtests) -> None:
    def case(dtype: torch.dtype, layout: str, of: str, has_bias: bool, needs_grad: bool) -> Callable[[], Any]:
        def run() -> Any:
            given = INPUTS[shape]().to(dtype).detach().requires_grad_(needs_grad)
            weight = nn.Parameter(WEIGHTS[layout]())
            bias = nn.Parameter(drawn(weight.shape[0])) if has_bias else None
            result = F.linear(given, weight, bias)
            return result, grad(GRADIENTS[of](result), [each for each in (given, weight, bias) if asked(each)])

        return run

    kinds = combinations((torch.float32, *HALF_DTYPES), tuple(WEIGHTS), tuple(GRADIENTS), (True, False), (True, False))
    check_each({str(kind): case(*kind) for kind in kinds}, subtests, half)


def test_other_sizes_have_the_same_bits(subtests: pytest.Subtests) -> None:
    """Ones make layouts ambiguous, and large sizes take other kernels."""

    def case(shape: tuple[int, ...], outputs: int, is_column_major: bool, half_input: bool) -> Callable[[], Any]:
        def run() -> Any:
            make = column_major if is_column_major else drawn
            weight, bias = nn.Parameter(make(outputs, shape[-1])), nn.Parameter(drawn(outputs))
            given = make(*shape).to(torch.bfloat16 if half_input else torch.float32).requires_grad_()
            result = F.linear(given, weight, bias)
            return result, grad((result * drawn(*result.shape).bfloat16()).sum(), (given, weight, bias))

        return run

    shapes = (*itertools.product((1, 2), repeat=2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (65, 129), (3, 33, 256))
    kinds = itertools.product(shapes, (1, 2, 96), (False, True), (False, True))
    check_each({str(kind): case(*kind) for kind in kinds}, subtests)


def test_the_forward_pass_has_torch_s_products(subtests: pytest.Subtests) -> None:
    """On some processors two products of the same operands have the same bits, on others not."""
    kinds = list(itertools.product(INPUTS, (True, False)))

    def products(fused_linear: bool) -> dict[Any, list[str]]:
        found = {}
        with initialized(fused_linear=fused_linear):
            for shape, has_bias in kinds:
                weight, bias = nn.Parameter(column_major(6, 8)), nn.Parameter(drawn(6)) if has_bias else None
                with torch.autograd.profiler.profile() as profile:
                    result = F.linear(INPUTS[shape](), weight, bias)
                assert is_fused(result) == fused_linear
                names = (event.name for event in profile.function_events)
                found[shape, has_bias] = [name for name in names if name.endswith(("mm", "mv"))]
        return found

    wanted, found = products(False), products(True)

    def compare(kind: tuple[str, bool]) -> None:
        assert found[kind] == wanted[kind] != []

    check_rows(subtests, ((str(kind), kind) for kind in kinds), compare)


def asked(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def test_gradients_of_leaves_have_the_same_strides() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), column_major(5, 8).requires_grad_()
        layer.weight = nn.Parameter(column_major(6, 8))
        result = layer(given)
        result.float().square().sum().backward()
        return result, given.grad, layer.weight.grad, layer.bias.grad

    check(run)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_in_a_region_of_autocast(half: torch.dtype) -> None:
    check(lambda: torch.autocast("cpu", half)(nn.Linear(3, 2))(drawn(4, 3)))


CALLS = {
    "positional": lambda x, w, b: F.linear(x, w, b),  # noqa: PLW0108 - looked up in the session
    "bias by name": lambda x, w, b: F.linear(x, w, bias=b),
    "weight by name": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "all by name": lambda x, w, b: F.linear(bias=b, input=x, weight=w),
    "no bias": lambda x, w, _: F.linear(x, w),
    "bias is None": lambda x, w, _: F.linear(x, w, None),
    "bias is None, by name": lambda x, w, _: F.linear(x, w, bias=None),
}


@pytest.mark.parametrize("how", CALLS)
def test_every_form_of_the_call(how: str) -> None:
    def run() -> Any:
        given, weight, bias = drawn(5, 8, needs_grad=True), nn.Parameter(drawn(6, 8)), nn.Parameter(drawn(6))
        result = CALLS[how](given, weight, bias)
        result.float().square().sum().backward()
        return result, given.grad, weight.grad, bias.grad

    check(run)


@both_halves
def test_a_product_in_float32_has_the_gradient_of_the_halves_to_float32_rounding(
    half: torch.dtype, in_float32: None
) -> None:
    with initialized(half, fused_linear=True):
        for layout in WEIGHTS.values():
            weight, bias = nn.Parameter(layout()), nn.Parameter(drawn(layout().shape[0]))
            given = drawn(64, 8, needs_grad=True)
            result = F.linear(given, weight, bias)
            factor = drawn(*result.shape, dtype=half)
            of_input, of_weight, of_bias = grad((result * factor).sum(), (given, weight, bias))
            exact = factor.double().t() @ given.to(half).double()
            size = factor.double().abs().t() @ given.to(half).double().abs()
            assert of_weight.dtype is torch.float32
            assert ((of_weight - exact).abs() <= 64 * 2**-24 * size).all()
            assert ((of_bias - factor.double().sum(0)).abs() <= 64 * 2**-24 * factor.double().abs().sum(0)).all()
            assert (of_weight != of_weight.to(half)).any()
            assert_same = factor @ weight.to(half)
            assert torch.equal(of_input, assert_same.float())


def test_a_product_in_float32_does_not_overflow_where_half_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradients(product: str) -> tuple[Tensor, Tensor]:
        monkeypatch.setenv("AMPATCH_FUSED_LINEAR", product)
        layer = nn.Linear(2, 2)
        with initialized(torch.float16, fused_linear=True):
            (layer(torch.full((4, 2), 200.0)) * torch.full((), 200.0).half()).sum().backward()
        return layer.weight.grad, layer.bias.grad

    assert gradients("half")[0].isinf().all()
    weight, bias = gradients("float32")
    assert weight.eq(4 * 200 * 200).all()
    assert bias.eq(4 * 200).all()


@pytest.mark.usefixtures("in_float32")
def test_an_overflow_in_float32_is_seen() -> None:
    layer, given = nn.Linear(2, 2), torch.full((1, 2), 65504.0)
    with initialized(torch.float16, fused_linear=True):
        (layer(given).float() * float("inf")).sum().backward()
    assert not layer.weight.grad.isfinite().any()


# Higher orders. The parameter is found once in each pass, so the sums are of one number each.


def twice(create: Callable[[Tensor, nn.Linear], Tensor]) -> Callable[[], Any]:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = create(given, layer)
        (first,) = grad(result, given, create_graph=True)
        return result, first, *grad(first.float().square().sum(), (given, layer.weight), allow_unused=True)

    return run


ORDERS = {
    "of a square": twice(lambda x, layer: layer(x).float().square().sum()),
    "3-D": twice(lambda x, layer: layer(x.unsqueeze(0)).float().square().sum()),
    "tanh behind it": twice(lambda x, layer: layer(x).tanh().float().sum()),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_penalty_on_a_gradient(order: str) -> None:
    """The weight's gradients are sums, in float32 rather than half: they are near only."""

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with initialized(**(PLAIN | options)):
            return list(flat(ORDERS[order]()))

    wanted, found = run(), run(fused_linear=True)
    assert is_fused(found)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert_same_bits(one, other)
    assert found[3].dtype is wanted[3].dtype
    torch.testing.assert_close(found[3], wanted[3], rtol=2**-6, atol=2**-6)


def test_the_penalty_on_a_gradient_of_a_linear_function() -> None:
    check(twice(lambda x, layer: layer(x).float().sum()))


def test_the_input_s_second_gradient_has_the_same_bits() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given).float()
        (first,) = grad(result.pow(3).sum(), given, create_graph=True)
        (second,) = grad(first.pow(2).sum(), given, create_graph=True)
        (third,) = grad(second.pow(2).sum(), given)
        return result, first, second, third

    check(run)


def test_second_derivatives_of_the_weight() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8)
        result = layer(given).float()
        (first,) = grad(result.pow(3).sum(), layer.weight, create_graph=True)
        (second,) = grad(first.pow(2).sum(), layer.weight, create_graph=True)
        (third,) = grad(second.sum(), layer.bias)
        return result, first, second, third

    check(run)


@pytest.mark.parametrize("product", ["half", "float32"])
def test_third_order_is_right(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small whole numbers, which every type has exactly."""
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", product)

    def run(make: Callable[[nn.Linear, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        layer, given = nn.Linear(2, 2).to(dtype), torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=dtype).requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
            layer.bias.copy_(torch.tensor([1.0, -1.0]))
        leaves = (given, layer.weight, layer.bias)
        first = grad(make(layer, given).pow(3).sum(), leaves, create_graph=True)
        second = grad(sum(each.sum() for each in first), leaves, create_graph=True)
        third = grad(sum(each.sum() for each in second), leaves, allow_unused=True, materialize_grads=True)
        return [*first, *second, *third]

    wanted = run(lambda layer, x: layer(x), torch.float64)
    with initialized(torch.float16, fused_linear=True):
        found = run(lambda layer, x: layer(x).float(), torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.double(), other)


def test_functions_of_autograd() -> None:
    def run() -> Any:
        layer, given, along = nn.Linear(3, 2), drawn(4, 3), drawn(4, 3)
        loss = lambda x: layer(x).float().pow(2).sum()  # noqa: E731
        return (
            layer(given),
            torch.autograd.functional.vjp(loss, given),
            torch.autograd.functional.jvp(loss, given, along, create_graph=False),
            torch.autograd.functional.hvp(loss, given, along),
            torch.autograd.functional.vhp(loss, given, along),
            torch.autograd.functional.hessian(loss, given),
            torch.autograd.functional.jacobian(loss, given),
        )

    check(run)


# Other kinds of derivatives


def forward_mode() -> Any:
    layer, given, along = nn.Linear(3, 2), drawn(4, 3), drawn(4, 3)
    with fwAD.dual_level():
        result = fwAD.unpack_dual(layer(fwAD.make_dual(given, along)))
        return result.primal, result.tangent


def forward_mode_of_halves() -> Any:
    layer, given, along = nn.Linear(3, 2), drawn(4, 3).bfloat16(), drawn(4, 3).bfloat16()
    with fwAD.dual_level():
        result = fwAD.unpack_dual(layer(fwAD.make_dual(given, along)))
        return result.primal, result.tangent


def forward_over_reverse() -> Any:
    layer, given, along = nn.Linear(3, 2), drawn(4, 3), drawn(4, 3)
    with fwAD.dual_level():
        dual = fwAD.make_dual(given, along).requires_grad_()
        (first,) = grad(layer(dual).float().pow(2).sum(), dual, create_graph=True)
        return fwAD.unpack_dual(first)


def of_functions(transformed: Callable[[nn.Linear, Tensor], Any]) -> Callable[[], Any]:
    return lambda: transformed(nn.Linear(3, 2), drawn(4, 3))


def losses(layer: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(layer, parameters, (x,)).float().pow(2).sum()


def ensemble() -> Any:
    parts = [nn.Linear(3, 2) for _ in range(3)]
    parameters, buffers = stack_module_state(parts)
    given = drawn(4, 3)
    return vmap(lambda p, b: functional_call(parts[0], (p, b), (given,)))(parameters, buffers)


UNFUSED = {
    "dual tensors": forward_mode,
    "dual halves": forward_mode_of_halves,
    "forward over reverse": forward_over_reverse,
    "func.jvp": of_functions(lambda layer, x: jvp(layer, (x,), (x,))),
    "func.vjp": of_functions(lambda layer, x: (vjp(layer, x)[0], vjp(layer, x)[1](torch.ones(4, 2).bfloat16()))),
    "func.vmap": of_functions(lambda layer, x: vmap(layer)(x)),
    "func.jacrev": of_functions(lambda layer, x: jacrev(layer)(x)),
    "func.hessian": of_functions(lambda layer, x: hessian(lambda y: layer(y).float().pow(3).sum())(x)),
    "func.grad of the parameters": of_functions(
        lambda layer, x: torch.func.grad(lambda p: losses(layer, p, x))(dict(layer.named_parameters()))
    ),
    "func.grad of the input": of_functions(
        lambda layer, x: torch.func.grad(lambda y: layer(y).float().pow(2).sum())(x)
    ),
    "an ensemble": ensemble,
    "per-sample gradients": of_functions(
        lambda layer, x: vmap(torch.func.grad(lambda p, y: losses(layer, p, y)), (None, 0))(
            dict(layer.named_parameters()), x
        )
    ),
    "functional_call with other tensors": of_functions(
        lambda layer, x: functional_call(layer, {"weight": layer.weight * 2, "bias": layer.bias}, (x,))
    ),
    "no_grad": torch.no_grad()(of_functions(lambda layer, x: layer(x))),
    "inference_mode": lambda: torch.inference_mode()(of_functions(lambda layer, x: layer(x)))().clone(),
    "enable_grad in inference mode": torch.inference_mode()(
        torch.enable_grad()(of_functions(lambda layer, x: layer(x).is_inference()))
    ),
    "a frozen weight": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3), False), nn.Parameter(drawn(2))),
    "all frozen": lambda: nn.Linear(3, 2).requires_grad_(False)(drawn(4, 3, needs_grad=True)),
    "float64": lambda: nn.Linear(3, 2).double()(drawn(4, 3).double()),
    "half weights": lambda: nn.Linear(3, 2).bfloat16()(drawn(4, 3)),
    "a tensor as weight": lambda: F.linear(drawn(4, 3), drawn(2, 3, needs_grad=True), nn.Parameter(drawn(2))),
    "a tensor as bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), drawn(2)),
    "a broadcast bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(1))),
    "a scalar bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(torch.tensor(2.0))),
    "a 2-D bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(4, 2))),
    "a half bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(2).bfloat16())),
    "1-D": lambda: nn.Linear(3, 2)(drawn(3, needs_grad=True)),
    "1-D weight": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(3))),
    "no rows": lambda: nn.Linear(3, 2)(drawn(0, 3, needs_grad=True)),
    "no batch": lambda: nn.Linear(3, 2)(drawn(2, 0, 3, needs_grad=True)),
    "no outputs": lambda: F.linear(drawn(4, 3), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0))),
    "no inputs": lambda: F.linear(torch.empty(4, 0), nn.Parameter(torch.empty(2, 0)), nn.Parameter(drawn(2))),
    "integers": lambda: nn.Linear(3, 2)(torch.ones(4, 3, dtype=torch.int64)),
    "complex": lambda: nn.Linear(3, 2)(torch.ones(4, 3, dtype=torch.complex64)),
    "float64 input": lambda: nn.Linear(3, 2)(drawn(4, 3).double()),
    "wrong columns": lambda: nn.Linear(3, 2)(drawn(4, 5)),
    "wrong columns, 3-D": lambda: nn.Linear(3, 2)(drawn(1, 4, 5)),
    "wrong bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(7))),
    "a scalar": lambda: nn.Linear(3, 2)(torch.tensor(1.0)),
    "a third dimension": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 2, 3))),
    "no arguments": F.linear,
    "no weight": lambda: F.linear(drawn(4, 3)),
    "a fourth argument": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), None, None),
    "an unknown name": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), biases=None),
    "twice the weight": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), weight=nn.Parameter(drawn(2, 3))),
    "out=": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), out=torch.empty(4, 2)),
    "a list": lambda: F.linear([1.0, 2.0, 3.0], nn.Parameter(drawn(2, 3))),
    "None": lambda: nn.Linear(3, 2)(None),
    "a sparse input": lambda: nn.Linear(3, 2)(torch.eye(3).to_sparse()).to_dense(),
    "a CSR input": lambda: nn.Linear(3, 2)(torch.eye(3).to_sparse_csr()),
    "meta weights": lambda: nn.Linear(3, 2, device="meta")(torch.empty(4, 3, device="meta")).shape,
    "a meta input": lambda: nn.Linear(3, 2)(torch.empty(4, 3, device="meta")).shape,
    "a meta weight": lambda: nn.Linear(3, 2, device="meta")(torch.empty(4, 3)).shape,
    "disable_casts": lambda: amp.disable_casts()(nn.Linear(3, 2))(drawn(4, 3)),
    "jit.trace": lambda: traced(nn.Linear(3, 2), drawn(4, 3)),
    "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(nn.Linear(3, 2))(drawn(4, 3)).code,
    "nested tensors of one shape": lambda: nn.Linear(3, 2)(nested(2, 2)).unbind()[0],
    "nested tensors": lambda: nn.Linear(3, 2)(nested(2, 4)).unbind()[1],
    "jagged tensors": lambda: nn.Linear(3, 2)(nested(2, 4, layout=torch.jagged)).unbind()[1],
    "an inference tensor that cannot be saved": lambda: nn.Linear(3, 2)(inference(torch.bfloat16)),
    "inference weights": lambda: in_inference(lambda: nn.Linear(3, 2))(drawn(4, 3)).is_inference(),
    "an embedding's weight, looked up": lambda: F.linear(drawn(4, 3), nn.Embedding(2, 3)(torch.tensor([0, 1]))),
}


def in_inference(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def inference(dtype: torch.dtype) -> Tensor:
    return in_inference(lambda: drawn(4, 3).to(dtype))


def nested(*rows: int, layout: torch.layout = torch.strided) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        return torch.nested.nested_tensor([drawn(each, 3) for each in rows], layout=layout)


def traced(layer: nn.Module, x: Tensor) -> Any:
    kinds = [each.kind() for each in torch.jit.trace(layer, x, check_trace=False).inlined_graph.nodes()]
    return kinds, layer(x).detach()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*beta state.*")
def test_calls_that_are_made_as_without_it(subtests: pytest.Subtests) -> None:
    check_each(UNFUSED, subtests, fuses=False)


def test_a_negated_view_is_cast_to_a_plain_tensor() -> None:
    check(lambda: nn.Linear(3, 2)(torch.complex(drawn(4, 3), drawn(4, 3)).conj().imag))


class Sub(Tensor):
    pass


class SubParameter(nn.Parameter):
    pass


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_subclasses_and_modes_see_the_same() -> None:
    def of_subclass() -> Any:
        layer = nn.Linear(3, 2)
        result = layer(drawn(4, 3).as_subclass(Sub))
        return str(type(result)), result.as_subclass(Tensor)

    def of_parameter() -> Any:
        result = F.linear(drawn(4, 3), SubParameter(drawn(2, 3)))
        return str(type(result)), result.as_subclass(Tensor)

    def under_function_mode() -> Any:
        layer = nn.Linear(3, 2)
        with Counting() as mode:
            result = layer(drawn(4, 3))
        return result, [each for each in mode.seen if each == "linear"]

    def under_dispatch_mode() -> Any:
        layer, given = nn.Linear(3, 2), drawn(4, 3)
        with Operators() as mode:
            result = layer(given)
        return result, mode.seen

    def fake() -> Any:
        with FakeTensorMode():
            result = nn.Linear(3, 2)(torch.empty(4, 3))
            return str(result.dtype), tuple(result.shape), result.grad_fn.name()

    check(of_subclass)
    check(of_parameter, fuses=False)
    check(under_dispatch_mode, fuses=False)
    check(fake, fuses=False)
    assert outcome(under_function_mode, fused_linear=True)[1] == outcome(under_function_mode)[1]


# Graphs: what is saved, asked for, kept and freed


def operators_of(run: Callable[[], object]) -> list[str]:
    with Operators() as mode:
        run()
    return mode.seen


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "of a node"])
def test_gradients_that_nobody_asks_for_are_not_computed(leaf: bool) -> None:
    def products(*asked_for: str) -> Any:
        layer, start = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        given = start if leaf else start * 1
        named = {"input": given, "weight": layer.weight, "bias": layer.bias}
        result = layer(given).float().sum()
        inputs = [named[name] for name in asked_for] or None
        by_backward = operators_of(lambda: result.backward(inputs=inputs, retain_graph=True))
        by_grad = operators_of(lambda: grad(result, inputs or list(named.values())))
        return [len([name for name in each if "mm" in name or "sum" in name]) for each in (by_backward, by_grad)]

    for count, names in ((1, ["input"]), (1, ["weight"]), (1, ["bias"]), (2, ["bias", "input"]), (3, [])):
        assert outcome(lambda: products(*names), fused_linear=True)[1] == [count, count]  # noqa: B023 - called at once
        assert outcome(lambda: products(*names))[1] == [count, count]  # noqa: B023


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_as_much_is_saved(shape: tuple[int, ...], needs_grad: bool) -> None:
    def run() -> Any:
        layer, given, packed = nn.Linear(8, 6), drawn(*shape, needs_grad=needs_grad), []
        with saved_tensors_hooks(
            lambda each: packed.append((each.numel(), str(each.dtype))) or each, lambda each: each
        ):
            result = layer(given)
        result.float().sum().backward()
        return result, packed, layer.weight.grad

    check(run)


def test_saved_tensors_go_through_hooks() -> None:
    def run(packing: contextlib.AbstractContextManager[Any]) -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        with packing:
            result = layer(given)
        (first,) = grad(result.float().pow(3).sum(), given, create_graph=True)
        second = grad(first.sum(), given, retain_graph=True)
        return result, first, second, grad(result.float().sum(), layer.weight)

    # What is unpacked has no graph, unless the hooks keep the tensor itself.
    check(lambda: run(saved_tensors_hooks(lambda each: [each], lambda each: each[0])))
    check(lambda: run(saved_tensors_hooks(lambda each: each.clone(), lambda each: each.clone())))
    check(lambda: run(torch.autograd.graph.save_on_cpu()))
    check(lambda: run(torch.autograd.graph.disable_saved_tensors_hooks("none here")))


def test_memory_may_be_changed_that_was_saved() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, dtype=torch.bfloat16, needs_grad=True) * 1
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            result = layer(given)
            given.zero_()
            result.float().sum().backward()
        return result, layer.weight.grad

    assert outcome(run, fused_linear=True)[1] == outcome(run)[1]


def test_errors_of_a_backward_pass() -> None:
    def second_time() -> Any:
        result = nn.Linear(8, 6)(drawn(5, 8, needs_grad=True)).float().sum()
        result.backward()
        result.backward()

    def changed_input() -> Any:
        given = drawn(5, 8, dtype=torch.bfloat16)
        result = nn.Linear(8, 6)(given)
        given.zero_()
        result.float().sum().backward()

    def wrong_gradient() -> Any:
        nn.Linear(8, 6)(drawn(5, 8)).backward(torch.ones(3))

    def no_gradient() -> Any:
        nn.Linear(8, 6)(drawn(5, 8)).backward()

    def unused() -> Any:
        layer = nn.Linear(8, 6)
        grad(layer(drawn(5, 8)).float().sum(), drawn(2, needs_grad=True))

    for run in (second_time, changed_input, wrong_gradient, no_gradient, unused):
        assert check(run, fuses=False)[0] == "raised"


def test_graphs_that_are_kept_or_used_in_part() -> None:
    def retained() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        for _ in range(3):
            result.float().sum().backward(retain_graph=True)
        return result, given.grad, layer.weight.grad, layer.bias.grad

    def in_part() -> Any:
        layer, given, other = nn.Linear(8, 6), drawn(5, 8, needs_grad=True), drawn(3, needs_grad=True)
        result = layer(given)
        some = lambda **how: grad(result.float().sum(), (given, other), retain_graph=True, **how)  # noqa: E731
        return result, some(allow_unused=True), some(materialize_grads=True), grad(result, layer.bias, result)

    def never() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        first = grad(result.float().sum() * 0 + given.sum(), given, retain_graph=True)
        return result, first, layer.weight.grad

    for run in (retained, in_part, never):
        check(run)


def test_an_undefined_gradient_is_passed_on() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, __: Tensor) -> None:
            return None

    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        Nothing.apply(result).float().sum().backward()
        return result, given.grad, layer.weight.grad, layer.bias.grad

    check(run)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_weight_may_change_between_the_passes(with_graph: bool) -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        with torch.no_grad():
            layer.weight.mul_(2)
            layer.bias.zero_()
        of_input, of_weight = grad(result.float().pow(2).sum(), (given, layer.weight), create_graph=with_graph)
        second = grad(of_input.sum(), given, retain_graph=True) if with_graph else ()
        return result, of_input, of_weight, second, layer(given)

    check(run)


@pytest.mark.parametrize("when", ["frozen", "data", "replaced", "requires_grad"])
def test_weights_that_change_otherwise(when: str) -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        before, weight = layer(given), layer.weight
        if when == "data":
            layer.weight.data = drawn(6, 8)
        elif when == "replaced":
            layer.weight = nn.Parameter(drawn(6, 8))
        else:
            layer.weight.requires_grad_(False)
            if when == "requires_grad":
                layer(given)
                layer.weight.requires_grad_()
        after = layer(given)
        with contextlib.suppress(RuntimeError):
            (before.float().pow(2).sum() + after.float().sum()).backward(inputs=[given], retain_graph=True)
        return before, after, given.grad, grad(after.float().sum(), layer.bias), weight.grad

    check(run)


def test_the_result_may_be_written_to(subtests: pytest.Subtests) -> None:
    def case(write: str, bias: bool, shape: tuple[int, ...]) -> Callable[[], Any]:
        def run() -> Any:
            layer, given = nn.Linear(8, 6, bias=bias), drawn(*shape, needs_grad=True)
            result = layer(given)
            if write == "relu_":
                result = F.relu_(result)
            elif write == "index":
                result[0] = 0
            elif write == "view":
                result.view(-1).mul_(2)
            else:
                getattr(result, write)(2)
            result.float().square().sum().backward()
            return result, given.grad, layer.weight.grad

        return run

    writes, shapes = ("relu_", "add_", "mul_", "index", "view"), ((5, 8), (2, 5, 8), (2, 2, 5, 8))
    check_each(
        {
            f"{write} {bias} {shape}": case(write, bias, shape)
            for write in writes
            for bias in (True, False)
            for shape in shapes
        },
        subtests,
    )


def test_the_result_may_be_detached_in_place() -> None:
    check(_detached, fuses=False)


def _detached() -> Any:
    result = nn.Linear(8, 6)(drawn(5, 8))
    return result.detach_(), result.requires_grad


def test_attributes_of_the_result() -> None:
    def run() -> Any:
        layer = nn.Linear(8, 6)
        result = layer(drawn(5, 8))
        result.retain_grad()
        result.float().sum().backward()
        return result, result.grad, result.is_leaf, result._version, result.is_inference(), result.is_contiguous()

    check(run)


# Hooks


def test_hooks_hear_the_same() -> None:
    def run() -> Any:
        heard: list[Any] = []
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)

        def note(name: str) -> Callable[..., None]:
            return lambda *values: heard.append((name, [each for each in flat(values) if isinstance(each, Tensor)]))

        def doubled(gradient: Tensor) -> Tensor:
            heard.append(("weight", gradient))
            return gradient * 2

        layer.weight.register_hook(doubled)
        layer.weight.register_post_accumulate_grad_hook(lambda weight: heard.append(("post", weight.grad.clone())))
        given.register_hook(note("input"))
        layer.register_forward_pre_hook(note("forward pre"))
        layer.register_forward_hook(note("forward"))
        layer.register_full_backward_pre_hook(note("backward pre"))
        layer.register_full_backward_hook(note("backward"))
        torch.autograd.graph.register_multi_grad_hook((given, layer.weight, layer.bias), note("multi"))
        torch.autograd.graph.register_multi_grad_hook((given, layer.weight), note("any"), mode="any")
        result = layer(given)
        result.grad_fn.register_prehook(note("node pre"))
        result.float().square().sum().backward()
        return result, heard, layer.weight.grad, layer.bias.grad, given.grad

    check(run)


def test_hooks_of_the_node_can_change_gradients() -> None:
    with initialized(fused_linear=True):
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        node = result.grad_fn
        assert node.name() == NODE
        assert [type(before).__name__ for before, _ in node.next_functions[1:3]] == ["AccumulateGrad"] * 2
        node.metadata["key"] = "value"
        assert result.grad_fn.metadata["key"] == "value"
        node.register_hook(lambda found, _: tuple(None if each is None else each * 0 for each in found))
        result.float().sum().backward()
    assert not layer.weight.grad.any()
    assert not given.grad.any()


# Checkpoints


def small(depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(8, 8), nn.Tanh())))


def keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


def nothing_saved() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def without_early_stop(model: nn.Module, x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(model, x, use_reentrant=False)


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "without early stop": without_early_stop,
    "selective": lambda model, x: checkpoint(model, x, use_reentrant=False, context_fn=selective),
    "selective, nothing saved": lambda model, x: checkpoint(model, x, use_reentrant=False, context_fn=nothing_saved),
    "nested": lambda model, x: checkpoint(
        lambda y: checkpoint(model[2:], checkpoint(model[:2], y, use_reentrant=False), use_reentrant=False),
        x,
        use_reentrant=False,
    ),
    "reentrant in one that is not": lambda model, x: checkpoint(
        lambda y: checkpoint(model, y, use_reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)], ids=str)
def test_checkpoints(shape: tuple[int, ...], subtests: pytest.Subtests) -> None:
    def case(kind: str) -> Callable[[], Any]:
        def run() -> Any:
            model, given = small(), drawn(*shape, needs_grad=True)
            result = CHECKPOINTS[kind](model, given)
            result.float().square().sum().backward()
            # The graph of a reentrant checkpoint begins anew.
            return result.detach(), given.grad, [each.grad for each in model.parameters()]

        return run

    check_each({kind: case(kind) for kind in CHECKPOINTS}, subtests, fuses=False)


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding((x > 0).long()[..., 0]))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


def with_frozen_bias() -> nn.Module:
    model = small()
    model[0].bias.requires_grad_(False)
    return model


def with_frozen_weights() -> nn.Module:
    model = small()
    model[0].weight.requires_grad_(False)
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(8))
    model(torch.ones(1, 8))
    return model


def reparametrized() -> nn.Module:
    model = small()
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    return model


MODELS = {
    "several": lambda: small(3),
    "one": lambda: nn.Linear(8, 8),
    "bilinear": lambda: nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (1, 8)), nn.Flatten(-2)),
    "an embedding's weight": Tied,
    "attention": Attention,
    "attention without bias": lambda: Attention(bias=False),
    "attention with bias_kv": lambda: Attention(add_bias_kv=True),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    "transformer layer, gelu, norm first": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True
    ),
    "decoder layer": lambda: Decoder(),  # noqa: PLW0108 - defined below
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "parametrized": reparametrized,
    "frozen bias": with_frozen_bias,
    "frozen weights": with_frozen_weights,
    "lazy": lazy,
    "copied": lambda: copy.deepcopy(small()),
    "pickled": lambda: pickle.loads(pickle.dumps(small())),
}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def trained(
    make: Callable[[], nn.Module],
    half: torch.dtype = torch.bfloat16,
    steps: int = 3,
    shape: tuple[int, ...] = (2, 4, 8),
    **options: Any,
) -> list[Any]:
    """Outputs, gradients, weights and scales of some steps, with an optimizer."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype=half, verbosity=0, **(PLAIN | options))
    try:
        seen: list[Any] = []
        for _ in range(steps):
            result = model(drawn(*shape))
            optimizer.zero_grad()
            with amp.scale_loss(result.float().square().mean(), optimizer) as scaled:
                scaled.backward()
            seen += [result, *(each.grad for each in model.parameters())]
            optimizer.step()
            seen += [*model.parameters(), amp.get_loss_scale(), amp.skipped_steps(optimizer)]
            seen = visible(seen)
        model.eval()
        seen += visible(model(drawn(*shape)))
        with torch.no_grad():
            seen += visible(model(drawn(*shape)))
        return seen + visible(list(amp.cast_counts().__class__(0, 0).__dataclass_fields__))
    finally:
        amp.deinitialize()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("model", MODELS)
def test_training_has_the_same_bits(model: str) -> None:
    for half in HALF_DTYPES:
        assert trained(MODELS[model], half, fused_linear=True) == trained(MODELS[model], half)


LAYERS = st.lists(
    st.sampled_from(("linear", "linear", "no bias", "tanh", "relu", "norm", "dropout", "residual", "transpose")),
    min_size=1,
    max_size=5,
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, -1).reshape(-1, 8).t().contiguous().t()).reshape(x.shape)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "no bias": lambda: nn.Linear(8, 8, bias=False),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "norm": lambda: nn.LayerNorm(8),
    "dropout": lambda: nn.Dropout(0.3),
    "residual": Residual,
    "transpose": Transposed,
}


@pytest.mark.slow
@given(
    kinds=LAYERS,
    half=st.sampled_from(HALF_DTYPES),
    shape=st.sampled_from(((3, 8), (1, 8), (2, 3, 8), (2, 1, 3, 8))),
    frozen=st.integers(0, 6),
)
def test_random_models_train_to_the_same_bits(
    kinds: list[str], half: torch.dtype, shape: tuple[int, ...], frozen: int
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), *(KINDS[kind]() for kind in kinds), nn.Linear(8, 8))
        for parameter in list(model.parameters())[:frozen][:-1]:
            parameter.requires_grad_(False)
        return model

    assert trained(make, half, shape=shape, fused_linear=True) == trained(make, half, shape=shape)


def test_a_weight_that_is_used_twice_sums_in_float32() -> None:
    layer, given = nn.Linear(8, 6), drawn(5, 8)
    with initialized(fused_linear=True):
        parts = [grad(layer(each).float().sum(), layer.weight)[0] for each in (given, given * 0.001)]
        (layer(given).float().sum() + layer(given * 0.001).float().sum()).backward()
    assert torch.equal(layer.weight.grad, parts[0] + parts[1])


def test_threads_share_a_model() -> None:
    def run() -> Any:
        model, found = small(), [None] * 4
        given = [drawn(5, 8, needs_grad=True) for _ in found]

        def work(index: int) -> None:
            result = model(given[index])
            found[index] = grad(result.float().square().sum(), given[index])  # type: ignore[call-overload]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return model(given[0]), found

    check(run)


def test_replicas_have_other_tensors_as_weights() -> None:
    """As those of nn.DataParallel."""

    def run() -> Any:
        model, given = nn.Linear(8, 6), drawn(5, 8)
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = model.weight.clone(), model.bias.clone()
        result = replica(given)
        result.float().sum().backward()
        return result, model.weight.grad, model.bias.grad

    check(run, fuses=False)


def test_modes_of_autograd() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        result.float().square().sum().backward()
        return result, given.grad, layer.weight.grad

    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        check(run)
    torch.use_deterministic_algorithms(True)
    try:
        check(run)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autograd.set_multithreading_enabled(False):
        check(run)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_names_the_line_and_the_gradient() -> None:
    with initialized(fused_linear=True), torch.autograd.set_detect_anomaly(True, check_nan=True):
        result = nn.Linear(8, 6)(torch.full((5, 8), float("inf")))
        with pytest.raises(RuntimeError, match="'FusedLinearBackward' returned nan values in its 2th output"):
            (result.float() * 0).sum().backward()


def test_a_backward_pass_under_autocast() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        with torch.autocast("cpu", torch.bfloat16):
            result.float().square().sum().backward()
        return result, given.grad, layer.weight.grad, layer.bias.grad

    for half in HALF_DTYPES:
        check(run, half)


@pytest.mark.usefixtures("in_float32")
def test_a_product_in_float32_is_so_under_autocast_and_with_a_graph() -> None:
    layer, given = nn.Linear(8, 6), drawn(50, 8)
    with initialized(fused_linear=True):
        result = layer(given)
        factor = drawn(50, 6).bfloat16()
        loss = (result * factor).sum()
        wanted = grad(loss, layer.weight, retain_graph=True)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(grad(loss, layer.weight, retain_graph=True)[0], wanted)
        assert torch.equal(grad(loss, layer.weight, create_graph=True)[0], wanted)


def test_inputs_of_inference_mode() -> None:
    def run() -> Any:
        layer = nn.Linear(3, 2)
        result = layer(inference(torch.float32))
        result.float().sum().backward()
        return result, layer.weight.grad

    check(run)


def test_gradients_of_another_type_are_cast_to_half() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        result.backward(drawn(5, 6))
        return result, given.grad, layer.weight.grad

    check(run)


def test_a_gradient_is_not_copied_once_more() -> None:
    """The optimizer's gradient is the memory that the product wrote to."""

    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8)
        addresses: list[int] = []
        layer.weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
        result = layer(given)
        result.float().sum().backward()
        return result, layer.weight.grad.data_ptr() == addresses[0]

    check(run)


def test_a_graph_outlives_its_session() -> None:
    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        with initialized(**(PLAIN | options)):
            result = layer(given)
        (first,) = grad(result.float().square().sum(), given, create_graph=True)
        first.float().sum().backward()
        return visible([result, first, given.grad, layer.bias.grad])

    assert run(fused_linear=True) == run()


@pytest.mark.parametrize("toggled", [True, False])
def test_a_weight_that_is_frozen_after_the_forward_pass(toggled: bool) -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        layer.weight.requires_grad_(not toggled)
        (first,) = grad(result.float().sum(), given, create_graph=True)
        layer.weight.requires_grad_()
        first.float().square().sum().backward()
        return result, first, layer.weight.grad, layer.bias.grad

    check(run)


def test_a_step_in_the_backward_pass() -> None:
    def run() -> Any:
        model, given = small(), drawn(5, 8, needs_grad=True)

        def step(weight: Tensor) -> None:
            weight.data.sub_(weight.grad, alpha=0.1)
            weight.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(given).float().square().sum().backward()
        return model(given), given.grad, list(model.parameters())

    check(run)


def test_a_registered_half_linear_takes_the_node() -> None:
    amp.register_half_function(F, "linear")
    check(lambda: nn.Linear(3, 2)(drawn(4, 3)))


@pytest.mark.filterwarnings("ignore")  # what torch warns of, it would raise as another error
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)], ids=str)
def test_compiled_autograd(shape: tuple[int, ...], needs_grad: bool) -> None:
    def run() -> Any:
        model, given = small(), drawn(*shape, needs_grad=needs_grad)
        result = model(given)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            result.float().square().sum().backward()
        return result, given.grad, [each.grad for each in model.parameters()]

    check(run)
    torch._dynamo.reset()


def test_batched_gradients() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        result = layer(given)
        leaves = (given, layer.weight, layer.bias)
        return result, grad(result, leaves, drawn(3, 5, 6, dtype=torch.bfloat16), is_grads_batched=True)

    check(run)


# Settings


def rejected(message: str, **options: Any) -> None:
    """The error leaves nothing behind: the next session works."""
    model, layer = small(), nn.Linear(8, 6)
    original = F.linear
    with pytest.raises(OptionError, match=message):
        amp.initialize(model, fused_linear=True, verbosity=0, **options)
    assert not amp.is_on()
    assert runtime.live is None
    assert F.linear is original
    runtime.registered.clear()
    with initialized(fused_linear=True):
        assert is_fused(layer(drawn(5, 8)))


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_levels_that_cast_no_layers_refuse_it(level: str) -> None:
    rejected("contradicts opt_level", opt_level=level)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_half_weights_refuse_it(level: str) -> None:
    rejected("contradicts opt_level", opt_level=level, patch_torch_functions=True)


@pytest.mark.slow
def test_another_library_s_function_is_refused_whenever_it_came(fresh: Fresh) -> None:
    script = """
import torch
from torch import nn
original = torch.nn.functional.linear
torch.nn.functional.linear = lambda *args, **kwargs: original(*args, **kwargs) * 0
from ampatch import amp
model = nn.Sequential(nn.Linear(8, 6))
try:
    amp.initialize(model, fused_linear=True, verbosity=0)
except amp.OptionError as error:
    print(error)
"""
    done = fresh.run(script)
    assert "replaced by another library" in done.stdout, done.stderr


def test_tensors_without_a_tangent_take_the_node_beside_those_with_one() -> None:
    with initialized(fused_linear=True), fwAD.dual_level():
        assert is_fused(nn.Linear(8, 6)(drawn(5, 8)))


@pytest.mark.parametrize(
    "lists",
    [
        {"blacklist": {"torch.nn.functional": ["linear"]}},
        {"unlisted": {"torch.nn.functional": ["linear"]}},
        {"promote": {"torch.nn.functional": ["linear"]}},
    ],
    ids=["blacklist", "unlisted", "promote"],
)
def test_lists_that_treat_linear_otherwise_are_refused(lists: Any) -> None:
    rejected("fused_linear=True has no effect", opt_level="O1", cast_lists=lists)


def test_a_rule_with_a_condition_takes_the_node_where_it_holds() -> None:
    lists = {"whitelist": {"torch.nn.functional": [{"name": "linear", "when": {"bias": [None]}}]}}
    check(lambda: nn.Linear(3, 2, bias=False)(drawn(4, 3)), cast_lists=lists)
    check(lambda: nn.Linear(3, 2)(drawn(4, 3)), cast_lists=lists, fuses=False)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_the_default_is_off_where_no_list_casts_float32_weights(level: str) -> None:
    model = small()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert amp.settings()["fused_linear"] is False
    assert not is_fused(model(drawn(5, 8)))


@pytest.mark.parametrize(("level", "half"), [("O1", "float16"), ("O1", "bfloat16"), ("O4", "bfloat16")])
def test_it_is_the_default_where_lists_cast_linear_layers(level: str, half: str) -> None:
    model = small()
    amp.initialize(model, opt_level=level, half_dtype=half, verbosity=0)
    assert is_fused(model(drawn(5, 8)))


def test_the_default_does_nothing_where_lists_treat_linear_otherwise() -> None:
    lists = {"blacklist": {"torch.nn.functional": ["linear"]}}
    model = small()
    amp.initialize(model, opt_level="O1", cast_lists=lists, verbosity=0)
    result = model(drawn(5, 8))
    assert result.dtype is torch.float32
    assert not is_fused(result)


@pytest.mark.parametrize("is_on", [True, False])
def test_amp_init_has_the_switch(is_on: bool) -> None:
    layer = nn.Linear(8, 6)
    amp.init(half_dtype="bfloat16", **({} if is_on else {"fused_linear": False}))
    assert amp.settings()["fused_linear"] is is_on
    assert is_fused(layer(drawn(5, 8))) is is_on


def test_amp_init_refuses_it_where_it_has_no_effect() -> None:
    lists = {"blacklist": {"torch.nn.functional": ["linear"]}}
    with pytest.raises(OptionError, match="fused_linear=True has no effect"):
        amp.init(half_dtype="bfloat16", cast_lists=lists, fused_linear=True)
    assert not amp.is_on()


@pytest.mark.parametrize("register", [amp.register_float_function, amp.register_promote_function])
def test_a_registered_linear_is_refused(register: Callable[[Any, str], None]) -> None:
    register(F, "linear")
    rejected("fused_linear=True has no effect", opt_level="O1")


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="fused_linear"):
        amp.initialize(small(), opt_level="O1", fused_linear="yes", verbosity=0)  # type: ignore[call-overload]
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "flaot32")
    with pytest.raises(OptionError, match=r"AMPATCH_FUSED_LINEAR.*float32"):
        amp.initialize(small(), opt_level="O1", fused_linear=True, verbosity=0)
    assert not amp.is_on()
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "auto")
    with initialized(fused_linear=True):
        pass


def test_amp_that_is_off_does_nothing() -> None:
    model = small()
    amp.initialize(model, enabled=False, fused_linear=True, verbosity=0)
    result = model(drawn(5, 8))
    assert result.dtype is torch.float32
    assert not is_fused(result)


def test_a_second_session_has_to_agree() -> None:
    same: dict[str, Any] = {"opt_level": "O1", "half_dtype": torch.bfloat16, "verbosity": 0}
    with initialized():
        with pytest.raises(UsageError, match="fused_linear is True \\(this call: False\\)"):
            amp.initialize(small(), fused_linear=False, **same)
        amp.initialize(small(), fused_linear=True, **same)
        amp.initialize(small(), **same)
        assert amp.settings()["fused_linear"] is True
    with initialized(**PLAIN):
        assert amp.settings()["fused_linear"] is False


def test_the_policy_names_it_only_where_it_is_on() -> None:
    with initialized(fused_linear=True):
        fused = amp.state_dict(include_policy=True)
        amp.load_state_dict(fused)
    with initialized(**PLAIN):
        plain = amp.state_dict(include_policy=True)
    assert ("fused_linear", True) in [tuple(each) for each in fused["policy"]["settings"]]
    assert "fused_linear" not in dict(plain["policy"]["settings"])
    assert fused["policy"]["sha256"] != plain["policy"]["sha256"]


PARTS: dict[str, Any] = {
    "float32": {"0": "float32"},
    "linear on the blacklist": {"0": {"blacklist": {"torch.nn.functional": ["linear"]}}},
    "another function": {"0": {"blacklist": {"torch": ["tanh"]}}},
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_with_lists_of_their_own(part: str) -> None:
    options = {"cast_lists": {"modules": PARTS[part]}}
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    assert trained(make, fused_linear=True, **options) == trained(make, **options)
    model = make()
    amp.initialize(model, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0, fused_linear=True, **options)
    assert is_fused(model[0](drawn(5, 8))) == (part == "another function")
    assert is_fused(model[1](drawn(5, 8)))


def test_parts_may_be_the_only_ones_that_fuse() -> None:
    lists = {
        "blacklist": {"torch.nn.functional": ["linear"]},
        "modules": {"0": {"whitelist": {"torch.nn.functional": ["linear"]}}},
    }
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    assert trained(make, fused_linear=True, cast_lists=lists) == trained(make, cast_lists=lists)
    model = make()
    amp.initialize(model, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0, fused_linear=True, cast_lists=lists)
    assert is_fused(model[0](drawn(5, 8)))
    assert not is_fused(model[1](drawn(5, 8)))


OPTIONS: dict[str, dict[str, Any]] = {
    "keep_fp32": {"keep_fp32": ["0"]},
    "labels": {"profile_casts": True},
    "exact hooks": {"exact_hooks": True},
    "finite": {"check_finite": True},
    "static scale": {"loss_scale": 128.0},
    "outputs": {"cast_model_outputs": torch.float32},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_other_options_work_with_it(option: str) -> None:
    options = OPTIONS[option]
    assert trained(small, fused_linear=True, **options) == trained(small, **options)


def test_labels_are_the_same() -> None:
    def run(**options: Any) -> list[str]:
        with initialized(profile_casts=True, **(PLAIN | options)):
            model, given = small(), drawn(5, 8)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for _ in range(2):
                    model(given)
            return sorted(each.name for each in profile.events() if "ampatch" in each.name or "amp." in each.name)

    assert run(fused_linear=True) == run() != []


# The cache


def test_weights_are_cast_once_in_an_iteration() -> None:
    def run(**options: Any) -> list[Any]:
        with initialized(**(PLAIN | options)):
            model, given = small(), drawn(5, 8)
            seen = []
            for _ in range(2):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(3):
                    model(given).float().sum().backward()
                    seen += [amp.cast_counts(), amp.stats()["cached_bytes"]]
                optimizer.step()
                seen += [amp.cast_counts(), amp.stats()["cached_bytes"]]
            amp.clear_cache()
            return [*seen, amp.stats()["cached_bytes"]]

    found = run(fused_linear=True)
    assert found == run()
    assert found[-1] == 0


def test_nothing_leaks() -> None:
    with initialized(fused_linear=True):
        model, given = small(), drawn(5, 8, needs_grad=True)
        result = model(given)
        result.float().square().sum().backward(retain_graph=True)
        (first,) = grad(result.float().square().sum(), given, create_graph=True)
        first.sum().backward()
        amp.clear_cache()
        watched = [weakref.ref(each) for each in (*model.parameters(), given, result, first)]
        del model, given, result, first
        alive = [each for each in watched if each() is not None]
        gc.collect()
        assert [each for each in watched if each() is not None] == []
    assert len(alive) <= len(watched)


def test_other_functions_use_the_same_cast(subtests: pytest.Subtests) -> None:
    """Whichever uses the weight first, the gradients of both arrive."""

    def run(linear_first: bool) -> Any:
        given, weight = drawn(5, 8), nn.Parameter(drawn(8, 8))
        uses = [lambda: F.linear(given, weight), lambda: torch.mm(given, weight)]
        results = [use() for use in (uses if linear_first else reversed(uses))]
        before = amp.cast_counts()
        (of_both,) = grad(sum(each.float().square().sum() for each in results), weight)
        return results, before, of_both

    def compare(linear_first: bool) -> None:
        found = []
        for fused_linear in (True, False):
            torch.manual_seed(0)
            with initialized(fused_linear=fused_linear):
                found.append(run(linear_first))
        (results, counts, of_both), (wanted, wanted_counts, of_both_wanted) = found
        assert is_fused(results)
        assert not is_fused(wanted)
        assert visible(results) == visible(wanted)
        # The input is cast by each, the weight by the first.
        assert counts == wanted_counts == amp.CastCounts(casts=3, cache_hits=1)
        torch.testing.assert_close(of_both, of_both_wanted, rtol=2**-6, atol=2**-6)

    check_rows(subtests, (("linear first", True), ("product first", False)), compare)


def test_a_graph_keeps_no_weight_s_cast_after_its_pass() -> None:
    with initialized(fused_linear=True):
        model, given = small(), drawn(5, 8, needs_grad=True)
        result = model(given)
        casts = [weakref.ref(cast) for _, _, cast in runtime.live.cache._iteration.entries()]
        assert len(casts) == 4
        result.float().sum().backward()
        amp.clear_cache()
        assert [each for each in casts if each() is not None] == []
        assert is_fused(result)


def test_steps_drop_casts() -> None:
    def run() -> Any:
        model, given = small(), drawn(5, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        results = []
        for _ in range(3):
            results.append(model(given))
            results[-1].float().square().sum().backward()
            optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(2)
        return results, model(given)

    check(run)


def test_frozen_blocks() -> None:
    def run(**same: Any) -> Any:
        model, given = small(), drawn(5, 8)
        amp.initialize(model, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0, **same)
        with amp.frozen_weights(model):
            with torch.no_grad():
                before = model(given)
            result = model(given)
            result.float().sum().backward()
        return before, result, [each.grad for each in model.parameters()]

    found = []
    for same in (PLAIN, {"fused_linear": True}):
        torch.manual_seed(0)
        found.append(visible(run(**same)))
        amp.deinitialize()
    assert found[0] == found[1]


# Diagnostics


def watched_step(**options: Any) -> Any:
    torch.manual_seed(0)
    model, given = small(), drawn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype=torch.float16, verbosity=0, **(PLAIN | options))
    try:
        with amp.report() as report:
            with amp.scale_loss(model(given).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return visible([*model.parameters(), *(each.grad for each in model.parameters())]), report
    finally:
        amp.deinitialize()


def test_a_report_changes_no_bits_and_counts_the_same_calls() -> None:
    """The casts of the gradients of four weights are the node's own."""
    (bits_found, fused), (bits_wanted, plain) = watched_step(fused_linear=True), watched_step()
    assert bits_found == bits_wanted

    def told(report: Any, casts_of_gradients: int) -> Any:
        return [
            (each["name"], each["types"], each["casts"] - casts_of_gradients * (each["name"].endswith(".linear")))
            for each in report.to_dict()["functions"]
        ]

    assert told(fused, 0) == told(plain, 4)
    assert fused.to_dict()["modules"] == plain.to_dict()["modules"]
    assert str(fused)


@pytest.mark.slow
def test_explanations() -> None:
    with initialized(**PLAIN):
        wanted = str(amp.explain(F.linear, drawn(4, 3), nn.Parameter(drawn(2, 3))))
    with initialized(fused_linear=True):
        assert str(amp.explain(F.linear, drawn(4, 3), nn.Parameter(drawn(2, 3)))) == wanted


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_trace_of_an_overflow(where: str) -> None:
    class Large(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return gradient * 60000

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x * 60000 if where == "forward" else Large.apply(x))

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        events: list[Any] = []
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(
            model, optimizer, opt_level="O1", half_dtype=torch.float16, verbosity=0, init_scale=1024.0,
            on_overflow=("trace", events.append), **(PLAIN | options),
        )  # fmt: skip
        with amp.scale_loss(model(drawn(5, 8) * 100).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        amp.deinitialize()
        return [str(each.trace) for each in events]

    found = run(fused_linear=True)
    assert found == run()
    assert len(found) == 1


def test_diagnostics_that_run_sessions_of_their_own() -> None:
    """They run linear layers as `amp.initialize` does, and an earlier session does not disturb them."""
    model, given = small(), drawn(5, 8)
    with initialized(fused_linear=True):
        model(given)

    def loss_fn(output: Tensor) -> Tensor:
        return output.float().square().mean()

    found = amp.compare(model, given, loss_fn, "O0", "O1"), amp.preflight(model, given, loss_fn, measure=False)
    assert all(map(str, found))
    with initialized(fused_linear=True):
        for run in (amp.compare, amp.preflight):
            with pytest.raises(UsageError):
                run(model, given, loss_fn)
        assert is_fused(model(given))

"""Linear layers as one node of the graph: users see what they see without it, with calls in Python and in C++."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from fresh import Fresh
from helpers import HALF_DTYPES, assert_same_bits, check_rows, combinations
from seen_calls import Operators
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ampatch import amp
from ampatch.errors import OptionError
from ampatch.runtime import runtime

NODE = "FusedLinearBackward"
LINEAR_IN_FLOAT32 = {"blacklist": {"torch.nn.functional": ["linear"]}}


@contextlib.contextmanager
def initialized(half: torch.dtype = torch.bfloat16, *, fused_linear: bool = True, **options: Any) -> Iterator[None]:
    """A session in which linear layers of weights that require gradients cast, whoever calls them."""
    amp.initialize(nn.Module(), opt_level="O1", half_dtype=half, verbosity=0, fused_linear=fused_linear, **options)
    try:
        yield
    finally:
        amp.deinitialize()


matrix_and_batch = pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)], ids=["matrix", "batch"])


@pytest.fixture(autouse=True)
def half_products(calls_in_both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with products that are the same everywhere."""
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "half")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype).requires_grad_(needs_grad)


def column_major(*shape: int) -> Tensor:
    *others, rows, columns = shape
    return drawn(*others, columns, rows).transpose(-1, -2)


def small(depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(8, 8), nn.Tanh())))


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
    waiting = [each.grad_fn for each in flat(result) if isinstance(each, Tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return NODE in {node.name() for node in seen}


def visible(value: Any) -> list[Any]:
    """All that a user can see of a result: every bit of tensors with their types, shapes and strides; plain values."""
    return [
        (each.dtype, each.shape, each.stride(), each.requires_grad, bits(each)) if isinstance(each, Tensor) else each
        for each in flat(value)
    ]


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def outcomes(
    table: Mapping[str, Callable[[], Any]], half: torch.dtype = torch.bfloat16, **options: Any
) -> dict[str, tuple[bool, list[Any]]]:
    """Whether each function of a table took the node, and what it returned or raised, all in one session."""
    found = {}
    with initialized(half, **options):
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
    """Asserts the same with and without the node, which is taken if ``fuses``; returns the outcome."""
    was_fused, wanted = outcomes({"": run}, half, fused_linear=False, **options)[""]
    assert not was_fused
    is_taken, found = outcomes({"": run}, half, **options)[""]
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
    wanted, found = outcomes(table, half, fused_linear=False), outcomes(table, half)

    def compare(name: str) -> None:
        assert found[name][1] == wanted[name][1]
        assert (wanted[name][0], found[name][0]) == (False, fuses)
        assert not fuses or found[name][1][:1] != ["raised"]

    check_rows(subtests, ((name, name) for name in table), compare)


def same_with_the_node(run: Callable[..., Any]) -> Callable[..., None]:
    """A test that the function returns the same with and without the node, and takes it."""

    @functools.wraps(run)
    def test(**arguments: Any) -> None:
        check(lambda: run(**arguments))

    return test


# Bits


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


def with_gradients(given: Tensor, weight: Tensor, has_bias: bool, of: str) -> Any:
    """The result of a call, and the gradients of its leaves."""
    parameters = [nn.Parameter(weight)] + [nn.Parameter(drawn(len(weight)))] * has_bias
    result = F.linear(given, *parameters)
    return result, grad(GRADIENTS[of](result), [each for each in (given, *parameters) if each.requires_grad])


@pytest.mark.parametrize("shape", INPUTS)
def test_results_and_gradients_have_the_same_bits(shape: str, half: torch.dtype, subtests: pytest.Subtests) -> None:
    def case(dtype: torch.dtype, layout: str, of: str, has_bias: bool, needs_grad: bool) -> Any:
        given = INPUTS[shape]().to(dtype).detach().requires_grad_(needs_grad)
        return with_gradients(given, WEIGHTS[layout](), has_bias, of)

    kinds = combinations((torch.float32, *HALF_DTYPES), tuple(WEIGHTS), tuple(GRADIENTS), (True, False), (True, False))
    check_each({str(kind): functools.partial(case, *kind) for kind in kinds}, subtests, half)


@pytest.mark.slow
def test_sizes_of_one_and_large_sizes_have_the_same_bits(subtests: pytest.Subtests) -> None:
    """Ones make layouts ambiguous, and large sizes take other kernels."""

    def case(shape: tuple[int, ...], outputs: int, make: Callable[..., Tensor], dtype: torch.dtype) -> Any:
        return with_gradients(make(*shape).to(dtype).requires_grad_(), make(outputs, shape[-1]), True, "random")

    shapes = (*itertools.product((1, 2), repeat=2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (65, 129), (3, 33, 256))
    kinds = itertools.product(shapes, (1, 2, 96), (drawn, column_major), (torch.float32, torch.bfloat16))
    check_each({str(kind): functools.partial(case, *kind) for kind in kinds}, subtests)


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


@same_with_the_node
def test_gradients_of_leaves_have_the_same_strides() -> Any:
    layer, given = nn.Linear(8, 6), column_major(5, 8).requires_grad_()
    layer.weight = nn.Parameter(column_major(6, 8))
    result = layer(given)
    result.float().square().sum().backward()
    return result, given.grad, layer.weight.grad, layer.bias.grad


CALLS = {
    "positional": lambda x, w, b: F.linear(x, w, b),  # noqa: PLW0108 - looked up in the session
    "bias by name": lambda x, w, b: F.linear(x, w, bias=b),
    "weight by name": lambda x, w, b: F.linear(x, weight=w, bias=b),
    "all by name": lambda x, w, b: F.linear(bias=b, input=x, weight=w),
    "no bias": lambda x, w, _: F.linear(x, w),
    "bias is None": lambda x, w, _: F.linear(x, w, None),
    "bias is None, by name": lambda x, w, _: F.linear(x, w, bias=None),
    "in a region of autocast": lambda *each: torch.autocast("cpu", torch.float16)(F.linear)(*each),  # noqa: PLW0108
}


def test_every_form_of_the_call_has_the_same_bits(subtests: pytest.Subtests) -> None:
    def case(call: Callable[..., Tensor]) -> Any:
        given, weight, bias = drawn(5, 8, needs_grad=True), nn.Parameter(drawn(6, 8)), nn.Parameter(drawn(6))
        result = call(given, weight, bias)
        result.float().square().sum().backward()
        return result, given.grad, weight.grad, bias.grad

    check_each({name: functools.partial(case, call) for name, call in CALLS.items()}, subtests)


# Products in float32


@pytest.fixture
def in_float32(half_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients are products in float32."""
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "float32")


@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.usefixtures("in_float32")
def test_float32_products_are_exact_to_float32_rounding(layout: str, half: torch.dtype) -> None:
    weight, given = nn.Parameter(WEIGHTS[layout]()), drawn(64, 8, needs_grad=True)
    bias = nn.Parameter(drawn(len(weight)))
    with initialized(half):
        result = F.linear(given, weight, bias)
        factor = drawn(*result.shape, dtype=half)
        of_input, of_weight, of_bias = grad((result * factor).sum(), (given, weight, bias))
        assert torch.equal(of_input, (factor @ weight.to(half)).float())
    exact = factor.double().t() @ given.to(half).double()
    size = factor.double().abs().t() @ given.to(half).double().abs()
    assert of_weight.dtype is torch.float32
    assert ((of_weight - exact).abs() <= 64 * 2**-24 * size).all()
    assert ((of_bias - factor.double().sum(0)).abs() <= 64 * 2**-24 * factor.double().abs().sum(0)).all()
    assert (of_weight != of_weight.to(half)).any()


def test_float32_products_do_not_overflow_where_half_products_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(product: str) -> tuple[Tensor, Tensor]:
        monkeypatch.setenv("AMPATCH_FUSED_LINEAR", product)
        layer = nn.Linear(2, 2)
        with initialized(torch.float16):
            (layer(torch.full((4, 2), 200.0)) * torch.full((), 200.0).half()).sum().backward()
        return layer.weight.grad, layer.bias.grad

    assert gradients("half")[0].isinf().all()
    weight, bias = gradients("float32")
    assert weight.eq(4 * 200 * 200).all()
    assert bias.eq(4 * 200).all()


@pytest.mark.usefixtures("in_float32")
def test_float32_products_stay_in_float32_under_autocast_and_with_a_graph() -> None:
    layer, given, factor = nn.Linear(8, 6), drawn(50, 8), drawn(50, 6).bfloat16()
    with initialized():
        loss = (layer(given) * factor).sum()
        wanted = grad(loss, layer.weight, retain_graph=True)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(grad(loss, layer.weight, retain_graph=True)[0], wanted)
        assert torch.equal(grad(loss, layer.weight, create_graph=True)[0], wanted)


# Higher orders


def gradient_penalty(compute: Callable[[nn.Linear, Tensor], Tensor]) -> Any:
    layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
    result = compute(layer, given)
    (first,) = grad(result, given, create_graph=True)
    return result, first, *grad(first.float().square().sum(), (given, layer.weight), allow_unused=True)


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda layer, x: layer(x).float().square().sum(), id="square"),
        pytest.param(lambda layer, x: layer(x.unsqueeze(0)).float().square().sum(), id="square-3-D"),
        pytest.param(lambda layer, x: layer(x).tanh().float().sum(), id="tanh"),
    ],
)
def test_gradient_penalties_sum_the_weights_gradients_in_float32(compute: Any) -> None:
    """In half, as torch sums them, they are near only."""
    found = []
    for fused_linear in (True, False):
        torch.manual_seed(0)
        with initialized(fused_linear=fused_linear):
            found.append(gradient_penalty(compute))
    fused, plain = found
    assert is_fused(fused)
    for one, other in zip(fused[:3], plain[:3], strict=True):
        assert_same_bits(one, other)
    assert fused[3].dtype is plain[3].dtype
    torch.testing.assert_close(fused[3], plain[3], rtol=2**-6, atol=2**-6)


@same_with_the_node
def test_gradient_penalty_of_a_linear_function() -> Any:
    return gradient_penalty(lambda layer, x: layer(x).float().sum())


@pytest.mark.parametrize("product", ["half", "float32"])
def test_third_order_is_exact_for_small_whole_numbers(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", product)

    def run(dtype: torch.dtype) -> list[Tensor]:
        layer, given = nn.Linear(2, 2).to(dtype), torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=dtype).requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
            layer.bias.copy_(torch.tensor([1.0, -1.0]))
        leaves = (given, layer.weight, layer.bias)
        first = grad(layer(given).to(dtype).pow(3).sum(), leaves, create_graph=True)
        second = grad(sum(each.sum() for each in first), leaves, create_graph=True)
        third = grad(sum(each.sum() for each in second), leaves, allow_unused=True, materialize_grads=True)
        return [*first, *second, *third]

    wanted = run(torch.float64)
    with initialized(torch.float16):
        found = run(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.double(), other)


def test_tensors_without_a_tangent_take_the_node_beside_those_with_one() -> None:
    with initialized(), fwAD.dual_level():
        assert is_fused(nn.Linear(8, 6)(drawn(5, 8)))


# Calls that are torch's


class SubTensor(Tensor):
    pass


class SubParameter(nn.Parameter):
    pass


def type_and_values(result: Tensor) -> Any:
    return str(type(result)), result.as_subclass(Tensor)


def forward_mode(dtype: torch.dtype) -> Any:
    layer, given, along = nn.Linear(3, 2), drawn(4, 3, dtype=dtype), drawn(4, 3, dtype=dtype)
    with fwAD.dual_level():
        result = fwAD.unpack_dual(layer(fwAD.make_dual(given, along)))
        return result.primal, result.tangent


def of_functions(transformed: Callable[[nn.Linear, Tensor], Any]) -> Callable[[], Any]:
    return lambda: transformed(nn.Linear(3, 2), drawn(4, 3))


def losses(layer: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(layer, parameters, (x,)).float().pow(2).sum()


def under_mode(mode: Any) -> Any:
    layer, given = nn.Linear(3, 2), drawn(4, 3)
    with mode:
        result = layer(given)
    return result, getattr(mode, "names", None)


def fake() -> Any:
    with FakeTensorMode():
        result = nn.Linear(3, 2)(torch.empty(4, 3))
        return str(result.dtype), tuple(result.shape), result.grad_fn.name()


def in_inference(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def nested(*rows: int, layout: torch.layout = torch.strided) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        return torch.nested.nested_tensor([drawn(each, 3) for each in rows], layout=layout)


def traced(layer: nn.Module, x: Tensor) -> Any:
    kinds = [each.kind() for each in torch.jit.trace(layer, x, check_trace=False).inlined_graph.nodes()]
    return kinds, layer(x).detach()


def replica() -> Any:
    """A replica of nn.DataParallel has tensors with a history as weights."""
    model = nn.Linear(8, 6)
    copied = model._replicate_for_data_parallel()
    copied.weight, copied.bias = model.weight.clone(), model.bias.clone()
    result = copied(drawn(5, 8))
    result.float().sum().backward()
    return result, model.weight.grad, model.bias.grad


UNFUSED = {
    "dual tensors": lambda: forward_mode(torch.float32),
    "dual halves": lambda: forward_mode(torch.bfloat16),
    "func.jvp": of_functions(lambda layer, x: jvp(layer, (x,), (x,))),
    "func.vjp": of_functions(lambda layer, x: (vjp(layer, x)[0], vjp(layer, x)[1](torch.ones(4, 2).bfloat16()))),
    "func.vmap": of_functions(lambda layer, x: vmap(layer)(x)),
    "func.grad of the parameters": of_functions(
        lambda layer, x: torch.func.grad(lambda p: losses(layer, p, x))(dict(layer.named_parameters()))
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
    "a half bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(2).bfloat16())),
    "1-D": lambda: nn.Linear(3, 2)(drawn(3, needs_grad=True)),
    "1-D weight": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(3))),
    "no rows": lambda: nn.Linear(3, 2)(drawn(0, 3, needs_grad=True)),
    "no outputs": lambda: F.linear(drawn(4, 3), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0))),
    "no inputs": lambda: F.linear(torch.empty(4, 0), nn.Parameter(torch.empty(2, 0)), nn.Parameter(drawn(2))),
    "integers": lambda: nn.Linear(3, 2)(torch.ones(4, 3, dtype=torch.int64)),
    "complex": lambda: nn.Linear(3, 2)(torch.ones(4, 3, dtype=torch.complex64)),
    "float64 input": lambda: nn.Linear(3, 2)(drawn(4, 3).double()),
    "wrong columns": lambda: nn.Linear(3, 2)(drawn(4, 5)),
    "wrong bias": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), nn.Parameter(drawn(7))),
    "no arguments": F.linear,
    "no weight": lambda: F.linear(drawn(4, 3)),
    "an unknown name": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), biases=None),
    "twice the weight": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), weight=nn.Parameter(drawn(2, 3))),
    "out=": lambda: F.linear(drawn(4, 3), nn.Parameter(drawn(2, 3)), out=torch.empty(4, 2)),
    "a list": lambda: F.linear([1.0, 2.0, 3.0], nn.Parameter(drawn(2, 3))),
    "None": lambda: nn.Linear(3, 2)(None),
    "a sparse input": lambda: nn.Linear(3, 2)(torch.eye(3).to_sparse()).to_dense(),
    "a CSR input": lambda: nn.Linear(3, 2)(torch.eye(3).to_sparse_csr()),
    "a meta input": lambda: nn.Linear(3, 2)(torch.empty(4, 3, device="meta")).shape,
    "a meta weight": lambda: nn.Linear(3, 2, device="meta")(torch.empty(4, 3)).shape,
    "disable_casts": lambda: amp.disable_casts()(nn.Linear(3, 2))(drawn(4, 3)),
    "jit.trace": lambda: traced(nn.Linear(3, 2), drawn(4, 3)),
    "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(nn.Linear(3, 2))(drawn(4, 3)).code,
    "nested tensors": lambda: nn.Linear(3, 2)(nested(2, 4)).unbind()[1],
    "jagged tensors": lambda: nn.Linear(3, 2)(nested(2, 4, layout=torch.jagged)).unbind()[1],
    "an inference tensor that cannot be saved": lambda: nn.Linear(3, 2)(in_inference(lambda: drawn(4, 3).bfloat16())),
    "inference weights": lambda: in_inference(lambda: nn.Linear(3, 2))(drawn(4, 3)).is_inference(),
    "a subclass of Parameter": lambda: type_and_values(F.linear(drawn(4, 3), SubParameter(drawn(2, 3)))),
    "a dispatch mode": lambda: under_mode(Operators()),
    "fake tensors": fake,
    "a replica": replica,
    "detached in place": lambda: nn.Linear(8, 6)(drawn(5, 8)).detach_(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*beta state.*")
def test_calls_that_cannot_take_the_node_are_torch_s(subtests: pytest.Subtests) -> None:
    check_each(UNFUSED, subtests, fuses=False)


def test_unusual_inputs_that_take_the_node(subtests: pytest.Subtests) -> None:
    table = {
        "a negated view": lambda: nn.Linear(3, 2)(torch.complex(drawn(4, 3), drawn(4, 3)).conj().imag),
        "under a function mode": lambda: under_mode(BaseTorchFunctionMode()),
        "a subclass": lambda: type_and_values(nn.Linear(3, 2)(drawn(4, 3).as_subclass(SubTensor))),
        "an inference tensor": lambda: nn.Linear(3, 2)(in_inference(lambda: drawn(4, 3))),
    }
    check_each(table, subtests)


# Graphs: what is saved, asked for, kept and freed


def operators_of(run: Callable[[], object]) -> list[str]:
    with Operators() as mode:
        run()
    return mode.names


@pytest.mark.parametrize("fused_linear", [True, False])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "of a node"])
@pytest.mark.parametrize(
    ("names", "count"), [(["input"], 1), (["weight"], 1), (["bias"], 1), (["bias", "input"], 2), ([], 3)], ids=str
)
def test_only_gradients_that_are_asked_for_are_computed(
    leaf: bool, names: list[str], count: int, fused_linear: bool
) -> None:
    layer, start = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
    given = start if leaf else start * 1
    named = {"input": given, "weight": layer.weight, "bias": layer.bias}
    inputs = [named[name] for name in names]
    with initialized(fused_linear=fused_linear):
        result = layer(given).float().sum()
        by_backward = operators_of(lambda: result.backward(inputs=inputs or None, retain_graph=True))
        by_grad = operators_of(lambda: grad(result, inputs or list(named.values())))
    for operators in (by_backward, by_grad):
        assert len([name for name in operators if "mm" in name or "sum" in name]) == count


@pytest.mark.parametrize("needs_grad", [True, False])
@matrix_and_batch
@same_with_the_node
def test_as_much_is_saved(shape: tuple[int, ...], needs_grad: bool) -> Any:
    layer, given, packed = nn.Linear(8, 6), drawn(*shape, needs_grad=needs_grad), []
    with saved_tensors_hooks(lambda each: packed.append((each.numel(), str(each.dtype))) or each, lambda each: each):
        result = layer(given)
    result.float().sum().backward()
    return result, packed, layer.weight.grad


@pytest.mark.parametrize(
    "packing",
    [
        # What is unpacked has no graph, unless the hooks keep the tensor itself.
        pytest.param(lambda: saved_tensors_hooks(lambda each: [each], lambda each: each[0]), id="kept"),
        pytest.param(lambda: saved_tensors_hooks(lambda each: each.clone(), lambda each: each.clone()), id="copied"),
        pytest.param(torch.autograd.graph.save_on_cpu, id="save_on_cpu"),
        pytest.param(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"), id="disabled"),
    ],
)
@same_with_the_node
def test_saved_tensors_go_through_hooks(packing: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
    with packing():
        result = layer(given)
    (first,) = grad(result.float().pow(3).sum(), given, create_graph=True)
    second = grad(first.sum(), given, retain_graph=True)
    return result, first, second, grad(result.float().sum(), layer.weight)


def test_a_saved_input_may_change_where_autograd_allows_it() -> None:
    def run() -> Any:
        layer, given = nn.Linear(8, 6), drawn(5, 8, dtype=torch.bfloat16, needs_grad=True) * 1
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            result = layer(given)
            given.zero_()
            result.float().sum().backward()
        return result, layer.weight.grad

    check(run, fuses=False)


def backward_twice() -> None:
    result = nn.Linear(8, 6)(drawn(5, 8, needs_grad=True)).float().sum()
    result.backward()
    result.backward()


def backward_of_a_changed_input() -> None:
    given = drawn(5, 8, dtype=torch.bfloat16)
    result = nn.Linear(8, 6)(given)
    given.zero_()
    result.float().sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        backward_twice,
        backward_of_a_changed_input,
        pytest.param(lambda: nn.Linear(8, 6)(drawn(5, 8)).backward(torch.ones(3)), id="wrong-shape"),
        pytest.param(lambda: nn.Linear(8, 6)(drawn(5, 8)).backward(), id="no-gradient"),
        pytest.param(lambda: grad(nn.Linear(8, 6)(drawn(5, 8)).sum(), drawn(2, needs_grad=True)), id="unused"),
    ],
)
def test_errors_of_a_backward_pass_are_torch_s(run: Callable[[], Any]) -> None:
    assert check(run, fuses=False)[0] == "raised"


# Of a layer, its input and its result. Each returns what a user sees.


def batched_gradients(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    gradients = drawn(3, *result.shape, dtype=result.dtype)
    return grad(result, (given, layer.weight, layer.bias), gradients, is_grads_batched=True)


def tangents_of_gradients(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    with fwAD.dual_level():
        gradient = fwAD.make_dual(torch.randn_like(result).detach(), torch.randn_like(result).detach())
        found = grad(result, (given, layer.weight, layer.bias), gradient)
        return [fwAD.unpack_dual(each).tangent for each in found]


def backward_passes_through_a_retained_graph(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    for _ in range(3):
        result.float().sum().backward(retain_graph=True)
    return given.grad, layer.weight.grad, layer.bias.grad


def unused_inputs_of_a_backward_pass(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    some = functools.partial(grad, result.float().sum(), (given, drawn(3, needs_grad=True)), retain_graph=True)
    return some(allow_unused=True), some(materialize_grads=True), grad(result, layer.bias, result)


def an_undefined_gradient(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    torch._C._functions.UndefinedGrad()(result).float().sum().backward()
    return given.grad, layer.weight.grad, layer.bias.grad


def a_weight_that_changes_between_the_passes(
    layer: nn.Linear, given: Tensor, result: Tensor, with_graph: bool = False
) -> Any:
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.zero_()
    of_input, of_weight = grad(result.float().pow(2).sum(), (given, layer.weight), create_graph=with_graph)
    second = grad(of_input.sum(), given, retain_graph=True) if with_graph else ()
    return of_input, of_weight, second, layer(given)


def a_weight_that_changes_between_passes_with_a_graph(*each: Any) -> Any:
    return a_weight_that_changes_between_the_passes(*each, with_graph=True)


def a_weight_that_is_frozen_during_the_backward_pass(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    layer.weight.requires_grad_(False)
    (first,) = grad(result.float().sum(), given, create_graph=True)
    layer.weight.requires_grad_()
    first.float().square().sum().backward()
    return first, layer.weight.grad, layer.bias.grad


def attributes_of_the_result(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    result.retain_grad()
    result.float().sum().backward()
    return result.grad, result.is_leaf, result._version, result.is_inference(), result.is_contiguous()


def gradients_of_another_type(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    result.backward(drawn(*result.shape))
    return given.grad, layer.weight.grad


def the_memory_of_the_weights_gradient(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    """It is that which the product wrote to, unless torch sums over a batch."""
    addresses: list[int] = []
    layer.weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    result.float().sum().backward()
    return layer.weight.grad.data_ptr() == addresses[0]


def a_backward_pass_under_autocast(layer: nn.Linear, given: Tensor, result: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        result.float().square().sum().backward()
    return given.grad, layer.weight.grad, layer.bias.grad


USES = (
    a_backward_pass_under_autocast,
    *(batched_gradients, tangents_of_gradients, backward_passes_through_a_retained_graph),
    *(unused_inputs_of_a_backward_pass, an_undefined_gradient, a_weight_that_changes_between_the_passes),
    *(a_weight_that_changes_between_passes_with_a_graph, a_weight_that_is_frozen_during_the_backward_pass),
    *(attributes_of_the_result, gradients_of_another_type, the_memory_of_the_weights_gradient),
)


# torch scripts its formulas for tangents when they are first needed.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@matrix_and_batch
def test_uses_of_a_result_have_the_same_bits(
    shape: tuple[int, ...], half: torch.dtype, subtests: pytest.Subtests
) -> None:
    def case(use: Callable[[nn.Linear, Tensor, Tensor], Any]) -> Any:
        layer, given = nn.Linear(8, 6), drawn(*shape, needs_grad=True)
        result = layer(given)
        return result, use(layer, given, result)

    check_each({use.__name__: functools.partial(case, use) for use in USES}, subtests, half)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": F.relu_,
    "add_": lambda result: result.add_(2),
    "mul_": lambda result: result.mul_(2),
    "index": lambda result: result[0].zero_(),
    "view": lambda result: result.view(-1).mul_(2),
}


def test_the_result_may_be_written_to(subtests: pytest.Subtests) -> None:
    def case(write: str, bias: bool, shape: tuple[int, ...]) -> Any:
        layer, given = nn.Linear(8, 6, bias=bias), drawn(*shape, needs_grad=True)
        result = layer(given)
        WRITES[write](result)
        result.float().square().sum().backward()
        return result, given.grad, layer.weight.grad

    kinds = itertools.product(WRITES, (True, False), ((5, 8), (2, 5, 8), (2, 2, 5, 8)))
    check_each({str(kind): functools.partial(case, *kind) for kind in kinds}, subtests)


def test_a_graph_outlives_its_session() -> None:
    def run(fused_linear: bool) -> Any:
        torch.manual_seed(0)
        layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
        with initialized(fused_linear=fused_linear):
            result = layer(given)
        (first,) = grad(result.float().square().sum(), given, create_graph=True)
        first.float().sum().backward()
        return visible([result, first, given.grad, layer.bias.grad])

    assert run(True) == run(False)


def test_a_weight_that_is_used_twice_sums_in_float32() -> None:
    layer, given = nn.Linear(8, 6), drawn(5, 8)
    with initialized():
        parts = [grad(layer(each).float().sum(), layer.weight)[0] for each in (given, given * 0.001)]
        (layer(given).float().sum() + layer(given * 0.001).float().sum()).backward()
    assert torch.equal(layer.weight.grad, parts[0] + parts[1])


# Hooks


@same_with_the_node
def test_hooks_get_the_same_tensors_in_the_same_order() -> Any:
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


def test_hooks_of_the_node_can_change_gradients() -> None:
    with initialized():
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


@same_with_the_node
def test_a_hook_may_step_in_the_backward_pass() -> Any:
    model, given = small(), drawn(5, 8, needs_grad=True)

    def step(weight: Tensor) -> None:
        weight.data.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(given).float().square().sum().backward()
    return model(given), given.grad, list(model.parameters())


# Checkpoints


def checkpointed(model: nn.Module, x: Tensor, policy: Callable[..., CheckpointPolicy] | None = None) -> Tensor:
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if policy else {}
    return checkpoint(model, x, use_reentrant=False, **options)


def keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def without_early_stop(model: nn.Module, x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpointed(model, x)


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": checkpointed,
    "without early stop": without_early_stop,
    "selective": lambda model, x: checkpointed(model, x, keep_products),
    "selective, nothing saved": lambda model, x: checkpointed(
        model, x, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "nested": lambda model, x: checkpointed(lambda y: checkpointed(model[2:], checkpointed(model[:2], y)), x),
    "reentrant in one that is not": lambda model, x: checkpointed(
        lambda y: checkpoint(model, y, use_reentrant=True), x
    ),
}


@matrix_and_batch
def test_checkpoints_have_the_same_bits(shape: tuple[int, ...], subtests: pytest.Subtests) -> None:
    def case(kind: str) -> Any:
        model, given = small(), drawn(*shape, needs_grad=True)
        result = CHECKPOINTS[kind](model, given)
        result.float().square().sum().backward()
        # The graph of a reentrant checkpoint begins anew.
        return result.detach(), given.grad, [each.grad for each in model.parameters()]

    check_each({kind: functools.partial(case, kind) for kind in CHECKPOINTS}, subtests, fuses=False)


# Modes of autograd


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.autograd.set_detect_anomaly(True), lambda: torch.autograd.set_multithreading_enabled(False)],
    ids=["anomaly", "one thread"],
)
@same_with_the_node
def test_modes_of_autograd(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    layer, given = nn.Linear(8, 6), drawn(5, 8, needs_grad=True)
    with mode():
        result = layer(given)
        result.float().square().sum().backward()
    return result, given.grad, layer.weight.grad


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_names_the_node_and_the_gradient() -> None:
    with initialized(), torch.autograd.set_detect_anomaly(True, check_nan=True):
        result = nn.Linear(8, 6)(torch.full((5, 8), float("inf")))
        with pytest.raises(RuntimeError, match="'FusedLinearBackward' returned nan values in its 2th output"):
            (result.float() * 0).sum().backward()


@pytest.mark.filterwarnings("ignore")  # what torch warns of, it would raise as another error
@pytest.mark.parametrize("needs_grad", [True, False])
@matrix_and_batch
@pytest.mark.slow
def test_compiled_autograd(shape: tuple[int, ...], needs_grad: bool) -> None:
    def run() -> Any:
        model, given = small(), drawn(*shape, needs_grad=needs_grad)
        result = model(given)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            result.float().square().sum().backward()
        return result, given.grad, [each.grad for each in model.parameters()]

    check(run)
    torch._dynamo.reset()


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding((x > 0).long()[..., 0]))


def with_frozen(name: str) -> nn.Module:
    model = small()
    model.get_parameter(name).requires_grad_(False)
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(8))
    model(torch.ones(1, 8))
    return model


encoder_layer = functools.partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "several": lambda: small(3),
    "an embedding's weight": Tied,
    "transformer layer": lambda: encoder_layer(dropout=0.0),
    "transformer layer, gelu, norm first": lambda: encoder_layer(0.1, "gelu", norm_first=True),
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "frozen bias": lambda: with_frozen("0.bias"),
    "frozen weight": lambda: with_frozen("0.weight"),
    "lazy": lazy,
}


def trained(make: Callable[[], nn.Module], half: torch.dtype = torch.bfloat16, **options: Any) -> list[Any]:
    """Outputs, gradients, weights and scales of some steps, with an optimizer."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype=half, verbosity=0, **options)
    try:
        seen: list[Any] = []
        for _ in range(3):
            result = model(drawn(2, 4, 8))
            optimizer.zero_grad()
            with amp.scale_loss(result.float().square().mean(), optimizer) as scaled:
                scaled.backward()
            seen += visible([result, *(each.grad for each in model.parameters())])
            optimizer.step()
            seen += visible([*model.parameters(), amp.get_loss_scale(), amp.skipped_steps(optimizer)])
        model.eval()
        seen += visible(model(drawn(2, 4, 8)))
        with torch.no_grad():
            return seen + visible(model(drawn(2, 4, 8)))
    finally:
        amp.deinitialize()


def assert_trains_the_same(make: Callable[[], nn.Module], *args: Any, **options: Any) -> None:
    found = [trained(make, *args, fused_linear=fused_linear, **options) for fused_linear in (True, False)]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("model", MODELS)
def test_training_has_the_same_bits(model: str, half: torch.dtype) -> None:
    assert_trains_the_same(MODELS[model], half)


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O0"}, "contradicts opt_level"),
        ({"opt_level": "O2"}, "contradicts opt_level"),
        ({"opt_level": "O3", "patch_torch_functions": True}, "contradicts opt_level"),
        ({"opt_level": "O5", "patch_torch_functions": True}, "contradicts opt_level"),
        ({"cast_lists": {"blacklist": {"torch.nn.functional": ["linear"]}}}, "has no effect"),
        ({"cast_lists": {"unlisted": {"torch.nn.functional": ["linear"]}}}, "has no effect"),
        ({"cast_lists": {"promote": {"torch.nn.functional": ["linear"]}}}, "has no effect"),
    ],
    ids=str,
)
def test_fused_linear_is_refused_where_no_layer_could_take_the_node(options: dict[str, Any], message: str) -> None:
    model, original = small(), F.linear
    with pytest.raises(OptionError, match=message):
        amp.initialize(model, fused_linear=True, verbosity=0, **{"opt_level": "O1", **options})
    assert not amp.is_on()
    assert runtime.live is None
    assert F.linear is original
    with initialized():
        assert is_fused(model(drawn(5, 8)))


@pytest.mark.parametrize("register", [amp.register_float_function, amp.register_promote_function])
def test_fused_linear_is_refused_for_a_function_registered_otherwise(register: Callable[[Any, str], None]) -> None:
    register(F, "linear")
    with pytest.raises(OptionError, match="fused_linear=True has no effect"):
        amp.initialize(small(), opt_level="O1", fused_linear=True, verbosity=0)


def test_a_registered_half_linear_takes_the_node() -> None:
    amp.register_half_function(F, "linear")
    check(lambda: nn.Linear(3, 2)(drawn(4, 3)))


@pytest.mark.slow
def test_fused_linear_is_refused_for_another_library_s_function(fresh: Fresh) -> None:
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


def test_a_rule_with_a_condition_takes_the_node_where_it_holds() -> None:
    lists = {"whitelist": {"torch.nn.functional": [{"name": "linear", "when": {"bias": [None]}}]}}
    check(lambda: nn.Linear(3, 2, bias=False)(drawn(4, 3)), cast_lists=lists)
    check(lambda: nn.Linear(3, 2)(drawn(4, 3)), cast_lists=lists, fuses=False)


@pytest.mark.parametrize(
    ("options", "is_on"),
    [
        ({"opt_level": "O1", "half_dtype": "float16"}, True),
        ({"opt_level": "O1", "half_dtype": "bfloat16"}, True),
        ({"opt_level": "O4"}, True),
        *(({"opt_level": level}, False) for level in ("O0", "O2", "O3", "O5")),
        ({"opt_level": "O1", "cast_lists": LINEAR_IN_FLOAT32}, False),
        ({"enabled": False, "fused_linear": True}, False),
    ],
    ids=str,
)
def test_layers_take_the_node_by_default_where_lists_cast_float32_weights(options: Any, is_on: bool) -> None:
    model = small()
    amp.initialize(model, verbosity=0, **options)
    assert is_fused(model(drawn(5, 8))) is is_on
    if options.get("opt_level") in ("O0", "O2", "O3", "O5"):
        assert amp.settings()["fused_linear"] is False


@pytest.mark.parametrize("is_on", [True, False])
def test_amp_init_has_the_switch(is_on: bool) -> None:
    layer = nn.Linear(8, 6)
    amp.init(half_dtype="bfloat16", **({} if is_on else {"fused_linear": False}))
    assert amp.settings()["fused_linear"] is is_on
    assert is_fused(layer(drawn(5, 8))) is is_on


def test_amp_init_refuses_fused_linear_where_it_has_no_effect() -> None:
    with pytest.raises(OptionError, match="fused_linear=True has no effect"):
        amp.init(half_dtype="bfloat16", cast_lists=LINEAR_IN_FLOAT32, fused_linear=True)
    assert not amp.is_on()


def test_unknown_values_of_the_option_and_its_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="fused_linear"):
        amp.initialize(small(), opt_level="O1", fused_linear="yes", verbosity=0)  # type: ignore[call-overload]
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "flaot32")
    with pytest.raises(OptionError, match=r"AMPATCH_FUSED_LINEAR.*float32"):
        amp.initialize(small(), opt_level="O1", fused_linear=True, verbosity=0)
    assert not amp.is_on()
    monkeypatch.setenv("AMPATCH_FUSED_LINEAR", "auto")
    with initialized():
        pass


def test_a_second_call_may_say_fused_linear_or_leave_it_out() -> None:
    same: dict[str, Any] = {"opt_level": "O1", "half_dtype": torch.bfloat16, "verbosity": 0}
    with initialized():
        amp.initialize(small(), fused_linear=True, **same)
        amp.initialize(small(), **same)
        assert amp.settings()["fused_linear"] is True


def test_the_policy_names_fused_linear_only_where_it_is_on() -> None:
    with initialized():
        fused = amp.state_dict(include_policy=True)
        amp.load_state_dict(fused)
    with initialized(fused_linear=False):
        assert amp.settings()["fused_linear"] is False
        plain = amp.state_dict(include_policy=True)
    assert ("fused_linear", True) in [tuple(each) for each in fused["policy"]["settings"]]
    assert "fused_linear" not in dict(plain["policy"]["settings"])
    assert fused["policy"]["sha256"] != plain["policy"]["sha256"]


@pytest.mark.parametrize(
    ("lists", "fuse"),
    [
        pytest.param({"modules": {"0": "float32"}}, [False, True], id="float32"),
        pytest.param({"modules": {"0": LINEAR_IN_FLOAT32}}, [False, True], id="linear on the blacklist"),
        pytest.param({"modules": {"0": {"blacklist": {"torch": ["tanh"]}}}}, [True, True], id="another function"),
        pytest.param(
            {**LINEAR_IN_FLOAT32, "modules": {"0": {"whitelist": {"torch.nn.functional": ["linear"]}}}},
            [True, False],
            id="only a part",
        ),
    ],
)
def test_parts_take_the_node_by_lists_of_their_own(lists: Any, fuse: list[bool]) -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
    assert_trains_the_same(make, cast_lists=lists)
    model = make()
    amp.initialize(model, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0, fused_linear=True, cast_lists=lists)
    assert [is_fused(part(drawn(5, 8))) for part in model] == fuse


# The cache


def test_weights_and_graphs_are_freed() -> None:
    with initialized():
        model, given = small(), drawn(5, 8, needs_grad=True)
        result = model(given)
        result.float().square().sum().backward(retain_graph=True)
        (first,) = grad(result.float().square().sum(), given, create_graph=True)
        first.sum().backward()
        amp.clear_cache()
        watched = [weakref.ref(each) for each in (*model.parameters(), given, result, first)]
        del model, given, result, first
        gc.collect()
        assert [each for each in watched if each() is not None] == []


def test_other_functions_use_the_same_cast(subtests: pytest.Subtests) -> None:
    """Whichever uses the weight first, the gradients of both arrive."""

    def run(linear_first: bool, fused_linear: bool) -> Any:
        torch.manual_seed(0)
        given, weight = drawn(5, 8), nn.Parameter(drawn(8, 8))
        uses = [lambda: F.linear(given, weight), lambda: torch.mm(given, weight)]
        with initialized(fused_linear=fused_linear):
            results = [use() for use in (uses if linear_first else reversed(uses))]
            # The input is cast by each, the weight by the first.
            assert amp.cast_counts() == amp.CastCounts(casts=3, cache_hits=1)
            assert is_fused(results) is fused_linear
            return results, *grad(sum(each.float().square().sum() for each in results), weight)

    def compare(linear_first: bool) -> None:
        (results, gradient), (wanted, wanted_gradient) = run(linear_first, True), run(linear_first, False)
        assert visible(results) == visible(wanted)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=2**-6, atol=2**-6)

    check_rows(subtests, (("linear first", True), ("product first", False)), compare)


def test_a_graph_keeps_no_cast_of_a_weight_after_its_pass() -> None:
    with initialized():
        model, given = small(), drawn(5, 8, needs_grad=True)
        result = model(given)
        casts = [weakref.ref(cast) for _, _, cast in runtime.live.cache._iteration.entries()]
        assert len(casts) == 4
        result.float().sum().backward()
        amp.clear_cache()
        assert [each for each in casts if each() is not None] == []
        assert is_fused(result)


# Diagnostics


def reported_step(fused_linear: bool) -> Any:
    torch.manual_seed(0)
    model, given = small(), drawn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype=torch.float16, verbosity=0, fused_linear=fused_linear)
    with amp.report() as report:
        with amp.scale_loss(model(given).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.deinitialize()
    return visible([*model.parameters(), *(each.grad for each in model.parameters())]), report


def test_a_report_changes_no_bits_and_counts_the_same_calls() -> None:
    """The casts of the gradients of four weights are the node's own."""
    (bits_found, fused), (bits_wanted, plain) = reported_step(True), reported_step(False)
    assert bits_found == bits_wanted

    def counted(report: Any, casts_of_gradients: int) -> Any:
        return [
            (each["name"], each["types"], each["casts"] - casts_of_gradients * (each["name"].endswith(".linear")))
            for each in report.to_dict()["functions"]
        ]

    assert counted(fused, 0) == counted(plain, 4)
    assert fused.to_dict()["modules"] == plain.to_dict()["modules"]
    assert str(fused).count("linear") == str(plain).count("linear") > 0


class Overflowing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second, self.where = nn.Linear(8, 8), nn.Linear(8, 8), where

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "forward":
            return self.second(x * 60000)
        x.register_hook(lambda gradient: gradient * 60000)
        return self.second(x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_trace_of_an_overflow_is_the_same(where: str) -> None:
    def run(fused_linear: bool) -> Any:
        torch.manual_seed(0)
        events: list[Any] = []
        model = Overflowing(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(
            model, optimizer, opt_level="O1", half_dtype=torch.float16, verbosity=0, init_scale=1024.0,
            on_overflow=("trace", events.append), fused_linear=fused_linear,
        )  # fmt: skip
        with amp.scale_loss(model(drawn(5, 8) * 100).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        amp.deinitialize()
        return [str(each.trace) for each in events]

    found = run(True)
    assert found == run(False)
    assert len(found) == 1

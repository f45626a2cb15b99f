"""Tensors, modules and modes of every kind that torch has: cast where they can be, left alone where not, no error."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, assert_same_state, casts_on
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL, assert_close
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ampatch import amp
from ampatch.errors import OptionError

# Torch's own: what it says of kinds of tensors that it may yet change, and of modules that it would have replaced.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*prototype",
    "ignore:.*beta state",
    "ignore:.*MaskedTensor",
    "ignore:.*Lazy modules",
    "ignore:.*weight_norm. is deprecated",
    "ignore:.*quantized tensor creation",
    "ignore:.*torch.ao.quantization",
)


# Of the largest value of a tensor.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen.append(hidden.dtype)
        return self.last(torch.tanh(self.norm(hidden)))


def inputs(device: str = "cpu") -> Tensor:
    return torch.linspace(-1, 1, 24, device=device).view(4, 6)


def trained(model: nn.Module, x: Any, level: str | None, half: torch.dtype, **options: Any) -> list[Tensor]:
    """Weights after two steps, at an opt level or (None) without amp."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, half_dtype=half, init_scale=64.0, verbosity=0, **options)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(x).float().pow(2).mean(), optimizer, with_amp=level is not None)
        optimizer.step()
    weights = [p.detach().clone() for p in (amp.master_params(optimizer) if level else model.parameters())]
    amp.deinitialize()
    return weights


class Named(Tensor):
    """Overrides functions of torch, by leaving them as they are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Silent(Tensor):
    """A subclass whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Wrapped(Tensor):
    """Holds another tensor, and overrides operators."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


class ToDense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dense(x)


class Graph(nn.Linear):
    """Multiplies by a sparse matrix."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.sparse.mm(pair[0], super().forward(pair[1]))


def with_shared_weight() -> nn.Module:
    model = Network()
    model.last.weight = model.first.weight
    return model


def parametrized(by: Callable[[nn.Linear], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Network()
        by(model.first)
        return model

    return make


def nested(layout: torch.layout, device: str) -> Tensor:
    rows = torch.linspace(-1, 1, 40, device=device).view(5, 8)
    return torch.nested.nested_tensor([rows[:2], rows[2:]], layout=layout)


def dense(value: Tensor) -> Tensor:
    return value.to_padded_tensor(0.0)


# Models, and their inputs on a device.
TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Any]]] = {
    "input overrides functions": (Network, lambda device: inputs(device).as_subclass(Named)),
    "input disables overrides": (Network, lambda device: inputs(device).as_subclass(Silent)),
    "strided nested input": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), ToDense()),
        functools.partial(nested, torch.strided),
    ),
    "jagged nested input": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), ToDense()),
        functools.partial(nested, torch.jagged),
    ),
    "sparse input": (lambda: Graph(6, 6), lambda device: (torch.eye(4, device=device).to_sparse(), inputs(device))),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 6)),
        lambda device: torch.tensor([0, 3, 3], device=device),
    ),
    "shared weight": (with_shared_weight, inputs),
    "weight norm": (parametrized(parametrizations.weight_norm), inputs),
    "weight norm by hooks": (parametrized(weight_norm), inputs),
    "spectral norm": (parametrized(parametrizations.spectral_norm), inputs),
    "spectral norm by hooks": (parametrized(spectral_norm), inputs),
    "orthogonal": (parametrized(parametrizations.orthogonal), inputs),
    "pruned": (parametrized(functools.partial(prune.l1_unstructured, name="weight", amount=0.5)), inputs),
}


@EACH_LEVEL
@EACH_HALF
@EACH_DEVICE
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.covering(2)
def test_models_and_inputs_of_every_kind_train_as_in_float32(kind, level, half, device):
    make, make_inputs = TRAINED[kind]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().to(device)

    x = make_inputs(device)
    assert_close(trained(model(), x, level, half), trained(model(), x, None, half), TOLERANCE[half])


@EACH_LEVEL
@EACH_HALF
@EACH_DEVICE
def test_inputs_that_wrap_a_tensor_give_outputs_that_do(level, half, device):
    expected = Network().to(device)(inputs(device))
    model = amp.initialize(Network().to(device), opt_level=level, half_dtype=half, verbosity=0)
    out = model(Wrapped(inputs(device)))
    assert type(out) is Wrapped
    assert set(model.seen) == {half}
    assert_close([out.held.detach()], [expected.detach()], TOLERANCE[half])


@EACH_HALF
@EACH_DEVICE
class TestWrappedWeights:
    def network(self, device: str) -> Network:
        model = Network().to(device)
        for linear in (model.first, model.last):
            linear.weight = nn.Parameter(Wrapped(linear.weight.detach()))
        return model

    def test_wrapped_weights_are_cast_and_get_gradients(self, half, device):
        plain = Network().to(device)
        plain(inputs(device)).pow(2).mean().backward()
        model = amp.initialize(self.network(device), half_dtype=half, verbosity=0)
        model(Wrapped(inputs(device))).float().pow(2).mean().backward()
        found = [model.first.weight.grad.held, model.last.weight.grad.held]
        assert set(model.seen) == {half}
        assert_close(found, [plain.first.weight.grad, plain.last.weight.grad], TOLERANCE[half])

    def test_wrapped_weights_cannot_be_converted(self, half, device):
        with pytest.raises(OptionError, match=r"'first\.weight' is a Wrapped"):
            amp.initialize(self.network(device), opt_level="O2", half_dtype=half)


class Operators(TorchDispatchMode):
    """Takes note of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Takes note of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def both_twice() -> Iterator[None]:
    with Operators(), Functions(), Functions(), Operators():
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "operators": Operators,
    "functions": Functions,
    "functions-that-torch-provides": BaseTorchFunctionMode,
    "both-twice": both_twice,
    "flop-counter": lambda: FlopCounterMode(display=False),
    "no-overrides": torch._C.DisableTorchFunction,
    "anomaly-detection": torch.autograd.detect_anomaly,
    "saved-tensors-elsewhere": torch.autograd.graph.save_on_cpu,
    "device-meta": lambda: torch.device("meta"),
    "default-device-meta": lambda: default_device("meta"),
    "default-float64": lambda: default_dtype(torch.float64),
    "default-bfloat16": lambda: default_dtype(torch.bfloat16),
}


@EACH_LEVEL
@EACH_HALF
@EACH_DEVICE
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.covering(1)
def test_training_within_a_mode_ends_with_the_same_bits(mode, level, half, device):
    model, x = Network().to(device), inputs(device)
    # A mode keeps linear layers from becoming one node, whose gradients on a GPU have more digits.
    expected = trained(Network().to(device), x, level, half, fused_linear=False)
    with MODES[mode]():
        found = trained(model, x, level, half, fused_linear=False)
    assert set(model.seen) == {half}
    # Under a mode, linear layers are torch's own calls, whose gradients are rounded on a GPU.
    if device == "cpu":
        assert_same_state(found, expected)
    else:
        assert_close(found, expected, TOLERANCE[half])


@EACH_HALF
class TestObservers:
    def test_modes_see_casts_and_torchs_own_functions(self, half):
        linear, x = F.linear, inputs()
        model = amp.initialize(Network(), half_dtype=half, verbosity=0)
        model(x)
        for _ in range(2):  # none is served by the cache
            with Operators() as operators, Functions() as functions:
                model(x)
            assert operators.seen.count("aten._to_copy.default") == 7
            assert functions.seen.count(linear) == 2

    def test_a_flop_counter_counts_as_without_amp(self, half):
        with FlopCounterMode(display=False) as plain:
            Network()(inputs())
        model = amp.initialize(Network(), half_dtype=half, verbosity=0)
        with FlopCounterMode(display=False) as cast:
            model(inputs())
        assert cast.get_total_flops() == plain.get_total_flops() > 0


@EACH_HALF
@EACH_DEVICE
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
class TestNestedTensors:
    def test_attention_of_nested_tensors_is_in_half(self, layout, half, device):
        def heads() -> Tensor:
            if layout is torch.jagged:
                return nested(layout, device).unflatten(-1, (1, 8)).transpose(1, 2)
            return torch.nested.nested_tensor([row[None] for row in nested(layout, device).unbind()])

        class Attend(nn.Module):
            def forward(self) -> Tensor:
                return F.scaled_dot_product_attention(heads(), heads(), heads())

        model = Attend()
        expected = model()
        amp.initialize(model, opt_level="O1", half_dtype=half, verbosity=0)
        found = model()
        assert found.dtype is half
        for one, other in zip(found.unbind(), expected.unbind(), strict=True):
            assert_close([one], [other], TOLERANCE[half])

    def test_blacklisted_functions_of_nested_tensors_are_in_float32(self, layout, half, device):
        value = nested(layout, device).to(half)
        with casts_on(half):
            found = torch.softmax(value, -1)
        assert found.dtype is torch.float32
        assert_close([dense(found)], [dense(torch.softmax(value.float(), -1))], TOLERANCE[half])


@EACH_HALF
@EACH_DEVICE
class TestSparseTensors:
    @pytest.mark.parametrize(
        "product",
        [
            pytest.param(lambda a, x: torch.mm(a, x), id="mm"),  # noqa: PLW0108 - looked up when called
            pytest.param(lambda a, x: torch.mm(input=a, mat2=x), id="by keyword"),
            pytest.param(lambda a, x: a @ x, id="operator"),
            pytest.param(lambda a, x: torch.addmm(x, a, x), id="addmm"),
            pytest.param(lambda a, x: torch.bmm(torch.stack([a]), x[None])[0], id="bmm"),
            pytest.param(lambda a, x: torch.spmm(a, x), id="spmm"),  # noqa: PLW0108 - as above
            pytest.param(lambda a, x: torch.sparse.mm(a, x), id="sparse.mm"),  # noqa: PLW0108 - as above
            pytest.param(lambda a, x: torch.sparse.addmm(x, a, x), id="sparse.addmm"),
        ],
    )
    @pytest.mark.parametrize("is_half", [(False, False), (False, True), (True, True)], ids=["float32", "mixed", "half"])
    @pytest.mark.covering(1)
    def test_products_of_sparse_tensors_are_in_float32(self, product, is_half, half, device):
        matrix = torch.tensor([[0.0, 2.0], [1.0, 0.0]], device=device)
        x = torch.tensor([[1.0, 0.5], [0.25, -1.0]], device=device, requires_grad=True)
        expected = product(matrix.to_sparse(), x)
        left, right = (half if each else torch.float32 for each in is_half)
        with casts_on(half):
            found = product(matrix.to(left).to_sparse(), x.to(right))
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)
        found.sum().backward()
        assert x.grad.abs().sum() > 0

    def test_reductions_of_sparse_tensors_are_in_float32(self, half, device):
        value = torch.eye(4, device=device).to(half).to_sparse()
        with casts_on(half):
            assert value.sum().dtype is torch.float32
            assert torch.log1p(value).dtype is torch.float32

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (Tensor.to_sparse, "of layout torch.sparse_coo"),
            (Tensor.to_sparse_csr, "of layout torch.sparse_csr"),
            (lambda t: torch.nested.nested_tensor([t]), "nested"),
        ],
        ids=["coo", "csr", "nested"],
    )
    @pytest.mark.covering(1)
    def test_sparse_and_nested_buffers_stay_float32_or_raise(self, make, told, half, device):
        model = nn.Linear(2, 2).to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.register_buffer("adjacency", make(torch.eye(2, device=device)))
        amp.initialize(model, half_dtype=half, verbosity=0)
        amp.deinitialize()
        with pytest.raises(OptionError, match=f"'adjacency' is {told}, "):
            amp.initialize(model, opt_level="O2", half_dtype=half, cast_buffers=True)
        assert {model.weight.dtype, model.adjacency.dtype} == {torch.float32}
        amp.initialize(model, opt_level="O2", half_dtype=half, verbosity=0)
        assert (model.weight.dtype, model.adjacency.dtype) == (half, torch.float32)

    @pytest.mark.parametrize("is_half", [False, True], ids=["float32", "half"])
    @pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
    @pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
    def test_products_without_a_half_kernel_are_in_float32(self, layout, is_half, half, device):
        """For compressed rows and columns it has some on a GPU, for blocks it has none, and on the CPU none at all."""
        compress = {"csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc, "bsr": lambda m: m.to_sparse_bsr((2, 2))}
        matrix = compress[layout](torch.eye(4, device=device).to(half if is_half else torch.float32))
        x = inputs(device)
        with casts_on(half):
            found = matrix @ x
        expected = x.to(half) if device == "cuda" and layout != "bsr" else x
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


@EACH_HALF
class TestQuantizedTensors:
    def test_quantized_tensors_are_not_cast(self, half):
        quantized = torch.quantize_per_tensor(inputs(), 0.125, 0, torch.qint8)
        with casts_on(half):
            assert torch.dequantize(quantized).dtype is torch.float32
            assert quantized.reshape(-1).dtype is torch.qint8

    def test_a_quantized_part_registered_as_float32_gets_float32(self, half):
        def model() -> nn.Module:
            torch.manual_seed(0)
            part = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear})
            return nn.Sequential(nn.Linear(6, 6), part)

        expected = model()(inputs())
        amp.register_float_function(torch.ao.nn.quantized.dynamic.Linear, "forward")
        found = amp.initialize(model(), half_dtype=half, verbosity=0)(inputs())
        assert_close([found.detach()], [expected.detach()], TOLERANCE[torch.bfloat16])


@EACH_HALF
class TestTensorsWithoutValues:
    @pytest.mark.parametrize("within", [False, True], ids=["moved", "made"])
    def test_meta_models_run(self, within, half):
        with torch.device("meta") if within else contextlib.nullcontext():
            model = amp.initialize(Network().to("meta"), half_dtype=half, verbosity=0)
            out = model(torch.empty(4, 6, device="meta"))
        assert (out.shape, out.device.type) == ((4, 6), "meta")

    def test_fake_models_run_and_have_gradients(self, half):
        with FakeTensorMode():
            model = amp.initialize(Network(), half_dtype=half, verbosity=0)
            out = model(torch.empty(4, 6))
            out.float().sum().backward()
        assert out.dtype is half
        assert model.first.weight.grad.shape == (6, 6)

    @EACH_LEVEL
    def test_fake_inputs_leave_a_real_model_as_it_was(self, level, half):
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, half_dtype=half, verbosity=0)
        before = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
        with torch.no_grad():
            next(amp.master_params(optimizer)).mul_(1.0)  # so that there is something to be brought into step
        with FakeTensorMode(allow_non_fake_inputs=True):
            out = model(torch.empty(4, 6))
        assert out.dtype is (half if level == "O1" else torch.float32)
        for parameter, value in zip(amp.master_params(optimizer), before, strict=True):
            assert_same_bits(parameter.detach(), value)
        assert model(inputs()).isfinite().all()


@EACH_HALF
class TestMaskedTensors:
    @pytest.mark.parametrize(
        "call",
        [lambda t: torch.softmax(t, -1), lambda t: torch.sum(t, -1), lambda t: t.sum(-1)],
        ids=["softmax", "sum", "method"],
    )
    def test_masked_tensors_compute_as_without_amp(self, call, half):
        value = masked_tensor(inputs(), inputs() > -0.5)
        expected = call(value)
        with casts_on(half):
            found = call(value)
        assert torch.equal(found.get_mask(), expected.get_mask())
        torch.testing.assert_close(found.to_tensor(0.0), expected.to_tensor(0.0))


@EACH_LEVEL
@EACH_HALF
@EACH_DEVICE
class TestModules:
    def test_cached_parametrizations_train(self, level, half, device):
        model = Network().to(device)
        parametrizations.weight_norm(model.first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amp.initialize(model, optimizer, opt_level=level, half_dtype=half, init_scale=64.0, verbosity=0)
        x = inputs(device)
        with parametrize.cached():
            assert_same_bits(model(x).detach(), model(x).detach())
            backward(model(x).float().sum(), optimizer)
        assert model.first.parametrizations.weight.original0.grad.abs().sum() > 0
        optimizer.step()

    def test_inference_mode_between_steps_changes_no_bits(self, level, half, device):
        x = inputs(device)
        expected = trained(Network().to(device), x, level, half)
        model = Network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amp.initialize(model, optimizer, opt_level=level, half_dtype=half, init_scale=64.0, verbosity=0)
        for _ in range(2):
            with torch.inference_mode():
                out = model(x)
                assert out.is_inference()
                assert out.dtype is (half if level == "O1" else torch.float32)
            optimizer.zero_grad()
            backward(model(x).float().pow(2).mean(), optimizer)
            optimizer.step()
        assert_same_state(list(amp.master_params(optimizer)), expected)

    def test_float64_models_are_not_cast(self, level, half, device):
        x = inputs(device).double()
        with default_dtype(torch.float64):
            expected = trained(Network().to(device), x, None, half)
            found = trained(Network().to(device), x, level, half)
        assert_same_state(found, expected)


@EACH_HALF
class TestLazyModules:
    def network(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(3))

    def test_lazy_modules_get_their_shapes_under_casts_and_train(self, half):
        torch.manual_seed(0)
        model = self.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, half_dtype=half, init_scale=64.0, verbosity=0)
        out = model(inputs())
        assert out.dtype is half
        backward(out.float().pow(2).sum(), optimizer)
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)
        assert model[0].weight.dtype is torch.float32

    def test_lazy_modules_without_shapes_cannot_be_converted(self, half):
        with pytest.raises(OptionError, match="has no shape yet"):
            amp.initialize(self.network(), opt_level="O2", half_dtype=half)

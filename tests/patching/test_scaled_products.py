"""``products: device``: linear layers and matrix products in float8, by torch's scaled_mm."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import AmpWarning, CastListError, UsageError
from ampatch.patching import scaled_products

BFLOAT16 = torch.bfloat16
BY_LEVEL = pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
BY_SCALE = pytest.mark.parametrize("scale", ["tensor", "row"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def entry(name: str = "linear", products: str = "device", scale: str = "tensor", **options: Any) -> dict[str, Any]:
    """Returns the entry of a function that computes in float8."""
    row = {"name": "float8_e4m3", "products": products, "scale": scale}
    return {"name": name, "format": row, "grad": {"name": "float8_e5m2", "scale": scale}, **options}


def lists(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"whitelist": {"*": list(entries or [entry()])}}


def set_up(model: nn.Module, given: object, opt_level: str = "O4", **options: Any) -> nn.Module:
    half = {} if opt_level in ("O4", "O5") else {"half_dtype": "bfloat16"}
    return amp.initialize(model, opt_level=opt_level, cast_lists=given, verbosity=0, **half, **options)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """Types of the operands of each product that the device makes."""
    found: list[tuple[torch.dtype, torch.dtype]] = []
    scaled_products._devices()  # which multiplies once in a process
    multiply = scaled_products.scaled_mm

    def noted(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append((left.dtype, right.dtype))
        return multiply(left, right, *args, **kwargs)

    monkeypatch.setattr(scaled_products, "scaled_mm", noted)
    return found


class Product(nn.Module):
    """Multiplies by a matrix, in one of the ways that torch has for it."""

    def __init__(self, how: str, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        shape = (48, 32) if how == "linear" else (32, 48)
        self.weight = nn.Parameter(torch.randn(shape) / 6)
        self.bias = nn.Parameter(torch.randn(48)) if bias else None
        self.how = how

    def forward(self, given: Tensor) -> Tensor:
        if self.how == "linear":
            return F.linear(given, self.weight, self.bias)
        if self.how == "linear by name":
            return F.linear(input=given, bias=self.bias, weight=self.weight.t())
        if self.how == "@":
            return given @ self.weight
        if self.how == "__rmatmul__":
            return self.weight.__rmatmul__(given)
        return getattr(torch, self.how)(given, self.weight)


def run(model: nn.Module, given: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns the result, and the gradients of the input and the parameters."""
    given = given.clone().requires_grad_()
    model.zero_grad()
    out = model(given)
    out.backward(grad.to(out.dtype))
    return [out.detach(), given.grad, *(each.grad.clone() for each in model.parameters())]


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(*shape, 32).to(BFLOAT16).float(), torch.randn(*shape, 48).exp().to(BFLOAT16).float()


def both(model: nn.Module, opt_level: str, given: Tensor, grad: Tensor, **options: Any) -> list[list[Tensor]]:
    """Returns what `run` does, of the device and as emulated."""
    found = []
    for made_by in ("device", "emulated"):
        names = ["linear"] if "linear" in model.how else ["matmul", "mm"]
        ways = lists(*(entry(name, made_by, **options) for name in names))
        found.append(run(set_up(copy.deepcopy(model), ways, opt_level), given, grad))
        amp.deinitialize()
    return found


@BY_LEVEL
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(7,), (32,), (3, 5), (2, 3, 4)], ids=str)
def test_a_linear_layer_is_what_the_emulation_is(opt_level, shape, device, products) -> None:
    given, grad = (each.to(device) for each in inputs(*shape))
    layer = Product("linear").to(BFLOAT16).float().to(device)
    found, expected = both(layer, opt_level, given, grad)
    assert products == [
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e4m3fn),
    ]
    for mine, other in zip(found[:3], expected[:3], strict=True):  # a bias's gradient is the sum of unrounded ones
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(mine.float(), other.float(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(found[3].float(), grad.flatten(0, -2).sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("how", ["linear by name", "@", "__rmatmul__", "matmul", "mm"])
@pytest.mark.parametrize("opt_level", ["O4", "O5"])
def test_every_way_to_multiply_by_a_matrix_is_made_by_the_device(how, opt_level, products) -> None:
    given, grad = inputs(20)
    model = Product(how, bias=how == "linear by name").to(BFLOAT16).float()
    found, expected = both(model, opt_level, given, grad)
    assert len(products) == 3
    for mine, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_may_have_its_scale_in_each_of_the_three_products(device) -> None:
    given, grad = (each.to(device) for each in inputs(12))
    given = given * torch.logspace(-6, 6, 12, device=device)[:, None]  # what one scale would flush to zero
    layer = Product("linear").to(device)
    found = run(set_up(copy.deepcopy(layer), lists(entry(scale="row"))), given, grad)
    amp.deinitialize()
    exact = run(layer, given, grad)
    for mine, other in zip(found, exact, strict=True):
        assert ((mine - other).norm() / other.norm()).item() < 0.15
    assert ((found[0] - exact[0]).norm(dim=1) / exact[0].norm(dim=1)).max().item() < 0.1


def test_a_weight_is_cast_once_a_step() -> None:
    layer = nn.Linear(32, 48)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    model, optimizer = amp.initialize(layer, optimizer, opt_level="O4", cast_lists=lists(), verbosity=0)
    given, _ = inputs(16)

    def step(count: int) -> Tensor:
        for _ in range(count):
            out = model(given)
            with amp.scale_loss(out.float().square().sum(), optimizer, delay_unscale=False) as scaled:
                scaled.backward()
        return out

    with amp.frozen_weights(model), torch.no_grad():
        model(given)
        model(given)
    assert amp.stats()["casts"] == 1
    assert amp.stats()["cache_hits"] == 1
    first = step(1)
    optimizer.step()
    assert not torch.equal(step(1), first)


@BY_SCALE
def test_a_weight_that_two_parts_cast_with_other_scales_is_right_in_both(scale) -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    other = "row" if scale == "tensor" else "tensor"
    formats = {part: {"format": entry(scale=each)["format"]} for part, each in (("0", scale), ("1", other))}
    given, _ = inputs(16)
    expected: list[Tensor] = []
    same = copy.deepcopy(model)
    for part, inner in zip(formats, same, strict=True):
        one = set_up(inner, {"whitelist": {"*": [{"name": "linear", **formats[part]}]}})
        given = one(given).detach().float()
        expected.append(given)
        amp.deinitialize()
    given, _ = inputs(16)
    model = set_up(model, {"modules": formats})
    seen: list[Tensor] = []
    for inner in model:
        inner.register_forward_hook(lambda _, __, out: seen.append(out.detach().float()))
    model(given)
    assert torch.equal(seen[0], expected[0])
    torch.testing.assert_close(seen[1], expected[1], rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in torch's compiler
@BY_SCALE
@pytest.mark.parametrize("opt_level", ["O4", "O5"])
def test_compiled_code_has_one_graph_and_the_same_bits(opt_level, scale) -> None:
    layer = Product("linear")
    given, grad = inputs(20)
    eager = run(set_up(copy.deepcopy(layer), lists(entry(scale=scale)), opt_level), given, grad)
    amp.deinitialize()
    model = set_up(copy.deepcopy(layer), lists(entry(scale=scale)), opt_level)
    compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), given, grad)
    for mine, other in zip(compiled, eager, strict=True):
        assert torch.equal(mine, other)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(given), eager[0])
    model.requires_grad_(False)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(given), eager[0])
    amp.deinitialize()
    assert not torch.equal(run(set_up(layer, None, opt_level), given, grad)[0], compiled[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_the_same(reentrant) -> None:
    model = set_up(Product("linear"), lists())
    given, grad = inputs(20)
    expected = run(model, given, grad)
    model.zero_grad()
    given.requires_grad_()
    checkpoint(model, given, use_reentrant=reentrant).backward(grad.to(BFLOAT16))
    assert torch.equal(given.grad, expected[1])
    assert torch.equal(model.weight.grad, expected[2])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_code_without_gradients_computes_the_same(mode) -> None:
    model = set_up(Product("linear"), lists())
    given, _ = inputs(20)
    expected = model(given).detach()
    with mode():
        assert torch.equal(model(given), expected)
        assert torch.equal(model(given), expected)


def test_the_result_may_be_written_to() -> None:
    model = set_up(Product("linear"), lists())
    given, _ = inputs(2, 3)
    model(given).add_(1).sum().backward()
    assert model.bias.grad.eq(6).all()


@BY_SCALE
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", ["input", "weight", "gradient"])
@pytest.mark.parametrize("grad", ["float8_e5m2", "float8_e4m3"])
def test_inf_and_nan_stay_visible(place, value, scale, grad) -> None:
    """Holds although torch 2.13 casts inf to the largest number of float8_e4m3."""
    given = lists(entry(scale=scale) | {"grad": {"name": grad, "scale": scale}})
    model = set_up(Product("linear", bias=False), given)
    x, coming = inputs(20)
    if place == "weight":
        with torch.no_grad():
            model.weight[0, 0] = value
    else:
        (x if place == "input" else coming)[0, 0] = value
    out, of_input, of_weight = run(model, x, coming)
    assert out.isfinite().all() == (place == "gradient")
    assert not (of_input if place != "input" else of_weight).isfinite().all()


@pytest.mark.parametrize("grad", ["float8_e5m2", "float8_e4m3"])
def test_an_overflow_reaches_the_check(grad) -> None:
    layers = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    options = {"half_dtype": "float16", "cast_lists": lists(entry() | {"grad": grad}), "verbosity": 0}
    model, optimizer = amp.initialize(layers, optimizer, opt_level="O1", **options)
    before = model[0].weight.detach().clone()
    for factor, of_loss in (
        (2e5, 1.0),
        (1.0, 1e9),
        (1.0, float("nan")),
    ):  # in each of the two passes
        with amp.scale_loss((model(inputs(16)[0] * factor) * of_loss).float().square().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert torch.equal(model[0].weight, before)


class TestTrace:
    """What a trace says of an overflow before a product, and of one in its result."""

    @staticmethod
    def log_of_a_skipped_step(model: nn.Module, caplog: pytest.LogCaptureFixture) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"half_dtype": "float16", "cast_lists": lists(), "verbosity": 0, "on_overflow": "trace"}
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", **options)
        with amp.scale_loss(model(inputs(16)[0]).float().sum(), optimizer) as scaled:
            scaled.backward()
        with pytest.warns(AmpWarning, match="no loss scale can help"):
            optimizer.step()
        return caplog.text

    def test_an_overflow_before_a_product_is_traced_to_where_it_was(self, caplog) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x) * 1e8)

        assert "First inf: in torch.Tensor.mul" in self.log_of_a_skipped_step(Model(), caplog)

    def test_an_overflow_of_a_result_names_the_layer(self, caplog) -> None:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        with torch.no_grad():
            model[1].weight.mul_(1e6)
        text = self.log_of_a_skipped_step(model, caplog)
        assert "First inf: in torch.nn.functional.linear" in text
        assert "module    1 (Linear)" in text


# Calls that the device does not make


def warned(model: nn.Module, call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call(model)
    return [str(each.message) for each in caught if issubclass(each.category, AmpWarning)]


@pytest.mark.parametrize("opt_level", ["O4", "O5"])
@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda: nn.Linear(32, 10), (4, 32), "must be multiples of 16, and are 10 by 32"),
        (lambda: nn.Linear(24, 16), (4, 24), "must be multiples of 16, and are 16 by 24"),
    ],
)
def test_sizes_that_the_device_refuses_compute_in_half_and_are_told_once(opt_level, make, shape, message) -> None:
    model = make()
    plain = set_up(copy.deepcopy(model), None, opt_level)
    given = torch.randn(shape)
    expected = plain(given)
    amp.deinitialize()
    model = set_up(nn.Sequential(model), lists(), opt_level)
    told = warned(model, lambda model: model(given))
    assert len(told) == 1
    assert message in told[0]
    assert "torch.nn.functional.linear does not compute in float8_e4m3" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(model(given), expected)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(given), expected)


def test_a_bias_of_one_number_computes_in_half_and_is_told() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model = set_up(Sum(), lists(entry("addmm")))
    assert "the bias must be a vector with a number for each column" in warned(model, lambda it: it(inputs(4)[0]))[0]


def test_a_form_in_place_computes_without_the_format(products) -> None:
    set_up(Product("addmm"), lists(entry("addmm")))
    given, weight = inputs(32)[0], torch.randn(32, 32, requires_grad=True)
    (weight * 1).addmm_(given, weight)
    assert products == []


def test_a_batched_product_and_a_transform_compute_in_half_and_are_told() -> None:
    model = set_up(Product("linear"), lists(entry(), entry("matmul")))
    batch = torch.randn(2, 16, 16).requires_grad_()
    (told,) = warned(model, lambda _: batch @ batch)
    assert "its second argument must be a matrix, and has 3 dimensions" in told
    (told,) = warned(model, lambda model: torch.func.vmap(model)(inputs(4)[0]))
    assert "torch.func cannot transform its products" in told
    assert (batch @ batch).dtype is BFLOAT16


def test_a_device_without_such_products_computes_in_half(monkeypatch) -> None:
    monkeypatch.setattr(scaled_products, "_devices", frozenset)
    model = set_up(Product("linear"), lists())
    (told,) = warned(model, lambda model: model(inputs(4)[0]))
    assert "the device must have such products, and cpu has none" in told


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in torch's compiler
def test_wrong_shapes_raise_torchs_error_and_empty_batches_pass() -> None:
    model = set_up(Product("linear"), lists())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 31))
    assert model(torch.randn(0, 32)).shape == (0, 48)
    assert F.linear(torch.randn(4, 32), torch.empty(0, 32)).shape == (4, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert [compiled(torch.randn(rows, 32)).shape[0] for rows in (4, 0, 7)] == [4, 0, 7]
    assert model(torch.randn(32)).shape == (48,)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, weight: torch.mm(x[None], weight.t()),
        lambda x, weight: torch.mm(x[0], weight.t()),
        lambda x, weight: F.linear(x, weight, nonsense=3),
        lambda x, weight: F.linear(x, weight, torch.ones(48, dtype=torch.float64)),
        lambda x, weight: F.linear(x, weight, torch.ones(47)),
        lambda x, weight: F.linear(x, weight, None, 3),
        lambda x, weight: torch.matmul(x, mat2=weight.t()),
    ],
)
def test_what_torch_refuses_is_refused(call) -> None:
    model = set_up(Product("linear"), lists(entry(), entry("mm")))
    with pytest.raises((RuntimeError, TypeError)):
        call(inputs(4)[0], model.weight)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, weight: torch.mm(x, mat2=weight.t()),
        lambda x, weight: torch.mm(input=x, mat2=weight.t()),
        lambda x, weight: torch.matmul(x, other=weight.t()),
        lambda x, weight: x.mm(mat2=weight.t()),
        lambda x, weight: torch.addmm(torch.zeros(48), x, weight.t()),
        lambda x, weight: torch.addmm(input=torch.zeros(48), mat1=x, mat2=weight.t()),
    ],
)
def test_arguments_may_have_names(call, products) -> None:
    given = {"whitelist": {"*": [entry("matmul"), entry("mm")], "torch": [entry("addmm")]}}
    model = set_up(Product("linear"), given)
    call(inputs(4)[0], model.weight)
    assert len(products) == 1


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_computes_in_half_and_is_told(products) -> None:
    model = set_up(Product("linear"), lists())
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)])
    (told,) = warned(model, lambda model: model(nested))
    assert "one is sparse or nested" in told
    assert not products


def test_an_exported_model_multiplies_in_float8() -> None:
    model = set_up(Product("linear"), lists())
    given, _ = inputs(16)
    expected = model(given).detach()
    found = torch.export.export(model, (given,))
    assert "scaled_mm" in str(found.graph)
    assert torch.equal(found.module()(given), expected)


def test_casts_that_are_off_multiply_as_torch_does() -> None:
    model, given = set_up(Product("linear"), lists()), inputs(4)[0]
    with amp.disable_casts():
        expected = model(given)
    assert expected.dtype is torch.float32
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(model(given), expected)


def test_a_second_derivative_is_refused_and_emulated_products_have_it() -> None:
    given, _ = inputs(4)
    model = set_up(Product("linear"), lists())
    with pytest.raises(UsageError, match=r"found create_graph=True for a product in float8"):
        torch.autograd.grad(model(given).sum(), model.weight, create_graph=True)
    amp.deinitialize()
    model = set_up(Product("linear"), lists(entry(products="emulated")))
    (grad,) = torch.autograd.grad(model(given).square().sum(), model.weight, create_graph=True)
    assert torch.autograd.grad(grad.sum(), model.weight)[0].isfinite().all()


def test_conditions_hold_for_the_device_too(products) -> None:
    given = {"whitelist": {"torch.nn.functional": [entry(when={"bias": [None]})]}}
    model = set_up(nn.Sequential(Product("linear"), nn.Linear(48, 32, bias=False)), given)
    model(inputs(4)[0])
    assert len(products) == 1


@pytest.mark.parametrize("made_by", ["device", "emulated"])
def test_calls_outside_of_a_condition_compute_as_without_the_entry(made_by) -> None:
    given = {"whitelist": {"torch.nn.functional": [entry(products=made_by, when={"bias": [None]})]}}
    model, (x, grad) = Product("linear"), inputs(4)
    expected = run(set_up(copy.deepcopy(model), None, "O5"), x, grad)
    amp.deinitialize()
    for mine, other in zip(run(set_up(model, given, "O5"), x, grad), expected, strict=True):
        assert torch.equal(mine, other)


def test_a_part_multiplies_in_float8_and_its_other_functions_in_half(products) -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(32, 32)), nn.Linear(32, 32))
    formats = {key: value for key, value in entry().items() if key != "name"}
    model = set_up(model, {"modules": {"0": formats}})
    model(torch.randn(2, 4, 32))
    assert len(products) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "linear", "format": {"name": "e3m4", "products": "device"}}, "multiplies e3m4; expected float8_e4m3"),
        ({"name": "linear", "format": {"name": "float8_e4m3", "products": "gpu"}}, "expected one of emulated, device"),
        (entry(scale="none"), "found scale: none with it; expected tensor or row"),
        (
            entry() | {"grad": "bfloat16"},
            "float8_e4m3 by bfloat16; expected float8_e4m3 or float8_e5m2",
        ),
        (entry(scale="row") | {"grad": "float8_e5m2"}, "`format` has scale: row, and `grad` has scale: tensor"),
        (entry() | {"grad": {"name": "float8_e5m2", "rounding": "stochastic"}}, "found rounding: stochastic"),
        (entry(products="emulated") | {"grad": entry()["format"]}, "only the gradients have it"),
        (entry("conv2d"), "is for torch's linear, addmm, matmul, mm"),
    ],
)
def test_a_fault_says_what_to_type(given, message) -> None:
    with pytest.raises(CastListError) as caught:
        set_up(nn.Linear(32, 32), {"whitelist": {"torch.nn.functional": [given]}})
    assert message in str(caught.value)


def test_float32_functions_and_others_than_torchs_cannot_multiply_in_float8() -> None:
    with pytest.raises(CastListError, match="blacklisted functions compute in float32"):
        set_up(nn.Linear(32, 32), {"blacklist": {"torch.nn.functional": [entry()]}})
    with pytest.raises(CastListError, match="is for torch's linear"):
        set_up(nn.Linear(32, 32), {"whitelist": {__name__: [entry()]}})


def linear(given: Tensor, weight: Tensor) -> Tensor:
    """A user's function with the name of torch's."""
    return given * weight


def test_explain_tells_who_multiplies() -> None:
    set_up(Product("linear"), lists())
    told = " ".join(str(amp.explain(F.linear)).split())
    assert "format {name: float8_e4m3, products: device}, grad float8_e5m2" in told

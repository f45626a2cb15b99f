"""What is cast at O1 and O4: the work of adopted models, and no other arithmetic of the process."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, dtype_name, heard, in_thread
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.runtime import runtime

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

FULL, HALF = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def _in_both(calls_in_both: None) -> None:
    """Calls in Python and in C++ decide the same."""


class Encoders(nn.Module):
    """A model in the style of CLIP: users call its methods, and its parts, beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8)))
        self.text = nn.Linear(8, 4)
        self.projection = nn.Parameter(torch.randn(8, 4))

    def forward_features(self, x: Tensor) -> Tensor:
        return self.visual[2](self.visual[0](x))

    def encode_image(self, x: Tensor) -> Tensor:
        return self.visual(x) @ self.projection

    def forward(self, x: Tensor) -> Tensor:
        return self.encode_image(x) + self.text(x)


def adopt(model: nn.Module | None = None, half: torch.dtype = HALF, **options: Any) -> Any:
    torch.manual_seed(0)
    return amp.initialize(model or Encoders(), opt_level="O1", half_dtype=half, verbosity=0, **options)


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).view(3, 8)


class TestArithmeticOfNoModel:
    """The numbers are those without amp."""

    @pytest.fixture(autouse=True)
    def _adopted(self, calls_in_both: None) -> None:
        adopt()

    def test_products_of_tensors_without_gradients_are_exact(self) -> None:
        ones = torch.ones(70000, 1)  # float16 ends at 65504
        found = [
            ones.T @ ones,
            torch.mm(ones.T, ones),
            F.linear(ones.T, ones.T),
            torch.einsum("ni,nj->ij", ones, ones),
            torch.stack([ones.T @ ones]),
            torch.linalg.multi_dot([ones.T, ones, torch.ones(1, 1)]),
        ]
        found.append(in_thread(lambda: ones.T @ ones))
        assert [each.item() for each in found] == [70000] * 7

    @torch.no_grad()
    def test_weights_and_modules_outside_of_a_forward_are_not_cast(self) -> None:
        model = adopt()
        assert (model.projection.T @ model.projection).dtype is FULL
        assert nn.Linear(8, 8)(x()).dtype is FULL
        assert nn.LSTM(8, 8)(x())[0].dtype is FULL
        assert nn.Conv1d(3, 3, 1)(x()).dtype is FULL

    def test_products_in_a_users_backward_pass_are_not_cast(self) -> None:
        def note(gradient: Tensor) -> None:
            seen.append((gradient @ gradient.T).dtype)

        seen: list[torch.dtype] = []
        given = x().requires_grad_()
        given.register_hook(note)
        heard(given, note).sum().backward()
        assert seen == [FULL, FULL]

    @pytest.mark.filterwarnings("ignore:.*CUDA is not available")
    @pytest.mark.parametrize("enabled", [True, False])
    def test_autocast_for_another_device_changes_nothing(self, enabled: bool) -> None:
        model = adopt()
        with torch.autocast("cuda", torch.float16, enabled), torch.no_grad():
            assert (x() @ x().T).dtype is FULL
            assert (model(x()).dtype, model.visual(x()).dtype) == (HALF, HALF)
            runtime.live.device_types.add("cuda")  # as of another model
            assert (x() @ x().T).dtype is FULL
        with torch.autocast("cuda", torch.float16, enabled), torch.no_grad():
            assert (x() @ x().T).dtype is FULL


class TestWorkOfAModel:
    def test_the_forward_of_a_model_casts_with_and_without_gradients(self, half: torch.dtype) -> None:
        model = adopt(half=half)
        for gradients in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with gradients():
                assert (model(x()).dtype, model.forward(x()).dtype) == (half, half)
        model.requires_grad_(False)
        assert model(x()).dtype is half

    @pytest.mark.parametrize("given", [torch.float16, torch.bfloat16], ids=dtype_name)
    @torch.no_grad()
    def test_products_with_a_half_tensor_run_in_its_type(self, given: torch.dtype) -> None:
        adopt()
        value = x()
        # Another half type is that of another model: a text encoder in bfloat16 overflows in float16.
        assert (value.to(given) @ value.T.to(given)).dtype is given
        assert (value.to(given) @ value.T).dtype is given
        assert torch.mm(value, mat2=value.T.to(given)).dtype is given
        assert F.linear(value, value, value[0, :3].to(given)).dtype is given
        assert torch.einsum("ij,kj->ik", [value, value.to(given)]).dtype is given
        assert (value.half() @ value.T.bfloat16()).dtype is HALF

    def test_a_model_in_another_half_type_computes_in_its_own(self, half: torch.dtype) -> None:
        other = nn.ModuleList([nn.Linear(8, 8), nn.LSTM(8, 8)]).to(half)

        def results() -> list[Tensor]:
            given = (x() * 2.0**8).to(half)
            return [other[0](given), other[1](given)[0], other[0].weight @ given.T]

        expected = results()
        adopt(half=torch.bfloat16 if half is torch.float16 else torch.float16)
        for found, wanted in zip(results(), expected, strict=True):
            assert_same_bits(found, wanted)

    def test_products_that_record_gradients_are_cast(self) -> None:
        adopt()
        weight = torch.randn(4, 8, requires_grad=True)
        assert F.linear(x(), weight).dtype is HALF
        assert (x() @ weight.T).dtype is HALF
        assert torch.einsum("ij,kj->ik", [x(), weight]).dtype is HALF
        assert F.linear(x(), weight.detach()).dtype is FULL
        with torch.no_grad():
            assert F.linear(x(), weight).dtype is FULL
        with torch.inference_mode():
            assert F.linear(x(), weight).dtype is FULL
        gradient = torch.autograd.grad(F.linear(x(), weight).float().square().sum(), weight, create_graph=True)[0]
        assert gradient.dtype is FULL
        assert (gradient @ gradient.T).dtype is HALF  # recorded as well: a penalty on gradients

    def test_recurrent_layers_cast_where_gradients_are_recorded(self) -> None:
        adopt()
        layer = nn.LSTM(8, 8)
        assert layer(x())[0].dtype is HALF
        with torch.no_grad():
            assert layer(x())[0].dtype is FULL
            assert layer(x().half())[0].dtype is HALF
        layer.requires_grad_(False)
        assert layer(x())[0].dtype is FULL

    @torch.no_grad()
    def test_blacklist_and_promotion_hold_outside_of_models(self) -> None:
        adopt()
        value = x()
        assert F.softmax(value.half(), -1).dtype is FULL
        assert torch.sum(value.half()).dtype is FULL
        assert torch.dot(value[0], value[1].half()).dtype is FULL
        assert (value.to_sparse() @ value.T.half()).dtype is FULL

    def test_products_under_grad_transforms_are_cast(self) -> None:
        adopt()
        weight, seen = torch.randn(4, 8), []

        def loss(weight: Tensor, row: Tensor) -> Tensor:
            seen.append(F.linear(row, weight).dtype)
            return F.linear(row, weight).float().square().sum()

        grad(loss)(weight, x()[0])
        vmap(grad(loss), (None, 0))(weight, x())
        grad(lambda weight: vmap(loss, (None, 0))(weight, x()).sum())(weight)
        assert seen == [HALF] * 3
        seen.clear()
        vmap(loss, (None, 0))(weight, x())
        assert seen == [FULL]

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_functions_in_checkpoints_cast_where_gradients_are_recorded(self, reentrant: bool) -> None:
        adopt()
        seen: list[torch.dtype] = []

        def function(given: Tensor) -> Tensor:
            result = given @ given.T
            seen.append(result.dtype)
            return result.sin()

        checkpoint(function, x().requires_grad_(), use_reentrant=reentrant).float().sum().backward()
        assert seen == [HALF, HALF]
        checkpoint(lambda: function(x()), use_reentrant=reentrant)
        assert seen[2:] == [FULL]


class TestPartsAlone:
    @pytest.fixture(params=["gradients", "no_grad", "inference_mode", "frozen"])
    def model(self, request: pytest.FixtureRequest, calls_in_both: None) -> Iterator[Encoders]:
        model = adopt()
        if request.param == "frozen":
            model.requires_grad_(False)
        block = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(request.param, torch.enable_grad)
        with block():
            yield model

    def test_parts_called_alone_cast(self, model: Encoders) -> None:
        value = x()
        assert model.visual(value).dtype is HALF
        assert model.visual[2](value).dtype is HALF
        assert model.visual[2][0](value).dtype is HALF
        assert model.encode_image(value).dtype is HALF
        assert model.forward_features(value).dtype is HALF
        assert functional_call(model.text, dict(model.text.named_parameters()), value).dtype is HALF

    def test_parts_called_alone_have_the_bits_of_the_forward(self, model: Encoders) -> None:
        value = x()
        assert_same_bits(model.encode_image(value) + model.text(value), model(value))

    def test_a_part_that_raises_leaves_no_region(self, model: Encoders) -> None:
        with pytest.raises(RuntimeError):
            model.text(torch.ones(2, 3))
        assert not torch.is_autocast_enabled("cpu")

    def test_parts_called_alone_cast_nothing_where_casts_are_off(self, model: Encoders) -> None:
        with amp.disable_casts():
            assert model.visual(x()).dtype is FULL
        with torch.autocast("cpu", enabled=False):
            assert model.visual(x()).dtype is FULL
        with torch.autocast("cpu", torch.bfloat16):
            assert model.visual(x()).dtype is torch.bfloat16

    def test_modules_of_copies_and_modules_added_later_are_parts(self, model: Encoders) -> None:
        model.added = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
        model.visual.append(nn.Linear(8, 8))
        assert (model.added[0](x()).dtype, model.visual[3](x()).dtype) == (HALF, HALF)
        assert copy.deepcopy(model).visual(x()).dtype is copy.copy(model).visual(x()).dtype is HALF

    def test_a_forward_that_the_class_gets_later_runs(self, model: Encoders, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Encoders, "forward", lambda self, x: self.text(x) * 2)
        assert_same_bits(model(x()), model.text(x()) * 2)

        class Other(Encoders):
            def forward(self, x: Tensor) -> Tensor:
                return self.text(x) * 3

        model.__class__ = Other
        assert_same_bits(model(x()), model.text(x()) * 3)

    def test_the_region_of_a_part_covers_its_hooks_only(self, model: Encoders) -> None:
        seen: list[bool] = []
        model.visual.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        model.visual.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        model.visual(x())
        assert seen == [True, True]
        assert not torch.is_autocast_enabled("cpu")
        assert (x() @ x().T).dtype is FULL

    @torch.no_grad()
    def test_a_part_whose_forward_is_a_generator_casts_in_each_step(self) -> None:
        class Steps(nn.Linear):
            def forward(self, x: Tensor) -> Iterator[Tensor]:
                for _ in range(2):
                    x = super().forward(x)
                    yield x

        model = adopt(nn.ModuleList([Steps(8, 8)]))
        for value in model[0](x()):
            assert value.dtype is HALF
            assert (x() @ x().T).dtype is FULL

    def test_a_part_with_two_names_casts(self) -> None:
        model = Encoders()
        model.tied = model.text
        adopt(model)
        with torch.no_grad():
            assert model.tied(x()).dtype is HALF

    def test_a_pickled_part_belongs_to_no_session(self) -> None:
        model = adopt()
        part = pickle.loads(pickle.dumps(model.visual))
        assert "ampatch" not in str(pickle.dumps(model.visual))
        with torch.no_grad():
            assert part(x()).dtype is FULL

    def test_parts_cast_nothing_after_the_session(self) -> None:
        model, before = Encoders(), dict(vars(nn.Module))
        adopt(model)
        amp.deinitialize()
        with torch.no_grad():
            assert model.visual(x()).dtype is FULL
        assert dict(vars(nn.Module)) == before
        assert nn.Module._compiled_call_impl is None

    def test_modules_of_a_refused_model_are_no_parts(self) -> None:
        adopt(nn.Linear(1, 1))
        model = Encoders()
        with pytest.raises(amp.AmpError):
            amp.initialize([model, torch.jit.script(nn.Linear(2, 2))], opt_level="O1", half_dtype=HALF, verbosity=0)
        with torch.no_grad():
            assert model.visual(x()).dtype is FULL

    def test_parts_are_not_kept_alive(self) -> None:
        model = adopt()
        reference = weakref.ref(model.text)
        model.text(x())
        del model.text
        assert reference() is None

    def test_calls_of_modules_are_not_patched_at_o0(self) -> None:
        amp.initialize(Encoders(), opt_level="O0", verbosity=0)
        assert nn.Module._compiled_call_impl is None


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("nothing_compiled")
class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.slow
    def test_compiled_code_decides_as_eager_code_for_each_grad_mode(self, backend: str) -> None:
        model = adopt()
        weight = torch.randn(4, 8, requires_grad=True)

        def everything(value: Tensor) -> list[torch.dtype]:
            product = value @ value.T
            features = model.encode_image(value)
            return product, features, F.linear(value, weight), model.visual[0](value), model(value)

        compiled = torch.compile(everything, backend=backend, fullgraph=True)
        for gradients in (torch.no_grad, torch.enable_grad, torch.no_grad):
            with gradients():
                found, wanted = compiled(x()), everything(x())
                assert [each.dtype for each in found] == [each.dtype for each in wanted]
                assert [each.dtype for each in found[:2]] == [FULL, HALF]
        before = _graphs()
        with torch.no_grad():
            compiled(x())
        assert _graphs() == before

    @torch.no_grad()
    @pytest.mark.slow
    def test_a_compiled_part_casts(self) -> None:
        model = adopt()
        model.visual.register_forward_hook(lambda *_: None)
        compiled, before = torch.compile(model.visual, backend="eager"), _graphs()
        for _ in range(3):
            assert compiled(x()).dtype is HALF
        assert _graphs() == before + 1
        model.visual.compile(backend="eager")
        assert (model.visual(x()).dtype, model(x()).dtype) == (HALF, HALF)
        amp.deinitialize()
        assert model.visual(x()).dtype is FULL
        assert model.visual._compiled_call_impl is not None

    @torch.no_grad()
    def test_a_compiled_function_decides_for_each_module(self) -> None:
        model, other = adopt(), Encoders()
        call = torch.compile(lambda module, value: module(value), backend="eager", fullgraph=True)
        assert [call(each.text, x()).dtype for each in (model, other, model, other)] == [HALF, FULL, HALF, FULL]

    @torch.no_grad()
    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.slow
    def test_exported_models_and_parts_cast(self, strict: bool) -> None:
        model = adopt()
        for module in (model, model.visual):
            program = torch.export.export(module, (x(),), strict=strict)
            assert program.module()(x()).dtype is HALF

    @torch.no_grad()
    def test_traced_parts_cast_and_scripted_ones_do_not(self) -> None:
        model = adopt()
        assert torch.jit.trace(model.visual, x())(x()).dtype is HALF
        assert torch.fx.symbolic_trace(model.visual)(x()).dtype is HALF  # it calls layers of the model
        assert torch.jit.script(model.visual)(x()).dtype is FULL


class TestWhoAsks:
    """By name, or for the process."""

    @torch.no_grad()
    def test_registered_and_decorated_functions_always_cast(self) -> None:
        @amp.half_function
        def decorated(given: Tensor) -> torch.dtype:
            return given.dtype

        amp.register_half_function(torch, "mm")
        amp.register_bfloat16_function(torch, "bmm")
        adopt()
        assert decorated(x()) is HALF
        assert torch.mm(x(), x().T).dtype is HALF
        assert torch.bmm(x()[None], x().T[None]).dtype is torch.bfloat16
        assert torch.matmul(x(), x().T).dtype is FULL

    @torch.no_grad()
    def test_amp_init_casts_in_the_whole_process(self) -> None:
        with amp.init(half_dtype=HALF):
            assert (x() @ x().T).dtype is HALF
            assert nn.Linear(8, 8)(x()).dtype is HALF
            assert nn.LSTM(8, 8)(x())[0].dtype is HALF
            assert nn.Module._compiled_call_impl is None


class Copied:
    """Calls a module of another model while it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        nn.Linear(8, 8)(x())
        return Copied()


@dataclasses.dataclass(unsafe_hash=True)
class Equal(nn.Module):
    """Equals every other with the same field."""

    size: int = 1

    def __post_init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Unhashable(Equal):
    __hash__ = None  # type: ignore[assignment]


class TestWhatIsAPart:
    def test_a_copy_has_parts_although_other_modules_ran_during_copying(self) -> None:
        model = adopt()
        model.memory = Copied()
        copied = copy.deepcopy(model)
        with torch.no_grad():
            assert copied.visual(x()).dtype is HALF

    def test_modules_that_define_equality_are_told_apart(self) -> None:
        model = adopt(nn.Sequential(Equal()))
        with torch.no_grad():
            assert model[0](x()).dtype is HALF
            assert Equal()(x()).dtype is FULL
            assert Unhashable()(x()).dtype is FULL

    def test_modules_without_parameters_such_as_metrics_are_no_parts(self) -> None:
        class Matches(nn.Module):
            def forward(self, one: Tensor, other: Tensor) -> Tensor:
                return one.T @ other

        model = adopt(nn.ModuleList([nn.Linear(8, 8), Matches()]), torch.bfloat16)
        ones = torch.ones(1001, 1)
        assert model[1](ones, ones).item() == 1001

    @pytest.mark.parametrize("orthogonal", [True, False])
    def test_parametrizations_are_not_cast_outside_of_a_forward(self, orthogonal: bool) -> None:
        class Product(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.factor = nn.Parameter(torch.randn(8, 8))

            def forward(self, weight: Tensor) -> Tensor:
                return weight @ self.factor

        layer = nn.Linear(8, 8)
        if orthogonal:
            parametrizations.orthogonal(layer)
        else:
            parametrize.register_parametrization(layer, "weight", Product())
        with torch.no_grad():
            expected = layer.weight
        model = adopt(nn.Sequential(layer))
        with torch.no_grad():
            assert model[0](x()).dtype is HALF
            assert_same_bits(layer.weight, expected)
        parametrize.remove_parametrizations(layer, "weight")
        assert_same_bits(layer.weight, expected)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("name", ["einsum", "tensordot", "chain_matmul"])
def test_blacklisted_python_functions_of_torch_compute_in_float32(name):
    """They multiply in C++, where torch's autocast would cast in the region of the model."""
    calls = {
        "einsum": lambda h: torch.einsum("ij,jk->ik", h, h),
        "tensordot": lambda h: torch.tensordot(h, h, 1),
        "chain_matmul": lambda h: torch.chain_matmul(h, h, h),
    }

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return calls[name](self.layer(x))

    model = Model()
    amp.initialize(model, half_dtype="float16", cast_lists={"blacklist": {"*": [name]}}, verbosity=0)
    assert model(torch.ones(4, 4)).dtype is torch.float32


def cloned(module: nn.Module) -> nn.Module:
    """Copies a module attribute by attribute, with differentiable weights, as libraries for meta-learning do."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: each * 1 for name, each in module._parameters.items()}
    clone._modules = {name: cloned(each) for name, each in module._modules.items()}
    return clone


def functional(module: nn.Module) -> nn.Module:
    """Does the same, and gives the copy a class whose forward is another one."""

    class Functional(type(module)):
        def forward(self, *args: Any) -> Any:
            return super().forward(*args) * 2

    clone = Functional.__new__(Functional)
    nn.Module.__init__(clone)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_modules"):
            setattr(clone, name, value)
    clone._parameters.update({name: each * 1 for name, each in module._parameters.items()})
    clone._modules.update({name: cloned(each) for name, each in module._modules.items()})
    return clone


class TestCopiesByAttribute:
    """Libraries such as higher and learn2learn copy modules so, and step the copies in an inner loop."""

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("keep_fp32", [(), ("text",)])
    def test_a_copy_computes_with_its_own_weights(self, level: str, keep_fp32: tuple[str, ...]) -> None:
        model = Encoders()
        amp.initialize(model, opt_level=level, half_dtype=HALF, verbosity=0, keep_fp32=keep_fp32)
        clone = cloned(model)
        loss = clone(x()).float().square().sum()
        assert torch.equal(loss, model(x()).float().square().sum())
        weight = clone.text._parameters["weight"]
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
        clone.text._parameters["weight"] = weight - gradient
        after = clone(x()).float().square().sum()
        assert not torch.equal(after, loss)
        (of_model,) = torch.autograd.grad(after, [model.text.weight])
        assert of_model.count_nonzero()

    def test_a_copy_casts_as_the_model(self) -> None:
        model = adopt(keep_fp32="visual")
        clone = cloned(model)
        with torch.no_grad():
            assert clone(x()).dtype is model(x()).dtype
            assert cloned(model.visual)(x()).dtype is FULL
        amp.deinitialize()
        clone.text._parameters["weight"] = torch.zeros(4, 8)
        with torch.no_grad():
            assert clone(x()).dtype is FULL
            assert torch.equal(clone(x()), clone.encode_image(x()) + clone.text._parameters["bias"])

    def test_a_copy_with_another_class_runs_the_forward_of_that(self) -> None:
        model = adopt()
        with torch.no_grad():
            assert_same_bits(functional(model)(x()), model(x()) * 2)

"""Of models whose weights amp converts: the type of each tensor, what stays float32, and the casts around forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Slotted, assert_same_bits, assert_same_state, dtype_name
from optimizers import backward
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from ampatch import amp
from ampatch.errors import OptionError

LEVELS = ["O2", "O3", "O5"]


def initialize(model: Any, optimizer: Any = None, **options: Any) -> None:
    amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, **options})


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Of all parameters and buffers, by name."""
    return {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def train(model: nn.Module, inputs: Tensor, steps: int = 2, **options: Any) -> Tensor:
    """Some steps under amp; returns the last output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    initialize(model, optimizer, init_scale=2.0**7, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(inputs)
        backward(output.float().square().mean(), optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
    return output.detach()


class TestLevels:
    """The table's row of weights, of batch norm, and of masters."""

    @pytest.mark.parametrize("level", LEVELS)
    def test_levels_give_weights_and_batch_norm_their_types(self, level, half):
        half = torch.bfloat16 if level == "O5" else half
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        initialize(model, opt_level=level, half_dtype=half)
        of_norm = half if level == "O3" else torch.float32
        assert list(dtypes(model).values()) == [half] * 2 + [of_norm] * 2 + [torch.float32] * 2 + [torch.int64]
        assert model(torch.ones(2, 3)).dtype is torch.float32

    @pytest.mark.parametrize("value", [False, "False", True, "True"])
    @pytest.mark.parametrize("level", LEVELS)
    def test_keep_batchnorm_fp32_overrides_the_level(self, level, value):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        initialize(model, opt_level=level, keep_batchnorm_fp32=value)
        assert dtypes(model)["1.weight"] is (torch.float32 if str(value) == "True" else torch.bfloat16)

    @pytest.mark.parametrize("level", ["O0", "O2", "O3"])
    def test_cast_model_type_overrides_the_level(self, level, half):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        initialize(model, opt_level=level, cast_model_type=half, keep_batchnorm_fp32=False, cast_buffers=True)
        assert set(dtypes(model).values()) == {half, torch.int64}

    @pytest.mark.parametrize("level", LEVELS)
    def test_functions_are_patched_only_if_asked_for(self, level):
        weight = torch.ones(2, 2, requires_grad=True)
        initialize(nn.Linear(2, 2), opt_level=level)
        assert torch.mm(torch.ones(2, 2), weight).dtype is torch.float32
        amp.deinitialize()
        model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Softmax(dim=1), nn.Linear(4, 2))
        assert train(model, torch.ones(2, 2), opt_level=level, patch_torch_functions=True).isfinite().all()
        assert torch.mm(torch.ones(2, 2), weight).dtype is torch.bfloat16

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_second_model_joins_the_session(self, level):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        initialize(first, opt_level=level)
        initialize(second, opt_level=level)
        initialize(first, opt_level=level)
        assert dtypes(first) == dtypes(second) == {"weight": torch.bfloat16, "bias": torch.bfloat16}
        assert len(first._forward_hooks) == len(second._forward_hooks)

    def test_frozen_weights_come_back_rounded_to_half(self, half):
        model = nn.Linear(3, 3).requires_grad_(False)
        weight = model.weight.detach().clone()
        initialize(model, half_dtype=half)
        amp.deinitialize()
        assert_same_bits(model.weight.detach(), weight.to(half).float())

    def test_an_initialize_that_fails_gives_the_float32_bits_back(self):
        model = nn.Linear(3, 3)
        model.register_buffer("offset", torch.tensor([0.1]))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.weight.grad])
        with pytest.raises(OptionError, match="cannot be replaced"):
            initialize(model, [optimizer, Slotted(model.parameters())], opt_level="O3")
        assert_same_state([model.state_dict(), optimizer.state_dict(), model.weight.grad], before)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm1d-of-sequences": (lambda: nn.BatchNorm1d(3), (4, 3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (4, 3, 2, 2, 2)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (4, 3, 2, 2)),
    "BatchNorm2d-without-statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
    "BatchNorm2d-without-weights": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 2, 2)),
    **{
        f"InstanceNorm{n}d": (lambda n=n: getattr(nn, f"InstanceNorm{n}d")(3, True, track_running_stats=True), shape)
        for n, shape in [(1, (4, 3, 5)), (2, (4, 3, 2, 2)), (3, (4, 3, 2, 2, 2))]
    },
}


class TestBatchNorm:
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS)
    def test_batch_norm_stays_float32_and_takes_and_gives_half(self, make, shape, training, half):
        model = nn.Sequential(make(), nn.Conv1d(3, 3, 1) if len(shape) == 3 else nn.Identity()).train(training)
        seen: list[torch.dtype] = []
        model[0].register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
        initialize(model, half_dtype=half)
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        output = model(inputs.to(half))
        assert seen == [half, half]
        assert output.dtype is torch.float32
        assert {dtype for name, dtype in dtypes(model[0]).items() if "batches" not in name} <= {torch.float32}
        if not isinstance(model[1], nn.Identity):
            return
        expected = copy.deepcopy(model[0])(inputs.to(half).float())
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)

    def test_instance_norm_without_statistics_is_half(self):
        model = nn.InstanceNorm2d(3, affine=True)
        initialize(model)
        assert model.weight.dtype is torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.tail = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.norm, *self.tail):
            x = layer(x)
            self.seen.append(x.dtype)
        return x


class TestKeepFloat32:
    @pytest.mark.parametrize(
        ("keep", "kept"),
        [
            ("norm", ["norm"]),
            (["norm"], ["norm"]),
            (("norm", "first"), ["first", "norm"]),
            ("n*", ["norm"]),
            ("tail.*", ["tail.0", "tail.1"]),
            ("tail", ["tail.0", "tail.1"]),
            ("tail.1", ["tail.1"]),
            (nn.LayerNorm, ["norm"]),
            ("LayerNorm", ["norm"]),
            ([nn.Linear, "norm"], ["first", "norm", "tail.0", "tail.1"]),
            ("*", ["first", "norm", "tail.0", "tail.1"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("level", LEVELS)
    def test_keep_fp32_takes_names_patterns_and_classes(self, level, keep, kept):
        model = Block()
        initialize(model, opt_level=level, keep_fp32=keep)
        found = {name.rpartition(".")[0] for name, dtype in dtypes(model).items() if dtype is torch.float32}
        assert sorted(found) == kept

    @pytest.mark.parametrize("keep", ["norm", "tail", "tail.1", nn.Linear, "*"], ids=str)
    def test_kept_modules_compute_in_float32_and_give_half(self, keep, half):
        model, computed = Block(), []
        for module in (model.first, model.norm, *model.tail):
            module.register_forward_hook(lambda module, args, _: computed.append((module.weight.dtype, args[0].dtype)))
        output = train(model, torch.ones(2, 4), half_dtype=half, keep_fp32=keep)
        assert all(weight is given for weight, given in computed[1:4])  # the first one gets the model's input
        assert {weight for weight, _ in computed} >= {torch.float32}
        assert set(model.seen) == {half}
        assert output.dtype is torch.float32

    def test_a_second_model_need_not_have_the_modules_to_keep(self):
        model = Block()
        initialize(model, keep_fp32="norm")
        other = nn.Sequential(nn.Linear(2, 2))
        initialize(other, keep_fp32="norm")
        assert other[0].weight.dtype is torch.bfloat16

    def test_shared_weights_are_kept_if_all_their_modules_are(self):
        model = Block()
        model.tail[1].weight = model.first.weight
        initialize(model, keep_fp32=["first", "tail.1"])
        assert model.tail[1].weight is model.first.weight
        assert model.first.weight.dtype is torch.float32


class TestTensors:
    def test_shared_parameters_and_buffers_stay_shared(self, half):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        table = torch.ones(2)
        model[0].register_buffer("table", table)
        model[1].register_buffer("table", table)
        initialize(model, half_dtype=half, cast_buffers=True)
        assert model[0].weight is model[1].weight
        assert model[0].table is model[1].table
        assert model[0].weight.dtype is model[0].table.dtype is half
        amp.deinitialize()
        assert model[0].weight is model[1].weight
        assert model[0].weight.dtype is torch.float32

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64], ids=dtype_name)
    def test_buffers_of_other_types_keep_their_type(self, dtype):
        model = nn.Linear(2, 2)
        model.register_buffer("other", torch.ones(2, dtype=dtype))
        initialize(model)
        assert model.other.dtype is dtype

    @pytest.mark.parametrize("level", LEVELS)
    def test_what_came_half_is_saved_and_given_back_half(self, level, half):
        model = nn.Linear(4, 4)
        model.register_buffer("kept", torch.ones(2, dtype=half))
        model.register_buffer("replaced", torch.ones(2, dtype=half))
        model.frozen = nn.Parameter(torch.ones(2, dtype=half), requires_grad=False)
        names = ("kept", "replaced", "frozen")
        initialize(model, opt_level=level)
        model.replaced = model.replaced * 2
        model.register_buffer("late", torch.ones(2, dtype=half))
        for twin in (model.state_dict(), dtypes(copy.deepcopy(model)), dtypes(model)):
            assert {getattr(twin[name], "dtype", twin[name]) for name in names} == {half}
        assert model.state_dict()["late"].dtype is torch.float32
        amp.deinitialize()
        assert [dtypes(model)[name] for name in (*names, "late")] == [*[half] * 3, torch.float32]

    def test_gradients_and_state_without_masters_are_half_and_come_back(self, half):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        grad = model.weight.grad.clone()
        initialize(model, optimizer, opt_level="O3", half_dtype=half)
        assert_same_bits(model.weight.grad, grad.to(half))
        assert [state["exp_avg"].dtype for state in optimizer.state.values()] == [half] * 2
        assert [state["step"].dtype for state in optimizer.state.values()] == [torch.float32] * 2
        backward(model(torch.ones(1, 2)).sum(), optimizer)
        optimizer.step()
        amp.deinitialize()
        assert [state["exp_avg"].dtype for state in optimizer.state.values()] == [torch.float32] * 2

    def test_hooks_on_parameters_fire_after_conversion(self):
        model = nn.Linear(2, 2)
        fired = []
        model.weight.register_hook(lambda grad: fired.append(grad.dtype))
        model.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
        initialize(model)
        model(torch.ones(1, 2)).sum().backward()
        assert fired == [torch.bfloat16, "accumulated"]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def with_symmetric_weight() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "custom": with_symmetric_weight,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old-spectral_norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "old-weight_norm": lambda: weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", PARAMETRIZED.values(), ids=PARAMETRIZED)
class TestParametrizedModule:
    def test_a_parametrized_module_trains_and_comes_back(self, make, half):
        torch.manual_seed(0)
        model = nn.Sequential(make(), nn.Linear(4, 2))
        names = list(model.state_dict())
        parameters = [name for name, _ in model.named_parameters()]
        assert train(model, torch.randn(3, 4), half_dtype=half).isfinite().all()
        assert {dtypes(model)[name] for name in parameters} == {half}
        saved = model.state_dict()
        assert list(saved) == names
        assert {value.dtype for value in saved.values()} == {torch.float32}
        amp.deinitialize()
        assert {dtypes(model)[name] for name in parameters} == {torch.float32}
        assert_same_state(model.state_dict(), saved)
        model(torch.randn(3, 4))


class Pair(NamedTuple):
    scores: Tensor
    labels: Tensor


@dataclass
class Batch:
    image: Tensor
    index: Tensor
    name: str = "batch"


class Echo(nn.Module):
    """Hands back what it was given, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return args[0] if args else kwargs


class TestCastsAroundForward:
    @pytest.mark.parametrize("level", LEVELS)
    def test_inputs_reach_the_forward_as_given_and_come_back_so(self, level):
        model = Echo()
        initialize(model, opt_level=level)
        batch = Batch(torch.ones(2), torch.arange(2))
        nested = {"pair": Pair(torch.ones(2).bfloat16(), torch.arange(2)), "list": [torch.ones(1), "text", None, 3.5]}
        result = model(nested, batch, mask=torch.ones(2, dtype=torch.float64))
        assert model.args[0] is nested
        assert model.args[1] is batch
        assert model.kwargs["mask"].dtype is torch.float64
        assert type(result["pair"]) is Pair
        # What the caller has given is as it was, in the result too.
        assert result["pair"].scores is nested["pair"].scores

    @pytest.mark.parametrize("output", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=dtype_name)
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    def test_cast_model_outputs_sets_the_output_type_at_every_level(self, level, output):
        model = nn.Linear(2, 2)
        initialize(model, opt_level=level, half_dtype=torch.float16, cast_model_outputs=output)
        assert model(torch.ones(1, 2)).dtype is output

    def test_gradients_flow_through_casts_of_inputs_and_outputs(self, half):
        model = nn.Linear(2, 2)
        initialize(model, half_dtype=half)
        inputs = torch.ones(1, 2, requires_grad=True)
        model(inputs).sum().backward()
        assert inputs.grad.dtype is torch.float32
        assert model.weight.grad.dtype is half


class ByOperator(nn.Linear):
    """Multiplies by an operator of torch, for which amp casts nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.mm(torch.ones(2, 4), self.weight)


class MakesItsOwn(nn.Module):
    """Makes a tensor in float32, and has a layer multiply it by its half weight; or does something else."""

    def __init__(self, fault: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(ByOperator(4, 4), nn.Linear(4, 4))
        self.fault = fault or self.body.forward

    def forward(self, x: Tensor) -> object:
        return self.fault(x.to(self.body[0].weight.dtype))


class TestErrorsOfTypes:
    def notes(self, half: torch.dtype, fault: Callable[[Tensor], object] | None = None, text: str = ".") -> list[str]:
        """Returns the notes on the error that a forward raises."""
        model = MakesItsOwn(fault)
        initialize(model, half_dtype=half)
        with pytest.raises((RuntimeError, ValueError, IndexError), match=text) as found:
            model(torch.ones(2, 4))
        return getattr(found.value, "__notes__", [])

    def test_an_error_of_types_says_what_amp_made_half_and_what_to_type(self, half):
        (note,) = self.notes(half)
        assert note.startswith(f"ampatch: amp.initialize has made this MakesItsOwn's weights {half}")
        assert "keep_fp32=['body.0']" in note
        assert "patch_torch_functions=True" in note

    def test_an_error_of_the_model_itself_names_no_submodule(self):
        (note,) = self.notes(torch.float16, lambda x: torch.ops.aten.mm(x, torch.ones(4, 4)))
        assert "type amp.initialize(..., patch_torch_functions=True), or opt_level='O1', which leaves weights" in note
        assert "keep_fp32" not in note

    @pytest.mark.parametrize(
        ("fault", "text"),
        [
            (
                lambda x: torch.ops.aten.native_layer_norm(x.float(), (4,), x[0], None, 1e-5),
                "mixed dtype .CPU.: expect parameter .* of Float\n",
            ),
            (
                lambda x: torch.ops.aten.scatter_add(x, 0, torch.zeros(2, 4).long(), x.float()),
                "self.dtype to be equal to src.dtype\n",
            ),
        ],
        ids=["float32 only", "no type"],
    )
    def test_an_error_that_names_not_both_types_has_the_note(self, half, fault, text):
        (note,) = self.notes(half, fault, text)
        assert "or in functions that it does not know. Cast there by hand: x.to(weight.dtype)." in note

    @pytest.mark.parametrize(
        ("fault", "text"),
        [
            (lambda x: torch.histogram(x, 3), "not implemented for '(Half|BFloat16)'"),
            (lambda x: torch.linalg.norm(x, "nuc"), "Low precision dtypes not supported"),
        ],
        ids=["not implemented", "not supported"],
    )
    def test_an_error_of_a_missing_kernel_says_so(self, half, fault, text):
        (note,) = self.notes(half, fault, text)
        assert f"weights {half}, and torch has no kernel for these arguments in that type. Type" in note
        assert "patch_torch_functions=True if the function is in the blacklist" in note
        assert "needs_float32 in a file for cast_lists=" in note

    @pytest.mark.parametrize(
        "fault",
        [lambda x: x.view(3, 3), lambda x: torch.ones(2)[x.long() + 7], lambda x: int("x"), lambda x: x.long().mean()],
    )
    def test_errors_of_other_kinds_have_no_note(self, fault):
        assert self.notes(torch.float16, fault) == []

    def test_an_error_that_amp_itself_raised_has_no_note(self):
        model = MakesItsOwn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, optimizer, half_dtype=torch.float16)
        master = next(amp.master_params(optimizer))
        with torch.no_grad():
            model.body[0].weight.fill_(1.0)
            master.fill_(2.0)
        with pytest.raises(amp.UsageError, match="were both written to") as found:
            model(torch.ones(2, 4))
        assert not hasattr(found.value, "__notes__")

    def test_an_error_that_is_handled_around_a_forward_has_no_note(self):
        model = MakesItsOwn(lambda x: None)
        initialize(model, half_dtype=torch.float16)
        error = RuntimeError("some other failure")
        try:
            raise error
        except RuntimeError:
            model(torch.ones(2, 4))
        assert not hasattr(error, "__notes__")

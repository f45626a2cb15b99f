"""Of parameters that user code replaces in a model at O2: they count as in plain torch, or the user is told.

Each way of replacing one runs at O0 and at O2. Both end with the same weights, but for rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from optimizers import backward
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from ampatch import amp
from ampatch.errors import AmpWarning

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
GENERATOR = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 2, generator=GENERATOR)

pytestmark = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


class Run:
    """A model with its optimizer, in training.

    Args:
        level: opt level.
        half: half type.
    """

    def __init__(self, level: str, half: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.options = {"opt_level": level, "half_dtype": half, "loss_scale": 128.0, "verbosity": 0}
        amp.initialize(self.model, self.optimizer, **self.options)

    @property
    def norm(self) -> Any:
        return self.model[1]

    def train(self, steps: int = 1, *others: Any) -> None:
        optimizers = [self.optimizer, *others]
        for _ in range(steps):
            loss = nn.functional.mse_loss(self.model(INPUTS).float()[:, :2], TARGETS)
            backward(loss, optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(INPUTS)

    def add(self, *parameters: nn.Parameter, **options: Any) -> None:
        self.optimizer.add_param_group({"params": list(parameters), **options})

    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach().float().clone() for name, each in self.model.state_dict().items()}


def new(value: float = 0.0, **options: Any) -> nn.Parameter:
    """Returns a parameter for the norm: of zeros as its bias was, or of ones as its weight was."""
    return nn.Parameter(torch.full((4,), value), **options)


class Changes(Run):
    """Ways to replace parameters, by name."""

    def reset_and_add(self) -> None:
        self.norm.bias = new()
        self.add(self.norm.bias)

    def share_memory_for_a_while(self) -> None:
        old = self.model[0].weight
        self.model[0].weight = nn.Parameter(old.detach())
        self.add(self.model[0].weight)
        self.evaluate()
        self.model[0].weight = old

    def add_and_reset(self) -> None:
        bias = new()
        self.add(bias)
        self.norm.bias = bias

    def reset_ones_with_another_rate(self) -> None:
        self.norm.weight = new(1.0)
        self.add(self.norm.weight, lr=0.01)

    def reset_later(self) -> None:
        self.train(2)
        self.model[0].bias = new(0.5)
        self.add(self.model[0].bias)

    def register_and_add(self) -> None:
        self.norm.register_parameter("bias", new())
        self.add(self.norm.bias)

    def reset_twice(self) -> None:
        self.norm.bias = new(1.0)
        self.norm.bias = new()
        self.add(self.norm.bias)

    def reset_evaluate_and_add(self) -> None:
        bias = new()
        self.norm.bias = bias
        self.evaluate()
        self.add(bias)

    def reset_save_and_add(self) -> None:
        bias = new()
        self.norm.bias = bias
        self.model.state_dict()
        self.add(bias)

    def reset_load_and_add(self) -> None:
        self.norm.bias = new(1.0)
        self.model.load_state_dict({name: each / 2 for name, each in self.model.state_dict().items()})
        self.add(self.norm.bias)

    def load_reset_and_add(self) -> None:
        self.model.load_state_dict({name: each / 2 for name, each in self.model.state_dict().items()})
        self.reset_and_add()

    def reset_in_a_group_made_anew(self) -> None:
        self.norm.bias = new()
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())

    def reset_for_another_optimizer(self) -> None:
        self.norm.bias = new()
        other = torch.optim.SGD([self.norm.bias], lr=0.05)
        amp.initialize(self.model, other, **self.options)
        self.train(3, other)

    def another_shape(self) -> None:
        self.model[2].weight, self.model[2].bias = nn.Parameter(torch.ones(3, 4) / 8), nn.Parameter(torch.zeros(3))
        self.add(*self.model[2].parameters())

    def freeze_by_replacing(self) -> None:
        self.train()
        self.model[0].weight = nn.Parameter(self.model[0].weight.detach().float(), requires_grad=False)

    def freeze_and_unfreeze(self) -> None:
        self.norm.bias = new(requires_grad=False)
        self.train()
        self.norm.bias.requires_grad_()  # no optimizer has it

    def freeze_in_place_and_unfreeze(self) -> None:
        self.norm.bias.requires_grad_(False)
        self.train()
        self.norm.bias.requires_grad_()

    def copy_in_the_same_type(self) -> None:
        self.train()
        self.model[0].weight = nn.Parameter(self.model[0].weight.detach().clone())

    def alias(self) -> None:
        self.train()
        self.model[0].weight = nn.Parameter(self.model[0].weight.detach())
        self.add(self.model[0].weight)

    def tie(self) -> None:
        self.train()
        self.model[0].bias = self.norm.bias

    def untie(self) -> None:
        self.tie()
        self.train()
        self.model[0].bias = nn.Parameter(self.norm.bias.detach().float().clone())
        self.add(self.model[0].bias)

    def untie_and_freeze(self) -> None:
        self.tie()
        self.train()
        self.model[0].bias = nn.Parameter(self.norm.bias.detach().float().clone(), requires_grad=False)

    def untie_and_forget(self) -> None:
        self.tie()
        self.train()
        self.model[0].bias = nn.Parameter(self.norm.bias.detach().float().clone())

    def another_shape_and_forget(self) -> None:
        self.model[2].bias = nn.Parameter(torch.zeros(1))

    def added_one_under_another_name(self) -> None:
        self.norm.shift = nn.Parameter(torch.zeros_like(self.norm.bias))
        self.norm.register_forward_hook(
            lambda norm, _, result: result + sum(each for _, each in norm.named_parameters())
        )
        self.add(self.norm.shift)
        self.train(2)
        shift = self.norm.shift
        del self.norm.shift
        self.norm.other = nn.Parameter(shift.detach())
        self.add(self.norm.other)

    def delete(self) -> None:
        self.train()
        self.norm.bias = None

    def weight_norm(self) -> None:
        self.train()
        parametrizations.weight_norm(self.model[0])
        self.add(*self.model[0].parametrizations.weight.parameters())

    def weight_norm_before_the_first_step(self) -> None:
        parametrizations.weight_norm(self.model[0])
        self.add(*self.model[0].parametrizations.weight.parameters())

    def spectral_norm(self) -> None:
        self.train()
        parametrizations.spectral_norm(self.model[0])

    def pruned_for_a_while(self) -> None:
        self.train()
        prune.l1_unstructured(self.model[0], "weight", 4)
        self.train()
        prune.remove(self.model[0], "weight")

    def emptied(self) -> None:
        self.train()
        saved = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.model.to_empty(device="cpu")
        self.model.load_state_dict(saved)


def result(level: str, half: torch.dtype, change: Callable[[Changes], object]) -> dict[str, Tensor]:
    run = Changes(level, half)
    change(run)
    run.train(4)
    amp.deinitialize()
    return run.weights()


WAYS = [name for name in vars(Changes) if not name.startswith("_")]


@pytest.mark.parametrize("change", WAYS)
def test_replaced_parameters_are_trained_as_in_torch(change: str, half: torch.dtype) -> None:
    expected, actual = (result(level, half, getattr(Changes, change)) for level in ("O0", "O2"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[half])


def test_a_new_parameter_of_an_optimizer_without_amp_stays_with_a_warning(half: torch.dtype) -> None:
    run = Run("O2", half)
    run.norm.bias = new()
    mine, other = run.norm.bias, torch.optim.SGD([run.norm.bias], lr=0.1)
    run.train()
    backward(run.model(INPUTS).sum(), run.optimizer)
    with pytest.warns(AmpWarning, match="was never handed to amp.initialize"):
        other.step()
    assert run.norm.bias is mine
    assert mine.any()


@pytest.mark.parametrize("is_added", [True, False])
def test_the_master_of_a_new_parameter_has_all_its_bits(is_added: bool, half: torch.dtype) -> None:
    run = Run("O2", half)
    run.norm.bias = new(0.3)
    if is_added:
        run.add(run.norm.bias)
    run.evaluate()
    assert torch.equal(run.weights()["1.bias"], new(0.3))


def test_a_new_parameter_that_is_added_late_has_the_trained_values(half: torch.dtype) -> None:
    run = Run("O2", half)
    bias = run.norm.bias = new()
    with pytest.warns(AmpWarning, match="user code replaced half weights"):
        run.train()
    before = run.weights()
    run.add(bias)
    run.evaluate()
    assert run.norm.bias is bias
    assert_same_state(run.weights(), before)


def widened(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().float())


class TestWidened:
    """Libraries replace half parameters by float32 ones, and tell no optimizer: without amp they would not."""

    def test_widened_weights_have_the_masters_bits_with_a_warning(self, half: torch.dtype) -> None:
        run = Run("O2", half)
        run.train(2)
        before, saved = dict(run.model.named_parameters()), copy.deepcopy(run.model.state_dict())
        for module in run.model:
            for name, each in list(module.named_parameters()):
                setattr(module, name, widened(each))
        assert_same_state(run.model.state_dict(), saved)
        with pytest.warns(AmpWarning, match=r"0\.weight and 5 more: user code replaced half weights"):
            run.train()
        assert all(each is before[name] for name, each in run.model.named_parameters())
        other = run.weights()
        amp.deinitialize()
        run = Run("O2", half)
        run.train(3)
        assert_same_state(run.weights(), other)

    @pytest.mark.parametrize("value", [0.0, 0.5])  # it was zeros
    def test_a_reset_parameter_is_trained_from_its_values_with_a_warning(self, value: float, half: torch.dtype) -> None:
        def reset(run: Run) -> None:
            if run.options["opt_level"] == "O2":
                run.norm.bias = new(value)
            else:
                run.norm.bias.data.fill_(value)

        expected = result("O0", half, reset)
        with pytest.warns(AmpWarning, match=r"1\.bias: user code replaced half weights"):
            actual = result("O2", half, reset)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[half])

    def test_widened_weights_that_are_not_trained_do_not_warn(self, half: torch.dtype) -> None:
        run = Run("O2", half)
        run.train()
        saved = run.weights()
        run.norm.weight = widened(run.norm.weight)
        run.evaluate()
        assert run.norm.weight.dtype is half
        assert_same_state(run.weights(), saved)
        run.norm.weight = widened(run.norm.weight)
        amp.deinitialize()
        assert_same_state(run.weights(), saved)
        assert run.norm.weight is run.optimizer.param_groups[0]["params"][2]

    def test_widened_tied_weights_stay_tied(self, half: torch.dtype) -> None:
        run = Changes("O2", half)
        run.tie()
        tied = run.norm.bias
        run.norm.bias, run.model[0].bias = widened(tied), widened(tied)
        with pytest.warns(AmpWarning, match="user code replaced half weights"):
            run.train()
        assert run.norm.bias is run.model[0].bias is tied

    def test_a_recurrent_layer_computes_with_its_widened_weights(self, half: torch.dtype) -> None:
        model = nn.GRU(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=1.0, verbosity=0)
        model.weight_hh_l0 = widened(model.weight_hh_l0)
        model(torch.ones(1, 1, 2))
        assert model.weight_hh_l0 is model._flat_weights[1]
        assert model.weight_hh_l0.dtype is half

    def test_a_step_finds_weights_put_into_the_modules_dict(self, half: torch.dtype) -> None:
        class Widening(nn.Module):
            """Computes in the type of its weight, as PEFT's adapters do."""

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, inputs: Tensor) -> Tensor:
                return inputs.to(self.weight.dtype) * self.weight

        model = Widening()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=1.0, verbosity=0)
        before = model.weight
        model._parameters["weight"] = widened(before)
        backward(model(torch.ones(4)).sum(), optimizer)
        with pytest.warns(AmpWarning, match="weight: user code replaced half weights"):
            optimizer.step()
        assert model.weight is before

    def test_parameters_of_a_functional_call_are_left_alone(self, half: torch.dtype) -> None:
        run = Run("O2", half)
        zeros = {name: nn.Parameter(torch.zeros_like(each)) for name, each in run.model.named_parameters()}
        before = dict(run.model.named_parameters())
        run.norm.bias = new(1.0)
        run.add(run.norm.bias)
        outputs = torch.func.functional_call(run.model, zeros, (INPUTS,))
        assert not outputs.any()
        run.evaluate()
        assert run.norm.bias.dtype is half
        run.train()
        assert [name for name, each in run.model.named_parameters() if each is not before[name]] == ["1.bias"]


def test_torchs_swap_tensors_raises(half: torch.dtype) -> None:
    run = Run("O2", half)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(run.norm.bias, new())

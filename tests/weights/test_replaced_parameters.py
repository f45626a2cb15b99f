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
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError

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
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
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


def result(level: str, half: torch.dtype, change: Callable[[Run], object]) -> dict[str, Tensor]:
    run = Run(level, half)
    try:
        change(run)
        run.train(4)
        return run.weights()
    finally:
        amp.deinitialize()


def new(value: float = 0.0, **options: Any) -> nn.Parameter:
    """Returns a parameter for the norm: of zeros as its bias was, or of ones as its weight was."""
    return nn.Parameter(torch.full((4,), value), **options)


def reset_and_add(run: Run) -> None:
    run.norm.bias = new()
    run.add(run.norm.bias)


def add_and_reset(run: Run) -> None:
    bias = new()
    run.add(bias)
    run.norm.bias = bias


def reset_ones_with_another_rate(run: Run) -> None:
    run.norm.weight = new(1.0)
    run.add(run.norm.weight, lr=0.01)


def reset_later(run: Run) -> None:
    run.train(2)
    run.model[0].bias = new(0.5)
    run.add(run.model[0].bias)


def register_and_add(run: Run) -> None:
    run.norm.register_parameter("bias", new())
    run.add(run.norm.bias)


def reset_twice(run: Run) -> None:
    run.norm.bias = new(1.0)
    run.norm.bias = new()
    run.add(run.norm.bias)


def reset_evaluate_and_add(run: Run) -> None:
    bias = new()
    run.norm.bias = bias
    run.evaluate()
    run.add(bias)


def reset_save_and_add(run: Run) -> None:
    bias = new()
    run.norm.bias = bias
    run.model.state_dict()
    run.add(bias)


def reset_load_and_add(run: Run) -> None:
    run.norm.bias = new(1.0)
    run.model.load_state_dict({name: each / 2 for name, each in run.model.state_dict().items()})
    run.add(run.norm.bias)


def load_reset_and_add(run: Run) -> None:
    run.model.load_state_dict({name: each / 2 for name, each in run.model.state_dict().items()})
    reset_and_add(run)


def reset_in_a_group_made_anew(run: Run) -> None:
    run.norm.bias = new()
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())


def reset_for_another_optimizer(run: Run) -> None:
    run.norm.bias = new()
    other = torch.optim.SGD([run.norm.bias], lr=0.05)
    amp.initialize(run.model, other, **run.options)
    run.train(3, other)


def another_shape(run: Run) -> None:
    run.model[2].weight, run.model[2].bias = nn.Parameter(torch.ones(3, 4) / 8), nn.Parameter(torch.zeros(3))
    run.add(*run.model[2].parameters())


def freeze_by_replacing(run: Run) -> None:
    run.train()
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().float(), requires_grad=False)


def freeze_and_unfreeze(run: Run) -> None:
    run.norm.bias = new(requires_grad=False)
    run.train()
    run.norm.bias.requires_grad_()  # no optimizer has it


def freeze_in_place_and_unfreeze(run: Run) -> None:
    run.norm.bias.requires_grad_(False)
    run.train()
    run.norm.bias.requires_grad_()


def copy_in_the_same_type(run: Run) -> None:
    run.train()
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())


def alias(run: Run) -> None:
    run.train()
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach())
    run.add(run.model[0].weight)


def tie(run: Run) -> None:
    run.train()
    run.model[0].bias = run.norm.bias


def untie(run: Run) -> None:
    tie(run)
    run.train()
    run.model[0].bias = nn.Parameter(run.norm.bias.detach().float().clone())
    run.add(run.model[0].bias)


def untie_and_freeze(run: Run) -> None:
    tie(run)
    run.train()
    run.model[0].bias = nn.Parameter(run.norm.bias.detach().float().clone(), requires_grad=False)


def untie_and_forget(run: Run) -> None:
    tie(run)
    run.train()
    run.model[0].bias = nn.Parameter(run.norm.bias.detach().float().clone())


def another_shape_and_forget(run: Run) -> None:
    run.model[2].bias = nn.Parameter(torch.zeros(1))


def added_one_under_another_name(run: Run) -> None:
    run.norm.shift = nn.Parameter(torch.zeros_like(run.norm.bias))
    run.norm.register_forward_hook(lambda norm, _, result: result + sum(each for _, each in norm.named_parameters()))
    run.add(run.norm.shift)
    run.train(2)
    shift = run.norm.shift
    del run.norm.shift
    run.norm.other = nn.Parameter(shift.detach())
    run.add(run.norm.other)


def delete(run: Run) -> None:
    run.train()
    run.norm.bias = None


def weight_norm(run: Run) -> None:
    run.train()
    parametrizations.weight_norm(run.model[0])
    run.add(*run.model[0].parametrizations.weight.parameters())


def weight_norm_before_the_first_step(run: Run) -> None:
    parametrizations.weight_norm(run.model[0])
    run.add(*run.model[0].parametrizations.weight.parameters())


def spectral_norm(run: Run) -> None:
    run.train()
    parametrizations.spectral_norm(run.model[0])


def pruned_for_a_while(run: Run) -> None:
    run.train()
    prune.l1_unstructured(run.model[0], "weight", 4)
    run.train()
    prune.remove(run.model[0], "weight")


def emptied(run: Run) -> None:
    run.train()
    saved = {name: each.clone() for name, each in run.model.state_dict().items()}
    run.model.to_empty(device="cpu")
    run.model.load_state_dict(saved)


WAYS = [
    reset_and_add,
    add_and_reset,
    reset_ones_with_another_rate,
    reset_later,
    register_and_add,
    reset_twice,
    reset_evaluate_and_add,
    reset_save_and_add,
    reset_load_and_add,
    load_reset_and_add,
    reset_in_a_group_made_anew,
    reset_for_another_optimizer,
    another_shape,
    freeze_by_replacing,
    freeze_and_unfreeze,
    freeze_in_place_and_unfreeze,
    copy_in_the_same_type,
    alias,
    tie,
    untie,
    untie_and_freeze,
    untie_and_forget,
    another_shape_and_forget,
    added_one_under_another_name,
    delete,
    weight_norm,
    weight_norm_before_the_first_step,
    spectral_norm,
    pruned_for_a_while,
    emptied,
]


@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_is_trained_as_in_torch(change: Callable[[Run], object], half: torch.dtype) -> None:
    expected = result("O0", half, change)
    actual = result("O2", half, change)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[half])


def test_one_for_an_optimizer_that_amp_does_not_have_stays_and_is_told_of(half: torch.dtype) -> None:
    run = Run("O2", half)
    run.norm.bias = new()
    mine, other = run.norm.bias, torch.optim.SGD([run.norm.bias], lr=0.1)
    run.train()
    with amp.scale_loss(run.model(INPUTS).sum(), run.optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(AmpWarning, match="was never handed to amp.initialize"):
        other.step()
    assert run.norm.bias is mine
    assert mine.any()


@pytest.mark.parametrize("is_added", [True, False])
def test_all_bits_of_its_values_are_the_masters(is_added: bool, half: torch.dtype) -> None:
    run = Run("O2", half)
    run.norm.bias = new(0.3)
    if is_added:
        run.add(run.norm.bias)
    run.evaluate()
    assert torch.equal(run.weights()["1.bias"], new(0.3))


def test_one_that_is_added_late_goes_on_with_the_values_that_were_trained(half: torch.dtype) -> None:
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

    def test_weights_go_on_with_the_masters_bits_and_the_user_is_told(self, half: torch.dtype) -> None:
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
    def test_or_reset_one_that_no_optimizer_has_is_trained_from_its_values(
        self, value: float, half: torch.dtype
    ) -> None:
        def reset(run: Run) -> None:
            if run.options["opt_level"] == "O2":
                run.norm.bias = new(value)
            else:
                run.norm.bias.data.fill_(value)

        expected = result("O0", half, reset)
        with pytest.warns(AmpWarning, match=r"1\.bias: user code replaced half weights"):
            actual = result("O2", half, reset)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[half])

    def test_ones_that_are_not_trained_further_are_not_told_of(self, half: torch.dtype) -> None:
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

    def test_tied_ones_stay_tied(self, half: torch.dtype) -> None:
        run = Run("O2", half)
        tie(run)
        tied = run.norm.bias
        run.norm.bias, run.model[0].bias = widened(tied), widened(tied)
        with pytest.warns(AmpWarning, match="user code replaced half weights"):
            run.train()
        assert run.norm.bias is run.model[0].bias is tied

    def test_weights_of_a_recurrent_layer_are_those_it_computes_with(self, half: torch.dtype) -> None:
        model = nn.GRU(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=1.0, verbosity=0)
        model.weight_hh_l0 = widened(model.weight_hh_l0)
        model(torch.ones(1, 1, 2))
        assert model.weight_hh_l0 is model._flat_weights[1]
        assert model.weight_hh_l0.dtype is half

    def test_ones_put_there_without_a_call_are_found_by_the_step(self, half: torch.dtype) -> None:
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
        with amp.scale_loss(model(torch.ones(4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        with pytest.warns(AmpWarning, match="weight: user code replaced half weights"):
            optimizer.step()
        assert model.weight is before

    def test_ones_in_a_functional_call_are_left_alone(self, half: torch.dtype) -> None:
        run = Run("O2", half)
        zeros = {name: nn.Parameter(torch.zeros_like(each)) for name, each in run.model.named_parameters()}
        before = dict(run.model.named_parameters())
        run.norm.bias = new(1.0)
        run.add(run.norm.bias)
        outputs = torch.func.functional_call(run.model, zeros, (INPUTS,))
        assert not outputs.any()
        run.train()
        assert [name for name, each in run.model.named_parameters() if each is not before[name]] == ["1.bias"]


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda run: run.model.load_state_dict(run.model.state_dict(), assign=True), "would replace the half param"),
        (lambda run: run.model.float() and run.train(), "became torch.float32"),
    ],
    ids=["assign", "float"],
)
def test_other_means_raise(replace: Callable[[Run], object], message: str, half: torch.dtype) -> None:
    run = Run("O2", half)
    with pytest.raises(UsageError, match=message):
        replace(run)


def test_torch_s_own_means_of_exchanging_tensors_raise(half: torch.dtype) -> None:
    run = Run("O2", half)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(run.norm.bias, new())

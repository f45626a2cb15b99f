"""`amp.what_if`: counts beside a calculation by hand, the lists that follow, and a model that must not change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import Disturbable, undisturbed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import CastListError, OptionError, UsageError

#: Its positive numbers are 1/8, 1/4, 3/8, 1/2, 3/4, 1, 3/2, 2, 3, 4, 6, 8 and 12.
E3M1 = {"name": "e3m1", "overflow": "saturate"}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def mean_square(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def linear(*weights: float) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data.copy_(torch.tensor([weights]))
    return layer


def what_if(model: nn.Module, inputs: Any, *formats: Any, loss_fn: Any = mean_square, **options: Any) -> amp.WhatIf:
    return amp.what_if(model, inputs, loss_fn, formats=formats or ["float8_e4m3"], **options)


# What is counted


def test_counts_are_those_of_a_calculation_by_hand():
    # 1.2 becomes 1, 0.01 becomes 0, 100 becomes 12, 1.5 stays; so do the weights. The result is 14.5, not 102.71.
    result = what_if(linear(1, 1, 1, 1), torch.tensor([[1.2, 0.01, 100.0, 1.5]]), E3M1, loss_fn=lambda y: y.sum())
    (row,) = result.calls
    assert (row.format, row.function, row.module, row.calls) == ("{name: e3m1, overflow: saturate}", "linear", "", 1)
    assert row.forward.values == 8
    assert (row.forward.underflow, row.forward.overflow, row.forward.imprecise) == (1 / 8, 1 / 8, 1 / 8)
    error = (102.71 - 14.5) / 102.71
    assert row.forward.noise == pytest.approx(error)
    assert (row.backward.values, row.backward.underflow) == (1, 0)
    # The gradient of the weight is the input.
    of_weight = math.dist([1.2, 0.01, 100, 1.5], [1, 0, 12, 1.5]) / math.hypot(1.2, 0.01, 100, 1.5)
    assert row.backward.noise == pytest.approx(of_weight)
    assert row.noise == pytest.approx(math.hypot(error, of_weight))
    assert result.loss == pytest.approx(102.71)


def test_a_gradient_that_underflows_is_lost():
    result = what_if(linear(1, 1), torch.ones(1, 2), "e3m1", loss_fn=lambda y: y.sum() * 0.01)
    (row,) = result.functions
    assert (row.forward.noise, row.forward.underflow) == (0, 0)
    assert (row.backward.underflow, row.backward.noise, row.noise) == (1, 1, 1)


def test_a_gradient_counts_by_the_share_of_the_numbers_that_learn_from_it():
    model = nn.Sequential(linear(1, 1, 1), linear(1))
    model[1].weight.data.fill_(1 / 8)  # of the loss's gradient of 1, an eighth comes to the first layer
    model.append(linear(1).requires_grad_(requires_grad=False))
    result = what_if(model, torch.ones(1, 3), "e3m1", loss_fn=lambda y: y.sum() / 4)
    lost = next(row for row in result.calls if row.module == "0")  # 1/32 is nothing
    assert (lost.backward.noise, result.calls[0]) == (1, lost)
    assert lost.noise == pytest.approx((3 / 4) ** (1 / 4))


def test_a_value_that_becomes_inf_is_infinite_noise():
    (row,) = what_if(linear(1), torch.full((1, 1), 100.0), "e3m1").calls
    assert row.forward.overflow == 1 / 2
    assert row.noise == math.inf


def test_with_a_scale_of_the_format_nothing_underflows():
    model = linear(1e-4, 2e-4)
    bare, scaled = {"name": "float8_e4m3", "scale": "none"}, "float8_e4m3"
    shares = {row.format: row.forward.underflow for row in what_if(model, torch.ones(1, 2), bare, scaled).calls}
    assert shares == {"{name: float8_e4m3, scale: none}": 1 / 2, "float8_e4m3": 0}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(self.attend, x, x, x, need_weights=False, use_reentrant=False)[0]
        return self.head(mixed) + (x @ x.transpose(1, 2)).sum()


def test_calls_are_told_by_function_module_and_line():
    result = what_if(Attention(), torch.randn(2, 3, 8))
    found = {(row.function, row.module) for row in result.calls}
    assert {("linear", "head"), ("matmul", ""), ("linear", "attend")} <= found
    assert ("multi_head_attention_forward", "attend") in found
    product = next(row for row in result.calls if row.function == "matmul")
    assert Path(product.file).name == Path(__file__).name
    assert product.calls == 1
    assert all(row.backward.values for row in result.calls if row.function != "matmul")
    assert {row.module for row in result.modules} == {"attend", "head"}
    whole = next(row for row in result.functions if row.function == "linear")
    assert whole.calls == sum(row.calls for row in result.calls if row.function == "linear") == 3


def test_a_function_that_the_user_whitelists_is_judged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    result = what_if(model, torch.randn(2, 4), cast_lists={"whitelist": {"*": ["softmax"]}})
    assert {row.function for row in result.functions} == {"linear", "softmax"}


class Written(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(2, 4).addmm_(x, self.weight) + F.linear(x, self.weight)


def test_a_call_that_writes_to_its_argument_is_noted():
    result = what_if(Written(4, 4), torch.randn(2, 4))
    assert [row.function for row in result.calls] == ["linear"]
    assert "addmm_ writes to a tensor" in result.notes[0]


class Slopes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        given = torch.eye(self.out_features)
        return torch.autograd.grad(super().forward(x).tanh(), x, given, is_grads_batched=True, create_graph=True)[0]


def test_gradients_of_a_batched_backward_pass_are_noted_and_not_judged():
    result = what_if(Slopes(4, 4), torch.randn(4))
    assert [row.function for row in result.calls] == ["linear"]
    assert "Gradients of linear in a batched backward pass were not judged." in result.notes


def test_a_call_with_inplace_is_noted_and_not_judged():
    model = nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True))
    result = what_if(model, torch.randn(2, 4), cast_lists={"whitelist": {"*": ["elu"]}})
    assert [row.function for row in result.calls] == ["linear"]
    assert "elu writes to a tensor" in result.notes[0]


# The lists that follow


def trains(model: nn.Module, cast_lists: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0, cast_lists=cast_lists)
    mean_square(model(torch.randn(2, 4))).backward()
    optimizer.step()
    amp.deinitialize()


def test_a_function_with_little_noise_goes_to_the_format(tmp_path):
    model, path = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), tmp_path / "casts.yaml"
    result = what_if(model, torch.randn(64, 4))
    assert result.lists("float8_e4m3") == {"whitelist": {"*": [{"name": "linear", "format": "float8_e4m3"}]}}
    result.save(path, "float8_e4m3")
    assert path.read_text(encoding="utf-8") == result.overlay("float8_e4m3")
    trains(model, path)


def test_a_function_with_much_noise_in_one_module_goes_to_the_format_in_the_others():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.data.fill_(1.0)
    model[1].weight.data.fill_(0.01)
    result = what_if(model, torch.ones(8, 4), E3M1, loss_fn=lambda y: y.sum() * 100)
    inside = {"whitelist": [{"name": "linear", "format": E3M1}]}
    assert result.lists(E3M1) == {"modules": {"0": inside}}
    assert (
        "# linear stays as it is in 1: noise 1.7, 100% of the gradients are beyond the largest number."
        in result.overlay(E3M1)
    )
    trains(model, result.lists(E3M1))


def test_where_all_calls_have_much_noise_the_lists_are_empty():
    result = what_if(linear(1, 1, 1, 1), torch.full((2, 4), 0.01), E3M1)
    assert result.lists(E3M1) == {}
    assert yaml.safe_load(result.overlay(E3M1)) is None
    assert result.lists(E3M1, bound=2.0) != {}


def test_lists_of_a_format_that_was_not_judged_are_an_error():
    result = what_if(linear(1), torch.ones(1, 1))
    with pytest.raises(OptionError, match="e3m1 was not judged; the formats judged are: float8_e4m3"):
        result.lists("e3m1")
    with pytest.raises(OptionError, match="does not end with"):
        result.save("casts.txt", "float8_e4m3")


# What it prints, and what it needs


def test_the_result_prints_as_tables_and_is_plain_data():
    result = what_if(Attention(), torch.randn(2, 3, 8), "float8_e4m3", E3M1)
    text = str(result)
    assert "Functions, most noise first" in text
    assert "{name: e3m1, overflow: saturate}" in text
    assert json.loads(json.dumps(result.to_dict()))["formats"] == list(result.formats)
    assert list(result.modules) == sorted(result.modules, key=lambda row: -row.noise)


def test_model_inputs_and_random_numbers_stay_as_they_were():
    model, inputs = Disturbable(), torch.randn(8, 4)
    mean_square(model(inputs.clone())).backward()
    stochastic = {"name": "e3m1", "rounding": "stochastic", "overflow": "saturate"}
    with undisturbed(model, inputs):
        one, two = (what_if(model, inputs, stochastic) for _ in range(2))
    assert one == two


def test_the_step_is_the_same_with_formats_that_draw_random_numbers():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    stochastic = {"name": "e3m1", "rounding": "stochastic"}
    state, inputs = torch.get_rng_state(), torch.randn(8, 4)
    loss = what_if(model, inputs, stochastic).loss
    torch.set_rng_state(state)
    torch.randn(8, 4)
    assert loss == mean_square(model(inputs)).item()


@pytest.mark.parametrize(
    ("formats", "error"),
    [
        ("float8_e4m3", "formats is 'float8_e4m3'; expected a list"),
        ([], "formats is empty"),
        (["float8_e4m4"], "in formats: found 'float8_e4m4'.*Did you mean"),
        ([{"scale": "row"}], "expected a name, or a mapping of text with a name"),
        ([{"name": "e3m1", "scale": 2}], "expected a name, or a mapping of text"),
        ([{"name": "e3m1", "scale": "rows"}], "found 'rows' for scale"),
        ([8], "found 8; expected a name"),
    ],
    ids=str,
)
def test_bad_formats_are_one_clear_error(formats, error):
    with pytest.raises(OptionError, match=error):
        amp.what_if(linear(1), torch.ones(1, 1), mean_square, formats=formats)


def test_bad_lists_are_a_clear_error():
    with pytest.raises(CastListError):
        what_if(linear(1), torch.ones(1, 1), cast_lists={"whitelst": {}})


def test_within_a_session_it_raises():
    model = linear(1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    with pytest.raises(UsageError, match=r"amp is set up already. Type amp.deinitialize\(\) first"):
        what_if(linear(1), torch.ones(1, 1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_part_is_judged_as_without_a_checkpoint(use_reentrant) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            squares = torch.matmul(x.t(), x)
            return torch.matmul(torch.tanh(x), squares)

    class Model(nn.Module):
        def __init__(self, is_checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.part = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Twice(), nn.Linear(8, 8))
            self.is_checkpointed = is_checkpointed

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.part, x, use_reentrant=use_reentrant) if self.is_checkpointed else self.part(x)

    given = torch.linspace(-1, 1, 32).view(4, 8)
    plain, found = (
        {
            (row.module, row.line): (row.calls, row.forward, row.backward)
            for row in amp.what_if(Model(each), given, lambda out: out.square().mean(), formats=["e3m4"]).calls
        }
        for each in (False, True)
    )
    assert found == plain


def test_statistics_of_the_model_stay_and_lists_that_follow_update_them() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    given = torch.linspace(-3, 3, 160).view(20, 8).sin()
    lists = {"whitelist": {"*": ["batch_norm"]}}
    result = amp.what_if(model, given, lambda out: out.square().mean(), formats=["e5m7"], cast_lists=lists)
    assert model[1].running_mean.eq(0).all()
    assert "batch_norm" in {row.function for row in result.functions}
    amp.initialize(model, opt_level="O4", cast_lists=result.lists("e5m7"), verbosity=0)
    model(given)
    assert not model[1].running_mean.eq(0).all()


def test_functions_that_no_device_multiplies_are_left_out_of_lists_for_devices() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
    row = {"name": "float8_e4m3", "products": "device"}
    result = amp.what_if(model, torch.randn(4, 8, 32), lambda out: out.square().mean(), formats=[row])
    assert "multi_head_attention_forward stays as it is: no device multiplies in it" in result.overlay(row, bound=1)
    amp.initialize(model, opt_level="O4", cast_lists=result.lists(row, bound=1), verbosity=0)


@pytest.mark.parametrize("bound", ["x", -1, float("nan"), True])
def test_a_bound_that_is_no_number_is_told(bound) -> None:
    result = amp.what_if(nn.Linear(8, 8), torch.randn(4, 8), lambda out: out.sum(), formats=["e3m4"])
    with pytest.raises(OptionError, match="expected a number of at least 0"):
        result.overlay("e3m4", bound)

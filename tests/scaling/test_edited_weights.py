"""Whatever users do to weights counts as it does in plain torch, by whatever means, at whatever moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edits import (
    REBUILDS,
    START,
    UNSEEN,
    WEIGHT_EDITS,
    Parameters,
    Run,
    Weights,
    assert_as_in_torch,
    double,
    each,
    every_level,
)
from helpers import assert_same_state
from optimizers import backward
from stepping import every_half
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampatch import amp
from ampatch.amp import UsageError

ALL_EDITS = {**WEIGHT_EDITS, **UNSEEN}


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


@every_level
@pytest.mark.covering(1)
class TestWeightsOfTheModel:
    @pytest.mark.parametrize("name", ALL_EDITS)
    @pytest.mark.parametrize("moment", ["at first", "after a step", "before a step", "before both"])
    def test_edit_of_weights_counts_as_in_torch(self, name, moment, opt_level, half_dtype):
        edit = ALL_EDITS[name]

        def script(run: Run) -> None:
            if moment == "at first":
                edit(run.parameters)
            for _ in range(2):
                run.optimizer.zero_grad()
                run.backward()
                if moment in ("before a step", "before both"):
                    edit(run.parameters)
                run.optimizer.step()
                if moment in ("after a step", "before both"):
                    edit(run.parameters)
            run.backward()

        assert_as_in_torch(opt_level, half_dtype, script)

    @pytest.mark.parametrize("name", WEIGHT_EDITS)
    def test_edit_of_weights_counts_in_the_next_forward_pass(self, name, opt_level, half_dtype):
        def script(run: Run) -> list[list[float]]:
            outputs = [run.model(torch.eye(2))]
            WEIGHT_EDITS[name](run.parameters)
            outputs.append(run.model(torch.eye(2)))
            with torch.no_grad():
                outputs.append(run.model(torch.eye(2)))
            return torch.cat(outputs).tolist()

        layer = torch.tensor(START).view(2, 2)
        assert_as_in_torch(opt_level, half_dtype, script, model=lambda: linear(layer.clone()), loss_scale=1)

    def test_loop_that_updates_weights_by_hand_learns_as_in_torch(self, opt_level, half_dtype):
        def script(run: Run) -> list[float]:
            losses = []
            for _ in range(4):
                loss = run.model(torch.ones(1, 2)).float().square().sum()
                loss.backward()
                for parameter in run.parameters:
                    parameter.data.sub_(0.125 * parameter.grad.data)
                    parameter.grad.data.zero_()
                losses.append(loss.item())
            return losses

        assert_as_in_torch(opt_level, half_dtype, script, model=lambda: linear(torch.ones(1, 2)), loss_scale=1)


@every_half
class TestMasters:
    @pytest.mark.parametrize("name", WEIGHT_EDITS)
    def test_edit_of_masters_counts_in_the_next_forward_pass_and_step(self, name, half_dtype):
        def script(run: Run) -> float:
            run.step()
            WEIGHT_EDITS[name](run.masters)
            loss = run.model(1.0).item()
            run.step()
            return loss

        assert_as_in_torch("O2", half_dtype, script)

    @pytest.mark.parametrize("name", UNSEEN)
    def test_edit_of_masters_that_torch_does_not_count_is_saved_and_trained_on(self, name, half_dtype):
        def script(run: Run) -> list[float]:
            UNSEEN[name](run.masters)
            saved = run.weights
            run.step()
            return saved

        assert_as_in_torch("O2", half_dtype, script)

    def test_edits_of_masters_and_weights_before_a_group_is_added_stay(self, half_dtype):
        weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
        run = Run(
            "O2", half_dtype, lambda _, lr: torch.optim.SGD(weights[:2], lr=lr), lambda: nn.ParameterList(weights)
        )
        with torch.no_grad():
            weights[0].fill_(6)
            run.masters[1].fill_(7)
        run.optimizer.add_param_group({"params": [weights[2]]})
        assert run.weights == [6] * 3 + [7] * 3 + [1] * 3
        assert [each.tolist() for each in weights] == [[6] * 3, [7] * 3, [1] * 3]

    @pytest.mark.parametrize("by_data", [True, False])
    def test_kept_list_of_masters_may_be_written_to_after_loading(self, by_data, half_dtype):
        run = Run("O2", half_dtype)
        masters = run.masters
        saved = copy.deepcopy(run.model.state_dict())
        run.backward()
        run.optimizer.step()
        run.model.load_state_dict(saved)
        with torch.no_grad():
            for master in masters:
                (master.data if by_data else master).fill_(3)
        run.optimizer.zero_grad()
        run.optimizer.step()
        assert run.weights == [3] * 8
        run.model(1.0)
        assert run.model.first.tolist() == [3] * 4

    def test_values_and_buffers_of_a_state_dict_may_be_written_to(self, half_dtype):
        model = Weights()
        model.register_buffer("shift", torch.ones(2))
        Run("O2", half_dtype, model=lambda: model)
        model.state_dict()["first"].data.fill_(3)
        model.state_dict()["shift"].fill_(9)
        model(1.0)
        assert model.first.tolist() == [3] * 4
        assert model.shift.tolist() == [9, 9]

    @pytest.mark.parametrize("order", ["optimizer", "optimizer and model", "model and optimizer"])
    def test_deep_copy_of_the_optimizer_goes_on_in_float32(self, order, half_dtype):
        run = Run("O2", half_dtype, optimizer=torch.optim.Adam, loss_scale=1)
        run.backward()
        run.optimizer.step()
        wanted = [master.tolist() for master in run.masters]
        optimizer, model = {
            "optimizer": lambda: (copy.deepcopy(run.optimizer), None),
            "optimizer and model": lambda: copy.deepcopy((run.optimizer, run.model)),
            "model and optimizer": lambda: copy.deepcopy((run.model, run.optimizer))[::-1],
        }[order]()
        parameters = optimizer.param_groups[0]["params"]
        assert [parameter.tolist() for parameter in parameters] == wanted
        if model is not None:
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}

    def test_data_of_tensors_without_an_address_is_that_of_torch(self, half_dtype):
        run = Run("O2", half_dtype)
        with pytest.raises(RuntimeError, match="under vmap"):  # as without amp
            torch.func.vmap(lambda row: row.data * 2)(torch.ones(2, 2))
        assert torch.ones(2).to_sparse().data.to_dense().tolist() == [1, 1]
        assert torch.ones(2, device="meta").data.is_meta
        run.step()


def refused() -> Any:
    """Asserts that two different writes to one parameter are refused."""
    return pytest.raises(UsageError, match=r"^second: half weights and their float32 master were both written")


@every_half
class TestWritesToWeightsAndTheirMasters:
    def test_two_different_writes_raise_and_lose_nothing(self, half_dtype):
        run = Run("O2", half_dtype)
        master = run.masters[1]
        with torch.no_grad():
            run.model.second.fill_(1)
            master.fill_(2)
        for _ in range(2):
            with refused():
                run.model(1.0)
        assert run.model.second.flatten().tolist() == [1] * 4
        assert master.flatten().tolist() == [2] * 4
        with torch.no_grad():
            run.model.second.copy_(master)
        run.model(1.0)
        run.step()
        assert run.weights[4:] == (torch.full((4,), 2.0) - 0.5 * torch.tensor([4.0, 3, -2, 1])).tolist()

    @pytest.mark.parametrize(
        "write",
        [double, lambda half: half.data.mul_(2), lambda half: half.untyped_storage().fill_(0)],
        ids=["counted", "data", "storage"],
    )
    def test_write_to_weights_after_one_to_data_of_masters_raises(self, write, half_dtype):
        run = Run("O2", half_dtype)
        masters = run.masters
        WEIGHT_EDITS["data.clamp_"](masters)
        write(run.model.second)
        with refused():
            run.optimizer.step()
        with torch.no_grad():
            run.model.second.copy_(masters[1])
        run.model(1.0)
        assert max(map(abs, run.weights)) == 2

    def test_write_to_weights_after_data_of_masters_was_read_counts(self, half_dtype):
        run = Run("O2", half_dtype)
        assert [master.data.abs().max().item() for master in run.masters] == [16, 16]
        run.model.second.data.mul_(2)
        run.model(1.0)
        assert run.weights[4:] == [2 * value for value in reversed(START)]

    def test_write_to_old_data_of_a_master_beside_one_to_weights_raises(self, half_dtype):
        run = Run("O2", half_dtype)
        aliases = [master.data for master in run.masters]
        for value in (3.0, 5.0):  # half weights alone are no error, however often they are written to
            run.model.second.data.fill_(value)
            run.model(1.0)
            assert run.weights[4:] == [value] * 4
        aliases[1].mul_(2)
        run.model.second.data.mul_(3)
        with refused():
            run.model(1.0)

    def test_two_equal_writes_count(self, half_dtype):
        run = Run("O2", half_dtype)
        with torch.no_grad():
            each(lambda parameter: parameter.fill_(1))([*run.parameters, *run.masters])
        assert run.weights == [1] * 8
        run.model(1.0)


class OwnList(torch.optim.SGD):
    """Keeps a list of parameters beside its groups."""

    by_data = False

    def __init__(self, parameters: Parameters, lr: float) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.mine:
            if parameter.grad is not None:
                target = parameter.data if self.by_data else parameter
                target.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class OwnListByData(OwnList):
    by_data = True


class WritesBoth(torch.optim.SGD):
    """Writes masters into the model's parameters by itself, as optimizers for Apex did."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter, master in zip(self.model.parameters(), self.param_groups[0]["params"], strict=True):
            parameter.data.copy_(master.data)


@every_half
@pytest.mark.parametrize("kind", [OwnList, OwnListByData, WritesBoth])
def test_optimizer_of_the_users_own_updates_masters_as_in_torch(kind, half_dtype):
    def script(run: Run) -> None:
        run.optimizer.model = run.model
        for _ in range(2):
            run.step()

    assert_as_in_torch("O2", half_dtype, script, optimizer=kind)


@every_level
@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
@pytest.mark.parametrize("freeze", [False, True])
def test_groups_of_an_optimizer_may_be_made_anew(rebuild, freeze, opt_level, half_dtype):
    def script(run: Run) -> None:
        for index in range(3):
            run.step()
            if freeze:
                run.model.second.requires_grad_(index == 1)
            rebuild(run)

    assert_as_in_torch(opt_level, half_dtype, script)


def take_tiny_steps(model: nn.Module, optimizer: Any) -> None:
    """Makes updates that half weights would lose."""
    for _ in range(3):
        backward(model(torch.ones(1, 4)).float().sum() * 2.0**-13, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def initialize(model: nn.Module, optimizer: Any, half_dtype: torch.dtype) -> None:
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=half_dtype, loss_scale=1024.0, verbosity=0)


def two_layers(half_dtype: torch.dtype) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    initialize(model, optimizer, half_dtype)
    return model, optimizer


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@every_half
class TestModulesAddedLater:
    def assert_all_bits_are_saved_and_loaded(self, model: nn.Module, optimizer: Any) -> None:
        masters = {id(each) for each in amp.master_params(optimizer)}
        saved = model.state_dict(keep_vars=True)
        assert {id(value) for value in saved.values()} == masters
        wanted = copy.deepcopy(model.state_dict())
        assert any(bool((value != value.half()).any()) for value in wanted.values())
        take_tiny_steps(model, optimizer)
        assert not all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        model.load_state_dict(wanted)
        assert_same_state(model.state_dict(), wanted)
        self.assert_all_bits_are_given_back(model)

    def assert_all_bits_are_given_back(self, model: nn.Module) -> None:
        wanted = copy.deepcopy(model.state_dict())
        assert {value.dtype for value in wanted.values()} == {torch.float32}
        amp.deinitialize()
        assert_same_state(model.state_dict(), wanted)

    def test_adapter_is_saved_loaded_and_given_back_with_all_bits(self, half_dtype):
        model, optimizer = two_layers(half_dtype)
        model.append(nn.Linear(4, 4).to(half_dtype))
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1.0})
        take_tiny_steps(model, optimizer)
        self.assert_all_bits_are_saved_and_loaded(model, optimizer)

    def test_adapter_of_a_frozen_model_is_saved_and_given_back_with_all_bits(self, half_dtype):
        model, optimizer = two_layers(half_dtype)
        model.append(nn.Linear(4, 4).to(half_dtype))
        model[:2].requires_grad_(False)
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1.0})
        take_tiny_steps(model, optimizer)
        adapter = model[2].state_dict()
        assert_same_state(list(adapter.values()), list(amp.master_params(optimizer)))
        assert bool((adapter["weight"] != adapter["weight"].to(half_dtype)).any())
        self.assert_all_bits_are_given_back(model)

    def test_module_that_no_optimizer_updates_is_float32_again(self, half_dtype):
        model, _ = two_layers(half_dtype)
        model.append(nn.BatchNorm1d(4).to(half_dtype))
        model.append(nn.Linear(4, 4).to(half_dtype))
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
        amp.deinitialize()
        model(torch.ones(2, 4))

    def test_parametrized_weight_is_saved_with_its_masters_bits(self, half_dtype):
        model, optimizer = two_layers(half_dtype)
        parametrize.register_parametrization(model[0], "weight", Doubled())
        take_tiny_steps(model, optimizer)
        self.assert_all_bits_are_saved_and_loaded(model, optimizer)

    def test_initialize_again_converts_what_was_added(self, half_dtype):
        model, _ = two_layers(half_dtype)
        model.extend([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        optimizer = torch.optim.SGD(model[2:].parameters(), lr=1.0)
        initialize(model, optimizer, half_dtype)
        assert model[2].weight.dtype is half_dtype
        assert model[3].weight.dtype is torch.float32
        masters = list(amp.master_params(optimizer))
        assert {master.dtype for master in masters} == {torch.float32}
        backward(model(torch.randn(4, 4)).float().square().sum(), optimizer)
        before = masters[0].detach().clone()
        optimizer.step()
        assert not torch.equal(masters[0], before)


@every_half
@pytest.mark.parametrize("opt_level", ["O2", "O3"])
class TestWeightsWithoutAMaster:
    @pytest.fixture
    def target(self, opt_level, half_dtype):
        target = Weights()
        amp.initialize(target, opt_level=opt_level, half_dtype=half_dtype, verbosity=0)
        return target

    def test_weights_may_be_written_to_through_their_state_dict(self, target):
        for factor in (2.0, 3.0):
            for value in target.state_dict().values():
                value.copy_(torch.full_like(value, factor))
            if factor == 2.0:
                target(1.0)
                assert target.first.tolist() == [2.0] * 4
        assert [value.tolist() for value in target.state_dict().values()] == [[3.0] * 4, [[3.0] * 2] * 2]
        amp.deinitialize()
        assert target.first.tolist() == [3.0] * 4

    def test_weights_may_be_written_to_directly_and_through_data_of_their_state_dict(self, target):
        target.state_dict()["first"].data[1] = 9
        with torch.no_grad():
            target.first[0] = 7
        target(1.0)
        assert target.first.tolist() == [7, 9, *START[2:]]

    def test_state_dict_has_the_same_tensors_however_often_it_is_asked_for(self, target):
        places = {target.state_dict()["first"].data_ptr() for _ in range(5)}
        assert len(places) == 1

    def test_weights_written_to_after_they_were_saved_keep_the_write(self, target):
        saved = target.state_dict()
        with torch.no_grad():
            target.first.fill_(7)
        target(1.0)
        assert target.first.tolist() == [7.0] * 4
        assert saved["first"].tolist() == START


DECAY = 0.999


@torch.no_grad()
def by_hand(average: nn.Module, model: nn.Module) -> None:
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(DECAY).add_(parameter.detach(), alpha=1 - DECAY)


@torch.no_grad()
def by_state_dict(average: nn.Module, model: nn.Module) -> None:
    """As timm does it."""
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.copy_(DECAY * mean + (1.0 - DECAY) * value)


#: How an average of a model is made, and how it takes the model's weights in.
AVERAGES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[Any, nn.Module], None]]] = {
    "AveragedModel": (
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        lambda average, model: average.update_parameters(model),
    ),
    "by hand": (copy.deepcopy, by_hand),
    "by state dict": (copy.deepcopy, by_state_dict),
}


@every_level
class TestAverages:
    @pytest.mark.parametrize("kind", AVERAGES)
    def test_average_follows_the_masters_in_float32(self, kind, opt_level, half_dtype):
        make, update = AVERAGES[kind]

        def averaged(level: str | None) -> Tensor:
            run = Run(level, half_dtype, loss_scale=1)
            average = make(run.model)
            for _ in range(40):
                run.optimizer.zero_grad()
                run.backward(2.0**-4)
                run.optimizer.step()
                update(average, run.model)
            assert {parameter.dtype for parameter in average.parameters()} == {torch.float32}
            assert isinstance(average(1.0), Tensor)
            amp.deinitialize()
            return torch.cat([parameter.detach().flatten() for parameter in average.parameters()])

        found, wanted = averaged(opt_level), averaged(None)
        # Half weights are rounded where they are averaged themselves, which these steps are not.
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert not torch.equal(wanted, torch.tensor([*START, *START[::-1]]))

    def test_average_of_a_network_computes_by_itself(self, opt_level, half_dtype):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        keep = {"keep_fp32": "2"} if opt_level == "O2" else {}
        amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=half_dtype, loss_scale=1, verbosity=0, **keep)
        average = AveragedModel(model)
        average.update_parameters(model)
        for training in (True, False):
            average.train(training)
            assert average(torch.randn(4, 4)).dtype in (torch.float32, half_dtype)
        amp.deinitialize()
        assert average(torch.randn(4, 4)).dtype is torch.float32


@pytest.mark.slow
@every_level
def test_data_of_a_weight_in_compiled_code_is_that_of_torch(opt_level, half_dtype):
    run = Run(opt_level, half_dtype)

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(tensor: Tensor) -> Tensor:
        return tensor.data * 2

    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert doubled(run.model.first).tolist() == [2 * value for value in START]

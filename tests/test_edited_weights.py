"""Whatever users do to weights counts as it does in plain torch, by whatever means, at whatever moment.

Weights and gradients here are small integers and halves of them, which every type holds: what is compared is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from test_edited_gradients import START, Run, alike
from torch import nn

from ampatch import amp
from ampatch.amp import UsageError

Parameters = Iterable[nn.Parameter]

LEVELS = [("O1", torch.float16), ("O1", torch.bfloat16), *(("O2", dtype) for dtype in HALF_DTYPES)]

every_level = pytest.mark.parametrize(
    ("opt_level", "half_dtype"), LEVELS, ids=[f"{level}-{dtype_name(dtype)}" for level, dtype in LEVELS]
)
every_half = pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)


def each(change: Callable[[nn.Parameter], object]) -> Callable[[Parameters], None]:
    def change_all(parameters: Parameters) -> None:
        for parameter in parameters:
            change(parameter)

    return change_all


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full_like(parameter, 3.0)


def by_numpy(parameter: nn.Parameter) -> None:
    words = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
    words.numpy().reshape(-1)[:2] = 0


@torch.no_grad()
def in_place(parameter: nn.Parameter) -> None:
    parameter.mul_(2)


def from_vector(parameters: Parameters) -> None:
    parameters = list(parameters)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() * 2, parameters)


MEANS: dict[str, Callable[[Parameters], object]] = {
    "data.sub_": each(lambda parameter: parameter.data.sub_(1)),
    "data.clamp_": each(lambda parameter: parameter.data.clamp_(-2, 2)),
    "data.copy_ of a permutation": each(lambda parameter: parameter.data.copy_(parameter.detach().flip(0))),
    "data[...] =": each(lambda parameter: parameter.data[:1].fill_(1)),
    "data =": each(set_data),
    "detach": each(lambda parameter: parameter.detach().mul_(2)),
    "in place": each(in_place),
    "init": each(lambda parameter: nn.init.constant_(parameter, 5.0)),
    "vector_to_parameters": from_vector,
    "_foreach_add_": torch.no_grad()(lambda parameters: torch._foreach_add_(list(parameters), 1.0)),
}
UNSEEN: dict[str, Callable[[Parameters], object]] = {
    "numpy": each(by_numpy),
    "dlpack": each(lambda parameter: torch.from_dlpack(parameter.detach()).mul_(2)),
    "storage": each(lambda parameter: parameter.untyped_storage().fill_(0)),
}


@every_level
class TestOfTheModel:
    @pytest.mark.parametrize("name", [*MEANS, *UNSEEN])
    def test_before_the_first_step(self, name, opt_level, half_dtype):
        def script(run: Run) -> None:
            {**MEANS, **UNSEEN}[name](list(run.model.parameters()))
            run.backward()
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    @pytest.mark.parametrize("name", [*MEANS, *UNSEEN])
    @pytest.mark.parametrize("moment", ["after a step", "before a step", "before both"])
    def test_between_steps(self, name, moment, opt_level, half_dtype):
        change = {**MEANS, **UNSEEN}[name]

        def script(run: Run) -> None:
            for _ in range(2):
                run.optimizer.zero_grad()
                run.backward()
                if moment != "after a step":
                    change(list(run.model.parameters()))
                run.optimizer.step()
                if moment != "before a step":
                    change(list(run.model.parameters()))
            run.backward()

        alike(opt_level, half_dtype, script)

    @pytest.mark.parametrize("name", MEANS)
    def test_the_next_forward_computes_with_it(self, name, opt_level, half_dtype):
        def outputs(run: Run) -> list[float]:
            layer = nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.tensor(START).view(2, 2))
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
            if run is found:
                amp.initialize(layer, optimizer, opt_level=opt_level, half_dtype=half_dtype, loss_scale=1, verbosity=0)
            seen = [layer(torch.eye(2)).float()]
            MEANS[name](list(layer.parameters()))
            seen.append(layer(torch.eye(2)).float())
            with torch.no_grad():
                seen.append(layer(torch.eye(2)).float())
            return [value for output in seen for value in output.flatten().tolist()]

        wanted, found = Run(None), object.__new__(Run)
        assert outputs(found) == outputs(wanted)

    def test_a_loop_that_updates_by_hand_learns(self, opt_level, half_dtype):
        def losses(level: str | None) -> list[float]:
            layer = nn.Linear(2, 1, bias=False)
            with torch.no_grad():
                layer.weight.fill_(1.0)
            if level is not None:
                optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
                amp.initialize(layer, optimizer, opt_level=level, half_dtype=half_dtype, loss_scale=1, verbosity=0)
            seen = []
            for _ in range(4):
                loss = layer(torch.ones(1, 2)).float().square().sum()
                loss.backward()
                for parameter in layer.parameters():
                    parameter.data.sub_(0.125 * parameter.grad.data)
                    parameter.grad.data.zero_()
                seen.append(loss.item())
            return seen

        assert losses(opt_level) == losses(None)


@every_half
class TestOfMasters:
    @pytest.mark.parametrize("name", MEANS)
    def test_counts_for_the_next_forward_and_step(self, name, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            run.optimizer.step()
            MEANS[name](run.masters)
            run.seen = run.model(1.0).item()
            run.optimizer.zero_grad()
            run.backward()
            run.optimizer.step()

        wanted, found = Run(None), Run("O2", half_dtype)
        for run in (wanted, found):
            script(run)
        assert found.weights == wanted.weights
        assert found.seen == wanted.seen

    @pytest.mark.parametrize("name", UNSEEN)
    def test_is_saved_and_counts_for_the_next_step_where_nothing_tells_of_it(self, name, half_dtype):
        def script(run: Run) -> None:
            UNSEEN[name](run.masters)
            run.saved = [value.tolist() for value in run.model.state_dict().values()]
            run.backward()
            run.optimizer.step()

        wanted, found = Run(None), Run("O2", half_dtype)
        for run in (wanted, found):
            script(run)
        assert found.saved == wanted.saved
        assert found.weights == wanted.weights


@every_half
class TestOfBoth:
    def test_that_differ_is_an_error_that_names_the_parameter_and_loses_nothing(self, half_dtype):
        run = Run("O2", half_dtype)
        master = run.masters[1]
        with torch.no_grad():
            run.model.second.fill_(1)
            master.fill_(2)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"^second: half weights and their float32 master were both written"):
                run.model(1.0)
        assert run.model.second.flatten().tolist() == [1] * 4
        assert master.flatten().tolist() == [2] * 4
        with torch.no_grad():
            run.model.second.copy_(master)
        run.model(1.0)
        run.backward()
        run.optimizer.step()
        assert run.weights[4:] == (torch.full((4,), 2.0) - 0.5 * torch.tensor([4.0, 3, -2, 1])).tolist()

    def test_that_are_alike_is_none(self, half_dtype):
        run = Run("O2", half_dtype)
        with torch.no_grad():
            for parameter, master in zip(run.model.parameters(), run.masters, strict=True):
                parameter.fill_(1)
                master.fill_(1)
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


class BothByItself(torch.optim.SGD):
    """Writes masters into the model's parameters by itself, as optimizers for Apex did."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter, master in zip(self.model.parameters(), self.param_groups[0]["params"], strict=True):
            parameter.data.copy_(master.data)


@every_half
class TestOptimizersOfOnesOwn:
    @pytest.mark.parametrize("kind", [OwnList, OwnListByData])
    def test_one_with_a_list_of_its_own_is_told_at_its_step(self, kind, half_dtype):
        run = Run("O2", half_dtype, optimizer=kind)
        run.backward()
        with pytest.raises(UsageError, match=r"this OwnList\w* has written to the model's first itself"):
            run.optimizer.step()

    def test_one_that_writes_half_weights_as_well_is_left_alone(self, half_dtype):
        def script(run: Run) -> None:
            run.optimizer.model = run.model
            for _ in range(2):
                run.optimizer.zero_grad()
                run.backward()
                run.optimizer.step()

        wanted, found = Run(None, optimizer=BothByItself), Run("O2", half_dtype, optimizer=BothByItself)
        for run in (wanted, found):
            script(run)
        assert found.weights == wanted.weights


REBUILDS: dict[str, Callable[[Run], object]] = {
    "params =": lambda run: run.optimizer.param_groups[0].update(params=list(run.model.parameters())),
    "params = some": lambda run: run.optimizer.param_groups[0].update(params=[run.model.first]),
    "pop and add": lambda run: (
        run.optimizer.param_groups.pop(),
        run.optimizer.add_param_group({"params": list(run.model.parameters()), "lr": 0.25}),
    ),
    "__init__": lambda run: run.optimizer.__init__(run.model.parameters(), lr=0.25),
    "clear and add": lambda run: (
        run.optimizer.param_groups.clear(),
        [run.optimizer.add_param_group({"params": [each], "lr": 0.25}) for each in run.model.parameters()],
    ),
}


@every_level
@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
@pytest.mark.parametrize("freeze", [False, True])
def test_groups_may_be_made_anew(rebuild, freeze, opt_level, half_dtype):
    def script(run: Run) -> None:
        for round_ in range(3):
            run.optimizer.zero_grad()
            run.backward()
            run.optimizer.step()
            if freeze:
                run.model.second.requires_grad_(round_ == 1)
            rebuild(run)

    alike(opt_level, half_dtype, script)

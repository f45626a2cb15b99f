"""Half weights that no optimizer updates: frozen they stay half; written to they become float32, and lose no update."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from torch import nn

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError

pytestmark = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)

MOMENTUM = 0.999


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    amp.deinitialize()


def pair(half: torch.dtype) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A student of ones, and a teacher of zeros that no optimizer updates."""
    student = nn.Linear(4, 3)
    nn.init.ones_(student.weight)
    nn.init.ones_(student.bias)
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    amp.initialize([student, teacher], optimizer, opt_level="O2", half_dtype=half, verbosity=0)
    return student, teacher, optimizer


def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.mul_(MOMENTUM).add_(other, alpha=1 - MOMENTUM)


def by_data(teacher: nn.Module, student: nn.Module) -> None:
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data.mul_(MOMENTUM).add_(other.data, alpha=1 - MOMENTUM)


def other_data(teacher: nn.Module, student: nn.Module) -> None:
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data = mine.data * MOMENTUM + other.data * (1 - MOMENTUM)


def foreach(teacher: nn.Module, student: nn.Module) -> None:
    others = [other.to(mine.dtype) for mine, other in zip(teacher.parameters(), student.parameters(), strict=True)]
    torch._foreach_lerp_(list(teacher.parameters()), others, 1 - MOMENTUM)


def state_dict(teacher: nn.Module, student: nn.Module) -> None:
    """Each call of the teacher's gives other copies of half weights."""
    for name, value in student.state_dict().items():
        teacher.state_dict()[name].mul_(MOMENTUM).add_(value, alpha=1 - MOMENTUM)


def loaded(teacher: nn.Module, student: nn.Module) -> None:
    other = student.state_dict()
    teacher.load_state_dict(
        {name: value * MOMENTUM + other[name] * (1 - MOMENTUM) for name, value in teacher.state_dict().items()}
    )


WRITES = [in_place, by_data, other_data, foreach, state_dict, loaded]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("calls_teacher", [True, False])
def test_a_momentum_teacher_does_not_stall(write, calls_teacher, half):
    student, teacher, optimizer = pair(half)
    for _ in range(300):
        with amp.scale_loss(student(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        with torch.no_grad():
            write(teacher, student)
            if calls_teacher:
                assert teacher(torch.ones(2, 4)).dtype is torch.float32
    assert teacher.weight.dtype is torch.float32
    assert teacher.weight.mean().item() == pytest.approx(1 - MOMENTUM**300, rel=1e-3)
    assert {each.dtype for each in student.parameters()} == {half}


@pytest.mark.parametrize(
    "look",
    [
        lambda model: model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}),
        lambda model: model.load_state_dict({name: each + 0.1 for name, each in model.state_dict().items()}),
        lambda model: [each.data.sum() for each in model.parameters()],
        lambda model: model.to("cpu"),
        lambda model: model.state_dict(),
        lambda model: model.train().eval(),
        copy.deepcopy,
    ],
    ids=["loaded again", "a checkpoint", "data read", "moved", "saved", "mode", "copied"],
)
def test_frozen_weights_stay_half(look: Callable[[nn.Module], object], half):
    _, teacher, _ = pair(half)
    look(teacher)
    teacher(torch.ones(2, 4))
    assert {each.dtype for each in teacher.parameters()} == {half}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_first_update_that_rounding_undoes_is_no_reason_to_stay_half(write, half):
    student, teacher, optimizer = pair(half)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.5)  # where 0.0005 is below half the last digit of bfloat16
    teacher(torch.ones(2, 4))
    amp.deinitialize()
    amp.initialize([student, teacher], optimizer, opt_level="O2", half_dtype=half, verbosity=0)
    for _ in range(200):
        with torch.no_grad():
            write(teacher, student)
            teacher(torch.ones(2, 4))
    assert teacher.weight.mean().item() == pytest.approx(1 - 0.5 * MOMENTUM**200, rel=2e-3)


def test_data_that_is_read_in_each_step_leaves_a_frozen_weight_half(half):
    _, teacher, _ = pair(half)
    for _ in range(4):
        assert sum(each.data.norm() for each in teacher.parameters()) == 0
        teacher(torch.ones(2, 4))
    assert {each.dtype for each in teacher.parameters()} == {half}


def test_an_optimizer_that_amp_was_not_given_goes_on_in_half(half):
    model = nn.Linear(4, 3)
    amp.initialize(model, opt_level="O2", half_dtype=half, loss_scale=1, verbosity=0)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    model(torch.ones(2, 4)).square().mean().backward()
    with pytest.warns(AmpWarning, match="updates half weights of a model that amp has"):
        optimizer.step()
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert {each.dtype for each in model.parameters()} == {half}


def test_a_weight_that_an_optimizer_has_got_loads_any_number_of_times(half):
    model = nn.Linear(4, 3)
    amp.initialize(model, opt_level="O2", half_dtype=half, loss_scale=1, verbosity=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=1, verbosity=0)
    for number in range(1, 4):
        model.load_state_dict({name: torch.full_like(each, 0.1 * number) for name, each in model.state_dict().items()})
    assert {each.dtype for each in model.parameters()} == {half}
    assert all(torch.equal(each, torch.full_like(each, 0.1 * 3)) for each in amp.master_params(optimizer))


@pytest.mark.parametrize("looks", [0, 3])
def test_a_kept_state_dict_reaches_the_weights_at_each_write(looks, half):
    _, teacher, _ = pair(half)
    kept = teacher.state_dict()["weight"]
    for _ in range(looks):
        teacher(torch.ones(2, 4))
    for number in range(1, 4):
        kept.add_(1)
        teacher(torch.ones(2, 4))
        assert teacher.weight.tolist() == [[float(number)] * 4] * 3


def test_writes_to_memory_that_a_weight_has_left_are_an_error(half):
    _, teacher, _ = pair(half)
    kept = teacher.weight.detach()
    kept.add_(1)
    teacher(torch.ones(2, 4))
    assert teacher.weight.tolist() == [[1.0] * 4] * 3
    kept.add_(1)
    with pytest.raises(UsageError, match=r"shape \(3, 4\) had before amp made it float32.*keep_fp32"):
        teacher(torch.ones(2, 4))


def test_a_teacher_that_runs_in_inference_mode_can_be_trained_later(half):
    _, teacher, _ = pair(half)
    with torch.no_grad():
        teacher.weight.add_(1)
    with torch.inference_mode():
        teacher(torch.ones(2, 4))
    assert teacher.weight.dtype is torch.float32
    assert not teacher.weight.is_inference()


def test_a_weight_of_two_parts_of_which_one_is_written_to(half):
    student = nn.Linear(4, 3)
    teacher = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    amp.initialize([student, teacher], optimizer, opt_level="O2", half_dtype=half, verbosity=0)
    with torch.no_grad():
        next(teacher.parameters()).mul_(2)
        next(iter(reversed(list(teacher.parameters())))).add_(0.25)
        assert teacher(torch.ones(2, 4)).dtype is torch.float32
    assert len({each.dtype for each in teacher.parameters()}) == 2


def test_only_what_was_written_to_becomes_float32_and_amp_says_so(half, caplog):
    _, teacher, _ = pair(half)
    with torch.no_grad():
        teacher.bias.add_(1)
    with caplog.at_level(logging.INFO, logger="ampatch"):
        teacher(torch.ones(2, 4))
        teacher(torch.ones(2, 4))
    assert [teacher.weight.dtype, teacher.bias.dtype] == [half, torch.float32]
    assert len([each for each in caplog.messages if "bias" in each and "float32 from now on" in each]) == 1
    assert teacher(torch.ones(2, 4)).tolist() == [[1.0] * 3] * 2
    amp.deinitialize()
    assert [teacher.weight.dtype, teacher.bias.dtype] == [torch.float32] * 2


def test_weights_of_the_users_own_half_model_are_the_users(half):
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3).to(half).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    amp.initialize([student, teacher], optimizer, opt_level="O2", half_dtype=half, verbosity=0)
    with torch.no_grad():
        teacher.weight.add_(1)
    teacher(torch.ones(2, 4))
    assert teacher.weight.dtype is half


def test_a_weight_that_is_unfrozen_has_a_master(half):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=1, verbosity=0)
    model[0].requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        model(torch.ones(2, 4))
    assert {each.dtype for each in model.parameters()} == {half}
    assert {each.dtype for each in amp.master_params(optimizer)} == {torch.float32}

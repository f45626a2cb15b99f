"""Half weights that no optimizer updates: frozen they stay half; written to they become float32, and lose no update."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from optimizers import backward
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ampatch import amp
from ampatch.errors import AmpWarning, UsageError

pytestmark = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)

MOMENTUM = 0.999


def initialize(models: object, optimizer: object, half: torch.dtype, **options: object) -> None:
    amp.initialize(models, optimizer, opt_level="O2", half_dtype=half, verbosity=0, **options)


def pair(half: torch.dtype) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A student of ones, and a teacher of zeros that no optimizer updates."""
    student = nn.Linear(4, 3)
    nn.init.ones_(student.weight)
    nn.init.ones_(student.bias)
    teacher = copy.deepcopy(student).requires_grad_(False)
    nn.init.zeros_(teacher.weight)
    nn.init.zeros_(teacher.bias)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    initialize([student, teacher], optimizer, half)
    return student, teacher, optimizer


def for_each(write: Callable[[Tensor, Tensor], object]) -> Callable[[nn.Module, nn.Module], object]:
    return lambda teacher, student: [*map(write, teacher.parameters(), student.parameters())]


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


WRITES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "in place": for_each(lambda mine, other: mine.mul_(MOMENTUM).add_(other, alpha=1 - MOMENTUM)),
    "data": for_each(lambda mine, other: mine.data.mul_(MOMENTUM).add_(other.data, alpha=1 - MOMENTUM)),
    "other data": for_each(
        lambda mine, other: setattr(mine, "data", mine.data * MOMENTUM + other.data * (1 - MOMENTUM))
    ),
    "foreach": foreach,
    "state dict": state_dict,
    "loaded": loaded,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("calls_teacher", [True, False])
def test_a_momentum_teacher_does_not_stall(write, calls_teacher, half):
    student, teacher, optimizer = pair(half)
    for _ in range(300):
        backward(student(torch.ones(2, 4)).sum(), optimizer)
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
        lambda model: [(model.weight.data.norm(), model(torch.ones(2, 4))) for _ in range(4)],
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


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_teacher_whose_first_update_rounding_undoes_does_not_stall(write, half):
    student, teacher, optimizer = pair(half)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.5)  # where 0.0005 is below half the last digit of bfloat16
    teacher(torch.ones(2, 4))
    amp.deinitialize()
    initialize([student, teacher], optimizer, half)
    for _ in range(200):
        with torch.no_grad():
            write(teacher, student)
            teacher(torch.ones(2, 4))
    assert teacher.weight.mean().item() == pytest.approx(1 - 0.5 * MOMENTUM**200, rel=2e-3)


def test_an_optimizer_that_amp_was_not_given_updates_half_weights(half):
    model = nn.Linear(4, 3)
    initialize(model, None, half, loss_scale=1)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    model(torch.ones(2, 4)).square().mean().backward()
    with pytest.warns(AmpWarning, match="updates half weights of a model that amp has"):
        optimizer.step()
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert {each.dtype for each in model.parameters()} == {half}


def test_a_weight_with_a_master_stays_half_when_it_is_loaded_again(half):
    model = nn.Linear(4, 3)
    initialize(model, None, half, loss_scale=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize(model, optimizer, half, loss_scale=1)
    for number in range(1, 4):
        model.load_state_dict({name: torch.full_like(each, 0.1 * number) for name, each in model.state_dict().items()})
    assert {each.dtype for each in model.parameters()} == {half}
    assert all(torch.equal(each, torch.full_like(each, 0.1 * 3)) for each in amp.master_params(optimizer))


@pytest.mark.parametrize("looks", [0, 3])
def test_each_write_to_a_kept_state_dict_reaches_the_weights(looks, half):
    _, teacher, _ = pair(half)
    kept = teacher.state_dict()["weight"]
    for _ in range(looks):
        teacher(torch.ones(2, 4))
        teacher.state_dict()
    for number in range(1, 4):
        kept.add_(1)
        teacher(torch.ones(2, 4))
        assert teacher.weight.tolist() == [[float(number)] * 4] * 3


def test_a_state_dict_has_the_values_of_a_checkpoint_and_is_kept_by_nothing(half):
    _, teacher, _ = pair(half)
    kept = teacher.state_dict()
    teacher.load_state_dict({name: each + 1 for name, each in kept.items()})
    assert teacher.state_dict()["weight"].equal(torch.ones(3, 4))
    reference = StorageWeakRef(teacher.state_dict()["weight"].untyped_storage())
    teacher(torch.ones(2, 4))
    assert reference.expired()


def test_writing_to_memory_that_a_weight_has_left_is_an_error(half):
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
    teacher.weight.grad = torch.ones_like(teacher.weight)
    with torch.no_grad():
        teacher.weight.add_(1)
    with torch.inference_mode():
        teacher(torch.ones(2, 4))
    assert teacher.weight.dtype is teacher.weight.grad.dtype is torch.float32
    assert not teacher.weight.is_inference()


def test_a_parametrized_weight_may_have_one_written_part(half):
    student = nn.Linear(4, 3)
    teacher = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    initialize([student, teacher], optimizer, half)
    with torch.no_grad():
        next(teacher.parameters()).mul_(2)
        next(iter(reversed(list(teacher.parameters())))).add_(0.25)
        assert teacher(torch.ones(2, 4)).dtype is torch.float32
    assert len({each.dtype for each in teacher.parameters()}) == 2


def test_only_written_weights_become_float32_and_that_is_logged(half, caplog):
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


def test_written_weights_of_the_users_half_model_stay_half(half):
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3).to(half).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    initialize([student, teacher], optimizer, half)
    with torch.no_grad():
        teacher.weight.add_(1)
    teacher(torch.ones(2, 4))
    assert teacher.weight.dtype is half

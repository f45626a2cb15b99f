"""A skipped step leaves the buffers of models as they were before its forward passes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import stepping
import torch
from optimizers import SGD, backward, initialize
from torch import Tensor, nn

from ampatch import amp
from ampatch.scaling.kept_buffers import BuffersBefore, KeptBuffers

pytestmark = pytest.mark.filterwarnings("ignore:the loss of a:ampatch.errors.AmpWarning")

each_level = pytest.mark.parametrize("level", ["O0", "O1", "O2"])
OPTIONS = {"opt_level": "O1", "half_dtype": "float16", "init_scale": 16.0}


class Averaging(nn.Module):
    """Keeps an average of its inputs, in place or as another tensor each time."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("unused", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().float().mean(0)
        if self.in_place:
            self.average.mul_(0.9).add_(now, alpha=0.1)
        else:
            self.average = self.average * 0.9 + now * 0.1
        return x


PARTS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "instance norm": lambda: nn.InstanceNorm1d(8, track_running_stats=True),
    "in place": lambda: Averaging(in_place=True),
    "replaced": lambda: Averaging(in_place=False),
}


def with_part(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1))


def started(part: nn.Module, make: Callable[..., Any] = SGD, **options: Any) -> tuple[Any, Any]:
    return stepping.started(make, model=with_part(part), **{**OPTIONS, **options})


def loss_of(model: Callable[[Tensor], Tensor], factor: float = 1.0) -> Tensor:
    """Returns a loss whose inputs have a factor."""
    return model(torch.randn(8, 4) * factor).float().square().mean()


def step(model: Callable[[Tensor], Tensor], optimizer: Any, *factors: float) -> None:
    """Takes a step, with a block for each factor of the inputs."""
    for factor in factors:
        backward(loss_of(model, factor), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def assert_restored_by_skipped_steps(
    model: nn.Module, optimizer: Any, *factors: float, called: Callable[[Tensor], Tensor] | None = None
) -> None:
    for _ in range(2):
        before = buffers_of(model)
        step(called or model, optimizer, *factors)
        assert amp.step_was_skipped(optimizer)
        assert are_same(buffers_of(model), before)
        step(called or model, optimizer, 1.0)
        assert not amp.step_was_skipped(optimizer)
        assert not are_same(buffers_of(model), before)


EACH_ORDER = pytest.mark.parametrize("factors", [(math.inf,), (1.0, math.inf), (math.inf, 1.0)], ids=str)


@each_level
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@EACH_ORDER
def test_buffers_are_restored_by_skipped_steps(level, part, factors):
    assert_restored_by_skipped_steps(*started(part(), opt_level=level), *factors)


@EACH_ORDER
@pytest.mark.slow
def test_buffers_of_a_compiled_model_are_restored(factors):
    model, optimizer = started(nn.BatchNorm1d(4))
    called = torch.compile(model, backend="aot_eager")
    assert_restored_by_skipped_steps(model, optimizer, *factors, called=called)


def test_buffers_are_restored_by_a_step_that_checks():
    model, optimizer = started(nn.BatchNorm1d(4), loss_scale=1.0, check_finite=True)
    assert_restored_by_skipped_steps(model, optimizer, math.inf)


def test_buffers_are_restored_before_the_error_at_the_floor():
    model, optimizer = started(nn.BatchNorm1d(4), min_loss_scale=16.0)
    step(model, optimizer, 1.0)
    before = buffers_of(model)
    with pytest.raises(amp.LossScaleError):
        step(model, optimizer, math.inf)
    assert are_same(buffers_of(model), before)


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_buffers_are_restored_after_a_closure_and_nothing_keeps_the_optimizer_alive(factor):
    def trained() -> weakref.ref[torch.optim.Optimizer]:
        model, optimizer = started(nn.BatchNorm1d(4), lambda parameters: torch.optim.LBFGS(parameters, max_iter=2))

        def closure(factor: float) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, factor)
            backward(loss, optimizer)
            return loss

        optimizer.step(lambda: closure(1.0))
        before = buffers_of(model)
        optimizer.step(lambda: closure(factor))
        assert amp.step_was_skipped(optimizer) == (factor == math.inf)
        assert are_same(buffers_of(model), before) == (factor == math.inf)
        return weakref.ref(optimizer)

    reference = trained()
    gc.collect()
    assert reference() is None


def test_statistics_of_a_critic_stay_finite_in_the_skipped_step_of_its_generator():
    torch.manual_seed(0)
    generator = nn.Linear(4, 4)
    critic = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_generator, of_critic = SGD(generator.parameters()), SGD(critic.parameters())
    initialize([generator, critic], [of_generator, of_critic], **OPTIONS)
    for factor in (1.0, math.inf):
        step(critic, of_critic, 1.0)
        before = buffers_of(critic)
        step(nn.Sequential(generator, critic), of_generator, factor)
        assert amp.step_was_skipped(of_generator) == (factor == math.inf)
    assert are_same(buffers_of(critic)[:2], before[:2])


class Holding(nn.Module):
    """Holds as a buffer what its user holds as well."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), of
        self.register_buffer("held", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.held = {"input": x, "output": y.detach(), "weight": self.layer.weight.detach()}[self.of]
        return y


@each_level
@pytest.mark.parametrize("of", ["input", "output", "weight"])
def test_buffers_that_share_memory_with_the_user_are_left_alone(level, of):
    part = Holding(of)
    model, optimizer = started(part, opt_level=level)
    x = torch.full((4, 4), 2.0)
    for factor in (1.0, math.inf):
        output = part(x)
        shown = output.detach().clone()
        backward(model(torch.ones(4, 4)).float().square().mean() * factor, optimizer)
        weight = part.layer.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(output.detach(), shown)
    assert torch.equal(part.layer.weight.detach(), weight)
    assert torch.equal(x, torch.full((4, 4), 2.0))


def test_buffers_that_the_user_loads_between_forward_passes_stay():
    model, optimizer = started(nn.BatchNorm1d(4))
    step(model, optimizer, 1.0)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(model, optimizer, 1.0)
    model.eval()
    model(torch.randn(8, 4))
    model.train()
    model.load_state_dict(best)
    step(model, optimizer, math.inf)
    assert amp.step_was_skipped(optimizer)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, best[name])


def test_buffers_of_parts_added_later_are_restored():
    later = nn.BatchNorm1d(1)
    model, optimizer = started(nn.BatchNorm1d(4))
    step(model, optimizer, 1.0)
    model.append(later)
    assert_restored_by_skipped_steps(model, optimizer, math.inf)


@pytest.mark.parametrize("overflows", ["loss", "input"])
def test_statistics_of_a_part_called_alone_that_overflow_are_those_of_the_last_step(overflows):
    model, optimizer = started(nn.BatchNorm1d(4))
    for factor in (1.0, 1.0, math.inf):
        before = buffers_of(model)
        hidden = model[1](model[0](torch.randn(8, 4) * (factor if overflows == "input" else 1)))
        backward(model[2](hidden).float().square().mean() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.step_was_skipped(optimizer)
    if overflows == "input":
        assert are_same(buffers_of(model)[:2], before[:2])
    else:
        assert buffers_of(model)[2] == before[2] + 1


def test_statistics_of_a_teacher_without_an_optimizer_are_restored():
    model, teacher = with_part(nn.Identity()), nn.BatchNorm1d(4)
    optimizer = SGD(model.parameters())
    initialize([model, teacher], optimizer, **OPTIONS)
    for factor in (1.0, 1.0, math.inf):
        before = buffers_of(teacher)
        step(nn.Sequential(teacher, model), optimizer, factor)
    assert are_same(buffers_of(teacher), before)


def test_statistics_stay_finite_if_only_one_of_two_optimizers_of_a_model_skips():
    model = with_part(nn.BatchNorm1d(4))
    first, second = (SGD(model[part].parameters()) for part in (0, 2))
    initialize(model, [first, second], num_losses=2, **OPTIONS)
    backward(loss_of(model), first)
    second.zero_grad()
    with amp.scale_loss(loss_of(model, math.inf), second, loss_id=1) as scaled_loss:
        torch.autograd.backward(scaled_loss, inputs=list(model[2].parameters()))
    first.step()
    second.step()
    assert amp.step_was_skipped(second)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


class TestStepsThatTheHostJudgesLate:
    """As with a fused optimizer on a GPU: the buffers are restored once the host knows that a step was skipped."""

    def setup_method(self) -> None:
        self.model, self.kept = nn.BatchNorm1d(4), KeptBuffers()
        self.kept.add(self.model)

    def forward(self, factor: float) -> None:
        self.kept.before_forward(self.model)
        self.model(torch.randn(8, 4) * factor)
        self.kept.after_forward(self.model)

    def before_step(self) -> BuffersBefore:
        return self.kept.before_step(lambda _: True, lambda _: False)

    def test_buffers_are_restored_by_two_skipped_steps_in_a_row(self):
        self.forward(1.0)
        self.before_step()
        expected = buffers_of(self.model)
        skipped = []
        for _ in range(2):
            self.forward(math.inf)
            skipped.append(self.before_step())
        for each in skipped:
            each.restore()
        assert are_same(buffers_of(self.model), expected)

    def test_copies_that_a_step_may_need_are_not_written_to(self):
        expected = buffers_of(self.model)
        self.forward(math.inf)
        first = self.before_step()
        self.forward(1.0)
        first.restore()
        assert are_same(buffers_of(self.model), expected)

    def test_what_the_user_wrote_before_the_next_forward_stays(self):
        self.forward(math.inf)
        skipped = self.before_step()
        self.model.reset_running_stats()
        self.forward(1.0)
        expected = buffers_of(self.model)
        skipped.restore()
        assert are_same(buffers_of(self.model), expected)


class OwnNorm(nn.Module):
    """A norm of the user's own: torch counts none of the writes to its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x.float(), self.mean, self.var, training=self.training)


class Growing(nn.Module):
    """Makes a longer table for longer inputs, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.register_buffer("table", torch.arange(float(len(x))), persistent=False)
        return x + self.table[: len(x), None]


class TestOtherBuffers:
    """Buffers that are no statistics of torch's norms are restored only if they are not finite."""

    def test_statistics_of_a_users_own_norm_are_restored_if_they_are_not_finite(self):
        model, optimizer = started(OwnNorm())
        for _ in range(3):
            step(model, optimizer, 1.0)
        before = buffers_of(model)
        backward(loss_of(model) * math.inf, optimizer)
        after = buffers_of(model)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert are_same(buffers_of(model), after)
        assert not are_same(after, before)
        step(model, optimizer, 1.0)
        before = buffers_of(model)
        step(model, optimizer, math.inf)
        assert are_same(buffers_of(model), before)

    def test_table_that_has_grown_keeps_its_length(self):
        model, optimizer = started(Growing())
        for length in (4, 6):
            backward(model(torch.randn(length, 4)).float().mean() * math.inf, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert amp.step_was_skipped(optimizer)
        model(torch.randn(6, 4))

    def test_buffer_that_another_graph_needs_is_not_written_to(self):
        layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
        layer.register_buffer("mask", torch.ones(4))
        optimizers = [SGD(each.parameters()) for each in (layer, other)]
        initialize([layer, other], optimizers, num_losses=2, **OPTIONS)
        shared = layer(torch.ones(2, 4)).float() * layer.mask
        kept = other(torch.ones(2, 4)).float() * layer.mask
        backward(shared.sum() * math.inf, optimizers[0])
        optimizers[0].step()
        assert amp.step_was_skipped(optimizers[0])
        backward(kept.sum(), optimizers[1], loss_id=1)
        optimizers[1].step()

    def test_buffers_of_a_functional_call_do_not_become_the_models(self):
        model, optimizer = started(nn.BatchNorm1d(4))
        step(model, optimizer, 1.0)
        before = buffers_of(model)
        mine = {name: torch.full_like(buffer, 9) for name, buffer in model.named_buffers()}
        output = torch.func.functional_call(model, {**dict(model.named_parameters()), **mine}, torch.randn(8, 4))
        backward(output.float().mean() * math.inf, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert are_same(buffers_of(model), before)

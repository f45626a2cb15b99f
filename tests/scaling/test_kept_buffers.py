"""A skipped step leaves the buffers of models as they were before its forward passes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn

from ampatch import amp
from ampatch.scaling.kept_buffers import BuffersBefore, KeptBuffers

pytestmark = pytest.mark.filterwarnings("ignore:the loss of a:ampatch.errors.AmpWarning")

EACH_LEVEL = pytest.mark.parametrize("level", ["O0", "O1", "O2"])


class Averaging(nn.Module):
    """Keeps an average of what it sees, in place or as another tensor each time."""

    average: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().float().mean(0)
        if self.in_place:
            self.average.mul_(0.9).add_(now, alpha=0.1)
        else:
            self.average = self.average * 0.9 + now * 0.1
        return x


PARTS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "in place": lambda: Averaging(in_place=True),
    "replaced": lambda: Averaging(in_place=False),
}


def started(level: str, part: nn.Module, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = {"loss_scale": "dynamic", "init_scale": 16.0, **options}
    amp.initialize(model, optimizer, opt_level=level, half_dtype="float16", verbosity=0, **chosen)
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, *factors: float) -> None:
    """One step, with a forward pass for each factor of the inputs."""
    for factor in factors:
        with amp.scale_loss(model(torch.randn(8, 4) * factor).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@EACH_LEVEL
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("factors", [(math.inf,), (1.0, math.inf, 1.0)], ids=["one", "accumulated"])
def test_are_as_before_a_skipped_step_and_go_on_from_there(level: str, part: str, factors: tuple[float, ...]) -> None:
    model, optimizer = started(level, PARTS[part]())
    for _ in range(2):
        before = values(model)
        run(model, optimizer, *factors)  # the first step of a run, too
        assert amp.step_was_skipped(optimizer)
        assert are_same(values(model), before)
        run(model, optimizer, 1.0)
        assert not amp.step_was_skipped(optimizer)
        assert not are_same(values(model), before)


@pytest.mark.parametrize("scale", [{"loss_scale": 1.0, "check_finite": True}, {"min_loss_scale": 16.0}])
def test_where_the_check_of_the_step_skips_it_or_raises(scale: dict[str, object]) -> None:
    model, optimizer = started("O1", nn.BatchNorm1d(4), **scale)
    run(model, optimizer, 1.0)
    before = values(model)
    if "min_loss_scale" in scale:
        with pytest.raises(amp.LossScaleError):
            run(model, optimizer, math.inf)
    else:
        run(model, optimizer, math.inf)
    for one, other in zip(values(model), before, strict=True):
        assert_same_bits(one, other)


def test_within_a_closure() -> None:
    model, _ = started("O1", nn.BatchNorm1d(4))
    amp.deinitialize()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    amp.initialize(model, optimizer, opt_level="O1", half_dtype="float16", verbosity=0, loss_scale="dynamic")
    before = values(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((8, 4), math.inf)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert are_same(values(model), before)


def test_of_a_critic_in_the_skipped_step_of_its_generator_are_finite() -> None:
    torch.manual_seed(0)
    generator = nn.Linear(4, 4)
    critic = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_generator, of_critic = (torch.optim.SGD(each.parameters(), 0.01) for each in (generator, critic))
    amp.initialize([generator, critic], [of_generator, of_critic], half_dtype="float16", init_scale=16.0, verbosity=0)
    for factor in (1.0, math.inf):
        of_critic.zero_grad()
        with amp.scale_loss(critic(torch.randn(8, 4)).float().mean(), of_critic) as scaled_loss:
            scaled_loss.backward()
        of_critic.step()
        before = values(critic)
        of_generator.zero_grad()
        with amp.scale_loss(critic(generator(torch.randn(8, 4) * factor)).float().mean(), of_generator) as scaled_loss:
            scaled_loss.backward()
        of_generator.step()
        assert amp.step_was_skipped(of_generator) == (factor == math.inf)
    assert are_same([each for each in values(critic) if each.is_floating_point()], before[:2])


class Holding(nn.Module):
    """Holds as a buffer what its user holds as well."""

    held: Tensor

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), of
        self.register_buffer("held", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.held = {"input": x, "output": y.detach(), "weight": self.layer.weight.detach()}[self.of]
        return y


@EACH_LEVEL
@pytest.mark.parametrize("of", ["input", "output", "weight"])
def test_what_buffers_share_with_the_user_is_left_alone(level: str, of: str) -> None:
    model, optimizer = started(level, Holding(of))
    part = model[1]
    assert isinstance(part, Holding)
    weight = part.layer.weight.detach().clone()
    x = torch.full((4, 4), 2.0)
    for factor in (1.0, math.inf):
        output = part(x)
        shown = output.detach().clone()
        with amp.scale_loss(model(torch.ones(4, 4)).float().square().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        if factor == math.inf:
            weight = part.layer.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(output.detach(), shown)
    assert torch.equal(part.layer.weight.detach(), weight)
    assert torch.equal(x, torch.full((4, 4), 2.0))


def test_what_the_user_writes_between_forward_passes_stays() -> None:
    model, optimizer = started("O1", nn.BatchNorm1d(4))
    run(model, optimizer, 1.0)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(model, optimizer, 1.0)
    model.eval()
    model(torch.randn(8, 4))
    model.train()
    model.load_state_dict(best)
    run(model, optimizer, math.inf)
    assert amp.step_was_skipped(optimizer)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, best[name])


def test_of_parts_that_were_added_later() -> None:
    model, optimizer = started("O1", nn.BatchNorm1d(4))
    run(model, optimizer, 1.0)
    assert isinstance(model, nn.Sequential)
    model.insert(0, nn.BatchNorm1d(4))
    run(model, optimizer, 1.0)
    before = values(model)
    run(model, optimizer, math.inf)
    assert are_same(values(model), before)


def test_of_a_part_that_is_called_alone_are_not_set_to_old_values() -> None:
    model, optimizer = started("O1", nn.BatchNorm1d(4))
    run(model, optimizer, 1.0)
    assert isinstance(model, nn.Sequential)
    for factor in (1.0, 1.0, math.inf):
        before = values(model)
        hidden = model[1](model[0](torch.randn(8, 4)))
        with amp.scale_loss(model[2](hidden).float().square().mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert amp.step_was_skipped(optimizer)
    assert values(model)[2] == before[2] + 1


def test_of_parts_called_alone_that_overflow_are_those_of_the_step_before() -> None:
    model, optimizer = started("O1", nn.BatchNorm1d(4))
    assert isinstance(model, nn.Sequential)
    for factor in (1.0, 1.0, math.inf):
        before = values(model)
        hidden = model[1](model[0](torch.randn(8, 4) * factor))
        with amp.scale_loss(model[2](hidden).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert amp.step_was_skipped(optimizer)
    assert are_same(values(model)[:2], before[:2])


def test_of_a_teacher_are_those_of_the_step_before() -> None:
    model, optimizer = started("O1", nn.Identity())
    amp.deinitialize()
    teacher = nn.BatchNorm1d(4)
    amp.initialize([model, teacher], optimizer, half_dtype="float16", init_scale=16.0, verbosity=0)
    for factor in (1.0, 1.0, math.inf):
        before = values(teacher)
        with amp.scale_loss(model(teacher(torch.randn(8, 4) * factor)).float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_same(values(teacher), before)


class TestStepsThatTheHostJudgesLate:
    """As with a fused optimizer on a GPU: the buffers are restored once the host knows that a step was skipped."""

    @staticmethod
    def kept(model: nn.Module) -> tuple[KeptBuffers, Callable[[], BuffersBefore]]:
        buffers = KeptBuffers()
        buffers.add(model)
        return buffers, lambda: buffers.before_step(lambda _: True, lambda _: False)

    @staticmethod
    def forward(buffers: KeptBuffers, model: nn.Module, factor: float) -> None:
        buffers.before_forward(model)
        model(torch.randn(8, 4) * factor)
        buffers.after_forward(model)

    def test_two_that_were_skipped_one_after_the_other(self) -> None:
        model = nn.BatchNorm1d(4)
        buffers, before_step = self.kept(model)
        self.forward(buffers, model, 1.0)
        before_step()
        wanted = values(model)
        self.forward(buffers, model, math.inf)
        first = before_step()
        self.forward(buffers, model, math.inf)
        second = before_step()
        first.restore()
        second.restore()
        assert are_same(values(model), wanted)

    def test_copies_that_a_step_may_need_are_not_written_to(self) -> None:
        model = nn.BatchNorm1d(4)
        buffers, before_step = self.kept(model)
        wanted = values(model)
        self.forward(buffers, model, math.inf)
        first = before_step()
        self.forward(buffers, model, 1.0)
        first.restore()
        assert are_same(values(model), wanted)


def test_nothing_keeps_an_optimizer_alive_after_a_step_with_a_closure() -> None:
    def trained() -> weakref.ref[torch.optim.Optimizer]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        amp.initialize(model, optimizer, half_dtype="float16", verbosity=0, loss_scale="dynamic")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            return loss

        optimizer.step(closure)
        return weakref.ref(optimizer)

    reference = trained()
    gc.collect()
    assert reference() is None


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
        self.grow(4)

    def grow(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(float(length)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.grow(len(x))
        return x + self.table[: len(x), None]


class TestWhatIsNoStatisticOfANorm:
    """Comes back only if it is not finite: nobody knows who wrote to it, and why."""

    def test_statistics_of_a_norm_of_the_users_own(self) -> None:
        model, optimizer = started("O1", OwnNorm())
        for _ in range(3):
            run(model, optimizer, 1.0)
        before = values(model)
        with amp.scale_loss(model(torch.randn(8, 4)).float().mean() * math.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        after = values(model)
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert are_same(values(model), after)
        assert not are_same(after, before)
        run(model, optimizer, 1.0)
        before = values(model)
        run(model, optimizer, math.inf)
        assert are_same(values(model), before)

    def test_a_table_that_has_grown(self) -> None:
        model, optimizer = started("O1", Growing())
        for length in (4, 6):
            with amp.scale_loss(model(torch.randn(length, 4)).float().mean() * math.inf, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert amp.step_was_skipped(optimizer)
        model(torch.randn(6, 4))

    def test_what_another_graph_needs_is_not_written_to(self) -> None:
        layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
        layer.register_buffer("mask", torch.ones(4))
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (layer, other)]
        amp.initialize([layer, other], optimizers, half_dtype="float16", init_scale=16.0, verbosity=0, num_losses=2)
        shared = layer(torch.ones(2, 4)).float() * layer.mask
        kept = other(torch.ones(2, 4)).float() * layer.mask
        with amp.scale_loss(shared.sum() * math.inf, optimizers[0]) as scaled_loss:
            scaled_loss.backward()
        optimizers[0].step()
        assert amp.step_was_skipped(optimizers[0])
        with amp.scale_loss(kept.sum(), optimizers[1], loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizers[1].step()

    def test_buffers_of_a_functional_call(self) -> None:
        model, optimizer = started("O1", nn.BatchNorm1d(4))
        run(model, optimizer, 1.0)
        before = values(model)
        mine = {name: torch.full_like(buffer, 9) for name, buffer in model.named_buffers()}
        loss = torch.func.functional_call(model, {**dict(model.named_parameters()), **mine}, torch.randn(8, 4))
        with amp.scale_loss(loss.float().mean() * math.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert are_same(values(model), before)


def test_of_a_model_of_two_optimizers_one_of_which_steps_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    first, second = (torch.optim.SGD(model[part].parameters(), 0.01) for part in (0, 2))
    amp.initialize(model, [first, second], half_dtype="float16", init_scale=16.0, verbosity=0, num_losses=2)
    with amp.scale_loss(model(torch.randn(8, 4)).float().mean(), first) as scaled_loss:
        scaled_loss.backward()
    second.zero_grad()
    with amp.scale_loss(model(torch.randn(8, 4) * math.inf).float().mean(), second, loss_id=1) as scaled_loss:
        torch.autograd.backward(scaled_loss, inputs=list(model[2].parameters()))
    first.step()
    second.step()
    assert amp.step_was_skipped(second)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("factors", [(math.inf,), (math.inf, 1.0), (1.0, math.inf)], ids=str)
def test_statistics_whose_writes_torch_counts(
    kind: type[nn.Module], compiles: bool, factors: tuple[float, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), kind(3, track_running_stats=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, half_dtype="float16", verbosity=0, init_scale=16.0)
    called = torch.compile(model, backend="aot_eager") if compiles else model
    for _ in range(2):
        before = values(model)
        for factor in factors:
            with amp.scale_loss(called(torch.randn(8, 3, 4) * factor).float().square().mean(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert amp.step_was_skipped(optimizer)
        assert are_same(values(model), before)
        with amp.scale_loss(called(torch.randn(8, 3, 4)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not are_same(values(model), before)

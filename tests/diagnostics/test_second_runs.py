"""Second runs of skipped steps: they find what a watch of the first run finds, and change nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_same_state, together
from optimizers import SGD, backward
from planted_overflows import Amplified, traced, watch_each_step, with_gradient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from workers import Workers

from ampatch import amp
from ampatch.diagnostics.overflow.tracer import FINITE_AGAIN, IS_ARMED, OverflowTracer
from ampatch.runtime import runtime

pytestmark = pytest.mark.filterwarnings("ignore:the loss of a:ampatch.errors.AmpWarning")

EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])


class Around(nn.Module):
    """A function of the hidden values between two layers."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def convolved(model: Any, x: Tensor) -> Tensor:
    return Amplified.apply(model.conv(x[:, None])[:, 0], 2e4)


def used_twice(model: Any, x: Tensor) -> Tensor:
    return model.shared(model.shared(x) * 1e5)


def recomputed(model: Any, x: Tensor) -> Tensor:
    def inner(hidden: Tensor) -> Tensor:
        return model.inner(hidden * 100) @ model.inner(hidden * 1000).T @ hidden

    return checkpoint(inner, x, use_reentrant=False)


def in_place(model: Any, x: Tensor) -> Tensor:
    hidden = model.last(x)
    hidden *= 1e6
    return hidden


def normed(model: Any, x: Tensor) -> Tensor:
    return model.norm(F.dropout(x) * 1e3) @ torch.full((8, 8), 1e4)


PLANTED: dict[str, Callable[[], nn.Module]] = {
    "a conv's backward": lambda: Around(convolved, conv=nn.Conv1d(1, 1, 3, padding=1)),
    "a shared module's second use": lambda: Around(used_twice, shared=nn.Linear(8, 8)),
    "under checkpointing": lambda: Around(recomputed, inner=nn.Linear(8, 8)),
    "a custom autograd function": lambda: Around(lambda _, x: Amplified.apply(x, 1e9)),
    "in place": lambda: Around(in_place),
    "behind dropout and batch norm": lambda: Around(normed, norm=nn.BatchNorm1d(8)),
    "a function": lambda: Around(lambda _, x: torch.log(x * 0)),
    "an argument of a function": lambda: Around(lambda model, x: model.last(x.float() * 1e6)),
}


def batches(count: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(16, 8, generator=generator)


def begun(model: nn.Module, level: str = "O1", on_overflow: Any = "trace", **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    chosen = {"half_dtype": "float16", "verbosity": 0, "init_scale": 64.0, **options}
    amp.initialize(model, optimizer, opt_level=level, on_overflow=on_overflow, **chosen)
    return optimizer


def mean(output: Tensor) -> Tensor:
    return output.float().mean()


def step(model: nn.Module, optimizer: Any, *inputs: Tensor, loss_of: Callable[[Any], Tensor] = mean) -> None:
    optimizer.zero_grad()
    for x in inputs:
        backward(loss_of(model(x)), optimizer)
    optimizer.step()


def told_of(
    model: nn.Module, level: str = "O1", *inputs: Tensor, loss_of: Callable[[Any], Tensor] = mean, **options: Any
) -> Any:
    """Returns the trace of a step, of one batch unless others are given."""
    events: list[Any] = []
    optimizer = begun(model, level, ("trace", events.append), **options)
    step(model, optimizer, *(inputs or batches(1)), loss_of=loss_of)
    amp.deinitialize()
    (event,) = events
    return event.trace


def is_skipped(model: nn.Module, *inputs: Tensor, **options: Any) -> bool:
    """Whether a step is skipped, of one batch unless others are given."""
    optimizer = begun(model, **options)
    step(model, optimizer, *(inputs or batches(1)))
    return amp.step_was_skipped(optimizer)


@EACH_LEVEL
@pytest.mark.parametrize("planted", PLANTED)
def test_a_second_run_finds_what_a_watch_of_the_first_run_finds(
    level: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told_of(PLANTED[planted](), level)
    assert found.direction in ("forward", "backward")
    watch_each_step(monkeypatch)
    seen = told_of(PLANTED[planted](), level)
    if found.max_loss_scale is not None and seen.max_loss_scale is not None:
        assert found.max_loss_scale <= seen.max_loss_scale
    # Only a second run tries remedies; a watch knows of one operator.
    found, seen = (replace(each, max_loss_scale=None, remedies=(), cast_lists=None) for each in (found, seen))
    assert found == seen


def test_hooks_that_ran_again_are_told_and_nothing_is_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        sys.stdout.write("forward")
        return x * 1e6

    model = Around(function)
    calls: list[str] = []
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    trace = told_of(model, "O1")
    assert trace.notes == ("hooks of first ran again with the forward pass",)
    assert len(calls) > 1
    assert capsys.readouterr().out.count("forward") == 1


def test_the_use_of_a_shared_module_is_told() -> None:
    class Block(nn.Linear):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return super().forward(x) * factor

    model = Around(lambda model, x: model.block(model.block(x, 1.0), 1e6), block=Block(8, 8))
    trace = told_of(model)
    assert trace.module == "block"
    assert trace.notes == ("in use 2 of this module in the forward pass",)


class Writing(nn.Module):
    """Writes in its forward to everything that a forward can write to, and overflows at the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.slow = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.slow.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))
        self.calls, self.bank, self.generator = 0, [torch.zeros(8)], np.random.default_rng(0)
        self.batches = iter([1.0, 1.0, 1e6, 1.0, 1.0, 1.0] * 20)
        self.limit = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, node: Any = None) -> Tensor:
        self.calls += 1
        self.bank.append(x.detach().mean(0) + self.bank[-1])
        factor = next(self.batches) if node is None else node.factor
        with torch.no_grad():
            self.limit.mul_(0.9)
            self.seen += x[0]
            self.seen[1:].view(7).add_(1)
            self.slow.bias.mul_(0.5)
        self.slow.weight.data = self.slow.weight.data * 0.9 + self.first.weight.data * 0.1
        noise = float(self.generator.normal()) + self.calls + float(self.bank[-1].sum())
        x.data.mul_(0.9)
        return self.last(self.slow(self.first(x) * factor)) * self.limit * noise / factor


@EACH_LEVEL
def test_a_second_run_restores_all_that_a_forward_pass_writes_to(level: str) -> None:
    def outcome(on_overflow: Any) -> Any:
        optimizer = begun(model := Writing(), level, on_overflow)
        inputs = list(batches(5))
        for x in inputs:
            step(model, optimizer, x)
        skipped = amp.skipped_steps(optimizer)
        amp.deinitialize()
        state = dict(model.named_parameters()), dict(model.named_buffers()), model.bank, inputs
        return skipped, model.calls, next(model.batches), float(model.generator.normal()), state

    *told, state = outcome("trace")
    *others, expected = outcome("log")
    assert told == others
    assert told[0] == 1
    assert_same_state(state, expected)


def test_arguments_may_contain_themselves() -> None:
    class Node:
        factor = 1e6

    @dataclass
    class Tree:
        factor: float
        children: list[Any]

    tree = Tree(1e6, [])
    tree.children += [tree, {"parent": tree}]
    events: list[Any] = []
    optimizer = begun(model := Writing(), "O1", ("trace", events.append))
    backward(model(torch.ones(4, 8), tree).float().sum(), optimizer)
    optimizer.step()
    assert events[0].trace.function == "torch.Tensor.mul"


class TestRemedies:
    def test_are_tried_on_all_forward_passes_of_the_step(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            if len(x) == 15:
                return torch.baddbmm(x[None], x[None] * 3e2, x[None, :8] * 3e2)[0] / 1e6
            return torch.matmul(x * 3e2, x[:8] * 3e2) / 1e6

        first, second, _ = batches()
        inputs = first, second[:15]
        trace = told_of(Around(function), "O1", *inputs, init_scale=1.0)
        skipped = is_skipped(Around(function), *inputs, init_scale=1.0, cast_lists=trace.cast_lists)
        assert trace.remedies[0].startswith("(tried) ") is not skipped

    def test_an_overflow_in_a_forward_pass_is_told_before_one_in_a_backward_pass(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            return Amplified.apply(x, 1e9) if len(x) == 15 else x * 1e6

        first, second, _ = batches()
        trace = told_of(Around(function), "O1", first, second[:15])
        assert trace.direction == "forward"
        assert trace.notes == ("in forward pass 1 of the 2 before this step",)

    def test_a_function_that_equals_another_has_its_own_name(self) -> None:
        trace = told_of(Around(lambda _, x: torch.mm(x * 3e2, x[:8] * 3e2) / 1e6))
        assert trace.function == "torch.mm"  # which equals torch.spmm
        assert "mm" in trace.cast_lists["blacklist"]["*"]

    def test_remedies_under_a_static_scale_are_tried_in_the_forward_pass(self) -> None:
        model = Around(lambda _, x: torch.log(x * 0 + 1e-8) * 1e-3)
        options = {"loss_of": lambda y: y.float().pow(2).mean(), "loss_scale": 1024.0, "check_finite": True}
        trace = told_of(model, **options)  # the gradient of the loss is NaN
        assert trace.remedies[0].startswith("(tried in the forward pass) ")

    def test_the_remedy_for_a_listed_function_in_torchs_own_python_helps(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            return torch.einsum("bl,kl->bk", x * 300, x * 300)[:, :8] / 1e6

        trace = told_of(Around(function))
        assert trace.function == "torch.einsum"
        assert not is_skipped(Around(function), cast_lists=trace.cast_lists)

    def test_the_remedy_for_a_function_that_writes_to_its_argument_helps(self) -> None:
        trace = told_of(Around(in_place))
        assert trace.remedies[0].startswith("(tried) this function in float32")
        assert trace.cast_lists == {"blacklist": {"*": ["linear"]}}  # whose result it writes to
        assert not is_skipped(Around(in_place), cast_lists=trace.cast_lists)

    def test_a_remedy_names_no_function_that_need_not_change(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            return torch.log((x * 0 + 1) * 1e-8) * 1e-3  # 0 in float16

        trace = told_of(Around(function))
        assert trace.function == "torch.log"
        assert trace.cast_lists == {"blacklist": {"*": ["mul"]}}
        assert not is_skipped(Around(function), cast_lists=trace.cast_lists)

    def test_a_remedy_is_not_enough_where_no_list_reaches(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (x.half() * 6e4 * 100) / 1e6

        trace = told_of(Around(function))
        assert trace.function == "torch.Tensor.mul"
        assert trace.remedies[0].startswith("(tried, and not enough) ")
        assert is_skipped(Around(function), cast_lists=trace.cast_lists)

    def test_no_loss_scale_is_promised_at_which_the_step_overflows_as_well(self) -> None:
        # A gradient that does not depend on the incoming one, and so on no loss scale.
        constant = with_gradient(lambda grad: torch.full_like(grad, 6e4) * 30)
        trace = told_of(Around(lambda _, x: constant(x)))
        assert trace.max_loss_scale is None
        assert trace.remedies[0].startswith("no loss scale: at much lower ones gradients overflow as well.")

    def test_the_whole_step_is_finite_at_the_promised_loss_scale(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:  # the second gradient is greater than the first
            return Amplified.apply(Amplified.apply(x, 100.0), 3e4)

        trace = told_of(Around(function), init_scale=4096.0)
        assert not is_skipped(Around(function), init_scale=trace.max_loss_scale)


class TestSideEffects:
    @EACH_LEVEL
    @pytest.mark.parametrize("planted", [*PLANTED, "the loss"])
    def test_training_goes_on_with_the_same_bits(self, level: str, planted: str) -> None:
        seen = []
        for on_overflow in (lambda _: None, ("trace", lambda _: None)):
            model = nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(8), PLANTED.get(planted, lambda: nn.Linear(8, 8))())
            optimizer = begun(model, level, on_overflow, init_scale=2.0**24 if planted == "the loss" else 64.0)
            for x in batches(4):
                step(model, optimizer, x)
            seen.append(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                    "amp": amp.state_dict(),
                    "gradients": [each.grad for each in amp.master_params(optimizer)],
                    "skipped": amp.skipped_steps(optimizer),
                }
            )
            amp.deinitialize()
        assert seen[0]["skipped"]
        assert_same_state(*seen)

    @pytest.mark.filterwarnings("ignore:a hook of a leaf")
    def test_no_gradient_is_written_and_no_hook_of_its_accumulation_runs(self) -> None:
        model = PLANTED["a function"]()
        optimizer = begun(model)
        ran: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(ran.append)
        x = next(batches(1)).requires_grad_()
        step(model, optimizer, x)
        assert amp.step_was_skipped(optimizer)
        assert len(ran) == 4
        assert x.grad is not None

    @pytest.mark.parametrize("is_transform", [False, True])
    def test_a_batched_backward_pass_runs_as_without_a_trace_and_is_not_noted(self, is_transform: bool) -> None:
        def slopes_of(model: nn.Module) -> Tensor:
            def slopes(root: Tensor, **options: Any) -> Tensor:
                return torch.autograd.grad(output, x, root, create_graph=True, **options)[0]

            x = torch.arange(8.0).requires_grad_()
            output = model(x)
            each = torch.eye(8, dtype=output.dtype)
            return torch.func.vmap(slopes)(each) if is_transform else slopes(each, is_grads_batched=True)

        found = []
        for on_overflow in ("log", "trace"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            optimizer = begun(model, on_overflow=on_overflow)
            backward(slopes_of(model).float().pow(2).mean(), optimizer)
            if on_overflow == "trace":
                tracer: Any = runtime.live.losses.overflows.tracer
                assert not any(each.arrived for each in tracer._noted)
            optimizer.step()
            found.append({name: each.clone() for name, each in model.state_dict().items()})
            amp.deinitialize()
        assert_same_state(*found)

    def test_no_graph_and_no_input_is_kept_after_the_step(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = begun(model)
        step(model, optimizer, *batches())
        tracer: Any = runtime.live.losses.overflows.tracer
        old = [*tracer._noted]
        model(next(batches(1)))
        assert len(tracer._noted) == 1
        assert tracer._noted[0] not in old

    @pytest.mark.filterwarnings("ignore:this SGD:ampatch.errors.AmpWarning")
    @pytest.mark.parametrize("is_adopted", [False, True])
    def test_notes_of_forward_passes_without_a_step_of_amp_are_dropped(self, is_adopted: bool) -> None:
        model, frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize([model, frozen], [optimizer] if is_adopted else [], half_dtype="float16", on_overflow="trace")
        for x in batches(5):
            optimizer.zero_grad()
            frozen(model(x)).float().mean().backward()
            optimizer.step()
        tracer: Any = runtime.live.losses.overflows.tracer
        assert len(tracer._noted) == 2


class TestModels:
    """What models do in and around their forward passes, and a second run has to do as well."""

    def test_a_reentrant_checkpoint_runs_again(self) -> None:
        model = Around(lambda self, x: checkpoint(lambda h: Amplified.apply(self.last(h), 1e9), x, use_reentrant=True))
        assert told_of(model).function == "Amplified"

    def test_a_weight_may_get_the_gradient_of_the_output(self) -> None:
        class Offsets(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 8)
                self.offsets = nn.Parameter(torch.zeros(16, 8))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(100 * x) + self.offsets

        trace = told_of(Offsets(), init_scale=2.0**16, loss_of=lambda output: (0.5 * output).sum())
        assert (trace.direction, trace.function) == ("backward", "torch.nn.functional.linear")

    def test_an_output_may_lead_to_another(self) -> None:
        class Returning(Around):
            def forward(self, x: Tensor) -> Any:
                hidden = self.first(x)
                return {"all": (hidden, self.last(hidden)), "last": self.function(self, hidden)}

        model = Returning(lambda _, x: Amplified.apply(x, 1e9))
        trace = told_of(model, loss_of=lambda y: sum(mean(each) for each in (*y["all"], y["last"])))
        assert trace.function == "Amplified"

    def test_an_expanded_buffer_stays(self) -> None:
        model = Around(lambda self, x: Amplified.apply(x + self.kept, 1e9))
        model.register_buffer("kept", torch.ones(1).expand(8))
        assert told_of(model).direction == "backward"
        assert model.kept.tolist() == [1.0] * 8

    def test_pythons_random_numbers_go_on_as_without_a_second_run(self) -> None:
        def function(_: nn.Module, x: Tensor) -> Tensor:
            return Amplified.apply(x, 1e9 * (1 + random.random()))

        drawn = []
        for on_overflow in (lambda _: None, "trace"):
            random.seed(0)
            assert is_skipped(Around(function), on_overflow=on_overflow)
            drawn.append(random.random())
            amp.deinitialize()
        assert drawn[0] == drawn[1]

    def test_two_optimizers_of_one_model_are_traced(self) -> None:
        model = Around(lambda _, x: Amplified.apply(x, 1e9))
        optimizers = [SGD(each.parameters()) for each in (model.first, model.last)]
        with traced(model, optimizers) as events:
            backward(mean(model(next(batches(1)))), optimizers)
            for optimizer in optimizers:
                optimizer.step()
        assert events[0].trace.function == "Amplified"

    def test_a_report_does_not_count_the_second_run(self) -> None:
        counts = []
        for on_overflow in (lambda _: None, "trace"):
            optimizer = begun(model := Around(lambda _, x: Amplified.apply(x, 1e9)), "O1", on_overflow)
            with amp.report() as report:
                step(model, optimizer, *batches(1))
            amp.deinitialize()
            counts.append({row["name"]: row["calls"] for row in report.to_dict()["functions"]})
        assert counts[0] == counts[1]

    def test_a_model_without_users_code_has_the_line_that_calls_it(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        optimizer = SGD(model.parameters())
        with traced(model, optimizer) as events:
            nn.init.constant_(model[0].weight, 1e5)
            output = model(next(batches(1)))  # called here
            backward(output.float().square().mean(), optimizer)
            optimizer.step()
        assert events[0].trace.source.endswith("# called here")


class TestUnknownCauses:
    """A cause that a second run does not show is looked for in the next steps."""

    @staticmethod
    def notes_of(function: Callable[[nn.Module, Tensor], Tensor], after: Callable[[Tensor], object]) -> tuple[str, ...]:
        events: list[Any] = []
        model = Around(function)
        optimizer = begun(model, "O1", ("trace", events.append))
        for x in batches(2):
            optimizer.zero_grad()
            backward(mean(model(x)), optimizer)
            after(x)
            optimizer.step()
        first, second = (event.trace for event in events)
        assert first.direction == "unknown"
        assert first.notes[-1] == IS_ARMED
        assert second.function in ("Amplified", "torch.log")
        return first.notes[:-1]

    def test_arguments_that_were_written_to_are_told(self) -> None:
        notes = self.notes_of(lambda _, x: torch.log(x * 0), lambda x: x.zero_())
        assert notes == ("a forward pass could not run again: its arguments were written to since",)

    def test_a_forward_pass_that_is_finite_the_second_time_is_told(self) -> None:
        drawn = [0.0, 1.0, 0.0]
        notes = self.notes_of(lambda _, x: Amplified.apply(x, 1.0 if drawn.pop(0) else 1e9), lambda _: None)
        assert notes == (FINITE_AGAIN,)

    def test_a_forward_pass_that_cannot_run_twice_is_told(self) -> None:
        left: list[float] = [1e9]

        def function(_: nn.Module, x: Tensor) -> Tensor:
            return Amplified.apply(x, left.pop())

        events: list[Any] = []
        optimizer = begun(model := Around(function), "O1", ("trace", events.append))
        for x in batches(2):
            step(model, optimizer, x)
            left[:] = [1e9]
        assert events[0].trace.notes[0] == "a forward pass could not run again: IndexError: pop from empty list"
        assert events[1].trace.function == "Amplified"

    def test_a_forward_pass_in_another_thread_is_told(self) -> None:
        events: list[Any] = []
        model = Around(lambda _, x: torch.log(x * 0))
        optimizer = begun(model, "O1", ("trace", events.append))
        made: list[Tensor] = []
        together([lambda: made.append(model(next(batches(1))))])
        backward(mean(made[0]), optimizer)
        optimizer.step()
        assert events[0].trace.notes[0] == "a forward pass could not run again: it ran in another thread"


def among_ranks(_: nn.Module, x: Tensor) -> Tensor:
    greatest = x.detach().abs().max()
    torch.distributed.all_reduce(greatest)  # waits for the other rank, in each run
    return Amplified.apply(x / greatest, 1e9 if len(x) == 15 else 1.0)


def traced_on_two_ranks(level: str) -> tuple[list[str], dict[str, Tensor]]:
    rank = torch.distributed.get_rank()
    found: list[str] = []
    model = nn.Sequential(nn.BatchNorm1d(8), Around(among_ranks))
    optimizer = begun(model, level, ("trace", lambda event: found.append(event.trace.function or event.trace.notes[0])))
    wrapper = DistributedDataParallel(model)
    for number, x in enumerate(batches()):
        step(wrapper, optimizer, x[: 15 if rank == 1 and number == 1 else 16] + rank)
    amp.deinitialize()
    return found, {name: value.detach() for name, value in model.named_parameters()}


@EACH_LEVEL
def test_ranks_run_their_forward_passes_again_together(two: Workers, level: str) -> None:
    first, second = two.run(traced_on_two_ranks, level)
    assert second[0] == ["Amplified"]
    assert first[0] == [FINITE_AGAIN]
    assert_same_state(first[1], second[1])


def explained_on_two_ranks(late: bool) -> tuple[int, bool]:
    """Trains with a collective in the forward, and a loss that is NaN on one rank only."""
    rank, group = dist.get_rank(), Around(synchronised)
    optimizer = begun(group, "O1", "explain", verbosity=1)
    if late:  # begun before other ranks were known
        session = runtime.live
        session.trace_with(OverflowTracer(session, is_asked=False))
    for x in batches(4):
        step(group, optimizer, x, loss_of=lambda y: mean(y) * (float("nan") if rank else 1.0))
    skipped = amp.skipped_steps(optimizer)
    amp.deinitialize()
    return skipped, late


def synchronised(_: nn.Module, x: Tensor) -> Tensor:
    mean = x.detach().float().mean()
    dist.all_reduce(mean)
    return x - mean


@pytest.mark.parametrize("late", [False, True])
def test_ranks_explain_skips_only_if_asked(two: Workers, late: bool) -> None:
    assert two.run(explained_on_two_ranks, late) == [(0, late), (4, late)]


def test_a_users_file_may_have_the_name_of_a_standard_module(tmp_path: Any) -> None:
    file = tmp_path / "trace.py"
    file.write_text("import torch\n\ndef function(_, x):\n    return torch.log(x * 0)  # here\n", encoding="utf-8")
    names: dict[str, Any] = {"__name__": "trace"}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    assert told_of(Around(names["function"])).source == "return torch.log(x * 0)  # here"


def test_the_same_trace_again_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = begun(model := Around(lambda _, x: torch.log(x * 0)))
    for x in batches():
        step(model, optimizer, x)
    first, *others = (record.getMessage() for record in caplog.records if record.name == "ampatch")
    assert "First inf: in torch.log" in first
    assert [text.splitlines()[1:] for text in others] == [["  the trace is that of the step skipped before"]] * 2

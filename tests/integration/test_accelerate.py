"""Of `ampatch.integrations.accelerate`: whatever an Accelerator offers, amp is right in it, or says why it is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import small_nets
import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from helpers import assert_same_state, completed
from safetensors.torch import load_file
from small_nets import EACH_HALF, EACH_LEVEL, ENVIRONMENT, TORCHRUN, net, norm, types_computed_by, types_of, weights
from small_transformers import bert
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.integrations.accelerate import amp_log, prepare

X, Y = small_nets.X[:64], small_nets.Y[:64]
FLOAT16 = {"half_dtype": "float16", "init_scale": 1024.0}
PRECISION = "ACCELERATE_MIXED_PRECISION"
EXPLODING = {"half_dtype": "float16", "init_scale": 2.0**24}


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Iterator[None]:
    def methods() -> list[object]:
        names = ("backward", "clip_grad_norm_", "clip_grad_value_", "free_memory", "prepare_optimizer")
        return [AcceleratedOptimizer.step_was_skipped, *(getattr(Accelerator, name) for name in names)]

    before = methods()
    yield
    amp.deinitialize()  # of loops that these tests leave in the middle
    assert methods() == before
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def loader(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


class Run:
    """A loop as users of Accelerate write it, with its objects and what it saw."""

    def __init__(self, level: str | None = "O1", batch_size: int = 8, **given: Any) -> None:
        steps = given.pop("gradient_accumulation_steps", 1)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        self.raw = net()
        optimizer = adam(self.raw)
        objects = (self.raw, optimizer, loader(batch_size), StepLR(optimizer, 1, 0.99))
        if level is None:
            prepared = self.accelerator.prepare(*objects)
        else:
            prepared = prepare(self.accelerator, *objects, opt_level=level, **given)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.losses: list[float] = []
        self.skipped: list[bool] = []
        self.norms: list[float] = []

    def train(self, epochs: int = 1, max_norm: float | None = None) -> Run:
        for _ in range(epochs):
            for x, y in self.loader:
                self.step(x, y, max_norm)
        return self

    def step(self, x: Tensor, y: Tensor, max_norm: float | None = None) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm is not None:
                self.norms.append(accelerator.clip_grad_norm_(self.model.parameters(), max_norm).item())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if accelerator.sync_gradients:
            self.skipped.append(accelerator.optimizer_step_was_skipped)

    def state(self) -> dict[str, Any]:
        return {
            "model": weights(self.model),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "amp": amp.state_dict() if amp.is_on() else {},
        }


def grads_of(optimizer: Any) -> list[Tensor]:
    return [each.grad for each in amp.master_params(optimizer) if each.grad is not None]


class TestTraining:
    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.parametrize(
        "given",
        [{}, {"batch_size": 5, "gradient_accumulation_steps": 3}],  # 13 batches: the last step of an epoch has one only
        ids=["each batch", "accumulating"],
    )
    def test_a_run_with_clipping_learns_what_float32_learns(self, given: Any, level: str, half: torch.dtype) -> None:
        run = Run(level, half_dtype=half, init_scale=1024.0, **given)
        computed = types_computed_by(run.raw[0])
        run.train(epochs=3, max_norm=1.0)
        run.accelerator.free_memory()
        plain = Run(None, **given).train(epochs=3, max_norm=1.0)
        assert computed == {half}
        assert run.norms == pytest.approx(plain.norms, rel=0.05)
        assert run.losses == pytest.approx(plain.losses, rel=0.05)
        assert run.losses[-1] < run.losses[0]

    @pytest.mark.parametrize("given", [{"level": "O0"}, {"enabled": False}, {"enabled": "False"}], ids=str)
    def test_with_amp_off_the_bits_are_those_of_accelerate(self, given: dict[str, Any]) -> None:
        run = Run(**given).train()
        assert not amp.is_on()
        assert_same_state(run.state(), Run(None).train().state())

    def test_prepare_returns_what_accelerate_returns(self) -> None:
        accelerator, model = Accelerator(cpu=True), net()
        optimizer = adam(model)
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        results = prepare(accelerator, "anything", optimizer, loader(), model, scheduler, [], {})
        kinds = (str, AcceleratedOptimizer, DataLoader, nn.Sequential, AcceleratedScheduler, list, dict)
        assert all(isinstance(each, kind) for each, kind in zip(results, kinds, strict=True))
        assert results[1].optimizer is optimizer
        assert results[3] is model
        accelerator.prepare(net(1), loader())  # amp does not know them
        accelerator.free_memory()
        assert prepare(accelerator, model) is model

    def test_arguments_of_initialize_arrive(self) -> None:
        given = {"half_dtype": "float16", "init_scale": 8.0, "check_finite": True, "cast_model_outputs": "float16"}
        run = Run("O2", **given, keep_fp32=["2"])
        settings = amp.settings()
        assert settings == {**settings, **given, "opt_level": "O2", "keep_fp32": ["2"]}
        assert run.model(X).dtype is torch.float16
        assert types_of(run.raw[2]) == {torch.float32}

    @EACH_LEVEL
    def test_models_and_unwrapped_models_have_the_same_float32_outputs(self, level: str) -> None:
        run = Run(level, **FLOAT16)
        outputs = run.model(X)
        unwrapped = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        assert outputs.dtype is torch.float32
        assert torch.equal(unwrapped(X), outputs)

    def test_prepare_moves_a_model_to_its_device_before_initialize(self) -> None:
        class Moving(nn.Linear):
            def to(self, *args: Any, **kwargs: Any) -> Any:
                moves.append((args, amp.is_on()))
                return super().to(*args, **kwargs)

        moves: list[Any] = []
        accelerator, cpu = Accelerator(cpu=True), torch.device("cpu")
        prepare(accelerator, Moving(8, 3), opt_level="O2")
        assert moves == [((cpu,), False), ((cpu,), True)]  # the second is accelerate's, a no-op
        accelerator.free_memory()
        moves.clear()
        prepare(accelerator, Moving(8, 3), opt_level="O2", device_placement=[False])
        assert moves == []

    @pytest.mark.slow
    @EACH_LEVEL
    def test_a_compiled_model_learns_what_the_model_learns(self, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(level, **FLOAT16).train()
        run.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
        compiled = Run(level, **FLOAT16)
        assert isinstance(compiled.model, torch._dynamo.OptimizedModule)
        assert compiled.train().losses == pytest.approx(run.losses, rel=5e-3)
        torch._dynamo.reset()


class TestClipping:
    @EACH_LEVEL
    def test_unscaled_gradients_of_the_masters_are_clipped(self, level: str) -> None:
        run = Run(level, **FLOAT16)
        run.accelerator.backward(F.cross_entropy(run.model(X), Y))
        whole = run.accelerator.clip_grad_norm_(run.model.parameters(), 1e9)
        run.accelerator.clip_grad_value_(run.model.parameters(), 1e-3)
        grads = grads_of(run.optimizer)
        assert {each.dtype for each in grads} == {torch.float32}
        assert 0.1 < whole.item() < 10
        assert max(each.abs().max() for each in grads).item() == pytest.approx(1e-3, rel=1e-6)
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1e-4)
        assert norm(amp.master_params(run.optimizer)) == pytest.approx(1e-4, rel=1e-4)

    @EACH_LEVEL
    def test_clip_grad_norm_takes_whatever_accelerate_takes(self, level: str) -> None:
        run, other = Run(level, **FLOAT16), nn.Linear(2, 2)
        run.accelerator.backward(F.cross_entropy(run.model(X), Y))
        other.weight.grad = torch.ones(2, 2)
        masters = list(amp.master_params(run.optimizer))
        first = [each for each in masters if each.shape == (16, 8)]
        for given, clipped in (
            ([run.raw[0].weight], first),
            ((each for each in run.model.parameters()), masters),
            (amp.master_params(run.optimizer), masters),
            (other.parameters(), other.parameters()),
        ):
            expected = pytest.approx(norm(clipped), rel=1e-6)
            assert run.accelerator.clip_grad_norm_(given, 1e9).item() == expected


class TestSkippedSteps:
    @EACH_LEVEL
    def test_overflows_in_several_batches_of_a_step_lower_the_scale_once(self, level: str) -> None:
        run = Run(level, gradient_accumulation_steps=4, scale_window=2, **FLOAT16)
        before, first, scales = run.state()["model"], amp.get_loss_scale(), []
        for factor in (torch.inf, torch.inf, 1.0, torch.inf):
            run.step(X * factor, Y)
            scales.append(amp.get_loss_scale() / first)
        assert_same_state(run.state()["model"], before)
        for _ in range(8):  # two more steps
            run.step(X, Y)
            scales.append(amp.get_loss_scale() / first)
        assert run.skipped == [True, False, False]
        assert scales == [*(1.0,) * 3, *(0.5,) * 8, 1.0]

    @EACH_LEVEL
    @pytest.mark.parametrize("every", [1, 2])
    def test_wrapped_optimizers_and_schedulers_know_of_skipped_steps(self, every: int, level: str) -> None:
        run = Run(level, gradient_accumulation_steps=every, **EXPLODING).train(epochs=2)
        assert True in run.skipped
        assert run.skipped[-1] is False
        assert amp.skipped_steps(run.optimizer) == sum(run.skipped)
        assert run.scheduler.scheduler.last_epoch == run.skipped.count(False)
        assert run.optimizer.step_was_skipped is False

    def test_the_attribute_behind_step_was_skipped_tells_of_the_last_step_too(self) -> None:
        run = Run("O1", **FLOAT16)
        for factor, skipped in ((torch.inf, True), (1.0, False)):
            run.step(X * factor, Y)
            assert run.optimizer._is_overflow is skipped
        run.optimizer._is_overflow = True  # what a loop of the user writes holds
        assert run.optimizer.step_was_skipped
        run.optimizer._is_overflow = False
        run.accelerator.end_training()
        assert run.optimizer._is_overflow is False

    def test_trackers_get_the_loss_scale_and_the_number_of_skipped_steps(self) -> None:
        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker = "list", False, None

            def store_init_configuration(self, values: dict[str, Any]) -> None: ...

            def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
                logged.append((step, values))

        logged: list[Any] = []
        run = Run("O1", **FLOAT16)
        run.accelerator.trackers = [Tracker()]
        for step, factor in enumerate((1.0, torch.inf)):
            run.step(X * factor, Y)
            run.accelerator.log(amp_log(), step=step)
        assert logged == [
            (0, {"loss_scale": 1024.0, "skipped_steps": 0}),
            (1, {"loss_scale": 512.0, "skipped_steps": 1}),
        ]

    def test_where_there_is_no_loss_scale_there_is_nothing_to_log(self) -> None:
        assert amp_log() == {}
        Run("O1", half_dtype="bfloat16")
        assert amp_log() == {}


class TestCheckpoints:
    @EACH_HALF
    @EACH_LEVEL
    def test_a_resumed_run_ends_with_the_same_bits(self, level: str, half: torch.dtype, tmp_path: Path) -> None:
        given: dict[str, Any] = {"half_dtype": half, "scale_window": 2, "init_scale": 2.0**14}
        given |= {"gradient_accumulation_steps": 2}
        whole = Run(level, **given).train()
        whole.accelerator.save_state(tmp_path)
        whole.train(max_norm=1.0)
        expected = whole.state()
        whole.accelerator.free_memory()
        resumed = Run(level, **given)
        resumed.raw[0].weight.data.zero_()
        resumed.accelerator.load_state(tmp_path)
        resumed.train(max_norm=1.0)
        assert_same_state(resumed.state(), expected)
        if half is torch.float16:
            assert expected["amp"]["loss_scaler0"]["loss_scale"] > 2.0**14

    @pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
    def test_checkpoints_hold_the_bits_of_the_masters(self, safe: bool, tmp_path: Path) -> None:
        run = Run("O2", **FLOAT16).train()
        run.accelerator.save_state(tmp_path / "state", safe_serialization=safe)
        run.accelerator.save_model(run.model, tmp_path / "model", safe_serialization=safe)
        masters = [each.detach() for each in amp.master_params(run.optimizer)]
        assert types_of(run.model) == {torch.float16}
        read = load_file if safe else functools.partial(torch.load, weights_only=True)
        name = "model.safetensors" if safe else "pytorch_model.bin"
        for saved in (
            read(tmp_path / "state" / name),
            read(tmp_path / "model" / name),
            run.accelerator.get_state_dict(run.model),
            run.accelerator.unwrap_model(run.model).state_dict(),
        ):
            values = [saved[key] for key in run.model.state_dict()]
            assert all(map(torch.equal, values, masters))

    def test_a_checkpoint_loads_at_another_level_and_without_amp(self, tmp_path: Path) -> None:
        run = Run("O2", **FLOAT16).train()
        run.accelerator.save_state(tmp_path)
        expected = run.state()
        run.accelerator.free_memory()
        for level in ("O1", None):
            other = Run(level, **(FLOAT16 if level else {}))
            other.accelerator.load_state(tmp_path)
            for name in ("model", "optimizer", "scheduler"):
                assert_same_state(other.state()[name], expected[name])
            assert other.train().losses[-1] < 1.1
            other.accelerator.free_memory()

    def test_a_checkpoint_of_accelerates_fp16_has_its_scale_loaded(self, tmp_path: Path) -> None:
        plain = Run(None).train()
        plain.accelerator.save_state(tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        scaler.scale(torch.ones(()))
        torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
        plain.accelerator.free_memory()
        Run("O2", half_dtype="float16").accelerator.load_state(tmp_path)
        assert amp.get_loss_scale() == 512.0

    def test_loading_a_checkpoint_without_a_scale_warns_if_it_is_dynamic(self, tmp_path: Path) -> None:
        plain = Run(None)
        plain.accelerator.save_state(tmp_path)
        plain.accelerator.free_memory()
        run = Run("O1", half_dtype="float16")
        with pytest.warns(AmpWarning, match=r"there is no ampatch\.pt"):
            run.accelerator.load_state(tmp_path)
        run.accelerator.free_memory()
        Run("O1", half_dtype="bfloat16").accelerator.load_state(tmp_path)

    def test_save_pretrained_writes_float32_into_the_config(self, tmp_path: Path) -> None:
        accelerator, model = Accelerator(cpu=True), bert()
        model, _ = prepare(accelerator, model, adam(model), opt_level="O2", **FLOAT16)
        assert torch.float16 in types_of(model)
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(tmp_path, state_dict=state, save_function=accelerator.save)
        assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
        assert {each.dtype for each in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


class Hiding(torch.autograd.Function):
    """Runs a module in a backward pass of its own, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any, inputs: Any = None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.inputs = module, inputs
        return module(x).detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            given = {} if ctx.inputs is None else {"inputs": [x, *ctx.inputs]}
            torch.autograd.backward(iter([ctx.module(x)]), [grad], **given)  # type: ignore[arg-type]
        return x.grad, None, None


def in_many_checkpoints(module: Any, x: Tensor) -> Tensor:
    """Beyond 60 of them torch runs the backward passes in other threads."""
    run = module
    for _ in range(70):
        run = functools.partial(checkpoint, run, use_reentrant=True)
    return run(x)  # type: ignore[no-any-return]


# Ways to run a module whose parameters the graph of the loss does not show.
HIDING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "function": lambda module, x: Hiding.apply(x, module),  # type: ignore[no-untyped-call]
    "checkpoints in checkpoints": in_many_checkpoints,
}


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative distance between gradients."""
    pairs = zip(found, expected, strict=True)
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


class TestSeveralModels:
    @pytest.mark.parametrize("how", ["apart", "sharing a layer", "within amp.scale_loss"])
    def test_an_overflow_skips_the_steps_of_optimizers_whose_gradients_have_it(self, how: str) -> None:
        def backward(loss: Tensor, optimizer: Any) -> None:
            block = amp.scale_loss(loss, optimizer) if how == "within amp.scale_loss" else contextlib.nullcontext(loss)
            with block as given:
                accelerator.backward(given)

        accelerator, nets = Accelerator(cpu=True), [net(0), net(1)]
        is_shared = how == "sharing a layer"
        if is_shared:
            nets[1][2] = nets[0][2]
        first, second, of_first, of_second = prepare(accelerator, *nets, *map(adam, nets), **FLOAT16)
        backward(F.cross_entropy(first(X), Y) * torch.inf, of_first)
        of_first.step()
        if not is_shared:
            of_first.zero_grad()
            backward(F.cross_entropy(second(X), Y), of_second)
            assert 0 < max(each.abs().max().item() for each in grads_of(of_second)) < 1  # unscaled
        of_second.step()
        assert accelerator.optimizer_step_was_skipped
        assert (of_first.step_was_skipped, of_second.step_was_skipped) == (True, is_shared)

    @EACH_LEVEL
    @pytest.mark.parametrize("how", HIDING)
    def test_parameters_that_a_graph_hides_get_unscaled_gradients(self, how: str, level: str) -> None:
        accelerator, nets = Accelerator(cpu=True), [nn.Linear(8, 8), net(1)]
        plain = copy.deepcopy(nets)
        F.cross_entropy(plain[1](plain[0](X)), Y).backward()
        options = {**FLOAT16, "opt_level": level}
        first, second, _, of_second = prepare(accelerator, *nets, *map(adam, nets), **options)
        accelerator.backward(F.cross_entropy(HIDING[how](second, first(X)), Y))
        assert distance(grads_of(of_second), [each.grad for each in plain[1].parameters()]) < 0.1
        of_second.step()

    @pytest.mark.slow
    @EACH_LEVEL
    @pytest.mark.parametrize("how", HIDING)
    def test_hidden_leaves_that_no_optimizer_updates_get_unscaled_gradients(self, how: str, level: str) -> None:
        def run(hide: Callable[[Any, Tensor], Tensor], backward: Any, first: Any, shared: Any) -> list[Tensor]:
            frozen, extra = net(1), torch.full((3,), 0.5, requires_grad=True)
            for _ in range(2):  # gradients add up
                output = hide(lambda x: frozen(shared(x)) * extra, first(X))
                output = hide(lambda x: frozen(x) + extra, first(X)) + output
                backward(F.cross_entropy(output, Y) + shared.weight.sum() * 1e-3)
            return [each.grad for each in (*frozen.parameters(), extra, *shared.parameters())]

        first, shared = nn.Linear(8, 8), nn.Linear(8, 8)
        plain = copy.deepcopy((first, shared))
        expected = run(lambda module, x: module(x), Tensor.backward, *plain)
        accelerator = Accelerator(cpu=True)
        first, _ = prepare(accelerator, first, adam(first), opt_level=level, **FLOAT16)
        assert distance(run(HIDING[how], accelerator.backward, first, shared), expected) < 0.05

    def test_hidden_leaves_of_a_backward_pass_with_inputs_get_unscaled_gradients(self) -> None:
        run, frozen = Run("O1", **FLOAT16), net(1)
        first, weight = nn.Linear(8, 8), frozen[0].weight
        run.optimizer.add_param_group({"params": first.parameters()})
        loss = F.cross_entropy(Hiding.apply(first(X), frozen, [weight]), Y)  # type: ignore[no-untyped-call]
        run.accelerator.backward(loss, inputs=[first.weight])
        expected = torch.autograd.grad(F.cross_entropy(frozen(first(X)), Y), [weight, first.weight])
        assert frozen[2].weight.grad is None
        assert distance([weight.grad, first.weight.grad], expected) < 0.05

    def test_an_overflow_elsewhere_leaves_gradients_of_hidden_leaves_finite(self) -> None:
        run, frozen = Run("O1", **FLOAT16), net(1)
        factor = torch.ones(3, requires_grad=True)
        output = checkpoint(lambda x: frozen(x) * factor, run.raw(X) @ torch.ones(3, 8), use_reentrant=True)
        run.accelerator.backward(F.cross_entropy(output, Y) + run.raw[0].weight.sum() * torch.inf)
        expected = torch.autograd.grad(F.cross_entropy(frozen(run.raw(X) @ torch.ones(3, 8)) * factor, Y), factor)
        assert distance([factor.grad], expected) < 0.05

    def test_tensors_that_a_checkpoint_recomputes_are_freed_within_the_backward_pass(self) -> None:
        def note(x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                recomputed.append(weakref.ref(x))
            return x * 2

        def look(_: Tensor) -> None:
            alive.extend(each() is not None for each in recomputed)

        recomputed: list[Any] = []
        alive: list[bool] = []
        run = Run("O1", **FLOAT16)
        hidden = run.raw[0](X)
        hidden.register_hook(look)
        output = checkpoint(note, checkpoint(note, hidden, use_reentrant=True), use_reentrant=True)
        run.accelerator.backward(run.raw[2](output).square().mean())
        assert alive == [False, False]

    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_scaled_loss_after_the_end_of_its_block_raises(self, steps: int) -> None:
        run = Run("O1", gradient_accumulation_steps=steps, **FLOAT16)
        with amp.scale_loss(F.cross_entropy(run.model(X), Y), run.optimizer) as scaled_loss:
            pass
        with pytest.raises(UsageError, match=r"scaled twice.*leave amp.scale_loss out; or run the backward"):
            run.accelerator.backward(scaled_loss + run.raw[0].weight.sum())
        with amp.scale_loss(F.cross_entropy(run.model(X), Y), run.optimizer) as scaled_loss:
            run.accelerator.backward(scaled_loss)
        run.optimizer.step()


class TestBackward:
    def test_autocast_with_enabled_false_turns_casts_off(self) -> None:
        run = Run("O1", **FLOAT16)
        with run.accelerator.autocast():
            assert run.raw[0](X).dtype is torch.float16
            with run.accelerator.autocast(AutocastKwargs(enabled=False)):
                assert run.raw[0](X).dtype is torch.float32
            assert run.raw[0](X).dtype is torch.float16

    def test_backward_takes_the_arguments_of_torchs_backward(self) -> None:
        run = Run("O2", **FLOAT16)
        loss = F.cross_entropy(run.model(X), Y)
        run.accelerator.backward(loss, retain_graph=True, inputs=[run.raw[2].weight])
        assert run.raw[0].weight.grad is None
        run.accelerator.backward(loss)
        assert run.raw[0].weight.grad is not None

    def test_a_step_after_loss_backward_warns(self) -> None:
        run = Run("O1", **FLOAT16)
        F.cross_entropy(run.model(X), Y).backward()
        with pytest.warns(AmpWarning, match=r"told of.* Type: accelerator\.backward\(loss\) in place of loss"):
            run.optimizer.step()

    @EACH_LEVEL
    @pytest.mark.parametrize("first", ["torch's", "accelerate's"])
    def test_gradients_of_loss_backward_and_accelerator_backward_add_up(self, first: str, level: str) -> None:
        run, plain = Run(level, **FLOAT16), net()
        ways = [Tensor.backward, run.accelerator.backward]
        for part, backward in zip((X[:32], X[32:]), ways if first == "torch's" else ways[::-1], strict=True):
            backward(run.model(part).square().mean())
            plain(part).square().mean().backward()
        assert distance(grads_of(run.optimizer), [each.grad for each in plain.parameters()]) < 0.02
        run.optimizer.step()  # a warning would be an error here


class TestEvaluation:
    @EACH_HALF
    @EACH_LEVEL
    def test_a_model_without_an_optimizer_evaluates_in_half(self, level: str, half: torch.dtype) -> None:
        accelerator, raw = Accelerator(cpu=True), net()
        before, computed = weights(raw), types_computed_by(raw[0])
        model, batches = prepare(accelerator, raw, loader(), opt_level=level, half_dtype=half)
        with torch.inference_mode():
            outputs = [accelerator.gather_for_metrics(model(x)) for x, _ in batches]
        assert {each.dtype for each in outputs} == {torch.float32}
        assert computed == {half}
        accelerator.free_memory()
        assert_same_state(weights(raw), before)

    def test_a_model_for_evaluation_loads_and_saves_no_scale(self, tmp_path: Path) -> None:
        run = Run(None)
        run.accelerator.save_state(tmp_path)
        expected = run.raw.state_dict()
        accelerator = Accelerator(cpu=True)
        model = prepare(accelerator, net(1), opt_level="O2", half_dtype="float16")
        accelerator.load_state(tmp_path)  # a warning would be an error here
        accelerator.save_state(tmp_path / "again")
        assert not (tmp_path / "again" / "ampatch.pt").exists()
        accelerator.free_memory()
        assert torch.equal(model[0].weight, expected["0.weight"].half().float())

    def test_a_backward_pass_without_an_optimizer_runs_without_a_loss_scale(self) -> None:
        accelerator = Accelerator(cpu=True)
        model = prepare(accelerator, net(), half_dtype="float16")
        with pytest.warns(AmpWarning, match="without a loss scale.* Hand one to ampatch's prepare"):
            accelerator.backward(model(X).mean())
        accelerator.backward(model(X).mean())  # warns once
        assert 0 < model[0].weight.grad.norm() < 10


ENDINGS: dict[str, Callable[[Accelerator], object]] = {
    "free_memory": lambda accelerator: accelerator.free_memory(),
    "clear": lambda accelerator: accelerator.clear(),
    "end_training": lambda accelerator: accelerator.end_training(),
    "deinitialize": lambda _: amp.deinitialize(),
}


class TestEndings:
    @EACH_LEVEL
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_endings_leave_float32_weights_and_an_unpatched_torch(self, ending: str, level: str) -> None:
        run = Run(level, **FLOAT16).train()
        expected = run.state()["model"]
        ENDINGS[ending](run.accelerator)
        assert not amp.is_on()
        assert types_of(run.raw) == {torch.float32}
        assert_same_state(run.raw.state_dict(), expected)
        own = ("backward", "free_memory", "end_training", "autocast", "prepare_optimizer")
        assert not set(own) & set(vars(run.accelerator))
        assert not run.accelerator._save_model_state_pre_hook
        assert not run.accelerator._load_model_state_pre_hook
        ENDINGS[ending](run.accelerator)  # a second one is a no-op

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_methods_bound_before_the_end_are_accelerates_after_it(self, ending: str) -> None:
        run, plain = Run("O1", **FLOAT16), net()
        accelerator = run.accelerator
        backward, autocast, free_memory = accelerator.backward, accelerator.autocast, accelerator.free_memory
        trigger_sync, prepare_optimizer = accelerator.trigger_sync_in_backward, accelerator.prepare_optimizer
        ENDINGS[ending](accelerator)
        with autocast(), trigger_sync(run.raw):
            backward(F.cross_entropy(run.raw(X), Y))
        F.cross_entropy(plain(X), Y).backward()
        assert_same_state([each.grad for each in run.raw.parameters()], [each.grad for each in plain.parameters()])
        assert isinstance(prepare_optimizer(adam(plain)), AcceleratedOptimizer)
        free_memory()
        assert not amp.is_on()

    def test_methods_bound_before_the_end_work_after_the_next_prepare(self) -> None:
        run = Run("O1", **FLOAT16)
        backward, free_memory = run.accelerator.backward, run.accelerator.free_memory
        run.accelerator.free_memory()
        _, optimizer = prepare(run.accelerator, run.raw, adam(run.raw), **FLOAT16)
        optimizer.zero_grad()
        backward(F.cross_entropy(run.raw(X), Y))
        assert 0 < max(each.abs().max().item() for each in grads_of(optimizer)) < 1  # unscaled
        optimizer.step()  # it warns of gradients that were not scaled
        free_memory()
        assert not amp.is_on()

    def test_free_memory_frees_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def release(*given: Any) -> Any:
            was_on.append(amp.is_on())
            return original(*given)

        was_on: list[bool] = []
        original = accelerate.accelerator.release_memory
        monkeypatch.setattr(accelerate.accelerator, "release_memory", release)
        run = Run("O2", **FLOAT16).train()
        reference = weakref.ref(run.raw)
        objects = [run.model, run.optimizer]
        accelerator = run.accelerator
        del run
        gc.disable()
        try:
            assert accelerator.free_memory(*[objects.pop() for _ in range(2)]) == [None, None]
        finally:
            gc.enable()
        assert reference() is None
        assert was_on == [False]  # amp, which holds the model, ends before accelerate frees it

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
    def test_an_error_within_prepare_undoes_it(
        self, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            assert types_of(model) == {torch.bfloat16}
            raise error("in the midst")

        accelerator, model = Accelerator(cpu=True), net()
        monkeypatch.setattr(accelerator, "prepare_data_loader", fail)
        with pytest.raises(error, match="in the midst"):
            prepare(accelerator, loader(), model, adam(model), opt_level="O2")
        assert not amp.is_on()
        assert types_of(model) == {torch.float32}
        monkeypatch.undo()
        accelerator.free_memory()
        prepare(accelerator, loader(), model, adam(model), opt_level="O2")

    def test_training_goes_on_after_a_backward_pass_that_raised(self) -> None:
        run = Run("O2", **FLOAT16)

        def fail(_: Tensor) -> None:
            raise ValueError("in the midst")

        output = run.model(X)
        output.register_hook(fail)
        with pytest.raises(ValueError, match="in the midst"):
            run.accelerator.backward(F.cross_entropy(output, Y))
        assert_same_state(run.state()["model"], net().state_dict())
        assert run.train(epochs=3).losses[-1] < run.losses[0] / 2


@pytest.mark.slow
class TestProcesses:
    @pytest.mark.beyond_ci
    def test_two_ranks_train_as_in_float32_and_stay_equal(self, tmp_path: Path) -> None:
        script = str(Path(__file__).with_name("accelerate_ranks.py"))
        done = completed([sys.executable, *TORCHRUN, script, str(tmp_path)], cwd=tmp_path, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        results, others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
        assert results == others
        refused = results.pop("refused")
        assert set(refused) == {"clip_grad_norm_", "clip_grad_value_", "LocalSGD"}
        assert "clip where accelerator.sync_gradients is True" in refused["clip_grad_norm_"]
        assert results.pop("local")["scale"] == 1
        for level in ("O1", "O2"):
            overflow = results.pop(f"overflow {level}")
            assert overflow["skipped"] == [False, True, *[False] * 6]
            assert (overflow["scale"], overflow["epochs"]) == (512, 14)
        ways = {name.partition(" ")[0] for name in results}
        assert ways >= {"accumulated", "synchronised", "triggered", "adversarial-accumulated", "partly-trained-hidden"}
        for name, result in results.items():
            plain = results[f"{name.partition(' ')[0]} O0"]
            assert result["weights"] == pytest.approx(plain["weights"], rel=1e-2, abs=1e-3)
            assert (result["skipped"], result["epochs"]) == (plain["skipped"], plain["epochs"])

    @pytest.mark.once
    def test_amp_replaces_the_precision_of_a_config_file_of_accelerate_launch(self, tmp_path: Path) -> None:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        launch += ["--num_machines", "1", "--dynamo_backend", "no"]
        example = str(Path(__file__).parents[2] / "examples" / "accelerate_digits.py")
        config = tmp_path / "config.yaml"
        config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\n")
        command = [*launch, "--config_file", str(config), example, "--epochs", "3"]
        done = completed(command, cwd=tmp_path, env=ENVIRONMENT)
        assert "accuracy: 9" in done.stdout, done.stderr
        assert "has mixed_precision='bf16'. amp replaces it" in done.stderr


class TestPrecisionOfTheLauncher:
    @pytest.mark.filterwarnings("ignore:accelerate launch, or its config file")
    @pytest.mark.parametrize(("launched", "half"), [("bf16", "float16"), ("bf16", None), ("fp16", None)])
    def test_amp_alone_casts(self, launched: str, half: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = half or {"bf16": "bfloat16", "fp16": "float16"}[launched]
        alone = Run("O1", half_dtype=expected).train()
        alone.accelerator.end_training()
        AcceleratorState._reset_state()
        monkeypatch.setenv(PRECISION, launched)
        run = Run("O1", half_dtype=half).train()
        assert run.losses == alone.losses
        assert str(amp.settings()["half_dtype"]).endswith(expected)

    def test_it_warns_and_sets_the_scaler_aside_until_the_accelerator_has_forgotten_its_objects(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(PRECISION, "bf16")
        accelerator, model, scaler = Accelerator(cpu=True), net(), torch.amp.GradScaler("cpu")
        accelerator.scaler = scaler  # as on a GPU in float16
        with pytest.warns(AmpWarning, match=r"mixed_precision='bf16'. amp replaces it, and casts to float16 at"):
            _, optimizer = prepare(accelerator, model, adam(model), half_dtype="float16")
        assert (optimizer.scaler, accelerator.scaler, accelerator.native_amp) == (None, None, False)
        amp.deinitialize()  # the prepared optimizer would not unscale
        assert accelerator.scaler is None
        accelerator, model = Accelerator(cpu=True), net()
        with pytest.warns(AmpWarning, match="amp replaces it"):
            prepare(accelerator, model, adam(model))
        accelerator.free_memory()
        assert accelerator.native_amp

    def test_a_warning_that_is_an_error_leaves_the_accelerator_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PRECISION, "bf16")
        accelerator, model = Accelerator(cpu=True), net()
        with pytest.raises(AmpWarning, match="amp replaces it"):
            prepare(accelerator, model, adam(model))
        assert accelerator.native_amp
        assert not amp.is_on()


class Lomo(torch.optim.SGD):
    def fused_backward(self, loss: Tensor, lr: float) -> None: ...


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"opt_level": "O7"}, "opt_level is 'O7'"),
            ({"opt_levle": "O1"}, "unknown argument 'opt_levle'. Did you mean 'opt_level'"),
            ({"device_placment": [True]}, "Did you mean 'device_placement'"),
            ({"optimizers": []}, "unknown argument 'optimizers'"),
            ({"opt_level": "O1", "master_weights": True}, "contradicts opt_level='O1'"),
            ({"scale_window": 0}, "scale_window"),
            ({"verbosity": "x"}, "verbosity is 'x'; expected a whole number"),
        ],
        ids=str,
    )
    def test_bad_options_raise_and_change_nothing(self, given: dict[str, Any], message: str) -> None:
        accelerator, model = Accelerator(cpu=True), net()
        with pytest.raises(OptionError, match=message):
            prepare(accelerator, model, adam(model), **given)
        assert not amp.is_on()
        assert accelerator._models == accelerator._optimizers == []

    def test_device_placements_of_the_wrong_length_or_kind_raise(self) -> None:
        accelerator, model = Accelerator(cpu=True), net()
        with pytest.raises(ValueError, match="device_placement"):
            prepare(accelerator, model, adam(model), opt_level="O2", device_placement=[True])
        assert types_of(model) == {torch.float32}
        with pytest.raises(OptionError, match=r"device_placement is True; expected a list of True, False and None"):
            prepare(accelerator, model, device_placement=True)  # type: ignore[arg-type]

    def test_a_first_argument_that_is_no_accelerator_raises(self) -> None:
        with pytest.raises(OptionError, match=r"found Sequential as the first argument.*prepare\(accelerator, model"):
            prepare(net(), adam(net()))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("objects", "message"),
        [
            (lambda model: [model, "O2"], r"without a name.*Type prepare\(accelerator, \.\.\., opt_level='O2'\)"),
            (lambda model: [model, "o0"], "without a name.*opt_level='O0'"),
            (lambda model: [model, torch.float16], "without a name.*half_dtype=torch.float16"),
            (lambda model: [model, {"opt_level": "O2", "init_scale": 8.0}], "opt_level='O2', init_scale=8.0"),
            (lambda model: [[model]], r"got a list with Sequential in it.*\*optimizers\)"),
            (lambda model: [model, (adam(model),)], "got a tuple with AdamW in it"),
            (lambda model: [{"net": model}], "got a dict with Sequential in it"),
            (lambda model: [], r"no model.*accelerator\.prepare by themselves"),
            (lambda model: [loader()], r"no model.*accelerator\.prepare by themselves"),
            (
                lambda model: [nn.DataParallel(model)],
                r"wrapped in DataParallel already. Hand in the model inside",
            ),
            (lambda model: [model, Lomo(model.parameters())], "Lomo updates weights within the backward pass"),
        ],
    )
    def test_objects_that_cannot_be_prepared_raise(self, objects: Callable[[Any], Any], message: str) -> None:
        with pytest.raises((OptionError, UsageError), match=message):
            prepare(Accelerator(cpu=True), *objects(net()))
        assert not amp.is_on()

    def test_a_backward_pass_of_something_else_than_a_loss_raises(self) -> None:
        run = Run("O1", **FLOAT16)
        loss = F.cross_entropy(run.model(X), Y)
        for given, message in (
            ((loss, run.optimizer), r"got AcceleratedOptimizer beside the loss.*Type accelerator\.backward\(loss\)"),
            ((loss.item(),), r"got [\d.]+; expected the loss as a tensor"),
            ((None,), "got None; expected the loss as a tensor"),
        ):
            with pytest.raises(OptionError, match=message):
                run.accelerator.backward(*given)
        run.accelerator.backward(loss)

    def test_clipping_of_something_else_than_parameters_raises(self) -> None:
        run = Run("O1", **FLOAT16)
        for given in (run.model, run.optimizer):
            for clip in (run.accelerator.clip_grad_norm_, run.accelerator.clip_grad_value_):
                with pytest.raises(
                    OptionError, match=rf"gradients of {type(given).__name__} cannot be clipped; expected"
                ):
                    clip(given, 1.0)

    @pytest.mark.parametrize(("precision", "launched"), [("bf16", None), ("fp16", None), ("fp16", "bf16")])
    def test_a_precision_of_the_accelerator_raises(
        self, precision: str, launched: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if launched is not None:
            monkeypatch.setenv(PRECISION, launched)
        accelerator, model = Accelerator(cpu=True, mixed_precision=precision), net()
        message = f"mixed_precision='{precision}', which casts as well as amp. Leave it out of Accelerator"
        with pytest.raises(OptionError, match=message):
            prepare(accelerator, model, adam(model))
        prepare(accelerator, model, adam(model), opt_level="O0")

    @pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
    def test_distributed_types_that_shard_raise(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerator = Accelerator(cpu=True)
        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType(kind))
        with pytest.raises(OptionError, match=f"distributed type {kind}, which shards"):
            prepare(accelerator, net())

    @pytest.mark.parametrize(
        ("handler", "message"),
        [(GradScalerKwargs(init_scale=8.0), "growth_interval as scale_window"), (AutocastKwargs(enabled=False), "off")],
        ids=["GradScalerKwargs", "AutocastKwargs"],
    )
    def test_kwargs_handlers_that_amp_ignores_raise(self, handler: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            prepare(Accelerator(cpu=True, kwargs_handlers=[handler]), net())

    @EACH_LEVEL
    def test_a_second_prepare_raises(self, level: str) -> None:
        run = Run(level, half_dtype="bfloat16")
        other = net(1)
        for accelerator, which in ((run.accelerator, "this"), (Accelerator(cpu=True), "another")):
            with pytest.raises(UsageError, match=f"called before for {which} Accelerator.*one call.*free_memory"):
                prepare(accelerator, other, adam(other), opt_level=level, half_dtype="bfloat16")
        run.train()
        run.accelerator.free_memory()
        prepare(Accelerator(cpu=True), other, adam(other))

    @pytest.mark.parametrize("prepared", [0, 1, 2], ids=["model", "optimizer", "scheduler"])
    def test_objects_prepared_without_amp_raise(self, prepared: int) -> None:
        accelerator, model = Accelerator(cpu=True), net()
        optimizer = adam(model)
        objects = [model, optimizer, StepLR(optimizer, 1)]
        objects[prepared] = accelerator.prepare(objects[prepared])
        with pytest.raises(UsageError, match=r"was prepared by accelerator\.prepare before, without amp"):
            prepare(accelerator, *objects)
        accelerator.free_memory()
        prepare(accelerator, model, adam(model))

    def test_an_optimizer_prepared_without_amp_raises(self) -> None:
        run, other = Run(None), net(1)
        with pytest.raises(UsageError, match="got an optimizer before, without amp"):
            prepare(run.accelerator, other)
        run = Run("O1", **FLOAT16)
        with pytest.raises(UsageError, match="that amp does not know"):
            run.accelerator.prepare(other, adam(other))
        assert run.accelerator.prepare(run.optimizer) is run.optimizer

    def test_prepare_after_amp_initialize_raises(self) -> None:
        model = net()
        amp.initialize(model, verbosity=0)
        with pytest.raises(
            UsageError, match=r"but ampatch's prepare sets it up.*Leave that call out.*amp\.deinitialize\(\)"
        ):
            prepare(Accelerator(cpu=True), model)

    def test_half_weights_raise_if_they_are_to_be_trained(self) -> None:
        model = net().to(torch.bfloat16)
        with pytest.raises(OptionError, match=r"0\.weight is to be trained and is torch\.bfloat16.*model\.float\(\)"):
            prepare(Accelerator(cpu=True), model, adam(model))
        student = net()
        for level in ("O1", "O2"):  # a model that no optimizer updates may be half
            accelerator = Accelerator(cpu=True)
            prepare(accelerator, model, student, adam(student), opt_level=level)
            assert model(X).dtype is torch.float32
            accelerator.free_memory()
            assert types_of(model) == {torch.bfloat16}

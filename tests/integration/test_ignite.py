"""Of `ampatch.integrations.ignite`: whatever a user of ignite's engines does, amp is right, or says why not."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, assert_same_state, completed
from small_nets import EACH_HALF, EACH_LEVEL, ENVIRONMENT, X, Y, net, norm, types_computed_by, types_of, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp
from ampatch.errors import OptionError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # ignite imports modules of torch that use torch.jit
    import ignite.engine
from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_evaluator
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    EMAHandler,
    FastaiLRFinder,
    LRScheduler,
    TerminateOnNan,
)
from ignite.handlers.base_logger import BaseOutputHandler
from ignite.metrics import Accuracy, Loss, Metric

from ampatch.integrations.ignite import (
    AmpHandler,
    create_supervised_trainer,
    supervised_training_step,
    unless_skipped,
)

DATA = list(zip(X.split(64), Y.split(64), strict=True))
SCALE = {"init_scale": 1024.0}  # at which no step overflows
HIGH = {"init_scale": 2.0**16}


class Net(nn.Sequential):
    """Notes the types in which it computes."""

    def __init__(self) -> None:
        super().__init__(*net())
        self.seen = types_computed_by(self[0])


class Run:
    """A net, its optimizer and a trainer: in amp with a level, else ignite's own in float32."""

    def __init__(
        self, level: str | None = None, half: Any = "float16", optimizer: Any = torch.optim.SGD, lr: float = 0.1,
        loss_fn: Any = F.cross_entropy, handler: Any = None, amp_options: Any = (), **options: Any,
    ) -> None:  # fmt: skip
        self.net = Net()
        self.optimizer = optimizer(self.net.parameters(), lr=lr)
        self.losses: list[float] = []
        create: Any = ignite.engine.create_supervised_trainer
        if level is not None:
            amp.initialize(self.net, self.optimizer, opt_level=level, half_dtype=half, **{**SCALE, **dict(amp_options)})
            create = create_supervised_trainer
        self.trainer: Engine = create(self.net, self.optimizer, loss_fn, **options)
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )
        self.handler = AmpHandler() if handler is None else handler
        if level is not None:
            self.handler.attach(self.trainer)

    def on(self, event: Any, function: Callable[[], Any]) -> Run:
        self.trainer.add_event_handler(event, lambda _: function())
        return self

    def run(self, epochs: int = 3, data: Any = DATA) -> Run:
        self.trainer.run(data, max_epochs=epochs)
        return self


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Any:
    yield
    assert not amp.is_on()
    assert "model" not in vars(EMAHandler)


class TestTraining:
    @EACH_HALF
    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.covering(1)
    def test_a_trainer_learns_what_float32_learns(self, level: str, half: torch.dtype) -> None:
        run, plain = Run(level, half).run(), Run().run()
        assert run.losses[-1] == pytest.approx(plain.losses[-1], rel=5e-3)
        assert run.net.seen == {half}
        assert types_of(run.net) == {torch.float32}

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"gradient_accumulation_steps": 2},
            {"prepare_batch": lambda batch, device, non_blocking: (batch[0] * 2, batch[1])},
            {"model_transform": lambda output: output * 2, "model_fn": lambda model, x: model(x + 1)},
            {"output_transform": lambda x, y, y_pred, loss: (len(x), len(y), y_pred.sum().item(), loss.item())},
            {"device": "cpu", "non_blocking": True, "deterministic": True, "amp_mode": None, "scaler": False},
        ],
        ids=lambda options: " ".join(options) or "defaults",
    )
    def test_at_o0_the_bits_are_those_of_ignites_own_trainer(self, options: Any) -> None:
        runs = []
        for level in ("O0", None):
            torch.manual_seed(1)
            runs.append(Run(level, **options).run(data=DataLoader(TensorDataset(X, Y), batch_size=64, shuffle=True)))
        ours, plain = runs
        assert ours.losses == plain.losses
        assert_same_state(weights(ours.net), weights(plain.net))
        assert isinstance(ours.trainer, DeterministicEngine) is ("deterministic" in options)

    def test_with_amp_disabled_the_bits_are_those_of_ignites_own_trainer(self) -> None:
        run, plain = Run("O2", amp_options={"enabled": False}), Run()
        for epochs in (1, 2):
            run.run(epochs), plain.run(epochs)
        assert_same_state(weights(run.net), weights(plain.net))
        assert (run.handler.state_dict(), dict(run.trainer.state.amp)) == ({}, {})
        amp.deinitialize()

    @EACH_LEVEL
    def test_gradients_accumulate_unscaled_as_in_float32(self, level: str) -> None:
        norms: dict[Any, list[float]] = {level: [], None: []}
        for each, found in norms.items():
            run = Run(each, gradient_accumulation_steps=2)
            run.trainer.add_event_handler(
                Events.ITERATION_COMPLETED(event_filter=lambda _, iteration: iteration % 2),
                lambda _, run=run, found=found: found.append(norm(run.net.parameters())),
            )
            run.optimizer.register_step_pre_hook(
                lambda *_, run=run, found=found: found.append(norm(amp.master_params(run.optimizer)))
            )
            run.run()
        assert len(norms[level]) == 12
        assert norms[level] == pytest.approx(norms[None], rel=2e-2)

    @EACH_LEVEL
    @pytest.mark.parametrize("shared", [True, False], ids=["one handler", "two handlers"])
    def test_an_evaluator_within_a_run_changes_none_of_its_bits(self, shared: bool, level: str) -> None:
        run, given, trains = Run(level), set(), set()
        evaluator = create_supervised_evaluator(run.net, {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)})
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: given.add(engine.state.output[0].dtype))
        (run.handler if shared else AmpHandler()).attach(
            evaluator
        )  # its runs are within the trainer's, and end nothing
        run.on(Events.ITERATION_COMPLETED, lambda: trains.add(run.net.training))
        run.on(Events.EPOCH_COMPLETED, lambda: evaluator.run(DATA)).run()
        assert trains == {True}
        assert_same_state(weights(run.net), weights(Run(level).run().net))
        assert given == {torch.float16 if level == "O1" else torch.float32}
        assert run.net.seen == {torch.float16}
        with torch.no_grad():
            assert evaluator.state.metrics["loss"] == pytest.approx(F.cross_entropy(run.net(X), Y).item(), rel=1e-2)

    @pytest.mark.parametrize(
        "loss_fn",
        [F.cross_entropy, nn.CrossEntropyLoss(), functools.partial(F.cross_entropy, label_smoothing=0.1)],
        ids=["function", "module", "partial"],
    )
    def test_loss_functions_bound_before_initialize_compute_in_float32(self, loss_fn: Any) -> None:
        types: list[torch.dtype] = []
        Run("O1", loss_fn=loss_fn, output_transform=lambda x, y, y_pred, loss: types.append(loss.dtype)).run(1)
        assert set(types) == {torch.float32}

    def test_metrics_compute_in_float32(self) -> None:
        class Similarity(Metric):
            def reset(self) -> None:
                self.types: set[torch.dtype] = set()

            def update(self, output: Any) -> None:
                self.types.add((output[0] @ output[0].T).dtype)

            def compute(self) -> set[torch.dtype]:
                return self.types

        run = Run("O1")
        evaluator = create_supervised_evaluator(
            run.net, {"similarity": Similarity()}, output_transform=lambda x, y, y_pred: (y_pred.float(), y)
        )
        run.on(Events.COMPLETED, lambda: evaluator.run(DATA)).run(1)
        assert evaluator.state.metrics == {"similarity": {torch.float32}}


class TestEndOfRun:
    @EACH_LEVEL
    @pytest.mark.parametrize("end", ["complete", "terminate", "terminate and skip", "terminate_epoch"])
    @pytest.mark.covering(1)
    def test_a_run_that_ends_takes_amp_down_after_all_handlers(self, level: str, end: str) -> None:
        run, seen = Run(level), []
        ways = {
            "terminate": run.trainer.terminate,
            "terminate and skip": lambda: run.trainer.terminate(skip_completed=True),
            "terminate_epoch": run.trainer.terminate_epoch,
        }
        if end != "complete":
            run.on(Events.ITERATION_COMPLETED(once=6), ways[end])
        for event in (Events.TERMINATE, Events.COMPLETED):
            run.on(event, lambda: seen.append((amp.is_on(), set(run.handler.state_dict()))))
        run.run()
        assert seen[-1] == (True, {"loss_scaler0"})
        assert not amp.is_on()
        assert types_of(run.net) == {torch.float32}
        assert run.handler.state_dict()["loss_scaler0"]["loss_scale"] == 1024

    @EACH_LEVEL
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", [Events.STARTED, Events.ITERATION_COMPLETED, Events.COMPLETED], ids=str)
    @pytest.mark.covering(1)
    def test_an_exception_takes_amp_down_and_keeps_the_masters(self, level: str, error: Any, where: Any) -> None:
        def fail() -> None:
            if where is not Events.ITERATION_COMPLETED or len(run.losses) == 6:
                raise error

        run = Run(level)
        run.on(where, fail)
        with pytest.raises(error):
            run.run()
        assert not amp.is_on()
        stopped = Run(level)
        stopped.on(Events.ITERATION_COMPLETED(once=6), stopped.trainer.terminate)
        expected = {Events.STARTED: Run, Events.COMPLETED: lambda: Run(level).run()}
        wanted = expected[where]() if where in expected else stopped.run()
        amp.deinitialize()
        assert_same_state(weights(run.net), weights(wanted.net))

    def test_an_exception_that_a_handler_takes_leaves_amp_on(self) -> None:
        run = Run("O1")
        was_on: list[bool] = []
        run.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _, error: was_on.append(amp.is_on()))
        run.on(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
        run.on(Events.EPOCH_COMPLETED, lambda: was_on.append(amp.is_on())).run()
        assert was_on == [True] * 4
        assert run.net.seen == {torch.float16}

    @pytest.mark.parametrize("when", ["in between", "by a handler"])
    @pytest.mark.parametrize("shared", [True, False], ids=["one handler", "two handlers"])
    def test_the_end_of_an_evaluator_leaves_amp_on_for_an_interrupted_trainer(self, shared: bool, when: str) -> None:
        run = Run("O2")
        evaluator = create_supervised_evaluator(run.net)
        (run.handler if shared else AmpHandler()).attach(evaluator)
        run.on(Events.ITERATION_COMPLETED(once=6), run.trainer.interrupt)
        if when == "by a handler":
            run.on(Events.INTERRUPT, lambda: evaluator.run(DATA)).run()
        else:
            run.run()
            evaluator.run(DATA)
        assert amp.is_on()
        run.run()
        assert_same_state(weights(run.net), weights(Run("O2").run().net))

    @pytest.mark.parametrize("how", ["amp has ended", "the engine is gone"])
    def test_an_evaluator_takes_amp_down_if_no_interrupted_run_can_go_on(self, how: str) -> None:
        run = Run("O1")
        run.on(Events.ITERATION_COMPLETED(once=6), run.trainer.interrupt).run()
        evaluator = create_supervised_evaluator(run.net)
        if how == "amp has ended":
            amp.deinitialize()
            amp.initialize(run.net, half_dtype="float16", verbosity=0)
        else:
            del run
            gc.collect()
        AmpHandler().attach(evaluator)
        evaluator.run(DATA)
        assert not amp.is_on()

    def test_an_exception_after_an_interruption_takes_amp_down(self) -> None:
        run = Run("O1")
        run.on(Events.ITERATION_COMPLETED(once=6), run.trainer.interrupt)
        run.on(Events.INTERRUPT, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.run()

    @EACH_LEVEL
    def test_deinitialize_false_leaves_amp_on_for_a_further_run(self, level: str) -> None:
        run = Run(level, handler=AmpHandler(deinitialize=False)).run(1).run(3)
        assert amp.is_on()
        amp.deinitialize()
        assert_same_state(weights(run.net), weights(Run(level).run(3).net))

    @EACH_LEVEL
    def test_a_second_initialize_goes_on_with_the_last_scale(self, level: str) -> None:
        half = {"opt_level": level, "half_dtype": "float16", "scale_window": 3, **SCALE}
        run = Run(level, amp_options={"scale_window": 3}).run(1)
        with pytest.raises(UsageError, match=r"amp is off. Call amp.initialize .* AmpHandler\(deinitialize=False\)"):
            run.run(3)
        last = run.handler.state_dict()
        amp.initialize(run.net, run.optimizer, **half)
        assert run.handler.state_dict() == amp.state_dict() != last
        run.handler.load_state_dict(last)
        run.run(3)
        whole = Run(level, amp_options={"scale_window": 3}).run(3)
        assert_same_state(weights(run.net), weights(whole.net))
        assert run.handler.state_dict() == whole.handler.state_dict()


class TestGradients:
    @EACH_LEVEL
    @pytest.mark.parametrize("by", ["amp.clip_grad_norm_", "clip_grad_norm_", "clip_grad_value_"])
    def test_before_step_clips_unscaled_gradients(self, level: str, by: str) -> None:
        def clip(optimizer: Any) -> None:
            if by.startswith("amp"):
                amp.clip_grad_norm_(optimizer, 0.05)
            else:
                getattr(nn.utils, by)(list(amp.master_params(optimizer)), 0.05)

        run, plain = Run(level, before_step=clip), Run()
        plain.optimizer.register_step_pre_hook(lambda *_: clip(plain.optimizer))
        assert run.run().losses == pytest.approx(plain.run().losses, rel=2e-3)
        assert run.losses[-1] > 1.01 * Run(level).run().losses[-1]


class TestSkippedSteps:
    @EACH_LEVEL
    def test_skipped_steps_change_no_weight_and_filtered_schedulers_omit_them(self, level: str) -> None:
        run = Run(level, lr=1e-6, amp_options=HIGH, loss_fn=lambda *given: 100 * F.cross_entropy(*given))
        before, skipped = weights(run.net), []
        counting, plain = (
            LRScheduler(torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)) for _ in range(2)
        )

        def note() -> None:
            skipped.append(amp.step_was_skipped(run.optimizer))
            if all(skipped):
                assert_same_state(weights(run.net), before)

        run.on(Events.ITERATION_COMPLETED, note)
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=unless_skipped(run.optimizer)), counting)
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, plain)
        run.run()
        assert skipped[0]
        assert not skipped[-1]
        assert counting.event_index == skipped.count(False)
        assert plain.event_index == len(skipped) == 12
        assert run.trainer.state.amp["skipped_steps"] == skipped.count(True)

    @pytest.mark.parametrize("bad", [0, 1])
    def test_overflows_in_several_batches_of_a_step_lower_the_scale_once(self, bad: int) -> None:
        factors = [torch.inf, torch.inf] if bad == 0 else [torch.inf, 1.0]
        factors = itertools.chain(factors, itertools.repeat(1.0))
        run = Run("O1", loss_fn=lambda *given: F.cross_entropy(*given) * next(factors), gradient_accumulation_steps=2)
        passed: list[int] = []
        run.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(event_filter=unless_skipped(run.optimizer, every=2)),
            lambda engine: passed.append(engine.state.iteration),
        )
        run.run()
        assert (run.trainer.state.amp["skipped_steps"], run.trainer.state.amp["loss_scale"]) == (1, 512)
        assert passed == [4, 6, 8, 10, 12]

    @EACH_LEVEL
    def test_only_a_loss_of_nan_terminates_a_run(self, level: str) -> None:
        factors = itertools.chain([1.0] * 8, [torch.nan] * 4)
        run = Run(
            level, lr=1e-6, amp_options=HIGH, loss_fn=lambda *given: 100 * F.cross_entropy(*given) * next(factors)
        )
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        run.run()
        assert run.trainer.state.iteration == 9
        assert run.trainer.state.amp["skipped_steps"] > 1
        assert all(each.isfinite().all() for each in run.net.parameters())

    @pytest.mark.parametrize(
        ("every", "passed"), [(None, [2, 4, 6, 8, 10, 12]), (2, [2, 4, 6, 8, 10, 12]), (4, [4, 8, 12])]
    )
    def test_unless_skipped_passes_iterations_with_a_step(self, every: int | None, passed: list[int]) -> None:
        run, seen = Run("O1", gradient_accumulation_steps=2), []
        filtered = Events.ITERATION_COMPLETED(event_filter=unless_skipped(run.optimizer, every))
        run.trainer.add_event_handler(filtered, lambda engine: seen.append(engine.state.iteration))
        run.run()
        assert seen == passed


class Output(BaseOutputHandler):
    def __call__(self, *_: Any) -> None:
        raise NotImplementedError


class TestNumbers:
    def test_numbers_of_the_state_are_read_only_when_a_logger_logs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, reads, logged = Run("O1"), [], []
        stats = amp.stats
        monkeypatch.setattr(amp, "stats", lambda: reads.append(1) or stats())
        output = Output("training", state_attributes=["amp"])
        run.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(every=6),
            lambda engine: logged.append(output._setup_output_metrics_state_attrs(engine, key_tuple=False)),
        )
        run.run()
        assert len(reads) == 2 + 2  # by the logger, and at both ends of the run
        assert [each["training/amp/clean_steps"] for each in logged] == [6, 12]
        assert logged[0]["training/amp/loss_scale"] == 1024
        assert dict(run.trainer.state.amp) == {name.removeprefix("training/amp/"): n for name, n in logged[1].items()}
        assert len(run.trainer.state.amp) == len(logged[1])

    def test_copies_of_the_numbers_are_plain_dicts(self) -> None:
        run = Run("O1")
        live: list[Any] = []
        run.on(Events.ITERATION_COMPLETED(once=6), lambda: live.append(json.dumps(run.trainer.state.amp))).run()
        stats = run.trainer.state.amp
        assert json.loads(live[0]) == {**json.loads(json.dumps(stats)), "clean_steps": 6, "casts": 36}
        assert f"{stats!r}" == repr(dict(stats)) != "{}"
        for copied in (copy.deepcopy(stats), stats.copy(), pickle.loads(pickle.dumps(stats)), {**stats}, stats | {}):
            assert type(copied) is dict
            assert copied == stats


class TestCheckpoints:
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.parametrize(
        ("deterministic", "at"),
        [  # from within an epoch ignite's Engine alone gets other batches
            (False, Events.EPOCH_COMPLETED(once=2)),
            (True, Events.EPOCH_COMPLETED(once=2)),
            (True, Events.ITERATION_COMPLETED(once=6)),
        ],
        ids=["Engine", "DeterministicEngine", "within an epoch"],
    )
    @pytest.mark.covering(1)
    def test_a_resumed_run_ends_with_the_same_bits(self, level: str, half: Any, deterministic: bool, at: Any) -> None:
        def make() -> tuple[Run, dict[str, Any]]:
            run = Run(
                level, half, torch.optim.Adam, lr=0.01, deterministic=deterministic, amp_options={"scale_window": 3},
                before_step=lambda optimizer: amp.clip_grad_norm_(optimizer, 0.5),
            )  # fmt: skip
            scheduler = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9))
            cosine = CosineAnnealingScheduler(run.optimizer, "eps", 1e-8, 1e-4, 4)
            filtered = Events.ITERATION_COMPLETED(event_filter=unless_skipped(run.optimizer))
            run.trainer.add_event_handler(filtered, scheduler)
            run.trainer.add_event_handler(Events.ITERATION_STARTED, cosine)
            saved = {"amp": run.handler, "optimizer": run.optimizer, "model": run.net, "trainer": run.trainer}
            return run, {**saved, "scheduler": scheduler, "cosine": cosine}

        whole, objects = make()
        saved: list[Any] = []
        keep = Checkpoint(objects, lambda checkpoint, name, metadata: saved.append(torch_round_trip(checkpoint)))
        whole.trainer.add_event_handler(at, keep)
        torch.manual_seed(5)
        whole.run(4)

        resumed, objects = make()
        torch.manual_seed(5)
        Checkpoint.load_objects(objects, saved[0])
        resumed.run(4)
        assert whole.losses[-len(resumed.losses) :] == resumed.losses
        assert len(resumed.losses) < 12
        assert_same_state(weights(resumed.net), weights(whole.net))
        assert_same_state(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
        assert resumed.handler.state_dict() == whole.handler.state_dict()
        assert {each.dtype for each in saved[0]["model"].values()} == {torch.float32}
        if half is torch.float16:
            assert whole.handler.state_dict()["loss_scaler0"]["loss_scale"] > 1024

    def test_the_scaler_of_ignites_own_trainer_is_taken_over(self) -> None:
        saved = torch.amp.GradScaler("cpu", init_scale=512.0)
        state = {"model": Net().state_dict(), "scaler": saved.state_dict()}
        run = Run("O1")
        Checkpoint.load_objects({"model": run.net, "scaler": run.handler}, state)
        assert amp.get_loss_scale() == 512
        run.run(1)

    @EACH_LEVEL
    def test_the_learning_rate_finder_restores_weights_and_scale(self, level: str) -> None:
        run = Run(level, handler=AmpHandler(deinitialize=False))
        finder = FastaiLRFinder()
        to_save = {"model": run.net, "optimizer": run.optimizer, "amp": run.handler}
        with finder.attach(run.trainer, to_save, num_iter=10, end_lr=1e4, diverge_th=1.5) as trainer:
            trainer.run(DATA)
        run.trainer.run(DATA, max_epochs=3)
        amp.deinitialize()
        assert_same_state(weights(run.net), weights(Run(level).run().net))


class TestEMAHandler:
    @pytest.mark.slow
    @EACH_LEVEL
    @pytest.mark.parametrize("is_early", [False, True], ids=["after initialize", "before initialize"])
    @EACH_HALF
    def test_averages_are_of_the_float32_weights(self, level: str, is_early: bool, half: Any) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        averages = EMAHandler(net, momentum=0.001) if is_early else None
        amp.initialize(net, optimizer, opt_level=level, half_dtype=half)
        averages = averages or EMAHandler(net, momentum=0.001)
        expected = [each.detach().float().clone() for each in Net().parameters()]
        trainer = create_supervised_trainer(net, optimizer, F.cross_entropy)

        def average(_: Engine) -> None:
            for mean, weight in zip(expected, amp.master_params(optimizer), strict=True):
                mean.mul_(1.0 - 0.001).add_(weight.data, alpha=0.001)

        trainer.add_event_handler(Events.ITERATION_COMPLETED, average)
        averages.attach(trainer)
        AmpHandler().attach(trainer)
        trainer.run(DATA, max_epochs=3)
        for found, wanted in zip(averages.ema_model.parameters(), expected, strict=True):
            assert_same_bits(found.data, wanted)
        assert averages.model is net

    @EACH_LEVEL
    def test_an_average_made_within_a_run_is_the_same_and_evaluates(self, level: str) -> None:
        made: list[EMAHandler] = []
        evaluated: list[torch.Tensor] = []

        def make(run: Run) -> None:
            made.append(EMAHandler(run.net, momentum=0.5))
            made[-1].attach(run.trainer)

        within = Run(level)
        within.on(Events.STARTED, lambda: make(within))
        within.on(Events.EPOCH_COMPLETED, lambda: evaluated.append(made[0].ema_model(X).detach()))
        if level == "O1":
            within.on(Events.EPOCH_COMPLETED, lambda: evaluated.append(made[0].model(X).detach()))
        within.run()
        before = Run(level)
        make(before)
        before.run()
        assert_same_state(weights(made[0].ema_model), weights(made[1].ema_model))
        assert {each.dtype for each in evaluated} == {torch.float16 if level == "O1" else torch.float32}
        assert made[0].model is within.net

    def test_averages_of_half_weights_without_masters_are_float32_or_raise(self) -> None:
        net = Net()
        early = EMAHandler(net, momentum=0.001)
        run = Run("O3")
        late = EMAHandler(run.net, momentum=0.001)
        late.attach(run.trainer)
        with pytest.raises(UsageError, match=r"has torch.float16 averages, .* opt_level='O3' .* before amp.initialize"):
            run.run()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, optimizer, opt_level="O3", half_dtype="float16")
        trainer = create_supervised_trainer(net, optimizer, F.cross_entropy)
        AmpHandler().attach(trainer)
        early.attach(trainer)
        trainer.run(DATA)
        assert not torch.equal(early.ema_model[0].weight, Net()[0].weight)


def torch_round_trip(checkpoint: Any) -> Any:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # the state of a DeterministicEngine has an array of numpy's


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"amp_mode": "amp"}, "amp_mode=.* asks for a second precision"),
            ({"amp_mode": "apex"}, "amp_mode=.* asks for a second precision"),
            ({"scaler": True}, "scaler=.* asks for a second precision"),
            ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; expected a whole number"),
            ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps is 1.5; expected a whole number"),
            ({"gradient_accumulation_steps": "2"}, "gradient_accumulation_steps is '2'; expected a whole number"),
            ({"loss_fn": None}, "^loss_fn is None; expected a function, "),
            ({"loss_fn": nn.CrossEntropyLoss}, r"is the class CrossEntropyLoss; .* Type CrossEntropyLoss\(\)"),
            ({"before_step": 1.0}, "^before_step is 1.0; expected a function, "),
            ({"prepare_batch": "x"}, "^prepare_batch is 'x'; expected a function, "),
            ({"model_transform": None}, "^model_transform is None; expected a function, "),
            ({"model_fn": 0}, "^model_fn is 0; expected a function, "),
            ({"output_transform": "loss"}, "^output_transform is 'loss'; expected a function, "),
            ({"deterministic": "no"}, "deterministic is 'no'; expected True, False"),
            ({"non_blocking": "no"}, "non_blocking is 'no'; expected True, False"),
        ],
        ids=str,
    )
    def test_a_bad_value_of_an_argument_raises(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            Run("O1", **given)
        amp.deinitialize()

    def test_unknown_arguments_raise(self) -> None:
        net = Net()
        for given, meant in (("gradient_accumulation_step", "gradient_accumulation_steps"), ("determinstic", "deter")):
            with pytest.raises(OptionError, match=f"unknown argument '{given}'. Did you mean '{meant}"):
                create_supervised_trainer(net, None, F.cross_entropy, **{given: 2})
        with pytest.raises(OptionError, match=r"unknown argument 'opt_level'\. Expected one of model, "):
            supervised_training_step(net, None, F.cross_entropy, opt_level="O1")

    @pytest.mark.parametrize("every", [1, 3])
    def test_a_filter_that_passes_iterations_without_a_step_raises(self, every: int) -> None:
        run = Run("O1", gradient_accumulation_steps=2)
        passes = unless_skipped(run.optimizer, every)
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=passes), lambda: None)
        with pytest.raises(OptionError, match=rf"every={every}.*steps=2.*Leave every out, or type a multiple of 2"):
            run.run()

    @pytest.mark.parametrize("every", [0, -2, 1.0, True, "2", nn.Linear(1, 1)], ids=str)
    def test_a_filter_for_no_number_of_iterations_raises(self, every: Any) -> None:
        with pytest.raises(OptionError, match=r"every is .*; expected a whole number of at least 1"):
            unless_skipped(torch.optim.SGD(Net().parameters(), lr=0.1), every)

    def test_a_filter_for_an_optimizer_without_amp_raises(self) -> None:
        with pytest.raises(OptionError, match="found Net as an optimizer"):
            unless_skipped(Net())
        run, other = Run("O1"), torch.optim.SGD(Net().parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"this SGD was never handed to amp.initialize"):
            unless_skipped(other)
        amp.deinitialize()
        unless_skipped(run.optimizer)  # made before amp is on

    @pytest.mark.parametrize("given", ["no", 0, None])
    def test_a_bad_deinitialize_of_the_handler_raises(self, given: Any) -> None:
        with pytest.raises(OptionError, match=f"deinitialize is {given!r}; expected True"):
            AmpHandler(given)

    def test_a_handler_attached_to_something_else_raises(self) -> None:
        with pytest.raises(OptionError, match=r"found Net to attach .* Type handler\.attach\(trainer\)"):
            AmpHandler().attach(Net())  # type: ignore[arg-type]
        for name in ("", "my amp", None):
            with pytest.raises(OptionError, match=f"name is {name!r}; expected the name of an attribute"):
                AmpHandler().attach(Engine(lambda *_: None), name)  # type: ignore[arg-type]

    def test_too_many_positional_arguments_raise(self) -> None:
        with pytest.raises(TypeError, match="takes from 3 to 8 positional arguments"):
            create_supervised_trainer(Net(), None, F.cross_entropy, None, False, *[lambda *_: None] * 3, True)

    def test_models_and_optimizers_without_amp_raise(self) -> None:
        net, other = Net(), Net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other)]
        with pytest.raises(UsageError, match=r"amp is off. Type model, optimizer = amp.initialize"):
            create_supervised_trainer(net, optimizers[0], F.cross_entropy)
        trainer = Engine(lambda *_: None)
        AmpHandler().attach(trainer)
        with pytest.raises(UsageError, match=r"but amp is off. Call amp.initialize"):
            trainer.run(DATA)
        amp.initialize(net, optimizers[0], half_dtype="float16")
        with pytest.raises(UsageError, match=r"this Net was never handed to amp.initialize"):
            create_supervised_trainer(other, optimizers[0], F.cross_entropy)
        with pytest.raises(UsageError, match=r"this SGD was never handed to amp.initialize"):
            create_supervised_trainer(net, optimizers[1], F.cross_entropy)
        amp.deinitialize()

    def test_a_second_handler_raises(self) -> None:
        run = Run("O1")
        with pytest.raises(UsageError, match=r"has an attribute 'amp' already. Is an AmpHandler attached"):
            AmpHandler().attach(run.trainer)
        run.run(1)


def test_after_amp_init_a_trainer_trains_in_half() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.init(half_dtype="float16")
    trainer = create_supervised_trainer(net, optimizer, F.cross_entropy)
    AmpHandler().attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert net.seen == {torch.float16}


@pytest.mark.slow
def test_two_ranks_train_as_in_float32_and_stay_equal(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ignite_ranks.py")
    done = completed([sys.executable, str(script)], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert len(results) == 2 * (3 + 2)
    for mode, level in itertools.product(("accumulated", "overflow"), ("O1", "O2")):
        first, second = results[f"{mode} {level} 0"], results[f"{mode} {level} 1"]
        assert first == second
        if mode == "overflow":
            assert (first["skipped"], first["scale"]) == (1, 512)
        else:
            assert (first["skipped"], first["scale"]) == (0, 1024)
            assert first["weights"] == pytest.approx(results[f"{mode} float32 0"]["weights"], rel=1e-2, abs=5e-3)
        (file,) = tmp_path.glob(f"saved/{mode} {level}/*.pt")
        saved = torch.load(file, weights_only=True)
        assert torch.cat([each.reshape(-1) for each in saved["model"].values()]).tolist() == first["weights"]
        assert saved["amp"]["loss_scaler0"]["loss_scale"] == first["scale"]

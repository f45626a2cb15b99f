"""Of `ampatch.integrations.skorch`: whatever a skorch user does, amp is right in it, or says why it cannot be."""

from __future__ import annotations

import copy
import functools
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_nets
import torch
from helpers import assert_same_bits, assert_same_state, together
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    Freezer,
    GradientNormClipping,
    InputShapeSetter,
    LoadInitState,
    LRScheduler,
    TrainEndCheckpoint,
)
from skorch.dataset import unpack_data
from skorch.exceptions import NotInitializedError, SkorchTrainingImpossibleError
from small_nets import EACH_HALF, EACH_LEVEL, norm, types_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.integrations.skorch import AmpNetMixin

X, Y = small_nets.X.numpy(), small_nets.Y.numpy()
EXPLODING = {"amp__init_scale": 2.0**24, "module__width": 512}  # with inputs * 1000: every step overflows


class Net(AmpNetMixin, NeuralNetClassifier):
    pass


class MLP(nn.Module):
    """Notes in which types it computes."""

    def __init__(self, width: int = 16, inputs: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        self.seen.add(hidden.dtype)
        return self.last(torch.relu(hidden))


def make(kind: type = Net, module: Any = MLP, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"criterion": nn.CrossEntropyLoss, "max_epochs": 3, "lr": 0.1, "verbose": 0, "amp__half_dtype": "float16"}
    return kind(module, **{**given, **options})


def assert_same_nets(one: Any, other: Any) -> None:
    assert_same_state(one.module_.state_dict(), other.module_.state_dict())
    assert_same_state(one.optimizer_.state_dict(), other.optimizer_.state_dict())
    assert_same_state(one.amp_.state_dict(), other.amp_.state_dict())


def scale_of(net: Any) -> float:
    state = net.amp_.state_dict()
    return state.get("loss_scaler0.loss_scale", state.get("scaler.scale")).item()


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Any:
    yield
    assert not amp.is_on()


BATCH = small_nets.X[:64], small_nets.Y[:64]
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01, "amp__scale_window": 3}

# amp's own scale without and with masters, and scalers in place of it.
EACH_SCALE = pytest.mark.parametrize(
    "options",
    [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}, {"amp__scaler": torch.amp.GradScaler}],
    ids=["O1", "O2", "ampatch.GradScaler", "torch.amp.GradScaler"],
)


def on_event(event: str, function: Callable[[Any], object]) -> Callback:
    """A callback that calls a function with the net at an event."""
    return type("Calling", (Callback,), {event: lambda self, net, *args, **kwargs: function(net)})()


class TestTraining:
    @EACH_HALF
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.covering(1)
    def test_a_net_learns_what_float32_learns(self, level: str, half: torch.dtype) -> None:
        net, plain = make(amp__opt_level=level, amp__half_dtype=half).fit(X, Y), make(amp__enabled=False).fit(X, Y)
        assert net.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"], rel=1e-3)
        assert net.module_.seen == {torch.float32 if level == "O0" else half}
        assert types_of(net.module_) == {torch.float32}
        assert net.predict_proba(X).dtype == np.float32

    def test_at_o0_the_bits_are_those_of_skorchs_own_net(self) -> None:
        torch.manual_seed(0)
        plain = NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.1, verbose=0).fit(X, Y)
        off = make(amp__opt_level="O0").fit(X, Y)
        assert_same_state(off.module_.state_dict(), plain.module_.state_dict())

    def test_a_fit_that_raises_takes_amp_down(self) -> None:
        class Breaking(Net):
            def get_loss(self, *args: Any, **kwargs: Any) -> Any:
                if len(self.history) == 2:
                    raise KeyboardInterrupt  # skorch's fit ends without an error
                return super().get_loss(*args, **kwargs)

        def fail(net: Any) -> None:
            if len(net.history) == 2:
                raise ZeroDivisionError

        interrupted = make(Breaking, amp__opt_level="O2").fit(X, Y)
        failing = make(amp__opt_level="O2", callbacks=[on_event("on_epoch_end", fail)])
        with pytest.raises(ZeroDivisionError):
            failing.fit(X, Y)
        for net in (interrupted, failing):
            assert not amp.is_on()
            assert types_of(net.module_) == {torch.float32}
            net.partial_fit(X, Y)

    @EACH_LEVEL
    def test_partial_fits_end_with_the_bits_of_one_fit(self, level: str) -> None:
        whole = make(max_epochs=4, amp__opt_level=level, **ADAM).fit(X, Y)
        pieces = make(max_epochs=1, amp__opt_level=level, **ADAM)
        for _ in range(4):
            pieces.partial_fit(X, Y)
            pieces.predict(X)  # sets amp up as well
        assert_same_nets(whole, pieces)
        assert scale_of(whole) > 2**16

    def test_lbfgs_learns_what_float32_learns(self) -> None:
        options = {
            "optimizer": torch.optim.LBFGS, "optimizer__max_iter": 4, "lr": 0.05, "batch_size": -1,
            "optimizer__history_size": 5,
        }  # fmt: skip
        losses = [
            make(**options, **more).fit(X, Y).history[-1, "train_loss"]
            for more in ({"amp__opt_level": "O0"}, {}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler})
        ]
        assert losses == pytest.approx([losses[0]] * 4, rel=2e-2)
        with pytest.raises(UsageError, match=r"Use ampatch.GradScaler\b"):
            make(**options, amp__scaler=torch.amp.GradScaler).fit(X, Y)

    def test_a_module_that_callbacks_make_anew_is_cast(self) -> None:
        def widen(net: Any) -> None:
            if len(net.history) == 2:
                net.set_params(module__width=32)

        callbacks = [InputShapeSetter(param_name="inputs"), on_event("on_epoch_begin", widen)]
        net = make(amp__opt_level="O2", module__inputs=3, callbacks=callbacks).fit(X, Y)
        assert net.module_.first.weight.shape == (32, 8)
        assert net.module_.seen == {torch.float16}

    @pytest.mark.slow
    # torch's, of the loss that skorch has it compile.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
    @EACH_LEVEL
    def test_a_compiled_module_ends_with_the_same_bits(self, level: str) -> None:
        compiled = make(module=small_nets.net, amp__opt_level=level, compile=True, compile__backend="eager").fit(X, Y)
        usual, off = (make(module=small_nets.net, amp__opt_level=each).fit(X, Y) for each in (level, "O0"))
        assert_same_state(*(list(net.module_.state_dict().values()) for net in (compiled, usual)))
        assert not torch.equal(off.module_[0].weight, usual.module_[0].weight)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpointed_forward_ends_with_the_same_bits(self, reentrant: bool) -> None:
        class Checkpointed(MLP):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, inputs.clone().requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

        net = make(module=Checkpointed).fit(X, Y)
        assert_same_state(net.module_.state_dict(), make().fit(X, Y).module_.state_dict())
        assert net.module_.seen == {torch.float16}


class TestPredicting:
    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_predictions_in_half_leave_every_bit_of_the_weights(self, level: str) -> None:
        net = make(amp__opt_level=level).initialize()
        before = copy.deepcopy(net.module_.state_dict())
        net.predict(X)
        assert net.module_.seen == {torch.float16}
        assert_same_state(net.module_.state_dict(), before)

    def test_weights_that_an_optimizer_rounds_stay_rounded(self) -> None:
        class Rounding(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                for master in self.param_groups[0]["params"]:
                    master.data.copy_(before[master.shape].half())

        net = make(amp__opt_level="O2", optimizer=Rounding).initialize()
        before = {each.shape: each.detach().clone() for each in net.module_.parameters()}
        net.partial_fit(X, Y)
        for each in net.module_.parameters():
            assert_same_bits(each.detach(), before[each.shape].half().float())

    def test_a_fit_leaves_every_bit_of_frozen_weights(self) -> None:
        net = make(amp__opt_level="O2", callbacks=[Freezer("first.*")]).initialize()
        before = net.module_.first.weight.clone()
        net.partial_fit(X, Y)
        assert_same_bits(net.module_.first.weight.detach(), before.detach())

    def test_a_trimmed_and_pickled_net_predicts_the_same_bits(self) -> None:
        net = make(amp__opt_level="O2").fit(X, Y)
        outputs = net.forward(X)
        net.trim_for_prediction()
        assert_same_bits(pickle.loads(pickle.dumps(net)).forward(X), outputs)
        with pytest.raises(SkorchTrainingImpossibleError):
            net.partial_fit(X, Y)

    def test_an_unfinished_forward_iter_keeps_amp_on_through_a_fit(self) -> None:
        net, other = make(batch_size=32).fit(X, Y), make(amp__half_dtype="bfloat16").fit(X, Y)
        outputs = net.forward_iter(X)
        next(outputs)
        net.partial_fit(X, Y)
        next(outputs)
        with pytest.raises(UsageError, match=r"half_dtype is torch.float16 \(this call: torch.bfloat16\)"):
            other.predict(X)
        del outputs
        other.predict(X)

    def test_a_forward_iter_that_ends_in_another_thread_warns(self) -> None:
        def run() -> None:
            outputs = net.forward_iter(X)
            next(outputs)
            kept.append(outputs)

        net, kept = make(batch_size=32).fit(X, Y), []
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        with pytest.warns(AmpWarning, match="in the thread that has begun it"):
            kept.pop().close()

    def test_predictions_in_a_session_set_amp_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = make().fit(X, Y)
        calls: list[object] = []
        initialize = amp.initialize
        monkeypatch.setattr(amp, "initialize", lambda *args, **options: calls.append(1) or initialize(*args, **options))
        with net.amp_session():
            for _ in range(3):
                net.predict(X)
        assert len(calls) == 1


class TestCasting:
    def test_casts_are_on_within_infer_and_get_loss_only(self) -> None:
        seen: dict[str, set[bool]] = {}

        def noting(name: str) -> Callable[..., Any]:
            def method(net: Any, *args: Any, **kwargs: Any) -> Any:
                seen.setdefault(name, set()).add(amp.settings()["casts_here"])
                return getattr(Net, name)(net, *args, **kwargs)

            return method

        names = ("infer", "get_loss", "get_iterator", "train_step_single", "on_grad_computed", "on_batch_end")
        make(type("Noting", (Net,), {name: noting(name) for name in names})).fit(X, Y)
        assert seen.pop("infer") == seen.pop("get_loss") == {True}
        assert len(seen) == 4
        assert set().union(*seen.values()) == {False}

    def test_casts_are_on_in_the_backward_of_functions_of_the_users(self) -> None:
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                context.save_for_backward(weight)
                return inputs @ weight

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> Any:
                (weight,) = context.saved_tensors
                return gradient @ weight.t(), None  # of two types

        class Custom(MLP):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.last(Times.apply(self.first(inputs), torch.eye(16)))  # type: ignore[no-any-return]

        make(module=Custom).fit(X, Y)

    def test_disable_casts_around_a_step_warns_of_no_casts(self) -> None:
        class Partly(Net):
            def train_step_single(self, *args: Any, **kwargs: Any) -> Any:
                with amp.disable_casts():
                    return super().train_step_single(*args, **kwargs)

        with pytest.warns(AmpWarning, match="cast nothing"):
            net = make(Partly, train_split=None).fit(X, Y)
        assert net.module_.seen == {torch.float32}


def override(name: str, body: Callable[..., Any]) -> type:
    return type("Overriding", (Net,), {name: body})


def single(net: Any, batch: Any, **fit_params: Any) -> Any:
    """A `train_step_single` that calls no other."""
    net._set_training(True)
    inputs, targets = unpack_data(batch)
    outputs = net.infer(inputs, **fit_params)
    loss = net.get_loss(outputs, targets, X=inputs, training=True)
    loss.backward()
    return {"loss": loss, "y_pred": outputs}


def whole(net: Any, batch: Any, **fit_params: Any) -> Any:
    net.optimizer_.zero_grad()
    step = single(net, batch, **fit_params)
    net.optimizer_.step()
    return step


def by_hand(net: Any, batch: Any, **fit_params: Any) -> Any:
    inputs, targets = unpack_data(batch)
    outputs = net.infer(inputs)
    loss = net.get_loss(outputs, targets)
    with amp.scale_loss(loss, net.optimizer_) as scaled_loss:
        scaled_loss.backward()
    return {"loss": loss, "y_pred": outputs}


def epochs(net: Any, inputs: Any, targets: Any = None, epochs: Any = None, **_: Any) -> Any:
    data, held_out = net.get_split_datasets(inputs, targets)
    for _ in range(net.max_epochs):
        net.notify("on_epoch_begin", dataset_train=data, dataset_valid=held_out)
        net.run_single_epoch(net.get_iterator(data, training=True), True, "train", net.train_step)
    return net


class TestOverrides:
    @EACH_LEVEL
    @pytest.mark.parametrize(
        ("name", "body"),
        [
            ("train_step_single", single),
            ("train_step_single", by_hand),
            ("train_step", whole),
            ("infer", lambda net, x, **_: net.module_(torch.as_tensor(x))),
            ("get_loss", lambda net, y_pred, y_true, **_: nn.functional.cross_entropy(y_pred, y_true)),
            ("_step_optimizer", lambda net, step_fn: (step_fn(), net.optimizer_.step())),
            ("fit_loop", epochs),
        ],
        ids=["single", "single with amp.scale_loss", "step", "infer", "loss", "optimizer step", "fit loop"],
    )
    @pytest.mark.covering(1)
    def test_overrides_without_super_end_with_the_same_bits(
        self, name: str, body: Callable[..., Any], level: str
    ) -> None:
        net = make(override(name, body), amp__opt_level=level).fit(X, Y)
        usual = make(amp__opt_level=level).fit(X, Y)
        assert_same_state(net.module_.state_dict(), usual.module_.state_dict())
        assert_same_state(net.amp_.state_dict(), usual.amp_.state_dict())

    @pytest.mark.parametrize("scaler", [None, ampatch.GradScaler, torch.amp.GradScaler])
    def test_an_override_of_train_step_skips_overflows(self, scaler: Any) -> None:
        of_scaler = {"amp__scaler__init_scale": 2.0**40, "amp__scaler": scaler, "module__width": 512}
        net = make(override("train_step", whole), **(EXPLODING if scaler is None else of_scaler))
        net.initialize()
        before = net.module_.first.weight.clone()
        net.partial_fit(X * 1000, Y)
        assert_same_bits(net.module_.first.weight.detach(), before.detach())
        assert scale_of(net) < (2**24 if scaler is None else 2**40)

    @EACH_SCALE
    @pytest.mark.parametrize("where", ["before the step", "in the step"])
    def test_a_fit_goes_on_after_an_interrupted_step(self, where: str, options: dict[str, Any]) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        net = make(**options).initialize()
        if where == "in the step":
            handle = net.optimizer_.register_step_pre_hook(interrupt)
            net.partial_fit(X, Y)
            handle.remove()
        else:
            net.on_grad_computed = interrupt
            net.partial_fit(X, Y)
            del net.on_grad_computed
        usual = make(**options).fit(X, Y)
        assert_same_state(net.partial_fit(X, Y).module_.state_dict(), usual.module_.state_dict())

    @pytest.mark.parametrize("scaler", [None, ampatch.GradScaler, torch.amp.GradScaler])
    def test_an_optimizer_without_gradients_skips_no_step(self, scaler: Any) -> None:
        skipped: list[bool] = []

        class TwoOptimizers(Net):
            def initialize_optimizer(self, *_: Any, **__: Any) -> Any:
                self.module_.spare = nn.Linear(1, 1)
                self.optimizer_ = torch.optim.SGD([*self.module_.first.parameters()], lr=0.1)
                self.spare_ = torch.optim.SGD(self.module_.spare.parameters(), lr=0.1)
                return self

            def train_step(self, batch: Any, **fit_params: Any) -> Any:
                step = whole(self, batch, **fit_params)
                self.spare_.step()
                return step

            def on_batch_end(self, *args: Any, training: bool = False, **kwargs: Any) -> None:
                super().on_batch_end(*args, training=training, **kwargs)
                skipped.extend([self.amp_.optimizer_step_was_skipped] if training else [])

        make(TwoOptimizers, amp__scaler=scaler).fit(X, Y)
        assert skipped
        assert not any(skipped)

    @pytest.mark.parametrize(
        ("name", "body", "message"),
        [
            ("infer", lambda net, x, **_: net.module_(torch.as_tensor(x)), "cast nothing"),
            ("train_step", whole, "no amp.scale_loss was told of"),
        ],
    )
    def test_methods_set_on_an_instance_warn(self, name: str, body: Any, message: str) -> None:
        net = make().initialize()
        setattr(net, name, functools.partial(body, net))
        with pytest.warns(AmpWarning, match=message):
            net.partial_fit(X, Y)

    def test_gradients_of_autograd_grad_warn(self) -> None:
        class ByGrad(Net):
            def train_step_single(self, batch: Any, **_: Any) -> Any:
                inputs, targets = unpack_data(batch)
                outputs = self.infer(inputs)
                loss = self.get_loss(outputs, targets)
                parameters = list(self.module_.parameters())
                for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    each.grad = gradient
                return {"loss": loss, "y_pred": outputs}

        with pytest.warns(AmpWarning, match=r"was told of.* Type: loss\.backward\(\) in train_step_single"):
            make(ByGrad).fit(X, Y)

    def test_an_override_in_a_class_before_the_mixin_casts(self) -> None:
        class Other:
            def infer(self, x: Any, **_: Any) -> Any:
                return self.module_(torch.as_tensor(x))  # type: ignore[attr-defined]

        assert make(type("Mixed", (Other, Net), {})).fit(X, Y).module_.seen == {torch.float16}

    def test_a_train_step_that_accumulates_learns_what_float32_learns(self) -> None:
        class Accumulating(Net):
            def get_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().get_loss(*args, **kwargs) / 2

            def train_step(self, batch: Any, **fit_params: Any) -> Any:
                step = self.train_step_single(batch, **fit_params)
                if len(self.history[-1, "batches"]) % 2 == 0:
                    self.optimizer_.step()
                    self.optimizer_.zero_grad()
                return step

        plain, *others = (
            make(Accumulating, batch_size=32, amp__opt_level=level).fit(X, Y).module_.first.weight
            for level in ("O0", "O1", "O2")
        )
        for each in others:
            torch.testing.assert_close(each, plain, rtol=1e-2, atol=1e-3)
        with pytest.raises(UsageError, match="second backward pass"):
            make(Accumulating, batch_size=32, amp__scaler=ampatch.GradScaler).fit(X, Y)

    @EACH_SCALE
    def test_gradients_of_inputs_and_other_models_are_unscaled(self, options: dict[str, Any]) -> None:
        found: list[tuple[float, float, float]] = []

        class Looking(Net):
            def train_step_single(self, batch: Any, **_: Any) -> Any:
                inputs, targets = unpack_data(batch)
                inputs = inputs.clone().requires_grad_()
                hidden = nn.Linear(3, 3)
                nn.init.eye_(hidden.weight)
                output = checkpoint(hidden, self.infer(inputs), use_reentrant=True)
                loss = self.get_loss(output, targets)
                loss.backward()
                assert inputs.grad is not None
                other = nn.Linear(1, 1)
                other(torch.ones(1, 1)).sum().backward()
                numbers = (inputs.grad.abs().amax(), hidden.weight.grad.abs().amax(), other.bias.grad)
                found.append(tuple(map(float, numbers)))  # type: ignore[arg-type]
                return {"loss": loss, "y_pred": None}

        for level in ({"amp__opt_level": "O0"}, options):
            make(Looking, max_epochs=1, batch_size=-1, **level).fit(X, Y)
        assert found[1] == pytest.approx(found[0], rel=1e-2)
        assert found[1][2] == 1

    @EACH_SCALE
    def test_two_modules_with_an_optimizer_each_learn_what_float32_learns(self, options: dict[str, Any]) -> None:
        class Two(Net):
            def initialize_module(self) -> Any:
                super().initialize_module()
                self.module2_ = nn.Linear(3, 3)
                return self

            def initialize_optimizer(self) -> Any:
                self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=0.1)
                self.optimizer2_ = torch.optim.SGD(self.module2_.parameters(), lr=0.1)
                return self

            def infer(self, x: Any, **fit_params: Any) -> Any:
                return self.module2_(super().infer(x, **fit_params))

        plain, half = make(Two, amp__opt_level="O0").fit(X, Y), make(Two, **options).fit(X, Y)
        assert half.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"], rel=1e-3)

    def test_a_net_whose_optimizer_skorch_does_not_know_trains_without_a_loss_scale(self) -> None:
        def hide(net: Any) -> Any:
            net.optimizers_ = [torch.optim.SGD(net.module_.parameters(), lr=0.1)]
            return net

        with pytest.warns(AmpWarning, match="without a loss scale.*initialize_optimizer"):
            make(type("Hiding", (Net,), {"initialize_optimizer": hide, "train_step": single})).fit(X, Y)

    def test_train_step_single_in_a_loop_of_ones_own_needs_a_session(self) -> None:
        net, fitted = make().initialize(), make(max_epochs=2, train_split=None, batch_size=-1)
        for _ in range(2):
            net.train_step(BATCH)  # sets amp up, and takes it down
        fitted.fit(*(each.numpy() for each in BATCH))
        assert_same_nets(net, fitted)
        with pytest.raises(UsageError, match=r"with net.amp_session\(training=True\)"):
            net.train_step_single(BATCH)
        with net.amp_session(training=True):
            net.optimizer_.zero_grad()
            net.train_step_single(BATCH)
            net.optimizer_.step()
        assert net.amp_.state_dict()["loss_scaler0.unskipped"] == 3


class TestCallbacks:
    @EACH_SCALE
    def test_unscaled_gradients_are_clipped_twice_as_in_float32(self, options: dict[str, Any]) -> None:
        def train(**options: Any) -> tuple[list[float], torch.Tensor]:
            norms: list[float] = []
            looking = on_event("on_grad_computed", lambda net: norms.append(norm(net.module_.parameters())))
            clipping = [("once", GradientNormClipping(0.05)), ("twice", GradientNormClipping(0.02))]
            net = make(callbacks=[("before", looking), *clipping, ("after", looking)], **options).fit(X, Y)
            return norms, net.module_.first.weight

        (plain, weight), (half, half_weight) = train(amp__opt_level="O0"), train(**options)
        assert half == pytest.approx(plain, rel=1e-2)
        assert half[1::2] == pytest.approx([0.02] * len(half[1::2]), rel=1e-2)
        torch.testing.assert_close(half_weight, weight, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("options", [EXPLODING, {**EXPLODING, "amp__opt_level": "O2"}])
    def test_schedulers_of_batches_leave_out_skipped_steps(self, options: Any) -> None:
        def lr(step_every: str) -> float:
            policy = LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, step_every=step_every)
            net = make(max_epochs=2, callbacks=[policy], train_split=None, **options).fit(X * 1000, Y)
            return net.optimizer_.param_groups[0]["lr"]  # type: ignore[no-any-return]

        assert lr("batch") == 0.1
        assert lr("epoch") == 0.1 / 4

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.filterwarnings("ignore:the loss of a skipped step")
    def test_schedulers_of_batches_leave_out_steps_skipped_by_check_finite(self, level: str) -> None:
        seen: list[Any] = []
        policy = LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, step_every="batch")
        options = {"amp__half_dtype": "bfloat16", "amp__check_finite": True, "amp__on_overflow": seen.append}
        net = make(max_epochs=1, batch_size=128, callbacks=[policy], train_split=None, amp__opt_level=level, **options)
        inputs = X.copy()
        inputs[:1] = np.nan  # in one batch of two
        net.fit(inputs, Y)
        assert net.optimizer_.param_groups[0]["lr"] == 0.1 / 2
        assert all(bool(each.isfinite().all()) for each in net.module_.parameters())
        assert [each.loss_is_finite for each in seen] == [False]

    @EACH_LEVEL
    def test_a_net_resumed_from_a_checkpoint_ends_with_the_same_bits(self, level: str, tmp_path: Path) -> None:
        def saving() -> TrainEndCheckpoint:
            return TrainEndCheckpoint(dirname=str(tmp_path), f_amp="amp.pt")

        options = {"amp__opt_level": level, **ADAM}
        one = make(max_epochs=4, **options).fit(X, Y)
        make(max_epochs=2, callbacks=[saving()], **options).fit(X, Y)
        last = saving()
        resumed = make(max_epochs=2, callbacks=[last, LoadInitState(last)], **options).fit(X, Y)
        assert_same_nets(one, resumed)
        assert len(resumed.history) == 4
        assert scale_of(one) > 2**16

    def test_with_amp_off_checkpoints_have_no_file_of_amp(self, tmp_path: Path) -> None:
        def fit(level: str) -> Any:
            saving = TrainEndCheckpoint(dirname=str(tmp_path), f_amp="amp.pt")
            return make(callbacks=[saving, LoadInitState(saving)], amp__opt_level=level).fit(X, Y)

        fit("O0")
        assert not list(tmp_path.glob("*amp*"))
        assert list(tmp_path.glob("*params*"))
        assert len(fit("O0").history) == 6
        with pytest.warns(AmpWarning, match="saved with amp off"):
            assert len(fit("O1").history) == 9

    def test_checkpoints_of_the_best_net_are_float32(self, tmp_path: Path) -> None:
        files = {"f_pickle": "net.pkl", "f_amp": "amp_{last_epoch[epoch]}.pt"}
        saving = Checkpoint(dirname=str(tmp_path), load_best=True, **files)
        net = make(amp__opt_level="O2", callbacks=[saving, EarlyStopping(load_best=True)]).fit(X, Y)
        assert (tmp_path / "amp_3.pt").exists()
        pickled = pickle.loads((tmp_path / "net.pkl").read_bytes())
        assert_same_state(pickled.module_.state_dict(), net.module_.state_dict())
        assert types_of(pickled.module_) == {torch.float32}

    def test_pickling_within_a_step_at_o2_raises(self) -> None:
        with pytest.raises(UsageError, match="on_batch_end"):
            make(amp__opt_level="O2", callbacks=[on_event("on_grad_computed", pickle.dumps)]).fit(X, Y)


class TestSaving:
    @pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
    @pytest.mark.parametrize("options", [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}])
    @pytest.mark.covering(1)
    def test_copied_and_pickled_nets_train_on_to_the_same_bits(
        self, options: dict[str, Any], way: Callable[[Any], Any]
    ) -> None:
        net = make(**options, **({} if "amp__scaler" in options else ADAM)).fit(X, Y)
        twin = way(net)
        assert_same_nets(net.partial_fit(X, Y), twin.partial_fit(X, Y))

    @pytest.mark.parametrize("use_safetensors", [True, False])
    @pytest.mark.parametrize("options", [{"amp__scale_window": 3}, {"amp__scaler": ampatch.GradScaler}])
    def test_save_params_and_load_params_keep_the_state(
        self, options: Any, use_safetensors: bool, tmp_path: Path
    ) -> None:
        net, other = make(**options).fit(X, Y), make(**options).initialize()
        net.save_params(f_amp=str(tmp_path / "amp"), use_safetensors=use_safetensors)
        other.load_params(f_amp=str(tmp_path / "amp"), use_safetensors=use_safetensors)
        assert_same_state(other.amp_.state_dict(), net.amp_.state_dict())

    def test_a_state_loaded_within_a_fit_counts(self, tmp_path: Path) -> None:
        def load(net: Any) -> None:
            if len(net.history) == 3:
                net.load_params(f_amp=path)

        path = str(tmp_path / "amp.pt")
        make(amp__init_scale=8.0).fit(X, Y).save_params(f_amp=path)
        assert scale_of(make(callbacks=[on_event("on_epoch_begin", load)]).fit(X, Y)) == 8

    def test_bad_files_of_a_state_raise(self, tmp_path: Path) -> None:
        net, path = make().fit(X, Y), str(tmp_path / "params.pt")
        with pytest.raises(NotInitializedError):
            make().save_params(f_amp=path)
        with pytest.raises(FileNotFoundError):
            net.load_params(f_amp=path)
        net.save_params(f_params=path)
        with pytest.raises(OptionError, match="f_params"):
            net.load_params(f_amp=path)
        net.save_params(f_amp=path)
        with pytest.raises(OptionError, match="saved without amp__scaler"):
            make(amp__scaler=ampatch.GradScaler).initialize().load_params(f_amp=path)


class TestParameters:
    def test_parameters_are_searched(self) -> None:
        grid = {"amp__opt_level": ["O0", "O1"], "amp__half_dtype": ["float16", "bfloat16"]}
        search = GridSearchCV(make(max_epochs=1), grid, cv=2, error_score="raise").fit(X, Y)
        assert len(search.cv_results_["params"]) == 4
        assert search.predict(X).shape == (256,)
        cross_validate(make(max_epochs=1), X, Y, cv=2, error_score="raise")

    @pytest.mark.slow
    @pytest.mark.once
    def test_parameters_are_searched_in_two_processes(self) -> None:
        grid = {"amp__opt_level": ["O0", "O1", "O2"]}
        GridSearchCV(make(max_epochs=1), grid, cv=2, n_jobs=2, error_score="raise").fit(X, Y)

    def test_parameters_are_cloned_and_reached_through_pipelines(self) -> None:
        net = make(amp__init_scale=1024.0).fit(X, Y)
        assert scale_of(clone(net).fit(X, Y)) == 1024
        pipeline = make_pipeline(StandardScaler(), net).set_params(net__amp__opt_level="O2")
        assert pipeline.fit(X, Y)[-1].module_.seen == {torch.float16}

    def test_parameters_set_after_a_fit_take_effect(self) -> None:
        net = make(amp__loss_scale=128.0).fit(X, Y)
        assert scale_of(net) == 128
        assert scale_of(net.set_params(amp__loss_scale="dynamic", amp__init_scale=64.0).partial_fit(X, Y)) == 64
        assert scale_of(net.set_params(amp__scaler=ampatch.GradScaler("cpu", 8.0), amp__loss_scale=None)) == 8
        assert net.set_params(amp__scaler=None).set_params(amp__opt_level="O0").fit(X, Y).module_.seen == {
            torch.float32
        }

    def test_parameters_set_within_a_fit_take_effect_with_the_next_step(self) -> None:
        levels: list[object] = []
        change = on_event(
            "on_epoch_begin", lambda net: net.set_params(amp__opt_level=["O1", "O2", "O0"][len(net.history) - 1])
        )
        note = on_event("on_batch_end", lambda net: levels.append(amp.settings().get("opt_level")))
        make(callbacks=[("change", change), ("note", note)], train_split=None, batch_size=-1).fit(X, Y)
        assert levels == ["O1", "O2", None]

    @pytest.mark.parametrize("when", ["on_epoch_begin", "on_train_end"])
    def test_a_first_scale_set_within_a_fit_replaces_the_scale(self, when: str) -> None:
        def change(net: Any) -> None:
            if len(net.history) == 3:
                net.set_params(amp__init_scale=8.0)

        net = make(callbacks=[on_event(when, change)], amp__init_scale=64.0).fit(X, Y)
        assert when == "on_train_end" or scale_of(net) == 8
        assert scale_of(net.set_params(callbacks=None).partial_fit(X, Y)) == 8

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"amp__optlevel": "O1"}, "Did you mean 'amp__opt_level'"),
            ({"amp_opt_level": "O1"}, "did you mean amp__opt_level"),
            ({"amp": "O1"}, "unexpected argument amp"),
            ({"amp__models": 1}, "unexpected argument amp__models"),
            ({"amp__opt_level": "O9"}, "opt_level is 'O9'"),
            ({"amp__loss_scale": "dyn"}, "loss_scale is 'dyn'"),
            ({"amp__scaler": 3}, "lacks scale"),
            ({"amp__scaler__init_scale": 3}, "no amp__scaler"),
            ({"amp__scaler": ampatch.GradScaler, "amp__scaler__init": 3}, "cannot be made"),
            ({"amp__scaler": ampatch.GradScaler("cpu"), "amp__scaler__init_scale": 3}, "is an instance"),
            ({"amp__scaler": ampatch.GradScaler, "amp__init_scale": 3}, "Leave one of the two out"),
            ({"amp__scaler": ampatch.GradScaler, "amp__opt_level": "O2"}, "opt_level='O2'"),
            ({"amp__scaler": ampatch.GradScaler, "amp__check_finite": True}, "check_finite would have no effect"),
            ({"amp__scaler": ampatch.GradScaler, "amp__on_overflow": "raise"}, "on_overflow would have no effect"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_bad_parameters_raise(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**options).fit(X, Y)

    def test_bad_parameters_of_an_initialized_net_raise_at_once(self) -> None:
        with pytest.raises(OptionError, match="amp__loss_scale"):
            make().initialize().set_params(amp__los_scale=1)

    def test_a_scaler_class_is_made_anew_and_an_instance_kept(self) -> None:
        net = make(amp__scaler=ampatch.GradScaler, amp__scaler__init_scale=4.0, amp__scaler__growth_interval=2)
        assert scale_of(net.fit(X, Y)) == scale_of(net.fit(X, Y)) == 32
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        assert scale_of(make(amp__scaler=scaler).fit(X, Y)) == 32
        assert scaler.get_scale() == 32
        assert_same_state(
            make(amp__scaler=scaler).fit(X, Y).module_.state_dict(), make().fit(X, Y).module_.state_dict()
        )

    def test_parameters_set_within_a_session_take_effect(self) -> None:
        net = make(amp__half_dtype="float16").fit(X, Y)
        net.module_.seen.clear()
        with net.amp_session():
            net.predict(X)
            net.set_params(amp__half_dtype="bfloat16")
            net.predict(X)
            net.set_params(amp__opt_level="O0")
            net.predict(X)
        assert net.module_.seen == {torch.float16, torch.bfloat16, torch.float32}

    def test_an_accelerator_set_by_the_user_stays(self) -> None:
        net = make().initialize()
        assert net.accelerator is None
        net.accelerator = own = object()
        assert net.accelerator is own


class TestSeveralFits:
    @pytest.mark.parametrize(
        ("outer", "inner", "message"),
        [
            ("float16", "bfloat16", r"half_dtype is torch.float16 \(this call"),
            ("float16", "float16", "dynamic loss scale"),
        ],
    )
    def test_a_fit_within_a_fit_raises_if_they_cannot_share_amp(self, outer: str, inner: str, message: str) -> None:
        within = on_event("on_epoch_end", lambda net: make(amp__half_dtype=inner, max_epochs=1).fit(X, Y))
        with pytest.raises(UsageError, match=message):
            make(amp__half_dtype=outer, callbacks=[within]).fit(X, Y)

    def test_fits_and_predictions_within_a_fit_change_no_bit_of_it(self) -> None:
        def use_others(net: Any) -> None:
            teacher.predict(X)
            assert make(amp__half_dtype="bfloat16", max_epochs=1).fit(X, Y).module_.seen == {torch.bfloat16}

        teacher = make(amp__half_dtype="bfloat16").fit(X, Y)
        net = make(amp__half_dtype="bfloat16", callbacks=[on_event("on_epoch_end", use_others)]).fit(X, Y)
        assert_same_state(net.module_.state_dict(), teacher.module_.state_dict())

    @pytest.mark.parametrize(("outer", "inner"), [("O0", "O1"), ("O1", "O0")])
    def test_a_fit_without_amp_and_one_with_amp_within_it_keep_their_types(self, outer: str, inner: str) -> None:
        types = {"O0": {torch.float32}, "O1": {torch.float16}}
        seen: list[set[torch.dtype]] = []
        within = on_event(
            "on_epoch_end", lambda net: seen.append(make(amp__opt_level=inner, max_epochs=1).fit(X, Y).module_.seen)
        )
        assert make(amp__opt_level=outer, callbacks=[within]).fit(X, Y).module_.seen == types[outer]
        assert seen == [types[inner]] * 3

    def test_fits_in_threads_end_with_the_same_bits(self) -> None:
        alone = make(amp__half_dtype="bfloat16").fit(X, Y)
        nets = [make(amp__half_dtype="bfloat16").initialize() for _ in range(3)]
        together(functools.partial(net.partial_fit, X, Y) for net in nets)
        for net in nets:
            assert_same_state(net.module_.state_dict(), alone.module_.state_dict())

    def test_a_fit_without_amp_has_no_casts_of_a_fit_in_another_thread(self) -> None:
        def wait(net: Any) -> None:
            begun.set()
            assert done.wait(60)

        begun, done = threading.Event(), threading.Event()
        beside = make(callbacks=[on_event("on_batch_begin", wait)])
        thread = threading.Thread(target=beside.fit, args=(X, Y))
        thread.start()
        try:
            assert begun.wait(60)
            assert amp.is_on()
            assert make(amp__enabled=False).fit(X, Y).module_.seen == {torch.float32}
        finally:
            done.set()
            thread.join()
        assert beside.module_.seen == {torch.float16}

    def test_forward_iters_may_end_in_any_order(self) -> None:
        first, second = (make(amp__half_dtype="bfloat16").initialize().forward_iter(X) for _ in range(2))
        next(first)
        next(second)
        list(first)
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        list(second)

    @EACH_LEVEL
    @pytest.mark.parametrize("name", ["initialize", "deinitialize"])
    def test_ctrl_c_waits_until_amp_is_set_up_or_taken_down(self, name: str, level: str, monkeypatch: Any) -> None:
        original = getattr(amp, name)

        def interrupted(*args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return original(*args, **options)

        net = make(amp__opt_level=level).initialize()
        monkeypatch.setattr(amp, name, interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background has none
        try:
            with pytest.raises(KeyboardInterrupt):
                net.predict(X)
        finally:
            signal.signal(signal.SIGINT, before)
        monkeypatch.setattr(amp, name, original)
        assert not amp.is_on()
        assert types_of(net.module_) == {torch.float32}
        net.predict(X)

    def test_deinitialize_within_a_fit_raises(self) -> None:
        with pytest.raises(UsageError, match="in the midst of a fit"):
            make(callbacks=[on_event("on_epoch_end", lambda net: amp.deinitialize())]).fit(X, Y)


class TestClasses:
    def test_a_class_with_the_mixin_after_the_net_raises(self) -> None:
        with pytest.raises(UsageError, match=r"Type class Late\(AmpNetMixin, NeuralNetClassifier\)"):
            type("Late", (NeuralNetClassifier, AmpNetMixin), {})

    def test_a_class_with_accelerates_mixin_raises(self) -> None:
        from skorch.hf import AccelerateMixin

        with pytest.raises(UsageError, match="both cast"):
            type("Both", (AmpNetMixin, AccelerateMixin, NeuralNetClassifier), {})

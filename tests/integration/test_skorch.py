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
import torch
from helpers import HALF_DTYPES, assert_clear_import_error, assert_same_bits, assert_same_state, dtype_name
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    InputShapeSetter,
    LoadInitState,
    LRScheduler,
    TrainEndCheckpoint,
)
from skorch.dataset import unpack_data
from skorch.exceptions import NotInitializedError, SkorchTrainingImpossibleError
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.integrations.skorch import AmpNetMixin

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(256, 8)).astype("float32")
Y = (X[:, 0] > 0).astype("int64") + (X[:, 1] > 0).astype("int64")
EXPLODING = {"amp__init_scale": 2.0**24, "module__width": 512}  # with inputs * 1000: every step overflows


class Net(AmpNetMixin, NeuralNetClassifier):
    pass


class Regressor(AmpNetMixin, NeuralNetRegressor):
    pass


class Binary(AmpNetMixin, NeuralNetBinaryClassifier):
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


BATCH = torch.from_numpy(X[:64]), torch.from_numpy(Y[:64])
EACH_LEVEL = pytest.mark.parametrize("level", ["O1", "O2"])
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01, "amp__scale_window": 3}


class TestTraining:
    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.covering(1)
    def test_learns_what_float32_learns(self, level: str, half: torch.dtype) -> None:
        net = make(amp__opt_level=level, amp__half_dtype=half).fit(X, Y)
        plain = make(amp__enabled=False).fit(X, Y)
        assert net.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"], rel=1e-3)
        assert net.module_.seen == {torch.float32 if level == "O0" else half}
        assert {each.dtype for each in net.module_.parameters()} == {torch.float32}
        assert net.predict_proba(X).dtype == np.float32

    def test_where_amp_is_off_the_net_is_skorchs_own_bit_for_bit(self) -> None:
        torch.manual_seed(0)
        plain = NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.1, verbose=0).fit(X, Y)
        off = make(amp__opt_level="O0").fit(X, Y)
        assert_same_state(off.module_.state_dict(), plain.module_.state_dict())

    def test_regressors_and_binary_classifiers_predict_float32_in_bfloat16(self) -> None:
        targets = RANDOM.normal(size=(256, 3)).astype("float32")
        net = make(Regressor, criterion=nn.MSELoss, amp__half_dtype="bfloat16").fit(X, targets)
        assert net.predict(X).dtype == np.float32
        binary = Binary(nn.Linear, module__in_features=8, module__out_features=1, verbose=0, max_epochs=1)
        assert binary.fit(X, (Y > 0).astype("float32")).predict_proba(X).dtype == np.float32

    @pytest.mark.parametrize("where", ["get_loss", "callback"])
    def test_that_is_broken_off_leaves_nothing_behind(self, where: str) -> None:
        class Breaking(Net):
            def get_loss(self, *args: Any, **kwargs: Any) -> Any:
                if where == "get_loss" and len(self.history) == 2:
                    raise KeyboardInterrupt
                return super().get_loss(*args, **kwargs)

            def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
                if where == "callback" and len(self.history) == 2:
                    raise ZeroDivisionError

        net = make(Breaking, amp__opt_level="O2")
        try:
            net.fit(X, Y)
        except ZeroDivisionError:
            assert where == "callback"
        assert not amp.is_on()
        assert net.module_.first.weight.dtype is torch.float32
        net.partial_fit(X, Y)

    @EACH_LEVEL
    def test_goes_on_with_the_same_bits(self, level: str) -> None:
        whole = make(max_epochs=4, amp__opt_level=level, **ADAM).fit(X, Y)
        pieces = make(max_epochs=1, amp__opt_level=level, **ADAM)
        for _ in range(4):
            pieces.partial_fit(X, Y)
            pieces.predict(X)  # sets amp up as well
        assert_same_nets(whole, pieces)
        assert scale_of(whole) > 2**16

    def test_anew_begins_with_a_fresh_scale(self) -> None:
        net = make(amp__scale_window=3).fit(X, Y)
        grown = scale_of(net)
        net.initialize()
        assert net.amp_.state_dict() == {}
        assert grown == scale_of(net.fit(X, Y)) > 2**16

    def test_with_closures_of_lbfgs(self) -> None:
        options = {
            "optimizer": torch.optim.LBFGS, "optimizer__max_iter": 4, "lr": 0.05, "batch_size": -1,
            "optimizer__history_size": 5,
        }  # fmt: skip
        losses = [
            make(**options, **more).fit(X, Y).history[-1, "train_loss"]
            for more in ({"amp__opt_level": "O0"}, {}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler})
        ]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-2)
        with pytest.raises(UsageError, match=r"Use ampatch.GradScaler\b"):
            make(**options, amp__scaler=torch.amp.GradScaler).fit(X, Y)

    def test_with_a_module_that_a_callback_makes_anew_and_another_that_shapes_it(self) -> None:
        class Widening(Callback):
            def on_epoch_begin(self, net: Any, **_: Any) -> None:
                if len(net.history) == 2:
                    net.set_params(module__width=32)

        shaping = InputShapeSetter(param_name="inputs")
        net = make(amp__opt_level="O2", module__inputs=3, callbacks=[shaping, Widening()]).fit(X, Y)
        assert net.module_.first.weight.shape == (32, 8)
        assert net.module_.seen == {torch.float16}

    @pytest.mark.slow
    # torch's, of the loss that skorch has it compile.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
    @EACH_LEVEL
    def test_with_compiled_modules(self, level: str) -> None:
        class Plain(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

        compiled = make(module=Plain, amp__opt_level=level, compile=True, compile__backend="eager").fit(X, Y)
        usual = make(module=Plain, amp__opt_level=level).fit(X, Y)
        assert_same_state(*(list(net.module_.state_dict().values()) for net in (compiled, usual)))
        off = make(module=Plain, amp__opt_level="O0").fit(X, Y)
        assert not torch.equal(off.module_[0].weight, usual.module_[0].weight)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_with_checkpointed_forwards(self, reentrant: bool) -> None:
        class Checkpointed(MLP):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, inputs.clone().requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

        net = make(module=Checkpointed).fit(X, Y)
        assert_same_state(net.module_.state_dict(), make().fit(X, Y).module_.state_dict())
        assert net.module_.seen == {torch.float16}

    def test_without_effect_warns(self) -> None:
        class Uncast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(3))

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return inputs[:, :3] * self.weight

        class Loss(nn.Module):
            def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return (outputs[:, 0] - targets).abs().amax()

        with pytest.warns(AmpWarning, match="cast nothing"):
            make(module=Uncast, criterion=Loss).fit(X, Y)


class TestPredicting:
    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_computes_in_half_and_leaves_every_bit_of_the_weights(self, level: str) -> None:
        net = make(amp__opt_level=level).initialize()
        before = copy.deepcopy(net.module_.state_dict())
        net.predict(X)
        assert net.module_.seen == {torch.float16}
        assert_same_state(net.module_.state_dict(), before)

    def test_and_a_fit_that_rounds_a_weight_is_not_undone(self) -> None:
        class Rounding(torch.optim.SGD):
            """Rounds the masters to half, as a training step may."""

            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                with torch.no_grad():
                    for each in self.param_groups[0]["params"]:
                        each.copy_(before[each.shape].half())
                return result

        net = make(amp__opt_level="O2", optimizer=Rounding).initialize()
        before = {each.shape: each.detach().clone() for each in net.module_.parameters()}
        net.partial_fit(X, Y)
        for each in net.module_.parameters():
            assert_same_bits(each.detach(), before[each.shape].half().float())

    def test_leaves_frozen_weights_through_a_fit_too(self) -> None:
        net = make(amp__opt_level="O2", callbacks=[Freezer("first.*")]).initialize()
        before = net.module_.first.weight.clone()
        net.partial_fit(X, Y)
        assert_same_bits(net.module_.first.weight.detach(), before.detach())

    def test_gives_what_validation_saw(self) -> None:
        class Scores(EpochScoring):
            pass

        cached, uncached = (
            make(callbacks=[Scores("accuracy", name="a", use_caching=caching)]).fit(X, Y) for caching in (True, False)
        )
        assert cached.history[:, "a"] == uncached.history[:, "a"]
        assert_same_nets(cached, uncached)

    def test_of_a_trimmed_and_pickled_net(self) -> None:
        net = make(amp__opt_level="O2").fit(X, Y)
        outputs = net.forward(X)
        net.trim_for_prediction()
        assert_same_bits(pickle.loads(pickle.dumps(net)).forward(X), outputs)
        with pytest.raises(SkorchTrainingImpossibleError):
            net.partial_fit(X, Y)

    def test_half_way_through_keeps_amp_set_up_and_a_fit_may_come_between(self) -> None:
        net, other = make(batch_size=32).fit(X, Y), make(amp__half_dtype="bfloat16").fit(X, Y)
        outputs = net.forward_iter(X)
        next(outputs)
        net.partial_fit(X, Y)
        next(outputs)
        with pytest.raises(UsageError, match=r"half_dtype is torch.float16 \(this call: torch.bfloat16\)"):
            other.predict(X)
        del outputs
        other.predict(X)

    def test_that_ends_in_another_thread_warns(self) -> None:
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

    def test_in_a_session_sets_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = make().fit(X, Y)
        calls: list[object] = []
        initialize = amp.initialize
        monkeypatch.setattr(amp, "initialize", lambda *args, **options: calls.append(1) or initialize(*args, **options))
        with net.amp_session():
            for _ in range(3):
                net.predict(X)
        assert len(calls) == 1


class TestCasting:
    def test_covers_infer_and_get_loss_and_nothing_else(self) -> None:
        seen: dict[str, set[bool]] = {}

        def note(where: str) -> None:
            seen.setdefault(where, set()).add(amp.settings()["casts_here"])

        class Noting(Net):
            def infer(self, *args: Any, **kwargs: Any) -> Any:
                note("infer")
                return super().infer(*args, **kwargs)

            def get_loss(self, *args: Any, **kwargs: Any) -> Any:
                note("get_loss")
                return super().get_loss(*args, **kwargs)

            def get_iterator(self, *args: Any, **kwargs: Any) -> Any:
                note("get_iterator")
                return super().get_iterator(*args, **kwargs)

            def train_step_single(self, *args: Any, **kwargs: Any) -> Any:
                note("train_step_single")
                return super().train_step_single(*args, **kwargs)

            def on_grad_computed(self, *args: Any, **kwargs: Any) -> None:
                note("on_grad_computed")

            def on_batch_end(self, *args: Any, **kwargs: Any) -> None:
                note("on_batch_end")

        make(Noting).fit(X, Y)
        assert seen.pop("infer") == seen.pop("get_loss") == {True}
        assert len(seen) == 4
        assert set().union(*seen.values()) == {False}

    def test_holds_in_backward_too_for_functions_of_the_users(self) -> None:
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

    def test_heeds_the_users_own_regions_without_casts(self) -> None:
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
    """That call no method of the mixin's, nor of skorch's."""

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
    def test_train_as_what_they_override(self, name: str, body: Callable[..., Any], level: str) -> None:
        net = make(override(name, body), amp__opt_level=level).fit(X, Y)
        usual = make(amp__opt_level=level).fit(X, Y)
        assert_same_state(net.module_.state_dict(), usual.module_.state_dict())
        assert_same_state(net.amp_.state_dict(), usual.amp_.state_dict())

    @pytest.mark.parametrize("scaler", [None, ampatch.GradScaler, torch.amp.GradScaler])
    def test_have_steps_skipped_that_overflow(self, scaler: Any) -> None:
        of_scaler = {"amp__scaler__init_scale": 2.0**40, "amp__scaler": scaler, "module__width": 512}
        net = make(override("train_step", whole), **(EXPLODING if scaler is None else of_scaler))
        net.initialize()
        before = net.module_.first.weight.clone()
        net.partial_fit(X * 1000, Y)
        assert_same_bits(net.module_.first.weight.detach(), before.detach())
        assert scale_of(net) < (2**24 if scaler is None else 2**40)

    @pytest.mark.parametrize(
        ("name", "body", "message"),
        [
            ("infer", lambda net, x, **_: net.module_(torch.as_tensor(x)), "cast nothing"),
            ("train_step", whole, "no amp.scale_loss was told of"),
        ],
    )
    def test_on_an_instance_go_past_amp_and_are_told_of(self, name: str, body: Any, message: str) -> None:
        net = make().initialize()
        setattr(net, name, functools.partial(body, net))
        with pytest.warns(AmpWarning, match=message):
            net.partial_fit(X, Y)

    def test_that_hand_gradients_on_by_themselves_are_told_of(self) -> None:
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

    def test_by_a_class_before_the_mixin_are_covered(self) -> None:
        class Other:
            def infer(self, x: Any, **_: Any) -> Any:
                return self.module_(torch.as_tensor(x))  # type: ignore[attr-defined]

        assert make(type("Mixed", (Other, Net), {})).fit(X, Y).module_.seen == {torch.float16}

    def test_accumulate(self) -> None:
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

    @pytest.mark.parametrize(
        "options",
        [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}, {"amp__scaler": torch.amp.GradScaler}],
    )
    def test_find_gradients_unscaled_of_inputs_and_of_other_models(self, options: dict[str, Any]) -> None:
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

    @pytest.mark.parametrize(
        "options",
        [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}, {"amp__scaler": torch.amp.GradScaler}],
    )
    def test_train_two_modules_with_an_optimizer_each(self, options: dict[str, Any]) -> None:
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

    def test_with_optimizers_that_skorch_does_not_know_are_an_error(self) -> None:
        class Hiding(Net):
            def initialize_optimizer(self) -> Any:
                self.optimizers_ = [torch.optim.SGD(self.module_.parameters(), lr=0.1)]
                return self

        with pytest.raises(UsageError, match="initialize_optimizer"):
            make(type("Overriding", (Hiding,), {"train_step": single})).fit(X, Y)

    def test_of_loops_of_ones_own(self) -> None:
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
    @pytest.mark.parametrize(
        "options",
        [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}, {"amp__scaler": torch.amp.GradScaler}],
    )
    def test_clipping_works_on_unscaled_gradients_twice_too(self, options: dict[str, Any]) -> None:
        def train(**options: Any) -> tuple[list[float], torch.Tensor]:
            norms: list[float] = []

            class Looking(Callback):
                def on_grad_computed(self, net: Any, named_parameters: Any, **_: Any) -> None:
                    norms.append(float(torch.nn.utils.get_total_norm([each.grad for _, each in named_parameters])))

            clipping = [("once", GradientNormClipping(0.05)), ("twice", GradientNormClipping(0.02))]
            net = make(callbacks=[("before", Looking()), *clipping, ("after", Looking())], **options).fit(X, Y)
            return norms, net.module_.first.weight

        (plain, weight), (half, half_weight) = train(amp__opt_level="O0"), train(**options)
        assert half == pytest.approx(plain, rel=1e-2)
        assert half[1::2] == pytest.approx([0.02] * len(half[1::2]), rel=1e-2)
        torch.testing.assert_close(half_weight, weight, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("options", [EXPLODING, {**EXPLODING, "amp__opt_level": "O2"}])
    def test_schedulers_of_batches_leave_skipped_steps_out_and_those_of_epochs_do_not(self, options: Any) -> None:
        def lr(step_every: str) -> float:
            policy = LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, step_every=step_every)
            net = make(max_epochs=2, callbacks=[policy], train_split=None, **options).fit(X * 1000, Y)
            return net.optimizer_.param_groups[0]["lr"]  # type: ignore[no-any-return]

        assert lr("batch") == 0.1
        assert lr("epoch") == 0.1 / 4

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.filterwarnings("ignore:the loss of a skipped step")
    def test_of_batches_hear_of_steps_that_check_finite_has_skipped(self, level: str) -> None:
        options = {"amp__opt_level": level, "amp__half_dtype": "bfloat16", "amp__check_finite": True}
        seen: list[Any] = []
        policy = LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, step_every="batch")
        inputs = X.copy()
        inputs[:1] = np.nan  # in one batch of two
        net = make(
            max_epochs=1,
            batch_size=128,
            callbacks=[policy],
            train_split=None,
            amp__on_overflow=seen.append,
            **options,
        )
        net.fit(inputs, Y)
        assert net.optimizer_.param_groups[0]["lr"] == 0.1 / 2
        assert all(bool(each.isfinite().all()) for each in net.module_.parameters())
        assert [each.loss_is_finite for each in seen] == [False]

    @EACH_LEVEL
    def test_checkpoints_carry_the_scale_and_a_resumed_net_has_the_same_bits(self, level: str, tmp_path: Path) -> None:
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

    def test_no_file_is_written_where_amp_is_off_nor_asked_for(self, tmp_path: Path) -> None:
        def fit(level: str) -> Any:
            saving = TrainEndCheckpoint(dirname=str(tmp_path), f_amp="amp.pt")
            return make(callbacks=[saving, LoadInitState(saving)], amp__opt_level=level).fit(X, Y)

        fit("O0")
        assert not list(tmp_path.glob("*amp*"))
        assert list(tmp_path.glob("*params*"))
        assert len(fit("O0").history) == 6
        with pytest.warns(AmpWarning, match="saved with amp off"):
            assert len(fit("O1").history) == 9

    def test_the_best_weights_come_back_and_whole_nets_are_pickled_in_float32(self, tmp_path: Path) -> None:
        files = {"f_pickle": "net.pkl", "f_amp": "amp_{last_epoch[epoch]}.pt"}
        saving = Checkpoint(dirname=str(tmp_path), load_best=True, **files)
        net = make(amp__opt_level="O2", callbacks=[saving, EarlyStopping(load_best=True)]).fit(X, Y)
        assert (tmp_path / "amp_3.pt").exists()
        pickled = pickle.loads((tmp_path / "net.pkl").read_bytes())
        assert_same_state(pickled.module_.state_dict(), net.module_.state_dict())
        assert {each.dtype for each in pickled.module_.parameters()} == {torch.float32}

    def test_pickling_within_a_step_at_o2_is_an_error(self) -> None:
        class Pickling(Callback):
            def on_grad_computed(self, net: Any, *args: Any, **_: Any) -> None:
                pickle.dumps(net)

        with pytest.raises(UsageError, match="on_batch_end"):
            make(amp__opt_level="O2", callbacks=[Pickling()]).fit(X, Y)


class TestSaving:
    @pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
    @pytest.mark.parametrize("options", [{}, {"amp__opt_level": "O2"}, {"amp__scaler": ampatch.GradScaler}])
    @pytest.mark.covering(1)
    def test_copies_go_on_with_the_same_bits(self, options: dict[str, Any], way: Callable[[Any], Any]) -> None:
        net = make(**options, **({} if "amp__scaler" in options else ADAM)).fit(X, Y)
        twin = way(net)
        assert_same_nets(net.partial_fit(X, Y), twin.partial_fit(X, Y))

    @pytest.mark.parametrize("use_safetensors", [True, False])
    @pytest.mark.parametrize("options", [{"amp__scale_window": 3}, {"amp__scaler": ampatch.GradScaler}])
    def test_the_state_travels_in_a_file(self, options: Any, use_safetensors: bool, tmp_path: Path) -> None:
        net, other = make(**options).fit(X, Y), make(**options).initialize()
        net.save_params(f_amp=str(tmp_path / "amp"), use_safetensors=use_safetensors)
        other.load_params(f_amp=str(tmp_path / "amp"), use_safetensors=use_safetensors)
        assert_same_state(other.amp_.state_dict(), net.amp_.state_dict())

    def test_the_state_is_loaded_in_the_midst_of_a_fit_too(self, tmp_path: Path) -> None:
        class Loading(Callback):
            def on_epoch_begin(self, net: Any, **_: Any) -> None:
                if len(net.history) == 3:
                    net.load_params(f_amp=path)

        path = str(tmp_path / "amp.pt")
        make(amp__init_scale=8.0).fit(X, Y).save_params(f_amp=path)
        assert scale_of(make(callbacks=[Loading()]).fit(X, Y)) == 8

    def test_a_bad_state_is_refused_when_it_is_loaded(self) -> None:
        net = make().fit(X, Y)
        before = net.amp_.state_dict()
        with pytest.raises(OptionError, match="loss_scale"):
            net.amp_.load_state_dict({**before, "loss_scaler0.loss_scale": torch.tensor(-1.0)})
        assert_same_state(net.amp_.state_dict(), before)

    def test_bad_files_are_told_of(self, tmp_path: Path) -> None:
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
    def test_are_searched(self) -> None:
        grid = {"amp__opt_level": ["O0", "O1"], "amp__half_dtype": ["float16", "bfloat16"]}
        search = GridSearchCV(make(max_epochs=1), grid, cv=2, error_score="raise").fit(X, Y)
        assert len(search.cv_results_["params"]) == 4
        assert search.predict(X).shape == (256,)
        cross_validate(make(max_epochs=1), X, Y, cv=2, error_score="raise")

    @pytest.mark.slow
    @pytest.mark.once
    def test_are_searched_in_two_processes(self) -> None:
        grid = {"amp__opt_level": ["O0", "O1", "O2"]}
        GridSearchCV(make(max_epochs=1), grid, cv=2, n_jobs=2, error_score="raise").fit(X, Y)

    def test_are_cloned_and_reached_through_pipelines(self) -> None:
        net = make(amp__init_scale=1024.0).fit(X, Y)
        assert scale_of(clone(net).fit(X, Y)) == 1024
        pipeline = make_pipeline(StandardScaler(), net).set_params(net__amp__opt_level="O2")
        assert pipeline.fit(X, Y)[-1].module_.seen == {torch.float16}

    def test_take_effect_after_training_has_begun(self) -> None:
        net = make(amp__loss_scale=128.0).fit(X, Y)
        assert scale_of(net) == 128
        assert scale_of(net.set_params(amp__loss_scale="dynamic", amp__init_scale=64.0).partial_fit(X, Y)) == 64
        assert scale_of(net.set_params(amp__scaler=ampatch.GradScaler("cpu", 8.0), amp__loss_scale=None)) == 8
        assert net.set_params(amp__scaler=None).set_params(amp__opt_level="O0").fit(X, Y).module_.seen == {
            torch.float32
        }

    def test_take_effect_in_the_midst_of_a_fit_with_the_next_step(self) -> None:
        levels: list[object] = []

        class Changing(Callback):
            def on_epoch_begin(self, net: Any, **_: Any) -> None:
                net.set_params(amp__opt_level=["O1", "O2", "O0"][len(net.history) - 1])

            def on_batch_end(self, net: Any, training: bool, **_: Any) -> None:
                levels.append(amp.settings().get("opt_level"))

        make(callbacks=[Changing()], train_split=None, batch_size=-1).fit(X, Y)
        assert levels == ["O1", "O2", None]

    @pytest.mark.parametrize("when", ["on_epoch_begin", "on_train_end"])
    def test_of_the_first_scale_count_in_the_midst_of_a_fit_too(self, when: str) -> None:
        class Changing(Callback):
            def notify(self, net: Any, **_: Any) -> None:
                if len(net.history) == 3:
                    net.set_params(amp__init_scale=8.0)

        setattr(Changing, when, Changing.notify)
        net = make(callbacks=[Changing()], amp__init_scale=64.0).fit(X, Y)
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
    def test_that_are_bad_are_an_error(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**options).fit(X, Y)

    def test_that_are_bad_are_an_error_at_once_in_a_net_that_is_initialized(self) -> None:
        with pytest.raises(OptionError, match="amp__loss_scale"):
            make().initialize().set_params(amp__los_scale=1)

    def test_of_scalers_a_class_is_made_anew_and_an_instance_used_as_it_is(self) -> None:
        net = make(amp__scaler=ampatch.GradScaler, amp__scaler__init_scale=4.0, amp__scaler__growth_interval=2)
        assert scale_of(net.fit(X, Y)) == scale_of(net.fit(X, Y)) == 32
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        assert scale_of(make(amp__scaler=scaler).fit(X, Y)) == 32
        assert scaler.get_scale() == 32
        assert_same_state(
            make(amp__scaler=scaler).fit(X, Y).module_.state_dict(), make().fit(X, Y).module_.state_dict()
        )

    def test_within_a_session_too(self) -> None:
        net = make(amp__half_dtype="float16").fit(X, Y)
        net.module_.seen.clear()
        with net.amp_session():
            net.predict(X)
            net.set_params(amp__half_dtype="bfloat16")
            net.predict(X)
            net.set_params(amp__opt_level="O0")
            net.predict(X)
        assert net.module_.seen == {torch.float16, torch.bfloat16, torch.float32}

    def test_an_accelerator_of_the_users_own(self) -> None:
        net = make().initialize()
        assert net.accelerator is None
        net.accelerator = own = object()
        assert net.accelerator is own


class TestTwoAtATime:
    @pytest.mark.parametrize(
        ("outer", "inner", "message"),
        [
            ("float16", "bfloat16", r"half_dtype is torch.float16 \(this call"),
            ("float16", "float16", "dynamic loss scale"),
            ("bfloat16", "bfloat16", None),
        ],
    )
    def test_share_what_can_be_shared(self, outer: str, inner: str, message: str | None) -> None:
        class Fitting(Callback):
            def on_epoch_end(self, net: Any, **_: Any) -> None:
                found.append(make(amp__half_dtype=inner, max_epochs=1).fit(X, Y).module_.seen)

        found: list[set[torch.dtype]] = []
        net = make(amp__half_dtype=outer, callbacks=[Fitting()])
        if message is None:
            net.fit(X, Y)
            assert found == [{torch.bfloat16}] * 3
            alone = make(amp__half_dtype=outer).fit(X, Y)
            assert_same_state(net.module_.state_dict(), alone.module_.state_dict())
        else:
            with pytest.raises(UsageError, match=message):
                net.fit(X, Y)

    @pytest.mark.parametrize(("outer", "inner"), [("O0", "O1"), ("O1", "O0")])
    def test_one_that_is_off_is_nobodys_concern(self, outer: str, inner: str) -> None:
        class Fitting(Callback):
            def on_epoch_end(self, net: Any, **_: Any) -> None:
                seen = make(amp__opt_level=inner, max_epochs=1).fit(X, Y).module_.seen
                assert seen == {torch.float32 if inner == "O0" else torch.float16}

        assert make(amp__opt_level=outer, callbacks=[Fitting()]).fit(X, Y).module_.seen == {
            torch.float32 if outer == "O0" else torch.float16
        }

    def test_a_teacher_may_predict_meanwhile(self) -> None:
        class Asking(Callback):
            def on_epoch_end(self, net: Any, **_: Any) -> None:
                teacher.predict(X)

        teacher = make().fit(X, Y)
        assert_same_nets(make(callbacks=[Asking()]).fit(X, Y), teacher)

    def test_in_threads(self) -> None:
        alone = make(amp__half_dtype="bfloat16").fit(X, Y)
        nets = [make(amp__half_dtype="bfloat16").initialize() for _ in range(3)]
        for net in nets:
            net.module_.load_state_dict(make(amp__half_dtype="bfloat16").initialize().module_.state_dict())
        threads = [threading.Thread(target=net.partial_fit, args=(X, Y)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for net in nets:
            assert_same_state(net.module_.state_dict(), alone.module_.state_dict())

    def test_one_that_is_off_has_no_casts_of_a_neighbours_in_another_thread(self) -> None:
        begun, done = threading.Event(), threading.Event()

        class Waiting(Callback):
            def on_batch_begin(self, net: Any, **_: Any) -> None:
                begun.set()
                assert done.wait(60)

        beside = make(callbacks=[Waiting()])
        thread = threading.Thread(target=beside.fit, args=(X, Y))
        thread.start()
        try:
            assert begun.wait(60)
            assert amp.is_on()
            seen = make(amp__enabled=False).fit(X, Y).module_.seen
        finally:
            done.set()
            thread.join()
        assert seen == {torch.float32}
        assert beside.module_.seen == {torch.float16}

    def test_iterators_that_do_not_end_in_order(self) -> None:
        def own(tensor: torch.Tensor) -> torch.dtype:
            return nn.functional.linear(tensor, tensor).dtype

        nets = [make(amp__half_dtype="bfloat16").initialize() for _ in range(2)]
        first, second = (net.forward_iter(X) for net in nets)
        next(first)
        next(second)
        list(first)
        assert own(torch.ones(2, 2)) is torch.float32
        list(second)

    @EACH_LEVEL
    @pytest.mark.parametrize("name", ["initialize", "deinitialize"])
    def test_ctrl_c_waits_while_amp_is_set_up_and_taken_down(self, name: str, level: str, monkeypatch: Any) -> None:
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
        assert {each.dtype for each in net.module_.parameters()} == {torch.float32}
        net.predict(X)

    def test_taken_down_by_a_callback_is_an_error(self) -> None:
        class Ending(Callback):
            def on_epoch_end(self, net: Any, **_: Any) -> None:
                amp.deinitialize()

        with pytest.raises(UsageError, match="in the midst of a fit"):
            make(callbacks=[Ending()]).fit(X, Y)

    def test_beside_amp_of_the_users_own_is_an_error(self) -> None:
        amp.initialize(nn.Linear(1, 1), verbosity=0)
        try:
            with pytest.raises(UsageError, match=r"amp.deinitialize\(\)"):
                make().fit(X, Y)
        finally:
            amp.deinitialize()


class TestClasses:
    def test_name_the_mixin_first(self) -> None:
        with pytest.raises(UsageError, match=r"Type class Late\(AmpNetMixin, NeuralNetClassifier\)"):
            type("Late", (NeuralNetClassifier, AmpNetMixin), {})

    def test_cast_once(self) -> None:
        from skorch.hf import AccelerateMixin

        with pytest.raises(UsageError, match="both cast"):
            type("Both", (AmpNetMixin, AccelerateMixin, NeuralNetClassifier), {})

    @pytest.mark.slow
    @pytest.mark.once
    @pytest.mark.parametrize(
        ("fake", "message"),
        [("sys.modules['skorch'] = None", "pip install"), ("import skorch; skorch.__version__ = '0.15.0'", "0.15.0")],
    )
    def test_without_skorch_there_is_one_clear_error(self, fake: str, message: str) -> None:
        assert_clear_import_error("skorch", fake, message)

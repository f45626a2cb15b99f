"""Of `ampatch.integrations.lightning`: whatever a user of Lightning's Trainer does, amp is right, or says why not."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import assert_same_state, completed
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_nets import EACH_HALF, EACH_LEVEL, ENVIRONMENT, X, Y, net, norm, types_of, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.integrations.lightning import AmpatchPrecision, LossScaleMonitor
from ampatch.integrations.precision_plugin import bases

# Lightning wraps it for good, for Fabric; after each test torch must be what it was. Another file may have done this.
torch.compile = getattr(torch.compile, "__wrapped__", torch.compile)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*does not have many workers",
    "ignore:The number of training batches",
    "ignore:.*treespec, LeafSpec:FutureWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
)

ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01}


class Lit(pl.LightningModule):
    """Notes the types in which it computes, and its gradients before each step."""

    def __init__(self, optimizer: Any = torch.optim.SGD, lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__()
        self.net = net()
        self.optimizer, self.lr, self.factor = optimizer, lr, factor
        self.seen: set[torch.dtype] = set()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.net(inputs)
        self.seen.add(self.net[0](inputs.to(self.net[0].weight.dtype)).dtype)
        return hidden  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1]) * self.factor
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.loss(batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(norm(amp.master_params(optimizer)))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


def loader(batch_size: int = 64) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


def trainer(level: str | None = None, half: Any = "float16", amp_options: Any = (), **options: Any) -> pl.Trainer:
    plugins = None if level is None else AmpatchPrecision(level, half_dtype=half, **dict(amp_options))
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 3,
    }  # fmt: skip
    return pl.Trainer(plugins=plugins, **{**quiet, **options})


def fit(level: str | None = None, module: Any = None, **options: Any) -> Any:
    """Trains a module, a fresh one unless it is given."""
    module = Lit() if module is None else module
    trainer(level, **options).fit(module, loader())
    return module


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Any:
    yield
    assert not amp.is_on()


class TestTraining:
    @EACH_HALF
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.covering(1)
    def test_a_module_learns_what_float32_learns(self, level: str, half: torch.dtype) -> None:
        module, plain = fit(level, half=half), fit()
        assert module.losses[-1] == pytest.approx(plain.losses[-1], rel=5e-3)
        assert module.seen == {torch.float32 if level == "O0" else half}
        assert {each.dtype for each in module.parameters()} == {torch.float32}

    def test_at_o0_the_bits_are_those_of_lightnings_own(self) -> None:
        assert_same_state(weights(fit("O0")), weights(fit()))

    def test_a_module_is_fitted_again_and_at_another_level(self) -> None:
        module = fit("O1")
        again = trainer("O2")
        again.fit(module, loader())
        again.fit_loop.max_epochs = 4
        again.fit(module, loader())
        assert module.seen == {torch.float16}
        assert len(module.losses) == 7 * 4

    @EACH_LEVEL
    @pytest.mark.parametrize(("error", "raised"), [(ZeroDivisionError,) * 2, (KeyboardInterrupt, SystemExit)])
    @pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "configure_optimizers"])
    @pytest.mark.covering(1)
    def test_a_fit_that_raises_leaves_the_masters_in_float32(
        self, level: str, error: Any, raised: Any, where: str
    ) -> None:
        def broken(module: Lit, *args: Any) -> Any:
            if len(module.losses) == 3 or where == "configure_optimizers":
                raise error
            return getattr(Lit, where)(module, *args)

        module = type("Breaking", (Lit,), {where: broken})()
        with pytest.raises(raised):
            fit(level, module)
        assert not amp.is_on()
        expected = Lit() if where == "configure_optimizers" else fit(level, max_steps=3)
        assert_same_state(weights(module), weights(expected))

    @EACH_LEVEL
    def test_amp_is_off_before_lightning_moves_the_weights_to_the_cpu(self, level: str) -> None:
        class Moved(Lit):
            def cpu(self) -> Any:
                self.types = amp.is_on(), types_of(self)
                return super().cpu()

        assert fit(level, Moved()).types == (False, {torch.float32})

    def test_only_optimizers_that_may_call_the_closure_again_get_it(self) -> None:
        class Own(torch.optim.SGD):
            """An optimizer of the user's."""

        class Watching(Lit):
            def configure_optimizers(self) -> Any:
                optimizer = super().configure_optimizers()
                optimizer.register_step_pre_hook(
                    lambda _, args, kwargs: self.given.append(len(args) > 1 or bool(kwargs))
                )
                return optimizer

        for kind, gets_closure in ((torch.optim.SGD, False), (Own, True)):
            module = Watching(kind)
            module.given = []
            fit("O1", module, max_steps=1)
            assert module.given == [gets_closure]

    @EACH_LEVEL
    def test_gradients_accumulate_as_in_float32(self, level: str) -> None:
        module = fit(level, accumulate_grad_batches=2, max_epochs=1)
        plain = fit(accumulate_grad_batches=2, max_epochs=1)
        assert len(module.norms) == 2
        assert module.norms == pytest.approx(plain.norms, rel=2e-2)

    def test_batches_whose_step_returns_none_are_left_out(self) -> None:
        class Omitting(Lit):
            def training_step(self, batch: Any, index: int) -> Any:
                return self.loss(batch) if index % 2 else None

        module = Omitting()
        with pytest.warns(UserWarning, match="returned `None`"):
            fit("O1", module)
        assert [each > 0 for each in module.norms] == [False, True] * 6

    @EACH_LEVEL
    def test_validation_within_a_fit_changes_none_of_its_bits(self, level: str) -> None:
        module = Lit()
        trainer(level, val_check_interval=2).fit(module, loader(), loader())
        assert_same_state(weights(module), weights(fit(level)))

    @pytest.mark.filterwarnings("ignore:.*returned `None`")
    def test_a_fit_without_an_optimizer_runs_without_a_loss_scale(self) -> None:
        without = type("Without", (Lit,), {"configure_optimizers": lambda _: None})
        plain = fit(None, without())
        with pytest.warns(AmpWarning, match="without a loss scale.* Return one from configure_optimizers"):
            module = fit("O1", without())
        torch.testing.assert_close(module.net[0].weight.grad, plain.net[0].weight.grad, rtol=0.0, atol=0.05)

    @EACH_LEVEL
    def test_copies_made_in_a_fit_belong_to_no_fit(self, level: str) -> None:
        class Copying(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                plugin = trainer.precision_plugin
                copies.extend(map(copy.deepcopy, (trainer, trainer.callbacks, trainer.strategy)))
                pickled = pickle.loads(pickle.dumps(plugin))
                assert pickled.state_dict() == plugin.state_dict()

        copies: list[Any] = []
        module = fit(level, max_epochs=1, callbacks=[Copying()])
        assert_same_state(weights(module), weights(fit(level, max_epochs=1)))
        copied = copies[0]
        assert copied.strategy.teardown.__self__ is copied.strategy
        with pytest.raises(UsageError, match="outside of Trainer"), copied.precision_plugin.train_step_context():
            pass

    def test_the_plugin_has_the_device_of_its_trainer(self) -> None:
        assert trainer("O1").precision_plugin.device == "cpu"


class TestGradients:
    @EACH_LEVEL
    @pytest.mark.parametrize("backward", ["automatic", "manual_backward", "loss.backward", "closure"])
    def test_gradients_are_unscaled_in_every_hook(self, level: str, backward: str) -> None:
        class Hooked(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = backward == "automatic"
                self.after_backward: list[float] = []

            def on_after_backward(self) -> None:
                self.after_backward.append(norm(self.parameters()))

            def training_step(self, batch: Any, index: int) -> Any:
                if backward == "automatic":
                    return self.loss(batch)
                optimizer = self.optimizers()
                optimizer.zero_grad()
                if backward == "closure":
                    optimizer.step(closure=lambda: self.manual_backward(self.loss(batch)))
                    return None
                loss = self.loss(batch)
                self.manual_backward(loss) if backward == "manual_backward" else loss.backward()
                optimizer.step()
                return None

        plain, module = fit(None, Hooked()), fit(level, Hooked())
        assert module.norms == pytest.approx(plain.norms, rel=2e-2)
        assert module.after_backward == pytest.approx(plain.after_backward, rel=2e-2)
        assert module.seen == {torch.float16}

    @EACH_LEVEL
    @pytest.mark.parametrize("algorithm", ["norm", "value"])
    @pytest.mark.parametrize("overridden", [False, True], ids=["trainer", "configure_gradient_clipping"])
    def test_gradients_are_clipped_unscaled(self, level: str, algorithm: str, overridden: bool) -> None:
        class Clipping(Lit):
            clipped: tuple[float, ...] = ()

            def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
                if overridden:
                    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
                self.clip_gradients(optimizer, **options)
                self.clipped = (*self.clipped, norm(amp.master_params(optimizer)))

        options = {} if overridden else {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        module, plain = fit(level, Clipping(), **options), fit(None, Clipping(), **options)
        assert module.clipped == pytest.approx(plain.clipped, rel=2e-2)
        assert module.norms[0] > module.clipped[0] > 0
        if algorithm == "norm":
            assert module.clipped[0] == pytest.approx(0.01, rel=1e-3)

    @EACH_LEVEL
    def test_gradients_of_fused_optimizers_are_clipped(self, level: str) -> None:
        fused = functools.partial(torch.optim.SGD, fused=True)
        module, usual = Lit(fused), Lit()
        for each in (module, usual):
            trainer(level, gradient_clip_val=0.05).fit(each, loader())
        assert module.losses == pytest.approx(usual.losses, rel=1e-3)

    @EACH_LEVEL
    def test_gradients_that_a_hook_edits_are_clipped_as_edited(self, level: str) -> None:
        class Editing(Lit):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                for each in self.parameters():
                    each.grad.mul_(3.0)

            def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
                self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
                self.norms.append(norm(amp.master_params(optimizer)))

        assert fit(level, Editing()).norms == pytest.approx(fit(None, Editing()).norms, rel=2e-2)

    @EACH_LEVEL
    def test_toggled_optimizers_learn_what_float32_learns(self, level: str) -> None:
        class Gan(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
                self.critic[0].bias.requires_grad_(False)

            def training_step(self, batch: Any, index: int) -> None:
                of_net, of_critic = self.optimizers()
                self.toggle_optimizer(of_net)
                self.manual_backward(self.loss(batch) - 0.1 * self.critic(self(batch[0])).mean())
                assert all(each.grad is None for each in self.critic.parameters())
                of_net.step()
                of_net.zero_grad()
                self.untoggle_optimizer(of_net)
                with of_critic.toggle_model():
                    self.manual_backward(self.critic(self(batch[0]).detach()).square().mean())
                    of_critic.step()
                    of_critic.zero_grad()
                assert all(each.requires_grad for each in self.net.parameters())
                assert [each.requires_grad for each in self.critic.parameters()] == [True, False, True, True]

            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net, self.critic)]

        module, plain = fit(level, Gan(), amp_options={"init_scale": 1024.0}), fit(None, Gan())
        assert module.norms == pytest.approx(plain.norms, rel=3e-2)
        assert type(module).toggle_optimizer is pl.LightningModule.toggle_optimizer
        assert not hasattr(pl.LightningModule.toggle_optimizer, "__wrapped__")

    def test_gradients_of_the_modules_own_backward_are_unscaled(self) -> None:
        backward = {"backward": lambda _, loss: loss.backward(retain_graph=True)}
        assert fit("O1", type("Own", (Lit,), backward)()).norms == fit("O1").norms


class TestCasting:
    def test_casts_are_on_within_steps_only(self) -> None:
        casts: dict[str, set[bool]] = {}

        def noting(name: str) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                casts.setdefault(name, set()).add(amp.settings()["casts_here"])
                return getattr(Lit, name)(*args, **kwargs)

            return method

        hooks = {"configure_gradient_clipping", "on_after_backward", "on_train_batch_end", "on_validation_epoch_end"}
        noted = {name: noting(name) for name in ("training_step", "validation_step", *hooks)}
        trainer("O1").fit(type("Noting", (Lit,), noted)(), loader(), loader())
        assert casts.pop("training_step") == casts.pop("validation_step") == {True}
        assert casts == {name: {False} for name in hooks}


class TestSkippedSteps:
    @EACH_LEVEL
    @pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
    def test_skipped_steps_change_no_weight_and_schedulers_omit_them(self, level: str, manual: bool) -> None:
        class Scheduled(Lit):
            def __init__(self) -> None:
                super().__init__(factor=100.0)  # the first steps overflow
                self.automatic_optimization = not manual
                self.skipped: list[bool] = []
                self.before = weights(self)

            def training_step(self, batch: Any, index: int) -> Any:
                if not manual:
                    return self.loss(batch)
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                if not amp.step_was_skipped(optimizer):
                    self.lr_schedulers()[0].step()
                return None

            def on_train_batch_end(self, *_: Any) -> None:
                self.skipped.append(amp.step_was_skipped(self.optimizers()))
                if all(self.skipped):
                    assert_same_state(weights(self), self.before)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
                schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(3)]
                each_step, each_second_step, each_epoch = schedulers
                return [optimizer], [
                    {"scheduler": each_step, "interval": "step"},
                    {"scheduler": each_second_step, "interval": "step", "frequency": 2},
                    {"scheduler": each_epoch, "interval": "epoch"},
                ]

        module, running = Scheduled(), trainer(level, max_epochs=2)
        running.fit(module, loader())
        assert module.skipped[0]
        assert not module.skipped[-1]
        counts = [each.scheduler.last_epoch for each in running.lr_scheduler_configs]
        assert counts[0] == module.skipped.count(False)
        assert counts[1:] == ([0, 0] if manual else [4, 2])
        assert running.global_step == 8


class TestCheckpoints:
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.parametrize("at", [None, 2], ids=["after the fit", "in the midst"])
    @pytest.mark.covering(1)
    def test_a_resumed_fit_ends_with_the_same_bits(self, level: str, half: Any, at: int | None, tmp_path: Path) -> None:
        class Saving(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
                if trainer.current_epoch + 1 == at:
                    trainer.save_checkpoint(path)

        def train(epochs: int, **options: Any) -> tuple[Lit, pl.Trainer]:
            module = Lit(**ADAM)
            running = trainer(
                level, half, {"scale_window": 3}, max_epochs=epochs, gradient_clip_val=0.5, callbacks=[Saving()]
            )
            running.fit(module, loader(), **options)
            return module, running

        path = tmp_path / "amp.ckpt"
        whole, of_whole = train(4)
        _, first = train(2 if at is None else 3)
        if at is None:
            first.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        assert {each.dtype for each in saved["state_dict"].values()} == {torch.float32}
        moments = saved["optimizer_states"][0]["state"][0]
        assert moments["exp_avg"].dtype is torch.float32
        with_scale = {"loss_scaler0"} if half is torch.float16 else set()
        assert set(saved.get("AmpatchPrecision", ())) == with_scale
        resumed, of_resumed = train(4, ckpt_path=path)
        assert_same_state(weights(resumed), weights(whole))
        assert_same_state(of_resumed.optimizers[0].state_dict(), of_whole.optimizers[0].state_dict())
        assert of_resumed.precision_plugin.state_dict() == of_whole.precision_plugin.state_dict()
        if half is torch.float16:
            assert of_whole.precision_plugin.state_dict()["loss_scaler0"]["loss_scale"] > 2**16

    def test_checkpoints_load_without_the_plugin_and_the_other_way_round(self, tmp_path: Path) -> None:
        path = tmp_path / "amp.ckpt"
        first = trainer("O2", max_epochs=1)
        first.fit(Lit(), loader())
        first.save_checkpoint(path)
        plain = trainer(max_epochs=2)
        plain.fit(Lit(), loader(), ckpt_path=path)
        plain.save_checkpoint(path)
        trainer("O2", max_epochs=3).fit(Lit(), loader(), ckpt_path=path)
        assert_same_state(weights(Lit.load_from_checkpoint(path)), weights(plain.lightning_module))

    def test_the_scale_of_16_mixed_is_taken_over(self, tmp_path: Path) -> None:
        path = tmp_path / "mixed.ckpt"
        plain = trainer(max_epochs=1)
        plain.fit(Lit(), loader())
        plain.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.ones(()))
        torch.save({**saved, "MixedPrecision": scaler.state_dict()}, path)
        resumed = trainer("O1", max_epochs=2)
        resumed.fit(Lit(), loader(), ckpt_path=path)
        assert resumed.precision_plugin.state_dict()["loss_scaler0"]["loss_scale"] == 256

    def test_a_bad_state_of_the_plugin_raises(self) -> None:
        running = trainer("O1")
        running.precision_plugin.load_state_dict({"loss_scaler0": {"scale": "large"}})
        with pytest.raises(OptionError):
            running.fit(Lit(), loader())


class TestEvaluating:
    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.parametrize("entry", ["validate", "test", "predict"])
    @pytest.mark.covering(1)
    def test_evaluation_in_half_leaves_every_bit_of_the_weights(self, level: str, entry: str) -> None:
        module = Lit()
        before = weights(module)
        getattr(trainer(level), entry)(module, loader(), **({} if entry == "predict" else {"verbose": False}))
        assert module.seen == {torch.float16}
        assert_same_state(weights(module), before)

    def test_evaluation_casts_each_weight_once(self) -> None:
        class Counting(Lit):
            casts: tuple[int, ...] = ()

            def on_predict_batch_end(self, *_: Any) -> None:
                self.casts = (*self.casts, amp.cast_counts().casts)

        few, many = Counting(), Counting()
        trainer("O1", limit_predict_batches=1).predict(few, loader())
        trainer("O1").predict(many, loader())
        inputs = many.casts[-1] - many.casts[-2]
        assert few.casts[0] == inputs + 4  # two weights and two biases
        assert many.casts == tuple(few.casts[0] + inputs * index for index in range(4))

    def test_validation_sees_the_weights_of_the_last_step(self) -> None:
        class Comparing(Lit):
            def validation_step(self, batch: Any, index: int) -> None:
                with amp.disable_casts():
                    expected = self.net(batch[0])
                assert torch.allclose(self(batch[0]).float(), expected, rtol=1e-2, atol=1e-2)

        trainer("O1", val_check_interval=1).fit(Comparing(lr=5.0), loader(), loader())


class TestHalfWeights:
    """At O2 amp casts where a step calls a submodule, as Lightning's steps need not call the module's forward."""

    def test_submodules_with_half_weights_have_float32_outputs(self) -> None:
        class Parts(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 3)])
                self.weight = nn.Parameter(torch.ones(3))
                self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.1, 1.2]))
                self.accuracy = MulticlassAccuracy(3)

            def training_step(self, batch: Any, index: int) -> Any:
                hidden = self.layers[0](batch[0])
                outputs = self.layers[1](hidden)
                assert hidden.dtype is outputs.dtype is self.weight.dtype is torch.float32
                assert self.layers[0].weight.dtype is torch.float16
                self.log("accuracy", self.accuracy(outputs, batch[1]))
                return self.criterion(outputs * self.weight, batch[1]) + 0 * self.loss(batch)

        module = fit("O2", Parts())
        assert not torch.equal(module.weight, torch.ones(3))

    @pytest.mark.parametrize("wanted", ["net.2", "net.*", nn.LayerNorm], ids=str)
    def test_keep_fp32_takes_full_names(self, wanted: Any) -> None:
        class Normed(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.net[1] = nn.LayerNorm(16)
                self.head = nn.Linear(3, 3)

            def training_step(self, batch: Any, index: int) -> Any:
                kept = {
                    name for name, each in self.named_modules() if getattr(each, "weight", X).dtype is torch.float32
                }
                assert {"net.2", "net.1"} & kept
                assert self.head.weight.dtype is torch.float16
                return F.cross_entropy(self.head(self.net(batch[0])), batch[1])

        fit("O2", Normed(), amp_options={"keep_fp32": wanted})

    def test_float32_outputs_takes_full_names(self) -> None:
        class Kept(Lit):
            def training_step(self, batch: Any, index: int) -> Any:
                assert self.net[2].weight.dtype is torch.float32
                outputs = self.net(batch[0])
                assert not torch.equal(outputs, outputs.half().float())
                return super().training_step(batch, index)

        fit("O2", Kept(), amp_options={"float32_outputs": "net.2"})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cast_lists": {"modules": {"one": "float32"}}}, r"cast_lists: modules has 'one', .* Type keep_fp32 for"),
            ({"keep_fp32": "one.0"}, "keep_fp32 keeps one '0'"),
            (
                {"keep_fp32": ["one.0", "two.0", "net.0"], "float32_outputs": "one.0"},
                "float32_outputs keeps one '0'",
            ),
            ({"keep_fp32": "three"}, "matches no submodule"),
            ({"float32_outputs": "three"}, "float32_outputs has 'three', which matches no submodule"),
        ],
        ids=str,
    )
    def test_names_that_match_none_or_fit_two_submodules_raise(self, options: dict[str, Any], message: str) -> None:
        class Twins(Lit):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Sequential(nn.Linear(8, 3))
                self.two = nn.Sequential(nn.Linear(8, 3))

        fit("O2", Twins(), amp_options={"keep_fp32": "one"}, max_steps=1)
        with pytest.raises(OptionError, match=message):
            fit("O2", Twins(), amp_options=options)

    def test_a_module_without_submodules_raises_at_o2(self) -> None:
        module = Lit()
        module.net, module.weight = None, nn.Parameter(torch.ones(3))
        with pytest.raises(OptionError, match=r"found no submodule of this Lit .* use opt_level='O1'"):
            fit("O2", module)

    @pytest.mark.parametrize(
        "callback", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)], ids=lambda each: type(each).__name__
    )
    def test_callbacks_that_average_weights_raise_at_o2(self, callback: Any) -> None:
        with pytest.raises(UsageError, match=f"{type(callback).__name__} writes averages .* Use opt_level='O1'"):
            fit("O2", callbacks=[callback])

    def test_callbacks_average_weights_at_o1(self) -> None:
        averaged = fit("O1", callbacks=[EMAWeightAveraging(decay=0.5)])
        assert not torch.equal(averaged.net[0].weight, fit("O1").net[0].weight)


@pytest.mark.slow
def test_two_ranks_train_as_in_float32_and_stay_equal(tmp_path: Path) -> None:
    script = Path(__file__).with_name("lightning_ranks.py")
    done = completed([sys.executable, str(script)], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()}
    assert len(results) == 2 * (2 * 3 + 2)
    for mode in ("accumulated", "unsynchronised", "overflow"):
        for level in ("O1", "O2"):
            first, second = results[f"{mode} {level} 0"], results[f"{mode} {level} 1"]
            assert first == second
            if mode == "overflow":
                assert (first["skipped"], first["scale"]) == ([1], 512)
            else:
                assert (first["skipped"], first["scale"]) == ([], 1024)
                assert first["weights"] == pytest.approx(results[f"{mode} float32 0"]["weights"], rel=1e-2, abs=5e-3)


class TestBadInput:
    def test_a_second_precision_raises(self) -> None:
        with pytest.raises(ValueError, match=r"Received both `precision=16-mixed` and `plugins=<.*AmpatchPrecision"):
            trainer("O1", precision="16-mixed")
        with pytest.raises(MisconfigurationException, match="multiple values for Precision"):
            pl.Trainer(plugins=[AmpatchPrecision("O1"), AmpatchPrecision("O2")])

    def test_unknown_levels_and_options_raise_at_once(self) -> None:
        with pytest.raises(OptionError, match="opt_level is 'O9'"):
            AmpatchPrecision("O9")
        with pytest.raises(OptionError, match=r"unknown argument 'half_type'\. Did you mean 'half_dtype'"):
            AmpatchPrecision("O1", half_type="float16")
        with pytest.raises(OptionError, match="unknown argument 'models'"):
            AmpatchPrecision("O1", models=[])

    def test_fabric_raises(self) -> None:
        fabric = pl.Trainer.__module__.partition(".")[0]
        fabric = importlib.import_module(f"{fabric}.fabric").Fabric(plugins=AmpatchPrecision("O1"), accelerator="cpu")
        with pytest.raises(UsageError, match="With Fabric, leave the plugin out"):
            fabric.setup(nn.Linear(2, 2))


def test_a_result_of_the_optimizers_own_step_is_returned() -> None:
    class Manual(Lit):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(self.loss(batch))
            assert self.optimizers().step() == "one"

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            step = optimizer.step
            optimizer.step = lambda closure=None: (step(closure), "one")[1]  # type: ignore[method-assign]
            return optimizer

    fit("O1", Manual(), max_epochs=1)


class TestMonitor:
    class Logger(pl.loggers.logger.DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.logged: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged.append((step, metrics["loss_scale"], metrics["skipped_steps"]))

    @pytest.mark.parametrize("accumulated", [1, 2])
    def test_it_logs_and_reads_the_device_every_few_steps_only(
        self, accumulated: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Exploding(Lit):
            def training_step(self, batch: Any, index: int) -> Any:
                return self.loss((batch[0] * (torch.inf if self.global_step < 2 else 1), batch[1]))

        reads, stats, logger = [], amp.stats, self.Logger()
        monkeypatch.setattr(amp, "stats", lambda: reads.append(1) or stats())
        options = {"log_every_n_steps": 2, "accumulate_grad_batches": accumulated, "max_epochs": accumulated}
        fit("O1", Exploding(), amp_options={"init_scale": 64.0}, callbacks=LossScaleMonitor(), logger=logger, **options)
        assert logger.logged == [(1, 16.0, 2), (3, 16.0, 2)]
        assert len(reads) == 2 * accumulated


class TestPackages:
    def test_the_imported_package_is_chosen(self) -> None:
        assert bases("nowhere", "lightning.pytorch") == (pl.plugins.Precision, pl.Callback)
        assert isinstance(AmpatchPrecision("O1"), pl.plugins.Precision)

    @pytest.mark.slow
    @pytest.mark.parametrize("adapter", ["lightning", "pytorch_lightning"])
    def test_the_plugin_trains_in_pytorch_lightning(self, adapter: str, tmp_path: Path) -> None:
        script = f"""
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import torch
from ampatch.integrations.{adapter} import AmpatchPrecision

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        assert self.net.weight.dtype is torch.float16
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(plugins=AmpatchPrecision("O2", half_dtype="float16"), max_steps=3, accelerator="cpu",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
print("clipped and stepped", trainer.global_step)
"""
        done = completed([sys.executable, "-c", script], cwd=tmp_path, env={})
        assert "clipped and stepped 3" in done.stdout, done.stderr

    @pytest.mark.slow
    def test_a_plugin_of_the_other_package_raises_and_names_its_own(self, tmp_path: Path) -> None:
        script = """
import lightning.pytorch, pytorch_lightning
from ampatch.integrations.lightning import AmpatchPrecision
from ampatch.integrations.pytorch_lightning import AmpatchPrecision as Other

pytorch_lightning.Trainer(plugins=Other("O1"), accelerator="cpu", logger=False, enable_checkpointing=False)
pytorch_lightning.Trainer(plugins=AmpatchPrecision("O1"), accelerator="cpu", logger=False, enable_checkpointing=False)
"""
        done = completed([sys.executable, "-c", script], cwd=tmp_path, env={})
        assert "integrations.lightning.AmpatchPrecision('O1') for Trainer of lightning.pytorch>. Exp" in done.stderr

    def test_the_plugin_pickles_before_and_after_a_fit(self) -> None:
        running = trainer("O1", amp_options={"scale_window": 3})
        for _ in range(2):
            plugin = pickle.loads(pickle.dumps(running.precision_plugin))
            assert plugin.state_dict() == running.precision_plugin.state_dict()
            running.fit(Lit(), loader())
        assert plugin.state_dict() != {}

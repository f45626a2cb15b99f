"""Of `ampatch.integrations.timm`: amp is right in a script of timm's users, or says why it cannot be."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from apart import WITH_TIMM, import_timm
from helpers import HALF_DTYPES, assert_same_state, completed, dtype_name
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp
from ampatch.demo.digits import load, split
from ampatch.errors import IntegrationError, OptionError, UsageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_digits.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_TRAINED, HELD_OUT = split(load())
DIGITS = _TRAINED[torch.randperm(len(_TRAINED), generator=torch.Generator().manual_seed(0))]
BATCH = 32
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
MODES = pytest.mark.parametrize("mode", ["norm", "value", "agc"])
LIMITS = {"norm": 0.5, "value": 0.01, "agc": 0.02}

#: timm's own optimizers, torch's by way of timm, and the wrapper.
OPTIMIZERS = [
    "adamw",
    "sgd",
    "lamb",
    "lion",
    "adafactor",
    "adafactorbv",
    "madgrad",
    "adopt",
    "cadamw",
    "nadamw",
    "muon",
]
OPTIMIZERS += ["lookahead_adamw", "lookahead_lamb"]


@pytest.fixture(autouse=True, scope="module")
def _timm() -> None:
    import_timm()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def transformer() -> Any:
    shape = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 32, "depth": 2}
    return import_timm().create_model(
        "vit_tiny_patch16_224", **shape, num_heads=4, class_token=False, global_pool="avg"
    )


def convolutions() -> Any:
    """A network with batch norm."""
    widths = {"layers": [1, 1, 1, 1], "channels": [16, 16, 32, 32], "stem_width": 16, "stem_type": "deep"}
    return import_timm().create_model("resnet18", in_chans=1, num_classes=10, output_stride=8, **widths)


def new_scaler() -> Any:
    return importlib.import_module("ampatch.integrations.timm").AmpatchScaler()


def make(
    level: str | None = "O1",
    half: torch.dtype = torch.float16,
    network: Callable[[], Any] = transformer,
    opt: str = "adamw",
    groups: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A model and its optimizer, adopted by amp at a level."""
    torch.manual_seed(0)
    model = network()
    optimizer = import_timm().optim.create_optimizer_v2(model, opt=opt, lr=0.01, weight_decay=0.05, **(groups or {}))
    if level is not None:
        amp.initialize(
            model, optimizer, opt_level=level, half_dtype=half, verbosity=0, **{"init_scale": 256.0, **options}
        )
    return model, optimizer


def loss_of(model: Any, step: int, size: int = BATCH) -> Tensor:
    batch = torch.arange(step * size, (step + 1) * size) % len(DIGITS)
    return F.cross_entropy(model(DIGITS.images[batch]).float(), DIGITS.labels[batch])


def train(model: Any, optimizer: Any, steps: range, **call: Any) -> list[float]:
    scaler, losses = new_scaler(), []
    model.train()
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler(loss, optimizer, **{"parameters": model.parameters(), **call})
        losses.append(loss.item())
    return losses


def weights(model: Any) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


@contextlib.contextmanager
def gradients_before_step(optimizer: Any) -> Iterator[list[Tensor]]:
    """Collects the gradients of the last step, as the optimizer reads them."""
    seen: list[Tensor] = []

    def note(stepping: Any, *_: Any) -> None:
        seen[:] = [each.grad.clone() for each in amp.master_params(stepping) if each.grad is not None]

    handle = optimizer.register_step_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


class TestTraining:
    @pytest.mark.slow
    @LEVELS
    @HALVES
    @pytest.mark.parametrize("network", [transformer, convolutions])
    @pytest.mark.covering(1)
    def test_learns_digits(self, level, half, network):
        model, optimizer = make(level, half, network)
        losses = train(model, optimizer, range(60 if network is transformer else 40), clip_grad=1.0)
        model.eval()
        with torch.no_grad():
            right = model(HELD_OUT.images).argmax(1) == HELD_OUT.labels
        assert sum(losses[-5:]) < sum(losses[:5]) / 2
        assert right.float().mean() > 0.6
        assert {each.dtype for each in model.state_dict().values() if each.is_floating_point()} == {torch.float32}

    @pytest.mark.slow
    @LEVELS
    @HALVES
    @MODES
    @pytest.mark.covering(1)
    def test_does_what_a_loop_by_hand_does(self, level, half, mode):
        model, optimizer = make(level, half)
        train(model, optimizer, range(4), clip_grad=LIMITS[mode], clip_mode=mode)
        found = weights(model)
        amp.deinitialize()

        model, optimizer = make(level, half)
        for step in range(4):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, step), optimizer) as scaled_loss:
                scaled_loss.backward()
            import_timm().utils.dispatch_clip_grad(amp.master_params(optimizer), LIMITS[mode], mode=mode)
            optimizer.step()
        assert_same_state(weights(model), found)

    @LEVELS
    def test_accumulates_gradients(self, level):
        model, optimizer = make(level)
        scaler, before = new_scaler(), weights(model)
        scaler(loss_of(model, 0) / 2, optimizer, clip_grad=1e-3, need_update=False)
        assert_same_state(weights(model), before)
        with gradients_before_step(optimizer) as gradients:
            scaler(loss_of(model, 1) / 2, optimizer, need_update=True)
        assert any(bool((weights(model)[name] != each).any()) for name, each in before.items())
        amp.deinitialize()

        exact, _ = make(None)
        loss_of(exact, 0, 2 * BATCH).backward()
        expected = torch.cat([each.grad.flatten() for each in exact.parameters()])
        found = torch.cat([each.flatten() for each in gradients])
        torch.testing.assert_close(found.norm(), expected.norm(), rtol=0.01, atol=0)

    @LEVELS
    def test_an_overflow_skips_the_step_and_the_next_one_is_clean(self, level):
        model, optimizer = make(level, init_scale=2.0**24, scale_factor=2.0**16)
        before = weights(model)
        train(model, optimizer, range(1), clip_grad=1.0)
        assert amp.step_was_skipped(optimizer)
        assert_same_state(weights(model), before)
        assert new_scaler().state_dict()["loss_scaler0"]["loss_scale"] == 256.0
        train(model, optimizer, range(1, 2), clip_grad=1.0)
        assert not amp.step_was_skipped(optimizer)
        amp.deinitialize()

        model_of_one, optimizer_of_one = make(level)
        train(model_of_one, optimizer_of_one, range(1, 2), clip_grad=1.0)
        assert_same_state(weights(model_of_one), weights(model))

    @LEVELS
    def test_evaluation_between_steps_changes_nothing(self, level):
        model, optimizer = make(level, network=convolutions)
        train(model, optimizer, range(4))
        expected = weights(model)
        amp.deinitialize()

        model, optimizer = make(level, network=convolutions)
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            model.eval()
            with torch.no_grad():
                model(HELD_OUT.images[:8])
        assert_same_state(weights(model), expected)

    @LEVELS
    def test_an_error_in_the_backward_pass_leaves_nothing_behind(self, level):
        model, optimizer = make(level)
        train(model, optimizer, range(2), clip_grad=1.0)
        expected = weights(model)
        amp.deinitialize()

        def interrupt(_: Tensor) -> None:
            raise KeyboardInterrupt

        model, optimizer = make(level)
        train(model, optimizer, range(1), clip_grad=1.0)
        hook = next(model.parameters()).register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, range(1, 2), clip_grad=1.0)
        hook.remove()
        train(model, optimizer, range(1, 2), clip_grad=1.0)
        assert_same_state(weights(model), expected)

    @MODES
    def test_with_amp_disabled_it_is_a_plain_loop(self, mode):
        model, optimizer = make("O1", enabled=False)
        train(model, optimizer, range(3), clip_grad=LIMITS[mode], clip_mode=mode)
        assert new_scaler().state_dict() == {}
        amp.deinitialize()

        plain, optimizer = make(None)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(plain, step).backward()
            import_timm().utils.dispatch_clip_grad(plain.parameters(), LIMITS[mode], mode=mode)
            optimizer.step()
        assert_same_state(weights(model), weights(plain))

    @LEVELS
    def test_channels_last_stays(self, level):
        model, optimizer = make(level, network=lambda: convolutions().to(memory_format=torch.channels_last))
        train(model, optimizer, range(2))
        for each in (*model.parameters(), *amp.master_params(optimizer)):
            assert each.ndim != 4 or each.is_contiguous(memory_format=torch.channels_last)


class TestClipping:
    @LEVELS
    @MODES
    def test_limits_the_gradients_that_the_optimizer_steps_with(self, level, mode):
        model, optimizer = make(level)
        with gradients_before_step(optimizer) as gradients:
            train(model, optimizer, range(1), clip_grad=1e-4, clip_mode=mode)
        norm = torch.stack([each.norm() for each in gradients]).norm()
        largest = torch.stack([each.abs().max() for each in gradients]).max()
        # "agc" limits gradients by the norms of weights, which are below 100 together.
        measured, most = {"norm": (norm, 1e-4), "value": (largest, 1e-4), "agc": (norm, 0.01)}[mode]
        assert 0 < measured <= 1.001 * most
        assert {each.dtype for each in gradients} == {torch.float32}

    @LEVELS
    @pytest.mark.parametrize("given", ["of the model", "masters"])
    def test_leaves_out_what_parameters_leaves_out(self, level, given):
        def head_and_body(call: Callable[[Any, Any], dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
            model, optimizer = make(level, opt="sgd", groups={"filter_bias_and_bn": False})
            with gradients_before_step(optimizer) as gradients:
                train(model, optimizer, range(1), **call(model, optimizer))
            amp.deinitialize()
            return gradients[-2:], gradients[:-2]

        def without_head(model: Any, optimizer: Any) -> dict[str, Any]:
            full = [*amp.master_params(optimizer)][:-2]
            parameters = import_timm().models.model_parameters(model, exclude_head=True) if given != "masters" else full
            return {"clip_grad": 1e-8, "clip_mode": "value", "parameters": parameters}

        head, body = head_and_body(lambda *_: {})
        same, clipped = head_and_body(without_head)
        assert_same_state(same, head)
        assert max(float(each.abs().max()) for each in body) > 1e-3
        assert max(float(each.abs().max()) for each in clipped) <= 1.001e-8

    def test_parameters_of_no_optimizer_count_for_nothing(self):
        model = transformer()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", half_dtype="float16", init_scale=2.0**12, verbosity=0)
        with gradients_before_step(optimizer) as gradients:
            train(model, optimizer, range(1), clip_grad=1e3)
        amp.deinitialize()
        torch.manual_seed(0)
        exact = transformer()
        loss_of(exact, 0).backward()
        torch.testing.assert_close(gradients[0], exact.head.weight.grad, rtol=0.02, atol=1e-3)

    def test_cast_lists_do_not_reach_the_clipping(self):
        lists = {"whitelist": {"*": ["mul"]}}
        model, optimizer = make("O1", torch.bfloat16, opt="sgd", groups={"filter_bias_and_bn": False}, cast_lists=lists)
        loss_of(model, 0).backward()
        before = [each.grad.clone() for each in model.parameters()]
        with amp.disable_casts():
            import_timm().utils.dispatch_clip_grad(model.parameters(), 1e-3, mode="agc")
        expected = [each.grad for each in model.parameters()]
        for each, gradient in zip(model.parameters(), before, strict=True):
            each.grad = gradient
        with gradients_before_step(optimizer) as gradients:
            new_scaler()(model.head.bias.sum() * 0, optimizer, clip_grad=1e-3, clip_mode="agc")
        assert_same_state(gradients, expected)

    def test_raises_if_there_is_nothing_to_clip(self):
        model, optimizer = make()
        with pytest.raises(OptionError, match=r"no parameter of this AdamW among parameters.*model\.parameters\(\)"):
            train(model, optimizer, range(1), clip_grad=1.0, parameters=transformer().parameters())


class TestOptimizers:
    @pytest.mark.slow
    @LEVELS
    @pytest.mark.parametrize("opt", OPTIMIZERS)
    @pytest.mark.covering(1)
    def test_update_float32_weights_as_they_do_without_amp(self, level, opt):
        model, optimizer = make(level, opt=opt)
        shadow, other = make(None, opt=opt)
        masters = [each for group in optimizer.param_groups for each in group["params"]]
        copies = [each for group in other.param_groups for each in group["params"]]
        scaler = new_scaler()
        for step in range(7):  # Lookahead averages after the sixth
            optimizer.zero_grad()
            scaler(loss_of(model, step), optimizer, need_update=False)
            for master, each in zip(amp.master_params(optimizer), copies, strict=True):
                each.grad = master.grad.clone()
            torch.manual_seed(step)
            optimizer.step()
            torch.manual_seed(step)
            with amp.disable_casts():
                other.step()
        assert masters
        assert_same_state(weights(model), weights(shadow))

    def test_the_hessian_of_adahessian_is_unscaled(self):
        exact, optimizer = make(None, network=convolutions, opt="adahessian")
        expected = hessians(exact, optimizer, lambda loss: loss.backward(create_graph=True))
        model, optimizer = make("O1", torch.bfloat16, convolutions, "adahessian", loss_scale=1024.0)
        found = hessians(
            model, optimizer, lambda loss: new_scaler()(loss, optimizer, create_graph=True, need_update=False)
        )
        torch.testing.assert_close(found, expected, rtol=0.35, atol=0)

    @pytest.mark.parametrize(
        ("level", "half", "why"), [("O2", torch.bfloat16, "masters"), ("O1", torch.float16, "overflow in float16")]
    )
    def test_second_derivatives_raise_where_they_would_be_wrong(self, level, half, why):
        model, optimizer = make(level, half)
        with pytest.raises(UsageError, match=rf"create_graph=True.*{level}.*{why}.*half_dtype='bfloat16'"):
            train(model, optimizer, range(1), create_graph=True)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    def test_second_derivatives_of_attention_exist_if_it_is_not_fused(self):
        def unfused() -> Any:
            layers.set_fused_attn(enable=False)
            try:
                return transformer()
            finally:
                layers.set_fused_attn()

        layers = importlib.import_module("timm.layers")
        losses = train(*make("O1", torch.bfloat16, unfused, "adahessian"), range(20), create_graph=True)
        assert losses[-1] < losses[0]

    @LEVELS
    def test_layer_decay_and_schedulers_reach_the_groups(self, level):
        model, optimizer = make(level, groups={"layer_decay": 0.5})
        scheduler, _ = import_timm().scheduler.create_scheduler_v2(
            optimizer, num_epochs=2, step_on_epochs=False, updates_per_epoch=4
        )
        train(model, optimizer, range(1))
        scheduler.step_update(4)
        rates = {group["lr_scale"]: group["lr"] for group in optimizer.param_groups}
        assert len(rates) > 2
        assert all(rate == pytest.approx(0.005 * factor) for factor, rate in rates.items())
        before = weights(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, range(1, 2))
        assert_same_state(weights(model), before)


def hessians(model: Any, optimizer: Any, backward: Callable[[Tensor], None]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")  # torch says so once in a process
        backward(loss_of(model, 0))
    optimizer.step()
    found = torch.stack([each.hess.norm() for each in list(model.parameters())[:3]])
    for each in model.parameters():
        each.grad = None
    return found


class TestAverages:
    @pytest.mark.slow
    @LEVELS
    @HALVES
    @pytest.mark.parametrize(
        ("kind", "options"),
        [("ModelEmaV2", {}), ("ModelEmaV3", {}), ("ModelEmaV3", {"foreach": False})],
        ids=["v2", "v3", "v3-one-by-one"],
    )
    @pytest.mark.covering(1)
    def test_average_the_float32_weights(self, level, half, kind, options):
        model, optimizer = make(level, half, convolutions)
        average = getattr(import_timm().utils, kind)(model, decay=0.75, **options)
        expected = weights(model)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            average.update(model)
            for name, each in model.state_dict().items():
                if each.is_floating_point():
                    expected[name].lerp_(each, 0.25)
                else:
                    expected[name].copy_(each)
        found = average.module.state_dict()
        if kind == "ModelEmaV2":  # it averages the counters of batches, too
            found, expected = ({k: v for k, v in each.items() if v.is_floating_point()} for each in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            assert average.module(HELD_OUT.images[:4]).isfinite().all()

    def test_without_buffers_the_average_at_o2_is_of_the_half_weights(self):
        model, optimizer = make("O2")
        average = import_timm().utils.ModelEmaV3(model, decay=0.0, exclude_buffers=True)
        train(model, optimizer, range(2))
        average.update(model)
        assert {each.dtype for each in average.module.parameters()} == {torch.float32}
        for found, half in zip(average.module.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, half.float())


class TestCheckpoints:
    def saver(self, where: Path, model: Any, optimizer: Any, scaler: Any) -> Any:
        return import_timm().utils.CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir=str(where))

    @LEVELS
    @HALVES
    @pytest.mark.parametrize("opt", ["adamw", "lookahead_lamb", "adafactor", "muon"])
    @pytest.mark.covering(1)
    def test_a_resumed_run_ends_with_the_same_bits(self, level, half, opt, tmp_path):
        policy = {"scale_window": 3}  # the scale grows within the run, where it is dynamic
        model, optimizer = make(level, half, opt=opt, **policy)
        train(model, optimizer, range(4))
        self.saver(tmp_path, model, optimizer, new_scaler()).save_checkpoint(0)
        train(model, optimizer, range(4, 8))
        expected = weights(model), optimizer.state_dict(), amp.state_dict()
        amp.deinitialize()

        model, optimizer = make(level, half, opt=opt, **policy)
        train(model, optimizer, range(1))
        resumed = import_timm().models.resume_checkpoint(
            model, str(tmp_path / "last.pth.tar"), optimizer, new_scaler(), log_info=False
        )
        train(model, optimizer, range(4, 8))
        assert resumed == 1
        assert_same_state((weights(model), optimizer.state_dict(), amp.state_dict()), expected)

    @LEVELS
    def test_a_checkpoint_is_float32_and_loads_without_amp(self, level, tmp_path):
        model, optimizer = make(level)
        train(model, optimizer, range(2))
        self.saver(tmp_path, model, optimizer, new_scaler()).save_checkpoint(0)
        amp.deinitialize()
        file = str(tmp_path / "last.pth.tar")
        saved = torch.load(file, weights_only=True)
        assert saved["amp_scaler"] == {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 2}}

        plain, optimizer = make(None)
        import_timm().models.resume_checkpoint(plain, file, optimizer, log_info=False)
        assert_same_state(weights(plain), saved["state_dict"])
        assert {each.dtype for each in plain.state_dict().values()} == {torch.float32}

    def test_goes_on_where_native_scaler_stopped(self, tmp_path):
        model, optimizer = make(None)
        native = import_timm().utils.NativeScaler(device="cpu")
        native(loss_of(model, 0), optimizer)
        native._scaler.update(512.0)
        self.saver(tmp_path, model, optimizer, native).save_checkpoint(0)

        model, optimizer = make("O1")
        scaler = new_scaler()
        import_timm().models.resume_checkpoint(model, str(tmp_path / "last.pth.tar"), optimizer, scaler, log_info=False)
        assert scaler.state_dict()["loss_scaler0"]["loss_scale"] == 512.0

    def test_native_scaler_does_not_take_its_state(self):
        make("O1")
        with pytest.raises(KeyError, match="scale"):
            import_timm().utils.NativeScaler(device="cpu").load_state_dict(new_scaler().state_dict())

    def test_takes_the_state_of_apex_scaler(self):
        make("O1")
        new_scaler().load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}})
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}


class TestBadInput:
    def test_raises_before_initialize(self):
        model, optimizer = make(None)
        with pytest.raises(UsageError, match=r"AmpatchScaler was called before amp\.initialize\. Type model"):
            train(model, optimizer, range(1))

    def test_raises_for_an_optimizer_that_amp_does_not_know(self):
        model, _ = make("O1")
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"this SGD was never handed to amp\.initialize"):
            train(model, other, range(1))

    def test_raises_for_the_optimizer_inside_lookahead(self):
        model, lookahead = make("O1", opt="lookahead_adamw")
        with pytest.raises(UsageError, match=r"this AdamW was never handed to amp\.initialize"):
            train(model, lookahead._base_optimizer, range(1))

    @pytest.mark.parametrize(("given", "answer"), [("norms", r"mean 'norm'\?"), ("x", "one of norm, value, agc")])
    def test_raises_for_an_unknown_clip_mode_before_the_backward_pass(self, given, answer):
        model, optimizer = make("O1")
        with pytest.raises(OptionError, match=rf"clip_mode='{given}'.*{answer}"):
            train(model, optimizer, range(1), clip_grad=1.0, clip_mode=given)
        assert all(each.grad is None for each in model.parameters())

    @pytest.mark.parametrize("enabled", [True, False])
    def test_raises_for_arguments_of_another_kind_before_the_backward_pass(self, enabled):
        model, optimizer = make("O1", enabled=enabled)
        scaler, loss = new_scaler(), loss_of(model, 0)
        with pytest.raises(OptionError, match=r"found AdamW as the loss; expected the tensor.*loss_scaler\(loss, opt"):
            scaler(optimizer, loss)
        with pytest.raises(OptionError, match=r"the loss is 0\.5; expected the tensor that the criterion returns"):
            scaler(0.5, optimizer)
        with pytest.raises(OptionError, match="found VisionTransformer as an optimizer"):
            scaler(loss, model)
        for parameters in (model, optimizer, "head", 1):
            with pytest.raises(OptionError, match=r"as parameters; .* Type parameters=model\.parameters\(\)"):
                scaler(loss, optimizer, 1.0, parameters=parameters)
        for name in ("need_update", "create_graph"):
            with pytest.raises(OptionError, match=f"{name} is 'no'; expected True, False"):
                scaler(loss, optimizer, **{name: "no"})
        for clip_grad in (-1.0, float("nan"), "1.0", True, model.parameters(), torch.ones(2)):
            with pytest.raises(OptionError, match=r"clip_grad is .*; expected a number from 0 on"):
                scaler(loss, optimizer, clip_grad)
        assert all(each.grad is None for each in model.parameters())
        scaler(loss, optimizer, torch.tensor(1.0))

    def test_raises_inside_autocast(self):
        model, optimizer = make("O1")
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(UsageError, match=r"found torch\.autocast around AmpatchScaler.*amp_autocast = contextlib"),
        ):
            train(model, optimizer, range(1))

    def test_autocast_is_fine_with_amp_disabled(self):
        model, optimizer = make("O1", enabled=False)
        with torch.autocast("cpu", torch.bfloat16):
            train(model, optimizer, range(1), clip_grad=1.0)

    def test_raises_without_timm(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "ampatch.integrations.timm", raising=False)
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(IntegrationError, match=r"needs timm, but timm is missing\. Type pip install 'timm>="):
            importlib.import_module("ampatch.integrations.timm")

    def test_raises_if_timm_is_too_old(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "ampatch.integrations.timm", raising=False)
        monkeypatch.setattr(import_timm(), "__version__", "0.9.16")
        with pytest.raises(IntegrationError, match=r"needs timm 1\.0, but found 0\.9\.16\. Type pip install"):
            importlib.import_module("ampatch.integrations.timm")


def train_as_rank(level: str, half: torch.dtype, network: Callable[[], Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains with accumulation under ``no_sync``, each rank on its own half of the batches."""
    rank = dist.get_rank()
    model, optimizer = make(level, half, network, opt="sgd")
    wrapped, scaler, losses = DistributedDataParallel(model), new_scaler(), []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            is_last = part == 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                loss = loss_of(wrapped, 4 * step + 2 * part + rank, 16) / 2
                scaler(loss, optimizer, clip_grad=0.5, parameters=wrapped.parameters(), need_update=is_last)
            losses.append(loss.item())
    import_timm().utils.distribute_bn(wrapped, dist.get_world_size(), reduce=True)
    return losses, weights(model)


def step_without_reduction(level: str) -> str:
    model, optimizer = make(level)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync(), pytest.raises(UsageError) as raised:
        new_scaler()(loss_of(wrapped, 0), optimizer, clip_grad=0.5)
    return str(raised.value)


@pytest.mark.slow
class TestTwoProcesses:
    @LEVELS
    @HALVES
    @pytest.mark.parametrize("network", [transformer, convolutions])
    @pytest.mark.covering(1)
    def test_ranks_agree_and_train_as_one_process_does(self, level, half, network, two: Workers):
        (losses, found), (_, others) = two.run(train_as_rank, level, half, network)
        assert_same_state(found, others)
        if network is convolutions:  # whose batch norm sees half a batch on each rank
            return
        model, optimizer = make(level, half, network, opt="sgd")
        for step in range(4):
            optimizer.zero_grad()
            new_scaler()(loss_of(model, step, 64), optimizer, clip_grad=0.5)
        torch.testing.assert_close(found, weights(model), rtol=0.02, atol=2e-3)
        assert losses

    @LEVELS
    def test_a_step_before_the_reduction_raises(self, level, two: Workers):
        for message in two.run(step_without_reduction, level):
            assert "no_sync" in message


@pytest.mark.slow
@HALVES
@LEVELS
@pytest.mark.covering(1)
def test_the_example_is_killed_and_resumed_to_the_same_bits(half: torch.dtype, level: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", *WITH_TIMM, str(EXAMPLE), "--epochs", "8"]
    command += ["--half", dtype_name(half), "--opt-level", level, "--checkpoints"]
    whole = completed([*command, str(tmp_path / "whole")], cwd=tmp_path, env=ENVIRONMENT)
    assert whole.returncode == 0, whole.stderr

    broken = tmp_path / "broken"
    killed = subprocess.Popen([*command, str(broken)], cwd=tmp_path, env=ENVIRONMENT)
    while not (broken / "checkpoint-1.pth.tar").exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    resumed = completed([*command, str(broken)], cwd=tmp_path, env=ENVIRONMENT)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 1:" not in resumed.stdout

    saved = [torch.load(each / "last.pth.tar", weights_only=True) for each in (tmp_path / "whole", broken)]
    for name in ("state_dict", "state_dict_ema", "optimizer", "amp_scaler", "epoch"):
        assert_same_state(saved[1][name], saved[0][name])

"""Of `ampatch.integrations.timm`: amp is right in a script of timm's users, or says why it cannot be."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from apart import import_timm
from helpers import assert_same_state
from small_nets import EACH_HALF, EACH_LEVEL, weights
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp
from ampatch.demo.digits import load, split
from ampatch.errors import OptionError, UsageError

_TRAINED, HELD_OUT = split(load())
DIGITS = _TRAINED[torch.randperm(len(_TRAINED), generator=torch.Generator().manual_seed(0))]
BATCH = 32
EACH_MODE = pytest.mark.parametrize("mode", ["norm", "value", "agc"])
LIMITS = {"norm": 0.5, "value": 0.01, "agc": 0.02}

# timm's own optimizers, torch's by way of timm, and the wrapper.
OPTIMIZERS = ["adamw", "sgd", "lamb", "lion", "adafactor", "adafactorbv", "madgrad", "adopt", "cadamw", "nadamw"]
OPTIMIZERS += ["muon", "lookahead_adamw", "lookahead_lamb"]


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
    @EACH_LEVEL
    @EACH_HALF
    @EACH_MODE
    @pytest.mark.covering(1)
    def test_training_ends_with_the_bits_of_a_loop_by_hand(self, level, half, mode):
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

    @EACH_LEVEL
    def test_gradients_accumulate_and_clip_once(self, level):
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

    @EACH_LEVEL
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

    @EACH_MODE
    def test_with_amp_disabled_the_bits_are_those_of_a_plain_loop(self, mode):
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

    @EACH_LEVEL
    def test_weights_and_masters_stay_in_channels_last(self, level):
        model, optimizer = make(level, network=lambda: convolutions().to(memory_format=torch.channels_last))
        train(model, optimizer, range(2))
        for each in (*model.parameters(), *amp.master_params(optimizer)):
            assert each.ndim != 4 or each.is_contiguous(memory_format=torch.channels_last)


class TestClipping:
    @EACH_LEVEL
    @EACH_MODE
    def test_gradients_that_the_optimizer_steps_with_are_clipped(self, level, mode):
        model, optimizer = make(level)
        with gradients_before_step(optimizer) as gradients:
            train(model, optimizer, range(1), clip_grad=1e-4, clip_mode=mode)
        norm = torch.stack([each.norm() for each in gradients]).norm()
        largest = torch.stack([each.abs().max() for each in gradients]).max()
        # "agc" limits gradients by the norms of weights, which are below 100 together.
        measured, most = {"norm": (norm, 1e-4), "value": (largest, 1e-4), "agc": (norm, 0.01)}[mode]
        assert 0 < measured <= 1.001 * most
        assert {each.dtype for each in gradients} == {torch.float32}

    @EACH_LEVEL
    @pytest.mark.parametrize("given", ["of the model", "masters"])
    def test_only_gradients_of_the_given_parameters_are_clipped(self, level, given):
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

    def test_parameters_of_no_optimizer_are_left_out_of_the_norm(self):
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

    def test_clipping_is_not_cast(self):
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

    def test_clipping_without_a_parameter_of_the_optimizer_raises(self):
        model, optimizer = make()
        with pytest.raises(OptionError, match=r"no parameter of this AdamW among parameters.*model\.parameters\(\)"):
            train(model, optimizer, range(1), clip_grad=1.0, parameters=transformer().parameters())


class TestOptimizers:
    @pytest.mark.slow
    @EACH_LEVEL
    @pytest.mark.parametrize("opt", OPTIMIZERS)
    @pytest.mark.covering(1)
    def test_optimizers_update_masters_as_they_update_float32_weights(self, level, opt):
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
    def test_second_derivatives_raise_if_they_would_be_wrong(self, level, half, why):
        model, optimizer = make(level, half)
        with pytest.raises(UsageError, match=rf"create_graph=True.*{level}.*{why}.*half_dtype='bfloat16'"):
            train(model, optimizer, range(1), create_graph=True)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    def test_second_derivatives_of_unfused_attention_train(self):
        def unfused() -> Any:
            layers.set_fused_attn(enable=False)
            try:
                return transformer()
            finally:
                layers.set_fused_attn()

        layers = importlib.import_module("timm.layers")
        losses = train(*make("O1", torch.bfloat16, unfused, "adahessian"), range(20), create_graph=True)
        assert losses[-1] < losses[0]


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
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.parametrize(
        ("kind", "options"),
        [("ModelEmaV2", {}), ("ModelEmaV3", {}), ("ModelEmaV3", {"foreach": False})],
        ids=["v2", "v3", "v3-one-by-one"],
    )
    @pytest.mark.covering(1)
    def test_averages_are_of_the_float32_weights(self, level, half, kind, options):
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

    def test_an_average_without_buffers_is_of_the_half_weights_at_o2(self):
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

    @EACH_LEVEL
    @EACH_HALF
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

    @EACH_LEVEL
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

    def test_a_checkpoint_of_native_scaler_has_its_scale_loaded(self, tmp_path):
        model, optimizer = make(None)
        native = import_timm().utils.NativeScaler(device="cpu")
        native(loss_of(model, 0), optimizer)
        native._scaler.update(512.0)
        self.saver(tmp_path, model, optimizer, native).save_checkpoint(0)

        model, optimizer = make("O1")
        scaler = new_scaler()
        import_timm().models.resume_checkpoint(model, str(tmp_path / "last.pth.tar"), optimizer, scaler, log_info=False)
        assert scaler.state_dict()["loss_scaler0"]["loss_scale"] == 512.0


class TestBadInput:
    def test_a_call_before_initialize_raises(self):
        model, optimizer = make(None)
        with pytest.raises(UsageError, match=r"AmpatchScaler was called before amp\.initialize\. Type model"):
            train(model, optimizer, range(1))

    def test_optimizers_that_amp_does_not_know_raise(self):
        model, lookahead = make("O1", opt="lookahead_adamw")
        for unknown in (torch.optim.SGD(model.parameters(), lr=0.1), lookahead._base_optimizer):
            name = type(unknown).__name__
            with pytest.raises(UsageError, match=rf"this {name} was never handed to amp\.initialize"):
                train(model, unknown, range(1))

    @pytest.mark.parametrize(("given", "answer"), [("norms", r"mean 'norm'\?"), ("x", "one of norm, value, agc")])
    def test_an_unknown_clip_mode_raises_before_the_backward_pass(self, given, answer):
        model, optimizer = make("O1")
        with pytest.raises(OptionError, match=rf"clip_mode='{given}'.*{answer}"):
            train(model, optimizer, range(1), clip_grad=1.0, clip_mode=given)
        assert all(each.grad is None for each in model.parameters())

    @pytest.mark.parametrize("enabled", [True, False])
    def test_bad_arguments_raise_before_the_backward_pass(self, enabled):
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

    def test_autocast_around_a_call_raises_unless_amp_is_disabled(self):
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UsageError, match=r"found torch\.autocast around AmpatchScaler.*amp_autocast = cont"):
                train(*make("O1"), range(1))
            amp.deinitialize()
            train(*make("O1", enabled=False), range(1), clip_grad=1.0)


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
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.parametrize("network", [transformer, convolutions])
    @pytest.mark.covering(1)
    def test_two_ranks_stay_equal_and_train_as_one_process_does(self, level, half, network, two: Workers):
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

    @EACH_LEVEL
    def test_a_step_of_gradients_that_are_not_reduced_raises(self, level, two: Workers):
        for message in two.run(step_without_reduction, level):
            assert "no_sync" in message

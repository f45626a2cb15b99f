"""Of `amp.frozen_weights`: each weight is cast once, whatever calls there are; what is kept ends with the block."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same_bits, assert_same_state
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime


class Network(nn.Module):
    """Layers with four weights that O1 casts, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten())
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.norm(self.features(value[:, None])))


WEIGHTS = 4  # weight and bias of the convolution and of the head


def batch(device: str) -> Tensor:
    return torch.linspace(-1, 1, 5 * 8, device=device).view(5, 8)


def adopt(device: str = "cpu", half: torch.dtype = torch.bfloat16, **options: object) -> Network:
    return amp.initialize(Network().to(device).eval(), half_dtype=half, verbosity=0, **options)


def casts(function: Callable[[], object], times: int = 1) -> int:
    before = amp.cast_counts().casts
    for _ in range(times):
        function()
    return amp.cast_counts().casts - before


def kept() -> int:
    return len(runtime.live.cache)


@EACH_DEVICE
@EACH_HALF
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_frozen_weights_are_cast_once_and_give_the_same_bits(device, half, without_grad):
    model = adopt(device, half)
    with without_grad():
        expected = model(batch(device))
        of_inputs = casts(lambda: model(batch(device))) - WEIGHTS
        with amp.frozen_weights(model):
            assert casts(lambda: model(batch(device)), times=100) == WEIGHTS + 100 * of_inputs
            assert_same_bits(model(batch(device)), expected)
        assert_same_bits(model(batch(device)), expected)


@EACH_DEVICE
class TestFrozenWeights:
    def test_casts_are_kept_until_the_block_ends(self, device):
        model = adopt(device)
        with torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device))
            assert kept() == WEIGHTS
        assert kept() == 0

    def test_evaluation_between_steps_changes_no_bits(self, device):
        def train(evaluate: bool) -> list[Tensor]:
            model = Network().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, half_dtype=torch.bfloat16, verbosity=0)
            for _ in range(3):
                if evaluate:
                    with torch.no_grad(), amp.frozen_weights(model):
                        model(batch(device))
                backward(model(batch(device)).float().square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            amp.deinitialize()
            return list(model.parameters())

        assert_same_state(train(evaluate=True), train(evaluate=False))

    def test_weights_learn_within_a_block(self, device):
        model = Network().to(device)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
        with amp.frozen_weights(model):
            losses = []
            for _ in range(3):
                with torch.no_grad():
                    evaluated = model(batch(device)).float().square().mean()
                loss = model(batch(device)).float().square().mean()
                assert_same_bits(loss.detach(), evaluated)
                losses.append(loss.item())
                backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        assert losses == sorted(losses, reverse=True)

    def test_disable_casts_holds_within_a_block(self, device):
        model = adopt(device)
        with torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device))
            with amp.disable_casts():
                plain = model(batch(device))
        assert plain.dtype is torch.float32
        amp.deinitialize()
        with torch.inference_mode():
            assert_same_bits(plain, model(batch(device)))


def replicated(model: nn.Module) -> nn.DataParallel:
    """On one GPU, or on none."""
    return nn.DataParallel(model, [0] if torch.cuda.is_available() else None)


class Holds(nn.Module):
    """A user's own wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Tensor) -> Tensor:
        return self.module(value)


class TestModels:
    @EACH_DEVICE
    @pytest.mark.parametrize("wrap", [Holds, replicated])
    def test_wrapped_models_are_frozen(self, wrap, device):
        if wrap is replicated and device == "cpu" and torch.cuda.is_available():
            pytest.skip("where there are GPUs DataParallel takes no model on the CPU")
        wrapped = wrap(adopt(device))
        with torch.inference_mode(), amp.frozen_weights(wrapped):
            wrapped(batch(device))
            assert kept() == WEIGHTS

    def test_compiled_models_cast_for_themselves(self):
        model = adopt()
        compiled = torch.compile(model, backend="eager")
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(compiled):
                assert_same_bits(compiled(batch("cpu")), expected)
                assert kept() == 0
                assert casts(lambda: compiled(batch("cpu"))) == 0  # none that amp makes

    def test_parts_of_models_are_frozen(self):
        model = adopt()
        with torch.inference_mode(), amp.frozen_weights(model.head):
            model(batch("cpu"))
            assert kept() == 2

    def test_any_model_is_frozen_after_amp_init(self):
        with amp.init(half_dtype=torch.bfloat16):
            model = Network().eval()
            with torch.inference_mode(), amp.frozen_weights(model):
                model(batch("cpu"))
                assert kept() == WEIGHTS

    def test_models_without_amp_raise(self):
        model = adopt()
        for stranger in (Network(), copy.deepcopy(model)):
            with pytest.raises(UsageError, match=r"never handed .* Type: model = amp\.initialize\(model, \.\.\.\)"):
                amp.frozen_weights(stranger).__enter__()

    def test_something_else_than_a_model_raises(self):
        for on in (False, True):
            if on:
                adopt()
            with pytest.raises(OptionError, match=r"found list as a model; expected a torch\.nn\.Module"):
                amp.frozen_weights([Network()]).__enter__()

    @pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
    def test_nothing_is_kept_at_levels_without_casts(self, level):
        half = torch.bfloat16 if level == "O5" else torch.float16
        model = adopt(half=half, opt_level=level)
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(model):
                assert_same_bits(model(batch("cpu")), expected)
                assert kept() == 0

    def test_casts_to_float32_are_kept_at_o2_with_patched_functions(self):
        model = adopt(half=torch.float16, opt_level="O2", patch_torch_functions=True)
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(model):
                assert_same_bits(model(batch("cpu")), expected)
                assert kept() == 2  # of the layer norm

    @pytest.mark.parametrize("state", ["before", "disabled", "after"])
    def test_models_run_in_float32_with_amp_off(self, state):
        model = Network().eval()
        if state != "before":
            amp.initialize(model, enabled=state != "disabled", verbosity=0)
        if state == "after":
            amp.deinitialize()
        with torch.inference_mode(), amp.frozen_weights(model):
            assert model(batch("cpu")).dtype is torch.float32


def test_compiled_code_with_a_block_casts_as_eager_code() -> None:
    model = adopt()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad(), amp.frozen_weights(model):
            return model(x)

    expected = predict(batch("cpu"))
    assert_same_bits(torch.compile(predict, backend="aot_eager")(batch("cpu")), expected)
    assert kept() == 0

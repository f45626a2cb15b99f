"""Of `amp.frozen_weights`: each weight is cast once, whatever calls there are; what is kept ends with the block."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from helpers import DEVICES, HALF_DTYPES, assert_same_bits, dtype_name, together
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.runtime import runtime

WITHOUT_GRAD = [torch.no_grad, torch.inference_mode]


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

    def predict(self, value: Tensor) -> Tensor:
        """What is called beside the forward, as ``generate`` is."""
        return self.head(self.norm(self.features(value[:, None]))).argmax(-1)


WEIGHTS = 4  # weight and bias of the convolution and of the head


class WeightCasts(TorchDispatchMode):
    """Counts the casts of float32 tensors as large as a model's weights, whoever makes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes = {parameter.shape for parameter in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and args[0].shape in self.shapes:
            self.count += 1
        return func(*args, **(kwargs or {}))


def batch(device: str) -> Tensor:
    return torch.linspace(-1, 1, 5 * 8, device=device).view(5, 8)


def adopt(device: str = "cpu", half: torch.dtype = torch.bfloat16, **options: object) -> Network:
    return amp.initialize(Network().to(device).eval(), half_dtype=half, verbosity=0, **options)


def casts(function: Callable[[], object], times: int = 1) -> int:
    before = amp.cast_counts().casts
    for _ in range(times):
        function()
    return amp.cast_counts().casts - before


def inputs_cast(function: Callable[[], object]) -> int:
    """How many casts of a call are not of weights: those that a block does not save."""
    return casts(function) - WEIGHTS


def kept() -> int:
    return len(runtime.live.cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("without_grad", WITHOUT_GRAD)
class TestACall:
    def test_casts_each_weight_once_in_a_hundred(self, device, half, without_grad):
        model = adopt(device, half)
        with without_grad():
            inputs = inputs_cast(lambda: model(batch(device)))
            with amp.frozen_weights(model):
                assert casts(lambda: model(batch(device)), times=100) == WEIGHTS + 100 * inputs

    @pytest.mark.covering(1)
    def test_gives_the_same_bits(self, device, half, without_grad):
        model = adopt(device, half)
        with without_grad():
            expected = model(batch(device))
            with amp.frozen_weights(model):
                for _ in range(3):
                    assert_same_bits(model(batch(device)), expected)
            assert_same_bits(model(batch(device)), expected)

    def test_beside_the_forward_is_served_too(self, device, half, without_grad):
        model = adopt(device, half)
        with without_grad():
            inputs = inputs_cast(lambda: model.predict(batch(device)))
            with amp.frozen_weights(model):
                assert casts(lambda: model.predict(batch(device)), times=3) == WEIGHTS + 3 * inputs

    @pytest.mark.covering(1)
    def test_after_a_checkpoint_was_loaded_uses_it(self, device, half, without_grad):
        model = adopt(device, half)
        other = {name: tensor + 0.5 for name, tensor in model.state_dict().items()}
        with amp.frozen_weights(model), without_grad():
            before = model(batch(device))
            model.load_state_dict(other)
            after = model(batch(device))
        assert not torch.equal(before, after)
        with without_grad():
            assert_same_bits(model(batch(device)), after)


def test_torch_autocast_casts_each_weight_in_every_call():
    """Which is what the block is for."""
    model = Network().eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), WeightCasts(model) as counted:
        for _ in range(100):
            model(batch("cpu"))
    assert counted.count == 100 * WEIGHTS


@pytest.mark.parametrize("device", DEVICES)
class TestTheBlock:
    def test_keeps_nothing_when_it_has_ended(self, device):
        model = adopt(device)
        with torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device))
            assert kept() == WEIGHTS
        assert kept() == 0

    def test_keeps_nothing_when_it_was_left_by_an_error(self, device):
        model = adopt(device)

        def stop() -> None:
            assert kept() == WEIGHTS
            raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"), torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device)), stop()
        assert kept() == 0

    def test_does_not_disturb_a_training_loop(self, device):
        """With an evaluation between the steps, the same bits as without."""

        def train(evaluate: bool) -> list[Tensor]:
            model = Network().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, half_dtype=torch.bfloat16, verbosity=0)
            for _ in range(3):
                if evaluate:
                    with torch.no_grad(), amp.frozen_weights(model):
                        model(batch(device))
                with amp.scale_loss(model(batch(device)).float().square().mean(), optimizer) as loss:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            amp.deinitialize()
            return list(model.parameters())

        for alone, between in zip(train(evaluate=False), train(evaluate=True), strict=True):
            assert_same_bits(between, alone)

    def test_around_training_lets_weights_learn(self, device):
        """The weights are not frozen for the optimizer: what is kept of them never serves a step."""
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
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert losses == sorted(losses, reverse=True)

    def test_serves_threads_that_call_at_once(self, device):
        def run() -> None:
            barrier.wait(60)
            with torch.inference_mode():
                for _ in range(20):
                    results.append(model(batch(device)))  # noqa: PERF401 - each call by itself

        model, results, barrier = adopt(device), [], threading.Barrier(4)
        with torch.inference_mode():
            expected = model(batch(device))
        with amp.frozen_weights(model):
            together([run] * 4)
            assert kept() == WEIGHTS
        assert len(results) == 80
        for result in results:
            assert_same_bits(result, expected)

    def test_of_two_models_with_a_weight_in_common_casts_it_once(self, device):
        first, second = Network().to(device).eval(), Network().to(device).eval()
        second.head = first.head
        amp.initialize([first, second], verbosity=0)
        with torch.inference_mode(), amp.frozen_weights(first):
            with amp.frozen_weights(second):
                first(batch(device)), second(batch(device))
                assert kept() == WEIGHTS + WEIGHTS // 2
            assert kept() == WEIGHTS
        assert kept() == 0

    def test_is_left_by_disable_casts(self, device):
        model = adopt(device)
        with torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device))
            with amp.disable_casts():
                plain = model(batch(device))
        assert plain.dtype is torch.float32
        amp.deinitialize()
        with torch.inference_mode():
            assert_same_bits(plain, model(batch(device)))

    def test_ends_with_deinitialize(self, device):
        model = adopt(device)
        cache = runtime.live.cache
        with torch.inference_mode(), amp.frozen_weights(model):
            model(batch(device))
            amp.deinitialize()
            assert len(cache) == 0
            assert model(batch(device)).dtype is torch.float32

    def test_is_emptied_by_clear_cache(self, device):
        model = adopt(device)
        with torch.inference_mode(), amp.frozen_weights(model):
            before = model(batch(device))
            model.head.bias.data.add_(1)
            amp.clear_cache()
            assert not torch.equal(model(batch(device)), before)


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


class TestTheModel:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("wrap", [Holds, replicated])
    def test_may_be_wrapped(self, wrap, device):
        if wrap is replicated and device == "cpu" and torch.cuda.is_available():
            pytest.skip("where there are GPUs DataParallel takes no model on the CPU")
        wrapped = wrap(adopt(device))
        with torch.inference_mode(), amp.frozen_weights(wrapped):
            wrapped(batch(device))
            assert kept() == WEIGHTS

    def test_may_be_compiled_and_casts_for_itself_then(self):
        model = adopt()
        compiled = torch.compile(model, backend="eager")
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(compiled):
                assert_same_bits(compiled(batch("cpu")), expected)
                assert kept() == 0
                assert casts(lambda: compiled(batch("cpu"))) == 0  # none that amp makes

    def test_may_be_a_part_of_one(self):
        model = adopt()
        with torch.inference_mode(), amp.frozen_weights(model.head):
            model(batch("cpu"))
            assert kept() == 2

    def test_need_not_be_known_where_amp_knows_no_models(self):
        with amp.init(half_dtype=torch.bfloat16):
            model = Network().eval()
            with torch.inference_mode(), amp.frozen_weights(model):
                model(batch("cpu"))
                assert kept() == WEIGHTS

    def test_that_amp_does_not_have_is_refused(self):
        model = adopt()
        for stranger in (Network(), copy.deepcopy(model)):
            with pytest.raises(UsageError, match=r"never handed .* Type: model = amp\.initialize\(model, \.\.\.\)"):
                amp.frozen_weights(stranger).__enter__()

    def test_that_is_none_is_refused(self):
        for on in (False, True):
            if on:
                adopt()
            with pytest.raises(OptionError, match=r"found list as a model; expected a torch\.nn\.Module"):
                amp.frozen_weights([Network()]).__enter__()

    @pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
    def test_at_other_levels_is_called_as_ever(self, level):
        half = torch.bfloat16 if level == "O5" else torch.float16
        model = adopt(half=half, opt_level=level)
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(model):
                assert_same_bits(model(batch("cpu")), expected)
                assert kept() == 0

    def test_in_half_with_functions_patched_has_its_casts_to_float32_kept(self):
        model = adopt(half=torch.float16, opt_level="O2", patch_torch_functions=True)
        with torch.inference_mode():
            expected = model(batch("cpu"))
            with amp.frozen_weights(model):
                assert_same_bits(model(batch("cpu")), expected)
                assert kept() == 2  # of the layer norm

    @pytest.mark.parametrize("state", ["before", "disabled", "after"])
    def test_is_called_as_ever_where_amp_is_off(self, state):
        model = Network().eval()
        if state != "before":
            amp.initialize(model, enabled=state != "disabled", verbosity=0)
        if state == "after":
            amp.deinitialize()
        with torch.inference_mode(), amp.frozen_weights(model):
            assert model(batch("cpu")).dtype is torch.float32


def test_in_compiled_code_breaks_the_graph_and_casts_as_eager_code() -> None:
    model = adopt()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad(), amp.frozen_weights(model):
            return model(x)

    expected = predict(batch("cpu"))
    assert_same_bits(torch.compile(predict, backend="aot_eager")(batch("cpu")), expected)
    assert kept() == 0

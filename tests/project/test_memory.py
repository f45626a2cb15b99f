"""Tests the memory that amp takes: at O1 what `torch.autocast` takes, and at O2 the least that arithmetic allows.

Memory does not vary from run to run, so that it is asserted and not only reported. How it is measured, and what the
least is, stands in benchmarks/memory.py.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import DEVICES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp


def _benchmark(name: str) -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


memory = _benchmark("memory")

# Of the peak, for what differs between two ways of casting the same: a number here and there.
TOLERANCE = 0.02
# Of the least, for activations and for what one operation needs for itself: the networks are made to have few.
SLACK = 0.02

Make = Callable[[], tuple[nn.Module, Tensor]]


def mlp() -> tuple[nn.Module, Tensor]:
    widths = (128, 512, 512, 512, 128)
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(4, 128)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for channels, more in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, more, 3, stride=2, padding=1), nn.BatchNorm2d(more), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(4, 3, 32, 32)


def transformer(rows: int = 2) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(rows, 16, 64)


class Checkpointed(nn.Module):
    """Layers that are computed once more in backward, each when it is its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed() -> tuple[nn.Module, Tensor]:
    return Checkpointed(), torch.randn(4, 256)


OPTIMIZERS = {
    "fused": memory.OPTIMIZERS,
    "as-torch-chooses": {"Adam": functools.partial(torch.optim.Adam, lr=1e-3)},
}
EVERY_OPTIMIZER = {f"{name}-{kind}": make for kind, of in OPTIMIZERS.items() for name, make in of.items()}

every_optimizer = pytest.mark.parametrize("make_optimizer", EVERY_OPTIMIZER.values(), ids=EVERY_OPTIMIZER)
every_fused = pytest.mark.parametrize("optimizer", memory.OPTIMIZERS)
every_half = pytest.mark.parametrize("half", memory.HALVES)
every_device = pytest.mark.parametrize("device", DEVICES)
every_network = pytest.mark.parametrize("make", [mlp, convolutions, transformer])


def start(way: str, half: str, make: Make, make_optimizer: Callable, device: str) -> memory.Training:
    torch.manual_seed(0)
    model, batch = make()
    return memory.Training(way, half, model.to(device), batch.to(device), make_optimizer)


def peak_of_step(*what: object, device: str) -> int:
    return memory.peak_of(device, "whole", functools.partial(start, *what, device))


def parameters_of(make: Make) -> int:
    return sum(parameter.numel() for parameter in make()[0].parameters())


def assert_no_higher_than_under_autocast(make: Make, make_optimizer: Callable, half: str, device: str) -> None:
    peaks = [peak_of_step(way, half, make, make_optimizer, device=device) for way in ("O1", "autocast")]
    assert peaks[0] <= (1 + TOLERANCE) * peaks[1]


@every_device
@every_half
class TestFunctionsThatCast:
    """O1 beside `torch.autocast`."""

    @every_optimizer
    @every_network
    @pytest.mark.covering(1)
    def test_step_peaks_no_higher_than_under_autocast(self, make, make_optimizer, half, device):
        assert_no_higher_than_under_autocast(make, make_optimizer, half, device)

    @pytest.mark.slow_on_cpu
    @pytest.mark.parametrize(
        "make", [functools.partial(transformer, 32), checkpointed], ids=["much-attention", "checkpointed"]
    )
    def test_step_of_many_activations_peaks_no_higher_than_under_autocast(self, make, half, device):
        assert_no_higher_than_under_autocast(make, EVERY_OPTIMIZER["Adam-fused"], half, device)

    @pytest.mark.slow_on_cpu
    @every_network
    @pytest.mark.covering(1)
    def test_no_cast_is_kept_between_two_steps(self, make, half, device):
        adam = EVERY_OPTIMIZER["Adam-fused"]
        ours, bare = (functools.partial(start, way, half, make, adam, device) for way in ("O1", "float32"))
        of_a_loss_scale = 64
        assert memory.peak_of(device, "rest", ours) <= memory.peak_of(device, "rest", bare) + of_a_loss_scale

    @pytest.fixture
    def _attention_that_can_be_cast(self) -> Iterator[None]:
        # Within torch's fast path autocast casts nothing on the CPU, and amp leaves that path.
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
        torch.backends.mha.set_fastpath_enabled(before)

    @pytest.mark.slow_on_cpu
    @pytest.mark.usefixtures("_attention_that_can_be_cast")
    @every_network
    @pytest.mark.covering(1)
    def test_inference_peaks_as_under_autocast_and_in_inference_mode_as_under_no_grad(self, make, half, device):
        def peak(way: str, mode: Callable) -> float:
            def prepare() -> Callable[[], object]:
                training = start(way, half, make, EVERY_OPTIMIZER["Adam-fused"], device)
                training.model.eval()
                return mode()(training.infer)

            return memory.peak(device, prepare)

        ours = peak("O1", torch.no_grad)
        assert ours == pytest.approx(peak("autocast", torch.no_grad), rel=TOLERANCE)
        # Autocast keeps no casts in inference mode, and casts a weight as often as it is used.
        assert ours == pytest.approx(peak("O1", torch.inference_mode), rel=TOLERANCE)


def own_needs(make: Make, half: str, device: str) -> int:
    """What a forward takes, in a model that was converted by hand, beside the weights."""

    def prepare() -> Callable[[], object]:
        model, batch = (each.to(device, memory.HALVES[half]) for each in make())
        return lambda: model(batch)

    return int(memory.peak(device, prepare)) - memory.HALF.weight * parameters_of(make)


@every_device
@every_half
class TestHalfWeightsWithMasters:
    """O2 beside the least that there can be: `Parts` of the benchmark."""

    @every_fused
    @pytest.mark.parametrize("phase", memory.PHASES_AND_REST)
    @pytest.mark.covering(1)
    def test_every_phase_takes_the_least_memory(self, phase, optimizer, half, device):
        begin = functools.partial(start, "O2", half, mlp, memory.OPTIMIZERS[optimizer], device)
        least = memory.MASTERS.least(phase, memory.STATE[optimizer]) * parameters_of(mlp)
        # On some processors products of halves take more than that for themselves, whoever calls them.
        needs = own_needs(mlp, half, device) if phase == "forward" else 0
        room = max(least * SLACK, needs * (1 + SLACK))
        assert least <= memory.peak_of(device, phase, begin) <= least + room

    @every_fused
    @pytest.mark.covering(1)
    def test_conversion_and_first_step_take_the_least_memory(self, optimizer, half, device):
        def prepare() -> Callable[[], object]:
            torch.manual_seed(0)
            model, batch = (each.to(device) for each in mlp())
            return lambda: memory.Training("O2", half, model, batch, memory.OPTIMIZERS[optimizer]).whole()

        least = memory.MASTERS.least("step", memory.STATE[optimizer]) * parameters_of(mlp)
        assert least <= memory.peak(device, prepare) <= least * (1 + SLACK)

    @pytest.mark.slow
    @pytest.mark.usefixtures("compiled")
    @pytest.mark.parametrize("kernel", ["extension", "torch"])
    def test_clipped_step_of_several_passes_takes_the_least_memory(self, kernel, half, device, select):
        """Gradients of several blocks take 2 bytes a parameter beside their float32 sums, as those of one do."""
        select(kernel)

        def many_layers() -> tuple[nn.Module, Tensor]:
            return memory.network("cpu", 128, 32), torch.randn(4, 128)

        def prepare() -> Callable[[], object]:
            training = start("O2", half, many_layers, memory.OPTIMIZERS["Adam"], device)
            training.whole()

            def work() -> None:
                for _ in range(3):
                    training.forward()
                    training.backward()
                amp.clip_grad_norm_(training.optimizer, 1.0)
                training.step()

            return work

        least = memory.MASTERS.least("step", memory.STATE["Adam"]) * parameters_of(many_layers)
        assert least <= memory.peak(device, prepare) <= least * (1 + SLACK)

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_half_and_float32_gradients_live_until_the_step(self, half, device):
        parts, numbers = memory.MASTERS, memory.STATE["Adam"]

        def held(after: Callable[[memory.Training], object]) -> float:
            def prepare() -> Callable[[], object]:
                training = start("O2", half, mlp, memory.OPTIMIZERS["Adam"], device)
                training.whole()
                training.forward()
                training.backward()
                after(training)
                return training.rest

            return memory.peak(device, prepare) / parameters_of(mlp)

        rest = parts.least("rest", numbers)
        gradients = parts.gradient + parts.master_gradient
        assert held(lambda _: None) == pytest.approx(rest + gradients, rel=SLACK)
        assert held(lambda training: training.optimizer.step()) == pytest.approx(rest, rel=SLACK)
        assert held(lambda training: training.optimizer.zero_grad(set_to_none=False)) == pytest.approx(
            rest + gradients,
            rel=SLACK,  # zeros in both, as torch's own leaves zeros
        )

    @pytest.mark.slow_on_cpu
    def test_weights_without_an_optimizer_have_no_masters(self, half, device):
        def prepare() -> Callable[[], object]:
            model = mlp()[0].to(device)
            amp.initialize(model, opt_level="O2", half_dtype=memory.HALVES[half], verbosity=0)
            return lambda: model

        assert memory.peak(device, prepare) == pytest.approx(memory.MASTERS.weight * parameters_of(mlp), rel=SLACK)


TEMPORARY = [way for way, parts in memory.WAYS.items() if parts.temporary]


@every_device
@pytest.mark.parametrize("way", TEMPORARY)
class TestTemporaryMasters:
    """O5 with masters that exist only while the optimizer steps."""

    @staticmethod
    def layers() -> tuple[nn.Module, Tensor]:
        return memory.network("cpu", 512, 16), torch.randn(4, 512)

    #: Of the layers: as many as have 2**20 elements, the least that a part has.
    SHARE = 3 / 16

    @every_fused
    @pytest.mark.parametrize("phase", ["rest", "forward", "backward"])
    @pytest.mark.covering(1)
    def test_phases_without_masters_take_the_least_memory(self, phase, optimizer, way, device):
        begin = functools.partial(start, way, "bfloat16", self.layers, memory.OPTIMIZERS[optimizer], device)
        least = memory.WAYS[way].least(phase, memory.STATE[optimizer]) * parameters_of(self.layers)
        needs = own_needs(self.layers, "bfloat16", device) if phase == "forward" else 0
        room = max(least * SLACK, needs * (1 + SLACK))
        assert least <= memory.peak_of(device, phase, begin) <= least + room

    @every_fused
    @pytest.mark.slow
    @pytest.mark.usefixtures("compiled")
    def test_step_has_masters_of_a_part_at_a_time(self, optimizer, way, device, select):
        select("extension")
        begin = functools.partial(start, way, "bfloat16", self.layers, memory.OPTIMIZERS[optimizer], device)
        parts, numbers = memory.WAYS[way], memory.STATE[optimizer]
        most = parts.least("step", numbers) + self.SHARE * parts.in_turn(numbers)
        assert memory.peak_of(device, "step", begin) <= most * (1 + SLACK) * parameters_of(self.layers)

    @every_fused
    @pytest.mark.slow
    @pytest.mark.usefixtures("compiled")
    def test_other_optimizers_get_all_masters_at_once(self, optimizer, way, device, select):
        select("extension")
        begin = functools.partial(start, way, "bfloat16", mlp, memory.ALL_AT_ONCE[optimizer], device)
        parts, numbers = memory.WAYS[way], memory.STATE[optimizer]
        expected = (parts.least("step", numbers) + parts.in_turn(numbers)) * parameters_of(mlp)
        assert memory.peak_of(device, "step", begin) == pytest.approx(expected, rel=SLACK)


@every_device
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_deinitialize_leaves_what_float32_takes(opt_level, device):
    def prepare() -> Callable[[], object]:
        training = start(opt_level, "bfloat16", mlp, memory.OPTIMIZERS["Adam"], device)
        training.whole()
        amp.deinitialize()
        return training.rest

    least = memory.FLOAT32.least("rest", memory.STATE["Adam"]) * parameters_of(mlp)
    assert memory.peak(device, prepare) == pytest.approx(least, rel=SLACK)


def test_one_more_tensor_is_measured():
    begin = functools.partial(start, "O2", "bfloat16", mlp, memory.OPTIMIZERS["Adam"], "cpu")

    def prepare() -> Callable[[], object]:
        training = begin()
        training.whole()
        training.more = torch.empty(parameters_of(mlp), dtype=torch.bfloat16)
        return training.rest

    memory.peak_of("cpu", "rest", begin)  # what torch allocates once in a process
    rest = memory.peak_of("cpu", "rest", begin)
    assert memory.peak("cpu", prepare) - rest == pytest.approx(2 * parameters_of(mlp), rel=SLACK)

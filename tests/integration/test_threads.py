"""Of several threads at once: no cast is lost, none leaks, and nobody is switched off by somebody else."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same_bits, assert_same_state, is_thorough, together
from optimizers import backward
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn

from ampatch import amp
from ampatch.runtime import runtime
from ampatch.switch import Switch

THREADS = 8


class Product(torch.autograd.Function):
    """A matrix product whose backward calls listed functions, and notes what they compute in."""

    @staticmethod
    def forward(ctx, value: Tensor, weight: Tensor, seen: list[tuple[str, torch.dtype]]) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.seen = seen
        result = torch.mm(value, weight)
        seen.append(("forward", result.dtype))
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        value, weight = ctx.saved_tensors
        of_weight, of_value = torch.mm(value.t(), grad), grad.matmul(weight.t())
        ctx.seen.append(("backward", of_weight.dtype))
        ctx.seen.append(("blacklist", torch.softmax(of_value, -1).dtype))
        return of_value.to(value.dtype), of_weight.to(weight.dtype), None


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.first = nn.Linear(4, width)
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.seen: list[tuple[str, torch.dtype]] = []

    def forward(self, value: Tensor) -> Tensor:
        return Product.apply(torch.relu(self.first(value)), self.weight, self.seen)


class Trainer:
    """A model, and a run of three steps that begins at the same weights whenever it is called."""

    def __init__(self, index: int, device: str, **options: object) -> None:
        self.index = index
        self.model = Network(width=index + 2).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.value = torch.linspace(-1, 1, 5 * 4, device=device).view(5, 4)
        amp.initialize(self.model, self.optimizer, num_losses=THREADS, init_scale=2.0**8, verbosity=0, **options)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def run(self) -> list[Tensor]:
        """The weights after three steps."""
        self.model.load_state_dict(self.start)
        for _ in range(3):
            self.optimizer.zero_grad()
            loss = self.model(self.value).float().square().mean()
            backward(loss, self.optimizer, loss_id=self.index)
            self.optimizer.step()
        return [tensor.clone() for tensor in self.model.state_dict().values()]

    def compute_types(self) -> set[tuple[str, torch.dtype]]:
        seen, self.model.seen[:] = set(self.model.seen), []
        return seen


def train_side_by_side(device: str, seconds: float, **options: object) -> None:
    """Trains models in threads, some of which turn casts off now and then, and compares with what each does alone."""

    def train(trainer: Trainer) -> None:
        while time.monotonic() < until or not done[trainer.index]:
            assert_same_state(trainer.run(), expected[trainer.index])
            assert trainer.compute_types() == types[trainer.index]
            if trainer.index % 2:
                with amp.disable_casts():
                    product = torch.mm(trainer.value, trainer.value.t())
                    assert product.dtype is torch.float32
                    time.sleep(0.001)  # in which the others are to see nothing of it
            done[trainer.index] += 1

    trainers = [Trainer(index, device, **options) for index in range(THREADS)]
    expected = [trainer.run() for trainer in trainers]
    types = [trainer.compute_types() for trainer in trainers]
    done = [0] * THREADS
    until = time.monotonic() + seconds
    together(functools.partial(train, trainer) for trainer in trainers)
    assert min(done) > 0
    gc.collect()
    assert len(runtime.live.cache) == 0
    assert not Switch.is_off()


class TestThreads:
    @EACH_DEVICE
    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_models_trained_in_threads_have_the_bits_of_each_alone(self, device, half, level):
        train_side_by_side(device, 3.0 if is_thorough() else 0.4, half_dtype=half, opt_level=level)

    @EACH_LEVEL
    def test_threads_that_set_amp_up_at_once_share_a_session(self, level):
        def set_up(model: nn.Module) -> None:
            amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)

        before = torch.mm
        together(functools.partial(set_up, nn.Linear(4, 4)) for _ in range(THREADS))
        assert amp.settings()["num_models"] == amp.settings()["num_optimizers"] == THREADS
        amp.deinitialize()
        assert torch.mm is before

    @EACH_DEVICE
    def test_a_forward_pass_leaves_the_half_weights_of_another_model(self, device):
        one, other = (Trainer(index, device, opt_level="O2", half_dtype=torch.float16) for index in range(2))
        (master, *_) = amp.master_params(other.optimizer)
        half = next(other.model.parameters())
        before = half.clone()
        with torch.no_grad():
            master.add_(1)
        one.model(one.value)
        assert_same_bits(half, before)
        other.model(other.value)
        assert_same_bits(half, master.half())

    def test_threads_evaluate_one_model_at_once(self):

        def evaluate() -> None:
            with torch.no_grad():
                for _ in range(50):
                    assert_same_bits(model(value), expected)

        model = amp.initialize(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), verbosity=0)
        value = torch.linspace(-1, 1, 8).view(2, 4)
        with torch.no_grad():
            expected = model(value)
        together([evaluate] * THREADS)
        assert len(runtime.live.cache) == 0


class Types(nn.Module):
    """Says in its output what its forward computes in: 1 for the half type, 0 for float32; a value for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, value: Tensor) -> Tensor:
        is_half = torch.mm(value, self.weight).dtype is torch.bfloat16
        return (value[:, :1] * self.weight[0, 0] * 0).float() + float(is_half)


def trained(wrap: Callable[[nn.Module], nn.Module], device: str, half: torch.dtype, level: str) -> list[Tensor]:
    """The weights of a model after three steps of what is wrapped around it."""
    model = Network(width=6).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, half_dtype=half, opt_level=level, init_scale=2.0**8, verbosity=0)
    wrapped, value = wrap(model), torch.linspace(-1, 1, 24, device=device).view(6, 4)
    for _ in range(3):
        optimizer.zero_grad()
        backward(wrapped(value).float().square().mean(), optimizer)
        optimizer.step()
    weights = list(model.state_dict().values())
    amp.deinitialize()
    return weights


class TestDataParallel:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="where there are GPUs DataParallel takes no model on the CPU")
    @EACH_HALF
    @EACH_LEVEL
    def test_data_parallel_without_gpus_trains_as_the_model(self, half, level):
        alone = trained(lambda model: model, "cpu", half, level)
        assert_same_state(trained(nn.DataParallel, "cpu", half, level), alone)

    def test_threads_of_parallel_apply_follow_the_thread_that_starts_them(self):

        def parallel_apply(modules: list[Callable[..., Tensor]], inputs: list[Tensor]) -> list[Tensor]:
            results: dict[int, Tensor] = {}
            together(
                functools.partial(lambda index: results.update({index: modules[index](inputs[index])}), index)
                for index in range(len(modules))
            )
            return [results[index] for index in range(len(modules))]

        model = amp.initialize(Types(), half_dtype=torch.bfloat16, verbosity=0)
        carried = runtime.live.switch._carried_by(parallel_apply)
        values = [torch.ones(1, 4)] * 2
        assert torch.cat(carried([model, model], values)).tolist() == [[1], [1]]
        with amp.disable_casts():
            assert torch.cat(carried([model, model], values)).tolist() == [[0], [0]]
            assert torch.cat(parallel_apply([model, model], values)).tolist() == [[1], [1]]
        assert torch.cat(carried([model, model], values)).tolist() == [[1], [1]]

    def test_parallel_apply_is_patched_under_every_name(self):
        places = [
            torch.nn.parallel,
            importlib.import_module("torch.nn.parallel.data_parallel"),
            importlib.import_module("torch.nn.parallel.parallel_apply"),
        ]
        before = [place.parallel_apply for place in places]
        amp.initialize(Types(), verbosity=0)
        for place, original in zip(places, before, strict=True):
            assert place.parallel_apply.__wrapped__ is original
        amp.deinitialize()
        assert [place.parallel_apply for place in places] == before

    @pytest.mark.gpu
    def test_threads_on_one_gpu_follow_the_thread_that_starts_them(self):
        model = amp.initialize(Types().cuda(), half_dtype=torch.bfloat16, verbosity=0)
        values = [torch.ones(1, 4, device="cuda")] * 2
        apply = functools.partial(nn.parallel.parallel_apply, [model, model], values, devices=[0, 0])
        assert torch.cat(apply()).tolist() == [[1], [1]]
        with amp.disable_casts():
            assert torch.cat(apply()).tolist() == [[0], [0]]

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    @EACH_HALF
    @EACH_LEVEL
    def test_data_parallel_on_two_gpus_trains_as_on_one(self, half, level):
        def on(devices: list[int]) -> list[Tensor]:
            return trained(lambda model: nn.DataParallel(model, devices), "cuda", half, level)

        torch.testing.assert_close(on([0, 1]), on([0]), rtol=1e-2, atol=1e-2)

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_disable_casts_holds_in_data_parallel_on_two_gpus(self):
        model = amp.initialize(Types().cuda(), half_dtype=torch.bfloat16, verbosity=0)
        wrapped, value = nn.DataParallel(model, [0, 1]), torch.ones(2, 4, device="cuda")
        assert wrapped(value).tolist() == [[1], [1]]
        with amp.disable_casts():
            assert wrapped(value).tolist() == [[0], [0]]

"""Of torch.compile: one graph with every cast in it, compiled once, for each kind of rule and in training."""

from __future__ import annotations

import contextlib
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from helpers import casts_on, check_rows, dtype_name, together
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.runtime import runtime
from ampatch.switch import Switch

# Where one case takes long.
ONE_HALF = pytest.mark.parametrize(
    "half", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=dtype_name
)
RESTORES_AUTOCAST = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="torch 2.10 and 2.11 leave autocast on where a graph that runs as it was traced raises inside of it",
)
EACH_BACKEND = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def dtypes(value: object) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# --- each kind of rule ----------------------------------------------------------------------------


@amp.half_function
def decorated_half(a: Tensor, b: Tensor) -> Tensor:
    return a * b


@amp.float_function
def decorated_float(a: Tensor) -> Tensor:
    return a.exp() * 2


@amp.promote_function
def decorated_promote(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b]) if a.dtype is b.dtype else a


@amp.disable_casts()
def decorated_without_casts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, torch.mm(x, w)


class Product(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @amp.half_function
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (grad @ b.t()).float(), (a.t() @ grad).float()


OURS = types.ModuleType("ours")


def with_and_without(m: Weights, x: Tensor) -> tuple[Tensor, ...]:
    before = x @ m.square
    with amp.disable_casts():
        inside = x @ m.square, torch.mm(x, m.square), F.normalize(before)
        with amp.disable_casts():
            nested = x.matmul(m.square)
        inside_again = x.matmul(m.square)
    return before, *inside, nested, inside_again, x.matmul(m.square)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.square = nn.Parameter(torch.randn(8, 8) / 3)
        self.linear = nn.Linear(8, 8)
        self.lstm, self.gru, self.rnn = nn.LSTMCell(8, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8)


KINDS: dict[str, Callable[[Weights, Tensor], Any]] = {
    "whitelist": lambda m, x: m.linear(x).relu(),
    "blacklist": lambda m, x: F.layer_norm(m.linear(x), (8,)).sum(),
    "promote": lambda m, x: torch.lerp(m.linear(x), x, 0.25),
    "condition-that-holds": lambda m, x: F.gelu(m.linear(x), approximate="tanh"),
    "condition-that-does-not": lambda m, x: F.gelu(m.linear(x), approximate="none"),
    "method": lambda m, x: x.matmul(m.square).cumsum(0).softmax(-1),
    "operator": lambda m, x: (x @ m.square).abs() ** 1.5,
    "in-place": lambda m, x: (x @ m.square).index_add_(0, torch.tensor([0], device=x.device), x[:1]),
    "explicit-dtype": lambda m, x: F.softmax(m.linear(x), -1, dtype=torch.float64),
    "registration": lambda m, x: OURS.scaled(x, m.square[:3]),
    "decorator": lambda m, x: decorated_promote(decorated_float(decorated_half(x, m.square[:3])), x),
    "autograd-function": lambda m, x: Product.apply(x, m.square),
    "disable-casts": with_and_without,
    "disable-casts-decorator": lambda m, x: (*decorated_without_casts(x, m.square), x @ m.square),
    "recurrent-cells": lambda m, x: (*m.lstm(x), m.gru(x), m.rnn(x)),
}


def of_every_kind(weights: nn.ModuleList, x: Tensor) -> list[Any]:
    """Calls every kind, each with weights of its own."""
    return [function(own, x) for function, own in zip(KINDS.values(), weights, strict=True)]


def inputs(device: str) -> Tensor:
    return torch.linspace(-1, 1, 24, device=device).view(3, 8)


@contextlib.contextmanager
def casts_on_by_every_kind(model: nn.Module, half: torch.dtype) -> Iterator[None]:
    OURS.scaled = lambda a, b: a * b
    amp.register_half_function(OURS, "scaled")
    conditional = {"name": "gelu", "when": {"approximate": ["tanh"]}}
    amp.initialize(
        model, half_dtype=half, verbosity=0, cast_lists={"blacklist": {"torch.nn.functional": [conditional]}}
    )
    yield
    amp.deinitialize()


@pytest.mark.filterwarnings("ignore:.*autograd functions are all static:DeprecationWarning")  # torch, of itself
@EACH_DEVICE
@ONE_HALF
def test_rules_of_every_kind_compile_to_one_graph_with_the_results_of_eager_code(half, device, subtests):
    weights, x = nn.ModuleList(Weights() for _ in KINDS).to(device), inputs(device)

    def run(function: Callable[..., Any]) -> tuple[Any, list[list[Tensor | None]]]:
        results = function(weights, x)
        total = sum(result.float().pow(2).sum() for result in tree_leaves(results) if result.requires_grad)
        found = torch.autograd.grad(total, list(weights.parameters()), allow_unused=True)
        size = len(found) // len(KINDS)
        return results, [list(found[start : start + size]) for start in range(0, len(found), size)]

    def check(found: Any, eager: Any, found_gradients: Any, gradients: Any) -> None:
        assert dtypes(found) == dtypes(eager)
        torch.testing.assert_close(found, eager, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found_gradients, gradients, rtol=2e-2, atol=2e-2)

    with casts_on_by_every_kind(weights, half):
        eager = run(of_every_kind)
        found = run(torch.compile(of_every_kind, backend="aot_eager", fullgraph=True))
    assert graph_breaks() == 0
    check_rows(subtests, zip(KINDS, found[0], eager[0], found[1], eager[1], strict=True), check)


# --- regions without casts ------------------------------------------------------------------------


def on_a_branch(x: Tensor, w: Tensor) -> list[Tensor]:
    try:
        with amp.disable_casts():
            inside = x @ w
            raise ValueError
    except ValueError:
        return [inside, x @ w]


def by_a_return(x: Tensor, w: Tensor) -> Tensor:
    with amp.disable_casts():
        return x @ w


def in_a_loop(x: Tensor, w: Tensor) -> list[Tensor]:
    results = []
    for _ in range(2):
        with amp.disable_casts():
            results.append(x @ w)
        results.append(x.matmul(w))
    return results


def around_a_checkpoint(x: Tensor, w: Tensor) -> list[Tensor]:
    with amp.disable_casts():
        inside = checkpoint(torch.Tensor.__matmul__, x, w, use_reentrant=False)
    return [inside, checkpoint(torch.Tensor.__matmul__, x, w, use_reentrant=False)]


def in_a_checkpoint(x: Tensor, w: Tensor) -> list[Tensor]:
    return [*checkpoint(in_a_loop, x, w, use_reentrant=False), x @ w]


REGIONS = {
    "left-by-an-exception": on_a_branch,
    "left-by-a-return": lambda x, w: [by_a_return(x, w), x @ w],
    "in-a-loop": in_a_loop,
    "around-a-checkpoint": around_a_checkpoint,
    "in-a-checkpoint": in_a_checkpoint,
}


def after_a_break(x: Tensor, w: Tensor) -> list[Tensor]:
    before = x @ w
    with amp.disable_casts():
        first = x @ w
        torch._dynamo.graph_break()
        second = x.matmul(w)
    return [before, first, second, x @ w]


class TestRegionsWithoutCasts:
    @EACH_BACKEND
    @pytest.mark.parametrize("region", REGIONS)
    @pytest.mark.covering(1)
    def test_regions_without_casts_are_part_of_the_graph(self, region, backend):
        x, w = torch.ones(3, 8), nn.Parameter(torch.ones(8, 8))
        with casts_on():
            eager = dtypes(REGIONS[region](x, w))
            fast = torch.compile(REGIONS[region], backend=backend, fullgraph=True)
            assert dtypes(fast(x, w)) == dtypes(fast(x, w)) == eager
            with amp.disable_casts():
                assert set(dtypes(fast(x, w))) == {torch.float32}
            assert dtypes(fast(x, w)) == eager
            sum(result.float().sum() for result in fast(x, w)).backward()
            assert not Switch.is_off()
        assert graph_breaks() == 0
        assert w.grad is not None

    @EACH_BACKEND
    def test_regions_without_casts_may_hold_graph_breaks(self, backend):
        x, w = torch.ones(3, 8), torch.ones(8, 8)
        with casts_on():
            assert dtypes(torch.compile(after_a_break, backend=backend)(x, w)) == dtypes(after_a_break(x, w))

    @pytest.mark.parametrize("backend", [pytest.param("eager", marks=RESTORES_AUTOCAST), "aot_eager"])
    def test_regions_without_casts_end_if_the_graph_raises(self, backend):
        def function(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
            with amp.disable_casts():
                return x[index] @ w

        x, w = torch.ones(3, 8), torch.ones(8, 8)
        with casts_on():
            fast = torch.compile(function, backend=backend, fullgraph=True)
            assert fast(x, w, torch.tensor([1])).dtype is torch.float32
            with pytest.raises(IndexError):
                fast(x, w, torch.tensor([7]))
            assert (x @ w).dtype is torch.bfloat16
            with amp.disable_casts():
                assert (x @ w).dtype is torch.float32
            assert (x @ w).dtype is torch.bfloat16
            assert fast(x, w, torch.tensor([1])).dtype is torch.float32
        # Where the graph runs as it was traced nothing takes this back; autocast would never drop its casts again.
        while torch.autocast_increment_nesting() > 1:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()

    def test_regions_without_casts_hold_for_one_thread(self):
        x, w, seen = torch.ones(3, 8), torch.ones(8, 8), []
        fast = torch.compile(in_a_loop, backend="eager", fullgraph=True)

        def run() -> None:
            seen.extend([(tuple(dtypes(fast(x, w))), (x @ w).dtype) for _ in range(50)])

        with casts_on():
            expected = (tuple(dtypes(fast(x, w))), torch.bfloat16)
            together([run] * 4)
        assert seen == [expected] * 200

    @pytest.mark.parametrize("strict", [True, False])
    def test_regions_without_casts_are_exported(self, strict):
        class Model(nn.Linear):
            def forward(self, x: Tensor) -> list[Tensor]:
                return in_a_loop(x, self.weight)

        model, x = Model(8, 8), torch.ones(3, 8)
        with casts_on():
            eager = dtypes(model(x))
            program = torch.export.export(model, (x,), strict=strict)
            assert dtypes(program.module()(x)) == eager
        assert dtypes(program.module()(x)) == eager


# --- training -------------------------------------------------------------------------------------

STEPS, OVERFLOWS_AT = 50, 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.mix = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        with amp.disable_casts():
            scale = hidden.float().mean()
        return (self.last(hidden) @ self.mix * scale.to(hidden.dtype)).softmax(-1)


class Training:
    """A model, an optimizer, and the same data for every one of them."""

    def __init__(self, level: str, half: torch.dtype, device: str = "cpu", **options: Any) -> None:
        self.net = Net().to(device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self._options = {"opt_level": level, "half_dtype": half, "verbosity": 0, "loss_scale": "dynamic"} | options
        self._device = device
        self._numbers = torch.Generator().manual_seed(1)

    def initialize(self, model: Any = None) -> Any:
        return amp.initialize(
            self.net if model is None else model, self.optimizer, init_scale=2.0**10, **self._options
        )[0]

    def step(self, model: Any, overflow: bool = False) -> float:
        x = torch.randn(6, 8, generator=self._numbers).to(self._device)
        target = torch.rand(6, 4, generator=self._numbers).to(self._device)
        self.optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), target)
        with amp.scale_loss(loss * torch.inf if overflow else loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        return loss.item()

    def losses(self, model: Any, steps: int = STEPS) -> list[float]:
        return [self.step(model, number == OVERFLOWS_AT) for number in range(steps)]


def eager_losses(level: str, half: torch.dtype, device: str = "cpu") -> list[float]:
    training = Training(level, half, device)
    losses = training.losses(training.initialize())
    assert amp.skipped_steps(training.optimizer) == 1
    amp.deinitialize()
    return losses


def compiled_before(training: Training, **how: Any) -> Any:
    model = torch.compile(training.net, fullgraph=True, **how)
    training.initialize()
    return model


def compiled_after(training: Training, **how: Any) -> Any:
    training.initialize()
    return torch.compile(training.net, fullgraph=True, **how)


def handed_in_compiled(training: Training, **how: Any) -> Any:
    return training.initialize(torch.compile(training.net, fullgraph=True, **how))


def compiled_in_place(training: Training, **how: Any) -> Any:
    training.net.compile(fullgraph=True, **how)
    return training.initialize()


@EACH_HALF
@EACH_LEVEL
class TestTraining:
    @EACH_DEVICE
    @pytest.mark.parametrize("make", [compiled_before, compiled_after, handed_in_compiled, compiled_in_place])
    @pytest.mark.covering(1)
    def test_compiled_models_train_as_in_eager_code_and_compile_once(self, make, level, half, device):
        expected = eager_losses(level, half, device)
        training, counter = Training(level, half, device), CompileCounterWithBackend("aot_eager")
        model = make(training, backend=counter)
        losses = [training.step(model)]
        compiled_once = counter.frame_count
        losses += [training.step(model, number == OVERFLOWS_AT) for number in range(1, STEPS)]
        assert counter.frame_count == compiled_once > 0
        assert graph_breaks() == 0
        assert amp.skipped_steps(training.optimizer) == 1
        assert losses == pytest.approx(expected, rel=1e-4)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # inductor, of torch
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU")
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiled_models_train_as_in_eager_code_with_inductor(self, level, half, dynamic):
        expected = eager_losses(level, half)
        training = Training(level, half)
        losses = training.losses(compiled_after(training, dynamic=dynamic))
        assert losses == pytest.approx(expected, rel=1e-2)

    # With "reduce-overhead" torch captures an empty graph, to hold the memory of the others. It records the warning of
    # that to hide it, but a filter that makes errors of warnings comes first.
    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_compiled_models_train_as_in_eager_code_on_a_gpu(self, level, half, mode):
        expected = eager_losses(level, half, "cuda")
        training = Training(level, half, "cuda")
        assert training.losses(compiled_after(training, mode=mode)) == pytest.approx(expected, rel=2e-2)


class TestRecompilation:
    @pytest.mark.slow
    @ONE_HALF
    def test_models_recompile_for_casts_on_and_off_only(self, half):
        counter = CompileCounterWithBackend("aot_eager")
        model, x = Net(), torch.ones(3, 8)
        fast = torch.compile(model, backend=counter, fullgraph=True)

        def compilations() -> int:
            before = counter.frame_count
            for _ in range(5):
                fast(x)
            return counter.frame_count - before

        assert compilations() == 1
        amp.initialize(model, half_dtype=half, verbosity=0)
        assert compilations() == 1
        with amp.disable_casts():
            assert compilations() == 1
        assert compilations() == 0
        with amp.disable_casts(), amp.disable_casts():
            assert compilations() == 0
        amp.initialize(nn.Linear(1, 1), half_dtype=half, verbosity=0)
        assert compilations() == 0
        amp.deinitialize()
        assert compilations() == 1
        amp.initialize(model, half_dtype=half, verbosity=0)
        assert compilations() == 1

    @torch._dynamo.config.patch(recompile_limit=2)
    def test_decorated_functions_recompile_apart(self):
        functions = [amp.half_function(lambda a, number=number: a * number) for number in range(4)]
        with casts_on():
            for function in functions:
                fast = torch.compile(function, backend="eager", fullgraph=True)  # raises once it has compiled too often
                assert fast(torch.ones(2)).dtype is torch.bfloat16


def many_functions(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(1):  # Dynamo leaves a loop to Python that has a graph break in it
        torch._dynamo.graph_break()
        x = F.linear(x, w).exp() @ w
        x = torch.layer_norm(x, (8,)).softmax(-1).cumsum(0).sum(-1, keepdim=True)
        x = torch.mm(w, w.softmax(-1)) + F.gelu(x[0])
    return x


class TestAroundGraphBreaks:
    """What torch.compile leaves to Python, and what is called there."""

    def test_patched_functions_after_graph_breaks_are_not_compiled_apart(self):
        x, w = torch.ones(3, 8), torch.ones(8, 8)

        def compilations() -> int:
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("eager")
            torch.testing.assert_close(torch.compile(many_functions, backend=counter)(x, w), many_functions(x, w))
            return counter.frame_count

        without = compilations()
        with casts_on():
            assert compilations() == without

    @ONE_HALF
    def test_compiled_recurrent_layers_train(self, half):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), torch.ones(3, 8)
        amp.initialize(model, half_dtype=half, verbosity=0)
        result, _ = torch.compile(model, backend="aot_eager")(x)
        torch.testing.assert_close(result, model(x)[0])
        result.float().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    # Dynamo looks at the gradient of every tensor that it meets: here at that of a result, behind a graph break.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
    def test_parts_with_compiler_disable_cast(self):
        inner = nn.Linear(8, 8)
        inner.forward = torch.compiler.disable(inner.forward)
        model, x = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8)), torch.ones(3, 8)
        amp.initialize(model, half_dtype=torch.float16, verbosity=0)
        fast = torch.compile(model, backend="aot_eager")
        assert torch.equal(fast(x), model(x))
        with amp.disable_casts():
            assert fast(x).dtype is torch.float32

    # Dynamo looks at the gradient of every tensor that it meets.
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # what Dynamo imports, of torch
    @pytest.mark.parametrize("fused", [False, True])
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_a_compiled_step_trains_as_in_eager_code(self, level, fused):
        half = torch.float16

        def losses(compiled: bool) -> tuple[list[float], int]:
            training, counter = Training(level, half), CompileCounterWithBackend("aot_eager")
            training.optimizer = torch.optim.Adam(training.net.parameters(), lr=1e-2, fused=fused)
            model = training.initialize()

            def step(x: Tensor, target: Tensor, factor: Tensor) -> Tensor:
                training.optimizer.zero_grad()
                loss = F.mse_loss(model(x).float(), target) * factor
                with amp.scale_loss(loss, training.optimizer) as scaled_loss:
                    scaled_loss.backward()
                training.optimizer.step()
                return loss.detach()

            run = torch.compile(step, backend=counter) if compiled else step
            numbers, results = torch.Generator().manual_seed(1), []
            for number in range(8):
                x, target = torch.randn(6, 8, generator=numbers), torch.rand(6, 4, generator=numbers)
                results.append(run(x, target, torch.tensor(torch.inf if number == 5 else 1.0)).item())
                if number == 2:
                    compiled_by_then = counter.frame_count
            assert amp.skipped_steps(training.optimizer) == 1
            amp.deinitialize()
            return results, counter.frame_count - compiled_by_then

        expected, _ = losses(compiled=False)
        found, recompilations = losses(compiled=True)
        assert found == pytest.approx(expected, rel=1e-3)
        assert recompilations == 0


class TestAdoptedModels:
    @pytest.mark.parametrize("fullgraph", [False, True])
    @pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Linear(8, 8))], ids=["own-class", "torch-class"])
    @pytest.mark.covering(1)
    def test_a_compiled_model_on_another_device_raises(self, make, fullgraph):
        model, x = amp.initialize(make(), half_dtype=torch.bfloat16, verbosity=0), torch.ones(2, 8)
        fast = torch.compile(model, backend="eager", fullgraph=fullgraph)
        fast(x)
        # As if amp had been set up for a model on a GPU, and this one had been moved away from there.
        runtime.live.device_types.clear()
        runtime.live.device_types.add("cuda")
        with pytest.raises((amp.UsageError, torch._dynamo.exc.Unsupported), match="the model is on 'cpu'"):
            fast(x)

    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_compiled_models_with_checkpoints_have_the_gradients_of_eager_code(self, level, half):
        class Checkpointed(Net):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(super().forward, x, use_reentrant=False)

        def gradients(compiled: bool) -> list[Tensor]:
            model = Checkpointed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, opt_level=level, half_dtype=half, verbosity=0)
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            run(torch.linspace(-1, 1, 24).view(3, 8)).pow(2).sum().backward()
            grads = [parameter.grad.float() for parameter in model.parameters()]
            amp.deinitialize()
            return grads

        torch.testing.assert_close(gradients(compiled=True), gradients(compiled=False), rtol=2e-2, atol=1e-3)

    def test_a_compiled_forward_gives_the_results_of_eager_code(self):
        model = amp.initialize(Net(), half_dtype=torch.float16, verbosity=0)
        x = torch.linspace(-1, 1, 24).view(3, 8)
        fast = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("patched", [False, True])
def test_a_python_function_of_torch_compiles_by_itself(patched):
    with casts_on() if patched else contextlib.nullcontext():
        counter = CompileCounterWithBackend("aot_eager")
        loss = torch.compile(F.cross_entropy, backend=counter)(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))
        assert loss.dtype is torch.float32
        assert counter.frame_count == 1

"""Of CUDA graphs, of whole training steps and of models: what is replayed is what would have been run.

Where there is no GPU, the CPU captures (`emulated_graphs`): it refuses what torch and a capturing stream refuse, and
its replays run no Python. On any machine, steps that amp takes for captured ones read nothing back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import emulated_graphs
import pytest
import torch
from helpers import assert_same_bits, assert_same_state
from optimizers import backward
from small_nets import EACH_HALF, EACH_LEVEL
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.patching import weight_cache
from ampatch.runtime import runtime
from ampatch.scaling import missing_scale, optimizer_step, scale_use, step_outcomes

SCALE = 2.0**8

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2, fused=True, capturable=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True, capturable=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9, fused=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
WITHOUT_SKIPPING: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "cuda": functools.partial(torch.optim.Adam, lr=1e-2, capturable=True, foreach=True),
    "cpu": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9, foreach=True),  # Adam reads its count of steps
}


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU; or the CPU, which stands in for one that captures graphs and that the host would have to wait for."""
    if request.param == "cuda":
        yield "cuda"
        return
    emulated_graphs.install(monkeypatch)
    monkeypatch.setattr(scale_use, "AT_HAND", frozenset())
    yield "cpu"
    amp.deinitialize()


class Loop:
    """A training loop whose input lies where a graph finds it.

    Args:
        make: makes the optimizer.
        device: of the model.
        options: those of `amp.initialize`.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = (make if device == "cuda" else _on_cpu(make))(self.model.parameters())
        options = {"loss_scale": "dynamic", "init_scale": SCALE, "scale_window": 3, "verbosity": 0, **options}
        amp.initialize(self.model, self.optimizer, **options)
        self.input = torch.zeros(5, 8, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        backward(self.loss(), self.optimizer)
        self.optimizer.step()

    def feed(self, index: int, overflows: bool) -> None:
        batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(index))
        self.input.copy_(batch * math.inf if overflows else batch)

    def warm_up(self, step: Callable[[Loop], None] = step) -> None:
        """Two steps on a stream of their own, as torch asks for before a capture; the first makes the state."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(2):
                self.feed(index, overflows=False)
                step(self)
        torch.cuda.current_stream().wait_stream(stream)

    def loss(self) -> Tensor:
        return self.model(self.input).float().square().mean()

    def everything(self) -> list[Tensor]:
        """Weights, what the optimizer updates, what it keeps, and the scale."""
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        updated = list(amp.master_params(self.optimizer))
        return [
            tensor.detach().clone()
            for tensor in (*self.model.parameters(), *updated, *held, torch.tensor(amp.get_loss_scale()))
            if isinstance(tensor, Tensor)
        ]


def capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def capture_by_accelerator(function: Callable[[], object]) -> Any:
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this torch has no torch.accelerator.Graph")
    graph = torch.accelerator.Graph()
    with torch.cuda.stream(torch.cuda.Stream()), graph:
        function()
    return graph


EACH_CAPTURE = pytest.mark.parametrize(
    "capture", [capture, capture_by_accelerator], ids=["torch.cuda.graph", "torch.accelerator.Graph"]
)


def moments(
    device: str,
    make: Callable[..., torch.optim.Optimizer],
    step: Callable[[Loop], None] = Loop.step,
    *,
    graphed: bool,
    **options: Any,
) -> list[Tensor]:
    """What there is after each of ten steps, run or replayed; with a dynamic scale, some overflow."""
    loop, found = Loop(make, device, **options), []
    loop.warm_up(step)
    run = functools.partial(step, loop)
    if graphed:
        run = capture(run).replay
    for index, overflows in enumerate(OVERFLOWS):
        loop.feed(index, overflows and "loss_scale" not in options)
        run()
        found += loop.everything()
    amp.deinitialize()
    return found


def assert_replays(*args: Any, **options: Any) -> None:
    """Asserts that replayed steps have the bits of steps; takes the arguments of `moments`."""
    assert_same_state(moments(*args, graphed=True, **options), moments(*args, graphed=False, **options))


def clipped_step(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    backward(loop.loss(), loop.optimizer, delay_unscale=True)
    amp.clip_grad_norm_(loop.optimizer, 0.1)
    loop.optimizer.step()


def step_clipped_by_torch(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    backward(loop.loss(), loop.optimizer)
    nn.utils.clip_grad_norm_(amp.master_params(loop.optimizer), 0.1)
    loop.optimizer.step()


def accumulating_step(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    for delays in (True, False):
        backward(loop.loss() / 2, loop.optimizer, delay_unscale=delays)
    loop.optimizer.step()


def step_of_two_losses(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=True)
    for loss_id in (0, 1):
        backward(loop.loss(), loop.optimizer, loss_id=loss_id)
    loop.optimizer.step()


def zeroing_step(loop: Loop) -> None:
    """Leaves zeros in place of no gradients, so that their memory stays."""
    loop.optimizer.zero_grad(set_to_none=False)
    backward(loop.loss(), loop.optimizer)
    loop.optimizer.step()


STEPS = {
    "clipped": clipped_step,
    "clipped by torch": step_clipped_by_torch,
    "accumulating": accumulating_step,
    "two losses": step_of_two_losses,
    "zeroing": zeroing_step,
}
OVERFLOWS = [False, True, False, False, True, True, False, False, False, False]


class TestSteps:
    @EACH_OPTIMIZER
    @EACH_HALF
    @EACH_LEVEL
    def test_a_replayed_step_has_the_bits_of_a_step(self, device, level, half, make):
        assert_replays(device, make, opt_level=level, half_dtype=half)

    @pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
    @EACH_LEVEL
    def test_replayed_steps_of_other_forms_have_the_bits_of_steps(self, device, step, level):
        assert_replays(device, OPTIMIZERS["Adam"], step, opt_level=level, half_dtype=torch.float16, num_losses=2)

    def test_optimizers_that_cannot_skip_replay_under_a_static_scale(self, device):
        assert_replays(device, WITHOUT_SKIPPING[device], half_dtype=torch.float16, loss_scale=128.0)

    def test_a_scale_loaded_after_the_capture_counts_in_replays(self, device):
        loop = Loop(OPTIMIZERS["Adam"], device, half_dtype=torch.float16)
        loop.warm_up()
        graph = capture(loop.step)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}})
        loop.feed(0, overflows=True)
        graph.replay()
        assert amp.get_loss_scale() == 2.0**9

    def test_a_forward_pass_after_a_replay_sees_the_new_weights(self, device):
        loop = Loop(OPTIMIZERS["Adam"], device, half_dtype=torch.float16)
        loop.warm_up()
        graph = capture(loop.step)
        loop.feed(0, overflows=False)
        stale = loop.model(loop.input)
        graph.replay()
        found = loop.model(loop.input)
        amp.clear_cache()
        assert_same_bits(found, loop.model(loop.input))
        assert not torch.equal(found, stale)

    @EACH_LEVEL
    def test_a_step_after_a_graph_of_the_backward_pass_alone_raises(self, device, level):
        loop = Loop(OPTIMIZERS["Adam"], device, opt_level=level, half_dtype=torch.float16)
        loop.warm_up()

        def without_step() -> None:
            loop.optimizer.zero_grad(set_to_none=True)
            backward(loop.loss(), loop.optimizer)

        capture(without_step).replay()
        with pytest.raises(UsageError, match=r"Capture optimizer\.step\(\) as well"):
            loop.optimizer.step()
        loop.step()

    def test_capturing_an_optimizer_that_cannot_skip_raises(self, device):
        loop = Loop(WITHOUT_SKIPPING[device], device, half_dtype=torch.float16)
        loop.warm_up()
        with pytest.raises(UsageError, match=r"while a CUDA graph is captured\. Use an optimizer with fused=True"):
            capture(loop.step)


def graph_it(model: nn.Module, *shapes: tuple[int, ...], device: str, **options: Any) -> Any:
    """Graphs a model as users do: with samples in the type in which they call it."""
    samples = tuple(torch.randn(*shape, device=device) for shape in shapes or [(5, 8)])
    return torch.cuda.make_graphed_callables(model, samples, **options)


# Results from before a capture are detached here: their autograd graphs hold nodes of another stream, and a capture
# must not wait for it. The results of torch's own warm-up hold nodes of its stream, of which torch warns afterwards.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
class TestGraphedModels:
    @pytest.mark.filterwarnings("ignore:the loss of a skipped step is nan:UserWarning")
    @EACH_OPTIMIZER
    @EACH_HALF
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
    @pytest.mark.covering(1)
    def test_graphed_models_train_to_the_same_bits(self, level, half, make, device):
        def train(graphed: bool) -> list[Tensor]:
            half_dtype = torch.bfloat16 if level in ("O4", "O5") else half
            loop, found = Loop(make, device, opt_level=level, half_dtype=half_dtype), []
            if graphed:
                assert graph_it(loop.model, device=device) is loop.model
            for index, overflows in enumerate(OVERFLOWS):
                loop.feed(index, overflows)
                loop.step()
                found += [*loop.everything(), loop.model(loop.input).detach().nan_to_num()]
            amp.deinitialize()
            return found

        assert_same_state(train(graphed=True), train(graphed=False))

    @EACH_LEVEL
    def test_graphed_models_run_their_graph_with_updated_weights(self, level, device, monkeypatch):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level=level, half_dtype=torch.bfloat16)
        ran = []
        loop.model[0].register_forward_hook(lambda *_: ran.append("layer"))
        graph_it(loop.model, device=device)
        ran.clear()
        before = loop.model(loop.input).clone()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(2)
        after = loop.model(loop.input)
        assert not ran
        assert not torch.equal(before, after)
        assert before.dtype == after.dtype == (torch.float32 if level == "O2" else torch.bfloat16)

    @EACH_LEVEL
    def test_graphed_models_are_evaluated_without_the_graph(self, level, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level=level, half_dtype=torch.bfloat16)
        loop.feed(0, overflows=False)
        loop.model.eval()
        expected = loop.model(loop.input).detach()
        loop.model.train()
        graph_it(loop.model, device=device)
        loop.model.eval()
        ran = []
        loop.model[0].register_forward_hook(lambda *_: ran.append("layer"))
        assert_same_bits(loop.model(loop.input), expected)
        assert ran

    @EACH_LEVEL
    def test_deinitialize_undoes_graphed_models(self, level, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level=level, half_dtype=torch.float16)
        expected = [parameter.detach().clone() for parameter in amp.master_params(loop.optimizer)]
        graph_it(loop.model, device=device)
        amp.deinitialize()
        assert "forward" not in vars(loop.model)
        assert not loop.model._forward_hooks
        assert not loop.model._forward_pre_hooks
        assert_same_state(list(loop.model.parameters()), expected)
        assert loop.model(loop.input).dtype == torch.float32

    @EACH_LEVEL
    def test_graphed_models_pass_gradients_to_their_inputs(self, level, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level=level, half_dtype=torch.bfloat16)
        x = torch.randn(5, 8, device=device, requires_grad=True)
        loop.model(x).float().sum().backward()
        wanted, x.grad = x.grad, None
        torch.cuda.make_graphed_callables(loop.model, sample_args=(torch.randn_like(x).requires_grad_(),))
        loop.model(x).float().sum().backward()
        assert_same_bits(x.grad, wanted)

    @EACH_LEVEL
    def test_a_model_and_a_part_of_it_are_graphed_at_once(self, level, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level=level, half_dtype=torch.bfloat16)
        half = torch.bfloat16 if level == "O2" else torch.float32
        samples = ((torch.randn(5, 8, device=device),), (torch.randn(5, 8, device=device, dtype=half),))
        loop.feed(0, overflows=False)
        expected = [loop.model(loop.input).detach(), loop.model[0](loop.input.to(half)).detach()]
        model, layer = torch.cuda.make_graphed_callables((loop.model, loop.model[0]), samples)
        assert (model, layer) == (loop.model, loop.model[0])
        assert_same_state([model(loop.input), layer(loop.input.to(half))], expected)
        amp.deinitialize()
        assert not any("forward" in vars(module) for module in loop.model.modules())

    def test_parts_that_stay_float32_are_cast_in_a_graphed_model(self, device):
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(device)
        amp.initialize(model, opt_level="O2", half_dtype=torch.bfloat16, verbosity=0)
        x = torch.randn(5, 8, device=device)
        expected = model(x).detach()
        graph_it(model, device=device)
        assert_same_bits(model(x), expected)

    def test_graphing_a_model_with_hooks_raises_and_changes_nothing(self, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O2", half_dtype=torch.bfloat16)
        handle = loop.model.register_forward_hook(lambda *_: None)
        before = dict(loop.model._forward_hooks), dict(loop.model._forward_pre_hooks)
        with pytest.raises(AssertionError, match="must not have hooks registered"):
            graph_it(loop.model, device=device)
        assert (dict(loop.model._forward_hooks), dict(loop.model._forward_pre_hooks)) == before
        handle.remove()
        assert loop.model(loop.input).dtype == torch.float32

    @EACH_LEVEL
    @pytest.mark.parametrize("is_part", [False, True], ids=["model", "part"])
    def test_models_graphed_before_initialize_raise(self, level, is_part, device):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device)
        graph_it(model[0] if is_part else model, device=device)
        with pytest.raises(OptionError, match=r"Call amp\.initialize first, and torch\.cuda\.make_graphed_callables"):
            amp.initialize(model, opt_level=level, half_dtype=torch.bfloat16, verbosity=0)
        assert not model._forward_hooks

    def test_graphed_models_may_be_initialized_again(self, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O1", half_dtype=torch.bfloat16)
        graph_it(loop.model, device=device)
        options = {"loss_scale": "dynamic", "init_scale": SCALE, "scale_window": 3, "verbosity": 0}
        amp.initialize(
            loop.model, torch.optim.SGD(loop.model.parameters(), lr=0.1), half_dtype=torch.bfloat16, **options
        )
        assert "forward" in vars(loop.model)

    def test_make_graphed_callables_after_deinitialize_is_torchs(self, device):
        model = nn.Linear(8, 8).to(device)
        amp.initialize(nn.Linear(2, 2), verbosity=0, half_dtype=torch.bfloat16)
        make_graphed = torch.cuda.make_graphed_callables
        amp.deinitialize()
        make_graphed(model, (torch.randn(5, 8, device=device),))
        assert model(torch.randn(5, 8, device=device)).dtype == torch.float32

    def test_make_graphed_callables_drops_kept_casts(self, device):
        """Their autograd graphs belong to this stream, and a capture must not wait for it."""
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O1", half_dtype=torch.bfloat16)
        loop.loss().backward()
        assert len(runtime.live.cache) > 0
        sizes: list[int] = []

        def function(x: Tensor) -> Tensor:
            sizes.append(len(runtime.live.cache))
            return x * 2

        torch.cuda.make_graphed_callables(function, (torch.randn(5, 8, device=device, requires_grad=True),))
        assert sizes[0] == 0
        graph_it(loop.model, device=device)


class TestBeforeACapture:
    @EACH_CAPTURE
    def test_a_capture_drops_kept_casts(self, device, capture):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O1", half_dtype=torch.bfloat16)
        loop.warm_up()
        loop.model(loop.input)
        assert len(runtime.live.cache) > 0
        sizes: list[int] = []
        capture(lambda: sizes.append(len(runtime.live.cache)) or loop.input.zero_())  # torch warns of an empty graph
        assert sizes == [0]

    @pytest.mark.parametrize("written", ["weight", "weight.data", "master"])
    def test_weights_written_before_a_capture_reach_masters_and_the_reverse(self, written, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O2", half_dtype=torch.bfloat16)
        loop.warm_up()
        weight, master = loop.model[0].weight, next(iter(amp.master_params(loop.optimizer)))
        with torch.no_grad():
            {"weight": weight, "weight.data": weight.data, "master": master}[written].fill_(2)
        graph = capture(loop.step)
        loop.feed(0, overflows=False)
        graph.replay()
        assert (next(iter(amp.master_params(loop.optimizer))) - 2).abs().max() < 1
        assert_same_bits(weight, master.bfloat16())

    @EACH_CAPTURE
    def test_masters_written_through_views_before_a_capture_count(self, device, capture):
        """Which reads from the device, and so is not done within the capture."""
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O2", half_dtype=torch.bfloat16)
        loop.warm_up()
        views = [master.data for master in amp.master_params(loop.optimizer)]
        views[0].fill_(2)
        graph = capture(loop.step)
        loop.feed(0, overflows=False)
        graph.replay()
        assert (views[0] - 2).abs().max() < 1
        assert_same_bits(loop.model[0].weight, views[0].bfloat16())

    def test_a_capture_before_the_first_step_raises(self, device):
        loop = Loop(OPTIMIZERS["SGD"], device, opt_level="O1", half_dtype=torch.float16, loss_scale=128.0)
        if device == "cpu":  # where the scale begins
            runtime.live.losses.scalers[0].to(torch.device("meta"))
        with pytest.raises(UsageError, match="Run one whole step before the capture"):
            capture(loop.step)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has amp take what follows for a capture, from the moment that this is called."""

    def begin() -> None:
        for module in (missing_scale, optimizer_step, step_outcomes, weight_cache):
            monkeypatch.setattr(module, "is_capturing", lambda: True)

    return begin


@pytest.mark.usefixtures("far_away")
class TestUnderCapture:
    """On any device, of steps that amp takes for captured ones."""

    @pytest.mark.parametrize("overflows", [False, True])
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @EACH_LEVEL
    def test_a_captured_step_sends_nothing_to_the_host(self, level, make, overflows, capturing, monkeypatch):
        def sends(*_: object) -> None:
            pytest.fail("a value was sent to the host")

        loop = Loop(make, "cpu", opt_level=level, half_dtype=torch.float16)
        loop.step()  # after which the optimizer has its state
        loop.feed(0, overflows)
        capturing()
        monkeypatch.setattr(scale_use.ScaleUse, "send", sends)
        monkeypatch.setattr(scale_use.ScaleUse, "overflowed", property(sends))
        loop.step()
        assert amp.get_loss_scale() == (SCALE / 2 if overflows else SCALE)

    def test_a_captured_step_does_not_ask_for_earlier_values(self, capturing, monkeypatch):
        def asks(*_: object) -> bool:
            pytest.fail("it was asked whether a value has arrived")

        loop = Loop(OPTIMIZERS["Adam"], "cpu", half_dtype=torch.float16)
        loop.step()
        loop.step()
        capturing()
        monkeypatch.setattr(scale_use.ScaleUse, "has_arrived", property(asks))
        loop.step()

    def test_a_captured_first_step_that_would_make_state_raises(self, capturing):
        loop = Loop(OPTIMIZERS["Adam"], "cpu", half_dtype=torch.float16)
        capturing()
        with pytest.raises(UsageError, match=r"fused=True .* that has made a step before; or a static loss_scale"):
            loop.step()

    def test_casts_of_weights_of_captured_steps_are_not_kept(self, capturing, monkeypatch):
        loop = Loop(OPTIMIZERS["Adam"], "cpu", half_dtype=torch.bfloat16)
        cache = runtime.live.cache
        loop.model(loop.input)
        assert len(cache) > 0
        loop.step()
        with monkeypatch.context() as context:
            context.setattr(weight_cache, "is_capturing", lambda: True)
            loop.step()
        loop.model(loop.input)
        with torch.no_grad(), amp.frozen_weights(loop.model):
            loop.model(loop.input)
            assert len(cache) == 0

    def test_tensors_of_the_loss_scaler_stay_at_their_addresses(self):
        loop = Loop(OPTIMIZERS["Adam"], "cpu", half_dtype=torch.float16)
        loop.step()
        (scaler,) = runtime.live.losses.scalers
        before = {name: value.data_ptr() for name, value in vars(scaler).items() if isinstance(value, Tensor)}
        assert len(before) == 4
        for index, overflows in enumerate(OVERFLOWS):
            loop.feed(index, overflows)
            loop.step()
        amp.load_state_dict(amp.state_dict())
        after = {name: value.data_ptr() for name, value in vars(scaler).items() if isinstance(value, Tensor)}
        assert after == before


def _on_cpu(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimizer as it is made for the CPU, which captures nothing."""
    assert isinstance(make, functools.partial)
    return functools.partial(
        make.func, **{**make.keywords, "capturable": False} if "capturable" in make.keywords else make.keywords
    )

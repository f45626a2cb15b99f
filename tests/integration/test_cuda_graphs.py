"""Of whole training steps in a CUDA graph: what is replayed is what would have been run, skipped steps included.

What can be told without a GPU is told of any machine: that a step under capture reads nothing back, and that what a
graph would go on writing to stays where it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, dtype_name
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import UsageError
from ampatch.patching import weight_cache
from ampatch.runtime import runtime
from ampatch.scaling import optimizer_step, scale_use

SCALE = 2.0**8

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2, fused=True, capturable=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True, capturable=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9, fused=True),
}
WITHOUT_SKIPPING = functools.partial(torch.optim.Adam, lr=1e-2, capturable=True, foreach=True)


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
        self.optimizer = make(self.model.parameters())
        options = {"loss_scale": "dynamic", "init_scale": SCALE, "scale_window": 3, "verbosity": 0, **options}
        amp.initialize(self.model, self.optimizer, **options)
        self.input = torch.zeros(5, 8, device=device)

    def step(self) -> None:
        """Whole: forward, backward, the check for overflow, and the update or none."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.input).float().square().mean()
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()

    def feed(self, index: int, overflows: bool) -> None:
        batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(index))
        self.input.copy_(batch * math.inf if overflows else batch)

    def warm_up(self) -> None:
        """Two steps on a stream of their own, as torch asks for before a capture; the first makes the state."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(2):
                self.feed(index, overflows=False)
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

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


OVERFLOWS = [False, True, False, False, True, True, False, False, False, False]


@pytest.mark.gpu
class TestAWholeStep:
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_replayed_is_what_it_is_when_it_is_run(self, level, half, make):
        def train(graphed: bool) -> list[list[Tensor]]:
            loop = Loop(make, "cuda", opt_level=level, half_dtype=half)
            loop.warm_up()
            run = capture(loop.step).replay if graphed else loop.step
            moments = []
            for index, overflows in enumerate(OVERFLOWS):
                loop.feed(index, overflows)
                run()
                moments.append(loop.everything())
            amp.deinitialize()
            return moments

        for replayed, plain in zip(train(graphed=True), train(graphed=False), strict=True):
            for found, wanted in zip(replayed, plain, strict=True):
                assert_same_bits(found, wanted)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_that_overflows_changes_nothing_but_the_scale(self, level):
        loop = Loop(OPTIMIZERS["Adam"], "cuda", opt_level=level, half_dtype=torch.float16)
        loop.warm_up()
        graph = capture(loop.step)
        before = loop.everything()
        loop.feed(0, overflows=True)
        graph.replay()
        after = loop.everything()
        for found, wanted in zip(after[:-1], before[:-1], strict=True):
            assert_same_bits(found, wanted)
        assert after[-1] == before[-1] / 2

    def test_with_clipping_is_what_it_is_when_it_is_run(self):
        def clipped_step() -> None:
            loop.optimizer.zero_grad(set_to_none=True)
            loss = loop.model(loop.input).float().square().mean()
            with amp.scale_loss(loss, loop.optimizer, delay_unscale=True) as scaled_loss:
                scaled_loss.backward()
            amp.clip_grad_norm_(loop.optimizer, 0.1)
            loop.optimizer.step()

        results = []
        for graphed in (True, False):
            loop = Loop(OPTIMIZERS["Adam"], "cuda", opt_level="O1", half_dtype=torch.float16)
            loop.warm_up()
            run = capture(clipped_step).replay if graphed else clipped_step
            for index, overflows in enumerate(OVERFLOWS):
                loop.feed(index, overflows)
                run()
            results.append(loop.everything())
            amp.deinitialize()
        for found, wanted in zip(*results, strict=True):
            assert_same_bits(found, wanted)

    def test_under_a_static_scale_needs_no_optimizer_that_skips(self):
        results = []
        for graphed in (True, False):
            loop = Loop(WITHOUT_SKIPPING, "cuda", half_dtype=torch.float16, loss_scale=128.0)
            loop.warm_up()
            run = capture(loop.step).replay if graphed else loop.step
            for index in range(5):
                loop.feed(index, overflows=False)
                run()
            results.append(loop.everything())
            amp.deinitialize()
        for found, wanted in zip(*results, strict=True):
            assert_same_bits(found, wanted)

    def test_goes_on_with_a_scale_that_was_loaded_after_the_capture(self):
        loop = Loop(OPTIMIZERS["Adam"], "cuda", half_dtype=torch.float16)
        loop.warm_up()
        graph = capture(loop.step)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}})
        loop.feed(0, overflows=True)
        graph.replay()
        assert amp.get_loss_scale() == 2.0**9

    def test_is_followed_by_code_that_is_run(self):
        """Whose casts of the weights are of those that the replay has left."""
        loop = Loop(OPTIMIZERS["Adam"], "cuda", half_dtype=torch.float16)
        loop.warm_up()
        graph = capture(loop.step)
        loop.feed(0, overflows=False)
        stale = loop.model(loop.input)
        graph.replay()
        found = loop.model(loop.input)
        amp.clear_cache()
        assert_same_bits(found, loop.model(loop.input))
        assert not torch.equal(found, stale)

    def test_by_an_optimizer_that_cannot_skip_is_refused(self):
        loop = Loop(WITHOUT_SKIPPING, "cuda", half_dtype=torch.float16)
        loop.warm_up()
        with pytest.raises(UsageError, match=r"while a CUDA graph is captured\. Use an optimizer with fused=True"):
            capture(loop.step)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has amp take what follows for a capture, from the moment that this is called."""

    def begin() -> None:
        for module in (optimizer_step, weight_cache):
            monkeypatch.setattr(module, "is_capturing", lambda: True)

    return begin


@pytest.mark.usefixtures("far_away")
class TestUnderCapture:
    """On any device, of steps that amp takes for captured ones."""

    @pytest.mark.parametrize("overflows", [False, True])
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_step_sends_nothing_to_the_host(self, level, make, overflows, capturing, monkeypatch):
        def sends(*_: object) -> None:
            pytest.fail("a value was sent to the host")

        loop = Loop(_on_cpu(make), "cpu", opt_level=level, half_dtype=torch.float16)
        loop.step()  # after which the optimizer has its state
        loop.feed(0, overflows)
        capturing()
        monkeypatch.setattr(scale_use.ScaleUse, "send", sends)
        monkeypatch.setattr(scale_use.ScaleUse, "overflowed", property(sends))
        loop.step()
        assert amp.get_loss_scale() == (SCALE / 2 if overflows else SCALE)

    def test_a_step_does_not_ask_for_what_was_sent_before(self, capturing, monkeypatch):
        def asks(*_: object) -> bool:
            pytest.fail("it was asked whether a value has arrived")

        loop = Loop(_on_cpu(OPTIMIZERS["Adam"]), "cpu", half_dtype=torch.float16)
        loop.step()
        loop.step()
        capturing()
        monkeypatch.setattr(scale_use.ScaleUse, "has_arrived", property(asks))
        loop.step()

    def test_a_first_step_is_refused_where_it_would_make_state(self, capturing):
        loop = Loop(_on_cpu(OPTIMIZERS["Adam"]), "cpu", half_dtype=torch.float16)
        capturing()
        with pytest.raises(UsageError, match=r"fused=True .* that has made a step before; or a static loss_scale"):
            loop.step()

    def test_a_step_of_an_optimizer_that_cannot_skip_is_refused(self, capturing):
        loop = Loop(functools.partial(torch.optim.SGD, lr=0.1), "cpu", half_dtype=torch.float16)
        loop.step()
        capturing()
        with pytest.raises(UsageError, match="while a CUDA graph is captured"):
            loop.step()

    def test_a_step_of_such_an_optimizer_runs_under_a_static_scale(self, capturing):
        loop = Loop(functools.partial(torch.optim.SGD, lr=0.1), "cpu", half_dtype=torch.float16, loss_scale=128.0)
        before = loop.everything()
        loop.feed(0, overflows=False)
        capturing()
        loop.step()
        assert not torch.equal(loop.everything()[0], before[0])

    def test_weights_that_a_step_updates_are_kept_for_a_forward_at_most_from_then_on(self, capturing, monkeypatch):
        loop = Loop(_on_cpu(OPTIMIZERS["Adam"]), "cpu", half_dtype=torch.bfloat16)
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

    def test_what_a_graph_would_write_to_stays_where_it_is(self):
        loop = Loop(_on_cpu(OPTIMIZERS["Adam"]), "cpu", half_dtype=torch.float16)
        loop.step()
        (scaler,) = runtime.live.scalers
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

"""The cache of cast weights: a weight is cast once, casts are never stale, and the cache keeps no weight alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, together
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ampatch import amp
from ampatch.casting import cast_store
from ampatch.patching import weight_cache
from ampatch.patching.weight_cache import WeightCache
from ampatch.runtime import runtime


class Thrice(nn.Module):
    """Uses one weight three times in a forward, or has a function as its forward that may do so."""

    def __init__(self, function: Callable[[Thrice, Tensor], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.function = function

    def thrice(self, value: Tensor) -> Tensor:
        for _ in range(3):
            value = F.linear(value, self.weight)
        return value

    def forward(self, value: Tensor, *args: object) -> object:
        return self.function(self, value, *args) if self.function else self.thrice(value)


def with_and_without_grad(model: Thrice, value: Tensor) -> Tensor:
    value = model.thrice(value)
    with torch.enable_grad():
        return model.thrice(value)


def x(rows: int = 3) -> Tensor:
    return torch.linspace(-1, 1, rows * 4).view(rows, 4)


def adopt(model: nn.Module, half: torch.dtype = torch.bfloat16, **options: object) -> nn.Module:
    return amp.initialize(model, half_dtype=half, verbosity=0, **options)


def cache() -> WeightCache:
    return runtime.live.cache


def casts_of_weights(function: Callable[[], object]) -> int:
    """How often a call casts what is kept in the cache; the call's other casts have to be none."""
    before = amp.cast_counts().casts
    function()
    return amp.cast_counts().casts - before


@pytest.fixture
def model(half) -> Iterator[Thrice]:
    return adopt(Thrice(), half)


def reference(weight: Tensor, value: Tensor, half: torch.dtype) -> Tensor:
    """The model's output without a cache: the weight cast afresh at every use."""
    with amp.disable_casts():
        value = value.to(half)
        for _ in range(3):
            value = F.linear(value, weight.to(half))
        return value


class TestOneCastPerIteration:
    def test_a_weight_that_is_used_three_times_is_cast_once(self, model, half):
        model(x().to(half))
        assert amp.cast_counts() == amp.CastCounts(casts=1, cache_hits=2)
        assert amp.stats()["cached_bytes"] == 4 * 4 * 2

    def test_several_forwards_share_one_cast_until_the_scale_loss_block_ends(self, model, half):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, half_dtype=half, verbosity=0)
        value = x().to(half)
        for _ in range(2):
            assert casts_of_weights(lambda: (model(value), model(value))) == 1
            with amp.scale_loss(model(value).float().sum(), optimizer) as loss:
                loss.backward()
            assert len(cache()) == 0
            optimizer.step()

    def test_each_half_type_has_one_cast(self, model):
        both = [cache().cast(model.weight, dtype) for dtype in HALF_DTYPES]
        assert [cast.dtype for cast in both] == list(HALF_DTYPES)
        assert all(cache().cast(model.weight, cast.dtype) is cast for cast in both)

    def test_tensors_that_are_no_parameters_are_cast_at_every_use(self, model, half):
        value = x().requires_grad_()
        assert casts_of_weights(lambda: (torch.mm(value, value.t()), torch.mm(value, value.t()))) == 4
        assert len(cache()) == 0

    def test_without_caching_every_use_casts(self, half):
        with amp.init(enable_caching=False, half_dtype=half):
            model, value = Thrice(), x().to(half)
            assert casts_of_weights(lambda: model(value)) == 3
            assert len(cache()) == 0
            with amp.frozen_weights(model), torch.no_grad():
                assert casts_of_weights(lambda: model(value)) == 3

    def test_a_block_that_raised_leaves_no_casts(self):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters())
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0)
        with contextlib.suppress(KeyError), amp.scale_loss(model(x().half()).sum(), optimizer):
            model(x().half())
            raise KeyError
        assert casts_of_weights(lambda: model(x().half())) == 2  # weight and bias, anew


def with_fake_inputs(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x()))


class TestTransforms:
    @pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")  # torch's own use of it
    @pytest.mark.parametrize(
        "run",
        [
            pytest.param(lambda model: torch.func.grad(lambda value: model(value).float().sum())(x()), id="grad"),
            pytest.param(lambda model: torch.func.jvp(model, (x(),), (x(),)), id="jvp"),
            pytest.param(with_fake_inputs, id="fake"),
        ],
    )
    def test_casts_that_a_transform_wraps_or_a_mode_fakes_are_not_kept(self, model, half, run):
        run(model)
        assert len(cache()) == 0
        assert torch.equal(model(x()), reference(model.weight, x(), half))


class TestGradients:
    def test_gradients_of_every_use_accumulate_in_the_parameter_once(self, model, half):
        """The hooks of DistributedDataParallel expect one accumulation."""
        fired = []
        model.weight.register_post_accumulate_grad_hook(fired.append)
        model(x()).float().pow(2).sum().backward()
        weight = model.weight.detach().clone().requires_grad_()
        reference(weight, x(), half).float().pow(2).sum().backward()
        torch.testing.assert_close(model.weight.grad, weight.grad, rtol=2e-2, atol=2e-2)
        assert len(fired) == 1

    def test_gradients_of_several_backward_passes_through_one_cast_add_up(self, model):
        first, second = model(x()).float().sum(), model(x()).float().sum()
        first.backward(retain_graph=True)
        once = model.weight.grad.clone()
        first.backward()
        second.backward()
        model(x()).float().sum().backward()
        assert torch.equal(model.weight.grad, 4 * once)

    @pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
    def test_gradients_after_an_evaluation_are_those_before_it(self, model, without_grad):
        model(x()).float().sum().backward()
        once = model.weight.grad.clone()
        amp.clear_cache()
        model.weight.grad = None
        model.eval()
        with without_grad():
            model(x())
        model.train()
        model(x()).float().sum().backward()
        assert torch.equal(model.weight.grad, once)

    def test_casts_made_under_enable_grad_in_inference_mode_are_not_used_with_grad(self, half):
        model = adopt(Thrice(with_and_without_grad), half)
        with torch.inference_mode():
            model(x())
        model(x()).float().sum().backward()
        assert model.weight.grad.abs().sum() > 0

    def test_a_part_with_grad_in_a_forward_without_has_gradients(self, half):
        model = adopt(Thrice(with_and_without_grad), half)
        with torch.no_grad():
            result = model(x())
        result.float().sum().backward()
        assert model.weight.grad.abs().sum() > 0

    def test_casts_follow_requires_grad_of_the_weight(self, model):
        model.weight.requires_grad_(False)
        assert not model(x()).requires_grad
        model.weight.requires_grad_(True)
        model(x()).float().sum().backward()
        assert model.weight.grad is not None
        model.weight.requires_grad_(False)
        assert not model(x()).requires_grad


def add_without_grad(model: Thrice) -> None:
    with torch.no_grad():
        model.weight.add_(1)


def swap_data(model: Thrice) -> None:
    model.weight.data = model.weight.data + 1


def swap_for_another_storage_at_the_same_address(model: Thrice) -> None:
    memory = bytearray(64)
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)
    torch.mm(x(), model.weight)
    memory[:] = bytes(torch.full((16,), 2.0).untyped_storage())
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)


def transpose(model: Thrice) -> None:
    model.weight.data = model.weight.data.t()


def shear(model: Thrice) -> None:
    model.weight.data = model.weight.data.as_strided((4, 4), (2, 1))


def move_within_a_storage(model: Thrice) -> None:
    flat = torch.arange(32.0)
    model.weight.data = flat[:16].view(4, 4)
    torch.mm(x(), model.weight)
    model.weight.data = flat[16:].view(4, 4)


def step(model: Thrice, *, fused: bool = False) -> None:
    model.weight.grad = torch.ones_like(model.weight)
    with warnings.catch_warnings():  # of an optimizer that amp was not handed
        warnings.simplefilter("ignore", amp.AmpWarning)
        torch.optim.SGD(model.parameters(), lr=1.0, fused=fused).step()


def step_fused(model: Thrice) -> None:
    step(model, fused=True)


def step_adopted(model: Thrice) -> None:
    _, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), verbosity=0)
    model.weight.grad = torch.ones_like(model.weight)
    with warnings.catch_warnings():  # of a step without a block, which would drop the casts before the step does
        warnings.simplefilter("ignore", amp.AmpWarning)
        optimizer.step()


def assign(model: Thrice) -> None:
    model.weight = nn.Parameter(model.weight.detach() + 1)


CHANGES = (
    add_without_grad,
    swap_data,
    swap_for_another_storage_at_the_same_address,
    transpose,
    shear,
    move_within_a_storage,
    step,
    step_fused,
    step_adopted,
    assign,
)


class TestNeverStale:
    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    @pytest.mark.covering(1)
    def test_a_weight_that_changed_between_two_forwards_is_cast_anew(self, model, half, change):
        model(x())
        change(model)
        assert torch.equal(model(x()), reference(model.weight, x(), half))

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    def test_a_weight_that_changed_in_a_forward_without_grad_is_cast_anew(self, change):
        half = torch.bfloat16
        model = adopt(Thrice(lambda model, value: (model.thrice(value), change(model), model.thrice(value))), half)
        weight = model.weight.detach().clone()
        with torch.no_grad():
            before, _, after = model(x())
            assert torch.equal(before, reference(weight, x(), half))
            assert torch.equal(after, reference(model.weight, x(), half))

    def test_clear_cache_makes_a_change_through_data_seen(self, model, half):
        model(x())
        model.weight.data.add_(1)
        amp.clear_cache()
        assert len(cache()) == 0
        assert torch.equal(model(x()), reference(model.weight, x(), half))

    def test_the_next_forward_without_grad_sees_a_change_through_data(self, model, half):
        with torch.no_grad():
            model(x())
            model.weight.data.add_(1)
            assert torch.equal(model(x()), reference(model.weight, x(), half))

    def test_data_that_became_an_inference_tensor_is_cast_anew(self, model, half):
        model(x())
        with torch.inference_mode():
            model.weight.data = model.weight.data + 1
        with torch.no_grad():
            assert torch.equal(model(x()), reference(model.weight, x(), half))

    @pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
    def test_a_write_to_a_view_of_the_cast_makes_a_new_cast(self, without_grad):
        def write(model: Thrice, value: Tensor) -> Tensor:
            torch.transpose(model.weight, 0, 1).zero_()
            return model.thrice(value)

        model = adopt(Thrice(write), cast_lists={"whitelist": {"torch": ["transpose"]}})
        with without_grad():
            assert torch.equal(model(x()), reference(model.weight, x(), torch.bfloat16))


class TestForwardStore:
    @pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
    def test_casts_without_grad_are_kept_during_the_forward_only(self, model, half, without_grad):
        value = x().to(half)
        with without_grad():
            assert casts_of_weights(lambda: model(value)) == 1
            assert len(cache()) == 0
            assert casts_of_weights(lambda: model(value)) == 1

    def test_casts_without_grad_are_not_kept_outside_of_adopted_models(self, model, half):
        with torch.no_grad():
            assert casts_of_weights(lambda: [F.linear(x().to(half), model.weight) for _ in range(2)]) == 2
        assert len(cache()) == 0

    def test_casts_without_grad_are_kept_for_the_outermost_adopted_model(self, half):
        inner = adopt(Thrice(), half)
        outer = adopt(nn.Sequential(inner, inner), half)
        value = x().to(half)
        with torch.no_grad():
            assert casts_of_weights(lambda: outer(value)) == 1
            assert casts_of_weights(lambda: inner(value)) == 1
        assert len(cache()) == 0

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_a_forward_that_raised_leaves_no_casts(self, model, half, error):
        model.register_forward_hook(Mock(side_effect=[error, None]))
        with torch.no_grad():
            with pytest.raises(error):
                model(x())
            model.weight.data.add_(1)  # which only a fresh store is sure to see
            assert torch.equal(model(x()), reference(model.weight, x(), half))
        assert len(cache()) == 0

    def test_no_casts_are_kept_after_a_forward_that_raised_by_itself(self, half):
        def fail(model: Thrice, value: Tensor) -> None:
            model.thrice(value)
            raise KeyError

        model, value = adopt(Thrice(fail), half), x().to(half)
        with torch.no_grad():
            with pytest.raises(KeyError):
                model(value)
            assert casts_of_weights(lambda: [F.linear(value, model.weight) for _ in range(2)]) == 2

    def test_threads_share_no_casts_of_forwards_without_grad(self, half):
        def wait(model: Thrice, value: Tensor) -> None:
            model.thrice(value)
            inside.set()
            leave.wait(60)

        inside, leave = threading.Event(), threading.Event()
        model, value = adopt(Thrice(wait), half), x().to(half)
        thread = threading.Thread(target=torch.no_grad()(model), args=[value])
        thread.start()
        inside.wait(60)
        with torch.no_grad():
            assert casts_of_weights(lambda: [F.linear(value, model.weight) for _ in range(2)]) == 2
        assert len(cache()) == 0
        leave.set()
        thread.join()

    def test_a_model_may_call_itself_without_grad(self, half):
        def again(model: Thrice, value: Tensor, depth: int = 2) -> Tensor:
            return model(model.thrice(value), depth - 1) if depth else value

        model = adopt(Thrice(again), half)
        with torch.no_grad():
            assert torch.equal(model(x()), reference(model.weight, reference(model.weight, x(), half), half))
        assert len(cache()) == 0


class ThroughData(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1)


class OwnOptimizer:
    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    step = ThroughData.step

    def zero_grad(self) -> None: ...


class TestFrozenStore:
    """Of `WeightCache.frozen`; what the public block does stands in tests/integration/test_inference.py."""

    @pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
    def frozen(self, request) -> Callable[[nn.Module], contextlib.AbstractContextManager[None]]:
        """A block for a model's weights, in which no gradients are recorded either."""

        @contextlib.contextmanager
        def block(model: nn.Module) -> Iterator[None]:
            with cache().frozen(model.parameters()), request.param():
                yield

        return block

    def test_a_frozen_block_keeps_no_casts_of_other_weights(self, frozen, model, half):
        other = adopt(Thrice(), half)
        value = x().to(half)
        with frozen(model):
            assert casts_of_weights(lambda: [other(value) for _ in range(2)]) == 2
            assert len(cache()) == 0

    def test_casts_of_a_frozen_block_are_not_used_with_grad(self, frozen, model, half):
        with frozen(model):
            model(x())
            with torch.inference_mode(False), torch.enable_grad():
                model(x()).float().sum().backward()
        assert model.weight.grad.abs().sum() > 0

    def test_casts_made_with_grad_are_not_used_in_a_frozen_block(self, frozen, model, half):
        recorded = cache().cast(model.weight, half)
        with frozen(model):
            cast = cache().cast(model.weight, half)
        assert cast is not recorded
        assert cast.grad_fn is None

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    @pytest.mark.covering(1)
    def test_frozen_weights_that_changed_are_cast_anew(self, frozen, model, half, change):
        with frozen(model):
            model(x())
            with torch.inference_mode(False), torch.no_grad():
                change(model)
            assert torch.equal(model(x()), reference(model.weight, x(), half))

    def test_clear_cache_makes_a_change_through_data_seen_in_a_frozen_block(self, frozen, model, half):
        with frozen(model):
            model(x())
            model.weight.data.add_(1)
            amp.clear_cache()
            assert len(cache()) == 0
            assert torch.equal(model(x()), reference(model.weight, x(), half))

    @pytest.mark.parametrize(
        ("kind", "adopted"),
        [(ThroughData, True), (ThroughData, False), (OwnOptimizer, True)],
        ids=["adopted", "not-adopted", "not of torch"],
    )
    def test_the_step_of_an_optimizer_that_writes_through_data_is_seen(self, frozen, model, half, kind, adopted):
        optimizer = kind(model.parameters())
        if adopted:
            amp.initialize(model, optimizer, half_dtype=half, verbosity=0)
        with frozen(model):
            model(x())
            optimizer.step()
            assert torch.equal(model(x()), reference(model.weight, x(), half))

    @pytest.mark.covering(1)
    def test_frozen_weights_are_not_cast_anew_after_steps_of_another_model(self, frozen, model, half):
        """As where a network learns from another one that stays as it is."""
        student = Thrice()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        amp.initialize(student, optimizer, half_dtype=half, verbosity=0)
        value = x().to(half)
        with frozen(model):
            model(value)
            with torch.inference_mode(False), torch.enable_grad():
                with amp.scale_loss(student(x()).float().sum(), optimizer) as loss:
                    loss.backward()
                optimizer.step()
            del student
            gc.collect()
            assert casts_of_weights(lambda: model(value)) == 0

    def test_a_frozen_block_leaves_casts_of_the_iteration_alone(self, frozen, model, half):
        value = x().to(half)
        model(value)
        with frozen(model):
            model(value)
        assert casts_of_weights(lambda: model(value)) == 0

    def test_a_frozen_block_that_raises_drops_its_casts(self, frozen, model, half):
        value = x().to(half)
        with contextlib.suppress(ValueError), frozen(model):
            model(value)
            raise ValueError
        with torch.no_grad():
            assert casts_of_weights(lambda: [model(value) for _ in range(2)]) == 2

    def test_threads_share_the_casts_of_a_frozen_block(self, frozen, model, half):
        value = x().to(half)
        with frozen(model):
            model(value)
            thread = threading.Thread(target=torch.no_grad()(model), args=[value])
            assert casts_of_weights(lambda: (thread.start(), thread.join())) == 0

    def test_a_thread_that_outlives_a_frozen_block_keeps_no_casts(self, frozen, half):
        def wait(model: Thrice, value: Tensor) -> None:
            inside.set()
            leave.wait(60)
            results.append(model.thrice(value))

        inside, leave, results = threading.Event(), threading.Event(), []
        model = adopt(Thrice(wait), half)
        thread = threading.Thread(target=torch.no_grad()(model), args=[x()])
        with frozen(model):
            thread.start()
            inside.wait(60)
        leave.set()
        thread.join()
        assert len(cache()) == 0
        assert torch.equal(results[0], reference(model.weight, x(), half))

    @pytest.mark.covering(1)
    def test_a_frozen_block_keeps_casts_of_many_weights(self, frozen, half):
        model = adopt(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(WeightCache._SWEEP_FROM + 50)]), half)
        value = x().to(half)
        with frozen(model):
            assert casts_of_weights(lambda: [model(value) for _ in range(3)]) == len(model)

    def test_a_frozen_block_keeps_no_weights_alive(self, half):
        model = adopt(Thrice(), half)
        died = weakref.ref(model.weight)
        with torch.no_grad(), cache().frozen(model.parameters()):
            model(x())
            del model
            gc.collect()
            assert died() is None

    def test_a_tracer_records_casts_in_a_frozen_block(self, frozen, model, half):
        with frozen(model):
            model(x())
            with torch.inference_mode(False), torch.no_grad():
                graph = make_fx(model)(x())
                add_without_grad(model)
            assert torch.equal(graph(x()), reference(model.weight, x(), half))

    def test_deinitialize_drops_casts_of_a_frozen_block(self, frozen, model, half):
        kept = cache()
        with frozen(model):
            model(x())
            amp.deinitialize()
            assert len(kept) == 0
            assert model(x()).dtype is torch.float32
        assert len(kept) == 0


class TestNothingGrows:
    def test_models_that_come_and_go_are_freed(self):
        adopt(nn.Module())
        weights = []
        for _ in range(1000):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model(x())
            weights.append(weakref.ref(model[0].weight))
        del model
        gc.collect()
        assert len(cache()) <= WeightCache._SWEEP_FROM
        assert sum(weight() is not None for weight in weights) <= WeightCache._SWEEP_FROM
        assert weights[0]() is None

    @pytest.mark.slow
    def test_the_package_may_be_imported_in_inference_mode_with_another_default_type(self, fresh):
        code = "import torch\nwith torch.inference_mode():\n    torch.set_default_dtype(torch.bfloat16)\n"
        code += "    from ampatch.patching import weight_cache\nprint(weight_cache._REFERENCES_OF_ABANDONED)"
        assert int(fresh.run(code).stdout) == weight_cache._REFERENCES_OF_ABANDONED

    def test_a_sweep_keeps_casts_of_weights_in_use(self):
        """Entries that are still of use survive a sweep, or at least are cast again."""
        adopt(nn.Module())
        layers = [nn.Linear(4, 4, bias=False) for _ in range(WeightCache._SWEEP_FROM + 50)]
        for _ in range(2):
            for layer in layers:
                layer(x())
        assert len(cache()) == len(layers)
        assert amp.cast_counts().cache_hits == len(layers)

    @pytest.mark.parametrize("without", ["grad", "requires_grad"])
    def test_a_sweep_keeps_casts_without_a_graph(self, without):
        """A cast without a graph holds no weight, so that few references do not mean that nobody needs it."""
        layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(WeightCache._SWEEP_FROM + 50)])
        model = adopt(nn.Sequential(layers, layers))
        layers.requires_grad_(without == "grad")
        with torch.set_grad_enabled(without != "grad"):
            model(x())
        assert amp.cast_counts().cache_hits == len(layers)

    def test_deinitialize_drops_casts_and_weights(self):
        model = adopt(Thrice())
        model(x())
        kept = cache()
        amp.deinitialize()
        assert len(kept) == 0
        died = weakref.ref(model.weight)
        del model
        gc.collect()
        assert died() is None

    def test_threads_may_share_a_store_that_is_swept_and_cleared(self):
        adopt(nn.Module())
        shared = [nn.Parameter(torch.full((4, 4), float(number))) for number in range(20)]

        def run() -> None:
            for number in range(300):
                for weight in (nn.Parameter(torch.full((4, 4), float(number))), shared[number % 20]):
                    assert torch.equal(F.linear(x(), weight), F.linear(x().bfloat16(), weight.bfloat16()))
                if torch.randint(50, ()) == 0:
                    amp.clear_cache()

        together([run] * 4)


class TestStreams:
    """Of a GPU: what one stream made, another may read too early or too late."""

    @pytest.mark.gpu
    def test_cuda_graph_capture_records_the_cast(self):
        model = adopt(Thrice().cuda(), torch.float16)
        value = x().cuda()
        model(value)
        amp.clear_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.graph(graph):
                captured = model(value)
            model.weight.add_(1)
            graph.replay()
            assert torch.equal(captured, reference(model.weight, value, torch.float16))

    @pytest.fixture
    def stream(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of the current stream, in a list to be changed; the CPU stands in for a GPU that has it."""
        current = [0]
        monkeypatch.setattr(cast_store, "_current_stream", lambda _: current[0])
        return current

    def test_each_stream_has_casts_of_its_own(self, stream, select_calls):
        select_calls("python")
        model = adopt(Thrice())
        value = x().to(torch.bfloat16)
        assert casts_of_weights(lambda: model(value)) == 1
        assert casts_of_weights(lambda: model(value)) == 0
        stream[0] = 1
        assert casts_of_weights(lambda: model(value)) == 1
        assert casts_of_weights(lambda: model(value)) == 0

    def test_streams_share_the_casts_of_a_frozen_block(self, stream, select_calls):
        select_calls("python")
        model = adopt(Thrice())
        value = x().to(torch.bfloat16)
        with torch.no_grad(), amp.frozen_weights(model):
            model(value)
            stream[0] = 1
            assert casts_of_weights(lambda: model(value)) == 0

    @pytest.mark.parametrize("kind", ["python", "compiled"])
    def test_a_store_may_disregard_streams(self, stream, kind, request):
        module = cast_store if kind == "python" else request.getfixturevalue("compiled_calls")
        store, weight = module.Store(), nn.Parameter(torch.ones(2))
        cast = weight.to(torch.float16)
        store.keep(weight, cast, True)
        stream[0] = 1
        assert store.find(weight, torch.float16) is cast

    def test_a_captured_graph_drops_the_casts_from_before(self, model, half, monkeypatch, stream):
        # Its graph would hold the node that accumulates the gradient, which belongs to the stream of before.
        model(x())
        assert len(cache()) == 1
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(weight_cache, "is_capturing", lambda: True)
        cache().cast(model.weight, half)
        assert len(cache()) == 0

    @pytest.mark.gpu
    def test_each_stream_of_a_gpu_has_casts_of_its_own(self):
        model = adopt(Thrice().cuda(), torch.float16)
        value, other = x().cuda().half(), torch.cuda.Stream()
        expected = reference(model.weight, value, torch.float16)
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # the cast of this stream comes late
        assert casts_of_weights(lambda: model(value)) == 1
        with torch.cuda.stream(other):
            results = []
            assert casts_of_weights(lambda: results.append(model(value))) == 1
            assert casts_of_weights(lambda: results.append(model(value))) == 0
            other.synchronize()
            assert all(torch.equal(result, expected) for result in results)

    @pytest.mark.gpu
    def test_streams_of_a_gpu_share_the_casts_of_a_frozen_block(self):
        model = adopt(Thrice().cuda(), torch.float16)
        value, other = x().cuda().half(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.no_grad(), amp.frozen_weights(model):
            model(value)
            with torch.cuda.stream(other):
                assert casts_of_weights(lambda: model(value)) == 0
                torch.cuda._sleep(100_000_000)
        assert other.query()

    @pytest.mark.gpu
    def test_a_captured_graph_uses_no_node_of_an_earlier_cast(self):
        model = adopt(Thrice().cuda(), torch.float16)
        value, side = x().cuda(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(value).float().sum().backward()
            model(value)  # its cast outlives this
        torch.cuda.current_stream().wait_stream(side)
        model.weight.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # torch would warn, which is an error here
            model(value).float().sum().backward()
        graph.replay()
        assert model.weight.grad.isfinite().all()


class TestOddParameters:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: nn.Parameter(torch.eye(4).to_sparse()), id="sparse"),
            pytest.param(torch.inference_mode()(lambda: nn.Parameter(torch.eye(4))), id="inference"),
            pytest.param(lambda: type("Sharded", (nn.Parameter,), {})(torch.eye(4)), id="subclass"),
        ],
    )
    def test_casts_of_unusual_parameters_are_not_kept(self, half, make):
        adopt(nn.Module(), half)
        parameter = make()
        for without_grad in (torch.enable_grad, torch.no_grad):
            with without_grad(), cache().frozen([parameter]):
                assert cache().cast(parameter, half).dtype is half
                assert len(cache()) == 0

    def test_empty_parameters_are_cast(self, half):
        adopt(nn.Module(), half)
        empty = nn.Parameter(torch.zeros(0, 4))
        assert F.linear(x(), empty).shape == (3, 0)
        assert F.linear(x(), empty).dtype is half

    def test_a_deep_copy_has_casts_of_its_own(self, model, half):
        model(x())
        copied = copy.deepcopy(model)
        add_without_grad(copied)
        assert torch.equal(copied(x()), reference(copied.weight, x(), half))
        assert torch.equal(model(x()), reference(model.weight, x(), half))

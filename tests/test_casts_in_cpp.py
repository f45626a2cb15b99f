"""Casts that the library of calls makes past torch's dispatcher: that nobody can tell them from those of `Tensor.to`.

Every test makes each cast in both ways, and compares what comes of it. What is cast, and when: test_calls.py.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers import HALF_DTYPES, assert_same_bits, dtype_name, together
from test_calls import Implementation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Cast = Callable[[Tensor], Tensor]

DIRECTIONS = list(itertools.permutations((torch.float32, *HALF_DTYPES), 2))
every_direction = pytest.mark.parametrize(("source", "dtype"), DIRECTIONS)
# What torch does forward-mode derivatives with.
TORCHS_OWN_SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
FEW = 4096  # beyond so many elements torch makes the cast
HALF = torch.float16


# A builtin that gives back its argument: where torch.compile has run, functions in Python are called in Python.
itself = torch.resolve_conj


def in_cpp(dtype: torch.dtype) -> Cast:
    """A patched function that gives back its argument: the cast itself."""
    kind = "blacklist" if dtype is torch.float32 else "whitelist"
    each = Implementation(kind, HALF if dtype is torch.float32 else dtype, itself)
    assert each.is_compiled
    # The first cast of a weight in an iteration is made in Python, which makes the store for the others.
    each.function(nn.Parameter(torch.ones(1, dtype=torch.float32 if dtype is not torch.float32 else HALF)))
    return each.function


@pytest.fixture(autouse=True)
def calls_in_cpp(compiled_calls: ModuleType, select_calls: Callable[[str], None]) -> None:
    select_calls("compiled")


def both(dtype: torch.dtype = HALF) -> tuple[Cast, Cast]:
    """The one in C++, and torch's."""
    return in_cpp(dtype), lambda tensor: tensor.to(dtype)


def traits(tensor: Tensor | None) -> tuple[object, ...] | None:
    """All that can be asked of a tensor."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    told = (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), version)
    graph = (tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn), tensor.is_inference(), tensor._is_view())
    return (*told, *graph, tensor.untyped_storage().nbytes(), tensor.detach().tolist())


def weight(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, max(1, torch.Size(shape).numel())).reshape(shape).requires_grad_()


def assert_alike(made: Callable[[Cast], Any]) -> Any:
    """The same comes of either cast; returns it."""
    found, expected = map(made, both())
    assert found == expected
    return found


# In a process of its own, as a kernel for torch's cast is left with the process.
NOTING_TORCHS_CASTS = """
import torch
from ampatch import amp

model = torch.nn.Linear(64, 64, bias=False)
model, _ = amp.initialize(model, torch.optim.SGD(model.parameters()), half_dtype=torch.float16, verbosity=0)
noted = []

def _to_copy(tensor, *, dtype, **_):
    noted.append(tensor.numel())
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype).copy_(tensor)

library = torch.library.Library("aten", "IMPL")
library.impl("_to_copy", _to_copy, "CPU")
for rows in (1, 64, 65):
    noted.clear()
    amp.clear_cache()
    result = torch.matmul(torch.ones(rows, 64, requires_grad=True), model.weight)
    result.backward(torch.ones_like(result))
    print(result.dtype, noted)
"""


def test_a_few_elements_are_cast_past_the_dispatcher_there_and_back_and_more_by_torch(compiled_calls):
    environment = {**os.environ, "AMPATCH_CALLS": "compiled"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NOTING_TORCHS_CASTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [*["torch.float16 []"] * 2, f"torch.float16 {[65 * 64] * 2}"]


class TestValues:
    @pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4096, 4097])
    @every_direction
    def test_are_torchs_whatever_the_bits(self, source, dtype, count):
        cast, torchs = both(dtype)
        words = torch.int32 if source is torch.float32 else torch.int16
        generator = torch.Generator().manual_seed(count)
        for _ in range(3):
            tensor = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(words).view(source)
            self.assert_same(cast(tensor), torchs(tensor), tensor)

    @pytest.mark.parametrize(("source", "dtype"), [each for each in DIRECTIONS if each[0] in HALF_DTYPES])
    def test_every_half_number_there_is(self, source, dtype):
        cast, torchs = both(dtype)
        for tensor in torch.arange(-(2**15), 2**15).to(torch.int16).view(source).split(FEW):
            self.assert_same(cast(tensor), torchs(tensor), tensor)

    @pytest.mark.parametrize("count", [3, 16], ids=["one-by-one", "in-a-vector"])
    @pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
    def test_what_lies_at_the_borders_of_a_half_type(self, dtype, count):
        cast, torchs = both(dtype)
        limits = torch.finfo(dtype)
        step = limits.eps
        numbers = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), limits.max, limits.max * (1 + step / 4)]
        numbers += [limits.max * (1 + step / 2), limits.tiny, limits.smallest_normal / 3, limits.tiny * step / 2]
        numbers += [1 + step / 2, 1 + step * 3 / 2, 1 + step / 2 + 2**-20, -1 - step / 2, 1e-45, -1e-45, 3.4e38]
        for number in numbers:
            tensor = torch.full((count,), number)
            self.assert_same(cast(tensor), torchs(tensor), tensor)

    def assert_same(self, found: Tensor, expected: Tensor, tensor: Tensor) -> None:
        is_nan = tensor.isnan()
        assert_same_bits(found[~is_nan], expected[~is_nan])
        assert found.shape == expected.shape
        assert found[is_nan].isnan().all()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: torch.tensor(1.5),
    "rows": lambda: weight(3, 4).detach(),
    "transposed": lambda: weight(4, 3).detach().t(),
    "channels last": lambda: weight(2, 3, 4, 5).detach().contiguous(memory_format=torch.channels_last),
    "permuted": lambda: weight(2, 3, 4).detach().permute(2, 0, 1),
    "a part": lambda: weight(12).detach()[3:7],
    "every other": lambda: weight(12).detach()[::2],
    "columns": lambda: weight(3, 4).detach()[:, 1:3],
    "expanded": lambda: weight(4, 1).detach().expand(4, 3),
    "a number expanded": lambda: weight(1).detach().expand(3, 2),
    "odd strides of ones": lambda: weight(12).detach().as_strided((1, 4, 1, 3), (77, 3, 99, 1)),
    "odd strides of ones, transposed": lambda: weight(12).detach().as_strided((1, 4, 1, 3), (77, 1, 99, 4)),
    "nothing": lambda: torch.empty_strided((0, 3, 2), (1, 7, 9)),
    "nothing inside": lambda: torch.empty_strided((3, 0, 2), (1, 7, 9)),
    "overlapping": lambda: weight(6).detach().as_strided((3, 3), (1, 1)),
    "copied lazily": lambda: torch._lazy_clone(weight(5).detach()),
    "negated lazily": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "all zeros": lambda: torch._efficientzerotensor(3),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    def test_a_cast_lies_as_torchs_does(self, layout, requires_grad):
        assert_alike(lambda cast: traits(cast(LAYOUTS[layout]().requires_grad_(requires_grad))))

    def test_so_does_its_gradient_whatever_comes_back(self, layout, requires_grad):
        def gradients(cast: Cast) -> list[object]:
            found = []
            for given in LAYOUTS.values():
                tensor = LAYOUTS[layout]().requires_grad_()
                backward = given().to(HALF) if requires_grad else given().half().float().to(HALF)
                if backward.shape == tensor.shape:
                    cast(tensor).backward(backward)
                    found.append(traits(tensor.grad))
            return found

        assert assert_alike(gradients)


def test_a_tensor_copied_lazily_is_read_and_not_copied():
    tensor = torch.ones(5)
    lazy = torch._lazy_clone(tensor)
    result = in_cpp(HALF)(lazy)
    assert torch._C._is_cow_tensor(lazy)
    result.add_(1)
    assert tensor.tolist() == lazy.tolist() == [1] * 5


@pytest.mark.parametrize("start", [0, 4], ids=["all", "a part"])
def test_memory_that_was_given_back_is_an_error_and_no_crash(start):
    cast, torchs = both()
    tensor = torch.ones(8)
    view = tensor[start:]
    tensor.untyped_storage().resize_(0)

    def is_refused() -> None:
        for each in (torchs, cast):
            with pytest.raises(RuntimeError, match="not allocated"):
                each(view)

    process = multiprocessing.get_context("fork").Process(target=is_refused)  # which may crash
    process.start()
    process.join()
    assert process.exitcode == 0


class TestGraph:
    def test_a_node_is_torchs(self):
        def node(cast: Cast) -> tuple[object, ...]:
            tensor = weight(3)
            made = cast(tensor).grad_fn
            edge = torch.autograd.graph.get_gradient_edge(cast(tensor))
            ((leaf, _),) = made.next_functions
            is_node = isinstance(made, torch.autograd.graph.Node)
            return (
                type(made),
                made.name(),
                is_node,
                dir(made),
                leaf.variable is tensor,
                edge.output_nr,
                edge.node.name(),
            )

        assert_alike(node)
        assert type(in_cpp(HALF)(weight(3)).grad_fn).__name__ == "ToCopyBackward0"

    @pytest.mark.parametrize("make", [weight, lambda count: nn.Parameter(weight(count))], ids=["tensor", "weight"])
    def test_hooks_are_called_with_the_same_in_the_same_order(self, make):
        def called(cast: Cast) -> list[object]:
            tensor, found = make(3), []
            tensor.register_hook(lambda grad: found.append(("tensor", traits(grad))))
            tensor.register_post_accumulate_grad_hook(lambda each: found.append(("after", traits(each.grad))))
            result = cast(tensor)
            result.register_hook(lambda grad: grad * 2)
            result.retain_grad()
            result.grad_fn.register_prehook(lambda grads: found.append(("before node", *map(traits, grads))))
            result.grad_fn.register_hook(lambda made, given: found.append(("node", *map(traits, (*made, *given)))))
            result.backward(weight(3).detach().half())
            return [*found, traits(result.grad), traits(tensor.grad)]

        assert len(assert_alike(called)) == 6

    def test_a_graph_may_be_gone_through_again(self):
        def twice(cast: Cast) -> list[object]:
            tensor = weight(3)
            result = cast(tensor)
            loss = (result * result).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            return traits(tensor.grad)

        assert_alike(twice)

    def test_gradients_have_gradients(self):
        def second(cast: Cast) -> list[object]:
            tensor, given = weight(3), torch.ones(3, dtype=HALF, requires_grad=True)
            (grad,) = torch.autograd.grad((cast(tensor) ** 3).sum(), tensor, create_graph=True)
            (again,) = torch.autograd.grad(grad.sum(), tensor)
            (linear,) = torch.autograd.grad(cast(tensor), tensor, given, create_graph=True)
            (back,) = torch.autograd.grad(linear.sum(), given)
            return [*map(traits, (grad, again, linear, back))]

        assert_alike(second)

    def test_of_several_uses_they_are_added_up(self):
        def added(cast: Cast) -> object:
            tensor = weight(3)
            for _ in range(2):
                (cast(tensor).sum() + cast(tensor).square().sum()).backward()
            return traits(tensor.grad)

        assert_alike(added)

    def test_a_view_that_was_written_to_through_its_base(self):
        def written(cast: Cast) -> object:
            tensor = weight(6)
            base = tensor * 1
            view = base[2:4]
            base.mul_(3)
            cast(view).sum().backward()
            return traits(tensor.grad)

        assert_alike(written)

    def test_writes_to_a_cast_are_counted(self):
        def written(cast: Cast) -> list[object]:
            tensor = weight(3)
            result = cast(tensor)
            loss = (result * result).sum()
            result.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            result.sum().backward()
            return [traits(result), traits(tensor.grad)]

        assert_alike(written)

    def test_gradients_that_are_none_of_another_type_and_of_another_device(self):
        class Odd(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor, gradient):
                ctx.set_materialize_grads(False)
                ctx.gradient = gradient
                return tensor.clone()

            @staticmethod
            def backward(ctx, grad):
                return ctx.gradient, None

        def odd(cast: Cast) -> list[object]:
            found = []
            for gradient in (None, torch.ones(3), torch.ones(3).double()):
                tensor = weight(3)
                result = Odd.apply(cast(tensor), gradient)
                found.append(traits(torch.autograd.grad(result.sum(), tensor, allow_unused=True)[0]))
            with pytest.raises(RuntimeError, match="expected device cpu but got meta"):
                torch.autograd.grad(cast(tensor), tensor, torch.ones(3, dtype=HALF, device="meta"))
            return found

        assert_alike(odd)

    def test_a_gradient_type_of_ones_own(self):
        def gradient(cast: Cast) -> object:
            tensor = weight(3)
            tensor.grad_dtype = HALF
            cast(tensor).sum().backward()
            return traits(tensor.grad)

        assert_alike(gradient)

    @pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:Error detected:UserWarning")
    def test_anomaly_mode_names_it_and_knows_where_it_was_made(self):
        def anomaly(cast: Cast) -> tuple[object, ...]:
            with torch.autograd.detect_anomaly():
                result = cast(weight(3))
                with pytest.raises(RuntimeError) as raised:
                    result.backward(torch.tensor([1, float("nan"), 2]).half())
            return (
                str(raised.value),
                [*result.grad_fn.metadata],
                "in anomaly" in "".join(result.grad_fn.metadata["traceback_"]),
            )

        assert "ToCopyBackward0" in assert_alike(anomaly)[0]


@contextlib.contextmanager
def tensors_are_kept_as_they_are(found: list[object]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        found.append(traits(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class Operators(TorchDispatchMode):
    """Notes which are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TestRegions:
    @pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    @pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
    def test_a_cast_is_what_torchs_is_in_it_and_serves_outside(self, region, requires_grad):
        def made(cast: Cast) -> list[object]:
            tensor = weight(3).detach().requires_grad_(requires_grad)
            with region():
                result = cast(tensor)
                found = [traits(result)]
                result = result * 2
            return [*found, traits(result)]

        assert_alike(made)

    def test_an_inference_tensor_gives_a_usual_one_outside(self):
        with torch.inference_mode():
            tensor = torch.ones(3)
        result = in_cpp(HALF)(tensor)
        assert not result.is_inference()
        result.add_(1)
        assert result.tolist() == [2] * 3

    def test_hooks_for_saved_tensors_get_the_cast_and_nothing_else(self):
        def saved(cast: Cast) -> list[object]:
            tensor, found = weight(3), []
            with tensors_are_kept_as_they_are(found):
                loss = cast(tensor).square().sum()
            loss.backward()
            return [*found, traits(tensor.grad)]

        assert len(assert_alike(saved)) == 2

    def test_a_dispatch_mode_sees_it_there_and_back(self):
        def seen(cast: Cast) -> list[str]:
            tensor = weight(3)
            before = cast(tensor)
            with Operators() as operators:
                cast(tensor)
                before.sum().backward()
            return operators.names

        assert assert_alike(seen).count("aten._to_copy.default") == 2

    def test_so_does_a_profiler(self):
        def seen(cast: Cast) -> list[str]:
            tensor = weight(3)
            before = cast(tensor)
            with torch.autograd.profiler.profile() as profile:
                cast(tensor)
                before.sum().backward()
            return [event.name for event in profile.function_events if event.name != "aten::resolve_conj"]

        found = assert_alike(seen)
        assert found.count("aten::_to_copy") == found.count("aten::to") == 2
        assert "ToCopyBackward0" in found

    @TORCHS_OWN_SCRIPTS
    def test_tangents_are_cast_as_well(self):
        def tangents(cast: Cast) -> list[object]:
            tensor, given = weight(3), torch.ones(3, dtype=HALF)
            with fwAD.dual_level():
                forward = fwAD.unpack_dual(cast(fwAD.make_dual(tensor, torch.full((3,), 2.0))))
                without = fwAD.unpack_dual(cast(tensor))
                (grad,) = torch.autograd.grad(cast(tensor), tensor, fwAD.make_dual(given, given * 3))
                return [*map(traits, (*forward, *without, *fwAD.unpack_dual(grad)))]

        found = assert_alike(tangents)
        assert found[1][-1] == [2] * 3
        assert found[3] is None
        assert found[5][-1] == [3] * 3

    @pytest.mark.parametrize(
        "transformed",
        [
            lambda cast: torch.func.grad(lambda tensor: cast(tensor).square().sum())(torch.arange(3.0)),
            lambda cast: torch.func.vmap(cast)(weight(2, 3)),
            lambda cast: torch.func.jvp(cast, (torch.arange(3.0),), (torch.ones(3),))[1],
            lambda cast: torch.func.vjp(cast, torch.arange(3.0))[1](torch.ones(3).half())[0],
            lambda cast: torch.func.hessian(lambda tensor: (cast(tensor) ** 3).sum())(torch.arange(3.0)),
            lambda cast: torch.func.functionalize(cast)(torch.arange(3.0)),
            lambda cast: torch.autograd.functional.jacobian(cast, torch.arange(3.0), vectorize=True),
        ],
        ids=["grad", "vmap", "jvp", "vjp", "hessian", "functionalize", "jacobian"],
    )
    @TORCHS_OWN_SCRIPTS
    def test_transforms(self, transformed):
        assert_alike(lambda cast: traits(transformed(cast)))

    def test_many_gradients_at_once(self):
        def batched(cast: Cast) -> object:
            tensor, given = weight(3), torch.arange(6.0).reshape(2, 3).half()
            return traits(torch.autograd.grad(cast(tensor), tensor, given, is_grads_batched=True)[0])

        assert_alike(batched)

    def test_a_checkpoint(self):
        def recomputed(cast: Cast) -> object:
            tensor = weight(3)
            checkpoint(lambda tensor: cast(tensor).square().sum(), tensor, use_reentrant=False).backward()
            return traits(tensor.grad)

        assert_alike(recomputed)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own look at it
    def test_compiled_autograd_traces_it_once(self):
        def compiled(cast: Cast) -> tuple[object, ...]:
            graphs, found = [], []

            def compiler(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
                graphs.append([node.name for node in graph.graph.nodes])
                return graph

            with torch._dynamo.compiled_autograd._enable(compiler):
                for _ in range(3):
                    tensor = weight(3)
                    cast(tensor).square().sum().backward()
                    found.append(traits(tensor.grad))
            torch._dynamo.reset()
            return graphs, found

        ((graph,), _) = assert_alike(compiled)
        assert sum(name.startswith("to_copy_backward") for name in graph) == 1


def test_threads_cast_one_tensor_at_once():
    cast, shared, faults = in_cpp(HALF), weight(3), []
    expected = shared.detach().half()

    def run() -> None:
        for _ in range(200):
            own = shared.detach().clone().requires_grad_()
            result = cast(own)
            result.backward(torch.ones(3, dtype=HALF))
            if not (
                torch.equal(result, expected) and torch.equal(cast(shared), expected) and bool((own.grad == 1).all())
            ):
                faults.append(result)

    together([run] * 4)
    assert not faults

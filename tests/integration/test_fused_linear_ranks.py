"""`fused_linear` against the same session without it: distributed training, compilers, and whole training loops.

On a CPU the node's products are those of torch's own nodes: every gradient and weight must have the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import emulated_graphs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from helpers import HALF_DTYPES, assert_same_state, dtype_name
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ampatch import GradScaler, amp
from ampatch.scaling import scale_use

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
TORCHS_OWN = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
QUIET = {"verbosity": 0, "loss_scale": "dynamic", "init_scale": 2.0**8}


class Net(nn.Module):
    """Layers with a bias and without, one that runs under a checkpoint, and one that only some inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.middle = nn.Linear(16, 16, bias=False)
        self.sometimes = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        if "checkpoint" in how:
            hidden = checkpoint(self.middle, hidden, use_reentrant="reentrant" in how)
        else:
            hidden = self.middle(hidden)
        if "skip" not in how:
            hidden = self.sometimes(hidden)
        return self.last(hidden)


def batch(number: int = 0, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


def nodes_of(*tensors: Tensor) -> int:
    """Returns the number of fused nodes in the graphs of tensors."""
    seen, found = set(), 0
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += node.name().startswith("FusedLinear")
        left += [each for each, _ in node.next_functions]
    return found


def set_up(model: nn.Module, half: torch.dtype, fused: bool, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, half_dtype=half, fused_linear=fused, **{**QUIET, **options})
    return optimizer


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def whole(tensors: Any) -> list[Tensor | None]:
    """Returns copies of tensors; of sharded ones, of this rank's piece."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return [None if each is None else each.detach().clone() for each in local]


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "grads": whole(each.grad for each in model.parameters()),
        "weights": whole(model.parameters()),
        "scale": amp.get_loss_scale(),
    }


def compared(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Calls a function with and without fused_linear, and asserts that it returns the same state.

    Args:
        function: takes the arguments and whether linear layers are fused; returns a number of nodes, and a state.
        args: its arguments.

    Returns:
        The number of fused nodes, and the state.
    """
    torch.manual_seed(0)
    none, unfused = function(*args, False)
    amp.deinitialize()
    torch._dynamo.reset()
    torch.manual_seed(0)
    found, fused = function(*args, True)
    amp.deinitialize()
    assert none == 0
    assert_same_state(fused, unfused)
    return found, fused


# --- several processes ----------------------------------------------------------------------------

DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "no_sync": {},
    "no_sync, bucket view": {"gradient_as_bucket_view": True},
    "fp16_compress": {},
    "power SGD": {},
    "checkpoint": {},
    "checkpoint, reentrant": {"static_graph": True},
}


def through_float16(_, bucket):  # torch looks at annotations, and knows no strings
    return default_hooks.fp16_compress_hook(None, bucket)


def replicated(kind: str, half: torch.dtype, fused: bool) -> tuple[int, list[Any]]:
    model = Net()
    optimizer = set_up(model, half, fused)
    replica = DistributedDataParallel(model, **DDP[kind])
    if kind == "fp16_compress":
        replica.register_comm_hook(None, through_float16)
    elif kind == "power SGD":
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
        replica.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook)
    found, states = 0, []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            postponed = kind.startswith("no_sync") and micro == 0
            if micro == 0 and not postponed:
                continue
            how = "skip" if kind == "unused parameters" and step % 2 == dist.get_rank() else kind
            with replica.no_sync() if postponed else contextlib.nullcontext():
                out = replica(batch(10 * step + 2 * dist.get_rank() + micro), how)
                found += nodes_of(out)
                if step == 1 and dist.get_rank() == 1 and kind != "power SGD":  # it would keep the NaN
                    out.register_hook(lambda grad: grad * float("inf"))
                backward(loss_of(out), optimizer)
        states.append(state(model))
        optimizer.step()
        states.append((state(model), amp.step_was_skipped(optimizer)))
    return found, states


class TestDistributedDataParallel:
    @pytest.mark.slow
    @HALVES
    @pytest.mark.parametrize("kind", DDP)
    @pytest.mark.covering(1)
    def test_has_the_same_bits(self, two, kind, half):
        (found, first), (_, second) = two.run(compared, replicated, kind, half)
        assert found > 0
        for (one, _), (other, _) in zip(first[1::2], second[1::2], strict=True):
            assert_same_state(one["weights"], other["weights"])


FSDP = {
    "fully_shard": {},
    "fully_shard, gathered once": {"reshard_after_forward": False},
    "fully_shard, reduced in half": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "fully_shard, in half": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fully_shard, checkpoint": {},
    "FSDP1": {"use_orig_params": True},
    "FSDP1 flat": {"use_orig_params": False},
}


def sharded(kind: str, half: torch.dtype, fused: bool) -> tuple[int, list[Any]]:
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    if kind.startswith("FSDP1"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **FSDP[kind])
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0].first, model[0].middle, model[0], model[1], model):
            fully_shard(layer, mesh=mesh, **FSDP[kind])
    optimizer = set_up(model, half, fused)
    states, found = [], 0
    for step in range(3):
        optimizer.zero_grad()
        hidden = batch(2 * step + dist.get_rank())
        if "checkpoint" in kind:
            out = checkpoint(model, hidden, use_reentrant=False)
        else:
            out = model(hidden)
        found += nodes_of(out)
        if step == 1 and dist.get_rank() == 1:
            out.register_hook(lambda grad: grad * float("inf"))
        backward(loss_of(out), optimizer)
        states.append(state(model))
        amp.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        states.append((state(model), amp.step_was_skipped(optimizer)))
    return found, states


class TestFullySharded:
    @pytest.mark.slow
    @HALVES
    @pytest.mark.parametrize("kind", FSDP)
    @pytest.mark.covering(1)
    @pytest.mark.filterwarnings("ignore")
    def test_has_the_same_bits(self, two, kind, half):
        for found, states in two.run(compared, sharded, kind, half):
            assert [skipped for _, skipped in states[1::2]] == [False, True, False]
            # FSDP1 runs layers with views of its flat parameter, which are no parameters.
            assert (found == 0) == (kind.startswith("FSDP1") or kind == "fully_shard, in half")


def in_columns_and_rows(with_fsdp: bool, half: torch.dtype, fused: bool) -> tuple[int, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (2, 2) if with_fsdp else (2,), mesh_dim_names=("data", "model")[-1 - with_fsdp :])
    parallelize_module(
        model, mesh["model"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )  # whose result is not there yet
    if with_fsdp:
        fully_shard(model, mesh=mesh["data"])
    optimizer = set_up(model, half, fused)
    out = model(batch())
    found = nodes_of(out)
    backward(loss_of(out), optimizer)
    optimizer.step()
    return found, state(model)


class TestTensorParallel:
    """The layers that are split have DTensors as weights, and are called as without fused_linear."""

    @HALVES
    def test_has_the_same_bits(self, two, half):
        for found, _ in two.run(compared, in_columns_and_rows, False, half):
            assert found == 1  # the layer that is not split

    @HALVES
    @pytest.mark.slow
    @pytest.mark.either_way
    def test_has_the_same_bits_under_fsdp_too(self, four, half):
        for found, _ in four.run(compared, in_columns_and_rows, True, half):
            assert found == 1


def in_stages(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """Two ranks have a stage each, and send activations and gradients of micro-batches."""
    torch.manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    stage = nn.Sequential(nn.Linear(8, 16), nn.ReLU()) if is_first else nn.Linear(16, 4)
    optimizer = set_up(stage, half, fused, loss_scale=64.0)
    found, sent = 0, []
    for micro in range(2):
        if is_first:
            out = stage(batch(micro))
            activations = out.detach().float()
            sent.append((out, activations, dist.isend(activations, 1)))
        else:
            received = torch.empty(6, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            out = stage(received)
            backward(loss_of(out), optimizer)
            dist.send(received.grad, 0)
        found += nodes_of(out)
    for out, _, sending in sent:
        sending.wait()
        grad = torch.empty(6, 16)
        dist.recv(grad, 1)
        with amp.scale_loss(torch.zeros(()), optimizer):
            out.backward(grad.to(out.dtype) * 64)
    optimizer.step()
    return found, state(stage)


def in_two_parts(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """The backward pass of a zero-bubble pipeline: gradients of inputs first, then those of weights."""
    model = Net()
    set_up(model, half, fused, loss_scale=1.0)
    x = batch().requires_grad_()
    loss = loss_of(model(x))
    found = nodes_of(loss)
    (of_input,), groups = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(model.parameters(), groups)
    return found, (of_input.clone(), state(model))


class TestPipelines:
    @HALVES
    def test_of_two_ranks_have_the_same_bits(self, two, half):
        for found, _ in two.run(compared, in_stages, half):
            assert found == 2

    @HALVES
    def test_may_compute_gradients_of_weights_later(self, half):
        found, _ = compared(in_two_parts, half)
        assert found == 4


def arrivals(fused: bool) -> tuple[int, list[str]]:
    model, arrived = Net(), []
    set_up(model, torch.bfloat16, fused)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    out = model(batch())
    loss_of(out).backward()
    return nodes_of(out), arrived


def test_gradients_arrive_in_the_same_order():
    """DDP lays its buckets out in this order, and random projections of its hooks follow the buckets."""
    found, arrived = compared(arrivals)
    assert found == 4
    assert arrived[:2] == ["last.bias", "last.weight"]


# --- compilers and tracers ------------------------------------------------------------------------


class Graphs:
    """A backend that keeps the graphs that it is given, and runs them as AOTAutograd's."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        kept = {"fw_compiler": self._keeper(self.forward), "bw_compiler": self._keeper(self.backward)}
        self.backend = aot_autograd(**kept)

    @staticmethod
    def _keeper(kept: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            kept.append(graph)
            return make_boxed_func(graph.forward)

        return keep

    def targets(self) -> set[str]:
        """Returns the names of all operators in the graphs."""
        graphs = [*self.forward, *self.backward]
        return {str(n.target) for graph in graphs for n in graph.graph.nodes if n.op == "call_function"}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def broken(model: Net, x: Tensor) -> Tensor:
    hidden = model.norm(model.first(x))
    torch._dynamo.graph_break()
    hidden = eagerly(model.sometimes, model.middle(hidden))
    return model.last(hidden)


@torch._dynamo.disable
def eagerly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


COMPILED: dict[str, Callable[..., Any]] = {
    "whole": lambda model, compile: compile(model, fullgraph=True),
    "in place": lambda model, compile: (model.compile(backend=compile.keywords["backend"]), model)[1],
    "a layer": lambda model, compile: (setattr(model, "middle", compile(model.middle)), model)[1],
    "graph breaks": lambda model, compile: functools.partial(compile(broken), model),
    "checkpoint": lambda model, compile: functools.partial(compile(model, fullgraph=True), how="checkpoint"),
    "in a checkpoint": lambda model, compile: (
        setattr(model, "middle", compile(model.middle)),
        functools.partial(model, how="checkpoint"),
    )[1],
    "dynamic": lambda model, compile: compile(model, dynamic=True, fullgraph=True),
}
#: Layers that are called in eager code.
IN_EAGER_CODE = {"a layer": 3, "graph breaks": 1, "in a checkpoint": 3}


def compiled(how: str, before: bool, half: torch.dtype, graphs: list[Graphs], fused: bool) -> tuple[int, Any]:
    torch._dynamo.reset()
    model, kept = Net(), Graphs()
    graphs.append(kept)
    compile = functools.partial(torch.compile, backend=kept.backend)
    run = COMPILED[how](model, compile) if before else None
    optimizer = set_up(model, half, fused)
    run = COMPILED[how](model, compile) if run is None else run
    found, states = 0, []
    for step, rows in enumerate((6, 6, 5, 7)):  # other sizes compile anew
        out = run(batch(step, rows))
        found += nodes_of(out)
        backward(loss_of(out), optimizer)
        states.append(state(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, (states, state(model))


@pytest.mark.slow
@TORCHS_OWN
@pytest.mark.parametrize("before", [True, False], ids=["before initialize", "after initialize"])
@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.covering(1)
def test_compiled_code_is_the_same(how, half, before):
    """The compiler sees torch's own linear layers; only eager code around them has fused ones."""
    graphs: list[Graphs] = []
    found, _ = compared(compiled, how, before, half, graphs)
    assert found == 4 * IN_EAGER_CODE.get(how, 0)
    unfused, fused = graphs
    assert fused.targets() == unfused.targets()
    assert len(fused.forward) == len(unfused.forward) > 0
    assert len(fused.backward) == len(unfused.backward) > 0


@pytest.mark.slow
@pytest.mark.either_way
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def train(fused: bool) -> tuple[int, Any]:
        model = Net()
        optimizer = set_up(model, torch.bfloat16, fused)
        out = torch.compile(model, fullgraph=True)(batch())
        backward(loss_of(out), optimizer)
        return nodes_of(out), state(model)

    assert compared(train)[0] == 0


def of_a_compiled_backward(
    how: str, backend: str, half: torch.dtype, graphs: list[torch.fx.GraphModule], fused: bool
) -> tuple[int, Any]:
    """Compiled autograd takes the graph of the eager forward as it is, fused nodes among them."""
    torch._dynamo.reset()

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    model = Net()
    optimizer = set_up(model, half, fused)
    compile = torch.compile(backend=counting, fullgraph=how != "checkpoint")  # whose hooks torch does not trace
    found, states = 0, []
    for step, rows in enumerate((6, 6, 5, 7)):
        x = batch(step, rows)
        if how == "inputs too":
            x.requires_grad_()
        with contextlib.ExitStack() as hooks:
            if how == "saved tensor hooks":
                pack = functools.partial(torch.Tensor.clone)
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            out = model(x, how) if how != "a frozen bias" else model(x)
        found += nodes_of(out)
        if how == "stopped":
            out = model.last(Stop.apply(model.first(x)))
        with compiled_autograd._enable(compile):
            if how == "some":
                grads = torch.autograd.grad(loss_of(out), [*model.parameters()][step::2], allow_unused=True)
                states.append(whole(grads))
                continue
            backward(loss_of(out), optimizer)
        states.append((state(model), whole([x.grad])))
        optimizer.step()
        optimizer.zero_grad()
    return found, states


class Stop(torch.autograd.Function):
    """Lets no gradient through, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.slow
@TORCHS_OWN
@HALVES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "inputs too", "saved tensor hooks", "some", "stopped"])
@pytest.mark.covering(1)
def test_compiled_autograd_gives_the_same(how, backend, half):
    graphs: list[torch.fx.GraphModule] = []
    found, _ = compared(of_a_compiled_backward, how, backend, half, graphs)
    assert found >= 12
    assert graphs


@pytest.mark.slow
@TORCHS_OWN
def test_compiled_autograd_runs_a_second_backward_pass():
    """Weights that are used in both passes have their gradients summed in float32: bits may differ."""
    grads = {}
    for fused in (False, True):
        model = Net()
        set_up(model, torch.bfloat16, fused, loss_scale=1.0)
        x = batch().requires_grad_()
        out = model.middle(model.first(x))
        assert nodes_of(out) == 2 * fused
        (grad,) = torch.autograd.grad(loss_of(out), [x], create_graph=True)
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            grad.square().sum().backward()
        grads[fused] = [parameter.grad for parameter in (*model.first.parameters(), *model.middle.parameters())]
        amp.deinitialize()
    assert grads[True][0].any()
    torch.testing.assert_close(grads[True], grads[False], rtol=0.02, atol=1e-4)


def exported(strict: bool, fused: bool) -> tuple[int, Any]:
    model = Net()
    set_up(model, torch.bfloat16, fused)
    program = torch.export.export(model, (batch(),), strict=strict)
    found = sum("used" in str(node.target) for node in program.graph.nodes)
    return found, ([str(node.target) for node in program.graph.nodes], program.module()(batch()))


def traced_by_jit(fused: bool) -> tuple[int, Any]:
    model = Net()
    set_up(model, torch.bfloat16, fused)
    traced = torch.jit.trace(model, (batch(),), check_trace=False)
    out = traced(batch(1))
    loss_of(out).backward()
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    return nodes_of(out), (kinds, out, state(model))


def traced_symbolically(fused: bool) -> tuple[int, Any]:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    set_up(model, torch.bfloat16, fused)
    traced = torch.fx.symbolic_trace(model)
    in_graph = torch.fx.symbolic_trace(lambda x, weight: F.linear(x, weight).relu())
    targets = [str(node.target) for each in (traced, in_graph) for node in each.graph.nodes]
    weight = nn.Parameter(model[0].weight.detach().clone())
    results = traced(batch()), in_graph(batch(), weight)
    assert nodes_of(*results) == 3 * fused
    sum(map(loss_of, results)).backward()
    return 0, (targets, weight.grad, state(model))


def made_by_make_fx(fused: bool) -> tuple[int, Any]:
    model = Net()
    set_up(model, torch.bfloat16, fused)

    def gradients(x: Tensor) -> Any:
        return torch.autograd.grad(loss_of(model(x)), list(model.parameters()))

    graph = make_fx(gradients)(batch())
    return 0, ([str(node.target) for node in graph.graph.nodes], graph(batch(1)))


def functional(fused: bool) -> tuple[int, Any]:
    model = Net()
    set_up(model, torch.bfloat16, fused)
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights: Any, x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, weights, (x,)))

    return 0, (torch.func.grad(loss)(weights, batch()), torch.func.vmap(model)(batch().unflatten(0, (2, 3))))


class TestTracers:
    @pytest.mark.slow
    @pytest.mark.parametrize("strict", [True, False])
    def test_export_sees_no_node(self, strict):
        compared(exported, strict)

    @pytest.mark.filterwarnings("ignore")
    def test_jit_trace_sees_no_node(self):
        assert compared(traced_by_jit)[0] == 0

    def test_symbolic_trace_sees_no_node(self):
        compared(traced_symbolically)

    def test_make_fx_sees_no_node(self):
        compared(made_by_make_fx)

    def test_functional_transforms_see_no_node(self):
        compared(functional)


# --- training loops -------------------------------------------------------------------------------


class Loop:
    """A model, its optimizer and two kinds of loss.

    Args:
        fused: whether linear layers are fused.
        half: half type.
        options: those of `amp.initialize`.
    """

    def __init__(self, fused: bool, half: torch.dtype, **options: Any) -> None:
        self.model, self.found, self.noted = Net(), 0, []
        self.optimizer = set_up(self.model, half, fused, **options)

    def loss(self, number: int, factor: float = 1.0) -> Tensor:
        out = self.model(batch(number))
        self.found += nodes_of(out)
        return loss_of(out) * factor

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.noted.append(state(self.model))
        self.optimizer.step(*([] if closure is None else [closure]))
        self.optimizer.zero_grad()
        self.noted.append((state(self.model), amp.step_was_skipped(self.optimizer)))


def accumulating(loop: Loop) -> None:
    for number in range(6):
        backward(loop.loss(number), loop.optimizer)
        if number % 3 == 2:
            loop.step()


def clipping(loop: Loop) -> None:
    for number in range(3):
        backward(loop.loss(number), loop.optimizer)
        loop.noted.append(amp.clip_grad_norm_(loop.optimizer, 0.1))
        loop.step()


def delaying(loop: Loop) -> None:
    for number in range(4):
        backward(loop.loss(number), loop.optimizer, delay_unscale=number % 2 == 0)
        if number % 2:
            loop.step()


def overflowing(loop: Loop) -> None:
    """The gradients of the second step overflow in half, in the loss's own gradient and in a layer's."""
    for number in range(4):
        backward(loop.loss(number, 2.0**20 if number == 1 else 1.0), loop.optimizer)
        loop.step()


def with_two_losses(loop: Loop) -> None:
    for number in range(3):
        for loss_id in range(2):
            with amp.scale_loss(loop.loss(number + loss_id), loop.optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
        loop.step()


def keeping_the_graph(loop: Loop) -> None:
    loss = loop.loss(0)
    with amp.scale_loss(loss, loop.optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with amp.scale_loss(loss * 2, loop.optimizer) as scaled_loss:
        scaled_loss.backward()
    loop.step()


def averaging(loop: Loop) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(3):
        backward(loop.loss(number), loop.optimizer)
        loop.step()
        averaged.update_parameters(loop.model)
        with torch.no_grad():
            loop.noted.append(averaged(batch(9)))
    assert nodes_of(averaged(batch(9))) in (0, 4)  # a copy is trained like the model


def validating(loop: Loop) -> None:
    for number in range(3):
        backward(loop.loss(number), loop.optimizer)
        loop.step()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loop.noted.append(loop.model(batch(9)).clone())


def freezing(loop: Loop) -> None:
    for number, frozen in enumerate([loop.model.first, loop.model.last.bias, loop.model.last.weight]):
        frozen.requires_grad_(False)
        backward(loop.loss(number), loop.optimizer)
        loop.step()


LOOPS: dict[str, tuple[Callable[[Loop], None], dict[str, Any]]] = {
    "accumulation": (accumulating, {}),
    "clipping": (clipping, {}),
    "delayed unscaling": (delaying, {}),
    "overflow": (overflowing, {}),
    "static scale": (overflowing, {"loss_scale": 128.0}),
    "checked for inf": (overflowing, {"loss_scale": 1.0, "check_finite": True}),
    "labels": (accumulating, {"profile_casts": True}),
    "two losses": (with_two_losses, {"num_losses": 2}),
    "two passes of a graph": (keeping_the_graph, {}),
    "averaged weights": (averaging, {}),
    "validation": (validating, {}),
    "frozen layers": (freezing, {}),
}


def looped(name: str, half: torch.dtype, fused: bool) -> tuple[int, Any]:
    run, options = LOOPS[name]
    loop = Loop(fused, half, **options)
    run(loop)
    return loop.found, (loop.noted, state(loop.model), amp.state_dict())


@HALVES
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:the loss of a skipped step is")
def test_loops_have_the_same_bits(name, half):
    assert compared(looped, name, half)[0] > 0


def with_two_optimizers(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """A generator and a discriminator, each with an optimizer and a loss scale."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    models = [generator, discriminator]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    amp.initialize(models, optimizers, half_dtype=half, fused_linear=fused, num_losses=2, **QUIET)
    found, states = 0, []
    for step in range(3):
        fake = generator(batch(step))
        out = discriminator(fake.detach()) - discriminator(batch(step + 9))
        found += nodes_of(out)
        with amp.scale_loss(out.float().mean(), optimizers[1], loss_id=0) as scaled_loss:
            scaled_loss.backward()
        optimizers[1].step()
        with amp.scale_loss(-discriminator(fake).float().mean(), optimizers[0], loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        states.append([whole(model.parameters()) for model in models])
    return found, states


@HALVES
def test_two_optimizers_learn_the_same(half):
    """The discriminator is called twice in a pass, so that its gradients are summed in float32: bits may differ."""
    unfused, fused = with_two_optimizers(half, False), (amp.deinitialize(), with_two_optimizers(half, True))[1]
    assert (unfused[0], fused[0]) == (0, 12)
    torch.testing.assert_close(fused[1], unfused[1], rtol=0, atol=0.03)


def by_grad_scaler(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """The interface of ``torch.amp.GradScaler``, whose scale is not that of a session."""
    model = Net()
    optimizer = set_up(model, half, fused, loss_scale=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    found, states = 0, []
    for step in range(4):
        out = model(batch(step))
        found += nodes_of(out)
        if step == 1:
            out.register_hook(lambda grad: grad * float("inf"))
        scaler.scale(loss_of(out)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append((state(model), scaler.get_scale()))
    return found, states


@HALVES
def test_grad_scaler_has_the_same_bits(half):
    assert compared(by_grad_scaler, half)[0] == 16


def resumed(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """Four steps at once, and four with everything saved and loaded in a new session after two."""
    loop = Loop(fused, half, scale_window=1)
    for number in range(4):
        backward(loop.loss(number), loop.optimizer)
        loop.step()
    at_once = state(loop.model), amp.state_dict()
    saved: Any = None
    for numbers in (range(2), range(2, 4)):
        amp.deinitialize()
        loop = Loop(fused, half, scale_window=1)
        if saved is not None:
            loop.model.load_state_dict(saved[0])
            loop.optimizer.load_state_dict(saved[1])
            amp.load_state_dict(saved[2])
        for number in numbers:
            backward(loop.loss(number), loop.optimizer)
            loop.step()
        saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), amp.state_dict()))
    assert_same_state((state(loop.model), amp.state_dict()), at_once)
    return loop.found, at_once


@pytest.mark.slow
@HALVES
def test_a_resumed_run_has_the_same_bits(half):
    assert compared(resumed, half)[0] == 8


# --- CUDA -----------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes operators, and the types of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((str(func), result.dtype))
        return result


def operators_of_node(half: torch.dtype, device: str) -> tuple[list[tuple[str, torch.dtype]], list[Tensor]]:
    """Has a node compute its gradients from tensors without data, on a GPU that need not be there."""
    layer = nn.Linear(8, 4)
    amp.initialize(layer, half_dtype=half, fused_linear=True, verbosity=0)
    mode = FakeTensorMode()

    def fake(like: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fake):
        out = layer(batch().requires_grad_().clone())
    assert nodes_of(out) == 1
    node, operators = out.grad_fn, Operators()
    with torch.no_grad(), mode, operators:
        grads = getattr(node, "apply", node)(fake(out))
    return operators.seen, list(grads[:3])


class TestOnCuda:
    @HALVES
    def test_the_product_of_halves_has_a_float32_result(self, half):
        """No half gradient of a weight is ever made, so that none can overflow."""
        operators, grads = operators_of_node(half, "cuda")
        assert ("aten.mm.dtype", torch.float32) in operators
        assert ("aten.sum.dim_IntList", torch.float32) in operators
        assert [name for name, dtype in operators if dtype is half and "mm" in name] == ["aten.mm.default"]  # of input
        assert "aten._to_copy.default" not in dict(operators)
        assert [(grad.dtype, grad.device.type) for grad in grads] == [
            (half, "cuda"), (torch.float32, "cuda"), (torch.float32, "cuda"),
        ]  # fmt: skip

    @HALVES
    def test_a_cpu_has_no_such_product(self, half):
        operators, grads = operators_of_node(half, "cpu")
        assert "aten.mm.dtype" not in dict(operators)
        assert [grad.dtype for grad in grads] == [half, torch.float32, torch.float32]

    @pytest.mark.gpu
    @HALVES
    def test_gradients_are_nearer_to_those_of_float32(self, half):
        x, grads = torch.randn(256, 64, device="cuda").to(half).float(), {}
        for fused in (None, False, True):
            torch.manual_seed(0)
            layer = nn.Linear(64, 32).to("cuda")
            with torch.no_grad():
                layer.weight.copy_(layer.weight.to(half))
            if fused is not None:
                amp.initialize(layer, half_dtype=half, fused_linear=fused, verbosity=0)
            out = layer(x)
            assert nodes_of(out) == bool(fused)
            out.float().sum().backward()
            grads[fused] = layer.weight.grad
            amp.deinitialize()
        errors = {fused: (grads[fused] - grads[None]).abs().max().item() for fused in (False, True)}
        assert errors[True] < errors[False] / 4

    @pytest.mark.gpu
    @HALVES
    def test_a_captured_step_replays_what_is_run(self, half):
        weights = {}
        for captured in (False, True):
            model = Net().to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
            amp.initialize(model, optimizer, half_dtype=half, fused_linear=True, verbosity=0, loss_scale=128.0)
            x = torch.zeros(6, 8, device="cuda")

            def step(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
                optimizer.zero_grad()
                backward(loss_of(model(x)), optimizer)
                optimizer.step()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for number in range(3):
                    x.copy_(batch(number))
                    step()
            torch.cuda.current_stream().wait_stream(side)
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            for number in range(3, 6):
                x.copy_(batch(number))
                graph.replay() if captured else step()
            weights[captured] = whole(model.parameters())
            amp.deinitialize()
        assert_same_state(weights[True], weights[False])

    # The graph of the first stream lives until the backward pass, so its nodes serve the second, as in plain torch.
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
    @pytest.mark.gpu
    def test_streams_may_change_within_a_step(self):
        def train(fused: bool) -> tuple[int, Any]:
            model = Net().to("cuda")
            optimizer = set_up(model, torch.bfloat16, fused)
            streams, found, losses = [torch.cuda.Stream(), torch.cuda.Stream()], 0, []
            for number, stream in enumerate(streams * 4):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    out = model(batch(number).to("cuda"))
                    found += nodes_of(out)
                    losses.append(loss_of(out))
                torch.cuda.current_stream().wait_stream(stream)
            backward(torch.stack(losses).mean(), optimizer)
            optimizer.step()
            return found, whole(model.parameters())

        (none, unfused), (found, fused) = train(False), (amp.deinitialize(), train(True))[1]
        assert (none, found) == (0, 32)
        torch.testing.assert_close(fused, unfused, rtol=0, atol=1e-3)


def captured_on_the_cpu(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    amp.initialize(model, optimizer, half_dtype=half, fused_linear=fused, **QUIET)
    x, found = torch.zeros(6, 8), 0

    def step() -> int:
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        backward(loss_of(out), optimizer)
        optimizer.step()
        return nodes_of(out)

    for number in range(3):
        x.copy_(batch(number))
        found += step()
    graph, states = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        step()
    for number in range(3, 6):
        x.copy_(batch(number))
        graph.replay()
        states.append(whole(model.parameters()))
    return found, states


@HALVES
def test_an_emulated_graph_replays_the_same(half, monkeypatch):
    emulated_graphs.install(monkeypatch)
    monkeypatch.setattr(scale_use, "AT_HAND", frozenset())
    found, states = compared(captured_on_the_cpu, half)
    assert found == 12
    assert not torch.equal(states[0][0], states[1][0])

"""`fused_linear` against the same session without it: distributed training, compilers, and whole training loops.

On a CPU the node's products are those of torch's own nodes: every gradient and weight must have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import emulated_graphs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from helpers import assert_same_state
from optimizers import backward
from small_nets import EACH_HALF
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

from ampatch import amp
from ampatch.scaling import scale_use

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
        how = "skip" if kind == "unused parameters" and step % 2 == dist.get_rank() else kind
        for postponed in (True, False) if kind.startswith("no_sync") else (False,):
            with replica.no_sync() if postponed else contextlib.nullcontext():
                out = replica(batch(10 * step + 2 * dist.get_rank() + postponed), how)
                found += nodes_of(out)
                if step == 1 and dist.get_rank() == 1 and kind != "power SGD":  # it would keep the NaN
                    out.register_hook(lambda grad: grad * float("inf"))
                backward(loss_of(out), optimizer)
        states.append(state(model))
        optimizer.step()
        states.append((state(model), amp.step_was_skipped(optimizer)))
    return found, states


@pytest.mark.slow
@EACH_HALF
@pytest.mark.parametrize("kind", DDP)
@pytest.mark.covering(1)
def test_ddp_trains_to_the_same_bits(two, kind, half):
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


@pytest.mark.slow
@EACH_HALF
@pytest.mark.parametrize("kind", FSDP)
@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore")
def test_fsdp_trains_to_the_same_bits(two, kind, half):
    for found, states in two.run(compared, sharded, kind, half):
        assert [skipped for _, skipped in states[1::2]] == [False, True, False]
        # FSDP1 runs layers with views of its flat parameter, which are no parameters.
        assert (found == 0) == (kind.startswith("FSDP1") or kind == "fully_shard, in half")


def in_columns_and_rows(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = set_up(model, half, fused)
    out = model(batch())
    found = nodes_of(out)
    backward(loss_of(out), optimizer)
    optimizer.step()
    return found, state(model)


# Layers that are split have DTensors as weights, and are called as without fused_linear.
@EACH_HALF
def test_tensor_parallel_layers_train_to_the_same_bits(two, half):
    for found, _ in two.run(compared, in_columns_and_rows, half):
        assert found == 1  # the layer that is not split


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


@EACH_HALF
def test_gradients_of_weights_computed_after_those_of_inputs_have_the_same_bits(half):
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


def test_fused_gradients_arrive_in_torchs_order():
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
# Layers that are called in eager code.
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
@EACH_HALF
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.covering(1)
def test_compiled_graphs_have_the_same_operators_and_bits(how, half, before):
    """The compiler sees torch's own linear layers; only eager code around them has fused ones."""
    graphs: list[Graphs] = []
    found, _ = compared(compiled, how, before, half, graphs)
    assert found == 4 * IN_EAGER_CODE.get(how, 0)
    unfused, fused = graphs
    assert fused.targets() == unfused.targets()
    assert len(fused.forward) == len(unfused.forward) > 0
    assert len(fused.backward) == len(unfused.backward) > 0


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
            out = model(x, how)
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
@EACH_HALF
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "inputs too", "saved tensor hooks", "some", "stopped"])
@pytest.mark.covering(1)
def test_compiled_autograd_gives_the_same_bits(how, backend, half):
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
    assert nodes_of(out) == 0
    loss_of(out).backward()
    return 0, ([node.kind() for node in traced.inlined_graph.nodes()], out, state(model))


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


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(functools.partial(exported, True), marks=pytest.mark.slow),
        pytest.param(functools.partial(exported, False), marks=pytest.mark.slow),
        traced_by_jit,
        traced_symbolically,
        made_by_make_fx,
        functional,
    ],
    ids=["strict export", "export", "jit.trace", "symbolic_trace", "make_fx", "func"],
)
@pytest.mark.filterwarnings("ignore")
def test_tracers_see_no_fused_node(trace):
    compared(trace)


def in_a_loop(half: torch.dtype, fused: bool) -> tuple[int, Any]:
    """Accumulates two gradients in each step, clips them, and averages weights; one gradient overflows in float16."""
    model = Net()
    optimizer = set_up(model, half, fused)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    found, noted = 0, []
    for number in range(8):
        out = model(batch(number))
        found += nodes_of(out)
        backward(loss_of(out) * (2.0**20 if number == 3 else 1.0), optimizer, delay_unscale=number % 2 == 0)
        if number % 2:
            noted += [amp.clip_grad_norm_(optimizer, 0.1), state(model)]
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            with torch.no_grad():
                noted += [averaged(batch(9)), amp.step_was_skipped(optimizer)]
    return found, (noted, state(model), amp.state_dict())


@EACH_HALF
@pytest.mark.filterwarnings("ignore:the loss of a skipped step is")
def test_a_training_loop_ends_with_the_same_bits(half):
    found, (noted, *_) = compared(in_a_loop, half)
    assert found == 8 * 4
    assert noted[3::4] == [False, half is torch.float16, False, False]


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
    @EACH_HALF
    def test_gradients_of_weights_on_cuda_are_float32_products(self, half):
        """No half gradient of a weight is ever made, so that none can overflow."""
        operators, grads = operators_of_node(half, "cuda")
        assert ("aten.mm.dtype", torch.float32) in operators
        assert ("aten.sum.dim_IntList", torch.float32) in operators
        assert [name for name, dtype in operators if dtype is half and "mm" in name] == ["aten.mm.default"]  # of input
        assert "aten._to_copy.default" not in dict(operators)
        assert [(grad.dtype, grad.device.type) for grad in grads] == [
            (half, "cuda"), (torch.float32, "cuda"), (torch.float32, "cuda"),
        ]  # fmt: skip

    @EACH_HALF
    def test_gradients_on_a_cpu_come_from_no_float32_product(self, half):
        operators, grads = operators_of_node(half, "cpu")
        assert "aten.mm.dtype" not in dict(operators)
        assert [grad.dtype for grad in grads] == [half, torch.float32, torch.float32]

    @pytest.mark.gpu
    @EACH_HALF
    def test_gradients_are_nearer_to_float32_than_torchs_on_a_gpu(self, half):
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
    @EACH_HALF
    def test_a_captured_step_replays_the_same_bits(self, half):
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
    def test_fused_layers_train_on_several_streams(self):
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


@EACH_HALF
def test_an_emulated_graph_replays_the_same_bits(half, monkeypatch):
    emulated_graphs.install(monkeypatch)
    monkeypatch.setattr(scale_use, "AT_HAND", frozenset())
    found, states = compared(captured_on_the_cpu, half)
    assert found == 12
    assert not torch.equal(states[0][0], states[1][0])

"""Counts what `fused_linear` changes in a step: nodes, instructions, bytes, and the scales at which nothing overflows.

Run as `python benchmarks/fused_linear.py [--only nodes,calls,bytes,scales] [--models NAME,...]`. Needs transformers,
and for calls what `instructions.py` needs. Prints Markdown tables, as in docs/benchmarks.md. It counts and does not
time, so it runs beside anything. Asserts nothing.

- *nodes*: the nodes of autograd's graph, from the loss to the parameters, without those that accumulate gradients.
- *calls*: the instructions of one small layer, whose weights are cast before, and of its backward pass.
- *bytes*: the sum over all operators of the bytes of their inputs and outputs. Views count nothing. On a CPU the fused
  node casts its half products to float32. A GPU writes them in float32, so a product and its cast count as one
  operator.
- *scales*: in float16, the largest power of two by which the loss can be multiplied without an inf or a NaN in any
  gradient, and the share of gradients that are zero, but not in float32. With `fused_linear`, gradients of
  weights and biases are computed in float32, as on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from host import SIZES, SMALLER
from instructions import Callgrind, Case, chosen, prepared, read, run_within, within
from memory import network
from recasts import MODELS, model_and_inputs
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.casting import cast_observers
from ampatch.native import kernels
from ampatch.tracing import ObservingMode

TRANSFORMER = "transformer"
AUTOCAST, WITHOUT, O1 = "torch.autocast", "O1 without fused_linear", "O1"
CONTENDERS = (AUTOCAST, WITHOUT, O1)
SCALE = 2.0**10
FUSED_NODE = "FusedLinearBackward"
PRODUCT = "AMPATCH_FUSED_LINEAR"
SECTIONS = ("nodes", "calls", "bytes", "scales")
SUBJECTS = (TRANSFORMER, *MODELS)

LossOf = Callable[[nn.Module], Tensor]


def model_and_loss(name: str) -> tuple[nn.Module, LossOf]:
    """Returns a random model, without dropout, and the function that returns its loss for one batch."""
    if name == TRANSFORMER:
        torch.manual_seed(0)
        size = SIZES[SMALLER]
        batch = size.batch()
        return size.model(), lambda model: F.cross_entropy(model(batch.input), batch.target)
    model, inputs = model_and_inputs(name)
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    return model, lambda model: model(**inputs).loss


class Training:
    """Trains a model in half precision with fused AdamW, as a script for the contender would.

    Args:
        contender: one of `CONTENDERS`.
        model: float32 model.
        half: half type.
        loss_scale: amp's loss scale, or "dynamic".
    """

    def __init__(
        self, contender: str, model: nn.Module, half: torch.dtype, loss_scale: float | str = "dynamic"
    ) -> None:
        self.half, self.has_amp = half, contender != AUTOCAST
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), fused=True)
        if self.has_amp:
            self.model, self.optimizer = amp.initialize(
                self.model,
                self.optimizer,
                opt_level="O1",
                half_dtype=half,
                loss_scale=loss_scale,
                max_loss_scale=SCALE,
                fused_linear=contender == O1,
                verbosity=0,
            )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=half is torch.float16)

    def casts(self) -> contextlib.AbstractContextManager[object]:
        """Returns a block in which functions cast."""
        return contextlib.nullcontext() if self.has_amp else torch.autocast("cpu", dtype=self.half)

    def loss(self, loss_of: LossOf) -> Tensor:
        with self.casts():
            return loss_of(self.model)

    def step(self, loss_of: LossOf, micro_batches: int, phase: Callable[[str], object]) -> None:
        """Runs a step; calls ``phase`` with the name of each part before it begins."""
        for index in range(micro_batches):
            phase("forward")
            loss = self.loss(loss_of) / micro_batches
            phase("rest")
            if not self.has_amp:
                scaled = self.scaler.scale(loss)
                phase("backward")
                scaled.backward()
                continue
            with amp.scale_loss(loss, self.optimizer, delay_unscale=index < micro_batches - 1) as scaled:
                phase("backward")
                scaled.backward()
                phase("rest")
        phase("rest")
        if self.has_amp:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def training(
    contender: str, model: nn.Module, half: torch.dtype, loss_scale: float | str = "dynamic"
) -> Iterator[Training]:
    """Sets up a training, and restores torch at the end of the block."""
    try:
        yield Training(contender, model, half, loss_scale)
    finally:
        amp.deinitialize()


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# Nodes


def nodes(loss: Tensor) -> Counter[str]:
    """Returns the numbers of nodes of a graph by their names, without those that accumulate gradients."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen if node.name() != "torch::autograd::AccumulateGrad")


def table_of_nodes(models: Iterable[str], half: torch.dtype) -> str:
    rows = []
    for name in models:
        found = []
        for contender in CONTENDERS:
            model, loss_of = model_and_loss(name)
            with training(contender, model, half) as run:
                found.append(nodes(run.loss(loss_of)))
        autocast, without, o1 = (each.total() for each in found)
        rows.append([name, autocast, without, f"{o1} ({o1 / autocast:.2f})", found[-1][FUSED_NODE]])
    return table(["nodes", *CONTENDERS, "of them linear layers"], rows)


# Calls

SHAPES = {"matrix": (6, 8), "batch of sequences": (2, 3, 8)}
BIASES = {"no bias": False, "bias": True}
#: Contenders of `peers.py` that are those of this benchmark.
COUNTED = dict(zip((AUTOCAST, "ampatch O1 without fused_linear", "ampatch O1"), CONTENDERS, strict=True))
CALLS, WARMING_CALLS = 100, 20


def count(contender: str, cases: Sequence[Case], callgrind: Callgrind) -> None:
    """Counts the calls of a contender, in a process under callgrind; the cases name a shape and a bias."""
    torch.set_num_threads(1)
    for case in cases:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, BIASES[case.optimizer])
        half = getattr(torch, case.half)
        input = torch.randn(SHAPES[case.model], dtype=half).requires_grad_()
        gradient = torch.randn(SHAPES[case.model], dtype=half)
        # Under a dynamic scale amp would look at each backward pass outside a block of `amp.scale_loss`.
        with training(COUNTED[contender], layer, half, loss_scale=1.0) as run, run.casts():
            count_call(callgrind, case, layer, input, gradient)


def count_call(callgrind: Callgrind, case: Case, layer: nn.Linear, input: Tensor, gradient: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    leaves = [input, *layer.parameters()]

    def forward(times: int) -> None:
        for _ in range(times):
            F.linear(input, weight, bias)

    def backward(result: Tensor, times: int) -> None:
        for _ in range(times):
            for leaf in leaves:
                leaf.grad = None
            result.backward(gradient, retain_graph=True)

    result = F.linear(input, weight, bias)
    works: dict[str, Callable[[int], None]] = {"forward": forward, "backward": functools.partial(backward, result)}
    for phase, work in works.items():
        work(WARMING_CALLS)
        with callgrind.counting(warm_up=functools.partial(work, WARMING_CALLS)):
            work(CALLS)
            callgrind.write(case, phase)


def table_of_calls(directory: Path, half: str) -> str:
    cases = [Case(half, *each) for each in itertools.product(SHAPES, BIASES)]
    found = {}
    for file in run_within(__file__, list(COUNTED), cases, directory, ["--cache-sim=yes"]):
        counted = read(file)
        if counted is not None:
            contender, case, phase, counts = counted
            found[contender, case, phase] = round(counts.instructions / CALLS)
    rows = [
        [f"{case.model}, {case.optimizer}: {phase}", *(found[contender, case, phase] for contender in COUNTED)]
        for case, phase in itertools.product(cases, ("forward", "backward"))
    ]
    return table(["instructions", *COUNTED.values()], rows)


# Bytes

#: Operators that only allocate, and those that write a tensor without having read it.
_ALLOCATE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_ONLY_WRITE = ("aten::copy_", "aten::zero_", "aten::fill_")
_FILL = ("aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::full", "aten::zeros", "aten::ones")


def nbytes(tensor: Tensor) -> int:
    """Returns the bytes of memory that a tensor covers; expanded dimensions count once."""
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride or not size else 1
    return number


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class CountingBytes(ObservingMode):
    """Sums the bytes that operators read and write, by phase.

    It is also the observer of casts (`cast_observers.CastObserver`), because amp hides the casts of weights from modes.

    Attributes:
        phase: name of the phase that runs.
        found: bytes by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.found: Counter[str] = Counter()
        self._latest = 0  # address of the latest result; a reference would make autograd copy gradients

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found[self.phase] += self._bytes_of(func._schema, args, kwargs or {}, result)
        self._latest = result.data_ptr() if isinstance(result, Tensor) else 0
        return result

    def is_calling(self, _: object) -> bool:
        return True  # it watches no calls

    def cast(self, tensor: Tensor, make: Callable[[], Any]) -> Any:
        before = self.found.total()
        made = make()
        if self.found.total() == before:
            self.found[self.phase] += nbytes(tensor) + sum(map(nbytes, tensors_in(made)))
        return made

    def hit(self, kept: list[Tensor]) -> None:
        """Ignores casts that were made before."""

    def _bytes_of(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        aliases = [each.alias_info for each in schema.returns]
        if schema.name in _ALLOCATE or any(alias is not None and not alias.is_write for alias in aliases):
            return 0
        read, written = 0, sum(map(nbytes, tensors_in(result)))
        values = [*args, *(kwargs[each.name] for each in schema.arguments if each.name in kwargs)]
        names = [*schema.arguments[: len(args)], *(each for each in schema.arguments if each.name in kwargs)]
        for argument, value in zip(names, values, strict=True):
            size = sum(map(nbytes, tensors_in(value)))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if schema.name not in _FILL and not (is_written and schema.name in _ONLY_WRITE):
                read += size
            if is_written and not aliases:  # operators on lists return nothing
                written += size
        if schema.name == "aten::_to_copy" and args[0].data_ptr() == self._latest and _is_in_fused_node():
            return written - read  # a GPU writes the product in float32 at once, and never in half
        return read + written


def _is_in_fused_node() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == FUSED_NODE


def bytes_of_step(
    contender: str, model: nn.Module, loss_of: LossOf, half: torch.dtype, micro_batches: int
) -> Counter[str]:
    """Returns the bytes that operators read and write in the second step, by phase."""
    with training(contender, model, half) as run:
        run.step(loss_of, micro_batches, lambda _: None)
        mode = CountingBytes()
        cast_observers.observer = mode
        try:
            with mode:
                run.step(loss_of, micro_batches, functools.partial(setattr, mode, "phase"))
        finally:
            cast_observers.observer = None
    return mode.found


PHASES = ("forward", "backward", "rest")
MICRO_BATCHES = (1, 4)


def table_of_bytes(half: torch.dtype, width: int = 1280, layers: int = 6) -> str:
    """Returns the bytes per parameter of a network whose weights are nearly all that its operators read and write."""
    batch = torch.ones(8, width)
    parameters = sum(each.numel() for each in network("cpu", width, layers).parameters())
    rows = []
    for number, contender in itertools.product(MICRO_BATCHES, CONTENDERS):
        model = network("cpu", width, layers)
        found = bytes_of_step(contender, model, lambda run: run(batch).float().square().mean(), half, number)
        cells = [f"{each / parameters:.2f}" for each in (*(found[phase] for phase in PHASES), found.total())]
        rows.append([number, contender, *cells])
    return table(["micro-batches", "bytes per parameter", *PHASES, "whole step"], rows)


def table_of_bytes_of_models(models: Iterable[str], half: torch.dtype) -> str:
    """Returns the bytes of a step of one micro-batch, without unscaling, the optimizer and what follows."""
    rows = []
    for name in models:
        found = []
        for contender in CONTENDERS:
            counted = bytes_of_step(contender, *model_and_loss(name), half, 1)
            found.append((counted["forward"] + counted["backward"]) / 1e6)
        autocast, without, o1 = found
        rows.append([name, f"{autocast:.1f}", f"{without:.1f}", f"{o1:.1f} ({o1 / without:.2f})"])
    return table(["MB in forward and backward pass", *CONTENDERS], rows)


# Scales

_POWERS = range(64)


@dataclass(frozen=True)
class Gradients:
    """The gradients of one loss in float16, at any scale.

    Attributes:
        loss: unscaled loss, with its graph.
        parameters: the trained parameters by name.
        exact: their gradients in float32, unscaled.
    """

    loss: Tensor
    parameters: dict[str, nn.Parameter]
    exact: list[Tensor]

    def at(self, power: int) -> list[Tensor]:
        """Returns the gradients, scaled by a power of two."""
        return gradients(self.loss * 2.0**power, self.parameters.values())

    def overflowed(self, power: int) -> list[str]:
        """Returns the names of the parameters with an inf or a NaN in their gradients."""
        return [name for name, found in zip(self.parameters, self.at(power), strict=True) if not found.isfinite().all()]

    def highest(self) -> int:
        """Returns the largest power of two at which nothing overflows."""
        return next(power for power in _POWERS if self.overflowed(power)) - 1

    def flushed(self, power: int) -> float:
        """Returns the share of zeros among the elements that are not zero in float32."""
        pairs = list(zip(self.at(power), self.exact, strict=True))
        zeros = sum(int(((found == 0) & (exact != 0)).sum()) for found, exact in pairs)
        return zeros / sum(int((exact != 0).sum()) for _, exact in pairs)


def gradients(loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    parameters = list(parameters)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(one) if own is None else own for own, one in zip(found, parameters, strict=True)]


@contextlib.contextmanager
def gradients_of(name: str, contender: str) -> Iterator[Gradients]:
    """Runs the forward pass of a model in float32, and at O1 in float16, with the same weights and batch."""
    model, loss_of = model_and_loss(name)
    parameters = {key: each for key, each in model.named_parameters() if each.requires_grad}
    exact = gradients(loss_of(model), parameters.values())
    before = os.environ.get(PRODUCT)
    os.environ[PRODUCT] = "float32"  # `initialize` reads it
    try:
        with training(contender, model, torch.float16) as run:
            yield Gradients(run.loss(loss_of), parameters, exact)
    finally:
        os.environ.pop(PRODUCT)
        if before is not None:
            os.environ[PRODUCT] = before


def table_of_scales(models: Iterable[str]) -> str:
    head = [
        "float16",
        "contender",
        "highest scale",
        "flushed there",
        "at 2^16",
        "at 1",
        "overflow at twice the highest",
    ]
    rows = []
    for name, contender in itertools.product(models, (WITHOUT, O1)):
        with gradients_of(name, contender) as found:
            highest = found.highest()
            names = found.overflowed(highest + 1)
            shares = [f"{found.flushed(power):.4%}" for power in (highest, 16, 0)]
            which = f"{len(names)} of {len(found.parameters)} gradients, the last `{names[-1]}`"
        rows.append([name, contender, f"2^{highest}", *shares, which])
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("float16", "bfloat16"), default="float16", help="for nodes and bytes")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--models", metavar="NAME,...", help=f"of {','.join(SUBJECTS)} (default: all)")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        within(options.within, count)
        return
    only = chosen(parser, "only", options.only, SECTIONS)
    models = chosen(parser, "models", options.models, SUBJECTS)
    half = getattr(torch, options.half)
    kernels.select("torch")  # the compiled operators take addresses, which a dispatch mode does not see
    transformers.logging.set_verbosity_error()
    # TorchScript has compiled functions of DeBERTa, which are not cast.
    warnings.filterwarnings("ignore", message="TorchScript has compiled", category=amp.AmpWarning)
    if "nodes" in only:
        print(table_of_nodes(models, half), end="\n\n", flush=True)
    if "calls" in only:
        with prepared(parser) as directory:
            print(table_of_calls(directory, options.half), end="\n\n", flush=True)
    if "bytes" in only:
        print(table_of_bytes(half), table_of_bytes_of_models(models, half), sep="\n\n", end="\n\n", flush=True)
    if "scales" in only:
        print(table_of_scales(models))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Compares every operator of the extension on gradients with the same work in torch, and with a plain copy.

Run as `python benchmarks/unscale.py`, after `ampatch build`; `--device cpu` needs no GPU. One run measures all calls in
turn, and prints medians. It compares results first; an operator whose result differs from torch's is not timed. Asserts
nothing else.

On a GPU, device events measure the time. The host gets a head start, so that this is the device's time alone. The table
also has the host's time to launch the kernels. A training step takes the longer of the two. A slow call is measured in
fewer rounds, three at least: some of torch's ways would take most of the time.

With `--profile OPERATOR,...` it times nothing: it runs each operator once, after a copy, for a profiler such as
Nsight Compute (`ncu --profile-from-start off`).
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import on_device
import torch
from torch import Tensor

from ampatch.errors import KernelError
from ampatch.native import extension, extension_kernels, kernels, torch_kernels

Shapes = list[tuple[int, ...]]

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

# Not 1, for which torch's kernels do less work. After every call, untimed, gradients get their values back.
SCALE = 8.0
# Larger than any norm here, so that clipping multiplies by exactly 1: the same work, and the same bits in both.
MAX_NORM = 1e5

ALIGNMENT = 512  # bytes: alignment of torch's CUDA allocator
CPU_CACHE = 32 << 20  # assumed cache of a CPU, in bytes
CYCLES = 2e9 * 1.5  # of a GPU in one second, with a margin of a half
SECONDS = 0.06  # of a call's rounds on a GPU: 30 rounds of 2 ms


# Gradients


def resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]  # and weight and bias of its batch norm
            channels = 4 * width
    shapes += [(1000, 2048), (1000,)]
    assert (len(shapes), elements(shapes)) == (161, 25_557_032)
    return shapes


def transformer(layers: int, width: int = 1024, vocabulary: int = 50257, positions: int = 1024) -> Shapes:
    """Returns GPT-2's shapes; its output layer shares the embedding's weight."""
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(vocabulary, width), (positions, width), *[*norm, *attention, *norm, *feed_forward] * layers, *norm]
    assert layers != 24 or elements(shapes) == 354_823_168
    return shapes


def elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def cases(device: str, quick: bool) -> dict[str, tuple[str, Shapes]]:
    """Returns titles and shapes to measure, by name; those for the CPU are smaller, to save time and memory."""
    large, layers, width = (100_000_000, 24, 1024) if device == "cuda" else (50_000_000, 2, 1024)
    small = 10_000
    if quick:
        large, layers, width, small = 1_000_000, 1, 64, 1000
    return {
        "large": ("one large tensor", [(large,)]),
        "resnet": ("ResNet-50", resnet50()),
        "transformer": (f"a transformer of {layers} layers", transformer(layers, width)),
        "small": ("small tensors", [(100,)] * small),
        # Hardly any work, so that the cost of a launch shows: of one with few tensors, and of one with many.
        "1": ("one small tensor", [(100,)]),
        "1024": ("1,024 small tensors", [(100,)] * 1024),
    }


class Buffer:
    """Tensors in one block of memory, each aligned as an allocator would align it."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: str) -> None:
        step = ALIGNMENT // dtype.itemsize
        sizes = [math.prod(shape) for shape in shapes]
        *starts, end = itertools.accumulate((-(-size // step) * step for size in sizes), initial=0)
        self.flat = torch.empty(end, dtype=dtype, device=device)
        self.tensors = [
            self.flat.narrow(0, start, size).view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]


class Model:
    """Gradients and a loss scale. Each gradient has a float32 tensor: its master gradient, or its parameter."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: str) -> None:
        self.grads, self.wide = Buffer(shapes, dtype, device), Buffer(shapes, torch.float32, device)
        self.remainders = Buffer(shapes if dtype is torch.bfloat16 else [], torch.int16, device)
        self.remainders.flat.zero_()
        self.keys = list(range(len(shapes)))
        self.owners = [SimpleNamespace(grad=grad) for grad in self.grads.tensors]  # for clip_grad_norm_
        self.inv_scale = torch.tensor(1 / SCALE, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
        self.fingerprints = torch.zeros(len(shapes), dtype=torch.float64, device=device)
        self.scale = (
            torch.tensor(SCALE, device=device),
            torch.zeros((), dtype=torch.int32, device=device),  # clean steps
            torch.ones((), dtype=torch.int32, device=device),  # hysteresis
        )

    def take_gradients(self, other: Model) -> None:
        self.grads.flat.copy_(other.grads.flat)

    def state(self) -> list[Tensor]:
        bits = self.grads.flat.view(torch.int32 if self.grads.flat.dtype is torch.float32 else torch.int16)
        return [bits, self.wide.flat.view(torch.int32), self.remainders.flat, self.found_inf, *self.scale]


# Operations

Call = Callable[[Model], object]


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operator, and the same work with torch alone.

    Attributes:
        name: name of the operator, and the kind of call.
        ours: call of the operator.
        torchs: call that does the same with torch alone.
        bytes_per_element: bytes of device memory that `ours` reads and writes per element.
        torchs_bytes: bytes of device memory that `torchs` reads and writes per element.
        same_bits: True if both must leave the same bits.
        roundings: number of roundings, of the numbers before and after, by which float32 tensors may differ.
    """

    name: str
    ours: Call
    torchs: Call
    bytes_per_element: int = 0
    torchs_bytes: int = 0
    same_bits: bool = True
    roundings: int = 0

    @property
    def operator(self) -> str:
        """Returns the name without the kind of call."""
        return self.name.partition(",")[0]


def unscale(operators: ModuleType) -> Call:
    return lambda model: operators.unscale_(model.grads.tensors, model.inv_scale, model.found_inf)


def unscale_into(operators: ModuleType, name: str, back: bool) -> Call:
    call = getattr(operators, name)
    return lambda model: call(model.grads.tensors, model.wide.tensors, model.inv_scale, model.found_inf, back)


def copy_to_half(operators: ModuleType) -> Call:
    return lambda model: operators.copy_to_half(model.wide.tensors, model.grads.tensors)


def copy_to_half_grads(operators: ModuleType) -> Call:
    return lambda model: operators.copy_to_half_grads(model.wide.tensors, model.grads.tensors)


def split(operators: ModuleType) -> Call:
    return lambda model: operators.split(model.wide.tensors, model.grads.tensors, model.remainders.tensors)


def join(operators: ModuleType) -> Call:
    return lambda model: operators.join(model.grads.tensors, model.remainders.tensors, model.wide.tensors)


def round_stochastically(operators: ModuleType) -> Call:
    return lambda model: operators.round_stochastically(model.wide.tensors, model.grads.tensors, model.keys)


def fingerprint(operators: ModuleType) -> Call:
    return lambda model: operators.fingerprint(model.grads.tensors, model.fingerprints)


def copy_edits(operators: ModuleType, was_written: bool) -> Call:
    def call(model: Model) -> None:
        before = model.fingerprints
        operators.copy_edits(model.grads.tensors, model.wide.tensors, before, before + was_written, True)

    return call


def update_scale(operators: ModuleType) -> Call:
    return lambda model: operators.update_scale(*model.scale, model.found_inf, 2.0, 0.5, 2000, 1, 1.0, 2.0**24)


def norm(model: Model, operators: ModuleType = extension_kernels) -> None:
    operators.found_inf_norm(model.grads.tensors, model.inv_scale, model.found_inf, model.sum_of_squares)


def clipping_factor(model: Model) -> Tensor:
    """Returns the factor that unscales and clips the gradients; resets the sum of squares to zero."""
    norm(model)
    clip = (MAX_NORM / (model.sum_of_squares.sqrt() + 1e-6)).clamp(max=1.0)
    model.sum_of_squares.zero_()
    return (clip * model.inv_scale).to(torch.float32)


def step(model: Model, grad_scale: Tensor | None) -> None:
    """Runs a step of torch's fused SGD; if given a ``grad_scale``, it also writes the unscaled gradients."""
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1e-6, "dampening": 0.0, "nesterov": False}
    flags = {"maximize": False, "is_first_step": False, "grad_scale": grad_scale, "found_inf": model.found_inf}
    torch._fused_sgd_(model.wide.tensors, model.grads.tensors, [], **settings, **flags)


def torchs_norm(model: Model) -> None:
    torch_kernels.unscale_(model.grads.tensors, model.inv_scale, model.found_inf)
    torch.nn.utils.get_total_norm(model.grads.tensors)


def torchs_clip(model: Model) -> None:
    torch_kernels.unscale_(model.grads.tensors, model.inv_scale, model.found_inf)
    torch.nn.utils.clip_grad_norm_(model.owners, MAX_NORM)


def clip_and_multiply(model: Model) -> None:
    kernels.multiply_(model.grads.tensors, clipping_factor(model))


def clip_and_step(model: Model) -> None:
    step(model, clipping_factor(model).reciprocal())


def torchs_clip_and_step(model: Model) -> None:
    torchs_clip(model)
    step(model, None)


def operations(dtype: torch.dtype) -> Iterator[Operation]:
    """Yields the operations on gradients of a dtype. Byte counts are calculated: reads and writes of each kernel."""
    n, w = dtype.itemsize, torch.float32.itemsize
    yield Operation("unscale_", unscale(extension_kernels), unscale(torch_kernels), 2 * n, 2 * n)
    if dtype is not torch.float32:
        # Bytes of torch's: a copy to float32 (n + w) and check-and-unscale there (2w). To add: an addition to the
        # master gradient (3w). To write back: a copy (w + n).
        for name, read, added in (("unscale_copy", 0, 0), ("unscale_add", w, 3 * w)):
            for back in (False, True):
                ours, torchs = (unscale_into(each, name, back) for each in (extension_kernels, torch_kernels))
                size, torchs_size = n + read + w, n + 3 * w + added
                name_here = f"{name}, write back" if back else name
                yield Operation(name_here, ours, torchs, size + back * n, torchs_size + back * (w + n))
        yield Operation("copy_to_half", copy_to_half(extension_kernels), copy_to_half(torch_kernels), w + n, w + n)
        # torch's works in chunks that a cache may hold; counts only reads and writes of the tensors themselves.
        yield Operation(
            "copy_to_half_grads", copy_to_half_grads(extension_kernels), copy_to_half_grads(torch_kernels), w + n, w + n
        )
        if dtype is torch.bfloat16:
            for make, size in ((split, w + 2 * n), (join, w + 2 * n), (round_stochastically, w + n)):
                yield Operation(make.__name__, make(extension_kernels), make(torch_kernels), size, size)
        yield Operation(
            "fingerprint", fingerprint(extension_kernels), fingerprint(torch_kernels), n, n, same_bits=False
        )
        for name, is_written, size in (
            ("copy_edits, nothing written", False, 0),
            ("copy_edits, all written", True, n + 2 * w),  # a master keeps its bits where it rounds to the half element
        ):
            ours, torchs = (copy_edits(each, is_written) for each in (extension_kernels, torch_kernels))
            yield Operation(name, ours, torchs, size, n + 2 * w)
    # Bytes of torch's: check-and-unscale (2n), the norm (n), and for clipping a multiplication (2n).
    yield Operation("found_inf_norm", norm, torchs_norm, n, 3 * n, same_bits=False)
    # Does not count n more: a fused step that unscales also writes the gradients. The last row counts them.
    yield Operation("clip, before such a step", clipping_factor, torchs_clip, n, 5 * n, same_bits=False)
    yield Operation("clip, multiply_", clip_and_multiply, torchs_clip, n + 2 * n, 5 * n)
    if dtype is torch.float32:
        # The step reads parameter and gradient, and writes the parameter (3n); if it unscales, the gradient too (n).
        # With and without `grad_scale`, torch runs two kernels, and in each the compiler chooses where it contracts
        # a * b + c. On an H200 both left the same gradients, and few parameters differed.
        yield Operation("clip, fused SGD", clip_and_step, torchs_clip_and_step, n + 4 * n, 5 * n + 3 * n, roundings=2)
        yield Operation("update_scale", update_scale(extension_kernels), update_scale(torch_kernels))


def agree(operation: Operation, pristine: Model, models: Iterable[Model]) -> bool:
    """Returns True if the operator and torch leave the same result."""
    results = []
    for model, call in zip(models, (operation.ours, operation.torchs), strict=True):
        for tensor, first in zip(model.state(), pristine.state(), strict=True):
            tensor.copy_(first)
        call(model)
        results.append(model.state())
    if not operation.same_bits:
        return norms_agree(pristine)
    (ours, our_wide, *our_rest), (torchs, torchs_wide, *torchs_rest) = results
    before, mine, theirs = pristine.wide.flat, our_wide.view(torch.float32), torchs_wide.view(torch.float32)
    # Where a parameter and its update cancel, a rounding of theirs is many of the result's.
    room = (before.abs() + mine.abs()) * (operation.roundings * 2.0**-24)
    wide_agree = torch.equal(our_wide, torchs_wide) or bool((mine - theirs).abs().le(room).all())
    return wide_agree and all(map(torch.equal, [ours, *our_rest], [torchs, *torchs_rest]))


def norms_agree(model: Model) -> bool:
    """Returns True if the extension's norm is close to torch's in float64."""
    sums = []
    for operators in (extension_kernels, torch_kernels):
        norm(model, operators)
        sums.append(model.sum_of_squares.item())
        model.sum_of_squares.zero_()
    return math.isclose(*sums, rel_tol=1e-5) and model.found_inf.item() == 0


# Time


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians of a call: seconds until the work is done; on a GPU also the host's seconds and the kernel launches."""

    seconds: float
    host_seconds: float | None = None
    launches: int | None = None


def copy(model: Model) -> None:
    """Copies one half of a buffer onto the other: the speed limit. Reads and writes as many bytes as the buffer has."""
    half = len(model.wide.flat) // 2
    model.wide.flat[half : 2 * half].copy_(model.wide.flat[:half])


def measured(calls: list[Call], pristine: Model, ring: list[Model], rounds: int) -> list[Timed]:
    """Times calls in turn, each on the least recently used model, which no cache holds any more."""
    is_cuda = pristine.inv_scale.is_cuda
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    models = itertools.cycle(ring)
    for number in range(rounds + 1):  # the first round warms up
        for call, found in zip(calls, times, strict=True):
            if is_cuda and number > 3 and sum(map(sum, found[1:])) > SECONDS:
                continue
            model = next(models)
            if is_cuda:
                found.append(seconds_on_gpu(call, model, head_start=found[-1][1] if found else 0.01))
            else:
                found.append((seconds(call, model), 0.0))
            model.take_gradients(pristine)
    medians = [tuple(map(statistics.median, zip(*found[1:], strict=True))) for found in times]
    if not is_cuda:
        return [Timed(whole) for whole, _ in medians]
    restore = functools.partial(model.take_gradients, pristine)
    works = [work for call in calls for work in (functools.partial(call, model), restore)]
    counts = on_device.counts(works, "cuda")[::2]
    return [Timed(*median, count.launches) for median, count in zip(medians, counts, strict=True)]


def seconds(call: Call, model: Model) -> float:
    start = time.perf_counter()
    call(model)
    return time.perf_counter() - start


def seconds_on_gpu(call: Call, model: Model, head_start: float) -> tuple[float, float]:
    """Returns the seconds of the device and those of the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Bounded: a host that waits for a full stream queue would otherwise need a longer head start each time.
    torch.cuda._sleep(int(min(head_start, 0.1) * CYCLES))
    start.record()
    host = seconds(call, model)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000, host


# Tables

Row = dict[str, Any]

# Key, heading, width, factor, format.
COLUMNS = (
    ("bytes_per_element", "bytes", 6, 1, "d"),
    ("torch_bytes_per_element", "torch", 6, 1, "d"),
    ("seconds", "ms", 10, 1e3, ".4f"),
    ("torch_seconds", "torch", 10, 1e3, ".4f"),
    ("bytes_per_second", "GB/s", 8, 1e-9, ".1f"),
    ("fraction_of_copy", "of copy", 8, 1, ".0%"),
    ("launches", "launches", 9, 1, "d"),
    ("torch_launches", "torch", 6, 1, "d"),
    ("host_seconds", "host ms", 9, 1e3, ".3f"),
    ("torch_host_seconds", "torch", 9, 1e3, ".3f"),
    ("ratio", "x torch", 8, 1, ".2f"),
)
HEADING = f"{'operator':26}{'dtype':9}" + "".join(f"{heading:>{width}}" for _, heading, width, *_ in COLUMNS)


def rows(names: list[str], shapes: Shapes, dtype: torch.dtype, device: str, rounds: int) -> Iterator[Row]:
    """Measures a copy, and the named operations on models with the given shapes and dtype of gradients."""
    size = elements(shapes)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else CPU_CACHE
    ring_size = min(64, max(2, math.ceil(4 * cache / (size * (dtype.itemsize + 4)))))
    pristine, *ring = (Model(shapes, dtype, device) for _ in range(1 + ring_size))
    for buffer in (pristine.grads, pristine.wide):
        buffer.flat.normal_()
    for model in ring:
        model.wide.flat.copy_(pristine.wide.flat)
    timed = []
    for operation in (each for each in operations(dtype) if each.operator in names):
        if agree(operation, pristine, ring[:2]):
            timed.append(operation)
        else:
            yield {"operator": operation.name, "dtype": DTYPES[dtype], "differs": True}
    for model in ring:
        model.take_gradients(pristine)
    calls = [copy, *(call for operation in timed for call in (operation.ours, operation.torchs))]
    limit, *times = measured(calls, pristine, ring, rounds)
    copied = pristine.wide.flat.nbytes / limit.seconds
    yield {"operator": "copy_", "dtype": "float32", **figures(8, limit), "bytes_per_second": copied}
    for operation, ours, torchs in zip(timed, times[::2], times[1::2], strict=True):
        speed = operation.bytes_per_element * size / ours.seconds
        yield {
            "operator": operation.name,
            "dtype": DTYPES[dtype],
            **figures(operation.bytes_per_element, ours),
            **{f"torch_{key}": value for key, value in figures(operation.torchs_bytes, torchs).items()},
            "bytes_per_second": speed or None,
            "fraction_of_copy": speed / copied or None,
            "ratio": torchs.seconds / ours.seconds,
        }


def profile(names: list[str], shapes: Shapes, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Runs a copy and the named operators once each, where a profiler sees only them; yields their names in order."""
    model = Model(shapes, dtype, device)
    calls = {operation.name: operation.ours for operation in operations(dtype) if operation.operator in names}
    chosen = {"copy_": copy, **calls}
    for call in chosen.values():  # loads the kernels
        call(model)
    on_device.finish(device)
    if device == "cuda":
        torch.cuda.profiler.start()
    for name, call in chosen.items():
        call(model)
        yield name
    on_device.finish(device)
    if device == "cuda":
        torch.cuda.profiler.stop()


def figures(size: int, timed: Timed) -> Row:
    return {"bytes_per_element": size or None, **asdict(timed)}


def line(row: Row) -> str:
    cells = ((row.get(key), width, factor, how) for key, _, width, factor, how in COLUMNS)
    return f"{row['operator']:26}{row['dtype']:9}" + (
        "  DIFFERS FROM TORCH'S, and is not timed"
        if "differs" in row
        else "".join(f"{'-' if v is None else format(v * factor, how):>{width}}" for v, width, factor, how in cells)
    )


def load(device: str) -> extension.Library:
    library = extension.find()
    if library is None or (device == "cuda" and not library.serves(torch.cuda.get_device_capability())):
        sys.exit(f"There is no compiled extension to measure: type `ampatch build --device {device}`.")
    try:
        extension.load(library)
    except KernelError as error:
        sys.exit(f"The compiled extension cannot be measured: {error}")
    return library


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns the type of an argument that lists names, each of which must be known."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; expected some of {','.join(known)}")
        return text.split(",")

    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every_case = list(cases("cpu", True))
    every_operator = list(dict.fromkeys(each.operator for dtype in DTYPES for each in operations(dtype)))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU (default: 1)")
    parser.add_argument("--quick", action="store_true", help="fewer elements, and fewer rounds")
    parser.add_argument("--only", type=some_of(every_case), default=every_case, metavar="CASE,...")
    parser.add_argument("--dtypes", type=some_of(DTYPES.values()), default=list(DTYPES.values()), metavar="DTYPE,...")
    parser.add_argument("--operators", type=some_of(every_operator), default=every_operator, metavar="OPERATOR,...")
    parser.add_argument("--profile", type=some_of(every_operator), metavar="OPERATOR,...", help="run these once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    options = parser.parse_args()
    if options.threads < 1:
        parser.error(f"argument --threads: {options.threads} is not 1 or more")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no directory {options.json.parent}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here")
    return options


def main() -> int:
    options = arguments()
    device: str = options.device
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.init()  # so that `find` looks for kernels for this GPU
        name, rounds = torch.cuda.get_device_name(), 30
    else:
        name, rounds = f"{torch.backends.cpu.get_cpu_capability()} CPU, {torch.get_num_threads()} threads", 5
    library = load(device)
    title = f"{name}; torch {torch.__version__}; {library.path}, built by {library.compiler}"
    print(title)

    gc.disable()  # a collection would traverse a million tensors during a timed call
    dtypes = [dtype for dtype, name in DTYPES.items() if name in options.dtypes]
    chosen = [each for name, each in cases(device, options.quick).items() if name in options.only]
    result: list[Row] = []
    for case, shapes in chosen:
        print(f"\n{case}: tensors {len(shapes):,}, elements {elements(shapes):,}")
        if options.profile is not None:
            for dtype in dtypes:
                print(DTYPES[dtype], *profile(options.profile, shapes, dtype, device), sep="\n  ")
            continue
        print(HEADING)
        for dtype in dtypes:
            for found in rows(options.operators, shapes, dtype, device, 3 if options.quick else rounds):
                print(line(found), flush=True)
                result.append({"case": case, **found})
        if options.json:  # after each case: on a lent machine, time may run out
            options.json.write_text(json.dumps({"title": title, "rows": result}, indent=2) + "\n", encoding="utf-8")
    return int(any("differs" in each for each in result))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())

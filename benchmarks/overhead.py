"""What ampatch costs apart from the arithmetic: importing it, patching torch, and one cast call.

Run as `python benchmarks/overhead.py`. What is compared is measured in turn in one run, since machines differ
from minute to minute; the medians are printed. Nothing here is asserted.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from ampatch import amp

ROUNDS = 15

# A process of its own for each: a module is imported once.
IMPORTS = {
    "import torch": "import torch",
    "import torch, then ampatch": "import torch; from ampatch import amp",
}
# The first initialize of a process reads the lists too, and imports what torch.compile would import later. Most of it
# comes with the first optimizer, so that a program that trains has paid for it before.
FIRST_INITIALIZE = """
import time, torch
from ampatch import amp
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
start = time.perf_counter()
amp.initialize(model, optimizer, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)
print(time.perf_counter() - start)
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def imports() -> None:
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(ROUNDS):
        for name, code in IMPORTS.items():
            times[name].append(seconds(lambda code=code: python(code)))
    plain, ours = (statistics.median(found) for found in times.values())
    print(f"{'import torch':44} {plain * 1000:9.1f} ms")
    print(f"{'importing ampatch adds':44} {(ours - plain) * 1000:9.1f} ms")


def patching() -> None:
    first = statistics.median(float(python(FIRST_INITIALIZE)) for _ in range(5))
    print(f"{'first initialize of a process, lists read':44} {first * 1000:9.1f} ms")
    model = nn.Linear(1, 1)
    on, off = [], []
    for _ in range(ROUNDS):
        on.append(
            seconds(lambda: amp.initialize(model, opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)),
        )
        off.append(seconds(amp.deinitialize))
    print(f"{'initialize, everything patched':44} {statistics.median(on) * 1000:9.1f} ms")
    print(f"{'deinitialize, everything restored':44} {statistics.median(off) * 1000:9.1f} ms")


def calls() -> None:
    """Nanoseconds of a call on tensors so small that the arithmetic hardly counts."""
    half = torch.bfloat16
    x, layer = torch.ones(1, 4, dtype=half), nn.Linear(4, 4)
    weight, bias = (tensor.detach().to(half).requires_grad_() for tensor in (layer.weight, layer.bias))

    def time_of(call: str, **names: object) -> float:
        timer = Timer(call, globals={"F": F, "torch": torch, **names})
        return timer.blocked_autorange(min_run_time=0.3).median * 1e9

    plain = time_of("F.linear(x, w, b)", x=x, w=weight, b=bias)
    with torch.autocast("cpu", dtype=half):
        autocast = time_of("F.linear(x, w, b)", x=x, w=layer.weight, b=layer.bias)
    reference = time_of("F.gelu(x)", x=x)
    amp.initialize(layer, opt_level="O1", half_dtype=half, verbosity=0)
    try:
        cached = time_of("F.linear(x, w, b)", x=x, w=layer.weight, b=layer.bias)
        nothing = time_of("F.linear(x, w, b)", x=x, w=weight, b=bias)
        unlisted = time_of("F.gelu(x)", x=x)
    finally:
        amp.deinitialize()
    print(f"{'F.linear in half, unpatched':44} {plain:9.0f} ns")
    print(f"{'  under torch.autocast, two cached weights':44} {autocast - plain:+9.0f} ns")
    print(f"{'  under ampatch O1, two cached weights':44} {cached - plain:+9.0f} ns")
    print(f"{'  under ampatch O1, nothing to cast':44} {nothing - plain:+9.0f} ns")
    print(f"{'F.gelu, which is in no list':44} {unlisted - reference:+9.0f} ns")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    imports()
    patching()
    calls()

"""Measures ampatch's startup costs: importing it, and patching torch. For calls see `eager_overhead.py`.

Run as `python benchmarks/overhead.py`. One run measures all contenders in turn, since the speed of machines varies from
minute to minute. Prints medians, and asserts nothing.
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

from ampatch import amp

ROUNDS = 15

# Each runs in its own process, since a process imports a module only once.
IMPORTS = {
    "import torch": "import torch",
    "import torch, then ampatch": "import torch; from ampatch import amp",
}
# The first initialize of a process also reads the lists, and imports modules that torch.compile would import later. The
# first optimizer imports most of these, so here, as in a program that trains, they do not count.
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    imports()
    patching()

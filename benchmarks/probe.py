"""Says in half a minute what a machine has, and how torch behaves there where ampatch depends on it: a line for each.

Run as `python benchmarks/probe.py`; `--device cpu` goes through the same lines without a GPU. A line that says "raised"
is a finding, not a failure: the probe reports all of them, and its exit status is 0. Measures no time. Changes nothing
outside of its process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import on_device
import torch
from torch import nn

from ampatch import amp

#: What the package, its tests and its benchmarks need beside torch.
PACKAGES = ("numpy", "wrapt", "PyYAML", "filelock", "tqdm", "pytest", "pytest-xdist", "hypothesis")
#: What only some tests need: they are skipped without it.
OPTIONAL = ("transformers", "skorch", "onnx", "onnxscript")
TOOLS = ("nvcc", "ninja", "c++", "ncu", "compute-sanitizer")

# The machine


def header() -> str:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    return str(path) if path.is_file() else f"there is no {path}, so calls of patched functions stay in Python"


def packages() -> Iterator[str]:
    missing = []
    for name in (*PACKAGES, *OPTIONAL):
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield f"missing: {', '.join(missing) or 'nothing'}"


def warnings_on_import() -> str:
    command = [sys.executable, "-W", "always", "-c", "import torch, ampatch.amp, torch._inductor, torch._dynamo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " / ".join(done.stderr.split("\n")).strip(" /") or "none"


def machine(device: str) -> Iterator[tuple[str, str]]:
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, on {on_device.name_of(device)}"
    yield "processors", f"{len(os.sched_getaffinity(0))} {platform.machine()}"
    yield "Python.h", header()
    yield "PATH", os.environ.get("PATH", "")
    for tool in TOOLS:
        yield tool, shutil.which(tool) or "missing"
    yield "packages", ", ".join(packages())
    yield "warnings on import", warnings_on_import()


# How torch behaves

Check = Callable[[str], object]


def check_and_unscale(device: str) -> str:
    grads, one, found_inf = [torch.ones(8, device=device, dtype=torch.bfloat16)], *torch.ones(2, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)
    return "runs"


def read_early(device: str) -> str:
    value = torch.zeros((), device=device)
    keep_busy(device)
    value.fill_(1)
    copy = value.to("cpu", non_blocking=True)
    early = copy.item()
    on_device.finish(device)
    return f"the host read {early:g} before the device was done, {copy.item():g} after"


def recorded_on(device: str) -> str:
    if device == "cpu" or torch.cuda.device_count() < 2:
        return "needs two GPUs"
    with torch.cuda.device(1):
        keep_busy(device)
    event = torch.Event("cuda:1")
    event.record()
    return f"passed before the device was done: {event.query()}"


def pinned_under_a_default_device(device: str) -> str:
    with torch.device(device):
        return f"pinned: {torch.zeros((), pin_memory=True).is_pinned()}"


def capturable_outside_of_a_capture(device: str) -> str:
    parameter = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.Adam([parameter], capturable=device == "cuda")
    parameter.grad = torch.ones_like(parameter)
    return warned(optimizer.step)


def graphed_with_hooks(device: str) -> str:
    model = nn.Linear(8, 8).to(device)
    model.register_forward_hook(lambda *_: None)
    torch.cuda.make_graphed_callables(model, (torch.ones(2, 8, device=device, requires_grad=True),))
    return "accepted"


def recurrent_at_o1(device: str) -> str:
    model = nn.LSTM(8, 8, 2).to(device)
    amp.initialize(model, half_dtype=torch.float16, verbosity=0)
    return warned(lambda: model(torch.ones(3, 2, 8, device=device)))


def clipped_at_o2(device: str) -> str:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp.initialize(model, optimizer, opt_level="O2", half_dtype=torch.float16, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 8, device=device)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    found = on_device.counts([lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)], device)[0]
    return f"32 parameters: {found.waits} waits, {found.launches} launches"


def half_by_a_scalar(device: str) -> str:
    grads = [torch.ones(8, dtype=torch.float16, device=device) for _ in range(32)]
    scalar = torch.ones((), device=device)
    return f"32 tensors: {on_device.counts([lambda: torch._foreach_mul_(grads, scalar)], device)[0].launches} launches"


def casts_of_another_stream(device: str) -> str:
    """Trains on one stream, then on another, as warm-up and capture of a graph do."""
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 8, device=device)).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    def on_two_streams() -> None:
        with stream_of_its_own(device):
            step()
        step()

    return warned(on_two_streams)


CHECKS: dict[str, Check] = {
    "1 bfloat16 check-and-unscale": check_and_unscale,
    "2 copy to the CPU that does not block": read_early,
    "3 event of a device that is not the current one": recorded_on,
    "4 pinned memory under torch.device": pinned_under_a_default_device,
    "5 capturable=True outside of a capture": capturable_outside_of_a_capture,
    "6 make_graphed_callables of a module with hooks": graphed_with_hooks,
    "7 LSTM at O1": recurrent_at_o1,
    "9 clipping model.parameters() at O2": clipped_at_o2,
    "10 _foreach_mul_ of half tensors by a float32 scalar": half_by_a_scalar,
    "a step on one stream, then on another": casts_of_another_stream,
}


def behaviour(device: str) -> Iterator[tuple[str, str]]:
    for name, check in CHECKS.items():
        try:
            found = str(check(device))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            amp.deinitialize()
        yield name, found


# Tools


def keep_busy(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(200_000_000)


def stream_of_its_own(device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def warned(work: Callable[[], object]) -> str:
    """Returns the warnings that some work gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return " / ".join(str(each.message)[:150] for each in found) or "no warnings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    for name, found in (*machine(device), *behaviour(device)):
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()

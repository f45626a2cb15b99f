"""Times linear layers with float8 products beside torch.autocast in bfloat16: forward and backward, in one run.

Run as `python benchmarks/float8.py [--device cuda] [--quick]` on a GPU with float8 products (H100, H200 and later); it
takes less than three minutes. Prints a Markdown table, as in docs/benchmarks.md: the time of each contender over that
of autocast, the least of several, measured in turn. On a CPU, or with `--quick`, it only shows that it runs. Asserts
nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from on_device import finish
from torch import Tensor, nn

from ampatch import amp

ROUNDS, CALLS = 5, 10
LAYERS = 4
ROW_SCALES = {
    "name": "linear",
    "format": {"name": "float8_e4m3", "products": "device", "scale": "row"},
    "grad": {"name": "float8_e5m2", "scale": "row"},
}
#: The arguments of ``amp.initialize``; None: torch.autocast.
CONTENDERS: dict[str, dict[str, object] | None] = {
    "torch.autocast": None,
    "O5": {"opt_level": "O5"},
    "O6": {"opt_level": "O6"},
    "O5, scales by row": {"opt_level": "O5", "cast_lists": {"whitelist": {"torch.nn.functional": [ROW_SCALES]}}},
}


def step_of(options: dict[str, object] | None, size: int, rows: int, device: str, compiled: bool) -> Callable[[], None]:
    """Returns a forward and backward pass of linear layers without a bias; amp stays set up."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(LAYERS))).to(device)
    given = torch.randn(rows, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, size, device=device, dtype=torch.bfloat16)
    if options is not None:
        model = amp.initialize(model, verbosity=0, cast_model_outputs="bfloat16", **options)
    call: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=options is None):
            out = call(given)
        out.backward(grad)

    return step


def milliseconds(step: Callable[[], None], device: str, calls: int) -> float:
    """Returns the time of one step, the mean of several."""
    finish(device)
    began = time.perf_counter()
    for _ in range(calls):
        step()
    finish(device)
    return (time.perf_counter() - began) / calls * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    chosen = parser.parse_args()
    device = chosen.device
    is_small = chosen.quick or device == "cpu"
    cases = [(64, 64)] if is_small else [(4096, 4096), (4096, 16384), (2048, 8192)]
    rounds, calls = (1, 1) if is_small else (ROUNDS, CALLS)
    print(f"| {LAYERS} linear layers | torch.autocast, ms | " + " | ".join([*CONTENDERS][1:]) + " |")
    print("|---" * (len(CONTENDERS) + 1) + "|")
    for size, rows in cases:
        for compiled in (False, True):
            best = dict.fromkeys(CONTENDERS, float("inf"))
            for _ in range(rounds):
                for name, options in CONTENDERS.items():
                    step = step_of(options, size, rows, device, compiled)
                    step()
                    step()
                    best[name] = min(best[name], milliseconds(step, device, calls))
                    amp.deinitialize()
            first, *others = best.values()
            ratios = " | ".join(f"{first / each:.2f} times as fast" for each in others)
            how = "compiled" if compiled else "eager"
            print(f"| {rows} rows of {size}, {how} | {first:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()

"""Times functions that are emulated in a number format beside the same functions in float32, forward and backward.

Run as `python benchmarks/formats.py`. Prints a Markdown table, as in docs/benchmarks.md: the processor time of an
emulated call over that of the plain call, each the least of several, measured in turn. Asserts nothing.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampatch import amp

FORMATS = ["e3m4", "float8_e4m3", "{name: float8_e4m3, scale: row}", "float4_e2m1"]
ROUNDS = 7


def cases() -> dict[str, list[Tensor]]:
    """Returns the arguments of functions, by what the table calls them; that begins with the function's name."""
    torch.manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    heads = [leaf(8, 8, 128, 64) for _ in range(3)]
    return {
        "linear, 1024 rows of 1024 to 1024": [leaf(1024, 1024), leaf(1024, 1024), leaf(1024)],
        "linear, 4096 rows of 256 to 256": [leaf(4096, 256), leaf(256, 256), leaf(256)],
        "conv2d, 8 x 64 x 32 x 32, 3 x 3": [leaf(8, 64, 32, 32), leaf(64, 64, 3, 3), leaf(64)],
        "scaled_dot_product_attention, 8 x 8 x 128 x 64": heads,
        "matmul, 64 x 128 x 128": [leaf(64, 128, 128), leaf(64, 128, 128)],
    }


def seconds(name: str, arguments: list[Tensor]) -> float:
    """Returns the processor time of one call and its backward pass."""
    function = getattr(torch if name == "matmul" else F, name)
    begin = time.process_time()
    function(*arguments).sum().backward()
    return time.process_time() - begin


def measured(name: str, arguments: list[Tensor], format: str) -> float:
    """Returns the least time of emulated calls over that of plain calls, made in turn."""
    namespace = "torch" if name == "matmul" else "torch.nn.functional"
    row: object = format
    if format.startswith("{"):
        row = dict(pair.split(": ") for pair in format.strip("{}").split(", "))
    lists = {"blacklist": {namespace: [{"name": name, "format": row}]}}
    amp.initialize(nn.Linear(1, 1), opt_level="O4", cast_lists=lists, verbosity=0)
    plain, emulated = [], []
    for _ in range(ROUNDS):
        emulated.append(seconds(name, arguments))
        with amp.disable_casts():
            plain.append(seconds(name, arguments))
    amp.deinitialize()
    return min(emulated) / min(plain)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread of a CPU.\n")
    print(f"| | {' | '.join(f'`{format}`' for format in FORMATS)} |\n|---|{'---|' * len(FORMATS)}")
    for told, arguments in cases().items():
        name = told.partition(",")[0]
        ratios = [measured(name, arguments, format) for format in FORMATS]
        print(f"| {told} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |", flush=True)


if __name__ == "__main__":
    main()

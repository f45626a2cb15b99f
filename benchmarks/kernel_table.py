"""Prints what nvcc made of the CUDA kernels: `python benchmarks/kernel_table.py [--arch 90] [LIBRARY]`.

Disassembles a compiled library, by default the one that amp would load. Needs cuobjdump and nvdisasm, from CUDA's
toolkit or `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`. Prints one line for each kernel and dtype.
`tests/native/test_extension_build.py` checks the same properties. Needs no GPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampatch.native import extension

_PLACES = (Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin", "/usr/local/cuda/bin")
_PATH = os.pathsep.join(map(str, (*_PLACES, os.environ.get("PATH", os.defpath))))

_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}

# How the code for each dtype unpacks or packs elements; nothing of this is in the code for float32.
_MARKS = {
    "bfloat16": r"\.BF16|IMAD\.U32 .*, 0x10000,|PRMT R\d+, RZ, 0x(?:5410|7610),",
    "float16": r"HADD2\.F32|F2FP\.(?:F16|PACK_AB)",
}


@dataclass(frozen=True)
class Instruction:
    """A line of machine code, without its predicate."""

    address: int
    opcode: str
    operands: str

    @property
    def is_load(self) -> bool:
        return self.opcode.startswith("LDG.")

    @property
    def is_store(self) -> bool:
        return self.opcode.startswith("STG.")

    @property
    def bits(self) -> int:
        """Bits that a load or store moves for each thread."""
        return next((_BITS[part] for part in self.opcode.split(".") if part in _BITS), 32)

    @property
    def registers(self) -> set[int]:
        """The registers that the text names."""
        return {int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)}

    @property
    def loaded(self) -> set[int]:
        """The registers that a load fills, which follow the one that is named first."""
        first = re.match(r"R(\d+)\b", self.operands)
        return set(range(int(first[1]), int(first[1]) + max(1, self.bits // 32))) if self.is_load and first else set()


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop, in the order of their addresses."""

    instructions: tuple[Instruction, ...]

    @property
    def loads(self) -> Counter[int]:
        """How many loads there are of how many bits."""
        return Counter(each.bits for each in self.instructions if each.is_load)

    @property
    def stores(self) -> set[int]:
        """The numbers of bits that are stored at a time."""
        return {each.bits for each in self.instructions if each.is_store}

    @property
    def in_flight(self) -> int:
        """Number of loads before the first store, and before the first instruction that waits for one of them."""
        pending: set[int] = set()
        count = 0
        for each in self.instructions:
            if each.is_store or each.registers & pending:
                break
            pending |= each.loaded
            count += each.is_load
        return count

    @property
    def dtype(self) -> str:
        """The dtype of the narrow elements."""
        text = "\n".join(f"{each.opcode} {each.operands}" for each in self.instructions)
        return next((dtype for dtype, marks in _MARKS.items() if re.search(marks, text)), "float32")


@dataclass(frozen=True)
class Kernel:
    """A kernel in a library, for one architecture.

    Attributes:
        mangled: its mangled name.
        architecture: as "90".
        instructions: in the order of their addresses.
        registers: of a thread.
        stack: bytes of a thread's own memory, which holds spilled registers.
        arguments: bytes.
    """

    mangled: str
    architecture: str
    instructions: tuple[Instruction, ...]
    registers: int
    stack: int
    arguments: int

    @property
    def name(self) -> str:
        """The name in the source; `copy_to_half_kernel<true>` with the argument that is not the capacity."""
        name, flag = self._parts[:2]
        return name + {"0": "<false>", "1": "<true>", None: ""}[flag]

    @property
    def capacity(self) -> int | None:
        """Number of tensors that the arguments have room for; None if the kernel takes no batch."""
        return None if self._parts[2] is None else int(self._parts[2])

    @property
    def _parts(self) -> tuple[str, str | None, str | None]:
        found = re.search(r"(?<=\d)([a-z_]+_kernel)(?:I(?:Lb([01])E)?(?:Li(\d+)E)?E)?", self.mangled)
        if found is None:
            raise ValueError(f"found a kernel of the name {self.mangled}, expected one that ends in _kernel")
        return found[1], found[2], found[3]

    @property
    def spills(self) -> bool:
        """True if a thread keeps something in memory of its own."""
        return self.stack > 0 or any(each.opcode.startswith(("LDL", "STL")) for each in self.instructions)

    @property
    def loops(self) -> list[Loop]:
        """All loops that load from global memory. Each ends in a jump back to its start."""
        loops = []
        for last, each in enumerate(self.instructions):
            target = re.search(r"\b0x([0-9a-f]+)$", each.operands) if each.opcode.startswith("BRA") else None
            if target and int(target[1], 16) <= each.address:
                body = tuple(inner for inner in self.instructions[: last + 1] if inner.address >= int(target[1], 16))
                loops.append(Loop(body))
        return [loop for loop in loops if loop.loads]

    @property
    def main_loops(self) -> list[Loop]:
        """The loops over vectors of elements, one for each dtype."""
        return [loop for loop in self.loops if 128 in loop.loads.keys() | loop.stores]


def tools_are_there() -> bool:
    """Returns whether the programs that take a library apart are installed."""
    return all(shutil.which(tool, path=_PATH) for tool in ("cuobjdump", "nvdisasm"))


def kernels_of(library: Path) -> list[Kernel]:
    """Returns all kernels of a library, for each architecture that it has machine code for.

    Args:
        library: a shared library or object file that nvcc compiled.
    """
    instructions: dict[tuple[str, str], list[Instruction]] = {}
    for architecture, line in _printed("-sass", library):
        if found := re.match(r"\s*Function : (\S+)", line):
            code = instructions.setdefault((architecture, found[1]), [])
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)\s*(.*?)\s*;", line):
            code.append(Instruction(int(found[1], 16), found[2], found[3]))
    arguments = _arguments(library)
    kernels = []
    for architecture, line in _printed("-res-usage", library):
        if found := re.match(r"\s*Function (\S+):", line):
            key = architecture, found[1]
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+) ", line):
            kernels.append(
                Kernel(key[1], key[0], tuple(instructions[key]), int(found[1]), int(found[2]), arguments[key])
            )
    return kernels


def _arguments(library: Path) -> dict[tuple[str, str], int]:
    """Returns the bytes of each kernel's arguments, by architecture and mangled name."""
    arguments: dict[tuple[str, str], int] = {}
    is_size = False
    for architecture, line in _printed("-elf", library):
        if found := re.match(r"\.nv\.info\.(\S+)", line):
            mangled = found[1]
        elif "Attribute:" in line:
            is_size = "EIATTR_CBANK_PARAM_SIZE" in line
        elif is_size and (found := re.match(r"\s*Value:\s*0x([0-9a-f]+)", line)):
            arguments[architecture, mangled] = int(found[1], 16)
    return arguments


def _printed(option: str, library: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines that cuobjdump prints, each with the architecture that it is about."""
    tool = shutil.which("cuobjdump", path=_PATH)
    if tool is None:
        raise FileNotFoundError("cuobjdump is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    command, environment = [tool, option, str(library)], {**os.environ, "PATH": _PATH}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    architecture = ""
    for line in output.splitlines():
        if found := re.search(r"\barch = sm_(\d+)", line):
            architecture = found[1]
        yield architecture, line


def table(kernels: list[Kernel]) -> str:
    """Returns a table in Markdown of kernels for one architecture, those for few and for many tensors in one line.

    The last three columns are of the main loop for a dtype.
    """
    lines = [
        "| kernel | bytes of arguments | registers | spills | dtype | instructions | loads of the loop | in flight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({kernel.name for kernel in kernels}):
        sizes = sorted((kernel for kernel in kernels if kernel.name == name), key=lambda kernel: kernel.arguments)
        rows = {_row(loop) for kernel in sizes for loop in kernel.main_loops} or {"| | | | |"}
        start = (
            f"| `{name.replace('_kernel', '')}` "
            f"| {' or '.join(f'{kernel.arguments:,}' for kernel in sizes)} "
            f"| {' or '.join(sorted({str(kernel.registers) for kernel in sizes}))} "
            f"| {'yes' if any(kernel.spills for kernel in sizes) else 'none'} "
        )
        lines += [start + row for row in sorted(rows)]
    return "\n".join(lines)


def _row(loop: Loop) -> str:
    loads = " + ".join(f"{count} x {bits}" for bits, count in sorted(loop.loads.items()))
    return f"| {loop.dtype} | {len(loop.instructions)} | {loads} bits | {loop.in_flight} of {loop.loads.total()} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path, help="by default the one that amp would load")
    parser.add_argument("--arch", default="90", help="an architecture that the library was compiled for, as 90")
    arguments = parser.parse_args()
    found = extension.find()
    library = arguments.library or (found and found.path)
    if library is None:
        sys.exit("there is no compiled library here: run `ampatch build`")
    kernels = [kernel for kernel in kernels_of(library) if kernel.architecture == arguments.arch]
    if not kernels:
        sys.exit(f"{library} has no kernels for {arguments.arch}")
    print(table(kernels))


if __name__ == "__main__":
    main()

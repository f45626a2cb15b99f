"""The compiled libraries, of operators (`torch.ops.ampatch`) and of calls: their sources, what is built, loading it.

Owns what tells one library from another (sources, flags, ABI, machine, architectures) and where they lie. It must never
compile anything, nor initialise CUDA: a process that forks workers could not use the GPU in them any more.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.machinery import ExtensionFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ampatch.errors import KernelError

# The least torch that a library runs on, and what its sources are compiled for: torch's stable ABI holds from there on.
ABI = "2.10"

# Part of what a library is, beside its sources: built with other flags, it would be another one.
# Multiply-adds are never contracted: results are compared bit for bit with those of torch's own kernels.
HOST_FLAGS = ("-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
# Of kinds of processors that the compiler is to be told of: on these torch uses vector instructions too.
PROCESSOR_FLAGS = {"x86_64_avx2": ("-mavx2", "-mfma", "-mf16c")}
COMMON_FLAGS = ("-O3",)
LINK_FLAGS = ("-shared",)
CUDA_FLAGS = ("--fmad=false", "-DUSE_CUDA")

LIBRARY = "libampatch.so"
SIDECAR = "library.json"

_SOURCES = ("*.cpp", "*.cu", "*.h")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the extension, which is a library of its own.

    Attributes:
        folder: where its sources are, in the directory of all.
        abi: what a library runs on, beside the kind of processor.
        flags: what its sources are compiled with, beside the flags above.
        name: of a library for no GPU, in the cache.
    """

    folder: str
    abi: str
    flags: tuple[str, ...]
    name: str


OPERATORS = Part("", ABI, ("-std=c++17",), "cpu")
# It reaches behind the objects of Python, which is no part of torch's stable ABI: for this torch and this Python alone.
CALLS = Part(
    "calls",
    f"{torch.__version__}-{sysconfig.get_config_var('SOABI')}",
    ("-std=c++20",),
    "calls",
)


def target_flag() -> str:
    """Returns the compiler's flag that holds the sources to the torch of `ABI`: its version, a byte for each part."""
    major, minor = map(int, ABI.split("."))
    return f"-DTORCH_TARGET_VERSION=0x{major << 56 | minor << 48:016x}"


def processor() -> str:
    """Returns the kind of processor that libraries of this machine are for, such as "x86_64_avx2"."""
    machine = platform.machine()
    has_avx2 = machine == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return "x86_64_avx2" if has_avx2 else machine


# Sources


def source_directory() -> Path:
    """Returns where the sources are.

    Raises:
        KernelError: this install has none.
    """
    try:
        return Path(str(files("ampatch.csrc")))
    except ModuleNotFoundError as error:
        raise KernelError(
            "the sources of the compiled extension (the package ampatch.csrc) are not part of this install. Install "
            "ampatch again: `pip install --force-reinstall --no-deps`, and what it was installed from."
        ) from error


def sources(part: Part = OPERATORS) -> list[Path]:
    """Returns the sources of a part, headers among them, in the order of their names.

    Raises:
        KernelError: there are none.
    """
    directory = source_directory() / part.folder
    found = sorted((path for each in _SOURCES for path in directory.glob(each)), key=lambda path: path.name)
    if not any(path.suffix == ".cpp" for path in found):
        raise KernelError(
            f"{directory} holds no C++ sources, which the compiled extension is built of. Install ampatch again: "
            "`pip install --force-reinstall --no-deps`, and what it was installed from."
        )
    return found


def source_hash(part: Part = OPERATORS) -> str:
    """Returns the SHA-256 of the names and contents of a part's sources, and of the flags that they are compiled with.

    Raises:
        KernelError: there are no sources, or they cannot be read.
    """
    flags = (*HOST_FLAGS, *part.flags, *COMMON_FLAGS, *LINK_FLAGS, *CUDA_FLAGS, *PROCESSOR_FLAGS.get(processor(), ()))
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sources(part):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise KernelError(
                f"the source {path} cannot be read ({error.strerror}). Check its permissions, or install ampatch again."
            ) from error
        # With the lengths, so that no shift of bytes from one file to the next hashes to the same.
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# Libraries


@dataclass(frozen=True, slots=True)
class Library:
    """A built library, as the file beside it describes it.

    Attributes:
        path: the library itself.
        size: its bytes; a file of another size is only a part of it, or none of it.
        architectures: of the GPUs it has kernels for, as ("80", "90"); empty where it has those for the CPU alone.
        sources: the `source_hash` it was built of.
        abi: that of its part, which it was built for.
        machine: the `processor` it runs on.
        compiler: the line in which its compiler told its version.
        torch: the version of torch that it was built with.
    """

    path: Path
    size: int
    architectures: tuple[str, ...]
    sources: str
    abi: str
    machine: str
    compiler: str
    torch: str

    def serves(self, capability: tuple[int, int]) -> bool:
        """Returns whether a GPU runs its kernels.

        Args:
            capability: the GPU's compute capability, as (9, 0).
        """
        built_for = [divmod(int(architecture), 10) for architecture in self.architectures]
        # Machine code runs on what has the same major version and no lesser minor one. The code of the highest is there
        # as PTX too, which the driver compiles for whatever is newer.
        return any(major == capability[0] and minor <= capability[1] for major, minor in built_for) or (
            bool(built_for) and capability >= max(built_for)
        )


def key(source_hash: str, architectures: Iterable[str], part: Part = OPERATORS) -> str:
    """Returns the name of the directory in the cache that holds a library for this machine."""
    gpus = "-".join(f"sm{architecture}" for architecture in architectures)
    return f"{source_hash[:16]}-torch{part.abi}-{processor()}-{gpus or part.name}"


def cache_directory() -> Path:
    """Returns where built libraries lie: `$AMPATCH_CACHE`, or `ampatch` in the user's cache.

    Raises:
        KernelError: the user has no home.
    """
    try:
        if chosen := os.environ.get("AMPATCH_CACHE"):
            return Path(chosen).expanduser().absolute()
        if (cache := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():  # a relative one is void, says XDG
            return cache / "ampatch"
        return Path.home() / ".cache" / "ampatch"
    except RuntimeError as error:
        raise KernelError(
            f"there is no place for compiled libraries ({error}). Set the environment variable AMPATCH_CACHE to a "
            "directory that you may write to."
        ) from error


def describe(library: Library) -> str:
    """Returns the content of the file that lies beside a library."""
    return json.dumps({name: value for name, value in asdict(library).items() if name != "path"}, indent=2) + "\n"


def read(directory: Path) -> Library | None:
    """Returns the library in a directory; None where there is none, or none that can be made sense of."""
    path = directory / LIBRARY
    try:
        described = json.loads((directory / SIDECAR).read_text(encoding="utf-8"))
        library = _library(path, described)
        return library if library is not None and path.is_file() and path.stat().st_size == library.size else None
    except (OSError, ValueError, RecursionError):
        return None


def _library(path: Path, described: Any) -> Library | None:
    texts = [field.name for field in fields(Library) if field.type == "str"]
    if not isinstance(described, Mapping) or not all(isinstance(described.get(name), str) for name in texts):
        return None
    size = described.get("size")
    if not isinstance(size, int):
        return None
    architectures = described.get("architectures")
    if not isinstance(architectures, list) or not all(
        isinstance(each, str) and each.isdecimal() and each.isascii() for each in architectures
    ):
        return None
    texts_found = {name: described[name] for name in texts}
    return Library(path=path, size=size, architectures=tuple(architectures), **texts_found)


def find(part: Part = OPERATORS) -> Library | None:
    """Returns the library of a part that fits this process best; None where there is none.

    Among those of these very sources, for this ABI and kind of processor: one that serves every visible GPU, where CUDA
    is in use already; then one that has GPU kernels; then one that was built on this machine, which somebody did on
    purpose although the package may bring its own; then the one for most architectures.
    """
    try:
        expected = source_hash(part)
        directories = [source_directory()]
    except KernelError:
        return None
    with suppress(OSError, KernelError):  # a cache that cannot be read is as good as none
        directories += sorted(cache_directory().glob(f"{expected[:16]}-torch{part.abi}-*"))
    fitting = [library for library in map(read, directories) if library is not None and fits(library, expected, part)]
    capabilities = _capabilities()

    def rank(library: Library) -> tuple[bool, bool, bool, int, tuple[str, ...]]:
        return (
            all(map(library.serves, capabilities)),
            bool(library.architectures),
            library.path.parent != directories[0],
            len(library.architectures),
            library.architectures,
        )

    return max(fitting, key=rank, default=None)


def fits(library: Library, expected: str, part: Part = OPERATORS) -> bool:
    """Returns whether a library is of sources with the hash that is expected, and for this machine and torch."""
    # Where torch is built for ROCm, AMD's GPUs go by the name of CUDA.
    return (library.sources, library.abi, library.machine) == (expected, part.abi, processor()) and (
        torch.version.hip is None or not library.architectures
    )


def _capabilities() -> list[tuple[int, int]]:
    """Returns those of the visible GPUs, if CUDA is in use."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


# Loading


class _Process:
    """What this process has loaded, which it cannot unload."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Library | None = None
        self.calls: ModuleType | None = None


_process = _Process()


def load(library: Library) -> None:
    """Loads a library, once per process: from then on its operators are there as `torch.ops.ampatch`.

    Args:
        library: as `find` gives it.

    Raises:
        KernelError: it cannot be loaded, or other operators of that name are there already.
    """
    with _process.lock:
        if _process.library == library:
            return
        if _process.library is not None or hasattr(torch.ops.ampatch, "unscale_"):
            # torch would end the process: the names of operators are given once.
            there = _process.library.path if _process.library is not None else "something other than ampatch"
            raise KernelError(
                f"{library.path} cannot be loaded: this process has its operators, torch.ops.ampatch, from {there} "
                "already. Start a new process to use another library."
            )
        try:
            torch.ops.load_library(str(library.path))
        except OSError as error:
            raise KernelError(
                f"the compiled library {library.path} cannot be loaded ({error}). It was built with torch "
                f"{library.torch}, and this is torch {torch.__version__}. Type `ampatch build --force` to build it "
                "again on this machine, or delete it to do without."
            ) from error
        _process.library = library


def loaded() -> Library | None:
    """Returns the library of operators that this process has loaded."""
    return _process.library


def load_calls(library: Library) -> ModuleType:
    """Returns the module in a library of `CALLS`, which is loaded once per process: later ones are the first one.

    Raises:
        KernelError: it cannot be loaded.
    """
    with _process.lock:
        if _process.calls is None:
            name = "ampatch._calls"
            loader = ExtensionFileLoader(name, str(library.path))
            spec = spec_from_loader(name, loader)
            assert spec is not None
            try:
                module = module_from_spec(spec)
                loader.exec_module(module)
            except ImportError as error:
                raise KernelError(
                    f"the compiled library {library.path} cannot be loaded ({error}). Type `ampatch build --force` to "
                    "build it again on this machine, or delete it to do without."
                ) from error
            _process.calls = module
        return _process.calls

"""Finds the sources of the compiled libraries, of operators (`torch.ops.ampatch`) and of calls; finds and loads these.

Owns what identifies a library (sources, flags, ABI, processor, GPU architectures) and where libraries are stored. Must
never compile anything or initialise CUDA: if a process initialises CUDA, workers that it forks cannot use the GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ExtensionFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from ampatch.errors import KernelError

# Oldest torch that a library of operators runs on. It is built for the stable ABI, which later versions keep.
ABI = "2.10"

# Both the flags and the sources identify a library: `source_hash` covers both.
# Multiply-adds must not be contracted: results must equal those of torch's own kernels bit for bit.
HOST_FLAGS = ("-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
# Further flags by kind of processor, for vector instructions that torch uses there as well.
PROCESSOR_FLAGS = {"x86_64_avx2": ("-mavx2", "-mfma", "-mf16c")}
COMMON_FLAGS = ("-O3",)
LINK_FLAGS = ("-shared",)
CUDA_FLAGS = ("--fmad=false", "-DUSE_CUDA")

LIBRARY = "libampatch.so"
SIDECAR = "library.json"

_SOURCES = ("*.cpp", "*.cu", "*.h")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the extension, which is compiled to a library of its own.

    Attributes:
        folder: folder of its sources within the source directory.
        abi: version of torch, or of torch and Python, that a library of this part is for.
        flags: compiler flags of its sources, beside the flags above.
        has_loops: True if it computes on elements, so that the processor's vector instructions count.
        name: suffix of the cache directory of a library without GPU kernels.
    """

    folder: str
    abi: str
    flags: tuple[str, ...]
    has_loops: bool
    name: str


OPERATORS = Part("", ABI, ("-std=c++17",), True, "cpu")
# Uses torch's C++ behind Python objects, which the stable ABI does not cover: only for this torch and this Python.
CALLS = Part("calls", f"{torch.__version__}-{sysconfig.get_config_var('SOABI')}", ("-std=c++20",), False, "calls")


def target_flag() -> str:
    """Returns the compiler flag that limits the sources to the API of torch `ABI`: its version, one byte per part."""
    major, minor = map(int, ABI.split("."))
    return f"-DTORCH_TARGET_VERSION=0x{major << 56 | minor << 48:016x}"


def processor(part: Part = OPERATORS) -> str:
    """Returns the kind of processor that a part is compiled for on this machine, such as "x86_64_avx2"."""
    machine = platform.machine()
    uses_avx2 = part.has_loops and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return "x86_64_avx2" if machine == "x86_64" and uses_avx2 else machine


# Sources


def source_directory() -> Path:
    """Returns the directory of the sources.

    Raises:
        KernelError: this install has no sources.
    """
    try:
        return Path(str(files("ampatch.csrc")))
    except ModuleNotFoundError as error:
        raise KernelError(
            "the sources of the compiled extension (the package ampatch.csrc) are not part of this install. Install "
            "ampatch again: `pip install --force-reinstall --no-deps`, followed by its path or URL."
        ) from error


def sources(part: Part = OPERATORS) -> list[Path]:
    """Returns the source files of a part, headers included, sorted by name.

    Raises:
        KernelError: there are no sources.
    """
    directory = source_directory() / part.folder
    found = sorted((path for each in _SOURCES for path in directory.glob(each)), key=lambda path: path.name)
    if not any(path.suffix == ".cpp" for path in found):
        raise KernelError(
            f"{directory} holds no C++ sources, which the compiled extension is built from. Install ampatch again: "
            "`pip install --force-reinstall --no-deps`, followed by its path or URL."
        )
    return found


def source_hash(part: Part = OPERATORS) -> str:
    """Returns the SHA-256 of the names and contents of a part's sources and of their compiler flags.

    Raises:
        KernelError: there are no sources, or they cannot be read.
    """
    flags = (*HOST_FLAGS, *part.flags, *COMMON_FLAGS, *LINK_FLAGS, *CUDA_FLAGS)
    digest = hashlib.sha256(" ".join((*flags, *PROCESSOR_FLAGS.get(processor(part), ()))).encode())
    for path in sources(part):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise KernelError(
                f"the source {path} cannot be read ({error.strerror}). Check its permissions, or install ampatch again."
            ) from error
        # The hash includes the lengths. Otherwise bytes could move from one file to the next without changing it.
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# Libraries


@dataclass(frozen=True, slots=True)
class Library:
    """A built library, as the file beside it (`SIDECAR`) describes it.

    Attributes:
        path: path of the library.
        size: size in bytes; a file of another size is damaged or another library.
        architectures: GPU architectures that it has kernels for, such as ("80", "90"); empty for the CPU only.
        sources: `source_hash` of the sources it was built from.
        abi: `Part.abi` that it was built for.
        machine: kind of `processor` it runs on.
        compiler: version line of its compiler.
        torch: version of torch that it was built with.
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
        """Returns True if a GPU of this compute capability can run its kernels.

        Args:
            capability: compute capability of the GPU, such as (9, 0).
        """
        built_for = [divmod(int(architecture), 10) for architecture in self.architectures]
        # Machine code runs on GPUs of the same major version and the same or a higher minor one. The library also
        # has the kernels of the highest architecture as PTX, which the driver compiles for any newer GPU.
        return any(major == capability[0] and minor <= capability[1] for major, minor in built_for) or (
            bool(built_for) and capability >= max(built_for)
        )


def key(source_hash: str, architectures: Iterable[str], part: Part = OPERATORS) -> str:
    """Returns the name of the cache directory of a library for this machine."""
    gpus = "-".join(f"sm{architecture}" for architecture in architectures)
    return f"{source_hash[:16]}-torch{part.abi}-{processor(part)}-{gpus or part.name}"


def cache_directory() -> Path:
    """Returns the directory of built libraries: `$AMPATCH_CACHE`, or `ampatch` in the user's cache directory.

    Raises:
        KernelError: the user has no home directory.
    """
    try:
        if chosen := os.environ.get("AMPATCH_CACHE"):
            return Path(chosen).expanduser().absolute()
        if (cache := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():  # XDG: ignore relative paths
            return cache / "ampatch"
        return Path.home() / ".cache" / "ampatch"
    except RuntimeError as error:
        raise KernelError(
            f"there is no directory for compiled libraries ({error}). Set the environment variable AMPATCH_CACHE to a "
            "directory that you can write to."
        ) from error


def describe(library: Library) -> str:
    """Returns the content of the `SIDECAR` file beside a library."""
    return json.dumps({name: value for name, value in asdict(library).items() if name != "path"}, indent=2) + "\n"


def read(directory: Path) -> Library | None:
    """Returns the library in a directory; None if there is none, its size is wrong or its description is unreadable."""
    path = directory / LIBRARY
    with suppress(OSError, TypeError, ValueError, RecursionError):  # TypeError: not a mapping, or other keys
        library = Library(path=path, **json.loads((directory / SIDECAR).read_text(encoding="utf-8")))
        if path.stat().st_size == library.size:
            return replace(library, architectures=tuple(library.architectures))
    return None


def find(part: Part = OPERATORS) -> Library | None:
    """Returns the library of a part that fits this process best; None if there is none.

    A library fits if it was built from exactly these sources, for this ABI and kind of processor. Criteria for the best
    one, the most important first:

    - serves every visible GPU, if CUDA is already initialised;
    - has GPU kernels;
    - lies in the cache: users build on purpose, although the package may contain a library;
    - has kernels for most architectures.
    """
    try:
        expected = source_hash(part)
        directories = [source_directory()]
    except KernelError:
        return None
    with suppress(OSError, KernelError):  # an unreadable cache counts as empty
        directories += sorted(cache_directory().glob(f"{expected[:16]}-torch{part.abi}-*"))
    fitting = [library for library in map(read, directories) if library is not None and fits(library, expected, part)]
    # If this initialised CUDA, forked workers could not use the GPU.
    capabilities = capabilities_of_gpus() if torch.cuda.is_initialized() else []

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
    """Returns True if a library was built from sources with the expected hash, and for this machine and torch."""
    # A torch built for ROCm calls AMD's GPUs "cuda". A library with NVIDIA kernels must not be used on them.
    return (library.sources, library.abi, library.machine) == (expected, part.abi, processor(part)) and (
        torch.version.hip is None or not library.architectures
    )


def capabilities_of_gpus() -> list[tuple[int, int]]:
    """Returns the compute capabilities of the visible GPUs, by index; initialises CUDA."""
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


# Loading


class _Process:
    """Libraries that this process has loaded; it cannot unload them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Library | None = None
        self.calls: ModuleType | None = None


_process = _Process()


def load(library: Library) -> None:
    """Loads a library of operators, once per process: its operators are then available as `torch.ops.ampatch`.

    Args:
        library: library that `find` returned.

    Raises:
        KernelError: it cannot be loaded, or `torch.ops.ampatch` already has operators of another library.
    """
    with _process.lock:
        if _process.library == library:
            return
        if _process.library is not None or hasattr(torch.ops.ampatch, "unscale_"):
            # torch aborts the process if an operator is registered twice.
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
    """Returns the module in a library of `CALLS`; the first library loaded is used for the rest of the process.

    Raises:
        KernelError: the library cannot be loaded.
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

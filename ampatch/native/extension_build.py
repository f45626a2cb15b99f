"""Compiles the extension: chooses compiler, targets and directory, and reports failures.

Owns the command lines of the compilers. A library is complete or absent, and is built only once even if several
processes ask for it. Only the command `ampatch build` and tests import this module: importing ampatch must never
compile anything.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock

from ampatch.errors import KernelError, OptionError
from ampatch.native import extension
from ampatch.native.extension import Library, Part

DEVICES = ("auto", "cpu", "cuda")

# A100 and H100: the data centre GPUs that most mixed-precision training runs on.
DEFAULT_ARCHITECTURES = ("80", "90")

_NO_GPU = "torch sees no GPU here. For a machine with GPUs, type `ampatch build --device cuda`, which needs nvcc."
_LOG = "build.log"
_FAILURE = "compiling the extension failed"
_TORCH = Path(torch.__file__).parent
_QUOTED_LINES = 6
_TELLING = re.compile(r"\b(?:[Ee]rror|cannot|undefined|No space left)\b")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler on this machine.

    Attributes:
        command: words of the command that starts it, such as `ccache g++`.
        version: line in which it prints its version.
        is_nvcc: True if it is nvcc, which compiles for GPUs too.
    """

    command: tuple[str, ...]
    version: str
    is_nvcc: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A library to build, and its directory.

    Attributes:
        compiler: compiler to use.
        architectures: GPU architectures to build for; empty for the CPU only.
        sources: files to compile.
        source_hash: result of `extension.source_hash` when the plan was made.
        directory: directory for the library.
        note: sentence on kernels that are left out, with the reason; empty if none are.
        part: part of the extension to build.
    """

    compiler: Compiler
    architectures: tuple[str, ...]
    sources: tuple[Path, ...]
    source_hash: str
    directory: Path
    note: str
    part: Part


@dataclass(frozen=True, slots=True)
class Built:
    """Result of a plan that was carried out.

    Attributes:
        library: library that was built or found.
        was_cached: True if it was built earlier, or by another process while this one waited.
        seconds: time taken in seconds, waiting included.
    """

    library: Library
    was_cached: bool
    seconds: float


def plan(device: str = "auto", architectures: Sequence[str] | None = None, output: Path | None = None) -> Plan:
    """Returns the plan for the library of operators; compiles and writes nothing.

    Args:
        device: "cuda" for CPU and GPU kernels, "cpu" for CPU kernels only, "auto" for GPU kernels if architectures are
            named, or if there are a GPU and an nvcc.
        architectures: GPU architectures to build for, such as "90", "sm_90" or "9.0"; None for those of this machine's
            GPUs or, if there are none, `DEFAULT_ARCHITECTURES`.
        output: directory for the library and its description; None for the cache, where `extension.find` looks.

    Raises:
        OptionError: an argument has an invalid value or contradicts another one.
        KernelError: there is no compiler, there are no sources, or nvcc lacks an architecture.
    """
    if device not in DEVICES:
        raise OptionError(f"device: found {device!r}, expected one of {', '.join(map(repr, DEVICES))}.")
    asked = None if architectures is None else tuple(sorted({_architecture(each) for each in architectures}, key=int))
    if asked is not None and (device == "cpu" or not asked):
        raise OptionError(
            f"architectures: found {', '.join(asked)}, although device='cpu' builds for no GPU. Leave one of them out."
            if asked
            else "architectures: found none. Name at least one, such as '90', or build with device='cpu'."
        )
    note = ""
    asks_for_gpus = device == "cuda" or asked is not None
    sees_gpu = torch.cuda.is_available()
    compiler = _nvcc() if asks_for_gpus or (device == "auto" and sees_gpu) else None
    if compiler is None:
        if asks_for_gpus:
            raise KernelError(
                f"kernels for GPUs were asked for, and {_no_nvcc()} `ampatch build --device cpu` builds those for the "
                "CPU."
            )
        if device == "auto":
            note = f"CPU kernels only: {_no_nvcc() if sees_gpu else _NO_GPU}"
        compiler = _cxx()
        asked = ()
    chosen = _supported(compiler, _this_machines() if asked is None else asked)
    return _plan_of(extension.OPERATORS, compiler, chosen, output, note)


def plan_calls() -> Plan:
    """Returns the plan for the library of calls, which works only with this Python and this torch.

    Raises:
        KernelError: there is no compiler or no header of this Python, there are no sources, or this Python has no GIL.
    """
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise KernelError(
            f"there is no {headers / 'Python.h'}. Install the headers of this Python (`apt install python3-dev`, "
            "`dnf install python3-devel`)."
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise KernelError(
            "this Python is built without the GIL, which the calls in C++ rely on. Amp works without them; to have "
            "them, use a Python with the GIL."
        )
    return _plan_of(extension.CALLS, _cxx())


def _plan_of(
    part: Part, compiler: Compiler, architectures: tuple[str, ...] = (), output: Path | None = None, note: str = ""
) -> Plan:
    source_hash = extension.source_hash(part)
    cached = extension.cache_directory() / extension.key(source_hash, architectures, part)
    suffixes = (".cpp", ".cu") if compiler.is_nvcc else (".cpp",)
    return Plan(
        compiler=compiler,
        architectures=architectures,
        sources=tuple(path for path in extension.sources(part) if path.suffix in suffixes),
        source_hash=source_hash,
        directory=cached if output is None else output.absolute(),
        note=note,
        part=part,
    )


def carry_out(plan: Plan, force: bool = False) -> Built:
    """Builds the library of a plan, unless it is already built.

    Args:
        plan: plan that `plan` or `plan_calls` returned.
        force: True to build the library again even if it is already built.

    Raises:
        KernelError: there is no disk space, or compiling failed.
    """
    began = time.monotonic()
    place, prefix = plan.directory, f".{extension.LIBRARY}."
    try:
        place.mkdir(parents=True, exist_ok=True)
        # If several processes build at once, the others wait here for the first, and then find its library.
        with FileLock(place / f"{prefix}lock"):
            for left in place.glob(f"{prefix}*/"):  # of a killed build: this process holds the lock now
                shutil.rmtree(left, ignore_errors=True)
            library = extension.read(place)
            was_cached = (
                not force
                and library is not None
                and library.architectures == plan.architectures
                and extension.fits(library, plan.source_hash, plan.part)
            )
            if library is None or not was_cached:
                with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as scratch:
                    library = _built(plan, Path(scratch))
    except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system has no locks
        raise KernelError(
            f"the compiled extension cannot be written to {place} ({error}). Free some space or fix the permissions "
            "there, or set the environment variable AMPATCH_CACHE to another directory."
        ) from error
    return Built(library, was_cached, time.monotonic() - began)


# Compilers


def _nvcc() -> Compiler | None:
    # A torch built for ROCm calls AMD's GPUs "cuda" and would run NVIDIA's kernels on them.
    if torch.version.hip is not None:
        return None
    path = shutil.which("nvcc", path=os.pathsep.join(_nvcc_places()))
    return Compiler((path,), _version((path,), r"release.*"), is_nvcc=True) if path else None


def _nvcc_places() -> list[str]:
    homes = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    return [
        *(str(Path(home) / "bin") for home in homes if home),
        os.environ.get("PATH", os.defpath),
        "/usr/local/cuda/bin",
    ]


def _no_nvcc() -> str:
    if torch.version.hip is not None:
        return "this torch is built for ROCm, which the extension has no kernels for."
    return (
        "there is no nvcc in $CUDA_HOME/bin, $CUDA_PATH/bin, $PATH or /usr/local/cuda/bin. Install the CUDA toolkit "
        "and set CUDA_HOME to its directory for GPU kernels."
    )


def _cxx() -> Compiler:
    chosen = os.environ.get("CXX", "")
    try:
        candidates = [shlex.split(chosen)] if chosen.strip() else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        raise KernelError(
            f"the environment variable CXX is {chosen!r}, which no shell can read ({error}). Set it "
            "to your compiler, or unset it."
        ) from error
    for program, *options in candidates:
        if path := shutil.which(program):
            command = (path, *options)
            return Compiler(command, _version(command, r"\S.*"), is_nvcc=False)
    raise KernelError(
        f"there is no C++ compiler: the environment variable CXX is {chosen!r}, and there is no such program. Set it "
        "to your compiler, or unset it."
        if chosen.strip()
        else "there is no C++ compiler: found none of c++, g++ and clang++ in $PATH. Install one (`apt install g++`, "
        "`conda install gxx`), or set the environment variable CXX to the one you have."
    )


def _version(command: Sequence[str], pattern: str) -> str:
    """Returns the line in which a compiler prints its version."""
    done = _answer([*command, "--version"])
    if done.returncode != 0:
        raise KernelError(
            f"the compiler `{shlex.join(command)}` does not print its version: {_how_it_ended(done.returncode)}"
            f"{_last_words(done.stdout + done.stderr)}. Repair its installation, or name another one: a C++ "
            "compiler by the environment variable CXX, nvcc by CUDA_HOME."
        )
    found = re.search(pattern, done.stdout)
    version = found[0] if found else "of an unknown version"
    return f"nvcc {version}" if version.startswith("release") else version


def _answer(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler that only prints something."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise KernelError(_cannot_be_started(command[:-1], error)) from error


def _architecture(text: str) -> str:
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)", text.strip(), re.ASCII)
    if found is None:
        raise OptionError(
            f"architectures: found {text!r}, expected the compute capability of a GPU as '90', 'sm_90' or '9.0'; "
            "several are separated by commas, as in `ampatch build --arch 80,90`."
        )
    return str(int(found[1] + found[2]))


def _this_machines() -> tuple[str, ...]:
    """Returns the architectures of this machine's GPUs; if torch sees none, the default ones."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCHITECTURES
    return tuple(f"{major}{minor}" for major, minor in sorted(set(extension.capabilities_of_gpus())))


def _supported(compiler: Compiler, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the architectures, none if the compiler is not nvcc; raises if nvcc does not know one of them."""
    if not compiler.is_nvcc:
        return ()
    listed = _answer([*compiler.command, "--list-gpu-code"]).stdout
    known = re.findall(r"^sm_(\d+)$", listed, re.MULTILINE)
    # If nvcc lists no architectures, compiling will report an unknown one.
    if known and (unknown := [each for each in architectures if each not in known]):
        raise KernelError(
            f"{compiler.version} has no GPU architecture {', '.join(unknown)}: it knows {', '.join(known)}. Name "
            "others (`ampatch build --arch 80,90`), or install a CUDA toolkit that knows it."
        )
    return architectures


# Compiling


def _compiling(plan: Plan) -> list[str]:
    """Returns the command that compiles a file; the caller appends the file and its object file."""
    flags = [*plan.part.flags, *extension.COMMON_FLAGS, *_for_targets(plan)]
    if plan.part is extension.OPERATORS:
        flags.append(extension.target_flag())
    else:
        flags.append(f"-I{sysconfig.get_path('include')}")
    return [*plan.compiler.command, *flags, f"-I{_TORCH / 'include'}", "-c"]


def _linking(plan: Plan, objects: Sequence[Path], library: Path) -> list[str]:
    """Returns the command that links object files to the library."""
    # The sources compile against declarations only: torch's symbols are resolved in the torch that loads the library.
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    if plan.part is extension.CALLS:
        libraries.append("-ltorch_python")
    flags = [*extension.COMMON_FLAGS, *extension.LINK_FLAGS, *_for_targets(plan)]
    return [*plan.compiler.command, *flags, *map(str, objects), "-o", str(library), *libraries]


def _for_targets(plan: Plan) -> list[str]:
    """Returns the flags for the kind of processor and the GPU architectures."""
    host = [*extension.HOST_FLAGS, *extension.PROCESSOR_FLAGS.get(extension.processor(plan.part), ())]
    if not plan.compiler.is_nvcc:
        return host
    # No --threads: with it nvcc 13.0 splits paths at spaces.
    flags = ["-Xcompiler", ",".join(host), *extension.CUDA_FLAGS]
    for architecture in plan.architectures:
        flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    highest = plan.architectures[-1]
    return [*flags, "-gencode", f"arch=compute_{highest},code=compute_{highest}"]


def _built(plan: Plan, scratch: Path) -> Library:
    """Compiles the library, tests it, moves it to its directory and returns it."""
    log, sidecar = scratch / _LOG, scratch / extension.SIDECAR
    try:
        library = _made(plan, scratch / extension.LIBRARY, log, scratch)
    except _FailedError as failed:
        kept = log.replace(plan.directory / _LOG)
        raise KernelError(f"{failed}. The command and all that it printed are in {kept}.") from failed
    if extension.source_hash(plan.part) != plan.source_hash:
        raise KernelError("the sources of the extension were changed while they were compiled. Build once more.")
    sidecar.write_text(extension.describe(library), encoding="utf-8")
    # A library without a description does not count. So if the description is removed first, the two never mismatch.
    (plan.directory / extension.SIDECAR).unlink(missing_ok=True)
    for made in (log, library.path, sidecar):
        made.replace(plan.directory / made.name)
    return replace(library, path=plan.directory / extension.LIBRARY)


def _made(plan: Plan, path: Path, log: Path, scratch: Path) -> Library:
    """Compiles the files, links the library and tests it.

    Raises:
        _FailedError: a file does not compile, or the library cannot be linked or does not run.
    """
    objects = [scratch / f"{source.name}.o" for source in plan.sources]
    compiling = _compiling(plan)
    commands = [[*compiling, str(source), "-o", str(to)] for source, to in zip(plan.sources, objects, strict=True)]
    _run(commands, log, scratch, _FAILURE)
    _run([_linking(plan, objects, path)], log, scratch, _FAILURE)
    library = Library(
        path=path,
        size=path.stat().st_size,
        architectures=plan.architectures,
        sources=plan.source_hash,
        abi=plan.part.abi,
        machine=extension.processor(plan.part),
        compiler=plan.compiler.version,
        torch=torch.__version__,
    )
    _try_out(library, plan.part, log, scratch)
    return library


# Runs in a process of its own: torch cannot unload a library, and a broken one may crash.
_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
torch.ops.load_library(sys.argv[2])
dtypes = torch.float16, torch.bfloat16, torch.float32
for device in sys.argv[3:]:
    grads = [torch.full((5,), 6.0, dtype=dtype, device=device) for dtype in dtypes]
    found_inf = torch.zeros((), device=device)
    torch.ops.ampatch.unscale_(grads, torch.full((), 0.5, device=device), found_inf)
    results = [grad.tolist() for grad in grads], found_inf.item()
    if results != ([[3.0] * 5] * 3, 0.0):
        sys.exit(f"unscale_ on {device} gave {results}")
"""


_TRIAL_OF_CALLS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import importlib.machinery, importlib.util
import torch
loader = importlib.machinery.ExtensionFileLoader("ampatch._calls", sys.argv[2])
calls = importlib.util.module_from_spec(importlib.util.spec_from_loader("ampatch._calls", loader))
loader.exec_module(calls)
class Switch:
    __slots__ = ("active",)
switch, state = Switch(), calls.CacheState()
switch.active, state.iteration, state.sweep_at = True, calls.Store(), 1
caster = calls.Caster(state, switch, None, None)
caster.set_device_types(("cpu",))
product = type("Product", (calls.Call,), {"__call__": lambda *args: None})()
calls.accelerate(product, type(product).__call__, caster, torch.matmul, "to", torch.bfloat16, 9, None, None, False)
weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
for _ in range(2):
    result = product(torch.ones(2, 2), weight)
found = result.dtype, result.tolist(), state.casts, state.hits
if found != (torch.bfloat16, [[6.0] * 2] * 2, 3, 1):
    sys.exit(f"a product gave {found}")
"""


def _try_out(library: Library, part: Part, log: Path, scratch: Path) -> None:
    devices = ["cpu"]
    if library.architectures and torch.cuda.is_available():
        found = enumerate(extension.capabilities_of_gpus())
        devices += [f"cuda:{index}" for index, capability in found if library.serves(capability)]
    trial = _TRIAL if part is extension.OPERATORS else _TRIAL_OF_CALLS
    command = [sys.executable, "-P", "-c", trial, json.dumps(sys.path), str(library.path), *devices]
    _run([command], log, scratch, f"the extension was compiled, and does not run here ({', '.join(devices)})")


class _FailedError(Exception):
    """A program could not be started or failed."""


def _run(commands: Sequence[Sequence[str]], log: Path, scratch: Path, failure: str) -> None:
    """Runs programs side by side, and appends their command lines and their output to a log.

    Args:
        commands: their command lines. They all run at once: no library has more than a handful of sources.
        log: file for the command lines and the output.
        scratch: directory for temporary files.
        failure: beginning of the error.

    Raises:
        _FailedError: a program could not be started or failed.
    """
    log.touch()
    outputs = [scratch / f"{place}.said" for place in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, output in zip(commands, outputs, strict=True):
            running.append(_start(command, scratch, output, failure))
        statuses = [process.wait() for process in running]
    except BaseException:  # Ctrl-C among them
        for process in running:
            _end(process)
        raise
    said = [output.read_bytes() for output in outputs]
    with log.open("ab") as written:
        for command, text in zip(commands, said, strict=True):
            written.write(f"$ {shlex.join(command)}\n".encode() + text)
    for command, text, status in zip(commands, said, statuses, strict=True):
        if status != 0:
            words = _last_words(text.decode("utf-8", "replace"))
            raise _FailedError(f"{failure}: `{command[0]}` {_how_it_ended(status)}{words}")


def _start(command: Sequence[str], scratch: Path, said: Path, failure: str) -> subprocess.Popen[bytes]:
    # In a process group of its own, so that `_end` reaches all processes of a compiler. Its temporary files go to the
    # scratch directory, which is always removed.
    with said.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
                start_new_session=True,
            )
        except OSError as error:
            raise _FailedError(f"{failure}: {_cannot_be_started(command[:1], error)}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _last_words(said: str) -> str:
    """Returns the lines of a program's output to quote in an error: its first errors if any, else its last lines."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    quoted = [line for line in lines if _TELLING.search(line)][:_QUOTED_LINES] or lines[-_QUOTED_LINES:]
    return ":\n" + "\n".join(quoted) if quoted else ", without any output"


def _cannot_be_started(command: Sequence[str], error: OSError) -> str:
    return f"`{shlex.join(command)}` cannot be started ({error.strerror})"

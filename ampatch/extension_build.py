"""Compiling the extension: which compiler, for what, into which directory, and what is said where that fails.

Owns the command line of the compilers, and that a library is there whole or not at all, built once however many
processes ask for it. Only the command `ampatch build` and tests import it: nothing may ever be compiled on import.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from ampatch import extension
from ampatch.errors import KernelError, OptionError
from ampatch.extension import Library, Part

DEVICES = ("auto", "cpu", "cuda")

# Those of the two data centre generations that mixed precision runs on mostly, A100 and H100.
DEFAULT_ARCHITECTURES = ("80", "90")

_LOG = "build.log"
_QUOTED_LINES = 6
_TELLING = re.compile(r"\b(?:[Ee]rror|cannot|undefined|No space left)\b")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that was found.

    Attributes:
        command: what starts it, which may be more than a path (`ccache g++`).
        version: the line in which it tells its version.
        is_nvcc: whether it compiles for GPUs too.
    """

    command: tuple[str, ...]
    version: str
    is_nvcc: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be built, and where.

    Attributes:
        compiler: what compiles it.
        architectures: of the GPUs to build for; empty for the CPU alone.
        sources: all files to compile.
        source_hash: what `extension.source_hash` gave.
        directory: where the library is to lie.
        is_cached: whether that directory belongs to the library alone, as in the cache, and is replaced as a whole.
        note: a sentence on what is left out, and why; empty if nothing is.
        part: of the extension.
    """

    compiler: Compiler
    architectures: tuple[str, ...]
    sources: tuple[Path, ...]
    source_hash: str
    directory: Path
    is_cached: bool
    note: str
    part: Part = extension.OPERATORS


@dataclass(frozen=True, slots=True)
class Built:
    """What came of a plan.

    Attributes:
        library: the library.
        was_there: whether it had been built before, by another process perhaps while this one waited.
        seconds: what it took, waiting included.
    """

    library: Library
    was_there: bool
    seconds: float


def build(
    device: str = "auto",
    architectures: Sequence[str] | None = None,
    output: Path | None = None,
    force: bool = False,
) -> Built:
    """Builds the library, unless it is there.

    Args:
        device: "cuda" for kernels of the CPU and of GPUs, "cpu" for those of the CPU alone, "auto" for what the
            compilers found here allow.
        architectures: of the GPUs to build for, as "90", "sm_90" or "9.0"; None for those of this machine's GPUs and,
            if it has none, `DEFAULT_ARCHITECTURES`.
        output: the directory to put library and description in; None for the cache, where `extension.find` looks.
        force: build it again even if it is there.

    Raises:
        OptionError: an argument has a value that is not allowed, or contradicts another.
        KernelError: it cannot be built, for want of a compiler, sources or disk space, or because compiling failed.
    """
    return carry_out(plan(device, architectures, output), force)


def plan(device: str = "auto", architectures: Sequence[str] | None = None, output: Path | None = None) -> Plan:
    """What `build` would do. Compiles nothing, and writes nothing.

    Args:
        device: as for `build`.
        architectures: as for `build`.
        output: as for `build`.

    Raises:
        OptionError: an argument has a value that is not allowed, or contradicts another.
        KernelError: there is no compiler, or there are no sources.
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
    compiler = None if device == "cpu" else _nvcc()
    if compiler is None:
        if device == "cuda" or asked is not None:
            raise KernelError(
                f"kernels for GPUs were asked for, and {_no_nvcc()} `ampatch build --device cpu` builds those for the "
                "CPU."
            )
        if device == "auto":
            note = f"CPU kernels only: {_no_nvcc()}"
        compiler = _cxx()
        asked = ()
    patterns = (".cpp", ".cu") if compiler.is_nvcc else (".cpp",)
    source_hash = extension.source_hash()
    chosen = _supported(compiler, _this_machines() if asked is None else asked)
    cached = extension.cache_directory() / extension.key(source_hash, chosen) if output is None else None
    return Plan(
        compiler=compiler,
        architectures=chosen,
        sources=tuple(path for path in extension.sources() if path.suffix in patterns),
        source_hash=source_hash,
        directory=cached or Path(output or "").absolute(),
        is_cached=cached is not None,
        note=note,
    )


def plan_calls() -> Plan:
    """What is to be built for the calls of patched functions, which is for this Python and this torch alone.

    Raises:
        KernelError: there is no compiler, or no header of Python's.
    """
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise KernelError(
            f"there is no {headers / 'Python.h'}. Install the headers of this Python (`apt install python3-dev`, "
            "`dnf install python3-devel`)."
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise KernelError("this Python runs without its lock, which the calls in C++ rely on.")
    part = extension.CALLS
    source_hash = extension.source_hash(part)
    return Plan(
        compiler=_cxx(),
        architectures=(),
        sources=tuple(path for path in extension.sources(part) if path.suffix == ".cpp"),
        source_hash=source_hash,
        directory=extension.cache_directory() / extension.key(source_hash, (), part),
        is_cached=True,
        note="",
        part=part,
    )


def carry_out(plan: Plan, force: bool = False) -> Built:
    """Builds what a plan says, unless it is there.

    Args:
        plan: as `plan` gives it.
        force: build it again even if it is there.

    Raises:
        KernelError: it cannot be built.
    """
    began = time.monotonic()
    with _writing_to(plan.directory.parent if plan.is_cached else plan.directory) as place:
        # The dot ends the name: what stands for sm80 must not match what stands for sm80-sm90, and has another lock.
        prefix = f".{plan.directory.name if plan.is_cached else extension.LIBRARY}."
        # Processes that ask at once wait here for the first, and find what it has built.
        with FileLock(place / f"{prefix}lock"):
            for left in place.glob(f"{prefix}*/"):  # by a build that was killed: this process has the lock now
                shutil.rmtree(left, ignore_errors=True)
            library = extension.read(plan.directory)
            was_there = (
                library is not None
                and library.architectures == plan.architectures
                and extension.fits(library, plan.source_hash, plan.part)
            )
            if library is None or not was_there or force:
                with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as scratch:
                    library = _compiled(plan, Path(scratch))
                was_there = False
    return Built(library, was_there, time.monotonic() - began)


# Compilers


def _nvcc() -> Compiler | None:
    # Where torch is built for ROCm, AMD's GPUs go by the name of CUDA, and would be handed NVIDIA's kernels.
    if torch.version.hip is not None:
        return None
    for directory in _nvcc_places():
        if path := shutil.which("nvcc", path=directory):
            return Compiler((path,), _version((path,), r"release.*"), is_nvcc=True)
    return None


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
        raise KernelError(f"the environment variable CXX is {chosen!r}, which no shell can read ({error}).") from error
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
    """The line in which a compiler tells its version."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise KernelError(_cannot_be_started(command, error)) from error
    if done.returncode != 0:
        raise KernelError(
            f"the compiler `{shlex.join(command)}` cannot tell its version: {_how_it_ended(done.returncode)}"
            f"{_last_words(done.stdout + done.stderr)}. Mend its installation, or name another one: a C++ "
            "compiler by the environment variable CXX, nvcc by CUDA_HOME."
        )
    found = re.search(pattern, done.stdout)
    version = found[0] if found else "of an unknown version"
    return f"nvcc {version}" if version.startswith("release") else version


def _architecture(text: str) -> str:
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)", text.strip(), re.ASCII)
    if found is None:
        raise OptionError(
            f"architectures: found {text!r}, expected the compute capability of a GPU as '90', 'sm_90' or '9.0'; "
            "several are separated by commas, as in `ampatch build --arch 80,90`."
        )
    return str(int(found[1] + found[2]))


def _this_machines() -> tuple[str, ...]:
    """The architectures of this machine's GPUs; if torch sees none, the default ones."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCHITECTURES
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(capabilities))


def _supported(compiler: Compiler, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """The architectures, if the compiler knows all of them."""
    if not compiler.is_nvcc:
        return ()
    try:
        listed = subprocess.run(
            [*compiler.command, "--list-gpu-code"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise KernelError(_cannot_be_started(compiler.command, error)) from error
    known = re.findall(r"^sm_(\d+)$", listed.stdout, re.MULTILINE)
    # An nvcc that cannot say what it knows will say what it does not know when it compiles.
    if known and (unknown := [each for each in architectures if each not in known]):
        raise KernelError(
            f"{compiler.version} has no GPU architecture {', '.join(unknown)}: it knows {', '.join(known)}. Name "
            "others (`ampatch build --arch 80,90`), or install a CUDA toolkit that knows it."
        )
    return architectures


# Compiling


def _command(plan: Plan, library: Path) -> list[str]:
    root = Path(torch.__file__).parent
    # Declarations alone: what they declare is looked up in the torch that loads the library.
    torch_flags = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    if plan.part is extension.OPERATORS:
        torch_flags.append(extension.target_flag())
    else:
        torch_flags += [f"-I{sysconfig.get_path('include')}", "-ltorch_python"]
    host = [*extension.HOST_FLAGS, *extension.PROCESSOR_FLAGS.get(extension.processor(), ())]
    for_gpus: list[str] = []
    if plan.compiler.is_nvcc:
        host = ["-Xcompiler", ",".join(host)]
        # Not in parallel, by --threads: nvcc 13.0 then takes a path with a space in it for two.
        for_gpus = [*extension.CUDA_FLAGS]
        for architecture in plan.architectures:
            for_gpus += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        highest = plan.architectures[-1]
        for_gpus += ["-gencode", f"arch=compute_{highest},code=compute_{highest}"]
    files = [str(path) for path in plan.sources]
    return [
        *plan.compiler.command,
        *plan.part.flags,
        *extension.COMMON_FLAGS,
        *host,
        *for_gpus,
        *files,
        "-o",
        str(library),
        *torch_flags,
    ]


def _compiled(plan: Plan, scratch: Path) -> Library:
    """The library, compiled, tried out and in its place."""
    fresh = scratch / "fresh"  # with the usual permissions, unlike the directory around it
    fresh.mkdir()
    log = fresh / _LOG
    try:
        _run(_command(plan, fresh / extension.LIBRARY), log, scratch, "compiling the extension failed")
        library = Library(
            path=fresh / extension.LIBRARY,
            size=(fresh / extension.LIBRARY).stat().st_size,
            architectures=plan.architectures,
            sources=plan.source_hash,
            abi=plan.part.abi,
            machine=extension.processor(),
            compiler=plan.compiler.version,
            torch=torch.__version__,
        )
        _try_out(library, plan.part, log, scratch)
    except _FailedError as failed:
        kept = _kept_log(plan)
        shutil.move(log, kept)
        raise KernelError(f"{failed}. The command and all that it printed are in {kept}.") from failed
    if extension.source_hash(plan.part) != plan.source_hash:
        raise KernelError("the sources of the extension were changed while they were compiled. Build once more.")
    (fresh / extension.SIDECAR).write_text(extension.describe(library), encoding="utf-8")
    if plan.is_cached:
        _replace(fresh, plan.directory, scratch / "before")
        _kept_log(plan).unlink(missing_ok=True)
    else:
        # Without its description a library is none: at no time do the two not belong together.
        (plan.directory / extension.SIDECAR).unlink(missing_ok=True)
        for name in (_LOG, extension.LIBRARY, extension.SIDECAR):
            (fresh / name).replace(plan.directory / name)
    there = extension.read(plan.directory)
    if there is None:
        raise KernelError(f"{plan.directory} was removed or changed by another program meanwhile. Build once more.")
    return there


def _kept_log(plan: Plan) -> Path:
    """Where the log of a build that failed is kept."""
    return plan.directory.with_name(f"{plan.directory.name}.log") if plan.is_cached else plan.directory / _LOG


def _replace(fresh: Path, directory: Path, before: Path) -> None:
    """Puts a directory in the place of another, which stays where it is if that fails."""
    with suppress(FileNotFoundError):
        directory.replace(before)
    try:
        fresh.replace(directory)
    except BaseException:  # Ctrl-C among them
        with suppress(FileNotFoundError):
            before.replace(directory)
        raise


# Runs in a process of its own: what torch has loaded cannot be unloaded, and may crash.
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
switch, book = Switch(), calls.Book()
switch.active, book.iteration, book.sweep_at = True, calls.Store(), 1
caster = calls.Caster(book, switch, None, None)
caster.serve(("cpu",))
product = lambda *args: None
calls.accelerate(product, lambda *args: None, caster, torch.matmul, "to", torch.bfloat16, 9, "")
weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
for _ in range(2):
    result = product(torch.ones(2, 2), weight)
found = result.dtype, result.tolist(), book.casts, book.hits
if found != (torch.bfloat16, [[6.0] * 2] * 2, 3, 1):
    sys.exit(f"a product gave {found}")
"""


def _try_out(library: Library, part: Part, log: Path, scratch: Path) -> None:
    devices = ["cpu"]
    if library.architectures and torch.cuda.is_available():
        devices += [
            f"cuda:{index}"
            for index in range(torch.cuda.device_count())
            if library.serves(torch.cuda.get_device_capability(index))
        ]
    trial = _TRIAL if part is extension.OPERATORS else _TRIAL_OF_CALLS
    command = [sys.executable, "-P", "-c", trial, json.dumps(sys.path), str(library.path), *devices]
    _run(command, log, scratch, f"the extension was compiled, and does not run here ({', '.join(devices)})")


class _FailedError(Exception):
    """A program did not do its work."""


def _run(command: Sequence[str], log: Path, scratch: Path, failure: str) -> None:
    """Runs a program, with its output added to a log.

    Raises:
        _FailedError: it could not be started, or did not end well.
    """
    with log.open("a", encoding="utf-8") as written:
        written.write(f"$ {shlex.join(command)}\n")
        written.flush()
        began = written.tell()
        try:
            # A group of its own, so that no part of a compiler outlives it; and its temporary files go where they are
            # cleared away whatever happens.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
                start_new_session=True,
            )
        except OSError as error:
            raise _FailedError(f"{failure}: {_cannot_be_started(command[:1], error)}") from error
        try:
            status = process.wait()
        except BaseException:  # Ctrl-C among them
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if status != 0:
        with log.open("rb") as read:
            read.seek(began)
            said = read.read().decode("utf-8", "replace")
        raise _FailedError(f"{failure}: `{command[0]}` {_how_it_ended(status)}{_last_words(said)}")


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _last_words(said: str) -> str:
    """The end of what a program printed, to be quoted: the errors, if it names any."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    quoted = [line for line in lines if _TELLING.search(line)][:_QUOTED_LINES] or lines[-_QUOTED_LINES:]
    return ":\n" + "\n".join(quoted) if quoted else ", without a word"


def _cannot_be_started(command: Sequence[str], error: OSError) -> str:
    return f"`{shlex.join(command)}` cannot be started ({error.strerror})"


@contextmanager
def _writing_to(place: Path) -> Iterator[Path]:
    """The directory, made if need be; whatever the disk refuses there comes out as an error of ours."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        yield place
    except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
        raise KernelError(
            f"the compiled extension cannot be written to {place} ({error}). Free some space or mend the permissions "
            "there, or set the environment variable AMPATCH_CACHE to another directory."
        ) from error

"""Compiling the extension: which compiler, for what, into which directory, and what is said where that fails.

Owns the command line of the compilers, the object files that the next build takes over, and that a library is there
whole or not at all, built once however many processes ask for it. Only the command `ampatch build` and tests import it:
nothing may ever be compiled on import.
"""

from __future__ import annotations

import hashlib
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
from typing import IO

import torch
from filelock import FileLock

from ampatch.errors import KernelError, OptionError
from ampatch.native import extension
from ampatch.native.extension import Library, Part

DEVICES = ("auto", "cpu", "cuda")

# Those of the two data centre generations that mixed precision runs on mostly, A100 and H100.
DEFAULT_ARCHITECTURES = ("80", "90")

# In the cache: the object files of earlier builds.
OBJECTS = "objects"

_LOG = "build.log"
_FAILURE = "compiling the extension failed"
_TORCH = Path(torch.__file__).parent
_INCLUDED = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
# What compilers read beside their command line.
_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_CCBIN = re.compile(r"""(?:^|\s)(?:-ccbin|--compiler-bindir)(?:=|\s+)["']?([^\s"']+)""")
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
        force: build it again even if it is there, and compile every file of it.

    Raises:
        OptionError: an argument has a value that is not allowed, or contradicts another.
        KernelError: it cannot be built, for want of a compiler, sources or disk space, or because compiling failed.
    """
    return carry_out(plan(device, architectures, output), force)


def plan(device: str = "auto", architectures: Sequence[str] | None = None, output: Path | None = None) -> Plan:
    """Returns what `build` would do. Compiles nothing, and writes nothing.

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
    """Returns what is to be built for the calls of patched functions, which is for this Python and this torch alone.

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
        force: as for `build`.

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
                    library = _built(plan, Path(scratch), force)
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
    """Returns the line in which a compiler tells its version."""
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


def _host_compiler() -> str:
    """Returns the version line of the C++ compiler that nvcc runs; empty if there is none."""
    flags = " ".join(os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
    chosen = _CCBIN.findall(flags) or [os.environ.get("NVCC_CCBIN") or "gcc"]
    named = chosen[-1]  # a program, or a directory with one
    path = shutil.which("gcc", path=named) if Path(named).is_dir() else shutil.which(named)
    with suppress(KernelError):  # nvcc itself reports a host compiler that does not work
        return _version((path,), r"\S.*") if path else ""
    return ""


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
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(capabilities))


def _supported(compiler: Compiler, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the architectures, if the compiler knows all of them."""
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
    # Declarations alone are compiled: what they declare is looked up in the torch that loads the library.
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    if plan.part is extension.CALLS:
        libraries.append("-ltorch_python")
    flags = [*extension.COMMON_FLAGS, *extension.LINK_FLAGS, *_for_targets(plan)]
    return [*plan.compiler.command, *flags, *map(str, objects), "-o", str(library), *libraries]


def _for_targets(plan: Plan) -> list[str]:
    """Returns the flags for the kind of processor, and for GPUs."""
    host = [*extension.HOST_FLAGS, *extension.PROCESSOR_FLAGS.get(extension.processor(), ())]
    if not plan.compiler.is_nvcc:
        return host
    # Not in parallel, by --threads: nvcc 13.0 then takes a path with a space in it for two.
    flags = ["-Xcompiler", ",".join(host), *extension.CUDA_FLAGS]
    for architecture in plan.architectures:
        flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    highest = plan.architectures[-1]
    return [*flags, "-gencode", f"arch=compute_{highest},code=compute_{highest}"]


def _built(plan: Plan, scratch: Path, force: bool) -> Library:
    """Returns the library, compiled, tried out and in its place."""
    fresh = scratch / "fresh"  # with the usual permissions, unlike the directory around it
    fresh.mkdir()
    log = fresh / _LOG
    try:
        library = _made(plan, fresh / extension.LIBRARY, log, scratch, force)
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


def _made(plan: Plan, path: Path, log: Path, scratch: Path, force: bool) -> Library:
    """Compiles what the cache does not keep, links, and tries the library out.

    Raises:
        _FailedError: a file does not compile, or the library cannot be linked or does not run.
    """
    steps = _steps(plan, scratch)
    _compile(plan, [step for step in steps if force or not _take_over(step)], log, scratch)
    try:
        return _linked(plan, steps, path, log, scratch)
    except _FailedError:
        for step in steps:  # one of them may be at fault
            _drop(step)
        raise


def _linked(plan: Plan, steps: Sequence[_Step], path: Path, log: Path, scratch: Path) -> Library:
    """Links the object files, and tries the library out.

    Raises:
        _FailedError: it cannot be linked, or does not run.
    """
    _run(_linking(plan, [step.object for step in steps], path), log, scratch, _FAILURE)
    library = Library(
        path=path,
        size=path.stat().st_size,
        architectures=plan.architectures,
        sources=plan.source_hash,
        abi=plan.part.abi,
        machine=extension.processor(),
        compiler=plan.compiler.version,
        torch=torch.__version__,
    )
    _try_out(library, plan.part, log, scratch)
    return library


@dataclass(frozen=True, slots=True)
class _Step:
    """A file to compile.

    Attributes:
        command: compiles it.
        object: the object file.
        said: the file for all that the compiler prints.
        status: the file for the compiler's exit status, as a shell has it.
        kept: where the cache keeps the object file for later builds, behind its checksum; None outside of the cache.
    """

    command: tuple[str, ...]
    object: Path
    said: Path
    status: Path
    kept: Path | None

    def line(self) -> str:
        """Returns the line for a shell: it runs the command, and writes down its output and exit status."""
        done = f"{shlex.join(self.command)} >{shlex.quote(str(self.said))} 2>&1; status=$?"
        return f"{done}; echo $status >{shlex.quote(str(self.status))}; exit $status"


def _steps(plan: Plan, scratch: Path) -> list[_Step]:
    compiling = _compiling(plan)
    settings = [*compiling, plan.compiler.version, torch.__version__, str(torch.version.git_version)]
    settings += [os.environ.get(name, "") for name in _VARIABLES]
    if plan.compiler.is_nvcc:
        settings.append(_host_compiler())
    flags = hashlib.sha256("\0".join(settings).encode()).hexdigest()
    steps = []
    for source in plan.sources:
        made, kept = scratch / f"{source.name}.o", None
        if plan.is_cached:
            kept = plan.directory.parent / OBJECTS / f"{flags[:16]}-{source.name}-{_content_hash(source)[:32]}.o"
        command = (*compiling, str(source), "-o", str(made))
        steps.append(_Step(command, made, made.with_suffix(".said"), made.with_suffix(".status"), kept))
    return steps


def _content_hash(source: Path) -> str:
    """Returns the SHA-256 of a source and of all files that it includes in quotes, also through other files."""
    found = {source.resolve(): source.read_bytes()}
    to_look_at = list(found)
    while to_look_at:
        path = to_look_at.pop()
        for name in _INCLUDED.findall(found[path]):
            included = (path.parent / os.fsdecode(name)).resolve()
            if included not in found and included.is_file():
                found[included] = included.read_bytes()
                to_look_at.append(included)
    digest = hashlib.sha256()
    for path, content in sorted(found.items()):
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _compile(plan: Plan, missing: Sequence[_Step], log: Path, scratch: Path) -> None:
    """Compiles files, and keeps their object files.

    Raises:
        _FailedError: a file does not compile.
    """
    if missing:
        if ninja := shutil.which("ninja"):
            _run_by_ninja(ninja, missing, scratch)
        if not any(map(_status, missing)):  # all are left where there is no ninja, or one that does not work
            _run_side_by_side([step for step in missing if _status(step) is None], scratch)
    unchanged = extension.source_hash(plan.part) == plan.source_hash
    failed = None
    with log.open("ab") as written:
        for step in missing:
            status, said = _status(step), step.said.read_bytes() if step.said.exists() else b""
            if status is not None:
                written.write(f"$ {shlex.join(step.command)}\n".encode() + said)
            if status == 0 and unchanged:
                _keep(step)
            elif status and failed is None:
                words = _last_words(said.decode("utf-8", "replace"))
                failed = _FailedError(f"{_FAILURE}: `{step.command[0]}` {_how_it_ended(status)}{words}")
    if failed is None and any(_status(step) is None for step in missing):
        failed = _FailedError(f"{_FAILURE}: another program ended the compiler")
    if failed is not None:
        raise failed


# Kept object files only save time. Where the cache does not let them be read or written, the build goes on without:
# `objects` may be another user's.


def _take_over(step: _Step) -> bool:
    """Copies the object file that the cache keeps, and returns whether there was one, undamaged."""
    if step.kept is None:
        return False
    with suppress(OSError):
        checksum, content = _split(step.kept.read_bytes())
        if checksum == hashlib.sha256(content).digest():
            step.object.write_bytes(content)
            return True
    return False


def _keep(step: _Step) -> None:
    """Puts an object file in the cache, whole or not at all, in the place of those of earlier contents."""
    if step.kept is not None:
        with suppress(OSError):
            step.kept.parent.mkdir(exist_ok=True)
            content, copied = step.object.read_bytes(), step.object.with_suffix(".kept")
            copied.write_bytes(hashlib.sha256(content).digest() + content)
            for earlier in step.kept.parent.glob(f"{step.kept.name.rpartition('-')[0]}-*.o"):
                earlier.unlink(missing_ok=True)
            copied.replace(step.kept)


def _split(kept: bytes) -> tuple[bytes, bytes]:
    """Returns the checksum with which a kept file begins, and the rest."""
    size = hashlib.sha256().digest_size
    return kept[:size], kept[size:]


def _drop(step: _Step) -> None:
    """Removes the object file that the cache keeps."""
    if step.kept is not None:
        with suppress(OSError):
            step.kept.unlink(missing_ok=True)


def _status(step: _Step) -> int | None:
    """Returns the exit status, negative after a signal, as `subprocess` has it; None if the step did not end."""
    try:
        status = int(step.status.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    # A shell adds 128 to the number of a signal; a compiler may exit with any other status up to 255.
    return 128 - status if 128 < status < 128 + signal.NSIG else status


def _jobs() -> int:
    return len(os.sched_getaffinity(0))


def _run_by_ninja(ninja: str, steps: Sequence[_Step], scratch: Path) -> None:
    """Runs steps side by side by ninja; what it does not run to its end has no status."""
    lines = [f"builddir = {str(scratch).replace('$', '$$')}", "rule run", "  command = $line"]
    for index, step in enumerate(steps):
        lines += [f"build step{index}: run", f"  line = {step.line().replace('$', '$$')}"]
    file = scratch / "build.ninja"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with suppress(_FailedError):  # what a step printed, and how it ended, lies beside it
        _run([ninja, "-f", str(file), "-j", str(_jobs())], scratch / "ninja.log", scratch, "ninja failed")


def _run_side_by_side(steps: Sequence[_Step], scratch: Path) -> None:
    """Runs steps, as many at a time as there are processors; after one that fails no other begins."""
    waiting, running = list(steps), dict[subprocess.Popen[bytes], _Step]()
    try:
        while waiting or running:
            while waiting and len(running) < _jobs():
                step = waiting.pop(0)
                running[_start(["sh", "-c", step.line()], scratch, subprocess.DEVNULL)] = step
            for process in [process for process in running if process.poll() is not None]:
                if _status(running.pop(process)) != 0:
                    waiting.clear()
            time.sleep(0.02)
    except BaseException:  # Ctrl-C among them
        for process in running:
            _end(process)
        raise


def _kept_log(plan: Plan) -> Path:
    """Returns where the log of a build that failed is kept."""
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
switch, state = Switch(), calls.CacheState()
switch.active, state.iteration, state.sweep_at = True, calls.Store(), 1
caster = calls.Caster(state, switch, None, None)
caster.serve(("cpu",))
product = lambda *args: None
calls.accelerate(product, lambda *args: None, caster, torch.matmul, "to", torch.bfloat16, 9, None)
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
            process = _start(command, scratch, written)
        except OSError as error:
            raise _FailedError(f"{failure}: {_cannot_be_started(command[:1], error)}") from error
        try:
            status = process.wait()
        except BaseException:  # Ctrl-C among them
            _end(process)
            raise
    if status != 0:
        with log.open("rb") as read:
            read.seek(began)
            said = read.read().decode("utf-8", "replace")
        raise _FailedError(f"{failure}: `{command[0]}` {_how_it_ended(status)}{_last_words(said)}")


def _start(command: Sequence[str], scratch: Path, output: IO[str] | int) -> subprocess.Popen[bytes]:
    # A group of its own, so that no part of a compiler outlives it; and its temporary files go where they are cleared
    # away whatever happens.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and all that it started: ninja has groups of its own, and ends them if it is asked to end."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _last_words(said: str) -> str:
    """Returns the end of what a program printed, to be quoted: the errors, if it names any."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    quoted = [line for line in lines if _TELLING.search(line)][:_QUOTED_LINES] or lines[-_QUOTED_LINES:]
    return ":\n" + "\n".join(quoted) if quoted else ", without a word"


def _cannot_be_started(command: Sequence[str], error: OSError) -> str:
    return f"`{shlex.join(command)}` cannot be started ({error.strerror})"


@contextmanager
def _writing_to(place: Path) -> Iterator[Path]:
    """Makes a directory if need be; turns whatever the disk refuses there into an error of ours."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        yield place
    except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
        raise KernelError(
            f"the compiled extension cannot be written to {place} ({error}). Free some space or mend the permissions "
            "there, or set the environment variable AMPATCH_CACHE to another directory."
        ) from error

"""Compiling the extension: the choice of compiler and architectures, caching, failures, and the GPU code."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from ampatch.errors import KernelError, OptionError
from ampatch.native import extension, extension_build
from ampatch.native.extension_build import Built, carry_out, plan

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
NVCC = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
needs_cxx = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler here")
needs_nvcc = pytest.mark.skipif(NVCC is None or CXX is None, reason="there is no nvcc here")

TRY_OUT = extension_build._try_out


def build(*asked: Any, force: bool = False, **options: Any) -> Built:
    """Carries a plan out."""
    return carry_out(plan(*asked, **options), force)


# What the fake compilers below answer to.
VERSION = 'case "$*" in *--version*) echo "fake 1.0"; exit 0;; esac\n'


#: The cache of this run, in which `make` has built the extension.
CACHE_OF_RUN = os.environ["AMPATCH_CACHE"]


def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the workers of pytest-xdist share, so that one of them compiles and the others wait."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ampatch-cache"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing of the environment that chooses compilers."""
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "cache"
    monkeypatch.setenv("AMPATCH_CACHE", str(directory))
    return directory


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once, and is not tried out, in the place of the package's."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "operators.cpp").write_text("int answer() { return 42; }\n")
    (directory / "cuda.cu").write_text("__global__ void answer_kernel(int* to) { *to = 42; }\n")
    monkeypatch.setattr(extension, "source_directory", lambda: directory)
    monkeypatch.setattr(extension_build, "_try_out", lambda *_arguments: None)
    return directory


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Path]:
    """Writes a shell script that stands in for a compiler, under a name and in a folder of its own."""

    def program(script: str, name: str = "c++") -> Path:
        path = tmp_path / f"programs-{name}" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{VERSION}{script}\n")
        path.chmod(0o755)
        return path

    return program


@pytest.fixture
def cxx(program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell script the C++ compiler."""
    return lambda script: monkeypatch.setenv("CXX", str(program(script)))


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_build, "_nvcc_places", lambda: ["/nowhere"])


def left_in(cache: Path) -> list[str]:
    """The names in a cache, without locks and folders that hold nothing else."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock" and (path.is_file() or left_in(path)))


@pytest.mark.usefixtures("sources")
class TestPlan:
    @needs_cxx
    def test_plan_for_the_cpu_has_the_cpp_files_alone(self, sources: Path, cache: Path) -> None:
        planned = plan("cpu")

        assert not planned.compiler.is_nvcc
        assert planned.sources == (sources / "operators.cpp",)
        assert planned.directory == cache / extension.key(extension.source_hash(), ())
        assert (planned.architectures, planned.note) == ((), "")
        assert not cache.exists()

    @needs_nvcc
    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_plan_for_gpus_has_all_sources(self, device: str, sources: Path, cache: Path) -> None:
        planned = plan(device, ["80", "90"])

        assert planned.compiler.is_nvcc
        assert planned.compiler.version.startswith("nvcc release ")
        assert planned.sources == (sources / "cuda.cu", sources / "operators.cpp")
        assert planned.directory == cache / extension.key(extension.source_hash(), ("80", "90"))
        assert planned.note == ""

    @needs_cxx
    def test_auto_without_a_gpu_builds_cpu_kernels_and_says_so(
        self, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(extension_build, "_nvcc", lambda: pytest.fail("there may be one, and it takes long"))

        planned = plan()

        assert not planned.compiler.is_nvcc
        assert planned.sources == (sources / "operators.cpp",)
        assert planned.note.startswith("CPU kernels only: torch sees no GPU here.")
        assert "`ampatch build --device cuda`" in planned.note

    @needs_cxx
    def test_auto_without_nvcc_builds_cpu_kernels_and_says_so(
        self, no_nvcc: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

        planned = plan()

        assert not planned.compiler.is_nvcc
        assert planned.note.startswith("CPU kernels only: there is no nvcc in $CUDA_HOME/bin, $CUDA_PATH/bin, $PATH")

    @pytest.mark.parametrize(("device", "architectures"), [("cuda", None), ("auto", ["90"]), ("cuda", ["90"])])
    def test_a_plan_for_gpus_without_nvcc_is_an_error(
        self, device: str, architectures: list[str] | None, no_nvcc: None
    ) -> None:
        with pytest.raises(KernelError, match=r"no nvcc in .*Install the CUDA toolkit and set CUDA_HOME.*--device cpu"):
            plan(device, architectures)

    @needs_cxx
    def test_a_torch_for_rocm_gets_no_gpu_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

        assert plan().note == "CPU kernels only: this torch is built for ROCm, which the extension has no kernels for."
        with pytest.raises(KernelError, match="ROCm"):
            plan("cuda")

    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
    def test_nvcc_is_found_by_environment_variables(
        self, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
        nvcc.chmod(0o755)
        if variable == "PATH":
            monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
        else:
            monkeypatch.setenv(variable, str(nvcc.parent.parent))

        compiler = plan("cuda", ["90"]).compiler

        assert (compiler.command, compiler.version) == ((str(nvcc),), "nvcc release 13.0, V13.0.88")

    @needs_nvcc
    @pytest.mark.parametrize("text", ["90", "sm_90", "compute_90", "9.0", " 90 "])
    def test_architectures_have_several_spellings_and_are_sorted(self, text: str) -> None:
        assert plan("cuda", ["120", text, "90", "8.0"]).architectures == ("80", "90", "120")

    @pytest.mark.parametrize("text", ["", "ninety", "9", "sm90a", "90a", "9.0.0", "-90", "\u0668\u0660", "90 80"])
    def test_an_unreadable_architecture_is_an_error(self, text: str) -> None:
        with pytest.raises(OptionError, match=f"architectures: found {re.escape(repr(text))}, expected .*'sm_90'"):
            plan("cuda", [text])

    @needs_nvcc
    def test_an_architecture_that_nvcc_lacks_is_an_error(self) -> None:
        with pytest.raises(KernelError, match=r"nvcc release .* has no GPU architecture 10, 99: it knows .*90.*--arch"):
            plan("cuda", ["99", "90", "10"])

    @pytest.mark.parametrize(
        ("device", "architectures", "message"),
        [
            ("gpu", None, "device: found 'gpu', expected one of 'auto', 'cpu', 'cuda'"),
            ("cpu", ["90"], "architectures: found 90, although device='cpu'"),
            ("cuda", [], "architectures: found none"),
        ],
    )
    def test_contradictory_arguments_are_an_error(
        self, device: str, architectures: list[str] | None, message: str
    ) -> None:
        with pytest.raises(OptionError, match=message):
            plan(device, architectures)

    @needs_nvcc
    @pytest.mark.parametrize("capabilities", [[(9, 0), (8, 0), (9, 0)], [(9, 0)], []])
    def test_default_architectures_are_those_of_the_gpus(
        self, capabilities: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        expected = {f"{major}{minor}" for major, minor in capabilities} or {"80", "90"}
        assert plan("cuda").architectures == tuple(sorted(expected))


@pytest.mark.usefixtures("sources")
class TestTheCxxCompiler:
    def test_cxx_names_the_compiler_and_its_options(
        self, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = program("exit 0", "mine")
        monkeypatch.setenv("CXX", f"{compiler} -march=native")

        found = plan("cpu").compiler

        assert (found.command, found.version) == ((str(compiler), "-march=native"), "fake 1.0")

    @pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
    def test_without_cxx_the_first_compiler_on_the_path_is_used(
        self, name: str, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = program("exit 0", name)
        monkeypatch.setenv("PATH", str(compiler.parent))

        assert plan("cpu").compiler.command == (str(compiler),)

    def test_no_compiler_is_an_error_that_says_how_to_install_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")

        with pytest.raises(
            KernelError, match=r"no C\+\+ compiler: found none of c\+\+, g\+\+ and clang\+\+.*apt install"
        ):
            plan("cpu")

    @pytest.mark.parametrize(
        ("value", "message"),
        [("/no/such -O3", "CXX is '/no/such -O3', and there is no such program"), ("'g++", "which no shell can read")],
    )
    def test_a_wrong_cxx_is_an_error(self, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", value)

        with pytest.raises(KernelError, match=message):
            plan("cpu")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("#!/bin/sh\necho 'no licence' >&2; exit 3\n", r"ended with status 3:\nno licence\. Repair"),
            ("#!/bin/sh\nkill -SEGV $$\n", "was ended by SIGSEGV, without any output"),
            ("#!/no/such/shell\n", "cannot be started"),
            ("\0", "cannot be started"),
        ],
        ids=["status", "signal", "interpreter", "no program"],
    )
    def test_a_compiler_that_does_not_run_is_an_error(
        self, content: str, message: str, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = program("")
        compiler.write_text(content)
        monkeypatch.setenv("CXX", str(compiler))

        with pytest.raises(KernelError, match=message):
            plan("cpu")


@pytest.mark.usefixtures("sources")
class TestTheCommand:
    @needs_cxx
    def test_options_of_the_cxx_compiler(self) -> None:
        planned = plan("cpu")
        compiling = extension_build._compiling(planned)
        linking = extension_build._linking(planned, [Path("from.o")], Path("to.so"))

        assert {"-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-c"} <= set(compiling)
        assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in compiling
        assert "-DUSE_CUDA" not in compiling
        assert {"-shared", "-fPIC", "from.o"} <= set(linking)
        assert {"-ltorch_cpu", "-lc10"} <= set(linking[linking.index("to.so") :])
        assert linking[linking.index("to.so") - 1] == "-o"

    @needs_nvcc
    def test_options_of_nvcc(self) -> None:
        planned = plan("cuda", ["80", "90", "120"])
        words = extension_build._compiling(planned)

        assert {"-std=c++17", "-O3", "--fmad=false", "-DUSE_CUDA", "-c"} <= set(words)
        assert "-shared" in extension_build._linking(planned, [Path("from.o")], Path("to.so"))
        host = words[words.index("-Xcompiler") + 1].split(",")
        assert host[:3] == ["-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
        assert ("-mavx2" in host) == (extension.processor() == "x86_64_avx2")
        codes = [after for word, after in pairwise(words) if word == "-gencode"]
        assert codes == [
            "arch=compute_80,code=sm_80",
            "arch=compute_90,code=sm_90",
            "arch=compute_120,code=sm_120",
            "arch=compute_120,code=compute_120",
        ]


@pytest.mark.usefixtures("sources")
@needs_cxx
class TestBuild:
    def test_a_built_library_is_found_with_its_description(self, cache: Path) -> None:
        built = build("cpu")

        library = built.library
        assert not built.was_cached
        assert library == extension.find()
        assert library.path.parent == cache / extension.key(extension.source_hash(), ())
        assert library.architectures == ()
        assert library.compiler == plan("cpu").compiler.version
        expected = (torch.__version__, extension.ABI, extension.processor())
        assert (library.torch, library.abi, library.machine) == expected
        assert left_in(cache) == [library.path.parent.name]
        assert left_in(library.path.parent) == ["build.log", extension.LIBRARY, extension.SIDECAR]
        assert (library.path.parent / "build.log").read_text().startswith(f"$ {CXX} ")
        os.umask(mask := os.umask(0))
        assert library.path.parent.stat().st_mode & 0o777 == 0o777 & ~mask  # other users may read it

    def test_a_cached_library_is_built_again_only_if_that_is_forced(self, cache: Path) -> None:
        library = build("cpu").library
        before = library.path.stat()

        again = build("cpu")
        assert (again.library, again.was_cached) == (library, True)
        assert library.path.stat().st_ino == before.st_ino

        forced = build("cpu", force=True)
        assert not forced.was_cached
        assert forced.library.path.stat().st_ino != before.st_ino
        assert left_in(cache) == [library.path.parent.name]

    def test_changed_sources_are_built_beside_the_earlier_library(self, sources: Path, cache: Path) -> None:
        first = build("cpu").library
        (sources / "operators.cpp").write_text("int answer() { return 43; }\n")

        second = build("cpu")

        assert not second.was_cached
        assert extension.find() == second.library != first
        assert len(left_in(cache)) == 2

    @pytest.mark.parametrize("name", [extension.SIDECAR, extension.LIBRARY])
    def test_an_incomplete_library_is_replaced(self, name: str, cache: Path) -> None:
        build("cpu").library.path.with_name(name).unlink()

        built = build("cpu")

        assert not built.was_cached
        assert left_in(cache) == [built.library.path.parent.name]

    def test_a_named_directory_gets_the_library_and_keeps_other_files(
        self, sources: Path, tmp_path: Path, cache: Path
    ) -> None:
        output = tmp_path / "out" / "put"
        built = build("cpu", output=output)
        assert built.library == extension.read(output)
        assert left_in(output) == ["build.log", extension.LIBRARY, extension.SIDECAR]
        assert build("cpu", output=output).was_cached
        assert not cache.exists()

        (output / "notes").write_text("mine")
        (sources / "operators.cpp").write_text("int answer() { return 43; }\n")
        again = build("cpu", output=output)
        assert not again.was_cached
        assert again.library.sources == extension.source_hash()
        assert (output / "notes").read_text() == "mine"

    def test_a_library_beside_the_sources_is_found(self, sources: Path) -> None:
        library = build("cpu", output=sources).library

        assert extension.find() == library
        assert (sources / "operators.cpp").exists()

    def test_leftovers_of_a_killed_build_are_removed_and_nothing_else(self) -> None:
        directory = plan("cpu").directory
        for name in (f".{extension.LIBRARY}.abc", "other"):
            (directory / name).mkdir(parents=True)
            (directory / name / "operators.cpp.o").write_text("half")

        build("cpu")

        assert left_in(directory) == ["build.log", extension.LIBRARY, extension.SIDECAR, "other"]

    def test_one_of_several_processes_compiles_and_the_others_wait(
        self, cxx: Callable[[str], None], tmp_path: Path
    ) -> None:
        calls = tmp_path / "calls"
        cxx(f'echo "$$" >> {calls}\nsleep 0.3\nexec {CXX} "$@"')
        context = multiprocessing.get_context("fork")  # the children have what was put in place here
        start, answers = context.Barrier(4), context.Queue()

        def ask(start: Barrier) -> None:
            start.wait()
            try:
                built = build("cpu")
            except KernelError as error:  # which nobody would wait for
                answers.put((False, str(error)))
            else:
                answers.put((built.was_cached, str(built.library.path)))

        children = [context.Process(target=ask, args=(start,), daemon=True) for _ in range(4)]
        for child in children:
            child.start()
        got = [answers.get(timeout=60) for _ in children]
        for child in children:
            child.join()

        assert len(calls.read_text().splitlines()) == 2  # to compile, and to link
        assert sorted(was_cached for was_cached, _ in got) == [False, True, True, True]
        assert {path for _, path in got} == {str(plan("cpu").directory / extension.LIBRARY)}


class TestObjectFiles:
    """Each file is compiled by itself, side by side with the others."""

    @pytest.fixture
    def several(self, sources: Path, cxx: Callable[[str], None]) -> list[str]:
        """The names of three sources, and a compiler that takes any file without the word `error` in it."""
        script = """
            for word in "$@"; do case "$word" in
                *.cpp) if grep -q error "$word"; then echo an error; exit 1; fi;;
            esac; done
            while [ "$1" != -o ]; do shift; done; echo made > "$2"
        """
        cxx(script)
        names = ["alone.cpp", "cpu.cpp", "operators.cpp"]
        for name in names:
            (sources / name).write_text("")
        return names

    def test_the_log_has_all_commands(self, several: list[str]) -> None:
        log = (build("cpu").library.path.parent / "build.log").read_text()

        assert [line.split()[-3].rpartition("/")[2] for line in log.splitlines() if " -c " in line] == several
        assert log.count("$ ") == 4  # with the one that links

    def test_files_are_compiled_at_once(self, several: list[str], cxx: Callable[[str], None], tmp_path: Path) -> None:
        began = tmp_path / "began"
        began.mkdir()
        # Each waits until all have begun, for ten seconds at most; the one that links comes last, and sees them all.
        wait = f"touch {began}/$$; for i in $(seq 1000); do [ $(ls {began} | wc -l) -lt {len(several)} ] || break"
        ends = f"sleep 0.01; done; [ $(ls {began} | wc -l) -ge {len(several)} ] || exit 1"
        makes = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
        cxx(f"{wait}; {ends}; {makes}")

        assert not build("cpu").was_cached

    @pytest.mark.parametrize("faulty", ["alone.cpp", "operators.cpp"])
    def test_an_error_in_one_file_is_told_once(self, faulty: str, several: list[str], sources: Path) -> None:
        (sources / faulty).write_text("an error")

        with pytest.raises(KernelError, match=r"`.*c\+\+` ended with status 1:\nan error\."):
            build("cpu")

        assert (plan("cpu").directory / "build.log").read_text().count("an error") == 1


@pytest.mark.usefixtures("sources")
@needs_cxx
class TestFailure:
    @staticmethod
    def failed_log(match: str) -> str:
        """The log of a build that fails, which leaves nothing else."""
        with pytest.raises(KernelError, match=match) as raised:
            build("cpu")

        log = plan("cpu").directory / "build.log"
        assert left_in(log.parent) == [log.name]
        assert str(raised.value).endswith(f". The command and all that it printed are in {log}.")
        assert extension.find() is None
        return log.read_text(errors="replace")

    def test_an_error_in_a_source_is_told_and_logged(self, sources: Path) -> None:
        (sources / "operators.cpp").write_text("int answer() { return what; }\n")

        log = self.failed_log(r"compiling the extension failed: `.*` ended with status 1:\n.*operators\.cpp:1.*what")

        assert log.startswith(f"$ {CXX} ")
        assert "error" in log

    def test_an_error_of_the_linker_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extension, "LINK_FLAGS", (*extension.LINK_FLAGS, "-lno_such_library"))

        self.failed_log("cannot find -lno_such_library")

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("for i in 1 2 3 4 5 6 7 8 9; do echo line $i; done; exit 7", r"status 7:\nline 4\n(.*\n)*line 9\. The"),
            ("kill -SEGV $$", "was ended by SIGSEGV"),
            ("kill -KILL $$", "was ended by SIGKILL"),
            (r"printf '\377 error: in Latin 1\n'; exit 1", "error: in Latin 1"),
            ("exit 255", "ended with status 255, without any output"),  # no number of a signal and 128
            ("exit 193", "ended with status 193, without any output"),
        ],
        ids=["status", "SIGSEGV", "SIGKILL", "not UTF-8", "255", "193"],
    )
    def test_the_way_in_which_a_compiler_ended_is_told(
        self, script: str, message: str, cxx: Callable[[str], None]
    ) -> None:
        cxx(script)
        self.failed_log(message)

    def test_a_library_replaces_a_failed_log_and_outlives_a_failure(
        self, cxx: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cxx("exit 1")
        with pytest.raises(KernelError):
            build("cpu")
        monkeypatch.delenv("CXX")

        library = build("cpu").library
        assert library.path.with_name("build.log").read_text().count("$ ") == 2

        cxx("exit 1")
        with pytest.raises(KernelError):
            build("cpu", force=True)
        assert extension.find() == library

    def test_a_library_whose_replacement_is_interrupted_is_rebuilt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = build("cpu").library
        replace_ = Path.replace

        def replace(self: Path, target: Path) -> Path:
            if self.name == extension.LIBRARY:
                raise KeyboardInterrupt
            return replace_(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                build("cpu", force=True)

        assert extension.find() is None
        assert build("cpu").library == extension.find() == library

    def test_an_interrupted_build_leaves_no_file_and_no_process(
        self, cache: Path, cxx: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part, elsewhere = tmp_path / "part", tmp_path / "temporary"
        elsewhere.mkdir()
        monkeypatch.setenv("TMPDIR", str(elsewhere))
        # A compiler in two parts, which has begun to write. It waits until whoever started it is waiting too.
        script = f'touch "$TMPDIR/temporary"; sleep 60 & echo $! > {part}; sleep 0.5; kill -ALRM {os.getpid()}; wait'
        cxx(script)

        def interrupt(_signal: int, _frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                build("cpu")
        finally:
            signal.signal(signal.SIGALRM, before)

        assert left_in(cache) == left_in(elsewhere) == []
        assert extension.find() is None
        assert is_over(int(part.read_text()))

    def test_sources_that_change_meanwhile_are_an_error(
        self, sources: Path, cache: Path, cxx: Callable[[str], None]
    ) -> None:
        cxx(f'echo >> {sources}/operators.cpp\nexec {CXX} "$@"')

        with pytest.raises(KernelError, match=r"were changed while they were compiled\. Build once more\."):
            build("cpu")

        assert left_in(cache) == []

    def test_a_cache_that_cannot_be_written_is_an_error(self, tmp_path: Path, cache: Path) -> None:
        cache.write_text("a file")

        with pytest.raises(KernelError, match=rf"cannot be written to {re.escape(str(cache))}/\S+ \(.*AMPATCH_CACHE"):
            build("cpu")

    @pytest.mark.parametrize("when", ["write_text", "mkdir"])
    def test_a_full_disk_is_an_error(self, when: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache.mkdir()
        planned = plan("cpu")

        def full(*_arguments: object, **_options: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, when, full)
        with pytest.raises(KernelError, match=r"cannot be written to .*No space left on device.*Free some space"):
            carry_out(planned)
        monkeypatch.undo()

        assert left_in(cache) == []


def is_over(pid: int) -> bool:
    """Whether a process ends within a second; its parent may not have waited for it yet."""
    for _ in range(20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@needs_cxx
class TestTrial:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("int answer();\nint question = answer();\n", "undefined symbol"),
            ("#include <cstdlib>\nint question = (abort(), 0);\n", "was ended by SIGABRT"),
            ("int answer;\n", "no attribute 'unscale_'"),
        ],
        ids=["undefined symbol", "crash", "no operators"],
    )
    def test_a_library_that_does_not_run_is_an_error(
        self, source: str, message: str, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(extension_build, "_try_out", TRY_OUT)
        (sources / "operators.cpp").write_text(source)

        with pytest.raises(KernelError, match=rf"was compiled, and does not run here \(cpu\)(.*\n)*.*{message}"):
            build("cpu")

        assert extension.find() is None
        log = (plan("cpu").directory / "build.log").read_text()
        assert message in log or "SIG" in message


@pytest.mark.gpu
@needs_nvcc
def test_a_library_for_this_gpu_is_built_and_tried_on_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPATCH_CACHE", str(shared_cache(tmp_path_factory)))

    library = build("cuda").library

    assert library.serves(torch.cuda.get_device_capability())
    assert "cuda:0" in (library.path.parent / "build.log").read_text()
    assert extension.find() == library


def test_extension_build_is_imported_by_the_commands_alone() -> None:
    importing = re.compile(
        r"^\s*(?:from ampatch\.native import .*\bextension_build\b|from ampatch\.native\.extension_build )",
        re.MULTILINE,
    )
    files = (ROOT / "ampatch").rglob("*.py")

    assert [file.name for file in files if importing.search(file.read_text())] == ["commands.py"]


# GPU code, taken apart

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import kernel_table

needs_cuobjdump = pytest.mark.skipif(
    not kernel_table.tools_are_there(),
    reason="nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm are not installed",
)

FEW, MOST = 64, 1024  # tensors of a launch, in csrc/cuda.cu

# The kernel of each operator that moves elements, and what its main loops load (how many vectors of how many bits) and
# store (of how many bits): for each half type, and for float32; or in the only loop, after None.
Moved = tuple[dict[int, int], set[int]]
MAIN_LOOPS: dict[str, tuple[str, Moved | None, Moved]] = {
    "unscale_": ("unscale_kernel", ({128: 4}, {128}), ({128: 4}, {128})),
    "unscale_copy": ("unscale_copy_kernel", ({64: 4}, {64, 128}), ({128: 4}, {128})),
    "unscale_add": ("unscale_add_kernel", ({64: 4, 128: 4}, {64, 128}), ({128: 8}, {128})),
    "found_inf_norm": ("found_inf_norm_kernel", ({128: 4}, set()), ({128: 4}, set())),
    "copy_to_half": ("copy_to_half_kernel<false>", ({128: 4}, {64}), ({128: 4}, {128})),
    "copy_to_half_grads": ("copy_to_half_kernel<true>", ({128: 4}, {64}), ({128: 4}, {128})),
    "fingerprint": ("fingerprint_kernel", None, ({128: 4}, set())),
    "copy_edits": ("follow_kernel", ({64: 4, 128: 4}, {128}), ({128: 8}, {128})),
    "join": ("join_kernel", None, ({64: 8}, {128})),
    "split": ("split_kernel", None, ({128: 4}, {64})),
    "round_stochastically": ("round_stochastically_kernel", None, ({128: 4}, {64})),
}


def kernels_in(source: str) -> set[str]:
    """The names of the kernels that a CUDA source defines."""
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", source))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> extension.Library:
    """The library for two architectures, which is built if this run has none of these sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPATCH_CACHE", CACHE_OF_RUN)
        if not plan("cuda", ["80", "90"]).directory.exists():
            patch.setenv("AMPATCH_CACHE", str(shared_cache(tmp_path_factory)))
        return build("cuda", ["80", "90"]).library


@pytest.fixture(scope="module")
def kernels(library: extension.Library) -> list[kernel_table.Kernel]:
    return kernel_table.kernels_of(library.path)


def test_the_table_of_kernels_has_every_operator_on_lists() -> None:
    defined = re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "operators.cpp").read_text())

    assert sorted(defined) == sorted([*MAIN_LOOPS, "clip_factor", "update_scale"])


@pytest.mark.slow
@needs_nvcc
@needs_cuobjdump
class TestMachineCode:
    @pytest.mark.parametrize("architecture", ["80", "90"])
    def test_every_kernel_is_compiled_for_few_and_for_many_tensors(
        self, architecture: str, kernels: list[kernel_table.Kernel]
    ) -> None:
        defined = set().union(*(kernels_in(path.read_text()) for path in (ROOT / "csrc").glob("*.cu")))
        there = {kernel.name.partition("<")[0] for kernel in kernels if kernel.architecture == architecture}
        assert there == defined

        for kernel, *_ in MAIN_LOOPS.values():
            sizes = [each.capacity for each in kernels if (each.name, each.architecture) == (kernel, architecture)]
            assert sorted(sizes) == [FEW, MOST], kernel

    @pytest.mark.parametrize("architecture", ["80", "90"])
    @pytest.mark.parametrize("operator", MAIN_LOOPS)
    def test_kernels_load_vectors_and_wait_only_after_all_loads(
        self, operator: str, architecture: str, kernels: list[kernel_table.Kernel]
    ) -> None:
        name, half, full = MAIN_LOOPS[operator]
        for kernel in kernels:
            if (kernel.name, kernel.architecture) == (name, architecture):
                loops = kernel.main_loops
                moved = [(dict(loop.loads), loop.stores) for loop in loops]
                expected = [full] if half is None else [half, half, full]
                assert sorted(moved, key=str) == sorted(expected, key=str)
                assert [loop.in_flight for loop in loops] == [loop.loads.total() for loop in loops]
                # Moves a number to a uniform register, and so waits for it, as for a factor that was just loaded.
                assert [each.operands for each in kernel.instructions if each.opcode.startswith("R2UR")] == []

    def test_kernels_spill_no_registers(self, kernels: list[kernel_table.Kernel]) -> None:
        assert [kernel.name for kernel in kernels if kernel.spills] == []
        # Four blocks of 256 threads fit on a multiprocessor, which has 65,536 registers.
        assert all(kernel.registers <= 64 for kernel in kernels)

    def test_a_launch_of_few_tensors_copies_few_arguments(self, kernels: list[kernel_table.Kernel]) -> None:
        largest = {
            capacity: max(kernel.arguments for kernel in kernels if kernel.capacity == capacity)
            for capacity in (FEW, MOST, None)
        }
        assert largest[FEW] <= 2048
        assert largest[MOST] <= 32764  # the most that a launch takes
        assert largest[None] <= 64

    def test_slow_loops_in_machine_code_are_recognised(self, tmp_path: Path) -> None:
        loop = "\n#pragma unroll 1\nfor (int at = threadIdx.x; at < count; at += 256)"
        source = f"""
            __global__ void single_kernel(float* x, int count) {{ {loop} x[at] *= 2; }}
            __global__ void together_kernel(float4* x, float4* y, int count) {{
                {loop} {{ float4 one = x[at], other = x[at + count]; y[at] = one; y[at + count] = other; }}
            }}
            __global__ void by_turns_kernel(float4* x, float4* y, int count) {{
                {loop} {{ y[at] = x[at]; y[at + count] = x[at + count]; }}
            }}
            __global__ void dependent_kernel(int4* x, int4* y, int count) {{
                {loop} {{ int4 one = x[at], other = x[one.x]; y[at] = one; y[at + count] = other; }}
            }}
            __global__ void spilling_kernel(float4* x, int* places, int count) {{
                float4 own[64];
                {loop} own[places[at]] = x[at];
                {loop} x[at] = own[at % 64];
            }}
        """
        (tmp_path / "loads.cu").write_text(source)
        command = [str(NVCC), "-arch=sm_80", "-shared", "-Xcompiler", "-fPIC", "loads.cu", "-o", "loads.so"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

        found = {kernel.name: kernel for kernel in kernel_table.kernels_of(tmp_path / "loads.so")}

        assert set(found) == kernels_in(source)
        assert found["single_kernel"].main_loops == []
        assert [name for name, kernel in found.items() if kernel.spills] == ["spilling_kernel"]
        in_flight = {
            name: min(loop.in_flight / loop.loads.total() for loop in found[name].main_loops)
            for name in ("together_kernel", "by_turns_kernel", "dependent_kernel")
        }
        assert in_flight["together_kernel"] == 1
        assert in_flight["by_turns_kernel"] < 1
        assert in_flight["dependent_kernel"] < 1

    def test_the_table_has_a_row_for_each_kernel_and_dtype(self, kernels: list[kernel_table.Kernel]) -> None:
        rows = kernel_table.table([kernel for kernel in kernels if kernel.architecture == "90"]).splitlines()[2:]
        cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]

        dtypes = {name: sorted(cell[4] for cell in cells if cell[0] == name) for name in {cell[0] for cell in cells}}

        for kernel, half, _ in MAIN_LOOPS.values():
            expected = ["float32"] if half is None else ["bfloat16", "float16", "float32"]
            assert dtypes.pop(kernel.replace("_kernel", "")) == expected
        assert dtypes == {"clip_factor": [""], "update_scale": [""]}

    def test_a_library_of_gpu_kernels_loads_without_a_gpu(self, library: extension.Library) -> None:
        program = (
            "import sys, torch; torch.ops.load_library(sys.argv[1]); grad = torch.ones(3); "
            "torch.ops.ampatch.unscale_([grad], torch.tensor(2.0), torch.zeros(())); print(grad.tolist())"
        )

        done = subprocess.run(
            [sys.executable, "-c", program, library.path],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=True,
        )

        assert done.stdout == "[2.0, 2.0, 2.0]\n"
        assert shlex.quote(str(NVCC)) in (library.path.parent / "build.log").read_text()

"""The compiled library: the hash of its sources, the cache, which library is found, and loading it once."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fresh import Fresh

from ampatch.errors import KernelError
from ampatch.native import extension
from ampatch.native.extension import ABI, CALLS, OPERATORS, Library

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
SOURCES = {"operators.cpp": "// schemas", "cuda.cu": "// kernels", "lists.h": "// checks"}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of sources that stands in for the package's."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    for name, text in SOURCES.items():
        (directory / name).write_text(text)
    monkeypatch.setattr(extension, "source_directory", lambda: directory)
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("AMPATCH_CACHE", str(directory))
    return directory


@pytest.fixture
def put(sources: Path, cache: Path) -> Callable[..., Library]:
    """Puts a library for some architectures into the cache, or beside the sources."""

    def put(*architectures: str, directory: Path | None = None, **different: str) -> Library:
        library = Library(
            path=Path(),
            size=4,
            architectures=architectures,
            sources=extension.source_hash(),
            abi=ABI,
            machine=extension.processor(),
            compiler="c++ 12",
            torch="2.13.0",
        )
        library = replace(library, **different)
        directory = directory or cache / extension.key(library.sources, architectures)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / extension.LIBRARY).write_bytes(b"\x7fELF")
        (directory / extension.SIDECAR).write_text(extension.describe(library))
        return replace(library, path=directory / extension.LIBRARY)

    return put


class TestSources:
    def test_sources_are_found_in_this_install(self) -> None:
        assert extension.source_directory().samefile(ROOT / "csrc")
        assert "operators.cpp" in [path.name for path in extension.sources()]

    @pytest.mark.parametrize("name", SOURCES)
    def test_the_hash_depends_on_each_file_and_its_name(self, name: str, sources: Path) -> None:
        seen = {extension.source_hash()}

        (sources / name).write_text(SOURCES[name] + " ")
        seen.add(extension.source_hash())
        (sources / name).write_text(SOURCES[name])
        (sources / name).rename(sources / f"other_{name}")
        seen.add(extension.source_hash())

        assert len(seen) == 3

    def test_a_file_with_the_text_of_two_has_another_hash(self, sources: Path) -> None:
        before = extension.source_hash()
        (sources / "lists.h").unlink()
        (sources / "cuda.cu").write_text(f"{SOURCES['cuda.cu']}\nlists.h\n{SOURCES['lists.h']}")

        assert extension.source_hash() != before

    def test_the_hash_ignores_other_files_and_depends_on_flags(
        self, sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = extension.source_hash()
        (sources / "libampatch.so").write_bytes(b"\x7fELF")
        (sources / "__init__.py").write_text("")
        assert extension.source_hash() == before

        monkeypatch.setattr(extension, "CUDA_FLAGS", ("-DUSE_CUDA",))
        assert extension.source_hash() != before

    def test_missing_sources_are_an_error_that_says_what_to_type(self, sources: Path) -> None:
        (sources / "operators.cpp").unlink()

        with pytest.raises(KernelError, match=r"csrc holds no C\+\+ sources.*pip install"):
            extension.source_hash()
        assert extension.find() is None

    def test_an_install_without_the_sources_package_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(_package: str) -> None:
            raise ModuleNotFoundError

        monkeypatch.setattr(extension, "files", missing)

        with pytest.raises(KernelError, match=r"not part of this install.*pip install"):
            extension.source_directory()
        assert extension.find() is None

    def test_an_unreadable_source_is_an_error(self, sources: Path) -> None:
        (sources / "lists.h").unlink()
        (sources / "lists.h").mkdir()

        with pytest.raises(KernelError, match=r"lists\.h cannot be read \(Is a directory\)"):
            extension.source_hash()


@pytest.mark.parametrize(
    ("architectures", "capability", "served"),
    [
        ((), (8, 0), False),
        (("80",), (8, 0), True),
        (("80",), (8, 6), True),
        (("86",), (8, 0), False),
        (("80",), (7, 5), False),
        (("80",), (9, 0), True),  # by the PTX
        (("80", "90"), (8, 9), True),
        (("80", "90"), (10, 0), True),  # by the PTX
        (("90", "120"), (10, 0), False),  # between the two: no machine code, and the PTX is of a newer one
        (("120", "90"), (12, 1), True),
    ],
    ids=str,
)
def test_machine_code_serves_a_major_version_and_ptx_all_newer_ones(
    architectures: tuple[str, ...], capability: tuple[int, int], served: bool
) -> None:
    assert Library(Path(), 0, architectures, "", "", "", "", "").serves(capability) is served


@pytest.mark.usefixtures("sources")
class TestTheCache:
    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            ({"AMPATCH_CACHE": "/a", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a"),
            ({"AMPATCH_CACHE": "~/a", "HOME": "/h"}, "/h/a"),
            ({"AMPATCH_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/ampatch"),
            ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ampatch"),
            ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/ampatch"),
            ({"HOME": "/h"}, "/h/.cache/ampatch"),
        ],
    )
    def test_environment_variables_choose_the_cache(
        self, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AMPATCH_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        assert extension.cache_directory() == Path(expected)

    def test_a_relative_cache_is_below_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("AMPATCH_CACHE", "here")

        assert extension.cache_directory() == tmp_path / "here"

    def test_a_user_without_a_home_has_no_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        for name in ("AMPATCH_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", homeless)

        with pytest.raises(KernelError, match=r"Could not determine home.*Set the environment variable AMPATCH_CACHE"):
            extension.cache_directory()
        assert extension.find() is None

    def test_the_key_depends_on_sources_abi_machine_and_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extension, "processor", lambda _: "x86_64")
        keys = [extension.key("0123456789abcdef" + "0" * 48, each) for each in [(), ("80",), ("80", "90")]]
        assert keys == [
            "0123456789abcdef-torch2.10-x86_64-cpu",
            "0123456789abcdef-torch2.10-x86_64-sm80",
            "0123456789abcdef-torch2.10-x86_64-sm80-sm90",
        ]

        monkeypatch.setattr(extension, "processor", lambda _: "aarch64")
        keys.append(extension.key("0123456789abcdef", ()))
        keys.append(extension.key("0123456789abcdef", (), replace(OPERATORS, abi="2.11")))
        keys.append(extension.key("0123456789abcdef", (), CALLS))
        keys.append(extension.key("1123456789abcdef", ()))
        assert len(set(keys)) == 7

    def test_vector_instructions_identify_a_library_with_loops_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        without_loops = replace(OPERATORS, has_loops=False)
        found = []
        for capability in ("AVX512", "DEFAULT"):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            found.append(
                [(extension.processor(part), extension.source_hash(part)) for part in (OPERATORS, without_loops)]
            )
        (with_vectors, calls), (plain, same) = found
        assert (with_vectors[0], plain[0], calls[0]) == ("x86_64_avx2", "x86_64", "x86_64")
        assert with_vectors[1] != plain[1]
        assert calls == same
        assert not CALLS.has_loops

    def test_the_key_of_calls_names_the_versions_of_torch_and_python(self) -> None:
        key = extension.key("0123456789abcdef", (), CALLS)
        assert key.startswith(f"0123456789abcdef-torch{torch.__version__}-cpython-")
        assert key.endswith("-calls")

    @pytest.mark.parametrize(("abi", "version"), [("2.10", "0x020a000000000000"), ("2.9", "0x0209000000000000")])
    def test_the_abi_is_a_flag_of_the_compiler(self, abi: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extension, "ABI", abi)

        assert extension.target_flag() == f"-DTORCH_TARGET_VERSION={version}"


@pytest.mark.usefixtures("sources")
class TestFind:
    def test_an_empty_cache_and_a_cache_that_is_a_file_hold_no_library(self, cache: Path) -> None:
        assert extension.find() is None
        cache.write_text("")
        assert extension.find() is None

    def test_a_library_is_found_until_a_source_changes(self, put: Callable[..., Library], sources: Path) -> None:
        library = put()
        assert extension.find() == library

        (sources / "lists.h").write_text("// other checks")
        assert extension.find() is None

    @pytest.mark.parametrize("different", [{"abi": "2.9"}, {"machine": "riscv64"}, {"sources": "0" * 64}], ids=str)
    def test_a_library_of_other_sources_or_machines_is_not_found(
        self, different: dict[str, str], put: Callable[..., Library], sources: Path, cache: Path
    ) -> None:
        put(directory=cache / extension.key(extension.source_hash(), ()), **different)
        put(directory=sources, **different)

        assert extension.find() is None

    @pytest.mark.parametrize(
        ("built", "with_package", "found"),
        [
            ([(), ("90",), ("80", "90"), ("80",)], None, ("80", "90")),  # for most architectures
            ([("80",), ("90",), ("86",)], None, ("90",)),
            ([], ("80",), ("80",)),
            ([("75",)], ("80", "90"), ("75",)),  # built here on purpose
            ([()], ("80",), ("80",)),
        ],
        ids=str,
    )
    def test_the_library_with_the_best_architectures_is_found(
        self,
        built: list[tuple[str, ...]],
        with_package: tuple[str, ...] | None,
        found: tuple[str, ...],
        put: Callable[..., Library],
        sources: Path,
    ) -> None:
        libraries = [put(*architectures) for architectures in built]
        if with_package is not None:
            libraries.append(put(*with_package, directory=sources))

        assert extension.find() == next(each for each in libraries if each.architectures == found)

    @pytest.mark.parametrize(
        ("capabilities", "found"), [([(9, 0), (7, 5)], ("75",)), ([(9, 0)], ("80", "90")), ([(7, 0)], ("80", "90"))]
    )
    def test_with_cuda_in_use_a_library_that_serves_every_gpu_is_found(
        self,
        capabilities: list[tuple[int, int]],
        found: tuple[str, ...],
        put: Callable[..., Library],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        libraries = {each.architectures: each for each in (put("80", "90"), put(), put("75"))}
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

        assert extension.find() == libraries[found]

    def test_finding_a_library_does_not_initialise_cuda(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked(*_arguments: object) -> None:
            raise AssertionError("CUDA would be initialised")

        for name in ("get_device_capability", "device_count", "init", "_lazy_init"):
            monkeypatch.setattr(torch.cuda, name, asked)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

        assert extension.find() is None
        assert put("80") == extension.find()

    def test_a_torch_for_rocm_gets_a_library_without_gpu_kernels(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = put()
        put("80")
        monkeypatch.setattr(torch.version, "hip", "6.4")

        assert extension.find() == library

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[" * 100_000,
            "[]",
            "null",
            "{}",
            "\0",
            b"\xff\xfe",
            {"architectures": None},
            {"abi": 2.1},
            {"no_such": None},
        ],
        ids=lambda value: repr(value)[:40],
    )
    def test_a_library_with_a_broken_description_is_not_found(
        self, text: str | bytes | dict[str, object], put: Callable[..., Library]
    ) -> None:
        sidecar = put("80").path.with_name(extension.SIDECAR)
        if isinstance(text, dict):
            text = json.dumps(json.loads(sidecar.read_text()) | text)
        sidecar.write_bytes(text.encode() if isinstance(text, str) else text)

        assert extension.find() is None

    def test_a_truncated_library_is_not_found(self, put: Callable[..., Library]) -> None:
        library = put("80")
        library.path.write_bytes(library.path.read_bytes()[:-1])

        assert extension.find() is None
        assert extension.read(library.path.parent) is None

    @pytest.mark.parametrize("name", [extension.SIDECAR, extension.LIBRARY])
    def test_a_library_without_one_of_its_files_is_not_found(self, name: str, put: Callable[..., Library]) -> None:
        library = put("80")
        library.path.with_name(name).unlink()
        smaller = put()

        assert extension.find() == smaller


LOADING = """
import threading
from dataclasses import replace
from pathlib import Path
import torch
from ampatch.native import extension
from ampatch.errors import KernelError

library = extension.find()
assert library is not None and extension.loaded() in (None, library)
print(library.path)

broken = replace(library, path=Path("broken") / extension.LIBRARY)
broken.path.parent.mkdir()
broken.path.write_text("no library")
if extension.loaded() is None:
    try:
        extension.load(broken)
    except KernelError as error:
        print(error)
    assert extension.loaded() is None

loads = []
load_library = torch.ops.load_library
torch.ops.load_library = lambda path: (loads.append(path), load_library(path))
threads = [threading.Thread(target=extension.load, args=[library]) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(loads) <= 1 and extension.loaded() == library

grad, found_inf = torch.tensor([2.0, float("inf")]), torch.zeros(())
torch.ops.ampatch.unscale_([grad], torch.tensor(0.5), found_inf)
assert grad.tolist() == [1.0, float("inf")] and found_inf.item() == 1

for process in (extension._process, extension._Process()):
    extension._process = process
    try:
        extension.load(broken)
    except KernelError as error:
        print(error)
"""


class TestLoad:
    @pytest.mark.slow
    @pytest.mark.usefixtures("compiled")
    def test_a_process_loads_one_library_once(self, fresh: Fresh, tmp_path: Path) -> None:
        done = fresh.run(LOADING, cwd=tmp_path)

        assert done.returncode == 0, done.stderr
        path, *unloadable, second, foreign = done.stdout.splitlines()
        if unloadable:
            assert unloadable[0].startswith("the compiled library broken/libampatch.so cannot be loaded (")
            assert f"built with torch {torch.__version__}, and this is torch {torch.__version__}" in unloadable[0]
            assert "Type `ampatch build --force`" in unloadable[0]
        assert second.startswith("broken/libampatch.so cannot be loaded: this process has its operators")
        assert f"from {path} already. Start a new process" in second
        assert "from something other than ampatch already" in foreign

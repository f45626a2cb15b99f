"""The compiled library: what tells one from another, which of them is found, and loading it once."""

from __future__ import annotations

import json
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


def use_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """As if CUDA were in use in this process, with GPUs of these capabilities."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


class TestSources:
    def test_they_are_found_in_this_install(self) -> None:
        assert extension.source_directory().samefile(ROOT / "csrc")
        assert "operators.cpp" in [path.name for path in extension.sources()]

    @pytest.mark.parametrize("name", SOURCES)
    def test_each_byte_and_each_name_counts(self, name: str, sources: Path) -> None:
        seen = {extension.source_hash()}

        (sources / name).write_text(SOURCES[name] + " ")
        seen.add(extension.source_hash())
        (sources / name).write_text(SOURCES[name])
        (sources / name).rename(sources / f"other_{name}")
        seen.add(extension.source_hash())

        assert len(seen) == 3

    def test_a_file_cannot_pass_for_two(self, sources: Path) -> None:
        before = extension.source_hash()
        (sources / "lists.h").unlink()
        (sources / "cuda.cu").write_text(f"{SOURCES['cuda.cu']}\nlists.h\n{SOURCES['lists.h']}")

        assert extension.source_hash() != before

    def test_other_files_do_not_count(self, sources: Path) -> None:
        before = extension.source_hash()
        (sources / "libampatch.so").write_bytes(b"\x7fELF")
        (sources / "__init__.py").write_text("")

        assert extension.source_hash() == before

    def test_a_flag_of_the_compilers_counts(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = extension.source_hash()
        monkeypatch.setattr(extension, "CUDA_FLAGS", ("-DUSE_CUDA",))

        assert extension.source_hash() != before

    def test_without_them_there_is_an_error_that_says_what_to_type(self, sources: Path) -> None:
        (sources / "operators.cpp").unlink()

        with pytest.raises(KernelError, match=r"csrc holds no C\+\+ sources.*pip install"):
            extension.source_hash()
        assert extension.find() is None

    def test_so_there_is_if_the_install_has_no_such_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(_package: str) -> None:
            raise ModuleNotFoundError

        monkeypatch.setattr(extension, "files", missing)

        with pytest.raises(KernelError, match=r"not part of this install.*pip install"):
            extension.source_directory()
        assert extension.find() is None

    def test_and_if_one_cannot_be_read(self, sources: Path) -> None:
        (sources / "lists.h").unlink()
        (sources / "lists.h").mkdir()

        with pytest.raises(KernelError, match=r"lists\.h cannot be read \(Is a directory\)"):
            extension.source_hash()


class TestServes:
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
    def test_machine_code_for_a_major_version_and_ptx_for_all_that_is_newer(
        self, architectures: tuple[str, ...], capability: tuple[int, int], served: bool
    ) -> None:
        assert Library(Path(), 0, architectures, "", "", "", "", "").serves(capability) is served


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
    def test_where_it_is(self, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AMPATCH_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        assert extension.cache_directory() == Path(expected)

    def test_a_relative_one_is_seen_from_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("AMPATCH_CACHE", "here")

        assert extension.cache_directory() == tmp_path / "here"

    def test_a_user_without_a_home_has_none(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        for name in ("AMPATCH_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", homeless)

        with pytest.raises(KernelError, match=r"Could not determine home.*Set the environment variable AMPATCH_CACHE"):
            extension.cache_directory()
        assert extension.find() is None

    def test_the_key_names_all_that_a_library_depends_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extension, "processor", lambda: "x86_64")
        keys = [extension.key("0123456789abcdef" + "0" * 48, each) for each in [(), ("80",), ("80", "90")]]
        assert keys == [
            "0123456789abcdef-torch2.10-x86_64-cpu",
            "0123456789abcdef-torch2.10-x86_64-sm80",
            "0123456789abcdef-torch2.10-x86_64-sm80-sm90",
        ]

        monkeypatch.setattr(extension, "processor", lambda: "aarch64")
        keys.append(extension.key("0123456789abcdef", ()))
        keys.append(extension.key("0123456789abcdef", (), replace(OPERATORS, abi="2.11")))
        keys.append(extension.key("0123456789abcdef", (), CALLS))
        keys.append(extension.key("1123456789abcdef", ()))
        assert len(set(keys)) == 7

    def test_that_of_calls_names_this_very_torch_and_python(self) -> None:
        key = extension.key("0123456789abcdef", (), CALLS)
        assert key.startswith(f"0123456789abcdef-torch{torch.__version__}-cpython-")
        assert key.endswith("-calls")

    @pytest.mark.parametrize(("abi", "version"), [("2.10", "0x020a000000000000"), ("2.9", "0x0209000000000000")])
    def test_the_abi_and_the_flag_that_asks_for_it_are_one(
        self, abi: str, version: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(extension, "ABI", abi)

        assert extension.target_flag() == f"-DTORCH_TARGET_VERSION={version}"


class TestFind:
    def test_nothing_where_nothing_was_built(self, sources: Path, cache: Path) -> None:
        assert extension.find() is None

    def test_what_was_built(self, put: Callable[..., Library]) -> None:
        library = put()

        assert extension.find() == library

    def test_not_once_a_source_has_changed(self, put: Callable[..., Library], sources: Path) -> None:
        put()
        (sources / "lists.h").write_text("// other checks")

        assert extension.find() is None

    @pytest.mark.parametrize("different", [{"abi": "2.9"}, {"machine": "riscv64"}, {"sources": "0" * 64}], ids=str)
    def test_what_is_built_for_something_else_is_passed_over(
        self, different: dict[str, str], put: Callable[..., Library], sources: Path, cache: Path
    ) -> None:
        put(directory=cache / extension.key(extension.source_hash(), ()), **different)
        put(directory=sources, **different)

        assert extension.find() is None

    def test_gpu_kernels_are_better_than_none_and_more_are_better(self, put: Callable[..., Library]) -> None:
        for architectures in [(), ("90",), ("80", "90"), ("80",)]:
            put(*architectures)

        found = extension.find()

        assert found is not None
        assert found.architectures == ("80", "90")

    def test_among_equals_the_choice_is_always_the_same(self, put: Callable[..., Library]) -> None:
        for architectures in [("80",), ("90",), ("86",)]:
            put(*architectures)

        assert {extension.find() for _ in range(3)} == {put("90")}

    def test_with_cuda_in_use_it_serves_every_gpu(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put("80", "90"), put()
        older = put("75")

        use_gpus(monkeypatch, (9, 0), (7, 5))

        assert extension.find() == older

    def test_if_none_does_the_best_of_the_others_is_found(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = put("80", "90")
        use_gpus(monkeypatch, (7, 5))

        assert extension.find() == library

    def test_cuda_is_not_initialised_to_find_out(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked(*_arguments: object) -> None:
            raise AssertionError("CUDA would be initialised")

        for name in ("get_device_capability", "device_count", "init", "_lazy_init"):
            monkeypatch.setattr(torch.cuda, name, asked)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

        assert extension.find() is None
        assert put("80") == extension.find()

    def test_with_a_torch_for_rocm_gpu_kernels_are_passed_over(
        self, put: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = put()
        put("80")
        monkeypatch.setattr(torch.version, "hip", "6.4")

        assert extension.find() == library

    def test_what_came_with_the_package_is_found(self, put: Callable[..., Library], sources: Path) -> None:
        library = put("80", directory=sources)

        assert extension.find() == library

    def test_what_was_built_here_on_purpose_is_preferred_to_it(
        self, put: Callable[..., Library], sources: Path
    ) -> None:
        put("80", "90", directory=sources)
        library = put("75")

        assert extension.find() == library

    def test_but_not_for_the_cpu_alone(self, put: Callable[..., Library], sources: Path) -> None:
        library = put("80", directory=sources)
        put()

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
    def test_a_description_that_is_broken_is_none(
        self, text: str | bytes | dict[str, object], put: Callable[..., Library]
    ) -> None:
        sidecar = put("80").path.with_name(extension.SIDECAR)
        if isinstance(text, dict):
            text = json.dumps(json.loads(sidecar.read_text()) | text)
        sidecar.write_bytes(text.encode() if isinstance(text, str) else text)

        assert extension.find() is None

    def test_neither_is_one_that_was_cut_off(self, put: Callable[..., Library]) -> None:
        library = put("80")
        library.path.write_bytes(library.path.read_bytes()[:-1])

        assert extension.find() is None
        assert extension.read(library.path.parent) is None

    @pytest.mark.parametrize("name", [extension.SIDECAR, extension.LIBRARY])
    def test_neither_is_half_a_library(self, name: str, put: Callable[..., Library]) -> None:
        library = put("80")
        library.path.with_name(name).unlink()
        smaller = put()

        assert extension.find() == smaller

    def test_a_cache_that_is_no_directory_holds_none(self, sources: Path, cache: Path) -> None:
        cache.write_text("")

        assert extension.find() is None


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
    def test_once_for_each_process_and_no_other_beside_it(self, fresh: Fresh, tmp_path: Path) -> None:
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

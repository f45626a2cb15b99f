"""Tests the CUDA kernels: their own source runs on the CPU, with emulated threads, blocks and barriers.

`emulated_gpu/` stands in for CUDA. It does not show speed, streams and devices; `pytest -m gpu` does. Tests as well how
the library finds torch's current stream.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fresh import Fresh

from ampatch.native import extension

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
EMULATION = Path(__file__).parent / "emulated_gpu"
TORCH = Path(torch.__file__).parent

CXX = shutil.which(os.environ.get("CXX", "c++"))
needs_cxx = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


def compile_library(*sources: Path, to: Path, include: Path, options: tuple[str, ...] = ()) -> Path:
    command = [
        str(CXX),
        *("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", extension.target_flag()),
        *options,
        *(f"-I{include}", f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"),
        *map(str, sources),
        *("-o", str(to), "-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose operators run the CUDA kernels on tensors of the CPU."""
    place = tmp_path_factory.mktemp("emulated")
    for name in ("operators.cpp", "operations.h", "lists.h"):
        shutil.copy(extension.source_directory() / name, place)
    for path in EMULATION.iterdir():
        shutil.copy(path, place)
    source = (extension.source_directory() / "cuda.cu").read_text(encoding="utf-8")
    kernel = r"[](const auto&... arguments) { \1(arguments...); }"
    source, launches = re.subn(r"([\w<>]+?)<<<(.*?)>>>\(", rf"emulated::launch({kernel}, \2)(", source)
    assert launches == source.count("emulated::launch") >= 6
    source = re.sub(r"const __grid_constant__ (\S+) ", r"const \1& ", source)  # no thread has a copy
    (place / "cuda.cpp").write_text(source.replace("(ampatch, CUDA, m)", "(ampatch, CPU, m)"), encoding="utf-8")
    # A GPU refuses to load a vector from an address that its size does not divide. So does this library.
    options = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return compile_library(*sorted(place.glob("*.cpp")), to=place / "libampatch.so", include=place, options=options)


# In a process of its own, as one process has one library.
RUN = """
import ctypes, sys
from pathlib import Path
import torch
import pytest
from ampatch.native import extension
path = Path(sys.argv[1])
facts = {"architectures": (), "sources": "", "abi": extension.ABI, "machine": "", "compiler": "", "torch": ""}
extension.load(extension.Library(path=path, size=path.stat().st_size, **facts))
library = ctypes.CDLL(str(path))
for count in map(int, sys.argv[3:]):
    before = library.emulated_launches(), library.emulated_argument_bytes()
    tensors = list(torch.full((count, 100), 2.0).unbind())
    torch.ops.ampatch.unscale_(tensors, torch.tensor(0.5), torch.zeros(()))
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    print("launches", count, library.emulated_launches() - before[0], library.emulated_argument_bytes() - before[1])
before = library.emulated_launches()
large = [torch.ones(100_000).half()]
torch.ops.ampatch.found_inf_norm(large, torch.tensor(0.5), torch.zeros(()), torch.zeros((), dtype=torch.float64))
torch.ops.ampatch.fingerprint(large, torch.zeros(1, dtype=torch.float64))
assert library.emulated_launches() - before == 2
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", sys.argv[2]]))
"""


# Tensors of one call, and its launches: of how many tensors at most, each.
FEW, MOST = 64, 1024
LAUNCHES = {
    1: [FEW],
    FEW: [FEW],
    FEW + 1: [MOST],
    MOST: [MOST],
    MOST + 1: [MOST, FEW],
    MOST + FEW: [MOST, FEW],
    MOST + FEW + 1: [MOST, MOST],
    10_000: [MOST] * 10,
}


@needs_cxx
@pytest.mark.slow
def test_cuda_kernels_pass_the_tests_of_the_operators(emulated):
    tests = ROOT / "tests" / "native" / "test_operators.py"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(emulated), str(tests), *map(str, LAUNCHES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
    lines = re.findall(r"^launches (\d+) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    launches = {int(count): (int(launches), int(size)) for count, launches, size in lines}
    size_of = {FEW: launches[1][1], MOST: launches[MOST][1]}  # of the arguments of a launch, in bytes
    assert size_of[FEW] <= 2048
    assert launches == {count: (len(each), sum(size_of[most] for most in each)) for count, each in LAUNCHES.items()}


@pytest.fixture
def current_stream(fresh: Fresh, tmp_path: Path) -> Callable[[str], int]:
    """Runs code, and returns the stream of device 3 that the library then finds; -1 if it raises."""
    source = tmp_path / "asks.cpp"
    source.write_text(
        '#include "current_stream.h"\n'
        'extern "C" __attribute__((visibility("default"))) long asks() {\n'
        "  try {\n"
        "    return reinterpret_cast<long>(ampatch::current_stream(3));\n"
        "  } catch (const std::exception&) {\n"
        "    return -1;\n"
        "  }\n"
        "}\n"
    )
    asks = compile_library(source, to=tmp_path / "asks.so", include=extension.source_directory())

    def run(code: str) -> int:
        load = f"library = ctypes.CDLL({str(asks)!r}); library.asks.restype = ctypes.c_long"
        done = fresh.run(f"import ctypes, torch; {code}; {load}; print(library.asks())")
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    return run


@needs_cxx
@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA library of its own")
def test_current_stream_is_found_in_the_cuda_library_that_torch_has_loaded(current_stream, tmp_path):
    assert current_stream("pass") == -1
    source, library = tmp_path / "torch_cuda.cpp", tmp_path / "libtorch_cuda.so"
    source.write_text(
        'extern "C" __attribute__((visibility("default")))\n'
        "int aoti_torch_get_current_cuda_stream(int device, void** stream) {\n"
        "  *stream = reinterpret_cast<void*>(40L + device);\n"
        "  return 0;\n"
        "}\n"
    )
    subprocess.run([str(CXX), "-fPIC", "-shared", "-Wl,-soname,libtorch_cuda.so", source, "-o", library], check=True)
    assert current_stream(f"ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_LOCAL)") == 43

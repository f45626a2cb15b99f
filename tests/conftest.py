"""What holds for every test: afterwards torch is what it was, attribute for attribute. And the compiled extension."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # replaces some of torch itself when it is imported, which must not happen within a test
import torch._functorch.aot_autograd
import torch._inductor
import torch._jit_internal
import torch.backends.mha
import torch.jit._builtins
import torch.jit._recursive
import torch.overrides
from fresh import Fresh
from hypothesis import settings as hypothesis_settings
from samples import LIST_NAMES, entries, resolve
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch.optim.optimizer import _global_optimizer_post_hooks
from workers import Workers

from ampatch import amp, switch
from ampatch.errors import KernelError
from ampatch.native import calls, extension, extension_build, extension_kernels, kernels
from ampatch.native.extension import Library
from ampatch.runtime import runtime
from ampatch.scaling import scale_use

pytest_plugins = ["accounting", "covering", "far_devices"]

# What tests compile does not go to the user's cache, and is still there when they run again. Tests that start processes
# hand this on to them.
os.environ.setdefault("AMPATCH_CACHE", str(Path(__file__).parent.parent / "build" / "extension"))
# Which kernels a test runs on must not hang on what was compiled before it; tests of the extension select that. To run
# all of them on it, set the first to "extension". So with calls of patched functions: "compiled" has all tests run them
# in C++.
CHOSEN_HERE = {
    name: value
    for name, value in {"AMPATCH_KERNELS": "torch", "AMPATCH_CALLS": "python"}.items()
    if name not in os.environ
}
os.environ.update(CHOSEN_HERE)

# Files that import a package which a machine without a network may lack. There they are left out; the summary says so.
NEEDED = {
    "integration/test_accelerate.py": "accelerate",
    "integration/test_compared_architectures.py": "transformers",
    "integration/test_converted_architectures.py": "transformers",
    "integration/test_half_architectures.py": "transformers",
    "integration/test_ignite.py": "ignite",
    "integration/test_lightning.py": "lightning",
    "integration/test_pages.py": "sybil",
    "integration/test_peft.py": "peft",
    "integration/test_skorch.py": "skorch",
    "integration/test_traced_architectures.py": "transformers",
    "integration/test_transformers.py": "transformers",
    "casting/test_nested.py": "transformers",
    "interfaces/test_convert_model.py": "onnx",
    "project/test_documentation.py": "sybil",
}
LEFT_OUT = {file: package for file, package in NEEDED.items() if find_spec(package) is None}
collect_ignore = list(LEFT_OUT)

# The machines that run this are shared: a slow example is no fault of the code. Every run draws the same examples, and
# `make slow` more of them.
hypothesis_settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis_settings.register_profile("quick", parent=hypothesis_settings.get_profile("thorough"), max_examples=15)
hypothesis_settings.load_profile("quick")

# Most tensors here are tiny, and threads that wait for one another cost minutes.
torch.set_num_threads(1)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of torch's own functions are deprecated
    OVERRIDABLE = {
        (owner, function.__name__): function
        for owner, functions in torch.overrides.get_overridable_functions().items()
        for function in functions
        if getattr(owner, getattr(function, "__name__", ""), None) is function
    }

# Every module and class that has a function in a shipped list.
PATCHED_OWNERS = {
    namespace: resolve(namespace)
    for namespace in sorted({entry.path.rpartition(".")[0] for name in LIST_NAMES for entry in entries(name)})
}
OWN_ATTRIBUTES = {
    "torch.nn.RNNBase": torch.nn.RNNBase,
    "torch.nn.Module": torch.nn.Module,
    "torch.autocast": torch.autocast,
    "torch.backends.mha": torch.backends.mha,
    "torch.nn.parallel.DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "torch.nn.parallel": torch.nn.parallel,
    **{
        f"torch.nn.parallel.{name}": sys.modules[f"torch.nn.parallel.{name}"]
        for name in ("data_parallel", "parallel_apply")
    },
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable": UnspecializedNNModuleVariable,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.swa_utils.AveragedModel": torch.optim.swa_utils.AveragedModel,
    "torch.autograd": torch.autograd,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.cuda": torch.cuda,
    "torch.cuda.graphs": torch.cuda.graphs,
    "torch.cuda.graphs.CUDAGraph": torch.cuda.graphs.CUDAGraph,
    **({"torch.accelerator.Graph": torch.accelerator.Graph} if hasattr(torch.accelerator, "Graph") else {}),
    "torch.nn.utils.clip_grad": torch.nn.utils.clip_grad,
    "torch.functional": torch.functional,
    "torch.utils": torch.utils,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch.utils.checkpoint._CheckpointFrame": torch.utils.checkpoint._CheckpointFrame,
    "torch.utils.checkpoint.CheckpointFunction": torch.utils.checkpoint.CheckpointFunction,
    "torch.jit._builtins": torch.jit._builtins,
    "torch._C._nn": torch._C._nn,
    "torch._jit_internal": torch._jit_internal,
    "torch.jit._recursive": torch.jit._recursive,
    "torch._functorch.aot_autograd": torch._functorch.aot_autograd,
    **PATCHED_OWNERS,
}


# Modules that keep other things as well, which tests change.
STATEFUL = (torch.cuda, torch.distributed, torch.distributed.distributed_c10d, torch.utils)


#: The state of a thread that is in no region.
OUTSIDE = switch.state()

# Others of it torch.compile replaces when it is first used.
OF_MODULES = ("__call__", "__copy__", "_replicate_for_data_parallel", "zero_grad")


def held_by(owner: object) -> dict[str, object]:
    held = dict(vars(owner))
    if owner is torch.nn.Module:
        return {name: held.get(name) for name in OF_MODULES}
    return {name: value for name, value in held.items() if type(value) is FunctionType} if owner in STATEFUL else held


def torch_now() -> dict[tuple[str, str], object]:
    """Returns what the owners hold themselves, by owner and name, and what every overridable function is."""
    own = {
        (owner, name): value
        for owner, held in OWN_ATTRIBUTES.items()
        for name, value in held_by(held).items()
        # Bar Python's own: modules imported meanwhile, its notes on a class that was pickled and on warnings given.
        if name not in ("__slotnames__", "__warningregistry__") and not issubclass(type(value), ModuleType)
    }
    reached = {(repr(owner), name): getattr(owner, name, None) for owner, name in OVERRIDABLE}
    return own | reached


def changed(before: dict[tuple[str, str], object], after: dict[tuple[str, str], object]) -> list[tuple[str, str]]:
    """What differs by identity."""
    missing = object()
    return [key for key in before.keys() | after.keys() if before.get(key, missing) is not after.get(key, missing)]


_OVERRIDABLE = tuple(zip(*OVERRIDABLE, strict=True))  # owners, and names


def identities() -> list[int]:
    """Returns the addresses of what `torch_now` gives, and of modules, in a tenth of its time."""
    own = itertools.chain.from_iterable(held_by(held).values() for held in OWN_ATTRIBUTES.values())
    return [*map(id, own), *map(id, map(getattr, *_OVERRIDABLE, itertools.repeat(None)))]


BEFORE = torch_now()  # keeps all of it alive, so that no other object takes an address
SEEN_UNPATCHED = [identities()]  # and then once more for each time that a module was imported


def pytest_collection_finish() -> None:
    """Makes Python collect garbage less often."""
    gc.set_threshold(700, 10, 100)  # of the oldest a tenth as many as usual
    spare_the_garbage_collector()


MODULES_SPARED = [0]
TESTS_SINCE = [0]


def spare_the_garbage_collector() -> None:
    """Leaves what there is so far out of what the garbage collector looks through from here on.

    That is most of the objects: torch.compile alone imports more than a thousand modules, and keeps what it compiled.
    Tests of what is freed ask for a collection each, Python asks for one every few tests, and `amp.explain` looks
    through the same objects.
    """
    TESTS_SINCE[0] += 1
    if len(sys.modules) > MODULES_SPARED[0] + 100 or TESTS_SINCE[0] >= 100:
        gc.collect()
        gc.freeze()
        MODULES_SPARED[0], TESTS_SINCE[0] = len(sys.modules), 0


# The implementations that amp chose in this run, in all of its processes.
RAN_WITH: set[str] = set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Notes the implementations that amp chose; under pytest-xdist, hands them on."""
    RAN_WITH.update(each.chosen.why for each in (kernels._selection, calls._selection) if each.chosen is not None)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ran_with"] = sorted(RAN_WITH)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a process hands on."""
    RAN_WITH.update(getattr(node, "workeroutput", {}).get("ran_with", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the implementations that the tests ran with, and the files that were left out."""
    for chosen in sorted(RAN_WITH):
        told = chosen
        for name, value in CHOSEN_HERE.items():
            told = told.replace(f"{name}={value} asks for", f"tests do by default; {name}=auto tests what is built")
        terminalreporter.line(f"Ran with {told}.")
    for file, package in LEFT_OUT.items():
        terminalreporter.line(f"Not run: tests/{file}, as {package} is not installed.")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of the user's, and returns its path."""

    def write(content: str | bytes, name: str = "own.yaml") -> Path:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes a package that can be imported, and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def write(name: str, **sources: str) -> None:
        """The package ``name``; ``sources`` are those of its modules, ``__init__`` that of itself."""
        written.append(name)
        (tmp_path / name).mkdir()
        for module, source in {"__init__": "", **sources}.items():
            (tmp_path / name / f"{module}.py").write_text(source, encoding="utf-8")

    yield write
    for name in list(sys.modules):
        if name.partition(".")[0] in written:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def torch_is_unpatched() -> Iterator[None]:
    """After every test: amp is off, and torch is what it was before the first."""
    yield
    amp.deinitialize()
    runtime.registered.clear()
    runtime.disabled = False
    now = identities()
    if now != SEEN_UNPATCHED[-1]:
        assert changed(BEFORE, torch_now()) == []
        SEEN_UNPATCHED.append(now)
    assert not _global_optimizer_post_hooks
    assert torch._C._len_torch_function_stack() == 0
    assert switch.exchange(OUTSIDE) == OUTSIDE  # once: the next test has it right
    spare_the_garbage_collector()


def _serves_every_gpu(library: Library) -> bool:
    return all(map(library.serves, map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))))


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a device that the host would have to wait for."""
    monkeypatch.setattr(scale_use, "AT_HAND", frozenset())


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    """The operators of the compiled extension, which is built if it is not there."""
    library = extension.loaded() or extension.find()
    if library is None or not _serves_every_gpu(library):
        try:
            library = extension_build.carry_out(extension_build.plan()).library
        except KernelError as error:
            if "there is no C++ compiler" in str(error):
                pytest.skip(f"the extension cannot be compiled: {error}")
            raise
    extension.load(library)
    return extension_kernels


@pytest.fixture(scope="session")
def compiled_calls() -> ModuleType:
    """The module that runs calls in C++, which is built if it is not there."""
    try:
        library = extension.find(extension.CALLS) or extension_build.carry_out(extension_build.plan_calls()).library
    except KernelError as error:
        if "there is no" in str(error):  # a compiler, or Python's headers
            pytest.skip(f"the library of calls cannot be compiled: {error}")
        raise
    return extension.load_calls(library)


@pytest.fixture
def select_calls() -> Iterator[Callable[[str | None], None]]:
    """`calls.select`, whose choice is taken back after the test."""
    before = calls._selection.chosen
    yield calls.select
    calls._selection.chosen = before
    calls.compiled.cache_clear()


@pytest.fixture
def select() -> Iterator[Callable[[str | None], None]]:
    """`kernels.select`, whose choice is taken back after the test."""
    before = kernels._selection.chosen
    yield kernels.select
    kernels._selection.chosen = before
    kernels._runs_on.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _compiled_where_everything_runs_on_it(request: pytest.FixtureRequest) -> None:
    if os.environ["AMPATCH_KERNELS"] == "extension":
        request.getfixturevalue("compiled")
        # Where a GPU cannot run the extension, amp only logs that torch's kernels do the work.
        if torch.cuda.is_available():
            gpu = torch.device("cuda", torch.cuda.current_device())
            assert kernels._runs_on(gpu), f"the extension does not run on {torch.cuda.get_device_name(gpu)}"
    if os.environ["AMPATCH_CALLS"] == "compiled":
        request.getfixturevalue("compiled_calls")


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """torch.compile has compiled nothing before the test, and keeps nothing of it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    """Interpreters that have imported torch, and nothing of ampatch."""
    programs = Fresh()
    yield programs
    programs.stop()


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    """Two processes of one group."""
    workers = Workers(2)
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Workers]:
    """Four processes of one group."""
    workers = Workers(4)
    yield workers
    workers.stop()


@pytest.fixture(params=["python", "compiled"])
def calls_in_both(request: pytest.FixtureRequest, select_calls: Callable[[str], None]) -> None:
    """Runs a test with calls in Python, and with calls in C++."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    select_calls(request.param)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def half(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

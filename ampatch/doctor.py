"""Reports facts for bug reports: versions, devices, kernels, and what amp and other tools have patched.

Owns the wording of `ampatch doctor`, and how torch's own functions are distinguished from other tools' replacements.
Must never import the modules it reports on, change anything, or sync with a device.
"""

from __future__ import annotations

import functools
import platform
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any

import torch
import wrapt

from ampatch import __version__
from ampatch.cast_lists.annotations import shipped_entries
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, find_owner_or
from ampatch.errors import AmpError, CastListError, faults
from ampatch.function_wrapper import is_wrapper, unwrapped
from ampatch.ledger import MISSING, bindings, loaded_modules
from ampatch.native import calls, kernels
from ampatch.opt_levels import dtype_name
from ampatch.patching import function_places
from ampatch.patching.function_places import name_of
from ampatch.runtime import runtime
from ampatch.session import Session
from ampatch.torch_private.compilers import JIT_INTERNAL
from ampatch.torch_private.optimizers import WRAPPED_BY_SCHEDULER

_NVIDIA_DRIVER = FilePath("/proc/driver/nvidia/version")

# Types that wrap a function, and their attribute with the wrapped one.
_AROUND: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    types.MethodType: "__func__",
    functools.partial: "func",
    wrapt.FunctionWrapper: "_self_wrapper",
    wrapt.BoundFunctionWrapper: "_self_wrapper",
}


def report() -> Iterator[str]:
    """Yields the lines of the report: headings, with one fact per line below; details only for possible problems.

    Describes the live session, if amp is set up. Reading the name of a GPU initialises CUDA in this process.
    """
    seen = _Seen()
    sections: dict[str, Iterable[str]] = {
        "Versions": _versions(),
        "Devices": _devices(),
        "Kernels": _in_use(kernels.in_use),
        "Calls of patched functions": _in_use(calls.in_use),
        "Patches by amp": _amp(seen),
        "Names without casts": _names(seen),
        "Patches by others": _others(seen),
    }
    for number, (heading, facts) in enumerate(sections.items()):
        yield from ["", heading] if number else [heading]
        yield from _indented(facts)


# Versions, devices and kernels


def _in_use(told: Callable[[], str]) -> Iterator[str]:
    try:
        yield told()
    except AmpError as error:  # AMPATCH_KERNELS or AMPATCH_CALLS asks for an unavailable implementation
        yield f"none: {error}"


def _versions() -> Iterator[str]:
    yield f"ampatch {__version__}"
    yield f"torch {torch.__version__}"
    yield f"{platform.python_implementation()} {platform.python_version()}"
    for package in ("wrapt", "PyYAML"):
        yield f"{package} {version(package)}"
    yield f"OS: {platform.platform()}"
    built_for = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    toolkits = [f"{name} {version}" for name, version in built_for.items() if version]
    yield f"torch is built for: {', '.join(['CPU', *toolkits])}"
    yield f"NVIDIA driver: {_nvidia_driver() or 'none'}"


def _nvidia_driver() -> str | None:
    try:
        found = re.search(r"\d+(\.\d+)+", _NVIDIA_DRIVER.read_text("utf-8"))
    except OSError:
        return None
    return found[0] if found else None


def _devices() -> Iterator[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    yield f"CPU: {platform.machine()}, {capability}, threads: {torch.get_num_threads()}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield "GPU: none that torch can use"
        return
    for index in range(torch.accelerator.device_count()):
        try:
            name = torch.get_device_module(accelerator).get_device_name(index)
        except RuntimeError as error:  # for instance in a process forked from one that uses the GPU
            name = f"its name cannot be read ({' '.join(str(error).split())})"
        yield f"GPU {index}: {name}"


# The patches to report on


@dataclass(frozen=True, slots=True)
class _Patch:
    """An attribute that amp replaced: its value from amp, its value before, and its value now."""

    owner: object
    name: str
    installed: object
    before: object
    now: object

    @property
    def key(self) -> tuple[int, str]:
        """Owner id and name: identifies the attribute."""
        return id(self.owner), self.name

    @property
    def is_in_place(self) -> bool:
        """True if the patch is still in effect: an LR scheduler's wrapper around an optimizer's step still calls it."""
        return self.now is self.installed or (self.name == "step" and hasattr(self.now, WRAPPED_BY_SCHEDULER))

    def __str__(self) -> str:
        return f"{name_of(self.owner)}.{self.name}"


@dataclass(frozen=True, slots=True)
class _Listed:
    """A function of the shipped lists: its path, its owner, and its present value without amp's patch."""

    path: Path
    owner: object
    function: object


class _Seen:
    """Data for the sections on patches: the present state.

    Attributes:
        live: live session, or None.
        patches: attributes that the session replaced.
        listed: functions of the shipped lists that exist in this torch.
        faults: reasons why the shipped lists do not load; empty if they load.
    """

    def __init__(self) -> None:
        self.live = runtime.live
        self.patches: list[_Patch] = []
        for patch in self.live.ledger.patches if self.live is not None else ():
            owner = patch.owner()
            if owner is not None:
                now = vars(owner).get(patch.name, MISSING)
                self.patches.append(_Patch(owner, patch.name, patch.installed(), patch.before, now))
        paths, self.faults = _shipped_paths()
        self.listed = [listed for path in paths if (listed := _look_up(path)) is not None]


def _shipped_paths() -> tuple[list[Path], list[str]]:
    """Returns the paths in the shipped lists, and the reasons if the lists do not load."""
    try:
        return sorted({path for path, _ in shipped().rules}), []
    except CastListError as error:
        # A replaced function lacks an argument that its rule needs. Read the paths only, to report the replacement.
        return sorted({entry.path for entry in shipped_entries()}), faults(error)


def _look_up(path: Path) -> _Listed | None:
    owner = find_owner_or(path.namespace, MISSING)
    found = MISSING if owner is None else getattr(owner, path.name, MISSING)
    return None if found is MISSING else _Listed(path, owner, unwrapped(found))


def _is_torchs(value: Any) -> bool:
    """Returns True if a value is a function that torch itself defines."""
    home = _home(value)
    # A replacement made with functools.wraps claims to be torch's: only the module that defines its code counts.
    # Functions made by torch.compile and torch.no_grad are defined in torch, but not in the module that they claim.
    claims = type(value) is not types.FunctionType or home in (value.__module__, JIT_INTERNAL)
    return (home is not None and home.partition(".")[0] == "torch") and claims


def _home(function: Any) -> str | None:
    """Returns the name of the module that defines a function; None if the value is not a function."""
    kind = type(function)
    if kind is types.FunctionType:
        return str(function.__globals__.get("__name__"))
    if kind is types.MethodDescriptorType:
        return str(function.__objclass__.__module__)
    return str(function.__module__) if kind is types.BuiltinFunctionType else None


# What amp has patched


def _amp(seen: _Seen) -> Iterator[str]:
    live = seen.live
    if live is None:
        yield "amp is not set up" + (": initialize was called with enabled=False" if runtime.disabled else "")
        return
    properties = live.settings.properties
    yield f"amp is set up: {properties.opt_level}, {dtype_name(properties.half_dtype)}"
    if live.switch.is_off():
        yield "casts are off in this thread"
    places, waiting = _places(live)
    in_place = [patch for patch in seen.patches if patch.is_in_place]
    functions = Counter(places[patch.key] for patch in in_place if patch.key in places)
    yield f"functions patched: {functions.total()}"
    yield from _indented(f"{namespace}: {count}" for namespace, count in sorted(functions.items()))
    if waiting:
        yield f"functions in modules that are not imported yet: {waiting.total()}"
        yield from _indented(f"{namespace}: {count}" for namespace, count in sorted(waiting.items()))
    others = [patch for patch in in_place if patch.key not in places]
    names = [patch for patch in others if is_wrapper(patch.installed)]
    yield f"names that modules had bound earlier, patched as well: {len(names)}"
    yield f"other attributes of torch, models and optimizers: {len(others) - len(names)}"


def _places(live: Session) -> tuple[dict[tuple[int, str], str], Counter[str]]:
    """Returns the namespaces of functions that amp patches, by `_Patch.key`, and counts of those not imported yet."""
    places: dict[tuple[int, str], str] = {}
    waiting: Counter[str] = Counter()
    if live.settings.patches_functions:
        for known in runtime.registered:
            places[id(known.owner), known.name] = known.path.namespace
    for path in live.casts.rules():
        owner = find_owner_or(path.namespace, MISSING)
        if owner is None:
            waiting[path.namespace] += 1
        else:
            places[id(owner), path.name] = path.namespace
    return places, waiting


# Names that bypass the patches


def _names(seen: _Seen) -> Iterator[str]:
    if seen.live is None or not seen.live.settings.patches_any:
        yield "not looked for: amp patches no functions now"
        return
    patched = [patch.installed for patch in seen.patches if is_wrapper(patch.installed)]
    originals = {id(unwrapped(wrapper)): unwrapped(wrapper) for wrapper in patched}
    paths = {id(unwrapped(wrapper)): name_of(wrapper) for wrapper in patched}
    users = {id(module): module for module in loaded_modules("torch", "ampatch")}
    torchs = {id(module): module for module in loaded_modules("ampatch") if id(module) not in users}
    held = [(owner, name, paths[id(value)]) for owner, name, value in bindings(users.values(), originals)]
    yield from _problems("in loaded modules", [f"{name_of(owner)}.{name}: {path}" for owner, name, path in held])
    yield f"in torch's own modules, which are left alone: {len(bindings(torchs.values(), originals))}"
    yield from _problems("in closures and default arguments", sorted(set(_captured(paths))))
    yield "not looked for: containers that neither a function nor a model passed to amp.initialize leads to"
    yield "not looked for: functions of torch's that another tool had replaced before amp was set up"


def _captured(paths: Mapping[int, str]) -> Iterator[str]:
    """Yields descriptions of user functions that hold an unpatched function in a closure or default argument."""
    for found in function_places.captures(paths):
        yield f"{_describe(found.owner)}: {paths[id(found.held)]} as {found.name}"


# What others have patched


def _others(seen: _Seen) -> Iterator[str]:
    if seen.faults:
        yield from _problems("why the shipped lists do not load, and amp cannot be set up", seen.faults)
    replaced = [patch for patch in seen.patches if not patch.is_in_place]
    keys = {patch.key for patch in replaced}
    yield from _problems(
        f"of {len(seen.listed)} functions in the shipped lists, not torch's own",
        [
            f"{listed.path}: {_describe(listed.function)}"
            for listed in seen.listed
            if not _is_torchs(listed.function) and (id(listed.owner), listed.path.name) not in keys
        ],
    )
    yield from _problems(
        "patches of amp's that were replaced since",
        [
            f"{patch}: {'what it was before' if patch.now is patch.before else _describe(patch.now)}"
            for patch in replaced
        ],
    )


def _core(value: object) -> Any:
    """Returns the function inside wrappers, methods and partials, or the value itself if it is none of these."""
    for kind, attribute in _AROUND.items():
        if issubclass(type(value), kind):  # not isinstance(): a proxy claims the class of its target
            return _core(getattr(value, attribute))
    return value


def _describe(value: object) -> str:
    """Returns a description of a value found in place of a function, with its file and line if known."""
    core = _core(value)
    around = "" if core is value else f"{type(value).__name__} around "
    home = _home(core)
    if type(core) is types.FunctionType:
        code = core.__code__  # functools.wraps changes the names of a function, but not those of its code
        return f"{around}{code.co_qualname} of {home} ({code.co_filename}:{code.co_firstlineno})"
    if home is not None:
        return f"{around}{core.__qualname__} of {home}"
    if core is MISSING or type(core) is bool:
        return "nothing" if core is MISSING else str(core)
    return f"{around}an object of {name_of(type(core))}"


def _problems(label: str, details: Sequence[str]) -> Iterator[str]:
    yield f"{label}: {len(details)}"
    yield from _indented(sorted(details))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"

"""What a bug report needs, as lines of text: versions, devices, kernels, and who has patched what.

Owns the wording behind `ampatch doctor`, and how a function of torch's is told from what another tool put in its place.
Only reads: it must never import what it is to look at, change anything, or ask a device for a value.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import platform
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path as FilePath
from typing import Any

import torch
import wrapt
import yaml

from ampatch import __version__
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, PathError, beneath, find_owner, is_wrapper
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import AmpError, CastListError
from ampatch.ledger import MISSING, bindings, loaded_modules
from ampatch.native import calls, kernels
from ampatch.patching.kept_functions import OPENED
from ampatch.runtime import runtime
from ampatch.session import Session

_NVIDIA_DRIVER = FilePath("/proc/driver/nvidia/version")

_HOMES_OF_METHODS = ("torch._C", "torch._tensor")

# What may stand where a function is expected, and the attribute with the function that it comes down to.
_AROUND: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    types.MethodType: "__func__",
    functools.partial: "func",
    wrapt.FunctionWrapper: "_self_wrapper",
    wrapt.BoundFunctionWrapper: "_self_wrapper",
}


def report() -> Iterator[str]:
    """Yields the lines of the report: headings, below each one fact a line, and details only of what is out of order.

    Speaks of the live session, if amp is set up. Asking a GPU for its name initialises CUDA in this process.
    """
    seen = _Seen.now()
    sections: dict[str, Iterable[str]] = {
        "Versions": _versions(),
        "Devices": _devices(),
        "Kernels": _kernels(),
        "Calls of patched functions": _calls(),
        "Patches by amp": _amp(seen),
        "Names without casts": _names(seen),
        "Patches by others": _others(seen),
    }
    for number, (heading, facts) in enumerate(sections.items()):
        yield from ["", heading] if number else [heading]
        yield from _indented(facts)


# Versions, devices and kernels


def _kernels() -> Iterator[str]:
    try:
        yield kernels.in_use()
    except AmpError as error:  # AMPATCH_KERNELS asks for what there is not
        yield f"none: {error}"


def _calls() -> Iterator[str]:
    try:
        yield calls.in_use()
    except AmpError as error:  # AMPATCH_CALLS asks for what there is not
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
        except RuntimeError as error:  # in a process forked from one that uses the GPU, say
            name = f"its name cannot be read ({' '.join(str(error).split())})"
        yield f"GPU {index}: {name}"


# What there is to see


@dataclass(frozen=True, slots=True)
class _Patch:
    """An attribute that amp replaced: what amp put there, what was there before, and what is there now."""

    owner: object
    name: str
    installed: object
    before: object
    now: object

    @property
    def key(self) -> tuple[int, str]:
        """The place, for comparison."""
        return id(self.owner), self.name

    @property
    def is_in_place(self) -> bool:
        """Whether it still counts: what an LR scheduler puts around an optimizer's step calls it unchanged."""
        return self.now is self.installed or (self.name == "step" and hasattr(self.now, "_wrapped_by_lr_sched"))

    def __str__(self) -> str:
        return f"{_name_of(self.owner)}.{self.name}"


@dataclass(frozen=True, slots=True)
class _Listed:
    """A function of the shipped lists: its place, and what stands there beneath amp's patch, if there is one."""

    path: Path
    owner: object
    function: object


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the sections on patches speak of.

    Attributes:
        live: the session, if there is one.
        patches: what it replaced.
        listed: the functions of the shipped lists that are there.
        faults: why the shipped lists do not load, if they do not.
    """

    live: Session | None
    patches: Sequence[_Patch]
    listed: Sequence[_Listed]
    faults: Sequence[str]

    @classmethod
    def now(cls) -> _Seen:
        """As things stand."""
        live = runtime.live
        patches = []
        for patch in live.ledger.patches if live is not None else ():
            owner = patch.owner()
            if owner is not None:
                now = vars(owner).get(patch.name, MISSING)
                patches.append(_Patch(owner, patch.name, patch.installed(), patch.before, now))
        paths, faults = _shipped_paths()
        return cls(live, patches, [listed for path in paths if (listed := _look_up(path)) is not None], faults)

    @property
    def replaced(self) -> list[_Patch]:
        """The patches that somebody else has replaced since."""
        return [patch for patch in self.patches if not patch.is_in_place]

    @property
    def foreign(self) -> list[_Listed]:
        """The listed functions that are not torch's, without those that replaced a patch of amp's."""
        replaced = {patch.key for patch in self.replaced}
        return [
            listed
            for listed in self.listed
            if not _is_torchs(listed.function) and (id(listed.owner), listed.path.name) not in replaced
        ]


def _shipped_paths() -> tuple[list[Path], list[str]]:
    """Returns the paths in the shipped lists; and why these do not load, if they do not."""
    try:
        return sorted({path for path, _ in shipped().rules}), []
    except CastListError as error:
        # A replacement lacks an argument that the rule of its function is about. To tell whose it is, names will do.
        texts = [(files("ampatch.lists") / f"{treatment.value}.yaml").read_text("utf-8") for treatment in Treatment]
        pairs = [pair for text in texts for pair in yaml.safe_load(text).items()]
        paths = {Path(namespace, name) for namespace, entries in pairs for name in _names_in(entries)}
        return sorted(paths), list_reports.faults(error)


def _names_in(entry: Any) -> Iterator[str]:
    if isinstance(entry, list):
        for item in entry:
            yield from _names_in(item)
    else:
        yield entry["name"] if isinstance(entry, dict) else entry


def _look_up(path: Path) -> _Listed | None:
    owner = _owner(path.namespace)
    found = MISSING if owner is None else getattr(owner, path.name, MISSING)
    return None if found is MISSING else _Listed(path, owner, beneath(found))


def _owner(namespace: str) -> object | None:
    """Returns the module or class; None where it is not imported yet, `MISSING` where there is none."""
    try:
        return find_owner(namespace)
    except PathError:
        return MISSING


def _is_torchs(value: Any) -> bool:
    """Returns whether it is a function as torch defines it."""
    home = _home(value)
    # By functools.wraps a replacement claims to be torch's: what counts is where it was written. What torch.compile and
    # torch.no_grad make of a function was written in torch too, but not where it claims.
    claims = type(value) is not types.FunctionType or home in (value.__module__, "torch._jit_internal")
    return _in_torch(home) and claims


def _home(function: Any) -> str | None:
    """Returns the module that a function was written in; None for what is no function."""
    kind = type(function)
    if kind is types.FunctionType:
        return str(function.__globals__.get("__name__"))
    if kind is types.MethodDescriptorType:
        return str(function.__objclass__.__module__)
    return str(function.__module__) if kind is types.BuiltinFunctionType else None


def _in_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


# What amp has patched


def _amp(seen: _Seen) -> Iterator[str]:
    live = seen.live
    if live is None:
        yield "amp is not set up" + (": initialize was called with enabled=False" if runtime.disabled else "")
        return
    properties = live.settings.properties
    yield f"amp is set up: {properties.opt_level}, {str(properties.half_dtype).removeprefix('torch.')}"
    if live.switch.thread.off:
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
    """Returns the namespaces of functions to be patched, by place; and those that wait for an import, with counts."""
    places: dict[tuple[int, str], str] = {}
    waiting: Counter[str] = Counter()
    if live.patches_functions:
        for known in runtime.registered:
            places[id(known.owner), known.name] = known.path.namespace
        for path in live.settings.lists.for_half(live.settings.properties.half_dtype):
            owner = _owner(path.namespace)
            if owner is None:
                waiting[path.namespace] += 1
            else:
                places[id(owner), path.name] = path.namespace
    return places, waiting


# Names that lead past the patches


def _names(seen: _Seen) -> Iterator[str]:
    if seen.live is None or not seen.live.patches_functions:
        yield "not looked for: amp patches no functions now"
        return
    patched = [patch.installed for patch in seen.patches if is_wrapper(patch.installed)]
    originals = {id(beneath(wrapper)): beneath(wrapper) for wrapper in patched}
    paths = {id(beneath(wrapper)): _name_of(wrapper) for wrapper in patched}
    users = {id(module): module for module in loaded_modules("torch", "ampatch")}
    torchs = {id(module): module for module in loaded_modules("ampatch") if id(module) not in users}
    held = [(owner, name, paths[id(value)]) for owner, name, value in bindings(users.values(), originals)]
    held += _lost(users.values(), seen, originals.keys())
    yield from _problems("in loaded modules", [f"{_name_of(owner)}.{name}: {path}" for owner, name, path in held])
    yield f"in torch's own modules, which are left alone: {len(bindings(torchs.values(), originals))}"
    yield from _problems("in closures and default arguments", sorted(set(_captured(paths))))
    yield "not looked for: containers that neither a model of amp nor a function leads to"


def _captured(paths: Mapping[int, str]) -> Iterator[str]:
    """Yields functions of users that hold a function without casts where nothing can take its place.

    They hold it as it is, or in a container or partial, or in a container of these.
    """
    for function in gc.get_objects():
        if type(function) is types.FunctionType and _captures_any(function) and not _is_torchs_or_amps(function):
            for name, value in _captures(function):
                for held in _held_in(value) if type(value) in OPENED else (value,):
                    if id(held) in paths:
                        yield f"{_describe(function)}: {paths[id(held)]} as {name}"


def _held_in(value: object, deeper: int = 2) -> Iterator[object]:
    """Yields a value, and what is in it if it is a container or a partial, or in one of those in it."""
    yield value
    # The attributes of a module stand in a dict too, which is no container to anybody.
    if deeper and type(value) in OPENED and not (type(value) is dict and "__name__" in value):
        for held in gc.get_referents(value):
            yield from _held_in(held, deeper - 1)


def _captures_any(function: types.FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def _captures(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yields the names and values of a function's closure and of its default arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    # A named tuple's has more of them than arguments.
    yield from zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _is_torchs_or_amps(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] in ("torch", "ampatch")


def _lost(modules: Iterable[object], seen: _Seen, originals: Iterable[int]) -> Iterator[tuple[object, str, str]]:
    """Yields names of functions that another tool had replaced before amp, so that amp patched the replacements.

    Nothing leads from a replacement to what it replaced. That is told by the name it gives itself.
    """
    patched = {patch.key for patch in seen.patches}
    replaced = [listed for listed in seen.foreign if (id(listed.owner), listed.path.name) in patched]
    paths = {call_sign: listed.path for listed in replaced for call_sign in _call_signs(listed)}
    replacements = [_core(listed.function) for listed in replaced]
    # Whoever replaces a function keeps it, in order to call it.
    homes = {id(function.__globals__) for function in replacements if type(function) is types.FunctionType}
    owners = {id(listed.owner): listed.owner for listed in seen.listed}
    known = {id(value) for owner in owners.values() for value in vars(owner).values()}.union(originals)
    for module in modules:
        attributes = object.__getattribute__(module, "__dict__")
        if id(attributes) in homes:
            continue
        for name, value in list(attributes.items()):
            if _is_torchs(value) and id(value) not in known:
                path = paths.get((value.__name__, _home(value) in _HOMES_OF_METHODS))
                if path is not None:
                    yield module, name, str(path)


def _call_signs(listed: _Listed) -> list[tuple[str, bool]]:
    """Returns the names that torch's function may give itself (linalg_norm), and whether it is a method."""
    name, namespace = listed.path.name, listed.path.namespace.rpartition(".")[2]
    return [(called, isinstance(listed.owner, type)) for called in (name, f"{namespace}_{name}")]


# What others have patched


def _others(seen: _Seen) -> Iterator[str]:
    if seen.faults:
        yield from _problems("why the shipped lists do not load, and amp cannot be set up", seen.faults)
    yield from _problems(
        f"of {len(seen.listed)} functions in the shipped lists, not torch's own",
        [f"{listed.path}: {_describe(listed.function)}" for listed in seen.foreign],
    )
    yield from _problems(
        "patches of amp's that were replaced since",
        [
            f"{patch}: {'what it was before' if patch.now is patch.before else _describe(patch.now)}"
            for patch in seen.replaced
        ],
    )


def _core(value: object) -> Any:
    """Returns the function that something comes down to; or the value itself."""
    for kind, attribute in _AROUND.items():
        if issubclass(type(value), kind):  # not isinstance(): a proxy claims the class of what it hides
            return _core(getattr(value, attribute))
    return value


def _describe(value: object) -> str:
    """Returns what stands where a function stood, and where it comes from."""
    core = _core(value)
    around = "" if core is value else f"{type(value).__name__} around "
    home = _home(core)
    if type(core) is types.FunctionType:
        code = core.__code__  # functools.wraps copies the names of the function, but not those of its code
        return f"{around}{code.co_qualname} of {home} ({code.co_filename}:{code.co_firstlineno})"
    if home is not None:
        return f"{around}{core.__qualname__} of {home}"
    if core is MISSING or type(core) is bool:
        return "nothing" if core is MISSING else str(core)
    return f"{around}an object of {_name_of(type(core))}"


def _name_of(owner: object) -> str:
    """Returns what to call a module, a class, a function that amp patched, or an object of a class."""
    if issubclass(type(owner), types.ModuleType):
        return str(object.__getattribute__(owner, "__dict__").get("__name__"))
    named = owner if isinstance(owner, (type, types.FunctionType)) else type(owner)
    return f"{named.__module__}.{named.__qualname__}"


def _problems(label: str, details: Sequence[str]) -> Iterator[str]:
    yield f"{label}: {len(details)}"
    yield from _indented(sorted(details))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"

"""Finds the function that a user means by an object, a name, a path or an operator, with all its spellings.

Owns the forms in which a function can be given, and the errors for what is no function. Must never call what it finds,
nor decide what amp does to it.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ampatch.cast_lists import spellings
from ampatch.cast_lists.paths import Path, PathError, find, find_or, find_owner, find_owner_or, identity
from ampatch.diagnostics.explain.rulings import Located, Rulings, attribute, located
from ampatch.diagnostics.recorder import callers
from ampatch.errors import OptionError, did_you_mean
from ampatch.function_wrapper import is_wrapper, unwrapped
from ampatch.patching import function_places
from ampatch.patching.replaced_forward import ReplacedForward
from ampatch.runtime import decoration_of

_BYPASS = (
    "The object itself is the function without amp, bound before amp was set up: its arguments are not cast. "
    "Functions that it calls inside still follow their own rules."
)
_ONLY_A_CLASS = "A class does not show its submodules: explain a module to see what these call."


@dataclass(frozen=True, slots=True)
class Subject:
    """The function that was asked about, or the forwards of a module.

    Attributes:
        text: how it was asked about.
        spelled: its spellings; at least one.
        args: arguments that the given object brings along: the tensor of a bound method.
        kwargs: the same, by keyword.
        decoration: kind that it is decorated for.
        is_bypass: True if the object itself is the function without amp, while its path leads to a patch.
        sentences: what there is to say about the object.
        is_module: True for a module or its class: the spellings are the forwards of its modules.
    """

    text: str
    spelled: tuple[Located, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    decoration: str | None = None
    is_bypass: bool = False
    sentences: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def primary(self) -> Located:
        """The spelling whose call is explained."""
        return self.asked[0]

    @property
    def asked(self) -> list[Located]:
        """The spellings that were asked about; all of them if the name alone was given."""
        return [each for each in self.spelled if each.asked] or list(self.spelled)

    def code_of(self, spelled: Located) -> Any:
        """Returns what holds the code of a spelling: its function, or its forward bound to the module."""
        bound_to = spelled.bound_to
        return self.undecorated(spelled) if bound_to is None else types.MethodType(spelled.function, bound_to)

    def undecorated(self, spelled: Located) -> Any:
        """Returns the function of a spelling without amp's decorator."""
        return spelled.function.__wrapped__ if self.decoration else spelled.function


def subject_of(target: object, rulings: Rulings) -> Subject:
    """Returns the function that a user means.

    Args:
        target: the function, its name, its path, or an operator ("@").
        rulings: what decides; its lists and registrations name functions outside of torch.

    Raises:
        OptionError: it is no function, and no name of one.
    """
    return _by_name(rulings, target) if isinstance(target, str) else _by_object(rulings, target)


def _by_name(rulings: Rulings, given: str) -> Subject:
    name = given.strip()
    operator = spellings.method_of_operator(name)
    if operator is not None:
        return _by_path(rulings, given, operator)
    name = f"torch.nn.functional.{name[2:]}" if name.startswith("F.") else name
    namespace, _, last = name.rpartition(".")
    if namespace and last:
        return _by_dotted_name(rulings, given, Path(namespace, last))
    plain = spellings.plain_name(name)
    paths = spellings.spellings(plain) if name else []
    others = [path for path in rulings.listed if path.name == name and path not in paths]
    spelled = [
        *(located(path, asked=plain != name and path.name == name) for path in (*paths, *others)),
        *(each for each in _registered(rulings) if each.path.name == name),
    ]
    if not spelled and isinstance(kind := getattr(nn, name, None), type):
        return _of_module(kind, given)
    if not spelled:
        known = {each for each in spellings.known_names() if not each.startswith("_")}
        near = did_you_mean(given, known | {path.name for path in rulings.listed})
        raise OptionError(
            f"there is no function named {given!r}; expected a function or module, its name or its path, such "
            f"as softmax, torch.softmax, F.softmax, nn.LSTM or '@'.{near}"
        )
    return Subject(given, tuple(spelled))


def _by_dotted_name(rulings: Rulings, given: str, path: Path) -> Subject:
    """Finds a full path, or one whose first parts are left out, such as "functional.softmax"."""
    namespaces = dict.fromkeys([*spellings.NAMESPACES, "torch.nn", *(each.namespace for each in rulings.listed)])
    ends = [Path(each, path.name) for each in namespaces if each.endswith(f".{path.namespace}")]
    known = (each for each in (path, *ends) if find_or(each, default=each) is not each)
    is_short = ends and find_owner_or(path.namespace, path) is path
    return _by_path(rulings, given, next(known, ends[0] if is_short else path))


def _by_path(rulings: Rulings, given: str, path: Path) -> Subject:
    try:
        function = find(path)
    except PathError as error:
        raise OptionError(f"{given!r} cannot be explained: {error}") from None
    if function is not None:
        return _by_object(rulings, function, given, path)
    if path not in rulings.listed:
        raise OptionError(
            f"{given!r} cannot be explained: {path.namespace} is not imported, and no list names {path}. Import it "
            "first."
        )
    told = f"{path.namespace} is not imported yet; amp patches it then."
    return Subject(given, (located(path, asked=True),), sentences=(told,))


def _by_object(rulings: Rulings, target: Any, given: str | None = None, at: Path | None = None) -> Subject:
    """Finds a function or module; ``given`` is its name and ``at`` its path, if the user gave one."""
    if isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return _of_module(target, given)
    target, args, kwargs = _opened(target)
    method = _method_of(target)
    if method is not None:
        target, given, at = method.function, given or str(method.path), None
    _check(target, given)
    function = unwrapped(target)
    spelled = _spellings_of(rulings, function, at)
    text = given or next((str(each.path) for each in spelled if each.asked), str(spelled[0].path))
    wrapped = any(each.function is function and is_wrapper(each.held()) for each in spelled)
    is_bypass = wrapped and given is None and not is_wrapper(target)
    told = (_BYPASS,) if is_bypass else ()
    return Subject(text, tuple(spelled), args, kwargs, decoration_of(function), is_bypass, told)


def _spellings_of(rulings: Rulings, function: object, at: Path | None) -> list[Located]:
    """Returns all spellings of a function, those that lead to this very function marked."""
    given = [] if at is None else [at]
    own = [*given, *_paths_of(function)]
    is_torchs = any(path.namespace in spellings.NAMESPACES for path in own)
    names = dict.fromkeys(spellings.plain_name(path.name) for path in own) if is_torchs else {}
    in_torch = [path for name in names for path in spellings.spellings(name)]
    same = [path for path in rulings.listed if identity(path) is function]
    paths = dict.fromkeys([*(path for path in given if path not in in_torch), *in_torch, *own, *same])
    registered = [each for each in _registered(rulings) if each.function is function and each.path not in paths]
    found = [*map(located, paths), *registered]
    marked = [replace(each, asked=each.path == at or each.function is function) for each in found]
    return marked or [Located(_path_by_itself(function), None, function, asked=True)]


def _registered(rulings: Rulings) -> list[Located]:
    """Returns the registered functions outside of torch's namespaces."""
    return [
        Located(Path(namespace, known.name), known.owner, unwrapped(attribute(known.owner, known.name)))
        for known in rulings.registered
        if (namespace := function_places.name_of(known.owner)) not in spellings.NAMESPACES
    ]


def _of_module(target: nn.Module | type[nn.Module], given: str | None) -> Subject:
    """Returns the forwards of a module and its submodules; the forward alone of a class, which shows no submodules."""
    if isinstance(target, nn.Module):
        modules, kind = list(target.modules()), type(target)
    else:
        modules, kind = [object.__new__(target)], target
    spelled = []
    for module in (each for each in modules if not callers.is_around_compiled(each)):
        forward: Any = vars(module).get("forward", getattr(type(module), "forward", None))
        while isinstance(forward, ReplacedForward):
            forward = forward.own
        function = inspect.unwrap(unwrapped(getattr(forward, "__func__", forward)))  # type: ignore[arg-type]
        if not isinstance(function, types.FunctionType):
            raise OptionError(
                f"found {type(module).__name__}, whose forward is no function in Python; expected one, since its code "
                "shows what it calls. Watch a step with amp.report instead."
            )
        if function is not nn.Module.forward:  # as containers have, which are not called
            path = Path(f"{type(module).__module__}.{type(module).__qualname__}", "forward")
            spelled.append(Located(path, type(module), function, asked=True, bound_to=module))
    if not spelled:
        raise OptionError(
            f"{kind.__name__} has no forward, and its modules have none; expected a module that computes."
        )
    sentences = () if kind is type(target) else (_ONLY_A_CLASS,)
    return Subject(given or kind.__qualname__, tuple(spelled), sentences=sentences, is_module=True)


def _check(target: object, given: str | None) -> None:
    """Raises if an object is no function."""
    if isinstance(target, type) or not callable(target):
        shown = repr(given) if given else getattr(target, "__qualname__", type(target).__name__)
        namespace = target.__name__ if isinstance(target, types.ModuleType) else ""
        hint = f" For the rules of a namespace, type `ampatch lists show {namespace}`." if namespace else ""
        raise OptionError(
            f"found {shown}; expected a function, an nn.Module, or the name of one, such as torch.softmax, 'softmax', "
            f"'nn.LSTM' or '@'.{hint}"
        )


def _opened(target: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function in a partial, a bound, class or static method, with the arguments that it brings along."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(target, (staticmethod, classmethod)):
            target = target.__func__
        elif isinstance(target, functools.partial):
            args, kwargs = (*target.args, *args), {**target.keywords, **kwargs}
            target = target.func
        elif isinstance(target, types.MethodType):
            args, target = (target.__self__, *args), target.__func__
        elif isinstance(getattr(target, "__self__", None), Tensor):
            args, target = (target.__self__, *args), find(Path("torch.Tensor", target.__name__))
        else:
            return target, args, kwargs


def _method_of(target: Any) -> Located | None:
    """Returns the tensor's method that a function of the module ``operator`` calls; None for all else."""
    if getattr(target, "__module__", None) != "_operator" or not callable(target):
        return None
    method = located(Path("torch.Tensor", f"__{target.__name__.strip('_')}__"))
    return None if method.function is None else method


def _paths_of(function: object) -> list[Path]:
    """Returns the paths in torch's namespaces that lead to a function."""
    if getattr(function, "__hash__", None) is None:
        return []
    return [
        Path(namespace, name)
        for namespace in spellings.NAMESPACES
        for name, value in inspect.getmembers_static(find_owner(namespace))
        if unwrapped(value) is function
    ]


def _path_by_itself(function: Any) -> Path:
    home = getattr(function, "__module__", None) or type(function).__module__
    own = "__qualname__" if isinstance(function, (types.FunctionType, types.BuiltinFunctionType)) else "__name__"
    return Path(str(home), getattr(function, own, None) or type(function).__name__)

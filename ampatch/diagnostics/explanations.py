"""Explains what amp does to one function: by which rule, from which file and line, and in which places.

Owns how a function or a name is found, and the wording of ``amp.explain`` and ``ampatch explain``. Must never call the
function, cast an argument, or change the session. Casts are predicted by `ampatch.patching.predictions`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.cast_lists import list_edits
from ampatch.cast_lists.annotations import Entry, entry_of, shipped_entries, user_entries
from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path, PathError, find, find_owner, identity, is_wrapper, unwrapped
from ampatch.cast_lists.rules import UNLISTED, Rule, Treatment, When, typed_conditions
from ampatch.cast_lists.spellings import NAMESPACES, called_by, known_names, method_of_operator, plain_name, spellings
from ampatch.errors import OptionError, did_you_mean
from ampatch.opt_levels import HALF_DTYPES
from ampatch.patching import adopted_model, casting_mode, function_places
from ampatch.patching.adapters import is_in_place
from ampatch.patching.function_patches import Registration
from ampatch.patching.function_places import Kind
from ampatch.patching.predictions import Prediction, Predictor, unchanged
from ampatch.runtime import decoration_of, runtime

_WIDTH = 96


@dataclass(frozen=True, slots=True)
class Overridden:
    """A rule that another one replaces: its list, and its file and line."""

    treatment: str
    source: str

    def __str__(self) -> str:
        return f"{self.treatment} ({self.source})"


@dataclass(frozen=True, slots=True)
class Ruling:
    """What decides about a function, for some half dtypes.

    Attributes:
        half_dtypes: names of the half dtypes.
        treatment: "whitelist", "blacklist", "promote", "banned" or "unlisted".
        source: file and line of the rule; "registered" or "decorated"; None if the function was never listed.
        when: conditions on arguments; all must hold.
        via_dtype: True if ``dtype=torch.float32`` is passed instead of a cast.
        casts_to: name of the half dtype to cast to, if it differs from the session's.
        instead: advice in the error of a banned function.
        since: first version of torch that the rule is for.
        until: first version of torch that the rule is no longer for.
        reason: comment on the entry, or on its group, in the file.
        overrides: rule that this one replaces; None if it replaces none.
    """

    half_dtypes: tuple[str, ...]
    treatment: str
    source: str | None = None
    when: When = ()
    via_dtype: bool = False
    casts_to: str | None = None
    instead: str | None = None
    since: str | None = None
    until: str | None = None
    reason: str | None = None
    overrides: Overridden | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        plain = {name: getattr(self, name) for name in _PLAIN_RULING}
        overridden = self.overrides
        return {
            **plain,
            "half_dtypes": list(self.half_dtypes),
            "when": {name: list(values) for name, values in self.when},
            "overrides": overridden and {"treatment": overridden.treatment, "source": overridden.source},
        }

    @property
    def conditions(self) -> list[str]:
        """Conditions and options, each in words."""
        return [
            *([f"when {typed_conditions(self.when)}"] if self.when else []),
            *(["via_dtype"] if self.via_dtype else []),
            *([f"to {self.casts_to}"] if self.casts_to else []),
            *([f"from torch {self.since}"] if self.since else []),
            *([f"before torch {self.until}"] if self.until else []),
        ]


_PLAIN_RULING = ("treatment", "source", "via_dtype", "casts_to", "instead", "since", "until", "reason")


@dataclass(frozen=True, slots=True)
class Spelling:
    """One path of the function.

    Attributes:
        path: dotted path.
        asked: True if it is the function that was asked about, rather than another spelling of it.
        rulings: what decides about it; one, or one for each half dtype.
        note: something unusual about the path; None if there is nothing.
    """

    path: str
    asked: bool
    rulings: tuple[Ruling, ...]
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        rulings = [ruling.to_dict() for ruling in self.rulings]
        return {"path": self.path, "asked": self.asked, "rulings": rulings, "note": self.note}


@dataclass(frozen=True, slots=True)
class Called:
    """A listed function that another function calls inside, with its own rulings."""

    caller: str
    path: str
    rulings: tuple[Ruling, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"caller": self.caller, "path": self.path, "rulings": [ruling.to_dict() for ruling in self.rulings]}


@dataclass(frozen=True, slots=True)
class BoundPlace:
    """A place that holds the function.

    Attributes:
        where: description of the place.
        path: path of the function that it holds.
        kind: kind of the place.
        casts: True if the arguments of calls by way of it are cast, or would be if amp were set up. Functions that it
            calls inside follow their own rules in any case.
        note: condition, or what is wrong.
    """

    where: str
    path: str
    kind: str
    casts: bool
    note: str

    def __str__(self) -> str:
        return f"{self.where}: {self.path}, {self.note}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        return {name: getattr(self, name) for name in ("where", "path", "kind", "casts", "note")}


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """What a call would do with its arguments.

    Attributes:
        path: function that is called.
        half_dtype: half dtype of the casts.
        prediction: the tensors among the arguments, and the error that the call would raise.
    """

    path: str
    half_dtype: str
    prediction: Prediction

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        predicted = self.prediction
        return {
            "path": self.path,
            "half_dtype": self.half_dtype,
            "arguments": [
                {"name": each.name, "before": _name(each.before), "after": _name(each.after), "why": each.why}
                for each in predicted.arguments
            ],
            "passes_dtype": None if predicted.passes_dtype is None else _name(predicted.passes_dtype),
            "error": predicted.error,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What amp does to a function; prints as text.

    Attributes:
        asked: the function or the name that was asked about, as text.
        policy: the settings that were applied, as plain data.
        state: whether and how amp is on, as sentences.
        spellings: all paths of the function.
        calls: listed functions that it calls inside, as far as its code shows.
        places: places that hold the function. Not searched if nothing is patched.
        call: what a call with the given arguments would do; None without arguments.
        notes: sentences on edits that other functions undo, and on rules for other versions of torch.
    """

    asked: str
    policy: Mapping[str, Any] = field(repr=False)
    state: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    calls: tuple[Called, ...]
    places: tuple[BoundPlace, ...]
    call: ExplainedCall | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, True, False, None, lists and dicts. Dtypes are names."""
        return {
            "asked": self.asked,
            "policy": dict(self.policy),
            "state": list(self.state),
            "spellings": [spelling.to_dict() for spelling in self.spellings],
            "calls": [called.to_dict() for called in self.calls],
            "places": [place.to_dict() for place in self.places],
            "call": None if self.call is None else self.call.to_dict(),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text."""
        yield self.asked
        yield from _wrapped(" ".join(self.state))
        sections: dict[str, Iterable[str]] = {
            f"This call, in {self.policy['half_dtype']}": _call_lines(self.call),
            "Spellings": _spelling_lines(self.spellings),
            "Lists": _meaning_lines(self.spellings, bool(self.policy["allow_banned"])),
            "Reasons in the lists": _reason_lines([*self.spellings, *self.calls]),
            "Listed functions that it calls inside, as far as its code shows": _called_lines(self.calls),
            "Where else it is bound": _place_lines(self.places, bool(self.calls)),
            "Notes": itertools.chain.from_iterable(_wrapped(note, "  ") for note in self.notes),
        }
        for heading, lines in sections.items():
            rest = list(lines)
            if rest:
                yield from ["", heading, *rest]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def explain(
    target: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    lists: CastLists | None = None,
    half_dtypes: Sequence[torch.dtype] = (),
) -> Explanation:
    """Returns what amp does to a function.

    Args:
        target: the function, its name or its path, or an operator ("@").
        args: arguments of a call, by position. The call is not made.
        kwargs: arguments of the call, by keyword.
        lists: cast lists; None for those of the live session, or else the shipped ones.
        half_dtypes: half dtypes to explain; empty for both.

    Raises:
        OptionError: ``target`` is no function, and no name of one.
    """
    policy = _Policy(lists, tuple(half_dtypes) or tuple(HALF_DTYPES.values()))
    subject = _Finder(policy).subject(target)
    args, kwargs = (*subject.args, *args), {**subject.kwargs, **(kwargs or {})}
    has_call = bool(len(args) > len(subject.args) or len(kwargs) > len(subject.kwargs)) or any(
        isinstance(value, Tensor) for value in subject.args
    )
    spelled = tuple(policy.spelling(each) for each in subject.spelled)
    return Explanation(
        subject.text,
        types.MappingProxyType(policy.as_plain_data()),
        (*policy.sentences(), *subject.sentences),
        spelled,
        tuple(_called(subject, policy)),
        tuple(_places(subject, policy)),
        _explained_call(subject, policy, args, kwargs) if has_call else None,
        tuple(_notes(subject, policy)),
    )


# What is asked about


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A path with its owner and function; both None if its module is not imported."""

    path: Path
    owner: object
    function: Any
    asked: bool = False

    @property
    def text(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The function that was asked about.

    Attributes:
        text: how it was asked about.
        spelled: its spellings.
        args: arguments that the object that was passed brings along: the tensor of a bound method.
        kwargs: the same, by keyword.
        decoration: kind that it is decorated for.
        is_bypass: True if the object itself is the function without amp, while its path leads to a patch.
        sentences: what there is to say about the object.
    """

    text: str
    spelled: tuple[_Spelled, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    decoration: str | None = None
    is_bypass: bool = False
    sentences: tuple[str, ...] = ()

    @property
    def primary(self) -> _Spelled:
        """The spelling whose call is explained."""
        return next((each for each in self.spelled if each.asked), self.spelled[0])

    @property
    def asked(self) -> list[_Spelled]:
        """The spellings that were asked about; all of them if the name alone was given."""
        return [each for each in self.spelled if each.asked] or list(self.spelled)


class _Finder:
    """Finds the function that a user means."""

    def __init__(self, policy: _Policy) -> None:
        self._policy = policy

    def subject(self, target: object) -> _Subject:
        if isinstance(target, str):
            return self._by_name(target)
        return self._by_object(target, None, (), {})

    def _by_name(self, given: str) -> _Subject:
        name = given.strip()
        operator = method_of_operator(name)
        if operator is not None:
            return self._by_path(given, operator)
        name = f"torch.nn.functional.{name[2:]}" if name.startswith("F.") else name
        namespace, _, attribute = name.rpartition(".")
        if namespace and attribute:
            return self._by_dotted_name(given, Path(namespace, attribute))
        plain = plain_name(name)
        paths = spellings(plain) if name else []
        others = [path for path in self._policy.listed if path.name == name and path not in paths]
        spelled = [
            *(_spelled(path, asked=plain != name and path.name == name) for path in (*paths, *others)),
            *self._registered_as(name),
        ]
        if not spelled:
            raise OptionError(self._unknown(given))
        return _Subject(given, tuple(spelled))

    def _by_dotted_name(self, given: str, path: Path) -> _Subject:
        """Finds a full path, or one whose first parts are left out, such as "functional.softmax"."""
        ends = [
            Path(namespace, path.name)
            for namespace in dict.fromkeys([*NAMESPACES, *(each.namespace for each in self._policy.listed)])
            if namespace.endswith(f".{path.namespace}")
        ]
        missing: PathError | None = None
        for each in (path, *ends):
            try:
                find(each)
            except PathError as error:
                missing = missing or error
                continue
            return self._by_path(given, each)
        raise OptionError(f"{given!r} cannot be explained: {missing}") from None

    def _by_path(self, given: str, path: Path) -> _Subject:
        try:
            function = find(path)
        except PathError as error:
            raise OptionError(f"{given!r} cannot be explained: {error}") from None
        spelled = _spelled(path, asked=True)
        if function is not None:
            return self._by_object(function, given, (), {}, spelled)
        if path not in self._policy.listed:
            raise OptionError(
                f"{given!r} cannot be explained: {path.namespace} is not imported, and no list names {path}. Import it "
                "first."
            )
        return _Subject(given, (spelled,), sentences=(f"{path.namespace} is not imported yet; amp patches it then.",))

    def _by_object(
        self,
        target: Any,
        given: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        at: _Spelled | None = None,
    ) -> _Subject:
        if isinstance(target, (staticmethod, classmethod)):
            return self._by_object(target.__func__, given, args, kwargs, at)
        if isinstance(target, functools.partial):
            return self._by_object(target.func, given, (*target.args, *args), {**target.keywords, **kwargs}, at)
        if isinstance(target, types.MethodType):
            return self._by_object(target.__func__, given, (target.__self__, *args), kwargs, at)
        if isinstance(getattr(target, "__self__", None), Tensor):
            method = find(Path("torch.Tensor", target.__name__))
            return self._by_object(method, given, (target.__self__, *args), kwargs, at)
        if getattr(target, "__module__", None) == "_operator" and callable(target):
            path = Path("torch.Tensor", f"__{target.__name__.strip('_')}__")
            if _is_found(path):
                return self._by_object(find(path), given or str(path), args, kwargs)
        self._check(target, given)
        function = unwrapped(target)
        spelled = self._spellings_of(function, at)
        found = _Subject(
            given or next((each.text for each in spelled if each.asked), spelled[0].text),
            tuple(spelled),
            args,
            kwargs,
            decoration_of(function),
        )
        return found if given is not None or is_wrapper(target) else self._with_bypass(found, function)

    def _with_bypass(self, found: _Subject, function: object) -> _Subject:
        """Marks an object that is a function without amp, although its path leads to amp's wrapper."""
        here = [
            value
            for each in found.spelled
            if each.function is function and (value := getattr(each.owner, each.path.name, None)) is not function
        ]
        if not any(map(is_wrapper, here)):
            return found
        told = (
            "The object itself is the function without amp, bound before amp was set up: its arguments are not cast. "
            "Functions that it calls inside still follow their own rules."
        )
        return replace(found, is_bypass=True, sentences=(*found.sentences, told))

    def _spellings_of(self, function: object, at: _Spelled | None) -> list[_Spelled]:
        """Returns all spellings of a function, those that lead to this very function marked."""
        own = [path for path in _paths_of(function) if at is None or path != at.path]
        names = dict.fromkeys(plain_name(path.name) for path in ([at.path] if at is not None else []) + own)
        in_torch = [path for name in names for path in spellings(name)] if own or _is_torchs(at) else []
        same = [path for path in self._policy.listed if identity(path) is function]
        found = {path: _spelled(path) for path in dict.fromkeys([*in_torch, *own, *same])}
        if at is not None:
            found = {at.path: at, **found} if at.path not in found else {**found, at.path: at}
        spelled = [replace(each, asked=each.asked or each.function is function) for each in found.values()]
        spelled += [each for each in self._registered_as(None, function) if each.path not in found]
        return spelled or [_Spelled(_path_by_itself(function), None, function, asked=True)]

    def _registered_as(self, name: str | None, function: object = None) -> list[_Spelled]:
        """Returns the registered functions of a name, or those that are a function, outside of the lists."""
        found = []
        for known in self._policy.registered:
            registered = unwrapped(inspect.getattr_static(known.owner, known.name, None))
            registered = getattr(registered, "__func__", registered)
            registered = unwrapped(registered)
            if (known.name == name) if name is not None else registered is function:
                path = _path_in(known.owner, known.name)
                if path.namespace not in NAMESPACES:
                    found.append(_Spelled(path, known.owner, registered, asked=name is None))
        return found

    def _check(self, target: object, given: str | None) -> None:
        """Raises if an object is no function; the message names the functions that a module's forward calls."""
        shown = repr(given) if given is not None else repr(target) if callable(target) else type(target).__name__
        if isinstance(target, nn.Module):
            shown, kind = f"a {type(target).__name__}", type(target)
        elif isinstance(target, type):
            shown, kind = f"{given or target.__qualname__}, which is a class", target
        elif callable(target):
            return
        else:
            raise OptionError(
                f"found {shown}; expected a function, its name or its path, such as torch.softmax, 'softmax' or '@'."
            )
        forward = unwrapped(vars(kind).get("forward"))
        inside = [str(path) for path in self._policy.paths_by_function(called_by(forward).values())] if forward else []
        hint = f" Its forward calls {', '.join(inside)}." if inside else ""
        raise OptionError(f"found {shown}; expected a function, or the name of one.{hint}")

    def _unknown(self, given: str) -> str:
        known = {each for each in known_names() if not each.startswith("_")}
        near = did_you_mean(given, known | {path.name for path in self._policy.listed})
        return (
            f"there is no function named {given!r}; expected a function, its name or its path, such as softmax, "
            f"torch.softmax, F.softmax or '@'.{near}"
        )


def _spelled(path: Path, asked: bool = False) -> _Spelled:
    try:
        owner = find_owner(path.namespace)
        return _Spelled(path, owner, None if owner is None else find(path), asked)
    except PathError:  # an optional entry
        return _Spelled(path, None, None, asked)


def _is_found(path: Path) -> bool:
    try:
        return find(path) is not None
    except PathError:
        return False


def _is_torchs(at: _Spelled | None) -> bool:
    return at is not None and at.path.namespace in NAMESPACES


def _paths_of(function: object) -> list[Path]:
    """Returns the paths in torch's namespaces that lead to a function."""
    if getattr(function, "__hash__", None) is None:
        return []
    return [
        Path(namespace, name)
        for namespace in NAMESPACES
        for name in dir(find_owner(namespace))
        if unwrapped(inspect.getattr_static(find_owner(namespace), name, None)) is function
    ]


def _path_by_itself(function: Any) -> Path:
    home = getattr(function, "__module__", None) or type(function).__module__
    own = "__qualname__" if isinstance(function, (types.FunctionType, types.BuiltinFunctionType)) else "__name__"
    return Path(str(home), getattr(function, own, None) or type(function).__name__)


def _path_in(owner: object, name: str) -> Path:
    if isinstance(owner, type):
        return Path(f"{owner.__module__}.{owner.__qualname__}", name)
    return Path(getattr(owner, "__name__", repr(owner)), name)


# What decides


class _Policy:
    """The lists, registrations and session that decide.

    Attributes:
        lists: cast lists.
        half_dtypes: half dtypes to explain.
        registered: registered functions; later ones take precedence.
        live: live session; None if there is none, or if other lists were asked about.
    """

    def __init__(self, lists: CastLists | None, half_dtypes: tuple[torch.dtype, ...]) -> None:
        self.live = runtime.live if lists is None else None
        settings = None if self.live is None else self.live.settings
        self.lists = lists if lists is not None else shipped() if settings is None else settings.lists
        self.half_dtypes = half_dtypes
        self.registered = tuple(runtime.registered) if self.live is None else self.live.registered
        self.listed = dict.fromkeys(path for path, _ in self.lists.rules)
        self._user_entries: list[Entry] | None = None
        self._by_identity: dict[int, list[Path]] | None = None

    @property
    def user_entries(self) -> list[Entry]:
        """The entries of the user's files."""
        if self._user_entries is None:
            self._user_entries = user_entries(self.lists)
        return self._user_entries

    @property
    def half_dtype(self) -> torch.dtype:
        """The half dtype of the live session, or the one that it would have by default."""
        if self.live is not None:
            return self.live.settings.properties.half_dtype
        if len(self.half_dtypes) == 1:
            return self.half_dtypes[0]
        return torch.bfloat16 if adopted_model.all_device_types() == {"cpu"} else torch.float16

    @property
    def patches(self) -> bool:
        """True if functions are patched, or would be: False at an opt level that leaves them."""
        return self.live is None or self.live.patches_functions

    def as_plain_data(self) -> dict[str, Any]:
        live = self.live
        return {
            "is_on": live is not None,
            "opt_level": None if live is None else live.settings.properties.opt_level,
            "half_dtype": _name(self.half_dtype),
            "patches_functions": None if live is None else live.patches_functions,
            "allow_banned": live is not None and live.settings.allow_banned,
            "casts_here": live is not None and live.patches_functions and not live.switch.is_off(),
            "cast_lists": list(self.lists.files),
        }

    def sentences(self) -> Iterator[str]:
        live, named = self.live, " and ".join(["the shipped lists", *self.lists.files])
        if live is None:
            off = "amp is off (enabled=False)" if runtime.disabled else "amp is off"
            half = f" in {_name(self.half_dtypes[0])}" if len(self.half_dtypes) == 1 else ""
            yield f"{off}; this is what {named} would do{half}."
        else:
            properties = live.settings.properties
            yield f"amp is on at {properties.opt_level} in {_name(properties.half_dtype)}, with {named}."
            if not live.patches_functions:
                yield f"{properties.opt_level} patches no functions, so none of this is applied."
            elif live.switch.is_off():
                yield "Casts are off here."
        if casting_mode.thread.mode is not None:
            yield "In this forward of an amp.convert_model copy the copy's own lists decide instead."

    def paths_by_function(self, functions: Iterable[object]) -> list[Path]:
        """Returns one listed path for each function that is on a list."""
        if self._by_identity is None:
            self._by_identity = {}
            for path in self.listed:
                self._by_identity.setdefault(id(identity(path)), []).append(path)
        listed = (self._by_identity.get(id(function)) for function in functions)
        return sorted({paths[0] for paths in listed if paths})

    def registration(self, spelled: _Spelled) -> Registration | None:
        """Returns the registration that decides about a function."""
        for known in reversed(self.registered):
            if isinstance(known.owner, type):
                heir = isinstance(spelled.owner, type) and issubclass(spelled.owner, known.owner)
                if not heir or known.name != spelled.path.name:
                    continue
            found = getattr(known.owner, known.name, None)
            if unwrapped(getattr(found, "__func__", found)) is spelled.function and spelled.function is not None:
                return known
        return None

    def rule(self, spelled: _Spelled, half_dtype: torch.dtype, lists: CastLists | None = None) -> Rule | None:
        """Returns the lists' rule for a function."""
        rules = (self.lists if lists is None else lists).rules
        found = rules.get((spelled.path, half_dtype))
        if found is not None or spelled.path in self.listed or spelled.function is None:
            return found
        listed = self.paths_by_function([spelled.function])
        return rules.get((listed[0], half_dtype)) if listed and _follows(spelled, listed[0]) else None

    def spelling(self, spelled: _Spelled) -> Spelling:
        return Spelling(spelled.text, spelled.asked, self.rulings(spelled), self._note(spelled))

    def _note(self, spelled: _Spelled) -> str | None:
        """Returns a note if a patch that should be in place is not."""
        if self.live is None or not self.patches or spelled.owner is None:
            return None
        if self.registration(spelled) is None and self.rule(spelled, self.half_dtype) is None:
            return None
        there = getattr(spelled.owner, spelled.path.name, None)
        there = getattr(there, "__func__", there)
        return None if is_wrapper(there) else "not patched now: something else is in place of amp's patch"

    def rulings(self, spelled: _Spelled) -> tuple[Ruling, ...]:
        """Returns what decides about a function, equal rulings for several half dtypes as one."""
        kind = decoration_of(spelled.function)
        groups: dict[Ruling, list[str]] = {}
        for half_dtype in self.half_dtypes:
            known = self.registration(spelled)
            rule = self.rule(spelled, half_dtype)
            if known is not None:
                ruling = _by_registration(known, rule)
            elif rule is not None:
                ruling = self._by_rule(spelled, half_dtype, rule)
            elif kind is not None:
                ruling = _by_decoration(kind)
            else:
                ruling = self._without_rule(spelled, half_dtype)
            groups.setdefault(ruling, []).append(_name(half_dtype))
        return tuple(replace(ruling, half_dtypes=tuple(names)) for ruling, names in groups.items())

    def _by_rule(self, spelled: _Spelled, half_dtype: torch.dtype, rule: Rule) -> Ruling:
        before = self.rule(spelled, half_dtype, shipped())
        is_shipped = rule is before  # not equality: a user's file may have the name of a shipped one
        entry = entry_of(rule, shipped_entries() if is_shipped else self.user_entries)
        return Ruling(
            (),
            rule.treatment.value,
            rule.source,
            rule.when,
            rule.via_dtype,
            None,
            rule.instead,
            None if entry is None else entry.since,
            None if entry is None else entry.until,
            None if entry is None else entry.reason,
            None if is_shipped else _overridden(before),
        )

    def _without_rule(self, spelled: _Spelled, half_dtype: torch.dtype) -> Ruling:
        before = self.rule(spelled, half_dtype, shipped())
        if before is None:
            return Ruling((), UNLISTED)
        took = [
            entry
            for entry in self.user_entries
            if entry.list_name == UNLISTED
            and entry.is_in_force
            and _name(half_dtype) in entry.half_dtypes
            and entry.covers(spelled.path)
        ]
        if not took:
            return Ruling((), UNLISTED, "cast_lists", overrides=_overridden(before))
        return Ruling((), UNLISTED, took[0].source, reason=took[0].reason, overrides=_overridden(before))


def _follows(spelled: _Spelled, listed: Path) -> bool:
    """Returns True if a name that holds a listed function is patched with it."""
    if isinstance(spelled.owner, type):  # it inherits the method
        owner = find_owner(listed.namespace)
        return isinstance(owner, type) and issubclass(spelled.owner, owner) and listed.name == spelled.path.name
    return any(spelled.owner is module for module in function_places.swept_modules())


def _by_registration(known: Registration, rule: Rule | None) -> Ruling:
    casts_to = None if known.dtype is None else _name(known.dtype)
    return Ruling((), known.treatment.value, "registered", casts_to=casts_to, overrides=_overridden(rule))


def _by_decoration(kind: str) -> Ruling:
    if kind in HALF_DTYPES:
        return Ruling((), Treatment.WHITELIST.value, "decorated", casts_to=kind)
    return Ruling((), kind, "decorated")


def _overridden(rule: Rule | None) -> Overridden | None:
    return None if rule is None else Overridden(rule.treatment.value, rule.source)


# What else decides


def _called(subject: _Subject, policy: _Policy) -> Iterator[Called]:
    seen: set[tuple[int, Path]] = set()
    for spelled in subject.asked:
        function = spelled.function.__wrapped__ if subject.decoration else spelled.function
        if function is None or any(key == id(function) for key, _ in seen):
            continue
        for path in policy.paths_by_function(called_by(function).values()):
            seen.add((id(function), path))
            yield Called(spelled.text, str(path), policy.rulings(_spelled(path)))


def _notes(subject: _Subject, policy: _Policy) -> Iterator[str]:
    paths = {spelled.path for spelled in subject.spelled}
    registered = [known.as_edit() for known in policy.registered]
    undone = list_edits.undone(policy.lists, policy.half_dtypes, registered)
    yield from (sentence for path, sentence in undone.items() if path in paths)
    for entry in (*policy.user_entries, *shipped_entries()):
        if not entry.is_in_force and any(entry.covers(path) for path in paths):
            limits = [f"from torch {entry.since} on"] if entry.since else []
            limits += [f"before torch {entry.until}"] if entry.until else []
            yield (
                f"{entry.source} has {entry.path} in {entry.list_name!r} {' and '.join(limits)}; this is torch "
                f"{torch.__version__}."
            )


# Where it is bound


_IF_OFF = {
    Kind.MODULE: (True, "would be patched"),
    Kind.MODEL: (True, "would be patched if the model is passed to amp.initialize"),
    Kind.MODEL_CONTAINER: (True, "would be patched if the model is passed to amp.initialize"),
    Kind.CONTAINER: (False, "would stay uncast, unless the module defines a class of a model passed to amp"),
    Kind.CLASS: (False, "would stay uncast"),
    Kind.FUNCTION: (False, "would stay uncast"),
}
_KEPT = {
    Kind.MODULE: "keeps the uncast function: bound since, or the module refuses changes",
    Kind.MODEL: "keeps the uncast function: the model was not passed to amp.initialize",
    Kind.MODEL_CONTAINER: "keeps the uncast function: the model was not passed to amp.initialize",
    Kind.CONTAINER: "keeps the uncast function: in a container that amp does not search",
    Kind.CLASS: "keeps the uncast function: amp does not replace it in classes",
    Kind.FUNCTION: "keeps the uncast function: amp cannot replace it there",
}


def _places(subject: _Subject, policy: _Policy) -> Iterator[BoundPlace]:
    if not policy.patches:
        return
    own = {(id(each.owner), each.path.name) for each in subject.spelled if each.owner is not None}
    wanted: dict[int, object] = {}
    paths: dict[int, str] = {}
    for spelled in subject.asked:
        if spelled.function is None or not _is_patched(spelled, policy):
            continue
        there = getattr(spelled.owner, spelled.path.name, None)
        for value in (spelled.function, there) if is_wrapper(there) else (spelled.function,):
            wanted[id(value)] = value
            paths.setdefault(id(value), spelled.text)
    told: set[tuple[int, str, Kind]] = set()
    for place in function_places.places(wanted) if wanted else ():
        key = id(place.owner), place.name, place.kind
        if key in told or (key[:2] in own and place.kind in (Kind.MODULE, Kind.CLASS)):
            continue
        told.add(key)  # a module may be loaded under several names
        casts, note = _IF_OFF[place.kind]
        if policy.live is not None:
            casts = is_wrapper(place.held)
            note = "patched" if casts else _KEPT[place.kind]
        yield BoundPlace(_where(place), paths[id(place.held)], place.kind.value, casts, note)


def _is_patched(spelled: _Spelled, policy: _Policy) -> bool:
    """Returns True if amp patches a function, or would."""
    half_dtypes = policy.half_dtypes if policy.live is None else (policy.half_dtype,)
    return policy.registration(spelled) is not None or any(
        policy.rule(spelled, half_dtype) is not None for half_dtype in half_dtypes
    )


def _where(place: function_places.Place) -> str:
    owner: Any = place.owner
    if place.kind is Kind.FUNCTION:
        code = owner.__code__
        return f"{place.name} of {code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if place.kind in (Kind.MODEL, Kind.MODEL_CONTAINER):
        return f"{type(owner).__name__}.{place.name}"
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{place.name}"
    return f"{object.__getattribute__(owner, '__dict__').get('__name__')}.{place.name}"


# What a call would do


def _explained_call(subject: _Subject, policy: _Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExplainedCall:
    spelled, live = subject.primary, policy.live
    if spelled.function is None:
        raise OptionError(f"{spelled.text} cannot be explained with arguments before its module is imported.")
    function = spelled.function.__wrapped__ if subject.decoration else spelled.function
    why = _why_nothing(subject, policy)
    if why is not None:
        prediction = unchanged(function, args, kwargs, why)
    else:
        predictor = Predictor(
            policy.half_dtype,
            adopted_model.all_device_types() if live is None else live.device_types,
            live is not None and live.settings.allow_banned,
        )
        prediction = _predicted(predictor, subject, policy, function, args, kwargs)
    return ExplainedCall(spelled.text, _name(policy.half_dtype), prediction)


def _why_nothing(subject: _Subject, policy: _Policy) -> str | None:
    """Returns why a call casts nothing, whatever its arguments are; None if the arguments decide."""
    spelled, live = subject.primary, policy.live
    if live is not None and not live.patches_functions:
        return f"{live.settings.properties.opt_level} patches no functions"
    if live is not None and live.switch.is_off():
        return "casts are off here"
    if subject.is_bypass:
        return "this object is the function without amp"
    if not _is_ruled(spelled, policy) and subject.decoration is None:
        return "the function is on no list"
    return None


def _is_ruled(spelled: _Spelled, policy: _Policy) -> bool:
    return policy.registration(spelled) is not None or policy.rule(spelled, policy.half_dtype) is not None


def _predicted(
    predictor: Predictor,
    subject: _Subject,
    policy: _Policy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Prediction:
    spelled = subject.primary
    known = policy.registration(spelled)
    if known is not None:
        return predictor.by_registration(known.path, known.treatment, known.dtype, spelled.function, args, kwargs)
    rule = policy.rule(spelled, policy.half_dtype)
    if rule is not None:
        return predictor.by_rule(rule, spelled.function, args, kwargs)
    return predictor.by_decoration(str(subject.decoration), function, args, kwargs)


# As text


def _call_lines(call: ExplainedCall | None) -> Iterator[str]:
    if call is None:
        return
    predicted = call.prediction
    if predicted.error is not None:
        yield from _wrapped(f"It would raise BannedFunctionError: {predicted.error}", "  ")
    if not predicted.arguments:
        yield f"  {call.path} gets no tensor."
    rows = []
    for each in predicted.arguments:
        change = _name(each.before) if each.before is each.after else f"{_name(each.before)} -> {_name(each.after)}"
        rows.append([f"  {each.name}", change, "" if each.why is None else each.why])
    yield from _aligned(rows)


def _spelling_lines(several: Sequence[Spelling]) -> Iterator[str]:
    marks = len({spelling.asked for spelling in several}) > 1
    rows = []
    for spelling in several:
        path = f"{'* ' if marks and spelling.asked else '  '}{spelling.path}"
        rows += _rows(path, spelling.rulings)
        if spelling.note:
            rows.append(["", spelling.note])
    yield from _aligned(rows)
    if marks:
        yield "  * the function that was asked about"


def _rows(path: str, rulings: Sequence[Ruling]) -> list[list[str]]:
    """Returns a row for each ruling, and one more for each ruling that overrides another."""
    rows = []
    for ruling in rulings:
        half = f"{' and '.join(ruling.half_dtypes)}: " if len(rulings) > 1 else ""
        details = "; ".join([*([ruling.source] if ruling.source else []), *ruling.conditions])
        rows.append([path, f"{half}{ruling.treatment}", details])
        if ruling.overrides is not None:
            rows.append(["", "", f"instead of {ruling.overrides}"])
        path = ""
    return rows


_MEANING = {
    "whitelist": "float32 arguments, and those of the other half type, are cast to the half type",
    "blacklist": "half arguments are cast to float32",
    "promote": "floating arguments of different types are cast to the widest of them",
    "banned": "a half argument is an error",
    "unlisted": "arguments stay as they are",
}


def _meaning_lines(several: Sequence[Spelling], allow_banned: bool) -> Iterator[str]:
    meanings = {**_MEANING, "banned": "computed in float32, by allow_banned=True"} if allow_banned else _MEANING
    found = [(spelling.path, ruling) for spelling in several for ruling in spelling.rulings]
    treatments = {ruling.treatment for _, ruling in found}
    yield from _aligned([f"  {name}", meaning] for name, meaning in meanings.items() if name in treatments)
    if any(ruling.via_dtype for _, ruling in found):
        yield from _wrapped("via_dtype: the function gets dtype=float32 and the half tensor; its kernel casts.", "  ")
    listed_in_place = [
        ruling for path, ruling in found if is_in_place(path.rpartition(".")[2]) and ruling.treatment != UNLISTED
    ]
    if listed_in_place:
        yield from _wrapped("In place, the tensor that is written to decides; others are cast to its type.", "  ")
    if any(ruling.treatment == "blacklist" for ruling in listed_in_place):
        yield from _wrapped("A blacklisted in-place form on a half tensor is an error.", "  ")


def _reason_lines(several: Sequence[Spelling | Called]) -> Iterator[str]:
    told: dict[str, str] = {}
    for ruling in itertools.chain.from_iterable(each.rulings for each in several):
        if ruling.reason and ruling.source and ruling.source not in told:
            told[ruling.source] = ruling.reason
    for source, reason in told.items():
        yield f"  {source}"
        yield from _wrapped(reason, "    ")


def _called_lines(calls: Sequence[Called]) -> Iterator[str]:
    for caller, group in itertools.groupby(calls, lambda called: called.caller):
        yield f"  {caller} calls"
        yield from _aligned(row for called in group for row in _rows(f"    {called.path}", called.rulings))


def _place_lines(places: Sequence[BoundPlace], calls_others: bool) -> Iterator[str]:
    for place, count in Counter(places).items():
        yield from _wrapped(f"{place}{f' ({count} times)' if count > 1 else ''}", "  ", "    ")
    if calls_others and not all(place.casts for place in places):
        yield "  An uncast function still calls patched functions inside: see above."


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields rows as lines in columns; the last cell of a row is wrapped."""
    cells = [[*row, *[""] * (3 - len(row))] if len(row) != 2 else [row[0], "", row[1]] for row in rows]
    if not cells:
        return
    first, second = (max(len(row[column]) for row in cells) for column in (0, 1))
    for row in cells:
        start = f"{row[0].ljust(first)}  {row[1].ljust(second)}  " if second else f"{row[0].ljust(first)}  "
        yield from (line.rstrip() for line in _wrapped(row[2], start, " " * len(start)) or [start])


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Finds every error, warning and note of ampatch in its sources, with the text that users see. Must not import them.

Fields of f-strings become `Field` marks: a page shows ``{optimizer!r}`` as *optimizer*.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

PACKAGE = Path(__file__).parents[2] / "ampatch"

#: Around the name of a field in a text. No message has these characters.
OPEN, CLOSE = "\x02", "\x03"
_FIELD = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
#: Functions that only add a hint such as " Did you mean 'softmax'?", which depends on what the user typed.
_HINTS = {"did_you_mean", "hint", "_near_dtypes", "dtype_hint"}
#: Warnings that ampatch gives by their class, beside its own.
_WARNINGS = {"FutureWarning"}
#: A text has more variants than this only if fields have several texts each; then the fields are named instead.
_MOST, _DEEPEST = 6, 7
#: Classes that hold the text of a `CastListError`, with the position of the text.
_FAULTS = {"Fault": 1, "UnreadableError": 0}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Message:
    """One text that ampatch raises, warns or notes.

    Attributes:
        file: its module's path inside the package: ``scaling/clipping.py``.
        place: the function that raises it, with its class.
        kind: the class of the error or warning; "note" for a note on an error of somebody else.
        text: the text, with `OPEN` and `CLOSE` around the names of its fields.
        fields: sentences that stand in a field, by the name of the field.
    """

    file: str
    place: str
    kind: str
    text: str
    fields: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def plain(self) -> str:
        """Returns the text with ``*`` around the names of its fields."""
        return _FIELD.sub(r"*\1*", self.text)

    @property
    def has_words(self) -> bool:
        """Returns True if it has text of its own, beside that of another error."""
        return len(re.findall(r"[a-z]{2,}", _FIELD.sub("", self.text))) > 1


@dataclass
class _Module:
    """One source file, with the names that its texts use."""

    path: Path
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))

    @property
    def file(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Returns what the module imports from the package: a local name -> a module, and a name in it."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ampatch":
                found.update({each.asname or each.name: (node.module or "", each.name) for each in node.names})
        return found

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the functions and classes around a node, from the inside out, and then the module."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                yield node
        yield self.tree

    def place(self, node: ast.AST) -> str:
        around = [each.name for each in self.enclosing(node) if isinstance(each, (*_FUNCTIONS, ast.ClassDef))]
        return ".".join(reversed(around))

    def functions(self, name: str) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]


class Sources:
    """The modules of the package, and the messages in them."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._modules = {
            ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): _Module(
                path, ast.parse(path.read_text(encoding="utf-8"))
            )
            for path in sorted(package.rglob("*.py"))
        }
        self.classes = self._classes()

    def _classes(self) -> dict[str, ast.ClassDef]:
        """Returns the classes of errors by name, in the order of definition: AmpError and what derives from it."""
        every = [node for module in self._modules.values() for node in ast.walk(module.tree)]
        defined = [node for node in every if isinstance(node, ast.ClassDef)]
        found = {node.name: node for node in defined if node.name in ("AmpError", "AmpWarning")}
        while new := {
            node.name: node
            for node in defined
            if node.name not in found and {_last_name(base) for base in node.bases} & found.keys()
        }:
            found.update(new)
        return found

    def messages(self) -> list[Message]:
        """Returns all messages, in the order of the files and lines."""
        found = []
        for module in self._modules.values():
            for call in ast.walk(module.tree):
                if isinstance(call, ast.Call):
                    found += [(module.file, call.lineno, each) for each in self._of_call(module, call)]
        found.sort(key=lambda each: each[:2])
        return list(dict.fromkeys(message for _, _, message in found))

    def _of_call(self, module: _Module, call: ast.Call) -> Iterator[Message]:
        kind = self._kind(call)
        if kind is None or module.file == "errors.py":
            return
        given = _argument(call)
        if given is None:
            return
        parameter = self._is_parameter(module, call, given)
        if parameter is not None:  # a helper: its callers have the texts
            function, place = parameter
            for caller, its_call, text in self._calls(function.name, place):
                yield from self._told(caller, its_call, kind, text)
            return
        yield from self._told(module, call, kind, given)

    def _told(self, module: _Module, call: ast.Call, kind: str, given: ast.expr) -> Iterator[Message]:
        reader = _Reader(self, module)
        for text in reader.texts(given, 0):
            known = {name: reader.fields[name] for name in _FIELD.findall(text) if name in reader.fields}
            yield Message(module.file, module.place(call), kind, " ".join(text.split()), tuple(known.items()))

    def _kind(self, call: ast.Call) -> str | None:
        name = _last_name(call.func)
        if name in self.classes:
            return name
        if name in _FAULTS:
            return "CastListError"
        if isinstance(call.func, ast.Attribute) and name == "add_note":
            return "note"
        if name == "warn" and ast.unparse(call.func) in ("warn", "errors.warn", "warnings.warn"):
            category = _last_name(call.args[1]) if len(call.args) > 1 else "AmpWarning"
            return category if category in _WARNINGS else "AmpWarning"
        return None

    def _is_parameter(self, module: _Module, call: ast.Call, given: ast.expr) -> tuple[ast.FunctionDef, int] | None:
        """Returns the function around a call, and the position of its parameter that is the whole text."""
        if not isinstance(given, ast.Name):
            return None
        for function in module.enclosing(call):
            if isinstance(function, ast.FunctionDef):
                names = [each.arg for each in function.args.args]
                if given.id in names:
                    return function, names.index(given.id) - (names[0] == "self")
        return None

    def _calls(self, name: str, place: int) -> Iterator[tuple[_Module, ast.Call, ast.expr]]:
        for module in self._modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and _last_name(node.func) == name and len(node.args) > place:
                    yield module, node, node.args[place]

    def find(self, module: str, name: str) -> tuple[_Module, str] | None:
        """Returns the module that defines a name of a module."""
        for _ in range(3):
            found = self._modules.get(module)
            if found is None:
                return None
            if name not in found.imported:
                return found, name
            module, name = found.imported[name]
        return None


class _Reader:
    """Reads the texts that an expression may have."""

    def __init__(self, sources: Sources, module: _Module) -> None:
        self._sources, self._module = sources, module
        self.fields: dict[str, tuple[str, ...]] = {}

    def texts(self, node: ast.expr, depth: int) -> list[str]:
        """Returns the texts of an expression that is a message, or stands for one."""
        return self._known(node, depth) or [f"{OPEN}{_field_name(node)}{CLOSE}"]

    def _known(self, node: ast.expr, depth: int) -> list[str]:
        """Returns the texts of an expression; none if it is not known to be text."""
        read = self._READERS.get(type(node))
        return [] if read is None or depth > _DEEPEST else read(self, node, depth + 1)

    def _constant(self, node: ast.Constant, _depth: int) -> list[str]:
        return [node.value] if isinstance(node.value, str) else []

    def _joined(self, node: ast.JoinedStr, depth: int) -> list[str]:
        return self._product([self._part(part, depth) for part in node.values])

    def _operation(self, node: ast.BinOp, depth: int) -> list[str]:
        if isinstance(node.op, ast.Mult):  # text * condition
            text = self._known(node.left, depth)
            return [*text, ""] if text else []
        return self._product([self.texts(node.left, depth), self.texts(node.right, depth)])

    def _choice(self, node: ast.IfExp, depth: int) -> list[str]:
        return _all([self._known(each, depth) for each in (node.body, node.orelse)])

    def _either(self, node: ast.BoolOp, depth: int) -> list[str]:
        return _all([self._known(each, depth) for each in node.values])

    def _inside(self, node: ast.NamedExpr | ast.Subscript, depth: int) -> list[str]:
        return self._known(node.value, depth)

    def _attribute(self, node: ast.Attribute, depth: int) -> list[str]:
        if not isinstance(node.value, ast.Name):
            return []
        module, name = self._module.imported.get(node.value.id, ("", ""))
        return self._elsewhere(f"{module}.{name}", node.attr, depth)

    def _part(self, part: ast.expr, depth: int) -> list[str]:
        if not isinstance(part, ast.FormattedValue):
            return self._known(part, depth)
        if isinstance(part.value, ast.Call) and _last_name(part.value.func) in _HINTS:
            return [""]
        known = self._known(part.value, depth)
        if len(known) == 1:
            return [repr(known[0])] if part.conversion == ord("r") and OPEN not in known[0] else known
        name = _field_name(part.value)
        worded = [text for text in known if len(text.split()) > 3]
        if len(known) <= 2 and known and not worded and isinstance(part.value, ast.IfExp | ast.BinOp):
            return [max(known, key=len)] if "" in known else ["/".join(known)]
        if worded:
            told = dict.fromkeys(" ".join(text.split()) for text in known if text.strip())
            self.fields[name] = tuple(itertools.islice(told, _MOST))
        elif known and set(known) <= {""}:
            return [""]
        return [f"{OPEN}{name}{CLOSE}"]

    def _product(self, parts: list[list[str]]) -> list[str]:
        found = ["".join(each) for each in itertools.islice(itertools.product(*parts), _MOST)]
        return list(dict.fromkeys(found))

    def _call(self, node: ast.Call, depth: int) -> list[str]:
        name = _last_name(node.func)
        if name in _HINTS:
            return [""]
        if isinstance(node.func, ast.Name):
            if name in self._module.imported:
                return self._elsewhere(*self._module.imported[name], depth)
            return self._returned(self._module, name, depth)
        if not isinstance(node.func, ast.Attribute):
            return []
        if name in ("format", "join", "replace"):
            return self._of_text(node, node.func, depth)
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "cls"):
            return self._returned(self._module, name, depth)
        return self._attribute(node.func, depth)

    def _of_text(self, node: ast.Call, method: ast.Attribute, depth: int) -> list[str]:
        """Returns the texts of a call of a method of `str`."""
        if method.attr == "replace":
            return self._known(method.value, depth)
        if method.attr == "join":
            between = self._known(method.value, depth)
            if not (between and isinstance(node.args[0], ast.List)):
                return []
            parts = [self.texts(each, depth) for each in node.args[0].elts]
            return [between[0].join(each) for each in itertools.islice(itertools.product(*parts), _MOST)]
        given = [self._part(ast.FormattedValue(each, -1, None), depth)[0] for each in node.args]
        return [_filled(text, given) for text in self._known(method.value, depth)]

    def _elsewhere(self, module: str, name: str, depth: int) -> list[str]:
        """Returns the texts of a constant of another module, or of what a function there returns."""
        found = self._sources.find(module, name)
        if found is None:
            return []
        reader = _Reader(self._sources, found[0])
        texts = reader._at_the_top(found[1], depth) or reader._returned(found[0], found[1], depth)
        self.fields.update(reader.fields)
        return texts

    def _returned(self, module: _Module, name: str, depth: int) -> list[str]:
        found: list[str] = []
        for function in module.functions(name):
            for node in ast.walk(function):
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    found += self._known(node.value, depth)
        return list(dict.fromkeys(found))

    def _name(self, node: ast.Name, depth: int) -> list[str]:
        for scope in self._module.enclosing(node):
            if isinstance(scope, ast.ClassDef):
                continue
            values = _assigned(scope, node.id)
            if values:
                return _all([self._known(value, depth) for value in values])
            if isinstance(scope, ast.FunctionDef) and node.id in _parameters(scope):
                return self._given(scope, node.id, depth)
        if node.id in self._module.imported:
            return self._elsewhere(*self._module.imported[node.id], depth)
        return []

    def _given(self, function: ast.FunctionDef, name: str, depth: int) -> list[str]:
        """Returns the texts that callers in the module give for a parameter."""
        names = [each.arg for each in function.args.args]
        found = []
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.Call) and _last_name(node.func) == function.name:
                place = names.index(name) - (names[0] in ("self", "cls")) if name in names else len(node.args)
                given = [word.value for word in node.keywords if word.arg == name] + node.args[place : place + 1]
                found += [self._known(each, depth) for each in given]
        return _all(found)

    def _at_the_top(self, name: str, depth: int) -> list[str]:
        values = _assigned(self._module.tree, name)
        return list(itertools.chain.from_iterable(self._known(value, depth) for value in values))

    _READERS: ClassVar[dict[type[ast.expr], Callable[[_Reader, Any, int], list[str]]]] = {
        ast.Constant: _constant,
        ast.JoinedStr: _joined,
        ast.BinOp: _operation,
        ast.IfExp: _choice,
        ast.BoolOp: _either,
        ast.NamedExpr: _inside,
        ast.Subscript: _inside,
        ast.Call: _call,
        ast.Name: _name,
        ast.Attribute: _attribute,
    }


def _filled(template: str, given: list[str]) -> str:
    """Returns a template of `str.format` with its fields filled in."""
    numbers = itertools.count()
    return re.sub(r"\{(\d*)\}", lambda mark: given[int(mark[1] or next(numbers))], template)


def _all(texts: list[list[str]]) -> list[str]:
    """Returns the texts of all, each once; none if one of them is not known."""
    return list(dict.fromkeys(itertools.chain(*texts))) if all(texts) else []


def _assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    """Returns what is assigned to a name in a function, or at the top of a module."""
    nodes = ast.walk(scope) if not isinstance(scope, ast.Module) else ast.iter_child_nodes(scope)
    found = []
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None:
            for target in targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(value)
                elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(target.elts, value.elts, strict=False)
                    found += [part for each, part in pairs if isinstance(each, ast.Name) and each.id == name]
    return found


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}


def _argument(call: ast.Call) -> ast.expr | None:
    """Returns the text of a call that makes an error."""
    place = _FAULTS.get(_last_name(call.func), 0)
    return call.args[place] if len(call.args) > place and not isinstance(call.args[place], ast.Starred) else None


def _last_name(node: ast.AST) -> str:
    """Returns the last part of a name; of a call, that of its function."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _field_name(node: ast.expr) -> str:
    """Returns a name for a field that readers understand: ``optimizer class`` for ``type(optimizer).__name__``."""
    if isinstance(node, ast.Name):
        return _words(node.id)
    if isinstance(node, ast.Attribute) and node.attr == "__name__" and _last_name(node.value) == "type":
        return f"{_field_name(_inner(node.value))} class"
    if isinstance(node, ast.Attribute) and node.attr not in ("__name__", "strerror"):
        return _words(node.attr)
    inner = _inner(node)
    return "..." if inner is None else _field_name(inner)


def _inner(node: ast.expr) -> ast.expr | None:
    """Returns the part of an expression that names it."""
    if isinstance(node, ast.Call):
        given = [each for each in node.args if not isinstance(each, ast.Constant)]
        if given:
            return given[0].args[1] if _is_map(given[0]) else given[0]
        return node.func.value if isinstance(node.func, ast.Attribute) else node.func
    if isinstance(node, ast.BinOp):
        return node.right if isinstance(node.left, ast.Constant) else node.left
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return node.generators[0].iter
    if isinstance(node, ast.BoolOp):
        return node.values[0]
    return getattr(node, "value", getattr(node, "target", None)) if not isinstance(node, ast.Constant) else None


def _is_map(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == "map" and len(node.args) > 1


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ")

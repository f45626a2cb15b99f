"""The spellings of a function: all paths that torch has for one name, and the functions that a function calls.

Owns which namespaces hold torch's operators, and which names are one function to a user. ``softmax`` is a function, a
method and a function of ``torch.nn.functional``; ``mul`` is also ``*``. Must not know of lists, and must never call the
functions that it looks up.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ampatch.cast_lists.paths import Path, find_or, find_owner
from ampatch.function_wrapper import unwrapped

#: Written instead of a namespace: stands for each of `NAMESPACES`.
EVERY_NAMESPACE = "*"

#: The namespaces of torch's operators. torch._VF is not needed: it holds those of ``torch`` again, as the same objects.
NAMESPACES = (
    "torch",
    "torch.nn.functional",
    "torch.Tensor",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.sparse",
)

# Python's operator for each function name: the name of its special method, without underscores.
_OPERATORS = {
    **{name: name for name in ("abs", "add", "eq", "ge", "gt", "le", "lt", "matmul", "mul", "ne", "neg", "pow", "sub")},
    "absolute": "abs",
    "div": "truediv",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "multiply": "mul",
    "negative": "neg",
    "remainder": "mod",
    "subtract": "sub",
    "true_divide": "truediv",
}

#: The special methods that write to their first argument.
IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
) | {"__setitem__"}

#: Python's operators as users type them, with the names of their special methods, without underscores.
SYMBOLS = {
    "@": "matmul",
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "truediv",
    "//": "floordiv",
    "%": "mod",
    "**": "pow",
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
}

# Comparisons, each with the one that Python asks of the right operand.
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def method_of_operator(symbol: str) -> Path | None:
    """Returns the method that an operator calls, such as ``__matmul__`` for "@" and ``__imatmul__`` for "@="."""
    in_place = symbol.endswith("=") and symbol not in SYMBOLS
    if in_place and symbol[-2:-1] in "=!<>":
        return None
    name = SYMBOLS.get(symbol[:-1] if in_place else symbol)
    return None if name is None else Path("torch.Tensor", f"__{'i' if in_place else ''}{name}__")


def is_in_place(name: str) -> bool:
    """Returns True if a function of this name writes to its first argument."""
    return name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def plain_name(name: str) -> str:
    """Returns the name that stands for all spellings: "exp" for "exp_", "mul" for "__rmul__"."""
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        return next((plain for plain, of in _OPERATORS.items() if bare in (of, f"r{of}", f"i{of}")), name)
    return name[:-1] if name.endswith("_") and spellings(name[:-1]) else name


def spellings(name: str) -> list[Path]:
    """Returns every path that torch has for a function's name, with in-place forms and operators.

    Args:
        name: name without a namespace, such as "softmax". "exp" includes "exp_", but "exp_" does not include "exp".

    Returns:
        The paths; empty if torch has no function of this name.
    """
    found = [path for namespace in NAMESPACES if _is_function(path := Path(namespace, name))]
    if not found or name.endswith("_"):
        return found
    in_place = [path for namespace in NAMESPACES if _is_function(path := Path(namespace, f"{name}_"))]
    operator = _OPERATORS.get(name)
    forms = [] if operator is None else [Path("torch.Tensor", f"__{side}{operator}__") for side in ("", "r", "i")]
    return [*found, *in_place, *filter(_is_function, forms)]


@functools.cache
def spelled(path: str) -> tuple[str, ...]:
    """Returns a function's path, then its other spellings that write to no argument.

    Those that are the same object for Python come once: ``torch.conv2d`` is ``torch.nn.functional.conv2d``.
    """
    own = Path.of(path)
    others = spellings(plain_name(own.name)) if own.namespace in NAMESPACES else []
    by_function = {id(find_or(own)): path}
    for each in others:
        if not is_in_place(each.name):
            by_function.setdefault(id(find_or(each)), str(each))
    return tuple(by_function.values())


def entry_for(path: str) -> tuple[str, str]:
    """Returns a function as a cast list names it: `EVERY_NAMESPACE` and its plain name, or else its own namespace."""
    namespace, _, name = path.rpartition(".")
    plain = plain_name(name)
    return (EVERY_NAMESPACE, plain) if namespace in NAMESPACES and spellings(plain) else (namespace, name)


@functools.cache
def known_names() -> frozenset[str]:
    """Returns all names that have a spelling."""
    return frozenset(
        name for namespace in NAMESPACES for name in dir(find_owner(namespace)) if _is_function(Path(namespace, name))
    )


def _is_function(path: Path) -> bool:
    if path.name.startswith("__") and path.namespace != "torch.Tensor":
        return False  # a method of the module object, such as torch.__eq__
    # Not find(): its search for close names is slow.
    found = unwrapped(getattr(find_owner(path.namespace), path.name, None))
    return callable(found) and not isinstance(found, (type, types.ModuleType))


def called_by(function: object) -> dict[int, object]:
    """Returns the functions that a function of torch in Python calls, by id, as read from its code.

    A name that is looked up on any object except a module or a class counts as a tensor's method: in torch nearly all
    are. A bound method's code is read with its object: what it looks up there is no tensor's method. Called methods of
    this object, and functions in Python of the same module, are read too. Operators are not among them
    (`operators_in`), and calls inside functions in C++ are not found.
    """
    called = {id(value): value for _, named in _read(function) for value in map(_unbound, named)}
    called.pop(id(function), None)  # torch passes a function itself to the overrides of tensor classes
    return called


def operators_in(function: object) -> dict[str, list[object]]:
    """Returns the tensor methods that the operators in a function in Python may call, as read from its code.

    Code does not show types, so operators between numbers count as well; those whose right operand is a text do not.

    Returns:
        For each operator as typed, such as "@" and "-x", the methods: of the left operand, then of the right one.
    """
    found: dict[str, list[object]] = {}
    for home, _ in _read(function):
        for code in codes(home.__code__):
            before = None
            for instruction in dis.get_instructions(code):
                symbol = _symbol_of(instruction)
                if symbol is not None and not _is_text(before):
                    methods = (getattr(torch.Tensor, name, None) for name in _methods_behind(symbol))
                    found[symbol] = [unwrapped(method) for method in methods if method]
                before = instruction
    return found


def _symbol_of(instruction: dis.Instruction) -> str | None:
    """Returns the operator of an instruction as typed; None for all other instructions."""
    if instruction.opname == "UNARY_NEGATIVE":
        return "-x"
    if instruction.opname not in ("BINARY_OP", "COMPARE_OP"):
        return None
    symbol = instruction.argrepr.removeprefix("bool(").removesuffix(")")  # as Python 3.13 has it in conditions
    return symbol if method_of_operator(symbol) is not None else None


def _is_text(instruction: dis.Instruction | None) -> bool:
    return instruction is not None and instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str)


def _methods_behind(symbol: str) -> list[str]:
    """Returns the names of the methods that Python may call for an operator: of the left operand, then of the right."""
    if symbol == "-x":
        return ["__neg__"]
    if symbol in _MIRRORED:
        return [f"__{SYMBOLS[each]}__" for each in (symbol, _MIRRORED[symbol])]
    name = SYMBOLS.get(symbol) or SYMBOLS[symbol.removesuffix("=")]
    in_place = f"__i{name}__"
    left = in_place if symbol not in SYMBOLS and hasattr(torch.Tensor, in_place) else f"__{name}__"
    return [left, f"__r{name}__"]


def _read(function: object) -> Iterator[tuple[types.FunctionType, list[object]]]:
    """Yields a function in Python, and those that `called_by` reads with it, each with the functions that it names."""
    followed: set[int] = {id(_unbound(function))}
    waiting = [function]
    while waiting:
        target = waiting.pop()
        home: Any = inspect.unwrap(unwrapped(_unbound(target)))  # type: ignore[arg-type]
        if not isinstance(home, types.FunctionType):
            continue
        bound_to = target.__self__ if isinstance(target, types.MethodType) else None
        named = list(_named_in(home, bound_to))
        yield home, named
        for value in named:
            is_method = isinstance(value, types.MethodType) and value.__self__ is bound_to
            is_near = is_method or getattr(value, "__module__", None) == home.__module__
            if is_near and id(_unbound(value)) not in followed:
                followed.add(id(_unbound(value)))
                waiting.append(value)


def _unbound(function: object) -> object:
    return function.__func__ if isinstance(function, types.MethodType) else function


def _named_in(function: types.FunctionType, bound_to: object) -> Iterator[object]:
    """Yields the functions that a function names in its code: by global names, attributes and closures.

    Args:
        function: the function.
        bound_to: its first argument; None if it is not known.
    """
    named = dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))
    if bound_to is not None and function.__code__.co_argcount:
        named[function.__code__.co_varnames[0]] = bound_to
        if "__class__" in named:
            named["super"] = super(named["__class__"], bound_to)
    for code in codes(function.__code__):
        value: object = None
        for instruction in dis.get_instructions(code):
            name, kind = instruction.argval, instruction.opname
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = named.get(name) if name == "super" else function.__globals__.get(name)
            elif kind.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
                value = named.get(name[-1] if isinstance(name, tuple) else name)
            elif kind.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
                value = _attribute(named.get("super") if kind == "LOAD_SUPER_ATTR" else value, name)
            elif not (isinstance(value, super) and kind in ("PRECALL", "CALL")):  # super()
                value = None
                continue
            value = unwrapped(value)
            if callable(value) and not isinstance(value, type):
                yield value


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function, and the code of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _attribute(owner: object, name: str) -> object:
    """Returns an attribute that code names; None if there is none.

    The attributes of an unknown object are those of a tensor. A property is not computed, since that may run a user's
    code. ``torch.classes`` raises RuntimeError for a class that no library has registered.
    """
    if not isinstance(owner, (types.ModuleType, type, super, nn.Module)):
        owner = torch.Tensor
    elif isinstance(owner, nn.Module) and isinstance(inspect.getattr_static(type(owner), name, None), property):
        return None
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - a module that computes its attributes may raise anything
        return None


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

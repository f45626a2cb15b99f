"""Tells torch's compilers and tracers which functions are patched, and what the originals were.

Each of them keeps tables of torch's functions, or results of tracing them, and never checks whether a function was
replaced. Owns the changes to compilers while a session is installed; makes them through the ledger. Must not know rules
or types.
"""

from __future__ import annotations

import operator
import pkgutil
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import wrapt
from torch import Tensor, nn

from ampatch.errors import UsageError
from ampatch.half_types import HALVES
from ampatch.ledger import PatchLedger
from ampatch.torch_private import compilers as private
from ampatch.torch_private.modules import COMPILED_CALL

_F = TypeVar("_F", bound=Callable[..., Any])

# Modules of this package that models call while they run. The others do bookkeeping, which must not be compiled.
_TRACED = {
    "": "apex compilers cuda_on_cpu errors formats function_wrapper runtime session switch sync_batch_norm "
    "torch_private tracing",
    "casting": "write_back nested rounding",
    "cast_lists": "paths signatures",
    "interfaces": "copied_weights inference_copy",
    "public": "casts setting_up training",
    "patching": "adapters adopted_forward adopted_model autocast_checks beside_half_weights cast_labels casting_mode "
    "emulation fused_linear module_rules replaced_forward scaled_products thread_rules weight_cache wrappers",
}


def _keep_books_untraced(dynamo: types.ModuleType) -> None:
    root = Path(__file__).parent
    for folder, traced in _TRACED.items():
        for module in pkgutil.iter_modules([str(root / folder)]):
            if module.name not in traced.split() and (folder or module.name not in _TRACED):
                dynamo.trace_rules.add(".".join(filter(None, ("ampatch", folder, module.name))))


wrapt.register_post_import_hook(_keep_books_untraced, private.DYNAMO)


def called_in_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function that torch.compile must not trace; the compiled graph calls it instead."""
    wrapt.register_post_import_hook(lambda dynamo: dynamo.allow_in_graph(function), private.DYNAMO)
    return function


def traced_within_others(function: _F) -> _F:
    """Decorates a function that torch.compile must trace only as a part of compiled callers, never on its own.

    torch.compile leaves some code uncompiled, for example around some graph breaks and module hooks. Without this
    decorator it would compile each function called from there, except torch's.
    """
    private.trace_only_within_others(function.__code__)
    return function


def constant_while_traced(function: _F) -> _F:
    """Decorates a function that torch.compile calls while it traces the caller, to trace with its result."""
    setattr(function, private.MARKED_CONSTANT, True)  # torch's own decorator imports the compiler
    return function


def give_own_code(wrapper: Any, original: object) -> None:
    """Gives a wrapper its own code object, and lets torch.compile trace a builtin's wrapper only within its callers.

    torch.compile keeps few compiled results for each code object, and wrappers made in one place would share theirs.
    """
    wrapper.__code__ = wrapper.__code__.replace(co_name=wrapper.__name__)
    if not isinstance(original, types.FunctionType):
        traced_within_others(wrapper)


def trace_additions(
    ledger: PatchLedger,
    is_meant: Callable[[], bool],
    is_looked_up: Callable[[Tensor], bool],
    tables: Sequence[weakref.ref[Tensor]],
) -> None:
    """Makes torch.compile cast a table, or a view of one, that is added to looked-up half activations by ``+``.

    Args:
        ledger: records the change.
        is_meant: returns True where that is done.
        is_looked_up: returns True if a tensor comes from an embedding.
        tables: the tables; there may be more later.
    """
    from ampatch.torch_private import tracers

    call: Any = tracers.BuiltinVariable.call_function

    def fake_of(variable: Any) -> Any:
        return variable.as_proxy().node.meta["example_value"]

    def is_table(variable: Any) -> bool:
        fake = fake_of(variable)
        base, memo = fake if fake._base is None else fake._base, tracers.fake_memo(fake)
        return any(table is not None and memo(table) is base for table in (each() for each in tables))

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.add and all(isinstance(each, tracers.TensorVariable) for each in args) and is_meant():
            for half, other in (args, args[::-1]):
                is_mixed = half.dtype in HALVES and other.dtype is torch.float32
                if is_mixed and is_looked_up(fake_of(half)) and is_table(other):
                    cast = other.call_method(tx, "to", [tracers.ConstantVariable.create(half.dtype)], {})
                    args = [cast if each is other else each for each in args]
                    break
        return call(self, tx, args, kwargs)

    ledger.set(tracers.BuiltinVariable, "call_function", call_function)


def trace_calls(
    ledger: PatchLedger,
    function: Callable[..., Any],
    first_arguments: Callable[[], tuple[Any, ...] | None],
    is_meant: Callable[[nn.Module], bool],
) -> None:
    """Makes torch.compile trace ``function(*first, module, ...)`` in place of a call ``module(...)`` of some modules.

    Args:
        ledger: records the change.
        function: what is traced.
        first_arguments: returns its first arguments, which are constants; None where calls are traced as they are.
        is_meant: returns True for those modules. It is guarded, because code for one module serves others of its class.
    """
    from ampatch.torch_private import tracers

    call: Any = tracers.UnspecializedNNModuleVariable.call_function
    read: Any = getattr(tracers.UnspecializedNNModuleVariable, tracers.GETATTR)

    def guard_what_is_meant(builder: Any, guard: Any) -> None:
        expected = is_meant(builder.get(guard))
        parts = tracers.get_verbose_code_parts(f"is_meant({guard.name}) is {expected}", guard)
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda module: is_meant(module) is expected, parts, guard.user_stack
        )

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        first = first_arguments()
        if first is not None and self.source is not None:
            tracers.install_guard(self.source.make_guard(guard_what_is_meant))
        if first is None or not is_meant(self.value):
            return call(self, tx, args, kwargs)
        constants = [tracers.VariableTracker.build(tx, each) for each in first]
        return tracers.VariableTracker.build(tx, function).call_function(tx, [*constants, self, *args], kwargs)

    def read_attribute(self: Any, tx: Any, name: str) -> Any:
        # Its value depends on the region, too, and guards run before traced code begins one.
        return tracers.ConstantVariable.create(None) if name == COMPILED_CALL else read(self, tx, name)

    ledger.set(tracers.UnspecializedNNModuleVariable, "call_function", call_function)
    ledger.set(tracers.UnspecializedNNModuleVariable, tracers.GETATTR, read_attribute)


def build_torch_tables() -> None:
    """Makes torch build the tables of its own functions now, while nothing is patched.

    torch builds each table once, at first use. Tables built later would list wrappers as torch's functions until the
    process ends: torch.compile would neither trace the wrappers nor know the originals.

    Raises:
        UsageError: another library has replaced one of torch's functions by an object that is no function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's own functions are deprecated
        try:
            from ampatch.torch_private import tracers

            tracers.build_tables()
        except AttributeError as error:
            raise UsageError(
                "torch cannot list its own functions, since another tool has put an object that is no function in the "
                f"place of one ({error}). Put a function there, made with functools.wraps; `ampatch doctor MODULE`, "
                "with the module that does it, names what is not torch's own."
            ) from error


def prepare_for_patches(
    ledger: PatchLedger,
    original_of: Callable[[object], object],
    as_without_amp: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Prepares the compilers for the patches; must be called before the first patch, so that it is undone last.

    Args:
        ledger: records the changes.
        original_of: function that returns the original of a wrapper, and any other object unchanged.
        as_without_amp: returns a block in which a model has neither amp's hooks nor its forwards.
    """
    from ampatch.torch_private import tracers

    # The key of the persistent cache of traced graphs contains only the names of functions, so patched and unpatched
    # programs would get each other's results. The cache of compiled kernels stays enabled: its key is the final graph.
    for place in tracers.GRAPH_CACHES:
        ledger.set(*place, lambda: False)
    _unwrap_for_torchscript(ledger, original_of, as_without_amp)
    ledger.on_undo(forget_compiled)


def forget_compiled() -> None:
    """Makes torch.compile trace everything again.

    It guards functions by identity. But methods of tensors, operators and functions of torch that call others enter its
    graphs by name, without a guard.
    """
    from ampatch.torch_private import tracers

    tracers.reset_code_caches()


def _unwrap_for_torchscript(
    ledger: PatchLedger,
    original_of: Callable[[object], object],
    as_without_amp: Callable[[nn.Module], AbstractContextManager[object]],
) -> None:
    """Makes TorchScript compile the originals, and models without amp's hooks and forwards.

    TorchScript can compile neither wrappers nor hooks, so the code that it has compiled never casts.
    """
    find_builtin: Callable[[object], object] = getattr(*private.FIND_BUILTIN)
    find_dispatched: Callable[[object], object] = getattr(*private.TRY_GET_DISPATCHED_FN)
    compile_module: Callable[..., object] = getattr(*private.CREATE_SCRIPT_MODULE)

    def _find_builtin(function: object) -> object:
        return find_builtin(original_of(function))

    def _try_get_dispatched_fn(function: object) -> object:
        original = original_of(function)
        if original is function or not isinstance(original, types.FunctionType):
            return find_dispatched(original)
        # A choice by an argument that no call has, between the original and itself: TorchScript compiles no objects.
        return {"index": sys.maxsize, "arg_name": "", "default": True, "if_true": original, "if_false": original}

    def create_script_module(module: nn.Module, *args: Any, **kwargs: Any) -> object:
        with as_without_amp(module):
            return compile_module(module, *args, **kwargs)

    ledger.set(*private.FIND_BUILTIN, _find_builtin)
    ledger.set(*private.TRY_GET_DISPATCHED_FN, _try_get_dispatched_fn)
    ledger.set(*private.CREATE_SCRIPT_MODULE, create_script_module)

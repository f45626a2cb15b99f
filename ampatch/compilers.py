"""What torch's compilers and tracers must know of patched functions: that they are, and which the originals were.

Each of them keeps tables of torch's functions, or results of tracing them, and none looks whether a function is still
the one that it knew. Owns what has to be said to them while a session is installed; says it through the ledger. Knows
nothing of rules or types.
"""

from __future__ import annotations

import functools
import pkgutil
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.jit._builtins
import torch.jit._recursive
import wrapt
from torch import nn

from ampatch.errors import UsageError
from ampatch.ledger import PatchLedger

_F = TypeVar("_F", bound=Callable[..., Any])

# Of this package, what models call while they run. The rest keeps books around them, which is no work for a compiler.
_TRACED = {
    "": [
        "amp",
        "apex",
        "compilers",
        "cuda_on_cpu",
        "errors",
        "runtime",
        "session",
        "switch",
        "sync_batch_norm",
        "tracing",
    ],
    "casting": ["write_back", "nested"],
    "cast_lists": ["paths", "signatures"],
    "interfaces": ["inference_copy"],
    "patching": [
        "adapters",
        "adopted_model",
        "autocast_gates",
        "cast_labels",
        "casting_mode",
        "weight_cache",
        "wrappers",
    ],
}


def _keep_books_untraced(dynamo: types.ModuleType) -> None:
    root = Path(__file__).parent
    for folder, traced in _TRACED.items():
        for module in pkgutil.iter_modules([str(root / folder)]):
            if module.name not in traced and (folder or module.name not in _TRACED):
                dynamo.trace_rules.add(".".join(filter(None, ("ampatch", folder, module.name))))


wrapt.register_post_import_hook(_keep_books_untraced, "torch._dynamo")


def called_in_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function that torch.compile is not to trace, but to call where its graph runs."""
    wrapt.register_post_import_hook(lambda dynamo: dynamo.allow_in_graph(function), "torch._dynamo")
    return function


def traced_within_others(function: _F) -> _F:
    """Decorates a function that torch.compile is to trace where it is called by what is compiled, and only there.

    Where it lets code run as it is, as it does around some graph breaks and the hooks of modules, it goes on to compile
    every function that is called there, but for those of torch.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


def give_own_code(wrapper: Any, original: object) -> None:
    """Has torch.compile keep what it compiles of a wrapper apart from the others', and leave builtins to their callers.

    It keeps what it has compiled by code, in a small number, and wrappers that were made in one place share theirs.
    """
    wrapper.__code__ = wrapper.__code__.replace(co_name=wrapper.__name__)
    if not isinstance(original, types.FunctionType):
        traced_within_others(wrapper)


def trace_instead(function: Any) -> None:
    """Has torch.compile trace ``function.__ampatch_python__`` where a function is called, for as long as it lives.

    Args:
        function: of a class derived from functions, whose code and closure guards do not take for a function's. In all
            but calls it stays what it is: as a member of a set, a key of a dict, a result.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder

    def build(builder: Any, found: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        python = AttrSource(builder.source, "__ampatch_python__")
        traced = VariableBuilder(builder.tx, python)(found.__ampatch_python__)
        return _called_as()(found, traced, source=builder.source)

    dispatch: dict[int, Any] = VariableBuilder._id_dispatch()
    dispatch[id(function)] = build
    weakref.finalize(function, dispatch.pop, id(function), None).atexit = False


@functools.cache
def _called_as() -> type:
    """Returns the class of what torch.compile takes such functions for."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    class CalledAsAnother(UserFunctionVariable):
        def __init__(self, fn: Any, traced: Any = None, **kwargs: Any) -> None:
            super().__init__(fn, **kwargs)
            self.traced = traced

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.traced.call_function(tx, args, kwargs)

        def get_real_python_backed_value(self) -> object:
            return self.fn

        def python_type(self) -> type:
            return types.FunctionType

    return CalledAsAnother


def read_tables() -> None:
    """Has torch build its tables of its own functions, which it does once and lazily, while nothing is patched.

    Built later they would take wrappers for torch's functions, for as long as the process lives: torch.compile would
    neither trace the wrappers nor know the originals.

    Raises:
        UsageError: torch cannot read what somebody else has put in the place of one of its functions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's own functions are deprecated
        try:
            import torch._dynamo.variables.torch  # heavy, but every optimizer imports most of it
            import torch.ao.quantization.fx  # torch.compile imports it, and its tables, when it first compiles

            torch._dynamo.variables.torch.get_overridable_functions()
            torch._dynamo.trace_rules.get_tensor_method()
            torch._dynamo.trace_rules.get_torch_obj_rule_map()  # torch.distributed clears this one when it is set up
        except AttributeError as error:
            raise UsageError(
                "torch cannot list its own functions, since another tool has put something that is no function in the "
                f"place of one ({error}). Put a function there, made with functools.wraps; `ampatch doctor MODULE`, "
                "with the module that does it, names what is not torch's own."
            ) from error


def instruct(ledger: PatchLedger, original_of: Callable[[object], object], hooks: Collection[object]) -> None:
    """Tells the compilers of the patches; to be called before the first of them, so that it is taken back last.

    Args:
        ledger: takes note of what is installed.
        original_of: gives the original of a wrapper, and anything else as it is.
        hooks: those that adopted models get.
    """
    _keep_off_disk(ledger)
    _unwrap_for_torchscript(ledger, original_of, hooks)
    ledger.on_undo(forget_compiled)


def forget_compiled() -> None:
    """Has torch.compile trace everything anew.

    It guards functions by identity, but puts methods of tensors, operators and functions of torch that call others into
    its graphs by name, without a guard.
    """
    torch._dynamo.reset_code_caches()


def _keep_off_disk(ledger: PatchLedger) -> None:
    """Keeps the cache of traced graphs, which outlives the process, from giving or taking any while patched.

    Its key is the graph by name, so that a patched program and another one would be given each other's results. The
    cache of compiled kernels, whose key is what the graph came to, goes on working.
    """
    import torch._functorch.aot_autograd as aot_autograd

    for name in ("should_use_local_autograd_cache", "should_use_remote_autograd_cache"):
        ledger.set(aot_autograd, name, _never)


def _never() -> bool:
    return False


def _unwrap_for_torchscript(
    ledger: PatchLedger, original_of: Callable[[object], object], hooks: Collection[object]
) -> None:
    """Has TorchScript compile the originals, and models without amp's hooks.

    It can compile neither wrappers nor hooks, and so what it has compiled is never cast.
    """
    find_builtin: Callable[[object], object] = torch.jit._builtins._find_builtin
    compile_function: Callable[[object, object], object] = torch.jit._recursive.try_compile_fn
    compile_module: Callable[..., object] = torch.jit._recursive.create_script_module

    def _find_builtin(function: object) -> object:
        return find_builtin(original_of(function))

    def try_compile_fn(function: object, location: object) -> object:
        return compile_function(original_of(function), location)

    def create_script_module(module: nn.Module, *args: Any, **kwargs: Any) -> object:
        with _without(hooks, module):
            return compile_module(module, *args, **kwargs)

    ledger.set(torch.jit._builtins, "_find_builtin", _find_builtin)
    ledger.set(torch.jit._recursive, "try_compile_fn", try_compile_fn)
    ledger.set(torch.jit._recursive, "create_script_module", create_script_module)


@contextmanager
def _without(hooks: Collection[object], model: nn.Module) -> Iterator[None]:
    """Takes hooks off the modules of a model until the block ends; puts them back in the old order."""
    saved = [(found, dict(found)) for m in model.modules() for found in (m._forward_pre_hooks, m._forward_hooks)]
    for found, before in saved:
        for key, hook in before.items():
            if hook in hooks:
                del found[key]
    try:
        yield
    finally:
        for found, before in saved:
            found.clear()
            found.update(before)

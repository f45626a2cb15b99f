"""Finds the line of the user's code that called torch.

Owns which code is the user's: all that is neither torch's, nor ampatch's, nor the standard library's. Must never read a
source file, nor look at the variables of a frame.
"""

from __future__ import annotations

import enum
import sys
import sysconfig
import traceback
import types
from pathlib import Path

from torch import nn

from ampatch.torch_private.autograd import engine_run_backward
from ampatch.torch_private.compilers import EVAL_FRAME
from ampatch.torch_private.modules import COMPILED_CALL

#: Modules that call the user's model: lines above them called ampatch, and no operator.
_CALLERS = frozenset({"ampatch.diagnostics.overflow.forwards", "ampatch.diagnostics.trial_steps.subject"})
_NOT_USER_CODE = frozenset({"ampatch", "torch", *sys.stdlib_module_names})
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
#: Parts of ampatch that are examples of user code.
_EXAMPLES = "ampatch.demo."
#: Parts of ampatch that compute for themselves, and what of theirs calls functions for the user.
_OWN_ARITHMETIC = (
    *("ampatch.public.", "ampatch.session.", "ampatch.scaling.", "ampatch.weights.", "ampatch.native."),
    *("ampatch.distributed.", "ampatch.casting.", "ampatch.patching.", "ampatch.interfaces."),
    *("ampatch.apex.amp.", "ampatch.apex.fp16_utils."),
)
_CALLING_FOR_USERS = ("ampatch.patching.wrappers.", "ampatch.patching.casting_mode.")


class Code(enum.Enum):
    """The owner of some code."""

    USER = "user"
    LIBRARY = "library"  # torch, the standard library, and the parts of ampatch that call functions for the user
    AMP = "amp"  # parts of ampatch that compute for themselves
    #: Code that ends the search: the autograd engine's, whose callers did not write the backward pass.
    END = "end"


#: The code that calls the autograd engine.
_ENGINE = engine_run_backward.__code__
# By id, as the hash of a code object walks through its instructions. The code is kept, so that its id stays its own.
_owners: dict[int, tuple[types.CodeType, Code]] = {id(_ENGINE): (_ENGINE, Code.END)}


def owner_of(frame: types.FrameType) -> Code:
    """Returns whose code a frame runs."""
    code = frame.f_code
    known = _owners.get(id(code))
    if known is None:
        known = _owners[id(code)] = code, _owner_of_module(str(frame.f_globals.get("__name__", "")), code.co_filename)
    return known[1]


def users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Returns the innermost frame of user code, from a frame outwards; None in a backward pass without any."""
    while frame is not None and (owner := owner_of(frame)) is not Code.END:
        if owner is Code.USER:
            return frame
        frame = frame.f_back
    return None


def is_compiled(frame: types.FrameType) -> bool:
    """Returns True if code that torch.compile was given is calling: it may run compiled, or not."""
    # Optimizers' steps run in a wrapper of the same module, which keeps them from being compiled.
    return any(
        each.f_code.co_name == "compile_wrapper" and each.f_globals.get("__name__") == EVAL_FRAME
        for each, _ in traceback.walk_stack(frame)
    )


def is_around_compiled(module: nn.Module) -> bool:
    """Returns True if a module is what `torch.compile` returns for the user's module."""
    return type(module).__module__ == EVAL_FRAME


def is_compiled_module(module: nn.Module) -> bool:
    """Returns True if torch.compile was given a module, or its method ``compile`` was called."""
    return is_around_compiled(module) or getattr(module, COMPILED_CALL) is not None


def _owner_of_module(name: str, file: str) -> Code:
    if name in _CALLERS:
        return Code.END
    package, dotted = name.partition(".")[0], f"{name}."
    if dotted.startswith(_EXAMPLES) or package not in _NOT_USER_CODE:
        return Code.USER
    # A script beside the user's may have the name of a module in the standard library.
    if package in sys.stdlib_module_names and Path(file).is_absolute() and not file.startswith(_STANDARD_LIBRARY):
        return Code.USER
    is_own = dotted.startswith(_OWN_ARITHMETIC) and not dotted.startswith(_CALLING_FOR_USERS)
    return Code.AMP if is_own else Code.LIBRARY

"""Tables and functions of torch.compile and TorchScript that exist without loading torch.compile. Must only name them.

`tracers` has those that exist only once torch.compile is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch._jit_internal as jit_internal
import torch.jit._builtins as jit_builtins
import torch.jit._recursive as jit_recursive

#: Modules of torch.compile that other code looks for: it as a whole, and the one that runs what it has compiled.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
#: Seen in: torch 2.10 to 2.13
#: Until: never; their names follow torch's tree of files.
DYNAMO = "torch._dynamo"
EVAL_FRAME = "torch._dynamo.eval_frame"

#: Attribute of a function that torch.compile calls while it traces the caller, to trace with its result.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.compiler.assume_constant_result`` does not import torch.compile.
MARKED_CONSTANT = "_dynamo_marked_constant"

#: Module that claims code of torch's decorators and of its choices by an argument.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_jit_internal.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops TorchScript.
JIT_INTERNAL = "torch._jit_internal"

#: Where TorchScript has its functions that say which builtin a function is, that choose one of two functions by an
#: argument, and that compile a module.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/jit/_recursive.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch drops TorchScript.
FIND_BUILTIN: tuple[Any, str] = (jit_builtins, "_find_builtin")
TRY_GET_DISPATCHED_FN: tuple[Any, str] = (jit_internal, "_try_get_dispatched_fn")
CREATE_SCRIPT_MODULE: tuple[Any, str] = (jit_recursive, "create_script_module")


def trace_only_within_others(code: Any) -> None:
    """Makes torch.compile trace a code object only as a part of compiled callers, never on its own.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_C/_dynamo/eval_frame.pyi
    Seen in: torch 2.10 to 2.13
    Until: a public decorator in ``torch.compiler`` does this without importing torch.compile.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(code, skip)


def has_compiled() -> bool:
    """Returns True if torch.compile has made a graph in this process.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/utils.py
    Seen in: torch 2.10 to 2.13
    Until: ``torch.compiler`` has public counters.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0

"""Insides of torch.compile. An import of this module loads torch.compile, which takes a second.

Import it inside of functions. Must only name the insides, and fill torch's own tables.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo
import torch._dynamo.variables.torch as torch_variables
import torch.ao.quantization.fx  # torch.compile imports it, and its tables, when it first compiles
from torch._dynamo import comptime as comptimes
from torch._dynamo import guards, variables
from torch._dynamo.variables import base, nn_module
from torch._functorch import aot_autograd

#: Breaks the graph while torch.compile traces the caller; else it does nothing.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.compiler`` has one.
graph_break = torch._dynamo.graph_break

#: Runs a function while torch.compile traces the caller, with the state of the trace.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/comptime.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.compiler`` has one.
comptime = comptimes.comptime

#: The class of modules that `torch.compile` returns.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch has a public check for compiled modules.
OptimizedModule = torch._dynamo.OptimizedModule

#: Makes torch.compile trace all functions again; what else it has cached stays.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/__init__.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.compiler`` has a function for this alone; its ``reset`` also drops the settings of backends.
reset_code_caches = torch._dynamo.reset_code_caches

#: What torch.compile has in place of values while it traces: of builtin functions, constants, tensors and modules, and
#: their base class.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/base.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch.compile asks public hooks how to trace calls of builtin functions and of modules.
BuiltinVariable: Any = variables.BuiltinVariable
ConstantVariable: Any = variables.ConstantVariable
TensorVariable: Any = variables.TensorVariable
UnspecializedNNModuleVariable: Any = nn_module.UnspecializedNNModuleVariable
VariableTracker: Any = base.VariableTracker

#: Name of the method of these by which traced code reads an attribute.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/base.py
#: Seen in: torch 2.10 to 2.13
#: Until: torch.compile asks public hooks how to trace calls of modules.
GETATTR = "var_getattr" if hasattr(base.VariableTracker, "var_getattr") else "tp_getattro_impl"  # from torch 2.14 on

#: Adds a guard to the code that is traced, and the text of a guard.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/guards.py
#: Seen in: torch 2.10 to 2.13
#: Until: ``torch.compiler`` has guards of users' own.
install_guard = guards.install_guard
get_verbose_code_parts = guards.get_verbose_code_parts

#: Where the functions stand that say whether traced graphs are kept beyond the process, on this machine and on others.
#: Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/aot_autograd.py
#: Seen in: torch 2.10 to 2.13
#: Until: the keys of that cache tell patched functions from others.
GRAPH_CACHES = (
    (aot_autograd, "should_use_local_autograd_cache"),
    (aot_autograd, "should_use_remote_autograd_cache"),
)


def fake_memo(fake: Any) -> Any:
    """Returns the function from a tensor to its fake one, or None, among those that a fake tensor's mode has made.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_subclasses/fake_tensor.py
    Seen in: torch 2.10 to 2.13
    Until: torch.compile says publicly which input of a trace a tensor is.
    """
    return fake.fake_mode.fake_tensor_converter._get_memo


def build_tables() -> None:
    """Makes torch build the tables of its own functions now; it builds each once, at first use.

    Upstream: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/trace_rules.py
    Seen in: torch 2.10 to 2.13
    Until: torch.compile checks whether a function was replaced since.
    """
    torch_variables.get_overridable_functions()
    torch._dynamo.trace_rules.get_tensor_method()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # torch.distributed clears this one when it is set up

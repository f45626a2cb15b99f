"""Supports CUDA graphs: work before a capture, and adopted models in ``torch.cuda.make_graphed_callables``.

Owns the patches of ``capture_begin`` of torch's graphs, and of ``make_graphed_callables``. Must capture nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.cuda import graphs

from ampatch.errors import OptionError
from ampatch.ledger import MISSING, PatchLedger, bindings
from ampatch.patching import adopted_model


def announce(ledger: PatchLedger, before_capture: Callable[[], object]) -> None:
    """Calls a function before each capture of a CUDA graph begins, by either of torch's classes for graphs.

    Args:
        ledger: records the patch.
        before_capture: function to call; the stream does not capture yet.
    """
    # torch.accelerator.Graph is of later versions of torch.
    for kind in (graphs.CUDAGraph, getattr(torch.accelerator, "Graph", None)):
        if hasattr(kind, "capture_begin"):  # not under `ampatch run --cpu`, where the first only raises
            ledger.before(kind, "capture_begin", lambda *_, **__: before_capture())


def accept_adopted_models(ledger: PatchLedger, before_capture: Callable[[], bool | None]) -> None:
    """Lets ``torch.cuda.make_graphed_callables`` take models that have amp's hooks, which torch alone refuses.

    The graph holds the forward without the hooks. They run around it in each call, as around any other forward.

    Args:
        ledger: records the patches and the graphed forwards, whose graphs hold casts and addresses of half weights.
        before_capture: function to call before torch runs the callables to warm up, which is before the capture
            begins. It must drop kept casts: torch keeps the results of the warm-up until the capture, and a capture
            must not wait for the stream of an older cast. Returns None if the session has ended.
    """
    original = graphs.make_graphed_callables

    @functools.wraps(original)
    def make_graphed_callables(callables: Any, sample_args: Any, *args: Any, **kwargs: Any) -> Any:
        if before_capture() is None:
            return original(callables, sample_args, *args, **kwargs)
        is_one = not isinstance(callables, tuple)
        modules = [each for each in ([callables] if is_one else callables) if isinstance(each, nn.Module)]
        before = [vars(module).get("forward", MISSING) for module in modules]
        with adopted_model.without_own_hooks(modules):
            made = original(callables, sample_args, *args, **kwargs)
        for module, forward in zip(modules, before, strict=True):
            graphed = vars(module)["forward"]
            if forward is MISSING:
                del module.forward
            else:
                module.forward = forward
            ledger.set(module, "forward", graphed)
        return made

    for owner, name, _ in bindings((torch.cuda, graphs), {id(original): original}):
        ledger.set(owner, name, make_graphed_callables)


def check_not_graphed(model: nn.Module) -> None:
    """Raises if the forward of a model, or of a part of it, is a CUDA graph, to which amp could not add casts.

    Raises:
        OptionError: ``torch.cuda.make_graphed_callables`` has replaced it.
    """
    for name, module in model.named_modules():
        if getattr(vars(module).get("forward"), "__module__", None) == graphs.__name__:
            raise OptionError(
                f"torch.cuda.make_graphed_callables has made {f'its {name!r}' if name else 'the model'} a CUDA graph, "
                "which computes in the types in which it was captured. Call amp.initialize first, and "
                "torch.cuda.make_graphed_callables on what it returns."
            )

"""Calls as a type checker sees them; `tests/project/test_typing.py` runs mypy on this file, and nothing runs it itself.

Under mypy's strict settings a `type: ignore` without an error behind it is an error: each here says what is refused.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ampatch import amp
from ampatch.apex import amp as apex_amp


class Net(nn.Module):
    """A model with something of its own, which a type checker must still find after `initialize`."""

    def loss(self, batch: Tensor) -> Tensor:
        return batch.sum()


def note(overflow: amp.Overflow) -> None:
    """What a user may give as ``on_overflow``."""
    assert_type(overflow.gradients[0].infs, int)


def known(net: Net, head: nn.Linear, sgd: SGD, adam: AdamW) -> None:
    assert_type(amp.initialize(net), Net)
    assert_type(amp.initialize(net, None), Net)
    assert_type(amp.initialize(net, optimizers=None, opt_level="O2", half_dtype="bfloat16"), Net)
    assert_type(amp.initialize(net, sgd), tuple[Net, SGD])
    assert_type(amp.initialize(models=net, optimizers=sgd), tuple[Net, SGD])
    assert_type(amp.initialize(net, sgd, True, "O2", None, None, None, None, "dynamic"), tuple[Net, SGD])
    assert_type(
        amp.initialize(net, sgd, True, "O2", None, None, "True", True, 2.0, "float32", 1, 0, None, 2.0**24),
        tuple[Net, SGD],
    )
    assert_type(amp.initialize([net], [sgd]), tuple[list[Net], list[SGD]])
    assert_type(amp.initialize([net]), list[Net])
    assert_type(amp.initialize((net, head), [sgd]), tuple[tuple[Net, nn.Linear], list[SGD]])
    assert_type(amp.initialize([net, head], [sgd, adam]), tuple[list[nn.Module], list[torch.optim.Optimizer]])
    assert_type(amp.initialize(net, sgd, on_overflow="raise", check_finite=True), tuple[Net, SGD])
    assert_type(amp.initialize(net, sgd, on_overflow=note), tuple[Net, SGD])
    assert_type(amp.stats(), dict[str, int | float])
    assert_type(amp.report(), amp.Report)
    assert_type(apex_amp.initialize(net, sgd), tuple[Net, SGD])
    model, optimizer = amp.initialize(net, sgd)
    with amp.scale_loss(model.loss(torch.ones(1)), optimizer) as scaled_loss:
        assert_type(scaled_loss, Tensor)


def perhaps(net: Net, optimizer: SGD | None) -> None:
    """A script that only evaluates has no optimizer."""
    assert_type(amp.initialize(net, optimizer), tuple[Net, SGD] | Net)


def unknown(anything: Any) -> None:
    model, optimizer = amp.initialize(anything, anything)
    assert_type(model, Any)
    assert_type(optimizer, Any)


def refused(net: Net, sgd: SGD) -> None:
    amp.initialize("net", sgd)  # type: ignore[type-var]
    amp.initialize(net, opt_levle="O1")  # type: ignore[call-overload]
    amp.initialize(net, sgd, half_dtype=16)  # type: ignore[call-overload]
    amp.initialize(net, sgd, True, 1)  # type: ignore[call-overload]
    amp.init(dtype="float16")  # type: ignore[call-arg]

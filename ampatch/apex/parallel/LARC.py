"""Adds layer-wise adaptive learning rates to any optimizer, like ``apex.parallel.LARC``.

Owns how gradients are adapted before the inner optimizer's step. Must not own anything else: parameters, state and
options belong to the inner optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch import amp
from ampatch.grouping import grouped
from ampatch.half_types import HALVES
from ampatch.torch_private import foreach
from ampatch.weights.optimizer_state import of_the_wrapped


class LARC:
    """Gives each parameter w with gradient g its own learning rate, before an optimizer's step.

    You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks" (2017): with a group's learning rate lr and
    weight decay d, ::

        local = trust_coefficient * |w| / (|g| + d * |w| + eps)
        g = (g + d * w) * min(local / lr, 1)     with clip: the step uses the smaller of both rates
        g = (g + d * w) * local                  without clip: the rates are multiplied

    The inner optimizer applies no weight decay during the step. If the norm of w or g is 0, g stays unchanged, and w is
    not decayed. Norms are computed in at least float32. After a step the gradients keep their adapted values: clear
    them before the next backward pass, as usual.

    ::

        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.6), trust_coefficient=0.001, clip=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    It also works around an optimizer that was passed to ``amp.initialize``. In this case, pass the inner optimizer to
    ``amp.scale_loss``. LR schedulers need the inner optimizer too, since LARC is not a ``torch.optim.Optimizer``.

    Args:
        optimizer: inner optimizer; any object with ``param_groups``, ``step`` and ``zero_grad``.
        trust_coefficient: how far a step may move a parameter, as a fraction of the parameter's norm.
        clip: True to use the local rate only as an upper bound of the optimizer's own rate.
        eps: term that keeps the divisor from being 0.

    Attributes:
        optim: the inner optimizer.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __repr__(self) -> str:
        return repr(self.optim)

    state = of_the_wrapped("state", "State of the inner optimizer.", held_as="optim")
    param_groups = of_the_wrapped("param_groups", "Parameter groups of the inner optimizer.", held_as="optim")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the inner optimizer."""
        state_dict: dict[str, Any] = self.optim.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the inner optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients by the inner optimizer's ``zero_grad``."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapts the gradients, then calls the inner optimizer's ``step``.

        Args:
            closure: function that evaluates the model again and returns the loss; its gradients are adapted each time.

        Returns:
            Result of the inner ``step``.
        """

        def adapting() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self._adapt(decays)
            return loss

        with self._without_weight_decay() as decays:
            if closure is not None:
                return self.optim.step(adapting)
            self._adapt(decays)
            return self.optim.step()

    @contextlib.contextmanager
    def _without_weight_decay(self) -> Iterator[list[float]]:
        """Yields the groups' weight decays and sets them to 0; restores them at the end, also after an exception."""
        groups = list(self.param_groups)
        decays = [group.get("weight_decay", 0.0) for group in groups]
        decaying = [(group, decay) for group, decay in zip(groups, decays, strict=True) if "weight_decay" in group]
        try:
            for group, _ in decaying:
                group["weight_decay"] = 0.0
            yield decays
        finally:
            for group, decay in decaying:
                group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt(self, decays: Sequence[float]) -> None:
        updated = iter(list(amp.master_params(self.optim)))  # masters, if amp has made some
        for group, decay in zip(self.param_groups, decays, strict=True):
            of_group = itertools.islice(updated, len(group["params"]))
            trained = [parameter for parameter in of_group if parameter.grad is not None]
            for parameters in grouped(((each.device, each.dtype), each) for each in trained).values():
                self._adapt_gradients(parameters, group["lr"], decay)

    def _adapt_gradients(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """Adapts the gradients of parameters of one device and dtype, without syncing with the device."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms, grad_norms = _norms(parameters), _norms(grads)
        rates = self.trust_coefficient * norms / (grad_norms + decay * norms + self.eps)
        if self.clip:
            rates = (rates / lr).clamp(max=1)
        adapts = (norms != 0) & (grad_norms != 0)
        decays = adapts.to(norms.dtype) * decay
        foreach.add_(grads, foreach.mul(parameters, decays.unbind()))
        foreach.mul_(grads, torch.where(adapts, rates, 1).unbind())


def _norms(tensors: list[Tensor]) -> Tensor:
    """Returns the 2-norms of tensors of one dtype, stacked, in at least float32."""
    dtype = torch.float32 if tensors[0].dtype in HALVES else tensors[0].dtype
    return torch.stack(list(foreach.norm(tensors, 2, dtype=dtype)))

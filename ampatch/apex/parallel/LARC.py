"""Layer-wise adaptive rates around any optimizer, as ``apex.parallel.LARC``.

Owns how gradients are adapted before the inner optimizer's step, and nothing else: parameters, state and options are
the inner one's.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampatch import amp
from ampatch.opt_levels import HALVES


class LARC:
    """Gives each parameter w with gradient g a rate of its own, in front of an optimizer's step.

    You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks" (2017): with a group's learning rate lr and
    weight decay d, ::

        local = trust_coefficient * |w| / (|g| + d * |w| + eps)
        g = (g + d * w) * min(local / lr, 1)     with clip, so that the step is that of the lesser of both rates
        g = (g + d * w) * local                  without: the rates are multiplied

    The inner optimizer decays no weights meanwhile. Where the norm of w or g is 0, g stays as it is, and
    w is not decayed. Norms are taken in float32 at least. After a step the gradients are left as the inner optimizer
    got them: clear them before the next backward, as ever.

    ::

        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.6), trust_coefficient=0.001, clip=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    It may as well be put around an optimizer that ``amp.initialize`` has had, which is then the one to be handed to
    ``amp.scale_loss``. LR schedulers take the inner one: it is no ``torch.optim.Optimizer``.

    Args:
        optimizer: the inner one; anything with ``param_groups``, ``step`` and ``zero_grad``.
        trust_coefficient: how far a step may move a parameter, as a share of its norm.
        clip: whether the local rate only bounds the optimizer's own.
        eps: keeps the division sound.

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

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The inner optimizer's."""
        state: MutableMapping[Any, Any] = self.optim.state
        return state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's."""
        state_dict: dict[str, Any] = self.optim.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the inner optimizer take over a state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Has the inner optimizer clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapts the gradients and has the inner optimizer step.

        Args:
            closure: evaluates the model anew; what it leaves is adapted each time.

        Returns:
            What the inner step returns.
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
        """Takes it away from the groups, and gives it back whatever happens."""
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
        # Where amp has masters, what became of the model's gradients is theirs only once somebody asks for them.
        amp.master_params(self.optim)
        for group, decay in zip(self.param_groups, decays, strict=True):
            by_kind: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_kind[parameter.device, parameter.dtype].append(parameter)
            for parameters in by_kind.values():
                self._adapt_gradients(parameters, group["lr"], decay)

    def _adapt_gradients(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """For parameters of one device and dtype; nothing is read back from the device."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms, grad_norms = _norms(parameters), _norms(grads)
        rates = self.trust_coefficient * norms / (grad_norms + decay * norms + self.eps)
        if self.clip:
            rates = (rates / lr).clamp(max=1)
        adapts = (norms != 0) & (grad_norms != 0)
        decays = adapts.to(norms.dtype) * decay
        torch._foreach_add_(grads, torch._foreach_mul(parameters, decays.unbind()))
        torch._foreach_mul_(grads, torch.where(adapts, rates, 1).unbind())


def _norms(tensors: list[Tensor]) -> Tensor:
    """Returns the 2-norm of each."""
    dtype = torch.float32 if tensors[0].dtype in HALVES else tensors[0].dtype
    return torch.stack(list(torch._foreach_norm(tensors, 2, dtype=dtype)))

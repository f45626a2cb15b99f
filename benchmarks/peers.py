"""The contenders of the benchmarks: training in half precision with each library, as its user would write it.

A peer trains one model in its own process, and may patch torch until it is closed. This module must not measure time:
it calls a callback at the end of each phase of a step, and the benchmark measures.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Initial value of dynamic scales; they keep it in a short run. It is too low for an overflow in these models.
LOSS_SCALE = 2.0**10

Done = Callable[[str], object]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Batch(NamedTuple):
    input: Tensor
    target: Tensor


def nobody(_: str) -> None:
    """Ignores the end of a phase."""


class Peer:
    """Trains in float32. The other peers derive from this class, and override what they do differently.

    Args:
        model: float32 model.
        make_optimizer: function that makes an optimizer from parameters.
        half: float16 or bfloat16; this class computes in float32 nevertheless.

    Attributes:
        max_norm: total norm to clip gradients to in a step; None: steps clip nothing.
    """

    max_norm: float | None = None

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype) -> None:
        self.model, self.half = model, half
        self.device = next(model.parameters()).device
        self.scales = half is torch.float16
        self.optimizer = make_optimizer(model.parameters())

    def casts(self) -> contextlib.AbstractContextManager[object]:
        """Returns a block in which torch's functions cast as they do with this peer."""
        return contextlib.nullcontext()

    def outputs(self, input: Tensor) -> Tensor:
        return self.model(input)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.outputs(batch.input), batch.target)

    def forget_casts(self) -> None:
        """Clears cached casts, as the end of an iteration without a step."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Clips the gradients to `max_norm`, if it is set."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.clipped(), self.max_norm)

    def clipped(self) -> Iterable[Tensor]:
        """Returns the parameters whose gradients are clipped."""
        return self.model.parameters()

    def step(self, batch: Batch, done: Done = nobody) -> Tensor:
        """Runs a training step.

        Args:
            batch: inputs and targets.
            done: callback that gets the name of each phase at its end.

        Returns:
            The unscaled loss.
        """
        self.optimizer.zero_grad()
        done("zero_grad")
        loss = self.loss(batch)
        done("forward")
        loss.backward()
        done("backward")
        self.clip()
        self.optimizer.step()
        done("step")
        return loss

    def work_on_gradients(self, done: Done) -> None:
        """Runs a step's work on gradients without the optimizer: unscaling, and the update of the scale."""

    def close(self) -> None:
        """Restores torch."""


class Autocast(Peer):
    """``torch.autocast``, and ``torch.amp.GradScaler`` for float16."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype) -> None:
        super().__init__(model, make_optimizer, half)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=LOSS_SCALE, enabled=self.scales)

    def casts(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.half)

    def outputs(self, input: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.half):
            return self.model(input)

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.half):
            return F.cross_entropy(self.model(batch.input), batch.target)

    def forget_casts(self) -> None:
        torch.clear_autocast_cache()

    def clip(self) -> None:
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            super().clip()

    def step(self, batch: Batch, done: Done = nobody) -> Tensor:
        self.optimizer.zero_grad()
        done("zero_grad")
        loss = self.loss(batch)
        done("forward")
        scaled = self.scaler.scale(loss)
        done("scale")
        scaled.backward()
        done("backward")
        self.clip()
        self.scaler.step(self.optimizer)  # unscales first, unless `clip` has
        done("step")
        self.scaler.update()
        done("update")
        return loss

    def work_on_gradients(self, done: Done) -> None:
        self.scaler.unscale_(self.optimizer)
        done("unscale")
        self.scaler.update()
        done("update")


class WithAmp(Peer):
    """A training loop written for Apex's amp.

    Args:
        amp: Apex's module or ampatch's.
        model: float32 model.
        make_optimizer: function that makes an optimizer from parameters.
        half: half type.
        settings: further arguments of ``amp.initialize``.
    """

    def __init__(
        self, amp: Any, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype, **settings: object
    ) -> None:
        super().__init__(model, make_optimizer, half)
        self.amp = amp
        # The scale starts at the maximum. Apex has no argument for the initial scale, but has one for the maximum.
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, max_loss_scale=LOSS_SCALE, verbosity=0, **settings
        )

    def step(self, batch: Batch, done: Done = nobody) -> Tensor:
        self.optimizer.zero_grad()
        done("zero_grad")
        loss = self.loss(batch)
        done("forward")
        with self.scaled(loss) as scaled:
            done("scale")
            scaled.backward()
            done("backward")
        done("unscale")
        self.clip()
        self.optimizer.step()
        done("step")
        return loss

    def scaled(self, loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        """Returns the block that scales a loss, and unscales the gradients on exit."""
        return self.amp.scale_loss(loss, self.optimizer)

    def clipped(self) -> Iterable[Tensor]:
        return self.amp.master_params(self.optimizer)


class Apex(WithAmp):
    """Apex's amp, which casts to float16 only. It has no public function that removes its patches."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype, opt_level: str) -> None:
        from apex import amp

        super().__init__(amp, model, make_optimizer, half, opt_level=opt_level)


class Ampatch(WithAmp):
    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype, opt_level: str, **settings: Any
    ) -> None:
        # Imported here, so that other peers' processes do not import ampatch. The kernels have no public name.
        from ampatch import amp
        from ampatch.native import kernels

        super().__init__(amp, model, make_optimizer, half, opt_level=opt_level, half_dtype=half, **settings)
        self.kernels = kernels
        self.scaler = amp.LossScaler("dynamic" if self.scales else 1.0, max_loss_scale=LOSS_SCALE)
        # Both sequences have the order of the model's parameters.
        self.pairs = list(zip(self.model.parameters(), amp.master_params(self.optimizer), strict=True))
        self.scale, self.inv_scale, self.found_inf = (
            torch.tensor(LOSS_SCALE, device=self.device),
            torch.tensor(1 / LOSS_SCALE, device=self.device),
            torch.zeros((), device=self.device),
        )

    def forget_casts(self) -> None:
        self.amp.clear_cache()

    def scaled(self, loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        # `clip` reads the gradients once, for overflows and for the norm, if it finds them scaled.
        return self.amp.scale_loss(loss, self.optimizer, delay_unscale=self.max_norm is not None)

    def clip(self) -> None:
        if self.max_norm is not None:
            self.amp.clip_grad_norm_(self.optimizer, self.max_norm)

    def work_on_gradients(self, done: Done) -> None:
        halves = [(own.grad, master.grad) for own, master in self.pairs if own is not master]
        if halves:
            narrow, wide = map(list, zip(*halves, strict=True))
            self.kernels.unscale_copy(narrow, wide, self.inv_scale, self.found_inf, True)
        if self.scales:
            self.kernels.unscale_by_([own.grad for own, master in self.pairs if own is master], self.scale)
        done("unscale")
        self.scaler.update()
        done("update")

    def close(self) -> None:
        self.amp.deinitialize()


class ByHand(Peer):
    """A model converted by hand: half weights except in batch norm, and float32 masters that the optimizer updates.

    Copies and unscaling use torch's multi-tensor kernels, as `torch.amp.GradScaler` does. The masters' gradients are
    allocated once.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, half: torch.dtype) -> None:
        values = [parameter.detach().clone() for parameter in model.parameters()]
        model.to(half)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
        self.halves: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.kept: list[Tensor] = []  # float32 parameters, which need no master
        updated = []
        for parameter, value in zip(model.parameters(), values, strict=True):
            if parameter.dtype is half:
                master = nn.Parameter(value)
                master.grad = torch.zeros_like(master)
                self.halves.append(parameter)
                self.masters.append(master)
                updated.append(master)
            else:
                parameter.data.copy_(value)
                self.kept.append(parameter)
                updated.append(parameter)
        super().__init__(model, lambda _: make_optimizer(updated), half)
        self.scale = torch.tensor(LOSS_SCALE, device=self.device)
        self.inv_scale, self.found_inf = self.scale.reciprocal(), torch.zeros((), device=self.device)
        self.growth = torch.zeros((), dtype=torch.int32, device=self.device)
        self.skips_by_itself = self.scales and getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def outputs(self, input: Tensor) -> Tensor:
        return self.model(input.to(self.half)).float()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self, batch: Batch, done: Done = nobody) -> Tensor:
        self.model.zero_grad()  # `unscale` overwrites the masters' gradients
        done("zero_grad")
        loss = self.loss(batch)
        done("forward")
        scaled = loss * self.scale if self.scales else loss
        done("scale")
        scaled.backward()
        done("backward")
        self.unscale()
        done("unscale")
        self.clip()
        self.update_weights()
        done("step")
        if self.scales:
            self.update_scale()
        done("update")
        return loss

    def unscale(self) -> None:
        wide = [master.grad for master in self.masters]
        torch._foreach_copy_(wide, [parameter.grad for parameter in self.halves])
        if self.scales:
            self.found_inf.zero_()
            wide += [parameter.grad for parameter in self.kept]
            inv_scale = torch.reciprocal(self.scale, out=self.inv_scale)
            torch._amp_foreach_non_finite_check_and_unscale_(wide, self.found_inf, inv_scale)

    def clipped(self) -> Iterable[Tensor]:
        return [*self.masters, *self.kept]

    def update_weights(self) -> None:
        if self.skips_by_itself:
            self.optimizer.found_inf, self.optimizer.grad_scale = self.found_inf, None
        elif self.scales and self.found_inf.item():
            return
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.halves, self.masters)

    def update_scale(self) -> None:
        torch._amp_update_scale_(self.scale, self.growth, self.found_inf, 2.0, 0.5, 2000)

    def work_on_gradients(self, done: Done) -> None:
        self.unscale()
        done("unscale")
        if self.scales:
            self.update_scale()
        done("update")


# Contenders

# autocast's CPU lists run these functions in half. ampatch's lists, like autocast's GPU lists, use float32.
AS_AUTOCAST = {"unlisted": {"torch": ["layer_norm"], "torch.nn.functional": ["layer_norm"]}}


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer, and settings of its measurement.

    Attributes:
        make: function that makes the peer from a model, a function that makes an optimizer, and the half type.
        reference: name of the contender whose times its times are divided by.
        skips: subjects of cases that it skips.
        environment: environment variables of its process.
        half: name of the only half type that it supports; None if it supports both.
        stays_patched: True if every case needs a new process.
    """

    make: Callable[..., Peer]
    reference: str
    skips: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    half: str | None = None
    stays_patched: bool = False


UNPATCHED, AUTOCAST, BY_HAND = "unpatched", "torch.autocast", "O2 by hand"
O1, O2 = (functools.partial(Ampatch, opt_level=level) for level in ("O1", "O2"))
CONTENDERS = {
    UNPATCHED: Contender(Peer, AUTOCAST),
    AUTOCAST: Contender(Autocast, AUTOCAST),
    "ampatch O1": Contender(O1, AUTOCAST),
    # Runs without the compiled extension of calls.
    "ampatch O1 in Python": Contender(O1, AUTOCAST, environment={"AMPATCH_CALLS": "python"}),
    "ampatch O1, autocast's casts": Contender(
        functools.partial(O1, cast_lists=AS_AUTOCAST), AUTOCAST, skips=("calls", "convnet", "MLP", "layers")
    ),
    # Linear layers by torch's own nodes.
    "ampatch O1 without fused_linear": Contender(
        functools.partial(O1, fused_linear=False), AUTOCAST, skips=("calls", "convnet", "MLP", "layers")
    ),
    BY_HAND: Contender(ByHand, BY_HAND, skips=("calls",)),
    "ampatch O2": Contender(O2, BY_HAND, skips=("calls",)),
}
APEX = {
    f"Apex {level}": Contender(
        functools.partial(Apex, opt_level=level), reference, skips, half="float16", stays_patched=True
    )
    for level, reference, skips in (("O1", AUTOCAST, ("layers",)), ("O2", BY_HAND, ("calls", "layers")))
}
TRY_APEX = """
import torch
from apex import amp
model = torch.nn.Linear(1, 1)
amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
"""


def apexs_fault() -> str | None:
    """Returns the error that keeps Apex from running; None if Apex runs."""
    tried = subprocess.run([sys.executable, "-c", TRY_APEX], capture_output=True, text=True, check=False)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else None

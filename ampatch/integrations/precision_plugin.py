"""The precision plugin of Lightning's Trainer: when to set amp up, and what runs in a training step.

Owns one run (``Trainer.fit``, ``validate``, ``test`` or ``predict``): its session, and the few methods of Lightning
that it patches meanwhile. Must import neither of Lightning's two packages: the modules `lightning` and
`pytorch_lightning` beside it choose one. `ampatch.integrations.trainer_session` owns what amp does within a run.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ampatch import amp
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import is_importable
from ampatch.errors import OptionError, UsageError
from ampatch.integrations import versions
from ampatch.integrations.options import names as option_names
from ampatch.integrations.shared_patches import put_around
from ampatch.integrations.trainer_session import (
    TrainerSession,
    Wording,
    amp_log,
    casts_off,
    casts_on,
    has_scale,
    may_convert,
    uninterrupted,
)
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import check_names, check_opt_level
from ampatch.weights import conversion_plan
from ampatch.weights.optimizer_state import evaluates_first

_LEAST = (2, 5)
_OPTIONS = option_names("enabled", "opt_level")
_WORDING = Wording(
    set_up="AmpatchPrecision",
    optimizer="Return one from configure_optimizers.",
    backward="self.manual_backward(loss) in training_step, or return the loss from it",
)
_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}


def bases(*packages: str) -> tuple[Any, Any]:
    """Returns the classes ``Precision`` and ``Callback`` of the first of Lightning's packages imported, else installed.

    Raises:
        IntegrationError: none of them is installed, or its version is too old.
    """
    install = f"Type pip install '{packages[0].partition('.')[0]}>={'.'.join(map(str, _LEAST))}'."
    by_preference = sorted(packages, key=lambda each: each not in sys.modules)
    name = next(filter(is_importable, by_preference), packages[0])
    versions.need("AmpatchPrecision", name, name, _LEAST, install)
    plugins, callbacks = (importlib.import_module(f"{name}.{part}") for part in ("plugins", "callbacks"))
    return plugins.Precision, callbacks.Callback


class PrecisionPlugin:
    """Everything of ``AmpatchPrecision`` but its base, the class ``Precision`` of one of Lightning's packages."""

    def __init__(self, opt_level: str = "O1", **options: Any) -> None:
        super().__init__()
        check_names(options, _OPTIONS, "AmpatchPrecision got")
        self._options = {"opt_level": check_opt_level(opt_level), **options}
        self._saved: dict[str, Any] = {}
        self._run: _Run | None = None

    def __repr__(self) -> str:
        given = [repr(self._options["opt_level"])]
        given += [f"{name}={value!r}" for name, value in self._options.items() if name != "opt_level"]
        kind = type(self)
        precision = next(base for base in kind.__mro__ if base.__name__ == "Precision")
        package = precision.__module__.partition(".plugins.")[0]
        return f"<{kind.__module__}.{kind.__qualname__}({', '.join(given)}) for Trainer of {package}>"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes of a copy, which belongs to no run."""
        return {**vars(self), "_saved": self.state_dict(), "_run": None}

    @property
    def device(self) -> str:
        """Returns the type of the Trainer's device, "cuda" or "cpu", as Lightning's own plugin does."""
        if self._run is not None:
            return self._run.device
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type

    # The run. Lightning calls `convert_module` first, then wraps the model and makes the optimizers, then `connect`.

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Begins a run; its end is the strategy's teardown, also after an exception or Ctrl-C.

        Raises:
            UsageError: the module has no Trainer, as in Fabric.
        """
        self._end()
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            raise UsageError(
                f"AmpatchPrecision is a plugin for Trainer, and this {type(module).__name__} has none. With Fabric, "
                "leave the plugin out: call amp.initialize before fabric.setup, and amp.scale_loss in the loop."
            )
        self._run = _Run(trainer, module, self._end)
        return module

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> tuple[nn.Module, Any, Any]:
        """Sets amp up for the model and its optimizers; only then DDP wraps the model.

        Raises:
            UsageError: amp is set up already, or a callback averages weights at a level that makes them half.
            OptionError: an option has a value that is not allowed.
        """
        assert self._run is not None
        with uninterrupted():
            self._run.open(self._options, self._saved)
        return self._run.wrapped(model), optimizers, lr_schedulers

    def teardown(self) -> None:
        """Ends the run: torch is unpatched, and weights are float32."""
        self._end()
        super().teardown()  # type: ignore[misc]

    def _end(self) -> None:
        with uninterrupted():
            run, self._run = self._run, None
            if run is not None:
                try:
                    self._saved = run.state_dict() or self._saved
                finally:
                    run.close()

    def _running(self) -> _Run:
        if self._run is None:
            raise UsageError(
                "found a step outside of Trainer.fit, validate, test and predict, which set amp up. Call one of them; "
                "in a loop of your own, use amp.initialize and amp.scale_loss."
            )
        return self._run

    # Steps

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Turns casts on for a step of the module."""
        return casts_on()

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Turns casts on, and scales backward passes within the step: ``manual_backward`` and ``loss.backward()``."""
        run = self._running()
        run.thaw()
        with run.session.scaled_backward(), self.forward_context():
            yield

    @contextlib.contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Turns casts on; the casts of weights last until the next training step, as evaluation leaves weights."""
        self._running().freeze()
        with self.forward_context():
            yield

    test_step_context = val_step_context
    predict_step_context = val_step_context

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Runs the module's `backward` with the loss scaled, and leaves the gradients unscaled."""
        with self._running().session.scaled_backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure and the optimizer's step, which an overflow skips.

        Optimizers of torch that call their closure once step after it, which reads no overflow flag from the device if
        they are fused. Others get the closure.
        """
        if not evaluates_first(optimizer):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        stepped = optimizer.step(**kwargs)
        return result if stepped is None else stepped

    def main_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Iterates over the parameters whose gradients are clipped: the masters, at levels that have them."""
        return amp.master_params(optimizer)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loss scale."""
        if self._run is not None:
            self._saved = self._run.state_dict() or self._saved
        return dict(self._saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the loss scale, or of a ``torch.amp.GradScaler``.

        Raises:
            OptionError: it is neither.
        """
        if self._run is not None and self._run.session.is_training:
            self._run.session.load_state_dict(state_dict)
        else:
            self._saved = dict(state_dict)

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the loss scale over from a checkpoint of Lightning's ``precision="16-mixed"``."""
        state = checkpoint.get("MixedPrecision")
        if state and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(state)


class Monitor:
    """Everything of ``LossScaleMonitor`` but its base, the class ``Callback`` of one of Lightning's packages."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs the numbers of `amp_log` if Lightning is about to log; only then it reads them from the device."""
        if trainer._logger_connector.should_update_logs:
            pl_module.log_dict(amp_log())


class _Run:
    """One run of a Trainer, from the conversion of its module to the teardown of its strategy.

    Args:
        trainer: Lightning's Trainer.
        module: its LightningModule.
        end: function that ends this run.
    """

    def __init__(self, trainer: Any, module: nn.Module, end: Callable[[], None]) -> None:
        self._trainer = trainer
        self._module: Any = module
        self._ledger = PatchLedger()
        self._session: TrainerSession | None = None
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._ledger.undo)
        self._frozen: contextlib.ExitStack | None = None
        strategy = trainer.strategy
        self.device: str = strategy.root_device.type
        # Lightning's teardown moves the weights to the CPU before it calls the plugin's.
        put_around(self._ledger, strategy, "teardown", functools.partial(_after, end))
        # DDP must wrap the weights that amp has converted, and amp needs the optimizers for that.
        self._wrapping = PatchLedger()
        self._closing.callback(self._wrapping.undo)
        if self._is_fit and hasattr(strategy, "configure_ddp"):
            self._wrapping.set(strategy, "configure_ddp", lambda: None)

    @property
    def session(self) -> TrainerSession:
        """Amp for the run, from `open` on."""
        assert self._session is not None
        return self._session

    @property
    def _is_fit(self) -> bool:
        return bool(self._trainer.state.fn.value == "fit")

    def open(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Sets amp up."""
        trainer, module = self._trainer, self._module
        models: list[nn.Module] = [module]
        if may_convert(options):
            _check_callbacks(trainer.callbacks, options["opt_level"])
            models, options = _converted_parts(module, options)
        optimizers = [each.optimizer for each in trainer.strategy._lightning_optimizers]
        optimizers = [each for each in optimizers if type(each).__name__ != "_MockOptimizer"]  # there is none
        session = TrainerSession(models, optimizers if self._is_fit else None, options, _WORDING)
        session.open(state)
        self._closing.callback(session.close)
        self._session = session
        self._closing.enter_context(casts_off())
        self._closing.callback(self.thaw)
        if self._is_fit:
            put_around(self._ledger, trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._update_lr_schedulers)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wraps the model in DDP, if the strategy was about to; returns the strategy's model."""
        if not self._wrapping.patches:
            return model
        self._wrapping.undo()
        self._trainer.strategy.configure_ddp()
        wrapper = self._trainer.strategy.model
        self._closing.callback(self.session.forget_wrapper, wrapper)
        return wrapper  # type: ignore[no-any-return]

    def close(self) -> None:
        """Takes amp down, and undoes the patches."""
        self._closing.close()

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the loss scale; None if this run has none, as in bfloat16."""
        return self._session.state_dict() if self._session is not None and has_scale() else None

    # Steps

    def freeze(self) -> None:
        """Keeps the casts of weights until `thaw`; a no-op where gradients are recorded."""
        if self._frozen is None and not torch.is_grad_enabled():
            self._frozen = contextlib.ExitStack()
            for model in self.session.models:
                self._frozen.enter_context(amp.frozen_weights(model))

    def thaw(self) -> None:
        """Drops the casts that `freeze` has kept."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            frozen.close()

    def _update_lr_schedulers(
        self, original: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Leaves schedulers of every step as they are after a skipped step."""
        strategy = self._trainer.strategy
        configs = strategy.lr_scheduler_configs
        counting = [each for each in configs if _counts_steps(each)]
        if interval == "step" and counting and self.session.last_step_was_skipped():
            strategy.lr_scheduler_configs = [each for each in configs if not _counts_steps(each)]
        try:
            original(interval, update_plateau_schedulers=update_plateau_schedulers)
        finally:
            strategy.lr_scheduler_configs = configs


def _counts_steps(config: Any) -> bool:
    """Returns True if a scheduler steps after each step; one that steps every n-th must not miss its turn."""
    return config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau


def _after(first: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        first()
    finally:
        result = original(*args, **kwargs)
    return result


def _check_callbacks(callbacks: list[Any], opt_level: str) -> None:
    """Raises if a callback writes averages into half weights, which would round them and the masters."""
    for callback in callbacks:
        if not _AVERAGING.isdisjoint(base.__name__ for base in type(callback).__mro__):
            raise UsageError(
                f"{type(callback).__name__} writes averages into the model's weights, which opt_level={opt_level!r} "
                "makes half: averages and masters would be rounded. Use opt_level='O1' (or 'O4') with it."
            )


def _converted_parts(module: nn.Module, options: Mapping[str, Any]) -> tuple[list[nn.Module], dict[str, Any]]:
    """Returns the submodules to convert, and the options, with what stays float32 by its names in these.

    A LightningModule's steps call its submodules, not its forward, so amp casts at their boundaries. The module's own
    parameters, losses without weights and metrics stay as they are.

    Raises:
        OptionError: there is no such submodule, ``keep_fp32`` or ``float32_outputs`` matches none or cannot be said for
            each by itself, or the cast lists have entries for parts.
    """
    entries = shipped(options["opt_level"]).overlaid(options.get("cast_lists") or ()).modules
    if entries:
        raise OptionError(
            f"{entries[0].source}: modules has {entries[0].name!r}, and at opt_level={options['opt_level']!r} amp "
            "converts the parts of a LightningModule one by one. Type keep_fp32 for what is to compute in float32."
        )
    matched: dict[str, set[nn.Module]] = {}
    for argument in ("keep_fp32", "float32_outputs"):
        wanted = conversion_plan.check_keep_fp32(options.get(argument), argument)
        conversion_plan.check_matches([module], wanted, argument)
        matched[argument] = {below for _, below in conversion_plan.matching(module, wanted)}
    kept = {each for below in set().union(*matched.values()) for each in below.modules()}
    parts = [part for part in _parts(module) if part not in kept]
    if not parts:
        raise OptionError(
            f"opt_level={options['opt_level']!r} found no submodule of this {type(module).__name__} whose weights to "
            "convert: its own parameters stay float32. Put the layers into submodules, or use opt_level='O1'."
        )
    named = [(name, below) for part in parts for name, below in part.named_modules() if name]
    return parts, {
        **options,
        "keep_fp32": _names_within(module, named, kept, "keep_fp32"),
        "float32_outputs": _names_within(module, named, matched["float32_outputs"], "float32_outputs"),
    }


def _names_within(
    module: nn.Module, named: Iterable[tuple[str, nn.Module]], kept: Set[nn.Module], argument: str
) -> list[str]:
    """Returns the names of modules within the parts, as patterns; raises if a name fits another module as well."""
    inside = dict.fromkeys(name for name, below in named if below in kept)
    for name, below in named:
        if name in inside and below not in kept:
            raise OptionError(
                f"{argument} keeps one {name!r} in float32, and another submodule of this {type(module).__name__} has "
                f"a {name!r} that is to be half. Keep both or none, or put the submodules into one."
            )
    return [glob.escape(name) for name in inside]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost submodules that have weights and a forward."""
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for child in module.children():
        if isinstance(child, metric) or not any(each.is_floating_point() for each in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward:  # a ModuleList, for example
            yield from _parts(child)
        else:
            yield child

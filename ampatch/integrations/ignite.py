"""Adapts amp to PyTorch-Ignite: an update function, and a handler that turns amp off after the run of an engine.

Owns the supervised training step and what an engine tells other handlers about amp. Must not set amp up: the user
calls ``amp.initialize``, because DDP and `EMAHandler` take the model before an engine runs.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.integrations import versions
from ampatch.integrations.shared_patches import SharedPatches, put_around
from ampatch.integrations.trainer_session import uninterrupted
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import as_flag, check_count, check_flag, check_names
from ampatch.runtime import runtime
from ampatch.scaling.users_optimizer import check_optimizer
from ampatch.session import Session
from ampatch.weights.copies import Full

versions.need("ampatch.integrations.ignite", "pytorch-ignite", "ignite", (0, 5, 2))

from ignite.engine import DeterministicEngine, Engine, Events  # noqa: E402
from ignite.handlers import EMAHandler  # noqa: E402
from ignite.utils import convert_tensor  # noqa: E402

__all__ = ["AmpHandler", "create_supervised_trainer", "supervised_training_step", "unless_skipped"]


def _prepare_batch(batch: Any, device: Any, non_blocking: bool) -> tuple[Any, Any]:
    x, y = batch
    return convert_tensor(x, device, non_blocking), convert_tensor(y, device, non_blocking)


def _loss(*seen: Any) -> float:
    return float(seen[-1].item())


def supervised_training_step(
    model: nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    device: Any = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] = _prepare_batch,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Tensor], Any] = _loss,
    *,
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
    before_step: Callable[[Any], Any] | None = None,
    **unknown: Any,
) -> Callable[[Engine, Any], Any]:
    """Returns an update function for an engine, like ignite's function of this name; amp scales its backward pass.

    Args:
        model: model passed to ``amp.initialize``, or a wrapper around it.
        optimizer: optimizer passed to ``amp.initialize``.
        loss_fn: returns the loss for the model's outputs and targets; at O1 and O4 it gets them in float32.
        device: device of the batches.
        non_blocking: whether batches are copied to the device asynchronously; True or False.
        prepare_batch: returns inputs and targets for a batch, ``device`` and ``non_blocking``.
        model_transform: turns the result of ``model_fn`` into the first argument of ``loss_fn``.
        output_transform: returns ``engine.state.output``; it gets the unscaled loss.
        gradient_accumulation_steps: number of iterations per step of the optimizer.
        model_fn: calls the model.
        before_step: is called with the optimizer before each step, on unscaled gradients: to clip or log them.
        unknown: arguments with other names, which raise.

    Raises:
        UsageError: the model or the optimizer was not passed to ``amp.initialize``.
        OptionError: an argument is unknown, asks for a second precision, or has a value that is not allowed.
    """
    _check_names(unknown)
    _check_adopted(model, optimizer)
    _check_callable("loss_fn", loss_fn, "such as torch.nn.functional.cross_entropy")
    functions = {"prepare_batch": prepare_batch, "model_transform": model_transform, "model_fn": model_fn}
    for name, function in {**functions, "output_transform": output_transform}.items():
        _check_callable(name, function, "or leave it out")
    if before_step is not None:
        _check_callable("before_step", before_step, "such as lambda optimizer: amp.clip_grad_norm_(optimizer, 1.0)")
    in_float32 = amp.float_function(loss_fn)  # also if it was bound before amp patched functions
    check_count("gradient_accumulation_steps", gradient_accumulation_steps)
    non_blocking = as_flag("non_blocking", non_blocking)

    def update(engine: Engine, batch: Any) -> Any:
        _iterations_per_step[engine] = gradient_accumulation_steps
        past = engine.state.iteration % gradient_accumulation_steps
        if past == 1 % gradient_accumulation_steps:
            optimizer.zero_grad()
        model.train()
        x, y = prepare_batch(batch, device=device, non_blocking=non_blocking)
        y_pred = model_transform(model_fn(model, x))
        loss = in_float32(y_pred, y)
        share = loss / gradient_accumulation_steps
        with amp.scale_loss(share, optimizer) as scaled_loss:
            scaled_loss.backward()
        if past == 0:
            if before_step is not None:
                before_step(optimizer)
            optimizer.step()
        return output_transform(x, y, y_pred, loss)

    return update


def create_supervised_trainer(
    model: nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *args: Any,
    deterministic: bool = False,
    **options: Any,
) -> Engine:
    """Returns a trainer, like ignite's function of this name, with the update function of `supervised_training_step`.

    Args:
        model: as for `supervised_training_step`.
        optimizer: as for `supervised_training_step`.
        loss_fn: as for `supervised_training_step`.
        args: its further arguments by position, up to ``output_transform``.
        deterministic: whether the trainer is a ``DeterministicEngine``.
        options: its further arguments by name.

    Raises:
        UsageError: the model or the optimizer was not passed to ``amp.initialize``.
        OptionError: an argument is unknown, asks for a second precision, or has a value that is not allowed.
    """
    update = supervised_training_step(model, optimizer, loss_fn, *args, **options)
    return (DeterministicEngine if as_flag("deterministic", deterministic) else Engine)(update)


#: What the update functions of `supervised_training_step` tell the filters of `unless_skipped` about their engines.
_iterations_per_step: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()


def unless_skipped(optimizer: Any, every: int | None = None) -> Callable[[Engine, int], bool]:
    """Returns an event filter that leaves out iterations without a step, and those whose step amp skipped.

    ::

        trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=unless_skipped(optimizer)), scheduler)

    Args:
        optimizer: optimizer passed to ``amp.initialize``.
        every: lets only every n-th iteration pass. None: each iteration with a step, according to the
            ``gradient_accumulation_steps`` of `supervised_training_step`; all iterations for an update function of your
            own.

    Raises:
        OptionError: ``optimizer`` is no optimizer, or ``every`` is no whole number of at least 1. The filter raises it
            if the engine takes no step in every n-th iteration.
        UsageError: amp is on, and the optimizer was not passed to ``amp.initialize``.
    """
    check_optimizer(optimizer)
    if every is not None:
        check_count("every", every)
    if runtime.live is not None and not runtime.live.settings.adopts_on_use:
        amp.step_was_skipped(optimizer)  # raises for one that amp has not adopted

    def passes(engine: Engine, iteration: int) -> bool:
        per_step = _iterations_per_step.get(engine, 1)
        if every is not None and every % per_step:
            raise OptionError(
                f"unless_skipped has every={every}, and the trainer has gradient_accumulation_steps={per_step}: "
                f"iterations without a step would pass. Leave every out, or type a multiple of {per_step}."
            )
        return iteration % (every or per_step) == 0 and not amp.step_was_skipped(optimizer)

    return passes


class AmpHandler:
    """Handler that ends amp with the run of an engine, saves its state, and shows its numbers to loggers.

    ::

        handler = AmpHandler()
        handler.attach(trainer)
        to_save = {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": handler}

    When the outermost run of an engine with such a handler ends, it calls ``amp.deinitialize``. That includes
    ``engine.terminate()``, an exception or Ctrl-C, but not ``engine.interrupt()``. All other handlers have run by then.
    While a run is interrupted, the end of another engine's run leaves amp on, too. During a run, ignite's
    ``EMAHandler`` averages the float32 masters of half weights.

    Args:
        deinitialize: False leaves amp on at the end of a run, for a further run.

    Raises:
        OptionError: ``deinitialize`` is neither True nor False.
    """

    # Of all handlers, as amp belongs to the process: engines in a run, from the outermost; and engines whose run was
    # interrupted and can go on, with the session that it is to go on with.
    _running: ClassVar[list[Engine]] = []
    _interrupted: ClassVar[weakref.WeakKeyDictionary[Engine, weakref.ref[Session]]] = weakref.WeakKeyDictionary()

    def __init__(self, deinitialize: bool = True) -> None:
        self._deinitializes = check_flag("deinitialize", deinitialize)
        if self._deinitializes is None:
            raise OptionError("deinitialize is None; expected True or False.")
        self._ledger = PatchLedger()
        self._stats = _Stats()
        self._last_state: dict[str, Any] | None = None

    def attach(self, engine: Engine, name: str = "amp") -> None:
        """Attaches the handler to an engine, with any update function.

        Args:
            engine: usually the trainer.
            name: attribute of ``engine.state`` that gets the numbers of ``amp.stats``, read when a logger asks:
                ``state_attributes=["amp"]``. After the run it keeps the last ones.

        Raises:
            OptionError: ``engine`` is no engine, or ``name`` is no name of an attribute.
            UsageError: ``engine.state`` has such an attribute already.
        """
        if not isinstance(engine, Engine):
            raise OptionError(
                f"found {type(engine).__name__} to attach an AmpHandler to; expected an Engine. Type "
                "handler.attach(trainer)."
            )
        if not (isinstance(name, str) and name.isidentifier()):
            raise OptionError(f"name is {name!r}; expected the name of an attribute, such as name='amp'.")
        if hasattr(engine.state, name):
            raise UsageError(
                f"engine.state has an attribute {name!r} already. Is an AmpHandler attached to this engine? Otherwise "
                "type attach(engine, name='...') with another name."
            )
        setattr(engine.state, name, self._stats)
        engine.add_event_handler(Events.INTERRUPT, self._note_interrupt)
        # Not by events: an exception has one of its own, but any handler of it can keep it from later ones.
        put_around(self._ledger, engine, "run", functools.partial(self._run, engine))

    def state_dict(self) -> dict[str, Any]:
        """Returns the result of ``amp.state_dict``; after a run that has ended amp, the last one."""
        return dict(self._last_state) if self._last_state is not None and not amp.is_on() else amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Calls ``amp.load_state_dict``, which takes the state of ignite's ``scaler`` too."""
        amp.load_state_dict(state_dict)

    def _run(self, engine: Engine, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not amp.is_on() and not runtime.disabled:
            raise UsageError(
                "this engine has an AmpHandler, but amp is off. Call amp.initialize before the run. If an earlier run "
                "has ended amp, type AmpHandler(deinitialize=False), or call amp.initialize once more."
            )
        self._interrupted.pop(engine, None)
        self._running.append(engine)
        self._stats.read()
        try:
            with _averages_of_masters.installed():
                return original(*args, **kwargs)
        except BaseException:
            self._interrupted.pop(engine, None)  # it does not go on
            raise
        finally:
            self._running.remove(engine)
            is_awaited = any(session() is runtime.live for session in self._interrupted.values())
            if self._deinitializes and not self._running and not is_awaited:
                self._end()

    def _note_interrupt(self, engine: Engine) -> None:
        if runtime.live is not None:
            self._interrupted[engine] = weakref.ref(runtime.live)

    def _end(self) -> None:
        with uninterrupted():
            if amp.is_on():
                self._last_state = amp.state_dict()
                self._stats.read()
                amp.deinitialize()


def _fresh(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of dict that reads the numbers of ``amp.stats`` first."""

    @functools.wraps(method)
    def read_first(self: _Stats, *args: Any) -> Any:
        return method(self.read(), *args)

    return read_first


class _Stats(dict[str, "int | float"]):
    """The numbers of ``amp.stats`` at the moment at which they are read; with amp off, the last ones.

    A dict, and no other mapping, because json and loggers take no other for plain data. Copies are plain dicts.
    """

    def read(self) -> _Stats:
        """Takes over the present numbers, in one read of the device."""
        now = amp.stats()
        if now:
            dict.clear(self)
            dict.update(self, now)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


#: The methods that read a dict; `items` gives all numbers for one read.
_READING = "__getitem__ __iter__ __reversed__ __len__ __contains__ __eq__ __ne__ __repr__ __or__ __ror__"
for _name in (*_READING.split(), "get", "keys", "values", "items", "copy"):
    setattr(_Stats, _name, _fresh(getattr(dict, _name)))


def _check_names(unknown: Mapping[str, Any]) -> None:
    second = ("amp_mode", "scaler")
    known = [*inspect.signature(supervised_training_step).parameters, "deterministic"]
    known.remove("unknown")
    check_names((name for name in unknown if name not in second), known, "supervised_training_step got")
    for name, value in unknown.items():
        if value:
            raise OptionError(
                f"{name}={value!r} asks for a second precision beside amp's. Leave {name} out, or use "
                "ignite.engine.create_supervised_trainer without amp."
            )


def _check_callable(name: str, value: Any, advice: str) -> None:
    if not callable(value):
        raise OptionError(f"{name} is {value!r}; expected a function, {advice}.")
    if isinstance(value, type):
        raise OptionError(
            f"{name} is the class {value.__name__}; expected a function, or an instance. Type {value.__name__}()."
        )


def _check_adopted(model: nn.Module, optimizer: Any) -> None:
    live = runtime.live
    if live is None and not runtime.disabled:
        raise UsageError(
            "amp is off. Type model, optimizer = amp.initialize(model, optimizer, opt_level='O1') first, then make the "
            "trainer."
        )
    if live is not None and not live.settings.adopts_on_use:
        amp.step_was_skipped(optimizer)
        with amp.frozen_weights(model):
            pass  # both raise for what amp has not adopted


def _install(ledger: PatchLedger) -> None:
    ledger.set(EMAHandler, "model", property(_averaged, lambda handler, given: vars(handler).update(model=given)))


def _averaged(handler: EMAHandler) -> Any:
    """Returns the handler's model, with float32 values of its half weights once the handler has its averages."""
    live, model, averages = runtime.live, vars(handler)["model"], vars(handler).get("ema_model")
    if live is None or averages is None or not live.weights.conversion.has_any_of(model):
        return model
    for weight, average in zip(model.parameters(), averages.parameters(), strict=False):
        if average.dtype in HALVES and live.weights.conversion.dtype_before(weight) is not None:
            raise UsageError(
                f"EMAHandler has {average.dtype} averages, in which small updates are lost: opt_level="
                f"{live.settings.properties.opt_level!r} has no float32 masters to copy. Make the EMAHandler before "
                "amp.initialize, or use opt_level='O2'."
            )
    return Full(model, live.weights.conversion.full_of)


#: Within `_averages_of_masters.installed()`, ``EMAHandler`` reads float32 values: half ones would round its averages.
_averages_of_masters = SharedPatches(_install)

"""``AmpNetMixin``: amp for skorch's nets, set by ``amp__`` parameters.

Owns the list of methods that amp guards, the parameters, and the loss scale's state between fits. Must never change the
results of a net that has amp off. `ampatch.integrations.trainer_session` owns what amp does within a fit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ampatch import opt_levels
from ampatch.casting.nested import cast_floating
from ampatch.errors import OptionError, UsageError, warn
from ampatch.integrations import guards, options, versions
from ampatch.integrations.state_between_fits import AmpState
from ampatch.integrations.trainer_session import Wording, casts_off, casts_off_elsewhere, casts_on

versions.need("ampatch.integrations.skorch", "skorch", "skorch", (1, 4))

from skorch import NeuralNet  # noqa: E402

__all__ = ["AmpNetMixin", "AmpState"]

_OPTIONS = options.names()
_OF_SCALERS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict", "is_enabled")

_NOTHING = contextlib.nullcontext()


def _session(net: Any, training: bool = False) -> contextlib.AbstractContextManager[None]:
    """Returns ``net.amp_session(training)``, or a cheap no-op context if this thread is in one: steps often ask."""
    return _NOTHING if net._amp_state().is_held_here(training) else net.amp_session(training)


# Guards around methods of skorch


def _guard_fit(net: Any, run: Callable[[], Any]) -> Any:
    """Sets amp up while the method runs."""
    with net.amp_session(training=True):
        return run()


def _guard_forward_iter(net: Any, run: Callable[[], Any]) -> Any:
    """Sets amp up until the generator ends."""
    with net.amp_session():
        yield from run()


def _guard_train_step(net: Any, run: Callable[[], Any]) -> Any:
    """Scales backward passes while the method runs, and lets overflows skip the steps of optimizers."""
    with _session(net, training=True), net._amp_state().step(net):
        return run()


def _guard_train_step_single(net: Any, run: Callable[[], Any]) -> Any:
    """Scales backward passes of a method that does not step, and so needs amp to be set up by its caller."""
    if not net._amp_state().is_live and net._amp_is_on():
        raise UsageError(
            "train_step_single was called outside of fit, so that amp would be gone before the optimizer steps, "
            "and no overflow could skip the step. Put your loop into with net.amp_session(training=True):, or call "
            "net.train_step, which steps as well."
        )
    with net._amp_state().step(net):
        return run()


def _guard_infer(net: Any, run: Callable[[], Any]) -> Any:
    """Turns casts on while the method runs, and casts its result to float32: numpy has no bfloat16.

    If ``amp__cast_model_outputs`` is set, the result keeps its dtype.
    """
    with _session(net):
        if not net._amp_state().is_live:
            return run()
        with casts_on():
            result = run()
        has_other_type = getattr(net, "amp__cast_model_outputs", None) is not None
        return result if has_other_type else cast_floating(result, torch.float32)


_GUARDS: guards.Guards = {
    "fit_loop": _guard_fit,
    "train_step": _guard_train_step,
    "train_step_single": _guard_train_step_single,
    "forward_iter": _guard_forward_iter,
    "infer": _guard_infer,
    "get_loss": _guard_infer,
}


class AmpNetMixin(NeuralNet if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin that trains and predicts in mixed precision; it must be the first base of a net.

    ::

        class Net(AmpNetMixin, NeuralNetClassifier): ...

        net = Net(MyModule, amp__opt_level="O1", amp__half_dtype="float16")

    Parameters with the prefix ``amp__`` are the arguments of ``amp.initialize``, except ``models``, ``optimizers`` and
    ``num_losses``. ``amp__scaler`` replaces amp's own scale: a class or an instance with the interface of
    ``torch.amp.GradScaler``. amp casts functions within `infer` and `get_loss` only. ``net.amp_`` holds the state of
    the loss scale.

    Raises:
        UsageError: a class names the mixin after the net, or also inherits from ``AccelerateMixin``.
    """

    amp_: AmpState
    prefixes_: list[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "skorch"]
        if "AccelerateMixin" in bases:
            raise UsageError(f"{cls.__name__} has AmpNetMixin and AccelerateMixin, and both cast. Leave one out.")
        guards.check_precedes(AmpNetMixin, NeuralNet, cls, "net")
        guards.guard_methods(cls, _GUARDS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes_ = [*self.prefixes_, "amp"]

    @contextlib.contextmanager
    def amp_session(self, training: bool = False) -> Iterator[None]:
        """Sets amp up while the block runs; `fit` and `predict` do so themselves.

        Saves time around many short predictions, each of which would set amp up and take it down. The user's own
        training loops need it around `train_step_single`. In the block, too, amp casts within `infer` and `get_loss`
        only.

        Args:
            training: True to include the optimizers.

        Raises:
            UsageError: amp is on in this process with other settings, or set up in a way that cannot be shared.
            OptionError: a parameter has a value that is not allowed.
        """
        state = self._amp_state()
        if not (state.is_live or self._amp_is_on()):
            with casts_off_elsewhere():
                yield
            return
        self.check_is_fitted()
        if training:
            self.check_training_readiness()
        with state.held(self, training), casts_off():
            yield

    def notify(self, method_name: str, **cb_kwargs: Any) -> Any:
        """Calls the net's `notify`, and records the event for `accelerator`."""
        self._amp_state().note(method_name)
        return super().notify(method_name, **cb_kwargs)

    @property
    def accelerator(self) -> Any:
        """Object that tells skorch's LRScheduler of skipped steps: `amp_` while amp is set up, else None.

        A value set by the user takes precedence.
        """
        if "accelerator" in self.__dict__:
            return self.__dict__["accelerator"]
        return self._amp_state() if self._amp_state().is_live else None

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        self.__dict__["accelerator"] = value

    # Parameters

    def _amp_state(self) -> AmpState:
        if not hasattr(self, "amp_"):
            self.amp_ = AmpState()
        return self.amp_

    _amp_wording = Wording(
        set_up="the net",
        optimizer="Make one in initialize_optimizer: an attribute such as self.optimizer_, of a class derived from "
        "torch.optim.Optimizer.",
        backward="loss.backward() in train_step_single",
    )

    def _amp_is_on(self) -> bool:
        given = {name: getattr(self, f"amp__{name}") for name in options.DECIDING if hasattr(self, f"amp__{name}")}
        return options.turn_on(given)

    def _amp_options(self) -> dict[str, Any]:
        given = {key: value for key, value in self.get_params_for("amp").items() if not key.startswith("scaler")}
        return {"verbosity": int(bool(self.verbose)), **given}

    def _amp_trained(self, training: bool) -> tuple[list[nn.Module], list[Any]]:
        modules = [getattr(self, name + "_") for name in self._modules]
        # A criterion gets float32 outputs of modules, so its weights must not be converted to half.
        if getattr(self, "amp__opt_level", "O1") in ("O0", "O1", "O4"):
            modules += [getattr(self, name + "_") for name in self._criteria]
        optimizers = [getattr(self, name + "_") for name in self._optimizers] if training else []
        return [each for each in modules if isinstance(each, nn.Module)], [each for each in optimizers if each]

    def _amp_scaler(self) -> Any:
        params = self.get_params_for("amp__scaler")
        scaler = getattr(self, "amp__scaler", None)
        lacks = [name for name in _OF_SCALERS if not hasattr(scaler, name)]
        if scaler is None:
            if params:
                raise OptionError(
                    f"amp__scaler__{min(params)} is set, but there is no amp__scaler. Leave it out, or type "
                    "amp__scaler=ampatch.GradScaler as well."
                )
            return None
        if lacks:
            raise OptionError(
                f"amp__scaler is {scaler!r}, which lacks {', '.join(lacks)}; expected a class or an instance with the "
                "interface of torch.amp.GradScaler, such as ampatch.GradScaler."
            )
        if not isinstance(scaler, type):
            if params:
                raise OptionError(
                    f"amp__scaler is an instance, so amp__scaler__{min(params)} cannot be set on it. "
                    f"Type amp__scaler={type(scaler).__name__}, the class."
                )
            return scaler
        if issubclass(scaler, torch.amp.GradScaler):
            params = {"device": torch.device(self.device or "cpu").type, **params}
        try:
            return scaler(**params)
        except TypeError as error:
            raise OptionError(f"amp__scaler cannot be made from {params}: {error}") from error

    def initialize(self) -> Any:
        """Initializes the net; starts with a fresh loss scale, and instantiates a scaler given as a class."""
        super().initialize()
        self._amp_state().reset(self._amp_scaler())
        return self

    def _validate_params(self) -> None:
        super()._validate_params()
        self._check_amp_names(key for key in self._params_to_validate if key == "amp" or key.startswith("amp__"))

    @staticmethod
    def _check_amp_names(names: Any) -> None:
        known = [f"amp__{name}" for name in (*_OPTIONS, "scaler")]
        for name in sorted(names):
            if name not in known and not name.startswith("amp__scaler__"):
                near = opt_levels.hint(name, known)
                raise OptionError(f"__init__() or set_params() got an unexpected argument {name}.{near}")

    def set_params(self, **kwargs: Any) -> Any:
        """Sets parameters of the net; those of amp take effect at the next training step or prediction.

        ``amp__init_scale`` and ``amp__scaler`` start with a fresh loss scale.

        Raises:
            OptionError: an ``amp__`` parameter has an unknown name.
        """
        ours = {key: kwargs.pop(key) for key in list(kwargs) if key == "amp" or key.startswith("amp__")}
        if self.initialized_:
            self._check_amp_names(ours)
        super().set_params(**kwargs)
        for key, value in ours.items():
            setattr(self, key, value)
        self._params_to_validate.update(ours)
        if self.initialized_ and ours:
            state = self._amp_state()
            if any(key.startswith("amp__scaler") for key in ours):
                state.reset(self._amp_scaler())
            state.outdate(scale_too="amp__init_scale" in ours)
        return self

    # Saving

    def __getstate__(self) -> Any:
        with self._amp_state().suspended(self):
            return super().__getstate__()

    def save_params(self, *args: Any, f_amp: Any = None, **kwargs: Any) -> None:
        """Saves the net; ``f_amp`` is the file for the state of the loss scale, not written if amp is off."""
        if f_amp is not None and self._amp_is_on():
            self.check_is_fitted()
            kwargs["f_amp"] = f_amp
        if args or f_amp is None or any(value for key, value in kwargs.items() if key.startswith("f_")):
            super().save_params(*args, **kwargs)

    def load_params(self, *args: Any, f_amp: Any = None, checkpoint: Any = None, **kwargs: Any) -> None:
        """Loads the net; ``f_amp`` is the file with the state of the loss scale, not read if amp is off.

        Raises:
            FileNotFoundError: ``f_amp`` does not exist, and no other file was to be loaded.

        Warns:
            AmpWarning: ``f_amp`` does not exist, but other files were loaded: the net was saved with amp off.
        """
        of_checkpoint = f_amp is None and getattr(checkpoint, "f_amp", None) is not None
        others = args or checkpoint is not None or any(v for key, v in kwargs.items() if key.startswith("f_"))
        if others or f_amp is None:
            # f_amp is loaded separately: if its file were missing, skorch would not load the others.
            rest = checkpoint
            if getattr(checkpoint, "f_amp", None) is not None:
                rest = copy.copy(checkpoint)
                rest.f_amp = None
            super().load_params(*args, checkpoint=rest, **kwargs)
        if of_checkpoint:
            f_amp = checkpoint.get_formatted_files(self)["f_amp"]
        if f_amp is None or not self._amp_is_on():
            return
        self._amp_state()
        try:
            super().load_params(f_amp=f_amp, use_safetensors=kwargs.get("use_safetensors", False))
        except FileNotFoundError:
            if not others:
                raise
            warn(
                f"there is no {f_amp}: the net was probably saved with amp off. The loss scale starts afresh. To "
                "continue without amp, set amp__opt_level='O0'."
            )

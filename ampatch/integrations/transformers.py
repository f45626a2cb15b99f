"""``AmpatchTrainer`` and ``AmpatchMixin``: amp for Hugging Face's ``Trainer``, set by the argument ``amp``.

Owns the list of methods that amp guards, and the file of the loss scale in a checkpoint. Checks the training arguments
for options that exclude amp. Must never change the results of a trainer that has amp off.
`ampatch.integrations.trainer_session` owns what amp does within a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampatch import amp, opt_levels
from ampatch.errors import OptionError, UsageError
from ampatch.integrations import guards, options, versions
from ampatch.integrations.state_between_fits import AmpState
from ampatch.integrations.trainer_session import Wording, amp_log, casts_off, casts_off_elsewhere, casts_on
from ampatch.ledger import PatchLedger

_INSTALL = "Type pip install 'transformers>=4.57' 'accelerate>=1.15'."
versions.need("ampatch.integrations.transformers", "transformers", "transformers", (4, 57), _INSTALL)

from ampatch.integrations import accelerate_optimizers  # noqa: E402
from ampatch.integrations.pretrained import honest_configs  # noqa: E402

# isort: split
# Below `accelerate_optimizers`, which raises a clear error if accelerate is missing; transformers' own names others.
from transformers import Trainer  # noqa: E402

__all__ = ["AmpatchMixin", "AmpatchTrainer"]

_OPTIONS = options.names()

# Guards around methods of Trainer


def _guard_train(trainer: Any, run: Callable[[], Any]) -> Any:
    """Takes amp down at the end, however the method ends; `_wrap_model` sets it up, once the optimizer exists."""
    is_on = trainer._amp_is_on()
    if is_on and isinstance(trainer.model_wrapped, DistributedDataParallel):
        trainer.model_wrapped = trainer.model  # the wrapper of an earlier train() expects other types
    with casts_off() if is_on else casts_off_elsewhere():
        try:
            return run()
        finally:
            trainer._amp_training.close()


def _guard_training_step(trainer: Any, run: Callable[[], Any]) -> Any:
    """Turns casts on while the method runs, and scales its backward passes."""
    if not trainer._amp_state.is_live and trainer._amp_is_on():
        raise UsageError(
            "training_step was called outside of train(), which sets amp up, so that nothing would be cast or "
            "scaled. Call trainer.train(), or write the loop with amp.initialize and amp.scale_loss."
        )
    with trainer._amp_state.step(trainer), casts_on():
        return run()


def _guard_evaluation(trainer: Any, run: Callable[[], Any]) -> Any:
    """Sets amp up while the method runs."""
    with trainer._amp_entered():
        return run()


def _guard_prediction_step(trainer: Any, run: Callable[[], Any]) -> Any:
    """Turns casts on while the method runs, generation included."""
    with trainer.amp_session():
        return run()


_GUARDS: guards.Guards = {
    "train": _guard_train,
    "training_step": _guard_training_step,
    "evaluate": _guard_evaluation,
    "predict": _guard_evaluation,
    "prediction_step": _guard_prediction_step,
}


class AmpatchMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin that trains, evaluates and predicts in mixed precision; it must be the first base of a trainer.

    ::

        class Summarizer(AmpatchMixin, Seq2SeqTrainer): ...

        trainer = Summarizer(model, args, train_dataset=data, amp={"opt_level": "O2", "half_dtype": "float16"})

    amp casts within `training_step` and `prediction_step` only, whether these are Trainer's own or overrides.

    Attributes:
        amp: opt level, or mapping of arguments of ``amp.initialize`` except ``models``, ``optimizers`` and
            ``num_losses``. A class may set a default; the constructor takes it by keyword. A new value takes effect
            with the next `train`, `evaluate` or `predict`.

    Args:
        args: arguments of the trainer.
        amp: see the attribute; None for the class's.
        kwargs: keyword arguments of the trainer.

    Raises:
        UsageError: a class names the mixin after the trainer.
        OptionError: ``amp`` has a name or value that is not allowed, or the training arguments ask for something that
            excludes amp, such as a second precision.
    """

    amp: str | Mapping[str, Any] = "O1"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        guards.check_precedes(AmpatchMixin, Trainer, cls, "trainer")
        guards.guard_methods(cls, _GUARDS)

    def __init__(self, *args: Any, amp: str | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        # No trainer has these; "loss_scale" and others may be arguments of a trainer.
        named = next((name for name in ("opt_level", "half_dtype", "cast_lists") if name in kwargs), None)
        if named is not None:
            raise OptionError(
                f"{named} is an argument of amp, not of the trainer. Type amp={{{named!r}: {kwargs[named]!r}}}."
            )
        if amp is not None:
            self.amp = amp
        self._amp_options()
        self._amp_state = AmpState()
        self._amp_training = contextlib.ExitStack()
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def amp_session(self) -> Iterator[None]:
        """Sets amp up with casts on while the block runs, for the user's own calls of the model.

        Raises:
            UsageError: amp is on in this process with other settings, or set up in a way that cannot be shared.
            OptionError: `amp` has a value that is not allowed.
        """
        with self._amp_entered(), casts_on():
            yield

    def _amp_entered(self) -> contextlib.AbstractContextManager[None]:
        """Sets amp up without casts while the block runs; a no-op if this thread has it set up."""
        if self._amp_state.is_held_here(training=False):
            return contextlib.nullcontext()
        is_on = self._amp_state.is_live or self._amp_is_on()
        return self._amp_held(training=False) if is_on else casts_off_elsewhere()

    @contextlib.contextmanager
    def _amp_held(self, training: bool) -> Iterator[None]:
        _check_arguments(self.args)
        with (
            self._amp_state.held(self, training),
            accelerate_optimizers.adopted_optimizers.installed(),
            honest_configs.installed(),
            casts_off(),
        ):
            # For good: the prepared optimizer would not unscale what a scaler of the Accelerator scales.
            accelerate_optimizers.replace_precision(self.accelerator, PatchLedger())
            yield

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Sets amp up for training before Trainer wraps the model: now there is an optimizer, and DDP is to come.

        Raises:
            OptionError: amp is on, and weights that are to be trained are half already.
        """
        if training:
            self._amp_training.close()  # of a batch size that did not fit into memory (auto_find_batch_size)
            if self._amp_is_on():
                accelerate_optimizers.check_weights(self.model.named_parameters())
                self._amp_training.enter_context(self._amp_held(training=True))
        return super()._wrap_model(model, training, *args, **kwargs)

    # Options

    _amp_wording = Wording(
        set_up="the trainer",
        optimizer="Give the trainer one: optimizers=(optimizer, scheduler).",
        backward="self.accelerator.backward(loss) in training_step",
    )
    _amp_launched: torch.dtype | None = None

    def _amp_options(self) -> dict[str, Any]:
        """Returns the arguments for ``amp.initialize``.

        Raises:
            OptionError: a name or value is not allowed.
        """
        given: Any = {"opt_level": self.amp} if isinstance(self.amp, str) else self.amp
        if not isinstance(given, Mapping):
            raise OptionError(
                f"amp is {given!r}; expected an opt level, such as amp='O1', or arguments of amp.initialize, such as "
                "amp={'opt_level': 'O2', 'half_dtype': 'float16'}. amp='O0' turns amp off."
            )
        opt_levels.check_names(given, _OPTIONS, "amp has")
        options.check_level(given)
        # Outputs are as Accelerate has them with autocast.
        return accelerate_optimizers.with_launched_half(
            {"cast_model_outputs": torch.float32, **given}, self._amp_launched
        )

    def _amp_is_on(self) -> bool:
        return options.turn_on(self._amp_options())

    def _amp_trained(self, training: bool) -> tuple[list[nn.Module], list[Any]]:
        return [self.model], [accelerate_optimizers.bare(self.optimizer)] if training else []

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator; Trainer's constructor calls it before anything else.

        Raises:
            OptionError: amp is on for this trainer, and something excludes it.
        """
        if self._amp_is_on():
            _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        # Kept, because later TrainingArguments reset the state that the Accelerator reads its precision from.
        self._amp_launched = accelerate_optimizers.launched_precision(self.accelerator)
        if self._amp_is_on():
            accelerate_optimizers.check_accelerator(self.accelerator, "amp='O0'")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs the loss scale and the number of skipped steps beside the loss."""
        if self._amp_state.is_live and "loss" in logs:
            logs.update(amp_log())  # a callback's on_log would be too late for the log history and for reporters
        super().log(logs, *args, **kwargs)

    # Checkpoints

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if self._amp_state.is_live and self.args.should_save:
            torch.save(amp.state_dict(), Path(output_dir, accelerate_optimizers.STATE_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._amp_state.is_live:
            accelerate_optimizers.load_scale(checkpoint)
        else:
            super()._load_scaler(checkpoint)


class AmpatchTrainer(AmpatchMixin, Trainer):
    """Hugging Face's ``Trainer`` in mixed precision; `AmpatchMixin` describes the argument ``amp``.

    ::

        trainer = AmpatchTrainer(model, args, train_dataset=data, amp="O2")
    """


# What excludes amp


def _check_arguments(args: Any) -> None:
    for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            what = "converts the model's weights for good" if name.endswith("eval") else "casts as well"
            raise OptionError(
                f"TrainingArguments has {name}=True, which {what}, and this trainer has amp. Leave {name} out, or use "
                "a trainer without amp (amp='O0')."
            )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise OptionError(
                f"TrainingArguments has {name}, which shards the weights that amp is to adopt. Leave {name} out, or "
                "set its own mixed precision and use a trainer without amp (amp='O0')."
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or optim.endswith("layerwise"):
        raise OptionError(
            f"TrainingArguments has optim={optim!r}, which updates weights within the backward pass, from gradients "
            "that are still scaled. Choose an optimizer that steps after it, such as optim='adamw_torch'."
        )
    if args.n_gpu > 1:
        raise OptionError(
            f"Trainer would use DataParallel for {args.n_gpu} GPUs, and amp works with DistributedDataParallel. Type "
            "torchrun --nproc-per-node gpu SCRIPT; or set CUDA_VISIBLE_DEVICES=0."
        )

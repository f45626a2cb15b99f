"""The user's model with what one step of it needs: checks it, and hands out copies to run.

Must never touch the model or the inputs, and must leave the process as it was.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampatch.diagnostics.process_state import RandomState
from ampatch.distributed import is_sharded
from ampatch.errors import AmpError, AmpWarning, OptionError, UsageError
from ampatch.graph_nodes import leaf_of, nodes_of
from ampatch.opt_levels import dtype_name
from ampatch.patching import adopted_model
from ampatch.runtime import runtime
from ampatch.torch_private.compilers import DYNAMO
from ampatch.torch_private.operators import tree_map

#: Positional arguments and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Subject:
    """The user's model, with what a step of it needs: inputs, loss and random numbers.

    Args:
        model: the user's; only copies of it run.
        inputs: a tensor, positional arguments, or keyword arguments.
        loss_fn: returns the loss for the model's output.

    Attributes:
        model: the user's model.
        undo: takes back what steps have changed outside of copies.

    Raises:
        OptionError: the model cannot be trained in float32 here, the inputs are no arguments, or the loss is no
            function.
    """

    def __init__(self, model: object, inputs: object, loss_fn: Any) -> None:
        self.model = adopted_model.check_model(model)
        _check_loss_fn(loss_fn)
        self._given = _arguments(inputs)
        _check(self.model)
        self._loss_fn: Callable[[Any], Any] = loss_fn
        self._random = RandomState()
        self.undo = contextlib.ExitStack()

    def begin_step(self) -> Arguments:
        """Restores the random numbers, and returns copies of the inputs, since a forward pass may write to them."""
        copied: Arguments = tree_map(_copied, self._given)
        self._random.restore()
        return copied

    def loss_of(self, model: nn.Module, arguments: Arguments) -> Tensor:
        """Runs the forward pass of a copy, and returns its loss.

        Raises:
            OptionError: ``loss_fn`` returns no scalar that depends on a parameter.
        """
        args, kwargs = arguments
        return self.loss_for(model(*args, **kwargs), model)

    def loss_for(self, output: Any, model: nn.Module) -> Tensor:
        """Returns the loss for the output of a forward pass of a copy.

        Raises:
            OptionError: ``loss_fn`` returns no scalar that depends on a parameter.
        """
        note = (
            f"ampatch: loss_fn is called with the model's output alone, here a {type(output).__name__}. Type for "
            "example loss_fn=lambda output: F.cross_entropy(output, labels), or output['logits'] for a "
            "model that returns a dict."
        )
        with noting(note, (TypeError,)):
            loss = self._loss_fn(output)
        if not isinstance(loss, Tensor):
            raise OptionError(
                f"loss_fn returned {type(loss).__name__!r}; expected a scalar tensor. For a model that returns its "
                "loss, type loss_fn=lambda output: output.loss."
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            raise OptionError(
                f"loss_fn returned a {dtype_name(loss.dtype)} tensor of shape {tuple(loss.shape)}; "
                "expected a floating-point scalar, such as the mean over the batch."
            )
        if not loss.requires_grad:
            raise OptionError(
                "the loss depends on no parameter that requires a gradient, so there is no backward pass. Unfreeze a "
                "parameter (requires_grad_()), and leave .detach() and .item() out of loss_fn."
            )
        self._keep_gradients(loss, model)
        return loss

    def _keep_gradients(self, loss: Tensor, model: nn.Module) -> None:
        """Keeps a backward pass from the gradients of tensors of ``loss_fn`` itself, such as a criterion's weights."""
        own = set(map(id, model.parameters()))
        for node in nodes_of(filter(None, [loss.grad_fn])):
            leaf = leaf_of(node)
            if leaf is not None and id(leaf) not in own:
                self.undo.callback(node.register_prehook(lambda _: (None,)).remove)


def _check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise OptionError(
            f"loss_fn is {type(loss_fn).__name__!r}; expected a function that returns the loss for the model's output. "
            "Type for example loss_fn=lambda output: F.cross_entropy(output, labels); or, for a model that returns its "
            "loss, lambda output: output.loss."
        )


def _arguments(inputs: object) -> Arguments:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise OptionError(
        f"inputs is {type(inputs).__name__!r}; expected a tensor, a tuple of the forward's arguments, or a mapping of "
        "its keyword arguments."
    )


def copied(model: nn.Module) -> nn.Module:
    """Returns a deep copy of a model without gradients.

    Raises:
        OptionError: it cannot be copied.
    """
    try:
        # With gradients, parts in TorchScript would be copied into a graph of the user's parameters.
        with torch.no_grad():
            made = copy.deepcopy(model)
    except Exception as error:
        raise OptionError(
            f"the model cannot be copied by copy.deepcopy ({type(error).__name__}: {error}), and only copies run here. "
            "Give it a model that has not run yet: tensors that a forward pass computed, kept as attributes, cannot be "
            "copied."
        ) from error
    for mine, original in zip(made.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(original.requires_grad)
    made.zero_grad(set_to_none=True)
    return made


def _check(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise OptionError(f"the model's {name!r} has no shape yet. Run one batch through the model first.")
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            cure = "amp.deinitialize()" if runtime.live is not None else "model.float()"
            raise OptionError(
                f"the model's {name!r} is {dtype_name(parameter.dtype)}; expected float32, with which "
                f"every level is compared. Type {cure} first."
            )
        if parameter.device.type not in ("cpu", "cuda"):
            raise OptionError(
                f"the model's {name!r} is on {parameter.device.type!r}; expected the CPU or a GPU (cuda)."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError("the model has no parameter that requires a gradient; expected one to train.")
    if is_sharded(model.parameters()):
        raise OptionError("the model's parameters are sharded over ranks. Pass the model before you shard it.")


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except (RuntimeError, TypeError):  # such as a tensor with a graph inside of it, or an open file
        return value


def check_not_set_up(caller: str) -> None:
    """Raises UsageError if amp is set up."""
    if runtime.live is not None:
        raise UsageError(
            f"{caller} chooses amp's settings itself, and amp is set up already. Type amp.deinitialize() first."
        )


@contextlib.contextmanager
def undisturbed(caller: str, subject: Subject | None = None) -> Iterator[None]:
    """Runs a block with gradients on, autocast off and nothing compiled; then random numbers go on as without it.

    Args:
        caller: the public function that runs copies of the model in the block.
        subject: the user's model, if its loss is computed in the block.

    Raises:
        UsageError: amp is set up.
    """
    check_not_set_up(caller)
    with contextlib.ExitStack() as stack:
        stack.callback(RandomState().restore)
        if subject is not None:
            stack.enter_context(subject.undo)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if DYNAMO in sys.modules:  # without it nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            # Of global hooks, which compiled code might not call; but none runs.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield


@contextlib.contextmanager
def noting(note: str, kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)) -> Iterator[None]:
    """Adds a note to exceptions of some kinds, those of amp excepted."""
    try:
        yield
    except AmpError:  # says all there is to say
        raise
    except kinds as error:
        error.add_note(note)
        raise


def is_users(error: BaseException) -> bool:
    """Returns True if the user's code raised an exception, as a note on it says, and not the diagnosis itself."""
    return any(note.startswith("ampatch: ") for note in getattr(error, "__notes__", ()))


def text_of(error: BaseException) -> str:
    """Returns an error's class, message and notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def noting_warnings(notes: list[str]) -> Iterator[None]:
    """Collects amp's warnings, each once, and shows all others afterwards."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AmpWarning)
            yield
    finally:
        notes += dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, AmpWarning))
        for each in caught:
            if not issubclass(each.category, AmpWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)

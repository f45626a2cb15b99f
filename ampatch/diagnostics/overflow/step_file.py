"""A skipped step as a file: what its forward passes need to run again in another process.

Owns the format of the file. It holds tensors and plain data only, so that `torch.load` reads it with
``weights_only=True``. Must never run a forward pass.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampatch import checkpoint_policy
from ampatch.diagnostics import json_files
from ampatch.diagnostics.overflow.forwards import NotedForward, stand_in
from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.opt_levels import dtype_name
from ampatch.session import Session
from ampatch.switch import PLAIN
from ampatch.torch_private.operators import tree_map_only

FORMAT = "ampatch step"
VERSION = 1
_ENDINGS = (".pt", ".pth")
_KEYS = {"forwards", "loss_scale", "models", "policy", "settings", "trace"}
_WRITE_ONE = (
    "Write one with overflow.save('step.pt'), in a function for amp.initialize(on_overflow=('trace', function))."
)
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}


class SkippedStep:
    """A skipped step, as long as it can be saved: until the next forward pass or step.

    Args:
        session: the session, whose models made the step.
        noted: its forward passes.
        facts: what else the file is to hold, as plain data.
    """

    def __init__(self, session: Any, noted: Sequence[NotedForward], facts: Mapping[str, Any]) -> None:
        self._session: Any = session  # None once it is closed
        self._noted, self._facts = tuple(noted), facts
        self._versions = self._read_versions()

    def close(self) -> None:
        """Drops what it holds, as the weights are about to change."""
        self._noted, self._session = (), None

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the file; see `Overflow.save`."""
        file = json_files.checked_path(path, _ENDINGS, "Type 'step.pt'.")
        if not self._noted or self._versions != self._read_versions():
            raise UsageError(
                "overflow.save found no forward pass as it ran in the step: the step is over, or the model is compiled "
                "or not adopted. Call it in a function for amp.initialize(on_overflow=('trace', function)), and leave "
                "torch.compile out."
            )
        obstacle = next(filter(None, (each.obstacle for each in self._noted)), None)
        if obstacle is not None:
            raise UsageError(f"overflow.save was called for a step that cannot run again: {obstacle}.")
        roots = _roots(self._session, self._noted)
        data = {
            "format": FORMAT,
            "version": VERSION,
            **self._facts,
            "settings": self._session.settings.as_plain_data(),
            "policy": checkpoint_policy.effective(self._session),
            "models": [_of_model(root) for root in roots],
            "forwards": [_of_forward(each, roots) for each in self._noted],
        }
        with json_files.replacing(file) as unfinished:
            torch.save(data, unfinished)

    def _read_versions(self) -> list[tuple[int, int]]:
        weights = (each for noted in self._noted for each in noted.module.parameters() if not is_lazy(each))
        return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in weights]


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads the file of a step; its tensors are on the CPU.

    Raises:
        OptionError: there is no file; it holds no step, or one of another version.
        OSError: the file cannot be read.
    """
    name = fspath(path)
    if not Path(name).is_file():
        raise OptionError(f"there is no file {name!r}. {_WRITE_ONE}")
    try:
        data: dict[str, Any] = torch.load(name, map_location="cpu", weights_only=True)
        if (data["format"], data["version"]) != (FORMAT, VERSION) or not data.keys() >= _KEYS:
            raise ValueError("another format, or another version of it")
    except Exception as error:
        raise OptionError(
            f"{name} holds no step that this version of ampatch reads ({type(error).__name__}). {_WRITE_ONE}"
        ) from error
    return data


def put_into(models: Sequence[nn.Module], saved: Sequence[Mapping[str, Any]], name: str) -> None:
    """Gives models the weights, buffers and modes of a saved step.

    Args:
        models: models of the same classes and shapes, in the order of the file; they are changed.
        saved: the models of the file.
        name: that of the file, for errors.

    Raises:
        OptionError: the models are others.
    """
    classes = [each["class"] for each in saved]
    if [type(each).__name__ for each in models] != classes:
        found = ", ".join(type(each).__name__ for each in models)
        raise OptionError(f"{name} is a step of {', '.join(classes)}; found {found}. Pass models of these classes.")
    for model, values in zip(models, saved, strict=True):
        own = dict(model.named_parameters())
        _check_same(own, values["parameters"], f"{name} is a step of another {values['class']}: its")
        device = next((each.device for each in own.values()), torch.device("cpu"))
        for key, tensor in own.items():
            tensor.data = values["parameters"][key].to(tensor.device, tensor.dtype)
            tensor.requires_grad_(key not in values["frozen"])
        for key, value in values["buffers"].items():  # some models make or replace them as they run
            parent, _, last = key.rpartition(".")
            with contextlib.suppress(AttributeError):
                model.get_submodule(parent)._buffers[last] = value.to(device)
        for key, module in model.named_modules():
            module.training = key not in values["in_eval"]


def loaded(
    saved: Mapping[str, Any], models: Sequence[nn.Module], *, as_saved: bool, by_call: bool
) -> list[NotedForward]:
    """Returns the forward passes of a saved step, to run again with these models.

    Args:
        saved: what `read` has returned.
        models: adopted models with the weights of the step.
        as_saved: True if amp is set up as in the step; at other opt levels inputs and the state of autocast are others.
        by_call: True calls the models; False runs their forwards, since the arguments are those behind the hooks.
    """
    found, finite = [], stand_in(saved["loss_scale"])
    for each in saved["forwards"]:
        root = models[each["model"]]
        module = root.get_submodule(each["module"])
        device = next((own.device for own in module.parameters()), torch.device("cpu"))
        arrived = dict(enumerate(_copied(each["arrived"], device)))
        noted = NotedForward(
            module,
            module if by_call or module is not root else module.forward,
            _copied((each["args"], each["kwargs"]), device, None if as_saved else torch.float32),
            each["random"],
            each["state"] if as_saved else PLAIN,
            arrived=arrived if as_saved else tree_map_only(Tensor, finite, arrived),
        )
        found.append(noted)
    return found


def _roots(session: Session, noted: Sequence[NotedForward]) -> list[nn.Module]:
    """Returns the models whose forward passes were noted, in the order in which they ran."""
    models = [model for each in noted for model in session.adopted.models if each.module in set(model.modules())]
    return list(dict.fromkeys(models))


def _of_model(model: nn.Module) -> dict[str, Any]:
    whole = model.state_dict()  # of half weights it has the masters
    return {
        "class": type(model).__name__,
        "parameters": {name: whole.get(name, each.detach()) for name, each in model.named_parameters()},
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "frozen": [name for name, each in model.named_parameters() if not each.requires_grad],
        "in_eval": [name for name, each in model.named_modules() if not each.training],
    }


def _of_forward(noted: NotedForward, roots: Sequence[nn.Module]) -> dict[str, Any]:
    args, kwargs = noted.given
    for value in (*args, *kwargs.values()):
        other = _first_other(value)
        if other is not None:
            raise OptionError(
                f"{type(noted.module).__name__} was called with a {type(other).__name__}, which a file of tensors and "
                "plain data cannot hold. Pass tensors, numbers and text, in lists, tuples and dicts."
            )
    number, name = next(
        (number, name)
        for number, root in enumerate(roots)
        for name, module in root.named_modules()
        if module is noted.module
    )
    return {
        "model": number,
        "module": name,
        "args": _copied(tuple(args)),
        "kwargs": _copied(dict(kwargs)),
        "state": noted.state,
        "random": noted.random,
        "arrived": _copied([*noted.arrived.values()]),
    }


def _first_other(value: Any) -> object | None:
    """Returns what is neither a tensor nor plain data in a value; None if all of it is."""
    if type(value) in (list, tuple, dict, OrderedDict):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return next((other for other in (_first_other(each) for each in inside) if other is not None), None)
    return None if type(value) in (Tensor, nn.Parameter) or type(value) in _PLAIN else value


def _copied(value: Any, device: torch.device | None = None, half_in: torch.dtype | None = None) -> Any:
    """Returns a value with copies of its tensors: of a view, torch saves all of the memory behind it."""

    def copied(each: Tensor) -> Tensor:
        dtype = half_in if half_in is not None and each.dtype in HALVES else each.dtype
        return each.detach().to(device, dtype, copy=True).requires_grad_(each.requires_grad)

    return tree_map_only(Tensor, copied, value)


def _check_same(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], told: str) -> None:
    for name in (*saved, *own):
        there, here = saved.get(name), own.get(name)
        fits = there is not None and here is not None and not is_lazy(here) and there.shape == here.shape
        # At O3 the run's weights are half; a half model has no room for float32 ones.
        if not fits or torch.promote_types(there.dtype, here.dtype) != here.dtype:  # type: ignore[union-attr]
            raise OptionError(
                f"{told} {name!r} is {_shown(there)}; in the model that was passed it is {_shown(here)}. Pass a model "
                "made as in the run, before amp.initialize."
            )


def _shown(tensor: Tensor | None) -> str:
    if tensor is None or is_lazy(tensor):
        return "missing" if tensor is None else "without a shape"
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"

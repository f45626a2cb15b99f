"""Kernels of Apex's amp that scripts call directly, mostly to clip gradients, implemented by `ampatch.native.kernels`.

`multi_tensor_adam` uses torch's own update.

Each kernel takes lists of dense float16, bfloat16 and float32 tensors, also mixed, of any strides and on any devices.
It computes in float32, and autograd records nothing. It checks all arguments before it writes anything.
Must not choose an implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim.adam import adam

from ampatch.errors import OptionError, UsageError
from ampatch.half_types import HALVES
from ampatch.native import kernels
from ampatch.native.host_copy import on_device
from ampatch.torch_private import foreach

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
]

_DTYPES = (*HALVES, torch.float32)

_FUSED = "{} of apex.optimizers, or torch.optim.{}"
_INSTEAD = {
    "multi_tensor_adagrad": _FUSED.format("FusedAdagrad", "Adagrad"),
    "multi_tensor_adam_capturable": _FUSED.format("FusedAdam(capturable=True)", "AdamW(fused=True, capturable=True)"),
    "multi_tensor_adam_capturable_master": _FUSED.format("FusedAdam", "AdamW(fused=True, capturable=True)"),
    "multi_tensor_sgd": _FUSED.format("FusedSGD", "SGD(fused=True)"),
    "multi_tensor_lamb": "FusedLAMB of apex.optimizers",
    "multi_tensor_lamb_mp": "FusedLAMB of apex.optimizers",
    "multi_tensor_lamb_stage1_cuda": "FusedLAMB of apex.optimizers",
    "multi_tensor_lamb_stage2_cuda": "FusedLAMB of apex.optimizers",
    "multi_tensor_novograd": "FusedNovoGrad of apex.optimizers",
    "multi_tensor_l2norm_mp": "multi_tensor_l2norm",
    "multi_tensor_unscale_l2norm": "multi_tensor_l2norm_scale",
    "update_scale_hysteresis": 'amp.initialize(model, optimizer, opt_level="O1", hysteresis=2)',
}

# Projects read these at import, or in the constructor of an optimizer, and may never call them. Checks for a working
# Apex do not look for them. Each is a function that raises.
_RAISE_IN_CALLS = (
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
)


def __getattr__(name: str) -> object:
    if name in _RAISE_IN_CALLS:
        return functools.partial(_refuse, name)
    raise AttributeError(_not_replaced(name), name=name)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(_not_replaced(name))


def _not_replaced(name: str) -> str:
    instead = _INSTEAD.get(name, "torch._foreach_* for work on lists of tensors, or the optimizers of torch.optim")
    return f"ampatch does not replace amp_C.{name}; it replaces {', '.join(__all__)} of amp_C. Use {instead}."


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """Writes ``outs = ins * scale``; every product is rounded once.

    Args:
        chunk_size: ignored.
        noop_flag: int32 tensor of one element; set to 1 if an element of ``ins`` is not finite, and never reset. Its
            value does not affect ``outs``.
        tensor_lists: lists ``ins`` and ``outs`` of equal length, shapes and devices; they may be the same.
        scale: factor, as a number or a tensor of one element.

    Raises:
        OptionError: an argument is not as described.
    """
    ins, outs = _checked("multi_tensor_scale", noop_flag, tensor_lists, ("ins", "outs"))
    _scale(noop_flag, ins, outs, scale)


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int = -1,
) -> None:
    """Writes ``outs = a * xs + b * ys``.

    Args:
        chunk_size: ignored.
        noop_flag: flag as in `multi_tensor_scale`, for the elements of the checked lists.
        tensor_lists: lists ``xs``, ``ys`` and ``outs`` of equal length, shapes and devices; ``outs`` may be one of the
            others.
        a: factor of ``xs``, as a number or a tensor of one element.
        b: factor of ``ys``, likewise.
        arg_to_check: list to check: 0 for ``xs``, 1 for ``ys``, -1 for both.

    Raises:
        OptionError: an argument is not as described.
    """
    xs, ys, outs = _checked("multi_tensor_axpby", noop_flag, tensor_lists, ("xs", "ys", "outs"))
    if arg_to_check not in (-1, 0, 1):
        raise OptionError(f"found arg_to_check={arg_to_check}; expected 0 for xs, 1 for ys, or -1 for both.")
    if not outs:
        return
    found_inf, unchecked = _scalar(0.0, noop_flag.device), _scalar(0.0, noop_flag.device)
    sums = _scaled(xs, a, unchecked if arg_to_check == 1 else found_inf)
    foreach.add_(sums, _scaled(ys, b, unchecked if arg_to_check == 0 else found_inf))
    foreach.copy_(outs, sums)
    _raise_flag(noop_flag, found_inf)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the Euclidean norm of all tensors together, and the norm of each tensor.

    Args:
        chunk_size: ignored.
        noop_flag: flag as in `multi_tensor_scale`.
        tensor_lists: one list of tensors.
        per_tensor: True to compute the norm of each tensor too.

    Returns:
        The common norm, of shape (1,), and the norms of the tensors in order, of shape (tensors,). Without
        ``per_tensor`` the second has shape (0,). Both are float32, on the device of the first tensor.

    Raises:
        OptionError: an argument is not as described.
    """
    (tensors,) = _checked("multi_tensor_l2norm", noop_flag, tensor_lists, ("tensors",))
    return _norms(noop_flag, tensors, per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Calls `multi_tensor_scale`, and returns the `multi_tensor_l2norm` of ``outs``.

    Args:
        chunk_size: ignored.
        noop_flag: flag as in `multi_tensor_scale`.
        tensor_lists: lists ``ins`` and ``outs``, as in `multi_tensor_scale`.
        scale: factor, as a number or a tensor of one element.
        per_tensor: True to compute the norm of each tensor too.

    Returns:
        Norms as from `multi_tensor_l2norm`.

    Raises:
        OptionError: an argument is not as described.
    """
    ins, outs = _checked("multi_tensor_l2norm_scale", noop_flag, tensor_lists, ("ins", "outs"))
    _scale(noop_flag, ins, outs, scale)
    return _norms(noop_flag, outs, per_tensor)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Updates parameters and their moments in place by one step of Adam or AdamW.

    Args:
        chunk_size: ignored.
        noop_flag: int32 tensor of one element; ignored, as by Apex's kernel: a gradient of inf reaches the parameter.
        tensor_lists: lists ``grads``, ``params``, ``exp_avgs`` and ``exp_avg_sqs`` of equal length, shapes and devices.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: term added to the root of the second moment.
        step: number of this step, from 1 on.
        mode: 0 to add weight decay to the gradient (L2 regularization), 1 to decouple it (AdamW).
        bias_correction: 1 to divide the moments by ``1 - beta ** step``; 0 to leave them.
        weight_decay: factor of the weight decay.

    Raises:
        OptionError: an argument is not as described.
    """
    grads, *written = _checked(
        "multi_tensor_adam", noop_flag, tensor_lists, ("grads", "params", "exp_avgs", "exp_avg_sqs")
    )
    wide_grads, params, exp_avgs, exp_avg_sqs = wide = [[each.float() for each in some] for some in (grads, *written)]
    # adam() counts the step itself. With an infinite number of steps both corrections are 1.
    steps_before = step - 1.0 if bias_correction else math.inf
    with torch.no_grad():
        adam(
            params,
            wide_grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.tensor(steps_before, dtype=torch.float32, device="cpu") for _ in params],
            foreach=True,
            decoupled_weight_decay=mode == 1,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(lr),
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        for originals, copies in zip(written, wide[1:], strict=True):
            if any(each is not copy for each, copy in zip(originals, copies, strict=True)):
                foreach.copy_(originals, copies)


def _scale(noop_flag: Tensor, ins: list[Tensor], outs: list[Tensor], scale: float | Tensor) -> None:
    found_inf, factor = _scalar(0.0, noop_flag.device), _scalar(scale, noop_flag.device)
    if all(map(_are_one, ins, outs)):
        kernels.unscale_(ins, factor, found_inf)
    elif all(out.dtype is torch.float32 for out in outs):
        kernels.unscale_copy(ins, outs, factor, found_inf, False)
    else:
        foreach.copy_(outs, _scaled(ins, factor, found_inf))
    _raise_flag(noop_flag, found_inf)


def _are_one(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors of one shape are the same tensor, or views of all of it, such as ``.data``."""
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype is other.dtype


def _scaled(tensors: list[Tensor], scale: float | Tensor, found_inf: Tensor) -> list[Tensor]:
    """Returns new float32 tensors; sets ``found_inf`` to 1 if an element of ``tensors`` is not finite."""
    scaled = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    kernels.unscale_copy(tensors, scaled, _scalar(scale, found_inf.device), found_inf, False)
    return scaled


def _norms(noop_flag: Tensor, tensors: list[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    device = tensors[0].device if tensors else noop_flag.device
    found_inf, sum_of_squares = kernels.flag_and_squares(tensors, noop_flag.device)
    _raise_flag(noop_flag, found_inf)
    norm = on_device(sum_of_squares.sqrt().float(), device).reshape(1)
    if not (per_tensor and tensors):
        return norm, torch.empty(0, dtype=torch.float32, device=device)
    norms = foreach.norm(tensors, 2, dtype=torch.float32)
    return norm, torch.stack([on_device(each, device) for each in norms])


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    number = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu")
    if number.numel() != 1:
        raise OptionError(f"found {_described(value)} as a factor; expected a number.")
    return on_device(number.detach().float(), device).reshape(())


def _raise_flag(noop_flag: Tensor, found_inf: Tensor) -> None:
    noop_flag.masked_fill_(found_inf != 0, 1)


def _checked(
    function: str, noop_flag: object, tensor_lists: Sequence[Sequence[Tensor]], names: tuple[str, ...]
) -> list[list[Tensor]]:
    """Returns the lists with detached tensors.

    Raises:
        OptionError: ``noop_flag`` is not an int32 tensor of one element; the number or lengths of the lists are wrong;
            a tensor is of an unsupported kind; or a tensor differs from the others at its place in shape or device.
    """
    if not isinstance(noop_flag, Tensor) or noop_flag.dtype is not torch.int32 or noop_flag.numel() != 1:
        raise OptionError(
            f"{function} found {_described(noop_flag)} as noop_flag; expected an int32 tensor of one element. Type "
            "torch.zeros(1, dtype=torch.int32, device=tensor.device)."
        )
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) != len(names) or len(set(map(len, lists))) != 1:
        raise OptionError(
            f"{function} found lists of {', '.join(str(len(tensors)) for tensors in lists) or 'nothing'} tensors; "
            f"expected [{', '.join(names)}], all as long as the first."
        )
    for place, row in enumerate(zip(*lists, strict=True)):
        for name, tensor in zip(names, row, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
                raise OptionError(
                    f"{function} found {_described(tensor)} as {name}[{place}]; expected a dense tensor of float16, "
                    "bfloat16 or float32."
                )
            if tensor.shape != row[0].shape or tensor.device != row[0].device:
                raise OptionError(
                    f"{function} found {_described(tensor)} as {name}[{place}]; expected one of the shape "
                    f"{tuple(row[0].shape)}, on {row[0].device}, as {names[0]}[{place}] is."
                )
    return [[tensor.detach() for tensor in tensors] for tensors in lists]


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"an object of type {type(value).__name__}"
    return f"a tensor of {value.dtype}, {value.layout}, shape {tuple(value.shape)}, on {value.device}"

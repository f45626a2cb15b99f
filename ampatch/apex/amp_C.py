"""The kernels of Apex's amp that scripts call themselves, mostly to clip gradients: on `ampatch.native.kernels`.

Each takes lists of dense tensors of float16, bfloat16 and float32, which may be mixed, of any strides and on any
devices, and computes in float32. Nothing is recorded for autograd. Everything is checked before anything is written.
Must not choose an implementation: `ampatch.native.kernels` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.errors import OptionError
from ampatch.native import kernels
from ampatch.opt_levels import HALVES

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_l2norm_scale", "multi_tensor_scale"]

_DTYPES = (*HALVES, torch.float32)

_FUSED = "{} of apex.optimizers, or torch.optim.{}"
_INSTEAD = {
    "multi_tensor_adagrad": _FUSED.format("FusedAdagrad", "Adagrad"),
    "multi_tensor_adam": _FUSED.format("FusedAdam", "AdamW(fused=True)"),
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


def __getattr__(name: str) -> object:
    instead = _INSTEAD.get(name, "torch._foreach_* for work on lists of tensors, or the optimizers of torch.optim")
    raise AttributeError(
        f"ampatch does not replace amp_C.{name}: of amp_C there are {', '.join(__all__)}. Use {instead}.",
        name=name,
    )


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """``outs = ins * scale``, with every product rounded once.

    Args:
        chunk_size: without effect.
        noop_flag: int32, of one element; becomes 1 if an element of ``ins`` is not finite, and is never reset. It
            changes nothing in what is written.
        tensor_lists: ``ins`` and ``outs``, which may be the same; of equal length, shapes and devices.
        scale: a number.

    Raises:
        OptionError: the arguments are not so.
    """
    del chunk_size
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
    """``outs = a * xs + b * ys``.

    Args:
        chunk_size: without effect.
        noop_flag: as of `multi_tensor_scale`, for the elements of what is checked.
        tensor_lists: ``xs``, ``ys`` and ``outs``, which may be one of these; of equal length, shapes and devices.
        a: a number.
        b: a number.
        arg_to_check: 0 checks ``xs``, 1 ``ys``, and -1 both.

    Raises:
        OptionError: the arguments are not so.
    """
    del chunk_size
    xs, ys, outs = _checked("multi_tensor_axpby", noop_flag, tensor_lists, ("xs", "ys", "outs"))
    if arg_to_check not in (-1, 0, 1):
        raise OptionError(f"found arg_to_check={arg_to_check}; expected 0 for xs, 1 for ys, or -1 for both.")
    if not outs:
        return
    found_inf, unchecked = _scalar(0.0, noop_flag.device), _scalar(0.0, noop_flag.device)
    sums = _scaled(xs, a, unchecked if arg_to_check == 1 else found_inf)
    torch._foreach_add_(sums, _scaled(ys, b, unchecked if arg_to_check == 0 else found_inf))
    torch._foreach_copy_(outs, sums)
    _raise_flag(noop_flag, found_inf)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the Euclidean norm of all elements of all tensors, and of each tensor.

    Args:
        chunk_size: without effect.
        noop_flag: as of `multi_tensor_scale`.
        tensor_lists: one list.
        per_tensor: whether the norm of each tensor is wanted too.

    Returns:
        The norm, of shape (1,); and the norms of the tensors in their order, of shape (tensors,), or (0,) where they
        are not wanted. Both float32, on the device of the first tensor.

    Raises:
        OptionError: the arguments are not so.
    """
    del chunk_size
    (tensors,) = _checked("multi_tensor_l2norm", noop_flag, tensor_lists, ("tensors",))
    return _norms(noop_flag, tensors, per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_scale`, and `multi_tensor_l2norm` of what it has written.

    Args:
        chunk_size: without effect.
        noop_flag: as of `multi_tensor_scale`.
        tensor_lists: ``ins`` and ``outs``, as of `multi_tensor_scale`.
        scale: a number.
        per_tensor: whether the norm of each tensor is wanted too.

    Returns:
        As `multi_tensor_l2norm`.

    Raises:
        OptionError: the arguments are not so.
    """
    del chunk_size
    ins, outs = _checked("multi_tensor_l2norm_scale", noop_flag, tensor_lists, ("ins", "outs"))
    _scale(noop_flag, ins, outs, scale)
    return _norms(noop_flag, outs, per_tensor)


def _scale(noop_flag: Tensor, ins: list[Tensor], outs: list[Tensor], scale: float | Tensor) -> None:
    found_inf, factor = _scalar(0.0, noop_flag.device), _scalar(scale, noop_flag.device)
    if all(map(_are_one, ins, outs)):
        kernels.unscale_(ins, factor, found_inf)
    elif all(out.dtype is torch.float32 for out in outs):
        kernels.unscale_copy(ins, outs, factor, found_inf, False)
    else:
        torch._foreach_copy_(outs, _scaled(ins, factor, found_inf))
    _raise_flag(noop_flag, found_inf)


def _are_one(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape are one, or views of all of it as ``.data`` gives them."""
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype is other.dtype


def _scaled(tensors: list[Tensor], scale: float | Tensor, found_inf: Tensor) -> list[Tensor]:
    """New tensors of float32; ``found_inf`` becomes 1 where an element of the old ones is not finite."""
    scaled = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    kernels.unscale_copy(tensors, scaled, _scalar(scale, found_inf.device), found_inf, False)
    return scaled


def _norms(noop_flag: Tensor, tensors: list[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    device = tensors[0].device if tensors else noop_flag.device
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=noop_flag.device)
    found_inf = _scalar(0.0, noop_flag.device)
    kernels.found_inf_norm(tensors, _scalar(1.0, noop_flag.device), found_inf, sum_of_squares)
    _raise_flag(noop_flag, found_inf)
    norm = sum_of_squares.sqrt().to(device, torch.float32, non_blocking=True).reshape(1)
    if not (per_tensor and tensors):
        return norm, torch.empty(0, dtype=torch.float32, device=device)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return norm, torch.stack([each.to(device, non_blocking=True) for each in norms])


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    number = torch.as_tensor(value, dtype=torch.float32).detach()
    if number.numel() != 1:
        raise OptionError(f"found {_described(value)} as a factor; expected a number.")
    return number.to(device, non_blocking=True).reshape(())


def _raise_flag(noop_flag: Tensor, found_inf: Tensor) -> None:
    noop_flag.masked_fill_(found_inf != 0, 1)


def _checked(
    function: str, noop_flag: object, tensor_lists: Sequence[Sequence[Tensor]], names: tuple[str, ...]
) -> list[list[Tensor]]:
    """Returns the lists, of tensors that autograd records nothing for.

    Raises:
        OptionError: there are more of them or fewer, or their tensors are of other kinds, or do not fit together.
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

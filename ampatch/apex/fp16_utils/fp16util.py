"""Half networks and float32 masters of their parameters, as in ``apex.fp16_utils.fp16util``.

The functions are for training loops that handle mixed precision themselves. They must not keep state, and must not know
loss scales or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ampatch.apex.apex_C import flatten, unflatten
from ampatch.errors import OptionError
from ampatch.patching import recurrent_weights
from ampatch.torch_private.modules import BatchNorm

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = clip_grad_norm_


# Networks


class tofp16(nn.Module):  # noqa: N801 - Apex's name, which pickled models have
    """Casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns ``input`` in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - Apex's name
    """Casts every batch norm with weights in a module to float32, in place; returns the module."""
    for each in module.modules():
        if isinstance(each, BatchNorm) and each.affine:
            each.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Casts a network to float16 in place, except batch norms with weights, and returns it behind a `tofp16`.

    The keys of the result's state dict begin with ``1.``.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters, gradients and buffers of a module, but not of its submodules."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                grad = parameter.grad
                parameter.grad = None  # torch rejects a new dtype while a gradient has the old one
                parameter.data = parameter.data.to(dtype)
                parameter.grad = grad if grad is None else grad.to(dtype)
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a network in place, except batch norms with weights, and returns it."""
    for module in network.modules():
        if isinstance(module, BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
    recurrent_weights.flatten(network)
    return network


class FP16Model(nn.Module):
    """A network in float16, with batch norms in float32, that casts its inputs to float16.

    Args:
        network: network to cast in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Returns the network's output for ``inputs`` in float16."""
        return self.network(*(input.half() for input in inputs))


# Masters


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trained parameters of a model, and their float32 masters for the optimizer.

    Args:
        model: model with parameters of any floating-point dtypes.
        flat_master: True for one master that holds all parameters; False for one master each.

    Returns:
        List of parameters, and list of masters.

    Raises:
        OptionError: ``flat_master`` is True, and there are no trained parameters, or they have several dtypes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        if not flat_master:
            return parameters, [nn.Parameter(parameter.detach().clone().float()) for parameter in parameters]
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "no parameter that requires a gradient"
            raise OptionError(
                f"prep_param_lists(flat_master=True) found {found}; expected parameters of one type. Use "
                "flat_master=False."
            )
        master = nn.Parameter(flatten(parameters).float())
        master.grad = torch.zeros_like(master)
        return parameters, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of a model's parameters to their masters.

    Args:
        model_params: parameters from `prep_param_lists`. If one has no gradient, ``flat_master`` uses zeros; otherwise
            its master gets no gradient.
        master_params: masters from `prep_param_lists`; missing gradients are created.
        flat_master: True if there is one master for all parameters.
    """
    if flat_master:
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in model_params]
        (master,) = master_params
        master.grad = torch.empty_like(master) if master.grad is None else master.grad
        master.grad.copy_(flatten(grads))
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        if parameter.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = parameter.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.copy_(parameter.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies masters to the parameters of a model, rounded to their dtypes.

    Args:
        model_params: parameters from `prep_param_lists`.
        master_params: masters from `prep_param_lists`.
        flat_master: True if there is one master for all parameters.
    """
    masters = unflatten(master_params[0], model_params) if flat_master else master_params
    for parameter, master in zip(model_params, masters, strict=True):
        parameter.copy_(master)


def to_python_float(t: Any) -> float:
    """Returns the number in a tensor of one element, or in a sequence of one number."""
    number: float = t.item() if hasattr(t, "item") else t[0]
    return number

"""Makes a copy of a model for inference: its weights are half if all functions read them in half, and the lists cast.

Must never change the model that it copies, nor torch. What the copy does is in `copied_weights`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ampatch.cast_lists.lists import CastLists
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule
from ampatch.errors import OptionError, warn
from ampatch.grouping import grouped
from ampatch.interfaces.copied_weights import CopiedWeights, State, Weight, before_load_state_dict
from ampatch.interfaces.inference_arguments import check_model, split_excluded
from ampatch.patching import adopted_model, autocast_checks, recurrent_weights
from ampatch.patching.adapters import Function
from ampatch.patching.casting_mode import CastRules
from ampatch.runtime import runtime
from ampatch.torch_private.modules import CALL
from ampatch.torch_private.operators import VF

# torch's own layers, and the only functions that read their weights.
_LAYERS: dict[type[nn.Module], tuple[Function, ...]] = {
    nn.Linear: (F.linear,),
    nn.Bilinear: (F.bilinear,),
    nn.Conv1d: (F.conv1d,),
    nn.Conv2d: (F.conv2d,),
    nn.Conv3d: (F.conv3d,),
    nn.ConvTranspose1d: (F.conv_transpose1d,),
    nn.ConvTranspose2d: (F.conv_transpose2d,),
    nn.ConvTranspose3d: (F.conv_transpose3d,),
    nn.PReLU: (F.prelu,),
    nn.MultiheadAttention: (F.multi_head_attention_forward,),
    nn.RNN: (VF.rnn_tanh, VF.rnn_relu),
    nn.LSTM: (VF.lstm,),
    nn.GRU: (VF.gru,),
    nn.RNNCell: (VF.rnn_tanh_cell, VF.rnn_relu_cell),
    nn.LSTMCell: (VF.lstm_cell,),
    nn.GRUCell: (VF.gru_cell,),
}


class _WrappedMethod:
    """Replaces a method of a module of the copy by which users call the module; runs it by way of `CopiedWeights`."""

    def __init__(self, made: CopiedWeights, module: nn.Module, method: Callable[..., Any], excluded: bool) -> None:
        functools.update_wrapper(self, method)
        self._copy, self._module, self._method, self._excluded = made, module, method, excluded

    @property
    def __code__(self) -> Any:  # torch.export reads the model's place in the source from it
        return self._method.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._excluded:
            return self._copy.run_excluded(self._module, self._method, args, kwargs)
        return self._copy.run(self._method, args, kwargs)


def convert(
    model: object, half_dtype: torch.dtype, excluded: object, lists: CastLists, keep_float32: bool
) -> nn.Module:
    """Returns the copy; see `amp.convert_model`."""
    source = check_model(model)
    check_no_copy(source)
    excluded_paths, functions = split_excluded(source, excluded, lists)
    if functions:
        lists = lists.overlaid([{"blacklist": {path.namespace: [path.name]}} for path in functions])
    rules = CastRules(half_dtype, lists.for_half(half_dtype).values(), _registered())
    _warn_uncast(source, excluded_paths, rules)
    live = runtime.live
    conversion = None if live is None else live.weights.conversion
    if conversion is not None and any(
        conversion.has_master(each) or conversion.kept_float32_values(each) is not None for each in source.parameters()
    ):
        source = copy.deepcopy(source)  # a deep copy of a converted model is float32
    with torch.inference_mode(False), torch.no_grad():  # otherwise its weights would work only in inference mode
        copied = CopiedWeights(rules, keep_float32)
        made = _copied(source, excluded_paths, copied)
    owned = grouped((module, (name, weight)) for weight in copied.weights for module, name in weight.places)
    for path, module in made.named_modules():
        for name in _methods_to_wrap(module, path in excluded_paths):
            module.__dict__[name] = _WrappedMethod(copied, module, getattr(module, name), path in excluded_paths)
        if isinstance(module, nn.RNNBase):
            module.__dict__["check_input"] = functools.partial(_check_input, module)
        if module in owned:
            after = functools.partial(CopiedWeights.after_state_dict, copied, owned[module])
            module.register_state_dict_post_hook(after)
            module.register_load_state_dict_pre_hook(functools.partial(before_load_state_dict, owned[module]))
    return made.eval()


def check_no_copy(module: nn.Module) -> None:
    """Raises `OptionError` if a module is, or contains, a copy that `convert` has made."""
    if any(isinstance(each.__dict__.get("forward"), _WrappedMethod) for each in module.modules()):
        raise OptionError(
            f"this {type(module).__name__} is, or contains, what amp.convert_model has made for inference. Pass the "
            "model that it was made from."
        )


def _copied(source: nn.Module, excluded_paths: Collection[str], copied: CopiedWeights) -> nn.Module:
    """Returns a deep copy, whose weights ``copied`` gets; those that torch's layers read in half are half."""
    holders: dict[int, list[tuple[str, str]]] = {}
    modules = dict(source.named_modules())
    for path, module in modules.items():
        scripted = isinstance(module, torch.jit.ScriptModule)  # the casting mode cannot see its calls
        for name, parameter in () if scripted else module._parameters.items():
            if type(parameter) is Parameter and parameter.dtype is torch.float32:
                holders.setdefault(id(parameter), []).append((path, name))
    copied.are_of_the_model = any(each.dtype is copied.half_dtype for each in source.parameters())
    memo: dict[int, Any] = {}
    planned = []
    for key, places in holders.items():
        parameter = modules[places[0][0]].get_parameter(places[0][1])
        values = parameter.detach()
        state, kept = State.UNREAD, None
        if any(path in excluded_paths for path, _ in places):
            state = State.FLOAT32
        elif all(_reads_in_half(modules[path], copied.rules) for path, _ in places):
            state = State.HALF
            memo[key] = Parameter(values.to(copied.half_dtype), requires_grad=parameter.requires_grad)
            kept = values.to("cpu", copy=True) if copied.keep_float32 else None
        planned.append((places, state, kept))
    made = adopted_model.without_hooks(copy.deepcopy(source, memo))
    recurrent_weights.flatten(made)
    copies = dict(made.named_modules())
    for places, state, kept in planned:
        name = ".".join(filter(None, places[0]))
        copied.weights.append(Weight([(copies[path], each) for path, each in places], name, state, kept))
    return made


def _reads_in_half(module: nn.Module, rules: CastRules) -> bool:
    """Returns True if a module has the forward of a torch layer that passes its weights to whitelisted functions only.

    Of a subclass, other code may read a weight in float32; then `CopiedWeights.full` makes it float32 again.
    """
    for kind, functions in _LAYERS.items():
        if isinstance(module, kind):
            return type(module).forward is kind.forward and all(map(rules.computes_in_half, functions))
    return False


def _check_input(module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
    """Checks the input as if it had the weights' type: the lists cast it later, as `autocast_checks` lets a session do.

    Replaces `nn.RNNBase.check_input`.
    """
    type(module).check_input(module, autocast_checks.of_the_weights_type(module, input), batch_sizes)


def _methods_to_wrap(module: nn.Module, is_excluded: bool) -> tuple[str, ...]:
    """Returns the methods to replace: ``forward``, and ``_call_impl``, which runs hooks and the forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return (CALL,) if is_excluded else ()
    has_forward = "forward" in vars(module) or type(module).forward is not nn.Module.forward
    return ("forward", CALL) if has_forward else ()


def _registered() -> Iterator[tuple[Rule, torch.dtype | None]]:
    """Yields a rule for each function that the user registered, with the half type given for it, or None."""
    for registration in runtime.registered:
        owner: Any = registration.owner
        of_class = isinstance(owner, type)
        namespace = f"{owner.__module__}.{owner.__qualname__}" if of_class else owner.__name__
        yield Rule(Path(namespace, registration.name), registration.treatment, "registered"), registration.dtype


def _warn_uncast(model: nn.Module, excluded_paths: Collection[str], rules: CastRules) -> None:
    if rules.outside_torch:
        names = ", ".join(str(rule.path) for rule in rules.outside_torch[:5])
        warn(
            f"the copy does not cast for {names}: only functions of torch report their calls. Decorate a function of "
            "your own (@amp.half_function, @amp.float_function); for functions of other libraries use amp.initialize."
        )
    for rule, name in rules.reported_as_other[:5]:
        warn(
            f"the copy does not cast for {rule.path} as {rule.source} says: torch reports its calls as those of "
            f"{name!r}. List torch.Tensor.{name}, too."
        )
    scripted = [name for name in adopted_model.scripted_parts(model) if name not in excluded_paths]
    exported = [name for name in adopted_model.exported_parts(model) if name not in excluded_paths]
    if scripted or exported:
        warn(
            f"nothing is cast in {', '.join(scripted + exported)}, which TorchScript or torch.export has compiled: it "
            "computes in the types of its inputs. Use the Python code that it was compiled from; or name it, or the "
            "module that calls it, in excluded=, so that it gets float32."
        )

"""Tests mistakes in calls: each raises one error, which says what to type, and changes nothing.

That torch is as it was is asserted after every test (`conftest.py`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ampatch import amp
from ampatch.errors import AmpError, OptionError, UsageError
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


class Bench:
    """A model and its optimizer, and amp as its user calls it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = self.model(torch.ones(3, 2)).sum()

    def initialize(self, **options: Any) -> None:
        amp.initialize(self.model, self.optimizer, **{"verbosity": 0, **options})

    def scale(self, loss: object = None, optimizers: object = None, **options: Any) -> None:
        loss = self.loss if loss is None else loss
        optimizers = self.optimizer if optimizers is None else optimizers
        with amp.scale_loss(loss, optimizers, **options):
            pytest.fail("the block was entered")

    def state(self) -> Any:
        """All that a failed call must leave alone."""
        live = runtime.live
        return (
            live,
            None if live is None else (live.ledger.patches, [scaler.state for scaler in live.losses.scalers]),
            runtime.disabled,
            list(runtime.registered),
            {name: id(value) for name, value in self.model.state_dict(keep_vars=True).items()},
            [(value.tolist(), value.dtype) for value in self.model.state_dict(keep_vars=True).values()],
            [dict(module._forward_hooks | module._forward_pre_hooks) for module in self.model.modules()],
            dict(vars(self.optimizer)),
            [id(parameter) for parameter in self.optimizer.param_groups[0]["params"]],
        )


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(3, 3).parameters())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(2, 2))


# By name: a call, what its error says, and the class of the error if it is no OptionError.
Mistakes = dict[str, tuple[Any, ...]]


OPTIONS = [
    ({"enabled": "no"}, "enabled is 'no'; expected True, False"),
    ({"opt_level": "01"}, "opt_level is '01'; .*type opt_level='O1'"),
    ({"loss_scale": -1}, "loss_scale is -1; expected a positive"),
    ({"verbosity": "x"}, "verbosity is 'x'; expected a whole number: 0 is silent"),
    ({"verbosity": 1.5}, "verbosity is 1.5; expected a whole number"),
    ({"num_losses": 0}, "num_losses is 0; expected a whole number of at least 1"),
    ({"num_losses": True}, "num_losses is True; expected a whole number of at least 1"),
    ({"num_losses": 1.5}, "num_losses is 1.5; expected a whole number of at least 1"),
    ({"scale_factor": 1}, "scale_factor is 1; expected a number above 1"),
    ({"scale_window": 0}, "scale_window is 0; expected a whole number"),
    ({"scale_window": 2**31}, r"scale_window is 2147483648; expected a whole number of at least 1, below 2\*\*31\."),
    ({"min_loss_scale": 4, "max_loss_scale": 2}, "min_loss_scale=4.0 is above max_loss_scale=2.0"),
    ({"half_dtype": "flaot16"}, r"half_dtype is 'flaot16'; .*Did you mean 'float16'"),
    ({"half_dtype": "torch.bfloat61"}, r"half_dtype is 'torch\.bfloat61'; .*Did you mean 'bfloat16'"),
    ({"half_dtype": "FP16"}, r"half_dtype is 'FP16'; .*Did you mean 'fp16'"),
    ({"patch_torch_functions_type": "bfloat"}, "patch_torch_functions_type is 'bfloat'; .*'bfloat16'"),
    (
        {"opt_level": "O4", "half_dtype": "half"},
        "half_dtype=torch.float16 contradicts opt_level='O4'.*use opt_level='O1'",
    ),
    (
        {"half_dtype": torch.float16, "patch_torch_functions_type": torch.bfloat16},
        "say different things; give one of them",
    ),
    ({"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True contradicts opt_level='O1'.*Leave .* out"),
    ({"cast_model_type": "float23"}, "cast_model_type is 'float23'; expected torch.float32.*Did you mean 'float32'"),
    ({"cast_model_outputs": "hlaf"}, "cast_model_outputs is 'hlaf'; expected a floating type.*Did you mean 'half'"),
    ({"cast_model_outputs": torch.int32}, "cast_model_outputs is torch.int32; expected a floating type"),
    ({"opt_level": "O0", "keep_fp32": [nn.BatchNorm1d]}, "keep_fp32 contradicts opt_level='O0'.*use opt_level='O1'"),
    ({"opt_level": "O2", "cast_lists": {}}, "cast_lists contradicts opt_level='O2'.*patch_torch_functions=True"),
    ({"opt_level": "O2", "keep_fp32": "rest"}, "keep_fp32 has 'rest', which matches .*Its submodules are '0', '1' and"),
    (
        {"opt_level": "O2", "keep_fp32": "1.weight"},
        "keep_fp32 has '1.weight', .*It is a parameter: name its submodule, '1'",
    ),
    (
        {"opt_level": "O2", "keep_fp32": ["softmax"]},
        r"'softmax', which matches no submodule of the model\. Its submodules are '0', '1' and those in them\. To comp",
    ),
    ({"keep_fp32": "F.softmax"}, r"torch's function softmax in float32, type .*'\*': \['softmax'\]"),
    (
        {"keep_fp32": [torch.softmax]},
        r"keep_fp32 has the function softmax; expected names of .*'\*': \['softmax'\]\}\} at O1 or O4",
    ),
    (
        {"keep_fp32": [other_optimizer]},
        r"keep_fp32 has the function other_optimizer; expected names of .* or a list of them\.$",
    ),
    ({"keep_fp32": nn.Linear(2, 2)}, r"keep_fp32 has a Linear; expected .*Type its name, or 'Linear' for all"),
    (
        {"opt_level": "O2", "keep_fp32": ["nn.BatchNorm1d"]},
        "keep_fp32 has 'nn.BatchNorm1d', which .*Type 'torch.nn.BatchNorm1d' or 'BatchNorm1d' for that class",
    ),
    ({"opt_level": "O2", "keep_fp32": 5}, "keep_fp32 has 5; expected names of submodules"),
    ({"opt_level": "O2", "keep_fp32": [int]}, "keep_fp32 has <class 'int'>; expected names"),
    (
        {"opt_level": "O3", "keep_fp32": ["0", "Batchnorm1d"]},
        "keep_fp32 has 'Batchnorm1d', which matches no submodule of the model. Did you mean 'BatchNorm1d'",
    ),
    (
        {"opt_level": "O5", "keep_fp32": nn.BatchNorm2d},
        "keep_fp32 has BatchNorm2d, which matches no submodule.*Did you mean 'BatchNorm1d'",
    ),
]

OBJECTS: Mistakes = {
    "optimizer-first": (
        lambda bench: amp.initialize(bench.optimizer, bench.model),
        r"found SGD as a model; expected a torch\.nn\.Module",
    ),
    "no-optimizer": (
        lambda bench: amp.initialize(bench.model, bench.model.parameters()),
        "found generator as an optimizer, which lacks param_groups, step, zero_grad; expected an object with",
    ),
    "class-for-optimizer": (
        lambda bench: amp.initialize(bench.model, torch.optim.SGD),
        "found the class SGD as an optimizer, which lacks param_groups; expected an object with",
    ),
    "level-in-the-place-of-enabled": (
        lambda bench: amp.initialize(bench.model, bench.optimizer, "O1"),
        r"enabled is 'O1'; expected True, .* takes an opt level by its name: opt_level='O1'\.",
    ),
    "object-in-the-place-of-enabled": (
        lambda bench: amp.initialize(bench.model, bench.optimizer, object()),
        "enabled is <object object at .*; expected True, False or None",
    ),
    "model-handed-to-init": (lambda bench: amp.init(bench.model), r"enabled is Sequential\( \(0\).*; expected True"),
    "optimizer-without-groups": (
        lambda bench: amp.initialize(bench.model, mock.Mock()),
        "found Mock as an optimizer, whose param_groups is 'Mock'; expected a list of mappings",
    ),
    "optimizer-of-another-model": (
        lambda bench: amp.initialize(bench.model, [bench.optimizer, other_optimizer()]),
        r"the Adam updates 2 parameters, and none of them is the model's.*torch\.optim\.SGD\(model\.parameters",
    ),
    "optimizer-of-copies-of-the-weights": (
        lambda bench: amp.initialize(bench.model, torch.optim.SGD([bench.model[0].weight.detach().requires_grad_()])),
        r"the SGD updates 1 parameters, and none of them is the model's.*beside the model's",
    ),
    "parameter-in-two-optimizers-at-O2": (
        lambda bench: amp.initialize(
            bench.model, [bench.optimizer, torch.optim.Adam(bench.model[:1].parameters())], opt_level="O2"
        ),
        r"a parameter of shape \(2, 2\) is in two optimizers.*Put it into one of them only",
        UsageError,
    ),
    "lazy-model-at-O2": (
        lambda bench: amp.initialize([bench.model, nn.LazyLinear(2)], opt_level="O2"),
        "the model's 'weight' has no shape yet, .*Run one batch through the model first",
    ),
    "meta-model-at-O2": (
        lambda bench: amp.initialize([bench.model, nn.Linear(2, 2, device="meta")], opt_level="O2"),
        r"the model's 'weight' is on the device 'meta', .*model\.to_empty",
    ),
    "weights-of-the-other-half-type": (
        lambda _: amp.initialize(nn.Linear(2, 2).half(), opt_level="O5"),
        r"'weight' is torch\.float16, and would be rounded to torch\.bfloat16 for good\. .*half_dtype=torch\.float16",
    ),
    "shared-with-what-is-kept": (
        lambda bench: amp.initialize([bench.model, tied()], opt_level="O2", keep_fp32="1"),
        r"'0\.weight' and '1\.weight' are one tensor, and keep_fp32 keeps only one .* their modules, \['0', '1'\]",
    ),
    "part-of-another-model-at-O2": (
        lambda bench: amp.initialize([bench.model, bench.model[0]], bench.optimizer, opt_level="O2"),
        r"one \(Linear\) is a part of another, .*\(Sequential\).* Hand in the outer one only",
        UsageError,
    ),
    "optimizer-twice-in-a-list": (
        lambda bench: amp.initialize(bench.model, [bench.optimizer, bench.optimizer]),
        "this SGD was handed to amp.initialize before. Hand it in once",
        UsageError,
    ),
}

TOO_EARLY: Mistakes = {
    "scale_loss": (lambda bench: bench.scale(), "amp.scale_loss was called before amp.initialize", UsageError),
    "state_dict": (lambda _: amp.state_dict(), "amp.state_dict was called before", UsageError),
    "load_state_dict": (lambda _: amp.load_state_dict({}), "amp.load_state_dict was called before", UsageError),
    "get_loss_scale": (lambda _: amp.get_loss_scale(), "amp.get_loss_scale was called before", UsageError),
    "step_was_skipped": (
        lambda bench: amp.step_was_skipped(bench.optimizer),
        r"before amp\.initialize\. Type model, optimizer = amp\.initialize\(model, optimizer\) first",
        UsageError,
    ),
    "skipped_steps": (lambda bench: amp.skipped_steps(bench.optimizer), "amp.skipped_steps was called", UsageError),
    "init-options": (
        lambda _: amp.init(half_dtype=torch.float16, patch_type=torch.bfloat16),
        "half_dtype=torch.float16 and patch_type=torch.bfloat16 say different things",
    ),
    "init-half_dtype": (lambda _: amp.init(half_dtype="float6"), "half_dtype is 'float6'; .*Did you mean 'float16'"),
    "init-patch_type": (lambda _: amp.init(patch_type="bfloat6"), "patch_type is 'bfloat6'; .*Did you mean 'bfloat16'"),
    "init-loss-scale": (lambda _: amp.init(loss_scale="static"), "loss_scale is 'static'; expected a positive"),
    **{
        f"{register.__name__}-of-no-function": (
            lambda _, register=register: register(torch, "matmull"),
            "torch has no 'matmull' to register. Did you mean 'matmul'",
        )
        for register in (
            amp.register_half_function,
            amp.register_bfloat16_function,
            amp.register_float_function,
            amp.register_promote_function,
        )
    },
    "register-what-cannot-be-called": (
        lambda _: amp.register_half_function(torch, "__version__"),
        r"torch\.__version__ is .*; expected a function",
    ),
    "register-text": (
        lambda _: amp.register_half_function("torch", "mm"),
        "found the text 'torch'; expected the module or class itself",
    ),
    "decorate-text": (lambda _: amp.half_function("mm"), "found 'mm' to decorate; expected a function"),
    "register-no-name": (
        lambda _: amp.register_half_function(torch, 3),
        "found 3; expected the function's name, such as 'name'",
    ),
    "register-the-function-itself": (
        lambda _: amp.register_half_function(torch, torch.mm),
        "found <.*mm.*>; expected the function's name, such as 'mm'",
    ),
}

ONCE_SET_UP: Mistakes = {
    "script-module": (lambda _: amp.initialize(scripted()), "compiled by TorchScript, .* Hand in the module"),
    "loss-no-tensor": (lambda bench: bench.scale(3.0), "the loss is float; expected a floating tensor"),
    "loss-of-integers": (
        lambda bench: bench.scale(torch.tensor(3)),
        r"the loss is a tensor of torch\.int64; expected a floating tensor",
    ),
    **{
        f"loss_id-{loss_id!r}": (
            lambda bench, loss_id=loss_id: bench.scale(loss_id=loss_id),
            rf"loss_id is {loss_id!r}, and there are 1 losses.*Type amp\.initialize\(\.\.\., num_losses=N\)",
        )
        for loss_id in (1, -1, True, "0", None)
    },
    "get_loss_scale-1": (lambda _: amp.get_loss_scale(1), "loss_id is 1, and there are 1 losses"),
    "optimizer-never-adopted": (
        lambda bench: bench.scale(optimizers=other_optimizer()),
        r"this Adam was never handed to amp\.initialize, .*\. Type: model, optimizer = amp\.initialize",
        UsageError,
    ),
    "one-of-two-never-adopted": (
        lambda bench: bench.scale(optimizers=[bench.optimizer, other_optimizer()]),
        "this Adam was never handed to amp.initialize",
        UsageError,
    ),
    "model-for-optimizer": (
        lambda bench: bench.scale(optimizers=bench.model),
        "found Sequential as an optimizer, which lacks param_groups, step; expected an object with",
    ),
    "no-optimizers": (lambda bench: bench.scale(optimizers=[]), "got no optimizer.*expected one or more"),
    "step_was_skipped-never-adopted": (
        lambda _: amp.step_was_skipped(other_optimizer()),
        "this Adam was never handed to",
        UsageError,
    ),
    "skipped_steps-of-none": (lambda _: amp.skipped_steps(None), "found NoneType as an optimizer"),
    "optimizer-handed-in-again": (
        lambda bench: bench.initialize(),
        r"this SGD was handed to amp\.initialize before.*amp\.deinitialize\(\)",
        UsageError,
    ),
    "init-verbose": (lambda _: amp.init(verbose="no"), "verbose is 'no'; expected True, False"),
    "register-too-late": (
        lambda _: amp.register_half_function(torch, "exp"),
        r"registered before amp\.initialize; type amp\.deinitialize\(\) first",
        UsageError,
    ),
    **{
        f"load_state_dict-{name}": (lambda _, saved=saved: amp.load_state_dict(saved), message)
        for name, saved, message in [
            ("of-a-list", [1], r"found list; expected the dict that amp\.state_dict\(\) returned"),
            ("of-a-model", {"weight": 1}, r"unexpected keys \['weight'\]; expected loss_scaler0"),
            ("of-another-key", {"loss_scaler": {}}, r"unexpected keys \['loss_scaler'\]; expected loss_scaler0"),
            ("of-no-state", {"loss_scaler0": 3.0}, "found float as the state of a loss scaler; expected what"),
            ("of-half-a-state", {"loss_scaler0": {"loss_scale": 2.0}}, r"lacks \['unskipped'\]; expected loss_scale,"),
            (
                "of-nan",
                {"loss_scaler0": {"loss_scale": math.nan, "unskipped": 0}},
                "loss_scale is nan; expected a number",
            ),
        ]
    },
}


def check(bench: Bench, call: Callable[[Bench], object], message: str, kind: type[AmpError] = OptionError) -> None:
    before = bench.state()
    with pytest.raises(kind, match=message) as caught:
        call(bench)
    # One error, and none behind it in the traceback.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert bench.state() == before


@pytest.mark.parametrize(
    ("options", "message"), OPTIONS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_options_that_contradict_or_are_misspelt(options, message):
    check(Bench(), lambda bench: bench.initialize(**options), message)


BEFORE = OBJECTS | TOO_EARLY


@pytest.mark.parametrize("mistake", BEFORE.values(), ids=BEFORE)
def test_mistake_before_amp_is_set_up(mistake):
    check(Bench(), *mistake)


@pytest.mark.parametrize("mistake", ONCE_SET_UP.values(), ids=ONCE_SET_UP)
def test_mistake_once_amp_is_set_up(mistake):
    bench = Bench()
    bench.initialize()
    check(bench, *mistake)


@pytest.mark.slow
def test_object_without_a_name_in_the_place_of_a_function_of_torch_raises(fresh):
    # In a process of its own, as torch builds its tables only once.
    script = (
        "import functools, torch\n"
        "torch.exp = functools.partial(torch.exp)\n"
        "from ampatch import amp\n"
        "try: amp.initialize(torch.nn.Linear(1, 1), verbosity=0)\n"
        "except amp.UsageError as error: print(error)\n"
    )
    run = fresh.run(script)
    assert re.search("no function in the place of one .*__name__.*functools.wraps; `ampatch doctor", run.stdout)

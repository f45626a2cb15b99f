"""Overflows planted in architectures that nobody here made: preflight foretells the place, and the trace names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import SIZES, model_and_inputs
from torch import Tensor, nn

from ampatch import amp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # at an import of transformers
    pytest.mark.filterwarnings("ignore:.*scaled_size_sqrt:ampatch.errors.AmpWarning"),  # of DebertaV2, scripted
    pytest.mark.filterwarnings("ignore:the loss of a skipped step:ampatch.errors.AmpWarning"),
]


class Amplified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e20


def planted(model: nn.Module, direction: str) -> str:
    """Plants an overflow into a layer in the middle of a model, and returns the layer's name."""
    layers = [name for name, each in model.named_modules() if type(each).__name__ in ("Linear", "Conv1D")]
    name = layers[len(layers) // 2]
    layer: Any = model.get_submodule(name)
    if direction == "forward":
        with torch.no_grad():
            layer.weight.copy_(torch.where(layer.weight > 0, 6e4, -6e4))
    else:
        layer.register_forward_hook(lambda module, args, output: Amplified.apply(output))
    return name


def loss_of(outputs: Any) -> Tensor:
    floating = [each for each in outputs.values() if isinstance(each, Tensor) and each.requires_grad]
    return sum(each.float().square().mean() for each in floating)  # type: ignore[return-value]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", SIZES)
def test_a_planted_overflow_is_named(name, direction, opt_level):
    model, inputs = model_and_inputs(name)
    place = planted(model, direction)
    foretold = amp.preflight(model, inputs, loss_of, levels=[(opt_level, "float16")], measure=False).levels[0]
    # In backward a scale may be found that is so low that the gradients vanish before they are amplified.
    assert foretold.verdict in ("overflows", *(["inaccurate"] if direction == "backward" else []))
    events: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=opt_level,
        half_dtype=torch.float16,
        verbosity=0,
        init_scale=64.0,
        on_overflow=("trace", events.append),
    )
    with amp.scale_loss(loss_of(model(**inputs)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (event,) = events
    assert event.gradients
    trace = event.trace
    assert trace.direction == direction
    if direction == "forward":
        assert trace.module == foretold.trace.module == place
        assert trace.function in ("torch.nn.functional.linear", "torch.addmm")
        assert "modeling_" in trace.file or "pytorch_utils" in trace.file
    else:
        assert trace.function == "Amplified"
        if name != "CLIP":  # in which another gradient overflows first, at most scales
            assert foretold.trace.function == "Amplified"
        assert place.startswith(trace.module)
        assert trace.source == "return grad * 1e20"

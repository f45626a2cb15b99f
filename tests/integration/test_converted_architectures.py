"""Of `amp.convert_model`: architectures that nobody here made compute as they do at O1, exported and compiled too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import SIZES, model_and_inputs
from helpers import assert_same_bits
from small_nets import EACH_HALF
from torch import Tensor, nn

from ampatch import amp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # at an import of transformers
    pytest.mark.filterwarnings("ignore:.*scaled_size_sqrt:ampatch.errors.AmpWarning"),  # of DebertaV2, scripted
]

# The sizes of Mixtral's experts depend on values, for which torch's exporter cannot make a program.
EXPORTED = [name for name in SIZES if name != "Mixtral"]


def tensors(outputs: Any) -> list[Tensor]:
    return [value for value in outputs.to_tuple() if isinstance(value, Tensor)]


def assert_same(found: Any, expected: list[Tensor]) -> None:
    for one, other in zip(tensors(found), expected, strict=True):
        assert_same_bits(one, other)


def of_o1(model: nn.Module, half: torch.dtype, inputs: dict[str, Any]) -> list[Tensor]:
    amp.initialize(model, opt_level="O1", half_dtype=half, verbosity=0)
    try:
        return tensors(model(**inputs))
    finally:
        amp.deinitialize()


@EACH_HALF
@pytest.mark.parametrize("name", SIZES)
def test_a_converted_architecture_computes_and_is_saved_as_at_o1(name, half):
    model, inputs = model_and_inputs(name)
    with torch.no_grad():
        expected = of_o1(model, half, inputs)
        made = amp.convert_model(model, half)
        for _ in range(2):
            assert_same(made(**inputs), expected)
    saved = made.state_dict()
    for key, tensor in model.state_dict().items():
        assert_same_bits(saved[key], tensor)
    # From transformers 5 on, experts read their weights through views; these stay float32.
    parameters = [each for key, each in made.named_parameters() if ".experts." not in key]
    half_ones = sum(each.numel() for each in parameters if each.dtype is half)
    assert half_ones > 0.75 * sum(each.numel() for each in parameters)


@EACH_HALF
@pytest.mark.parametrize("name", EXPORTED)
def test_a_converted_architecture_exports_to_the_same_bits(name, half):
    model, inputs = model_and_inputs(name)
    made = amp.convert_model(model, half)
    with torch.no_grad():
        expected = tensors(made(**inputs))
        assert_same(torch.export.export(made, (), inputs).module()(**inputs), expected)

"""That an adopted model of an architecture computes each product in half, as where casts are on for the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import SIZES, model_and_inputs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampatch import amp


class Products(TorchDispatchMode):
    """Notes operators that multiply matrices, with their types."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if any(part in name for part in ("mm", "conv", "attention", "linear", "lstm")):
            self.seen.append((name, next(each.dtype for each in tree_leaves(args) if isinstance(each, Tensor))))
        return function(*args, **(kwargs or {}))


def products_of(model: nn.Module, inputs: dict[str, Any]) -> Iterator[list[tuple[str, torch.dtype]]]:
    """The products of a forward and a backward pass, of one without gradients, and of frozen weights."""
    with Products() as products:
        output = model(**inputs)
        floating = [each for each in tree_leaves(dict(output)) if isinstance(each, Tensor) and each.requires_grad]
        sum(each.float().square().mean() for each in floating).backward()
    yield products.seen
    model.eval()
    with torch.no_grad(), Products() as products:
        model(**inputs)
    yield products.seen
    model.requires_grad_(False)
    with Products() as products:
        model(**inputs)
    yield products.seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of DeBERTa
@pytest.mark.filterwarnings("ignore:TorchScript has compiled transformers")
@pytest.mark.parametrize("name", SIZES)
def test_an_adopted_architecture_has_the_products_of_amp_init(name: str) -> None:
    model, inputs = model_and_inputs(name)
    with amp.init(half_dtype="bfloat16"):
        wanted = list(products_of(model, inputs))
    model, inputs = model_and_inputs(name)
    amp.initialize(model, opt_level="O1", half_dtype="bfloat16", verbosity=0)
    found = list(products_of(model, inputs))
    assert found == wanted
    assert torch.bfloat16 in {dtype for seen in found for _, dtype in seen}

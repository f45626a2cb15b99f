"""`torch.func`, `torch.autograd.grad` and forward-mode derivatives: casts hold, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers import assert_same_state
from small_nets import EACH_DEVICE, EACH_HALF, assert_close
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

from ampatch import amp

# Both are torch's own: its use of TorchScript, and the graph that `linearize` makes of any module.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*deprecated:DeprecationWarning", "ignore:Attempted to insert a get_attr Node:UserWarning"
)


class Network(nn.Module):
    """Products of the whitelist around a norm of the blacklist; one weight is used twice."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.products: list[torch.dtype] = []
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.products.append(hidden.dtype)
        hidden = self.norm(hidden)
        return self.last(torch.tanh(F.linear(hidden.to(x.dtype), self.first.weight)))

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


Parameters = dict[str, Tensor]
Case = Callable[[Network, Parameters, Tensor], Any]


def loss(model: Network, parameters: Parameters, x: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (x,)), torch.zeros(len(x), dtype=torch.long).to(x.device))


def ones_like(parameters: Parameters) -> Parameters:
    return {name: torch.ones_like(value) for name, value in parameters.items()}


def dual(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x))))


def dual_parameters(model: Network, parameters: Parameters, x: Tensor) -> Any:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, torch.ones_like(value)) for name, value in parameters.items()}
        return forward_ad.unpack_dual(functional_call(model, duals, (x,)))


def twice_differentiated(model: Network, _: Parameters, x: Tensor) -> Any:
    first = torch.autograd.grad(loss(model, {}, x), list(model.parameters()), create_graph=True)
    squares = sum(gradient.float().pow(2).sum() for gradient in first)
    return torch.autograd.grad(squares, list(model.parameters()), allow_unused=True)


def batched(model: Network, _: Parameters, x: Tensor) -> Any:
    out = model(x)
    rows = torch.eye(out.numel()).view(-1, *out.shape).to(out)
    return torch.autograd.grad(out, list(model.parameters()), rows, is_grads_batched=True)


def pulled_back(model: Network, parameters: Parameters, x: Tensor) -> Any:
    out, back = vjp(lambda parameters: functional_call(model, parameters, (x,)), parameters)
    return out, back(torch.ones_like(out))


CASES: dict[str, Case] = {
    "grad": lambda m, p, x: grad(lambda p: loss(m, p, x))(p),
    "grad-of-inputs": lambda m, _, x: grad(lambda x: loss(m, {}, x))(x),
    "grad-of-parameters": lambda m, p, x: grad(lambda p: loss(m, p, x))({k: nn.Parameter(v) for k, v in p.items()}),
    "grad-of-its-own-parameters": lambda m, _, x: grad(lambda p: loss(m, p, x))(dict(m.named_parameters())),
    "vmap": lambda m, p, x: vmap(lambda row: functional_call(m, p, (row,)))(x),
    "vmap-of-the-model": lambda m, _, x: vmap(m)(x),
    "vmap-in-chunks": lambda m, _, x: vmap(m, chunk_size=2)(x),
    "gradients-per-sample": lambda m, p, x: vmap(grad(lambda p, row: loss(m, p, row[None])), (None, 0))(p, x),
    "ensemble": lambda m, _, x: vmap(lambda p, b: functional_call(m, (p, b), (x,)))(
        *stack_module_state([Network(x.device), Network(x.device)])
    ),
    "vjp": pulled_back,
    "jvp": lambda m, p, x: jvp(lambda p: functional_call(m, p, (x,)), (p,), (ones_like(p),)),
    "jvp-of-the-model": lambda m, _, x: jvp(m, (x,), (torch.ones_like(x),)),
    "linearize": lambda m, _, x: linearize(m, x)[1](torch.ones_like(x)),
    "functionalize": lambda m, _, x: functionalize(m)(x),
    "jacrev": lambda m, p, x: jacrev(lambda row: functional_call(m, p, (row,)))(x[0]),
    "jacfwd": lambda m, p, x: jacfwd(lambda row: functional_call(m, p, (row,)))(x[0]),
    "hessian": lambda m, p, x: hessian(lambda row: loss(m, p, row[None]))(x[0]),
    "hessian-times-vector": lambda m, p, x: jvp(
        grad(lambda row: loss(m, p, row[None])), (x[0],), (torch.ones(6).to(x),)
    ),
    "autograd.grad": lambda m, _, x: torch.autograd.grad(loss(m, {}, x), list(m.parameters())),
    "autograd.grad-twice": twice_differentiated,
    "autograd.grad-batched": batched,
    "autograd.functional.hessian": lambda m, _, x: torch.autograd.functional.hessian(lambda x: loss(m, {}, x), x),
    "autograd.functional.jacobian": lambda m, _, x: torch.autograd.functional.jacobian(
        m, x, vectorize=True, strategy="forward-mode"
    ),
    "forward-mode": lambda m, _, x: dual(m, x),
    "forward-mode-of-parameters": dual_parameters,
}

# Derivatives of derivatives lose more.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


def leaves(value: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@EACH_HALF
@EACH_DEVICE
@pytest.mark.parametrize("case", CASES)
class TestTransforms:
    @pytest.mark.covering(1)
    def test_transforms_cast_and_neither_use_nor_leave_casts_of_weights(self, case, half, device):
        x = torch.linspace(-1, 1, 24, device=device).view(4, 6)
        plain = Network(device)
        expected = leaves(CASES[case](plain, plain.values(), x))
        model = amp.initialize(Network(device), half_dtype=half, verbosity=0)
        cold = leaves(CASES[case](model, model.values(), x))
        assert set(model.products) == {half}
        assert_close(cold, expected, TOLERANCE[half])
        after = torch.autograd.grad(loss(model, {}, x), list(model.parameters()))
        amp.clear_cache()
        alone = torch.autograd.grad(loss(model, {}, x), list(model.parameters()))
        warm = leaves(CASES[case](model, model.values(), x))
        assert_same_state([*warm, *after], [*cold, *alone])


@EACH_HALF
class TestFunctionalParameters:
    def test_a_learning_step_within_a_gradient_uses_its_parameters(self, half):
        model = amp.initialize(nn.Linear(4, 1, bias=False), half_dtype=half, verbosity=0)
        x = torch.ones(2, 4)

        def after_a_step(parameters: Parameters) -> Tensor:
            inner = grad(lambda p: functional_call(model, p, (x,)).float().pow(2).mean())(parameters)
            stepped = {name: value - 0.125 * inner[name] for name, value in parameters.items()}
            return functional_call(model, stepped, (x,)).float().pow(2).mean()

        # Every number here is exact: the weights sum to 4, the inner gradient is 8 each, the stepped weights are 0.
        outer = grad(after_a_step)({"weight": torch.ones(1, 4)})
        assert torch.equal(outer["weight"], torch.zeros(1, 4))
        assert float(after_a_step({"weight": torch.full((1, 4), 0.5)})) == 0.0


@EACH_HALF
@EACH_DEVICE
class TestHalfWeights:
    """At O2 the model's forward brings half weights and masters into step, which is no part of what is transformed."""

    @pytest.mark.parametrize(
        "case", ["grad", "grad-of-inputs", "gradients-per-sample", "vmap", "hessian", "forward-mode"]
    )
    def test_transforms_before_any_forward_pass_leave_masters(self, case, half, device):
        x = torch.linspace(-1, 1, 24, device=device).view(4, 6)
        plain, model = Network(device), Network(device)
        if device == "cuda" and case in ("hessian", "forward-mode"):
            # Forward-mode derivatives of torch's layer_norm are float32 there, and the next half layer refuses them.
            plain.norm, model.norm = nn.Identity(), nn.Identity()
        expected = leaves(CASES[case](plain, plain.values(), x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, verbosity=0)
        masters = [master.detach().clone() for master in amp.master_params(optimizer)]
        with torch.no_grad():
            next(amp.master_params(optimizer)).mul_(1.0)  # so that there is something to be brought into step
        assert_close(leaves(CASES[case](model, model.values(), x)), expected, TOLERANCE[half])
        assert_same_state(list(amp.master_params(optimizer)), masters)

    @pytest.mark.parametrize(
        "transform",
        [
            pytest.param(vmap, id="vmap"),
            pytest.param(lambda m: lambda x: functional_call(m, {"weight": torch.zeros(4, 4).to(x)}, (x,)), id="call"),
        ],
    )
    def test_masters_written_before_a_transform_count_in_the_next_forward_pass(self, transform, half, device):
        model = nn.Linear(4, 4, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, verbosity=0)
        x = torch.ones(2, 4, dtype=half, device=device)
        with torch.no_grad():
            next(amp.master_params(optimizer)).fill_(1.0)
        transform(model)(x)
        assert torch.equal(model(x), torch.full((2, 4), 4.0, device=device))

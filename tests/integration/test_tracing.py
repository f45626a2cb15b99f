"""`torch.export`, `torch.jit.trace`, `make_fx`: graphs hold the casts. TorchScript: left alone, and said so."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, assert_same_state
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError

# All of them are torch's own: of its use of TorchScript and of itself, of what its recurrent layers ask of shapes, and
# (up to torch 2.11) of the buffer that it loads an exported program from.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*deprecated:DeprecationWarning",
    "ignore:.*LeafSpec.*deprecated:FutureWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore:The given buffer is not writable:UserWarning",
    "ignore:The tensor attributes .*_flat_weights:UserWarning",
)


class Mixed(nn.Module):
    """Functions of every list, by name, as methods and as operators, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear, self.norm = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(self.convolution(x[:, None])[:, 0])
        hidden = self.norm(hidden) @ self.linear.weight
        softened = hidden.matmul(hidden.t()).softmax(-1)
        return hidden, softened, torch.cross(hidden[:, :3], x[:, :3], dim=-1), F.normalize(hidden, dim=-1)


class Recurrent(nn.Module):
    """Layers that torch runs through functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.cell = nn.LSTM(6, 6), nn.GRUCell(6, 6)
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.lstm(x)[0], self.cell(x), self.attention(x)


def exported(strict: bool) -> Callable[[nn.Module, Tensor], Callable[[Tensor], Any]]:
    return lambda model, x: torch.export.export(model, (x,), strict=strict).module()


def decomposed(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    return torch.export.export(model, (x,)).run_decompositions().module()


def of_any_length(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    length = torch.export.Dim("length", min=2)
    return torch.export.export(model, (x,), dynamic_shapes=({0: length},)).module()


def loaded(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    return torch.export.load(file).module()


TRACERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Any]]] = {
    "export": exported(False),
    "export-strict": exported(True),
    "export-decomposed": decomposed,
    "export-any-length": of_any_length,
    "export-loaded": loaded,
    "jit-trace": lambda model, x: torch.jit.trace(model, (x,)),
    "make-fx": lambda model, x: make_fx(model)(x),
}


def inputs(device: str) -> Tensor:
    return torch.linspace(-1, 1, 24, device=device).view(4, 6)


@EACH_HALF
@EACH_DEVICE
class TestGraphs:
    @pytest.mark.slow_on_cpu
    @pytest.mark.parametrize("tracer", TRACERS)
    @pytest.mark.parametrize("made_of", [Mixed, pytest.param(Recurrent, marks=pytest.mark.slow)])
    @pytest.mark.covering(1)
    def test_graphs_run_after_amp_as_the_model_ran_under_it(self, made_of, tracer, half, device):
        if made_of is Recurrent and tracer in ("export-decomposed", "export-any-length"):
            pytest.skip("torch 2.13 decomposes an LSTM into others' arithmetic, and bakes its length in")
        model = amp.initialize(made_of().to(device), half_dtype=half, verbosity=0)
        x = inputs(device)
        expected = model(x)
        assert half in {out.dtype for out in expected}
        run = TRACERS[tracer](model, x)
        under_amp = run(x)
        amp.deinitialize()
        assert_same_state(run(x), under_amp)
        if tracer == "export-decomposed":  # other operators round otherwise
            torch.testing.assert_close(under_amp, expected, rtol=2e-2, atol=2e-2)
        else:
            assert_same_state(under_amp, expected)

    @pytest.mark.parametrize("tracer", ["export", "export-strict", "jit-trace"])
    @pytest.mark.covering(1)
    def test_graphs_hold_no_casts_from_the_cache(self, tracer, half, device):
        model = amp.initialize(nn.Linear(6, 6).to(device), half_dtype=half, verbosity=0)
        x = inputs(device)
        model(x)
        run = TRACERS[tracer](model, x)
        with torch.no_grad():
            model.weight.mul_(2)
        assert_same_bits(run(x).detach(), model(x).detach())

    @pytest.mark.slow_on_cpu
    def test_graphs_train_as_the_model_does(self, half, device):
        model = amp.initialize(Mixed().to(device), half_dtype=half, verbosity=0)
        x = inputs(device)
        run = exported(True)(model, x)
        for function in (run, model):
            sum(out.float().pow(2).sum() for out in function(x)).backward()
        for name, parameter in model.named_parameters():
            gradient = run.get_parameter(name).grad
            assert gradient.abs().sum() > 0
            room = float(parameter.grad.abs().max()) * (1e-2 if half is torch.float16 else 1e-1)
            assert float((gradient - parameter.grad).abs().max()) <= room

    @pytest.mark.parametrize("tracer", ["export", "export-strict", "jit-trace", "make-fx"])
    @pytest.mark.covering(1)
    def test_graphs_hold_no_casts_of_regions_without_casts(self, tracer, half, device):
        class Partly(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                with amp.disable_casts():
                    uncast = x @ x.t()
                return uncast, x @ x.t()

        model = amp.initialize(Partly(), half_dtype=half, verbosity=0)
        x = inputs(device)
        run = TRACERS[tracer](model, x)
        amp.deinitialize()
        assert [out.dtype for out in run(x)] == [torch.float32, half]


@EACH_HALF
@EACH_DEVICE
class TestHalfWeights:
    @pytest.mark.parametrize("tracer", ["export", "export-strict", "export-loaded", "jit-trace", "make-fx"])
    def test_graphs_of_half_models_cast_inputs_and_outputs(self, tracer, half, device):
        # Before any other forward pass, which would copy masters to weights: that must not be traced.
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, verbosity=0)
        masters = [master.detach().clone() for master in amp.master_params(optimizer)]
        with torch.no_grad():
            next(amp.master_params(optimizer)).mul_(1.0)  # so that there is something to be brought into step
        x = inputs(device)
        run = TRACERS[tracer](model, x)
        assert run(x).dtype is torch.float32
        assert_same_bits(run(x).detach(), model(x).detach())
        assert_same_state(list(amp.master_params(optimizer)), masters)


@torch.no_grad()
def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


def _doubled(x: Tensor) -> Tensor:
    return x + x


doubled = scripted(_doubled)


class CallsScripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


class HoldsScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = doubled

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def with_scripted_part() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), scripted(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))


def with_traced_part() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)))


@EACH_HALF
class TestTorchScript:
    @pytest.mark.parametrize(
        ("make", "named"),
        [
            pytest.param(with_scripted_part, "has compiled 1:", id="module"),
            pytest.param(with_traced_part, "has compiled 1:", id="traced-module"),
            pytest.param(lambda: nn.ModuleList([HoldsScripted()]), "has compiled 0.activation:", id="attribute"),
            pytest.param(CallsScripted, rf"has compiled {__name__}.doubled:", id="global"),
        ],
    )
    @pytest.mark.covering(1)
    def test_scripted_parts_of_a_model_warn_once(self, make, named, half):
        model = make()
        with pytest.warns(AmpWarning, match=named) as caught:
            amp.initialize(model, half_dtype=half, verbosity=0)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        amp.initialize(model, half_dtype=half, verbosity=0)  # known by now

    def test_scripted_parts_are_not_cast(self, half):
        model = with_scripted_part()
        with pytest.warns(AmpWarning, match="TorchScript"):
            amp.initialize(model, half_dtype=half, verbosity=0)
        assert model[0](torch.ones(2, 4)).dtype is half
        assert model[1](torch.ones(2, 4)).dtype is torch.float32
        assert model[1](model[0](torch.ones(2, 4)).float()).dtype is torch.float32

    def test_models_without_scripted_parts_do_not_warn(self, half):
        amp.initialize(nn.TransformerEncoderLayer(4, 2), half_dtype=half, verbosity=0)

    def test_scripted_parts_cannot_be_converted(self, half):
        model = with_scripted_part()
        before = [parameter.dtype for parameter in model.parameters()]
        with pytest.raises(OptionError, match="'1' was compiled by TorchScript"):
            amp.initialize(model, opt_level="O2", half_dtype=half, verbosity=0)
        assert [parameter.dtype for parameter in model.parameters()] == before

    @EACH_LEVEL
    def test_a_scripted_model_raises(self, level, half):
        with pytest.raises(OptionError, match="compiled by TorchScript"):
            amp.initialize(scripted(nn.Linear(4, 4)), opt_level=level, half_dtype=half)

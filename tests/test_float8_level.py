"""O6: O5 with float8 products in linear layers, by `lists/float8.yaml`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import CastListError, OptionError
from ampatch.patching import scaled_products

BFLOAT16 = torch.bfloat16


class Network(nn.Module):
    """A small transformer whose submodules have the names of common libraries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, 64)
        self.input_projection = nn.Linear(64, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(64, 48)

    def forward(self, given: Tensor) -> Tensor:
        return self.lm_head(self.layer(self.input_projection(self.embed(given))))


def batch() -> Tensor:
    return torch.arange(32).view(4, 8) % 48


def set_up(model: nn.Module, opt_level: str = "O6", **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch()).float().flatten(0, 1), batch().flatten())
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the second matrices of all float8 products."""
    found: list[tuple[int, ...]] = []
    scaled_products._devices()  # which multiplies once in a process
    multiply = scaled_products.scaled_mm

    def noted(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(tuple(right.shape))
        return multiply(left, right, *args, **kwargs)

    monkeypatch.setattr(scaled_products, "scaled_mm", noted)
    return found


#: The weights of the layer between the first and the last one, as second matrices of its forward pass.
INNER = [(64, 192), (64, 64), (64, 128), (128, 64)]


def test_it_trains_as_o5_does_in_float8_but_for_first_and_last_layer(shapes) -> None:
    model, optimizer = set_up(Network(), "O5")
    expected = losses(model, optimizer, 30)
    amp.deinitialize()
    model, optimizer = set_up(Network())
    model(batch())
    assert shapes == INNER
    found = losses(model, optimizer, 30)
    assert found[-1] < found[0] / 3
    assert found[-1] == pytest.approx(expected[-1], rel=0.1)
    assert found != expected
    assert {each.dtype for each in model.parameters() if each.dim() > 1} == {BFLOAT16}
    assert {each.dtype for each in amp.master_params(optimizer)} == {torch.float32}


def test_its_checkpoint_is_float32_and_goes_on_exactly() -> None:
    model, optimizer = set_up(Network())
    losses(model, optimizer, 3)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
    expected = losses(model, optimizer, 3)
    amp.deinitialize()
    assert {each.dtype for each in saved["model"].values()} == {torch.float32}
    model, optimizer = set_up(Network())
    for part, each in (("model", model), ("optimizer", optimizer), ("amp", amp)):
        each.load_state_dict(saved[part])
    assert losses(model, optimizer, 3) == expected


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"modules": {"layer.linear1": {"whitelist": ["linear"]}}}, [INNER[0], INNER[1], INNER[3]]),
        ({"modules": {"layer.linear1": "float32"}}, [INNER[0], INNER[1], INNER[3]]),
        ({"modules": {"layer.*": {"whitelist": ["linear"]}}}, []),
        ({"whitelist": {"torch.nn.functional": ["linear"]}}, []),
        ({"modules": {"*lm_head": {}}}, [*INNER, (64, 48)]),
    ],
)
def test_a_users_file_takes_parts_out_or_puts_them_in(lists, expected, shapes) -> None:
    model, _ = set_up(Network(), cast_lists=lists)
    model(batch())
    assert shapes == expected


@pytest.mark.parametrize(
    "lists",
    [
        {"modules": {"layer": {"blacklist": {"torch": [{"name": "softmax", "format": "e5m4"}]}}}},
        {"modules": {"layer.*": {"format": "e3m4"}, "layer.linear1": {"whitelist": ["linear"]}}},
    ],
)
def test_a_part_may_have_formats_at_a_level_with_half_weights(lists) -> None:
    model, _ = set_up(Network(), "O5", cast_lists=lists)
    assert model(batch()).isfinite().all()


def test_a_format_of_a_part_replaces_that_of_the_level(shapes) -> None:
    part = {"format": "e3m4", "whitelist": {"torch.nn.functional": [{"name": "softmax", "format": "float16"}]}}
    model, _ = set_up(Network(), cast_lists={"modules": {"layer": part}})
    model(batch())
    assert shapes == []
    with amp.report() as report:
        model(batch())
    formats = {row["name"]: row["format"] for row in report.to_dict()["functions"]}
    assert "format e3m4" in formats["torch.nn.functional.linear"]


def test_only_the_users_entries_must_match_a_submodule() -> None:
    set_up(nn.Sequential(nn.Linear(16, 16)))  # without any of the names in the file
    amp.deinitialize()
    with pytest.raises(CastListError, match="modules has 'tokens_out', which matches no submodule"):
        set_up(Network(), cast_lists={"modules": {"tokens_out": {"whitelist": ["linear"]}}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"half_dtype": "float16"}, "opt_level='O6', which is torch.bfloat16"),
        ({"cast_lists": {"modules": {"layer": {"whitelist": ["softmax"]}}}}, "cast_lists has an entry for 'layer'"),
        ({"cast_lists": {"whitelist": {"torch": ["cumsum"]}}}, "applies only entries with needs_float32 or format"),
        ({"cast_model_type": False}, "cast_model_type=False contradicts opt_level='O6', whose lists need half weights"),
        ({"cast_lists": {}}, "applies only entries with needs_float32 or format"),
        (
            {"cast_lists": {"blacklist": {"*": ["matmul"]}, "modules": {"layer": "float32"}}},
            "change none of those beside `modules`",
        ),
        ({"cast_lists": {"blacklist": {"*": ["linear"]}}}, "linear in the blacklist, and this level applies no lists"),
        ({"cast_lists": {"modules": {"layer": {"promote": ["linear"]}}}}, "cast_lists has an entry for 'layer'"),
    ],
)
def test_what_the_level_cannot_do_is_said(options, message) -> None:
    with pytest.raises(OptionError, match=message):
        set_up(Network(), **options)


@pytest.mark.parametrize("opt_level", ["O2", "O3", "O5"])
def test_a_part_is_taken_out_of_a_format_at_every_level_with_half_weights(opt_level, shapes) -> None:
    formats = {"format": {"name": "float8_e4m3", "products": "device"}, "grad": "float8_e5m2"}
    lists = {
        "whitelist": {"torch.nn.functional": [{"name": "linear", **formats}]},
        "modules": {"layer.linear2": {"whitelist": ["linear"]}},
    }
    half = {} if opt_level == "O5" else {"half_dtype": "bfloat16"}
    model, _ = set_up(Network(), opt_level, cast_lists=lists, **half)
    model(batch())
    assert shapes == [(64, 64), *INNER[:3], (64, 48)]


def test_the_level_is_undone_and_told() -> None:
    linear = F.linear
    model, _ = set_up(Network())
    assert amp.settings()["opt_level"] == "O6"
    assert amp.settings()["cast_lists"] == ["float8.yaml"]
    assert "format {name: float8_e4m3, products: device}" in " ".join(str(amp.explain(F.linear)).split())
    amp.deinitialize()
    assert F.linear is linear
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_a_checkpoint_of_o5_tells_that_the_level_differs() -> None:
    set_up(Network(), "O5")
    saved = amp.state_dict(include_policy=True)
    amp.deinitialize()
    set_up(Network())
    with pytest.warns(amp.AmpWarning, match="opt_level: 'O5' -> 'O6'"):
        amp.load_state_dict(saved)


def test_a_block_without_casts_in_a_forward_multiplies_in_half(shapes) -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 48)

        def forward(self, given: Tensor) -> Tensor:
            with amp.disable_casts():
                given = self.first(given.to(BFLOAT16))
            return self.second(given)

    amp.initialize(Guarded(), opt_level="O6", verbosity=0)(torch.randn(4, 32))
    assert shapes == [(32, 48)]


class Transposed(nn.Module):
    """A linear layer as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 48) / 6), nn.Parameter(torch.randn(48))

    def forward(self, given: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, given.view(-1, given.shape[-1]), self.weight)
        return rows.view(*given.shape[:-1], 48)


def test_transposed_linear_layers_are_multiplied_too(shapes) -> None:
    layer, given = Transposed(), torch.randn(2, 3, 32)
    exact = layer(given).detach()
    model = amp.initialize(nn.Sequential(layer), opt_level="O6", verbosity=0)
    out = model(given)
    out.sum().backward()
    assert shapes == [(32, 48), (16, 32)]
    assert ((out - exact).norm() / exact.norm()).item() < 0.1


def test_compare_tells_what_it_changes() -> None:
    result = amp.compare(Network(), batch(), lambda out: out.float().square().mean(), "O5", "O6")
    assert "O6 bfloat16" in str(result)


def test_preflight_tries_it() -> None:
    result = amp.preflight(Network(), batch(), lambda out: out.float().square().mean(), levels=["O5", "O6"])
    five, six = result.levels
    assert (six.opt_level, six.verdict) == ("O6", "passes")
    assert six.gradient_error > five.gradient_error
    assert 'opt_level="O6")' in str(result)

"""``format`` in the cast lists: calls compute as if in a number format, at each level, however their code runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.casting.rounding import rounded
from ampatch.errors import AmpWarning, BannedFunctionError, CastListError, OptionError, UsageError
from ampatch.formats import Format, named

BFLOAT16 = torch.bfloat16
SCALED = {"whitelist": {"torch.nn.functional": [{"name": "linear", "format": "float8_e4m3", "grad": "float8_e5m2"}]}}
UNSCALED = {"whitelist": {"torch.nn.functional": [{"name": "linear", "format": "e3m2"}]}}
FIRST = {"modules": {"0": {"format": "e3m2"}}}
BY_LEVEL = pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])


def linear(*entry: Any, **options: Any) -> dict[str, Any]:
    """Returns lists in which ``torch.nn.functional.linear`` has options."""
    return {"whitelist": {"torch.nn.functional": [{"name": "linear", **options}]}}


def set_up(model: nn.Module, lists: object, opt_level: str = "O4", **options: Any) -> nn.Module:
    half = {} if opt_level in ("O4", "O5") else {"half_dtype": "bfloat16"}
    return amp.initialize(model, opt_level=opt_level, cast_lists=lists, verbosity=0, **half, **options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def inputs(rows: int = 5) -> Tensor:
    return torch.linspace(-3, 3, rows * 8).view(rows, 8).sin()


def gradients(model: nn.Module, given: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(given).float().square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def by_hand(layer: nn.Linear, given: Tensor, grad: Tensor, row: Format, of_grad: Format) -> list[Tensor]:
    """Returns the result of a linear layer, and the gradients of its input and weight, by rounding around products."""
    computes = BFLOAT16 if row.is_within(BFLOAT16) else torch.float32
    x, weight = rounded(given, row, computes), rounded(layer.weight.detach(), row, computes)
    coming = rounded(grad.to(BFLOAT16), of_grad, computes)
    result = F.linear(x, weight, layer.bias.detach().to(computes)).to(BFLOAT16)
    return [result, (coming @ weight).float(), (coming.t() @ x).float()]


@pytest.mark.parametrize(
    ("lists", "row", "of_grad"),
    [(SCALED, named("float8_e4m3"), named("float8_e5m2")), (UNSCALED, named("e3m2"), named("e3m2"))],
    ids=["scaled", "unscaled"],
)
@BY_LEVEL
def test_a_call_is_computed_from_rounded_values_and_gradients(opt_level, lists, row, of_grad) -> None:
    layer = nn.Linear(8, 4)
    if opt_level in ("O2", "O3", "O5"):
        layer.to(BFLOAT16).float()  # so that half weights are the weights
    same, given, grad = copy.deepcopy(layer), inputs().requires_grad_(), torch.linspace(-1, 2, 20).view(5, 4).exp()
    model = set_up(nn.Sequential(layer), lists, opt_level)
    out = model(given)
    with amp.disable_casts():
        expected = by_hand(same, given.detach(), grad, row, of_grad)
    out.backward(grad.to(out.dtype))
    assert torch.equal(out.to(BFLOAT16), expected[0])
    torch.testing.assert_close(given.grad, expected[1], rtol=1e-2 if computes_in_half(row) else 1e-6, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad.float(), expected[2], rtol=1e-2, atol=1e-6)


def computes_in_half(row: Format) -> bool:
    return row.is_within(BFLOAT16)


def test_a_blacklisted_function_is_rounded_and_computes_in_float32() -> None:
    model = set_up(net(), {"blacklist": {"torch": [{"name": "tanh", "format": "e4m3"}]}})
    given = inputs().to(BFLOAT16)
    found = []
    model[1].register_forward_hook(lambda *_: found.append(torch.tanh(given)))
    model(inputs())
    assert found[0].dtype is torch.float32
    assert torch.equal(found[0], rounded(given, named("e4m3"), torch.float32).tanh())


@BY_LEVEL
@pytest.mark.parametrize("key", ["0", "0*", "Wide", "0.*"])
def test_a_part_of_a_model_computes_in_its_format_and_the_rest_does_not(opt_level, key) -> None:
    class Wide(nn.Sequential):
        pass

    model = nn.Sequential(Wide(nn.Linear(8, 16)), nn.Linear(16, 4))
    alike = copy.deepcopy(model)
    seen: list[Tensor] = []
    given = inputs().to(BFLOAT16).float()
    model = set_up(model, {"modules": {key: {"format": "e2m1"}}}, opt_level)
    model[0][0].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    model[1].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    model(given)
    weights = [layer.weight.detach() for layer in (alike[0][0], alike[1])]
    row = named("e2m1")
    if opt_level in ("O2", "O3", "O5"):
        weights = [weight.to(BFLOAT16) for weight in weights]
    with amp.disable_casts():
        x, weight = rounded(given, row, BFLOAT16), rounded(weights[0], row, BFLOAT16)
        first = F.linear(x, weight, alike[0][0].bias.detach().to(BFLOAT16))
        second = F.linear(first, weights[1].to(BFLOAT16), alike[1].bias.detach().to(BFLOAT16))
    assert torch.equal(seen[0], first)
    assert torch.equal(seen[1].to(BFLOAT16), second)


def test_parts_have_a_format_each() -> None:
    model, given = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), inputs()
    found = []
    for names in (("e2m1", "e3m5"), ("e2m1", "e2m1"), ("e3m5", "e3m5")):
        parts = {str(place): {"format": name} for place, name in enumerate(names)}
        found.append(set_up(copy.deepcopy(model), {"modules": parts})(given))
        amp.deinitialize()
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_functions_own_format_comes_before_that_of_the_part() -> None:
    part = {"format": "e2m1", "whitelist": {"torch.nn.functional": [{"name": "linear", "format": "e3m5"}]}}
    model = net()
    expected = set_up(copy.deepcopy(model), linear(format="e3m5"))(inputs())
    amp.deinitialize()
    model = set_up(model, {"modules": {"0": part, "2": part}})
    assert torch.equal(model(inputs()), expected)


LATER = [
    ({"whitelist": {"*": [{"name": "linear", "format": "e5m1"}]}}, "format e5m1"),
    ({"blacklist": {"*": ["linear"]}}, None),
    ({"unlisted": {"*": ["linear"]}}, None),
]


@pytest.mark.parametrize("pattern", [{}, {"promote": {"torch.nn.functional": ["*_loss"]}}], ids=["names", "pattern"])
@pytest.mark.parametrize(("other", "expected"), LATER, ids=["format", "blacklist", "unlisted"])
@pytest.mark.parametrize("is_same_file", [False, True])
@pytest.mark.filterwarnings("ignore:.*it calls functions that undo this")
def test_a_later_file_decides_over_earlier_ones(is_same_file, other, expected, pattern) -> None:
    def format_of_the_part(*files: dict[str, Any]) -> Any:
        model = set_up(net(), list(files), "O1")
        with amp.report() as report:
            model[0](inputs())
        found = {row["name"]: row["format"] for row in report.to_dict()["functions"]}["torch.nn.functional.linear"]
        amp.deinitialize()
        return found

    first = SCALED | pattern
    assert "format e3m2" in format_of_the_part(first, FIRST)
    files = [FIRST | other] if is_same_file else [FIRST, other]
    assert format_of_the_part(*files) == format_of_the_part(first, *files) == expected


def test_an_empty_entry_takes_a_part_out_of_the_format_around_it() -> None:
    model = nn.Sequential(net())
    expected = set_up(copy.deepcopy(model), None)(inputs())
    amp.deinitialize()
    lists = {"modules": {"0": {"format": "e2m1"}, "0.0": {}, "0.2": {}}}
    for opt_level in ("O4", "O5"):
        found = set_up(copy.deepcopy(model), lists, opt_level)(inputs())
        assert torch.allclose(found.float(), expected.float(), atol=0.02), opt_level
        amp.deinitialize()


@pytest.mark.parametrize("format", ["bfloat16", "float16", "float32"])
def test_a_format_that_torch_computes_in_is_torchs(format) -> None:
    model, seen = set_up(net(), linear(format=format)), []
    model[0].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    model(inputs())
    assert seen == [getattr(torch, format)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in torch's compiler
@pytest.mark.parametrize("lists", [SCALED, UNSCALED, FIRST], ids=["scaled", "unscaled", "part"])
@pytest.mark.parametrize("opt_level", ["O1", "O5"])
def test_torch_compile_traces_one_graph_with_the_same_bits(opt_level, lists) -> None:
    model = set_up(net(), lists, opt_level)
    eager = gradients(model, inputs())
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, backend=counter, fullgraph=True), inputs())
    assert counter.frame_count == 1
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_part_draws_its_stochastic_rounding_again(use_reentrant) -> None:
    lists = linear(format={"name": "e3m2", "rounding": "stochastic"}, grad="float32")
    model, given = set_up(net(), lists), inputs().requires_grad_()
    torch.manual_seed(1)
    plain = gradients(model, given)
    torch.manual_seed(1)
    model.zero_grad()
    hidden = checkpoint(lambda x: model[1](model[0](x)), given, use_reentrant=use_reentrant)
    model[2](hidden).float().square().sum().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(plain, model.parameters(), strict=True))


def test_rounding_to_the_nearest_draws_no_random_numbers() -> None:
    model, before = set_up(net(), SCALED), torch.get_rng_state()
    gradients(model, inputs())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_backward_pass_goes_through_the_rounding() -> None:
    model, given = set_up(net(), linear(format="e5m9", grad="e5m9")), inputs().requires_grad_()
    (slope,) = torch.autograd.grad(model(given).float().square().sum(), given, create_graph=True)
    slope.square().sum().backward()
    found = given.grad.clone()
    amp.deinitialize()
    plain, again = net(), inputs().requires_grad_()
    (slope,) = torch.autograd.grad(plain(again).square().sum(), again, create_graph=True)
    slope.square().sum().backward()
    torch.testing.assert_close(found, again.grad, rtol=0.1, atol=0.1)


def test_transforms_of_torch_func_go_through_the_rounding() -> None:
    model = set_up(net(), UNSCALED)
    slopes = torch.func.vmap(torch.func.grad(lambda x: model(x[None]).float().sum()))(inputs())
    given = inputs().requires_grad_()
    model(given).float().sum().backward()
    torch.testing.assert_close(slopes, given.grad)


def test_masters_keep_what_a_format_would_lose() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", cast_lists=SCALED, verbosity=0)
    start = [master.clone() for master in amp.master_params(optimizer)]
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(inputs()) - 1).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = [(new - old).abs().max().item() for old, new in zip(start, amp.master_params(optimizer), strict=True)]
    assert losses[-1] < losses[0] * 0.95
    assert all(each > 0 for each in moved)


def test_casts_that_are_off_round_nothing() -> None:
    set_up(net(), UNSCALED)
    with amp.disable_casts():
        given, weight = inputs().requires_grad_(), torch.ones(3, 8) / 3
        assert torch.equal(F.linear(given, weight), given @ weight.t())


@pytest.mark.parametrize("lists", [UNSCALED, {"modules": {"*": {"format": "e3m2"}}}], ids=["function", "part"])
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3", "O4", "O5"])
def test_parts_kept_in_float32_are_not_rounded(opt_level, lists) -> None:
    model, seen = set_up(net(), lists, opt_level, keep_fp32=["2"]), []
    model[2].register_forward_hook(lambda _, given, out: seen.extend([given[0], out]))
    model(inputs())
    with amp.disable_casts():
        expected = F.linear(seen[0].float(), model[2].weight, model[2].bias)
    assert torch.equal(seen[1].float(), expected.to(seen[1].dtype).float())


def test_a_format_of_torchs_writes_in_place_and_leaves_other_code_alone() -> None:
    set_up(net(), {"whitelist": {"*": [{"name": "add", "format": "float16"}]}})
    written = torch.ones(3)
    assert written.add_(torch.ones(3)) is written
    assert torch.equal(written, torch.full((3,), 2.0))
    assert (torch.ones(3) + torch.ones(3)).dtype is torch.float32  # no model's


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.elu(x, inplace=True),
        lambda x: x.sigmoid_(),
        lambda x: F.embedding(torch.arange(2), x.view(3, 1), max_norm=1.0),
    ],
    ids=["inplace=", "name", "max_norm="],
)
def test_a_call_that_would_write_to_its_argument_is_refused(call) -> None:
    lists = {
        "blacklist": {
            "*": [{"name": "sigmoid", "format": "e3m2"}],
            "torch.nn.functional": [{"name": name, "format": "e3m2"} for name in ("elu", "embedding")],
        }
    }
    set_up(net(), lists)
    given = torch.ones(3).requires_grad_() * 2
    with pytest.raises(BannedFunctionError, match=r"computes in e3m2, and cannot write to an argument"):
        call(given)
    assert given.eq(2).all()


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("format", ["e5m7", "float8_e4m3"])
def test_running_statistics_are_updated_as_without_the_format(format, opt_level) -> None:
    def found(lists: object) -> list[Tensor]:
        torch.manual_seed(0)
        model = set_up(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), lists, opt_level)
        for _ in range(3):
            model(inputs(20))
        statistics = [model[1].running_mean.clone(), model[1].running_var.clone()]
        amp.deinitialize()
        return statistics

    plain = found(None)
    rounded_ = found({"blacklist": {"*": [{"name": "batch_norm", "format": format}]}})
    for one, other in zip(rounded_, plain, strict=True):
        assert one.dtype is torch.float32
        assert torch.allclose(one, other, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("opt_level", ["O4", "O5"])
@pytest.mark.parametrize("lists", [SCALED, UNSCALED, linear(format="e4m3", grad="float32")])
def test_the_result_may_be_written_to(lists, opt_level) -> None:
    expected, found = (
        gradients(set_up(copy.deepcopy(model), lists, opt_level), inputs())
        for model in (nn.Sequential(net()[0], nn.ReLU()), nn.Sequential(net()[0], nn.ReLU(inplace=True)))
        if amp.deinitialize() is None
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("format", ["float8_e4m3", "float4_e2m1", "e4m3"])
def test_masks_are_not_rounded(format) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = set_up(nn.Sequential(layer), {"modules": {"0": {"format": format}}})
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert layer(torch.randn(2, 5, 16), src_mask=mask).isfinite().all()
    assert model is not layer


@pytest.mark.parametrize("opt_level", ["O4", "O5"])
@pytest.mark.parametrize("products", ["emulated", "device", None])
def test_a_block_without_casts_in_a_forward_computes_as_without_a_format(products, opt_level) -> None:
    class Part(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with amp.disable_casts():
                return super().forward(x)  # float32, beside half weights at O5

    row = {"name": "float8_e4m3", "products": products} if products else "bfloat16"
    part = Part(32, 32)
    model = set_up(part, {"whitelist": {"torch.nn.functional": [{"name": "linear", "format": row}]}}, opt_level)
    given = inputs(4).flatten().expand(3, 32)
    found = model(given)
    weight, bias = model.weight.detach(), model.bias.detach()
    with amp.disable_casts():
        assert torch.equal(found.to(weight.dtype), F.linear(given.to(weight.dtype), weight, bias))


def test_a_call_that_asks_for_a_type_or_a_place_is_obeyed() -> None:
    set_up(net(), {"blacklist": {"*": [{"name": "cumsum", "format": "e2m1"}]}})
    given, out = torch.linspace(0.1, 1, 7), torch.empty(7)
    assert torch.equal(torch.cumsum(given, 0, dtype=torch.float64), given.double().cumsum(0))
    assert torch.cumsum(given, 0, out=out) is out
    assert torch.equal(out, given.double().cumsum(0).float())


def test_functions_that_rounding_itself_calls_can_have_a_format() -> None:
    names = ["div", "mul", "sub", "round", "clamp", "where", "to", "floor", "view", "vector_norm", "abs"]
    row = {"name": "float8_e4m3", "rounding": "stochastic"}
    set_up(
        net(), {"blacklist": {"*": [{"name": name, "format": row, "optional": True} for name in names if name != "to"]}}
    )
    given = inputs().requires_grad_()
    torch.div(given, 3.0).sum().backward()
    assert torch.equal(given.grad.unique(), (torch.ones(1) / 3.0))
    assert (given.detach() / 3.0 - given.detach() * (1 / 3)).abs().max() < 0.1


def test_a_tensor_that_is_factor_and_addend_is_rounded_as_a_factor() -> None:
    set_up(net(), {"whitelist": {"*": [{"name": "addmm", "format": "e2m1"}]}})
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    assert torch.equal(torch.addmm(x, x, weight), torch.addmm(x.clone(), x, weight))


def test_the_policy_of_a_checkpoint_tells_the_order_of_files_apart() -> None:
    def policy(*files: dict[str, Any]) -> dict[str, Any]:
        set_up(net(), list(files))
        saved = amp.state_dict(include_policy=True)
        amp.deinitialize()
        return saved

    saved = policy(UNSCALED, {"modules": {"0": {"format": "e2m1"}}})
    set_up(net(), [{"modules": {"0": {"format": "e2m1"}}}, UNSCALED])
    with pytest.warns(AmpWarning, match="0: torch.nn.functional.linear: format e2m1 .* -> format e3m2"):
        amp.load_state_dict(saved)


BIASED = {
    "linear": lambda bias: F.linear(torch.zeros(1, 3), torch.zeros(3, 3), bias),
    "addmm": lambda bias: torch.addmm(bias, torch.zeros(1, 3), torch.zeros(3, 3)),
    "baddbmm": lambda bias: torch.baddbmm(bias, torch.zeros(1, 1, 3), torch.zeros(1, 3, 3)),
    "rnn_relu_cell": lambda bias: torch.rnn_relu_cell(
        torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(3, 3), torch.zeros(3, 3), bias, torch.zeros(3)
    ),
}


@pytest.mark.parametrize("name", list(BIASED))
def test_a_bias_is_not_rounded(name) -> None:
    set_up(net(), {"whitelist": {"*": [{"name": name, "format": "e3m1"}]}})
    bias = torch.tensor([0.1, 0.22, 0.37], requires_grad=True)
    assert torch.equal(BIASED[name](bias).flatten(), bias.to(BFLOAT16))


def test_cast_observers_and_statistics_see_the_rounding() -> None:
    model = set_up(net(), UNSCALED)
    with amp.report() as report:
        model(inputs())
    assert amp.stats()["casts"] >= 4
    assert {row["name"]: row["format"] for row in report.to_dict()["functions"]}["torch.nn.functional.linear"] == (
        "format e3m2"
    )


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (linear(format="float8_e4m4"), "Did you mean 'float8_e4m3'"),
        (linear(format={"scale": "row"}), "found a mapping without `name`"),
        (linear(format={"name": "e3m4", "scales": "row"}), "found the key 'scales'; expected name, rounding"),
        (linear(format={"name": "e3m4", "scale": "rows"}), "Did you mean 'row'?"),
        (linear(format={"name": "e3m4", "scale": 1}), "expected name, rounding, overflow, scale, products, each once"),
        (linear(format=8), "or a mapping with name, rounding, overflow, scale"),
        (linear(grad="e3m4"), "`grad` without `format`"),
        (
            {"promote": {"torch": [{"name": "add", "format": "e3m4"}]}},
            "only entries of 'whitelist', 'blacklist' take it",
        ),
        ({"modules": {"0": {"format": "e33m4"}}}, "expected 2 to 8 bits of exponent"),
        ({"modules": {"0": {"grad": "e3m4"}}}, "`grad` without `format`"),
        ({"modules": {"0": {"formats": "e3m4"}}}, "Did you mean 'format'?"),
    ],
)
def test_a_fault_in_a_format_says_what_to_type(lists, message) -> None:
    with pytest.raises(CastListError) as caught:
        set_up(net(), lists)
    assert message in str(caught.value)


@pytest.mark.parametrize("lists", [SCALED, FIRST], ids=["function", "part"])
def test_a_level_that_patches_nothing_refuses_formats(lists) -> None:
    with pytest.raises(OptionError, match="cast_lists contradicts opt_level='O0'"):
        set_up(net(), lists, "O0")


def test_a_copy_for_inference_refuses_formats() -> None:
    with pytest.raises(OptionError, match=r"linear computes in format float8_e4m3, grad float8_e5m2, and a copy for"):
        amp.convert_model(net(), torch.bfloat16, cast_lists=SCALED)
    with pytest.raises(OptionError, match="a copy for inference applies the same lists everywhere"):
        amp.convert_model(net(), torch.bfloat16, cast_lists=FIRST)


def test_explain_and_settings_tell_of_formats() -> None:
    model = set_up(net(), SCALED)
    assert "format float8_e4m3, grad float8_e5m2" in str(amp.explain(F.linear))
    with pytest.raises(UsageError, match=r"format float8_e4m3, grad float8_e5m2"):
        set_up(model, UNSCALED)
    amp.deinitialize()
    set_up(net(), FIRST)
    assert amp.settings()["modules"] == ["0: format e3m2"]


@pytest.mark.parametrize(
    ("lists", "line"),
    [
        (
            SCALED,
            "linear: whitelist format e3m2 (cast_lists) -> whitelist format float8_e4m3, grad float8_e5m2 (cast_lists)",
        ),
        (None, "linear: whitelist format e3m2 (cast_lists) -> whitelist (shipped)"),
        ({**UNSCALED, **FIRST}, "0: no such entry -> format e3m2 (cast_lists)"),
    ],
)
def test_a_checkpoint_of_another_format_is_told_apart(lists, line) -> None:
    set_up(net(), UNSCALED)
    saved = amp.state_dict(include_policy=True)
    amp.deinitialize()
    set_up(net(), lists)
    with pytest.warns(AmpWarning) as caught:
        amp.load_state_dict(saved)
    assert line in str(caught[0].message)


def test_the_command_shows_what_computes_in_which_format(capsys) -> None:
    lists = shipped().overlaid({**SCALED, "modules": {"0.*": {"format": "e3m2", "blacklist": ["tanh"]}, "1": {}}})
    shown = list_reports.policy(lists, [BFLOAT16])
    assert any("linear" in line and "format float8_e4m3, grad float8_e5m2" in line for line in shown)
    parts = shown[shown.index("In parts of a model:") + 1 :]
    assert [line.split() for line in parts if "format" in line] == [
        ["0.*", "the", "whitelist", "format", "e3m2", "cast_lists"]
    ]

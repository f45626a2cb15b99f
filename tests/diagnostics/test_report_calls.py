"""The calls, casts, lines and modules of a report; and that recording changes nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name, together
from optimizers import MOMENTUM, SGD, backward
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ampatch import amp
from ampatch.diagnostics.recorder import mode_stacks
from ampatch.diagnostics.recorder.functions import name_of
from ampatch.diagnostics.recorder.recorder import FunctionMode, OperatorMode
from ampatch.diagnostics.recorder.watch import Watch
from ampatch.diagnostics.report import calls as report_calls
from ampatch.diagnostics.report.calls import CallRecorder
from ampatch.diagnostics.report.rows import Row, Rows

every_half = pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)
#: How calls of patched functions run: in C++ if it is built.
every_call = pytest.mark.parametrize("choice", ["auto", "python"])
NUMBERS = ("calls", "casts", "cast_bytes", "cast_seconds", "cache_hits", "cache_hit_bytes")


class Network(nn.Module):
    """Layers of each kind: listed and not, tied, used twice, with torch's own code between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))])
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.first(x)))
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden @ hidden.transpose(-1, -2) @ hidden
        return F.softmax(self.tied(self.last(self.last(hidden))), -1)


def train(opt_level: str | None, steps: int = 2, autocast: bool = False, **options: Any) -> list[Tensor]:
    """Trains a network; returns its loss, its parameters and a random number drawn after the training."""
    torch.manual_seed(0)
    model: Any = Network()
    optimizer: Any = MOMENTUM(model.parameters())
    if opt_level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(torch.randn(2, 5, 6)).float().square().mean()
        backward(loss, optimizer, with_amp=opt_level is not None)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in (loss, *model.parameters(), torch.rand(()))]


def recorded(run: Callable[[], object]) -> dict[str, Any]:
    with CallRecorder() as recorder:
        run()
    return recorder.as_dict()


def function(report: dict[str, Any], name: str) -> dict[str, Any]:
    found = [each for each in report["functions"] if each["name"] == name]
    assert len(found) == 1, [each["name"] for each in report["functions"]]
    return found[0]


def line_of(report: dict[str, Any], source: str) -> dict[str, Any]:
    found = [each for each in report["lines"] if source in each["source"]]
    assert len(found) == 1, [each["source"] for each in report["lines"]]
    return found[0]


def modules(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {each["name"]: each for each in report["modules"]}
    assert len(found) == len(report["modules"])
    return found


def assert_sums_up(report: dict[str, Any]) -> None:
    """The rows of functions sum up to the totals; those of lines too, if user code made every call."""
    for name in NUMBERS:
        for section in ("functions", "lines"):
            assert sum(each[name] for each in report[section]) == pytest.approx(report["totals"][name]), name


class TestSideEffects:
    @every_call
    @every_half
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_a_training_with_amp_has_the_same_bits(
        self, opt_level: str, half_dtype: torch.dtype, choice: str, select_calls: Callable[[str], None]
    ) -> None:
        select_calls(choice)
        expected = train(opt_level, half_dtype=half_dtype)
        counts = amp.cast_counts()
        amp.deinitialize()
        with CallRecorder() as recorder:
            actual = train(opt_level, half_dtype=half_dtype)
        assert amp.cast_counts() == counts
        assert_same_state(actual, expected)
        assert recorder.as_dict()["totals"]["cache_hits"] == counts.cache_hits

    @pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
    def test_a_training_without_amp_has_the_same_bits(self, autocast: bool) -> None:
        expected = train(None, autocast=autocast)
        with CallRecorder():
            actual = train(None, autocast=autocast)
        assert_same_state(actual, expected)

    @every_call
    def test_recording_one_step_of_a_session_changes_no_bit(
        self, choice: str, select_calls: Callable[[str], None]
    ) -> None:
        select_calls(choice)
        found = []
        for block in (contextlib.nullcontext(), CallRecorder()):
            torch.manual_seed(0)
            network = Network()
            model, optimizer = amp.initialize(network, SGD(network.parameters()), verbosity=0)
            for inner in (contextlib.nullcontext(), block, contextlib.nullcontext()):
                with inner:
                    backward(model(torch.randn(2, 5, 6)).sum(), optimizer)
                optimizer.step()
            found.append(([each.detach().clone() for each in model.parameters()], amp.cast_counts()))
            amp.deinitialize()
        assert_same_state(*found)

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
    def test_layers_in_eval_mode_run_the_same_kernels(self, autocast: torch.dtype | None) -> None:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        x = torch.randn(2, 5, 16)
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = model(x)
            with CallRecorder() as recorder:
                actual = model(x)
        assert_same_bits(actual, expected)
        found = recorder.as_dict()
        assert ("inside the fused kernels" in " ".join(found["notes"])) == (autocast is not None)
        if autocast is None:
            assert found["totals"]["calls"] == 0  # torch's own kernel runs the layer
            assert modules(found)[""]["operators"] == {"float32": 1}

    def test_selective_checkpoints_have_the_same_bits(self) -> None:
        def policy(*_: object, **__: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        found = []
        for block in (contextlib.nullcontext(), CallRecorder()):
            amp.init(half_dtype="bfloat16")
            torch.manual_seed(0)
            layer = nn.Linear(8, 8)
            layers, x = nn.Sequential(layer, layer), torch.randn(4, 8, requires_grad=True)
            with block:
                checkpoint(layers, x, use_reentrant=False, context_fn=contexts).sum().backward()
            found.append((x.grad, amp.cast_counts()))
            amp.deinitialize()
        assert_same_state(*found)


class TestFunctions:
    def test_functions_have_the_names_of_the_lists(self) -> None:
        x, weight = torch.ones(8, 8), torch.ones(8, 8)

        def run() -> None:
            F.linear(x, weight)
            torch.mm(x, weight)
            x.relu()
            torch.ops.aten.mm(x, weight)
            _ = x @ weight, x.matmul(weight), -x, x < 1, 1 - x, x[0]
            x.add_(1)
            loss = nn.Parameter(x).sum()
            torch.autograd.grad(loss, loss)

        names = {each["name"]: each["calls"] for each in recorded(run)["functions"]}
        assert names == dict.fromkeys(
            [
                *("torch.nn.functional.linear", "torch.mm", "torch.Tensor.relu", "torch.ops.aten.mm"),
                *("torch.Tensor.__matmul__", "torch.Tensor.matmul", "torch.Tensor.neg", "torch.Tensor.__lt__"),
                *("torch.Tensor.__rsub__", "torch.Tensor.__getitem__", "torch.Tensor.add_", "torch.Tensor.sum"),
                "torch.autograd.grad",
            ],
            1,
        )

    @every_call
    def test_types_are_those_of_the_caller(self, choice: str, select_calls: Callable[[str], None]) -> None:
        select_calls(choice)
        amp.init(half_dtype="bfloat16")
        layer, x = nn.Linear(8, 8), torch.ones(8, 8)
        report = recorded(lambda: [layer(x), layer(x.bfloat16())])
        linear = function(report, "torch.nn.functional.linear")
        assert linear["rule"] == "whitelist"
        assert linear["types"] == [
            {"in": [given, "float32", "float32"], "out": ["bfloat16"], "calls": 1} for given in ("float32", "bfloat16")
        ]
        assert (linear["calls"], linear["casts"], linear["cache_hits"]) == (2, 3, 2)
        assert linear["cast_bytes"] == 2 * (64 + 64 + 8)
        assert linear["cache_hit_bytes"] == 2 * (64 + 8)
        assert_sums_up(report)

    def test_each_function_has_its_rule(self) -> None:
        x = torch.ones(8, 8)
        amp.init(half_dtype="float16")
        report = recorded(lambda: [torch.mm(x, x), x.exp(), torch.lerp(x, x.half(), 0.5), x.relu()])
        rules = {each["name"]: each["rule"] for each in report["functions"]}
        expected = {"torch.mm": "whitelist", "torch.Tensor.exp": "blacklist", "torch.lerp": "promote"}
        assert rules.items() >= {**expected, "torch.Tensor.relu": None}.items()

    def test_registered_and_decorated_functions_have_rules_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = types.ModuleType("library")
        library.scale = lambda x: x * 2  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "library", library)

        @amp.float_function
        def shift(x: Tensor) -> Tensor:
            return x.relu()

        amp.register_half_function(library, "scale")
        amp.init(half_dtype="float16")
        x = torch.ones(8, 8)
        report = recorded(lambda: [library.scale(x), shift(x.half())])
        by_rule = {each["rule"]: each for each in report["functions"]}
        assert by_rule["registered"]["types"] == [{"in": ["float32"], "out": ["float16"], "calls": 1}]
        assert by_rule["decorated"]["types"] == [{"in": ["float16"], "out": ["float32"], "calls": 1}]
        assert by_rule["decorated"]["casts"] == by_rule["registered"]["casts"] == 1
        assert function(report, "torch.Tensor.relu")["types"] == [{"in": ["float32"], "out": ["float32"], "calls": 1}]
        half = [{"in": ["float16"], "out": ["float16"], "calls": 1}]
        assert function(report, "torch.Tensor.__mul__")["types"] == half

    def test_calls_in_a_converted_model_are_recorded(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        x = torch.ones(4, 8)
        expected = amp.convert_model(copy.deepcopy(model), half_dtype="float16")(x)
        converted = amp.convert_model(model, half_dtype="float16")
        with CallRecorder() as recorder:
            assert_same_bits(converted(x), expected)
        linear = function(recorder.as_dict(), "torch.nn.functional.linear")
        assert linear["types"] == [{"in": ["float32", "float16", "float16"], "out": ["float16"], "calls": 1}]
        assert linear["casts"] == 1  # its weights are half

    def test_calls_that_torch_makes_itself_count_if_they_cast(self) -> None:
        amp.init(half_dtype="bfloat16")
        x, attention = torch.ones(2, 4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        report = recorded(lambda: [F.softmax(x, -1), attention(x, x, x)])
        calls = {each["name"]: each["calls"] for each in report["functions"]}
        assert "torch.Tensor.softmax" not in calls
        attention_casts = function(report, "torch.nn.functional.multi_head_attention_forward")["casts"]
        assert report["totals"]["casts"] == amp.cast_counts().casts >= attention_casts > 0

    def test_calls_of_amp_itself_do_not_count(self) -> None:
        report = recorded(lambda: train("O2", half_dtype="float16"))
        expected = recorded(lambda: train(None))
        names = {each["name"]: each["calls"] for each in report["functions"] if not each["name"].startswith("forward")}
        patched = {"torch.Tensor.matmul": "torch.Tensor.__matmul__"}  # as which amp knows the operator
        plain = {patched.get(each["name"], each["name"]): each["calls"] for each in expected["functions"]}
        names.pop("torch.Tensor.__setitem__", None)  # torch does not tell of it where it is not patched
        assert names == plain


class TestCasts:
    def test_casts_in_a_backward_pass_count_for_the_function(self) -> None:
        amp.init(half_dtype="float16")
        weight = nn.Parameter(torch.ones(8, 8))
        x = torch.ones(8, 8)
        report = recorded(lambda: torch.mm(x, weight).sum().backward())
        product = function(report, "torch.mm")
        assert product["casts"] == 3  # both operands, and the gradient of one
        assert product["cast_bytes"] == 64 * 2 * 2 + 64 * 4
        assert product["cast_seconds"] > 0
        assert function(report, "torch.Tensor.backward")["casts"] == 0
        assert_sums_up(report)

    def test_casts_of_a_model_with_half_weights_count_for_its_forward(self) -> None:
        model = amp.initialize(nn.Sequential(nn.Linear(8, 8)), opt_level="O2", half_dtype="float16", verbosity=0)
        report = recorded(lambda: model(torch.ones(4, 8)))
        forward = function(report, "forward of Sequential")
        assert (forward["calls"], forward["casts"]) == (1, 1)
        assert forward["types"] == [{"in": ["float16"], "out": ["float32"], "calls": 1}]
        assert function(report, "torch.nn.functional.linear")["casts"] == 1
        assert line_of(report, "report = recorded(lambda: model(")["casts"] == 2

    def test_casts_for_a_part_in_float32_count_for_its_forward(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Softplus())
        amp.initialize(model, opt_level="O1", half_dtype="float16", keep_fp32=["1"], verbosity=0)
        report = recorded(lambda: model(torch.ones(4, 8)))
        assert function(report, "forward of Softplus")["types"] == [{"in": ["float16"], "out": ["float32"], "calls": 1}]

    def test_casts_of_an_optimizers_step_do_not_count(self) -> None:
        report = recorded(lambda: train("O2", half_dtype="bfloat16", master_weights="split"))
        assert function(report, "forward of Network")["casts"] == 2 * 2  # the loss and its gradient, in each step

    def test_the_users_own_casts_do_not_count(self) -> None:
        x = nn.Parameter(torch.ones(8))
        with torch.autocast("cpu", torch.bfloat16):
            report = recorded(lambda: [x.half().float().sum().backward(), x.to(torch.bfloat16), x.type(torch.float16)])
        assert report["totals"]["casts"] == 0
        assert function(report, "torch.Tensor.half")["calls"] == 1

    @pytest.mark.parametrize("around_backward", [False, True])
    def test_casts_of_autocast_count_for_the_function(self, around_backward: bool) -> None:
        layer, x = nn.Linear(8, 8), torch.ones(4, 8)

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = layer(layer(x)).float().sum()
                if around_backward:
                    loss.backward()
            if not around_backward:
                loss.backward()

        report = recorded(run)
        linear = function(report, "torch.nn.functional.linear")
        assert linear["rule"] is None
        assert linear["casts"] == 5  # the input, the weight, the bias, and the gradients of both parameters
        assert (linear["cache_hits"], linear["cache_hit_bytes"]) == (2, 2 * 72)
        assert function(report, "torch.Tensor.backward")["cache_hits"] == 0

    def test_counting_casts_of_autocast_keeps_no_gradient_alive(self) -> None:
        x = torch.ones(8, requires_grad=True)
        gradients: list[weakref.ref[Tensor]] = []
        alive: list[bool] = []

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = x.exp()
                hidden.register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
                x.register_hook(lambda _: alive.append(gradients[0]() is not None))
                hidden.exp().sum().backward()

        recorded(run)
        assert alive == [False]

    def test_casts_of_sparse_tensors_count_their_elements(self) -> None:
        amp.init(half_dtype="float16")
        x = torch.eye(8).half().to_sparse()
        report = recorded(lambda: amp.float_function(torch.Tensor.coalesce)(x))
        assert (report["totals"]["casts"], report["totals"]["cast_bytes"]) == (1, 8 * 4)

    def test_undone_casts_are_counted(self) -> None:
        amp.init(half_dtype="float16")
        x = torch.ones(8, 8, dtype=torch.float16)
        report = recorded(lambda: torch.mm(x.float().t(), x.float().relu()))
        assert function(report, "torch.mm")["undone"] == 1


class TestCosts:
    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_a_cast_is_timed_without_the_modes_of_the_recorder(
        self, opt_level: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen, timed = [], Rows.timed

        def inspected(rows: Rows, row: Row | None, is_on_gpu: bool, make: Callable[[], Any]) -> Any:
            def run() -> Any:
                seen.append((mode_stacks.FUNCTIONS.modes(), mode_stacks.OPERATORS.modes()))
                return make()

            is_in_forward = row is not None and torch._C._current_graph_task_id() == -1
            return timed(rows, row, is_on_gpu, run if is_in_forward else make)

        report_calls._costs()  # which times casts, too
        monkeypatch.setattr(Rows, "timed", inspected)
        found = recorded(lambda: train(opt_level))
        assert found["totals"]["casts"] >= len(seen) > 0
        modes = [mode for functions, operators in seen for mode in (*functions, *operators)]
        assert not [mode for mode in modes if isinstance(mode, (FunctionMode, OperatorMode))]

    def test_the_estimate_counts_each_kind_of_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = report_calls._costs()
        assert set(measured) == {"operators", "calls", "casts", "modules"}
        assert measured["operators"] > 0
        for kind in measured:
            monkeypatch.setattr(report_calls, "_costs", lambda kind=kind: {kind: 1.0})
            with CallRecorder() as recorder:
                train("O1")
            found = recorder.as_dict()
            expected = {**found["totals"], "operators": recorder.operators, "modules": recorder._modules.count}[kind]
            assert found["notes"] == []
            assert recorder.seconds == expected > 0


def test_functions_that_python_takes_for_equal_have_their_own_names() -> None:
    assert torch.mm == torch.spmm
    assert [name_of(each) for each in (torch.spmm, torch.mm)] == ["torch.spmm", "torch.mm"]


class TestLines:
    @every_half
    def test_lines_sum_up_to_the_totals(self, half_dtype: torch.dtype) -> None:
        report = recorded(lambda: train("O1", half_dtype=half_dtype))
        assert_sums_up(report)
        line = line_of(report, "hidden = hidden + self.attention(")
        assert line["function"] == "forward"
        assert linecache.getline(line["file"], line["line"]).strip() == line["source"]
        assert line["functions"]["torch.nn.functional.multi_head_attention_forward"] == 2

    @pytest.mark.parametrize(
        ("module", "is_users"),
        [("ampatch.demo.training", True), ("torchvision.ops", True), ("contextlib", False), ("torch.nn", False)],
    )
    def test_lines_are_those_of_user_code(self, module: str, is_users: bool) -> None:
        scope: dict[str, Any] = {"__name__": module}
        exec(compile("def call(x):\n    return x.relu()", f"{module}.py", "exec"), scope)
        x = torch.ones(1)
        lines = recorded(lambda: scope["call"](x))["lines"]
        assert [each["file"] for each in lines] == [f"{module}.py" if is_users else __file__]


class TestModules:
    def test_modules_have_types_and_bytes(self) -> None:
        report = recorded(lambda: train("O1", half_dtype="bfloat16"))
        found = modules(report)
        inner = {"blocks.0", "blocks.1", "blocks.1.0", "blocks.1.1"}
        assert set(found) == {"", "first", "norm", "attention", "last", "tied"} | inner
        assert {name: each["parent"] for name, each in found.items() if each["parent"] != ""} == {
            "": None,
            "blocks.1.0": "blocks.1",
            "blocks.1.1": "blocks.1",
        }
        first = found["first"]
        assert (first["class"], first["in"], first["out"]) == ("Linear", {"float32": 2}, {"bfloat16": 2})
        assert first["operators"] == {"bfloat16": 2}
        assert first["activation_bytes"] == {"bfloat16": 2 * 5 * 16 * 2}
        assert first["weight_bytes"] == {"float32": (6 * 16 + 16) * 4}
        assert first["saved_bytes"] == 2 * 5 * 16 * 2 - 2 * (2 * 5 * 6 + 6 * 16 + 16)
        assert found["last"]["in"] == {"float32": 1, "bfloat16": 3} or found["last"]["in"] == {"bfloat16": 4}

    def test_half_weights_save_less_by_what_they_have_beside_themselves(self) -> None:
        saved = []
        for masters in (False, "split", True):
            model = nn.Linear(8, 8, bias=False)
            amp.initialize(model, opt_level="O2", half_dtype="bfloat16", master_weights=masters, verbosity=0)
            saved.append(modules(recorded(functools.partial(model, torch.ones(8, 8))))[""]["saved_bytes"])
            amp.deinitialize()
        assert [saved[0] - each for each in saved] == [0, 2 * 64, 4 * 64]

    def test_recomputed_modules_count_twice(self) -> None:
        amp.init(half_dtype="bfloat16")
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8, requires_grad=True)
        report = recorded(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward())
        assert modules(report)["0"]["in"] == {"float32": 2}
        linear = function(report, "torch.nn.functional.linear")
        # x, weight, bias, x again; and the backward pass of x
        assert (linear["calls"], linear["casts"]) == (2, 4 + 1)

    def test_a_submodule_that_also_runs_alone_is_one_row(self) -> None:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU())), torch.ones(8, 8)
        report = recorded(lambda: [model[1](x), model(x), nn.MSELoss()(model(x), x), model[0].forward(x)])
        assert set(modules(report)) == {"", "0", "1", "1.0", "MSELoss"}
        assert modules(report)["MSELoss"]["parent"] is None
        assert modules(report)["1"]["in"] == {"float32": 3}

    @pytest.mark.parametrize(
        "call",
        [
            lambda: nn.Linear(8, 8)(torch.ones(8, 8)),
            lambda: nn.LazyLinear(8)(torch.ones(8, 8)),
            lambda: nn.Linear(8, 8)(input=torch.ones(8, 8)),
        ],
        ids=["deleted since", "lazy weights", "arguments by keyword"],
    )
    def test_a_module_is_recorded_with_its_inputs_and_weights(self, call: Callable[[], object]) -> None:
        found = modules(recorded(call))
        assert set(found) == {""}
        assert found[""]["in"] == {"float32": 1}
        assert found[""]["weight_bytes"] == {"float32": 72 * 4}

    def test_a_shared_weight_counts_once(self) -> None:
        found = modules(recorded(lambda: Network()(torch.ones(2, 5, 6))))
        assert found["last"]["weight_bytes"] == {"float32": (16 * 16 + 16) * 4}
        assert found["tied"]["weight_bytes"] == {"float32": 16 * 4}

    def test_weights_have_their_types_after_amp_was_set_up_in_the_block(self) -> None:
        model = nn.Linear(8, 8)

        def run() -> None:
            model(torch.ones(2, 8))
            amp.initialize(model, SGD(model.parameters()), opt_level="O2", half_dtype="float16", verbosity=0)
            model(torch.ones(2, 8))

        assert modules(recorded(run))[""]["weight_bytes"] == {"float16": 72 * 2}

    def test_misaligned_products_have_their_padding(self) -> None:
        amp.init(half_dtype="float16")
        layer = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16))
        report = recorded(lambda: layer(torch.ones(8, 6)))
        (found,) = report["misaligned"]
        assert found["function"] == "torch.nn.functional.linear"
        assert (found["size"], found["pads"], found["calls"]) == ([8, 6, 16], [8, 8, 16], 1)
        assert (found["module"], found["dtype"]) == ("0", "float16")
        assert "report = recorded(lambda: layer(" in found["source"]


class TestBlock:
    def test_an_exception_in_the_block_leaves_no_modes_and_hooks(self) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("a user's error")

        model = nn.Sequential(nn.Linear(8, 8))
        model[0].register_forward_hook(fail)
        amp.init()
        x = torch.ones(8, 8)
        with pytest.raises(RuntimeError, match="a user's error"), CallRecorder() as recorder:
            model(x)
        assert not mode_stacks.FUNCTIONS.modes()
        assert not mode_stacks.OPERATORS.modes()
        assert not recorder.thread.running
        assert not torch.nn.modules.module._global_forward_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert recorder.as_dict()["totals"]["calls"] == 1

    def test_modules_in_other_threads_are_noted(self) -> None:
        layer, x = nn.Linear(8, 8), torch.ones(8, 8)

        report = recorded(lambda: together([lambda: layer(x)]))
        assert report["totals"]["calls"] == 0
        assert "other threads" in report["notes"][0]

    def test_forked_processes_record_only_in_blocks_of_their_own(self) -> None:
        layer = nn.Linear(8, 8)
        with CallRecorder() as recorder:
            child = os.fork()
            if not child:
                layer(torch.ones(8, 8))
                with CallRecorder() as own:
                    layer(torch.ones(8, 8))
                counts = [each.as_dict()["totals"]["calls"] for each in (recorder, own)]
                os._exit(int(counts != [0, 2]))  # with torch.ones
            _, status = os.waitpid(child, 0)
            layer(torch.ones(8, 8))
        assert status == 0
        assert recorder.as_dict()["totals"]["calls"] == 2

    def test_compiled_code_is_noted(self) -> None:
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(8, 8)
        compiled = torch.compile(model, backend="eager")
        report = recorded(lambda: compiled(x))
        assert "ran uncompiled" in report["notes"][0]
        assert set(modules(report)) == {"", "0"}
        function_of_x = torch.compile(lambda x: x.relu(), backend="eager")
        assert "ran uncompiled" in recorded(lambda: function_of_x(x))["notes"][0]
        assert not torch.nn.modules.module._has_any_global_hook()

    def test_compiled_code_does_not_warn_of_hooks_beside_a_watch(self) -> None:
        compiled = torch.compile(nn.Linear(8, 8), backend="eager")
        with CallRecorder() as recorder:
            with Watch():
                compiled(torch.ones(8, 8))
            compiled(torch.ones(8, 8))
        assert function(recorder.as_dict(), "torch.nn.functional.linear")["calls"] == 2

    def test_higher_order_operators_are_recorded(self) -> None:
        x = torch.ones(8, 8)

        def run() -> None:
            found.append(torch.ops.higher_order.while_loop(lambda x: x.sum() < 100, lambda x: (x + 1,), (x,), ()))

        found: list[Any] = []
        run()
        assert [each["name"] for each in recorded(run)["functions"]] == ["torch.ops.higher_order.while_loop"]
        assert_same_bits(found[1][0], found[0][0])

    def test_traced_code_is_noted(self) -> None:
        x = torch.ones(8, 8)
        report = recorded(lambda: torch.func.grad(lambda a: a.exp().sum())(x))
        assert [each["name"] for each in report["functions"]] == []
        assert "torch.func" in report["notes"][0]

"""Casts in a profile: each has a label with `profile_casts=True`, and none has one without it."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ampatch import amp

LINEAR = "torch.nn.functional.linear"


def labels(function: Callable[[], object]) -> list[str]:
    """The labels of the casts that a function makes, in their order, without what they all begin with."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("ampatch: cast ") for event in events if event.name.startswith("ampatch: ")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Softmax(dim=-1))


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, 3, dtype=dtype)


def initialize(*args: Any, **options: Any) -> Any:
    return amp.initialize(*args, **{"half_dtype": torch.float16, "verbosity": 0, "profile_casts": True, **options})


@pytest.fixture(params=["python", "compiled"])
def _calls(request: pytest.FixtureRequest, select_calls: Callable[[str], None]) -> None:
    """Whichever was chosen for calls."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_calls")
    select_calls(request.param)


either_calls = pytest.mark.usefixtures("_calls")


@either_calls
class TestCalls:
    def test_a_label_says_what_is_cast_for_which_function_to_which_type(self) -> None:
        model = initialize(net())
        assert labels(lambda: model(x())) == [
            f"argument of {LINEAR} to float16",
            f"weight of {LINEAR} to float16",
            f"weight of {LINEAR} to float16",
        ]

    def test_a_weight_from_the_cache_has_none(self) -> None:
        model = initialize(net())
        model(x())
        assert labels(lambda: model(x())) == [f"argument of {LINEAR} to float16"]

    def test_the_weights_of_a_recurrent_layer_share_one(self) -> None:
        model = initialize(nn.GRU(3, 3))
        assert labels(lambda: model(x(torch.float16))) == ["weights of torch.gru to float16"]
        assert labels(lambda: model(x(torch.float16))) == []

    def test_what_needs_no_cast_has_none(self) -> None:
        initialize(net())
        assert labels(lambda: torch.mm(x(torch.float16), x(torch.float16).t())) == []
        assert labels(lambda: torch.mm(x(torch.float64), x(torch.float64).t())) == []

    def test_of_a_blacklisted_function(self) -> None:
        initialize(net(), half_dtype=torch.bfloat16)
        assert labels(lambda: F.layer_norm(x(torch.bfloat16), (3,))) == [
            "argument of torch.nn.functional.layer_norm to float32"
        ]

    def test_of_a_promoted_function_and_of_out(self) -> None:
        initialize(net())
        half, full = torch.ones(3, dtype=torch.float16), torch.ones(3)
        assert labels(lambda: torch.dot(half, full)) == ["argument of torch.dot to float32"]
        out = torch.empty(2, 2)
        assert labels(lambda: torch.mm(x(torch.float16), x().t(), out=out)) == ["argument of torch.mm to float32"]

    def test_of_functions_of_the_users_own(self) -> None:
        library = types.ModuleType("library")
        library.fused = lambda value: value
        amp.register_half_function(library, "fused")

        @amp.float_function
        def precise(value: Tensor) -> Tensor:
            return value

        initialize(net())

        assert labels(lambda: library.fused(x())) == ["argument of library.fused to float16"]
        (label,) = labels(lambda: precise(x(torch.float16)))
        assert label.startswith("argument of ")
        assert label.endswith("precise to float32")

    def test_none_has_one_unless_that_was_asked_for(self) -> None:
        model = initialize(net(), profile_casts=False)
        assert labels(lambda: model(x())) == []

    def test_of_init(self) -> None:
        with amp.init(half_dtype=torch.float16, profile_casts=True):
            assert labels(lambda: torch.mm(x(), x().t())) == ["argument of torch.mm to float16"] * 2
        with amp.init(half_dtype=torch.float16):
            assert labels(lambda: torch.mm(x(), x().t())) == []

    def test_none_while_casts_are_disabled_and_after_deinitialize(self) -> None:
        model = initialize(net())
        with amp.disable_casts():
            assert labels(lambda: model(x())) == []
        amp.deinitialize()
        assert labels(lambda: model(x())) == []

    def test_results_gradients_and_counts_are_those_without_labels(self) -> None:
        def trained(profile_casts: bool) -> tuple[Tensor, Tensor, amp.CastCounts]:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            initialize(model, optimizer, profile_casts=profile_casts)
            for _ in range(2):
                output = model(x())
                with amp.scale_loss(output.square().sum(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            counts = amp.cast_counts()
            amp.deinitialize()
            return output.detach(), model[0].weight.detach(), counts

        *with_labels, counted = trained(True)
        *without, expected = trained(False)
        for one, other in zip(with_labels, without, strict=True):
            assert_same_bits(one, other)
        assert counted == expected


class TestModels:
    """What the hooks of models cast at the levels that convert weights."""

    def test_of_arguments_and_results(self) -> None:
        model = initialize(net(), opt_level="O2", keep_fp32="1")
        assert labels(lambda: model(x())) == [
            "argument of torch.nn.functional.linear to float16",
            "arguments of Softmax to float32",
            "result of Softmax to float16",
            "result of Sequential to float32",
        ]
        assert labels(lambda: model(x(torch.float16)))[0] == "arguments of Softmax to float32"

    def test_copies_and_pickles_of_the_model_go_on(self) -> None:
        model = initialize(net(), opt_level="O3")
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert labels(lambda each=each: each(x()))[-1] == "result of Sequential to float32"

    def test_none_unless_that_was_asked_for(self) -> None:
        model = initialize(net(), opt_level="O2", profile_casts=False)
        assert labels(lambda: model(x())) == []


@either_calls
class TestTracers:
    """A label is an operator: nothing that records operators may find one."""

    def test_compiled_code_is_one_graph_and_has_none(self) -> None:
        model = initialize(net())
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        expected = model(x())
        assert_same_bits(compiled(x()), expected)
        assert labels(lambda: compiled(x())) == []

    def test_make_fx_records_none(self) -> None:
        model = initialize(net())
        graph = make_fx(model)(x()).graph
        assert not [node for node in graph.nodes if "record_function" in str(node.target)]

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_jit_trace_records_none(self) -> None:
        model = initialize(net())
        traced = torch.jit.trace(model, x(), check_trace=False)
        assert "profiler" not in str(traced.inlined_graph)

    def test_under_transforms_of_torch_func(self) -> None:
        initialize(net())
        weight = torch.ones(3, 3, requires_grad=True)
        assert torch.func.vmap(lambda row: torch.mv(weight, row))(x()).dtype is torch.float16
        assert torch.func.grad(lambda value: torch.mm(weight, value).float().sum())(weight).shape == (3, 3)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_under_checkpoints(self, use_reentrant: bool) -> None:
        model = initialize(net())
        value = x().requires_grad_()
        output = checkpoint(model, value, use_reentrant=use_reentrant)
        assert f"argument of {LINEAR} to float16" in labels(lambda: output.sum().backward())

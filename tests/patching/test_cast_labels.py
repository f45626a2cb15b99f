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


either_calls = pytest.mark.usefixtures("calls_in_both")


@either_calls
class TestCalls:
    def test_a_label_says_what_is_cast_for_which_function_to_which_type(self) -> None:
        model = initialize(net())
        assert labels(lambda: model(x())) == [
            f"argument of {LINEAR} to float16",
            f"weight of {LINEAR} to float16",
            f"weight of {LINEAR} to float16",
        ]

    def test_a_weight_from_the_cache_has_no_label(self) -> None:
        model = initialize(net())
        model(x())
        assert labels(lambda: model(x())) == [f"argument of {LINEAR} to float16"]

    def test_the_weights_of_a_recurrent_layer_share_one_label(self) -> None:
        model = initialize(nn.GRU(3, 3))
        assert labels(lambda: model(x(torch.float16))) == ["weights of torch.gru to float16"]
        assert labels(lambda: model(x(torch.float16))) == []

    def test_arguments_that_need_no_cast_have_no_label(self) -> None:
        initialize(net())
        assert labels(lambda: torch.mm(x(torch.float16), x(torch.float16).t())) == []
        assert labels(lambda: torch.mm(x(torch.float64), x(torch.float64).t())) == []

    def test_labels_of_blacklisted_and_promoted_functions_and_of_out(self) -> None:
        initialize(net())
        half, full, out = torch.ones(3, dtype=torch.float16), torch.ones(3), torch.empty(2, 2)
        norm = "torch.nn.functional.layer_norm"
        assert labels(lambda: F.layer_norm(x(torch.float16), (3,))) == [f"argument of {norm} to float32"]
        assert labels(lambda: torch.dot(half, full)) == ["argument of torch.dot to float32"]
        assert labels(lambda: torch.mm(x(torch.float16), x().t(), out=out)) == ["argument of torch.mm to float32"]

    def test_labels_name_functions_of_users(self) -> None:
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

    def test_amp_init_has_the_option(self) -> None:
        for profile_casts in (True, False):
            with amp.init(half_dtype=torch.float16, profile_casts=profile_casts):
                assert labels(lambda: torch.mm(x(), x().t())) == ["argument of torch.mm to float16"] * 2 * profile_casts

    def test_there_are_no_labels_unless_casts_are_on_and_labels_asked_for(self) -> None:
        model = initialize(net())
        with amp.disable_casts():
            assert labels(lambda: model(x())) == []
        amp.deinitialize()
        assert labels(lambda: model(x())) == []
        for level in ("O1", "O2"):
            model = initialize(net(), opt_level=level, profile_casts=False)
            assert labels(lambda model=model: model(x())) == []
            amp.deinitialize()

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

    def test_labels_of_arguments_and_results_of_models(self) -> None:
        model = initialize(net(), opt_level="O2", keep_fp32="1")
        assert labels(lambda: model(x())) == [
            "argument of torch.nn.functional.linear to float16",
            "arguments of Softmax to float32",
            "result of Softmax to float16",
            "result of Sequential to float32",
        ]
        assert labels(lambda: model(x(torch.float16)))[0] == "arguments of Softmax to float32"

    def test_copies_of_a_model_have_labels(self) -> None:
        model = initialize(net(), opt_level="O3")
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert labels(lambda each=each: each(x()))[-1] == "result of Sequential to float32"


@either_calls
class TestTracers:
    """A label is an operator: nothing that records operators may find one."""

    def test_compiled_code_is_one_graph_without_labels(self) -> None:
        model = initialize(net())
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        expected = model(x())
        assert_same_bits(compiled(x()), expected)
        assert labels(lambda: compiled(x())) == []

    def test_make_fx_records_no_label(self) -> None:
        model = initialize(net())
        graph = make_fx(model)(x()).graph
        assert not [node for node in graph.nodes if "record_function" in str(node.target)]

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_jit_trace_records_no_label(self) -> None:
        model = initialize(net())
        traced = torch.jit.trace(model, x(), check_trace=False)
        assert "profiler" not in str(traced.inlined_graph)

    def test_transforms_of_torch_func_run_with_labels(self) -> None:
        initialize(net())
        weight = torch.ones(3, 3, requires_grad=True)
        assert torch.func.vmap(lambda row: torch.mv(weight, row))(x()).dtype is torch.float16
        assert torch.func.grad(lambda value: torch.mm(weight, value).float().sum())(weight).shape == (3, 3)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoints_label_recomputed_casts(self, use_reentrant: bool) -> None:
        model = initialize(net())
        value = x().requires_grad_()
        output = checkpoint(model, value, use_reentrant=use_reentrant)
        assert f"argument of {LINEAR} to float16" in labels(lambda: output.sum().backward())

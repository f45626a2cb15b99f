"""Functions for which torch has no half kernel, at the levels with half weights: only these are patched there."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Write, check_rows, dtype_name
from samples import SAMPLES, TORCH_WARNINGS, Maker, call, entries, is_method, lacks, resolve, tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.errors import CastListError, OptionError
from ampatch.patching.adapters import lacks_half_products

pytestmark = [
    pytest.mark.once,  # the compiled libraries have no part in it
    *[pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS],
]

LEVELS = ("O2", "O3", "O5")
MARKED = [
    entry
    for entry in entries("blacklist")
    if entry.is_in_force and not lacks(entry.path) and entry.needs_float32 not in (False, ["cuda"])
]


@contextmanager
def half_model(model: nn.Module | None = None, level: str = "O2", **options: Any) -> Iterator[nn.Module]:
    half = {} if level == "O5" else {"half_dtype": torch.bfloat16}
    adopted = amp.initialize(model or nn.Linear(2, 2), opt_level=level, verbosity=0, **{**half, **options})
    try:
        yield adopted
    finally:
        amp.deinitialize()


def matrix(half: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.eye(3) * 2 + torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) / 4).to(half)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: parameters in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.zeros(x.shape[0], 5, dtype=torch.complex64)
        spectrum[:, :3] = (torch.fft.rfft(x) * self.weight)[:, :3]
        return torch.fft.irfft(spectrum, n=8)


class Fourier(nn.Module):
    """As in FNet: the function is in a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = functools.partial(torch.fft.fft, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x).real


class Whitening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(x.t() @ x + torch.eye(8, dtype=x.dtype))


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *middle, nn.LayerNorm(8), nn.Linear(8, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fno": lambda: network(Spectral()),
    "fnet": lambda: network(Fourier(), Fourier()),
    "linalg": lambda: network(Whitening()),
    "pooling": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 2, 1), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(2, 2)
    ),
}


class TestProductsWithSparseTensors:
    @pytest.mark.parametrize(
        ("layout", "on_cpu", "on_cuda"),
        [
            (torch.strided, False, False),
            (torch.jagged, False, False),
            (torch.sparse_coo, True, True),
            (torch.sparse_csr, True, False),
            (torch.sparse_csc, True, False),
            (torch.sparse_bsr, True, True),
            (torch.sparse_bsc, True, True),
        ],
        ids=str,
    )
    def test_sparse_layouts_lack_half_products_on_some_devices(
        self, layout: torch.layout, on_cpu: bool, on_cuda: bool
    ) -> None:
        found = [
            lacks_half_products(SimpleNamespace(layout=layout, device=torch.device(kind))) for kind in ("cpu", "cuda")
        ]
        assert found == [on_cpu, on_cuda]

    @pytest.mark.parametrize("path", ["torch.sparse.mm", "torch.sparse.addmm"])
    def test_functions_for_sparse_tensors_alone_need_float32_on_cuda(self, path: str) -> None:
        rules = {str(rule.path): rule for rule in shipped().for_half(torch.float16).values()}
        assert rules[path].needs_float32 == ("cuda",)


class TestListedFunctions:
    @pytest.mark.slow
    def test_listed_functions_compute_in_float32_and_return_half(
        self, subtests: pytest.Subtests, half: torch.dtype
    ) -> None:
        def widened(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [widened(each) for each in value]
            return value.float() if isinstance(value, Tensor) and value.dtype is half else value

        def check(path: str, sample: Any) -> None:
            args, kwargs = sample.arguments(Maker([half]), method=is_method(path))
            torch.manual_seed(0)
            expected = resolve(path)(*map(widened, args), **kwargs)
            with half_model(half_dtype=half):
                torch.manual_seed(0)
                found = call(path, sample, Maker([half]))
            for result, wide in zip(tensors(found), tensors(expected), strict=True):
                dtype = half if wide.dtype is torch.float32 and wide.dim() else wide.dtype
                if path not in ("torch.istft", "torch.Tensor.istft"):  # complex arguments alone
                    assert result.dtype is dtype
                torch.testing.assert_close(result, wide.to(result.dtype), equal_nan=True)

        rows = (
            (f"{entry.path}-{number}", entry.path, sample)
            for entry in MARKED
            if half in entry.dtypes
            for number, sample in enumerate(SAMPLES[entry.path])
        )
        check_rows(subtests, rows, check)

    @pytest.mark.parametrize("level", LEVELS)
    def test_only_listed_functions_are_patched(self, level: str) -> None:
        mm, softmax, inv = torch.mm, torch.Tensor.softmax, torch.linalg.inv
        with half_model(level=level):
            assert amp.settings()["patch_torch_functions"] is False
            assert (torch.mm, torch.Tensor.softmax) == (mm, softmax)
            assert torch.linalg.inv is not inv
            assert torch.linalg.inv(matrix()).dtype is torch.bfloat16
        assert torch.linalg.inv is inv

    @pytest.mark.parametrize("level", ["O0", "O1"])
    def test_listed_functions_return_float32_at_o1_and_raise_at_o0(self, level: str) -> None:
        with half_model(level=level):
            if level == "O1":
                assert torch.linalg.inv(matrix()).dtype is torch.float32
            else:
                with pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
                    torch.linalg.inv(matrix())

    def test_results_have_the_type_of_their_arguments(self) -> None:
        out = torch.empty(3, 3)
        with half_model():
            assert torch.linalg.solve(matrix(), matrix(torch.float32)).dtype is torch.float32
            assert torch.linalg.inv(matrix(torch.float32)).dtype is torch.float32
            assert torch.linalg.det(matrix()).dtype is torch.float32  # a scalar
            assert torch.linalg.det(matrix()[None]).dtype is torch.bfloat16
            found = torch.linalg.svd(matrix())
            assert type(found) is torch.return_types.linalg_svd
            assert {each.dtype for each in found} == {torch.bfloat16}
            assert torch.linalg.inv(matrix(), out=out) is out
            with amp.disable_casts(), pytest.raises(RuntimeError, match="Low precision"):
                torch.linalg.inv(matrix())
        torch.testing.assert_close(out, torch.linalg.inv(matrix().float()))

    def test_a_given_dtype_is_obeyed(self) -> None:
        with half_model(cast_lists={"blacklist": {"torch": [{"name": "sum", "needs_float32": True}]}}):
            assert torch.sum(matrix(), dim=0).dtype is torch.bfloat16
            assert torch.sum(matrix(), dim=0, dtype=torch.float32).dtype is torch.float32

    def test_in_place_forms_are_left_alone(self) -> None:
        x = matrix()
        with half_model(cast_lists={"blacklist": {"*": [{"name": "sin", "needs_float32": True}]}}):
            assert torch.equal(x.sin(), x.sin_())

    def test_gradients_of_half_inputs_are_half(self) -> None:
        x = matrix().requires_grad_()
        with half_model():
            torch.linalg.inv(x).sum().backward()
        assert x.grad.dtype is torch.bfloat16
        wide = x.detach().float().requires_grad_()
        torch.linalg.inv(wide).sum().backward()
        torch.testing.assert_close(x.grad, wide.grad.bfloat16(), atol=0.02, rtol=0.02)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_functions_cast_only_on_devices_that_lack_the_kernel(
        self, package: Callable[..., None], device: str
    ) -> None:
        package(f"needs_{device}", __init__="def own(x):\n    return x, x.dtype\n")
        own = importlib.import_module(f"needs_{device}").own
        with half_model(cast_lists={"blacklist": {f"needs_{device}": [{"name": "own", "needs_float32": [device]}]}}):
            expected = torch.float32 if device == "cpu" else torch.bfloat16
            (argument,) = amp.explain(sys.modules[f"needs_{device}"].own, matrix()).to_dict()["call"]["arguments"]
            assert argument["after"] == dtype_name(expected)
            assert sys.modules[f"needs_{device}"].own(matrix())[1] is expected
        assert own(matrix())[1] is torch.bfloat16

    def test_a_changed_weight_is_seen(self) -> None:
        """Without masters amp is told of no write; no cast of a weight is kept."""
        weight = nn.Parameter(matrix())
        with half_model(level="O3"):
            before = torch.linalg.inv(weight)
            weight.data.mul_(2)
            torch.testing.assert_close(torch.linalg.inv(weight), before / 2)

    def test_listed_functions_can_be_compiled(self) -> None:
        with half_model():
            compiled = torch.compile(lambda x: torch.linalg.inv(x) + 1, backend="eager")
            assert compiled(matrix()).dtype is torch.bfloat16


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("level", LEVELS)
    def test_models_with_listed_functions_train(self, name: str, level: str, half: torch.dtype) -> None:
        if level == "O5" and half is torch.float16:
            return
        model, inputs = MODELS[name](), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        expected = model(inputs).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {} if level == "O5" else {"half_dtype": half}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        output = model(inputs)
        with amp.scale_loss(output.square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        amp.deinitialize()
        torch.testing.assert_close(output.detach(), expected, atol=0.1, rtol=0.1)
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())

    @pytest.mark.parametrize("name", ["fno", "fnet"])
    def test_copies_of_models_are_float32_and_agree(self, name: str) -> None:
        inputs = torch.randn(4, 8)
        model = MODELS[name]()
        with half_model(model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)) as (adopted, _):
            copied = copy.deepcopy(adopted)
            assert {each.dtype for each in copied.parameters() if each.is_floating_point()} == {torch.float32}
            torch.testing.assert_close(copied(inputs), adopted(inputs), atol=0.1, rtol=0.1)

    def test_parts_that_stay_float32_compute_in_it(self) -> None:
        seen: list[torch.dtype] = []
        model = network(nn.Sequential(Spectral(), nn.Linear(8, 8)))
        with half_model(model, keep_fp32=["1"]):
            model[1][0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
            model(torch.randn(4, 8))
        assert seen == [torch.float32]

    def test_models_are_recomputed_in_the_same_types(self) -> None:
        model = network(Spectral())
        with half_model(model):
            checkpoint(model[1], model[0](torch.randn(4, 8).bfloat16()), use_reentrant=False).sum().backward()
        assert model[1].weight.grad is not None

    def test_models_may_have_decorated_methods(self) -> None:
        class Decorated(Spectral):
            @amp.float_function
            def normed(self, x: Tensor) -> Tensor:
                return torch.fft.fft(x).abs()

        with half_model(network(Decorated())) as model:
            assert model(torch.randn(4, 8)).isfinite().all()

    def test_the_note_of_an_error_of_mixed_types_names_every_part_to_keep(self) -> None:
        class ByOperator(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.aten.mm(x, self.weight)

        class Mixing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.project, self.after = ByOperator(8, 8), ByOperator(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.after(torch.zeros_like(x).float() + self.project(x.float()))

        kept: list[str] = []
        for _ in range(3):
            layers = nn.Sequential(Mixing(), Mixing())
            with half_model(nn.Sequential(OrderedDict(layers=layers)), keep_fp32=kept) as model:
                try:
                    model(torch.randn(4, 8))
                    break
                except RuntimeError as error:
                    (note,) = error.__notes__
                    assert "opt_level='O1'" in note
                    kept = eval(note.partition("keep_fp32=")[2].partition(")")[0])
        assert kept == ["layers.*.project", "layers.*.after"]


class TestListsOfUsers:
    def test_entries_of_a_users_list_are_applied_at_o2(self) -> None:
        lists = {"blacklist": {"torch": [{"name": "sin", "needs_float32": True}]}}
        x = torch.rand(3).bfloat16()
        with half_model(cast_lists=lists):
            assert torch.sin(x).dtype is torch.bfloat16
            assert amp.explain(torch.sin, x).to_dict()["call"]["arguments"][0]["after"] == "float32"

    def test_entries_with_patterns_are_applied_to_later_imports(self, package: Callable[..., None]) -> None:
        package("needs_a", ops="def own(x):\n    return x, x.dtype\n\ndef other(x):\n    return x, x.dtype\n")
        entries = [{"name": "own", "needs_float32": True}, "othe?"]
        with half_model(cast_lists={"blacklist": {"needs_a.*": entries}}):
            ops = importlib.import_module("needs_a.ops")
            assert (ops.own(matrix())[0].dtype, ops.own(matrix())[1]) == (torch.bfloat16, torch.float32)
            assert ops.other(matrix())[1] is torch.bfloat16
            assert not hasattr(ops.other, "__wrapped__")

    def test_a_users_list_may_unlist_a_function(self) -> None:
        with half_model(cast_lists={"unlisted": {"torch.linalg": ["inv"]}}), pytest.raises(RuntimeError, match="Low"):
            torch.linalg.inv(matrix())

    def test_a_list_without_effect_at_o2_is_an_error(self) -> None:
        with pytest.raises(OptionError, match="applies only entries with needs_float32 or format, and these lists"):
            amp.initialize(nn.Linear(2, 2), opt_level="O2", cast_lists={"whitelist": {"torch": ["sin"]}}, verbosity=0)

    def test_a_second_call_must_have_the_same_lists(self) -> None:
        lists = {"blacklist": {"torch": [{"name": "sin", "needs_float32": True}]}}
        with half_model(), pytest.raises(amp.AmpError, match=r"torch\.sin is on no list \(this call: in the blacklist"):
            amp.initialize(nn.Linear(2, 2), opt_level="O2", half_dtype="bfloat16", cast_lists=lists, verbosity=0)

    @pytest.mark.parametrize(
        ("list_name", "value", "expected"),
        [
            ("whitelist", "true", "'needs_float32' has no effect here; only entries of 'blacklist' take it."),
            ("blacklist", "[]", "found an empty list; expected true, or a list of device types, such as [cpu]."),
            ("blacklist", "[cdua]", "found 'cdua'; expected true, or a list of device types, such as [cpu]. Did you"),
            ("blacklist", "yes please", "found 'yes please'; expected true, or a list of device types"),
        ],
    )
    def test_wrong_values_of_needs_float32_are_named(
        self, list_name: str, value: str, expected: str, write: Write
    ) -> None:
        file = write(f"{list_name}:\n  torch:\n  - {{name: sin, needs_float32: {value}}}\n")
        with pytest.raises(CastListError) as found:
            shipped().overlaid(file)
        assert ":3: " in str(found.value)
        assert expected in str(found.value)


class TestReports:
    def test_the_policy_of_lists_shows_needs_float32(self) -> None:
        (line,) = list_reports.policy(shipped(), names=["torch.fft.rfft"])
        assert line.endswith("needs_float32")
        (line,) = list_reports.policy(shipped(), names=["torch.nn.functional.avg_pool3d"])
        assert line.endswith("needs_float32 on cpu")

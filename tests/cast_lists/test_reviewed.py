"""Functions of torch that are in no list: each has a reason, and the reason is true.

`CHECKS` shows the reasons by a call of each function in both half types. The other reasons concern the purpose of a
function, or other hardware.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath

import pytest
import torch
from helpers import HALF_DTYPES, casts_on, check_rows
from reviewed_samples import CALLS, Build, Call
from samples import TOLERANCE, Maker, resolve, tensors
from seen_calls import Operators
from torch import Tensor

from ampatch.cast_lists import coverage
from ampatch.cast_lists.lists import CastLists, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import EVERY_NAMESPACE, plain_name, spellings

pytestmark = [
    pytest.mark.once,  # the compiled libraries have no part in it
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of beta states and deprecations, for many a function of torch
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROOT = FilePath(__file__).parents[2]
COVERAGE = coverage.coverage(shipped())
REVIEWED = {reason.name: paths for reason, paths in COVERAGE.reviewed.items()}

# Functions without a sample, though a sample would show their reason.
NOT_RUN = {
    "copies of a part of sparse tensors, which run inside of functionalised graphs only": {
        "torch.ccol_indices_copy",
        "torch.col_indices_copy",
        "torch.crow_indices_copy",
        "torch.indices_copy",
        "torch.row_indices_copy",
        "torch.values_copy",
    },
    "for dimensions that are objects, of functorch": {"torch.Tensor.index"},
    "to a device that is not here": {
        "torch.Tensor.cuda",
        "torch.Tensor.ipu",
        "torch.Tensor.mtia",
        "torch.Tensor.pin_memory",
        "torch.Tensor.xpu",
    },
    "from a file": {"torch.from_file"},
    "of quantized values": {"torch.empty_quantized"},
    "of a GPU's memory": {"torch.Tensor.__cuda_array_interface__"},
    "raises, as it is not in torch any more": {"torch.Tensor.volatile"},
}

# Reviewed functions that call a listed one inside, in C++, where no patch is seen; and why they have no entry.
LISTED_INSIDE = {
    "one_hot": "whole numbers",
    "float_power": "in float64",
    "__rdiv__": "they call the method reciprocal from Python, which is patched",
    "__rtruediv__": "the same",
    "nanmean": "neither torch.autocast nor Apex casts nansum",
    "vander": "its cumprod writes into a result of the argument's type",
    "sum": "of sparse tensors: rounds the sum of their values once",
}

# Functions off by more than a few roundings, by how many times that.
FURTHER = {"sinc": 16}  # the gradient near zero

# Functions without a gradient, since torch's own backward pass raises.
NO_GRADIENT = {"vander"}


def left_out() -> set[str]:
    return {path for paths in NOT_RUN.values() for path in paths}


def default(m: Maker) -> Call:
    """A call without arguments, on one number."""
    return Call(m.t(1))


def builds(path: Path, reason: str) -> tuple[Build, ...]:
    """The calls of a function."""
    without = (default,) if reason in ("reads", "removed") else ()
    return CALLS.get(str(path)) or CALLS.get(path.name) or CALLS.get(plain_name(path.name)) or without


def called(path: Path, call: Call) -> object:
    """What a function returns, or a property has."""
    function = resolve(str(path))
    torch.manual_seed(0)
    return function(*call.args, **call.kwargs) if callable(function) else function.__get__(*call.args)


def mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """A value with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(mapped(item, change) for item in value) if type(value) in (tuple, list) else value


def changed(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    kwargs = {name: mapped(value, change) for name, value in call.kwargs.items()}
    return Call(*(mapped(value, change) for value in call.args), **kwargs)


def widened(call: Call) -> Call:
    """The same call with half tensors in float32."""
    return changed(call, lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor.clone())


def given(call: Call) -> list[Tensor]:
    return tensors([*call.args, *call.kwargs.values()])


def dense(value: object) -> list[Tensor]:
    return [each if each.layout is torch.strided else each.to_dense() for each in tensors(value)]


def is_in_place(path: Path) -> bool:
    return (path.name.endswith("_") and not path.name.endswith("__")) or re.match(
        "__i[a-z]{2,}__", path.name
    ) is not None


def mixes(build: Build, half: torch.dtype) -> list[list[torch.dtype]]:
    """Both orders of types, if the call has several floating arguments."""
    counter = Maker([torch.float32])
    build(counter)
    return [[half, torch.float32], [torch.float32, half]] if len(counter.made) > 1 else []


def check_promotes(path: Path, build: Build, half: torch.dtype) -> None:
    for mix in mixes(build, half):
        expected = called(path, widened(build(Maker(mix))))
        found = called(path, build(Maker(mix)))
        for each, wide in zip(dense(found), dense(expected), strict=True):
            if is_in_place(path):
                assert each.dtype == mix[0]
                torch.testing.assert_close(each, wide.to(mix[0]))
            else:
                assert each.dtype == torch.float32
                torch.testing.assert_close(each, wide)


def check_compares(path: Path, build: Build, half: torch.dtype) -> None:
    for dtypes in [[half], *mixes(build, half)]:
        call = build(Maker(dtypes))
        found, expected = called(path, changed(call, torch.clone)), called(path, widened(call))
        for each, wide in zip(tensors(found), tensors(expected), strict=True):
            assert is_in_place(path) or not each.is_floating_point()
            assert torch.equal(each.double(), wide.double())
        assert isinstance(found, (Tensor, tuple)) or found == expected


def check_exact(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half]))
    found, expected = called(path, changed(call, torch.clone)), called(path, widened(call))
    assert tensors(found)
    takes_half = any(each.dtype == half for each in given(call))
    for each, wide in zip(dense(found), dense(expected), strict=True):
        assert not (takes_half and wide.is_floating_point()) or each.dtype == half
        assert torch.equal(each.to(wide.dtype), wide)


def check_views(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half]))
    parts = [
        part for tensor in given(call) for part in ([tensor] if tensor.layout is torch.strided else [tensor._values()])
    ]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    found = tensors(called(path, call))
    assert found
    assert {each.untyped_storage().data_ptr() for each in found} <= storages


def results_and_gradients(path: Path, call: Call, half: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Returns each floating result and gradient of a call in half, with that of float32 for the same values."""
    outcomes = []
    for widen in (False, True):
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor, widen: bool = widen, leaves: list[Tensor] = leaves) -> Tensor:
            copy = tensor.detach().clone()
            if tensor.dtype not in HALF_DTYPES:
                return copy
            copy = copy.float() if widen else copy
            if tensor.layout is torch.strided and not is_in_place(path):
                leaves.append(copy.requires_grad_())
            return copy

        results = [each for each in dense(called(path, changed(call, leaf))) if each.is_floating_point()]
        attached = [each for each in results if each.requires_grad]
        gradients = []
        if attached and leaves and plain_name(path.name) not in NO_GRADIENT:
            weights = [torch.full_like(each, 0.5) for each in attached]
            gradients = torch.autograd.grad(attached, leaves, weights, allow_unused=True)
        outcomes.append([("result", each.detach()) for each in results] + [("gradient", each) for each in gradients])
    found = [(kind, each, expected) for (kind, each), (_, expected) in zip(*outcomes, strict=True) if each is not None]
    assert found
    assert {each.dtype for _, each, _ in found} == {half}
    return found


def check_rounds_once(path: Path, build: Build, half: torch.dtype) -> None:
    one = torch.finfo(half).eps
    for kind, found, expected in results_and_gradients(path, build(Maker([half])), half):
        if kind == "result":
            torch.testing.assert_close(found.float(), expected, rtol=one, atol=torch.finfo(half).tiny)
        else:
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=2 * one * float(expected.abs().max()))


def check_several_roundings(path: Path, build: Build, half: torch.dtype) -> None:
    for _, found, expected in results_and_gradients(path, build(Maker([half])), half):
        atol = TOLERANCE[half] * FURTHER.get(plain_name(path.name), 1) * float(expected.abs().max())
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=atol)


def check_normalises(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half, torch.float32, torch.float32]))
    found, expected = tensors(called(path, call))[0], tensors(called(path, widened(call)))[0]
    assert found.dtype == half
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=TOLERANCE[half] * float(expected.abs().max()))


def check_writes(path: Path, build: Build, half: torch.dtype) -> None:
    for dtypes in mixes(build, half) or [[half]]:
        call = build(Maker(dtypes))
        wide = widened(call)
        expected, found = called(path, wide), called(path, call)
        if found is None:  # __setitem__
            expected, found = wide.args[0], call.args[0]
        assert found.dtype == dtypes[0]
        assert torch.equal(found, expected.to(dtypes[0]))


def check_draws(path: Path, build: Build, half: torch.dtype) -> None:
    found = called(path, build(Maker([half])))
    assert found.dtype in (half, torch.int64)


def check_makes(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half], requires_grad=True))
    found = called(path, call)
    assert not found.requires_grad
    if models := given(call):
        assert found.dtype == models[0].dtype


def check_converts(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half]))
    found = called(path, call)
    dtype = found.dtype
    named = getattr(torch, path.name, None)
    assert dtype == named or not isinstance(named, torch.dtype)
    if found.layout is torch._mkldnn:
        found = found.to_dense()
    expected = call.args[0].to(dtype)
    if dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if path.name != "__array_wrap__":  # the model of which only says the class
        assert torch.equal(found, expected)


def check_fixed_type(path: Path, build: Build, half: torch.dtype) -> None:
    for dtypes in [[half], *mixes(build, half)]:
        call = build(Maker(dtypes))
        found = called(path, call)
        assert found.dtype == torch.float64
        assert torch.equal(found, called(path, changed(call, lambda t: t.double() if t.is_floating_point() else t)))


def check_integers(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half]))
    if not any(each.is_floating_point() for each in given(call)):
        found = tensors(called(path, changed(call, torch.clone)))
        assert found
        assert not any(each.is_floating_point() for each in found)
    for dtype in (half, torch.float32):
        floating = changed(call, lambda tensor, dtype=dtype: tensor.to(dtype))
        with pytest.raises((RuntimeError, TypeError)):
            called(path, floating)


def check_reads(path: Path, build: Build, half: torch.dtype) -> None:
    if half is torch.bfloat16 and path.name in ("numpy", "__array__"):
        pytest.skip("numpy has no such type")
    found = called(path, build(Maker([half])))
    assert not any(each.is_floating_point() for each in tensors(found)) or path.name == "__reduce_ex__"


def check_calls_python(path: Path, build: Build, half: torch.dtype) -> None:
    call = build(Maker([half]))
    seen: list[object] = []

    def function(*numbers: object) -> object:
        seen.extend(numbers)
        return numbers[0]

    called(path, Call(*call.args[:-1], function))
    assert seen
    assert all(type(number) is float for number in seen)


def check_refuses(path: Path, build: Build, half: torch.dtype) -> None:
    refused = 0
    for dtypes in [[half], *mixes(build, half)]:
        try:
            called(path, build(Maker(dtypes)))
        except (RuntimeError, KeyError):  # lobpcg looks the type up
            refused += 1
    assert refused


def check_removed(path: Path, build: Build, half: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)removed"):
        called(path, build(Maker([half])))


CHECKS: Mapping[str, Callable[[Path, Build, torch.dtype], None]] = {
    "promotes": check_promotes,
    "compares": check_compares,
    "exact": check_exact,
    "views": check_views,
    "rounds_once": check_rounds_once,
    "several_roundings": check_several_roundings,
    "normalises": check_normalises,
    "writes": check_writes,
    "draws": check_draws,
    "makes": check_makes,
    "converts": check_converts,
    "fixed_type": check_fixed_type,
    "integers": check_integers,
    "reads": check_reads,
    "calls_python": check_calls_python,
    "refuses": check_refuses,
    "removed": check_removed,
}
NOT_SHOWN = {"bookkeeping", "quantized", "backends", "symbols", "settings"}


class TestEveryFunction:
    def test_every_function_has_a_list_or_a_reason(self) -> None:
        assert COVERAGE.undecided == (), (
            f"torch {torch.__version__} has functions that no list and no reason names: "
            f"{', '.join(map(str, COVERAGE.undecided))}. Add each to a list in lists/ with a sample in "
            "tests/samples.py, or to a reason in lists/reviewed.yaml with a call in tests/reviewed_samples.py."
        )

    def test_reviewed_functions_exist_in_the_pinned_torch(self) -> None:
        (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
        if torch.__version__.partition("+")[0] != pinned:
            pytest.skip(f"names are checked with torch {pinned}, since others lack some")
        known = set(coverage.callables())
        gone = [path for _, path in coverage.reviewed_names() if not any(each in known for each in all_paths(path))]
        assert gone == [], "torch has no such function, or it needs no reason; take it out of lists/reviewed.yaml"

    def test_a_reviewed_function_is_in_no_list_and_has_one_reason(self) -> None:
        names = [path for _, path in coverage.reviewed_names()]
        assert sorted({str(path) for path in names if names.count(path) > 1}) == []

        listed = {path for paths in COVERAGE.listed.values() for path in paths}
        reasons: dict[Path, set[str]] = {}
        for reason, path in coverage.reviewed_names():
            for each in all_paths(path):
                reasons.setdefault(each, set()).add(reason.name)
        assert reasons.keys() & listed == set()
        assert {str(path): names for path, names in reasons.items() if len(names) > 1} == {}


def all_paths(path: Path) -> list[Path]:
    return spellings(path.name) if path.namespace == EVERY_NAMESPACE else [path]


class TestCoverage:
    def test_a_function_that_a_new_torch_adds_is_undecided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def brand_new(input: Tensor) -> Tensor:
            return input

        brand_new.__module__ = "torch.functional"
        for owner in (torch, Tensor, torch.linalg):
            monkeypatch.setattr(owner, "brand_new", brand_new, raising=False)

        found = coverage.coverage(shipped()).undecided

        assert list(map(str, found)) == ["torch.brand_new", "torch.Tensor.brand_new", "torch.linalg.brand_new"]

    def test_functions_of_other_packages_need_no_decision(self) -> None:
        assert callable(torch.nn.functional.Optional)
        assert Path("torch.nn.functional", "Optional") not in coverage.callables()

    def test_a_function_is_listed_under_all_its_paths(self) -> None:
        listed = coverage.coverage(CastLists({}).overlaid({"whitelist": {"torch": ["conv2d"]}})).listed
        assert list(map(str, listed[Treatment.WHITELIST])) == ["torch.conv2d", "torch.nn.functional.conv2d"]

    def test_an_equal_function_is_not_listed(self) -> None:
        assert torch.spmm == torch.mm
        found = coverage.coverage(CastLists({}).overlaid({"whitelist": {"torch": ["mm"]}}))
        assert list(map(str, found.listed[Treatment.WHITELIST])) == ["torch.mm"]
        assert Path("torch", "spmm") in found.undecided

    def test_reasons_hold_for_properties_and_for_other_paths(self) -> None:
        assert coverage.reason_of(Path("torch.Tensor", "T")).name == "views"
        assert torch.functional.split is torch.split
        assert coverage.reason_of(Path("torch.functional", "split")).name == "views"
        assert coverage.reason_of(Path("torch", "mm")) is None  # it is listed

    def test_coverage_is_the_same_under_casts(self) -> None:
        with casts_on():
            found = coverage.coverage(shipped())
        assert found == COVERAGE

    def test_coverage_can_be_written_as_json(self) -> None:
        data = json.loads(json.dumps(COVERAGE.to_dict()))
        assert list(data) == ["torch", "counts", "undecided", "listed", "reviewed"]
        assert data["counts"] == COVERAGE.counts()
        assert "torch.mm" in data["listed"]["whitelist"]
        assert "torch.Tensor.T" in data["reviewed"]["views"]["functions"]


class TestReasons:
    def test_reasons_are_sentences_and_are_checked_or_cannot_be(self) -> None:
        for reason in COVERAGE.reviewed:
            assert re.fullmatch(r"[A-Z].*[a-z0-9]\.", reason.why), reason
        assert set(REVIEWED) == set(CHECKS) | NOT_SHOWN

    @pytest.mark.parametrize("name", CHECKS)
    def test_every_function_of_a_reason_has_a_call(self, name: str) -> None:
        assert [str(path) for path in REVIEWED[name] if not builds(path, name) and str(path) not in left_out()] == []

    @pytest.mark.parametrize("name", CHECKS)
    def test_reasons_are_true(self, name: str, half: torch.dtype, subtests: pytest.Subtests) -> None:
        rows = (
            (f"{path}-{number}", path, build, half)
            for path in REVIEWED[name]
            if str(path) not in left_out()
            for number, build in enumerate(builds(path, name))
        )
        check_rows(subtests, rows, CHECKS[name])

    def test_functions_that_promote_are_called_with_mixed_operands(self) -> None:
        half = torch.float16
        assert [
            str(path) for path in REVIEWED["promotes"] if not any(mixes(each, half) for each in builds(path, ""))
        ] == []


def test_reviewed_functions_run_no_operators_of_listed_ones(subtests: pytest.Subtests) -> None:
    # torch.autocast would cast it there, and a patch cannot: such a function needs an entry of its own.
    listed = {path.name for path, _ in shipped().rules}

    def check(path: Path, build: Build) -> None:
        call = build(Maker([torch.float32]))
        with Operators() as operators:
            called(path, call)
        names = {
            each.overloadpacket.__name__.removeprefix("linalg_").removeprefix("special_") for each in operators.seen
        }
        assert names & listed == set()

    rows = (
        (f"{path}-{number}", path, build)
        for name in ("promotes", "compares", "exact", "rounds_once", "several_roundings", "normalises", "writes")
        for path in REVIEWED[name]
        if not {path.name, plain_name(path.name)} & set(LISTED_INSIDE) and str(path) not in left_out()
        for number, build in enumerate(builds(path, name))
    )
    check_rows(subtests, rows, check)

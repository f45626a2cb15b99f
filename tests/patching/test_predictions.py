"""What is predicted of calls, against what the patched functions do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import casts_on, check_rows, dtype_name
from samples import SAMPLES, TORCH_WARNINGS, Maker, Sample, is_method, lacks, resolve

from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule
from ampatch.casting.nested import tensors_in
from ampatch.errors import BannedFunctionError
from ampatch.function_wrapper import unwrapped
from ampatch.patching.predictions import Prediction, Predictor

pytestmark = [pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS]


def mixes(half: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    return [(half, torch.float32), (torch.float32, half), (half,), (torch.float32,), (torch.float64,)]


def rows(rules: dict[Path, Rule], half: torch.dtype, few: bool) -> Iterator[tuple[Any, ...]]:
    for path, samples in SAMPLES.items():
        rule = None if lacks(path) else rules.get(Path(*path.rpartition(".")[::2]))
        for number, sample in enumerate(samples[:1] if few else samples):
            for form in () if rule is None else sample.forms()[:1] if few else sample.forms():
                for mix in mixes(half)[: 1 if few else None]:
                    name = f"{path}-{number}-{form}-{'-'.join(map(dtype_name, mix))}"
                    yield name, path, rule, sample, form, mix


def check(path: str, rule: Rule, sample: Sample, form: str, mix: tuple[torch.dtype, ...], predictor: Predictor) -> None:
    args, kwargs = sample.arguments(Maker(mix), method=is_method(path), form=form)
    patched = resolve(path)
    assert unwrapped(patched) is not patched

    said = predictor.by_rule(rule, unwrapped(patched), args, kwargs)

    if said.error is not None:
        with pytest.raises(BannedFunctionError, match=re.escape(said.error)):
            patched.adapter.adapt(args, kwargs)
    else:
        received = patched.adapter.adapt(args, kwargs)
        got = [*received[0], *received[1].values()]
        assert [each.after for each in said.arguments] == [tensor.dtype for tensor in tensors_in(got)]
        if "dtype" not in kwargs:
            assert said.passes_dtype is received[1].get("dtype")
    for each in said.arguments:
        assert (each.why is None) is (each.before is not each.after)
        assert each.why != "the result may be a view of it"


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["one-call", "all-calls"])
def test_predictions_of_every_listed_function_are_right(
    half: torch.dtype, few: bool, subtests: pytest.Subtests
) -> None:
    predictor = Predictor(half, {"cpu"})
    with casts_on(half):
        table = rows(shipped().for_half(half), half, few)
        check_rows(subtests, table, lambda *row: check(*row, predictor))


def test_the_check_fails_if_a_prediction_is_wrong(subtests: pytest.Subtests) -> None:
    """The predictions of one half type, against the calls of the other."""
    path, half = "torch.mm", torch.float16
    rule = shipped().for_half(half)[Path("torch", "mm")]
    with casts_on(half), pytest.raises(AssertionError):
        check(path, rule, SAMPLES[path][0], "positional", (torch.float32,), Predictor(torch.bfloat16, {"cpu"}))


X, H = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float16)


def predicted(path: str, *args: Any, allow_banned: bool = False, **kwargs: Any) -> Prediction:
    rule = shipped().for_half(torch.float16)[Path(*path.rpartition(".")[::2])]
    return Predictor(torch.float16, {"cpu"}, allow_banned).by_rule(rule, resolve(path), args, kwargs)


STAYS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, str | None]]] = {
    "cast": ("torch.mm", (X, X), {}, {"input": None, "mat2": None}),
    "half": ("torch.mm", (H, X), {}, {"input": "it is float16 already", "mat2": None}),
    "float64": ("torch.mm", (X, X.double()), {}, {"input": None, "mat2": "float64 is never cast"}),
    "integers": ("torch.mm", (X.int(), X), {}, {"input": "int32 is never cast", "mat2": None}),
    "device": ("torch.mm", (X.to("meta"), X), {}, {"input": "it is on 'meta'; amp casts on cpu", "mat2": None}),
    "out": (
        "torch.mm",
        (X, H),
        {"out": X.clone()},
        {
            "input": "the tensor written to is float32 too",
            "mat2": None,
            "out": "out= is never cast; it decides the type",
        },
    ),
    "dtype": ("torch.sum", (H,), {"dtype": torch.float16}, {"input": "the call's own dtype=float16 is obeyed"}),
    "position": ("torch.softmax", (H, 0, torch.float16), {}, {"input": "the call's own dtype=float16 is obeyed"}),
    "via dtype": ("torch.sum", (H,), {}, {"input": "dtype=float32 is passed instead: the kernel casts"}),
    "already": ("torch.log", (X,), {}, {"input": "it is float32 already"}),
    "sparse": (
        "torch.mm",
        (X.to_sparse(), X.half()),
        {},
        {"input": "torch has no half kernel for products with this sparse tensor", "mat2": None},
    ),
    "in place": (
        "torch.Tensor.addmm_",
        (H, X, X),
        {},
        {"input": "the call writes to it, so it keeps its type", "mat1": None, "mat2": None},
    ),
    "condition": (
        "torch.nn.functional.interpolate",
        (H[None, None],),
        {"scale_factor": 2},
        {"input": "mode is 'nearest'; the rule is for mode=area|bicubic|bilinear|linear|trilinear"},
    ),
    "condition that holds": (
        "torch.nn.functional.interpolate",
        (H[None, None],),
        {"scale_factor": 2, "mode": "bicubic"},
        {"input": None},
    ),
    "promotion": ("torch.lerp", (X, H, 0.5), {}, {"input": "float32 is the widest type", "end": None}),
    "one type": ("torch.lerp", (X, X, 0.5), {}, dict.fromkeys(("input", "end"), "all that could be cast has one type")),
    "nested": (
        "torch.meshgrid",
        ([X[0], H[0]],),
        {},
        {"argument 1[0]": "float32 is the widest type", "argument 1[1]": None},
    ),
    "banned": (
        "torch.nn.functional.binary_cross_entropy",
        (X, X),
        {},
        dict.fromkeys(("input", "target"), "the ban is for half tensors only"),
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_an_argument_that_stays_has_a_reason(name: str) -> None:
    path, args, kwargs, reasons = STAYS[name]
    assert {each.name: each.why for each in predicted(path, *args, **kwargs).arguments} == reasons


class Foreign:
    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise AssertionError("the function was called")


def test_nothing_is_cast_beside_an_overriding_argument_that_is_no_tensor() -> None:
    (only,) = predicted("torch.mm", X, Foreign()).arguments
    assert (only.after, only.why) == (torch.float32, "an argument that is no tensor overrides torch's functions")


def test_the_prediction_of_a_banned_call_has_the_text_of_its_error() -> None:
    said = predicted("torch.nn.functional.binary_cross_entropy", H, H)
    with casts_on(torch.float16), pytest.raises(BannedFunctionError) as raised:
        F.binary_cross_entropy(H, H)
    assert said.error == str(raised.value)
    assert {each.after for each in said.arguments} == {torch.float16}


def test_allowed_banned_functions_run_in_float32() -> None:
    said = predicted("torch.nn.functional.binary_cross_entropy", H, X, allow_banned=True)
    assert said.error is None
    assert [each.why for each in said.arguments] == [None, "it is float32 already"]


def test_within_autocast_arguments_get_its_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert [each.after for each in predicted("torch.mm", X, X).arguments] == [torch.bfloat16] * 2


def test_no_value_is_read_or_copied() -> None:
    """A cast of these would take terabytes."""
    huge = torch.empty(1).expand(2**40)
    assert [each.after for each in predicted("torch.mv", huge[None].expand(2, -1), huge).arguments] == [
        torch.float16
    ] * 2

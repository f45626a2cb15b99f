"""Reading arguments of calls: by position, by keyword or by default, of builtins of torch and of Python functions."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import check_rows
from samples import SAMPLES, TORCH_WARNINGS, Maker, is_method, lacks, resolve

from ampatch.cast_lists import signatures
from ampatch.cast_lists.signatures import ArgumentReader, argument_reader, first_argument_reader, parameter_names

pytestmark = [*(pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS), pytest.mark.once]

# Listed functions of which no argument can be told: they take anything by position, or exist twice (lstm takes packed
# and padded sequences, einsum an equation or lists of indices), or are operators of Python without a schema.
UNKNOWN = {
    "torch.Tensor.__matmul__",
    "torch.cartesian_prod",
    "torch.dsmm",
    "torch.einsum",
    "torch.lu",
    "torch.spmm",
    *(f"{owner}.{name}" for owner in ("torch", "torch._VF") for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")),
}


def read(function: Callable[..., object], name: str, *args: object, **kwargs: object) -> object:
    reader = argument_reader(function, name)
    assert reader is not None
    return reader(args, kwargs)


def test_arguments_are_read_by_position_by_keyword_and_by_default() -> None:
    assert read(F.interpolate, "mode", "x", None, 2, "area") == "area"
    assert read(F.interpolate, "mode", "x", mode="area") == "area"
    assert read(F.interpolate, "mode", "x", scale_factor=2) == "nearest"
    assert read(lambda x, mode: None, "mode", "x") is None
    assert read(torch.nn.Linear.forward, "input", "layer", "x") == "x"
    assert read(torch.conv2d, "groups", "x", "w", None, 1, 0, 1, 4) == 4
    assert read(F.gelu, "approximate", "x", approximate="tanh") == "tanh"
    assert read(torch.conv2d, "groups", "x", "w") == 1


class TestPythonFunctions:
    def test_a_keyword_only_parameter_is_not_read_by_position(self) -> None:
        def function(x: object, *rest: object, mode: str = "a") -> None: ...

        assert read(function, "mode", 1, 2, 3) == "a"
        assert read(function, "mode", 1, 2, mode="b") == "b"

    def test_parameters_for_any_arguments_have_no_names(self) -> None:
        assert parameter_names(lambda *args, **kwargs: None) == ()
        assert argument_reader(lambda *args, **kwargs: None, "kwargs") is None
        assert parameter_names(F.max_pool2d) == ()  # chosen at run time from two functions


class TestBuiltins:
    def test_names_are_read_from_the_schema_of_a_builtin(self) -> None:
        with pytest.raises(ValueError, match="no signature found"):
            inspect.signature(torch.addmv)
        assert parameter_names(torch.addmv) == ("input", "mat", "vec", "beta", "alpha")

    @pytest.mark.parametrize(
        ("function", "name", "position"),
        [
            pytest.param(torch.topk, "largest", 3, id="topk"),
            pytest.param(torch.polygamma, "n", 0, id="polygamma"),
            pytest.param(torch.convolution, "output_padding", 7, id="convolution"),
            pytest.param(torch.Tensor.addmm, "mat2", 2, id="Tensor.addmm"),
            pytest.param(torch.linalg.vector_norm, "ord", 1, id="linalg.vector_norm"),
            pytest.param(torch.sum, "keepdim", 2, id="sum"),
        ],
    )
    def test_the_position_is_that_of_the_function(
        self, function: Callable[..., object], name: str, position: int
    ) -> None:
        reader = argument_reader(function, name)
        assert reader is not None
        assert reader.position == position

    @pytest.mark.parametrize("function", [torch.sum, torch.Tensor.prod], ids=["sum", "Tensor.prod"])
    def test_dtype_is_keyword_only_in_every_overload(self, function: Callable[..., object]) -> None:
        reader = argument_reader(function, "dtype")
        assert reader == ArgumentReader("dtype", None, None)

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            pytest.param(torch.max, "dim", id="max-dim"),  # torch.max(input, other)
            pytest.param(torch.max, "other", id="max-other"),
            pytest.param(torch.std, "unbiased", id="std-unbiased"),  # torch.std(input, dim)
            pytest.param(torch.std, "dim", id="std-dim"),
        ],
    )
    def test_an_argument_whose_position_differs_in_overloads_is_unknown(
        self, function: Callable[..., object], name: str
    ) -> None:
        assert argument_reader(function, name) is None
        assert name not in parameter_names(function)
        assert "input" in parameter_names(function)

    def test_overloads_for_plain_numbers_are_ignored(self) -> None:
        assert any(schema.arguments[0].name == "a" for schema in torch._C._jit_get_schemas_for_operator("aten::exp"))
        assert parameter_names(torch.exp) == ("input",)

    def test_keywords_of_numpy_are_read_as_those_of_torch(self) -> None:
        x = torch.ones(2, 3)
        assert torch.equal(torch.sum(x, axis=1, keepdims=True), torch.sum(x, dim=1, keepdim=True))

        assert read(torch.sum, "dim", x, axis=1) == 1
        assert read(torch.sum, "keepdim", x, axis=1, keepdims=True) is True
        assert read(torch.mul, "input", x1="a", x2="b") == "a"
        assert read(torch.mul, "other", x1="a", x2="b") == "b"

    def test_names_have_the_order_of_their_positions(self) -> None:
        names = parameter_names(torch.prod)
        assert names == ("input", "dim", "keepdim", "dtype")

    def test_a_parameter_may_have_the_name_of_a_python_keyword(self) -> None:
        assert "from" not in parameter_names(torch.Tensor.random_)  # random_(to) has another argument there
        assert "generator" in parameter_names(torch.Tensor.random_)


class TestReadings:
    def test_the_schemas_of_an_operator_are_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = parameter_names(torch.addmv)

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} was read again")

        monkeypatch.setattr(signatures, "_overloads_of_operator", refuse)

        assert parameter_names(torch.addmv) == names
        assert argument_reader(torch.addmv, "beta") is not None

    def test_overloads_that_a_library_adds_or_redefines_are_read(self) -> None:
        name, number, real = (
            "ampatch_probe",
            "(Tensor self, int first) -> Tensor",
            ".other(Tensor self, float second) -> Tensor",
        )
        for definitions, names in (
            ([number, real], [["input", "first"], ["input"]]),
            (["(Tensor self) -> Tensor"], [["input"]]),
        ):
            library = torch.library.Library("aten", "FRAGMENT")
            try:
                for definition, expected in zip(definitions, names, strict=True):
                    library.define(f"{name}{definition}")
                    assert list(signatures._readers_of_operator(name)) == expected
            finally:
                library._destroy()

    def test_a_users_function_is_not_kept_alive(self) -> None:
        def function(x: object, mode: str = "a") -> None: ...

        assert parameter_names(function) == ("x", "mode")
        died = weakref.ref(function)
        del function
        assert died() is None

    def test_a_changed_default_of_a_users_function_is_read(self) -> None:
        def function(x: object, mode: str = "a") -> None: ...

        assert read(function, "mode", "x") == "a"
        function.__defaults__ = ("b",)
        assert read(function, "mode", "x") == "b"

    @pytest.mark.parametrize("function", [torch.exp, torch.Tensor.add_, F.interpolate], ids=lambda each: each.__name__)
    def test_the_first_argument_is_the_first_name(self, function: Callable[..., object]) -> None:
        assert first_argument_reader(function) == argument_reader(function, parameter_names(function)[0])

    def test_a_function_without_names_has_no_first_argument(self) -> None:
        assert first_argument_reader(lambda *args: None) is None


class TestListedFunctions:
    @pytest.mark.slow
    def test_arguments_of_listed_functions_are_read_in_every_form(self, subtests: pytest.Subtests) -> None:
        def check(path: str) -> None:
            function = resolve(path)
            names = parameter_names(function)
            assert bool(names) == (path not in UNKNOWN)
            for sample in [sample for sample in SAMPLES[path] if sample.keywords]:  # operators have no names for theirs
                for form in sample.forms():
                    args, kwargs = sample.arguments(Maker([torch.float32]), method=is_method(path), form=form)
                    # Made again with the same seed: the same values under their names.
                    named = sample.build(Maker([torch.float32]))
                    for name, value in named.items():
                        reader = argument_reader(function, name)
                        if reader is not None:
                            assert repr(reader(args, kwargs)) == repr(value), (name, form)
                    for name in names:
                        if name not in named and name not in ("self", "input"):
                            reader = argument_reader(function, name)
                            assert reader is not None
                            assert reader(args, kwargs) == reader.default, (name, form)

        check_rows(subtests, ((path, path) for path in SAMPLES if not lacks(path)), check)

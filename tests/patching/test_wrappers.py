"""What a wrapper does to a call: which arguments are cast and which never, what is obeyed, what an error says."""

from __future__ import annotations

import functools
import sys
import traceback
import types
import warnings
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, casts_on, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from ampatch import amp
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.casting.nested import tensors_in
from ampatch.errors import BannedFunctionError
from ampatch.patching.adapters import Adapters
from ampatch.patching.weight_cache import WeightCache

UNTOUCHED = (torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape).to(dtype)


def seen(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """What a call hands over."""
    return args, kwargs


# Decorated, and so cast by the rule of their list.
DECORATED = {
    "whitelist": amp.half_function(seen),
    "blacklist": amp.float_function(seen),
    "promote": amp.promote_function(seen),
}


class Named(NamedTuple):
    key: object
    value: object


tensors = st.sampled_from((*HALF_DTYPES, torch.float32, *UNTOUCHED)).map(lambda dtype: ones(2, dtype=dtype))
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=2) | st.builds(object)
nested = st.recursive(
    tensors | plain,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inside, max_size=3),
        st.builds(Named, inside, inside),
    ),
    max_leaves=6,
)
calls = st.tuples(st.lists(nested, max_size=3).map(tuple), st.dictionaries(st.sampled_from("pqr"), nested, max_size=2))


def without_tensors(value: object) -> object:
    """What is left of a nested value without its tensors: the classes of containers, and the identity of the rest."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [without_tensors(item) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, {key: without_tensors(item) for key, item in value.items()}
    return id(value)


def expected_dtypes(kind: str, found: list[Tensor], half: torch.dtype) -> list[torch.dtype]:
    """The types that the tensors of a call have after the cast, by the rule of a list."""
    castable = {*HALF_DTYPES, torch.float32}
    mixed = {tensor.dtype for tensor in found} & {*castable, torch.float64}
    target = {
        "whitelist": half,
        "blacklist": torch.float32,
        "promote": functools.reduce(torch.promote_types, mixed) if mixed else None,
    }[kind]
    return [target if tensor.dtype in castable else tensor.dtype for tensor in found]


class TestArguments:
    @pytest.mark.parametrize("kind", DECORATED)
    @pytest.mark.covering(1)
    def test_tensors_in_any_argument_are_cast_and_nothing_else_changes(self, kind, half):
        function = DECORATED[kind]

        @given(calls)
        def holds(call):
            once = function(*call[0], **call[1])
            again = function(*once[0], **once[1])
            assert [t.dtype for t in tensors_in(once)] == expected_dtypes(kind, list(tensors_in(call)), half)
            assert without_tensors(once) == without_tensors(call)
            for before, after in zip(tensors_in(call), tensors_in(once), strict=True):
                assert (before is after) == (before.dtype == after.dtype)
            assert all(new is old for new, old in zip(tensors_in(again), tensors_in(once), strict=True))

        with casts_on(half):
            holds()

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: torch.mm(x, x),
            lambda x: x.half().softmax(0),
            lambda x: x.half().log(),
            lambda x: F.binary_cross_entropy(x.half(), x.half()),
            lambda x: DECORATED["promote"](ones(2).half(), x)[0][0],
        ],
        ids=["whitelist", "via dtype", "blacklist", "banned", "promote"],
    )
    @pytest.mark.covering(1)
    def test_tensors_on_another_type_of_device_have_no_part_in_casts(self, half, call):
        x = torch.ones(2, 2, device="meta")
        expected = call(x).dtype
        with casts_on(half):
            assert call(x).dtype == expected

    def test_tensors_on_a_type_of_device_that_joins_later_are_cast(self):
        device_types = {"cpu"}
        adapters = Adapters(torch.float16, WeightCache(), device_types)
        adapt = adapters.for_treatment(Rule(Path("library", "function"), Treatment.WHITELIST, "a list")).adapt
        x = torch.ones(2, device="meta")
        assert adapt((x,), {})[0][0] is x
        device_types.add("meta")
        assert adapt((x,), {})[0][0].dtype == torch.float16


class TestExplicitDtype:
    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda x, dtype: torch.sum(x, dtype=dtype), id="keyword"),
            pytest.param(lambda x, dtype: x.cumsum(0, dtype=dtype), id="keyword of a method"),
            pytest.param(lambda x, dtype: torch.softmax(x, 0, dtype), id="position"),
            pytest.param(lambda x, dtype: x.softmax(0, dtype), id="position of a method"),
            pytest.param(lambda x, dtype: F.softmax(x, 0, 3, dtype), id="position of a function in Python"),
            pytest.param(lambda x, dtype: torch.norm(x, 2, 0, False, None, dtype), id="position, and not via dtype"),
            pytest.param(lambda x, dtype: x.norm(2, 0, False, dtype), id="position of a method, and not via dtype"),
            pytest.param(lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype), id="linalg"),
        ],
    )
    @pytest.mark.parametrize("dtype", [None, "half", torch.float32, torch.float64], ids=str)
    @pytest.mark.covering(1)
    def test_a_given_dtype_is_obeyed_in_every_place(self, half, call, dtype):
        asked = half if dtype == "half" else dtype
        with casts_on(half):
            assert call(ones(2, dtype=half), asked).dtype == (asked or torch.float32)

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: torch.sum(x, 0),
            lambda x: torch.sum(input=x),
            lambda x: torch.sum(a=x, axis=0),
            lambda x: torch.sum(x, None),
            lambda x: torch.linalg.vector_norm(x=x),
            lambda x: torch.linalg.vector_norm(x, 2, None),
            lambda x: F.softmax(input=x, dim=0),
        ],
        ids=["position", "input", "numpy's name", "None as dim", "x", "None behind", "function in Python"],
    )
    @pytest.mark.covering(1)
    def test_float32_is_computed_whatever_the_argument_is_called(self, half, call):
        x = torch.full((3,), 0.7, dtype=half, requires_grad=True)
        expected = call(x.detach().float())
        with casts_on(half):
            result = call(x)
        torch.testing.assert_close(result.detach(), expected)
        result.sum().backward()
        assert x.grad.dtype == half

    def test_inputs_are_not_cast_where_the_kernel_can_compute_in_float32(self):
        with casts_on(torch.float16):
            torch.softmax(ones(3).half(), 0)
            assert amp.cast_counts().casts == 0
            torch.linalg.matrix_norm(ones(3, 3).half())
            assert amp.cast_counts().casts == 1

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=dtype_name)
    def test_sums_of_other_types_keep_their_type(self, dtype):
        x = ones(2, dtype=dtype)
        with casts_on():
            assert torch.sum(x).dtype == dtype


class TestOut:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
    def test_out_decides_the_type_and_is_written_to(self, half, dtype):
        out = torch.zeros(2, 2, dtype=dtype)
        with casts_on(half):
            result = torch.mm(ones(2, 2), ones(2, 2, dtype=half), out=out)
        assert result is out
        assert_same_bits(out, torch.full((2, 2), 2.0, dtype=dtype))

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda x, out: torch.norm(x, 2, 0, False, out), id="function in Python"),
            pytest.param(lambda x, out: F.normalize(x, 2.0, 0, 1e-12, out), id="composition"),
        ],
    )
    def test_out_is_found_by_position(self, call):
        x = ones(4).half()
        expected = call(x, None)
        out = torch.zeros_like(expected)
        with casts_on(torch.float16):
            call(x, out)
        assert_same_bits(out, expected)

    @pytest.mark.parametrize("extra", [{}, {"dim": 0}], ids=["too many", "twice"])
    def test_wrong_arguments_raise_torch_s_error(self, extra):
        arguments = (ones(2), 0, 3, None) if extra else (ones(2), 0, 3, None, 5)
        with casts_on(), pytest.raises(TypeError):
            F.softmax(*arguments, **extra)

    def test_a_tuple_as_out_is_written_to(self):
        x = torch.diag(torch.tensor([1.0, 2.0]))
        out = torch.zeros(2), torch.zeros(2, 2)
        expected = torch.linalg.eigh(x)
        with casts_on(torch.float16):
            torch.linalg.eigh(x.half(), out=out)
        for found, wanted in zip(out, expected, strict=True):
            assert_same_bits(found, wanted)

    def test_out_of_two_types_turns_casts_off(self):
        out = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
        with casts_on(torch.float16):
            (found,), kwargs = DECORATED["blacklist"](ones(2), out=out)
        assert found.dtype == torch.float16
        assert kwargs["out"] is out

    @pytest.mark.parametrize("out", [None, "a name"])
    def test_out_without_a_tensor_is_an_argument_like_any_other(self, out):
        with casts_on(torch.float16):
            (found,), kwargs = DECORATED["whitelist"](ones(2), out=out)
        assert found.dtype == torch.float16
        assert kwargs["out"] is out


class TestInPlace:
    @pytest.mark.parametrize("name", ["input", "x", "a"])
    def test_blacklisted_in_place_functions_raise_under_every_name_of_their_input(self, half, name):
        x = ones(2, dtype=half)
        with casts_on(half), pytest.raises(BannedFunctionError, match=r"torch\.log_ "):
            torch.log_(**{name: x})
        assert_same_bits(x, ones(2, dtype=half))

    def test_the_tensor_written_to_decides_the_type_also_by_keyword(self):
        x = torch.zeros(3, dtype=torch.float16)
        with casts_on(torch.float16):
            torch.index_put_(values=ones(1), indices=[torch.tensor([1])], input=x)
        assert x.tolist() == [0, 1, 0]

    @pytest.mark.parametrize("index", [torch.tensor([0, 2]), torch.tensor([True, False, True])], ids=["places", "mask"])
    @pytest.mark.covering(1)
    def test_item_assignment_can_be_promoted_by_a_users_list(self, half, index):
        value = nn.Parameter(torch.tensor([1.5, 2.5]))
        written, wide = torch.zeros(3, dtype=half), torch.zeros(3)
        with casts_on(half, cast_lists={"promote": {"torch.Tensor": ["__setitem__"]}}):
            written[index] = value
            wide[index] = written[index].detach()
            wide[1:2] = 3.0
        assert (written.dtype, written.tolist()) == (half, [1.5, 0, 2.5])
        assert (wide.dtype, wide.tolist()) == (torch.float32, [1.5, 3, 2.5])
        written.sum().backward()
        assert value.grad.tolist() == [1, 1]

    @pytest.mark.parametrize("listed", ["whitelist", "promote"])
    @pytest.mark.parametrize("call", [lambda x: F.elu(x, inplace=True), lambda x: F.elu(x, 1.0, True)])
    def test_calls_with_inplace_write_to_the_tensor_that_they_were_given(self, listed, call):
        x = -ones(2)
        with casts_on(torch.bfloat16, cast_lists={listed: {"torch.nn.functional": ["elu"]}}):
            assert call(x) is x
            assert F.elu(x).dtype is (torch.bfloat16 if listed == "whitelist" else torch.float32)
        assert x.gt(-1).all()

    @pytest.mark.parametrize(
        ("namespace", "name", "write", "told"),
        [
            (
                "torch.nn.functional",
                "elu",
                lambda x: F.elu(x, inplace=True),
                r"elu would write to .* Pass inplace=False, or call it on",
            ),
            (
                "torch.Tensor",
                "__setitem__",
                lambda x: x.__setitem__(0, 1.0),
                r"would write .* Call it on tensor\.float\(\)",
            ),
        ],
        ids=["inplace=True", "item assignment"],
    )
    def test_writes_of_blacklisted_functions_raise_and_say_what_to_do(self, namespace, name, write, told):
        x = -ones(2, dtype=torch.bfloat16)
        with casts_on(torch.bfloat16, cast_lists={"blacklist": {namespace: [name]}}):
            with pytest.raises(BannedFunctionError, match=told):
                write(x)
            assert F.elu(x).dtype is (torch.float32 if name == "elu" else torch.bfloat16)
        assert x.tolist() == [-1, -1]

    def test_a_registered_function_with_inplace_writes_to_its_input(self):
        amp.register_bfloat16_function(F, "elu")
        x = -ones(2)
        with casts_on(torch.float16):
            assert F.elu(x, inplace=True) is x

    def test_an_allowed_banned_function_runs_in_float32(self):
        x = torch.full((2,), 0.5, dtype=torch.float16)
        with amp.init(allow_banned=True, half_dtype=torch.float16):
            assert F.binary_cross_entropy(x, x).dtype == torch.float32


class Traced(Tensor):
    """Lets torch go on."""


class Image(Tensor):
    """What comes of it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Diagonal:
    """Stands for a diagonal matrix without being a tensor."""

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*[arg.values.diag() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


CALLS = {
    "builtin": lambda x: torch.mm(x, x),
    "method": lambda x: x.matmul(x),
    "operator": lambda x: x @ x,
    "function in Python": lambda x: F.softmax(x, 0),
    "function in Python, by keyword": lambda x: F.softmax(input=x, dim=0),
}


class TestSubclasses:
    def test_functions_that_torch_does_not_override_run_in_the_mode(self, monkeypatch):
        library = types.ModuleType("library")
        library.zeros = lambda x: torch.zeros(2).to(torch.get_default_dtype())
        monkeypatch.setitem(sys.modules, "library", library)
        with casts_on(cast_lists={"whitelist": {"library": ["zeros"]}}), torch.device("meta"):
            assert library.zeros(ones(2)).device.type == "meta"

    def test_tensors_beside_a_stand_in_by_keyword_are_not_cast(self):
        class Scaled:
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                return kwargs["mat2"]

        with casts_on():
            assert torch.mm(input=Scaled(), mat2=ones(2, 2)).dtype is torch.float32

    @pytest.mark.parametrize("kind", CALLS)
    @pytest.mark.parametrize(("given", "comes_out"), [(Traced, Traced), (Image, Tensor)], ids=["stays-one", "does-not"])
    @pytest.mark.covering(1)
    def test_subclasses_are_cast_and_choose_the_class_of_the_result(self, given, comes_out, kind, half):
        with casts_on(half):
            result = CALLS[kind](ones(2, 2).as_subclass(given))
        assert type(result) is comes_out
        assert result.dtype == (torch.float32 if "in Python" in kind else half)

    @pytest.mark.parametrize("order", [1, -1], ids=["left", "right"])
    def test_stand_ins_for_tensors_get_the_function_and_its_casts(self, order):
        arguments = (Diagonal(torch.tensor([1.0, 2.0])), nn.Parameter(ones(2, 2)))[::order]
        expected = torch.mm(*arguments)
        with casts_on(torch.bfloat16):
            assert_same_bits(torch.mm(*arguments), expected.bfloat16())


# Not handed over themselves: they would be bound before they are patched.
def unbound_method(x, w):
    return Tensor.matmul(x, w)


def imported_by_name(x, w):
    return linear(x, w)


class TestReach:
    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda x, w: x @ w, id="operator"),
            pytest.param(lambda x, w: w @ x, id="operator reversed"),
            pytest.param(lambda x, w: x.matmul(w), id="method"),
            pytest.param(unbound_method, id="unbound method"),
            pytest.param(lambda x, w: functools.partial(torch.mm, x)(w), id="partial"),
            pytest.param(lambda x, w: functools.partial(F.linear, weight=w)(x), id="partial with keywords"),
            pytest.param(lambda x, w: next(map(x.mm, [w])), id="bound method"),
            pytest.param(imported_by_name, id="imported by name"),
        ],
    )
    @pytest.mark.parametrize("swap", [False, True], ids=["half first", "float first"])
    @pytest.mark.covering(1)
    def test_mixed_operands_meet_in_half_in_every_form_of_the_call(self, half, call, swap):
        operands = [torch.full((2, 2), 0.5, dtype=half), nn.Parameter(ones(2, 2))]
        with casts_on(half):
            result = call(*operands[:: -1 if swap else 1])
        assert_same_bits(result.detach(), ones(2, 2, dtype=half))
        result.sum().backward()
        assert_same_bits(operands[1].grad, ones(2, 2))


def notes_of(call) -> list[str]:
    """The notes of the error that a call raises, as a user reads them."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test looks at
        return [line.strip() for line in traceback.format_exception(error) if line.startswith("ampatch:")]
    pytest.fail("no error")


def sparse() -> torch.Tensor:
    """Torch's own kernels on the CPU multiply it in float32, and in neither half type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(2).to_sparse_csr()


class TestErrors:
    @pytest.mark.parametrize(
        ("call", "function", "place"),
        [
            (lambda: torch.linalg.multi_dot([sparse(), ones(2, 2)]), "torch.linalg.multi_dot ", "whitelist.yaml:"),
            (lambda: F.binary_cross_entropy(ones(2).half(), ones(2).half()), "binary_cross_entropy ", "banned.yaml:"),
            (lambda: torch.geqrf(ones(2, 3)), "torch.geqrf", "own.yaml:3"),
        ],
        ids=["whitelist", "banned", "user's list"],
    )
    def test_a_note_names_the_function_and_the_line_of_its_entry(self, write, call, function, place):
        file = write("whitelist:\n  torch:\n    - geqrf\n")
        with casts_on(cast_lists=file):
            (note,) = notes_of(call)
        assert function in note
        assert place in note

    def test_an_error_of_nested_calls_names_the_one_that_cast_once(self):
        attention = nn.MultiheadAttention(4, 2)
        x = ones(2, 1, 4)

        def fails(*args, **kwargs):
            raise RuntimeError("not implemented for 'BFloat16'")

        with casts_on(), mock.patch.object(F, "scaled_dot_product_attention", fails):
            (note,) = notes_of(lambda: attention(x, x, x, need_weights=False))
        assert "multi_head_attention_forward " in note

    def test_the_error_itself_is_torch_s_own(self):
        weight = sparse()

        with pytest.raises(NotImplementedError) as unpatched:
            torch.linalg.multi_dot([weight.bfloat16(), ones(2, 2).bfloat16()])
        with casts_on(), pytest.raises(NotImplementedError) as patched:
            torch.linalg.multi_dot([weight, ones(2, 2)])
        assert type(patched.value) is type(unpatched.value)
        assert str(patched.value) == str(unpatched.value)


class Scale(torch.autograd.Function):
    """Doubles, in the type that it is handed."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class TestDecorated:
    @pytest.mark.parametrize("kind", [staticmethod, classmethod])
    @pytest.mark.parametrize("outer", ["decorator", "kind of method"])
    def test_decorators_work_inside_and_outside_of_static_and_class_methods(self, kind, outer):
        def given(*args):
            return args[-1].dtype

        function = amp.half_function(kind(given)) if outer == "decorator" else kind(amp.half_function(given))
        owner = type("Owner", (), {"given": function})
        with casts_on(torch.float16):
            assert owner.given(ones(2)) == torch.float16
            assert owner().given(ones(2)) == torch.float16
        assert owner.given(ones(2)) == torch.float32

    @pytest.mark.parametrize("outer", ["decorator", "static method"])
    def test_a_decorated_forward_returns_gradients_of_the_inputs_type(self, half, outer):
        given = Scale.__dict__["forward"]
        decorated = (
            amp.half_function(given) if outer == "decorator" else staticmethod(amp.half_function(given.__func__))
        )
        function = type("Decorated", (Scale,), {"forward": decorated})
        x = ones(2).requires_grad_()
        with casts_on(half):
            result = function.apply(x)
        assert result.dtype == half
        result.sum().backward()
        assert_same_bits(x.grad, torch.full((2,), 2.0))

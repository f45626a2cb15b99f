"""Casts of nested arguments: the containers that are opened, their classes, and objects that stay the same."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from helpers import HALF_DTYPES, dtype_name
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from ampatch.casting.nested import CASTABLE, cast_floating, cast_tensors, tensors_in


class Pair(NamedTuple):
    first: object
    second: object


class CheckedPair(Pair):
    """A named tuple that takes other arguments than its fields."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


class Bag(list):
    """A list whose constructor takes other arguments, and which has an attribute."""

    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """A dict whose items are attributes as well, and which cannot be made from a dict."""

    loss: Tensor
    logits: Tensor

    def __post_init__(self):
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_):
        raise TypeError("fields are set one by one")

    def __reduce__(self):
        return type(self), (self.loss, self.logits)


class Point(tuple):
    """A tuple whose constructor takes other arguments."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


class Record(dict):
    """A dict whose attributes are its items."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Both(dict):
    """A dict with its items as attributes, too."""

    def __init__(self, **items):
        super().__init__(items)
        vars(self).update(items)


class Table(collections.OrderedDict):
    """A dict whose constructor takes other arguments, and which has an attribute."""

    def __init__(self, columns):
        self.columns = columns
        super().__init__(dict.fromkeys(columns, torch.zeros(1)))


class Store(MutableMapping):
    """A mapping whose constructor takes other arguments; a shallow copy shares its items."""

    def __init__(self, name, *pairs):
        self.name = name
        self._kept = dict(pairs)

    def __getitem__(self, key):
        return self._kept[key]

    def __setitem__(self, key, item):
        self._kept[key] = item

    def __delitem__(self, key):
        del self._kept[key]

    def __iter__(self):
        return iter(self._kept)

    def __len__(self):
        return len(self._kept)


class Deep(Store):
    """Keeps its items in nested lists, but can be made from a mapping."""

    def __init__(self, items):
        super().__init__("deep", *items.items())
        self._kept = [[self._kept]]

    def __getitem__(self, key):
        return self._kept[0][0][key]

    def __iter__(self):
        return iter(self._kept[0][0])


class Sealed(Deep):
    """Keeps its items deep, and cannot be made from them."""

    def __init__(self, items, seal):
        super().__init__(items)
        self.seal = seal


class Wrong(Deep):
    """Takes a mapping, but does not hold its items."""

    def __init__(self, origin):
        super().__init__({"weight": torch.zeros(1)})
        self.origin = origin


Fields = dataclasses.make_dataclass("Fields", ["first", "second"])
Frozen = dataclasses.make_dataclass("Frozen", ["first", "second"], frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", ["first", "second"], slots=True)
FrozenSlotted = dataclasses.make_dataclass("FrozenSlotted", ["first", "second"], frozen=True, slots=True)


@dataclasses.dataclass
class Derived:
    """Has a field that its constructor does not take, and one that may be missing."""

    first: object
    second: object = dataclasses.field(init=False)
    third: object = dataclasses.field(init=False)

    def __post_init__(self):
        if isinstance(self.first, Tensor):
            self.second = self.first + 1


FIELD_CLASSES = (Fields, Frozen, Slotted, FrozenSlotted)


class Batch:
    """Has a method that casts, which might change what others share."""

    def to(self, dtype):
        raise AssertionError


@dataclasses.dataclass(eq=False)
class Net(nn.Module):
    scale: Tensor

    def __post_init__(self):
        super().__init__()


class Labelled(Tensor):
    """A tensor of a user's class."""


def to_half(value: object) -> Any:
    return cast_floating(value, torch.float16)


def tensors_to_half(value: object) -> Any:
    return cast_tensors(value, lambda tensor: tensor.half() if tensor.dtype in CASTABLE else tensor)


with_each_cast = pytest.mark.parametrize("cast", [tensors_to_half, to_half], ids=["cast_tensors", "cast_floating"])


def assert_cast(found: Any, value: Any, dtype: torch.dtype = torch.float16) -> None:
    """Asserts that castable tensors have the dtype, and that all else is the same."""
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert found.dtype == (dtype if value.dtype in CASTABLE else value.dtype)
        assert (found is value) == (found.dtype == value.dtype)
    elif isinstance(value, Mapping):
        assert list(found) == list(value)
        for key in value:
            assert_cast(found[key], value[key], dtype)
    elif isinstance(value, (list, tuple)):
        assert len(found) == len(value)
        for new, old in zip(found, value, strict=True):
            assert_cast(new, old, dtype)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            assert hasattr(found, field.name) == hasattr(value, field.name)
            assert_cast(getattr(found, field.name, None), getattr(value, field.name, None), dtype)
    else:
        assert found is value


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
tensors = st.sampled_from(DTYPES).map(lambda dtype: torch.zeros(2).to(dtype))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.builds(object)


def containers(inside: st.SearchStrategy) -> st.SearchStrategy:
    lists = st.lists(inside, max_size=3)
    dicts = st.dictionaries(st.text(max_size=2), inside, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.builds(Pair, inside, inside),
    )


nested = st.recursive(tensors | plain, containers, max_leaves=8)


def users_containers(inside: st.SearchStrategy) -> st.SearchStrategy:
    """What `cast_floating` opens, beyond what `cast_tensors` does."""
    dicts = st.dictionaries(st.text(max_size=2), inside, max_size=3)
    return st.one_of(
        containers(inside),
        st.builds(Point, inside, inside),
        *(st.builds(kind, inside, inside) for kind in FIELD_CLASSES),
        st.builds(Derived, inside),
        st.builds(ModelOutput, inside, inside),
        dicts.map(collections.UserDict),
        dicts.map(collections.ChainMap),
        dicts.map(types.MappingProxyType),
        dicts.map(Deep),
        dicts.map(lambda items: Store("name", *items.items())),
    )


handed_in = st.recursive(tensors | plain, users_containers, max_leaves=8)


def contents(value: Any) -> Iterator[object]:
    """Everything in a nested value, from the outside in."""
    yield value
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    else:
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        inside = [getattr(value, name) for name in names if hasattr(value, name)]
    for item in inside:
        yield from contents(item)


@given(nested)
def test_cast_tensors_keeps_the_structure_and_casts_each_tensor(value):
    before, seen = list(contents(value)), []
    found = tensors_to_half(value)

    assert_cast(found, value)
    assert tensors_to_half(found) is found
    assert all(map(operator.is_, contents(value), before))
    assert cast_tensors(value, lambda tensor: seen.append(tensor) or tensor) is value
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in seen]


@given(handed_in, st.sampled_from(sorted(CASTABLE, key=str)))
def test_cast_floating_keeps_the_structure_and_casts_each_tensor(value, dtype):
    before = list(contents(value))
    found = cast_floating(value, dtype)

    assert_cast(found, value, dtype)
    assert cast_floating(found, dtype) is found
    assert all(map(operator.is_, contents(value), before))


@with_each_cast
class TestClassesOfContainers:
    def test_packed_sequence_keeps_its_order(self, cast):
        packed = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
        found = cast(packed)
        assert type(found) is type(packed)
        assert found.data.dtype == torch.float16
        assert all(getattr(found, name) is getattr(packed, name) for name in packed._fields[1:])

    def test_result_tuple_of_torch_keeps_its_class(self, cast):
        result = torch.zeros(3, 2).max(0)
        found = cast(result)
        assert type(found) is type(result)
        assert (found.values.dtype, found.indices.dtype) == (torch.float16, torch.int64)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Point(torch.zeros(1), 2),
            lambda: CheckedPair(torch.zeros(1)),
            lambda: Bag("tools", [torch.zeros(1)]),
            lambda: Table([0, 1]),
        ],
    )
    def test_containers_of_a_users_class_keep_their_attributes(self, cast, make):
        value = make()
        value.note = "here"
        found = cast(value)
        assert (type(found), found[0].dtype, list(found)[1:]) == (type(value), torch.float16, list(value)[1:])
        assert vars(found) == vars(value)

    def test_default_dict_keeps_its_factory(self, cast):
        found = cast(collections.defaultdict(list, weight=torch.zeros(1)))
        assert found["weight"].dtype == torch.float16
        assert found["missing"] == []

    def test_dict_that_is_its_own_attributes_stays_so(self, cast):
        value = Record(weight=torch.zeros(1), name="here")
        found = cast(value)
        found.more = 1
        assert found.weight is found["weight"]
        assert found.weight.dtype == torch.float16
        assert (found["more"], found.name, list(value)) == (1, "here", ["weight", "name"])

    @pytest.mark.parametrize("kind", [ModelOutput, Both])
    def test_items_that_are_attributes_as_well_stay_one(self, cast, kind):
        found = cast(kind(loss=torch.zeros(()), logits=torch.zeros(2)))
        assert type(found) is kind
        assert (found.loss is found["loss"], found.logits is found["logits"]) == (True, True)
        assert (found.loss.dtype, found.logits.dtype) == (torch.float16, torch.float16)


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        torch.device("cpu"),
        torch.float32,
        torch.strided,
        torch.Generator(),
        torch.zeros(1).untyped_storage(),
        nn.Linear(1, 1),
        Net(torch.zeros(1)),
        nn.Linear,
        Fields,
        FrozenSlotted,
        Batch(),
        Tensor,
        {1.5},
        frozenset({1.5}),
        iter([1]),
        (number for number in [1]),
        slice(1, 2),
        range(3),
        "text",
        b"bytes",
        types.SimpleNamespace(),
        print,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_neither_containers_nor_castable_stay_the_same(value):
    held = [value]
    assert tensors_to_half(held) is held
    assert to_half(held) is held


class TestCastFloating:
    @pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.uint8, torch.float8_e4m3fn], ids=dtype_name)
    def test_tensors_of_float32_and_half_types_are_cast_and_no_others(self, dtype, target):
        tensor = torch.zeros(2).to(dtype)
        found = cast_floating(tensor, target)
        assert found.dtype == (target if dtype in (torch.float32, *HALF_DTYPES) else dtype)
        assert (found is tensor) == (found.dtype == dtype)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(2).to_sparse(),
            lambda: torch.eye(2).to_sparse_csr(),
            lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
            lambda: torch.zeros(2).as_subclass(Labelled),
        ],
        ids=["sparse", "compressed", "nested", "subclass"],
    )
    def test_tensors_keep_their_layout_and_class(self, make):
        value = make()
        found = to_half(value)
        assert found.dtype is torch.float16
        assert (type(found), found.layout, found.is_nested) == (type(value), value.layout, value.is_nested)

    @pytest.mark.parametrize("kind", [list, tuple, lambda items: Fields(*items), lambda items: dict(enumerate(items))])
    def test_gradients_flow_through_containers(self, kind):
        tensor = torch.ones(2, requires_grad=True)
        found = to_half(kind([tensor, None]))
        half = found.first if isinstance(found, Fields) else found[0]
        half.sum().backward()
        assert tensor.grad.tolist() == [1, 1]
        assert tensor.grad.dtype == torch.float32


class TestCastFloatingOfMappings:
    def test_mapping_keeps_attributes_that_are_no_items(self):
        class Named(collections.UserDict):
            pass

        value = Named(weight=torch.zeros(1))
        value.origin, value.average = ["here"], torch.zeros(1)
        found = to_half(value)
        assert (found.origin is value.origin, found.average is value.average) == (True, True)

        store = Store("name", ("weight", torch.zeros(1)))
        found = to_half(store)
        found["more"] = 1
        assert (found.name, list(store)) == ("name", ["weight"])

    @pytest.mark.parametrize(
        "value", [Sealed({"weight": torch.zeros(1)}, "wax"), Wrong("here")], ids=["sealed", "wrong"]
    )
    def test_mapping_that_cannot_be_rebuilt_stays_the_same(self, value):
        assert to_half(value) is value


class TestCastFloatingOfDataclasses:
    def test_dataclass_is_rebuilt_without_its_constructor(self):
        value = Derived(torch.zeros(1))
        value.second = torch.full((1,), 7.0)
        found = to_half(value)
        assert (found.first.dtype, found.second.dtype) == (torch.float16, torch.float16)
        assert found.second.item() == 7
        assert not hasattr(found, "third")

    def test_dataclass_keeps_attributes_that_are_no_fields(self):
        value = Fields(torch.zeros(1), 2)
        value.note = note = torch.zeros(1)
        assert to_half(value).note is note

    @pytest.mark.parametrize("kept_in", [{}, {"__slots__": ("note",)}], ids=["attributes", "slots"])
    @pytest.mark.parametrize("kind", [Slotted, FrozenSlotted], ids=lambda kind: kind.__name__)
    def test_subclass_of_a_slotted_dataclass_keeps_its_attributes(self, kind, kept_in):
        more = type("More", (kind,), kept_in)
        value = more(torch.zeros(1), 2)
        object.__setattr__(value, "note", "here")
        found = to_half(value)
        assert (type(found), found.note, found.first.dtype) == (more, "here", torch.float16)

    def test_dataclass_keeps_an_attribute_behind_a_property(self):
        class Noted(Fields):
            @property
            def note(self):
                return self.__dict__["note"]

        value = Noted(torch.zeros(1), 2)
        value.__dict__["note"] = "here"
        assert to_half(value).note == "here"

    def test_dataclass_that_is_a_dict_has_fields_and_items_cast(self):
        @dataclasses.dataclass
        class Annotated(dict):
            scale: Tensor

        value = Annotated(torch.zeros(1))
        value["weight"] = torch.zeros(1)
        found = to_half(value)
        assert type(found) is Annotated
        assert (found.scale.dtype, found["weight"].dtype) == (torch.float16, torch.float16)


class TestContainersThatHoldThemselves:
    def test_dict_that_holds_itself_in_a_tuple_is_opened_once(self):
        value = {"weight": torch.zeros(1)}
        value["back"] = ([value],)
        found = to_half(value)
        assert found["weight"].dtype == torch.float16
        assert found["back"][0][0] is value

    def test_mapping_and_dataclass_that_hold_each_other_are_opened_once(self):
        value = Fields(collections.UserDict(weight=torch.zeros(1)), None)
        value.first["back"] = value
        value.second = value.first
        found = to_half(value)
        assert found.first["weight"].dtype == found.second["weight"].dtype == torch.float16
        assert found.first["back"] is value

    def test_list_that_holds_itself_without_casts_stays_the_same(self):
        value = [torch.zeros(1, dtype=torch.int64)]
        value.append((value, {"back": value}))
        assert to_half(value) is value

    def test_container_in_two_places_is_cast_in_both(self):
        shared = [torch.zeros(1)]
        found = to_half([shared, shared])
        assert found[0] is found[1]
        assert found[0][0].dtype == torch.float16


def causal_output(**more: Any) -> CausalLMOutputWithPast:
    hidden = (torch.zeros(2, 3), torch.zeros(2, 3))
    return CausalLMOutputWithPast(loss=torch.zeros(()), logits=torch.zeros(2, 5), hidden_states=hidden, **more)


class TestHuggingFace:
    def test_output_is_cast_to_half_and_back(self):
        value = causal_output()
        halves = to_half(value)
        found = cast_floating(halves, torch.float32)
        assert type(found) is type(halves) is CausalLMOutputWithPast
        assert halves.loss is halves["loss"]
        assert halves.loss is halves[0]
        assert halves.hidden_states is halves["hidden_states"]
        assert {tensor.dtype for tensor in tensors_in(halves.to_tuple())} == {torch.float16}
        assert {tensor.dtype for tensor in tensors_in(found.to_tuple())} == {torch.float32}
        assert found.attentions is None
        assert copy.copy(found).logits is found.logits
        assert list(found) == list(value) == ["loss", "logits", "hidden_states"]
        assert value.loss.dtype == torch.float32

    def test_output_attribute_that_is_none_stays_none(self):
        value = causal_output()
        value.loss = None
        found = to_half(value)
        assert found.loss is None
        assert found["loss"].dtype == torch.float16  # as in the library: the item is still there

    def test_output_keeps_attributes_and_items_of_no_field(self):
        value = causal_output()
        value.note = "here"
        value["extra"] = torch.zeros(1)
        found = to_half(value)
        assert found.note == "here"
        assert found.extra is found["extra"]
        assert found.extra.dtype == torch.float16

    @pytest.mark.parametrize("only", [[torch.zeros(1)], {"a": torch.zeros(1)}, (("a", torch.zeros(1)),)], ids=repr)
    def test_output_of_one_container_is_not_mistaken_for_its_items(self, only):
        value = BaseModelOutput(last_hidden_state=torch.zeros(1))
        value["last_hidden_state"] = only
        found = to_half(value)
        assert_cast(found, value)
        assert found.last_hidden_state is found["last_hidden_state"]

    def test_batch_encoding_keeps_integers_and_attributes(self):
        ids = torch.zeros(2, dtype=torch.int64)
        value = BatchEncoding({"input_ids": ids, "inputs_embeds": torch.zeros(2)}, n_sequences=2)
        found = to_half(value)
        assert type(found) is BatchEncoding
        assert found.input_ids is found["input_ids"] is ids
        assert found.inputs_embeds.dtype == torch.float16
        assert found.n_sequences == 2
        assert value.inputs_embeds.dtype == torch.float32
        assert to_half(found) is found


@dataclasses.dataclass
class Nested:
    inner: Frozen
    rest: dict[str, object]


VALUES = {
    "tensor": lambda x: x,
    "list": lambda x: [x, [x, 1], None],
    "tuple": lambda x: (x, (x, ("text", 2))),
    "named tuple": lambda x: Pair(x, (x, 1)),
    "dict": lambda x: {"a": x, "b": {"c": [x]}},
    "ordered dict": lambda x: collections.OrderedDict(a=x, b=(x,)),
    "Fields": lambda x: Fields(x, [x, {"a": x}]),
    "Frozen": lambda x: Frozen(x, (x, 1)),
    "Slotted": lambda x: Slotted(x, 1),
    "FrozenSlotted": lambda x: FrozenSlotted(x, 1),
    "dataclasses": lambda x: [Nested(Frozen(x, 1), {"a": Fields(x, 2)}), Fields(x, None)],
    "ModelOutput": lambda x: causal_output(attentions=(x, x)),
}


@pytest.mark.usefixtures("nothing_compiled")
class TestCompiled:
    @pytest.mark.parametrize("name", VALUES)
    def test_compiled_cast_is_one_graph_with_the_eager_result(self, name):
        value = VALUES[name](torch.ones(2))
        counter = CompileCounterWithBackend("aot_eager")
        found = torch.compile(to_half, backend=counter, fullgraph=True)(value)
        assert counter.frame_count == 1
        assert_cast(found, value)

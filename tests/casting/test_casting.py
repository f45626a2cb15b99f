"""Casts of nested arguments: what is walked, what keeps its class, and what comes back as the very same object."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqModelOutput
from transformers.utils import ModelOutput as HuggingFaceOutput

from ampatch.casting.nested import CASTABLE, cast_floating, cast_tensors, tensors_in


class Pair(NamedTuple):
    first: object
    second: object


class CheckedPair(Pair):
    """A named tuple that takes other arguments than its fields."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


class Bag(list):
    """A list that cannot be made from its items alone, and has more to it than they."""

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
    """A tuple that is made from other arguments than its items, and has more to it than they."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


class Record(dict):
    """A dict whose attributes are its items, in the way that many a training script has it."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class Store(MutableMapping):
    """A mapping of a user's, made from anything; a shallow copy shares its items."""

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
    """Keeps its items where nobody would look for them, but can be made from a mapping."""

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
    """Can be made from a mapping, but not from its items."""

    def __init__(self, origin):
        super().__init__({"weight": torch.zeros(1)})
        self.origin = origin


@dataclasses.dataclass
class Fields:
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: object
    second: object


@dataclasses.dataclass(slots=True)
class Slotted:
    first: object
    second: object


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    first: object
    second: object


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
    """What a user's loader gives; ``to`` writes to itself."""

    def __init__(self, images):
        self.images = images

    def to(self, dtype):
        self.images = self.images.to(dtype)
        return self


def halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def cast(value: object) -> object:
    return cast_tensors(value, halved)


def halved_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 else dtype


def castable_to(target: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    return lambda dtype: target if dtype in CASTABLE else dtype


# A rebuilt container holds other tensors: what else it holds is compared by identity, tensors by the rule.
def assert_cast(found: Any, value: Any, rule: Callable[[torch.dtype], torch.dtype] = halved_dtype) -> None:
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert found.dtype == rule(value.dtype)
        assert (found is value) == (found.dtype == value.dtype)
    elif isinstance(value, Mapping):
        assert list(found) == list(value)
        for key in value:
            assert_cast(found[key], value[key], rule)
    elif isinstance(value, (list, tuple)):
        assert len(found) == len(value)
        for new, old in zip(found, value, strict=True):
            assert_cast(new, old, rule)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            assert hasattr(found, field.name) == hasattr(value, field.name)
            assert_cast(getattr(found, field.name, None), getattr(value, field.name, None), rule)
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
        dicts.map(types.MappingProxyType),
        dicts.map(Deep),
        dicts.map(lambda items: Store("name", *items.items())),
    )


handed_in = st.recursive(tensors | plain, users_containers, max_leaves=8)
halves = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


def to_half(value: object) -> Any:
    return cast_floating(value, torch.float16)


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


class TestCastTensors:
    @given(nested)
    def test_structure_stays_and_each_tensor_follows_the_rule(self, value):
        assert_cast(cast(value), value)

    @given(nested)
    def test_a_second_cast_changes_nothing(self, value):
        once = cast(value)
        assert cast(once) is once

    @given(nested)
    def test_the_very_same_object_comes_back_where_no_tensor_changed(self, value):
        assert cast_tensors(value, unchanged) is value

    @given(nested)
    def test_what_was_handed_over_is_not_changed(self, value):
        before = list(tensors_in(value))
        cast(value)
        assert all(new is old for new, old in zip(tensors_in(value), before, strict=True))

    @pytest.mark.parametrize("empty", [[], (), {}, torch.Size([]), collections.OrderedDict()], ids=repr)
    def test_empty_container_comes_back_itself(self, empty):
        assert cast(empty) is empty

    def test_size_comes_back_itself(self):
        size = torch.Size([2, 3])
        assert cast(size) is size

    def test_default_dict_keeps_its_factory(self):
        found = cast(collections.defaultdict(list, weight=torch.zeros(1)))
        assert found["weight"].dtype == torch.float16
        assert found["missing"] == []

    def test_dict_whose_items_are_attributes_keeps_both_in_step(self):
        found = cast(ModelOutput(loss=torch.zeros(()), logits=torch.zeros(2)))
        assert type(found) is ModelOutput
        assert found.loss is found["loss"]
        assert (found.loss.dtype, found.logits.dtype) == (torch.float16, torch.float16)

    def test_list_of_a_users_class_keeps_its_attributes(self):
        found = cast(Bag("tools", [torch.zeros(1)]))
        assert (type(found), found.name, found[0].dtype) == (Bag, "tools", torch.float16)

    def test_named_tuple_with_its_own_constructor_is_rebuilt_field_by_field(self):
        found = cast(CheckedPair(torch.zeros(1)))
        assert type(found) is CheckedPair
        assert found.first.dtype == found.second.dtype == torch.float16

    def test_packed_sequence_keeps_its_order(self):
        packed = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
        found = cast(packed)
        assert type(found) is type(packed)
        assert found.data.dtype == torch.float16
        assert all(getattr(found, name) is getattr(packed, name) for name in packed._fields[1:])

    def test_result_tuple_of_torch_keeps_its_class(self):
        result = torch.zeros(3, 2).max(0)
        found = cast(result)
        assert type(found) is type(result)
        assert (found.values.dtype, found.indices.dtype) == (torch.float16, torch.int64)

    @pytest.mark.parametrize(
        "value",
        [{torch.float32}, iter([1]), nn.Linear(1, 1), slice(1, 2), "text", b"bytes"],
        ids=lambda v: type(v).__name__,
    )
    def test_what_is_no_container_is_handed_on_unopened(self, value):
        assert cast(value) is value


class TestTensorsIn:
    @given(nested)
    def test_finds_what_cast_tensors_casts_in_the_same_order(self, value):
        seen = []

        def note(tensor):
            seen.append(tensor)
            return tensor

        cast_tensors(value, note)
        assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in seen]


def outline(value: object) -> list[tuple[type, torch.dtype | None]]:
    return [(type(item), item.dtype if isinstance(item, Tensor) else None) for item in contents(value)]


class TestCastFloating:
    @given(handed_in, st.sampled_from(sorted(CASTABLE, key=str)))
    def test_structure_stays_and_each_castable_tensor_gets_the_type(self, value, dtype):
        assert_cast(cast_floating(value, dtype), value, castable_to(dtype))

    @given(handed_in)
    def test_a_second_cast_changes_nothing(self, value):
        once = to_half(value)
        assert to_half(once) is once

    @given(handed_in)
    def test_what_was_handed_over_is_not_changed(self, value):
        before = list(contents(value))
        to_half(value)
        assert all(map(operator.is_, contents(value), before))

    @given(handed_in)
    def test_there_and_back_again(self, value):
        back = cast_floating(to_half(value), torch.float32)
        assert {dtype for _, dtype in outline(back)}.isdisjoint({torch.float16, torch.bfloat16})
        assert [kind for kind, _ in outline(back)] == [kind for kind, _ in outline(value)]

    @halves
    @pytest.mark.parametrize("dtype", sorted(CASTABLE, key=str), ids=dtype_name)
    def test_casts_the_floating_types(self, dtype, half):
        assert cast_floating(torch.zeros(2, dtype=dtype), half).dtype == half

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn],
        ids=dtype_name,
    )
    def test_leaves_the_other_types(self, dtype):
        tensor = torch.zeros(2).to(dtype)
        assert to_half(tensor) is tensor
        assert cast_floating(tensor, torch.float32) is tensor

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
    @pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=lambda convert: convert.__name__)
    def test_sparse_tensors_keep_their_layout(self, convert):
        value = convert(torch.eye(2))
        found = to_half(value)
        assert (found.layout, found.dtype) == (value.layout, torch.float16)

    def test_nested_tensor_stays_nested(self):
        value = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
        found = to_half(value)
        assert (type(found), found.is_nested, found.dtype) == (type(value), True, torch.float16)

    def test_tensor_of_a_users_class_keeps_it(self):
        class Labelled(Tensor):
            pass

        found = to_half(torch.zeros(2).as_subclass(Labelled))
        assert (type(found), found.dtype) == (Labelled, torch.float16)

    @pytest.mark.parametrize("kind", [list, tuple, lambda items: Fields(*items), lambda items: dict(enumerate(items))])
    def test_gradients_flow_through(self, kind):
        tensor = torch.ones(2, requires_grad=True)
        found = to_half(kind([tensor, None]))
        half = found.first if isinstance(found, Fields) else found[0]
        half.sum().backward()
        assert tensor.grad.tolist() == [1, 1]
        assert tensor.grad.dtype == torch.float32

    def test_packed_sequence_and_torchs_results_keep_their_class(self):
        packed = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
        result = torch.zeros(3, 2).max(0)
        found, found_result = to_half([packed, result])
        assert (type(found), type(found_result)) == (type(packed), type(result))
        assert (found.data.dtype, found.batch_sizes.dtype) == (torch.float16, torch.int64)
        assert found.unsorted_indices is packed.unsorted_indices
        assert (found_result.values.dtype, found_result.indices.dtype) == (torch.float16, torch.int64)

    @pytest.mark.parametrize("make", [lambda: Point(torch.zeros(1), 2), lambda: CheckedPair(torch.zeros(1))])
    def test_tuple_of_a_users_class_keeps_its_attributes(self, make):
        value = make()
        value.name = "here"
        found = to_half(value)
        assert (type(found), found.name, found[0].dtype) == (type(value), "here", torch.float16)

    def test_list_and_dict_of_a_users_class_keep_their_attributes(self):
        class Table(collections.OrderedDict):
            def __init__(self, columns):
                self.columns = columns
                super().__init__(dict.fromkeys(columns, torch.zeros(1)))

        bag, table = to_half([Bag("tools", [torch.zeros(1)]), Table(["a", "b"])])
        assert (type(bag), bag.name, bag[0].dtype) == (Bag, "tools", torch.float16)
        assert (type(table), table.columns, table["b"].dtype) == (Table, ["a", "b"], torch.float16)
        assert list(table) == ["a", "b"]

    def test_default_dict_keeps_its_factory(self):
        found = to_half(collections.defaultdict(list, weight=torch.zeros(1)))
        assert found["weight"].dtype == torch.float16
        assert found["missing"] == []

    def test_dict_that_is_its_own_attributes_stays_so(self):
        value = Record(weight=torch.zeros(1), name="here")
        found = to_half(value)
        found.more = 1
        assert found.weight is found["weight"]
        assert found.weight.dtype == torch.float16
        assert (found["more"], found.name, list(value)) == (1, "here", ["weight", "name"])

    def test_items_that_are_attributes_as_well_stay_one(self):
        class Both(dict):
            def __init__(self, **items):
                super().__init__(items)
                vars(self).update(items)

        found = to_half(Both(weight=torch.zeros(1)))
        assert found.weight is found["weight"]
        assert found.weight.dtype == torch.float16


class TestCastFloatingOfMappings:
    @pytest.mark.parametrize(
        "make",
        [
            lambda items: Store("name", *items.items()),
            collections.UserDict,
            collections.ChainMap,
            types.MappingProxyType,
            Deep,
        ],
        ids=["users", "UserDict", "ChainMap", "mappingproxy", "deep"],
    )
    def test_class_stays_and_the_old_one_is_not_written_to(self, make):
        weight, ids = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
        value = make({"weight": weight, "ids": ids})
        found = to_half(value)
        assert type(found) is type(value)
        assert found["weight"].dtype == torch.float16
        assert found["ids"] is ids
        assert value["weight"] is weight

    def test_attributes_are_kept(self):
        class Named(collections.UserDict):
            pass

        value = Named(weight=torch.zeros(1))
        value.origin = ["here"]
        value.average = torch.zeros(1)
        found = to_half(value)
        assert found.origin is value.origin
        assert found.average is value.average  # no item
        assert to_half(Store("name", ("weight", torch.zeros(1)))).name == "name"

    def test_a_change_of_the_new_one_is_none_of_the_old(self):
        value = Store("name", ("weight", torch.zeros(1)))
        found = to_half(value)
        found["more"] = 1
        assert list(value) == ["weight"]

    @pytest.mark.parametrize(
        "value", [Sealed({"weight": torch.zeros(1)}, "wax"), Wrong("here")], ids=["sealed", "wrong"]
    )
    def test_one_that_cannot_be_made_again_is_left_as_it_is(self, value):
        assert to_half(value) is value


class TestCastFloatingOfDataclasses:
    @pytest.mark.parametrize("kind", FIELD_CLASSES, ids=lambda kind: kind.__name__)
    def test_fields_are_cast_whatever_the_kind(self, kind):
        ids = torch.zeros(1, dtype=torch.int64)
        value = kind([torch.zeros(1)], ids)
        found = to_half(value)
        assert type(found) is kind
        assert found.first[0].dtype == torch.float16
        assert found.second is ids
        assert value.first[0].dtype == torch.float32

    def test_constructor_is_not_called_again(self):
        value = Derived(torch.zeros(1))
        value.second = torch.full((1,), 7.0)
        found = to_half(value)
        assert (found.first.dtype, found.second.dtype) == (torch.float16, torch.float16)
        assert found.second.item() == 7
        assert not hasattr(found, "third")

    def test_what_is_no_field_is_kept(self):
        value = Fields(torch.zeros(1), 2)
        value.note = note = torch.zeros(1)
        assert to_half(value).note is note

    @pytest.mark.parametrize("kept_in", [{}, {"__slots__": ("note",)}], ids=["attributes", "slots"])
    @pytest.mark.parametrize("kind", [Slotted, FrozenSlotted], ids=lambda kind: kind.__name__)
    def test_what_a_subclass_of_a_slotted_one_adds_is_kept(self, kind, kept_in):
        more = type("More", (kind,), kept_in)
        value = more(torch.zeros(1), 2)
        object.__setattr__(value, "note", "here")
        found = to_half(value)
        assert (type(found), found.note, found.first.dtype) == (more, "here", torch.float16)

    def test_attribute_behind_a_property_is_kept(self):
        class Noted(Fields):
            @property
            def note(self):
                return self.__dict__["note"]

        value = Noted(torch.zeros(1), 2)
        value.__dict__["note"] = "here"
        assert to_half(value).note == "here"

    def test_fields_of_a_dict_that_does_not_hold_them_are_cast_as_its_items_are(self):
        @dataclasses.dataclass
        class Annotated(dict):
            scale: Tensor

        value = Annotated(torch.zeros(1))
        value["weight"] = torch.zeros(1)
        found = to_half(value)
        assert type(found) is Annotated
        assert (found.scale.dtype, found["weight"].dtype) == (torch.float16, torch.float16)

    @pytest.mark.parametrize("kind", [Fields, FrozenSlotted], ids=lambda kind: kind.__name__)
    def test_class_and_module_are_handed_on(self, kind):
        @dataclasses.dataclass(eq=False)
        class Net(nn.Module):
            scale: object

            def __post_init__(self):
                super().__init__()

        net = Net.__new__(Net)
        nn.Module.__init__(net)
        net.scale = torch.zeros(1)
        value = [kind, net]
        assert to_half(value) is value


class TestCastFloatingOfOtherObjects:
    def test_one_with_a_method_to_is_left_as_it_is(self):
        value = Batch(torch.zeros(2))
        assert to_half([value])[0] is value
        assert value.images.dtype is torch.float32

    @pytest.mark.parametrize(
        "value",
        [
            torch.device("cpu"),
            torch.float32,
            torch.strided,
            torch.Generator(),
            torch.zeros(1).untyped_storage(),
            nn.Linear(1, 1),
            nn.Linear,
            Batch,
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
        ids=lambda value: f"{type(value).__name__}",
    )
    def test_what_is_neither_container_nor_castable_is_handed_on(self, value):
        held = [value]
        assert to_half(held) is held


class TestCastFloatingOfWhatHoldsItself:
    def test_list(self):
        value = [torch.zeros(1)]
        value.append(value)
        found = to_half(value)
        assert found[0].dtype == torch.float16
        assert found[1] is value
        assert value[0].dtype == torch.float32

    def test_dict_by_way_of_a_tuple(self):
        value = {"weight": torch.zeros(1)}
        value["back"] = ([value],)
        found = to_half(value)
        assert found["weight"].dtype == torch.float16
        assert found["back"][0][0] is value

    def test_mapping_and_dataclass(self):
        value = Fields(collections.UserDict(weight=torch.zeros(1)), None)
        value.first["back"] = value
        value.second = value.first
        found = to_half(value)
        assert found.first["weight"].dtype == found.second["weight"].dtype == torch.float16
        assert found.first["back"] is value

    def test_one_without_anything_to_cast_comes_back_itself(self):
        value = [torch.zeros(1, dtype=torch.int64)]
        value.append((value, {"back": value}))
        assert to_half(value) is value

    def test_what_stands_in_two_places_is_cast_in_both(self):
        shared = [torch.zeros(1)]
        found = to_half([shared, shared])
        assert [item[0].dtype for item in found] == [torch.float16, torch.float16]


def causal_output(**more: Any) -> CausalLMOutputWithPast:
    hidden = (torch.zeros(2, 3), torch.zeros(2, 3))
    return CausalLMOutputWithPast(loss=torch.zeros(()), logits=torch.zeros(2, 5), hidden_states=hidden, **more)


class TestHuggingFace:
    def test_output_goes_in_and_comes_out_as_one(self):
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
        assert list(found) == list(value) == ["loss", "logits", "hidden_states"]
        assert value.loss.dtype == torch.float32

    def test_output_comes_back_itself_where_nothing_changed(self):
        value = causal_output()
        assert cast_floating(value, torch.float32) is value

    def test_gradients_flow_through_an_output(self):
        loss = torch.ones((), requires_grad=True)
        to_half(CausalLMOutputWithPast(loss=loss)).loss.backward()
        assert loss.grad.item() == 1

    def test_output_of_outputs(self):
        value = HuggingFaceOutput(inner=causal_output(), name="both")
        found = to_half(value)
        assert type(found) is HuggingFaceOutput
        assert type(found["inner"]) is CausalLMOutputWithPast
        assert found["inner"].logits.dtype == torch.float16

    def test_attribute_that_was_taken_out_stays_out(self):
        value = causal_output()
        value.loss = None
        found = to_half(value)
        assert found.loss is None
        assert found["loss"].dtype == torch.float16  # as in the library: the item is still there

    def test_attribute_of_no_field_is_kept(self):
        value = causal_output()
        value.note = "here"
        value["extra"] = torch.zeros(1)
        found = to_half(value)
        assert found.note == "here"
        assert found.extra is found["extra"]
        assert found.extra.dtype == torch.float16

    @pytest.mark.parametrize("only", [[torch.zeros(1)], {"a": torch.zeros(1)}, (("a", torch.zeros(1)),)], ids=repr)
    def test_output_of_one_container_is_not_taken_for_its_items(self, only):
        value = BaseModelOutput(last_hidden_state=torch.zeros(1))
        value["last_hidden_state"] = only
        found = to_half(value)
        assert_cast(found, value, castable_to(torch.float16))
        assert found.last_hidden_state is found["last_hidden_state"]

    def test_output_can_be_copied_and_compared_afterwards(self):
        found = copy.copy(to_half(Seq2SeqModelOutput(last_hidden_state=torch.zeros(1))))
        assert type(found) is Seq2SeqModelOutput
        assert found.last_hidden_state.dtype == torch.float16

    def test_batch_keeps_its_integers_and_what_else_it_knows(self):
        ids = torch.zeros(2, dtype=torch.int64)
        value = BatchEncoding({"input_ids": ids, "inputs_embeds": torch.zeros(2)}, n_sequences=2)
        found = to_half(value)
        assert type(found) is BatchEncoding
        assert found.input_ids is found["input_ids"] is ids
        assert found.inputs_embeds.dtype == torch.float16
        assert found.n_sequences == 2
        assert value.inputs_embeds.dtype == torch.float32

    def test_batch_of_integers_comes_back_itself(self):
        value = BatchEncoding({"input_ids": torch.zeros(2, dtype=torch.int64)})
        assert to_half(value) is value


class Hooked(nn.Module):
    """Inputs are cast to half, outputs to float32."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_forward_pre_hook(lambda module, args: to_half(args))
        self.register_forward_hook(lambda module, args, output: cast_floating(output, torch.float32))

    def forward(self, value):
        return self.function(value)


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


class TestCompiled:
    @pytest.fixture(autouse=True)
    def nothing_compiled(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    # Hooks of the very module that torch.compile is handed are traced apart from its forward: it is put into another.
    @pytest.mark.slow
    @pytest.mark.parametrize("name", VALUES)
    def test_hooks_are_traced_into_the_one_graph(self, name):
        value = VALUES[name](torch.ones(2))
        seen = []

        def look(value):
            seen.append([item.dtype for item in contents(value) if isinstance(item, Tensor)])
            return value

        counter = CompileCounterWithBackend("aot_eager")
        found = torch.compile(nn.Sequential(Hooked(look)), backend=counter, fullgraph=True)(value)
        assert counter.frame_count == 1
        assert outline(found) == outline(value)
        assert [set(dtypes) for dtypes in seen] == [{torch.float16}]

    @pytest.mark.parametrize("name", VALUES)
    def test_result_is_that_of_eager_code(self, name):
        value = VALUES[name](torch.ones(2))
        counter = CompileCounterWithBackend("aot_eager")
        found = torch.compile(to_half, backend=counter, fullgraph=True)(value)
        assert counter.frame_count == 1
        assert_cast(found, value, castable_to(torch.float16))

    @pytest.mark.slow
    def test_gradients_flow_through_the_graph(self):
        module = Hooked(lambda fields: {"loss": (fields.first * fields.second).sum()})
        x = torch.full((2,), 3.0, requires_grad=True)
        compiled = torch.compile(nn.Sequential(module), backend="aot_eager", fullgraph=True)
        loss = compiled(Fields(x, torch.ones(2)))["loss"]
        loss.backward()
        assert loss.dtype == torch.float32
        assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [1, 1])

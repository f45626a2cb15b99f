"""Casts of nested arguments: what is walked, what keeps its class, and what comes back as the very same object."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ampatch.casting import cast_tensors, tensors_in


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


def halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def cast(value: object) -> object:
    return cast_tensors(value, halved)


# A rebuilt container holds other tensors: what else it holds is compared by identity, tensors by the rule.
def assert_cast(found: object, value: object) -> None:
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert found.dtype == (torch.float16 if value.dtype == torch.float32 else value.dtype)
        assert (found is value) == (value.dtype != torch.float32)
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key in value:
            assert_cast(found[key], value[key])
    elif isinstance(value, (list, tuple)):
        assert len(found) == len(value)
        for new, old in zip(found, value, strict=True):
            assert_cast(new, old)
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

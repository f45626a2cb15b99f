"""Results that a forward at O2 leaves in the containers of its arguments reach the caller, in float32."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from working_net import Net, initialized

from ampatch import amp
from ampatch.casting import write_back

HALF, FLOAT32 = torch.bfloat16, torch.float32


def half_copy(work: Callable[..., object]) -> nn.Module:
    """A copy that casts its arguments although the session has ended."""
    twin = copy.deepcopy(amp.initialize(Net(work), opt_level="O3", half_dtype=HALF, verbosity=0))
    amp.deinitialize()
    return twin


def ones() -> Tensor:
    return torch.ones(2, 4)


@dataclass
class Batch:
    x: Tensor
    out: Tensor | None = None


@dataclass(slots=True)
class Slots:
    x: Tensor
    out: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    """Keeps what its property returns under the same name."""

    x: Tensor
    y: Tensor

    @property
    def out(self) -> Tensor:
        return vars(self)["out"]  # type: ignore[no-any-return]


class Attributes(dict[str, Any]):
    """Items as attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def set_item(layer: nn.Module, batch: Any) -> None:
    batch["out"] = layer(batch["x"])


def set_attribute(layer: nn.Module, batch: Any) -> None:
    batch.out = layer(batch.x)


class TestResults:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: {"x": ones()}, id="dict"),
            pytest.param(lambda: collections.OrderedDict(x=ones()), id="OrderedDict"),
            pytest.param(lambda: collections.defaultdict(list, x=ones()), id="defaultdict"),
            pytest.param(lambda: collections.UserDict(x=ones()), id="UserDict"),
            pytest.param(lambda: Attributes(x=ones()), id="subclass"),
            pytest.param(lambda: {"x": ones().to(HALF)}, id="nothing cast"),
        ],
    )
    def test_result_under_a_new_key_can_be_trained_on(self, make: Callable[[], Any]) -> None:
        batch = make()
        x, model = batch["x"], half_copy(set_item)

        model(batch)
        batch["out"].sum().backward()

        assert batch["x"] is x
        assert batch["out"].dtype is FLOAT32
        assert all(parameter.grad is not None for parameter in model.parameters())

    @pytest.mark.parametrize("make", [Batch, Slots, lambda x: Attributes(x=x)])
    def test_result_in_an_attribute_is_float32_and_the_argument_kept(self, make: Callable[[Tensor], Any]) -> None:
        x = ones()
        batch = make(x)

        half_copy(set_attribute)(batch=batch)

        assert batch.x is x
        assert batch.out.dtype is FLOAT32

    def test_attributes_that_are_set_and_deleted_where_the_class_has_other_ways(self) -> None:
        frozen, slots = Frozen(ones(), ones()), Slots(ones(), ones())

        def work(layer: nn.Module, frozen: Frozen, slots: Slots) -> None:
            vars(frozen)["out"] = layer(frozen.x)
            object.__setattr__(frozen, "x", frozen.out)
            object.__delattr__(frozen, "y")
            del slots.out

        half_copy(work)(frozen, slots)

        assert frozen.x is frozen.out
        assert frozen.out.dtype is FLOAT32
        assert not hasattr(frozen, "y")
        assert not hasattr(slots, "out")

    @pytest.mark.parametrize("outer", [lambda inner: [inner], lambda inner: (1, (inner,)), lambda inner: {"a": inner}])
    def test_result_in_a_nested_container_is_float32(self, outer: Callable[[object], object]) -> None:
        inner = {"x": ones()}

        def work(layer: nn.Module, batch: Any) -> None:
            found = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch[1][0]
            set_item(layer, found)

        half_copy(work)(outer(inner))

        assert inner["out"].dtype is FLOAT32

    def test_items_that_are_appended_replaced_and_removed(self) -> None:
        x = ones()
        batch, hidden = Attributes(x=ones(), gone=1), [x, ones(), "kept", "gone"]

        def work(layer: nn.Module, batch: Any, hidden: list[Any]) -> None:
            hidden.append(layer(hidden[0]))
            hidden[1] = 7
            del batch["gone"], hidden[3]

        half_copy(work)(batch, hidden)

        assert batch.keys() == {"x"}
        assert hidden[0] is x
        assert hidden[1:3] == [7, "kept"]
        assert hidden[3].dtype is FLOAT32

    def test_an_object_in_several_places_is_one_object(self) -> None:
        x = ones()
        first: dict[str, Any] = {"x": x}
        first["own"] = first
        second: list[Any] = []

        def work(layer: nn.Module, first: dict[str, Any], second: list[Any]) -> None:
            set_item(layer, first)
            made = [layer(first["x"])]
            first.update(same=first["x"], itself=first, a=made, b={"made": made, "itself": [first]})
            second.append(first["out"])

        half_copy(work)(first, second)

        assert first["same"] is x
        assert second[0] is first["out"]
        assert first["a"] is first["b"]["made"]
        assert first["itself"] is first["b"]["itself"][0] is first

    @pytest.mark.parametrize("profile_casts", [False, True])
    def test_results_of_a_forward_that_raises_are_float32(self, profile_casts: bool) -> None:
        batch = {"x": ones()}

        def work(layer: nn.Module, batch: Any) -> None:
            set_item(layer, batch)
            raise LookupError

        model = initialized(work, profile_casts=profile_casts)
        for _ in range(2):
            batch.pop("out", None)
            with pytest.raises(LookupError):
                model(batch)
            assert batch["out"].dtype is FLOAT32

    @pytest.mark.parametrize("make", [initialized, half_copy])
    def test_results_of_a_forward_within_the_forward_are_float32(self, make: Callable[..., nn.Module]) -> None:
        outer, inner = {"x": ones()}, {"x": ones()}

        def work(layer: nn.Module, batch: Any, other: Any = None) -> None:
            if other is not None:
                model(other)
                assert other["out"].dtype is FLOAT32
            set_item(layer, batch)

        model = make(work)
        model(outer, inner)

        assert outer["out"].dtype is inner["out"].dtype is FLOAT32

    @pytest.mark.parametrize(
        ("of", "inside"),
        [
            pytest.param(lambda model: model, HALF, id="eager"),
            pytest.param(lambda model: torch.compile(model, backend="eager", fullgraph=True), HALF, id="compiled"),
            pytest.param(copy.deepcopy, FLOAT32, id="copy"),
        ],
    )
    def test_results_of_a_part_in_float32_are_half_inside_of_the_model(
        self, of: Callable[[nn.Module], nn.Module], inside: torch.dtype
    ) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part, self.last = Net(set_item), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> tuple[Tensor, tuple[torch.dtype, ...]]:
                batch = {"x": self.last(x)}
                self.part(batch)
                return self.last(batch["out"]), (batch["x"].dtype, batch["out"].dtype)

        out, types = of(initialized(Outer(), keep_fp32=["part"]))(ones())

        assert out.dtype is FLOAT32
        assert types == (inside, inside)

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_results_of_compiled_code_are_float32(self, fullgraph: bool) -> None:
        batch: dict[str, Any] = {"x": ones(), "gone": 1}
        hidden: list[Any] = [ones()]

        def work(layer: nn.Module, batch: Any, hidden: list[Any]) -> None:
            set_item(layer, batch)
            del batch["gone"]
            if not fullgraph:
                torch._dynamo.graph_break()
            hidden.append(batch["out"])

        torch.compile(initialized(work), backend="eager", fullgraph=fullgraph)(batch, hidden)

        assert batch.keys() == {"x", "out"}
        assert batch["out"].dtype is hidden[1].dtype is FLOAT32

    @pytest.mark.slow
    def test_compiled_parts_are_compiled_once_for_all_batches(self) -> None:
        counter = CompileCounter()
        model = initialized(set_item)
        outer = nn.Sequential(model)
        run = torch.compile(lambda batch: outer(batch), backend=counter)  # noqa: PLW0108 - a function to compile

        for _ in range(4):
            batch: dict[str, Any] = {"x": ones(), "more": [ones()]}
            run(batch)
            assert batch["out"].dtype is FLOAT32

        assert counter.frame_count == 1


class TestValues:
    def test_new_containers_hold_plain_values_and_the_callers_tensors(self) -> None:
        x, y = ones() * 1.001, ones() * 1.001
        batch: dict[str, Any] = {"x": x}
        hidden: list[Any] = []

        def work(layer: nn.Module, batch: Any, hidden: list[Any], y: Tensor) -> None:
            batch.update(pair=(batch["x"], [layer(y)]), ok=True, n=1, nothing=None)
            hidden.append(y)

        half_copy(work)(batch, hidden, y)

        assert batch["pair"][0] is x
        assert hidden[0] is y
        assert batch["pair"][1][0].dtype is FLOAT32
        assert (batch["ok"], batch["n"], batch["nothing"]) == (True, 1, None)

    def test_returned_arguments_are_the_callers_or_float32(self) -> None:
        x, y, z, batch = ones() * 1.001, ones().to(HALF), ones().to(torch.float16), {"x": ones()}

        def work(layer: nn.Module, x: Tensor, y: Tensor, z: Tensor, batch: Any) -> object:
            set_item(layer, batch)
            return x, y, z, batch, [batch]

        found = half_copy(work)(x, y, z, batch)

        assert found[0] is x
        assert found[1].dtype is found[2].dtype is FLOAT32
        assert found[3] is found[4][0] is batch


class TestContainers:
    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(lambda one: ((one, one), {}), id="arguments"),
            pytest.param(lambda one: ((one,), {"b": one}), id="by keyword"),
            pytest.param(lambda one: (([one], {"b": one}), {}), id="in others"),
        ],
    )
    def test_container_that_is_passed_twice_is_one_inside(self, arguments: Callable[[object], Any]) -> None:
        def work(layer: nn.Module, a: Any, b: Any) -> None:
            a, b = a[0] if isinstance(a[0], list) else a, b["b"] if isinstance(b, dict) else b
            assert a is b
            a.append(layer(a[0]))
            b.append(7)
            a.pop(0)

        x = ones()
        one = [x]
        args, kwargs = arguments(one)

        half_copy(work)(*args, **kwargs)

        assert one[0].dtype is FLOAT32
        assert one[1:] == [7]

    @pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
    def test_keys_have_the_order_that_the_forward_left(self, kind: type) -> None:
        batch = kind(a=ones(), b=ones(), c=1, gone=2)

        def work(layer: nn.Module, batch: Any) -> None:
            batch["a"] = batch.pop("a")
            del batch["gone"]

        half_copy(work)(batch)

        assert list(batch) == ["b", "c", "a"]

    @pytest.mark.parametrize(
        ("cache", "dtype"), [(Batch(ones()), FLOAT32), (Slots(ones()), FLOAT32), (SimpleNamespace(), HALF)]
    )
    def test_result_in_an_object_without_casts_is_float32_if_amp_opens_its_class(self, cache: Any, dtype: Any) -> None:
        initialized(lambda layer, x, cache: setattr(cache, "out", layer(x)))(ones(), cache)

        assert cache.out.dtype is dtype

    def test_containers_of_an_interrupted_forward_are_dropped(self) -> None:
        def work(layer: nn.Module, batch: Any) -> None:
            if batch.pop("interrupt", False):
                raise KeyboardInterrupt
            set_item(layer, batch)

        model = initialized(work)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model({"x": ones(), "interrupt": True})
            batch = {"x": ones()}
            model(batch)
            assert batch["out"].dtype is FLOAT32
            assert not write_back._stack.forwards

    @pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
    def test_earlier_items_of_a_list_stay_when_others_are_inserted(
        self, mode: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        first, second = ones() * 1.001, ones() * 1.001  # a half number is coarser
        hidden = [first, second]

        def work(layer: nn.Module, hidden: list[Tensor]) -> None:
            hidden.append(layer(hidden[0]))
            hidden.insert(0, layer(hidden[0]))

        model = half_copy(work)
        with mode():
            model(hidden)

        assert [each.dtype for each in hidden] == [FLOAT32] * 4
        assert hidden[1] is first
        assert hidden[2] is second
        assert first.eq(1.001).all()


class TestWritesInPlace:
    @pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
    def test_write_in_place_reaches_the_callers_tensor_and_rounds_no_more(
        self, mode: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        cache = {"k": ones() * 1.001, "n": 0}
        k = cache["k"]
        x = ones() * 1.001

        def work(layer: nn.Module, cache: Any, x: Tensor) -> Tensor:
            cache["k"][:, 0] = 5
            cache["n"] = 1
            return x.add_(1)

        model = half_copy(work)
        with mode():
            assert model(cache, x) is x

        assert cache["k"] is k
        assert cache["n"] == 1
        assert k[:, 0].eq(5).all()
        assert k[:, 1:].eq(1.001).all()
        assert x.eq((torch.ones(1).mul(1.001).to(HALF) + 1).float()).all()

    def test_write_in_place_has_gradients(self) -> None:
        x = ones()
        model = half_copy(lambda layer, x: x.mul_(layer(x.clone())))

        model(x)
        x.sum().backward()

        assert model.layer.weight.grad.ne(0).any()  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        "write",
        [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.resize_(1, 8)],
        ids=["more", "turned", "resized"],
    )
    def test_write_that_changes_the_shape_stays_inside(self, write: Callable[[Tensor], Tensor]) -> None:
        x, batch = ones(), {"x": ones()}
        expected = write(ones()).shape

        found = half_copy(lambda layer, x, batch: (write(x), write(batch["x"])))(x, batch)

        assert [each.shape for each in found] == [expected] * 2
        assert x.shape == batch["x"].shape == (2, 4)

    def test_write_in_place_to_a_sparse_tensor_reaches_it(self) -> None:
        x = ones().to_sparse()

        half_copy(lambda layer, x: x.mul_(2))(x)

        assert x.to_dense().eq(2).all()


class TestInterruptedForwards:
    """By an error that is no Exception, after which torch calls no hooks; or by one in a hook before amp's."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
    def test_model_has_results_after_an_interrupted_part(self, error: type[BaseException]) -> None:
        def interrupted(*_: object) -> None:
            raise error

        def work(layer: nn.Module, batch: dict[str, Any]) -> None:
            with contextlib.suppress(error):
                whole.part(batch)
            batch["out"] = layer(batch["x"])

        whole = Net(work)
        whole.part = Net(interrupted)
        if error is LookupError:
            whole.part.register_forward_pre_hook(interrupted)
        initialized(whole, keep_fp32=["part"])
        batch = {"x": ones()}
        for _ in range(2):
            batch.pop("out", None)
            whole(batch)
            assert batch["out"].dtype is FLOAT32
            assert not write_back._stack.forwards

    def test_interrupted_forward_is_dropped_when_amp_ends(self) -> None:
        def work(*_: object) -> None:
            raise KeyboardInterrupt

        model, x = initialized(work), ones()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert write_back._stack.forwards
        amp.deinitialize()
        assert not write_back._stack.forwards


class TestWhatIsLeftAlone:
    def test_container_that_nothing_was_written_to_is_not_written_to(self) -> None:
        class Closed(dict[str, Any]):
            def __setitem__(self, key: str, value: object) -> None:
                raise AssertionError(f"{key} was written to")

        class ClosedList(list[Tensor]):
            __setitem__: Any = Closed.__setitem__

        initialized(lambda layer, batch, hidden: layer(batch["x"]))(Closed(x=ones()), ClosedList([ones()]))

    @pytest.mark.slow
    @pytest.mark.parametrize("strict", [False, True])
    def test_exported_model_writes_to_no_container(self, strict: bool) -> None:
        batch = {"x": ones()}
        model = initialized(lambda layer, batch: (layer(batch["x"]), batch.update(n=1))[0])

        exported = torch.export.export(model, (batch,), strict=strict)

        assert exported.module()(batch).dtype is FLOAT32
        assert set(batch) == {"x"}

    def test_results_stay_as_they_are_with_amp_off(self) -> None:
        model = initialized(lambda layer, x: x.half())
        amp.deinitialize()

        assert model(ones()).dtype is torch.float16

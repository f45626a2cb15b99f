"""What a forward at O2 leaves in the containers that it was called with reaches the caller, in float32."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ampatch import amp
from ampatch.casting import write_back

HALF, FLOAT32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Does with its arguments what a test asks for."""

    def __init__(self, work: Callable[..., object]) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(4, 4), work

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.work(self.layer, *args, **kwargs)


def half(work: Callable[..., object], **options: Any) -> nn.Module:
    model = Net(work)
    model, _ = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", half_dtype=HALF, verbosity=0, **options
    )
    return model


def half_copy(work: Callable[..., object]) -> nn.Module:
    """A copy that outlives its session: it casts its arguments itself."""
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
    def test_under_a_new_key(self, make: Callable[[], Any]) -> None:
        batch = make()
        x = batch["x"]

        half(set_item)(batch)

        assert batch["x"] is x
        assert batch["out"].dtype is FLOAT32
        assert batch["out"].requires_grad

    @pytest.mark.parametrize("make", [Batch, Slots, lambda x: Attributes(x=x)])
    def test_in_an_attribute(self, make: Callable[[Tensor], Any]) -> None:
        x = ones()
        batch = make(x)

        half(set_attribute)(batch)

        assert batch.x is x
        assert batch.out.dtype is FLOAT32

    @pytest.mark.parametrize("outer", [lambda inner: [inner], lambda inner: (1, (inner,)), lambda inner: {"a": inner}])
    def test_in_a_container_in_another(self, outer: Callable[[object], object]) -> None:
        inner = {"x": ones()}

        def work(layer: nn.Module, batch: Any) -> None:
            found = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch[1][0]
            set_item(layer, found)

        half(work)(outer(inner))

        assert inner["out"].dtype is FLOAT32

    def test_in_keyword_arguments(self) -> None:
        batch = {"x": ones()}

        half(lambda layer, *, batch: set_item(layer, batch))(batch=batch)

        assert batch["out"].dtype is FLOAT32

    def test_at_the_end_of_a_list_and_in_the_place_of_an_item(self) -> None:
        x, other = ones(), ones()
        hidden = [x, other, "kept"]

        def work(layer: nn.Module, hidden: list[Any]) -> None:
            hidden.append(layer(hidden[0]))
            hidden[1] = 7

        half(work)(hidden)

        assert hidden[0] is x
        assert hidden[1:3] == [7, "kept"]
        assert hidden[3].dtype is FLOAT32

    def test_that_were_taken_out_are_gone(self) -> None:
        batch = Attributes(x=ones(), gone=1)
        hidden = [ones(), 1, 2]

        def work(layer: nn.Module, batch: Any, hidden: list[Any]) -> None:
            del batch["gone"], hidden[1]

        half(work)(batch, hidden)

        assert batch.keys() == {"x"}
        assert hidden[1:] == [2]

    def test_that_the_caller_has_already_are_the_callers(self) -> None:
        x = ones()
        batch: dict[str, Any] = {"x": x}

        half(lambda layer, batch: batch.update(same=batch["x"], itself=batch, twice=[batch["x"]]))(batch)

        assert batch["same"] is x
        assert batch["itself"] is batch

    def test_in_two_places_are_one(self) -> None:
        first: dict[str, Any] = {"x": ones()}
        second: list[Any] = []

        def work(layer: nn.Module, first: dict[str, Any], second: list[Any]) -> None:
            set_item(layer, first)
            second.append(first["out"])

        half(work)(first, second)

        assert second[0] is first["out"]

    def test_of_a_forward_that_raises(self) -> None:
        batch = {"x": ones()}

        def work(layer: nn.Module, batch: Any) -> None:
            set_item(layer, batch)
            raise LookupError

        model = half(work)
        for _ in range(2):
            batch.pop("out", None)
            with pytest.raises(LookupError):
                model(batch)
            assert batch["out"].dtype is FLOAT32

    def test_of_a_forward_within_the_forward(self) -> None:
        outer, inner = {"x": ones()}, {"x": ones()}

        def work(layer: nn.Module, batch: Any, other: Any = None) -> None:
            if other is not None:
                model(other)
                assert other["out"].dtype is FLOAT32
            set_item(layer, batch)

        model = half(work)
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
    def test_of_a_part_in_float32_are_half_inside(
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

        model = Outer()
        model, _ = amp.initialize(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            opt_level="O2",
            half_dtype=HALF,
            verbosity=0,
            keep_fp32=["part"],
        )

        out, types = of(model)(ones())

        assert out.dtype is FLOAT32
        assert types == (inside, inside)

    def test_under_labels(self) -> None:
        batch = {"x": ones()}

        half(set_item, profile_casts=True)(batch)

        assert batch["out"].dtype is FLOAT32

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_of_compiled_code(self, fullgraph: bool) -> None:
        batch: dict[str, Any] = {"x": ones(), "gone": 1}
        hidden: list[Any] = [ones()]

        def work(layer: nn.Module, batch: Any, hidden: list[Any]) -> None:
            set_item(layer, batch)
            del batch["gone"]
            if not fullgraph:
                torch._dynamo.graph_break()
            hidden.append(batch["out"])

        torch.compile(half(work), backend="eager", fullgraph=fullgraph)(batch, hidden)

        assert batch.keys() == {"x", "out"}
        assert batch["out"].dtype is hidden[1].dtype is FLOAT32

    @pytest.mark.slow
    def test_of_compiled_parts_take_no_compiling_for_each_batch(self) -> None:
        counter = CompileCounter()
        model = half(set_item)
        outer = nn.Sequential(model)
        run = torch.compile(lambda batch: outer(batch), backend=counter)  # noqa: PLW0108 - a function to compile

        for _ in range(4):
            batch: dict[str, Any] = {"x": ones(), "more": [ones()]}
            run(batch)
            assert batch["out"].dtype is FLOAT32

        assert counter.frame_count == 1

    def test_can_be_trained_on(self) -> None:
        model = half(set_item)
        batch = {"x": ones()}

        model(batch)
        batch["out"].sum().backward()

        assert all(parameter.grad is not None for parameter in model.parameters())


class TestValues:
    def test_that_are_plain_are_what_the_forward_wrote(self) -> None:
        batch: dict[str, Any] = {"x": ones()}

        half(lambda layer, batch: batch.update(ok=True, n=1, nothing=None))(batch)

        assert (batch["ok"], batch["n"], batch["nothing"]) == (True, 1, None)

    def test_of_the_callers_are_not_rounded_in_new_containers(self) -> None:
        x, y = ones() * 1.001, ones() * 1.001
        batch: dict[str, Any] = {"x": x}
        hidden: list[Any] = []

        def work(layer: nn.Module, batch: Any, hidden: list[Any], y: Tensor) -> None:
            batch["pair"] = (batch["x"], [layer(y)])
            hidden.append(y)

        half(work)(batch, hidden, y)

        assert batch["pair"][0] is x
        assert hidden[0] is y
        assert batch["pair"][1][0].dtype is FLOAT32

    def test_of_arguments_that_are_returned_are_the_callers(self) -> None:
        x, y, batch = ones() * 1.001, ones().to(HALF), {"x": ones()}

        def work(layer: nn.Module, x: Tensor, y: Tensor, batch: Any) -> object:
            set_item(layer, batch)
            return x, y, batch, [batch]

        found = half(work)(x, y, batch)

        assert found[0] is x
        assert found[1].dtype is FLOAT32
        assert found[2] is found[3][0] is batch

    def test_of_arguments_in_another_half_type_are_float32(self) -> None:
        assert half(lambda layer, x: x)(ones().to(torch.float16)).dtype is FLOAT32

    def test_in_several_places_are_one_object(self) -> None:
        batch: dict[str, Any] = {"x": ones()}

        def work(layer: nn.Module, batch: Any) -> None:
            made = [layer(batch["x"])]
            batch.update(a=made, b={"made": made}, itself=[batch])

        half(work)(batch)

        assert batch["a"] is batch["b"]["made"]
        assert batch["itself"][0] is batch


class TestContainers:
    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(lambda one: ((one, one), {}), id="arguments"),
            pytest.param(lambda one: ((one,), {"b": one}), id="by keyword"),
            pytest.param(lambda one: (([one], {"b": one}), {}), id="in others"),
        ],
    )
    def test_handed_in_twice_are_one_inside(self, arguments: Callable[[object], Any]) -> None:
        def work(layer: nn.Module, a: Any, b: Any) -> None:
            a, b = a[0] if isinstance(a[0], list) else a, b["b"] if isinstance(b, dict) else b
            assert a is b
            a.append(layer(a[0]))
            b.append(7)
            a.pop(0)

        x = ones()
        one = [x]
        args, kwargs = arguments(one)

        half(work)(*args, **kwargs)

        assert one[0].dtype is FLOAT32
        assert one[1:] == [7]

    @pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
    def test_have_their_keys_in_the_order_that_the_forward_left(self, kind: type) -> None:
        batch = kind(a=ones(), b=ones(), c=1)

        def work(layer: nn.Module, batch: Any) -> None:
            batch["a"] = batch.pop("a")

        half(work)(batch)

        assert list(batch) == ["b", "c", "a"]

    @pytest.mark.parametrize("make", [Batch, Slots])
    def test_in_which_nothing_was_cast_get_results_in_float32(self, make: Callable[..., Any]) -> None:
        cache = make(None)

        half(lambda layer, x, cache: setattr(cache, "out", layer(x)))(ones(), cache)

        assert cache.out.dtype is FLOAT32

    def test_of_a_forward_that_was_interrupted_are_let_go(self) -> None:
        def work(layer: nn.Module, batch: Any) -> None:
            if batch.pop("interrupt", False):
                raise KeyboardInterrupt
            set_item(layer, batch)

        model = half(work)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model({"x": ones(), "interrupt": True})
            batch = {"x": ones()}
            model(batch)
            assert batch["out"].dtype is FLOAT32
            assert not write_back._stack.forwards


class TestWritesInPlace:
    def test_reach_the_callers_tensor_and_leave_the_digits_of_the_rest(self) -> None:
        cache = {"k": ones() * 1.001, "n": 0}
        k = cache["k"]
        x = ones() * 1.001

        def work(layer: nn.Module, cache: Any, x: Tensor) -> None:
            cache["k"][:, 0] = 5
            cache["n"] = 1
            x.add_(1)

        half_copy(work)(cache, x)

        assert cache["k"] is k
        assert cache["n"] == 1
        assert k[:, 0].eq(5).all()
        assert k[:, 1:].eq(1.001).all()
        assert x.eq((torch.ones(1).mul(1.001).to(HALF) + 1).float()).all()

    def test_and_results_that_are_that_tensor(self) -> None:
        batch = {"x": -ones()}

        half(lambda layer, batch: batch.update(h=torch.relu_(batch["x"])))(batch)

        assert batch["h"] is batch["x"]
        assert batch["h"].eq(0).all()

    def test_have_gradients(self) -> None:
        x = ones()
        model = half(lambda layer, x: x.mul_(layer(x.clone())))

        model(x)
        x.sum().backward()

        assert model.layer.weight.grad.ne(0).any()  # type: ignore[union-attr]

    def test_to_a_leaf_are_refused_as_torch_refuses_them(self) -> None:
        x = ones().requires_grad_()

        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            half(lambda layer, x: x.mul_(2))(x)

    def test_are_lost_in_inference_mode(self) -> None:
        x = ones()
        kept: list[Any] = []

        def work(layer: nn.Module, x: Tensor, kept: list[Any]) -> Tensor:
            kept.append(x.mul_(2))
            return x

        model = half_copy(work)

        with torch.inference_mode():
            found = model(x, kept)

        assert x.eq(1).all()
        assert found.eq(2).all()
        assert kept[0].eq(2).all()

    def test_leave_digits_where_they_have_gradients(self) -> None:
        x = (ones() * 1.001).requires_grad_()
        cache = x * 1  # no leaf
        weights = torch.arange(8.0).reshape(2, 4)

        def work(layer: nn.Module, cache: Tensor) -> None:
            cache[:, 0] = layer(cache.clone())[:, 0].detach()

        half(work)(cache)
        (cache * weights).sum().backward()

        assert cache[:, 1:].eq(1.001).all()
        assert cache[:, 0].ne(1.001).all()
        assert x.grad is not None
        assert x.grad[:, 0].eq(0).all()
        assert x.grad[:, 1:].equal(weights[:, 1:])

    @pytest.mark.parametrize("make", [nn.Parameter, lambda x: x.requires_grad_()], ids=["parameter", "leaf"])
    def test_reach_leaves_where_no_gradients_are_recorded(self, make: Callable[[Tensor], Tensor]) -> None:
        x = make(ones())

        def work(layer: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.mul_(0.5)
            return x

        assert half(work)(x) is x

        assert x.is_leaf
        assert x.requires_grad
        assert x.eq(0.5).all()

    @pytest.mark.parametrize(
        "write",
        [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.resize_(1, 8)],
        ids=["more", "turned", "resized"],
    )
    def test_that_change_the_shape_stay_inside(self, write: Callable[[Tensor], Tensor]) -> None:
        x, batch = ones(), {"x": ones()}
        expected = write(ones()).shape

        found = half_copy(lambda layer, x, batch: (write(x), write(batch["x"])))(x, batch)

        assert [each.shape for each in found] == [expected] * 2
        assert x.shape == batch["x"].shape == (2, 4)

    def test_reach_sparse_tensors(self) -> None:
        x = ones().to_sparse()

        half(lambda layer, x: x.mul_(2))(x)

        assert x.to_dense().eq(2).all()


def as_a_part_of_what_is_compiled(model: nn.Module, *args: object) -> object:
    @torch.compile(backend="eager")
    def whole(*args: object) -> object:
        return model(*args)

    return whole(*args)


class TestItemsOfLists:
    """That were there before stay the caller's, also where torch does not count what is written to them."""

    FINE = 1.001  # a half number is coarser

    @pytest.fixture(params=["eager", "inference", "compiled"])
    def called(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        if request.param == "inference":
            return lambda model, *args: torch.inference_mode()(model)(*args)
        if request.param == "compiled":
            return as_a_part_of_what_is_compiled
        return lambda model, *args: model(*args)

    @pytest.mark.parametrize("wrap", [Tensor.clone, nn.Parameter], ids=["tensor", "parameter"])
    def test_where_others_come(self, called: Callable[..., Any], wrap: Callable[[Tensor], Tensor]) -> None:
        first, second = wrap(ones() * self.FINE), wrap(ones() * self.FINE)
        hidden = [first, second]

        def work(layer: nn.Module, hidden: list[Tensor]) -> None:
            hidden.append(layer(hidden[0]))
            hidden.insert(0, layer(hidden[0]))

        called(half(work), hidden)

        assert [each.dtype for each in hidden] == [FLOAT32] * 4
        assert hidden[1] is first
        assert hidden[2] is second
        assert first.eq(self.FINE).all()

    def test_whose_class_lengthens_them_when_it_is_cast(self) -> None:
        class Longer:
            def __init__(self) -> None:
                self.x, self.moves, self.shapes = ones(), [ones()], ()

            def to(self, dtype: torch.dtype) -> Longer:
                self.x, self.shapes = self.x.to(dtype), (self.x.to(dtype),)
                self.moves.append(self.x)
                return self

        batch = Longer()
        found = half(lambda layer, batch: layer(batch.x))(batch)

        assert found.dtype is FLOAT32
        assert len(batch.moves) == 1


class TestInterruptedForwards:
    """By what is no Exception, so that torch calls no hook at their end."""

    def test_of_a_part_leave_the_whole_its_results(self) -> None:
        def interrupted(layer: nn.Module, *_: object) -> None:
            raise KeyboardInterrupt

        def work(layer: nn.Module, batch: dict[str, Any]) -> None:
            with contextlib.suppress(KeyboardInterrupt):
                whole.part(batch)
            batch["out"] = layer(batch["x"])

        whole = Net(work)
        whole.part = Net(interrupted)
        amp.initialize(
            whole,
            torch.optim.SGD(whole.parameters(), 0.1),
            opt_level="O2",
            half_dtype=HALF,
            verbosity=0,
            keep_fp32=["part"],
        )
        batch = {"x": ones()}
        for _ in range(2):
            batch.pop("out", None)
            whole(batch)
            assert batch["out"].dtype is FLOAT32
            assert not write_back._stack.forwards

    def test_keep_nothing_once_amp_is_off(self) -> None:
        def work(*_: object) -> None:
            raise KeyboardInterrupt

        model, x = half(work), ones()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert write_back._stack.forwards
        amp.deinitialize()
        assert not write_back._stack.forwards


class TestCopies:
    @pytest.mark.parametrize("dtype", [HALF, FLOAT32])
    def test_of_a_model_that_calls_itself_give_both_their_results(self, dtype: torch.dtype) -> None:
        def work(layer: nn.Module, batch: dict[str, Any], inner: Any = None) -> None:
            if inner is not None:
                again(inner)
            batch["out"] = layer(batch["x"])

        again = copy.deepcopy(half(work)).to(dtype)
        outer, inner = {"x": ones()}, {"x": ones()}
        again(outer, inner)

        assert set(outer) == set(inner) == {"x", "out"}


class TestWhatIsLeftAlone:
    def test_is_a_container_that_nothing_was_written_to(self) -> None:
        class Closed(dict[str, Any]):
            def __setitem__(self, key: str, value: object) -> None:
                raise AssertionError(f"{key} was written to")

        x = ones()
        hidden = [x]

        half(lambda layer, batch, hidden: layer(batch["x"]))(Closed(x=ones().to(HALF)), hidden)

        assert hidden[0] is x

    @pytest.mark.slow
    @pytest.mark.parametrize("strict", [False, True])
    def test_is_what_is_exported_to(self, strict: bool) -> None:
        batch = {"x": ones()}
        model = half(lambda layer, batch: (layer(batch["x"]), batch.update(n=1))[0])

        exported = torch.export.export(model, (batch,), strict=strict)

        assert exported.module()(batch).dtype is FLOAT32
        assert set(batch) == {"x"}

    def test_is_everything_with_amp_off(self) -> None:
        batch, hidden = {"x": ones()}, [ones()]
        model = half(lambda layer, batch, hidden: hidden.append(hidden[0].double()))
        amp.deinitialize()

        model(batch, hidden)

        assert hidden[1].dtype is torch.float64

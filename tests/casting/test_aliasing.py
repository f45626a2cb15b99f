"""Under casts, results share memory with arguments as without amp, and writes to arguments reach the caller."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, casts_on, check_rows, dtype_name
from samples import LIST_NAMES, SAMPLES, TORCH_WARNINGS, Maker, Sample, call, entries, lacks, tensors
from torch import Tensor

from ampatch import amp
from ampatch.errors import AmpError, UsageError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS]

HALF, FLOAT = torch.float16, torch.float32

# Calls that return a view, or may do so by their arguments, and that the samples lack.
VIEWS = {
    "torch.einsum": (
        Sample(lambda m: {"equation": "ii->i", "operand": m.t(3, 3)}),
        Sample(lambda m: {"equation": "ij->ji", "operands": [m.t(3, 4)]}),
        Sample(lambda m: {"operand": m.t(3, 3), "sublist": [0, 0], "to": [0]}),
        Sample(lambda m: {"equation": "...->...", "operand": m.t(3)}),
    ),
    "torch.Tensor.sum_to_size": (
        Sample(lambda m: {"self": m.t(3, 4), "first": 3, "second": 4}),
        Sample(lambda m: {"self": m.t(3, 4), "size": (3, 4)}, keyword_only=frozenset({"size"})),
    ),
    "torch.cartesian_prod": (Sample(lambda m: {"tensor": m.t(3)}),),
    "torch.meshgrid": (Sample(lambda m: {"tensor": m.t(3), "indexing": "ij"}, keyword_only=frozenset({"indexing"})),),
    "torch.chain_matmul": (Sample(lambda m: {"matrix": m.t(3, 3)}),),
    "torch.matrix_power": (Sample(lambda m: {"input": m.t(3, 3), "n": 1}),),
    "torch.nn.functional.interpolate": (
        Sample(lambda m: {"input": m.t(1, 1, 4, 4), "size": (4, 4), "scale_factor": None, "mode": "bilinear"}),
    ),
}

# A complex64 result cannot share the memory of half numbers.
APART = {("torch.view_as_complex", HALF)}


def shared(path: str, sample: Sample, form: str, dtype: torch.dtype) -> set[tuple[int, int]]:
    """Returns the places of results and of arguments that share memory."""
    torch.manual_seed(0)
    maker = Maker([dtype])
    results = tensors(call(path, sample, maker, form))
    return {
        (at, of)
        for at, result in enumerate(results)
        for of, made in enumerate(maker.made)
        if result.layout is made.layout is torch.strided
        and result.untyped_storage().data_ptr() == made.untyped_storage().data_ptr() != 0
    }


def rows() -> Iterator[tuple[Any, ...]]:
    listed = {entry.path for name in LIST_NAMES for entry in entries(name) if entry.is_in_force}
    for path in sorted(path for path in listed if not lacks(path)):
        for number, sample in enumerate((*SAMPLES[path], *VIEWS.get(path, ()))):
            for form in ("positional",) if path in VIEWS else sample.forms():
                for dtype in (FLOAT, *HALF_DTYPES):
                    yield f"{path}-{number}-{form}-{dtype_name(dtype)}", path, sample, form, dtype


class TestListedFunctions:
    @pytest.mark.slow
    def test_results_share_memory_with_arguments_as_without_casts(
        self, half: torch.dtype, subtests: pytest.Subtests
    ) -> None:
        plain = {}
        for name, path, sample, form, dtype in rows():
            try:
                plain[name] = shared(path, sample, form, dtype)
            except RuntimeError:  # torch has no kernel for the type
                continue
        assert sum(map(bool, plain.values())) > 200  # all in-place functions, and the views

        def check(name: str, path: str, sample: Sample, form: str, dtype: torch.dtype) -> None:
            try:
                found = shared(path, sample, form, dtype)
            except AmpError:  # an in-place write to a half tensor, which amp refuses
                return
            assert found == plain[name] or (path, dtype) in APART

        with casts_on(half):
            check_rows(subtests, ((row[0], *row) for row in rows() if plain.get(row[0])), check)

    @pytest.mark.parametrize("of", [lambda run: run, lambda run: torch.compile(run, backend="eager", fullgraph=True)])
    def test_einsum_of_one_tensor_is_a_view_and_of_two_is_half(self, of: Callable[..., Any]) -> None:
        def run(s: Tensor) -> Tensor:
            torch.einsum("ii->i", s).fill_(0)
            return torch.einsum("ij,jk->ik", s, s)

        s = torch.ones(3, 3)
        with casts_on(HALF):
            assert of(run)(s).dtype is HALF
        assert s.equal(1 - torch.eye(3))

    def test_embedding_bag_renormalises_the_callers_table(self) -> None:
        table = torch.ones(3, 4, dtype=HALF)
        with casts_on(HALF):
            F.embedding_bag(torch.tensor([[1]]), table, max_norm=1.0, per_sample_weights=torch.ones(1, 1), mode="sum")
        assert table[0].eq(1).all()
        assert table[1].eq(0.5).all()


def clip_(boxes: Tensor) -> Tensor:
    return boxes.clamp_(0, 1)


def double_(x: Tensor) -> Tensor:
    return x.mul_(2)


def clip_all_(boxes: list[Tensor], *, found: dict[str, Any], scale: Tensor) -> list[Tensor]:
    boxes[0].view(-1).clamp_(0, 1)
    found["first"], found["scale"] = boxes[0], scale
    boxes.insert(0, boxes[0] * 2)
    boxes.append(boxes[-1].float())
    scale += 1
    return boxes


OURS = types.ModuleType("ours_that_write")


@pytest.fixture(params=["decorated", "registered", "listed"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Returns a function that gives another one with its arguments in float32; casts are on."""
    monkeypatch.setitem(sys.modules, OURS.__name__, OURS)
    # A name that ends in an underscore would stand for an in-place function, which amp refuses.
    functions = {function.__name__.strip("_"): function for function in (clip_, clip_all_, double_)}
    for name, function in functions.items():
        monkeypatch.setattr(OURS, name, function, raising=False)
    lists = {"cast_lists": {"blacklist": {OURS.__name__: list(functions)}}} if request.param == "listed" else {}
    if request.param == "registered":
        for name in functions:
            amp.register_float_function(OURS, name)
    with casts_on(HALF, **lists):
        if request.param == "decorated":
            yield amp.float_function
        else:
            yield lambda function: getattr(OURS, function.__name__.strip("_"))


def boxes() -> Tensor:
    return torch.tensor([[-2.0, 0.3], [0.5, 7.0]], dtype=HALF)


def values_in(given: Tensor) -> Tensor:
    return given.coalesce().values() if given.layout is torch.sparse_coo else given.values()


class Boxes(Tensor):
    """A subclass of tensors."""


CLIPPED = boxes().clamp(0, 1)


class TestFunctions:
    @pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
    @pytest.mark.parametrize("kind", [Tensor, Boxes])
    def test_functions_write_to_the_callers_tensor_and_return_it(
        self, made: Callable[..., Any], kind: type[Tensor], inference: bool
    ) -> None:
        with torch.inference_mode(inference):
            given = boxes().as_subclass(kind)
            assert made(clip_)(given) is given
            assert given.equal(CLIPPED)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    @pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged], ids=str)
    def test_functions_take_arguments_without_strides(
        self, made: Callable[..., Any], layout: torch.layout, inference: bool
    ) -> None:
        with torch.inference_mode(inference):
            if layout is torch.jagged:
                given = torch.nested.nested_tensor([boxes(), boxes()], layout=layout)
            else:
                given = boxes().to_sparse(layout=layout)
            before = values_in(given).clone()

            made(double_)(given)

            assert values_in(given).equal(before * 2)

    def test_functions_write_to_the_callers_containers(self, made: Callable[..., Any]) -> None:
        given, scale, found = boxes(), boxes(), {}
        several = [given, boxes()]
        last = several[1]

        assert made(clip_all_)(several, found=found, scale=scale) is several

        assert several[1] is found["first"] is given
        assert given.equal(CLIPPED)
        assert several[2] is last
        assert several[0].dtype is several[3].dtype is FLOAT  # what the function made stays as it is
        assert found["scale"] is scale
        assert scale.equal(boxes() + 1)

    @pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
    @pytest.mark.slow
    def test_functions_write_to_arguments_in_compiled_code(self, made: Callable[..., Any], inference: bool) -> None:
        clip, clip_all = made(clip_), made(clip_all_)

        def run(given: Tensor, several: list[Tensor], scale: Tensor) -> tuple[Any, ...]:
            found: dict[str, Any] = {}
            clip(given)
            clip_all(several, found=found, scale=scale)
            return given * 2, found

        with torch.inference_mode(inference):
            given, several, scale = boxes(), [boxes(), boxes()], boxes()
            doubled, found = torch.compile(run, backend="aot_eager", fullgraph=True)(given, several, scale)

        assert given.equal(CLIPPED)
        assert doubled.equal(CLIPPED * 2)
        assert found["first"].equal(CLIPPED)
        assert scale.equal(boxes() + 1)
        assert [each.dtype for each in several] == [FLOAT, HALF, HALF, FLOAT]

    def test_functions_write_to_arguments_under_vmap(self, made: Callable[..., Any]) -> None:
        given = torch.stack([boxes(), boxes()])
        torch.vmap(made(double_))(given)
        assert given.equal(torch.stack([boxes(), boxes()]) * 2)


eager_and_compiled = pytest.mark.parametrize(
    "of",
    [lambda run: run, lambda run: torch.compile(run, backend="aot_eager", fullgraph=True)],
    ids=["eager", "compiled"],
)


class TestDecorated:
    @pytest.fixture(autouse=True)
    def _casts(self) -> Iterator[None]:
        with casts_on(HALF):
            yield

    def test_writes_before_an_error_stay(self) -> None:
        @amp.float_function
        def fails(x: Tensor) -> None:
            x.zero_()
            raise ValueError("done")

        given = boxes()
        with pytest.raises(ValueError, match="done"):
            fails(given)
        assert given.eq(0).all()

    def test_arguments_that_are_only_read_are_not_written_to(self) -> None:
        @amp.float_function
        def reads(batch: dict[str, Tensor], kept: list[Tensor]) -> dict[str, Tensor]:
            kept.append(batch["x"].float())  # as without amp, this is float32
            return batch

        given, kept = boxes(), []
        before = given._version
        assert reads({"x": given}, kept)["x"].dtype is kept[0].dtype is FLOAT
        assert given._version == before

    @eager_and_compiled
    @pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
    @pytest.mark.slow
    def test_gradients_follow_the_writes(self, of: Callable[..., Any], graph: bool) -> None:
        @amp.half_function
        def doubles(x: Tensor) -> None:
            with torch.set_grad_enabled(graph):
                x.mul_(2)

        def run(leaf: Tensor) -> Tensor:
            given = leaf * 1
            doubles(given)
            return given

        leaf = torch.ones(3, requires_grad=True)
        given = of(run)(leaf)
        given.sum().backward()
        assert given.eq(2).all()
        assert leaf.grad is not None
        assert leaf.grad.eq(2 if graph else 1).all()

    @eager_and_compiled
    def test_a_write_to_a_leaf_is_refused_as_by_torch(self, of: Callable[..., Any]) -> None:
        run = of(amp.half_function(double_))
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            run(torch.ones(3, requires_grad=True))

    @eager_and_compiled
    def test_a_leaf_is_written_to_in_no_grad_mode(self, of: Callable[..., Any]) -> None:
        run = amp.half_function(torch.no_grad()(double_))
        leaf = torch.ones(3, requires_grad=True)
        assert of(run)(leaf).eq(2).all()
        assert leaf.is_leaf
        assert leaf.eq(2).all()
        assert run(leaf) is leaf

    @pytest.mark.parametrize("write", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.resize_(1, 8)])
    def test_a_write_that_changes_the_shape_raises(self, write: Callable[[Tensor], Tensor]) -> None:
        with pytest.raises(UsageError, match=r"to an argument of shape \(2, 4\) in place"):
            amp.float_function(write)(torch.ones(2, 4, dtype=HALF))

"""Calls in C++: that they do what the wrappers' Python does, that functions stay functions, and which of them runs."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from helpers import HALF_DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_calls import Operators
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

from ampatch import amp
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Rule, Treatment
from ampatch.casting.nested import tensors_in
from ampatch.errors import KernelError
from ampatch.native import calls, extension
from ampatch.native.calls import Accelerator
from ampatch.patching import weight_cache
from ampatch.patching.adapters import Adapters, InHalf
from ampatch.patching.weight_cache import CastCounts, WeightCache
from ampatch.patching.wrappers import FunctionInHalf, PatchedFunction
from ampatch.switch import IN_HALF, Region, Switch

KINDS = {
    "whitelist": (Treatment.WHITELIST, False),
    "blacklist": (Treatment.BLACKLIST, False),
    "via dtype": (Treatment.BLACKLIST, True),
    "promote": (Treatment.PROMOTE, False),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Implementation:
    """A function under a rule, called by one of the two."""

    def __init__(self, kind: str | InHalf, half: torch.dtype, original: Callable[..., object]) -> None:
        self.cache, self.switch = WeightCache(), Switch()
        self.switch.active = True
        path, wrapper = Path("library", "function"), PatchedFunction
        adapters = Adapters(half, self.cache, {"cpu"})
        if isinstance(kind, InHalf):
            adapter, wrapper = adapters.in_half(kind, path, original), FunctionInHalf
        else:
            treatment, via_dtype = KINDS[kind]
            adapter = adapters.for_treatment(Rule(path, treatment, "a list", via_dtype=via_dtype), original)
        accelerator = Accelerator(self.cache.state, self.cache.cast, self.switch, {"cpu"})
        kind = accelerator.class_of(wrapper)
        self.function = kind(original, adapter, self.switch, "ampatch: listed.")
        if adapter.plain_cast is not None:
            accelerator.accelerate(self.function, adapter.plain_cast, "ampatch: listed.")
        self.is_compiled = len(kind.__bases__) == 2


@pytest.fixture
def implementations(
    compiled_calls: ModuleType, select_calls: Callable[[str], None]
) -> Callable[..., tuple[Implementation, Implementation]]:
    """The same in Python and in C++."""

    def make(kind: str, half: torch.dtype, original: Callable[..., object]) -> tuple[Implementation, Implementation]:
        made = []
        for choice in ("python", "compiled"):
            select_calls(choice)
            made.append(Implementation(kind, half, original))
            assert made[-1].is_compiled == (choice == "compiled")
        return made[0], made[1]

    return make


@pytest.fixture
def in_cpp(compiled_calls: ModuleType, select_calls: Callable[[str], None]) -> None:
    """Sessions of the test call in C++."""
    select_calls("compiled")


# Arguments


class Subclass(Tensor):
    pass


class Named(tuple):
    pass


def tensor_of(dtype: torch.dtype, kind: str) -> Tensor:
    tensor = torch.ones(2).to(dtype)
    if kind == "parameter":
        return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    if kind == "subclass":
        return tensor.as_subclass(Subclass)
    return tensor.to("meta") if kind == "elsewhere" else tensor


DTYPES = (*HALF_DTYPES, torch.float32, torch.float64, torch.int64, torch.complex64)
tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.sampled_from(("tensor", "parameter", "tensor", "subclass", "elsewhere"))
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=2)
odd = st.sampled_from((torch.float32, torch.device("cpu"), torch.Size([2]), slice(1), object()))
flat = tensors | plain | odd
containers = st.lists(flat, max_size=3) | st.lists(flat, max_size=3).map(tuple) | st.lists(flat, max_size=3).map(Named)
values = flat | containers | st.lists(containers, max_size=2) | st.dictionaries(st.text(max_size=1), flat, max_size=2)
named = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from((None, torch.float16)),
        "out": st.none() | tensors,
        "input": values,
        "p": values,
    },
)
arguments = st.tuples(st.lists(values, max_size=4), named)
# Often of half and float32.
usual = st.builds(tensor_of, st.sampled_from((*HALF_DTYPES, torch.float32)), st.sampled_from(("tensor", "parameter")))
mixed = st.tuples(st.lists(usual | st.lists(usual, max_size=2) | plain | odd, max_size=4), st.just({}))


def seen(*args: object, **kwargs: object) -> object:
    """What a call hands over."""
    return args, kwargs


def frames_of(call: Callable[[], object]) -> list[str]:
    """Returns the names of the Python functions that run during a call."""
    found: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[1:]  # without `call` itself


def assert_alike(python: Implementation, compiled: Implementation, args: object, kwargs: object) -> None:
    """Both hand over the same, and count the same casts."""
    expected, found = (each.function(*args, **kwargs) for each in (python, compiled))
    assert alike(expected, found, (args, kwargs))
    assert python.cache.counts() == compiled.cache.counts()


def seen_with_names(input=None, dim=None, dtype=None, out=None, **kwargs):
    return (input, dim, dtype, out), kwargs


def alike(one: object, other: object, given_: object) -> bool:
    """Whether two implementations hand over the same: objects that were given, or casts of one type."""
    if isinstance(one, Tensor):
        kept = any(one is tensor for tensor in tensors_in(given_))
        return one is other if kept else (type(one), one.dtype, one.device) == (type(other), other.dtype, other.device)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], given_) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other, [given_] * len(one)))
    return one is other


class TestArguments:
    @pytest.mark.parametrize("original", [seen, seen_with_names])
    @every_kind
    @pytest.mark.covering(1)
    def test_python_and_cpp_hand_over_the_same_arguments(self, implementations, kind, half, original):
        python, compiled = implementations(kind, half, original)
        cast = set()

        @settings(max_examples=300)  # many have nothing to cast
        @given(arguments)
        def holds(call):
            args, kwargs = call
            if original is seen_with_names:
                args, kwargs = args[:4], {name: kwargs[name] for name in kwargs if name == "p"}
            assert_alike(python, compiled, args, kwargs)
            cast.add(python.cache.counts().casts)

        holds()
        assert len(cast) > (2 if original is seen else 0), "next to nothing was cast"

    @pytest.mark.parametrize("kind", [InHalf.BESIDE, InHalf.PROMOTE, InHalf.NORMALISE, InHalf.ATTENTION])
    @pytest.mark.covering(1)
    def test_python_and_cpp_hand_over_the_same_in_models_with_half_weights(self, implementations, kind, half):
        python, compiled = implementations(kind, half, seen)
        cast = set()

        @settings(max_examples=300)
        @given(arguments | mixed, st.booleans())
        def holds(call, is_in_half):
            before = python.cache.counts()
            with Region(IN_HALF) if is_in_half else contextlib.nullcontext():
                assert_alike(python, compiled, *call)
            assert is_in_half or python.cache.counts() == before
            cast.add(python.cache.counts().casts)

        holds()
        assert len(cast) > 1 or kind is InHalf.NORMALISE, "nothing was cast"  # few draws have weights for that

    def test_a_list_of_cast_tensors_is_a_new_list(self, implementations):
        _, compiled = implementations("whitelist", torch.float16, seen)
        given_ = [torch.ones(2), 1, torch.ones(2).half()]
        ((found,), _) = compiled.function(given_)
        assert given_[0].dtype == torch.float32
        assert found is not given_
        assert found[2] is given_[2]

    def test_keywords_may_be_of_a_subclass_of_str(self, implementations):
        name = enum.StrEnum("Name", {"DTYPE": "dtype"}).DTYPE
        for each in implementations("blacklist", torch.float16, torch.sum):
            assert each.function(torch.ones(2).half(), **{name: torch.bfloat16}).dtype == torch.bfloat16

    def test_a_tensor_given_several_times_is_cast_once(self, implementations):
        weight, tensor = nn.Parameter(torch.ones(2)), torch.ones(2)
        half, whole = tensor.half(), tensor.int()
        for each in implementations("whitelist", torch.float16, seen):
            found, _ = each.function(tensor, tensor, half, tensor, whole, tensor, weight, weight)
            assert found[0] is found[1] is found[3] is found[5]
            assert found[6] is found[7]
            assert each.cache.counts() == CastCounts(casts=2, cache_hits=0)

    @every_kind
    def test_a_call_with_nothing_to_cast_hands_over_its_own_arguments(self, implementations, kind):
        _, compiled = implementations(kind, torch.float16, seen)
        tensor = torch.ones(2, dtype=torch.float16 if kind == "whitelist" else torch.float32)
        given_ = (tensor, [tensor, 1], (tensor,), 2.5, "text", None)
        args, kwargs = compiled.function(*given_, p=tensor)
        assert all(new is old for new, old in zip(args, given_, strict=True))
        assert kwargs["p"] is tensor


class TestRegions:
    """What holds for a region of code, and not for its arguments."""

    REGIONS = (
        ("no_grad", torch.no_grad),
        ("inference_mode", torch.inference_mode),
        ("function mode", BaseTorchFunctionMode),
        ("dispatch mode", Operators),
        ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
        ("autocast off", lambda: torch.autocast("cpu", enabled=False)),
        ("autocast elsewhere", lambda: torch.autocast("cuda", torch.float16, enabled=torch.cuda.is_available())),
        ("default device", lambda: torch.device("cpu")),
        ("saved tensors", lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    )

    @pytest.mark.parametrize("region", [pytest.param(region, id=name) for name, region in REGIONS])
    @every_kind
    def test_python_and_cpp_hand_over_the_same_in_a_region(self, implementations, kind, half, region):
        python, compiled = implementations(kind, half, seen)
        weight, tensor = nn.Parameter(torch.ones(2)), torch.ones(2, dtype=half)
        for _ in range(2):
            with region():
                assert_alike(python, compiled, (weight, tensor, [tensor, weight]), {})

    def test_casts_are_off_where_they_were_turned_off(self, implementations):
        python, compiled = implementations("whitelist", torch.float16, seen)
        tensor = torch.ones(2)
        for each in (python, compiled):
            with each.switch.disabled():
                assert each.function(tensor)[0][0] is tensor
            assert each.function(tensor)[0][0] is not tensor
            each.switch.active = False
            assert each.function(tensor)[0][0] is tensor


class TestWeights:
    def test_a_new_weight_at_the_address_of_a_freed_one_is_cast_anew(self, implementations):
        for each in implementations("whitelist", torch.float16, seen):
            tensor = torch.ones(2)
            keys = set()
            for _ in range(50):  # an object is often made where the last one was
                weight = nn.Parameter(tensor)
                keys.add(id(weight))
                ((cast,), _) = each.function(weight)
                (gradient,) = torch.autograd.grad(cast.sum(), weight)
                assert torch.equal(gradient, torch.ones(2))
                del weight, cast, gradient

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_casts_made_without_grad_require_grad_as_the_weight_does(self, implementations, mode):
        for each in implementations("whitelist", torch.float16, seen):
            for requires_grad in (True, False):
                weight = nn.Parameter(torch.ones(2), requires_grad=requires_grad)
                with mode():
                    each.cache.enter_forward(each)
                    ((cast,), _), ((again,), _) = each.function(weight), each.function(weight)
                    each.cache.exit_forward(each)
                assert cast is again
                assert (cast.requires_grad, cast.is_leaf, cast.is_inference()) == (requires_grad, True, False)

    def test_a_thread_that_ends_within_a_forward_leaves_no_casts(self, implementations):
        weights = []

        def run(each: Implementation) -> None:
            weight = nn.Parameter(torch.ones(2))
            with torch.no_grad():
                each.cache.enter_forward(each)
                weights.append(weakref.ref(each.function(weight)[0][0]))
            # And no exit_forward: as where SystemExit is raised in it.

        for each in implementations("whitelist", torch.float16, seen):
            thread = threading.Thread(target=run, args=[each])
            thread.start()
            thread.join()
        gc.collect()
        assert [weight() for weight in weights] == [None, None]

    def test_no_casts_are_kept_where_weights_are_gathered(self, implementations):
        for each in implementations("whitelist", torch.float16, seen):
            weight = nn.Parameter(torch.ones(2))
            with torch.no_grad():
                each.cache.enter_forward(each)
                each.function(weight)
                each.cache.disable()
                each.function(weight)
                each.cache.exit_forward(each)
                each.cache.enter_forward(each)
                each.function(weight)
                assert len(each.cache) == 0
            assert each.cache.counts() == CastCounts(casts=3, cache_hits=0)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_casts_of_frozen_weights_belong_to_the_oldest_block_that_has_them(self, implementations, mode):
        for each in implementations("whitelist", torch.float16, seen):
            weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            with mode(), contextlib.ExitStack() as younger:
                with each.cache.frozen([weight]):
                    younger.enter_context(each.cache.frozen([weight, other]))
                    casts = [[each.function(which)[0][0] for _ in range(2)] for which in (weight, other)]
                    assert all(first is again for first, again in casts)
                ((after,), _), ((kept,), _) = each.function(weight), each.function(other)
                assert after is not casts[0][0]
                assert kept is casts[1][0]
                assert each.function(weight)[0][0] is after
            assert each.cache.counts() == CastCounts(casts=3, cache_hits=4)

    def test_frozen_weights_that_a_captured_step_updates_are_cast_anew(self, implementations, monkeypatch):
        """Python decides about every weight then, in C++ too."""
        monkeypatch.setattr(weight_cache, "is_capturing", lambda: True)
        for each in implementations("whitelist", torch.float16, seen):
            weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            with torch.no_grad(), each.cache.frozen([weight, other]):
                ((cast,), _) = each.function(weight)
                each.cache.end_iteration_of(lambda weight=weight: [weight])
                each.cache._frozen[0].store.keep(weight, cast)  # as another thread, in which the cast was under way
                for later in (contextlib.nullcontext(), each.cache.frozen([weight])):
                    with later:
                        assert each.function(weight)[0][0] is not each.function(weight)[0][0]
                        assert each.function(other)[0][0] is each.function(other)[0][0]

    @pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "beside frozen ones"])
    def test_cached_casts_are_found_without_python_in_a_frozen_block(self, implementations, is_frozen):
        # A builtin: calls of Python functions run in Python once torch.compile has watched frames in this process.
        _, compiled = implementations("whitelist", torch.float16, torch.clone)
        weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        with torch.no_grad(), compiled.cache.frozen([weight]):
            compiled.cache.enter_forward(compiled)
            used = weight if is_frozen else other
            compiled.function(used)
            assert frames_of(lambda: compiled.function(used)) == []
            compiled.cache.exit_forward(compiled)

    @pytest.mark.gpu
    def test_cached_casts_are_found_without_python_on_a_gpu(self, in_cpp):
        weight = nn.Linear(8, 8).cuda().weight  # not within the call: nn.Module.__getattr__ is Python
        with amp.init(half_dtype=torch.float16):
            value = torch.ones(8, 8, device="cuda", dtype=torch.float16)
            F.linear(value, weight)
            assert frames_of(lambda: F.linear(value, weight)) == []


class TestCasts:
    """Autograd, and all that watches operators, sees the cast that torch makes."""

    def test_the_cast_of_an_inference_tensor_is_none_outside_of_inference_mode(self, implementations):
        for each in implementations("whitelist", torch.float16, seen):
            with torch.inference_mode():
                tensor = torch.ones(3)
            ((result,), _) = each.function(tensor)
            assert not result.is_inference()
            assert result.add_(1).tolist() == [2] * 3

    def test_modes_and_profilers_see_the_cast(self, implementations):
        for each in implementations("whitelist", torch.float16, seen):
            for tensor in (torch.ones(2), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))):
                each.cache.end_iteration()
                with Operators() as operators:
                    each.function(tensor)
                each.cache.end_iteration()
                with torch.autograd.profiler.profile() as profile:
                    each.function(tensor)
                assert operators.names == ["aten._to_copy.default"]
                assert [event.name for event in profile.function_events].count("aten::_to_copy") == 1

    def test_hooks_for_saved_tensors_get_the_cast(self, implementations):
        for each in implementations("whitelist", torch.float16, torch.mm):
            saved = []
            tensor, weight = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
            with torch.autograd.graph.saved_tensors_hooks(
                lambda kept, saved=saved: saved.append(kept) or kept, lambda kept: kept
            ):
                loss = each.function(tensor, weight).sum()
            loss.backward()
            assert [kept.dtype for kept in saved] == [torch.float16] * 2
            assert [grad.dtype for grad in (tensor.grad, weight.grad)] == [torch.float32] * 2


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "tensor", "notes"),
        [
            (RuntimeError("not implemented for 'Half'"), torch.ones(2), ["ampatch: listed."]),
            (RuntimeError("not implemented for 'Half'"), torch.ones(2).half(), []),
            (KeyboardInterrupt(), torch.ones(2), []),
        ],
        ids=["cast", "not cast", "Ctrl-C"],
    )
    def test_only_an_error_of_a_call_that_was_cast_has_the_note(self, implementations, error, tensor, notes):
        def fails(x):
            raise copy.copy(error)

        for each in implementations("whitelist", torch.float16, fails):
            with pytest.raises(type(error)) as raised:
                each.function(tensor)
            assert getattr(raised.value, "__notes__", []) == notes

    def test_an_error_of_the_cast_itself_is_raised_with_the_note(self, implementations):
        _, compiled = implementations("whitelist", torch.float16, seen)
        huge = torch.empty(1).expand(2**46)  # as a half tensor of its own it fits no memory
        with pytest.raises(RuntimeError, match=r"memory|alloc") as raised:
            compiled.function(huge)
        assert raised.value.__notes__ == ["ampatch: listed."]


class TestFunctions:
    """A patched function passes for its original."""

    def test_wrappers_have_the_signature_of_their_originals_and_a_repr_of_their_own(self, in_cpp):
        softmax = F.softmax
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert inspect.signature(F.softmax) == inspect.signature(softmax)
        assert repr(F.softmax) == "<torch.nn.functional.softmax, patched by ampatch>"

    def test_attributes_of_a_wrapper_can_be_copied_and_cleared(self, in_cpp):
        amp.initialize(nn.Linear(1, 1), opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)

        @functools.wraps(F.linear)
        def mine(*args):
            return args

        assert vars(mine).keys() == {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"} - {"__annotations__"}
        vars(F.linear).clear()
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype == torch.bfloat16

    def test_a_wrapper_dies_with_its_last_reference_even_in_its_own_call(self, in_cpp, implementations):
        def last(tensor):
            functions.clear()
            return tensor.dtype

        _, compiled = implementations("whitelist", torch.float16, last)
        functions = [compiled.function]
        reference = weakref.ref(compiled.function)
        del compiled.function
        assert functions[0](torch.ones(2)) == torch.float16
        gc.collect()
        assert reference() is None

    def test_compiled_code_may_call_a_wrapper_that_outlived_its_session(self, in_cpp):
        x, w = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
        amp.initialize(nn.Linear(1, 1), opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)
        kept = F.linear
        compiled = torch.compile(lambda x, w: kept(x, w) + 0, backend="eager", fullgraph=True)
        assert compiled(x, w).dtype == torch.bfloat16
        amp.deinitialize()
        assert compiled(x, w).dtype == torch.float32
        assert torch.compile(kept, backend="eager")(x, w).dtype == torch.float32

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_compiled_code_can_compare_look_up_and_return_wrappers(self, in_cpp, fullgraph):
        amp.initialize(nn.Linear(1, 1), opt_level="O1", half_dtype=torch.bfloat16, verbosity=0)
        known, table = {F.softmax, F.log_softmax}, {F.softmax: 2.0}

        def run(function, x):
            is_it = function is F.softmax and function is not F.log_softmax
            factor = table.get(F.softmax, 0.0) if function in known and is_it else -1.0
            return function(x, dim=0) * factor, function

        x = torch.ones(2, 2)
        result, handed = torch.compile(run, backend="eager", fullgraph=fullgraph)(F.softmax, x)
        assert torch.equal(result, run(F.softmax, x)[0])
        assert handed is F.softmax


@pytest.fixture
def undecided(select_calls: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not chosen yet, with AMPATCH_CALLS not set."""
    monkeypatch.setattr(calls._selection, "chosen", None)
    calls.compiled.cache_clear()
    monkeypatch.delenv("AMPATCH_CALLS", raising=False)


@pytest.mark.usefixtures("undecided")
class TestChoice:
    def test_calls_run_in_cpp_by_default_where_the_library_is_compiled(self, compiled_calls):
        assert calls.in_use() == f"C++, the compiled library {extension.find(extension.CALLS).path}"

    def test_calls_run_in_python_without_a_library_and_name_the_command(self, tmp_path, monkeypatch):
        monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
        assert calls.in_use() == (
            "plain Python, as there is no compiled library for this version of ampatch, Python and torch in "
            f"{tmp_path}. `ampatch build` compiles it"
        )

    def test_calls_run_in_python_where_the_variable_asks_for_it(self, compiled_calls, monkeypatch):
        monkeypatch.setenv("AMPATCH_CALLS", "python")
        assert calls.in_use() == "plain Python, as AMPATCH_CALLS=python asks for"
        linear = F.linear
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert type(F.linear).__base__ is PatchedFunction
        assert F.linear is not linear

    def test_a_library_that_cannot_be_loaded_is_named(self, compiled_calls, tmp_path, monkeypatch):
        directory = tmp_path / extension.key(extension.source_hash(extension.CALLS), (), extension.CALLS)
        directory.mkdir()
        found = extension.find(extension.CALLS)
        (directory / extension.LIBRARY).write_bytes(b"\x7fELF")
        described = extension.describe(found).replace(f'"size": {found.size}', '"size": 4')
        (directory / extension.SIDECAR).write_text(described)
        monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
        monkeypatch.setattr(extension._process, "calls", None)
        assert calls.in_use().startswith("plain Python, as the compiled library")
        with pytest.raises(KernelError, match=r"cannot be loaded.*ampatch build --force"):
            calls.select("compiled")

"""``modules`` in the cast lists: parts of a model compute in float32, or by rules of their own, however they run."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Calls, Write, assert_same_bits, in_thread
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.cast_lists import list_reports
from ampatch.cast_lists.lists import shipped
from ampatch.errors import BannedFunctionError, CastListError, OptionError, UsageError
from ampatch.patching import thread_rules
from ampatch.switch import Switch

INPUTS = torch.linspace(-1, 1, 24).view(3, 8)
OWN = {"whitelist": ["cumsum"], "unlisted": ["softmax"], "blacklist": ["gelu"]}
HALF, FULL = torch.bfloat16, torch.float32
# The types of a linear layer's result, and of what `Part` does to it: by the session's lists, by `OWN`, in float32.
BY_SESSION = [HALF, FULL, FULL, HALF, FULL]
BY_OWN = [HALF, HALF, HALF, FULL, HALF]
IN_FLOAT32 = [FULL] * 5


class Part(nn.Module):
    """Notes in which types it computes."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Identity() if inner is None else inner
        self.seen: list[torch.dtype] = []
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("on purpose")
        x = self.inner(x)
        y = self.linear(x)
        found = [y, y.softmax(-1), F.softmax(y, -1), F.gelu(y), torch.cumsum(y, 0)]
        self.seen = [each.dtype for each in found]
        return sum(each.float() for each in found)  # type: ignore[return-value]


class Net(nn.Module):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.tail = Part(body), Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(self.body(x)))

    @property
    def seen(self) -> list[list[torch.dtype]]:
        return [self.body.seen, self.head.seen, self.tail.seen]


def ruled(modules: Any, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"half_dtype": HALF, "verbosity": 0} | options
    return amp.initialize(Net() if model is None else model, cast_lists={"modules": modules}, **options)


@pytest.fixture(autouse=True)
def session_rules_afterwards() -> Iterator[None]:
    yield
    assert thread_rules.in_force() not in thread_rules.TOKENS


class TestForward:
    @pytest.mark.parametrize(
        ("modules", "seen"),
        [
            ({"head": OWN, "tail": "float32"}, (BY_SESSION, BY_OWN, IN_FLOAT32)),
            ({"h?ad": OWN}, (BY_SESSION, BY_OWN, BY_SESSION)),
            ({f"{__name__}.Part": OWN}, (BY_OWN, BY_OWN, BY_OWN)),
            ({"head": OWN, "????": "float32", "t*": {}}, (IN_FLOAT32, BY_OWN, BY_SESSION)),
        ],
        ids=["names", "a pattern", "a class", "a name and the last pattern"],
    )
    def test_each_part_computes_by_its_own_rules(self, modules: Any, seen: Any, half: torch.dtype) -> None:
        model = ruled(modules, half_dtype=half)
        model(INPUTS)
        assert model.seen == [[half if each is HALF else each for each in types] for types in seen]

    def test_rules_of_all_parts_equal_the_same_lists_of_a_session(self) -> None:
        result = ruled({"Part": OWN})(INPUTS)
        amp.deinitialize()
        every = {name: {"*": functions} for name, functions in OWN.items()}
        assert_same_bits(result, amp.initialize(Net(), half_dtype=HALF, cast_lists=every, verbosity=0)(INPUTS))

    def test_torchs_path_of_a_class_names_its_subclasses_too(self) -> None:
        class Own(nn.LayerNorm):
            pass

        model = ruled({"torch.nn.LayerNorm": {"unlisted": ["layer_norm"]}}, nn.Sequential(Own(8), nn.Linear(8, 8)))
        assert model[0](INPUTS.bfloat16()).dtype is HALF
        assert F.layer_norm(INPUTS.bfloat16(), (8,)).dtype is FULL

    def test_rules_of_a_part_lie_over_the_lists_of_the_session(self) -> None:
        lists = [{"blacklist": {"torch": ["tanh"]}, "modules": {"0": OWN}}, {"blacklist": {"torch": ["atan"]}}]
        model = nn.ModuleList([Calls(lambda x: [f(x).dtype for f in (torch.tanh, torch.atan)])])
        amp.initialize(model, half_dtype=HALF, cast_lists=lists, verbosity=0)
        assert model[0](INPUTS.to(HALF)) == [FULL, FULL]

    def test_rules_may_name_functions_of_modules_imported_later(self, package: Callable[..., None]) -> None:
        package("later_ops", __init__="def twice(x):\n    return x + x\n")
        package("later_others", __init__="def half_of(x):\n    return x / 2\n")

        def both(x: Tensor) -> list[torch.dtype]:
            functions = import_module("later_ops").twice, import_module("later_others").half_of
            return [function(x).dtype for function in functions]

        own = {"whitelist": {"later_ops": ["twice"]}, "blacklist": {"later_others.*": ["half_*"]}}
        model = ruled({"0": own}, nn.ModuleList([Calls(both), Calls(both)]))
        assert model[0](INPUTS) == model[0](INPUTS.to(HALF)) == [HALF, FULL]
        assert model[1](INPUTS) == [FULL, FULL]
        assert model[1](INPUTS.to(HALF)) == [HALF, HALF]

    def test_a_banned_function_can_be_allowed_in_a_part(self) -> None:
        own = {"blacklist": {"torch.nn.functional": ["binary_cross_entropy"]}}
        bce = lambda *args: F.binary_cross_entropy(*args)  # noqa: E731, PLW0108 - looked up in the session
        model = ruled({"0": own}, nn.ModuleList([Calls(bce), Calls(bce)]))
        given = torch.full((2,), 0.5, dtype=HALF)
        assert model[0](given, given).dtype is FULL
        with pytest.raises(BannedFunctionError) as caught:
            model[1](given, given)
        assert "binary_cross_entropy is banned (banned.yaml" in caught.value.__notes__[0]

    def test_a_note_names_the_rule_of_the_part(self) -> None:
        inv = lambda x: torch.linalg.inv(x)  # noqa: E731, PLW0108 - looked up in the session
        model = ruled({"0": {"whitelist": {"torch.linalg": ["inv"]}}}, nn.ModuleList([Calls(inv), Calls(inv)]))
        assert model[1](torch.eye(3)).dtype is FULL
        with pytest.raises(RuntimeError) as caught:
            model[0](torch.eye(3))
        told = "ampatch: torch.linalg.inv is in the whitelist in this part of the model (cast_lists)."
        assert told in caught.value.__notes__


class TestPrecedence:
    def test_a_later_file_replaces_an_entry(self) -> None:
        lists = [{"modules": {"head": OWN, "tail": OWN}}, {"modules": {"head": {}}}]
        model = amp.initialize(Net(), half_dtype=HALF, cast_lists=lists, verbosity=0)
        model(INPUTS)
        assert model.seen == [BY_SESSION, BY_SESSION, BY_OWN]
        assert [entry.partition(":")[0] for entry in amp.settings()["modules"]] == ["tail", "head"]

    @pytest.mark.parametrize(
        ("value", "seen"), [({"whitelist": ["cumprod"]}, BY_SESSION), ("float32", IN_FLOAT32)], ids=["rules", "float32"]
    )
    def test_rules_of_an_inner_part_replace_those_of_the_outer_one(self, value: Any, seen: Any) -> None:
        model = ruled({"body": OWN, "body.inner": value}, Net(Part()))
        model(INPUTS)
        assert model.body.inner.seen == seen
        assert model.body.seen == BY_OWN

    def test_a_shared_part_keeps_its_rules_outside_of_a_float32_part(self) -> None:
        shared = Part()
        model = Net(shared)
        model.tail = shared
        ruled({"body": "float32", "tail": OWN}, model)
        model(INPUTS)
        assert model.body.seen == IN_FLOAT32
        assert shared.seen == BY_OWN  # last it ran as the tail
        model.body(INPUTS)
        assert shared.seen == IN_FLOAT32

    def test_rules_that_never_apply_are_an_error(self) -> None:
        with pytest.raises(
            CastListError, match=r"rules for 'body.inner', which never apply: 'bod\*' \(cast_lists\) has"
        ):
            ruled({"bod*": "float32", "body.inner": OWN}, Net(Part()))

    def test_keep_fp32_precedes_rules(self) -> None:
        model = ruled({"????": OWN}, keep_fp32="head")
        model(INPUTS)
        assert model.seen == [BY_OWN, IN_FLOAT32, BY_OWN]
        amp.deinitialize()
        with pytest.raises(CastListError, match=r"rules for 'head', which never apply: keep_fp32 has 'head' compute"):
            ruled({"head": OWN}, keep_fp32="head")

    def test_a_shared_module_is_found_by_each_of_its_names(self) -> None:
        model = Net()
        model.tail = model.body
        ruled({"tail": OWN}, model)
        model(INPUTS)
        assert model.seen == [BY_OWN, BY_SESSION, BY_OWN]

    def test_disable_casts_precedes_rules(self) -> None:
        model = ruled({"head": OWN})
        with amp.disable_casts():
            model(INPUTS)
        assert model.head.seen == IN_FLOAT32


class Product(torch.autograd.Function):
    """Its backward pass calls a function that `OWN` whitelists."""

    seen: tuple[torch.dtype, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cumsum(x, 0).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():  # the whitelist casts float32 tensors here only if the call is recorded
            found = torch.cumsum(gradient.detach().requires_grad_(), 0)
        Product.seen += (found.dtype,)
        return found.detach().float()


class TestBackward:
    @pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"])
    def test_backward_passes_of_users_functions_run_by_the_rules_of_their_part(self, reentrant: bool | None) -> None:
        class Outside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inside = nn.Sequential(Calls(Product.apply), Part())

            def forward(self, x: Tensor) -> Tensor:
                return self.inside(x) if reentrant is None else checkpoint(self.inside, x, use_reentrant=reentrant)

        Product.seen = ()
        model = ruled({"0": OWN}, nn.Sequential(Outside(), Outside()))
        model(INPUTS.clone().requires_grad_()).sum().backward()
        assert Product.seen == (FULL, HALF)  # the second module's first
        assert [each.inside[1].seen for each in model] == [BY_OWN, BY_SESSION]

    def test_the_backward_pass_of_an_inner_part_runs_by_its_own_rules(self) -> None:
        Product.seen = ()
        inner = nn.Sequential(Calls(Product.apply))
        model = ruled({"0": OWN, "0.0": "float32"}, nn.Sequential(inner, nn.Identity()))
        model(INPUTS.clone().requires_grad_()).sum().backward()
        assert Product.seen == (FULL,)


class TestThreads:
    def test_other_threads_compute_by_the_lists_of_the_session(self) -> None:
        model, seen = ruled({"head": OWN}), []

        def compute_elsewhere(*_: object) -> None:
            seen.append(in_thread(lambda: torch.cumsum(INPUTS, 0).dtype))

        model.head.inner.register_forward_hook(compute_elsewhere)
        model(INPUTS)
        assert (seen, model.head.seen) == ([FULL], BY_OWN)

    def test_threads_of_data_parallel_keep_the_rules(self) -> None:
        """By way of a function that starts threads as torch's does, which wants accelerators."""

        def parallel_apply(modules: list[Any], inputs: list[Tensor]) -> list[Tensor]:
            with ThreadPoolExecutor(len(modules)) as pool:
                return list(pool.map(lambda module, x: module(x), modules, inputs))

        class Parallel(nn.Module):
            def forward(self, x: Tensor) -> list[torch.dtype]:
                run = [lambda x: torch.cumsum(x, 0)] * 2
                by_rules, plain = Switch()._carried_by(parallel_apply), parallel_apply
                return [each.dtype for apply in (by_rules, plain) for each in apply(run, [x, x])]

        model = ruled({"0": OWN}, nn.ModuleList([Parallel(), Parallel()]))
        assert [each(INPUTS) for each in model] == [[HALF, HALF, FULL, FULL], [FULL] * 4]


class TestEnds:
    def test_rules_end_where_a_part_raises(self) -> None:
        model = ruled({"head": OWN})
        model.head.raises = True
        with pytest.raises(ValueError, match="on purpose"):
            model(INPUTS)
        assert torch.cumsum(INPUTS, 0).dtype is FULL

    def test_rules_end_where_a_part_calls_deinitialize(self) -> None:
        model = ruled({"head": OWN})
        model.head.inner.register_forward_hook(lambda *_: amp.deinitialize())
        model(INPUTS)
        assert model.seen == [BY_SESSION, IN_FLOAT32, IN_FLOAT32]
        assert "forward" not in vars(model.head)

    def test_rules_hold_for_a_call_of_forward_itself(self) -> None:
        model = ruled({"head": OWN})
        model.head.forward(INPUTS)
        assert model.head.seen == BY_OWN

    def test_a_part_with_rules_may_call_itself(self) -> None:
        class Again(Part):
            def forward(self, x: Tensor, depth: int = 1) -> Tensor:
                if depth:
                    self(x, depth - 1)
                return super().forward(x)

        model = Net()
        model.head = Again()
        ruled({"head": OWN}, model)
        model(INPUTS)
        assert model.head.seen == BY_OWN

    @pytest.mark.parametrize(("value", "wanted"), [(OWN, HALF), ("float32", FULL)], ids=["rules", "float32"])
    def test_rules_hold_in_generators_and_coroutines(self, value: Any, wanted: torch.dtype) -> None:
        class Yields(nn.Module):
            def forward(self, x: Tensor) -> Iterator[torch.dtype]:
                yield torch.cumsum(F.linear(x, torch.eye(8)), 0).dtype
                yield torch.cumsum(F.linear(x, torch.eye(8)), 0).dtype

        class Waits(nn.Module):
            async def forward(self, x: Tensor) -> torch.dtype:
                await asyncio.sleep(0)
                return torch.cumsum(F.linear(x, torch.eye(8)), 0).dtype

        model = ruled({"*": value}, nn.ModuleList([Yields(), Waits()]))
        found = []
        for each in model[0](INPUTS):
            found += [each, torch.cumsum(INPUTS, 0).dtype]
        assert found == [wanted, FULL] * 2
        assert asyncio.run(model[1](INPUTS)) is wanted

    def test_rules_for_an_asynchronous_generator_are_an_error(self) -> None:
        class Yields(nn.Module):
            async def forward(self, x: Tensor) -> Any:
                yield x

        with pytest.raises(OptionError, match=r"modules has '0', which matches '0', whose forward is an asynchronous"):
            ruled({"0": OWN}, nn.Sequential(Yields()))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_rules_for_a_part_in_torchscript_are_an_error(self) -> None:
        model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8))
        with pytest.raises(OptionError, match="which matches '0', which TorchScript has compiled"):
            ruled({"0": OWN}, model)


class TestCopies:
    def test_a_deep_copy_has_the_rules_and_a_pickled_one_does_not(self) -> None:
        model = ruled({"head": OWN})
        for twin, seen in ((copy.deepcopy(model).head, BY_OWN), (pickle.loads(pickle.dumps(model.head)), BY_SESSION)):
            twin(INPUTS)
            assert twin.seen == seen


class TestTransforms:
    def test_rules_hold_under_functional_call_grad_and_vmap(self) -> None:
        model = ruled({"head": OWN})
        weights = dict(model.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x[None],)).sum()

        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)
        assert model.seen == [BY_SESSION, BY_OWN, BY_SESSION]


class Types(nn.Module):
    """Returns tensors whose types show by which rules it ran."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, torch.eye(8))
        return y, y.softmax(-1), F.softmax(y, -1), F.gelu(y), torch.cumsum(y, 0)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Types(), Types(), Types()

    def forward(self, x: Tensor) -> list[tuple[Tensor, ...]]:
        return [self.one(x), self.two(x), self.three(x), self.one(x)]


def types_of(results: Any) -> list[list[torch.dtype]]:
    return [[each.dtype for each in found] for found in results]


@pytest.mark.usefixtures("nothing_compiled")
class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_compiled_model_is_one_graph_with_the_same_types(self, backend: str) -> None:
        model = ruled({"two": OWN, "three": "float32"}, Several())
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert types_of(compiled(INPUTS)) == [BY_SESSION, BY_OWN, IN_FLOAT32, BY_SESSION]
        assert torch.cumsum(INPUTS, 0).dtype is FULL

    @pytest.mark.slow
    def test_exported_programs_have_the_same_types(self) -> None:
        model = ruled({"two": OWN, "three": "float32"}, Several())
        for strict in (False, True):
            exported = torch.export.export(model, (INPUTS,), strict=strict).module()
            assert types_of(exported(INPUTS)) == [BY_SESSION, BY_OWN, IN_FLOAT32, BY_SESSION]
            assert thread_rules.in_force() not in thread_rules.TOKENS

    @pytest.mark.slow
    def test_rules_hold_around_a_graph_break(self) -> None:
        def breaks(x: Tensor) -> tuple[Tensor, ...]:
            before = torch.cumsum(x, 0)
            torch._dynamo.graph_break()
            return before, torch.cumsum(x, 0), before.softmax(-1)

        class All(nn.ModuleList):
            def forward(self, x: Tensor) -> list[tuple[Tensor, ...]]:
                return [each(x) for each in self]

        model = ruled({"1": OWN, "2": "float32"}, All(Calls(breaks) for _ in range(3)))
        found = types_of(torch.compile(model, backend="aot_eager")(INPUTS))
        assert found == [[FULL] * 3, [HALF] * 3, [FULL] * 3]

    @pytest.mark.slow
    def test_a_function_is_compiled_for_each_part_that_calls_it(self) -> None:
        run = torch.compile(Types().forward, backend="aot_eager", fullgraph=True)

        class Runs(nn.Linear):  # parts that are called alone, and so need parameters to be cast
            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                return run(x)

        model = ruled({"1": OWN, "2": "float32"}, nn.ModuleList(Runs(1, 1) for _ in range(3)))
        for _ in range(2):
            assert types_of([each(INPUTS) for each in model]) == [BY_SESSION, BY_OWN, IN_FLOAT32]


class TestFaults:
    def test_a_name_that_matches_no_submodule_is_an_error(self, write: Write) -> None:
        file = write('modules:\n  tail: float32\n  "bodyy": {}\n')
        with pytest.raises(CastListError) as caught:
            amp.initialize(Net(), half_dtype=HALF, cast_lists=file)
        assert str(caught.value) == (
            f"{file}:3: modules has 'bodyy', which matches no submodule of the model. Did you mean 'body'?"
        )
        assert not amp.is_on()

    @pytest.mark.parametrize(
        ("modules", "told"),
        [
            (
                {"body.linear.weight": OWN},
                r"'body.linear.weight', .*It is a parameter: name its submodule, 'body.linear'",
            ),
            ({"Net": OWN}, r"'Net', which matches no submodule of the model. It is the class of"),
            (["head"], "cast_lists: found a list; expected names of submodules, patterns or classes under modules, "),
            ({"head": {"blacklist": "softmax"}}, r"found 'softmax'; expected a list of names, such as \[mm, bmm\], or"),
        ],
        ids=["a parameter", "the class of the model", "a list of modules", "one name for a list"],
    )
    def test_faults_of_an_entry_are_named(self, modules: Any, told: str) -> None:
        with pytest.raises(CastListError, match=told):
            ruled(modules)

    def test_a_name_without_that_of_a_wrapping_module_is_an_error(self) -> None:
        with pytest.raises(CastListError, match=r"'head', which matches no submodule.* Did you mean 'inner.head'\?"):
            ruled({"head": OWN}, nn.Sequential(OrderedDict(inner=Net())))

    def test_compare_checks_the_names_of_submodules(self) -> None:
        b = {"opt_level": "O1", "cast_lists": {"modules": {"heaad": OWN}}}
        with pytest.raises(CastListError, match=r"'heaad', which matches no submodule"):
            amp.compare(Net(), INPUTS, Tensor.sum, "O1", b)

    def test_all_faults_of_a_file_are_named_at_once(self, write: Write) -> None:
        file = write(
            "modules:\n  a: float16\n  a: float32\n  b:\n  c: {blacklst: [exp], blacklist: [softmx], modules: {}}\n"
            "  d: [softmax]\n  e: {whitelist: {torch: [mm, mm]}}\n  3: float32\n"
        )
        with pytest.raises(CastListError) as caught:
            amp.initialize(Net(), half_dtype=HALF, cast_lists=file)
        told = str(caught.value).replace(f"{file}:", "").splitlines()
        expected = "expected float32, or lists of its own, such as {blacklist: [softmax]}."
        in_half = "To have functions compute in half in there, whitelist them: {whitelist: [softmax]}."
        assert [line for line in told if line.startswith(("2", "3", "4", "6"))] == [
            f"2: found 'float16' for 'a'; {expected} {in_half}",
            "3: the key 'a' stands here a second time; keep one.",
            f"4: found nothing for 'b'; {expected}",
            f"6: found a list for 'd'; {expected}",
        ]
        assert [line.partition(":")[0] for line in told] == ["2", "3", "4", "5", "5", "5", "6", "7", "8"]

    def test_too_many_sets_of_rules_are_an_error(self) -> None:
        torchs = [name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name)) and name[0] != "_"]
        modules = {f"*{i}": {"unlisted": {"torch.Tensor": [name]}} for i, name in enumerate(torchs[:60])}
        model = nn.Sequential(*(nn.Identity() for _ in modules))
        with pytest.raises(OptionError, match=r"60 different sets of rules.*at most \d+"):
            ruled(modules, model)

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_rules_are_an_error_at_levels_without_lists(self, level: str) -> None:
        with pytest.raises(OptionError, match=rf"opt_level='{level}': cast_lists has an entry for 'head'.*float32"):
            ruled({"head": OWN}, opt_level=level)

    def test_amp_init_refuses_rules_of_modules(self) -> None:
        with pytest.raises(OptionError, match=r"modules has 'head', and amp.init knows no model"):
            amp.init(cast_lists={"modules": {"head": "float32"}})

    def test_a_second_call_must_have_the_same_rules(self) -> None:
        ruled({"head": OWN})
        rules = r"modules has rules for 'head' by cast_lists \(this call: "
        with pytest.raises(UsageError, match=rf"{rules}float32 for 'head' by cast_lists\)"):
            ruled({"head": "float32"})
        with pytest.raises(UsageError, match=rf"{rules}rules for 'head' by cast_lists\)"):
            ruled({"head": {}})
        with pytest.raises(UsageError, match=rf"{rules}rules for 'head' by cast_lists and float32 for 'tail' by cast_"):
            ruled({"head": OWN, "tail": "float32"})


class TestOtherLevels:
    def test_float32_parts_are_kept_at_o2(self) -> None:
        model = ruled({"head": "float32"}, opt_level="O2")
        assert {each.dtype for each in model.head.parameters()} == {FULL}
        assert {each.dtype for each in model.tail.parameters()} == {HALF}
        model(INPUTS)
        assert model.head.seen == IN_FLOAT32

    def test_rules_are_accepted_at_o0_and_with_amp_off(self) -> None:
        ruled({"head": OWN, "tail": "float32"}, opt_level="O0")
        amp.deinitialize()
        ruled({"head": OWN, "tail": "float32"}, enabled=False)

    def test_convert_model_takes_float32_parts_and_refuses_rules(self) -> None:
        lists = {"modules": {"head": "float32"}}
        made = amp.convert_model(Net(), half_dtype=HALF, cast_lists=lists)
        with torch.no_grad():
            made(INPUTS)
        assert made.head.seen == IN_FLOAT32
        with pytest.raises(OptionError, match="modules has rules for 'head', and a copy for inference"):
            amp.convert_model(Net(), half_dtype=HALF, cast_lists={"modules": {"head": OWN}})


class TestTold:
    def test_settings_list_the_rules(self) -> None:
        ruled({"head": {"whitelist": {"torch": ["cumsum"]}}, "tail": "float32"})
        assert amp.settings()["modules"] == ["head: whitelist torch.cumsum", "tail: float32"]

    def test_explain_names_the_rules_of_parts(self) -> None:
        model = ruled({"head": OWN, "tail": "float32"})
        told = " ".join(str(amp.explain(torch.cumsum)).split())
        assert "In submodules that 'head' matches (cast_lists) torch." in told
        assert "torch.cumsum is in the whitelist (cast_lists)" in told
        assert "In submodules that 'tail' matches (cast_lists) nothing is cast" in told
        inside: list[Any] = []
        model.head.inner.register_forward_hook(lambda *_: inside.append(amp.explain(torch.cumsum, INPUTS)))
        model(INPUTS)
        assert "Here the rules of modules 'head' (cast_lists) apply." in inside[0].state
        assert inside[0].call.prediction.arguments[0].after is HALF

    def test_a_report_counts_the_casts_of_each_part(self) -> None:
        model = ruled({"head": OWN, "tail": "float32"})
        with amp.report() as report, torch.no_grad():
            model(INPUTS)
        rows = {row["name"]: row for row in report.to_dict()["functions"]}
        linear, gelu = rows["torch.nn.functional.linear"], rows["torch.nn.functional.gelu"]
        assert (linear["rule"], linear["calls"], linear["casts"]) == ("whitelist", 3, 6)
        assert (gelu["rule"], gelu["calls"], gelu["casts"]) == ("by part", 3, 1)

    def test_reports_of_lists_show_the_rules_of_parts(self, write: Write) -> None:
        file = write(
            'modules:\n  "head*": float32\n  body:\n    blacklist: {torch.nn.functional: [gelu]}\n'
            "    unlisted: [vdot]\n  tail: {}\n"
        )
        lists = shipped().overlaid(file)
        parts = [
            ["In parts of a model:"],
            ["head*", "everything", "float32", f"{file}:2"],
            ["body", "torch.Tensor.vdot", "unlisted", f"{file}:3"],
            ["body", "torch.nn.functional.gelu", "blacklist", f"{file}:4"],
            ["body", "torch.vdot", "unlisted", f"{file}:3"],
            ["tail", "-", "no change", f"{file}:6"],
        ]
        shown = [re.split(r" {2,}", line) for line in list_reports.policy(lists)]
        assert sorted(shown[-6:]) == sorted(parts)
        of_one = [re.split(r" {2,}", line) for line in list_reports.policy(lists, names=["gelu"])]
        assert of_one[-3:] == [parts[0], parts[1], parts[3]]
        changed = [re.split(r" {2,}", line) for line in list_reports.changes(shipped(), lists, "casts.yaml")]
        assert changed[0] == ["0 paths treated differently in float16 and bfloat16."]
        assert sorted(changed[1:]) == sorted(parts)
        told = list_reports.checked("casts.yaml", shipped(), lists).lines
        assert told[-1].endswith("is sound: it has 3 entries for parts of a model.")

    def test_the_check_of_lists_names_spellings_that_a_rule_leaves_out(self) -> None:
        lists = shipped().overlaid({"modules": {"head": {"whitelist": {"torch": ["cumsum"]}}}})
        found = list_reports.checked("casts.yaml", shipped(), lists)
        assert found.lines[0].startswith("in modules 'head': cast_lists: torch.cumsum is in the whitelist now, but")
        undone = shipped().overlaid({"modules": {"head": {"whitelist": {"torch.nn.functional": ["softmax"]}}}})
        assert list_reports.checked("casts.yaml", shipped(), undone).warns

    def test_a_rule_that_a_called_function_undoes_is_warned_of(self) -> None:
        with pytest.warns(amp.AmpWarning, match=r"in modules 'head': cast_lists: torch.nn.functional.softmax is in"):
            ruled({"head": {"whitelist": {"torch.nn.functional": ["softmax"]}}})


class TestCost:
    def test_functions_that_no_part_names_keep_their_wrappers(self) -> None:
        amp.initialize(Net(), half_dtype=HALF, verbosity=0)
        plain = type(F.linear), type(torch.cumsum)
        amp.deinitialize()
        ruled({"head": OWN})
        assert type(F.linear) is plain[0]

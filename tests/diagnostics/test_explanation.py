"""`amp.explain`: what it tells of functions, lists, places, calls and modules."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from command_line import ampatch
from helpers import HALF_DTYPES, casts_on, check_rows, dtype_name
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampatch import amp
from ampatch.diagnostics.explain.result import Explanation, Ruling, Spelling
from ampatch.diagnostics.explain.rulings import Rulings
from ampatch.diagnostics.explain.subjects import Subject, subject_of
from ampatch.patching import function_places
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


def spelling(explanation: Explanation, path: str) -> Spelling:
    (found,) = (each for each in explanation.spellings if each.path == path)
    return found


def ruling(explanation: Explanation, path: str, half_dtype: str = "float16") -> Ruling:
    (found,) = (each for each in spelling(explanation, path).rulings if half_dtype in each.half_dtypes)
    return found


def subject(given: object) -> Subject:
    return subject_of(given, Rulings(None, HALF_DTYPES))


def asked_paths(given: object) -> list[str]:
    return sorted(str(each.path) for each in subject(given).spelled if each.asked)


def decided(given: object, path: str, half_dtype: str = "float16") -> Ruling:
    """The ruling on a spelling of a function, without the search for places, which takes most of the time."""
    (spelled,) = (each for each in subject(given).spelled if str(each.path) == path)
    rulings = Rulings(None, HALF_DTYPES).of(spelled)
    (found,) = (each for each in rulings if half_dtype in each.half_dtypes)
    return found


def asked(explanation: Explanation) -> list[str]:
    return [each.path for each in explanation.spellings if each.asked]


class DtypesOf(TorchDispatchMode):
    """Notes the dtypes of the arguments that an operator gets."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator, self.dtypes = operator, []

    def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ == self.operator:
            self.dtypes = [dtype_name(each.dtype) for each in args]
        return op(*args, **(kwargs or {}))


def changes(explanation: Explanation) -> dict[str, tuple[str, str]]:
    """The types before and after, by the name of the argument."""
    assert explanation.call is not None
    told = explanation.to_dict()["call"]["arguments"]
    return {each["name"]: (each["before"], each["after"]) for each in told}


def reasons(explanation: Explanation) -> list[str | None]:
    assert explanation.call is not None
    return [each.why for each in explanation.call.prediction.arguments]


@functools.cache
def loaded_before() -> frozenset[str]:
    return frozenset(sys.modules) - {__name__}


@pytest.fixture(autouse=True)
def _searches_what_tests_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the modules of all other tests: with their tables the search would take most of the time."""
    loaded, before = function_places.loaded_modules, loaded_before()

    def searched(*internal: str) -> list[types.ModuleType]:
        return [each for each in loaded(*internal) if object.__getattribute__(each, "__name__") not in before]

    monkeypatch.setattr(function_places, "loaded_modules", searched)


@pytest.fixture
def neighbour(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a user's, that holds functions in every way."""
    made = types.ModuleType("neighbour")
    monkeypatch.setitem(sys.modules, "neighbour", made)
    exec(
        "import functools, torch, torch.nn.functional as F\n"
        "soft = F.softmax\n"
        "table = {'soft': [F.softmax]}\n"
        "part = functools.partial(F.softmax, dim=-1)\n"
        "def default(x, act=F.softmax): return act(x, dim=-1)\n"
        "log = torch.log\n"
        "def default_log(x, log=torch.log): return log(x)\n"
        "def product(a, b, name='a'): return a @ b if name == 'a' else name + 'b'\n"
        "def loss(x, y): return F.cross_entropy(F.linear(x, x), y).exp()\n"
        "class Holder:\n"
        "    act = staticmethod(F.softmax)\n"
        "    log = staticmethod(torch.log)\n",
        vars(made),
    )
    return made


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(
        """\
whitelist:
  "*": [softmax]  # small here
blacklist:
  torch:
    # overflows in our head
    - {name: mm, since: "2.0"}
    - {name: bmm, since: "99.0"}
unlisted:
  # fine for us
  torch: [exp]
"""
    )
    return file


class TestForms:
    """The forms in which a function can be named.

    They go to the finder alone, since a whole explanation also searches the process for places.
    """

    FORMS: ClassVar[list[tuple[Any, list[str]]]] = [
        (torch.softmax, ["torch.softmax"]),
        (F.softmax, ["torch.nn.functional.softmax"]),
        (torch.Tensor.softmax, ["torch.Tensor.softmax"]),
        (torch.ones(2).softmax, ["torch.Tensor.softmax"]),
        (functools.partial(F.softmax, dim=-1), ["torch.nn.functional.softmax"]),
        (torch.conv2d, ["torch.conv2d", "torch.nn.functional.conv2d"]),
        (torch.linalg.norm, ["torch.linalg.norm"]),
        (torch.Tensor.__matmul__, ["torch.Tensor.__matmul__"]),
        (torch.ones(2).__rmatmul__, ["torch.Tensor.__rmatmul__"]),
        (operator.matmul, ["torch.Tensor.__matmul__"]),
        (operator.imul, ["torch.Tensor.__imul__"]),
        ("softmax", []),
        ("torch.softmax", ["torch.softmax"]),
        ("F.softmax", ["torch.nn.functional.softmax"]),
        ("functional.softmax", ["torch.nn.functional.softmax"]),
        (" Tensor.softmax ", ["torch.Tensor.softmax"]),
        ("linalg.norm", ["torch.linalg.norm"]),
        ("exp_", ["torch.exp_", "torch.Tensor.exp_"]),
        ("@", ["torch.Tensor.__matmul__"]),
        ("*=", ["torch.Tensor.__imul__"]),
        ("torch.nn.Parameter.softmax", ["torch.nn.Parameter.softmax", "torch.Tensor.softmax"]),
    ]

    @pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
    def test_each_form_leads_to_the_function(self, is_on: bool, subtests: pytest.Subtests) -> None:
        def check(given: Any, paths: list[str]) -> None:
            assert asked_paths(given) == sorted(paths)

        if is_on:
            amp.init(half_dtype=torch.float16)
        check_rows(subtests, ((repr(given), given, paths) for given, paths in self.FORMS), check)

    def test_operators_and_in_place_forms_are_spellings_of_a_function(self) -> None:
        def paths(given: object) -> list[str]:
            return [str(each.path) for each in subject(given).spelled]

        products = ["matmul", "Tensor.matmul", "linalg.matmul", "Tensor.__matmul__", "Tensor.__rmatmul__"]
        assert paths("@") == [f"torch.{name}" for name in products]
        assert set(paths(torch.exp)) == {"torch.exp", "torch.Tensor.exp", "torch.exp_", "torch.Tensor.exp_"}
        assert "torch._VF.lstm" in paths("lstm")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("sofmax", "there is no function named 'sofmax'.*Did you mean 'softmax'"),
            ("", "there is no function named ''"),
            ("softmax()", "Did you mean 'softmax'"),
            ("torch.nn.functional.softmx", "'torch.nn.functional' has no 'softmx'. Did you mean 'softmax'"),
            ("nope.softmax", "there is no module 'nope'"),
            ("@=", "'torch.Tensor' has no '__imatmul__'"),
            ("torch.float32", "found 'torch.float32'; expected a function"),
            ("nn.Linr", "'torch.nn' has no 'Linr'. Did you mean 'Linear'"),
            ("functional.sofmax", "'torch.nn.functional' has no 'sofmax'. Did you mean 'softmax'"),
            (torch.autograd.Function, "found Function; expected a function, an nn.Module"),
            (nn.functional, "found module; expected .* type `ampatch lists show torch.nn.functional`"),
            ("torch.fft", "found 'torch.fft'; expected .* type `ampatch lists show torch.fft`"),
            (nn.Module, "Module has no forward"),
            (nn.ModuleList([nn.ModuleList()]), "ModuleList has no forward, and its modules have none"),
            (type("InC", (nn.Module,), {"forward": torch.relu})(), "found InC, whose forward is no function in Python"),
            (None, "found NoneType; expected a function"),
            (3, "found int; expected a function"),
        ],
        ids=str,
    )
    def test_anything_but_a_function_is_one_clear_error(self, given: Any, message: str) -> None:
        with pytest.raises(amp.OptionError, match=message) as raised:
            amp.explain(given)
        assert "\n" not in str(raised.value)

    def test_a_function_of_a_module_that_is_not_imported_is_known_from_its_list(
        self, package: Callable[..., None]
    ) -> None:
        package("imported_later", math="def product(a, b): return a @ b\n")
        later = "imported_later.math.product"
        with pytest.raises(amp.OptionError, match=r"imported_later.math is not imported, and no list names"):
            amp.explain(later)
        amp.init(cast_lists={"whitelist": {"imported_later.math": ["product"]}})
        for name in (later, "product"):
            assert ruling(amp.explain(name), later).treatment == "whitelist"
        assert "imported_later.math is not imported yet; amp patches it then." in amp.explain(later).state
        with pytest.raises(amp.OptionError, match="before its module is imported"):
            amp.explain(later, torch.ones(2, 2))
        assert "imported_later" not in sys.modules


class TestRules:
    def test_a_shipped_rule_has_file_line_and_reason(self) -> None:
        found = decided("softmax", "torch.Tensor.softmax")
        assert (found.treatment, found.via_dtype) == ("blacklist", True)
        assert re.fullmatch(r"blacklist\.yaml:\d+", str(found.source))
        assert found.reason == "Probabilities and their logarithms: a half softmax turns small ones into zero."
        assert found.overrides is None

    def test_a_function_in_no_list_on_purpose_has_the_reason(self) -> None:
        found = decided(torch.cat, "torch.cat")
        assert (found.treatment, found.source) == ("unlisted", "reviewed.yaml (promotes)")
        assert str(found.reason).startswith("Torch promotes mixed operands to the widest type by itself")
        assert str(found.reason)[:50] in str(amp.explain(torch.cat))

    def test_half_types_with_different_rules_have_one_each(self) -> None:
        assert decided(torch.exp, "torch.exp", "float16").treatment == "blacklist"
        assert decided(torch.exp, "torch.exp", "bfloat16") == Ruling(("bfloat16",), "unlisted")
        assert [each.half_dtypes for each in spelling(amp.explain("mm"), "torch.mm").rulings] == [
            ("float16", "bfloat16")
        ]

    def test_a_rule_has_its_condition_and_advice(self) -> None:
        found = decided(F.interpolate, "torch.nn.functional.interpolate")
        assert found.when == (("mode", ("area", "bicubic", "bilinear", "linear", "trilinear")),)
        assert "binary_cross_entropy_with_logits" in str(
            decided(F.binary_cross_entropy, "torch.nn.functional.binary_cross_entropy").instead
        )

    def test_rules_for_other_versions_of_torch_are_notes(self, overlay: Path) -> None:
        amp.init(cast_lists=overlay)
        assert decided("mm", "torch.mm").since == "2.0"
        batched = amp.explain("bmm")
        (note,) = batched.notes
        assert note.startswith(f"{overlay}:7 has torch.bmm in 'blacklist' from torch 99.0 on; this is torch ")
        assert ruling(batched, "torch.bmm").treatment == "whitelist"

    def test_a_users_rule_has_its_reason_and_what_it_replaced(self, overlay: Path) -> None:
        amp.init(half_dtype=torch.float16, cast_lists=overlay)
        soft = decided("softmax", "torch.nn.functional.softmax")
        assert (soft.treatment, soft.source, soft.reason) == ("whitelist", f"{overlay}:2", "small here")
        assert soft.overrides is not None
        assert (soft.overrides.treatment, soft.overrides.source[:15]) == ("blacklist", "blacklist.yaml:")
        sparse = decided("softmax", "torch.sparse.softmax")
        assert (sparse.treatment, sparse.overrides) == ("whitelist", None)
        product = decided("mm", "torch.mm")
        assert (product.source, product.reason) == (f"{overlay}:6", "overflows in our head")

    def test_a_function_taken_off_its_list_has_the_line_that_did_it(self, overlay: Path) -> None:
        amp.init(half_dtype=torch.float16, cast_lists=overlay)
        removed = decided(torch.exp, "torch.exp")
        assert (removed.treatment, removed.source, removed.reason) == ("unlisted", f"{overlay}:10", "fine for us")
        assert removed.overrides is not None
        assert removed.overrides.treatment == "blacklist"
        assert decided(torch.exp, "torch.Tensor.exp").treatment == "blacklist"

    def test_a_later_file_for_another_torch_took_nothing_off(self, overlay: Path, tmp_path: Path) -> None:
        later = tmp_path / "later.yaml"
        entry = '{torch: [{name: exp, since: "99.0"}]}'
        later.write_text(f"blacklist: {entry}\nunlisted: {entry}\n")
        amp.init(half_dtype=torch.float16, cast_lists=[overlay, later])
        found = amp.explain(torch.exp)
        assert ruling(found, "torch.exp").source == f"{overlay}:10"
        assert len(found.notes) == 2

    def test_rules_of_a_mapping_have_no_reasons(self) -> None:
        amp.init(cast_lists={"blacklist": {"torch": ["mm"]}, "unlisted": {"torch": ["bmm"]}})
        for name, treatment in (("mm", "blacklist"), ("bmm", "unlisted")):
            found = decided(name, f"torch.{name}")
            assert (found.treatment, found.source, found.reason) == (treatment, "cast_lists", None)
            assert found.overrides is not None
            assert found.overrides.treatment == "whitelist"

    def test_a_users_file_may_have_the_name_of_a_shipped_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = str(decided("log", "torch.log").source)
        name, _, line = source.partition(":")
        monkeypatch.chdir(tmp_path)
        Path(name).write_text("\n" * (int(line) - 1) + "blacklist: {torch: [log]}  # ours\n")
        amp.init(cast_lists=name)
        found = decided("log", "torch.log")
        assert (found.source, found.reason) == (source, "ours")

    def test_an_edit_that_an_inner_call_undoes_is_noted(self) -> None:
        with pytest.warns(amp.AmpWarning, match="functions that undo this"):
            amp.init(cast_lists={"whitelist": {"torch.nn.functional": ["softmax"]}})
        (note,) = amp.explain(F.softmax).notes
        assert "it calls functions that undo this: torch.Tensor.softmax" in note

    def test_registrations_override_the_lists(self, neighbour: types.ModuleType) -> None:
        amp.register_float_function(torch, "mm")
        amp.register_bfloat16_function(neighbour, "product")
        for _ in ("off", "on"):
            products = amp.explain(torch.mm)
            found = ruling(products, "torch.mm")
            assert (found.treatment, found.source) == ("blacklist", "registered")
            assert found.overrides is not None
            assert found.overrides.treatment == "whitelist"
            assert ruling(products, "torch.Tensor.mm").source != "registered"
            for given in (neighbour.product, "neighbour.product", "product"):
                own = decided(given, "neighbour.product")
                assert (own.treatment, own.source, own.casts_to) == ("whitelist", "registered", "bfloat16")
            amp.deinitialize()
            amp.init(half_dtype=torch.float16)

    def test_a_registered_method_counts_for_its_class_only(self) -> None:
        amp.register_half_function(nn.Bilinear, "forward")
        assert decided(nn.Bilinear.forward, "torch.nn.modules.linear.Bilinear.forward").source
        other = amp.explain(nn.Linear.forward)
        assert asked(other) == ["torch.nn.modules.linear.Linear.forward"]
        assert other.spellings[0].rulings[0].treatment == "unlisted"

    def test_a_name_in_torchs_own_modules_is_not_patched_and_a_users_name_is(self, neighbour: types.ModuleType) -> None:
        assert decided("torch._C._nn.linear", "torch._C._nn.linear").treatment == "whitelist"
        inner = "torch._C._linalg.linalg_multi_dot"
        assert decided(inner, inner).treatment == "unlisted"
        assert decided("neighbour.soft", "neighbour.soft").treatment == "blacklist"
        assert decided("neighbour.Holder.act", "neighbour.Holder.act").treatment == "unlisted"

    def test_another_tools_patch_over_amps_is_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with casts_on():
            assert spelling(amp.explain("linear"), "torch.nn.functional.linear").note is None
            with monkeypatch.context() as other_tool:
                other_tool.setattr(F, "linear", functools.partial(F.linear))
                assert spelling(amp.explain("linear"), "torch.nn.functional.linear").note is not None


#: Linear layers round to a format.
ROUNDED = {"whitelist": {"torch.nn.functional": [{"name": "linear", "format": "float8_e4m3"}]}}
APPLIES_ONLY = (
    "applies only what is marked needs_float32 or has a format, and beside a half weight other arguments become half."
)


class TestState:
    """On relu where the function does not matter: it is on no list, so no places are searched."""

    def test_amp_that_is_off_is_told(self) -> None:
        assert amp.explain("relu").state == ("amp is off; this is what the shipped lists would do.",)
        amp.initialize(nn.Linear(2, 2), enabled=False)
        assert amp.explain("relu").state[0].startswith("amp is off (enabled=False)")

    def test_the_live_settings_are_told(self, overlay: Path) -> None:
        amp.init(half_dtype=torch.float16, cast_lists=overlay)
        found = amp.explain("relu")
        assert found.state == (f"amp is on at O1 in float16, with the shipped lists and {overlay}.",)
        assert found.policy["cast_lists"] == [str(overlay)]

    def test_disabled_casts_are_told(self) -> None:
        amp.init()
        with amp.disable_casts():
            found = amp.explain(torch.mm, torch.ones(2, 2), torch.ones(2, 2))
        assert "Casts are off here." in found.state
        assert reasons(found) == ["casts are off here"] * 2
        assert reasons(amp.explain(torch.mm, torch.ones(2, 2), torch.ones(2, 2))) == [None, None]

    @pytest.mark.parametrize(
        ("level", "state", "why"),
        [
            ("O0", "O0 patches no functions, so none of this is applied.", "O0 patches no functions"),
            ("O2", f"O2 {APPLIES_ONLY}", "O2 patches no functions but those that need float32"),
            ("O3", f"O3 {APPLIES_ONLY}", "O3 patches no functions but those that need float32"),
        ],
    )
    def test_a_level_that_does_not_patch_the_function_is_told(self, level: str, state: str, why: str) -> None:
        amp.initialize(nn.Linear(2, 2), opt_level=level, half_dtype="bfloat16", verbosity=0)
        found = amp.explain(torch.sum, torch.ones(2, 2))
        assert state in found.state
        assert reasons(found) == [why]
        assert found.places == ()

    def test_float32_arguments_stay_at_levels_with_half_weights(self) -> None:
        amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0, cast_lists=ROUNDED)
        for function in (torch.mm, F.linear):
            found = amp.explain(function, torch.ones(2, 2), torch.ones(2, 2))
            assert reasons(found) == ["no argument is half"] * 2

    @pytest.mark.parametrize("is_off", [False, True])
    @pytest.mark.parametrize("lists", [None, ROUNDED], ids=["half", "rounded"])
    def test_arguments_beside_a_half_weight_have_the_types_of_the_live_call(self, lists: object, is_off: bool) -> None:
        told: list[list[str]] = []

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 4))

            def forward(self, x: Tensor) -> Tensor:
                given = x.float(), self.weight
                with amp.disable_casts() if is_off else contextlib.nullcontext():
                    found = amp.explain(F.linear, *given)
                    with DtypesOf("mm") as computed:
                        result = F.linear(*given)
                told.extend([[after for _, after in changes(found).values()], computed.dtypes])
                assert any("off here" in each for each in found.state) is is_off
                return result

        model = amp.initialize(Model(), opt_level="O5", verbosity=0, cast_lists=lists)
        model(torch.randn(2, 4))
        rounds = lists is not None and not is_off
        assert told == [["float32" if rounds else "bfloat16"] * 2] * 2

    def test_allowed_banned_functions_are_computed_in_float32(self) -> None:
        half = torch.ones(2, dtype=torch.bfloat16)
        amp.init(allow_banned=True, half_dtype="bfloat16")
        found = amp.explain(F.binary_cross_entropy, half, half)
        assert changes(found) == {"input": ("bfloat16", "float32"), "target": ("bfloat16", "float32")}
        assert "banned  computed in float32, by allow_banned=True" in str(found)


class TestCalls:
    """What a call would do. That the types are right for every function, `tests/patching/test_predictions.py` shows."""

    @pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
    def test_the_live_call_gets_these_types(self, half: torch.dtype, subtests: pytest.Subtests) -> None:
        """Through the public function, against the dtype of the live result."""
        vector, matrix = torch.ones(2), torch.ones(2, 2)
        calls = {
            "mm": (matrix, matrix.to(half)),
            "nn.functional.linear": (matrix, matrix.to(half)),
            "Tensor.matmul": (matrix, matrix.to(half)),
            "log": (matrix,),
            "dot": (vector, vector.to(half)),
        }

        def check(name: str, args: tuple[Tensor, ...]) -> None:
            patched = functools.reduce(getattr, name.split("."), torch)
            found = set(changes(amp.explain(patched, *args)).values())
            assert {after for _, after in found} == {dtype_name(patched(*args).dtype)}

        with casts_on(half):
            check_rows(subtests, ((name, name, args) for name, args in calls.items()), check)

    def test_without_amp_a_call_is_predicted_in_the_default_half_type(self) -> None:
        found = amp.explain(torch.mm, torch.ones(2, 2), mat2=torch.ones(2, 2))
        assert found.call is not None
        half = "float16" if torch.cuda.is_available() else "bfloat16"
        assert found.call.half_dtype == half
        assert changes(found) == {"input": ("float32", half), "mat2": ("float32", half)}

    def test_arguments_of_bound_methods_and_partials_count(self) -> None:
        amp.init(half_dtype=torch.float16)
        half = torch.ones(2, 2, dtype=torch.float16)
        assert changes(amp.explain(half.log)) == {"input": ("float16", "float32")}
        assert changes(amp.explain(functools.partial(torch.mm, half), torch.ones(2, 2))) == {
            "input": ("float16", "float16"),
            "mat2": ("float32", "float16"),
        }
        assert amp.explain(functools.partial(F.softmax, dim=-1)).call is None

    def test_an_unlisted_function_casts_nothing(self) -> None:
        amp.init()
        assert reasons(amp.explain(torch.relu, torch.ones(2))) == ["the function is on no list"]

    def test_a_call_that_would_raise_has_the_error(self) -> None:
        half = torch.ones(2, dtype=torch.float16)
        amp.init(half_dtype=torch.float16)
        for function, args in ((F.binary_cross_entropy, (half, half)), (torch.Tensor.exp_, (half,))):
            found = amp.explain(function, *args)
            with pytest.raises(amp.BannedFunctionError) as raised:
                function(*args) if function is torch.Tensor.exp_ else F.binary_cross_entropy(*args)
            assert found.call is not None
            assert found.call.prediction.error == str(raised.value)
            assert "It would raise BannedFunctionError" in str(found)

    def test_a_function_that_was_bound_before_casts_nothing(self) -> None:
        kept = [F.linear, torch.ones(2, 2).matmul]
        amp.init()
        for function in kept:
            found = amp.explain(function, torch.ones(2, 2), torch.ones(2, 2))
            assert set(reasons(found)) == {"this object is the function without amp"}
            assert sum("bound before amp was set up" in sentence for sentence in found.state) == 1
        assert "bound before" not in str(amp.explain(F.linear))

    def test_a_function_that_was_bound_before_casts_nothing_beside_half_weights(self) -> None:
        kept = F.linear
        amp.initialize(nn.Linear(2, 2), opt_level="O5", verbosity=0)
        found = amp.explain(kept, torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16))
        assert set(reasons(found)) == {"this object is the function without amp"}

    def test_a_call_of_a_decorated_function_is_predicted(self) -> None:
        @amp.half_function
        def product(a: Tensor, b: Tensor) -> Tensor:
            return torch.mm(a, b)

        assert product.__name__ == "product"
        args = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)
        amp.init(half_dtype=torch.float16)
        found = amp.explain(product, *args)
        assert changes(found) == {"a": ("float32", "float16"), "b": ("float64", "float64")}
        (own,) = found.spellings[0].rulings
        assert (own.treatment, own.source) == ("whitelist", "decorated")
        assert [each.path for each in found.calls] == ["torch.mm"]

    @pytest.mark.parametrize(
        ("decorate", "treatment", "casts_to"),
        [
            (amp.float_function, "blacklist", None),
            (amp.promote_function, "promote", None),
            (amp.bfloat16_function, "whitelist", "bfloat16"),
        ],
    )
    def test_each_decorator_has_its_ruling(self, decorate: Any, treatment: str, casts_to: str | None) -> None:
        @decorate
        def function(x: Tensor) -> Tensor:
            return x

        (own,) = amp.explain(function).spellings[0].rulings
        assert (own.treatment, own.source, own.casts_to) == (treatment, "decorated", casts_to)

    def test_explain_runs_nothing_and_changes_nothing(self, neighbour: types.ModuleType) -> None:
        def fails(x: Tensor) -> Tensor:
            raise AssertionError("it was called")

        neighbour.fails = fails
        amp.register_half_function(neighbour, "fails")
        model = amp.initialize(nn.Linear(2, 2), opt_level="O1", half_dtype="bfloat16", verbosity=0)
        written = torch.ones(2, 2)
        before, patches = amp.cast_counts(), runtime.live.ledger.patches
        amp.explain(neighbour.fails, torch.ones(2, 2))
        amp.explain(torch.Tensor.addmm_, written, torch.ones(2, 2), torch.ones(2, 2))
        amp.explain(F.linear, torch.ones(2, 2), model.weight)
        amp.explain(F.softmax)
        assert (amp.cast_counts(), runtime.live.ledger.patches) == (before, patches)
        assert len(runtime.live.cache) == 0
        assert torch.equal(written, torch.ones(2, 2))


class TestInnerCalls:
    def test_listed_functions_inside_torchs_functions_are_told(self) -> None:
        inside = {each.path for each in amp.explain(F.multi_head_attention_forward).calls}
        assert {"torch.nn.functional.linear", "torch.nn.functional.softmax", "torch.bmm"} <= inside

    def test_listed_functions_inside_users_functions_are_told(self, neighbour: types.ModuleType) -> None:
        calls = amp.explain(neighbour.loss).calls
        assert {each.caller for each in calls} == {"neighbour.loss"}
        assert {each.path: each.rulings[0].treatment for each in calls} == {
            "torch.Tensor.exp": "blacklist",
            "torch.nn.functional.cross_entropy": "blacklist",
            "torch.nn.functional.linear": "whitelist",
        }

    def test_operators_inside_users_functions_are_told(self, neighbour: types.ModuleType) -> None:
        explained = amp.explain(neighbour.product)
        assert [(each.path, each.operator, each.rulings[0].treatment) for each in explained.calls] == [
            ("torch.Tensor.__matmul__", "@", "whitelist")
        ]
        assert explained.to_dict()["calls"][0]["operator"] == "@"
        assert "torch.Tensor.__matmul__ (@)  whitelist" in str(explained)
        assert "The code does not show types" in str(explained)

    def test_the_method_of_the_right_operand_is_told_if_its_rule_differs(self, neighbour: types.ModuleType) -> None:
        with amp.init(cast_lists={"blacklist": {"torch.Tensor": ["__matmul__"]}}):
            calls = amp.explain(neighbour.product).calls
        assert [(each.path, each.rulings[0].treatment) for each in calls] == [
            ("torch.Tensor.__matmul__", "blacklist"),
            ("torch.Tensor.__rmatmul__", "whitelist"),
        ]

    def test_calls_of_torchs_functions_are_known_for_certain(self, neighbour: types.ModuleType) -> None:
        assert "does not show types" not in str(amp.explain(F.softmax))
        assert "does not show types" not in str(amp.explain(neighbour.default_log))


class TestPlaces:
    def noted(self, name: str | Callable[..., Any]) -> dict[str, tuple[bool, str]]:
        found = amp.explain(name).places
        return {
            place.where.partition(" (")[0]: (place.casts, place.note)
            for place in found
            if "neighbour" in place.where or "default" in place.where or "Keeping" in place.where
        }

    def test_places_are_predicted_with_amp_off(self, neighbour: types.ModuleType) -> None:
        noted = self.noted(F.softmax)
        assert noted["neighbour.soft"] == (True, "would be patched")
        assert not noted["neighbour.table"][0]
        assert not noted["neighbour.part"][0]
        assert noted["neighbour.Holder.act"] == (False, "would stay uncast")
        assert noted["act of default"] == (False, "would stay uncast")

    def test_places_are_patched_or_keep_the_function_with_amp_on(self, neighbour: types.ModuleType) -> None:
        class Keeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.act = F.softmax

        model, other = Keeping(), nn.Sequential(Keeping())
        amp.initialize(model, opt_level="O1", verbosity=0)
        noted = self.noted("softmax")
        assert noted["neighbour.soft"] == (True, "patched")
        assert [noted[name][0] for name in ("neighbour.table", "neighbour.Holder.act", "act of default")] == [False] * 3
        assert "cannot replace it there" in noted["act of default"][1]
        casts = [place.casts for place in amp.explain(F.softmax).places if place.where.endswith("Keeping.act")]
        assert sorted(casts) == [False, True]
        # What is said is what happens.
        half = torch.ones(2, 2, dtype=torch.bfloat16)
        told = {name: casts for name, (casts, _) in self.noted(torch.log).items()}
        assert told == {"neighbour.log": True, "neighbour.Holder.log": False, "log of default_log": False}
        assert neighbour.log(half).dtype is torch.float32
        assert neighbour.Holder.log(half).dtype is neighbour.default_log(half).dtype is torch.bfloat16
        assert other is not None

    def test_a_name_bound_since_is_told(self, neighbour: types.ModuleType) -> None:
        amp.init()
        neighbour.soft = vars(F.softmax)["__wrapped__"]
        assert self.noted(F.softmax)["neighbour.soft"][1].startswith("keeps the uncast function: bound since")

    def test_an_unlisted_function_has_no_places(self, neighbour: types.ModuleType) -> None:
        neighbour.other = torch.relu
        assert amp.explain(torch.relu).places == ()


class TestOutput:
    CASES = (F.softmax, "exp", F.interpolate, F.multi_head_attention_forward, torch.relu, F.binary_cross_entropy, "@")

    @pytest.mark.parametrize("given", CASES, ids=lambda given: given if isinstance(given, str) else given.__name__)
    def test_lines_are_short_and_the_data_plain(self, given: Any) -> None:
        found = amp.explain(given, *([torch.ones(2, 2)] if given is F.softmax else []))
        assert max(map(len, str(found).splitlines())) < 100
        assert repr(found) == str(found)
        data = found.to_dict()
        assert json.loads(json.dumps(data)) == data

    def test_an_explanation_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            amp.explain("relu").asked = "other"  # type: ignore[misc]

    def test_the_text_has_types_sources_reasons_and_places(self, overlay: Path, neighbour: types.ModuleType) -> None:
        amp.init(half_dtype=torch.float16, cast_lists=overlay)
        text = str(amp.explain(F.softmax, torch.ones(2, 2)))
        words = " ".join(text.split())
        for part in ("float32 -> float16", f"{overlay}:2", "small here", "instead of blacklist", "neighbour.soft"):
            assert part in words


def calls_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """The modules whose Python functions run in a call, in order."""
    names: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return names


def test_explain_adds_nothing_to_a_patched_call(select_calls: Callable[[str], None]) -> None:
    select_calls("python")  # calls in C++ have no frames to note
    x = torch.ones(2, 2)
    with casts_on():
        F.linear(x, x)
        before = calls_of(F.linear, x, x)
        amp.explain(F.linear, x, x)
        after = calls_of(F.linear, x, x)
    assert before == after
    assert before
    assert not [name for name in before if "diagnostics" in name or "predictions" in name]


class TestCommand:
    def test_the_command_prints_the_same_text(self) -> None:
        status, out, _ = ampatch("explain", "exp")
        assert (status, out) == (0, f"{amp.explain('exp')}\n")

    def test_half_dtype_and_cast_lists_are_options(self, overlay: Path) -> None:
        asked = ["explain", "softmax", "--half-dtype", "float16", "--cast-lists", overlay]
        assert "would do in float16." in " ".join(ampatch(*asked).out.split())
        (own, *_) = json.loads(ampatch(*asked, "--json").out)["spellings"][0]["rulings"]
        assert (own["treatment"], own["half_dtypes"], own["reason"]) == ("whitelist", ["float16"], "small here")

    def test_modules_can_be_imported_first(
        self, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package("explained", functions="import torch\nproduct = torch.mm\n")
        monkeypatch.chdir(tmp_path)
        sys.path.remove(str(tmp_path))  # the command itself searches the current folder
        status, out, _ = ampatch("explain", "explained.functions.product", "--import", "explained.functions")
        assert status == 0
        assert "* explained.functions.product  whitelist" in out

    def test_an_unknown_name_is_status_1_and_a_line(self) -> None:
        status, out, err = ampatch("explain", "sofmax")
        assert (status, out) == (1, "")
        assert err.startswith("ampatch: error: there is no function named 'sofmax'")
        assert "Did you mean 'softmax'" in err


class Block(nn.Module):
    """Calls by way of methods, a function in an attribute, and submodules named as tensors' methods."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.exp, self.act = nn.LayerNorm(4), nn.Identity(), F.log_softmax

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.exp(self.norm(x)), -1) + self.product(x)

    @property
    def weight(self) -> Tensor:
        raise AssertionError("explain runs no code of the user's")

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight


class HeirOfBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class TestModules:
    """What the forwards of modules call."""

    @pytest.mark.parametrize(
        ("given", "inside"),
        [
            ("nn.LSTM", {"torch.lstm"}),
            ("torch.nn.LSTM", {"torch.lstm"}),
            ("LSTM", {"torch.lstm"}),
            (nn.LSTM, {"torch.lstm"}),
            (nn.Conv2d, {"torch.conv2d"}),  # by way of a method
            (nn.CrossEntropyLoss, {"torch.nn.functional.cross_entropy"}),
            (nn.Linear(2, 2), {"torch.nn.functional.linear"}),
            (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {"torch.nn.functional.linear"}),
            (nn.ReLU(), set()),
        ],
        ids=str,
    )
    def test_functions_that_a_forward_calls_have_their_rulings(self, given: Any, inside: set[str]) -> None:
        found = amp.explain(given)
        assert {each.path for each in found.calls} == inside
        assert all(each.rulings[0].treatment != "unlisted" for each in found.calls)
        assert any("names no listed function" in note for note in found.notes) == (not inside)

    BLOCK: ClassVar = {"torch.Tensor.__matmul__"}
    KNOWN_OF_OBJECTS: ClassVar = {"torch.nn.functional.log_softmax", "torch.nn.functional.layer_norm"}

    @pytest.mark.parametrize("kind", [Block, HeirOfBlock])
    def test_names_looked_up_on_a_module_are_no_methods_of_tensors(self, kind: type[nn.Module]) -> None:
        own = self.BLOCK | ({"torch.Tensor.softmax"} if kind is HeirOfBlock else set())
        assert {each.path for each in amp.explain(kind()).calls} == own | self.KNOWN_OF_OBJECTS
        of_class = amp.explain(kind)
        assert {each.path for each in of_class.calls} == own
        assert "A class does not show its submodules" in of_class.state[-1]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_an_adopted_model_is_explained_by_its_own_forwards(self, level: str) -> None:
        before = amp.explain(nn.Sequential(nn.LSTM(2, 2))).spellings
        model = amp.initialize(nn.Sequential(nn.LSTM(2, 2)), opt_level=level, half_dtype="bfloat16", verbosity=0)
        found = amp.explain(model)
        assert [each.path for each in found.spellings] == [each.path for each in before]
        assert [each.path for each in found.calls] == ["torch.lstm"]

    @pytest.mark.slow
    def test_a_compiled_model_is_explained_as_the_model(self) -> None:
        assert amp.explain(torch.compile(nn.Linear(2, 2))).calls == amp.explain(nn.Linear(2, 2)).calls

    def test_arguments_for_a_module_are_an_error(self) -> None:
        with pytest.raises(amp.OptionError, match="found arguments for Linear, a module; expected none"):
            amp.explain(nn.Linear(2, 2), torch.ones(1, 2))

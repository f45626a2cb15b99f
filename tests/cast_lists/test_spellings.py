"""Every spelling of a function: the namespace "*" of cast lists, and what is told of edits that reach one only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch
import torch.nn.functional as F
from helpers import casts_on
from torch import Tensor, nn

from ampatch import amp
from ampatch.cast_lists import list_edits
from ampatch.cast_lists.lists import shipped
from ampatch.cast_lists.paths import Path, find
from ampatch.cast_lists.rules import Treatment
from ampatch.cast_lists.spellings import (
    NAMESPACES,
    called_by,
    known_names,
    method_of_operator,
    operators_in,
    plain_name,
    spellings,
)
from ampatch.errors import AmpWarning, BannedFunctionError, CastListError
from ampatch.opt_levels import HALF_DTYPES

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

HALF, FLOAT32 = torch.bfloat16, torch.float32
LISTED = sorted({path for path, _ in shipped().rules}, key=str)
NAMES = sorted({path.name for path in LISTED if path.namespace in NAMESPACES and not path.name.endswith("_")})

SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: torch.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "functional": lambda x: F.softmax(x, -1),
    "special": lambda x: torch.special.softmax(x, -1),
    "module": nn.Softmax(-1),
}
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: torch.matmul(x, x),
    "method": lambda x: x.matmul(x),
    "operator": lambda x: x @ x,
    "linalg": lambda x: torch.linalg.matmul(x, x),
}


def undone(overlay: Mapping[str, object]) -> dict[str, str]:
    return {str(path): told for path, told in list_edits.undone(shipped().overlaid(overlay)).items()}


class TestEverySpelling:
    @pytest.mark.parametrize("spelling", SOFTMAXES)
    @pytest.mark.parametrize(("listed", "dtype"), [("whitelist", HALF), ("blacklist", FLOAT32), ("unlisted", None)])
    def test_of_a_function_is_treated_alike(self, listed: str, dtype: torch.dtype | None, spelling: str) -> None:
        with casts_on(half_dtype=HALF, cast_lists={listed: {"*": ["softmax"]}}):
            for given in (HALF, FLOAT32):
                assert SOFTMAXES[spelling](torch.ones(2, 2, dtype=given)).dtype is (dtype or given)

    @pytest.mark.parametrize("spelling", PRODUCTS)
    def test_has_the_operator_among_them(self, spelling: str) -> None:
        with casts_on(half_dtype=HALF, cast_lists={"blacklist": {"*": ["matmul"]}}):
            assert PRODUCTS[spelling](torch.ones(2, 2, dtype=HALF)).dtype is FLOAT32

    @pytest.mark.parametrize(
        "write",
        [
            pytest.param(lambda x: x.relu_(), id="method"),
            pytest.param(lambda x: torch.relu_(x), id="torch"),  # noqa: PLW0108 - it is patched later
            pytest.param(lambda x: F.relu(x, inplace=True), id="argument"),
            pytest.param(nn.ReLU(inplace=True), id="module"),
        ],
    )
    def test_has_the_in_place_forms_among_them(self, write: Callable[[Tensor], Tensor]) -> None:
        written = -torch.ones(2, dtype=HALF)

        with casts_on(half_dtype=HALF, cast_lists={"blacklist": {"*": ["relu"]}}):
            with pytest.raises(BannedFunctionError, match=r"relu_? would write to a tensor of torch\.bfloat16"):
                write(written)
            assert write(written.float()).eq(0).all()

        assert written.eq(-1).all()

    def test_of_an_in_place_form_leaves_the_others(self) -> None:
        assert {path.name for path in spellings("exp_")} == {"exp_"}

    def test_undoes_none_of_the_others(self) -> None:
        """Of every function that any list has."""
        lists = shipped().overlaid({"unlisted": {"*": NAMES}})

        assert not [told for path, told in list_edits.undone(lists).items() if f".{path.name} (" in told]
        assert not list_edits.left_out(lists)

    def test_leaves_none_out_of_any_name(self) -> None:
        """Names between underscores come along as the operators of others."""
        names = sorted(name for name in known_names() if not name.startswith("__"))

        assert not list_edits.left_out(shipped().overlaid({"blacklist": {"*": names}}))

    def test_has_no_methods_of_modules_among_them(self) -> None:
        assert spellings("__gt__") == [Path("torch.Tensor", "__gt__")]

    @pytest.mark.parametrize("listed", ["whitelist", "unlisted"])
    def test_may_be_shared_by_two_names_that_are_treated_alike(self, listed: str) -> None:
        """As an operator or an in-place form is."""
        shared = [["mul", "multiply"], ["div", "divide", "true_divide"], ["abs", "absolute"], ["exp", "exp_"]]
        lists = shipped().overlaid({listed: {"*": [name for names in shared for name in names]}})

        alone = shipped().overlaid([{listed: {"*": [name]}} for names in shared for name in names])
        assert lists == alone

    def test_that_is_shared_may_be_named_for_one_half_type_each(self) -> None:
        names = [{"name": "mul", "dtypes": ["float16"]}, "multiply"]

        lists = shipped().overlaid({"promote": {"*": names}})

        assert {Path("torch.Tensor", "__mul__"), Path("torch", "multiply")} <= set(lists.for_half(HALF))
        assert Path("torch", "mul") not in lists.for_half(HALF)

    def test_takes_options(self) -> None:
        lists = shipped().overlaid({"blacklist": {"*": [{"name": "cumsum", "dtypes": ["float16"], "via_dtype": True}]}})

        rules = lists.for_half(torch.float16)
        assert rules[Path("torch", "cumsum")].via_dtype
        assert lists.for_half(HALF)[Path("torch", "cumsum")].source.startswith("blacklist.yaml")

    def test_computes_in_float32_by_a_cast_where_it_takes_no_dtype(self) -> None:
        lists = shipped().overlaid({"blacklist": {"*": [{"name": "sigmoid", "via_dtype": True}]}})

        assert not lists.for_half(HALF)[Path("torch", "sigmoid")].via_dtype

    def test_may_be_missing_if_that_is_said(self) -> None:
        assert shipped().overlaid({"blacklist": {"*": [{"name": "no_such", "optional": True}]}}) == shipped()

    def test_can_be_laid_under_another_file(self) -> None:
        lists = shipped().overlaid([{"whitelist": {"*": ["softmax"]}}, {"blacklist": {"torch": ["softmax"]}}])

        rules = lists.for_half(HALF)
        assert rules[Path("torch", "softmax")].treatment is Treatment.BLACKLIST
        assert rules[Path("torch.Tensor", "softmax")].treatment is Treatment.WHITELIST

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            pytest.param(
                'whitelist: {"*": [sofmax]}',
                "1: no function is named 'sofmax' in any of torch, torch.nn.functional, torch.Tensor, torch.linalg, "
                "torch.special, torch.fft, torch.sparse; `'*'` means these. Did you mean 'softmax' or",
                id="misspelt",
            ),
            pytest.param(
                'whitelist: {"*": ["l?_loss"]}',
                "1: found the pattern 'l?_loss'; expected a function's name under '*'. Patterns stand under a "
                'namespace: type `{torch.nn.functional: ["l?_loss"]}`.',
                id="a pattern",
            ),
            pytest.param(
                'whitelist: {"*": [{name: "*_*", optional: true}]}',
                'type `{torch: ["*_*"], torch.nn.functional: ["*_*"], torch.Tensor: ["*_*"], torch.linalg: ["*_*"], '
                'torch.special: ["*_*"], torch.sparse: ["*_*"]}`.',
                id="a pattern that fits many",
            ),
            pytest.param(
                'whitelist: {"*": ["sotfmax*"]}',
                "expected a function's name under '*'. Did you mean 'softmax'",
                id="a misspelt pattern",
            ),
            pytest.param('whitelist: {"*": [functional.softmax]}', "no function is named 'functional.sof", id="dotted"),
            pytest.param(
                'whitelist: {"*.functional": [softmax]}',
                "1: found '*.functional'; expected a pattern that begins with a package's name, such as 'torch.nn.*'.",
                id="with a namespace",
            ),
            pytest.param('whitelist: {"*": [layout]}', "1: no function is named 'layout' in any", id="a class"),
            pytest.param("whitelist: {*: [softmax]}", "but found ':'. Put \"*\" in quotes.", id="no quotes"),
            pytest.param(
                'whitelist: {"*": [softmax]}\nblacklist: {"*": [softmax]}',
                '2: `blacklist: {"*": [softmax]}` here and `whitelist: {"*": [softmax]}` in line 1 both stand for '
                'torch.softmax; keep one of them, or type namespaces in the place of "*".',
                id="two lists",
            ),
            pytest.param(
                'whitelist:\n  "*": [softmax]\n  torch: [softmax]',
                '3: `whitelist: {torch: [softmax]}` here and `whitelist: {"*": [softmax]}` in line 2 both stand for',
                id="twice",
            ),
            pytest.param(
                'whitelist: {"*": [mul]}\nblacklist: {"*": [multiply]}',
                '2: `blacklist: {"*": [multiply]}` here and `whitelist: {"*": [mul]}` in line 1 both stand for '
                'torch.Tensor.__mul__; keep one of them, or type namespaces in the place of "*".',
                id="two lists for what two names share",
            ),
            pytest.param(
                'banned:\n  "*": [mul, {name: multiply, instead: "use add"}]',
                '2: `banned: {"*": [multiply]}` here and `banned: {"*": [mul]}` in line 2, which has other options, '
                "both stand for torch.Tensor.__mul__; keep one",
                id="other options for what two names share",
            ),
            pytest.param(
                'whitelist:\n  "*": [mul]\n  torch.Tensor: [__mul__]',
                '3: `whitelist: {torch.Tensor: [__mul__]}` here and `whitelist: {"*": [mul]}` in line 2 both stand for',
                id="twice by another name",
            ),
            pytest.param(
                'whitelist: {torch.Tensor: [abs]}\nblacklist: {"*": [absolute]}',
                '2: `blacklist: {"*": [absolute]}` here and `whitelist: {torch.Tensor: [abs]}` in line 1 both stand '
                "for torch.Tensor.__abs__, which is the same function as torch.Tensor.abs; keep one",
                id="two lists for one function by other names",
            ),
            pytest.param(
                'whitelist: {"*": [mul, multiply, mul]}',
                '1: `whitelist: {"*": [mul]}` here and `whitelist: {"*": [mul]}` in line 1 both stand for torch.mul;',
                id="a name twice",
            ),
            pytest.param(
                'blacklist: {"*": [{name: softmax, when: {dmi: [0]}}]}',
                "`when` names the argument 'dmi', which cannot be read from a call of torch.softmax; expected",
                id="a condition",
            ),
        ],
    )
    def test_that_is_mistaken_is_one_fault(self, content: str, expected: str, tmp_path: FilePath) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(content)

        with pytest.raises(CastListError) as found:
            shipped().overlaid(file)

        (fault,) = found.value.faults
        assert expected in str(fault)


class TestPlainNames:
    @pytest.mark.parametrize("name", ["exp", "matmul", "mul", "div", "sub", "add", "pow", "remainder", "floor_divide"])
    def test_every_spelling_leads_back_to_the_name(self, name: str) -> None:
        assert {plain_name(path.name) for path in spellings(name)} == {name}

    @pytest.mark.parametrize("name", ["softmax", "__getitem__", "__invert__", "requires_grad_", "nonsense_", "_", ""])
    def test_a_name_without_another_stays(self, name: str) -> None:
        assert plain_name(name) == name

    def test_operators_have_the_method_that_python_calls(self) -> None:
        called: list[str] = []

        def method(name: str) -> Callable[..., object]:
            def note(self: object, *_: object) -> object:
                called.append(name)
                return self

            return note

        signs = ["@", "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">="]
        paths = {sign: method_of_operator(sign) for sign in [*signs, "@=", "+=", "**=", "//="]}
        names = {path.name for path in paths.values() if path is not None}
        value = type("Value", (), {name: method(name) for name in names})()
        for sign, path in paths.items():
            called.clear()
            exec(f"value {sign} value", {"value": value})
            assert path is not None
            assert called == [path.name], sign

    @pytest.mark.parametrize("text", ["", "=", "mul", "===", "@@", "&"])
    def test_other_text_is_no_operator(self, text: str) -> None:
        assert method_of_operator(text) is None


class TestAnUndoneEdit:
    def test_of_the_shipped_lists_there_is_none(self) -> None:
        assert list_edits.undone(shipped()) == {}

    @pytest.mark.parametrize("listed", ["whitelist", "unlisted"])
    def test_is_warned_of(self, listed: str) -> None:
        lists = {listed: {"torch.nn.functional": ["softmax"]}}
        place = {"whitelist": "in the whitelist", "unlisted": "on no list"}[listed]

        with pytest.warns(AmpWarning) as caught, casts_on(half_dtype=HALF, cast_lists=lists):
            # What is said is so.
            assert F.softmax(torch.ones(2, 2, dtype=HALF), -1).dtype is FLOAT32

        (warning,) = caught
        source = "cast_lists: " if listed == "whitelist" else ""
        assert str(warning.message) == (
            f"{source}torch.nn.functional.softmax is {place} now, but it calls functions that undo this: "
            f'torch.Tensor.softmax (in the blacklist). Type `{listed}: {{"*": [softmax]}}` for every spelling.'
        )

    def test_is_warned_of_where_a_function_was_registered(self) -> None:
        amp.register_half_function(F, "softmax")

        with pytest.warns(AmpWarning, match=r"^registered: torch.nn.functional.softmax is in the whitelist now"):
            amp.init(half_dtype=HALF)

    def test_is_none_where_what_it_calls_was_registered_too(self) -> None:
        amp.register_half_function(F, "softmax")
        amp.register_half_function(Tensor, "softmax")

        with casts_on(half_dtype=HALF):
            assert F.softmax(torch.ones(2, 2, dtype=HALF), -1).dtype is HALF

    def test_is_one_where_what_it_calls_was_registered_otherwise(self) -> None:
        amp.register_float_function(Tensor, "softmax")

        with pytest.warns(AmpWarning, match=r"functional.softmax is in the whitelist now, but it calls functions that"):
            amp.init(half_dtype=HALF, cast_lists={"whitelist": {"*": ["softmax"]}})

    @pytest.mark.parametrize("half_dtype", list(HALF_DTYPES.values()), ids=str)
    def test_needs_an_edit_before_any_function_is_looked_up(
        self, half_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It takes milliseconds of every `initialize`."""
        read_again = replace(shipped())
        monkeypatch.setattr(list_edits, "identity", None)

        for lists in (shipped(), read_again):
            assert list_edits.undone(lists, [half_dtype]) == {}

    def test_is_told_of_in_full_and_the_others_by_name(self) -> None:
        amp.register_half_function(F, "softmax")
        names = ["gumbel_softmax", "log_softmax", "normalize", "softmin"]

        with pytest.warns(AmpWarning) as caught:
            amp.init(half_dtype=HALF, cast_lists={"whitelist": {"torch.nn.functional": names}})

        (warning,) = caught
        assert str(warning.message).endswith(
            " Also undone in this way: torch.nn.functional.log_softmax, torch.nn.functional.normalize, "
            "torch.nn.functional.softmin, and 1 more."
        )

    def test_alone_it_is_told_of_in_full(self) -> None:
        lists = shipped().overlaid({"whitelist": {"torch.nn.functional": ["softmax"]}})

        assert [list_edits.undone_edits_in_brief(lists, HALF, [])] == list(list_edits.undone(lists, [HALF]).values())

    @pytest.mark.parametrize(
        ("overlay", "calls"),
        [
            pytest.param({"whitelist": {"torch": ["norm"]}}, "torch.linalg.vector_norm", id="another name"),
            pytest.param({"whitelist": {"torch.Tensor": ["norm"]}}, "torch.norm", id="a method"),
            pytest.param(
                {"blacklist": {"torch.nn.functional": ["multi_head_attention_forward"]}},
                "torch.nn.functional.linear",
                id="through a function that is not listed",
            ),
            pytest.param({"whitelist": {"torch.nn.functional": ["lp_pool1d"]}}, "torch.Tensor.pow", id="float16 only"),
            pytest.param(
                {"promote": {"torch.nn.functional": ["normalize"]}}, "torch.Tensor.norm", id="what is promoted first"
            ),
            pytest.param(
                {"unlisted": {"torch.nn.functional": ["gumbel_softmax"]}}, "torch.Tensor.scatter_", id="promoted inside"
            ),
        ],
    )
    def test_names_what_is_called(self, overlay: Mapping[str, object], calls: str) -> None:
        ((_, told),) = undone(overlay).items()

        assert f"{calls} (" in told
        assert "for all their callers, or call " in told or '{"*": [norm]}' in told

    @pytest.mark.parametrize(
        "overlay",
        [
            pytest.param({"whitelist": {"torch": ["softmax"]}}, id="of a builtin"),
            pytest.param(
                {"whitelist": {"torch.nn.functional": ["softmax"], "torch.Tensor": ["softmax"]}}, id="of both"
            ),
            pytest.param({"whitelist": {"torch.Tensor": ["softmax"]}}, id="of what is called"),
            pytest.param({"banned": {"torch.nn.functional": ["softmax"]}}, id="of one that only raises"),
            pytest.param({"promote": {"torch.Tensor": ["softmax"]}}, id="of a method"),
            pytest.param({"blacklist": {"torch.nn.functional": ["embedding_bag"]}}, id="promoted after a cast"),
            pytest.param({"blacklist": {"torch.nn.functional": ["linear_cross_entropy"]}}, id="that changes nothing"),
        ],
    )
    def test_is_no_other(self, overlay: Mapping[str, object]) -> None:
        assert undone(overlay) == {}

    def test_is_none_where_what_it_calls_has_conditions(self) -> None:
        """They may hold for no call of its, as here."""
        lists = {
            "whitelist": {"torch.nn.functional": ["softmax"]},
            "blacklist": {"torch.Tensor": [{"name": "softmax", "when": {"dim": [0]}}]},
        }

        with casts_on(half_dtype=HALF, cast_lists=lists):
            assert F.softmax(torch.ones(2, 2), -1).dtype is HALF

    def test_is_none_in_functions_of_others(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        """There ``softmax`` may be anybody's method."""
        (tmp_path / "of_others.py").write_text("def call(model, x):\n    return model.softmax(x)\n")
        monkeypatch.syspath_prepend(tmp_path)
        __import__("of_others")
        try:
            assert undone({"whitelist": {"of_others": ["call"]}}) == {}
        finally:
            del sys.modules["of_others"]

    def test_is_found_while_functions_are_patched(self) -> None:
        with casts_on(half_dtype=HALF):
            assert undone({"whitelist": {"torch.nn.functional": ["softmax"]}})


class TestWhatIsCalled:
    @pytest.mark.parametrize(
        ("function", "called"),
        [
            (F.softmax, Tensor.softmax),
            (F.max_pool2d, torch.max_pool2d),
            (F.normalize, Tensor.norm),
            (F.dropout, torch._VF.dropout),
            (Tensor.stft, torch.stft),
            (F.multi_head_attention_forward, F.linear),
        ],
    )
    def test_is_read_from_the_code(self, function: object, called: object) -> None:
        assert id(called) in called_by(function)

    def test_is_read_from_functions_inside_it_too(self) -> None:
        def function(x: Tensor) -> Tensor:
            inside = lambda: torch.norm(x)  # noqa: E731 - as torch has them
            return inside()

        assert id(torch.norm) in called_by(function)

    def test_is_read_past_attributes_that_cannot_be_computed(self) -> None:
        def function(x: Tensor) -> Tensor:
            return torch.classes.library_of_nobody.Missing(torch.exp(x))

        with pytest.raises(RuntimeError, match=r"library_of_nobody\.Missing"):
            function(torch.ones(1))
        assert id(torch.exp) in called_by(function)

    def test_of_a_builtin_is_nothing(self) -> None:
        assert called_by(torch.softmax) == {}

    def test_of_functions_of_torchs_agrees_with_the_lists(self) -> None:
        """docs/design/cast-lists.md explains the three pairs that disagree."""
        rules = shipped().for_half(torch.float16)
        by_function = {id(find(path)): path for path in rules}
        disagreeing = {
            (str(path), by_function[callee].name)
            for path in rules
            for callee in called_by(find(path))
            if callee in by_function and rules[by_function[callee]].treatment is not rules[path].treatment
        }

        prefix = "torch.nn.functional."
        assert disagreeing <= {
            (f"{prefix}multi_head_attention_forward", "softmax"),
            (f"{prefix}gumbel_softmax", "scatter_"),
            (f"{prefix}linear_cross_entropy", "linear"),
        }


class TestOperators:
    @pytest.mark.parametrize(
        ("function", "symbol", "names"),
        [
            (lambda x, y: x @ y, "@", ["__matmul__", "__rmatmul__"]),
            (lambda x: 2 - x, "-", ["__sub__", "__rsub__"]),
            (lambda x: x**2, "**", ["__pow__", "__rpow__"]),
            (lambda x: -x, "-x", ["__neg__"]),
            (lambda x, y: x < y, "<", ["__lt__", "__gt__"]),
            (lambda x: 0 if x == 1 else 1, "==", ["__eq__", "__eq__"]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_are_read_from_the_code(self, function: object, symbol: str, names: list[str]) -> None:
        assert operators_in(function) == {symbol: [getattr(Tensor, name) for name in names]}

    def test_in_place_call_the_method_that_torch_has(self) -> None:
        def function(x: Tensor, y: Tensor) -> None:
            x += y
            x @= y

        assert operators_in(function) == {
            "+=": [Tensor.__iadd__, Tensor.__radd__],
            "@=": [Tensor.__matmul__, Tensor.__rmatmul__],
        }

    def test_are_read_from_functions_that_it_calls_too(self) -> None:
        assert "@" in operators_in(_calls_a_product)

    def test_between_texts_and_of_a_builtin_are_none(self) -> None:
        def function(x: str) -> bool:
            return x == "O1"

        assert operators_in(function) == {}
        assert operators_in(torch.softmax) == {}


def _calls_a_product(x: Tensor) -> Tensor:
    return _product(x)


def _product(x: Tensor) -> Tensor:
    return x @ x


class TestWhatIsLeftOut:
    def test_is_named(self) -> None:
        (told,) = list_edits.left_out(shipped().overlaid({"blacklist": {"torch": ["mm"]}}))

        assert told == (
            "cast_lists: torch.mm is in the blacklist now, but torch.Tensor.mm stays as it is. "
            'Type `blacklist: {"*": [mm]}` for every spelling.'
        )

    def test_is_not_what_is_there_already(self) -> None:
        assert (
            list_edits.left_out(shipped().overlaid({"blacklist": {"torch": [{"name": "exp", "dtypes": ["float16"]}]}}))
            == []
        )

    def test_is_not_what_was_decided_otherwise(self) -> None:
        lists = shipped().overlaid({"promote": {"torch": ["mm"]}, "blacklist": {"torch.Tensor": ["mm"]}})

        (told,) = list_edits.left_out(lists)  # torch.sparse.mm is on the blacklist already
        assert "torch.mm is in the promote now, but torch.sparse.mm stays as it is." in told

    def test_is_nothing_of_a_name_that_is_not_torchs(self) -> None:
        assert list_edits.left_out(shipped().overlaid({"blacklist": {"math": ["sqrt"]}})) == []

    def test_is_left_to_an_edit_that_is_undone(self) -> None:
        assert list_edits.left_out(shipped().overlaid({"whitelist": {"torch.nn.functional": ["softmax"]}})) == []

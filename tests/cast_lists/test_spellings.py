"""The namespace "*" of cast lists, and warnings about edits that reach one spelling of a function only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import Write, casts_on
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
    def test_every_spelling_of_a_function_is_treated_alike(
        self, listed: str, dtype: torch.dtype | None, spelling: str
    ) -> None:
        with casts_on(half_dtype=HALF, cast_lists={listed: {"*": ["softmax"]}}):
            for given in (HALF, FLOAT32):
                assert SOFTMAXES[spelling](torch.ones(2, 2, dtype=given)).dtype is (dtype or given)

    @pytest.mark.parametrize("name", ["softmax", "log_softmax"])
    @pytest.mark.parametrize("dtype", [HALF, FLOAT32])
    def test_one_of_sparse_tensors_computes_in_float32(self, name: str, dtype: torch.dtype) -> None:
        rows = torch.eye(3, requires_grad=True)
        expected = getattr(torch.sparse, name)(rows.to_sparse(), 1).to_dense()

        with casts_on(half_dtype=HALF, cast_lists={"whitelist": {"*": [name]}}):
            found = getattr(torch.sparse, name)(rows.to(dtype).to_sparse(), 1)
            assert found.dtype is FLOAT32
            torch.testing.assert_close(found.to_dense(), expected)

    @pytest.mark.parametrize("spelling", PRODUCTS)
    def test_the_operator_is_a_spelling(self, spelling: str) -> None:
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
    def test_in_place_forms_are_spellings(self, write: Callable[[Tensor], Tensor]) -> None:
        written = -torch.ones(2, dtype=HALF)

        with casts_on(half_dtype=HALF, cast_lists={"blacklist": {"*": ["relu"]}}):
            with pytest.raises(BannedFunctionError, match=r"relu_? would write to a tensor of torch\.bfloat16"):
                write(written)
            assert write(written.float()).eq(0).all()

        assert written.eq(-1).all()

    def test_an_edit_of_every_spelling_undoes_none_of_them(self) -> None:
        lists = shipped().overlaid({"unlisted": {"*": NAMES}})

        assert not [told for path, told in list_edits.undone(lists).items() if f".{path.name} (" in told]
        assert not list_edits.left_out(lists)

    def test_an_edit_of_every_spelling_leaves_none_out(self) -> None:
        # Names between underscores are operators of other names.
        names = sorted(name for name in known_names() if not name.startswith("__"))

        assert not list_edits.left_out(shipped().overlaid({"blacklist": {"*": names}}))

    def test_methods_of_modules_and_other_forms_are_no_spellings(self) -> None:
        assert spellings("__gt__") == [Path("torch.Tensor", "__gt__")]
        assert {path.name for path in spellings("exp_")} == {"exp_"}

    @pytest.mark.parametrize("listed", ["whitelist", "unlisted"])
    def test_names_that_share_a_spelling_may_stand_in_one_list(self, listed: str) -> None:
        shared = [["mul", "multiply"], ["div", "divide", "true_divide"], ["abs", "absolute"], ["exp", "exp_"]]
        lists = shipped().overlaid({listed: {"*": [name for names in shared for name in names]}})

        alone = shipped().overlaid([{listed: {"*": [name]}} for names in shared for name in names])
        assert lists == alone

    def test_names_that_share_a_spelling_may_have_half_types(self) -> None:
        names = [{"name": "mul", "dtypes": ["float16"]}, "multiply"]

        lists = shipped().overlaid({"promote": {"*": names}})

        assert {Path("torch.Tensor", "__mul__"), Path("torch", "multiply")} <= set(lists.for_half(HALF))
        assert Path("torch", "mul") not in lists.for_half(HALF)

    def test_options_apply_to_the_spellings_that_can_take_them(self) -> None:
        entries = [{"name": "cumsum", "dtypes": ["float16"], "via_dtype": True}, {"name": "sigmoid", "via_dtype": True}]
        lists = shipped().overlaid({"blacklist": {"*": entries}})

        assert lists.for_half(torch.float16)[Path("torch", "cumsum")].via_dtype
        assert lists.for_half(HALF)[Path("torch", "cumsum")].source.startswith("blacklist.yaml")
        assert not lists.for_half(HALF)[Path("torch", "sigmoid")].via_dtype

    def test_an_optional_name_may_have_no_spelling(self) -> None:
        assert shipped().overlaid({"blacklist": {"*": [{"name": "no_such", "optional": True}]}}) == shipped()

    def test_a_later_overlay_of_one_spelling_wins(self) -> None:
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
    def test_a_mistake_under_the_asterisk_is_one_fault(self, content: str, expected: str, write: Write) -> None:
        file = write(content)

        with pytest.raises(CastListError) as found:
            shipped().overlaid(file)

        (fault,) = found.value.faults
        assert expected in str(fault)


class TestPlainNames:
    @pytest.mark.parametrize("name", ["exp", "matmul", "mul", "div", "sub", "add", "pow", "remainder", "floor_divide"])
    def test_every_spelling_has_the_plain_name(self, name: str) -> None:
        assert {plain_name(path.name) for path in spellings(name)} == {name}

    @pytest.mark.parametrize("name", ["softmax", "__getitem__", "__invert__", "requires_grad_", "nonsense_", "_", ""])
    def test_other_names_are_plain_names(self, name: str) -> None:
        assert plain_name(name) == name

    def test_operators_have_the_method_that_python_calls(self) -> None:
        called: list[str] = []
        signs = ["@", "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "@=", "+=", "**=", "//="]
        names = [method_of_operator(sign).name for sign in signs]
        methods = {name: lambda self, _, name=name: called.append(name) or self for name in names}
        value = type("Value", (), methods)()
        for sign in signs:
            exec(f"value {sign} value", {"value": value})
        assert called == names

    @pytest.mark.parametrize("text", ["", "=", "mul", "===", "@@", "&"])
    def test_other_text_is_no_operator(self, text: str) -> None:
        assert method_of_operator(text) is None


class TestUndoneEdits:
    def test_shipped_lists_have_no_undone_edit(self) -> None:
        assert list_edits.undone(shipped()) == {}

    @pytest.mark.parametrize("listed", ["whitelist", "unlisted"])
    def test_an_undone_edit_is_warned_of(self, listed: str) -> None:
        lists = {listed: {"torch.nn.functional": ["softmax"]}}
        place = {"whitelist": "in the whitelist", "unlisted": "on no list"}[listed]

        with pytest.warns(AmpWarning) as caught, casts_on(half_dtype=HALF, cast_lists=lists):
            assert F.softmax(torch.ones(2, 2, dtype=HALF), -1).dtype is FLOAT32

        (warning,) = caught
        source = "cast_lists: " if listed == "whitelist" else ""
        assert str(warning.message) == (
            f"{source}torch.nn.functional.softmax is {place} now, but it calls functions that undo this: "
            f'torch.Tensor.softmax (in the blacklist). Type `{listed}: {{"*": [softmax]}}` for every spelling.'
        )

    def test_an_undone_registration_is_warned_of(self) -> None:
        amp.register_half_function(F, "softmax")
        with pytest.warns(AmpWarning, match=r"^registered: torch.nn.functional.softmax is in the whitelist now"):
            amp.init(half_dtype=HALF)

        amp.deinitialize()
        amp.register_half_function(Tensor, "softmax")
        with casts_on(half_dtype=HALF):
            assert F.softmax(torch.ones(2, 2, dtype=HALF), -1).dtype is HALF

    def test_an_edit_undone_by_a_registration_is_warned_of(self) -> None:
        amp.register_float_function(Tensor, "softmax")

        with pytest.warns(AmpWarning, match=r"functional.softmax is in the whitelist now, but it calls functions that"):
            amp.init(half_dtype=HALF, cast_lists={"whitelist": {"*": ["softmax"]}})

    @pytest.mark.parametrize("half_dtype", list(HALF_DTYPES.values()), ids=str)
    def test_shipped_lists_are_not_searched_for_undone_edits(
        self, half_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It takes milliseconds of every `initialize`."""
        read_again = replace(shipped())
        monkeypatch.setattr(list_edits, "identity", None)

        for lists in (shipped(), read_again):
            assert list_edits.undone(lists, [half_dtype]) == {}

    def test_a_warning_names_further_undone_edits_in_brief(self) -> None:
        amp.register_half_function(F, "softmax")
        names = ["gumbel_softmax", "log_softmax", "normalize", "softmin"]

        with pytest.warns(AmpWarning) as caught:
            amp.init(half_dtype=HALF, cast_lists={"whitelist": {"torch.nn.functional": names}})

        (warning,) = caught
        assert str(warning.message).endswith(
            " Also undone in this way: torch.nn.functional.log_softmax, torch.nn.functional.normalize, "
            "torch.nn.functional.softmin, and 1 more."
        )

    def test_a_single_undone_edit_is_told_in_full(self) -> None:
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
    def test_an_undone_edit_names_the_function_that_is_called(self, overlay: Mapping[str, object], calls: str) -> None:
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
    def test_other_edits_are_not_undone(self, overlay: Mapping[str, object]) -> None:
        assert undone(overlay) == {}

    def test_an_edit_is_not_undone_by_a_rule_with_a_condition(self) -> None:
        lists = {
            "whitelist": {"torch.nn.functional": ["softmax"]},
            "blacklist": {"torch.Tensor": [{"name": "softmax", "when": {"dim": [0]}}]},
        }
        with casts_on(half_dtype=HALF, cast_lists=lists):
            assert F.softmax(torch.ones(2, 2), -1).dtype is HALF

    def test_edits_of_functions_outside_of_torch_are_not_undone(self, package: Callable[..., None]) -> None:
        package("of_others", __init__="def call(model, x):\n    return model.softmax(x)\n")  # of any class
        __import__("of_others")
        assert undone({"whitelist": {"of_others": ["call"]}}) == {}


class TestCalledFunctions:
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
    def test_called_functions_are_read_from_the_code(self, function: object, called: object) -> None:
        assert id(called) in called_by(function)

    def test_called_functions_are_read_from_inner_functions(self) -> None:
        def function(x: Tensor) -> Tensor:
            inside = lambda: torch.norm(x)  # noqa: E731 - as torch has them
            return inside()

        assert id(torch.norm) in called_by(function)
        assert called_by(torch.softmax) == {}

    def test_attributes_that_raise_are_skipped(self) -> None:
        def function(x: Tensor) -> Tensor:
            return torch.classes.library_of_nobody.Missing(torch.exp(x))

        with pytest.raises(RuntimeError, match=r"library_of_nobody\.Missing"):
            function(torch.ones(1))
        assert id(torch.exp) in called_by(function)

    def test_listed_functions_of_torch_call_functions_of_their_list(self) -> None:
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


def _calls_a_product(x: Tensor) -> Tensor:
    return _product(x)


def _product(x: Tensor) -> Tensor:
    return x @ x


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
            (_calls_a_product, "@", ["__matmul__", "__rmatmul__"]),
        ],
    )
    def test_operators_are_read_from_the_code(self, function: object, symbol: str, names: list[str]) -> None:
        assert operators_in(function) == {symbol: [getattr(Tensor, name) for name in names]}

    def test_operators_in_place_have_the_methods_of_torch(self) -> None:
        def function(x: Tensor, y: Tensor) -> None:
            x += y
            x @= y

        assert operators_in(function) == {
            "+=": [Tensor.__iadd__, Tensor.__radd__],
            "@=": [Tensor.__matmul__, Tensor.__rmatmul__],
        }

    def test_builtins_and_comparisons_of_text_have_no_operators(self) -> None:
        def function(x: str) -> bool:
            return x == "O1"

        assert operators_in(function) == {}
        assert operators_in(torch.softmax) == {}


class TestLeftOut:
    def test_a_spelling_that_an_edit_leaves_out_is_named(self) -> None:
        (told,) = list_edits.left_out(shipped().overlaid({"blacklist": {"torch": ["mm"]}}))

        assert told == (
            "cast_lists: torch.mm is in the blacklist now, but torch.Tensor.mm stays as it is. "
            'Type `blacklist: {"*": [mm]}` for every spelling.'
        )

    def test_a_spelling_with_an_edit_of_its_own_is_not_left_out(self) -> None:
        lists = shipped().overlaid({"promote": {"torch": ["mm"]}, "blacklist": {"torch.Tensor": ["mm"]}})

        (told,) = list_edits.left_out(lists)  # torch.sparse.mm is on the blacklist already
        assert "torch.mm is in the promote now, but torch.sparse.mm stays as it is." in told

    @pytest.mark.parametrize(
        "overlay",
        [
            pytest.param({"blacklist": {"torch": [{"name": "exp", "dtypes": ["float16"]}]}}, id="in force already"),
            pytest.param({"blacklist": {"math": ["sqrt"]}}, id="outside of torch"),
            pytest.param({"whitelist": {"torch.nn.functional": ["softmax"]}}, id="undone"),
        ],
    )
    def test_other_edits_leave_no_spelling_out(self, overlay: Mapping[str, object]) -> None:
        assert list_edits.left_out(shipped().overlaid(overlay)) == []

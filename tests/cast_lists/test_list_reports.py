"""The output of `ampatch lists`: the rules in force, the verdict on a file, the difference to another system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch
from helpers import Write

from ampatch.cast_lists import list_reports
from ampatch.cast_lists.coverage import Coverage, Reason
from ampatch.cast_lists.lists import PEERS, CastLists, peer, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import AmpError, CastListError, Fault, OptionError, faults

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

FLOAT16, BFLOAT16 = [torch.float16], [torch.bfloat16]


def lists(**names: object) -> CastLists:
    """Lists with these in them and nothing else."""
    return CastLists({}).overlaid(names)


class TestPolicy:
    def test_a_line_has_path_list_source_and_conditions_in_columns(self, write: Write) -> None:
        file = write(
            "promote: {torch: [dot]}\n"
            "blacklist:\n"
            "  torch: [{name: softmax, via_dtype: true}]\n"
            "  torch.nn.functional:\n"
            "  - {name: interpolate, when: {mode: [area, bicubic]}, dtypes: [float16]}\n"
        )

        assert list_reports.policy(CastLists({}).overlaid(file)) == [
            f"torch.dot                        promote    {file}:1",
            f"torch.softmax                    blacklist  {file}:3  via_dtype",
            f"torch.nn.functional.interpolate  blacklist  {file}:5  float16 only; when mode=area|bicubic",
        ]

    def test_lines_are_sorted_by_namespace_and_name(self) -> None:
        policy = list_reports.policy(
            lists(whitelist={"torch.Tensor": ["mm", "bmm"], "torch": ["mm"]}, blacklist={"torch": ["exp"]})
        )

        assert [line.split()[0] for line in policy] == ["torch.exp", "torch.mm", "torch.Tensor.bmm", "torch.Tensor.mm"]
        assert list_reports.policy(CastLists({})) == []

    def test_values_of_a_condition_are_written_as_in_yaml(self) -> None:
        when = {"inplace": [False], "training": [True, "true", None, 1, "two\nlines"]}
        rules = lists(blacklist={"torch.nn.functional": [{"name": "rrelu", "when": when}]})

        (line,) = list_reports.policy(rules)
        assert line.endswith("  when inplace=false, training='true'|'two  lines'|1|null|true")

    def test_every_shipped_rule_has_a_line(self) -> None:
        policy = list_reports.policy(shipped())

        assert {line.split()[0] for line in policy} == {str(path) for path, _ in shipped().rules}
        assert len(policy) == len({(path, rule.source) for (path, _), rule in shipped().rules.items()})


EXACT = " Selects, copies or negates values, or cuts them to whole numbers; the half type holds each result exactly."


class TestPolicyOfNames:
    RULES = lists(
        whitelist={"torch": ["conv2d", "mm"], "torch.Tensor": ["mm"], "torch.special": ["softmax"]},
        blacklist={"torch": ["softmax"], "torch.nn.functional": ["softmax", "mse_loss", "l1_loss"]},
    )

    @pytest.mark.parametrize(
        ("names", "paths"),
        [
            (["mm"], ["torch.mm", "torch.Tensor.mm"]),
            (["torch.mm"], ["torch.mm"]),
            (["Tensor.mm"], ["torch.Tensor.mm"]),
            (["functional.softmax"], ["torch.nn.functional.softmax"]),
            (["F.softmax"], ["torch.nn.functional.softmax"]),
            (["torch.nn"], [f"torch.nn.functional.{name}" for name in ("l1_loss", "mse_loss", "softmax")]),
            (["torch.special"], ["torch.special.softmax"]),
            (["*_loss"], ["torch.nn.functional.l1_loss", "torch.nn.functional.mse_loss"]),
            (["torch.soft*"], ["torch.softmax"]),
            (["torch.nn.functional.conv2d"], ["torch.conv2d"]),  # one function
            (["F.conv2d"], ["torch.conv2d"]),
            (["torch.special", "mm", "torch.mm"], ["torch.mm", "torch.Tensor.mm", "torch.special.softmax"]),
        ],
        ids=str,
    )
    def test_names_select_lines(self, names: list[str], paths: list[str]) -> None:
        lines = list_reports.policy(self.RULES, FLOAT16, names)
        assert [line.split()[0] for line in lines] == paths

    def test_an_asterisk_selects_every_line(self) -> None:
        assert list_reports.policy(self.RULES, names=["*"]) == list_reports.policy(self.RULES)

    @pytest.mark.parametrize(
        ("operator", "path"), [("@", "__matmul__"), ("+", "__add__"), ("**=", "__ipow__"), ("<=", "__le__")]
    )
    def test_an_operator_selects_the_method_that_it_calls(self, operator: str, path: str) -> None:
        rules = lists(promote={"torch.Tensor": ["__matmul__", "__add__", "__ipow__", "__pow__", "__le__"]})
        (line,) = list_reports.policy(rules, names=[operator])
        assert line.split()[0] == f"torch.Tensor.{path}"

    @pytest.mark.parametrize(
        ("name", "path", "why"),
        [
            ("relu", "torch.relu", EXACT),
            ("F.relu", "torch.nn.functional.relu", EXACT),
            ("torch.log", "torch.log", ""),  # on a shipped list, so no reason is known
            ("@", "torch.Tensor.__matmul__", ""),
        ],
    )
    def test_a_function_without_a_rule_is_on_no_list(self, name: str, path: str, why: str) -> None:
        (line,) = list_reports.policy(self.RULES, names=[name])
        assert line == f"{path} is on no list: amp leaves its arguments as they are.{why}"

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("softmx", "'softmax'"),
            ("torch.sofmax", "'torch.softmax'"),
            ("torch.nn.functionl.softmax", "'torch.nn.functional.softmax'"),
            ("torch.specal", "'torch.special"),
            ("nn.functional", "'torch.nn.functional'"),
        ],
    )
    def test_an_unknown_name_is_an_error_with_the_nearest(self, name: str, near: str) -> None:
        with pytest.raises(OptionError, match=rf"'{name}' is on no list, and there is no .* Did you mean {near}"):
            list_reports.policy(self.RULES, names=["mm", name])

    @pytest.mark.parametrize("name", ["", ".", "*zzz*", "torch.", ".mm", "torch.pi"])
    def test_an_invalid_name_is_an_error(self, name: str) -> None:
        with pytest.raises(OptionError, match="is on no list"):
            list_reports.policy(self.RULES, names=[name])

    def test_a_name_in_a_module_that_is_not_imported(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "not_imported_yet.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        rules = lists(whitelist={"not_imported_yet": ["fused"]})
        assert len(list_reports.policy(rules, names=["fused"])) == 1
        with pytest.raises(OptionError, match=r"is on no list.* has the function, add --import not_imported_yet\.$"):
            list_reports.policy(rules, names=["not_imported_yet.fast"])


def test_each_fault_and_each_other_error_is_one_line() -> None:
    error = CastListError([Fault("a.yaml:1", "one\n  in two lines\r\n"), Fault("b\n.yaml", "two")])

    assert faults(error) == ["a.yaml:1: one in two lines", "b .yaml: two"]
    assert faults(AmpError("first,\nsecond")) == ["first, second"]


class TestVerdict:
    @pytest.mark.parametrize(
        ("overlay", "changed"),
        [
            ({"unlisted": {"torch": ["log"]}}, "1 path is"),
            ({"blacklist": {"torch": ["inner", "bmm"]}}, "2 paths are"),
            ({"unlisted": {"torch": ["conv2d"]}}, "2 paths are"),  # and torch.nn.functional.conv2d
            ({"blacklist": {"torch": ["sum"]}}, "1 path is"),  # not via_dtype any more
            ({"banned": {"torch.nn.functional": [{"name": "binary_cross_entropy", "instead": "x"}]}}, "1 path is"),
            ({"blacklist": {"torch": ["mm"]}}, "1 path is"),  # torch.spmm is equal, and another function
            ({"blacklist": {"torch": [{"name": "bmm", "dtypes": ["float16"]}]}}, "1 path is"),
        ],
        ids=str,
    )
    def test_a_verdict_counts_the_changed_paths(self, overlay: dict[str, object], changed: str) -> None:
        *_, verdict = list_reports.checked("own.yaml", shipped(), shipped().overlaid(overlay)).lines

        assert verdict == f"own.yaml is sound: it changes how {changed} treated."

    @pytest.mark.parametrize("overlay", [{}, {"whitelist": {"torch": ["mm"]}}], ids=["empty", "as the shipped lists"])
    def test_a_verdict_says_that_a_file_changes_nothing(self, overlay: dict[str, object]) -> None:
        *_, verdict = list_reports.checked("own.yaml", shipped(), shipped().overlaid(overlay)).lines
        assert verdict.startswith("own.yaml is sound: it changes nothing, as it has no entries, or only such as")

    def test_a_verdict_counts_functions_that_were_not_looked_up(
        self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "not_imported_yet.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        after = shipped().overlaid({"blacklist": {"torch": ["bmm"], "not_imported_yet": ["f", "g"]}})

        *_, verdict = list_reports.checked("own.yaml", shipped(), after).lines

        assert verdict.endswith("3 paths are treated (2 not looked up, being in modules that are not imported yet).")


CONV2D = lists(whitelist={"torch": ["conv2d"]})


class TestDifference:
    def difference(self, theirs: CastLists, ours: CastLists, *half_dtypes: list[torch.dtype]) -> list[str]:
        """The lines without legend and count, columns set apart by one space."""
        lines = list_reports.difference(theirs, ours, "peer", *half_dtypes)
        return [" ".join(line.split()) for line in lines[1:-1]]

    def test_a_difference_has_legend_columns_and_count(self) -> None:
        theirs = lists(blacklist={"torch": ["exp", "log"]}, promote={"torch": ["mm"], "torch.nn.functional": ["gelu"]})
        ours = lists(blacklist={"torch": ["log"]}, whitelist={"torch": ["mm", "bmm"]})

        legend, *lines, count = list_reports.difference(theirs, ours, "peer", FLOAT16)

        assert legend == "Columns: function; its list in peer; its list in ampatch (-: none)."
        assert lines == [
            "torch.bmm                 -          whitelist",
            "torch.exp                 blacklist  -",
            "torch.mm                  promote    whitelist",
            "torch.nn.functional.gelu  promote    -",
        ]
        assert count.startswith("4 paths treated differently in float16: ")
        assert count.endswith(": 1 listed by both, 2 by peer (left) only, 1 by ampatch (right) only.")

    def test_no_difference_is_the_count_alone(self) -> None:
        assert list_reports.difference(shipped(), shipped(), "peer", FLOAT16) == [
            "0 paths treated differently in float16."
        ]

    @pytest.mark.parametrize(
        ("theirs", "ours", "difference"),
        [
            (CONV2D, lists(whitelist={"torch": ["conv2d"], "torch.nn.functional": ["conv2d"]}), []),  # one function
            (lists(whitelist={"torch.nn.functional": ["conv2d"]}), CONV2D, []),
            (
                lists(whitelist={"torch": ["mm"]}),
                lists(whitelist={"torch.Tensor": ["mm"]}),
                ["torch.mm whitelist -", "torch.Tensor.mm - whitelist"],
            ),
            (
                lists(blacklist={"torch": ["max"]}),
                lists(blacklist={"torch": [{"name": "max", "when": {"keepdim": [True]}}]}),
                ["torch.max blacklist blacklist (when keepdim=true)"],
            ),
            (
                lists(blacklist={"torch": ["max"]}),
                lists(blacklist={"torch": [{"name": "max", "dtypes": ["float16"], "when": {"keepdim": [True]}}]}),
                ["torch.max blacklist blacklist (float16 only; when keepdim=true)"],
            ),
            (
                lists(),
                lists(
                    blacklist={"torch": [{"name": "exp", "dtypes": ["float16"]}]},
                    promote={"torch": [{"name": "exp", "dtypes": ["bfloat16"]}]},
                ),
                ["torch.exp - blacklist (float16 only), promote (bfloat16 only)"],
            ),
            (
                lists(blacklist={"torch": ["sum"]}),
                lists(blacklist={"torch": [{"name": "sum", "via_dtype": True}]}),  # the same cast
                [],
            ),
        ],
    )
    def test_functions_in_other_lists_or_with_conditions_differ(
        self, theirs: CastLists, ours: CastLists, difference: list[str]
    ) -> None:
        assert self.difference(theirs, ours) == difference

    def test_half_types_are_compared_together_or_alone(self) -> None:
        theirs = lists(blacklist={"torch": ["exp"]})
        ours = lists(blacklist={"torch": [{"name": "exp", "dtypes": ["float16"]}]})

        assert self.difference(theirs, ours) == ["torch.exp blacklist blacklist (float16 only)"]
        assert self.difference(theirs, ours, FLOAT16) == []
        assert self.difference(theirs, ours, BFLOAT16) == ["torch.exp blacklist -"]

    def test_a_name_that_torch_lacks_is_no_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "of_another_release", len, raising=False)
        theirs = lists(whitelist={"torch": ["of_another_release"]})
        assert self.difference(theirs, lists()) == ["torch.of_another_release whitelist -"]

        monkeypatch.delattr(torch, "of_another_release")

        assert self.difference(theirs, lists()) == []

    @pytest.mark.parametrize("name", PEERS)
    def test_a_path_has_one_line_in_the_difference_to_a_peer(self, name: str) -> None:
        paths = [line.split()[0] for line in self.difference(peer(name), shipped())]

        assert len(paths) == len(set(paths)) > 0


class TestChanges:
    def changes(self, overlay: dict[str, object], *half_dtypes: list[torch.dtype]) -> list[str]:
        before = lists(whitelist={"torch": ["mm", "conv2d"]}, blacklist={"torch": [{"name": "sum", "via_dtype": True}]})
        return list_reports.changes(before, before.overlaid(overlay), "own.yaml", *half_dtypes)

    def test_changes_have_legend_columns_and_count(self) -> None:
        assert self.changes({"blacklist": {"torch": ["mm", "exp"]}, "unlisted": {"torch": ["conv2d"]}}) == [
            "Columns: function; its list in the shipped lists; its list with own.yaml laid over them (-: none).",
            "torch.conv2d  whitelist  -",
            "torch.exp     -          blacklist",
            "torch.mm      whitelist  blacklist",
            "3 paths treated differently in float16 and bfloat16: 1 moved or changed, 1 taken out, 1 new.",
        ]

    @pytest.mark.parametrize(
        ("overlay", "row"),
        [
            ({"blacklist": {"torch": ["sum"]}}, "torch.sum  blacklist (via_dtype)  blacklist"),
            (
                {"blacklist": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}},
                "torch.mm  whitelist  blacklist (float16 only), whitelist (bfloat16 only)",
            ),
            (
                {"banned": {"torch": [{"name": "mm", "instead": "use bmm"}]}},
                "torch.mm  whitelist  banned (instead: use bmm)",
            ),
            (
                {"blacklist": {"torch": [{"name": "mm", "when": {"mat2": [1]}}]}},
                "torch.mm  whitelist  blacklist (when mat2=1)",
            ),
        ],
        ids=["via_dtype", "dtypes", "instead", "when"],
    )
    def test_every_changed_option_is_shown(self, overlay: dict[str, object], row: str) -> None:
        _, found, _ = self.changes(overlay)
        assert found == row

    @pytest.mark.parametrize(
        ("overlay", "half_dtypes", "names"),
        [
            ({"unlisted": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}}, [BFLOAT16], "bfloat16"),
            ({"whitelist": {"torch": ["mm"]}}, [], "float16 and bfloat16"),
        ],
    )
    def test_no_change_is_the_count_alone(
        self, overlay: dict[str, object], half_dtypes: list[list[torch.dtype]], names: str
    ) -> None:
        assert self.changes(overlay, *half_dtypes) == [f"0 paths treated differently in {names}."]


class TestCovered:
    FOUND = Coverage(
        "2.99.0",
        {Treatment.WHITELIST: (Path("torch", "bmm"), Path("torch", "mm")), Treatment.BANNED: ()},
        {
            Reason("views", "Returns a view."): (Path("torch", "t"), Path("torch.Tensor", "t")),
            Reason("exact", "Copies."): (Path("torch", "clone"),),
        },
        (Path("torch", "brand_new"),),
    )

    def test_coverage_has_counts_undecided_functions_and_all_names(self) -> None:
        assert list_reports.covered(self.FOUND) == [
            "torch 2.99.0 has 6 functions and properties of tensors: 2 in a list, 3 in none for a reason, 1 undecided.",
            "",
            "Neither a list nor a reason names these. amp leaves their arguments as they are; name them in cast_lists:",
            "  torch.brand_new",
            "",
            "whitelist  2",
            "banned     0",
            "",
            "views  2  Returns a view.",
            "exact  1  Copies.",
            "",
            "whitelist:",
            "  torch: bmm, mm",
            "",
            "banned:",
            "",
            "views:",
            "  torch: t",
            "  torch.Tensor: t",
            "",
            "exact:",
            "  torch: clone",
        ]

    def test_coverage_without_undecided_functions_has_no_names_of_them(self) -> None:
        _, *lines = list_reports.covered(replace(self.FOUND, undecided=()))
        assert lines[:2] == ["", "whitelist  2"]

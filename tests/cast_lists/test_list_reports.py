"""What `ampatch lists` says: the rules in force, the verdict on a file, the difference to another system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch

from ampatch.cast_lists import list_reports
from ampatch.cast_lists.coverage import Coverage, Reason
from ampatch.cast_lists.lists import PEERS, CastLists, peer, shipped
from ampatch.cast_lists.paths import Path
from ampatch.cast_lists.rules import Treatment
from ampatch.errors import AmpError, CastListError, Fault, OptionError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

FLOAT16, BFLOAT16 = [torch.float16], [torch.bfloat16]


def lists(**names: object) -> CastLists:
    """Lists with these in them and nothing else."""
    return CastLists({}).overlaid(names)


class TestPolicy:
    def test_a_line_is_path_list_source_and_conditions_in_columns(self, tmp_path: FilePath) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(
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

    def test_a_function_with_a_rule_for_each_half_type_has_two_lines(self) -> None:
        entry = {
            "blacklist": [{"name": "exp", "dtypes": ["float16"]}],
            "promote": [{"name": "exp", "dtypes": ["bfloat16"]}],
        }

        assert list_reports.policy(lists(**{name: {"torch": entries} for name, entries in entry.items()})) == [
            "torch.exp  blacklist  cast_lists  float16 only",
            "torch.exp  promote    cast_lists  bfloat16 only",
        ]

    def test_equal_rules_from_two_lines_are_two(self, tmp_path: FilePath) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(
            "promote:\n  torch:\n  - {name: exp, dtypes: [float16]}\n  - {name: exp, dtypes: [bfloat16]}\n  - dot\n"
        )

        assert list_reports.policy(CastLists({}).overlaid(file)) == [
            f"torch.dot  promote  {file}:5",
            f"torch.exp  promote  {file}:3  float16 only",
            f"torch.exp  promote  {file}:4  bfloat16 only",
        ]

    def test_asked_about_one_half_type_it_leaves_the_other_and_the_condition_out(self) -> None:
        rules = lists(blacklist={"torch": [{"name": "exp", "dtypes": ["float16"]}, "log"]})

        assert list_reports.policy(rules, FLOAT16) == [
            "torch.exp  blacklist  cast_lists",
            "torch.log  blacklist  cast_lists",
        ]
        assert list_reports.policy(rules, BFLOAT16) == ["torch.log  blacklist  cast_lists"]

    def test_the_values_of_a_condition_stand_as_they_are_typed(self) -> None:
        when = {"inplace": [False], "training": [True, "true", None, 1, "two\nlines"]}
        rules = lists(blacklist={"torch.nn.functional": [{"name": "rrelu", "when": when}]})

        (line,) = list_reports.policy(rules)
        assert line.endswith("  when inplace=false, training='true'|'two  lines'|1|null|true")

    def test_every_shipped_rule_has_its_line(self) -> None:
        policy = list_reports.policy(shipped())

        assert {line.split()[0] for line in policy} == {str(path) for path, _ in shipped().rules}
        assert len(policy) == len({(path, rule.source) for (path, _), rule in shipped().rules.items()})

    def test_without_rules_there_are_no_lines(self) -> None:
        assert list_reports.policy(CastLists({})) == []


class TestPolicyOfNames:
    """Of the rules those that were asked for."""

    RULES = lists(
        whitelist={"torch": ["conv2d", "mm"], "torch.Tensor": ["mm"], "torch.special": ["softmax"]},
        blacklist={"torch": ["softmax"], "torch.nn.functional": ["softmax", "mse_loss", "l1_loss"]},
    )

    def shown(self, *names: str) -> list[str]:
        return [line.split()[0] for line in list_reports.policy(self.RULES, names=names)]

    @pytest.mark.parametrize(
        ("name", "paths"),
        [
            ("mm", ["torch.mm", "torch.Tensor.mm"]),
            ("torch.mm", ["torch.mm"]),
            ("Tensor.mm", ["torch.Tensor.mm"]),
            ("functional.softmax", ["torch.nn.functional.softmax"]),
            ("F.softmax", ["torch.nn.functional.softmax"]),
            ("torch.nn", [f"torch.nn.functional.{name}" for name in ("l1_loss", "mse_loss", "softmax")]),
            ("torch.special", ["torch.special.softmax"]),
            ("*_loss", ["torch.nn.functional.l1_loss", "torch.nn.functional.mse_loss"]),
            ("torch.soft*", ["torch.softmax"]),
            ("torch.nn.functional.conv2d", ["torch.conv2d"]),  # one function
            ("F.conv2d", ["torch.conv2d"]),
        ],
    )
    def test_a_name_stands_for(self, name: str, paths: list[str]) -> None:
        assert self.shown(name) == paths

    def test_several_names_are_shown_together_in_the_usual_order(self) -> None:
        assert self.shown("torch.special", "mm", "torch.mm") == ["torch.mm", "torch.Tensor.mm", "torch.special.softmax"]

    @pytest.mark.parametrize(
        ("operator", "path"), [("@", "__matmul__"), ("+", "__add__"), ("**=", "__ipow__"), ("<=", "__le__")]
    )
    def test_an_operator_stands_for_the_method_that_it_calls(self, operator: str, path: str) -> None:
        rules = lists(promote={"torch.Tensor": ["__matmul__", "__add__", "__ipow__", "__pow__", "__le__"]})
        (line,) = list_reports.policy(rules, names=[operator])
        assert line.split()[0] == f"torch.Tensor.{path}"

    def test_an_operator_without_a_rule_is_on_no_list(self) -> None:
        (line,) = list_reports.policy(self.RULES, names=["@"])
        assert line == "torch.Tensor.__matmul__ is on no list: amp leaves its arguments as they are."

    def test_an_asterisk_is_the_pattern_that_fits_everything(self) -> None:
        assert list_reports.policy(self.RULES, names=["*"]) == list_reports.policy(self.RULES)

    def test_lines_are_as_without_names(self) -> None:
        (line,) = list_reports.policy(self.RULES, FLOAT16, ["torch.mm"])
        assert line == "torch.mm  whitelist  cast_lists"

    @pytest.mark.parametrize(("name", "path"), [("relu", "torch.relu"), ("F.relu", "torch.nn.functional.relu")])
    def test_of_a_function_without_a_rule_that_is_said(self, name: str, path: str) -> None:
        (line,) = list_reports.policy(self.RULES, names=[name])
        why = (
            "Selects, copies or negates values, or cuts them to whole numbers; the half type holds each result exactly."
        )
        assert line == f"{path} is on no list: amp leaves its arguments as they are. {why}"

    def test_of_a_function_that_is_on_no_list_only_here_no_reason_is_known(self) -> None:
        assert list_reports.policy(self.RULES, names=["torch.log"]) == [
            "torch.log is on no list: amp leaves its arguments as they are."
        ]

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("softmx", "'softmax'"),
            ("torch.sofmax", "'torch.softmax'"),
            ("torch.nn.functionl.softmax", "'torch.nn.functional.softmax'"),
            ("torch.specal", "'torch.special"),
        ],
    )
    def test_of_a_name_that_nothing_has_the_nearest_are_named(self, name: str, near: str) -> None:
        with pytest.raises(OptionError, match=rf"'{name}' is on no list, and there is no .* Did you mean {near}"):
            list_reports.policy(self.RULES, names=["mm", name])

    @pytest.mark.parametrize("name", ["", ".", "*zzz*", "torch.", ".mm", "torch.pi"])
    def test_what_is_no_name_is_an_error(self, name: str) -> None:
        with pytest.raises(OptionError, match="is on no list"):
            list_reports.policy(self.RULES, names=[name])

    def test_of_a_module_that_is_not_imported(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "not_imported_yet.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        rules = lists(whitelist={"not_imported_yet": ["fused"]})
        assert len(list_reports.policy(rules, names=["fused"])) == 1
        with pytest.raises(OptionError, match=r"is on no list.* has the function, add --import not_imported_yet\.$"):
            list_reports.policy(rules, names=["not_imported_yet.fast"])


class TestFaults:
    def test_each_fault_is_a_line_whatever_it_quotes(self) -> None:
        error = CastListError([Fault("a.yaml:1", "one\n  in two lines\r\n"), Fault("b\n.yaml", "two")])

        assert list_reports.faults(error) == ["a.yaml:1: one in two lines", "b .yaml: two"]

    def test_any_other_error_is_one_line(self) -> None:
        assert list_reports.faults(AmpError("first,\nsecond")) == ["first, second"]


class TestVerdict:
    @pytest.mark.parametrize(
        ("overlay", "changed"),
        [
            ({}, "0 paths are"),
            ({"whitelist": {"torch": ["mm"]}}, "0 paths are"),  # it stands there already
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
    def test_it_counts_what_is_treated_otherwise(self, overlay: dict[str, object], changed: str) -> None:
        *_, verdict = list_reports.checked("own.yaml", shipped(), shipped().overlaid(overlay)).lines

        assert verdict == f"own.yaml is sound: it changes how {changed} treated."

    def test_it_says_what_it_had_to_take_on_trust(self, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "not_imported_yet.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        after = shipped().overlaid({"blacklist": {"torch": ["bmm"], "not_imported_yet": ["f", "g"]}})

        *_, verdict = list_reports.checked("own.yaml", shipped(), after).lines

        assert verdict.endswith("3 paths are treated (2 not looked up, being in modules that are not imported yet).")


class TestDifference:
    def difference(self, theirs: CastLists, ours: CastLists, *half_dtypes: list[torch.dtype]) -> list[str]:
        """The lines without legend and count, columns set apart by one space."""
        lines = list_reports.difference(theirs, ours, "peer", *half_dtypes)
        return [" ".join(line.split()) for line in lines[1:-1]]

    def test_first_comes_a_legend_then_columns_and_then_a_count(self) -> None:
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

    def test_where_nothing_differs_there_is_the_count_alone(self) -> None:
        assert list_reports.difference(shipped(), shipped(), "peer", FLOAT16) == [
            "0 paths treated differently in float16."
        ]

    def test_another_name_of_a_function_is_no_difference(self) -> None:
        assert torch.nn.functional.conv2d is torch.conv2d
        theirs = lists(whitelist={"torch": ["conv2d"]})
        ours = lists(whitelist={"torch": ["conv2d"], "torch.nn.functional": ["conv2d"]})

        assert self.difference(theirs, ours) == []
        assert self.difference(ours, theirs) == []
        assert self.difference(lists(whitelist={"torch.nn.functional": ["conv2d"]}), theirs) == []

    def test_a_method_is_not_the_function_of_its_name(self) -> None:
        assert self.difference(lists(whitelist={"torch": ["mm"]}), lists(whitelist={"torch.Tensor": ["mm"]})) == [
            "torch.mm whitelist -",
            "torch.Tensor.mm - whitelist",
        ]

    @pytest.mark.parametrize(
        ("condition", "shown"),
        [
            ({"when": {"mode": ["area"]}}, "when mode=area"),
            ({"dtypes": ["float16"]}, "float16 only"),
            ({"dtypes": ["float16"], "when": {"mode": ["area"]}}, "float16 only; when mode=area"),
        ],
        ids=["when", "dtypes", "both"],
    )
    def test_our_conditions_are_shown_and_make_a_difference(self, condition: dict[str, object], shown: str) -> None:
        theirs = lists(blacklist={"torch.nn.functional": ["interpolate"]})
        ours = lists(blacklist={"torch.nn.functional": [{"name": "interpolate", **condition}]})

        assert self.difference(theirs, ours) == [f"torch.nn.functional.interpolate blacklist blacklist ({shown})"]

    def test_one_half_type_is_compared_apart(self) -> None:
        theirs, ours = (
            lists(blacklist={"torch": ["exp"]}),
            lists(blacklist={"torch": [{"name": "exp", "dtypes": ["float16"]}]}),
        )

        assert self.difference(theirs, ours) == ["torch.exp blacklist blacklist (float16 only)"]
        assert self.difference(theirs, ours, FLOAT16) == []
        assert self.difference(theirs, ours, BFLOAT16) == ["torch.exp blacklist -"]

    def test_two_lists_of_ours_stand_side_by_side(self) -> None:
        ours = lists(
            blacklist={"torch": [{"name": "exp", "dtypes": ["float16"]}]},
            promote={"torch": [{"name": "exp", "dtypes": ["bfloat16"]}]},
        )

        assert self.difference(lists(), ours) == ["torch.exp - blacklist (float16 only), promote (bfloat16 only)"]

    def test_how_a_rule_is_carried_out_is_no_difference(self) -> None:
        ours = lists(blacklist={"torch": [{"name": "sum", "via_dtype": True}]})

        assert self.difference(lists(blacklist={"torch": ["sum"]}), ours) == []

    def test_a_name_that_torch_lacks_is_no_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "of_another_release", len, raising=False)
        theirs = lists(whitelist={"torch": ["of_another_release"]})
        assert self.difference(theirs, lists()) == ["torch.of_another_release whitelist -"]

        monkeypatch.delattr(torch, "of_another_release")

        assert self.difference(theirs, lists()) == []

    @pytest.mark.parametrize("name", PEERS)
    def test_a_path_has_one_line_for_each_system(self, name: str) -> None:
        paths = [line.split()[0] for line in self.difference(peer(name), shipped())]

        assert len(paths) == len(set(paths)) > 0


class TestChanges:
    """What a file of the user's changes."""

    def changes(self, overlay: dict[str, object], *half_dtypes: list[torch.dtype]) -> list[str]:
        before = lists(whitelist={"torch": ["mm", "conv2d"]}, blacklist={"torch": [{"name": "sum", "via_dtype": True}]})
        return list_reports.changes(before, before.overlaid(overlay), "own.yaml", *half_dtypes)

    def test_a_legend_then_each_path_with_both_lists_then_a_count(self) -> None:
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
    def test_every_option_counts(self, overlay: dict[str, object], row: str) -> None:
        _, found, _ = self.changes(overlay)
        assert found == row

    def test_in_one_half_type(self) -> None:
        overlay = {"unlisted": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}}
        assert self.changes(overlay, BFLOAT16) == ["0 paths treated differently in bfloat16."]

    def test_a_file_that_changes_nothing_is_the_count_alone(self) -> None:
        assert self.changes({"whitelist": {"torch": ["mm"]}}) == [
            "0 paths treated differently in float16 and bfloat16."
        ]


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

    def test_counts_come_first_then_the_undecided_and_then_all_names(self) -> None:
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

    def test_where_all_is_decided_no_name_stands_before_the_counts(self) -> None:
        _, *lines = list_reports.covered(replace(self.FOUND, undecided=()))
        assert lines[:2] == ["", "whitelist  2"]

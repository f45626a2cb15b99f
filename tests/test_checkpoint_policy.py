"""Tests the policy in a checkpoint: its hash is equal if it decides the same, and a warning names each difference."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import completed
from torch import nn
from torch.nn import functional as F

from ampatch import amp
from ampatch import checkpoint_policy as policy
from ampatch.errors import AmpWarning, OptionError
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "save_and_resume.md"

#: What every test begins with, if it names nothing else.
USUAL: dict[str, Any] = {"opt_level": "O1", "half_dtype": torch.float16}

LISTS = """
blacklist:
  torch.nn.functional: [linear]
  torch: [bmm]
whitelist:
  torch:
    - {name: atan2, dtypes: [float16]}
    - cosh
unlisted:
  torch: [tan]
"""
REORDERED = """
unlisted: {torch: [tan]}
whitelist: {torch: [cosh, {dtypes: [float16], name: atan2}]}
blacklist: {torch: [bmm], torch.nn.functional: [linear]}
"""


def initialize(**options: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **{**USUAL, "verbosity": 0, **options})


def saved(**options: Any) -> dict[str, Any]:
    """What a session saves, which is over then."""
    initialize(**options)
    state = amp.state_dict(include_policy=True)
    amp.deinitialize()
    return state


def hash_of(**options: Any) -> str:
    return saved(**options)["policy"]["sha256"]


def told(state: Mapping[str, Any], **options: Any) -> list[str]:
    """The lines of the warning under other options; none without a warning."""
    initialize(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.load_state_dict(state)
    amp.deinitialize()
    assert len(caught) <= 1
    return str(caught[0].message).splitlines() if caught else []


@pytest.fixture
def scale() -> Callable[[], float]:
    """A scale that none of the states here has; it stays what it is where nothing is loaded."""
    initialize(init_scale=2.0**7)
    return amp.get_loss_scale


class TestData:
    def test_state_dict_has_the_policy_only_if_it_is_included(self):
        initialize(num_losses=2)
        fresh = {"loss_scale": 2.0**16, "unskipped": 0}
        assert (
            amp.state_dict() == amp.state_dict(include_policy=False) == {"loss_scaler0": fresh, "loss_scaler1": fresh}
        )
        both = amp.state_dict(include_policy=True)
        assert both.pop("policy")
        assert both == amp.state_dict()

    @pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
    def test_policy_read_from_a_file_loads_without_a_warning(self, opt_level):
        state = saved(opt_level=opt_level, half_dtype=None)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        assert read == json.loads(json.dumps(state, allow_nan=False)) == state
        assert told(read, opt_level=opt_level, half_dtype=None) == []

    def test_policy_of_json_that_writes_whole_floats_as_integers_loads(self):
        whole = re.sub(r"(\d+)\.0\b", r"\1", json.dumps(saved(scaler="torch")))
        assert told(json.loads(whole), scaler="torch") == []

    def test_distributed_checkpoint_loads_into_a_state_of_another_policy(self, tmp_path):
        """Which fills a dict that has the live policy, and needs the same keys in both."""
        state, other = saved(), saved(opt_level="O2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single process
            dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
            dcp.load(other, checkpoint_id=tmp_path, no_dist=True)
        assert other == state

    def test_policy_has_the_text_of_the_lists_as_they_were_read(self, tmp_path, write):
        file = write(LISTS)
        initialize(cast_lists=[file, {"promote": {"torch": ["bmm"]}}])
        file.write_text("whitelist: {torch: [cosh]}")
        (name, text), (_, made) = amp.state_dict(include_policy=True)["policy"]["overlays"]
        assert (name, text) == (str(file), LISTS)
        both = policy.effective(runtime.live)["sha256"]
        amp.deinitialize()
        file.write_text(text)
        (tmp_path / "made.yaml").write_text(made)
        assert hash_of(cast_lists=[file, tmp_path / "made.yaml"]) == both

    def test_policy_is_neither_saved_nor_read_if_amp_is_disabled(self):
        initialize(enabled=False)
        assert amp.state_dict(include_policy=True) == {}
        amp.load_state_dict({"policy": "damaged"})

    def test_include_policy_is_true_or_false(self):
        initialize()
        with pytest.raises(OptionError, match="include_policy is 'no'"):
            amp.state_dict(include_policy="no")


# Prints a policy with a set of names, a file and a registration; decorated functions are each process's own.
PROGRAM = """
import json, sys, torch
from torch import nn
from ampatch import amp
amp.register_float_function(torch, "cosh")
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh())
kept = {"1", "2", "Tanh", nn.LayerNorm}
amp.initialize(model, half_dtype="float16", verbosity=0, keep_fp32=kept, cast_lists=sys.argv[1])
told = amp.state_dict(include_policy=True)["policy"]
print(json.dumps(told))
"""


class TestGuide:
    def test_example_of_the_guide_gives_the_warning_that_the_guide_shows(self):
        section = PAGE.read_text(encoding="utf-8").partition("## The policy of a checkpoint\n")[2]
        code, expected = re.findall(r"^```(?:python|text)\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)[:2]
        with pytest.warns(AmpWarning) as caught:
            exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
        assert [str(each.message) for each in caught] == [expected]


class TestHash:
    @pytest.mark.slow
    def test_hash_is_equal_in_another_process_and_for_a_reordered_file(self, tmp_path):
        files = [tmp_path / "one.yaml", tmp_path / "reordered.yaml"]
        for file, text in zip(files, [LISTS, REORDERED], strict=True):
            file.write_text(text)
        seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(files[0])]
        done = completed(command, tmp_path, {**os.environ, "PYTHONHASHSEED": seed})
        assert not done.returncode, done.stderr
        theirs = json.loads(done.stdout)
        assert re.fullmatch("[0-9a-f]{64}", theirs["sha256"])
        amp.register_float_function(torch, "cosh")
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh())
        kept = {nn.LayerNorm, "Tanh", "2", "1"}
        amp.initialize(model, half_dtype="float16", verbosity=0, keep_fp32=kept, cast_lists=files[1])
        ours = {**amp.state_dict(include_policy=True)["policy"], "decorated": []}
        assert policy.digest(ours) == theirs["sha256"]
        assert ours["overlays"] != theirs["overlays"]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (
                {"torch": [{"name": "cumsum", "when": {"dim": [None, 1]}}]},
                {"torch": [{"name": "cumsum", "when": {"dim": [1, None]}}]},
            ),
            ({"torch.nn.functional": ["linear"]}, {"torch._C._nn": ["linear"]}),
        ],
        ids=["values", "spelling"],
    )
    def test_equal_rules_have_one_hash(self, one, other):
        assert hash_of(cast_lists={"blacklist": one}) == hash_of(cast_lists={"blacklist": other}) != hash_of()

    @pytest.mark.parametrize(
        "options",
        [
            {"on_overflow": "raise"},
            {"exact_hooks": True},
            {"profile_casts": True},
            {"verbosity": 1},
            {"check_finite": True},
            # Only the error of this function reads otherwise.
            {
                "cast_lists": {
                    "banned": {"torch.nn.functional": [{"name": "binary_cross_entropy", "instead": "nothing"}]}
                }
            },
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_options_that_change_no_number_do_not_change_the_hash(self, options):
        assert hash_of(**options) == hash_of()

    def test_registered_function_has_the_hash_of_a_listed_one(self):
        listed = hash_of(cast_lists={"blacklist": {"torch": ["conv2d"]}})
        amp.register_half_function(torch, "conv2d")
        amp.register_float_function(F, "conv2d")  # the same function: the last one counts, under all names
        assert hash_of() == listed

    def test_unlisted_function_has_the_hash_of_one_that_was_never_listed(self):
        state = saved(cast_lists={"unlisted": {"torch": ["tan"]}})["policy"]
        row = ["torch.tan", "unlisted", "cast_lists"]
        assert row in state["rules"]
        assert policy.digest({**state, "rules": [each for each in state["rules"] if each != row]}) == state["sha256"]

    def test_script_has_one_name_in_itself_and_in_processes_that_it_spawns(self):
        found = set()
        for name in ("__main__", "__mp_main__"):
            script = types.ModuleType(name)
            script.__dict__["loss"] = lambda output: output.sum()
            amp.register_float_function(script, "loss")
            found.add(hash_of())
            runtime.registered.clear()
        assert len(found) == 1
        assert hash_of() not in found


class TestDifference:
    """Each of these changes the hash, and the warning names both sides."""

    @pytest.mark.parametrize(
        ("lists", "line"),
        [
            ({"blacklist": {"torch": ["bmm"]}}, "torch.bmm: whitelist (shipped) -> blacklist (cast_lists)"),
            ({"unlisted": {"torch": ["bmm"]}}, "torch.bmm: whitelist (shipped) -> unlisted (cast_lists)"),
            ({"whitelist": {"torch": ["cosh"]}}, "torch.cosh: blacklist (shipped) -> whitelist (cast_lists)"),
            ({"promote": {"torch": ["relu"]}}, "torch.relu: unlisted -> promote (cast_lists)"),
            (
                {"blacklist": {"torch": [{"name": "cumsum", "via_dtype": False}]}},
                "torch.cumsum: blacklist via_dtype (shipped) -> blacklist (cast_lists)",
            ),
            (
                {"whitelist": {"torch": [{"name": "bmm", "when": {"out_dtype": [None]}}]}},
                "torch.bmm: whitelist (shipped) -> whitelist when out_dtype=null (cast_lists)",
            ),
        ],
        ids=["moved", "unlisted", "to the whitelist", "new", "an option", "a condition"],
    )
    def test_rule_changes_hash_and_warning_in_both_directions(self, lists, line):
        state = saved()
        assert hash_of(cast_lists=lists) != state["policy"]["sha256"]
        assert f"  {line}" in told(state, cast_lists=lists)
        name, then, now = re.split(": | -> ", line)
        assert f"  {name}: {now} -> {then}" in told(saved(cast_lists=lists))

    @pytest.mark.parametrize(
        ("entries", "line"),
        [
            ({"0": "float32", "1": {}}, "0: no such entry -> float32 (cast_lists)"),
            ({"1": {"unlisted": ["bmm"]}}, "1: torch.bmm: no such entry -> unlisted (cast_lists)"),
            ({"1": {"blacklist": ["bmm"]}}, "1: torch.bmm: no such entry -> blacklist (cast_lists)"),
            ({"LayerNorm": {}, "1": {}}, "LayerNorm: no such entry -> the session's rules (cast_lists)"),
        ],
        ids=["float32", "unlisted", "a rule", "no rule"],
    )
    def test_rule_of_a_submodule_changes_hash_and_warning(self, entries, line):
        state, lists = saved(cast_lists={"modules": {"1": {}}}), {"modules": entries}
        assert hash_of(cast_lists=lists) not in (state["policy"]["sha256"], hash_of())
        assert f"  {line}" in told(state, cast_lists=lists)
        assert told(saved(cast_lists=lists), cast_lists=lists) == []

    def test_order_of_submodules_changes_the_hash_and_that_of_functions_does_not(self):
        one = {"1": {"blacklist": ["bmm"], "unlisted": ["tan"]}, "LayerNorm": {}}
        other = {"1": {"unlisted": ["tan"], "blacklist": ["bmm"]}, "LayerNorm": {}}
        turned = {"LayerNorm": {}, "1": one["1"]}
        assert hash_of(cast_lists={"modules": one}) == hash_of(cast_lists={"modules": other})
        assert hash_of(cast_lists={"modules": one}) != hash_of(cast_lists={"modules": turned})

    def test_warning_names_the_line_of_a_file(self, write):
        file = write(LISTS)
        lines = told(saved(), cast_lists=file)
        assert f"  torch.bmm: whitelist (shipped) -> blacklist ({file}:4)" in lines
        assert f"  torch.tan: blacklist (shipped) -> unlisted ({file}:10)" in lines

    @pytest.mark.parametrize(
        ("options", "lines"),
        [
            ({"init_scale": 2.0**10}, ["init_scale: 65536.0 -> 1024.0"]),
            ({"growth_factor": 4.0}, ["growth_factor: 2.0 -> 4.0"]),
            ({"scaler": "torch"}, [
                "min_loss_scale: 5.960464477539063e-08 -> 1.1754943508222875e-38",
                "max_loss_scale: 16777216.0 -> 'inf'",
            ]),
            ({"loss_scale": 8.0}, ["loss_scale: 'dynamic' -> 8.0"]),
            ({"keep_fp32": ["1", nn.LayerNorm]}, [
                "keep_fp32: [] -> ['1', 'torch.nn.modules.normalization.LayerNorm']",
            ]),
            ({"cast_model_outputs": "float16"}, ["cast_model_outputs: None -> 'float16'"]),
            ({"opt_level": "O2", "keep_batchnorm_fp32": False}, [
                "opt_level: 'O1' -> 'O2'", "patch_torch_functions: True -> False", "cast_model_type: None -> 'float16'",
                "master_weights: False -> True", "cast_model_outputs: None -> 'float32'",
            ]),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_setting_changes_hash_and_warning(self, options, lines):
        state = saved()
        assert hash_of(**options) != state["policy"]["sha256"]
        assert told(state, **options)[1:-1] == [f"  {line}" for line in lines]

    @pytest.mark.parametrize("levels", [("O0", "O1"), ("O0", "O2"), ("O1", "O2")], ids="-".join)
    def test_warning_of_another_level_names_no_rule(self, levels):
        for before, after in (levels, levels[::-1]):
            lines = told(saved(opt_level=before), opt_level=after)
            assert lines[1] == f"  opt_level: {before!r} -> {after!r}"
            assert not [line for line in lines if "(shipped)" in line]

    def test_warning_at_o2_names_only_rules_that_have_an_effect(self):
        def lists(needs: bool) -> dict[str, Any]:
            return {
                "blacklist": {
                    "torch": [{"name": "cosh", "needs_float32": needs}, {"name": "tan", "needs_float32": True}]
                }
            }

        at_o2 = {"opt_level": "O2"}
        lines = told(saved(**at_o2, cast_lists=lists(False)), **at_o2, cast_lists=lists(True))
        assert lines[1:-1] == ["  torch.cosh: unlisted -> blacklist needs_float32 (cast_lists)"]
        lines = told(saved(**at_o2), **at_o2, cast_lists={"modules": {"1": "float32"}})
        assert "  1: no such entry -> float32 (cast_lists)" in lines

    def test_warning_names_a_function_registered_after_saving(self):
        state = saved()
        amp.register_float_function(torch, "bmm")
        assert told(state)[1:-1] == ["  torch.bmm: whitelist (shipped) -> blacklist (registered)"]
        amp.register_bfloat16_function(torch, "bmm")
        assert told(state)[1:-1] == ["  torch.bmm: whitelist (shipped) -> whitelist to bfloat16 (registered)"]

    def test_warning_names_a_decorated_function(self):
        state, name = saved(), f"{__name__}.{self.test_warning_names_a_decorated_function.__qualname__}.<locals>.loss"

        def loss(value: object) -> object:
            return value

        loss = amp.float_function(loss)
        with_it = saved()
        assert told(state)[1:-1] == [f"  {name}: not decorated -> blacklist (decorated)"]
        del loss
        assert told(with_it)[1:-1] == [f"  {name}: blacklist (decorated) -> not decorated"]

    def test_warning_names_other_versions_only_beside_a_difference(self, monkeypatch):
        with monkeypatch.context() as older:
            older.setattr(policy, "__version__", "0.0.1")
            older.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.0"))
            state = saved()
        assert told(state) == []
        first = told(state, init_scale=2.0)[0]
        assert f"by ampatch 0.0.1 (here: {policy.__version__}) and torch 2.9.0 (here: {torch.__version__})" in first

    def test_warning_counts_rules_after_the_twelfth(self):
        lists = {"unlisted": {"torch.nn.functional": ["linear"], "*": ["exp", "log", "cosh", "sum", "prod"]}}
        head, *lines, more, _ = told(saved(), cast_lists=lists)
        total = int(re.search(r"(\d+) differences, saved -> here:$", head)[1])
        assert len(lines) == 12
        assert more == f"  and {total - 12} more"

    def test_rules_of_the_user_are_named_before_those_of_the_half_type(self):
        lines = told(saved(), half_dtype=torch.bfloat16, cast_lists={"promote": {"torch": ["relu"]}})
        assert lines[1:4] == [
            "  half_dtype: 'float16' -> 'bfloat16'",
            "  loss_scale: 'dynamic' -> 1.0",
            "  torch.relu: unlisted -> promote (cast_lists)",
        ]
        assert "(shipped)" in lines[4]

    def test_decorated_function_that_is_not_imported_yet_is_no_difference(self, package):
        package("decorating", losses="from ampatch import amp\n@amp.float_function\ndef loss(x): return x\n")
        importlib.import_module("decorating.losses")
        state = saved()
        assert ["decorating.losses.loss", "blacklist", "decorated"] in state["policy"]["decorated"]
        for name in ("decorating.losses", "decorating"):
            del sys.modules[name]
        gc.collect()
        assert told(state) == []
        importlib.import_module("decorating.losses").loss = None
        gc.collect()
        assert told(state)[1:-1] == ["  decorating.losses.loss: blacklist (decorated) -> not decorated"]


OWN = """
def first_loss(x): return x
def second_loss(x): return x
def norm(x): return x
"""


class TestPatterns:
    def test_patterns_have_one_hash_before_and_after_the_import(self, package):
        package("of_policy", losses=OWN)
        module = "of_policy.losses"
        lists = [
            {"whitelist": {module: ["norm", "first_loss"]}},
            {"blacklist": {"of_policy.*": ["*_loss"]}, "unlisted": {module: ["second_loss"]}},
        ]
        before = saved(cast_lists=lists)
        importlib.import_module(module)
        after = saved(cast_lists=lists)
        assert before["policy"] == after["policy"]
        rules = {name: decision for name, decision, _ in after["policy"]["rules"] if name.startswith(module)}
        assert rules == {f"{module}.{name}": decided for name, decided in [
            ("first_loss", "blacklist"), ("norm", "whitelist"), ("second_loss", "unlisted"),
        ]}  # fmt: skip

    def test_patterns_of_different_functions_have_one_hash_in_any_order(self):
        one = {"blacklist": {"torch.nn.functional": ["*_norm"]}, "promote": {"torch.nn.functional": ["*pad"]}}
        assert hash_of(cast_lists=one) == hash_of(cast_lists=dict(reversed(one.items())))

    def test_warning_names_the_order_of_patterns_of_the_same_functions(self):
        one = {"blacklist": {"torch.nn.functional": ["*_shuffle"]}, "promote": {"torch.nn.functional": ["channel_*"]}}
        other = dict(reversed(one.items()))
        state = saved(cast_lists=one)
        assert hash_of(cast_lists=other) != state["policy"]["sha256"]
        order = "torch.nn.functional.*_shuffle, torch.nn.functional.channel_*"
        turned = "torch.nn.functional.channel_*, torch.nn.functional.*_shuffle"
        assert f"  the order of patterns, of which the last decides: {order} -> {turned}" in told(
            state, cast_lists=other
        )

    def test_warning_names_a_pattern_in_place_of_a_name(self):
        by_pattern = {"blacklist": {"torch.nn.functional": ["pixel_shuffl[e]"]}}
        by_name = {"blacklist": {"torch.nn.functional": ["pixel_shuffle"]}}
        pattern = "torch.nn.functional.pixel_shuffl[e]"
        state = saved(cast_lists=by_pattern)
        assert told(state, cast_lists=by_name)[1:-1] == [f"  {pattern}: blacklist (cast_lists) -> no such pattern"]
        state = saved(cast_lists=by_name)
        assert told(state, cast_lists=by_pattern)[1:-1] == [f"  {pattern}: no such pattern -> blacklist (cast_lists)"]

    def test_a_pattern_of_another_namespace_decides_nothing_about_a_name(self):
        by_pattern = {"blacklist": {"torch.nn.functional": ["rel[u]"]}}
        both = {"blacklist": {"torch": ["relu"], **by_pattern["blacklist"]}}
        lines = told(saved(cast_lists=by_pattern), cast_lists=both)
        assert lines[1:-1] == ["  torch.relu: unlisted -> blacklist (cast_lists)"]


def without(table: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.pop(table)


class TestDamage:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (without("rules"), r"it cannot be read \(KeyError: 'rules'\)"),
            (without("sha256"), r"its sha256 is None; its settings"),
            (without("format"), r"its format is None; expected 1"),
            (without("versions"), r"its versions are None; expected a dict"),
            (lambda found: found.update(format=2), r"its format is 2; expected 1"),
            (lambda found: found.update(format=torch.ones(2)), r"its format is tensor.*; expected 1"),
            (lambda found: found.update(rules={}), r"its sha256 is '[0-9a-f]{64}'"),
            (lambda found: found["rules"].insert(3, ["torch.exp"]), r"it cannot be read \(ValueError: "),
            (lambda found: found["rules"].insert(3, None), r"it cannot be read \(TypeError: "),
            (lambda found: found["rules"][0].__setitem__(1, 1), r"its sha256 is '[0-9a-f]{64}'"),
            (lambda found: found["settings"].append([[], 1]), r"it cannot be read \(TypeError: "),
            (lambda found: found["settings"].append(["x", torch.ones(1)]), r"it cannot be read \(TypeError: "),
            (lambda found: found["rules"].pop(), r"its sha256 is '[0-9a-f]{64}'; its settings and rules have"),
            (lambda found: found["settings"][0].__setitem__(1, "O2"), r"its sha256 is '[0-9a-f]{64}'; its settings"),
            (lambda found: found.update(sha256=3), r"its sha256 is 3; its settings"),
        ],
    )
    def test_damaged_policy_raises_and_nothing_is_loaded(self, damage, message, scale):
        state = amp.state_dict(include_policy=True)
        state["loss_scaler0"]["loss_scale"] = 2.0**5
        damage(state["policy"])
        with pytest.raises(OptionError, match=message) as caught:
            amp.load_state_dict(state)
        assert "type state_dict.pop('policy') first" in str(caught.value)
        assert scale() == 2.0**7
        state.pop("policy")
        amp.load_state_dict(state)
        assert scale() == 2.0**5

    @pytest.mark.parametrize("entry", [None, "text", [], 3])
    def test_entry_that_is_no_dict_raises_and_nothing_is_loaded(self, entry, scale):
        with pytest.raises(OptionError, match=rf"otherwise: found {re.escape(repr(entry))}; expected a dict"):
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}, "policy": entry})
        assert scale() == 2.0**7

    def test_damaged_scaler_raises_before_any_warning_of_the_policy(self, scale):
        state = amp.state_dict(include_policy=True)
        amp.deinitialize()
        initialize(init_scale=2.0**8)
        with pytest.raises(OptionError, match="lacks"):
            amp.load_state_dict({**state, "loss_scaler0": {}})
        assert scale() == 2.0**8

    def test_warning_turned_into_an_error_leaves_every_scale(self):
        state = saved(num_losses=2, init_scale=4.0)
        initialize(num_losses=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(AmpWarning, match="saved under another policy"):
                amp.load_state_dict(state)
        assert [amp.get_loss_scale(index) for index in range(2)] == [2.0**16] * 2
        with pytest.warns(AmpWarning, match="saved under another policy"):
            amp.load_state_dict(state)
        assert [amp.get_loss_scale(index) for index in range(2)] == [4.0] * 2

"""Tests how live settings are shown: as plain data, in a repr, and in the error of a call that asks for others."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import re
from typing import Any

import pytest
import torch
import yaml
from helpers import in_thread
from torch import nn
from torch._subclasses import FakeTensorMode

from ampatch import amp
from ampatch.errors import OptionError, UsageError
from ampatch.opt_levels import LEVELS
from ampatch.runtime import runtime
from ampatch.settings import Settings

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

BFLOAT16 = {"half_dtype": torch.bfloat16, "verbosity": 0}
UNLISTED = {"unlisted": {"torch": ["exp"]}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain(value: object) -> bool:
    """Whether a value is text, a number, True, False, None, or a list of such."""
    return all(map(plain, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


class TestIsOn:
    def test_is_on_tells_whether_a_session_is_live(self):
        assert amp.is_on() is False
        with amp.init():
            assert amp.is_on() is True
        with pytest.raises(OptionError):
            amp.initialize(net(), opt_level="O7")
        assert amp.is_on() is False
        amp.initialize(net(), enabled=False)
        assert amp.is_on() is False
        amp.init(enabled=False)
        assert amp.is_on() is False
        amp.initialize(net(), **BFLOAT16)
        amp.initialize(net(), enabled=False)  # changes nothing
        assert amp.is_on() is True
        amp.deinitialize()
        assert amp.is_on() is False

    def test_disable_casts_leaves_amp_on_and_turns_off_casts_of_its_thread(self):
        amp.initialize(net(), **BFLOAT16)
        with amp.disable_casts():
            assert (amp.is_on(), amp.settings()["casts_here"]) == (True, False)
            assert in_thread(lambda: amp.settings()["casts_here"]) is True
        assert amp.settings()["casts_here"] is True

    def test_compiled_code_may_ask_whether_amp_is_on(self):
        compiled = torch.compile(lambda x: x + 1 if amp.is_on() else x, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)).item() == 0
        amp.initialize(net(), **BFLOAT16)
        assert compiled(torch.zeros(1)).item() == 1


class TestSettings:
    def test_settings_without_a_session_say_that_there_is_none(self):
        assert amp.settings() == {"is_on": False, "disabled": False}
        amp.initialize(net(), enabled=False)
        assert amp.settings() == {"is_on": False, "disabled": True}
        amp.deinitialize()
        assert amp.settings() == {"is_on": False, "disabled": False}

    def test_settings_at_o1(self, write):
        file = write("blacklist: {torch: [mm]}\n")
        models = [net(), net()]

        amp.initialize(
            models,
            [sgd(models[0])],
            half_dtype="fp16",
            cast_lists=[file, UNLISTED],
            num_losses=2,
            min_loss_scale=0.5,
            verbosity=0,
        )

        assert amp.settings() == {
            "is_on": True,
            "disabled": False,
            "set_up_by": "amp.initialize",
            "opt_level": "O1",
            "half_dtype": "float16",
            "patch_torch_functions": True,
            "cast_model_type": None,
            "keep_batchnorm_fp32": None,
            "keep_fp32": [],
            "float32_outputs": [],
            "cast_buffers": False,
            "master_weights": None,
            "cast_model_outputs": None,
            "cast_lists": [str(file), "a mapping"],
            "modules": [],
            "loss_scale": "dynamic",
            "num_losses": 2,
            "init_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 0.5,
            "max_loss_scale": 2.0**24,
            "exact_hooks": False,
            "check_finite": False,
            "fused_linear": True,
            "optimizer_state": "float32",
            "allow_banned": False,
            "enable_caching": True,
            "profile_casts": False,
            "on_overflow": "explain",
            "loss_scales": [2.0**16, 2.0**16],
            "device_types": ["cpu"],
            "num_models": 2,
            "num_optimizers": 1,
            "casts_here": True,
        }

    def test_settings_at_o2(self):
        amp.initialize(
            net(),
            opt_level="O2",
            half_dtype=torch.bfloat16,
            keep_fp32=["0", nn.LayerNorm],
            cast_model_outputs=torch.float64,
            loss_scale="8",
            exact_hooks=True,
            on_overflow=plain,
            check_finite=True,
            verbosity=0,
        )
        expected = {
            "cast_model_type": "bfloat16",
            "keep_batchnorm_fp32": True,
            "keep_fp32": ["0", "LayerNorm"],
            "master_weights": True,
            "cast_model_outputs": "float64",
            "loss_scale": 8.0,
            "loss_scales": [8.0],
            "exact_hooks": True,
            "on_overflow": f"{__name__}.plain",
            "check_finite": True,
            "patch_torch_functions": False,
            "casts_here": False,
        }
        assert amp.settings() == {**amp.settings(), **expected}

    def test_settings_of_init(self):
        with amp.init(half_dtype="bfloat16", allow_banned=True, enable_caching=False):
            found = amp.settings()
        assert (found["set_up_by"], found["allow_banned"], found["enable_caching"]) == ("amp.init", True, False)
        assert (found["num_models"], found["num_optimizers"]) == (0, 0)

    def test_loss_scales_are_the_present_ones(self):
        model = net()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).sum() * torch.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.settings()["loss_scales"] == [2.0**15]

    def test_dropped_models_and_optimizers_do_not_count(self):
        model, kept = net(), net()
        amp.initialize([model, kept], sgd(model), **BFLOAT16)
        del model
        gc.collect()
        assert (amp.settings()["num_models"], amp.settings()["num_optimizers"]) == (1, 0)

    @pytest.mark.parametrize("level", LEVELS)
    def test_settings_are_a_dict_of_plain_values_at_every_level(self, level):
        amp.initialize(net(), opt_level=level, verbosity=0)
        found = amp.settings()
        assert found["is_on"] is amp.is_on() is True
        assert isinstance(found, dict)
        assert [name for name, value in found.items() if not plain(value)] == []

    @pytest.mark.parametrize(
        "round_trip",
        [
            lambda found: json.loads(json.dumps(found)),
            lambda found: yaml.safe_load(yaml.safe_dump(found)),
            lambda found: yaml.safe_load(yaml.dump(found)),
            lambda found: pickle.loads(pickle.dumps(found)),
            copy.deepcopy,
            lambda found: {**found},
        ],
        ids=["json", "yaml.safe_dump", "yaml.dump", "pickle", "deepcopy", "dict"],
    )
    def test_settings_stay_equal_through_serialization(self, round_trip):
        model = amp.initialize(net(), **BFLOAT16)  # kept, as the settings count models
        assert round_trip(amp.settings()) == amp.settings()
        del model

    def test_checkpoint_with_settings_loads_without_ampatch(self):
        model = amp.initialize(net(), **BFLOAT16)
        file = io.BytesIO()
        torch.save(amp.settings(), file)
        assert b"ampatch" not in file.getvalue()
        file.seek(0)
        assert torch.load(file, weights_only=True) == amp.settings()
        del model

    def test_settings_print_as_lines_and_in_a_notebook_as_a_table(self):
        assert repr(amp.settings()) == "is_on     False\ndisabled  False"
        amp.initialize(net(), cast_lists=UNLISTED, **BFLOAT16)
        found = amp.settings()
        assert re.search(r"^half_dtype +'bfloat16'$", repr(found), re.MULTILINE)
        found["<b>"] = "<i>&"
        table = found._repr_html_()
        assert table.startswith("<table>")
        assert "<tr><th>opt_level</th><td>&#x27;O1&#x27;</td></tr>" in table
        assert "<tr><th>&lt;b&gt;</th><td>&#x27;&lt;i&gt;&amp;&#x27;</td></tr>" in table

    def test_edits_of_the_dict_do_not_reach_the_session(self):
        amp.initialize(net(), cast_lists=UNLISTED, **BFLOAT16)
        before = copy.deepcopy(amp.settings())
        amp.settings()["cast_lists"].clear()
        amp.settings()["device_types"].append("cuda")
        assert amp.settings() == before

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"opt_level": "O2", "half_dtype": "float16", "keep_fp32": ["0"], "cast_buffers": False},
            {"opt_level": "O1", "half_dtype": "float16", "loss_scale": 128.0, "check_finite": True, "num_losses": 2},
            {"opt_level": "O3", "keep_batchnorm_fp32": True, "cast_model_outputs": torch.float32},
        ],
    )
    def test_plain_data_can_be_read_back(self, options):
        amp.initialize(net(), verbosity=0, **options)
        live = runtime.live.settings
        assert Settings.of_plain_data(live.as_plain_data(), live.lists) == live


class TestReprs:
    def test_repr_of_a_handle_tells_whether_its_session_is_live(self):
        handle = amp.init(half_dtype=torch.bfloat16)
        assert repr(handle) == "Handle(on: opt_level='O1', half_dtype=torch.bfloat16)"
        amp.deinitialize()
        amp.initialize(net(), **BFLOAT16)
        assert repr(handle) == "Handle(deactivated: opt_level='O1', half_dtype=torch.bfloat16)"
        assert repr(amp.init(enabled=False)) == "Handle(does nothing: enabled=False)"
        assert repr(amp.Handle.__new__(amp.Handle)) == "Handle(does nothing: enabled=False)"

    def test_repr_of_a_loss_scaler_has_its_state(self):
        dynamic, static = amp.LossScaler(init_scale=8.0), amp.LossScaler(4.0)
        dynamic.update()
        assert repr(dynamic) == "LossScaler(dynamic, loss_scale=8.0, unskipped=1)"
        assert repr(static) == "LossScaler(static, loss_scale=4.0)"
        static.load_state_dict({"loss_scale": 2.0, "unskipped": 3})
        assert repr(static) == "LossScaler(static, loss_scale=2.0)"
        for each in (dynamic, static):
            each.to(torch.device("meta"))  # whatever is read off "meta" raises
        assert repr(dynamic) == "LossScaler(dynamic, loss_scale on meta: read it by .state, init_scale=8.0)"
        assert repr(static) == "LossScaler(static, loss_scale=2.0)"

    def test_repr_of_a_loss_scaler_never_fails(self):
        assert "LossScaler object at" in repr(amp.LossScaler.__new__(amp.LossScaler))
        scaler = amp.LossScaler()
        with FakeTensorMode():
            assert "LossScaler" in repr(scaler)

    def test_repr_of_internal_settings_abbreviates_the_lists(self):
        amp.initialize(net(), cast_lists=UNLISTED, **BFLOAT16)
        shown = repr(runtime.live.settings)
        assert len(shown) < 1000
        assert "CastLists(shipped lists, a mapping: " in shown


def named(live: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """The settings that the error of the second call names, one by one."""
    amp.initialize(net(), **{**BFLOAT16, **live})
    with pytest.raises(UsageError) as caught:
        amp.initialize(net(), **{**BFLOAT16, **asked})
    found = re.fullmatch(
        r"amp is set up already with other settings: (.*)\. Type amp\.deinitialize\(\) first, or give the same "
        r"arguments\.",
        str(caught.value),
    )
    assert found is not None, caught.value
    return found[1].split("; ")


@pytest.mark.filterwarnings("ignore:on_overflow=:ampatch.errors.AmpWarning")  # under a static scale
class TestOtherSettings:
    @pytest.mark.parametrize(
        ("common", "name", "live", "asked"),
        [
            ({}, "half_dtype", torch.bfloat16, torch.float16),
            ({}, "patch_torch_functions", True, False),
            ({}, "cast_model_type", None, torch.float32),
            ({"opt_level": "O2"}, "keep_batchnorm_fp32", True, False),
            ({"opt_level": "O2"}, "master_weights", True, False),
            ({"opt_level": "O2"}, "keep_fp32", None, ["0"]),
            ({}, "cast_model_outputs", None, torch.float32),
            ({"opt_level": "O2"}, "cast_buffers", False, True),
            ({}, "loss_scale", 1.0, "dynamic"),
            ({"loss_scale": "dynamic"}, "init_scale", 65536.0, 4.0),
            ({}, "growth_factor", 2.0, 4.0),
            ({}, "backoff_factor", 0.5, 0.25),
            ({}, "scale_window", 2000, 7),
            ({}, "hysteresis", 1, 2),
            ({}, "min_loss_scale", 2.0**-24, 1.0),
            ({}, "max_loss_scale", 2.0**24, 4.0),
            ({}, "num_losses", 1, 2),
            ({}, "exact_hooks", False, True),
            ({}, "profile_casts", False, True),
            ({}, "check_finite", False, True),
            ({}, "fused_linear", True, False),
            ({}, "on_overflow", "explain", "raise"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_error_names_an_argument_that_differs_with_both_values(self, common, name, live, asked):
        given = {} if live is None else {name: live}
        told = named({**common, **given}, {**common, name: asked})
        assert told == [f"{name} is {live!r} (this call: {asked!r})"]

    @pytest.mark.parametrize(
        ("live", "asked", "expected"),
        [
            ({"half_dtype": None, "opt_level": "O4"}, {}, "opt_level is 'O4' (this call: 'O1')"),
            ({"cast_lists": UNLISTED}, {"opt_level": "O2"}, "opt_level is 'O1' (this call: 'O2')"),
            ({}, {"scaler": "apex"}, f"min_loss_scale is {2.0**-24} (this call: {2.0**-126})"),
            ({"keep_fp32": "0"}, {"keep_fp32": nn.LayerNorm}, "keep_fp32 is ['0'] (this call: ['LayerNorm'])"),
            ({"on_overflow": print}, {"on_overflow": "log"}, "on_overflow is 'builtins.print' (this call: 'log')"),
            (
                {"on_overflow": [].append},
                {"on_overflow": [1].append},
                "on_overflow is 'builtins.list.append' (this call: 'another builtins.list.append')",
            ),
        ],
        ids=["level", "lists-at-a-level", "scaler", "class", "callable", "equal-names"],
    )
    def test_error_names_no_argument_that_follows_from_another(self, live, asked, expected):
        assert named(live, asked) == [expected]

    def test_arguments_given_beside_another_level_are_named_too(self):
        assert named({}, {"opt_level": "O2", "master_weights": False, "loss_scale": 2.0}) == [
            "opt_level is 'O1' (this call: 'O2')",
            "master_weights is None (this call: False)",
            "loss_scale is 1.0 (this call: 2.0)",
        ]

    def test_error_of_initialize_names_init_and_its_arguments(self):
        amp.init(half_dtype=torch.bfloat16, allow_banned=True, enable_caching=False)
        message = r"set up by amp\.init \(this call: amp\.initialize\);.* allow_banned is True .*enable_caching is Fal"
        with pytest.raises(UsageError, match=message):
            amp.initialize(net(), **BFLOAT16)

    def test_error_of_init_names_the_live_level(self):
        amp.initialize(net(), opt_level="O3", **BFLOAT16)
        with pytest.raises(UsageError, match=r"set up already, at opt_level='O3' in torch\.bfloat16; type amp\.deinit"):
            amp.init()

    def test_entries_of_an_edited_file_are_named_and_moved_lines_are_not(self, write):
        file = write("blacklist:\n  torch: [mm]\n")
        amp.initialize(net(), cast_lists=file, **BFLOAT16)
        file.write_text("# why\nblacklist:\n  torch: [mm]\n")
        amp.initialize(net(), cast_lists=file, **BFLOAT16)
        file.write_text("\n\nblacklist:\n  torch: [mm, bmm]\nunlisted:\n  torch: [chain_matmul]\n")

        with pytest.raises(UsageError) as caught:
            amp.initialize(net(), cast_lists=file, **BFLOAT16)

        assert re.search(
            r"cast_lists: torch\.bmm is in the whitelist by whitelist\.yaml:\d+ \(this call: in the blacklist by "
            rf"{re.escape(str(file))}:4\), torch\.chain_matmul is in the whitelist by whitelist\.yaml:\d+ \(this call: "
            r"on no list\)\. Type",
            str(caught.value),
        )
        assert "torch.mm " not in str(caught.value)

    @pytest.mark.parametrize(("number", "more"), [(3, ""), (4, ", and 1 more"), (6, ", and 3 more")])
    def test_three_entries_are_named_and_the_others_counted(self, number, more):
        names = ["addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm"][:number]
        (found,) = named({}, {"cast_lists": {"unlisted": {"torch": names}}})
        assert found.count("this call: on no list") == 3
        assert found.endswith(f"(this call: on no list){more}")

    @pytest.mark.parametrize(
        ("list_name", "function", "live", "asked", "expected"),
        [
            (
                "blacklist",
                "mm",
                {},
                {"when": {"mat2": [1, "2"]}},
                "in the blacklist by cast_lists (this call: in the blacklist when mat2='2'|1 by cast_lists",
            ),
            (
                "blacklist",
                "mm",
                {},
                {"dtypes": ["float16"]},
                "in the blacklist by cast_lists (this call: in the whitelist by whitelist.yaml:",
            ),
            (
                "blacklist",
                "sum",
                {},
                {"via_dtype": True},
                "in the blacklist by cast_lists (this call: in the blacklist via_dtype by cast_lists)",
            ),
            (
                "banned",
                "mm",
                {"instead": "use a"},
                {"instead": "use b"},
                "banned by cast_lists (this call: there too, with another `instead`)",
            ),
        ],
        ids=["when", "dtypes", "via_dtype", "instead"],
    )
    def test_options_of_an_entry_are_named(self, list_name, function, live, asked, expected):
        entries = ({"cast_lists": {list_name: {"torch": [{"name": function, **each}]}}} for each in (live, asked))
        (found,) = named(*entries)
        assert found.startswith(f"cast_lists: torch.{function} is {expected}")

    def test_half_type_is_named_if_entries_differ_in_one_only(self):
        (found,) = named({}, {"cast_lists": {"unlisted": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}}})
        assert found.endswith("(this call: on no list) in float16")

"""What is live, told: as plain data, in a repr, and in the error that says which settings a call asks for otherwise."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses import FakeTensorMode

from ampatch import amp
from ampatch.errors import UsageError
from ampatch.opt_levels import LEVELS
from ampatch.runtime import runtime
from ampatch.settings import Settings

BFLOAT16 = {"half_dtype": torch.bfloat16, "verbosity": 0}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class TestIsOn:
    def test_from_initialize_to_deinitialize(self) -> None:
        assert amp.is_on() is False
        amp.initialize(net(), **BFLOAT16)
        assert amp.is_on() is True
        amp.deinitialize()
        assert amp.is_on() is False

    def test_in_the_block_of_init(self) -> None:
        with amp.init():
            assert amp.is_on() is True
        assert amp.is_on() is False

    @pytest.mark.parametrize("level", LEVELS)
    def test_at_every_level(self, level: str) -> None:
        amp.initialize(net(), opt_level=level, verbosity=0)
        assert amp.is_on() is True

    def test_not_where_it_is_disabled(self) -> None:
        amp.initialize(net(), enabled=False)
        assert amp.is_on() is False
        amp.init(enabled=False)
        assert amp.is_on() is False

    def test_where_it_was_on_before_a_disabled_call(self) -> None:
        amp.initialize(net(), **BFLOAT16)
        amp.initialize(net(), enabled=False)
        assert amp.is_on() is True

    def test_not_where_initialize_failed(self) -> None:
        with pytest.raises(amp.OptionError):
            amp.initialize(net(), opt_level="O7")
        assert amp.is_on() is False

    def test_inside_disable_casts_where_only_casts_are_off(self) -> None:
        amp.initialize(net(), **BFLOAT16)
        with amp.disable_casts():
            assert (amp.is_on(), amp.settings()["casts_here"]) == (True, False)
        assert amp.settings()["casts_here"] is True

    def test_in_compiled_code(self) -> None:
        compiled = torch.compile(lambda x: x + 1 if amp.is_on() else x, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)).item() == 0
        amp.initialize(net(), **BFLOAT16)
        assert compiled(torch.zeros(1)).item() == 1


def plain(value: object) -> bool:
    """Whether a value is text, a number, True, False, None, or a list of such."""
    return all(map(plain, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


class TestSettings:
    def test_when_off_it_says_so_and_no_more(self) -> None:
        assert amp.settings() == {"is_on": False, "disabled": False}
        amp.initialize(net(), enabled=False)
        assert amp.settings() == {"is_on": False, "disabled": True}
        amp.deinitialize()
        assert amp.settings() == {"is_on": False, "disabled": False}

    def test_of_o1(self, tmp_path: Path) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("blacklist: {torch: [mm]}\n")
        models = [net(), net()]

        amp.initialize(
            models,
            [sgd(models[0])],
            half_dtype="fp16",
            cast_lists=[file, {"unlisted": {"torch": ["exp"]}}],
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

    def test_of_o2(self) -> None:
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

        found = amp.settings()

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
        assert {name: found[name] for name in expected} == expected

    def test_of_init(self) -> None:
        with amp.init(half_dtype="bfloat16", allow_banned=True, enable_caching=False):
            found = amp.settings()
        assert (found["set_up_by"], found["allow_banned"], found["enable_caching"]) == ("amp.init", True, False)
        assert (found["num_models"], found["num_optimizers"]) == (0, 0)

    def test_the_scales_are_the_present_ones(self) -> None:
        model = net()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, half_dtype=torch.float16, verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).sum() * torch.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.settings()["loss_scales"] == [2.0**15]

    def test_models_and_optimizers_that_are_gone_do_not_count(self) -> None:
        model, kept = net(), net()
        amp.initialize([model, kept], sgd(model), **BFLOAT16)
        del model
        gc.collect()
        assert (amp.settings()["num_models"], amp.settings()["num_optimizers"]) == (1, 0)

    def test_casts_are_those_of_this_thread(self) -> None:
        amp.initialize(net(), **BFLOAT16)
        told: list[bool] = []
        with amp.disable_casts():
            thread = threading.Thread(target=lambda: told.append(amp.settings()["casts_here"]))
            thread.start()
            thread.join()
        assert told == [True]

    @pytest.mark.parametrize("level", LEVELS)
    def test_all_of_it_is_plain(self, level: str) -> None:
        amp.initialize(net(), opt_level=level, verbosity=0)
        found = amp.settings()
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
    def test_it_travels(self, round_trip: Callable[[dict[str, Any]], object]) -> None:
        model = amp.initialize(net(), **BFLOAT16)  # kept, as the settings count models
        assert round_trip(amp.settings()) == amp.settings()
        del model

    def test_a_checkpoint_that_holds_it_loads_without_ampatch(self) -> None:
        model = amp.initialize(net(), **BFLOAT16)
        file = io.BytesIO()
        torch.save({"amp": amp.settings()}, file)
        assert b"ampatch" not in file.getvalue()
        file.seek(0)
        assert torch.load(file, weights_only=True) == {"amp": amp.settings()}
        del model

    def test_it_prints_as_lines_and_in_a_notebook_as_a_table(self) -> None:
        assert repr(amp.settings()) == "is_on     False\ndisabled  False"
        amp.initialize(net(), cast_lists={"unlisted": {"torch": ["exp"]}}, **BFLOAT16)
        found = amp.settings()
        assert re.search(r"^half_dtype +'bfloat16'$", repr(found), re.MULTILINE)
        found["<b>"] = "<i>&"
        table = found._repr_html_()
        assert table.startswith("<table>")
        assert "<tr><th>opt_level</th><td>&#x27;O1&#x27;</td></tr>" in table
        assert "<tr><th>&lt;b&gt;</th><td>&#x27;&lt;i&gt;&amp;&#x27;</td></tr>" in table

    def test_nothing_of_the_session_can_be_changed_through_it(self) -> None:
        amp.initialize(net(), cast_lists={"unlisted": {"torch": ["exp"]}}, **BFLOAT16)
        before = copy.deepcopy(amp.settings())
        amp.settings()["cast_lists"].clear()
        amp.settings()["device_types"].append("cuda")
        assert amp.settings() == before


class TestReprs:
    def test_of_the_handle(self) -> None:
        handle = amp.init(half_dtype=torch.bfloat16)
        assert repr(handle) == "Handle(on: opt_level='O1', half_dtype=torch.bfloat16)"
        handle.deactivate()
        assert repr(handle) == "Handle(deactivated: opt_level='O1', half_dtype=torch.bfloat16)"
        assert repr(amp.init(enabled=False)) == "Handle(does nothing: enabled=False)"
        assert repr(amp.Handle.__new__(amp.Handle)) == "Handle(does nothing: enabled=False)"

    def test_of_a_handle_after_deinitialize(self) -> None:
        handle = amp.init(half_dtype=torch.bfloat16)
        amp.deinitialize()
        amp.initialize(net(), **BFLOAT16)
        assert repr(handle).startswith("Handle(deactivated")

    def test_of_a_dynamic_scaler(self) -> None:
        scaler = amp.LossScaler(init_scale=8.0)
        assert repr(scaler) == "LossScaler(dynamic, loss_scale=8.0, unskipped=0)"
        scaler.update()
        assert repr(scaler) == "LossScaler(dynamic, loss_scale=8.0, unskipped=1)"

    def test_of_a_static_scaler_as_it_was_loaded(self) -> None:
        scaler = amp.LossScaler(4.0)
        assert repr(scaler) == "LossScaler(static, loss_scale=4.0)"
        scaler.load_state_dict({"loss_scale": 2.0, "unskipped": 3})
        assert repr(scaler) == "LossScaler(static, loss_scale=2.0)"

    def test_of_a_scaler_reads_nothing_off_a_device(self) -> None:
        # Whatever is read off "meta" raises.
        scaler, static = amp.LossScaler(init_scale=8.0), amp.LossScaler(4.0)
        for each in (scaler, static):
            each.to(torch.device("meta"))
        assert repr(scaler) == "LossScaler(dynamic, loss_scale on meta: read it by .state, init_scale=8.0)"
        assert repr(static) == "LossScaler(static, loss_scale=4.0)"

    def test_of_a_scaler_never_fails(self) -> None:
        assert "LossScaler object at" in repr(amp.LossScaler.__new__(amp.LossScaler))
        scaler = amp.LossScaler()
        with FakeTensorMode():
            assert "LossScaler" in repr(scaler)

    def test_of_what_is_inside_fits_on_a_screen(self) -> None:
        amp.initialize(net(), cast_lists={"unlisted": {"torch": ["exp"]}}, **BFLOAT16)
        assert runtime.live is not None
        told = repr(runtime.live.settings)
        assert len(told) < 1000
        assert "CastLists(shipped lists, a mapping: " in told


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"opt_level": "O2", "half_dtype": "float16", "keep_fp32": ["0"], "cast_buffers": False},
        {"opt_level": "O1", "half_dtype": "float16", "loss_scale": 128.0, "check_finite": True, "num_losses": 2},
        {"opt_level": "O3", "keep_batchnorm_fp32": True, "cast_model_outputs": torch.float32},
    ],
)
def test_settings_come_back_from_plain_data(options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0, **options)
    live = runtime.live.settings
    again = Settings.of_plain_data(live.as_plain_data(), live.lists)
    assert again == live


class TestTheDifference:
    """In the error of a call that asks for other settings than those that are live."""

    def told(self, live: dict[str, Any], asked: dict[str, Any]) -> list[str]:
        """The settings that the error names, one by one."""
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

    @pytest.mark.parametrize(
        ("live", "asked", "told"),
        [
            ({}, {"opt_level": "O0"}, "opt_level is 'O1' (this call: 'O0')"),
            ({}, {"half_dtype": "half"}, "half_dtype is torch.bfloat16 (this call: torch.float16)"),
            ({"half_dtype": None, "opt_level": "O4"}, {}, "opt_level is 'O4' (this call: 'O1')"),
            ({}, {"loss_scale": 8.0}, "loss_scale is 1.0 (this call: 8.0)"),
            ({}, {"loss_scale": "dynamic"}, "loss_scale is 1.0 (this call: 'dynamic')"),
            ({}, {"patch_torch_functions": False}, "patch_torch_functions is True (this call: False)"),
            ({}, {"cast_model_type": torch.float32}, "cast_model_type is None (this call: torch.float32)"),
            ({}, {"num_losses": 2}, "num_losses is 1 (this call: 2)"),
            ({}, {"cast_model_outputs": "float32"}, "cast_model_outputs is None (this call: torch.float32)"),
            ({}, {"exact_hooks": True}, "exact_hooks is False (this call: True)"),
            ({}, {"profile_casts": True}, "profile_casts is False (this call: True)"),
            ({}, {"check_finite": True}, "check_finite is False (this call: True)"),
            ({}, {"fused_linear": False}, "fused_linear is True (this call: False)"),
            ({}, {"on_overflow": "raise"}, "on_overflow is 'explain' (this call: 'raise')"),
            ({"on_overflow": print}, {"on_overflow": "log"}, "on_overflow is 'builtins.print' (this call: 'log')"),
            (
                {"on_overflow": [].append},
                {"on_overflow": [1].append},
                "on_overflow is 'builtins.list.append' (this call: 'another builtins.list.append')",
            ),
            ({}, {"growth_factor": 4}, "growth_factor is 2.0 (this call: 4.0)"),
            ({}, {"backoff_factor": 0.25}, "backoff_factor is 0.5 (this call: 0.25)"),
            ({}, {"scale_window": 7}, "scale_window is 2000 (this call: 7)"),
            ({}, {"hysteresis": 2}, "hysteresis is 1 (this call: 2)"),
            ({}, {"min_loss_scale": 1}, f"min_loss_scale is {2.0**-24} (this call: 1.0)"),
            ({}, {"max_loss_scale": 4}, f"max_loss_scale is {2.0**24} (this call: 4.0)"),
            ({}, {"scaler": "apex"}, f"min_loss_scale is {2.0**-24} (this call: {2.0**-126})"),
            (
                {"loss_scale": "dynamic"},
                {"loss_scale": "dynamic", "init_scale": 4},
                "init_scale is 65536.0 (this call: 4.0)",
            ),
            (
                {"opt_level": "O2"},
                {"opt_level": "O2", "keep_batchnorm_fp32": False},
                "keep_batchnorm_fp32 is True (this call: False)",
            ),
            (
                {"opt_level": "O2"},
                {"opt_level": "O2", "master_weights": False},
                "master_weights is True (this call: False)",
            ),
            (
                {"opt_level": "O2", "keep_fp32": "0"},
                {"opt_level": "O2", "keep_fp32": nn.LayerNorm},
                "keep_fp32 is ['0'] (this call: ['LayerNorm'])",
            ),
            ({"opt_level": "O2"}, {"opt_level": "O2", "keep_fp32": "0"}, "keep_fp32 is None (this call: ['0'])"),
        ],
        ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
    )
    @pytest.mark.filterwarnings("ignore:on_overflow=:ampatch.errors.AmpWarning")  # under a static scale
    def test_an_argument_is_named_with_both_values_and_no_other(
        self, live: dict[str, Any], asked: dict[str, Any], told: str
    ) -> None:
        assert self.told(live, asked) == [told]

    def test_several_are_all_named(self) -> None:
        assert self.told({}, {"loss_scale": 8.0, "num_losses": 2, "scale_window": 5}) == [
            "loss_scale is 1.0 (this call: 8.0)",
            "scale_window is 2000 (this call: 5)",
            "num_losses is 1 (this call: 2)",
        ]

    def test_what_follows_from_the_level_is_left_out_and_what_was_typed_is_not(self) -> None:
        assert self.told({}, {"opt_level": "O2", "master_weights": False, "loss_scale": 2.0}) == [
            "opt_level is 'O1' (this call: 'O2')",
            "master_weights is None (this call: False)",
            "loss_scale is 1.0 (this call: 2.0)",
        ]

    def test_of_init(self) -> None:
        amp.init(half_dtype=torch.bfloat16, allow_banned=True)
        with pytest.raises(
            UsageError, match=r"set up by amp\.init \(this call: amp\.initialize\);.* allow_banned is True"
        ):
            amp.initialize(net(), **BFLOAT16)

    def test_init_says_what_is_live(self) -> None:
        amp.initialize(net(), opt_level="O3", **BFLOAT16)
        with pytest.raises(UsageError, match=r"set up already, at opt_level='O3' in torch\.bfloat16; type amp\.deinit"):
            amp.init()

    def test_an_edited_file_is_told_entry_by_entry(self, tmp_path: Path) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("blacklist:\n  torch: [mm]\n")
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

    def test_lines_that_only_moved_are_no_difference(self, tmp_path: Path) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("blacklist:\n  torch: [mm]\n")
        amp.initialize(net(), cast_lists=file, **BFLOAT16)
        file.write_text("# why\nblacklist:\n  torch: [mm]\n")
        amp.initialize(net(), cast_lists=file, **BFLOAT16)

    @pytest.mark.parametrize(("number", "more"), [(3, ""), (4, ", and 1 more"), (6, ", and 3 more")])
    def test_of_many_entries_a_few_are_told_and_then_how_many_more(self, number: int, more: str) -> None:
        names = ["addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm"][:number]
        (told,) = self.told({}, {"cast_lists": {"unlisted": {"torch": names}}})
        assert told.count("this call: on no list") == 3
        assert told.endswith(f"(this call: on no list){more}")

    @pytest.mark.parametrize(
        ("live", "asked", "told"),
        [
            (
                {"blacklist": {"torch": ["mm"]}},
                {"blacklist": {"torch": [{"name": "mm", "when": {"mat2": [1, "2"]}}]}},
                "torch.mm is in the blacklist by cast_lists (this call: in the blacklist when mat2='2'|1 by cast_lists",
            ),
            (
                {"blacklist": {"torch": ["mm"]}},
                {"blacklist": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}},
                "torch.mm is in the blacklist by cast_lists (this call: in the whitelist by whitelist.yaml:",
            ),
            (
                {"blacklist": {"torch": ["sum"]}},
                {"blacklist": {"torch": [{"name": "sum", "via_dtype": True}]}},
                "torch.sum is in the blacklist by cast_lists (this call: in the blacklist via_dtype by cast_lists)",
            ),
            (
                {"banned": {"torch": [{"name": "mm", "instead": "use a"}]}},
                {"banned": {"torch": [{"name": "mm", "instead": "use b"}]}},
                "torch.mm is banned by cast_lists (this call: there too, with another `instead`)",
            ),
        ],
        ids=["when", "dtypes", "via_dtype", "instead"],
    )
    def test_the_options_of_an_entry_are_told(self, live: object, asked: object, told: str) -> None:
        (found,) = self.told({"cast_lists": live}, {"cast_lists": asked})
        assert found.startswith(f"cast_lists: {told}")

    def test_of_lists_of_one_half_type_which_is_said(self) -> None:
        (found,) = self.told({}, {"cast_lists": {"unlisted": {"torch": [{"name": "mm", "dtypes": ["float16"]}]}}})
        assert found.endswith("(this call: on no list) in float16")

    def test_lists_of_a_level_that_has_none_are_left_out(self) -> None:
        (found,) = self.told({"cast_lists": {"unlisted": {"torch": ["mm"]}}}, {"opt_level": "O2"})
        assert found == "opt_level is 'O1' (this call: 'O2')"

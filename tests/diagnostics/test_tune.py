"""`amp.tune` and `ampatch tune`: trainings with planted culprits, with noise, stopped and resumed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from command_line import ampatch
from hypothesis import given
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _device
from torch.utils.flop_counter import FlopCounterMode

from ampatch import amp
from ampatch.casting import cast_observers
from ampatch.diagnostics.tune import search
from ampatch.diagnostics.tune.functions import TrainingRecorder
from ampatch.diagnostics.tune.trainings import fingerprint
from ampatch.errors import AmpWarning, CastListError, OptionError, UsageError
from ampatch.runtime import runtime


def spread(x: Tensor) -> Tensor:
    """A variance as the difference of two large numbers, of which half types keep no digit."""
    return (x * x).mean() - x.mean() ** 2


def shifted(x: Tensor) -> Tensor:
    """Loses what it adds to a large number."""
    return (x + 1000) - 1000


def harmless(x: Tensor) -> Tensor:
    return x * 2


WHITELISTED = {"whitelist": {__name__: ["spread", "shifted", "harmless"]}}


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.part = Part()
        self.metric = math.nan

    def forward(self, off: Callable[[Trained, Tensor], float], x: Tensor) -> float:
        return off(self, x)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return spread(x)


def started(options: dict[str, Any]) -> Trained:
    """Returns an initialized model after a backward pass and a step."""
    model = Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    with amp.scale_loss(model.layer(torch.randn(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return model


class Probe:
    """A training of one step, whose metric is how far a function is off in this precision: 0 is best.

    Args:
        off: returns how far it is off, given the model and float32 numbers around 30.
    """

    def __init__(self, off: Callable[[Trained, Tensor], float]) -> None:
        self.off = off
        self.calls: list[Mapping[str, Any]] = []

    def train(self, amp_options: dict[str, Any]) -> Trained:
        self.calls.append(amp_options)
        model = started(amp_options)
        model.metric = model(self.off, 30 + torch.rand(64, generator=torch.Generator().manual_seed(1)))
        return model

    def tuned(self, tolerance: float | str = 0.01, **options: Any) -> Any:
        usual = {
            "train": self.train,
            "evaluate": metric_of,
            "half_dtype": "bfloat16",
            "higher_is_better": False,
            "seeds": 1,
            "progress": False,
            "cast_lists": WHITELISTED,
        }
        return amp.tune(tolerance=tolerance, **usual | options)


def metric_of(model: Trained) -> float:
    return model.metric


def error(value: Tensor, right: Tensor) -> float:
    value, right = value.detach().double(), right.detach()
    return float((value - right).abs().max() / right.abs().max())


def spread_error(x: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> float:
    return error(of(x) if of else spread(x), x.double().var(correction=0))


def spreads_in_half(x: Tensor) -> bool:
    return not 0.01 < spread(x).item() < 1


def all_three(_: Trained, x: Tensor) -> float:
    harmless(x)
    return max(spread_error(x), error(shifted(x), x.double()))


def only_spread(_: Trained, x: Tensor) -> float:
    return error(harmless(x), 2 * x.double()) * 0 + spread_error(x)


# What it finds


def test_lists_that_keep_the_metric_need_no_overlay() -> None:
    tuning = Probe(lambda _, x: error(harmless(x), 2 * x.double())).tuned()
    assert (tuning.verdict, tuning.complete, tuning.float32, tuning.runs) == ("passes", True, (), 2)
    assert tuning.share == 1
    assert yaml.safe_load(tuning.overlay) is None
    assert "no overlay is needed" in str(tuning)


@pytest.mark.parametrize("spelling", ["torch.matmul", "torch.Tensor.matmul", "torch.Tensor.__matmul__"])
def test_a_function_moves_with_its_spellings(spelling: str) -> None:
    def off(_: Trained, x: Tensor) -> float:
        rows, columns = x.view(16, 4), x.view(4, 16)
        right = rows.double() @ columns.double()
        return max(error(rows @ columns, right), error(operator.attrgetter(spelling[6:])(torch)(rows, columns), right))

    tuning = Probe(off).tuned(1e-5, cast_lists=None)
    assert tuning.float32 == ("torch.Tensor.__matmul__",)
    assert tuning.needed[0][1].verdict == "fails"
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", half_dtype="bfloat16", cast_lists=yaml.safe_load(tuning.overlay), verbosity=0)
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    for product in (torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__rmatmul__):
        assert product(half, half).dtype is torch.float32


def test_a_culprit_on_the_users_list_is_the_only_function_that_moves(tmp_path: Path) -> None:
    probe = Probe(only_spread)
    tuning = probe.tuned()
    assert (tuning.verdict, tuning.float32) == ("passes", (f"{__name__}.spread",))
    assert yaml.safe_load(tuning.overlay) == {"blacklist": {__name__: ["spread"]}}
    assert tuning.first.verdict == "fails"
    # What the file promises holds with the file.
    tuning.save(tmp_path / "casts.yaml")
    options = {"opt_level": "O1", "half_dtype": "bfloat16", "cast_lists": [WHITELISTED, str(tmp_path / "casts.yaml")]}
    torch.manual_seed(0)
    trained = probe.train(options)
    assert (0, trained.metric) in tuning.chosen.metrics
    assert trained.metric < 0.01 < tuning.first.mean
    amp.deinitialize()


@pytest.fixture(scope="module")
def whole() -> Any:
    """A search that ran until its end."""
    return Probe(all_three).tuned()


def test_two_culprits_move_and_nothing_else(whole: Any) -> None:
    assert whole.float32 == (f"{__name__}.shifted", f"{__name__}.spread")
    assert [path for path, without in whole.needed if without.verdict == "fails"] == list(whole.float32)
    assert all(without in whole.trials for _, without in whole.needed)


@pytest.mark.slow
def test_a_culprit_on_the_blacklist_of_a_submodule_moves_in_the_other_modules() -> None:
    lists = {**WHITELISTED, "modules": {"part": {"blacklist": {__name__: ["spread"]}}}}
    tuning = Probe(only_spread).tuned(cast_lists=lists)
    assert (tuning.verdict, tuning.float32) == ("passes", (f"{__name__}.spread",))
    assert not any("stays as it is" in note for note in tuning.notes)


@pytest.mark.parametrize("elsewhere", [{}, WHITELISTED], ids=["on no list elsewhere", "whitelisted elsewhere"])
def test_a_culprit_whitelisted_for_a_submodule_is_named_in_the_notes(elsewhere: dict[str, Any]) -> None:
    lists = {**elsewhere, "modules": {"part": {"whitelist": {__name__: ["spread"]}}}}
    tuning = Probe(lambda model, x: spread_error(x, model.part)).tuned(cast_lists=lists)
    assert tuning.verdict == "fails"
    assert any(
        note.startswith(f"{__name__}.spread stays as it is in submodules that 'part' matches (cast_lists)")
        for note in tuning.notes
    )


def test_an_unlisted_culprit_moves_without_its_inputs_producer() -> None:
    def off(model: Trained, x: Tensor) -> float:
        half = model.layer(x[:4])
        return error(half.exp(), half.double().exp())

    probe = Probe(off)
    tuning = probe.tuned(1e-5, cast_lists=None)
    # exp of bfloat16 rounds once; in float32 it does not. The layer, and so all FLOPs, stay in half.
    assert (tuning.float32, tuning.share) == (("torch.Tensor.exp",), 1)


@pytest.mark.slow
def test_functions_called_by_a_moved_function_need_no_line_of_their_own() -> None:
    def off(_: Trained, x: Tensor) -> float:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2)
        x = x.view(8, 8) - 30
        with amp.disable_casts():
            right = copy.deepcopy(attention).double()(x.double(), x.double(), x.double(), need_weights=False)[0]
        return error(attention(x, x, x, need_weights=False)[0], right)

    tuning = Probe(off).tuned(1e-5, cast_lists=None)
    assert (tuning.verdict, tuning.first.verdict) == ("passes", "fails")
    assert tuning.float32 == ("torch.nn.functional.multi_head_attention_forward",)
    # Of the set without it, amp warned that it undoes the edit of the outer function: that is past.
    assert not any("scaled_dot_product_attention (in the whitelist)" in note for note in tuning.notes)


@pytest.mark.slow
def test_amp_warnings_about_the_chosen_lists_become_notes() -> None:
    def off(_: Trained, x: Tensor) -> float:
        is_between = harmless(x).dtype is torch.float32
        warnings.warn("mind this" if not (is_between or spreads_in_half(x)) else "past", AmpWarning, stacklevel=1)
        return only_spread(_, x)

    tuning = Probe(off).tuned()
    assert tuning.float32 == (f"{__name__}.spread",)
    assert "mind this" in tuning.notes


def test_a_culprit_that_only_evaluate_calls_moves() -> None:
    def evaluate(model: Trained) -> float:
        x = 30 + torch.rand(64, generator=torch.Generator().manual_seed(1))
        model.layer(x.view(16, 4))
        return model(only_spread, x)

    tuning = Probe(lambda _, x: 0.0).tuned(evaluate=evaluate)
    assert tuning.float32 == (f"{__name__}.spread",)


@pytest.mark.slow
def test_the_share_of_flops_in_half_is_measured() -> None:
    def off(model: Trained, x: Tensor) -> float:
        product = x.view(16, 4) @ x.view(4, 16)
        if product.dtype is torch.float32:  # so that the share is not what the first trial says
            model.layer(x.view(16, 4))
        return error(product, x.double().view(16, 4) @ x.double().view(4, 16))

    tuning = Probe(off).tuned(1e-5, cast_lists=None)
    assert tuning.float32 == ("torch.Tensor.__matmul__",)
    linear = 2 * 2 * 4 * 4 + 2 * 16 * 4 * 4  # the forward pass of a step, and another one
    products = 2 * (2 * 16 * 16 * 4)  # in float32 and in float64
    assert tuning.share_is_measured
    assert tuning.share == pytest.approx(linear / (linear + products))


def test_the_list_with_most_flops_in_half_is_chosen_before_the_shortest() -> None:
    def off(_: Trained, x: Tensor) -> float:
        low = x[:4].bfloat16()
        is_mended = low.exp().dtype is low.sin().dtype is torch.float32
        is_half = (x.view(16, 4) @ x.view(4, 16)).dtype is torch.bfloat16
        return float(is_half and not is_mended)

    tuning = Probe(off).tuned(cast_lists=None)
    assert (tuning.float32, tuning.share) == (("torch.Tensor.exp", "torch.Tensor.sin"), 1)
    assert min(len(trial.float32) for trial in tuning.trials if trial.passes) == 1


def test_nan_in_half_fails_a_trial() -> None:
    tuning = Probe(lambda _, x: math.nan if spreads_in_half(x) else 0.0).tuned()
    assert tuning.float32 == (f"{__name__}.spread",)
    assert "metric nan with seed 0" in tuning.overlay


def test_an_exception_in_half_fails_a_trial() -> None:
    def off(_: Trained, x: Tensor) -> float:
        if spreads_in_half(x):
            raise ArithmeticError("no spread")
        return error(shifted(x), x.double())  # which only a run that did not raise shows

    tuning = Probe(off).tuned()
    assert tuning.float32 == (f"{__name__}.shifted", f"{__name__}.spread")
    assert "ArithmeticError: no spread" in tuning.overlay
    assert tuning.first.error == "ArithmeticError: no spread"


def test_a_training_that_raises_does_not_run_again_to_be_watched() -> None:
    def off(_: Trained, x: Tensor) -> float:
        harmless(x)
        if runtime.live is not None and runtime.live.settings.patches_functions:
            raise ArithmeticError("whatever is in float32")
        return 0.0

    probe = Probe(off)
    assert probe.tuned().verdict == "fails"
    assert len(probe.calls) == 3  # float32, the lists as they are, and all in float32


def test_a_search_without_a_passing_list_cannot_be_saved(tmp_path: Path) -> None:
    @amp.half_function
    def fixed(x: Tensor) -> Tensor:
        return spread(x)

    tuning = Probe(lambda _, x: spread_error(x, fixed)).tuned(cast_lists=None)
    assert (tuning.verdict, tuning.complete) == ("fails", True)
    assert any("an amp decorator fixes its type" in note for note in tuning.notes)
    with pytest.raises(UsageError, match="No cast list keeps the metric"):
        tuning.save(tmp_path / "casts.yaml")
    assert list(tmp_path.iterdir()) == []


# The search algorithm

_PATHS = tuple("abcdefgh")


@given(st.lists(st.frozensets(st.sampled_from(_PATHS), min_size=1), min_size=1, max_size=3))
def test_a_minimal_set_passes_and_fails_without_any_of_its_functions(needed: list[frozenset[str]]) -> None:
    def passes(kept: frozenset[str]) -> bool:
        return all(each & kept for each in needed)

    found = search.minimal(passes, _PATHS)
    assert passes(found)
    assert not any(passes(found - {each}) for each in found)
    assert search.restored(passes, frozenset(_PATHS), _PATHS) <= frozenset(_PATHS)


def test_of_two_sufficient_functions_the_first_is_kept() -> None:
    assert search.minimal(lambda kept: bool(kept & {"b", "g"}), _PATHS) == {"b"}


def test_one_culprit_among_64_takes_at_most_14_trials() -> None:
    asked = []

    def passes(kept: frozenset[str]) -> bool:
        asked.append(kept)
        return "37" in kept

    assert search.minimal(passes, list(map(str, range(64)))) == {"37"}
    assert len(asked) <= 14


# Noise


def noisy(amount: float, half_is_worse_by: float = 0.0, calls: Callable[[Tensor], Any] = id) -> Probe:
    """A metric with noise that differs from run to run, though the seed is the same."""
    noise = itertools.count()

    def off(_: Trained, x: Tensor) -> float:
        calls(x)
        return amount * math.sin(97 * next(noise)) + (half_is_worse_by if spreads_in_half(x) else 0)

    return Probe(off)


def test_noise_beyond_the_tolerance_is_told_with_the_seeds_needed(tmp_path: Path) -> None:
    journal = tmp_path / "tune.json"
    tuning = noisy(1.0).tuned(0.9, seeds=3, journal=journal)
    assert (tuning.verdict, tuning.float32, tuning.runs) == ("cannot tell", (), 6)
    # Watching a run takes time.
    assert [run["seed"] for run in json.loads(journal.read_text())["runs"] if run["observed"]] == [0]
    assert "cannot tell whether the metric stays within the tolerance" in str(tuning)
    needed = math.floor(3 * (tuning.first.noise / (0.9 - tuning.first.worse)) ** 2 + 1)
    assert f"about seeds={needed}," in str(tuning)
    with pytest.raises(UsageError, match="cannot tell"):
        tuning.save(tmp_path / "casts.yaml")


def test_noise_far_beyond_the_tolerance_is_told_without_a_number_of_seeds() -> None:
    tuning = noisy(1.0).tuned(0.01, seeds=3)
    assert "standard deviation" in " ".join(tuning.notes)
    assert "Give more seeds, a larger tolerance, or a metric with less noise." in tuning.conclusion()


def test_a_trial_that_fails_beyond_the_noise_stops_after_one_seed() -> None:
    tuning = noisy(0.01, half_is_worse_by=5.0, calls=lambda x: (shifted(x), harmless(x))).tuned(1.0, seeds=3)
    assert tuning.float32 == (f"{__name__}.spread",)
    assert tuning.chosen.noise > 0
    others = [each for each in tuning.trials[1:] if each.verdict == "fails"]
    assert {len(each.metrics) for each in others} == {1}
    assert len(tuning.first.metrics) == 3


@pytest.mark.slow
def test_noise_of_training_in_float32_is_told_as_such() -> None:
    tuning = noisy(1.0, half_is_worse_by=50.0).tuned(0.01, seeds=3)
    assert (tuning.first.verdict, tuning.verdict, tuning.complete) == ("fails", "cannot tell", True)
    assert f"With {__name__}.spread and torch.nn.functional.linear in float32 it is metric" in tuning.conclusion()


@pytest.mark.parametrize(("seeds", "told"), [(1, "the noise of the metric is unknown"), (2, "the same for all seeds")])
def test_seeds_that_show_no_noise_are_told(seeds: int, told: str) -> None:
    tuning = Probe(only_spread).tuned(seeds=seeds)
    assert any(told in note for note in tuning.notes)
    assert ("\n+/-: two standard errors of " in str(tuning)) == (seeds > 1)


def test_higher_is_better() -> None:
    probe = Probe(lambda _, x: -spread_error(x))
    assert probe.tuned(higher_is_better=True).float32 == (f"{__name__}.spread",)
    assert probe.tuned(higher_is_better=False).float32 == ()


def test_a_tolerance_in_percent_is_of_the_metric_in_float32() -> None:
    def off(_: Trained, x: Tensor) -> float:
        return 100 + only_spread(_, x)  # in half 100 + 1 at least

    tuning = Probe(off).tuned("0.5%")
    assert tuning.float32 == (f"{__name__}.spread",)
    assert tuning.tolerance == pytest.approx(0.5, rel=1e-3)
    assert Probe(off).tuned("90000%").float32 == ()
    with pytest.raises(OptionError, match="which is 0"):
        Probe(lambda _, x: 0.0 * x.sum().item()).tuned("1%")


# Seeds, and what a run leaves


def test_seeds_reach_all_generators() -> None:
    drawn = []

    def off(_: Trained, x: Tensor) -> float:
        drawn.append((torch.rand(()).item(), random.random(), np.random.random()))
        return 0.0

    Probe(off).tuned(seeds=(3, 5))
    assert drawn[:2] == drawn[2:]
    assert not any(first == second for first, second in zip(drawn[0], drawn[1], strict=True))


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_each_run_begins_in_the_state_of_the_first_which_is_restored(ends: str) -> None:
    seen = []

    def off(_: Trained, x: Tensor) -> float:
        seen.append((torch.get_default_dtype(), torch.get_num_threads()))
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.backends.cudnn.benchmark = True
        torch.set_default_device("meta")
        random.random()
        if ends == "raises":
            raise ValueError("mine")
        return 0.0

    torch.manual_seed(11)
    random.seed(11)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.backends.cudnn.benchmark
    if ends == "raises":
        with pytest.raises(ValueError, match="mine") as caught:
            Probe(off).tuned()
        assert "raised this in float32" in "".join(caught.value.__notes__)
    else:
        Probe(off).tuned()
        assert len(seen) == 2
    assert len(set(seen)) == 1
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads(), torch.backends.cudnn.benchmark) == before[1:]
    assert torch.get_default_dtype() is torch.float32
    assert _device.CURRENT_DEVICE is None
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert runtime.live is None
    assert runtime.before_close == []


# The budget


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2, 3, 5, 8])
def test_a_search_runs_as_often_as_its_budget_says(runs: int, whole: Any) -> None:
    probe = Probe(all_three)
    assert whole.runs > 8
    tuning = probe.tuned(budget=f"{runs} runs")
    assert len(probe.calls) == tuning.runs == runs
    assert not tuning.complete
    assert "The budget ended before the search did." in str(tuning)
    if tuning.verdict == "passes":  # then what it has found so far holds, and may be too large
        assert set(tuning.float32) > set(whole.float32) or tuning.float32 == whole.float32
        assert tuning.chosen.passes
    else:
        assert runs < 3  # float32, the lists as they are, and all in float32


def test_a_budget_that_ends_before_float32_names_no_tolerance() -> None:
    shown = str(Probe(all_three).tuned(budget="1 run", seeds=2))
    assert "nan" not in shown
    assert "tolerance" not in shown.splitlines()[0]


def test_a_run_that_would_exceed_the_time_budget_is_not_begun() -> None:
    def off(_: Trained, x: Tensor) -> float:
        time.sleep(0.5)
        return only_spread(_, x)

    probe = Probe(off)
    tuning = probe.tuned(budget=timedelta(seconds=1.3))
    assert not tuning.complete
    assert len(probe.calls) <= 2


def test_the_time_of_watched_runs_counts_for_watched_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 1000 + sum(took))
    clock, took = itertools.count(), [0.0]

    def off(_: Trained, x: Tensor) -> float:
        took.append(100.0 if _is_watched() else 1.0)
        return only_spread(_, x)

    tuning = Probe(off).tuned(budget="190 s")
    assert (tuning.complete, tuning.float32) == (True, (f"{__name__}.spread",))
    assert not tuning.share_is_measured


# The journal


@pytest.mark.parametrize("before_last", [False, True])
def test_a_stopped_search_resumes_from_its_journal(before_last: bool, tmp_path: Path, whole: Any) -> None:
    journal = tmp_path / "tune.json"
    stop_at = whole.runs - 1 if before_last else 2
    runs = iter(range(stop_at))

    def off(model: Trained, x: Tensor) -> float:
        if next(runs, None) is None:
            raise KeyboardInterrupt
        return all_three(model, x)

    with pytest.raises(KeyboardInterrupt):
        Probe(off).tuned(journal=journal)
    assert runtime.live is None
    assert len(json.loads(journal.read_text())["runs"]) == stop_at
    tuning = Probe(all_three).tuned(journal=str(journal))
    assert (tuning.resumed, tuning.runs) == (stop_at, whole.runs - stop_at)
    of_this_call = {name: getattr(whole, name) for name in ("runs", "resumed", "seconds", "about")}
    assert dataclasses.replace(tuning, **of_this_call) == whole
    third = Probe(all_three)
    assert third.tuned(journal=journal).float32 == whole.float32
    assert third.calls == []


@pytest.mark.slow
def test_more_seeds_reuse_the_journal(tmp_path: Path) -> None:
    Probe(only_spread).tuned(journal=tmp_path / "tune.json", seeds=1)
    probe = Probe(only_spread)
    tuning = probe.tuned(journal=tmp_path / "tune.json", seeds=2, tolerance=0.02)
    assert tuning.float32 == (f"{__name__}.spread",)
    assert tuning.baseline.metrics[0][0] == 0
    assert {each["seed"] for each in json.loads((tmp_path / "tune.json").read_text())["runs"]} == {0, 1}


def other_metric(model: Trained) -> float:
    return -model.metric


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"evaluate": other_metric}, "evaluate"),
        ({"half_dtype": "float16"}, "half_dtype"),
        ({"opt_level": "O4", "half_dtype": None}, "opt_level"),
        ({"cast_lists": None}, "the cast lists"),
        ({"cast_lists": [WHITELISTED, {"modules": {"layer": "float32"}}]}, "the cast lists"),
    ],
)
def test_a_journal_of_another_search_is_refused(options: dict[str, Any], differs: str, tmp_path: Path) -> None:
    journal = tmp_path / "tune.json"
    Probe(only_spread).tuned(journal=journal, budget="1 run")
    before = journal.read_text()
    with pytest.raises(OptionError, match=f"is of another search: it differs in .*{differs}"):
        Probe(only_spread).tuned(journal=journal, **options)
    assert journal.read_text() == before


def test_a_functions_fingerprint_depends_on_its_name_and_source_only() -> None:
    def same(model: Trained) -> float:
        return model.metric + 1

    same.__qualname__ = metric_of.__qualname__
    renamed = types.FunctionType(metric_of.__code__, {})
    renamed.__qualname__, renamed.__module__ = "other", metric_of.__module__
    prints = [fingerprint(each) for each in (metric_of, same, renamed)]
    assert len(set(prints)) == 3
    assert fingerprint(functools.partial(metric_of)) == prints[0]
    assert fingerprint(Probe(only_spread).train) == fingerprint(Probe(all_three).train)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": "ampatch tune journal", "version": 3, "about": {}, "runs": [{}]}',
        '{"format": "ampatch tune journal", "version": 1, "about": {}, "runs": []}',
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(OptionError, match="is no journal of this version"):
        Probe(only_spread).tuned(journal=tmp_path / "tune.json")
    assert (tmp_path / "tune.json").read_text() == text


# Bad input


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tolerance": 0}, "tolerance is 0; expected"),
        ({"tolerance": math.nan}, "tolerance is nan; expected"),
        ({"tolerance": "much"}, "tolerance is 'much'; expected"),
        ({"tolerance": True}, "tolerance is True; expected"),
        ({"higher_is_better": None}, "higher_is_better is None; expected True, as for an accuracy"),
        ({"budget": 20}, "budget is 20; expected a time with its unit .* or a number of runs"),
        ({"budget": "20"}, "budget is '20'; expected"),
        ({"budget": "0 runs"}, "budget is '0 runs'; expected .* above 0"),
        ({"budget": "1.5 runs"}, "budget is '1.5 runs'; expected"),
        ({"budget": "2 weeks"}, "budget is '2 weeks'; expected"),
        ({"budget": timedelta(0)}, "above 0"),
        ({"seeds": 0}, "seeds is 0; expected"),
        ({"seeds": (1, 1)}, "seeds is .* different seeds"),
        ({"seeds": "3"}, "seeds is '3'; expected"),
        ({"seeds": (-1,)}, "seeds is .*; expected"),
        ({"opt_level": "O2"}, "opt_level is 'O2', which casts no functions by lists; expected 'O1' or 'O4'"),
        ({"opt_level": "O0"}, "expected 'O1' or 'O4'"),
        ({"half_dtype": "float64"}, "half_dtype"),
        ({"journal": "absent/tune.json"}, "there is no folder"),
        ({"journal": "tune.txt"}, "does not end with .json"),
        ({"train": 3}, "train is 'int'; expected a function that trains"),
        ({"evaluate": 0.5}, "evaluate is 'float'; expected a function that returns the metric"),
    ],
)
def test_wrong_arguments_are_refused_before_any_run(options: dict[str, Any], told: str) -> None:
    probe = Probe(only_spread)
    with pytest.raises(OptionError, match=told):
        probe.tuned(**{"tolerance": 0.1, **options})
    assert probe.calls == []


def test_faults_of_cast_lists_are_raised_before_any_run() -> None:
    probe = Probe(only_spread)
    with pytest.raises(CastListError):
        probe.tuned(cast_lists={"whitelist": {"torch": ["sofmax"]}})
    assert probe.calls == []


def test_tune_is_refused_while_amp_is_set_up_or_a_report_is_open() -> None:
    with amp.report(), pytest.raises(UsageError, match=r"outside of the block of amp.report\(\)"):
        Probe(only_spread).tuned()
    with amp.init(half_dtype="bfloat16"):
        live = runtime.live
        with pytest.raises(UsageError, match="amp is set up already"):
            Probe(only_spread).tuned()
        assert runtime.live is live


def test_tune_is_refused_in_a_group_of_several_ranks() -> None:
    probe = Probe(only_spread)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UsageError, match="in a group of several ranks"):
            probe.tuned()
    finally:
        torch.distributed.destroy_process_group()
    assert probe.calls == []


KEPT = Trained()


def same_model(options: dict[str, Any]) -> Trained:
    amp.initialize(KEPT, torch.optim.SGD(KEPT.parameters(), lr=0.1), verbosity=0, **options)
    return KEPT


def own_seed(options: dict[str, Any]) -> Trained:
    torch.manual_seed(42)
    return started(options)


def casts_disabled(options: dict[str, Any]) -> Trained:
    with amp.disable_casts():
        return started(options)


def started_with(**changes: Any) -> Callable[[dict[str, Any]], Trained]:
    return lambda options: started(options if options["opt_level"] == "O0" else options | changes)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            lambda _: Trained(),
            r"train did not call amp.initialize.* Type amp.initialize\(model, optimizer, \*\*amp_options\)",
        ),
        (
            lambda _: started({"opt_level": "O1"}),
            "train called amp.initialize with other opt_level than its argument has",
        ),
        (
            started_with(cast_lists={"blacklist": {"*": ["mm"]}}),
            "train called amp.initialize with other cast_lists than its argument has",
        ),
        (
            started_with(half_dtype="float16"),
            "train called amp.initialize with other half_dtype than its argument has",
        ),
        (own_seed, r"train set torch's seed itself, to 42; .* torch.manual_seed\(torch.initial_seed\(\)\)"),
        (lambda options: [started(options)].clear(), "train returned None; expected the trained model"),
        (same_model, "train returned the same model as in the run before"),
        (casts_disabled, "no function that train called got half tensors"),
    ],
)
def test_a_train_function_that_falsifies_the_result_is_refused(train: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Probe(only_spread).tuned(train=train, evaluate=lambda _: 1.0, cast_lists=None, seeds=2)
    assert runtime.live is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0.5", "evaluate returned '0.5'; expected one number"),
        (None, "evaluate returned None; expected one number"),
        (True, "evaluate returned True; expected one number"),
        (torch.ones(2), "evaluate returned"),
        (1j, "evaluate returned 1j"),
        (math.nan, "the metric is nan in float32 with seed 0"),
        (math.inf, "the metric is inf in float32 with seed 0"),
    ],
)
def test_a_metric_that_is_no_number_is_refused(value: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Probe(only_spread).tuned(train=started, evaluate=lambda _: value)


def test_a_metric_may_be_a_tensor_with_one_number() -> None:
    tuning = Probe(only_spread).tuned(train=started, evaluate=lambda _: torch.tensor([0.5]))
    assert tuning.baseline.mean == 0.5


def test_wrong_calls_of_amp_in_train_raise_instead_of_failing_a_trial() -> None:
    def off(_: Trained, x: Tensor) -> float:
        if spreads_in_half(x):
            amp.load_state_dict({"nothing": 1})
        return 0.0

    with pytest.raises(OptionError, match="nothing"):
        Probe(off).tuned()


# FLOPs


def test_flops_by_function_add_up_to_torchs_own_count() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, half_dtype="bfloat16", verbosity=0)
    lists = runtime.live.settings.lists  # type: ignore[union-attr]

    def forward(x: Tensor) -> Tensor:
        return torch.bmm(model(x), x.transpose(1, 2)).relu()

    with FlopCounterMode(display=False) as counter:
        forward(torch.ones(2, 4, 8))
    of_operators = counter.get_flop_counts()["Global"]
    with (
        TrainingRecorder(lists) as recorder,
        amp.scale_loss(forward(torch.ones(2, 4, 8)).float().sum(), optimizer) as scaled,
    ):
        scaled.backward()
    amp.deinitialize()
    observed = recorder.observed()
    assert observed.all_flops == observed.half_flops == counter.get_total_flops()
    by_path = observed.flops
    assert by_path["torch.bmm"] == of_operators[torch.ops.aten.bmm]
    products = ("torch.nn.functional.linear", "torch.bmm", "torch.nn.functional.conv1d")
    assert sum(by_path[name] for name in products) == observed.all_flops
    assert "torch.Tensor.relu" not in by_path  # which the half type holds exactly
    assert observed == type(observed)(**json.loads(json.dumps(dataclasses.asdict(observed))))


def test_flops_of_attention_on_the_cpu_are_counted() -> None:
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    with amp.init(half_dtype="bfloat16"):
        lists = runtime.live.settings.lists  # type: ignore[union-attr]
        with TrainingRecorder(lists) as recorder:
            F.scaled_dot_product_attention(query, query, query).sum().backward()
    (flops,) = [flops for path, flops in recorder.observed().flops.items() if "attention" in path]
    assert flops == 2 * 2 * (8 * 4 * 8) * 2


def test_a_metric_that_depends_on_the_recorder_is_taken_without_it() -> None:
    def off(model: Trained, x: Tensor) -> float:
        # Other threads' modules are not recorded.
        thread = threading.Thread(target=lambda: model.layer(x.view(16, 4)))
        thread.start()
        thread.join()
        return float(_is_watched()) if runtime.live and runtime.live.settings.patches_functions else 0.0

    probe = Probe(off)
    tuning = probe.tuned()
    assert (tuning.verdict, tuning.first.metrics, len(probe.calls)) == ("passes", ((0, 0.0),), 3)
    assert "other threads" in " ".join(tuning.notes)


def test_recording_the_chosen_lists_leaves_their_metric(tmp_path: Path) -> None:
    def off(_: Trained, x: Tensor) -> float:
        return only_spread(_, x) + 0.001 * float(_is_watched())

    tuning = Probe(off).tuned(journal=tmp_path / "tune.json")
    assert tuning.share_is_measured
    runs = json.loads((tmp_path / "tune.json").read_text())["runs"]
    (chosen,) = [each for each in runs if each["float32"] == [f"{__name__}.spread"]]
    assert chosen["observed"] is not None
    assert chosen["metric"] == tuning.chosen.mean


def _is_watched() -> bool:
    return cast_observers.observer is not None


# What it prints and writes


def test_dict_and_text_tell_the_result(monkeypatch: pytest.MonkeyPatch, whole: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # lines of the list stay whole
    data = json.loads(json.dumps(whole.to_dict()))
    assert data["float32"] == list(whole.float32)
    assert data["overlay"] == whole.overlay
    assert [each["verdict"] for each in data["trials"]] == [each.verdict for each in whole.trials]
    assert "amp.tune at O1 in bfloat16: 1 seed, tolerance 0.01, lower" in str(whole)
    assert whole.overlay.rstrip() in str(whole)


def test_the_overlay_names_its_evidence(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(WHITELISTED))
    tuning = Probe(only_spread).tuned(cast_lists=tmp_path / "mine.yaml", seeds=(4, 7))
    lines = tuning.overlay.splitlines()
    assert lines[0].startswith(f"# Found by ampatch tune on {tuning.about['date']}: ampatch {tuning.about['ampatch']}")
    assert "# O1 in bfloat16; seeds 4, 7." in lines
    assert any("mine.yaml, this file" in line for line in lines)
    assert any(line.startswith("#   float32 (O0)") for line in lines)
    assert any("without this file" in line and line.endswith(": fails") for line in lines)
    assert any("with this file" in line and line.endswith(": passes") for line in lines)
    assert "# FLOPs in half: 100% with this file, 100% without it." in lines
    assert any(line.startswith("    # In half: ") for line in lines)


def test_an_overlay_is_saved_as_yaml_only(tmp_path: Path) -> None:
    tuning = Probe(lambda _, x: 0.0).tuned()
    for name in ("casts.txt", "casts"):
        with pytest.raises(OptionError, match=r"does not end with \.yaml or \.yml"):
            tuning.save(tmp_path / name)
    tuning.save(tmp_path / "casts.yml")
    assert (tmp_path / "casts.yml").read_text() == tuning.overlay


def test_progress_is_a_line_for_each_run_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    took = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: sum(took))

    def off(_: Trained, x: Tensor) -> float:
        took.append(10.0)
        return only_spread(_, x)

    tuning = Probe(off).tuned(progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == tuning.runs
    assert lines[0].startswith("run 1: float32, seed 0: ")
    left = [line.partition("; about ")[2] for line in lines]
    assert left[:5] == ["10.0 s left", "", "", "50.0 s left", "40.0 s left"]  # all in float32 may be the last run
    assert "the lists as they are, seed 0" in lines[1]
    assert f"{__name__}.spread in float32" in " ".join(lines)


# The command

USERS_MODULE = """
from test_tune import WHITELISTED, Probe, metric_of as evaluate, only_spread

train = Probe(only_spread).train

def training():
    return train, evaluate

def options():
    return dict(train=train, evaluate=evaluate, cast_lists=WHITELISTED, tolerance=0.01, higher_is_better=False,
                seeds=1, half_dtype="bfloat16")

def raising():
    def bad(model):
        raise KeyError("metric")
    return train, bad

def misspelt():
    return {"train": train, "evaluate": evaluate, "tolerence": 1}

def half():
    return {"train": train}

def three():
    return train, evaluate, 0.1
"""


class TestCommand:
    @pytest.fixture(autouse=True)
    def _users_folder(self, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package("tune_package", module=USERS_MODULE)
        monkeypatch.chdir(tmp_path)
        sys.path.remove(str(tmp_path))  # the command itself searches the current folder

    def test_it_writes_a_list_that_loads(self) -> None:
        command = ["tune", "tune_package.module:options", "--out", "found.yaml"]
        status, out, _ = ampatch(*command)
        assert status == 0
        assert "Written to found.yaml." in out
        assert yaml.safe_load(Path("found.yaml").read_text()) == {"blacklist": {__name__: ["spread"]}}
        assert json.loads(Path("found.tune.json").read_text())["format"] == "ampatch tune journal"
        # Again, from the journal, over the file that it wrote itself.
        status, out, _ = ampatch(*command, "--json")
        data = json.loads(out)
        assert (status, data["runs"], data["float32"]) == (0, 0, [f"{__name__}.spread"])

    def test_arguments_come_from_the_command_line_too(self) -> None:
        options = ["--tolerance", "5%", "--lower-is-better", "--seeds", "0,2", "--half-dtype", "bfloat16", "--json"]
        status, out, _ = ampatch("tune", "tune_package.module:training", *options)
        data = json.loads(out)
        assert (status, data["seeds"], data["float32"], data["half_dtype"]) == (0, [0, 2], [], "bfloat16")
        assert data["tolerance"] == pytest.approx(0.05 * data["baseline"]["mean"])

    def test_a_budget_that_ends_too_early_writes_the_journal_only(self) -> None:
        status, out, _ = ampatch("tune", "tune_package.module:options", "--budget", "2 runs")
        assert status == 1
        assert "So far no list keeps the metric" in out
        assert not Path("casts.yaml").exists()
        assert Path("casts.tune.json").exists()

    def test_control_c_says_how_to_resume(self) -> None:
        stop = "calls = []\ndef evaluate(model):\n    calls.append(1)\n    if len(calls) == 3:\n"
        stop += "        raise KeyboardInterrupt\n    return model.metric\n"
        Path("tune_package", "module.py").write_text(USERS_MODULE + stop)
        status, _, err = ampatch("tune", "tune_package.module:options")
        assert status == 130
        assert "Stopped. The same command goes on after the last run in casts.tune.json." in err
        assert len(json.loads(Path("casts.tune.json").read_text())["runs"]) == 2

    def test_a_file_of_the_users_is_not_replaced(self) -> None:
        Path("casts.yaml").write_text("blacklist: {}\n")
        status, _, err = ampatch("tune", "tune_package.module:options")
        assert status == 1
        assert "casts.yaml exists, and `ampatch tune` has not written it." in err
        Path("casts.yaml").write_text("# Found by ampatch tune\n")
        status, _, err = ampatch("tune", "tune_package.module:options", "--cast-lists", "casts.yaml")
        assert status == 1
        assert "is among --cast-lists" in err

    @pytest.mark.parametrize(
        ("target", "told"),
        [
            ("", "expected MODULE:FUNCTION, such as tune_package.module:training."),
            (":three", "returned 3 values; expected train and evaluate, or a dict"),
            (":misspelt", "returned the unknown argument 'tolerence'. Did you mean 'tolerance'"),
            (":half", "returned a dict without 'evaluate'"),
            (":training", "tolerance and higher_is_better not given. Type --tolerance 0.005 and --h"),
        ],
    )
    def test_a_wrong_target_is_one_clear_line(self, target: str, told: str) -> None:
        status, _, err = ampatch("tune", f"tune_package.module{target}")
        assert status == 1
        (line,) = err.splitlines()
        assert line.startswith("ampatch: error: ")
        assert told in line

    def test_what_the_users_code_raises_is_one_error_with_its_line(self) -> None:
        options = ["--tolerance", "1", "--higher-is-better", "--seeds", "1"]
        status, _, err = ampatch("tune", "tune_package.module:raising", *options)
        assert status == 1
        (line,) = err.splitlines()
        assert "KeyError: 'metric', at tune_package/module.py:" in line
        assert "raised this in float32" in line
        assert runtime.live is None

"""`ampatch demo`: its data, its network, its report, and what it claims of mixed precision."""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from command_line import ampatch

from ampatch import demo
from ampatch.demo import digits, report, training
from ampatch.demo.network import DigitsNetwork
from ampatch.demo.plan import OPT_LEVELS, SETTINGS, Plan
from ampatch.demo.training import Result
from ampatch.opt_levels import LEVELS

pytest_plugins = ["demo_digits"]

EXPECTED = (
    "is not one of O0, O1:float16, O1:bfloat16, O2:float16, O2:bfloat16, O3:float16, O3:bfloat16, O4:bfloat16, "
    "O5:bfloat16, O6:bfloat16, or a level alone for all of its half types. Type for example O0,O1"
)
KEYS = [
    "opt_level",
    "half_dtype",
    "test_accuracy",
    "final_loss",
    "ms_per_step",
    "peak_memory_mib",
    "casts_per_step",
    "cache_hits_per_step",
    "skipped_steps",
    "loss_scale",
]
FLOAT32 = Result("O0", None, 0.99443, 0.00841, 7.126, 7.058, 0.0, 0.0, 0, 1.0)
MIXED = Result("O1", "float16", 1.0, 0.01234, 45.0, 4.35, 31.25, 4.5, 2, 16384.0)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ampatch demo")
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


def column(table: str, title: str) -> list[str]:
    """The cells below a title, by where the title stands; columns of numbers are aligned on the right."""
    head, *lines = table.splitlines()
    end = head.index(title) + len(title)
    return [line[:end].split()[-1] for line in lines]


class TestDigits:
    def test_the_checksum_of_the_digits_is_in_their_readme(self) -> None:
        folder = files("ampatch.demo") / "data"
        checksum = hashlib.sha256(gzip.decompress((folder / "digits.csv.gz").read_bytes())).hexdigest()

        assert checksum in (folder / "README.md").read_text()

    def test_there_are_1797_images_the_right_way_up_with_labels(self) -> None:
        loaded = digits.load()
        assert loaded.images.shape == (1797, 1, 8, 8)
        assert loaded.images.dtype is torch.float32
        assert set(loaded.images.unique().tolist()) == {ink / 16 for ink in range(17)}
        assert (16 * loaded.images[0, 0, 0]).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
        assert loaded.labels[0] == 0
        assert loaded.labels.dtype is torch.int64
        assert loaded.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]

    def test_the_split_depends_on_no_seed_and_is_disjoint(self) -> None:
        # Stands in for the images, no two of which need be different, a number of its own for each digit.
        numbers = torch.arange(1797)
        splits = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            splits.append(digits.split(digits.Digits(numbers, digits.load().labels)))
        (train, test), others = splits
        assert sorted(torch.cat([train.images, test.images]).tolist()) == numbers.tolist()
        for one, other in zip((train, test), others, strict=True):
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)

    def test_a_fifth_of_every_class_is_tested_on(self) -> None:
        loaded = digits.load()
        _, test = digits.split(loaded)

        share = test.labels.bincount() / loaded.labels.bincount()
        assert torch.allclose(share, torch.full((10,), 0.2), atol=0.005)


def test_the_network_has_every_kind_of_layer_that_the_lists_tell_apart() -> None:
    network = DigitsNetwork()
    scores = network(torch.rand(3, 1, 8, 8))
    scores.square().sum().backward()
    kinds = {type(module) for module in network.modules()}
    assert {torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.LayerNorm, torch.nn.Linear} <= kinds
    assert scores.shape == (3, 10)
    assert all(parameter.grad is not None for parameter in network.parameters())


class TestReport:
    def test_the_table_has_a_line_a_run(self) -> None:
        table = report.table([FLOAT32, MIXED])
        assert [line.split()[:2] for line in table.splitlines()[1:]] == [["O0", "-"], ["O1", "float16"]]
        assert column(table, "test accuracy") == ["99.44%", "100.00%"]
        assert column(table, "final loss") == ["0.0084", "0.0123"]
        assert column(table, "ms a step") == ["7.13", "45.00"]
        assert column(table, "peak memory (MiB)") == ["7.06", "4.35"]
        assert column(table, "casts a step") == ["0.0", "31.2"]
        assert column(table, "cache hits a step") == ["0.0", "4.5"]
        assert column(table, "skipped steps") == ["0", "2"]
        assert column(table, "loss scale") == ["1", "16384"]

    def test_the_json_has_a_mapping_a_run(self) -> None:
        entries = json.loads(report.as_json([FLOAT32, MIXED]))
        assert [list(entry) for entry in entries] == [KEYS, KEYS]
        assert [Result(**entry) for entry in entries] == [FLOAT32, MIXED]

    def test_json_has_no_nan(self) -> None:
        (diverged,) = json.loads(report.as_json([replace(MIXED, final_loss=math.nan)]), parse_constant=pytest.fail)

        assert diverged["final_loss"] is None


def names_of(plan: Plan) -> str:
    return ", ".join(map(str, plan.runs()))


class TestArguments:
    def test_five_runs_by_default(self) -> None:
        assert set(vars(parsed()).values()) == {None}
        assert names_of(Plan()) == "O0, O1 float16, O1 bfloat16, O2 float16, O5 bfloat16"

    def test_a_level_alone_runs_in_each_half_type_that_it_has(self) -> None:
        assert names_of(Plan(list(OPT_LEVELS))) == (
            "O0, O1 float16, O1 bfloat16, O2 float16, O2 bfloat16, O3 float16, O3 bfloat16, O4 bfloat16, O5 bfloat16, "
            "O6 bfloat16"
        )
        assert names_of(Plan(["O4", "O0"], ["float16"])) == "O4 bfloat16, O0"

    def test_the_levels_are_those_of_amp_with_the_half_types_that_they_allow(self) -> None:
        fixed = {name: level.half_dtype for name, level in LEVELS.items()}

        assert list(OPT_LEVELS) == list(LEVELS)
        for planned in SETTINGS.values():
            assert fixed[planned.opt_level] in (None, planned.dtype)

    @pytest.mark.parametrize("name", SETTINGS)
    def test_a_setting_is_one_run_in_its_own_half_type(self, name: str) -> None:
        assert names_of(Plan(parsed("--opt-levels", name).opt_levels, ["bfloat16"])) == name.replace(":", " ")

    def test_a_half_type_alone_is_that_of_the_default_levels(self) -> None:
        start = demo._start(parsed("--half-dtype", "bfloat16"))
        assert names_of(start.plan) == "O0, O1 bfloat16, O2 bfloat16, O5 bfloat16"

    def test_a_run_that_is_named_twice_comes_once(self) -> None:
        assert names_of(Plan(["O2:bfloat16", "O2"])) == "O2 bfloat16, O2 float16"
        assert parsed("--opt-levels", "O1, O0,O1").opt_levels == ["O1", "O0"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--opt-levels", "O1,00"], f"argument --opt-levels: '00' {EXPECTED}"),
            (["--opt-levels", "O5:float16"], f"argument --opt-levels: 'O5:float16' {EXPECTED}"),
            (["--opt-levels", "O0,"], f"argument --opt-levels: '' {EXPECTED}"),
            (
                ["--half-dtype", "float32"],
                "argument --half-dtype: 'float32' is not one of float16, bfloat16. Type for example bfloat16",
            ),
            (["--epochs", "0"], "argument --epochs: '0' is not a whole number from 1 to 1000. Type for example"),
            (["--epochs", "many"], "argument --epochs: 'many' is not a whole number from 1 to 1000"),
            (["--device", "gpu"], "argument --device: 'gpu' is not one of cpu, cuda. Type for example cpu"),
            (["--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 to 4294967295"),
            (["--json", "no/such/folder/out.json"], "argument --json: 'no/such/folder/out.json' cannot be written"),
            (["--json", "."], "argument --json: '.' cannot be written: it is a folder"),
            (["--save", "no/such/folder/demo.pt"], "argument --save: 'no/such/folder/demo.pt' cannot be written"),
            (["--save", "."], "argument --save: '.' cannot be written: it is a folder"),
            (["--save", "/dev/null"], "argument --save: '/dev/null' cannot be written: it is no ordinary file"),
            (["--save", ""], "argument --save: the path is empty; expected the name of a file, such as 'report'"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_bad_argument_is_one_clear_line(self, arguments: list[str], message: str) -> None:
        status, _, err = ampatch("demo", *arguments)
        assert status == 2
        assert err.splitlines()[-1].startswith(f"ampatch demo: error: {message}")


class TestRun:
    def test_the_table_and_the_json_have_the_same_results(self, tmp_path: Path) -> None:
        target = tmp_path / "results.json"
        chosen = ["--opt-levels", "O0,O1", "--half-dtype", "bfloat16", "--epochs", "1", "--device", "cpu"]
        status, out, err = ampatch("demo", *chosen, "--json", target)
        results = [Result(**entry) for entry in json.loads(target.read_text())]
        float32, mixed = results
        assert (status, out) == (0, report.table(results) + "\n")
        assert "\r" not in err, "a progress bar is for terminals"
        assert (float32.opt_level, float32.half_dtype) == ("O0", None)
        assert (float32.casts_per_step, float32.cache_hits_per_step) == (0, 0)
        assert (mixed.opt_level, mixed.half_dtype) == ("O1", "bfloat16")
        assert mixed.casts_per_step > 0
        assert mixed.cache_hits_per_step > 0, "the network uses a block twice"
        # By chance it is 0.1, as it was where one epoch was too short for batch norm's running statistics.
        assert min(result.test_accuracy for result in results) > 0.7

    @pytest.mark.usefixtures("few_digits")
    def test_json_that_cannot_be_written_leaves_the_table(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo.json_files, "write_text", Mock(side_effect=OSError("No space left on device")))
        status, out, err = ampatch("demo", "--opt-levels", "O0", "--epochs", "1", "--json", tmp_path / "results.json")
        assert status == 1
        assert column(out, "level") == ["O0"]
        assert err.splitlines()[-1].startswith("The results could not be written")


@pytest.mark.usefixtures("few_digits")
class TestDevice:
    def test_cuda_without_a_gpu_is_one_clear_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        status, _, err = ampatch("demo", "--device", "cuda")
        told = "argument --device: torch sees no GPU here. Type cpu, or leave --device out"
        assert (status, err.splitlines()[-1]) == (2, f"ampatch demo: error: {told}")

    @pytest.mark.parametrize(("default", "named"), [("cpu", "the CPU"), ("cuda", "the GPU (NVIDIA X1)")])
    def test_the_device_and_the_origin_of_the_times_are_told(
        self, default: str, named: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stands the CPU in for a GPU."""
        asked = []
        monkeypatch.setattr(demo, "_default_device", lambda: default)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1")
        monkeypatch.setattr(digits.Digits, "to", lambda self, device: asked.append(device) or self)

        first, *_, times, following = ampatch("demo", "--opt-levels", "O0", "--epochs", "1").err.splitlines()
        assert f", on {named}, 1 epoch a run." in first
        assert times.startswith(f"The times are those of this {default.replace('cuda', 'GPU').replace('cpu', 'CPU')}.")
        assert following.startswith("Next, a script of your own: ampatch run --report report.html train.py.")
        assert asked == [default, default]

    @pytest.mark.gpu
    def test_runs_on_a_gpu_learn_and_their_memory_is_measured(self, tmp_path: Path) -> None:
        target = tmp_path / "results.json"
        chosen = ["--opt-levels", "O0,O1,O2:float16", "--epochs", "3", "--device", "cuda"]
        err = ampatch("demo", *chosen, "--json", target).err
        assert f"on the GPU ({torch.cuda.get_device_name()})" in err
        float32, *mixed = [Result(**entry) for entry in json.loads(target.read_text())]
        for result in mixed:
            assert result.final_loss == pytest.approx(float32.final_loss, rel=0.1)
            # Without cuBLAS's workspace, which the first run would have alone: 32 MiB on an H100.
            assert abs(result.peak_memory_mib - float32.peak_memory_mib) < 16


class TestTraining:
    def test_the_same_seed_gives_the_same_run(self) -> None:
        train, test = digits.split(digits.load())
        few = train[torch.arange(128)]
        losses: list[float] = []
        for _ in range(2):
            torch.manual_seed(len(losses))  # the caller's random numbers have no part in it
            training.run(few, test, "O0", None, epochs=1, seed=3, on_step=lambda loss, _: losses.append(loss))

        assert losses[:4] == losses[4:]
        assert len(losses) == 2 * training.steps_per_epoch(few) == 8

    def test_amp_is_deinitialized_when_a_run_raises(self) -> None:
        train, test = digits.split(digits.load())
        untouched = torch.nn.functional.linear
        fail = Mock(side_effect=RuntimeError("in the middle"))
        with pytest.raises(RuntimeError, match="in the middle"):
            training.run(train, test, "O1", torch.bfloat16, epochs=1, seed=0, on_step=fail)
        assert torch.nn.functional.linear is untouched


class TestFewEpochs:
    @pytest.mark.usefixtures("few_digits")
    def test_low_accuracies_after_few_epochs_are_explained(self) -> None:
        lines = ampatch("demo", "--opt-levels", "O0", "--epochs", "1").err.splitlines()
        (note,) = (line for line in lines if "still learning" in line)
        assert note.startswith("After 1 epoch the network is still learning, in float32 (O0) as in mixed precision.")
        assert note.endswith(f"type --epochs {Plan().epochs} or more.")

    @pytest.mark.parametrize(
        ("epochs", "accuracies"),
        [(1, [0.97, 0.98]), (Plan().epochs, [0.98, 0.1])],
        ids=["where_they_are_not_low", "where_epochs_are_not_the_reason"],
    )
    def test_other_accuracies_are_not_explained(self, epochs: int, accuracies: list[float]) -> None:
        results = [replace(MIXED, test_accuracy=accuracy) for accuracy in accuracies]

        assert demo._still_learning(Plan(epochs=epochs), results) is None


@pytest.fixture(scope="module")
def accuracy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """The test accuracy of a run of `ampatch demo`, with its own number of epochs. Each is trained once."""

    @functools.cache
    def accuracy_of(name: str) -> float:
        target = tmp_path_factory.mktemp("claims") / "results.json"
        ampatch("demo", "--opt-levels", name, "--device", "cpu", "--json", target)
        (entry,) = json.loads(target.read_text())
        return Result(**entry).test_accuracy

    return accuracy_of


@pytest.mark.slow
class TestClaims:
    """What the documentation says of `ampatch demo`, of the runs that it has by default and of all others."""

    # O3 has neither masters nor a loss scale: nothing is claimed of it.
    @pytest.mark.parametrize("name", [name for name, run in SETTINGS.items() if run.opt_level not in ("O0", "O3")])
    def test_mixed_precision_is_97_percent_accurate_and_within_a_point_of_float32(
        self, name: str, accuracy_of: Callable[[str], float]
    ) -> None:
        assert accuracy_of(name) >= demo.GOAL == 0.97
        assert abs(accuracy_of(name) - accuracy_of("O0")) <= 0.01

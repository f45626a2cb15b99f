"""The benchmarks: that they run, and leave no row out. What they measure is for people to judge."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HALVES = ["float16", "bfloat16"]

# Each takes a minute or more.
takes_long = [pytest.mark.slow, pytest.mark.beyond_ci]
needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")


@pytest.fixture
def imported(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def printed_by(script: str, *arguments: object) -> str:
    """What a benchmark prints, in a process of its own."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    """What `benchmarks/eager_overhead.py --quick` found, and printed."""
    file = tmp_path_factory.mktemp("benchmark") / "report.json"
    printed = printed_by("eager_overhead.py", "--quick", "--json", file)
    return {**json.loads(file.read_text(encoding="utf-8")), "printed": printed}


@pytest.fixture
def rows(report) -> dict[tuple[str, ...], dict[str, Any]]:
    return {tuple(row[part] for part in ("section", "half", "name", "contender")): row for row in report["rows"]}


class TestEagerOverhead:
    pytestmark = takes_long

    @pytest.mark.parametrize("half", HALVES)
    def test_every_call_model_and_layer_has_a_row_for_each_contender(self, rows, half, imported):
        cases = imported("eager_cases")
        contenders = {
            "calls": ["unpatched", "unpatched, again", "torch.autocast", "ampatch O1"],
            "steps": ["unpatched", "torch.autocast", "ampatch O1", "O2 by hand", "ampatch O2"],
            "layers": ["ampatch O1", "ampatch O2"],
        }
        phases = ["scale", "unscale", "step, over the unpatched", "all but forward and backward"]
        layers = [f"{optimizer}: {phase}" for optimizer in ("SGD", "fused AdamW") for phase in phases]
        names = {
            "calls": [call.name for call in cases.CALLS],
            "steps": [f"{model}: {work}" for model in ("transformer", "convnet", "MLP") for work in cases.WORK],
            "layers": [*layers, "by itself: unscale", "by itself: update"],
        }
        expected = {(part, half, *pair) for part in names for pair in itertools.product(names[part], contenders[part])}
        for name in ("a cast", "a cached weight's look-up", "a weight's cast that misses"):
            expected.add(("layers", half, name, "ampatch O1"))
        expected.add(("layers", half, "casts around a forward", "ampatch O2"))
        assert len(expected) > 100
        assert expected <= rows.keys()

    def test_figures_are_finite_within_their_spread_and_their_ratios_positive(self, rows):
        for row in rows.values():
            if not row["fault"]:
                assert all(math.isfinite(row[part]) for part in ("median", "low", "high", "seconds")), row
                assert row["low"] <= row["median"] <= row["high"], row
        ratios = [row for row in rows.values() if row["unit"].startswith("of ")]
        assert {row["unit"] for row in ratios} == {"of torch.autocast", "of O2 by hand"}
        assert all(row["median"] > 0 for row in ratios)

    def test_contenders_with_other_results_have_a_fault(self, rows):
        """What torch.autocast computes in half on the CPU, and does not cast at all there."""
        faults = {(row["name"], row["contender"]): row["fault"].split()[0] for row in rows.values() if row["fault"]}
        assert faults == {
            ("F.softmax, half input", "torch.autocast"): "in",
            ("F.layer_norm, half input", "torch.autocast"): "in",
            ("torch.dot, mixed types (promote)", "torch.autocast"): "refused",
        }

    def test_aims_stand_beside_o1_and_contenders_left_out_are_named(self, rows, report):
        aims = {row["name"]: row["aim"] for row in rows.values() if row["aim"] is not None}
        assert aims["F.linear, half input, weights cached"] == 150
        assert aims["transformer: whole step, SGD"] == 0.95
        assert all(row["contender"].startswith("ampatch O1") for row in rows.values() if row["aim"] is not None)
        for name, reason in report["left_out"].items():
            assert f"{name} is left out: {reason}" in report["printed"]
        assert ("Apex" in report["left_out"]) != any(row["contender"].startswith("Apex") for row in report["rows"])


class TestInstructions:
    """`benchmarks/instructions.py`."""

    @pytest.mark.slow
    @pytest.mark.beyond_ci
    @needs_valgrind
    def test_instructions_of_every_step_and_call_are_counted(self, tmp_path, imported):
        file = tmp_path / "counts.json"
        options = ["--models", "MLP", "--halves", "float16", "--contenders", "ampatch O1"]  # all take four minutes
        printed = printed_by("instructions.py", *options, "--json", file)
        rows = {(row["name"], row["contender"]): row for row in json.loads(file.read_text(encoding="utf-8"))}
        for optimizer in ("SGD", "fused AdamW"):
            step = {name: rows[f"MLP: whole step, {optimizer}", name] for name in ("torch.autocast", "ampatch O1")}
            for contender, row in step.items():
                phases = [
                    each["instructions"]
                    for (name, own), each in rows.items()
                    if name.startswith(f"MLP, {optimizer}: ") and own == contender
                ]
                assert row["instructions"] > row["misses"] > 1000
                assert len(phases) >= 6
                assert sum(phases) == pytest.approx(row["instructions"])
            ours, autocasts = step["ampatch O1"], step["torch.autocast"]
            assert ours["of_instructions"] == pytest.approx(ours["instructions"] / autocasts["instructions"])
            assert ours["reference"] == "torch.autocast"
            assert autocasts["of_instructions"] is None
        for call in imported("eager_cases").CALLS:
            assert rows[call.name, "unpatched"]["instructions"] > 1000
            assert rows[call.name, "ampatch O1"]["over"] < rows[call.name, "ampatch O1"]["instructions"]
        # What is counted differs by a thousand now and then; two look-ups and a cast take five.
        assert rows["F.linear, float32 input, weights cached", "ampatch O1"]["over"] > 2000
        assert "| MLP: whole step, SGD |" in printed
        assert "| x + y |" in printed


class TestHost:
    """`benchmarks/host.py`."""

    @pytest.mark.slow
    @pytest.mark.beyond_ci
    @needs_valgrind
    def test_instructions_of_every_phase_of_a_step_are_counted(self, tmp_path):
        file = tmp_path / "host.json"
        printed = printed_by("host.py", "--optimizers", "fused AdamW", "--contenders", "ampatch O1", "--json", file)
        rows = {(row["contender"], row["phase"]): row for row in json.loads(file.read_text(encoding="utf-8"))}
        phases = {
            "torch.autocast": {"zero_grad", "forward", "scale", "backward", "step", "update"},
            "ampatch O1": {"zero_grad", "forward", "scale", "backward", "unscale", "step"},
        }
        assert rows.keys() == {(contender, phase) for contender, those in phases.items() for phase in those}
        for contender in phases:
            forward = rows[contender, "forward"]
            assert forward["device"] > forward["host"] > 100_000  # products of matrices; calls
            assert rows[contender, "scale"]["host"] > rows[contender, "scale"]["device"]  # one number
        assert "| **fused AdamW: whole step** |" in printed


@pytest.mark.slow
@pytest.mark.beyond_ci
@pytest.mark.once
def test_converted_models_are_measured_beside_autocast():
    header, *rows = printed_by("converted.py", "--rounds", 1).splitlines()
    assert header.split()[-1] == "converted"
    assert len(rows) == 6
    assert all(row.count("(") == 5 and "(1.00)" in row for row in rows)


@pytest.mark.slow
@pytest.mark.beyond_ci
@pytest.mark.once
def test_skorch_nets_are_measured_with_amp_and_without():
    printed = printed_by("skorch_nets.py", "--rounds", 2)
    rows = re.findall(r"^(.+?) {2,}\d+ \(.+\) +(\d+\.\d\d)$", printed, re.MULTILINE)
    names = [name for name, _ in rows]
    assert names.count("skorch") == names.count("O1, float16") == names.count("O2, float16") == 2
    assert names.count("O1, float16, in a session") == 1
    assert [ratio for name, ratio in rows if name == "skorch"] == ["1.00", "1.00"]


@pytest.mark.once
def test_lists_are_measured_as_tensors_and_as_addresses(
    compiled, compiled_calls, select, select_calls, monkeypatch, capsys, imported
):
    module = imported("lists")
    monkeypatch.setattr(sys, "argv", ["lists.py", "--rounds", "1"])
    module.main()
    rows = re.findall(r"^\| ([\w, ]+) \| (\d+) \| \d+ \| \d+ \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == len(set(rows)) == 3 * len(module.COUNTS)


class Repeating(nn.Module):
    """Four layers read one float32 result, the last a view of it; two functions of the blacklist read a half result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> SimpleNamespace:
        x = self.norm(x)
        first, second, *_ = [layer(x) for layer in self.layers[:3]]
        last = self.layers[3](x[:1])
        x += 1
        after = self.layers[0](x)
        loss = first.logsumexp(-1).sum() + first.std() + second.sum() + last.sum() + after.sum()
        return SimpleNamespace(loss=loss)


@pytest.mark.once
def test_casts_that_repeat_others_are_counted(imported):
    pytest.importorskip("transformers")
    module = imported("recasts")
    found = module.counted("Repeating", Repeating(), {"x": torch.randn(2, 4)}, torch.bfloat16)
    # To half: the norm's result five times, in one after a write to it. To float32: the first layer's result twice.
    assert (found.weights.casts, found.activations.casts, found.widened.casts) == (8, 7, 2)
    assert (found.same_object.casts, found.same_memory.casts, found.widened_again.casts) == (3, 4, 1)
    assert found.activations.nbytes == 6 * (6 * 8 + 4)
    assert found.same_memory.nbytes == 6 * (3 * 8 + 4)
    assert found.functions == {"torch.nn.functional.linear": 3, "torch.Tensor.std": 1}
    assert module.table([found]).splitlines()[-1].startswith("| Repeating | 8, 0.0 MB | 7, 0.0 MB | 3 (43%; 46%)")


class TestOnGpu:
    """`benchmarks/on_gpu.sh`."""

    SCRIPT = BENCHMARKS / "on_gpu.sh"
    STEPS = (
        *("machine", "probe", "build", "tests-extension", "tests-torchs-kernels", "other-tests"),
        *("machine", "build", "steps", "kernels", "memory"),
        *("machine", "build", "profile", "profile-sections", "memcheck", "racecheck"),
        *("machine", "build", "float8"),
    )
    LINE = re.compile(r"(\S+) +exit status +(\d+) +\d+ s  (.*)")

    def run(self, *arguments: object, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(python)}
        command = ["bash", str(self.SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    def summary(self, directory: Path) -> list[tuple[str, int, str]]:
        """Returns the name, the exit status and the last words of each step."""
        found = map(self.LINE.fullmatch, (directory / "summary.txt").read_text(encoding="utf-8").splitlines())
        return [(each[1], int(each[2]), each[3]) for each in found if each is not None]

    @pytest.fixture
    def fake(self, tmp_path, monkeypatch) -> Path:
        """A Python that runs nothing: it prints its arguments, and fails if they have what FAILS_AT says."""
        monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path / "cache"))
        file = tmp_path / "python"
        file.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *"$FAILS_AT"*) exit 3 ;; esac\n', encoding="utf-8")
        file.chmod(0o755)
        return file

    @pytest.mark.slow
    @pytest.mark.beyond_ci
    @pytest.mark.once
    def test_dry_run_of_on_gpu_runs_every_step(self, tmp_path):
        done = self.run("--dry-run", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = self.summary(tmp_path)
        assert sorted((name, status) for name, status, _ in summary) == sorted((name, 0) for name in self.STEPS)
        for name, _, words in summary:
            if "tests" in name or "check" in name:
                assert re.match(r"[1-9]\d*(/\d+)? tests collected", words), name
        figures = {"kernels.json", "steps.json", "memory.json"}
        assert {file.name for file in tmp_path.iterdir()} == {"summary.txt", "logs.tar.gz", *figures}
        for name in figures:
            assert json.loads((tmp_path / name).read_text(encoding="utf-8"))["rows"]
        with tarfile.open(tmp_path / "logs.tar.gz") as logs:
            assert {Path(name).stem for name in logs.getnames()} == {"logs", *self.STEPS}

    @pytest.mark.parametrize("fails_at", ["nowhere", "probe.py"], ids=["no-failure", "a-failure"])
    def test_on_gpu_goes_on_after_a_failed_step_and_exits_with_1(self, fails_at, fake, tmp_path, monkeypatch):
        monkeypatch.setenv("FAILS_AT", fails_at)
        done = self.run("--dry-run", tmp_path / "out", python=fake)
        assert done.returncode == int(fails_at == "probe.py"), done.stdout + done.stderr
        statuses = sorted((name, status) for name, status, _ in self.summary(tmp_path / "out"))
        assert statuses == sorted((name, 3 if f"{name}.py" == fails_at else 0) for name in self.STEPS)

    def test_on_gpu_omits_tests_of_an_extension_that_was_not_built(self, fake, tmp_path, monkeypatch):
        monkeypatch.setenv("FAILS_AT", "ampatch build")
        assert self.run("--dry-run", tmp_path / "out", python=fake).returncode == 1
        text = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
        assert re.search(r"tests-extension +not run: the extension was not built", text)

    def test_on_gpu_interrupts_a_step_in_the_background_at_its_limit(self, fake, tmp_path):
        """Then pytest still names the tests that failed."""
        script = self.SCRIPT.read_text(encoding="utf-8").replace("other-tests 140", "other-tests 1")
        copy = tmp_path / "benchmarks" / "on_gpu.sh"
        copy.parent.mkdir()
        copy.write_text(script.replace("slower=10", "slower=1"), encoding="utf-8")
        for name in ("ampatch", "csrc", "lists"):
            (tmp_path / name).mkdir()
        waits = "trap 'echo interrupted; exit 5' INT; while :; do sleep 0.1; done"
        fake.write_text(f'#!/bin/sh\ncase "$*" in *" tests "*) {waits} ;; esac\n', encoding="utf-8")
        environment = {**os.environ, "PYTHON": str(fake)}
        command = ["bash", str(copy), "--dry-run", str(tmp_path / "out")]
        assert subprocess.run(command, capture_output=True, env=environment, check=False).returncode == 1
        assert ("other-tests", 124, "interrupted") in self.summary(tmp_path / "out")

    def test_time_limits_of_on_gpu_fit_into_each_part(self):
        text = self.SCRIPT.read_text(encoding="utf-8")
        (end,) = map(int, re.findall(r"ends=\$\(\(SECONDS \+ (\d+)", text))
        (machine,) = re.findall(r"step machine (\d+)", text)
        parts = re.findall(r"^part_\d\(\) {(.*?)^}", text, re.MULTILINE | re.DOTALL)
        assert len(parts) == 4
        for part in parts:
            limits = {name: int(limit) for name, limit in re.findall(r"^ *(?:step )?(\S+) (\d+)\b", part, re.MULTILINE)}
            limits["machine"] = int(machine)
            if part is parts[0]:
                limits["tests"] = max(limits.pop(name) for name in [*limits] if "tests" in name)  # side by side
                assert limits.pop("probe") <= limits["build"]  # beside it
            if '"$tool"' in limits:
                limits["racecheck"] = limits['"$tool"']
            assert 3 <= len(limits) <= 6
            assert sum(limits.values()) <= end - 10
        assert end < 4 * 60
        assert text.count("step ") - 2 <= len(self.STEPS)  # two are in comments

    def test_files_named_in_on_gpu_exist(self):
        named = re.findall(r"\b(?:tests|benchmarks)/[\w/]+\.py", self.SCRIPT.read_text(encoding="utf-8"))
        assert len(named) > 10
        assert [name for name in named if not (BENCHMARKS.parent / name).is_file()] == []

    @pytest.mark.parametrize("arguments", [[], ["5", "x"], ["1"], ["--dry-run", "x", "y"], ["--prepare", "x"]], ids=str)
    def test_on_gpu_refuses_other_arguments(self, arguments):
        done = self.run(*arguments)
        assert done.returncode == 2
        assert done.stderr.count("benchmarks/on_gpu.sh") == 3


class TestSteps:
    """`benchmarks/steps.py`; `TestOnGpu` runs it."""

    @pytest.mark.parametrize("half", HALVES)
    def test_every_contender_clips_alike(self, half, imported):
        steps, peers = imported("steps"), imported("peers")

        def losses(contender: str, max_norm: float | None) -> Any:
            torch.manual_seed(0)
            batch = steps.MODELS[steps.SMALL].batch()
            make = peers.CONTENDERS[contender].make
            with steps.set_up(make, steps.MODELS[steps.SMALL].make(), half, "SGD") as peer:
                peer.max_norm = max_norm
                found = [peer.step(batch) for _ in range(6)]
            return steps.Evidence.of(found[0], *found)

        clipped = losses(peers.UNPATCHED, 0.5)
        assert steps.fault_of(losses(peers.UNPATCHED, None), clipped)
        for name in (*steps.COMPARED, peers.BY_HAND):
            assert not steps.fault_of(losses(name, 0.5), clipped), name


class TestCounts:
    """`benchmarks/on_device.py`."""

    def test_kernels_waits_and_allocations_are_counted_for_each_function(self, imported):
        x = torch.ones(3)
        adds, nothing, reads = imported("on_device").counts([lambda: x + 1, list, x[0].item], "cpu")
        assert (adds.kernels["aten::add"], adds.waits, adds.allocations > 0) == (1, 0, True)
        assert (nothing.launches, nothing.waits, nothing.allocations) == (0, 0, 0)
        assert (reads.kernels["aten::add"], reads.waits) == (0, 1)


@pytest.mark.slow
@pytest.mark.beyond_ci
def test_reports_of_architectures_are_saved(tmp_path):
    pytest.importorskip("transformers")
    options = ["--models", "ViT", "--half", "bfloat16", "--rounds", 1, "--layers", 1, "--save", tmp_path]
    printed = printed_by("reports.py", *options)
    assert re.findall(r"^ViT +(O\d)", printed, re.MULTILINE) == ["O1", "O2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"ViT_{level}.{suffix}" for level in ("O1", "O2") for suffix in ("html", "json")
    ]


class TestFinalLosses:
    """`benchmarks/final_losses.py`."""

    @pytest.mark.slow
    @pytest.mark.beyond_ci
    def test_final_losses_are_compared_with_those_of_o5(self, tmp_path):
        file = tmp_path / "losses.json"
        printed = printed_by("final_losses.py", "--steps", 2, "--json", file)
        losses = json.loads(file.read_text(encoding="utf-8"))
        assert re.findall(r"^\| (\w+, \w+) \|", printed, re.MULTILINE) == list(losses)
        assert len(losses) == 8
        assert all(own == pytest.approx(each["O5"], rel=0.01) for each in losses.values() for own in each.values())

    @pytest.mark.slow
    @pytest.mark.beyond_ci
    @pytest.mark.parametrize("optimizer", ["Lion", "Adafactor"])
    def test_optimizers_of_the_benchmark_lower_the_loss(self, optimizer, imported):
        module = imported("final_losses")
        task = module.images()
        assert module.final_loss(task, optimizer, "O5", 100) < 0.98 * module.final_loss(task, optimizer, "O5", 0)


class TestFusedLinear:
    """`benchmarks/fused_linear.py`."""

    @pytest.fixture
    def module(self, imported) -> ModuleType:
        pytest.importorskip("transformers")
        return imported("fused_linear")

    def test_fused_linear_makes_one_node_of_a_layer(self, module):
        rows = module.table_of_nodes([module.TRANSFORMER], torch.float16).splitlines()
        _, _, without, o1, layers = (int(re.sub(r"\D.*", "", cell.strip()) or 0) for cell in rows[-1].split("|")[1:-1])
        assert 0 < o1 < without
        assert layers > 0

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("micro_batches", [1, 4])
    def test_bytes_of_a_step_are_those_of_its_weight(self, module, half, micro_batches):
        """Counts the bytes of a matrix that is much larger than what else a step reads and writes."""
        found = {}
        for contender in module.CONTENDERS:
            layer = nn.Linear(1024, 1024, bias=False)
            counted = module.bytes_of_step(
                contender,
                layer,
                lambda model: model(torch.ones(1, 1024)).float().sum(),
                getattr(torch, half),
                micro_batches,
            )
            found[contender] = [round(counted[phase] / 2**20) for phase in ("forward", "backward")]
        # A cast reads 4 bytes and writes 2, and the product reads 2. The gradient is written in half, read and written
        # in float32; the node writes it in float32. Each further micro-batch reads two gradients, and writes one.
        forward, adding = 8 * micro_batches, 12 * (micro_batches - 1)
        assert found[module.AUTOCAST] == found[module.WITHOUT] == [forward, 8 * micro_batches + adding]
        assert found[module.O1] == [forward, 4 * micro_batches + adding]

"""Tests that scripts written for Apex run unchanged behind `ampatch run`."""

from __future__ import annotations

import json
import operator
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from launching import Run, carry_out, carry_out_all, group_of_one

SCRIPTS = Path(__file__).parent / "scripts"

STEPS = 30
SETTLED = 5  # the steps at the end whose mean is compared
TOLERANCE = 0.02


@dataclass(frozen=True)
class Training:
    """A script that trains, and the ways in which it is run.

    Attributes:
        script: its name.
        float32: the options with which nothing is half.
        halves: those with which something is, by name.
        always: options of every run.
        processes: how many torchrun starts; 0 without it.
        in_group: whether the only process is one of a process group.
        says: what a run prints or logs, as patterns, by the name of the run.
    """

    script: str
    float32: Sequence[str] = ("--opt-level", "O0")
    halves: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {level: ("--opt-level", level) for level in ("O1", "O2")}
    )
    always: Sequence[str] = ()
    processes: int = 0
    in_group: bool = False
    says: Mapping[str, str] = field(default_factory=dict)

    def run(self, options: Sequence[str], where: Path) -> Run:
        return Run(
            SCRIPTS / f"{self.script}.py",
            [*options, *self.always, "--out", "losses"],
            where,
            self.processes,
            group_of_one() if self.in_group else (),
        )


TRAININGS = [
    Training("bert_lamb", in_group=True),
    Training(
        "bert_pretraining",
        halves={"O1": ("--opt-level", "O1"), "O2": ("--opt-level", "O2", "--cast_model_outputs")},
        processes=2,
        says={"O1": r'"dtype": "torch\.float32"', "O2": r'"dtype": "torch\.float16"'},
    ),
    Training(
        "dcgan",
        float32=("--opt_level", "O0"),
        halves={level: ("--opt_level", level) for level in ("O1", "O2")},
    ),
    Training("detection"),
    Training(
        "fp16_optimizer",
        float32=("--fp32",),
        halves={"static scale": ("--loss-scale", "128"), "dynamic scale": ("--dynamic-loss-scale",)},
    ),
    Training(
        "imagenet",
        always=("--deterministic",),
        halves={
            "O1": ("--opt-level", "O1", "--loss-scale", "128.0"),
            "O2": ("--opt-level", "O2", "--loss-scale", "dynamic", "--keep-batchnorm-fp32", "True"),
        },
    ),
    Training("language_model", always=("--tied",)),
    Training("manual_master_params", float32=(), halves={"static scale": ("--fp16", "--static-loss-scale", "128")}),
    Training("reducer", processes=2),
    Training("swav", processes=2),
    # The script takes softmax off the blacklist.
    Training("text_to_speech", says={"O1": r"Alignments: .* torch\.float16"}),
    Training(
        "wgan_gp",
        says={"O1": r"Gradient overflow\. Skipping step, loss scaler 0 reducing loss scale to 32768\.0"},
    ),
]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "losses").read_text().splitlines()]


def follow_float32(training: Training, where: Path) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script in each of its ways, whose losses have to be those of float32; gives what it printed each time."""
    options = {"float32": training.float32, **training.halves}
    runs = carry_out_all([training.run(options[name], where / name) for name in options])
    done = dict(zip(options, runs, strict=True))
    for name, said in training.says.items():
        assert re.search(said, done[name].stdout + done[name].stderr + (where / name / "losses").read_text()), name
    curves = {name: losses(where / name) for name in options}
    first, last = statistics.mean(curves["float32"][:SETTLED]), statistics.mean(curves["float32"][-SETTLED:])
    assert first - last > 2 * TOLERANCE * abs(last), "it learns, or the comparison says little"
    for name in training.halves:
        assert len(curves[name]) == len(curves["float32"]) == STEPS
        assert curves[name] != curves["float32"], "something was half"
        assert statistics.mean(curves[name][-SETTLED:]) == pytest.approx(last, rel=TOLERANCE), name
    return runs


by_name = operator.attrgetter("script")


@pytest.mark.slow
class TestTraining:
    @pytest.mark.parametrize("training", [each for each in TRAININGS if not each.processes], ids=by_name)
    def test_script_follows_the_loss_curve_of_float32(self, training, tmp_path):
        follow_float32(training, tmp_path)

    @pytest.mark.parametrize("training", [each for each in TRAININGS if each.processes], ids=by_name)
    def test_script_on_two_ranks_follows_float32_and_has_the_same_weights(self, training, tmp_path):
        for done in follow_float32(training, tmp_path):
            # The lines of two processes may run into one another.
            checksums = dict(re.findall(r"rank (\d) checksum (-?\d+\.\d+)", done.stdout))
            assert checksums.keys() == {"0", "1"}
            assert checksums["0"] == checksums["1"]
            assert done.stderr.count("ampatch: --cpu") == 1

    @pytest.mark.parametrize(
        ("script", "common", "whole", "half", "resume"),
        [
            (
                "imagenet",
                "--opt-level O2 --deterministic --iters-per-epoch 6 --out losses",
                "--epochs 2",
                "--epochs 1",
                "--resume ../half/checkpoint.pth.tar",
            ),
            (
                "fp16_optimizer",
                "--dynamic-loss-scale --save model.pt --out losses",
                "--iters 12",
                "--iters 6",
                "--start-iter 6 --load ../half/model.pt",
            ),
        ],
        ids=["imagenet", "fp16_optimizer"],
    )
    def test_script_resumes_from_a_checkpoint_as_if_uninterrupted(self, script, common, whole, half, resume, tmp_path):
        def run(name: str, options: str) -> Run:
            return Run(SCRIPTS / f"{script}.py", [*common.split(), *options.split()], tmp_path / name)

        carry_out_all([run("whole", whole), run("half", half)])
        carry_out(run("resumed", f"{whole} {resume}"))
        assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[6:]

    def test_inference_at_o3_gives_the_outputs_of_float32(self, tmp_path):
        runs = [
            Run(SCRIPTS / "inference.py", ["--opt-level", level, "--out", "outputs"], tmp_path / level)
            for level in ("O0", "O3")
        ]
        in_float32, in_half = carry_out_all(runs)
        assert "weights in torch.float32" in in_float32.stdout
        assert "weights in torch.float16" in in_half.stdout
        expected, found = (torch.load(run.where / "outputs") for run in runs)
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_every_script_is_run_and_none_mentions_ampatch():
    scripts = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
    assert scripts.keys() == {training.script for training in TRAININGS} | {"inference"}
    assert [name for name, text in scripts.items() if "ampatch" in text.lower()] == []

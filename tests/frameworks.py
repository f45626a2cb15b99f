"""Runs tests of the frameworks themselves, with their own mixed precision and with ampatch's: `make frameworks`.

The tests come from each framework's source distribution on the package index, at the version that constraints.txt pins.
Lightning's has no tests: they come from a clone of its repository. Everything stays in ``build/frameworks`` for the
next run. Must never change the environment that the tests run in.

    python tests/frameworks.py                              # all but Lightning
    python tests/frameworks.py --lightning FOLDER           # a clone, at the tag of the version: Lightning as well
    python tests/frameworks.py skorch ignite                # some of them

Exit status: 0 if all tests could run; a test that passes with one precision and not with the other is listed only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "frameworks"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)

# By framework: its distribution, the folder to run in, and the tests. Those that train, or know of precision.
FRAMEWORKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "lightning": (
        "lightning",
        "tests",
        (
            "tests_pytorch/trainer/optimization",
            "tests_pytorch/loops/optimization",
            "tests_pytorch/core/test_lightning_optimizer.py",
            "tests_pytorch/callbacks/test_lr_monitor.py",
            "tests_pytorch/callbacks/test_gradient_accumulation_scheduler.py",
            "tests_pytorch/models/test_hooks.py",
            "tests_pytorch/models/test_restore.py",
        ),
    ),
    "accelerate": (
        "accelerate",
        "",
        (
            "tests/test_accelerator.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
            "tests/test_state_checkpointing.py",
            "tests/test_grad_sync.py",
        ),
    ),
    "ignite": (
        "pytorch-ignite",
        "",
        (
            "tests/ignite/engine/test_create_supervised.py",
            "tests/ignite/handlers/test_fbresearch_logger.py",
        ),
    ),
    "skorch": (
        "skorch",
        "",
        (
            "skorch/tests/test_classifier.py",
            "skorch/tests/test_regressor.py",
            "skorch/tests/test_net.py",
            "skorch/tests/callbacks/test_lr_scheduler.py",
            "skorch/tests/callbacks/test_training.py",
        ),
    ),
}

# What the frameworks' tests import, beyond what this environment has.
PACKAGES = (
    "flaky",
    "pandas",
    "parameterized",
    "pytest-order",
    "pytest-rerunfailures",
    "pytest-timeout",
    "tensorboardX",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the tests of each framework twice, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", help=f"of {', '.join(FRAMEWORKS)}; all without any")
    parser.add_argument("--lightning", type=Path, help="a clone of Lightning's repository")
    parser.add_argument("--amp", default='{"opt_level": "O1"}', help="arguments of amp.initialize, as JSON")
    options = parser.parse_args(arguments)
    pip("install", "--upgrade", "--no-deps", "--target", str(FOLDER / "packages"), *PACKAGES)
    rows, differing, is_complete = [], [], True
    for name in options.frameworks or FRAMEWORKS:
        distribution, inside, tests = FRAMEWORKS[name]
        source = options.lightning if name == "lightning" else unpacked(distribution)
        if source is None:
            rows.append((name, "not run: its source distribution has no tests. Type --lightning FOLDER", "", ""))
            continue
        own, ours = (outcomes(name, source.absolute() / inside, tests, how) for how in ("", options.amp))
        is_complete &= bool(own and ours)
        passed = [{test for test, outcome in each.items() if outcome == "passed"} for each in (own, ours)]
        ran = [sum(outcome != "skipped" for outcome in each.values()) for each in (own, ours)]
        cells = [f"{len(good)} of {count}" for good, count in zip(passed, ran, strict=True)]
        rows.append((name, metadata.version(distribution), *cells))
        differing += [f"{name}: {test} passes with {which} only" for which, tests_ in (
            ("its own precision", passed[0] - passed[1]), ("ampatch", passed[1] - passed[0])
        ) for test in sorted(tests_)]  # fmt: skip
    print("\nframework   version   passed with its own precision   passed with ampatch")
    print(*(f"{name:<11} {version:<9} {own:<31} {ours}" for name, version, own, ours in rows), sep="\n")
    print("\n".join(differing))
    return 0 if is_complete else 1


def unpacked(distribution: str) -> Path:
    """Returns the folder of a distribution's sources, downloaded if they are not there."""
    version = PINS[distribution]
    folder = FOLDER / f"{distribution.replace('-', '_')}-{version}"
    if not folder.exists():
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(FOLDER), f"{distribution}=={version}")
        with tarfile.open(next(FOLDER.glob(f"{folder.name}.tar.gz"))) as archive:
            archive.extractall(FOLDER, filter="data")
    return folder


def pip(*arguments: str) -> None:
    """Runs pip; raises if it fails."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--quiet"], check=True)


def outcomes(name: str, folder: Path, tests: Sequence[str], amp: str) -> dict[str, str]:
    """Runs tests, and returns "passed", "skipped" or "failed" by their names."""
    report = FOLDER / f"{name}-{'ampatch' if amp else 'native'}.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "machinery", folder, FOLDER / "packages")))
    environment = {**os.environ, "PYTHONPATH": path, "FRAMEWORK": name, "FRAMEWORK_AMP": amp, "OMP_NUM_THREADS": "1"}
    options = ["-q", "--tb", "short", "--timeout", "120", "-p", "framework_amp", "-p", "no:cacheprovider"]
    options += ["-c", os.devnull, "--rootdir", str(folder)]  # or ampatch's own settings would hold
    options += ["-p", "no:rerunfailures" if name == "skorch" else "no:flaky"]  # both own one mark
    command = [sys.executable, "-m", "pytest", *options, f"--junit-xml={report}", *tests]
    with report.with_suffix(".txt").open("w") as said:  # with the reasons
        subprocess.run(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, check=False)
    cases = ET.parse(report).iter("testcase") if report.exists() else ()
    found = {}
    for case in cases:
        kinds = {child.tag for child in case} & {"skipped", "failure", "error"}
        outcome = "passed" if not kinds else "skipped" if kinds == {"skipped"} else "failed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

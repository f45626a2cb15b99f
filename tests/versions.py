"""Tries other versions of torch and of Python: `make versions`, which downloads a torch for each and takes long.

Each pair gets an environment of its own in ``build/versions``, which stays for the next run. A pair that cannot be
installed is reported, and is no failure: not every torch has a wheel for every Python, and not every Python is on this
machine. Must never change the environment that the tests run in.

    python tests/versions.py                                  # the tests that depend most on torch
    python tests/versions.py -m "not slow"                    # what make test runs, where its packages can be installed
    python tests/versions.py --python 3.11 --torch newest     # one pair; each option may be given several times

Exit status: 0 if each pair that could be installed passes; 1 if one fails, or none could be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
FOLDER = ROOT / "build" / "versions"

PYTHONS = ("3.11", "3.12", "3.13")
# The oldest that setup.cfg allows, the one that constraints.txt pins, and the newest.
TORCHES = {"2.10": "torch==2.10.*", "2.13": "torch==2.13.*", "newest": "torch"}

PACKAGES = ("pytest>=9", "hypothesis", "numpy", "setuptools", "wheel")
# Those that depend most on torch's version, and need no other packages: of its private parts, of what rests on most of
# them, and of the lists.
TESTS = (
    "tests/torch_private/test_torch_private.py",
    "tests/patching/test_compile.py",
    "tests/patching/test_switch.py",
    "tests/patching/test_wrappers.py",
    "tests/scaling/test_optimizers.py",
    "tests/diagnostics/test_overflow_trace.py",
    "tests/integration/test_ddp.py",
    "tests/integration/test_fsdp.py",
    "tests/cast_lists/test_reviewed.py",
    "tests/cast_lists/test_samples.py",
    "tests/cast_lists/test_shipped_lists.py",
    "tests/cast_lists/test_coverage.py",
    "tests/cast_lists/test_spellings.py",
)

# Pins that belong to one version of torch.
OF_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-|numpy|setuptools)")


@dataclass(frozen=True)
class Outcome:
    """One pair, and what came of it.

    Attributes:
        pair: the versions, as they are printed.
        text: the result in a few words.
        status: True if the tests passed, False if they failed, None if they could not run.
    """

    pair: str
    text: str
    status: bool | None


def main(arguments: Sequence[str]) -> int:
    """Tries every pair, and prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments go to pytest.",
    )
    parser.add_argument("--python", action="append", choices=PYTHONS, help="a Python; all of them without this option")
    parser.add_argument("--torch", action="append", choices=TORCHES, help="a torch; all of them without this option")
    options, of_pytest = parser.parse_known_args(arguments)
    torches = [TORCHES[name] for name in options.torch or TORCHES]
    outcomes = [tried(python, torch, of_pytest or TESTS) for python in options.python or PYTHONS for torch in torches]
    width = max(len(outcome.pair) for outcome in outcomes)
    print(*(f"{outcome.pair.ljust(width)}  {outcome.text}" for outcome in outcomes), sep="\n")
    found = [outcome.status for outcome in outcomes if outcome.status is not None]
    return 0 if found and all(found) else 1


def tried(python: str, torch: str, tests: Sequence[str]) -> Outcome:
    """Returns what the tests say under a Python and a torch."""
    pair = f"Python {python}, {torch}"
    print(f"{pair} ...", flush=True)
    try:
        interpreter = environment(python, torch)
    except LookupError as error:
        return Outcome(pair, f"not tried: {error}", None)
    version = said([interpreter, "-c", "import torch; print(torch.__version__)"])
    # The libraries that were compiled for another torch must not be found.
    setting = {**os.environ, "AMPATCH_KERNELS": "torch", "AMPATCH_CALLS": "python", "AMPATCH_CACHE": os.devnull}
    done = subprocess.run([interpreter, "-m", "pytest", "-q", *tests], cwd=ROOT, env=setting, check=False)
    return Outcome(pair, f"torch {version}: {'passed' if done.returncode == 0 else 'FAILED'}", done.returncode == 0)


def environment(python: str, torch: str) -> str:
    """Returns the interpreter of an environment with a Python and a torch.

    Raises:
        LookupError: there is no such Python here, or pip cannot install torch for it.
    """
    if is_here(python, torch):
        return sys.executable
    base = shutil.which(f"python{python}")
    if base is None:
        raise LookupError(f"there is no python{python} on the PATH")
    folder = FOLDER / f"{python}-{re.sub(r'[^0-9.]', '', torch).strip('.') or 'newest'}"
    interpreter = str(folder / "bin" / "python")
    if not Path(interpreter).exists():
        # For pyenv, whose python3.12 on the PATH runs only if its 3.12 was chosen.
        run([base, "-m", "venv", str(folder)], PYENV_VERSION=python)
    constraints = folder / "constraints.txt"
    pins = CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
    constraints.write_text("".join(pin for pin in pins if not OF_TORCH.match(pin)), encoding="utf-8")
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(constraints)]
    run([*pip, "--upgrade", torch, *PACKAGES])
    run([*pip, "--no-build-isolation", "--editable", str(ROOT)])
    return interpreter


def is_here(python: str, torch: str) -> bool:
    """Returns True if the running environment is the pair, so that nothing has to be installed."""
    wanted = torch.removeprefix("torch==").removesuffix("*")
    runs = f"{sys.version_info.major}.{sys.version_info.minor}"
    return python == runs and wanted != "torch" and metadata.version("torch").startswith(wanted)


def run(command: Sequence[str], **variables: str) -> None:
    """Runs a command; raises LookupError with the first error that it prints if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise LookupError(next((line for line in lines if line.startswith("ERROR")), lines[0]))


def said(command: Sequence[str]) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

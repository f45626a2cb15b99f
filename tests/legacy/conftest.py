"""What the tests here install: code that others wrote for Apex."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
INSTALLED = Path(__file__).parents[2] / "build" / "legacy"


@pytest.fixture(scope="session")
def third_party() -> Path:
    """The folder with what requirements.txt names, which stays there for the next time."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    marker = INSTALLED / "requirements.sha256"
    INSTALLED.parent.mkdir(exist_ok=True)
    with FileLock(INSTALLED.with_suffix(".lock")):
        if not marker.exists() or marker.read_text() != wanted:
            shutil.rmtree(INSTALLED, ignore_errors=True)
            _install()
            marker.write_text(wanted)
    return INSTALLED


def _install() -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(INSTALLED)]
    done = subprocess.run([*command, "-r", str(REQUIREMENTS)], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.fail(f"pip cannot install tests/legacy/requirements.txt:\n{done.stdout}{done.stderr}")

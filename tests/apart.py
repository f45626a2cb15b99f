"""Packages for tests that stand apart from their environment, each installed without its dependencies.

timm needs torchvision. In the environment, torchvision would fail in every package that imports it where it finds it
(transformers, torchmetrics): the index has a build for CUDA only, and without CUDA's libraries its own import raises.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

#: Packages of constraints.txt that `import_timm` uses.
OF_TIMM = ("timm", "torchvision")


def installed(name: str, arguments: Sequence[str], versions: bytes) -> Path:
    """Returns a folder with packages, which stays for the next run; installs them if it is missing or outdated.

    Args:
        name: name of the folder.
        arguments: what ``pip install`` is to install.
        versions: text that changes with the versions.
    """
    folder = ROOT / "build" / name
    wanted = hashlib.sha256(versions).hexdigest()
    marker = folder / "versions.sha256"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not marker.exists() or marker.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
            done = subprocess.run(
                [*command, "--target", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode != 0:
                pytest.fail(f"pip cannot install {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
            marker.write_text(wanted)
    return folder


@functools.cache
def import_timm() -> Any:
    """Returns timm, with the parts that tests use; the environment's own if it has one."""
    folder = []
    if find_spec("timm") is None:
        pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] in OF_TIMM]
        folder = [str(installed("timm", pins, repr(pins).encode()))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path += folder
        try:
            if folder and torch.version.cuda is None:
                _declare_operators()
            for part in ("data", "models", "optim", "scheduler", "utils"):
                importlib.import_module(f"timm.{part}")
        finally:
            for each in folder:  # other packages look there for torchvision, each in its own way
                sys.path.remove(each)
    return sys.modules["timm"]


def _declare_operators() -> None:
    """Declares two operators of torchvision's library, which cannot be loaded without CUDA's; timm calls neither."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


_declared: list[torch.library.Library] = []  # an operator is gone with the library that declares it


#: Comes before the path of a script that is to find timm, in the command that runs it.
WITH_TIMM = (__file__,)


if __name__ == "__main__":
    del sys.argv[0]
    import_timm()
    runpy.run_path(sys.argv[0], run_name="__main__")

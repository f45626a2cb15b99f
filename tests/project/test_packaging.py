"""Tests the package as users get it: built, installed in each of three ways, and used from there.

Works on a copy of the checkout, because what earlier builds left there (`*.egg-info`, `build/`) can stand in for a file
that is missing from the package. Each install goes to an environment of its own, which borrows torch from the
running one.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from apart import OF_TIMM
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ampatch.native import extension

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).resolve().parents[2]
CAST_LISTS = ("whitelist.yaml", "blacklist.yaml", "promote.yaml", "banned.yaml")
LEFTOVERS = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist")
# What a build of the extension leaves beside its sources.
LIBRARY = ("*.so", "library.json", "build.log")

# Says where the package is, and what of its data is found there, with the size of each file.
PROBE = """
import json
from importlib.resources import files
import ampatch, ampatch.demo.digits as digits
from ampatch.native import extension

found_library = extension.find()

def found(folder, prefix=""):
    for item in folder.iterdir():
        if item.is_dir():
            yield from found(item, prefix + item.name + "/")
        else:
            yield prefix + item.name, len(item.read_bytes())

print(json.dumps({
    "package": ampatch.__file__,
    "lists": dict(found(files("ampatch.lists"))),
    "demo": dict(found(files("ampatch.demo"))),
    "csrc": dict(found(files("ampatch.csrc"))),
    "source_hashes": [extension.source_hash(part) for part in (extension.OPERATORS, extension.CALLS)],
    "library": found_library and [str(found_library.path), found_library.compiler],
    "digits": len(digits.load()),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, if it succeeds; nothing of the running interpreter's paths or libraries reaches it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    environment["AMPATCH_CACHE"] = os.devnull  # what was built on this machine is not part of the package
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    return Path(shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFTOVERS, *LIBRARY)))


@pytest.fixture(scope="module")
def built(checkout: Path) -> dict[str, Path]:
    """An sdist, and a wheel made from that sdist, so that a file missing from the one is missing from the other too."""
    run(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    (wheel,) = (checkout / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("wheel", "sdist", "editable")]
)
def installed(
    request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The folder of an environment's programs, and the folder that its ampatch has to be imported from."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "editable":
        programs, _ = install(folder, "--editable", str(checkout))
        return programs, checkout
    return install(folder, str(request.getfixturevalue("built")[request.param]))


def install(folder: Path, *what: str) -> tuple[Path, Path]:
    """Makes an environment and installs something there: the folders of its programs and of its packages."""
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    (packages,) = folder.glob("lib/python3*/site-packages")
    # A folder named in a .pth file joins sys.path, but the .pth files in it are not read: torch and the other
    # dependencies are found there, an editable install of ampatch is not.
    (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    # --ignore-installed: pip sees the running environment's ampatch through the .pth file, and would leave it at that.
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", *options, *what, cwd=folder)
    return programs, packages


def test_installed_package_has_its_data_its_command_and_stands_in_for_apex(installed, tmp_path):
    programs, home = installed

    probed = json.loads(run(programs / "python", "-I", "-c", PROBE, cwd=tmp_path))

    assert Path(probed["package"]) == home / "ampatch" / "__init__.py"
    expected = {
        path.relative_to(ROOT / "lists").as_posix(): path.stat().st_size for path in (ROOT / "lists").rglob("*.yaml")
    }
    assert set(CAST_LISTS) <= set(expected)
    assert any(name.startswith("peers/") for name in expected)
    assert expected.items() <= probed["lists"].items()
    csrc = extension.source_directory()
    paths = [*extension.sources(), *extension.sources(extension.CALLS)]
    sources = {path.relative_to(csrc).as_posix(): path.stat().st_size for path in paths}
    assert {"operators.cpp", "cpu.cpp", "cuda.cu", "calls/calls.cpp", "calls/store.h"} <= set(sources)
    assert sources.items() <= probed["csrc"].items()
    assert probed["source_hashes"] == [extension.source_hash(part) for part in (extension.OPERATORS, extension.CALLS)]
    assert probed["library"] is None
    assert probed["digits"] == 1797
    assert {"data/digits.csv.gz", "data/README.md"} <= set(probed["demo"])
    assert "demo" in run(programs / "ampatch", "--help", cwd=tmp_path)
    (tmp_path / "train.py").write_text("from apex import amp; print(amp.__file__)")
    found = Path(run(programs / "ampatch", "run", "train.py", cwd=tmp_path).strip())
    assert found.is_relative_to(home)


@pytest.mark.slow
def test_wheel_has_every_module_and_template_and_the_license(checkout, built):
    templates = list((checkout / "ampatch" / "diagnostics" / "report" / "templates").iterdir())
    assert len(templates) == 5
    paths = [*(checkout / "ampatch").rglob("*.py"), *templates, checkout / "ampatch" / "py.typed"]
    names = zipfile.ZipFile(built["wheel"]).namelist()
    assert {path.relative_to(checkout).as_posix() for path in paths} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_library_in_a_wheel_is_found_once_installed(checkout, compiled, tmp_path_factory, tmp_path):
    copy = Path(shutil.copytree(checkout, tmp_path / "checkout", ignore=shutil.ignore_patterns(*LEFTOVERS)))
    library = extension.find()
    for name in (extension.LIBRARY, extension.SIDECAR):  # as `ampatch build --output csrc` leaves them
        shutil.copy(library.path.with_name(name), copy / "csrc")
    platform = sysconfig.get_platform().replace("-", "_")
    options = ["--no-isolation", "--wheel", f"--config-setting=--build-option=--plat-name={platform}"]

    run(sys.executable, "-m", "build", *options, cwd=copy)

    (wheel,) = (copy / "dist").glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    programs, packages = install(tmp_path_factory.mktemp("carrying"), str(wheel))
    probed = json.loads(run(programs / "python", "-I", "-c", PROBE, cwd=tmp_path))
    assert probed["library"] == [str(packages / "ampatch" / "csrc" / extension.LIBRARY), library.compiler]
    loads = "from ampatch.native import extension; extension.load(extension.find()); print(extension.loaded().path)"
    assert run(programs / "python", "-I", "-c", loads, cwd=tmp_path).strip() == probed["library"][0]


def test_torch_is_not_needed_to_build():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]

    assert [Requirement(line).name for line in build["requires"]] == ["setuptools"]


def test_every_dependency_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    assert all(pinned.values()), "each line is name==version"
    assert pinned["torch"] == "2.13.0"

    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    direct = [options["options"]["install_requires"], *options["options.extras_require"].values()]
    waiting = [line for block in direct for line in block.split("\n") if line and line[0] != "#"]
    needed: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        # What a CUDA build of torch brings is pinned by torch itself, and is not there with a CPU build.
        if wanted and name not in needed and not re.match(r"nvidia-|cuda-|triton", name):
            needed.add(name)
            waiting += [] if name in OF_TIMM else metadata.requires(name) or []
    needed |= set(OF_TIMM)
    assert needed <= set(pinned)

"""The checkpoint that Ctrl-C leaves: complete or absent, and one clear error if it cannot be resumed."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ampatch

from ampatch.demo import checkpoints, training
from ampatch.demo.checkpoints import Checkpoint, CheckpointError
from ampatch.demo.plan import Plan
from ampatch.demo.training import Result
from ampatch.errors import OptionError

PLAN = Plan(["O0", "O4"], ["bfloat16"], epochs=2, seed=3)
FLOAT32 = Result("O0", None, 0.99, 0.0084, 7.1, 7.06, 0.0, 0.0, 0, 1.0)
STATE = {"losses": [2.5], "seconds": [0.01], "counts": {}, "parts": {"model": torch.ones(3)}}
CHECKPOINT = Checkpoint(PLAN, "/results.json", [FLOAT32], STATE, "/report.html")


def contents(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


class TestSave:
    def test_a_checkpoint_loads_as_it_was_saved(self, tmp_path: Path) -> None:
        checkpoints.save(CHECKPOINT, tmp_path / "demo.pt")
        loaded = checkpoints.load(tmp_path / "demo.pt")

        assert (loaded.plan, loaded.json, loaded.report) == (PLAN, "/results.json", "/report.html")
        assert loaded.finished == [FLOAT32]
        assert loaded.running is not None
        assert (loaded.running["losses"], loaded.running["seconds"]) == ([2.5], [0.01])
        assert torch.equal(loaded.running["parts"]["model"], torch.ones(3))

    def test_a_checkpoint_between_two_runs_has_no_state(self, tmp_path: Path) -> None:
        between = Checkpoint(PLAN, None, [FLOAT32], None)
        checkpoints.save(between, tmp_path / "demo.pt")

        assert checkpoints.load(tmp_path / "demo.pt") == between

    def test_a_checkpoint_has_its_format_and_arguments_in_plain_values(self, tmp_path: Path) -> None:
        checkpoints.save(CHECKPOINT, tmp_path / "demo.pt")
        content = contents(tmp_path / "demo.pt")

        assert (content["format"], content["version"]) == ("ampatch demo", 4)
        assert content["arguments"] == {
            "opt_levels": ["O0", "O4"],
            "half_dtypes": ["bfloat16"],
            "epochs": 2,
            "seed": 3,
            "json": "/results.json",
            "report": "/report.html",
        }
        assert content["running"]["run"] == "O4 bfloat16"

    def test_a_link_is_written_through(self, tmp_path: Path) -> None:
        (tmp_path / "link.pt").symlink_to(tmp_path / "demo.pt")

        checkpoints.save(CHECKPOINT, tmp_path / "link.pt")

        assert (tmp_path / "link.pt").is_symlink()
        assert checkpoints.load(tmp_path / "demo.pt").plan == PLAN

    @pytest.mark.parametrize("there", [None, b"an earlier one"], ids=["nothing_there", "a_file_there"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
    def test_a_failed_save_leaves_the_folder_as_it_was(
        self, error: BaseException, there: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "demo.pt"
        if there is not None:
            target.write_bytes(there)

        def fail(_content: object, path: Path) -> None:
            path.write_bytes(b"a part")
            raise error

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(type(error)):
            checkpoints.save(CHECKPOINT, target)

        assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if there is None else [there])

    @pytest.mark.parametrize("target", [".", "/dev/null", "no/such/folder/demo.pt"])
    def test_a_checkpoint_replaces_an_ordinary_file_only(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        with pytest.raises(OptionError, match=r"it is a folder|it is no ordinary file|there is no folder"):
            checkpoints.save(CHECKPOINT, Path(target))


def spoiled(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def saved(content: object) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_compiled_script(path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), path)


def changed(**changes: object) -> Callable[[Path], None]:
    return lambda path: torch.save(contents(path) | changes, path)


# Those of `CHECKPOINT`, so that a case is wrong in nothing but what it changes.
ARGUMENTS = {**dataclasses.asdict(PLAN), "json": CHECKPOINT.json, "report": CHECKPOINT.report}

BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "cannot be read (No such file or directory)"),
    "a_folder": (a_folder, "cannot be read (Is a directory)"),
    "empty": (spoiled(lambda _: b""), "is no whole checkpoint"),
    "cut_short": (spoiled(lambda content: content[:-100]), "is no whole checkpoint"),
    "first_half": (spoiled(lambda content: content[: len(content) // 2]), "is no whole checkpoint"),
    "text": (spoiled(lambda _: b"opt_level: O1"), "is no whole checkpoint"),
    "a_module": (saved(torch.nn.Linear(1, 1)), "is no whole checkpoint"),
    "a_compiled_script": (a_compiled_script, "is no whole checkpoint"),
    "another_checkpoint": (saved({"model": torch.ones(3)}), "was not written by `ampatch demo`"),
    "a_tensor": (saved(torch.ones(3)), "was not written by `ampatch demo`"),
    "an_older_format": (changed(version=1), "the format of another version of ampatch: found 1, expected 4"),
    "a_newer_format": (changed(version=5), "the format of another version of ampatch: found 5, expected 4"),
    "without_arguments": (changed(arguments=None), "has been changed since"),
    "an_unknown_argument": (changed(arguments={**ARGUMENTS, "width": 3}), "has been changed since"),
    "no_state": (changed(running={}), "has been changed since"),
    "half_a_result": (changed(finished=[{"opt_level": "O0"}]), "has been changed since"),
}


class TestLoad:
    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("name", BAD)
    def test_a_bad_file_is_one_clear_error_and_nothing_is_trained(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoil, message = BAD[name]
        path = tmp_path / "demo.pt"
        checkpoints.save(CHECKPOINT, path)
        spoil(path)
        monkeypatch.setattr(training, "run", lambda *_args, **_kwargs: pytest.fail("trained"))
        with pytest.raises(CheckpointError):
            checkpoints.load(path)
        status, out, err = ampatch("demo", "--resume", path)
        (line,) = err.splitlines()
        assert (status, out) == (1, "")
        assert line.startswith(f"ampatch: error: '{path}' ")
        assert message in line
        assert "expected a file that `ampatch demo` saved" in line
        assert "leave --resume out" in line

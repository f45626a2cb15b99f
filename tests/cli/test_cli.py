"""The command `ampatch`: what it prints and where, its exit statuses, and how it ends when it is cut short."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fresh import COMMAND, Fresh

import ampatch
from ampatch import amp, demo, doctor
from ampatch.cast_lists import coverage, list_reports
from ampatch.cast_lists.lists import PEERS, peer, shipped
from ampatch.cli import main as cli
from ampatch.errors import UsageError
from ampatch.native import extension, extension_build
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

LISTS = (
    *("coverage", "list_edits", "list_reports", "lists", "paths", "patterns", "reader", "rules", "signatures"),
    *("spellings", "yaml_tree"),
)
SOUND = "blacklist:\n  torch.nn.functional: [linear]\n"  # a function of one spelling


def ends(arguments: list[str]) -> int | str | None:
    """The exit status of a command line that argparse itself answers."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return exit_.value.code


def python(*arguments: str, stdin: str = "", stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A run in an interpreter of its own, without what the environment tells this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


class TestCommandLine:
    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert ends(["--version"]) == 0
        assert capsys.readouterr().out == f"ampatch {ampatch.__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "commands"),
        [([], ["demo", "lists", "explain", "doctor", "build"]), (["lists"], ["show", "check", "diff", "coverage"])],
        ids=["top", "lists"],
    )
    def test_help_has_a_sentence_on_each_command(
        self,
        arguments: list[str],
        commands: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", "120")

        assert ends([*arguments, "--help"]) == 0

        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        for command in commands:
            (sentence,) = (rest[0] for first, *rest in filter(None, lines) if first == command)
            assert sentence[0].isupper()
            assert sentence.endswith(".")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "ampatch: error: the following arguments are required: COMMAND"),
            (["train"], "ampatch: error: argument COMMAND: invalid choice: 'train'"),
            (["--verbose", "demo"], "ampatch: error: unrecognized arguments: --verbose"),
            (["lists"], "ampatch lists: error: the following arguments are required: COMMAND"),
            (
                ["lists", "show", "--half-dtype", "flaot16"],
                "ampatch lists show: error: argument --half-dtype: the half type is 'flaot16'; expected",
            ),
            (
                ["lists", "show", "--cast-lists"],
                "ampatch lists show: error: argument --cast-lists: expected one argument",
            ),
            (
                ["lists", "show", "--cast-lists", ""],
                "ampatch lists show: error: argument --cast-lists: the name of a file",
            ),
            (["lists", "check"], "ampatch lists check: error: the following arguments are required: FILE"),
            (["lists", "check", ""], "ampatch lists check: error: argument FILE: the name of a file is empty"),
            (["lists", "diff", "apex", "b"], "ampatch: error: unrecognized arguments: b"),
            (
                ["lists", "diff", "apx"],
                "ampatch lists diff: error: argument SYSTEM | FILE: 'apx' is neither one of apex, torch_autocast_cuda,",
            ),
            (["lists", "diff", ""], "ampatch lists diff: error: argument SYSTEM | FILE: the name of a file is empty"),
            (
                ["build", "--device", "gpu"],
                "ampatch build: error: argument --device: invalid choice: 'gpu' (choose from 'auto', 'cpu', 'cuda')",
            ),
            (["build", "--output", ""], "ampatch build: error: argument --output: the name of a file is empty"),
            (["explain"], "ampatch explain: error: the following arguments are required: NAME"),
            (
                ["explain", "mm", "--half-dtype", "flaot16"],
                "ampatch explain: error: argument --half-dtype: the half type is 'flaot16'; expected",
            ),
            (["demo", "--epochs", "0"], "ampatch demo: error: argument --epochs: '0' is not a whole number"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_wrong_one_is_status_2_and_one_clear_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert ends(arguments) == 2

        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.splitlines()[-1].startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["demo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lists", "build"))]
)
def test_that_numpy_is_missing_is_not_said(command: str) -> None:
    program = (
        f"import sys; sys.modules['numpy'] = None; from ampatch.cli.main import main;main(['{command}', '--help'])"
    )

    done = python("-c", program)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ampatch {command}")


#: Runs a command, then prints which modules beginning so are there; those that torch itself has imported excepted.
NAMED = ". Type the name that stands after `import`, such as package.module."
ALONE = "For its traceback, type: python -c"
WHAT_IT_IMPORTS = """
import contextlib, io, sys
before = set(sys.modules)
from ampatch.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments})
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "ampatch")))
"""


def imported_by(arguments: list[str], fresh: Fresh | None = None) -> set[str]:
    """What a command imports of torch, or beside it in an interpreter that has it, and of this package."""
    code = WHAT_IT_IMPORTS.format(arguments=arguments)
    done = python("-c", code) if fresh is None else fresh.run(code)
    assert done.stderr == ""
    return set(done.stdout.split())


class TestImports:
    """What a command waits for before it says anything."""

    @pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
    def test_help_does_not_wait_for_torch(self, arguments: list[str]) -> None:
        found = imported_by(arguments)
        assert "ampatch.cli.commands" in found
        assert not any(name.startswith("torch") for name in found)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "arguments",
        [
            ["lists", "show"],
            pytest.param(["lists", "diff", "apex"], marks=pytest.mark.slow),
            pytest.param(["lists", "check", os.devnull], marks=pytest.mark.slow),
            pytest.param(["lists", "coverage"], marks=pytest.mark.slow),
        ],
        ids=" ".join,
    )
    def test_cast_lists_wait_for_torch_alone_and_for_nothing_that_patches_it(
        self, fresh: Fresh, arguments: list[str]
    ) -> None:
        found = imported_by(arguments, fresh)
        assert {name for name in found if name.startswith("ampatch.")} == {
            *(
                f"ampatch.{name}"
                for name in ("cast_lists", "cli", "diagnostics", "errors", "function_wrapper", "grouping", "lists")
            ),
            *("ampatch.opt_levels", "ampatch.half_types", "ampatch.torch_private", "ampatch.torch_private.operators"),
            *(f"ampatch.cli.{name}" for name in ("commands", "main", "run", "script_report", "users_errors")),
            *("ampatch.diagnostics.json_files", "ampatch.version"),
            *(f"ampatch.cast_lists.{name}" for name in LISTS),
        }
        assert not any(name.startswith("torch") for name in found)  # neither torch._dynamo nor torch.distributed


class TestDemo:
    def test_its_arguments_and_its_status_are_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def run(arguments: argparse.Namespace) -> int:
            asked.append(arguments.epochs)
            return 7

        monkeypatch.setattr(demo, "run", run)

        assert cli.main(["demo", "--epochs", "3"]) == 7
        assert asked == [3]

    @pytest.mark.slow
    def test_other_commands_do_not_wait_for_it(self, fresh: Fresh) -> None:
        program = (
            "import sys; from ampatch.cli.main import main;"
            "main(['lists', 'show']); print('ampatch.demo' in sys.modules)"
        )

        assert fresh.run(program).stdout.splitlines()[-1] == "False"


class TestShow:
    def test_it_prints_the_policy_of_both_half_types(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "show"]) == 0

        assert capsys.readouterr().out.splitlines() == list_reports.policy(shipped())

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "fp16", "torch.bfloat16"])
    def test_or_of_one(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "show", "--half-dtype", name]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("torch.exp ") for line in lines) == (name in ("float16", "fp16"))
        assert not any("only" in line for line in lines)

    def test_names_are_those_whose_rules_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "show", "softmax", "torch.mm", "--half-dtype", "float16"]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert lines == list_reports.policy(shipped(), [torch.float16], ["softmax", "torch.mm"])
        assert {line.split()[0].rpartition(".")[2] for line in lines} == {"softmax", "mm"}

    def test_a_name_that_nothing_has_is_status_1_and_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "show", "softmx"]) == 1

        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("ampatch: error: 'softmx' is on no list")
        assert "Did you mean 'softmax'" in printed.err

    def test_names_are_looked_for_in_files_laid_over_them_too(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(SOUND)
        assert cli.main(["lists", "show", "F.linear", "--cast-lists", str(file)]) == 0
        assert capsys.readouterr().out == f"torch.nn.functional.linear  blacklist  {file}:2\n"

    def test_files_are_laid_over_the_lists_in_their_order(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
        first.write_text("blacklist:\n  torch: [mm, bmm]\n")
        second.write_text("unlisted:\n  torch: [bmm]\n")

        assert cli.main(["lists", "show", "--cast-lists", str(first), "--cast-lists", str(second)]) == 0

        rules = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
        assert rules["torch.mm"] == ["blacklist", f"{first}:2"]
        assert "torch.bmm" not in rules
        assert rules["torch.Tensor.mm"][0] == "whitelist"

    def test_a_fault_in_a_file_is_status_1_and_all_on_standard_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("whitelist:\n  torch: [mmm]\nblaklist: {}\n")

        assert cli.main(["lists", "show", "--cast-lists", str(file)]) == 1

        printed = capsys.readouterr()
        assert printed.out == ""
        one, other = printed.err.splitlines()
        assert one.startswith(f"ampatch: error: {file}:2: 'torch' has no 'mmm'.")
        assert other.startswith(f"ampatch: error: {file}:3: unknown list 'blaklist'")


class TestCheck:
    def test_a_sound_file_is_status_0_and_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(SOUND)

        assert cli.main(["lists", "check", str(file)]) == 0

        printed = capsys.readouterr()
        assert printed.out == f"{file} is sound: it changes how 1 path is treated.\n"
        assert printed.err == ""

    def test_what_is_undone_or_left_out_is_told_before(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("whitelist:\n  torch.nn.functional: [softmax]\nblacklist:\n  torch: [mm]\n")

        assert cli.main(["lists", "check", str(file)]) == 0

        undone, left_out, verdict = capsys.readouterr().out.splitlines()
        assert undone.startswith(
            f"{file}:2: torch.nn.functional.softmax is in the whitelist now, but it calls functions that undo"
        )
        assert left_out.startswith(f"{file}:4: torch.mm is in the blacklist now, but torch.Tensor.mm ")
        assert verdict == (
            f"{file} can be read, but 1 of its changes is undone by calls inside the function: it changes how 2 paths "
            "are treated."
        )

    @pytest.mark.parametrize(
        ("content", "faults"),
        [
            pytest.param(
                "whitelist:\n  torch: [mmm]\nblaklist: {}\n", [":2: 'torch' has no 'mmm'", ":3: "], id="names"
            ),
            pytest.param("promote: {torch: [{name: 1}, exq]}\n", [":1: name: found", ":1: "], id="two on a line"),
            pytest.param("whitelist:\n  ]\n", [":2: not valid YAML"], id="not YAML"),
            pytest.param("whitelist: {torch: [mm]}\n\0", [":2: not valid YAML"], id="a control character"),
            pytest.param("blacklist: {torch: [mm, 'two\n\n  lines']}\n", [":1: 'torch' has no"], id="a name in lines"),
            pytest.param("just a sentence\n", [":1: found"], id="no mapping"),
            pytest.param("whitelist: !!python/object:os.system {}\n", [":1: "], id="an object"),
            pytest.param(b"\xff\xfe\xfa", [":1: "], id="not text"),
            pytest.param("whitelist: " + 10_000 * "[", [": "], id="too deep"),
        ],
    )
    def test_each_fault_is_one_line_and_the_status_1(
        self, content: str | bytes, faults: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

        assert cli.main(["lists", "check", str(file)]) == 1

        printed = capsys.readouterr()
        assert printed.err == ""
        lines = printed.out.splitlines()
        assert len(lines) == len(faults)
        for line, fault in zip(lines, faults, strict=True):
            assert line.startswith(f"{file}{fault}")

    @pytest.mark.parametrize(
        ("name", "why"),
        [("missing.yaml", "No such file"), ("", "Is a directory"), ("two\nlines.yaml", "No such file")],
        ids=["missing", "folder", "name in lines"],
    )
    def test_what_cannot_be_read_is_a_fault(
        self, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["lists", "check", str(tmp_path / name)]) == 1

        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{tmp_path / name}: ".replace("\n", " "))
        assert why in line

    def test_of_several_files_each_is_checked_by_itself(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        faulty, sound, opposite = tmp_path / "faulty.yaml", tmp_path / "sound.yaml", tmp_path / "opposite.yaml"
        faulty.write_text("whitelist:\n  torch: [mmm]\n")
        sound.write_text(SOUND)
        opposite.write_text("whitelist:\n  torch.nn.functional: [linear]\n")  # as it is in the shipped lists

        assert cli.main(["lists", "check", str(faulty), str(sound), str(opposite)]) == 1

        first, second, third = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{faulty}:2: 'torch' has no 'mmm'")
        assert second == f"{sound} is sound: it changes how 1 path is treated."
        assert third == f"{opposite} is sound: it changes how 0 paths are treated."
        assert cli.main(["lists", "check", str(sound), str(opposite)]) == 0

    @pytest.mark.parametrize(
        ("content", "status"),
        [
            pytest.param("whitelist: {torch.nn.functional: [softmax]}", 1, id="undone"),
            pytest.param("blacklist: {torch: [mm]}", 0, id="left out"),
            pytest.param("whitelist: {torch: [mmm]}", 1, id="a fault"),
            pytest.param(SOUND, 0, id="sound"),
        ],
    )
    def test_strict_counts_an_undone_edit_as_a_fault(self, content: str, status: int, tmp_path: Path) -> None:
        file, sound = tmp_path / "own.yaml", tmp_path / "sound.yaml"
        file.write_text(content)
        sound.write_text(SOUND)

        assert cli.main(["lists", "check", "--strict", str(file), str(sound)]) == status

    @pytest.mark.slow
    def test_a_pipe_can_be_checked(self, fresh: Fresh) -> None:
        piped = f"here, there = os.pipe(); os.write(there, {SOUND.encode()}); os.close(there); os.dup2(here, 0); "

        done = fresh.run(piped + COMMAND, "lists", "check", "/dev/stdin")

        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "/dev/stdin is sound: it changes how 1 path is treated.\n"

    def test_a_name_that_the_output_cannot_encode_is_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", output)

        assert cli.main(["lists", "check", os.fsdecode(b"\xff\xe2\x82\xac.yaml")]) == 1

        assert output.buffer.getvalue().startswith(rb"\udcff\u20ac.yaml: ")


class TestHome:
    """What the shell leaves as it is: a "~" in quotes."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own.yaml").write_text(SOUND)
        monkeypatch.setenv("HOME", str(tmp_path))

    def test_check(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "check", "~/own.yaml"]) == 0
        assert capsys.readouterr().out.startswith(f"{tmp_path}/own.yaml is sound")

    @pytest.mark.parametrize("arguments", [["--cast-lists", "~/own.yaml"], ["--cast-lists=~/own.yaml"]], ids=" ".join)
    def test_show(self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "show", *arguments]) == 0
        assert f"{tmp_path}/own.yaml:2" in capsys.readouterr().out


class TestDiff:
    def test_variables_in_the_path_of_a_file_are_told_of(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert ends(["lists", "diff", "$HOME/own.yaml"]) == 2

        assert "nor a file that exists. Variables are not expanded in paths: " in capsys.readouterr().err

    @pytest.mark.parametrize("name", PEERS)
    @pytest.mark.parametrize("dtype", list_reports.BOTH, ids=str)
    def test_it_compares_a_peer_with_the_shipped_lists(
        self, name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["lists", "diff", name, "--half-dtype", str(dtype).removeprefix("torch.")]) == 0

        assert capsys.readouterr().out.splitlines() == list_reports.difference(peer(name), shipped(), name, [dtype])

    @pytest.mark.parametrize(
        ("name", "half_dtypes"),
        [
            ("apex", "float16"),
            ("torch_autocast_cuda", "float16 and bfloat16"),
            ("torch_autocast_cpu", "float16 and bfloat16"),
        ],
    )
    def test_by_default_it_compares_in_the_half_types_that_the_peer_has(
        self, name: str, half_dtypes: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["lists", "diff", name]) == 0

        legend, *_, count = capsys.readouterr().out.splitlines()
        assert legend == f"Columns: function; its list in {name}; its list in ampatch (-: none)."
        assert f" paths treated differently in {half_dtypes}: " in count

    @pytest.mark.parametrize("form", ["{file}", "~/own.yaml"])
    def test_it_compares_a_file_with_the_shipped_lists(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        file = tmp_path / "own.yaml"
        file.write_text(SOUND)

        assert cli.main(["lists", "diff", form.format(file=file)]) == 0

        assert capsys.readouterr().out.splitlines() == [
            f"Columns: function; its list in the shipped lists; its list with {file} laid over them (-: none).",
            "torch.nn.functional.linear  whitelist  blacklist",
            "1 path treated differently in float16 and bfloat16: 1 moved or changed, 0 taken out, 0 new.",
        ]

    def test_of_a_file_in_one_half_type(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("unlisted: {torch: [{name: mm, dtypes: [float16]}]}\n")
        assert cli.main(["lists", "diff", str(file), "--half-dtype", "bf16"]) == 0
        assert capsys.readouterr().out == "0 paths treated differently in bfloat16.\n"

    def test_a_fault_in_a_file_is_status_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("whitelist: {torch: [mmm]}\n")
        assert cli.main(["lists", "diff", str(file)]) == 1
        assert capsys.readouterr().err.startswith(f"ampatch: error: {file}:1: 'torch' has no 'mmm'.")

    def test_a_file_with_the_name_of_a_system_goes_by_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "apex").write_text(SOUND)
        assert cli.main(["lists", "diff", "apex"]) == 0
        assert capsys.readouterr().out.startswith("Columns: function; its list in apex;")
        assert cli.main(["lists", "diff", "./apex"]) == 0
        assert capsys.readouterr().out.startswith("Columns: function; its list in the shipped lists;")


class TestCoverage:
    def test_where_all_is_decided_the_status_is_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "coverage"]) == 0

        assert capsys.readouterr().out.splitlines() == list_reports.covered(coverage.coverage(shipped()))

    @pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
    def test_a_function_that_has_neither_a_list_nor_a_reason_is_shown_and_status_1(
        self, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.linalg, "brand_new", lambda input: input, raising=False)
        monkeypatch.setattr(torch.linalg.brand_new, "__module__", "torch")

        assert cli.main(["lists", "coverage", *options]) == 1

        assert "torch.linalg.brand_new" in capsys.readouterr().out

    def test_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lists", "coverage", "--json"]) == 0

        assert json.loads(capsys.readouterr().out) == coverage.coverage(shipped()).to_dict()


class TestDoctor:
    @pytest.fixture
    def write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
        """Writes a module into the current folder, where the command finds it; undoes what its import did."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(F, "linear", F.linear)
        monkeypatch.setattr(F, "interpolate", F.interpolate)
        written = []

        def write(name: str, source: str) -> None:
            written.append(name)
            (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")

        path = list(sys.path)
        yield write
        for name in written:
            sys.modules.pop(name, None)
        assert sys.path == path

    def test_it_reports_on_amp_set_up_for_that_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        with amp.init():
            expected = list(doctor.report())

        assert cli.main(["doctor"]) == 0

        printed = capsys.readouterr()
        *lines, empty, last = printed.out.splitlines()
        assert lines == expected
        assert (empty, last) == ("", "amp was set up for this report alone, with the defaults of amp.init().")
        assert printed.err == ""
        assert runtime.live is None

    def test_modules_are_imported_first_in_their_order(
        self, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("plug_in", "import torch.nn.functional as F\ndef fast(*_): ...\nF.linear = fast\n")
        write("late", "from torch.nn.functional import linear\nkept = lambda x, f=linear: f(x)\n")

        assert cli.main(["doctor", "plug_in", "late"]) == 0

        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert f"torch.nn.functional.linear: fast of plug_in ({Path.cwd() / 'plug_in.py'}:2)" in lines
        assert f"<lambda> of late ({Path.cwd() / 'late.py'}:2): torch.nn.functional.linear as f" in lines
        assert "late.linear: torch.nn.functional.linear" not in lines

    def test_where_a_module_sets_amp_up_it_reports_on_that(
        self, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("script", "import torch\nfrom ampatch import amp\namp.init(half_dtype=torch.float16)\n")

        assert cli.main(["doctor", "script"]) == 0

        assert capsys.readouterr().out.splitlines() == list(doctor.report())
        assert runtime.live is not None

    @pytest.mark.parametrize(
        ("name", "why", "advice"),
        [
            ("missing", "ModuleNotFoundError: No module named 'missing'", NAMED),
            ("raise", "ModuleNotFoundError: No module named 'raise'", f"{NAMED} Did you mean 'raises'?"),
            (
                "sound.py",
                "ModuleNotFoundError: No module named 'sound.py'; 'sound' is not a package",
                f"{NAMED} Did you mean 'sound'?",
            ),
            ("", "ValueError: Empty module name", NAMED),
            (
                ".sound",
                "TypeError: the 'package' argument is required to perform a relative import for '.sound'",
                f"{NAMED} Did you mean 'sound'?",
            ),
            (
                "raises",
                "ValueError: of its own, in lines",
                f", at raises.py:2: raise ValueError('of its own,\\nin lines'). {ALONE} 'import raises'",
            ),
            ("ends", "SystemExit: 0", f", at ends.py:1: raise SystemExit(0). {ALONE} 'import ends'"),
            ("ends.py", "SystemExit: 0", f", at ends.py:1: raise SystemExit(0). {ALONE} 'import ends.py'"),
            (
                "needs",
                "ModuleNotFoundError: No module named 'absent_package'",
                f", at needs.py:1: import absent_package. {ALONE} 'import needs'",
            ),
            (
                "wrong",
                "SyntaxError: invalid syntax (wrong.py, line 2)",
                f", at wrong.py:2: x = = 3. {ALONE} 'import wrong'",
            ),
        ],
        ids=["missing", "similar", "file", "empty", "relative", "raises", "ends", "ends_too", "needs", "syntax"],
    )
    def test_a_module_that_cannot_be_imported_is_status_1_and_a_line(
        self, name: str, why: str, advice: str, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("raises", "import json\nraise ValueError('of its own,\\nin lines')\n")
        write("ends", "raise SystemExit(0)\n")
        write("needs", "import absent_package\n")
        write("wrong", "x = 3\nx = = 3\n")
        write("sound", "")

        assert cli.main(["doctor", name]) == 1

        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line == f"ampatch: error: the module {name!r} cannot be imported ({why}){advice}"

    def test_where_amp_cannot_be_set_up_there_is_the_report_and_why(
        self, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("plug_in", "import torch.nn.functional as F\ndef fast(*_): ...\nF.interpolate = fast\n")
        shipped.cache_clear()
        try:
            assert cli.main(["doctor", "plug_in"]) == 1
        finally:
            shipped.cache_clear()

        printed = capsys.readouterr()
        assert f"    torch.nn.functional.interpolate: fast of plug_in ({Path.cwd() / 'plug_in.py'}:2)\n" in printed.out
        (line,) = printed.err.splitlines()
        assert line.startswith("ampatch: error: blacklist.yaml:")
        assert "torch.nn.functional.interpolate" in line

    def test_cut_short_it_leaves_torch_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> None:
            assert runtime.live is not None
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "report", interrupted)

        assert cli.main(["doctor"]) == 130
        assert runtime.live is None

    @pytest.mark.slow
    def test_the_current_folder_is_searched_however_it_is_started(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("print('imported')\n")
        program = f"import os, sys; os.chdir({str(tmp_path)!r}); from ampatch.cli.main import main; sys.exit(main())"

        done = python("-P", "-c", program, "doctor", "mine")

        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("imported\nVersions\n")


class TestListsOfOnesOwnModules:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "command",
        [
            pytest.param(["check"], id="check", marks=pytest.mark.slow),
            pytest.param(["show", "--cast-lists"], id="show"),
        ],
    )
    def test_the_current_folder_is_searched_however_it_is_started(
        self, fresh: Fresh, tmp_path: Path, command: list[str]
    ) -> None:
        (tmp_path / "mine.py").write_text("def product(a, b): return a @ b\n")
        (tmp_path / "casts.yaml").write_text("whitelist: {mine: [product]}\n")
        program = f"import os, sys; os.chdir({str(tmp_path)!r}); from ampatch.cli.main import main; sys.exit(main())"

        done = fresh.run(program, "lists", *command, "casts.yaml")

        assert (done.returncode, done.stderr) == (0, "")

    def test_functions_that_a_pattern_matches_are_shown_once_they_are_imported(
        self, tmp_path: Path, package: Callable[..., None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        package("of_mine", losses="def far_loss(x): return x\n")
        file = tmp_path / "casts.yaml"
        file.write_text('blacklist: {of_mine.*: ["*_loss"]}\n')
        for options, expected in [
            ([], f"of_mine.*.*_loss  blacklist  {file}:1  matches nothing yet: import of_mine or its modules first\n"),
            (["--import", "of_mine.losses"], f"of_mine.losses.far_loss  blacklist  {file}:1\n"),
        ]:
            assert cli.main(["lists", "show", "of_mine", "--cast-lists", str(file), *options]) == 0
            assert capsys.readouterr().out == expected


class TestBuild:
    @pytest.fixture(autouse=True)
    def sources(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A source for a compiler that takes anything; an empty cache; no nvcc."""
        directory = tmp_path / "csrc"
        directory.mkdir()
        (directory / "operators.cpp").write_text("")
        (directory / "calls").mkdir()
        (directory / "calls" / "calls.cpp").write_text("")
        compiler = tmp_path / "compiler"
        compiler.write_text(
            '#!/bin/sh\ncase "$*" in *--version*) echo "mine 1.0"; exit 0;; esac\n'
            'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setattr(extension, "source_directory", lambda: directory)
        monkeypatch.setattr(extension_build, "_try_out", lambda *_arguments: None)
        monkeypatch.setattr(extension_build, "_nvcc_places", lambda: ["/nowhere"])
        monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("CXX", str(compiler))
        return directory

    def test_it_says_what_it_builds_with_what_and_where(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["build", "--device", "cpu"]) == 0

        library = extension.find()
        assert library is not None
        printed = capsys.readouterr()
        calls = extension.find(extension.CALLS)
        assert calls is not None
        built = "Built and tried out in N seconds."
        assert [re.sub(r"\d+ seconds", "N seconds", line) for line in printed.out.splitlines()] == [
            f"Compiler: mine 1.0 ({tmp_path / 'compiler'})",
            "Kernels:  for the CPU",
            f"Library:  {library.path}",
            built,
            f"Calls:    {calls.path}",
            built,
        ]
        assert printed.err == ""

    def test_what_is_left_out_is_a_line_more(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["build"]) == 0

        first, second, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("CPU kernels only: ")
        assert second.startswith("Compiler: mine 1.0 ")

    def test_what_is_there_is_left_unless_it_is_forced(self, capsys: pytest.CaptureFixture[str]) -> None:
        ends = []
        for options in ([], [], ["--force"]):
            assert cli.main(["build", *options]) == 0
            lines = capsys.readouterr().out.splitlines()
            ends.append([line.partition(" in ")[0] for line in (lines[-3], lines[-1])])

        there = "It is there already, built from these very sources. `ampatch build --force` builds it again."
        assert ends == [["Built and tried out"] * 2, [there, "It is there already."], ["Built and tried out"] * 2]

    def test_without_pythons_headers_calls_stay_in_python_and_that_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(extension_build.sysconfig, "get_path", lambda _name: str(tmp_path))
        assert cli.main(["build"]) == 0

        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"Calls of patched functions stay in plain Python: there is no {tmp_path}/Python.h. ")
        assert extension.find() is not None
        assert extension.find(extension.CALLS) is None

    def test_the_library_can_be_put_elsewhere(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["build", "--output", str(tmp_path / "out")]) == 0

        assert f"Library:  {tmp_path / 'out' / extension.LIBRARY}" in capsys.readouterr().out.splitlines()
        assert extension.read(tmp_path / "out") is not None

    def test_architectures_are_told_apart_by_commas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def plan(*arguments: object) -> None:
            asked.append(arguments)
            raise UsageError("seen")

        monkeypatch.setattr(extension_build, "plan", plan)

        assert cli.main(["build", "--device", "cuda", "--arch", "80,9.0"]) == 1
        assert asked == [("cuda", ["80", "9.0"], None)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--device", "cuda"], "ampatch: error: kernels for GPUs were asked for, and there is no nvcc in "),
            (["--arch", "80,ninety"], "ampatch: error: architectures: found 'ninety', expected "),
            (["--arch", "80,"], "ampatch: error: architectures: found '', expected "),
            (["--device", "cpu", "--arch", "80"], "ampatch: error: architectures: found 80, although device='cpu'"),
        ],
        ids=" ".join,
    )
    def test_what_cannot_be_built_is_status_1_and_a_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["build", *arguments]) == 1

        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(message)

    def test_so_is_a_compiler_that_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        compiler = tmp_path / "compiler"
        compiler.write_text(compiler.read_text() + "echo 'operators.cpp:1: error: what'; exit 1\n")

        assert cli.main(["build"]) == 1

        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ampatch: error: compiling the extension failed: `{compiler}` ended with status 1: ")
        assert "operators.cpp:1: error: what" in line
        assert line.endswith(".log.")


class TestEnds:
    """Cut short, it ends quietly."""

    def test_ctrl_c_is_status_130(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def interrupted(*_arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(list_reports, "policy", interrupted)

        assert cli.main(["lists", "show"]) == 130
        assert capsys.readouterr() == ("", "")

    def test_an_error_raised_on_purpose_is_status_1_and_a_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(_arguments: object) -> int:
            raise UsageError("out of order:\n  do this first.")

        monkeypatch.setattr(demo, "run", fail)

        assert cli.main(["demo"]) == 1
        assert capsys.readouterr() == ("", "ampatch: error: out of order: do this first.\n")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "arguments", [["lists", "show"], pytest.param(["--help"], marks=pytest.mark.slow)], ids=" ".join
    )
    def test_a_reader_that_has_stopped_reading_is_status_141(self, fresh: Fresh, arguments: list[str]) -> None:
        nobody_reads = "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1); "

        done = fresh.run(nobody_reads + COMMAND, *arguments)

        assert (done.returncode, done.stderr) == (141, "")

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
    @pytest.mark.parametrize(
        "arguments", [["lists", "show"], pytest.param(["--help"], marks=pytest.mark.slow)], ids=" ".join
    )
    def test_a_full_disk_is_status_1_and_a_line(self, fresh: Fresh, arguments: list[str]) -> None:
        done = fresh.run(COMMAND, *arguments, stdout="/dev/full")

        assert (done.returncode, done.stderr) == (1, "ampatch: error: [Errno 28] No space left on device\n")

    @pytest.mark.slow
    def test_without_a_standard_output_it_still_gives_its_status(self) -> None:
        program = (
            "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'ampatch', *sys.argv[1:]])"
        )

        done = python("-c", program, "lists", "check", os.devnull)

        assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command() -> None:
    done = python("-W", "error", "-m", "ampatch", "--version")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"ampatch {ampatch.__version__}\n", "")

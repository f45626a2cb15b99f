"""The command `ampatch`: its output, its exit statuses, and how it ends when it is interrupted."""

from __future__ import annotations

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
from command_line import ampatch
from fresh import COMMAND, Fresh

from ampatch import __version__, amp, demo, doctor
from ampatch.cast_lists import coverage, list_reports
from ampatch.cast_lists.lists import PEERS, peer, shipped
from ampatch.cli.main import main
from ampatch.errors import UsageError
from ampatch.native import extension, extension_build
from ampatch.runtime import runtime

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

LISTS = (
    *("coverage", "list_edits", "list_reports", "lists", "paths", "patterns", "reader", "rules", "signatures"),
    *("spellings", "yaml_tree"),
)
SOUND = "blacklist:\n  torch.nn.functional: [linear]\n"  # a function of one spelling


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of the user's, in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def write(content: str | bytes, name: str = "own.yaml") -> Path:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


def python(*arguments: str, stdin: str = "", stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Runs Python without the variables that configure this interpreter."""
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
    @pytest.mark.parametrize(
        ("arguments", "commands"),
        [([], ["demo", "lists", "explain", "doctor", "build"]), (["lists"], ["show", "check", "diff", "coverage"])],
        ids=["top", "lists"],
    )
    def test_help_has_a_sentence_on_each_command(
        self, arguments: list[str], commands: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "120")
        status, out, _ = ampatch(*arguments, "--help")
        assert status == 0
        for command in commands:
            assert re.search(rf"^ *{command} +[A-Z].*\.$", out, re.MULTILINE)

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
            (["lists", "diff", "apex", "b"], "ampatch lists diff: error: unrecognized arguments: b"),
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
    def test_a_wrong_command_line_is_status_2_and_one_clear_line(self, arguments: list[str], message: str) -> None:
        status, out, err = ampatch(*arguments)
        assert (status, out) == (2, "")
        assert err.splitlines()[-1].startswith(message)

    @pytest.mark.parametrize(
        ("arguments", "meant"),
        [
            (["list"], "lists"),
            (["lists", "chek"], "check"),
            (["build", "--device", "cudaa"], "cuda"),
            (["run", "--reprot", "amp.html", "train.py"], "--report"),
            (["run", "--trace-overflows", "train.py"], "--trace-overflow"),
            (["doctor", "--devise-check"], "--device-check"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_misspelled_choice_or_option_is_asked_about(self, arguments: list[str], meant: str) -> None:
        _, _, err = ampatch(*arguments)
        assert err.splitlines()[-1].endswith(f" Did you mean {meant!r}?")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "lists", "build"])
def test_commands_do_not_warn_that_numpy_is_missing(command: str) -> None:
    program = (
        f"import sys; sys.modules['numpy'] = None; from ampatch.cli.main import main; main(['{command}', '--help'])"
    )
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ampatch {command}")


#: Runs a command, then prints the modules of ampatch and torch that it imported; torch itself excepted if it was there.
WHAT_IT_IMPORTS = """
import contextlib, io, sys
before = set(sys.modules)
from ampatch.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments})
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "ampatch")))
"""


class TestImports:
    @pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
    def test_help_does_not_wait_for_torch(self, arguments: list[str]) -> None:
        found = python("-c", WHAT_IT_IMPORTS.format(arguments=arguments)).stdout.split()
        assert "ampatch.cli.commands" in found
        assert not any(name.startswith("torch") for name in found)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "arguments",
        [["lists", "show"], ["lists", "diff", "apex"], ["lists", "check", os.devnull], ["lists", "coverage"]],
        ids=" ".join,
    )
    def test_commands_of_cast_lists_import_torch_and_nothing_that_patches_it(
        self, fresh: Fresh, arguments: list[str]
    ) -> None:
        done = fresh.run(WHAT_IT_IMPORTS.format(arguments=arguments))
        assert done.stderr == ""
        found = done.stdout.split()
        assert {name for name in found if name.startswith("ampatch.")} == {
            *(
                f"ampatch.{name}"
                for name in ("cast_lists", "cli", "diagnostics", "errors", "formats", "function_wrapper", "grouping")
            ),
            *("ampatch.half_types", "ampatch.lists", "ampatch.opt_levels"),
            *("ampatch.torch_private", "ampatch.torch_private.operators"),
            *(f"ampatch.cli.{name}" for name in ("commands", "main", "run", "script_report", "users_errors")),
            *("ampatch.diagnostics.json_files", "ampatch.version"),
            *(f"ampatch.cast_lists.{name}" for name in LISTS),
        }
        assert not any(name.startswith("torch") for name in found)  # neither torch._dynamo nor torch.distributed


def test_demo_gets_its_arguments_and_decides_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda arguments: arguments.epochs)
    assert ampatch("demo", "--epochs", "7").status == 7


class TestShow:
    def test_both_half_types_are_shown_by_default(self) -> None:
        assert ampatch("lists", "show").out.splitlines() == list_reports.policy(shipped())

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "fp16", "torch.bfloat16"])
    def test_one_half_type_is_shown_on_request(self, name: str) -> None:
        lines = ampatch("lists", "show", "--half-dtype", name).out.splitlines()
        assert any(line.startswith("torch.exp ") for line in lines) == (name in ("float16", "fp16"))
        assert not any("only" in line for line in lines)

    def test_named_functions_are_shown_alone(self) -> None:
        lines = ampatch("lists", "show", "softmax", "torch.mm", "--half-dtype", "float16").out.splitlines()
        assert lines == list_reports.policy(shipped(), [torch.float16], ["softmax", "torch.mm"])
        assert {line.split()[0].rpartition(".")[2] for line in lines} == {"softmax", "mm"}

    def test_an_unknown_name_is_status_1_and_a_line(self) -> None:
        status, out, err = ampatch("lists", "show", "softmx")
        assert (status, out) == (1, "")
        assert err.startswith("ampatch: error: 'softmx' is on no list")
        assert "Did you mean 'softmax'" in err

    @pytest.mark.parametrize("option", [["--cast-lists", "~/own.yaml"], ["--cast-lists=~/own.yaml"]], ids=" ".join)
    def test_names_are_looked_up_in_the_users_files_too(self, option: list[str], own: Callable[..., Path]) -> None:
        file = own(SOUND)
        status, out, _ = ampatch("lists", "show", "F.linear", *option)
        assert (status, out) == (0, f"torch.nn.functional.linear  blacklist  {file}:2\n")

    def test_files_are_laid_over_the_lists_in_their_order(self, own: Callable[..., Path]) -> None:
        first = own("blacklist:\n  torch: [mm, bmm]\n", "first.yaml")
        second = own("unlisted:\n  torch: [bmm]\n", "second.yaml")
        out = ampatch("lists", "show", "--cast-lists", first, "--cast-lists", second).out
        rules = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
        assert rules["torch.mm"] == ["blacklist", f"{first}:2"]
        assert "torch.bmm" not in rules
        assert rules["torch.Tensor.mm"][0] == "whitelist"


@pytest.mark.parametrize("command", [["lists", "show", "--cast-lists"], ["lists", "diff"]], ids=" ".join)
def test_faults_of_a_file_are_status_1_and_lines_on_standard_error(
    command: list[str], own: Callable[..., Path]
) -> None:
    file = own("whitelist:\n  torch: [mmm]\nblaklist: {}\n")
    status, out, err = ampatch(*command, file)
    assert (status, out) == (1, "")
    one, other = err.splitlines()
    assert one.startswith(f"ampatch: error: {file}:2: 'torch' has no 'mmm'.")
    assert other.startswith(f"ampatch: error: {file}:3: unknown list 'blaklist'")


class TestCheck:
    @pytest.mark.parametrize("name", ["{file}", "~/own.yaml"])
    def test_a_sound_file_is_status_0_and_one_sentence(self, name: str, own: Callable[..., Path]) -> None:
        file = own(SOUND)
        told = f"{file} is sound: it changes how 1 path is treated.\n"
        assert ampatch("lists", "check", name.format(file=file)) == (0, told, "")

    def test_undone_and_incomplete_edits_are_told_before_the_verdict(self, own: Callable[..., Path]) -> None:
        file = own("whitelist:\n  torch.nn.functional: [softmax]\nblacklist:\n  torch: [mm]\n")
        status, out, _ = ampatch("lists", "check", file)
        assert status == 0
        undone, left_out, verdict = out.splitlines()
        assert undone.startswith(
            f"{file}:2: torch.nn.functional.softmax is in the whitelist now, but it calls functions that undo"
        )
        assert left_out.startswith(f"{file}:4: torch.mm is in the blacklist now, but torch.Tensor.mm ")
        assert verdict == (
            f"{file} can be read, but 1 of its changes is undone by calls inside the function: it changes how 2 paths "
            "are treated."
        )

    @pytest.mark.parametrize(
        ("name", "why"),
        [("missing.yaml", "No such file"), ("", "Is a directory"), ("two\nlines.yaml", "No such file")],
        ids=["missing", "folder", "name in lines"],
    )
    def test_an_unreadable_file_is_a_fault(self, name: str, why: str, tmp_path: Path) -> None:
        status, out, _ = ampatch("lists", "check", tmp_path / name)
        (line,) = out.splitlines()
        assert status == 1
        assert line.startswith(f"{tmp_path / name}: ".replace("\n", " "))
        assert why in line

    def test_several_files_are_checked_each_by_itself(self, own: Callable[..., Path]) -> None:
        faulty = own("whitelist:\n  torch: [mmm]\nblaklist: {}\n", "faulty.yaml")
        sound = own(SOUND, "sound.yaml")
        opposite = own("whitelist:\n  torch.nn.functional: [linear]\n", "opposite.yaml")  # as in the shipped lists
        status, out, _ = ampatch("lists", "check", faulty, sound, opposite)
        first, another, second, third = out.splitlines()
        assert status == 1
        assert first.startswith(f"{faulty}:2: 'torch' has no 'mmm'")
        assert another.startswith(f"{faulty}:3: unknown list 'blaklist'")
        assert second == f"{sound} is sound: it changes how 1 path is treated."
        assert third.startswith(f"{opposite} is sound: it changes nothing, as it has no entries, or only such as")

    @pytest.mark.parametrize(
        ("content", "status"),
        [
            pytest.param("whitelist: {torch.nn.functional: [softmax]}", 1, id="undone"),
            pytest.param("blacklist: {torch: [mm]}", 0, id="left out"),
            pytest.param("whitelist: {torch: [mmm]}", 1, id="a fault"),
            pytest.param(SOUND, 0, id="sound"),
        ],
    )
    def test_strict_counts_an_undone_edit_as_a_fault(self, content: str, status: int, own: Callable[..., Path]) -> None:
        assert ampatch("lists", "check", "--strict", own(content), own(SOUND, "sound.yaml")).status == status

    @pytest.mark.slow
    def test_a_pipe_can_be_checked(self, fresh: Fresh) -> None:
        piped = f"here, there = os.pipe(); os.write(there, {SOUND.encode()}); os.close(there); os.dup2(here, 0); "

        done = fresh.run(piped + COMMAND, "lists", "check", "/dev/stdin")

        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "/dev/stdin is sound: it changes how 1 path is treated.\n"

    def test_a_file_name_beyond_the_outputs_encoding_is_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", output)

        assert main(["lists", "check", os.fsdecode(b"\xff\xe2\x82\xac.yaml")]) == 1

        assert output.buffer.getvalue().startswith(rb"\udcff\u20ac.yaml: ")


class TestDiff:
    def test_an_unexpanded_variable_in_a_path_is_told(self) -> None:
        status, _, err = ampatch("lists", "diff", "$HOME/own.yaml")
        assert status == 2
        assert "nor a file that exists. Variables are not expanded in paths: " in err

    @pytest.mark.parametrize("name", PEERS)
    @pytest.mark.parametrize("dtype", list_reports.BOTH, ids=str)
    def test_a_peer_is_compared_with_the_shipped_lists(self, name: str, dtype: torch.dtype) -> None:
        out = ampatch("lists", "diff", name, "--half-dtype", str(dtype).removeprefix("torch.")).out
        assert out.splitlines() == list_reports.difference(peer(name), shipped(), name, [dtype])

    @pytest.mark.parametrize(
        ("name", "half_dtypes"),
        [
            ("apex", "float16"),
            ("torch_autocast_cuda", "float16 and bfloat16"),
            ("torch_autocast_cpu", "float16 and bfloat16"),
        ],
    )
    def test_a_peer_is_compared_in_its_own_half_types_by_default(self, name: str, half_dtypes: str) -> None:
        legend, *_, count = ampatch("lists", "diff", name).out.splitlines()
        assert legend == f"Columns: function; its list in {name}; its list in ampatch (-: none)."
        assert f" paths treated differently in {half_dtypes}: " in count

    @pytest.mark.parametrize("form", ["{file}", "~/own.yaml"])
    def test_a_file_is_compared_with_the_shipped_lists(self, form: str, own: Callable[..., Path]) -> None:
        file = own(SOUND)
        assert ampatch("lists", "diff", form.format(file=file)).out.splitlines() == [
            f"Columns: function; its list in the shipped lists; its list with {file} laid over them (-: none).",
            "torch.nn.functional.linear  whitelist  blacklist",
            "1 path treated differently in float16 and bfloat16: 1 moved or changed, 0 taken out, 0 new.",
        ]

    def test_a_file_is_compared_in_one_half_type_on_request(self, own: Callable[..., Path]) -> None:
        file = own("unlisted: {torch: [{name: mm, dtypes: [float16]}]}\n")
        out = ampatch("lists", "diff", file, "--half-dtype", "bf16").out
        assert out == "0 paths treated differently in bfloat16.\n"

    def test_a_file_with_the_name_of_a_peer_needs_a_path(
        self, own: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        own(SOUND, "apex")
        assert ampatch("lists", "diff", "apex").out.startswith("Columns: function; its list in apex;")
        assert ampatch("lists", "diff", "./apex").out.startswith("Columns: function; its list in the shipped lists;")


class TestCoverage:
    def test_complete_lists_are_status_0(self) -> None:
        found = coverage.coverage(shipped())
        status, out, _ = ampatch("lists", "coverage")
        assert (status, out.splitlines()) == (0, list_reports.covered(found))
        assert json.loads(ampatch("lists", "coverage", "--json").out) == found.to_dict()

    @pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
    def test_a_function_with_neither_a_list_nor_a_reason_is_shown_and_status_1(
        self, options: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.linalg, "brand_new", lambda input: input, raising=False)
        monkeypatch.setattr(torch.linalg.brand_new, "__module__", "torch")
        status, out, _ = ampatch("lists", "coverage", *options)
        assert status == 1
        assert "torch.linalg.brand_new" in out


IN_FOLDER = "import os, sys; os.chdir('{}'); from ampatch.cli.main import main; sys.exit(main())"
NAMED = ". Type the name that stands after `import`, such as package.module."
ALONE = "For its traceback, type: python -c"


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

    def test_amp_is_set_up_for_the_report_alone(self) -> None:
        with amp.init():
            expected = list(doctor.report())
        status, out, err = ampatch("doctor")
        last = "amp was set up for this report alone, with the defaults of amp.init()."
        assert (status, out.splitlines(), err) == (0, [*expected, "", last], "")
        assert runtime.live is None

    def test_modules_are_imported_in_their_order_before_the_report(self, write: Callable[[str, str], None]) -> None:
        write("plug_in", "import torch.nn.functional as F\ndef fast(*_): ...\nF.linear = fast\n")
        write("late", "from torch.nn.functional import linear\nkept = lambda x, f=linear: f(x)\n")
        status, out, _ = ampatch("doctor", "plug_in", "late")
        lines = [line.strip() for line in out.splitlines()]
        assert status == 0
        assert f"torch.nn.functional.linear: fast of plug_in ({Path.cwd() / 'plug_in.py'}:2)" in lines
        assert f"<lambda> of late ({Path.cwd() / 'late.py'}:2): torch.nn.functional.linear as f" in lines
        assert "late.linear: torch.nn.functional.linear" not in lines

    def test_a_module_that_sets_amp_up_is_reported_as_it_is(self, write: Callable[[str, str], None]) -> None:
        write("script", "import torch\nfrom ampatch import amp\namp.init(half_dtype=torch.float16)\n")
        status, out, _ = ampatch("doctor", "script")
        assert (status, out.splitlines()) == (0, list(doctor.report()))
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
        self, name: str, why: str, advice: str, write: Callable[[str, str], None]
    ) -> None:
        write("raises", "import json\nraise ValueError('of its own,\\nin lines')\n")
        write("ends", "raise SystemExit(0)\n")
        write("needs", "import absent_package\n")
        write("wrong", "x = 3\nx = = 3\n")
        write("sound", "")
        told = f"ampatch: error: the module {name!r} cannot be imported ({why}){advice}\n"
        assert ampatch("doctor", name) == (1, "", told)

    def test_the_report_says_why_amp_cannot_be_set_up(self, write: Callable[[str, str], None]) -> None:
        write("plug_in", "import torch.nn.functional as F\ndef fast(*_): ...\nF.interpolate = fast\n")
        shipped.cache_clear()
        try:
            status, out, err = ampatch("doctor", "plug_in")
        finally:
            shipped.cache_clear()
        assert status == 1
        assert f"    torch.nn.functional.interpolate: fast of plug_in ({Path.cwd() / 'plug_in.py'}:2)\n" in out
        (line,) = err.splitlines()
        assert line.startswith("ampatch: error: blacklist.yaml:")
        assert "torch.nn.functional.interpolate" in line

    def test_an_interrupted_report_leaves_torch_unpatched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> None:
            assert runtime.live is not None
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "report", interrupted)
        assert ampatch("doctor").status == 130
        assert runtime.live is None

    @pytest.mark.slow
    def test_the_current_folder_is_searched_however_it_is_started(self, fresh: Fresh, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("print('imported')\n")
        done = fresh.run(IN_FOLDER.format(tmp_path), "doctor", "mine")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("imported\nVersions\n")


class TestListsOfTheUsersModules:
    @pytest.mark.slow
    @pytest.mark.parametrize("command", [["show", "--cast-lists"], ["check"]], ids=" ".join)
    def test_the_current_folder_is_searched_however_it_is_started(
        self, fresh: Fresh, tmp_path: Path, command: list[str]
    ) -> None:
        (tmp_path / "mine.py").write_text("def product(a, b): return a @ b\n")
        (tmp_path / "casts.yaml").write_text("whitelist: {mine: [product]}\n")
        done = fresh.run(IN_FOLDER.format(tmp_path), "lists", *command, "casts.yaml")
        assert (done.returncode, done.stderr) == (0, "")

    def test_functions_that_a_pattern_matches_are_shown_once_they_are_imported(
        self, own: Callable[..., Path], package: Callable[..., None]
    ) -> None:
        package("of_mine", losses="def far_loss(x): return x\n")
        file = own('blacklist: {of_mine.*: ["*_loss"]}\n')
        show = ["lists", "show", "of_mine", "--cast-lists", file]
        not_yet = f"of_mine.*.*_loss  blacklist  {file}:1  matches nothing yet: import of_mine or its modules first\n"
        assert ampatch(*show).out == not_yet
        found = f"of_mine.losses.far_loss  blacklist  {file}:1\n"
        assert ampatch(*show, "--import", "of_mine.losses").out == found


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

    def test_compiler_kernels_and_libraries_are_told(self, tmp_path: Path) -> None:
        status, out, err = ampatch("build", "--device", "cpu")
        library, calls = extension.find(), extension.find(extension.CALLS)
        assert library is not None
        assert calls is not None
        built = "Built and tried out in N seconds."
        assert [re.sub(r"\d+ seconds", "N seconds", line) for line in out.splitlines()] == [
            f"Compiler: mine 1.0 ({tmp_path / 'compiler'})",
            "Kernels:  for the CPU",
            f"Library:  {library.path}",
            built,
            f"Calls:    {calls.path}",
            built,
        ]
        assert (status, err) == (0, "")

    def test_missing_gpu_kernels_are_a_line_more(self) -> None:
        first, second, *_ = ampatch("build").out.splitlines()
        assert first.startswith("CPU kernels only: ")
        assert second.startswith("Compiler: mine 1.0 ")

    def test_existing_libraries_are_kept_unless_forced(self) -> None:
        ends = []
        for options in ([], [], ["--force"]):
            lines = ampatch("build", *options).out.splitlines()
            ends.append([line.partition(" in ")[0] for line in (lines[-3], lines[-1])])
        there = "It is there already, built from these very sources. `ampatch build --force` builds it again."
        assert ends == [["Built and tried out"] * 2, [there, "It is there already."], ["Built and tried out"] * 2]

    def test_without_pythons_headers_calls_stay_in_python(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(extension_build.sysconfig, "get_path", lambda _name: str(tmp_path))
        last = ampatch("build").out.splitlines()[-1]
        assert last.startswith(f"Calls of patched functions stay in plain Python: there is no {tmp_path}/Python.h. ")
        assert extension.find() is not None
        assert extension.find(extension.CALLS) is None

    def test_the_library_goes_to_the_output_folder(self, tmp_path: Path) -> None:
        lines = ampatch("build", "--output", tmp_path / "out").out.splitlines()
        assert f"Library:  {tmp_path / 'out' / extension.LIBRARY}" in lines
        assert extension.read(tmp_path / "out") is not None

    def test_architectures_are_separated_by_commas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def plan(*arguments: object) -> None:
            raise UsageError(f"seen: {arguments}")

        monkeypatch.setattr(extension_build, "plan", plan)
        err = ampatch("build", "--device", "cuda", "--arch", "80,9.0").err
        assert "seen: ('cuda', ['80', '9.0'], None)" in err

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
    def test_an_impossible_build_is_status_1_and_a_line(self, arguments: list[str], message: str) -> None:
        status, out, err = ampatch("build", *arguments)
        (line,) = err.splitlines()
        assert (status, out) == (1, "")
        assert line.startswith(message)

    def test_a_failing_compiler_is_status_1_and_a_line(self, tmp_path: Path) -> None:
        compiler = tmp_path / "compiler"
        compiler.write_text(compiler.read_text() + "echo 'operators.cpp:1: error: what'; exit 1\n")
        status, _, err = ampatch("build")
        (line,) = err.splitlines()
        assert status == 1
        assert line.startswith(f"ampatch: error: compiling the extension failed: `{compiler}` ended with status 1: ")
        assert "operators.cpp:1: error: what" in line
        assert line.endswith(".log.")


class TestExitStatus:
    @pytest.mark.parametrize(
        ("error", "ended"),
        [
            (KeyboardInterrupt(), (130, "", "")),
            (UsageError("out of order:\n  do this."), (1, "", "ampatch: error: out of order: do this.\n")),
        ],
        ids=["Ctrl-C", "UsageError"],
    )
    def test_errors_are_a_status_and_at_most_a_line(
        self, error: BaseException, ended: tuple[int, str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_arguments: object) -> int:
            raise error

        monkeypatch.setattr(demo, "run", fail)
        assert ampatch("demo") == ended

    @pytest.mark.slow
    @pytest.mark.parametrize("arguments", [["lists", "show"], ["--help"]], ids=" ".join)
    def test_a_closed_pipe_is_status_141(self, fresh: Fresh, arguments: list[str]) -> None:
        nobody_reads = "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1); "

        done = fresh.run(nobody_reads + COMMAND, *arguments)

        assert (done.returncode, done.stderr) == (141, "")

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
    @pytest.mark.parametrize("arguments", [["lists", "show"], ["--help"]], ids=" ".join)
    def test_a_full_disk_is_status_1_and_a_line(self, fresh: Fresh, arguments: list[str]) -> None:
        done = fresh.run(COMMAND, *arguments, stdout="/dev/full")

        assert (done.returncode, done.stderr) == (1, "ampatch: error: [Errno 28] No space left on device\n")

    @pytest.mark.slow
    def test_a_closed_standard_output_leaves_the_status(self) -> None:
        program = (
            "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'ampatch', *sys.argv[1:]])"
        )

        done = python("-c", program, "lists", "check", os.devnull)

        assert (done.returncode, done.stderr) == (0, "")


def test_the_module_is_the_command() -> None:
    done = python("-W", "error", "-m", "ampatch", "--version")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"ampatch {__version__}\n", "")

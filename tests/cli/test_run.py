"""`ampatch run`: scripts run as under plain Python, and can import `apex`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh import COMMAND, Fresh

import ampatch
from ampatch.cli.no_gpu import HINT
from ampatch.cli.run import _STARTUP, _environment, _options

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

REPORT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "package": __package__, "path": sys.path,
    "spec": __spec__ and __spec__.name, "is main": sys.modules["__main__"].__dict__ is globals(),
    "flags": [sys.flags.dev_mode, sys.flags.optimize], "unbuffered": sys.stdout.write_through,
    "loaded": sorted({"apex", "torch", "ampatch"} & set(sys.modules)),
}))
"""


def python(arguments: Sequence[str], folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, text=True, capture_output=True, timeout=120, check=False, **options
    )


def ampatch_run(arguments: Sequence[str], folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return python(["-m", "ampatch", "run", *arguments], folder, **options)


def run_script(
    program: str, folder: Path, *arguments: str, options: Sequence[str] = (), **settings: object
) -> subprocess.CompletedProcess[str]:
    """Runs `ampatch run OPTIONS train.py ARGUMENTS`."""
    (folder / "train.py").write_text(program)
    return ampatch_run([*options, "train.py", *arguments], folder, **settings)


class TestSameAsPlainPython:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["train.py"],
            ["train.py", "--fp16", "--cpu", "--opt-level", "O2", "-m", "x", "--", "a b"],
            ["-m", "train", "--force", "-h"],
            ["-m", "package.train"],
            ["folder"],
            ["train.py", "--", "--x"],
            ["-m", "train", "--", "x"],
        ],
        ids=" ".join,
    )
    def test_arguments_main_and_path(self, arguments: list[str], tmp_path: Path) -> None:
        (tmp_path / "package").mkdir()
        (tmp_path / "folder").mkdir()
        (tmp_path / "package" / "__init__.py").touch()
        for name in ("train.py", "package/train.py", "folder/__main__.py"):
            (tmp_path / name).write_text(REPORT)
        assert json.loads(ampatch_run(arguments, tmp_path).stdout) == json.loads(python(arguments, tmp_path).stdout)

    def test_options_of_the_interpreter(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(REPORT)
        options = ["-u", "-X", "dev", "-O"]
        expected = json.loads(python([*options, "train.py"], tmp_path).stdout)
        assert expected["flags"] == [True, 1]
        assert json.loads(python([*options, "-m", "ampatch", "run", "train.py"], tmp_path).stdout) == expected

    @pytest.mark.parametrize(
        ("program", "status"),
        [
            ("import sys; sys.exit(7)", 7),
            ("import sys; sys.exit('said so')", 1),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            ("raise KeyboardInterrupt", -signal.SIGINT),
            ("def f():\n    1 / 0\nf()", 1),
            ("this is no Python", 1),
            ("import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0", 1),
            ("import atexit\natexit.register(print, 'at the end')", 0),
        ],
    )
    def test_exit_status_and_traceback(self, program: str, status: int, tmp_path: Path) -> None:
        found, expected = run_script(program, tmp_path), python(["train.py"], tmp_path)
        assert expected.returncode == status
        assert (found.returncode, found.stdout, found.stderr) == (status, expected.stdout, expected.stderr)

    def test_a_missing_script_is_the_interpreters_error(self, tmp_path: Path) -> None:
        expected, found = python(["nowhere.py"], tmp_path), ampatch_run(["nowhere.py"], tmp_path)
        assert (found.returncode, found.stderr) == (expected.returncode, expected.stderr)

    def test_standard_input_is_the_scripts(self, tmp_path: Path) -> None:
        assert run_script("print(input())", tmp_path, input="typed\n").stdout == "typed\n"

    def test_ctrl_c_reaches_the_script(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import signal, time\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which is ignored in a shell's background
            "try:\n"
            "    print('there', flush=True)\n"
            "    time.sleep(60)\n"
            "except KeyboardInterrupt:\n"
            "    print('saved', flush=True)\n"
            "    raise\n"
        )
        command = [sys.executable, "-m", "ampatch", "run", "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
            assert process.stdout.readline() == "there\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (-signal.SIGINT, "saved\n")
        assert "ampatch" not in errors

    def test_the_sitecustomize_of_the_environment_still_runs(self, tmp_path: Path) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.customized = __file__\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        program = "import sys; print(customized, sys.modules['sitecustomize'].__file__)"
        found, expected = (
            run_script(program, tmp_path, env=environment),
            python(["train.py"], tmp_path, env=environment),
        )
        assert expected.stdout.split() == [str(tmp_path / "site" / "sitecustomize.py")] * 2
        assert found.stdout == expected.stdout


IMPORTS = {
    "there is one of every module": (
        "import apex\n"
        "import sys\n"
        "assert apex.amp.scale_loss\n"
        "assert apex is sys.modules['apex'] is sys.modules['ampatch.apex']\n"
        "assert apex.__spec__.name == 'ampatch.apex'\n"
    ),
    "its extensions may come first": (
        "import amp_C, apex_C, sys\n"
        "assert amp_C is sys.modules['ampatch.apex.amp_C']\n"
        "assert apex_C.__name__ == 'ampatch.apex.apex_C'\n"
    ),
    **{
        f"who only asks for {question} may import it later": (
            f"import importlib.metadata, importlib.util\nassert {question}\nimport amp_C\nfrom apex import amp\n"
        )
        for question in (
            "importlib.util.find_spec('apex')",
            "importlib.metadata.version('apex')",
            "importlib.util.find_spec('amp_C')",
        )
    },
    "ampatch comes first, and without torch": (
        "import ampatch, sys\n"
        "assert 'torch' not in sys.modules\n"
        "assert ampatch.amp.initialize\n"
        "from apex import amp\n"
        "assert amp.scale_loss is ampatch.amp.scale_loss\n"
    ),
    "an import that failed may be tried again": (
        "import sys\n"
        "sys.modules['yaml'] = None\n"
        "try:\n"
        "    import apex\n"
        "except ImportError as error:\n"
        "    assert error.name == 'yaml'\n"
        "else:\n"
        "    raise AssertionError\n"
        "del sys.modules['yaml']\n"
        "import apex.amp\n"
    ),
}


class TestApex:
    @pytest.mark.slow
    @pytest.mark.parametrize("program", IMPORTS.values(), ids=IMPORTS)
    def test_every_form_of_import_works_before_torch(self, program: str, tmp_path: Path) -> None:
        found = run_script(program, tmp_path)
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    def test_threads_may_import_apex_and_torch_at_once(self, tmp_path: Path) -> None:
        program = (
            "import faulthandler, importlib, threading\n"
            "faulthandler.dump_traceback_later(60, exit=True)\n"
            "names = ['torch', 'apex', 'amp_C', 'apex.amp']\n"
            "threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "import apex, amp_C\n"
        )
        found = run_script(program, tmp_path)
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    @pytest.mark.parametrize("launched", ["by the command", "by the script"])
    def test_the_launcher_of_apex_names_torchrun(self, launched: str, tmp_path: Path) -> None:
        program = (
            "import subprocess, sys\n"
            "import apex.parallel.multiproc\n"
            "sys.exit(subprocess.call([sys.executable, '-m', 'apex.parallel.multiproc', 'train.py']))\n"
        )
        if launched == "by the command":
            found = ampatch_run(["-m", "apex.parallel.multiproc", "train.py"], tmp_path)
        else:
            found = run_script(program, tmp_path)
        assert found.returncode == 1
        assert found.stderr.startswith("apex.parallel.multiproc starts no processes any more")

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
    def test_processes_that_the_script_starts_import_apex(self, method: str, tmp_path: Path) -> None:
        program = (
            "import multiprocessing, subprocess, sys\n"
            "def work(queue):\n"
            "    from apex import amp\n"
            "    queue.put((amp.__name__, __name__))\n"
            "if __name__ == '__main__':\n"
            f"    context = multiprocessing.get_context({method!r})\n"
            "    queue = context.Queue()\n"
            "    process = context.Process(target=work, args=(queue,))\n"
            "    process.start()\n"
            "    print(*queue.get(timeout=100), flush=True)\n"
            "    process.join()\n"
            "    subprocess.run([sys.executable, '-c', 'from apex import amp; print(amp.__name__)'], check=True)\n"
        )
        main = "__main__" if method == "fork" else "__mp_main__"
        found = run_script(program, tmp_path)
        assert found.stdout == f"ampatch.apex.amp {main}\nampatch.apex.amp\n", found.stderr

    @pytest.mark.slow
    def test_a_real_apex_with_amp_stays_unless_forced(self, tmp_path: Path) -> None:
        (tmp_path / "apex" / "amp").mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").touch()
        (tmp_path / "apex" / "amp" / "__init__.py").touch()
        program = "from apex import amp; print(amp.__file__); import ampatch.apex; print(ampatch.apex.install())"
        left = run_script(program, tmp_path)
        assert left.stdout == f"{tmp_path / 'apex' / 'amp' / '__init__.py'}\nFalse\n"
        assert "type ampatch run --force" in left.stderr
        forced = run_script(program, tmp_path, options=["--force"])
        assert forced.stdout.startswith(str(Path(ampatch.__file__).parent / "apex"))
        assert forced.stderr == ""


TRAINING = """
import os, sys, torch
{first}
from apex import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for level in sys.argv[1:]:
    amp.initialize(model, optimizer, opt_level=level) if level != "init" else amp.init()
    amp.deinitialize()
"""


@pytest.mark.slow
class TestNoticeOfTheLevel:
    @pytest.mark.parametrize(
        ("levels", "said"),
        [
            (["O1"], "opt_level O1 in float16"),
            (["O2", "O1"], "opt_level O2 in float16"),
            (["O0"], "opt_level O0 in float32"),
            (["O5"], "opt_level O5 in bfloat16"),
            (["init"], "opt_level O1 in float16"),
        ],
        ids=str,
    )
    def test_the_first_level_is_told_once(self, levels: list[str], said: str, tmp_path: Path) -> None:
        found = run_script(TRAINING.format(first=""), tmp_path, *levels)
        told = f"ampatch: stands in for apex, at {said}.\n"
        assert (found.returncode, found.stdout, found.stderr) == (0, "", told)

    @pytest.mark.parametrize(
        "program",
        [
            TRAINING.format(first="import logging; logging.basicConfig()"),
            TRAINING.format(first="import logging; logging.getLogger('ampatch').addHandler(logging.NullHandler())"),
            TRAINING.format(first="os.environ['RANK'] = '1'"),
            "import torch\nfrom apex import amp\namp.initialize(torch.nn.Linear(2, 2), enabled=False)\n",
            "import torch\nfrom apex import amp\namp.initialize(torch.nn.Linear(2, 2), verbosity=0)\n",
            "import torch\nfrom ampatch.apex import amp\namp.initialize(torch.nn.Linear(2, 2))\n",
        ],
        ids=["logging configured", "a handler", "rank 1", "disabled", "verbosity 0", "imported from ampatch"],
    )
    def test_no_notice_where_it_is_unasked_for(self, program: str, tmp_path: Path) -> None:
        found = run_script(program, tmp_path, "O1")
        assert (found.returncode, found.stderr) == (0, "")


NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
class TestHintWithoutAGpu:
    @pytest.mark.parametrize(
        "question",
        [
            "torch.ones(1).cuda()",
            "assert torch.cuda.is_available()",
            "torch.nn.Linear(2, 2).to('cuda')",
            "torch.cuda.set_device(0)",
            "torch.distributed.init_process_group('nccl', 'tcp://127.0.0.1:1', rank=0, world_size=1)",
            "import threading; threading.Thread(target=torch.ones(1).cuda).start()",
            "from apex import amp; torch.multiprocessing.spawn(torch.cuda.set_device)",
            "from apex import amp; p = multiprocessing.Process(target=torch.ones(1).cuda); p.start(); p.join()",
        ],
    )
    def test_an_error_for_want_of_a_gpu_hints_at_the_option_cpu(self, question: str, tmp_path: Path) -> None:
        program = f"import multiprocessing, torch\nif __name__ == '__main__':\n    {question}\n"
        found = run_script(program, tmp_path, env=NO_GPU)
        assert found.stderr.endswith(f"\n{HINT}\n")
        assert found.stderr.count(HINT) == 1
        if "apex" not in question:
            expected = python(["train.py"], tmp_path, env=NO_GPU)
            assert (found.returncode, found.stderr.replace(f"{HINT}\n", "")) == (expected.returncode, expected.stderr)

    def test_an_error_that_the_script_prints_has_the_hint(self, tmp_path: Path) -> None:
        program = (
            "import traceback, torch\n"
            "from apex import amp\n"
            "try:\n"
            "    torch.ones(1).cuda()\n"
            "except Exception:\n"
            "    traceback.print_exc()\n"
        )
        assert HINT in run_script(program, tmp_path, env=NO_GPU).stderr


@pytest.mark.slow
class TestOptionCpu:
    def test_tensors_for_a_gpu_stay_on_the_cpu_which_is_told_once(self, tmp_path: Path) -> None:
        program = (
            "import multiprocessing, torch\n"
            "def work():\n"
            "    print(torch.ones(2).cuda().device, flush=True)\n"
            "if __name__ == '__main__':\n"
            "    work()\n"
            "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    process.start()\n"
            "    process.join()\n"
        )
        found = run_script(program, tmp_path, options=["--cpu"])
        assert found.stdout == "cpu\ncpu\n", found.stderr
        assert found.stderr.count("stays on the CPU") == 1


class TestCommandLine:
    def test_help_shows_the_usage(self, tmp_path: Path) -> None:
        found = ampatch_run(["--help"], tmp_path)
        assert found.returncode == 0
        assert "(SCRIPT | -m MODULE)" in found.stdout

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ([], ""),
            (["-m"], ""),
            ([""], ""),
            (["--nonsense", "train.py"], "--nonsense. Python's own go in front: python -u -m ampatch run"),
        ],
        ids=str,
    )
    def test_a_wrong_command_line_is_status_2(self, arguments: list[str], told: str, tmp_path: Path) -> None:
        found = ampatch_run(arguments, tmp_path)
        assert found.returncode == 2
        assert found.stderr.startswith("usage: ampatch run")
        assert told in found.stderr

    def test_the_command_and_its_errors_import_no_torch(self, tmp_path: Path) -> None:
        program = (
            "import sys\n"
            "from ampatch.cli.main import main\n"
            "assert main(['run', '--report', 'report.txt', 'train.py']) == 1\n"
            "assert 'torch' not in sys.modules\n"
        )
        found = python(["-c", program], tmp_path)
        assert (found.returncode, found.stderr[:15]) == (0, "ampatch: error:")

    @pytest.mark.slow
    @pytest.mark.parametrize("option", ["-E", "-I", "-S"])
    def test_a_python_that_ignores_the_environment_is_refused(self, option: str, tmp_path: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} if option == "-S" else None
        found = python([option, "-m", "ampatch", "run", "train.py"], tmp_path, env=environment)
        assert found.returncode == 1
        assert "ampatch: error: python was started with -E, -I or -S" in found.stderr

    @pytest.mark.parametrize("in_path", [False, True], ids=["in the current folder", "in PYTHONPATH, with -P"])
    def test_a_checkout_counts_as_installed_only_from_pythonpath(self, in_path: bool, tmp_path: Path) -> None:
        (tmp_path / "ampatch").symlink_to(Path(ampatch.__file__).parent)
        program = (
            "import sys\n"
            "from pathlib import Path\n"
            "sys.path[1:] = [p for p in sys.path[1:] if not (Path(p) / 'ampatch').is_dir()]\n"
            f"sys.path[0] = {str(tmp_path)!r}\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
            "from ampatch.cli.run import _is_installed\n"
            f"assert _is_installed() is {in_path}\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)} if in_path else None
        found = python([*(["-P"] if in_path else []), "-c", program], tmp_path, env=environment)
        assert found.returncode == 0, found.stderr


class TestEnvironment:
    def test_the_startup_folder_comes_first_and_once(self) -> None:
        first = _environment({"PYTHONPATH": "a::b", "HOME": "h"}, {})
        assert first == {"PYTHONPATH": f"{_STARTUP}:a::b", "HOME": "h"}
        assert _environment(first, {}) == first
        assert _environment({}, {}) == {"PYTHONPATH": _STARTUP}

    def test_settings_stay_for_runs_within_a_run(self) -> None:
        outer = _environment({}, {"AMPATCH_RUN_FORCE": "1", "AMPATCH_RUN_CPU": "1"})
        assert _environment(outer, {}) == outer
        assert set(outer) == {"PYTHONPATH", "AMPATCH_RUN_FORCE", "AMPATCH_RUN_CPU"}


class TestInterpreterOptions:
    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("python -m ampatch run t.py", []),
            ("python -u -m ampatch run t.py", ["-u"]),
            ("python -um ampatch run t.py", ["-u"]),
            ("python -umampatch run t.py", ["-u"]),
            ("python -X dev -m ampatch run t.py", ["-X", "dev"]),
            ("python -W error::m /bin/ampatch run t.py", ["-W", "error::m"]),
            ("python /bin/ampatch run t.py", []),
            ("python -m cProfile -m ampatch run t.py", ["-m", "cProfile"]),
            ("python -X dev -c main() run t.py", ["-X", "dev"]),
        ],
    )
    def test_interpreter_options_are_handed_on(self, command: str, expected: list[str]) -> None:
        assert _options(command.split(), ["ampatch", "run", "t.py"]) == expected

    def test_an_embedded_interpreter_has_no_options(self) -> None:
        assert _options(["python"], [""]) == []


OVERFLOWS = """
import torch
from apex import amp
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for _ in range(2):
    loss = torch.log(model(torch.ones(2, 4)) * 0).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow  # it imports torch's compiler, to have compiled code run uncompiled
def test_trace_overflow_names_the_function_and_its_line(tmp_path: Path) -> None:
    said = run_script(OVERFLOWS, tmp_path, options=["--trace-overflow"])
    assert said.returncode == 0, said.stderr
    assert "the next steps are watched as they run" in said.stderr  # the loss is no part of the model
    assert "First inf: in torch.log." in said.stderr
    assert "train.py:8: loss = torch.log(model(torch.ones(2, 4)) * 0).sum()" in said.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaler", "told"),
    [
        ("torch.amp.GradScaler('cpu', init_scale=8.0)", "train.py:6: loss = model(torch.ones(2, 4) * 1e6)"),
        ("torch.amp.GradScaler('cpu', enabled=False)", "--trace-overflow: nothing was traced, as no step could be"),
    ],
    ids=["torch.amp", "plain"],
)
def test_trace_overflow_of_a_script_without_amp(scaler: str, told: str, tmp_path: Path) -> None:
    program = f"""import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = {scaler}
with torch.autocast("cpu", torch.float16):
    loss = model(torch.ones(2, 4) * 1e6).float().sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
    said = run_script(program, tmp_path, options=["--trace-overflow"])
    assert (said.returncode, said.stderr.count(told)) == (0, 1), said.stderr


TRAINS = """
import os, sys, torch
from apex import amp
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=8.0)
for _ in range(3):
    with amp.scale_loss(model(torch.ones(2, 4)).float().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
# A shell has what it starts in the background ignore the signal.
CTRL_C = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(100)
"""
WROTE = "ampatch: --report: wrote "


def written_by(program: str, folder: Path, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return run_script(program, folder, *arguments, options=["--report", "report.json"], **settings)


def report_in(folder: Path, name: str = "report.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


class TestReport:
    @pytest.mark.slow
    def test_the_report_covers_the_whole_script_and_its_path_is_told(self, tmp_path: Path) -> None:
        program = TRAINS + "print(*sys.argv[1:])\nos.chdir('/')\n"
        said = written_by(program, tmp_path, "--report", "x")
        assert (said.returncode, said.stdout) == (0, "--report x\n")
        assert said.stderr.endswith(f"{WROTE}{tmp_path}/report.json\n")
        report = report_in(tmp_path)
        assert [row["scale"] for row in report["steps"]] == [8, 8, 8]
        assert report["settings"]["opt_level"] == "O1"
        assert report["about"]["command"].endswith("train.py --report x")
        assert [path.name for path in tmp_path.iterdir()] == ["report.json", "train.py"]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("ends", "status"),
        [("1 / 0", 1), ("sys.exit(3)", 3), (CTRL_C, -signal.SIGINT), ("amp.deinitialize()", 0)],
        ids=["error", "exit", "Ctrl-C", "amp off"],
    )
    def test_the_report_is_written_however_the_script_ends(self, ends: str, status: int, tmp_path: Path) -> None:
        said = written_by(TRAINS + ends, tmp_path)
        assert said.returncode == status
        assert said.stderr.endswith(f"{WROTE}{tmp_path}/report.json\n")
        report = report_in(tmp_path)
        assert (len(report["steps"]), report["settings"]["opt_level"]) == (3, "O1")

    @pytest.mark.slow
    def test_the_report_may_be_a_page(self, tmp_path: Path) -> None:
        assert WROTE in run_script(TRAINS, tmp_path, options=["--report=report.html"]).stderr
        assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    @pytest.mark.slow
    @pytest.mark.parametrize("first", ["import torch", "from ampatch import amp", "from ampatch import GradScaler"])
    def test_the_report_is_written_whatever_is_imported_first(self, first: str, tmp_path: Path) -> None:
        said = written_by(f"{first}\nimport torch\ntorch.ones(2) + 1\n", tmp_path)
        assert WROTE in said.stderr, said.stderr
        assert report_in(tmp_path)["settings"] is None

    def test_a_script_without_torch_has_no_report_and_still_no_torch(self, tmp_path: Path) -> None:
        said = written_by("import sys; print('torch' in sys.modules)", tmp_path)
        assert said.stdout == "False\n"
        assert said.stderr == "ampatch: --report: no report, as the script did not import torch.\n"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("file", "fault"),
        [
            ("report.txt", "does not end with .html, .htm or .json"),
            ("nowhere/report.html", "there is no folder 'nowhere'"),
            ("folder.json", "it is a folder"),
        ],
    )
    def test_a_file_that_cannot_be_written_is_told_before_the_script_runs(
        self, fresh: Fresh, file: str, fault: str, tmp_path: Path
    ) -> None:
        (tmp_path / "folder.json").mkdir()
        (tmp_path / "train.py").write_text("print('runs')")
        said = fresh.run(COMMAND, "run", "--report", file, "train.py", cwd=tmp_path)
        assert (said.returncode, said.stdout) == (1, "")
        assert said.stderr.startswith(f"ampatch: error: {file!r} ")
        assert fault in said.stderr

    @pytest.mark.slow
    def test_the_report_goes_elsewhere_if_its_folder_is_gone(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        program = "import os, torch; os.rmdir('there'); torch.ones(2) + 1"
        said = run_script(program, tmp_path, options=["--report", "there/report.json"])
        assert "there is no folder" in said.stderr
        path = Path(said.stderr.partition(WROTE)[2].strip())
        assert json.loads(path.read_text(encoding="utf-8"))["format"] == "ampatch report"

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [None, "0"])
    def test_processes_that_the_script_starts_write_no_report(self, rank: str | None, tmp_path: Path) -> None:
        program = (
            f"import multiprocessing, os, subprocess\nfrom pathlib import Path\n{TRAINS}"
            "def work():\n    torch.ones(2) + 1\n"
            "if __name__ == '__main__':\n"
            "    subprocess.run([sys.executable, '-c', 'import torch; torch.ones(1) + 1'], check=True)\n"
            "    for method in ('spawn', 'fork'):\n"
            "        process = multiprocessing.get_context(method).Process(target=work)\n"
            "        process.start()\n"
            "        process.join()\n"
            "    list(torch.utils.data.DataLoader([1.0, 2.0], num_workers=1))\n"
            "    sys.exit() if os.fork() == 0 else os.wait()\n"
            "    assert not Path('report.json').exists()\n"
        )
        environment = {**os.environ, **({"RANK": rank} if rank else {})}
        said = written_by(program, tmp_path, env=environment)
        assert (said.returncode, said.stderr.count(WROTE)) == (0, 1), said.stderr
        assert len(report_in(tmp_path)["steps"]) == 3

    @pytest.mark.slow
    @pytest.mark.parametrize("launched", ["by torchrun", "by the command"])
    def test_each_rank_writes_its_own_report(self, launched: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            TRAINS.replace("model = torch", "torch.distributed.init_process_group('gloo')\nmodel = torch", 1)
            + "torch.distributed.destroy_process_group()\n"
        )
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run = ["-m", "ampatch", "run", "--report", "report.json"]
        command = [*torchrun, *run, "train.py"] if launched == "by torchrun" else [*run, *torchrun, "train.py"]
        said = python(command, tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert said.returncode == 0, said.stderr
        assert sorted(path.name for path in tmp_path.glob("*.json")) == ["report.json", "report.rank1.json"]
        for name in ("report.json", "report.rank1.json"):
            assert len(report_in(tmp_path, name)["steps"]) == 3

    @pytest.mark.slow
    def test_a_script_that_opens_a_report_itself_is_told_to_leave_one_out(self, tmp_path: Path) -> None:
        said = written_by("from ampatch import amp\nwith amp.report(): pass\n", tmp_path)
        assert said.returncode == 1
        assert "leave out one of the two" in said.stderr

    @pytest.mark.slow
    def test_the_options_cpu_and_report_go_together(self, tmp_path: Path) -> None:
        program = TRAINS.replace("Linear(4, 4)", "Linear(4, 4).cuda()").replace("ones(2, 4)", "ones(2, 4).cuda()")
        said = run_script(program, tmp_path, options=["--cpu", "--report", "report.json"])
        assert said.returncode == 0, said.stderr
        assert len(report_in(tmp_path)["steps"]) == 3

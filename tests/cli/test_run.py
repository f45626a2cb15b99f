"""`ampatch run`: what a script sees is what plain Python would show it, and `apex` besides."""

from __future__ import annotations

import itertools
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
from helpers import check_rows

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


class TestAsUnderPlainPython:
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
        for name in ("train.py", "package/__init__.py", "package/train.py", "folder/__main__.py"):
            (tmp_path / name).write_text("" if name.endswith("__init__.py") else REPORT)
        assert json.loads(ampatch_run(arguments, tmp_path).stdout) == json.loads(python(arguments, tmp_path).stdout)

    def test_the_interpreters_own_options(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(REPORT)
        options = ["-u", "-X", "dev", "-O"]
        expected = python([*options, "train.py"], tmp_path)
        assert json.loads(expected.stdout)["flags"] == [True, 1]
        found = python([*options, "-m", "ampatch", "run", "train.py"], tmp_path)
        assert json.loads(found.stdout) == json.loads(expected.stdout)

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
        (tmp_path / "train.py").write_text(program)
        expected, found = python(["train.py"], tmp_path), ampatch_run(["train.py"], tmp_path)
        assert expected.returncode == status
        assert (found.returncode, found.stdout, found.stderr) == (status, expected.stdout, expected.stderr)

    def test_a_script_that_is_not_there(self, tmp_path: Path) -> None:
        expected, found = python(["nowhere.py"], tmp_path), ampatch_run(["nowhere.py"], tmp_path)
        assert (found.returncode, found.stderr) == (expected.returncode, expected.stderr)

    def test_standard_input(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print(input())")
        assert ampatch_run(["train.py"], tmp_path, input="typed\n").stdout == "typed\n"

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
        process = subprocess.Popen(
            [sys.executable, "-m", "ampatch", "run", "train.py"],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert output == "saved\n"
        assert process.returncode == -signal.SIGINT
        assert "ampatch" not in errors

    def test_the_sitecustomize_of_the_environment_still_runs(self, tmp_path: Path) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.customized = __file__\n")
        (tmp_path / "train.py").write_text("import sys; print(customized, sys.modules['sitecustomize'].__file__)")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        expected = python(["train.py"], tmp_path, env=environment)
        assert expected.stdout.split() == [str(tmp_path / "site" / "sitecustomize.py")] * 2
        assert ampatch_run(["train.py"], tmp_path, env=environment).stdout == expected.stdout


# The first three run every day.
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

# Each program in a fork of its own, so that torch is imported once for all.
IN_FORKS = """
import json, os, sys, torch
assert not any(name.partition(".")[0] in ("apex", "ampatch") for name in sys.modules)
statuses = {{}}
for name, program in {programs}.items():
    child = os.fork()
    if not child:
        break
    statuses[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if child:
    print(json.dumps(statuses))
else:
    exec(program)
"""


class TestApexIsThere:
    def test_in_the_script(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import ampatch, sys\n"
            "assert 'torch' not in sys.modules\n"
            "assert ampatch.amp.initialize\n"
            "from apex import amp\n"
            "assert amp.scale_loss is ampatch.amp.scale_loss\n"
            "import amp_C\n"
            "print('ok')\n"
        )
        assert ampatch_run(["train.py"], tmp_path).stdout == "ok\n"

    def test_however_it_is_imported(self, tmp_path: Path, subtests: pytest.Subtests) -> None:
        programs = dict(itertools.islice(IMPORTS.items(), 3))
        (tmp_path / "train.py").write_text(IN_FORKS.format(programs=programs))
        found = ampatch_run(["train.py"], tmp_path)
        statuses = json.loads(found.stdout)

        def check(status: int) -> None:
            assert status == 0

        check_rows(subtests, statuses.items(), check)
        assert (list(statuses), found.stderr) == (list(programs), "")

    @pytest.mark.slow
    @pytest.mark.parametrize("program", IMPORTS.values(), ids=IMPORTS)
    def test_however_it_is_imported_where_torch_is_not_there_yet(self, program: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(program)
        found = ampatch_run(["train.py"], tmp_path)
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    def test_two_threads_may_import_it_and_torch_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import faulthandler, importlib, threading\n"
            "faulthandler.dump_traceback_later(60, exit=True)\n"
            "names = ['torch', 'apex', 'amp_C', 'apex.amp']\n"
            "threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "import apex, amp_C\n"
        )
        found = ampatch_run(["train.py"], tmp_path)
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    @pytest.mark.parametrize("launched", ["by the command", pytest.param("by the script", marks=pytest.mark.slow)])
    def test_its_launcher_names_torchrun(self, launched: str, tmp_path: Path) -> None:
        (tmp_path / "start.py").write_text(
            "import subprocess, sys\n"
            "import apex.parallel.multiproc\n"
            "sys.exit(subprocess.call([sys.executable, '-m', 'apex.parallel.multiproc', 'train.py']))\n"
        )
        arguments = ["-m", "apex.parallel.multiproc", "train.py"] if launched == "by the command" else ["start.py"]
        found = ampatch_run(arguments, tmp_path)
        assert found.returncode == 1
        assert found.stderr.startswith("apex.parallel.multiproc starts no processes any more")

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
    def test_in_the_processes_that_it_starts(self, method: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
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
        found = ampatch_run(["train.py"], tmp_path)
        assert found.stdout == f"ampatch.apex.amp {main}\nampatch.apex.amp\n", found.stderr

    @pytest.mark.slow
    def test_not_where_a_real_one_has_amp_unless_forced(self, tmp_path: Path) -> None:
        (tmp_path / "apex" / "amp").mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").write_text("")
        (tmp_path / "apex" / "amp" / "__init__.py").write_text("")
        (tmp_path / "train.py").write_text("from apex import amp; print(amp.__file__)")
        (tmp_path / "asks.py").write_text("import ampatch.apex; print(ampatch.apex.install())")
        assert ampatch_run(["asks.py"], tmp_path).stdout == "False\n"
        left = ampatch_run(["train.py"], tmp_path)
        assert left.stdout == f"{tmp_path / 'apex' / 'amp' / '__init__.py'}\n"
        assert "type ampatch run --force" in left.stderr
        forced = ampatch_run(["--force", "train.py"], tmp_path)
        assert forced.stdout != left.stdout
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


class TestTheLineThatSaysSo:
    @pytest.mark.parametrize(
        ("levels", "said"),
        [
            pytest.param(["O1"], "opt_level O1 in float16", marks=pytest.mark.slow),
            pytest.param(["O2", "O1"], "opt_level O2 in float16", marks=pytest.mark.slow),
            pytest.param(["O0"], "opt_level O0 in float32", marks=pytest.mark.slow),
            pytest.param(["O5"], "opt_level O5 in bfloat16", marks=pytest.mark.slow),
            pytest.param(["init"], "opt_level O1 in float16", marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_names_the_level_once(self, levels: list[str], said: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINING.format(first=""))
        found = ampatch_run(["train.py", *levels], tmp_path)
        assert (found.returncode, found.stdout) == (0, "")
        assert found.stderr == f"ampatch: stands in for apex, at {said}.\n"

    @pytest.mark.parametrize(
        "first",
        [
            pytest.param("import logging; logging.basicConfig()", marks=pytest.mark.slow),
            pytest.param(
                "import logging; logging.getLogger('ampatch').addHandler(logging.NullHandler())", marks=pytest.mark.slow
            ),
            pytest.param("os.environ['RANK'] = '1'", marks=pytest.mark.slow),
        ],
    )
    def test_is_not_for_who_has_configured_logging_nor_for_other_ranks(self, first: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINING.format(first=first))
        found = ampatch_run(["train.py", "O1"], tmp_path)
        assert (found.returncode, found.stderr) == (0, "")

    @pytest.mark.slow
    def test_is_not_said_with_verbosity_0_nor_where_nothing_is_done(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import torch\n"
            "from apex import amp\n"
            "amp.initialize(torch.nn.Linear(2, 2), enabled=False)\n"
            "amp.initialize(torch.nn.Linear(2, 2), verbosity=0)\n"
        )
        assert ampatch_run(["train.py"], tmp_path).stderr == ""

    @pytest.mark.slow
    def test_is_not_for_who_imports_it_from_ampatch(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import torch\nfrom ampatch.apex import amp\namp.initialize(torch.nn.Linear(2, 2))\n"
        )
        assert ampatch_run(["train.py"], tmp_path).stderr == ""


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class TestAScriptThatAsksForAGpuWhereThereIsNone:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "question",
        [
            "torch.ones(1).cuda()",
            *(
                pytest.param(question, marks=pytest.mark.slow)
                for question in (
                    "assert torch.cuda.is_available()",
                    "torch.nn.Linear(2, 2).to('cuda')",
                    "torch.cuda.set_device(0)",
                    "torch.distributed.init_process_group('nccl', 'tcp://127.0.0.1:1', rank=0, world_size=1)",
                    "import threading; threading.Thread(target=torch.ones(1).cuda).start()",
                    "from apex import amp; torch.multiprocessing.spawn(torch.cuda.set_device)",
                    "from apex import amp; p = multiprocessing.Process(target=torch.ones(1).cuda); p.start(); p.join()",
                )
            ),
        ],
    )
    def test_is_told_of_the_option(self, question: str, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            f"import multiprocessing, torch\nif __name__ == '__main__':\n    {question}\n"
        )
        found = ampatch_run(["train.py"], tmp_path, env={**os.environ, **NO_GPU})
        assert found.stderr.endswith(f"\n{HINT}\n")
        assert found.stderr.count(HINT) == 1
        if "apex" not in question:
            expected = python(["train.py"], tmp_path, env={**os.environ, **NO_GPU})
            assert (found.returncode, found.stderr.replace(f"{HINT}\n", "")) == (expected.returncode, expected.stderr)

    @pytest.mark.slow
    def test_is_told_where_it_catches_the_error_and_prints_it(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import traceback, torch\n"
            "from apex import amp\n"
            "try:\n"
            "    torch.ones(1).cuda()\n"
            "except Exception:\n"
            "    traceback.print_exc()\n"
        )
        assert HINT in ampatch_run(["train.py"], tmp_path, env={**os.environ, **NO_GPU}).stderr

    @pytest.mark.slow
    def test_and_of_no_option_after_another_error(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import torch\nfrom apex import amp\ntorch.ones(2, 3) @ torch.ones(2, 3)\n")
        found = ampatch_run(["train.py"], tmp_path, env={**os.environ, **NO_GPU})
        assert found.returncode == 1
        assert "ampatch:" not in found.stderr


@pytest.mark.slow
class TestWithoutAGpu:
    def test_what_goes_to_a_gpu_stays_on_the_cpu_and_that_is_said_once(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import multiprocessing, torch\n"
            "def work():\n"
            "    print(torch.ones(2).cuda().device, flush=True)\n"
            "if __name__ == '__main__':\n"
            "    work()\n"
            "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    process.start()\n"
            "    process.join()\n"
        )
        found = ampatch_run(["--cpu", "train.py"], tmp_path)
        assert found.stdout == "cpu\ncpu\n", found.stderr
        assert found.stderr.count("stays on the CPU") == 1

    def test_without_the_option_torch_is_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import torch; print(torch.cuda.is_available.__module__)")
        assert ampatch_run(["train.py"], tmp_path).stdout == "torch.cuda\n"


class TestTheCommandItself:
    def test_help(self, tmp_path: Path) -> None:
        found = ampatch_run(["--help"], tmp_path)
        assert found.returncode == 0
        assert "(SCRIPT | -m MODULE)" in found.stdout

    @pytest.mark.parametrize("arguments", [[], ["-m"], [""]], ids=str)
    def test_a_wrong_command_line(self, arguments: list[str], tmp_path: Path) -> None:
        found = ampatch_run(arguments, tmp_path)
        assert found.returncode == 2
        assert found.stderr.startswith("usage: ampatch run")

    def test_an_option_that_it_has_not(self, tmp_path: Path) -> None:
        found = ampatch_run(["--nonsense", "train.py"], tmp_path)
        assert found.returncode == 2
        assert found.stderr.startswith("usage: ampatch run")
        assert "unrecognized arguments: --nonsense. Python's own go in front: python -u -m ampatch run" in found.stderr

    def test_torch_is_left_to_the_script(self, tmp_path: Path) -> None:
        program = "import ampatch.cli.main, sys; assert 'torch' not in sys.modules"
        assert python(["-c", program], tmp_path).returncode == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "option", ["-E", *(pytest.param(option, marks=pytest.mark.slow) for option in ("-I", "-S"))]
    )
    def test_a_python_that_would_not_heed_the_environment(self, option: str, tmp_path: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} if option == "-S" else None
        found = python([option, "-m", "ampatch", "run", "train.py"], tmp_path, env=environment)
        assert found.returncode == 1
        assert "ampatch: error: python was started with -E, -I or -S" in found.stderr

    def test_a_checkout_that_is_not_installed(self, tmp_path: Path) -> None:
        (tmp_path / "ampatch").symlink_to(Path(ampatch.__file__).parent)
        program = (
            "import sys\n"
            f"sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path[1:] if not (Path(p) / 'ampatch').is_dir())]\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
            "from ampatch.cli.run import _is_installed\n"
            "assert not _is_installed()\n"
        )
        found = python(["-c", "from pathlib import Path\n" + program], tmp_path)
        assert found.returncode == 0, found.stderr

    def test_a_checkout_in_the_path_of_a_python_that_adds_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "ampatch").symlink_to(Path(ampatch.__file__).parent)
        program = (
            "import sys\n"
            "sys.path[1:] = [p for p in sys.path[1:] if not (Path(p) / 'ampatch').is_dir()]\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
            "from ampatch.cli.run import _is_installed\n"
            "assert _is_installed()\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        found = python(["-P", "-c", "from pathlib import Path\n" + program], tmp_path, env=environment)
        assert found.returncode == 0, found.stderr


class TestTheEnvironment:
    def test_the_folder_comes_first_and_once(self) -> None:
        first = _environment({"PYTHONPATH": "a::b", "HOME": "h"}, {})
        assert first == {"PYTHONPATH": f"{_STARTUP}:a::b", "HOME": "h"}
        assert _environment(first, {}) == first
        assert _environment({}, {}) == {"PYTHONPATH": _STARTUP}

    def test_what_is_asked_for_stays_for_runs_within(self) -> None:
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
    def test_those_of_this_process_are_those_of_the_next(self, command: str, expected: list[str]) -> None:
        assert _options(command.split(), ["ampatch", "run", "t.py"]) == expected

    def test_a_process_that_was_started_otherwise_has_none(self) -> None:
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


class TestTraceOverflow:
    @pytest.mark.slow  # it imports torch's compiler, to have compiled code run uncompiled
    def test_says_where_it_began(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(OVERFLOWS)
        said = ampatch_run(["--trace-overflow", "train.py"], tmp_path)
        assert said.returncode == 0, said.stderr
        assert "the next steps are watched as they run" in said.stderr  # the loss is no part of the model
        assert "First inf: in torch.log." in said.stderr
        assert "train.py:8: loss = torch.log(model(torch.ones(2, 4)) * 0).sum()" in said.stderr


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
WROTE = "ampatch: --report: wrote "


def written_by(program: str, folder: Path, *before: str, **options: object) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    return ampatch_run(["--report", "report.json", *before, "train.py"], folder, **options)


def report_in(folder: Path, name: str = "report.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


class TestReport:
    @pytest.mark.slow
    def test_covers_the_whole_script_and_its_path_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINS + "print(*sys.argv[1:])\nos.chdir('/')\n")
        said = ampatch_run(["--report", "report.json", "train.py", "--report", "x"], tmp_path)
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
        [("1 / 0", 1), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT), ("amp.deinitialize()", 0)],
    )
    def test_however_the_script_ends(self, ends: str, status: int, tmp_path: Path) -> None:
        said = written_by(TRAINS + ends, tmp_path)
        assert said.returncode == status
        assert said.stderr.endswith(f"{WROTE}{tmp_path}/report.json\n")
        report = report_in(tmp_path)
        assert (len(report["steps"]), report["settings"]["opt_level"]) == (3, "O1")

    @pytest.mark.slow
    def test_of_a_script_that_the_user_interrupts(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINS + "print('ready', flush=True)\nimport time; time.sleep(100)\n")
        command = [sys.executable, "-m", "ampatch", "run", "--report=report.json", "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.stderr.read()
        assert process.returncode == -signal.SIGINT
        assert len(report_in(tmp_path)["steps"]) == 3

    @pytest.mark.slow
    def test_as_a_page(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINS)
        assert WROTE in ampatch_run(["--report", "report.html", "train.py"], tmp_path).stderr
        assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    @pytest.mark.slow
    @pytest.mark.parametrize("first", ["import torch", "from ampatch import amp", "from ampatch import GradScaler"])
    def test_whatever_is_imported_first(self, first: str, tmp_path: Path) -> None:
        said = written_by(f"{first}\nimport torch\ntorch.ones(2) + 1\n", tmp_path)
        assert WROTE in said.stderr, said.stderr
        assert report_in(tmp_path)["settings"] is None

    def test_a_script_without_torch_has_none_and_imports_none(self, tmp_path: Path) -> None:
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
    def test_goes_elsewhere_if_its_folder_is_gone(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "train.py").write_text("import os, torch; os.rmdir('there'); torch.ones(2) + 1")
        said = ampatch_run(["--report", "there/report.json", "train.py"], tmp_path)
        assert "there is no folder" in said.stderr
        path = Path(said.stderr.partition(WROTE)[2].strip())
        assert json.loads(path.read_text(encoding="utf-8"))["format"] == "ampatch report"

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [None, "0"])
    def test_processes_that_the_script_starts_write_none(self, rank: str | None, tmp_path: Path) -> None:
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
    def test_each_rank_writes_its_own(self, launched: str, tmp_path: Path) -> None:
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
    def test_a_script_that_opens_one_itself_is_told_what_to_leave_out(self, tmp_path: Path) -> None:
        said = written_by("from ampatch import amp\nwith amp.report(): pass\n", tmp_path)
        assert said.returncode == 1
        assert "leave out one of the two" in said.stderr

    @pytest.mark.slow
    def test_with_a_library_in_place_of_a_gpu(self, tmp_path: Path) -> None:
        said = written_by(
            TRAINS.replace("model = torch.nn.Linear(4, 4)", "model = torch.nn.Linear(4, 4).cuda()").replace(
                "torch.ones(2, 4)", "torch.ones(2, 4).cuda()"
            ),
            tmp_path,
            "--cpu",
        )
        assert said.returncode == 0, said.stderr
        assert len(report_in(tmp_path)["steps"]) == 3

"""The doctor's report: each of its facts, and that it changes nothing."""

from __future__ import annotations

import functools
import importlib
import platform
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import wrapt
from conftest import changed, torch_now
from helpers import HALF_DTYPES, casts_on, dtype_name
from torch import nn

import ampatch
from ampatch import amp, doctor
from ampatch.cast_lists.lists import shipped
from ampatch.function_wrapper import is_wrapper
from ampatch.native import kernels
from ampatch.runtime import runtime

# In an object, where amp does not find and patch them.
ORIGINAL = types.SimpleNamespace(linear=F.linear, matmul=torch.matmul)

OF_AMP, NAMES, OF_OTHERS = "Patches by amp", "Names without casts", "Patches by others"


def report() -> dict[str, list[str]]:
    """The lines below each heading."""
    blocks = "\n".join(doctor.report()).split("\n\n")
    return {heading: textwrap.dedent("\n".join(lines)).splitlines() for heading, *lines in map(str.splitlines, blocks)}


def facts(heading: str) -> dict[str, tuple[str, list[str]]]:
    """The facts of a section that have a value, and the details below each."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in report()[heading]:
        if not line.startswith(" "):
            label, _, value = line.partition(": ")
            found[label] = value, []
        else:
            found[label][1].append(line.strip())
    return found


def unreached() -> list[str]:
    """The names in loaded modules that lead to functions without casts."""
    count, details = facts(NAMES)["in loaded modules"]
    assert int(count) == len(details)
    # Other modules of tests, loaded before in this process, hold some as well.
    return [line for line in details if line.startswith(__name__) or not line.startswith("test_")]


def foreign() -> list[str]:
    """The functions in the shipped lists that are not torch's own."""
    ((count, details),) = (fact for label, fact in facts(OF_OTHERS).items() if label.endswith("not torch's own"))
    assert int(count) == len(details)
    return details


def replaced() -> list[str]:
    """The patches of amp's that were replaced since."""
    count, details = facts(OF_OTHERS)["patches of amp's that were replaced since"]
    assert int(count) == len(details)
    return details


def here(function: Callable[..., object]) -> str:
    """How the report calls a function of this module."""
    code = function.__code__
    return f"{code.co_qualname} of {__name__} ({__file__}:{code.co_firstlineno})"


@functools.wraps(ORIGINAL.linear)
def fast_linear(*args: object, **kwargs: object) -> object:
    """A replacement that claims to be torch's, as those of most tools do."""
    return ORIGINAL.linear(*args, **kwargs)


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], types.ModuleType]]:
    """Writes a module and imports it; forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, source: str) -> types.ModuleType:
        written.append(name)
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


class TestReport:
    def test_sections_are_set_apart_by_an_empty_line(self):
        lines = list(doctor.report())
        headings = [index for index, line in enumerate(lines) if line and not line.startswith(" ")]
        sections = ["Versions", "Devices", "Kernels", "Calls of patched functions", OF_AMP, NAMES, OF_OTHERS]
        assert [lines[index] for index in headings] == sections
        assert [index for index, line in enumerate(lines) if not line] == [index - 1 for index in headings[1:]]

    def test_nothing_is_told_in_detail_where_nothing_is_wrong(self):
        with casts_on():
            lines = report()
        assert [line for line in lines[NAMES] + lines[OF_OTHERS] if line.startswith(" ")] == []
        assert max(map(len, lines.values())) < 20

    @pytest.mark.parametrize("live", [False, True], ids=["off", "on"])
    def test_the_report_changes_nothing(self, live, monkeypatch):
        monkeypatch.setattr(F, "linear", fast_linear)
        with casts_on(enabled=live):
            list(doctor.report())
            before, modules, patches = torch_now(), list(sys.modules), amp_patches()
            list(doctor.report())
            assert changed(before, torch_now()) == []
            assert list(sys.modules) == modules
            assert amp_patches() == patches

    def test_the_report_reads_nothing_off_a_device(self):
        """A tensor on the meta device has no value to be read."""
        with amp.init(half_dtype=torch.float16):
            runtime.live.losses.scalers[0].scale(torch.ones((), device="meta"))
            assert "Devices" in report()

    def test_names_are_read_from_lazy_modules_without_waking_them(self, monkeypatch):
        class Lazy(types.ModuleType):
            def __getattribute__(self, name: str) -> object:
                raise AssertionError(f"woken by {name}")

        lazy = Lazy("lazy")
        with casts_on(), monkeypatch.context() as patch:
            patch.setitem(sys.modules, "lazy", lazy)
            vars(types.ModuleType)["__dict__"].__get__(lazy)["kept"] = ORIGINAL.linear
            assert unreached() == ["lazy.kept: torch.nn.functional.linear"]


def amp_patches() -> list[object]:
    return [] if runtime.live is None else list(runtime.live.ledger.patches)


class TestVersions:
    def test_versions_of_the_packages_are_told(self):
        assert report()["Versions"] == [
            f"ampatch {ampatch.__version__}",
            f"torch {torch.__version__}",
            f"CPython {platform.python_version()}",
            f"wrapt {version('wrapt')}",
            f"PyYAML {version('PyYAML')}",
            f"OS: {platform.platform()}",
            *report()["Versions"][-2:],
        ]

    @pytest.mark.parametrize(
        ("cuda", "hip", "said"),
        [(None, None, "CPU"), ("12.8", None, "CPU, CUDA 12.8"), (None, "6.4.1", "CPU, ROCm 6.4.1")],
        ids=["cpu", "cuda", "rocm"],
    )
    def test_the_toolkit_of_torch_is_told(self, cuda, hip, said, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert facts("Versions")["torch is built for"] == (said, [])

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
                "535.129.03",
            ),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
            ("\n", "none"),
            (None, "none"),
        ],
        ids=["closed", "open", "empty", "no-file"],
    )
    def test_the_version_of_the_driver_is_told(self, content, said, tmp_path, monkeypatch):
        monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path / "version")
        if content is not None:
            (tmp_path / "version").write_text(content, encoding="utf-8")
        assert facts("Versions")["NVIDIA driver"] == (said, [])


class TestDevices:
    @pytest.mark.parametrize("threads", [1, 2])
    def test_the_cpu_has_its_threads(self, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert report()["Devices"][0].startswith(f"CPU: {platform.machine()}, ")
            assert report()["Devices"][0].endswith(f", threads: {threads}")
        finally:
            torch.set_num_threads(before)

    def test_a_missing_gpu_is_told(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # there, but without a driver
        assert report()["Devices"][1:] == ["GPU: none that torch can use"]

    def test_gpus_have_names(self, monkeypatch):
        names = ["NVIDIA H100", RuntimeError("Cannot re-initialize CUDA\n in forked subprocess.")]
        gpu = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", Mock(side_effect=names))
        assert report()["Devices"][1:] == [
            "GPU 0: NVIDIA H100",
            "GPU 1: its name cannot be read (Cannot re-initialize CUDA in forked subprocess.)",
        ]

    @pytest.mark.gpu
    def test_real_gpus_have_names(self):
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        assert report()["Devices"][1:] == [f"GPU {index}: {name}" for index, name in enumerate(names)]


def test_the_kernels_in_use_are_told():
    assert report()["Kernels"] == [kernels.in_use()]
    assert kernels.in_use().startswith(("torch's own multi-tensor kernels, as ", "the compiled extension "))


class TestPatchesByAmp:
    def test_amp_that_is_off_is_told(self):
        assert report()[OF_AMP] == ["amp is not set up"]
        amp.initialize(nn.Linear(2, 2), enabled=False)
        assert report()[OF_AMP] == ["amp is not set up: initialize was called with enabled=False"]

    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    def test_functions_are_counted_by_namespace(self, half):
        rules = Counter(path.namespace for path in shipped().for_half(half))
        with casts_on(half):
            found = facts(OF_AMP)
        assert found["amp is set up"] == (f"O1, {dtype_name(half)}", [])
        expected = [f"{namespace}: {count}" for namespace, count in sorted(rules.items())]
        assert found["functions patched"] == (str(rules.total()), expected)

    def test_a_level_that_patches_nothing_has_no_functions(self):
        amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
        assert facts(OF_AMP)["amp is set up"][0].startswith("O0, ")
        assert facts(OF_AMP)["functions patched"] == ("0", [])

    def test_names_bound_earlier_are_counted_apart(self, module):
        with casts_on():
            before = int(facts(OF_AMP)["names that modules had bound earlier, patched as well"][0])
        module("early", "from torch.nn.functional import layer_norm, linear\nfrom torch import matmul as product\n")
        with casts_on():
            found = facts(OF_AMP)
        assert found["names that modules had bound earlier, patched as well"] == (str(before + 3), [])
        assert found["functions patched"][0] == str(len(shipped().for_half(torch.bfloat16)))

    def test_a_registered_function_is_a_function_and_no_name(self, module):
        mine = module("mine", "def dot(a, b): return a @ b\n")
        amp.register_half_function(mine, "dot")
        with casts_on():
            assert "mine: 1" in facts(OF_AMP)["functions patched"][1]

    def test_functions_that_wait_for_an_import_are_counted(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "not_imported_yet.py").write_text("raise AssertionError('imported')")
        with casts_on(cast_lists={"whitelist": {"not_imported_yet": ["f", "g"]}}):
            assert facts(OF_AMP)["functions in modules that are not imported yet"] == ("2", ["not_imported_yet: 2"])

    def test_patches_of_an_optimizer_are_counted(self):
        with casts_on():
            before = int(facts(OF_AMP)["other attributes of torch, models and optimizers"][0])
        model = nn.Linear(2, 2)
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), half_dtype=torch.bfloat16, verbosity=0)
        assert int(facts(OF_AMP)["other attributes of torch, models and optimizers"][0]) > before

    def test_casts_that_are_off_in_this_thread_are_told(self):
        with casts_on():
            assert "casts are off in this thread" not in report()[OF_AMP]
            with amp.disable_casts():
                assert "casts are off in this thread" in report()[OF_AMP]


class TestNamesWithoutCasts:
    @pytest.mark.parametrize("level", [None, "O0"], ids=["off", "O0"])
    def test_names_are_not_looked_for_where_nothing_is_patched(self, level):
        if level is not None:
            amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
        assert report()[NAMES] == ["not looked for: amp patches no functions now"]

    def test_a_name_imported_before_or_since_has_casts(self, module):
        module("early", "from torch.nn.functional import linear\n")
        with casts_on():
            module("late", "from torch.nn.functional import linear\nfrom torch import matmul\n")
            assert unreached() == []

    def test_a_name_bound_since_to_torchs_inner_function_is_told(self, module, monkeypatch):
        """What torch.linalg.multi_dot is without amp stands in torch._C._linalg as well, which is left alone."""
        with casts_on():
            in_torch = facts(NAMES)["in torch's own modules, which are left alone"]
            late = module("late", "from torch._C._linalg import linalg_multi_dot\n")
            assert not is_wrapper(late.linalg_multi_dot)
            monkeypatch.setitem(sys.modules, "late_again", late)  # which counts once
            assert unreached() == ["late.linalg_multi_dot: torch.linalg.multi_dot"]
            assert facts(NAMES)["in torch's own modules, which are left alone"] == in_torch
        assert report()[NAMES] == ["not looked for: amp patches no functions now"]

    def test_a_name_in_a_frozen_module_is_told(self, monkeypatch):
        class Frozen(types.ModuleType):
            def __setattr__(self, name: str, value: object) -> None:
                raise AttributeError(name)

        frozen = Frozen("frozen")
        vars(frozen)["product"] = ORIGINAL.matmul
        monkeypatch.setitem(sys.modules, "frozen", frozen)
        with casts_on():
            assert unreached() == ["frozen.product: torch.matmul"]

    def test_a_name_bound_to_a_method_is_cast_as_the_method_is(self, module):
        early = module("early", "import torch\nproduct = torch.Tensor.matmul\n")
        with casts_on():
            assert unreached() == []
            assert early.product(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("definition", "line", "name"),
        [
            pytest.param("def f(x, act=softmax): ...", 6, "act", id="default"),
            pytest.param("def f(x, *, act=softmax): ...", 6, "act", id="keyword-only"),
            pytest.param("class M:\n    def f(self, x, y=1, act=softmax): ...", 7, "act", id="default of a method"),
            pytest.param("f = lambda x, act=softmax: x", 6, "act", id="lambda"),
            pytest.param(
                "def make(act):\n    def f(x): return act(x)\n    return f\nf = make(softmax)", 7, "act", id="closure"
            ),
            pytest.param("def f(x, act=partial(softmax, dim=1)): ...", 6, "act", id="partial"),
            pytest.param("def f(x, acts=(1, softmax)): ...", 6, "acts", id="tuple"),
            pytest.param("def f(x, acts={'a': softmax}): ...", 6, "acts", id="dict"),
            pytest.param("def f(x, acts={'a': [softmax]}): ...", 6, "acts", id="list in a dict"),
        ],
    )
    def test_closures_and_defaults_that_hold_a_function_are_told(self, definition, line, name, module):
        head = "from functools import partial\n\nimport torch\nfrom torch.nn.functional import softmax\n\n"
        early = module("early", f"{head}{definition}\nsoftmax = None\n")
        with casts_on():
            count, details = facts(NAMES)["in closures and default arguments"]
        assert int(count) == len(details)
        (told,) = [detail for detail in details if f"({early.__file__}:" in detail]
        assert told.endswith(f"({early.__file__}:{line}): torch.nn.functional.softmax as {name}")

    def test_closures_and_defaults_with_other_functions_are_no_fault(self, module):
        early = module("early", "import torch\ndef f(x, act=torch.relu, ns=vars(torch), table=[1, torch.cat]): ...\n")
        with casts_on():
            _, details = facts(NAMES)["in closures and default arguments"]
        assert not [detail for detail in details if f"({early.__file__}:" in detail]

    def test_names_in_torchs_own_modules_are_counted_only(self, monkeypatch):
        with casts_on(), monkeypatch.context() as patch:
            before = int(facts(NAMES)["in torch's own modules, which are left alone"][0])
            assert before > 0
            patch.setattr(torch.hub, "kept", ORIGINAL.linear, raising=False)
            assert int(facts(NAMES)["in torch's own modules, which are left alone"][0]) == before + 1
            assert unreached() == []


class Tool:
    def linear(self, *args: object) -> object:
        return ORIGINAL.linear(*args)

    def __call__(self, *args: object) -> object:
        return ORIGINAL.linear(*args)


REPLACEMENTS = pytest.mark.parametrize(
    ("replacement", "said"),
    [
        pytest.param(fast_linear, here(fast_linear), id="claims-to-be-torchs"),
        pytest.param(Tool().linear, f"method around {here(Tool.linear)}", id="method"),
        pytest.param(functools.partial(fast_linear, bias=None), f"partial around {here(fast_linear)}", id="partial"),
        pytest.param(
            functools.partial(ORIGINAL.linear, bias=None),
            "partial around linear of torch._C._nn",
            id="partial-of-torchs",
        ),
        pytest.param(
            wrapt.FunctionWrapper(ORIGINAL.linear, Tool.linear),
            f"FunctionWrapper around {here(Tool.linear)}",
            id="wrapt",
        ),
        pytest.param(
            wrapt.FunctionWrapper(Tool().linear, fast_linear),
            f"FunctionWrapper around {here(fast_linear)}",
            id="wrapt-around-a-method",
        ),
        pytest.param(Tool(), f"an object of {__name__}.Tool", id="object"),
        pytest.param(max, "max of builtins", id="builtin"),
    ],
)


class TestPatchesByOthers:
    @pytest.fixture(autouse=True)
    def _without_closures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Looking through every function there is takes most of a report's time, and has tests of its own."""
        monkeypatch.setattr(doctor, "_captured", lambda _: ())

    def test_every_listed_function_is_torchs(self):
        """Among them those that torch itself decorates, dispatches or takes from another module."""
        label = f"of {len({path for path, _ in shipped().rules})} functions in the shipped lists, not torch's own"
        assert facts(OF_OTHERS)[label] == ("0", [])
        with casts_on():
            assert facts(OF_OTHERS)[label] == ("0", [])

    @REPLACEMENTS
    def test_a_replacement_is_named_with_where_it_was_written(self, replacement, said, monkeypatch):
        monkeypatch.setattr(F, "linear", replacement)
        assert foreign() == [f"torch.nn.functional.linear: {said}"]
        assert replaced() == []

    @REPLACEMENTS
    def test_a_replacement_of_amps_patch_is_told_apart(self, replacement, said, monkeypatch):
        with casts_on(), monkeypatch.context() as patch:
            patched = int(facts(OF_AMP)["functions patched"][0])
            patch.setattr(F, "linear", replacement)
            assert replaced() == [f"torch.nn.functional.linear: {said}"]
            assert foreign() == []
            assert int(facts(OF_AMP)["functions patched"][0]) == patched - 1

    def test_a_decorated_or_compiled_torch_function_is_a_replacement(self, monkeypatch):
        monkeypatch.setattr(F, "layer_norm", torch.no_grad()(F.layer_norm))
        monkeypatch.setattr(F, "linear", torch.compile(F.linear, backend="eager"))
        compiled, no_grad = sorted(foreign(), reverse=True)
        assert no_grad.startswith("torch.nn.functional.layer_norm: ")
        assert " of torch.utils._contextlib (" in no_grad
        assert compiled.startswith("torch.nn.functional.linear: ")
        assert " of torch._dynamo." in compiled

    def test_a_replaced_method_is_named(self, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "mm", Tool.linear)
        monkeypatch.setattr(torch.Tensor, "bmm", wrapt.FunctionWrapper(torch.Tensor.bmm, Tool.linear))
        expected = [
            f"torch.Tensor.bmm: BoundFunctionWrapper around {here(Tool.linear)}",
            f"torch.Tensor.mm: {here(Tool.linear)}",
        ]
        assert foreign() == expected
        with casts_on():
            assert foreign() == expected

    @pytest.mark.filterwarnings(
        "ignore:another library has replaced functions that amp had patched:ampatch.errors.AmpWarning"
    )
    def test_a_proxy_around_amps_patch_is_named(self, monkeypatch):
        """Asked for its globals it answers with those of amp's wrapper."""
        monkeypatch.setattr(F, "linear", F.linear)  # puts it back in the end
        said = [f"torch.nn.functional.linear: FunctionWrapper around {here(Tool.linear)}"]
        with casts_on():
            F.linear = wrapt.FunctionWrapper(F.linear, Tool.linear)
            assert (foreign(), replaced()) == ([], said)
        assert (foreign(), replaced()) == (said, [])
        with casts_on():
            assert (foreign(), replaced()) == (said, [])

    def test_replacements_of_unlisted_functions_are_not_told(self, monkeypatch):
        monkeypatch.setattr(F, "dropout", fast_linear)
        assert foreign() == []

    def test_patches_of_amps_that_were_removed_are_told(self, monkeypatch):
        with casts_on(), monkeypatch.context() as patch:
            patch.setattr(F, "linear", ORIGINAL.linear)
            patch.delattr(F, "layer_norm")
            patch.delattr(torch.Tensor, "mm")
            patch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
            assert replaced() == [
                "torch.Tensor.mm: what it was before",
                "torch.backends.mha._is_fastpath_enabled: what it was before",
                "torch.nn.functional.layer_norm: nothing",
                "torch.nn.functional.linear: what it was before",
            ]

    def test_a_replaced_flag_has_its_value(self, monkeypatch):
        monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
        with casts_on(), monkeypatch.context() as patch:
            patch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
            assert replaced() == ["torch.backends.mha._is_fastpath_enabled: True"]

    def test_a_replaced_name_of_another_module_is_named(self, module, monkeypatch):
        early = module("early", "from torch.nn.functional import linear\n")
        with casts_on(), monkeypatch.context() as patch:
            patch.setattr(early, "linear", fast_linear)
            assert replaced() == [f"early.linear: {here(fast_linear)}"]

    @pytest.mark.filterwarnings(
        "ignore:another library has replaced functions that amp had patched:ampatch.errors.AmpWarning"
    )
    def test_a_replaced_step_of_an_optimizer_is_named(self):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, half_dtype=torch.bfloat16, verbosity=0)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        assert replaced() == []  # it forwards unchanged
        optimizer.step = Tool().linear
        assert replaced() == [f"torch.optim.sgd.SGD.step: method around {here(Tool.linear)}"]
        amp.deinitialize()

    def test_lists_that_do_not_load_for_a_replacement_are_told(self, monkeypatch):
        def interpolate(*args: object, **kwargs: object) -> None: ...

        shipped.cache_clear()
        monkeypatch.setattr(F, "interpolate", interpolate)
        monkeypatch.setattr(F, "linear", fast_linear)
        try:
            with pytest.raises(amp.CastListError) as raised:
                amp.init()
            count, details = facts(OF_OTHERS)["why the shipped lists do not load, and amp cannot be set up"]
            assert (int(count), details) == (1, str(raised.value).splitlines())
            assert "torch.nn.functional.interpolate" in details[0]
            assert foreign() == [
                f"torch.nn.functional.interpolate: {here(interpolate)}",
                f"torch.nn.functional.linear: {here(fast_linear)}",
            ]
            broken = report()[OF_OTHERS]
        finally:
            monkeypatch.undo()
            shipped.cache_clear()
        assert not any(label.startswith("why") for label in facts(OF_OTHERS))
        # Read by their names alone the lists have as many functions.
        (total,) = (line.split()[1] for line in broken if line.startswith("of "))
        assert report()[OF_OTHERS][0].split()[1] == total

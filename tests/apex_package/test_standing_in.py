"""What `import apex` gives once `ampatch.apex.install` was called, and that all of it can be undone."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ampatch.apex
from ampatch import amp
from ampatch.apex._not_replaced import _INSTEAD


def imported() -> dict[str, object]:
    """What the import system knows of Apex."""
    names = ("apex", "amp_C", "apex_C", "fused_layer_norm_cuda")
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}


@pytest.fixture
def standing_in() -> Iterator[None]:
    finders = list(sys.meta_path)
    assert ampatch.apex.install()
    yield
    ampatch.apex.uninstall()
    assert sys.meta_path == finders
    assert imported() == {}


@pytest.fixture
def real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An Apex of old that can be imported: one with amp."""
    package = tmp_path / "apex"
    (package / "amp").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import amp\n")
    (package / "amp" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    ampatch.apex.uninstall()
    for name in imported():
        del sys.modules[name]


class TestNamesOfApex:
    @pytest.mark.parametrize(
        "name",
        [
            "apex",
            "apex.amp",
            "apex.amp._amp_state",
            "apex.amp.frontend",
            "apex.amp.handle",
            "apex.amp.lists.functional_overrides",
            "apex.amp.lists.tensor_overrides",
            "apex.amp.lists.torch_overrides",
            "apex.amp.opt",
            "apex.amp.scaler",
            "apex.contrib",
            "apex.contrib.clip_grad",
            "apex.contrib.optimizers",
            "apex.contrib.optimizers.fp16_optimizer",
            "apex.contrib.optimizers.fused_adam",
            "apex.contrib.xentropy",
            "apex.contrib.xentropy.softmax_xentropy",
            "apex.fp16_utils",
            "apex.fp16_utils.fp16_optimizer",
            "apex.fp16_utils.fp16util",
            "apex.fp16_utils.loss_scaler",
            "apex.multi_tensor_apply",
            "apex.normalization",
            "apex.normalization.fused_layer_norm",
            "apex.optimizers",
            "apex.optimizers.fused_adagrad",
            "apex.optimizers.fused_adam",
            "apex.optimizers.fused_lamb",
            "apex.optimizers.fp16_optimizer",
            "apex.optimizers.fused_mixed_precision_lamb",
            "apex.optimizers.fused_novograd",
            "apex.optimizers.fused_sgd",
            "apex.parallel",
            "apex.parallel.LARC",
            "apex.parallel.distributed",
            "apex.parallel.sync_batchnorm",
            "amp_C",
            "apex_C",
            "fused_layer_norm_cuda",
        ],
    )
    @pytest.mark.usefixtures("standing_in")
    def test_every_module_has_the_name_that_apex_gave_it(self, name: str) -> None:
        own = name if name.startswith("apex.") or name == "apex" else f"apex.{name}"
        assert importlib.import_module(name) is importlib.import_module(f"ampatch.{own}")

    @pytest.mark.usefixtures("standing_in")
    def test_import_statements_find_apex(self) -> None:
        import apex.parallel.LARC
        from apex import amp as apex_amp
        from apex.parallel.LARC import LARC

        assert apex_amp is ampatch.apex.amp
        assert apex.parallel.LARC.LARC is LARC

    @pytest.mark.usefixtures("standing_in")
    def test_modules_are_found_before_import_and_may_be_reloaded(self) -> None:
        assert importlib.util.find_spec("apex.amp") is not None
        amp_of_apex = importlib.import_module("apex.amp")
        assert importlib.reload(amp_of_apex) is amp_of_apex
        importlib.reload(importlib.import_module("amp_C"))

    @pytest.mark.usefixtures("standing_in")
    def test_a_star_import_has_all_functions(self) -> None:
        names: dict[str, object] = {}
        exec("from apex.amp import *", names)
        assert set(amp.__all__) <= set(names)
        assert names["initialize"] is ampatch.apex.amp.initialize

    @pytest.mark.usefixtures("standing_in")
    def test_apex_counts_as_installed_with_a_version(self) -> None:
        assert importlib.util.find_spec("apex") is not None
        assert importlib.metadata.version("apex") == "0.1+ampatch"

    @pytest.mark.usefixtures("standing_in")
    def test_other_packages_keep_their_versions(self) -> None:
        assert importlib.metadata.version("pytest") == pytest.__version__
        assert "apex" not in {found.name for found in importlib.metadata.distributions()}

    def test_importing_the_package_alone_changes_nothing(self) -> None:
        program = (
            "import sys, ampatch\n"
            "before = list(sys.meta_path)\n"
            "import ampatch.apex\n"
            "assert 'apex' not in sys.modules and sys.meta_path == before\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)

    def test_installing_twice_is_installing_once(self) -> None:
        before = list(sys.meta_path)
        assert ampatch.apex.install()
        assert ampatch.apex.install()
        ampatch.apex.uninstall()
        assert sys.meta_path == before
        ampatch.apex.uninstall()
        with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
            importlib.import_module("apex")
        assert "__getattr__" not in vars(ampatch.apex)


@pytest.mark.usefixtures("standing_in")
class TestNamesThatAreNotReplaced:
    @pytest.mark.parametrize(
        ("statement", "message"),
        [
            ("from apex.mlp import MLP", r"does not replace apex\.mlp\..*torch\.compile"),
            ("from apex import pyprof", r"does not replace apex\.pyprof\..*torch\.profiler"),
            (
                "from apex.optimizers import FusedNothing",
                r"does not replace apex\.optimizers\.FusedNothing\..*torch\.optim",
            ),
            ("import syncbn", r"does not replace syncbn\. Use instead: SyncBatchNorm of apex\.parallel"),
            ("import apex.nonsense", r"does not replace apex\.nonsense\..*Use instead: torch itself"),
            ("from apex.contrib.optimizers.fused_lamb import FusedLAMB", r"Use instead: .*apex\.optimizers\.FusedLAMB"),
            ("from apex.contrib.optimizers import FusedSGD", r"Use instead: .*apex\.optimizers\.FusedSGD"),
            ("import apex.contrib.optimizers.distributed_fused_adam", r"Use instead: .*torch\.distributed\.fsdp, or "),
            (
                "from apex.contrib.optimizers import DistributedFusedLAMB",
                r"Use instead: .*torch\.distributed\.fsdp, or ",
            ),
            (
                "from apex.transformer.functional import FusedScaleMaskSoftmax",
                r"Use instead: .*torch\.nn\.functional\.softmax",
            ),
        ],
    )
    def test_importing_what_is_not_replaced_raises_with_what_to_use(self, statement: str, message: str) -> None:
        with pytest.raises(ModuleNotFoundError, match=message):
            exec(statement)

    def test_each_hint_of_what_to_use_can_be_reached(self) -> None:
        for name in _INSTEAD:
            package = name.rpartition(".")[0]
            if package:
                importlib.import_module(package)
            if name not in sys.modules:
                with pytest.raises(ModuleNotFoundError) as raised:
                    importlib.import_module(name)
                assert _INSTEAD[name] in str(raised.value)

    def test_attributes_that_are_not_replaced_raise_with_what_to_use(self) -> None:
        import apex.contrib.optimizers

        with pytest.raises(AttributeError, match=r"Use instead: apex\.optimizers\.FusedSGD\."):
            _ = apex.contrib.optimizers.FusedSGD
        with pytest.raises(AttributeError, match=r"does not replace apex\.RNN\..*torch\.nn\.LSTM"):
            _ = apex.RNN
        assert not hasattr(apex, "RNN")
        with pytest.raises(AttributeError, match=r"does not replace apex\.amp\.nothing\."):
            _ = apex.amp.nothing


class TestARealApex:
    @pytest.mark.usefixtures("real_apex")
    def test_a_real_apex_with_amp_is_left_alone(self, caplog: pytest.LogCaptureFixture, real_apex: Path) -> None:
        with caplog.at_level(logging.WARNING, "ampatch"):
            assert not ampatch.apex.install()
        assert importlib.import_module("apex.amp").real
        assert str(real_apex) in caplog.text
        assert "--force" in caplog.text

    def test_a_real_apex_that_only_a_finder_knows_is_left_alone(
        self, real_apex: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Finder:
            def find_spec(self, name: str, path: object = None, target: object = None) -> object:
                if name != "apex":
                    return None
                return importlib.util.spec_from_file_location(name, real_apex / "__init__.py")

        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(real_apex.parent)])
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        assert not ampatch.apex.install()
        assert importlib.import_module("apex.amp").real

    @pytest.mark.usefixtures("real_apex")
    def test_force_replaces_a_real_apex_until_uninstall(self) -> None:
        before = importlib.import_module("apex.amp")
        assert ampatch.apex.install(force=True)
        assert importlib.import_module("apex.amp").initialize is ampatch.apex.amp.initialize
        ampatch.apex.uninstall()
        assert importlib.import_module("apex.amp") is before

    def test_a_real_apex_without_amp_is_replaced(self, real_apex: Path) -> None:
        (real_apex / "__init__.py").write_text("")
        (real_apex / "amp" / "__init__.py").unlink()
        (real_apex / "amp").rmdir()
        importlib.invalidate_caches()
        assert ampatch.apex.install()
        assert importlib.import_module("apex.amp").scale_loss is amp.scale_loss

"""Of projects that import Apex only if it is there: they find what ampatch replaces, and do without the rest."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator

import pytest
import torch

import ampatch.apex

pytestmark = pytest.mark.usefixtures("standing_in")

FOUND = [
    ("amp_C", "multi_tensor_adam"),
    ("amp_C", "multi_tensor_adam_capturable"),
    ("amp_C", "multi_tensor_lamb_stage1_cuda"),
    ("amp_C", "multi_tensor_lamb_stage2_cuda"),
    ("apex.contrib.clip_grad", "clip_grad_norm_"),
    ("apex.contrib.optimizers", "FP16_Optimizer"),
    ("apex.contrib.optimizers", "FusedAdam"),
    ("apex.contrib.optimizers.fp16_optimizer", "FP16_Optimizer"),
    ("apex.contrib.optimizers.fused_adam", "FusedAdam"),
    ("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss"),
    ("apex.contrib.xentropy.softmax_xentropy", "SoftmaxCrossEntropyLoss"),
    ("apex.normalization.fused_layer_norm", "FusedLayerNormAffineFunction"),
    ("apex.normalization.fused_layer_norm", "FusedLayerNormAffineMixedDtypesFunction"),
    ("apex.normalization.fused_layer_norm", "FusedLayerNormFunction"),
    ("apex.normalization.fused_layer_norm", "FusedRMSNormAffineFunction"),
    ("apex.normalization.fused_layer_norm", "FusedRMSNormAffineMixedDtypesFunction"),
    ("apex.normalization.fused_layer_norm", "FusedRMSNormFunction"),
    ("apex.optimizers", "FP16_Optimizer"),
    ("apex.optimizers", "FusedMixedPrecisionLamb"),
    ("apex.optimizers.fused_mixed_precision_lamb", "FusedMixedPrecisionLamb"),
    ("fused_layer_norm_cuda", "forward_affine"),
    ("fused_layer_norm_cuda", "rms_backward_affine"),
]

ABSENT = [
    "apex.RNN",
    "apex.contrib.layer_norm",
    "apex.contrib.sparsity",
    "apex.fused_dense",
    "apex.mlp",
    "apex.pyprof",
    "apex.transformer",
]
EXTENSIONS = [
    "bnp",
    "distributed_lamb_cuda",
    "fast_layer_norm",
    "fused_adam_cuda",
    "fused_dense_cuda",
    "fused_lamb_cuda",
    "fused_weight_gradient_mlp_cuda",
    "mlp_cuda",
    "scaled_masked_softmax_cuda",
    "syncbn",
    "xentropy_cuda",
]


@pytest.fixture
def standing_in() -> Iterator[None]:
    assert ampatch.apex.install()
    yield
    ampatch.apex.uninstall()


@pytest.mark.parametrize(("module", "name"), FOUND, ids=lambda each: each)
def test_what_is_replaced_is_found(module: str, name: str) -> None:
    assert importlib.util.find_spec(module) is not None
    exec(f"from {module} import {name}")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ABSENT)
class TestWhatIsNot:
    @pytest.mark.parametrize(
        "statement",
        ["import {module}", "from {package} import {name}", "from {module} import Thing", "import {module}.x"],
    )
    @pytest.mark.parametrize("caught", [ImportError, (ImportError, ModuleNotFoundError, AttributeError)], ids=str)
    def test_is_missed_by_each_import(self, module: str, statement: str, caught: type[Exception]) -> None:
        package, _, name = module.rpartition(".")
        try:
            exec(statement.format(module=module, package=package, name=name))
        except caught:
            has_it = False
        else:
            has_it = True
        assert not has_it
        assert module not in sys.modules

    def test_is_missed_by_who_asks_for_it(self, module: str) -> None:
        assert importlib.util.find_spec(module) is None

    def test_is_no_attribute(self, module: str) -> None:
        package, _, name = module.rpartition(".")
        assert not hasattr(importlib.import_module(package), name)
        assert getattr(importlib.import_module(package), name, None) is None

    def test_is_named_by_the_error_after_it_was_asked_for(self, module: str) -> None:
        importlib.util.find_spec(module)
        with pytest.raises(ModuleNotFoundError, match=rf"does not replace {module}\. Use instead: "):
            importlib.import_module(module)

    def test_has_no_modules_below_it(self, module: str) -> None:
        with pytest.raises(ModuleNotFoundError):  # as where a parent is missing in plain Python
            importlib.util.find_spec(f"{module}.functional")


@pytest.mark.parametrize("module", EXTENSIONS)
class TestExtensionsThatAreNotReplaced:
    def test_are_missed(self, module: str) -> None:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(module)
        assert importlib.util.find_spec(module) is None


class TestAsProjectsAreWritten:
    def test_a_profiler_that_patches_each_extension_patches_those_that_exist(self) -> None:
        names = ["amp_C", "fused_adam_cuda", "fused_layer_norm_cuda", "mlp_cuda"]
        patched = [
            name for name in names if importlib.util.find_spec(name) is not None and importlib.import_module(name)
        ]
        assert patched == ["amp_C", "fused_layer_norm_cuda"]

    def test_a_loss_that_needs_the_extension_too_falls_back(self) -> None:
        try:
            import xentropy_cuda  # noqa: F401
            from apex.contrib import xentropy

            loss = xentropy.SoftmaxCrossEntropyLoss.apply
        except ImportError:
            loss = torch.nn.functional.cross_entropy
        assert loss is torch.nn.functional.cross_entropy

    def test_a_layer_norm_asks_for_the_arguments_of_the_function(self) -> None:
        from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedRMSNormAffineFunction

        arguments = inspect.getfullargspec(FusedLayerNormAffineFunction.forward).args
        assert arguments == ["input", "weight", "bias", "normalized_shape", "eps", "memory_efficient"]
        arguments = inspect.getfullargspec(FusedRMSNormAffineFunction.forward).args
        assert arguments == ["input", "weight", "normalized_shape", "eps", "memory_efficient"]

    def test_kernels_that_are_read_and_never_called_may_be_read(self) -> None:
        import amp_C

        lamb_compute_update = amp_C.multi_tensor_lamb_stage1_cuda
        with pytest.raises(
            ampatch.amp.UsageError, match=r"amp_C\.multi_tensor_lamb_stage1_cuda; .* Use FusedLAMB of apex"
        ):
            lamb_compute_update(65536, torch.zeros(1, dtype=torch.int32), [[]], 0.9)
        assert not hasattr(amp_C, "multi_tensor_lamb")

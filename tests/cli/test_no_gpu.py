"""The hint at `ampatch run --cpu` in errors on a machine without a GPU."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch

from ampatch.cli import no_gpu
from ampatch.cli.no_gpu import HINT, add_hint

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def notes_of(error: BaseException) -> list[str]:
    add_hint(error)
    return getattr(error, "__notes__", [])


@pytest.mark.usefixtures("_no_gpu")
class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            AssertionError("Torch not compiled with CUDA enabled"),
            RuntimeError("No CUDA GPUs are available"),
            RuntimeError("Found no NVIDIA driver on your system."),
            RuntimeError("Distributed package doesn't have NCCL built in"),
            ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
            AttributeError("module 'torch._C' has no attribute '_cuda_setDevice'"),
            TypeError("type torch.cuda.FloatTensor not available."),
            RuntimeError("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."),
            RuntimeError("Cannot access accelerator device when none is available."),
            RuntimeError("Tried to instantiate dummy base class Stream"),
            SystemError("this needs a GPU"),
        ],
        ids=str,
    )
    def test_errors_for_want_of_a_gpu_have_the_hint_once(self, error: Exception) -> None:
        assert notes_of(error) == [HINT]
        assert notes_of(error) == [HINT]

    @pytest.mark.parametrize(
        "error",
        [
            KeyError("x"),
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
            ModuleNotFoundError("No module named 'fused_adam_cuda'"),
            OSError("libcudart.so.10.2: cannot open shared object file"),
            AssertionError(),
            ValueError("gpus_per_node"),
        ],
        ids=repr,
    )
    def test_other_errors_have_no_hint(self, error: Exception) -> None:
        assert notes_of(error) == []

    def test_the_cause_of_an_error_counts_at_any_depth(self) -> None:
        error = ValueError("bad")
        error.__cause__ = KeyError("worse")
        error.__cause__.__context__ = AssertionError("Torch not compiled with CUDA enabled")
        assert notes_of(error) == [HINT]
        loop = ValueError("bad")
        loop.__cause__ = KeyError("worse")
        loop.__cause__.__context__ = loop
        assert notes_of(loop) == []

    def test_the_source_line_of_an_assertion_counts(self) -> None:
        with pytest.raises(AssertionError) as raised:
            exec("assert False")
        assert notes_of(raised.value) == []

        def asks() -> None:
            if not torch.cuda.is_available():
                raise AssertionError  # torch.cuda

        with pytest.raises(AssertionError) as raised:
            asks()
        assert notes_of(raised.value) == [HINT]

    def test_the_hint_of_a_worker_is_not_repeated(self) -> None:
        assert notes_of(RuntimeError(f"in a worker: Torch not compiled with CUDA enabled\n{HINT}")) == []


def test_errors_on_a_machine_with_a_gpu_have_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert notes_of(RuntimeError("CUDA out of memory")) == []


def test_adding_the_hint_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "is_available")
    assert notes_of(RuntimeError("CUDA")) == []


class TestLazyInit:
    def test_lazy_init_adds_the_hint_to_its_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "_lazy_init", Mock(side_effect=RuntimeError("No CUDA GPUs are available")))
        no_gpu.add_hint_to_torch_errors()
        with pytest.raises(RuntimeError, match=re.escape("No CUDA GPUs")) as raised:
            torch.cuda._lazy_init()
        assert raised.value.__notes__ == [HINT]

    def test_lazy_init_is_restored_once_it_succeeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def succeeds() -> None: ...

        monkeypatch.setattr(torch.cuda, "_lazy_init", succeeds)
        no_gpu.add_hint_to_torch_errors()
        assert torch.cuda._lazy_init is not succeeds
        torch.cuda._lazy_init()
        assert torch.cuda._lazy_init is succeeds

"""Under `torch.set_default_device`: amp's own numbers stay where the tensors are that they belong to."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ampatch
from ampatch import amp
from ampatch.apex import amp_C
from ampatch.native.host_copy import HostCopy

PACKAGE = Path(ampatch.__file__).parent

# Functions that make their tensor on the default device, unless they are told another.
FACTORIES = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
    }
)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def factories_without_device(path: Path) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in FACTORIES}
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_every_factory_call_of_the_package_names_a_device():
    # The demo is a program of its own, whose process has no other default.
    modules = [path for path in PACKAGE.rglob("*.py") if "demo" not in path.relative_to(PACKAGE).parts]
    assert modules
    assert [place for path in modules for place in factories_without_device(path)] == []
    assert factories_without_device(PACKAGE / "demo" / "network.py")  # it finds those that there are


class TestADefaultDevice:
    def test_host_copies_stay_on_the_cpu(self, far_devices):
        numbers = far_devices.of([1.0, 2.0], 1)
        with default_device("cuda"):
            copied = HostCopy(numbers)
        assert copied.values == (1, 2)

    @pytest.mark.gpu
    def test_a_fused_optimizer_may_skip_under_a_default_gpu(self):
        with default_device("cuda"):
            model = nn.Linear(4, 3)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            # The gradient of the sum is the scale itself, and the default scale of 65536 is no float16.
            amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", init_scale=2.0**8, verbosity=0)
            for factor in (1.0, torch.inf, 1.0):
                optimizer.zero_grad()
                with amp.scale_loss(model(torch.ones(2, 4)).sum() * factor, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            assert amp.skipped_steps(optimizer) == 1

    def test_gradients_are_clipped_on_their_device(self):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
        with default_device("meta"):
            assert amp.clip_grad_norm_(optimizer, 1.0).item() == 0  # there are none yet
            with amp.scale_loss(model(torch.ones(2, 4, device="cpu")).sum(), optimizer, delay_unscale=True) as loss:
                loss.backward()
            assert amp.clip_grad_norm_(optimizer, 1.0).item() > 1

    def test_apex_kernels_compute_on_the_device_of_their_tensors(self):
        ins, outs = [torch.ones(3)], [torch.zeros(3)]
        flag = torch.zeros(1, dtype=torch.int32)
        with default_device("meta"):
            amp_C.multi_tensor_scale(2048, flag, [ins, outs], 0.5)
            norm, _ = amp_C.multi_tensor_l2norm(2048, flag, [outs])
        assert outs[0].tolist() == [0.5] * 3
        assert norm.item() == pytest.approx(0.75**0.5)

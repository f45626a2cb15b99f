"""`ampatch doctor --device-check`: which half types a device computes as float32."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICES

from ampatch import device_check
from ampatch.cli import main as cli

pytestmark = pytest.mark.once


def broken(in_type: torch.dtype, value: float):
    """A product that is wrong in one half type."""

    def product(a, b):
        result = a @ b
        return result * value if a.dtype is in_type else result

    return product, ((4, 4), (4, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_both_half_types_are_safe_on_a_sound_device(device):
    checked = device_check.check(device)
    assert checked.safe == ["float16", "bfloat16"]
    assert max(row.error for row in checked.rows) < 0.01
    assert list(checked.lines())[-1] == f"Safe on {device}: half_dtype='float16' and half_dtype='bfloat16'."


@pytest.mark.parametrize(
    ("value", "verdict"), [(float("nan"), "inf or NaN"), (float("inf"), "inf or NaN"), (1.1, "wrong")]
)
def test_a_type_that_computes_otherwise_than_float32_is_not_safe(monkeypatch, value, verdict):
    monkeypatch.setattr(device_check, "_WORK", {"convolutions": (broken(torch.float16, value),)})
    checked = device_check.check("cpu")
    assert [(row.half.name, row.verdict) for row in checked.rows] == [("float16", verdict), ("bfloat16", "as float32")]
    assert list(checked.lines())[-1] == "Safe on cpu: half_dtype='bfloat16'."


def test_a_type_without_a_kernel_is_not_safe(monkeypatch, capsys):
    def inverse(a):
        return torch.linalg.inv(a)

    monkeypatch.setattr(device_check, "_WORK", {"inverses": ((inverse, ((3, 3),)),)})
    assert device_check.check("cpu").rows[0].verdict.startswith("torch raised: linalg.inv: Low precision dtypes not")
    assert cli.main(["doctor", "--device-check", "cpu"]) == 1
    assert capsys.readouterr().out.endswith(
        "No half type is safe on cpu. Type opt_level='O0', which trains in float32.\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        "quda",
        "meta",
        pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_a_device_that_cannot_compute_is_an_error(name, capsys):
    assert cli.main(["doctor", "--device-check", name]) == 1
    assert f"found {name!r} as a device, on which torch cannot compute (" in capsys.readouterr().err

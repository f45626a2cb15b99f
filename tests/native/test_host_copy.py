"""Numbers that move between devices: the host reads only what has arrived, and nothing else waits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from far_devices import TOO_EARLY

import ampatch
from ampatch.native import host_copy
from ampatch.native.host_copy import HostCopy, for_fused_step, on_device, stacked

PACKAGE = Path(ampatch.__file__).parent
CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(2)]


class TestFarDevices:
    def test_far_tensors_have_values_and_a_device(self, far_devices):
        number = far_devices.of([1.0, 2.0], 1) * 2
        assert number.device == GPUS[1]
        assert far_devices.values(number).tolist() == [2, 4]
        assert torch.zeros(2, device="cuda").device == GPUS[0]

    def test_operators_refuse_far_tensors_of_several_devices(self, far_devices):
        for other in (far_devices.of(1.0, 1), torch.ones(2)):
            with pytest.raises(RuntimeError, match="expected all tensors on one device"):
                far_devices.of([1.0, 2.0]) * other

    def test_a_copy_from_a_far_device_arrives_late_unless_it_blocks(self, far_devices):
        number = far_devices.of(3.0)
        early = number.to("cpu", non_blocking=True)
        assert early.item() == TOO_EARLY
        assert number.to("cpu").item() == 3
        assert early.item() == 3
        assert far_devices.waits == ["aten._to_copy"]


class TestOnDevice:
    @pytest.mark.parametrize("device", [CPU, *GPUS], ids=str)
    def test_a_number_has_its_value_on_any_device(self, far_devices, device):
        for number in (torch.tensor(3.0), far_devices.of(3.0, 0), far_devices.of(3.0, 1)):
            there = on_device(number, device)
            assert there.device == device
            assert far_devices.values(there).item() == 3
            assert on_device(there, device) is there

    def test_only_a_copy_to_the_cpu_waits(self, far_devices):
        on_device(far_devices.of(3.0, 0), GPUS[1])
        on_device(torch.tensor(3.0), GPUS[0])
        assert far_devices.waits == []
        on_device(far_devices.of(3.0, 0), CPU)
        assert far_devices.waits == ["aten._to_copy"]


def test_stacked_numbers_are_on_the_device_of_the_first(far_devices):
    numbers = [far_devices.of(1.0, 1), far_devices.of(2.0, 0), torch.tensor(3.0)]
    for count in range(3):
        ordered = numbers[count:] + numbers[:count]
        found = stacked(ordered)
        assert found.device == ordered[0].device
        assert far_devices.values(found).tolist() == [far_devices.values(each).item() for each in ordered]


def test_a_number_for_a_fused_step_is_copied_only_if_a_parameter_is_on_the_cpu(far_devices):
    number, on_host = far_devices.of(3.0, 1), torch.tensor(3.0)
    assert for_fused_step(number, [far_devices.of([1.0], 0)]) is number
    assert for_fused_step(on_host, [far_devices.of([1.0], 0), torch.ones(1)]) is on_host
    assert for_fused_step(None, [torch.ones(1)]) is None
    assert far_devices.waits == []

    copied = for_fused_step(number, [far_devices.of([1.0], 1), torch.ones(1)])
    assert (copied.device, copied.item()) == (CPU, 3)


class TestHostCopy:
    def test_a_copy_of_a_tensor_on_the_cpu_has_arrived_at_once(self):
        copied = HostCopy(torch.tensor([1.0, 2.0]))
        assert copied.has_arrived
        assert copied.values == (1, 2)

    def test_reading_waits_for_a_copy_that_has_not_arrived(self, far_devices):
        copied = HostCopy(far_devices.of([1.0, 2.0]))
        assert not copied.has_arrived
        assert copied.values == (1, 2)
        assert far_devices.waits == ["event"]

    def test_a_copy_arrives_after_those_before_it_and_is_read_at_once(self, far_devices):
        first, second = HostCopy(far_devices.of([1.0])), HostCopy(far_devices.of([2.0]))
        far_devices.deliver(0, 1)
        assert first.has_arrived
        assert not second.has_arrived
        assert (first.values, second.values) == ((1,), (2,))
        assert far_devices.waits == ["event"]

    @pytest.mark.parametrize("current", [0, 1])
    @pytest.mark.parametrize("index", [0, 1])
    def test_reading_waits_for_the_device_of_the_tensor(self, far_devices, current, index):
        far_devices.current = current
        assert HostCopy(far_devices.of([1.0, 2.0], index)).values == (1, 2)

    @pytest.mark.gpu
    def test_a_copy_from_a_gpu_has_the_value_of_its_moment(self):
        numbers = torch.zeros(2, device="cuda")
        torch.cuda._sleep(100_000_000)
        numbers += 3
        copied = HostCopy(numbers)
        numbers += 1
        assert not copied.has_arrived
        assert copied.values == (3, 3)
        assert copied.has_arrived


@pytest.mark.gpu
def test_a_number_from_a_gpu_waits_for_a_long_kernel():
    number = torch.zeros((), device="cuda")
    torch.cuda._sleep(100_000_000)
    number += 3
    assert on_device(number, CPU).item() == 3


def _calls_that_do_not_block(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for call in calls
        if any(keyword.arg == "non_blocking" for keyword in call.keywords)
    ]


def test_only_host_copy_starts_copies_that_do_not_block():
    # `ampatch run --cpu` hands on what a script asks for.
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "cuda_on_cpu"]
    found = [place for path in modules for place in _calls_that_do_not_block(path)]
    assert found
    (handed_on,) = [place for place in found if place.startswith("integrations/ignite.py")]  # the user's argument
    found.remove(handed_on)
    assert {place.split(":")[0] for place in found} == {str(Path(host_copy.__file__).relative_to(PACKAGE))}

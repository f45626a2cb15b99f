"""The peak memory in the demo's table, measured against known sizes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from ampatch.demo import digits, training
from ampatch.demo.network import DigitsNetwork
from ampatch.diagnostics.peak_memory import peak_allocated

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

MIB = 2**20


def tensor(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def peak(work: Callable[[], object]) -> float:
    """In MiB, for work that needs nothing prepared."""
    return peak_allocated(lambda: work) / MIB


class TestPeakAllocated:
    def test_freed_memory_no_longer_counts(self) -> None:
        def work() -> None:
            for mebibytes in (1, 3, 2):
                tensor(mebibytes)

        assert peak(work) == 3

    def test_tensors_that_live_at_the_same_time_add_up(self) -> None:
        def work() -> None:
            kept = [tensor(1), tensor(3)]
            del kept[1]
            kept.append(tensor(2))

        assert peak(work) == 4

    def test_a_view_takes_no_memory(self) -> None:
        assert peak(lambda: tensor(2).view(2, -1)[0]) == 2

    def test_prepared_tensors_count_while_they_live_without_their_own_peak(self) -> None:
        def prepare() -> Callable[[], object]:
            tensor(8)
            kept = [tensor(2)]

            def work() -> None:
                tensor(1)
                kept.clear()
                tensor(2)

            return work

        assert peak_allocated(prepare) == 3 * MIB

    def test_earlier_tensors_do_not_count(self) -> None:
        # So large that malloc maps memory of its own for it. At an address used before, torch's profiler takes it for a
        # tensor of an earlier measurement, and reports that one's size.
        there = [tensor(64)]

        def work() -> None:
            there.clear()
            tensor(1)

        assert peak(work) == 1

    def test_cycles_of_an_earlier_measurement_are_not_subtracted(self) -> None:
        def leave_cycle() -> None:
            cycle: list[object] = [tensor(4)]
            cycle.append(cycle)

        def collect_and_work() -> None:
            gc.collect()
            tensor(1)

        peak(leave_cycle)

        assert peak(collect_and_work) == 1

    def test_tensors_that_autograd_saves_count(self) -> None:
        def prepare() -> Callable[[], object]:
            x = torch.ones(MIB // 4, requires_grad=True)  # 1 MiB

            def work() -> None:
                x.exp().exp().exp()  # each keeps its result

            return work

        assert peak_allocated(prepare) == 4 * MIB

    def test_the_environment_stays(self) -> None:
        before = dict(os.environ)

        peak(lambda: torch.ones(2))

        assert dict(os.environ) == before

    @pytest.mark.slow
    def test_nothing_is_printed(self) -> None:
        """In a process of its own: torch's profiler reads its log level once, in whichever test is the first."""
        program = (
            "import os, torch; from ampatch.diagnostics.peak_memory import peak_allocated; "
            "before = dict(os.environ);"
            "peak_allocated(lambda: lambda: torch.ones(2)); assert dict(os.environ) == before"
        )

        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

        assert (done.stdout, done.stderr) == ("", "")


class TestPeakOfAStep:
    train, _ = digits.split(digits.load())

    def peak(self, opt_level: str, half_dtype: torch.dtype | None) -> int:
        return training.peak_memory(self.train, opt_level, half_dtype, seed=0)

    def test_a_float32_step_holds_weights_gradients_moments_and_activations(self) -> None:
        weights = 4 * sum(parameter.numel() for parameter in DigitsNetwork().parameters())
        activation = 4 * training.BATCH_SIZE * 32 * 8 * 8
        found = self.peak("O0", None)

        # Convolution, batch norm and GELU, twice: each keeps what it has computed or been given.
        assert found > 4 * weights + 6 * activation
        assert found < 4 * weights + 20 * activation

    def test_the_peak_is_the_same_every_time(self) -> None:
        assert self.peak("O1", torch.bfloat16) == self.peak("O1", torch.bfloat16)

    def test_half_activations_and_weights_take_less_and_masters_more(self) -> None:
        float32, o1, o2, o3 = (self.peak(level, torch.bfloat16) for level in ("O0", "O1", "O2", "O3"))
        assert o1 < 0.75 * float32
        assert o3 < o2 < 0.75 * float32

    def test_measuring_the_peak_changes_no_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses: list[list[float]] = []
        few = self.train[torch.arange(256)]
        for measure in (training.peak_memory, lambda *_args, **_kwargs: 0):
            monkeypatch.setattr(training, "peak_memory", measure)
            losses.append([])
            training.run(
                few, few, "O1", torch.bfloat16, epochs=1, seed=0, on_step=lambda loss, _: losses[-1].append(loss)
            )

        assert losses[0] == losses[1]

"""The peak memory in the demo's table: measured against sizes that are known."""

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
    def test_what_is_freed_no_longer_counts(self) -> None:
        def work() -> None:
            for mebibytes in (1, 3, 2):
                tensor(mebibytes)

        assert peak(work) == 3

    def test_what_lives_at_the_same_time_adds_up(self) -> None:
        def work() -> None:
            kept = [tensor(1), tensor(3)]
            del kept[1]
            kept.append(tensor(2))

        assert peak(work) == 4

    def test_a_view_takes_nothing(self) -> None:
        assert peak(lambda: tensor(2).view(2, -1)[0]) == 2

    def test_what_was_prepared_counts_while_it_lives_and_its_own_peak_does_not(self) -> None:
        def prepare() -> Callable[[], object]:
            tensor(8)
            kept = [tensor(2)]

            def work() -> None:
                tensor(1)
                kept.clear()
                tensor(2)

            return work

        assert peak_allocated(prepare) == 3 * MIB

    def test_what_was_there_before_does_not_count(self) -> None:
        # So large that malloc maps memory of its own for it. At an address used before, torch's profiler takes it for a
        # tensor of an earlier measurement, and reports that one's size.
        there = [tensor(64)]

        def work() -> None:
            there.clear()
            tensor(1)

        assert peak(work) == 1

    def test_what_an_earlier_measurement_left_in_cycles_is_not_subtracted(self) -> None:
        def leave_cycle() -> None:
            cycle: list[object] = [tensor(4)]
            cycle.append(cycle)

        def collect_and_work() -> None:
            gc.collect()
            tensor(1)

        peak(leave_cycle)

        assert peak(collect_and_work) == 1

    def test_what_autograd_keeps_for_backward_counts(self) -> None:
        def prepare() -> Callable[[], object]:
            x = torch.ones(MIB // 4, requires_grad=True)  # 1 MiB

            def work() -> None:
                x.exp().exp().exp()  # each keeps its result

            return work

        assert peak_allocated(prepare) == 4 * MIB

    def test_nothing_is_left_in_the_environment(self) -> None:
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

    def test_in_float32_it_is_at_least_weights_gradients_moments_and_the_activations_of_the_first_layers(self) -> None:
        weights = 4 * sum(parameter.numel() for parameter in DigitsNetwork().parameters())
        activation = 4 * training.BATCH_SIZE * 32 * 8 * 8
        found = self.peak("O0", None)

        # Convolution, batch norm and GELU, twice: each keeps what it has computed or been given.
        assert found > 4 * weights + 6 * activation
        assert found < 4 * weights + 20 * activation

    def test_it_is_the_same_every_time(self) -> None:
        assert self.peak("O1", torch.bfloat16) == self.peak("O1", torch.bfloat16)

    def test_activations_in_half_take_less(self) -> None:
        assert self.peak("O1", torch.bfloat16) < 0.75 * self.peak("O0", None)

    @pytest.mark.parametrize("opt_level", ["O2", "O3"])
    def test_weights_in_half_take_less_than_in_float32(self, opt_level: str) -> None:
        assert self.peak(opt_level, torch.bfloat16) < 0.75 * self.peak("O0", None)

    def test_masters_take_memory(self) -> None:
        assert self.peak("O3", torch.bfloat16) < self.peak("O2", torch.bfloat16)

    def test_measuring_it_takes_no_part_in_the_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses: list[list[float]] = []
        few = self.train[torch.arange(256)]
        for measure in (training.peak_memory, lambda *_args, **_kwargs: 0):
            monkeypatch.setattr(training, "peak_memory", measure)
            losses.append([])
            training.run(
                few, few, "O1", torch.bfloat16, epochs=1, seed=0, on_step=lambda loss, _: losses[-1].append(loss)
            )

        assert losses[0] == losses[1]

"""Batch norm over several processes is batch norm of all their batches as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_state
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from ampatch.errors import AmpWarning, OptionError, UsageError

CHANNELS = 3


def batches(count: int, *, dims: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One for each process, of different sizes."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2 + 3 * rank, CHANNELS, *[4] * dims) for rank in range(count)]
    return [(torch.randn(shape, generator=generator) * 2 + 1).to(dtype) for shape in shapes]


@torch.no_grad()
def initialised(norm: Any) -> Any:
    if norm.affine:
        norm.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
    return norm


def weighted(out: Tensor, first: int) -> Tensor:
    """A loss in which every sample counts differently."""
    return (out.float().square() * torch.arange(first + 1, first + 1 + len(out)).view(-1, *[1] * (out.dim() - 1))).sum()


def outcome(norm: Any, out: Tensor, grad: Tensor) -> dict[str, Any]:
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    return {"out": out.detach(), "grad": grad, "weight": getattr(norm.weight, "grad", None), "buffers": buffers}


def synchronised(options: dict[str, Any], dims: int, dtype: torch.dtype) -> Any:
    """This process's batch, twice, so that running statistics have a past."""
    rank, count = dist.get_rank(), dist.get_world_size()
    norm = initialised(SyncBatchNorm(CHANNELS, **options))
    batch = batches(count, dims=dims, dtype=dtype)[rank]
    if options.get("channel_last"):
        batch = batch.movedim(1, -1).contiguous()
    batch.requires_grad_()
    norm(batch.detach())
    out = norm(batch)
    weighted(out, sum(map(len, batches(count)[:rank]))).backward()
    if options.get("channel_last"):
        return outcome(norm, out.movedim(-1, 1), batch.grad.movedim(-1, 1))
    return outcome(norm, out, batch.grad)


def of_all_at_once(count: int, options: dict[str, Any], dims: int, dtype: torch.dtype) -> Any:
    relu = options.get("fuse_relu", False)
    options = {name: value for name, value in options.items() if name not in ("channel_last", "fuse_relu")}
    norm = initialised({1: nn.BatchNorm1d, 0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims](CHANNELS, **options)).double()
    whole = torch.cat(batches(count, dims=dims, dtype=dtype)).double().requires_grad_()
    norm(whole.detach())
    out = norm(whole).relu() if relu else norm(whole)
    weighted(out, 0).backward()
    return outcome(norm, out, whole.grad)


class TestStatisticsOverProcesses:
    @pytest.mark.parametrize(
        ("options", "dims"),
        [
            ({}, 2),
            ({}, 0),
            ({}, 1),
            ({"momentum": None}, 2),
            ({"affine": False}, 2),
            ({"track_running_stats": False}, 2),
            ({"channel_last": True}, 2),
            ({"channel_last": True}, 0),
            ({"fuse_relu": True}, 2),
            ({"eps": 1.0, "momentum": 0.5}, 2),
        ],
        ids=str,
    )
    def test_statistics_of_ranks_are_those_of_the_whole_batch(self, two, options, dims):
        parts = two.run(synchronised, options, dims, torch.float32)
        self.check(parts, of_all_at_once(2, options, dims, torch.float32), rtol=2e-5)

    def test_statistics_of_half_input_are_those_of_the_whole_batch(self, two):
        parts = two.run(synchronised, {}, 2, torch.float16)
        assert [part["out"].dtype for part in parts] == [torch.float16] * 2
        self.check(parts, of_all_at_once(2, {}, 2, torch.float16), rtol=4e-3)

    def check(self, parts: list[Any], whole: Any, rtol: float) -> None:
        def close(found: Tensor, expected: Tensor) -> None:
            torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=rtol * 10)

        close(torch.cat([part["out"] for part in parts]), whole["out"])
        close(torch.cat([part["grad"] for part in parts]), whole["grad"])
        if whole["weight"] is not None:
            close(sum(part["weight"] for part in parts), whole["weight"])
        for part in parts:
            assert part["buffers"].keys() == whole["buffers"].keys()
            for name, buffer in part["buffers"].items():
                # Of half input, too: it is exact, and so are its statistics.
                torch.testing.assert_close(buffer.double(), whole["buffers"][name].double(), rtol=2e-5, atol=2e-5)

    def test_gradients_are_exact_in_float64(self, two):
        two.run(checked_by_differences)

    def test_one_value_a_channel_is_an_error(self, two):
        two.run(of_one_value)

    @pytest.mark.slow
    def test_statistics_are_of_the_process_group(self, four):
        for (mine, whole), expected in zip(four.run(within_groups), [0, 0, 1, 1], strict=True):
            assert mine == pytest.approx(expected)
            assert whole == pytest.approx(0.5)

    def test_a_converted_model_trains_with_amp(self, two):
        first, second = two.run(under_amp)
        assert first == second


def checked_by_differences() -> None:
    """Every process sees all of the input, and the gradient of its own part is that of the sum of all losses."""
    rank = dist.get_rank()
    parts = [batch.double() for batch in batches(2, dims=0)]
    norm = initialised(SyncBatchNorm(CHANNELS, track_running_stats=False)).double()
    reference = initialised(nn.BatchNorm1d(CHANNELS, track_running_stats=False)).double()
    mine, whole = parts[rank].requires_grad_(), torch.cat([part.detach() for part in parts]).requires_grad_()
    norm(mine).pow(3).sum().backward()
    reference(whole).pow(3).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad.split([2, 5])[rank], rtol=1e-10, atol=1e-10)


def of_one_value() -> None:
    empty = torch.zeros(1 - dist.get_rank(), CHANNELS)
    with pytest.raises(UsageError, match="found 1 value a channel"):
        SyncBatchNorm(CHANNELS)(empty)


def within_groups() -> tuple[float, float]:
    rank = dist.get_rank()
    means = []
    for group in (create_syncbn_process_group(2), create_syncbn_process_group(4)):
        norm = SyncBatchNorm(1, momentum=1.0, process_group=group)
        norm(torch.full((2, 1), float(rank // 2)))
        means.append(float(norm.running_mean))
    return means[0], means[1]


def under_amp() -> list[float]:
    torch.manual_seed(0)
    losses = []
    for level in ("O1", "O2"):
        model = convert_syncbn_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, half_dtype=torch.float16, verbosity=0)
        model(batches(2)[dist.get_rank()]).float().square().mean().backward()
        model.zero_grad()
        assert model[1].weight.dtype is torch.float32
        losses.append(float(model[1].running_var.sum()))
        amp.deinitialize()
    return losses


class TestOneProcess:
    def test_sync_batch_norm_compiles_into_one_graph(self) -> None:
        norm = SyncBatchNorm(3).eval()
        compiled = torch.compile(norm, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(2, 3)), norm(torch.ones(2, 3)))

    @pytest.mark.parametrize("training", [True, False])
    def test_sync_batch_norm_in_one_process_is_torchs_batch_norm(self, training):
        batch = batches(2)[1]
        norm, torchs = SyncBatchNorm(CHANNELS).train(training), nn.BatchNorm2d(CHANNELS).train(training)
        assert_same_state([norm(batch), norm.running_mean], [torchs(batch), torchs.running_mean])

    def test_a_second_input_is_added_before_the_relu(self):
        batch, z = batches(2)[1], torch.full((5, CHANNELS, 4, 4), -0.5)
        expected = (nn.BatchNorm2d(CHANNELS)(batch) + z).relu()
        assert_same_state(SyncBatchNorm(CHANNELS, fuse_relu=True)(batch, z), expected)

    def test_evaluation_runs_in_one_rank_alone(self, two):
        two.run(evaluated_in_one)


def evaluated_in_one() -> None:
    if dist.get_rank() == 0:
        norm = SyncBatchNorm(CHANNELS).eval()
        torch.testing.assert_close(norm(batches(1)[0]), nn.BatchNorm2d(CHANNELS).eval()(batches(1)[0]))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.BatchNorm2d(CHANNELS)
        self.again = self.shared
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(CHANNELS, momentum=None, affine=False))
        self.instance = nn.InstanceNorm2d(CHANNELS, affine=True)
        self.nothing = None


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class TestConversion:
    def test_conversion_replaces_every_batch_norm_with_its_state(self):
        model = Residual().half()
        model.shared.eval()
        before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
        group = object()
        assert convert_syncbn_model(model, process_group=group, channel_last=True) is model
        assert type(model.shared) is SyncBatchNorm
        assert model.again is model.shared
        assert not model.shared.training
        assert model.inner[1].training
        assert (model.inner[1].momentum, model.inner[1].affine) == (None, False)
        assert model.shared.process_group is group
        assert model.shared.channel_last
        assert type(model.instance) is nn.InstanceNorm2d
        assert_same_state(model.state_dict(), state)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)

    @pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
    def test_conversion_replaces_a_batch_norm_itself_and_only_once(self, kind):
        norm = convert_syncbn_model(kind(CHANNELS))
        assert type(norm) is SyncBatchNorm
        assert convert_syncbn_model(norm) is norm

    def test_conversion_of_a_subclass_warns(self):
        with pytest.warns(AmpWarning, match="replaces a Activated, whose forward is not that of torch's"):
            convert_syncbn_model(nn.Sequential(Activated(CHANNELS)))


def grouped() -> None:
    assert create_syncbn_process_group(0) is None
    assert create_syncbn_process_group(4) is None
    with pytest.raises(OptionError, match=r"group_size is 3, and there are 4 processes.* one of 1, 2, 4, or 0"):
        create_syncbn_process_group(3)
    group = create_syncbn_process_group(2)
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(group) == [first, first + 1]


class TestGroups:
    @pytest.mark.slow
    def test_process_groups_divide_all_ranks(self, four):
        four.run(grouped)

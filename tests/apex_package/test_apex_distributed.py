"""Apex's DistributedDataParallel, Reducer and flat collectives: several processes train as one does on all batches."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh import Fresh
from helpers import assert_same_bits, assert_same_state
from optimizers import backward
from round_numbers import SCALE, data, round_weights
from torch import Tensor, nn

from ampatch import amp
from ampatch.apex.parallel import DistributedDataParallel, Reducer
from ampatch.apex.parallel.distributed import (
    extract_tensors,
    flat_dist_call,
    flatten,
    split_by_type,
    split_half_float_double,
    unflatten,
)
from ampatch.errors import AmpWarning, OptionError

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        round_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def alone(passes: int = 1) -> list[Tensor | None]:
    """The sum of what all ranks' gradients are, in one process."""
    model = Net()
    for rank in range(dist.get_world_size()):
        for batch in data("cpu", rank)[:passes]:
            model(batch).sum().backward()
    return grads_of(model)


def scaled(grads: list[Tensor | None], factor: float) -> list[Tensor | None]:
    return [None if grad is None else grad * factor for grad in grads]


def together(options: dict[str, Any], copied: bool = False) -> tuple[Any, Any]:
    """Gradients of a second step: the first one shows what torch's wrapper makes of parameters without any."""
    replica = DistributedDataParallel(Net(), **options)
    if copied:
        replica = copy.deepcopy(replica)
    for _ in range(2):
        replica.zero_grad()
        replica(data("cpu", dist.get_rank())[0]).sum().backward()
    return grads_of(replica.module), alone()


class TestDistributedDataParallel:
    @pytest.mark.parametrize(
        ("options", "factor"),
        [
            ({}, 0.5),
            ({"delay_allreduce": True}, 0.5),
            ({"message_size": 8}, 0.5),
            ({"gradient_average": False}, 1.0),
            ({"gradient_predivide_factor": 4.0}, 0.5),
            ({"gradient_average": False, "gradient_average_split_factor": 4.0}, 0.25),
            ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.25),
            ({"allreduce_always_fp32": True}, 0.5),
        ],
        ids=str,
    )
    @pytest.mark.slow
    def test_gradients_are_reduced_by_the_options(self, two, options, factor):
        for grads, total in two.run(together, options):
            assert_same_state(grads, scaled(total, factor))

    def test_a_copy_reduces_by_the_same_options(self, two):
        for grads, total in two.run(together, {"gradient_average": False}, True):
            assert_same_state(grads, total)

    def test_allreduce_always_fp32_reduces_half_gradients_in_float32(self, two):
        for by_default, in_float32 in two.run(of_half):
            assert not bool(by_default.isfinite().all())
            assert bool((in_float32 == 40000.0).all())

    def test_ranks_start_from_the_weights_of_the_first_with_own_statistics(self, two):
        first, second = two.run(of_different_starts)
        assert_same_bits(second, first)

    def test_arguments_without_effect_warn_once(self, two):
        for messages in two.run(with_ignored_arguments):
            (message,) = messages
            assert message.startswith("num_allreduce_streams, prof: without effect")

    def test_arguments_may_be_given_by_position(self, two):
        two.run(by_position)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shared_param": True}, "shared_param is no option"),
            ({"retain_allreduce_buffers": True}, r"read the gradients from p\.grad"),
            (
                {"delay_allreduce": True, "allreduce_trigger_params": [torch.zeros(1)]},
                "together with delay_allreduce=T",
            ),
            ({"gradient_predivide_factor": 0}, "gradient_predivide_factor is 0; expected a number above 0"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_options_that_cannot_be_had_are_refused(self, options, message):
        with pytest.raises(OptionError, match=message):
            DistributedDataParallel(Net(), **options)


def of_half() -> tuple[Tensor, Tensor]:
    """Each gradient is finite in half, and their sum is not."""
    grads = []
    for in_float32 in (False, True):
        # Not averaged on the way, since torch's default divides before it sums up.
        replica = DistributedDataParallel(
            nn.Linear(4, 1, bias=False).half(),
            allreduce_always_fp32=in_float32,
            gradient_predivide_factor=0.5,
        )
        replica(torch.full((1, 4), 40000.0, dtype=torch.half)).sum().backward()
        grads.append(replica.module.weight.grad)
    return grads[0], grads[1]


def of_different_starts() -> Tensor:
    torch.manual_seed(dist.get_rank())
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    by_itself = copy.deepcopy(replica.module)
    for batch in data("cpu", dist.get_rank()):
        replica(batch).sum().backward()
        by_itself(batch)
    assert_same_bits(replica.module[1].running_mean, by_itself[1].running_mean)
    return replica.module[0].weight.detach()


def with_ignored_arguments() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(Net(), num_allreduce_streams=2, prof=True)
    assert all(warning.filename == __file__ for warning in caught if warning.category is AmpWarning)
    return [str(warning.message) for warning in caught if warning.category is AmpWarning]


def by_position() -> None:
    arguments = (1000, True, None, None, False, True, 1, None, False, 2.0, None, False)
    replica = DistributedDataParallel(Net(), *arguments)
    assert isinstance(replica, nn.parallel.DistributedDataParallel)
    replica(data("cpu", dist.get_rank())[0]).sum().backward()
    assert_same_state(grads_of(replica.module), scaled(alone(), 0.5))


def accumulated(how: str) -> tuple[Any, Any]:
    replica = DistributedDataParallel(Net())
    first, second, _ = data("cpu", dist.get_rank())
    if how == "no_sync":
        with replica.no_sync():
            replica(first).sum().backward()
    else:
        replica.disable_allreduce()
        replica(first).sum().backward()
        replica.enable_allreduce()
    by_itself = Net()
    by_itself(first).sum().backward()
    assert_same_state(grads_of(replica.module), grads_of(by_itself))
    replica(second).sum().backward()
    return grads_of(replica.module), scaled(alone(passes=2), 0.5)


def trained(level: str, passes: int = 1) -> Any:
    """Three steps with amp, of which the second overflows in one process."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, half_dtype=torch.float16, **SCALE)
    replica = DistributedDataParallel(model)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        for number, batch in enumerate(data("cpu", dist.get_rank())[:passes]):
            with replica.no_sync() if number < passes - 1 else contextlib.nullcontext():
                loss = replica(batch).float().sum() * (float("inf") if step == 1 == dist.get_rank() else 1)
                backward(loss, optimizer)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, amp.get_loss_scale(), [p.detach() for p in amp.master_params(optimizer)]


class TestWithAmp:
    @pytest.mark.slow
    @LEVELS
    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.covering(1)
    def test_all_ranks_skip_the_same_steps(self, two, level, passes):
        first, second = two.run(trained, level, passes)
        assert first[:2] == ([False, True, False], 2.0**9)
        assert_same_state(second, first)

    @pytest.mark.parametrize("how", ["no_sync", "disable_allreduce"])
    def test_postponed_gradients_are_reduced_with_later_ones(self, two, how):
        for grads, expected in two.run(accumulated, how):
            assert_same_state(grads, expected)


def reduced_by_hand() -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 2)
    reducer = Reducer(model)
    weights = model.weight.detach().clone()
    model(data("cpu", dist.get_rank())[0]).sum().backward()
    own = model.weight.grad.clone()
    reducer.reduce()
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    assert_same_bits(model.weight.grad, (both[0] + both[1]) / 2)

    listed = Reducer([own, [model.bias.grad]])
    listed.reduce()
    assert_same_bits(own, model.weight.grad)
    return weights


def reduced_in_a_block(level: str) -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=torch.float16, **SCALE)
    reducer = Reducer(model)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(data("cpu", dist.get_rank())[0]).float().sum()
        with amp.scale_loss(loss * (float("inf") if step == 1 == dist.get_rank() else 1), optimizer) as scaled_loss:
            scaled_loss.backward()
            reducer.reduce()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped, [p.detach() for p in amp.master_params(optimizer)], model.state_dict()


class TestReducer:
    def test_reducer_averages_gradients_and_starts_from_the_firsts_weights(self, two):
        first, second = two.run(reduced_by_hand)
        assert_same_bits(second, first)

    @pytest.mark.slow
    @LEVELS
    def test_reducer_inside_a_block_has_all_ranks_skip_together(self, two, level):
        first, second = two.run(reduced_in_a_block, level)
        assert first[0] == [False, True, False]
        assert_same_state(second, first)


def called() -> Any:
    rank = dist.get_rank()
    tensors = [torch.full((2, 3), 1.0 + rank), torch.full((3,), 2.0 + rank).half(), torch.full((1,), 3.0 + rank)]
    flat_dist_call(tensors, dist.all_reduce)
    averaged = [tensor.clone() for tensor in tensors]
    tensors[0] += rank
    flat_dist_call(tensors, dist.broadcast, (1,))
    return averaged, tensors


def sent_as_data(level: str) -> Any:
    """As BERT's pretraining did, after `initialize`."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=torch.float16, **SCALE)
    flat_dist_call([parameter.data for parameter in model.parameters()], dist.broadcast, (0,))
    backward(model(data("cpu", 0)[0]).float().sum(), optimizer)
    optimizer.step()
    return [p.detach() for p in model.parameters()]


class TestFlatCollectives:
    def test_flat_collectives_average_or_send_tensors_of_several_types(self, two):
        for averaged, sent in two.run(called):
            assert_same_state(averaged, [torch.full((2, 3), 1.5), torch.full((3,), 2.5).half(), torch.full((1,), 3.5)])
            assert_same_state(sent, [torch.full((2, 3), 2.5), torch.full((3,), 2.5).half(), torch.full((1,), 3.5)])

    @LEVELS
    def test_flat_collectives_send_weights_by_their_data(self, two, level):
        first, second = two.run(sent_as_data, level)
        # The first one's masters keep digits that half weights do not have.
        torch.testing.assert_close(second, first, atol=0, rtol=2e-3 if level == "O2" else 0)

    def test_tensors_are_split_by_type(self):
        half, single, double, another = torch.ones(1).half(), torch.ones(2), torch.ones(3).double(), torch.ones(4)
        tensors = [single, half, another, double]
        assert list(split_by_type(tensors).values()) == [[single, another], [half], [double]]
        assert split_half_float_double(tensors) == [[half], [single, another], [double]]

    def test_tensors_are_found_in_nested_lists(self):
        found: list[Tensor] = []
        one, other = torch.ones(1), torch.ones(2)
        extract_tensors([one, ("text", 3, [other])], found)
        assert [id(each) for each in found] == [id(one), id(other)]

    def test_flattened_tensors_of_a_bucket_come_back(self):
        tensors = [torch.arange(6.0).view(2, 3), torch.arange(2.0)]
        assert_same_state(list(unflatten(flatten(tensors), tensors)), tensors)


@pytest.mark.slow
def test_the_launcher_says_what_to_type_instead(fresh: Fresh) -> None:
    code = "runpy.run_module('ampatch.apex.parallel.multiproc', run_name='__main__', alter_sys=True)"
    outcome = fresh.run(code, "train.py", "--name", "a b")
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert "torchrun --nproc-per-node" in line
    assert line.endswith("-m ampatch run train.py --name 'a b'")

"""`DistributedDataParallel`: several processes train as one does on the whole batch, and skip steps together."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_state
from optimizers import backward
from round_numbers import MICRO_BATCHES, SCALE, data, round_weights
from small_nets import EACH_DEVICE, EACH_HALF, EACH_LEVEL
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp


class Exact(nn.Module):
    def __init__(self, with_unused: bool = True) -> None:
        super().__init__()
        self.with_unused = with_unused
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        round_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x).relu())
        return self.unused(out) if self.with_unused else out


def trained(
    level: str, half: torch.dtype = torch.float16, model: nn.Module | None = None, lr: float = 0.5, **options: Any
) -> tuple[Any, Any]:
    """Has amp train a model, an `Exact` where none is given.

    Returns:
        The model and its optimizer.
    """
    model = Exact() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **{**SCALE, **options})
    return model, optimizer


def replicated(*args: Any, **options: Any) -> tuple[Any, Any]:
    """What `trained` returns, the model wrapped."""
    model, optimizer = trained(*args, **options)
    return DistributedDataParallel(model), optimizer


def own_data(device: str = "cpu") -> list[Tensor]:
    """The micro-batches of this process."""
    return data(device, dist.get_rank())


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a step reads or writes."""
    return {
        "grads": grads(optimizer),
        "masters": masters(optimizer),
        "weights": on_cpu(model.parameters()),
        "scale": amp.get_loss_scale(),
    }


def grads(optimizer: Any) -> list[Tensor | None]:
    return on_cpu(p.grad for p in amp.master_params(optimizer))


def masters(optimizer: Any) -> list[Tensor | None]:
    return on_cpu(amp.master_params(optimizer))


def on_cpu(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Copies, which stay as they are."""
    return [None if tensor is None else tensor.detach().to("cpu", copy=True) for tensor in tensors]


def after_step(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The `state` after one step more, with the gradients from before it."""
    before = grads(optimizer)
    optimizer.step()
    return {**state(model, optimizer), "grads": before}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    # A sum and not a mean, which would be one of its ranks: three micro-batches are no power of two.
    return model(batch).float().sum()


def alone(level: str, half: torch.dtype, device: str, with_unused: bool) -> dict[str, Any]:
    """One process on the whole batch: all micro-batches of all ranks."""
    model, optimizer = trained(level, half, Exact(with_unused).to(device))
    batches = [batch for rank in range(dist.get_world_size()) for batch in data(device, rank)]
    backward(loss_of(model, torch.cat(batches)) / dist.get_world_size(), optimizer)
    after = after_step(model, optimizer)
    amp.deinitialize()
    return after


def together(
    level: str, half: torch.dtype, device: str, postpone: str = "", hook: Any = None, **options: Any
) -> dict[str, Any]:
    """Each process on its micro-batches, one after the other."""
    exact = Exact(with_unused=not options.get("find_unused_parameters"))
    model, optimizer = trained(level, half, exact.to(device))
    replica = DistributedDataParallel(model, **options)
    if hook is not None:
        replica.register_comm_hook(None, hook)
    for number, batch in enumerate(own_data(device)):
        is_last = number == MICRO_BATCHES - 1
        if postpone == "attribute":
            replica.require_backward_grad_sync = is_last
        without = replica.no_sync if postpone.startswith("no_sync") and not is_last else contextlib.nullcontext
        with without():
            loss = loss_of(replica, batch)
            if postpone != "no_sync around the forward":
                backward(loss, optimizer)
        if postpone == "no_sync around the forward":
            backward(loss, optimizer)
    return after_step(model, optimizer)


def both(*args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return alone(*args, not options.get("find_unused_parameters")), together(*args, **options)


def the_same(workers: Workers, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, asserting that it is the same in every process."""
    first, *others = workers.run(function, *args)
    for other in others:
        assert_same_state(other, first)
    return first


def through_float16(_, bucket):  # torch looks at annotations, and knows no strings
    return default_hooks.fp16_compress_hook(None, bucket)


def through_bfloat16(_, bucket):
    """Under a name of its own, as torch lets its hook be registered with NCCL only."""
    return default_hooks.bf16_compress_hook(None, bucket)


# Options of `together`.
WRAPPED: dict[str, dict[str, Any]] = {
    "each pass reduces": {},
    "each pass reduces bucket views": {"gradient_as_bucket_view": True},
    "no_sync": {"postpone": "no_sync"},
    "no_sync, bucket views": {"postpone": "no_sync", "gradient_as_bucket_view": True},
    "no_sync around the forward": {"postpone": "no_sync around the forward"},
    "attribute, bucket views": {"postpone": "attribute", "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, no_sync": {"postpone": "no_sync", "find_unused_parameters": True},
    "reduced in float16": {"postpone": "no_sync", "hook": through_float16},
    "reduced in bfloat16": {"postpone": "no_sync", "hook": through_bfloat16},
}


@EACH_DEVICE
@EACH_HALF
@EACH_LEVEL
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.covering(1)
def test_two_ranks_step_to_the_bits_of_one_process(two, level, half, device, how):
    for one, several in two.run(functools.partial(both, **WRAPPED[how]), level, half, device):
        assert_same_state(several, one)
        assert any(bool(grad.any()) for grad in several["grads"] if grad is not None)


def classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


STEPS, OVERFLOWS = 50, {3: 0, 20: 1, 21: 1}  # by step, the rank in which it happens


def fifty_steps(level: str, half: torch.dtype, device: str, accumulate: bool, fused: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each starts from weights of its own, as without a seed
    model = classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, **SCALE, scale_window=10)
    replica = DistributedDataParallel(model)
    skipped, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True) if accumulate else (True,):
            with contextlib.nullcontext() if last else replica.no_sync():
                x, target = torch.randn(16, 8, device=device), torch.randint(3, (16,), device=device)
                loss = nn.functional.cross_entropy(replica(x), target)
                if OVERFLOWS.get(step) == rank and last != accumulate:
                    loss = loss * float("inf")
                backward(loss, optimizer)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        scales.append(amp.get_loss_scale())
    return {
        "skipped": skipped,
        "scales": scales,
        "masters": masters(optimizer),
        "weights": on_cpu(model.parameters()),
        "moments": [s["exp_avg"].cpu() for s in optimizer.state.values()],
    }


@EACH_DEVICE
@EACH_HALF
@EACH_LEVEL
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("accumulate", "fused"), [(False, False), (True, False), (False, True)])
@pytest.mark.covering(1)
def test_two_ranks_skip_the_same_steps_and_stay_equal(two, level, half, device, accumulate, fused):
    found = the_same(two, fifty_steps, level, half, device, accumulate, fused)
    assert [step for step, was_skipped in enumerate(found["skipped"]) if was_skipped] == list(OVERFLOWS)
    assert len(set(found["scales"])) > 2


def from_other_weights(level: str, device: str, init_sync: bool) -> list[Tensor | None]:
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(level, model=classifier().to(device))
    DistributedDataParallel(model, init_sync=init_sync)
    return on_cpu([*amp.master_params(optimizer), *model.state_dict().values()])


def types_beside_the_optimizer(frozen: bool) -> list[torch.dtype]:
    model = classifier()
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    wrapper = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        backward(wrapper(torch.randn(4, 8)).float().sum(), optimizer)
        optimizer.step()
    return [parameter.dtype for parameter in model[0].parameters()]


@pytest.mark.parametrize("frozen", [True, False])
def test_wrapping_leaves_weights_half_that_no_optimizer_updates(two: Workers, frozen: bool) -> None:
    assert set(the_same(two, types_beside_the_optimizer, frozen)) == {torch.bfloat16}


@EACH_DEVICE
class TestWrapping:
    @EACH_LEVEL
    def test_wrapping_sends_every_bit_of_the_weights_of_rank_0(self, two, level, device):
        found = the_same(two, from_other_weights, level, device, True)
        assert any(bool((tensor != tensor.half()).any()) for tensor in found if tensor.is_floating_point())

    @EACH_LEVEL
    def test_init_sync_false_leaves_the_weights(self, two, level, device):
        first, second = two.run(from_other_weights, level, device, False)
        assert not torch.equal(first[0], second[0])


def only_postponed(*args: Any, **options: Any) -> tuple[Any, Any]:
    """What `replicated` returns, after a pass under no_sync."""
    replica, optimizer = replicated(*args, **options)
    with replica.no_sync():
        backward(loss_of(replica, own_data()[0]), optimizer)
    return replica, optimizer


def refused_at_the_step(level: str) -> None:
    _replica, optimizer = only_postponed(level)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        amp.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(amp.UsageError, match="under no_sync"):
        optimizer.step()


def stepped(level: str, what: str) -> dict[str, Any]:
    """The state before a step, where something was done to the gradients of a pass under no_sync."""
    replica, optimizer = only_postponed(level)
    if what == "reduced by hand":
        for parameter in replica.parameters():
            dist.all_reduce(parameter.grad)
        amp.clip_grad_norm_(optimizer, float("inf"))
    elif what == "raised afterwards":
        with contextlib.suppress(KeyError), amp.scale_loss(torch.zeros(()), optimizer):
            raise KeyError
    elif what == "cleared":
        optimizer.zero_grad()
    before = state(replica, optimizer)
    optimizer.step()
    return before


def without_scale() -> None:
    """In bfloat16 at O1 there is nothing to unscale: gradients are the user's to reduce or not."""
    _replica, optimizer = only_postponed("O1", torch.bfloat16, loss_scale=None)
    optimizer.step()


class TestNoSync:
    @EACH_LEVEL
    def test_a_step_after_a_pass_under_no_sync_raises(self, two, level):
        two.run(refused_at_the_step, level)

    @EACH_LEVEL
    def test_gradients_reduced_by_hand_are_unscaled_and_stepped_with(self, two, level):
        found = the_same(two, stepped, level, "reduced by hand")
        assert float(found["grads"][0].abs().max()) <= 16  # it would be at the scale else

    @EACH_LEVEL
    @pytest.mark.parametrize("what", ["raised afterwards", "cleared"])
    @pytest.mark.covering(1)
    def test_a_pass_under_no_sync_is_forgotten_with_its_gradients(self, two, level, what):
        for before in two.run(stepped, level, what):
            assert before["grads"] == [None] * 6
            assert before["scale"] == SCALE["init_scale"]

    def test_a_step_after_a_pass_under_no_sync_without_a_scale_is_allowed(self, two):
        two.run(without_scale)


def accumulated_in_half(level: str) -> list[Tensor | None]:
    """The gradients of two passes of a model that is half already, without masters."""
    replica, optimizer = replicated(level, model=Exact().half())
    first, second, _ = (batch.half() for batch in own_data())
    with replica.no_sync():
        backward(loss_of(replica, first), optimizer)
    backward(loss_of(replica, second), optimizer)
    return grads(optimizer)


def refused_in_half(level: str) -> None:
    """As `accumulated_in_half`, but each pass reduces."""
    replica, optimizer = replicated(level, model=Exact().half())
    first, second, _ = (batch.half() for batch in own_data())
    backward(loss_of(replica, first), optimizer)
    before = state(replica, optimizer)
    with pytest.raises(amp.UsageError, match=r"Put all passes before the last one of a step under no_sync\(\)"):
        backward(loss_of(replica, second), optimizer)
    assert_same_state(state(replica, optimizer), before)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O3"])
class TestHalfWeightsWithoutMasters:
    def test_half_gradients_accumulate_under_no_sync(self, two, level):
        found = the_same(two, accumulated_in_half, level)
        one = Exact()
        batches = [batch for rank in range(2) for batch in data("cpu", rank)[:2]]
        (one(torch.cat(batches)).sum() / 2).backward()
        assert_same_state([grad.float() for grad in found], [p.grad for p in one.parameters()])

    def test_half_gradients_accumulated_without_no_sync_raise(self, two, level):
        two.run(refused_in_half, level)


def compiled_accumulation(half: torch.dtype) -> list[Tensor | None]:
    replica, optimizer = replicated("O1", half)
    compiled = torch.compile(replica, backend="aot_eager")
    for number, batch in enumerate(own_data()):
        with replica.no_sync() if number < MICRO_BATCHES - 1 else contextlib.nullcontext():
            backward(loss_of(compiled, batch), optimizer)
    return grads(optimizer)


def clipped(level: str, device: str) -> tuple[float, float]:
    replica, optimizer = replicated(level, model=Exact().to(device))
    with amp.scale_loss(loss_of(replica, own_data(device)[0]), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    norm = float(amp.clip_grad_norm_(optimizer, 0.5))
    clipped_to = torch.cat([p.grad.flatten() for p in amp.master_params(optimizer)]).norm()
    return norm, float(clipped_to)


class TestCompiledAndClipped:
    @EACH_HALF
    @pytest.mark.slow
    @pytest.mark.either_way
    def test_compiled_replicas_accumulate_to_the_bits_of_one_process(self, two, half):
        for (one, _), several in zip(
            two.run(both, "O1", half, "cpu"), two.run(compiled_accumulation, half), strict=True
        ):
            assert_same_state(several, one["grads"])

    @EACH_DEVICE
    @EACH_LEVEL
    def test_reduced_gradients_are_clipped(self, two, level, device):
        norm, clipped_to = the_same(two, clipped, level, device)
        assert norm > 1
        assert clipped_to == pytest.approx(0.5, rel=1e-3)


def of_an_older_wrapper(how: str) -> Any:
    """Steps of which the second overflows in one process, in a pass that is not reduced."""
    model = Exact()
    replica = DistributedDataParallel(model)
    if how == "set up again":
        amp.initialize(model, opt_level="O1", **SCALE)
        replica = DistributedDataParallel(model)
        amp.deinitialize()
    if how == "copied":
        replica = copy.deepcopy(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.5)
    amp.initialize(replica.module, optimizer, opt_level="O1", half_dtype=torch.float16, **SCALE)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        first, second, _ = own_data()
        with replica.no_sync():
            loss = loss_of(replica, first)
            backward(loss * float("inf") if step == 1 == dist.get_rank() else loss, optimizer)
        backward(loss_of(replica, second), optimizer)
        optimizer.step()
        scales.append(amp.get_loss_scale())
    return scales, list(replica.module.state_dict().values())


def converted_inside() -> None:
    replica = DistributedDataParallel(Exact())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.5)
    with pytest.raises(amp.OptionError, match="is in a DistributedDataParallel already, which would no longer reduce"):
        amp.initialize(replica.module, optimizer, opt_level="O2")
    assert replica.module.first.weight.dtype is torch.float32


def converted_back(level: str) -> list[str]:
    model = Exact()
    amp.initialize(model, opt_level=level, **SCALE)
    replica = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.deinitialize()
    assert replica.module is model
    return [str(warning.message) for warning in caught]


def loaded_in_the_first(level: str) -> Any:
    model, optimizer = trained(level)
    if dist.get_rank() == 0:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 7}})
        with torch.no_grad():
            model.first.weight.add_(1)
    DistributedDataParallel(model)
    return amp.state_dict(), masters(optimizer)


def joined(level: str) -> None:
    replica, _ = replicated(level)
    with (
        pytest.raises(amp.UsageError, match=r"under DistributedDataParallel.join\(\) .* would go apart"),
        replica.join(),
    ):
        replica(own_data()[0])


class TestOlderWrappers:
    @pytest.mark.parametrize("how", ["made before", "set up again", "copied"])
    def test_older_wrappers_accumulate_under_no_sync(self, two, how):
        scales, _ = the_same(two, of_an_older_wrapper, how)
        assert scales == [2.0**10, 2.0**9, 2.0**9]

    def test_converting_a_model_inside_a_wrapper_raises(self, two):
        two.run(converted_inside)

    @pytest.mark.parametrize(("level", "count"), [("O1", 0), ("O2", 1)])
    def test_deinitialize_warns_of_wrappers_around_converted_weights(self, two, level, count):
        for messages in two.run(converted_back, level):
            assert [message for message in messages if "Wrap the model anew" in message] == messages
            assert len(messages) == count

    @EACH_LEVEL
    def test_wrapping_sends_the_scale_of_rank_0(self, two, level):
        saved, _ = the_same(two, loaded_in_the_first, level)
        assert saved == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 7}}

    @EACH_LEVEL
    def test_join_raises(self, two, level):
        two.run(joined, level)


def with_a_scale_that_moves(level: str, half: torch.dtype) -> Any:
    """Two models of one loss scale, which moves in the middle of the first one's accumulation."""
    models = [Exact(), Exact()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    amp.initialize(models, optimizers, opt_level=level, half_dtype=half, **SCALE)
    one, other = map(DistributedDataParallel, models)
    batches = own_data()
    with one.no_sync():
        backward(loss_of(one, batches[0]), optimizers[0])
    backward(loss_of(other, batches[0]) * float("inf"), optimizers[1])
    optimizers[1].step()
    assert amp.get_loss_scale() == 2.0**9
    for batch, postponing in zip(batches[1:], (one.no_sync, contextlib.nullcontext), strict=True):
        with postponing():
            backward(loss_of(one, batch), optimizers[0])
    return grads(optimizers[0]), amp.get_loss_scale()


def set_down_inside(level: str) -> Any:
    replica, optimizer = replicated(level)
    with replica.no_sync(), amp.scale_loss(loss_of(replica, own_data()[0]), optimizer) as scaled_loss:
        scaled_loss.backward()
        amp.deinitialize()
    return max(float(p.grad.abs().max()) for p in replica.parameters())


class TestAccumulation:
    @pytest.mark.slow
    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_an_accumulation_stays_at_its_scale(self, two, level, half):
        for (one, _), (several, scale) in zip(
            two.run(both, level, half, "cpu"), two.run(with_a_scale_that_moves, level, half), strict=True
        ):
            assert_same_state(several, one["grads"])
            assert scale == 2.0**9

    @EACH_LEVEL
    def test_deinitialize_unscales_accumulated_gradients(self, two, level):
        assert all(largest <= 16 for largest in two.run(set_down_inside, level))  # it would be at the scale else


def reduced_by_hand(half: torch.dtype, how: str) -> list[Tensor | None]:
    """A step of processes that no wrapper knows of."""
    model, optimizer = trained("O2", half)
    for batch in own_data():
        backward(loss_of(model, batch), optimizer)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if how == "all_reduce":  # counts no writes
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
        elif how == "averaged":
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad.data.div_(dist.get_world_size())
        else:
            dist.broadcast(parameter.grad, 1)
    optimizer.step()
    return masters(optimizer)


class TestReducedByHand:
    @pytest.mark.slow
    @EACH_HALF
    @pytest.mark.parametrize("how", ["all_reduce", "averaged", "broadcast"])
    @pytest.mark.covering(1)
    def test_gradients_reduced_by_hand_after_the_block_count_at_o2(self, two, half, how):
        found = the_same(two, reduced_by_hand, half, how)
        if how == "averaged":
            ((one, _), _) = two.run(both, "O2", half, "cpu")
            torch.testing.assert_close(found, one["masters"], rtol=1e-2, atol=1e-2)


def broadcast_weights(level: str, half: torch.dtype, how: str) -> Any:
    """What a layer computes, once weights of the second process were sent to all in some way."""
    torch.manual_seed(dist.get_rank())
    model, optimizer = trained(level, half, nn.Linear(4, 3), lr=0.25)
    batch = torch.ones(2, 4)
    seen = [model(batch).float().detach()]
    for parameter in amp.master_params(optimizer) if how == "masters" else model.parameters():
        dist.broadcast(parameter.data if how == "data" else parameter, 1)
    seen.append(model(batch).float().detach())
    backward(model(batch).float().sum(), optimizer)
    optimizer.step()
    seen.append(model(batch).float().detach())
    return [seen, masters(optimizer)]


class TestWeightsSentByHand:
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.parametrize("how", ["parameter", "data", "masters"])
    @pytest.mark.covering(1)
    def test_weights_sent_by_hand_count_for_the_next_forward_pass_and_step(self, two, level, half, how):
        (first, first_masters), (second, second_masters) = two.run(broadcast_weights, level, half, how)
        assert not torch.equal(first[0], second[0])
        for found, wanted in zip(first[1:], second[1:], strict=True):
            assert torch.equal(found, wanted)
        assert not torch.equal(first[1], first[0])
        assert not torch.equal(first[2], first[1])
        rounding = torch.finfo(half).eps
        for found, wanted in zip(first_masters, second_masters, strict=True):
            torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


class NotesTypes(nn.Module):
    """Notes the types of the sums that it computes, forward and when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def summed(self, x: Tensor) -> Tensor:
        found = torch.cumsum(x, 0)
        self.seen.append(found.dtype)
        return self.linear(found.float()).square().float()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.summed, x, use_reentrant=False)


def types_in_parts() -> list[list[torch.dtype]]:
    lists = {"modules": {"1": {"whitelist": ["cumsum"]}, "2": "float32"}}
    model = nn.Sequential(NotesTypes(), NotesTypes(), NotesTypes())
    amp.initialize(model, half_dtype=torch.bfloat16, cast_lists=lists, verbosity=0)
    replica = DistributedDataParallel(model)
    replica(torch.ones(2, 4)).sum().backward()
    return [each.seen for each in replica.module]


def test_parts_of_replicas_compute_by_rules_of_their_own(two: Workers) -> None:
    full, half = [torch.float32] * 2, [torch.bfloat16] * 2
    assert the_same(two, types_in_parts) == [full, half, full]


def with_power_sgd(level: str) -> Any:
    """Which steps were skipped where rank 1 overflows in the fifth, and PowerSGD's memory is cleared then."""
    replica, optimizer = replicated(level, lr=2.0**-6)
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    memory = powerSGD_hook.PowerSGDState(None, **options)
    replica.register_comm_hook(memory, powerSGD_hook.powerSGD_hook)
    skipped = []
    for step in range(8):
        optimizer.zero_grad()
        factor = float("inf") if step == 4 and dist.get_rank() == 1 else 1.0
        backward(loss_of(replica, own_data()[step % MICRO_BATCHES]) * factor, optimizer)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        if skipped[-1]:
            for each in (memory.error_dict, memory.p_memory_dict, memory.q_memory_dict):
                each.clear()
    return skipped, masters(optimizer)


@EACH_LEVEL
def test_power_sgd_goes_on_after_an_overflow_with_its_memory_cleared(two: Workers, level: str) -> None:
    skipped, _ = the_same(two, with_power_sgd, level)
    assert skipped == [step == 4 for step in range(8)]


def averaged_by_hand(level: str) -> Any:
    """Masters and outputs of ranks that train apart, and average the masters."""
    model, optimizer = trained(level, lr=2.0**-4)
    for batch in own_data():
        optimizer.zero_grad()
        backward(loss_of(model, batch), optimizer)
        optimizer.step()
        average_parameters(iter(list(amp.master_params(optimizer))), dist.group.WORLD)
    return masters(optimizer), model(data("cpu", 0)[0]).float().detach()


@EACH_LEVEL
def test_masters_that_are_averaged_by_hand_are_the_same_on_all_ranks(two: Workers, level: str) -> None:
    the_same(two, averaged_by_hand, level)

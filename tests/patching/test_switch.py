"""Of turning casts off: where, for whom, for how long; and of checkpoints, which recompute as they ran."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from helpers import HALF_DTYPES, casts_on, dtype_name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ampatch import amp
from ampatch.errors import OptionError
from ampatch.ledger import PatchLedger
from ampatch.runtime import runtime
from ampatch.switch import Switch


def product_dtype() -> torch.dtype:
    """The type that a whitelisted function of a weight computes in here and now."""
    with torch.enable_grad():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype


def in_thread(function: Callable[[], object]) -> object:
    """What a function returns in a thread of its own."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class TestDisableCasts:
    @pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
    def test_turns_casts_off_until_the_block_ends(self, half):
        with casts_on(half):
            with amp.disable_casts():
                assert product_dtype() is torch.float32
            assert product_dtype() is half

    def test_turns_off_operators_registrations_and_decorated_functions_too(self):
        @amp.half_function
        def decorated(value: Tensor) -> torch.dtype:
            return value.dtype

        with casts_on():
            assert decorated(torch.ones(1)) is torch.bfloat16
            with amp.disable_casts():
                assert decorated(torch.ones(1)) is torch.float32
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

    def test_nests(self):
        with casts_on(), amp.disable_casts():
            with amp.disable_casts():
                assert product_dtype() is torch.float32
            assert product_dtype() is torch.float32

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
    def test_ends_with_the_last_of_regions_that_overlap(self, order):
        def region() -> Iterator[None]:
            with amp.disable_casts():
                yield

        with casts_on():
            regions = [region() for _ in range(3)]
            for each in regions:
                next(each)
            for number in order:
                assert product_dtype() is torch.float32
                regions[number].close()
            assert product_dtype() is torch.bfloat16
        with casts_on():
            assert product_dtype() is torch.bfloat16

    def test_ends_with_the_last_of_tasks_that_overlap(self):
        async def without_casts(wait: int) -> None:
            with amp.disable_casts():
                for _ in range(wait):
                    await asyncio.sleep(0)
                    assert product_dtype() is torch.float32

        async def both() -> None:
            await asyncio.gather(without_casts(2), without_casts(4))

        with casts_on():
            asyncio.run(both())
            assert product_dtype() is torch.bfloat16

    def test_a_step_within_regions_that_overlap_leaves_them_as_they_are(self):
        def region() -> Iterator[None]:
            with amp.disable_casts():
                yield

        with casts_on():
            switch = runtime.live.switch
            first, second = region(), region()
            next(first)
            with switch.suspended():
                next(second)
                first.close()
            assert product_dtype() is torch.float32
            second.close()
            assert product_dtype() is torch.bfloat16

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_restores_where_the_block_raises(self, error):
        def fail() -> None:
            with amp.disable_casts():
                raise error

        with casts_on():
            with pytest.raises(error):
                fail()
            assert product_dtype() is torch.bfloat16

    def test_is_a_decorator_that_can_be_called_again_and_recursively(self):
        @amp.disable_casts()
        def disabled(depth: int) -> list[torch.dtype]:
            return [product_dtype(), *(disabled(depth - 1) if depth else [])]

        with casts_on():
            assert disabled(2) == disabled(2) == [torch.float32] * 3
            assert product_dtype() is torch.bfloat16

    def test_decorator_made_before_amp_was_set_up_holds(self):
        @amp.disable_casts()
        def disabled() -> torch.dtype:
            return product_dtype()

        with casts_on():
            assert disabled() is torch.float32

    def test_is_inert_without_amp(self):
        with amp.disable_casts():
            assert product_dtype() is torch.float32

    def test_holds_for_amp_that_is_set_up_inside(self):
        with amp.disable_casts(), casts_on():
            assert product_dtype() is torch.float32
        with casts_on():
            assert product_dtype() is torch.bfloat16

    def test_what_it_returns_can_be_entered_again_and_within_itself(self):
        off = amp.disable_casts()
        with casts_on():
            for _ in range(2):
                with off:
                    with off:
                        assert product_dtype() is torch.float32
                    assert product_dtype() is torch.float32
                assert product_dtype() is torch.bfloat16
        assert repr(off) == "amp.disable_casts()"

    def test_is_a_decorator_without_parentheses_too(self):
        @amp.disable_casts
        def disabled(start: int) -> list[torch.dtype]:
            return [product_dtype()] * start

        with casts_on():
            assert disabled(2) == [torch.float32] * 2

    @pytest.mark.parametrize("decorate", [amp.disable_casts, amp.disable_casts()], ids=["bare", "called"])
    def test_has_every_step_of_a_generator_run_without_casts_and_nothing_else(self, decorate):
        seen: list[object] = []

        @decorate
        def steps(first: object) -> Iterator[torch.dtype]:
            """Some."""
            try:
                seen.append((yield product_dtype()))
                yield product_dtype()
            except LookupError:
                yield product_dtype()
            finally:
                seen.append(product_dtype())
            return first

        with casts_on():
            run = steps("result")
            assert next(run) is torch.float32
            assert product_dtype() is torch.bfloat16
            assert run.send("sent") is torch.float32
            assert product_dtype() is torch.bfloat16
            assert run.throw(LookupError()) is torch.float32
            with pytest.raises(StopIteration, match="result"):
                next(run)
            assert seen == ["sent", torch.float32]
            closed = steps("")
            next(closed)
            closed.close()
            assert seen == ["sent", torch.float32, torch.float32]
            assert product_dtype() is torch.bfloat16
        assert steps.__doc__ == "Some."

    def test_has_a_coroutine_run_without_casts_and_those_beside_it_with(self):
        @amp.disable_casts
        async def disabled() -> list[torch.dtype]:
            found = [product_dtype()]
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(product_dtype())
            return found

        async def beside() -> list[torch.dtype]:
            found = []
            for _ in range(3):
                found.append(product_dtype())
                await asyncio.sleep(0)
            return found

        async def both() -> list[list[torch.dtype]]:
            return await asyncio.gather(disabled(), beside())

        with casts_on():
            assert asyncio.run(both()) == [[torch.float32] * 4, [torch.bfloat16] * 3]

    def test_of_a_class_or_an_asynchronous_generator_is_an_error(self):
        async def steps() -> AsyncIterator[None]:
            yield

        for what, message in ((nn.Linear, "got the class Linear"), (steps, r"got <function .*steps"), (3, "got 3")):
            with pytest.raises(OptionError, match=message + ".*, and decorates functions, generators and coroutines"):
                amp.disable_casts()(what)

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_a_function_that_it_decorates_can_be_compiled(self, fullgraph):
        @amp.disable_casts
        def product() -> Tensor:
            return torch.ones(2, 2) @ torch.ones(2, 2)

        with casts_on():
            compiled = torch.compile(
                lambda: (product(), torch.ones(2, 2) @ torch.ones(2, 2)), fullgraph=fullgraph, backend="eager"
            )
            assert [each.dtype for each in compiled()] == [torch.float32, torch.bfloat16]

    def test_what_was_made_outside_of_compiled_code_holds_inside(self):
        off = amp.disable_casts()

        def products() -> tuple[Tensor, Tensor]:
            with off:
                first = torch.ones(2, 2) @ torch.ones(2, 2)
            return first, torch.ones(2, 2) @ torch.ones(2, 2)

        with casts_on():
            compiled = torch.compile(products, backend="eager")
            for _ in range(2):
                assert [each.dtype for each in compiled()] == [torch.float32, torch.bfloat16]

    def test_survives_amp_being_set_down_inside(self):
        amp.initialize(nn.Module(), verbosity=0)
        with amp.disable_casts():
            amp.deinitialize()
        with casts_on():
            assert product_dtype() is torch.bfloat16

    def test_leaves_nothing_behind_in_torch(self):
        with casts_on():
            with amp.disable_casts():
                assert not torch._C._is_any_autocast_enabled()
                assert torch._C._len_torch_function_stack() == 0
            assert not any(map(torch.is_autocast_enabled, torch._C._autocast_supported_devices()))

    def test_turns_off_autocast_of_the_user_as_well(self):
        with casts_on(torch.float16), torch.autocast("cpu", torch.bfloat16):
            with amp.disable_casts():
                assert product_dtype() is torch.float32
            assert product_dtype() is torch.bfloat16


class TestThreads:
    def test_off_in_one_does_not_reach_another(self):
        with casts_on(), amp.disable_casts():
            assert in_thread(product_dtype) is torch.bfloat16
            assert product_dtype() is torch.float32

    def test_off_in_another_does_not_reach_this_one(self):
        entered, leave = threading.Event(), threading.Event()

        def stay() -> None:
            with amp.disable_casts():
                entered.set()
                leave.wait(60)

        with casts_on():
            thread = threading.Thread(target=stay)
            thread.start()
            entered.wait(60)
            assert product_dtype() is torch.bfloat16
            leave.set()
            thread.join()

    def test_backward_in_another_sees_casts_on(self):
        seen = []

        class Spy(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: Tensor) -> Tensor:
                return value * 1

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                seen.append(product_dtype())
                return grad

        value = torch.ones(2, requires_grad=True)
        with casts_on(), amp.disable_casts():
            loss = Spy.apply(value).sum()
            in_thread(loss.backward)
        assert seen == [torch.bfloat16]


class Block(nn.Module):
    """Notes the type that each of its forwards computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, value: Tensor) -> Tensor:
        out = self.linear(value)
        self.seen.append(out.dtype)
        return torch.tanh(out)


KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@KINDS
class TestCheckpoints:
    def gradients(self, run: Callable[[Tensor], Tensor], block: Block, back: Callable[[Tensor], None]) -> list[Tensor]:
        value = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        loss = run(value).float().pow(2).sum()
        back(loss)
        grads = [value.grad, *(parameter.grad for parameter in block.parameters())]
        block.zero_grad()
        return grads

    def test_give_the_gradients_of_the_model_without_them(self, use_reentrant):
        block = Block()
        with casts_on():
            plain = self.gradients(block, block, Tensor.backward)
            run = functools.partial(checkpoint, block, use_reentrant=use_reentrant)
            checked = self.gradients(run, block, Tensor.backward)
        assert block.seen == [torch.bfloat16] * 3
        for actual, expected in zip(checked, plain, strict=True):
            assert torch.equal(actual, expected)

    def test_recompute_without_casts_what_ran_without(self, use_reentrant):
        block = Block()

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                return checkpoint(block, value, use_reentrant=use_reentrant)

        plain = self.gradients(block, block, Tensor.backward)
        block.seen.clear()
        with casts_on():
            checked = self.gradients(run, block, Tensor.backward)
            assert product_dtype() is torch.bfloat16
        assert block.seen == [torch.float32, torch.float32]
        for actual, expected in zip(checked, plain, strict=True):
            assert torch.equal(actual, expected)

    def test_recompute_with_casts_what_ran_with(self, use_reentrant):
        block = Block()
        with casts_on():
            run = functools.partial(checkpoint, block, use_reentrant=use_reentrant)
            self.gradients(run, block, amp.disable_casts()(Tensor.backward))
        assert block.seen == [torch.bfloat16, torch.bfloat16]

    def test_remember_when_another_thread_recomputes(self, use_reentrant):
        block = Block()

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                return checkpoint(block, value, use_reentrant=use_reentrant)

        with casts_on():
            self.gradients(run, block, lambda loss: in_thread(loss.backward))
        assert block.seen == [torch.float32, torch.float32]

    def test_remember_within_checkpoints(self, use_reentrant):
        inner, outer = Block(), Block()

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                value = checkpoint(inner, value, use_reentrant=use_reentrant)
            return outer(value)

        with casts_on():
            nested = functools.partial(checkpoint, run, use_reentrant=use_reentrant)
            self.gradients(nested, inner, Tensor.backward)
        assert set(inner.seen) == {torch.float32}
        assert set(outer.seen) == {torch.bfloat16}
        assert inner.linear.weight.grad is None  # gradients() has read and cleared them
        assert outer.linear.weight.grad is not None

    def test_made_by_a_partial_before_amp_was_set_up_remember_too(self, use_reentrant):
        block = Block()
        bound_before = functools.partial(checkpoint, use_reentrant=use_reentrant)

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                return bound_before(block, value)

        with casts_on():
            self.gradients(run, block, Tensor.backward)
        assert block.seen == [torch.float32, torch.float32]

    def test_in_sequence_remember_too(self, use_reentrant):
        blocks = nn.Sequential(Block(), Block(), Block())

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                return checkpoint_sequential(blocks, 3, value, use_reentrant=use_reentrant)

        with casts_on():
            self.gradients(run, blocks[0], Tensor.backward)
        assert {dtype for block in blocks for dtype in block.seen} == {torch.float32}
        assert [len(block.seen) for block in blocks] == [2, 2, 1]

    def test_that_outlive_amp_recompute_without_casts(self, use_reentrant):
        block = Block()
        with casts_on(), amp.disable_casts():
            value = torch.ones(3, 8, requires_grad=True)
            loss = checkpoint(block, value, use_reentrant=use_reentrant).sum()
        loss.backward()
        assert block.seen == [torch.float32, torch.float32]


class TestSwitch:
    def test_takes_back_one_disabling_for_a_closure(self):
        switch = Switch()
        with switch.disabled():
            with switch.resumed():
                assert not switch.is_off()
            with switch.disabled(), switch.resumed():
                assert switch.is_off()
            assert switch.is_off()
        assert not switch.is_off()

    def test_resumed_restores_where_the_block_raises(self):
        switch = Switch()
        with switch.disabled():
            with pytest.raises(ValueError, match="in the closure"), switch.resumed():
                raise ValueError("in the closure")
            assert switch.is_off()

    def test_stays_off_for_a_session_that_begins_inside(self):
        first, second = Switch(), Switch()
        with first.disabled():
            assert second.is_off()
        assert not second.is_off()

    def test_is_taken_out_of_checkpoints_again(self):
        frame = torch.utils.checkpoint._CheckpointFrame
        before = frame.__init__
        ledger = PatchLedger()
        Switch().patch_checkpoint(ledger, lambda: None)
        assert frame.__init__ is not before
        assert ledger.undo() == []
        assert frame.__init__ is before
        assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


class TestOptimizerSteps:
    @pytest.mark.parametrize("closure", [True, False], ids=["closure", "no-closure"])
    def test_run_without_casts_and_their_closures_with(self, closure):
        seen: dict[str, torch.dtype] = {}

        class Spy(torch.optim.SGD):
            def step(self, closure: Callable[[], Tensor] | None = None) -> None:
                seen["step"] = product_dtype()
                if closure is not None:
                    closure()
                    seen["after the closure"] = product_dtype()

        model = nn.Linear(2, 2)
        model, optimizer = amp.initialize(model, Spy(model.parameters(), lr=0.1), verbosity=0)
        optimizer.step(lambda: seen.update(closure=product_dtype()) if closure else None)
        expected = {"step": torch.float32, "after the closure": torch.float32}
        assert seen == (expected | {"closure": torch.bfloat16} if closure else expected)
        assert product_dtype() is torch.bfloat16

"""`amp.disable_casts`: where casts are off, in which thread and until when; checkpoints recompute as they ran."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from helpers import casts_on, heard, in_thread
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import OptionError
from ampatch.runtime import runtime


def product_dtype() -> torch.dtype:
    """The type that a whitelisted function of a weight computes in here and now."""
    with torch.enable_grad():
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype


def region() -> Iterator[None]:
    """A region without casts, between the first step of a generator and its end."""
    with amp.disable_casts():
        yield


class TestDisableCasts:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
    def test_overlapping_regions_end_with_the_last_one(self, order):
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

    def test_a_step_within_overlapping_regions_leaves_them_as_they_are(self):
        with casts_on():
            first, second = region(), region()
            next(first)
            with runtime.live.switch.suspended():
                next(second)
                first.close()
            assert product_dtype() is torch.float32
            second.close()
            assert product_dtype() is torch.bfloat16

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_casts_are_on_again_after_a_block_that_raised(self, error):
        def fail() -> None:
            with amp.disable_casts():
                raise error

        with casts_on():
            with pytest.raises(error):
                fail()
            assert product_dtype() is torch.bfloat16

    @pytest.mark.parametrize("decorate", [amp.disable_casts, amp.disable_casts()], ids=["bare", "called"])
    def test_a_decorated_function_can_be_called_again_and_recursively(self, decorate):
        @decorate
        def disabled(depth: int) -> list[torch.dtype]:
            return [product_dtype(), *(disabled(depth - 1) if depth else [])]

        with casts_on():
            assert disabled(2) == disabled(2) == [torch.float32] * 3
            assert product_dtype() is torch.bfloat16

    def test_a_region_around_a_session_holds_for_it(self):
        with amp.disable_casts():
            assert product_dtype() is torch.float32  # without amp, too
            with casts_on():
                assert product_dtype() is torch.float32
        with casts_on():
            assert product_dtype() is torch.bfloat16

    def test_a_region_object_can_be_entered_again_and_within_itself(self):
        off = amp.disable_casts()
        with casts_on():
            for _ in range(2):
                with off:
                    with off:
                        assert product_dtype() is torch.float32
                    assert product_dtype() is torch.float32
                assert product_dtype() is torch.bfloat16
        assert repr(off) == "amp.disable_casts()"

    @pytest.mark.parametrize("decorate", [amp.disable_casts, amp.disable_casts()], ids=["bare", "called"])
    def test_every_step_of_a_decorated_generator_runs_without_casts(self, decorate):
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

    def test_a_decorated_coroutine_runs_without_casts_beside_others_with_them(self):
        async def beside() -> list[torch.dtype]:
            found = []
            for _ in range(3):
                found.append(product_dtype())
                await asyncio.sleep(0)
            return found

        async def both() -> list[list[torch.dtype]]:
            return await asyncio.gather(amp.disable_casts(beside)(), beside())

        with casts_on():
            assert asyncio.run(both()) == [[torch.float32] * 3, [torch.bfloat16] * 3]

    def test_decorating_a_class_or_an_asynchronous_generator_is_an_error(self):
        async def steps() -> AsyncIterator[None]:
            yield

        for what, message in ((nn.Linear, "got the class Linear"), (steps, r"got <function .*steps"), (3, "got 3")):
            with pytest.raises(OptionError, match=message + ".*, and decorates functions, generators and coroutines"):
                amp.disable_casts()(what)

    def test_a_region_object_made_outside_of_compiled_code_works_inside(self):
        off = amp.disable_casts()

        def products() -> tuple[Tensor, Tensor]:
            with off:
                first = torch.ones(2, 2) @ torch.ones(2, 2)
            return first, torch.ones(2, 2) @ torch.ones(2, 2)

        with casts_on():
            compiled = torch.compile(products, backend="eager")
            for _ in range(2):
                assert [each.dtype for each in compiled()] == [torch.float32, torch.bfloat16]

    def test_the_region_turns_on_no_mode_of_torch(self):
        with casts_on():
            with amp.disable_casts():
                assert not torch._C._is_any_autocast_enabled()
                assert torch._C._len_torch_function_stack() == 0
            assert not any(map(torch.is_autocast_enabled, torch._C._autocast_supported_devices()))


class TestThreads:
    def test_casts_that_are_off_in_one_thread_are_on_in_another(self):
        with casts_on(), amp.disable_casts():
            assert in_thread(product_dtype) is torch.bfloat16
            assert product_dtype() is torch.float32

    def test_a_backward_pass_in_another_thread_casts(self):
        seen = []
        value = torch.ones(2, requires_grad=True)
        with casts_on(), amp.disable_casts():
            loss = heard(value, lambda _: seen.append(product_dtype())).sum()
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

    def test_what_ran_without_casts_is_recomputed_without_in_another_thread(self, use_reentrant):
        block = Block()

        def run(value: Tensor) -> Tensor:
            with amp.disable_casts():
                return checkpoint(block, value, use_reentrant=use_reentrant)

        plain = self.gradients(block, block, Tensor.backward)
        block.seen.clear()
        with casts_on():
            checked = self.gradients(run, block, lambda loss: in_thread(loss.backward))
            assert product_dtype() is torch.bfloat16
        assert block.seen == [torch.float32, torch.float32]
        for actual, expected in zip(checked, plain, strict=True):
            assert torch.equal(actual, expected)

    def test_what_ran_with_casts_is_recomputed_with_them(self, use_reentrant):
        block = Block()
        with casts_on():
            run = functools.partial(checkpoint, block, use_reentrant=use_reentrant)
            self.gradients(run, block, amp.disable_casts()(Tensor.backward))
        assert block.seen == [torch.bfloat16, torch.bfloat16]

    def test_checkpoints_that_outlive_the_session_are_recomputed_without_casts(self, use_reentrant):
        block = Block()
        with casts_on(), amp.disable_casts():
            value = torch.ones(3, 8, requires_grad=True)
            loss = checkpoint(block, value, use_reentrant=use_reentrant).sum()
        loss.backward()
        assert block.seen == [torch.float32, torch.float32]

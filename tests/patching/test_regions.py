"""Regions of torch.autocast: inside them amp does what they say, and an adopted model's forward is one."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import Calls, casts_on, together
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from ampatch import amp
from ampatch.switch import is_in_half, is_in_region

SETTINGS = [("O1", torch.float16), ("O1", torch.bfloat16), ("O4", torch.bfloat16)]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.* is deprecated:FutureWarning")

FREQUENCIES = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)
POSITIONS = torch.arange(4096)[None].float()  # in half, those beyond 2,048 are rounded


def angles() -> Tensor:
    return (FREQUENCIES[None, :, None] @ POSITIONS[:, None, :]).cos()


def by_context() -> Tensor:
    with torch.autocast(device_type="cpu", enabled=False):
        return angles()


@torch.autocast(device_type="cpu", enabled=False)
def by_decorator() -> Tensor:
    return angles()


def by_name_of_the_device() -> Tensor:
    with torch.cpu.amp.autocast(enabled=False):
        return angles()


def by_state() -> Tensor:
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        return angles()
    finally:
        torch.set_autocast_enabled("cpu", before)


def if_asked() -> Tensor:
    """As transformers 5 opens its guards: only if torch says that autocast is on."""
    return by_context() if torch.is_autocast_enabled("cpu") else angles()


def by_disable_casts() -> Tensor:
    with amp.disable_casts():
        return angles()


@amp.float_function
def by_float_function() -> Tensor:
    return angles()


GUARDS = {
    function.__name__: function
    for function in (
        by_context,
        by_decorator,
        by_name_of_the_device,
        by_state,
        if_asked,
        by_disable_casts,
        by_float_function,
    )
}


class Guarded(nn.Module):
    def __init__(self, guard: Callable[[], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.guard, self.checkpointed = guard, checkpointed
        self.layer = nn.Linear(4, 4)

    def part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, hidden = self.guard(), self.layer(x)
        return hidden @ hidden.t(), found

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.checkpointed:
            result: tuple[Tensor, Tensor] = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
            return result
        return self.part(x)


def adopted(model: nn.Module, **options: Any) -> Any:
    return amp.initialize(model, verbosity=0, **options)


def check_guarded(run: Callable[[Tensor], tuple[Tensor, Tensor]], half: torch.dtype) -> None:
    product, found = run(torch.randn(3, 4))
    assert product.dtype is half
    assert torch.equal(found, angles_in_float32())


def angles_in_float32() -> Tensor:
    with amp.disable_casts():
        return angles()


@pytest.fixture(autouse=True)
def _leaves_no_region() -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("maia")
    assert torch.get_autocast_dtype("cpu") is before
    assert torch.is_autocast_cache_enabled()


class TestGuards:
    @pytest.mark.parametrize(("level", "half"), SETTINGS)
    @pytest.mark.parametrize("guard", GUARDS)
    def test_every_form_of_a_guard_computes_in_float32(self, guard: str, level: str, half: torch.dtype) -> None:
        check_guarded(adopted(Guarded(GUARDS[guard]), opt_level=level, half_dtype=half), half)

    def test_without_a_guard_positions_are_noise(self) -> None:
        _, found = adopted(Guarded(angles), half_dtype=torch.bfloat16)(torch.randn(3, 4))
        assert (found.float() - angles_in_float32()).abs().max() > 1

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("guard", [by_context, by_decorator, if_asked, by_disable_casts, by_float_function])
    @pytest.mark.slow
    def test_guards_work_in_compiled_code(self, guard: Callable[[], Tensor], backend: str) -> None:
        model = adopted(Guarded(guard), half_dtype=torch.bfloat16)
        check_guarded(torch.compile(model, backend=backend, fullgraph=True), torch.bfloat16)

    @pytest.mark.parametrize("guard", GUARDS)
    def test_guards_work_when_a_checkpoint_recomputes(self, guard: str) -> None:
        seen = []

        def noted() -> Tensor:
            seen.append(GUARDS[guard]())
            return seen[-1]

        product, _ = adopted(Guarded(noted, checkpointed=True), half_dtype=torch.bfloat16)(torch.randn(3, 4))
        product.sum().backward()
        assert len(seen) == 2
        assert all(torch.equal(each, angles_in_float32()) for each in seen)

    def test_two_threads_may_share_the_object_of_a_guard(self) -> None:
        inside, outside = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)
        region, found = torch.autocast("cpu", enabled=False), []

        def forward(x: Tensor, first: bool) -> None:
            for barrier in (inside, outside):
                if first:
                    with region:
                        barrier.wait()
                        found.append((x @ x).dtype is torch.float32)
                        barrier.wait()
                else:
                    barrier.wait()
                    found.append((x @ x).dtype is torch.float16)
                    with region:
                        barrier.wait()
                found.append((x @ x).dtype is torch.float16)

        model = adopted(Calls(forward), half_dtype=torch.float16)
        together(functools.partial(model, torch.ones(2, 2), first) for first in (True, False))
        assert found == [True] * 8

    def test_guards_work_outside_of_a_model(self) -> None:
        with casts_on():
            assert torch.equal(by_context(), angles_in_float32())

    def test_guards_leave_half_tensors_half(self) -> None:
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        with casts_on(), torch.autocast("cpu", enabled=False):
            assert x.softmax(-1).dtype is torch.bfloat16


class TestRegions:
    def test_a_region_of_another_half_type_casts_to_it(self, half: torch.dtype) -> None:
        other = torch.bfloat16 if half is torch.float16 else torch.float16
        seen = []

        def forward(x: Tensor) -> Tensor:
            seen.append((x @ x).dtype)
            with torch.autocast("cpu", dtype=other):
                seen.append((x @ x).dtype)
                with torch.autocast("cpu", enabled=False):
                    seen.append((x @ x).dtype)
                seen.append((x @ x).dtype)
            return x

        adopted(Calls(forward), half_dtype=half)(torch.ones(2, 2))
        assert seen == [half, other, torch.float32, other]

    @pytest.mark.parametrize("settings", [{"enabled": False}, {"dtype": torch.bfloat16}], ids=str)
    def test_a_region_around_a_model_holds_for_it(self, settings: dict[str, Any]) -> None:
        model = adopted(nn.Linear(2, 2), half_dtype=torch.float16)
        with torch.autocast("cpu", **settings):
            assert model(torch.ones(2, 2)).dtype is settings.get("dtype", torch.float32)
        assert model(torch.ones(2, 2)).dtype is torch.float16

    def test_autocast_turned_on_without_a_region_holds_for_a_model(self) -> None:
        model = adopted(nn.Linear(2, 2), half_dtype=torch.float16)
        torch.set_autocast_enabled("cpu", True)
        try:
            assert model(torch.ones(2, 2)).dtype is torch.bfloat16
        finally:
            torch.set_autocast_enabled("cpu", False)

    def test_a_region_that_raises_ends(self) -> None:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                raise KeyError(x @ x)

        with pytest.raises(KeyError):
            adopted(Calls(forward), half_dtype=torch.float16)(torch.ones(2, 2))

    def test_one_object_may_be_entered_again(self) -> None:
        region = torch.autocast("cpu", dtype=torch.bfloat16)
        x = torch.ones(2, 2)
        with casts_on(torch.float16):
            for _ in range(2):
                with region:
                    assert (x @ x).dtype is torch.bfloat16
                assert (x @ x).dtype is torch.float16

    def test_regions_may_end_in_any_order(self) -> None:
        model = adopted(nn.Linear(2, 2), half_dtype=torch.float16)
        block, without = torch.autocast("cpu", enabled=False), amp.disable_casts()
        block.__enter__()
        without.__enter__()
        block.__exit__(None, None, None)
        assert model(torch.ones(2, 2)).dtype is torch.float32
        without.__exit__(None, None, None)
        assert model(torch.ones(2, 2)).dtype is torch.float16

    @pytest.mark.parametrize("settings", [{"enabled": False}, {"dtype": torch.bfloat16}], ids=str)
    def test_a_session_that_ends_in_a_region_leaves_nothing_to_the_next(self, settings: dict[str, Any]) -> None:
        model = adopted(nn.Linear(2, 2), half_dtype=torch.float16)
        with torch.autocast("cpu", **settings), amp.disable_casts():
            amp.deinitialize()
        assert adopted(model, half_dtype=torch.float16)(torch.ones(2, 2)).dtype is torch.float16

    def test_a_session_may_end_in_a_forward_or_a_region(self) -> None:
        def forward(x: Tensor) -> Tensor:
            amp.deinitialize()
            return x @ x

        model = adopted(Calls(forward), half_dtype=torch.float16)
        assert model(torch.ones(2, 2)).dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            adopted(nn.Linear(2, 2), half_dtype=torch.float16)
            amp.deinitialize()

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_generator_that_outlives_its_session_goes_on_without_casts(self, level: str) -> None:
        def forward(x: Tensor) -> Iterator[tuple[torch.dtype, bool]]:
            for _ in range(2):
                yield (x @ x).dtype, is_in_region() or is_in_half()

        model = adopted(Calls(forward), opt_level=level, half_dtype=torch.float16)
        steps = model(torch.ones(2, 2))
        assert next(steps)[1]
        amp.deinitialize()
        assert next(steps) == (torch.float32, False)


class TestStateOfAutocast:
    def test_torch_says_that_autocast_is_on_within_a_forward_only(self, half: torch.dtype) -> None:
        def asked(*_: Tensor) -> tuple[bool, torch.dtype]:
            return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        before = asked()
        model = adopted(Calls(asked), half_dtype=half)
        assert model(torch.ones(1)) == (True, half)
        assert asked() == before == (False, torch.bfloat16)

    def test_torch_says_that_autocast_is_off_at_o2(self) -> None:
        model = adopted(Calls(lambda _: torch.is_autocast_enabled("cpu")), opt_level="O2", half_dtype=torch.float16)
        assert model(torch.ones(1)) is False


def custom(**options: Any) -> Any:
    """A function of autograd that is written for autocast, and notes the type of a float32 product in each pass."""

    class Function(torch.autograd.Function):
        seen: list[torch.dtype]

        @staticmethod
        @custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Function.seen = [(x.float() @ x.float()).dtype]
            return x @ x

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Function.seen.append((grad.float() @ grad.float()).dtype)
            return grad

    return Function


class TestCodeWrittenForAutocast:
    def test_custom_functions_that_ask_for_float32_compute_in_it(self) -> None:
        x = torch.full((100, 100), 64.0, requires_grad=True)  # a product of 409,600 is beyond float16
        exact = custom(cast_inputs=torch.float32)
        found = adopted(Calls(exact.apply), half_dtype=torch.float16)(x)
        assert found.dtype is torch.float32
        assert found.max() == 64 * 64 * 100
        found.sum().backward()
        assert exact.seen == [torch.float32] * 2

    @pytest.mark.parametrize("checkpointed", [False, True])
    @pytest.mark.parametrize(
        ("region", "seen"),
        [
            (lambda: torch.autocast("cpu", dtype=torch.float16), torch.float16),
            (lambda: torch.autocast("cpu", enabled=False), torch.float32),
            (amp.disable_casts, torch.float32),
        ],
    )
    def test_custom_functions_run_their_backward_pass_in_the_region_of_the_forward(
        self, region: Callable[[], Any], seen: torch.dtype, checkpointed: bool
    ) -> None:
        def part(x: Tensor) -> Tensor:
            with region():
                return following.apply(x)  # type: ignore[no-any-return]

        def forward(x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)

        following, x = custom(), torch.ones(2, 2, requires_grad=True)
        adopted(Calls(forward), half_dtype=torch.float16)(x).sum().backward()
        assert following.seen == [seen, seen]

    def test_custom_operators_follow_their_rules_for_autocast(self) -> None:
        @torch.library.custom_op("ampatch_test::scaled", mutates_args=())
        def scaled(x: Tensor) -> Tensor:
            return x * 2

        scaled.register_fake(torch.empty_like)
        scaled.register_autocast("cpu", torch.float32)
        model = adopted(Calls(lambda x: scaled(x @ x)), half_dtype=torch.float16)
        assert model(torch.ones(2, 2)).dtype is torch.float32
        assert torch.compile(model, backend="aot_eager")(torch.ones(2, 2)).dtype is torch.float32


class TestListsOfAutocast:
    """They have no say where amp's say something else, or nothing."""

    def type_of(self, function: Callable[[Tensor], Tensor], **options: Any) -> torch.dtype:
        model = adopted(Calls(function), half_dtype=torch.float16, **options)
        x = torch.ones(1, 2, 4, 4)
        kinds = {model(x).dtype, torch.compile(model, backend="aot_eager", fullgraph=True)(x).dtype}
        amp.deinitialize()
        assert len(kinds) == 1
        return kinds.pop()

    def test_functions_on_no_list_of_amp_are_not_cast_by_autocast(self) -> None:
        assert self.type_of(lambda x: F.pad(x.half(), (1, 1))) is torch.float16
        assert self.type_of(lambda x: F.max_pool3d(x.half(), 1)) is torch.float16
        unlisted = {"unlisted": {"torch": ["mm"], "torch.Tensor": ["softmax"], "torch.nn.functional": ["softmax"]}}
        assert self.type_of(lambda x: torch.mm(x[0, 0], x[0, 1]), cast_lists=unlisted) is torch.float32
        assert self.type_of(lambda x: x.half().softmax(-1), cast_lists=unlisted) is torch.float16

    def test_functions_that_a_user_moved_follow_the_users_list(self) -> None:
        black = {"blacklist": {"torch": ["mm"]}}
        assert self.type_of(lambda x: torch.mm(x[0, 0].half(), x[0, 1]), cast_lists=black) is torch.float32
        white = {"whitelist": {"torch": ["exp"], "torch.Tensor": ["prod"]}}
        assert self.type_of(lambda x: torch.exp(x), cast_lists=white) is torch.float16  # noqa: PLW0108 - patched later
        assert self.type_of(lambda x: x.prod(-1), cast_lists=white) is torch.float16

    def test_functions_that_a_float32_function_calls_are_not_cast(self) -> None:
        x = torch.randn(4, 4, dtype=torch.float64).float()
        expected = torch.linalg.pinv(x)
        model = adopted(Calls(torch.linalg.pinv), half_dtype=torch.bfloat16)
        assert torch.equal(model(x), expected)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, expected)


class TestFloatFunctions:
    def test_functions_called_by_a_float_function_compute_in_float32(self) -> None:
        seen = []

        @amp.float_function
        def energy(x: Tensor) -> Tensor:
            seen.append((x @ x).dtype)
            return F.linear(x, x)

        model = adopted(Calls(lambda x: energy(x @ x)), half_dtype=torch.float16)
        assert model(torch.ones(2, 2)).dtype is torch.float32
        assert energy(torch.ones(2, 2)).dtype is torch.float32
        assert seen == [torch.float32] * 2

    def test_float_functions_may_be_generators_and_coroutines(self) -> None:
        @amp.float_function
        def steps(x: Tensor) -> Iterator[Tensor]:
            yield x @ x
            yield x @ x

        @amp.float_function
        async def awaited(x: Tensor) -> Tensor:
            return x @ x

        def run(coroutine: Any) -> Any:
            with pytest.raises(StopIteration) as ended:
                coroutine.send(None)
            return ended.value.value

        model = adopted(Calls(lambda x: [x @ x, *steps(x), run(awaited(x)), x @ x]), half_dtype=torch.float16)
        half, full = torch.float16, torch.float32
        assert [each.dtype for each in model(torch.ones(2, 2))] == [half, full, full, full, half]

    def test_functions_called_by_a_registered_float_function_compute_in_float32(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library: Any = types.ModuleType("library")
        library.energy = lambda x: x @ x
        monkeypatch.setitem(sys.modules, "library", library)
        amp.register_float_function(library, "energy")
        model = adopted(Calls(lambda x: library.energy(x)), half_dtype=torch.float16)  # noqa: PLW0108 - looked up in the session
        assert model(torch.ones(2, 2)).dtype is torch.float32
        amp.deinitialize()

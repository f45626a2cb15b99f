"""Whatever users do to gradients counts as it does in plain torch, by whatever means, at whatever moment.

Gradients and weights here are small integers and halves of them, which every type holds: what is compared is exact.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, dtype_name
from torch import Tensor, nn

from ampatch import amp
from ampatch.amp import AmpWarning

OVERFLOW = 2.0**126
START = [8.0, -8.0, 16.0, 4.0]

Parameters = Iterable[nn.Parameter]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(START))
        self.second = nn.Parameter(torch.tensor(START).flip(0).view(2, 2))

    def forward(self, factor: float) -> Tensor:
        slopes = torch.tensor([1.0, -2.0, 3.0, 4.0])
        total = (self.first.float() * slopes).sum() + (self.second.float().flatten() * slopes.flip(0)).sum()
        return total * factor


def zeroed_rows(parameters: Parameters) -> None:
    next(iter(parameters)).grad.data[:2] = 0.0


def replaced(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def by_storage(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.grad.untyped_storage().fill_(0)


def by_numpy(parameters: Parameters) -> None:
    for parameter in parameters:
        grad = parameter.grad
        words = grad.view(torch.int16 if grad.element_size() == 2 else torch.int32).numpy()
        words.reshape(-1)[0] = 0


def by_dlpack(parameters: Parameters) -> None:
    for parameter in parameters:
        torch.from_dlpack(parameter.grad.detach()).mul_(2)


def each(change: Callable[[Tensor], object]) -> Callable[[Parameters], None]:
    def change_all(parameters: Parameters) -> None:
        for parameter in parameters:
            change(parameter.grad)

    return change_all


def as_new(change: Callable[[Tensor], Tensor | None]) -> Callable[[Parameters], None]:
    def change_all(parameters: Parameters) -> None:
        for parameter in parameters:
            parameter.grad = change(parameter.grad)

    return change_all


MEANS: dict[str, Callable[[Parameters], object]] = {
    "data.clamp_": each(lambda grad: grad.data.clamp_(-2, 2)),
    "data.div_": each(lambda grad: grad.data.div_(2)),
    "data.zero_": each(lambda grad: grad.data.zero_()),
    "data.neg_": each(lambda grad: grad.data.neg_()),
    "data.copy_ of a permutation": each(lambda grad: grad.data.copy_(grad.flip(0))),
    "rows": zeroed_rows,
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "storage": by_storage,
    "mul_": each(lambda grad: grad.mul_(0.5)),
    "another": replaced,
    "another from it": as_new(lambda grad: grad * 2),
    "none": as_new(lambda _: None),
    "_foreach_mul_": lambda parameters: torch._foreach_mul_([each.grad for each in parameters], 2.0),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.5),
    "a backward outside of a block": lambda parameters: sum(
        parameter.float().sum() for parameter in parameters
    ).backward(),
}

every_half = pytest.mark.parametrize("half_dtype", HALF_DTYPES, ids=dtype_name)


def every_level(test: Any) -> Any:
    """Level and half type are two settings, so that `covering` need not have each means meet all of their pairs."""
    return every_half(pytest.mark.parametrize("opt_level", ["O1", "O2"])(test))


@contextlib.contextmanager
def plain_block(loss: Tensor, *_: object, **__: object) -> Iterator[Tensor]:
    yield loss


class Run:
    """A model and its optimizer, to take the same steps in plain torch and with amp.

    Args:
        opt_level: None: plain torch, for which all but the optimizer and the model is ignored.
        half_dtype: of amp.
        optimizer: makes one, or a list of them.
        model: makes one.
        options: of `amp.initialize`.
    """

    def __init__(
        self,
        opt_level: str | None,
        half_dtype: torch.dtype = torch.float16,
        optimizer: Callable[..., Any] = torch.optim.SGD,
        model: Callable[[], Any] = Weights,
        **options: Any,
    ) -> None:
        self.model = model()
        self.optimizer = optimizer(self.model.parameters(), lr=0.5)
        self.block: Any = plain_block
        if opt_level is not None:
            options = {"loss_scale": "dynamic", "init_scale": 8.0, "verbosity": 0, **options}
            amp.initialize(self.model, self.optimizer, opt_level=opt_level, half_dtype=half_dtype, **options)
            self.block = amp.scale_loss

    def backward(
        self, factor: float = 1.0, within: Callable[[Parameters], object] | None = None, **options: Any
    ) -> None:
        with self.block(self.model(factor), self.optimizer, **options) as loss:
            if within is not None:
                within(list(self.model.parameters()))
            loss.backward()

    @property
    def masters(self) -> list[Tensor]:
        return list(amp.master_params(self.optimizer))

    @property
    def weights(self) -> list[float]:
        return [value for each in self.model.state_dict().values() for value in each.float().flatten().tolist()]


def alike(opt_level: str, half_dtype: torch.dtype, script: Callable[[Run], object], **options: Any) -> Run:
    """Asserts that a script returns what it returns in plain torch, and leaves the same weights.

    Returns:
        The run with amp.
    """
    wanted, found = (Run(level, half_dtype, **options) for level in (None, opt_level))
    returned = script(wanted)
    assert script(found) == returned
    assert found.weights == wanted.weights
    return found


def one_each(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Makes optimizers of one parameter each."""
    return lambda parameters, lr: [optimizer([parameter], lr=lr) for parameter in parameters]


@every_level
@pytest.mark.parametrize("change", MEANS.values(), ids=MEANS)
@pytest.mark.covering(1)
class TestByEveryMeans:
    def test_before_the_step(self, change, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            change(list(run.model.parameters()))
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_before_another_block(self, change, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            change(list(run.model.parameters()))
            run.backward(2.0)
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_in_a_block_before_its_backward(self, change, opt_level, half_dtype):
        by_value = ("another", "a backward outside of a block", "data.clamp_", "clip_grad_value_")
        if opt_level == "O1" and change in (MEANS[name] for name in by_value):
            pytest.skip("without masters gradients are at the scale inside a block")

        def script(run: Run) -> None:
            run.backward()
            run.backward(2.0, within=change)
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_and_then_the_masters(self, change, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            change(list(run.model.parameters()))
            for master in run.masters:
                if master.grad is not None:
                    master.grad.data.mul_(2)
            run.optimizer.step()

        alike(opt_level, half_dtype, script)


class Twins(Weights):
    """Two weights of one shape, so that one tensor can be the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.tensor(START).flip(0))


@every_half
@pytest.mark.parametrize("choice", ["extension", "torch"])
@pytest.mark.parametrize(
    "share",
    [lambda grad: grad, Tensor.detach, lambda grad: grad.view(2, 2).view(4)],
    ids=["itself", "detached", "viewed"],
)
@pytest.mark.covering(1)
def test_two_weights_with_one_gradient_get_it_unscaled_once(share, choice, half_dtype, select, request):
    if choice == "extension":
        request.getfixturevalue("compiled")
    select(choice)

    def script(run: Run) -> None:
        for factor in (1.0, 2.0):
            with run.block(run.model(factor), run.optimizer) as loss:
                loss.backward()
                run.model.second.grad = share(run.model.first.grad)
            run.optimizer.step()
            run.optimizer.zero_grad()

    alike("O2", half_dtype, script, model=Twins)


@every_level
@pytest.mark.covering(1)
class TestOfMasters:
    """What `amp.master_params` gives, and lists of it that somebody has kept."""

    @pytest.mark.parametrize("kept", [False, True], ids=["anew", "kept"])
    @pytest.mark.parametrize("name", [name for name in MEANS if name != "a backward outside of a block"])
    def test_edits_count(self, name, kept, opt_level, half_dtype):
        def script(run: Run) -> None:
            masters = run.masters
            run.backward()
            MEANS[name](masters if kept else run.masters)
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_gradients_set_on_masters_by_hand_count_with_a_warning_where_others_are_there(self, opt_level, half_dtype):
        def script(run: Run) -> None:
            masters = run.masters
            run.model(1.0).backward()
            for parameter, master in zip(run.model.parameters(), masters, strict=True):
                master.grad = parameter.grad.float() * 2
            run.optimizer.step()

        with pytest.warns(AmpWarning, match="by hand") if opt_level == "O2" else contextlib.nullcontext():
            alike(opt_level, half_dtype, script, loss_scale=1)


@every_level
@pytest.mark.covering(1)
class TestMoreMeans:
    @pytest.mark.parametrize("overlapping", [False, True])
    @pytest.mark.parametrize("when", ["before the step", "before a block", "in a block"])
    def test_one_with_several_elements_in_one_place_is_made_contiguous(self, when, overlapping, opt_level, half_dtype):
        def twos(grad: Tensor, scale: float) -> Tensor:
            if overlapping and grad.dim() == 2:
                return torch.full((3,), 2.0 * scale, dtype=grad.dtype).as_strided((2, 2), (1, 1))
            return torch.full((1,) * grad.dim(), 2.0 * scale, dtype=grad.dtype).expand_as(grad)

        def script(run: Run) -> None:
            is_plain = run.block is plain_block
            change = as_new(lambda grad: twos(grad, 8.0 if when == "in a block" and not is_plain else 1.0))
            with run.block(run.model(1.0), run.optimizer) as loss:
                loss.backward()
                if when == "in a block":
                    change(run.model.parameters())
            if when != "in a block":
                change(run.model.parameters())
            if when == "before a block":
                if is_plain:  # plain torch cannot add to one
                    as_new(Tensor.contiguous)(run.model.parameters())
                run.backward(2.0)
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_clipping_the_models_parameters_clips(self, opt_level, half_dtype):
        run = Run(opt_level, half_dtype)
        run.backward(16.0)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        found = nn.utils.get_total_norm([master.grad for master in run.masters]).item()
        assert found == pytest.approx(1, rel=4 * torch.finfo(half_dtype).eps)

    def test_an_optimizers_own_zero_grad_clears(self, opt_level, half_dtype):
        class Own(torch.optim.SGD):
            def zero_grad(self, *_: object) -> None:
                for parameter in self.model.parameters():
                    parameter.grad = None

        def script(run: Run) -> None:
            run.optimizer.model = run.model
            run.backward()
            run.optimizer.zero_grad()
            run.backward(2.0)
            run.optimizer.step()

        alike(opt_level, half_dtype, script, optimizer=Own)

    @pytest.mark.filterwarnings("ignore:a hook of a leaf:ampatch.errors.AmpWarning")
    def test_a_hook_after_accumulation_that_edits_counts(self, opt_level, half_dtype):
        def double(parameter: Tensor) -> None:
            parameter.grad.data.mul_(2)

        def script(run: Run) -> None:
            run.model.first.register_post_accumulate_grad_hook(double)
            run.backward()
            run.optimizer.step()

        alike(opt_level, half_dtype, script)

    def test_cleared_at_the_top_of_each_iteration(self, opt_level, half_dtype):
        def script(run: Run) -> None:
            for factor in (1.0, 2.0, -1.0):
                for parameter in run.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.data.zero_()
                run.backward(factor)
                run.backward(factor)
                run.optimizer.step()

        alike(opt_level, half_dtype, script)


@every_half
class TestWhatIsShown:
    @pytest.mark.parametrize("passes", [1, 2])
    def test_what_is_not_zero_is_not_shown_as_zero_and_keeps_its_bits(self, half_dtype, passes):
        scale = 2.0**10
        run = Run("O2", half_dtype, model=lambda: nn.ParameterList([torch.ones(4)]), loss_scale=scale)
        (weight,) = run.model
        least = torch.finfo(half_dtype).smallest_normal * torch.finfo(half_dtype).eps
        slopes = torch.tensor([least, 0.0, -2 * least, 1.0])
        for _ in range(passes):
            with amp.scale_loss((weight.float() * (slopes / scale)).sum(), run.optimizer) as loss:
                loss.backward()
        wanted = passes * slopes / scale
        (master,) = run.masters
        assert torch.equal(master.grad, wanted)
        assert weight.grad[:3].tolist() == [least, 0, -least]
        weight.grad.data.clamp_(-1, 1)
        (master,) = run.masters
        assert torch.equal(master.grad, wanted)
        weight.grad.data[0] = 0
        (master,) = run.masters
        assert torch.equal(master.grad, wanted * torch.tensor([0, 1, 1, 1]))

    def test_edits_of_the_model_and_then_of_the_masters_both_count_where_the_list_of_masters_is_new(self, half_dtype):
        run = Run("O2", half_dtype)
        run.backward(16.0)
        run.model.first.grad[:2] = 0
        norm = nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), 1.0)
        assert norm.item() == pytest.approx(16 * math.sqrt(30 + 25), rel=1e-6)
        run.optimizer.step()
        moved = torch.tensor(START) - next(iter(run.model.state_dict().values()))
        assert moved[:2].tolist() == [0, 0]
        assert moved[2:].norm().item() == pytest.approx(0.5 * 5 / math.sqrt(55), rel=1e-3)


CLEARINGS: dict[str, Callable[[Run], object]] = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "optimizer-zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model": lambda run: run.model.zero_grad(),
    "model-zeros": lambda run: run.model.zero_grad(set_to_none=False),
    "none": lambda run: MEANS["none"](run.model.parameters()),
    "data.zero_": lambda run: MEANS["data.zero_"](run.model.parameters()),
}
FUSED = [torch.optim.SGD, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True)]


@every_level
@pytest.mark.parametrize("optimizer", FUSED, ids=["SGD", "fused"])
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
@pytest.mark.parametrize("floor", [1.0, 8.0], ids=["above-the-floor", "at-the-floor"])
@pytest.mark.covering(1)
class TestVerdicts:
    """A verdict goes when the gradients go that it was about; the scale has backed off all the same."""

    def test_of_gradients_that_were_cleared_since(self, clear, optimizer, floor, opt_level, half_dtype):
        def script(run: Run) -> None:
            run.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.backward(OVERFLOW)
            clear(run)
            run.backward(2.0)
            run.optimizer.step()

        run = alike(opt_level, half_dtype, script, optimizer=optimizer, min_loss_scale=floor)
        assert not amp.step_was_skipped(run.optimizer)
        assert amp.get_loss_scale() == max(4.0, floor)

    def test_of_an_optimizer_that_was_not_stepped(self, clear, optimizer, floor, opt_level, half_dtype):
        run = Run(opt_level, half_dtype, optimizer=one_each(optimizer), min_loss_scale=floor)
        run.backward(OVERFLOW)
        for optimizer_of_one in run.optimizer:
            clear(SimpleNamespace(model=run.model, optimizer=optimizer_of_one))
        run.backward()
        run.optimizer[1].step()
        assert not amp.step_was_skipped(run.optimizer[1])


@every_level
class TestNested:
    def test_block_of_another_optimizer_that_ends_before_the_outer_backward(self, opt_level, half_dtype):
        run = Run(opt_level, half_dtype, optimizer=one_each(torch.optim.SGD), scale_window=1)
        first, second = run.optimizer
        with amp.scale_loss(run.model.first.float().sum(), first) as outer:
            with amp.scale_loss(run.model.second.float().sum(), second) as inner:
                inner.backward()
            (master,) = amp.master_params(second)
            assert master.grad.flatten().tolist() == [1] * 4
            second.step()
            assert amp.get_loss_scale() == 16  # by what the inner block has found
            outer.backward()
        (master,) = amp.master_params(first)
        assert master.grad.flatten().tolist() == [1] * 4


def test_a_scaler_by_hand_that_is_updated_before_backward() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaler = amp.LossScaler(init_scale=8.0, scale_window=1)
    scaled = scaler.scale(weight.sum())
    scaler.update()
    scaled.backward()
    assert weight.grad.tolist() == [8, 8]


@every_level
@pytest.mark.parametrize("loss_scale", [8.0, 1.0])
@pytest.mark.parametrize("clear", ["optimizer", "model", "none", "data.zero_"])
@pytest.mark.covering(1)
def test_clearing_between_blocks_under_a_static_scale(clear, loss_scale, opt_level, half_dtype):
    def script(run: Run) -> None:
        for _ in range(2):
            run.backward(4.0)
            CLEARINGS[clear](run)
            run.backward(2.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    alike(opt_level, half_dtype, script, loss_scale=loss_scale)


@every_level
@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_empty_parameters_are_no_trouble(kernel, opt_level, half_dtype, select):
    select(kernel)
    weights = [torch.ones(3), torch.ones(0, 2), torch.tensor(1.0)]
    run = Run(opt_level, half_dtype, model=lambda: nn.ParameterList(weights), loss_scale=8.0)
    for _ in range(2):
        for _ in range(2):
            with amp.scale_loss(sum(each.float().sum() for each in run.model), run.optimizer) as loss:
                loss.backward()
            for each in run.model:
                each.grad = each.grad * 1
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [each.tolist() for each in run.model] == [[-1] * 3, [], -1]


@every_level
def test_clipping_by_amp_where_a_gradient_is_expanded(opt_level, half_dtype):
    run = Run(opt_level, half_dtype)
    run.backward()
    run.model.first.grad = torch.ones(1, dtype=run.model.first.dtype).expand(4)
    amp.clip_grad_norm_(run.optimizer, 1.0)
    assert nn.utils.get_total_norm([each.grad for each in run.masters]).item() == pytest.approx(1, rel=1e-4)

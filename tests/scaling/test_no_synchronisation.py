"""Of optimizers that skip in their own kernel: a step reads nothing back, and what holds of skipped steps holds there.

`Reads` counts what is read back, whatever the device. If a step skips by itself, amp learns so from a copy that the
host does not wait for. On the CPU such a copy has arrived at once; `Post` lets it arrive later.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stepping
import torch
from helpers import assert_same_state
from optimizers import backward, initialize
from stepping import SCALE, closure_of, everything, loss_of, network, nothing_changes, train, weights
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch import amp
from ampatch.errors import LossScaleError
from ampatch.native import host_copy
from ampatch.scaling.scale_use import ScaleUse

pytestmark = pytest.mark.usefixtures("far_away")

PACKAGE = Path(ampatch.__file__).parent

SGD = functools.partial(torch.optim.SGD, lr=0.1, fused=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.01, fused=True)

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": SGD,
    "SGD-momentum": functools.partial(SGD, momentum=0.9),
    "SGD-nesterov": functools.partial(SGD, momentum=0.9, nesterov=True),
    "Adam": ADAM,
    "Adam-amsgrad": functools.partial(ADAM, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, fused=True),
}
# An earlier torch, such as 2.11, has a fused Adagrad that cannot skip.
if not hasattr(FUSED["Adagrad"]([torch.zeros(1)]), "_step_supports_amp_scaling"):
    del FUSED["Adagrad"]
# The others make their state in the first step. amp decides about that one, as a kernel that skips makes no state.
SKIP_FIRST_STEP_THEMSELVES = [make for name, make in FUSED.items() if name in ("SGD", "Adagrad")]

# At O1 functions do not cast here.
LEVELS: dict[str, dict[str, Any]] = {
    "O1": {},
    **{name: options for name, options in stepping.LEVELS.items() if options["opt_level"] != "O1"},
}

# torch 2.13's fused SGD does not update half tensors on the CPU, but for the last elements that fill no vector.
PAIRS = {
    f"{name}-{level}": (make, options)
    for name, make in FUSED.items()
    for level, options in LEVELS.items()
    if not (name.startswith("SGD") and level.startswith("O3"))
}

every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
every_fused_at_every_level = pytest.mark.parametrize(("make", "options"), PAIRS.values(), ids=PAIRS)

# With "explain", the steps after one whose loss is inf read its verdict.
QUIET = {"on_overflow": "log", "init_scale": SCALE}


def started(make: Callable[..., Any] = ADAM, *, steps: int = 1, **options: Any) -> tuple[Any, Any]:
    return stepping.started(make, steps=steps, **{**QUIET, **options})


class _Operators(TorchDispatchMode):
    """Sees what torch's operators read, also those that torch's own Python code calls."""

    # Their result, or its size, depends on values: a GPU has to be waited for.
    READS = frozenset(
        {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.equal,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.unique_dim,
            torch.ops.aten._unique2,
        }
    )
    INDEXING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_})
    COPIES = frozenset({torch.ops.aten._to_copy, torch.ops.aten.copy_})

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator, kwargs = function.overloadpacket, kwargs or {}
        by_mask = operator in self.INDEXING and any(index.dtype is torch.bool for index in args[1] if index is not None)
        if operator in self.READS or by_mask or (operator in self.COPIES and self._changes_device(args, kwargs)):
            self._note(str(operator))
        return function(*args, **kwargs)

    @staticmethod
    def _changes_device(args: Any, kwargs: Any) -> bool:
        devices = {argument.device for argument in args if isinstance(argument, Tensor)}
        return len(devices | {torch.device(kwargs["device"])} if kwargs.get("device") else devices) > 1


class _Methods(TorchFunctionMode):
    """Sees the methods that read a tensor on the CPU without any operator."""

    READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu})

    def __init__(self, note: Callable[[str], None], is_on_host: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._note = note
        self._is_on_host = is_on_host

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.READS and not self._is_on_host(args[0]):
            self._note(function.__name__)
        return function(*args, **(kwargs or {}))


class Reads:
    """Counts what is read back from the device, and says where.

    The numbers of a `host_copy.HostCopy` count where they are read at once; later they are on the host already.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self._on_host: list[torch.UntypedStorage] = []  # kept, so that no other tensor gets their memory
        original = host_copy.HostCopy.__init__

        def remember(copied: Any, on_device: Tensor) -> None:
            original(copied, on_device)
            self._on_host.append(copied._numbers.untyped_storage())

        values: Any = ScaleUse._values

        def read(use: ScaleUse) -> Any:
            if use._sent is None:  # it is sent now, and waited for
                self._note("wait")
            return values.fget(use)

        monkeypatch.setattr(host_copy.HostCopy, "__init__", remember)
        monkeypatch.setattr(ScaleUse, "_values", property(read))
        self._operators = _Operators(self._note)
        self._methods = _Methods(self._note, self._is_on_host)

    def __enter__(self) -> list[str]:
        self.found = []
        self._operators.__enter__()
        self._methods.__enter__()
        return self.found

    def __exit__(self, *error: Any) -> None:
        self._methods.__exit__(*error)
        self._operators.__exit__(*error)

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {storage.data_ptr() for storage in self._on_host}

    def _note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
        where = f" in {Path(frames[-1].filename).name}, {frames[-1].name}: {frames[-1].line}" if frames else ""
        self.found.append(what + where)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


class Post:
    """Whether what was sent to the host has arrived."""

    delivers = True


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    made = Post()
    monkeypatch.setattr(host_copy.HostCopy, "has_arrived", property(lambda _: made.delivers))
    return made


READING: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda tensor: bool(tensor[0]),
    "float": lambda tensor: float(tensor[0]),
    "int": lambda tensor: int(tensor[0]),
    "item": lambda tensor: tensor[0].item(),
    "if": lambda tensor: 1 if tensor[0] else 0,
    "any": any,
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "cpu": lambda tensor: tensor.cpu(),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "format": lambda tensor: f"{tensor[0]:g}",
    "copy": lambda tensor: tensor.to("meta"),
}


def _clip_in_two_calls(parameters: list[Tensor], _: Any) -> None:
    norm = nn.utils.get_total_norm([each.grad for each in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)


# What users do to gradients between the block and the step.
CHANGES: dict[str, Callable[[list[Tensor], Any], object]] = {
    "none": lambda parameters, _: None,
    "norm-by-amp": lambda _, optimizer: amp.clip_grad_norm_(optimizer, 0.01),
    "norm": lambda parameters, _: nn.utils.clip_grad_norm_(parameters, 0.01),
    "norm-one-by-one": lambda parameters, _: nn.utils.clip_grad_norm_(parameters, 0.01, foreach=False),
    "norm-in-two-calls": _clip_in_two_calls,
    "value": lambda parameters, _: nn.utils.clip_grad_value_(parameters, 0.01),
    "replaced": lambda parameters, _: [setattr(each, "grad", each.grad * 0.5) for each in parameters],
    "through-data": lambda parameters, _: [each.grad.data.mul_(0.5) for each in parameters],
}


class TestReads:
    @pytest.mark.parametrize("read", READING.values(), ids=READING)
    def test_reads_are_seen_however_a_value_is_read(self, read, reads):
        tensor = torch.ones(2)
        with reads as found:
            tensor.mul_(2).sum().clone()
            assert found == []
            read(tensor)
        assert len(found) == 1

    def test_reads_of_a_copy_on_the_host_do_not_count(self, reads):
        copied, other = host_copy.HostCopy(torch.ones(2)), torch.ones(2)
        with reads as found:
            assert copied.values == (1, 1)
            assert found == []
            other.tolist()
        assert found == ["tolist"]

    @every_level
    @pytest.mark.parametrize(
        ("make", "exact_hooks"),
        [(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), False), (ADAM, True)],
        ids=["cannot-skip-by-itself", "exact-hooks"],
    )
    def test_step_that_does_not_skip_by_itself_reads_once(self, make, exact_hooks, options, reads):
        model, optimizer = started(make, exact_hooks=exact_hooks, **options)
        for factor in (1, math.inf, 1):
            with reads as found:
                train(model, optimizer, factor)
            # After an overflow once more: whether the gradients were cleared since.
            assert len(found) == 1 + (factor == math.inf)
            assert "scale_use.py, overflowed" in found[0]

    @every_fused_at_every_level
    @pytest.mark.parametrize("change", CHANGES, ids=str)
    @pytest.mark.covering(1)
    def test_step_that_skips_by_itself_reads_nothing_after_any_change(self, change, make, options, reads, caplog):
        model, optimizer = started(make, verbosity=1, scale_window=2, **options)
        with reads as found:
            for factor in (1, math.inf, 1, 1, 1, math.inf, 1):
                optimizer.zero_grad()
                backward(loss_of(model) * factor, optimizer, delay_unscale=change == "norm-by-amp")
                CHANGES[change](list(model.parameters()), optimizer)
                optimizer.step()
        assert found == []
        assert amp.skipped_steps(optimizer) == len(caplog.messages) == 2

    @every_fused_at_every_level
    def test_first_step_reads_once_if_it_makes_state(self, make, options, reads):
        model, optimizer = started(make, steps=0, **options)
        with reads as found:
            train(model, optimizer, 1)
        assert len(found) == (0 if make in SKIP_FIRST_STEP_THEMSELVES else 1)

    @every_level
    def test_steps_of_several_blocks_losses_and_optimizers_read_nothing(self, options, reads):
        model = network()
        optimizers = [FUSED["AdamW"](model[0].parameters()), ADAM(model[2].parameters())]
        schedulers = [lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
        initialize(model, optimizers, num_losses=2, **QUIET, **options)

        def iterate(index: int, factor: float = 1) -> None:
            backward(loss_of(model, index), optimizers)
            backward(loss_of(model, index + 1) * factor, optimizers, loss_id=1)
            backward(loss_of(model, index + 2), optimizers, loss_id=1, delay_unscale=True)
            backward(loss_of(model, index + 3), optimizers, loss_id=1, delay_overflow_check=True)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

        iterate(0)
        with reads as found:
            iterate(1)
            iterate(2, math.inf)
            iterate(3)
        assert found == []
        assert [amp.skipped_steps(optimizer) for optimizer in optimizers] == [1, 1]

    @every_fused_at_every_level
    @pytest.mark.parametrize("loss_scale", [1.0, 8.0])
    @pytest.mark.covering(1)
    def test_step_that_checks_under_a_static_scale_reads_nothing(self, loss_scale, make, options, reads, caplog):
        model, optimizer = started(make, verbosity=1, check_finite=True, **{**options, "loss_scale": loss_scale})
        with reads as found:
            train(model, optimizer, 1, math.inf, 1)
            optimizer.zero_grad()
            (loss_of(model) * math.nan).backward()
            optimizer.step()
        assert found == []
        assert amp.skipped_steps(optimizer) == 2
        line = f"Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at {loss_scale}"
        assert caplog.messages == [line] * 2

    @pytest.mark.parametrize("check_finite", [False, True])
    def test_step_of_any_optimizer_under_a_static_scale_reads_only_if_it_checks(self, check_finite, reads):
        model, optimizer = started(torch.optim.SGD, loss_scale=8.0, check_finite=check_finite)
        with reads as found:
            train(model, optimizer, 1, 1)
        assert len(found) == 2 * check_finite

    @pytest.mark.parametrize("count", [1, 3])
    def test_stats_read_all_their_numbers_at_once(self, count, reads):
        model = network()
        optimizers = [ADAM(model[0].parameters()), ADAM(model[2].parameters())]
        initialize(model, optimizers, num_losses=count, **QUIET)
        for factor in (1, math.inf):
            for index in range(count):
                backward(loss_of(model, index) * factor, optimizers, loss_id=index)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with reads as found:
            numbers = amp.stats()
        assert len(found) == 1
        assert numbers["skipped_steps"] == 2

    def test_nothing_is_read_while_a_copy_has_not_arrived(self, reads, post):
        model, optimizer = started(**LEVELS["O2-float16"])
        post.delivers = False
        with reads as found:
            train(model, optimizer, 1, math.inf, 1)
            assert found == []
            assert amp.skipped_steps(optimizer) == 1
        assert found == []

    def test_steps_read_nothing_again_once_the_scale_has_grown_off_its_floor(self, reads):
        model, optimizer = started(init_scale=2.0, min_loss_scale=1.0, scale_window=2)
        train(model, optimizer, math.inf)
        assert amp.get_loss_scale() == 1
        train(model, optimizer, *[1] * 8)
        assert amp.get_loss_scale() == 16
        with reads as found:
            train(model, optimizer, 1, 1)
        assert found == []


class TestReadsOfAGradScaler:
    """Of `ampatch.GradScaler`, for which no session is needed."""

    @staticmethod
    def train(scaler: ampatch.GradScaler, optimizer: Any, model: nn.Module, count: int, clips: bool = False) -> None:
        for index in range(count):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)
            scaler.step(optimizer)
            scaler.update()

    @pytest.mark.parametrize("make", [*FUSED.values(), None], ids=[*FUSED, "MixedPrecision"])
    @pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
    @pytest.mark.covering(2)
    def test_optimizer_that_skips_by_itself_reads_nothing_once_it_has_its_state(self, make, clips, reads):
        model = network()
        if make is None:
            model[0].half()
            model[0].register_forward_pre_hook(lambda _, inputs: inputs[0].half())
            model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            optimizer = ampatch.MixedPrecision(FUSED["AdamW"](model.parameters()))
        else:
            optimizer = make(model.parameters())
        scaler = ampatch.GradScaler("cpu", init_scale=SCALE)
        self.train(scaler, optimizer, model, 1)
        with reads as found:
            self.train(scaler, optimizer, model, 3, clips)
        assert found == []

    @pytest.mark.parametrize(
        ("make", "options"),
        [(functools.partial(torch.optim.SGD, lr=0.1), {}), (SGD, {"min_loss_scale": 1.0})],
        ids=["not-fused", "with-a-floor"],
    )
    def test_other_optimizers_read_once_a_step(self, make, options, reads):
        model = network()
        optimizer, scaler = make(model.parameters()), ampatch.GradScaler("cpu", **options)
        with reads as found:
            self.train(scaler, optimizer, model, 3)
        assert len(found) == 3


class TestSkippedSteps:
    @pytest.mark.parametrize("exact_hooks", [False, True])
    @every_fused_at_every_level
    @pytest.mark.covering(1)
    def test_skipped_step_changes_nothing_then_or_later_and_runs_hooks_unless_exact(self, make, options, exact_hooks):
        def trained(*batches: tuple[int, float]) -> Any:
            model, optimizer = started(make, steps=0, exact_hooks=exact_hooks, **options)
            fired: list[str] = []
            optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
            optimizer.register_step_post_hook(lambda *_: fired.append("after"))
            skipped = 0
            for index, factor in batches:
                overflows = factor == math.inf
                optimizer.zero_grad()
                backward(loss_of(model, index) * factor, optimizer)
                before = everything(model, optimizer)
                fired.clear()
                optimizer.step()
                assert amp.step_was_skipped(optimizer) == overflows
                skipped += overflows
                if overflows:
                    assert_same_state(everything(model, optimizer), before)
                    assert amp.get_loss_scale() == SCALE / 2
                    amp.load_state_dict({"loss_scaler0": {"loss_scale": SCALE, "unskipped": 0}})
                skips_by_itself = not exact_hooks and (index > 0 or make in SKIP_FIRST_STEP_THEMSELVES)
                assert fired == (["before", "after"] if skips_by_itself or not overflows else [])
                assert amp.skipped_steps(optimizer) == skipped
            result = everything(model, optimizer)
            amp.deinitialize()
            return result

        expected = trained((0, 1), (1, 1), (2, 1))
        assert_same_state(trained((0, math.inf), (0, 1), (1, 1), (2, math.inf), (2, math.inf), (2, 1)), expected)

    @every_level
    def test_overflow_of_any_of_several_blocks_skips_the_step(self, options):
        model, optimizer = started(num_losses=2, **options)
        for at in range(3):
            optimizer.zero_grad()
            for index in range(3):
                factor = math.inf if index == at else 1
                backward(loss_of(model, index) * factor, optimizer, loss_id=index % 2)
            with nothing_changes(model, optimizer):
                optimizer.step()
            assert amp.step_was_skipped(optimizer)
            assert amp.skipped_steps(optimizer) == at + 1
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == [SCALE / 4, SCALE / 2]

    @every_level
    @pytest.mark.parametrize("other_fused", [True, False], ids=["both-by-themselves", "one-by-itself"])
    def test_overflow_skips_both_optimizers_of_a_block_and_is_logged_once(self, other_fused, options, caplog):
        model = network()
        optimizers = [ADAM(model[0].parameters()), torch.optim.Adam(model[2].parameters(), fused=other_fused)]
        initialize(model, optimizers, verbosity=1, **QUIET, **options)
        for factor in (1, math.inf, 1):
            model.zero_grad()
            before = [everything(model, optimizer) for optimizer in optimizers]
            backward(loss_of(model) * factor, optimizers)
            for optimizer in optimizers:
                optimizer.step()
            assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [factor == math.inf] * 2
            if factor == math.inf:
                assert_same_state([everything(model, optimizer) for optimizer in optimizers], before)
        assert amp.get_loss_scale() == SCALE / 2
        assert caplog.messages == ["Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0"]

    @pytest.mark.parametrize("overflows", [False, True], ids=["last-step-runs", "last-step-is-skipped"])
    def test_late_news_of_a_step_is_not_taken_for_that_of_a_later_one(self, overflows, post, caplog):
        model, optimizer = started(verbosity=1)
        post.delivers = False
        train(model, optimizer, 1 if overflows else math.inf)
        # With a closure amp decides itself.
        optimizer.step(closure_of(model, optimizer, math.inf if overflows else 1.0))
        assert amp.step_was_skipped(optimizer) is overflows
        assert amp.skipped_steps(optimizer) == 1
        assert len(caplog.messages) == 1

    @pytest.mark.parametrize("how", ["group", "checkpoint"])
    def test_groups_of_a_fused_optimizer_that_are_not_fused_skip(self, how):
        model = network()
        if how == "group":
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "fused": False}]
            optimizer = ADAM(groups)
        else:
            plain = torch.optim.Adam(model.parameters())
            loss_of(model).backward()
            plain.step()
            optimizer = ADAM(model.parameters())
            optimizer.load_state_dict(plain.state_dict())
        initialize(model, optimizer, **QUIET)
        train(model, optimizer, 1)
        with nothing_changes(model, optimizer):
            train(model, optimizer, math.inf)
        assert amp.step_was_skipped(optimizer)

    @every_fused
    @pytest.mark.parametrize("made", ["before", "after"])
    @pytest.mark.parametrize("overflows", [[1, 0, 0], [0, 1, 0], [1, 1, 1]], ids=["first", "second", "all"])
    def test_scheduler_does_not_warn_of_a_skipped_step(self, made, make, overflows):
        # Warnings are errors here.
        model = network()
        optimizer = make(model.parameters())
        scheduler = lr_scheduler.StepLR(optimizer, 1) if made == "before" else None
        initialize(model, optimizer, **QUIET, **LEVELS["O2-float16"])
        scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1)
        for each in overflows:
            train(model, optimizer, math.inf if each else 1)
            scheduler.step()
        assert amp.skipped_steps(optimizer) == sum(overflows)


def line(scale: float, scaler: int = 0) -> str:
    return f"Gradient overflow. Skipping step, loss scaler {scaler} reducing loss scale to {scale}"


class TestLogLines:
    def test_late_news_is_logged_when_it_arrives_with_the_scale_of_its_step(self, caplog, post):
        model, optimizer = started(verbosity=1, scale_window=1, **LEVELS["O2-float16"])
        post.delivers = False
        train(model, optimizer, math.inf, 1, 1, math.inf, 1)
        assert caplog.messages == []
        post.delivers = True
        train(model, optimizer, 1)
        # The scale has doubled after every clean step.
        assert caplog.messages == [line(SCALE), line(SCALE * 2)]
        train(model, optimizer, 1, 1)
        assert len(caplog.messages) == 2
        assert not amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 2

    @pytest.mark.parametrize("ask", [amp.step_was_skipped, lambda _: amp.deinitialize()], ids=["asked", "deinitialize"])
    def test_late_news_is_logged_before_it_arrives_if_the_user_asks_or_amp_ends(self, ask, caplog, post):
        model, optimizer = started(verbosity=1)
        post.delivers = False
        train(model, optimizer, math.inf)
        assert caplog.messages == []
        assert ask(optimizer) in (True, None)
        assert caplog.messages == [line(SCALE / 2)]
        post.delivers = True
        optimizer.zero_grad()
        optimizer.step()
        assert len(caplog.messages) == 1

    def test_each_scale_that_backs_off_is_logged(self, caplog):
        model, optimizer = started(verbosity=1, num_losses=3)
        for loss_id, factor in enumerate([math.inf, 1, math.inf]):
            backward(loss_of(model, loss_id) * factor, optimizer, loss_id=loss_id)
        optimizer.step()
        assert amp.skipped_steps(optimizer) == 1
        assert caplog.messages == [line(SCALE / 2, 0), line(SCALE / 2, 2)]


class TestFloor:
    def started(self, make: Callable[..., Any] = ADAM, **options: Any) -> tuple[Any, Any]:
        return started(make, **{"init_scale": 4.0, "min_loss_scale": 1.0, "verbosity": 1, **options})

    def overflow(self, model: nn.Sequential, optimizer: Any) -> None:
        """Takes a step with inf or NaN in two gradients."""
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0, :2] = math.inf
            model[2].bias.grad[2] = math.nan
        optimizer.step()

    @every_fused_at_every_level
    @pytest.mark.parametrize("exact_hooks", [False, True])
    def test_error_names_the_gradients_that_overflow_at_the_floor_and_training_can_go_on(
        self, exact_hooks, make, options, caplog
    ):
        model, optimizer = self.started(make, exact_hooks=exact_hooks, **options)
        for _ in range(2):
            self.overflow(model, optimizer)
            train(model, optimizer, 1)
        assert amp.get_loss_scale() == 1
        with nothing_changes(model, optimizer), pytest.raises(LossScaleError) as caught:
            self.overflow(model, optimizer)

        message = str(caught.value)
        assert "loss scaler 0 is at its floor of 1" in message
        assert re.search(r"0\.weight, shape \(6, 4\), \w+: 2 inf, 0 nan\n", message)
        assert re.search(r"2\.bias, shape \(3,\), \w+: 0 inf, 1 nan", message)
        assert "2.weight" not in message
        assert amp.skipped_steps(optimizer) == 3
        assert len(caplog.messages) == 2
        train(model, optimizer, 1)
        assert not amp.step_was_skipped(optimizer)

    @every_level
    @pytest.mark.parametrize("exact_hooks", [False, True])
    def test_error_comes_with_the_second_overflow_at_the_floor_or_the_first_if_exact(self, exact_hooks, options):
        model, optimizer = self.started(init_scale=1.0, exact_hooks=exact_hooks, **options)
        if not exact_hooks:
            self.overflow(model, optimizer)
        with pytest.raises(LossScaleError, match=r"0\.weight"):
            self.overflow(model, optimizer)

    def test_error_comes_with_the_first_overflow_after_late_news_of_the_floor(self, post):
        model, optimizer = self.started(**LEVELS["O2-float16"])
        post.delivers = False
        for _ in range(4):
            self.overflow(model, optimizer)
        post.delivers = True
        with pytest.raises(LossScaleError, match=r"0\.weight"):
            self.overflow(model, optimizer)
        assert amp.skipped_steps(optimizer) == 5

    def test_floor_that_is_known_only_after_clipping_leaves_no_gradient_scaled(self):
        stepped = []
        for is_known_before in (True, False):
            model, optimizer = self.started(init_scale=2.0)
            self.overflow(model, optimizer)
            if is_known_before:
                assert amp.step_was_skipped(optimizer)
            optimizer.zero_grad()
            backward(loss_of(model), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            stepped.append(everything(model, optimizer))
            amp.deinitialize()
        assert_same_state(*stepped)

    def test_floor_of_one_of_two_scales_lets_the_other_back_off(self):
        model, optimizer = self.started(num_losses=2)
        for loss_id, scale in [(0, 2), (0, 1), (1, 2), (1, 1)]:
            optimizer.zero_grad()
            backward(loss_of(model) * math.inf, optimizer, loss_id=loss_id)
            optimizer.step()
            assert amp.get_loss_scale(loss_id) == scale
        optimizer.zero_grad()
        backward(loss_of(model) * math.inf, optimizer, loss_id=1)
        with pytest.raises(LossScaleError, match="loss scaler 1 is at its floor"):
            optimizer.step()


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Lets torch raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@every_level
@pytest.mark.parametrize("name", ["SGD-momentum", "Adam", "AdamW"])
def test_three_steps_on_a_gpu_wait_for_nothing(name, options):
    batches = [torch.randn(5, 4, device="cuda") for _ in range(3)]
    model, optimizer = started(FUSED[name], model=network().cuda(), verbosity=1, **options)
    train(model, optimizer, math.inf, 1)
    before = weights(model)
    with waits_are_errors():
        for batch, factor in zip(batches, (1, math.inf, 1), strict=True):
            optimizer.zero_grad()
            backward(model(batch).float().square().mean() * factor, optimizer)
            optimizer.step()
    assert amp.skipped_steps(optimizer) == 2
    assert amp.get_loss_scale() == SCALE / 4
    for now, earlier in zip(weights(model), before, strict=True):
        assert now.isfinite().all()
        assert not torch.equal(now, earlier)


@pytest.mark.gpu
@every_level
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_step_after_changes_to_gradients_of_the_model_on_a_gpu_waits_for_nothing(change, options):
    model, optimizer = started(model=network().cuda(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        change(list(model.parameters()), optimizer)
        with waits_are_errors():
            optimizer.step()
    assert amp.skipped_steps(optimizer) == 0

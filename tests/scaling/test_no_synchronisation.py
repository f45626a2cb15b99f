"""Of optimizers that skip in their own kernel: a step reads nothing back, and what holds of skipped steps holds there.

What is read back is counted by `Reads`, whatever the device. Of a step that skips by itself amp learns what became of
it from a copy that nobody waits for; on the CPU such a copy has arrived at once, and `Post` has it arrive later.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_state, dtype_name
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
SCALE = 2.0**8
OVERFLOW = math.inf

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
# Of the others the first step makes state, and so amp decides about it: a kernel that skips would leave that unmade.
SKIP_FIRST_STEP_THEMSELVES = [make for name, make in FUSED.items() if name in ("SGD", "Adagrad")]

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "patch_torch_functions": False},
    **{
        f"{level}-{dtype_name(half)}": {"opt_level": level, "half_dtype": half}
        for level in ("O2", "O3")
        for half in HALF_DTYPES
    },
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


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, index: int) -> Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
    return model(batch.to(next(model.parameters()).device)).float().square().mean()


def initialize(model: Any, optimizer: Any, **options: Any) -> None:
    # "explain" reads the verdicts of the steps after one whose loss is inf.
    given = {"loss_scale": "dynamic", "init_scale": SCALE, "verbosity": 0, "on_overflow": "log", **options}
    amp.initialize(model, optimizer, **given)


def backward(loss: Tensor, optimizers: Any, *, overflows: bool = False, **options: Any) -> None:
    with amp.scale_loss(loss * (OVERFLOW if overflows else 1), optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def train(model: nn.Module, optimizer: Any, *overflows: bool) -> None:
    """One step for each value."""
    for index, each in enumerate(overflows):
        optimizer.zero_grad()
        backward(loss_of(model, index), optimizer, overflows=each)
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Weights, masters and what the optimizer keeps."""
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy([list(model.parameters()), masters, optimizer.state_dict()])


def hooked(optimizer: torch.optim.Optimizer) -> list[str]:
    """What its step hooks note: a step that skips by itself fires them, and one that amp skips does not."""
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    return fired


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    caplog.set_level(logging.WARNING, logger="ampatch")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ampatch"]


# Reading back


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


def _clip_in_two_calls(parameters: list[Tensor]) -> None:
    norm = nn.utils.get_total_norm([each.grad for each in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)


# What users do to the gradients of `model.parameters()` between the block and the step.
CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01),
    "norm-one-by-one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, foreach=False),
    "norm-in-two-calls": _clip_in_two_calls,
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    "replaced": lambda parameters: [setattr(each, "grad", each.grad * 0.5) for each in parameters],
    "through-data": lambda parameters: [each.grad.data.mul_(0.5) for each in parameters],
}


class TestReads:
    @pytest.mark.parametrize("read", READING.values(), ids=READING)
    def test_are_seen_however_a_value_is_read(self, read, reads):
        tensor = torch.ones(2)
        with reads as found:
            tensor.mul_(2).sum().clone()
            assert found == []
            read(tensor)
        assert len(found) == 1

    def test_are_not_those_of_a_copy_on_the_host(self, reads):
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
    def test_are_one_in_every_step_that_does_not_skip_by_itself(self, make, exact_hooks, options, reads):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, exact_hooks=exact_hooks, **options)
        train(model, optimizer, False)
        for overflows in (False, True, False):
            with reads as found:
                train(model, optimizer, overflows)
            # And where that says so, whether what overflowed was cleared since.
            assert len(found) == 1 + overflows
            assert "scale_use.py, overflowed" in found[0]

    @every_fused_at_every_level
    @pytest.mark.covering(1)
    def test_are_none_in_a_step_that_skips_by_itself(self, make, options, reads, log):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, verbosity=1, scale_window=2, **options)
        train(model, optimizer, False)
        with reads as found:
            train(model, optimizer, False, True, False, False, False, True, False)
        assert found == []
        assert amp.skipped_steps(optimizer) == len(log()) == 2

    @every_fused_at_every_level
    def test_are_none_in_a_step_whose_gradients_are_clipped(self, make, options, reads, log):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, verbosity=1, **options)
        train(model, optimizer, False)
        with reads as found:
            for overflows in (False, True, False):
                optimizer.zero_grad()
                backward(loss_of(model, 0), optimizer, overflows=overflows, delay_unscale=True)
                amp.clip_grad_norm_(optimizer, 0.1)
                optimizer.step()
        assert found == []
        assert amp.skipped_steps(optimizer) == len(log()) == 1

    @every_level
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_are_none_where_the_models_own_gradients_are_clipped(self, change, options, reads):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, **options)
        train(model, optimizer, False)
        with reads as found:
            for overflows in (False, True, False):
                optimizer.zero_grad()
                backward(loss_of(model, 0), optimizer, overflows=overflows)
                change(list(model.parameters()))
                optimizer.step()
        assert found == []
        assert amp.skipped_steps(optimizer) == 1

    @every_fused_at_every_level
    def test_is_one_in_the_first_step_where_that_makes_state(self, make, options, reads):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, **options)
        with reads as found:
            train(model, optimizer, False)
        assert len(found) == (0 if make in SKIP_FIRST_STEP_THEMSELVES else 1)

    @every_level
    def test_are_none_with_several_passes_losses_and_optimizers(self, options, reads):
        model = network()
        optimizers = [FUSED["AdamW"](model[0].parameters()), ADAM(model[2].parameters())]
        schedulers = [lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
        initialize(model, optimizers, num_losses=2, **options)

        def iterate(index: int, overflows: bool = False) -> None:
            backward(loss_of(model, index), optimizers)
            backward(loss_of(model, index + 1), optimizers, loss_id=1, overflows=overflows)
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
            iterate(2, overflows=True)
            iterate(3)
        assert found == []
        assert [amp.skipped_steps(optimizer) for optimizer in optimizers] == [1, 1]

    @every_fused_at_every_level
    @pytest.mark.parametrize("loss_scale", [1.0, 8.0])
    @pytest.mark.covering(1)
    def test_are_none_where_steps_check_a_static_scale(self, loss_scale, make, options, reads, log):
        model = network()
        optimizer = make(model.parameters())
        initialize(model, optimizer, verbosity=1, check_finite=True, **{**options, "loss_scale": loss_scale})
        train(model, optimizer, False)
        with reads as found:
            train(model, optimizer, False, True, False)
            optimizer.zero_grad()
            (loss_of(model, 0) * math.nan).backward()
            optimizer.step()
        assert found == []
        assert amp.skipped_steps(optimizer) == 2
        assert log() == [f"Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at {loss_scale}"] * 2

    @pytest.mark.parametrize("check_finite", [False, True])
    def test_are_none_under_a_static_scale_unless_steps_check_it(self, check_finite, reads):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(model, optimizer, loss_scale=8.0, check_finite=check_finite, opt_level="O1")
        train(model, optimizer, False)
        with reads as found:
            train(model, optimizer, False, False)
        assert len(found) == 2 * check_finite

    @pytest.mark.parametrize("count", [1, 3])
    def test_are_one_for_all_numbers_of_stats(self, count, reads):
        model = network()
        optimizers = [ADAM(model[0].parameters()), ADAM(model[2].parameters())]
        initialize(model, optimizers, num_losses=count, opt_level="O1")
        for overflows in (False, True):
            for index in range(count):
                backward(loss_of(model, index), optimizers, loss_id=index, overflows=overflows)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with reads as found:
            numbers = amp.stats()
        assert len(found) == 1
        assert numbers["skipped_steps"] == 2

    def test_are_none_while_what_was_sent_has_not_arrived(self, reads, post):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, **LEVELS["O2-float16"])
        train(model, optimizer, False)
        post.delivers = False
        with reads as found:
            train(model, optimizer, False, True, False)
            assert found == []
            assert amp.skipped_steps(optimizer) == 1
        assert found == []

    def test_are_made_by_whoever_asks_for_the_scale(self, reads):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, **LEVELS["O1"])
        with reads as found:
            amp.get_loss_scale()
        assert found != []

    def test_end_again_when_the_scale_has_grown_off_its_floor(self, reads):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, init_scale=2.0, min_loss_scale=1.0, scale_window=2, **LEVELS["O1"])
        train(model, optimizer, False, True)
        assert amp.get_loss_scale() == 1
        train(model, optimizer, *[False] * 8)
        assert amp.get_loss_scale() == 16
        with reads as found:
            train(model, optimizer, False, False)
        assert found == []


class TestReadsOfAGradScaler:
    """Of `ampatch.GradScaler`, for which no session is needed."""

    @staticmethod
    def run(scaler: ampatch.GradScaler, optimizer: Any, model: nn.Module, count: int, *, clips: bool = False) -> None:
        for index in range(count):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)
            scaler.step(optimizer)
            scaler.update()

    @every_fused
    @pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
    def test_are_none_with_an_optimizer_that_skips_by_itself_and_has_its_state(self, make, clips, reads):
        model = network()
        optimizer, scaler = make(model.parameters()), ampatch.GradScaler("cpu")
        self.run(scaler, optimizer, model, 1)
        with reads as found:
            self.run(scaler, optimizer, model, 3, clips=clips)
        assert found == []

    @pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
    def test_are_none_with_masters_inside_of_it_either(self, clips, reads):
        model = network()
        model[0].half()
        model[0].register_forward_pre_hook(lambda _, inputs: inputs[0].half())
        model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        optimizer = ampatch.MixedPrecision(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        scaler = ampatch.GradScaler("cpu", init_scale=SCALE)
        self.run(scaler, optimizer, model, 1)
        with reads as found:
            self.run(scaler, optimizer, model, 3, clips=clips)
        assert found == []

    @pytest.mark.parametrize(
        ("make", "options"),
        [(functools.partial(torch.optim.SGD, lr=0.1), {}), (SGD, {"min_loss_scale": 1.0})],
        ids=["not-fused", "with-a-floor"],
    )
    def test_are_one_in_every_other_step(self, make, options, reads):
        model = network()
        optimizer, scaler = make(model.parameters()), ampatch.GradScaler("cpu", **options)
        with reads as found:
            self.run(scaler, optimizer, model, 3)
        assert len(found) == 3


class TestSkippedStep:
    @pytest.mark.parametrize("at", [0, 2], ids=["first-step", "third-step"])
    @every_fused_at_every_level
    @pytest.mark.covering(1)
    def test_leaves_everything_bit_for_bit_and_the_next_step_is_as_if_it_had_not_been(self, make, options, at):
        def run(skipping: bool) -> Any:
            model = network()
            optimizer = make(model.parameters())
            initialize(model, optimizer, **options)
            fired = hooked(optimizer)
            for index in range(4):
                if index == at and skipping:
                    optimizer.zero_grad()
                    backward(loss_of(model, index), optimizer, overflows=True)
                    before = everything(model, optimizer)
                    fired.clear()
                    optimizer.step()
                    assert_same_state(everything(model, optimizer), before)
                    by_itself = at > 0 or make in SKIP_FIRST_STEP_THEMSELVES
                    assert fired == (["before", "after"] if by_itself else [])
                    assert amp.step_was_skipped(optimizer)
                    assert amp.get_loss_scale() == SCALE / 2
                    amp.load_state_dict({"loss_scaler0": {"loss_scale": SCALE, "unskipped": 0}})
                optimizer.zero_grad()
                backward(loss_of(model, index), optimizer)
                optimizer.step()
                assert not amp.step_was_skipped(optimizer)
            result = everything(model, optimizer)
            amp.deinitialize()
            return result

        assert_same_state(run(skipping=True), run(skipping=False))

    @every_fused_at_every_level
    def test_is_what_it_is_with_exact_hooks(self, make, options):
        def run(exact_hooks: bool) -> Any:
            model = network()
            optimizer = make(model.parameters())
            initialize(model, optimizer, exact_hooks=exact_hooks, **options)
            told = []
            for index, overflows in enumerate([True, False, True, True, False, True, False]):
                optimizer.zero_grad()
                backward(loss_of(model, index), optimizer, overflows=overflows)
                optimizer.step()
                told.append((amp.step_was_skipped(optimizer), amp.skipped_steps(optimizer), amp.get_loss_scale()))
            assert [skipped for skipped, _, _ in told] == [True, False, True, True, False, True, False]
            result = [everything(model, optimizer), told]
            amp.deinitialize()
            return result

        assert_same_state(run(exact_hooks=False), run(exact_hooks=True))

    @every_level
    @pytest.mark.parametrize("exact_hooks", [False, True])
    def test_fires_step_hooks_unless_these_are_to_be_exact(self, exact_hooks, options):
        model = network()
        optimizer = SKIP_FIRST_STEP_THEMSELVES[-1](model.parameters())
        initialize(model, optimizer, exact_hooks=exact_hooks, **options)
        fired = hooked(optimizer)
        train(model, optimizer, True)
        assert fired == ([] if exact_hooks else ["before", "after"])
        assert amp.step_was_skipped(optimizer)
        fired.clear()
        train(model, optimizer, False)
        assert fired == ["before", "after"]

    @every_level
    def test_is_one_whichever_of_several_passes_overflowed(self, options):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, num_losses=2, **options)
        train(model, optimizer, False)
        for at in range(3):
            optimizer.zero_grad()
            for index in range(3):
                backward(loss_of(model, index), optimizer, loss_id=index % 2, overflows=index == at)
            before = everything(model, optimizer)
            fired = hooked(optimizer)
            optimizer.step()
            assert_same_state(everything(model, optimizer), before)
            assert fired == ["before", "after"]
            assert amp.step_was_skipped(optimizer)
            assert amp.skipped_steps(optimizer) == at + 1
        assert [amp.get_loss_scale(0), amp.get_loss_scale(1)] == [SCALE / 4, SCALE / 2]

    @every_level
    @pytest.mark.parametrize("other_fused", [True, False], ids=["both-by-themselves", "one-by-itself"])
    def test_is_made_by_both_of_two_optimizers_that_share_a_pass(self, other_fused, options, log):
        model = network()
        optimizers = [ADAM(model[0].parameters()), torch.optim.Adam(model[2].parameters(), fused=other_fused)]
        initialize(model, optimizers, verbosity=1, **options)

        def iterate(overflows: bool) -> list[bool]:
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(loss_of(model, 0), optimizers, overflows=overflows)
            for optimizer in optimizers:
                optimizer.step()
            return [amp.step_was_skipped(optimizer) for optimizer in optimizers]

        assert iterate(overflows=False) == [False, False]
        before = [everything(model, optimizer) for optimizer in optimizers]
        assert iterate(overflows=True) == [True, True]
        assert_same_state([everything(model, optimizer) for optimizer in optimizers], before)
        assert amp.get_loss_scale() == SCALE / 2
        assert log() == ["Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0"]
        assert iterate(overflows=False) == [False, False]

    @every_level
    @pytest.mark.parametrize("overflowing", [0, 1])
    def test_is_not_made_by_an_optimizer_that_the_pass_was_not_for(self, overflowing, options):
        model = network()
        parts = [model[0], model[2]]
        optimizers = [ADAM(part.parameters()) for part in parts]
        initialize(model, optimizers, **options)
        for overflow_now in (False, True, False):
            for index, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = sum(parameter.float().square().sum() for parameter in part.parameters())
                backward(loss, optimizer, overflows=overflow_now and index == overflowing)
            before = [everything(part, optimizer) for part, optimizer in zip(parts, optimizers, strict=True)]
            for optimizer in optimizers:
                optimizer.step()
            skipped = [amp.step_was_skipped(optimizer) for optimizer in optimizers]
            assert skipped == [overflow_now and index == overflowing for index in range(2)]
            for index in range(2):
                if skipped[index]:
                    assert_same_state(everything(parts[index], optimizers[index]), before[index])
                else:
                    assert not torch.equal(parts[index].weight, before[index][0][0])

    @pytest.mark.parametrize("overflows", [False, True], ids=["last-step-runs", "last-step-is-skipped"])
    def test_is_not_taken_for_the_last_if_the_news_of_it_comes_after_a_step_that_amp_decided_about(
        self, overflows, post, log
    ):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, **LEVELS["O1"])
        train(model, optimizer, False)
        post.delivers = False
        train(model, optimizer, not overflows)

        def closure() -> None:
            optimizer.zero_grad()
            backward(loss_of(model, 1), optimizer, overflows=overflows)

        optimizer.step(closure)
        assert amp.step_was_skipped(optimizer) is overflows
        assert amp.skipped_steps(optimizer) == 1
        assert len(log()) == 1

    @pytest.mark.parametrize("how", ["group", "checkpoint"])
    def test_is_made_where_groups_of_a_fused_optimizer_are_not_fused(self, how):
        model = network()
        if how == "group":
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "fused": False}]
            optimizer = ADAM(groups)
        else:
            plain = torch.optim.Adam(model.parameters())
            loss_of(model, 0).backward()
            plain.step()
            optimizer = ADAM(model.parameters())
            optimizer.load_state_dict(plain.state_dict())
        initialize(model, optimizer, **LEVELS["O1"])
        train(model, optimizer, False)
        before = everything(model, optimizer)
        train(model, optimizer, True)
        assert_same_state(everything(model, optimizer), before)
        assert amp.step_was_skipped(optimizer)

    @every_fused
    @pytest.mark.parametrize("made", ["before", "after"])
    def test_does_not_make_a_scheduler_warn_wherever_it_comes(self, made, make):
        # Warnings are errors here.
        for overflows in ([True, False, False], [False, True, False], [True, True, True]):
            model = network()
            optimizer = make(model.parameters())
            scheduler = lr_scheduler.StepLR(optimizer, 1) if made == "before" else None
            initialize(model, optimizer, **LEVELS["O2-float16"])
            scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1)
            for each in overflows:
                train(model, optimizer, each)
                scheduler.step()
            assert amp.skipped_steps(optimizer) == sum(overflows)
            amp.deinitialize()


class TestMessage:
    def message(self, scale: float, scaler: int = 0) -> str:
        return f"Gradient overflow. Skipping step, loss scaler {scaler} reducing loss scale to {scale}"

    @every_level
    def test_comes_once_for_each_overflow(self, options, log):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, **options)
        train(model, optimizer, False, True, False, True, True, False, False)
        assert log() == [self.message(SCALE / 2), self.message(SCALE / 4), self.message(SCALE / 8)]
        assert amp.skipped_steps(optimizer) == 3
        assert len(log()) == 3

    def test_comes_when_what_was_sent_arrives_and_tells_the_scale_of_then(self, log, post):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, scale_window=1, **LEVELS["O2-float16"])
        train(model, optimizer, False)
        post.delivers = False
        train(model, optimizer, True, False, False, True, False)
        assert log() == []
        post.delivers = True
        train(model, optimizer, False)
        # The scale has doubled after every clean step.
        assert log() == [self.message(SCALE), self.message(SCALE * 2)]
        train(model, optimizer, False, False)
        assert len(log()) == 2
        assert not amp.step_was_skipped(optimizer)
        assert amp.skipped_steps(optimizer) == 2

    def test_comes_before_its_time_if_somebody_asks(self, log, post):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, **LEVELS["O1"])
        post.delivers = False
        train(model, optimizer, False, True)
        assert log() == []
        assert amp.step_was_skipped(optimizer)
        assert log() == [self.message(SCALE / 2)]
        post.delivers = True
        train(model, optimizer, False)
        assert len(log()) == 1

    def test_is_for_each_scale_that_backed_off(self, log):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, num_losses=3, **LEVELS["O1"])
        train(model, optimizer, False)
        for loss_id, overflows in enumerate([True, False, True]):
            backward(loss_of(model, loss_id), optimizer, loss_id=loss_id, overflows=overflows)
        optimizer.step()
        assert amp.skipped_steps(optimizer) == 1
        assert log() == [self.message(SCALE / 2, 0), self.message(SCALE / 2, 2)]

    def test_says_so_where_hysteresis_keeps_the_scale(self, log):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, hysteresis=2, **LEVELS["O1"])
        train(model, optimizer, False, True, True, False)
        assert log() == [
            f"Gradient overflow. Skipping step, loss scaler 0 keeping loss scale at {SCALE}",
            self.message(SCALE / 2),
        ]

    def test_is_not_logged_at_verbosity_0(self, log):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, **LEVELS["O1"])
        train(model, optimizer, False, True, False)
        assert amp.skipped_steps(optimizer) == 1
        assert log() == []

    def test_of_the_last_step_comes_when_amp_is_taken_down(self, log, post):
        model = network()
        optimizer = ADAM(model.parameters())
        initialize(model, optimizer, verbosity=1, **LEVELS["O1"])
        train(model, optimizer, False, True)
        assert log() == []
        amp.deinitialize()
        assert log() == ["Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 128.0"]


class TestFloor:
    def initialize(self, model: nn.Module, optimizer: Any, **options: Any) -> None:
        initialize(model, optimizer, **{"init_scale": 4.0, "min_loss_scale": 1.0, "verbosity": 1, **options})

    def overflow(self, model: nn.Sequential, optimizer: Any) -> None:
        """Of two parameters only."""
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
            scaled_loss.backward()
            model[0].weight.grad[0, :2] = math.inf
            model[2].bias.grad[2] = math.nan
        optimizer.step()

    @every_fused_at_every_level
    def test_error_that_names_the_parameters_comes_with_the_overflow_after_it_was_reached(self, make, options, log):
        model = network()
        optimizer = make(model.parameters())
        self.initialize(model, optimizer, **options)
        train(model, optimizer, False)
        self.overflow(model, optimizer)
        train(model, optimizer, False)
        self.overflow(model, optimizer)
        assert amp.get_loss_scale() == 1
        train(model, optimizer, False)
        before = everything(model, optimizer)

        with pytest.raises(LossScaleError) as caught:
            self.overflow(model, optimizer)

        assert "loss scaler 0 is at its floor of 1" in str(caught.value)
        assert "0.weight, shape (6, 4), " in str(caught.value)
        assert str(caught.value).endswith("0 inf, 1 nan")
        assert_same_state(everything(model, optimizer), before)
        assert amp.skipped_steps(optimizer) == 3
        assert len(log()) == 2
        train(model, optimizer, False)
        assert not amp.step_was_skipped(optimizer)

    @every_level
    def test_error_comes_with_the_second_overflow_of_a_scale_that_begins_there(self, options):
        model = network()
        optimizer = ADAM(model.parameters())
        self.initialize(model, optimizer, init_scale=1.0, **options)
        train(model, optimizer, False)
        self.overflow(model, optimizer)
        with pytest.raises(LossScaleError, match=r"0\.weight"):
            self.overflow(model, optimizer)

    def test_error_comes_with_the_first_overflow_after_the_news_of_it(self, post):
        model = network()
        optimizer = ADAM(model.parameters())
        self.initialize(model, optimizer, **LEVELS["O2-float16"])
        train(model, optimizer, False)
        post.delivers = False
        for _ in range(4):
            self.overflow(model, optimizer)
        post.delivers = True
        with pytest.raises(LossScaleError, match=r"0\.weight"):
            self.overflow(model, optimizer)
        assert amp.skipped_steps(optimizer) == 5

    def test_that_is_known_only_after_the_clipping_leaves_no_gradient_scaled(self):
        """Then amp decides about the step, whose gradients `clip_grad_norm_` had left to the optimizer's kernel."""
        stepped = []
        for is_known_before in (True, False):
            model = network()
            optimizer = ADAM(model.parameters())
            self.initialize(model, optimizer, init_scale=2.0, **LEVELS["O1"])
            train(model, optimizer, False)
            self.overflow(model, optimizer)
            if is_known_before:
                assert amp.step_was_skipped(optimizer)
            optimizer.zero_grad()
            backward(loss_of(model, 0), optimizer, delay_unscale=True)
            amp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            stepped.append(everything(model, optimizer))
            amp.deinitialize()
        assert_same_state(*stepped)

    @every_level
    def test_error_comes_at_once_with_exact_hooks(self, options):
        model = network()
        optimizer = ADAM(model.parameters())
        self.initialize(model, optimizer, init_scale=1.0, exact_hooks=True, **options)
        train(model, optimizer, False)
        with pytest.raises(LossScaleError, match=r"0\.weight"):
            self.overflow(model, optimizer)

    def test_of_one_of_two_scales_leaves_the_other_to_back_off(self):
        model = network()
        optimizer = ADAM(model.parameters())
        self.initialize(model, optimizer, num_losses=2, **LEVELS["O1"])
        train(model, optimizer, False)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, 0), optimizer, loss_id=0, overflows=True)
            optimizer.step()
        for scale in (2, 1):
            optimizer.zero_grad()
            backward(loss_of(model, 0), optimizer, loss_id=1, overflows=True)
            optimizer.step()
            assert amp.get_loss_scale(1) == scale
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer, loss_id=1, overflows=True)
        with pytest.raises(LossScaleError, match="loss scaler 1 is at its floor"):
            optimizer.step()


@pytest.mark.gpu
@every_level
@pytest.mark.parametrize("name", ["SGD-momentum", "Adam", "AdamW"])
def test_three_steps_on_a_gpu_wait_for_nothing(name, options):
    model = network().cuda()
    batches = [torch.randn(5, 4, device="cuda") for _ in range(3)]
    optimizer = FUSED[name](model.parameters())
    initialize(model, optimizer, verbosity=1, **options)
    train(model, optimizer, False, True, False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch, overflows in zip(batches, (False, True, False), strict=True):
            optimizer.zero_grad()
            backward(model(batch).float().square().mean(), optimizer, overflows=overflows)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert amp.skipped_steps(optimizer) == 2
    assert amp.get_loss_scale() == SCALE / 4
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, earlier)


@pytest.mark.gpu
@every_level
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_clipping_the_models_own_gradients_on_a_gpu_waits_for_nothing(change, options):
    model = network().cuda()
    optimizer = ADAM(model.parameters())
    initialize(model, optimizer, **options)

    def step() -> None:
        optimizer.zero_grad()
        backward(loss_of(model, 0), optimizer)
        change(list(model.parameters()))
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()

    mode = torch.cuda.get_sync_debug_mode()
    try:
        train(model, optimizer, False)
        for _ in range(2):
            step()
            torch.cuda.set_sync_debug_mode(mode)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert amp.skipped_steps(optimizer) == 0

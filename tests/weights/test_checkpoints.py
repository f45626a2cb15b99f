"""Of checkpoints: saved by `torch.save`, read with `weights_only=True`, and gone on from in another process.

A run that was interrupted has to end with the bits of one that was not: weights, masters, optimizer state, loss scales.
Run as a script, this file is the other process: it goes on from all checkpoints of a folder.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, dtype_name
from optimizers import backward
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError

SCALE = 2.0**10
OVERFLOW = math.inf

# Every level in every half type that it has.
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    **{
        f"{level}-{dtype_name(half_dtype)}": {"opt_level": level, "half_dtype": half_dtype}
        for level in ("O1", "O2", "O3")
        for half_dtype in HALF_DTYPES
    },
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
}
TEMPORARY = ("split", "stochastic")
WITH_MASTERS = [name for name in LEVELS if name.startswith(("O2", "O5"))]

# Adam's usual epsilon is zero in float16, which is the type of its state at O3. No fused SGD: in the momentum of half
# parameters on the CPU, torch 2.13 leaves memory that nobody has set.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "AdamW-fused": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.01),
}
MOMENTUM = OPTIMIZERS["SGD"]

# Of twenty steps, ten on either side of the checkpoint. A window of three makes the scale's counter matter: there it
# stands at one, and from zero the scale would not grow twice before the last overflow.
STEPS, HALF_WAY = 20, 10
OVERFLOWS = (4, 5, 8, 15)
DYNAMIC = {"loss_scale": "dynamic", "init_scale": SCALE, "scale_window": 3}


class Network(nn.Module):
    """A bit of everything: tied weights, a frozen layer, batch statistics, a buffer that stays and one that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.inner.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 3)
        self.register_buffer("offset", torch.rand(16) / 10)
        self.register_buffer("mean", torch.rand(16))

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.norm(self.conv(images))).flatten(1)
        features = self.again(F.relu(self.inner(features)))
        if self.training:
            self.mean.mul_(0.9).add_(features.detach().mean(0) / 10)
        features = self.frozen(features - self.mean) + self.offset
        return self.head(self.dropout(F.relu(features)))


@functools.cache
def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def loss_of(model: nn.Module, index: int) -> Tensor:
    images, classes = batch(index)
    return F.cross_entropy(model(images).float(), classes)


class Run:
    """A network in training."""

    def __init__(
        self,
        level: str,
        make_optimizer: Callable[..., torch.optim.Optimizer] = MOMENTUM,
        *,
        seed: int = 0,
        saved: dict[str, Any] | None = None,
        when: str = "after",
        **options: Any,
    ) -> None:
        """With ``saved``, the run goes on from it, loaded before or after ``amp.initialize``."""
        torch.manual_seed(seed)
        self.model = Network()
        self.optimizer = make_optimizer(self.model.parameters())
        self.losses: list[float] = []
        if saved is not None and when == "before":
            self.load_parts(saved)
        amp.initialize(self.model, self.optimizer, verbosity=0, **LEVELS[level], **options)
        if saved is not None:
            if when == "after":
                self.load_parts(saved)
            amp.load_state_dict(saved["amp"])
            torch.set_rng_state(saved["rng"])

    def load_parts(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def backward(self, index: int, factor: float = 1.0, **options: Any) -> None:
        loss = loss_of(self.model, index)
        self.losses.append(loss.item())
        backward(loss * factor, self.optimizer, **options)

    def train(self, indices: Iterable[int], overflows: Iterable[int] = ()) -> None:
        for index in indices:
            self.optimizer.zero_grad()
            self.backward(index, OVERFLOW if index in overflows else 1.0)
            self.optimizer.step()

    def checkpoint(self) -> dict[str, Any]:
        """What a user saves."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def everything(self) -> dict[str, Any]:
        """All that may tell two runs apart, as a copy."""
        state = {
            **self.checkpoint(),
            "weights": [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())],
            "updated": [parameter.detach() for parameter in amp.master_params(self.optimizer)],
        }
        return copy.deepcopy(state)

    def assert_finite(self) -> None:
        assert all(tensor.isfinite().all() for tensor in self.everything()["weights"])
        assert all(map(math.isfinite, self.losses))

    def assert_copies_agree(self) -> None:
        """Every parameter is what the optimizer updates, rounded to its type."""
        for parameter, updated in zip(self.model.parameters(), amp.master_params(self.optimizer), strict=True):
            assert_same_bits(parameter.detach(), updated.detach().to(parameter.dtype))


def trained(level: str, **options: Any) -> Run:
    """Returns a run after three steps."""
    run = Run(level, **options)
    run.train(range(3))
    return run


def through_a_file(state: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def overflows_of(options: dict[str, Any]) -> tuple[int, ...]:
    return OVERFLOWS if options else ()


# The other process


def go_on(folder: Path) -> None:
    """Goes on from every checkpoint of a folder, loaded before ``amp.initialize`` and after it."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the loss of a skipped step is")
    for path in sorted(folder.glob("*.saved")):
        for when in ("before", "after"):
            saved = torch.load(path, weights_only=True)  # anew: an optimizer goes on in the tensors that it loads
            make_optimizer, options = OPTIMIZERS[saved["make_optimizer"]], saved["options"]
            run = Run(saved["level"], make_optimizer, seed=1, saved=saved, when=when, **options)
            run.train(range(HALF_WAY, STEPS), overflows_of(options))
            torch.save({**run.everything(), "losses": run.losses}, path.with_suffix(f".{when}"))
            amp.deinitialize()


# What pytest runs


def id_of(way: tuple[str, dict[str, Any]]) -> str:
    return f"{way[0]}-{'dynamic' if way[1] else 'default'}"


# The fast one exercises most: state for every parameter, and steps that are skipped without the host knowing.
FAST = ("AdamW-fused", DYNAMIC)
SLOW = [("AdamW", DYNAMIC), ("SGD", DYNAMIC), ("SGD", {})]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FAST, marks=[pytest.mark.slow, pytest.mark.either_way]),
        *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW),
    ],
    ids=id_of,
)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder with what the other process came to; and by level, what the run without a break did."""
    make_optimizer, options = request.param
    folder = tmp_path_factory.mktemp("checkpoints")
    whole = {}
    for level in LEVELS:
        run = Run(level, OPTIMIZERS[make_optimizer], **options)
        run.train(range(HALF_WAY), overflows_of(options))
        told = {"level": level, "make_optimizer": make_optimizer, "options": options}
        torch.save({**run.checkpoint(), **told}, folder / f"{level}.saved")
        run.train(range(HALF_WAY, STEPS), overflows_of(options))
        whole[level] = {**run.everything(), "losses": run.losses[HALF_WAY:]}
        assert amp.skipped_steps(run.optimizer) == len(overflows_of(options))
        amp.deinitialize()
    command, found = [sys.executable, __file__, str(folder)], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert (other.returncode, other.stderr) == (0, "")
    return folder, whole


class TestResuming:
    """Twenty steps in one go; and ten, a checkpoint, another process, and the other ten."""

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_run_resumed_in_another_process_ends_with_the_same_bits(self, level, when, runs):
        folder, whole = runs
        assert_same_state(torch.load(folder / f"{level}.{when}", weights_only=True), whole[level])
        assert all(tensor.isfinite().all() for tensor in (*whole[level]["weights"], *whole[level]["updated"]))


@functools.cache
def _checkpoint_at(level: str) -> bytes:
    run, file = trained(level, make_optimizer=OPTIMIZERS["AdamW"], init_scale=SCALE), io.BytesIO()
    torch.save(run.checkpoint(), file)
    amp.deinitialize()
    return file.getvalue()


def checkpoint_at(level: str) -> dict[str, Any]:
    """What a run of three steps saved at a level, with Adam; read anew."""
    return torch.load(io.BytesIO(_checkpoint_at(level)), weights_only=True)


def rounded(name: str, value: Tensor, run: Run, level: str) -> Tensor:
    """What the state dict of a run says of a value after it was loaded: float32, rounded where it is kept in half only.

    That is a parameter that nobody updates in float32; float32 stands behind a buffer at every level.
    """
    parameter = dict(run.model.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None or (level in WITH_MASTERS and parameter.requires_grad):
        return value
    return value.to(parameter.dtype).float()


PAIRS = [
    # Masters on one side at least; the slow ones are all the others.
    pytest.param(there, here, marks=[] if "O2-float16" in (there, here) else pytest.mark.slow)
    for there in LEVELS
    for here in LEVELS
]


class TestOtherLevels:
    @pytest.mark.parametrize(("there", "here"), PAIRS)
    def test_every_level_loads_checkpoints_of_every_other(self, there, here):
        saved, unused = checkpoint_at(there), checkpoint_at(there)
        run = Run(here, OPTIMIZERS["AdamW"], seed=1, saved=saved)

        found = run.model.state_dict()
        assert list(found) == list(unused["model"])
        for name, value in unused["model"].items():
            assert_same_bits(found[name], rounded(name, value, run, here))
        for (name, _), updated in zip(run.model.named_parameters(), amp.master_params(run.optimizer), strict=True):
            assert_same_bits(updated.detach().float(), found[name])
        run.assert_copies_agree()

        state = run.optimizer.state_dict()["state"]
        assert state.keys() == unused["optimizer"]["state"].keys()
        for index, updated in enumerate(amp.master_params(run.optimizer)):
            for key, value in unused["optimizer"]["state"].get(index, {}).items():
                assert_same_bits(state[index][key], value if key == "step" else value.to(updated.dtype))

        scale, scales_here = unused["amp"]["loss_scaler0"], here in ("O1-float16", "O2-float16")
        scale_from_there = scale["loss_scale"] if scale.get("dynamic", True) else 2.0**16
        assert amp.get_loss_scale() == (scale_from_there if scales_here else 1)

        before = run.everything()
        run.train(range(3, 5))
        run.assert_finite()
        assert not torch.equal(run.model.head.weight, before["weights"][-4])

    @pytest.mark.parametrize("here", LEVELS)
    def test_loading_before_initialize_is_as_after_it(self, here):
        there = "O2-bfloat16"
        run = Run(here, OPTIMIZERS["AdamW"], seed=1, saved=checkpoint_at(there))
        after = run.everything()
        amp.deinitialize()
        run = Run(here, OPTIMIZERS["AdamW"], seed=1, saved=checkpoint_at(there), when="before")
        assert_same_state(run.everything(), after)


@pytest.mark.parametrize("options", [{}, {"master_weights": False}, *({"master_weights": kind} for kind in TEMPORARY)])
@pytest.mark.parametrize("kept", [False, True], ids=["saved", "keep_vars"])
def test_a_tied_weight_is_one_tensor_in_a_state_dict_and_a_new_one_in_the_next(options, kept):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = MOMENTUM(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)
    saved: dict[str, Any] = {}
    for _ in range(2):
        model.state_dict(destination=saved, prefix="model.", keep_vars=kept)
        one, other = saved.values()
        assert one.data_ptr() == other.data_ptr() != model[0].weight.data_ptr()
        assert_same_bits(one.detach(), model.state_dict()["0.weight"])
        backward(model(torch.tensor([1, 2])).float().square().mean(), optimizer)
        optimizer.step()


@pytest.mark.parametrize(
    "duplicate", [functools.partial(through_a_file, weights_only=False), copy.deepcopy], ids=["torch.save", "deepcopy"]
)
@pytest.mark.parametrize("level", LEVELS)
class TestCopies:
    """A model and its optimizer in one piece, rather than their state dicts."""

    @pytest.mark.covering(1)
    def test_a_copied_model_and_optimizer_are_an_ordinary_pair(self, level, duplicate):
        run = trained(level)
        before = run.everything()
        images, _ = batch(3)
        run.model.eval()
        model, optimizer = duplicate((run.model, run.optimizer))
        # With masters a deep copy is float32, as an average of weights has to be, and so computes in float32.
        is_float32 = duplicate is copy.deepcopy and level.startswith(("O2", "O5"))
        if is_float32:
            assert_same_state(model.state_dict(), run.model.state_dict())
        else:
            assert_same_state([*model.parameters(), *model.buffers()], before["weights"])
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        assert list(optimizer.state) == [parameter for parameter in model.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(model.parameters()):  # without a master, the state is of the parameter's type
            for key, value in before["optimizer"]["state"].get(index, {}).items():
                assert_same_bits(optimizer.state[parameter][key], value.to(parameter.dtype))
        if is_float32:
            torch.testing.assert_close(model(images), run.model(images), rtol=0.05, atol=0.05)
        else:
            assert_same_bits(model(images), run.model(images))
        model.train()
        loss_of(model, 3).backward()
        optimizer.step()
        assert not torch.equal(model.head.weight, run.model.head.weight)
        torch.set_rng_state(before["rng"])  # dropout has moved it on
        assert_same_state(run.everything(), before)

    @pytest.mark.covering(1)
    def test_a_copied_model_and_optimizer_go_on_under_amp(self, level, duplicate):
        run = trained(level)
        before = copy.deepcopy([tensor.detach() for tensor in run.model.parameters()])
        model, optimizer = duplicate((run.model, run.optimizer))
        amp.deinitialize()
        run.model, run.optimizer = model, optimizer
        amp.initialize(model, optimizer, verbosity=0, **LEVELS[level])
        assert_same_state([tensor.detach() for tensor in model.parameters()], before)
        run.train(range(3, 5))
        run.assert_copies_agree()
        run.assert_finite()
        assert not torch.equal(model.head.weight, before[-2])


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def trained_scaler(factors: Iterable[float], **options: Any) -> torch.amp.GradScaler:
    """A `GradScaler` that has met these factors of its loss."""
    scaler = torch.amp.GradScaler("cpu", **options)
    model, optimizer = linear()
    for factor in factors:
        step_with(scaler, model, optimizer, factor)
    return scaler


def step_with(scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Any, factor: float) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 2)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


CLEAN, SPOILT = 1.0, OVERFLOW
GRAD_SCALER = {**torch.amp.GradScaler("cpu", init_scale=8.0).state_dict(), "_growth_tracker": 7}


def scalers(*states: tuple[float, int]) -> dict[str, dict[str, float]]:
    return {f"loss_scaler{index}": {"loss_scale": s, "unskipped": n} for index, (s, n) in enumerate(states)}


class TestLoadingScales:
    def initialize(self, **options: Any) -> None:
        amp.initialize(*linear(), **{"opt_level": "O0", "loss_scale": "dynamic", "verbosity": 0, **options})

    @pytest.mark.parametrize(
        ("saved", "expected"),
        [
            (scalers((32768.0, 17), (128.0, 0)), scalers((32768.0, 17), (128.0, 0))),
            (
                {"loss_scaler1": {**GRAD_SCALER, "scale": 16.0}, "loss_scaler0": GRAD_SCALER},
                scalers((8.0, 7), (16.0, 7)),
            ),
        ],
        ids=["apex", "grad scalers by name"],
    )
    def test_scales_of_several_losses_are_loaded(self, saved, expected):
        self.initialize(num_losses=2)
        amp.load_state_dict(through_a_file(saved))
        assert amp.state_dict() == expected

    def test_the_state_of_a_grad_scaler_goes_on_as_it_would_have(self):
        (model, optimizer), (plain, plain_optimizer) = linear(), linear()
        theirs = trained_scaler([CLEAN, SPOILT, CLEAN, CLEAN], init_scale=SCALE, growth_interval=3)
        amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", scale_window=3, verbosity=0)
        amp.load_state_dict(theirs.state_dict())
        scales = []
        for factor in [CLEAN, SPOILT, CLEAN, CLEAN, SPOILT, CLEAN, CLEAN, CLEAN, CLEAN]:
            optimizer.zero_grad()
            backward(model(torch.ones(3, 2)).sum() * factor, optimizer)
            optimizer.step()
            step_with(theirs, plain, plain_optimizer, factor)
            scales.append(amp.get_loss_scale())
            saved = theirs.state_dict()
            assert amp.state_dict() == scalers((saved["scale"], saved["_growth_tracker"]))
        assert len(set(scales)) == 3

    def test_a_loss_scaler_loads_the_state_of_a_grad_scaler(self):
        scaler = amp.LossScaler()
        scaler.load_state_dict(GRAD_SCALER)
        assert scaler.state_dict() == {"loss_scale": 8.0, "unskipped": 7}

    def test_one_grad_scaler_is_loaded_for_the_first_of_several_losses(self):
        self.initialize(num_losses=2, init_scale=SCALE)
        with pytest.warns(AmpWarning, match="there are loss_scaler0, loss_scaler1; loaded: loss_scaler0. Others stay"):
            amp.load_state_dict(GRAD_SCALER)
        assert amp.state_dict() == scalers((8.0, 7), (SCALE, 0))

    def test_a_disabled_grad_scaler_loads_nothing_and_warns(self):
        self.initialize(init_scale=SCALE)
        with pytest.warns(AmpWarning, match="holds no loss scaler, and there is loss_scaler0; loaded: none"):
            amp.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
        assert amp.state_dict() == scalers((SCALE, 0))

    @pytest.mark.parametrize(
        ("saved", "expected"),
        [(2.0**30, 2.0**20), (2.0**-3, 4.0), (2.0**10, 2.0**10)],
        ids=["above", "below", "within"],
    )
    def test_a_loaded_scale_comes_within_the_bounds_of_the_settings(self, saved, expected):
        """As after the next step, which would be skipped in vain, or underflow, at what the bounds are to exclude."""
        self.initialize(min_loss_scale=4.0, max_loss_scale=2.0**20)
        for state in (scalers((saved, 1)), {**GRAD_SCALER, "scale": saved}):
            amp.load_state_dict(state)
            assert amp.get_loss_scale() == expected

    def test_a_static_scale_stays_and_a_difference_is_logged(self, caplog):
        self.initialize(loss_scale=128.0)
        with caplog.at_level("INFO", logger="ampatch"):
            amp.load_state_dict({**GRAD_SCALER, "growth_interval": 100})
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7, "dynamic": False}}
        assert not caplog.messages
        amp.deinitialize()
        self.initialize(loss_scale=128.0, verbosity=1)
        caplog.clear()
        with caplog.at_level("INFO", logger="ampatch"):
            amp.load_state_dict(scalers((128.0, 3)))
            assert not caplog.messages
            amp.load_state_dict(scalers((64.0, 3)))
        assert caplog.messages == ["loss_scaler0 was saved at 64, and is static here: 128"]

    @pytest.mark.parametrize("verbosity", [0, 1])
    def test_a_saved_static_scale_leaves_a_dynamic_one_and_is_logged(self, caplog, verbosity):
        self.initialize(init_scale=SCALE, verbosity=verbosity)
        caplog.clear()
        with caplog.at_level("INFO", logger="ampatch"):
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7, "dynamic": False}})
        assert amp.state_dict() == scalers((SCALE, 0))
        told = "loss_scaler0 was saved with a static scale, and is dynamic here: it stays as it is."
        assert caplog.messages == [told] * verbosity

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"growth_interval": 100}, r"had growth_interval=100 \(2000 here\), which is not loaded"),
            ({"growth_factor": 4.0}, r"had growth_factor=4.0 \(2 here\), which"),
            ({"backoff_factor": 0.25}, r"had backoff_factor=0.25 \(0.5 here\), which"),
        ],
        ids=["interval", "growth", "backoff"],
    )
    def test_other_settings_of_a_grad_scaler_are_not_loaded_with_a_warning(self, options, told):
        self.initialize()
        with pytest.warns(AmpWarning, match=told):
            amp.load_state_dict(torch.amp.GradScaler("cpu", init_scale=16.0, **options).state_dict())
        assert amp.state_dict() == scalers((16.0, 0))

    @pytest.mark.parametrize(
        ("saved", "message"),
        [
            (
                {**GRAD_SCALER, **scalers((1.0, 0))},
                r"unexpected keys \['scale', .*; expected loss_scaler0, .*GradScaler",
            ),
            ({**GRAD_SCALER, "loss_scale": 8.0, "unskipped": 0}, r"unexpected keys \['scale', .*'unskipped'\]"),
            ({"loss_scale": 8.0, "unskipped": 0}, r"keys \['loss_scale', 'unskipped'\]; expected loss_scaler0"),
            ({"model": {}, "amp": scalers((8.0, 0))}, r"\['model', 'amp'\].*give the part that amp.state_dict\(\) ret"),
            (
                {"loss_scaler0": {**GRAD_SCALER, "unskipped": 0}},
                r"unexpected keys \['scale', .*; expected loss_scale, ",
            ),
            ({"loss_scaler0": {}}, r"lacks \['loss_scale', 'unskipped'\]"),
            ({"scale": 8.0}, r"lacks \['_growth_tracker'\]; expected scale, _growth_tracker"),
            ({**GRAD_SCALER, "scale": 0.0}, r"not sound: scale is 0.0; expected a number from"),
            ({**GRAD_SCALER, "scale": math.nan}, "not sound: scale is nan"),
            ({**GRAD_SCALER, "scale": torch.ones(2)}, r"not sound: scale is tensor\(\[1., 1.\]\)"),
            ({**GRAD_SCALER, "_growth_tracker": -1}, "not sound: _growth_tracker is -1"),
            ({**GRAD_SCALER, "_growth_tracker": 1.5}, "not sound: _growth_tracker is 1.5"),
            ({**GRAD_SCALER, "growth_interval": "often"}, "not sound: growth_interval is 'often'"),
            ({**GRAD_SCALER, "growth_factor": torch.ones(2)}, "not sound: growth_factor is tensor"),
            ([GRAD_SCALER], r"found list; expected .* amp.state_dict\(\) returned, or that of a torch.amp.GradScaler"),
            (3, "found int; expected"),
            (None, "found NoneType; expected"),
            ({"loss_scaler0": {"loss_scale": "big", "unskipped": 0}}, "not sound: loss_scale is 'big'"),
            ({"loss_scaler0": None}, "found NoneType as the state of a loss scaler"),
            ({0: scalers((8.0, 0))["loss_scaler0"]}, r"unexpected keys \[0\]"),
        ],
        ids=lambda value: "" if isinstance(value, str) else None,
    )
    def test_scales_that_make_no_sense_are_refused_and_none_is_loaded(self, saved, message):
        self.initialize(num_losses=2, init_scale=SCALE)
        before = amp.state_dict()
        with pytest.raises(OptionError, match=message) as caught:
            amp.load_state_dict(saved)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert amp.state_dict() == before


@pytest.fixture
def checkpointed(level: str) -> bytes:
    """The file of a level, made before the test sets up amp for itself."""
    return _checkpoint_at(level)


@pytest.mark.usefixtures("checkpointed")
@pytest.mark.parametrize("level", ["O1-bfloat16", "O2-float16", "O3-bfloat16"])
class TestCheckpointsThatDoNotFit:
    def test_a_checkpoint_of_another_model_or_optimizer_changes_nothing(self, level):
        other, run = nn.Sequential(nn.Linear(2, 2)), trained(level)
        before = run.everything()
        with pytest.raises(RuntimeError, match=r"(?s)Missing key\(s\) .*Unexpected key\(s\)"):
            run.model.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            run.optimizer.load_state_dict(MOMENTUM(other.parameters()).state_dict())
        assert_same_state(run.everything(), before)
        run.train([3])
        run.assert_copies_agree()

    def test_a_value_that_does_not_fit_leaves_weights_and_masters_in_step(self, level):
        """What fits is loaded by torch before it raises for what does not."""
        run = trained(level)
        before = run.everything()["model"]
        saved = checkpoint_at(level)["model"]
        saved["head.weight"], saved["frozen.weight"] = torch.ones(3, 3), "no tensor"
        del saved["head.bias"]
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*head.bias.*frozen.weight.*size mismatch"):
            run.model.load_state_dict(saved)
        found = run.model.state_dict()
        for name, value in found.items():
            stayed = name in ("head.weight", "head.bias", "frozen.weight")
            assert_same_bits(value, before[name] if stayed else rounded(name, saved[name], run, level))
        run.assert_copies_agree()
        run.train([3])
        run.assert_copies_agree()
        run.assert_finite()


def rename(saved: dict[str, Any], old: str, new: str) -> None:
    if old in saved:
        saved[new] = saved.pop(old)


class Renaming(nn.Linear):
    """A layer whose matrix has another name in checkpoints, by overriding torch's methods."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        rename(destination, f"{prefix}weight", f"{prefix}matrix")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        rename(state_dict, f"{prefix}matrix", f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def hook_names(layer: nn.Module) -> None:
    """The same by hooks."""

    def after_save(_: nn.Module, saved: dict[str, Any], prefix: str, __: object) -> None:
        rename(saved, f"{prefix}weight", f"{prefix}matrix")

    def before_load(_: nn.Module, saved: dict[str, Any], prefix: str, *__: object) -> None:
        rename(saved, f"{prefix}matrix", f"{prefix}weight")

    layer.register_state_dict_post_hook(after_save)
    layer.register_load_state_dict_pre_hook(before_load)


def renaming(level: str, way: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model under amp whose first layer renames its matrix, by hooks from before or after ``amp.initialize``."""
    torch.manual_seed(0)
    model = nn.Sequential((Renaming if way == "methods" else nn.Linear)(4, 3), nn.BatchNorm1d(3))
    optimizer = MOMENTUM(model.parameters())
    if way == "hooks-before":
        hook_names(model[0])
    amp.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    if way == "hooks-after":
        hook_names(model[0])
    return model, optimizer


def load_parts(run: Run, saved: dict[str, Any], *names: str) -> None:
    for name in names:
        {"model": run.model, "optimizer": run.optimizer, "amp": amp}[name].load_state_dict(saved[name])


def load_under(mode: Callable[[], Any], run: Run, saved: dict[str, Any]) -> None:
    with mode():
        load_parts(run, saved, "model", "optimizer", "amp")


# Ways to load a checkpoint, which is read anew each time.
LOADS: dict[str, Callable[[Run, Callable[[], dict[str, Any]]], object]] = {
    "optimizer first": lambda run, read: load_parts(run, read(), "optimizer", "amp", "model"),
    "scale first": lambda run, read: load_parts(run, read(), "amp", "optimizer", "model"),
    "twice": lambda run, read: [load_parts(run, read(), "model", "optimizer", "amp") for _ in range(2)],
    "no_grad": lambda run, read: load_under(torch.no_grad, run, read()),
    "inference_mode": lambda run, read: load_under(torch.inference_mode, run, read()),
}


@pytest.mark.usefixtures("checkpointed")
@pytest.mark.parametrize("level", ["O1-bfloat16", "O2-float16", "O3-float16", "O5"])
class TestLoading:
    @pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
    @pytest.mark.covering(1)
    def test_loading_in_any_order_twice_or_without_gradients_is_as_usual(self, level, load):
        usual = Run(level, OPTIMIZERS["AdamW"], seed=1, saved=checkpoint_at(level))
        usual.train([3])
        expected = usual.everything()
        amp.deinitialize()
        run = Run(level, OPTIMIZERS["AdamW"], seed=1)
        run.train([7, 8])
        load(run, lambda: checkpoint_at(level))
        torch.set_rng_state(checkpoint_at(level)["rng"])
        run.train([3])
        assert_same_state(run.everything(), expected)

    def test_loading_between_backward_and_step_leaves_the_gradients(self, level):
        run = Run(level, init_scale=SCALE)
        run.train(range(2))
        run.optimizer.zero_grad()
        for index in (2, 3):  # accumulates
            run.backward(index)
        updated = list(amp.master_params(run.optimizer))
        gradients = copy.deepcopy([tensor.grad for tensor in updated])
        run.model.load_state_dict(checkpoint_at(level)["model"])
        assert_same_state([tensor.grad for tensor in amp.master_params(run.optimizer)], gradients)

        # By hand: what was loaded takes a step along what was accumulated before.
        twins = [nn.Parameter(tensor.detach().clone(), tensor.requires_grad) for tensor in updated]
        by_hand = MOMENTUM(twins)
        by_hand.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        by_hand.step()
        run.optimizer.step()
        assert_same_state(updated, twins)
        run.assert_copies_agree()

    def test_loading_between_a_delayed_and_a_last_pass_leaves_gradients(self, level):
        def accumulate(delay: bool) -> dict[str, Any]:
            run = Run(level, loss_scale=SCALE)
            run.train(range(2))
            run.backward(2, delay_unscale=delay)
            run.model.load_state_dict(checkpoint_at(level)["model"])
            run.backward(3)
            run.optimizer.step()
            run.assert_copies_agree()
            state = run.everything()
            amp.deinitialize()
            return state

        accumulated, delayed = accumulate(delay=False), accumulate(delay=True)
        torch.testing.assert_close(delayed["updated"], accumulated["updated"], rtol=0.01, atol=0.001)

    def test_a_scale_loaded_between_passes_counts_from_the_next_step_on(self, level):
        found = []
        for scale in (SCALE, 8.0):
            run = Run(level, **DYNAMIC)
            run.backward(0, delay_unscale=True)
            amp.load_state_dict(scalers((scale, 0)))
            run.backward(1)
            found.append(copy.deepcopy([master.grad for master in amp.master_params(run.optimizer)]))
            run.optimizer.step()
            assert not amp.step_was_skipped(run.optimizer)
            run.assert_copies_agree()
            assert amp.get_loss_scale() == scale
            amp.deinitialize()
        assert_same_state(*found)

    def test_loading_some_keys_leaves_the_others(self, level):
        run = Run(level)
        run.train(range(2))
        before = run.everything()["model"]
        saved = checkpoint_at(level)["model"]
        kept = [name for name in saved if name.startswith("head") or name == "offset"]
        partial = {name: value for name, value in saved.items() if name not in kept} | {"foreign": torch.ones(2)}
        result = run.model.load_state_dict(partial, strict=False)
        assert (sorted(result.missing_keys), result.unexpected_keys) == (sorted(kept), ["foreign"])
        for name, value in run.model.state_dict().items():
            assert_same_bits(value, before[name] if name in kept else rounded(name, saved[name], run, level))
        run.assert_copies_agree()
        run.train([2])
        run.assert_copies_agree()

    @pytest.mark.parametrize("way", ["hooks-before", "hooks-after", "methods"])
    def test_keys_that_the_user_renames_are_saved_in_float32_and_set_both_copies(self, level, way):
        model, optimizer = renaming(level, way)
        saved = model.state_dict()
        assert set(saved) >= {"0.matrix", "0.bias"}
        assert "0.weight" not in saved
        assert_same_bits(saved["0.matrix"], next(amp.master_params(optimizer)).detach().float())
        values = torch.rand(3, 4)
        model.load_state_dict({**model.state_dict(), "0.matrix": values})
        updated = next(amp.master_params(optimizer))
        assert_same_bits(model[0].weight.detach(), values.to(model[0].weight.dtype))
        model(torch.rand(3, 4))  # brings the two in step
        assert_same_bits(updated.detach(), values.to(updated.dtype))

    def test_loading_through_a_prefix_that_hooks_add_is_exact(self, level):
        """On the outermost module, as wrappers for several processes have them."""
        run = Run(level)

        def after_save(_: nn.Module, saved: dict[str, Any], prefix: str, __: object) -> None:
            for name in list(saved):
                saved[f"module.{name}"] = saved.pop(name)

        def before_load(_: nn.Module, saved: dict[str, Any], *__: object) -> None:
            for name in list(saved):
                saved[name.removeprefix("module.")] = saved.pop(name)

        run.model.register_state_dict_post_hook(after_save)
        run.model.register_load_state_dict_pre_hook(before_load)
        assert all(name.startswith("module.") for name in run.model.state_dict())
        saved = checkpoint_at(level)["model"]
        run.model.load_state_dict({f"module.{name}": value for name, value in saved.items()})
        found = run.model.state_dict()
        for name, value in saved.items():
            assert_same_bits(found[f"module.{name}"], rounded(name, value, run, level))

    @pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector-of-one"])
    def test_loading_a_scalar_parameter_is_exact(self, level, shape):
        """From a vector of one, too, as torch takes it, since that is how scalars were saved once."""
        model = nn.Linear(2, 1)
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        optimizer = MOMENTUM(model.parameters())
        amp.initialize(model, optimizer, verbosity=0, **LEVELS[level])
        value = torch.full(shape, 0.1)
        model.load_state_dict({**model.state_dict(), "temperature": value})
        wanted = value.to(next(amp.master_params(optimizer)).dtype).float().reshape(())
        assert_same_bits(model.state_dict()["temperature"], wanted)


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))

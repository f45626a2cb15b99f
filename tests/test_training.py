"""Of whole training runs: small networks learn under amp what they learn in float32."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import amp

OVERFLOW = math.inf

O1_FLOAT16 = {"opt_level": "O1", "half_dtype": torch.float16}
O1_BFLOAT16 = {"opt_level": "O1", "half_dtype": torch.bfloat16}
O1_BFLOAT16_DYNAMIC = {**O1_BFLOAT16, "loss_scale": "dynamic"}
O4 = {"opt_level": "O4"}
LEVELS = {
    "O1-float16": O1_FLOAT16,
    "O1-bfloat16": O1_BFLOAT16,
    "O1-bfloat16-dynamic": O1_BFLOAT16_DYNAMIC,
    "O4": O4,
}

# Without casts, so that a run has the bits of one in float32.
UNCAST = {"opt_level": "O0", "loss_scale": "dynamic"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class Recurrent(nn.Module):
    """Reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.recurrent(images.squeeze(1))
        return self.head(states[:, -1])


class Attentive(nn.Module):
    """Attends to the lines of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(images.squeeze(1)).mean(1))


NETWORKS = {"mlp": mlp, "cnn": cnn, "lstm": Recurrent, "transformer": Attentive}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Noisy images, in which one quarter is brighter than the others: the class is which."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        classes = torch.randint(4, (16,), generator=generator)
        images = torch.randn(16, 1, 8, 8, generator=generator)
        for image, quarter in zip(images, classes.tolist(), strict=True):
            image[0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 1.5
        found.append((images, classes))
    return found


class Run:
    """A network in training; without options for amp in plain float32."""

    def __init__(
        self,
        network: Callable[[], nn.Module],
        options: dict[str, Any] | None,
        make_optimizer: Callable[..., Any] = torch.optim.AdamW,
    ) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.7)
        self.with_amp = options is not None
        if options is not None:
            amp.initialize(self.model, self.optimizer, verbosity=0, **options)
        self.losses: list[float] = []

    def step(self, images: Tensor, classes: Tensor, factor: float = 1) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), classes)
        if self.with_amp:
            with amp.scale_loss(loss * factor, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            (loss * factor).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())

    def train(self, data: Iterable[tuple[Tensor, Tensor]]) -> float:
        """The mean loss of the last ten steps."""
        for images, classes in data:
            self.step(images, classes)
        return sum(self.losses[-10:]) / 10

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class TestLearning:
    @pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
    @pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
    @pytest.mark.covering(1)
    def test_ends_at_the_loss_of_float32(self, network, options):
        data = batches(40)
        plain = Run(network, None)
        expected = plain.train(data)
        assert expected < 0.6 * plain.losses[0]

        run = Run(network, options)
        found = run.train(data)

        assert found == pytest.approx(expected, rel=0.05, abs=0.01)
        assert all(parameter.dtype is torch.float32 for parameter in run.model.parameters())
        assert amp.cast_counts().casts > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
    def test_with_accumulation_clipping_and_an_averaged_copy(self, options):
        def train(with_amp: bool) -> tuple[float, nn.Module]:
            torch.manual_seed(0)
            model = cnn()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if with_amp:
                amp.initialize(model, optimizer, verbosity=0, **options)
            average = copy.deepcopy(model)
            data = batches(60)
            for first, second in zip(data[0:50:2], data[1:50:2], strict=True):
                for images, classes in (first, second):
                    loss = F.cross_entropy(model(images), classes) / 2
                    if with_amp:
                        with amp.scale_loss(loss, optimizer, delay_unscale=images is first[0]) as scaled_loss:
                            scaled_loss.backward()
                    else:
                        loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(parameter, 0.3)
            average.train()
            with torch.no_grad():
                losses = [F.cross_entropy(average(images), classes).item() for images, classes in data[50:]]
            return sum(losses) / len(losses), model

        expected, _ = train(with_amp=False)
        found, model = train(with_amp=True)
        assert expected < 0.5
        assert found == pytest.approx(expected, rel=0.05, abs=0.01)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


class TestOverflow:
    @pytest.mark.parametrize("at", [{0}, {3}, {0, 1, 5}], ids=["first", "fourth", "several"])
    @pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
    def test_run_has_the_bits_of_one_that_leaves_the_same_steps_out(self, make_optimizer, at):
        data = batches(8)
        run, plain = Run(mlp, UNCAST, make_optimizer), Run(mlp, None, make_optimizer)
        for index, (images, classes) in enumerate(data):
            run.step(images, classes, OVERFLOW if index in at else 1)
            if index in at:
                plain.scheduler.optimizer._opt_called = True
                plain.scheduler.step()
            else:
                plain.step(images, classes)
        assert amp.skipped_steps(run.optimizer) == len(at)
        assert_same_bits(run.weights(), plain.weights())

    @pytest.mark.parametrize("options", [O1_FLOAT16, O1_BFLOAT16_DYNAMIC], ids=["float16", "bfloat16"])
    @pytest.mark.parametrize("network", [mlp, cnn])
    @pytest.mark.covering(1)
    def test_is_got_over_at_o1(self, network, options):
        data = batches(40)
        expected = Run(network, None).train(data)
        run = Run(network, options)
        for index, (images, classes) in enumerate(data):
            run.step(images, classes, OVERFLOW if index % 10 == 3 else 1)
        assert amp.skipped_steps(run.optimizer) == 4
        assert run.weights().isfinite().all()
        assert sum(run.losses[-10:]) / 10 == pytest.approx(expected, abs=0.1)

    def test_of_a_scale_that_is_too_large_finds_one_that_fits(self):
        # 2**24 times a gradient of 1/16 is beyond float16; no overflow is injected here.
        run = Run(cnn, {**O1_FLOAT16, "init_scale": 2.0**24})
        run.train(batches(20))
        skipped = amp.skipped_steps(run.optimizer)
        assert 0 < skipped < 20
        assert amp.get_loss_scale() == 2.0 ** (24 - skipped)
        assert run.losses[-1] < run.losses[0]


class TestResuming:
    @pytest.mark.parametrize("options", [UNCAST, *LEVELS.values()], ids=["O0-dynamic", *LEVELS])
    def test_from_a_checkpoint_gives_the_bits_of_the_uninterrupted_run(self, options):
        data = batches(8)
        factors = [1, OVERFLOW, 1, 1, OVERFLOW, 1, 1, 1] if options.get("loss_scale") == "dynamic" else [1] * 8
        # The scale grows after three clean steps, so that its counter matters.
        options = {**options, "scale_window": 3, "init_scale": 2.0**10}
        whole = Run(mlp, options)
        for (images, classes), factor in zip(data, factors, strict=True):
            whole.step(images, classes, factor)
        state = amp.state_dict()
        amp.deinitialize()

        first = Run(mlp, options)
        for (images, classes), factor in zip(data[:4], factors[:4], strict=True):
            first.step(images, classes, factor)
        file = io.BytesIO()
        parts = {"model": first.model, "optimizer": first.optimizer, "scheduler": first.scheduler, "amp": amp}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        amp.deinitialize()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        second = Run(mlp, options)
        for name, part in [("model", second.model), ("optimizer", second.optimizer), ("scheduler", second.scheduler)]:
            part.load_state_dict(saved[name])
        amp.load_state_dict(saved["amp"])
        for (images, classes), factor in zip(data[4:], factors[4:], strict=True):
            second.step(images, classes, factor)

        assert_same_bits(second.weights(), whole.weights())
        assert second.losses == whole.losses[4:]
        assert amp.state_dict() == state

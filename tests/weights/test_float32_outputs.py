"""Of submodules whose outputs stay float32 at every level: ``float32_outputs``."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import OptionError

LEVELS = ["O1", "O2", "O3", "O4", "O5"]


class Net(nn.Module):
    """A body, and a head whose result is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def initialize(model: Any, optimizer: Any = None, **options: Any) -> Any:
    return amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, "float32_outputs": "head", **options})


def head_of(model: Net, features: Tensor) -> Tensor:
    """The head's result in float32, for the features that the body gave."""
    with amp.disable_casts():
        return F.linear(features.float(), model.head.weight, model.head.bias)


def logits_and_wanted(model: Net, inputs: Tensor) -> tuple[Any, Tensor]:
    """Runs a model; returns its output, and the head's result in float32 for the same features."""
    features = []
    hook = model.body.register_forward_hook(lambda *args: features.append(args[-1]))
    output = model(inputs)
    hook.remove()
    return output, head_of(model, features[0])


class TestDigits:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("profile_casts", [False, True])
    def test_output_of_float32_outputs_has_all_digits(self, level, profile_casts):
        model = Net()
        initialize(model, opt_level=level, profile_casts=profile_casts)
        output, wanted = logits_and_wanted(model, torch.randn(5, 4))
        assert model.head.weight.dtype is output.dtype is torch.float32
        assert_same_bits(output.detach(), wanted.detach())
        assert not torch.equal(output, output.bfloat16().float())

    def test_logits_outside_the_range_of_float16_are_finite(self):
        model = Net()
        nn.init.constant_(model.head.bias, 1e6)
        initialize(model, half_dtype="float16")
        assert model(torch.randn(5, 4)).isfinite().all()

    def test_code_of_the_model_after_it_gets_float32(self, half):
        class WithLoss(Net):
            def forward(self, x):
                logits = self.head(self.body(x))
                return Output(logits[:, :2] / 3, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))

        model = WithLoss()
        initialize(model, half_dtype=half)
        output, wanted = logits_and_wanted(model, torch.randn(5, 4))
        assert_same_bits(output.logits.detach(), (wanted[:, :2] / 3).detach())
        assert output.loss.dtype is torch.float32
        assert_same_bits(output.loss.detach(), F.cross_entropy(wanted, torch.zeros(5, dtype=torch.long)).detach())

    def test_gradients_are_those_of_float32(self, half):
        model = Net()
        initialize(model, half_dtype=half)
        inputs = torch.randn(5, 4)
        output, _ = logits_and_wanted(model, inputs)
        given = torch.randn(5, 3)
        output.backward(given)
        assert_same_bits(model.head.bias.grad, given.sum(0))
        assert not torch.equal(model.head.bias.grad, given.to(half).float().sum(0))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_float32_outputs_in_an_activation_checkpoint(self, reentrant, half):
        class Checkpointed(Net):
            def forward(self, x):
                return checkpoint(self.head, self.body(x), use_reentrant=reentrant)

        model = Checkpointed()
        initialize(model, half_dtype=half)
        output, wanted = logits_and_wanted(model, torch.randn(5, 4))
        assert_same_bits(output.detach(), wanted.detach())
        output.sum().backward()
        assert model.head.weight.grad is not None
        assert model.body[0].weight.grad is not None

    @pytest.mark.slow
    def test_float32_outputs_are_compiled(self, half):
        model = Net()
        initialize(model, half_dtype=half)
        inputs = torch.randn(5, 4)
        wanted = model(inputs).detach()
        compiled = torch.compile(model, backend="aot_eager")
        assert_same_bits(compiled(inputs).detach(), wanted)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_of_the_model_have_float32_outputs(self, copied, half):
        model = Net()
        initialize(model, half_dtype=half)
        inputs = torch.randn(5, 4)
        output = copied(model)(inputs)
        assert output.dtype is torch.float32
        assert not torch.equal(output, output.to(half).float())


class TestChosenParts:
    @pytest.mark.parametrize("given", ["head", ["head"], "h*", nn.Bilinear, "Bilinear"], ids=str)
    def test_float32_outputs_take_names_patterns_and_classes(self, given):
        class WithBilinear(Net):
            def __init__(self):
                super().__init__()
                self.head = nn.Bilinear(8, 8, 3)

            def forward(self, x):
                return self.head(self.body(x), self.body(x))

        model = WithBilinear()
        initialize(model, float32_outputs=given)
        output = model(torch.randn(5, 4))
        assert not torch.equal(output, output.bfloat16().float())

    def test_other_kept_parts_give_half(self, half):
        model = Net()
        initialize(model, half_dtype=half, keep_fp32=[nn.LayerNorm, "head"])
        assert model.body(torch.randn(5, 4).to(half)).dtype is half
        assert model.head(torch.randn(5, 8).to(half)).dtype is torch.float32

    def test_children_of_a_container_have_float32_outputs(self, half):
        class Heads(Net):
            def __init__(self):
                super().__init__()
                self.head = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])

            def forward(self, x):
                features = self.body(x)
                return [each(features) for each in self.head]

        model = Heads()
        initialize(model, half_dtype=half)
        for output in model(torch.randn(5, 4)):
            assert not torch.equal(output, output.to(half).float())

    @pytest.mark.parametrize("keep", [True, False])
    def test_batch_norm_can_have_float32_outputs(self, keep, half):
        model = Net()
        model.head = nn.BatchNorm1d(8)
        initialize(model, half_dtype=half, keep_batchnorm_fp32=keep)
        output = model(torch.randn(5, 4))
        assert output.dtype is torch.float32
        assert not torch.equal(output, output.to(half).float())

    def test_float32_outputs_within_a_part_with_complex_numbers(self, half):
        class Fourier(Net):
            def forward(self, x):
                return self.head(torch.fft.rfft(x, n=14).real)

        model = nn.Sequential(Fourier())
        initialize(model, half_dtype=half, float32_outputs="0.head")
        output = model(torch.randn(5, 4))
        assert not torch.equal(output, output.to(half).float())

    def test_a_part_of_one_whose_outputs_are_half_raises(self):
        with pytest.raises(OptionError, match=r"float32_outputs has 'body\.1', which is in 'body'.*outputs 'body'"):
            initialize(Net(), keep_fp32="body", float32_outputs="body.1")
        initialize(Net(), float32_outputs=["head", "body", "body.1"])

    @pytest.mark.parametrize("level", LEVELS)
    def test_float32_outputs_that_match_nothing_raise(self, level):
        with pytest.raises(OptionError, match=r"float32_outputs has 'haed', which matches no submodule.*'head'"):
            initialize(Net(), opt_level=level, float32_outputs="haed")

    def test_float32_outputs_of_another_kind_or_at_o0_raise(self):
        with pytest.raises(OptionError, match="float32_outputs has 3; expected names"):
            initialize(Net(), float32_outputs=3)
        with pytest.raises(OptionError, match="float32_outputs contradicts opt_level='O0'"):
            initialize(Net(), opt_level="O0")

    def test_a_half_layer_after_it_gets_float32(self, half):
        model = Net()
        initialize(model, half_dtype=half, float32_outputs="body")
        seen = []
        model.head.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype]))
        model(torch.randn(5, 4))
        assert seen == [torch.float32, half]


class TestLog:
    @pytest.mark.parametrize("level", ["O2", "O3", "O5"])
    def test_half_outputs_of_kept_parts_are_logged(self, level, caplog):
        with caplog.at_level("INFO", "ampatch"):
            amp.initialize(Net(), opt_level=level, half_dtype="bfloat16", keep_fp32=["head", nn.LayerNorm])
        assert "outputs of parts in keep_fp32 (head, LayerNorm) are cast to torch.bfloat16" in caplog.text

    @pytest.mark.parametrize(
        "options",
        [
            {"opt_level": "O2", "keep_fp32": [nn.LayerNorm], "float32_outputs": "head"},
            {"opt_level": "O1", "keep_fp32": "head"},
        ],
        ids=["the user has decided", "nothing is rounded"],
    )
    def test_nothing_is_logged_if_the_user_has_decided_or_nothing_is_rounded(self, options, caplog):
        with caplog.at_level("INFO", "ampatch"):
            amp.initialize(Net(), **options)
        assert "are cast to" not in caplog.text


class TestSettings:
    def test_settings_have_float32_outputs_and_a_difference_raises(self):
        initialize(Net())
        given = {name: amp.settings()[name] for name in ("keep_fp32", "float32_outputs")}
        assert given == {"keep_fp32": ["head"], "float32_outputs": ["head"]}
        initialize(Net(), **given)
        with pytest.raises(amp.UsageError, match=r"float32_outputs is \['head'\] \(this call: None\)"):
            initialize(Net(), keep_fp32="head", float32_outputs=None)

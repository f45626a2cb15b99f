"""`amp.compare` on Hugging Face's architectures: what half precision does to each, by function, module and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import model_and_inputs
from torch import Tensor

from ampatch import amp


def distance_to_noise(output: Any) -> Tensor:
    scores = output.logits
    return F.mse_loss(scores.float(), torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)))


def compared(name: str, level: str, half: str) -> Any:
    model, inputs = model_and_inputs(name)
    return amp.compare(model, inputs, distance_to_noise, "O0", {"opt_level": level, "half_dtype": half})


@pytest.mark.parametrize(("name", "level"), [("Bert", "O1"), ("ViT", "O2"), ("GPT2", "O1"), ("Wav2Vec2", "O2")])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_rounding_explains_all_of_a_sound_model(name: str, level: str, half: str) -> None:
    result = compared(name, level, half)
    assert result.verdict.startswith(f"{level} {half} is within the noise of {half}: ")
    assert result.first is None
    assert {row.operator for row in result.rows if row.unmatched} == {"cast"}


@pytest.mark.slow
def test_convnexts_layer_scale_is_lost_in_float16() -> None:
    first = compared("ConvNext", "O2", "float16").first
    assert first.source == "features = self.layer_scale_parameter * features"
    assert (first.phase, first.module) == ("forward", "convnext.encoder.stages.0.layers.0")
    assert first.own_error > 0.5
    assert compared("ConvNext", "O2", "bfloat16").first is None


@pytest.mark.slow
def test_t5_clamps_in_float16_only() -> None:
    result = compared("T5", "O2", "float16")
    clamps = [row for row in result.rows if row.function == "torch.clamp" and row.phase == "forward"]
    assert {(row.unmatched, row.type_a, row.type_b) for row in clamps} == {(1, "", "float16")}
    assert len(clamps) == 2 * 2 + 2 * 3  # encoder and decoder, two blocks each
    # The first call above the noise may be a ReLU: in half, an input near 0 has the other sign.
    assert result.verdict.startswith("O2 float16 is within the noise of float16: ")

"""Architectures of Hugging Face that torch cannot run in half as they are: Fourier transforms, types mixed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from optimizers import backward
from small_nets import EACH_HALF
from torch import nn

from ampatch import amp

pytestmark = pytest.mark.once  # the compiled libraries have no part in it


def fnet() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    config = transformers.FNetConfig(**sizes, max_position_embeddings=32)
    words = torch.randint(2, 60, (2, 9))
    return transformers.FNetForMaskedLM(config).eval(), {"input_ids": words, "labels": words}


def autoformer() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    heads = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("attention_heads", "layers")}
    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_time_features": 1,
        "lags_sequence": [1, 2],
    }
    lengths = {"prediction_length": 4, "context_length": 8, "label_length": 4, "moving_average": 3}
    model = transformers.AutoformerForPrediction(transformers.AutoformerConfig(**lengths, **sizes, **heads)).eval()
    past, future = (2, 10), (2, 4)
    return model, {
        "past_values": torch.randn(past),
        "past_time_features": torch.randn(*past, 1),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.randn(future),
        "future_time_features": torch.randn(*future, 1),
    }


def ctrl() -> tuple[nn.Module, dict[str, Any]]:
    """Adds positions to words that are a plain attribute of the model, and so stay float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 32}
    words = torch.randint(2, 60, (2, 9))
    return transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes)).eval(), {"input_ids": words, "labels": words}


def apertus() -> tuple[nn.Module, dict[str, Any]]:
    """Has an activation function that looks for a class of a library that is not installed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "pad_token_id": 0}
    config = transformers.ApertusConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    words = torch.randint(2, 60, (2, 9))
    return transformers.ApertusForCausalLM(config).float().eval(), {"input_ids": words, "labels": words}


def nystromformer() -> tuple[nn.Module, dict[str, Any]]:
    """Multiplies by a float32 identity matrix."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    landmarks = {"num_attention_heads": 4, "num_landmarks": 4, "segment_means_seq_len": 16}
    config = transformers.NystromformerConfig(**sizes, **landmarks, max_position_embeddings=34)
    words = torch.randint(2, 60, (2, 16))
    return transformers.NystromformerForMaskedLM(config).eval(), {"input_ids": words, "labels": words}


def recurrent_gemma() -> tuple[nn.Module, dict[str, Any]]:
    """Has a buffer in bfloat16 among float32 weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "lru_width": 32}
    config = transformers.RecurrentGemmaConfig(**sizes, num_attention_heads=4, attention_window_size=16, pad_token_id=0)
    words = torch.randint(2, 60, (2, 9))
    return transformers.RecurrentGemmaForCausalLM(config).eval(), {"input_ids": words, "labels": words}


def trained(model: nn.Module, inputs: dict[str, Any], **options: Any) -> float:
    """The loss of a step at O2."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, init_scale=128.0, **options)
    try:
        loss = model(**inputs).loss
        backward(loss, optimizer)
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        return float(loss.detach())
    finally:
        amp.deinitialize()


@EACH_HALF
@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        *((make, {}, 0.02) for make in (fnet, apertus, autoformer, ctrl, nystromformer, recurrent_gemma)),
        (autoformer, {"patch_torch_functions": True}, 0.1),
    ],
)
def test_a_step_at_o2_has_the_loss_of_float32(make, options, tolerance, half: torch.dtype) -> None:
    model, inputs = make()
    expected = float(model(**inputs).loss.detach())
    loss = trained(make()[0], inputs, half_dtype=half, **options)
    assert loss == pytest.approx(expected, rel=tolerance)

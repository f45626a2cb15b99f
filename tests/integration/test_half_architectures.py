"""Architectures of Hugging Face that torch cannot run in half as they are: Fourier transforms, types mixed by hand."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import HALF_DTYPES, dtype_name
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


def trained_as_told(make: Callable[[], tuple[nn.Module, dict[str, Any]]], half: torch.dtype) -> tuple[float, list[str]]:
    """The loss of a step at O2 once nothing raises any more, and the `keep_fp32` that the errors' notes asked for."""
    kept: list[str] = []
    for _ in range(8):
        model, inputs = make()
        try:
            return trained(model, inputs, half_dtype=half, keep_fp32=kept), kept
        except RuntimeError as error:
            (note,) = error.__notes__
            before, kept = kept, ast.literal_eval(note.partition("keep_fp32=")[2].partition(")")[0])
            assert kept[:-1] == before
    pytest.fail(f"still raises with keep_fp32={kept}")


def trained(model: nn.Module, inputs: dict[str, Any], **options: Any) -> float:
    """The loss of a step at O2."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, init_scale=128.0, **options)
    try:
        loss = model(**inputs).loss
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)
        return float(loss.detach())
    finally:
        amp.deinitialize()


@pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
class TestO2:
    def test_fnet_trains(self, half: torch.dtype) -> None:
        model, inputs = fnet()
        expected = float(model(**inputs).loss.detach())
        assert trained(model, inputs, half_dtype=half) == pytest.approx(expected, rel=0.02)

    def test_apertus_trains(self, half: torch.dtype) -> None:
        model, inputs = apertus()
        expected = float(model(**inputs).loss.detach())
        assert trained(model, inputs, half_dtype=half) == pytest.approx(expected, rel=0.02)

    @pytest.mark.slow
    def test_autoformer_mixes_types_and_is_told_the_cure(self, half: torch.dtype) -> None:
        model, inputs = autoformer()
        expected = float(model(**inputs).loss.detach())
        loss, kept = trained_as_told(lambda: (autoformer()[0], inputs), half)
        assert kept[0] == "model.encoder.layers.*.self_attn.out_proj"
        assert loss == pytest.approx(expected, rel=0.1)

    @pytest.mark.slow
    def test_ctrl_mixes_types_and_is_told_the_cure(self, half: torch.dtype) -> None:
        model, inputs = ctrl()
        expected = float(model(**inputs).loss.detach())
        loss, kept = trained_as_told(ctrl, half)
        assert kept == [f"transformer.{name}" for name in ("h.*.layernorm1", "h.*.layernorm2", "layernorm")]
        assert loss == pytest.approx(expected, rel=0.02)

    def test_autoformer_trains_with_functions_patched(self, half: torch.dtype) -> None:
        model, inputs = autoformer()
        expected = float(model(**inputs).loss.detach())
        loss = trained(model, inputs, half_dtype=half, patch_torch_functions=True)
        assert loss == pytest.approx(expected, rel=0.1)

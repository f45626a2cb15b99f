"""Where torch asks for autocast beforehand: what is let through while casts are on, and what is still refused."""

from __future__ import annotations

import pytest
import torch
from helpers import HALF_DTYPES, casts_on, dtype_name
from torch import nn

from ampatch import amp

# In the words of torch.
MISMATCH = "does not match weight dtype"

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def sequence(dtype: torch.dtype, features: int = 3) -> torch.Tensor:
    return torch.ones(4, 2, features).to(dtype)


class TestRecurrentInput:
    @pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
    def test_half_input_meets_float32_weights_while_casts_are_on(self, layer, half):
        layer, (other,) = layer(3, 5), set(HALF_DTYPES) - {half}
        with pytest.raises(ValueError, match=MISMATCH):
            layer(sequence(half))
        with casts_on(half):
            assert layer(sequence(half))[0].dtype == layer(sequence(other))[0].dtype == half
            with amp.disable_casts(), pytest.raises(ValueError, match=MISMATCH):
                layer(sequence(half))
            assert layer(sequence(half))[0].dtype == half
        with pytest.raises(ValueError, match=MISMATCH):
            layer(sequence(half))

    def test_float32_input_meets_half_weights(self, half):
        layer = nn.LSTM(3, 5).to(half)
        with casts_on(half):
            assert layer(sequence(torch.float32))[0].dtype == half

    @pytest.mark.parametrize(
        ("given", "weights"),
        [(torch.float64, torch.float32), (torch.int64, torch.float32), (torch.bfloat16, torch.float64)],
    )
    def test_mismatched_types_that_are_never_cast_raise_torch_s_error(self, given, weights):
        with casts_on(), pytest.raises(ValueError, match=MISMATCH):
            nn.LSTM(3, 5).to(weights)(sequence(given))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
    @pytest.mark.parametrize(
        "wrong", [sequence(torch.float32, features=4), torch.ones(3, 1, 1, 3)], ids=["size", "dims"]
    )
    def test_wrong_shapes_raise_torch_s_error(self, dtype, wrong):
        layer = nn.LSTM(3, 5)
        with pytest.raises((RuntimeError, ValueError)) as unpatched:
            layer(wrong)
        with casts_on(), pytest.raises((RuntimeError, ValueError)) as patched:
            layer(wrong.to(dtype))
        assert str(patched.value) == str(unpatched.value)

    def test_half_input_raises_at_o0(self):
        layer = nn.LSTM(3, 5)  # not adopted: the inputs of an adopted model are float32 there
        amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
        with pytest.raises(ValueError, match=MISMATCH):
            layer(sequence(torch.bfloat16))


class TestFusedAttention:
    @pytest.mark.parametrize("before", [True, False])
    def test_fused_attention_is_off_during_the_session_and_restored(self, before):
        torch.backends.mha.set_fastpath_enabled(before)
        try:
            with casts_on():
                assert not torch.backends.mha.get_fastpath_enabled()
            assert torch.backends.mha.get_fastpath_enabled() is before
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def test_fused_attention_stays_on_at_o0(self):
        amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
        assert torch.backends.mha.get_fastpath_enabled()

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
    def test_nested_tensors_run_in_half_where_a_user_turns_fused_attention_on(self, half):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
        nested = torch.nested.nested_tensor([torch.ones(length, 8) for length in (2, 3)])
        with torch.no_grad(), casts_on(half):
            torch.backends.mha.set_fastpath_enabled(True)
            result = encoder(nested)
            torch.backends.mha.set_fastpath_enabled(False)
        assert result.is_nested
        assert result.dtype == half

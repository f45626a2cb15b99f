"""Recurrent and attention modules under casts: they run, in the types promised, close to float32, backward included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import casts_on
from samples import TOLERANCE
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ampatch import amp
from ampatch.casting.nested import tensors_in

SEQUENCE, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Values in [-1, 1), rounded to a type, that collect gradients."""
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return values.to(dtype).requires_grad_()


def floating(value: object) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def backward(result: object) -> None:
    """From a scalar that every part of a result has a say in, taken in float32."""
    torch.stack([((tensor.float() * 0.5) ** 2).sum() for tensor in floating(result)]).sum().backward()


def assert_near(actual: Tensor, expected: Tensor, half: torch.dtype, factor: float) -> None:
    """Within some roundings of the half type, relative to the largest value."""
    room = factor * TOLERANCE[half] * max(expected.abs().max().item(), 0.1)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=room)


def assert_trains_as_in_float32(module: nn.Module, make_inputs, half: torch.dtype, call=None) -> object:
    """Runs a module forward and backward in float32 and under casts, and compares results and gradients.

    Args:
        module: with float32 weights.
        make_inputs: makes the inputs, as leaves: of float32 where it is handed True, of the types under test else.
        half: the half type.
        call: what is done with the module and the inputs; calling the one with the others if None.

    Returns:
        The result under casts.
    """
    call = call or (lambda module, inputs: module(*inputs))
    plain = make_inputs(True)
    expected = call(module, plain)
    backward(expected)
    expected_gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    inputs = make_inputs(False)
    with casts_on(half):
        actual = call(module, inputs)
        first = amp.cast_counts().casts
        call(module, inputs)
        again = amp.cast_counts().casts - first
        backward(actual)
    for found, wanted in zip(floating(actual), floating(expected), strict=True):
        assert_near(found, wanted, half, factor=3)
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert_near(parameter.grad, expected_gradients[name], half, factor=8)
    for found, wanted in zip(floating(inputs), floating(plain), strict=True):
        if wanted.grad is not None:
            assert found.grad.dtype == found.dtype
            assert_near(found.grad, wanted.grad, half, factor=8)
    # The second call finds cast already every weight that was cast for the first, and casts the inputs alone.
    assert first - again == sum(1 for _ in module.parameters())
    return actual


LAYERS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN tanh": nn.RNN,
    "RNN relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
CELLS = {
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
    "RNN tanh": nn.RNNCell,
    "RNN relu": lambda *args: nn.RNNCell(*args, nonlinearity="relu"),
}

givens = pytest.mark.parametrize("given", ["half", "float32"])
# The types of the input and of the hidden states.
mixes = pytest.mark.parametrize(
    ("half_input", "half_states"),
    [(True, True), (True, False), (False, True)],
    ids=["both half", "float32 states", "float32 input"],
)


def chosen(half: torch.dtype, is_half: bool, plain: bool) -> torch.dtype:
    """The type of an input: float32 where it is for the float32 run, or is to be."""
    return half if is_half and not plain else torch.float32


def states(layer: nn.RNNBase, dtype: torch.dtype) -> Tensor | tuple[Tensor, Tensor]:
    """Hidden states for a layer: one tensor, or for an LSTM two."""
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = leaf(rows, BATCH, layer.proj_size or layer.hidden_size, dtype=dtype, seed=2)
    if not isinstance(layer, nn.LSTM):
        return hidden
    return hidden, leaf(rows, BATCH, layer.hidden_size, dtype=dtype, seed=3)


class TestRecurrentLayers:
    @pytest.mark.parametrize("name", LAYERS)
    @mixes
    @pytest.mark.covering(1)
    def test_layers_train_with_inputs_and_hidden_states_of_either_type(self, name, half_input, half_states, half):
        layer = seeded(lambda: LAYERS[name](FEATURES, HIDDEN, num_layers=2))

        def inputs(plain):
            x = leaf(SEQUENCE, BATCH, FEATURES, dtype=chosen(half, half_input, plain))
            return [x, states(layer, chosen(half, half_states, plain))]

        actual = assert_trains_as_in_float32(layer, inputs, half)
        assert {tensor.dtype for tensor in tensors_in(actual)} == {half}

    @pytest.mark.parametrize("name", LAYERS)
    @givens
    @pytest.mark.covering(1)
    def test_a_packed_sequence_comes_back_packed(self, name, given, half):
        layer = seeded(lambda: LAYERS[name](FEATURES, HIDDEN, bidirectional=True))
        lengths = torch.tensor([2, 5, 3])

        def inputs(plain):
            return [leaf(SEQUENCE, BATCH, FEATURES, dtype=chosen(half, given == "half", plain))]

        def call(layer, inputs):
            packed, hidden = layer(pack_padded_sequence(inputs[0], lengths, enforce_sorted=False))
            assert type(packed) is PackedSequence
            padded, found = pad_packed_sequence(packed)
            assert found.tolist() == lengths.tolist()
            return padded, hidden

        actual = assert_trains_as_in_float32(layer, inputs, half, call)
        assert {tensor.dtype for tensor in tensors_in(actual)} == {half}


class TestRecurrentCells:
    @pytest.mark.parametrize("name", CELLS)
    @pytest.mark.parametrize(
        ("half_input", "half_states"),
        [(True, True), (True, False), (False, True), (True, None), (False, None)],
        ids=["both half", "float32 states", "float32 input", "half input, no states", "float32 input, no states"],
    )
    @pytest.mark.covering(1)
    def test_cells_train_over_several_steps(self, name, half_input, half_states, half):
        cell = seeded(lambda: CELLS[name](FEATURES, HIDDEN))

        def inputs(plain):
            steps = leaf(SEQUENCE, BATCH, FEATURES, dtype=chosen(half, half_input, plain))
            if half_states is None:
                return [steps, None]
            dtype = chosen(half, half_states, plain)
            hidden = leaf(BATCH, HIDDEN, dtype=dtype, seed=2)
            return [steps, (hidden, leaf(BATCH, HIDDEN, dtype=dtype, seed=3)) if name == "LSTM" else hidden]

        def call(cell, inputs):
            steps, hidden = inputs
            for step in steps:
                hidden = cell(step, hidden)
            return hidden

        actual = assert_trains_as_in_float32(cell, inputs, half, call)
        assert {tensor.dtype for tensor in tensors_in(actual)} == {half}


EMBEDDING, HEADS = 8, 2

FUTURE = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


def additive(mask: Tensor) -> Tensor:
    """A mask as it is added to the scores."""
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


MASKS = {
    "no mask": {},
    "bool mask": {"attn_mask": FUTURE},
    "float mask": {"attn_mask": additive(FUTURE)},
    "bool padding": {"key_padding_mask": PADDING},
    "float mask and padding": {"attn_mask": additive(FUTURE), "key_padding_mask": additive(PADDING)},
}
# How a module is evaluated. Training is the rest.
EVALUATIONS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
evaluations = pytest.mark.parametrize("mode", EVALUATIONS.values(), ids=EVALUATIONS)


def embedded(module: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """A batch of sequences, in the layout that a module takes."""
    first = next((part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)), False)
    x = leaf(BATCH, SEQUENCE, EMBEDDING, dtype=dtype, seed=seed)
    return x if first else x.detach().transpose(0, 1).clone().requires_grad_()


def assert_evaluates_as_in_float32(module: nn.Module, call, mode, half: torch.dtype) -> object:
    """Runs a module in eval mode with float32 inputs, without casts and with them, and compares the results.

    The run without keeps off torch's fused path, which leaves zeros where a sequence is padded.
    """
    module.eval()

    def evaluated():
        with mode():
            return call(module, lambda seed=1: embedded(module, seed=seed).detach())

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = evaluated()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with casts_on(half):
        actual = evaluated()
    for found, wanted in zip(floating(actual), floating(expected), strict=True):
        assert_near(found, wanted, half, factor=3)
    return actual


class TestMultiheadAttention:
    @pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
    @givens
    @pytest.mark.covering(1)
    def test_attention_trains_with_every_kind_of_mask(self, masks, given, half):
        attention = seeded(lambda: nn.MultiheadAttention(EMBEDDING, HEADS))
        result = assert_trains_as_in_float32(
            attention,
            lambda plain: [embedded(attention, chosen(half, given == "half", plain))],
            half,
            lambda attention, inputs: attention(*inputs * 3, need_weights=False, **masks)[0],
        )
        assert result.dtype == half

    @pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
    @evaluations
    @pytest.mark.covering(1)
    def test_attention_evaluates_with_every_kind_of_mask(self, masks, mode, half):
        attention = seeded(lambda: nn.MultiheadAttention(EMBEDDING, HEADS, batch_first=True))
        result = assert_evaluates_as_in_float32(
            attention, lambda attention, make: attention(*[make()] * 3, need_weights=False, **masks)[0], mode, half
        )
        assert result.dtype == half

    def test_attention_weights_are_float32(self, half):
        attention = seeded(lambda: nn.MultiheadAttention(EMBEDDING, HEADS))
        with casts_on(half):
            result, weights = attention(*[embedded(attention)] * 3)
        assert (result.dtype, weights.dtype) == (half, torch.float32)


# Each with how it is called: with the module, and what makes it an input of a seed.
TRANSFORMERS = {
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(EMBEDDING, HEADS, 16, dropout=0.0, batch_first=True),
        lambda module, make: module(make(), src_key_padding_mask=PADDING),
    ),
    "encoder layer, norm first, gelu": (
        lambda: nn.TransformerEncoderLayer(EMBEDDING, HEADS, 16, 0.0, "gelu", norm_first=True),
        lambda module, make: module(make(), src_mask=additive(FUTURE)),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(EMBEDDING, HEADS, 16, dropout=0.0, batch_first=True), 2, nn.LayerNorm(EMBEDDING)
        ),
        lambda module, make: module(make(), src_key_padding_mask=PADDING),
    ),
    "encoder, causal": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(EMBEDDING, HEADS, 16, dropout=0.0, batch_first=True), 2
        ),
        lambda module, make: module(make(), mask=additive(FUTURE), is_causal=True),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(EMBEDDING, HEADS, 16, dropout=0.0, batch_first=True),
        lambda module, make: module(make(), make(2), tgt_mask=FUTURE, memory_key_padding_mask=PADDING),
    ),
    "transformer": (
        lambda: nn.Transformer(EMBEDDING, HEADS, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda module, make: module(
            make(), make(2), tgt_mask=additive(FUTURE), src_key_padding_mask=additive(PADDING), tgt_is_causal=True
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
class TestTransformers:
    @pytest.mark.parametrize("name", TRANSFORMERS)
    @evaluations
    @pytest.mark.covering(1)
    def test_transformers_evaluate(self, name, mode, half):
        build, call = TRANSFORMERS[name]
        assert assert_evaluates_as_in_float32(seeded(build), call, mode, half).dtype == torch.float32

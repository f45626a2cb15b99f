"""Of `amp.convert_model`: architectures that nobody here made compute as they do at O1, exported and compiled too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import HALF_DTYPES, assert_same_bits, dtype_name
from torch import Tensor, nn

from ampatch import amp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # at an import of transformers
    pytest.mark.filterwarnings("ignore:.*scaled_size_sqrt:ampatch.errors.AmpWarning"),  # of DebertaV2, scripted
]

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
SIZES: dict[str, dict[str, Any]] = {
    "Bert": TEXT,
    "Roberta": TEXT,
    "Llama": {**TEXT, "num_key_value_heads": 2},
    "Mixtral": {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4},
    "DebertaV2": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "T5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "ViT": VISION,
    "ConvNext": {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 2},
    "CLIP": {
        "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "vision_config": VISION,
        "projection_dim": 16,
    },
    "Wav2Vec2": {
        **{name: TEXT[name] for name in TEXT if name != "max_position_embeddings"},
        "conv_dim": [16, 16],
        "conv_stride": [4, 2],
        "conv_kernel": [8, 4],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
}
HEADS = {
    **dict.fromkeys(["Bert", "DebertaV2"], "ForMaskedLM"),
    **dict.fromkeys(["Llama", "Mixtral", "Bloom"], "ForCausalLM"),
    **dict.fromkeys(["Roberta"], "ForSequenceClassification"),
    **dict.fromkeys(["ViT", "ConvNext"], "ForImageClassification"),
    "GPT2": "LMHeadModel",
    "T5": "ForConditionalGeneration",
    "CLIP": "Model",
    "Wav2Vec2": "ForCTC",
}
# The sizes of Mixtral's experts depend on values, for which torch's exporter cannot make a program.
EXPORTED = [name for name in SIZES if name != "Mixtral"]

EACH_HALF = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    model = getattr(transformers, f"{name}{HEADS[name]}")(config).eval()
    words, images = torch.randint(2, 60, (2, 9)), torch.randn(2, 3, 16, 16)
    if name in ("ViT", "ConvNext"):
        return model, {"pixel_values": images}
    if name == "Wav2Vec2":
        return model, {"input_values": torch.randn(2, 400)}
    inputs = {"input_ids": words}
    if name == "CLIP":
        inputs["pixel_values"] = images
    if name == "T5":
        inputs["decoder_input_ids"] = words
    if getattr(config, "use_cache", False):
        config.use_cache = False  # what it returns otherwise is no type that torch.export knows
    return model, inputs


def tensors(outputs: Any) -> list[Tensor]:
    return [value for value in outputs.to_tuple() if isinstance(value, Tensor)]


def assert_same(found: Any, expected: list[Tensor]) -> None:
    for one, other in zip(tensors(found), expected, strict=True):
        assert_same_bits(one, other)


@pytest.fixture
def of_o1() -> Callable[..., list[Tensor]]:
    def run(model: nn.Module, half: torch.dtype, inputs: dict[str, Any]) -> list[Tensor]:
        amp.initialize(model, opt_level="O1", half_dtype=half, verbosity=0)
        try:
            return tensors(model(**inputs))
        finally:
            amp.deinitialize()

    return run


@EACH_HALF
@pytest.mark.parametrize("name", SIZES)
def test_computes_and_is_saved_as_the_model(name, half, of_o1):
    model, inputs = model_and_inputs(name)
    with torch.no_grad():
        expected = of_o1(model, half, inputs)
        made = amp.convert_model(model, half)
        for _ in range(2):
            assert_same(made(**inputs), expected)
    saved = made.state_dict()
    for key, tensor in model.state_dict().items():
        assert_same_bits(saved[key], tensor)
    parameters = list(made.parameters())
    half_ones = sum(each.numel() for each in parameters if each.dtype is half)
    assert half_ones > 0.75 * sum(each.numel() for each in parameters)


@EACH_HALF
@pytest.mark.parametrize("name", EXPORTED)
def test_exported(name, half):
    model, inputs = model_and_inputs(name)
    made = amp.convert_model(model, half)
    with torch.no_grad():
        expected = tensors(made(**inputs))
        assert_same(torch.export.export(made, (), inputs).module()(**inputs), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in torch's compiler
@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "ViT"])
def test_compiled(name):
    model, inputs = model_and_inputs(name)
    made = amp.convert_model(model, "bfloat16")
    with torch.no_grad():
        expected = tensors(made(**inputs))
        torch._dynamo.reset()
        assert_same(torch.compile(made, backend="aot_eager")(**inputs), expected)


def test_generates():
    model, _ = model_and_inputs("Llama")
    words = torch.arange(2, 8)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    amp.initialize(model, opt_level="O1", half_dtype="bfloat16", verbosity=0)
    expected = model.generate(words, **options)
    amp.deinitialize()
    assert torch.equal(amp.convert_model(model, "bfloat16").generate(words, **options), expected)

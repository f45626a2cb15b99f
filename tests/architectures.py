"""Small random models of Hugging Face's architectures, which nobody here made, with inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

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


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    if getattr(config, "use_cache", False):
        config.use_cache = False  # what it returns otherwise is no type that torch.export knows
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
    return model, inputs

"""`fused_linear` against the same session without it, in the models and training loops of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apart import import_timm
from peft import LoraConfig, get_peft_model
from small_nets import EACH_HALF
from small_transformers import bert, gpt2, llama
from test_fused_linear_ranks import QUIET, backward, compared, nodes_of, state
from torch import Tensor, nn

from ampatch import amp

WORDS = torch.randint(2, 20, (4, 8), generator=torch.Generator().manual_seed(0))


def bert_losses(checkpointed: bool) -> tuple[nn.Module, Callable[..., Tensor]]:
    model = bert(layers=2)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, lambda: model(input_ids=WORDS, labels=WORDS[:, 0] % 3).loss


def gpt2_losses() -> tuple[nn.Module, Callable[..., Tensor]]:
    model = gpt2()
    return model, lambda: model(input_ids=WORDS, labels=WORDS).loss


def lora() -> tuple[nn.Module, Callable[..., Tensor]]:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(llama(), config)
    return model, lambda: model(input_ids=WORDS, labels=WORDS).loss


def vit() -> tuple[nn.Module, Callable[..., Tensor]]:
    shape = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 32, "depth": 2}
    model = import_timm().create_model("vit_tiny_patch16_224", **shape, num_heads=4)
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return model, lambda: F.cross_entropy(model(images).float(), torch.arange(4))


# Models, and the number of their fused layers: those of LoRA are two for each of four adapters. The layers of GPT-2 are
# products of ``addmm``; its head, whose weight is the embedding's, is a linear layer.
MODELS = {
    "bert": (functools.partial(bert_losses, False), 14),
    "bert with checkpoints": (functools.partial(bert_losses, True), 14),
    "gpt2": (gpt2_losses, 1),
    "lora": (lora, 8),
    "vit": (vit, 9),
}


def three_steps(make: Callable[..., Any], half: torch.dtype, fused: bool) -> tuple[int, Any]:
    model, loss_of = make()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    amp.initialize(model, optimizer, half_dtype=half, fused_linear=fused, **QUIET)
    found, states = 0, []
    for _ in range(3):
        optimizer.zero_grad()
        torch.manual_seed(1)  # of dropout
        loss = loss_of()
        found = nodes_of(loss)
        backward(loss, optimizer)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        states.append((loss.detach(), state(model)))
    return found, states


@pytest.mark.slow
@EACH_HALF
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_of_other_libraries_train_to_the_same_bits(name, half):
    make, expected = MODELS[name]
    found, states = compared(three_steps, make, half)
    assert found == expected
    assert states

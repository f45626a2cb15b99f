"""`fused_linear` against the same session without it, in the models and training loops of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from apart import import_timm
from helpers import HALF_DTYPES, dtype_name
from peft import LoraConfig, get_peft_model
from test_fused_linear_ranks import QUIET, backward, compared, nodes_of, state
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from ampatch import amp
from ampatch.integrations.accelerate import prepare
from ampatch.integrations.lightning import AmpatchPrecision
from ampatch.integrations.transformers import AmpatchTrainer

# Lightning wraps it for good, for Fabric; after each test torch must be what it was.
torch.compile = getattr(torch.compile, "__wrapped__", torch.compile)

HALVES = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
WORDS = torch.randint(2, 20, (4, 8), generator=torch.Generator().manual_seed(0))
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def bert() -> tuple[nn.Module, Callable[..., Tensor]]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **sizes)
    model = BertForSequenceClassification(config)
    return model, lambda: model(input_ids=WORDS, labels=WORDS[:, 0] % 3).loss


def bert_with_checkpoints() -> tuple[nn.Module, Callable[..., Tensor]]:
    model, loss = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, loss


def gpt2() -> tuple[nn.Module, Callable[..., Tensor]]:
    """Its layers are products of ``addmm``; the head, whose weight is the embedding's, is a linear layer."""
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    return model, lambda: model(input_ids=WORDS, labels=WORDS).loss


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=16, **sizes))


def lora() -> tuple[nn.Module, Callable[..., Tensor]]:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(llama(), config)
    return model, lambda: model(input_ids=WORDS, labels=WORDS).loss


def vit() -> tuple[nn.Module, Callable[..., Tensor]]:
    shape = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 32, "depth": 2}
    model = import_timm().create_model("vit_tiny_patch16_224", **shape, num_heads=4)
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return model, lambda: F.cross_entropy(model(images).float(), torch.arange(4))


#: Models, and the number of their fused layers: those of LoRA are two for each of four adapters.
MODELS = {"bert": (bert, 14), "bert with checkpoints": (bert_with_checkpoints, 14), "gpt2": (gpt2, 1)}
MODELS |= {"lora": (lora, 8), "vit": (vit, 9)}


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
@HALVES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_models_have_the_same_bits(name, half):
    make, expected = MODELS[name]
    found, states = compared(three_steps, make, half)
    assert found == expected
    assert states


# --- adapters -------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture
def accelerator_is_forgotten() -> Iterator[None]:
    yield
    amp.deinitialize()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def in_accelerate(fused: bool) -> tuple[int, Any]:
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    options = {"half_dtype": "float16", "fused_linear": fused, **QUIET}
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, **options)
    found, losses = 0, []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).float(), y)
            found += nodes_of(loss)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return found, (losses, state(model))


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.found, self.losses = net(), 0, []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.found += nodes_of(loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def in_lightning(fused: bool) -> tuple[int, Any]:
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5,
    }  # fmt: skip
    module = Lit()
    precision = AmpatchPrecision("O1", half_dtype="float16", fused_linear=fused, **QUIET)
    pl.Trainer(plugins=precision, **quiet).fit(module, DataLoader(TensorDataset(X, Y), batch_size=8))
    return module.found, (module.losses, list(module.state_dict().values()))


def in_transformers(folder: Path, fused: bool) -> tuple[int, Any]:
    model, _ = bert()
    found = []
    head = model.classifier.register_forward_hook(lambda _, __, out: found.append(nodes_of(out)))
    data = [{"input_ids": each, "labels": int(each[0]) % 3} for each in WORDS]
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), save_strategy="no", gradient_accumulation_steps=2, **given)
    options = {"half_dtype": "float16", "fused_linear": fused, **QUIET}
    trainer = AmpatchTrainer(model, arguments, train_dataset=data, amp=options)
    trainer.train()
    head.remove()
    return sum(found), [each.detach().clone() for each in model.parameters()]


class TestAdapters:
    @pytest.mark.usefixtures("accelerator_is_forgotten")
    def test_accelerate_passes_it_on(self):
        assert compared(in_accelerate)[0] == 4 * 2

    @pytest.mark.filterwarnings("ignore")
    def test_lightning_passes_it_on(self):
        assert compared(in_lightning)[0] == 2 * 4 * 2

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.usefixtures("accelerator_is_forgotten")
    def test_transformers_passes_it_on(self, tmp_path):
        assert compared(functools.partial(in_transformers, tmp_path))[0] > 0

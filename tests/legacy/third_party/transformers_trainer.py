"""Hugging Face's Trainer with the apex backend, on a language model that is made here."""

import argparse
import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--max-steps", default=12, type=int)
parser.add_argument("--resume", default=None)
args = parser.parse_args()


class Sequences(torch.utils.data.Dataset):
    """Counting, modulo 32."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        words = (index + 3 * torch.arange(12)) % 32
        return {"input_ids": words, "labels": words}


class Types(TrainerCallback):
    """Notes in which type the layers compute."""

    def __init__(self):
        self.seen = set()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        layer = model.transformer.h[0].mlp.c_fc
        layer.register_forward_hook(lambda module, inputs, output: self.seen.add(str(output.dtype)))


set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
)
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=args.max_steps,
    save_steps=6,
    logging_steps=1,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    fp16=True,
    half_precision_backend="apex",
    fp16_opt_level=args.opt_level,
    optim=args.optim,
    report_to=[],
    disable_tqdm=True,
    save_safetensors=False,
)
types = Types()
trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), callbacks=[types])
trainer.train(resume_from_checkpoint=args.resume)

from apex import amp  # noqa: E402 - the trainer is who sets it up

logs = [entry for entry in trainer.state.log_history if "loss" in entry]
with Path("report.json").open("w") as report:
    json.dump(
        {
            "losses": {entry["step"]: entry["loss"] for entry in logs},
            "grad_norms": [entry["grad_norm"] for entry in logs],
            "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__module__,
            "amp": amp.state_dict(),
            "dtypes": sorted(types.seen),
        },
        report,
    )

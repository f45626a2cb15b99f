"""BERT pretraining (masked words only) with gradients accumulated and reduced by hand."""

import argparse
import json
import math
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

try:
    from apex import amp
except ImportError:
    raise ImportError(
        "Please install apex from https://www.github.com/nvidia/apex to use distributed and fp16 training."
    )

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    print("Better speed can be achieved with apex installed from https://www.github.com/nvidia/apex .")
    BertLayerNorm = nn.LayerNorm

VOCAB, MASK, IGNORE = 64, 63, -1


def gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class BertLayer(nn.Module):
    def __init__(self, hidden):
        super(BertLayer, self).__init__()
        self.projections = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(3)])
        self.attention_norm = BertLayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.dense = nn.Linear(4 * hidden, hidden)
        self.output_norm = BertLayerNorm(hidden, eps=1e-12)

    def forward(self, hidden_states, attention_mask):
        q, k, v = [projection(hidden_states) for projection in self.projections]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        probs = nn.Softmax(dim=-1)(scores + attention_mask)
        hidden_states = self.attention_norm(torch.matmul(probs, v) + hidden_states)
        return self.output_norm(self.dense(gelu(self.intermediate(hidden_states))) + hidden_states)


class BertForMaskedLM(nn.Module):
    def __init__(self, hidden=32, layers=2, length=16):
        super(BertForMaskedLM, self).__init__()
        self.words = nn.Embedding(VOCAB, hidden, padding_idx=0)
        self.positions = nn.Embedding(length, hidden)
        self.norm = BertLayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList([BertLayer(hidden) for _ in range(layers)])
        self.decoder = nn.Linear(hidden, VOCAB, bias=False)
        self.decoder.weight = self.words.weight
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.05)

    def forward(self, input_ids, attention_mask, masked_lm_labels):
        mask = attention_mask.unsqueeze(1)
        mask = mask.to(dtype=next(self.parameters()).dtype)  # fp16 compatibility
        mask = (1.0 - mask) * -10000.0
        position_ids = torch.arange(input_ids.size(1), dtype=torch.long, device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(position_ids).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, mask)
        scores = self.decoder(x) + self.bias
        return F.cross_entropy(scores.view(-1, VOCAB).float(), masked_lm_labels.view(-1), ignore_index=IGNORE)


def synthetic_corpus(n, length=16):
    """Sequences that count upwards in steps, with some words masked."""
    first = torch.randint(1, 40, (n, 1))
    step = torch.randint(1, 3, (n, 1))
    words = (first + step * torch.arange(length)).clamp(max=MASK - 1)
    lengths = torch.randint(length // 2, length + 1, (n, 1))
    attention_mask = (torch.arange(length) < lengths).long()
    masked = (torch.rand(n, length) < 0.2) & attention_mask.bool()
    masked[:, 1] = True
    labels = torch.where(masked, words, torch.full_like(words, IGNORE))
    input_ids = torch.where(masked, torch.full_like(words, MASK), words) * attention_mask
    return TensorDataset(input_ids, attention_mask, labels)


def all_reduce_gradients(model):
    """Averages the gradients over the workers in one bucket."""
    grads = [p.grad.data for p in model.parameters() if p.grad is not None]
    coalesced = _flatten_dense_tensors(grads)
    coalesced /= torch.distributed.get_world_size()
    torch.distributed.all_reduce(coalesced)
    for buf, synced in zip(grads, _unflatten_dense_tensors(coalesced, grads)):
        buf.copy_(synced)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=32, type=int)
    parser.add_argument("--learning_rate", default=5e-3, type=float)
    parser.add_argument("--max_steps", default=30, type=int)
    parser.add_argument("--warmup_steps", default=5, type=int)
    parser.add_argument("--gradient_accumulation_steps", default=4, type=int)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--local_rank", default=os.environ.get("LOCAL_RANK", -1), type=int)
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--cast_model_outputs", action="store_true", help="leave the loss in half")
    parser.add_argument("--loss_scale", default=0, type=float, help="0: dynamic")
    parser.add_argument("--out", default="bert.jsonl", type=str)
    args = parser.parse_args()

    if args.local_rank == -1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)

    micro_batch = args.train_batch_size // args.gradient_accumulation_steps
    workers = 1 if args.local_rank == -1 else torch.distributed.get_world_size()
    dataset = synthetic_corpus(args.max_steps * args.train_batch_size * workers)
    sampler = RandomSampler(dataset) if args.local_rank == -1 else DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=micro_batch, pin_memory=True)

    model = BertForMaskedLM()
    model.to(device)
    no_decay = ["bias", "norm"]
    grouped = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=args.learning_rate, eps=1e-6)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale="dynamic" if args.loss_scale == 0 else args.loss_scale,
        cast_model_outputs=torch.float16 if args.cast_model_outputs else None,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup_steps, 1 - (step - args.warmup_steps) / args.max_steps)
    )

    model.train()
    is_main = args.local_rank in [-1, 0]
    stats = open(args.out if is_main else os.devnull, "w")
    global_step, tr_loss = 0, 0.0
    for step, batch in enumerate(tqdm(loader, desc="Iteration", disable=not is_main)):
        input_ids, attention_mask, labels = tuple(t.to(device, non_blocking=True) for t in batch)
        loss = model(input_ids, attention_mask, labels)
        loss = loss / args.gradient_accumulation_steps
        last = (step + 1) % args.gradient_accumulation_steps == 0
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
            if last and args.local_rank != -1:
                all_reduce_gradients(model)
        tr_loss += loss.item()
        if last:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            global_step += 1
            stats.write(json.dumps({"step": global_step, "loss": tr_loss, "dtype": str(loss.dtype)}) + "\n")
            tr_loss = 0.0
    stats.close()
    checksum = sum(p.double().sum().item() for p in model.parameters())
    print("rank {} checksum {:.12f}".format(max(args.local_rank, 0), checksum))


if __name__ == "__main__":
    main()

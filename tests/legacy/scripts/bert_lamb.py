# Large-batch pretraining with LAMB.
#
# The gradients of all micro batches are accumulated unscaled, flattened into one buffer, reduced once per step in half
# and only then checked for inf and nan. No DistributedDataParallel.
import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    import amp_C
    import apex_C
    from apex import amp
    from apex.amp import _amp_state
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedLAMB
except ImportError:
    raise ImportError("Please install apex with --cpp_ext --cuda_ext from https://github.com/nvidia/apex")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4)
        self.norm1 = FusedLayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.norm2 = FusedLayerNorm(width)

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Encoder(nn.Module):
    def __init__(self, vocab=48, width=32, length=12):
        super().__init__()
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(length, 1, width) * 0.1)
        self.norm = FusedLayerNorm(width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.norm(self.word(tokens.t()) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(0, 1)


class PretrainingCriterion(nn.Module):
    def forward(self, scores, labels):
        return F.cross_entropy(scores.reshape(-1, scores.size(-1)).float(), labels.reshape(-1), ignore_index=-1)


def make_data(n, vocab=48, length=12):
    start = torch.randint(0, 12, (n, 1))
    words = start + 3 * torch.arange(length).unsqueeze(0)
    words = (words + torch.randint(0, 2, (n, length))) % (vocab - 1)
    hidden = torch.rand(n, length) < 0.25
    hidden[:, 5] = True
    return TensorDataset(words.masked_fill(hidden, vocab - 1), words.masked_fill(~hidden, -1))


def take_step(args, model, optimizer, overflow_buf, global_step):
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    loss_scale = _amp_state.loss_scalers[0].loss_scale() if args.fp16 else 1.0
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]

    # one flat half buffer, which the gradients go into scaled and averaged
    flat = torch.empty(
        sum(g.numel() for g in grads), device="cuda", dtype=torch.float16 if args.fp16 else torch.float32
    )
    views = apex_C.unflatten(flat, grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536, overflow_buf, [grads, views], loss_scale / (world_size * args.gradient_accumulation_steps)
    )
    if world_size > 1 or torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    # and come back unscaled
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [views, grads], 1.0 / loss_scale)

    had_overflow = 0
    if args.fp16:
        scaler = amp._amp_state.loss_scalers[0]
        kept = scaler._overflow_buf
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = kept

    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        print(
            "Rank {} :: Gradient overflow. Skipping step, reducing loss scale to {}".format(
                max(args.local_rank, 0), scaler.loss_scale()
            )
        )
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default=".")
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=4e-2)
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--local_rank", type=int, default=os.getenv("LOCAL_RANK", -1))
    parser.add_argument("--opt-level", type=str, default="O2")
    parser.add_argument("--init_loss_scale", type=int, default=2**12)
    parser.add_argument("--seed", type=int, default=12439)
    parser.add_argument("--out", type=str, default="bert_lamb.jsonl")
    args = parser.parse_args()
    args.fp16 = args.opt_level != "O0"

    assert torch.cuda.is_available()
    torch.manual_seed(args.seed)
    if args.local_rank == -1:
        device = torch.device("cuda")
    else:
        torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")

    model = Encoder().to(device)
    criterion = PretrainingCriterion()
    decay = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    no_decay = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    optimizer = FusedLAMB(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=args.learning_rate
    )
    if args.fp16:
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            loss_scale="dynamic",
            cast_model_outputs=torch.float16 if args.opt_level == "O2" else None,
        )
        amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0")

    # O1 has no master weights: the parameters themselves are accumulated into
    overflow_buf = torch.cuda.IntTensor([0])
    loader = DataLoader(
        make_data(args.max_steps * args.train_batch_size),
        pin_memory=True,
        batch_size=args.train_batch_size // args.gradient_accumulation_steps,
    )
    stats = open(args.out, "w")
    model.train()
    global_step, average_loss = 0, 0.0
    for training_steps, batch in enumerate(loader, 1):
        tokens, labels = [t.to(device) for t in batch]
        loss = criterion(model(tokens), labels)
        if args.fp16:
            with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        average_loss += loss.item() / args.gradient_accumulation_steps
        if training_steps % args.gradient_accumulation_steps == 0:
            global_step = take_step(args, model, optimizer, overflow_buf, global_step)
            stats.write(json.dumps({"step": global_step, "loss": average_loss}) + "\n")
            average_loss = 0.0
    stats.close()
    optimizer.zero_grad()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
        },
        os.path.join(args.output_dir, "ckpt_{}.pt".format(global_step)),
    )


if __name__ == "__main__":
    main()

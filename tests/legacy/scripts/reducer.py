"""Contrastive learning with two forward passes per step, for which there is Reducer rather than DDP."""

import argparse
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from apex import amp
    from apex.optimizers import FusedSGD
    from apex.parallel import Reducer
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
# FOR DISTRIBUTED: supplied by torch.distributed.launch
parser.add_argument("--local_rank", default=os.environ.get("LOCAL_RANK", 0), type=int)
parser.add_argument("--opt-level", default="O1", type=str)
parser.add_argument("--iters", default=30, type=int)
parser.add_argument("--out", default="reducer.jsonl", type=str)
args = parser.parse_args()

args.distributed = "WORLD_SIZE" in os.environ
torch.cuda.set_device(args.local_rank)
if args.distributed:
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
torch.manual_seed(9)
torch.backends.cudnn.benchmark = True

model = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16)).cuda()
optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
reducer = Reducer(model) if args.distributed else None

torch.manual_seed(100 + args.local_rank)
mix = torch.randn(6, 24)
log = open(args.out if args.local_rank == 0 else os.devnull, "w")
for it in range(args.iters):
    source = torch.randn(32, 6).mm(mix)
    first = (source + 0.8 * torch.randn(32, 24)).cuda()
    second = (source + 0.8 * torch.randn(32, 24)).cuda()
    z1 = F.normalize(model(first), dim=1)
    z2 = F.normalize(model(second), dim=1)
    logits = z1.mm(z2.t()) / 0.2
    loss = F.cross_entropy(logits, torch.arange(32, device="cuda"))
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        if reducer is not None:
            reducer.reduce()
    optimizer.step()
    log.write(json.dumps({"iter": it, "loss": loss.item()}) + "\n")
log.close()
# sanity check: has to be the same everywhere
print("rank {} checksum {:.12f}".format(args.local_rank, sum(p.double().sum().item() for p in model.parameters())))

"""Trains on several ranks with DDP: each rank has the whole model, and DDP averages the gradients.

Run it with one process per GPU; without a GPU it runs on the CPU:

    torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampatch import amp

MICRO_BATCHES = 2


def train(steps: int, opt_level: str, device: torch.device) -> None:
    rank = dist.get_rank()

    # First amp.initialize, then DDP. Every rank starts with the weights and float32 masters of rank 0.
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, half_dtype=torch.float16, verbosity=int(rank == 0)
    )
    replica = DistributedDataParallel(model)

    torch.manual_seed(rank)  # every rank has its own data
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            inputs = torch.randn(64, 16, device=device)
            targets = inputs.sin().sum(dim=1, keepdim=True)
            # DDP averages the gradients once, in the last backward pass before the step. Under no_sync amp.scale_loss
            # leaves them scaled, so that DDP averages the same sum of gradients as without no_sync.
            is_last = number == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else replica.no_sync():
                loss = nn.functional.mse_loss(replica(inputs), targets) / MICRO_BATCHES
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
        # All ranks skip this step if a gradient overflows on any rank.
        optimizer.step()
        if rank == 0 and step in (0, steps - 1):
            print(f"step {step + 1}: loss {loss.item() * MICRO_BATCHES:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--opt-level", default="O2")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

    train(options.steps, options.opt_level, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains on several ranks with FSDP2: each rank has a shard of every weight, and gathers a layer to run it.

Run it with one process per GPU; without a GPU it runs on the CPU:

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ampatch import amp


def train(steps: int, device: torch.device) -> None:
    rank = dist.get_rank()

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    # First fully_shard, then the optimizer, which updates the shards, then amp.initialize at O1 (or O4).
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O1", half_dtype=torch.float16, verbosity=int(rank == 0)
    )

    torch.manual_seed(rank)  # every rank has its own data
    for step in range(steps):
        inputs = torch.randn(64, 16, device=device)
        targets = inputs.sin().sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        # Clips by the norm of the whole gradients, not of the shards. Every rank must call this.
        amp.clip_grad_norm_(optimizer, max_norm=10.0)
        # All ranks skip this step if a shard overflows on any rank.
        optimizer.step()
        if rank == 0 and step in (0, steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as own:
        directory = [own]
        dist.broadcast_object_list(directory)  # rank 0's directory, which every rank must be able to reach

        # A checkpoint: every rank writes its shards. The loss scale is plain numbers.
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}
        dcp.save(state, checkpoint_id=directory[0])

        # Loads the checkpoint, here into the same objects.
        dcp.load(state, checkpoint_id=directory[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        amp.load_state_dict(state["amp"])
        dist.barrier()
    if rank == 0:
        print("saved and loaded again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

    train(options.steps, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Self-supervised learning by swapped assignments of prototypes.
#
#   python -m torch.distributed.launch --nproc_per_node=2 swav.py
import argparse
import json
import os

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

try:
    import apex
    from apex.parallel.LARC import LARC
except ImportError:
    raise ImportError("Please install apex: mixed precision, LARC and synchronized batch norms come from there")

parser = argparse.ArgumentParser(description="Implementation of swapped assignments")
parser.add_argument("--local_rank", default=0, type=int, help="this argument is not used and should be ignored")
parser.add_argument("--opt-level", default="O1", type=str)
parser.add_argument("--syncbn_process_group_size", type=int, default=2)
parser.add_argument("--steps", default=30, type=int)
parser.add_argument("--batch_size", default=16, type=int, help="per gpu")
parser.add_argument("--base_lr", default=0.1, type=float)
parser.add_argument("--wd", default=1e-6, type=float)
parser.add_argument("--temperature", default=0.2, type=float)
parser.add_argument("--epsilon", default=0.2, type=float)
parser.add_argument("--sinkhorn_iterations", default=3, type=int)
parser.add_argument("--out", default="swav.jsonl", type=str)
parser.add_argument("--seed", type=int, default=31)


class Views(torch.utils.data.Dataset):
    """Two noisy views of one of many patterns."""

    def __init__(self, size):
        self.size = size
        self.patterns = np.random.RandomState(5).randn(24, 3, 12, 12).astype(np.float32)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.RandomState(index)
        pattern = self.patterns[rng.randint(len(self.patterns))]
        return [torch.from_numpy(pattern + 0.4 * rng.randn(3, 12, 12).astype(np.float32)) for _ in range(2)]


class Encoder(nn.Module):
    def __init__(self, output_dim=16, nmb_prototypes=20):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
        )
        self.projection_head = nn.Sequential(
            nn.Linear(32 * 9, 48), nn.BatchNorm1d(48), nn.ReLU(inplace=True), nn.Linear(48, output_dim)
        )
        self.prototypes = nn.Linear(output_dim, nmb_prototypes, bias=False)

    def forward(self, inputs):
        x = torch.cat([self.backbone(view.cuda(non_blocking=True)).flatten(1) for view in inputs])
        x = nn.functional.normalize(self.projection_head(x), dim=1, p=2)
        return x, self.prototypes(x)


def init_distributed_mode(args):
    args.rank = int(os.environ["RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    args.gpu_to_work_on = args.rank % torch.cuda.device_count()
    torch.cuda.set_device(args.gpu_to_work_on)


@torch.no_grad()
def distributed_sinkhorn(out, args):
    Q = torch.exp(out.float() / args.epsilon).t()
    B, K = Q.shape[1] * args.world_size, Q.shape[0]
    sum_Q = torch.sum(Q)
    dist.all_reduce(sum_Q)
    Q /= sum_Q
    for _ in range(args.sinkhorn_iterations):
        sum_of_rows = torch.sum(Q, dim=1, keepdim=True)
        dist.all_reduce(sum_of_rows)
        Q /= sum_of_rows * K
        Q /= torch.sum(Q, dim=0, keepdim=True) * B
    return (Q * B).t()


def train(train_loader, model, optimizer, args):
    model.train()
    stats = open(args.out if args.rank == 0 else os.devnull, "w")
    for it, inputs in enumerate(train_loader):
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.base_lr * min(1.0, (it + 1) / 10.0)

        # normalize the prototypes
        with torch.no_grad():
            w = model.module.prototypes.weight.data.clone()
            w = nn.functional.normalize(w, dim=1, p=2)
            model.module.prototypes.weight.copy_(w)

        embedding, output = model(inputs)
        bs = inputs[0].size(0)
        loss = 0
        for crop in range(2):
            with torch.no_grad():
                q = distributed_sinkhorn(output[bs * crop : bs * (crop + 1)].detach(), args)[-bs:]
            p = F.softmax(output[bs * (1 - crop) : bs * (2 - crop)] / args.temperature, dim=1)
            loss -= torch.mean(torch.sum(q * torch.log(p), dim=1)) / 2

        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        # cancel some gradients
        if it < 2:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        optimizer.step()

        reduced = loss.detach().clone()
        dist.all_reduce(reduced)
        reduced /= args.world_size
        stats.write(json.dumps({"it": it, "loss": reduced.item()}) + "\n")
    stats.close()


def main():
    args = parser.parse_args()
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    np.random.seed(args.seed)
    cudnn.benchmark = True

    train_dataset = Views(args.steps * args.batch_size * args.world_size)
    sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, sampler=sampler, batch_size=args.batch_size, num_workers=1, pin_memory=True, drop_last=True
    )
    train_loader.sampler.set_epoch(0)

    model = Encoder()
    process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
    model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=args.wd)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.02, clip=False)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level)

    model = apex.parallel.DistributedDataParallel(model, delay_allreduce=True)
    train(train_loader, model, optimizer, args)
    checksum = sum(p.double().sum().item() for p in model.parameters())
    print("rank {} checksum {:.12f}".format(args.rank, checksum))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

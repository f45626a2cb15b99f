import argparse
import json
import os

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


def parse():
    parser = argparse.ArgumentParser(description="Image classification")
    parser.add_argument("-j", "--workers", default=1, type=int, metavar="N")
    parser.add_argument("--epochs", default=2, type=int, metavar="N")
    parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
    parser.add_argument("-b", "--batch-size", default=16, type=int, metavar="N", help="per process")
    parser.add_argument("--iters-per-epoch", default=15, type=int)
    parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, metavar="LR")
    parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float, metavar="W")
    parser.add_argument("--resume", default="", type=str, metavar="PATH")
    parser.add_argument("--save-dir", default=".", type=str)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--out", default="imagenet.jsonl", type=str)
    return parser.parse_args()


class SyntheticImages(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed
        self.classes = np.random.RandomState(0).randint(64, 192, (10, 3, 16, 16))

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        rng = np.random.RandomState(self.seed + index)
        target = rng.randint(10)
        shown = target if rng.rand() < 0.8 else rng.randint(10)
        image = self.classes[shown] + rng.normal(0, 48, (3, 16, 16))
        return np.clip(image, 0, 255).astype(np.uint8), target


def fast_collate(batch):
    imgs = [img[0] for img in batch]
    targets = torch.tensor([target[1] for target in batch], dtype=torch.int64)
    tensor = torch.zeros((len(imgs), 3, 16, 16), dtype=torch.uint8)
    for i, img in enumerate(imgs):
        tensor[i] += torch.from_numpy(img)
    return tensor, targets


class data_prefetcher:
    """Copies the next batch to the GPU on a stream of its own, and normalizes it there."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input = self.next_input
        target = self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


class SmallResNet(nn.Module):
    def __init__(self):
        super(SmallResNet, self).__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1, bias=False), nn.BatchNorm2d(24))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        identity = self.stem(x)
        out = self.block(identity)
        out += identity
        return self.fc(torch.flatten(self.avgpool(F.relu(out)), 1))


def adjust_learning_rate(optimizer, epoch, step, args):
    lr = args.lr * (0.1 ** (epoch // 30))
    if epoch < 1:
        lr = lr * float(1 + step + epoch * args.iters_per_epoch) / args.iters_per_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(train_loader, model, criterion, optimizer, epoch, args, log):
    model.train()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        i += 1
        adjust_learning_rate(optimizer, epoch, i, args)
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        log.write(json.dumps({"epoch": epoch, "i": i, "loss": to_python_float(loss.data)}) + "\n")
        torch.cuda.synchronize()
        input, target = prefetcher.next()


def main():
    args = parse()
    print("fused kernels: {}".format(multi_tensor_applier.available))
    cudnn.benchmark = True
    if args.deterministic:
        cudnn.benchmark = False
        cudnn.deterministic = True
        torch.manual_seed(args.local_rank)
        torch.set_printoptions(precision=10)

    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."

    model = SmallResNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    criterion = nn.CrossEntropyLoss().cuda()

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda())
        args.start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    train_dataset = SyntheticImages(args.batch_size * args.iters_per_epoch, seed=1)
    # draws the order of an epoch from the number of the epoch
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=1, rank=0)
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=False,
        num_workers=args.workers,
        pin_memory=True,
        sampler=train_sampler,
        collate_fn=fast_collate,
    )
    log = open(args.out, "w")
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args, log)
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            },
            os.path.join(args.save_dir, "checkpoint.pth.tar"),
        )
    log.close()


if __name__ == "__main__":
    main()

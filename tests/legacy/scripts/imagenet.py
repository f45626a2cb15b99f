import argparse
import json
import os
import shutil
import time

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
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
    parser.add_argument("--print-freq", "-p", default=5, type=int, metavar="N")
    parser.add_argument("--resume", default="", type=str, metavar="PATH")
    parser.add_argument("--save-dir", default=".", type=str)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true", help="enabling apex sync BN.")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--channels-last", action="store_true")
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


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super(BasicBlock, self).__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self):
        super(SmallResNet, self).__init__()
        self.layers = nn.Sequential(BasicBlock(3, 12, 1), BasicBlock(12, 24, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class AverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def accuracy(output, target, topk=(1,)):
    """Computes the precision@k for the specified values of k"""
    maxk = max(topk)
    batch_size = target.size(0)
    _, pred = output.topk(maxk, 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


def adjust_learning_rate(optimizer, epoch, step, args):
    lr = args.lr * (0.1 ** (epoch // 30))
    if epoch < 1:
        lr = lr * float(1 + step + epoch * args.iters_per_epoch) / args.iters_per_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(train_loader, model, criterion, optimizer, epoch, args, log):
    batch_time, losses, top1 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        i += 1
        adjust_learning_rate(optimizer, epoch, i, args)
        if args.channels_last:
            input = input.to(memory_format=torch.channels_last)
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        reduced_loss = reduce_tensor(loss.data, args.world_size) if args.distributed else loss.data
        losses.update(to_python_float(reduced_loss), input.size(0))
        log.write(json.dumps({"epoch": epoch, "i": i, "loss": to_python_float(reduced_loss)}) + "\n")
        if i % args.print_freq == 0:
            (prec1,) = accuracy(output.data, target)
            top1.update(to_python_float(prec1), input.size(0))
            torch.cuda.synchronize()
            batch_time.update((time.time() - end) / args.print_freq)
            end = time.time()
            if args.local_rank == 0:
                print(
                    "Epoch: [{0}][{1}/{2}]\tTime {batch_time.val:.3f} ({batch_time.avg:.3f})\t"
                    "Loss {loss.val:.10f} ({loss.avg:.4f})\tPrec@1 {top1.val:.3f} ({top1.avg:.3f})".format(
                        epoch, i, len(train_loader), batch_time=batch_time, loss=losses, top1=top1
                    )
                )
        input, target = prefetcher.next()


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    prefetcher = data_prefetcher(val_loader)
    input, target = prefetcher.next()
    while input is not None:
        with torch.no_grad():
            output = model(input)
            loss = criterion(output, target)
        (prec1,) = accuracy(output.data, target)
        losses.update(to_python_float(loss.data), input.size(0))
        top1.update(to_python_float(prec1), input.size(0))
        input, target = prefetcher.next()
    print(" * Prec@1 {top1.avg:.3f} Loss {loss.avg:.4f}".format(top1=top1, loss=losses))
    return top1.avg


def save_checkpoint(state, is_best, directory):
    filename = os.path.join(directory, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(directory, "model_best.pth.tar"))


def main():
    args = parse()
    best_prec1 = 0
    print("opt_level = {}".format(args.opt_level))
    print("keep_batchnorm_fp32 = {}".format(args.keep_batchnorm_fp32), type(args.keep_batchnorm_fp32))
    print("loss_scale = {}".format(args.loss_scale), type(args.loss_scale))
    print("\nCUDNN VERSION: {}\n".format(torch.backends.cudnn.version()))
    print("fused kernels: {}".format(multi_tensor_applier.available))
    cudnn.benchmark = True
    if args.deterministic:
        cudnn.benchmark = False
        cudnn.deterministic = True
        torch.manual_seed(args.local_rank)
        torch.set_printoptions(precision=10)

    args.distributed = False
    if "WORLD_SIZE" in os.environ:
        args.distributed = int(os.environ["WORLD_SIZE"]) > 1
    args.gpu = 0
    args.world_size = 1
    if args.distributed:
        args.gpu = args.local_rank
        torch.cuda.set_device(args.gpu)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
        args.world_size = torch.distributed.get_world_size()
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."

    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = SmallResNet()
    if args.sync_bn:
        import apex

        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    model = model.cuda().to(memory_format=memory_format)

    # Scale learning rate based on global batch size
    args.lr = args.lr * float(args.batch_size * args.world_size) / 16.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()

    if args.resume:
        if os.path.isfile(args.resume):
            print("=> loading checkpoint '{}'".format(args.resume))
            checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
            args.start_epoch = checkpoint["epoch"]
            best_prec1 = checkpoint["best_prec1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
            print("=> loaded checkpoint '{}' (epoch {})".format(args.resume, checkpoint["epoch"]))
        else:
            print("=> no checkpoint found at '{}'".format(args.resume))

    train_dataset = SyntheticImages(args.batch_size * args.iters_per_epoch * args.world_size, seed=1)
    val_dataset = SyntheticImages(64, seed=100000)
    # draws the order of an epoch from the number of the epoch
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=args.world_size, rank=args.local_rank
    )
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=False,
        num_workers=args.workers,
        pin_memory=True,
        sampler=train_sampler,
        collate_fn=fast_collate,
    )
    val_loader = torch.utils.data.DataLoader(
        val_dataset,
        batch_size=args.batch_size,
        shuffle=False,
        num_workers=args.workers,
        pin_memory=True,
        collate_fn=fast_collate,
    )

    log = open(args.out, "w")
    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args, log)
        prec1 = validate(val_loader, model, criterion)
        if args.local_rank == 0:
            is_best = prec1 > best_prec1
            best_prec1 = max(prec1, best_prec1)
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_prec1": best_prec1,
                    "optimizer": optimizer.state_dict(),
                    "amp": amp.state_dict(),
                },
                is_best,
                args.save_dir,
            )
    log.close()


if __name__ == "__main__":
    main()

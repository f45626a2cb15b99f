"""Semantic segmentation with an auxiliary head and synchronized batch norms."""

from __future__ import division

import argparse
import json
import os

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel, SyncBatchNorm
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex .")

IGNORE = 255


class Circles(Dataset):
    def __init__(self, length, size=40):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        g = torch.Generator()
        g.manual_seed(index)
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        label = torch.zeros(self.size, self.size, dtype=torch.long)
        for k in (1, 2):
            cx, cy = (torch.rand(2, generator=g) * self.size).tolist()
            label[(x - cx) ** 2 + (y - cy) ** 2 < 90] = k
        image = F.one_hot(label, 3).permute(2, 0, 1).float() + 4.0 * torch.randn(3, self.size, self.size, generator=g)
        label[:2] = IGNORE
        return {"data": image, "label": label}


class ConvBnRelu(nn.Module):
    def __init__(self, in_planes, out_planes, ksize, stride, pad, norm_layer, dilation=1):
        super(ConvBnRelu, self).__init__()
        self.conv = nn.Conv2d(in_planes, out_planes, ksize, stride, pad, dilation=dilation, bias=False)
        self.bn = norm_layer(out_planes, eps=1e-5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


class PyramidNet(nn.Module):
    def __init__(self, num_classes, norm_layer, criterion=None):
        super(PyramidNet, self).__init__()
        self.stem = ConvBnRelu(3, 16, 3, 2, 1, norm_layer)
        self.stage = ConvBnRelu(16, 24, 3, 1, 2, norm_layer, dilation=2)
        self.ppm = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(s), ConvBnRelu(24, 8, 1, 1, 0, norm_layer)) for s in (2, 4)]
        )
        self.head = nn.Conv2d(24 + 16, num_classes, 1)
        self.aux_head = nn.Conv2d(16, num_classes, 1)
        self.criterion = criterion

    def forward(self, data, label):
        low = self.stem(data)
        x = self.stage(low)
        pooled = [F.interpolate(p(x), x.size()[2:], mode="bilinear", align_corners=True) for p in self.ppm]
        out = self.head(torch.cat([x] + pooled, 1))
        out = F.interpolate(out, scale_factor=2, mode="bilinear", align_corners=True)
        aux = F.interpolate(self.aux_head(low), scale_factor=2, mode="bilinear", align_corners=True)
        return self.criterion(out, label) + 0.4 * self.criterion(aux, label)


def group_weight(module, norm_layer, lr):
    group_decay, group_no_decay = [], []
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            group_decay.append(m.weight)
            if m.bias is not None:
                group_no_decay.append(m.bias)
        elif isinstance(m, (norm_layer, nn.BatchNorm2d)):
            group_no_decay += [m.weight, m.bias]
    assert len(list(module.parameters())) == len(group_decay) + len(group_no_decay)
    return [dict(params=group_decay, lr=lr), dict(params=group_no_decay, weight_decay=0.0, lr=lr)]


class PolyLR(object):
    def __init__(self, start_lr, lr_power, total_iters):
        self.start_lr, self.lr_power, self.total_iters = start_lr, lr_power, total_iters + 0.0

    def get_lr(self, cur_iter):
        return self.start_lr * (1 - cur_iter / self.total_iters) ** self.lr_power


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt-level", default="O1", type=str)
parser.add_argument("--niters", default=30, type=int)
parser.add_argument("--out", default="segmentation.jsonl", type=str)

if __name__ == "__main__":
    args = parser.parse_args()
    cudnn.benchmark = True
    torch.manual_seed(304)
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group(backend="nccl", init_method="env://")

    criterion = nn.CrossEntropyLoss(reduction="mean", ignore_index=IGNORE)
    BatchNorm2d = SyncBatchNorm
    model = PyramidNet(3, BatchNorm2d, criterion).cuda()
    optimizer = torch.optim.SGD(group_weight(model, BatchNorm2d, 5e-2), lr=5e-2, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    if distributed:
        model = DistributedDataParallel(model)
    lr_policy = PolyLR(5e-2, 0.9, args.niters)
    dataset = Circles(args.niters * 8)
    loader = DataLoader(dataset, batch_size=8, num_workers=1, drop_last=True, shuffle=False, pin_memory=True)

    model.train()
    stats = open(args.out, "w")
    for idx, minibatch in enumerate(loader):
        imgs = minibatch["data"].cuda(non_blocking=True)
        gts = minibatch["label"].cuda(non_blocking=True)
        loss = model(imgs, gts)
        lr = lr_policy.get_lr(idx)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        reduce_loss = loss.detach().clone()
        if distributed:
            dist.all_reduce(reduce_loss)
            reduce_loss = reduce_loss / dist.get_world_size()
        stats.write(json.dumps({"iter": idx, "loss": reduce_loss.item()}) + "\n")
    stats.close()

# encoding: utf-8
"""
Person re-identification: identity loss with label smoothing and triplet loss with hard mining.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.backends import cudnn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import Sampler

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this with --fp16")

NUM_CLASSES = 12


class Gallery(Dataset):
    def __init__(self, per_identity=16):
        rng = np.random.RandomState(7)
        self.prototypes = rng.rand(NUM_CLASSES, 3, 32, 16).astype(np.float32)
        self.per_identity = per_identity

    def __len__(self):
        return NUM_CLASSES * self.per_identity

    def __getitem__(self, index):
        pid = index // self.per_identity
        rng = np.random.RandomState(index)
        image = self.prototypes[pid] + rng.normal(0, 1.0, (3, 32, 16)).astype(np.float32)
        return torch.from_numpy(image), pid, index % 6  # camera


class RandomIdentitySampler(Sampler):
    """P identities with K images each make up a batch."""

    def __init__(self, data_source, batch_size, num_instances, num_batches):
        self.per_identity = data_source.per_identity
        self.num_pids = batch_size // num_instances
        self.num_instances = num_instances
        self.num_batches = num_batches
        self.rng = np.random.RandomState(0)

    def __iter__(self):
        for _ in range(self.num_batches):
            for pid in self.rng.choice(NUM_CLASSES, self.num_pids, replace=False):
                for k in self.rng.choice(self.per_identity, self.num_instances, replace=False):
                    yield int(pid * self.per_identity + k)

    def __len__(self):
        return self.num_batches * self.num_pids * self.num_instances


def weights_init_kaiming(m):
    classname = m.__class__.__name__
    if classname.find("Linear") != -1:
        nn.init.normal_(m.weight, std=0.01)
    elif classname.find("Conv") != -1:
        nn.init.kaiming_normal_(m.weight, a=0, mode="fan_in")
    elif classname.find("BatchNorm") != -1:
        nn.init.constant_(m.weight, 1.0)
        nn.init.constant_(m.bias, 0.0)


class Baseline(nn.Module):
    in_planes = 48

    def __init__(self, num_classes):
        super(Baseline, self).__init__()
        self.base = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 48, 3, 2, 1, bias=False),
            nn.BatchNorm2d(48),
            nn.ReLU(inplace=True),
        )
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.bottleneck = nn.BatchNorm1d(self.in_planes)
        self.bottleneck.bias.requires_grad_(False)  # no shift
        self.classifier = nn.Linear(self.in_planes, num_classes, bias=False)
        self.apply(weights_init_kaiming)

    def forward(self, x):
        global_feat = self.gap(self.base(x))
        global_feat = global_feat.view(global_feat.shape[0], -1)
        feat = self.bottleneck(global_feat)
        if self.training:
            return self.classifier(feat), global_feat
        return feat


class TripletLoss(object):
    def __init__(self, margin=None):
        self.ranking_loss = nn.MarginRankingLoss(margin=margin) if margin is not None else nn.SoftMarginLoss()
        self.margin = margin

    def __call__(self, feat, labels):
        m = feat.size(0)
        xx = torch.pow(feat, 2).sum(1, keepdim=True).expand(m, m)
        dist = xx + xx.t()
        dist.addmm_(feat, feat.t(), beta=1, alpha=-2)
        dist = dist.clamp(min=1e-12).sqrt()
        same = labels.expand(m, m).eq(labels.expand(m, m).t())
        dist_ap = dist.masked_fill(~same, 0).max(1)[0]
        dist_an = dist.masked_fill(same, 1e4).min(1)[0]
        y = dist_an.new().resize_as_(dist_an).fill_(1)
        if self.margin is not None:
            return self.ranking_loss(dist_an, dist_ap, y)
        return self.ranking_loss(dist_an - dist_ap, y)


class CrossEntropyLabelSmooth(nn.Module):
    def __init__(self, num_classes, epsilon=0.1, use_gpu=True):
        super(CrossEntropyLabelSmooth, self).__init__()
        self.num_classes = num_classes
        self.epsilon = epsilon
        self.use_gpu = use_gpu
        self.logsoftmax = nn.LogSoftmax(dim=1)

    def forward(self, inputs, targets):
        log_probs = self.logsoftmax(inputs)
        targets = torch.zeros(log_probs.size()).scatter_(1, targets.unsqueeze(1).data.cpu(), 1)
        if self.use_gpu:
            targets = targets.cuda()
        targets = (1 - self.epsilon) * targets + self.epsilon / self.num_classes
        return (-targets * log_probs).mean(0).sum()


def extract(model, loader, device):
    model.eval()
    feats, pids = [], []
    with torch.no_grad():
        for img, pid, _ in loader:
            feats.append(F.normalize(model(img.to(device)), dim=1).cpu())
            pids.extend(np.asarray(pid))
    return torch.cat(feats), np.asarray(pids)


def main():
    parser = argparse.ArgumentParser(description="ReID Baseline Training")
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--keep-batchnorm-fp32", default=None, type=str)
    parser.add_argument("--loss-scale", default=None, type=str)
    parser.add_argument("--max-iters", default=30, type=int)
    parser.add_argument("--margin", default=0.3, type=float)
    parser.add_argument("--gpu", default="0", type=str)
    parser.add_argument("--output-dir", default=".", type=str)
    parser.add_argument("--out", default="reid.jsonl", type=str)
    args = parser.parse_args()

    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    cudnn.benchmark = True
    torch.manual_seed(1)
    print("opt_level = {}".format(args.opt_level))
    print("keep_batchnorm_fp32 = {}".format(args.keep_batchnorm_fp32), type(args.keep_batchnorm_fp32))
    print("loss_scale = {}".format(args.loss_scale), type(args.loss_scale))

    dataset = Gallery()
    loader = DataLoader(
        dataset,
        batch_size=16,
        sampler=RandomIdentitySampler(dataset, 16, 4, args.max_iters),
        num_workers=1,
        pin_memory=True,
    )
    model = Baseline(NUM_CLASSES).cuda()
    params = []
    for key, value in model.named_parameters():
        if not value.requires_grad:
            continue
        params += [{"params": [value], "lr": 3.5e-3 * (2 if "bias" in key else 1), "weight_decay": 5e-4}]
    optimizer = torch.optim.Adam(params)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    xent, triplet = CrossEntropyLabelSmooth(NUM_CLASSES), TripletLoss(args.margin)

    stats = open(args.out, "w")
    model.train()
    end = time.time()
    for n_iter, (img, vid, _) in enumerate(loader):
        optimizer.zero_grad()
        img, target = img.to("cuda"), vid.to("cuda")
        score, feat = model(img)
        loss = xent(score, target) + triplet(feat, target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        acc = (score.max(1)[1] == target).float().mean()
        stats.write(json.dumps({"iter": n_iter + 1, "loss": loss.item()}) + "\n")
        if (n_iter + 1) % 10 == 0:
            print(
                "Iteration[{}/{}] Loss: {:.3f}, Acc: {:.3f}, Base Lr: {:.2e}, time {:.2f}".format(
                    n_iter + 1,
                    args.max_iters,
                    loss.item(),
                    acc.item(),
                    optimizer.param_groups[0]["lr"],
                    time.time() - end,
                )
            )
    stats.close()

    feats, pids = extract(model, DataLoader(dataset, batch_size=64), "cuda")
    similarity = feats.mm(feats.t()).fill_diagonal_(-1)
    print("Rank-1: {:.1%}".format((pids[similarity.argmax(1).numpy()] == pids).mean()))
    torch.save(model.state_dict(), os.path.join(args.output_dir, "reid_{}.pth".format(args.max_iters)))


if __name__ == "__main__":
    main()

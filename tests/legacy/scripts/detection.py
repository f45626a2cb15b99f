"""
Two-stage detector on synthetic scenes.

    python detection.py --opt-level O1
"""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

try:
    from apex import amp
except ImportError:
    raise ImportError(
        "Use APEX for multi-precision via apex.amp, please install it from https://github.com/nvidia/apex"
    )

STRIDE = 4


class Scenes(Dataset):
    """Bright rectangles of three colors on a noisy background."""

    def __init__(self, num_images, size=48):
        self.num_images = num_images
        self.size = size

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        g = torch.Generator()
        g.manual_seed(1000 + index)
        image = torch.randn(3, self.size, self.size, generator=g) * 0.3
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            x, y = torch.randint(0, self.size - 20, (2,), generator=g).tolist()
            w, h = torch.randint(8, 20, (2,), generator=g).tolist()
            label = int(torch.randint(0, 3, (1,), generator=g))
            image[label, y : y + h, x : x + w] += 1.5
            boxes.append([x, y, x + w, y + h])
            labels.append(label + 1)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


class BatchCollator(object):
    def __call__(self, batch):
        images, targets = zip(*batch)
        return torch.stack(images), list(targets)


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm2d where the statistics and the affine parameters are fixed."""

    def __init__(self, n):
        super(FrozenBatchNorm2d, self).__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))

    def forward(self, x):
        # buffers of a frozen layer follow the type of the input
        if x.dtype == torch.float16:
            self.weight = self.weight.half()
            self.bias = self.bias.half()
            self.running_mean = self.running_mean.half()
            self.running_var = self.running_var.half()
        scale = self.weight * self.running_var.rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class ROIAlign(nn.Module):
    def __init__(self, output_size, spatial_scale):
        super(ROIAlign, self).__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    # coordinates do not fit in half
    @amp.float_function
    def forward(self, features, rois):
        n, _, h, w = features.shape
        index = rois[:, 0].long()
        x1, y1, x2, y2 = (rois[:, 1:] * self.spatial_scale).unbind(1)
        theta = features.new_zeros(len(rois), 2, 3)
        theta[:, 0, 0] = (x2 - x1) / w
        theta[:, 0, 2] = (x1 + x2) / w - 1
        theta[:, 1, 1] = (y2 - y1) / h
        theta[:, 1, 2] = (y1 + y2) / h - 1
        shape = (len(rois), features.shape[1], self.output_size, self.output_size)
        grid = F.affine_grid(theta, shape, align_corners=False)
        return F.grid_sample(features[index], grid, align_corners=False)


def conv_block(n_in, n_out, stride):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), FrozenBatchNorm2d(n_out), nn.ReLU(inplace=True)
    )


class Detector(nn.Module):
    def __init__(self, num_classes):
        super(Detector, self).__init__()
        self.backbone = nn.Sequential(conv_block(3, 16, 2), conv_block(16, 24, 2), conv_block(24, 24, 1))
        self.objectness = nn.Conv2d(24, 1, 1)
        self.pooler = ROIAlign(5, 1.0 / STRIDE)
        self.fc = nn.Linear(24 * 25, 64)
        self.cls_score = nn.Linear(64, num_classes)
        self.bbox_pred = nn.Linear(64, 4)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        for layer in (self.objectness, self.fc, self.cls_score, self.bbox_pred):
            nn.init.constant_(layer.bias, 0)

    def forward(self, images, targets):
        features = self.backbone(images)
        return dict(self.loss_rpn(features, targets), **self.loss_box(features, targets))

    def loss_rpn(self, features, targets):
        logits = self.objectness(features).squeeze(1)
        labels = torch.zeros(logits.shape, device=logits.device)
        for i, target in enumerate(targets):
            for x1, y1, x2, y2 in (target["boxes"] / STRIDE).round().long().tolist():
                labels[i, y1:y2, x1:x2] = 1
        return {"loss_objectness": F.binary_cross_entropy_with_logits(logits.float(), labels)}

    def loss_box(self, features, targets):
        proposals, classes, regression = [], [], []
        for i, target in enumerate(targets):
            boxes = target["boxes"]
            g = torch.Generator()
            g.manual_seed(len(boxes))
            jitter = (torch.rand(boxes.shape, generator=g) * 4 - 2).to(boxes.device)
            index = torch.full((len(boxes), 1), float(i), device=boxes.device)
            proposals.append(torch.cat([index, boxes + jitter], 1))
            classes.append(target["labels"])
            regression.append(-jitter)
            # background
            away = torch.tensor([[float(i), 0, 0, 47, 6]], device=boxes.device)
            proposals.append(away)
            classes.append(torch.zeros(1, dtype=torch.int64, device=boxes.device))
            regression.append(torch.zeros(1, 4, device=boxes.device))
        proposals, classes, regression = torch.cat(proposals), torch.cat(classes), torch.cat(regression)
        x = self.pooler(features, proposals)
        x = F.relu(self.fc(x.flatten(1)))
        positive = torch.nonzero(classes > 0).squeeze(1)
        class_logits, box_regression = self.cls_score(x), self.bbox_pred(x)
        return {
            "loss_classifier": F.cross_entropy(class_logits, classes),
            "loss_box_reg": F.smooth_l1_loss(box_regression[positive].float(), regression[positive]),
        }


def do_train(args, model, data_loader, optimizer, scheduler, device, stats):
    model.train()
    for iteration, (images, targets) in enumerate(data_loader, 1):
        images = images.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]

        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())

        optimizer.zero_grad()
        # Note: If mixed precision is not used, this ends up doing nothing
        with amp.scale_loss(losses, optimizer) as scaled_losses:
            scaled_losses.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
        scheduler.step()

        stats.write(json.dumps({"iter": iteration, "loss": losses.item()}) + "\n")


def main():
    parser = argparse.ArgumentParser(description="Detection training")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--max-iter", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--out", type=str, default="detection.jsonl")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = Detector(num_classes=4)
    model.to(device)

    params = []
    for key, value in model.named_parameters():
        if not value.requires_grad:
            continue
        is_bias = "bias" in key
        params += [{"params": [value], "lr": args.lr * (2 if is_bias else 1), "weight_decay": 0 if is_bias else 1e-4}]
    optimizer = torch.optim.SGD(params, args.lr, momentum=0.9)

    # Initialize mixed-precision training
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[25])

    loader = DataLoader(
        Scenes(args.max_iter * args.batch_size),
        args.batch_size,
        num_workers=1,
        collate_fn=BatchCollator(),
        pin_memory=True,
    )
    with open(args.out, "w") as stats:
        do_train(args, model, loader, optimizer, scheduler, device, stats)


if __name__ == "__main__":
    main()

"""Character model with the FP16_Optimizer of before amp."""

import argparse
import json

import torch
import torch.nn as nn
from torch.autograd import Variable

try:
    from apex.fp16_utils import FP16_Optimizer, network_to_half
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run with --fp16.")

parser = argparse.ArgumentParser(description="Sequence classification")
parser.add_argument("--fp32", action="store_true", help="train in single precision")
parser.add_argument("--loss-scale", type=float, default=1, help="static loss scale")
parser.add_argument("--dynamic-loss-scale", action="store_true", help="overrides --loss-scale")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--iters", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--save", type=str, default="model.pt")
parser.add_argument("--load", type=str, default="")
parser.add_argument("--start-iter", type=int, default=0)
parser.add_argument("--out", type=str, default="fp16_optimizer.jsonl")
args = parser.parse_args()

torch.manual_seed(1111)
torch.cuda.manual_seed(1111)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.features = nn.Sequential(
            nn.Conv1d(4, 24, 5, padding=2),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Conv1d(24, 32, 5, stride=2, padding=2),
            nn.BatchNorm1d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(32 * 8, 5)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


def get_batch(i):
    g = torch.Generator()
    g.manual_seed(i)
    target = torch.randint(0, 5, (args.batch_size,), generator=g)
    t = torch.arange(16).float()
    phase = torch.rand(args.batch_size, 4, 1, generator=g) * 2
    data = torch.sin((target.view(-1, 1, 1).float() + 1) * t * 0.4 + phase)
    data = data + 2.5 * torch.randn(args.batch_size, 4, 16, generator=g)
    return Variable(data.cuda()), Variable(target.cuda())


model = Net().cuda()
if not args.fp32:
    model = network_to_half(model)
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)
if not args.fp32:
    optimizer = FP16_Optimizer(
        optimizer,
        static_loss_scale=args.loss_scale,
        dynamic_loss_scale=args.dynamic_loss_scale,
        dynamic_loss_args={"init_scale": 2**16},
        verbose=True,
    )
if args.load:
    checkpoint = torch.load(args.load, map_location=lambda storage, loc: storage.cuda())
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

model.train()
log = open(args.out, "w")
for i in range(args.start_iter, args.iters):
    data, target = get_batch(i)
    output = model(data)
    loss = criterion(output.float(), target)
    optimizer.zero_grad()
    if args.fp32:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    else:
        optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        optimizer.clip_master_grads(args.clip)
    optimizer.step()
    log.write(json.dumps({"iter": i, "loss": loss.item()}) + "\n")
log.close()

torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)

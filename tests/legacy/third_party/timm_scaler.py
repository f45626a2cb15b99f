"""timm's ApexScaler, used as its train.py uses it."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.nn as nn
from apex import amp


def import_apex_scaler():
    """Out of a timm whose __init__ is not run, because that wants torchvision."""
    [folder] = [Path(entry, "timm") for entry in sys.path if Path(entry, "timm", "utils", "cuda.py").exists()]
    for name, where in (("timm", folder), ("timm.utils", folder / "utils")):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(where)]
    from timm.utils.cuda import ApexScaler, has_apex

    assert has_apex
    return ApexScaler


parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--clip-mode", default="norm")
parser.add_argument("--clip-grad", default=1.0, type=float)
parser.add_argument("--grad-accum-steps", default=1, type=int)
args = parser.parse_args()

ApexScaler = import_apex_scaler()
torch.manual_seed(0)
device = torch.device("cuda")
x = torch.randn(512, 3, 8, 8)
y = (x.flatten(1).mm(torch.randn(192, 4))).argmax(1)

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 4)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
loss_scaler = ApexScaler()
criterion = nn.CrossEntropyLoss()

losses, norms = [], []
model.train()
for update in range(24):
    optimizer.zero_grad()
    for part in range(args.grad_accum_steps):
        index = (update * args.grad_accum_steps + part) % 16
        batch = slice(32 * index, 32 * (index + 1))
        loss = criterion(model(x[batch].to(device)), y[batch].to(device)) / args.grad_accum_steps
        loss_scaler(
            loss,
            optimizer,
            clip_grad=args.clip_grad,
            clip_mode=args.clip_mode,
            parameters=model.parameters(),
            create_graph=False,
            need_update=part == args.grad_accum_steps - 1,
        )
    losses.append(loss.item() * args.grad_accum_steps)

checkpoint = {loss_scaler.state_dict_key: loss_scaler.state_dict()}
later = {**checkpoint["amp"], "loss_scaler0": {**checkpoint["amp"]["loss_scaler0"], "loss_scale": 512.0}}
loss_scaler.load_state_dict(later)
print(json.dumps({"losses": losses, "saved": checkpoint, "loaded": amp.state_dict()}))

"""Linear probe of a frozen trunk, with master weights and a static loss scale kept by hand."""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from apex.fp16_utils import *
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--static-loss-scale", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--gpu", type=int, default=0)
parser.add_argument("--out", type=str, default="manual.jsonl")


class Probe(nn.Module):
    def __init__(self):
        super(Probe, self).__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64))
        self.head = nn.Linear(64, 6)
        for p in self.trunk[0].parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.head(F.relu(self.trunk(x)))


def main():
    args = parser.parse_args()
    torch.manual_seed(17)
    torch.cuda.set_device(args.gpu)
    torch.backends.cudnn.benchmark = True

    model = Probe().cuda()
    if args.fp16:
        model = network_to_half(model)
    if args.fp16:
        model_params, master_params = prep_param_lists(model)
    else:
        master_params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(master_params, args.lr, momentum=0.9, weight_decay=1e-4)

    teacher = torch.randn(20, 6)
    log = open(args.out, "w")
    for step in range(args.steps):
        input = torch.randn(64, 20)
        target = (input.mm(teacher) + 2 * torch.randn(64, 6)).argmax(1).cuda(non_blocking=True)
        output = model(input.cuda(non_blocking=True))
        loss = nn.functional.cross_entropy(output.float(), target)
        reduced_loss = to_python_float(loss.data)
        if args.fp16:
            loss = loss * args.static_loss_scale
            model.zero_grad()
            loss.backward()
            model_grads_to_master_grads(model_params, master_params)
            for param in master_params:
                param.grad.data = param.grad.data / args.static_loss_scale
            optimizer.step()
            master_params_to_model_params(model_params, master_params)
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        log.write(json.dumps({"step": step, "loss": reduced_loss}) + "\n")
    log.close()


if __name__ == "__main__":
    main()

"""Denoise images with a trained network, in half where --opt-level says so."""

import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run in half precision")


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super(ResidualBlock, self).__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.PReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return x + self.body(x)


class Denoiser(nn.Module):
    def __init__(self, channels=16, blocks=3):
        super(Denoiser, self).__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualBlock(channels) for _ in range(blocks)])
        self.tail = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x):
        return {"clean": x - self.tail(self.blocks(self.head(x))), "noise": x.std(dim=(1, 2, 3))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O3")
    parser.add_argument("--gpu", default=0, type=int)
    parser.add_argument("--checkpoint", default="denoiser.pth")
    parser.add_argument("--batch-size", default=4, type=int)
    parser.add_argument("--out", default="denoised.pth")
    args = parser.parse_args()

    torch.manual_seed(3)
    torch.backends.cudnn.benchmark = True
    torch.cuda.set_device(args.gpu)
    model = Denoiser()
    if os.path.isfile(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict({k.replace("module.", ""): v for k, v in checkpoint["state_dict"].items()})
    model = model.cuda().eval()
    model, _ = amp.initialize(model, [], opt_level=args.opt_level)
    model = nn.DataParallel(model, device_ids=[args.gpu])

    images = torch.rand(16, 3, 24, 24)
    loader = DataLoader(TensorDataset(images), batch_size=args.batch_size, num_workers=1, pin_memory=True)
    results = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.no_grad():
        for (batch,) in loader:
            output = model(batch.cuda(non_blocking=True))
            results.append(output["clean"].float().cpu())
    end.record()
    torch.cuda.synchronize()
    print(
        "{:.1f} ms for {} images, weights in {}".format(
            begin.elapsed_time(end), len(images), next(model.parameters()).dtype
        )
    )
    torch.save(torch.cat(results), args.out)


if __name__ == "__main__":
    main()

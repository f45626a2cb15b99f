"""Critic of a Wasserstein GAN with gradient penalty, trained against a fixed generator."""

import argparse
import json

import torch
import torch.autograd as autograd
import torch.nn as nn
from torch.autograd import Variable

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex")

parser = argparse.ArgumentParser()
parser.add_argument("--n_iters", type=int, default=30)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--lambda_gp", type=float, default=10)
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--out", type=str, default="wgan_gp.jsonl")
opt = parser.parse_args()

cuda = True if torch.cuda.is_available() else False
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
torch.manual_seed(5)


class Critic(nn.Module):
    def __init__(self):
        super(Critic, self).__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 48),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(48, 48),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(48, 1),
        )

    def forward(self, x):
        return self.model(x)


def compute_gradient_penalty(D, real_samples, fake_samples):
    """Calculates the gradient penalty loss for WGAN GP"""
    alpha = torch.rand(real_samples.size(0), 1).type(Tensor)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    ones = Variable(Tensor(real_samples.shape[0], 1).fill_(1.0), requires_grad=False)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=ones,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.float().norm(2, dim=1) - 1) ** 2).mean()


critic = Critic()
if cuda:
    critic.cuda()
optimizer = torch.optim.Adam(critic.parameters(), lr=opt.lr, betas=(0.5, 0.9))
critic, optimizer = amp.initialize(critic, optimizer, opt_level=opt.opt_level)

log = open(opt.out, "w")
for i in range(opt.n_iters):
    real = Variable((torch.randn(opt.batch_size, 8) * 0.5 + 1.0).type(Tensor))
    fake = Variable((torch.randn(opt.batch_size, 8) - 1.0).type(Tensor))
    optimizer.zero_grad()
    penalty = compute_gradient_penalty(critic, real, fake)
    loss = critic(fake).mean() - critic(real).mean() + opt.lambda_gp * penalty
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    log.write(json.dumps({"iter": i, "loss": loss.item(), "penalty": penalty.item()}) + "\n")
log.close()

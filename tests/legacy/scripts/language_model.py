# coding: utf-8
import argparse
import json

import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.optimizers import FusedAdam
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use FusedAdam and amp")

parser = argparse.ArgumentParser(description="RNN language model on a synthetic text")
parser.add_argument("--emsize", type=int, default=32)
parser.add_argument("--nhid", type=int, default=32)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--batch_size", type=int, default=20, metavar="N")
parser.add_argument("--bptt", type=int, default=12, help="sequence length")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--tied", action="store_true", help="tie the word embedding and softmax weights")
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--out", type=str, default="language_model.jsonl")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda")


class RNNModel(nn.Module):
    """Container module with an encoder, a recurrent module, and a decoder."""

    def __init__(self, ntoken, ninp, nhid, nlayers, tie_weights=False):
        super(RNNModel, self).__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.zero_()
        self.nhid = nhid
        self.nlayers = nlayers

    def forward(self, input, hidden):
        emb = self.encoder(input)
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(output.view(output.size(0) * output.size(1), output.size(2)))
        return decoded.view(output.size(0), output.size(1), decoded.size(1)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def markov_text(length, ntoken):
    transition = torch.distributions.Categorical(logits=3 * torch.randn(ntoken, ntoken))
    table = transition.sample((length,))
    words, word = [], 0
    for i in range(length):
        word = int(table[i, word])
        words.append(word)
    return torch.tensor(words)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


ntokens = 40
train_data = batchify(markov_text(args.batch_size * (args.bptt * args.steps + 1), ntokens), args.batch_size)
model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers, args.tied).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = FusedAdam(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-5, adam_w_mode=True)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)

model.train()
hidden = model.init_hidden(args.batch_size)
with open(args.out, "w") as log:
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = train_data[i : i + args.bptt], train_data[i + 1 : i + 1 + args.bptt].view(-1)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output.view(-1, ntokens), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
        log.write(json.dumps({"batch": batch, "loss": loss.item()}) + "\n")

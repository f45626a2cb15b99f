"""Sequence-to-sequence acoustic model: characters in, mel frames out."""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://github.com/NVIDIA/apex")

# The attention is numerically fine in half, and so is the soft sign of the prosody encoder; norms are not.
amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
if "normalize" not in amp.lists.functional_overrides.FP32_FUNCS:
    amp.lists.functional_overrides.FP32_FUNCS.append("normalize")

N_SYMBOLS, N_MELS = 30, 16


class TextMelDataset(Dataset):
    def __init__(self, n):
        self.n = n
        g = torch.Generator()
        g.manual_seed(1234)
        self.voices = torch.randn(N_SYMBOLS, N_MELS, generator=g)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        g = torch.Generator()
        g.manual_seed(index)
        length = int(torch.randint(5, 9, (1,), generator=g))
        text = torch.randint(1, N_SYMBOLS, (length,), generator=g)
        mel = self.voices[text].repeat_interleave(2, dim=0)
        return text, mel + 0.3 * torch.randn(mel.shape, generator=g)


class TextMelCollate(object):
    """Pads a batch, longest text first, as packing wants it."""

    def __call__(self, batch):
        input_lengths, order = torch.sort(torch.LongTensor([len(x[0]) for x in batch]), dim=0, descending=True)
        texts = torch.zeros(len(batch), int(input_lengths[0]), dtype=torch.long)
        mels = torch.zeros(len(batch), N_MELS, 2 * int(input_lengths[0]))
        gates = torch.zeros(len(batch), 2 * int(input_lengths[0]))
        for i, j in enumerate(order):
            text, mel = batch[j]
            texts[i, : text.size(0)] = text
            mels[i, :, : mel.size(0)] = mel.t()
            gates[i, mel.size(0) - 1 :] = 1
        return texts, input_lengths, mels, gates


class ConvNorm(nn.Module):
    def __init__(self, n_in, n_out):
        super(ConvNorm, self).__init__()
        self.conv = nn.Conv1d(n_in, n_out, 5, padding=2)
        self.norm = nn.BatchNorm1d(n_out)
        nn.init.xavier_uniform_(self.conv.weight, gain=nn.init.calculate_gain("tanh"))

    def forward(self, x):
        return self.norm(self.conv(x))


class Attention(nn.Module):
    def __init__(self, n_query, n_memory, n_attention):
        super(Attention, self).__init__()
        self.query = nn.Linear(n_query, n_attention, bias=False)
        self.memory = nn.Linear(n_memory, n_attention, bias=False)
        self.v = nn.Linear(n_attention, 1, bias=False)
        self.score_mask_value = -float("inf")

    def forward(self, query, memory, processed_memory, mask):
        energies = self.v(torch.tanh(self.query(query.unsqueeze(1)) + processed_memory)).squeeze(-1)
        energies.data.masked_fill_(mask, self.score_mask_value)
        weights = F.softmax(energies, dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


class Acoustic(nn.Module):
    def __init__(self, dim=32):
        super(Acoustic, self).__init__()
        self.dim = dim
        self.embedding = nn.Embedding(N_SYMBOLS, dim)
        self.convolutions = nn.ModuleList([ConvNorm(dim, dim) for _ in range(2)])
        self.lstm = nn.LSTM(dim, dim // 2, 1, batch_first=True, bidirectional=True)
        self.prenet = nn.Linear(N_MELS, dim)
        self.attention_rnn = nn.LSTMCell(2 * dim, dim)
        self.attention = Attention(dim, dim, 16)
        self.projection = nn.Linear(2 * dim, N_MELS)
        self.gate = nn.Linear(2 * dim, 1)
        self.postnet = nn.Sequential(ConvNorm(N_MELS, 24), nn.Tanh(), nn.Conv1d(24, N_MELS, 5, padding=2))

    def encode(self, text, input_lengths):
        x = self.embedding(text).transpose(1, 2)
        for conv in self.convolutions:
            x = F.relu(conv(x))
        x = nn.utils.rnn.pack_padded_sequence(x.transpose(1, 2), input_lengths.cpu(), batch_first=True)
        self.lstm.flatten_parameters()
        outputs, _ = self.lstm(x)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
        return outputs

    def forward(self, text, input_lengths, mels):
        memory = self.encode(text, input_lengths)
        mask = torch.arange(memory.size(1), device=memory.device) >= input_lengths.unsqueeze(1)
        processed_memory = self.attention.memory(memory)
        frames = torch.cat([mels.new_zeros(mels.size(0), N_MELS, 1), mels[:, :, :-1]], 2).permute(2, 0, 1)
        hidden = memory.new_zeros(memory.size(0), self.dim)
        cell = memory.new_zeros(memory.size(0), self.dim)
        context = memory.new_zeros(memory.size(0), self.dim)
        outputs, gates, alignments = [], [], []
        for frame in F.relu(self.prenet(frames)):  # teacher forcing
            hidden, cell = self.attention_rnn(torch.cat((frame, context), -1), (hidden, cell))
            context, weights = self.attention(hidden, memory, processed_memory, mask)
            both = torch.cat((hidden, context), dim=1)
            outputs.append(self.projection(both))
            gates.append(self.gate(both).squeeze(1))
            alignments.append(weights)
        mel = torch.stack(outputs, dim=2)
        self.alignments = torch.stack(alignments, dim=1).detach()
        return mel, mel + self.postnet(mel), torch.stack(gates, dim=1)


class AcousticLoss(nn.Module):
    def forward(self, model_output, mel_target, gate_target):
        mel_out, mel_out_postnet, gate_out = model_output
        mel_loss = nn.MSELoss()(mel_out, mel_target) + nn.MSELoss()(mel_out_postnet, mel_target)
        gate_loss = nn.BCEWithLogitsLoss()(gate_out.view(-1, 1), gate_target.view(-1, 1))
        return mel_loss + gate_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--grad-clip-thresh", type=float, default=1.0)
    parser.add_argument("--out", type=str, default="tts.jsonl")
    args = parser.parse_args()

    torch.manual_seed(1234)
    torch.cuda.manual_seed(1234)
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.benchmark = False

    model = Acoustic().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, weight_decay=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    criterion = AcousticLoss()
    train_loader = DataLoader(
        TextMelDataset(args.iterations * args.batch_size),
        num_workers=1,
        batch_size=args.batch_size,
        pin_memory=False,
        collate_fn=TextMelCollate(),
    )
    model.train()
    with open(args.out, "w") as log:
        for iteration, batch in enumerate(train_loader):
            text, input_lengths, mel, gate = [x.cuda(non_blocking=True) for x in batch]
            model.zero_grad()
            loss = criterion(model(text, input_lengths, mel), mel, gate)
            reduced_loss = loss.item()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.grad_clip_thresh)
            optimizer.step()
            log.write(json.dumps({"iteration": iteration, "loss": reduced_loss}) + "\n")
    sharpness = model.alignments.max(-1)[0].float().mean()
    print("Alignments: {:.3f} sharp, {}".format(sharpness.item(), model.alignments.dtype))

"""Watches one training step of five architectures with amp.report, and measures how much longer the step takes.

Run as `python benchmarks/reports.py`; `--save FOLDER` keeps the reports as pages and JSON files. The models have
Hugging Face's default widths and vocabularies, fewer layers, and random weights. Steps with and without a report
alternate: the processor time of one divided by that of the one before it, as a median over the rounds. On a shared
machine it varies less than the time by the clock. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ampatch import amp

LEVELS = ("O1", "O2")
ROUNDS = 5

Batch = dict[str, Tensor]


def bert(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(num_hidden_layers=layers)
    return transformers.BertForMaskedLM(config), _text(config.vocab_size)


def gpt2(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(n_layer=layers)
    return transformers.GPT2LMHeadModel(config), _text(config.vocab_size)


def t5(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(num_layers=layers, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), _text(config.vocab_size)


def vit(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(num_hidden_layers=layers, num_labels=1000)
    return transformers.ViTForImageClassification(config), _images()


def convnext(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.ConvNextConfig(depths=[layers] * 4, num_labels=1000)
    return transformers.ConvNextForImageClassification(config), _images()


MODELS: dict[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "BERT": bert,
    "GPT-2": gpt2,
    "T5": t5,
    "ViT": vit,
    "ConvNeXt": convnext,
}


def _text(vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def _images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.randint(1000, (2,))}


def measured(name: str, level: str, half: str, layers: int, rounds: int) -> tuple[amp.Report, float, float]:
    """Trains a model, every other step in a report.

    Returns:
        The last report, the median processor time of a step without one, and the median ratio of both.
    """
    torch.manual_seed(0)
    model, batch = MODELS[name](layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, half_dtype=half, verbosity=0)

    def step() -> float:
        begin = time.process_time()
        optimizer.zero_grad()
        loss: Any = model(**batch).loss
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return time.process_time() - begin

    step()  # makes the optimizer's state
    plain, ratios = [], []
    for _ in range(rounds):
        plain.append(step())
        begin = time.process_time()
        with amp.report() as report:
            step()
        ratios.append((time.process_time() - begin) / plain[-1])
    amp.deinitialize()
    return report, statistics.median(plain), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", type=Path, help="folder for the reports")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.half}, {options.layers} layers")
    print(f"{'model':10}{'level':>6}{'step':>10}{'with a report':>16}{'operators':>11}")
    for name in options.models:
        for level in LEVELS:
            report, seconds, ratio = measured(name, level, options.half, options.layers, options.rounds)
            operators = report.to_dict()["cost"]["operators"]
            print(f"{name:10}{level:>6}{seconds:>8.2f} s{ratio:>14.2f} x{operators:>11,}")
            sys.stdout.flush()
            if options.save:
                options.save.mkdir(exist_ok=True)
                report.save(options.save / f"{name}_{level}.json")
                report.to_html(options.save / f"{name}_{level}.html")


if __name__ == "__main__":
    main()

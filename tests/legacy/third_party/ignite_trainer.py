"""pytorch-ignite's trainer with amp_mode="apex"."""

import argparse
import json

import torch
import torch.nn as nn
from apex import amp
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch.utils.data import DataLoader, TensorDataset


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--accumulate", default=1, type=int)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x.mm(torch.randn(16, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

    dtypes = set()
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    trainer = create_supervised_trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        device=args.device,
        non_blocking=True,
        amp_mode="apex",
        gradient_accumulation_steps=args.accumulate,
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, device=args.device)
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def log_training_loss(engine):
        losses.append(engine.state.output)

    trainer.run(loader, max_epochs=3)
    evaluator.run(loader)
    print(
        json.dumps(
            {
                "losses": losses,
                "accuracy": evaluator.state.metrics["accuracy"],
                "amp": amp.state_dict(),
                "dtypes": sorted(dtypes),
            }
        )
    )


if __name__ == "__main__":
    main()

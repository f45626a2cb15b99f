"""Trains with PyTorch-Ignite's engines: events, metrics and checkpoints are Ignite's own.

Run it on a GPU or, without one, on the CPU. With --checkpoint it resumes from the last epoch that it saved:

    python examples/ignite_digits.py --half float16 --epochs 20 --checkpoint digits.pt
    python examples/ignite_digits.py --processes 2
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, CosineAnnealingScheduler
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import TensorDataset

from ampatch import amp
from ampatch.demo.digits import load, split
from ampatch.integrations.ignite import AmpHandler, create_supervised_trainer, unless_skipped

BATCH = 128


def saving_to(path: Path) -> Callable[..., None]:
    """Returns a handler for `Checkpoint` that writes one file."""

    def save(checkpoint, *_) -> None:
        # A run that is killed while it writes leaves the previous checkpoint intact.
        beside = path.with_suffix(".new")
        if idist.get_rank() == 0:
            torch.save(checkpoint, beside)
            beside.replace(path)

    return save


def train(local_rank: int, options: argparse.Namespace) -> None:  # noqa: ARG001 - idist.Parallel gives it
    device = idist.device()
    digits, held_out = (TensorDataset(each.images, each.labels) for each in split(load()))
    batches = idist.auto_dataloader(digits, batch_size=BATCH, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.005))
    # Before the model is wrapped.
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level, half_dtype=options.half)
    model = idist.auto_model(model)

    trainer = create_supervised_trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        device,
        before_step=lambda optimizer: amp.clip_grad_norm_(optimizer, max_norm=1.0),
    )
    # With several processes amp stays on until they exit: at O2 a DDP wrapper is of no use without it.
    handler = AmpHandler(deinitialize=options.processes == 1)
    handler.attach(trainer)
    scheduler = CosineAnnealingScheduler(optimizer, "lr", 0.005, 0.003, cycle_size=2000)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=unless_skipped(optimizer)), scheduler)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device)
    to_save = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer, "amp": handler}
    if options.checkpoint and options.checkpoint.exists():
        Checkpoint.load_objects(to_save, options.checkpoint)

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle() -> None:
        # A resumed run gets the same batches as an uninterrupted one.
        torch.manual_seed(trainer.state.epoch)
        if idist.get_world_size() > 1:
            batches.sampler.set_epoch(trainer.state.epoch)

    @trainer.on(Events.ITERATION_COMPLETED)
    def report() -> None:
        state = trainer.state
        if state.iteration in (1, state.epoch_length * state.max_epochs) and idist.get_rank() == 0:
            print(f"step {state.iteration}: loss {state.output:.3f}")

    @trainer.on(Events.COMPLETED)
    def evaluate() -> None:
        accuracy = evaluator.run(idist.auto_dataloader(held_out, batch_size=BATCH)).metrics["accuracy"]
        if idist.get_rank() == 0:
            print(f"accuracy: {accuracy:.1%}, skipped steps: {trainer.state.amp['skipped_steps']}")

    if options.checkpoint:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(to_save, saving_to(options.checkpoint)))
    trainer.run(batches, max_epochs=options.epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if options.processes == 1:
        train(0, options)
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend, nproc_per_node=options.processes) as parallel:
        parallel.run(train, options)


if __name__ == "__main__":
    main()

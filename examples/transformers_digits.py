"""Trains a small vision transformer with AmpatchTrainer: Hugging Face's Trainer in mixed precision.

Run it on a GPU or, without one, on the CPU. With --checkpoints it saves every epoch, and resumes from the last one:

    python examples/transformers_digits.py --half float16 --epochs 20 --checkpoints digits
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments, ViTConfig, ViTForImageClassification
from transformers.trainer_utils import get_last_checkpoint

from ampatch.demo.digits import load, split
from ampatch.integrations.transformers import AmpatchTrainer

SHAPE = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def examples(digits) -> list[dict[str, torch.Tensor]]:
    """Returns the images and labels as Trainer expects them: one dict for each example."""
    images = digits.images.reshape(-1, 1, 8, 8)
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, digits.labels, strict=True)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--opt-level", choices=["O0", "O1", "O2"], default="O1")
    parser.add_argument("--checkpoints", type=Path)
    options = parser.parse_args()

    digits, held_out = split(load())
    last = get_last_checkpoint(options.checkpoints) if options.checkpoints and options.checkpoints.exists() else None
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SHAPE, **WIDTH))
    if last is not None:  # in train(), transformers 5.24 would not load weights that it saves under other names
        model = ViTForImageClassification.from_pretrained(last)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.checkpoints or Path(temporary)
        trainer = AmpatchTrainer(
            model,
            TrainingArguments(
                str(folder),
                num_train_epochs=options.epochs,
                per_device_train_batch_size=128,
                learning_rate=0.01,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                logging_steps=1,
                save_strategy="epoch" if options.checkpoints else "no",
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to=[],
                disable_tqdm=True,
                log_level="error",
            ),
            train_dataset=examples(digits),
            eval_dataset=examples(held_out),
            compute_metrics=accuracy,
            amp={"opt_level": options.opt_level, "half_dtype": options.half},
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=last)
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        for entry in (steps[0], steps[-1]):
            print(f"step {entry['step']}: loss {entry['loss']:.3f}")
        print(f"accuracy: {trainer.evaluate()['eval_accuracy']:.1%}")
        if options.checkpoints:
            trainer.save_model(folder / "model")  # float32 at every opt level, and its config.json says so


if __name__ == "__main__":
    main()

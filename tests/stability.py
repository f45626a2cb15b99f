"""Writes what `test_stability.py` compares: the public names, and what this version saves.

    python tests/stability.py

Run it when a change of a public name is meant, and once for each version, on the day of its release: what an earlier
version saved must never be written again.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampatch
from ampatch import amp

TESTS = Path(__file__).parent
NAMES = TESTS / "public_names.txt"
SAVED = TESTS / "saved"

#: Modules whose ``__all__`` is promised. Those that need a framework have tests of their own.
MODULES = ("ampatch", "ampatch.amp", "ampatch.apex", "ampatch.apex.amp")


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        return
    if inspect.isclass(value):
        bases = [base for base in value.__mro__[1:] if base is torch.amp.GradScaler or base.__name__.startswith("_")]
        named = (base.__name__ for base in value.__bases__ if base is not object and not base.__name__.startswith("_"))
        yield f"class {name}({', '.join(named)})"
        # What is inherited from torch's class, or from a private one, is promised too.
        inherited = {member: held for base in reversed(bases) for member, held in vars(base).items()}
        for member, held in sorted({**inherited, **vars(value)}.items()):
            if not member.startswith("_") or (member == "__init__" and not dataclasses.is_dataclass(value)):
                plain = held.__func__ if isinstance(held, classmethod | staticmethod) else held
                yield from _described(f"{name}.{member}", plain) if callable(plain) else [f"{name}.{member}"]
    elif callable(value):
        arguments = [re.sub(r": .*?(?= = |$)", "", str(parameter)) for parameter in _parameters(value)]
        yield f"{name}({', '.join(arguments)})"
    else:
        yield name


def _parameters(value: Any) -> Iterator[inspect.Parameter]:
    yield from inspect.signature(value).parameters.values()


def public_names() -> str:
    """Returns one line for each public name, with its arguments and their defaults."""
    lines = [
        line
        for module in map(importlib.import_module, MODULES)
        for name in sorted(module.__all__)
        for line in _described(f"{module.__name__}.{name}", getattr(module, name))
    ]
    return "\n".join(lines) + "\n"


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model that the saved states are of, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Trains for one step under a live amp."""
    loss = model(torch.ones(2, 4)).square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def save(folder: Path) -> None:
    """Writes what this version saves to a folder."""
    folder.mkdir(parents=True)
    model, optimizer = amp.initialize(*network(), opt_level="O2", half_dtype="float16", init_scale=1024.0)
    step(model, optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(include_policy=True),
    }
    torch.save(state, folder / "o2.pt")
    amp.deinitialize()

    model, optimizer = amp.initialize(*network(), opt_level="O1", half_dtype="float16")
    with amp.report() as report:
        step(model, optimizer)
    report.save(folder / "report.json")
    text = (folder / "report.json").read_text(encoding="utf-8")
    (folder / "report.json").write_text(text.replace(f"{TESTS.parent}/", ""), encoding="utf-8")
    amp.deinitialize()

    scaler = ampatch.GradScaler("cpu", init_scale=512.0)
    (folder / "grad_scaler.json").write_text(json.dumps(scaler.state_dict()) + "\n", encoding="utf-8")

    model, _ = network()
    model.to(torch.bfloat16)
    masters = ampatch.MixedPrecision(torch.optim.Adam(model.parameters(), lr=0.01))
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    masters.step()
    torch.save({"model": model.state_dict(), "optimizer": masters.state_dict()}, folder / "mixed_precision.pt")


def main() -> None:
    """Writes the names, and what this version saves if there is nothing of it yet."""
    NAMES.write_text(public_names(), encoding="utf-8")
    folder = SAVED / ampatch.__version__
    if not folder.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(folder)


if __name__ == "__main__":
    main()

"""Counts the modules of ampatch that one training step crosses: ``python benchmarks/crossings.py``.

Prints, for the forward pass at O1 and for the block and the step at O2, how many modules run and how often one of
them calls another. It measures the design and not the speed: a step with fewer calls is easier to follow in a debugger.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from types import FrameType

import torch

import ampatch
from ampatch import amp

_ROOT = str(pathlib.Path(ampatch.__file__).parent)


def crossings(run: Callable[[], object]) -> tuple[list[str], int]:
    """Runs a function and follows it through ampatch's modules.

    Returns:
        The modules in the order of their first use, and the number of calls from one module to another.
    """
    entered: list[str] = []
    changes = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal changes
        name = _module(frame)
        if event != "call" or not name:
            return
        entered.append(name)
        caller = frame.f_back
        while caller is not None and not _module(caller):
            caller = caller.f_back
        changes += caller is not None and _module(caller) != name

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(entered)), changes


def _module(frame: FrameType) -> str:
    """Returns the path of a frame's module within ampatch; empty for code of other packages."""
    name = frame.f_code.co_filename
    return name[len(_ROOT) + 1 : -3] if name.startswith(_ROOT) else ""


def main() -> None:
    """Prints the two counts."""
    for level in ("O1", "O2"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, half_dtype="bfloat16", loss_scale="dynamic", verbosity=0)
        batch = torch.randn(4, 8)

        def step() -> None:
            loss = model(batch).float().square().mean()  # noqa: B023 - called before the next level
            with amp.scale_loss(loss, optimizer) as scaled_loss:  # noqa: B023
                sys.setprofile(None)
                scaled_loss.backward()
                sys.setprofile(profile)  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        profile = None
        for _ in range(3):
            step()

        def block_and_step() -> None:
            nonlocal profile
            profile = sys.getprofile()
            sys.setprofile(None)
            loss = model(batch).float().square().mean()  # noqa: B023
            sys.setprofile(profile)
            with amp.scale_loss(loss, optimizer) as scaled_loss:  # noqa: B023
                sys.setprofile(None)
                scaled_loss.backward()
                sys.setprofile(profile)
            optimizer.step()  # noqa: B023

        for what, run in (("model(x)", lambda: model(batch)), ("block and step", block_and_step)):  # noqa: B023
            modules, changes = crossings(run)
            print(f"{level}  {what:15} {len(modules):2} modules, {changes:2} calls: {', '.join(modules)}")
        amp.deinitialize()


if __name__ == "__main__":
    main()

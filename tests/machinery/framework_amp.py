"""A plugin of pytest for `tests/frameworks.py`: puts amp in place of a framework's own precision, in its own tests.

The variable FRAMEWORK names the framework; FRAMEWORK_AMP has arguments of ``amp.initialize`` as JSON. Empty: the
framework's own mixed precision in bfloat16 is the default, if it has one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from ampatch import amp

OPTIONS = json.loads(os.environ["FRAMEWORK_AMP"] or "null")


def _lightning() -> None:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from ampatch.integrations.lightning import AmpatchPrecision

    own = _AcceleratorConnector._check_and_init_precision

    def replaced(connector: Any) -> Any:
        plugin = own(connector)
        if type(plugin).__name__ not in ("Precision", "MixedPrecision"):
            return plugin
        return MixedPrecision("bf16-mixed", "cpu") if OPTIONS is None else AmpatchPrecision(**OPTIONS)

    _AcceleratorConnector._check_and_init_precision = replaced


def _accelerate() -> None:
    from accelerate import Accelerator

    from ampatch.integrations.accelerate import prepare

    if OPTIONS is None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        return
    own = Accelerator.prepare
    inside: list[Any] = []

    @functools.wraps(own)
    def replaced(accelerator: Any, *objects: Any, **given: Any) -> Any:
        if inside or not any(isinstance(each, nn.Module) for each in objects):
            return own(accelerator, *objects, **given)
        amp.deinitialize()  # of an earlier Accelerator, as the error of a second prepare says
        inside.append(accelerator)
        try:
            return prepare(accelerator, *objects, **given, **OPTIONS)
        finally:
            inside.clear()

    Accelerator.prepare = replaced


def _ignite() -> None:
    if OPTIONS is None:
        return  # its tests set amp_mode
    engines = importlib.import_module("ignite.engine")
    ours = importlib.import_module("ampatch.integrations.ignite")

    def replaced(model: Any, optimizer: Any, *args: Any, **given: Any) -> Any:
        if given.get("gradient_accumulation_steps") == 0:  # ampatch's text is another; these tests go on after it
            raise ValueError("Gradient_accumulation_steps must be strictly positive.")
        amp.deinitialize()
        amp.initialize(model, optimizer, **OPTIONS)
        return ours.create_supervised_trainer(model, optimizer, *args, **given)

    engines.create_supervised_trainer = replaced


def _skorch() -> None:
    if OPTIONS is None:
        return  # it has no mixed precision of its own
    import skorch

    from ampatch.integrations.skorch import AmpNetMixin

    for name in ("NeuralNetClassifier", "NeuralNetBinaryClassifier", "NeuralNetRegressor"):
        own = getattr(skorch, name)
        defaults = {f"amp__{option}": value for option, value in OPTIONS.items()}

        class Net(AmpNetMixin, own):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, _defaults: Any = defaults, **given: Any) -> None:
                super().__init__(*args, **{**_defaults, **given})

        Net.__module__, Net.__name__, Net.__qualname__ = "skorch", name, name
        setattr(skorch, name, Net)  # not in its module, whose methods name their class in super(...)


{"lightning": _lightning, "accelerate": _accelerate, "ignite": _ignite, "skorch": _skorch}[os.environ["FRAMEWORK"]]()


@pytest.fixture(autouse=True)
def amp_ends_with_each_test() -> Iterator[None]:
    """Takes amp down after tests whose loop leaves it on."""
    yield
    amp.deinitialize()

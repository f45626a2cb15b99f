"""Of the adapters' imports: a framework that is missing or too old is one clear error."""

from __future__ import annotations

import importlib
import re
import sys
import types

import pytest

from ampatch import integrations
from ampatch.errors import IntegrationError
from ampatch.integrations.precision_plugin import bases

pytestmark = pytest.mark.once

ADAPTERS = {
    "accelerate": ("accelerate", "'accelerate>=1.15'"),
    "skorch": ("skorch", "'skorch>=1.4'"),
    "ignite": ("pytorch-ignite", "'pytorch-ignite>=0.5.2'"),
    "timm": ("timm", "'timm>=1.0'"),
    "transformers": ("transformers", "'transformers>=4.57' 'accelerate>=1.15'"),
}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that puts a package into `sys.modules`, with a version; None: it is missing."""

    def put(name: str, version: str | None) -> None:
        package = types.ModuleType(name)
        package.__version__ = version
        monkeypatch.setitem(sys.modules, name, None if version is None else package)

    for adapter in (*ADAPTERS, "accelerate_optimizers"):
        monkeypatch.delitem(sys.modules, f"ampatch.integrations.{adapter}", raising=False)
        monkeypatch.delattr(integrations, adapter, raising=False)
    return put


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_without_its_package_or_with_an_old_one_raises(adapter, packages):
    package, install = ADAPTERS[adapter]
    for version, found in ((None, f"needs {package}, but {adapter} is missing"), ("0.1.9", "but found 0.1.9")):
        packages(adapter, version)
        with pytest.raises(IntegrationError, match=f"{found}. Type pip install {re.escape(install)}"):
            importlib.import_module(f"ampatch.integrations.{adapter}")


def test_the_adapter_of_transformers_without_accelerate_raises(packages):
    packages("transformers", "5.0")
    packages("accelerate", None)
    with pytest.raises(IntegrationError, match="needs accelerate, but accelerate is missing"):
        importlib.import_module("ampatch.integrations.transformers")


def test_the_adapter_of_lightning_without_it_or_with_an_old_one_raises(packages):
    with pytest.raises(IntegrationError, match=r"needs nowhere.pytorch, but nowhere is missing. .*'nowhere>=2.5'"):
        bases("nowhere.pytorch")
    for name in ("old_lightning", "old_lightning.plugins", "old_lightning.callbacks"):
        packages(name, "1.9.5")
    with pytest.raises(IntegrationError, match=r"needs old_lightning 2.5, but found 1.9.5"):
        bases("old_lightning")

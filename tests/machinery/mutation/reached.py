"""Notes which functions of the core each test enters, and how long it takes: a plugin for pytest.

`python -m pytest -p reached` writes a line of JSON for each test into the folder that MUTATION_REACHED names. Functions
are instrumented as their modules are imported, nested ones with their outermost. Functions that run in processes that a
test starts are not noted. Must never be loaded in a run whose outcome counts: torch.compile breaks its graphs where a
function makes its note within a checkpoint or a strict export.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from mutants import instrument, is_core

_entered: set[str] = set()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if not is_core(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # without the bytecode that is kept beside the source
        return compile(instrument(Path(self.path).read_text(encoding="utf-8")), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_entered_"] = _entered.add
        super().exec_module(module)


class _Notes:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open("w", encoding="utf-8")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _entered.clear()
        wall, times = time.monotonic(), os.times()
        try:
            return (yield)
        finally:
            after = os.times()
            row = {
                "test": item.nodeid,
                "wall": round(time.monotonic() - wall, 4),
                "cpu": round(sum(after[:4]) - sum(times[:4]), 4),
                "reached": sorted(_entered),
            }
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def pytest_configure(config: pytest.Config) -> None:
    import torch._dynamo.config

    torch._dynamo.config.ignore_logging_functions.add(_entered.add)
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # the tests run in others
    config.pluginmanager.register(_Notes(Path(os.environ["MUTATION_REACHED"])))


# pytest has imported ampatch.errors by now, for its filters of warnings; the rest must not be there yet.
if "ampatch.amp" not in sys.modules:
    sys.meta_path.insert(0, _Finder())

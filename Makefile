# Each target sets up all it needs, so that it works in a fresh clone. PYTHON chooses the interpreter of the environment.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
# Where tests and demo find the compiled extension, apart from the user's own.
export AMPATCH_CACHE := $(CURDIR)/build/extension
READY := $(VENV)/.ready

.PHONY: demo test slow lint types clean

demo: $(READY)
	$(VENV)/bin/ampatch demo

# With the extension, where there is a compiler for it.
test: $(READY)
	-$(VENV)/bin/ampatch build  # without a compiler torch's own kernels are tested, and calls in Python
	AMPATCH_KERNELS=auto AMPATCH_CALLS=auto $(RUN) pytest -n 2 -m "not slow"

# Once more with torch's own kernels and calls in Python, and what takes long.
slow: $(READY)
	AMPATCH_KERNELS=torch AMPATCH_CALLS=python $(RUN) pytest -n 2 -m "not slow"
	AMPATCH_CALLS=auto $(RUN) pytest -m slow

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/*.cu csrc/calls/* tests/emulated_gpu/*

types: $(READY)
	$(RUN) mypy

# setuptools is installed first so that the build uses the pinned one, and not whichever is newest.
$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --constraint constraints.txt setuptools
	$(RUN) pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test,dev,bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info ampatch-demo.pt .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

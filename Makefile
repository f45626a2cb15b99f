# Each target sets up all it needs, so that it works in a fresh clone. PYTHON chooses the interpreter of the environment.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
# Where tests and demo find the compiled extension, apart from the user's own.
export AMPATCH_CACHE := $(CURDIR)/build/extension
# --no-compile: Python compiles the modules that it imports, once; pip would compile all of torch's. Some images of
# containers set this variable: then each of the hundreds of Pythons that tests start would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
# Twice --quiet: pip prints its errors, and no warnings, which tell of its own version and of this machine's settings.
INSTALL := $(RUN) pip install --quiet --quiet --no-compile --constraint constraints.txt
# The package with what it needs at run time: enough for the demo.
INSTALLED := $(VENV)/.installed
# And with what tests, linters, benchmarks and the documentation need.
READY := $(VENV)/.ready
THOROUGHLY := $(RUN) pytest -n 2 --hypothesis-profile thorough

# A Chromium of at least version 105; on Debian its package is chromium.
CHROMIUM ?= chromium

.PHONY: demo picture libraries test how-long slow beyond-ci versions frameworks lint types docs drawings notebook clean

demo: $(INSTALLED)
	$(VENV)/bin/ampatch demo

# The picture in the README: the top of the page of a run of the demo. Root has no sandbox; the page is our own.
picture: $(INSTALLED)
	mkdir -p build
	$(RUN) ampatch demo --opt-levels O1:float16 --report build/report.html
	$(CHROMIUM) --headless --no-sandbox --disable-gpu --hide-scrollbars --blink-settings=preferredColorScheme=1 \
		--window-size=1200,1384 --screenshot=docs/images/report.png file://$(CURDIR)/build/report.html

# Without a compiler torch's own kernels are tested, and calls in Python.
libraries: $(READY)
	-$(VENV)/bin/ampatch build

# Tests that import frameworks run apart: with 3,000 more modules to search, each of 10,000 set-ups would take longer.
FRAMEWORKS := tests/integration
QUICKLY = AMPATCH_KERNELS=auto AMPATCH_CALLS=auto $(RUN) pytest -n 2 -m "not slow" --processor-limit 10

test: how-long libraries
	$(QUICKLY) --ignore $(FRAMEWORKS)
	$(QUICKLY) $(FRAMEWORKS)
	@echo "All passed. Next: make slow, make lint types docs; docs/contributing.md says where a change goes."

how-long:
	@echo "make test takes about 5 minutes on two cores. In a fresh clone it installs and compiles for 2 minutes first."

# torch's kernels for the least of processors: without vector instructions, and without oneDNN's products in half.
LEAST := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 AMPATCH_KERNELS=torch AMPATCH_CALLS=python

# What CI runs beyond `make test`: half of its cases without the libraries, on torch's kernels for the least of
# processors; and, with the libraries, the cases that `make test` left out, of each test that takes long one.
WITHOUT := not beyond_ci and (not (slow or once or with_libraries) or either_way or without_libraries)
LEFT_OUT := slow and not beyond_ci and (either_way or not without_libraries)
slow: libraries
	$(LEAST) $(THOROUGHLY) -m "$(WITHOUT)" --ignore $(FRAMEWORKS)
	$(LEAST) $(THOROUGHLY) -m "$(WITHOUT)" $(FRAMEWORKS)
	AMPATCH_KERNELS=auto AMPATCH_CALLS=auto $(THOROUGHLY) -m "$(LEFT_OUT)"

# All other cases: of the tests that take long, of the benchmarks, and those that CI runs with the libraries only.
beyond-ci: libraries
	AMPATCH_KERNELS=torch AMPATCH_CALLS=auto $(THOROUGHLY) -m beyond_ci
	$(LEAST) $(THOROUGHLY) -m "with_libraries and not (slow or once or either_way)" --ignore $(FRAMEWORKS)
	$(LEAST) $(THOROUGHLY) -m "with_libraries and not (slow or once or either_way)" $(FRAMEWORKS)

# Other versions of torch and Python, each in an environment under build/. It downloads a torch for each: not part of CI.
versions: $(READY)
	$(VENV)/bin/python tests/versions.py $(TESTS)

# The frameworks' own tests, with ampatch in the place of their mixed precision. It downloads their sources: not part of CI.
frameworks: $(READY)
	$(VENV)/bin/python tests/frameworks.py $(TESTS)

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/*.cu csrc/calls/* tests/machinery/emulated_gpu/*

types: $(READY)
	$(RUN) mypy

# The documentation as a site: build/docs/html/index.html. A link between pages that leads nowhere is an error.
docs: $(READY)
	$(RUN) sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir build/docs/doctrees docs build/docs/html

# setuptools is installed first so that the build uses the pinned one, and not whichever is newest.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable .
	touch $@

$(READY): $(INSTALLED)
	$(INSTALL) --no-build-isolation --editable ".[test,dev,bench,docs]"
	touch $@

# The pictures that docs/drawings describes. The figures of the histogram come from docs/ampatch_docs/gradients.py.
drawings: $(READY)
	$(VENV)/bin/python docs/ampatch_docs/drawings.py

# Runs the notebooks of docs/tutorials, and stores their outputs.
notebook: libraries
	$(VENV)/bin/python docs/ampatch_docs/notebooks.py

clean:
	rm -rf $(VENV) build dist *.egg-info ampatch-demo.pt .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

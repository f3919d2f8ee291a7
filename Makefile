# demo, test and check each set up all they need in .venv, then run.
# TORCH and PYTHON may be overridden: make test PYTHON=python3.12 TORCH='torch==2.14.1'

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA GPU, a release whose CPU build pip can find; else any recent one.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
JOBS ?= 2

.PHONY: demo test check lint dist docs clean

$(VENV)/.ready: pyproject.toml setup.py $(wildcard beamq/formats/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(VENV)/.ready
	PATH="$(abspath $(BIN)):$$PATH" sh examples/demo.sh

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# A wheel for this platform and a source package, in dist/. The wheel is made from the source
# package; one without kernels, as where there is no C compiler, is refused.
dist: $(VENV)/.ready
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m zipfile --list dist/*.whl | grep kernels/_cpu.abi3.so >/dev/null || \
	    { rm dist/*.whl; echo "no C compiler: the wheel has no kernels and was removed"; exit 1; }

# The site, in site/.
docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site demo-output .mypy_cache .ruff_cache .pytest_cache

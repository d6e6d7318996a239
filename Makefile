# Two commands do everything: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin

KERNELS = tests/kernels tests/layers tests/parts/kernels tests/core/test_descent.py

.PHONY: setup demo test test-federation test-kernels test-processors test-oldest lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower]'
	touch $@

demo: setup
	$(BIN)/consilience demo

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto

# Real processes that talk to each other on this machine: SuperLink, SuperNodes and Ray workers. One after another, they share ports and cores.
test-federation: setup
	$(BIN)/python -m pytest -m federation

# Kernels of our own against tensor operations, in Triton's interpreter: no GPU is needed, but Linux, where Triton is to be had.
test-kernels: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels]'
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto -rs -m 'gpu or not gpu' $(KERNELS)
	COMPILE_KERNELS_FOR=80,90 PYTHONPATH=tests $(BIN)/python -m pytest -n auto -p kernels_compiled -m 'gpu or not gpu' $(KERNELS)

# The fast suite as older processors compute it, without AVX-512 and then without AVX: sums run in other orders, and bfloat16 has no instructions.
test-processors: setup
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell $(BIN)/python -m pytest -n auto
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem $(BIN)/python -m pytest -n auto

# The fast suite with the oldest versions that the package admits. PyPI's builds of that PyTorch are for CUDA: gigabytes.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n auto

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache

# Two commands do everything: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-federation lint clean

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

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

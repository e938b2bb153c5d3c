# Two commands for a newcomer: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHARE ?= 0/1

.PHONY: help demo test test-all quick setup lint types contracts check docs wheel clean

help:
	@echo "make demo      set up, then train FedAvg and FedDyn on real digits and compare them (in ./runs)"
	@echo "make test      set up, then run the tests and doctests that every change must pass"
	@echo "make test-all  the same, and the exhaustive cases: everything × everything, processes, kills, recipes"
	@echo "make quick     set up, then run the tests that execute most of the library in half a minute"
	@echo "make check     lint, types and import contracts"
	@echo "make wheel     build the source distribution and the wheel into dist/, check them, and run the wheel elsewhere"
	@echo "make docs      set up what MkDocs needs, then build the documentation into site/"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "a checkout needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/fedloom run

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m "not exhaustive"

test-all: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -q --share $(SHARE)

quick: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -q --quick

lint: setup
	$(BIN)/ruff check src tests benchmarks recipes examples docs
	$(BIN)/ruff format --check src tests benchmarks recipes examples docs

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: setup
	$(BIN)/lint-imports

check: lint types contracts

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

wheel: setup
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check build twine 'setuptools>=77' 'setuptools-scm>=8'
	rm -rf build dist
	$(BIN)/python -m build --no-isolation >/dev/null
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python benchmarks/versions.py --wheel dist/*.whl

clean:
	rm -rf $(VENV) build site dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint catalogue clean

demo: $(VENV)/.demo
	TRITON_INTERPRET=1 $(BIN)/python examples/demo.py

test: $(VENV)/.test lint
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n 2 -m "not gpu"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

catalogue: $(VENV)/.test
	$(BIN)/python -m layoutcheck.layouts._page > docs/catalogue.md

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

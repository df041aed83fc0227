# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := .venv-peers

.PHONY: demo test test-peers lint catalogue clean

demo: $(VENV)/.demo
	TRITON_INTERPRET=1 $(BIN)/python examples/demo.py

test: $(VENV)/.test lint
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n 2 -m "not gpu"

# Against the real sglang, FlashInfer and torchao on a CPU; PEER_CALLS=5000 for a longer run.
test-peers: $(PEERS)/.done
	$(PEERS)/bin/python -m pytest -s tests/peers

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

$(PEERS)/.done: pyproject.toml tests/peers/requirements.txt tests/peers/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --requirement tests/peers/requirements.txt --editable '.[testing]'
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement tests/peers/peers.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

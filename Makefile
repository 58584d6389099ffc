# Everything runs in .venv, made here from nothing but Python 3.11+ and pip. On a machine without a GPU the CPU build of
# torch is installed first, so that nothing pulls gigabytes of CUDA. For Arc: make demo TORCH_INDEX=<index of the XPU wheels>.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check format clean bench
.DEFAULT_GOAL := help

help:
	@echo "make demo    a local cluster (router + prefill + decode) answers a chat; TORCH_INDEX=... picks other torch wheels"
	@echo "make test    set up and run the whole test suite"
	@echo "make check   ruff, mypy --strict, import-linter, structure tests"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/pip install -q -e ".[worker]" --group dev
	@touch $@

setup: $(VENV)/.installed

demo: setup
	@$(BIN)/python -m services.local.demo

test: setup
	@./tools/install_system_packages.sh
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/structure

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

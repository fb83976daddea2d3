# `make train` and `make test` work in a fresh checkout: each installs into .venv what is missing, once.
# If $(PYTHON) already has a torch for CUDA or ROCm, .venv uses that torch and its triton and installs only the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# requirements from pyproject.toml, one per line
REQUIREMENTS = $(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; print(*$(1), sep="\n")'
# DeepSpeed comes as source; with DS_BUILD_OPS=0 it builds a kernel when the kernel is first used, not at install time.
INSTALL = DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt
# Three workers on two cores: one that waits for ranks to start, or for a timeout, leaves its core to the others. One thread in
# each process that they start.
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10

.DELETE_ON_ERROR:
.PHONY: train test test-all test-products test-faults compat compat-hf hosts lint format tables clean

# `make train steps=5` would set a make variable that no recipe reads, so it is an error.
KNOWN := PYTHON VENV BIN ARGS MAKEFLAGS MFLAGS
UNKNOWN := $(strip $(foreach name,$(filter-out $(KNOWN),$(.VARIABLES)),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
$(if $(UNKNOWN),$(error make does not know $(UNKNOWN): options go into ARGS, as in make train ARGS="steps=50"))

train: $(VENV)/.run  ## ARGS="steps=50 data.length=256": see ringspan launch --help
	$(BIN)/ringspan launch $(if $(findstring experiment=,$(ARGS)),,experiment=laptop) $(ARGS)

test: $(VENV)/.dev  ## everything a change can break; ARGS="-k mask" go to pytest
	$(PYTEST) -m "not exhaustive and not faults" $(ARGS)

test-all: $(VENV)/.dev  ## `make test` and the exhaustive sweeps
	$(PYTEST) -m "not product and not faults" $(ARGS)

test-products: $(VENV)/.dev  ## the cases of products of parameters that test-all leaves out: it runs every pair of values, or each value
	$(PYTEST) -m product $(ARGS)

test-faults: $(VENV)/.dev  ## every kill point, thousands of damaged files, 200 resumes; more than an hour, with fixed seeds
	$(PYTEST) -m faults $(ARGS)

compat: $(VENV)/.dev  ## compile the Hopper kernels with each supported Triton; needs a network, no GPU
	$(BIN)/python -m tests.kernels.runtime.compat

compat-hf: $(VENV)/.dev  ## run next to transformers and Hugging Face's kernels, from the checkout and from a wheel; needs a network
	$(BIN)/python -m tests.compat_hf

hosts: $(VENV)/.dev  ## trainers and packages that Ringspan plugs into, each in an environment of its own; ARGS="olmo-core" takes one; needs a network
	$(BIN)/python -m tests.compat.hosts.environments $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(VENV)/.dev  ## everything in docs and in the planner's data that is generated from docs/results and docstrings
	$(BIN)/python docs/tables.py
	$(BIN)/python -m ringspan.trainer.planning.step_time
	$(BIN)/python docs/figure.py
	$(BIN)/python docs/api.py
	$(BIN)/python -m ringspan.kernels.bench --roofline --from docs/results/attention-h200.json --plot

clean:  ## keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"ringspan needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch; assert torch.version.cuda or torch.version.hip' 2>/dev/null && echo --system-site-packages) $(VENV)

# If the machine brings torch, its torch and triton are pinned in place of ours, so that pip never replaces them.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@if grep -q 'system-site-packages = true' $(VENV)/pyvenv.cfg; then \
	  grep -vE '^(torch|triton)==' constraints.txt > $@; \
	  $(BIN)/python -m pip list --disable-pip-version-check --format=freeze | grep -E '^(torch|triton)==' > $@.machine; \
	  echo "Keeping what this machine brings: $$(paste -sd ' ' $@.machine)"; \
	  cat $@.machine >> $@; \
	else cp constraints.txt $@; fi

$(VENV)/.run: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing what is missing into $(VENV); the first time takes a few minutes."
	@$(call REQUIREMENTS,p["dependencies"] + e["train"]) > $(VENV)/requirements.txt
	$(INSTALL) -r $(VENV)/requirements.txt
	$(INSTALL) --no-deps --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call REQUIREMENTS,e["dev"]) > $(VENV)/requirements-dev.txt
	$(INSTALL) -r $(VENV)/requirements-dev.txt
	@touch $@

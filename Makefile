# make train and make test start from nothing: each installs into .venv what is missing, once.
# A torch for CUDA or ROCm that $(PYTHON) already has is used as it is; .venv then only holds what the machine lacks.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A list from pyproject.toml, one requirement a line. (Installing "." would also build the project, for which there is no
# need: every command here runs in this folder.)
REQUIREMENTS = $(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*$(1), sep="\n")'
# DeepSpeed comes as source; with DS_BUILD_OPS=0 its kernels are built when one is first used, not here.
INSTALL = DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt

# a list cut short is no list
.DELETE_ON_ERROR:
.PHONY: train test compat lint format tables clean

# "make train steps=5" would set a variable of make's that nobody reads.
OURS := PYTHON VENV BIN ARGS MAKEFLAGS MFLAGS
UNREAD := $(strip $(foreach name,$(filter-out $(OURS),$(.VARIABLES)),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
$(if $(UNREAD),$(error make does not know $(UNREAD): options go into ARGS, as in make train ARGS="steps=50"))

train: $(VENV)/.run  ## ARGS="steps=50 data.length=256": see ringspan launch --help
	$(BIN)/ringspan launch $(if $(findstring experiment=,$(ARGS)),,experiment=laptop) $(ARGS)

test: $(VENV)/.dev  ## ARGS="-k mask -m 'not slow'" go to pytest
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

compat: $(VENV)/.dev  ## the Hopper kernels with each triton that we support; needs a network, some minutes, no GPU
	$(BIN)/python -m tests.kernels.compat

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(VENV)/.dev
	$(BIN)/python docs/tables.py
	$(BIN)/ringspan bench kernels --roofline --from docs/results/attention-h200.json --plot

clean:  ## keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"ringspan needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch; assert torch.version.cuda or torch.version.hip' 2>/dev/null && echo --system-site-packages) $(VENV)

# Where the machine brings torch, its torch and triton stand in for ours: pip then stops rather than replace them.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@if grep -q 'system-site-packages = true' $(VENV)/pyvenv.cfg; then \
	  grep -vE '^(torch|triton)==' constraints.txt > $@; \
	  $(BIN)/python -m pip list --disable-pip-version-check --format=freeze | grep -E '^(torch|triton)==' > $@.machine; \
	  echo "Keeping what this machine brings: $$(paste -sd ' ' $@.machine)"; \
	  cat $@.machine >> $@; \
	else cp constraints.txt $@; fi

$(VENV)/.run: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing what is missing into $(VENV); the first time takes a few minutes."
	@$(call REQUIREMENTS,p["dependencies"]) > $(VENV)/requirements.txt
	$(INSTALL) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(call REQUIREMENTS,p["optional-dependencies"]["dev"]) > $(VENV)/requirements-dev.txt
	$(INSTALL) -r $(VENV)/requirements-dev.txt
	@touch $@

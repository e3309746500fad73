# Everything runs in .venv, which the first target that needs it creates. PYTHON=... chooses the interpreter.
# TORCH=2.11.0 takes that release in place of the pinned one, in an environment of its own.
SHELL := /bin/bash
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
CONSTRAINTS := $(VENV)/constraints.txt
# Python compiles what it imports; to compile all of torch takes longer than the demo's training.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS)
DEVICES ?= 2
MINUTES ?= 30
PYTHON ?=
export DEVICES PYTHON VENV
unexport PYTHONDONTWRITEBYTECODE  # what one process of the tests has compiled, hundreds of others need

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check types docs gallery format bench gpu wheels clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEVELOPED)  ## Create .venv with the pinned versions and the package (quick when nothing changed)

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/lockstep/comm/shm/*.[ch])
	@set -e; if [ ! -x $(BIN)/python ]; then python=$$(tools/find_python.sh); "$$python" -m venv $(VENV); fi
	@echo "Installing the pinned versions into $(VENV); the first time this takes a minute or two."
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt >$(CONSTRAINTS)
	@rm -f src/lockstep/comm/shm/_native.*.so  # of earlier versions, with a name that Python would prefer
	$(PIP) torch --editable '.[examples]'
	@touch $@

$(DEVELOPED): $(INSTALLED)
	@echo "Installing the tools for tests, checks and documentation."
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## Train on real data, verify the run, then compare one device, both engines and torch's own (DEVICES=2)
	@tools/demo.sh

PYTEST = $(BIN)/python -m pytest --ignore tests/contract

test: setup  ## Run the tests but the contracts, three files at a time on two cores; TORCH=2.11.0 with that release
	@# While the simulated device is compiled, the other core compiles what the tests import: else each worker would.
	@[ -d tests/__pycache__ ] || $(PYTEST) --collect-only -qq >/dev/null & \
		$(BIN)/python -c 'from tests.simulated_device import build, missing; missing() or build()'; built=$$?; wait; exit $$built
	@$(BIN)/python tools/test.py --ignore tests/contract --durations 20

soak: setup  ## Run random programs and random faults for MINUTES=30, half of the time each
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[integrations]'
	SOAK_MINUTES=$$(( $(MINUTES) / 2 )) $(BIN)/python -m pytest -m soak -n 2 --dist loadfile --durations 10
	$(BIN)/python bench/chaos.py --minutes $$(( $(MINUTES) / 2 )) --seed $$(date +%s)

check: setup docs  ## Run the gates: pages, lint, format, types, and the contracts (layers, sizes, names, flags, documentation)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract

types: setup  ## Check types against the libraries of the optional sinks and of Ray, too, which it installs
	$(PIP) --editable '.[mlflow,ray,wandb]'
	$(BIN)/mypy

docs: setup  ## Build the documentation into site/; it opens from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gallery: setup  ## Take the pictures of docs/gallery.md again (five minutes; on a quiet machine)
	$(BIN)/python -m tools.gallery

format: setup  ## Put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Measure against torch and its peers (an hour), or ONLY=name; QUICK=1: does it run; SINCE=COMMIT: what got slower
	$(PIP) --editable '.[bench]'
	$(BIN)/python tools/bench.py $(if $(QUICK),--quick) $(if $(SINCE),--since $(SINCE)) $(ONLY)

# Without .venv: on a machine with GPUs the Python that has torch will do, also without a network.
gpu: MINUTES = 8
gpu:  ## Test and measure on the GPUs of this machine for MINUTES=8, results also in OUT=DIR; ONLY=tests: that section; no setup
	@PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(or $(PYTHON),python3)) -m bench.gpu_proof --minutes $(MINUTES) \
		$(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

wheels:  ## Build wheels for x86_64 and aarch64 from the last commit, and check them (the head of tools/wheels.sh says with what)
	tools/wheels.sh

clean:  ## Remove .venv and what the tools left
	rm -rf .venv .venv-torch-* build dist site .mypy_cache .ruff_cache .pytest_cache

# Everything a contributor runs. Needs only make and Python 3.11 or later.

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
BENCH := .venv-bench/.installed
PIP_INSTALL = -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?=
QUALITY_ARGS ?=

# The first interpreter that runs and is new enough.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format typecheck wheel-check bench-speed bench-quality clean

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE) ## Run the demo: a digits network made Bayesian, with a report to open
	$(BIN)/bayesify demo

test: lint typecheck ## Check format, lint and types, then run the tests (PYTEST_ARGS="-k name")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DEV) ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(DEV) ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: lint ## Check types (after lint, which is quicker)
	$(BIN)/mypy

wheel-check: $(CORE) ## Build the wheel, install it in a fresh environment and run the demo there
	rm -rf dist
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python scripts/check_wheel.py dist .venv-wheel

bench-speed: $(BENCH) ## Measure the speed of predictions beside the peers' (half an hour, quiet machine)
	.venv-bench/bin/python benchmarks/speed.py

bench-quality: $(BENCH) ## Measure the quality of uncertainty (a day; resumes; QUALITY_ARGS="--quick": minutes)
	.venv-bench/bin/python -m benchmarks.quality $(QUALITY_ARGS)

clean: ## Remove the virtual environments and everything built
	rm -rf $(VENV) .venv-wheel .venv-bench dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "bayesify needs Python 3.11 or later, and neither python3.11 nor" \
		"python3 is one: install it, or name it with 'make PYTHON=/path/to/python'." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt scripts/prepare_venv.py $(wildcard scripts/venv_site/*) | $(BIN)/python
	@echo "Installing bayesify into $(VENV): a few minutes the first time."
	$(BIN)/python $(PIP_INSTALL) -e .
	$(BIN)/python scripts/prepare_venv.py
	@touch $@

$(DEV): $(CORE)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(BENCH): pyproject.toml constraints.txt benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(PIP_INSTALL) -e .
	.venv-bench/bin/python -m pip install -qq --disable-pip-version-check -r benchmarks/requirements.txt
	.venv-bench/bin/python scripts/prepare_venv.py
	@touch $@

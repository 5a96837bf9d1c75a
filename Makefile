# Every target makes its own environment: a fresh machine needs Python 3.11, pip and a C compiler.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: help demo test slow kernels torture lint docs bench hooks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.study ## the method on real data that needs no download: table, figures, one page
	$(BIN)/maxgain demo
	@echo "to type maxgain yourself: source $(VENV)/bin/activate"

test: lint ## everything that must hold, on one machine and in a few minutes
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

slow: $(VENV)/.dev ## what takes many processes: ranks, clusters, and those of them that are killed
	$(BIN)/python -m pytest -n 1 -m slow

# Beside the environment and not in it, where torch would find it and take it for a compiler of its own.
kernels: $(VENV)/.dev ## the GPU's kernels without a GPU, by Triton's interpreter
	test -d $(VENV)/triton || $(BIN)/pip install -q --no-deps --target $(VENV)/triton triton==3.7.1
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/kernels --ignore tests/kernels/test_merging.py

lint: $(VENV)/.dev ## style and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

torture: $(VENV)/.dev ## thousands of bad command lines, damaged files, faults and kills, with their counts
	MAXGAIN_TORTURE=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/torture

bench: $(VENV)/.dev ## the cost of a training step with us, against the same step without
	$(BIN)/maxgain bench --out benchmarks/here

hooks: $(VENV)/.dev ## check every commit as `make lint` does, before it is made
	$(BIN)/pre-commit install

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache site dist

# One environment in two sizes: what the study needs, and on top of it what developers need.
$(VENV)/.study: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch and what the study needs into $(VENV)"
	$(PIP) --editable '.[study]'
	@touch $@

$(VENV)/.dev: $(VENV)/.study
	@echo "installing what developers need into $(VENV)"
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps 'timm>=1.0' # which asks for torchvision; where that was built for another torch, Lightning fails beside it
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

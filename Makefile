# Every target makes its own environment: a fresh machine needs Python 3.11, pip and a C compiler.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: help demo test quick slow kernels lint docs bench reproduce hooks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.study ## the method on real data that needs no download: table, picture, page
	$(BIN)/maxgain demo
	@echo "to type maxgain yourself: source $(VENV)/bin/activate"

test: lint ## style, types and all fast tests, within three minutes on two cores
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

SLOWER := study integrations kernels promises experiments lipschitz test_docs.py test_examples.py test_imports.py test_models.py test_experts.py
quick: $(VENV)/.dev ## the method's own tests
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow" $(addprefix --ignore=tests/,$(SLOWER))

slow: $(VENV)/.dev ## tests that start many processes or a cluster
	$(BIN)/python -m pytest -q -n 2 -m slow

# Beside the environment and not in it, where torch would find it and take it for a compiler of its own.
kernels: $(VENV)/.dev ## the GPU's kernels without a GPU, by Triton's interpreter
	test -d $(VENV)/triton || $(BIN)/pip install -q --no-deps --target $(VENV)/triton triton==3.7.1
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/kernels --ignore tests/kernels/test_merging.py

lint: $(VENV)/.dev ## style and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.study ## the documentation as a site, in site/
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reproduce: $(VENV)/.study ## REPRODUCTION.md from the recorded results; 'python -m experiments run NAME' trains what is missing
	$(BIN)/python -m experiments $(if $(RUN),run $(RUN))

bench: $(VENV)/.study ## the cost of a training step with us, against the same step without
	$(BIN)/python -m benchmarks

hooks: $(VENV)/.dev ## check every commit as `make lint` does, before it is made
	$(PIP) 'pre-commit>=4.0' 'validate-pyproject[all]>=0.23'
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

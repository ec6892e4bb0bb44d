# Everything a fresh clone needs: each target first makes .venv with the versions of constraints.txt, once.
#   make demo    the main job on real data: a study in fp32, fp16 and bf16, a table and an HTML report
#   make check   what CI runs: lint, types, tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.castwise-installed
DEMO_OUT ?= out/demo
# Two processes: more do not help two cores, and each loads torch.
PYTEST_ARGS ?= -n 2 --dist load

.PHONY: help venv demo test lint types check format clean

help:
	@echo "make demo   run a study of the digits task and print where its report is"
	@echo "make test   run the tests        make lint   ruff"
	@echo "make check  lint, types, tests   make types  mypy"
	@echo "make format let ruff rewrite     make clean  remove caches and results, keep .venv"

venv: $(STAMP)

# `python -m venv` leaves an environment that is already there as it is; the stamp makes the install run once per change.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,study,torch,jax]'
	@touch $@

demo: $(STAMP)
	$(BIN)/castwise study digits --out $(DEMO_OUT) --resume

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

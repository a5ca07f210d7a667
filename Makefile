# A machine with Python (>= 3.10) and make is all that is needed: every target installs what it uses into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test nightly check format clean help

help:
	@echo "make demo    train, accelerate and time a small network, offline"
	@echo "make test    run the tests"
	@echo "make nightly 2,000 random networks, about ten minutes"
	@echo "make check   formatting, lint and types"
	@echo "make format  rewrite files in the project's format"
	@echo "make clean   remove .venv and caches"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $(READY)

demo: $(READY)
	$(BIN)/leanconv demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

nightly: $(READY)
	LEANCONV_CASES=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_properties.py --hypothesis-show-statistics

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# A machine with Python (>= 3.10) and make is all that is needed: every target installs what it uses into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two processes, each of one thread. A process takes tests in their order, so that one module's fixtures are made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test nightly check docs browser format clean help

help:
	@echo "make demo    train, accelerate and time a small network, offline, and draw the page about it: demo.html"
	@echo "make test    run the tests, but for those that take long; about four minutes on two cores"
	@echo "make nightly run the others, and 2,000 random networks; about six minutes"
	@echo "make check   formatting, lint, types and documentation"
	@echo "make docs    the documentation as pages, in site/"
	@echo "make browser Debian's Chromium, for the tests of the page (they are skipped without one)"
	@echo "make format  rewrite files in the project's format"
	@echo "make clean   remove .venv and caches"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $(READY)

demo: $(READY)
	$(BIN)/leanconv demo --report demo.html

test: $(READY)
	$(PYTEST) -m "not nightly" --cov=leanconv --cov-report=
	@echo "coverage of src/leanconv: $$($(BIN)/coverage report --format=total --precision=1) %"

nightly: $(READY)
	$(PYTEST) -m nightly
	LEANCONV_CASES=2000 $(PYTEST) tests/pipeline/test_properties.py --hypothesis-show-statistics

check: $(READY) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The variable keeps the theme's advertisement of its successor out of the output.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

browser:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .coverage .pytest_cache .mypy_cache .ruff_cache

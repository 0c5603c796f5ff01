# make run · make test · make check · make bench. The first two set everything up; a second time they do not.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export CHROMIUM ?= chromium

.PHONY: run test check bench chromium

run: $(VENV)/runs
	$(BIN)/python app.py $(ARGS)

test: check chromium
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/runs
	$(BIN)/python -m engines.transformers_backend.bench $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "This needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "This needs Python's venv module: sudo apt-get install python3-venv"; exit 1; }

# A file in the environment stands for what was installed, so that nothing is installed twice.
$(VENV)/runs: requirements.txt constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.txt
	@touch $@

$(VENV)/checks: requirements-dev.txt $(VENV)/runs | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements-dev.txt
	@touch $@

# The browser tests drive Debian's Chromium.
chromium:
	@command -v $(CHROMIUM) > /dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium > /dev/null; } || \
		{ echo "The browser tests need Chromium: install it (sudo apt-get install chromium)," \
			"or name it: make test CHROMIUM=/path/to/chromium"; exit 1; }

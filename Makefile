# make run · make test · make check · make bench · make torch · make trtllm. What they need is set up
# the first time only.

PYTHON ?= python3
VENV := .venv
TRTLLM_VENV := .venv-trtllm
TRTLLM_PYTHONS := python3.12 python3.10
BIN := $(VENV)/bin
export CHROMIUM ?= chromium

.PHONY: run test check bench torch trtllm chromium

run: $(VENV)/runs
	$(BIN)/python app.py $(ARGS)

test: check chromium
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/bench
	$(BIN)/python -m engines.bench $(ARGS)

# The transformers back end: models that are no Llamas, CUDA, tuning a draft.
torch: $(VENV)/torch
	$(BIN)/python -m engines doctor

# The worker's environment, on a machine with an NVIDIA GPU; doctor tells what it can do.
trtllm: $(VENV)/runs $(TRTLLM_VENV)/runs
	SPECDEC_TRTLLM_PYTHON=$(TRTLLM_VENV)/bin/python $(BIN)/python -m engines doctor

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "This needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "This needs Python's venv module: sudo apt-get install python3-venv"; exit 1; }

# A file in the environment stands for what was installed, so that nothing is installed twice.
# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -r
$(VENV)/runs: requirements.txt constraints.txt | $(VENV)/bin/python
	$(INSTALL) requirements.txt
	@touch $@

$(VENV)/torch: requirements-torch.txt $(VENV)/runs
	$(INSTALL) requirements-torch.txt
	@touch $@

$(VENV)/bench: requirements-bench.txt $(VENV)/torch
	$(INSTALL) requirements-bench.txt
	@touch $@

$(VENV)/checks: requirements-dev.txt $(VENV)/torch
	$(INSTALL) requirements-dev.txt
	@touch $@

$(TRTLLM_VENV)/runs: requirements-tensorrt-llm.txt
	@python="$(firstword $(foreach name,$(TRTLLM_PYTHONS),$(shell $(name) -c 'print("$(name)")' 2> /dev/null)))"; \
	test -n "$$python" || { echo "TensorRT-LLM has wheels for Python 3.12 and 3.10, and neither" \
		"runs here: install python3.12 with its venv module, or use the Dockerfile"; exit 1; }; \
	ldconfig -p | grep -q libmpi.so || { echo "TensorRT-LLM needs Open MPI:" \
		"sudo apt-get install libopenmpi-dev"; exit 1; }; \
	$$python -m venv $(TRTLLM_VENV) || { rm -rf $(TRTLLM_VENV); \
		echo "This needs Python's venv module: sudo apt-get install $$python-venv"; exit 1; }
	$(TRTLLM_VENV)/bin/python -m pip install --upgrade pip setuptools wheel
	$(TRTLLM_VENV)/bin/python -m pip install -r requirements-tensorrt-llm.txt
	@touch $@

# The browser tests drive Debian's Chromium.
chromium:
	@command -v $(CHROMIUM) > /dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium > /dev/null; } || \
		{ echo "The browser tests need Chromium: install it (sudo apt-get install chromium)," \
			"or name it: make test CHROMIUM=/path/to/chromium"; exit 1; }

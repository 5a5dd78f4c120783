# Every target makes .venv when it is missing, installs with the exact versions of constraints.txt, and goes on.
# A machine needs Python >= 3.11, make and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.dev-installed

# Folder x/ is tercet.x and entry/ is tercet itself: setuptools knows it from pyproject.toml, pyright by these links.
TYPED := $(patsubst %,../../%,$(wildcard entry/*.py) $(patsubst %/__init__.py,%,$(filter-out entry/%,$(wildcard */__init__.py))))

# Processes that share the quick tests among them.
TEST_PROCESSES ?= 2
TEXT ?=
BENCH_SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help demo test test-all dev ecosystem check bench clean

help: ## show this list
	@echo "Usage: make TARGET [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-9s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## train a small model on text that Python carries, into out/demo
	@$(BIN)/tercet demo

test: $(DEV_STAMP) ## run the tests, but for the slow ones
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -m "not slow" -n $(TEST_PROCESSES)

test-all: $(DEV_STAMP) ## run every test
	@HF_HUB_OFFLINE=1 $(BIN)/pytest

dev: $(DEV_STAMP) ## set up for working on the code: installs, and shows pyright that folder x/ is tercet.x
	@rm -rf .types && mkdir -p .types/tercet
	@ln -s $(TYPED) .types/tercet/
	@echo "Ready. Commands are in $(BIN): source $(BIN)/activate"

ecosystem: $(VENV)/.ecosystem ## install the programs of others that slow tests run (700 MB)

check: dev ## lint, format check, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: $(DEV_STAMP) ## measure quality on TEXT=file.txt within BENCH_SECONDS, and the cost of a training step
	@test -f "$(TEXT)" || { echo "make bench needs a text file: make bench TEXT=path/to/text.txt" >&2; exit 2; }
	@$(BIN)/python benchmarks/quality.py "$(TEXT)" --seconds $(BENCH_SECONDS)
	@$(BIN)/python benchmarks/train.py

clean: ## remove what the targets made, but for .venv and out
	@rm -rf .types build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# What pip downloads is shown as it comes; the pipe would hide that it failed, so its status goes through a file.
define install
{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt $(1) 2>&1; \
    echo $$? > $(VENV)/install.status; } | tee $(VENV)/install.log | \
  awk '/^ *(Downloading|Using cached) .* \(.*B\)$$/ {sub(/.*\//, ""); sub(/^ *(Downloading|Using cached) /, ""); print "  " $$0; fflush()} \
       /^Installing collected packages/ {print "  unpacking ..."; fflush()}'; \
test "$$(cat $(VENV)/install.status)" = 0 || \
  { tail -n 25 $(VENV)/install.log >&2; echo "The installation failed; all it said is in $(VENV)/install.log" >&2; exit 1; }
endef

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tercet needs Python 3.11 or newer and '$(PYTHON)' is not; say which to use: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv" >&2; exit 2; }

$(STAMP): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "Installing Tercet and the libraries it stands on into $(VENV); the first time this takes some minutes ..."
	@$(call install,-e .)
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo "Installing what tests and checks need into $(VENV) ..."
	@$(call install,-e '.[dev]')
	@touch $@

# What docs/data.md installs, exactly; it wants an older xxhash than datasets does.
DATATROVE := datatrove==0.10.1 orjson==3.13.0 tokenizers==0.23.3 regex==2026.11.19 nltk==3.10.4 spacy==3.8.18 \
  fasteners==0.20 xxhash==3.8.2

# torchao gets a folder of its own: transformers imports it wherever it finds it, and it complains at every command.
# datatrove gets an environment of its own.
$(VENV)/.ecosystem: $(DEV_STAMP) tests/conformance/clients/package.json
	@echo "Installing the programs that slow tests run into $(VENV) ..."
	@{ $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,ecosystem]' && \
	   $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	     --target $(VENV)/torchao torchao && \
	   $(BIN)/python -m venv $(VENV)/trove && \
	   $(VENV)/trove/bin/python -m pip install --disable-pip-version-check $(DATATROVE); } > $(VENV)/ecosystem.log 2>&1 || \
	  { tail -n 25 $(VENV)/ecosystem.log >&2; echo "The installation failed; see $(VENV)/ecosystem.log" >&2; exit 1; }
	@if command -v npm > /dev/null; then \
	  mkdir -p $(VENV)/npm && cp tests/conformance/clients/package.json $(VENV)/npm/ && \
	  npm install --prefix $(VENV)/npm --no-package-lock --no-audit --no-fund --loglevel error; \
	else echo "There is no npm, so the test of @huggingface/tokenizers will be skipped"; fi
	@touch $@

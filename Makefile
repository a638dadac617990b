# `make demo` and `make test` work from a fresh clone: Python 3.11 or newer with venv, make, and gcc.
#
# TORCH chooses the build of PyTorch that is installed, as a requirement for pip: see README, "PyTorch".

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check install clean FORCE

demo: $(VENV)/.engine
	$(BIN)/paceline demo smollm2-135m

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/.engine

$(VENV)/.venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing; install Python 3.11 or newer (Debian: apt install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=python3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: Python's venv module is missing (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Written anew only when TORCH changes, so that another build is installed over the one that is there.
$(VENV)/.torch: $(VENV)/.venv FORCE
	@echo '$(TORCH)' | cmp -s - $@ 2>/dev/null || { \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" && \
	  { test ! -e $@ || $(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$(TORCH)"; } && \
	  echo '$(TORCH)' > $@; }

FORCE:

$(VENV)/.engine: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[engine]'
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[engine,serve,dev]'
	@touch $@

clean:
	rm -rf $(VENV)

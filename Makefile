# `make demo` and `make test` do everything on a fresh clone: a virtual environment with pinned packages, this package
# with its C kernels, and Horovod, compiled once (about 8 minutes on 2 cores) and kept in the user's cache.
#
#   make PYTHON=python3.12 ...        another interpreter
#   make WORKERS=4 test           more test files at a time, where there are more than two cores
#   make TORCH_INDEX=URL ...          where pip also looks for torch. On Linux the default index may serve a CUDA build of
#                                     several GB; the CPU build serves as well. PIP_INDEX_URL and all of pip's own
#                                     variables work too.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# -qq: errors only; pip warns once a package of each index that lacks it.
PIP_INSTALL = $(PY) -m pip install -qq --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PACKAGE_DIRS := $(wildcard hvd_onebit torch_impl tf_impl)
LINTED := setup.py $(PACKAGE_DIRS) $(wildcard tests examples)

# horovodrun looks for mpirun on PATH, and Open MPI asks root twice whether this is meant.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PIP_ROOT_USER_ACTION := ignore
endif

# $(call timed,what,command): says what is done, that it still is (twice a minute), and how long it took.
timed = start=$$SECONDS; echo "== $(1)"; \
	while sleep 30 >/dev/null 2>&1; do echo "   still at it: $$((SECONDS - start)) s"; done & beat=$$!; \
	trap "kill $$beat 2>/dev/null || true" EXIT; \
	$(2); \
	echo "   took $$((SECONDS - start)) s"

.PHONY: help setup demo demo-keras test soak lint format clean

help:
	@echo "make demo     train on two ranks, with 1-bit compression and without, and compare"
	@echo "make demo-keras  the same under Keras's model.fit"
	@echo "make test     all that CI runs: ruff, mypy, pytest"
	@echo "make soak     20,000 steps with skips, saves and resizes: replicas equal, memory flat, nothing lost"
	@echo "make lint     ruff and mypy only"
	@echo "make format   let ruff reformat and fix what it can"
	@echo "make setup    environment and Horovod only (the others do it first)"
	@echo "make clean    remove the environment and all that was built; Horovod's wheel stays in the user's cache"

setup: $(STAMPS)/horovod

demo: setup
	$(VENV)/bin/horovodrun --gloo -np 2 $(PY) examples/pytorch_mnist.py --compare --seeds 3 --out demo \
	    --json demo/figures.json

demo-keras: setup
	$(VENV)/bin/horovodrun --gloo -np 2 $(PY) examples/keras_mnist.py --compare --out demo-keras \
	    --json demo-keras/figures.json

# a crashed worker ends the run: after a restart pytest-xdist waits for ever for the rest of its file
test: setup lint $(STAMPS)/triton
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

soak: $(STAMPS)/package
	HVD_ONEBIT_SOAK_STEPS=20000 $(PY) -m pytest tests/test_soak.py --timeout 3600

lint: $(STAMPS)/package
	$(PY) -m ruff check $(LINTED)
	$(PY) -m ruff format --check $(LINTED)
	$(PY) -m mypy $(PACKAGE_DIRS)

format: $(STAMPS)/requirements
	$(PY) -m ruff format $(LINTED)
	$(PY) -m ruff check --fix $(LINTED)

clean:
	rm -rf $(VENV) build dist demo demo-keras *.egg-info hvd_onebit/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGE_DIRS) $(wildcard tests examples) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no $(PYTHON): install Python 3.11 or 3.12," \
	    "or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
	    echo "$$("$(PYTHON)" --version) will not do: the pinned packages need Python 3.11 or 3.12." \
	    "Name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments." \
	    "Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(call timed,virtual environment in $(VENV),"$(PYTHON)" -m venv $(VENV))
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/requirements: requirements.txt $(STAMPS)/venv
	@$(call timed,pinned packages (3 GB installed; minutes),$(PIP_INSTALL) -r requirements.txt)
	@touch $@

$(STAMPS)/package: setup.py pyproject.toml $(wildcard hvd_onebit/csrc/* *_impl/__init__.py) $(STAMPS)/requirements
	@$(call timed,hvd_onebit with its C kernels,HVD_ONEBIT_REQUIRE_NATIVE=1 \
	    $(PIP_INSTALL) --no-build-isolation --no-deps -e .)
	@touch $@

$(STAMPS)/triton: requirements-triton.txt $(STAMPS)/requirements
	@if ! $(PY) -c 'import triton' 2>/dev/null; then \
	    $(call timed,Triton for its kernels' tests,$(PIP_INSTALL) --target $(VENV)/triton -r requirements-triton.txt); fi
	@touch $@

$(STAMPS)/horovod: $(wildcard hvd_onebit/horovod_build.py hvd_onebit/_build_*.py hvd_onebit/_horovod_*.py) $(STAMPS)/package
	@echo "== Horovod"
	@$(PY) -m hvd_onebit install-horovod
	@touch $@

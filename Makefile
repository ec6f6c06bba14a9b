# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
#
# Everything is installed into .venv in this folder. Stamps lie inside the environment they speak of, so removing
# .venv starts anew and a repeated call costs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is new enough and really runs; some shims exist without a version behind them.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# Where torch comes from. Without an NVIDIA GPU: PyTorch's own index of CPU builds, a tenth of the size of the CUDA build.
# Empty: the default index of pip. Give your own with `make demo TORCH_INDEX=...`.
ifeq ($(origin TORCH_INDEX),undefined)
TORCH_INDEX := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo https://download.pytorch.org/whl/cpu)
endif

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# No bytecode while installing: compiling all of it takes longer than installing it. See `compile` below.
# `compat`: a clone in a folder named specwire would else hide the package from scripts that lie beside that folder.
EDITABLE := --config-settings editable_mode=compat -e
PIP_INSTALL := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input install --no-compile
PROTO_VENV := .venv-proto
# An older generator on purpose: generated code refuses runtimes older than itself.
PROTO_TOOLS := grpcio-tools==1.80.* mypy-protobuf==5.1.0 protobuf==6.33.6 "setuptools<81"
PYTEST := $(BIN)/python -m pytest
# Tests that start no service and measure no time: two processes share them. All others have the machine to themselves.
ALONE := law property scenario unit

.PHONY: help demo install test test-slow check format proto proto-check clean

help: ## This list
	@echo "Specwire. First: make demo, then: make test"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

demo: $(STAMP)-install ## Install, fetch the demo models, start everything under Ray, ask, show where the time went, stop
	@$(BIN)/python -m deploy.demo

install: $(STAMP)-install ## Only install, into .venv

test: $(STAMP)-dev ## Install and run the tests, except those marked slow
	@$(BIN)/specwire models fetch demo
	$(PYTEST) -m "not slow" -n 2 $(addprefix tests/,$(ALONE))
	$(PYTEST) -m "not slow" $(addprefix --ignore=tests/,$(ALONE))

test-slow: $(STAMP)-dev ## The tests marked slow
	@$(BIN)/specwire models fetch demo
	$(PYTEST) -m slow

check: $(STAMP)-dev proto-check ## Lint, format, types, import contracts, protocol lint and freshness
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	@echo "check: all good"

format: $(STAMP)-dev ## Format the code and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(PROTO_VENV)/.stamp ## Generate specwire/v1 from protos/
	@$(call generate,.)
	@echo "proto: specwire/v1 written"

proto-check: $(PROTO_VENV)/.stamp
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	  $(call generate,"$$fresh"); \
	  diff -r -x __init__.py -x __pycache__ "$$fresh/specwire/v1" specwire/v1 \
	    || { echo "proto: specwire/v1 is not what protos/ says; run 'make proto' and commit"; exit 1; }
	@echo "proto: specwire/v1 is fresh"

# $(1): the folder to write into.
define generate
$(PROTO_VENV)/bin/python -m grpc_tools.protoc --proto_path=protos \
  --plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) protos/specwire/v1/*.proto
endef

clean: ## Remove the environments and everything built; models and state in your home stay
	rm -rf $(VENV) $(PROTO_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP)-venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name it with PYTHON=..."; exit 1; }
	@echo "install: environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch first and alone: only it comes from another index, and only its build depends on the machine.
$(STAMP)-torch: $(STAMP)-venv constraints.txt
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ]; then \
	  echo "install: torch from $$index"; \
	  $(PIP_INSTALL) --no-deps --index-url "$$index" --retries 0 --timeout 10 -c constraints.txt torch 2>/dev/null \
	    || { echo "install: not reachable or not there; torch from pip's default index (may be a CUDA build)"; index=; }; \
	else \
	  echo "install: torch from pip's default index"; \
	fi; \
	[ -n "$$index" ] || $(PIP_INSTALL) --no-deps -c constraints.txt torch
	@echo "install: torch $$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')"
	@touch $@

$(STAMP)-install: $(STAMP)-torch pyproject.toml constraints.txt
	@echo "install: specwire with [hf,ray,otel,bench]"
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[hf,ray,otel,bench]'
	@$(compile)
	@touch $@

# Compiles what the services and Ray's own processes import, and nothing else. Here and not at the first start, since several
# processes start at once and each would compile the same; and since many containers forbid Python to do it by itself.
define compile
export -n PYTHONDONTWRITEBYTECODE; \
$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3*/site-packages/ray/{*.py,_private,_common,core,dashboard,util} || true; \
$(BIN)/python -c 'import torch, transformers.models.llama.modeling_llama, ray, deploy.cli, deploy.cluster, deploy.demo; \
import coordinator.serve, target_service.role, draft_service.role, specwire.lm.torch_load'
endef

$(STAMP)-dev: $(STAMP)-install
	@echo "install: tools for development"
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) '.[hf,ray,otel,bench,dev]'
	@touch $@

$(PROTO_VENV)/.stamp: Makefile
	@echo "install: protocol compiler in $(PROTO_VENV)"
	@$(PYTHON) -m venv $(PROTO_VENV)
	@$(subst $(BIN),$(PROTO_VENV)/bin,$(PIP_INSTALL)) $(PROTO_TOOLS)
	@touch $@

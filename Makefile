# SPDX-License-Identifier: Apache-2.0
# make demo: everything from nothing to a real model's answers, with and without drafters.
# make test: lint, overlay checks, documentation and the tests, but the slow ones.
# make test-all: the slow ones too. make docs: the documentation, in build/docs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
# A change of an addition is live; what else goes into the install is listed here.
INSTALL_INPUTS := $(wildcard requirements/*.txt) base.toml edits.lock setup.py \
    pyproject.toml $(wildcard csrc/* tools/overlay/*.py) \
    $(shell find vllm -name '*.edit' -o -type d -not -name __pycache__)

.DELETE_ON_ERROR:
.PHONY: demo test test-all upstream-tests lint docs wheel env test-env \
    rebase-report clean

# Without network it falls back to models that are here.
demo: env
	$(BIN)/python -m tools.real_model demo

test: lint docs
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: lint docs
	VLLM_TEST_EXAMPLES=1000 $(BIN)/python -m pytest $(PYTEST_ARGS)

# vLLM's own tests, here and on the release; see tools/upstream_tests.
upstream-tests: test-env
	$(BIN)/python -m tools.upstream_tests

lint: test-env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.overlay check

docs: test-env
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

env: $(VENV)/installed
test-env: $(VENV)/test-installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Python compiles what is imported; pip would compile all packages, on one core.
$(VENV)/installed: $(BIN)/python $(INSTALL_INPUTS)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	    --editable . -r requirements/real_model.txt
	touch $@

$(VENV)/test-installed: $(VENV)/installed requirements/test.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	    -r requirements/test.txt
	touch $@

# make wheel DEVICE=cpu|cuda: a wheel for release, in dist/; equal inputs, equal bytes.
wheel: $(BIN)/python
	VLLM_TARGET_DEVICE=$(DEVICE) SOURCE_DATE_EPOCH=1580601600 \
	    PIP_CONSTRAINT=requirements/build.txt PIP_BUILD_CONSTRAINT=requirements/build.txt \
	    $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# make rebase-report VERSION=0.33.0 [DEVICE=cuda]: what another release would change.
DEVICE ?= cuda
rebase-report: test-env
	$(BIN)/python -m tools.overlay rebase --version $(VERSION) --device $(DEVICE)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

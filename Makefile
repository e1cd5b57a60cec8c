# SPDX-License-Identifier: Apache-2.0
# make demo: everything from nothing to the drafters' table.
# make test: lint, overlay checks and all CPU tests, of the documentation too: the CPU
# steps of .buildkite/.
# make docs: renews what the documentation takes from code and results; build/docs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
# A change of an addition is live; what else goes into the install is listed here.
INSTALL_INPUTS := $(wildcard requirements/*.txt) base.toml edits.lock setup.py \
    pyproject.toml CMakeLists.txt $(wildcard csrc/* tools/overlay/*.py) \
    $(shell find vllm -name '*.edit' -o -type d -not -name __pycache__)

.DELETE_ON_ERROR:
.PHONY: demo test lint docs wheel env test-env rebase-report clean

demo: env
	$(BIN)/python examples/offline_inference/spec_decode.py

test: test-env
	$(BIN)/python -m tools.ci test -- $(PYTEST_ARGS)

lint: test-env
	$(BIN)/python -m tools.ci run Lint

docs: test-env
	$(BIN)/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

env: $(VENV)/installed
test-env: $(VENV)/test-installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(INSTALL_INPUTS)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable .
	touch $@

$(VENV)/test-installed: $(VENV)/installed requirements/test.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements/test.txt
	touch $@

# make wheel DEVICE=cpu|cuda: a wheel for release, in dist/.
wheel: $(BIN)/python
	$(BIN)/python -m tools.package build --device $(DEVICE)

# make rebase-report VERSION=0.33.0 [DEVICE=cuda]: what another release would change.
DEVICE ?= cuda
rebase-report: test-env
	$(BIN)/python -m tools.overlay rebase --version $(VERSION) --device $(DEVICE)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

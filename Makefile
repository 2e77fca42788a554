# Two commands set everything up: `make demo` and `make test`.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUN := TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(BIN)/python

.PHONY: demo test lint test-parity test-slow bench clean

$(VENV)/%.installed: setup.cfg setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[$*]"
	touch $@

demo: $(VENV)/demo.installed
	$(RUN) examples/digits.py

test: $(VENV)/test.installed lint
	$(RUN) -m pytest -n 2

lint: $(VENV)/test.installed
	$(BIN)/ruff check .

test-parity: $(VENV)/test.installed
	$(RUN) -m tests.parity

test-slow: $(VENV)/test.installed $(VENV)/release.installed
	$(RUN) -m pytest tests/slow

bench: $(VENV)/test.installed
	$(RUN) -m benchmarks

clean:
	rm -rf $(VENV) build dist out *.egg-info

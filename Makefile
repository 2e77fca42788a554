# Two commands set everything up: `make demo` and `make test`.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUN := TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(BIN)/python

# What `make test-tf TF=2.18` makes and runs: the newest Keras and tf_keras that go with it.
TF ?= 2.21
TF_VENV := .venv-tf-$(TF)
# Not what differs between them: benchmarks, documents, examples, packaging.
TF_LEAVES_OUT := benchmarks digits_example doctest packaging readme

.PHONY: demo test lint test-parity test-slow test-libraries test-tf bench clean

$(VENV)/%.installed: setup.cfg setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[$*]"
	touch $@

$(TF_VENV)/test.installed: setup.cfg setup.py
	test -x $(TF_VENV)/bin/python || $(PYTHON) -m venv $(TF_VENV)
	$(TF_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TF_VENV)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		-e ".[test]" "tensorflow~=$(TF).0" "tf_keras~=$(TF).0"
	touch $@

# Orbit alone out of tf-models-official, which asks for another TensorFlow and for much else.
.venv-libraries/libraries.installed: setup.cfg setup.py
	test -x .venv-libraries/bin/python || $(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install --quiet --upgrade pip
	.venv-libraries/bin/python -m pip install --quiet -e ".[libraries]" pytest
	.venv-libraries/bin/python -m pip install --quiet --no-deps "tf-models-official>=2.20"
	touch $@

demo: $(VENV)/demo.installed
	$(RUN) examples/digits.py

test: $(VENV)/test.installed lint
	$(RUN) -m pytest -n 2

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

test-parity: $(VENV)/test.installed
	$(RUN) -m tests.parity
	$(RUN) -m tests.parity.sweep

test-slow: $(VENV)/test.installed $(VENV)/release.installed
	$(RUN) -m pytest -rP tests/slow

test-libraries: .venv-libraries/libraries.installed
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} .venv-libraries/bin/python -m pytest -rsP \
		tests/slow/libraries_test.py

test-tf: $(TF_VENV)/test.installed
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(TF_VENV)/bin/python -m pytest -n 2 \
		$(TF_LEAVES_OUT:%=--ignore=tests/%_test.py)

bench: $(VENV)/test.installed
	$(RUN) -m benchmarks

clean:
	rm -rf $(VENV) .venv-tf-* .venv-libraries build dist out *.egg-info

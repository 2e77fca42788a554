# Two commands set everything up: `make demo` and `make test`.  A first time takes a minute or two more.

# Of the Pythons that are there and start, 3.11 if it is one of them.
PYTHON ?= $(or $(shell for name in python3.11 python3; do \
	$$name -c "" >/dev/null 2>&1 && echo $$name && break; done),$(error no python3 here: make PYTHON=...))
VENV := .venv
BIN := $(VENV)/bin
RUN := TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(BIN)/python

# What `make test-tf TF=2.18` makes and runs: the newest Keras and tf_keras that go with it; or the
# Keras of `make test-tf TF=2.16 KERAS=3.8`.
TF ?= 2.21
TF_VENV := .venv-tf-$(TF)$(KERAS:%=-keras-%)
# Not what is the same on all of them: benchmarks, documents, examples, packaging.
LEAVES_OUT := benchmarks/benchmarks repository/digits_example repository/doctest \
	repository/packaging repository/readme
# Three processes, as two leave a sixth of two cores idle, in each a file's tests one after another:
# what a file makes once is made once. The files are taken in tests/conftest.py's order.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
ALL := -m "not rest"

# What `make test-python PYTHON=python3.13` makes, and what runs on the oldest and newest of them.
EXECUTABLE = $(or $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null),\
	$(shell sh .ci/pythons $(PYTHON:python%=%)),$(error no $(PYTHON) here))
VERSION = $(shell $(EXECUTABLE) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OF_KERAS := _keras/keras_hooks _keras/adopt _keras/batch_norm _keras/one_pass parity/parity
CORE := batch/split merge/merge replicas/run strategy variables/variables \
	repository/requirements _tensorflow/tensorflow_names _keras/keras_hooks parity/parity
CHOSEN = $(or $(TESTS:%=tests/%_test.py),$(ALL) $(LEAVES_OUT:%=--ignore=tests/%_test.py))

# Else each process would compile all that it imports again: 10 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests compiled test-all lint test-parity test-slow test-peers test-gpu test-libraries test-tf test-oldest test-python \
	test-pythons bench bench-jax docs docs-versions test-site release-check clean

# Without pip's compiling, a third of its time: Python compiles what is imported, a third of all.
$(VENV)/%.installed: setup.cfg setup.py
	@echo "Installing [$*] into $(VENV), once: a minute or two, TensorFlow is large."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --no-compile -e ".[$*]"
	touch $@

$(TF_VENV)/test.installed: setup.cfg setup.py
	test -x $(TF_VENV)/bin/python || $(PYTHON) -m venv $(TF_VENV)
	$(TF_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TF_VENV)/bin/python -m pip install --upgrade --upgrade-strategy eager \
		-e ".[test]" "tensorflow~=$(TF).0" "tf_keras~=$(TF).0" $(KERAS:%="keras~=%.0")
	touch $@

.venv-python%/test.installed: setup.cfg setup.py
	test -x .venv-python$*/bin/python || $(EXECUTABLE) -m venv .venv-python$*
	.venv-python$*/bin/python -m pip install --quiet --upgrade pip
	.venv-python$*/bin/python -m pip install --no-compile -e ".[test]"
	touch $@

# Orbit alone out of tf-models-official, which asks for another TensorFlow and for much else.
.venv-libraries/libraries.installed: setup.cfg setup.py
	test -x .venv-libraries/bin/python || $(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install --quiet --upgrade pip
	.venv-libraries/bin/python -m pip install -e ".[libraries,trackers]" pytest
	.venv-libraries/bin/python -m pip install gin-config pygame
	.venv-libraries/bin/python -m pip install --no-deps "tf-models-official>=2.20" \
		tf-agents gym==0.23.0 gym-notices
	touch $@

.venv-jax/jax.installed:
	test -x .venv-jax/bin/python || $(PYTHON) -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet --upgrade pip
	.venv-jax/bin/python -m pip install keras jax
	touch $@

demo: $(VENV)/demo.installed
	$(RUN) examples/digits.py

test: $(VENV)/test.installed
	$(MAKE) --no-print-directory --jobs 2 lint compiled
	$(MAKE) --no-print-directory tests

# Once, not in each of the first processes.
compiled: $(VENV)/test.installed
	$(RUN) -c "import tensorflow, keras, tf_keras"

tests: $(VENV)/test.installed
	$(RUN) $(PYTEST)

# What `make test` leaves out: tests that are marked wide. What is the rest is in `make test-slow`.
test-all: $(VENV)/test.installed
	$(RUN) $(PYTEST) -m "wide and not rest"

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

test-parity: $(VENV)/test.installed
	$(RUN) -m tests.parity
	$(RUN) -m tests.parity --quick --jit-compile
	$(RUN) -m tests.parity.sweep

test-slow: $(VENV)/test.installed $(VENV)/release.installed $(VENV)/docs.installed \
		$(VENV)/site-test.installed $(VENV)/notebook.installed
	$(RUN) $(PYTEST) -m rest
	$(RUN) -m pytest -rP tests/slow

# TensorFlow's own tests with TowerStrategy for MirroredStrategy: TENSORFLOW_SOURCES=folder of its sources.
test-peers: $(VENV)/test.installed
	TENSORFLOW_SOURCES="$(TENSORFLOW_SOURCES)" $(RUN) -m pytest -rsP tests/slow/upstream_test.py

# Without tests/conftest.py, which hides the GPUs from all other tests.
test-gpu: $(VENV)/test.installed
	$(RUN) -m pytest -rs -m "" --confcutdir=tests/gpu tests/gpu

test-libraries: .venv-libraries/libraries.installed
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} .venv-libraries/bin/python -m pytest -rsP \
		tests/slow/libraries_test.py

test-tf: $(TF_VENV)/test.installed
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(<D)/bin/python $(PYTEST) $(CHOSEN)

# The oldest Keras and TensorFlow that the package asks for. Not in .ci/run: behind the last test
# TensorFlow 2.16 may wait for minutes, or longer, to end an iterator.
test-oldest:
	$(MAKE) test-tf TF=2.16 KERAS=3.8 TESTS="$(OF_KERAS)"

test-python: .venv-python$(VERSION)/test.installed
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(<D)/bin/python $(PYTEST) $(CHOSEN)

test-pythons:
	sh .ci/pythons | sed -n '1p;$$p' | uniq | while read -r python; do \
		$(MAKE) test-python PYTHON="$$python" TESTS="$(CORE)" </dev/null || exit 1; done

# The site in build/site, without a warning; every link, every anchor, every Python block.
docs: $(VENV)/docs.installed $(VENV)/test.installed
	$(RUN) -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs build/site
	$(RUN) docs/links.py build/site
	$(RUN) -m pytest tests/repository/readme_test.py

# That of this commit, as main, and of each release's tag, in build/sites; each page leads to the others.
docs-versions: $(VENV)/docs.installed
	rm -rf build/sites build/versions
	tags=$$(git tag --list "v*" --sort=-v:refname) && for name in main $$tags; do \
		tree=$(CURDIR)/build/versions/$$name && mkdir -p $$tree && \
		git archive $$(test $$name = main && echo HEAD || echo $$name) | tar -x -C $$tree && \
		TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH=$$tree $(BIN)/sphinx-build --fresh-env --quiet -A site_version=$$name \
			-A site_versions="$$(echo main $$tags)" $$tree/docs build/sites/$$name || exit 1; \
	done && set -- $$tags main && \
		echo "<meta http-equiv=refresh content='0; url=$$1/index.html'>" > build/sites/index.html
	$(RUN) docs/links.py build/sites/main

# What is uploaded, in dist; each Python of this machine gets the wheel in an empty environment.
release-check: $(VENV)/release.installed $(VENV)/test.installed
	rm -rf build dist
	mkdir -p build/release
	umask 022 && git archive HEAD | tar -x --no-same-permissions -C build/release && \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist build/release
	$(BIN)/twine check --strict dist/*
	PYTHONS="$$(sh .ci/pythons)" $(RUN) -m pytest -rP tests/slow/wheel_test.py
	$(BIN)/python .ci/licences.py towerstrategy dist/sbom.cdx.json > dist/licences.md

# apt-get install chromium chromium-driver
test-site: $(VENV)/docs.installed $(VENV)/site-test.installed $(VENV)/notebook.installed \
		$(VENV)/test.installed
	$(RUN) -m pytest -rs tests/slow/site_test.py tests/slow/notebook_test.py

bench: $(VENV)/test.installed
	$(RUN) -m benchmarks

# Beside Keras 3 on JAX, in an environment without TensorFlow.
bench-jax: $(VENV)/test.installed .venv-jax/jax.installed
	$(RUN) -m benchmarks --strategies=none,tower,jax,jax_one $(BENCH)

clean:
	rm -rf $(VENV) .venv-tf-* .venv-python* .venv-libraries .venv-jax build dist out *.egg-info

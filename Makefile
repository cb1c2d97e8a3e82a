# make test      set up .venv if need be and run the tests (PYTEST_ARGS="-k guard -x" to choose; JOBS=4 workers)
# make test-ci   the tests in which ranks, launchers and disks fail on purpose
# make test-slow the rest, half an hour or more; after an interruption it goes on with what has not passed yet
# make mutations  apply every mutation of tests/mutations/ to a copy; its test has to fail (MUTATIONS="kto head")
# make mutants    a random sample of small changes, each against the tests that run its line (MUTANTS="--seed 1")
# make demo      a small model from nothing, aligned with KTO, CPO and Online DPO, in minutes (DEMO_ARGS="--fresh --seed 1")
# make quality   lint, types and the floors of alignment/
# make docs      renew the README's tables of options
# make style     format, and mend what can be mended by itself
# make clean     remove .venv and caches

VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -q
DEMO_ARGS ?=
JOBS ?= 2
RECORD ?= outputs/test-slow.jsonl
BIN := $(VENV)/bin
CPU = $(if $(HAS_GPU),,DS_ACCELERATOR=cpu)
PYTEST = $(CPU) $(BIN)/python -m pytest
# Workers take groups of tests in the order of tests/conftest.py, the longest first.
WORKERS = -n $(JOBS) --dist loadgroup --no-loadscope-reorder
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
READY := $(VENV)/.installed
TORCH := torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
SOURCES := alignment benchmarks examples launch tests tools setup.py
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)

.PHONY: install test test-ci test-slow mutations mutants demo quality style docs clean

install: $(READY)

# torch comes first: DeepSpeed has no wheels, and its setup.py asks the installed torch what to build for (hence also no
# build isolation). Without a GPU the CPU build is taken: the default one for Linux brings gigabytes of CUDA libraries
# that nothing here would use. It comes from pip's own wheel folders if they have it, or from PyTorch's index.
$(READY): setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes some minutes"
	@$(PIP) --upgrade pip "setuptools>=77" wheel ninja packaging
ifeq ($(HAS_GPU),yes)
	@$(PIP) $(TORCH)
else
	@$(PIP) --no-index --no-deps $(TORCH) 2>/dev/null || $(PIP) --index-url $(TORCH_CPU_INDEX) $(TORCH) || $(PIP) $(TORCH)
	@$(PIP) $(TORCH)
endif
	@$(PIP) --no-build-isolation -e ".[test]"
	@touch $@

test: $(READY)
	@$(PYTEST) $(WORKERS) --durations=20 $(PYTEST_ARGS)

test-ci: $(READY)
	@$(PYTEST) $(WORKERS) -m "faults and not slow" --durations=20 $(PYTEST_ARGS)

test-slow: $(READY)
	@$(PYTEST) $(WORKERS) -m slow --record=$(RECORD) --durations=20 $(PYTEST_ARGS)

mutations: $(READY)
	@$(CPU) $(BIN)/python -m tools.mutations --jobs $(JOBS) $(MUTATIONS)

mutants: $(READY)
	@$(PIP) -e ".[mutants]"
	@$(CPU) $(BIN)/python -m tools.mutants --jobs $(JOBS) $(MUTANTS)

demo: $(READY)
	@$(CPU) $(BIN)/python examples/demo/run.py $(DEMO_ARGS)

quality: $(READY)
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/ruff format --quiet --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports

style: $(READY)
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

docs: $(READY)
	@$(BIN)/python -m alignment.config.option_tables README.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

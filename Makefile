# make test      set up .venv if need be and run the tests (PYTEST_ARGS="-k guard -x" to choose; JOBS=4 workers)
# make test-ci   the tests in which ranks, launchers and disks fail on purpose, those under torchrun and srun, and
#                the longer proofs: adapters, quantized weights, stored references and exports in many combinations
# make test-slow the rest, half an hour or more; after an interruption it continues with what has not passed yet
# make resume-matrix  of those, the runs resumed from checkpoints: 3348 cells, an hour or two; it continues as well
# make mutations  apply every mutation of tests/mutations/ to a copy; its test has to fail (MUTATIONS="kto head")
# make mutants    a random sample of small changes, each against the tests that run its line (MUTANTS="--seed 1")
# make test-newest  contract tests and numbers with the newest releases that setup.py allows, in .venv-newest
# make chaos     kill training runs 1000 times and judge every restart (CHAOS_ARGS="--kills 50 --seed 3"); about an hour
# make slurm     install SLURM (Debian, as root; no service is started) and train under it, on nodes of this machine
# make hosts     install pdsh and sshd (Debian, as root; no service is started) and train on two hosts of this machine
# make signals   send every signal to every launcher and worker of real runs, judge what is left and resume; a table, half an
#                hour (SIGNALS_ARGS="--only 'torchrun TERM'")
# make vllm      install vLLM's CPU build in .venv-vllm and run the tests with a real server (VLLM_PYTHON: another environment)
# make demo      a small model from nothing, aligned with KTO (LoRA too), CPO and Online DPO, in minutes (DEMO_ARGS="--fresh --seed 1")
# make quality   lint, types, the floors of alignment/, and phrases that no text contains
# make tables    regenerate the pages of docs/reference/ that are made from the code
# make docs      regenerate them and build the site in docs/_build/html; a warning or a broken link is an error
# make linkcheck check the links to other sites, over the network; a report in docs/_build/linkcheck
# make style     format, and apply the linter's fixes
# make release VERSION=0.2.0  date the changelog, build and check the wheel and the sdist, commit and tag
# make clean     remove .venv, .venv-vllm and caches

VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -q
DEMO_ARGS ?=
CHAOS_ARGS ?=
SIGNALS_ARGS ?=
JOBS ?= 2
RECORD ?= outputs/test-slow.jsonl
BIN := $(VENV)/bin
CPU = $(if $(HAS_GPU),,DS_ACCELERATOR=cpu)
SPHINX = $(BIN)/python -m sphinx -n -j $(JOBS) -d docs/_build/doctrees
PYTEST = $(CPU) $(BIN)/python -m pytest
# Workers take groups of tests in the order of tests/conftest.py, the longest first.
WORKERS = -n $(JOBS) --dist loadgroup --no-loadscope-reorder
PIP = $(1)/bin/python -m pip install -qq --disable-pip-version-check $(2)
READY := $(VENV)/.installed
PINNED := -c constraints.txt
NEWEST ?= .venv-newest
VLLM ?= .venv-vllm
RANGE = "$(shell sed -n 's/^ *"\($(1)[<>=].*\)",.*/\1/p' setup.py)"
TORCH := $(call RANGE,torch)
DEEPSPEED := $(call RANGE,deepspeed)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
SOURCES := alignment benchmarks docs/conf.py examples launch tests tools setup.py
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)

# With it, every process would compile this package and every test again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test test-ci test-slow resume-matrix chaos signals slurm hosts vllm test-newest mutations mutants demo quality style tables \
	docs linkcheck release clean

install: $(READY)

# $(call INSTALL,VENV,ARGUMENTS OF PIP,WHEELS): torch comes first, because DeepSpeed has no wheels, and its setup.py asks
# the installed torch what to build for (hence also no build isolation). Without a GPU the CPU build is taken: the
# default one for Linux brings gigabytes of CUDA libraries that nothing here would use. It comes from pip's own wheel
# folders if WHEELS is set and they have it, from PyTorch's index, or else from PyPI after all. DeepSpeed does not come
# from pip's cache: that may hold a wheel which was built for another torch, and says so only when it compiles an op.
define INSTALL
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "installing into $(1); the first time takes some minutes"
	@$(PIP) --upgrade pip "setuptools>=77" wheel ninja packaging
	@echo "1 of 3: torch"
	@$(if $(HAS_GPU),true,$(if $(3),$(PIP) --no-index --no-deps $(TORCH) 2>/dev/null ||) \
		$(PIP) --retries 1 --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH) || true)
	@$(PIP) $(TORCH)
	@echo "2 of 3: DeepSpeed"
	@$(PIP) --no-cache-dir --no-build-isolation $(DEEPSPEED)
	@echo "3 of 3: this package, its dependencies and the tools of its tests and documentation"
	@$(PIP) --no-build-isolation -e ".[test,docs]"
	@echo "installed; to activate the environment: source $(1)/bin/activate"
endef

$(READY): setup.py constraints.txt
	$(call INSTALL,$(VENV),$(PINNED),wheels)
	@touch $@

# One worker more than cores, as tests wait a third of the time.
test: JOBS = 3
test: $(READY)
	@$(PYTEST) $(WORKERS) --durations=20 $(PYTEST_ARGS)

test-ci: $(READY)
	@$(PYTEST) $(WORKERS) -m "(faults or ci) and not slow" --durations=20 $(PYTEST_ARGS)

test-slow: $(READY)
	@$(PYTEST) $(WORKERS) -m slow --record=$(RECORD) --durations=20 $(PYTEST_ARGS)

resume-matrix: $(READY)
	@$(PYTEST) $(WORKERS) -m slow --record=$(RECORD) --durations=20 tests/engine/test_resume_grid.py $(PYTEST_ARGS)

# Two questions: do the contracts hold, and are the numbers of this checkout those of the pinned releases?
test-newest: $(READY)
	@test ! -x $(NEWEST)/bin/python || $(NEWEST)/bin/python -m pip uninstall -qq -y deepspeed
	$(call INSTALL,$(NEWEST),--upgrade --upgrade-strategy eager)
	@echo "installed versions that differ from constraints.txt:"
	@$(NEWEST)/bin/python -m pip freeze -q -r constraints.txt 2>/dev/null | \
		sed '/^## The following/,$$d; /^#/d' | grep -vixF "$$(sed 's/ *;.*//' constraints.txt)" || true
	@status=0; \
	$(CPU) $(NEWEST)/bin/python -m pytest -q tests/unit/test_internals*.py tests/engine/test_internals_*.py || status=1; \
	$(CPU) $(NEWEST)/bin/python tools/same_numbers.py . --base-python $(BIN)/python --quick || status=1; \
	exit $$status

mutations: $(READY)
	@$(CPU) $(BIN)/python -m tools.mutations --jobs $(JOBS) $(MUTATIONS)

mutants: $(READY)
	@$(call PIP,$(VENV),$(PINNED)) -e ".[mutants]"
	@$(CPU) $(BIN)/python -m tools.mutants --jobs $(JOBS) $(MUTANTS)

chaos: $(READY)
	@$(CPU) OMP_NUM_THREADS=1 $(BIN)/python -m tools.chaos $(CHAOS_ARGS)

slurm: $(READY)
	@tools/install_debian.sh "slurmctld sbatch munged" "munge slurmctld slurmd" slurm-wlm munge shellcheck
	@$(PYTEST) -m "slow or not slow" tests/launch/test_slurm.py tests/unit/test_sbatch_script.py --durations=20 $(PYTEST_ARGS)

hosts: $(READY)
	@tools/install_debian.sh "sshd pdsh ip ps" ssh pdsh openssh-server openssh-client iproute2 util-linux procps
	@$(PYTEST) -m "slow or not slow" tests/launch/test_hosts.py tests/unit/test_joining.py --durations=20 $(PYTEST_ARGS)

signals: $(READY)
	@$(CPU) OMP_NUM_THREADS=1 $(BIN)/python -m tools.signals $(SIGNALS_ARGS)

vllm: $(READY)
	@test -n "$(VLLM_PYTHON)" || tools/vllm/install.sh $(VLLM) $(PYTHON) $(TORCH_CPU_INDEX)
	@VLLM_PYTHON=$(or $(VLLM_PYTHON),$(VLLM)/bin/python) DS_ACCELERATOR=cpu $(BIN)/python -m pytest \
		-m vllm --durations=20 tests/vllm $(PYTEST_ARGS)

demo: $(READY)
	@$(CPU) $(BIN)/python examples/demo/run.py $(DEMO_ARGS)

quality: $(READY)
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/ruff format --quiet --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/words.py

style: $(READY)
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

tables: $(READY)
	@$(BIN)/python -m tools.documentation

# Links to files of the repository lead to DOCS_REPOSITORY_URL, such as https://github.com/me/this/blob/main.
docs: tables
	@DS_ACCELERATOR=cpu $(SPHINX) -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

linkcheck: $(READY)
	@DS_ACCELERATOR=cpu $(SPHINX) -q -b linkcheck docs docs/_build/linkcheck

release: $(READY)
	@$(BIN)/python -m tools.release $(VERSION)

clean:
	rm -rf $(VENV) $(NEWEST) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# What people and continuous integration type; `make help` lists it. TORCH_INDEX_URL picks where torch comes from: on a
# Linux machine without a GPU, PyTorch's public CPU index saves gigabytes of CUDA libraries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
ifdef TORCH_INDEX_URL
TORCH_INDEX := --index-url $(TORCH_INDEX_URL)
endif

# The GPU environments are for this Python alone.
GPU_PYTHON ?= python3.12
TRAINER := .venv-gpu
ENGINES := .venv-engines

VERIFIERS := .venv-verifiers
OPENENV := .venv-openenv

FLEET := .venv-fleet
FLEET_PIP := $(FLEET)/bin/python -m pip --disable-pip-version-check
FLEET_SET := megasharp/rollout/sglang/engine/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv quickstart install fleet environments gpu lint format test test-unit test-long test-due test-soak test-resume docs docs-serve wheel bench verifier-report clean

# A target with two hashes is listed.
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes torch without CUDA; PYTHON=python3.12 picks a Python,"
	@echo "  GPU_PYTHON=/path/to/python3.12 that of make gpu"

# setuptools warns that the working directory may shadow an editable package; here it is the package.
AS_EDITABLE := PYTHONWARNINGS='ignore:Editable installation'
EDITABLE := $(AS_EDITABLE) $(PIP) install -q --no-build-isolation -c constraints.txt -e

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip setuptools
	@echo "Downloading torch; this can take minutes."
	$(PIP) install -q $(TORCH) $(TORCH_INDEX)
	@echo "Installing megasharp and what it needs; this can take minutes."
	$(EDITABLE) .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(EDITABLE) '.[test,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(EDITABLE) '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(EDITABLE) '.[bench]'
	@touch $@

# The engines' own Python on a machine without a GPU: SGLang's exact pins never meet the trainer's.
$(FLEET)/.built: pyproject.toml $(FLEET_SET)
	$(PYTHON) -m venv $(FLEET)
	$(FLEET_PIP) install -q --upgrade pip setuptools
	$(FLEET_PIP) install -q $(TORCH) $(TORCH_INDEX)
	$(FLEET_PIP) install -q -c $(FLEET_SET) --group fleet-cpu
	$(FLEET_PIP) install -q --no-deps --group fleet-cpu-alone
	$(AS_EDITABLE) $(FLEET_PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

# What the package verifiers asks for stands over .venv, which it sees. A server of OpenEnv's has a Python of its own, as
# everywhere: some of its pins are others.
$(VERIFIERS)/.built: $(VENV)/.test
	$(BIN)/python -m venv --without-pip $(VERIFIERS)
	$(BIN)/python -c 'import site, sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $(VERIFIERS)/lib/$$($(BIN)/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages/below.pth
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt verifiers==0.4.0
	@touch $@

$(OPENENV)/.built: $(VENV)/.test
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(OPENENV)
	$(BIN)/uv pip install -q --python $(OPENENV)/bin/python openenv==0.10.0
	@touch $@

# The trainer's and the engines' Python on a machine with GPUs, from the locks in requirements/.
gpu $(TRAINER)/.built $(ENGINES)/.built: export PYTHON = $(GPU_PYTHON)
$(TRAINER)/.built: requirements/trainer.txt requirements/trainer-apart.txt tools/gpu_environment.sh
	tools/gpu_environment.sh trainer $(TRAINER)
	tools/gpu_environment.sh megasharp $(TRAINER)
	@touch $@

$(ENGINES)/.built: requirements/engines.txt requirements/engines-apart.txt tools/gpu_environment.sh
	tools/gpu_environment.sh engines $(ENGINES)
	tools/gpu_environment.sh megasharp $(ENGINES)
	@touch $@

venv: $(VENV)/.base ## install megasharp into .venv

quickstart: $(VENV)/.base ## install, then train the quickstart's model (about two minutes on two idle cores)
	$(BIN)/megasharp train examples/quickstart/run.yaml

install: $(VENV)/.test ## install into .venv with all that development needs

fleet: $(VENV)/.base $(FLEET)/.built ## build .venv-fleet: SGLang's engines on a CPU machine

environments: $(VERIFIERS)/.built $(OPENENV)/.built ## build .venv-verifiers, megasharp with verifiers, and .venv-openenv, a server

gpu: $(TRAINER)/.built $(ENGINES)/.built ## build .venv-gpu, the trainer, and .venv-engines, SGLang, for CUDA 13

lint: $(VENV)/.test ## check style, types, and the files that GitHub reads
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

format: $(VENV)/.test ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests are many small computations and ranks that share the cores: more threads only get into each other's way. Three
# files at a time, because a third of the time a test waits for processes; in the order of their names, so that the many
# short ones fill up the end, but for those that wait most, which would be alone there; a file's fixtures are made once.
THREE := -n 3 --dist loadfile --no-loadscope-reorder
test test-unit test-resume: export OMP_NUM_THREADS = 1
# Bytecode is written once, not compiled again by each of a suite's hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.test ## run the test suite (minutes; no root, no GPU, no network)
	$(BIN)/python -m pytest $(THREE) tests/unit/weight_sync tests -m "not long" -rs --junitxml=.reports/test.xml

test-unit: $(VENV)/.test ## run the unit tests alone
	$(BIN)/python -m pytest $(THREE) tests/unit -m "not long"

# The slices of .ci/slices: all, or SLICE="fleet slurm". Some need root and what .ci/packages installs, some `make fleet`,
# which they call.
test-long: $(VENV)/.test ## run the long tier: all slices, or SLICE="fleet slurm"
	$(BIN)/python tools/long_tier.py $(SLICE)

# The slices that the last day's changes owe, as many as fit in 18 minutes.
test-due: $(VENV)/.test ## run the slices that the last day's changes owe (18 minutes)
	$(BIN)/python tools/long_tier.py --due

# Whole runs under random faults, an hour of them; goes on where it was stopped. SOAK="--minutes 120 --seed 7" asks for
# more. Root, .ci/packages.
test-soak: $(VENV)/.test $(FLEET)/.built ## train under random faults for an hour (root; not in CI)
	$(BIN)/python -m tests.soak $(SOAK)

# Exact resume, printed: what is equal after a stop at every layout, and how far a change of layout moves the next step.
test-resume: $(VENV)/.test ## print what is equal after a stop and a resume
	$(BIN)/python -m pytest -s tests/e2e/test_resume.py tests/long/test_resume.py tests/multirank/learner/test_state.py

# The documentation site, in site/. A broken link, a broken anchor or a page outside the navigation fails it.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs ## build the documentation into site/, strictly
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs ## serve the documentation while you write
	$(BIN)/mkdocs serve

# From an sdist, so that what a build left in the repository reaches no wheel.
wheel: $(VENV)/.test ## build sdist and wheel into dist/, install the wheel alone and use it
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python tools/check_wheel.py dist/*.whl

bench: $(VENV)/.bench ## measure a step, beside TRL's, and its scaling
	$(BIN)/python tools/bench_cpu.py
	$(BIN)/python tools/bench_cpu.py --size 5m
	$(BIN)/python tools/bench_scaling.py
	$(BIN)/python tools/bench_sampling.py

# With RECORD=1 verdicts and the tables of docs/explanation/verifier-errors.md are written.
verifier-report: export OMP_NUM_THREADS = 1
verifier-report: $(VENV)/.test ## judge the labelled corpus by all verifiers; RECORD=1 records the verdicts
	$(BIN)/python tools/verifier_report.py $(if $(RECORD),--record)

clean: ## remove environments, reports and builds; runs stay
	rm -rf $(VENV) $(FLEET) $(VERIFIERS) $(OPENENV) $(TRAINER) $(ENGINES) .reports build dist site *.egg-info

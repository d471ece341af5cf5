# The README's commands. TORCH_INDEX_URL picks where torch comes from: on a Linux machine without a GPU,
# PyTorch's public CPU index saves gigabytes of CUDA libraries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
ifdef TORCH_INDEX_URL
TORCH_INDEX := --index-url $(TORCH_INDEX_URL)
endif

FLEET := .venv-fleet
FLEET_PIP := $(FLEET)/bin/python -m pip --disable-pip-version-check
FLEET_SET := megasharp/rollout/sglang/engine/constraints.txt

.PHONY: quickstart fleet test test-unit test-long test-due test-resume docs docs-serve bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip setuptools
	$(PIP) install -q $(TORCH) $(TORCH_INDEX)
	$(PIP) install -q --no-build-isolation -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[test,dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[bench]'
	touch $@

# The engines' own Python on a machine without a GPU: SGLang's exact pins never meet the trainer's.
$(FLEET)/.built: pyproject.toml $(FLEET_SET)
	$(PYTHON) -m venv $(FLEET)
	$(FLEET_PIP) install -q --upgrade pip setuptools
	$(FLEET_PIP) install -q $(TORCH) $(TORCH_INDEX)
	$(FLEET_PIP) install -q -c $(FLEET_SET) --group fleet-cpu
	$(FLEET_PIP) install -q --no-deps --group fleet-cpu-alone
	$(FLEET_PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

fleet: $(VENV)/.base $(FLEET)/.built

quickstart: $(VENV)/.base
	$(BIN)/megasharp train examples/quickstart/run.yaml

# Tests are many small computations and ranks that share the cores: more threads only get into each other's way. Three
# files at a time, because a third of the time a test waits for processes; in the order of their names, so that the many
# short ones fill up the end; a file's own fixtures are made once.
THREE := -n 3 --dist loadfile --no-loadscope-reorder
test test-unit test-resume: export OMP_NUM_THREADS = 1
# Bytecode is written once, not compiled again by each of a suite's hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.test
	$(BIN)/ruff check megasharp tools tests
	$(BIN)/ruff format --check megasharp tools tests
	$(BIN)/mypy
	$(BIN)/python -m pytest $(THREE) tests -m "not long" -rs --junitxml=.reports/test.xml

test-unit: $(VENV)/.test
	$(BIN)/python -m pytest $(THREE) tests/unit -m "not long"

# The slices of .ci/slices: all, or SLICE="fleet slurm". Some need root and what .ci/packages installs, some `make fleet`,
# which they call.
test-long: $(VENV)/.test
	$(BIN)/python tools/long_tier.py $(SLICE)

# The slices that the last day's changes owe, as many as fit in 20 minutes.
test-due: $(VENV)/.test
	$(BIN)/python tools/long_tier.py --due

# Exact resume, printed: what is equal after a stop at every layout, and how far a change of layout moves the next step.
test-resume: $(VENV)/.test
	$(BIN)/python -m pytest -s tests/e2e/test_resume.py tests/long/test_resume.py tests/multirank/learner/test_state.py

# The documentation site, in site/. A broken link, a broken anchor or a page outside the navigation fails it.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs
	$(BIN)/mkdocs serve

bench: $(VENV)/.bench
	$(BIN)/python tools/bench_cpu.py
	$(BIN)/python tools/bench_scaling.py

clean:
	rm -rf $(VENV) $(FLEET) .reports build dist site *.egg-info

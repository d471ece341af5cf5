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
FLEET_SET := megasharp/serving/engine/constraints.txt

.PHONY: quickstart fleet test test-unit test-long test-chaos test-resume test-slurm test-fleet test-other-megatron bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip setuptools
	$(PIP) install -q $(TORCH) $(TORCH_INDEX)
	$(PIP) install -q --no-build-isolation -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[test,dev]'
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

# Tests are many small computations and ranks that share the cores: more threads only get into each other's way. Two
# files at a time, in the order of their names, so that the many short ones fill up the end; a file's own fixtures are
# made once.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
test test-unit test-long test-chaos test-resume test-slurm test-fleet test-other-megatron: export OMP_NUM_THREADS = 1

test: $(VENV)/.test
	$(BIN)/ruff check megasharp tools tests
	$(BIN)/ruff format --check megasharp tools tests
	$(BIN)/mypy
	$(BIN)/python -m pytest $(TWO) tests -m "not long"

test-unit: $(VENV)/.test
	$(BIN)/python -m pytest $(TWO) tests/unit

# The longest files of tests/fleet come first, so that no worker is left alone with one of them at the end.
test-long: $(VENV)/.test
	$(BIN)/python -m pytest $(TWO) tests/long -m long
	$(MAKE) test-fleet
	$(MAKE) --jobs=2 --output-sync=target test-slurm test-other-megatron

# Part of test-long too. CHAOS_SEED=N draws other steps for the faults.
test-chaos: $(VENV)/.test
	$(BIN)/python -m pytest tests/long/test_chaos.py -m long -s

# Exact resume, printed: what is equal after a stop at every layout, and how far a change of layout moves the next step.
test-resume: $(VENV)/.test
	$(BIN)/python -m pytest -s tests/e2e/test_resume.py tests/long/test_resume.py tests/dist/mcore/test_state.py

# A real Slurm on this machine; needs root, and what .ci/packages installs. One evaluation there is on SGLang engines.
test-slurm: $(VENV)/.test $(FLEET)/.built
	$(BIN)/python -m pytest tests/slurm -m long

test-fleet: $(VENV)/.test $(FLEET)/.built
	$(BIN)/python -m pytest $(TWO) $(wildcard tests/fleet/test_train*.py) tests/fleet/test_sync.py tests/fleet -m long

test-other-megatron: $(VENV)/.test
	$(BIN)/python tools/test_other_megatron.py 0.19.2

bench: $(VENV)/.bench
	$(BIN)/python tools/bench_cpu.py
	$(BIN)/python tools/bench_scaling.py

clean:
	rm -rf $(VENV) $(FLEET) build dist *.egg-info

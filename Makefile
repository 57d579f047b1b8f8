# `make demo`, `make test` and `make docs` each work as the only command in a fresh clone.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-ranks test-plans test-all lint docs clean
.DELETE_ON_ERROR:

# torch first and at this version: a range could take a build with gigabytes of CUDA packages
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --constraint constraints.txt setuptools==80.9.0
	$(PIP) --constraint constraints.txt --no-build-isolation --editable ".[test]"
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/linkweave demo

# run with the planner's tests, so that both processes take about as long
WITH_PLANS := $(addprefix tests/cpu/test_, \
	cast.py cluster.py cluster_faults.py combine.py command.py embedding_bench.py embedding_cases.py \
	embedding_faults.py embedding_kernels.py embedding_loops.py embedding_ops.py \
	embedding_prefetch.py embedding_states.py embedding_training.py examples_ddp.py \
	gtopk_accuracy.py gtopk_hook.py gtopk_kernels.py gtopk_training.py interpreter.py \
	kernel_compile.py optim.py plan_kernel.py schedule_command.py sparse_kernels.py)

# two processes side by side, their output as it comes; fails if either fails
test: lint
	@$(MAKE) --no-print-directory --jobs=2 test-ranks test-plans

test-ranks: $(VENV)/installed
	$(PY) -m pytest -m "not slow" -o cache_dir=.pytest_cache/ranks tests/cpu $(addprefix --ignore=, $(WITH_PLANS))

test-plans: $(VENV)/installed
	$(PY) -m pytest -m "not slow" -o cache_dir=.pytest_cache/plans tests/null tests/net $(WITH_PLANS)

test-all: lint
	$(PY) -m pytest

lint: $(VENV)/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib

$(VENV)/docs: $(VENV)/installed
	$(PIP) --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	touch $@

# warnings are errors; the first page is docs/_build/html/index.html
docs: $(VENV)/docs
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) out docs/_build

# `make demo`, `make test` and `make docs` each work as the only command in a fresh clone.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test compiled test-plans test-ranks test-training test-all lint docs clean
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

# kernels without ranks, which test-plans has time for
KERNELS := $(wildcard $(addprefix tests/cpu/test_, \
	*_kernels.py cast.py combine.py interpreter.py kernel_compile.py optim.py))
# training, clusters and torch.distributed
TRAINING := $(filter-out $(KERNELS), $(wildcard $(addprefix tests/cpu/test_, \
	cluster*.py convergence*.py ddp*.py distributed*.py embedding*.py examples*.py gtopk*.py \
	divergence.py host_lanes.py program.py reduce_dtype.py torch_suite.py \
	training*.py))) tests/cpu/habits
PYTEST = $(PY) -m pytest -m "not slow" -o cache_dir=.pytest_cache/$@

# three processes side by side, because many tests mostly wait; fails if one fails
test: $(VENV)/installed
	@$(MAKE) --no-print-directory --jobs=2 lint compiled
	@$(MAKE) --no-print-directory --jobs=3 test-plans test-training test-ranks

compiled: $(VENV)/installed
	$(PY) -m tests.compile_kernels

test-plans: $(VENV)/installed
	$(PYTEST) tests/null tests/net $(KERNELS)

test-training: $(VENV)/installed
	$(PYTEST) $(TRAINING)

test-ranks: $(VENV)/installed
	$(PYTEST) tests/cpu $(addprefix --ignore=, $(KERNELS) $(TRAINING))

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

# Each target does its own set-up: `make demo` and `make test` work on a fresh machine with Python, git and make.
PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
WORKERS ?= 2
# What pytest is asked to run; `make test TESTS="tests/test_generation.py -k beam"`
TESTS ?= tests

.PHONY: demo test test-kernels test-gpu test-oldest style bench clean
.DEFAULT_GOAL := test

# glibc would return the large buffers to the system after every step: a quarter of the time
demo: $(VENV)/.installed
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 $(VENV)/bin/python demo/run.py

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# The Triton kernels: in Triton's interpreter on a CPU, and on a GPU
test-kernels: $(VENV)/.installed
	TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -n $(WORKERS) tests/test_flash_diff.py

test-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m pytest tests/test_flash_diff.py tests/test_flash_diff_compile.py

# On the oldest transformers that setup.py admits, but for the tests that hardly depend on it
test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS) \
		--ignore tests/test_flash_diff_compile.py --ignore tests/test_benchmarks.py \
		--ignore tests/training/test_training_distributed.py --ignore tests/training/test_faults.py \
		--ignore tests/evaluation/test_evaluation_memory.py --ignore-glob "tests/evaluation/test_[!aegp]*.py" \
		--ignore tests/reproduction/test_reproduce.py

style: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.model_cpu

# torch first and pinned: an unpinned one would be fetched in every newer build that another package admits
$(VENV)/.installed: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(OLDEST_VENV)/.installed: setup.py constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip install -q --disable-pip-version-check -c constraints-oldest.txt torch
	$(OLDEST_VENV)/bin/pip install -q --disable-pip-version-check -c constraints-oldest.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) demo/out build dist *.egg-info

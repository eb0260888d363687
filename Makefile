# Every target works in a fresh clone with nothing installed: the virtual environment is made when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: perplexity test test-all determinism bench kernels sanitize barriers fuzz wheel wheel-test check coverage clean

perplexity: $(VENV)/installed  ## the perplexity of SmolLM2-135M on the text in ggml_py/demo; ARGS="-c 256 --device cpu" and the like are passed on
	$(VENV)/bin/ggml-py perplexity $(ARGS)

PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist worksteal --benchmark-disable --durations 30

test: $(VENV)/installed  ## in two processes, without those marked slow; ARGS="-n 0 -k NAME" and the like are passed on
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/installed  ## with the slow ones: every CUDA kernel compiled, for other compute capabilities too; SmolLM2 in full. ARGS as of test
	$(PYTEST) $(ARGS)

determinism: $(VENV)/installed  ## every op, type and small model on every axis and device; with a GPU also there, and SmolLM2 in full. ARGS as of test
	$(VENV)/bin/python -m pytest tests/determinism tests/check/test_planted_faults.py $(ARGS)

bench: $(VENV)/installed  ## microbenchmarks: the CUDA kernels on a machine with a GPU, else those of the CPU. ARGS="--benchmark-save NAME -k Q4_1" and the like are passed on
	$(VENV)/bin/python -m pytest bench --benchmark-only $(ARGS)

kernels: $(VENV)/installed  ## compiles every CUDA kernel of the tests for every compute capability, without a GPU. ARGS="-n 4 mmq_few" and the like
	$(VENV)/bin/python tests/scripts/compile_kernels.py $(ARGS)

sanitize: $(VENV)/installed  ## compute-sanitizer over the kernel tests; needs a GPU. ARGS=racecheck runs one of its tools
	$(VENV)/bin/python tests/scripts/sanitize.py $(ARGS)

barriers: $(VENV)/installed  ## leaves out each barrier of the CUDA kernels in turn, which a simulated test must miss. ARGS="-n 2 mmq.py" and the like
	$(VENV)/bin/python tests/scripts/barriers.py $(ARGS)

wheel:  ## dist/ggml_bitwise-VERSION-py3-none-any.whl, to be installed elsewhere; build/lib of an earlier one would carry deleted modules into it
	rm -rf build dist
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip wheel --quiet --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

wheel-test: wheel  ## the wheel, alone in an empty environment and run from another folder
	mkdir -p build/elsewhere
	build/venv/bin/python $(PIP_INSTALL) dist/*.whl
	cd build/elsewhere && ../venv/bin/python -I $(CURDIR)/tests/scripts/wheel_check.py $(CURDIR)

check: $(VENV)/checkers  ## lint, types and the order of imports
	$(VENV)/bin/ruff check
	rm -rf build/tree && mkdir -p build/tree && cp -r ggml_py build/tree && cp -r kernels quant build/tree/ggml_py
	$(VENV)/bin/mypy
	cd build/tree && $(CURDIR)/$(VENV)/bin/lint-imports --config $(CURDIR)/pyproject.toml --no-logo

coverage: $(VENV)/checkers  ## which lines of the Python code make test reaches, once a release; device code is compiled, and not counted
	$(VENV)/bin/python -m pip install --quiet --editable '.[coverage]'
	$(VENV)/bin/python -m coverage run -m pytest tests -q -m "not slow" --benchmark-disable $(ARGS)
	$(VENV)/bin/python -m coverage combine && $(VENV)/bin/python -m coverage report --skip-covered

fuzz: $(VENV)/installed  ## mutated GGUF files, and whole loads of mutated models: 100,000 and 200,000 cases, about an hour
	$(VENV)/bin/python tests/scripts/fuzz_gguf.py
	$(VENV)/bin/python tests/scripts/fuzz_loads.py --keep-going

$(VENV)/installed: pyproject.toml Makefile
	@echo "creating $(VENV): numba, numpy, pytest and others; this takes a minute or two"
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test,bench,grammar,lm-eval,ray]'
	touch $@

$(VENV)/checkers: $(VENV)/installed
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[check]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .benchmarks
	find ggml_py kernels quant tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

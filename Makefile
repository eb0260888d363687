# Every target works in a fresh clone with nothing installed: the virtual environment is made when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV := .venv
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
WHEEL := build/wheel-test

.PHONY: perplexity test determinism bench kernels sanitize barriers wheel-test clean

perplexity: $(VENV)/installed  ## the perplexity of SmolLM2-135M on the text in ggml_py/demo; ARGS="-c 256 --device cpu" and the like are passed on
	$(VENV)/bin/ggml-py perplexity $(ARGS)

test: $(VENV)/installed  ## in two processes; ARGS="-n 0 -k NAME" and the like are passed on
	$(VENV)/bin/python -m pytest tests -n 2 --dist worksteal --benchmark-disable --durations 30 $(ARGS)

determinism: $(VENV)/installed  ## every op, type and small model on every axis and device; with a GPU also there, and SmolLM2 in full. ARGS as of test
	$(VENV)/bin/python -m pytest tests/determinism tests/test_planted_faults.py $(ARGS)

bench: $(VENV)/installed  ## microbenchmarks of the CPU; ARGS="--benchmark-json FILE -k Q4_1" and the like are passed on. Of a GPU: bench/gpu.py
	$(VENV)/bin/python -m pytest bench --benchmark-only $(ARGS)

kernels: $(VENV)/installed  ## compiles every CUDA kernel of the tests for every compute capability, without a GPU. ARGS="-n 4 mmq_few" and the like
	$(VENV)/bin/python tests/compile_kernels.py $(ARGS)

sanitize: $(VENV)/installed  ## compute-sanitizer over the kernel tests; needs a GPU. ARGS=racecheck runs one of its tools
	$(VENV)/bin/python tests/sanitize.py $(ARGS)

barriers: $(VENV)/installed  ## leaves out each barrier of the CUDA kernels in turn, which a simulated test must miss. ARGS="-n 2 mmq.py" and the like
	$(VENV)/bin/python tests/barriers.py $(ARGS)

# The wheel, alone in an empty environment and run from another folder; build/lib would carry deleted modules into it.
wheel-test:
	rm -rf build
	mkdir -p $(WHEEL)/elsewhere
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip wheel --quiet --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL) .
	$(WHEEL)/venv/bin/python $(PIP_INSTALL) $(WHEEL)/ggml_py-*.whl
	cd $(WHEEL)/elsewhere && ../venv/bin/python -I $(CURDIR)/tests/wheel_check.py $(CURDIR)

$(VENV)/installed: pyproject.toml Makefile
	@echo "creating $(VENV): numba, numpy, pytest and others; this takes a minute or two"
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test,bench]'
	touch $@

clean:
	rm -rf $(VENV) build ggml_py.egg-info .pytest_cache .hypothesis .benchmarks
	find ggml_py kernels quant tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

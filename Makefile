# Each target calls one script in tools/; `make help` lists them. PYTHON names the Python to build on (>= 3.10).
PYTHON ?= python3
export PYTHON

# Even a Python that is too old to read the scripts can read this one.
.PHONY: python
python:
	@$(PYTHON) tools/check_python.py

.PHONY: help build demo test test-all test-loops check docs bench clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ' *## ' '/^[a-z-]+:.*## / {sub(/:.*/, "", $$1); printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: python ## the environment in .venv: packages, torch, the Rust extension
	@$(PYTHON) tools/setup_env.py

demo: python ## from text to a trained GPT on this machine, in minutes
	@$(PYTHON) tools/demo.py

test: python ## all tests, Rust and Python
	@$(PYTHON) tools/run_tests.py

test-all: python ## the slow tests too, and those for a GPU where there is one
	@$(PYTHON) tools/run_tests.py --all

test-loops: python ## the loops of other libraries (Lightning, Hugging Face, JAX), in an environment of their own
	@$(PYTHON) tools/test_loops.py

check: python ## formatters, linters, types, layers, clippy, stub
	@tools/check

docs: python ## the documentation as a site in docs/_build, in an environment of its own
	@$(PYTHON) tools/build_docs.py

bench: python ## benchmarks, Rust and Python
	@$(PYTHON) tools/run_benches.py

clean: ## removes what make built: the environment, the demo, build folders, caches
	@$(PYTHON) tools/clean.py

# Each target calls one script in tools/; `make help` lists them. PYTHON names the Python to build on (>= 3.10).
PYTHON ?= python3
export PYTHON

.PHONY: help build demo test test-all check bench clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## the environment in .venv: packages, torch, the Rust extension
	@$(PYTHON) tools/setup_env.py

demo: ## from text to a trained GPT on this machine, in minutes
	@$(PYTHON) tools/demo.py

test: ## all tests, Rust and Python
	@$(PYTHON) tools/run_tests.py

test-all: ## the slow tests too, and those for a GPU where there is one
	@$(PYTHON) tools/run_tests.py --all

check: ## formatters, linters, types, layers, clippy, stub
	@tools/check

bench: ## benchmarks, Rust and Python
	@$(PYTHON) benches/run.py

clean: ## removes what make built: the environment, the demo, build folders, caches
	@$(PYTHON) tools/clean.py

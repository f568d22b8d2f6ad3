# `make demo` and `make test` set up all they need. Everything lives in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check format bench chaos memory clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "paceline needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/python benchmarks/step.py

chaos: setup
	$(BIN)/python benchmarks/chaos.py --out build/chaos.md

memory: setup
	$(BIN)/python benchmarks/memory.py --out build/memory.md

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Two commands: `make demo` and `make test`. Both make their own virtual environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint install clean

demo: $(READY)
	$(BIN)/isles init --force runs/demo
	$(BIN)/isles up runs/demo/run.toml --set run.steps=100 --set codec.name=fp32 --check --out runs/demo/up $(if $(wildcard runs/demo/up/authority.json),--resume)
	$(BIN)/isles simulate runs/demo/run.toml --compare --out runs/demo/out --resume

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases benchmarks/netlab
	$(BIN)/lint-imports

install: $(READY)

# pip is told to compile nothing: byte code is made when a module is first used.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "isles needs Python 3.11 to 3.13; name one with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs data build dist

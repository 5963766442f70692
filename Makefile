# `make demo` and `make test` set up .venv themselves; nothing but Python 3.11 is expected.
VENV := .venv
MODEL ?= smollm2
MINUTES ?= 15
PYTEST_ARGS ?=

.PHONY: setup demo test lint unit explore clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml tools/cpu_lab/pyproject.toml tools/setup.sh tools/requirements_of.py
	bash tools/setup.sh $(VENV)
	touch $@

demo: setup
	$(VENV)/bin/kvhandoff demo --model $(MODEL)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: setup
	$(VENV)/bin/python -m pytest -m "not vllm" $(PYTEST_ARGS)

test: setup lint
	$(VENV)/bin/python -m pytest --durations=15 $(PYTEST_ARGS)

explore: setup
	$(VENV)/bin/python -m tests.explore $(MINUTES)

clean:
	rm -rf $(VENV) .cache build dist

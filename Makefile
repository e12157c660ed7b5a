# Two commands for a fresh machine with Python 3.10 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test test-all test-optimised lint format bench clean

$(VENV)/ready: pyproject.toml scripts/groups.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --disable-pip-version-check -e . $$($(RUN) scripts/groups.py test lint)
	$(RUN) -m compileall -q src
	@touch $@

$(VENV)/bench-ready: $(VENV)/ready
	$(RUN) -m pip install -q --disable-pip-version-check $$($(RUN) scripts/groups.py bench)
	@touch $@

demo: $(VENV)/ready
	$(RUN) scripts/demo.py

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test: lint
	$(RUN) scripts/test.py -m "not slow"

test-all: lint
	$(RUN) -m pytest

# The package and all programs that the tests start run as with `python -O`. pytest does not: its tests are asserts.
test-optimised: $(VENV)/ready
	PYTHONPATH=tests $(RUN) scripts/test.py -m "not slow" -p optimised

format: $(VENV)/ready
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

bench: $(VENV)/bench-ready
	$(RUN) bench/run.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

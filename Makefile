# Two commands for a fresh machine with Python 3.10 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test prove prove-load test-optimised lint format bench bench-compare clean

$(VENV)/ready: pyproject.toml scripts/groups.py
	@echo "Making a virtual environment in $(VENV). That takes about a minute, once."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --disable-pip-version-check -e . $$($(RUN) scripts/groups.py test lint docs release)
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

# The long proofs: progress on the terminal, the result in docs/proof.md. `make prove ONLY=lock_file` runs some of them.
prove: lint
	$(RUN) scripts/prove.py $(ONLY)

# The tests must also pass while other programs keep all processors busy.
prove-load: lint
	$(RUN) scripts/prove_load.py

# The package and all programs that the tests start run as with `python -O`. pytest does not: its tests are asserts.
test-optimised: $(VENV)/ready
	PYTHONPATH=tests $(RUN) scripts/test.py -m "not slow" -p optimised

format: $(VENV)/ready
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

# Measures in at most 15 minutes and writes docs/benchmarks.md. `make bench ONLY=locks` measures a part again.
bench: $(VENV)/bench-ready
	$(RUN) bench/publish.py $(ONLY)

# Measures again, writes nothing, and fails if a ratio is 25 % worse than the one in docs/benchmarks.json.
bench-compare: $(VENV)/bench-ready
	$(RUN) bench/publish.py --compare $(ONLY)

# For those who publish Holdfast.
.PHONY: docs release-check

# The documentation as a site, in build/site. A warning is an error.
docs: $(VENV)/ready
	$(RUN) scripts/docs.py

# What a release needs: sdist and wheel are built and checked, and the wheel works in a clean environment.
release-check: $(VENV)/ready
	$(RUN) scripts/release.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

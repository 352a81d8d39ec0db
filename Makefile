# Every verb creates the virtual environment if it is missing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Every page is read, and its code is run, every time: the code it runs may have changed.
# On one thread, because sums in another order change the last digits, and with them some outputs.
SPHINX := OPENBLAS_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fresh-env --keep-going --jobs 2
export MUJOCO_GL ?= disable

.PHONY: help reproduce test check bench chaos docs docs-outputs dist clean

help:
	@echo "make reproduce   reproduce the paper's experiments, quick version, with a report"
	@echo "make test        run all tests"
	@echo "make check       format, lint, types, documentation build"
	@echo "make bench       measure speed against peers; EARLIER=PYTHON adds an earlier version of cqm"
	@echo "make chaos       try to break everything, for most of an hour; rerun to resume"
	@echo "make docs        build the documentation into docs/_build, running the code in it"
	@echo "make docs-outputs  write what that code prints into the pages"
	@echo "make dist        build the wheel and the sdist into dist"

# Reinstalled only if the pinned versions or the project's metadata change.
$(READY): requirements.lock pyproject.toml
	@echo "installing every dependency into $(VENV); this takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

reproduce: $(READY)
	$(BIN)/cqm reproduce --preset quick --out runs/quick

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

bench: $(READY)
	$(BIN)/python -m benchmarks.branching
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.querying
	$(BIN)/python -m benchmarks.predicting
ifdef EARLIER
	$(BIN)/python -m benchmarks.collecting --earlier $(EARLIER)
	$(BIN)/python -m benchmarks.learning --earlier $(EARLIER)
endif

chaos: $(READY)
	PYTHONPATH=tests $(BIN)/python -m chaos --report

docs: $(READY)
	$(SPHINX) --fail-on-warning docs docs/_build/html
	@echo "documentation: docs/_build/html/index.html"

docs-outputs: $(READY)
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/figures.py
	$(SPHINX) -D update_outputs=1 docs docs/_build/html

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build

clean:
	rm -rf $(VENV) docs/_build dist

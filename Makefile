# Two commands for a stranger: `make demo` and `make test`. Each makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Bytecode is kept: torch is compiled once, and not by every process that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check timings lint bench docs pictures clean

# The lock first, so that nothing looser is resolved; then the package itself, without looking.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	@$(BIN)/keyhole audit demo --force || [ $$? -eq 1 ]  # 1: something was given away, as it should be

# Workers that have nothing left to do take tests from those that have.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint
	$(PYTEST)

# The quick loop, in about two minutes: something of every package.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not slow"

# All tests again, to write down which of them are slow (tests/slow.txt).
timings: $(READY)
	$(PYTEST) --timings

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	@cd benchmarks && for one in $$(grep -l '^if __name__' *.py | grep -v '^leaking_server.py$$'); do \
		../$(BIN)/python $$one --json results/$${one%.py}.json || missed="$$missed $$one"; \
	done; [ -z "$$missed" ] || { echo "not measured:$$missed"; exit 1; }

# The site, in site/: what is generated first, then pages that need no network to be read.
docs: .venv/.docs
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

.venv/.docs: $(READY) requirements-docs.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.lock
	touch $@

# Pictures of the page and of figures, as a browser shows them: minutes, and chromium on the PATH.
pictures: $(READY)
	$(BIN)/python docs/generate.py --pictures

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis benchmarks/results build site

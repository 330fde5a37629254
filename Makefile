# Two commands for a stranger: `make demo` and `make test`. Each makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.demo-ready
# pip would compile all of torch, one file after the other, longer than all else takes;
# Python compiles what it imports.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Bytecode is kept: torch is compiled once, and not by every process that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check release timings lint bench docs pictures clean

# What the demo needs first. A lock, so that nothing looser is resolved; then the package itself,
# without looking.
$(DEMO_READY): requirements-demo.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) -r requirements-demo.lock
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

# The rest into the same environment. Compiled here, where what other packages warn of is no error,
# as it is in tests; some of their files are templates that no Python can compile.
$(READY): requirements.lock $(DEMO_READY)
	$(INSTALL) -r requirements.lock
	-$(BIN)/python -m compileall -qq -j 0 .venv/lib
	touch $@

demo: $(DEMO_READY)
	@$(BIN)/keyhole audit demo --processes 2 || [ $$? -eq 1 ]  # 1: something was given away, as it should be

# Workers that have nothing left to do take tests from those that have.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint
	$(PYTEST)

# The quick loop, in less than a minute: something of every package.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not slow and not release"

# What a release must pass besides: packaging, the site, the page in a browser, kills,
# benchmarks, and the rules for Semgrep, which it installs from the package index.
release: test
	$(PYTEST) -m release

# All tests again, to write down which of them are slow (tests/slow.txt).
timings: $(READY)
	$(PYTEST) --timings

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	@cd benchmarks && for file in $$(grep -l '^    show.main(' *.py); do \
		../$(BIN)/python $$file --json results/$${file%.py}.json || missed="$$missed $$file"; \
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

# Two commands for a stranger: `make demo` and `make test`. Each makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench docs clean

# The lock first, so that nothing looser is resolved; then the package itself, without looking.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	@$(BIN)/keyhole audit demo || [ $$? -eq 1 ]  # 1: something was given away, as it should be

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile  # a file stays together: some share a server

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	@cd benchmarks && for one in $$(ls *.py | grep -vE '^(show|texts|mismatches|seeds|methods).py$$'); do \
		../$(BIN)/python $$one --json results/$${one%.py}.json || missed="$$missed $$one"; \
	done; [ -z "$$missed" ] || { echo "not measured:$$missed"; exit 1; }

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis benchmarks/results

# Every target makes its own set-up. `make help` lists them.
EXPERIMENT ?=
ARGS ?=
RAY_ADDRESS ?=
RUN ?=

PYTHON_BIN := .venv/bin/python
LEASH := $(PYTHON_BIN) -m controller.main
OVERRIDES := $(if $(RAY_ADDRESS),cluster.ray_address=$(RAY_ADDRESS)) $(ARGS)
EXPERIMENT_FLAG := $(if $(EXPERIMENT),--experiment $(EXPERIMENT))
RUN_FLAG := $(if $(RUN),--run $(RUN))

.DEFAULT_GOAL := help
.PHONY: help install launch dry-run status stop tune test test-fast soak lint format typecheck docs clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

install: ## make .venv (nothing is done when it is up to date)
	@deploy/install.sh

launch: install ## train: make launch [EXPERIMENT=...] [ARGS="buffer.max_staleness=4 ..."] [RAY_ADDRESS=auto]
	@$(LEASH) launch $(EXPERIMENT_FLAG) $(OVERRIDES)

dry-run: install ## print the resolved config and the plan, start nothing
	@$(LEASH) dry-run $(EXPERIMENT_FLAG) $(OVERRIDES)

status: install ## what a run does now and what holds it back (RUN=name; default: the newest)
	@$(LEASH) status $(RUN_FLAG)

stop: install ## stop a run from another shell (RUN=name; default: the newest)
	@$(LEASH) stop $(RUN_FLAG)

tune: install ## change a running job: make tune MAX_STALENESS=2 [RUN=name]
	@$(LEASH) tune $(RUN_FLAG) --max-staleness $(MAX_STALENESS)

test: install ## all tests, those with real servers too
	@$(PYTHON_BIN) -m pytest tests

test-fast: install ## unit tests alone
	@$(PYTHON_BIN) -m pytest tests/unit -m "not slow"

soak: install ## the long form of the tests that CI runs in short: signals at 5 random moments
	@LEASH_SOAK_SIGNALS=5 $(PYTHON_BIN) -m pytest tests/integration -k random_moment

lint: install ## ruff, and formatting
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

format: install ## rewrite formatting
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

typecheck: install ## mypy, strict
	@.venv/bin/mypy

docs: install ## write docs/configuration.md anew from the schema
	@$(PYTHON_BIN) -m configs.reference

clean: ## remove .venv and caches; runs/ stays
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache *.egg-info

# Everything a checkout needs: `make test` on a fresh Debian with python3 and make is enough.
# Set PYTHON to build .venv from another interpreter, VERSIONS to choose the others that are tried.

VERSIONS ?= 3.14 3.13 3.12 3.11
# The newest that starts; a bare python3 counts where it is new enough.
PYTHON ?= $(shell for python in $(VERSIONS:%=python%) python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& { echo "$$python"; break; }; done)

ENV := .venv/.stamp
QUICK := tests/unit -q -m "not slow and not soak"

# Else the pyright package asks at every start whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo check unit services test others bench soak clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "make %-8s %s\n", $$1, $$2}'

demo: $(ENV) ## Run the demonstration (ARGS="…")
	@.venv/bin/python -m procession.demo $(ARGS)

check: $(ENV) ## Lint, format, types, imports
	.venv/bin/ruff check --quiet .
	.venv/bin/ruff format --check --quiet .
	.venv/bin/mypy src $(wildcard tests/typing)
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo

unit: $(ENV) ## Run the quick tests
	.venv/bin/pytest -n auto $(QUICK)

services: ## Install and start the servers that tests and benchmarks need
	@scripts/services up

test: check services ## Check, run all tests but soak, then the quick ones on every other Python found
	.venv/bin/pytest -n 2 -m "not soak"
	@$(MAKE) --no-print-directory others

bench: $(ENV) services ## Run the benchmarks (BENCH=name STORE=name ARGS="…")
	@.venv/bin/python -m bench $(if $(BENCH),--bench $(BENCH)) $(if $(STORE),--store $(STORE)) $(ARGS)

soak: $(ENV) services ## Run the tests that take minutes
	.venv/bin/pytest -m soak --timeout 3600

clean: ## Remove environments, caches and builds
	-scripts/services clean
	rm -rf .services .venv .venvs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Part of `test`. Where pyenv is used, a version that is installed but not selected counts as found.
others: $(ENV)
	@this=$$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	echo "Python $$this: .venv, all tests"; \
	for version in $(VERSIONS); do \
		[ "$$version" != "$$this" ] || continue; \
		where='import sys; print(sys.executable)'; \
		python=$$(python$$version -c "$$where" 2>/dev/null) \
			|| python=$$(PYENV_VERSION=$$(pyenv latest $$version 2>/dev/null) python$$version -c "$$where" 2>/dev/null) \
			|| { echo "Python $$version: not found"; continue; }; \
		echo "Python $$version: $$python, the quick tests"; \
		$(MAKE) -s --no-print-directory .venvs/$$version/.stamp OTHER="$$python" || exit 1; \
		.venvs/$$version/bin/pytest -n 2 $(QUICK) || exit 1; \
	done

.venv/.stamp: pyproject.toml
	$(call make-environment,$(PYTHON),-e .[dev])

# Here the built wheel is installed, as users get it, and anew after each change.
.venvs/%/.stamp: pyproject.toml $(shell find src -name '*.py' -o -name '*.sql')
	$(call make-environment,$(OTHER),--force-reinstall --no-deps . && $(@D)/bin/python -m pip install -q .[test])

# $(call make-environment,INTERPRETER,REQUIREMENTS) for the stamp's folder. An environment that still
# starts is kept and brought up to date. Debian ships ensurepip, which venv needs, in a package apart.
define make-environment
	@set -e; python="$(1)"; \
	if [ -z "$$python" ]; then \
		echo "Procession needs Python 3.11 or newer, and none was found on PATH." \
			"Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! $(@D)/bin/python -m pip --version >/dev/null 2>&1; then \
		if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			package=$$("$$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
			if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
				echo "$$python has no venv: installing $$package"; \
				apt-get update -qq || true; \
				DEBIAN_FRONTEND=noninteractive apt-get install -yqq "$$package" >/dev/null; \
			else \
				echo "$$python cannot make an environment: its module ensurepip is missing." \
					"Install it (on Debian and Ubuntu, as root: apt-get install $$package)" \
					"or name another interpreter: make PYTHON=/path/to/python3" >&2; exit 1; \
			fi; \
		fi; \
		rm -rf $(@D); "$$python" -m venv $(@D); \
	fi; \
	echo "Setting up $(@D)"; \
	$(@D)/bin/python -m pip install -q $(2); \
	touch $@
endef

# Targets of Aftertouch. `make` lists them.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# The first Python 3.11 or newer that can create virtual environments. Override with PYTHON=….
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup run demo test processes faults test-all campaigns bench check audit release stop clean requirements

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create the virtual environment, packages checked by hash

$(READY): requirements/test.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Aftertouch needs Python 3.11 or newer with the venv module; found: $$(python3 --version 2>&1 || echo no python3)."; \
		echo "On Debian: apt-get install python3 python3-venv. Another one: make setup PYTHON=/path/to/python3.12"; \
		exit 1; \
	fi
	@# Create the folder again if it was moved or is incomplete.
	@$(PY) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --retries 10 --require-hashes -r requirements/test.txt
	@touch $(READY)

run: setup ## start servers, web, worker, watcher, beat and Flower until Ctrl-C
	@exec $(PY) -m config.local run

demo: setup ## run real events, an RPA job and a silent chat, and print the results
	@.ci/packages chromium libatomic1
	@exec $(PY) -m examples.demo

test: setup ## test all promises without stacks of their own (ARGS="-k name" picks)
	@exec $(PY) -m pytest -n auto --second-look -m "not (processes or faults or campaign)" $(ARGS)

processes: setup ## test real stacks, supervisors, browsers and journeys
	@exec $(PY) -m pytest -n auto --second-look -m processes $(ARGS)

faults: setup ## test each fault once (FAULTS_SEED=1 chooses other moments)
	@exec $(PY) -m pytest --second-look -m faults $(ARGS)

test-all: setup ## run the three above with one report
	@exec $(PY) -m pytest -n auto --second-look -m "not campaign" $(ARGS)

campaigns: setup ## run the long fault campaigns with random moments and examples
	@exec $(PY) -m pytest -m campaign $(ARGS)

bench: setup ## run the benchmarks beside peers
	@.ci/packages nginx-light
	@exec $(PY) -m benchmarks $(ARGS)

check: setup ## check format, lint, words, types, imports, deployment settings, migrations
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PY) .ci/check-words
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	PY=$(PY) .ci/check-deploy
	DJANGO_SETTINGS_MODULE=config.settings.test $(PY) -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run

audit: setup ## report known vulnerabilities of server packages (needs pypi.org)
	@$(PY) -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/audit.txt
	@# Strict: a failed lookup is an error.
	@$(VENV)/audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/production.txt

release: ## check that version, changelog, images and tag agree
	@.ci/check-release

stop: ## stop all processes of this checkout
	@if $(PY) -c 'import psutil' 2>/dev/null; then \
		$(PY) -m config.local stop && for state in .state/test*; do \
			AFTERTOUCH_STATE_DIR=$$state $(PY) -m config.local stop; \
		done; \
	fi

clean: stop ## remove the virtual environment, caches and .state with its data
	rm -rf $(VENV) .state .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

requirements: setup ## compile requirements/*.in, keeping versions that still fit
	$(PY) -m pip install --quiet --disable-pip-version-check pip-tools
	for name in base production local test audit; do \
		CUSTOM_COMPILE_COMMAND="make requirements" $(VENV)/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras \
			--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
			--output-file requirements/$$name.txt requirements/$$name.in || exit 1; \
	done

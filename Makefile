# Everything starts here; `make` alone tells what there is.
# `demo` and `test` work from a clean clone as root on a Debian-like machine.

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
# Much of the tests' time is waiting, so two folders of them run side by side; a folder's
# tests share its system and stay on one worker. `TEST_WORKERS=0`: one after the other.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=
WORKERS = -n $(TEST_WORKERS) --dist loadscope
BENCH ?= create
SEED ?= 1
CHAOS_ARGS ?=
SECONDS ?= 60
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.DEFAULT_GOAL := help
.PHONY: help setup demo local test test-unit test-integration test-e2e test-inspect test-guest chaos lint schemas guest fuzz lock wheel up down bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing, make .venv, build guest binaries, start Docker Engine
	@scripts/setup.sh

demo: setup ## run real rollouts on real containers and print their rewards
	@$(PYTHON) -m demo

local: setup ## run the whole system on loopback until Ctrl-C
	@$(PYTHON) -m services.local

test: setup ## run all tests: architecture and lint, unit, integration, end to end
	@$(PYTEST) $(WORKERS) $(PYTEST_ARGS)

test-unit: setup ## run the pure tests
	@$(PYTEST) tests/unit tests/architecture $(WORKERS) $(PYTEST_ARGS)

test-integration: setup ## run the tests with real NATS, PostgreSQL, Valkey and Docker
	@$(PYTEST) tests/integration $(WORKERS) $(PYTEST_ARGS)

test-e2e: setup ## run the tests of the whole system
	@$(PYTEST) tests/e2e $(PYTEST_ARGS)

test-inspect: setup wheel ## run Inspect's own sandbox checks and an evaluation (downloads Inspect)
	@scripts/client_venv.sh inspect
	@$(PYTHON) scripts/with_system.py .venv-inspect/bin/pytest -c tests/clients/inspect/pytest.ini \
	  tests/clients/inspect $(PYTEST_ARGS)

test-guest: setup ## AppArmor, BPF LSM and quotas under Debian's own kernel, in QEMU (minutes)
	@scripts/guest_machine.sh
	@$(PYTEST) -c tests/guestvm/pytest.ini --rootdir . tests/guestvm/test_machine.py $(PYTEST_ARGS)

chaos: setup ## rollouts while everything is killed once: make chaos SEED=7 (ten minutes or more)
	@$(PYTHON) -m sim.chaos --seed $(SEED) $(CHAOS_ARGS)

lint: setup ## ruff, mypy, import contracts and size budget
	@$(PYTEST) tests/architecture -q $(PYTEST_ARGS)

schemas: setup ## export JSON Schema, AsyncAPI and the SDK's wire types from schemas/
	@$(PYTHON) -m schemas.export

guest: setup ## build what runs inside sandboxes
	@$(MAKE) --no-print-directory -C guest

fuzz: setup ## search for faults of the agent's protocol (needs clang): make fuzz SECONDS=600
	@$(PYTHON) -m tests.fuzz.seeds guest/build/corpus
	@$(MAKE) --no-print-directory -C guest fuzz SECONDS=$(SECONDS)

lock: ## make requirements*.lock from pyproject.toml and requirements-*.in again
	@scripts/lock.sh

wheel: setup ## build the SDK's wheel into dist/
	@.venv/bin/pip wheel -qq --no-deps --no-build-isolation -w dist ./libdsec

up: setup ## run the system with Docker Compose and wait until it is healthy
	@$(PYTHON) -m devstack.composefiles
	@$(COMPOSE) up --build --detach $(if $(filter docker,$(firstword $(COMPOSE))),--wait)

down: ## stop what `up` started; data stays in its volumes
	@$(COMPOSE) down

bench: setup ## run one benchmark: make bench BENCH=create
	@$(PYTHON) -m bench $(BENCH) --json

clean: ## remove what set-up and builds made in this folder (not the cache, not Docker)
	@rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@[ ! -e guest/Makefile ] || $(MAKE) --no-print-directory -C guest clean
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One command for each thing one does with a clone. `make` alone lists them.
#   MODEL=smollm2-135m-instruct make demo     a light model
#   PYTHON=python3.12 make test               another interpreter (3.11 or newer)
#   BENCH="overhead scaling" make bench       some of the benchmarks

PYTHON ?= python3
MODEL ?= qwen2.5-coder-1.5b-instruct
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALL_LOG := $(VENV)/install.log
# pip in full goes to the log; the terminal sees the big downloads, the installation and errors.
PIP_INSTALL := $(BIN)/python -m pip install --progress-bar=off -c constraints.txt
SHOW := 2>&1 | tee -a $(INSTALL_LOG) | awk '/^ *(Downloading|Using cached) .*[(][0-9][0-9]+([.][0-9])? MB\)/ \
	{sub(/^ */, "      "); print; fflush()} /^Installing collected/ {print "      installing"; fflush()} /^ERROR/' \
	|| { echo "The whole story is in $(INSTALL_LOG)."; exit 1; }

SHELL := bash
.SHELLFLAGS := -o pipefail -c

SOURCES := actors cluster
BENCH ?= overhead emulated scaling tensor_parallel prefix_cache single_stream acceptance determinism throughput
PROTOS := $(wildcard protos/*.proto)
TYPING := build/typing
GENERATED := build/protos

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format protos bench chaos docs wheel deploy-files clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## set up, serve real weights and answer three prompts (MODEL=NAME)
	@$(BIN)/paceline demo --model "$(MODEL)"

test: lint ## lint, then every test that takes seconds
	@$(BIN)/python -m pytest -m "not heavy and not gpu" $(PYTEST_ARGS)

test-all: lint ## lint, then every test (GPU tests are skipped where there is no GPU)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "Run 'make format'."; exit 1; }
	@# An editable install's import hook is invisible to mypy: give it the namespace as links.
	@mkdir -p $(TYPING)/paceline
	@for package in $(SOURCES) protos; do ln -sfn ../../../$$package $(TYPING)/paceline/$$package; done
	@ln -sfn ../../benchmarks $(TYPING)/benchmarks
	@cd $(TYPING) && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml \
		$(SOURCES:%=-p paceline.%) $(if $(wildcard benchmarks/*.py),-p benchmarks)

format: $(INSTALLED) ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(INSTALLED) ## regenerate the code of protos/*.proto
	@rm -rf $(GENERATED) && mkdir -p $(GENERATED)
	@$(BIN)/python -m grpc_tools.protoc -Ipaceline/protos=protos --python_out=$(GENERATED) \
		--pyi_out=$(GENERATED) --grpc_python_out=$(GENERATED) $(PROTOS:%=paceline/%)
	@cp $(GENERATED)/paceline/protos/*_pb2*.py* protos/

bench: $(INSTALLED) ## run what docs/performance.md reports, about 3 hours on 2 cores (BENCH="NAME ..." for some)
	@# In minutes there: overhead 6, emulated 5, scaling 5, tensor_parallel 5, prefix_cache 4, single_stream 15,
	@# acceptance 12, determinism 15, throughput 75.
	@for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done
	@echo "Tables are above; JSON and plots are in benchmarks/results/."

chaos: $(INSTALLED) ## kill everything in turn under seeded streams, 10 minutes (CHAOS_SECONDS=N)
	@$(BIN)/python -m pytest -s -m heavy tests/integration/test_chaos.py

docs: $(INSTALLED) ## regenerate docs/configuration.md
	@$(BIN)/python -m paceline.cluster.config_reference > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md

wheel: $(INSTALLED) ## build dist/*.whl, which clusters install
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

deploy-files: $(INSTALLED) ## rewrite the cluster files of deploy/ from deploy/cluster.yaml
	@for cloud in aws gcp onprem; do \
		$(BIN)/paceline deploy deploy/cluster.yaml --target $$cloud --output deploy/ray-up-$$cloud.yaml || exit 1; done
	@$(BIN)/paceline deploy deploy/cluster.yaml --target kuberay --output deploy/rayservice.yaml
	@$(BIN)/paceline deploy deploy/cluster.yaml --target serve --machines aws --output deploy/serve.yaml

clean: ## remove what the other targets made, except pulled weights
	@rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Paceline needs Python 3.11 or newer; name it: make PYTHON=python3.12 ..."; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@: > $(INSTALL_LOG)
	@echo "[2/4] pip"
	@$(PIP_INSTALL) --upgrade 'pip>=25' $(SHOW)
	@echo "[3/4] torch"
	@$(PIP_INSTALL) torch $(SHOW)
	@echo "[4/4] paceline and its other dependencies"
	@$(PIP_INSTALL) -e '.[dev,bench]' $(SHOW)
	@touch $@

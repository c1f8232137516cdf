# Everything a person types here. `make` lists the targets.
#
#   make serve MODEL=/path/to/checkpoint PORT=9000 ARGS='--decoders 2'
#
# On a machine without an accelerator, this spares the download of CUDA libraries:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=
PORT   ?= 8000
ARGS   ?=
NPUS   ?= 1
# How many tests run at once. They wait for servers and for time: two more than cores keep the cores at work.
JOBS   ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 6 ? cores + 2 : 8)))
TORCH_INDEX ?=

BIN       := $(VENV)/bin
LIBRARIES := $(VENV)/.libraries
INSTALLED := $(VENV)/.installed
COMPILED  := $(VENV)/.compiled
KERNELS   := $(VENV)/.kernels
DOCS      := $(VENV)/.docs
CPU_KERNELS := shared/cpu_kernels
PIP_INSTALL = $(BIN)/python -m pip install --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
PROTOS    := $(shell find protos -name '*.proto')
COMPOSE   := docker compose
ON_NPU    := $(BIN)/python -m tests.ascend.environment

.DEFAULT_GOAL := help
.PHONY: help serve install proto kernels self-test lint types test test-full test-npu test-npu-full simulate-npu bench docs docker up down clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(LIBRARIES) proto kernels ## Serve a model on this machine (MODEL=, PORT=, ARGS=); the demo model unless given
	@exec $(BIN)/tessera serve $(if $(MODEL),'$(MODEL)') --port $(PORT) $(ARGS)

install: $(INSTALLED) $(COMPILED) ## Make .venv and install everything into it, tools for development too, if need be

# What serving needs: no tools for development.
$(LIBRARIES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo 'venv is needed (Debian: apt-get install python3-venv)' >&2; exit 1; }
	@echo '[1/3] Installing libraries into $(VENV), most of it torch. On disk they take 1.3 GB; where the index gives'
	@echo '      a torch with CUDA libraries, some gigabytes more (TORCH_INDEX= names an index without, see the Makefile).'
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(PIP_INSTALL) --editable '.[local]' --group proto
	@touch $@

$(INSTALLED): $(LIBRARIES)
	@echo 'Installing tools for development into $(VENV) ...'
	$(PIP_INSTALL) --quiet --group dev
	@touch $@

proto: $(COMPILED) ## Compile protos/, if one has changed

$(COMPILED): $(PROTOS) $(LIBRARIES)
	@echo '[2/3] Compiling protos/ ...'
	@$(BIN)/python -m grpc_tools.protoc -I protos \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=protos --grpc_python_out=protos --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos \
		$(PROTOS)
	@touch $@

kernels: $(KERNELS) ## Compile the CPU kernels and try which are the fastest, if one has changed and there is a compiler

$(KERNELS): $(wildcard $(CPU_KERNELS)/*.py $(CPU_KERNELS)/source/* $(CPU_KERNELS)/source/*/*) $(LIBRARIES)
	@echo '[3/3] Compiling the CPU kernels for this processor and trying which are the fastest, if there is a C++ compiler: up to a minute ...'
	@$(BIN)/python $(CPU_KERNELS)/build.py
	@touch $@

self-test: $(LIBRARIES) ## Try every CPU kernel against plain loops, those for Arm under an emulator if there is one
	@$(BIN)/python $(CPU_KERNELS)/build.py --self-test --all

lint: install proto ## Check style, format and which service imports what
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: install proto ## Check types
	$(BIN)/mypy

test: install proto kernels ## Run the tests, JOBS= at once (ARGS= goes to pytest)
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadgroup $(ARGS)

test-full: install proto kernels ## Run the tests, also those that cover more of what another test covers
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadgroup -m 'not compose' --hypothesis-profile random $(ARGS)

test-npu: install proto ## Run the tests on a simulated Ascend NPU, JOBS= at once (ARGS= goes to pytest); the first time downloads 43 MB
	@$(ON_NPU) $(BIN)/pytest tests/ascend --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-npu-full: install proto ## All of these tests, then break the code for NPUs in every way that one of them has to notice
	@$(ON_NPU) $(BIN)/pytest tests/ascend --numprocesses $(JOBS) --dist worksteal -m 'not compose' $(ARGS)
	@$(ON_NPU) $(BIN)/python -m tests.ascend.breaks

simulate-npu: install proto kernels ## Serve a model on simulated Ascend NPUs (NPUS=, MODEL=, PORT=, ARGS=)
	@exec $(BIN)/python -m tests.ascend.simulated --devices $(NPUS) \
		$(BIN)/tessera serve $(if $(MODEL),'$(MODEL)') --device npu --port $(PORT) $(ARGS)

bench: install proto kernels ## Measure (ARGS= goes to the benchmark)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(DOCS) ## Build the site of docs/ into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(DOCS): $(LIBRARIES)
	$(PIP_INSTALL) --quiet --group docs
	@touch $@

docker: ## Build the images
	$(COMPOSE) build

up: ## Start everything in containers (MODEL=, PORT=, ARGS='--scale decoder=2')
	MODEL='$(abspath $(MODEL))' SERVED_MODEL_NAME='$(notdir $(abspath $(MODEL)))' \
		PORT=$(PORT) GRPC_PORT=$$(($(PORT) + 1)) $(COMPOSE) up --detach --wait $(ARGS)

down: ## Stop the containers
	$(COMPOSE) down

clean: ## Remove .venv, what protoc made, and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find protos \( -name '*_pb2*.py' -o -name '*_pb2*.pyi' \) -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything starts from a bare python3: the first target that needs it builds .venv, later ones reuse it.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Test files run side by side: a case on ranks keeps two cores busy, one in a single process does not, and some wait.
TEST_WORKERS ?= 3
# Releases of torch for `make versions`; 2.13 is the newest 2.13.x, +newest the newest release of every package.
VERSIONS ?= 2.13.0 2.14.1 2.15.0
VERSIONS_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Ranks are processes here: one thread each, or they fight for the cores.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Dozens of processes import the same files: without what Python keeps of them each would compile them anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-accelerate bench-cluster gpu-check versions test quick test-slow lint style types suite contract docs package clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create or reuse .venv with everything installed

# $(call environment,FOLDER,WHAT PIP INSTALLS): the rules of the environments below.
define environment
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || \
	{ echo "could not create $(1): install the venv module of your python3 (Debian and Ubuntu: apt install python3-venv)"; rm -rf $(1); exit 1; }
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) || \
	{ echo "$(1) lacks what pip names above, of: pip install $(subst ",,$(2)); pip needs an index, or their wheels in a folder (PIP_FIND_LINKS)"; exit 1; }
@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call environment,$(VENV),--no-compile -c constraints.txt -e ".[all]")

demo: $(STAMP) ## train a GPT-2 on four ranks that pose as two nodes, about two minutes
	$(BIN)/python examples/train_gpt2.py --demo

demo-accelerate: $(STAMP) ## a bare Accelerate loop and transformers' Trainer on the same four ranks
	SMP_RANKS_PER_NODE=2 $(BIN)/accelerate-smp launch --config_file examples/accelerate/four_ranks_cpu.yaml examples/train_accelerate.py
	SMP_RANKS_PER_NODE=2 $(BIN)/accelerate-smp launch --config_file examples/accelerate/four_ranks_cpu.yaml examples/train_hf_trainer.py

bench-cluster: $(STAMP) ## ours and the peers on an emulated cluster: Linux, root, hours
	@[ "$$(uname)" = Linux ] && [ "$$(id -u)" = 0 ] || \
		{ echo "make bench-cluster makes network namespaces: run it on Linux as root"; exit 1; }
	$(BIN)/python benchmarks/cluster/bench.py $(BENCH_ARGS)

gpu-check: $(STAMP) ## check the CUDA paths on one GPU, half an hour, or RANKS=8 on several; results for docs/gpu.md
	$(BIN)/python benchmarks/gpu/run.py $(if $(RANKS),--ranks $(RANKS))

versions: $(STAMP) ## the contract and a selection of tests with each torch of VERSIONS; results for docs/versions.md
	$(BIN)/python benchmarks/versions.py $(VERSIONS) --workers $(TEST_WORKERS) $(VERSIONS_ARGS)

lint: style types ## style and types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

suite: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# mypy, the site and the contract take one core for two minutes: beside the tests, so that no core waits for them. What
# they say follows what the tests say. Where `make versions` has left environments the contract runs in each of them.
# Neither the site nor the contract is looked at where a part of the tests was asked for.
test: style ## style, types, the site and the tests of every change (without those marked slow)
	@said=$$(mktemp); trap 'rm -f $$said' EXIT; \
	$(MAKE) --no-print-directory --keep-going types $(if $(strip $(PYTEST_ARGS)),,docs contract) > $$said 2>&1 & beside=$$!; \
	$(MAKE) --no-print-directory suite; suite=$$?; \
	wait $$beside; beside=$$?; cat $$said; exit $$((suite || beside))

contract: $(STAMP)
	@$(BIN)/python benchmarks/versions.py --made

quick: $(STAMP) ## the tests that start no processes, for the desk
	QUICK_TESTS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

test-slow: $(STAMP) ## the full matrices
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# The site and the package need none of what training needs: each has an environment of its own.
$(VENV)-docs/.installed: docs/requirements.txt
	$(call environment,$(VENV)-docs,-r docs/requirements.txt)

docs: $(VENV)-docs/.installed ## build the site into site/; a warning or a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet || { echo "the site does not build: make docs"; exit 1; }

$(VENV)-package/.installed:
	$(call environment,$(VENV)-package,build twine)

package: $(VENV)-package/.installed ## build sdist and wheel into dist/ and check them
	rm -rf dist
	$(VENV)-package/bin/python -m build --quiet
	$(VENV)-package/bin/twine check --strict dist/*

clean: ## remove caches, build products and .venv
	rm -rf $(VENV) $(VENV)-docs $(VENV)-package build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

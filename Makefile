# Everything starts from a bare python3: the first target that needs it builds .venv, later ones reuse it.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Test files run side by side: a case on ranks keeps two cores busy, one in a single process does not.
TEST_WORKERS ?= 2
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
.PHONY: help venv demo demo-accelerate bench-cluster gpu-check versions test quick test-slow lint style types suite docs package clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## create or reuse .venv with everything installed

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "could not create $(VENV): install the venv module of your python3 (Debian and Ubuntu: apt install python3-venv)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[all]"
	@touch $@

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

# mypy runs on one core for most of a minute: beside the tests, so that no core waits for it. Where `make versions` has
# left environments the contract runs in each of them, unless a part of the tests was asked for.
test: style ## style, types and the tests of every change (without those marked slow)
	@$(MAKE) --no-print-directory -j 2 types suite
	@$(if $(strip $(PYTEST_ARGS)),:,$(BIN)/python benchmarks/versions.py --made --workers $(TEST_WORKERS))

quick: $(STAMP) ## the tests that start no processes, for the desk
	QUICK_TESTS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

test-slow: $(STAMP) ## the full matrices
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# The site and the package need none of what training needs: each has an environment of its own.
$(VENV)-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

docs: $(VENV)-docs/.installed ## build the site into site/; a warning or a broken link fails
	$(VENV)-docs/bin/mkdocs build --strict --quiet

$(VENV)-package/.installed:
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@touch $@

package: $(VENV)-package/.installed ## build sdist and wheel into dist/ and check them
	rm -rf dist
	$(VENV)-package/bin/python -m build --quiet
	$(VENV)-package/bin/twine check --strict dist/*

clean: ## remove caches, build products and .venv
	rm -rf $(VENV) $(VENV)-docs $(VENV)-package build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

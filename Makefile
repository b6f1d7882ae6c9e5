# Each target does all the set-up that it needs. Needs Python >= 3.11, make and a package registry.

SHELL       := bash
.SHELLFLAGS := -o pipefail -ec

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
HOME_OF_DAGSTER := $(CURDIR)/.dagster_home

PYTEST_ARGS ?=
DEV_ARGS    ?=
TESTS       ?=

# The folder of a test is its tier. `make test` leaves these to `make test-all`: processes that are killed, clusters, daemons; real
# servers; the pipelines and tables of cases that take most of the time on Spark. Of the processes that are killed it takes a few.
SLOW_FILES  := $(sort $(foreach folder,processes servers long,$(wildcard tests/*/$(folder)/test_*.py)))
QUICK_FILES := $(filter-out $(SLOW_FILES),$(sort $(wildcard tests/*/test_*.py tests/*/*/test_*.py)))
# Of the kills at each point of the protocol, with each sink, `make test` takes these.
KILLED      := $(foreach cell,metadata-delta commit-sql,'tests/spark/processes/test_crash_matrix.py::test_a_kill[$(cell)]')
# Tests that start no Spark.
PURE_FILES  := tests/pipeline tests/coordination tests/execution tests/state tests/storage tests/sources tests/spark/pure

# The versions of Spark that tests run under: that of requirements.lock, in .venv, and those of requirements-spark-*.lock, each in an
# environment of its own that takes all other packages from .venv.
SPARKS := $(shell sed -n 's/^pyspark==\([0-9.]*\).*/\1/p' requirements.lock $(wildcard requirements-spark-*.lock))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-all test-pure test-spark slow-files dev check count docs docs-links bench pictures simulate programs coverage mutate lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install the locked packages (the other targets do it by themselves)

run: $(STAMP) ## the flights pipeline end to end: checkpoints, SIGKILL, recovery, drain, comparison with a batch result
	@$(BIN)/python -m assets.demo

# Four processes for two cores: tests of jobs wait for a part of their time.
RUN_TESTS = $(BIN)/python -m pytest --numprocesses $(or $(WORKERS),4) --dist worksteal $(PYTEST_ARGS)

test: $(STAMP) ## the tests, in four processes (WORKERS=0: in one; PYTEST_ARGS="-k name")
	@$(RUN_TESTS) $(QUICK_FILES) $(KILLED)

test-all: $(STAMP) ## all tests, for a night: also kills, servers and long pipelines (TESTS="tests/spark/long tests/sinks/servers": a part)
	@$(RUN_TESTS) $(or $(TESTS),tests)

slow-files: # the files that make test leaves to make test-all
	@printf '%s\n' $(SLOW_FILES)

test-pure: $(STAMP) ## the tests that need no Spark, before each commit
	@$(RUN_TESTS) $(PURE_FILES)

SPARK_TESTS = $(or $(TESTS),tests/facts tests/spark)
test-spark: $(STAMP) ## tests under another version of Spark, in an environment of its own (VERSION=4.1 or 4.1.4; TESTS="tests/facts")
	@spark=$$(printf '%s\n' $(SPARKS) | grep -E '^$(subst .,\.,$(VERSION))(\.|$$)') || { \
	  echo "VERSION='$(VERSION)': expected one of $(SPARKS), or the first two numbers of one." >&2; exit 1; }; \
	bin=$(BIN); \
	if [ -f "requirements-spark-$${spark%.*}.lock" ]; then \
	  $(MAKE) --no-print-directory "$(VENV)-spark-$${spark%.*}/.installed"; bin="$(VENV)-spark-$${spark%.*}/bin"; \
	  export OTHER_SPARK_PYTHON="$(CURDIR)/$(BIN)/python"; \
	fi; \
	echo "Under Spark $$spark: $(SPARK_TESTS)"; \
	"$$bin/python" -m pytest --numprocesses $(or $(WORKERS),2) --dist worksteal $(PYTEST_ARGS) $(SPARK_TESTS)

# `dagster dev` warns that `dg dev` has superseded it. `dg dev` needs 31 more packages (dagster-dg-cli), so this target keeps `dagster dev`.
dev: $(STAMP) $(HOME_OF_DAGSTER)/dagster.yaml ## Dagster's UI with the flights pipeline
	@printf '%s\n' "To use the command line beside it, type these two lines in another shell; then, for example, dagster-checkpoints watch:" \
	  '  export PATH="$(CURDIR)/$(BIN):$$PATH"' \
	  '  export $(if $(CHECKPOINT_STORAGE),CHECKPOINT_STORAGE="$(CHECKPOINT_STORAGE)",DAGSTER_HOME="$(HOME_OF_DAGSTER)")'
	@DAGSTER_HOME="$(HOME_OF_DAGSTER)" PYTHONWARNINGS='ignore:Function `dev_command` is superseded' \
	  $(BIN)/dagster dev -w workspace.yaml $(DEV_ARGS)

check: $(STAMP) ## lint, format, types, imports between the floors, definitions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(wildcard assets bench dagster_checkpoints resources sensors simulation definitions.py)
	@$(BIN)/lint-imports
	@$(BIN)/lint-imports --config .ci/walls.toml
	@$(BIN)/dagster definitions validate -w workspace.yaml

count: $(STAMP) ## code lines, modules, imports and circles of the library, by package
	@$(BIN)/python -m bench.code_count

# Each page has to be in the navigation, and each link inside the site has to lead somewhere: warnings are errors.
SPHINX = PYTHONPATH= $(VENV)-docs/bin/python -m sphinx --fail-on-warning --keep-going --jobs auto --conf-dir docs . site
docs: $(VENV)-docs/.installed ## the documentation site, in site/; on a terminal it is opened
	@$(SPHINX) --quiet --builder html
	@echo "file://$(CURDIR)/site/index.html"
	@if [ -t 1 ]; then $(BIN)/python -m webbrowser -t "file://$(CURDIR)/site/index.html" >/dev/null; fi

docs-links: $(VENV)-docs/.installed ## ask each address outside of the site that a page links
	@$(SPHINX)-links --builder linkcheck

bench: $(STAMP) ## the benchmark's table
	@$(BIN)/python -m bench

pictures: $(STAMP) ## the pictures of the page of checkpoints in docs/, from a run of some minutes (needs Chromium)
	@$(BIN)/python -m bench.pictures

simulate: $(STAMP) ## try to break the protocol: random pipelines, crashes, take-overs (SECONDS=60 SEED=1 WORKERS=2); then the sinks alone
	@$(BIN)/python -m simulation --seconds $(or $(SECONDS),60) --workers $(or $(WORKERS),2) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python -m simulation.sink_histories --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

programs: $(STAMP) ## random DataFrame programs over two streams against their batch results (SECONDS=60 SEED=1 WORKERS=2)
	@$(BIN)/python -m bench.stream_programs --seconds $(or $(SECONDS),60) --workers $(or $(WORKERS),2) $(if $(SEED),--seed $(SEED))

coverage: $(STAMP) ## statement and branch coverage of the floors without Spark and Dagster; fails below 95 %
	@$(BIN)/python -m pytest tests/pipeline tests/coordination tests/execution tests/state --cov --cov-report=term

# mutmut signals the process number of each mutant when the mutant's time is over, also if it has ended and another process has that
# number by then. In a namespace of its own it sees no other processes.
APART = unshare --user --map-root-user --pid --fork --mount-proc
mutate: $(STAMP) ## mutation tests of coordination/, execution/ and state/ (some 7,000 mutants, an hour on two quiet cores); MUTANTS="dagster_checkpoints.state.inputs*": a part; `.venv/bin/mutmut results` lists survivors
	@if $(APART) true 2>/dev/null; then apart="$(APART)"; else echo "Run nothing beside it: it may kill other processes."; fi; \
	HYPOTHESIS_PROFILE=ci $$apart $(BIN)/mutmut run --max-children $(or $(WORKERS),2) $(MUTANTS)

COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-strip-extras --no-annotate --no-header \
  --no-emit-index-url --no-emit-find-links --upgrade
lock: $(STAMP) ## compute requirements.lock and requirements-docs.lock again from pyproject.toml (needs uv)
	$(COMPILE) pyproject.toml --extra dev --output-file requirements.lock
	$(COMPILE) --group docs --constraints requirements.lock --output-file requirements-docs.lock

clean: ## remove .venv and all files that runs have written
	rm -rf $(VENV) $(VENV)-* .data .dagster_home site site-links

# The stamp is written last, so that an interrupted installation is repeated.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.11 <target>" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (once; a minute or two) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@$(BIN)/python -m pip install --require-hashes --no-input --progress-bar off -r requirements.lock | awk '\
	  /^(Collecting|Processing)/ {n++; printf "."; fflush()} \
	  /^Installing collected/ {printf "\ninstalling %d packages ...\n", n; fflush()}'
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# What one lock has: PySpark of another version, or the generator of the documentation. All other packages come from .venv, whose
# directory the .pth file names.
$(VENV)-%/.installed: requirements-%.lock $(STAMP)
	@echo "Setting up $(@D) from $< (once; a minute or two) ..."
	@$(BIN)/python -m venv --clear --without-pip $(@D)
	@$(BIN)/python -m pip --python $(@D)/bin/python install --require-hashes --no-deps --no-input --quiet --progress-bar off -r $<
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python -c "$$purelib")" \
	  > "$$($(@D)/bin/python -c "$$purelib")/locked.pth"
	@touch $@

# The directory of the storage, runs and schedules of `make dev`, which are kept over restarts. Your own lines in the file stay.
$(HOME_OF_DAGSTER)/dagster.yaml: Makefile
	@mkdir -p $(@D)
	@touch $@
	@sed -i -e '$$a\' $@
	@for switch in telemetry nux; do \
	  grep -q "^$$switch:" $@ || printf '%s:\n  enabled: false\n' "$$switch" >> $@; \
	done

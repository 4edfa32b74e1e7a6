# `make` or `make help` lists the targets. Everything is installed into .venv, and a second run reuses it.
#   PYTHON    the interpreter .venv is made from, 3.11 or newer              make test PYTHON=python3.12
#   PIP_ARGS  more arguments for pip, such as the index of a CPU-only torch  make run PIP_ARGS="--extra-index-url URL"
#   PLATFORM  a calibration of this machine, for bench                       make bench PLATFORM=P.toml
#   ARGS      more arguments for the command of run, lab, fuzz or bench      make run ARGS=--quick
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PLATFORM ?=
VENV := .venv
BIN := $(VENV)/bin
# Many containers forbid Python to store what it compiles: every process would compile torch anew, three times as long.
unexport PYTHONDONTWRITEBYTECODE

# The extras of pyproject.toml that a target needs; a stamp file remembers that they are installed.
EXTRAS_run := measure
EXTRAS_lab := measure,notebooks
EXTRAS_test := measure,models,dev
EXTRAS_gallery := kernel-database
EXTRAS_docs := measure,docs
EXTRAS_release := dev,release

# About how much pip loads for a target with a CPU build of torch [MB]; that of PyPI for Linux brings gigabytes more.
MEGABYTES_run := 350
MEGABYTES_lab := 450
MEGABYTES_test := 700
MEGABYTES_gallery := 200
MEGABYTES_docs := 400
MEGABYTES_release := 250

# The lesson with the table of contents.
FIRST_LESSON := notebooks/00_start_here.ipynb

# Jupyter refuses to run as root, which is what most containers are, unless it is told to.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# torchrec and what it imports, for CPUs.
TORCHREC := torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 pyre-extensions==0.0.32 \
	pyvers==0.2.3 cloudpickle==3.1.3 typing-inspect==0.9.0 mypy-extensions==1.2.0

.DEFAULT_GOAL := help
.PHONY: help run lab test quick fuzz bench gallery docs release-check style lint refresh torchrec clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/installed-run  ## demo: predict, calibrate this machine, measure, compare, write perfkit-report.html
	@$(BIN)/python -m perfkit demo $(ARGS)

# JupyterLab shows stored charts of notebooks that are trusted, or that it has run itself.
# The server begins here and not in notebooks/, so that links from lessons to docs/ open, too.
lab: $(VENV)/installed-lab  ## open JupyterLab at the table of contents of the lessons
	@$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null
	$(BIN)/jupyter lab $(AS_ROOT) --LabApp.default_url=/lab/tree/$(FIRST_LESSON) $(ARGS) .

# Types are checked beside the tests, of which the longest files begin (tests/quick.py, LONGEST). What is marked serial follows
# alone, from the files that have such tests.
test: $(VENV)/installed-test style  ## lint, types, unit and property tests, doctests, notebooks
	@$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m pytest -m "not serial" -n auto --dist loadfile --no-loadscope-reorder; tests=$$?; wait $$types && exit $$tests
	$(BIN)/python -m pytest -m serial notebooks $$(grep -l mark.serial tests/*.py)

# Fragments, contracts and docstrings are part of tests/test_structure.py.
quick: $(VENV)/installed-test style  ## what a change touches: lint, types, golden numbers, nearest tests
	@OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m tests.quick $(ARGS)

fuzz: $(VENV)/installed-test  ## 100,000 hostile inputs for everything that reads files or takes arguments
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: $(VENV)/installed-run  ## all tables of accuracy and speed; calibrates first unless PLATFORM names a file
	$(BIN)/python -m benchmarks $(if $(PLATFORM),--platform $(PLATFORM)) $(ARGS)

gallery: $(VENV)/installed-gallery  ## build the GPU platforms of the gallery again from their sources
	$(BIN)/python -m benchmarks.makers.gallery $(ARGS)

docs: $(VENV)/installed-docs  ## build the documentation site, which opens without a network: site/index.html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet \
	-c docs -d $(VENV)/doctrees . site
	$(BIN)/python -m tests.site_search site

# PYENV_VERSION=3.11.7:3.12.1:3.13.0 lets pyenv answer to all three.
release-check: $(VENV)/installed-release  ## archive and wheel on Python 3.11 to 3.13, and with lowest versions
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.release $(ARGS)

style: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style  ## ruff and mypy
	$(BIN)/mypy

refresh: $(VENV)/installed-test  ## execute the notebooks again and store their outputs
	$(BIN)/python notebooks/refresh.py

torchrec: $(VENV)-torchrec/installed  ## round trip of plans with TorchRec itself, on two ranks of gloo, in an environment of its own
	OMP_NUM_THREADS=1 $(VENV)-torchrec/bin/python -m tests.torchrec_trip $(ARGS)

clean:  ## remove .venv, caches and builds (measurements in .perfkit stay)
	rm -rf $(VENV) $(VENV)-torchrec build dist site jupyter_execute .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find perfkit tests notebooks benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "perfkit needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# TorchRec asks for the CUDA build of FBGEMM; without its dependencies it takes that for CPUs, and the rest by name.
$(VENV)-torchrec/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv --clear $(VENV)-torchrec
	$(VENV)-torchrec/bin/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt $(PIP_ARGS) --editable '.[measure]'
	$(VENV)-torchrec/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps $(PIP_ARGS) $(TORCHREC)
	@touch $@

$(VENV)/installed-%: $(VENV)/created pyproject.toml constraints.txt
	@echo "installing into $(VENV) (about $(MEGABYTES_$*) MB; the torch of PyPI for Linux brings gigabytes more, PIP_ARGS names another index)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt $(PIP_ARGS) --editable '.[$(EXTRAS_$*)]'
	@touch $@

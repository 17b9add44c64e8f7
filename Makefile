# The commands people type; the CI types the same. Each does its own set-up, once.
#   make train ARGS="--epochs 1"     make test ARGS="tests/launch -x"     make PYTHON=python3.12 test

VENV ?= .venv
SERVERS ?= 2
WORKERS ?= 2
ARGS ?=
TIMES ?= 20
JOBS ?= $(shell echo $$((2 * $$(nproc))))
export PYTHON
# Else each of the processes that test would compile all modules and tests, every time: 11 CPU-s.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help train serve test test-all quick test-oldest check bench bench-kernels bench-gpu bench-peers torture repeat soak fuzz fuzz-atheris test-device test-gpu test-engines test-slurm test-ray test-hosts test-packages test-docs docs site goldens clean

help:
	@echo "make train          train on 336,776 flights: 2 servers, 2 workers (LAUNCH=--sync, ARGS=...)"
	@echo "make test           the tests that any change needs (ARGS=... for pytest)"
	@echo "make test-all       and those marked long: more random schedules, fuzzing, repeated kills; the CI runs these"
	@echo "make quick          the tests that start no process, in less than a minute"
	@echo "make test-oldest    some of the tests with the oldest releases of what psfleet needs, in $(OLDEST)"
	@echo "make check          ruff, mypy, generated stubs, diagrams, documents"
	@echo "make bench          benchmarks of whole jobs;  make bench-kernels: of the kernels; make bench-gpu: of tables on a GPU"
	@echo "make bench-peers    psfleet beside torch, TensorFlow and Paddle; installs those two (2 GB) first"
	@echo "make torture        model, kills, chaos, floods, damaged snapshots, planted faults: SEEDS=$(SEEDS) more seeds; all CUDA kernels"
	@echo "make repeat         the cluster tests, TIMES=$(TIMES) times over (TESTS=...)"
	@echo "make soak           a job under chaos for MINUTES=$(MINUTES): does anything grow, is anything left?"
	@echo "make serve          train on flights with servers that a service follows, export in int8, serve both versions"
	@echo "make fuzz           changed requests and files: FUZZ_FRAMES=$(FUZZ_FRAMES) FUZZ_FILES=$(FUZZ_FILES); make fuzz-atheris"
	@echo "make test-engines   jobs on every engine: ssh, Slurm, Ray, Docker; as root it installs what they need"
	@echo "make test-device    tests of tables, shards, snapshots and recovery with all tables on a simulated GPU, and on disk"
	@echo "make test-gpu       the same tests and each kernel on a real GPU"
	@echo "make test-packages  wheel and sdist, each installed into a fresh environment that runs a script"
	@echo "make site           build the site of all documents, strictly, in build/site/html"
	@echo "make docs           run what the pages print, examples and benchmarks (make test-docs), draw the diagrams, list settings and panels;"
	@echo "                    build the site"
	@echo "make goldens        write golden files of a new format version; refuses to replace any (docs/formats.md)"

train: $(VENV)/.has-examples
	$(VENV)/bin/psfleet-launch --servers $(SERVERS) --workers $(WORKERS) $(LAUNCH) examples/flights.py $(ARGS)

serve: $(VENV)/.has-examples
	$(VENV)/bin/python -m pip install --quiet --editable ".[serve]"
	$(VENV)/bin/psfleet-launch --servers $(SERVERS) --workers 1 $(LAUNCH) examples/serve_flights.py $(ARGS)

# Twice as many processes as cores, for many tests wait. Each takes tests from the others when it has none.
test: $(VENV)/.has-test $(VENV)/.has-torch
	$(VENV)/bin/python -m pytest -m "not long" --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-all: $(VENV)/.has-test $(VENV)/.has-torch
	$(VENV)/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

quick: $(VENV)/.has-test
	$(VENV)/bin/python -m pytest -m quick --numprocesses auto --dist worksteal $(ARGS)

OLDEST ?= .venv-oldest
OLDEST_TESTS ?= tests/wire tests/rules tests/optimizer/test_goldens.py tests/tables tests/cluster/test_runtime.py \
    tests/checkpoint tests/security/test_access.py tests/launch/test_job.py \
    tests/docs tests/metrics tests/mistakes tests/torch tests/examples
# This environment has the extra `test` alone: what needs PyTorch or another extra must skip by name. A file that
# imports one all the same fails when it is collected, so all are.
test-oldest: $(OLDEST)/.has-oldest
	mkdir -p build
	$(OLDEST)/bin/python -m pytest --quiet --quiet --collect-only >build/collected.txt || { cat build/collected.txt; exit 1; }
	PSFLEET_TEST_DOCS=1 $(OLDEST)/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal $(OLDEST_TESTS) $(ARGS)

$(OLDEST)/.has-oldest: pyproject.toml tools/install tools/oldest.txt
	PIP_CONSTRAINT=tools/oldest.txt tools/install $(OLDEST) test
	@touch $@

goldens: $(VENV)/.has-test
	$(VENV)/bin/python -m tests.checkpoint.goldens

check: $(VENV)/.has-dev build/mypy-without-torch.toml
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy $(without-torch)
	$(VENV)/bin/python tools/generate_stubs.py --check
	$(VENV)/bin/python tools/generate_settings.py --check
	$(VENV)/bin/python tools/generate_panels.py --check
	$(VENV)/bin/python tools/draw_diagrams.py --check
	$(VENV)/bin/python tools/check_docs.py
	$(VENV)/bin/python tools/check_docstrings.py

# What stands on PyTorch is checked where that is installed. Elsewhere its types are unknown to the rest.
without-torch = $(shell $(VENV)/bin/python -c "import torch" 2>/dev/null || \
    echo --exclude torch --exclude examples/models --config-file build/mypy-without-torch.toml)

build/mypy-without-torch.toml: pyproject.toml tools/without_torch.toml
	@mkdir -p build
	@cat $^ >$@

bench: $(VENV)/.has-test
	$(VENV)/bin/python benchmarks/run_all.py --short $(ARGS)

bench-kernels: $(VENV)/.has-test
	$(VENV)/bin/python benchmarks/kernels.py $(ARGS)

# Needs numba's CUDA target (pip install 'psfleet[cuda]') and a GPU, and says which of them is missing.
bench-gpu: $(VENV)/.has-test
	$(VENV)/bin/python benchmarks/gpu_figures.py $(ARGS)
	$(VENV)/bin/python benchmarks/gpu.py $(ARGS)
	$(VENV)/bin/python benchmarks/gpu_jobs.py $(ARGS)

# A peer that cannot be installed here is named as skipped.
bench-peers: $(VENV)/.has-test
	-$(VENV)/bin/python benchmarks/peers/environments.py
	$(VENV)/bin/python benchmarks/run_all.py --short --all-peers $(ARGS) w1_sparse w2_dense w3_ctr

SEEDS ?= 50
torture: $(VENV)/.has-test
	PSFLEET_TORTURE=$(SEEDS) $(VENV)/bin/python -m pytest -q -m "not docker" \
	    tests/protocol tests/recovery tests/chaos tests/benchmarks/test_dgc.py tests/kernels/test_cuda.py \
	    tests/fuzz/test_chains.py tests/http2/test_floods.py tests/observability/test_alerts_of_jobs.py tests/mutants \
	    tests/security/test_attacks.py $(ARGS)

MINUTES ?= 20
SEED ?= 1
soak: $(VENV)/.has-test
	$(VENV)/bin/python tools/soak.py $(MINUTES) $(SEED)

TESTS ?= tests/launch tests/cluster
repeat: $(VENV)/.has-test
	for run in $$(seq $(TIMES)); do \
	    echo "run $$run of $(TIMES)"; \
	    $(VENV)/bin/python -m pytest -q -x -m "not docker" $(TESTS) $(ARGS) || exit 1; \
	done

FUZZ_FRAMES ?= 1000000
FUZZ_FILES ?= 100000
FUZZ_SEED ?= $(shell date +%s)
fuzz: $(VENV)/.has-test
	FUZZ_FRAMES=$(FUZZ_FRAMES) FUZZ_FILES=$(FUZZ_FILES) FUZZ_SEED=$(FUZZ_SEED) \
	    $(VENV)/bin/python -m pytest -s -v tests/fuzz $(ARGS)

SECONDS ?= 60
fuzz-atheris: $(VENV)/.has-test
	$(VENV)/bin/python -m pip install --quiet atheris
	for kind in frames files; do \
	    $(VENV)/bin/python -m tests.fuzz.guided $$kind -max_total_time=$(SECONDS) || exit 1; \
	done

# Tables and servers that name no device have a simulated one, with little room; ARGS=--device-room=0: with no limit.
# What cannot apply to a device is skipped with its reason.
DEVICE_TESTS ?= tests/tables tests/shard tests/snapshots tests/recovery tests/standby
test-device: $(VENV)/.has-test
	NUMBA_ENABLE_CUDASIM=1 PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m pytest -p tests.tables.on_device \
	    --numprocesses $(JOBS) --dist worksteal $(DEVICE_TESTS) $(ARGS)
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m pytest -p tests.tables.on_disk \
	    --numprocesses $(JOBS) --dist worksteal tests/tables tests/shard tests/snapshots

# Needs an NVIDIA GPU; what tests without one use instead is in test-device and in tests/kernels/test_cuda.py.
test-gpu: $(VENV)/.has-test
	$(VENV)/bin/python -m tests.kernels.cuda_quick
	$(VENV)/bin/python -m tests.kernels.cuda_agreement
	$(VENV)/bin/python -m tests.tables.device_tables
	$(VENV)/bin/python -m tests.tables.device_rows
	$(VENV)/bin/python -m tests.tables.device_distinct
	PSFLEET_TEST_GPU=1 PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m pytest -p tests.tables.on_device --device-room=0 \
	    --numprocesses $(JOBS) --dist worksteal $(DEVICE_TESTS) $(ARGS)
	PSFLEET_TEST_GPU=1 PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m pytest -p tests.tables.on_device \
	    -p tests.torch.on_table_gpu --device-room=0 tests/torch/device_tensors.py $(ARGS)

# An engine that cannot be had is named as skipped. One process tests under Slurm and one on Ray, for each has a
# cluster, and one all else; these tests mostly wait.
test-engines: $(VENV)/.has-test
	-tools/install_engines
	-$(VENV)/bin/python -m pip install --quiet "ray>=2.30"
	-$(VENV)/bin/python -m pip install --quiet kubernetes-validate kubeflow-trainer-api
	$(MAKE) --jobs 3 --output-sync=target test-slurm test-ray test-hosts

ENGINE_TESTS = PSFLEET_TEST_ENGINES=1 PSFLEET_TEST_DOCKER=1 $(VENV)/bin/python -m pytest tests/agents
test-slurm test-ray: test-%: $(VENV)/.has-test
	$(ENGINE_TESTS) -k $* $(ARGS)

test-hosts: $(VENV)/.has-test
	$(ENGINE_TESTS) tests/launch/test_compose.py -k "not slurm and not ray" $(ARGS)

test-packages: $(VENV)/.has-test
	PSFLEET_TEST_PACKAGES=1 $(VENV)/bin/python -m pytest tests/packages $(ARGS)

# What the pages print is run here and not by `make test`: their scripts, completions and notebooks, and each
# benchmark once.
test-docs: $(VENV)/.has-test $(VENV)/.has-torch $(VENV)/.has-serve $(VENV)/.has-parquet
	PSFLEET_TEST_DOCS=1 $(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal \
	    tests/docs tests/notebooks tests/benchmarks tests/examples tests/torch/test_examples.py $(ARGS)

docs: $(VENV)/.has-docs test-docs
	$(VENV)/bin/python tools/draw_diagrams.py
	$(VENV)/bin/python tools/generate_settings.py
	$(VENV)/bin/python tools/generate_panels.py
	$(VENV)/bin/python tools/check_docs.py
	$(VENV)/bin/python tools/build_site.py

# An environment that only needs the extra docs builds it; nothing is run that the pages print.
site: $(VENV)/.has-docs
	$(VENV)/bin/python tools/build_site.py

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .mypy_cache .ruff_cache .pytest_cache psfleet-logs

# It is looked for again each time until there is one.
$(VENV)/.has-torch: $(VENV)/.has-test
	@tools/install_torch $(VENV)
	@! $(VENV)/bin/python -c "import torch" 2>/dev/null || touch $@

# What is installed is remembered by an empty file, so that the second time costs nothing.
$(VENV)/.has-%: pyproject.toml tools/install
	@tools/install $(VENV) $*
	@touch $@

# All paths are relative: the checkout may live under a path with spaces.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
RECORDS := $(VENV)/records

# Some CPUs advertise AMX without being able to run it; bf16 products then die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo check test test-all test-integrations test-integrations-fast lint types unit fast \
	faults long fuzz programs table browser docs wheel bench clean

# Two workers of pytest-xdist: most of the time ranks wait for each other. A worker gets whole files.
WORKERS ?= 2
PYTEST := $(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile
BUDGET_MINUTES := 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(READY)

demo: $(READY)
	$(PY) examples/demo.py

# Lint, types and unit tests: under 2 minutes on 2 cores.
check: lint types unit

# What CI runs: check and one variant of each distributed test, at most 12 minutes on 2 cores.
test: $(READY)
	@touch $(VENV)/.started
	$(MAKE) check
	@status=0; $(MAKE) fast || status=$$?; \
	$(PY) -m tests.budget --since $(VENV)/.started --minutes $(BUDGET_MINUTES) $(VENV)/unit.xml $(VENV)/fast.xml; \
	exit $$status

# Everything: all world sizes and configurations, long runs, examples, packaging, frameworks. About 40 minutes on 2 cores.
test-all: lint types $(READY)
	$(PYTEST) --ignore tests/integrations
	$(MAKE) test-integrations
	if command -v chromium > /dev/null; then $(MAKE) browser; fi

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

unit: $(READY)
	$(PYTEST) -m "not slow" --junitxml $(VENV)/unit.xml tests/unit

fast: $(READY)
	$(PYTEST) -m "not slow" --junitxml $(VENV)/fast.xml --ignore tests/unit --ignore tests/integrations tests

# Lightning, Transformers, Accelerate, PEFT and Ray Train from PyPI, without changing torch. A missing package is a failure.
INTEGRATIONS := $(VENV)/.integrations

$(INTEGRATIONS): $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[integrations,ray]"
	touch $(INTEGRATIONS)

test-integrations: $(INTEGRATIONS)
	ZEROSHARD_INTEGRATIONS=1 $(PYTEST) tests/integrations

# One training run and one resume per framework.
test-integrations-fast: $(INTEGRATIONS)
	ZEROSHARD_INTEGRATIONS=1 $(PYTEST) -m "not slow" tests/integrations

# Injects more than 500 faults, bit flips and delays into real jobs, and writes docs/faults.md: about 40 minutes on 2 cores.
# Deletes records of earlier runs first, except that of `make long`.
faults: $(READY)
	ZEROSHARD_RECORDS=$(RECORDS) $(PY) -m tests.support.fault_report --forget
	ZEROSHARD_KILLS=80 ZEROSHARD_FAULTS=2 ZEROSHARD_LOSSES=60 ZEROSHARD_RECORDS=$(RECORDS) $(PY) -m pytest tests/faults tests/distributed/test_timing_independence.py tests/distributed/test_consistency_check.py
	ZEROSHARD_RECORDS=$(RECORDS) $(PY) -m tests.support.fault_report

# Two runs of 20,000 steps with saves, loads, failures and added groups: about half an hour on 2 cores.
long: $(READY)
	ZEROSHARD_LONG=20000 ZEROSHARD_RECORDS=$(RECORDS) $(PY) -m pytest tests/faults/test_long_runs.py
	ZEROSHARD_RECORDS=$(RECORDS) $(PY) -m tests.support.fault_report

# Fuzzing: twenty times the examples of `make test`, then coverage-guided, if atheris can be installed.
fuzz: $(READY)
	ZEROSHARD_FUZZ=20 $(PY) -m pytest --timeout 3600 tests/fuzz
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[fuzz]"
	for target in metadata directory manifest serialization tensor_header safetensors; do $(PY) tests/fuzz/guided.py $$target --seconds 60 || exit 1; done

# Random training programs, compared with DDP and the plain optimizer; writes docs/programs.md from all recorded runs.
# Each run needs another seed: make programs SEED=2 COUNT=5000 MINUTES=60.
SEED ?= 1
COUNT ?= 5000
MINUTES ?= 60
programs: $(READY)
	$(PY) -m tests.programs --seed $(SEED) --count $(COUNT) --minutes $(MINUTES) --ranks 2,3 \
		--records $(RECORDS)/programs.jsonl --page docs/programs.md

# Tests the page of `zeroshard plan --html` in chromium: apt-get install chromium, or brew install chromium.
browser: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check "playwright>=1.49"
	ZEROSHARD_BROWSER=1 $(PY) -m pytest tests/unit/test_planner_browser.py

# Rewrites docs/optimizers.md: about a minute.
table: $(READY)
	ZEROSHARD_TABLE=write $(PY) -m pytest tests/distributed/test_optimizers.py

# Builds the site in site/. Warnings are errors, except a note of the theme's authors.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel: $(READY)
	$(PY) -m hatchling build

# Skips peers that cannot be installed. Does not change torch.
$(PEERS): $(READY)
	for peer in deepspeed fairscale; do \
		DS_BUILD_OPS=0 $(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)" $$peer \
			|| echo "$$peer could not be installed"; \
	done
	touch $(PEERS)

bench: $(PEERS)
	status=0; for part in dropin construction checkpoint muon mesh scaling labels breakdown peers; do $(PY) benchmarks/$$part.py || status=1; done; exit $$status

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis site dist

# Every path here is relative, so that the checkout may live under a path with spaces.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers

# Some CPUs advertise AMX without being able to run it; bf16 products then die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test lint types unit faults table bench clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(READY)

demo: $(READY)
	$(PY) examples/demo.py

test: lint types unit

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

unit: $(READY)
	$(PY) -m pytest

# Kills jobs while they save, some hundred times, and ranks while they train: about ten minutes.
faults: $(READY)
	ZEROSHARD_KILLS=160 ZEROSHARD_LOSSES=60 $(PY) -m pytest tests/faults

# Writes docs/optimizers.md anew: about a minute.
table: $(READY)
	ZEROSHARD_TABLE=write $(PY) -m pytest tests/ranks/test_optimizers.py

# A peer that cannot be installed here is left out of the comparison; torch stays what it is.
$(PEERS): $(READY)
	for peer in deepspeed fairscale; do \
		DS_BUILD_OPS=0 $(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)" $$peer \
			|| echo "$$peer could not be installed"; \
	done
	touch $(PEERS)

bench: $(PEERS)
	status=0; for part in dropin checkpoint muon mesh scaling peers; do $(PY) benchmarks/$$part.py || status=1; done; exit $$status

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

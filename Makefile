# Two commands do everything: `make demo` and `make test`. Both set up what they need, and work from any folder (make -C).
SHELL := /bin/bash
.DEFAULT_GOAL := help

ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
PYTHON ?= python3
VENV := $(ROOT)/.venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
MODEL := $(ROOT)/.cache/SmolLM2-135M-Instruct

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# GRID of the demo's actor job: one, dp2, pp2 or tp3. The default is the fastest on two cores (docs/performance.md).
GRID ?= pp2
RUN := $(if $(filter pp2,$(GRID)),demo,demo-$(GRID))
RANKS_one := 1
RANKS_dp2 := 2
RANKS_pp2 := 2
RANKS_tp3 := 3
OVERRIDES_pp2 := parallel.pipeline=2
OVERRIDES_tp3 := parallel.tensor=3

.PHONY: help setup grid demo pipeline test test-functions test-jobs test-cluster test-faults test-soak test-slurm lint docs clean

help:
	@echo "make demo [GRID=pp2|one|dp2|tp3]  align SmolLM2-135M with PPO and a served critic, on this machine"
	@echo "make pipeline                     SFT, reward model, PPO, critic-free RL and their evaluation, on this machine"
	@echo "make test                         run the tests"
	@echo "make test-faults                  run the longer ones of whole jobs: more grids, more faults"
	@echo "make test-soak                    64 clients at one critic job for eight minutes: latency and memory"
	@echo "make test-slurm                   whole runs on a real Slurm that the tests bring up: limits, preemption, lost nodes"
	@echo "make lint | docs | clean"

setup: $(READY)

$(READY): $(ROOT)/constraints.txt $(ROOT)/setup.py
	@$(PYTHON) $(ROOT)/tools/preflight.py $(ROOT)
	@echo "installing into $(VENV): some minutes"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(ROOT)/constraints.txt "torch==$$(sed -n 's/^torch==//p' $(ROOT)/constraints.txt)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(ROOT)/constraints.txt -e "$(ROOT)[dev,demo]"
	@touch $(READY)

$(MODEL)/model_config.yaml: | $(READY)
	$(PY) $(ROOT)/tools/smollm2.py --output_dir $(MODEL)

# Before anything is installed
grid:
	@test -n "$(RANKS_$(GRID))" || { echo "make: GRID=$(GRID) is not one of pp2, one, dp2, tp3" >&2; exit 2; }

demo: grid $(READY) $(MODEL)/model_config.yaml
	@if test -z "$(DEMO_ARGS)$(ACTOR_ARGS)$(CRITIC_ARGS)" && grep -qs '"complete": true' $(ROOT)/runs/$(RUN)/run.json; then \
		echo "runs/$(RUN) is complete; its report: $(ROOT)/runs/$(RUN)/report.html (delete runs/$(RUN) to run it again)"; exit 0; fi; \
	cd $(ROOT) && $(PY) launch/local/ppo.py --actor-config demo_actor --critic-config demo_critic \
		--actor-ranks $(RANKS_$(GRID)) --critic-log runs/$(RUN)/logs/critic.out \
		--actor $(OVERRIDES_$(GRID)) $(ACTOR_ARGS) --critic $(CRITIC_ARGS) --both run.name=$(RUN) $(DEMO_ARGS)

# What is complete in runs/pipeline is not repeated
pipeline: $(READY) $(MODEL)/model_config.yaml
	@cd $(ROOT) && $(PY) launch/local/pipeline.py --model $(MODEL) $(PIPELINE_ARGS)

# Three parts at once, as tests of jobs and of a cluster mostly wait. The last check is of the settings that they have read.
test: $(READY)
	@cd $(ROOT) && $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@export ALIGNER_CONFIG_READS=$$(mktemp); trap 'rm -f "$$ALIGNER_CONFIG_READS"' EXIT; \
	$(MAKE) --no-print-directory -f $(ROOT)/Makefile -j3 -Otarget test-functions test-jobs test-cluster \
	&& cd $(ROOT) && ALIGNER_SUITE_PASSED=1 $(PY) -m pytest -q tests/unit/test_config_reads.py

test-functions: $(READY)
	@cd $(ROOT) && $(PY) -m pytest -q tests/unit tests/dist tests/gpu

test-jobs: $(READY)
	@cd $(ROOT) && $(PY) -m pytest -q tests/jobs

test-cluster: $(READY)
	@cd $(ROOT) && $(PY) -m pytest -q tests/slurm

test-faults: $(READY)
	cd $(ROOT) && $(PY) -m pytest -q -m faults tests/jobs

test-soak: $(READY)
	cd $(ROOT) && $(PY) -m pytest -q -s -m soak tests/jobs

test-slurm: $(READY)
	cd $(ROOT) && $(PY) -m pytest -q -m "slurm or not slurm" tests/slurm

lint: $(READY)
	cd $(ROOT) && $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

docs: $(READY)
	cd $(ROOT) && $(PY) -m aligner.config.docs docs/configuration.md

clean:
	rm -rf $(VENV) $(ROOT)/.cache $(ROOT)/build $(ROOT)/*.egg-info

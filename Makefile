# `make help` lists what is here.
# Variables count in both places, `make serve PORT=8001` and `PORT=8001 make serve`; serve says which
# it has from the environment. What throws work away is asked for in the command only.
PYTHON ?= python3
VARIANT ?=
MODEL ?=
PORT ?= 8000
KV ?= int4_kivi
ARGS ?=
export ARGS

variant = $(if $(VARIANT),--variant $(VARIANT))
force = $(if $(findstring command line,$(origin FORCE)),$(if $(FORCE),--force))
inherited = $(foreach v,MODEL PORT KV VARIANT ARGS,$(if $(filter environment,$(origin $v)),$v=$($v)))

.PHONY: help serve install wheel bundle template test machine-test soak bench gpu-test gpu-bench fetch apply refresh verify lock audit fuzz \
        rebase release docs clean
#: to use it
help:     ## this list
	@sed -n -e 's/^#: /\n/p' -e 's/^\([a-z-]*\): *## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

serve:    ## build, install and serve; MODEL= PORT=8000 KV=int4_kivi ARGS= VARIANT=cpu|cuda
	@:$(if $(strip $(inherited)),$(info s4kv: from the environment: $(strip $(inherited))))
	@$(PYTHON) build/serve.py --port '$(PORT)' --kv '$(KV)' $(if $(MODEL),--model '$(MODEL)') $(variant)

install:  ## build if an input changed, and install into .venv; VARIANT=
	@$(PYTHON) build/env.py install $(variant)

clean:    ## remove what was built; the cache, .venv, release/ and rebase/ stay
	rm -rf build-tree dist site s4kv_ext/*.so

#: to try and measure it
test:     ## lint, types and the test suite, about an hour on two cores; ARGS= for pytest
	@$(PYTHON) build/test.py

machine-test: ## the service and an instance as deploy/ makes them, five minutes; all of it as root
	@$(PYTHON) build/test.py -m machine tests/deploy

gpu-test: ## the tests that need a CUDA GPU; the last result is bench/results/gpu-test.txt
	@$(PYTHON) build/env.py install --variant cuda
	@.venv/bin/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA GPU here; the last result stays")'
	@VLLM_LOGGING_LEVEL=ERROR bash -o pipefail -c '.venv/bin/python -m pytest -s --tb=short -p no:warnings tests/gpu 2>&1 | tee build-tree/gpu-test.txt; \
	    done=$$?; [ $$done -gt 1 ] || cp build-tree/gpu-test.txt bench/results/; exit $$done'

soak:     ## 10,000 random schedules over the real scheduler, ten minutes; COUNT= SEED=
	@$(PYTHON) build/env.py install && \
	  .venv/bin/python tests/soak.py --count $(or $(COUNT),10000) --seed $(or $(SEED),0)

fuzz:     ## hostile requests to a server of its own, half an hour; COUNT=20000 SEED=1
	@$(PYTHON) build/env.py install --tests
	@S4KV_FUZZ_COUNT=$(or $(COUNT),20000) S4KV_FUZZ_SEED=$(or $(SEED),1) \
	  .venv/bin/python -m pytest -s tests/e2e/test_fuzz.py

audit:    ## look for known vulnerabilities of what is locked and installed; needs network
	@$(PYTHON) build/audit.py

bench:    ## measure fidelity and speed on this CPU, hours
	@$(PYTHON) build/bench.py cpu

gpu-bench: ## measure attention, the engine, sealing and starting on a CUDA GPU, under an hour
	@$(PYTHON) build/bench.py gpu

#: to change it
fetch:    ## get the pinned files through pip's index, verify and cache them
	@$(PYTHON) build/fetch.py

apply:    ## lay the patched vLLM checkout in vllm/src, one commit a patch; FORCE=1 drops edits
	@$(PYTHON) build/apply.py $(force)

refresh:  ## write the commits of vllm/src back to patches/
	@$(PYTHON) build/refresh.py

verify:   ## prove that the series is sound: applies, is complete, says why and until when
	@$(PYTHON) build/verify.py

rebase:   ## move the series to another vLLM on a branch, with a report; TO= REPORT=1 NOTESTS=1 FORCE=1
	@$(PYTHON) build/rebase.py $(or $(TO),$(error make rebase TO=0.26.0)) \
	  $(if $(REPORT),--report) $(if $(NOTESTS),--no-tests) $(force)

lock:     ## requirements/*.txt anew from *.in: files by sha256; UPGRADE=1 takes the newest
	@$(PYTHON) build/lock.py $(if $(UPGRADE),--upgrade)

template: ## copy deploy/aws/boot.sh into deploy/cfn-gpu-serving.yaml
	@$(PYTHON) build/template.py

docs:     ## site/: the documentation as web pages, every link checked
	@$(PYTHON) build/docs.py

#: to hand it on
wheel:    ## build dist/: the vllm wheel and its alias; VARIANT=cpu|cuda
	@$(PYTHON) build/wheel.py $(or $(VARIANT),cpu)

bundle:   ## dist/s4kv-VARIANT.tar for machines: the wheels and deploy/; VARIANT=cpu|cuda
	@$(PYTHON) build/bundle.py $(or $(VARIANT),cuda)

release:  ## release/VERSION: wheels built twice, hashes, SBOM, an index; VERSION=0.25.1+s4kv.1
	@$(PYTHON) build/release.py '$(or $(VERSION),$(error make release VERSION=0.25.1+s4kv.1))' $(variant) \
	  $(if $(AGAINST),--against '$(AGAINST)')

# make help lists what is here.
PYTHON ?= python3
VARIANT ?=

.PHONY: help fetch apply refresh verify
help:      ## this list
	@sed -n 's/^\([a-z-]*\): *.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

fetch:     ## get the pinned files through pip's index, verify and cache them
	@$(PYTHON) build/fetch.py

apply:     ## lay the patched vLLM checkout in vllm/src, one commit a patch
	@$(PYTHON) build/apply.py $(if $(FORCE),--force)

refresh:   ## write the commits of vllm/src back to patches/
	@$(PYTHON) build/refresh.py

wheel:     ## build dist/: the vllm wheel and its alias; VARIANT=cpu or cuda
	@$(PYTHON) build/wheel.py $(or $(VARIANT),cpu)

install:   ## build if an input changed, and install into .venv
	@$(PYTHON) build/env.py install $(if $(VARIANT),--variant $(VARIANT))

.PHONY: wheel install

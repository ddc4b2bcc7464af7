# The verbs of this repository. Everything runs out of .venv, which is made on first use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo serve test lint bench sanitize clean

VENV := .venv
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip
# What of pip's output says that it goes on, and all of it from the reason for which it cannot.
PROGRESS := sed -u -n -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^Installing collected.*/  installing/p' -e '/^The conflict is/,$$p'
# torch out of PyPI needs the triton that it was built with and brings it. A CPU build needs none and gets this: the GPU
# host's, so that kernels compile here as they do there.
TRITON := triton==3.6.0
ARGS ?=

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

demo: $(STAMP) ## start a real Triton server, stream several prompts at once, show it, stop
	@$(VENV)/bin/cb-backend demo $(ARGS)

serve: $(STAMP) ## serve model_repository/ in the foreground (ARGS="--model PATH_OR_ID" for another model)
	@$(VENV)/bin/cb-backend serve $(ARGS)

# Some minutes on a CPU: the demo's model, two batch sizes, sixteen requests.
STUDY := --model HuggingFaceTB/SmolLM2-135M-Instruct --input-len uniform:16:128 --output-len uniform:8:128 \
  --num-requests 16 --max-num-seqs 4,8 --max-num-batched-tokens 128 --no-confirm
bench: $(STAMP) ## what a model does under measured traffic, in process (ARGS="--help" for your own traffic and model)
	@$(VENV)/bin/cb-backend study $(or $(ARGS),$(STUDY))

BESIDE := $(addprefix tests/,kernels models simulation kv_cache mutation unit cli serving client deploy)
BESIDE_TOO := $(addprefix tests/,engine llm study parallel docs front_end scheduler)
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -m "not gpu and not race and not long" -o faulthandler_timeout=180
# Without ARGS the rooms of BESIDE and BESIDE_TOO run beside the others, which wait for their servers half of the time;
# their reports come last.
test: lint ## lint, then the tests that need no GPU and less than half a minute each
ifeq ($(strip $(ARGS)),)
	@folder=$$(mktemp -d); rooms() { code=0; for room in "$$@"; do $(PYTEST) $$room || code=$$?; done; return $$code; }; \
	rooms $(BESIDE) > "$$folder/log" 2>&1 & beside=$$!; \
	rooms $(BESIDE_TOO) > "$$folder/log_too" 2>&1 & beside_too=$$!; \
	trap 'kill $$beside $$beside_too 2> /dev/null || true; rm -rf "$$folder"' EXIT; code=0; \
	$(PYTEST) $(patsubst %,--ignore=%,$(BESIDE) $(BESIDE_TOO)) || code=$$?; \
	wait $$beside || code=$$?; wait $$beside_too || code=$$?; cat "$$folder/log" "$$folder/log_too"; exit $$code
else
	@$(PYTEST) $(ARGS)
endif

lint: $(STAMP) ## ruff, mypy, import contracts
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

# Without --error-exitcode what compute-sanitizer finds would not fail the target.
sanitize: $(STAMP) ## on a GPU host: an engine under random requests and cancels, every access of its kernels checked
	@type -P compute-sanitizer >/dev/null || \
	  { echo "error: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2; exit 1; }
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "error: no CUDA device is visible to torch; sanitize needs a GPU" >&2; exit 1; }
	@compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(VENV)/bin/python -m tests.engine.soak --device cuda --seconds 20 $(ARGS)

clean: ## remove .venv and what tools leave behind
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The first suitable interpreter, or the one named by PYTHON=... What is never imported need not be compiled: half a minute
# of torch alone.
$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.12 python3.11 python3.10 none; do \
	  if [ $$python = none ]; then \
	    echo "error: no Python 3.10 to 3.12 found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	  if $$python -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then break; fi; \
	done; \
	echo "making $(VENV) with $$($$python --version) (a few minutes, once)"; \
	$$python -m venv $(VENV)
	@$(PIP) install --no-compile -c constraints.txt torch | $(PROGRESS)
	@$(PIP) install --no-compile -c constraints.txt $$($(PIP) show -qq triton || echo '$(TRITON)') -e '.[local-server,test]' | $(PROGRESS)
	@touch $(STAMP)

# Each target sets up .venv by itself the first time; nothing needs to be activated.

PYTHON ?= python3
READY := .venv/.ready
export OMP_NUM_THREADS := 1

.PHONY: help demo test test-all test-torch check lab notebooks paper bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## train on three ranks, tell and draw who sent what to whom; files go to demo-out/
	.venv/bin/dlearn demo --out demo-out
	@echo "The demo's files are in $(CURDIR)/demo-out"

test: $(READY)  ## run the quick tests
	.venv/bin/python -m pytest

test-all: $(READY)  ## run all tests, the slow ones too
	.venv/bin/python -m pytest -m ""

test-torch:  ## run the quick tests with another torch, in a .venv of its own: make test-torch VERSION=2.11.0
	@[ -n "$(VERSION)" ] || { echo "Say which torch: make test-torch VERSION=2.11.0" >&2; exit 1; }
	@echo "Python, torch $(VERSION) and the tests' packages go to $(OTHER). That needs 8 GB (CUDA comes with torch);" \
		"remove the folder when you are done."
	@[ -x $(OTHER)/bin/python ] || $(PYTHON) -m venv $(OTHER)
	@grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt  # each torch asks for its own
	$(OTHER)/bin/python -m pip install -c $(OTHER)/constraints.txt torch==$(VERSION) -e ".[lab,mpi,dev,browser,programs]"
	$(OTHER)/bin/python -m pytest

OTHER = .venv-torch-$(VERSION)-$(notdir $(PYTHON))

check: $(READY)  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict dlearn

lab: $(READY)  ## open the quickstart in JupyterLab, reachable from this machine only
	.venv/bin/jupyter trust notebooks/*.ipynb
	.venv/bin/jupyter lab --ip=127.0.0.1 --ServerApp.root_dir=. $(allow_root) notebooks/quickstart.ipynb

notebooks: $(READY)  ## execute all notebooks again and save them with their outputs; draw the README's gallery
	.venv/bin/python notebooks/build.py
	.venv/bin/python -m dlearn.lessons.gallery --out docs/pictures

paper: $(READY)  ## run the claims of the paper on DDP again; figures and verdicts go to docs/ddp_paper/
	.venv/bin/python -m dlearn.lessons.ddp_paper --out docs/ddp_paper

bench: $(READY)  ## run every benchmark, one after the other
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; .venv/bin/python "$$file"; done

clean:  ## remove .venv (test-torch's too), demo-out and caches; recorded runs in .dlearn stay
	rm -rf .venv .venv-torch-* demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Jupyter wants to be told that root is meant, as in a container.
allow_root = $(if $(filter 0,$(shell id -u)),--allow-root)

# `.unfinished` stands while a set-up runs. Found by the next one, it means that the last was cut off: start afresh.
$(READY): pyproject.toml constraints.txt tools/install_torch.py
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "dlearn needs Python 3.11 or newer with its venv module, and $(PYTHON) is not that:" \
			"install one (Debian, Ubuntu: python3-venv too) or name it, as in PYTHON=python3.12 make demo." >&2; \
		exit 1; }
	@if [ -e .venv/.unfinished ]; then echo "The last set-up was cut off, starting afresh."; rm -rf .venv; fi
	@mkdir -p .venv
	@touch .venv/.unfinished
	@[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	.venv/bin/python tools/install_torch.py
	.venv/bin/python -m pip install -c constraints.txt -e ".[lab,mpi,dev,browser,programs]"
	@touch $@
	@rm .venv/.unfinished

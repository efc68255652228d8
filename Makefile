# Each target sets up what it needs in .venv the first time, stage by stage; nothing needs to be activated.

PYTHON ?= python3
export OMP_NUM_THREADS := 1

.PHONY: help demo test test-all test-defects test-torch test-elsewhere gpu check lab notebooks course site paper bench clean
.NOTPARALLEL:  # two stages at once would write into the same .venv

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/.demo  ## train on three ranks, tell and draw who sent what to whom; files go to demo-out/
	.venv/bin/dlearn demo --out demo-out
	@echo "The demo's files are in $(CURDIR)/demo-out"

lab: .venv/.lab  ## open the lessons in JupyterLab, on this machine only; your work in lab/ stays
	.venv/bin/python course/build.py --students lab
	.venv/bin/jupyter lab --ip=127.0.0.1 --ServerApp.root_dir=lab $(allow_root) lab/01-quickstart.ipynb

test: .venv/.test  ## run the quick tests
	$(call with_times,$(pytest) $(three_at_once))

test-all: test .venv/.test-all  ## run all tests, the slow ones too
	$(call with_times,$(pytest) -m "slow and not alone" -n 3 --dist worksteal && $(pytest) -m "slow and alone")

test-defects: .venv/.test .venv/.test-all  ## put one deliberate defect after the other into a copy: does a test tell?
	.venv/bin/python tests/defects.py

test-torch:  ## run the quick tests with another torch, in a .venv of its own: make test-torch VERSION=2.11.0
	@[ -n "$(VERSION)" ] || { echo "Say which torch: make test-torch VERSION=2.11.0" >&2; exit 1; }
	@echo "Python, torch $(VERSION) and the tests' packages go to $(OTHER). That needs 8 GB (CUDA comes with torch);" \
		"remove the folder when you are done."
	@[ -x $(OTHER)/bin/python ] || $(PYTHON) -m venv $(OTHER)
	@grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt  # each torch asks for its own
	$(OTHER)/bin/python -m pip install --quiet --upgrade pip
	$(OTHER)/bin/python -m pip install -c $(OTHER)/constraints.txt torch==$(VERSION) -e ".[notebook,mpi]" --group test
	$(OTHER)/bin/python -m pytest $(three_at_once)

test-elsewhere:  ## run the quick tests on a copy with another path, host name, clock, time zone, locale and umask
	tools/test_elsewhere.sh

OTHER = .venv-torch-$(VERSION)-$(notdir $(PYTHON))

gpu: .venv/.test  ## run what one GPU can show of NCCL and CUDA; without one, every test skips and says so
	.venv/bin/python -m pytest tests/gpu

check: .venv/.check  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict dlearn

notebooks: .venv/.notebooks  ## execute all notebooks again and save them with their outputs; draw the README's gallery
	.venv/bin/python notebooks/build.py
	.venv/bin/python -m dlearn.lessons.gallery --out docs/pictures

course: .venv/.notebooks  ## write a course's notebooks to course-out/: students' without answers, a teacher's
	.venv/bin/python course/build.py --out course-out

site: .venv/.site  ## write the course as a site to site-out/html: lessons, questions, glossary, guide; works offline
	.venv/bin/python course/make_site.py --out site-out

paper: .venv/.notebooks  ## run the claims of the paper on DDP again: the lesson ddp_paper, with its figures and verdicts
	.venv/bin/python notebooks/build.py ddp_paper

bench: .venv/.bench  ## run every benchmark, one after the other
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; .venv/bin/python "$$file"; done

clean:  ## remove .venv (test-torch's too), *-out and caches; lab and recorded runs in .dlearn stay
	rm -rf .venv .venv-torch-* demo-out course-out site-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Jupyter wants to be told that root is meant, as in a container.
allow_root = $(if $(filter 0,$(shell id -u)),--allow-root)

pytest = .venv/bin/python -m pytest

# Tests wait for their ranks a part of the time. Those that measure, or load the machine, are marked and run alone.
three_at_once = -n 3 --dist loadfile

# Run it, then say how long the set-up before it took, once; its exit status is make's.
with_times = @$(1); status=$$?; \
	echo "Set-up, done once: $$(cat .venv/.demo) s for the demo, $$(cat .venv/.$@) s more for $@."; exit $$status

# pip would compile all of torch, file after file, for half a minute. What is imported is a quarter of it: Python
# compiles that when it is first used, where the environment does not forbid it.
export PYTHONDONTWRITEBYTECODE :=
pip_install := .venv/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation

# `.unfinished` holds the second at which a stage began, and stands until its end. Found by the next `make`, it means
# that a set-up was cut off: as a new prerequisite it makes the first stage old, which starts afresh.
begin = date +%s > .venv/.unfinished
end = echo "$$(($$(date +%s) - $$(cat .venv/.unfinished)))" > $@; rm .venv/.unfinished; echo "Done in $$(cat $@) s."

.venv/.demo: pyproject.toml constraints.txt tools/install_torch.py $(wildcard .venv/.unfinished)
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "dlearn needs Python 3.11 or newer with its venv module, and $(PYTHON) is not that:" \
			"install one (Debian, Ubuntu: python3-venv too) or name it, as in PYTHON=python3.12 make demo." >&2; \
		exit 1; }
	@if [ -e .venv/.unfinished ]; then echo "The last set-up was cut off, starting afresh."; rm -rf .venv; fi
	@echo "Setting up .venv (1.1 GB), in three steps. 1: torch"
	@mkdir -p .venv; $(begin)
	@[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	@.venv/bin/python tools/install_torch.py --no-compile
	@echo "2: dlearn, numpy, matplotlib and what they need (50 MB to fetch)"
	@$(pip_install) --no-compile -e .
	@echo "3: import and compile them"
	@.venv/bin/python -c "import dlearn.cluster.rank, dlearn.lessons.demo, torch._dynamo"
	@$(end)

.venv/.lab: what = JupyterLab, widgets, pandas, MPI (75 MB to fetch)
.venv/.lab: packages = -e ".[lab,mpi]"
.venv/.test: what = pytest and what the quick tests use (55 MB to fetch)
.venv/.test: packages = -e ".[notebook,mpi]" --group test
.venv/.test-all: what = JupyterLab, a browser's driver, other people's programs (140 MB to fetch)
.venv/.test-all: packages = -e ".[lab,mpi]" --group test-all
.venv/.check: what = ruff and mypy (27 MB to fetch)
.venv/.check: packages = --group check
.venv/.notebooks: what = what executes notebooks (45 MB to fetch)
.venv/.notebooks: packages = -e ".[notebook,mpi]" --group notebooks
.venv/.site: what = what makes the site (20 MB to fetch)
.venv/.site: packages = --group site
.venv/.bench: what = what the benchmarks compare with (21 MB to fetch)
.venv/.bench: packages = --group bench

.venv/.lab .venv/.test .venv/.test-all .venv/.check .venv/.notebooks .venv/.site .venv/.bench: .venv/.demo
	@echo "Adding to .venv: $(what)"
	@$(begin)
	@$(pip_install) $(packages)
	@$(end)

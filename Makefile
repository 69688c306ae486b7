# The commands of the lab. `make` alone lists them. Needs GNU make (3.81 is enough), bash and a
# Python >= 3.11; everything else is installed into .venv by scripts/setup.sh.
#
#   TORCH=cpu|cuda   which build of PyTorch (default: cuda where there is an NVIDIA driver)
#   PYTHON=...       the Python that makes .venv (default: the first good one on the PATH); where
#                    .venv is of another version, it is replaced
#   ARGS=...         passed on, as in `make lab ARGS=--no-browser`
#   PY=python        use the active environment (conda, say) instead of .venv, as it is
#   WORK=folder      where `make lab` keeps your copies of the notebooks (default: work)

PY = .venv/bin/python
VENV_PY = .venv/bin/python
LABSUPPORT = $(PY) -m labsupport.cli
WORK = work

# Variables that would let packages from outside .venv in, or make each process compile them anew.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export TORCH PYTHON

# Some tests call make themselves; what this one was given (ARGS, say) is not meant for those.
PYTEST = env -u MAKEFLAGS -u MAKELEVEL -u ARGS $(PY) -m pytest
# Four workers pay off; more would only multiply the seconds that importing torch takes.
# What the tests of a file share (a trained model, a pool of processes) is made once.
WORKERS = -n auto --maxprocesses 4 --dist loadfile --durations 10
# The notebooks: every cell runs, and the outputs of those that say so are compared.
NBVAL = --nbval-lax --nbval-current-env
# A program without a module, so it is found beside the Python that it was installed with.
TYPOS = $(if $(findstring /,$(PY)),$(dir $(PY)))typos

# Terms and words of all texts: a static check, so `make test` has run it before the other tests.
WORDS = tests/texts/test_terms.py

.PHONY: help lab fetch book test test-all test-gpu test-browser static notebook-tests notebooks \
	pictures screenshots format constraints links test-versions setup clean
.NOTPARALLEL:

help:
	@echo "make lab          open the notebooks in JupyterLab (your copies, in work/)"
	@echo "make fetch        fetch the models of the notebooks (\`make lab\` does it too)"
	@echo "make test         everything that must hold before a change is handed in: minutes"
	@echo "make test-all     the same, then the slow tests"
	@echo "make test-gpu     what only a GPU can run, with a table at the end: minutes"
	@echo "make test-browser the lab and the book in a real browser (installs Chromium if there is none)"
	@echo "make book         theory and notebooks as a web site, in build/book"
	@echo "make notebooks    run the notebooks and store their outputs   (maintainers)"
	@echo "make pictures     draw the pictures of the README and of theory/   (maintainers)"
	@echo "make screenshots  take the README's pictures of JupyterLab   (maintainers)"
	@echo "make format       format the code, and carry edits of .py twins into the notebooks"
	@echo "make constraints  resolve all versions again into constraints.txt   (maintainers)"
	@echo "make links        follow the links that leave the project   (maintainers)"
	@echo "make test-versions  the tests with the oldest and the newest versions   (maintainers)"
	@echo "make clean        remove .venv and caches; work/ is kept"
	@echo
	@echo "The first run installs what is needed into .venv. Options: TORCH=cpu|cuda, PYTHON=..., ARGS=..."

setup:
	@[ "$(PY)" != "$(VENV_PY)" ] || scripts/setup.sh

lab: setup
	@exec $(LABSUPPORT) lab --folder "$(WORK)" $(ARGS)

# The models that notebooks and tests load: about 200 MB, once.
fetch: setup
	@$(LABSUPPORT) fetch --quiet

test: setup fetch static
	$(PYTEST) $(WORKERS) -m "not slow and not browser" $(NBVAL) --ignore $(WORDS) \
		--ignore notebooks/further tests notebooks $(ARGS)

test-all: test
	$(PYTEST) $(WORKERS) -m "slow and not browser" tests $(ARGS)
	$(PYTEST) $(WORKERS) $(NBVAL) notebooks/further $(ARGS)

# `make test-gpu PY=python3` where the environment is there already.
test-gpu: setup
	@$(PY) scripts/gpu_tests.py $(ARGS)

# Chromium comes from the system; see scripts/chromium.sh.
test-browser: setup fetch
	@$(MAKE) --no-print-directory book ARGS=
	@PY="$(PY)" scripts/extra.sh browser
	CHROMIUM="$$(PY="$(PY)" scripts/chromium.sh)" $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m browser tests/browser $(ARGS)

# While it looks at JupyterLab anyway, the test keeps what the README shows of it, in docs/.
screenshots: setup fetch
	@PY="$(PY)" scripts/extra.sh browser
	CHROMIUM="$$(PY="$(PY)" scripts/chromium.sh)" $(PYTEST) -m browser --screenshots $(ARGS) \
		tests/browser/test_explorer.py tests/browser/test_run_all.py

# A warning is an error; `make book ARGS="-b linkcheck"` asks the outside addresses.
book: setup
	@PY="$(PY)" scripts/extra.sh book
	$(PY) -m book $(ARGS)

static:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check --python-interpreter-path $(PY)
	$(TYPOS)
	$(PYTEST) -q $(WORDS)

notebook-tests:
	$(PYTEST) $(WORKERS) $(NBVAL) notebooks

notebooks: setup fetch
	$(PY) scripts/notebooks.py run $(ARGS)

pictures: setup
	$(PY) scripts/pictures $(ARGS)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) scripts/notebooks.py sync

# Begins without .venv: setup would install pins that pyproject.toml may exclude by now.
constraints:
	scripts/constraints.sh $(if $(filter-out $(VENV_PY),$(PY))$(wildcard $(VENV_PY)),$(PY))

links: setup
	@PY="$(PY)" scripts/extra.sh book
	$(PY) -m book -b linkcheck $(ARGS)

# ARGS=lowest or ARGS=newest: one of the two.
test-versions:
	scripts/versions.sh $(ARGS)

clean:
	@if [ -e .venv ] && [ ! -e .venv/.made-by-setup ]; then \
		echo ".venv was not made by make: left as it is"; else rm -rf .venv; fi
	rm -rf .pytest_cache .ruff_cache dist build
	find . -path ./work -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d \
		-prune -exec rm -rf {} +

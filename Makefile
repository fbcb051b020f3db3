# Every target does its own set-up on a fresh clone: .venv is made once, and again when the pinned versions change.
# Those have wheels for these Pythons.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c '$(FITS)' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOSTED := .colab/.installed
EXTRAS := .extras/.installed
VASTAI := .vastai/.installed
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it, and every process would compile its thousands of modules anew: ten seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow abuse lab check clean help
help:
	@echo "make demo    train a small operator on this machine and print what it reached (about 5 minutes)"
	@echo "make lab     open the notebooks in JupyterLab"
	@echo "make check   ruff and the repository's own rules (seconds)"
	@echo "make test    check, then the tests and all notebooks (about 15 minutes)"
	@echo "make slow    tests of several ranks and machines, in a browser, of whole searches (8 minutes more)"
	@echo "make abuse   tests of minutes, and every damaged file and killed run, of which make test takes a tenth"
	@echo "make clean   remove .venv and caches; data and outputs stay"

demo: $(STAMP) compiler
	$(BIN)/python -m upsnb run notebooks/01_train.ipynb -f params/quick.yaml

# With its own defaults (notebooks/.jupyter): saved every few seconds, so that a reloaded page finds what it showed.
lab: $(STAMP) compiler
	JUPYTER_CONFIG_PATH="$(CURDIR)/notebooks/.jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" $(BIN)/jupyter lab \
		--notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/test_repository.py

# Fast tests first: most mistakes show within a minute. Many start processes of their own and wait for them, so three at
# a time on fewer cores. tests/notebooks/smoke.py puts params/smoke.yaml below a notebook's parameters; nbval's limit is
# one per cell, and like pytest's against hangs alone.
# A file stays on one worker, where its tests share a run (pytest 9.2 takes xdist's groups back); in the folders' order,
# because by the number of tests the longest files would begin last.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || sysctl -n hw.ncpu); echo $$((cores > 3 ? cores : 3)))
BY_FILE := --dist loadfile --no-loadscope-reorder
# What one test has compiled the next one finds; without this each run compiles for its own folder of runs.
test slow: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.pytest_cache/compiled
# Threads that wait for each other sleep: there are more processes than cores.
test slow: export OMP_WAIT_POLICY := passive
test: compiler $(EXTRAS) $(VASTAI)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/test_repository.py tests -m "not slow and not long" -n $(WORKERS) $(BY_FILE)
	PYTHONPATH="$(CURDIR)" .extras/bin/python -m pytest -q tests/extras -n 2 $(BY_FILE)
	$(if $(NOTEBOOKS),PYTHONPATH=tests/notebooks $(BIN)/python -m pytest -v -p smoke --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=1800 --timeout=0 -n 3 $(BY_FILE) $(NOTEBOOKS))

slow: compiler $(HOSTED) $(VASTAI)
	$(BIN)/python -m pytest -q tests -m "slow and not long" -n 3 $(BY_FILE) --durations=10

# `make abuse ABUSE=20-39` is a piece of it: the files and kills that are drawn from the seeds 20 to 39.
abuse: $(STAMP) compiler
	$(if $(ABUSE),,$(BIN)/python -m pytest -q tests -m long -n 2 $(BY_FILE) --durations=10)
	ABUSE=$(or $(ABUSE),0-) $(BIN)/python -m pytest -q -s tests/abuse

clean:
	rm -rf $(VENV) .colab .extras .vastai *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

.PHONY: compiler
compiler:
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || \
		echo "No C++ compiler (g++ or clang++) found: torch.compile on the CPU will not work until one is installed."

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(FITS)' || { \
		echo "Python 3.11 to 3.14 is needed, and $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1)." \
		"Install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv."; exit 1; }

# --no-compile: Python compiles what it imports, and of these packages that is the smaller part.
$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing the pinned packages into $(VENV) (once; torch alone is large)"
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[lab,test]'
	@touch $@

# What Colab preinstalls, and what the extras neuralop and optuna need, each in front of .venv's other packages; built
# on that Python, because they take its torch. Without a pip of their own: installing one takes longer than these.
$(HOSTED) $(EXTRAS): .%/.installed: tests/%/pins.txt $(STAMP)
	@echo "Making .$* with the versions of tests/$*/pins.txt (once)"
	@rm -rf .$*
	@$(BIN)/python -m venv --without-pip .$*
	$(BIN)/python -m pip --python .$*/bin/python install --quiet --no-compile --no-deps -r $<
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(.$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_rest.pth"
	@touch $@

# Vast.ai's own command, apart from all else: it pins many packages. `python -m upsnb cloud` calls it.
$(VASTAI): $(BIN)/python
	@echo "Making .vastai (once)"
	@$(PYTHON) -m venv .vastai
	.vastai/bin/python -m pip install --quiet --no-compile vastai==1.9.1
	@touch $@

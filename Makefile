# Two commands: `make book`, `make test`. Nothing but make and a Python between 3.11 and 3.13 is needed.
# Written for any POSIX sh and for GNU make from 3.81 on, which is what macOS has.

VENV := .venv
BARE := .venv-bare
BIN := $(VENV)/bin
PY := $(BIN)/python
NODE := tests/js/node_modules
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

# The first Python in range wins; `make PYTHON=/path/to/python book` overrides.
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; exit; }; done)

.DEFAULT_GOAL := help
.PHONY: help book chapter test lab bench lint scripts screenshots clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

book: $(VENV)/.book ## execute every chapter and build the site: _build/html/index.html
	@$(PY) _ext/make_book.py

chapter: $(VENV)/.book ## one chapter alone, executed and built in seconds: make chapter N=03
	@$(PY) _ext/make_book.py "$(N)"

test: $(VENV)/.tests $(BARE)/.ready $(NODE)/.installed book ## every test, in a browser, too; THOROUGH=1 tries all there is
	@$(PY) tests/book/chromium.py --install
	@PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $$($(PY) -c 'import os; print((os.cpu_count() or 1) + 1)') $(PYTEST)

lab: $(VENV)/.tests ## the chapters as notebooks, in JupyterLab
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@printf '%s\n' \
		'{"@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Jupytext Notebook", "myst": "Jupytext Notebook"}},' \
		'"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' \
		> $(VENV)/share/jupyter/lab/settings/overrides.json
	@echo "Double-click a chapter: it opens as a notebook, with its answers folded, and is saved as Markdown."
	@PYTHONPATH=_ext $(PY) -m jupyterlab --ServerApp.contents_manager_class=wherebook.lab.Pages --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/chapters $(LAB)

bench: $(VENV)/.tests ## speed and size, each against its bar; ROWS="record ddp" for some of it
	@$(PY) -m benchmarks $(ROWS)

lint: $(VENV)/.tests $(NODE)/.installed ## ruff and mypy, tsc and eslint, and what reads the workflow of CI
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) tests/js/scripts.py --check
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/book.yml
	@$(BIN)/zizmor --offline --pedantic --no-progress --quiet .github/workflows/book.yml

scripts: $(VENV)/.tests ## the page's scripts, from accumviz/*/js into the files that pages carry
	@$(PY) tests/js/scripts.py

screenshots: $(VENV)/.tests book ## each widget, state and screenful, into screenshots/; and README's picture anew
	@$(PY) tests/book/chromium.py --install
	@$(PY) tests/book/screenshots.py

clean: ## forget the built book, the recorded outputs and the environment
	rm -rf _build $(VENV) $(BARE) $(NODE) screenshots

# An environment is trusted only if the last run that changed it came to its end in this very folder:
# an interrupted pip leaves packages that look installed and are not.
$(VENV)/.python: FORCE
	@if [ -n "$$($(PY) -c '$(SUPPORTED)' >/dev/null 2>&1 && $(PY) -m pip --version 2>/dev/null)" ] \
		&& [ ! -e $(VENV)/.unfinished ] \
		&& { [ ! -e $@ ] || [ "$$(cat $@)" = "$(CURDIR)" ]; }; then \
		[ -e $@ ] || echo "$(CURDIR)" > $@; exit 0; fi; \
	if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then \
		echo "The book needs Python 3.11, 3.12 or 3.13." >&2; \
		echo "Found: $$("$(or $(PYTHON),python3)" --version 2>&1 || true)" >&2; \
		echo "Install one of them, or name it: make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),book)" >&2; \
		exit 1; fi; \
	echo "Creating $(VENV) with $$("$(PYTHON)" --version)"; \
	rm -f $(VENV)/.book $(VENV)/.tests; \
	"$(PYTHON)" -m venv --clear $(VENV) || { \
		echo "This Python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	echo "$(CURDIR)" > $@
FORCE:

# setuptools is pinned with the rest, so the editable install needs no download of its own
$(VENV)/.book: $(VENV)/.python requirements.txt pyproject.toml
	@echo "Installing requirements.txt (torch is the large one)"
	@touch $(VENV)/.unfinished
	@$(PIP) -r requirements.txt
	@$(PIP) --no-build-isolation --no-deps --editable .
	@rm $(VENV)/.unfinished
	@touch $@

$(VENV)/.tests: $(VENV)/.book tests/requirements.txt
	@echo "Installing tests/requirements.txt"
	@touch $(VENV)/.unfinished
	@$(PIP) -r tests/requirements.txt
	@rm $(VENV)/.unfinished
	@touch $@

# Node comes with tests/requirements.txt
$(NODE)/.installed: $(VENV)/.tests tests/js/package-lock.json
	@echo "Installing tests/js/package-lock.json"
	@$(PY) tests/js/scripts.py --install
	@touch $@

# a runtime such as Colab's, for the notebooks that readers download
$(BARE)/.ready: $(VENV)/.tests tests/notebooks/requirements.txt tests/notebooks/bare.py
	@echo "Installing tests/notebooks/requirements.txt into $(BARE)"
	@$(PY) -m venv --clear $(BARE)
	@$(BARE)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r tests/notebooks/requirements.txt
	@$(PY) tests/notebooks/bare.py $(BARE)
	@MPLCONFIGDIR=$(BARE)/matplotlib $(BARE)/bin/python -c "import matplotlib.font_manager"
	@touch $@

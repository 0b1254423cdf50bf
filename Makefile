# The course's commands. `make lab` and `make test` set up all they need, from nothing but Python 3.11 or newer:
# a virtual environment in .venv, made again when pyproject.toml changes. `make help` lists the rest.

PYTHON ?=
PIP_ARGS ?=
PORT ?= 8888
LAB_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 2
NB ?=
BENCH ?=

VENV_PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
LOOK_FOR := python3 python3.14 python3.13 python3.12 python3.11 python
quote = '$(subst ','\'',$(1))'

# A kernel that inherits MPLBACKEND=Agg shows no figures.
unexport MPLBACKEND

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help lab test check run notebooks bench setup force

help:
	@echo 'make lab        open the chapters in JupyterLab      PORT=8888  LAB_ARGS=...'
	@echo 'make test       run the tests and all notebooks      TEST_ARGS="-k ring"'
	@echo 'make check      ruff and mypy'
	@echo 'make run        run the chapters headless and write them as a web site into build/   NB=...'
	@echo 'make notebooks  run the chapters in place, and clean them                            NB=...'
	@echo 'make bench      time the course beside PyTorch itself                                BENCH="ring --json -"'
	@echo
	@echo 'Each sets up .venv first. PYTHON=python3.12 chooses the interpreter, PIP_ARGS=... goes to pip.'

lab: $(INSTALLED)
	@flags=; \
	if [ "$$(id -u)" = 0 ]; then flags='--allow-root'; fi; \
	if [ "$$(uname)" = Linux ] && [ -z "$$DISPLAY$$WAYLAND_DISPLAY$$BROWSER" ]; then \
	  flags="$$flags --no-browser"; \
	  echo 'There is no display here: open the address with the token, below, in a browser.'; \
	fi; \
	exec $(VENV_PYTHON) -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.port=$(PORT) \
	  --LabApp.default_url=/lab/tree/notebooks $$flags $(LAB_ARGS)

# Without TEST_ARGS everything, in two parts: files side by side, then what needs the machine for itself.
test: $(INSTALLED)
ifeq ($(strip $(TEST_ARGS)),)
	@status=0; \
	$(VENV_PYTHON) -m pytest -n $(TEST_JOBS) --dist loadfile -m 'not alone' tests || status=$$?; \
	$(VENV_PYTHON) -m pytest -m alone || status=$$?; \
	exit $$status
else
	@$(VENV_PYTHON) -m pytest $(TEST_ARGS)
endif

check: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

run: $(INSTALLED)
	@$(VENV_PYTHON) -m course_lib.classroom.notebooks site $(NB)

notebooks: $(INSTALLED)
	@$(VENV_PYTHON) -m course_lib.classroom.notebooks run $(NB)

bench: $(INSTALLED)
	@$(VENV_PYTHON) -m course_lib.bench $(BENCH)

setup: $(INSTALLED)

# An interpreter or pip arguments other than last time's: set up again.
WANTED := $(strip $(PYTHON) $(PIP_ARGS))
ifneq ($(WANTED),)
ifneq ($(WANTED),$(strip $(shell cat $(INSTALLED) 2>/dev/null)))
$(INSTALLED): force
endif
endif

# The stamp is written last, so that an interrupted or failed set-up is taken up again by the next command.
$(INSTALLED): pyproject.toml
	@rm -f $(INSTALLED); \
	stop() { echo "$$*" >&2; exit 1; }; \
	new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	version() { "$$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }; \
	python=$(call quote,$(PYTHON)); \
	if [ -n "$$python" ]; then \
	  found=$$(version "$$python") || stop "PYTHON=$$python does not run: there is no such Python interpreter."; \
	  new_enough "$$python" || stop "PYTHON=$$python is Python $$found; the course needs Python 3.11 or newer."; \
	else \
	  for name in $(LOOK_FOR); do if new_enough $$name; then python=$$name; break; fi; done; \
	fi; \
	if $(VENV_PYTHON) -m pip --version >/dev/null 2>&1 && new_enough $(VENV_PYTHON) && { \
	  [ -z $(call quote,$(PYTHON)) ] || [ "$$(version "$$python")" = "$$(version $(VENV_PYTHON))" ]; }; then :; else \
	  [ -n "$$python" ] || stop "There is no Python 3.11 or newer here (looked for: $(LOOK_FOR))." \
	    "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; \
	  "$$python" -c 'import venv, ensurepip' 2>/dev/null || stop "$$python has no venv module." \
	    "On Debian and Ubuntu: apt install python$$(version "$$python" | cut -d. -f1,2)-venv"; \
	  echo "Setting up .venv with Python $$(version "$$python"): once, some minutes and some gigabytes."; \
	  "$$python" -m venv --clear .venv || stop "$$python could not make the virtual environment .venv (see above)."; \
	fi; \
	$(VENV_PYTHON) -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[test,dev]' \
	  || stop "pip could not install what pyproject.toml lists (see above). Run the command again to take it up" \
	    "where it stopped; behind a proxy, set HTTPS_PROXY; see the troubleshooting in README.md."; \
	if top=$$(git rev-parse --show-cdup 2>/dev/null) && [ -z "$$top" ]; then \
	  git config diff.ipynb.textconv $(call quote,$(TEXTCONV)) || :; \
	fi; \
	echo $(call quote,$(WANTED)) > $(INSTALLED)

# How git shows a notebook in a diff (.gitattributes): its cells as text; the raw file where nbdime is missing.
TEXTCONV = f() { .venv/bin/python -m nbdime.nbshowapp --sources --outputs "$$1" 2>/dev/null || cat "$$1"; }; f

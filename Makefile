PYTHON ?= python3
PORT ?= 8000
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: serve test lint clean

serve: $(INSTALLED)
	$(VENV)/bin/kvlinker serve --port $(PORT)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlinker needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (a few minutes the first time) …"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

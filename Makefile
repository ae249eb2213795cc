# `make demo` runs the demo, `make test` checks everything. Both install what they need first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test docs browser clean

demo: .venv/installed
	@$(BIN)/probprompt demo

test: .venv/installed-dev browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Read it: site/index.html"

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "probprompt needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (PyTorch is several GB; this takes a few minutes the first time) ..."
	@$(PIP) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing what the tests need ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

browser:  # for the tests of the served page; elsewhere they are skipped
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Chromium for the tests ..." \
			&& apt-get -qq update >/dev/null \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
		|| echo "Chromium not found and cannot be installed: the tests of the served page are skipped."

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis

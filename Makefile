# Two commands matter: `make run` answers the question on this machine, `make test` checks the project.
# Each sets itself up: .venv is made when missing and renewed when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRESET ?= quick
STAMP := $(VENV)/.made-from

.PHONY: help run test lab lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make run  [PRESET=smoke|quick|full] [MODEL=folder-or-hub-id] [OUT=folder]   measure this machine, write the report"
	@echo "make test                                                                 run the tests"
	@echo "make lab                                                                  open the workbook in JupyterLab"
	@echo "make lint | format | clean"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 2; }
	rm -rf "$(VENV)"
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	@touch "$(STAMP)"

# MODEL and OUT may hold spaces, so they travel in quotes.
run: $(STAMP)
	"$(BIN)/python" -m gaac_lab.cli run --preset "$(PRESET)" $(if $(MODEL),--model "$(MODEL)") $(if $(OUT),--out "$(OUT)")

test: $(STAMP)
	"$(BIN)/python" -m pytest

lab: $(STAMP)
	"$(BIN)/python" -m gaac_lab.cli fetch-model
	"$(BIN)/python" -m jupyterlab notebooks/00_start_here.ipynb

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/python" -m tests.check_notebooks

format: $(STAMP)
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --fix .

clean:
	rm -rf "$(VENV)" build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

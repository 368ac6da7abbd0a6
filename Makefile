# make demo    a small trained model reads repeated words: in the terminal, and as a page in the browser
# make test    the everyday tests                    make test-all  every test, and the numerical ones as on other processors
# make test-ci the everyday tests, the slow ones of tests/ci.txt, and the numerical ones as on one other processor
# make lint    style and types                       make docs    the documentation, in build/docs
# make site    the gallery of the page, the documentation and the atlas as static files, in build/site
# make bench   the benchmarks, into docs/benchmarks.md
# make browser Debian's Chromium, for the tests of the page, which are skipped without it

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = .venv/bin
unexport PYTHONDONTWRITEBYTECODE # else each of the hundreds of processes that tests start compiles every module again
WORDS = ball dog tree happy water girl door flower
STORY = $(WORDS) $(WORDS) $(WORDS) $(WORDS)
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST = $(BIN)/python -m pytest --quiet --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-ci test-all lint docs site bench browser clean
.DEFAULT_GOAL := demo

demo: .venv/ready
	@mkdir -p build
	@echo 'A small trained model reads repeated words, and this is what its heads do: regard look "$(STORY)"'
	@echo
	@$(BIN)/regard look "$(STORY)" --out build/story.reg --page build/story.html
	@echo
	@echo "All of it is also on a page, a file that needs no network: build/story.html."
	@echo "More in the terminal, in another window: . .venv/bin/activate && regard heads build/story.reg --head 5.4"
	@echo "And the page live, with whatever you type. Open this address in a browser:"
	@$(BIN)/regard serve --model pocket --text "$(STORY)"

test: .venv/ready-for-work
	@echo "Running the everyday tests: some three minutes on two cores."
	@$(PYTEST) -n 2 -m "not slow"

test-ci: .venv/ready-for-work
	@echo "Running the everyday tests, the slow ones of tests/ci.txt, and the numerical ones as on one other processor."
	@$(PYTEST) -n 2 -m "not slow or ci"
	@$(BIN)/python tests/processors.py plain

test-all: .venv/ready-for-work # SHARD=2/6 runs a part of the files
	@echo "Running every test: half an hour or more on two cores."
	@-$(PYTEST) --collect-only >/dev/null # stores bytecode, which each of four processes would otherwise compile for itself
	@$(PYTEST) -n 4 --durations=5 $(if $(SHARD),--shard $(SHARD)) # more processes than cores: many tests wait for a browser, or for another process
	@$(if $(SHARD),,$(BIN)/python tests/processors.py)

lint: .venv/ready-for-work
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: .venv/ready-for-work
	@$(BIN)/python -m sphinx -E -W --keep-going --nitpicky --quiet -b html docs build/docs && echo "build/docs/index.html"

site: .venv/ready-for-work
	@$(BIN)/python -m docs.site build/site

bench: .venv/ready-for-work
	@$(PIP) --editable ".[bench]"
	@$(BIN)/python -m benchmarks

browser:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || { command -v apt-get >/dev/null || { echo "There is no apt-get here: the tests of the page need a chromium on the PATH, and are skipped."; exit 0; }; \
		echo "Installing Debian's Chromium."; \
		DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; \
		sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
		install="$$sudo apt-get -qq install --no-install-recommends fonts-dejavu-core"; \
		{ $$sudo apt-get -qq update && { $$install chromium-headless-shell >/dev/null || $$install chromium >/dev/null; }; } \
		|| echo "Chromium could not be installed: the tests of the page are skipped."; }

clean:
	rm -rf .venv build

.venv/ready: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@echo "Making the environment in .venv; PyTorch is large, so the first time takes a few minutes."
	@$(PYTHON) -m venv .venv
	@$(PIP) $(TORCH)
	@echo "Installing regard."
	@$(PIP) --editable ".[view]"
	@touch .venv/ready

.venv/ready-for-work: .venv/ready
	@echo "Installing what the tests, the documentation and the pictures need."
	@$(PIP) --no-compile --editable ".[dev]" # 14,000 modules; Python compiles those that are imported
	@touch .venv/ready-for-work

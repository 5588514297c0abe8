# make ask      install what the model needs, then answer questions about an example scene
# make demo     install the rest, too, then serve the page on this machine
# make test     lint, type-check and run all tests
# make quick    the tests that start no processes, Ray or browsers, in about two minutes
# make web      test the page of the full model in a browser, and its notebook; takes minutes, needs npm and Chromium
# make coverage which lines of the model's modules (*_traffic_vlm.py) the quick tests run
# make fuzz     the property tests of bad and strange input, with many more examples
# make compat   the tests on every supported release of transformers
# make files    write the JSON and Jinja files that make this folder loadable

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CORE := $(VENV)/.core
SETUP := $(VENV)/.ready
INSTALL := $(PY) -m pip install --quiet -c .ci/constraints.txt
PACKAGES := $(addprefix -p traffic_vlm.,common data evaluation export scripts serving training)
export HF_HUB_OFFLINE := 1

.PHONY: setup ask demo test quick web lint coverage fuzz compat files clean

setup: $(SETUP)

$(CORE): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and f'Python 3.11 or newer is needed, this is {v[0]}.{v[1]}: make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $(CORE)

$(SETUP): $(CORE)
	$(INSTALL) -e ".[dev]"
	@mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/traffic_vlm  # mypy finds the package by this name
	@touch $(SETUP)

ask: $(CORE)
	@$(PY) scripts/ask.py docs/crossing.jpg "Is there a pedestrian?" "Is there a bus?" "Is it night?" \
		"What color is the traffic light?" "Is the traffic light red?" "How many cars are there?" "What is ahead?"

demo: $(SETUP)
	$(PY) app.py

lint: $(SETUP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	MYPYPATH=$(VENV)/src $(VENV)/bin/mypy -m traffic_vlm $(PACKAGES)

test: lint
	$(PY) -m pytest -n 2 --dist worksteal

quick: $(SETUP)
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow"

web: $(SETUP)
	$(PY) -m pytest -m web tests/test_web.py tests/test_notebooks.py

fuzz: $(SETUP)
	$(PY) -m pytest -n 2 --hypothesis-profile fuzz tests/test_fuzz.py

# Only the quick tests: the others fork and kill processes, which can spoil the data.
coverage: $(SETUP)
	$(PY) -m pytest -n 2 -m "not slow" --cov --cov-report=term-missing

compat: $(SETUP)
	$(VENV)/bin/nox -f .ci/noxfile.py

files: $(SETUP)
	$(PY) scripts/build_files.py

clean:
	rm -rf $(VENV) .coverage .hypothesis .mypy_cache .nox .pytest_cache .ruff_cache *.egg-info

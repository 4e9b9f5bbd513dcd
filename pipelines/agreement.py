"""Whether a capture that is asked for is the one that a cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cache.differences import setting_differences
from cache.filling import begin_fill
from cache.manifest import Manifest
from cache.storage import Store
from pipelines.corpus import Corpus, digest_documents, part_ranges
from pipelines.errors import CaptureError
from pipelines.parts import read_part_receipts

# Libraries whose release decides the last bits of a log-prob.
_DECIDING = ("jax", "jaxlib")


def agree(store: Store, wanted: Manifest, corpus: Corpus) -> Manifest:
    """Begins the wanted capture, or takes over an unfinished one that equals it.

    Returns:
      The open manifest, stored, with the wanted run; or the complete one that is there.

    Raises:
      CaptureError: the cache there was made otherwise; names everything that differs.
    """

    def differences(found: Manifest) -> list[str]:
        return list(_differences(store, found, wanted, corpus))

    return begin_fill(store, wanted, differences, CaptureError)


def _differences(store: Store, found: Manifest, wanted: Manifest, corpus: Corpus) -> Iterator[str]:
    yield from settings_apart(found, wanted)
    yield from _corpus_differences(store, found, wanted, corpus)
    if found.state == "open":
        yield from _release_differences(found, wanted)


def settings_apart(found: Manifest, wanted: Manifest) -> Iterator[str]:
    """What differs between a cache and a capture in all but the corpus and the format."""
    wanted = replace(wanted, encoding=wanted.encoding.in_format_of(found.encoding))
    return setting_differences(found.as_read, wanted.as_read)


def work_differences(found: Manifest, wanted: Manifest) -> list[str]:
    """What differs between unfinished work on a finished cache and the work that is wanted."""
    lines = list(setting_differences(found, wanted))
    if found.first_shard != wanted.first_shard:
        lines.append(
            f"it fills the shards from {found.first_shard} on, yours those from "
            f"{wanted.first_shard} on"
        )
    elif found.corpus.get("identity") != wanted.corpus.get("identity"):
        lines.append(f"its documents are of {found.corpus.get('description')}, yours are others")
    return [*lines, *_release_differences(found, wanted)]


def _release_differences(found: Manifest, wanted: Manifest) -> Iterator[str]:
    for name in _DECIDING:
        before, now = found.software.get(name), wanted.software.get(name)
        if before != now:
            yield (
                f"{name}: the unfinished capture was begun with release {before}, this is "
                f"{now}; the last bits may differ. Install {name}=={before} to finish it"
            )


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

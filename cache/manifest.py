"""The manifest: the JSON object that says what a cache is.

It is written first in the state "open", with the id of the run that fills the cache,
and replaced once, at the end, by the "complete" one, which lists every receipt's digest
and the statistics combined from them: opening or summarising a cache of any size reads
this one object. A complete manifest holds no time, place or run: equal captures have
equal manifests. It stays complete from then on: where shards are added to it, or made again,
the open manifest of that work is an object beside it (filling.py).
"""

from __future__ import annotations

import bisect
import builtins
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cache.errors import CacheError, Damage, DamageError
from cache.format import (
    ARRAYS,
    BACKUP,
    COPY_RUN,
    FORMAT,
    MANIFEST,
    RECEIPTS,
    VERSION,
    WIDE_TAILS,
    WORK,
    Encoding,
)
from cache.jsonfields import Fields, as_span, digest, parse_object
from cache.provenance import DERIVED, check_derived
from cache.statistics import Statistics
from cache.storage import Store

State = Literal["open", "complete"]


class OtherFormatError(CacheError):
    """A manifest of a format that this release does not read.

    Attributes:
      edited: whether its content does not have the digest it states either.
    """

    def __init__(self, edited: bool, text: str):
        super().__init__(text)
        self.edited = edited


def _restore(where: str, key: str) -> str:
    """What to do when an object that describes a cache cannot be used."""
    repair = f"`stillroom verify {where} --repair`"
    if key == WORK:
        return (
            f"{repair} removes it: the work is given up and can be begun again; nothing that is "
            "in the cache is lost."
        )
    return (
        f"{repair} restores it from {BACKUP}; without that, restore it from a copy of yours, or "
        "capture again into a new folder."
    )


@dataclass(frozen=True)
class Extent:
    """A run of shards made by one capture: its first shard, its shards and its rows.

    Rows are numbered through the extents in order, so that a later capture can add shards
    without touching a partly filled last one.

    Attributes:
      first_shard, shards, rows: where it is.
      corpus: of an extent that was appended: its documents, as `Manifest.corpus` those of the
        first. They are numbered on after the documents of the extents before.
      accounting: of an extent that was appended: where its tokens went.
    """

    first_shard: int
    shards: int
    rows: int
    corpus: dict[str, Any] | None = None
    accounting: dict[str, Any] | None = None

    @property
    def numbers(self) -> range:
        """Numbers of its shards."""
        return range(self.first_shard, self.first_shard + self.shards)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: Any, what: str) -> Extent:
        """Reads `to_json`; raises CacheError naming the field."""
        fields = Fields(value, what)
        return cls(
            fields.integer("first_shard"),
            fields.integer("shards"),
            fields.integer("rows", 1),
            *(fields.object(name) if name in value else None for name in ("corpus", "accounting")),
        )


@dataclass(frozen=True)
class ReceiptEntry:
    """What the manifest keeps of a receipt: digest, first and last document."""

    sha256: str
    documents: tuple[int, int] | None


@dataclass(frozen=True)
class Manifest:
    """What a cache is.

    Attributes:
      encoding: arrays, types and rounding.
      capture: every other setting that decides the bytes, by option name.
      teacher: description and "fingerprint" of the teacher.
      tokenizer: "fingerprint", and "files": name -> sha256 of what tokenizer/ holds.
      corpus: "identity" (cheap), and once known "documents", "digest" and "parts"; of the
        first extent, or of the one that an open manifest fills.
      software: versions of the libraries that decide the last bits.
      state: "open" or "complete".
      run: the id of the run that fills an open cache; empty in a complete one.
      first_shard, first_document: of an open one: where the extent that it fills begins.
      extents, receipts, accounting, statistics: of a complete cache.
      bytes: total size of each array's files, by name; of a complete cache.
    """

    encoding: Encoding
    capture: dict[str, Any]
    teacher: dict[str, Any]
    tokenizer: dict[str, Any]
    corpus: dict[str, Any]
    software: dict[str, str] = field(default_factory=dict)
    state: State = "open"
    run: str = ""
    first_shard: int = 0
    first_document: int = 0
    extents: tuple[Extent, ...] = ()
    receipts: tuple[ReceiptEntry, ...] = ()
    accounting: dict[str, Any] = field(default_factory=dict)
    statistics: Statistics | None = None
    bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("teacher", "tokenizer"):
            if not isinstance(getattr(self, name).get("fingerprint"), str):
                raise CacheError(f"manifest: {name} should have a fingerprint (a string)")
        files = self.tokenizer.get("files", {})
        if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
            raise CacheError("manifest: the tokenizer's files should be names and digests")
        check_derived(self.capture)
        if self.state == "open":
            if not self.run:
                raise CacheError("manifest: an open cache should name its run")
            return
        if self.run or self.first_shard or self.first_document:
            raise CacheError("manifest: a complete cache should not name a run or a beginning")
        if self.statistics is None or not isinstance(self.corpus.get("digest"), str):
            raise CacheError("manifest: a complete cache should have statistics and corpus digest")
        shard = 0
        for extent in self.extents:
            corpus = extent.corpus or {}
            if extent.first_shard and not (
                isinstance(corpus.get("digest"), str) and isinstance(corpus.get("documents"), int)
            ):
                raise CacheError("manifest: an appended extent should have a corpus of its own")
            if extent.first_shard != shard or extent.shards != self.encoding.shards(extent.rows):
                raise CacheError(
                    f"manifest: the extent {extent.to_json()} should start at shard {shard} "
                    f"and have {self.encoding.shards(extent.rows)} shards"
                )
            shard += extent.shards
        if len(self.receipts) != shard:
            raise CacheError(
                f"manifest: the extents have {shard} shards, but {len(self.receipts)} "
                "receipts are listed"
            )
        if self.statistics.rows != self.rows:
            raise CacheError(
                f"manifest: the extents have {self.rows} rows, "
                f"the statistics {self.statistics.rows}"
            )

    @property
    def rows(self) -> int:
        return sum(extent.rows for extent in self.extents)

    @property
    def shards(self) -> int:
        return sum(extent.shards for extent in self.extents)

    @property
    def stored_rows(self) -> int:
        """Size of the arrays' row axis: up to the end of the last extent's last row."""
        if not self.extents:
            return 0
        last = self.extents[-1]
        return last.first_shard * self.encoding.rows_per_shard + last.rows

    def shard_rows(self, shard: int) -> tuple[int, int]:
        """First and one past the last of a shard's stored rows."""
        for extent in self.extents:
            if shard in extent.numbers:
                base = extent.first_shard * self.encoding.rows_per_shard
                first, end = self.encoding.shard_rows(shard - extent.first_shard, extent.rows)
                return base + first, base + end
        raise CacheError(f"the cache has shards 0 to {self.shards - 1}, not {shard}")

    @property
    def corpora(self) -> list[dict[str, Any]]:
        """The corpus of each extent; none in an open manifest."""
        return [extent.corpus or self.corpus for extent in self.extents]

    @property
    def nothing_drawn(self) -> bool:
        """Whether all entries are exact although the tail is called sampled.

        Captures could once be asked for as many exact entries as there are entries.
        """
        exact = self.capture.get("exact")
        sampled = self.encoding.tail == "sampled"
        return sampled and isinstance(exact, int) and exact >= self.encoding.k

    @property
    def as_read(self) -> Manifest:
        """The manifest with settings that say what the cache holds; of another identity.

        Of a cache of which nothing was drawn, those of exact entries; else the manifest itself.
        """
        if not self.nothing_drawn:
            return self
        encoding = replace(self.encoding, tail="none")
        capture = {**self.capture, "exact": encoding.k, "seed": 0}
        return replace(self, encoding=encoding, capture=capture)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user should know, a sentence or two each."""
        if not self.nothing_drawn:
            return ()
        found = (
            "The tail is called sampled, but nothing was drawn: --exact was all of --k "
            f"{self.encoding.k}. It is read as the exact entries that it holds, and the rest as "
            "one class. That is biased; captured again with a smaller --exact it is not."
        )
        if DERIVED not in self.capture:
            found += (
                " To make shards of it again, give --tail none --temperatures "
                f"{self.encoding.temperatures[0]:g} in place of --tail sampled and --exact."
            )
        return (found,)

    @property
    def command(self) -> str:
        """The command that made the cache; of an open manifest, the one that fills it."""
        if self.run.startswith(COPY_RUN):
            return "copy"
        if self.first_shard:
            return "append"
        return "derive" if DERIVED in self.capture else "precompute"

    @property
    def documents(self) -> int | None:
        """Number of documents in all extents, or in the one being filled and those before."""
        appended = [(extent.corpus or {}).get("documents", 0) for extent in self.extents]
        own = self.corpus.get("documents")
        return self.first_document + own + sum(appended) if isinstance(own, int) else None

    @property
    def identity(self) -> str:
        """Digest of everything that decides the bytes of a shard; receipts carry it.

        Of the first extent, or of the one that an open manifest fills.
        """
        return self._identity(self.corpus)

    @property
    def relative_error(self) -> float:
        """Largest relative rounding error of a stored log-prob of an entry.

        The encoding's, and that of caches of finer rounding that it was derived from.
        """
        stated = self.capture.get(DERIVED, {}).get("relative_error")
        return self.encoding.relative_error if stated is None else float(stated)

    def _identity(self, corpus: dict[str, Any]) -> str:
        return digest(
            {
                "encoding": self.encoding.to_json(),
                "capture": self.capture,
                "teacher": self.teacher["fingerprint"],
                "tokenizer": self.tokenizer["fingerprint"],
                "corpus": corpus.get("digest"),
            }
        )

    def identities(self) -> list[str]:
        """The identity of each extent; of an open manifest, of the one it fills."""
        return [self._identity(corpus) for corpus in self.corpora] or [self.identity]

    def extent_at(self, shard: int) -> int:
        """The number of the extent that a shard is in; 0 in an open manifest."""
        firsts = [extent.first_shard for extent in self.extents]
        return max(bisect.bisect_right(firsts, shard) - 1, 0)

    def with_corpus(self, **known: Any) -> Manifest:
        """The same manifest, knowing more of its corpus."""
        return replace(self, corpus={**self.corpus, **known})

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": list(VERSION),
            "required_features": list(self.encoding.features),
            "state": self.state,
            "encoding": self.encoding.to_json(),
            "capture": self.capture,
            "teacher": self.teacher,
            "tokenizer": self.tokenizer,
            "corpus": self.corpus,
            "software": self.software,
        }
        if self.state == "open":
            begins = {"first_shard": self.first_shard, "first_document": self.first_document}
            return {**content, "run": self.run, **(begins if self.first_shard else {})}
        assert self.statistics is not None
        return {
            **content,
            "arrays": {
                name: {"dtype": spec.dtype, "dimensions": list(spec.dimensions)}
                for name, spec in self.encoding.stored_arrays().items()
            },
            "extents": [extent.to_json() for extent in self.extents],
            "receipts": {
                "sha256": [entry.sha256 for entry in self.receipts],
                "documents": [
                    None if entry.documents is None else list(entry.documents)
                    for entry in self.receipts
                ],
            },
            "accounting": self.accounting,
            "statistics": self.statistics.to_json(),
            "bytes": self.bytes,
        }

    def to_bytes(self) -> builtins.bytes:
        """The manifest as stored: JSON, with the digest of its own content."""
        content = self._content()
        content["digest"] = digest(content)
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: builtins.bytes, where: str, key: str = MANIFEST) -> Manifest:
        """Reads `to_bytes`.

        Raises:
          CacheError: not a manifest of this format, or of a newer version.
          DamageError: the content is not what its digest says.
        """
        what = f"the manifest {where}/{key}"
        try:
            content = parse_object(data, what)
        except CacheError as error:
            raise CacheError(f"{error}. {_restore(where, key)}") from error
        fields = Fields(content, what)
        if content.get("format") != FORMAT:
            raise CacheError(
                f"{what} says format {content.get('format')!r}, expected {FORMAT!r}: not a cache"
            )
        stated = content.pop("digest", None)
        edited = digest(content) != stated
        _check_version(fields, what, edited)
        if not isinstance(stated, str):
            raise CacheError(f"{what}: field 'digest' should be a string, found {stated!r}")
        if edited:
            raise DamageError(
                [Damage(f"{key} was changed: its content does not have the digest it states")],
                _restore(where, key),
            )
        return cls._from_fields(fields, what)

    @classmethod
    def _from_fields(cls, fields: Fields, what: str) -> Manifest:
        state = fields.choice("state", ("open", "complete"))
        common: dict[str, Any] = {
            "encoding": Encoding.from_json(fields.object("encoding"), f"{what}, encoding"),
            **{name: fields.object(name) for name in ("capture", "teacher", "tokenizer", "corpus")},
            "software": {
                name: fields.fields("software").text(name) for name in fields.object("software")
            },
            "state": state,
        }
        if state == "open":
            begins = "first_shard" in fields.value
            return cls(
                **common,
                run=fields.text("run"),
                first_shard=fields.integer("first_shard") if begins else 0,
                first_document=fields.integer("first_document") if begins else 0,
            )
        receipts = fields.fields("receipts")
        digests = receipts.list_of("sha256", str)
        documents = receipts.list_of("documents", (list, type(None)))
        if len(digests) != len(documents):
            raise CacheError(
                f"{what} lists {len(digests)} digests and {len(documents)} document ranges"
            )
        return cls(
            **common,
            extents=tuple(
                Extent.from_json(item, f"{what}, extent")
                for item in fields.list_of("extents", dict)
            ),
            receipts=tuple(
                ReceiptEntry(sha, None if span is None else as_span(span, f"{what}, documents"))
                for sha, span in zip(digests, documents, strict=True)
            ),
            accounting=fields.object("accounting"),
            statistics=Statistics.from_json(fields.object("statistics"), f"{what}, statistics"),
            bytes={name: fields.fields("bytes").integer(name) for name in fields.object("bytes")},
        )


def _check_version(fields: Fields, what: str, edited: bool) -> None:
    version = fields.list_of("version", int)
    if len(version) != 2:
        raise CacheError(f"{what} has the version {version}; expected two numbers.")
    if version[0] != VERSION[0]:
        raise OtherFormatError(
            edited,
            f"{what} has format version {'.'.join(map(str, version))}; this Stillroom reads "
            f"version {VERSION[0]}.x. Update Stillroom to read a newer cache.",
        )
    unknown = sorted(set(fields.list_of("required_features", str)) - {WIDE_TAILS})
    if unknown:
        raise OtherFormatError(
            edited,
            f"{what} requires features that this Stillroom does not have: {', '.join(unknown)}. "
            "Update Stillroom.",
        )


def read_manifest(store: Store) -> tuple[Manifest, bytes]:
    """The manifest of the cache at a place, and its generation for `Store.replace`.

    Raises:
      CacheError: there is no cache there.
    """
    data, generation = store.read_versioned(MANIFEST)
    if data is None:
        raise CacheError(
            f"{store.location} is not a cache: it has no {MANIFEST}. {_what_is_there(store)}"
        )
    return Manifest.from_bytes(data, store.location), generation


def _what_is_there(store: Store) -> str:
    local = store.local
    if local is None:
        return "Check the address."
    if not local.exists():
        return (
            "There is no such folder. Check the path, or make a cache with `stillroom precompute`."
        )
    if not local.is_dir():
        return "It is a file; a cache is a folder."
    names: Sequence[str] = sorted(path.name for path in local.iterdir())[:5]
    if ARRAYS in names and RECEIPTS in names:
        advice = _restore(store.location, MANIFEST)
        return f"But it holds {ARRAYS}/ and {RECEIPTS}/: a cache that lost it. {advice}"
    return f"It holds: {', '.join(names) or 'nothing'}. Check the path."

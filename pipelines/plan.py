"""What a worker needs to do its share of a capture: small, picklable, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.manifest import Manifest
from cache.storage import Store
from pipelines.corpus import CorpusSettings
from pipelines.layout import LayoutSettings
from pipelines.options import PrecomputeOptions
from pipelines.parts import PartSettings, parts_folder
from pipelines.targets import TargetSettings


@dataclass(frozen=True)
class Plan:
    """A capture under way.

    Attributes:
      store: where the cache goes.
      options: what was asked for.
      manifest: the open manifest; it names this run.
      corpus: how to open the corpus.
      parts: how documents become rows.
      holes: ids below the vocabulary that no token has.
      laid: rows and sha256 of every part, in order; empty until the parts are laid.
      finished: the complete manifest of the cache, if shards are added to it or made again.
    """

    store: Store
    options: PrecomputeOptions
    manifest: Manifest
    corpus: CorpusSettings
    parts: PartSettings
    holes: tuple[int, ...] = ()
    laid: tuple[tuple[int, str], ...] = ()
    finished: Manifest | None = None

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def rows(self) -> int:
        """Rows of the extent that is filled; known when the parts are laid."""
        return sum(rows for rows, _ in self.laid)

    @property
    def first_row(self) -> int:
        """Where the extent begins on the arrays' row axis."""
        return self.manifest.first_shard * self.manifest.encoding.rows_per_shard

    @property
    def stored_rows(self) -> int:
        """Where the extent ends on the arrays' row axis."""
        return self.first_row + self.rows

    @property
    def shards(self) -> range:
        """Numbers of the extent's shards."""
        first = self.manifest.first_shard
        return range(first, first + self.manifest.encoding.shards(self.rows))

    @property
    def parts_folder(self) -> str:
        return parts_folder(self.manifest.first_shard)

    @property
    def elsewhere(self) -> set[int]:
        """Numbers of the cache's shards that are of other extents."""
        known = range(0 if self.finished is None else self.finished.shards)
        return set(known) - set(self.shards)

    @property
    def targets(self) -> TargetSettings:
        manifest = self.manifest.as_read
        encoding, capture = manifest.encoding, manifest.capture
        return TargetSettings(
            k=encoding.k,
            exact=capture["exact"],
            tail=encoding.tail,
            temperatures=encoding.temperatures,
            vocabulary=encoding.vocabulary,
            seed=capture["seed"],
            chunk=self.options.chunk,
        )


def layout_settings(options: PrecomputeOptions) -> LayoutSettings:
    return LayoutSettings(kind=options.layout, length=options.length, overlap=options.overlap)


def corpus_settings(options: PrecomputeOptions) -> CorpusSettings:
    return CorpusSettings(
        dataset=options.dataset,
        name=options.name,
        split=options.split,
        revision=options.revision,
        column=options.column,
        limit=options.limit,
        text_unit=options.text_unit,
    )


def options_of(manifest: Manifest, **given: Any) -> PrecomputeOptions:
    """The options of a capture like the one that a cache is of.

    Args:
      manifest: of the cache.
      given: what the manifest does not say (dataset, teacher, out), or should be otherwise.
    """
    manifest = manifest.as_read
    encoding, capture = manifest.encoding, manifest.capture
    # Options that do nothing beside these are left out.
    sampled, rounded = encoding.tail == "sampled", encoding.logprobs == "rounded"
    copied = ("layout", "overlap", "documents_per_part", "precision", "micro_batch", "chunk")
    settings: dict[str, Any] = {
        **{name: capture[name] for name in copied},
        "vocabulary": encoding.vocabulary,
        "length": encoding.length,
        "bos": "on" if capture["bos"] else "off",
        "eos": "on" if capture["eos"] else "off",
        "k": encoding.k,
        "exact": capture["exact"] if sampled else None,
        "tail": encoding.tail,
        "temperatures": encoding.temperatures,
        "seed": capture["seed"] if sampled else None,
        "logprobs": encoding.logprobs,
        "mantissa_bits": encoding.mantissa_bits if rounded else None,
        "rows_per_shard": encoding.rows_per_shard,
        "shard_teacher": capture["teacher_devices"] > 1,
    }
    return PrecomputeOptions(**{**settings, **given})

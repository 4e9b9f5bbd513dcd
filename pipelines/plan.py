"""What a worker needs to do its share of a capture: small, picklable, without weights."""

from __future__ import annotations

from dataclasses import dataclass

from cache.manifest import Manifest
from cache.storage import Store
from pipelines.corpus import CorpusSettings
from pipelines.layout import LayoutSettings
from pipelines.options import PrecomputeOptions
from pipelines.parts import PartSettings
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
    """

    store: Store
    options: PrecomputeOptions
    manifest: Manifest
    corpus: CorpusSettings
    parts: PartSettings
    holes: tuple[int, ...] = ()
    laid: tuple[tuple[int, str], ...] = ()

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def rows(self) -> int:
        """Rows of the cache; known when the parts are laid."""
        return sum(rows for rows, _ in self.laid)

    @property
    def targets(self) -> TargetSettings:
        encoding = self.manifest.encoding
        return TargetSettings(
            k=encoding.k,
            exact=self.manifest.capture["exact"],
            tail=encoding.tail,
            temperatures=encoding.temperatures,
            vocabulary=encoding.vocabulary,
            seed=self.manifest.capture["seed"],
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
